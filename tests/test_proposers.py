"""Methods of drafting by configuration: what each becomes, that the text is the target's own, and what is refused."""

import pytest
import torch

from eagle_triton import EAGLEConfig, EAGLEInference
from eagle_triton.engine.drafts.beams import BeamDraft
from eagle_triton.engine.drafts.counted import CountedDraft
from eagle_triton.engine.drafts.hybrid import ContinuedDraft, HybridDraft
from eagle_triton.engine.drafts.repeats import NgramSource, RepeatDraft, SuffixSource
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.inference import SpeculativeConfig, create_proposer
from tests.tiny import random_prompt, tiny_model

VOCABULARY = 8  # so few tokens that greedy decoding soon repeats itself
PROMPTS = [random_prompt(length, vocab=VOCABULARY)[0] for length in (9, 1, 30)]
LIMITS = [20, 25, 15]
METHODS = {
    "naive": {},
    "ngram": {"num_speculative_tokens": 4},
    "suffix": {"num_speculative_tokens": 7},
    "nasd": {"num_speculative_tokens": 4, "ngram_n": 4},
    "hybrid": {"num_speculative_tokens": 4, "num_model_steps": 2},
    "eagle": {"num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab=VOCABULARY, seed=1, total_token=12, depth=3, top_k=3)


@pytest.fixture(scope="module")
def plain(model):
    return [model.generate(p[None], max_new_tokens=n)[0] for p, n in zip(PROMPTS, LIMITS, strict=True)]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_targets_own_text(model, plain, method):
    """Of three requests, so that one enters a slot that another has left."""
    options = SpeculativeConfig(method=method, **METHODS[method])
    eagle = EAGLEInference(None, model, EAGLEConfig(speculative=options, slots=2, fallback=False))
    rows, stats = eagle.generate(PROMPTS, LIMITS, stop_token_ids=())
    assert all(torch.equal(row, want) for row, want in zip(rows, plain, strict=True))
    if method == "naive":
        tokens = sum(LIMITS) - len(LIMITS)  # the first ones take no step
        assert stats.proposed == 0 and stats.steps == tokens
        return
    assert stats.accepted > 0 and stats.proposed < options.num_speculative_tokens * stats.steps + 1
    for completion in stats.completions:
        metrics = completion.statistics.request_metrics(options.num_speculative_tokens)
        heads = metrics.accepted_tokens_per_head
        assert len(heads) == options.num_speculative_tokens and sorted(heads, reverse=True) == heads
        assert sum(heads) == metrics.accepted_tokens


def test_places_where_nothing_was_found_are_no_proposals(model):
    eagle = EAGLEInference(None, model, SpeculativeConfig(method="suffix", num_speculative_tokens=7))
    _, stats = eagle.generate([torch.arange(VOCABULARY)], 2)  # nothing has occurred twice
    assert stats.proposed == 0 and stats.plain_steps == stats.steps


def test_256_slots(model, plain):
    prompts = [PROMPTS[index % 3] for index in range(300)]
    options = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    eagle = EAGLEInference(None, model, EAGLEConfig(speculative=options, slots=256, fallback=False))
    rows, stats = eagle.generate(prompts, 6, stop_token_ids=())
    for index, row in enumerate(rows):
        assert torch.equal(row, plain[index % 3][: len(row)]) and len(row) == len(prompts[index]) + 6
    assert stats.accepted > 0


def test_a_target_of_its_own_needs_no_head(model, plain):
    for config in (SpeculativeConfig(method="suffix", num_speculative_tokens=6), EAGLEConfig(suffix_drafts=6)):
        eagle = EAGLEInference(None, model.base_model, config)
        assert isinstance(eagle.pair.draft, RepeatDraft)
        (row,), stats = eagle.generate(PROMPTS[:1], LIMITS[0], stop_token_ids=())
        assert torch.equal(row, plain[0]) and stats.accepted


def test_a_head_and_repetition_in_one_tree(model, plain):
    eagle = EAGLEInference(None, model, EAGLEConfig(suffix_drafts=6, topk=3, num_steps=3, num_draft_tokens=12))
    draft, policy = eagle.pair.draft, eagle.policy(3)
    assert isinstance(draft, HybridDraft) and isinstance(draft.source, SuffixSource)
    head = eagle.config.tree()
    assert policy.trees == (head.with_grafts(6), head, TreeSpec.repeats(6))
    for _ in range(4):
        rows, stats = eagle.generate(PROMPTS, LIMITS, stop_token_ids=())
        assert all(torch.equal(row, want) for row, want in zip(rows, plain, strict=True)) and stats.accepted
    assert set(policy._seen) > {policy.trees[0]}, "another source was never tried"
    scores, ids, _ = eagle.draft_step(PROMPTS[0][None])  # the head's own
    assert scores.shape == ids.shape == (1, 3)


def test_what_a_configuration_becomes(model):
    def proposer(**options):
        return create_proposer(SpeculativeConfig(**options), model)

    assert proposer(method="naive") is None and proposer() is None
    draft = proposer(
        method="suffix", num_speculative_tokens=9, suffix_decoding_max_tree_depth=20, ban_tokens=[5, 3],
        suffix_decoding_max_spec_factor=2.0, suffix_decoding_min_token_prob=0.3, suffix_decoding_max_cached_requests=7,
    )  # fmt: skip
    rules = draft.source.rules
    assert (draft.source.places, draft.source.ring.most_outputs) == (9, 7)
    assert (rules.max_tree_depth, rules.max_spec_factor, rules.min_token_prob, rules.banned) == (20, 2.0, 0.3, (3, 5))
    assert proposer(method="suffix", suffix_decoding_max_cached_requests=0).source.ring is None
    assert proposer(method="suffix").source.ring.most_outputs is None
    source = proposer(method="ngram_match", num_speculative_tokens=5, max_ngram_size=4, match="latest").source
    assert isinstance(source, NgramSource)
    assert (source.places, source.max_ngram, source.min_ngram, source.match) == (5, 4, 1, "latest")
    chain = proposer(method="hybrid", num_speculative_tokens=5, num_model_steps=2, min_ngram_size=3)
    assert isinstance(chain, ContinuedDraft) and (chain.chain, chain.source.places, chain.source.min_ngram) == (2, 3, 3)
    assert chain.read_tree().depth == 5
    assert isinstance(proposer(method="hybrid", num_speculative_tokens=2, num_model_steps=2), BeamDraft)
    assert isinstance(proposer(method="eagle"), BeamDraft)
    with pytest.raises(TypeError, match="must be a SpeculativeConfig"):
        create_proposer("suffix", model)


@pytest.mark.parametrize("strategy", ["greedy", "target_match", "rejection", "topp"])
def test_verification_is_that_of_the_configuration(model, strategy):
    options = SpeculativeConfig(method="suffix", num_speculative_tokens=5, verify_strategy=strategy)
    eagle = EAGLEInference(None, model, options)
    assert eagle.config.verification.verify_strategy == strategy
    _, stats = eagle.generate(PROMPTS, 9, temperature=1.0, seed=1)
    assert stats.lossless == (strategy not in ("topp", "greedy"))
    assert eagle.generate(PROMPTS, 9)[1].lossless


@pytest.mark.parametrize(
    "draft, options, error, message",
    [
        (None, dict(speculative=SpeculativeConfig("mtp")), ValueError, "multi-token-prediction"),
        (
            None,
            dict(speculative=SpeculativeConfig("suffix"), topk=7),
            ValueError,
            "topk=7 must be left out: speculative",
        ),
        (
            None,
            dict(speculative=SpeculativeConfig(), suffix_drafts=7),
            ValueError,
            "suffix_drafts=7 must be left out",
        ),
        (None, dict(speculative="suffix"), TypeError, "speculative must be a SpeculativeConfig"),
        (None, dict(suffix_ring=-2), ValueError, "suffix_ring must be 0, or 2 to"),
        (None, dict(suffix_ring=100), ValueError, "suffix_ring=100 is only read with suffix_drafts or method suffix"),
        ("base", dict(suffix_drafts=5, topk=2), ValueError, "topk: no draft model is given"),
        (
            None,
            dict(speculative=SpeculativeConfig("suffix", suffix_decoding_max_cached_requests=5), suffix_ring=0),
            ValueError,
            "suffix_decoding_max_cached_requests=5 needs a suffix_ring",
        ),
        (None, dict(speculative=SpeculativeConfig("suffix", ban_tokens=[8])), ValueError, "tokens must lie in"),
        (None, dict(speculative=SpeculativeConfig("draft_model")), ValueError, "does not draft with Eagle3"),
        ("base", dict(speculative=SpeculativeConfig("draft_model", model="no such place")), OSError, "no such place"),
        ("base", dict(speculative=SpeculativeConfig("eagle")), ValueError, "the target has no head, so give"),
        (RepeatDraft(NgramSource(3)), dict(suffix_drafts=3), ValueError, "suffix_drafts needs a draft that scores"),
    ],
)
def test_what_contradicts_is_refused_before_anything_is_lost(model, draft, options, error, message):
    target = model.base_model if draft == "base" else model
    with pytest.raises(error, match=message):
        EAGLEInference(None if draft == "base" else draft, target, EAGLEConfig(**options))
    assert not [name for name in vars(target) if "eagle_triton" in name]


def test_both_come_first_and_stay_without_fallback(model):
    options = dict(suffix_drafts=6, topk=3, num_steps=3, num_draft_tokens=12)
    both = EAGLEConfig(topk=3, num_steps=3, num_draft_tokens=12).tree().with_grafts(6)
    assert EAGLEInference(None, model, EAGLEConfig(**options)).policy(1).spec == both
    eagle = EAGLEInference(None, model, EAGLEConfig(**options, fallback=False))
    for _ in range(3):
        infos = []
        eagle.generate(PROMPTS, LIMITS, stop_token_ids=(), on_step=infos.append)
        assert [info.nodes == 0 for info in infos] == [True] + [False] * (len(infos) - 1)  # first tokens
        assert {info.nodes for info in infos[1:]} == {both.nodes}


def test_outputs_are_forgotten_when_that_is_asked_for(model):
    eagle = EAGLEInference(None, model.base_model, EAGLEConfig(suffix_drafts=6, fallback=False))
    cold = eagle.generate(PROMPTS, LIMITS, stop_token_ids=())[1].tau
    warm = eagle.generate(PROMPTS, LIMITS, stop_token_ids=())[1].tau
    eagle.forget_outputs()
    assert eagle.generate(PROMPTS, LIMITS, stop_token_ids=())[1].tau == cold < warm
    figures = [eagle.benchmark(PROMPTS, LIMITS, stop_token_ids=()).tau for _ in range(2)]
    assert figures == [cold, cold]


def test_positions_are_those_of_drafts_that_were_there(model):
    config = EAGLEConfig(topk=4, num_steps=1, num_draft_tokens=5, suffix_drafts=6, fallback=False)
    _, stats = EAGLEInference(None, model, config).generate([torch.arange(VOCABULARY)], 2)
    assert [row["position"] for row in stats.positions] == [1]


def test_what_is_made_in_inference_mode_decodes_outside_it(model, plain):
    with torch.inference_mode():
        eagle = EAGLEInference(None, model, EAGLEConfig(suffix_drafts=6))
    (row,), _ = eagle.generate(PROMPTS[:1], LIMITS[0], stop_token_ids=())
    assert torch.equal(row, plain[0])


def test_an_empty_place_runs_no_token_of_its_own():
    """A row that no text comes by may be broken."""
    model = tiny_model(vocab=16, seed=3).base_model
    model.model.embed_tokens.weight.data[0] = float("nan")
    config = EAGLEConfig(suffix_drafts=5, fallback=False)
    want = EAGLEInference(None, model, SpeculativeConfig("naive")).generate([[1, 2, 3]], 6, logit_bias={0: -100.0})[0]
    got = EAGLEInference(None, model, config).generate([[1, 2, 3]], 6, logit_bias={0: -100.0})[0]
    assert torch.equal(got[0], want[0])


def test_memory_and_slots_are_those_of_the_configuration(model):
    plain = model.base_model
    logits = [
        EAGLEInference(None, plain, EAGLEConfig(suffix_drafts=drafts)).memory_bytes(2, 100)["logits"]
        for drafts in (1, 15, 63)
    ]
    assert [size // logits[0] for size in logits] == [1, 8, 32]
    with pytest.raises(ValueError, match="slots must lie in 1..256, got 300"):
        EAGLEInference(None, model, SpeculativeConfig("ngram")).session(rows=10, slots=300)
    assert "RepeatDraft; method suffix" in repr(EAGLEInference(None, plain, SpeculativeConfig("suffix")))


@pytest.mark.parametrize(
    ("name", "places", "target"),
    [("suffix", 15, "demo"), ("suffix", 15, "EaModel"), ("ngram", 5, "EaModel"), ("ngram", 5, "plain")],
)
def test_drafts_from_repetition_by_their_names(name, places, target, model):
    """As for optimize_with_triton: without a head, be it that the target has one."""
    eagle = EAGLEInference(name, {"demo": "demo", "EaModel": model, "plain": model.base_model}[target], device="cpu")
    draft = eagle.pair.draft
    assert isinstance(draft, RepeatDraft) and draft.source.places == places
    assert isinstance(draft.source, NgramSource if name == "ngram" else SuffixSource)
    assert [tree.nodes for tree in eagle._trees()] == [1 + places]
    assert f"num_draft_tokens {1 + places}," in repr(eagle)
    (out,), stats = eagle.generate([[1, 2, 3] * 6], 16)
    (want,), _ = EAGLEInference(None, eagle.pair.target_model, SpeculativeConfig("naive")).generate([[1, 2, 3] * 6], 16)
    assert torch.equal(out, want) and stats["total_draft_tokens"]


def test_named_drafts_take_the_options_that_they_read(model):
    plain = model.base_model
    eagle = EAGLEInference("suffix", plain, EAGLEConfig(suffix_drafts=4, suffix_ring=100))
    assert eagle.pair.draft.source.places == 4 and len(eagle.pair.draft.source.ring.tensors.tokens) == 100
    for name, config, message in (
        ("suffix", SpeculativeConfig("eagle"), r'draft_model="suffix" and speculative \(method eagle\) both'),
        ("ngram", SpeculativeConfig("suffix"), r'draft_model="ngram" and speculative \(method suffix\) both'),
        ("ngram", EAGLEConfig(suffix_drafts=4), 'draft_model="ngram" cannot be combined with suffix_drafts=4'),
        ("ngram", EAGLEConfig(topk=2), "topk: RepeatDraft drafts its own tree only"),
        ("suffix", EAGLEConfig(num_draft_tokens="auto"), "num_draft_tokens: no draft model is given"),
    ):
        with pytest.raises(ValueError, match=message):
            EAGLEInference(name, plain, config)


def test_options_of_a_tree_are_refused_where_the_draft_grows_its_own(model):
    tree = EAGLEConfig(topk=3, num_steps=4, num_draft_tokens=20)
    message = "topk, num_steps, num_draft_tokens: {} drafts its own tree only"
    for draft in (RepeatDraft(NgramSource(5)), CountedDraft(4)):
        with pytest.raises(ValueError, match=message.format(type(draft).__name__)):
            EAGLEInference(draft, model, tree)
        with pytest.raises(ValueError, match="num_draft_tokens: "):
            EAGLEInference(draft, model, EAGLEConfig(num_draft_tokens=None))
        own = draft.read_tree().nodes
        eagle = EAGLEInference(draft, model)
        assert [tree.nodes for tree in eagle._trees()] == [own] and f"num_draft_tokens {own}," in repr(eagle)
    assert "num_draft_tokens 20," in repr(EAGLEInference(None, model, tree))


def test_a_draft_goes_with_its_own_configuration(model):
    config = SpeculativeConfig("eagle", num_speculative_tokens=2)
    eagle = EAGLEInference(create_proposer(config, model), model, config)
    assert eagle.policy(1).trees == (TreeSpec.chain(2),)
    config = SpeculativeConfig("suffix", num_speculative_tokens=4, verify_strategy="greedy")
    eagle = EAGLEInference(create_proposer(config, model), model, config)
    assert eagle.policy(1).trees == (TreeSpec.repeats(4),) and eagle.config.verification.verify_strategy == "greedy"


def test_a_heads_proposer_drafts_for_the_plain_target_too():
    """Which is read with the layers that the head sees."""
    model, options = tiny_model(), SpeculativeConfig(method="eagle", num_speculative_tokens=3)
    prompt, answers = random_prompt(9)[0], []
    for target in (model, model.base_model):
        draft = create_proposer(options, model)
        inference = EAGLEInference(draft, target, EAGLEConfig(speculative=options, fallback=False))
        answers.append(inference.generate([prompt], 8)[0][0].tolist())
    assert answers[0] == answers[1]
