"""The serving engines' kernels: hand-worked trees, random trees, and the distribution of the sampled walk."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_triton import integrators
from eagle_triton.operands.integrators import TreeMaskMode
from eagle_triton.reference import integrators as reference

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def signed(value):
    """Unsigned words as torch can compare them."""
    return value.view({torch.uint16: torch.int16, torch.uint32: torch.int32}.get(value.dtype, value.dtype)).cpu()


def assert_same(out, expected):
    for value, other in zip(out, expected, strict=True):
        assert value.dtype == other.dtype
        assert torch.equal(signed(value), signed(other))


def drafted(batch, k, depth, nodes, seed, ties=False):
    """(parent_list, top_scores_index) as drafting leaves them: closed under parents unless scores say otherwise."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape):
        values = -torch.rand(*shape, generator=source)
        return (values * 4).round() if ties else values

    level, scores, parents, start = draw(batch, k), [], [torch.full((batch, 1), -1)], 0
    for _ in range(depth - 1):
        scores.append(level)
        chosen = level.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        parents.append(chosen + start)
        start += level.shape[1]
        level = (level.gather(1, chosen)[:, :, None] + draw(batch, k, k)).flatten(1)
    scores = torch.cat((*scores, level), dim=1)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : nodes - 1]
    parent_list = torch.cat(parents, dim=1) if depth > 1 else torch.zeros(batch, 0, dtype=torch.int64)
    return parent_list, best.sort(dim=-1).values


def build(module, device, root, parent_list, chosen, tokens, lengths, k, depth, mode, status=None):
    arguments = [value.to(device) for value in (root, parent_list, chosen, tokens, lengths)]
    nodes = chosen.shape[1] + 1
    return module.build_tree_efficient_triton(*arguments, int(lengths.sum()), k, depth, nodes, mode, status=status)


def test_hand_worked_tree(device):
    """k 2, D 2: candidates 0, 1 under the root, 2, 3 under candidate 1 (the better one), 4, 5 under candidate 0."""
    root, lengths = torch.tensor([7]), torch.tensor([3])
    parent_list, chosen = torch.tensor([[-1, 1, 0]]), torch.tensor([[0, 1, 2, 4]])
    tokens = torch.tensor([[10, 11, 12, 14]])
    for module in (reference, integrators):
        arguments = (module, device, root, parent_list, chosen, tokens, lengths, 2, 2)
        full, positions, index, next_token, next_sibling, rows = build(*arguments, TreeMaskMode.FULL_MASK)
        block = torch.tensor(
            [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 1, 0, 0, 1]], dtype=torch.bool
        )
        assert torch.equal(full.cpu().view(5, 8), torch.cat((torch.ones(5, 3, dtype=torch.bool), block), dim=1))
        assert torch.equal(build(*arguments, TreeMaskMode.QLEN_ONLY)[0].cpu().view(5, 5), block)
        packed = build(*arguments, TreeMaskMode.QLEN_ONLY_BITPACKING)[0]
        assert packed.dtype == torch.uint8 and packed.tolist() == [0b1, 0b11, 0b101, 0b1101, 0b10011]
        assert positions.tolist() == [3, 4, 4, 5, 5] and rows.tolist() == [7, 10, 11, 12, 14]
        assert index.tolist() == [[0, 1, 2, 3, 4]]
        assert next_token.tolist() == [[1, 4, 3, -1, -1]] and next_sibling.tolist() == [[-1, 2, -1, -1, -1]]


SHAPES = [(1, 2, 1, 1), (3, 3, 2, 4), (2, 8, 2, 4), (2, 9, 8, 2), (3, 16, 4, 4), (2, 17, 4, 4), (3, 31, 4, 7)]
SHAPES += [(2, 32, 4, 7), (1, 33, 4, 7), (2, 60, 10, 7), (1, 5, 1, 7), (17, 7, 2, 4)]
SHAPES += [(64, 60, 10, 7), (256, 33, 8, 4)] if CUDA else []


