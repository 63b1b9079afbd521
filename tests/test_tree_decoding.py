"""Top-k, beam expansion and tree building: the kernels against the reference."""

import heapq

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_triton import tree_decoding
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.operands.ancestors import ancestor_matrix
from eagle_triton.reference import tree_decoding as reference

CUDA = torch.cuda.is_available()
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def grown(batch, k, widths, seed=0, quantum=None):
    """Candidates, scores and beam slots as drafting leaves them; `quantum` rounds scores, for ties."""
    source = generator(seed)

    def draw(*shape):
        values = -torch.randn(*shape, generator=source).abs()
        return values if quantum is None else (values / quantum).round() * quantum

    level, scores, slots, start, first = draw(batch, k), [], [], 0, 0
    for width in (*widths, 0):
        scores.append(level)
        if not width:
            break
        chosen = level.sort(dim=-1, descending=True, stable=True).indices[:, :width]
        slots.append(chosen + start)
        start, first = k * (1 + first), first + width
        level = (level.gather(1, chosen)[:, :, None] + draw(batch, width, k)).flatten(1)
    scores = torch.cat(scores, dim=1)
    slots = torch.cat(slots, dim=1) if slots else torch.zeros(batch, 0, dtype=torch.int64)
    return torch.randint(1000, scores.shape, generator=source), scores, slots


def assert_same(out, expected):
    for value, other in zip(out, expected, strict=True):
        assert value.dtype == other.dtype
        assert torch.equal(value.cpu(), other)


TOP_K = [(1, 1, 1), (3, 7, 7), (2, 513, 10), (4, 1500, 33), (2, 70, 64)]
TOP_K += [(10, 32000, 10), (3, 128256, 64), (2, 151936, 8)] if CUDA else []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocabulary", "k"), TOP_K)
def test_topk(device, rows, vocabulary, k, dtype):
    logits = (3 * torch.randn(rows, vocabulary, generator=generator())).to(dtype)
    values, tokens = tree_decoding.topk(logits.to(device), k)
    expected, indices = reference.topk(logits, k)
    assert torch.equal(tokens.cpu(), indices)
    torch.testing.assert_close(values.cpu(), expected, rtol=1e-6, atol=1e-5)
    assert not torch.allclose(torch.zeros_like(expected), expected, atol=1e-5) or vocabulary == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_topk_ties_and_values_out_of_range(device, dtype):
    logits = torch.randn(7, 1200, generator=generator()).round().to(dtype)
    logits[1], logits[2], logits[2, 1::2] = float("-inf"), 0.0, -0.0
    logits[3, 5], logits[4, 9], logits[5, 3:] = float("nan"), float("inf"), float("-inf")
    logits[6] = torch.finfo(dtype).smallest_normal * torch.arange(-600, 600).to(dtype)  # close to each other
    values, tokens = tree_decoding.topk(logits.to(device), 10)
    expected, indices = reference.topk(logits, 10)
    assert torch.equal(tokens.cpu(), indices)
    torch.testing.assert_close(values.cpu(), expected, rtol=1e-6, atol=1e-5)


def test_topk_strides_offsets_and_wide_k(device):
    logits = torch.randn(3, 400, generator=generator()).to(device)
    offsets = torch.randint(1000, (200,), generator=generator()).to(device)
    for view in (logits[:, ::2], logits.view(6, 200)[::2]):
        expected, indices = reference.topk(view, 5, offsets=offsets)
        values, tokens = tree_decoding.topk(view, 5, offsets=offsets)
        assert torch.equal(tokens, indices)
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(tree_decoding.topk(logits, 100)[1], reference.topk(logits, 100)[1])


