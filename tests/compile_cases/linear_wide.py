"""Production settings of the products of many rows: a stack without and with biases, in both dtypes."""

from eagle_triton.ops.linear.gluon_tiles import TILE_LAYOUT
from eagle_triton.ops.linear.hopper_many_rows import _DEPTH, _REGISTERS, _WARPS, STACK, linear_kernel
from eagle_triton.ops.linear.settings import WIDE_TILE
from eagle_triton.runtime.launch import NO_FMA_FUSION


def _case(name: str, dtype: str, bias: bool) -> tuple:
    signature, given = {}, {"STAGES": STACK.stages, "PREFETCH": STACK.prefetch}
    for argument in linear_kernel.arg_names:
        if argument in given:
            signature[argument] = "constexpr"
        elif argument == "biases":
            signature[argument] = (f"*{dtype}",) * 3 if bias else None
        elif argument.endswith("_desc"):
            block = [WIDE_TILE, WIDE_TILE if argument == "out_desc" else _DEPTH.value]
            signature[argument] = f"tensordesc<{dtype}{block},{TILE_LAYOUT!r}>"
        else:
            signature[argument] = "i32"
    options = {**NO_FMA_FUSION, "num_warps": _WARPS, "maxnreg": _REGISTERS, "launch_pdl": True, "targets": ("sm_90",)}
    return f"{name} {dtype}", linear_kernel, signature, given, options


CASES = [_case("stack, bias" if bias else "stack", dtype, bias) for dtype in ("bf16", "fp16") for bias in (False, True)]
