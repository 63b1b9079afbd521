"""Qwen3.5 and Qwen3-Next as targets: the tokens of transformers' own generate, and exact states."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from eagle_triton import EAGLEConfig, EAGLEInference, UnsupportedModelError, optimize_with_triton
from eagle_triton.engine import long_prompts
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.memory.pages import PAGE_ROWS
from eagle_triton.engine.model.gated_delta import GatedDeltaCache
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.prefill import Prefill
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.families.causal_lm import draft_from_causal_lm, read_causal_lm
from eagle_triton.families.reading.mtp import read_mtp
from eagle_triton.models.heads import DraftConfig, Eagle1Head, Eagle3Head
from eagle_triton.models.mtp import MTPHead, load_mtp
from tests.test_batch import drain
from tests.tiny import generate_row, random_prompt
from tests.tiny_hybrids import KINDS, QWEN, mtp_tensors, save_with_mtp, tiny_hybrid

pytestmark = pytest.mark.skipif(not KINDS, reason="transformers has no gated delta nets")
KIND = KINDS[0] if KINDS else ""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 24
PROMPTS = {
    length: 1 + random_prompt(length, vocab=VOCAB - 1)[0] for length in (1, 3, 4, 20, 63, 64, 65, 513)
}  # no padding
TREES = {
    "plain": PLAIN,
    "chain": TreeSpec.chain(3),
    "dynamic": TreeSpec.dynamic(14, 3, 4),
    "fixed": TreeSpec.fixed([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Of each kind a model and its MTP layers."""

    @cache
    def make(kind: str):
        model = tiny_hybrid(kind, VOCAB)
        folder = save_with_mtp(model, tmp_path_factory.mktemp(kind), mtp_tensors(model, QWEN))
        return model.to(DEVICE), load_mtp(model, folder)

    return make


@pytest.fixture(scope="module")
def expected(pairs):
    """What transformers' own generate gives."""

    @cache
    def make(kind: str, length: int) -> Tensor:
        model, prompt = pairs(kind)[0], PROMPTS[length][None].to(DEVICE)
        most = 70 if kind == KIND and length in (3, 20, 64, 65) else 24
        return model.generate(prompt, max_new_tokens=most, do_sample=False)[0].cpu()

    def first(kind: str, length: int, new: int) -> Tensor:
        found = make(kind, length)
        assert len(found) >= length + new
        return found[: length + new]

    return first


PACKED = pytest.mark.parametrize("packed", [False, True], ids=["in-turn", "packed"])


def engine_of(model, head: MTPHead, cuda_graph: bool = DEVICE == "cuda", packed: bool | None = None) -> Engine:
    view = read_causal_lm(model)
    draft = read_mtp(head, view, lambda: TREES["dynamic"])
    return Engine(view, draft, make_operations(DEVICE == "cuda"), cuda_graph=cuda_graph, pack_prompts=packed)


def delta_cache(batch: Batch) -> GatedDeltaCache:
    (found,) = (kind for kind in batch.sequences.caches.caches if isinstance(kind, GatedDeltaCache))
    return found


def remembered(past, index: int) -> tuple[Tensor, Tensor]:
    """State and window of a layer in transformers' cache of one sequence."""
    if hasattr(past, "layers"):
        layer = past.layers[index]
        state, window = layer.recurrent_states[0], layer.conv_states[0]
    else:  # before 5.3
        state, window = past.recurrent_states[index], past.conv_states[index]
    return state[0], window[0][:, 1:].mT


