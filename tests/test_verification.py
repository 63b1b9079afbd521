"""Verification: the kernels against the reference, and the sampled walk against the distribution it must follow."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_triton import verification
from eagle_triton.reference import sampling
from eagle_triton.reference import verification as reference

CUDA = torch.cuda.is_available()
SIZES = [(1, 11, 0), (7, 50, 3), (26, 300, 5), (60, 40, 8), (64, 30, 6), (65, 100, 8)]
SIZES += [(60, 128256, 8), (64, 32000, 8)] if CUDA else []


def make_params(batch, device, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1):
    def full(value, dtype):
        return torch.full((batch,), value, dtype=dtype, device=device)

    return sampling.SamplingTensors(
        full(temperature, torch.float32),
        full(top_k, torch.int32),
        full(top_p, torch.float32),
        full(min_p, torch.float32),
        torch.arange(seed, seed + batch, device=device),
        full(3, torch.int64),
    )


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("nodes", "vocabulary", "depth"), SIZES)
def test_greedy(device, nodes, vocabulary, depth, dtype):
    source = torch.Generator().manual_seed(nodes)
    logits = (2 * torch.randn(2, nodes, vocabulary, generator=source)).round().to(dtype).to(device)  # many ties
    parents = random_tree(2, nodes, max(depth, 1), source)
    tokens = fill(parents, logits.argmax(-1), vocabulary, source).to(device)
    nan = torch.ones(2, dtype=torch.bool, device=device)
    out = verification.verify_greedy(logits, tokens, parents.to(device), depth, nan=nan)
    for value, other in zip(out, reference.verify_greedy(logits, tokens, parents.to(device), depth), strict=True):
        assert value.dtype == other.dtype and torch.equal(value, other)
    assert not nan.any()


def test_greedy_with_nan_and_infinity(device):
    logits = torch.randn(4, 3, 40, generator=torch.Generator().manual_seed(0)).to(device)
    logits[0, 1, 7], logits[1, 0, 9], logits[2, 0] = float("nan"), float("inf"), float("-inf")
    logits[3, 0, 5], logits[3, 0, 30] = float("inf"), float("nan")
    tokens = torch.tensor([[1, 7, 2], [1, 9, 3], [1, 0, 2], [1, 30, 5]], device=device)
    parents = torch.tensor([[-1, 0, 1]] * 4, dtype=torch.int32, device=device)
    flags = [torch.zeros(4, dtype=torch.bool, device=device) for _ in range(2)]
    out = verification.verify_greedy(logits, tokens, parents, 2, nan=flags[0])
    expected = reference.verify_greedy(logits, tokens, parents, 2, nan=flags[1])
    assert all(torch.equal(value, other) for value, other in zip(out, expected, strict=True))
    assert flags[0].tolist() == flags[1].tolist() == [True, False, False, True]


def test_strided_logits_and_tree(device):
    source = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 10, 60, generator=source).to(device)[:, ::2, ::2]
    parents = random_tree(3, 5, 3, source)
    tokens = fill(parents, logits.argmax(-1), 30, source)
    wide = [torch.stack((value, value), dim=-1).to(device)[..., 0] for value in (tokens, parents)]
    params = make_params(3, device)
    for out, expected in (
        (verification.verify_greedy(logits, *wide, 3), reference.verify_greedy(logits, *wide, 3)),
        (verification.verify_sampling(logits, *wide, 3, params), reference.verify_sampling(logits, *wide, 3, params)),
    ):
        assert all(torch.equal(value, other) for value, other in zip(out, expected, strict=True))


FILTERS = {
    "plain": {},
    "top_p": {"top_p": 0.9},
    "everything": {"top_k": 6, "top_p": 0.9, "min_p": 0.05},
    "greedy": {"temperature": 0.0},
}


CASES = [
    (size, name) for size in SIZES for name in FILTERS if CUDA or size[0] < 20 or (size[0], name) == (65, "everything")
]


@pytest.mark.parametrize(("size", "filters"), CASES, ids=[f"N={size[0]} V={size[1]} {name}" for size, name in CASES])
def test_sampling(device, size, filters):
    """Every coin is the reference's, so the walk is; the final token may differ by rounding at a boundary."""
    nodes, vocabulary, depth = size
    source = torch.Generator().manual_seed(nodes)
    batch = 4 if CUDA else 1 + (nodes < 20)
    logits = (2.5 * torch.randn(batch, nodes, vocabulary, generator=source)).bfloat16().to(device)
    parents = random_tree(batch, nodes, max(depth, 1), source)
    tokens = fill(parents, logits.argmax(-1), vocabulary, source).to(device)
    params, nan = make_params(batch, device, **FILTERS[filters]), torch.ones(batch, dtype=torch.bool, device=device)
    arguments = (logits, tokens, parents.to(device), depth, params, nodes % 2 == 0)
    path, accepted, next_token = verification.verify_sampling(*arguments, nan=nan)
    expected = reference.verify_sampling(*arguments)
    assert torch.equal(path, expected[0]) and torch.equal(accepted, expected[1])
    assert (next_token != expected[2]).sum() <= (1 if vocabulary > 1000 else 0)
    assert not nan.any()


def test_sampling_mixes_greedy_and_sampled_sequences(device):
    source = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 9, 30, generator=source).to(device)
    parents = random_tree(4, 9, 4, source)
    tokens, parents = fill(parents, logits.argmax(-1), 30, source).to(device), parents.to(device)
    params = make_params(4, device)
    params.temperature.copy_(torch.tensor([0.0, 1.0, 0.0, 0.5]))
    out = verification.verify_sampling(logits, tokens, parents, 4, params)
    expected = reference.verify_sampling(logits, tokens, parents, 4, params)
    greedy = reference.verify_greedy(logits, tokens, parents, 4)
    for value, other, argmax in zip(out, expected, greedy, strict=True):
        assert torch.equal(value, other)
        assert torch.equal(value[::2], argmax[::2])


