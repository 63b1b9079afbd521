"""The caches of all layers of a model."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle_triton.engine.memory import by_slot
from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.mixers import AcceptedPath, Mixer, MixerCache
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.prompt_chunks import PromptChunks


class LayerCaches:
    """One MixerCache for each kind and shape of layer. Methods do what MixerCache's do, for all layers.

    A mixer that `reads_layer` has the cache of that layer.
    """

    def __init__(
        self, mixers: Sequence[Mixer], slots: int, pages: SlotPages | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        kinds: dict[Hashable, list[int]] = {}
        for index, mixer in enumerate(mixers):
            if mixer.reads_layer is None:
                kinds.setdefault((type(mixer), mixer.cache_shape), []).append(index)
        self._layers = tuple(tuple(indices) for indices in kinds.values())  # of each cache
        self._place = {
            layer: (kind, place) for kind, layers in enumerate(self._layers) for place, layer in enumerate(layers)
        }
        for index, mixer in enumerate(mixers):
            if mixer.reads_layer is not None:
                self._place[index] = self._place[mixer.reads_layer]
        self.caches: tuple[MixerCache, ...] = tuple(
            mixers[layers[0]].new_cache(len(layers), slots, pages, dtype, device) for layers in self._layers
        )

    @property
    def count(self) -> int:
        """The number of layers."""
        return len(self._place)

    def new_pending(self, nodes: int, committed: bool = False) -> tuple[Any, ...]:
        """The argument `pending` of `layer` and `commit`. committed: layers that can commit their rows as they run."""
        return tuple(None if committed and cache.commits_roots else cache.new_pending(nodes) for cache in self.caches)

    def layer(self, index: int, pending: tuple[Any, ...] | None = None) -> Any:
        kind, place = self._place[index]
        return self.caches[kind].layer(place, None if pending is None else pending[kind])

    def part(self, slots: slice) -> LayerCaches:
        return self._with(tuple(cache.part(slots) for cache in self.caches))

    def of_pieces(self, pieces: PromptChunks, lengths: Tensor) -> LayerCaches:
        if pieces.slots is None:
            return self
        return self._with(tuple(cache.of_pieces(pieces, lengths) for cache in self.caches))

    def _with(self, caches: tuple[MixerCache, ...]) -> LayerCaches:
        """The same layers with other caches."""
        other = copy.copy(self)
        other.caches = caches
        return other

    def clear(self) -> None:
        by_slot.clear(self.caches)

    def wipe(self, pages: Tensor) -> None:
        by_slot.wipe(self.caches, pages)

    def copy(self, source: int, target: int, length: int) -> None:
        by_slot.copy(self.caches, source, target, length)

    def move(self, source: int, target: int, length: int) -> None:
        by_slot.move(self.caches, source, target, length)

    def commit(self, ops: Operations, pending: tuple[Any, ...], accepted: AcceptedPath) -> None:
        for cache, left in zip(self.caches, pending, strict=True):
            cache.commit(ops, left, accepted)

    @property
    def tensors(self) -> Iterator[Tensor]:
        return by_slot.tensors_of(self.caches)
