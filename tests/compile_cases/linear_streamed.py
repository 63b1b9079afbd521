"""Production settings of the streamed products: every measured shape, and an unmeasured one."""

import torch

from eagle_triton.ops.linear.gluon_tiles import TILE_LAYOUT
from eagle_triton.ops.linear.hopper import (
    _HOPPER,
    _MANY_ROWS,
    _block_m,
    _prefetch_stages,
    linear_kernel,
    many_rows_settings,
    settings_for,
    swiglu_kernel,
)
from eagle_triton.ops.linear.settings import Streaming, settings_on
from eagle_triton.ops.linear.weights import Columns
from eagle_triton.ops.views import Rows
from eagle_triton.runtime.launch import NO_FMA_FUSION
from tests.compile_cases._views import typed

_ALIGNED = ("depth", "cols", *(f"columns.{i}.cols" for i in range(4)), "out.row")


def _case(
    name: str, rows: int, cols: tuple[int, ...], settings: Streaming, dtype: str = "bf16", bias: bool = False
) -> tuple:
    """cols: of each weight; two are gate and up with SwiGLU."""
    weights = 0 if len(cols) == 2 else len(cols)
    programs = sum(-(-n // settings.block_n) for n in (cols if weights else cols[:1])) * settings.splits
    kernel = linear_kernel if weights else swiglu_kernel
    block_m = _block_m(settings.swap, rows)
    constexprs = {
        "BLOCK_M": block_m,
        "BLOCK_N": settings.block_n,
        "BLOCK_K": settings.block_k,
        "SPLITS": settings.splits,
        "SWAP": settings.swap,
        "W_STAGES": settings.w_stages,
        "X_STAGES": settings.x_stages,
        "PREFETCH": _prefetch_stages(settings, 1 if weights else 2, rows, programs, 132),
        "GELU_TANH": name.startswith("gelu"),
    }
    types = {
        "columns": (Columns("i32"),) * weights,
        "biases": (f"*{dtype}",) * weights if bias else None,
        "out": typed(Rows, "*fp32" if settings.splits > 1 else f"*{dtype}"),
        **{f"w{i}_desc": None for i in range(weights, 4)},
    }
    signature = {}
    for argument in kernel.arg_names:
        block = [block_m if argument == "x_desc" else settings.block_n, settings.block_k]
        other = f"tensordesc<{dtype}{block},{TILE_LAYOUT!r}>" if argument.endswith("_desc") else "i32"
        signature[argument] = "constexpr" if argument in constexprs else types.get(argument, other)
    given = {argument: value for argument, value in constexprs.items() if argument in signature}
    options = {**NO_FMA_FUSION, "num_warps": settings.warps, "aligned": _ALIGNED, "targets": ("sm_90",)}
    return name, kernel, signature, given, options


CASES = []
for _rows, _cols, _depth in _HOPPER:
    _fused = len(_cols) == 2
    _plain = settings_on((9, 0), torch.bfloat16, _rows, _cols, _depth, _fused)
    _settings = settings_for(_rows, _cols, _depth, *_plain[:3], _fused)
    CASES.append(_case(f"{_rows} rows {_cols} of {_depth}", _rows, _cols, _settings))
_NARROW = (2048, 512, 512)
_UNMEASURED = settings_for(24, _NARROW, 2048, 64, 128, 4)
CASES.append(_case("unmeasured, bias, fp16", 24, _NARROW, _UNMEASURED, "fp16", bias=True))
_GELU = settings_for(60, (15360, 15360), 3840, 128, 64, 1, True)
CASES.append(_case("gelu", 60, (15360, 15360), _GELU))
_WIDER = [(_rows, _cols, _depth) for _rows, _cols, _depth in _MANY_ROWS]
_WIDER += [(_rows, _NARROW, 2048) for _rows in (80, 129, 256)] + [(80, (8192, 8192), 2048)]
for _rows, _cols, _depth in _WIDER:
    _settings = many_rows_settings(_rows, _cols, _depth, len(_cols) == 2)
    CASES.append(_case(f"{_rows} rows {_cols} of {_depth}", _rows, _cols, _settings))