@pytest.mark.parametrize("fixed", [False, True], ids=["best", "fixed"])
@pytest.mark.parametrize(
    ("batch", "nodes", "k", "width", "words"),
    [(1, 1, 10, 10, 2), (2, 10, 10, 10, 2), (3, 4, 5, 3, 1), (2, 3, 3, 0, 1), (2, 33, 32, 32, 3)],
)
def test_expand_beam(device, batch, nodes, k, width, words, fixed):
    source = generator()
    scores = torch.randn(batch, nodes, generator=source).round()
    log_probs = torch.randn(batch, nodes, k, generator=source).round()
    ancestors = torch.randint(-(2**62), 2**62, (batch, nodes, words), generator=source)
    tokens = torch.randint(1000, (batch, nodes * k), generator=source)
    selected = torch.randperm(nodes * k, generator=source)[:width] if fixed else None
    expected = reference.expand_beam(scores, log_probs, tokens, ancestors, 3, width, selected)
    inputs = (value.to(device) for value in (scores, log_probs, tokens, ancestors))
    moved = None if selected is None else selected.to(device)
    assert_same(tree_decoding.expand_beam(*inputs, 3, width, moved), expected)
    for b, chosen in enumerate(expected.chosen.tolist()):
        assert expected.tokens[b].tolist() == [tokens[b, child] for child in chosen]
        assert expected.scores[b].tolist() == [expected.child_scores[b, child] for child in chosen]
        assert expected.parents[b].tolist() == [child // k for child in chosen]


@pytest.mark.parametrize("width", [0, 3], ids="width {}".format)
@pytest.mark.parametrize("module", [tree_decoding, reference], ids=["kernel", "reference"])
def test_expand_beam_fills_its_part_of_all_candidates(device, module, width):
    scores, log_probs = torch.randn(3, 2, device=device), torch.randn(3, 2, 4, device=device)
    ancestors = torch.zeros(3, 2, 1, dtype=torch.int64, device=device)
    tokens = torch.arange(48, device=device).view(3, 16)[:, ::2]
    everything = [torch.full((3, size), 77, device=device) for size in (20, 20, 9)]
    everything[1] = everything[1].float()
    out = (everything[0][:, 4:12], everything[1][:, 4:12], everything[2][:, 2 : 2 + width])
    alone = module.expand_beam(scores, log_probs, tokens, ancestors, 2, width)
    grown = module.expand_beam(scores, log_probs, tokens, ancestors, 2, width, first_candidate=4, out=out)
    assert_same(grown, [value.cpu() for value in alone._replace(chosen=alone.chosen + 4)])
    assert_same(out, [value.cpu() for value in (tokens, alone.child_scores, alone.chosen + 4)])
    for whole, first, count in zip(everything, (4, 4, 2), (8, 8, width), strict=True):
        assert (whole[:, :first] == 77).all() and (whole[:, first + count :] == 77).all()
    for wrong in (
        (out[0][:, 1:], *out[1:]),
        (out[0], out[1].double(), out[2]),
        (*out[:2], everything[2][:, :5]),
        (everything[0].t()[:8].t().contiguous().t().contiguous().t(), *out[1:]),
    ):
        with pytest.raises(ValueError, match="expand_beam: .*out"):
            module.expand_beam(scores, log_probs, tokens, ancestors, 2, width, out=wrong)


def test_expand_beam_takes_nan_as_the_worst(device):
    log_probs = torch.tensor([[[float("nan"), -1.0, float("-inf"), -2.0]]], device=device)
    zeros, tokens = torch.zeros(1, 1, 1, dtype=torch.int64, device=device), torch.arange(4, device=device)[None]
    for module in (tree_decoding, reference):
        grown = module.expand_beam(torch.zeros(1, 1, device=device), log_probs, tokens, zeros, 0, 4)
        assert grown.chosen.tolist() == grown.tokens.tolist() == [[1, 3, 0, 2]]


def test_expand_beam_strides(device):
    scores, log_probs = torch.randn(4, 6, device=device).t()[:3, ::2], torch.randn(3, 4, 4, device=device)[:, ::2, ::2]
    ancestors = torch.ones(3, 2, 3, dtype=torch.int64, device=device)[..., :2]
    tokens = torch.arange(48, device=device).view(3, 16)[:, ::2][:, :4]
    expected = reference.expand_beam(scores, log_probs, tokens, ancestors, 0, 3)
    out = tree_decoding.expand_beam(scores, log_probs, tokens, ancestors, 0, 3)
    assert_same(out, [value.cpu() for value in expected])


BUILD = [(1, 3, (2,)), (2, 1, (1,)), (7, 3, (3, 3)), (26, 4, (4,) * 4), (60, 10, (10,) * 7), (64, 10, (10,) * 7)]
BUILD += [(65, 10, (10,) * 7), (130, 10, (10,) * 13), (4, 1, (1, 1, 1)), (8, 8, ()), (101, 10, (10,))]


@pytest.mark.parametrize("quantum", [None, 0.5], ids=["distinct", "ties"])
@pytest.mark.parametrize(("nodes", "k", "widths"), BUILD, ids=[f"N={case[0]} K={case[1]}" for case in BUILD])
def test_build_tree(device, nodes, k, widths, quantum):
    candidates, scores, slots = grown(2, k, widths, nodes, quantum)
    root = torch.tensor([5, 6])
    expected = reference.build_tree(root, candidates, scores, slots, nodes, k)
    moved = [value.to(device) for value in (root, candidates, scores, slots)]
    assert_same(tree_decoding.build_tree(*moved, nodes, k), expected)
    place = tuple(torch.full_like(value, 77, device=device) for value in expected)
    assert tree_decoding.build_tree(*moved, nodes, k, out=place) is place
    assert_same(place, expected)
    sequences = torch.full((2, 12), 99)
    sequences[0, 4], sequences[1, 11] = root
    lengths = torch.tensor([4, 13], dtype=torch.int32)  # beyond the end it is the last token
    assert_same(reference.build_tree(sequences, candidates, scores, slots, nodes, k, lengths=lengths), expected)
    turned, lengths = sequences.t().contiguous().t().to(device), lengths.to(device)
    assert_same(tree_decoding.build_tree(turned, *moved[1:], nodes, k, lengths=lengths), expected)


def check_tree(tokens, parents, depths, ancestors, depth):
    """A tree is closed under parents, children come after parents, and masks follow the links."""
    nodes = tokens.shape[1]
    matrix = ancestor_matrix(ancestors, nodes)
    for b in range(len(tokens)):
        assert parents[b, 0] == -1 and depths[b, 0] == 0
        for i in range(nodes):
            line, node = set(), i
            while node >= 0:
                assert node == 0 or parents[b, node] < node
                line.add(node)
                node = int(parents[b, node])
            assert depths[b, i] == len(line) - 1 <= depth
            assert set(matrix[b, i].nonzero().flatten().tolist()) == line


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_build_tree_of_any_scores(data):
    device = "cuda" if CUDA else "cpu"
    k, levels = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 4))
    widths = tuple(data.draw(st.integers(1, k)) for _ in range(levels))
    count = k * (1 + sum(widths))
    nodes = data.draw(st.integers(1, count + 1))
    quantum = data.draw(st.sampled_from([None, 0.25, 2.0]))
    candidates, scores, slots = grown(2, k, widths, data.draw(st.integers(0, 1000)), quantum)
    root = torch.tensor([1, 2])
    expected = reference.build_tree(root, candidates, scores, slots, nodes, k)
    check_tree(*expected, levels + 1)
    moved = [value.to(device) for value in (root, candidates, scores, slots)]
    assert_same(tree_decoding.build_tree(*moved, nodes, k), expected)


