"""`generate` of a plain Hugging Face model on the engine: same arguments, same tokens.

The model's own `generate` reads, checks and prepares a call, so that defaults, warnings and errors are its own. Only
the loop over tokens is the engine's. What the engine does not do sends the whole call to the original, by name.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import logits_process as processors

from eagle_triton.adapters.causal_lm import body_path
from eagle_triton.adapters.module_reader import attribute_at
from eagle_triton.adapters.refusal import UnsupportedModelError
from eagle_triton.drop_in.patching import Fallback, Seam
from eagle_triton.engine.batch import Batch
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.pages import CacheFullError
from eagle_triton.engine.prefill import NaNLogitsError
from eagle_triton.engine.ranks import Ranks
from eagle_triton.engine.requests import NAN, Request
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.tree_spec import TreeSpec

Steps = Generator[list[tuple[int, list[int]]], None, None]  # of a batch: rows and the tokens that they got

OWN_METHODS = (
    "generate",
    "_sample",
    "_prepare_generation_config",
    "_validate_model_kwargs",
    "_update_model_kwargs_for_generation",
    "prepare_inputs_for_generation",
)
"""Methods of transformers that a model must not have of its own: the engine calls them, or stands in their place."""

ARGUMENTS = frozenset(
    {"self", "inputs", "generation_config", "stopping_criteria", "streamer", "synced_gpus", "use_model_defaults"}
)
"""Arguments of `generate` that the engine's way takes; any other one that is set goes to the original."""

HONOURED = frozenset(
    {
        "bad_words_ids", "bos_token_id", "do_sample", "eos_token_id", "max_length", "max_new_tokens", "max_time",
        "min_length", "min_new_tokens", "min_p", "num_return_sequences", "pad_token_id", "renormalize_logits",
        "repetition_penalty", "return_dict_in_generate", "sequence_bias", "stop_strings", "suppress_tokens",
        "temperature", "top_k", "top_p",
    }
)  # fmt: skip
"""Fields of a GenerationConfig that decide what is decoded, and how."""

