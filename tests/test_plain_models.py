"""optimize_with_triton on plain Hugging Face models: patched against unpatched, fallbacks by name, restore."""

import contextlib
import functools
import gc
import itertools
import math
import re
import warnings
import weakref

import pytest
import torch
import transformers
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation import logits_process as library

from eagle_triton import (
    EaModel,
    PatchError,
    TritonConfig,
    UnsupportedModelError,
    optimize_eagle_with_triton,
    optimize_with_triton,
    restore,
    restore_eagle,
)
from eagle_triton.families.hf_generate import options as honoured
from eagle_triton.models.target import cache_argument
from tests.test_causal_lm import DEVICE, causal_lm
from tests.test_drafts import RepeatDraft
from tests.tiny import FAMILIES, generate_row, random_prompt, tiny_model

pytestmark = pytest.mark.versions
VOCAB = 16
EOS, PAD = [3, 7], 0
BATCH = torch.cat([2 + random_prompt(11, vocab=VOCAB - 2, seed=seed) for seed in range(4)]).to(DEVICE)  # no padding
PROMPT = BATCH[:1]
EMBEDDINGS = torch.randn(4, 11, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
LEFT = torch.ones_like(BATCH)  # rows of 11, 6, 1 and 11 tokens
LEFT[1, :5] = LEFT[2, :10] = 0
PADDED = {"input_ids": BATCH * LEFT, "attention_mask": LEFT}
HOLES = LEFT.clone()  # and some tokens between others that nothing sees
HOLES[0, 3] = HOLES[1, 7:9] = HOLES[3, 0] = HOLES[3, 4] = 0
ENDS = {"eos_token_id": EOS, "pad_token_id": PAD}
LAST = torch.tensor([-1], device=DEVICE)


@pytest.fixture(scope="module")
def models():
    """One tiny model of each family, with few tokens, so that end tokens come soon."""
    options = {"mistral": {"sliding_window": 20}}
    return {family: causal_lm(family, vocab=VOCAB, layers=2, **options.get(family, {})) for family in FAMILIES}


@pytest.fixture(scope="module")
def wanted(models):
    """`wanted(family, name)`: what the original says to a call of GREEDY, once for all tests."""
    return functools.cache(lambda family, name: models[family].generate(**GREEDY[name]))


@pytest.fixture
def model(models):
    return models["llama"]


GREEDY = {
    "max_new_tokens": dict(inputs=PROMPT, max_new_tokens=20),
    "by keyword": dict(input_ids=PROMPT, max_new_tokens=5),
    "max_length": dict(inputs=PROMPT, max_length=18),
    "default length": dict(inputs=PROMPT),
    "one token": dict(inputs=PROMPT, max_new_tokens=1),
    "begin token": dict(bos_token_id=2, max_new_tokens=6),
    "integers of 32 bits": dict(inputs=PROMPT.int(), max_new_tokens=6),
    "end token": dict(inputs=PROMPT, max_new_tokens=40, eos_token_id=5, pad_token_id=1),
    "end tokens": dict(inputs=PROMPT, max_new_tokens=40, **ENDS),
    "end token as padding": dict(inputs=BATCH, max_new_tokens=40, eos_token_id=3),
    "batch": dict(inputs=BATCH, max_new_tokens=12),
    "batch, end tokens": dict(inputs=BATCH, max_new_tokens=40, **ENDS),
    "mask of ones": dict(inputs=BATCH, attention_mask=torch.ones_like(BATCH), max_new_tokens=7),
    "boolean mask": dict(inputs=BATCH, attention_mask=LEFT.bool(), max_new_tokens=7, pad_token_id=PAD),
    "left padding": dict(**PADDED, max_new_tokens=14, pad_token_id=PAD),
    "left padding, end tokens": dict(**PADDED, max_new_tokens=30, **ENDS),
    "left padding, max_length": dict(**PADDED, max_length=20, pad_token_id=PAD),
    "padding found by its token": dict(inputs=BATCH * LEFT + 1 - LEFT, pad_token_id=1),
    "min_new_tokens": dict(inputs=BATCH, max_new_tokens=30, min_new_tokens=9, **ENDS),
    "min_length": dict(inputs=BATCH, max_length=40, min_length=17, **ENDS),
    "min_length in a padded batch": dict(**PADDED, max_length=40, min_length=17, **ENDS),
    "minimum below the prompt's length": dict(inputs=BATCH, max_new_tokens=20, min_length=3, **ENDS),
    "minimum of the prompt's length": dict(inputs=BATCH, max_new_tokens=20, min_length=11, **ENDS),
    "minimum, an end token beyond the vocabulary": dict(
        inputs=PROMPT, max_new_tokens=30, min_new_tokens=9, eos_token_id=[3, 99], pad_token_id=PAD
    ),
    "end tokens in rows": dict(
        inputs=PROMPT, max_new_tokens=30, min_new_tokens=2, eos_token_id=[[3], [7]], pad_token_id=PAD
    ),
    "holes": dict(inputs=BATCH, attention_mask=HOLES, max_new_tokens=7, **ENDS),
    "logits_to_keep": dict(inputs=PROMPT, max_new_tokens=7, logits_to_keep=3),
    "static cache": dict(**PADDED, max_new_tokens=14, pad_token_id=PAD, cache_implementation="static"),
    "no cache": dict(**PADDED, max_new_tokens=14, pad_token_id=PAD, use_cache=False),
    "embeddings": dict(inputs_embeds=EMBEDDINGS, max_new_tokens=14, **ENDS),
    "embeddings, padded": dict(inputs_embeds=EMBEDDINGS, attention_mask=LEFT, max_length=25, min_length=16, **ENDS),
    "embeddings beside ids": dict(
        inputs_embeds=EMBEDDINGS, input_ids=BATCH, max_new_tokens=14, repetition_penalty=1.3, **ENDS
    ),
    "remove_invalid_values": dict(inputs=BATCH, max_new_tokens=14, remove_invalid_values=True, **ENDS),
    "longer minimum than maximum": dict(inputs=PROMPT, max_new_tokens=6, min_new_tokens=9, **ENDS),
    "minimum without an end": dict(inputs=PROMPT, max_new_tokens=6, min_new_tokens=4),
    "repetition_penalty": dict(inputs=BATCH, max_new_tokens=15, repetition_penalty=1.6),
    "reward for repetition": dict(inputs=BATCH, max_new_tokens=15, repetition_penalty=0.7),
    "penalty and minimum": dict(
        inputs=BATCH, max_new_tokens=25, repetition_penalty=1.3, min_new_tokens=8, **ENDS
    ),
    "suppress_tokens": dict(inputs=BATCH, max_new_tokens=15, suppress_tokens=[1, 2, 9, 99]),
    "suppressed and penalised": dict(
        inputs=BATCH, max_new_tokens=15, suppress_tokens=[1, 2], repetition_penalty=1.3
    ),
    "bad words of one token": dict(inputs=BATCH, max_new_tokens=15, bad_words_ids=[[4], [11], [3]], **ENDS),
    "bad words, bias": dict(
        inputs=BATCH, max_new_tokens=15, bad_words_ids=[[4]], sequence_bias={(4,): 3.0, (2,): -1.5, (6,): 2.0}
    ),
    "an end token beyond the vocabulary": dict(
        inputs=BATCH, max_new_tokens=9, min_new_tokens=3, repetition_penalty=1.3, eos_token_id=[3, 99], pad_token_id=PAD
    ),
    "renormalize_logits": dict(inputs=PROMPT, max_new_tokens=15, renormalize_logits=True),
    "a configuration": dict(
        inputs=PROMPT, generation_config=GenerationConfig(max_new_tokens=9, repetition_penalty=1.4)
    ),
    "early_stopping without beams": dict(inputs=PROMPT, max_new_tokens=9, length_penalty=2.0),
    "dynamic cache": dict(inputs=PROMPT, max_new_tokens=9, use_cache=True, cache_implementation="dynamic"),
    "sampling options, not sampled": dict(inputs=PROMPT, max_new_tokens=9, temperature=0.3, top_k=4, top_p=0.3),
    "top_k of 1": dict(inputs=BATCH, max_new_tokens=9, do_sample=True, top_k=1),
    "no time": dict(inputs=PROMPT, max_new_tokens=9, max_time=0.0),
    "nothing said in many words": dict(
        inputs=PROMPT, max_new_tokens=9, logits_processor=[], stopping_criteria=[], streamer=None, num_beams=1,
        no_repeat_ngram_size=0, typical_p=1.0, guidance_scale=1.0, synced_gpus=False, prefix_allowed_tokens_fn=None,
    ),
}  # fmt: skip

POSITIONS = (
    dict(**PADDED, position_ids=(LEFT.cumsum(1) - 1).clamp(min=0), max_new_tokens=7, pad_token_id=PAD),
    dict(inputs=PROMPT, position_ids=torch.arange(11, device=DEVICE)[None], max_new_tokens=7),
    dict(**PADDED, max_new_tokens=7, pad_token_id=PAD, prefill_chunk_size=4),
)


SOME = ("max_new_tokens", "left padding, end tokens", "penalty and minimum", "min_length in a padded batch")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_for_all_combinations_of_options(models, wanted, family):
    """Of one family; what options do does not depend on the layers."""
    model = models[family]
    want = {name: wanted(family, name) for name in (GREEDY if family == "llama" else SOME)}
    before = dict(vars(model))
    with optimize_with_triton(model) as (same, originals):
        assert same is model and isinstance(originals["generate"].__self__, type(model))
        for name, tokens in want.items():
            got = model.generate(**GREEDY[name])
            assert torch.equal(got, tokens), name
            assert got.dtype == tokens.dtype and got.device == tokens.device, name
            assert generate_row(originals).fallbacks == 0, (name, generate_row(originals).reason)
        if honoured.CARRIES_POSITIONS and family in ("llama", "mistral"):
            for arguments in POSITIONS:
                assert torch.equal(model.generate(**arguments), GenerationMixin.generate(model, **arguments))
                assert generate_row(originals).fallbacks == 0
    assert vars(model) == before
    assert len({tensor.shape[1] for tensor in want.values()}) >= 3, "the lengths differ in nothing"


class Record:
    """A streamer that remembers what it was given."""

    def __init__(self):
        self.given = []

    def put(self, value):
        self.given.append(value.tolist())

    def end(self):
        self.given.append("end")


class Recorder(StoppingCriteria):
    """Remembers what it sees and stops rows whose sum of tokens is divisible."""

    def __init__(self, divisor: int = 10**9):
        self.divisor, self.seen = divisor, []

    def __call__(self, input_ids, scores, **kwargs):
        assert scores is None
        self.seen.append(input_ids.tolist())
        return input_ids.sum(1) % self.divisor == 0


@functools.cache
def another_model():
    return causal_lm("qwen3", vocab=VOCAB, layers=1, hidden=32, seed=5)


def draft_of(kind: str, model):
    """A draft for a model, and options."""
    return {
        "plain": lambda: (None, {}),
        "itself": lambda: (model, dict(topk=1, num_steps=3, num_draft_tokens=4)),
        "another model": lambda: (another_model(), {}),
        "one of one's own": lambda: (RepeatDraft(3), {}),
        "suffix": lambda: ("suffix", {}),
        "ngram": lambda: ("ngram", {}),
        "both": lambda: (another_model(), dict(suffix_drafts=6, topk=3)),
    }[kind]()


STOPPED = {
    "length": dict(inputs=PROMPT, max_new_tokens=20),
    "end": dict(inputs=PROMPT, max_new_tokens=40, **ENDS),
    "padded": dict(**PADDED, max_new_tokens=40, **ENDS),
    "padded, minimum": dict(**PADDED, max_new_tokens=40, min_new_tokens=6, **ENDS),
    "padded, no end": dict(**PADDED, max_new_tokens=12, pad_token_id=PAD),
}


# When rows stop is asked in the same way whatever drafts, so one kind stops at all three.
@pytest.mark.parametrize(
    ("divisor", "kinds"), [(1, ["itself"]), (7, ["itself", "plain", "another model"]), (10**9, ["itself"])], ids=str
)
def test_criteria_see_what_the_original_shows_them(model, divisor, kinds):
    def run(options):
        recorder = Recorder(divisor)
        return model.generate(**options, stopping_criteria=StoppingCriteriaList([recorder])), recorder.seen

    want = {name: run(options) for name, options in STOPPED.items()}
    for kind in kinds:
        draft, more = draft_of(kind, model)
        with optimize_with_triton(model, draft, **more)[1] as originals:
            for name, (tokens, seen) in want.items():
                got, ours = run(STOPPED[name])
                assert torch.equal(got, tokens), (kind, name)
                assert ours == seen and len(seen) == got.shape[1] - 11, (kind, name)
            assert generate_row(originals).fallbacks == 0


def test_numbers_that_only_transformers_takes(model):
    for name in ("temperature", "repetition_penalty"):
        options = dict(max_new_tokens=9, do_sample=True, **{name: float("inf")})
        torch.manual_seed(0)
        want = model.generate(PROMPT, **options)
        with optimize_with_triton(model):
            torch.manual_seed(0)
            assert torch.equal(model.generate(PROMPT, **options), want)


def test_streamers_get_what_the_original_puts(model):
    for options in (dict(max_new_tokens=9), dict(max_new_tokens=40, **ENDS), dict(max_length=14, max_time=60.0)):
        want = model.generate(PROMPT, streamer=(theirs := Record()), **options)
        for draft, more in (draft_of("plain", model), draft_of("itself", model)):
            with optimize_with_triton(model, draft, **more)[1] as originals:
                assert torch.equal(model.generate(PROMPT, streamer=(ours := Record()), **options), want)
                model.generate(PROMPT, streamer=(chosen := Record()), no_repeat_ngram_size=30, **options)
                model.generate(PROMPT, streamer=(fallen := Record()), logits_to_keep=LAST, **options)
                assert (generate_row(originals).calls, generate_row(originals).fallbacks) == (2, 1)
            assert ours.given == theirs.given == chosen.given == fallen.given and ours.given[-1] == "end"


def test_the_prompt_is_put_once_where_the_original_takes_over_late(model):
    """Only what `generate` has prepared shows where the mask has its zeros."""
    theirs, ours = Record(), Record()
    options = dict(max_new_tokens=5, attention_mask=torch.tensor([[1] * 9 + [0, 0]], device=DEVICE))
    model.generate(PROMPT, streamer=theirs, **options)
    with optimize_with_triton(model) as optimised:
        model.generate(PROMPT, streamer=ours, **options)
        assert generate_row(optimised.originals).reason == "attention_mask with padding on the right"
        assert "attention_mask with padding on the right" in str(optimised), "it prints its report"
    assert ours.given == theirs.given


def test_criteria_of_the_library_that_a_caller_brings(model):
    for criteria in ([MaxLengthCriteria(15)], [EosTokenCriteria([3, 9])], [MaxLengthCriteria(9)]):
        options = dict(inputs=BATCH, max_new_tokens=25, stopping_criteria=StoppingCriteriaList(criteria), **ENDS)
        want = model.generate(**options)
        with optimize_with_triton(model)[1] as originals:
            assert torch.equal(model.generate(**options), want)
            assert generate_row(originals).fallbacks == 0


def test_stop_strings_and_text_streamers_of_the_demo():
    ea_model = EaModel.from_pretrained("demo").to(DEVICE)
    model, tokenizer = ea_model.base_model, ea_model.tokenizer
    inputs = tokenizer('def read_lines(path):\n    """', return_tensors="pt").to(DEVICE)
    options = dict(max_new_tokens=24, stop_strings=["list", "zzz"], tokenizer=tokenizer)
    want = model.generate(**inputs, **options)
    with optimize_with_triton(model, ea_model)[1] as originals:
        got = model.generate(**inputs, **options)
        streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)
        whole = model.generate(**inputs, max_new_tokens=24, streamer=streamer)
        assert generate_row(originals).fallbacks == 0
    assert torch.equal(got, want) and tokenizer.decode(got[0]).count("list") == 1
    assert "".join(streamer) == tokenizer.decode(whole[0, inputs.input_ids.shape[1] :])


