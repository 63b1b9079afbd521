"""Drafts from repetition in a model's tree: the kernels against their references, and both against plain loops."""

import math

import pytest
import torch

from eagle_triton import tree_decoding
from eagle_triton.operands.grafting import BUCKETS, FIRST, MAX_COUNTED, NEXT, PRIOR_WEIGHT
from eagle_triton.operands.suffix_match import RepeatDrafts
from eagle_triton.ops import grafting
from eagle_triton.reference import grafting as reference
from eagle_triton.reference import tree_decoding as tree_reference


def some_drafts(generator, batch, places, vocabulary, tree=False, device="cpu") -> RepeatDrafts:
    """Drafts of random lengths with falling probabilities: chains, or trees in which every parent comes first."""

    def numbers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    count = numbers(0, places + 1, batch)
    place = torch.arange(places)
    empty = place >= count[:, None]
    parents = torch.arange(-1, places - 1).expand(batch, -1).clone()
    if tree:
        parents = torch.stack(
            [numbers(-1, max(index, 0), batch) if index else -torch.ones(batch).long() for index in place]
        )
        parents = parents.t()
    tokens = numbers(0, vocabulary, batch, places)
    steps = torch.rand(batch, places, generator=generator) * 0.5 + 0.5
    steps = torch.where(torch.rand(batch, 1, generator=generator) < 0.5, steps, 1.0)
    return RepeatDrafts(
        tokens.masked_fill(empty, -1).to(device),
        parents.masked_fill(empty, -1).int().to(device),
        steps.cumprod(1).masked_fill(empty, 0).to(device),
        torch.where(count > 0, numbers(2, 30, batch), 0).int().to(device),
        torch.where(count > 0, numbers(1, 7, batch), 0).int().to(device),
        (torch.rand(batch, generator=generator) < 0.5).to(device),
    )


