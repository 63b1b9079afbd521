"""Laws, samples and random numbers: the kernels against the reference, and both against the mathematics."""

import functools
import itertools
import math

import pytest
import torch
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eagle_triton.operands.sampling import SamplingTensors
from eagle_triton.ops import sampling
from eagle_triton.ops.sampling import filter_thresholds
from eagle_triton.reference import sampling as reference

CUDA = torch.cuda.is_available()
LARGE = 128256 if CUDA else 32064
FILTERS = {
    "none": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "top_k then top_p": {"top_k": 20, "top_p": 0.8},
    "top_p and min_p": {"top_p": 0.95, "min_p": 0.1},
    "everything": {"top_k": 6, "top_p": 0.9, "min_p": 0.2, "temperature": 0.6},
    "min_p": {"min_p": 0.2},
    "cold": {"top_p": 0.5, "temperature": 0.01},
    "hot": {"top_p": 0.99, "temperature": 3.0},
    "temperature 0": {"temperature": 0.0},
}


def make_params(batch, device, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1, step=0):
    def full(value, dtype):
        return torch.full((batch,), value, dtype=dtype, device=device)

    return SamplingTensors(
        full(temperature, torch.float32),
        full(top_k, torch.int32),
        full(top_p, torch.float64),
        full(min_p, torch.float32),
        torch.arange(seed, seed + batch, device=device),
        full(step, torch.int64),
    )


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The order matters where both are given, and the dtype where logits are loaded.
BOTH = [name for name, filters in FILTERS.items() if {"top_k", "top_p"} <= filters.keys()]
PROBABILITIES = [
    (dtype, name, first)
    for dtype, name, first in itertools.product((torch.bfloat16, torch.float16, torch.float32), FILTERS, (False, True))
    if CUDA or ((dtype == torch.bfloat16 or name in BOTH) and (not first or name in BOTH))
]


@pytest.mark.parametrize(("dtype", "name", "first"), PROBABILITIES)
def test_probabilities(device, dtype, name, first):
    filters = FILTERS[name]
    logits = (randn(1, 2, 50) * 3).to(dtype).to(device)
    params = make_params(1, device, **filters)
    out, expected = sampling.probabilities(logits, params, first), reference.probabilities(logits, params, first)
    assert torch.equal(out > 0, expected > 0)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=1e-7)
    assert not torch.allclose(torch.zeros_like(expected), expected, rtol=2e-5, atol=1e-7)


@pytest.fixture
def stable_sort(monkeypatch):
    """transformers' top-p in the order that counts where a sort is not stable."""
    monkeypatch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))


