"""Reading prompts in pieces: how they are planned, and that packed together they give what each gives alone."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_triton import EAGLEConfig, EAGLEInference
from eagle_triton.engine import long_prompts
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.prompt_chunks import PromptSpan
from eagle_triton.engine.prompt_queue import FEW_ROWS, PIECE_ROWS, SIZES, Forward, Piece, PromptQueue
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import NAN, Request, RunningRequest
from eagle_triton.engine.tree_spec import PLAIN
from eagle_triton.ops import prompt_attention
from tests.failing import failing
from tests.test_batch import LARGER, PROCESSED, REQUESTS, SMALL, WARM, alone, drain, prompt
from tests.test_engine import engine_for
from tests.test_prompt_attention import torch_instead_of_cudnn
from tests.tiny import draft_cache, target_cache, tiny_model


def drained(lengths: dict[int, int], most: int | None = None) -> list[Forward]:
    """The forwards that read random prompts of these lengths."""
    queue, forwards = PromptQueue(packed=True), []
    queue.add({slot: torch.randint(2**40, (length,)) for slot, length in lengths.items()})
    while queue:
        forwards.append(queue.next(most))
        assert queue.next(most) == forwards[-1]  # until it is taken
        queue.take(forwards[-1])
        for slot in forwards[-1].ended:
            assert queue.holds(slot) and queue.finish(slot) == [] and not queue.holds(slot)
    return forwards


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(st.integers(0, 70), st.integers(1, 9000), min_size=1, max_size=40),
    st.sampled_from([None, 1, 100, 512]),
)
def test_every_token_is_read_once_and_in_order(lengths, most):
    read = dict.fromkeys(lengths, 0)
    for forward in drained(lengths, most):
        assert 0 < len(forward.pieces) <= forward.size and forward.size in SIZES[forward.rows]
        assert most is None or forward.size * forward.rows <= max(most, forward.rows)
        for piece in forward.pieces:
            assert piece.start == read[piece.slot] and 0 < piece.end - piece.start <= forward.rows
            assert piece.last == (piece.end == lengths[piece.slot])
            read[piece.slot] = piece.end
    assert read == lengths


def rows_of(lengths: dict[int, int]) -> list[int]:
    return [forward.rows * forward.size for forward in drained(lengths)]


def test_little_is_read_in_vain():
    assert rows_of({0: 512}) == [512] and rows_of({0: 64}) == [64] and rows_of({3: 9}) == [16]
    assert rows_of({0: 1536}) == [1536] and rows_of({0: 2048}) == [2048]
    most = SIZES[PIECE_ROWS][-1] * PIECE_ROWS
    assert rows_of(dict.fromkeys(range(32), 512)) == [most] * (32 * 512 // most)
    assert rows_of(dict.fromkeys(range(64), FEW_ROWS)) == [1024]
    for length in range(400, 40_000, 777):
        assert sum(rows_of({0: length})) <= 1.2 * length + 5 * PIECE_ROWS


def pieces_of(queue: PromptQueue) -> list[tuple[int, int]]:
    return [(piece.slot, piece.end - piece.start) for piece in queue.next().pieces]


def test_equal_prompts_are_read_once_as_long_as_somebody_wants_them():
    prompt, other = torch.arange(100), torch.arange(100, 200)
    queue = PromptQueue(packed=True)
    queue.add({2: prompt, 0: other, 5: prompt, 1: prompt})
    assert pieces_of(queue) == [(2, 64), (2, 36), (0, 64), (0, 36)]
    assert queue.drop(2) == [] and queue.holds(2)  # read on for two others
    assert queue.drop(5) == [5] and len(pieces_of(queue)) == 4
    queue.take(queue.next())
    assert queue.finish(2) == [1] and queue.finish(0) == [] and not queue.holds(2) and not queue

    queue.add({2: prompt, 5: prompt})
    assert queue.drop(2) == [] and queue.drop(5) == [5, 2]  # now nobody wants it
    assert not queue and not queue.holds(2)
    queue.add({3: prompt, 4: prompt[:9], 6: prompt[:9]})  # a short one is read as often as it is asked for
    assert queue.drop(3) == [3] and pieces_of(queue) == [(4, 9), (6, 9)]


@pytest.mark.parametrize("prefixes", [True, False])
def test_a_prompt_that_is_overwritten_while_it_waits_is_another_one(prefixes):
    engine, plain = packing(**SMALL)
    engine.prefixes = prefixes
    buffer = prompt(100)
    first, second = buffer.clone(), (buffer + 1) % 32
    with Batch(engine, 2, engine.draft.read_tree(), 120) as batch:
        batch.enter_all([Request(buffer, 9)])
        buffer.copy_(second)
        batch.enter_all([Request(buffer, 9)])
        got: dict[int, list[int]] = {}
        steps_to_end(batch, got)
    assert got == {slot: alone(plain, Request(tokens, 9), PLAIN) for slot, tokens in enumerate((first, second))}


def packing(packed=True, **options):
    """Two engines of one model: prompts in pieces, unless packed is False, and one by one."""
    model = tiny_model(**options)
    engines = [engine_for(model) for _ in range(2)]
    engines[0].pack_prompts = packed
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


def test_packed_requests_that_come_and_go_get_what_each_gets_alone():
    packed, plain = packing(layers=3, **SMALL)
    requests = [*REQUESTS, *PROCESSED, Request(prompt(200, 7), 9), Request(prompt(200, 7), 9)]
    expected = [alone(plain, request, PLAIN) for request in requests]
    for spec in (PLAIN, plain.draft.read_tree()):
        with Batch(packed, 4, spec, 240) as batch:
            batch.admit_all(requests[:-4:-1])
            results = drain(batch, requests[-4::-1], every=3)
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
    model = tiny_model(layers=3, **SMALL)
    engine = engine_for(model)
    engine.pack_prompts = True
    running = Request(prompt(9, vocab=31), 20)
    expected = alone(engine, running, PLAIN)
    with Batch(engine, 3, engine.draft.read_tree(), 80) as batch:
        batch.admit(running)
        got = [token for row in batch.step() for token in row.tokens]
        weight = model.base_model.model.embed_tokens.weight.data
        saved, weight[31] = weight[31].clone(), float("nan")
        with pytest.raises(RuntimeError, match="NaN after the prompts of sequences \\[1\\]"):
            batch.admit_all([Request(prompt(4, vocab=31), 3), Request(torch.tensor([4, 31]), 5)])
        weight[31] = saved
        assert batch.free == [1, 2]
        results = drain(batch, [again := replace(running)])
    assert got + results[id(running)][0] == results[id(again)][0] == expected


PACKED = pytest.mark.parametrize("packed", [True, False], ids=["packed", "in-turn"])


def steps_of(batch: Batch, slots: dict[int, list[int]], count: int) -> None:
    for _ in range(count):
        for row in batch.step():
            assert row.error is None
            slots.setdefault(row.slot, []).extend(row.tokens)


def steps_to_end(batch: Batch, slots: dict[int, list[int]]) -> None:
    while batch.running:
        steps_of(batch, slots, 1)


@pytest.mark.parametrize(("packed", "in_flight"), [(True, 2), (False, 1)], ids=["packed", "in-turn"])
def test_prompts_are_read_between_steps(packed, in_flight):
    """A long prompt is read bit by bit while others decode, which notice nothing of it."""
    engine, plain = packing(packed, **WARM)
    short = Request(prompt(9, 1, vocab=12), 24)
    long = Request(prompt(300, 2, vocab=12), 8, SamplingParams(temperature=1.0, seed=3))
    twin = replace(long, sampling=SamplingParams())
    expected = [alone(plain, request, PLAIN) for request in (short, long, twin)]
    with Batch(engine, 4, engine.draft.read_tree(), 320, prompt_tokens=64) as batch:
        batch.in_flight.most = in_flight
        got: dict[int, list[int]] = {}
        assert batch.enter_all([short]) == [0] and batch.reading and batch.running == [0]
        steps_of(batch, got, 1)
        assert not batch.reading and batch.enter_all([long, twin]) == [1, 2] and batch.free == [3]
        steps_of(batch, got, 1)
        assert batch.reading == packed  # what is the twin's own; in turn, it takes all of the other's
        steps_to_end(batch, got)
    assert [got[slot] for slot in range(3)] == expected


@pytest.mark.parametrize("prefixes", [True, False])
@pytest.mark.parametrize("kept", [1, 2])
def test_a_request_released_while_it_is_read_leaves_the_others(kept, prefixes):
    engine, plain = packing(**WARM)
    engine.prefixes = prefixes
    running, long = Request(prompt(9, 1, vocab=12), 20), Request(prompt(200, 2, vocab=12), 8)
    with Batch(engine, 4, engine.draft.read_tree(), 320, prompt_tokens=64) as batch:
        got: dict[int, list[int]] = {}
        batch.enter_all([running])
        steps_of(batch, got, 1)
        batch.enter_all([long, replace(long)])  # the second takes what is read of the first
        steps_of(batch, got, 1)
        batch.release(3 - kept)
        assert batch.running == [0, kept] and batch.free == ([3] if kept == 2 and not prefixes else [3 - kept, 3])
        (late,) = batch.enter_all([Request(prompt(150, 4, vocab=12), 5)])
        steps_to_end(batch, got)
        assert batch.free == [0, 1, 2, 3]
    assert got[0] == alone(plain, running, PLAIN) and got[kept] == alone(plain, long, PLAIN)
    assert got[late] == alone(plain, Request(prompt(150, 4, vocab=12), 5), PLAIN)


@PACKED
def test_nan_after_a_prompt_ends_that_request_alone(packed):
    model = tiny_model(layers=3, **SMALL)
    engine = engine_for(model)
    engine.pack_prompts = packed
    good, bad = Request(prompt(9, vocab=31), 20), Request(torch.tensor([4, 31, 7]), 5)
    expected = alone(engine, good, PLAIN)
    with Batch(engine, 3, engine.draft.read_tree(), 80) as batch:
        weight = model.base_model.model.embed_tokens.weight.data
        saved, weight[31] = weight[31].clone(), float("nan")
        batch.enter_all([good, bad])
        rows = batch.step()
        weight[31] = saved
        assert [(row.finished, row.error, row.tokens) for row in rows if row.slot == 1] == [("error", NAN, [])]
        assert batch.running == [0] and batch.free == [1, 2]
        got = [token for row in rows if row.slot == 0 for token in row.tokens]
        batch.enter_all([good])
        results = {0: got, 1: []}
        steps_to_end(batch, results)
    assert results == {0: expected, 1: expected}


@PACKED
def test_a_rehearsal_leaves_those_who_decode_as_they_are(packed):
    """On a GPU torch's operations run in it, with zeros for what the kernels would have written."""
    engine, plain = packing(packed, **WARM)
    requests = [Request(prompt(9 + 30 * slot, slot, vocab=12), 16) for slot in range(4)]
    with Batch(engine, 4, engine.draft.read_tree(), 140) as batch:
        got: dict[int, list[int]] = {}
        for slot, request in enumerate(requests):
            with batch._in_use(), batch.state.unchanged():
                mode = batch.planner.mode(map(RunningRequest, requests, range(4)))
                batch._prefill.rehearse({slot: request.prompt}, engine.draft, batch.state, mode)
            batch.enter_all([request])
            steps_of(batch, got, 2)
            assert batch.sequences.prompt_lengths[: slot + 1].tolist() == [9 + 30 * each for each in range(slot + 1)]
        steps_to_end(batch, got)
    assert got == {slot: alone(plain, request, PLAIN) for slot, request in enumerate(requests)}


