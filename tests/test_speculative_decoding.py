"""eagle_triton.speculative_decoding: drafts of a model, of n-grams, by entropy; processors, storages, caches, beams."""

from __future__ import annotations

import functools
import inspect
import io
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from eagle_triton import speculative_decoding as library
from eagle_triton.speculative_decoding import egag, printing
from eagle_triton.speculative_decoding.readers import CausalReader
from eagle_triton.speculative_decoding.steps import Text
from tests.failing import check_refused
from tests.tiny import random_matrices

VOCABULARY = 32
NEVER = 10**6  # an end token that no model emits


def traced(generate: Callable, *args: object, **options: object) -> tuple[list[library.StepRecord], list[int], float]:
    """The records of a generation's steps, its tokens and its rate."""
    trace: list[library.StepRecord] = []
    tokens, rate = generate(*args, trace=trace, **options)
    return trace, tokens, rate


class TableModel(torch.nn.Module):
    """A model whose next logits depend on the last token alone; remembers what it was given."""

    def __init__(self, table: Tensor | list) -> None:
        super().__init__()
        self.table = torch.as_tensor(table, dtype=torch.float32)
        self.config = SimpleNamespace(vocab_size=self.table.shape[1])
        self.given: list[list[int]] = []

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        self.given.append(input_ids[0].tolist())
        return SimpleNamespace(logits=self.table[input_ids])


def follows(*tokens: int, vocabulary: int = 10) -> TableModel:
    """Row t of the table says tokens[t]; the rows behind repeat the last."""
    row = [*tokens, *[tokens[-1]] * (vocabulary - len(tokens))]
    return TableModel(torch.nn.functional.one_hot(torch.tensor(row), vocabulary).float() * 20)


def tiny_llama(seed: int, layers: int = 1, vocab: int = VOCABULARY, family: str = "Llama", **more: object):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        **more,
    )  # fmt: skip
    return random_matrices(getattr(transformers, f"{family}ForCausalLM")(config), 0.3)


def tiny_t5(seed: int):
    torch.manual_seed(seed)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return random_matrices(transformers.T5ForConditionalGeneration(config), 0.3)


def kin(model, noise: float = 0.03):
    """Almost the same model: a drafter that is right now and then."""
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    torch.manual_seed(7)
    for parameter in other.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    return other


@pytest.fixture(scope="module")
def pair():
    target = tiny_llama(0)
    return kin(target), target


@pytest.fixture(scope="module")
def codec_pair():
    target = tiny_t5(0)
    return kin(target), target


@pytest.fixture(scope="module")
def alone(pair):
    """What the target says to each prompt."""
    return {
        tuple(prompt): library.autoregressive_generate(prompt, pair[1], max_gen_len=16, use_cache=True, engine=False)
        for prompt in prompts()
    }


@pytest.fixture(scope="module")
def codec_alone(codec_pair):
    return {
        tuple(prompt): library.autoregressive_generate_encoder_decoder(prompt, codec_pair[1], max_gen_len=10)
        for prompt in prompts()
    }


def prompts(count: int = 10) -> list[list[int]]:
    source = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCABULARY, (3 + number % 9,), generator=source).tolist() for number in range(count)]


EGAG_OPTIONS = [
    pytest.param({}, id="fixed"),
    pytest.param({"use_egag": True, "gamma_max": 6}, id="egag"),
    pytest.param({"use_egag": True, "gamma_min": 2, "gamma_max": 3, "egag_ema_beta": 0.9}, id="egag-ema"),
    pytest.param({"use_egag": True, "gamma_max": 8, "egag_mode": "stop"}, id="egag-stop"),
]


def test_names_and_defaults():
    assert library.__all__ == sorted(library.__all__)
    for name in library.__all__:
        assert getattr(library, name).__name__ == name and getattr(library, name).__doc__
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(library.speculative_generate).parameters.items()
    }
    assert list(defaults)[:5] == ["inputs", "drafter", "target", "tokenizer", "gamma"]
    assert isinstance(defaults.pop("logits_processor"), library.GreedyProcessor)
    expected = dict(
        gamma=5, use_egag=False, gamma_min=1, gamma_max=None, egag_ema_beta=0.0, max_gen_len=40, eos_tokens_id=1,
        pad_token_id=0, use_cache=False, skip_sample_adjustment=False, first_target=True, debug=False,
        egag_mode="gamma",
    )  # fmt: skip
    assert expected.items() <= defaults.items()
    codec = inspect.signature(library.speculative_generate_encoder_decoder).parameters
    assert [*codec, "engine"] == list(inspect.signature(library.speculative_generate).parameters)


class TestGreedyIsTheTargets:
    """Whatever is drafted, greedy output is that of the target alone; and drafts are accepted."""

    @pytest.mark.parametrize("use_cache", [False, True], ids=["", "cache"])
    @pytest.mark.parametrize("options", EGAG_OPTIONS)
    @pytest.mark.parametrize("codec", [False, True], ids=["decoder", "encoder-decoder"])
    def test_speculative(self, pair, alone, codec_pair, codec_alone, codec, options, use_cache):
        generate, models, want = library.speculative_generate, pair, alone
        own: dict = dict(max_gen_len=16, gamma=4, engine=False)
        if codec:
            generate, models, want = library.speculative_generate_encoder_decoder, codec_pair, codec_alone
            own = dict(max_gen_len=10)
        rates = []
        for prompt in prompts(4 if use_cache else 10):
            tokens, rate = generate(prompt, *models, use_cache=use_cache, **own, **options)
            assert tokens == want[tuple(prompt)] and (tokens[0] == 0 or not codec)
            rates.append(rate)
        assert 0.2 < sum(rates) / len(rates) < 1

    @pytest.mark.parametrize("storage", [library.NGramStorage, library.OneLevelNGramStorage], ids=["basic", "onelevel"])
    @pytest.mark.parametrize(("n", "filler", "stop"), [(2, 1, False), (3, 3, True), (5, 10, True), (3, 10, False)])
    def test_ngram_assisted(self, pair, alone, storage, n, filler, stop):
        accepted = 0
        for number, prompt in enumerate(prompts()):
            trace, tokens, _ = traced(
                library.ngram_assisted_speculative_generate, prompt, storage(n, VOCABULARY), pair[1], max_gen_len=16,
                filler_top_k=filler, stop_if_unknown=stop, use_cache=number % 2 == 0, engine=False,
            )  # fmt: skip
            assert tokens == alone[tuple(prompt)]
            accepted += sum(step.accepted for step in trace)
        assert accepted > 0

    def test_a_drafter_that_is_never_right(self):
        target, drafter = follows(1, 2, 3, 4, 5, 6, 7, 8, 9, 0), follows(9)
        drafter.table += 0.001 * torch.arange(10)
        tokens, rate = library.speculative_generate([0], drafter, target, max_gen_len=7, eos_tokens_id=NEVER)
        assert tokens == [1, 2, 3, 4, 5, 6, 7] and rate == 0.0

    def test_generate_of_transformers_agrees(self, pair, codec_pair):
        for prompt in prompts(4):
            given = torch.tensor([prompt])
            theirs = pair[1].generate(given, max_new_tokens=12, do_sample=False, attention_mask=given > 0)
            ours = library.autoregressive_generate(prompt, pair[1], max_gen_len=12, eos_tokens_id=NEVER)
            assert ours == theirs[0, len(prompt) :].tolist()
            theirs = codec_pair[1].generate(given, max_new_tokens=12, do_sample=False)[0].tolist()
            ours = library.autoregressive_generate_encoder_decoder(prompt, codec_pair[1], max_gen_len=12)
            assert ours == theirs