def model_candidates(generator, batch, k, widths, vocabulary):
    """Candidates of random beams, scores falling along every path; siblings differ, as a model's do."""
    total = k * (1 + sum(widths))
    tokens = torch.stack(
        [
            torch.cat([torch.randperm(vocabulary, generator=generator)[:k] for _ in range(total // k)])
            for _ in range(batch)
        ]
    )
    scores = torch.zeros(batch, total)
    beams = torch.zeros(batch, sum(widths), dtype=torch.int64)
    for row in range(batch):
        scores[row, :k] = torch.randn(k, generator=generator).log_softmax(0)
        start, slot = 0, 0
        for level, width in enumerate(widths):
            size = k * (1 if level == 0 else widths[level - 1])
            chosen = (start + torch.randperm(size, generator=generator)[:width]).sort().values
            for parent in chosen:
                beams[row, slot] = parent
                children = slice(k * (1 + slot), k * (2 + slot))
                scores[row, children] = scores[row, parent] + torch.randn(k, generator=generator).log_softmax(0)
                slot += 1
            start += size
    return tokens, scores, beams


def grafted_by_hand(tokens, scores, beams, k, drafts, estimates):
    """One sequence's candidates as a dictionary from path to score."""
    paths = {}

    def path_of(flat):
        slot = flat // k - 1
        return (*(() if slot < 0 else path_of(int(beams[slot]))), int(tokens[flat]))

    for flat in range(len(tokens)):
        paths[path_of(flat)] = float(scores[flat])
    own = []
    for token, parent, estimate in zip(
        drafts.tokens.tolist(), drafts.parents.tolist(), estimates.tolist(), strict=True
    ):
        own.append(None if token < 0 else (*(() if parent < 0 else own[parent]), token))
        if token >= 0:
            paths[own[-1]] = max(paths.get(own[-1], -math.inf), estimate)
    return paths


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("k, widths", [(3, (3, 3)), (2, (2, 1, 1)), (4, ()), (1, (1, 1))], ids=str)
def test_graft(device, k, widths, tree):
    generator, shared = torch.Generator().manual_seed(k + tree), 0
    for places in (1, 5, 9):
        batch, vocabulary = 6, 5
        tokens, scores, beams = model_candidates(generator, batch, k, widths, vocabulary)
        drafts = some_drafts(generator, batch, places, vocabulary, tree)
        if tree:  # siblings must differ
            same = (drafts.tokens[:, :, None] == drafts.tokens[:, None]) & (
                drafts.parents[:, :, None] == drafts.parents[:, None]
            )
            drafts = drafts._replace(
                tokens=torch.where(same.tril(-1).any(2), vocabulary + torch.arange(places), drafts.tokens)
            )
        estimates = drafts.probs.log() * 0.7
        want = reference.graft(tokens, scores, beams, k, drafts, estimates)
        to = lambda value: value.to(device)  # noqa: E731
        got = grafting.graft(to(tokens), to(scores), to(beams), k, RepeatDrafts(*map(to, drafts)), to(estimates))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.cpu(), b)
        slot = torch.arange(tokens.shape[1]) // k - 1
        above = torch.where(slot < 0, -1, torch.nn.functional.pad(beams, (0, 1))[:, slot])
        own, parents = (tokens, scores, beams[:, :0], 1), (above + 1).int()  # the same as nodes of a tree
        named = reference.graft(*own, drafts, estimates, parents=parents)
        moved = [to(value) if isinstance(value, torch.Tensor) else value for value in own]
        got = grafting.graft(*moved, RepeatDrafts(*map(to, drafts)), to(estimates), parents=to(parents))
        expected = *want[:2], torch.cat((above.int(), want.parents), 1)
        for a, b, c in zip(named, got, expected, strict=True):
            assert torch.equal(a, c) and torch.equal(b.cpu(), c)
        root = torch.zeros(batch, dtype=torch.int64)
        nodes = 1 + tokens.shape[1] + places
        built = tree_reference.build_tree(root, want.candidates, want.scores, beams, nodes, k, grafted=want.parents)
        for row in range(batch):
            one = RepeatDrafts(*(value[row] for value in drafts))
            paths = grafted_by_hand(tokens[row], scores[row], beams[row], k, one, estimates[row])
            seen, node_paths = set(), [()]
            for token, parent in zip(built[0][row, 1:].tolist(), built[1][row, 1:].tolist(), strict=True):
                node_paths.append((*node_paths[parent], token))
                if token >= 0:
                    assert node_paths[-1] not in seen, "a node stands twice"
                    seen.add(node_paths[-1])
            assert seen == set(paths)
            shared += tokens.shape[1] + int((one.tokens >= 0).sum()) - len(paths)
        best = tree_reference.build_tree(root, want.candidates, want.scores, beams, 4, k, grafted=want.parents)
        for row in range(batch):
            one = RepeatDrafts(*(value[row] for value in drafts))
            paths = grafted_by_hand(tokens[row], scores[row], beams[row], k, one, estimates[row])
            chosen, node_paths = [], [()]
            for token, parent in zip(best[0][row, 1:].tolist(), best[1][row, 1:].tolist(), strict=True):
                node_paths.append((*node_paths[parent], token))
                chosen.append(paths.get(node_paths[-1], -math.inf))
            assert sorted(chosen) == pytest.approx(sorted(paths.values())[-3:]), "not the best three"
        kernel = tree_decoding.build_tree(
            to(root), got.candidates, got.scores, to(beams), nodes, k, grafted=got.parents
        )
        for a, b in zip(kernel, built, strict=True):
            assert torch.equal(a.cpu(), b)
    assert shared, "no draft is shared: the test shows little"


def test_build_tree_of_grafts_alone(device):
    drafts = some_drafts(torch.Generator().manual_seed(1), 5, 7, 9, tree=True)
    root = torch.arange(5)
    arguments = (root, drafts.tokens, drafts.probs.log(), drafts.tokens[:, :0])
    want = tree_reference.build_tree(*arguments, 8, 1, grafted=drafts.parents)
    got = tree_decoding.build_tree(*(value.to(device) for value in arguments), 8, 1, grafted=drafts.parents.to(device))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.cpu(), b)
    assert torch.equal(want[0][:, 1:], drafts.tokens) and torch.equal(want[1][:, 1:], drafts.parents + 1)


def test_estimates_are_the_priors_until_something_was_counted(device):
    generator = torch.Generator().manual_seed(2)
    drafts = RepeatDrafts(*(value.to(device) for value in some_drafts(generator, 40, 6, 9)))
    counts = torch.zeros(BUCKETS, 9, 2, dtype=torch.int32, device=device)[:, :6]
    buckets = torch.full((40,), 99, dtype=torch.int32, device=device)
    scores = grafting.estimate_scores(drafts, counts, buckets=buckets)
    want_buckets = torch.zeros(40, dtype=torch.int32, device=device)
    want = reference.estimate_scores(drafts, counts, buckets=want_buckets)
    assert torch.equal(buckets, want_buckets) and len(set(buckets.tolist())) > 10
    assert torch.equal(scores.isinf(), want.isinf()) and torch.equal(scores.isinf(), drafts.tokens < 0)
    torch.testing.assert_close(scores, want, rtol=1e-5, atol=1e-6)
    for row in range(40):
        count = int((drafts.tokens[row] >= 0).sum())
        if not count:
            continue
        match, seen, probs = int(drafts.match[row]), int(drafts.occurrences[row]), drafts.probs[row].tolist()
        kind = 3 if probs[0] < 0.999 else (seen >= 2) + (seen >= 4)
        first = FIRST[(match > 3) + (match > 7) + (match > 15)][kind]
        expected = [math.log(first * NEXT**index * probs[index] / probs[0]) for index in range(count)]
        assert scores[row, :count].tolist() == pytest.approx(expected, rel=1e-4)


def test_counts_change_estimates_as_said(device):
    counts = torch.zeros(BUCKETS, 3, 2, dtype=torch.int32, device=device)
    sure = torch.tensor([[1.0, 1.0, 0.5]], device=device)
    drafts = RepeatDrafts(
        torch.tensor([[3, 4, 5]], device=device),
        torch.tensor([[-1, 0, 1]], dtype=torch.int32, device=device),
        sure,
        *(torch.tensor([value], dtype=torch.int32, device=device) for value in (9, 2)),
        torch.tensor([True], device=device),
    )
    bucket = 16 + 2 * 4 + 1
    counts[bucket] = torch.tensor([[12, 20], [7, 12], [0, 7]], dtype=torch.int32)
    counts[bucket - 16] = 1000  # of the sequences' own text: another source
    rates = [(12 + 8 * FIRST[2][1]) / 28, (7 + 8 * NEXT) / 20, 8 * NEXT / 15]
    assert PRIOR_WEIGHT == 8
    want = [rates[0], rates[0] * rates[1], rates[0] * rates[1] * rates[2] * 0.5]
    for module in (grafting, reference):
        scores = module.estimate_scores(drafts, counts, buckets=torch.zeros(1, dtype=torch.int32, device=device))
        assert scores.exp()[0].tolist() == pytest.approx(want, rel=1e-5)


def test_count_right(device):
    generator = torch.Generator().manual_seed(3)
    batch, places, columns = 30, 5, 12
    want = torch.randint(0, 30, (BUCKETS, places, 2), dtype=torch.int32, generator=generator)
    want[7, 2] = torch.tensor([600, MAX_COUNTED - 1], dtype=torch.int32)
    expected, got = want.tolist(), want.clone().to(device)
    tokens = torch.randint(0, 2, (batch, columns), generator=generator)
    drafted = torch.randint(0, 2, (batch, places), generator=generator)
    drafted = drafted.masked_fill(
        torch.arange(places) >= torch.randint(0, places + 1, (batch, 1), generator=generator), -1
    )
    before = torch.randint(0, columns - 6, (batch,), dtype=torch.int32, generator=generator)
    accepted = torch.randint(-1, 5, (batch,), dtype=torch.int32, generator=generator)
    buckets = torch.randint(0, BUCKETS, (batch,), dtype=torch.int32, generator=generator)
    buckets[-1], drafted[-1], accepted[-1] = 7, tokens[-1, 1:6], 4
    before[-1] = 0
    for row in range(batch):
        for place in range(min(places, int(accepted[row]) + 1)):
            token = int(drafted[row, place])
            if token < 0:
                break
            cell = expected[int(buckets[row])][place]
            right = token == int(tokens[row, int(before[row]) + 1 + place])
            cell[0] += right
            cell[1] += 1
            if not right:
                break
    expected = [[[n // 2 for n in cell] if cell[1] >= MAX_COUNTED else cell for cell in row] for row in expected]
    reference.count_right(want, buckets, drafted, tokens, before, accepted)
    assert want.tolist() == expected and expected[7][2][1] == MAX_COUNTED // 2
    grafting.count_right(got, *(value.to(device) for value in (buckets, drafted, tokens, before, accepted)))
    assert got.tolist() == expected


def bad_arguments():
    drafts = some_drafts(torch.Generator().manual_seed(4), 2, 3, 5)
    counts, buckets = torch.zeros(BUCKETS, 3, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    tokens, scores, beams = (
        torch.zeros(2, 6, dtype=torch.int64),
        torch.zeros(2, 6),
        torch.zeros(2, 1, dtype=torch.int64),
    )
    wide = drafts._replace(probs=torch.zeros(2, 6)[:, ::2])
    estimates, before = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32)
    graft, estimate, count = "graft", "estimate_scores", "count_right"
    yield graft, (tokens.int(), scores, beams, 3, drafts, estimates), {}, "candidates must be int64"
    yield graft, (tokens, scores[:1], beams, 3, drafts, estimates), {}, "scores must be float32"
    yield graft, (tokens, scores, beams, 0, drafts, estimates), {}, "top_k must be at least 1"
    yield graft, (tokens, scores, beams, 3, drafts, estimates[:, :2]), {}, "estimates must be"
    yield estimate, (drafts, counts[:, :2]), {"buckets": buckets}, "counts must be"
    yield estimate, (drafts, counts), {"buckets": buckets.long()}, "buckets must be"
    yield estimate, (wide, counts), {"buckets": buckets}, "drafts.probs must be contiguous"
    yield count, (counts, buckets, drafts.tokens.int(), tokens, before, before), {}, "drafted must be"
    yield count, (counts, buckets, drafts.tokens, tokens, before.long(), before), {}, "before must be"


@pytest.mark.parametrize("name, arguments, options, message", list(bad_arguments()), ids=lambda value: str(value)[:20])
def test_bad_arguments(name, arguments, options, message):
    for module in (grafting, reference):
        with pytest.raises(ValueError, match=message):
            getattr(module, name)(*arguments, **options)


def test_build_tree_refuses_grafts_that_do_not_fit():
    drafts = some_drafts(torch.Generator().manual_seed(5), 2, 3, 5)
    root, none = torch.zeros(2, dtype=torch.int64), drafts.tokens[:, :0]
    for module in (tree_decoding, tree_reference):
        with pytest.raises(ValueError, match="grafted must be int32"):
            module.build_tree(root, drafts.tokens, drafts.probs, none, 3, 1, grafted=drafts.parents.long())
        with pytest.raises(ValueError, match="and no selected"):
            chosen = torch.tensor([0, 1])
            module.build_tree(root, drafts.tokens, drafts.probs, none, 3, 1, chosen, grafted=drafts.parents)
