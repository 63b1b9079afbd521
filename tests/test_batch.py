"""The running batch on tiny random models: who enters, leaves or fails changes nothing for the others."""

import gc
import itertools
import math
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from eagle_triton.engine import skipped_features
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.memory.pages import PAGE_ROWS
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.scheduler.step_planner import MIN_SCRATCH_ROWS
from eagle_triton.engine.scheduler.stop_rules import generate
from eagle_triton.engine.skipped_features import start_skipping
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.operands.verification import VERIFY_STRATEGIES, Verification
from eagle_triton.reference.verification import first_path
from tests.failing import failing
from tests.test_engine import engine_for
from tests.tiny import draft_cache, fill_target_cache, random_prompt, tiny_model

SMALL = dict(total_token=8, depth=3, top_k=2)
TWO_LAYERS = dict(eagle3=False, layers=2, **SMALL)
LARGER = dict(total_token=24, depth=3, top_k=6)
WARM = dict(eagle3=False, layers=2, vocab=12, seed=2, **LARGER)  # accepts drafts
IN_FLIGHT = pytest.mark.parametrize("in_flight", [1, 2], ids=["read-at-once", "read-late"])


@pytest.fixture
def engine() -> Engine:
    return engine_for(tiny_model(**TWO_LAYERS))


def prompt(length: int, seed: int = 0, vocab: int = 32) -> torch.Tensor:
    return random_prompt(length, vocab, seed)[0]


def alone(engine: Engine, request: Request, spec: TreeSpec | None = None) -> list[int]:
    """The new tokens of a request that has the engine to itself."""
    if request.min_new_tokens:  # which `generate` does not take
        rows = len(request.prompt) + request.max_new_tokens
        with Batch(engine, 1, spec or engine.draft.read_tree(), rows) as batch:
            batch.admit(request)
            return drain(batch, [])[id(request)][0]
    sequence = generate(
        engine,
        [request.prompt],
        spec or engine.draft.read_tree(),
        request.sampling,
        max_new_tokens=[request.max_new_tokens],
        eos_token_ids=request.stop_ids,
    )[0]
    return sequence[len(request.prompt) :].tolist()


def drain(batch: Batch, waiting: list[Request] = (), every: int = 1) -> dict[int, tuple[list[int], str]]:
    """Run to the end, admitting one waiting request every few steps; by id of the request: tokens and how it ended."""
    waiting, results = list(waiting), {}
    for step in itertools.count():
        if waiting and batch.free and step % every == 0:
            batch.admit(waiting.pop(0))
        if not (waiting or batch.running):
            return results
        for progress in batch.step():
            tokens, _ = results.get(id(progress.request), ([], None))
            results[id(progress.request)] = (tokens + progress.tokens, progress.finished)


REQUESTS = [
    Request(prompt(5), 17),
    Request(prompt(40), 9, SamplingParams(temperature=1.0, seed=3)),
    Request(prompt(1), 30, stop_ids=frozenset([3, 7])),
    Request(prompt(40), 12, SamplingParams(temperature=0.8, top_k=9, top_p=0.9, seed=4)),
    Request(prompt(12), 1),
    Request(prompt(33), 25, SamplingParams(temperature=1.5, min_p=0.05, seed=-5), stop_ids=frozenset(range(0, 32, 2))),
    Request(prompt(7), 20, SamplingParams(temperature=1.0, seed=3), stop_ids=frozenset(range(9, 29))),
]


@pytest.fixture(scope="module")
def texts() -> dict[int, list[int]]:
    """What each of REQUESTS gives when it has an engine to itself that drafts nothing, by its id."""
    other = engine_for(tiny_model(**TWO_LAYERS))
    return {id(request): alone(other, request, PLAIN) for request in REQUESTS}


@pytest.mark.parametrize("tree", [TWO_LAYERS, None], ids=["8-3-2", "plain"])
def test_steps_are_over_the_slots_that_are_taken(tree):
    """Whoever comes and goes, with rules, stop tokens and logits that steps get to know on the way."""
    engine = engine_for(tiny_model(vocab=12, **(tree or TWO_LAYERS)))
    spec = engine.draft.read_tree() if tree else PLAIN
    wide = frozenset(range(100, 130))  # more than there is room for at first
    samplings = [SamplingParams(), SamplingParams(temperature=1.0, seed=5), SamplingParams(repetition_penalty=1.3)]
    requests = [
        Request(
            prompt(3 + 3 * index, vocab=12),
            6 + 2 * (index % 5),
            samplings[index % 3],
            wide if index == 7 else frozenset(),
            logits=index % 4 == 3,
        )
        for index in range(14)
    ]
    with Batch(engine, 14, spec, 80) as batch:  # all from the beginning, so that no slot is ever left out
        batch.enter_all(requests)
        expected = drain(batch)
    sizes, results = [], {}

    def step(batch: Batch) -> None:
        for progress in batch.step():
            results.setdefault(id(progress.request), []).extend(progress.tokens)
            if progress.tree is not None:
                sizes.append((progress.size, progress.slot))

    with Batch(engine, 13, spec, 80) as batch:
        batch.admit(requests[0])
        step(batch)
        step(batch)
        assert sizes == [(1, 0)] and batch.state.batch == 1
        batch.enter_all(requests[1:3])
        step(batch)
        step(batch)
        assert {size for size, _ in sizes[1:]} == {4}
        batch.enter_all(requests[3:13])
        for _ in range(3):
            step(batch)
        assert max(sizes) == (13, 12) and batch.state.sequences is batch.sequences
        while batch.running:
            step(batch)
        batch.admit(requests[13])
        while batch.running:
            step(batch)
    assert sizes[-1] == (1, 0) and all(slot < size for size, slot in sizes)
    assert {size for size, _ in sizes} >= {1, 4, 12, 13}
    assert results == {request: tokens for request, (tokens, _) in expected.items()}
    for request in (requests[7], requests[11]):  # a wide set of stop tokens, and logits with a penalty
        assert results[id(request)] == alone(engine, request, spec)


