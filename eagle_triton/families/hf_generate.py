"""`generate` of a plain Hugging Face model on the engine: same arguments, same tokens.

The model's own `generate` reads, checks and prepares a call, so that defaults, warnings and errors are its own. Only
the loop over tokens is the engine's. What the engine does not do sends the whole call to the original, by name.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import logits_process as processors
from transformers.generation.configuration_utils import GenerationMode

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.memory.pages import CacheFullError
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.prefill import NaNLogitsError
from eagle_triton.engine.ranks import Ranks
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import NAN, Request
from eagle_triton.engine.step import Judge
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.causal_lm import body_path
from eagle_triton.families.host_decoding import CHOOSING, HostChooser
from eagle_triton.families.reading.module_reader import attribute_at
from eagle_triton.patching import Fallback, Seam

_SURELY = 1e30  # what is added to the logit of a token that must come

Steps = Generator[list[tuple[int, list[int]]], None, None]  # of a batch: rows and the tokens that they got

CACHE_NAMES = ("cache", "past_key_values")
"""What models' forwards call their cache, the newest first."""

CARRIES_POSITIONS = hasattr(GenerationMixin, "_prepare_position_ids_for_generation")
"""Whether transformers carries positions on behind a prompt. Older versions repeat the last one that is given, and
count those of padded prompts in chunks otherwise."""

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
    {
        "self", "inputs", "generation_config", "logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria",
        "streamer", "synced_gpus", "use_model_defaults",
    }
)  # fmt: skip
"""Arguments of `generate` that the engine's way takes; any other one that is set goes to the original."""