def laws() -> tuple[Tensor, Tensor]:
    """q and p [V, V], whose ratios are 0, a half or at least 1: a coin of 1/4 or 3/4 decides exactly."""
    q = torch.tensor([[4, 4, 0, 0], [0, 4, 2, 2], [4, 0, 4, 0], [2, 2, 0, 4]]) / 8
    p = torch.tensor([[2, 2, 2, 2], [2, 2, 0, 4], [2, 2, 4, 0], [4, 1, 3, 0]]) / 8
    return q, p


class Choices(library.MultinomialProcessor):
    """Every way that random choices can fall, with its probability: `law` runs a function through all of them."""

    def __init__(self) -> None:
        super().__init__(temperature=1)
        self.script: list[int] = []
        self.taken: list[int] = []
        self.pending: list[list[int]] = []
        self.weight = 1.0

    def choose(self, weights: list[float]) -> int:
        if len(self.taken) < len(self.script):
            choice = self.script[len(self.taken)]
        else:
            choice, *others = (place for place, weight in enumerate(weights) if weight > 1e-7)
            self.pending += [[*self.taken, other] for other in others]
        self.taken.append(choice)
        self.weight *= weights[choice]
        return choice

    def sample(self, probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.tensor([[self.choose(row)] for row in probs.tolist()])

    def coins(self, count: int, **_: object) -> Tensor:
        return torch.tensor([(0.25, 0.75)[self.choose([0.5, 0.5])] for _ in range(count)], dtype=torch.float64)

    def law(self, run: Callable[[], list[int]]) -> dict[tuple[int, ...], float]:
        found: dict[tuple[int, ...], float] = defaultdict(float)
        self.pending = [[]]
        while self.pending:
            self.script, self.taken, self.weight = self.pending.pop(), [], 1.0
            found[tuple(run())] += self.weight
        return found


def target_law(p: Tensor, first: int, count: int) -> dict[tuple[int, ...], float]:
    return {
        tokens: math.prod(float(p[before, token]) for before, token in itertools.pairwise((first, *tokens)))
        for tokens in itertools.product(range(len(p)), repeat=count)
    }


def distance(found: dict, expected: dict) -> float:
    return 0.5 * sum(abs(found.get(tokens, 0) - expected.get(tokens, 0)) for tokens in {*found, *expected})


class TestSampledLaws:
    """The joint distribution of three tokens, by every way that draws and coins can fall."""

    def law(self, monkeypatch, count: int = 3, **options: object) -> float:
        q, p = laws()
        drafter, target = TableModel(q.log()), TableModel(p.log())
        choices = Choices()
        monkeypatch.setattr(torch, "rand", choices.coins)
        proposed = []

        def run() -> list[int]:
            trace, tokens, _ = traced(
                library.speculative_generate, [0], drafter, target, gamma=2, logits_processor=choices,
                max_gen_len=count, eos_tokens_id=NEVER, first_target=False, **options,
            )  # fmt: skip
            proposed.append(trace[0].proposed)
            return tokens

        found = choices.law(run)
        assert sum(found.values()) == pytest.approx(1, abs=1e-5) and len(proposed) > 20
        self.proposed = set(proposed)
        return distance(found, target_law(p, 0, count))

    def test_speculative(self, monkeypatch):
        assert self.law(monkeypatch) < 1e-5 and self.proposed == {2}

    def test_egag(self, monkeypatch):
        assert self.law(monkeypatch, use_egag=True, egag_scale=3.5, egag_ema_beta=0.5) < 1e-5 and self.proposed == {1}

    def test_egag_that_stops(self, monkeypatch):
        """1 - sqrt(0.2 H) of the rows is .63, .54, .63 and .54: behind a 1 it stops."""
        found = self.law(monkeypatch, use_egag=True, egag_mode="stop", egag_stop_threshold=0.6)
        assert found < 1e-5 and self.proposed == {1, 2}

    def test_without_the_residual_it_is_another_distribution(self, monkeypatch):
        assert self.law(monkeypatch, 2, skip_sample_adjustment=True) > 0.02

    @pytest.mark.parametrize(
        ("storage", "count", "stop"),
        [
            pytest.param(library.NGramStorage, 3, True, id="basic"),
            pytest.param(library.NGramStorage, 2, False, id="basic-random"),
            pytest.param(library.OneLevelNGramStorage, 2, True, id="onelevel"),
        ],
    )
    def test_ngram_assisted(self, storage, count, stop):
        """The token at a mismatch is the one that was drawn, not a fresh draw, which would favour the draft."""
        _, p = laws()
        target, choices = TableModel(p.log()), Choices()
        proposed = []

        def run() -> list[int]:
            trace, tokens, _ = traced(
                library.ngram_assisted_speculative_generate, [1, 0, 3, 0], storage(2, 4), target, gamma=2,
                logits_processor=choices, max_gen_len=count, eos_tokens_id=NEVER, first_target=False,
                stop_if_unknown=stop,
            )  # fmt: skip
            proposed.append(trace[0].proposed)
            return tokens

        assert distance(choices.law(run), target_law(p, 0, count)) < 1e-5
        assert set(proposed) == {count - 1}

    def test_coins_of_torch(self):
        q, p = laws()
        drafter, target = TableModel(q.log()), TableModel(p.log())
        generator = torch.Generator().manual_seed(0)
        counts = torch.zeros(4)
        for _ in range(1000):
            tokens, _ = library.speculative_generate(
                [0], drafter, target, gamma=1, logits_processor=library.MultinomialProcessor(1), max_gen_len=2,
                eos_tokens_id=NEVER, first_target=False, generator=generator,
            )  # fmt: skip
            counts[tokens[0]] += 1
        assert (counts / counts.sum() - p[0]).abs().sum() / 2 < 0.03  # by q alone it would be 0.5

    def test_a_generator_repeats_the_text_on_any_path(self, pair):
        def text(seed: int, **options: object) -> list[int]:
            generator = torch.Generator().manual_seed(seed)
            return library.speculative_generate(
                [5, 6, 7], *pair, logits_processor=library.MultinomialProcessor(1), generator=generator, **options
            )[0]

        assert text(1) == text(1) == text(1, use_cache=True) != text(2)


class TestCounts:
    def test_an_identical_drafter_is_always_right(self, pair):
        for processor in (library.GreedyProcessor(), library.MultinomialProcessor(0.7), library.TopKProcessor(1, 4)):
            trace, tokens, rate = traced(
                library.speculative_generate, [4, 5, 6], pair[1], pair[1], gamma=4, max_gen_len=41,
                eos_tokens_id=NEVER, logits_processor=processor, generator=torch.Generator().manual_seed(0),
            )  # fmt: skip
            assert rate == 1.0 and len(tokens) == 41
            assert [step.emitted for step in trace] == [5] * 8  # tau is gamma + 1
            assert all(step == (None, None, 4, 4, 4, 5) for step in trace)

    @pytest.mark.parametrize(("length", "proposed"), [(95, 4), (96, 3), (97, 2), (98, 1), (99, 0)])
    @pytest.mark.parametrize("options", [{}, {"use_egag": True}], ids=["fixed", "egag"])
    def test_gamma_is_clipped_by_what_may_follow(self, length, proposed, options):
        """100 tokens in all: a step proposes no more than it can use."""
        model = follows(1, 2, 3, 4, 5, 6, 7, 8, 9, 0)
        model.table *= 3
        trace, tokens, rate = traced(
            library.speculative_generate, [0] * length, model, model, gamma=5, max_gen_len=100 - length,
            eos_tokens_id=NEVER, first_target=False, **options,
        )  # fmt: skip
        assert trace[0].proposed == proposed and len(tokens) == 100 - length
        assert rate == (1.0 if proposed else 0.0)
        assert Text([0] * length, 100, frozenset()).room == proposed
        if options:
            assert trace[0].gamma == (5 if proposed else None) and (trace[0].h_norm is None) == (not proposed)

    @pytest.mark.parametrize("max_gen_len", [0, 1])
    def test_nothing_proposed_is_a_rate_of_0(self, pair, max_gen_len):
        storage = library.NGramStorage(3, VOCABULARY)
        for tokens, rate in (
            library.speculative_generate([3, 4], *pair, max_gen_len=max_gen_len),
            library.ngram_assisted_speculative_generate([3, 4], storage, pair[1], max_gen_len=max_gen_len),
        ):
            assert len(tokens) == max_gen_len and rate == 0.0

    def test_rate_is_the_traces(self, pair):
        trace, tokens, rate = traced(library.speculative_generate, [9, 9, 4], *pair, use_egag=True, eos_tokens_id=NEVER)
        assert rate == sum(step.accepted for step in trace) / sum(step.proposed for step in trace)
        assert len(tokens) == 1 + sum(step.emitted for step in trace)
        for before, step in itertools.pairwise([None, *trace]):
            if step.h_norm is not None:
                assert 0 < step.h_norm == step.h_ema < 1
                assert step.gamma == egag.adaptive_gamma(step.h_norm, 1, 5) >= step.proposed
            assert before is None or before.proposed >= before.accepted

    def test_positions_of_a_model_bound_the_text(self, pair):
        short = tiny_llama(1)
        short.config.max_position_embeddings = 12
        prompt = [3, 4, 5, 6]
        assert len(library.autoregressive_generate(prompt, short, eos_tokens_id=NEVER)) == 8
        assert len(library.speculative_generate(prompt, pair[0], short, eos_tokens_id=NEVER)[0]) == 8
        alone = library.autoregressive_generate(prompt, pair[1], eos_tokens_id=NEVER)
        assert library.speculative_generate(prompt, short, pair[1], eos_tokens_id=NEVER)[0] == alone


class TestEnd:
    """The end token is returned, and nothing behind it."""

    target = (1, 2, 3, 4, 5, 6, 7, 8, 9, 0)

    @pytest.mark.parametrize(("eos", "expected"), [(3, [1, 2, 3]), ([9, 5], [1, 2, 3, 4, 5]), (1, [1])])
    @pytest.mark.parametrize("first_target", [True, False], ids=["first", ""])
    def test_everywhere(self, eos, expected, first_target):
        model = follows(*self.target)
        assert library.autoregressive_generate([0], model, eos_tokens_id=eos) == expected
        assert library.beam_search_generate([0], model, eos_tokens_id=eos, pad_token_id=NEVER) == expected
        for drafter in (model, follows(7), follows(1, 2, 9, 4, 5, 6)):
            tokens, _ = library.speculative_generate(
                [0], drafter, model, eos_tokens_id=eos, first_target=first_target, gamma=4
            )
            assert tokens == expected
        for stop in (False, True):
            storage = library.NGramStorage(3, 10)
            storage.initialize(torch.tensor([[0, 1, 2, 3, 4, 5, 6]]))
            tokens, _ = library.ngram_assisted_speculative_generate(
                [0], storage, model, eos_tokens_id=eos, first_target=first_target, stop_if_unknown=stop
            )
            assert tokens == expected

    def test_nothing_is_drafted_behind_it(self):
        model = follows(*self.target)
        trace, *_ = traced(library.speculative_generate, [0], model, model, eos_tokens_id=4, gamma=9)
        assert trace == [(None, None, 9, 3, 3, 3)]

    def test_first_token(self):
        """A text that ends with its first token draws no draft."""
        model, drafter = follows(1), follows(1)
        storage = library.NGramStorage(2, 10)
        assert library.speculative_generate([0], drafter, model) == ([1], 0.0) and not drafter.given
        assert library.ngram_assisted_speculative_generate([0], storage, model) == ([1], 0.0)
        assert storage.has_gram([0, 1])

    def test_of_an_encoder_decoder_pair(self, codec_pair):
        prompt = prompts(1)[0]
        alone = library.autoregressive_generate_encoder_decoder(
            prompt, codec_pair[1], max_gen_len=12, eos_tokens_id=NEVER
        )
        end = alone[5]
        expected = alone[: alone.index(end, 1) + 1]
        tokens, _ = library.speculative_generate_encoder_decoder(prompt, *codec_pair, eos_tokens_id=[NEVER, end])
        assert tokens == expected

    def test_the_start_token_of_a_decoder(self, codec_pair, monkeypatch):
        monkeypatch.setattr(codec_pair[1].config, "decoder_start_token_id", None)
        tokens = library.autoregressive_generate_encoder_decoder([3, 4], codec_pair[1], max_gen_len=2, pad_token_id=6)
        assert tokens[0] == 6 and len(tokens) == 3


class TestCache:
    """With a cache a model is given only tokens that it has not read, and says the same."""

    def given(self, model, monkeypatch) -> list[int]:
        lengths, forward = [], model.forward

        @functools.wraps(forward)
        def watched(*args, **kwargs):
            lengths.append(kwargs["input_ids" if "input_ids" in kwargs else "decoder_input_ids"].shape[1])
            return forward(*args, **kwargs)

        monkeypatch.setattr(model, "forward", watched)
        return lengths

    def test_each_model_is_given_new_tokens_only(self, pair, monkeypatch):
        targets = self.given(pair[1], monkeypatch)
        prompt = prompts(1)[0] * 3
        for drafter in (pair[0], kin(pair[1], noise=0.0)):
            drafts = self.given(drafter, monkeypatch)
            targets.clear()
            options = dict(gamma=3, use_cache=True, eos_tokens_id=NEVER, engine=False)
            trace, *_ = traced(library.speculative_generate, prompt, drafter, pair[1], **options)
            assert targets == [len(prompt), *[step.proposed + 1 for step in trace]]
            new = [len(prompt) + 1, *[1 + (step.accepted == step.proposed) for step in trace]]  # 2: its last draft too
            expected = [[first, 1, 1][: step.proposed] for first, step in zip(new, trace, strict=False)]
            assert drafts == [count for counts in expected for count in counts]

    def test_decoders_are_given_new_tokens_only(self, codec_pair, monkeypatch):
        drafts, targets = self.given(codec_pair[0], monkeypatch), self.given(codec_pair[1], monkeypatch)
        library.speculative_generate_encoder_decoder(
            [4, 5, 6], *codec_pair, gamma=3, use_cache=True, eos_tokens_id=NEVER, max_gen_len=20
        )
        assert targets[0] == 1 and max(targets) <= 4 and max(drafts) <= 2

    def test_same_tokens(self, pair, codec_pair):
        for prompt in prompts(2):
            for options in ({}, {"logits_processor": library.TopKNucleusProcessor(0.9, 8, 0.9)}):
                found = []
                for use_cache in (False, True):
                    seed = torch.Generator().manual_seed(len(prompt))
                    more = {**options, "generator": seed, "use_cache": use_cache, "max_gen_len": 10}
                    found.append((
                        library.autoregressive_generate(prompt, pair[1], **more),
                        library.speculative_generate(prompt, *pair, **more),
                        library.ngram_assisted_speculative_generate(
                            prompt, library.NGramStorage(3, VOCABULARY), pair[1], **more
                        ),
                        library.autoregressive_generate_encoder_decoder(prompt, codec_pair[1], **more),
                        library.speculative_generate_encoder_decoder(prompt, *codec_pair, **more),
                    ))  # fmt: skip
                assert found[0] == found[1]

    def test_sliding_windows_are_kept_whole(self):
        target = tiny_llama(3, family="Mistral", sliding_window=6)
        drafter = kin(target)
        for prompt in prompts(4):
            expected = library.autoregressive_generate(prompt, target, max_gen_len=24, eos_tokens_id=NEVER)
            tokens, rate = library.speculative_generate(
                prompt, drafter, target, max_gen_len=24, eos_tokens_id=NEVER, use_cache=True, engine=False
            )
            assert tokens == expected and rate > 0

    def test_recurrent_layers_are_refused_by_name(self, pair):
        pair_with_state = SimpleNamespace(layer_types=["full_attention", "linear_attention"], vocab_size=VOCABULARY)
        model = follows(1, 2, 3, vocabulary=VOCABULARY)
        model.config = pair_with_state
        with pytest.raises(ValueError, match=r"target has layers of the kind linear_attention.*use_cache=False"):
            library.speculative_generate([3], pair[0], model, use_cache=True)
        assert len(library.speculative_generate([3], model, model, max_gen_len=3, eos_tokens_id=NEVER)[0]) == 3

    def test_what_differs_from_the_text_before_is_pruned(self, pair):
        cached, plain = CausalReader(pair[1], use_cache=True), CausalReader(pair[1])
        for ids, rows in (([3, 4, 5, 6], 1), ([3, 9, 5, 6, 7], 2), ([3, 9, 5], 1), ([8, 9, 5], 3)):
            assert torch.allclose(cached.logits(ids, rows), plain.logits(ids, rows), atol=1e-4)

    def test_a_model_without_a_cache_is_refused(self):
        with pytest.raises(ValueError, match="no past_key_values"):
            library.autoregressive_generate([3], follows(1, 2), use_cache=True)


class TestPruneCache:
    def filled(self, length: int = 5) -> DynamicCache:
        cache = DynamicCache()
        for layer in range(2):
            cache.update(torch.arange(length).view(1, 1, length, 1) + layer, torch.ones(1, 1, length, 1), layer)
        return cache

    @pytest.mark.parametrize("discard", [0, 2, 5])
    def test_dynamic(self, discard):
        cache = self.filled()
        assert library.prune_cache(cache, discard) is cache and cache.get_seq_length() == 5 - discard
        for layer in range(2):
            assert cache.layers[layer].keys.flatten().tolist() == [place + layer for place in range(5 - discard)]
            assert cache.layers[layer].values.shape == (1, 1, 5 - discard, 1)

    @pytest.mark.parametrize("discard", [0, 3])
    def test_tuples(self, discard):
        keys = torch.arange(5).view(1, 1, 5, 1)
        cross = torch.ones(1, 1, 9, 1)
        pruned = library.prune_cache(((keys, keys, cross, cross),), discard)
        assert [part.shape[-2] for part in pruned[0]] == [5 - discard, 5 - discard, 9, 9]
        assert pruned[0][0].flatten().tolist() == list(range(5 - discard)) and keys.shape[-2] == 5

    def test_encoder_decoder(self):
        cache = EncoderDecoderCache(self.filled(), self.filled(7))
        assert library.prune_cache(cache, 2) is cache
        assert (cache.get_seq_length(), cache.cross_attention_cache.get_seq_length()) == (3, 7)

    def test_refusals(self):
        window = DynamicCache(config=tiny_llama(0, family="Mistral", sliding_window=6).config)
        check_refused(
            ("-1", lambda: library.prune_cache(self.filled(), -1)),
            ("6", lambda: library.prune_cache(self.filled(), 6)),
            ("layer 0 is a DynamicSlidingWindowLayer", lambda: library.prune_cache(window, 0)),
        )
        with pytest.raises(TypeError, match="list"):
            library.prune_cache([], 1)


class TestProcessors:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 3.0, 1.0]])

    PROCESSORS = (
        library.GreedyProcessor(), library.MultinomialProcessor(2), library.TopKProcessor(0.5, 2),
        library.NucleusProcessor(0.5, 0.8), library.TopKNucleusProcessor(2, 3, 0.7),
    )  # fmt: skip

    @pytest.mark.parametrize("processor", PROCESSORS, ids=lambda processor: type(processor).__name__)
    def test_logits_are_left_alone(self, processor):
        given = self.logits.clone()
        probs = processor(given)
        assert torch.equal(given, self.logits) and probs.dtype == torch.float32
        assert torch.allclose(probs.sum(-1), torch.ones(2))
        assert processor.sample(probs).shape == (2, 1) and processor(given[0]).shape == (4,)
        assert processor.sample(probs[None]).shape == (1, 2, 1)

    def test_greedy_is_one_hot(self):
        probs = library.GreedyProcessor(0.3)(self.logits)
        assert probs.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
        assert library.GreedyProcessor().sample(probs).tolist() == [[0], [1]]

    def test_temperature_comes_first(self):
        tempered = (self.logits / 0.5).softmax(-1)
        assert torch.allclose(library.MultinomialProcessor(0.5)(self.logits), tempered)
        # row 0 at temperature 0.5: .865, .117, .016, .002; at 1: .644, .237, .087, .032
        assert (library.NucleusProcessor(0.5, 0.8)(self.logits)[0] > 0).tolist() == [True, False, False, False]
        assert (library.NucleusProcessor(1, 0.8)(self.logits)[0] > 0).tolist() == [True, True, False, False]
        expected = tempered[0, :2] / tempered[0, :2].sum()
        assert torch.allclose(library.NucleusProcessor(0.5, 0.97)(self.logits)[0, :2], expected)

    def test_top_k_keeps_k_and_what_equals_the_last(self):
        kept = library.TopKProcessor(1, 1)(self.logits) > 0
        assert kept.tolist() == [[True, False, False, False], [False, True, True, False]]
        assert (library.TopKProcessor(1, 9)(self.logits) > 0).all()

    def test_top_p_is_of_what_top_k_left(self):
        # the two best have .731 and .269 of what is left, the best alone .644 of everything
        both = library.TopKNucleusProcessor(1, 2, 0.7)(self.logits)[0]
        assert both.tolist() == [1, 0, 0, 0] and library.NucleusProcessor(1, 0.7)(self.logits)[0, 1] > 0

    def test_temperature_0_is_greedy(self):
        logits = torch.tensor([[1.0, 3.0, 3.0, 3.0]])
        for processor in (
            library.MultinomialProcessor(0),
            library.TopKProcessor(0, 2),
            library.NucleusProcessor(0, 0.1),
            library.TopKNucleusProcessor(0, 2, 0.1),
        ):
            assert torch.equal(processor(logits), library.GreedyProcessor()(logits))
            assert torch.equal(processor(self.logits), library.GreedyProcessor()(self.logits))

    def test_ties_are_kept_as_transformers_keeps_them(self):
        logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, -1.0]])  # .457, three of .168, .041
        kept = {
            library.TopKProcessor(1, 2): [0, 1, 2, 3],
            library.NucleusProcessor(1, 0.5): [0, 3],
            library.NucleusProcessor(1, 0.7): [0, 2, 3],
            library.TopKNucleusProcessor(1, 2, 0.5): [0, 3],
        }
        for processor, tokens in kept.items():
            assert processor(logits)[0].nonzero()[:, 0].tolist() == tokens

    def test_draws_follow_a_generator(self):
        processor, probs = library.MultinomialProcessor(1), torch.tensor([[0.5, 0.25, 0.25, 0.0]]).expand(4000, 4)
        drawn = [processor.sample(probs, torch.Generator().manual_seed(seed)).flatten() for seed in (1, 1, 2)]
        assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
        assert (drawn[0].bincount(minlength=4) / 4000 - probs[0]).abs().max() < 0.03

    @pytest.mark.parametrize(
        ("make", "said"),
        [
            (lambda: library.MultinomialProcessor(-1), "temperature must be at least 0"),
            (lambda: library.GreedyProcessor(math.nan), "temperature"),
            (lambda: library.TopKProcessor(1, 0), "top_k must be at least 1, got 0"),
            (lambda: library.TopKProcessor(1, 2.7), "TopKProcessor: top_k must be an integer, got 2.7"),
            (lambda: library.NucleusProcessor(1, 0.0), "top_p must be above 0"),
            (lambda: library.TopKNucleusProcessor(1, 3, 1.5), "top_p"),
        ],
    )
    def test_refusals(self, make, said):
        with pytest.raises((ValueError, TypeError), match=said):
            make()

    def test_max_fn(self):
        x = torch.tensor([[0.25, -1.0, 0.75, 0.0], [0.0, 0.0, 0.0, -1.0]])
        assert library.max_fn(x).tolist() == [[0.25, 0, 0.75, 0], [0, 0, 0, 0]]
        assert library.max_fn(torch.tensor([1.0, 3.0, -4.0])).tolist() == [0.25, 0.75, 0]