def test_what_a_slot_held_before_does_not_touch_a_prompt():
    """Neither its tokens, which stand where the prompt's last piece is filled up, nor penalties of steps meanwhile."""
    model = tiny_model(**WARM)
    engine, plain = engine_for(model), engine_for(model)
    engine.pack_prompts = True
    neighbour = Request(prompt(9, 1, vocab=11), 60)
    penalised = Request(prompt(300, 2, vocab=11), 20, SamplingParams(repetition_penalty=3.0))
    expected = [alone(plain, request, PLAIN) for request in (neighbour, penalised)]
    with Batch(engine, 2, engine.draft.read_tree(), 400, prompt_tokens=64) as batch:
        got: dict[int, list[int]] = {}
        batch.enter_all([neighbour])
        steps_of(batch, got, 1)
        for token in range(11):  # all that the slot has is this token, where the next prompt will end too
            batch.sequences.tokens[1] = token
            (slot,) = batch.enter_all([penalised])
            tokens: dict[int, list[int]] = {}
            while slot in batch.running and 0 in batch.running:
                steps_of(batch, tokens, 1)
            if slot in batch.running:
                break
            assert tokens[slot] == expected[1]
        assert token > 0
    weight = model.base_model.model.embed_tokens.weight.data
    weight[11] = float("nan")
    with Batch(engine, 1, PLAIN, 80) as batch:
        batch.sequences.tokens.fill_(11)
        batch.admit(Request(prompt(20, 3, vocab=11), 5))
        steps_of(batch, {}, 1)