# --- drafts ---


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("llama", kind) for kind in ("itself", "another model", "one of one's own", "suffix", "ngram")),
        *(("mistral", kind) for kind in ("itself", "both")),  # with a window
    ],
)
def test_drafts_change_no_token(models, wanted, engines, family, kind):
    model = models[family]
    draft, options = draft_of(kind, model)
    want = {name: wanted(family, name) for name in SOME}
    with optimize_with_triton(model, draft, **options)[1] as originals:
        for name in SOME:
            assert torch.equal(model.generate(**GREEDY[name]), want[name]), name
        model.generate(PROMPT, max_new_tokens=60)
        accepted = engines[0].accept_lengths
        assert generate_row(originals).fallbacks == 0
    assert set(accepted) == {3} if kind == "itself" else sum(accepted) > 0


def test_drafts_follow_prompts_of_embeddings(model, engines):
    embeddings = model.get_input_embeddings()(PROMPT).detach()
    want = model.generate(PROMPT, max_new_tokens=60)
    for kind in ("itself", "suffix"):
        draft, more = draft_of(kind, model)
        with optimize_with_triton(model, draft, **more)[1] as originals:
            beside = model.generate(input_ids=PROMPT, inputs_embeds=embeddings, max_new_tokens=60)
            accepted = engines[-1].accept_lengths
            behind = model.generate(inputs_embeds=embeddings, max_new_tokens=60)
            assert generate_row(originals).fallbacks == 0
        assert torch.equal(beside, want) and torch.equal(behind, want[:, 11:])
        assert set(accepted) == {3} if kind == "itself" else sum(accepted) > 0


