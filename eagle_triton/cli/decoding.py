"""One prompt, decoded by a method: what it gave, step by step, and what that took.

The engine decodes wherever it offers a method; what it does not is decoded by the models' own forward, as
`eagle_triton.speculative_decoding` has it, and the answer says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from eagle_triton.cli.settings import ENGINE, METHODS, OWN_FORWARD, Settings
from eagle_triton.demo import DRAFT, PAIR
from eagle_triton.engine.drafts.counted import MOST_FILLERS, MOST_N
from eagle_triton.inference.config import EAGLEConfig
from eagle_triton.inference.eagle_inference import EAGLEInference
from eagle_triton.inference.session import Session
from eagle_triton.inference.speculative_config import SpecMethod, SpeculativeConfig
from eagle_triton.inference.text import TextStream
from eagle_triton.models.head_loading import fit_head, load_head
from eagle_triton.models.loading import is_saved_pair, locate, saved_target
from eagle_triton.models.mtp import MTP, has_mtp
from eagle_triton.speculative_decoding import logits_processor as processors
from eagle_triton.speculative_decoding.arguments import check_same_vocabulary, checked_prompt, longest
from eagle_triton.speculative_decoding.base_decoding import continue_text
from eagle_triton.speculative_decoding.egag import EGAGConfig, EntropyGuide
from eagle_triton.speculative_decoding.logits_processor import LogitsProcessor
from eagle_triton.speculative_decoding.ngram_assisted import NgramDecoding
from eagle_triton.speculative_decoding.ngram_storage import INgramStorage, NGramStorage, OneLevelNGramStorage
from eagle_triton.speculative_decoding.readers import CausalReader, max_positions
from eagle_triton.speculative_decoding.speculative_decoding import SpeculativeDecoding
from eagle_triton.speculative_decoding.steps import Text

NEEDS_DRAFTER = ("drafter", "speculative")
NEEDS_HEAD = ("eagle", "hybrid")
MOST_NASD_DRAFTS = SpecMethod.NASD.most_drafts
SUFFIX_DRAFTS = 8  # tokens a step that suffix and hybrid may draft from what occurred before
MOST_ENGINES = 8  # every method, and speculative with EGAG and without
LEAST_ROWS = 256  # of a sequence: one graph serves all shorter ones


@dataclass(frozen=True)
class Step:
    """One forward of the target behind the prompt, or its first token.

    tokens: what it gave: accepted drafts, then the target's own token, unless the text ended before. accepted,
    proposed: drafts, also those that an end cut off. drafts: the proposed chain, None where it was not asked for, or is
    none. h_norm, h_ema, gamma: EGAG's normalised entropy, its moving average and the drafts it asked for; without EGAG
    gamma is that of the settings, and None where it decides nothing.
    """

    tokens: tuple[int, ...]
    accepted: int = 0
    proposed: int = 0
    drafts: tuple[int, ...] | None = None
    h_norm: float | None = None
    h_ema: float | None = None
    gamma: int | None = None


@dataclass(frozen=True)
class Answer:
    """What a method gave. The first of the steps is the target's first token, which no draft could come before.

    seconds: from the prompt's tokens to the last token; first_token_seconds: to the first. target_forwards: the
    prompt's counted; drafter_forwards: passes of the drafter or the head. finished: "stop", "length" or "interrupted".
    engine: what decoded, `ENGINE` or `OWN_FORWARD`; notes: the reason, and whatever else one should know.
    """

    method: str
    tokens: tuple[int, ...]
    text: str
    steps: tuple[Step, ...]
    seconds: float
    first_token_seconds: float
    target_forwards: int
    drafter_forwards: int
    finished: str
    engine: str
    notes: tuple[str, ...] = ()

    @property
    def proposed(self) -> int:
        """Drafts that were verified."""
        return sum(step.proposed for step in self.steps)

    @property
    def accepted(self) -> int:
        """Drafts that were accepted."""
        return sum(step.accepted for step in self.steps)

    @property
    def acceptance_rate(self) -> float:
        """Accepted by proposed drafts, 0.0 if there were none."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def tau(self) -> float:
        """Tokens per verification, 0.0 if there was none."""
        verifications = len(self.steps) - 1
        return (self.accepted + verifications) / verifications if verifications > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, the prompt's time counted; 0.0 if there were none."""
        return len(self.tokens) / self.seconds if self.tokens else 0.0