def test_build_tree_takes_nan_and_minus_infinity_as_the_worst(device):
    candidates, scores, slots = grown(1, 3, (3,))
    scores[0, 2], scores[0, 9:] = float("nan"), float("-inf")
    slots[0] = torch.tensor([0, 1, 2])
    root = torch.zeros(1, dtype=torch.int64)
    expected = reference.build_tree(root, candidates, scores, slots, 9, 3)
    assert_same(
        tree_decoding.build_tree(*(value.to(device) for value in (root, candidates, scores, slots)), 9, 3), expected
    )
    check_tree(*expected, 2)


def test_build_fixed_tree(device):
    spec = TreeSpec.fixed([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]])
    candidates = torch.arange(spec.candidates).repeat(2, 1) + 100
    slots = torch.tensor(spec.beam_candidates).expand(2, -1)
    selected = torch.tensor(spec.selected)
    scores, root = torch.zeros(2, spec.candidates), torch.tensor([1, 2])
    expected = reference.build_tree(root, candidates, scores, slots, spec.nodes, spec.top_k, selected)
    moved = [value.to(device) for value in (root, candidates, scores, slots)]
    assert_same(tree_decoding.build_tree(*moved, spec.nodes, spec.top_k, selected.to(device)), expected)
    assert expected[1][0].tolist() == [-1, 0, 0, 1, 1, 2, 3, 3]


