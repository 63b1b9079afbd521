"""Replaces every `self_attn.forward` of the target, for code that drives the model itself.

A mask becomes ancestor bits if all cached tokens are visible, and each new token sees itself and some of those before
it (causal, or a draft tree). For any other mask the original runs, and the report counts it. A forward's mask is read
once, in its first layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.model.mixers import Attention, KeyValues, Mixer, NewRows
from eagle_triton.engine.model.modules import project
from eagle_triton.families.causal_lm import body_path
from eagle_triton.models.target import TargetCache
from eagle_triton.operands.ancestors import pack_ancestors
from eagle_triton.patching import Fallback, PatchPoint

HARMLESS = frozenset(
    {"cache_position", "num_items_in_batch", "output_hidden_states", "output_router_logits", "use_cache"}
)
"""Arguments that layers pass on and that change nothing in attention over the caches known here."""


def patch_points(model: Any, engine: Engine) -> tuple[PatchPoint, ...]:
    """One patch point per layer of `model.base_model`. The Python module of the base model's class decides which of the
    forwards below replaces the layers' own."""
    source = type(model.base_model).__module__.rpartition(".")[2]
    make = FORWARDS.get(source, transformers_forward)
    attention = TargetAttention(engine)
    path = body_path(model.base_model)
    modules = [layer.self_attn for layer in model.base_model.get_submodule(path).layers]
    return tuple(
        PatchPoint(
            module,
            "forward",
            make(attention, index, module),
            f"base_model.{path}.layers.{index}.self_attn.forward",
            "rotary and cache append, tree attention",
            harmless=HARMLESS,
            remedy="docs/limits.md#attention-outside-the-engine",
        )
        for index, module in enumerate(modules)
    )


# --- the forwards, one for each signature ---


def kv_forward(
    attention: TargetAttention,
    index: int,
    module: nn.Module,
    *,
    all_layers: bool = False,
    returns_cache: bool = False,
) -> Callable:
    """For Llama and Mixtral of SafeAILab and eagle-llm, and SafeAILab's Qwen2.

    `past_key_value` is the layer's pair of preallocated caches; all_layers: the list of all layers' pairs.
    returns_cache: the forward returns it too.
    """
    sdpa = all_layers and "Sdpa" in type(module).__name__  # Qwen2's: None may mean a causal mask

    def forward(
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        use_cache: bool = False,
        cache_position: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, None, Any]:
        """Attention of new tokens [B, n, H] over the cache and themselves: ([B, n, H], None, None or the caches)."""
        check_plain(module, output_attentions)
        pair = past_key_value and past_key_value[index] if all_layers else past_key_value
        rows = PreallocatedRows(pair, hidden_states)
        out = attention(index, hidden_states, attention_mask, position_ids, rows, sdpa)
        return out, None, past_key_value if returns_cache else None

    return forward


def qwen3_kv_forward(attention: TargetAttention, index: int, module: nn.Module) -> Callable:
    """For SafeAILab's Qwen3: takes the layer's pair, and everything else by keyword."""

    def forward(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_value: Any = None,
        cache_position: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, None, None]:
        """Attention of new tokens [B, n, H] over the cache and themselves: ([B, n, H], None, None)."""
        check_plain(module, output_attentions)
        rows = PreallocatedRows(past_key_value, hidden_states)
        return attention(index, hidden_states, attention_mask, position_ids, rows, False), None, None

    return forward