@pytest.mark.parametrize("eagle3", [True, False], ids=["eagle3", "eagle1"])
def test_a_head_drafts_its_own_tree_or_the_one_that_is_asked_for(engines, eagle3):
    ea_model = tiny_model(eagle3=eagle3, vocab=8, seed=1, total_token=8, depth=3, top_k=2).to(DEVICE)
    model, prompt = ea_model.base_model, 1 + random_prompt(20, vocab=7).to(DEVICE)
    want = model.generate(prompt, max_new_tokens=30)
    ea_model.generate(prompt, max_new_tokens=30)
    lengths = {}
    for name, draft, options in (
        ("head", ea_model.ea_layer, {}),
        ("EaModel", ea_model, {}),
        ("chain", ea_model.ea_layer, dict(topk=1, num_steps=2)),
    ):
        with optimize_with_triton(model, draft, **options):
            assert torch.equal(model.generate(prompt, max_new_tokens=30), want)
        lengths[name] = engines[-1].accept_lengths
    count = len(lengths["head"])
    assert lengths["head"] == lengths["EaModel"] == ea_model.accept_lengths[:count] and sum(lengths["head"]) > 0
    assert max(lengths["chain"]) <= 2


def test_drafts_and_trees_that_do_not_go_are_refused(model):
    for draft, options, error, message in (
        ("other", {}, ValueError, "draft must be suffix, ngram, mtp, the directory or hub id"),
        ("suffix", dict(topk=2), ValueError, "need a draft model, got draft='suffix'"),
        ("ngram", dict(suffix_drafts=3), ValueError, "cannot be combined with suffix_drafts=3"),
        (None, dict(suffix_drafts=64), ValueError, "suffix_drafts must lie in 0..63, got 64"),
        (None, dict(suffix_drafts=True), TypeError, "suffix_drafts must be an integer"),
        (None, dict(verify_strategy="best"), ValueError, "verify_strategy"),
        (RepeatDraft(2), dict(suffix_drafts=3), ValueError, "suffix_drafts needs a draft that scores candidates"),
        (3, {}, TypeError, "draft must be None, a head, a model, a Draft or a name, got int"),
        (None, dict(topk=2), ValueError, "topk, num_steps and num_draft_tokens need a draft model"),
        (None, dict(num_steps=10**6), ValueError, r"num_steps must lie in 1\.\.1024, got 1000000"),
        (RepeatDraft(2), dict(num_steps=2), ValueError, "RepeatDraft drafts its own tree only"),
        (causal_lm(vocab=VOCAB + 1), {}, UnsupportedModelError, "draft and the target do not fit: vocabulary 17"),
        (torch.nn.Linear(2, 2), {}, UnsupportedModelError, "draft must be a causal language model"),
        (model, dict(topk=17), ValueError, "topk .* must be at most"),
        (model, dict(num_draft_tokens=9, topk=2, num_steps=1), ValueError, "must be in 2..3 for topk 2"),
        (model, dict(num_draft_tokens="auto"), TypeError, "num_draft_tokens must be an integer or None, got 'auto'"),
        (model, dict(num_draft_tokens=1), ValueError, "num_draft_tokens must be at least 2, got 1"),
        ("/no/such/place", {}, FileNotFoundError, "draft: '/no/such/place' does not exist"),
        (None, dict(strict=None), TypeError, "strict must be True or False, got None"),
        (None, dict(patch_modules=True), ValueError, "unknown option patch_modules; the options are verify_strategy"),
        (None, dict(megakernel=True, kernels=False), ValueError, "megakernel=True needs a GPU and kernels"),
    ):
        with pytest.raises(error, match=message):
            optimize_with_triton(model, draft, **options)
    with pytest.raises(TypeError, match="config must be a TritonConfig, got dict"):
        optimize_with_triton(model, None, {})
    assert "generate" not in vars(model)


# --- scores and logits ---

ROWS = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
RULES = dict(repetition_penalty=1.3, bad_words_ids=[[4]], min_new_tokens=8)


def same_rows(got, want) -> None:
    """Tokens equal, and of each step's scores and logits shape, dtype and numbers."""
    assert torch.equal(got.sequences, want.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(got, name), getattr(want, name)
        assert (ours is None) == (theirs is None)
        for mine, other in zip(ours or (), theirs or (), strict=True):
            assert mine.dtype == other.dtype and mine.device == other.device
            torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-4)