class TestEGAG:
    @pytest.mark.parametrize(
        ("p", "entropy", "h_norm", "gamma"),
        [
            ((0.25, 0.25, 0.25, 0.25), math.log(4), 1.0, 1),
            ((1.0, 0.0, 0.0, 0.0), 0.0, 0.0, 6),
            ((0.97, 0.01, 0.01, 0.01), 0.16770, 0.12097, 5),
            ((0.7, 0.1, 0.1, 0.1), 0.94045, 0.67839, 1),
        ],
    )
    def test_numbers(self, p, entropy, h_norm, gamma):
        logits = torch.tensor(p).log()
        assert float(egag.entropy(logits)) == pytest.approx(entropy, abs=1e-5)
        assert float(library.normalized_entropy(logits)) == pytest.approx(h_norm, abs=1e-5)
        assert egag.EntropyGuide(library.EGAGConfig(1, 6)).gamma(logits) == gamma

    def test_bounds_and_scale(self):
        uniform = torch.zeros(32000)
        assert egag.EntropyGuide(library.EGAGConfig(2, 6)).gamma(uniform) == 2
        sharp = torch.zeros(32000)
        sharp[:8] = 40.0  # ln 8 nats
        assert egag.EntropyGuide(library.EGAGConfig(1, 6)).gamma(sharp) == 4
        assert egag.EntropyGuide(library.EGAGConfig(1, 6, scale=3.0)).gamma(sharp) == 1
        assert float(library.normalized_entropy(uniform, scale=3.0)) == 1.0
        nats = [0, 1, 2, 3, 5, 7, 10]
        assert [library.adaptive_gamma(h / math.log(32000), 1, 6) for h in nats] == [6, 5, 4, 4, 3, 1, 1]

    def test_moving_average(self):
        guide = egag.EntropyGuide(library.EGAGConfig(1, 6, ema_beta=0.9))
        sure, doubtful = torch.tensor([0.0, -math.inf, -math.inf, -math.inf]), torch.zeros(4)
        gammas, averages = [], []
        for logits in (sure, doubtful, doubtful, sure):
            gammas.append(guide.gamma(logits))
            averages.append(guide.h_ema)
        assert gammas == [6, 5, 4, 4] and averages == pytest.approx([0.0, 0.1, 0.19, 0.171])

    def test_it_starts_anew_with_each_generation_and_costs_no_forward(self, pair):
        drafter = TableModel(torch.linspace(0, 8, VOCABULARY).expand(VOCABULARY, VOCABULARY))
        options, traces = dict(use_egag=True, egag_ema_beta=0.5, eos_tokens_id=NEVER), []
        for _ in range(2):
            drafter.given.clear()
            traces.append(traced(library.speculative_generate, [4], drafter, pair[1], **options)[0])
            assert len(drafter.given) == sum(step.proposed for step in traces[-1])
        assert traces[0] == traces[1] and traces[0][0].h_ema == traces[0][0].h_norm

    def test_the_entropy_is_of_raw_logits(self):
        """Greedy q has entropy 0, which would always mean gamma_max."""
        drafter = follows(1, 2, 3)
        drafter.table /= 20
        options = dict(use_egag=True, gamma=6, eos_tokens_id=NEVER)
        trace, *_ = traced(library.speculative_generate, [0], drafter, drafter, **options)
        assert trace[0].h_norm > 0.9 and trace[0].gamma == 1

    def test_stop(self):
        """1 - sqrt(0.2 ln 8) = .355; rows 0 and 1 are sure, row 2 is not."""
        table = torch.full((8, 8), -50.0)
        table[0, 1] = table[1, 2] = 0.0
        table[2:] = 0.0
        table[2, 2] = 0.001
        model = TableModel(table)

        def first(**options: object) -> library.StepRecord:
            fixed = dict(use_egag=True, egag_mode="stop", gamma=5, eos_tokens_id=NEVER, first_target=False)
            return traced(library.speculative_generate, [0], model, model, **fixed, **options)[0][0]

        assert first(egag_stop_threshold=0.36)[2:] == (2, 2, 2, 3)
        assert first(egag_stop_threshold=0.35)[2:] == (5, 5, 5, 6)
        assert first(egag_stop_threshold=0.36, gamma_min=4)[2:] == (4, 4, 4, 5)
        assert first(egag_stop_threshold=0.35, egag_stop_lambda=0.3).gamma == 2

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"gamma": 0}, "gamma must be at least 1, got 0"),
            ({"gamma_min": 0}, "gamma_min must be at least 1"),
            ({"gamma_min": 3, "gamma_max": 2}, r"gamma_max must be at least gamma_min \(3\), got 2"),
            ({"egag_ema_beta": 1.0}, "egag_ema_beta must be at least 0 and below 1, got 1.0"),
            ({"egag_ema_beta": -0.1}, "egag_ema_beta"),
            ({"egag_scale": 0.0}, "egag_scale must be above 0"),
            ({"egag_mode": "often"}, "egag_mode must be .* got 'often'"),
            ({"egag_mode": "stop", "egag_ema_beta": 0.5}, "neither egag_ema_beta"),
            ({"egag_stop_threshold": 2}, "egag_stop_threshold"),
            ({"egag_stop_lambda": 0}, "egag_stop_lambda"),
        ],
    )
    def test_refusals(self, pair, codec_pair, options, said):
        for generate, models in (
            (library.speculative_generate, pair),
            (library.speculative_generate_encoder_decoder, codec_pair),
        ):
            with pytest.raises(ValueError, match=said):
                generate([3], *models, **options)


