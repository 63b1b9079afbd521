"""Requests take room as they decode; where there is none, the last to come pause, and give what they give alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from eagle_triton import EAGLEConfig, EAGLEInference, optimize_with_triton
from eagle_triton.engine.memory import pages as pages_module
from eagle_triton.engine.memory.pages import PAGE_ROWS, CacheFullError
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.operands.verification import Verification
from tests.failing import failing
from tests.test_batch import WARM, alone, drain, prompt
from tests.test_causal_lm import causal_lm
from tests.test_pages import limit_memory
from tests.test_prefill import PACKED, packing
from tests.test_speculative_session import finish
from tests.tiny import tiny_model

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(repetition_penalty=1.3, logit_bias=((3, -2.0),), presence_penalty=0.4, frequency_penalty=-0.2),
    SamplingParams(temperature=0.7, top_p=0.9, seed=6),
]
# Each needs another page after a few tokens.
REQUESTS = [Request(prompt(length, length, vocab=12), 28, SAMPLINGS[length % 4]) for length in (26, 85, 88, 19)]


def small_cache(pages: int, **options):
    """An engine with a cache of so many pages, and one without bounds."""
    engine, plain = packing(**WARM)
    for name, value in options.items():
        setattr(engine, name, value)
    engine.cache_tokens = pages * PAGE_ROWS
    engine.clear()
    return engine, plain


def pauses(engine) -> int:
    return engine.ops.calls["requests_paused"]


def decoded(batch: Batch, requests: list[Request]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of each request, by steps of all together."""
    batch.enter_all(requests)
    got: dict[int, tuple[list[int], list[float]]] = {id(request): ([], []) for request in requests}
    while batch.running:
        for row in batch.step():
            assert row.error is None
            for kept, new in zip(got[id(row.request)], (row.tokens, row.logprobs), strict=True):
                kept.extend(new)
    return [got[id(request)] for request in requests]


def without_bounds(requests: list[Request]) -> list[tuple[list[int], list[float]]]:
    """What requests give by an engine in which none has to pause."""
    _, plain = packing(**WARM)
    with Batch(plain, len(requests), plain.draft.read_tree(), 500, logprobs=True) as batch:
        found = decoded(batch, requests)
    assert not pauses(plain)
    return found


@pytest.fixture(scope="module")
def wanted() -> list[tuple[list[int], list[float]]]:
    return without_bounds(REQUESTS)


