"""Arguments, config fields and inputs of `generate`: which of them the engine supports, and the reasons for others."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from eagle_triton.families.causal_lm import body_path
from eagle_triton.models.families import FAMILIES, text_config

CARRIES_POSITIONS = hasattr(GenerationMixin, "_prepare_position_ids_for_generation")
"""Whether transformers counts positions on after a prompt. Older versions repeat the last given one, and count those of
padded prompts differently in chunks."""


CACHE_NAMES = ("cache", "past_key_values")
"""Names of the cache in models' forwards, the newest first."""


OWN_METHODS = (
    *("generate", "_sample", "_prepare_generation_config", "_validate_model_kwargs"),
    *("_update_model_kwargs_for_generation", "prepare_inputs_for_generation"),
)
"""Methods of transformers that a model must not override: the engine calls or replaces them.

Classes of transformers may prepare a forward's inputs in their own way (Phi-3, Gemma 3): for text alone the result is
the same.
"""

NOT_RUN = (
    *("_sample", "_prefill", "_has_unfinished_sequences"),
    *("_update_model_kwargs_for_generation", "prepare_inputs_for_generation"),
)
"""Methods of transformers' mixin that the engine does not call. It calls the others, also if they were replaced."""

PRIVATE_METHODS = tuple(
    name
    for name, method in vars(GenerationMixin).items()
    if name.startswith("_") and not name.startswith("__") and inspect.isfunction(method) and name not in OWN_METHODS
)
"""Further methods of transformers' generation, which classes of transformers may override, but no others."""

ARGUMENTS = frozenset(
    {
        "self", "inputs", "generation_config", "logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria",
        "streamer", "synced_gpus", "use_model_defaults",
    }
)  # fmt: skip
"""Arguments of `generate` that the engine supports. With any other one, the original runs."""

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
"""Fields of a GenerationConfig that the engine honours."""

NO_EFFECT = frozenset(
    {
        "assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind", "cache_config",
        "compile_config", "continuous_batching_config", "decoder_start_token_id", "disable_compile", "early_stopping",
        "length_penalty", "low_memory", "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "speculation_type", "target_lookbehind", "transformers_version",
    }
)  # fmt: skip
"""Fields that only other ways of decoding read, such as beams, assistants and static caches."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "assistant_early_exit": (),
    "cache_implementation": (  # kinds that keep keys and values exact; "quantized" rounds them
        *("dynamic", "hybrid", "hybrid_chunked", "offloaded", "offloaded_hybrid", "offloaded_hybrid_chunked"),
        *("offloaded_static", "sliding_window", "static"),
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
"""Fields that send a call to the original unless they have one of these values or None; see `config_reasons`."""

INPUTS = frozenset({"attention_mask", "input_ids", "inputs_embeds", "logits_to_keep", "position_ids"})
"""Inputs of the model's forward that the engine takes or checks."""


def config_reasons(config: GenerationConfig) -> list[str]:
    """The fields of a config with which the engine cannot decode, and their values.

    A field that is in none of the tables above, of a newer transformers, must be at its default.
    """
    default, reasons = _default_fields(), []
    for name, value in vars(config).items():
        if name.startswith("_") or name in HONOURED or name in NO_EFFECT or value is None:
            continue
        if name in NEUTRAL:
            neutral = value in NEUTRAL[name]
        else:
            neutral = name not in default or value in (False, default[name])  # a user's own entries mean nothing
        if not neutral:
            reasons.append(f"{name}={value!r}")
    if not isinstance(config.use_cache, bool):  # transformers then has a cache, but may feed the whole sequence
        reasons.append(f"use_cache={config.use_cache!r}")
    compiled = getattr(config, "compile_config", None) is not None
    if compiled and config.cache_implementation not in (None, "dynamic", "offloaded"):  # otherwise nothing is compiled
        reasons.append(f"compile_config beside cache_implementation={config.cache_implementation!r}")
    chunk = getattr(config, "prefill_chunk_size", None)
    right = CARRIES_POSITIONS and config.use_cache is not False and is_count(chunk)
    if chunk is not None and not right:
        reasons.append(f"prefill_chunk_size={chunk!r}")
    return reasons


@functools.cache
def _default_fields() -> dict[str, Any]:
    """The fields of an untouched config."""
    return vars(GenerationConfig())


def methods_of(model: Any) -> dict[str, Any]:
    """The methods of generation that a model's class has."""
    return {name: getattr(type(model), name, None) for name in (*OWN_METHODS, *PRIVATE_METHODS)}


def take_reasons(bound: inspect.BoundArguments, model: Any, methods: dict[str, Any]) -> list[str]:
    """Take the arguments that only the original supports out of `bound`. Returns them, and the reasons for the original
    that do not depend on arguments. methods: `methods_of` the model when it was optimised."""
    reasons = []
    for name, value in list(bound.arguments.items()):
        nothing = value is None or (isinstance(value, list) and not value)
        if name not in ARGUMENTS and name != "kwargs" and not nothing:
            reasons.append(name)
            del bound.arguments[name]
    inputs = bound.arguments.get("kwargs", {})
    reasons += [name for name in CACHE_NAMES if inputs.pop(name, None) is not None]
    now = methods_of(model)
    if now["generate"] is not methods["generate"]:
        raise RuntimeError(
            f"{type(model).__name__}.generate was replaced after optimising: restore the model and optimise it again"
        )
    own = [name for name in methods if now[name] is not methods[name] or (name != "generate" and name in vars(model))]
    reasons += [f"model.{name}, which was replaced after optimising" for name in own]
    name = FAMILIES[text_config(model.config).model_type].attention
    attentions = [layer._modules.get(name) for layer in model.get_submodule(body_path(model)).layers]
    if any(part is not None and part.training and getattr(part, "attention_dropout", 0) for part in attentions):
        reasons.append("attention_dropout of a model in training mode")
    return reasons


def refused_inputs(inputs: dict[str, Any]) -> list[str]:
    """The inputs of the model's forward that only the original supports."""
    names = [name for name, value in inputs.items() if value is not None and name not in INPUTS]
    keep = inputs.get("logits_to_keep")
    if keep is not None and (type(keep) is not int or keep < 0):  # an integer keeps the last row, too
        names.append("logits_to_keep")
    if inputs.get("position_ids") is not None and not CARRIES_POSITIONS:
        names.append("position_ids")
    return names


def are_assumed(position_ids: Tensor | None, attention_mask: Tensor | None) -> bool:
    """Whether positions [B | 1, L] count up by one from token to token, without masked tokens.

    Models that read images have several for each token, [3 or 4, B, L], which are equal for text.
    """
    if position_ids is not None and position_ids.ndim == 3 and bool((position_ids == position_ids[:1]).all()):
        position_ids = position_ids[0]
    if position_ids is None or position_ids.ndim != 2:
        return False
    if attention_mask is None:
        places = torch.arange(position_ids.shape[1], device=position_ids.device)
        return torch.equal(position_ids.long(), places.expand_as(position_ids))
    if attention_mask.shape[1:] != position_ids.shape[1:]:
        return False
    places = attention_mask.long().cumsum(1) - 1
    return bool(((position_ids == places) | (attention_mask == 0)).all())


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
