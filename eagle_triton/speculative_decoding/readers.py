"""A model's own forward over one growing sequence, with a cache or without."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from eagle_triton.models.families import position_limit
from eagle_triton.models.target import cache_argument
from eagle_triton.speculative_decoding.caching import prune_cache

# A cache without a configuration keeps every position of these layers, so any number of positions can be dropped.
_PRUNABLE = ("full_attention", "sliding_attention")


class CausalReader:
    """The logits of a causal language model after prefixes of one sequence.

    With use_cache the model reads only new tokens; cached positions that differ from the sequence are pruned first.
    Without use_cache it reads the whole sequence each time.

    role: the model's name in errors. vocabulary: the size of its logits. max_positions: its longest sequence, None: not
    known. forwards: the number so far. Raises TypeError for what is no model, and ValueError for a cache with layers
    that cannot be pruned.
    """

    def __init__(self, model: Any, use_cache: bool = False, role: str = "model") -> None:
        if not callable(getattr(model, "forward", None)):
            raise TypeError(f"the {role} must be a language model of transformers, got {type(model).__name__}")
        self.model, self.use_cache, self.role = model, use_cache, role
        self.vocabulary = vocabulary_size(model)
        self.max_positions = max_positions(model)
        self.device = model_device(model)
        self._parameters = inspect.signature(model.forward).parameters
        self._cache_name = cache_argument(model.forward)
        self.forwards = 0
        self._read: list[int] = []
        self._cache: Any = None
        if use_cache:
            kinds = getattr(_text_config(model), "layer_types", None) or ()
            if wrong := sorted(set(kinds) - set(_PRUNABLE)):
                raise ValueError(
                    f"the {role} has layers of the kind {', '.join(wrong)}, which cannot forget drafts; decode with "
                    "use_cache=False"
                )

    def can_read(self, ids: list[int]) -> bool:
        """Whether all tokens are in the vocabulary, and not too many."""
        return max(ids) < self.vocabulary and (self.max_positions is None or len(ids) <= self.max_positions)

    def logits(self, ids: list[int], rows: int = 1) -> Tensor:
        """float32 [rows, V]: the logits after each of the last `rows` tokens of ids. Raises ValueError for NaN."""
        self.forwards += 1
        if self.use_cache:
            kept = min(_common_prefix(self._read, ids), len(ids) - rows)
            if kept == 0:
                self._cache = self.new_cache()
            elif kept < len(self._read):
                self._cache = prune_cache(self._cache, len(self._read) - kept)
            output = self.forward(torch.tensor([ids[kept:]], device=self.device), rows, self._cache)
            self._cache = getattr(output, self._cache_name, None)
            if self._cache is None:
                raise ValueError(f"the {self.role} returned no {self._cache_name}; decode with use_cache=False")
            self._read = list(ids)
        else:
            output = self.forward(torch.tensor([ids], device=self.device), rows, None)
        logits = output.logits[0, -rows:].float()
        if bool(logits.isnan().any()):
            raise ValueError(f"the {self.role}'s logits are NaN after {len(ids) - rows + 1} tokens or more")
        return logits

    def new_cache(self) -> Any:
        """An empty cache that keeps every position."""
        return DynamicCache()

    def forward(self, ids: Tensor, rows: int, cache: Any) -> Any:
        """The model's output for ids [1, T]; at least the last `rows` logits are needed."""
        options = {self._cache_name: cache, **self.fewer_logits(rows)}
        return self.model(input_ids=ids, use_cache=self.use_cache, **options)

    def fewer_logits(self, rows: int) -> dict[str, int]:
        """The argument that limits a model to the last logits, if it has one."""
        return {"logits_to_keep": rows} if "logits_to_keep" in self._parameters else {}


class EncoderDecoderReader(CausalReader):
    """A CausalReader of an encoder-decoder model, for its decoder's sequence; `inputs` is encoded once."""

    def __init__(self, model: Any, inputs: list[int], use_cache: bool = False, role: str = "model") -> None:
        super().__init__(model, use_cache, role)
        self._encoded = model.get_encoder()(input_ids=torch.tensor([inputs], device=self.device), return_dict=True)

    def new_cache(self) -> Any:
        """An empty cache for the decoder's own positions, and one for the encoder's."""
        return EncoderDecoderCache(DynamicCache(), DynamicCache())

    def forward(self, ids: Tensor, rows: int, cache: Any) -> Any:
        """The model's output for decoder tokens ids [1, T]."""
        return self.model(
            encoder_outputs=self._encoded, decoder_input_ids=ids, use_cache=self.use_cache,
            **{self._cache_name: cache}, **self.fewer_logits(rows),
        )  # fmt: skip


def vocabulary_size(model: Any) -> int:
    """The size of a model's logits, padding included. Raises ValueError if the model does not say."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None and getattr(head, "weight", None) is not None:
        return int(head.weight.shape[0])
    size = getattr(_text_config(model), "vocab_size", None)
    if size is None:
        raise ValueError(f"{type(model).__name__} has neither get_output_embeddings() nor config.vocab_size")
    return int(size)


def max_positions(model: Any) -> int | None:
    """The longest sequence that a model supports; None if its configuration has no limit."""
    return position_limit(_text_config(model))


def model_device(model: Any) -> torch.device:
    """The device of a model's input."""
    parameter = next(model.parameters(), None)
    return getattr(model, "device", torch.device("cpu") if parameter is None else parameter.device)


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _common_prefix(first: list[int], second: list[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))