def test_what_steps_get_to_know_on_the_way_stays_where_it_is(engine):
    """Graphs of few slots have its addresses when a batch of more slots asks for the same."""
    whole = engine.sequences(4, 64)
    one = engine.sequences(1, 64)
    one.add_rules()
    one.add_logits()
    one.widen_stops(100)
    start_skipping(engine.view, one)
    kept = one.rules.bias, one.root_logits, one.stops.ids, one.skipped.features
    places = [tensor.data_ptr() for tensor in kept]
    assert one.whole is whole and whole.first(2).first(1) is one
    for more in (whole.first(2), whole):
        more.add_rules()
        more.add_logits()
        assert not more.widen_stops(100)
        start_skipping(engine.view, more)
        for sequences in (one, more):
            found = sequences.rules.bias, sequences.root_logits, sequences.stops.ids, sequences.skipped.features
            assert [tensor.data_ptr() for tensor in found] == places
            assert [len(tensor) for tensor in found] == [sequences.slots] * 4


@IN_FLIGHT
def test_first_tokens_come_before_a_step_and_the_last_one_takes_none(engine, in_flight):
    requests = [
        Request(prompt(5), 1),
        Request(prompt(9), 1, SamplingParams(temperature=1.0, seed=2)),
        Request(prompt(4), 9),
    ]
    expected = [alone(engine, request) for request in requests]
    stop = Request(prompt(5), 20, stop_ids=frozenset(expected[0]))
    with Batch(engine, 4, engine.draft.read_tree(), 80, logprobs=True) as batch:
        batch.in_flight.most = in_flight
        launched = engine.launched
        batch.enter_all([*requests[:2], stop])
        rows = batch.step()
        assert [(row.tokens, row.finished, row.tree) for row in rows] == [
            (expected[0], "length", None),
            (expected[1], "length", None),
            (expected[0], "stop", None),
        ]
        assert all(len(row.logprobs) == 1 and row.logprobs[0] < 0 for row in rows)
        assert engine.launched - launched <= in_flight - 1 and not batch.running and batch.step() == []
        assert [batch.tokens(slot)[-1] for slot in range(3)] == [tokens[0] for tokens in (*expected[:2], expected[0])]
        batch.enter_all(requests[2:])
        got, steps = [], 0
        while batch.running:
            (row,) = batch.step()
            steps += row.tree is not None
            got.append(row)
        assert [token for row in got for token in row.tokens] == expected[2]
        assert steps == len([row for row in got if row.committed]) < len(expected[2])
        assert sum(row.committed for row in got) <= len(expected[2])


@IN_FLIGHT
def test_plain_decoding_takes_a_step_less_than_it_gives_tokens(engine, in_flight):
    with Batch(engine, 2, PLAIN, 80) as batch:
        batch.in_flight.most = in_flight
        launched = engine.launched
        batch.enter_all([Request(prompt(5), 12), Request(prompt(6), 7)])
        drain(batch)
        assert engine.launched - launched == 11


def test_a_smaller_size_is_captured_when_it_has_been_wanted_for_a_while(engine):
    """Since a capture takes as long as hundreds of steps; one that is there is taken at once."""
    engine.cuda_graph = True  # as if steps were captured
    with Batch(engine, 4, PLAIN, 300) as batch:
        batch.admit_all([Request(prompt(5), 200), Request(prompt(6), 4), Request(prompt(7), 4)])
        batch.step()
        sizes = [batch.step()[0].size for _ in range(100)]
        assert sizes[:60] == [4] * 60 and sizes[-20:] == [1] * 20
        batch.admit(Request(prompt(4), 4))
        batch.step()
        sizes = [batch.step()[0].size for _ in range(20)]
        assert sizes[0] == 2 and sizes[-10:] == [1] * 10


@pytest.mark.parametrize(("eagle3", "in_flight"), [(True, 1), (False, 2)], ids=["eagle3-at-once", "eagle1-late"])
def test_staggered_requests_get_what_each_gets_alone(texts, eagle3, in_flight):
    engine = engine_for(tiny_model(layers=3, **SMALL) if eagle3 else tiny_model(**TWO_LAYERS))
    with Batch(engine, 3, engine.draft.read_tree(), 80) as batch:
        batch.in_flight.most = in_flight
        results = drain(batch, REQUESTS[::-1] if eagle3 else REQUESTS, 1 if eagle3 else 3)
        assert batch.free == [0, 1, 2] and batch.step() == []
    for request in REQUESTS:
        tokens = alone(engine, request) if eagle3 else texts[id(request)]
        assert results[id(request)] == (tokens, "stop" if tokens[-1] in request.stop_ids else "length")
        assert len(tokens) == request.max_new_tokens or tokens[-1] in request.stop_ids


