"""The functions of eagle_triton.speculative_decoding on the engine: the same as by the models' own forward."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from eagle_triton import speculative_decoding as library
from eagle_triton.speculative_decoding import engine_decoding
from eagle_triton.speculative_decoding.ngram_storage import CountingStorage
from eagle_triton.speculative_decoding.readers import CausalReader
from tests.tiny import noisy, random_prompt, tiny_model
from tests.tiny_hybrids import KINDS, tiny_hybrid

VOCABULARY = 32
NEVER = 10**6  # an end token that no model emits
LOG = engine_decoding.__name__
PROMPTS = [random_prompt(length)[0].tolist() for length in (1, 6, 19)]


def tiny(**options):
    """A target of two layers."""
    return tiny_model(eagle3=False, layers=2, **options).base_model


@pytest.fixture(scope="module")
def pair():
    target = tiny()
    with torch.no_grad():
        target.lm_head.weight *= 2  # as sure as a trained one
    return noisy(target), target


@pytest.fixture(autouse=True)
def released():
    yield
    library.release_engine()


@pytest.fixture
def both(capsys):
    """Runs a function on the engine and by the models' own forward, and hands out what the two gave and printed."""

    def run(function, *args, **options):
        found = []
        for engine in (True, False):
            trace: list[library.StepRecord] = []
            if function is not library.autoregressive_generate:
                options["trace"] = trace
            copies = [library_copy(value) for value in args]
            result = function(*copies, use_cache=True, debug=True, engine=engine, **options)
            storages = [state_of(value) for value in copies if isinstance(value, CountingStorage)]
            found.append((result, trace, capsys.readouterr().out, storages))
        return found

    return run


def library_copy(value):
    """A storage as it was given, for each of two runs; anything else itself."""
    if not isinstance(value, CountingStorage):
        return value
    return type(value)(value.n, value.vocab_size, seed=value.seed)


def state_of(storage: CountingStorage):
    return storage._counts, storage._best, storage.generator.get_state().tolist()


def assert_same(found) -> list[library.StepRecord]:
    """Tokens, rates, prints and storages to the bit, entropies but for rounding."""
    (result, trace, printed, storages), (want, want_trace, want_printed, want_storages) = found
    assert result == want and printed == want_printed and storages == want_storages
    assert [step[2:] for step in trace] == [step[2:] for step in want_trace]
    for step, other in zip(trace, want_trace, strict=True):
        assert (step.h_norm is None) == (other.h_norm is None)
        assert step[:2] == (None, None) or step[:2] == pytest.approx(other[:2], abs=1e-5)
    return trace


EGAG = [
    pytest.param({"gamma": 4}, id="fixed"),
    pytest.param({"gamma": 1}, id="one"),
    pytest.param({"gamma": 9}, id="nine"),
    pytest.param({"gamma": 2, "use_egag": True, "gamma_max": 6}, id="egag"),
    pytest.param({"use_egag": True, "gamma_min": 2, "egag_ema_beta": 0.9, "egag_scale": 3.0}, id="egag-ema"),
    pytest.param({"use_egag": True, "gamma_max": 8, "egag_mode": "stop"}, id="egag-stop"),
    pytest.param({"use_egag": True, "gamma_min": 3, "gamma_max": 3}, id="egag-three"),
]