@pytest.mark.parametrize(("packed", "in_flight", "prefixes"), [(True, 2, True), (False, 1, False)])
def test_who_pauses_gives_what_it_gives_alone(wanted, packed, in_flight, prefixes):
    engine, _ = small_cache(7, pack_prompts=packed, prefixes=prefixes)
    with Batch(engine, 4, engine.draft.read_tree(), 340, logprobs=True) as batch:
        batch.in_flight.most = in_flight
        got = decoded(batch, REQUESTS)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in wanted]
    for (_, mine), (_, theirs) in zip(got, wanted, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert pauses(engine) > 0 and engine.pool.pages == 7 and not engine.pool.held


@PACKED
def test_log_probabilities_of_prompts_are_those_that_they_had_as_answers(packed):
    """With the likeliest tokens beside them, over pauses. What pages hold already is read again."""
    engine, _ = small_cache(7, pack_prompts=packed)

    def read(requests: list[Request]) -> list[tuple[list, ...]]:
        found: dict[int, tuple[list, ...]] = {id(request): ([], [], [], []) for request in requests}
        with Batch(engine, 4, engine.draft.read_tree(), 340) as batch:
            batch.enter_all(requests)
            while batch.running:
                for row in batch.step():
                    new = row.tokens, row.logprobs, row.top_logprobs or [], row.prompt_logprobs or []
                    for kept, some in zip(found[id(row.request)], new, strict=True):
                        kept.extend(some)
        return [found[id(request)] for request in requests]

    options = dict(logprobs=True, top_logprobs=3)
    asked = [Request(prompt(length, length, vocab=12), 20, **options) for length in (86, 90, 92)]
    answers = read(asked)
    assert pauses(engine) > 0
    whole = [torch.cat((one.prompt, torch.tensor(tokens))) for one, (tokens, *_) in zip(asked, answers, strict=True)]
    again = [read([Request(tokens, 2, **options, prompt_logprobs=True)])[0] for tokens in whole]
    for request, (tokens, logprobs, tops, none), (_, _, _, listed) in zip(asked, answers, again, strict=True):
        assert none == [] and len(listed) == len(request.prompt) + 19
        assert [top[0][0] for top in tops] == tokens  # greedy
        for value, top, (same, likely) in zip(logprobs, tops, listed[-20:], strict=True):
            assert len(top) == 3 and value == top[0][1] == pytest.approx(same, abs=1e-4)
            assert dict(top) == pytest.approx(dict(likely), abs=1e-4)


@PACKED
def test_embeddings_and_logits_of_those_who_pause(packed):
    """Prompts that are read from embeddings are not found by their tokens, which are equal here, nor are theirs."""
    engine, plain = small_cache(8, pack_prompts=packed)
    table = plain.view.embedding
    tokens = [prompt(length, length, vocab=12) for length in (93, 90, 26)]
    placeholders = [torch.full_like(row, 3) for row in tokens]
    placeholders[1][40:] = tokens[1][40:]  # the embeddings are those of the first tokens alone
    given = [table[tokens[0]], table[tokens[1][:40]], table[tokens[2]]]
    requests = [Request(row, 20, logits=True, embeddings=rows) for row, rows in zip(placeholders, given, strict=True)]
    requests.append(Request(placeholders[0], 20))
    found: dict[int, tuple[list[int], list[torch.Tensor]]] = {id(request): ([], []) for request in requests}
    with Batch(engine, 4, engine.draft.read_tree(), 340) as batch:
        batch.enter_all(requests)
        while batch.running:
            for row in batch.step():
                assert (row.logits is None) == (not row.request.logits)
                found[id(row.request)][0].extend(row.tokens)
                found[id(row.request)][1].extend([] if row.logits is None else row.logits)
    assert pauses(engine) > 0
    with Batch(plain, 4, plain.draft.read_tree(), 340, logprobs=True) as batch:
        expected = decoded(batch, [Request(row, 20) for row in (*tokens, placeholders[0])])
    for request, (row, logprobs) in zip(requests, expected, strict=True):
        got, logits = found[id(request)]
        assert got == row
        if request.logits:
            chosen = torch.stack(logits).log_softmax(-1)[range(len(row)), row]
            assert chosen.tolist() == pytest.approx(logprobs, abs=1e-4)


def test_who_came_first_never_pauses():
    engine, _ = small_cache(7)
    with Batch(engine, 4, engine.draft.read_tree(), 340) as batch:
        batch.enter_all(REQUESTS)
        ended = []
        while batch.running:
            rows = batch.step()
            ended += [row.slot for row in rows if row.finished]
            assert 0 in [row.slot for row in rows] or 0 in ended
    assert pauses(engine) > 0


def test_memory_follows_what_is_decoded():
    """Not what might be: four answers that may be long, and are short, run at once in a cache for one long one."""
    engine, plain = small_cache(14)
    requests = [Request(prompt(20, seed, vocab=12), 700, stop_ids=frozenset(range(6))) for seed in range(4)]
    expected = [alone(plain, request, PLAIN) for request in requests]
    with Batch(engine, 4, engine.draft.read_tree(), 800) as batch:
        assert batch.fitting(requests) == 4 and batch.never_fits(requests[0]) is None
        batch.admit_all(requests)
        assert engine.pool.held <= 8
        results = drain(batch)
    assert [results[id(request)][0] for request in requests] == expected
    assert not pauses(engine)


def test_trees_that_change_and_plain_steps_between(wanted):
    engine, _ = small_cache(8)
    source = random.Random(1)
    trees = [engine.draft.read_tree(), PLAIN, PLAIN, TreeSpec.chain(3), TreeSpec.dynamic(20, 4, 4)]
    got: dict[int, list[int]] = {}
    with Batch(engine, 4, trees[-1], 340) as batch:
        batch.enter_all(REQUESTS)
        while batch.running:
            batch.spec = source.choice(trees)
            for row in batch.step():
                got.setdefault(row.slot, []).extend(row.tokens)
    assert [got[slot] for slot in range(4)] == [tokens for tokens, _ in wanted] and pauses(engine) > 0


@pytest.fixture(scope="module")
def arrivals():
    """Requests with what they give undisturbed, and the state of random numbers by which they come and go."""
    source = random.Random(13)
    beginning = prompt(130, 9, vocab=12)

    def request(index: int) -> Request:
        tokens = prompt(source.randint(1, 80), index, vocab=12)
        if index % 3 == 0:
            tokens = torch.cat((beginning, tokens[:60]))
        return Request(tokens, source.randint(30, 60), SAMPLINGS[index % 4])

    requests = [request(index) for index in range(8)]
    return requests, [tokens for tokens, _ in without_bounds(requests)], source.getstate()


@PACKED
def test_requests_come_and_go_at_random(arrivals, packed):
    """Some are released: while they decode, wait for room, or are read. None of the others notices."""
    engine, _ = small_cache(6, pack_prompts=packed)
    requests, expected, state = arrivals
    source = random.Random()
    source.setstate(state)
    got: dict[int, list[int]] = {}
    released, waiting, refused = set(), list(requests), 0
    with Batch(engine, 4, engine.draft.read_tree(), 500, prompt_tokens=128) as batch:
        while waiting or batch.running:
            if waiting and batch.free and source.random() < 0.3:
                try:
                    batch.enter_all(waiting[:1])
                    del waiting[0]
                except CacheFullError:
                    refused += 1
            if batch.running and source.random() < 0.05:
                slot = source.choice(batch.running)
                released.add(id(batch.request(slot).request))
                batch.release(slot)
            for row in batch.step():
                assert row.error is None
                got.setdefault(id(row.request), []).extend(row.tokens)
        assert not engine.pool.held
    for one, tokens in zip(requests, expected, strict=True):
        mine = got.get(id(one), [])
        assert mine == (tokens[: len(mine)] if id(one) in released else tokens)
    assert pauses(engine) > 2 and 0 < len(released) < 10 and refused


def test_equal_requests_that_pause_together_are_copied_to_their_end():
    engine, plain = small_cache(6, pack_prompts=False)
    requests = [Request(prompt(90, 2, vocab=12), 20) for _ in range(4)]
    expected = alone(plain, requests[0], PLAIN)
    with Batch(engine, 4, engine.draft.read_tree(), 340) as batch:
        batch.enter_all(requests)
        results = drain(batch)
    assert [results[id(request)][0] for request in requests] == [expected] * 4 and pauses(engine) > 1


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_token_that_was_drawn_is_not_drawn_again_after_a_pause(monkeypatch, in_flight):
    """ "rejection" has taken it from what its drafts have left, and would take the next from all."""
    engine, _ = small_cache(7)
    engine.verification = Verification("rejection")
    drawn: dict[int, tuple[int, int]] = {}
    told = [request.prompt.tolist() for request in REQUESTS]
    with Batch(engine, 4, engine.draft.read_tree(), 340) as batch:
        batch.in_flight.most, pause, seen = in_flight, batch._pause, 0

        def keeping(slot):
            place = batch.lengths[slot]
            drawn[slot] = place, int(batch.sequences.tokens[slot, place])
            pause(slot)

        monkeypatch.setattr(batch, "_pause", keeping)
        batch.enter_all([replace(one, sampling=SamplingParams(temperature=2.0, seed=3)) for one in REQUESTS])
        while batch.running:
            before = dict(drawn)
            for row in batch.step():
                told[row.slot] += row.tokens
                if row.slot in before:
                    place, token = before[row.slot]
                    if row.tree is None:  # it was not told before the pause
                        assert row.tokens == [token]
                    assert batch.sequences.tokens[row.slot, place] == told[row.slot][place] == token
                    del drawn[row.slot]
                    seen += 1
            assert [batch.tokens(slot).tolist() for slot in range(4)] == told
    assert seen >= 2


def test_generate_with_a_later_stage_waits_for_room():
    model = causal_lm("llama", vocab=31, layers=2, seed=1)
    ids = torch.stack([prompt(80, seed, vocab=31) for seed in range(4)])
    options = {"max_new_tokens": 40, "min_new_tokens": 30, "eos_token_id": 3, "pad_token_id": 0, "do_sample": False}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    _, originals = optimize_with_triton(model, "suffix", cache_tokens=9 * PAGE_ROWS, strict=True)
    got = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(got, expected)
    assert {entry.path: entry.calls for entry in originals.report()}["requests_paused"] > 0
    originals.restore()


def test_nobody_overtakes_who_waits_for_room():
    engine, plain = small_cache(7)
    small = Request(prompt(3, vocab=12), 2)
    with Batch(engine, 5, engine.draft.read_tree(), 340) as batch:
        batch.enter_all(REQUESTS)
        while not pauses(engine):
            batch.step()
        assert batch.fitting([small]) == 0 and batch.free == [4]
        with pytest.raises(CacheFullError, match="earlier requests wait"):
            batch.admit(small)
        assert len(drain(batch)) == 4
        batch.admit(small)
        assert drain(batch)[id(small)][0] == alone(plain, small, PLAIN)


def test_a_request_that_outgrows_the_memory_fails_alone(monkeypatch):
    """Without a size of its own the cache is as large as memory is, which nobody knows before."""
    model, config = tiny_model(**WARM), {"topk": 3, "num_steps": 3, "num_draft_tokens": 8}
    prompts, counts = [prompt(length, length, vocab=12) for length in (95, 20)], (110, 40)
    free = EAGLEInference(None, model, EAGLEConfig(**config))
    expected = [
        free.generate([one], count, return_stats=False)[0].flatten() for one, count in zip(prompts, counts, strict=True)
    ]
    monkeypatch.setattr(pages_module, "_GROWTH", 1.0)
    limit_memory(monkeypatch, 4)
    eagle = EAGLEInference(None, model, EAGLEConfig(slots=2, **config))
    with eagle.session(1000) as session:
        for tokens, count in zip(prompts, counts, strict=True):
            session.submit(tokens, count)
        completions = finish(session)
    assert completions[0].finished == "error" and "no memory for" in completions[0].error
    assert 40 < len(completions[0].tokens) < 110
    for index, completion in completions.items():
        assert torch.equal(completion.output_ids, expected[index][: len(completion.output_ids)])
    assert completions[1].finished == "length" and pauses(eagle.engine) > 0


def test_drafts_that_learn_go_on():
    model = tiny_model(**WARM)
    config = {"topk": 3, "num_steps": 3, "num_draft_tokens": 8, "suffix_drafts": 6}
    prompts, count = [prompt(30 + seed, seed, vocab=12) for seed in range(4)], 30
    free = EAGLEInference(None, model, EAGLEConfig(**config))
    small = EAGLEInference(None, model, EAGLEConfig(cache_tokens=5 * PAGE_ROWS, slots=4, **config))
    expected = free.generate(prompts, count, return_stats=False)
    got = small.generate(prompts, count, return_stats=False)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))
    assert pauses(small.engine) > 0