class TestVocabularies:
    def test_padding_is_no_difference(self):
        target = tiny_llama(0)
        drafter = tiny_llama(1, vocab=VOCABULARY + 8)
        tokenizer = [None] * (VOCABULARY - 2)  # its length is all that is asked for
        for models in ((drafter, target), (target, drafter)):
            for processor in (library.GreedyProcessor(), library.MultinomialProcessor(1.0)):
                tokens, _ = library.speculative_generate(
                    [3, 4], *models, tokenizer, logits_processor=processor, generator=torch.Generator().manual_seed(0)
                )
                assert tokens
                if isinstance(processor, library.GreedyProcessor):
                    assert tokens == library.autoregressive_generate([3, 4], models[1])

    def test_a_token_that_the_drafter_lacks(self):
        """The target alone knows tokens 8 and 9: behind them it goes on without drafts."""
        target, drafter = follows(1, 8, 1, 1, 1, 1, 1, 1, 9, 0), follows(1, 2, 3, vocabulary=8)
        trace, tokens, _ = traced(
            library.speculative_generate, [0], drafter, target, [None] * 8, max_gen_len=5, eos_tokens_id=NEVER
        )
        assert tokens == [1, 8, 9, 0, 1] and [step.proposed for step in trace] == [3, 0, 0, 0]

    def test_others_are_refused(self):
        target, drafter = follows(1, vocabulary=40), follows(1, vocabulary=32)
        with pytest.raises(ValueError, match=r"32 tokens, the target's 40.*universal assisted generation"):
            library.speculative_generate([0], drafter, target)
        with pytest.raises(ValueError, match="universal assisted generation"):
            library.speculative_generate([0], drafter, target, [None] * 36)


