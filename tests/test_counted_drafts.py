"""NASD in the engine: drafts by n-grams that are counted while decoding."""

import itertools

import pytest
import torch

from eagle_triton import EAGLEConfig, EAGLEInference, EaModel
from eagle_triton.engine.drafts.counted import CountedDraft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.graph import StepGraph
from eagle_triton.engine.memory.by_slot import tensors_of
from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.step import Mode, decode_step
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.families import own_ea_model as native
from eagle_triton.inference import SpeculativeConfig, create_proposer
from eagle_triton.ops import ngram_table as kernels
from eagle_triton.speculative_decoding import (
    NGramStorage,
    OneLevelNGramStorage,
    ngram_assisted_speculative_generate,
)
from tests.test_repeat_drafts import decode
from tests.tiny import random_prompt, tiny_model

VOCABULARY = 8  # so few tokens that greedy decoding soon repeats itself
PROMPTS = [random_prompt(length, vocab=VOCABULARY)[0] for length in (1, 9, 30, 9)]
LIMITS = [30, 18, 44, 18]
STORAGES = {"basic": NGramStorage, "onelevel": OneLevelNGramStorage}
SEEDED = SamplingParams(temperature=0.7, seed=5)


@pytest.fixture(scope="module")
def model():
    return tiny_model(eagle3=False, layers=2, vocab=VOCABULARY, seed=1)


def make_engine(model, *options, device="cpu", **names) -> Engine:
    cuda = device == "cuda"
    view, _ = native.read(model.to(device))
    return Engine(view, CountedDraft(*options, **names), make_operations(cuda), cuda_graph=cuda)


def tables_of(batch) -> list[torch.Tensor]:
    return list(tensors_of(batch.sequences.draft_tensors))


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        (dict(places=4), SamplingParams()),
        (dict(places=15, n=5, filler_top_k=1), SEEDED),
        (dict(places=3, n=2, storage="onelevel", filler_weight=0.5), SamplingParams()),
        (dict(places=3, n=2, storage="onelevel", filler_weight=0.5), SEEDED),
    ],
    ids=str,
)
def test_output_is_the_targets_own(model, device, options, sampling):
    engine = make_engine(model, device=device, **options)
    prompts, spec = [prompt.to(device) for prompt in PROMPTS], engine.draft.read_tree()
    want, _ = decode(engine, prompts, PLAIN, LIMITS, sampling=sampling)
    for slots in (3, 1):
        rows, accepted = decode(engine, prompts, spec, LIMITS, slots, sampling)
        assert all(torch.equal(row, plain) for row, plain in zip(rows, want, strict=True))
        assert sum(accepted) > len(accepted) / 5, "little was accepted: the test shows little"
    if device == "cuda":
        assert engine.steps._kept and all(isinstance(step, StepGraph) for step in engine.steps._kept.values()), (
            engine.notes
        )


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("n", "gamma", "fillers", "weight"), [(2, 4, 3, 1.0), (3, 5, 3, 4.0), (3, 15, 1, 1.0), (5, 3, 5, 0.1)]
)
def test_each_step_proposes_and_accepts_what_the_function_does(model, storage, n, gamma, fillers, weight):
    """ngram_assisted_speculative_generate with its dictionaries, on the same model."""
    prompt, trace, base = random_prompt(20, vocab=VOCABULARY, seed=n)[0], [], model.cpu().base_model
    tokens, _ = ngram_assisted_speculative_generate(
        prompt.tolist(), STORAGES[storage](n, VOCABULARY), base,
        gamma=gamma, filler_top_k=fillers, filler_weight=weight, max_gen_len=60 + gamma, eos_tokens_id=[],
        stop_if_unknown=True, first_target=True, trace=trace,
    )  # fmt: skip
    engine, steps = make_engine(model, gamma, n, storage, fillers, weight), []
    with Batch(engine, 1, engine.draft.read_tree(), 200) as batch:
        batch.admit(Request(prompt, 100))
        (first,) = batch.step()
        assert first.tree is None and first.tokens == tokens[:1]
        while batch.lengths[0] < len(prompt) + 59:
            (row,) = batch.step()
            steps.append((row.proposed, row.accepted))
        known = batch.tokens(0).tolist()
    assert known[: len(prompt) + 59] == (prompt.tolist() + tokens)[: len(prompt) + 59]
    assert steps == [(step.proposed, step.accepted) for step in trace[: len(steps)]]
    assert sum(accepted for _, accepted in steps) > 5