@IN_FLIGHT
def test_a_released_slot_belongs_to_the_next_request_alone(engine, texts, in_flight):
    with Batch(engine, 2, engine.draft.read_tree(), 80) as batch:
        batch.in_flight.most = in_flight
        batch.admit_all(REQUESTS[:2])
        batch.step()
        batch.release(0)
        assert batch.free == [0] and batch.running == [1]
        with pytest.raises(ValueError, match="slot 0 is free"):
            batch.release(0)
        assert batch.admit(REQUESTS[5]) == 0
        results = drain(batch)
    assert id(REQUESTS[0]) not in results
    assert results[id(REQUESTS[5])][0] == texts[id(REQUESTS[5])]


@IN_FLIGHT
def test_nan_logits_end_one_request_and_no_other(engine, texts, in_flight):
    with Batch(engine, 3, engine.draft.read_tree(), 80) as batch:
        batch.in_flight.most = in_flight
        batch.admit_all(REQUESTS[:3])
        batch.step()
        fill_target_cache(batch.sequences, 1, float("nan"))
        failures, results = [], {}
        for _ in range(60):
            for progress in batch.step():
                results.setdefault(progress.slot, []).extend(progress.tokens)
                if progress.error:
                    failures.append(progress)
        assert not batch.running
        assert [(p.slot, p.request, p.finished, p.tokens) for p in failures] == [(1, REQUESTS[1], "error", [])]
        assert failures[0].error == "the target's logits are NaN"
        batch.admit(REQUESTS[3])  # no NaN of the former occupant is left
        after = drain(batch)
    for slot in (0, 2):
        tokens = texts[id(REQUESTS[slot])]
        assert results[slot] == tokens[-len(results[slot]) :]
    assert after[id(REQUESTS[3])][0] == texts[id(REQUESTS[3])]


def test_a_request_that_cannot_enter_harms_nobody():
    model = tiny_model(**TWO_LAYERS)
    engine = engine_for(model)
    first, second = (Request(prompt(9, seed, vocab=31), 20) for seed in range(2))
    expected = [alone(engine, request) for request in (first, second)]
    poisoned = Request(torch.tensor([4, 31]), 5)
    refused = [
        (Request(prompt(70), 11), ValueError, "70 tokens and 11 new ones do not fit into the 80 rows"),
        (Request(prompt(5), 0), ValueError, "max_new_tokens must be at least 1, got 0"),
        (Request(torch.tensor([1, 32]), 5), ValueError, "tokens must lie in 0..31, got 1..32"),
        (Request(torch.tensor([[1]]), 5), ValueError, "prompt must be int64 \\[L\\]"),
        (Request(torch.tensor([], dtype=torch.int64), 5), ValueError, "prompt must be int64 \\[L\\]"),
        (Request(prompt(5), 5, stop_ids=frozenset([-1])), ValueError, "stop_ids must not be negative"),
        (
            Request(prompt(5), 5, min_new_tokens=6),
            ValueError,
            r"min_new_tokens must lie in 0..5 \(max_new_tokens\), got 6",
        ),
        (poisoned, RuntimeError, "NaN after the prompts of sequences \\[0\\]"),
    ]
    with Batch(engine, 3, engine.draft.read_tree(), 80) as batch:
        batch.admit(first)
        results = {}
        for request, error, message in refused:
            embedding = model.base_model.model.embed_tokens.weight.data
            saved = embedding[31].clone()
            if request is poisoned:
                embedding[31] = float("nan")
            with pytest.raises(error, match=message):
                batch.admit(request)
            embedding[31] = saved
            assert batch.running == [0] and batch.free == [1, 2]
        with pytest.raises(RuntimeError, match="3 requests do not fit into 2 free slots"):
            batch.admit_all([second] * 3)
        sampled = [Request(prompt(5), 5, SamplingParams(temperature=1.0, top_p_first=first)) for first in (True, False)]
        with pytest.raises(ValueError, match="top_p_first must be equal"):
            batch.admit_all(sampled)
        assert batch.admit(second) == 1
        results = drain(batch)
    assert [results[id(request)][0] for request in (first, second)] == expected


def test_a_batch_has_the_engine_to_itself_and_gives_it_back(engine):
    spec = engine.draft.read_tree()
    with Batch(engine, 1, spec, 40), pytest.raises(RuntimeError, match="another generation is running"):
        Batch(engine, 1, spec, 40)
    with pytest.raises(ValueError, match="slots and rows must be at least 1"):
        Batch(engine, 0, spec, 40)
    with pytest.raises(ValueError, match="made with drafts=False"):
        Batch(engine, 1, spec, 40, drafts=False)
    with Batch(engine, 1, spec, 40) as batch, pytest.raises(ValueError, match="make the batch with the largest tree"):
        batch.spec = TreeSpec.dynamic(400, 60, 4)


@pytest.mark.parametrize("operation", ["verify_greedy", "commit", "build_tree", "tree_attention"])
def test_an_interrupted_step_leaves_the_model_usable(engine, operation, monkeypatch):
    request = Request(prompt(5), 8)
    expected = alone(engine, request)
    for at in (1, 4):
        interrupted = failing(getattr(engine.ops, operation), KeyboardInterrupt, at)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine.ops, operation, interrupted)
            alone(engine, request)
        assert alone(engine, request) == expected


