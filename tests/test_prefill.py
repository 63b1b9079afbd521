"""Reading prompts in pieces: how they are planned, and that packed together they give what each gives alone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_triton.engine.batch import Batch, Request
from eagle_triton.engine.prefill_plan import FEW_ROWS, FEW_SIZES, PIECE_ROWS, SIZES, plan_forwards
from eagle_triton.engine.tree_spec import PLAIN
from tests.test_batch import LARGER, PROCESSED, REQUESTS, SMALL, alone, drain, prompt
from tests.test_engine import engine_for
from tests.tiny import draft_cache, target_cache, tiny_model


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.integers(0, 70), st.integers(1, 9000), min_size=1, max_size=40))
def test_a_plan_reads_every_token_once_and_in_order(lengths):
    read = dict.fromkeys(lengths, 0)
    for forward in plan_forwards(lengths):
        assert 0 < len(forward.pieces) <= forward.size
        assert forward.size in (SIZES if forward.rows == PIECE_ROWS else FEW_SIZES)
        for piece in forward.pieces:
            assert piece.start == read[piece.slot] and 0 < piece.end - piece.start <= forward.rows
            assert piece.last == (piece.end == lengths[piece.slot])
            read[piece.slot] = piece.end
    assert read == lengths


def rows_of(lengths: dict[int, int]) -> list[int]:
    return [forward.rows * forward.size for forward in plan_forwards(lengths)]


def test_a_plan_wastes_little():
    assert rows_of({0: 512}) == [512] and rows_of({0: 64}) == [64] and rows_of({3: 9}) == [16]
    assert rows_of(dict.fromkeys(range(32), 512)) == [SIZES[-1] * PIECE_ROWS] * (32 * 512 // (SIZES[-1] * PIECE_ROWS))
    assert rows_of(dict.fromkeys(range(64), FEW_ROWS)) == [1024]
    for length in range(400, 40_000, 777):
        assert sum(rows_of({0: length})) <= 1.2 * length + 5 * PIECE_ROWS


def packing(**options):
    """Two engines of one model: prompts in pieces, and one by one."""
    model = tiny_model(layers=5, **options)
    engines = [engine_for(model) for _ in range(2)]
    engines[0].pack_prompts = True
    return engines


@pytest.mark.parametrize("eagle3", [True, False], ids=["eagle3", "eagle1"])
def test_packed_prompts_fill_the_caches_as_each_alone_does(eagle3):
    packed, plain = packing(eagle3=eagle3, **SMALL)
    lengths = [5, 130, 64, 16, 300, 17]
    requests = [Request(prompt(length, seed), 5) for seed, length in enumerate(lengths)]
    batches = [Batch(engine, 7, engine.draft.read_tree(), 320) for engine in (packed, plain)]
    for batch in batches:
        batch.admit_all(requests)
    ours, theirs = (batch.state for batch in batches)
    for slot, length in enumerate(lengths):
        for cache in (target_cache, draft_cache):
            rows = [cache(state.sequences)[:, :, slot, :, :length] for state in (ours, theirs)]
            torch.testing.assert_close(*rows, atol=2e-5, rtol=1e-4)
            assert rows[0].abs().amax((0, 1, 2, 4)).min() > 0
        assert int(ours.lengths[slot]) == length and int(ours.sequences.prompt_lengths[slot]) == length
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(ours.tree, name)[:6], getattr(theirs.tree, name)[:6])
    for batch in batches:
        batch.close()


@pytest.mark.parametrize("tree", ["tree", "plain"])
def test_packed_requests_that_come_and_go_get_what_each_gets_alone(tree):
    packed, plain = packing(**LARGER)
    spec = PLAIN if tree == "plain" else plain.draft.read_tree()
    requests = [*REQUESTS, *PROCESSED, Request(prompt(200, 7), 9), Request(prompt(200, 7), 9)]
    expected = [alone(plain, request, spec) for request in requests]
    for every, order in ((1, requests), (3, requests[::-1])):
        with Batch(packed, 4, spec, 240) as batch:
            batch.admit_all(order[:3])
            results = drain(batch, order[3:], every)
        for request, tokens in zip(requests, expected, strict=True):
            assert results[id(request)][0] == tokens


def test_a_request_that_enters_leaves_the_others_trees_as_they_are():
    packed, _ = packing(**LARGER)
    with Batch(packed, 4, packed.draft.read_tree(), 240) as batch:
        batch.admit_all([REQUESTS[0], REQUESTS[2]])
        for _ in range(2):
            batch.step()
        before = [value[:2].clone() for value in batch.state.tree]
        caches = [cache(batch.sequences)[:, :, :2].clone() for cache in (target_cache, draft_cache)]
        lengths = batch.sequences.lengths[:2].tolist()
        batch.admit(Request(prompt(100, 3), 5))
        assert batch.sequences.lengths[:2].tolist() == lengths
        for value, old in zip(batch.state.tree, before, strict=True):
            assert torch.equal(value[:2], old)
        for cache, old in zip((target_cache, draft_cache), caches, strict=True):
            for slot, length in enumerate(lengths):
                assert torch.equal(cache(batch.sequences)[:, :, slot, :, :length], old[:, :, slot, :, :length])


def test_nan_logits_after_a_packed_prompt_harm_nobody_else():
    model = tiny_model(layers=5, **SMALL)
    engine = engine_for(model)
    engine.pack_prompts = True
    running = Request(prompt(9, vocab=31), 20)
    expected = alone(engine, running)
    with Batch(engine, 3, engine.draft.read_tree(), 80) as batch:
        batch.admit(running)
        got = [token for row in batch.step() for token in row.tokens]
        weight = model.base_model.model.embed_tokens.weight.data
        saved, weight[31] = weight[31].clone(), float("nan")
        with pytest.raises(RuntimeError, match="NaN after the prompts of sequences \\[1\\]"):
            batch.admit_all([Request(prompt(4, vocab=31), 3), Request(torch.tensor([4, 31]), 5)])
        weight[31] = saved
        assert batch.free == [1, 2]
        results = drain(batch, [replace(running)])
    tokens = [tokens for tokens, _ in results.values()]
    assert sorted([got + tokens[0], tokens[1]]) == [expected] * 2
