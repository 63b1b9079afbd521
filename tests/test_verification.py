"""Verification: the kernels against the reference, and the sampled walks against the distribution they must follow."""

import itertools
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.state import Tree
from eagle_triton.engine.step import Mode, verify
from eagle_triton.operands.verification import ACCEPT_POLICIES, VERIFY_STRATEGIES, Stops, Verification
from eagle_triton.ops import verification
from eagle_triton.reference import sampling
from eagle_triton.reference import verification as reference
from tests import test_sampling

CUDA = torch.cuda.is_available()
SIZES = [(1, 11, 0), (7, 50, 3), (26, 300, 5), (60, 40, 8), (64, 30, 6), (65, 100, 8)]
SIZES += [(60, 128256, 8), (64, 32000, 8)] if CUDA else []
MODULES = verification, reference


make_params = partial(test_sampling.make_params, step=3)


def random_tree(batch, nodes, depth, source):
    """Parents of random trees: a parent's index is below its child's, no node deeper than `depth`."""
    parents = torch.full((batch, nodes), -1, dtype=torch.int32)
    depths = torch.zeros(batch, nodes, dtype=torch.int64)
    for b in range(batch):
        for i in range(1, nodes):
            open_nodes = (depths[b, :i] < depth).nonzero().flatten()
            parent = open_nodes[torch.randint(len(open_nodes), (), generator=source)]
            parents[b, i], depths[b, i] = parent, depths[b, parent] + 1
    return parents


def fill(parents, likely, vocabulary, source, share=0.6):
    """Tokens, many of them what the target says after the parent."""
    tokens = torch.randint(vocabulary, parents.shape, generator=source)
    follow = likely.cpu().gather(1, parents.clamp(min=0).long())
    return torch.where(torch.rand(parents.shape, generator=source) < share, follow, tokens)


def assert_same(out, expected, slack=0):
    """Paths and accepted are equal, next tokens but for `slack` that rounding at a filter's boundary may change."""
    for value, other in zip(out[:2], expected[:2], strict=True):
        assert value.dtype == other.dtype and torch.equal(value, other)
    assert out[2].dtype == expected[2].dtype and (out[2] != expected[2]).sum() <= slack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("nodes", "vocabulary", "depth"), SIZES)
def test_greedy(device, nodes, vocabulary, depth, dtype):
    source = torch.Generator().manual_seed(nodes)
    logits = (2 * torch.randn(2, nodes, vocabulary, generator=source)).round().to(dtype).to(device)  # many ties
    parents = random_tree(2, nodes, max(depth, 1), source)
    tokens = fill(parents, logits.argmax(-1), vocabulary, source).to(device)
    nan = torch.ones(2, dtype=torch.bool, device=device)
    out = verification.verify_greedy(logits, tokens, parents.to(device), depth, nan=nan)
    assert_same(out, reference.verify_greedy(logits, tokens, parents.to(device), depth))
    assert not nan.any()


def test_greedy_with_nan_and_infinity(device):
    logits = torch.randn(4, 3, 40, generator=torch.Generator().manual_seed(0)).to(device)
    logits[0, 1, 7], logits[1, 0, 9], logits[2, 0] = float("nan"), float("inf"), float("-inf")
    logits[3, 0, 5], logits[3, 0, 30] = float("inf"), float("nan")
    tokens = torch.tensor([[1, 7, 2], [1, 9, 3], [1, 0, 2], [1, 30, 5]], device=device)
    parents = torch.tensor([[-1, 0, 1]] * 4, dtype=torch.int32, device=device)
    flags = [torch.zeros(4, dtype=torch.bool, device=device) for _ in range(2)]
    out = verification.verify_greedy(logits, tokens, parents, 2, nan=flags[0])
    assert_same(out, reference.verify_greedy(logits, tokens, parents, 2, nan=flags[1]))
    assert flags[0].tolist() == flags[1].tolist() == [True, False, False, True]


def test_strided_logits_and_tree(device):
    source = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 10, 60, generator=source).to(device)[:, ::2, ::2]
    parents = random_tree(3, 5, 3, source)
    tokens = fill(parents, logits.argmax(-1), 30, source)
    wide = [torch.stack((value, value), dim=-1).to(device)[..., 0] for value in (tokens, parents)]
    params = make_params(3, device)
    for name, more in (("verify_greedy", ()), ("verify_sampling", (params,))):
        assert_same(*(getattr(module, name)(logits, *wide, 3, *more) for module in MODULES))


FILTERS = {
    "plain": {},
    "top_p": {"top_p": 0.9},
    "everything": {"top_k": 6, "top_p": 0.9, "min_p": 0.05},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 4, "temperature": 0.7},
    "min_p": {"min_p": 0.2},
    "hot": {"top_p": 0.99, "temperature": 3.0},
}
CASES = [(size, name) for size in SIZES for name in FILTERS if CUDA or size[0] == 7]
CASES += [] if CUDA else [(SIZES[0], "everything"), (SIZES[0], "greedy"), (SIZES[-1], "min_p")]


