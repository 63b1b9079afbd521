"""Production settings of the products of many rows: a stack without and with biases, and SwiGLU, in both dtypes."""

from eagle_triton.linear.settings import WIDE_TILE
from eagle_triton.linear.streamed import TILE_LAYOUT
from eagle_triton.linear.wide import _DEPTH, _REGISTERS, _WARPS, STACK, SWIGLU, linear_kernel, swiglu_kernel
from eagle_triton.runtime.launch import EXACT


def _case(name: str, dtype: str, fused: bool = False, bias: bool = False) -> tuple:
    kernel, settings = (swiglu_kernel, SWIGLU) if fused else (linear_kernel, STACK)
    signature, given = {}, {"STAGES": settings.stages, "PREFETCH": settings.prefetch}
    types = {"sums_ptr": "*fp32", "flags_ptr": "*i64"}
    for argument in kernel.arg_names:
        if argument.startswith("bias") and not bias:
            given[argument] = None
        if argument in given:
            signature[argument] = "constexpr"
        elif argument.endswith("_desc"):
            block = [WIDE_TILE, WIDE_TILE if argument == "out_desc" else _DEPTH.value]
            signature[argument] = f"tensordesc<{dtype}{block},{TILE_LAYOUT!r}>"
        else:
            signature[argument] = types.get(argument, f"*{dtype}" if argument.endswith("_ptr") else "i32")
    options = {**EXACT, "num_warps": _WARPS, "maxnreg": _REGISTERS, "launch_pdl": True, "targets": ("sm_90",)}
    return f"{name} {dtype}", kernel, signature, given, options


CASES = [
    case
    for dtype in ("bf16", "fp16")
    for case in (
        _case("stack", dtype),
        _case("stack, bias", dtype, bias=True),
        _case("gate and up", dtype, fused=True),
    )
]