HONOURED = frozenset(
    {
        "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "do_sample", "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty", "eos_token_id", "epsilon_cutoff", "eta_cutoff",
        "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "max_length",
        "max_new_tokens", "max_time", "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size",
        "num_return_sequences", "output_logits", "output_scores", "pad_token_id", "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "remove_invalid_values", "renormalize_logits", "repetition_penalty", "return_dict_in_generate",
        "sequence_bias", "stop_strings", "suppress_tokens", "temperature", "top_h", "top_k", "top_p", "typical_p",
        "watermarking_config",
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
    "cache_implementation": (  # what keeps keys and values as they are; "quantized" rounds them
        "dynamic",
        "hybrid",
        "hybrid_chunked",
        "offloaded",
        "offloaded_hybrid",
        "offloaded_hybrid_chunked",
        "offloaded_static",
        "sliding_window",
        "static",
    ),
    "constraints": (),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "force_words_ids": (),
    "guidance_scale": (1,),
    "is_assistant": (False,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "penalty_alpha": (0,),
    "return_legacy_cache": (False,),
    "token_healing": (False,),
    "use_cache": (True, False),
    "use_mtp": (False,),
}
"""Fields that send a call to the original unless they have one of these values, or None; see `config_reasons`."""

INPUTS = frozenset({"attention_mask", "input_ids", "inputs_embeds", "logits_to_keep", "position_ids"})
"""Inputs of the model's forward that the engine's way takes, or checks."""


ASSISTANT_TOKENS, MOST_ASSISTED = 20, 64
"""What transformers drafts with an assistant that does not say, and the most that the engine drafts in a chain."""

_OF_TOKENS = (EosTokenCriteria, MaxLengthCriteria)  # stopping criteria that the engine follows itself


class Assistance(NamedTuple):
    """What a call asks to draft by, instead of what the model was optimised with: a language model, or n-grams of up to
    `ngram` tokens of the prompt. `tokens`: drafted in a step, at first."""

    model: Any | None
    tokens: int
    ngram: int


class Drafting(NamedTuple):
    """An engine and the tree of its next call."""

    engine: Engine
    read_tree: Callable[[], TreeSpec]


def seams(model: Any, drafting: Drafting, assisted: Callable[[Assistance], Drafting], strict: bool) -> tuple[Seam, ...]:
    """`model.generate`. assisted: what decodes with other drafts; it raises UnsupportedModelError for an assistant that
    the engine does not know. strict: raise where the original would have to run.

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
        if CHOOSING.get():
            raise Fallback("a call by a processor or criterion of another call")
        bound = signature.bind(model, *args, **kwargs)
        brings_processors = bool(bound.arguments.get("logits_processor"))
        assistant = None
        if bound.arguments.get("kwargs", {}).get("assistant_tokenizer") is None:  # else it needs translation
            assistant = bound.arguments.pop("assistant_model", None)
        reasons = _take_reasons(bound, model)
        streamer = bound.arguments.pop("streamer", None)  # nothing is put before it is certain who decodes
        bound.arguments["self"] = _Preparation(
            model, drafting, assisted, assistant, streamer, reasons, brings_processors
        )
        try:
            if "custom_generate" in reasons:  # whose arguments are its own
                raise Fallback(*reasons)
            try:
                return GenerationMixin.generate(*bound.args, **bound.kwargs)
            except (TypeError, ValueError, RuntimeError) as error:
                if not reasons:
                    raise
                raise Fallback(*reasons) from error  # the original may not mind, or says it itself
        except Fallback as fallback:
            if strict:
                raise ValueError(
                    f"generate: {'; '.join(fallback.args)} is for the original, which strict=True excludes "
                    "(docs/limits.md#generate-of-a-plain-model)"
                ) from None
            raise

    remedy = "docs/limits.md#generate-of-a-plain-model"
    return (Seam(model, "generate", generate, "generate", "engine, batched, exact stops", remedy=remedy),)


class _Preparation:
    """The model as its own `generate` sees it, but for the fields that are looked at, the cache, and the loop over
    tokens.

    assistant: the model that is to draft, None: what the model was optimised with. reasons: why the original must run,
    as far as is known. The preparation goes on as far as it can, to find them all. brings_processors: among those of
    logits are some of the caller's, which may stand in another order than those of transformers' own making.
    """

    def __init__(
        self,
        model: Any,
        drafting: Drafting,
        assisted: Callable[[Assistance], Drafting],
        assistant: Any | None,
        streamer: Any | None,
        reasons: list[str],
        brings_processors: bool,
    ):
        self._model, self._drafting, self._assisted, self._streamer = model, drafting, assisted, streamer
        self._brings_processors = brings_processors
        self._assistant, self._reasons = assistant, reasons
        self._assistance: Assistance | None = None
        self._check_positions = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> tuple[GenerationConfig, dict[str, Any]]:
        config, inputs = self._model._prepare_generation_config(*args, **kwargs)
        self._model._validate_model_kwargs(dict(inputs))
        self._assistance = self._take_assistance(config)
        self._reasons += config_reasons(config)
        known = [reason.partition("=")[0] for reason in self._reasons]
        self._reasons += [name for name in _refused_inputs(inputs) if name not in known]
        self._check_positions = inputs.get("position_ids") is not None and "position_ids" not in self._reasons
        mode = config.get_generation_mode()
        loops = mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        if not loops or config.cache_implementation == "paged":  # then others than `_sample` would go on from here
            raise Fallback(*(self._reasons or [f"generation mode {mode.value}"]))
        return config, inputs

    def _take_assistance(self, config: GenerationConfig) -> Assistance | None:
        """Who drafts instead, which is taken out of `config`. What the original cannot do with it is left to it."""
        lookup, assistant = getattr(config, "prompt_lookup_num_tokens", None), self._assistant
        if lookup is None and assistant is None:
            return None
        name = "assistant_model" if lookup is None else "prompt_lookup_num_tokens"
        if lookup is not None and assistant is not None:
            self._reasons.append("assistant_model beside prompt_lookup_num_tokens")
        for option in ("assistant_ensemble_weight", "speculation_type"):
            if getattr(config, option, None) is not None:
                self._reasons.append(option)
        own = getattr(assistant, "generation_config", None)
        schedule = getattr(own, "num_assistant_tokens_schedule", None)
        if schedule == "heuristic":  # which writes to the assistant's configuration
            self._reasons.append(f"num_assistant_tokens_schedule={schedule!r}")
        tokens = (getattr(own, "num_assistant_tokens", None) or ASSISTANT_TOKENS) if lookup is None else lookup
        ngram = getattr(config, "max_matching_ngram_size", None) or 2
        refused = {
            "several rows": (config.num_return_sequences or 1) > 1,
            "a model with recurrent layers": getattr(self._model, "_is_stateful", False),
            "use_cache=False": config.use_cache is False,
            "no number of tokens": not _is_count(tokens) or not _is_count(ngram),
        }
        self._reasons += [f"{name} with {what}" for what, found in refused.items() if found]
        if lookup is not None:
            config.prompt_lookup_num_tokens = None
        if not (_is_count(tokens) and _is_count(ngram)):
            return None
        return Assistance(assistant, min(tokens, MOST_ASSISTED), 0 if lookup is None else ngram)

    def _prepare_cache_for_generation(self, config: GenerationConfig, *args: Any, **kwargs: Any) -> None:
        """The engine has a cache of its own; this one is for those who are given it back."""
        if config.return_dict_in_generate and not self._reasons:
            self._model._prepare_cache_for_generation(config, *args, **kwargs)

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        if synced_gpus:
            self._reasons.append("synced_gpus")
        if self._check_positions and not _are_assumed(position_ids, attention_mask):
            self._reasons.append("position_ids")
        prompt, drafting = _Prompt(input_ids, attention_mask, inputs_embeds), self._drafting
        if self._assistance is not None:
            asks_less = {  # of which the original asks, or reads, once for several tokens
                "several rows": len(input_ids) > 1,
                "inputs_embeds": inputs_embeds is not None,
                "a streamer": self._streamer is not None,
                "stopping_criteria": not all(type(rule) in _OF_TOKENS for rule in stopping_criteria),
            }
            self._reasons += [f"drafts that a call asks for, with {what}" for what, found in asks_less.items() if found]
            try:
                drafting = self._assisted(self._assistance) if not self._reasons else drafting
            except UnsupportedModelError as error:
                self._reasons.append(f"assistant_model: {error}")
        result: Any = _decode(
            *drafting,
            self._streamer,
            self._reasons,
            prompt,
            logits_processor,
            stopping_criteria,
            generation_config,
            self._brings_processors,
        )
        for name in CACHE_NAMES:
            if generation_config.return_dict_in_generate and inputs.get(name) is not None:
                self._fill(name, inputs[name], result.sequences, prompt, position_ids)
                result[name] = inputs[name]
        return result

    def _fill(self, name: str, cache: Any, sequences: Tensor, prompt: _Prompt, position_ids: Tensor | None) -> None:
        """Have the model read into its cache, which its forward knows by `name`, all that the original has there at the
        end: sequences [B, n] without their last tokens."""
        mask, embeddings, tokens = prompt.attention_mask, prompt.embeddings, sequences[:, :-1]
        options: dict[str, Any] = {name: cache, "use_cache": True}
        if embeddings is None:
            options["input_ids"], length = tokens, tokens.shape[1]
        else:
            new = self._model.get_input_embeddings()(tokens[:, prompt.input_ids.shape[1] :])
            options["inputs_embeds"] = torch.cat((embeddings, new), dim=1)
            length = options["inputs_embeds"].shape[1]
        if mask is not None:
            mask = torch.cat((mask, mask.new_ones(len(mask), length - mask.shape[1])), dim=1)
            options["attention_mask"] = mask
            places = mask.long().cumsum(1) - 1
            if position_ids is None:
                places = places.masked_fill(mask == 0, 0 if CARRIES_POSITIONS else 1)
            else:  # masked tokens too have the places that they were given
                places[:, : position_ids.shape[1]] = position_ids
            options["position_ids"] = places
        if self._model._supports_logits_to_keep():
            options["logits_to_keep"] = 1
        self._model(**options)


def config_reasons(config: GenerationConfig) -> list[str]:
    """The fields of a config that the engine does not decode by, with their values.

    A field that is in none of the tables above, of a newer transformers, must be at its default.
    """
    default, reasons = vars(GenerationConfig()), []
    for name, value in vars(config).items():
        if name.startswith("_") or name in HONOURED or name in NO_EFFECT or value is None:
            continue
        if name in NEUTRAL:
            neutral = value in NEUTRAL[name]
        else:
            neutral = name not in default or value in (False, default[name])  # entries of one's own mean nothing
        if not neutral:
            reasons.append(f"{name}={value!r}")
    if config.use_cache is None:  # then transformers has a cache, and feeds it the whole sequence at every step
        reasons.append("use_cache=None")
    compiled = getattr(config, "compile_config", None) is not None
    if compiled and config.cache_implementation not in (None, "dynamic", "offloaded"):  # else nothing is compiled
        reasons.append(f"compile_config beside cache_implementation={config.cache_implementation!r}")
    chunk = getattr(config, "prefill_chunk_size", None)
    right = CARRIES_POSITIONS and config.use_cache is not False and isinstance(chunk, int) and chunk > 0
    if chunk is not None and not right:
        reasons.append(f"prefill_chunk_size={chunk!r}")
    return reasons


def _take_reasons(bound: inspect.BoundArguments, model: Any) -> list[str]:
    """The arguments that only the original takes, which are taken out of `bound`, and what speaks against the engine
    whatever the arguments."""
    reasons = []
    for name, value in list(bound.arguments.items()):
        nothing = value is None or (isinstance(value, list) and not value)
        if name not in ARGUMENTS and name != "kwargs" and not nothing:
            reasons.append(name)
            del bound.arguments[name]
    layers = attribute_at(model, body_path(model)).layers
    attentions = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
    if any(attention.training and getattr(attention, "attention_dropout", 0) for attention in attentions):
        reasons.append("attention_dropout of a model in training mode")
    return reasons


def _refused_inputs(inputs: dict[str, Any]) -> list[str]:
    """The inputs of the model's forward that only the original takes."""
    names = [name for name, value in inputs.items() if value is not None and name not in INPUTS]
    keep = inputs.get("logits_to_keep")
    if keep is not None and (type(keep) is not int or keep < 0):  # the last row is among those it keeps
        names.append("logits_to_keep")
    if inputs.get("position_ids") is not None and not CARRIES_POSITIONS:
        names.append("position_ids")
    return names


def _are_assumed(position_ids: Tensor | None, attention_mask: Tensor | None) -> bool:
    """Whether positions [B | 1, L] are those of tokens that stand one behind the other, but for masked ones."""
    if position_ids is None or position_ids.ndim != 2:
        return False
    if attention_mask is None:
        places = torch.arange(position_ids.shape[1], device=position_ids.device)
        return torch.equal(position_ids.long(), places.expand_as(position_ids))
    if attention_mask.shape[1:] != position_ids.shape[1:]:
        return False
    places = attention_mask.long().cumsum(1) - 1
    return bool(((position_ids == places) | (attention_mask == 0)).all())


@contextmanager
def _added_to(reasons: list[str]) -> Iterator[None]:
    """A `Fallback` inside the block ends it, and its reasons are added."""
    try:
        yield
    except Fallback as fallback:
        reasons += fallback.args


class _Prompt(NamedTuple):
    """What `generate` has prepared: input_ids int [B, L], L perhaps 0 beside embeddings [B, n, H] that the target reads
    in their place, and which of these the mask lets it see (None: all)."""

    input_ids: Tensor
    attention_mask: Tensor | None
    embeddings: Tensor | None


@dataclass(frozen=True)
class _Plan:
    """What to decode: prompts int64 [L] without masked tokens, each with `new_tokens` more or less by `stop_ids`.

    The first `held_back` new tokens are no stop tokens. pad: what a row gets that has ended before others; None: the
    target's tokens. embeddings: what the target reads in place of the prompts' first tokens, [n, H] each. logits: of
    each new token, by row of the batch, as steps report them; None: nobody asks for them. on_host: tokens are chosen
    by a HostChooser, which alone knows how.
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


def _decode(
    engine: Engine,
    read_tree: Callable[[], TreeSpec],
    streamer: Any | None,
    reasons: Sequence[str],
    prompt: _Prompt,
    logits_processor: Sequence[Any],
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    brings_processors: bool = False,
) -> Tensor | GenerateDecoderOnlyOutput:
    """The loop over tokens, of all that `generate` has prepared: the ids of the prompt with their continuations.
    brings_processors: see _Preparation.

    Raises Fallback with `reasons` and those that are found here.
    """
    known = StoppingCriteriaList(rule for rule in stopping_criteria if type(rule) in _OF_TOKENS)
    asks, ranks = len(known) < len(stopping_criteria), engine.view.ranks
    by_token = streamer is not None or asks
    plan = _read_plan(
        engine.view, reasons, prompt, logits_processor, stopping_criteria, config, by_token, brings_processors
    )
    if plan.on_host:
        return _decode_on_host(
            engine, read_tree(), plan, prompt.input_ids, streamer, logits_processor, stopping_criteria, config
        )
    if ranks is not None:  # of which one may stream alone, or have criteria that others have not
        ranks.meet()
        asks = ranks.agreed(asks)
    criteria, deciding = (stopping_criteria, ranks) if asks else (known, None)
    try:
        with closing(_steps(engine, read_tree(), plan)) as steps:
            if streamer is None and not asks:
                sequences, counts = _all_tokens(steps, prompt.input_ids, plan.pad)
            else:
                sequences, counts = _token_by_token(steps, prompt.input_ids, plan.pad, criteria, streamer, deciding)
    except NaNLogitsError as error:
        if config.remove_invalid_values:
            raise Fallback("remove_invalid_values of NaN logits") from error
        raise
    if config.remove_invalid_values and not all(part.isfinite().all() for parts in plan.logits or () for part in parts):
        raise Fallback("remove_invalid_values of infinite logits")
    if not config.return_dict_in_generate:
        return sequences
    if not (config.output_scores or config.output_logits):
        return GenerateDecoderOnlyOutput(sequences=sequences)
    length = prompt.input_ids.shape[1]
    logits, scores = _emitted_logits(engine, plan, sequences[:, length:], counts), None
    if config.output_scores:
        process: Callable[..., Tensor] = logits_processor  # type: ignore[assignment]
        scores = tuple(process(sequences[:, : length + place], row) for place, row in enumerate(logits))
    return GenerateDecoderOnlyOutput(
        sequences=sequences, scores=scores, logits=logits if config.output_logits else None
    )


def _decode_on_host(
    engine: Engine,
    tree: TreeSpec,
    plan: _Plan,
    input_ids: Tensor,
    streamer: Any | None,
    logits_processor: Any,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
) -> Tensor | GenerateDecoderOnlyOutput:
    """`_decode` of tokens that are chosen on the host. Random numbers are torch's own, drawn as the original does."""
    wanted = bool(config.return_dict_in_generate)
    chooser = HostChooser(
        input_ids,
        logits_processor,
        stopping_criteria,
        do_sample=config.do_sample,
        pad=plan.pad,
        keep_scores=wanted and bool(config.output_scores),
        keep_logits=wanted and bool(config.output_logits),
        streamer=streamer,
    )
    with closing(_steps(engine, tree if len(plan.prompts) == 1 else PLAIN, plan, chooser)) as steps:
        for _ in steps:
            if chooser.done:
                break
    engine.ops.calls["chosen_on_host"] += (chooser.sequences.shape[1] - input_ids.shape[1]) * len(input_ids)
    if not wanted:
        return chooser.sequences
    return GenerateDecoderOnlyOutput(sequences=chooser.sequences, scores=chooser.scores, logits=chooser.logits)


def _read_plan(
    view: ModelView,
    known_reasons: Sequence[str],
    prompt: _Prompt,
    logits_processor: Sequence[Any],
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    by_token: bool,
    brings_processors: bool,
) -> _Plan:
    """What all that `generate` has prepared comes to. by_token: somebody is told of each token before the last one.

    Raises `Fallback` with all reasons why the engine cannot, those that are known among them.
    """
    reasons: list[str] = []
    input_ids, embeddings = prompt.input_ids, prompt.embeddings
    length, vocabulary = input_ids.shape[1], view.vocab_size
    if embeddings is not None:
        reasons += _embeddings_reasons(view, prompt)
        if not length:  # drafts need some ids
            input_ids = input_ids.new_zeros(embeddings.shape[:2])
    kept: list[Tensor] | None = None
    padding, holes = [0] * len(input_ids), False
    sampling, held_back, held_ids = SamplingParams(), 0, frozenset[int]()
    for_host = ["logits_processor"] if brings_processors else []  # what only a HostChooser does

    limits = [rule.max_length for rule in stopping_criteria if type(rule) is MaxLengthCriteria]
    if not limits:
        reasons.append("stopping_criteria without a length")
    new_tokens = max(min(limits, default=0) - length, 1)  # stopping criteria are asked after a token
    with _added_to(reasons):
        kept, padding, holes = _read_mask(view, input_ids, prompt.attention_mask, new_tokens)

    active = [  # what removes invalid values changes no finite logits, and `_decode` sees to it that they are
        processor for processor in logits_processor if type(processor) is not processors.InfNanRemoveLogitsProcessor
    ]
    try:
        sampling, held_back, held_ids = _read_processors(active, config.do_sample, padding, vocabulary)
    except Fallback as fallback:
        for_host += fallback.args
        for processor in active:  # the first one has hidden the others' reasons
            with _added_to(for_host):
                _read_processors([processor], config.do_sample, padding, vocabulary)
        for_host = list(dict.fromkeys(for_host))
    if holes and sampling.repetition_penalty != 1:
        for_host.append("repetition_penalty that counts masked tokens")
    if not length and sampling.repetition_penalty != 1:
        for_host.append("repetition_penalty of inputs_embeds without input_ids")

    pads = any(hasattr(rule, "eos_token_id") for rule in stopping_criteria)
    pad = getattr(config, "_pad_token_tensor", None)
    if pads and pad is None:
        reasons.append("eos_token_id without pad_token_id")
    ends = [rule.eos_token_id.tolist() for rule in stopping_criteria if type(rule) is EosTokenCriteria]
    stop_ids = frozenset(token for ids in ends for token in ids if 0 <= token < vocabulary)  # others never come
    held_back = min(max(held_back - length, 0), new_tokens)
    if held_back and {token for token in held_ids if token >= 0} != stop_ids:
        for_host.append("a minimal length of other tokens than stopping_criteria look at")

    wanted = bool(config.return_dict_in_generate) and (config.output_scores or config.output_logits)
    if wanted and config.output_scores and not all(_ignores_scores(rule) for rule in stopping_criteria):
        for_host.append("output_scores that stopping_criteria may look at")
    if config.remove_invalid_values and by_token:  # an invalid one may come too late to begin again
        for_host.append("remove_invalid_values beside a streamer or stopping_criteria")
    if getattr(config, "prefill_chunk_size", None) and not any("prefill_chunk_size" in name for name in known_reasons):
        reasons += [] if view.by_token else ["prefill_chunk_size over recurrent layers"]
        reasons += [] if embeddings is None else ["prefill_chunk_size of inputs_embeds"]  # all of them at every chunk
    if for_host and view.ranks is not None:
        reasons += [f"{reason}, of a model that several ranks share" for reason in for_host]
    if known_reasons or reasons:
        raise Fallback(*known_reasons, *reasons)
    plan = _Plan(
        [row.to(view.device, torch.int64) for row in _kept_of(input_ids, kept)],
        new_tokens,
        sampling,
        stop_ids,
        held_back,
        int(pad) if pads and pad is not None else None,
        None if embeddings is None else _kept_of(embeddings, kept),
        [[] for _ in input_ids] if wanted or config.remove_invalid_values else None,
    )
    if not for_host:
        return plan
    stops = stop_ids if len(plan.prompts) == 1 else frozenset[int]()  # of several rows all go on to the last one's end
    return replace(plan, sampling=SamplingParams(), stop_ids=stops, held_back=0, logits=None, on_host=True)


def _kept_of(rows: Tensor, kept: list[Tensor] | None) -> list[Tensor]:
    """Of each row what is at the places that are kept; None: all."""
    return list(rows) if kept is None else [row[places] for row, places in zip(rows, kept, strict=True)]


def _embeddings_reasons(view: ModelView, prompt: _Prompt) -> list[str]:
    """Why only the original takes the embeddings of a prompt."""
    given, ids, reasons = prompt.embeddings, prompt.input_ids, []
    assert given is not None
    if given.ndim != 3 or (given.shape[2], given.dtype, given.device) != (view.hidden_size, view.dtype, view.device):
        reasons.append(f"inputs_embeds of {given.dtype} {list(given.shape)} on {given.device}")
    if ids.shape[1] and ids.shape != given.shape[:2]:  # by whose number it counts positions
        reasons.append(f"inputs_embeds beside input_ids of shape {list(ids.shape)}")
    if view.ranks is not None:
        reasons.append("inputs_embeds of a model that several ranks share")
    return reasons


def _read_mask(
    view: ModelView, input_ids: Tensor, attention_mask: Tensor | None, new_tokens: int
) -> tuple[list[Tensor] | None, list[int], bool]:
    """The places in each row that are not masked, None: all of them; how many masked tokens each row begins with; and
    whether there are others.

    The original counts positions without masked tokens, and nothing sees these: where all layers see all tokens, they
    may as well be absent. Raises `Fallback` for a mask of which that is not so.
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
        raise Fallback("attention_mask of a row that is nothing but padding")
    if not kept[:, -1].all():
        raise Fallback("attention_mask with padding on the right")
    holes = bool((kept[:, :-1] & ~kept[:, 1:]).any())
    if holes and not view.sees_all(kept.shape[1] + new_tokens):
        raise Fallback("attention_mask with holes over layers that do not see all tokens")
    return [row.nonzero()[:, 0] for row in kept], kept.int().argmax(1).tolist(), holes


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _ignores_scores(rule: Any) -> bool:
    """Whether a stopping criterion is one of transformers', none of which looks at scores but that of assistants."""
    return type(rule) in (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)


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


def _steps(engine: Engine, tree: TreeSpec, plan: _Plan, judge: Judge | None = None) -> Steps:
    """One step of the batch after another, until no row goes on. Logits are added to the plan's. judge: who chooses.

    Raises RuntimeError for NaN logits, or if another generation is running.
    """
    count = len(plan.prompts)
    embeddings: Sequence[Tensor | None] = plan.embeddings or [None] * count
    most = max(map(len, plan.prompts)) + plan.new_tokens
    with Batch(engine, count, tree, most, drafts=tree.drafts > 0, judge=judge) as batch:
        engine.accept_lengths = []
        slots = batch.enter_all(
            Request(
                prompt,
                plan.new_tokens,
                replace(plan.sampling, seed=seed),
                plan.stop_ids,
                min_new_tokens=plan.held_back,
                logits=plan.logits is not None,
                embeddings=read,
            )
            for prompt, read, seed in zip(plan.prompts, embeddings, plan.sampling.seeds(count), strict=True)
        )
        row_of = {id(batch.request(slot)): row for row, slot in enumerate(slots)}
        while batch.running:
            if judge is None:  # who has the rows in their slots
                batch.compact()
            progress = batch.step()
            for done in progress:
                if done.error not in (None, NAN):
                    raise CacheFullError(done.error)
            if broken := [row_of[id(done.request)] for done in progress if done.error]:
                raise NaNLogitsError(f"{NAN} for sequences {broken}")
            for done in progress:
                row = row_of[id(done.request)]
                if row == count - 1 and done.tree is not None:
                    engine.accept_lengths.append(done.accepted)
                if plan.logits is not None and done.logits is not None:
                    plan.logits[row].append(done.logits.clone())  # the step's others go
            yield [(row_of[id(done.request)], done.tokens) for done in progress]


def _emitted_logits(engine: Engine, plan: _Plan, tokens: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    """The logits that each column of tokens [B, n] was chosen by, float32 [B, V] each.

    counts: how many tokens of each row are its own. Behind these the original goes on with the plan's padding, and so
    must the target here, to say what its logits are.
    """
    assert plan.logits is not None
    total = tokens.shape[1]
    rows = [torch.cat(parts)[:count] for parts, count in zip(plan.logits, counts, strict=True)]
    ended = [row for row, count in enumerate(counts) if count < total]
    if ended:
        assert plan.pad is not None, "only padding follows a row's end"
        own = [tokens[row, : counts[row]].to(engine.view.device) for row in ended]
        least = min(counts)
        padded = _Plan(
            [torch.cat((plan.prompts[row], new)) for row, new in zip(ended, own, strict=True)],
            total - least,
            SamplingParams(logit_bias={plan.pad: _SURELY}),
            embeddings=None if plan.embeddings is None else [plan.embeddings[row] for row in ended],
            logits=[[] for _ in ended],
        )
        for _ in _steps(engine, PLAIN, padded):
            pass
        assert padded.logits is not None
        for row, parts in zip(ended, padded.logits, strict=True):
            rows[row] = torch.cat((rows[row], *parts))[:total]
    device = tokens.device
    if len(rows) == 1:
        return tuple(rows[0].to(device).split(1))
    return torch.stack(rows, dim=1).to(device).unbind(0)


def _all_tokens(steps: Steps, input_ids: Tensor, pad: int | None) -> tuple[Tensor, list[int]]:
    """All rows to their ends: [B, L + longest], shorter ones filled up with `pad`, and how many tokens each got."""
    rows: list[list[int]] = [[] for _ in input_ids]
    for step in steps:
        for row, tokens in step:
            rows[row] += tokens
    counts = [len(tokens) for tokens in rows]
    new = [tokens + [pad or 0] * (max(counts) - len(tokens)) for tokens in rows]
    sequences = torch.cat((input_ids, torch.tensor(new, dtype=torch.int64, device=input_ids.device)), dim=1)
    return sequences, counts


def _token_by_token(
    steps: Steps,
    input_ids: Tensor,
    pad: int | None,
    stopping_criteria: StoppingCriteriaList,
    streamer: Any | None,
    ranks: Ranks | None,
) -> tuple[Tensor, list[int]]:
    """All rows token by token, in step with each other, until `stopping_criteria` have said of each that it is done,
    and how many tokens each got.

    pad: what a row that is done gets from then on; None: the target's tokens, as long as others go on. ranks: those
    of which rank 0's criteria count, which may look at a clock; None: what these say is the same on all.
    """
    if streamer is not None:
        streamer.put(input_ids.cpu())
    waiting: list[deque[int]] = [deque() for _ in input_ids]
    counts = [0] * len(input_ids)
    sequences, goes_on = input_ids, torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
    while goes_on.any():
        new = []
        for row, more in enumerate(goes_on.tolist()):
            while not waiting[row] and (more or pad is None):
                for other, tokens in next(steps):
                    waiting[other] += tokens
            counts[row] += more or pad is None
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
    return sequences, counts