def test_scores_and_logits_are_those_of_the_original(model, engines):
    """Also behind the end of a row whose neighbours go on, which the original feeds padding."""
    options = {
        "one": dict(inputs=PROMPT, max_new_tokens=20, **ROWS),
        "padded, ends": dict(**PADDED, max_new_tokens=30, **ENDS, **ROWS),
        "rules": dict(inputs=BATCH, max_new_tokens=20, **ENDS, **RULES, **ROWS),
        "criteria": dict(**PADDED, max_new_tokens=20, max_time=60.0, **ENDS, **ROWS),
        "scores alone": dict(inputs=PROMPT, max_new_tokens=5, return_dict_in_generate=True, output_scores=True),
        "embeddings": dict(inputs_embeds=EMBEDDINGS, attention_mask=LEFT, max_new_tokens=30, **ENDS, **ROWS),
        "no dictionary": dict(inputs=PROMPT, max_new_tokens=5, output_scores=True, output_logits=True),
    }
    want = {name: model.generate(**arguments) for name, arguments in options.items()}
    for kind in ("plain", "itself", "another model"):
        draft, more = draft_of(kind, model)
        with optimize_with_triton(model, draft, **more)[1] as originals:
            for name, arguments in options.items():
                got = model.generate(**arguments)
                if name == "one":
                    accepted = engines[-1].accept_lengths
                if isinstance(got, torch.Tensor):
                    assert torch.equal(got, want[name])
                else:
                    same_rows(got, want[name])
            assert generate_row(originals).fallbacks == 0
        assert len(accepted) == 19 if kind == "plain" else sum(accepted) > 0  # the first token takes no step
    new = want["padded, ends"].sequences[:, 11:]
    assert (new == PAD).any() and (new[:, -1] != PAD).any(), "all rows end at once: the test shows little"


@pytest.mark.parametrize("kind", ["plain", "itself"])
def test_rows_of_sampled_tokens_are_those_that_these_were_drawn_from(model, kind):
    draft, more = draft_of(kind, model)
    rules = dict(temperature=1.5, top_k=5, bad_words_ids=[[4]], min_new_tokens=8)
    options = dict(**PADDED, do_sample=True, max_new_tokens=30, **rules, **ENDS, **ROWS)
    with optimize_with_triton(model, draft, **more)[1] as originals:
        torch.manual_seed(0)
        got = model.generate(**options)
        assert generate_row(originals).fallbacks == 0
    new = got.sequences[:, 11:]
    assert (new == PAD).any() and len(got.logits) == len(got.scores) == new.shape[1]
    mask = torch.nn.functional.pad(LEFT, (0, new.shape[1]), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(got.sequences, attention_mask=mask, position_ids=positions).logits[:, 10:-1]
    torch.testing.assert_close(torch.stack(got.logits, 1), logits, atol=2e-4, rtol=1e-4)
    ends = (new == EOS[0]) | (new == EOS[1])
    alive = ends.cumsum(1) - ends.long() == 0
    chosen = torch.stack(got.scores, 1).gather(2, new[:, :, None])[:, :, 0]
    assert chosen[alive].isfinite().all() and ((torch.stack(got.scores, 1).isfinite().sum(2) == 5)[alive]).all()


@pytest.mark.parametrize("value, reason", [(math.nan, "NaN"), (3e38, "infinite")])
def test_invalid_values_are_removed_by_the_original(value, reason):
    model = causal_lm(vocab=VOCAB, layers=1)
    model.lm_head.weight.data[5] = 0
    model.lm_head.weight.data[5, 0] = value
    model.model.norm.weight.data[0] = 100.0
    options = dict(inputs=PROMPT, max_new_tokens=5, remove_invalid_values=True)
    want = model.generate(**options)
    with optimize_with_triton(model)[1] as originals:
        assert torch.equal(model.generate(**options), want)
        assert generate_row(originals).reason == f"remove_invalid_values of {reason} logits"


# --- sampling ---

SAMPLED = {
    "temperature": dict(temperature=1.5),
    "filters": dict(temperature=1.3, top_k=4, top_p=0.85, min_p=0.05),
    "minimum": dict(temperature=1.7, min_new_tokens=2, eos_token_id=[1], pad_token_id=0),
    "penalty, suppressed": dict(temperature=1.2, repetition_penalty=1.5, suppress_tokens=[4]),
}
THREE = torch.tensor([[1, 3, 2]], device=DEVICE)


@pytest.fixture(scope="module")
def small():
    model = causal_lm(vocab=5, layers=2, seed=3)
    model.lm_head.weight.data.mul_(2.5)
    return model


@pytest.fixture(scope="module")
def laws(small):
    return functools.cache(lambda name: law(small, THREE, **SAMPLED[name]))


def law(model, prompt, **options) -> dict[tuple[int, ...], float]:
    """The distribution of up to three tokens after `prompt` [1, L], by the library's own scores, token by token."""
    exact, end = {}, options.get("eos_token_id", [])
    least = prompt.shape[1] + options.pop("min_new_tokens", 0)

    def visit(tokens: tuple[int, ...], mass: float) -> None:
        if len(tokens) == 3 or (tokens and tokens[-1] in end):
            exact[tokens] = mass
            return
        ids = torch.cat((prompt, prompt.new_tensor([tokens])), dim=1).long()
        more = dict(options, max_new_tokens=1, min_new_tokens=max(least - ids.shape[1], 0) or None)
        more |= dict(attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_scores=True)
        (scores,) = GenerationMixin.generate(model, ids, do_sample=True, **more).scores
        for token, probability in enumerate(scores[0].softmax(-1).tolist()):
            if probability:
                visit((*tokens, token), mass * probability)

    visit((), 1.0)
    return exact


@pytest.mark.slow
@pytest.mark.parametrize(("name", "draft"), [*((name, True) for name in SAMPLED), ("filters", False)])
def test_sampled_tokens_follow_the_originals_law(small, laws, name, draft):
    prompt, options, count = THREE, SAMPLED[name], 1500
    exact = laws(name)
    assert abs(sum(exact.values()) - 1) < 1e-4 and sum(mass > 0.005 for mass in exact.values()) >= 4
    tree = dict(topk=2, num_steps=2, num_draft_tokens=4)
    drafter = causal_lm("qwen2", vocab=5, layers=1, hidden=32, seed=4) if draft else None
    torch.manual_seed(0)
    with optimize_with_triton(small, drafter, **(tree if draft else {}))[1] as originals:
        rows = small.generate(
            prompt, max_new_tokens=3, do_sample=True, num_return_sequences=count, **{"top_k": 0, **options}
        )
        assert generate_row(originals).fallbacks == 0
    counts = dict.fromkeys(exact, 0)
    for row in rows[:, 3:].tolist():
        ends = [index + 1 for index, token in enumerate(row) if token in options.get("eos_token_id", [])]
        counts[tuple(row[: min(ends, default=3)])] += 1  # a KeyError: what the law forbids
    distance = 0.5 * sum(abs(counts[tokens] / count - mass) for tokens, mass in exact.items())
    noise = 0.5 * sum(math.sqrt(2 * mass / (math.pi * count)) for mass in exact.values())
    assert distance < 1.6 * noise


def test_sampling_is_repeatable_by_torchs_seed_and_takes_the_checkpoints_defaults(models):
    model = models["qwen2"]
    kept = model.generation_config
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.8, top_p=0.95, top_k=0, **ENDS)
    try:
        with optimize_with_triton(model)[1] as originals:
            drawn = []
            for seed in (0, 0, 1):
                torch.manual_seed(seed)
                drawn.append(model.generate(PROMPT, max_new_tokens=30, num_return_sequences=5))
            greedy = model.generate(PROMPT, max_new_tokens=30, do_sample=False)
            assert generate_row(originals).fallbacks == 0
        assert torch.equal(greedy, model.generate(PROMPT, max_new_tokens=30, do_sample=False))
    finally:
        model.generation_config = kept
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    new = drawn[0][:, 11:]
    ended = (new == EOS[0]) | (new == EOS[1])
    behind = ended.cumsum(1) - ended.long() > 0
    assert behind.any() and (new[behind] == PAD).all(), "a row goes on behind its end"


