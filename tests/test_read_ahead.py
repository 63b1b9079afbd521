"""Prompts that are read while transformers prepares a call: when, and that nothing comes of a wrong guess."""

import itertools
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers.generation import GenerationMixin

from eagle_triton import optimize_with_triton
from eagle_triton.engine.prefill import Prefill
from eagle_triton.families.hf_generate import read_ahead
from eagle_triton.families.hf_generate.read_ahead import ReadAhead, Reading
from tests.test_causal_lm import DEVICE, causal_lm
from tests.tiny import random_prompt

pytestmark = pytest.mark.versions
VOCAB = 16
ENDS = {"eos_token_id": 3, "pad_token_id": 0}


def prompt(seed: int, length: int = 70, rows: int = 1) -> torch.Tensor:
    tokens = [2 + random_prompt(length, vocab=VOCAB - 2, seed=seed + row) for row in range(rows)]  # no padding
    return torch.cat(tokens).to(DEVICE)


class Watched:
    """A tiny model that is optimised, and what its last call did, in order: "prepare" and "read"."""

    def __init__(self, monkeypatch, engines, draft=None, **options):
        self.engines, self.events = engines, []
        self.model = causal_lm(vocab=VOCAB, layers=2)
        read, prepare = Prefill.read, GenerationMixin._prepare_generation_config

        def noted(name, method):
            return lambda *arguments, **more: self.events.append(name) or method(*arguments, **more)

        monkeypatch.setattr(read_ahead, "DEVICES", ("cuda", "cpu"))
        monkeypatch.setattr(Prefill, "read", noted("read", read))
        monkeypatch.setattr(GenerationMixin, "_prepare_generation_config", noted("prepare", prepare))
        self.originals = optimize_with_triton(self.model, draft, **options).originals

    def __call__(self, *arguments, **options):
        self.events.clear()
        try:
            return self.model.generate(*arguments, **options)
        finally:
            self.engines[0].check_free()

    def original(self, *arguments, **options):
        return self.originals["generate"](*arguments, **options)

    def warm_up(self, **options):
        """Two calls that are alike: the next one that is like them is read ahead."""
        for seed in (100, 101):
            self(prompt(seed), **options)
            assert self.events == ["prepare", "read"]


@pytest.fixture(params=[None, "suffix"], ids=["plain", "drafted"])
def watched(request, monkeypatch, engines):
    return Watched(monkeypatch, engines, request.param)


def test_the_third_of_equal_calls_is_read_before_it_is_prepared(watched):
    options = {"max_new_tokens": 9, **ENDS}
    watched.warm_up(**options)
    mask = torch.ones_like(prompt(1))
    for arguments in (
        {"inputs": prompt(1)},
        {"input_ids": prompt(2, 33).int()},
        {"inputs": prompt(3), "attention_mask": mask},
    ):
        got = watched(**arguments, **options)
        assert watched.events == ["read", "prepare"]
        assert torch.equal(got, watched.original(**arguments, **options))
    for rows in (3, 3):
        got = watched(prompt(5, rows=rows), **options)
        assert watched.events[0] == "read" and torch.equal(got, watched.original(prompt(5, rows=rows), **options))
    mask = torch.ones_like(prompt(5, rows=3))
    mask[1, :40] = 0
    got = watched(prompt(5, rows=3) * mask, attention_mask=mask, **options)
    assert watched.events[0] == "read"
    assert torch.equal(got, watched.original(prompt(5, rows=3) * mask, attention_mask=mask, **options))


