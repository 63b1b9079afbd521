"""Logit processing: the kernels against the references, and the penalties against Hugging Face's processor."""

import itertools

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from eagle_triton.operands.ancestors import pack_ancestors
from eagle_triton.operands.logit_processing import LogitRules
from eagle_triton.ops import logit_processing
from eagle_triton.reference import logit_processing as reference
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
    """The operation's arguments: in the first sequence shallow nodes are too early for its stop tokens. Some of these
    lie beyond the vocabulary."""
    source = torch.Generator().manual_seed(nodes)
    logits = (3 * torch.randn(batch, nodes, vocabulary, generator=source)).to(dtype)
    parents = random_tree(batch, nodes, 5, source)
    tokens = torch.randint(vocabulary, (batch, nodes), generator=source)
    rules = LogitRules(
        penalty=torch.tensor([1.3, 0.7])[:batch],
        bias=(torch.rand(batch, vocabulary, generator=source) < 0.2) * torch.randn(batch, vocabulary, generator=source),
        seen=(torch.rand(batch, vocabulary, generator=source) < 0.1).to(torch.uint8),
        least=torch.tensor([13, 0], dtype=torch.int32)[:batch],
        presence=torch.tensor([0.7, -1.1])[:batch],
        frequency=torch.tensor([-0.3, 1.9])[:batch],
        counts=torch.randint(4, (batch, vocabulary), generator=source, dtype=torch.int32)
        * (torch.rand(batch, vocabulary, generator=source) < 0.1),
        answer=torch.tensor([11, 20], dtype=torch.int32)[:batch],  # the first root is the prompt's last token
    )
    rules.bias[0, 0] = float("-inf")
    lengths = torch.tensor([10, 20], dtype=torch.int32)[:batch]
    stop_ids = torch.tensor([[1, vocabulary - 1, -1, vocabulary], [0, 2, -1, 2**40 + 1]])[:batch]
    return logits, tokens, pack_ancestors(ancestors_of(parents)), rules, lengths, stop_ids


def moved_to(device: str, given: tuple) -> list:
    return [
        value.to(device) if isinstance(value, torch.Tensor) else type(value)(*(one.to(device) for one in value))
        for value in given
    ]


def test_the_reference_is_hugging_faces_rule_at_every_node():
    logits, tokens, ancestors, rules, lengths, stop_ids = arguments(12, 40)
    for off in (rules.least, rules.presence, rules.frequency):
        off.zero_()
    got = reference.process_logits(logits, tokens, ancestors, rules, lengths, stop_ids)
    prompts = [rules.seen[b].nonzero().flatten() for b in range(2)]
    for b in range(2):
        penalise = RepetitionPenaltyLogitsProcessor(penalty=rules.penalty[b].item())
        for i in range(12):
            on_path = tokens[b, [j for j in range(12) if ancestors[b, i, 0] >> j & 1]]
            sequence = torch.cat((prompts[b], on_path))[None]
            assert torch.equal(got[b, i], penalise(sequence, logits[b, i : i + 1].clone())[0] + rules.bias[b])


def test_presence_and_frequency_count_the_answer_on_the_path():
    logits, tokens, ancestors, rules, lengths, stop_ids = arguments(12, 9)
    rules.least.zero_(), rules.penalty.fill_(1), rules.bias.zero_()
    got = reference.process_logits(logits, tokens, ancestors, rules, lengths, stop_ids)
    for b in range(2):
        for i in range(12):
            want, counts = logits[b, i].clone(), rules.counts[b].clone()
            for j in range(12):
                counts[tokens[b, j]] += int(ancestors[b, i, 0] >> j & 1) and (j > 0 or b == 1)
            for token, count in enumerate(counts.tolist()):
                want[token] -= rules.frequency[b] * count + (rules.presence[b] if count else 0)
            assert torch.equal(got[b, i], want)