class TestTheSameAsByTheOwnForward:
    @pytest.mark.parametrize("options", EGAG)
    def test_speculative(self, pair, both, options):
        accepted = rejected = 0
        for length, prompt in ((14, PROMPTS[0]), (14, PROMPTS[2]), (0, PROMPTS[1]), (3, PROMPTS[1])):
            found = both(
                library.speculative_generate, prompt, *pair, max_gen_len=length, eos_tokens_id=NEVER, **options
            )
            trace = assert_same(found)
            assert len(found[0][0][0]) == length
            accepted += sum(step.accepted for step in trace)
            rejected += sum(step.proposed - step.accepted for step in trace)
        assert accepted >= 4 and rejected

    @pytest.mark.parametrize("options", [EGAG[0], EGAG[1], EGAG[3], EGAG[5]])
    def test_end_tokens(self, pair, both, options):
        """Each token of a text is the end once: as the first token, accepted, and the target's own."""
        prompt, ways = PROMPTS[1], set()
        text = library.autoregressive_generate(prompt, pair[1], 10, eos_tokens_id=NEVER)
        for end in dict.fromkeys(text):
            found = both(library.speculative_generate, prompt, *pair, eos_tokens_id=[end, NEVER, -1], **options)
            trace = assert_same(found)
            assert found[0][0][0] == text[: text.index(end) + 1]
            ways.add("first" if not trace else "draft" if trace[-1].emitted == trace[-1].accepted else "own")
        assert ways == {"first", "draft", "own"}

    @pytest.mark.parametrize("options", [EGAG[2], EGAG[5]])
    def test_an_end_token_that_is_drafted_wrongly(self, pair, both, options):
        """Nothing is proposed behind it, though the engine drafts on."""
        cut = 0
        for end in range(0, VOCABULARY, 6):
            found = both(library.speculative_generate, PROMPTS[2], *pair, max_gen_len=8, eos_tokens_id=end, **options)
            trace = assert_same(found)
            room = [8 - 2 - sum(step.emitted for step in trace[:place]) for place in range(len(trace))]
            cut += any(step.proposed < min(step.gamma or 0, most) for step, most in zip(trace, room, strict=True))
        assert cut > 1

    def test_an_identical_drafter(self, pair, both):
        """Every draft is accepted, also those of the engine beyond the end of the text."""
        for length in (1, 2, 3, 5, 6, 7, 9, 11):
            for options in ({"gamma": 4}, {"use_egag": True, "gamma_max": 4, "egag_mode": "stop"}):
                found = both(
                    library.speculative_generate, PROMPTS[1], pair[1], pair[1], max_gen_len=length,
                    eos_tokens_id=NEVER, **options,
                )  # fmt: skip
                assert_same(found)
                assert found[0][0][1] == (1.0 if length > 2 else 0.0)

    @pytest.mark.parametrize("options", [EGAG[2], EGAG[3]])
    def test_at_the_end_of_the_positions(self, both, options):
        target = tiny()
        target.config.max_position_embeddings = 24
        for length in (20, 22, 23, 24):
            prompt = random_prompt(length)[0].tolist()
            found = both(library.speculative_generate, prompt, noisy(target), target, eos_tokens_id=NEVER, **options)
            assert_same(found)
            assert len(found[0][0][0]) == 24 - length

    @pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
    def test_families(self, both, family):
        target = tiny(family=family)
        assert_same(both(library.speculative_generate, PROMPTS[2], noisy(target), target, max_gen_len=14))
        assert_same(both(library.autoregressive_generate, PROMPTS[2], target, 14))

    @pytest.mark.parametrize("length", [0, 1, 2, 20])
    def test_autoregressive(self, pair, both, length):
        for prompt, end in zip(PROMPTS, (NEVER, 7, [3, 5]), strict=True):
            assert_same(both(library.autoregressive_generate, prompt, pair[1], length, eos_tokens_id=end))

    @pytest.mark.parametrize("storage", [library.NGramStorage, library.OneLevelNGramStorage], ids=["basic", "onelevel"])
    @pytest.mark.parametrize(("n", "gamma", "top_k"), [(2, 4, 1), (3, 1, 3), (5, 15, 3)])
    def test_ngrams(self, both, storage, n, gamma, top_k):
        fillers = {"filler_top_k": top_k} | ({"filler_weight": 0} if top_k > 1 else {})
        model = tiny(vocab=8, seed=1, top_k=3, total_token=12, depth=3)  # soon repeats itself
        accepted = 0
        short = [([3], length, NEVER) for length in (3, 2, 1, 0)]
        for prompt, length, end in (([3], 40, NEVER), ([1, 2, 1, 2, 5, 1], 40, [1, 6]), ([4, 4, 4], 24, NEVER), *short):
            found = both(
                library.ngram_assisted_speculative_generate, prompt, storage(n, 8, seed=4), model, gamma=gamma,
                max_gen_len=length, eos_tokens_id=end, stop_if_unknown=True, **fillers,
            )  # fmt: skip
            accepted += sum(step.accepted for step in assert_same(found))
        assert accepted > 20

    @pytest.mark.parametrize("kind", KINDS[:1])
    def test_a_recurrent_target_decodes_with_a_cache(self, kind):
        """By its own forward only without one."""
        target = tiny_hybrid(kind, vocab=VOCABULARY)
        target.config.max_position_embeddings = 128
        drafter = tiny()
        for function, models in (
            (library.autoregressive_generate, [target]),
            (library.speculative_generate, [drafter, target]),
        ):
            found = function(PROMPTS[1], *models, max_gen_len=12, use_cache=True, engine=True)
            assert found == function(PROMPTS[1], *models, max_gen_len=12, use_cache=False)
            with pytest.raises(ValueError, match="use_cache=False"):
                function(PROMPTS[1], *models, max_gen_len=12, use_cache=True, engine=False)