class TestStorages:
    def known(self, storage: library.INgramStorage, tokens: list[int]) -> tuple[int, bool]:
        token, known = storage.next_token(torch.tensor([tokens]))
        assert token.shape == known.shape == (1,) and known.dtype == torch.bool
        return int(token), bool(known)

    def test_basic_counts_contexts_of_one_token(self):
        basic, onelevel = library.NGramStorage(2, 10), library.OneLevelNGramStorage(2, 10)
        for storage in (basic, onelevel):
            storage.initialize(torch.tensor([[7, 8, 7]]))
            assert self.known(storage, [7, 8, 7]) == (8, True)
        three, one = library.NGramStorage(3, 10), library.OneLevelNGramStorage(3, 10)
        for storage in (three, one):
            storage.initialize(torch.tensor([[7, 8, 7]]))
        assert self.known(three, [5, 7]) == (8, True)  # backs off from (5, 7) to (7)
        assert not self.known(one, [5, 7])[1]

    def test_the_longest_context_decides(self):
        storage = library.NGramStorage(3, 10)
        storage.initialize(torch.tensor([[1, 2, 5, 3, 2, 6, 4, 2, 6]]))
        assert self.known(storage, [1, 2]) == (5, True) and self.known(storage, [9, 2]) == (6, True)

    def test_a_level_without_entries(self):
        """n of 5 and a prompt of three tokens: contexts of three and four tokens were never counted."""
        storage = library.NGramStorage(5, 10)
        storage.initialize(torch.tensor([[7, 8, 9]]))
        assert not self.known(storage, [7, 8, 9, 4])[1]
        assert not self.known(library.OneLevelNGramStorage(5, 10), [7, 8, 9, 4])[1]
        assert not self.known(library.NGramStorage(5, 10), [7])[1]

    def test_has_gram(self):
        storage = library.NGramStorage(3, 10)
        storage.initialize(torch.tensor([[7, 8, 9, 9]]))
        for gram, there in (([7, 8, 9], True), ([8, 9], True), ([9, 9], True), ([9, 8], False), ([7, 9], False)):
            assert storage.has_gram(gram) is storage.has_gram(torch.tensor(gram)) is there
        assert storage.has_gram([1, 7, 8, 9]) and not storage.has_gram([9]) and not storage.has_gram([])
        one = library.OneLevelNGramStorage(3, 10)
        one.initialize(torch.tensor([[7, 8, 9, 9]]))
        assert one.has_gram([7, 8, 9]) and not one.has_gram([8, 9])

    def test_an_update_needs_only_a_context(self):
        """n - 1 tokens before are enough."""
        storage = library.OneLevelNGramStorage(3, 10)
        storage.update(torch.tensor([[4, 5]]), torch.tensor([[6]]))
        assert self.known(storage, [1, 4, 5]) == (6, True)
        storage.update(torch.tensor([[5]]), torch.tensor([[6]]))
        assert not storage.has_gram([5, 6])

    def test_counts(self):
        storage = library.NGramStorage(2, 10)
        before = torch.tensor([[7]])
        storage.update(before, torch.tensor([[1, 1]]))
        storage.update(before, torch.tensor([[2]]))
        storage.update(before, torch.tensor([[2, 1, 3]]))
        assert storage._counts[7,] == {1: 3, 2: 2, 3: 1} and self.known(storage, [7]) == (1, True)
        storage.update(before, torch.tensor([[2]]))
        assert self.known(storage, [7]) == (1, True)  # 3 to 3: the first stays
        storage.update(before, torch.tensor([[3]]), weight=2.5)
        assert self.known(storage, [7]) == (3, True)

    def test_batches(self):
        storage = library.NGramStorage(2, 10)
        storage.initialize(torch.tensor([[1, 2], [3, 4]]))
        storage.update(torch.tensor([[5], [6]]), torch.tensor([[7], [8]]))
        tokens, known = storage.next_token(torch.tensor([[1], [3], [5], [6], [9]]))
        assert tokens[:4].tolist() == [2, 4, 7, 8] and known.tolist() == [True] * 4 + [False]

    def test_unknown_tokens_are_seeded(self):
        def draws(storage: library.INgramStorage) -> list[int]:
            return [self.known(storage, [0])[0] for _ in range(200)]

        storage = library.NGramStorage(3, 10, seed=5)
        first = draws(storage)
        torch.manual_seed(0)
        assert set(first) == set(range(10)) and draws(storage) != first
        storage.reset()
        assert draws(storage) == first == draws(library.OneLevelNGramStorage(3, 10, seed=5))
        assert draws(library.NGramStorage(3, 10, seed=6)) != first
        own = library.NGramStorage(3, 10, generator=torch.Generator().manual_seed(5))
        assert draws(own) == first and draws(own) != first
        own.reset()
        assert own.generator.initial_seed() == 5

    def test_refusals(self, pair):
        with pytest.raises(TypeError):
            library.INgramStorage(2, 10)
        storage = library.NGramStorage(2, VOCABULARY)
        check_refused(
            ("n must be at least 2.*got 1", lambda: library.NGramStorage(1, 10)),
            ("vocab_size", lambda: library.OneLevelNGramStorage(2, 0)),
            (r"must be \[B, T\]", lambda: storage.next_token(torch.tensor([1]))),
            (r"must be \[B, T\]", lambda: storage.initialize(torch.tensor([1]))),
            (r"must be \[B, T\]", lambda: storage.update(torch.tensor([[1]]), torch.tensor([1]))),
            ("2 sequences", lambda: storage.update(torch.tensor([[1], [2]]), torch.tensor([[1]]))),
        )
        for options, said in (
            ({"gamma": 0}, "gamma must be at least 1"),
            ({"filler_top_k": 0}, r"filler_top_k must lie in 1..32, got 0"),
            ({"filler_top_k": 33}, "filler_top_k"),
            ({"filler_weight": -1}, "filler_weight"),
            ({"ngramstorage": library.NGramStorage(2, 33)}, "33 tokens"),
        ):
            with pytest.raises(ValueError, match=said):
                library.ngram_assisted_speculative_generate(
                    [3], **{"ngramstorage": storage, "target": pair[1], **options}
                )