def sampled_trees(size, filters, device):
    """Logits, random trees without tokens, parameters, flags that hold True, and the generator that made them."""
    nodes, vocabulary, depth = size
    source = torch.Generator().manual_seed(nodes)
    batch = 4 if CUDA else 1 + (nodes < 20)
    logits = (2.5 * torch.randn(batch, nodes, vocabulary, generator=source)).bfloat16().to(device)
    parents = random_tree(batch, nodes, max(depth, 1), source)
    nan = torch.ones(batch, dtype=torch.bool, device=device)
    return logits, parents, make_params(batch, device, **FILTERS[filters]), nan, source


@pytest.mark.parametrize(("size", "filters"), CASES, ids=[f"N={size[0]} V={size[1]} {name}" for size, name in CASES])
def test_sampling(device, size, filters):
    """Every coin is the reference's, so the walk is; the final token may differ by rounding at a boundary."""
    nodes, vocabulary, depth = size
    logits, parents, params, nan, source = sampled_trees(size, filters, device)
    tokens = fill(parents, logits.argmax(-1), vocabulary, source).to(device)
    arguments = (logits, tokens, parents.to(device), depth, params, nodes % 2 == 0)
    out = verification.verify_sampling(*arguments, nan=nan)
    assert_same(out, reference.verify_sampling(*arguments), 1 if vocabulary > 1000 else 0)
    assert not nan.any()


def test_sampling_mixes_greedy_and_sampled_sequences(device):
    source = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 9, 30, generator=source).to(device)
    parents = random_tree(4, 9, 4, source)
    tokens, parents = fill(parents, logits.argmax(-1), 30, source).to(device), parents.to(device)
    params = make_params(4, device)
    params.temperature.copy_(torch.tensor([0.0, 1.0, 0.0, 0.5]))
    out, expected = (module.verify_sampling(logits, tokens, parents, 4, params) for module in MODULES)
    greedy = reference.verify_greedy(logits, tokens, parents, 4)
    assert_same(out, expected)
    assert all(torch.equal(value[::2], argmax[::2]) for value, argmax in zip(out, greedy, strict=True))


def test_siblings_that_share_a_token(device):
    logits = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(1)).to(device).expand(20, -1, -1)
    tokens = torch.tensor([[0, 2, 2, 1, 2]], device=device).expand(20, -1)
    parents = torch.tensor([[-1, 0, 0, 0, 1]], dtype=torch.int32, device=device).expand(20, -1)
    params = make_params(20, device)
    out, expected = (module.verify_sampling(logits, tokens, parents, 2, params) for module in MODULES)
    assert_same(out, expected)
    assert not (out[0] == 2).any()


def test_all_mass_refused_by_rounding(device):
    """Children hold all mass, yet the coin passes their sum: the whole distribution is drawn from."""
    logits = torch.tensor([[[0.0, 0.0, float("-inf")]] * 3], device=device)
    tokens = torch.tensor([[2, 0, 1]], device=device)
    parents = torch.tensor([[-1, 0, 0]], dtype=torch.int32, device=device)
    params = make_params(1, device)
    out, expected = (module.verify_sampling(logits, tokens, parents, 0, params) for module in MODULES)
    assert_same(out, expected)
    assert out[2].item() in (0, 1)


@settings(max_examples=40 if CUDA else 6, deadline=None)
@given(data=st.data())
def test_any_tree(data):
    device = "cuda" if CUDA else "cpu"
    nodes, vocabulary = data.draw(st.integers(1, 33 if CUDA else 9)), data.draw(st.integers(1, 20))
    depth = data.draw(st.integers(0, 5))
    source = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(2, nodes, vocabulary, generator=source).half().to(device)
    parents = random_tree(2, nodes, max(depth, 1), source)
    tokens, parents = fill(parents, logits.argmax(-1), vocabulary, source, 0.8).to(device), parents.to(device)
    params = make_params(2, device, top_p=data.draw(st.sampled_from([1.0, 0.7])), seed=data.draw(st.integers(0, 99)))
    for name, more in (("verify_greedy", ()), ("verify_sampling", (params,))):
        out, expected = (getattr(module, name)(logits, tokens, parents, depth, *more) for module in MODULES)
        assert_same(out, expected)
        path, accepted, _ = out
        for b in range(2):
            count = int(accepted[b])
            assert (path[b, count + 1 :] == -1).all() and path[b, 0] == 0
            assert all(parents[b, path[b, i + 1]] == path[b, i] for i in range(count))


# ------------------------------------------------------------------------------ target match, top-p, the first path


def depths_of(parents):
    """[B, N] int32 from the parents of trees."""
    depths = torch.zeros_like(parents)
    for node in range(1, parents.shape[1]):
        depths[:, node] = depths.gather(1, parents[:, node : node + 1].long().clamp(min=0))[:, 0] + 1
    return depths


def placed(parents, source, device):
    """lengths and depths of trees somewhere in sequences."""
    lengths = torch.randint(1000, (len(parents),), generator=source, dtype=torch.int32)
    return lengths.to(device), depths_of(parents).to(device)