def test_an_interrupt_behind_a_forward_ends_the_batch(monkeypatch):
    packed, _ = packing(**SMALL)
    packed.prefixes = False
    long = Request(prompt(100), 5)
    with Batch(packed, 3, packed.draft.read_tree(), 160) as batch:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(batch._prefill, "copy", Mock(side_effect=KeyboardInterrupt))
            batch.enter_all([long, replace(long)])
        with pytest.raises(RuntimeError, match="a step of this batch failed"):
            batch.step()


def test_slots_that_are_read_for_nobody_cost_no_attention():
    packed, _ = packing(**SMALL)
    packed.prefixes = False
    long = Request(prompt(200), 5)
    with Batch(packed, 3, packed.draft.read_tree(), 260, prompt_tokens=64) as batch:
        batch.enter_all([Request(prompt(5), 40)])
        batch.step()
        batch.enter_all([long, replace(long)])
        batch.step()
        batch.release(1)
        assert batch.free == [] and batch.sequences.lengths[1] == 200
        batch.release(2)
        assert batch.free == [1, 2] and batch.sequences.lengths[1:].tolist() == [0, 0] and not batch.reading


def test_prompts_that_come_to_nobody_are_all_read_at_once():
    packed, _ = packing(**SMALL)
    with Batch(packed, 4, packed.draft.read_tree(), 320, prompt_tokens=64) as batch:
        batch.enter_all([Request(prompt(length, length), 40) for length in (20, 200, 270)])
        assert [row.slot for row in batch.step()] == [0, 1, 2] and not batch.reading
        batch.enter_all([Request(prompt(200, 1), 5)])
        assert [row.slot for row in batch.step()] == [0, 1, 2] and batch.reading


