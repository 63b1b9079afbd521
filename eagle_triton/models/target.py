"""Runs the target model: its cache, its attention masks, and its features for the draft head."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from .families import FAMILIES, family_of, logit_cap, logit_scales, short_rope_length, text_config, unknown_family
from .heads import steady_attention

CAPTURE_MARK = "_output_capturing_hooks_installed"  # transformers 5


def check_architecture(config: Any, engine: bool = False, whose: str = "target") -> None:
    """Raise ValueError unless `config` is of a target that EaModel can run, with an attention that takes our masks.

    engine: allow any family that the engine runs, recurrent ones too. whose: the model's name in errors.
    """
    family = family_of(config)
    if family is None or (family.recurrent and not engine):
        raise ValueError(f"{whose}: {unknown_family(config)}")
    if not engine and short_rope_length(text_config(config)) is not None:
        raise ValueError(
            f"{whose}: longrope rotates all tokens differently past original_max_position_embeddings, so this "
            "target cannot be in an EaModel: use EAGLEInference or optimize_with_triton"
        )
    attention = getattr(config, "_attn_implementation", None)
    if attention not in (None, "sdpa", "eager"):
        raise ValueError(f"{whose}: attn_implementation must be 'sdpa' or 'eager', got {attention!r}")


def default_feature_layers(layers: int) -> tuple[int, ...]:
    """The layers with inputs that an EAGLE-3 head reads: 2, L // 2 and L - 3.

    Raises ValueError if these are not three different layers.
    """
    chosen = sorted({2, layers // 2, layers - 3})
    if len(chosen) < 3 or chosen[0] < 0 or chosen[-1] >= layers:
        raise ValueError(
            f"target: EAGLE-3 features come from layers 2, L // 2 and L - 3, which are not three different layers "
            f"for L = {layers}; the head's config.json must name them (eagle_aux_hidden_state_layer_ids)"
        )
    return tuple(chosen)


class TargetCache(Cache):
    """Keys and values of every layer, each [B, Hkv, rows, d], growing by concatenation.

    It derives from `Cache` only because the models check for that; nothing is inherited.
    """

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append rows [B, Hkv, T, d] of keys and values to a layer. Returns all its rows."""
        if layer_idx == len(self.layers):
            self.layers.append((key, value))
        else:
            old_key, old_value = self.layers[layer_idx]
            self.layers[layer_idx] = torch.cat((old_key, key), dim=2), torch.cat((old_value, value), dim=2)
        return self.layers[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows held."""
        return self.layers[layer_idx][0].shape[2] if len(self.layers) > layer_idx else 0

    def keep(self, rows: Tensor) -> None:
        """Keep these rows of every layer, [n] int64, in this order."""
        self.layers = [
            (key.index_select(2, rows.to(key.device)), value.index_select(2, rows.to(value.device)))
            for key, value in self.layers
        ]


def language_model(base_model: Any) -> Any:
    """The module of a causal language model that has its layers; for one that reads images, its language model's."""
    return getattr(base_model.model, "language_model", base_model.model)


@dataclass(frozen=True)
class LogitHead:
    """An `lm_head` with logits that are multiplied or divided, and soft-capped by tanh, as in some families."""

    lm_head: Any
    factor: float
    divisor: float
    cap: float | None

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head(hidden) * self.factor / self.divisor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def logit_head(base_model: Any) -> Callable[[Tensor], Tensor]:
    """The function from a target's last hidden state [..., H] to logits [..., V]; often `lm_head` itself."""
    (factor, divisor), cap = logit_scales(base_model), logit_cap(base_model.config)
    if (factor, divisor, cap) == (1.0, 1.0, None):
        return base_model.lm_head
    return LogitHead(base_model.lm_head, factor, divisor, cap)


def cache_argument(forward: Callable) -> str:
    """The name of the cache argument in transformers' forwards: `cache` from 5.24 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def without_capture_hooks(module: Any, copies: dict[int, Any] | None = None) -> Any:
    """A copy of a module for pickling: the same parameters, without transformers' hooks, which cannot be pickled.

    transformers hooks its layers when hidden states are first asked for. The copy has no mark, so it is hooked again.
    """
    copies = {} if copies is None else copies
    if id(module) not in copies:
        twin = copies[id(module)] = object.__new__(type(module))
        twin.__dict__ = {name: value for name, value in vars(module).items() if name != CAPTURE_MARK}
        twin._forward_hooks = OrderedDict(
            (key, hook)
            for key, hook in module._forward_hooks.items()
            if getattr(hook, "__module__", "") != "transformers.utils.output_capturing"
        )
        twin._modules = {
            name: None if child is None else without_capture_hooks(child, copies)
            for name, child in module._modules.items()
        }
    return copies[id(module)]


def attention_mask(
    config: Any, past: int, positions: Tensor, dtype: torch.dtype, visible: Tensor | None = None
) -> Tensor | dict[str, Tensor]:
    """Additive attention mask for T new tokens over `past` cached ones, in the form that the target's forward takes.

    config: of the target's language model.
    positions: [T] int64 of the new tokens; the cached ones are at 0..past-1. visible: [T, T] bool among the new
    tokens (a draft tree), None for causal. Returns [1, 1, T, past + T] in `dtype`, 0 or the lowest finite value; or a
    dict of such masks by layer type, if layers differ. The masks include the target's sliding windows.
    """
    device = positions.device
    if visible is None:
        visible = torch.ones(len(positions), len(positions), dtype=torch.bool, device=device).tril()
    visible = torch.cat((visible.new_ones(len(positions), past), visible), dim=1)

    def additive(seen: Tensor) -> Tensor:
        return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[None, None]

    kind = FAMILIES[config.model_type].window
    window = None if kind == "none" else getattr(config, "sliding_window", None)
    masks = {"full_attention": additive(visible)}
    if window is not None:
        distance = positions[:, None] - torch.cat((torch.arange(past, device=device), positions))
        masks["sliding_attention"] = additive(visible & (distance < window))
    if kind == "by_layer":
        return masks
    return masks["sliding_attention"] if window is not None else masks["full_attention"]


def decompress(base_model: Any) -> None:
    """Let compressed-tensors decompress a target. By itself it does so only before the whole model's forward."""
    for hook in [*base_model._forward_pre_hooks.values()]:
        if (getattr(hook, "__module__", None) or "").startswith("compressed_tensors."):
            hook(base_model, ())


def run_target(
    base_model: Any,
    input_ids: Tensor,
    cache: TargetCache,
    positions: Tensor | None = None,
    visible: Tensor | None = None,
    feature_layers: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """One forward of the target without its LM head; new keys and values are appended to `cache`.

    input_ids: [1, T] int64. positions: [T] int64; default: those after the cache. visible: see `attention_mask`.
    feature_layers: the inputs of these layers are the features; None: the last hidden state.
    Returns (last hidden state [1, T, H], features [1, T, F]).
    """
    past = cache.get_seq_length()
    if positions is None:
        positions = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)
    decompress(base_model)
    body, config = language_model(base_model), text_config(base_model.config)
    with steady_attention():
        outputs = body(
            input_ids=input_ids,
            attention_mask=attention_mask(config, past, positions, base_model.dtype, visible),
            position_ids=positions[None],
            use_cache=True,
            output_hidden_states=feature_layers is not None,
            **{cache_argument(body.forward): cache},
        )
    hidden = outputs.last_hidden_state
    if feature_layers is None:
        return hidden, hidden
    return hidden, torch.cat([outputs.hidden_states[i].to(hidden.device) for i in feature_layers], dim=-1)