# --- tokens chosen on the host ---

PADDED_ROWS = dict(inputs=BATCH, attention_mask=LEFT, pad_token_id=PAD, eos_token_id=EOS)
ON_HOST = {
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=2),
    "encoder_repetition_penalty": dict(encoder_repetition_penalty=1.5),
    "encoder_no_repeat_ngram_size": dict(encoder_no_repeat_ngram_size=3),
    "typical_p": dict(do_sample=True, typical_p=0.5),
    "epsilon_cutoff": dict(do_sample=True, epsilon_cutoff=0.01),
    "eta_cutoff": dict(do_sample=True, eta_cutoff=0.01),
    "top_p of nothing": dict(do_sample=True, top_p=0.0),
    "begin_suppress_tokens": dict(begin_suppress_tokens=[1]),
    "forced_bos_token_id": dict(forced_bos_token_id=4),
    "forced_eos_token_id": dict(forced_eos_token_id=4),
    "exponential_decay_length_penalty": dict(exponential_decay_length_penalty=(2, 1.5), **ENDS),
    "sequence_bias of two tokens": dict(sequence_bias={(1, 2): 2.0}),
    "bad_words_ids of two tokens": dict(bad_words_ids=[[1, 2]]),
    "a penalty behind a bias": dict(sequence_bias={(1,): 2.0}, repetition_penalty=1.2),
    "a penalty of masked tokens": dict(inputs=BATCH, attention_mask=HOLES, repetition_penalty=1.3),
    "a penalty of embeddings": dict(inputs=None, inputs_embeds=EMBEDDINGS, repetition_penalty=1.3),
    "a processor": dict(logits_processor=[lambda ids, scores: scores.roll(ids.shape[1], dims=-1)]),
    "a processor, sampled": dict(logits_processor=[lambda ids, scores: -scores], do_sample=True),
    "prefix_allowed_tokens_fn": dict(prefix_allowed_tokens_fn=lambda row, ids: [1 + row, 2 + len(ids) % 5]),
    "criteria of scores": dict(
        output_scores=True, return_dict_in_generate=True, stopping_criteria=[lambda ids, scores: len(scores) > 2]
    ),
    "invalid values": dict(
        remove_invalid_values=True, logits_processor=[lambda ids, scores: scores.masked_fill(scores < 0, math.nan)]
    ),
    "no token that is allowed": dict(suppress_tokens=[*range(VOCAB)]),
    "ends that differ": dict(**PADDED_ROWS, no_repeat_ngram_size=2),
    "rows": dict(**PADDED_ROWS, do_sample=True, typical_p=0.9, output_logits=True, return_dict_in_generate=True),
}  # fmt: skip
try:
    transformers.NoBadWordsLogitsProcessor([[]])(PROMPT, torch.zeros(1, VOCAB, device=PROMPT.device))
    ON_HOST["bad_words_ids of no token"] = dict(bad_words_ids=[[]])
except (ValueError, IndexError):  # versions before 5.24 raise for it
    pass


@pytest.mark.parametrize(("how", "draft"), [*((how, "suffix") for how in ON_HOST), ("rows", None)])
def test_tokens_that_are_chosen_on_the_host_are_the_originals(model, how, draft):
    """Sampled ones too: both draw the same random numbers."""
    options = {"inputs": PROMPT, "max_new_tokens": 14, **ON_HOST[how]}

    def run():
        torch.manual_seed(3)
        return model.generate(**options)

    want = run()
    with optimize_with_triton(model, draft, strict=True)[1] as originals:
        got = run()
        (chosen,) = (row.calls for row in originals.report() if row.path == "chosen_on_host")
        assert (generate_row(originals).calls, generate_row(originals).fallbacks) == (1, 0)
    if not isinstance(want, torch.Tensor):
        assert list(want) == list(got)
        for name in ("scores", "logits"):
            rows = [torch.stack(one[name]) for one in (got, want) if one.get(name) is not None]
            assert len(rows) in (0, 2)
            if rows:
                torch.testing.assert_close(*rows, atol=1e-4, rtol=1e-4)
        want, got = want.sequences, got.sequences
    assert torch.equal(got, want)
    length = 0 if options["inputs"] is None else options["inputs"].shape[1]
    assert chosen == (want.shape[1] - length) * len(want)


@pytest.mark.parametrize("forbids", [dict(suppress_tokens=[*range(VOCAB)]), dict(bad_words_ids=[[1], [2]])], ids=str)
def test_a_call_in_which_no_token_is_allowed_raises_as_the_original_does(model, forbids):
    if "bad_words_ids" in forbids:  # the end tokens are held back
        ends = [token for token in range(VOCAB) if token not in (1, 2)]
        forbids = dict(forbids, eos_token_id=ends, pad_token_id=PAD, min_new_tokens=2)
    with optimize_with_triton(model), pytest.raises(RuntimeError, match="probability tensor"):
        model.generate(PROMPT, do_sample=True, max_new_tokens=3, **forbids)


def test_processors_are_called_as_the_original_calls_them_while_drafts_are_accepted(model):
    """Once for each token, in order, with the tokens so far: one with a state of its own works."""
    calls: list[tuple[list[int], int]] = []

    class Counting:
        def __init__(self):
            self.count = 0

        def __call__(self, ids, scores):
            self.count += 1
            calls.append((ids[0].tolist(), self.count))
            scores[:, self.count % VOCAB] = -math.inf  # in place, as some do
            return scores

    class Streamed(list):
        put, end = (lambda self, value: self.append(value.tolist())), (lambda self: self.append("end"))

    def run():
        calls.clear()
        streamer = Streamed()
        tokens = model.generate(PROMPT, max_new_tokens=20, logits_processor=[Counting()], streamer=streamer, **ENDS)
        return tokens.tolist(), list(calls), list(streamer)

    want = run()
    with optimize_with_triton(model, model)[1] as originals:  # which drafts what it would choose without the processor
        assert run() == want
        counts = {row.path: row.calls for row in originals.report()}
        assert counts["drafts_accepted"] > 0 and generate_row(originals).fallbacks == 0


@functools.cache
def two_models():
    return [causal_lm(vocab=VOCAB, layers=2, seed=seed) for seed in (2, 5)]


