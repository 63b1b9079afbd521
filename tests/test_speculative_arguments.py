"""What `generate` and its like make of their arguments: every documented form, and a sentence for all others."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from eagle_triton import EAGLEConfig, EAGLEInference, EaModel, optimize_eagle_with_triton
from eagle_triton.inference.arguments import ArgumentReader
from tests.tiny import random_prompt, tiny_model

FIXED = EAGLEConfig(fallback=False)
SAMPLED = FIXED.changed(temperature=0.9, top_p=0.9, top_k=20)


@pytest.fixture(scope="module")
def eagle():
    return EAGLEInference(None, tiny_model(), FIXED)


@pytest.fixture(scope="module")
def demo():
    return EAGLEInference(None, EaModel.from_pretrained("demo"), FIXED)


def reader(config=FIXED, tokenizer=None):
    return ArgumentReader(config, 32, torch.device("cpu"), tokenizer)


def calls(count=2, config=FIXED, max_new_tokens=5, stop_token_ids=None, stop_strings=(), seed=None, **sampling):
    prompts = [torch.ones(3, dtype=torch.long)] * count
    stops = {"stop_token_ids": stop_token_ids, "stop_strings": stop_strings}
    return reader(config).requests(prompts, seed, max_new_tokens=max_new_tokens, **stops, **sampling)


# --- options ---


@pytest.mark.parametrize("seed", [3, np.int64(3), np.uint8(3), torch.tensor(3), [3, 4], np.array([3, 4])], ids=repr)
def test_one_seed_of_any_integer_kind_counts_on(seed):
    assert [call.sampling.seed for call in calls(seed=seed, temperature=1.0)] == [3, 4]


@pytest.mark.parametrize("stops", [[5, 6], (5, 6), {5, 6}, iter([5, 6]), torch.tensor([5, 6]), np.array([5, 6])])
def test_stop_tokens_for_all_prompts(stops):
    assert [call.stop_ids for call in calls(stop_token_ids=stops)] == [frozenset([5, 6])] * 2


def test_stop_tokens_one_by_one():
    for one in (5, np.int64(5), torch.tensor(5), [np.int64(5)], [torch.tensor(5)]):
        assert [call.stop_ids for call in calls(stop_token_ids=one)] == [frozenset([5])] * 2
    own = calls(3, stop_token_ids=[[5], None, torch.tensor([6, 7])])
    assert [call.stop_ids for call in own] == [frozenset([5]), frozenset(), frozenset([6, 7])]
    assert [call.stop_ids for call in calls(stop_token_ids=[])] == [frozenset()] * 2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_biases_as_pairs_are_for_all_and_as_a_list_for_each(count):
    both = ((5, -1.0), (6, 1.0))
    for given in (dict(both), list(both), both, [list(pair) for pair in both]):
        assert [call.sampling.biases for call in calls(count, logit_bias=given)] == [both] * count
    own = calls(2, logit_bias=[{5: -1.0}, list(both)])
    assert [call.sampling.biases for call in own] == [((5, -1.0),), both]
    own = calls(2, config=FIXED.changed(logit_bias={1: 2.0}), logit_bias=[None, []])
    assert [call.sampling.biases for call in own] == [((1, 2.0),), ()]
    with pytest.raises(ValueError, match="logit_bias: one value or 3"):
        calls(3, logit_bias=[{5: -1.0}, {6: 1.0}])


def test_filters_change_nothing_at_temperature_0():
    for filters in (dict(top_p=0.5), dict(min_p=0.9), dict(top_k=4), dict(top_p=0.1, top_k=1, min_p=1.0)):
        assert EAGLEConfig(**filters).sampling().greedy
        for call in (*calls(**filters), *calls(config=SAMPLED, temperature=0.0, **filters)):
            assert call.sampling.greedy and not call.sampling.filtered
    greedy, sampled = calls(temperature=[0.0, 1.0], top_k=4)
    assert greedy.sampling.greedy and not greedy.sampling.filtered and sampled.sampling.filtered
    for wrong in (dict(top_p=0.0), dict(top_p=1.5), dict(top_k=-1), dict(min_p=2.0)):
        (name,) = wrong
        with pytest.raises(ValueError, match=f"^{name} must be"):
            EAGLEConfig(**wrong)
        with pytest.raises(ValueError, match=f"^{name} must be"):
            calls(**wrong)


FORBID_ALL = [(token, float("-inf")) for token in range(32)]
WRONG = [
    (dict(temperature="hot"), TypeError, "temperature must be a number, got 'hot'"),
    (dict(temperature=True), TypeError, "temperature must be a number"),
    (dict(top_p="x", temperature=1.0), TypeError, "top_p must be a number"),
    (dict(top_k="x", temperature=1.0), TypeError, "top_k must be a number"),
    (dict(min_p={}, temperature=1.0), TypeError, "min_p must be a number"),
    (dict(repetition_penalty="x"), TypeError, "repetition_penalty must be a number"),
    (dict(seed="x"), TypeError, "seed must be an integer or None, got 'x'"),
    (dict(seed=1.5), TypeError, "seed must be an integer"),
    (dict(seed=True), TypeError, "seed must be an integer"),
    (dict(seed=2**63), ValueError, "64 bits"),
    (dict(max_new_tokens=2.5), TypeError, "max_new_tokens must be an integer, got 2.5"),
    (dict(max_new_tokens=None), TypeError, "max_new_tokens must be an integer"),
    (dict(max_new_tokens=True), TypeError, "max_new_tokens must be an integer"),
    (dict(max_new_tokens=-1), ValueError, "max_new_tokens must not be negative, got -1"),
    (dict(temperature=-1.0), ValueError, "temperature"),
    (dict(temperature=[1.0, 2.0]), ValueError, "temperature: one value or 1"),
    (dict(stop_strings=["x"]), ValueError, "stop_strings need a tokenizer"),
    (dict(stop_strings=[""]), ValueError, "non-empty"),
    (dict(stop_token_ids="5"), TypeError, "stop_token_ids must be token ids"),
    (dict(stop_token_ids=[5, "x"]), TypeError, "stop_token_ids"),
    (dict(stop_token_ids=5.0), TypeError, "stop_token_ids"),
    (dict(stop_token_ids=[-1]), ValueError, "stop_token_ids must lie in 0..31"),
    (dict(stop_token_ids=[32]), ValueError, "stop_token_ids must lie in 0..31"),
    (dict(stop_strings=5), TypeError, "stop_strings must be a string"),
    (dict(logit_bias=5), TypeError, "logit_bias must map"),
    (dict(logit_bias={"x": 1.0}), TypeError, "logit_bias must map"),
    (dict(logit_bias={32: 1.0}), ValueError, "logit_bias: tokens must lie in 0..31"),
    (dict(logit_bias=FORBID_ALL), ValueError, r"logit_bias: it forbids \(-inf\) all 32 tokens: leave"),
    (
        dict(logit_bias=FORBID_ALL[1:], stop_token_ids=0, min_new_tokens=2),
        ValueError,
        "all 32 tokens, beside the stop tokens before min_new_tokens=2",
    ),
    (dict(logprobs=5), TypeError, "logprobs must be True or False, got 5"),
    (dict(progress=1), TypeError, "progress must be True or False"),
    (dict(baseline=None), TypeError, "baseline must be True or False"),
    (dict(on_step=5), TypeError, "on_step must be a function"),
    (dict(attention_mask=[[1]]), ValueError, "attention_mask"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=lambda value: f"{value}"[:40])
def test_wrong_options_name_themselves(eagle, options, error, message):
    with pytest.raises(error, match=message):
        eagle.generate([[1, 2]], **options)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("stop", "stop_strings or stop_token_ids"),
        ("max_tokens", "max_new_tokens"),
        ("max_length", "max_new_tokens"),
        ("temprature", "temperature"),
        ("num_beams", None),
        ("n", "the same prompt"),
    ],
)
def test_unknown_options_list_those_of_the_call(eagle, name, hint):
    for call, own in ((eagle.generate, "on_step"), (eagle.stream, "logprobs"), (eagle.benchmark, "warm_up")):
        meant = f", did you mean {hint}" if hint else r"\."
        with pytest.raises(ValueError, match=f"{call.__name__}: unknown option {name}{meant}.*{own}.*min_p"):
            call([[1, 2]], **{name: 1})
    with pytest.raises(ValueError, match="stream: unknown option progress"):
        eagle.stream([[1, 2]], progress=True)


# --- prompts ---


def test_prompts_in_every_form():
    want = [[1, 2, 3]]
    for given in (
        [1, 2, 3],
        want,
        [np.int64(1), 2, 3],
        np.array([1, 2, 3]),
        torch.tensor([1, 2, 3]),
        torch.tensor(want),
    ):
        assert [prompt.tolist() for prompt in reader().prompts(given)] == want
    mixed = reader().prompts([[1], torch.tensor([2, 3]), torch.tensor([[4]]), np.array([5, 6])])
    assert [prompt.tolist() for prompt in mixed] == [[1], [2, 3], [4], [5, 6]]
    assert all(prompt.dtype == torch.int64 for prompt in mixed)


CHAT = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ([""], ValueError, "prompt 0: .*the prompt is empty"),
        ("", ValueError, "the prompt is empty"),
        ([[1], []], ValueError, "prompt 1: .*the prompt is empty"),
        ([], ValueError, "no prompts"),
        (torch.tensor([[40]]), ValueError, "out of range"),
        ([torch.tensor([1]), torch.tensor([99])], ValueError, "prompt 1: .*out of range"),
        (torch.tensor([[1.0]]), ValueError, "integer"),
        (CHAT, TypeError, "tokenizer.apply_chat_template"),
        ([CHAT, CHAT], TypeError, "prompt 0: .*tokenizer.apply_chat_template"),
        ({"input_ids": [[1]]}, TypeError, 'the tensor under "input_ids"'),
        (torch.ones(1, 2, dtype=torch.long, device="meta"), ValueError, "meta"),
        (5, TypeError, "input_ids: text, token ids"),
        (None, TypeError, "input_ids: text, token ids"),
        (b"ab", TypeError, "a prompt must be text, token ids or a tensor, got b'ab'"),
        ([[1, "x"]], TypeError, "prompt 0: a prompt must be text, token ids"),
        ([None], TypeError, "prompt 0: a prompt must be"),
        ([1.0, 2.0], ValueError, r"prompt 0: a prompt must be text, or token ids .*, got 1\.0"),
        ([torch.ones(2, 2, dtype=torch.long)], ValueError, r"prompt 0: .*\[L\] or \[1, L\]"),
    ],
    ids=lambda value: f"{value}"[:30],
)
def test_what_is_no_prompt_is_called_that(demo, prompts, error, message):
    class Silent:
        """A tokenizer that adds no token of its own."""

        def __call__(self, text):
            return demo.tokenizer(text, add_special_tokens=False)

    with pytest.raises(error, match=message):
        reader(tokenizer=Silent()).prompts(prompts)


# --- where sequences end ---


def test_max_length_ends_a_sequence_whatever_is_asked_for(eagle):
    limited = EAGLEInference(None, eagle.pair.target_model, FIXED.changed(max_length=20))
    prompt = random_prompt(9)[0]
    rows, stats = limited.generate([prompt])  # 100 new tokens by default
    assert stats.completions[0].finished == "length" and stats.completions[0].error is None
    assert torch.equal(rows[0], eagle.generate([prompt], 11)[0][0])


def test_no_sequence_passes_the_targets_positions():
    model = tiny_model()
    model.base_model.config.max_position_embeddings = 24
    eagle = EAGLEInference(None, model, FIXED)
    free = EAGLEInference(None, tiny_model(), FIXED)
    prompts = [random_prompt(length)[0] for length in (20, 25, 9, 24)]
    assert eagle.memory_bytes(rows=10**12) == eagle.memory_bytes(rows=24)
    with eagle.session(rows=10**9) as session:
        assert session.rows == 24
    rows, stats = eagle.generate(prompts, 60)
    assert [completion.finished for completion in stats.completions] == ["length", "error", "length", "length"]
    assert "25 tokens exceed the target's 24 positions" in stats.completions[1].error
    assert [len(row) for row in rows] == [24, 25, 24, 24]
    assert torch.equal(rows[0], free.generate(prompts[:1], 4)[0][0])
    with pytest.raises(ValueError, match="25 tokens exceed the target's 24 positions"):
        eagle.generate(prompts[1], 1)
    with eagle.session(rows=64) as session:
        session.submit(prompts[2], 40)
        session.submit(prompts[1], 40)
        pieces = [piece for _ in range(40) for piece in session.step()]
    ends = {piece.index: piece.completion for piece in pieces if piece.completion}
    assert len(ends[0].tokens) == 15 and "positions" in ends[1].error


# --- the object itself ---


def test_an_engine_shows_what_it_is_and_is_not_pickled(eagle):
    assert repr(eagle).startswith("EAGLEInference(LlamaForCausalLM of 4 layers, float32 on cpu; draft Eagle3Head; ")
    assert len(repr(eagle)) < 160 and "\n" not in repr(eagle)
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="Save the models with their save_pretrained"):
            call(eagle)


def test_text_streams_as_strings(demo):
    want = demo.generate("import ", 20)[1].completions[0].text
    assert "".join(demo.stream_text("import ", 20)) == want
    assert "".join(piece.text for piece in demo.stream("import ", 20)) == want
    with pytest.raises(ValueError, match="takes one prompt, got 2"):
        demo.stream_text(["a", "b"])
    with pytest.raises(ValueError, match="stream: unknown option stop"):
        demo.stream_text("a", stop="b")
    with pytest.raises(ValueError, match="tokenizer"):
        EAGLEInference(None, tiny_model()).stream_text([1])
    limited = EAGLEInference(None, demo.pair.target_model, FIXED.changed(max_length=2))
    with pytest.raises(RuntimeError, match="could not be decoded: a prompt of"):
        list(limited.stream_text("import os, sys, re"))


def test_what_is_no_option_at_all_is_named():
    model = tiny_model(total_token=8, depth=3, top_k=2)
    eagle = EAGLEInference(None, model)
    without_limit = EAGLEInference(None, tiny_model())
    without_limit.pair = replace(without_limit.pair, max_positions=None)
    wrong = [
        (
            lambda: EAGLEInference(None, model, {"topk": 4}),
            TypeError,
            "config must be an EAGLEConfig or a SpeculativeConfig, got dict",
        ),
        (lambda: EAGLEInference(None, model, costs="x"), TypeError, "costs must be a list of CostTable"),
        (lambda: optimize_eagle_with_triton(model, {"strict": True}), TypeError, "config must be an EagleTritonConfig"),
        (
            lambda: eagle.draft_step(random_prompt(5), "x"),
            TypeError,
            "past_key_values must be what draft_step returned",
        ),
        (lambda: eagle.memory_bytes(-1), ValueError, "slots and rows must be at least 1, got -1"),
        (lambda: eagle.measure_costs(()), ValueError, "batches: give at least one"),
        (lambda: eagle.measure_costs((0,)), ValueError, "batches must be at least 1, got 0"),
        (lambda: eagle.measure_costs(context=0), ValueError, "context must be at least 1, got 0"),
        (lambda: eagle.measure_costs(steps=0), ValueError, "steps must be at least 1, got 0"),
        (lambda: eagle.measure_costs(rows=-5), ValueError, "rows must lie in 1..1073741824, got -5"),
        (lambda: eagle.session(rows=0), ValueError, "rows must lie in 1..1073741824, got 0"),
        (lambda: eagle.session(rows=10**10), ValueError, "rows must lie in 1..1073741824, got 10000000000"),
        (lambda: without_limit.session(1 << 30, 256), RuntimeError, "no memory for slots=256 .* rows=1073741824"),
        (lambda: eagle.generate(random_prompt(5), "3"), TypeError, "max_new_tokens must be an integer, got '3'"),
    ]
    for call, error, message in wrong:
        with pytest.raises(error, match=message):
            call()
    with eagle.session(rows=40) as session, pytest.raises(ValueError, match=r"none yet\), got 0"):
        session.cancel(0)
