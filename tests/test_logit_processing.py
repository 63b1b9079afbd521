"""Logit processing: the kernel against the reference, and the reference against Hugging Face's processor."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from eagle_triton import logit_processing
from eagle_triton.reference import logit_processing as reference
from eagle_triton.reference.attention import pack_ancestors
from tests.test_verification import random_tree

CUDA = torch.cuda.is_available()
SIZES = [(1, 5), (7, 50), (26, 4097), (65, 300)] + ([(60, 128256)] if CUDA else [])


def ancestors_of(parents: torch.Tensor) -> torch.Tensor:
    """Whether node j is i or an ancestor of i: bool [B, N, N]."""
    batch, nodes = parents.shape
    matrix = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
    for b in range(batch):
        for i in range(1, nodes):
            matrix[b, i] |= matrix[b, parents[b, i]]
    return matrix


def arguments(nodes: int, vocabulary: int, batch: int = 2, dtype: torch.dtype = torch.float32):
    source = torch.Generator().manual_seed(nodes)
    logits = (3 * torch.randn(batch, nodes, vocabulary, generator=source)).to(dtype)
    parents = random_tree(batch, nodes, 5, source)
    tokens = torch.randint(vocabulary, (batch, nodes), generator=source)
    rules = reference.LogitRules(
        penalty=torch.tensor([1.3, 0.7])[:batch],
        bias=(torch.rand(batch, vocabulary, generator=source) < 0.2) * torch.randn(batch, vocabulary, generator=source),
        seen=(torch.rand(batch, vocabulary, generator=source) < 0.1).to(torch.uint8),
    )
    rules.bias[0, 0] = float("-inf")
    return logits, tokens, pack_ancestors(ancestors_of(parents)), rules


def test_the_reference_is_hugging_faces_rule_at_every_node():
    logits, tokens, ancestors, rules = arguments(12, 40)
    got = reference.process_logits(logits, tokens, ancestors, rules)
    prompts = [rules.seen[b].nonzero().flatten() for b in range(2)]
    for b in range(2):
        penalise = RepetitionPenaltyLogitsProcessor(penalty=rules.penalty[b].item())
        for i in range(12):
            on_path = tokens[b, [j for j in range(12) if ancestors[b, i, 0] >> j & 1]]
            sequence = torch.cat((prompts[b], on_path))[None]
            assert torch.equal(got[b, i], penalise(sequence, logits[b, i : i + 1].clone())[0] + rules.bias[b])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("nodes", "vocabulary"), SIZES)
def test_kernel(device, nodes, vocabulary, dtype):
    logits, tokens, ancestors, rules = arguments(nodes, vocabulary, dtype=dtype)
    expected = reference.process_logits(logits, tokens, ancestors, rules)
    moved = [value.to(device) for value in (logits, tokens, ancestors)]
    rules = reference.LogitRules(*(value.to(device) for value in rules))
    out = logit_processing.process_logits(*moved, rules)
    assert out.dtype == torch.float32 and torch.equal(out.cpu(), expected)
    wide = torch.stack((moved[0], moved[0]), dim=-1)[..., 0]  # strided
    assert torch.equal(logit_processing.process_logits(wide, *moved[1:], rules), out)


def test_rules_that_are_off_change_no_bit(device):
    logits, tokens, ancestors, rules = arguments(7, 50, dtype=torch.bfloat16)
    off = reference.LogitRules(torch.ones(2), torch.zeros(2, 50), rules.seen)
    for module, where in ((reference, "cpu"), (logit_processing, device)):
        moved = [value.to(where) for value in (logits, tokens, ancestors)]
        out = module.process_logits(*moved, reference.LogitRules(*(value.to(where) for value in off)))
        assert torch.equal(out.cpu(), logits.float())


def test_nan_and_infinity_stay(device):
    logits, tokens, ancestors, rules = arguments(3, 20)
    logits[0, 1, 3], logits[1, 2, 4] = float("nan"), float("-inf")
    rules.seen.fill_(1)
    for module, where in ((reference, "cpu"), (logit_processing, device)):
        moved = [value.to(where) for value in (logits, tokens, ancestors)]
        out = module.process_logits(*moved, reference.LogitRules(*(value.to(where) for value in rules))).cpu()
        assert out.isnan().nonzero().tolist() == [[0, 1, 3]] and out[1, 2, 4] == float("-inf")


@pytest.mark.parametrize("module", [logit_processing, reference], ids=["kernel", "reference"])
def test_refusals(device, module):
    logits, tokens, ancestors, rules = arguments(7, 50)
    logits, tokens, ancestors = (value.to(device) for value in (logits, tokens, ancestors))
    rules = reference.LogitRules(*(value.to(device) for value in rules))
    bad = [
        ((logits[0], tokens, ancestors, rules), "logits"),
        ((logits, tokens.int(), ancestors, rules), "tokens"),
        ((logits, tokens, ancestors[:, :3], rules), "ancestors"),
        ((logits, tokens, ancestors, rules._replace(penalty=rules.penalty.double())), "rules.penalty"),
        ((logits, tokens, ancestors, rules._replace(bias=rules.bias[:, :9])), "rules.bias"),
        ((logits, tokens, ancestors, rules._replace(seen=rules.seen.bool())), "rules.seen"),
        ((logits, tokens, ancestors, rules._replace(seen=rules.seen.mT.contiguous().mT)), "stride 1"),
    ]
    for given, message in bad:
        with pytest.raises(ValueError, match=f"process_logits: .*{message}"):
            module.process_logits(*given)