BROUGHT = {  # by their classes known to the engine, but not in this order, with these arguments, or so often
    "temperature of a greedy call": dict(logits_processor=[library.TemperatureLogitsWarper(2.5)]),
    "two penalties": dict(
        logits_processor=[library.RepetitionPenaltyLogitsProcessor(p) for p in (1.3, 1.9)]
    ),
    "a filter's value": dict(logits_processor=[library.TopKLogitsWarper(1, filter_value=50.0)]),
    "a filter before a penalty": dict(
        logits_processor=[library.TopKLogitsWarper(3), library.RepetitionPenaltyLogitsProcessor(15.0)]
    ),
    "two least lengths": dict(
        logits_processor=[
            library.MinLengthLogitsProcessor(45, [3], device=DEVICE),
            library.MinNewTokensLengthLogitsProcessor(11, 2, [7], device=DEVICE),
        ],
        **ENDS,
    ),
    "a filter before the temperature": dict(
        logits_processor=[library.TopPLogitsWarper(0.5)], do_sample=True, temperature=3.0
    ),
    "tokens to keep": dict(logits_processor=[library.MinPLogitsWarper(0.9, min_tokens_to_keep=5)], do_sample=True),
    "numbers as criteria": dict(
        stopping_criteria=[lambda ids, _: torch.full((len(ids),), int(ids.shape[1] > 13), device=ids.device)]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("how", "inference_mode"), [*((how, False) for how in BROUGHT), ("two penalties", True)])
def test_processors_that_a_caller_brings_are_called_whatever_their_class(how, inference_mode):
    options = {"logits_processor": [lambda ids, scores: scores], **BROUGHT[how], "max_new_tokens": 24}
    for model in two_models():
        with torch.inference_mode(inference_mode):
            torch.manual_seed(0)
            want = model.generate(BATCH, **options)
            with optimize_with_triton(model, strict=True)[1]:
                torch.manual_seed(0)
                assert torch.equal(model.generate(BATCH, **options), want)


@pytest.mark.parametrize("name", ["_sample", "prepare_inputs_for_generation", "_has_unfinished_sequences"])
def test_methods_of_generation_that_a_class_replaces_run_or_are_refused(name, monkeypatch):
    model = causal_lm(vocab=VOCAB, layers=1)
    own, calls = getattr(type(model), name), []

    @functools.wraps(own)
    def noted(*args, **kwargs):
        calls.append(name)
        return own(*args, **kwargs)

    with optimize_with_triton(model)[1] as originals:
        with monkeypatch.context() as later:
            later.setattr(type(model), name, noted, raising=False)
            model.generate(PROMPT, max_new_tokens=2)
            assert calls and generate_row(originals).reason == f"model.{name}, which was replaced after optimising"
            later.setattr(type(model), "generate", noted, raising=False)
            with pytest.raises(RuntimeError, match=r"\.generate was replaced after optimising: restore the model"):
                model.generate(PROMPT, max_new_tokens=2)
        model.generate(PROMPT, max_new_tokens=2)
        assert generate_row(originals).calls == 1
    for owner in (type(model), type("Mine", (type(model),), {})):
        monkeypatch.setattr(owner, name, noted, raising=False)
        model.__class__ = owner
        with pytest.raises(UnsupportedModelError, match=rf"model\.{name} must be transformers' own"):
            optimize_with_triton(model)


def test_a_processor_may_call_the_model_and_generate_itself(model):
    def asks(ids, scores):
        assert not torch.is_grad_enabled()
        more = model.generate(ids, max_new_tokens=1, do_sample=False)[:, -1:]
        return scores.scatter_add(1, more, -model(ids).logits[:, -1].gather(1, more).abs())

    want = model.generate(PROMPT, max_new_tokens=6, logits_processor=[asks])
    with optimize_with_triton(model, "suffix")[1] as originals:
        assert torch.equal(model.generate(PROMPT, max_new_tokens=6, logits_processor=[asks]), want)
        row = generate_row(originals)
        assert row.calls == 1 and row.fallbacks == 6 and "of another call" in row.reason


def test_a_streamer_and_a_criterion_may_generate_too(model):
    answers = []

    class Asks(Record):
        def put(self, value):
            answers.append(model.generate(PROMPT, max_new_tokens=3))

    def asks(ids, scores, **kwargs):
        answers.append(model.generate(PROMPT, max_new_tokens=3))
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    want = model.generate(PROMPT, max_new_tokens=3)
    with optimize_with_triton(model, "suffix")[1] as originals:
        assert torch.equal(model.generate(PROMPT, max_new_tokens=3, streamer=Asks(), stopping_criteria=[asks]), want)
        row = generate_row(originals)
        assert (row.calls, row.fallbacks) == (1, 7) and "of another call" in row.reason
        assert len(answers) == 7 and all(torch.equal(answer, want) for answer in answers)
        assert torch.equal(model.generate(PROMPT, max_new_tokens=3), want) and generate_row(originals).calls == 2


@pytest.mark.parametrize("error", [ZeroDivisionError, StopIteration])
def test_a_processor_that_fails_leaves_the_model_usable(model, error):
    def fails(ids, scores):
        if ids.shape[1] > PROMPT.shape[1] + 2:
            raise error("of a processor")
        return scores

    want = model.generate(PROMPT, max_new_tokens=9)
    with optimize_with_triton(model, "suffix")[1] as originals:
        with pytest.raises(error, match="of a processor"):
            model.generate(PROMPT, max_new_tokens=9, logits_processor=[fails])
        assert torch.equal(model.generate(PROMPT, max_new_tokens=9), want)
        assert generate_row(originals).fallbacks == 0


def test_a_processor_that_edits_the_tokens_is_refused_by_name(model):
    def edits(ids, scores):
        ids[:, 0] = 1
        return scores

    prompt = PROMPT.clone()
    changed = pytest.raises(RuntimeError, match="a logits processor changed input_ids in place")
    with optimize_with_triton(model, "suffix"), changed:
        model.generate(prompt, max_new_tokens=9, logits_processor=[edits])


# --- drafts that a call asks for ---


@pytest.mark.parametrize("own", [None, "head"])
def test_a_call_may_bring_an_assistant_or_look_its_prompt_up(model, own):
    if own == "head":
        pair = tiny_model(vocab=VOCAB).to(DEVICE)
        model, head = pair.base_model, pair.ea_layer
    assistant = causal_lm(vocab=VOCAB, layers=1, seed=2)
    assistant.generation_config.num_assistant_tokens = 4
    rows = dict(max_new_tokens=14, output_logits=True, return_dict_in_generate=True)
    want = model.generate(PROMPT, **rows)
    with optimize_with_triton(model, head if own == "head" else own, strict=True)[1] as originals:
        for options in (
            dict(assistant_model=model),
            dict(assistant_model=assistant),
            dict(prompt_lookup_num_tokens=3),
            dict(prompt_lookup_num_tokens=3, max_matching_ngram_size=1),
            dict(assistant_model=assistant, logits_processor=[lambda ids, scores: scores]),
            {},
        ):
            got = model.generate(PROMPT, **rows, **options)
            assert torch.equal(got.sequences, want.sequences)
            torch.testing.assert_close(torch.cat(got.logits), torch.cat(want.logits), atol=1e-4, rtol=1e-4)
            if options.get("assistant_model") is model:  # which is always right, four or twenty at a time
                accepted = {row.path: row.calls for row in originals.report()}["drafts_accepted"]
                assert accepted > 7
        assert (generate_row(originals).calls, generate_row(originals).fallbacks) == (6, 0)
        hook = assistant.model.layers[0].register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match=r"assistant_model.*has a forward hook"):  # strict
            model.generate(PROMPT, assistant_model=assistant, max_new_tokens=3)
        hook.remove()
        assistant.lm_head.weight = torch.nn.Parameter(-assistant.lm_head.weight)  # which is read again
        assert torch.equal(model.generate(PROMPT, assistant_model=assistant, **rows).sequences, want.sequences)
        assert torch.equal(model.generate(PROMPT, **rows).sequences, want.sequences)
        kept = weakref.ref(assistant)
    del assistant, hook, options
    gc.collect()
    assert kept() is None