class TestNgramAssisted:
    cycle = (1, 2, 3, 4, 0, 0, 0, 0, 0, 0)

    def generate(self, storage: library.INgramStorage, **options: object):
        settings: dict = {"max_gen_len": 12, "eos_tokens_id": NEVER, "filler_top_k": 1, **options}
        generate = library.ngram_assisted_speculative_generate
        trace, tokens, rate = traced(generate, [0, 1], storage, follows(*self.cycle), **settings)
        assert tokens == list(itertools.islice(itertools.cycle([2, 3, 4, 0, 1]), settings["max_gen_len"]))
        return trace, rate

    def test_drafts_stop_where_nothing_is_known(self):
        trace, rate = self.generate(library.NGramStorage(2, 10), stop_if_unknown=True)
        assert trace[0] == (None, None, 5, 0, 0, 1) and rate == 1.0
        assert [step.proposed for step in trace] == [0, 0, 0, 5, 1] == [step.accepted for step in trace]

    def test_random_drafts_where_nothing_is_known(self):
        trace, rate = self.generate(library.NGramStorage(2, 10))
        assert trace[0].proposed == 5 and 0 < rate < 1

    def test_the_storage_remembers_between_generations(self):
        storage = library.NGramStorage(2, 10)
        self.generate(storage, stop_if_unknown=True)
        trace, _ = self.generate(storage, stop_if_unknown=True)
        assert trace[0].accepted == 5
        storage.reset()
        trace, _ = self.generate(storage, stop_if_unknown=True)
        assert trace[0].proposed == 0

    @pytest.mark.parametrize(("weight", "counts"), [(1, 1), (0.5, 0.5), (0, None)])
    def test_the_filler_counts_the_targets_guesses(self, weight, counts):
        """Of raw logits: greedy probabilities have no second best."""
        model = follows(*self.cycle)
        model.table += torch.linspace(1, 0, 10)  # behind the best come 0 and 1
        storage = library.NGramStorage(2, 10)
        library.ngram_assisted_speculative_generate(
            [2], storage, model, max_gen_len=2, filler_top_k=3, filler_weight=weight, eos_tokens_id=NEVER
        )
        assert storage._counts[2,] == {3: 1}  # the first token is the target's own, without a filler
        expected = {4: 1} if counts is None else {4: 1 + counts, 0: counts, 1: counts}
        assert storage._counts[3,] == expected

    def test_the_filler_of_one_counts_nothing(self):
        storage = library.NGramStorage(2, 10)
        self.generate(storage)
        assert all(len(counts) == 1 for counts in storage._counts.values())

    def test_a_storage_of_ones_own(self):
        """The five methods and the vocabulary's size are all that is asked for."""

        class Knows(library.INgramStorage):
            seen: list[list[int]]

            def __init__(self):
                self.vocab_size = 10

            def next_token(self, ids):
                return (ids[:, -1] + 1) % 5, torch.ones(1, dtype=torch.bool)

            def has_gram(self, ngram):
                return False

            def update(self, ids, next_tokens):
                pass

            def initialize(self, ids):
                self.seen = ids.tolist()

            def reset(self):
                pass

        storage = Knows()
        trace, rate = self.generate(storage, filler_top_k=3)
        assert rate == 1.0 and storage.seen == [[0, 1]] and trace[0].emitted == 6