def lattice(batch, levels, width, k, seed=0, quantum=None):
    """Log-probabilities, tokens and rows of a random one; `quantum` rounds log-probabilities, for ties."""
    source = generator(seed)
    log_probs = (2 * torch.randn(batch, levels, width, k + 3, generator=source)).log_softmax(-1)
    log_probs = log_probs if quantum is None else (log_probs / quantum).round() * quantum
    log_probs = log_probs.sort(-1, descending=True).values[..., :k].contiguous()
    tokens, rows = (torch.randint(most, log_probs.shape, generator=source) for most in (1000, width))
    return log_probs, tokens, None if width == 1 else rows


def by_a_heap(log_probs, tokens, nodes, rows):
    """Tokens, parents, depths and scores of one lattice's best nodes, by a heap of all children of what was taken."""
    heap, found = [], [(-1, -1, 0, np.float32(0))]

    def push(node, level, row, score):
        if level < len(log_probs):
            for rank, log_prob in enumerate(log_probs[level, row]):
                heapq.heappush(heap, (-np.float32(score + log_prob), level, node, row, rank))

    push(0, 0, 0, np.float32(0))
    while len(found) < nodes:
        minus, level, parent, row, rank = heapq.heappop(heap)
        push(len(found), level + 1, 0 if rows is None else rows[level, row, rank], -minus)
        found.append((tokens[level, row, rank], parent, level + 1, -minus))
    return [list(column) for column in zip(*found, strict=True)]


@pytest.mark.parametrize("quantum", [None, 0.5], ids=["distinct", "ties"])
@pytest.mark.parametrize("width", [1, 3], ids=["alike", "by row"])
def test_best_first_trees_are_those_of_a_heap(device, width, quantum):
    log_probs, tokens, rows = lattice(250, 4, width, 3, width, quantum)
    expected = reference.best_first_tree(torch.full((250,), -1), log_probs, tokens, 12, rows)
    for one in range(250):
        found = by_a_heap(*(None if part is None else part[one].numpy() for part in (log_probs, tokens)), 12,
                          None if rows is None else rows[one].numpy())  # fmt: skip
        for got, want in zip(found, (expected[i][one].tolist() for i in (0, 1, 2, 4)), strict=True):
            assert got == want
    few = [None if part is None else part[:9].to(device) for part in (log_probs, tokens, rows)]
    by_kernel = tree_decoding.best_first_tree(torch.full((9,), -1, device=device), *few[:2], 12, few[2])
    assert_same(by_kernel, [part[:9] for part in expected])
    check_tree(*(part[:20] for part in expected[:4]), 4)
    assert expected[2].amax() == 4 and (expected[1] == 0).sum(1).amax() == 3


BEST_FIRST = [(7, 4, 1, 3, 10, None), (7, 3, 3, 3, 12, 0.5), (2, 5, 1, 1, 6, None), (1, 15, 1, 5, 70, 0.25)]
BEST_FIRST += [(3, 2, 1, 3, 13, 1.0), (2, 1, 1, 5, 2, None)]  # all paths there are; one draft
BEST_FIRST += [(8, 15, 1, 16, nodes, 0.125) for nodes in (16, 64, 128, 256)] if CUDA else []