NO_EFFECT = frozenset(
    {
        "assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind", "cache_config",
        "compile_config", "continuous_batching_config", "decoder_start_token_id", "disable_compile", "early_stopping",
        "length_penalty", "low_memory", "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "speculation_type", "target_lookbehind", "transformers_version",
    }
)  # fmt: skip
"""Fields that only ways of decoding look at which another argument asks for: beams, assistants, static caches."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "assistant_early_exit": (),
    "begin_suppress_tokens": (),
    "cache_implementation": ("dynamic",),
    "constraints": (),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "is_assistant": (False,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_logits": (False,),
    "output_scores": (False,),
    "penalty_alpha": (0,),
    "prefill_chunk_size": (),
    "prompt_lookup_num_tokens": (),
    "remove_invalid_values": (False,),
    "return_legacy_cache": (False,),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "use_cache": (True,),
    "use_mtp": (False,),
    "watermarking_config": (),
}
"""Fields that send a call to the original unless they have one of these values, or None."""


def seams(model: Any, engine: Engine, read_tree: Callable[[], TreeSpec], strict: bool) -> tuple[Seam, ...]:
    """`model.generate`. read_tree: the tree of the next call. strict: raise where the original would have to run.

    Raises UnsupportedModelError for a model whose class, or instance, generates in a way of its own.
    """
    for name in OWN_METHODS:
        original = getattr(GenerationMixin, name, None)
        if original is None:
            raise UnsupportedModelError(f"transformers' GenerationMixin.{name} is missing: a version that is not known")
        if name in vars(model) or getattr(type(model), name, None) is not original:
            raise UnsupportedModelError(f"model.{name} must be that of transformers, which the engine stands for")
    signature = inspect.signature(GenerationMixin.generate)

    @functools.wraps(model.generate)
    def generate(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(model, *args, **kwargs)
        try:
            _check_arguments(bound, model)
            streamer = bound.arguments.pop("streamer", None)  # nothing is put before it is certain who decodes
            decode = functools.partial(_decode, engine, read_tree, streamer)
            bound.arguments["self"] = _Preparation(model, decode)
            return GenerationMixin.generate(*bound.args, **bound.kwargs)
        except Fallback as fallback:
            if strict:
                raise ValueError(
                    f"generate: {fallback} is for the original, which strict=True excludes "
                    "(docs/limits.md#generate-of-a-plain-model)"
                ) from None
            raise

    return (Seam(model, "generate", generate, "generate", "engine, batched, exact stops"),)


class _Preparation:
    """The model as its own `generate` sees it, but for the fields that are looked at and the loop over tokens."""

    def __init__(self, model: Any, decode: Callable[..., Any]):
        self._model, self._decode = model, decode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> tuple[GenerationConfig, dict[str, Any]]:
        config, inputs = self._model._prepare_generation_config(*args, **kwargs)
        self._model._validate_model_kwargs(dict(inputs))
        check_config(config)
        for name, value in inputs.items():
            if value is not None and name not in ("input_ids", "attention_mask"):
                raise Fallback(name)
        return config, inputs

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: None = None,
        attention_mask: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        if synced_gpus:
            raise Fallback("synced_gpus")
        return self._decode(input_ids, attention_mask, logits_processor, stopping_criteria, generation_config)


def check_config(config: GenerationConfig) -> None:
    """Raise `Fallback` with the first field that the engine does not decode by.

    A field that is in none of the tables above, of a newer transformers, must be at its default.
    """
    default = vars(GenerationConfig())
    for name, value in vars(config).items():
        if name.startswith("_") or name in HONOURED or name in NO_EFFECT or value is None:
            continue
        if name in NEUTRAL:
            neutral = value in NEUTRAL[name]
        else:
            neutral = name not in default or value in (False, default[name])  # entries of one's own mean nothing
        if not neutral:
            raise Fallback(f"{name}={value!r}")


def _check_arguments(bound: inspect.BoundArguments, model: Any) -> None:
    for name, value in bound.arguments.items():
        nothing = value is None or (isinstance(value, list) and not value)
        if name not in ARGUMENTS and name != "kwargs" and not nothing:
            raise Fallback(name)
    layers = attribute_at(model, body_path(model)).layers
    attentions = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
    if any(attention.training and getattr(attention, "attention_dropout", 0) for attention in attentions):
        raise Fallback("attention_dropout of a model in training mode")


@dataclass(frozen=True)
class _Plan:
    """What to decode: prompts int64 [L] without padding, each with `new_tokens` more or less by `stop_ids`.

    The first `held_back` of them are none of `held_ids`.
    """

    prompts: list[Tensor]
    new_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    held_back: int
    held_ids: frozenset[int]

    def stages(self) -> list[tuple[int, SamplingParams, frozenset[int]]]:
        """New tokens, sampling and stop tokens of the requests that each prompt becomes, one behind the other."""
        first = min(self.held_back, self.new_tokens) if self.held_ids else 0
        stages = []
        if first:
            biases = dict(self.sampling.biases) | dict.fromkeys(self.held_ids, -math.inf)
            stages.append((first, replace(self.sampling, logit_bias=biases), self.stop_ids - self.held_ids))
        if first < self.new_tokens:
            stages.append((self.new_tokens - first, self.sampling, self.stop_ids))
        return stages


def _decode(
    engine: Engine,
    read_tree: Callable[[], TreeSpec],
    streamer: Any | None,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    logits_processor: Sequence[Any],
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
) -> Tensor | GenerateDecoderOnlyOutput:
    """The loop over tokens, of all that `generate` has prepared: input_ids int [B, L] with their continuations."""
    vocabulary = engine.view.vocab_size
    padding = _left_padding(input_ids, attention_mask)
    sampling, held_back, held_ids = _read_processors(logits_processor, config.do_sample, padding, vocabulary)
    limits = [rule.max_length for rule in stopping_criteria if isinstance(rule, MaxLengthCriteria)]
    if not limits:
        raise Fallback("stopping_criteria without a length")
    pads = any(hasattr(rule, "eos_token_id") for rule in stopping_criteria)
    pad = getattr(config, "_pad_token_tensor", None)
    if pads and pad is None:
        raise Fallback("eos_token_id without pad_token_id")
    ends = [rule.eos_token_id.tolist() for rule in stopping_criteria if type(rule) is EosTokenCriteria]
    length = input_ids.shape[1]
    plan = _Plan(
        [row[skipped:].to(engine.view.device, torch.int64) for row, skipped in zip(input_ids, padding, strict=True)],
        max(min(limits) - length, 1),  # stopping criteria are asked after a token
        sampling,
        frozenset(token for ids in ends for token in ids if token >= 0),  # a negative one never comes
        held_back - length,
        held_ids & frozenset(range(vocabulary)),
    )
    pad_id = int(pad) if pads and pad is not None else None
    kinds = (EosTokenCriteria, MaxLengthCriteria)
    known = StoppingCriteriaList(rule for rule in stopping_criteria if type(rule) in kinds)
    asks, ranks = len(known) < len(stopping_criteria), engine.view.ranks
    if ranks is not None:  # of which one may stream alone, or have criteria that others have not
        ranks.meet()
        asks = ranks.agreed(asks)
    criteria, deciding = (stopping_criteria, ranks) if asks else (known, None)
    with closing(_steps(engine, read_tree(), plan)) as steps:
        if streamer is None and not asks:
            sequences = _all_tokens(steps, input_ids, pad_id)
        else:
            sequences = _token_by_token(steps, input_ids, pad_id, criteria, streamer, deciding)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences


def _left_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[int]:
    """How many tokens each row begins with that are masked. Raises `Fallback` for any other mask."""
    if attention_mask is None:
        return [0] * len(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise Fallback(f"attention_mask of shape {list(attention_mask.shape)}")
    kept = attention_mask.bool()
    if ((attention_mask != 0) & (attention_mask != 1)).any() or (kept[:, :-1] & ~kept[:, 1:]).any():
        raise Fallback("attention_mask with more than padding on the left")
    if not kept[:, -1].all():
        raise Fallback("attention_mask of a row that is nothing but padding")
    return (~kept).sum(1).tolist()


def _read_processors(
    prepared: Sequence[Any], do_sample: bool, padding: Sequence[int], vocabulary: int
) -> tuple[SamplingParams, int, frozenset[int]]:
    """What processors of logits come to: how to choose a token, and up to which length which tokens are held back.

    Raises `Fallback` for one that the engine has nothing for.
    """
    options: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    bias: dict[int, float] = {}
    held_back, held_ids = 0, frozenset[int]()
    for processor in prepared:
        kind = type(processor)
        if kind is processors.TemperatureLogitsWarper:
            options["temperature"] = float(processor.temperature)
        elif kind is processors.TopKLogitsWarper:
            options["top_k"] = processor.top_k
        elif kind is processors.TopPLogitsWarper:
            if processor.top_p <= 0:
                raise Fallback(f"top_p={processor.top_p}")
            options["top_p"] = float(processor.top_p)
        elif kind is processors.MinPLogitsWarper:
            options["min_p"] = float(processor.min_p)
        elif kind is processors.RepetitionPenaltyLogitsProcessor:
            if any(padding) and processor.prompt_ignore_length is None:
                raise Fallback("repetition_penalty that counts padding")
            if any(map(math.isfinite, bias.values())):
                raise Fallback("repetition_penalty after sequence_bias")
            options["repetition_penalty"] = processor.penalty
        elif kind in (processors.SequenceBiasLogitsProcessor, processors.NoBadWordsLogitsProcessor):
            for sequence, value in processor.sequence_bias.items():
                name = "sequence_bias" if kind is processors.SequenceBiasLogitsProcessor else "bad_words_ids"
                if len(sequence) > 1 or sequence[0] >= vocabulary or not value < math.inf:
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
            ends = processor.eos_token_id.tolist()
            held_back, held_ids = max(held_back, least), held_ids.union(end for end in ends if end < vocabulary)
        elif kind is not processors.LogitNormalization:  # which changes no distribution
            raise Fallback(kind.__name__)
    return SamplingParams(logit_bias=bias, **options), held_back, held_ids


def _steps(engine: Engine, tree: TreeSpec, plan: _Plan) -> Steps:
    """One step of the batch after another, until no row goes on.

    Raises RuntimeError for NaN logits, or if another generation is running.
    """
    count, stages = len(plan.prompts), plan.stages()
    seeds = [sampling.seeds(count) for _, sampling, _ in stages]
    most = max(map(len, plan.prompts)) + plan.new_tokens
    with Batch(engine, count, tree, most, drafts=tree.drafts > 0) as batch:
        engine.accept_lengths = []
        waiting = [(row, 0, prompt) for row, prompt in enumerate(plan.prompts)]
        entered: dict[int, tuple[int, int]] = {}  # slot to row and stage
        while waiting or batch.running:
            requests: list[Request] = []
            for row, stage, prompt in waiting[: len(batch.free)]:
                new, sampling, stop_ids = stages[stage]
                request = Request(prompt, new, replace(sampling, seed=seeds[stage][row]), stop_ids)
                requests.append(request)
            if entered:  # a later stage waits for room; the first ones enter together, or nobody does
                requests = requests[: batch.fitting(requests)]
            if requests:
                slots = batch.admit_all(requests)
                entered |= {slot: entry[:2] for slot, entry in zip(slots, waiting[: len(slots)], strict=True)}
                del waiting[: len(slots)]
            progress = batch.step()
            for done in progress:
                if done.error not in (None, NAN):
                    raise CacheFullError(done.error)
            if broken := [entered[done.slot][0] for done in progress if done.error]:
                raise NaNLogitsError(f"{NAN} for sequences {broken}")
            for done in progress:
                row, stage = entered[done.slot]
                if row == 0:
                    engine.accept_lengths.append(done.accepted)
                if done.finished == "length" and stage + 1 < len(stages):
                    waiting.append((row, stage + 1, batch.tokens(done.slot)))
            yield [(entered[done.slot][0], done.tokens) for done in progress]


def _all_tokens(steps: Steps, input_ids: Tensor, pad: int | None) -> Tensor:
    """All rows to their ends: [B, L + longest], shorter ones filled up with `pad`."""
    rows: list[list[int]] = [[] for _ in input_ids]
    for step in steps:
        for row, tokens in step:
            rows[row] += tokens
    longest = max(map(len, rows))
    new = [tokens + [pad or 0] * (longest - len(tokens)) for tokens in rows]
    return torch.cat((input_ids, torch.tensor(new, dtype=torch.int64, device=input_ids.device)), dim=1)


def _token_by_token(
    steps: Steps,
    input_ids: Tensor,
    pad: int | None,
    stopping_criteria: StoppingCriteriaList,
    streamer: Any | None,
    ranks: Ranks | None,
) -> Tensor:
    """All rows token by token, in step with each other, until `stopping_criteria` have said of each that it is done.

    pad: what a row that is done gets from then on; None: the target's tokens, as long as others go on. ranks: those
    of which rank 0's criteria count, which may look at a clock; None: what these say is the same on all.
    """
    if streamer is not None:
        streamer.put(input_ids.cpu())
    waiting: list[deque[int]] = [deque() for _ in input_ids]
    sequences, goes_on = input_ids, torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
    while goes_on.any():
        new = []
        for row, more in enumerate(goes_on.tolist()):
            while not waiting[row] and (more or pad is None):
                for other, tokens in next(steps):
                    waiting[other] += tokens
            new.append(waiting[row].popleft() if more or pad is None else pad)
        column = torch.tensor(new, dtype=torch.int64, device=input_ids.device)
        sequences = torch.cat((sequences, column[:, None]), dim=1)
        if streamer is not None:
            streamer.put(column.cpu())
        done = stopping_criteria(sequences, None)
        if ranks is not None:
            done = torch.tensor(ranks.agreed(done.tolist()), dtype=torch.bool, device=done.device)
        goes_on = goes_on & ~done
    if streamer is not None:
        streamer.end()
    return sequences
