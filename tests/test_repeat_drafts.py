"""Drafts from text that occurred before, in the engine: alone, in one tree with a head's, behind a head's chain."""

import itertools
from collections import deque

import pytest
import torch

from eagle_triton import optimize_eagle_with_triton
from eagle_triton.engine.drafts.hybrid import ContinuedDraft, HybridDraft
from eagle_triton.engine.drafts.repeats import NgramSource, OutputRing, RepeatDraft, SuffixSource
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.graph import StepGraph
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.families import own_ea_model as native
from eagle_triton.operands.suffix_match import END, SuffixRules
from tests.tiny import random_prompt, tiny_model

VOCABULARY = 8  # so few tokens that greedy decoding soon repeats itself
PROMPTS = [random_prompt(length, vocab=VOCABULARY)[0] for length in (1, 9, 30, 9)]
LIMITS = [30, 20, 40, 20]


@pytest.fixture(scope="module")
def model():
    return tiny_model(layers=3, vocab=VOCABULARY, seed=3, total_token=12, depth=3, top_k=3)


def make(kind, head, device):
    """A draft of each kind."""
    ring = OutputRing(300, torch.device(device))
    return {
        "suffix": lambda: RepeatDraft(SuffixSource(6, ring=ring)),
        "suffix tree": lambda: RepeatDraft(SuffixSource(6, SuffixRules(min_match=2, use_tree_spec=True), ring)),
        "ngram": lambda: RepeatDraft(NgramSource(4)),
        "hybrid": lambda: HybridDraft(model_draft=head, source=SuffixSource(6, ring=ring)),
        "hybrid ngram": lambda: HybridDraft(model_draft=head, source=NgramSource(5, match="latest")),
        "continued": lambda: ContinuedDraft(model_draft=head, source=NgramSource(3), chain=2),
    }[kind]()


KINDS = ("suffix", "suffix tree", "ngram", "hybrid", "hybrid ngram", "continued")


def decode(engine, prompts, spec, limits, slots=2, sampling=None):
    """All prompts through a few slots; the sequences and, of each step, what each accepted."""
    waiting = deque(enumerate(zip(prompts, limits, strict=True)))
    rows, steps, running = {}, [], {}
    longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    with Batch(engine, slots, spec, longest) as batch:
        while waiting or running:
            while waiting and batch.free:
                index, (prompt, limit) = waiting.popleft()
                running[batch.admit(Request(prompt, limit, sampling or SamplingParams()))] = index
            progress = batch.step()
            steps += [row.accepted for row in progress]
            for row in progress:
                if row.finished:
                    rows[running.pop(row.slot)] = batch.tokens(row.slot)
    return [rows[index] for index in range(len(prompts))], steps


