"""Turns a prepared call of `generate` into a plan for the engine, or into reasons for the original."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import logits_process as processors

from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.patching import Fallback

OF_TOKENS = (EosTokenCriteria, MaxLengthCriteria)  # stopping criteria that the engine follows itself


WARPERS = {  # logits processors with one number, by the name that it has here and there
    processors.TemperatureLogitsWarper: "temperature",
    processors.TopKLogitsWarper: "top_k",
    processors.TopPLogitsWarper: "top_p",
    processors.MinPLogitsWarper: "min_p",
}
BLIND = (*OF_TOKENS, MaxTimeCriteria, StopStringCriteria)  # stopping criteria that do not look at scores


@contextmanager
def _added_to(reasons: list[str]) -> Iterator[None]:
    """Add the reasons of a `Fallback` that ends the block."""
    try:
        yield
    except Fallback as fallback:
        reasons += fallback.args


class Call(NamedTuple):
    """A call of `generate`, prepared by transformers.

    input_ids: int [B, L]; L may be 0 if embeddings [B, n, H] are given, which the target reads instead.
    attention_mask: which of these the target sees; None: all. brings_processors: logits_processor has some of the
    caller's, which may be in another order than transformers' own.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    embeddings: Tensor | None
    logits_processor: Any
    stopping_criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: Any | None
    brings_processors: bool

    @property
    def followed(self) -> StoppingCriteriaList:
        """The stopping criteria that the engine follows itself."""
        return StoppingCriteriaList(rule for rule in self.stopping_criteria if type(rule) in OF_TOKENS)

    @property
    def asks(self) -> bool:
        """Whether other criteria must be called after each token."""
        return len(self.followed) < len(self.stopping_criteria)


@dataclass(frozen=True)
class Plan:
    """What to decode: prompts int64 [L] on the host, without masked tokens, each with `new_tokens` more, or fewer if
    one of `stop_ids` comes.

    The first `held_back` new tokens are no stop tokens. pad: for a row that has ended before others; None: the target's
    tokens. embeddings: read by the target instead of the prompts' first tokens, [n, H] each. logits: of each new token,
    by row of the batch, as steps report them; None: not wanted. on_host: a HostChooser must choose the tokens.
    """

    prompts: list[Tensor]
    new_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    held_back: int = 0
    pad: int | None = None
    embeddings: list[Tensor] | None = None
    logits: list[list[Tensor]] | None = None
    on_host: bool = False

    @property
    def options(self) -> Plan:
        """The same without prompts, and without anything that belongs to one of them."""
        return replace(self, prompts=[], embeddings=None, logits=None if self.logits is None else [])


def read_prompts(view: ModelView, input_ids: Tensor, attention_mask: Tensor | None, new_tokens: int) -> list[Tensor]:
    """The prompts of a plan from input_ids int [B, L] and a mask [B, L]. Raises `Fallback` as `read_plan` does."""
    _check_length(view, input_ids.shape[1] + new_tokens)
    mask = None if attention_mask is None else attention_mask.cpu()
    ids = input_ids.to("cpu", torch.int64)
    return _kept_of(ids, _read_mask(view, ids, mask, new_tokens)[0])