Steps = Generator[tuple[Step, bool], None, None]  # each with whether it is the last


@dataclass
class _Counts:
    """What a decoding has taken so far, and how it ended."""

    target_forwards: int = 0
    drafter_forwards: int = 0
    finished: str = "interrupted"


@dataclass(frozen=True)
class _Places:
    """Where the target is, or itself, and its head: `MTP` for layers beside the target's weights, None for none."""

    target: str | nn.Module
    head: str | None
    eagle3: bool | None = None  # None: its weights tell


@dataclass(frozen=True)
class _Engine:
    """An EAGLEInference, and the method and options of it that cannot be changed."""

    method: str
    config: EAGLEConfig
    inference: EAGLEInference


@dataclass
class _Storage:
    """The n-gram storage of former answers, and the options that it was made with."""

    options: tuple[str, int]
    storage: INgramStorage


class Decoder:
    """Loads what a method needs when it is first asked for, and keeps it.

    target: a directory, a hub id, "demo" or "demo-gdn", or a causal language model. drafter: a directory, a hub id,
    "demo-draft", or a model with the target's vocabulary; read by the methods of `NEEDS_DRAFTER`, None: there is none.
    head: a directory or hub id of an EAGLE head, None: what lies beside the target, a head or layers for multi-token
    prediction; read by those of `NEEDS_HEAD`. device: None takes a GPU if there is one. dtype: None takes float32 on a
    CPU, else what the checkpoint says. Raises ValueError and FileNotFoundError when something is loaded.
    """

    def __init__(
        self,
        target: str | nn.Module = PAIR,
        drafter: str | nn.Module | None = DRAFT,
        head: str | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._target_given, self._drafter_given, self._head_given = target, drafter, head
        self._device, self._dtype = device, dtype
        self._engines: list[_Engine] = []  # the one that decoded last is the last
        self._storage: _Storage | None = None

    # --- what was loaded ---

    @cached_property
    def _plain(self) -> EAGLEInference:
        """The target alone."""
        config = EAGLEConfig(speculative=SpeculativeConfig(method="naive"), dtype=self._dtype)
        return EAGLEInference(None, self._places.target, config, self._device)

    @cached_property
    def _places(self) -> _Places:
        target, head = self._target_given, self._head_given
        if isinstance(target, nn.Module):
            return _Places(target, head)
        if head is None and is_saved_pair(target):
            return _Places(*locate(target, None, None))
        place = saved_target(target)
        return _Places(place, MTP if head is None and has_mtp(place) else head)

    @property
    def target(self) -> Any:
        """The target, a causal language model."""
        return self._plain.pair.target_model

    @property
    def device(self) -> torch.device:
        """Where the models lie."""
        return self._plain.pair.view.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the target's weights."""
        return self._plain.pair.view.dtype

    @property
    def tokenizer(self) -> Any:
        """The target's. Raises ValueError if it has none."""
        if self._plain.tokenizer is None:
            raise ValueError(f"target {self._target_given!s:.60}: no tokenizer lies beside it")
        return self._plain.tokenizer

    @cached_property
    def drafter(self) -> Any:
        """The drafter, a causal language model where the target lies. Raises ValueError if there is none."""
        if self._drafter_given is None:
            raise ValueError(
                "drafter: none was given; drafter and speculative need a model with the target's vocabulary"
            )
        if isinstance(self._drafter_given, nn.Module):
            return self._drafter_given
        options = SpeculativeConfig(method="draft_model", model=self._drafter_given)
        return EAGLEInference(None, self.target, options).pair.draft_model

    @cached_property
    def head(self) -> Any:
        """The target's head, or `MTP`. Raises ValueError if there is none."""
        places = self._places
        if places.head is None:
            raise ValueError(
                f"head: none lies beside the target {self._target_given!s:.60}; eagle and hybrid need a directory or a "
                "hub id of an EAGLE head"
            )
        if places.head == MTP:
            return MTP
        return fit_head(load_head(places.head, places.eagle3, self.target.config, {}), self.target)

    # --- decoding ---

    def load(self, method: str, settings: Settings) -> None:
        """Load what a method needs, so that its first answer does not wait for it. Raises as `decode`."""
        _check_method(method, settings)
        if _why_own_forward(method, settings) is None:
            self._engine(method, settings)
        else:
            _ = self.target, method in NEEDS_DRAFTER and self.drafter

    def decode(
        self,
        method: str,
        prompt_ids: Sequence[int],
        settings: Settings,
        on_step: Callable[[Step, str], None] | None = None,
        *,
        show_drafts: bool = False,
    ) -> Answer:
        """Answer a prompt. on_step(step, text) is called for each step with the text that it made certain.

        show_drafts: let steps say what was drafted, where that is a chain. A KeyboardInterrupt ends the answer, with
        finished "interrupted". Raises ValueError for an unknown method,
        settings that it cannot honour, a prompt without tokens or beyond the models' positions, and models that do
        not fit; RuntimeError if the target's logits are NaN.
        """
        _check_method(method, settings)
        reason = _why_own_forward(method, settings)
        counts, prompt = _Counts(), [int(token) for token in prompt_ids]
        stream = TextStream(self.tokenizer, prompt[-16:])
        self.load(method, settings)
        self.check_prompt(method, prompt)
        steps: list[Step] = []
        texts: list[str] = []
        first = 0.0
        began = time.perf_counter()
        if reason is None:
            source = self._on_engine(method, prompt, settings, counts, show_drafts)
        else:
            source = self._by_own_forward(method, prompt, settings, counts)
        try:
            with closing(source):
                for step, last in source:
                    first = first or time.perf_counter() - began
                    steps.append(step)
                    texts.append(stream.push(*step.tokens) + (stream.finish() if last else ""))
                    if on_step is not None:
                        on_step(step, texts[-1])
        except KeyboardInterrupt:
            counts.finished = "interrupted"
            texts.append(stream.finish())
        return Answer(
            method=method,
            tokens=tuple(token for step in steps for token in step.tokens),
            text="".join(texts),
            steps=tuple(steps),
            seconds=time.perf_counter() - began,
            first_token_seconds=first,
            target_forwards=counts.target_forwards,
            drafter_forwards=counts.drafter_forwards,
            finished=counts.finished,
            engine=ENGINE if reason is None else OWN_FORWARD,
            notes=() if reason is None else (f"decoded by the {OWN_FORWARD}: {reason}",),
        )

    def check_prompt(self, method: str, prompt: Sequence[int]) -> None:
        """ValueError for a prompt without tokens, or behind which the model has no position left."""
        if not prompt:
            raise ValueError("prompt: it is empty, at least one token expected")
        positions = max_positions(self.drafter if method == "drafter" else self.target)
        if positions is not None and len(prompt) >= positions:
            raise ValueError(
                f"prompt: {len(prompt)} tokens leave no room for new ones in the {positions} positions of the "
                f"{'drafter' if method == 'drafter' else 'target'}"
            )

    # --- on the engine ---

    def _engine(self, method: str, settings: Settings) -> EAGLEInference:
        """The EAGLEInference of a method and its options. The last `MOST_ENGINES` are kept, with their graphs."""
        config = _engine_config(method, settings)
        kept = next((one for one in self._engines if (one.method, one.config) == (method, config)), None)
        if kept is None:
            draft = None
            if method in NEEDS_HEAD:
                draft = self.head
            elif method == "speculative":
                draft = self.drafter
            model = self.drafter if method == "drafter" else self.target
            kept = _Engine(method, config, EAGLEInference(draft, model, config))
        self._engines = [*(one for one in self._engines if one is not kept), kept][-MOST_ENGINES:]
        return kept.inference

    def _on_engine(
        self, method: str, prompt: list[int], settings: Settings, counts: _Counts, show_drafts: bool
    ) -> Steps:
        inference = self._engine(method, settings)
        positions = inference.pair.max_positions
        if settings.reset_in_between:
            inference.forget_outputs()
        rows = max(LEAST_ROWS, 1 << (len(prompt) + settings.length - 1).bit_length())
        rows = rows if positions is None else min(rows, positions)
        with inference.session(rows, slots=1, report_drafts=show_drafts and method not in NEEDS_HEAD) as session:
            stop_ids = self._plain.pair.stop_ids
            session.submit(prompt, settings.length, stop_token_ids=stop_ids, **_sampling_options(settings))
            fixed_gamma = method == "ngram" or (method == "speculative" and not settings.egag)
            chain_of = settings.length if method not in NEEDS_HEAD else None
            yield from _steps_of_session(session, settings.gamma if fixed_gamma else None, chain_of, counts)

    # --- by the models' own forward ---

    def _by_own_forward(self, method: str, prompt: list[int], settings: Settings, counts: _Counts) -> Steps:
        own = self._own_forward(method, prompt, settings)
        drafter = own.decoding.drafter.model if isinstance(own.decoding, SpeculativeDecoding) else None
        with _counted(own.target.model, counts, "target_forwards"), _counted(drafter, counts, "drafter_forwards"):
            yield own.first_step(), own.text.finished
            while not own.text.finished:
                yield own.next_step(), own.text.finished
        counts.finished = "stop" if own.text.ended else "length"

    def _own_forward(self, method: str, prompt: list[int], settings: Settings) -> _OwnForward:
        alone = "drafter" if method == "drafter" else "target"
        target = CausalReader(getattr(self, alone), settings.cache, alone)
        readers = [target]
        processor, generator = _processor(settings), torch.Generator().manual_seed(settings.seed)
        decoding: SpeculativeDecoding | NgramDecoding | None = None
        if method == "speculative":
            drafter = CausalReader(self.drafter, settings.cache, "drafter")
            readers.append(drafter)
            check_same_vocabulary(drafter, target, self.tokenizer)
            guide = EntropyGuide(_egag_config(settings)) if settings.egag else None
            decoding = SpeculativeDecoding(drafter, target, processor, settings.gamma, guide, False, generator)
        elif method == "ngram":
            decoding = NgramDecoding(
                target, self._ngram_storage(settings, target.vocabulary), processor, settings.gamma,
                settings.top_k_filler, settings.filler_weight, True, generator,
            )  # fmt: skip
        total = longest(checked_prompt(prompt, *readers), settings.length, target)
        return _OwnForward(Text(prompt, total, self._plain.pair.stop_ids), target, processor, generator, decoding)

    def _ngram_storage(self, settings: Settings, vocabulary: int) -> INgramStorage:
        """The storage of former answers, forgotten where the settings say so or are others."""
        options = (settings.ngram_storage, settings.ngram_n)
        if self._storage is None or self._storage.options != options:
            kind = NGramStorage if settings.ngram_storage == "basic" else OneLevelNGramStorage
            self._storage = _Storage(options, kind(settings.ngram_n, vocabulary))
        elif settings.reset_in_between:
            self._storage.storage.reset()
        return self._storage.storage


@dataclass
class _OwnForward:
    """A text that a model's own forward continues, with drafts of `decoding` if there are any."""

    text: Text
    target: CausalReader
    processor: LogitsProcessor
    generator: torch.Generator
    decoding: SpeculativeDecoding | NgramDecoding | None

    @torch.inference_mode()
    def first_step(self) -> Step:
        """The target's first token."""
        if isinstance(self.decoding, NgramDecoding):
            self.decoding.begin(self.text, True, False, None)
        else:
            continue_text(self.text, self.target, self.processor, self.generator, False, 1)
        return Step((self.text.tokens[-1],), drafts=())

    @torch.inference_mode()
    def next_step(self) -> Step:
        """Drafts and a forward of the target, or its next token alone."""
        if self.decoding is None:
            return self.first_step()
        record = self.decoding.step(self.text, False, None)
        tokens, drafts = tuple(self.text.tokens[-record.emitted :]), tuple(self.decoding.drafts)
        return Step(tokens, record.accepted, record.proposed, drafts, record.h_norm, record.h_ema, record.gamma)


# --- where a method is decoded, and with what ---


def _check_method(method: str, settings: Settings) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if not settings.cache and method in ("eagle", "suffix", "hybrid"):
        raise ValueError(f"cache must be on for method {method}: only the engine has it, which always keeps a cache")


def _why_own_forward(method: str, settings: Settings) -> str | None:
    """Why the engine does not decode this, None if it does."""
    if not settings.cache:
        return "the engine always keeps a cache"
    if method == "ngram":
        for name, most in (("ngram_n", MOST_N), ("gamma", MOST_NASD_DRAFTS), ("top_k_filler", MOST_FILLERS)):
            if getattr(settings, name) > most:
                return f"{name} is {getattr(settings, name)}, and the engine counts n-grams with at most {most}"
    return None


def _engine_config(method: str, settings: Settings) -> EAGLEConfig:
    """Drafts that do not depend on measured times: no fallback to plain decoding."""
    if method in ("target", "drafter"):
        return EAGLEConfig(speculative=SpeculativeConfig(method="naive"))
    if method == "speculative":
        egag = _egag_config(settings) if settings.egag else None
        drafts = settings.gamma_max if settings.egag else settings.gamma
        options = SpeculativeConfig(method="draft_model", num_speculative_tokens=drafts)
        return EAGLEConfig(speculative=options, egag=egag, fallback=False)
    if method == "ngram":
        options = SpeculativeConfig(
            method="nasd",
            num_speculative_tokens=settings.gamma,
            ngram_storage=settings.ngram_storage,
            ngram_n=settings.ngram_n,
            filler_top_k=settings.top_k_filler,
            filler_weight=settings.filler_weight,
            reset_in_between=settings.reset_in_between,
        )
        return EAGLEConfig(speculative=options, fallback=False)
    if method == "suffix":
        return EAGLEConfig(
            speculative=SpeculativeConfig(method="suffix", num_speculative_tokens=SUFFIX_DRAFTS), fallback=False
        )
    return EAGLEConfig(suffix_drafts=SUFFIX_DRAFTS if method == "hybrid" else 0, fallback=False)


def _sampling_options(settings: Settings) -> dict[str, Any]:
    """Of `Session.submit`."""
    if settings.greedy:
        return {"temperature": 0.0}
    return {**settings.processor_arguments, "seed": settings.seed}


def _processor(settings: Settings) -> LogitsProcessor:
    if settings.greedy:
        return processors.GreedyProcessor()
    kinds: dict[str, Any] = {
        "multinomial": processors.MultinomialProcessor,
        "topk": processors.TopKProcessor,
        "nucleus": processors.NucleusProcessor,
        "topknucleus": processors.TopKNucleusProcessor,
    }
    return kinds[settings.processor](**settings.processor_arguments)


def _egag_config(settings: Settings) -> EGAGConfig:
    return EGAGConfig(
        settings.egag_gamma_min, settings.gamma_max, settings.egag_ema, settings.egag_scale, settings.egag_mode
    )


# --- steps ---


def _steps_of_session(session: Session, gamma: int | None, length: int | None, counts: _Counts) -> Steps:
    """Those of its one request. length: of the answer where drafts are chains, None: they are trees."""
    counts.target_forwards, emitted = 1, 0
    while not session.idle:
        for piece in session.step():
            ended = piece.completion is not None
            if piece.completion is not None:
                if piece.completion.error is not None:
                    raise RuntimeError(piece.completion.error)
                counts.finished = piece.completion.finished
            counts.drafter_forwards += piece.draft_forwards
            verified: dict[str, Any] = {}
            if piece.tree is not None:  # else it is the token behind the prompt
                counts.target_forwards += 1
                verified = dict(accepted=piece.accepted, proposed=piece.proposed, gamma=gamma)
                if ended:  # what an end cut off does not count
                    verified["accepted"] = min(piece.accepted, len(piece.tokens))
                    if length is not None:
                        on_draft = counts.finished == "stop" and len(piece.tokens) <= piece.accepted
                        room = len(piece.tokens) if on_draft else length - emitted
                        verified["proposed"] = min(piece.proposed, room)
                if piece.drafts is not None:
                    verified["drafts"] = tuple(piece.drafts[: verified["proposed"]])
                if piece.egag is not None and not math.isnan(piece.egag.h_norm):
                    verified |= dict(h_norm=piece.egag.h_norm, h_ema=piece.egag.h_ema, gamma=piece.egag.gamma)
            emitted += len(piece.tokens)
            yield Step(tuple(piece.tokens), **verified), ended


@contextmanager
def _counted(model: nn.Module | None, counts: _Counts, name: str) -> Iterator[None]:
    """Count the forwards of a model inside the block."""
    if model is None:
        yield
        return

    def count(*_: Any) -> None:
        setattr(counts, name, getattr(counts, name) + 1)

    hook = model.register_forward_pre_hook(count)
    try:
        yield
    finally:
        hook.remove()