@pytest.mark.parametrize("mode", list(TreeMaskMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize(("batch", "nodes", "k", "depth"), SHAPES)
def test_build(device, batch, nodes, k, depth, mode):
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING and nodes > 32:
        pytest.skip("a word holds 32 nodes")
    parent_list, chosen = drafted(batch, k, depth, nodes, nodes, ties=batch % 2 == 0)
    source = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 9 if mode == TreeMaskMode.FULL_MASK else 131072, (batch,), generator=source)
    lengths[0] = 0
    root, tokens = torch.randint(99, (2, batch), generator=source)[0].int(), chosen + 100
    arguments = (root, parent_list, chosen, tokens, lengths.int(), k, depth, mode)
    counts = [torch.full((batch,), 9, dtype=torch.int32, device=where) for where in (device, "cpu")]
    out = build(integrators, device, *arguments, counts[0])
    expected = build(reference, "cpu", *arguments, counts[1])
    assert_same(out, expected)
    assert counts[0].tolist() == counts[1].tolist() == [0] * batch


def test_orphans_are_counted_and_harmless(device):
    parent_list, _ = drafted(2, 3, 3, 6, 0)
    chosen = torch.tensor([[0, 3, 6, 9, 12], [5, 8, 11, 14, 20]])  # few parents are chosen
    for mode in TreeMaskMode:
        arguments = (torch.tensor([1, 2]), parent_list, chosen, chosen, torch.tensor([2, 5]), 3, 3, mode)
        counts = [torch.zeros(2, dtype=torch.int32, device=where) for where in (device, "cpu")]
        assert_same(build(integrators, device, *arguments, counts[0]), build(reference, "cpu", *arguments, counts[1]))
        assert counts[0].tolist() == counts[1].tolist()
        assert counts[1].sum() > 0


def outputs(batch, nodes, steps, device):
    predicts = torch.full((batch * nodes,), -7, dtype=torch.int32, device=device)
    accept_index = torch.full((batch, steps), -1, dtype=torch.int32, device=device)
    return predicts, accept_index, torch.full((batch,), 55, dtype=torch.int32, device=device)


def test_hand_worked_walk(device):
    """Two requests; the sibling chain of the second descends: node 3, then 1."""
    candidates = torch.tensor([[5, 1, 2, 3], [5, 8, 9, 4]])
    index = torch.arange(8).view(2, 4)
    next_token = torch.tensor([[1, 3, -1, -1], [3, 2, -1, -1]])
    next_sibling = torch.tensor([[-1, 2, -1, -1], [-1, -1, -1, 1]])
    target = torch.tensor([[1, 3, 0, 6], [8, 7, 0, 0]])
    for module, where in ((reference, "cpu"), (integrators, device)):
        moved = [value.to(where) for value in (candidates, index, next_token, next_sibling, target)]
        predicts, accept_index, count = module.verify_tree_greedy_triton(*outputs(2, 4, 4, where), *moved)
        assert count.tolist() == [2, 1]
        assert accept_index.tolist() == [[0, 1, 3, -1], [4, 5, -1, -1]]
        assert predicts.tolist() == [1, 3, -7, 6, 8, 7, -7, -7]


def walk_case(seed, batch, k, depth, nodes, vocabulary):
    """A built tree, tokens of a small vocabulary and targets that often name a child."""
    source = torch.Generator().manual_seed(seed)
    parent_list, chosen = drafted(batch, k, depth, nodes, seed)
    lengths = torch.ones(batch, dtype=torch.int64)
    built = build(reference, "cpu", lengths, parent_list, chosen, chosen, lengths, k, depth, 1)
    links = built[2:5]
    candidates = torch.randint(vocabulary, (batch, nodes), generator=source)
    target = torch.randint(vocabulary, (batch, nodes), generator=source)
    child = links[1].clamp(min=0)
    sibling = links[2].gather(1, child)
    child = torch.where((torch.rand(batch, nodes, generator=source) < 0.5) & (sibling > 0), sibling, child)
    target = torch.where(links[1] >= 0, candidates.gather(1, child), target)
    return candidates, links, target, source


@settings(max_examples=20 if CUDA else 8, deadline=None)
@given(data=st.data())
def test_walks_of_any_tree(data):
    batch, k, depth = data.draw(st.sampled_from([1, 2, 5])), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    nodes = data.draw(st.integers(2, min(33, 1 + k + (depth - 1) * k * k)))
    steps = data.draw(st.sampled_from([1, 2, depth + 1, nodes]))
    vocabulary = data.draw(st.sampled_from([2, 9, 30]))
    candidates, links, target, source = walk_case(data.draw(st.integers(0, 999)), batch, k, depth, nodes, vocabulary)
    tree, moved = (candidates, *links), [value.to(DEVICE) for value in (candidates, *links)]
    expected = reference.verify_tree_greedy_triton(*outputs(batch, nodes, steps, "cpu"), *tree, target)
    out = integrators.verify_tree_greedy_triton(*outputs(batch, nodes, steps, DEVICE), *moved, target.to(DEVICE))
    assert_same(out, expected)

    distribution = torch.softmax(2 * torch.randn(batch, nodes, vocabulary, generator=source), dim=-1)
    coins, final = torch.rand(batch, nodes, generator=source), torch.rand(batch, generator=source)
    thresholds = data.draw(st.sampled_from([(1.0, 1.0), (0.4, 1.0), (1.0, 0.5), (0.0, 0.0)]))
    used = [torch.zeros_like(distribution), torch.zeros_like(distribution, device=DEVICE)]
    expected = reference.tree_speculative_sampling_target_only(
        *outputs(batch, nodes, steps, "cpu"), *tree, coins, final, distribution, used[0], *thresholds
    )
    out = integrators.tree_speculative_sampling_target_only(
        *outputs(batch, nodes, steps, DEVICE),
        *moved,
        *(value.to(DEVICE) for value in (coins, final, distribution)),
        used[1],
        *thresholds,
    )
    assert_same(out, expected)
    assert torch.equal(used[1].cpu(), used[0])


def test_bad_links_end(device):
    """Cycles and indices out of range stop the walk instead of hanging it."""
    candidates, index = torch.tensor([[1, 2, 3]]), torch.arange(3)[None]
    next_token, next_sibling = torch.tensor([[1, 7, 1]]), torch.tensor([[-1, 2, 1]])
    target = torch.tensor([[9, 9, 9]])
    moved = [value.to(device) for value in (candidates, index, next_token, next_sibling, target)]
    out = integrators.verify_tree_greedy_triton(*outputs(1, 3, 3, device), *moved)
    expected = reference.verify_tree_greedy_triton(
        *outputs(1, 3, 3, "cpu"), candidates, index, next_token, next_sibling, target
    )
    assert_same(out, expected)
    assert out[2].item() == 0


def test_both_spellings_and_aliases(device):
    candidates, links, target, _ = walk_case(3, 2, 2, 3, 6, 5)
    moved = [value.to(device) for value in (candidates, *links, target)]
    expected = integrators.verify_tree_greedy_func(*outputs(2, 6, 4, device), *moved)
    for spelling in ("retrive", "retrieve"):
        names = (f"{spelling}_index", f"{spelling}_next_token", f"{spelling}_next_sibling")
        named = dict(zip(names, moved[1:4], strict=True), candidates=moved[0], target_predict=moved[4])
        assert_same(integrators.verify_tree_greedy_triton(*outputs(2, 6, 4, device), **named), expected)
    assert integrators.build_tree_kernel_efficient is integrators.build_tree_efficient_triton


def test_sampled_walk_follows_the_target():
    """Root distribution [.5, .2, .2, .1], siblings {0, 2}, grandchild under 0: tokens follow the target (lossless)."""
    batch = 100_000 if CUDA else 4000
    module, where = (integrators, "cuda") if CUDA else (reference, "cpu")
    source = torch.Generator().manual_seed(0)
    distribution = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.6, 0.0, 0.3], [0.25] * 4, [0.7, 0.1, 0.1, 0.1]])
    tree = [torch.tensor([[0, 0, 2, 1]]), torch.arange(4)[None]]
    tree += [torch.tensor([[1, 3, -1, -1]]), torch.tensor([[-1, 2, -1, -1]])]
    moved = [value.expand(batch, -1).contiguous().to(where) for value in tree]
    moved[1] = moved[1] + 4 * torch.arange(batch, device=where)[:, None]
    coins, final = torch.rand(batch, 4, generator=source).to(where), torch.rand(batch, generator=source).to(where)
    probs = distribution.expand(batch, 4, 4).contiguous().to(where)
    predicts, accept_index, count = module.tree_speculative_sampling_target_only(
        *outputs(batch, 4, 3, where), *moved, coins, final, probs, torch.zeros_like(probs)
    )
    tolerance = 0.01 if CUDA else 0.04
    first = predicts[accept_index[:, 0].long()]
    assert (first.bincount(minlength=4).cpu() / batch - distribution[0]).abs().sum() / 2 < tolerance
    deep = (count >= 1) & (first == 0)
    second = predicts[accept_index[deep, 1].long()]
    assert (second.bincount(minlength=4).cpu() / deep.sum().cpu() - distribution[1]).abs().sum() / 2 < tolerance