@pytest.mark.versions
@pytest.mark.parametrize(
    ("kind", "tree"), [*((kind, "dynamic") for kind in KINDS), *((KIND, tree) for tree in ("plain", "chain", "fixed"))]
)
def test_tokens_are_those_of_generate(pairs, expected, kind, tree):
    """Three slots; sequences enter those that others have left."""
    lengths, most = ((1, 3, 20, 65, 513), 64) if (kind, tree) == (KIND, "dynamic") else ((1, 20, 64), 24)
    if kind == "qwen3_5_moe":  # Qwen3.5's nets, and Qwen3-Next's experts
        lengths = (20,)
    waiting = [Request(PROMPTS[length], most if length == 20 else 24) for length in lengths]
    count, accepted = len(waiting), 0
    with torch.no_grad(), Batch(engine_of(*pairs(kind)), 3, TREES[tree], 560) as batch:
        while waiting or batch.running:
            while waiting and batch.free:
                batch.admit(waiting.pop(0))
            for row in batch.step():
                accepted += row.accepted
                if row.finished:
                    request = row.request
                    found = batch.tokens(row.slot).cpu()
                    assert torch.equal(found, expected(kind, len(request.prompt), request.max_new_tokens))
                    count -= 1
    assert not count and (accepted > 0) == (tree != "plain")


@pytest.mark.versions
@pytest.mark.parametrize("tree", ["dynamic", "plain"])
def test_prompts_in_pieces_are_read_between_steps(pairs, expected, tree):
    """Several prompts in a forward, and a prompt in several forwards, while others decode. Plain steps leave the states
    of slots that are read in pieces as they are."""
    engine, new = engine_of(*pairs(KIND), packed=True), 24
    lengths = (20, 513, 65, 1, 64, 63, 513, 4)
    waiting = [Request(PROMPTS[length], new) for length in lengths]
    got: dict[int, list[int]] = {id(request): request.prompt.tolist() for request in waiting}
    requests = list(waiting)
    with torch.no_grad(), Batch(engine, 4, TREES[tree], 560, prompt_tokens=128) as batch:
        while waiting or batch.running:
            if count := batch.fitting(waiting):
                batch.enter_all(waiting[:count])
                del waiting[:count]
            for row in batch.step():
                got[id(row.request)] += row.tokens
    for request, length in zip(requests, lengths, strict=True):
        assert got[id(request)] == expected(KIND, length, new).tolist()


@pytest.mark.parametrize("where", ["half_way", "behind it"])
def test_a_forward_that_is_interrupted_is_read_again_from_the_beginning(pairs, expected, monkeypatch, where):
    """Half-way some layers have taken its tokens in, and others have not; behind it, all, and nobody has noted it."""
    engine, new = engine_of(*pairs(KIND), cuda_graph=False, packed=True), 24
    whole, calls = engine.ops.delta_chunk, itertools.count()

    def interrupted(*operands, **options):
        if next(calls) == 5:  # of the prompt's second forward, which three recurrent layers take in
            raise KeyboardInterrupt
        return whole(*operands, **options)

    def read(prefill, *forward):
        whole_read(prefill, *forward)
        if next(calls) == 1:  # the prompt's second forward
            raise KeyboardInterrupt

    whole_read = Prefill.read
    with torch.no_grad(), Batch(engine, 2, TREES["dynamic"], 560, prompt_tokens=128) as batch:
        batch.enter_all([Request(PROMPTS[20], new)])
        batch.step()
        if where == "half_way":
            monkeypatch.setattr(engine.ops, "delta_chunk", interrupted)
        else:
            monkeypatch.setattr(Prefill, "read", read)
        batch.enter_all([Request(PROMPTS[513], new)])
        with pytest.raises(KeyboardInterrupt):
            while True:
                batch.step()
        drain(batch)
        assert batch.tokens(1).tolist() == expected(KIND, 513, new).tolist()
    assert next(calls) > (5 + 15 if where == "half_way" else 1 + 5)


