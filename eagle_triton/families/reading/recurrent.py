"""Reads recurrent layers: gated delta nets, in transformers' layout from 4.57 on, LFM2's convolutions, and Mamba-2."""

from __future__ import annotations

import torch
from torch import nn

from eagle_triton.engine.model.gated_delta import GatedDelta
from eagle_triton.engine.model.mamba2 import Mamba2
from eagle_triton.engine.model.modules import Norm, Projection
from eagle_triton.engine.model.short_conv import ShortConv
from eagle_triton.errors import UnknownLayerError
from eagle_triton.families.reading.module_reader import ModuleReader
from eagle_triton.families.reading.sharded import outputs_of

LAYOUTS = (
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),  # Qwen3.5
    ("in_proj_qkvz", "in_proj_ba"),  # Qwen3-Next: rows stand together by key head
    ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),  # OLMo Hybrid
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
    _check_activation(read)
    keys, values = heads * key_dim, value_heads * value_dim
    rows = {
        **{"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": value_heads, "in_proj_a": value_heads},
        **{"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * value_heads},
        **{"q_proj": keys, "k_proj": keys, "v_proj": values},
        **{"g_proj": values, "b_proj": value_heads, "a_proj": value_heads},
    }
    norm, output = ("o_norm", "o_proj") if "q_proj" in layout else ("norm", "out_proj")
    return GatedDelta(
        inputs=tuple(_projection(read, name, rows[name]) for name in layout),
        conv=_read_taps(read, "conv1d", 2 * keys + values)[0],
        A_log=_read_by_head(read, "A_log", value_heads),
        dt_bias=_read_by_head(read, "dt_bias", value_heads),
        norm=_read_gated_norm(read.at(norm), value_dim)[0],
        o=read.projection(output),
        num_k_heads=heads,
        num_v_heads=value_heads,
        k_dim=key_dim,
        v_dim=value_dim,
        max_beta=2.0 if getattr(net, "allow_neg_eigval", False) else 1.0,
    )


def read_short_conv(read: ModuleReader) -> ShortConv:
    """A short gated convolution. Raises UnsupportedModelError for unknown modules, and for biases: transformers lets
    them write to a sequence's window where a batch is padded."""
    o = read.projection("out_proj")
    size = outputs_of(o) or 0
    projection = _projection(read, "in_proj", 3 * size)
    if projection.bias is not None or o.bias is not None:
        raise UnknownLayerError(f"{read.path}.in_proj and out_proj must not have a bias (conv_bias)")
    return ShortConv(projection, _read_taps(read, "conv", size)[0], o)


def read_mamba2(read: ModuleReader) -> Mamba2:
    """A layer of Mamba-2. Raises UnsupportedModelError for unknown modules, and for a bias of the input, which
    transformers lets write to a sequence's window where a batch is padded."""
    names = ("n_groups", "num_heads", "ssm_state_size", "head_dim")
    groups, heads, state_dim, head_dim = (int(read.value(name, int)) for name in names)
    if groups < 1 or heads % groups:
        raise UnknownLayerError(f"{read.path}.num_heads must be a multiple of n_groups ({groups}), got {heads}")
    values = heads * head_dim
    channels = values + 2 * groups * state_dim
    _check_activation(read)
    least, most = read.value("time_step_limit", (tuple, list))
    conv, bias = _read_taps(read, "conv1d", channels, bias=True)
    projection = _projection(read, "in_proj", values + channels + heads)
    if projection.bias is not None:
        raise UnknownLayerError(f"{read.path}.in_proj must not have a bias (mamba_proj_bias, in Nemotron-H use_bias)")
    norm, parts = _read_gated_norm(read.at("norm"), values, groups)
    return Mamba2(
        input=projection,
        conv=conv,
        conv_bias=bias,
        **{name: _read_by_head(read, name, heads) for name in ("A_log", "dt_bias", "D")},
        norm=norm,
        norm_parts=parts,
        o=read.projection("out_proj"),
        groups=groups,
        heads=heads,
        state_dim=state_dim,
        head_dim=head_dim,
        dt_limit=(float(least), float(most)),
    )


def _check_activation(read: ModuleReader) -> None:
    activation = getattr(read.module, "activation", None)
    if activation not in ("silu", "swish"):
        raise UnknownLayerError(f"{read.path}.activation must be silu, got {activation!r}")


def _projection(read: ModuleReader, name: str, rows: int) -> Projection:
    projection = read.projection(name)
    found = outputs_of(projection)
    if found != rows:
        raise UnknownLayerError(f"{read.path}.{name} must have {rows} rows, got {found}")
    return projection


def _read_taps(
    read: ModuleReader, name: str, channels: int, bias: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The taps [C, W] of a depthwise convolution, and its bias [C] if it may have one and has it."""
    taps = read.at(name, nn.Conv1d)
    conv, weight = taps.module, taps.weight()
    expected, biased = (channels, 1, weight.shape[-1]), conv.bias is not None
    if tuple(weight.shape) != expected or (biased and not bias) or conv.stride != (1,) or conv.dilation != (1,):
        kind = "" if bias else " without a bias"
        raise UnknownLayerError(f"{taps.path} must be a depthwise convolution of {channels} channels{kind}, got {conv}")
    return weight[:, 0], taps.weight("bias") if biased else None


def _read_by_head(read: ModuleReader, name: str, heads: int) -> torch.Tensor:
    """One number for each head."""
    tensor = read.tensor(name)
    if tuple(tensor.shape) != (heads,):
        raise UnknownLayerError(f"{read.path}.{name} must be [{heads}], got {list(tensor.shape)}")
    return tensor


@torch.no_grad()
def _read_gated_norm(read: ModuleReader, size: int, groups: int = 0) -> tuple[Norm, int]:
    """An RMSNorm with its output multiplied by the SiLU of a gate; a row tests it. groups: its input is multiplied
    instead, and it norms each of so many parts of a row, or the whole row. Returns the number of parts, too."""
    layer, where, weight = read.module, read.path, read.weight()
    eps = next((e for name in ("variance_epsilon", "eps") if isinstance(e := getattr(layer, name, None), float)), None)
    if eps is not None and tuple(weight.shape) == (size,):
        row = torch.linspace(-1, 2, size, dtype=torch.float32, device=weight.device).to(weight.dtype)[None]
        gate = row.flip(1).contiguous()
        probe = torch.linspace(0.5, 1.5, size, dtype=torch.float32, device=weight.device).to(weight.dtype)
        found = torch.func.functional_call(layer, {"weight": probe}, (row, gate)).float()  # its own may be tiny
        gated = torch.nn.functional.silu(gate.float())
        for parts in (groups, 1) if groups else (1,):
            rows = (row.float() * gated if groups else row.float()).view(parts, -1)
            expected = torch.nn.functional.rms_norm(rows, rows.shape[1:], eps=eps).view(1, size) * probe.float()
            expected = expected if groups else expected * gated
            if torch.allclose(found, expected, rtol=0.05, atol=1e-3, equal_nan=True):
                return Norm(weight, eps), parts
    kind = f"of {groups} parts of [{size}] gated before" if groups else f"of [{size}], gated"
    raise UnknownLayerError(f"{where} ({type(layer).__name__}) does not compute an RMSNorm {kind} by SiLU")