def test_edges_of_the_sampled_walk(device):
    """A coin of 0 takes no token of mass 0; duplicates count once; refused mass gone, the argmax is taken."""
    candidates = torch.tensor([[0, 1, 1, 2]]).repeat(3, 1)
    index = torch.arange(12).view(3, 4)
    next_token, next_sibling = torch.tensor([[1, -1, -1, -1]]).repeat(3, 1), torch.tensor([[-1, 2, 3, -1]]).repeat(3, 1)
    distribution = torch.tensor([[0.5, 0.0, 0.0, 0.5], [0.0, 0.3, 0.0, 0.7], [0.0, 0.9999999, 0.0, 0.0]])
    coins, final = torch.tensor([0.0, 0.5, 1.0])[:, None].repeat(1, 4), torch.tensor([0.0, 0.9, 0.9])
    for module, where in ((reference, "cpu"), (integrators, device)):
        probs = distribution[:, None].repeat(1, 4, 1).to(where)
        moved = [value.to(where) for value in (candidates, index, next_token, next_sibling, coins, final)]
        predicts, _, count = module.tree_speculative_sampling_target_only(
            *outputs(3, 4, 3, where), *moved, probs, torch.zeros_like(probs)
        )
        assert count.tolist() == [0, 0, 0]
        assert predicts[::4].tolist() == [0, 3, 1]