OTHERS = {  # calls that turn out to be others, by how often their prompts are read
    "a longer answer": (dict(max_new_tokens=8), 2),
    "a penalty": (dict(max_new_tokens=5, repetition_penalty=1.3), 2),
    "scores": (dict(max_new_tokens=5, return_dict_in_generate=True, output_scores=True), 2),
    "several answers": (dict(max_new_tokens=5, do_sample=True, top_k=1, num_return_sequences=2), 2),
    "padding found by its token": (dict(max_new_tokens=5, inputs=prompt(1) * (torch.arange(70, device=DEVICE) > 7)), 2),
    "a processor of the host's": (dict(max_new_tokens=5, no_repeat_ngram_size=2), 2),
    "drafts that it asks for": (dict(max_new_tokens=5, prompt_lookup_num_tokens=2), 2),
    "beams": (dict(max_new_tokens=5, num_beams=2), 1),
    "embeddings": (dict(max_new_tokens=5, inputs_embeds=torch.randn(1, 70, 64, device=DEVICE)), 1),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_call_that_turns_out_to_be_another_is_what_the_original_does(watched, other):
    options, reads = OTHERS[other]
    given = {} if {"inputs", "inputs_embeds"} & {*options} else {"inputs": prompt(1)}
    usual = {"max_new_tokens": 5, **ENDS}
    watched.warm_up(**usual)
    got, want = watched(**given, **(ENDS | options)), watched.original(**given, **(ENDS | options))
    assert watched.events.count("read") == reads
    assert torch.equal(getattr(got, "sequences", got), getattr(want, "sequences", want))
    if "output_scores" in options:
        torch.testing.assert_close(got.scores, want.scores, atol=1e-4, rtol=1e-4)
    for seed in (2, 3):  # what was expected in vain is not expected at once
        got = watched(prompt(seed), **usual)
        assert watched.events == ["prepare", "read"] and torch.equal(got, watched.original(prompt(seed), **usual))
    watched(prompt(4), **usual)
    assert watched.events == ["read", "prepare"]


def test_a_cpu_which_would_gain_nothing_reads_nothing_ahead(watched, monkeypatch):
    monkeypatch.undo()
    target = causal_lm(vocab=VOCAB, layers=2).to("cpu")
    monkeypatch.setattr(Reading, "start", lambda *_: pytest.fail("read ahead"))
    with optimize_with_triton(target):
        for seed in range(4):
            target.generate(prompt(seed).cpu(), max_new_tokens=2)


def test_what_always_falls_back_or_has_other_rows_is_never_read_in_vain(watched):
    for options in (dict(num_beams=2), dict(do_sample=True, top_k=1, num_return_sequences=2)):
        for seed in range(4):
            watched(prompt(seed), max_new_tokens=2, **ENDS, **options)
            assert watched.events[0] == "prepare"
    for seed, length in itertools.product(range(2), (5, 8)):  # each is another request than the one before
        watched(prompt(seed), max_new_tokens=length, **ENDS)
        assert watched.events == ["prepare", "read"]


def test_errors_are_those_of_the_original_and_leave_the_engine_free(watched):
    options = {"max_new_tokens": 9, **ENDS}
    for wrong, error in (({"tempo": 3}, ValueError), ({"max_new_tokens": 0}, ValueError)):
        watched.warm_up(**options)
        with pytest.raises(error) as ours:
            watched(prompt(1), **options | wrong)
        assert watched.events[0] == "read"
        with pytest.raises(error) as theirs:
            watched.original(prompt(1), **options | wrong)
        assert str(ours.value) == str(theirs.value)


def test_a_streamer_that_raises_leaves_the_engine_free(watched):
    class Full:
        def put(self, tokens):
            raise OSError("no space left")

    watched.warm_up(max_new_tokens=9)
    with pytest.raises(OSError, match="no space left"):
        watched(prompt(1), max_new_tokens=9, streamer=Full())
    assert watched.events == ["read", "prepare"]


def test_an_interrupt_while_it_is_read_leaves_the_engine_free(watched, monkeypatch):
    options = {"max_new_tokens": 9, **ENDS}
    watched.warm_up(**options)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Prefill, "read", Mock(side_effect=KeyboardInterrupt))
        watched(prompt(1), **options)
    assert torch.equal(watched(prompt(1), **options), watched.original(prompt(1), **options))


@pytest.mark.parametrize("last", [1.0, 0.9], ids=["taken", "in vain"])
def test_random_numbers_are_drawn_as_by_calls_that_read_nothing_ahead(watched, last, monkeypatch):
    options = {"max_new_tokens": 5, "do_sample": True, "top_k": 5, **ENDS}

    def drawn(first: str) -> list[list[float]]:
        torch.manual_seed(0)
        calls = [watched(prompt(1), **options) for _ in range(3)]
        calls.append(watched(prompt(1), **options, temperature=last))
        assert watched.events[0] == first
        return [call[0].tolist() for call in (*calls, torch.rand(1, 2))]

    watched.warm_up(**options)
    ahead = drawn("read")
    monkeypatch.setattr(ReadAhead, "begin", lambda self, _: Reading(self, None, masked=False))
    assert ahead == drawn("prepare") and ahead[0] != ahead[1]


CHANGES = {
    "hook": (
        lambda model: model.model.layers[1].mlp.register_forward_hook(lambda *_: None),
        "layers.1.mlp has got a forward hook",
    ),
    "weight replaced": (
        lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.randn(VOCAB, 64, device=DEVICE))),
        "lm_head.weight was replaced",
    ),
    "weight moved": (
        lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()),
        "lm_head.weight was replaced",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed_is_refused_and_no_graph_is_run_over_memory_that_is_gone(watched, change):
    apply, message = CHANGES[change]
    watched.warm_up(max_new_tokens=9)
    apply(watched.model)
    with pytest.raises(RuntimeError, match=message):
        watched(prompt(1), max_new_tokens=9)
    assert ("read" in watched.events) == (change != "weight moved")


def test_weights_that_changed_in_place_are_read_anew(watched):
    options = {"max_new_tokens": 9, **ENDS}
    watched.warm_up(**options)
    before = watched(prompt(1), **options)
    assert watched.events == ["read", "prepare"]
    with torch.no_grad():
        for layer in watched.model.model.layers:
            layer.mlp.down_proj.weight.mul_(-1.5)
    after = watched(prompt(1), **options)  # whose pages were found, with what the former weights have computed
    assert watched.events == ["read", "prepare", "read"]
    assert torch.equal(after, watched.original(prompt(1), **options)) and not torch.equal(after, before)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_stream_of_its_own_reads_ahead_and_what_follows_waits_for_it(watched, monkeypatch):
    options, streams, read = {"max_new_tokens": 9, **ENDS}, [], Prefill.read

    def noted(*arguments, **more):
        streams.append(torch.cuda.current_stream())
        return read(*arguments, **more)

    monkeypatch.setattr(Prefill, "read", noted)
    for round_ in range(6):
        watched.warm_up(**options)
        for more in ({}, {}, {"repetition_penalty": 1.3}):  # the last one is read in vain
            streams.clear()
            given = prompt(round_, 300, rows=4)
            got = watched(given, **options, **more)
            others = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(16)]
            assert streams[0] != torch.cuda.current_stream()
            assert torch.equal(got, watched.original(given, **options, **more))
            del others
