"""What all layers of a model remember: one cache for each kind and shape of layer, none of which is every layer's."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.mixers import AcceptedPath, Mixer, MixerCache
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.prompt_chunks import PromptChunks


class LayerCaches:
    """What all layers of a model remember of each slot's sequence: one MixerCache for each kind and shape of layer."""

    def __init__(
        self, mixers: Sequence[Mixer], slots: int, pages: SlotPages | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """pages: of the slots, see Mixer.new_cache."""
        kinds: dict[Hashable, list[int]] = {}
        for index, mixer in enumerate(mixers):
            kinds.setdefault((type(mixer), mixer.cache_shape), []).append(index)
        self._layers = tuple(tuple(indices) for indices in kinds.values())  # of each cache
        self._place = {
            layer: (kind, place) for kind, layers in enumerate(self._layers) for place, layer in enumerate(layers)
        }
        self.caches: tuple[MixerCache, ...] = tuple(
            mixers[layers[0]].new_cache(len(layers), slots, pages, dtype, device) for layers in self._layers
        )

    @property
    def count(self) -> int:
        """How many layers."""
        return len(self._place)

    def new_pending(self, nodes: int) -> tuple[Any, ...]:
        """Where the forwards of one step over trees of `nodes` nodes leave what `commit` asks for, for each cache."""
        return tuple(cache.new_pending(nodes) for cache in self.caches)

    def layer(self, index: int, pending: tuple[Any, ...] | None = None) -> Any:
        """What the forward of layer `index` takes; `pending` is None in a causal one."""
        kind, place = self._place[index]
        return self.caches[kind].layer(place, None if pending is None else pending[kind])

    def part(self, slots: slice) -> LayerCaches:
        """The same of some of the slots: views of the same tensors."""
        return self._with(tuple(cache.part(slots) for cache in self.caches))

    def of_pieces(self, pieces: PromptChunks, lengths: Tensor) -> LayerCaches:
        """The same for a causal forward over pieces of prompts of lengths [B] int32."""
        if pieces.slots is None:
            return self
        return self._with(tuple(cache.of_pieces(pieces, lengths) for cache in self.caches))

    def _with(self, caches: tuple[MixerCache, ...]) -> LayerCaches:
        """The same layers on other caches."""
        other = object.__new__(LayerCaches)
        other._layers, other._place, other.caches = self._layers, self._place, caches
        return other

    def clear(self) -> None:
        """Begin all slots anew."""
        for cache in self.caches:
            cache.clear()

    def wipe(self, pages: Tensor) -> None:
        """Leave nothing in pages [n] int64 of the pool, which nobody holds any more."""
        for cache in self.caches:
            cache.wipe(pages)

    def copy(self, source: int, target: int, length: int) -> None:
        """Let slot `target` remember what slot `source` does, a sequence of `length` committed tokens."""
        for cache in self.caches:
            cache.copy(source, target, length)

    def move(self, source: int, target: int, length: int) -> None:
        """The same where the slot's pages have gone from `source` to `target`."""
        for cache in self.caches:
            cache.move(source, target, length)

    def commit(self, ops: Operations, pending: tuple[Any, ...], accepted: AcceptedPath) -> None:
        """Remember the accepted path of the trees whose forwards left `pending`."""
        for cache, left in zip(self.caches, pending, strict=True):
            cache.commit(ops, left, accepted)

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All that is kept on the device."""
        for cache in self.caches:
            yield from cache.tensors