def test_assistants_that_only_the_original_knows_run_it_by_name(model):
    small, heuristic = causal_lm(vocab=VOCAB + 5, layers=1), causal_lm(vocab=VOCAB, layers=1)
    heuristic.generation_config.num_assistant_tokens_schedule = "heuristic"
    with optimize_with_triton(model)[1] as originals:
        for reason, options in (
            ("assistant_model: .*vocabulary", dict(assistant_model=small)),
            ("with use_cache=False", dict(prompt_lookup_num_tokens=2, use_cache=False)),
            ("with several rows", dict(prompt_lookup_num_tokens=2, num_return_sequences=2, do_sample=True)),
            ("with a streamer", dict(prompt_lookup_num_tokens=2, streamer=Record())),
            ("with stopping_criteria", dict(prompt_lookup_num_tokens=2, max_time=60.0)),
            ("with no valid number of tokens", dict(prompt_lookup_num_tokens=2, max_matching_ngram_size=-1)),
            ("num_assistant_tokens_schedule='heuristic'", dict(assistant_model=heuristic)),
        ):
            with contextlib.suppress(Exception):  # which the original may raise
                model.generate(PROMPT, max_new_tokens=3, **options)
            assert re.search(reason, generate_row(originals).reason), generate_row(originals).reason
        assert generate_row(originals).calls == 0


# --- the original ---

FORWARD = dict(max_new_tokens=5)
FALLBACKS = {
    "num_beams=2": dict(num_beams=2),
    "guidance_scale=1.5": dict(guidance_scale=1.5),
    "use_cache=None": dict(use_cache=None),
    "use_cache=0": dict(use_cache=0),
    "compile_config beside cache_implementation='static'": dict(
        compile_config=transformers.CompileConfig(), cache_implementation="static"
    ),
    "output_attentions=True": dict(output_attentions=True, return_dict_in_generate=True, eager=True),
    "output_hidden_states=True": dict(output_hidden_states=True, return_dict_in_generate=True),
    "position_ids": dict(position_ids=1 + torch.arange(11, device=DEVICE)[None]),
    "logits_to_keep": dict(logits_to_keep=LAST),
    "max_length=13.5": dict(max_new_tokens=2.5),
    "prefill_chunk_size of inputs_embeds": dict(
        inputs_embeds=EMBEDDINGS[:1], cache_implementation="dynamic", prefill_chunk_size=11
    ),
    "inputs_embeds beside input_ids of shape [1, 11]": dict(inputs_embeds=EMBEDDINGS[:1, :9]),
    "attention_mask with padding on the right": dict(
        attention_mask=torch.tensor([[1] * 9 + [0, 0]], device=DEVICE)
    ),
    "attention_mask with other values than 0 and 1": dict(
        attention_mask=torch.tensor([[2] * 11], device=DEVICE)
    ),
    "attention_mask of a row with nothing but padding": dict(
        attention_mask=torch.zeros(1, 11, dtype=torch.int64, device=DEVICE)
    ),
}  # fmt: skip
if not honoured.CARRIES_POSITIONS:  # then no prompt is read in chunks
    FALLBACKS["prefill_chunk_size=11"] = FALLBACKS.pop("prefill_chunk_size of inputs_embeds")


@pytest.mark.parametrize("reason", FALLBACKS)
def test_what_the_engine_does_not_do_runs_the_original_by_name(reason):
    options = {**FORWARD, **FALLBACKS[reason]}
    model = causal_lm(vocab=VOCAB, layers=1)
    if options.pop("eager", False):
        model.config._attn_implementation = "eager"

    def run():
        torch.manual_seed(0)
        result = model.generate(PROMPT, **options)
        return result if isinstance(result, torch.Tensor) else result.sequences

    want = run()
    with optimize_with_triton(model)[1] as originals:
        assert torch.equal(run(), want)
        row = generate_row(originals)
        assert (row.calls, row.fallbacks, row.reason) == (0, 1, reason)
    with optimize_with_triton(model, strict=True)[1] as originals:
        with pytest.raises(ValueError, match="needs the original, which strict=True forbids") as raised:
            run()
        assert str(raised.value).startswith(f"generate: {reason} ") and generate_row(originals).fallbacks == 0
        assert torch.equal(model.generate(PROMPT, **FORWARD), GenerationMixin.generate(model, PROMPT, **FORWARD))


def test_every_reason_is_named(model):
    mask = torch.tensor([[1] * 9 + [0, 0]], device=DEVICE)
    options = dict(inputs=PROMPT, attention_mask=mask, use_cache=None, max_new_tokens=4, guidance_scale=1.5)
    want = model.generate(**options, output_hidden_states=True)
    with optimize_with_triton(model)[1] as originals:
        assert torch.equal(model.generate(**options, output_hidden_states=True), want)
        named = generate_row(originals).reason
    reasons = "use_cache=None", "output_hidden_states=True", "attention_mask with padding on the right"
    assert all(named.count(reason) == 1 for reason in (*reasons, "guidance_scale=1.5")), named


@pytest.mark.skipif(not honoured.CARRIES_POSITIONS, reason="older versions of transformers know no paged cache")
def test_continuous_batching_is_the_originals(model):
    with (
        optimize_with_triton(model, strict=True)[1],
        pytest.raises(ValueError, match="generate: cache_.*'paged' needs the original"),
    ):
        model.generate(PROMPT, max_new_tokens=4, cache_implementation="paged")


def test_inputs_that_only_the_original_takes(model):
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(PROMPT[:, :5], **{cache_argument(model.forward): cache})
    want = model.generate(PROMPT, max_new_tokens=6)
    with optimize_with_triton(model)[1] as originals, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert torch.equal(model.generate(PROMPT, max_new_tokens=6, **{cache_argument(model.forward): cache}), want)
        assert len({str(warning.message) for warning in told}) == len(told), "the original's, once each"
        assert generate_row(originals).reason in ("past_key_values", "cache")  # which newer transformers call it
        assert generate_row(originals).calls == 0


def test_an_unknown_argument_is_refused_by_name(model):
    with optimize_with_triton(model)[1] as originals:
        for _ in range(2):
            with pytest.raises(ValueError, match="surprise"):
                model.generate(PROMPT, max_new_tokens=3, surprise=1)
        assert (generate_row(originals).calls, generate_row(originals).fallbacks) == (0, 0)


def test_a_penalty_counts_padding_only_where_the_original_does(model):
    """Older versions of transformers penalise the padding's token, newer ones do not."""
    options = dict(**PADDED, max_new_tokens=12, repetition_penalty=1.8, pad_token_id=PAD)
    want = model.generate(**options)
    with optimize_with_triton(model)[1] as originals:
        assert torch.equal(model.generate(**options), want)
        row = generate_row(originals)
        assert row.calls == 1 or row.reason == "repetition_penalty that counts padding"


def test_errors_are_those_of_the_original(model):
    with optimize_with_triton(model)[1] as originals:
        for arguments, error in (
            (dict(inputs=PROMPT, max_new=5), ValueError),
            (dict(inputs=PROMPT, max_length=4), ValueError),
            (dict(inputs=PROMPT, max_new_tokens=-1), ValueError),
            (dict(inputs=PROMPT, num_return_sequences=2), ValueError),
            (dict(inputs=PROMPT, do_sample=True, temperature=0.0), ValueError),
            (dict(), ValueError),
            (dict(inputs=PROMPT, stop_strings=["a"]), ValueError),
            (dict(inputs=PROMPT, attention_mask=torch.ones(1, 5, device=DEVICE), max_new_tokens=2), RuntimeError),
            (dict(inputs=PROMPT.float(), max_new_tokens=2), RuntimeError),
            (dict(inputs=PROMPT[:0], max_new_tokens=2), RuntimeError),
        ):
            with pytest.raises(error) as ours:
                model.generate(**arguments)
            with pytest.raises(error) as theirs:
                GenerationMixin.generate(model, **arguments)
            assert str(ours.value) == str(theirs.value)
        with pytest.raises(TypeError):
            model.generate(*range(20))
        assert generate_row(originals).calls == 0