def test_the_kernels_draft_the_same(model, device):
    """Step by step, through prefill, steps and slots that are entered again; on a CPU the rest is the references."""
    _, want = decode(make_engine(model, 4), PROMPTS[:2], TreeSpec.repeats(4), [12, 9], 1)
    engine = make_engine(model, 4, device=device)
    engine.ops.count_ngrams, engine.ops.counted_drafts = kernels.count_ngrams, kernels.counted_drafts
    _, accepted = decode(engine, [prompt.to(device) for prompt in PROMPTS[:2]], TreeSpec.repeats(4), [12, 9], 1)
    model.cpu()
    assert accepted == want and sum(accepted) > 3


def test_a_slot_that_is_entered_again_is_fresh(model):
    engine = make_engine(model, 5)
    spec = engine.draft.read_tree()
    alone = [decode(engine, [prompt], spec, [limit], 1)[1] for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    assert decode(engine, PROMPTS, spec, LIMITS, 1)[1] == list(itertools.chain(*alone))


def test_a_slot_keeps_what_it_has_learnt_if_that_is_wanted(model):
    prompt = random_prompt(20, vocab=VOCABULARY)[0]
    nearly_uniform = SamplingParams(temperature=5.0, seed=7)  # no repetition of its own
    engine = make_engine(model, 8, 5, filler_top_k=1, reset_in_between=False)
    runs = [decode(engine, [prompt], TreeSpec.repeats(8), [64], 1, nearly_uniform) for _ in range(2)]
    assert torch.equal(runs[0][0][0], runs[1][0][0]) and len(runs[1][1]) < 0.7 * len(runs[0][1])
    engine.draft.forget()
    assert decode(engine, [prompt], TreeSpec.repeats(8), [64], 1, nearly_uniform)[1] == runs[0][1]
    with Batch(engine, 1, PLAIN, 100) as batch:
        batch.sequences.wipe([])
        assert not any(tensor.any() for tensor in tables_of(batch))


def test_a_sequence_that_has_ended_teaches_its_own_tokens_alone(model):
    """What stands behind a stop token or the limit is no part of it."""
    storage = NGramStorage(3, VOCABULARY)
    (want,), _ = decode(make_engine(model, 5), [PROMPTS[2]], PLAIN, [30], 1)
    end = int(want[-4])
    for limit, stop in ((30, ()), (60, (end,))):
        engine = make_engine(model, 5, filler_top_k=1, reset_in_between=False)
        storage.reset()
        with Batch(engine, 1, engine.draft.read_tree(), 200) as batch:
            batch.admit(Request(PROMPTS[2], limit, stop_ids=frozenset(stop)))
            while batch.running:
                batch.step()
            storage.initialize(batch.tokens(0)[None])
            counts = sum(len(tokens) for tokens in storage._counts.values())
            *_, totals, used = tables_of(batch)
        assert used[..., 0].sum() == len(storage._counts) and used[..., 1].sum() == counts
        assert totals.sum() == sum(sum(tokens.values()) for tokens in storage._counts.values())


def test_plain_steps_teach_too(model):
    """The counts follow from the text, not from the trees by which it came; and nothing has to be caught up with."""
    kept, accepted = [], 0
    for specs in ([TreeSpec.repeats(4)], [TreeSpec.repeats(4), PLAIN, PLAIN], [PLAIN]):
        engine = make_engine(model, 4)
        with Batch(engine, 1, TreeSpec.repeats(4), 200) as batch:
            batch.admit(Request(PROMPTS[2], 60))
            for spec in itertools.cycle(specs):
                batch.spec = spec
                accepted += sum(row.accepted for row in batch.step())
                if not batch.running:
                    break
            kept.append(tables_of(batch))
            assert batch.sequences.skipped is None
    for others in kept[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(kept[0], others, strict=True))
    assert kept[0][-1].all() and accepted


def test_a_batch_that_never_drafts_counts_nothing(model):
    engine = make_engine(model, 4)
    with Batch(engine, 1, PLAIN, 60, drafts=False) as batch:
        batch.admit(Request(PROMPTS[1], 20))
        while batch.running:
            batch.step()
        assert not any(tensor.any() for tensor in tables_of(batch))
    assert not engine.ops.calls["count_ngrams"] and not engine.ops.calls["topk"]


def test_sequences_that_stand_still_learn_nothing(model):
    """As a graph is captured; and a step leaves the counts of free slots."""
    engine = make_engine(model, 4)
    with Batch(engine, 3, TreeSpec.repeats(4), 60) as batch:
        batch.admit_all([Request(PROMPTS[1], 30), Request(PROMPTS[3], 9), Request(PROMPTS[1], 30)])
        before = [tensor.clone() for tensor in tables_of(batch)]
        assert all(torch.equal(tensor[0], tensor[2]) for tensor in before), "equal prompts are counted alike"
        with batch.state.unchanged():
            decode_step(engine.ops, engine.view, engine.draft, batch.state, Mode())
        assert all(torch.equal(old, new) for old, new in zip(before, tables_of(batch), strict=True))
        batch.release(1)
        assert [(row.tree, len(row.tokens)) for row in batch.step()] == [(None, 1)] * 2  # behind the prompts
        batch.step()
        for old, new in zip(before, tables_of(batch), strict=True):
            assert torch.equal(old[1], new[1])
        assert not torch.equal(before[-1][0], tables_of(batch)[-1][0])


def test_tables_have_room_for_whole_sequences():
    for options, places, grams in (
        (dict(), 1024, 4096),
        (dict(filler_top_k=1), 1024, 1024),
        (dict(filler_weight=0.0), 1024, 1024),
        (dict(filler_top_k=1, reset_in_between=False), 4096, 4096),
    ):
        kept = CountedDraft(4, **options).new_slot_tensors(SlotPages.whole(2, 512, torch.device("meta")))
        assert kept.table.contexts.shape == (2, 2, places, 2) and kept.table.counts.shape == (2, 2, grams)
    pages = SlotPages.whole(2, 512, torch.device("cpu"))
    assert CountedDraft(4, 5, "onelevel").new_slot_tensors(pages).table.used.shape == (2, 1, 2)


def test_by_configuration_on_the_demo():
    model = EaModel.from_pretrained("demo").base_model
    prompts = [torch.randint(3, 4000, (24,), generator=torch.Generator().manual_seed(0)), torch.arange(10, 40)]
    naive = EAGLEInference(None, model, SpeculativeConfig("naive"))
    plain = naive.generate(prompts, 20)[0]
    config = SpeculativeConfig.from_json('{"method": "NASD", "num_speculative_tokens": 5, "ngram_storage": "Basic"}')
    eagle = EAGLEInference(None, model, EAGLEConfig(speculative=config, slots=2, fallback=False))
    rows, stats = eagle.generate(prompts, 20)
    assert all(torch.equal(row, want) for row, want in zip(rows, plain, strict=True)) and stats.accepted
    assert "CountedDraft; method nasd" in repr(eagle)
    sampled = dict(temperature=0.8, top_p=0.9, seed=3)
    rows, _ = eagle.generate(prompts, 12, **sampled)
    want, _ = naive.generate(prompts, 12, **sampled)
    assert all(torch.equal(row, other) for row, other in zip(rows, want, strict=True))


def test_outputs_are_kept_and_forgotten_as_configured(model):
    config = SpeculativeConfig("nasd", num_speculative_tokens=6, reset_in_between=False)
    eagle = EAGLEInference(None, model.base_model, EAGLEConfig(speculative=config, fallback=False))
    cold, warm = (eagle.generate(PROMPTS[1:2], 30, stop_token_ids=())[1].tau for _ in range(2))
    eagle.forget_outputs()
    assert eagle.generate(PROMPTS[1:2], 30, stop_token_ids=())[1].tau == cold < warm


def test_what_a_configuration_becomes(model):
    draft = create_proposer(
        SpeculativeConfig(
            "nasd", num_speculative_tokens=9, ngram_storage="onelevel", ngram_n=4, filler_top_k=5, filler_weight=0.5,
            reset_in_between=False,
        ),
        model,
    )  # fmt: skip
    assert isinstance(draft, CountedDraft) and draft.read_tree() == TreeSpec.repeats(9)
    assert (draft.n, draft.storage, draft.shortest) == (4, "onelevel", 3)
    assert (draft.filler_top_k, draft.filler_weight, draft.reset_in_between) == (5, 0.5, False)
    (row,), stats = EAGLEInference(draft, model).generate(PROMPTS[2:3], 20, stop_token_ids=())
    assert stats.proposed and len(row) == len(PROMPTS[2]) + 20
    with pytest.raises(ValueError, match="filler_top_k must lie in 1..8, got 9"):
        EAGLEInference(None, model, SpeculativeConfig("nasd", filler_top_k=9))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(places=0), "places must be at least 1, got 0"),
        (dict(places=3, n=1), r"n must lie in 2..5, got 1"),
        (dict(places=3, n=6), r"n must lie in 2..5, got 6"),
        (dict(places=3, storage="two"), "storage must be one of basic, onelevel, got 'two'"),
        (dict(places=3, filler_top_k=0), r"filler_top_k must lie in 1..64, got 0"),
        (dict(places=3, filler_top_k=65), r"filler_top_k must lie in 1..64, got 65"),
        (dict(places=3, filler_weight=-1.0), "filler_weight must be at least 0 and finite, got -1.0"),
        (dict(places=3, filler_weight=float("inf")), "filler_weight must be at least 0 and finite, got inf"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CountedDraft(**options)