def test_the_target_reads_no_new_keys_but_its_own(monkeypatch):
    """A tree's nodes, or the root alone; a draft's passes see those of levels above, by their bits."""
    engine = engine_for(tiny_model())
    attend, passes = engine.ops.tree_attention, []

    def seen(q, cache, lengths, ancestors=None, **options):
        if ancestors is not None:
            passes.append((q.shape[1], options["tune_for_nodes"], options["new_keys"]))
        return attend(q, cache, lengths, ancestors, **options)

    monkeypatch.setattr(engine.ops, "tree_attention", seen)
    for spec in (engine.draft.read_tree(), PLAIN):
        passes.clear()
        with Batch(engine, 1, spec, 64) as batch:
            batch.admit(Request(random_prompt(9)[0], 40))
            for _ in range(3):
                batch.step()
        of_target = [(nodes, keys) for nodes, tune_for_nodes, keys in passes if tune_for_nodes is None]
        of_draft = [keys for _, tune_for_nodes, keys in passes if tune_for_nodes is not None]
        assert of_target and all(nodes == keys == spec.nodes for nodes, keys in of_target)
        assert not any(of_draft) and bool(of_draft) == (spec != PLAIN)


def test_a_closed_batch_decodes_no_more_and_leaves_the_next_one_alone(engine, texts):
    spec = engine.draft.read_tree()
    with Batch(engine, 1, spec, 80) as first:
        first.admit(REQUESTS[1])
        first.step()
    with Batch(engine, 1, spec, 80) as second:
        second.admit(REQUESTS[0])
        tokens = [token for progress in second.step() for token in progress.tokens]
        for use in (first.step, first.launch, lambda: first.release(0), lambda: first.admit(REQUESTS[2])):
            with pytest.raises(RuntimeError, match="this batch is closed"):
                use()
        first.close()
        assert not second.closed
        with pytest.raises(RuntimeError, match="another generation is running"):
            Batch(engine, 1, spec, 80)
        tokens += drain(second)[id(REQUESTS[0])][0]
    assert tokens == texts[id(REQUESTS[0])]


def test_a_dropped_batch_gives_the_engine_back(engine):
    batch = Batch(engine, 1, engine.draft.read_tree(), 80)
    batch.admit(REQUESTS[0])
    batch.step()
    del batch
    gc.collect()
    assert len(alone(engine, REQUESTS[4])) == REQUESTS[4].max_new_tokens


@pytest.mark.parametrize("operation", ["commit", "build_tree"])
def test_a_batch_that_failed_goes_no_further(engine, operation, monkeypatch):
    with Batch(engine, 2, engine.draft.read_tree(), 80) as batch:
        batch.admit(REQUESTS[0])
        batch.step()
        batch.step()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine.ops, operation, Mock(side_effect=KeyboardInterrupt))
            batch.step()
        for use in (batch.step, lambda: batch.admit(REQUESTS[2]), lambda: batch.tokens(0)):
            with pytest.raises(RuntimeError, match="a step of this batch failed .*KeyboardInterrupt.*make a new batch"):
                use()


def test_an_interrupted_prefill_harms_nobody(engine, texts, monkeypatch):
    with Batch(engine, 3, engine.draft.read_tree(), 80) as batch:
        batch.admit(REQUESTS[0])
        interrupted = failing(engine.ops.tree_attention, KeyboardInterrupt, 9)  # in the second prompt
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine.ops, "tree_attention", interrupted)
            batch.admit_all(REQUESTS[1:3])
        assert batch.running == [0]
        assert batch.sequences.lengths.tolist() == [5, 0, 0], "a slot that nobody is in costs attention"
        results = drain(batch, REQUESTS[1:3])
    assert all(results[id(request)][0] == texts[id(request)] for request in REQUESTS[:3])


def test_batches_of_all_sizes_share_one_cache(engine, texts):
    capacity = 32768 if engine.ops.kernels else 512
    spec = engine.draft.read_tree()
    for slots in (3, 7, 2):
        with Batch(engine, slots, spec, 80) as batch:
            batch.admit_all(REQUESTS[:slots])
            results = drain(batch)
        assert all(results[id(request)][0] == texts[id(request)] for request in REQUESTS[:slots])
    assert [(kept.slots, kept.capacity) for kept in engine._sequences] == [(7, capacity)]
    assert not engine.pool.held and engine.pool.pages <= 1.5 * 7 * (80 + MIN_SCRATCH_ROWS) / PAGE_ROWS + 7
    assert {state.sequences.tokens.data_ptr() for state in engine._states.values()} == {
        engine._sequences[0].tokens.data_ptr()
    }
    for slots, rows in ((1, 40_000), (2, 80), (8, 80)):
        Batch(engine, slots, spec, rows).close()
    assert [(kept.slots, kept.capacity) for kept in engine._sequences] == [(1, 40_960), (8, capacity)]


def test_what_a_capture_runs_leaves_sequences_as_they_are(engine):
    """A graph is captured while sequences are there: the steps before it, with nobody active, must change nothing."""
    spec = engine.draft.read_tree()
    trees = itertools.cycle([spec, spec, PLAIN, TreeSpec.dynamic(5, 2, 2)])
    runs = []
    for held in (False, True):
        with Batch(engine, 3, spec, 80) as batch:
            batch.admit_all(REQUESTS[:3])
            steps = []
            for tree in itertools.islice(trees, 8):
                batch.spec = tree
                if held:
                    with torch.no_grad():
                        batch.planner.change_tree(batch.planner.mode([]))
                    with batch.state.unchanged():
                        batch.launch()
                        batch.launch()
                steps.append([(p.slot, p.tokens, p.accepted) for p in batch.step()])
            runs.append(steps)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("eagle3", [True, False], ids=["eagle3", "eagle1"])