def test_dropout_of_a_model_in_training_runs_the_original():
    model = causal_lm(vocab=VOCAB, layers=1, attention_dropout=0.3)
    with optimize_with_triton(model)[1] as originals:
        assert model.generate(PROMPT, max_new_tokens=4).shape == (1, 15)
        model.train()
        assert model.generate(PROMPT, max_new_tokens=4).shape == (1, 15)
        row = generate_row(originals)
    assert (row.calls, row.fallbacks, row.reason) == (1, 1, "attention_dropout of a model in training mode")


@pytest.mark.parametrize("config", [GenerationConfig(), GenerationConfig(max_new_tokens=3, do_sample=True)])
def test_every_field_of_a_generation_config_is_classified(config):
    """Fails when transformers adds a field: it belongs into one table of families/hf_generate/options.py."""
    tables = [set(honoured.HONOURED), set(honoured.NO_EFFECT), set(honoured.NEUTRAL)]
    fields = {name for name in vars(config) if not name.startswith("_")}
    assert fields <= set.union(*tables), fields - set.union(*tables)
    assert not any(one & other for one, other in itertools.combinations(tables, 2))


def test_a_field_of_a_newer_transformers_is_not_ignored(monkeypatch):
    monkeypatch.setattr(honoured, "NEUTRAL", {})
    config = GenerationConfig(token_healing=True)
    config.use_cache = None
    config.entry_of_ones_own = 3
    assert honoured.config_reasons(config) == ["token_healing=True", "use_cache=None"]
    config.token_healing = GenerationConfig().token_healing
    assert honoured.config_reasons(config) == ["use_cache=None"]


# --- results, restore, refusals ---


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_returned_cache_is_that_of_the_original(models, family):
    """In a dictionary, of the same class and shapes, with the same keys and values, so that one may go on from it."""
    positions = dict(position_ids=(HOLES.cumsum(1) - 1).clamp(min=0)) if honoured.CARRIES_POSITIONS else {}
    model, rows = models[family], dict(max_new_tokens=9, return_dict_in_generate=True, **ENDS)
    with optimize_with_triton(model)[1] as originals:
        for options in (
            dict(inputs=PROMPT),
            dict(inputs=BATCH, attention_mask=LEFT.bool()),
            dict(**PADDED, cache_implementation="static"),
            dict(inputs=BATCH, attention_mask=HOLES, **positions),
            dict(inputs_embeds=EMBEDDINGS, attention_mask=LEFT),
            dict(inputs=PROMPT, use_cache=False),
        ):
            want = GenerationMixin.generate(model, **options, **rows)
            got = model.generate(**options, **rows)
            assert type(got) is type(want) and list(got) == list(want)
            assert torch.equal(got.sequences, want.sequences)
            assert type(got.past_key_values) is type(want.past_key_values)
            for mine, theirs in zip(*(getattr(one.past_key_values, "layers", ()) for one in (got, want)), strict=True):
                torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(mine.values, theirs.values, atol=1e-4, rtol=1e-4)
                assert mine.get_seq_length() == theirs.get_seq_length()
        assert generate_row(originals).fallbacks == 0


def test_restore_gives_generate_back_and_nothing_is_left(model):
    before = dict(vars(model))
    want, signature = model.generate(PROMPT, max_new_tokens=5), model.generate.__doc__
    for give_back in (restore, restore_eagle):
        _, originals = optimize_with_triton(model)
        assert torch.equal(model.generate(PROMPT, max_new_tokens=5), want) and model.generate.__doc__ == signature
        with pytest.raises(PatchError, match="optimised already"):
            optimize_with_triton(model)
        assert give_back(model) is model and originals.restored
        assert vars(model) == before and model.generate.__func__ is GenerationMixin.generate
        assert give_back(model) is model  # a second time, as in a `finally:`
    assert torch.equal(model.generate(PROMPT, max_new_tokens=5), want)


def test_models_that_generate_in_a_way_of_their_own_are_refused():
    class Own(transformers.LlamaForCausalLM):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            return super().prepare_inputs_for_generation(*args, **kwargs)

    model = causal_lm(vocab=VOCAB, layers=1)
    with pytest.raises(UnsupportedModelError, match=r"model\.prepare_inputs_for_generation must be transform"):
        optimize_with_triton(Own(model.config).to(DEVICE))
    model.generate = print
    with pytest.raises(UnsupportedModelError, match=r"model\.generate must be transformers"):
        optimize_with_triton(model)
    assert model.generate is print
    del model.generate
    with optimize_with_triton(model)[1] as originals:
        model.prepare_inputs_for_generation = functools.partial(model.prepare_inputs_for_generation)
        assert model.generate(PROMPT, max_new_tokens=2).shape == (1, 13)
        assert "model.prepare_inputs_for_generation, which was replaced" in generate_row(originals).reason


def test_models_that_are_not_plain_are_refused(model):
    ea_model = tiny_model()
    with pytest.raises(UnsupportedModelError, match="EaModel is an EaModel: call optimize_eagle_with_triton"):
        optimize_with_triton(ea_model)
    for other in (None, torch.nn.Linear(2, 2), model.model, model.config, "a/name"):
        with pytest.raises(UnsupportedModelError, match="must be a causal language model"):
            optimize_with_triton(other)
    with pytest.raises(UnsupportedModelError, match="expected an EaModel .*; optimize_with_triton takes any"):
        optimize_eagle_with_triton(model)
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="has a forward hook, which would not run"):
        optimize_with_triton(model)
    handle.remove()


def test_a_model_that_changes_meanwhile_is_followed_or_refused():
    model, draft = causal_lm(vocab=VOCAB, layers=1), causal_lm(vocab=VOCAB, layers=1, seed=1)
    with optimize_with_triton(model, draft):
        model.lm_head.weight.data.neg_()
        want = GenerationMixin.generate(model, PROMPT, max_new_tokens=6)
        assert torch.equal(model.generate(PROMPT, max_new_tokens=6), want)
        for module, path in ((model, "model"), (draft, "draft")):
            handle = module.model.register_forward_hook(lambda *_: None)
            with pytest.raises(RuntimeError, match=rf"{path}\.model has got a forward hook"):
                model.generate(PROMPT, max_new_tokens=6)
            handle.remove()
        assert torch.equal(model.generate(PROMPT, max_new_tokens=6), want)


def test_the_kernels_decode_a_padded_batch():
    """On a CPU in Triton's interpreter."""
    model = causal_lm(vocab=VOCAB, layers=1)
    options = dict(input_ids=BATCH[:2] * LEFT[:2], attention_mask=LEFT[:2], max_new_tokens=3, min_new_tokens=2, **ENDS)
    options |= dict(inputs_embeds=EMBEDDINGS[:2], **ROWS)
    want = model.generate(**options)
    with optimize_with_triton(model, model, TritonConfig(kernels=True, topk=2, num_steps=1))[1] as originals:
        same_rows(model.generate(**options), want)
        calls = {row.path: row.calls for row in originals.report()}
    assert calls["generate"] == 1 and calls["tree_attention"] > 0