@contextmanager
def poisoned():
    """Memory that nobody has written holds NaN and the largest integers."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


PLACED = [((2, 5000, 1), "top_p"), ((2, 5000, 1), "plain"), *CASES]  # the former are of several parts


@pytest.mark.parametrize(("size", "filters"), PLACED, ids=[f"N={size[0]} V={size[1]} {name}" for size, name in PLACED])
def test_target_match(device, size, filters):
    nodes, vocabulary, depth = size
    logits, parents, params, nan, source = sampled_trees(size, filters, device)
    lengths, depths = placed(parents, source, device)
    where = (params, lengths, depths, nodes % 2 == 0)
    noise = sampling.gumbel(params, lengths[:, None] + depths + 1, vocabulary)
    samples = [sampling.gumbel_sample(logits[:, n], noise[:, n], params, nodes % 2 == 0) for n in range(nodes)]
    tokens = fill(parents, torch.stack(samples, dim=1), vocabulary, source, 0.8).to(device)
    parents = parents.to(device)
    expected = reference.verify_target_match(logits, tokens, parents, depth, *where)
    with poisoned():
        out = verification.verify_target_match(logits, tokens, parents, depth, *where, nan=nan)
    assert_same(out, expected, 1 if vocabulary > 1000 else 0)
    assert not nan.any()
    if filters in ("plain", "greedy"):
        for module in MODULES:
            assert_same(module.verify_target_match(logits, tokens, parents, depth, *where, filtered=False), expected)


TOPP = [(*case, limits) for case in PLACED for limits in ((0, 0), (0, 2), (2, 2)) if CUDA or limits == (2, 2)]
TOPP += [] if CUDA else [(SIZES[1], name, limits) for name in ("plain", "top_p") for limits in ((0, 0), (0, 2))]


@pytest.mark.parametrize(("size", "filters", "limits"), TOPP, ids=lambda value: str(value).replace(", ", "-"))
def test_topp(device, size, filters, limits):
    nodes, vocabulary, depth = size
    logits, parents, params, nan, source = sampled_trees(size, filters, device)
    best = logits.topk(min(4, vocabulary), dim=-1).indices
    choice = torch.randint(best.shape[-1], (len(logits), nodes, 1), generator=source).to(device)
    choice = torch.where(torch.rand(choice.shape, generator=source).to(device) < 0.5, 0, choice)
    tokens = fill(parents, best.gather(2, choice)[..., 0], vocabulary, source, 0.9).to(device)
    arguments = (logits, tokens, parents.to(device), depth, params, *placed(parents, source, device))
    expected = reference.verify_topp(*arguments, nodes % 2 == 0, *limits)
    with poisoned():
        out = verification.verify_topp(*arguments, nodes % 2 == 0, *limits, nan=nan)
    assert_same(out, expected, 1 if vocabulary > 1000 else 0)
    assert not nan.any()


@pytest.mark.parametrize("limits", [None, (), (0, 2)], ids=["rejection", "match", "topp of two"])
def test_walks_over_logits_that_tie(device, limits):
    """Each draft is judged by whether its index stays, not by its logit alone."""
    source = torch.Generator().manual_seed(36)
    batch, nodes, vocabulary, depth = 3, 6, 8, 3
    logits = torch.randint(-1, 2, (batch, nodes, vocabulary), generator=source).to(device, torch.bfloat16)
    parents = random_tree(batch, nodes, depth, source)
    params = make_params(batch, device, top_p=0.7, seed=20)
    kept = sampling.probabilities(logits, params) > 0
    tied = logits == torch.where(kept, logits, torch.inf).amin(-1, keepdim=True)
    assert ((tied & kept).any(-1) & (tied & ~kept).any(-1)).float().mean() > 0.5
    tokens = torch.where(tied, torch.rand(tied.shape, generator=source).to(device), -1).argmax(-1)
    tokens = fill(parents, tokens, vocabulary, source, 0.9).to(device)
    arguments = (logits, tokens, parents.to(device), depth, params)
    name = "verify_sampling"
    if limits is not None:
        arguments += (*placed(parents, source, device), False, *limits)
        name = "verify_topp" if limits else "verify_target_match"
    out, expected = (getattr(module, name)(*arguments) for module in MODULES)
    assert_same(out, expected)
    assert (out[1] > 0).any() and (out[1] < depth).any()


@pytest.mark.parametrize("operation", ["verify_target_match", "verify_topp"])
def test_placed_walks_with_nan_strides_and_mixed_temperatures(device, operation):
    source = torch.Generator().manual_seed(3)
    batch, nodes, depth = 6, 6, 3
    logits = torch.randn(batch, 2 * nodes, 60, generator=source).to(device)[:, ::2, ::2]
    parents = random_tree(batch, nodes, depth, source)
    tokens = fill(parents, logits.argmax(-1), 30, source).to(device)
    lengths, depths = placed(parents, source, device)
    wide = [torch.stack((value, value), dim=-1).to(device)[..., 0] for value in (tokens, parents, depths)]
    params = make_params(batch, device, top_p=0.8)
    params.temperature.copy_(torch.tensor([0.0, 1.0, 0.0, 0.5, 1.0, 0.0]))
    logits[4, 3, 7], logits[5, 0, 2] = float("nan"), float("nan")
    logits[2, 1], logits[2, 2, 5] = float("-inf"), float("inf")
    outs, flags = [], [torch.zeros(batch, dtype=torch.bool, device=device) for _ in range(2)]
    for module, nan in zip(MODULES, flags, strict=True):
        with poisoned():
            call = getattr(module, operation)
            outs.append(call(logits, *wide[:2], depth, params, lengths, wide[2], nan=nan))
    whole = ~flags[1]
    assert flags[0].tolist() == flags[1].tolist() == [False] * 4 + [True] * 2
    assert all(torch.equal(value[whole], other[whole]) for value, other in zip(*outs, strict=True))
    greedy = reference.verify_greedy(logits, tokens, parents.to(device), depth)
    cold = whole & (params.temperature == 0)
    assert all(torch.equal(value[cold], other[cold]) for value, other in zip(outs[0], greedy, strict=True))
    for path, accepted, next_token in outs:  # a NaN may lead anywhere, but not outside
        assert ((path >= -1) & (path < nodes)).all() and ((accepted >= 0) & (accepted <= depth)).all()
        assert ((next_token >= 0) & (next_token < 30)).all()


@pytest.mark.parametrize(
    ("strategy", "filters"),
    [
        ("target_match", {}),
        ("target_match", {"top_k": 3, "min_p": 0.1}),
        ("rejection", {"top_p": 0.8}),
        ("rejection", {"temperature": 2.0}),
    ],
)
def test_seeds_follow_the_law(device, strategy, filters):
    """Both tokens of a walk over 100,000 seeds against exact enumeration: total variation < 0.01 and a chi-square."""
    batch, vocabulary = 100_000, 6
    logits = torch.randn(1, 6, vocabulary, generator=torch.Generator().manual_seed(4))
    tokens, parents = torch.tensor([[0, 3, 1, 5, 0, 2]]), torch.tensor([[-1, 0, 0, 1, 1, 2]], dtype=torch.int32)
    for row in range(6):  # what follows a token is the same whether it was drafted or not
        logits[0, row] = logits[0, [0, 1, 2, 3, 3, 3][row]]
    module, where = (verification, device) if CUDA else (reference, "cpu")
    drafted = [value.expand(batch, *value.shape[1:]).to(where) for value in (logits, tokens, parents)]
    params = make_params(batch, where, **filters)
    if strategy == "target_match":
        lengths = torch.full((batch,), 17, dtype=torch.int32, device=where)
        depths = depths_of(parents).expand(batch, -1).to(where)
        out = module.verify_target_match(*drafted, 2, params, lengths, depths, filtered=bool(filters))
    else:
        out = module.verify_sampling(*drafted, 2, params)
    path, accepted, following = (value.cpu() for value in out)
    laws = sampling.probabilities(logits, make_params(1, "cpu", **filters))[0].double()
    said = tokens.expand(batch, -1).gather(1, path.clamp(min=0).long())
    first = torch.where(accepted > 0, said[:, 1], following)
    check_counts(first.bincount(minlength=vocabulary), laws[0])
    for node, token in ((1, 3), (2, 1)):
        taken = path[:, 1] == node
        assert bool(taken.any()) == bool(laws[0, token] > 0)
        if taken.any():
            second = torch.where(accepted > 1, said[:, 2], following)[taken]
            check_counts(second.bincount(minlength=vocabulary), laws[node])
    assert (accepted == 2).any()


def check_counts(counts, law):
    """Total variation < 0.01, a chi-square whose chance is above 1e-4, and nothing outside the support."""
    total = counts.sum()
    assert (counts[law == 0] == 0).all()
    assert (counts / total - law).abs().sum() / 2 < 0.01
    kept = law > 0
    statistic = ((counts - total * law)[kept] ** 2 / (total * law)[kept]).sum()
    assert statistic < {1: 1e-6, 2: 15.2, 3: 18.5, 4: 21.2, 5: 23.6, 6: 25.8}[int(kept.sum())]


def test_samples_of_neighbouring_positions_and_seeds_are_independent():
    """Of 4 x 4 outcomes, at two positions and with two seeds: a chi-square of the joint counts."""
    count, vocabulary = 100_000, 4
    params = make_params(1, "cpu")
    noise = sampling.gumbel(params, torch.arange(count + 1, dtype=torch.int32)[None], vocabulary)[0]
    other = sampling.gumbel(make_params(1, "cpu", seed=2), torch.arange(count, dtype=torch.int32)[None], vocabulary)[0]
    law = torch.full((16,), 1 / 16, dtype=torch.float64)
    for following in (noise[1:], other):
        joint = noise[:-1].argmax(-1) * vocabulary + following.argmax(-1)
        statistic = ((joint.bincount(minlength=16) - count * law) ** 2 / (count * law)).sum()
        assert statistic < 44.3  # a chance of 1e-4 with 15 degrees of freedom


@settings(max_examples=40 if CUDA else 6, deadline=None)
@given(data=st.data())
def test_target_match_does_not_see_the_tree(data):
    """Tokens are those of plain decoding: a table of logits by last token, trees of any drafts over it."""
    vocabulary, steps = 7, 6
    source = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    table = 1.5 * torch.randn(vocabulary, vocabulary, generator=source)
    params = make_params(1, "cpu", seed=data.draw(st.integers(0, 99)), top_p=data.draw(st.sampled_from([1.0, 0.8])))

    def decode(nodes, depth):
        text, accepts = [3], 0
        while len(text) < 1 + steps:
            parents = random_tree(1, nodes, max(depth, 1), source)
            tokens = torch.randint(vocabulary, (1, nodes), generator=source)
            tokens[0, 0] = text[-1]
            lengths = torch.tensor([len(text) - 1], dtype=torch.int32)
            where = (parents, depth, params, lengths, depths_of(parents))
            path, accepted, following = reference.verify_target_match(table[tokens], tokens, *where)
            accepts += int(accepted)
            text += [int(tokens[0, node]) for node in path[0, 1 : 1 + int(accepted)]] + [int(following)]
        return text[: 1 + steps], accepts

    plain, none = decode(1, 0)
    assert none == 0
    for nodes, depth in ((2, 1), (9, 3), (30, 4)):
        assert decode(nodes, depth)[0] == plain


def test_first_path(device):
    source = torch.Generator().manual_seed(8)
    for nodes, depth in ((1, 0), (1, 3), (9, 4), (40, 6)):
        parents = random_tree(3, nodes, max(depth, 1), source).to(device)
        path, accepted = verification.first_path(parents, depth)
        expected = reference.first_path(parents, depth)
        assert torch.equal(path, expected[0]) and torch.equal(accepted, expected[1])
    parents = torch.tensor([[-1, 0, 0, 1, 2, 1, 3]], dtype=torch.int32, device=device)
    for module in MODULES:
        path, accepted = module.first_path(parents, 4)
        assert path.tolist() == [[0, 1, 3, 6, -1]] and accepted.tolist() == [3]
        assert module.first_path(parents, 2)[0].tolist() == [[0, 1, 3]]


def test_topp_by_hand(device):
    """Candidates of .4 .3 .2 .1 at top-p 0.85 are three; a cap leaves fewer; of equal children the earlier is taken."""
    law = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0]).log()
    tokens = torch.tensor([[4, 3, 2, 1, 2], [4, 3, 2, 3, 2], [4, 1, 3, 1, 0]], device=device)
    parents = torch.tensor([[-1, 0, 0, 0, 3]] * 3, dtype=torch.int32, device=device)
    logits, params = law.expand(3, 5, 5).to(device), make_params(3, device, top_p=0.85)
    place = (torch.zeros(3, dtype=torch.int32, device=device), depths_of(parents.cpu()).to(device))
    paths = {
        0: [[0, 3, 4], [0, 2, -1], [0, 1, -1]],
        2: [[0, 3, -1], [0, -1, -1], [0, 1, -1]],
        1: [[0, -1, -1], [0, -1, -1], [0, -1, -1]],
    }
    for cap, expected in paths.items():
        for module in (verification, reference) if CUDA or cap == 2 else (reference,):
            out = module.verify_topp(logits, tokens, parents, 2, params, *place, False, 0, cap)
            assert out[0].tolist() == expected, (cap, module)


def test_topp_samples_the_next_token_from_its_candidates(device):
    """The refused children are not left out: of .4 .3 .2 .1 with a cap of 2, 4/7 and 3/7."""
    batch = 200_000 if CUDA else 20_000
    module, where = (verification, device) if CUDA else (reference, "cpu")
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(batch, 2, 4).to(where)
    tokens = torch.tensor([[0, 3]], device=where).expand(batch, -1)  # the draft is no candidate
    parents = torch.tensor([[-1, 0]], dtype=torch.int32, device=where).expand(batch, -1)
    place = (torch.zeros(batch, dtype=torch.int32, device=where), (parents + 1))
    for cap, law in ((2, [4 / 7, 3 / 7, 0, 0]), (3, [4 / 9, 3 / 9, 2 / 9, 0])):
        params = make_params(batch, where)
        path, _, following = module.verify_topp(logits, tokens, parents, 1, params, *place, False, 0, cap)
        assert (path[:, 1] == -1).all()
        counts = following.cpu().bincount(minlength=4)
        assert (counts / batch - torch.tensor(law)).abs().sum() / 2 < 0.01
        assert (counts[torch.tensor(law) == 0] == 0).all()


def test_the_window_accepts_the_second_best_in_front_of_best_ones(device):
    """A chain: the first draft is second best and no candidate; it is accepted if the two below it are the best."""
    best = torch.full((4, 6), -9.0)
    for node, (first, second) in enumerate(((0, 1), (2, 3), (4, 5), (1, 2))):
        best[node, first], best[node, second] = 9.0, 5.0
    cases = {  # by window: the chain, its temperature, the path, the next token
        0: [([5, 1, 2, 4], 1.0, [0, -1, -1, -1], 0)],
        1: [([5, 1, 2, 5], 1.0, [0, 1, 2, -1], 4)],
        2: [
            ([5, 1, 2, 4], 1.0, [0, 1, 2, 3], 1),
            ([5, 1, 2, 5], 1.0, [0, -1, -1, -1], 0),  # the third is not the best
            ([5, 3, 2, 4], 1.0, [0, -1, -1, -1], 0),  # the first is not the second best
            ([5, 1, 2, 4], 0.0, [0, -1, -1, -1], 0),  # temperature 0 follows its argmax
        ],
        3: [([5, 1, 2, 4], 1.0, [0, -1, -1, -1], 0)],  # too short a chain
    }
    for window, rows in cases.items():
        chains, temperatures, paths, following = zip(*rows, strict=True)
        tokens, params = torch.tensor(chains, device=device), make_params(len(rows), device, top_p=0.9)
        params.temperature.copy_(torch.tensor(temperatures))
        logits = best.expand(len(rows), -1, -1).to(device)
        parents = torch.tensor([[-1, 0, 1, 2]] * len(rows), dtype=torch.int32, device=device)
        place = (torch.zeros(len(rows), dtype=torch.int32, device=device), parents + 1)
        for module in MODULES:
            out = module.verify_topp(logits, tokens, parents, 3, params, *place, False, window, 0)
            assert out[0].tolist() == list(paths) and out[2].tolist() == list(following), (window, module)


# ------------------------------------------------------------------------------------------ strategies and policies


def test_strategies_and_policies_by_hand(device):
    """Root: .5 for token 0, .3 for 1, .2 for 2. Children 1 and 2; below 1 comes 3 and then 4, below 2 comes 5."""
    rows = torch.full((5, 6), float("-inf"))
    rows[0, :3] = torch.tensor([0.5, 0.3, 0.2]).log()
    for node, token in ((1, 3), (2, 5), (3, 4), (4, 4)):
        rows[node, token] = 0.0
    parents = torch.tensor([[-1, 0, 0, 1, 2]], dtype=torch.int32)
    tree = [torch.tensor([[4, 1, 2, 3, 0]]), parents, depths_of(parents), torch.zeros(1, 5, 1, dtype=torch.int64)]
    tree, lengths = Tree(*(value.to(device) for value in tree)), torch.tensor([9], dtype=torch.int32, device=device)
    logits = rows[None].to(device)
    below = {0: ([0, -1, -1], 0), 1: ([0, 1, 3], 4), 2: ([0, 2, -1], 5)}  # by the token that follows the root
    seen = set()
    for seed in range(12):
        params = make_params(1, device, seed=seed)
        noise = sampling.gumbel(params, lengths[:, None] + 1, 6)[:, 0]
        sample = int(sampling.gumbel_sample(logits[:, 0], noise, params))
        coins = sampling.uniform(params, 2)[0]
        by_coin = 1 if coins[0] < 0.3 else 2 if coins[0] < 0.5 else 0
        plain_coin = int((coins[1] >= torch.tensor([0.5, 0.8], device=device)).sum())
        new, seen = {sample, by_coin + 10} - seen, seen | {sample, by_coin + 10}
        tables = [make_operations(kernels) for kernels in ((False, True) if new else (False,))]
        expected = {
            ("greedy", "normal"): below[0],
            ("target_match", "normal"): below[sample],
            ("rejection", "normal"): below[by_coin],
            ("topp", "normal"): below[1],
            **{(strategy, "accept_all"): ([0, 1, 3], 4) for strategy in VERIFY_STRATEGIES},
            ("greedy", "reject_all"): ([0, -1, -1], 0),
            ("target_match", "reject_all"): ([0, -1, -1], sample),
            ("rejection", "reject_all"): ([0, -1, -1], plain_coin),
            ("topp", "reject_all"): ([0, -1, -1], sample),
        }
        assert set(expected) == set(itertools.product(VERIFY_STRATEGIES, ACCEPT_POLICIES))
        for ops, ((strategy, policy), (path, following)) in itertools.product(tables, expected.items()):
            mode = Mode(sampled=True, verification=Verification(strategy, policy))
            nan = torch.ones(1, dtype=torch.bool, device=device)
            out = verify(ops, logits, tree, 2, lengths, params, mode, nan)
            assert out[0].dtype == out[1].dtype == torch.int32 and not nan.any()
            got = (out[0].tolist(), out[1].tolist(), out[2].tolist())
            assert got == ([path], [2 - path.count(-1)], [following]), (strategy, policy, seed)
    for kernels, (policy, expected) in itertools.product(
        (False, True),
        {"normal": ([0, -1, -1], 0), "accept_all": ([0, 1, 3], 4), "reject_all": ([0, -1, -1], 0)}.items(),
    ):
        mode = Mode(verification=Verification(accept_policy=policy))  # a greedy batch
        out = verify(make_operations(kernels), logits, tree, 2, lengths, params, mode)
        assert (out[0].tolist()[0], out[2].item()) == expected
    assert seen == {0, 1, 2, 10, 11, 12}, "some outcome was not met: the test shows less than it says"


@pytest.mark.parametrize("name", ["verify_strategy", "accept_policy"])
def test_verification_names_are_checked(name):
    known = {
        "verify_strategy": "target_match, rejection, greedy, topp",
        "accept_policy": "normal, accept_all, reject_all",
    }
    for bad in ("top_p", "", "Normal"):
        with pytest.raises(ValueError, match=f"{name} must be one of {known[name]}, got '{bad}'"):
            Verification(**{name: bad})
    for bad in (0, None, True):
        with pytest.raises(TypeError, match=f"{name} must be a string, one of {known[name]}"):
            Verification(**{name: bad})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(verify_window=-1), ValueError, "verify_window must not be negative"),
        (dict(verify_window=True), TypeError, "verify_window must be an integer"),
        (dict(verify_window=2), ValueError, 'verify_window=2 needs verify_strategy="topp"'),
        (dict(verify_window=2, accept_policy="accept_all", verify_strategy="topp"), ValueError, "_window=2 needs"),
        (dict(max_candidate_len=2.0, verify_strategy="topp"), TypeError, "max_candidate_len must be an integer"),
        (dict(max_candidate_len=-1, verify_strategy="topp"), ValueError, "max_candidate_len must not be negative"),
        (dict(max_candidate_len=2), ValueError, 'max_candidate_len=2 needs verify_strategy="topp"'),
    ],
    ids=str,
)
def test_verification_counts_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        Verification(**options)


def test_what_is_lossless_and_what_follows_the_tree():
    pairs = [*itertools.product(VERIFY_STRATEGIES, ACCEPT_POLICIES)]
    lossless = {pair for pair in pairs if Verification(*pair).lossless}
    assert lossless == set(itertools.product(["target_match", "rejection"], ["normal", "reject_all"]))
    assert Verification("greedy").keeps_output(sampled=False) and not Verification("greedy").keeps_output(sampled=True)
    assert not Verification(accept_policy="accept_all").keeps_output(sampled=False)
    assert Verification().summary == "target_match; lossless: True"
    assert Verification("topp", verify_window=2).summary == "topp, window 2; lossless: False"
    for sampled in (False, True):
        follows = {pair for pair in pairs if Verification(*pair).follows_tree(sampled)}
        drafted = {(strategy, "accept_all") for strategy in VERIFY_STRATEGIES}
        assert follows == drafted | ({("rejection", "normal"), ("topp", "normal")} if sampled else set())


def update_arguments(batch=5, columns=20, nodes=7, depth=2, stop_ids=(), limit=1000, exact=True, seed=0):
    """Arguments of update_sequence: sequence 0 accepts two drafts, 1 none, 2 one, 3 is not active, 4 has NaN."""
    source = torch.Generator().manual_seed(seed)
    sequence = torch.randint(99, (batch, columns), generator=source)
    lengths = torch.tensor([3, 0, 17, 5, 18], dtype=torch.int32)
    tokens = torch.randint(99, (batch, nodes), generator=source)
    tokens[:, 0] = sequence.gather(1, lengths[:, None].long())[:, 0]
    stops = torch.full((batch, 16), -1)
    stops[:, : len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int64)
    return {
        "sequence": sequence,
        "lengths": lengths,
        "active": torch.tensor([True, True, True, False, True]),
        "tokens": tokens,
        "path": torch.tensor([[0, 2, 5], [0, -1, -1], [0, 1, -1], [0, 3, -1], [0, 1, 4]], dtype=torch.int32),
        "accepted": torch.tensor([2, 0, 1, 1, 2], dtype=torch.int32),
        "next_token": torch.randint(99, (batch,), generator=source),
        "nan": torch.tensor([False, False, False, False, True]),
        "stops": Stops(stops, torch.full((batch,), limit).int(), torch.full((batch,), exact)),
        "report": torch.full((batch, 8), -7),
        "counter": torch.arange(batch) * 10,
    }


def updated(update, arguments, where):
    """The tensors after `update`, on the CPU, by name."""
    moved = {
        name: Stops(*(field.to(where) for field in value)) if name == "stops" else value.clone().to(where)
        for name, value in arguments.items()
    }
    before = update(**moved)
    assert torch.equal(before.cpu(), arguments["lengths"]) and before.data_ptr() != moved["lengths"].data_ptr()
    return {name: value.cpu() for name, value in moved.items() if name != "stops"}


def test_update_sequence_commits_the_root_and_the_accepted_drafts(device):
    arguments = update_arguments()
    for update, where in ((reference.update_sequence, "cpu"), (verification.update_sequence, device)):
        after = updated(update, arguments, where)
        sequence, tokens, next_token = arguments["sequence"].clone(), arguments["tokens"], arguments["next_token"]
        sequence[0, 4:7] = torch.stack((tokens[0, 2], tokens[0, 5], next_token[0]))
        sequence[1, 1] = next_token[1]
        sequence[2, 18:20] = torch.stack((tokens[2, 1], next_token[2]))
        assert torch.equal(after["sequence"], sequence)
        assert after["lengths"].tolist() == [6, 1, 19, 5, 18]
        assert after["active"].tolist() == [True, True, True, False, False]
        assert after["accepted"].tolist() == [2, 0, 1, -1, -1]
        assert after["counter"].tolist() == [1, 11, 21, 31, 41]
        report = torch.full((5, 8), -7)
        report[:, :3] = torch.tensor([[2, 3, 0], [0, 1, 0], [1, 2, 0], [-1, 0, 0], [-1, 0, reference.ERROR]])
        report[:, 3:7] = -1
        for row, count in enumerate((3, 1, 2)):
            report[row, 3 : 3 + count] = tokens[row, arguments["path"][row, :count].long()]
            report[row, 3 + count] = next_token[row]
        assert torch.equal(after["report"], report)


STOPPING = {  # stop offset in the emitted tokens or None, room up to the limit, exact -> tokens kept, reason
    "at the root": (0, 50, True, 1, reference.STOP),
    "at a draft": (1, 50, True, 2, reference.STOP),
    "at the last draft": (2, 50, True, 3, reference.STOP),
    "limit": (None, 2, True, 2, reference.LENGTH),
    "limit met exactly": (None, 3, True, 3, reference.LENGTH),
    "limit not yet met": (None, 4, True, 3, reference.GOES_ON),
    "stop and limit at once": (1, 2, True, 2, reference.STOP),
    "stop behind the limit": (2, 2, True, 2, reference.LENGTH),
    "original stop": (0, 50, False, 3, reference.STOP),
    "original limit": (None, 2, False, 3, reference.LENGTH),
    "original limit not yet met": (None, 4, False, 3, reference.GOES_ON),
}


@pytest.mark.parametrize("case", STOPPING)
def test_update_sequence_stops(device, case):
    offset, room, exact, kept, reason = STOPPING[case]
    arguments = update_arguments(exact=exact)
    arguments["tokens"][0] = torch.arange(200, 207)
    if offset is not None:
        arguments["stops"].ids[0, 5] = (200, 202, 205)[offset]
        arguments["stops"].ids[0, 1] = 204  # in the tree, but not on the path
    arguments["stops"].limit[0] = 3 + room
    for update, where in ((reference.update_sequence, "cpu"), (verification.update_sequence, device)):
        after = updated(update, arguments, where)
        assert after["report"][0, :6].tolist() == [2, kept, reason, 200, 202, 205]
        assert after["lengths"].tolist() == [3 + kept, 1, 19, 5, 18]
        assert after["active"][0] == (reason == reference.GOES_ON)
        assert after["active"][1:].tolist() == [True, True, False, False]
        again = updated(update, {**arguments, **after}, where)
        if reason != reference.GOES_ON:  # a step too many changes nothing for who has finished
            assert torch.equal(again["sequence"][0], after["sequence"][0])
            assert again["lengths"][0] == after["lengths"][0] and again["report"][0, :3].tolist() == [-1, 0, 0]


@settings(max_examples=60 if CUDA else 12, deadline=None)
@given(seed=st.integers(0, 10_000), exact=st.booleans(), limit=st.integers(0, 25), width=st.sampled_from([1, 5, 16]))
def test_update_sequence_kernel_equals_the_reference(seed, exact, limit, width):
    arguments = update_arguments(seed=seed, exact=exact, limit=limit)
    arguments["tokens"] %= 9  # stop tokens are met often
    arguments["stops"] = arguments["stops"]._replace(ids=torch.full((5, width), seed % 9))
    expected = updated(reference.update_sequence, arguments, "cpu")
    got = updated(verification.update_sequence, arguments, "cuda" if CUDA else "cpu")
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("module", [verification, reference], ids=["kernel", "reference"])
def test_refusals(device, module):
    logits = torch.zeros(2, 3, 8, device=device)
    tokens = torch.zeros(2, 3, dtype=torch.int64, device=device)
    parents = torch.zeros(2, 3, dtype=torch.int32, device=device)
    params = make_params(2, device)
    bad = [
        (logits[0], tokens, parents, 2),
        (logits.double(), tokens, parents, 2),
        (logits, tokens[:, :2], parents, 2),
        (logits, tokens.int(), parents, 2),
        (logits, tokens, parents.long(), 2),
        (logits, tokens, parents, -1),
        (logits, tokens.to("meta"), parents, 2),
    ]
    for arguments in bad:
        with pytest.raises(ValueError, match="verify_greedy"):
            module.verify_greedy(*arguments)
        with pytest.raises(ValueError, match="verify_sampling"):
            module.verify_sampling(*arguments, params)
    place = (torch.zeros(2, dtype=torch.int32, device=device), torch.zeros_like(parents))
    for name in ("verify_target_match", "verify_topp"):
        call = getattr(module, name)
        for arguments in bad:
            with pytest.raises(ValueError, match=name):
                call(*arguments, params, *place)
        for lengths, depths in (
            (place[0].long(), place[1]),
            (place[0][:1], place[1]),
            (place[0], place[1][:, :2]),
            (place[0], place[1].long()),
            (torch.zeros(4, dtype=torch.int32, device=device)[::2], place[1]),
        ):
            with pytest.raises(ValueError, match=f"{name}: (lengths|depths)"):
                call(logits, tokens, parents, 2, params, lengths, depths)
        with pytest.raises(ValueError, match=f"{name}: top_k"):
            call(logits, tokens, parents, 2, params._replace(top_k=params.seed), *place)
    for limits in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="verify_topp: window and max_candidates"):
            module.verify_topp(logits, tokens, parents, 2, params, *place, False, *limits)
    for wrong, depth in ((parents.long(), 2), (parents[0], 2), (parents, -1)):
        with pytest.raises(ValueError, match="first_path"):
            module.first_path(wrong, depth)
    with pytest.raises(ValueError, match="nan"):
        module.verify_greedy(logits, tokens, parents, 2, nan=torch.zeros(3, dtype=torch.bool, device=device))
    with pytest.raises(ValueError, match="temperature"):
        module.verify_sampling(logits, tokens, parents, 2, params._replace(temperature=params.min_p.double()))
    arguments = update_arguments()
    for name, wrong, message in (
        ("path", arguments["tokens"], "update_sequence: path"),
        ("nan", arguments["nan"].int(), "update_sequence: nan"),
        ("report", arguments["report"][:, :6], "report must have 7 columns"),
        ("counter", arguments["counter"].int(), "update_sequence: counter"),
        ("stops", arguments["stops"]._replace(limit=arguments["next_token"]), "update_sequence: stops.limit"),
        ("tokens", arguments["tokens"].mT.contiguous().mT, "tokens must be .* with contiguous rows"),
    ):
        with pytest.raises(ValueError, match=message):
            module.update_sequence(**{**arguments, name: wrong})