def read_plan(view: ModelView, known_reasons: Sequence[str], call: Call) -> Plan:
    """The plan of a call.

    Raises `Fallback` with all reasons why the engine cannot decode it, `known_reasons` among them.
    """
    reasons: list[str] = []
    input_ids, embeddings, config, rules = call.input_ids, call.embeddings, call.config, call.stopping_criteria
    tokens = input_ids.ndim == 2 and input_ids.dtype in (torch.int32, torch.int64) and len(input_ids) > 0
    if not tokens or not (input_ids if embeddings is None else embeddings).shape[1]:
        raise Fallback(*known_reasons, f"input_ids of {input_ids.dtype} {list(input_ids.shape)}")
    length, vocabulary = input_ids.shape[1], view.vocab_size
    if embeddings is not None:
        reasons += _embeddings_reasons(view, embeddings, input_ids)
        if not length:  # drafts need some ids
            input_ids = input_ids.new_zeros(embeddings.shape[:2])
    kept: list[Tensor] | None = None
    padding, holes = [0] * len(input_ids), False
    sampling, held_back, held_ids = SamplingParams(), 0, frozenset[int]()
    host_reasons = ["logits_processor"] if call.brings_processors else []  # what needs a HostChooser

    limits = [rule.max_length for rule in rules if type(rule) is MaxLengthCriteria]
    if not limits:
        reasons.append("stopping_criteria without a length")
    reasons += [f"max_length={limit!r}" for limit in limits if not hasattr(limit, "__index__")]
    new_tokens = max((0 if reasons else int(min(limits))) - length, 1)  # stopping criteria are asked after a token
    with _added_to(reasons):
        _check_length(view, input_ids.shape[1] + new_tokens)
    with _added_to(reasons):
        mask = None if call.attention_mask is None else call.attention_mask.cpu()
        kept, padding, holes = _read_mask(view, input_ids, mask, new_tokens)

    finite = processors.InfNanRemoveLogitsProcessor  # changes no finite logits; `decode` ensures that they are finite
    active = [processor for processor in call.logits_processor if type(processor) is not finite]
    try:
        sampling, held_back, held_ids = _read_processors(active, config.do_sample, padding, vocabulary)
    except Fallback as fallback:
        host_reasons += fallback.args
        for processor in active:  # the first one has hidden the others' reasons
            with _added_to(host_reasons):
                _read_processors([processor], config.do_sample, padding, vocabulary)
        host_reasons = list(dict.fromkeys(host_reasons))
    if holes and sampling.repetition_penalty != 1:
        host_reasons.append("repetition_penalty that counts masked tokens")
    if not length and sampling.repetition_penalty != 1:
        host_reasons.append("repetition_penalty of inputs_embeds without input_ids")

    pads = any(hasattr(rule, "eos_token_id") for rule in rules)
    pad = getattr(config, "_pad_token_tensor", None)
    if pads and pad is None:
        reasons.append("eos_token_id without pad_token_id")
    ends = [rule.eos_token_id.flatten().tolist() for rule in rules if type(rule) is EosTokenCriteria]
    stop_ids = frozenset(token for ids in ends for token in ids if 0 <= token < vocabulary)  # others never come
    held_back = min(max(held_back - length, 0), new_tokens)
    if held_back and {token for token in held_ids if token >= 0} != stop_ids:
        host_reasons.append("a minimal length of other tokens than stopping_criteria look at")

    if sampling.forbids_all(vocabulary, held_ids if held_back else ()):  # each way of decoding has its own end for it
        host_reasons.append("no token that is allowed")

    wanted = bool(config.return_dict_in_generate) and (config.output_scores or config.output_logits)
    if wanted and config.output_scores and not all(type(rule) in BLIND for rule in rules):
        host_reasons.append("output_scores that stopping_criteria may look at")
    needs_each_token = call.asks or call.streamer is not None  # each token must be known before the next
    if config.remove_invalid_values and needs_each_token:  # an invalid one may come too late to begin again
        host_reasons.append("remove_invalid_values beside a streamer or stopping_criteria")
    if getattr(config, "prefill_chunk_size", None) and not any("prefill_chunk_size" in name for name in known_reasons):
        reasons += [] if view.by_token else ["prefill_chunk_size over recurrent layers"]
        reasons += [] if embeddings is None else ["prefill_chunk_size of inputs_embeds"]  # read whole at every chunk
    if host_reasons and view.ranks is not None:
        reasons += [f"{reason}, of a model that several ranks share" for reason in host_reasons]
    if known_reasons or reasons:
        raise Fallback(*known_reasons, *reasons)
    plan = Plan(
        _kept_of(input_ids.to("cpu", torch.int64), kept),
        new_tokens,
        sampling,
        stop_ids,
        held_back,
        int(pad) if pads and pad is not None else None,
        None if embeddings is None else _kept_of(embeddings, kept),
        [[] for _ in input_ids] if wanted or config.remove_invalid_values else None,
    )
    if not host_reasons:
        return plan
    stops = stop_ids if len(plan.prompts) == 1 else frozenset[int]()  # several rows all go on until the last one ends
    return replace(plan, sampling=SamplingParams(), stop_ids=stops, held_back=0, logits=None, on_host=True)


def _kept_of(rows: Tensor, kept: list[Tensor] | None) -> list[Tensor]:
    """Each row's elements at the kept places; None: all."""
    return list(rows) if kept is None else [row[places] for row, places in zip(rows, kept, strict=True)]


def _check_length(view: ModelView, most: int) -> None:
    """Raise `Fallback` if the model rotates a text of `most` tokens by other frequencies. Padding counts: the original
    drops its cache at that width."""
    if view.short_rope_length is not None and most > view.short_rope_length:
        raise Fallback(
            f"a text that may have more than {view.short_rope_length} tokens, where longrope rotates in another way"
        )