@pytest.mark.parametrize("memory", [True, False], ids=["as-one", "no-memory-for-that"])
def test_a_long_prompt_is_read_as_one(pairs, expected, monkeypatch, memory):
    """By its layers of attention. Where that fails half-way, recurrent layers begin it anew."""
    monkeypatch.setattr(long_prompts, "MIN_ROWS", 128)
    monkeypatch.setattr(long_prompts, "MIN_WORK", 1)
    engine, new = engine_of(*pairs(KIND), cuda_graph=False, packed=True), 24
    if DEVICE == "cuda":  # where its kernel is not for fp32
        monkeypatch.setattr(engine.ops, "prompt_attention", make_operations().prompt_attention)
        monkeypatch.setattr(long_prompts.LongPrompts, "_refused", lambda *_: None)
    engine.long_prompts = True
    attend, starts = engine.ops.prompt_attention, []

    def attended(q, cache, start, end, **options):
        starts.append(start)
        if len(starts) == 2 and not memory:
            raise torch.OutOfMemoryError("out of memory")
        return attend(q, cache, start, end, **options)

    monkeypatch.setattr(engine.ops, "prompt_attention", attended)
    with torch.no_grad(), Batch(engine, 2, TREES["dynamic"], 560, prompt_tokens=128) as batch:
        batch.enter_all([Request(PROMPTS[20], 64)])
        batch.step()
        batch.enter_all([Request(PROMPTS[513], new)])
        drain(batch)
        assert batch.tokens(0).tolist() == expected(KIND, 20, 64).tolist()
        assert batch.tokens(1).tolist() == expected(KIND, 513, new).tolist()
    assert set(starts) == ({128, 256, 384} if memory else {128}) and ("long_prompts" in engine.notes) != memory


@pytest.mark.versions
@pytest.mark.parametrize(("kind", "packed"), list(zip(KINDS, (False, True), strict=False)))
def test_states_after_every_step_are_those_of_the_committed_tokens(pairs, kind, packed):
    """By transformers' own cache, fed from scratch. Trees and plain steps take turns."""
    model, head = pairs(kind)
    trees, rejected, places = itertools.cycle([TREES["dynamic"], PLAIN, TREES["chain"]]), 0, [0, 1, 2]
    with torch.no_grad(), Batch(engine_of(model, head, False, packed), 2, TREES["dynamic"], 90) as batch:
        batch.in_flight.most = 1  # the states that are read belong to the step that was read
        batch.admit_all([Request(PROMPTS[20], 40), Request(PROMPTS[3], 40)])
        for step in range(10):
            if step:
                batch.spec = next(trees)
            rows = batch.step()
            assert all((row.tree is None) == (step == 0) for row in rows)  # the first tokens come before any step
            rejected += sum(row.accepted < row.tree.depth for row in rows if row.tree is not None)
            for slot in range(2):
                known = batch.tokens(slot)[: batch.lengths[slot]]
                past = model(known[None], use_cache=True).past_key_values
                mine = delta_cache(batch)
                for place, index in enumerate(places):
                    theirs, window = remembered(past, index)
                    close = dict(atol=2e-5 * float(theirs.abs().max()), rtol=1e-4)
                    torch.testing.assert_close(mine.states[place, slot], theirs, **close)
                    torch.testing.assert_close(mine.windows[place, slot], window, atol=1e-4, rtol=1e-4)
    assert rejected > 0


def test_an_inactive_slot_stays_as_it_is_and_one_that_is_entered_again_is_fresh(pairs, expected):
    trees = itertools.cycle([TREES["dynamic"], PLAIN, TREES["chain"]])
    with torch.no_grad(), Batch(engine_of(*pairs(KIND)), 2, TREES["dynamic"], 90) as batch:
        batch.admit_all([Request(PROMPTS[20], 5), Request(PROMPTS[3], 64)])
        after = None
        while batch.running:
            batch.spec = next(trees)
            batch.step()
            held = [tensor[:, 0].clone() for tensor in delta_cache(batch).tensors]
            if batch.free == [0]:
                assert after is None or all(map(torch.equal, held, after))
                after = held
        assert after is not None and all(tensor.any() for tensor in after)
        batch.admit(Request(PROMPTS[4], 24))
        drain(batch)
        assert torch.equal(batch.tokens(0).cpu(), expected(KIND, 4, 24))


def test_equal_prompts_are_computed_once_and_drafted_alike(pairs, expected):
    accepted: dict[int, list[int]] = {0: [], 1: [], 2: []}
    with torch.no_grad(), Batch(engine_of(*pairs(KIND)), 3, TREES["dynamic"], 90) as batch:
        batch.admit_all([Request(PROMPTS[length], 24) for length in (20, 3, 20)])
        while batch.running:
            for row in batch.step():
                accepted[row.slot].append(row.accepted)
        assert accepted[0] == accepted[2] and sum(accepted[0]) > 0
        for slot in (0, 2):
            assert torch.equal(batch.tokens(slot).cpu(), expected(KIND, 20, 24))