@pytest.fixture(scope="module")
def plain_rows(model):
    """What the target says alone."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    view, head = native.read(model.to(device))
    engine = Engine(view, make("hybrid", head, device), make_operations(device == "cuda"))
    return decode(engine, [prompt.to(device) for prompt in PROMPTS], PLAIN, LIMITS)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_the_targets_own(model, plain_rows, device, kind):
    view, head = native.read(model.to(device))
    cuda = device == "cuda"
    engine = Engine(view, make(kind, head, device), make_operations(cuda), cuda_graph=cuda)
    prompts, spec = [prompt.to(device) for prompt in PROMPTS], engine.draft.read_tree()
    rows, accepted = decode(engine, prompts, spec, LIMITS, slots=3)
    assert all(torch.equal(row, plain) for row, plain in zip(rows, plain_rows, strict=True))
    assert sum(accepted) > len(accepted) / 3, "little was accepted: the test shows little"
    if cuda:
        assert engine.steps._kept and all(isinstance(step, StepGraph) for step in engine.steps._kept.values()), (
            engine.notes
        )


def test_outputs_of_former_requests_are_drafted(model):
    """The second time the ring holds the whole answer, which the sequences themselves do not repeat."""
    view, head = native.read(model.cpu())
    prompt = random_prompt(20, vocab=VOCABULARY)[0]
    sampling = SamplingParams(temperature=5.0, seed=7)  # nearly uniform: no repetition of its own
    for spec, draft in (
        (TreeSpec.repeats(8), RepeatDraft(SuffixSource(8, ring=OutputRing(500, torch.device("cpu"))))),
        (None, HybridDraft(model_draft=head, source=SuffixSource(8, ring=OutputRing(500, torch.device("cpu"))))),
    ):
        engine = Engine(view, draft, make_operations())
        first, cold = decode(engine, [prompt], spec or draft.read_tree(), [40], 1, sampling)
        again, warm = decode(engine, [prompt], spec or draft.read_tree(), [40], 1, sampling)
        assert torch.equal(first[0], again[0])
        assert len(draft.source.ring) == 2 and len(warm) < 0.7 * len(cold)


def test_requests_that_are_dropped_are_remembered_and_those_of_plain_batches_are_not(model):
    view, _ = native.read(model.cpu())
    ring = OutputRing(500, torch.device("cpu"))
    engine = Engine(view, RepeatDraft(SuffixSource(4, ring=ring)), make_operations())
    with Batch(engine, 1, TreeSpec.repeats(4), 60) as batch:
        slot = batch.admit(Request(PROMPTS[1], 40))
        batch.step()
        batch.step()
        said = batch.tokens(slot)[len(PROMPTS[1]) :].tolist()
        batch.release(slot)
        assert len(ring) == 1 and ring.tensors.tokens[: len(said) + 1].tolist() == [*said, END]
    with Batch(engine, 1, PLAIN, 60, drafts=False) as batch:
        batch.admit(Request(PROMPTS[1], 20))
        while batch.running:
            batch.step()
    assert len(ring) == 1


def test_a_hybrid_is_no_worse_than_either_alone_and_shares_what_both_propose(model):
    """Over many prompts, in steps; and no tree of it holds a node twice."""
    view, head = native.read(model.cpu())
    prompts = [random_prompt(length, vocab=VOCABULARY, seed=length)[0] for length in range(3, 8)]
    limits = [40] * len(prompts)
    draft = HybridDraft(model_draft=head, source=SuffixSource(6))
    engine = Engine(view, draft, make_operations())
    both = draft.read_tree()
    steps = {}
    for name, spec in (("both", both), ("head", head.read_tree()), ("suffix", TreeSpec(7, 0, (), grafts=6))):
        steps[name] = len(decode(engine, prompts, spec, limits)[1])
    assert steps["both"] < min(steps["head"], steps["suffix"])
    assert int(draft.counts.sum()) > 0
    with Batch(engine, 1, both, 100) as batch:
        batch.admit(Request(prompts[-1], 60))
        grafted = 0
        while batch.running:
            tree = batch.state.tree
            tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
            nodes = list(zip(tokens, parents, strict=True))[1:]
            assert len(set(nodes)) == len(nodes) and min(tokens) >= 0
            grafted += int(tree.depths.max()) > both.beam_levels
            batch.step()
    assert grafted, "no suffix was longer than the head's drafts"


def test_trees_may_change_while_requests_run(model):
    """Both, the head alone, repetition alone, plain: the text is the same, and all draft when their turn comes."""
    view, head = native.read(model.cpu())
    engine = Engine(view, HybridDraft(model_draft=head, source=SuffixSource(6)), make_operations())
    both = engine.draft.read_tree()
    specs = [both, head.read_tree(), TreeSpec(7, 0, (), grafts=6), PLAIN, both.with_grafts(4)]
    (want,), _ = decode(engine, [PROMPTS[2]], PLAIN, [90], 1)
    accepted = dict.fromkeys(specs, 0)
    with Batch(engine, 1, both, len(PROMPTS[2]) + 90) as batch:
        batch.admit(Request(PROMPTS[2], 90))
        for spec in itertools.cycle(specs):
            batch.spec = spec
            for row in (row for _ in range(2) if batch.running for row in batch.step()):
                accepted[spec] += row.accepted
            if not batch.running:
                break
        assert torch.equal(batch.tokens(0), want)
    assert all(count for spec, count in accepted.items() if spec.drafts), accepted


@pytest.mark.parametrize("most", [None, 1, 3])
def test_a_ring_holds_the_latest_outputs_whole(most):
    generator = torch.Generator().manual_seed(0)
    ring = OutputRing(60, torch.device("cpu"), most)
    pointers = [tensor.data_ptr() for tensor in ring.tensors]
    said: list[list[int]] = []
    for number in range(1000):
        count = int(torch.randint(0, 90 if number % 50 == 0 else 25, (1,), generator=generator))
        output = torch.randint(0, 9, (count,), generator=generator)
        before = ring.tensors.tokens.clone()
        ring.append(output)
        if not count:
            assert torch.equal(before, ring.tensors.tokens)
            continue
        said.append(output[-59:].tolist())
        stored = ring.tensors.tokens.roll(-int(ring.tensors.head)).tolist()  # oldest first
        assert stored[-1] == END
        texts, text = [], []
        for token in stored:
            if token == END:
                texts += [text] if text else []
                text = []
            else:
                text.append(token)
        assert texts == said[len(said) - len(texts) :] and len(ring) == len(texts)
        assert texts[-1] == said[-1] and len(texts) <= (most or 60)
        if most is None:  # an output was forgotten only where its place was needed
            assert sum(len(text) + 1 for text in said[-len(texts) - 1 :]) + 60 // 2 > 60 or len(texts) == len(said)
    assert [tensor.data_ptr() for tensor in ring.tensors] == pointers
    ring.clear()
    assert len(ring) == 0 and set(ring.tensors.tokens.tolist()) == {END}


@pytest.mark.parametrize(
    "tokens, most, message",
    [(0, None, "for 2 to"), (-5, None, "for 2 to"), (1 << 25, None, "for 2 to"), (9, 0, "one output")],
)
def test_a_ring_without_room_is_refused(tokens, most, message):
    with pytest.raises(ValueError, match=message):
        OutputRing(tokens, torch.device("cpu"), most)


def test_a_thousand_requests_go_through_a_small_ring(model, device):
    """It wraps many times while others run: the text stays the target's own, and nothing grows."""
    view, _ = native.read(model.to(device))
    ring, cuda = OutputRing(40, torch.device(device), 5), device == "cuda"
    engine = Engine(view, RepeatDraft(SuffixSource(4, ring=ring)), make_operations(cuda), cuda_graph=cuda)
    pointers = [tensor.data_ptr() for tensor in ring.tensors]
    count = 1000 if device == "cuda" else 40
    prompts = [random_prompt(1 + index % 7, vocab=VOCABULARY, seed=index % 13)[0].to(device) for index in range(count)]
    limits = [3 + index % 5 for index in range(count)]
    rows, accepted = decode(engine, prompts, TreeSpec.repeats(4), limits, slots=8)
    plain: dict = {}
    for prompt, limit, row in zip(prompts, limits, rows, strict=True):
        key = (*prompt.tolist(), -limit)
        if key not in plain:
            plain[key] = decode(engine, [prompt], PLAIN, [limit], 1)[0][0]
        assert torch.equal(row, plain[key])
    assert sum(accepted) > count / 2 and len(ring) <= 5
    assert [tensor.data_ptr() for tensor in ring.tensors] == pointers


