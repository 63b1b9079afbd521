"""Production settings of the streamed products: every measured shape, and an unmeasured one."""

from eagle_triton.launch import EXACT
from eagle_triton.streamed_linear import (
    _HOPPER,
    _WIDE,
    TILE_LAYOUT,
    Streaming,
    _ahead,
    _block_m,
    linear_kernel,
    settings_for,
    swiglu_kernel,
)

_ALIGNED = ("depth", "cols0", "cols1", "cols2", "cols", "stride_om")


def _case(name: str, rows: int, settings: Streaming, weights: int, dtype: str = "bf16", bias: bool = False) -> tuple:
    """weights: how many stand side by side; 0 for gate and up with SwiGLU."""
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
        "AHEAD": _ahead(settings, 1 if weights else 2, 1),
    }
    absent = {f"w{i}_desc" for i in range(weights, 3)} | {f"bias{i}_ptr" for i in range(weights if bias else 0, 3)}
    signature, given = {}, {}
    for argument in kernel.arg_names:
        if argument in constexprs or argument in absent:
            signature[argument], given[argument] = "constexpr", constexprs.get(argument)
        elif argument.endswith("_desc"):
            block = [block_m if argument == "x_desc" else settings.block_n, settings.block_k]
            signature[argument] = f"tensordesc<{dtype}{block},{TILE_LAYOUT!r}>"
        elif argument.endswith("_ptr"):
            split = argument == "out_ptr" and settings.splits > 1
            signature[argument] = "*fp32" if split else f"*{dtype}"
        else:
            signature[argument] = "i32"
    options = {**EXACT, "num_warps": 4, "aligned": _ALIGNED, "targets": ("sm_90",)}
    return name, kernel, signature, given, options


CASES = []
for _rows, _cols, _depth in _HOPPER:
    _splits = 1 if len(_cols) == 2 or max(_cols) > 14336 else 2
    _settings = settings_for(_rows, _cols, _depth, 64, 128, _splits, _rows == 16, len(_cols) == 2)
    CASES.append(_case(f"{_rows} rows {_cols} of {_depth}", _rows, _settings, 0 if len(_cols) == 2 else len(_cols)))
_UNMEASURED = settings_for(24, (2048, 512, 512), 2048, 64, 128, 4, False)
CASES.append(_case("unmeasured, bias, fp16", 24, _UNMEASURED, 3, "fp16", bias=True))
CASES += [_case(f"80 rows {cols} of {depth}", 80, use, len(cols)) for (cols, depth), use in _WIDE.items()]