def test_siblings_that_share_a_token(device):
    logits = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(1)).to(device).expand(20, -1, -1)
    tokens = torch.tensor([[0, 2, 2, 1, 2]], device=device).expand(20, -1)
    parents = torch.tensor([[-1, 0, 0, 0, 1]], dtype=torch.int32, device=device).expand(20, -1)
    params = make_params(20, device)
    out = verification.verify_sampling(logits, tokens, parents, 2, params)
    expected = reference.verify_sampling(logits, tokens, parents, 2, params)
    assert all(torch.equal(value, other) for value, other in zip(out, expected, strict=True))
    assert not (out[0] == 2).any()


def test_all_mass_refused_by_rounding(device):
    """Children hold all mass, yet the coin passes their sum: the whole distribution is drawn from."""
    logits = torch.tensor([[[0.0, 0.0, float("-inf")]] * 3], device=device)
    tokens = torch.tensor([[2, 0, 1]], device=device)
    parents = torch.tensor([[-1, 0, 0]], dtype=torch.int32, device=device)
    out = verification.verify_sampling(logits, tokens, parents, 0, make_params(1, device))
    expected = reference.verify_sampling(logits, tokens, parents, 0, make_params(1, device))
    assert all(torch.equal(value, other) for value, other in zip(out, expected, strict=True))
    assert out[2].item() in (0, 1)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 3}], ids=["plain", "top_p", "top_k"])
def test_emitted_tokens_follow_the_law(device, filters):
    """First and second emitted token against the exact distribution, on V = 6 (total variation < 0.01)."""
    batch = 200_000
    logits = torch.randn(1, 6, 6, generator=torch.Generator().manual_seed(4))
    tokens, parents = torch.tensor([[0, 3, 1, 5, 0, 2]]), torch.tensor([[-1, 0, 0, 1, 1, 2]], dtype=torch.int32)
    verify, where = (verification.verify_sampling, device) if CUDA else (reference.verify_sampling, "cpu")
    arguments = [value.expand(batch, *value.shape[1:]).to(where) for value in (logits, tokens, parents)]
    path, accepted, next_token = verify(*arguments, 2, make_params(batch, where, **filters))
    distribution = sampling.probabilities(logits, make_params(1, "cpu", **filters))[0].to(where)
    first = torch.where(accepted > 0, arguments[1].gather(1, path[:, 1:2].clamp(min=0).long())[:, 0], next_token)
    assert (first.bincount(minlength=6) / batch - distribution[0]).abs().sum() / 2 < 0.01
    for node, token in ((1, 3), (2, 1)):
        if distribution[0, token] == 0:
            continue
        taken = path[:, 1] == node
        second = torch.where(accepted > 1, arguments[1].gather(1, path[:, 2:3].clamp(min=0).long())[:, 0], next_token)
        share = second[taken].bincount(minlength=6) / taken.sum()
        assert (share - distribution[node]).abs().sum() / 2 < 0.01


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
    for out, expected in (
        (
            verification.verify_greedy(logits, tokens, parents, depth),
            reference.verify_greedy(logits, tokens, parents, depth),
        ),
        (
            verification.verify_sampling(logits, tokens, parents, depth, params),
            reference.verify_sampling(logits, tokens, parents, depth, params),
        ),
    ):
        assert all(torch.equal(value, other) for value, other in zip(out, expected, strict=True))
        path, accepted, _ = out
        for b in range(2):
            count = int(accepted[b])
            assert (path[b, count + 1 :] == -1).all() and path[b, 0] == 0
            assert all(parents[b, path[b, i + 1]] == path[b, i] for i in range(count))


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
        "stops": reference.Stops(
            stops, torch.full((batch,), limit, dtype=torch.int32), torch.full((batch,), exact, dtype=torch.bool)
        ),
        "report": torch.full((batch, 8), -7),
    }


def updated(update, arguments, where):
    """The tensors after `update`, on the CPU, by name."""
    moved = {
        name: reference.Stops(*(field.to(where) for field in value)) if name == "stops" else value.clone().to(where)
        for name, value in arguments.items()
    }
    update(**moved)
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
        report = torch.full((5, 8), -7)
        report[:, :3] = torch.tensor([[2, 3, 0], [0, 1, 0], [1, 2, 0], [-1, 0, 0], [-1, 0, reference.ERROR]])
        report[:, 3:6] = -1
        for row, count in enumerate((3, 1, 2)):
            report[row, 3 : 3 + count] = tokens[row, arguments["path"][row, :count].long()]
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
    with pytest.raises(ValueError, match="nan"):
        module.verify_greedy(logits, tokens, parents, 2, nan=torch.zeros(3, dtype=torch.bool, device=device))
    with pytest.raises(ValueError, match="temperature"):
        module.verify_sampling(logits, tokens, parents, 2, params._replace(temperature=params.min_p.double()))
    arguments = update_arguments()
    for name, wrong, message in (
        ("path", arguments["tokens"], "update_sequence: path"),
        ("nan", arguments["nan"].int(), "update_sequence: nan"),
        ("report", arguments["report"][:, :5], "report must have 6 columns"),
        ("stops", arguments["stops"]._replace(limit=arguments["next_token"]), "update_sequence: stops.limit"),
        ("tokens", arguments["tokens"].mT.contiguous().mT, "tokens must have stride 1"),
    ):
        with pytest.raises(ValueError, match=message):
            module.update_sequence(**{**arguments, name: wrong})