def test_thresholds_of_zero_take_the_first_child_whatever_its_mass(device):
    """As SGLang's own test of it: the path of first children, through a token of mass 0."""
    candidates, index = torch.tensor([[9, 3, 1, 2]]), torch.arange(4)[None]
    next_token, next_sibling = torch.tensor([[1, 3, -1, -1]]), torch.tensor([[-1, 2, -1, -1]])
    coins, final = torch.full((1, 4), 0.5), torch.tensor([0.5])
    distribution = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])  # token 1 alone: the refused sibling
    for module, where in ((reference, "cpu"), (integrators, device)):
        probs = distribution.repeat(1, 4, 1).to(where)
        moved = [value.to(where) for value in (candidates, index, next_token, next_sibling, coins, final)]
        arguments = (*moved, probs, torch.zeros_like(probs))
        predicts, accept_index, count = module.tree_speculative_sampling_target_only(
            *outputs(1, 4, 4, where), *arguments, 0.0, 0.0
        )
        assert count.tolist() == [2] and accept_index.tolist() == [[0, 1, 3, -1]]
        assert predicts.tolist() == [3, 2, -7, 1]
        *_, count = module.tree_speculative_sampling_target_only(*outputs(1, 4, 4, where), *arguments)
        assert count.tolist() == [1]  # at 1 the token of mass 0 is passed by


def test_tensors_on_a_cpu_take_the_reference_unless_the_interpreter_is_on(monkeypatch):
    """No kernel is launched for them, by position or by name."""

    def no_launch(*_):
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(integrators, "launch", no_launch)
    parent_list, chosen = drafted(2, 2, 3, 6, 0)
    lengths, mode = torch.ones(2, dtype=torch.int64), TreeMaskMode.QLEN_ONLY
    arguments = ("cpu", lengths, parent_list, chosen, chosen, lengths, 2, 3, mode)
    monkeypatch.setattr(integrators, "_interpreted", lambda: True)
    with pytest.raises(AssertionError, match="launched"):
        build(integrators, *arguments)
    monkeypatch.setattr(integrators, "_interpreted", lambda: False)
    assert_same(build(integrators, *arguments), build(reference, *arguments))
    candidates, links, target, _ = walk_case(3, 2, 2, 3, 6, 5)
    expected = reference.verify_tree_greedy_triton(*outputs(2, 6, 4, "cpu"), candidates, *links, target)
    names = ("predicts", "accept_index", "accept_token_num", "candidates", "retrieve_index", "retrieve_next_token")
    values = (*outputs(2, 6, 4, "cpu"), candidates, *links, target)
    named = dict(zip((*names, "retrieve_next_sibling", "target_predict"), values, strict=True))
    assert_same(integrators.verify_tree_greedy_triton(**named), expected)


