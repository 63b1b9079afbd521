"""`generate` of a plain Hugging Face model on the engine: same arguments, same tokens.

The model's own `generate` reads, checks and prepares a call, so defaults, warnings and errors are its own. Only the
decoding loop is the engine's. If it does not support an option, the whole call runs the original, with a reason.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.model.model_watch import is_code_of
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.hf_generate.decoding import decode
from eagle_triton.families.hf_generate.options import (
    CACHE_NAMES,
    CARRIES_POSITIONS,
    NOT_RUN,
    OWN_METHODS,
    PRIVATE_METHODS,
    are_assumed,
    config_reasons,
    is_count,
    methods_of,
    refused_inputs,
    take_reasons,
)
from eagle_triton.families.hf_generate.plan import Call
from eagle_triton.families.hf_generate.read_ahead import ReadAhead, Reading
from eagle_triton.models.block_loading import is_block_assistant
from eagle_triton.patching import Fallback, PatchPoint

OF_GENERATION = ("transformers.", "torch.", "eagle_triton.")
ASSISTANT_TOKENS, MAX_ASSISTED = 20, 64
"""transformers' default number of drafts by an assistant, and the most that the engine drafts in a chain."""


class Assistance(NamedTuple):
    """A draft that a call brings itself: a language model, a block drafter, or n-grams of up to `ngram` tokens of the
    prompt. `tokens`: drafted in the first step; a block drafter drafts its block."""

    model: Any | None
    tokens: int
    ngram: int


class Drafting(NamedTuple):
    """An engine and the tree of its next call."""

    engine: Engine
    read_tree: Callable[[], TreeSpec]


