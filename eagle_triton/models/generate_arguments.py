"""The arguments of `generate`, resolved as Hugging Face does and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .checks import check_attention_mask, check_max_length, check_positions, check_prompt
from .families import position_limit, text_config

DEFAULT_NEW_TOKENS = 512


@dataclass(frozen=True)
class GenerateArguments:
    """A batch to decode: prompts int64 [L] without padding, each one's most new tokens, and the stop tokens."""

    prompts: list[Tensor]
    new_tokens: list[int]
    stop_ids: frozenset[int]
    pad_id: int

    @staticmethod
    def resolve(
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        max_length: int | None,
        max_new_tokens: int | None,
        eos_token_id: int | list[int] | None,
        pad_token_id: int | None,
    ) -> GenerateArguments:
        """From the arguments of `EaModel.generate`, which documents them. model: an EaModel of any package.

        No sequence exceeds the target's positions. Raises TypeError for a length that is not an integer, ValueError for
        other bad arguments.
        """
        check_prompt(input_ids, model.base_model.get_input_embeddings().weight.shape[0])
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        check_attention_mask(attention_mask, input_ids)
        prompts = [row[kept] for row, kept in zip(input_ids, attention_mask.bool(), strict=True)]
        positions = max_positions(model.base_model)
        for prompt in prompts:
            check_positions(len(prompt), positions)
        for name, value in (("max_length", max_length), ("max_new_tokens", max_new_tokens)):
            if value is not None and not hasattr(value, "__index__"):
                raise TypeError(f"{name}: must be an integer, got {value!r}")
        if max_new_tokens is not None:
            if max_new_tokens < 0:
                raise ValueError(f"max_new_tokens: must not be negative, got {max_new_tokens}")
            new_tokens = [max_new_tokens] * len(prompts)
        elif max_length is not None:
            for prompt in prompts:
                check_max_length(len(prompt), max_length)
            new_tokens = [max_length - len(prompt) for prompt in prompts]
        else:
            new_tokens = [DEFAULT_NEW_TOKENS] * len(prompts)
        if positions is not None:
            new_tokens = [min(new, positions - len(prompt)) for new, prompt in zip(new_tokens, prompts, strict=True)]
        stop = stop_ids(model, eos_token_id)
        return GenerateArguments(prompts, new_tokens, stop, _pad_id(model, pad_token_id, stop))

    def pad(self, rows: list[Tensor]) -> Tensor:
        """Sequences [n] of different lengths as one [B, longest], padded on the right."""
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad_id)


def check_sampling_is_meant(do_sample: bool, temperature: float, top_p: float, top_k: int, min_p: float) -> None:
    """Raise ValueError for sampling options that greedy decoding would ignore. They are allowed at temperature 0, which
    asks for greedy decoding; every filter keeps its token."""
    if do_sample or temperature == 0:
        return
    given = dict(temperature=(temperature, (1,)), top_p=(top_p, (1,)), top_k=(top_k, (0,)), min_p=(min_p, (0,)))
    for name, (value, neutral) in given.items():
        if value is not None and value not in neutral:
            raise ValueError(f"{name}={value}: needs do_sample=True; without it decoding is greedy and ignores {name}")


def max_positions(base_model: Any) -> int | None:
    """The longest sequence that a target supports; None if its configuration has no limit."""
    return position_limit(text_config(getattr(base_model, "config", None)))


def stop_ids(model: Any, eos_token_id: int | list[int] | None = None) -> frozenset[int]:
    """The tokens that end a sequence: those given, else the generation config's, else the tokenizer's. A negative id
    means no token. Raises TypeError for anything that is not an id."""
    ids = _token_setting(model, "eos_token_id", eos_token_id)
    if isinstance(ids, Tensor):  # transformers takes a tensor, too
        ids = ids.flatten().tolist()
    ids = [] if ids is None else list(ids) if isinstance(ids, (list, tuple, set, frozenset)) else [ids]
    if not all(isinstance(token, int) for token in ids):
        raise TypeError(f"eos_token_id: must be a token id or a list of them, got {ids}")
    return frozenset(token for token in ids if token >= 0)


def _token_setting(model: Any, name: str, given: Any) -> Any:
    """`given`, else the generation config's value, else the tokenizer's, else None."""
    places = getattr(model.base_model, "generation_config", None), getattr(model, "tokenizer", None)
    values = (given, *(getattr(place, name, None) for place in places))
    return next((value for value in values if value is not None), None)


def original_stop_ids(model: Any, is_llama3: bool = False) -> frozenset[int]:
    """The tokens at which the original EaModel's methods stop: the tokenizer's end token, and with `is_llama3`
    <|eot_id|>. Raises ValueError for `is_llama3` without a tokenizer."""
    if model.tokenizer is None:
        if is_llama3:
            raise ValueError("is_llama3: needs a tokenizer to find <|eot_id|>, and the model has none")
        return frozenset()
    ids = {model.tokenizer.eos_token_id}
    if is_llama3:
        ids.add(model.tokenizer.convert_tokens_to_ids("<|eot_id|>"))
    return frozenset(ids - {None})


def _pad_id(model: Any, pad_token_id: int | None, stop: frozenset[int]) -> int:
    pad = _token_setting(model, "pad_token_id", pad_token_id)
    return min(stop, default=0) if pad is None else pad


def make_generator(
    seed: int | None, generator: torch.Generator | None, device: torch.device | str
) -> torch.Generator | None:
    """The generator for `seed` or `generator`; None: torch's global one. Raises ValueError if both are given."""
    if seed is not None and generator is not None:
        raise ValueError("generate: give either generator or seed, not both")
    return generator if seed is None else torch.Generator(device).manual_seed(seed)