@pytest.mark.parametrize("module", [integrators, reference], ids=["kernel", "reference"])
def test_refusals(device, module):
    parent_list, chosen = (value.to(device) for value in drafted(2, 2, 3, 6, 0))
    root, lengths = torch.zeros(2, dtype=torch.int64, device=device), torch.ones(2, dtype=torch.int32, device=device)
    good = (root, parent_list, chosen, chosen, lengths, 2, 2, 3, 6)
    for place, value in ((0, root.float()), (1, parent_list[:, 1:]), (2, chosen.int()), (3, chosen[:1]), (8, 12)):
        with pytest.raises(ValueError, match="build_tree"):
            module.build_tree_efficient_triton(*good[:place], value, *good[place + 1 :])
    with pytest.raises(ValueError, match="tree_mask_mode"):
        module.build_tree_efficient_triton(*good, 3)
    wide = torch.arange(32, device=device).repeat(2, 1)
    with pytest.raises(ValueError, match="32"):
        module.build_tree_efficient_triton(
            root, torch.zeros(2, 13, dtype=torch.int64, device=device), wide, wide, lengths, 2, 4, 4, 33, 2
        )
    candidates, links, target, _ = walk_case(3, 2, 2, 3, 6, 5)
    moved = [value.to(device) for value in (candidates, *links, target)]
    out = outputs(2, 6, 4, device)
    for place, value in ((0, out[0].long()), (1, out[1][:1]), (3, moved[0].int()), (7, moved[4][:, :2])):
        arguments = [*out, *moved]
        arguments[place] = value
        with pytest.raises(ValueError, match="verify_tree_greedy"):
            module.verify_tree_greedy_triton(*arguments)
    probs, coins = torch.zeros(2, 6, 5, device=device), torch.zeros(2, 6, device=device)
    for bad in (
        (coins.double(), coins[:, 0].contiguous(), probs, probs),
        (coins, coins[:, 0].contiguous(), probs, probs[:1]),
    ):
        with pytest.raises(ValueError, match="tree_speculative_sampling"):
            module.tree_speculative_sampling_target_only(*out, *moved[:4], *bad)


@pytest.mark.parametrize("mode", list(TreeMaskMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize(("batch", "nodes", "k", "depth"), [(1, 5, 1, 7), (3, 16, 4, 4), (2, 31, 4, 7), (2, 9, 8, 2)])
def test_build_in_place(device, batch, nodes, k, depth, mode):
    """Longer buffers keep their ends, a full mask keeps the prefix's columns; the rest is the built tree."""
    parent_list, chosen = drafted(batch, k, depth, nodes, nodes)
    lengths = torch.tensor([2, 0, 5][:batch])
    built = build(reference, "cpu", lengths, parent_list, chosen, chosen, lengths, k, depth, mode)
    packed = mode == TreeMaskMode.QLEN_ONLY_BITPACKING
    for module, where in ((reference, "cpu"), (integrators, device)):
        dtypes = {built[0].dtype} | (set() if packed else {torch.uint8})
        for dtype in dtypes:
            mask = torch.zeros(len(built[0]) + 9, dtype=dtype, device=where)
            positions = torch.full((batch * nodes + 4,), -5, device=where)
            links = [torch.full((batch, nodes), -5, device=where) for _ in range(3)]
            inputs = [value.to(where) for value in (parent_list, chosen, lengths)]
            module.build_tree_in_place(*inputs, mask, positions, *links, k, depth, nodes, mode)
            assert_same([positions[: batch * nodes], *links], built[1:5])
            assert (positions[batch * nodes :] == -5).all() and not signed(mask)[len(built[0]) :].any()
            expected = signed(built[0]).clone()
            if mode == TreeMaskMode.FULL_MASK:
                start = 0
                for length in lengths.tolist():
                    end = start + nodes * (length + nodes)
                    expected[start:end].view(nodes, -1)[:, :length] = False
                    start = end
            assert torch.equal(signed(mask)[: len(expected)].to(expected.dtype), expected)
            if dtype == torch.uint8:
                assert mask.max() <= 1 or packed


@pytest.mark.parametrize("module", [integrators, reference], ids=["kernel", "reference"])
def test_refusals_in_place(device, module):
    parent_list, chosen = (value.to(device) for value in drafted(2, 2, 3, 6, 0))
    lengths = torch.ones(2, dtype=torch.int64, device=device)
    links = torch.zeros(3, 2, 6, dtype=torch.int64, device=device)
    positions, mask = (
        torch.zeros(12, dtype=torch.int64, device=device),
        torch.zeros(72, dtype=torch.bool, device=device),
    )
    good = (parent_list, chosen, lengths, mask, positions, *links, 2, 3, 6, 1)
    module.build_tree_in_place(*good)
    for place, value, name in (
        (0, parent_list[:, 1:], "parent_list"),
        (3, mask[:71], "tree_mask"),
        (3, mask.float(), "tree_mask"),
        (4, positions[:11], "positions"),
        (4, positions.int(), "positions"),
        (5, links[0, :1], "retrive_index"),
        (7, links[0].t(), "retrive_next_sibling"),
        (11, 3, "tree_mask_mode"),
    ):
        with pytest.raises(ValueError, match=f"build_tree: {name}"):
            module.build_tree_in_place(*good[:place], value, *good[place + 1 :])
    with pytest.raises(ValueError, match="tree_mask"):  # a packed word of 6 nodes is one byte
        module.build_tree_in_place(*good[:3], mask.int(), *good[4:-1], 2)