class TestBeams:
    def test_one_beam_is_greedy(self, pair):
        for prompt in prompts():
            expected = library.autoregressive_generate(prompt, pair[1], max_gen_len=10)
            found = library.beam_search_generate(
                prompt, pair[1], max_gen_len=10, num_beams=1, top_k=1, alpha=0, pad_token_id=NEVER
            )
            assert found == expected

    def table(self) -> TableModel:
        p = torch.full((6, 6), 1e-6)
        p[0, 2], p[0, 3] = 0.6, 0.4
        p[2, 2:] = 0.25
        p[3, 4] = 1.0
        p[4, 1] = 0.9
        p[5, 5] = 1.0
        return TableModel(p.log())

    def test_a_beam_finds_what_greedy_misses(self):
        model = self.table()
        assert library.autoregressive_generate([0], model, max_gen_len=2)[0] == 2
        options: dict = {"max_gen_len": 2, "alpha": 0.0, "pad_token_id": NEVER}
        assert library.beam_search_generate([0], model, **options) == [3, 4]
        assert library.beam_search_generate([0], model, num_beams=1, top_k=2, **options)[0] == 2

    def test_exhaustive_beams_find_the_best(self):
        model = TableModel(torch.randn(4, 4, generator=torch.Generator().manual_seed(5)))
        log_probs = model.table.log_softmax(-1)
        for alpha in (0.0, 1.2):
            best, score = None, -math.inf
            for tokens in all_texts(end=1, vocabulary=4, most=3):
                total = sum(float(log_probs[a, b]) for a, b in itertools.pairwise((0, *tokens)))
                total /= ((5 + len(tokens)) / 6) ** alpha
                if total > score:
                    best, score = list(tokens), total
            found = library.beam_search_generate(
                [0], model, max_gen_len=3, num_beams=64, top_k=4, alpha=alpha, pad_token_id=NEVER
            )
            assert found == best

    def test_pad_ends_a_beam_and_is_not_returned(self):
        model = follows(4, 1, 2, 3, 5, 9, vocabulary=10)
        assert library.beam_search_generate([0], model, pad_token_id=9, eos_tokens_id=NEVER) == [4, 5]
        assert library.beam_search_generate([0], model, pad_token_id=9, eos_tokens_id=9) == [4, 5, 9]

    def test_duplicates_are_dropped(self, capsys):
        library.beam_search_generate([0], self.table(), max_gen_len=4, num_beams=6, top_k=4, debug=True)
        for step in capsys.readouterr().out.split("Beams:\n")[1:]:
            shown = [line.split(maxsplit=1)[1] for line in step.splitlines()]
            assert len(shown) == len(set(shown)) > 1

    def test_refusals(self, pair):
        for options, said in (
            ({"num_beams": 0}, "num_beams"),
            ({"top_k": 0}, r"top_k must lie in 1..32, got 0"),
            ({"top_k": 33}, "top_k"),
            ({"min_length": -1}, "min_length"),
            ({"alpha": math.inf}, "alpha"),
            ({"max_gen_len": -1}, "max_gen_len"),
        ):
            with pytest.raises(ValueError, match=said):
                library.beam_search_generate([3], pair[1], **options)
        assert library.beam_search_generate([3], pair[1], max_gen_len=0) == []


