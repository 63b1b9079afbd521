"""Production settings of the products: 8b and 1b shapes at few and at 64 rows, and the portable settings."""

import torch

from eagle_triton.ops.linear import settings as table
from eagle_triton.ops.linear.few_rows import _linear_kernel, _linear_swiglu_kernel
from eagle_triton.ops.linear.settings import Settings, settings_on
from eagle_triton.ops.linear.weights import Weight
from eagle_triton.ops.views import Rows
from eagle_triton.runtime.launch import NO_FMA_FUSION
from tests.compile_cases._views import typed

_ALIGNED = (
    "cols", "depth", *(f"weights.{i}.{size}" for i in range(4) for size in ("row", "cols")),
    *(f"{view}.row" for view in ("x", "residual", "out", "gate", "up")),
)  # fmt: skip


def _case(name, settings, rows, weights, dtype="bf16", keep_splits=False, residual=False, bias=False, targets=None):
    """weights: how many stand side by side; 0 for gate and up with SwiGLU."""
    kernel = _linear_kernel if weights else _linear_swiglu_kernel
    block_m = table.block_m_of(rows)
    joined, keep_splits = settings.splits > 1 and not keep_splits, keep_splits and settings.splits > 1
    given = {
        **dict.fromkeys(("x", "gate", "up"), typed(Rows, f"*{dtype}")),
        "weights": (typed(Weight, f"*{dtype}"),) * weights,
        "biases": (f"*{dtype}",) * weights if bias else None,
        "residual": typed(Rows, f"*{dtype}") if residual else None,
        "out": typed(Rows, "*fp32" if keep_splits else f"*{dtype}"),
        "partials_ptr": "*fp32" if joined else None,
        "arrivals_ptr": "*i32" if joined else None,
    }
    for stem in ("x", "gate", "up", *(f"w{i}" for i in range(4))):
        block = [block_m if stem == "x" else settings.block_n, settings.block_k]
        there = settings.tma and not (stem[0] == "w" and int(stem[1]) >= weights)
        given[f"{stem}_desc"] = f"tensordesc<{dtype}{block}>" if there else None
    constexprs = {
        "BLOCK_M": block_m, "BLOCK_N": settings.block_n, "BLOCK_K": settings.block_k, "SPLITS": settings.splits,
        "SWAP": settings.swap, "EVEN_K": True, "KEEP_SPLITS": keep_splits, "GELU_TANH": name.startswith("gelu"),
    }  # fmt: skip
    constexprs = {argument: value for argument, value in constexprs.items() if argument in kernel.arg_names}
    signature = {
        argument: "constexpr" if argument in constexprs else given.get(argument, "i32") for argument in kernel.arg_names
    }
    options = {**NO_FMA_FUSION, "num_warps": settings.warps, "num_stages": settings.stages, "aligned": _ALIGNED}
    if targets:
        options["targets"] = targets
    return name, kernel, signature, constexprs, options


def _settings(capability: tuple[int, int], rows: int, cols: tuple[int, ...], depth: int) -> Settings:
    return settings_on(capability, torch.bfloat16, rows, cols, depth, fused=len(cols) == 2)


_SHAPES = {
    "8b qkv": ((4096, 1024, 1024), 4096),
    "8b o": ((4096,), 4096),
    "8b gate_up": ((14336, 14336), 4096),
    "8b down": ((4096,), 14336),
    "8b head": ((128256,), 4096),
    "9b gated delta": ((8192, 4096, 32, 32), 4096),
    "1b qkv": ((2048, 512, 512), 2048),
    "1b gate_up": ((8192, 8192), 2048),
}
_HOPPER_ON = ("sm_90", "sm_100")

CASES = []
for _name, (_cols, _depth) in _SHAPES.items():
    _weights = 0 if len(_cols) == 2 else len(_cols)
    for _rows in (16, 64):
        _case_settings = _settings((9, 0), _rows, _cols, _depth)
        _label = f"{_name} {_rows} rows"
        CASES.append(_case(_label, _case_settings, _rows, _weights, targets=_HOPPER_ON))
        if _case_settings.splits > 1 and _name in ("8b o", "8b down"):  # as the others but for strides
            CASES.append(
                _case(f"{_label} keep_splits", _case_settings, _rows, _weights, keep_splits=True, targets=_HOPPER_ON)
            )
_O64 = _settings((9, 0), 64, *_SHAPES["8b o"])
CASES += [
    _case("8b o 32 rows residual bias fp16", _O64, 32, 1, "fp16", residual=True, bias=True, targets=_HOPPER_ON),
    _case("8b o 64 rows plain loads", _O64._replace(tma=False), 64, 1, residual=True, targets=("sm_90",)),
]
for _name in ("8b qkv", "9b gated delta", "8b o", "8b gate_up"):
    _portable = _settings((8, 0), 64, *_SHAPES[_name])._replace(tma=False)
    _weights = 0 if _name == "8b gate_up" else len(_SHAPES[_name][0])
    CASES += [_case(f"{_name} 64 rows portable", _portable, 64, _weights, bias=_weights > 0)]
    CASES += [_case(f"{_name} 16 rows portable fp16", _portable, 16, _weights, "fp16")]
CASES += [_case("gelu 12b gate_up", _settings((9, 0), 64, (15360, 15360), 3840), 64, 0, targets=_HOPPER_ON)]
CASES += [_case("8b o 16 rows fp32", Settings(32, 32, 4, stages=3, tma=False), 16, 1, "fp32")]