def test_an_interrupt_where_it_would_go_on_loses_nothing(wanted, monkeypatch):
    engine, _ = small_cache(7)
    got: dict[int, list[int]] = {}
    with Batch(engine, 4, engine.draft.read_tree(), 340) as batch:
        batch.enter_all(REQUESTS)
        monkeypatch.setattr(batch, "_set_up", failing(batch._set_up, KeyboardInterrupt, *range(1, 999, 2)))
        interrupts = 0
        while batch.running:
            try:
                rows = batch.step()
            except KeyboardInterrupt:
                interrupts += 1
                continue
            for row in rows:
                got.setdefault(row.slot, []).extend(row.tokens)
    assert [got[slot] for slot in range(4)] == [tokens for tokens, _ in wanted] and interrupts > 0


def test_an_interrupt_where_somebody_gets_pages_loses_nothing(wanted, monkeypatch):
    engine, _ = packing(**WARM)
    got: list[int] = []
    with Batch(engine, 1, engine.draft.read_tree(), 340) as batch:
        batch.enter_all(REQUESTS[:1])
        pages, interrupts = batch.sequences.pages, 0
        extend = pages.extend

        def interrupted(slot, rows):
            nonlocal interrupts
            before = len(pages.of(slot))
            extend(slot, rows)
            if len(pages.of(slot)) > before:
                interrupts += 1
                raise KeyboardInterrupt

        monkeypatch.setattr(pages, "extend", interrupted)
        while batch.running:
            try:
                got += [token for row in batch.step() for token in row.tokens]
            except KeyboardInterrupt:
                continue
    assert got == wanted[0][0] and interrupts > 0


def test_random_numbers_do_not_come_again_after_a_pause():
    """Those of "rejection" follow from the step."""
    engine, _ = small_cache(7)
    highest = [0] * 4
    with Batch(engine, 4, engine.draft.read_tree(), 340) as batch:
        batch.enter_all([replace(one, sampling=SamplingParams(temperature=1.0, seed=3)) for one in REQUESTS])
        while batch.running:
            for row in batch.step():
                step = int(batch.sequences.sampling.step[row.slot])
                assert step > highest[row.slot]
                highest[row.slot] = step
    assert pauses(engine) > 0
