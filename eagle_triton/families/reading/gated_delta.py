"""Reads gated delta nets of Qwen3-Next and Qwen3.5, in transformers' layout from 4.57 on, and LFM2's convolutions."""

from __future__ import annotations

import torch
from torch import nn

from eagle_triton.engine.model.gated_delta import GatedDelta
from eagle_triton.engine.model.modules import Norm, Projection
from eagle_triton.engine.model.short_conv import ShortConv
from eagle_triton.errors import UnknownLayerError
from eagle_triton.families.reading.module_reader import ModuleReader
from eagle_triton.families.reading.sharded import outputs_of

LAYOUTS = (
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),  # Qwen3.5
    ("in_proj_qkvz", "in_proj_ba"),  # Qwen3-Next: rows stand together by key head
)


def read_gated_delta(read: ModuleReader) -> GatedDelta:
    """A gated delta net. Raises UnsupportedModelError for unknown modules."""
    net, where = read.module, read.path
    heads, value_heads, key_dim, value_dim = (
        int(read.value(name, int)) for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    )
    if heads < 1 or value_heads % heads:
        raise UnknownLayerError(f"{where}.num_v_heads must be a multiple of num_k_heads ({heads}), got {value_heads}")
    layout = next((names for names in LAYOUTS if all(hasattr(net, name) for name in names)), None)
    if layout is None:
        known = " or ".join(", ".join(names) for names in LAYOUTS)
        raise UnknownLayerError(f"{where} must have the projections {known}")
    if getattr(net, "activation", None) not in ("silu", "swish"):
        raise UnknownLayerError(f"{where}.activation must be silu, got {getattr(net, 'activation', None)!r}")
    keys, values = heads * key_dim, value_heads * value_dim
    rows = {
        **{"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": value_heads, "in_proj_a": value_heads},
        **{"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * value_heads},
    }
    return GatedDelta(
        inputs=tuple(_projection(read, name, rows[name]) for name in layout),
        conv=_read_taps(read, "conv1d", 2 * keys + values),
        A_log=_read_gate(read, "A_log", value_heads),
        dt_bias=_read_gate(read, "dt_bias", value_heads),
        norm=_read_gated_norm(read.at("norm"), value_dim),
        o=read.projection("out_proj"),
        num_k_heads=heads,
        num_v_heads=value_heads,
        k_dim=key_dim,
        v_dim=value_dim,
    )


def read_short_conv(read: ModuleReader) -> ShortConv:
    """A short gated convolution. Raises UnsupportedModelError for unknown modules, and for biases: transformers lets
    them write to a sequence's window where a batch is padded."""
    o = read.projection("out_proj")
    size = outputs_of(o) or 0
    projection = _projection(read, "in_proj", 3 * size)
    if projection.bias is not None or o.bias is not None:
        raise UnknownLayerError(f"{read.path}.in_proj and out_proj must not have a bias (conv_bias)")
    return ShortConv(projection, _read_taps(read, "conv", size), o)


def _projection(read: ModuleReader, name: str, rows: int) -> Projection:
    projection = read.projection(name)
    found = outputs_of(projection)
    if found != rows:
        raise UnknownLayerError(f"{read.path}.{name} must have {rows} rows, got {found}")
    return projection


def _read_taps(read: ModuleReader, name: str, channels: int) -> torch.Tensor:
    """The taps [C, W] of a depthwise convolution."""
    taps = read.at(name, nn.Conv1d)
    conv, weight = taps.module, taps.weight()
    expected = (channels, 1, weight.shape[-1])
    if tuple(weight.shape) != expected or conv.bias is not None or conv.stride != (1,) or conv.dilation != (1,):
        raise UnknownLayerError(
            f"{taps.path} must be a depthwise convolution of {channels} channels without a bias, got {conv}"
        )
    return weight[:, 0]


def _read_gate(read: ModuleReader, name: str, heads: int) -> torch.Tensor:
    """One number for each head."""
    tensor = read.tensor(name)
    if tuple(tensor.shape) != (heads,):
        raise UnknownLayerError(f"{read.path}.{name} must be [{heads}], got {list(tensor.shape)}")
    return tensor


@torch.no_grad()
def _read_gated_norm(read: ModuleReader, size: int) -> Norm:
    """An RMSNorm with its output multiplied by the SiLU of a gate; a row tests it."""
    layer, where, weight = read.module, read.path, read.weight()
    eps = next((e for name in ("variance_epsilon", "eps") if isinstance(e := getattr(layer, name, None), float)), None)
    if eps is not None and tuple(weight.shape) == (size,):
        row = torch.linspace(-1, 2, size, dtype=torch.float32, device=weight.device).to(weight.dtype)[None]
        gate = row.flip(1).contiguous()
        expected = torch.nn.functional.rms_norm(row.float(), (size,), weight.float(), eps)
        expected = expected * torch.nn.functional.silu(gate.float())
        if torch.allclose(layer(row, gate).float(), expected, rtol=0.05, atol=1e-3, equal_nan=True):
            return Norm(weight, eps)
    raise UnknownLayerError(f"{where} ({type(layer).__name__}) does not compute an RMSNorm of [{size}], gated by SiLU")
