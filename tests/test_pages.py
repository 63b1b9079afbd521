"""The pool of pages: against a model in plain Python, and what requests give that share pages or wait for them."""

from __future__ import annotations

import gc
import itertools
import random
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from eagle_triton import EAGLEConfig, EAGLEInference, optimize_eagle_with_triton
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.memory import pages as pages_module
from eagle_triton.engine.memory.mapped_memory import MappedMemory, can_map
from eagle_triton.engine.memory.pages import (
    MAX_CACHE_TOKENS,
    PAGE_ROWS,
    CacheFullError,
    PagePool,
    SlotPages,
    prefix_keys,
)
from eagle_triton.engine.model.model_watch import ModelWatch
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.prompt_queue import PromptQueue
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.tree_spec import PLAIN
from eagle_triton.families import own_ea_model as native
from tests.failing import failing
from tests.test_batch import SMALL, WARM, alone, drain, prompt
from tests.test_engine import engine_for
from tests.test_prefill import PACKED, packing, steps_of, steps_to_end
from tests.test_speculative_session import finish
from tests.tiny import tiny_model


class Model:
    """What the pool should do, from what it gave: of each page its content, once it is read, and who holds it."""

    def __init__(self, limit: int | None):
        self.pool = PagePool(limit)
        self.pool.memory(self, (1, 2, 1, 1), torch.float32, torch.device("cpu"))
        self.pages = SlotPages(self.pool, 8, 640, torch.device("cpu"))
        self.queue = PromptQueue(packed=True, unread=self.pool.unread)
        self.content: dict[int, tuple[int, ...]] = {}  # of pages that were read: all tokens up to the one behind
        self.requests: dict[int, torch.Tensor] = {}

    def enter(self, slot: int, tokens: torch.Tensor, rows: int) -> None:
        needed = -(-rows // PAGE_ROWS)
        held = {page for other in range(8) for page in self.pages.of(other)}
        beginning = prefix_keys(tokens)
        try:
            found = self.pages.take({slot: rows}, {slot: beginning})[slot]
        except CacheFullError:
            assert self.pool.limit is not None and needed > self.pool.limit - len(held)
            assert not self.pages.of(slot)
            return
        mine = list(self.pages.of(slot))
        assert len(mine) == needed == len(set(mine)) and 0 not in mine
        assert held.isdisjoint(mine[found:]), "a page is shared by mistake"
        for index, page in enumerate(mine[:found]):
            stretch = tuple(tokens[: (index + 1) * PAGE_ROWS + 1].tolist())
            assert page in self.pool.unread or self.content[page] == stretch
        for page in mine[found:]:
            self.content.pop(page, None)
        self.pages.write([slot])
        self.queue.add({slot: tokens}, {slot: mine[: len(beginning)]})
        self.requests[slot] = tokens

    def read(self) -> None:
        if self.queue:
            forward = self.queue.next(random.choice([None, 64, 200]))
            for slot, start, end, _ in forward.pieces:
                for before in range(start // PAGE_ROWS):
                    assert self.pages.of(slot)[before] in self.content, "a page is seen before it is read"
                self.content[self.pages.of(slot)[start // PAGE_ROWS]] = tuple(self.requests[slot][: end + 1].tolist())
            self.queue.take(forward)
            for slot in forward.ended:
                assert self.queue.finish(slot) == []
                for index, page in enumerate(self.pages.of(slot)[: (len(self.requests[slot]) - 1) // PAGE_ROWS]):
                    assert self.content[page] == tuple(self.requests[slot][: (index + 1) * PAGE_ROWS + 1].tolist())

    def leave(self, slot: int, further: int, forget: bool) -> None:
        """forget: as after NaN logits. further: tokens that were decoded, of a request whose prompt is read."""
        if self.queue.holds(slot):
            assert self.queue.drop(slot) == [slot]
        elif not forget:
            tokens = torch.cat((self.requests[slot], torch.arange(further)))
            rows = len(self.pages.of(slot)) * PAGE_ROWS
            tokens = tokens[:rows]
            for index in range((len(self.requests[slot]) - 1) // PAGE_ROWS, (len(tokens) - 1) // PAGE_ROWS):
                self.content[self.pages.of(slot)[index]] = tuple(tokens[: (index + 1) * PAGE_ROWS + 1].tolist())
            self.pages.keep(slot, prefix_keys(tokens))
        self.pages.give(slot, forget=forget)
        del self.requests[slot]

    def check(self) -> None:
        held = [page for slot in range(8) for page in self.pages.of(slot)]
        assert self.pool.held == len(set(held))
        assert self.pool.held + self.pool.kept + len(self.pool._free) == self.pool.pages, "a page is lost"
        assert set(self.pool._free).isdisjoint(held) and set(self.pool._kept).isdisjoint(held)
        assert len(set(self.pool._free)) == len(self.pool._free) and self.pool.unread <= set(held)
        for slot in range(8):
            row = self.pages.table[slot].tolist()
            assert row == [*self.pages.of(slot), *[0] * (len(row) - len(self.pages.of(slot)))]


@pytest.mark.parametrize("limit", [None, 24])
def test_no_page_is_lost_or_shared_by_mistake(limit):
    random.seed(5)
    torch.manual_seed(5)
    model = Model(limit)
    beginnings = [torch.randint(1000, (length,)) for length in (64, 65, 128, 200, 300)]
    shared = 0
    for _ in range(10_000):
        free = [slot for slot in range(8) if slot not in model.requests]
        action = random.choice(["enter", "enter", "read", "read", "leave"])
        if action == "enter" and free:
            first = random.choice(beginnings)[: random.randint(1, 300)]
            first = torch.cat((first, torch.randint(3, (random.choice([0, 1, 70]),))))
            model.enter(random.choice(free), first, len(first) + random.randint(1, 150))
            shared += sum(count > 1 for count in model.pool._holders.values())
        elif action == "read":
            model.read()
        elif action == "leave" and model.requests:
            model.leave(random.choice(list(model.requests)), random.randint(0, 100), random.random() < 0.1)
        model.check()
    for slot in list(model.requests):
        model.leave(slot, 0, False)
    model.check()
    assert shared > 1000 and not model.pool.held and not model.pool.unread
    assert model.pool.pages <= (limit or 8 * 11 * 1.5)
    model.pool.forget()
    assert len(model.pool._free) == model.pool.pages


def test_what_was_used_last_is_kept_longest_and_a_beginning_longer_than_its_end():
    pool = PagePool(6)
    pages = SlotPages(pool, 3, 640, torch.device("cpu"))
    old, new = (prefix_keys(torch.randint(100, (193,))) for _ in range(2))
    for slot, beginning in enumerate((old, new)):
        pages.take({slot: 192}, {slot: beginning})
        pool.unread.clear()
        pages.give(slot)
    assert pool.kept == 6
    pages.take({0: 2 * PAGE_ROWS}, {})
    assert [pool.find(key) is not None for key in (*old, *new)] == [True, False, False, True, True, True]


def test_a_page_that_was_not_read_to_the_end_is_not_found():
    pool = PagePool(limit=20)
    pages = SlotPages(pool, 2, 640, torch.device("cpu"))
    beginning = prefix_keys(torch.arange(200))
    assert pages.take({0: 200}, {0: beginning}) == {0: 0}
    assert pages.take({1: 200}, {1: beginning}) == {1: 3}  # that are being read
    pages.give(0)
    pages.give(1)
    assert pages.take({0: 200}, {0: beginning}) == {0: 0}


def test_slots_that_are_given_together_leave_the_others_their_pages():
    pool = PagePool(limit=20)
    pages = SlotPages(pool, 6, 640, torch.device("cpu"))
    shared = prefix_keys(torch.arange(200))
    pages.take(dict.fromkeys((0, 1, 2, 4, 5), 200), dict.fromkeys((0, 1, 2), shared))
    pages.write([0, 1, 2, 4, 5])
    kept = [*pages.of(1)]
    own = [page for slot in (0, 2, 4, 5) for page in pages.of(slot) if page not in kept]
    assert sorted(pages.give(5, 0, 4, 3, 2, 0)) == sorted(own)
    assert [bool(row.any()) for row in pages.table] == [False, True, False, False, False, False]
    assert list(pages.of(1)) == kept and pool.held == len(kept)


def test_a_page_is_found_by_all_tokens_up_to_the_one_behind_it():
    tokens = torch.arange(200)
    keys = prefix_keys(tokens)
    assert len(keys) == 3 and len(prefix_keys(tokens[:193])) == 3 and len(prefix_keys(tokens[:192])) == 2
    for changed, same in ((0, 0), (63, 0), (64, 0), (65, 1), (128, 1), (192, 2), (193, 3)):
        other = tokens.clone()
        other[changed] = 999
        equal = [key == old for key, old in zip(prefix_keys(other), keys, strict=True)]
        assert equal == [index < same for index in range(3)]
    assert prefix_keys(tokens, b"other")[0] != keys[0]
    assert prefix_keys(tokens, known=keys[:1]) == keys


# ------------------------------------------------------------------------------------------------- in a batch


def continuations(count: int, beginning: int = 200) -> list[Request]:
    first = prompt(beginning, 7, vocab=12)
    tails = [prompt(5 + 40 * index, 20 + index, vocab=12) for index in range(count)]
    sampling = [SamplingParams(), SamplingParams(temperature=1.0, seed=4)]
    return [Request(torch.cat((first, tail)), 12, sampling[index % 2]) for index, tail in enumerate(tails)]


@PACKED
def test_requests_that_begin_alike_share_pages_and_give_what_each_gives_alone(packed):
    engine, plain = packing(packed, **WARM)
    plain.prefixes = False
    requests = continuations(4)
    expected = [alone(plain, request, PLAIN) for request in requests]
    assert not plain.pool.kept
    with Batch(engine, 4, engine.draft.read_tree(), 360) as batch:
        slots = batch.admit_all(requests)
        assert [batch.request(slot).cached_tokens for slot in slots] == [0, 192, 192, 192]
        results = drain(batch)
        assert [results[id(request)][0] for request in requests] == expected
        again = [replace(request) for request in requests]
        slots = batch.admit_all(again)
        known = [(len(request.prompt) - 1) // PAGE_ROWS * PAGE_ROWS for request in requests]
        assert [batch.request(slot).cached_tokens for slot in slots] == known
        results = drain(batch)
        assert [results[id(request)][0] for request in again] == expected
    with Batch(engine, 4, engine.draft.read_tree(), 360) as batch:  # pages outlive a batch
        assert batch.request(batch.admit(requests[0])).cached_tokens == 192


@pytest.mark.parametrize(("packed", "steps"), [(True, 0), (False, 1), (True, 3)])
def test_one_of_two_that_share_a_beginning_is_cancelled_at_any_time(packed, steps):
    engine, plain = packing(packed, **WARM)
    requests = continuations(2)
    running = Request(prompt(9, vocab=12), 24)
    first, *expected = [alone(plain, request, PLAIN) for request in (running, *requests)]
    for cancelled in (0, 1):
        engine.pool.forget()
        with Batch(engine, 3, engine.draft.read_tree(), 360, prompt_tokens=64) as batch:
            slots = batch.enter_all([running])
            got: dict[int, list[int]] = {}
            steps_of(batch, got, 1)
            slots = batch.enter_all(requests)
            steps_of(batch, got, steps)
            batch.release(slots[cancelled])
            steps_to_end(batch, got)
        assert got[slots[1 - cancelled]] == expected[1 - cancelled]
        assert got[0] == first


def test_the_next_turn_of_a_chat_finds_the_answer_before():
    engine, plain = packing(**WARM)
    turn = prompt(100, 3, vocab=12)
    with Batch(engine, 1, engine.draft.read_tree(), 600) as batch:
        for _ in range(3):
            slot = batch.admit(Request(turn, 30))
            found = batch.request(slot).cached_tokens
            got: dict[int, list[int]] = {}
            steps_to_end(batch, got)
            assert got[slot] == alone(plain, Request(turn, 30), PLAIN)
            known = len(turn) + 30
            turn = torch.cat((turn, torch.tensor(got[slot]), prompt(20, len(turn), vocab=12)))
            assert found == (0 if known == 130 else (known - 50 - 1) // PAGE_ROWS * PAGE_ROWS)


def test_plain_and_drafted_requests_share_nothing():
    engine, plain = packing(**WARM)
    (request,) = continuations(1)
    expected = alone(plain, request, PLAIN)
    for drafts in (False, True):
        with Batch(engine, 1, engine.draft.read_tree() if drafts else PLAIN, 360, drafts=drafts) as batch:
            assert batch.request(batch.admit(request)).cached_tokens == 0
            assert drain(batch)[id(request)][0] == expected


@pytest.mark.parametrize("enter", ["admit_all", "enter_all"])
def test_weights_that_change_in_place_make_pages_old(enter):
    model = tiny_model(**WARM)
    engine = Engine(*native.read(model), make_operations(), watch=ModelWatch({"model": model}))
    (request,) = continuations(1)
    found = []
    for step in itertools.count():
        with Batch(engine, 1, engine.draft.read_tree(), 360) as batch:
            (slot,) = getattr(batch, enter)([request])
            found.append(batch.request(slot).cached_tokens)
            tokens = drain(batch)[id(request)][0]
        if step == 1:
            with torch.no_grad():
                model.base_model.model.layers[0].mlp.down_proj.weight.mul_(-1)
        if step == 2:
            break
    fresh = engine_for(model)
    assert found == [0, 192, 0] and tokens == alone(fresh, request, PLAIN)


def test_what_was_read_before_a_change_is_not_kept_after_it():
    pool = PagePool()
    pages = SlotPages(pool, 2, 640, torch.device("cpu"))
    beginning = prefix_keys(torch.arange(300))
    pages.take({0: 300}, {0: beginning})
    pool.unread.clear()
    pool.forget()  # as when weights change, while the request runs
    pages.keep(0, beginning)
    pages.give(0)
    assert pages.take({1: 300}, {1: beginning}) == {1: 0} and not pool._outdated
    pages.keep(1, beginning)
    pool.unread.clear()
    pages.give(1)
    assert pages.take({0: 300}, {0: beginning}) == {0: 4}


def test_pages_that_an_interrupt_has_left_are_reclaimed(monkeypatch):
    pool = PagePool()
    pages = SlotPages(pool, 1, 640, torch.device("cpu"))
    pages.take({0: 300}, {})
    monkeypatch.setattr(pool, "give", failing(pool.give, KeyboardInterrupt, 3))
    with pytest.raises(KeyboardInterrupt):
        pages.give(0)
    pages.clear()
    pool.reclaim()
    assert not pool.held and not pages.of(0) and len(pool._free) == pool.pages


def test_a_full_cache_refuses_and_loses_nothing():
    engine, plain = packing(**SMALL)
    engine.cache_tokens = 12 * PAGE_ROWS
    engine.clear()
    small, large = Request(prompt(40), 20), Request(prompt(575), 20)
    expected = [alone(plain, request, PLAIN) for request in (small, large)]
    with Batch(engine, 5, engine.draft.read_tree(), 900) as batch:
        batch.admit_all([small, replace(small), replace(small)])
        assert batch.fitting([large]) == 0 and batch.fitting([replace(small), replace(small), large]) == 2
        assert batch.fitting([Request(prompt(440), 20)]) == 0, "it would leave the others no page to grow"
        with pytest.raises(CacheFullError, match="into a cache of 12"):
            batch.admit(large)
        with pytest.raises(CacheFullError):
            batch.enter_all([replace(small), large])
        assert batch.running == [0, 1, 2] and batch.free == [3, 4]
        with pytest.raises(ValueError, match="cache_tokens: a prompt of 700 tokens"):
            batch.admit(Request(prompt(700), 100))
        results = drain(batch)
        assert [tokens for tokens, _ in results.values()] == [expected[0]] * 3
        batch.admit(large)
        assert drain(batch)[id(large)][0] == expected[1]
        assert engine.pool.pages == 12 and not engine.pool.held


def test_a_cache_that_grows_while_others_decode_keeps_what_they_know():
    engine, plain = packing(**SMALL)
    requests = [Request(prompt(length, length), 30) for length in (20, 150, 400, 700)]
    expected = [alone(plain, request, PLAIN) for request in requests]
    with Batch(engine, 4, engine.draft.read_tree(), 800) as batch:
        got: dict[int, list[int]] = {}
        sizes = []
        for request in requests:
            batch.enter_all([request])
            steps_of(batch, got, 2)
            sizes.append(engine.pool.pages)
        steps_to_end(batch, got)
    assert sizes == sorted(set(sizes)) and [got[slot] for slot in range(4)] == expected


def test_a_batch_that_failed_leaves_no_page_held(monkeypatch):
    engine, plain = packing(**WARM)
    (request,) = continuations(1)
    with Batch(engine, 2, engine.draft.read_tree(), 360) as batch:
        batch.admit(request)
        batch.step()  # the first token
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(batch.in_flight, "send", Mock(side_effect=KeyboardInterrupt))
            for _ in range(2):  # on a GPU one is on its way
                batch.step()
        with pytest.raises(RuntimeError, match="make a new batch"):
            batch.step()
    with Batch(engine, 2, engine.draft.read_tree(), 360) as batch:
        assert not engine.pool.held
        batch.admit(request)
        assert drain(batch)[id(request)][0] == alone(plain, request, PLAIN)


# ------------------------------------------------------------------------------------------------- for users


def test_requests_wait_for_room_and_those_that_never_fit_fail_alone():
    model = tiny_model(**WARM)
    config = {"topk": 3, "num_steps": 3, "num_draft_tokens": 8}
    requests = [(prompt(length, length, vocab=12), new) for length, new in ((700, 100), (40, 20), (300, 60), (90, 30))]
    free = EAGLEInference(None, model, EAGLEConfig(**config))
    expected = [free.generate([tokens], new, return_stats=False)[0] for tokens, new in requests]
    eagle = EAGLEInference(None, model, EAGLEConfig(cache_tokens=8 * PAGE_ROWS, slots=4, **config))
    most, pieces = 0, []
    with eagle.session(1000) as session:
        for tokens, new in requests:
            session.submit(tokens, new)
        while not session.idle:
            pieces += session.step()
            most = max(most, eagle.engine.pool.held)
        completions = finish(session, pieces)
    for index in range(1, 4):
        assert torch.equal(completions[index].output_ids, expected[index].flatten())
    assert completions[0].finished == "error" and "cache_tokens: a prompt of 700 tokens" in completions[0].error
    assert next(iter(completions)) == 0, "what never fits holds up nobody"
    assert 0 < most <= eagle.engine.pool.pages == 8 and not eagle.engine.pool.held


def limit_memory(monkeypatch, most: int) -> None:
    """Let there be memory for so many pages."""
    resized = pages_module.PageMemory.resized

    def short(memory, pages, known):
        if pages > most:
            raise torch.OutOfMemoryError("none left")
        return resized(memory, pages, known)

    monkeypatch.setattr(pages_module.PageMemory, "resized", short)


def test_requests_for_which_there_is_no_memory_fail_alone(monkeypatch):
    """Without a size of its own the cache is as large as memory is: several that are too large, one after another."""
    limit_memory(monkeypatch, 16)
    model = tiny_model(**WARM)
    eagle = EAGLEInference(None, model, EAGLEConfig(topk=3, num_steps=3, num_draft_tokens=8, slots=2))
    with eagle.session(2000) as session:
        for length in (1500, 1600, 40, 1700, 50):
            session.submit(prompt(length, length, vocab=12), 20)
        pieces = [piece for _ in range(200) for piece in session.step()]
        assert session.idle, "it waits for room that never comes"
        completions = finish(session, pieces)
    assert [completions[index].finished for index in range(5)] == ["error", "error", "length", "error", "length"]
    assert all("no memory for" in completions[index].error for index in (0, 1, 3))


def test_statistics_say_what_was_found():
    eagle = EAGLEInference(None, tiny_model(**WARM), EAGLEConfig(topk=3, num_steps=3))
    first, second = prompt(200, 7, vocab=12), torch.cat((prompt(200, 7, vocab=12), prompt(9, 8, vocab=12)))
    eagle.generate([first, second], 5)
    assert (eagle.statistics.prompt_tokens, eagle.statistics.found_tokens) == (409, 192)
    eagle.generate([second], 5)
    assert (eagle.statistics.prompt_tokens, eagle.statistics.found_tokens) == (618, 384)
    eagle.forget_outputs()
    eagle.generate([second], 5)
    assert eagle.statistics.found_tokens == 384
    off = EAGLEInference(None, tiny_model(**WARM), EAGLEConfig(topk=3, num_steps=3, prefixes=False))
    for _ in range(2):
        off.generate([second], 5)
    assert off.statistics.found_tokens == 0 and not off.engine.pool.kept


def test_the_report_counts_what_was_found_and_restoring_gives_all_back():
    model = tiny_model(**WARM)
    tokens = prompt(150, 3, vocab=12)[None]
    _, originals = optimize_eagle_with_triton(model, cache_tokens=1000, megakernel=False)
    first = model.eagenerate(tokens, max_new_tokens=10)
    assert torch.equal(model.eagenerate(tokens, max_new_tokens=10), first)
    counts = {entry.path: entry.calls for entry in originals.report()}
    assert counts["prompt_tokens_found"] == 128
    originals.restore()
    assert torch.equal(model.eagenerate(tokens, max_new_tokens=10), first)


def test_calls_of_a_model_in_16_bits_do_not_depend_on_each_other_unless_asked_to():
    tokens = prompt(150, 3, vocab=12)[None]
    for dtype, options, found in (
        (torch.float32, {}, 128),
        (torch.float32, {"prefixes": False}, 0),
        (torch.bfloat16, {}, 0),
        (torch.bfloat16, {"prefixes": True}, 128),
    ):
        model = tiny_model(**WARM).to(dtype)
        with optimize_eagle_with_triton(model, megakernel=False, **options)[1] as originals:
            first, second = (model.eagenerate(tokens, max_new_tokens=10) for _ in range(2))
            report = {entry.path: entry for entry in originals.report()}
        counted = report["prompt_tokens_found"].calls if "prompt_tokens_found" in report else 0
        assert counted == found, (dtype, options)
        assert found or torch.equal(first, second)
        assert ("prefixes" in report) == (dtype == torch.bfloat16 and not options)
    with pytest.raises(TypeError, match="prefixes must be True or False or \"auto\", got 'no'"):
        optimize_eagle_with_triton(tiny_model(), prefixes="no")


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "64", 10**12])
def test_a_cache_of_no_size_is_refused(value):
    for make in (EAGLEConfig, partial(optimize_eagle_with_triton, tiny_model())):
        with pytest.raises((ValueError, TypeError), match="cache_tokens must be"):
            make(cache_tokens=value)


def test_a_cache_without_memory_is_named():
    model, message = tiny_model(), "no memory for .*; lower cache_tokens"
    with (
        optimize_eagle_with_triton(model, cache_tokens=MAX_CACHE_TOKENS),
        pytest.raises(CacheFullError, match=message),
    ):
        model.eagenerate(torch.tensor([[1, 2, 3]]), max_new_tokens=3)


# ------------------------------------------------------------------------------------------------- on a GPU

needs_mapping = pytest.mark.skipif(
    not (torch.cuda.is_available() and can_map(torch.device("cuda"))), reason="needs a GPU whose memory can be mapped"
)


def mapped() -> int:
    """How much memory is mapped in this process."""
    gc.collect()
    return sum(found.size for found in gc.get_objects() if issubclass(type(found), MappedMemory))


@needs_mapping
def test_memory_grows_where_it_lies_and_is_given_back():
    assert not mapped()
    memory = MappedMemory(torch.device("cuda"), 1)
    values = memory.tensor(torch.int32)
    values[:1000] = 7
    memory.grow(256 << 20)
    assert values.data_ptr() == memory.tensor(torch.int32).data_ptr() and memory.size == mapped() >= 256 << 20
    values[1000 : 64 << 20] = 8
    assert int(values[: 64 << 20].sum()) == 7 * 1000 + 8 * ((64 << 20) - 1000)
    for size in (memory.reserved, memory.reserved + 1):
        with pytest.raises(torch.OutOfMemoryError):
            memory.grow(size)
    assert int(values[:1000].sum()) == 7000
    del memory
    assert mapped() and int(values[:1000].sum()) == 7000  # a tensor holds it
    del values
    assert not mapped()


@needs_mapping
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_stays_when_the_cache_grows(dtype, monkeypatch):
    """And so do the descriptors in it, through which keys in 16 bits are read."""
    monkeypatch.setattr(pages_module, "_MIN_BYTES", 1)
    model = tiny_model(**WARM).to("cuda", dtype)
    requests = [Request(prompt(length, length, vocab=12), 30) for length in (20, 150, 700, 2500)]

    def tokens_of(engine) -> list[list[int]]:
        with Batch(engine, 4, engine.draft.read_tree(), 2600) as batch:
            got: dict[int, list[int]] = {}
            batch.enter_all(requests[:1])
            steps_of(batch, got, 2)
            steps = dict(engine.steps._kept)
            for request in requests[1:]:
                batch.enter_all([request])
                steps_of(batch, got, 2)
                sizes.append(engine.pool.pages)
            steps_to_end(batch, got)
        assert all(engine.steps._kept[key] is step for key, step in steps.items())
        return [got[slot] for slot in range(4)]

    sized, grown = (
        Engine(*native.read(model), make_operations(True), cuda_graph=True, cache_tokens=tokens)
        for tokens in (20_000, None)
    )
    assert grown.draft.read_tree().nodes > 16
    sizes: list[int] = []
    expected = tokens_of(sized)
    sizes.clear()
    assert tokens_of(grown) == expected and len(set(sizes)) == 3
    if dtype == torch.float32:
        assert expected == [alone(engine_for(model), request, PLAIN) for request in requests]


@needs_mapping
@pytest.mark.parametrize("options", [{}, {"cache_tokens": 200_000}], ids=["grown", "sized"])
def test_restoring_gives_the_caches_memory_back(options):
    model = tiny_model(**WARM).cuda()
    torch._C._cuda_clearCublasWorkspaces()  # torch's own, 32 MiB for each stream
    mapped()  # collects what other tests have left
    tokens, before = prompt(150, 3, vocab=12)[None].cuda(), torch.cuda.memory_allocated()
    _, originals = optimize_eagle_with_triton(model, megakernel=False, **options)
    model.eagenerate(tokens, max_new_tokens=10)
    assert mapped() + torch.cuda.memory_allocated() - before > 32 << 20
    originals.restore()
    del originals
    assert not mapped()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() - before < 1 << 20
