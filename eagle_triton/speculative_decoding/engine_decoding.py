"""Decode on the engine with the same tokens, rates and records as this package's functions.

A function says what it needs from the engine, and why the engine cannot do this, if that is known. `engine_for` lends
an engine, or logs the reason why the models' own forward decodes. The last engine is kept, because it has captured
graphs.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple

import torch

from eagle_triton.engine.scheduler.requests import Piece
from eagle_triton.families.causal_lm import check_causal_lm
from eagle_triton.families.reading.quantised import is_quantised_module
from eagle_triton.families.reading.quantised_modules import AS_PUBLISHED
from eagle_triton.inference.config import EAGLEConfig
from eagle_triton.inference.eagle_inference import EAGLEInference
from eagle_triton.inference.speculative_config import SpecMethod, SpeculativeConfig
from eagle_triton.operands.adaptive_length import EGAGConfig
from eagle_triton.speculative_decoding.logits_processor import GreedyProcessor, LogitsProcessor
from eagle_triton.speculative_decoding.readers import CausalReader
from eagle_triton.speculative_decoding.steps import StepRecord, Text

log = logging.getLogger(__name__)


class _Kept(NamedTuple):
    """An engine, and what it was made from."""

    drafter: Any
    target: Any
    config: EAGLEConfig
    max_positions: int | None
    inference: EAGLEInference


_kept: _Kept | None = None
_in_use = threading.Lock()


def release_engine() -> None:
    """Drop the functions' last engine, its caches and graphs, and its references to the models.

    Otherwise these live until a call with other models or options needs an engine. The next call makes a new engine.
    """
    global _kept
    _kept = None


@contextmanager
def engine_for(
    engine: bool | None,
    reason: str | None,
    target: CausalReader,
    drafter: CausalReader | None = None,
    egag: EGAGConfig | None = None,
    **speculative: Any,
) -> Iterator[EAGLEInference | None]:
    """An engine for these models, or None if their own forward must decode. The log says which, and why.

    engine: the functions' option. reason: why the engine cannot decode the call, None: no reason is known. egag: for
    the number of drafts. speculative: options of `SpeculativeConfig`; the engine drafts in every step. Raises
    ValueError with the reason for engine=True, TypeError unless `engine` is True, False or None.
    """
    if not (engine is None or isinstance(engine, bool)):
        raise TypeError(f"engine must be True, False or None, got {engine!r}")
    inference = None
    with ExitStack() as stack:
        if engine is False:
            reason = "engine=False"
        elif reason is None and not _in_use.acquire(blocking=False):
            reason = "the engine is decoding another call"
        elif reason is None:
            stack.callback(_in_use.release)
            inference, reason = _built(target, drafter, egag, speculative)
        if inference is not None:
            log.info("decoding on the engine")
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        elif engine:
            raise ValueError(f"engine=True: {reason}")
        else:
            log.info("decoding by the models' own forward: %s", reason)
        yield inference


def why_not_greedy(use_cache: bool, processor: LogitsProcessor, generator: torch.Generator | None) -> str | None:
    """Why the engine cannot decode as the functions do, None if it can."""
    if not use_cache:
        return "use_cache=False gives a model the whole text each time, and the engine always keeps a cache"
    if type(processor) is not GreedyProcessor:
        return (
            f"{type(processor).__name__} is not GreedyProcessor, and the engine draws no drafts from the drafter's "
            "distribution"
        )
    if generator is not None:
        return "a generator was given, and the engine draws nothing from it"
    return None


def why_not_drafts(first_target: bool, gamma: int, method: SpecMethod) -> str | None:
    """Why the engine cannot draft as a function does, None if it can."""
    if not first_target:
        return "first_target=False drafts before the target's first token"
    if gamma > method.most_drafts:
        return f"the engine drafts at most {method.most_drafts} tokens a step by method {method}, got {gamma}"
    return None


def _built(
    target: CausalReader, drafter: CausalReader | None, egag: EGAGConfig | None, speculative: dict[str, Any]
) -> tuple[EAGLEInference | None, str | None]:
    """The kept engine if it is for these models and they have not changed, else a new one; or why there is none."""
    global _kept
    models = None if drafter is None else drafter.model, target.model
    readers = [target] if drafter is None else [target, drafter]
    try:
        for reader in readers:
            check_causal_lm(reader.model, reader.role)
            if any(part.training and getattr(part, "attention_dropout", 0) for part in reader.model.modules()):
                return None, f"the {reader.role} is in training mode with attention dropout"
        config = EAGLEConfig(speculative=SpeculativeConfig(**speculative), egag=egag, fallback=False)
        if any(is_quantised_module(part) for reader in readers for part in reader.model.modules()):
            config = config.changed(activations=AS_PUBLISHED)  # as the models' own forwards compute
        wanted, kept = (*models, config, target.max_positions), _kept
        if kept is not None and kept[:-1] == wanted and not _change(kept.inference):
            return kept.inference, None
        _kept = kept = None  # first, to make room for another
        with torch.inference_mode(False):
            inference = EAGLEInference(*models, config)
    except (TypeError, ValueError) as error:
        return None, str(error)
    if change := _change(inference):
        return None, change
    _kept = _Kept(*wanted, inference)
    return inference, None


def _change(inference: EAGLEInference) -> str | None:
    """What changed in an engine's models since it was made, as a sentence; None if nothing did."""
    try:
        inference.engine.check_model()
    except RuntimeError as error:
        return str(error)
    return None


