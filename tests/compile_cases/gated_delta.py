"""Production settings of the gated delta rule: Qwen3.5, H 16, HV 48, K = V = 128, bf16; HV 32 has the same code."""

import torch

from eagle_triton.operands.gated_delta import PromptPieces
from eagle_triton.ops import gated_delta as kernels
from tests.compile_cases._launches import bf16, empty, fp32, i32, i64, launches

_SHARED, _HV = 3, 48  # 3 for each head of k, which is no power of two
_CHANNELS = 128 * (2 * 16 + _HV)
_PIECES = PromptPieces(i32(4), i32(4), i32(4))
_STATE, _WINDOW = fp32(4, _HV, 128, 128), bf16(4, 3, _CHANNELS)
_MMA = {"without": ("wgmma",)}  # see dots.py
_OF_PIECES = _MMA | {"local": {"_delta_chunk_kernel": 8}}  # an address
_OF_MAMBAS_PIECES = _MMA | {"local": {"_delta_chunk_kernel": 120}}  # a few values that do not fit into registers
_KINDS = ("sm_90", "sm_100"), ("sm_80",), ("gfx942",)  # GPUs with the same tiles


def _tokens(count: int) -> tuple:
    gate = bf16(4, count, 16, _SHARED)
    return bf16(4, count, _CHANNELS), gate, gate, fp32(_HV), fp32(_HV), _STATE


def _tree(nodes: int) -> tuple:
    return kernels.delta_tree, *_tokens(nodes), i64(4, nodes, 1), 8


def _conv(count: int, *ancestors, **options) -> None:
    products = bf16(4, count, 16, 128), bf16(4, count, 16, 128), bf16(4, count, 16, 128 * _SHARED)
    kernels.causal_conv(*products, bf16(_CHANNELS, 4), _WINDOW, *ancestors, **options)


def _commit_states() -> None:
    layers, mixed = fp32(48, 4, _HV, 128, 128), bf16(48, 4, 60, _CHANNELS)
    gates = fp32(48, 4, 60, 2, _HV)
    kernels.commit_states(layers, bf16(48, 4, 3, _CHANNELS), mixed, mixed, gates, i32(4, 9), i32(4))


def _gated_conv(count: int, *ancestors, **options) -> None:
    """LFM2-1.2B's: 2048 channels, three taps."""
    kernels.gated_conv(bf16(4, count, 3 * 2048), bf16(2048, 3), bf16(4, 2, 2048), *ancestors, **options)


def _commit_windows() -> None:
    kernels.commit_windows(bf16(10, 4, 2, 2048), bf16(10, 4, 60, 2048), i32(4, 9), i32(4))


def _mamba(count: int, groups: int = 8, heads: int = 128) -> tuple:
    """Nemotron-H's: 8 groups with states of 128, 128 heads of 64."""
    rows = bf16(4, count, 64 * heads + 2 * groups * 128), bf16(4, count, groups, heads // groups), None
    return *rows, fp32(heads), fp32(heads), fp32(4, heads, 128, 64)


def _commit_mamba() -> None:
    mixed = bf16(48, 4, 60, 10240)
    states, windows, gates = fp32(48, 4, 128, 128, 64), bf16(48, 4, 3, 10240), fp32(48, 4, 60, 2, 128)
    kernels.commit_states(states, windows, mixed, mixed, gates, i32(4, 9), i32(4), delta_rule=False)


def _mamba_conv(count: int, *ancestors, **options) -> None:
    product, weight, window = bf16(4, count, 1, 10240), bf16(10240, 4), bf16(4, 3, 10240)
    kernels.causal_conv(product, None, None, weight, window, *ancestors, bias=bf16(10240), **options)


_SKIP = {"skip": bf16(128)}

CASES = [
    *(
        case
        for targets in _KINDS
        for nodes in (16, 60)
        for case in launches(
            f"{nodes} nodes", *_tree(nodes), gates=fp32(4, nodes, 2, _HV), targets=targets, options=_MMA
        )
    ),
    *launches("a node", *_tree(1), gates=fp32(4, 1, 2, _HV)),
    *launches("tokens", kernels.delta_recurrent, *_tokens(1)),
    *launches("tokens with a beta above 1", kernels.delta_recurrent, *_tokens(1), max_beta=2.0),
    *launches("a plain step", kernels.delta_recurrent, *_tokens(1), active=empty(4, dtype=torch.bool)),
    *launches("a plain step", _conv, 1, active=empty(4, dtype=torch.bool)),
    *(
        case
        for targets in _KINDS
        for case in (
            *launches("prompts", kernels.delta_chunk, *_tokens(512), targets=targets, options=_MMA),
            *launches("pieces", kernels.delta_chunk, *_tokens(64), _PIECES, targets=targets, options=_OF_PIECES),
        )
    ),
    *launches("states", _commit_states),
    *launches("heads", kernels.gated_norm, bf16(4, 60, _HV, 128), bf16(4, 60, 16, 128 * _SHARED), bf16(128), 1e-6),
    *launches("a tree", _conv, 60, i64(4, 60, 1), raw=bf16(4, 60, _CHANNELS)),
    *launches("a node", _conv, 1, i64(4, 1, 1), raw=bf16(4, 1, _CHANNELS)),
    *launches("a chain", _conv, 512),
    *launches("pieces", _conv, 64, pieces=_PIECES),
    *launches("a gated tree", _gated_conv, 60, i64(4, 60, 1), raw=bf16(4, 60, 2048)),
    *launches("a gated chain", _gated_conv, 512),
    *launches("gated pieces", _gated_conv, 64, pieces=_PIECES),
    *launches("windows", _commit_windows),
    *(
        case
        for targets in _KINDS
        for case in (
            *launches(
                "60 of Mamba",
                kernels.delta_tree,
                *_mamba(60),
                i64(4, 60, 1),
                8,
                gates=fp32(4, 60, 2, 128),
                **_SKIP,
                targets=targets,
                options=_MMA,
            ),
            *launches("Mamba's prompts", kernels.delta_chunk, *_mamba(512), **_SKIP, targets=targets, options=_MMA),
            *launches(
                "Mamba's pieces",
                kernels.delta_chunk,
                *_mamba(64),
                _PIECES,
                **_SKIP,
                dt_limit=(0.001, 1e9),
                limited=i32(4),
                targets=targets,
                options=_OF_MAMBAS_PIECES,
            ),
        )
    ),
    *launches("Mamba's tokens", kernels.delta_recurrent, *_mamba(1), **_SKIP),
    *launches("Mamba's states", _commit_mamba),
    *launches(
        "Mamba's groups",
        kernels.gated_norm,
        bf16(4, 60, 8, 1024),
        bf16(4, 60, 8, 1024),
        bf16(8192),
        1e-6,
        gate_first=True,
    ),
    *launches("Mamba's tree", _mamba_conv, 60, i64(4, 60, 1), raw=bf16(4, 60, 10240)),
    *launches("Mamba's chain", _mamba_conv, 512),
]
