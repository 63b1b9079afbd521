"""Drop the last positions of a model's cache."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicCache, EncoderDecoderCache


def prune_cache(cache: Any, num_tokens_to_discard: int) -> Any:
    """A cache without its last positions; 0 changes nothing.

    cache: a `DynamicCache`, or an `EncoderDecoderCache` of these, pruned in place and returned; or a tuple of layers
    (keys, values, ...) [B, H, T, d], for which a new tuple is returned. An encoder's keys and values are kept.

    Raises ValueError, before anything is pruned, for a number below 0 or above the positions held, and for a layer that
    does not store every position separately (a sliding window, a recurrent state, a static or quantised buffer);
    TypeError for another kind of cache.
    """
    if num_tokens_to_discard < 0:
        raise ValueError(f"prune_cache: num_tokens_to_discard must be at least 0, got {num_tokens_to_discard}")
    if isinstance(cache, EncoderDecoderCache):
        prune_cache(cache.self_attention_cache, num_tokens_to_discard)
        return cache
    if isinstance(cache, tuple):
        return _pruned_tuple(cache, num_tokens_to_discard)
    if not hasattr(cache, "layers"):
        if not isinstance(cache, DynamicCache):
            raise TypeError(f"prune_cache: a DynamicCache or a tuple of layers expected, got {type(cache).__name__}")
        _check_length(cache.get_seq_length(), num_tokens_to_discard)
        if num_tokens_to_discard:
            cache.crop(cache.get_seq_length() - num_tokens_to_discard)  # transformers 4.53 takes the number to keep
        return cache
    _prune_layers(cache.layers, num_tokens_to_discard)
    return cache


def _prune_layers(layers: list[Any], discard: int) -> None:
    from transformers.cache_utils import DynamicLayer  # since transformers 4.54

    if wrong := [
        (place, type(layer).__name__) for place, layer in enumerate(layers) if type(layer) is not DynamicLayer
    ]:
        place, kind = wrong[0]
        raise ValueError(
            f"prune_cache: layer {place} is a {kind}: its last positions cannot be dropped (use_cache=False needs no "
            "cache)"
        )
    filled = [layer for layer in layers if layer.get_seq_length()]
    _check_length(min((layer.get_seq_length() for layer in filled), default=0), discard)
    if discard:
        for layer in filled:
            layer.keys, layer.values = layer.keys[..., :-discard, :], layer.values[..., :-discard, :]


def _pruned_tuple(layers: tuple[Any, ...], discard: int) -> tuple[Any, ...]:
    _check_length(min((layer[0].shape[-2] for layer in layers), default=0), discard)
    if not discard:
        return layers
    return tuple((layer[0][..., :-discard, :], layer[1][..., :-discard, :], *layer[2:]) for layer in layers)


def _check_length(held: int, discard: int) -> None:
    if discard > held:
        raise ValueError(f"prune_cache: {discard} positions to discard, but the cache holds {held}")