def test_a_seeded_text_is_that_of_plain_decoding(pairs):
    texts = []
    for tree in ("plain", "chain", "dynamic"):
        sampling = SamplingParams(temperature=1.0, seed=5)
        with torch.no_grad(), Batch(engine_of(*pairs(KIND)), 1, TREES[tree], 90) as batch:
            batch.admit(Request(PROMPTS[20], 24, sampling))
            drain(batch)
            texts.append(batch.tokens(0).tolist())
    assert texts[0] == texts[1] == texts[2] and len(set(texts[0][20:])) > 5


def test_a_state_that_is_nan_ends_its_sequence_alone(pairs, expected):
    with torch.no_grad(), Batch(engine_of(*pairs(KIND)), 2, TREES["dynamic"], 90) as batch:
        batch.admit_all([Request(PROMPTS[20], 24), Request(PROMPTS[3], 24)])
        batch.step()
        delta_cache(batch).states[:, 0] = float("nan")
        ends = {}
        while batch.running:
            ends |= {row.slot: row.finished for row in batch.step() if row.finished}
        assert ends[0] == "error" and torch.equal(batch.tokens(1).cpu(), expected(KIND, 3, 24))
        batch.admit(Request(PROMPTS[20], 24))
        drain(batch)
        assert torch.equal(batch.tokens(0).cpu(), expected(KIND, 20, 24))


@pytest.mark.versions
@pytest.mark.parametrize("draft", [None, "mtp", "suffix"])
def test_generate_of_a_patched_model_is_its_own(pairs, expected, draft):
    model, head = pairs("qwen3_next")
    own, prompt = vars(model).get("generate"), PROMPTS[20][None].to(DEVICE)
    with optimize_with_triton(model, head if draft == "mtp" else draft) as (patched, originals):
        out = patched.generate(prompt, max_new_tokens=24, do_sample=False)
        row = generate_row(originals)
        assert (row.calls, row.fallbacks) == (1, 0)
    assert torch.equal(out[0].cpu(), expected("qwen3_next", 20, 24)) and vars(model).get("generate") is own


def test_in_16_bits_the_report_still_says_that_recurrent_layers_reuse_nothing():
    """And not that prefixes=True would."""
    model = tiny_hybrid(KIND, VOCAB).to(DEVICE, torch.bfloat16)
    with optimize_with_triton(model)[1] as originals:
        model.generate(PROMPTS[3][None].to(DEVICE), max_new_tokens=2, do_sample=False)
        (entry,) = [entry for entry in originals.report() if entry.path == "prefixes"]
    assert entry.reason == "computed again: recurrent layers keep no state inside a prompt"


@pytest.mark.versions
def test_generate_gives_rows_takes_embeddings_and_leaves_what_states_cannot_skip(pairs):
    model, _ = pairs("qwen3_next")
    prompt = PROMPTS[20][None].to(DEVICE)
    holes = torch.ones_like(prompt)
    holes[0, 3] = 0
    embeddings = model.get_input_embeddings()(prompt).detach()
    rows = dict(return_dict_in_generate=True, output_logits=True, max_new_tokens=24)
    want = model.generate(prompt, **rows)
    with optimize_with_triton(model, "suffix")[1] as originals:
        for arguments in (dict(inputs=prompt), dict(inputs_embeds=embeddings)):
            got = model.generate(**arguments, **rows)
            assert torch.equal(got.sequences[:, -24:], want.sequences[:, -24:])
            torch.testing.assert_close(torch.cat(got.logits), torch.cat(want.logits), atol=1e-3, rtol=1e-3)
        assert generate_row(originals).fallbacks == 0
        reasons = {"holes": dict(attention_mask=holes), "chunk": dict(prefill_chunk_size=8)}
        if Version(transformers.__version__) < Version("5.24"):
            reasons.pop("chunk")  # which older ones cannot do themselves for this family
        for reason, arguments in reasons.items():
            model.generate(prompt, max_new_tokens=2, **arguments)
            assert reason in generate_row(originals).reason