def test_stop_tokens_are_forbidden_where_they_would_stand_too_early():
    """Least 13, roots at 10 and 20: the tokens behind depths 0 and 1 stand at 11 and 12."""
    given = arguments(26, 40)
    free = reference.process_logits(*given[:3], given[3]._replace(least=torch.zeros(2, dtype=torch.int32)), *given[4:])
    got, forbidden = reference.process_logits(*given), torch.zeros_like(free, dtype=torch.bool)
    depths = torch.tensor([[bin(int(row)).count("1") - 1 for row in rows[:, 0]] for rows in given[2]])
    assert {0, 1, 2} <= set(depths[0].tolist())
    for token in (1, 39):
        forbidden[0, depths[0] < 2, token] = True
    assert torch.equal(got, free.masked_fill(forbidden, float("-inf")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("nodes", "vocabulary"), SIZES)
def test_kernel(device, nodes, vocabulary, dtype):
    given = arguments(nodes, vocabulary, dtype=dtype)
    expected = reference.process_logits(*given)
    moved = moved_to(device, given)
    out = logit_processing.process_logits(*moved)
    assert out.dtype == torch.float32 and torch.equal(out.cpu(), expected)
    wide = torch.stack((moved[0], moved[0]), dim=-1)[..., 0]  # strided
    assert torch.equal(logit_processing.process_logits(wide, *moved[1:]), out)


def test_rules_that_are_off_change_no_bit(device):
    given = arguments(7, 50, dtype=torch.bfloat16)
    none, never = torch.zeros(2), torch.zeros(2, dtype=torch.int32)
    off = LogitRules(torch.ones(2), torch.zeros(2, 50), given[3].seen, never, none, none, given[3].counts, never)
    for module, where in ((reference, "cpu"), (logit_processing, device)):
        out = module.process_logits(*moved_to(where, (*given[:3], off, *given[4:])))
        assert torch.equal(out.cpu(), given[0].float())


def test_nan_and_infinity_stay(device):
    given = arguments(3, 20)
    logits, rules = given[0], given[3]
    logits[0, 1, 1], logits[1, 2, 4] = float("nan"), float("-inf")  # at a stop token, too
    rules.seen.fill_(1)
    for module, where in ((reference, "cpu"), (logit_processing, device)):
        out = module.process_logits(*moved_to(where, given)).cpu()
        assert out.isnan().nonzero().tolist() == [[0, 1, 1]] and out[1, 2, 4] == float("-inf")


@pytest.mark.parametrize("module", [logit_processing, reference], ids=["kernel", "reference"])
def test_refusals(device, module):
    logits, tokens, ancestors, rules, lengths, stop_ids = moved_to(device, arguments(7, 50))
    ends = (lengths, stop_ids)
    bad = [
        ((logits[0], tokens, ancestors, rules, *ends), "logits"),
        ((logits, tokens.int(), ancestors, rules, *ends), "tokens"),
        ((logits, tokens, ancestors[:, :3], rules, *ends), "ancestors"),
        ((logits, tokens, ancestors, rules._replace(penalty=rules.penalty.double()), *ends), "rules.penalty"),
        ((logits, tokens, ancestors, rules._replace(bias=rules.bias[:, :9]), *ends), "rules.bias"),
        ((logits, tokens, ancestors, rules._replace(seen=rules.seen.bool()), *ends), "rules.seen"),
        ((logits, tokens, ancestors, rules._replace(seen=rules.seen.mT.contiguous().mT), *ends), "contiguous rows"),
        ((logits, tokens, ancestors, rules._replace(least=rules.least.long()), *ends), "rules.least"),
        ((logits, tokens, ancestors, rules._replace(presence=rules.presence.double()), *ends), "rules.presence"),
        ((logits, tokens, ancestors, rules._replace(frequency=rules.frequency[:1]), *ends), "rules.frequency"),
        ((logits, tokens, ancestors, rules._replace(counts=rules.counts.long()), *ends), "rules.counts"),
        ((logits, tokens, ancestors, rules._replace(answer=rules.answer.long()), *ends), "rules.answer"),
        ((logits, tokens, ancestors, rules, lengths.long(), stop_ids), "lengths"),
        ((logits, tokens, ancestors, rules, lengths, stop_ids[:1]), "stop_ids"),
        ((logits, tokens, ancestors, rules, lengths, stop_ids.int()), "stop_ids"),
    ]
    for given, message in bad:
        with pytest.raises(ValueError, match=f"process_logits: .*{message}"):
            module.process_logits(*given)


# --- masks ---


def masked(nodes: int, vocabulary: int, dtype: torch.dtype = torch.float32):
    """Logits, a mask that allows about half of the tokens, and three sequences, the second of which has no grammar."""
    source = torch.Generator().manual_seed(nodes)
    logits = torch.randn(3, nodes, vocabulary, generator=source).to(dtype)
    words = torch.randint(-(2**31), 2**31, (3, nodes, -(-vocabulary // 32)), generator=source).int()
    return logits, words, torch.tensor([True, False, True])


def test_the_mask_reads_each_tokens_bit():
    logits, allowed, restricted = masked(5, 70)
    before = logits.clone()
    reference.mask_tokens(logits, allowed, restricted)
    for b, i, token in itertools.product(range(3), range(5), range(70)):
        keeps = b == 1 or int(allowed[b, i, token // 32]) >> token % 32 & 1
        assert logits[b, i, token] == (before[b, i, token] if keeps else float("-inf"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("nodes", "vocabulary"), SIZES)
def test_mask_kernel(device, nodes, vocabulary, dtype):
    logits, allowed, restricted = masked(nodes, vocabulary, dtype)
    logits[0, 0, 1] = float("nan")
    wide = torch.stack((logits, logits), dim=-1).to(device)[..., 0]  # strided
    flat = logits.to(device)
    reference.mask_tokens(logits, allowed, restricted)
    assert logits[0, 0, 1].isnan() and logits.isinf().any()
    for given in (flat, wide):
        logit_processing.mask_tokens(given, allowed.to(device), restricted.to(device))
        assert torch.equal(given.cpu().nan_to_num(7.0), logits.nan_to_num(7.0))


@pytest.mark.parametrize("module", [logit_processing, reference], ids=["kernel", "reference"])
def test_mask_refusals(device, module):
    logits, allowed, restricted = (value.to(device) for value in masked(3, 70))
    bad = [
        ((logits[0], allowed, restricted), "logits"),
        ((logits, allowed[..., :2], restricted), "allowed"),
        ((logits, allowed.long(), restricted), "allowed"),
        ((logits, allowed, restricted[:2]), "restricted"),
        ((logits, allowed, restricted.int()), "restricted"),
    ]
    for given, message in bad:
        with pytest.raises(ValueError, match=f"mask_tokens: .*{message}"):
            module.mask_tokens(*given)