def patch_points(model: Any, drafting: Drafting, assisted: Callable[[Assistance], Drafting]) -> tuple[PatchPoint, ...]:
    """`model.generate`. assisted: gives the engine for another draft; it raises UnsupportedModelError for an unknown
    assistant. Raises UnsupportedModelError for a model that overrides methods of transformers' generation.
    """
    for name in OWN_METHODS:
        original = getattr(GenerationMixin, name, None)
        if original is None:
            raise UnsupportedModelError(f"transformers' GenerationMixin.{name} is missing: this version is not known")
        own = getattr(type(model), name, None)
        of_family = name == "prepare_inputs_for_generation" and own.__module__.startswith("transformers.models.")
        replaced = name in NOT_RUN and not is_code_of(original, OF_GENERATION)
        if name in vars(model) or replaced or not (own is original or of_family):
            raise UnsupportedModelError(f"model.{name} must be transformers' own, which the engine replaces")
    methods = methods_of(model)
    for name in PRIVATE_METHODS:
        own = methods[name]
        replaced = own is not getattr(GenerationMixin, name) or name in NOT_RUN
        if name in vars(model) or (replaced and not is_code_of(own, OF_GENERATION)):
            raise UnsupportedModelError(f"model.{name} must be transformers' own, which would not run")
    signature = inspect.signature(GenerationMixin.generate)
    ahead = ReadAhead(*drafting)
    preparation = type(type(model).__name__, (_Preparation,), {})  # transformers writes its name into messages
    thread = threading.local()

    def decoded(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(model, *args, **kwargs)
        brings_processors = bool(bound.arguments.get("logits_processor"))
        assistant = None
        if bound.arguments.get("kwargs", {}).get("assistant_tokenizer") is None:  # otherwise tokens need translation
            assistant = bound.arguments.pop("assistant_model", None)
        reasons = take_reasons(bound, model, methods)
        streamer = bound.arguments.pop("streamer", None)  # it gets nothing until it is certain who decodes
        reads = not reasons and assistant is None
        reading = ahead.begin(bound.arguments if reads else {})
        bound.arguments["self"] = preparation(
            model, drafting, assisted, assistant, streamer, reasons, brings_processors, reading
        )
        try:
            if "custom_generate" in reasons:  # it has arguments of its own
                raise Fallback(*reasons)
            return GenerationMixin.generate(*bound.args, **bound.kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            if not reasons:
                raise
            raise Fallback(*reasons) from error  # the original may accept it, or raises its own error
        finally:
            reading.close()

    @functools.wraps(model.generate)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if getattr(thread, "decodes", False):
            raise Fallback("a call by a processor, criterion or streamer of another call")
        thread.decodes = True
        try:
            return decoded(*args, **kwargs)
        finally:
            thread.decodes = False

    remedy = "docs/limits.md#generate-of-a-plain-model"
    return (PatchPoint(model, "generate", generate, "generate", "engine, batched, exact stops", remedy=remedy),)


@dataclass(eq=False, repr=False)
class _Preparation:
    """Stands in for the model while its own `generate` prepares a call. It collects reasons for the original, makes no
    cache, and decodes with the engine.

    assistant: the model that drafts; None: the draft that the model was optimised with. reasons: the known reasons for
    the original. The preparation goes on as far as it can, to find all of them. brings_processors: some logits
    processors are the caller's, which may be in another order than transformers' own. reading: of the call's prompts,
    ahead.
    """

    _model: Any
    _drafting: Drafting
    _assisted: Callable[[Assistance], Drafting]
    _assistant: Any | None
    _streamer: Any | None
    _reasons: list[str]
    _brings_processors: bool
    _reading: Reading
    _assistance: Assistance | None = None
    _check_positions: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> tuple[GenerationConfig, dict[str, Any]]:
        config, inputs = self._model._prepare_generation_config(*args, **kwargs)
        self._model._validate_model_kwargs(dict(inputs))
        self._assistance = self._take_assistance(config)
        self._reasons += config_reasons(config)
        known = [reason.partition("=")[0] for reason in self._reasons]
        self._reasons += [name for name in refused_inputs(inputs) if name not in known]
        self._check_positions = inputs.get("position_ids") is not None and "position_ids" not in self._reasons
        mode = config.get_generation_mode()
        loops = mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        if not loops or config.cache_implementation == "paged":  # then another method than `_sample` would follow
            raise Fallback(*(self._reasons or [f"generation mode {mode.value}"]))
        return config, inputs

    def _validate_model_kwargs(self, inputs: dict[str, Any]) -> None:
        """Do nothing: `_prepare_generation_config` has validated them."""

    def _maybe_prepare_encoder_kwargs_for_generation(
        self, tensor: Tensor, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Encode no images: prompts with images run the original, which encodes them."""
        return model_kwargs

    def _take_assistance(self, config: GenerationConfig) -> Assistance | None:
        """Take a draft that the call brings out of `config`. The original refuses wrong combinations itself."""
        lookup, assistant = getattr(config, "prompt_lookup_num_tokens", None), self._assistant
        if lookup is None and assistant is None:
            return None
        name = "assistant_model" if lookup is None else "prompt_lookup_num_tokens"
        if lookup is not None and assistant is not None:
            self._reasons.append("assistant_model beside prompt_lookup_num_tokens")
        kind, in_blocks = getattr(config, "speculation_type", None), is_block_assistant(assistant)
        if in_blocks and kind is None:
            self._reasons.append(f"assistant_model: a {type(assistant).__name__} needs speculation_type='dflash'")
        others = {"assistant_ensemble_weight": getattr(config, "assistant_ensemble_weight", None)}
        others["speculation_type"] = None if in_blocks and kind == "dflash" else kind
        self._reasons += [option for option, value in others.items() if value is not None]
        own = getattr(assistant, "generation_config", None)
        schedule = getattr(own, "num_assistant_tokens_schedule", None)
        if schedule == "heuristic":  # it writes to the assistant's configuration
            self._reasons.append(f"num_assistant_tokens_schedule={schedule!r}")
        tokens = (getattr(own, "num_assistant_tokens", None) or ASSISTANT_TOKENS) if lookup is None else lookup
        ngram = getattr(config, "max_matching_ngram_size", None) or 2
        refused = {
            "several rows": (config.num_return_sequences or 1) > 1,
            "a model with recurrent layers": getattr(self._model, "_is_stateful", False),
            "use_cache=False": config.use_cache is False,
            "no valid number of tokens": not is_count(tokens) or not is_count(ngram),
        }
        self._reasons += [f"{name} with {what}" for what, found in refused.items() if found]
        if lookup is not None:
            config.prompt_lookup_num_tokens = None
        if not (is_count(tokens) and is_count(ngram)):
            return None
        return Assistance(assistant, min(tokens, MAX_ASSISTED), 0 if lookup is None else ngram)

    def _prepare_cache_for_generation(self, config: GenerationConfig, *args: Any, **kwargs: Any) -> None:
        """Make a cache only for a caller that gets one back: the engine has its own."""
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
        if self._check_positions and not are_assumed(position_ids, attention_mask):
            self._reasons.append("position_ids")
        elif position_ids is not None and attention_mask is None:  # a mask of ones was dropped, even of a wrong shape
            counted = input_ids if inputs_embeds is None or input_ids.shape[1] else inputs_embeds
            rows, length = counted.shape[:2]
            if position_ids.shape[-1] != length or position_ids.shape[-2] not in (1, rows):
                self._reasons.append(f"attention_mask of shape {list(position_ids.shape[-2:])}")
        call = Call(
            input_ids, attention_mask, inputs_embeds, logits_processor, stopping_criteria, generation_config,
            self._streamer, self._brings_processors,
        )  # fmt: skip
        drafting = self._drafting
        if self._assistance is not None:
            asks_less = {  # with drafts the original calls or reads these once for several tokens
                "several rows": len(input_ids) > 1,
                "inputs_embeds": inputs_embeds is not None,
                "a streamer": self._streamer is not None,
                "stopping_criteria": call.asks,
            }
            self._reasons += [f"drafts that a call asks for, with {what}" for what, found in asks_less.items() if found]
            self._reading.close()  # it holds the engine
            try:
                drafting = self._assisted(self._assistance) if not self._reasons else drafting
            except UnsupportedModelError as error:
                self._reasons.append(f"assistant_model: {str(error).removeprefix('assistant_model: ')}")
        result: Any = decode(*drafting, call, self._reasons, self._reading)
        for name in CACHE_NAMES:
            if generation_config.return_dict_in_generate and inputs.get(name) is not None:
                self._fill(name, inputs[name], result.sequences, call, position_ids)
                result[name] = inputs[name]
        return result

    def _fill(self, name: str, cache: Any, sequences: Tensor, call: Call, position_ids: Tensor | None) -> None:
        """Fill the model's cache, the argument `name` of its forward, with all that the original leaves there:
        sequences [B, n] without their last tokens."""
        mask, embeddings, tokens = call.attention_mask, call.embeddings, sequences[:, :-1]
        options: dict[str, Any] = {name: cache, "use_cache": True}
        if embeddings is None:
            options["input_ids"], length = tokens, tokens.shape[1]
        else:
            new = self._model.get_input_embeddings()(tokens[:, call.input_ids.shape[1] :])
            options["inputs_embeds"] = torch.cat((embeddings, new), dim=1)
            length = options["inputs_embeds"].shape[1]
        if mask is not None:
            mask = torch.cat((mask, mask.new_ones(len(mask), length - mask.shape[1])), dim=1)
            options["attention_mask"] = mask
            places = mask.long().cumsum(1) - 1
            if position_ids is None:
                places = places.masked_fill(mask == 0, 0 if CARRIES_POSITIONS else 1)
            else:  # masked tokens keep their given positions, too
                several = torch.broadcast_shapes(places.shape, (*position_ids.shape[:-1], 1))  # if it reads images
                places = places.expand(several).clone()
                places[..., : position_ids.shape[-1]] = position_ids
            options["position_ids"] = places
        if self._model._supports_logits_to_keep():
            options["logits_to_keep"] = 1
        self._model(**options)