def _embeddings_reasons(view: ModelView, given: Tensor, ids: Tensor) -> list[str]:
    """Why only the original supports the embeddings of a prompt with these ids."""
    reasons = []
    if given.ndim != 3 or (given.shape[2], given.dtype, given.device) != (view.hidden_size, view.dtype, view.device):
        reasons.append(f"inputs_embeds of {given.dtype} {list(given.shape)} on {given.device}")
    if ids.shape[1] and ids.shape != given.shape[:2]:  # the original counts positions by these ids
        reasons.append(f"inputs_embeds beside input_ids of shape {list(ids.shape)}")
    if view.ranks is not None:
        reasons.append("inputs_embeds of a model that several ranks share")
    if view.embedding_scale != 1.0 or view.embedding_norm is not None:
        reasons.append("inputs_embeds of a model that scales or norms its embeddings")
    return reasons


def _read_mask(
    view: ModelView, input_ids: Tensor, attention_mask: Tensor | None, new_tokens: int
) -> tuple[list[Tensor] | None, list[int], bool]:
    """The places in each row that are not masked (None: all), the number of masked tokens that each row begins with,
    and whether there are others.

    The original counts positions without masked tokens, and nothing sees them. So those that a row begins with may be
    left out, and the others too if all layers see all tokens. Raises `Fallback` for any other mask.
    """
    nothing = None, [0] * len(input_ids), False
    if attention_mask is None:
        return nothing
    if attention_mask.shape != input_ids.shape:
        raise Fallback(f"attention_mask of shape {list(attention_mask.shape)}")
    kept = attention_mask.bool()
    if (attention_mask == 1).all():
        return nothing
    if ((attention_mask != 0) & (attention_mask != 1)).any():
        raise Fallback("attention_mask with other values than 0 and 1")
    if not kept.any(1).all():
        raise Fallback("attention_mask of a row with nothing but padding")
    if not kept[:, -1].all():
        raise Fallback("attention_mask with padding on the right")
    holes = bool((kept[:, :-1] & ~kept[:, 1:]).any())
    if holes and not view.sees_all(kept.shape[1] + new_tokens):
        raise Fallback("attention_mask with holes over layers that do not see all tokens")
    return [row.nonzero()[:, 0] for row in kept], kept.int().argmax(1).tolist(), holes


def _read_processors(
    prepared: Sequence[Any], do_sample: bool, padding: Sequence[int], vocabulary: int
) -> tuple[SamplingParams, int, frozenset[int]]:
    """The sampling by logits processors, the length up to which tokens are held back, and those tokens.

    Raises `Fallback` for a processor that the engine does not have, and for a number that it does not take.
    """
    options: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    bias: dict[int, float] = {}
    held_back, held_ids = 0, frozenset[int]()
    for processor in prepared:
        kind = type(processor)
        if kind in WARPERS:
            options[WARPERS[kind]] = getattr(processor, WARPERS[kind])
        elif kind is processors.RepetitionPenaltyLogitsProcessor:
            if any(padding) and processor.prompt_ignore_length is None:
                raise Fallback("repetition_penalty that counts padding")
            if any(map(math.isfinite, bias.values())):
                raise Fallback("repetition_penalty after sequence_bias")
            options["repetition_penalty"] = processor.penalty
        elif kind in (processors.SequenceBiasLogitsProcessor, processors.NoBadWordsLogitsProcessor):
            for sequence, value in processor.sequence_bias.items():
                name = "sequence_bias" if kind is processors.SequenceBiasLogitsProcessor else "bad_words_ids"
                if len(sequence) != 1 or sequence[0] >= vocabulary or not value < math.inf:
                    raise Fallback(f"{name} of {list(sequence)}")
                bias[sequence[0]] = bias.get(sequence[0], 0.0) + value
        elif kind is processors.SuppressTokensLogitsProcessor:
            suppressed = processor.suppress_tokens.flatten().tolist()
            bias |= {token: -math.inf for token in suppressed if 0 <= token < vocabulary}
        elif kind in (processors.MinLengthLogitsProcessor, processors.MinNewTokensLengthLogitsProcessor):
            if kind is processors.MinLengthLogitsProcessor:
                least = processor.min_length
            else:
                least = processor.prompt_length_to_skip + processor.min_new_tokens
            ends = processor.eos_token_id.flatten().tolist()
            held_back, held_ids = max(held_back, least), held_ids.union(end for end in ends if end < vocabulary)
        elif kind is not processors.LogitNormalization:  # it changes no distribution
            raise Fallback(kind.__name__)
    try:
        sampling = SamplingParams(logit_bias=bias, **options)
    except (ValueError, TypeError) as error:  # transformers takes more, such as an infinite temperature
        raise Fallback(str(error)) from error
    return sampling, held_back, held_ids