def all_texts(end: int, vocabulary: int, most: int) -> Iterator[tuple[int, ...]]:
    """Texts of `most` tokens, or shorter ones that end with `end`."""
    for length in range(1, most + 1):
        for tokens in itertools.product(range(vocabulary), repeat=length):
            if end not in tokens[:-1] and (length == most or tokens[-1] == end):
                yield tokens


@pytest.mark.parametrize("kind", ["plain", "speculative", "ngram", "codec", "codec-speculative"])
@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ([], {}, "at least one token"),
        ([3, 32], {}, r"tokens must lie in 0..31.*got 3..32"),
        ([-1], {}, "tokens must lie in"),
        ([[3]], {}, "list of token ids"),
        ([3.5], {}, r"list of token ids, got \[3.5\]"),
        ("34", {}, "list of token ids, got '34'"),
        ([3], {"max_gen_len": -1}, "max_gen_len must be at least 0, got -1"),
        ([3], {"max_gen_len": 2.5}, "max_gen_len must be an integer, got 2.5"),
        ([3], {"eos_tokens_id": None}, "eos_tokens_id must be a token id or a list of them, got None"),
        ([3], {"eos_tokens_id": "12"}, "eos_tokens_id must be a token id or a list of them, got '12'"),
        ([3], {"eos_tokens_id": [1.5]}, "eos_tokens_id must be a token id"),
        ([3], {"logits_processor": None}, "logits_processor must be a LogitsProcessor, .* got None"),
    ],
)
def test_bad_calls_are_refused_before_a_model_runs(pair, codec_pair, kind, prompt, options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        if kind == "plain":
            library.autoregressive_generate(prompt, pair[1], **options)
        elif kind == "speculative":
            library.speculative_generate(prompt, *pair, **options)
        elif kind == "ngram":
            storage = library.NGramStorage(3, VOCABULARY)
            library.ngram_assisted_speculative_generate(prompt, storage, pair[1], **options)
        elif kind == "codec":
            library.autoregressive_generate_encoder_decoder(prompt, codec_pair[1], **options)
        else:
            library.speculative_generate_encoder_decoder(prompt, *codec_pair, **options)


def test_what_is_no_model_storage_or_draft_is_refused(pair):
    speculative, assisted = library.speculative_generate, library.ngram_assisted_speculative_generate
    storage = library.NGramStorage(3, VOCABULARY)
    check_refused(
        ("the drafter must be a language model of transformers, got NoneType", lambda: speculative([3], None, pair[1])),
        ("the target must be a language model of transf.*, got list", lambda: speculative([3], pair[0], [pair[1]])),
        ("ngramstorage must be an NGramStorage", lambda: assisted([3], pair[0], pair[1])),
        ("gamma must be an integer, got 2.5", lambda: speculative([3], *pair, gamma=2.5)),
        ("gamma must be an integer, got 2.5", lambda: assisted([3], storage, pair[1], gamma=2.5)),
        error=TypeError,
    )


def test_a_prompt_longer_than_the_positions_is_refused(pair):
    long, storage = [3] * 129, library.NGramStorage(2, VOCABULARY)
    check_refused(
        (
            "129 tokens, more than the 128 positions of the target",
            lambda: library.ngram_assisted_speculative_generate(long, storage, pair[1]),
        ),
        ("positions of the drafter", lambda: library.speculative_generate(long, *pair)),
        ("positions of the model", lambda: library.autoregressive_generate(long, pair[1])),
    )


def test_nan_is_said():
    model = follows(1, 2)
    model.table[2] = math.nan
    with pytest.raises(ValueError, match="target's logits are NaN"):
        library.speculative_generate([0], follows(1, 2), model, eos_tokens_id=NEVER)


def test_models_are_left_as_they_are(pair):
    states = [{name: value.clone() for name, value in model.state_dict().items()} for model in pair]
    pair[0].train()
    try:
        library.speculative_generate([3, 4], *pair, use_cache=True, engine=False)
        assert pair[0].training and not pair[1].training
    finally:
        pair[0].eval()
    for model, state in zip(pair, states, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


class TestPrinting:
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda ids: [f"<{token}>" for token in ids])

    def test_colours(self, monkeypatch):
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("FORCE_COLOR", "1")
        out = io.StringIO()
        printing.speculative_step([3, 4, 5], 2, 7, self.tokenizer, file=out)
        assert out.getvalue() == "2 of 3 accepted: \033[32m<3> <4>\033[0m \033[31m<5>\033[0m \033[34m<7>\033[0m\n"
        monkeypatch.setenv("NO_COLOR", "1")
        out = io.StringIO()
        printing.speculative_step([3, 4, 5], 2, 7, self.tokenizer, file=out)
        assert out.getvalue() == "2 of 3 accepted: <3> <4> <5> <7>\n"

    def test_no_colours_where_there_is_no_terminal(self, monkeypatch):
        for name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name, raising=False)
        out = io.StringIO()
        printing.initial_step(3, file=out)
        printing.end_token_found(9, file=out)
        printing.beam_search_step([(-0.5, [3, 4]), (-1.0, [5])], self.tokenizer, file=out)
        assert out.getvalue().splitlines() == [
            "Target: 3", "End of sequence at position 9", "Beams:", "  -0.5000 <3> <4>", "  -1.0000 <5>",
        ]  # fmt: skip
        out.isatty = lambda: True
        printing.initial_step(3, file=out)
        assert out.getvalue().endswith("Target: \033[34m3\033[0m\n")

    def test_text(self):
        assert library.token_ids_to_string([3, 4]) == "3 4"
        assert library.token_ids_to_string([3, 4], self.tokenizer) == "<3> <4>"

    def test_debug_shows_each_step(self, capsys, monkeypatch):
        monkeypatch.setenv("NO_COLOR", "1")
        model = follows(1, 2, 3, 4, 5)
        library.autoregressive_generate([0], model, eos_tokens_id=2, debug=True)
        assert capsys.readouterr().out == "Target: 1\nTarget: 2\nEnd of sequence at position 2\n"
        library.speculative_generate(
            [0], follows(1, 2, 9), model, max_gen_len=4, eos_tokens_id=4, debug=True, tokenizer=None
        )
        shown = capsys.readouterr().out.splitlines()
        assert shown[:2] == ["Target: 1", "1 of 2 accepted: 2 9 3"] and shown[-1] == "End of sequence at position 4"
        storage = library.NGramStorage(2, 10)
        library.ngram_assisted_speculative_generate(
            [0, 1, 2, 0], storage, model, max_gen_len=3, eos_tokens_id=2, stop_if_unknown=True, debug=True
        )
        assert capsys.readouterr().out.splitlines() == [
            "Target: 1", "1 of 1 accepted: 2", "End of sequence at position 5",
        ]  # fmt: skip