class Counter(library.NGramStorage):
    """One that could count otherwise."""


class Greedy(library.GreedyProcessor):
    """One that could choose otherwise."""


def full_storage() -> library.NGramStorage:
    storage = library.NGramStorage(3, VOCABULARY)
    storage.initialize(torch.tensor([[1, 2, 3]]))
    return storage


COMMON = [
    ({"use_cache": False}, "use_cache=False gives a model the whole text each time"),
    ({"logits_processor": library.MultinomialProcessor(1)}, "MultinomialProcessor is not GreedyProcessor"),
    ({"logits_processor": Greedy()}, "Greedy is not GreedyProcessor"),
    ({"generator": torch.Generator()}, "a generator was given"),
]
DRAFTING = [({"first_target": False}, "first_target=False drafts before the target's first token")]
CASES: list = [
    *(("autoregressive_generate", *case) for case in COMMON),
    *(("speculative_generate", *case) for case in [*COMMON, *DRAFTING]),
    ("speculative_generate", {"skip_sample_adjustment": True}, "skip_sample_adjustment=True"),
    ("speculative_generate", {"gamma": 64}, "at most 63 tokens a step by method draft_model, got 64"),
    ("speculative_generate", {"use_egag": True, "gamma_max": 70}, "at most 63 .* got 70"),
    *(("ngram_assisted_speculative_generate", *case) for case in [*COMMON, *DRAFTING]),
    ("ngram_assisted_speculative_generate", {"gamma": 16}, "at most 15 tokens a step by method nasd, got 16"),
    ("ngram_assisted_speculative_generate", {"stop_if_unknown": False}, "stop_if_unknown=False drafts random tokens"),
    ("ngram_assisted_speculative_generate", {"filler_top_k": 3}, "filler_top_k=3 counts logits"),
    ("ngram_assisted_speculative_generate", {"storage": full_storage}, "the storage has counted already"),
    ("ngram_assisted_speculative_generate", {"storage": lambda: Counter(3, VOCABULARY)}, "got Counter"),
    ("ngram_assisted_speculative_generate", {"storage": lambda: library.NGramStorage(6, VOCABULARY)}, "got n=6"),
]


def call(name: str, pair, **options):
    """A call that the engine decodes but for the options."""
    settings = {"max_gen_len": 4, "use_cache": True, "eos_tokens_id": NEVER}
    if name == "ngram_assisted_speculative_generate":
        storage = options.pop("storage", lambda: library.NGramStorage(3, VOCABULARY))()
        models, settings = [storage, pair[1]], settings | {"filler_top_k": 1, "stop_if_unknown": True}
    else:
        models = list(pair if name == "speculative_generate" else pair[1:])
    return getattr(library, name)([3, 4, 5], *models, **{**settings, **options})


def said(caplog) -> list[str]:
    """What was logged of the engine since the last call of this."""
    messages = [record.getMessage() for record in caplog.records if record.name == LOG]
    caplog.clear()
    return messages


FUNCTIONS = ["autoregressive_generate", "speculative_generate", "ngram_assisted_speculative_generate"]