class EngineStep(NamedTuple):
    """Verified drafts and the step's record, None for the target's first token."""

    drafts: list[int]
    record: StepRecord | None


def continue_on_engine(inference: EAGLEInference, text: Text) -> None:
    """Append the target's own tokens until the text is finished. Raises ValueError for NaN logits."""
    with closing(_pieces(inference, text)) as pieces:
        for token in (token for piece in pieces for token in piece.tokens):
            text.add(token)


def steps_on_engine(
    inference: EAGLEInference, text: Text, gamma: int, egag: EGAGConfig | None = None
) -> Iterator[EngineStep]:
    """Extend the text until it is finished. Yields each step as the functions count it.

    gamma: drafts per step without EGAG. Raises ValueError for NaN logits.

    The engine drafts after end tokens and, without EGAG, beyond the end of the text; the functions do not.
    """
    with closing(_pieces(inference, text, report_drafts=True)) as pieces:
        for piece in pieces:
            if piece.tree is None:  # the token after the prompt
                text.add(piece.tokens[0])
                yield EngineStep([], None)
            else:
                yield _taken(piece, text, gamma, egag)
            if text.finished:
                return


def _taken(piece: Piece, text: Text, gamma: int | None, egag: EGAGConfig | None) -> EngineStep:
    """Extend the text by a step of the engine, without drafts that a function would not have made."""
    drafts = up_to_end((piece.drafts or [])[: text.room], text.end_tokens)
    accepted = min(piece.accepted, len(drafts))
    entropies: tuple[float | None, float | None] = None, None
    if egag is not None and piece.egag is not None:
        gamma = None
        if text.room:
            if math.isnan(piece.egag.h_norm):
                raise ValueError(f"the drafter's logits are NaN after {len(text.tokens)} tokens or more")
            at_end = bool(drafts) and (text.ends_with(drafts) or len(drafts) == text.room)
            unstopped = egag.mode == "stop" and at_end  # a function stops drafting there
            gamma, entropies = egag.gamma_max if unstopped else piece.egag.gamma, piece.egag[:2]
    following = [] if text.ends_with(drafts[:accepted]) else piece.tokens[accepted : accepted + 1]
    own = following[0] if following else None
    return EngineStep(drafts, text.take_step(drafts, accepted, own, gamma, entropies))


def up_to_end(drafts: Sequence[int], end_tokens: frozenset[int]) -> list[int]:
    """The drafts up to the first end token, which is kept."""
    first = next((place for place, token in enumerate(drafts) if token in end_tokens), len(drafts))
    return list(drafts[: first + 1])


def _pieces(inference: EAGLEInference, text: Text, report_drafts: bool = False) -> Generator[Piece, None, None]:
    """The engine's pieces with tokens."""
    length, vocabulary = len(text.tokens), inference.pair.view.vocab_size
    ends = [token for token in text.end_tokens if 0 <= token < vocabulary]
    stream = inference.stream([text.tokens], text.total - length, stop_token_ids=ends, report_drafts=report_drafts)
    with closing(stream):
        for piece in stream:
            if piece.completion is not None and piece.completion.error is not None:
                raise ValueError(piece.completion.error)
            if piece.tokens:
                yield piece