def law_of_transformers(logits, first=False, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The law of rows [n, V] by transformers' own processors."""
    processors = [TopKLogitsWarper(top_k)] if top_k else []
    if top_p < 1:
        processors.insert(0 if first else len(processors), TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    scores = logits.float() / temperature
    for processor in processors:
        scores = processor(None, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize("vocabulary", [1, 2, 17, 2500, 128256] if CUDA else [1, 2, 17, 2500])
@pytest.mark.parametrize("std", [0.3, 4.0])
def test_probabilities_of_every_size(device, vocabulary, std):
    """The kept set is the reference's unless a token lies within rounding of the boundary."""
    logits = (randn(1, 2, vocabulary) * std).bfloat16().to(device)
    out = sampling.probabilities(logits, make_params(1, device, top_p=0.9))
    exact = torch.softmax(logits.double(), -1)
    if vocabulary < 3000:
        x, place = logits[0].float(), torch.arange(vocabulary, device=device)
        ahead = x[:, None, :] > x[:, :, None]
        ahead |= (x[:, None, :] == x[:, :, None]) & (place > place[:, None])
        above = (exact[0, :, None, :] * ahead).sum(-1)[None]
        assert (out > 0)[above < 0.9 - 1e-5].all()
        assert not (out > 0)[above > 0.9 + 1e-5].any()
    torch.testing.assert_close(out.sum(-1), torch.ones_like(out[..., 0]), rtol=1e-5, atol=0)
    assert exact[out > 0].sum() / 2 >= 0.9 - 1e-5


TIES = {
    "top_k keeps all that equal the k-th": ({"top_k": 2}, [0, 1, 2, 3]),
    "top_k past all": ({"top_k": 7}, [0, 1, 2, 3, 4, 5, 6]),
    "top_p keeps the last of its ties": ({"top_p": 0.5}, [0, 3]),
    "top_p keeps two of three": ({"top_p": 0.7}, [0, 2, 3]),
    "top_k after top_p": ({"top_p": 0.7, "top_k": 2, "first": True}, [0, 2, 3]),
    "top_k above what top_p cuts": ({"top_p": 0.7, "top_k": 1, "first": True}, [0]),
    "min_p keeps ties": ({"min_p": 0.3}, [0, 1, 2, 3]),
    "min_p above what top_p cuts": ({"top_p": 0.7, "min_p": 0.4}, [0]),
    "min_p below what top_p cuts": ({"top_p": 0.7, "min_p": 0.3}, [0, 2, 3]),
}


@pytest.mark.parametrize("filters, kept", TIES.values(), ids=TIES)
def test_ties_at_the_cut(device, stable_sort, filters, kept):
    """Probabilities 0.415, three of 0.153, 2 of 0.056, one of 0.014: what transformers' processors keep."""
    logits = torch.tensor([[[2.0, 1.0, 1.0, 1.0, -0.0, 0.0, -1.4, float("-inf")]]], device=device)
    filters = dict(filters)
    first = filters.pop("first", False)
    expected = law_of_transformers(logits[0].cpu(), first, **filters)
    assert expected[0].nonzero()[:, 0].tolist() == kept
    for module in (sampling, reference):
        out = module.probabilities(logits, make_params(1, device, **filters), first).cpu()
        torch.testing.assert_close(out[0], expected, rtol=2e-5, atol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU rounds these sums otherwise")
def test_ties_of_a_whole_row(device, stable_sort):
    """Sums that lie on the cut, in every fraction with two digits: equal to the bit on a CPU, by the kernels too."""
    for vocabulary, top_ps in ((5, (0.2, 0.4, 0.6, 0.8)), (100, (0.07, 0.58, 0.9)), (50, (1e-8, 0.34)), (3, (1 / 3,))):
        logits = torch.full((len(top_ps), 1, 2 * vocabulary), -1e4, device=device)
        logits[..., ::2] = 1.5
        params = make_params(len(top_ps), device)
        params.top_p.copy_(torch.tensor(top_ps, dtype=torch.float64))
        expected = torch.cat([law_of_transformers(logits[0].cpu(), top_p=top_p) for top_p in top_ps])
        for module in (sampling, reference):
            assert torch.equal(module.probabilities(logits, params)[:, 0].cpu() > 0, expected > 0)


@pytest.mark.parametrize("vocabulary, seed", [(300, 0), (300, 1), (LARGE, 3), (LARGE, 4)])
def test_ties_of_few_levels(device, stable_sort, vocabulary, seed):
    """The rest of a search, and the pass that counts ties or the scan that looks for them, alone or in a batch."""
    logits = torch.randint(-2, 3, (2, 1, vocabulary), generator=torch.Generator().manual_seed(seed)).float()
    logits = (logits * 2 + (randn(2, 1, 1) if seed % 2 else 0)).bfloat16().to(device)
    logits[1] = (randn(1, vocabulary, seed=seed) * 0.3).bfloat16()  # every round of the search, so a scan
    params = make_params(2, device, top_p=0.83, temperature=0.9)
    out, expected = sampling.probabilities(logits, params), reference.probabilities(logits, params)
    law = law_of_transformers(logits[:, 0].cpu(), temperature=0.9, top_p=0.83)
    for other in (expected[:, 0].cpu(), law):
        differ = (out[:, 0].cpu() > 0) != (other > 0)
        assert (differ.sum(-1) <= int(vocabulary > 300)).all()  # sums of so many tokens round otherwise: one at most
    cut = torch.where(out > 0, logits.float(), float("inf")).amin(-1, keepdim=True)
    dropped = ((logits == cut) & (out == 0)).any(-1)[:, 0]
    assert dropped[0] and (dropped[1] or vocabulary == 300)
    assert torch.equal(out[1:], sampling.probabilities(logits[1:], make_params(1, device, top_p=0.83, temperature=0.9)))


def test_parameters_are_per_sequence(device):
    logits = randn(3, 2, 40).to(device) * 3
    params = make_params(3, device)
    params.temperature.copy_(torch.tensor([1.0, 0.5, 2.0]))
    params.top_k.copy_(torch.tensor([0, 3, 0]))
    params.top_p.copy_(torch.tensor([0.5, 1.0, 1.0]))
    out = sampling.probabilities(logits, params)
    torch.testing.assert_close(out, reference.probabilities(logits, params), rtol=2e-5, atol=1e-7)
    alone = [
        sampling.probabilities(logits[b : b + 1], SamplingTensors(*(value[b : b + 1].clone() for value in params)))
        for b in range(3)
    ]
    assert torch.equal(out, torch.cat(alone))  # the batch leaves no trace


def test_strided_logits(device):
    logits = randn(2, 3, 80).to(device)[:, ::2, ::2]
    params = make_params(2, device, top_p=0.8)
    expected = reference.probabilities(logits, params)
    torch.testing.assert_close(sampling.probabilities(logits, params), expected, rtol=2e-5, atol=1e-7)


def test_rows_without_a_law_end(device):
    logits = randn(1, 4, 40).to(device)
    logits[0, 0, 3], logits[0, 1, 4], logits[0, 2] = float("nan"), float("inf"), float("-inf")
    params = make_params(1, device, top_k=5, top_p=0.7, min_p=0.1)
    out = sampling.probabilities(logits, params)
    torch.testing.assert_close(out[:, 3], reference.probabilities(logits, params)[:, 3], rtol=2e-5, atol=1e-7)


def test_uniform(device):
    params = make_params(4, device, seed=3, step=5)
    params.seed.copy_(torch.tensor([0, -1, 2**62 + 12345, 7]))
    params.step.copy_(torch.tensor([0, 1, 2**40 + 3, 2**31]))
    for count in (1, 61, 1500):
        out = sampling.uniform(params, count)
        assert torch.equal(out, reference.uniform(params, count))
        assert ((out >= 0) & (out < 1)).all()


def test_uniform_is_philox():
    """Known answers of Philox 4x32-10 (Random123): counter and key of zeros give 6627e8d5 first."""
    params = make_params(1, "cpu", seed=0, step=0)
    assert reference.uniform(params, 1).item() == (0x6627E8D5 >> 8) * 2.0**-24


def test_uniform_at(device):
    """Bit for bit the reference's; token // 4, the position, 1 and 0 are Philox' counter, token % 4 its word."""
    params = make_params(3, device, step=9)
    params.seed.copy_(torch.tensor([0, -1, 2**62 + 12345]))
    positions = torch.tensor([[0, 5], [7, 2**31 - 1], [1, 2]], dtype=torch.int32, device=device)
    for vocabulary in (1, 7, 2500):
        out = sampling.uniform_at(params, positions, vocabulary)
        assert torch.equal(out, reference.uniform_at(params, positions, vocabulary))
        assert ((out > 0) & (out < 1)).all()
    counters = [torch.tensor([value], device=device) for value in (1, 7, 1, 0)]
    words = torch.cat(reference._philox(params.seed[1:2], *counters))
    assert torch.equal(out[1, 0, 4:8], (words.float() + 0.5) * 2.0**-32)
    zeros = [torch.zeros(1, dtype=torch.int64)] * 5
    assert [hex(int(word)) for word in reference._philox(*zeros)] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]


def test_gumbel_noise_has_its_moments_and_tails():
    """Mean 0.5772, variance pi^2 / 6, P(g > 8) = 1 - exp(-exp(-8)), over four million numbers; never infinite."""
    params, positions = make_params(1, "cpu"), torch.arange(1000, dtype=torch.int32)[None]
    noise = reference.gumbel(params, positions, 4000).double()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.57722) < 0.003 and abs(noise.var() - 1.64493) < 0.01
    assert abs((noise > 8).sum() / 4e6 / -math.expm1(-math.exp(-8)) - 1) < 0.12  # four deviations of 1342
    assert -math.log(-math.log(2.0**-24)) < noise.min() and noise.max() < 23


@pytest.mark.parametrize("vocabulary", [1, 7, 5000, 128256] if CUDA else [1, 7, 5000])
def test_sample(device, vocabulary):
    probs = torch.rand(6, vocabulary, generator=torch.Generator().manual_seed(1))
    probs[:, 1::3] = 0.0
    probs[5] = 0.0
    probs[5, vocabulary // 2] = 0.25
    coins = torch.tensor([0.0, 1 - 2**-24, 0.3, 0.5, 0.9, 0.7])
    assert torch.equal(sampling.sample(probs.to(device), coins.to(device)).cpu(), reference.sample(probs, coins))
    strided = torch.stack((probs, torch.ones_like(probs)), dim=-1).to(device)[..., 0]
    assert torch.equal(sampling.sample(strided, coins.to(device)).cpu(), reference.sample(probs, coins))


def test_samples_follow_the_law(device):
    batch = 200_000 if CUDA else 300
    probs = torch.tensor([0.5, 0.0, 0.2, 0.2, 0.1], device=device)
    coins = reference.uniform(make_params(1, device), batch)[0]
    drawn = sampling.sample(probs.expand(batch, -1), coins)
    assert torch.equal(drawn, reference.sample(probs.expand(batch, -1), coins))
    many = reference.uniform(make_params(1, device), 200_000)[0]
    share = reference.sample(probs.expand(200_000, -1), many).bincount(minlength=5) / 200_000
    assert (share - probs).abs().sum() / 2 < 0.01


def test_same_bits_every_time(device):
    logits, params = (randn(1, 2, 2100) * 2).bfloat16().to(device), make_params(1, device, top_k=100, top_p=0.9)
    first = sampling.probabilities(logits, params)
    assert all(torch.equal(first, sampling.probabilities(logits, params)) for _ in range(3 if CUDA else 1))


@pytest.mark.parametrize("module", [sampling, reference], ids=["kernel", "reference"])
def test_refusals(device, module):
    params, logits = make_params(2, device), torch.zeros(2, 3, 8, device=device)
    bad = [
        (logits[0], params),
        (logits.double(), params),
        (logits[:1], params),
        (logits, params._replace(top_k=params.top_k.long())),
        (logits, params._replace(seed=params.seed[:1])),
        (logits.to("meta"), params),
    ]
    for arguments in bad:
        with pytest.raises(ValueError, match="probabilities"):
            module.probabilities(*arguments)
    with pytest.raises(ValueError, match="uniform"):
        module.uniform(params, 0)
    place = torch.zeros(2, 3, dtype=torch.int32, device=device)
    for positions, vocabulary in ((place.long(), 4), (place[:1], 4), (place[0], 4), (place, 0), (place.to("meta"), 4)):
        with pytest.raises(ValueError, match="uniform_at"):
            module.uniform_at(params, positions, vocabulary)
    for probs, coin in ((logits[0], torch.zeros(2, device=device)), (logits[0].half(), torch.zeros(3, device=device))):
        with pytest.raises(ValueError, match="sample"):
            module.sample(probs, coin)


def test_keys_order_like_floats():
    """What the search stands on: ordered keys for every dtype, and back."""
    assert set(filter_thresholds._KEY_SHIFT) == {torch.bfloat16, torch.float16, torch.float32}
    for dtype, shift in filter_thresholds._KEY_SHIFT.items():
        values = torch.cat((randn(200).to(dtype).float(), torch.tensor([0.0, 1e-7, -1e-7, 65504.0]))).to(dtype).float()
        values = torch.cat((values, torch.tensor([float("inf"), float("-inf")]))).sort().values
        bits = values.view(torch.int32)
        keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift
        assert ((values[1:] > values[:-1]) == (keys[1:] > keys[:-1]))[values[1:] != values[:-1]].all()
        wide = keys << shift
        back = torch.where(keys >= 0, wide, (wide | ((1 << shift) - 1)) ^ 0x7FFFFFFF).view(torch.float32)
        assert torch.equal(back, values)