class TestChoice:
    @pytest.mark.parametrize(("name", "options", "reason"), CASES)
    def test_reasons(self, pair, caplog, name, options, reason):
        """The own forward decodes and the log says why; with engine=True that is an error."""
        caplog.set_level(logging.INFO, LOG)
        tokens = call(name, pair, **options)
        assert len(tokens if name == "autoregressive_generate" else tokens[0]) == 4
        (message,) = said(caplog)
        prefix = "decoding by the models' own forward: "
        assert message.startswith(prefix)
        with pytest.raises(ValueError) as raised:
            call(name, pair, engine=True, **options)
        assert str(raised.value) == f"engine=True: {message.removeprefix(prefix)}"
        raised.match(reason)
        assert not said(caplog)

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_the_log_says_which_once_for_a_call(self, pair, caplog, name):
        caplog.set_level(logging.INFO, LOG)
        for engine, message in (
            (None, "decoding on the engine"),
            (True, "decoding on the engine"),
            (False, "decoding by the models' own forward: engine=False"),
        ):
            call(name, pair, engine=engine)
            assert said(caplog) == [message]

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_a_temperature_changes_nothing(self, pair, name):
        expected = call(name, pair, engine=False)
        assert call(name, pair, engine=True, logits_processor=library.GreedyProcessor(0.3)) == expected

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_the_models_forward_does_not_run(self, pair, name, monkeypatch):
        monkeypatch.setattr(CausalReader, "forward", None)
        assert call(name, pair)
        with pytest.raises(TypeError):
            call(name, pair, engine=False)

    def test_models_that_the_engine_does_not_read(self, pair):
        strange = tiny()
        handle = strange.model.norm.register_forward_hook(lambda *_: None)
        other = tiny(vocab=VOCABULARY + 1)
        wide = tiny().double()
        tokenizer = [None] * VOCABULARY
        for models, reason in (
            ((pair[0], strange), "forward hook"),
            ((strange, pair[1]), "forward hook"),
            ((other, pair[1]), "vocabulary 33, the target's is 32"),
            ((wide, pair[1]), "dtype|float64"),
            ((pair[0], torch.nn.Module()), "neither get_output_embeddings"),
        ):
            with pytest.raises(ValueError, match=reason):
                library.speculative_generate([3], *models, tokenizer, use_cache=True, engine=True)
        handle.remove()
        assert library.speculative_generate([3], strange, pair[1], tokenizer, use_cache=True, engine=True)[0]
        expected = library.autoregressive_generate([3], pair[1])
        assert library.speculative_generate([3], other, pair[1], tokenizer, use_cache=True)[0] == expected

    def test_a_model_of_ones_own(self):
        from tests.test_speculative_decoding import follows

        model = follows(1, 2, 3, vocabulary=10)
        with pytest.raises(ValueError, match="engine=True: model must be a causal language model of"):
            library.autoregressive_generate([0], model, use_cache=True, engine=True)
        with pytest.raises(ValueError, match="engine=True: use_cache=False"):
            library.autoregressive_generate([0], model, engine=True)

    def test_a_drafter_with_fewer_positions_than_the_text_may_have(self, pair, caplog):
        caplog.set_level(logging.INFO, LOG)
        short = tiny()
        short.config.max_position_embeddings = 12
        expected = library.autoregressive_generate([3, 4, 5], pair[1], 10, eos_tokens_id=NEVER)
        said(caplog)
        for length, engine in ((9, True), (10, False)):
            tokens, _ = call("speculative_generate", (short, pair[1]), max_gen_len=length)
            assert tokens == expected[:length]
            assert (said(caplog) == ["decoding on the engine"]) is engine
        with pytest.raises(ValueError, match="drafter has 12 positions, and the text may have 13 tokens"):
            call("speculative_generate", (short, pair[1]), max_gen_len=10, engine=True)

    def test_dropout_while_training(self):
        target = tiny()
        call("autoregressive_generate", (None, target), engine=True)
        target.train()
        call("autoregressive_generate", (None, target), engine=True)
        for layer in target.model.layers:
            layer.self_attn.attention_dropout = 0.5
        with pytest.raises(ValueError, match="the model is in training mode with attention dropout"):
            call("autoregressive_generate", (None, target), engine=True)
        target.eval()
        call("autoregressive_generate", (None, target), engine=True)

    def test_autocast(self, pair, caplog):
        caplog.set_level(logging.INFO, LOG)
        call("autoregressive_generate", pair)
        said(caplog)
        with torch.autocast("cpu", torch.bfloat16):
            call("autoregressive_generate", pair)
        assert "torch.autocast is on" in said(caplog)[0]

    def test_bad_arguments_are_refused_before_an_engine_is_built(self, pair):
        for name in FUNCTIONS:
            for engine in (1, "auto"):
                with pytest.raises(TypeError, match="engine must be True, False or None"):
                    call(name, pair, engine=engine)
            with pytest.raises(ValueError, match="max_gen_len must be at least 0"):
                call(name, pair, max_gen_len=-1)
        with pytest.raises(ValueError, match="filler_top_k must lie in"):
            call("ngram_assisted_speculative_generate", pair, filler_top_k=0)
        assert engine_decoding._kept is None