@pytest.mark.versions
@pytest.mark.parametrize("eagle3", [True, False], ids=["eagle3", "eagle1"])
def test_eagle_heads_draft_for_recurrent_targets(pairs, expected, eagle3):
    model, _ = pairs(KIND)
    layers = dict(feature_layers=(1, 2, 3), draft_vocab_size=VOCAB // 2) if eagle3 else {}
    torch.manual_seed(4)
    head = (Eagle3Head if eagle3 else Eagle1Head)(DraftConfig(64, 96, 4, VOCAB, num_key_value_heads=2, **layers))
    config = EAGLEConfig(topk=3, num_steps=3, num_draft_tokens=12, fallback=False)
    eagle = EAGLEInference(head.to(DEVICE), model, config)
    found, results = eagle.generate(PROMPTS[20][None].to(DEVICE), max_new_tokens=64)
    assert torch.equal(found[0].cpu(), expected(KIND, 20, 64))
    assert results["total_accepted_tokens"] > 0


@pytest.mark.versions
def test_what_cannot_be_is_refused_by_name(pairs):
    model, head = pairs(KIND)
    view = read_causal_lm(model)
    with pytest.raises(UnsupportedModelError, match="layers \\[0, 1, 2\\] are recurrent"):
        draft_from_causal_lm(model, view, lambda: PLAIN)
    with (
        pytest.raises(ValueError, match="at most 64 nodes"),
        Batch(engine_of(model, head), 1, TreeSpec.dynamic(70, 3, 8), 90),
    ):
        pass
    with pytest.raises(ValueError, match="num_draft_tokens: over recurrent layers a tree must have at most 64 nodes"):
        EAGLEInference(head, model, EAGLEConfig(topk=8, num_steps=4, num_draft_tokens=70))
    with pytest.raises(ValueError, match="num_draft_tokens: .* at most 64 nodes"):
        optimize_with_triton(model, head, topk=8, num_steps=4, num_draft_tokens=70)
    net = model.model.layers[1].linear_attn
    for name, value, message in (
        ("activation", "gelu", "activation must be silu, got 'gelu'"),
        ("num_v_heads", 3, "must be a multiple of num_k_heads"),
        ("num_v_heads", 8, "in_proj_qkvz? must have (256|384) rows, got (192|256)"),
    ):
        before = getattr(net, name)
        try:
            setattr(net, name, value)
            with pytest.raises(UnsupportedModelError, match=message):
                read_causal_lm(model)
        finally:
            setattr(net, name, before)
    assert read_causal_lm(model).layers[1].mixer.conv.data_ptr() == net.conv1d.weight.data_ptr()


@pytest.mark.versions
def test_a_replaced_gate_is_found_by_the_next_call(pairs):
    model, head = pairs(KIND)
    eagle, net = EAGLEInference(head, model, EAGLEConfig(fallback=False)), model.model.layers[0].linear_attn
    own = net.A_log
    try:
        net.A_log = torch.nn.Parameter(own.detach().clone())
        with pytest.raises(RuntimeError, match="layers.0.linear_attn.A_log was replaced"):
            eagle.generate(PROMPTS[3][None], 2)
    finally:
        net.A_log = own


@PACKED
def test_who_pauses_for_room_reads_its_state_again(pairs, expected, packed):
    lengths, new = (64, 64, 65, 20), 70  # two are equal, and one is copied from the other
    engine = engine_of(*pairs(KIND), packed=packed)
    engine.cache_tokens = 7 * PAGE_ROWS
    engine.clear()
    requests = [Request(PROMPTS[length], new) for length in lengths]
    got: dict[int, list[int]] = {}
    with Batch(engine, 4, TREES["dynamic"], 140) as batch:
        batch.enter_all(requests)
        while batch.running:
            for row in batch.step():
                got.setdefault(row.slot, PROMPTS[lengths[row.slot]].tolist()).extend(row.tokens)
    assert [got[slot] for slot in range(4)] == [expected(KIND, length, new).tolist() for length in lengths]
    assert engine.ops.calls["requests_paused"] > 0