def test_nan_logits_of_a_prompt_alone_end_the_request():
    """The steps behind it would not notice."""
    packed, _ = packing(**SMALL)
    with Batch(packed, 2, packed.draft.read_tree(), 80) as batch:
        choose_roots = batch._prefill.choose_roots

        def poisoned(slots, *args):
            batch._prefill.ends.hidden[1] = float("nan")
            return choose_roots(slots, *args)

        batch._prefill.choose_roots = poisoned
        try:
            batch.enter_all([Request(prompt(9), 20), Request(prompt(12, 1), 20)])
            rows = batch.step()
        finally:
            del batch._prefill.choose_roots
        assert [(row.slot, row.error, bool(row.tokens)) for row in rows] == [(0, None, True), (1, NAN, False)]
        assert batch.running == [0]


@pytest.mark.parametrize(("packed", "at"), [(True, 1), (False, 2), (True, 3)])  # the layers of both, in turn
def test_an_interrupt_while_a_prompt_is_read_loses_nothing(packed, at, monkeypatch):
    engine, plain = packing(packed, **WARM)
    running, long = Request(prompt(9, 1, vocab=12), 24), Request(prompt(600, 2, vocab=12), 8)
    with Batch(engine, 2, engine.draft.read_tree(), 640, prompt_tokens=128) as batch:
        got: dict[int, list[int]] = {}
        batch.enter_all([running])
        steps_of(batch, got, 1)
        batch.enter_all([long])
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine.ops, "rotary_append", failing(engine.ops.rotary_append, KeyboardInterrupt, at))
            batch.step()
        assert batch.reading and batch.running == [0, 1]
        steps_to_end(batch, got)
    assert got == {0: alone(plain, running, PLAIN), 1: alone(plain, long, PLAIN)}