def transformers_forward(attention: TargetAttention, index: int, module: Any) -> Callable:
    """For Hugging Face's own modules, driven with the cache of our EaModel.

    The cache is `past_key_value` in transformers 4, `past_key_values` in 5, and `cache` from 5.24 on.
    """

    def forward(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        cache_position: Tensor | None = None,
        *,
        past_key_values: Any = None,
        past_key_value: Any = None,
        position_ids: Tensor | None = None,
        output_attentions: bool = False,
        is_causal: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Attention of new tokens [B, n, H] over the cache and themselves: ([B, n, H], None)."""
        check_plain(module, output_attentions, is_causal)
        given = [past for past in (cache, past_key_values, past_key_value) if past is not None]
        if len(given) > 1:
            raise Fallback("several caches are given")
        rows = GrowingRows(given[0] if given else None, index, hidden_states)
        sdpa = module.config._attn_implementation == "sdpa"
        return attention(index, hidden_states, attention_mask, position_ids, rows, sdpa), None

    return forward


FORWARDS: dict[str, Callable[..., Callable]] = {
    "modeling_llama_kv": kv_forward,
    "modeling_mixtral_kv": partial(kv_forward, returns_cache=True),
    "modeling_qwen2_kv": partial(kv_forward, all_layers=True),
    "modeling_qwen3_kv": qwen3_kv_forward,
}


def check_plain(module: nn.Module, output_attentions: bool | None, is_causal: bool | None = None) -> None:
    """Raise Fallback, with all reasons, for a call that the operations cannot serve."""
    reasons = {
        "attention weights are asked for": output_attentions,
        f"is_causal={is_causal}": is_causal is not None and not is_causal,
        "training mode": module.training,
        "gradients are being recorded": torch.is_grad_enabled(),
        "torch.autocast is on": torch.is_autocast_enabled(next(module.parameters()).device.type),
    }
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise Fallback(*found)


# --- the attention itself ---


@dataclass(frozen=True)
class Frame:
    """Shared by the layers of one forward: mask and positions in the operations' form."""

    mask: Callable[[], Tensor | None]  # weak references to the forward's tensors, by which its layers find this frame
    position_ids: Callable[[], Tensor | None]
    past: int
    lengths: Tensor  # [B] int32
    depths: Tensor  # [B, n] int32: positions minus lengths
    ancestors: Tensor | None  # [B, n, W] int64, None: causal
    refused: str = ""  # why the original must run, if it must

    def serves(self, mask: Tensor | None, position_ids: Tensor, past: int, x: Tensor) -> bool:
        """Whether a layer called with these tensors belongs to the same forward."""
        same = self.mask() is mask and self.position_ids() is position_ids
        return same and self.past == past and self.depths.shape == x.shape[:2]


class TargetAttention:
    """The target's attention layers. Keeps the frame of the running forward."""

    def __init__(self, engine: Engine):
        self.engine, self.ops, self.dtype = engine, engine.ops, engine.view.dtype
        self.layers = [_without_window(layer.mixer) for layer in engine.view.layers]  # the masks have the windows
        self.frame: Frame | None = None

    def __call__(
        self,
        index: int,
        x: Tensor,
        mask: Tensor | None,
        position_ids: Tensor | None,
        rows: PreallocatedRows | GrowingRows,
        none_is_causal: bool,
    ) -> Tensor:
        """x [B, n, H] of layer `index` -> [B, n, H]; its keys and values are appended to `rows`.

        mask: additive or bool [B or 1, 1, n, past + n]; None: causal or nothing, as in the caller's implementation.
        position_ids [B or 1, n]. Raises Fallback, with nothing changed, for an unknown mask or cache.
        """
        if x.dtype != self.dtype:
            raise Fallback(f"hidden_states must be {self.dtype}, got {x.dtype}")
        if position_ids is None or position_ids.shape[-1] != x.shape[1]:
            raise Fallback("position_ids are missing or of another length")
        frame = self.frame
        if index == 0 or frame is None or not frame.serves(mask, position_ids, rows.length, x):
            frame = self.frame = _frame(mask, position_ids, rows.length, x, none_is_causal)
            if self.engine.watch is not None and (change := self.engine.watch.change()):
                frame = self.frame = replace(frame, refused=change)
        if frame.refused:
            raise Fallback(frame.refused)
        attention = self.layers[index]
        cache = rows.cache(attention)
        new_keys = None if frame.ancestors is None else x.shape[1]
        where = NewRows(frame.lengths, frame.lengths, frame.depths, frame.ancestors, new_keys)
        with self.engine.current():
            out = attention.attend(self.ops, x, KeyValues(cache), where)
            rows.keep()
            return project(self.ops, attention.o, out)


def _without_window(mixer: Mixer) -> Attention:
    if not isinstance(mixer, Attention):
        raise TypeError(f"expected attention layers, got a {type(mixer).__name__}")
    return replace(mixer, sliding_window=None)


def _frame(mask: Tensor | None, position_ids: Tensor, past: int, x: Tensor, none_is_causal: bool) -> Frame:
    batch, count, _ = x.shape
    ancestors, refused = None, ""
    if mask is None and count > 1 and not (none_is_causal and past == 0):
        refused = "no attention mask for several new tokens"
    elif mask is not None:
        try:
            ancestors = _ancestors(mask, past, batch, count)
        except Fallback as fallback:
            refused = str(fallback)
    return Frame(
        mask=(lambda: None) if mask is None else weakref.ref(mask),
        position_ids=weakref.ref(position_ids),
        past=past,
        lengths=torch.full((batch,), past, dtype=torch.int32, device=x.device),
        depths=(position_ids - past).to(torch.int32).expand(batch, count),
        ancestors=ancestors,
        refused=refused,
    )


def _ancestors(mask: Tensor, past: int, batch: int, count: int) -> Tensor | None:
    """Ancestor bits of the n new tokens, from their mask [B or 1, 1, n, past + n]; None if it is causal.

    Raises Fallback for a mask with values other than 0 and the lowest, and for one that hides a cached token, hides a
    token from itself, or shows a later one. Waits for the device once.
    """
    if mask.shape[0] not in (1, batch) or mask.shape[1:] != (1, count, past + count):
        raise Fallback(f"attention mask of shape {list(mask.shape)} for {count} new and {past} cached tokens")
    if mask.dtype == torch.bool:
        visible, hidden = mask, ~mask
    else:
        visible, hidden = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
    new, causal = visible[:, 0, :, past:], visible.new_ones(count, count).tril()
    findings = (
        (visible | hidden).all(),
        visible[..., :past].all(),
        (new <= causal).all() & new.diagonal(dim1=-2, dim2=-1).all(),
        (new == causal).all(),
    )
    plain, sees_past, ordered, is_causal = torch.stack(findings).tolist()
    if not (plain and sees_past and ordered):
        raise Fallback(
            "the attention mask is neither causal nor a tree over the new tokens (padding, a window, a bias)"
        )
    return None if is_causal else pack_ancestors(new).expand(batch, -1, -1)


# --- where keys and values lie ---


class PreallocatedRows:
    """The pair of preallocated caches of one layer, each with `data` [B, Hkv, T, d] and `current_length` []."""

    def __init__(self, pair: Any, x: Tensor):
        try:
            self.key, self.value = pair
            self.length = int(self.key.current_length)
            data, other = self.key.data, self.value.data
            same_length = self.length == int(self.value.current_length)
        except (TypeError, ValueError, AttributeError):
            raise Fallback("no preallocated key and value cache is given") from None
        self.count = x.shape[1]
        if data.shape[0] != x.shape[0] or not same_length or self.length + self.count > data.shape[2]:
            raise Fallback("the cache is of another batch or too short")
        offset = other.storage_offset() - data.storage_offset()
        shared = data.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        if not shared or offset < 0 or data.shape != other.shape or data.stride() != other.stride():
            raise Fallback("keys and values do not lie in one tensor")
        self.both = data.as_strided((2, *data.shape), (offset, *data.stride()), data.storage_offset())

    def cache(self, attention: Attention) -> Tensor:
        """Keys and values [2, B, Hkv, T, d] with room for the new rows."""
        return self.both

    def keep(self) -> None:
        """Count the new rows."""
        self.key.current_length.add_(self.count)
        self.value.current_length.add_(self.count)


class GrowingRows:
    """One layer of a TargetCache, or no cache at all: its rows move to a new tensor with room for the new ones."""

    def __init__(self, past: Any, index: int, x: Tensor):
        if past is not None and not isinstance(past, TargetCache):
            raise Fallback(f"a cache of class {type(past).__name__}")
        self.past, self.index, self.x = past, index, x
        self.length = 0 if past is None else past.get_seq_length(index)

    def cache(self, attention: Attention) -> Tensor:
        """Keys and values [2, B, Hkv, past + n, d], the old rows copied."""
        batch, count, _ = self.x.shape
        shape = (2, batch, attention.num_kv_heads, self.length + count, attention.head_dim)
        self.grown = self.x.new_empty(shape)
        if self.past is not None and self.length:
            for place, rows in zip(self.grown, self.past.layers[self.index], strict=True):
                place[:, :, : self.length] = rows
        return self.grown

    def keep(self) -> None:
        """Hand the grown rows to the cache."""
        if self.past is not None:
            self.past.layers[self.index : self.index + 1] = [tuple(self.grown)]