class TestTheKeptEngine:
    def test_it_serves_the_same_call_again(self, pair):
        for name in FUNCTIONS:
            call(name, pair)
            kept = engine_decoding._kept
            call(name, pair, max_gen_len=7, eos_tokens_id=3)
            assert engine_decoding._kept is kept is not None

    def test_other_options_and_other_models_take_another(self, pair):
        seen = []
        other = noisy(pair[1], seed=2)
        for models, options in (
            (pair, {}),
            (pair, {"gamma": 3}),
            ((other, pair[1]), {"gamma": 3}),
            (pair, {"gamma": 3}),
        ):
            call("speculative_generate", models, **options)
            seen.append(engine_decoding._kept)
        assert len({id(kept.inference) for kept in seen}) == 4
        assert seen[2].drafter is other and seen[3].drafter is pair[0]

    def test_release(self):
        import gc
        import weakref

        target = tiny()
        call("autoregressive_generate", (None, target))
        model = weakref.ref(target)
        del target
        gc.collect()
        assert model() is not None
        library.release_engine()
        gc.collect()
        assert engine_decoding._kept is None and model() is None
        library.release_engine()

    @pytest.mark.parametrize(
        ("how", "part"),
        [
            ("in place", "target"),
            ("in place", "drafter"),
            ("replaced", "target"),
            ("data", "drafter"),
            ("half", "both"),
        ],
    )
    def test_changed_weights_are_honoured(self, both, part, how):
        target, before = tiny(), []
        drafter = noisy(target)
        options = {"max_gen_len": 9, "eos_tokens_id": NEVER}
        library.speculative_generate(PROMPTS[2], drafter, target, use_cache=True, engine=True, trace=before, **options)
        generator = torch.Generator().manual_seed(5)
        for model in {"target": [target], "drafter": [drafter], "both": [drafter, target]}[part]:
            weight = model.lm_head.weight
            new = weight.detach() + 0.2 * torch.randn(weight.shape, generator=generator)
            if how == "in place":
                with torch.no_grad():
                    weight.copy_(new)
            elif how == "replaced":
                model.lm_head.weight = torch.nn.Parameter(new)
            elif how == "data":
                weight.data = new
            else:
                model.half().float()
        trace = assert_same(both(library.speculative_generate, PROMPTS[2], drafter, target, **options))
        if how != "half":
            assert before != trace, "nothing changed: the test shows nothing"

    def test_changed_positions_are_honoured(self):
        target = tiny()
        for positions in (12, 20, 9):
            target.config.max_position_embeddings = positions
            tokens = library.autoregressive_generate([3, 4], target, eos_tokens_id=NEVER, use_cache=True, engine=True)
            assert len(tokens) == positions - 2

    def test_a_call_in_another_thread_does_not_wait(self, pair, caplog):
        """The engine decodes one call at a time; another is decoded by the models' own forward."""
        caplog.set_level(logging.INFO, LOG)
        expected = call("autoregressive_generate", pair)
        said(caplog)
        with engine_decoding._in_use:
            found = []
            thread = threading.Thread(target=lambda: found.append(call("autoregressive_generate", pair)))
            thread.start()
            thread.join()
            assert found == [expected]
            assert said(caplog) == ["decoding by the models' own forward: the engine is decoding another call"]
        call("autoregressive_generate", pair)
        assert said(caplog) == ["decoding on the engine"]

    def test_after_an_error_it_decodes_again(self, pair):
        target = tiny()
        expected = call("speculative_generate", (pair[0], target))
        row = target.lm_head.weight[3].detach().clone()
        with torch.no_grad():
            target.lm_head.weight[3] = float("nan")
            for name in FUNCTIONS:
                with pytest.raises(ValueError, match="logits are NaN"):
                    call(name, (pair[0], target), engine=True)
            target.lm_head.weight[3] = row
        assert call("speculative_generate", (pair[0], target), engine=True) == expected

    def test_nan_of_a_drafter_is_found_by_its_entropy(self, pair):
        drafter = noisy(pair[1])
        with torch.no_grad():
            drafter.lm_head.weight[3] = float("nan")
        for engine in (True, False):
            with pytest.raises(ValueError, match="drafter's logits are NaN after 4 tokens"):
                call("speculative_generate", (drafter, pair[1]), use_egag=True, engine=engine)

    def test_models_are_left_as_they_are(self, pair):
        states = [{name: value.clone() for name, value in model.state_dict().items()} for model in pair]
        call("speculative_generate", pair, engine=True)
        for model, state in zip(pair, states, strict=True):
            assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
            assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
            assert not model._forward_hooks and "forward" not in vars(model)