@pytest.mark.parametrize(("batch", "levels", "width", "k", "nodes", "quantum"), BEST_FIRST, ids=str)
def test_best_first_tree(device, batch, levels, width, k, nodes, quantum):
    log_probs, tokens, rows = lattice(batch, levels, width, k, nodes, quantum)
    log_probs[0, -1, :, 1:] = float("-inf")
    root = torch.arange(5, 5 + batch)
    expected = reference.best_first_tree(root, log_probs, tokens, nodes, rows)
    moved = [None if part is None else part.to(device) for part in (log_probs, tokens, rows)]
    log_probs, tokens, rows = moved
    out = tree_decoding.best_first_tree(root.to(device), log_probs, tokens, nodes, rows)
    assert_same(out, expected)
    sequences, lengths = torch.full((batch, 9), 99), torch.arange(batch, dtype=torch.int32) + 3
    sequences.scatter_(1, lengths.long().clamp(max=8)[:, None], root[:, None])
    place = tuple(torch.full_like(part, 77) for part in out[:4])
    for module in (reference, tree_decoding):
        again = module.best_first_tree(
            sequences.to(device), log_probs, tokens, nodes, rows, lengths=lengths.to(device), out=place
        )
        assert all(one is other for one, other in zip(again, place, strict=False))
        assert_same(again, expected)


@pytest.mark.parametrize("module", [tree_decoding, reference], ids=["kernel", "reference"])
def test_refusals(device, module):
    logits = torch.zeros(2, 5, device=device)
    for arguments in ((logits, 0), (logits, 6)):
        with pytest.raises(ValueError, match="topk: k must be in"):
            module.topk(*arguments)
    with pytest.raises(ValueError, match="offsets"):
        module.topk(logits, 2, offsets=torch.zeros(4, dtype=torch.int64, device=device))
    if module is tree_decoding:
        with pytest.raises(ValueError, match="logits"):
            module.topk(logits.double(), 2)
    scores, log_probs = torch.zeros(2, 3, device=device), torch.zeros(2, 3, 4, device=device)
    words = torch.zeros(2, 3, 1, dtype=torch.int64, device=device)
    tokens = torch.zeros(2, 12, dtype=torch.int64, device=device)
    for arguments in (
        (scores[:1], log_probs, tokens, words, 0, 2),
        (scores, log_probs.half(), tokens, words, 0, 2),
        (scores, log_probs, tokens[:, 1:], words, 0, 2),
        (scores, log_probs, tokens, words.int(), 0, 2),
        (scores, log_probs, tokens, words, 0, 13),
        (scores, log_probs, tokens, words, 60, 5),
        (scores, log_probs, tokens, words, 0, 2, torch.zeros(3, dtype=torch.int64, device=device)),
    ):
        with pytest.raises(ValueError, match="expand_beam"):
            module.expand_beam(*arguments)
    candidates, scores, slots = (value.to(device) for value in grown(2, 3, (3,)))
    root = torch.zeros(2, dtype=torch.int64, device=device)
    for arguments in (
        (root, candidates, scores, slots, 14, 3),
        (root[:1], candidates, scores, slots, 5, 3),
        (root, candidates.int(), scores, slots, 5, 3),
        (root, candidates, scores.double(), slots, 5, 3),
        (root, candidates, scores, slots, 5, 3, root),
        (root.to("meta"), candidates, scores, slots, 5, 3),
    ):
        with pytest.raises(ValueError, match="build_tree"):
            module.build_tree(*arguments)
    log_probs, tokens, rows = (part.to(device) for part in lattice(2, 2, 2, 3))
    for arguments, message in (
        ((root, log_probs, tokens, 14, rows), "nodes=14 needs at least 13 paths; 2 levels of 3 give 12"),
        ((root, log_probs, tokens, 1, rows), "nodes must be at least 2"),
        ((root, log_probs, tokens, 5), "with 2 rows in a level, rows must be given"),
        ((root, log_probs.double(), tokens, 5, rows), "log_probs must be"),
        ((root, log_probs, tokens[:, :1], 5, rows), "tokens must be"),
        ((root, log_probs, tokens, 5, rows.int()), "rows must be"),
        ((root[:1], log_probs, tokens, 5, rows), "root must be"),
    ):
        with pytest.raises(ValueError, match=f"best_first_tree: {message}"):
            module.best_first_tree(*arguments)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    for source, where in ((root, lengths), (words[..., 0], lengths.long()), (words[..., 0], None), (words, lengths)):
        with pytest.raises(ValueError, match="build_tree: (root|lengths)"):
            module.build_tree(source, candidates, scores, slots, 5, 3, lengths=where)