@pytest.mark.parametrize(
    "broken, message",
    [
        (lambda: SuffixSource(0), "places must be at least 1"),
        (lambda: SuffixSource(3, SuffixRules(max_tree_depth=65)), "max_tree_depth must be at most 64 in the engine"),
        (lambda: SuffixSource(3, SuffixRules(banned=tuple(range(17)))), "at most 16 tokens can be banned"),
        (lambda: NgramSource(0), "places must be at least 1"),
        (lambda: NgramSource(3, max_ngram=2, min_ngram=3), "1 <= min_ngram <= max_ngram"),
        (lambda: NgramSource(3, match="rightmost"), "match must be one of leftmost, latest"),
        (lambda: TreeSpec.fixed([[0]]).with_grafts(3), "suffix_drafts must be 0 with tree_choices"),
        (lambda: TreeSpec(20, 2, (2,), grafts=4), "needs 19 candidates"),
    ],
)
def test_what_makes_no_sense_is_refused(broken, message):
    with pytest.raises(ValueError, match=message):
        broken()


def test_an_optimised_ea_model_drafts_from_both():
    """`generate` stops exactly, so its tokens are the same; the trees accept more, and the model comes back."""
    model = tiny_model(layers=3, vocab=VOCABULARY, seed=3, total_token=12, depth=3, top_k=3)
    prompt, before = PROMPTS[2][None], set(vars(model))
    steps = {}
    for drafts in (0, 6):
        with optimize_eagle_with_triton(model, suffix_drafts=drafts) as (_, originals):
            tokens = model.generate(prompt, max_new_tokens=60)
            whole = model.eagenerate(prompt, max_new_tokens=40)  # keeps the step that reaches the limit
            assert torch.equal(whole[:, :70], tokens[:, :70])
            steps[drafts] = tokens, len(model.accept_lengths)
            assert model.ea_layer.topK_genrate is not None and not originals.restored
    assert torch.equal(steps[0][0], steps[6][0]) and steps[6][1] < steps[0][1]
    assert set(vars(model)) == before
    with pytest.raises(ValueError, match="suffix_drafts must be 0 with tree_choices"):
        optimize_eagle_with_triton(tiny_model(eagle3=False, tree_choices=[[0], [1], [0, 0]]), suffix_drafts=6)
    assert set(vars(model)) == before
