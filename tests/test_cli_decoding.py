"""eagle_triton.cli: settings, and answers of every method with the figures of their steps."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from eagle_triton.cli.decoding import MAX_ENGINES, Decoder
from eagle_triton.cli.settings import METHODS, ON_ENGINE, Settings
from eagle_triton.comparison.answer import ENGINE, OWN_FORWARD, Step
from eagle_triton.demo import demo_directory, demo_prompts
from eagle_triton.engine.step_cache import StepCache
from eagle_triton.models.heads import Eagle1Head, Eagle3Head
from eagle_triton.speculative_decoding import (
    NGramStorage,
    autoregressive_generate,
    ngram_assisted_speculative_generate,
    speculative_generate,
)

LENGTH = 20
short = functools.partial(Settings, length=LENGTH)
SAMPLED = Settings(length=7, processor="topknucleus", temperature=0.8, top_k=20, top_p=0.9)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Decoder(device=device, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompt(decoder) -> list[int]:
    return decoder.tokenizer(demo_prompts(2)[1]).input_ids


@pytest.fixture(scope="module")
def alone(decoder, prompt) -> list[int]:
    end = decoder.tokenizer.eos_token_id
    return autoregressive_generate(prompt, decoder.target, LENGTH, eos_tokens_id=end, use_cache=True)


class TestSettings:
    def test_temperature_0_is_greedy_whatever_the_filters(self):
        settings = Settings(processor="topknucleus", temperature=0.0, top_k=3, top_p=0.1)
        assert settings.greedy and not Settings(processor="topknucleus", top_k=3, top_p=0.1).greedy

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            (dict(length=0), "length must be a whole number from 1"),
            (dict(length=True), "length must be a whole number, got True"),
            (dict(gamma=0), "gamma must be a whole number from 1 to 63, got 0"),
            (dict(gamma=64), "gamma must be a whole number from 1 to 63, got 64"),
            (dict(gamma="4"), "gamma must be a whole number, got '4'"),
            (dict(egag=1), "egag must be True or False, got 1"),
            (dict(egag_gamma_min=0), "egag_gamma_min must be a whole number from 1"),
            (dict(egag_gamma_min=5), r"egag_gamma_min must be at most 4 \(gamma, as egag_gamma_max is None\), got 5"),
            (dict(egag_gamma_min=3, egag_gamma_max=2), r"egag_gamma_min must be at most 2 \(egag_gamma_max\), got 3"),
            (dict(egag_gamma_max=0), "egag_gamma_max must be a whole number"),
            (dict(egag_ema=1.0), "egag_ema must be a finite number at least 0 and below 1, got 1.0"),
            (dict(egag_ema=float("nan")), "egag_ema must be a finite number"),
            (dict(egag_scale=0.0), "egag_scale must be a finite number above 0"),
            (dict(egag_mode="other"), "egag_mode must be one of gamma, stop, got 'other'"),
            (dict(egag_mode="stop", egag_ema=0.5), "egag_ema must be 0.0 with egag_mode stop"),
            (dict(egag_mode="stop", egag_scale=3.0), "egag_scale must be None with egag_mode stop"),
            (dict(processor="beam"), "processor must be one of greedy, multinomial"),
            (dict(processor="topk"), "top_k must be given for processor topk"),
            (dict(processor="topk", top_k=0), "top_k must be a whole number from 1"),
            (dict(top_k=3), "top_k=3 is not read by processor greedy, which takes temperature"),
            (dict(processor="nucleus", top_p=0.0), "top_p must be a finite number above 0 and at most 1, got 0.0"),
            (dict(processor="nucleus", top_p="a"), "top_p must be a number, got 'a'"),
            (dict(temperature=-1.0), "temperature must be a finite number at least 0, got -1.0"),
            (dict(temperature=float("inf")), "temperature must be a finite number at least 0, got inf"),
            (dict(ngram_storage="two"), "ngram_storage must be one of basic, onelevel, got 'two'"),
            (dict(ngram_n=1), "ngram_n must be a whole number from 2"),
            (dict(top_k_filler=0), "top_k_filler must be a whole number from 1"),
            (dict(filler_weight=-1), "filler_weight must be a finite number at least 0, got -1"),
            (dict(filler_weight=2, top_k_filler=1), "filler_weight must be 1 with top_k_filler 1"),
            (dict(seed=-1), "seed must be a whole number from 0"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
    )
    def test_what_cannot_be_is_named(self, options, error):
        with pytest.raises((ValueError, TypeError), match=f"^{error}"):
            Settings(**options)


VARIANTS = [
    *[pytest.param(method, {}, id=method) for method in METHODS if method != "drafter"],
    pytest.param("speculative", dict(egag=True, egag_gamma_max=6, egag_ema=0.9), id="egag"),
    pytest.param("speculative", dict(egag=True, egag_mode="stop"), id="egag-stop"),
    pytest.param("ngram", dict(ngram_storage="onelevel", ngram_n=2, top_k_filler=1), id="onelevel"),
    pytest.param("speculative", dict(egag=True, cache=False), id="egag-no-cache"),
    pytest.param("target", dict(cache=False), id="target-no-cache"),
    pytest.param("speculative", dict(cache=False), id="speculative-no-cache"),
    pytest.param("ngram", dict(cache=False), id="ngram-no-cache"),
]


class TestAnswers:
    @pytest.mark.parametrize(("method", "options"), VARIANTS)
    def test_greedy_is_the_target_alone_and_the_figures_are_of_the_steps(self, decoder, prompt, alone, method, options):
        shown: list[tuple[Step, str]] = []
        answer = decoder.decode(method, prompt, short(**options), lambda *step: shown.append(step))
        assert list(answer.tokens) == alone and answer.finished == "length"
        assert [step for step, _ in shown] == list(answer.steps)
        assert "".join(text for _, text in shown) == answer.text == decoder.tokenizer.decode(alone)
        first, *rest = answer.steps
        assert (first.tokens, first.proposed) == ((alone[0],), 0)
        assert all(len(step.tokens) == step.accepted + 1 for step in rest[:-1])
        assert all(len(step.tokens) <= step.accepted + 1 and step.accepted <= step.proposed for step in rest)
        assert answer.accepted == sum(step.accepted for step in rest)
        assert answer.target_forwards == len(answer.steps)
        assert 0 < answer.first_token_seconds <= answer.seconds
        assert answer.tokens_per_second == LENGTH / answer.seconds
        if method == "target":
            assert answer.tau == 1 and answer.acceptance_rate == answer.proposed == answer.drafter_forwards == 0
        else:
            assert answer.tau > 1.2 and 0 < answer.acceptance_rate <= 1
            assert (answer.drafter_forwards == 0) == (method in ("ngram", "suffix"))
        assert (answer.engine == OWN_FORWARD) == bool(answer.notes)

    def test_drafter(self, decoder, prompt, alone):
        answer = decoder.decode("drafter", prompt, Settings(length=8))
        end = decoder.tokenizer.eos_token_id
        assert list(answer.tokens) == autoregressive_generate(prompt, decoder.drafter, 8, eos_tokens_id=end)
        assert list(answer.tokens) != alone[:8] and answer.engine == ENGINE

    @pytest.mark.parametrize("method", ["speculative", "ngram"])
    def test_the_engines_steps_are_those_of_the_models_own_forward(self, decoder, prompt, method):
        ours = decoder.decode(method, prompt, short(), show_drafts=True)
        theirs = decoder.decode(method, prompt, short(cache=False))
        assert (ours.engine, theirs.engine) == (ENGINE, OWN_FORWARD) and "keeps a cache" in theirs.notes[0]
        assert ours.steps[1:-1] == theirs.steps[1:-1] and len({step.accepted for step in ours.steps}) > 2
        assert all(step.drafts[: step.accepted] == step.tokens[: step.accepted] for step in ours.steps[1:-1])

    @pytest.mark.parametrize(
        ("method", "chain"),
        [("suffix", True), ("block", True), ("block_tree", False), ("eagle", False), ("hybrid", False)],
    )
    def test_drafts_are_shown_where_they_are_a_chain(self, decoder, prompt, method, chain):
        answer = decoder.decode(method, prompt, short(), show_drafts=True)
        for step in answer.steps[1:-1]:
            assert (step.drafts is None) == (not chain)
            assert not chain or (len(step.drafts) == step.proposed and step.drafts[: step.accepted] == step.tokens[:-1])

    def test_egag_asks_for_as_many_drafts_as_its_entropy_allows(self, decoder, prompt):
        settings = short(egag=True, egag_gamma_min=2, egag_gamma_max=6, egag_ema=0.5, egag_scale=3.0)
        ours = decoder.decode("speculative", prompt, settings, show_drafts=True)
        theirs = decoder.decode("speculative", prompt, dataclasses.replace(settings, cache=False))
        assert (ours.engine, theirs.engine) == (ENGINE, OWN_FORWARD) and ours.tokens == theirs.tokens
        for step in ours.steps[1:]:
            assert step.gamma == min(max(int((1 - step.h_ema) * 6 + 1e-9), 2), 6) and step.proposed <= step.gamma
        assert len({step.gamma for step in ours.steps[1:]}) > 1
        for name in ("h_norm", "h_ema", "gamma"):
            assert getattr(ours.steps[1], name) == pytest.approx(getattr(theirs.steps[1], name), abs=1e-4)

    def test_speculative_as_functions_counts_the_same(self, decoder, prompt):
        trace: list = []
        options = dict(gamma=4, eos_tokens_id=decoder.tokenizer.eos_token_id, max_gen_len=LENGTH, trace=trace)
        tokens, rate = speculative_generate(
            prompt, decoder.drafter, decoder.target, use_egag=True, gamma_max=6, egag_ema_beta=0.9, **options
        )
        settings = short(egag=True, egag_gamma_max=6, egag_ema=0.9, cache=False)
        answer = decoder.decode("speculative", prompt, settings)
        assert list(answer.tokens) == tokens and answer.acceptance_rate == rate
        assert [step.gamma for step in answer.steps[1:]] == [step.gamma for step in trace]
        h_norms = [step.h_norm for step in trace]
        assert [step.h_norm for step in answer.steps[1:]] == pytest.approx(h_norms, abs=1e-4)
        assert answer.drafter_forwards == answer.proposed

    def test_ngrams_as_functions_count_the_same(self, decoder, prompt):
        trace: list = []
        tokens, rate = ngram_assisted_speculative_generate(
            prompt, NGramStorage(3, decoder.target.config.vocab_size), decoder.target, gamma=4, max_gen_len=LENGTH,
            eos_tokens_id=decoder.tokenizer.eos_token_id, stop_if_unknown=True, trace=trace,
        )  # fmt: skip
        answer = decoder.decode("ngram", prompt, short(cache=False))
        assert list(answer.tokens) == tokens and answer.acceptance_rate == rate
        assert [step.accepted for step in answer.steps[1:]] == [step.accepted for step in trace]

    def test_a_seed_gives_the_targets_own_sample_on_the_engine(self, decoder, prompt):
        kept = {decoder.decode(method, prompt, SAMPLED).tokens for method in METHODS if method != "drafter"}
        kept.add(decoder.decode("speculative", prompt, dataclasses.replace(SAMPLED, egag=True)).tokens)
        assert len(kept) == 1
        other = decoder.decode("target", prompt, dataclasses.replace(SAMPLED, seed=7))
        assert other.tokens not in kept

    @pytest.mark.parametrize("method", ["target", "speculative", "ngram"])
    def test_a_seed_repeats_without_a_cache(self, decoder, prompt, method):
        settings = dataclasses.replace(SAMPLED, cache=False)
        first, again = (decoder.decode(method, prompt[:20], settings).tokens for _ in range(2))
        other = decoder.decode(method, prompt[:20], dataclasses.replace(settings, seed=3)).tokens
        assert first == again != other

    @pytest.mark.parametrize(
        "options", [dict(ngram_n=6), dict(gamma=16), dict(top_k_filler=65)], ids=lambda options: next(iter(options))
    )
    def test_what_the_engine_cannot_count_is_decoded_without_it(self, decoder, prompt, alone, options):
        answer = decoder.decode("ngram", prompt, short(**options))
        assert list(answer.tokens) == alone and answer.engine == OWN_FORWARD
        assert f"{next(iter(options))} is {next(iter(options.values()))}, but the engine" in answer.notes[0]

    @pytest.mark.parametrize("method", ["ngram", "suffix"])
    def test_what_former_answers_taught_is_forgotten_in_between(self, decoder, prompt, method):
        def forwards(reset: bool) -> list[int]:
            settings = short(reset_in_between=reset)
            return [decoder.decode(method, prompt, settings).target_forwards for _ in range(2)]

        first, again = forwards(True)
        assert first == again
        assert forwards(False)[1] < first

    def test_an_end_token_ends_the_answer(self, decoder, prompt, alone, monkeypatch):
        pair = dataclasses.replace(decoder._plain.pair, stop_ids=frozenset([alone[9]]))
        monkeypatch.setattr(decoder._plain, "pair", pair)
        end = alone.index(alone[9]) + 1
        for method in ("target", "speculative", "ngram", "eagle", "suffix"):
            answer = decoder.decode(method, prompt, short())
            assert list(answer.tokens) == alone[:end] and answer.finished == "stop", method

    @pytest.mark.parametrize("method", ["target", "speculative", "ngram", "eagle"])
    def test_an_interrupt_ends_the_answer_and_the_next_one_is_whole(self, decoder, prompt, alone, method):
        def stop(step: Step, text: str) -> None:
            nonlocal seen
            seen += len(step.tokens)
            if seen > 5:
                raise KeyboardInterrupt

        seen = 0
        answer = decoder.decode(method, prompt, short(), stop)
        assert answer.finished == "interrupted" and list(answer.tokens) == alone[:seen] and seen < LENGTH
        assert answer.target_forwards >= len(answer.steps)
        whole = decoder.decode(method, prompt, short())
        assert list(whole.tokens) == alone and whole.finished == "length"

    def test_an_interrupt_inside_a_step(self, decoder, prompt, alone, monkeypatch):
        calls, step_of = 0, StepCache.of

        def interrupted(*args):
            nonlocal calls
            calls += 1
            if calls == 3:
                raise KeyboardInterrupt
            return step_of(*args)

        monkeypatch.setattr(StepCache, "of", interrupted)
        answer = decoder.decode("speculative", prompt, short())
        assert answer.finished == "interrupted" and list(answer.tokens) == alone[: len(answer.tokens)]
        assert list(decoder.decode("speculative", prompt, short()).tokens) == alone

    def test_one_token(self, decoder, prompt):
        for method in METHODS:
            answer = decoder.decode(method, prompt, Settings(length=1))
            assert len(answer.tokens) == len(answer.steps) == 1 and answer.tau == 0, method

    def test_positions_end_an_answer(self, decoder, prompt):
        long = (prompt * 40)[: decoder.target.config.max_position_embeddings - 2]
        for method in ("target", "ngram"):
            answer = decoder.decode(method, long, short())
            assert len(answer.tokens) == 2 and answer.finished == "length"


@pytest.mark.parametrize(("part", "kind"), [("eagle3", Eagle3Head), ("eagle1", Eagle1Head)])
def test_a_head_of_either_kind_for_the_demo(part, kind):
    assert isinstance(Decoder(head=str(demo_directory(part)), device="cpu").head, kind)


class TestRefusals:
    def test_of_a_prompt(self, decoder, prompt):
        long = (prompt * 40)[: decoder.target.config.max_position_embeddings]
        for method in ("target", "ngram", "drafter"):
            with pytest.raises(
                ValueError, match="prompt: 2048 tokens leave no room for new ones in the 2048 positions"
            ):
                decoder.decode(method, long, short())
            with pytest.raises(ValueError, match="prompt: must have at least one token"):
                decoder.decode(method, [], short())

    def test_of_methods(self, decoder, prompt):
        with pytest.raises(ValueError, match="method must be one of target, .*, got 'beam'"):
            decoder.decode("beam", prompt, short())
        for method in ON_ENGINE:
            with pytest.raises(ValueError, match=f"cache must be on for method {method}"):
                decoder.decode(method, prompt, short(cache=False))

    def test_a_target_without_a_head(self, decoder, prompt):
        alone = Decoder(decoder.target)
        with pytest.raises(ValueError, match="head: none is beside the target"):
            _ = alone.head
        with pytest.raises(ValueError, match="no tokenizer"):
            alone.decode("target", prompt, short())

    def test_a_block_drafter_that_is_none_or_is_called_a_head(self, decoder):
        with pytest.raises(ValueError, match="block_drafter: none was given; block and block_tree need"):
            _ = Decoder(decoder.target, block_drafter=None).block_drafter
        with pytest.raises(ValueError, match="block' is a block drafter, which is not part of an EaModel: give it as"):
            _ = Decoder(decoder.target, head="demo-block").head
        with pytest.raises(ValueError, match="eagle3' is not a block drafter: it lacks fc, hidden_norm"):
            _ = Decoder("demo", block_drafter="demo").block_drafter

    def test_a_device_that_is_not_there(self):
        if not torch.cuda.is_available():
            with pytest.raises(ValueError, match="there is no GPU here"):
                _ = Decoder(device="cuda").target

    def test_a_path_that_does_not_exist(self):
        with pytest.raises(FileNotFoundError):
            _ = Decoder("./nowhere").target


def test_a_recurrent_target_drafts_with_its_own_layers():
    decoder = Decoder("demo-gdn", dtype=torch.float32)
    prompt = decoder.tokenizer(demo_prompts(1)[0]).input_ids
    plain, eagle = (decoder.decode(method, prompt, Settings(length=12)) for method in ("target", "eagle"))
    assert eagle.tokens == plain.tokens and eagle.tau > 1


def test_engines_are_kept_for_options_that_take_turns(decoder):
    """Going to and fro between options captures nothing anew, and what is kept is bounded."""
    plain, egag = Settings(length=4), Settings(length=4, egag=True)
    first = decoder._engine("speculative", plain)
    assert decoder._engine("speculative", egag) is not first
    assert decoder._engine("speculative", plain) is first
    for gamma in range(5, 5 + MAX_ENGINES):
        decoder._engine("speculative", Settings(length=4, gamma=gamma))
    assert len(decoder._engines) == MAX_ENGINES
    assert decoder._engine("speculative", plain) is not first