def test_equal_prompts_accept_as_many_drafts_as_each_alone(eagle3):
    """The caches of equal prompts are filled once and copied, the draft's too: a hole there shows in no token."""
    engine = engine_for(tiny_model(eagle3=eagle3, vocab=12, seed=2, layers=3, **LARGER))

    def accepted(requests: list[Request]) -> list[list[int]]:
        with Batch(engine, len(requests), engine.draft.read_tree(), 80) as batch:
            batch.admit_all(requests)
            lengths: list[list[int]] = [[] for _ in requests]
            while batch.running:
                for progress in batch.step():
                    lengths[progress.slot].append(progress.accepted)
        return lengths

    twin, other = Request(prompt(40, vocab=12), 20), Request(prompt(7, vocab=12), 20)
    (once,) = accepted([twin])
    assert sum(once) > 0, "nothing was accepted: the test shows nothing"
    first, middle, last = accepted([twin, other, twin])
    assert first == last == once and middle == accepted([other])[0]


@pytest.mark.parametrize("tree", ["draft", "plain"])
@pytest.mark.parametrize("strategy", ["target_match", "rejection", "topp"])
def test_every_step_has_coins_of_its_own(tree, strategy):
    model = tiny_model(**TWO_LAYERS)
    model.base_model.lm_head.weight.data.zero_()  # every token is as likely as any other
    engine = engine_for(model)
    engine.verification = Verification(strategy, max_candidate_len=0 if strategy == "topp" else 5)
    spec = PLAIN if tree == "plain" else engine.draft.read_tree()
    if strategy == "topp" and spec.drafts:  # every draft would be accepted
        engine.verification = replace(engine.verification, accept_policy="reject_all")
    requests = [Request(prompt(5), 24, SamplingParams(temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
    with Batch(engine, 3, spec, 80) as batch:
        batch.admit_all(requests)
        results = drain(batch)
    tokens, again, other = (results[id(request)][0] for request in requests)
    assert len(set(tokens)) > 10 and all(len(set(tokens[i : i + 6])) > 1 for i in range(18))
    assert tokens == again and tokens[:12] != other[:12]


SPECS = {
    "plain": PLAIN,
    "chain": TreeSpec.dynamic(4, 2, 1),
    "8-3-2": TreeSpec.dynamic(8, 2, 2),
    "24-3-6": TreeSpec.dynamic(24, 2, 6),
    "fixed": TreeSpec.fixed([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
}
SEEDED = [
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.8, top_k=5, seed=8),
    SamplingParams(temperature=1.3, top_p=0.9, min_p=0.02, seed=-9),
    SamplingParams(),
]


def test_a_seeded_text_is_the_same_for_every_tree_batch_and_slot():
    engine = engine_for(tiny_model(**WARM))
    requests = [Request(prompt(5 + index, vocab=12), 16, sampling) for index, sampling in enumerate(SEEDED)]
    expected = [alone(engine, request, PLAIN) for request in requests]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    longer = torch.cat((requests[0].prompt, torch.tensor(expected[0][:5])))  # and of where the prompt ends
    assert alone(engine, replace(requests[0], prompt=longer, max_new_tokens=11), PLAIN) == expected[0][5:]
    for request, tokens in zip(requests, expected, strict=True):
        assert alone(engine, request, SPECS["24-3-6"]) == tokens
    many = [replace(request) for request in requests * 2]
    for index, (name, spec) in enumerate(SPECS.items()):
        commits, accepted = engine.ops.calls["commit"], 0
        waiting, got = many[::-1] if index % 2 else many.copy(), {}
        with Batch(engine, 7, spec, 60) as batch:
            while waiting or batch.running:  # filters come and go among the neighbours
                if waiting and batch.free:
                    batch.admit(waiting.pop())
                for row in batch.step():
                    got.setdefault(id(row.request), []).extend(row.tokens)
                    accepted += row.accepted
        for request, tokens in zip(many, expected * 2, strict=True):
            assert got[id(request)] == tokens, name
        assert not spec.drafts or accepted > 0, "nothing was accepted: the test shows nothing"
        assert (engine.ops.calls["commit"] > commits) == (name not in ("plain", "chain")), "chains move no row"


@pytest.mark.slow
def test_a_seeded_text_is_the_same_with_kernels():
    model = tiny_model(eagle3=False, layers=1, vocab=12, seed=2, total_token=4, depth=1, top_k=2)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    engine = engine_for(model)
    kernels = Engine(engine.view, engine.draft, make_operations(kernels=True))
    request = Request(prompt(3, vocab=12).to(engine.device), 5, SEEDED[1])
    assert alone(kernels, request, engine.draft.read_tree()) == alone(engine, request, PLAIN)
    assert kernels.ops.calls["verify_target_match"] > 2


@pytest.mark.parametrize("strategy", VERIFY_STRATEGIES)
def test_reject_all_is_plain_decoding(strategy):
    engine = engine_for(tiny_model(**WARM))
    requests = [Request(prompt(5 + index, vocab=12), 16, sampling) for index, sampling in enumerate(SEEDED)]
    texts = []
    for spec, policy in ((PLAIN, "normal"), (SPECS["8-3-2"], "reject_all")):
        with Batch(engine, 4, spec, 80, verification=Verification(strategy, policy)) as batch:
            batch.admit_all(requests)
            texts.append([[] for _ in requests])
            while batch.running:
                for row in batch.step():
                    texts[-1][row.slot] += row.tokens
                    assert row.accepted == 0
    assert texts[0] == texts[1] and all(len(text) == 16 for text in texts[0])


@pytest.mark.parametrize("strategy", VERIFY_STRATEGIES)
def test_accept_all_emits_every_draft(strategy):
    engine = engine_for(tiny_model(**WARM))
    how = Verification(strategy, "accept_all")
    for spec in (SPECS["chain"], SPECS["24-3-6"], SPECS["fixed"]):
        with Batch(engine, 4, spec, 80, verification=how) as batch:
            batch.admit_all(Request(prompt(5 + index, vocab=12), 40, sampling) for index, sampling in enumerate(SEEDED))
            assert all(len(row.tokens) == 1 and row.tree is None for row in batch.step())
            for _ in range(5):
                tree = batch.state.tree
                tokens, (path, accepted) = tree.tokens.clone(), first_path(tree.parents.clone(), spec.depth)
                for row in batch.step():
                    drafts = tokens[row.slot, path[row.slot, 1 : 1 + int(accepted[row.slot])].long()]
                    assert row.tokens[:-1] == drafts.tolist() and row.accepted == accepted[row.slot] > 0
                    assert spec.top_k > 1 or row.accepted == spec.depth
    engine.verification = how
    request = Request(prompt(5, vocab=12), 40, SEEDED[0])
    free = alone(engine, request, SPECS["24-3-6"])
    stopped = alone(engine, replace(request, stop_ids=frozenset(free[8:9])), SPECS["24-3-6"])
    assert len(free) == 40 and stopped == free[: free.index(free[8]) + 1]


def test_greedy_and_topp_text():
    engine = engine_for(tiny_model(**WARM))
    sampled, greedy = (Request(prompt(5, vocab=12), 30, sampling) for sampling in (SEEDED[0], SamplingParams()))
    argmax = alone(engine, greedy, PLAIN)
    for strategy, options in (("greedy", {}), ("topp", dict(max_candidate_len=1))):
        engine.verification = Verification(strategy, **options)
        assert alone(engine, sampled, SPECS["24-3-6"]) == alone(engine, greedy, SPECS["24-3-6"]) == argmax
    engine.verification = Verification()
    alone(engine, sampled, SPECS["24-3-6"])
    exact = sum(engine.accept_lengths) / len(engine.accept_lengths)
    engine.verification = Verification("topp", max_candidate_len=0)
    alone(engine, sampled, SPECS["24-3-6"])
    assert sum(engine.accept_lengths) / len(engine.accept_lengths) > exact
    with Batch(engine, 1, PLAIN, 20) as batch:
        assert batch.verification == engine.verification


@pytest.mark.parametrize("tree", ["draft", "plain"])
def test_the_order_of_the_filters_is_the_requests(tree):
    """Of .5 .2 .15 ..., top-k 2 then top-p 0.6 leaves one token; top-p 0.6 then top-k 2 leaves two."""
    model = tiny_model(**TWO_LAYERS)
    model.base_model.lm_head.weight.data.zero_()
    engine = engine_for(model)
    spec = PLAIN if tree == "plain" else engine.draft.read_tree()
    likely = {4: 0.5, 9: 0.2, 20: 0.15, 21: 0.1, 30: 0.05}
    bias = {token: math.log(likely[token]) if token in likely else float("-inf") for token in range(32)}
    for first, expected in ((False, {4}), (True, {4, 9})):
        sampling = SamplingParams(1.0, top_k=2, top_p=0.6, top_p_first=first, seed=5, logit_bias=bias)
        assert set(alone(engine, Request(prompt(5), 24, sampling), spec)) == expected


def test_the_originals_arguments_filter_as_the_original_does():
    sampling = SamplingParams.original(temperature=0.7, top_p=0.9, top_k=5)
    assert sampling == SamplingParams(temperature=0.7, top_p=0.9, top_k=5, top_p_first=True)
    assert SamplingParams.original(temperature=1e-6, top_p=0.9, top_k=5) == SamplingParams()
    assert SamplingParams.original(temperature=1.0, top_p=0.0, top_k=0.0) == SamplingParams(1.0, top_p_first=True)


# ------------------------------------------------------------------------------------------ changing trees on the way


def known_rows(batch: Batch, slot: int) -> torch.Tensor:
    """The draft's cache rows of the committed tokens."""
    return draft_cache(batch.sequences)[:, :, slot, :, : batch.lengths[slot]].clone()


KEPT = 8  # of skipped_features.ROWS


@pytest.mark.parametrize(
    ("eagle3", "plain_steps"), [(True, 2), (True, KEPT), (True, KEPT + 1), (False, 2), (False, 2 * KEPT + 5)]
)
def test_drafting_resumes_as_if_it_had_never_stopped(eagle3, plain_steps, monkeypatch):
    monkeypatch.setattr(skipped_features, "ROWS", KEPT)
    engine = engine_for(tiny_model(eagle3=eagle3, layers=3, **LARGER))
    spec, rows = engine.draft.read_tree(), 150
    requests = [Request(prompt(length), rows - length) for length in (30, 3, 50)]
    with Batch(engine, 3, spec, rows) as batch:
        batch.admit_all(requests[:2])
        for _ in range(1 + 3):
            batch.step()
        batch.spec = PLAIN
        for _ in range(plain_steps // 2):
            batch.step()
        batch.admit(requests[2])  # enters while nothing is drafted
        batch.step()
        for _ in range(plain_steps - plain_steps // 2):
            assert all((len(p.tokens), p.proposed) == (1, 0) for p in batch.step())
        batch.spec = spec
        starts = list(batch.lengths)
        resumed = [batch.step() for _ in range(6)]
        sequences = [batch.tokens(slot) for slot in range(3)]
        got = [known_rows(batch, slot) for slot in range(3)]
    accepted = 0
    for slot, sequence in enumerate(sequences):
        # From the same length on, never having stopped: the prompt takes in what was decoded until then.
        with Batch.start(engine, [sequence[: starts[slot]]], spec, SamplingParams(), rows) as batch:
            batch.step()
            again = [batch.step()[0] for _ in range(6)]
            assert torch.equal(batch.tokens(0), sequence)
            torch.testing.assert_close(known_rows(batch, 0), got[slot], atol=2e-5, rtol=1e-4)
        mine = [row for step in resumed for row in step if row.slot == slot]
        assert [(row.tokens, row.accepted, row.proposed) for row in mine] == [
            (row.tokens, row.accepted, row.proposed) for row in again
        ]
        accepted += sum(row.accepted for row in mine)
    assert accepted > 0, "nothing was accepted: the test shows nothing"


@pytest.mark.parametrize("eagle3", [True, False], ids=["eagle3", "eagle1"])
def test_what_another_request_left_is_not_taken_in_when_drafting_resumes(eagle3):
    """NaN features of a plain step, in rows that the next request's plain steps do not write."""
    resumed = []
    for poisoned in (False, True):
        engine = engine_for(tiny_model(eagle3=eagle3, **LARGER))
        if poisoned:
            with Batch(engine, 1, PLAIN, 250) as batch:
                batch.admit(Request(prompt(40), 100))
                for _ in range(9):
                    batch.step()
                fill_target_cache(batch.sequences, 0, float("nan"))
                drain(batch)
                assert batch.sequences.skipped.features.isnan().any()
        spec = engine.draft.read_tree()
        with Batch(engine, 1, spec, 250) as batch:
            batch.admit(Request(prompt(10), 200))
            for tree in (*3 * [spec], *4 * [PLAIN], *5 * [spec]):
                batch.spec = tree
                (row,) = batch.step()
                resumed.append((poisoned, row.tokens, batch.state.tree.tokens.tolist()))
            (cache,) = batch.sequences.draft_tensors.caches.caches
            assert not cache.data.isnan().any()
    clean, after_nan = ([row[1:] for row in resumed if row[0] == poisoned] for poisoned in (False, True))
    assert clean == after_nan


def test_what_takes_in_plain_steps_is_made_before_it_is_needed(engine):
    with Batch(engine, 2, PLAIN, 200) as batch:
        batch.admit(Request(prompt(9), 150))
        batch.step()
        made = engine.steps._kept[batch.state, None]
        batch.admit(Request(prompt(5), 100, stop_ids=frozenset(range(100, 117))))  # more than there was room for
        batch.step()
        assert engine.steps._kept[batch.state, None] is not made


@IN_FLIGHT
def test_trees_may_change_at_every_step(engine, texts, in_flight):
    trees = [engine.draft.read_tree(), TreeSpec.dynamic(20, 4, 5), PLAIN, TreeSpec.fixed([[0], [1], [0, 0]]), PLAIN]
    greedy = [request for request in REQUESTS if request.sampling.greedy]
    with Batch(engine, 2, trees[0], 80) as batch:
        batch.in_flight.most = in_flight
        waiting, results, proposed = list(greedy), {}, set()
        for tree in itertools.cycle(trees):
            batch.spec = tree
            while waiting and batch.free:
                batch.admit(waiting.pop(0))
            if not batch.running:
                break
            for progress in batch.step():
                results.setdefault(id(progress.request), []).extend(progress.tokens)
                proposed.add(progress.proposed)
    assert proposed == {tree.drafts for tree in trees}
    for request in greedy:
        assert results[id(request)] == texts[id(request)]


def test_a_batch_without_a_draft_decodes_plainly(engine, texts):
    engine.draft = None
    engine.clear()
    with Batch(engine, 2, PLAIN, 80) as batch:
        batch.admit(REQUESTS[0])
        assert drain(batch)[id(REQUESTS[0])] == (texts[id(REQUESTS[0])], "length")
        with pytest.raises(ValueError, match="this batch has no draft"):
            batch.spec = TreeSpec.dynamic(8, 3, 2)


# -------------------------------------------------------------------------------------------------- logits processed


def rewarded(model, request: Request) -> tuple[list[int], list[float]]:
    """A greedy request decoded by the bare target with Hugging Face's penalty, without stop tokens that would come too
    early: tokens, and their log-probabilities."""
    penalise = RepetitionPenaltyLogitsProcessor(request.sampling.repetition_penalty)
    sequence, logprobs = request.prompt[None], []
    for place in range(request.max_new_tokens):
        with torch.no_grad():
            logits = model.base_model(sequence).logits[:, -1].float()
        scores = penalise(sequence, logits.clone())
        for token, value in request.sampling.logit_bias:
            scores[0, token] += value
        if place < request.min_new_tokens:
            scores[0, list(request.stop_ids)] = -torch.inf
        token = scores.argmax(-1, keepdim=True)
        logprobs.append(logits.log_softmax(-1)[0, token.item()].item())
        sequence = torch.cat((sequence, token), dim=1)
        if token.item() in request.stop_ids:
            break
    return sequence[0, len(request.prompt) :].tolist(), logprobs


PROCESSED = [
    Request(prompt(8), 18, SamplingParams(repetition_penalty=1.4)),
    Request(prompt(20), 14, SamplingParams(logit_bias={5: 3.0, 9: float("-inf")})),
    Request(prompt(4), 18, SamplingParams(repetition_penalty=0.8, logit_bias=[(3, -2.0)])),
    Request(prompt(11), 14),
    Request(prompt(15), 18, stop_ids=frozenset(range(1, 10)), min_new_tokens=8),
]


@pytest.fixture(scope="module")
def penalised():
    """A model, requests with rules, and what its bare target gives them."""
    model = tiny_model(layers=3, vocab=12, **LARGER)
    requests = [replace(request, prompt=request.prompt % 12) for request in PROCESSED]
    expected = [rewarded(model, request) for request in requests]
    differ = 0
    for request, (tokens, _) in zip(requests, expected, strict=True):
        length, sequence = len(request.prompt), torch.cat((request.prompt, torch.tensor(tokens)))
        with torch.no_grad():
            free = model.base_model(sequence[None]).logits[0].argmax(-1)
        differ += free[length - 1 : -1].tolist() != tokens
    assert differ == 4, "a penalty, bias or least length had no effect: the test shows little"
    return model, requests, expected


@pytest.mark.parametrize(("tree", "in_flight"), [("draft", 2), ("plain", 1)], ids=["draft-late", "plain-at-once"])
def test_penalties_and_biases_are_those_of_plain_decoding(penalised, tree, in_flight):
    model, requests, expected = penalised
    engine = engine_for(model)
    neighbour = Request(prompt(30, vocab=12), 18, SamplingParams(temperature=1.0, seed=8))
    spec = PLAIN if tree == "plain" else engine.draft.read_tree()
    with Batch(engine, 2, spec, 60, logprobs=True) as batch:
        batch.in_flight.most = in_flight
        waiting, rows = [*requests[3:], neighbour, *requests[:3]], {}
        accepted = 0
        while waiting or batch.running:
            while waiting and batch.free:
                batch.admit(waiting.pop(0))
            for progress in batch.step():
                tokens, logprobs = rows.setdefault(id(progress.request), ([], []))
                assert len(progress.logprobs) == len(progress.tokens)
                tokens += progress.tokens
                logprobs += progress.logprobs
                accepted += progress.accepted
    for request, (tokens, logprobs) in zip(requests, expected, strict=True):
        assert rows[id(request)][0] == tokens
        torch.testing.assert_close(torch.tensor(rows[id(request)][1]), torch.tensor(logprobs), atol=1e-4, rtol=1e-4)
    assert 8 < len(rows[id(requests[4])][0]) < 18
    assert accepted > 0 or tree == "plain"
    assert rows[id(neighbour)][0] == alone(engine, neighbour, spec)  # coins are drawn for a tree's nodes


def test_a_sampled_request_gets_the_same_beside_one_that_has_a_penalty(engine, texts):
    request = REQUESTS[3]
    with Batch(engine, 2, engine.draft.read_tree(), 80) as batch:
        batch.admit_all([replace(request, sampling=replace(request.sampling, repetition_penalty=1.2)), request])
        results = drain(batch)
    assert results[id(request)][0] == texts[id(request)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(repetition_penalty=0.0), "repetition_penalty must be a finite number > 0"),
        (dict(repetition_penalty=float("inf")), "repetition_penalty"),
        (dict(repetition_penalty=1e39), "repetition_penalty must be .* that float32 holds"),
        (dict(temperature=10**400), "temperature must be .* that float32 holds"),
        (dict(temperature=float("nan")), "temperature must be a finite number"),
        (dict(temperature=-1.0), "temperature"),
        (dict(top_k=-1), "top_k"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_p=1.5), "top_p"),
        (dict(min_p=2.0), "min_p"),
        (dict(temperature=1.0, top_k=2**31), "top_k must be .* that 32 bits hold, got 2147483648"),
        (dict(temperature=1.0, top_k=10**400), "top_k must be .* that 32 bits hold"),
        (dict(temperature=1.0, top_k=float("nan")), "top_k must be an integer"),
        (dict(logit_bias={-1: 1.0}), "tokens >= 0"),
        (dict(logit_bias={1: float("nan")}), "finite values or -inf"),
        (dict(logit_bias={1: 1e39}), "finite values or -inf"),
        (dict(logit_bias=[(1, 2.0), (1, 3.0)]), "a token occurs twice"),
        (dict(seed=2**63), "seed must fit into 64 bits"),
    ],
)
def test_bad_sampling(arguments, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**arguments)


def test_sampling_with_a_bias_is_hashable_and_a_bias_beyond_the_vocabulary_is_refused(engine):
    sampling = SamplingParams(logit_bias={7: 1, 3: -2.5})
    assert sampling.logit_bias == ((3, -2.5), (7, 1.0)) and hash(sampling) == hash(
        SamplingParams(logit_bias=[(7, 1), (3, -2.5)])
    )
    with Batch(engine, 1, PLAIN, 80) as batch, pytest.raises(ValueError, match="logit_bias: tokens must lie in 0..31"):
        batch.admit(Request(prompt(5), 5, SamplingParams(logit_bias={32: 1.0})))