def test_a_session_reads_as_many_tokens_before_a_step_as_it_is_told():
    model = tiny_model(layers=3, **SMALL)
    for tokens in (64, 128):
        eagle = EAGLEInference(None, model, EAGLEConfig(prompt_tokens=tokens))
        eagle.engine.pack_prompts = True
        with eagle.session(rows=700, slots=2) as session:
            session.submit(prompt(9), 60)
            session.step()
            session.submit(prompt(500, 3), 4)
            steps = 1
            while all(piece.index != 1 for piece in session.step()):
                steps += 1
        assert steps == -(-500 // tokens)
    with pytest.raises(ValueError, match="prompt_tokens"):
        EAGLEConfig(prompt_tokens=0)


@pytest.fixture
def stretches(monkeypatch):
    """Forwards of 128 to 256 rows behind 64 are launched as one prompt's; which these were, by start and end."""
    monkeypatch.setattr(long_prompts, "MIN_ROWS", 128)
    monkeypatch.setattr(long_prompts, "MIN_WORK", 64 * 64)
    monkeypatch.setitem(SIZES, PIECE_ROWS, (1, 2, 3, 4))
    found, choose = [], long_prompts.LongPrompts.span_of

    def span_of(self, forward):
        span = choose(self, forward)
        if span is not None:
            found.append(tuple(span))
        return span

    monkeypatch.setattr(long_prompts.LongPrompts, "span_of", span_of)
    return found


def reading_long_prompts(kernels=False, **options):
    """An engine that launches forwards over one long prompt as such, and one that reads prompts one by one."""
    long, plain = packing(**options)
    long.long_prompts, long.ops = True, make_operations(kernels)
    return long, plain


@pytest.mark.parametrize("eagle3", [True, False], ids=["eagle3", "eagle1"])
def test_a_long_prompt_fills_the_caches_as_any_does(eagle3, stretches):
    """Forwards of whole pieces, one that ends in a page, and one that is filled up with nobody's pieces."""
    long, plain = reading_long_prompts(eagle3=eagle3, **SMALL)
    for length, read in ((512, [(256, 512)]), (500, [(256, 500)]), (130, []), (66, []), (430, [(256, 430)])):
        request = Request(prompt(length, length), 5)
        batches = [Batch(engine, 2, engine.draft.read_tree(), 640) for engine in (long, plain)]
        for batch in batches:
            batch.admit_all([request])
        assert stretches == read
        stretches.clear()
        for cache in (target_cache, draft_cache):
            rows = [cache(batch.sequences)[:, :, 0, :, :length] for batch in batches]
            torch.testing.assert_close(*rows, atol=2e-5, rtol=1e-4)
        for name in ("tokens", "parents", "depths", "ancestors"):
            assert torch.equal(*(getattr(batch.state.tree, name)[:1] for batch in batches))
        for batch in batches:
            batch.close()
    target, draft = len(long.view.layers) - 1, 0 if eagle3 else 1  # the last layers are asked for one row, or none
    assert long.ops.calls["prompt_attention"] == 3 * (target + draft + (0 if eagle3 else 1))


def test_long_prompts_among_others_give_what_each_gives_alone(stretches):
    """Behind pages that others have read, beside those who decode, and two in one forward."""
    long, plain = reading_long_prompts(eagle3=False, vocab=12, seed=2, **LARGER)
    tokens = prompt(700, 2, vocab=12)
    first = Request(tokens, 8)
    second = Request(torch.cat((tokens[:330], prompt(300, 3, vocab=12))), 8, SamplingParams(temperature=1.0, seed=3))
    running, third = Request(prompt(9, 1, vocab=12), 60), Request(prompt(400, 4, vocab=12), 8)
    expected = [alone(plain, request, PLAIN) for request in (running, first, second, third)]
    with Batch(long, 4, long.draft.read_tree(), 720, prompt_tokens=128) as batch:
        got: dict[int, list[int]] = {}
        batch.enter_all([running])
        steps_of(batch, got, 1)
        assert not stretches and batch.enter_all([first]) == [1]
        steps_of(batch, got, 5)
        assert stretches == [(128 * forward, 128 * forward + 128) for forward in range(1, 5)]
        batch.enter_all([second, third])
        steps_to_end(batch, got)
        assert stretches[4] == (448, 576)  # five pages are the first one's, and two pieces were read beside it
    assert got == dict(enumerate(expected))


def test_an_interrupt_while_a_long_prompt_is_read_loses_nothing(stretches, monkeypatch):
    long, plain = reading_long_prompts(eagle3=False, vocab=12, seed=2, **LARGER)
    running, request = Request(prompt(9, 1, vocab=12), 40), Request(prompt(600, 2, vocab=12), 8)
    interrupted = failing(long.ops.prompt_attention, KeyboardInterrupt, 2, 11)
    monkeypatch.setattr(long.ops, "prompt_attention", interrupted)
    with Batch(long, 2, long.draft.read_tree(), 640, prompt_tokens=128) as batch:
        got: dict[int, list[int]] = {}
        batch.enter_all([running])
        steps_of(batch, got, 1)
        batch.enter_all([request])
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                steps_of(batch, got, 20)
        steps_to_end(batch, got)
    assert got == {0: alone(plain, running, PLAIN), 1: alone(plain, request, PLAIN)}


def test_no_memory_for_a_long_prompt_is_said_and_loses_nothing(stretches, monkeypatch):
    long, plain = reading_long_prompts(**SMALL)
    request, no_memory = Request(prompt(700), 9), torch.OutOfMemoryError("out of memory")
    monkeypatch.setattr(long.ops, "prompt_attention", failing(long.ops.prompt_attention, no_memory, 6))
    for _ in range(2):
        assert alone(long, request) == alone(plain, request, PLAIN)
        assert stretches == [(256, 512), (512, 700)] and "no memory" in long.notes["long_prompts"]
        long.pool.forget()
    long.clear()
    assert "long_prompts" not in long.notes


def test_a_shape_that_cannot_be_is_found_out_before(stretches, monkeypatch):
    long, plain = reading_long_prompts(**SMALL)
    monkeypatch.setattr(long_prompts.LongPrompts, "_refused", lambda *_: "No valid engine configs")
    with Batch(long, 1, PLAIN, 720) as batch:
        assert batch._prefill._long_prompts._on
        batch._prefill._long_prompts._by_cudnn = True
    request = Request(prompt(700), 9)
    assert alone(long, request) == alone(plain, request, PLAIN)
    assert not stretches and not long.ops.calls["prompt_attention"]
    assert long.notes["long_prompts"].endswith("No valid engine configs")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets kernels; test_graph.py has it on a GPU")
def test_kernels_read_a_long_prompt_too(stretches, monkeypatch):
    monkeypatch.setattr(prompt_attention, "SEGMENTS", (128,))
    monkeypatch.setattr(prompt_attention, "_cudnn", torch_instead_of_cudnn)
    monkeypatch.setitem(SIZES, PIECE_ROWS, (1, 2))
    long, plain = reading_long_prompts(kernels=True, eagle3=False, layers=2, **SMALL)
    request = Request(prompt(250), 2)
    assert alone(long, request, PLAIN) == alone(plain, request, PLAIN)
    assert stretches == [(128, 250)] and long.ops.calls["prompt_attention"] > 0


def test_which_forwards_are_a_long_prompts():
    def chosen(pieces, rows=PIECE_ROWS, size=None, shapes=((32, 8, 128), None), draft=((64, 8, 128),), wanted=True):
        notes: dict[str, str] = {}
        ops = make_operations()
        chooser = long_prompts.LongPrompts(ops, shapes, draft, torch.float32, torch.device("cpu"), notes, wanted)
        assert not notes
        return chooser.span_of(Forward(rows, size or len(pieces), pieces))

    def pieces(count, first=4096, slot=0):
        starts = range(first, first + count * PIECE_ROWS, PIECE_ROWS)
        return [Piece(slot, start, start + PIECE_ROWS, False) for start in starts]

    assert chosen(pieces(32)) == PromptSpan(4096, 6144) and chosen(pieces(64, 64 * 77)) == PromptSpan(64 * 77, 64 * 141)
    assert chosen(pieces(31)) is None and chosen(pieces(31), size=32) == PromptSpan(4096, 4096 + 31 * 64)
    assert chosen([*pieces(31), Piece(0, 6080, 6090, True)]) == PromptSpan(4096, 6090)
    assert chosen(pieces(32, 4032)) is None and chosen(pieces(32), shapes=[(16, 8, 128)]) is None
    assert chosen(pieces(32, 8192), shapes=[(16, 8, 128)]) is not None
    assert chosen([*pieces(31), *pieces(1, 0, slot=1)]) is None and chosen([*pieces(16), *pieces(16, 9000)]) is None
    assert chosen(pieces(32), shapes=[None]) is None and chosen(pieces(32), wanted=None) is None
    assert chosen(pieces(32), wanted=False) is None and chosen(pieces(1), FEW_ROWS) is None
