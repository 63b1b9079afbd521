"""draft_inputs: the kernel against the reference."""

import pytest
import torch

from eagle_triton.ops import draft_inputs
from eagle_triton.reference import draft_inputs as reference
from eagle_triton.runtime.split_sums import SplitSums


def case(device, dtype, batch=2, count=5, parents=3, size=48, vocabulary=30, seed=0):
    """(features, parents, tokens, embedding, token_norm, feature_norm)"""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=source).to(dtype).to(device)

    chosen = torch.randint(parents, (batch, count), generator=source).to(device)
    tokens = torch.randint(vocabulary, (batch, count), generator=source).to(device)
    return draw(batch, parents, size), chosen, tokens, draw(vocabulary, size), draw(size), draw(size)


def assert_close(values, expected, dtype):
    for value, other in zip(values, expected, strict=True):
        assert value.dtype == dtype
        torch.testing.assert_close(value, other)
        assert value.abs().max() > 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [48, 64, 1025])
def test_normed(device, dtype, size):
    features, parents, tokens, embedding, token_norm, feature_norm = case(device, dtype, size=size)
    norms = {"token_norm": token_norm, "feature_norm": feature_norm, "token_eps": 1e-5, "feature_eps": 1e-2}
    values = draft_inputs.draft_inputs(features, parents, tokens, embedding, **norms)
    assert_close(values, reference.draft_inputs(features, parents, tokens, embedding, **norms), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{"zero_centred": True}, {"round_first": False}], ids=str)
def test_norms_that_round_once(device, options, dtype):
    """By the weight or by (1 + weight), in both halves."""
    *operands, token_norm, feature_norm = case(device, dtype)
    features, parents, tokens, embedding = operands
    norms = {"token_norm": token_norm, "feature_norm": feature_norm, "token_eps": 1e-5, "feature_eps": 1e-2}

    def by_hand(x, weight, eps):
        wide, centre = x.float(), float("zero_centred" in options)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (centre + weight.float())).to(dtype)

    picked = torch.stack([features[b, parents[b]] for b in range(2)])
    expected = torch.cat((by_hand(embedding[tokens], token_norm, 1e-5), by_hand(picked, feature_norm, 1e-2)), dim=-1)
    for module in (draft_inputs, reference):
        values = module.draft_inputs(*operands, **norms, **options)
        assert_close(values, (expected, picked), dtype)
        if dtype == torch.float16:
            assert (values[0] != expected).float().mean() < 0.01
            assert (module.draft_inputs(*operands, **norms)[0] != expected).float().mean() > 0.1


def test_copies_are_exact(device):
    features, parents, tokens, embedding, *_ = case(device, torch.float32)
    inputs, picked = draft_inputs.draft_inputs(features, parents, tokens, embedding)
    for b in range(2):
        for i in range(5):
            assert torch.equal(picked[b, i], features[b, parents[b, i]])
            assert torch.equal(inputs[b, i], torch.cat((embedding[tokens[b, i]], picked[b, i])))


def test_without_parents_and_strided(device):
    features, _, tokens, embedding, *_ = case(device, torch.float32, parents=5)
    wide = torch.cat((embedding, embedding), dim=1)[:, : embedding.shape[1]]
    both = (features[:, ::2], None, tokens[:, ::2], wide)
    assert_close(draft_inputs.draft_inputs(*both), reference.draft_inputs(*both), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_partial_sums(device, dtype):
    _, _, tokens, embedding, token_norm, feature_norm = case(device, dtype, parents=5)
    sums = torch.randn(3, 2, 5, 48, generator=torch.Generator().manual_seed(1)).to(device)
    norms = {"token_norm": token_norm, "feature_norm": feature_norm}
    both = (SplitSums(sums, dtype), None, tokens, embedding)
    values, expected = draft_inputs.draft_inputs(*both, **norms), reference.draft_inputs(*both, **norms)
    assert_close(values, expected, dtype)
    assert torch.equal(values[1], expected[1])


def test_refuses(device):
    features, parents, tokens, embedding, token_norm, _ = case(device, torch.float32)
    for module in (draft_inputs, reference):
        with pytest.raises(ValueError, match=r"features must be \[B, P, H\]"):
            module.draft_inputs(features[0], parents, tokens, embedding)
        with pytest.raises(ValueError, match="tokens must be int64"):
            module.draft_inputs(features, parents, tokens.int(), embedding)
        with pytest.raises(ValueError, match="parents must be int64"):
            module.draft_inputs(features, parents[:, :2], tokens, embedding)
        with pytest.raises(ValueError, match="tokens must be int64"):
            module.draft_inputs(features, None, tokens, embedding)
        with pytest.raises(ValueError, match="token_norm must be"):
            module.draft_inputs(features, parents, tokens, embedding, token_norm=token_norm[:3])
        with pytest.raises(ValueError, match="embedding must be"):
            module.draft_inputs(features, parents, tokens, embedding.half())
    with pytest.raises(ValueError, match="rows must be contiguous"):
        draft_inputs.draft_inputs(features, parents, tokens, embedding.t().contiguous().t())
