"""Production settings of the products with weights of eight bits: 8b and 1b shapes, and the portable kernel."""

from eagle_triton.ops.linear import hopper_fp8 as streamed
from eagle_triton.ops.linear import hopper_fp8_few_rows as paired
from eagle_triton.ops.linear.fp8 import _dequantise_kernel, _linear_kernel, _Scales
from eagle_triton.ops.linear.gluon_tiles import TILE_LAYOUT
from eagle_triton.ops.linear.settings import portable_settings, tiles_of
from eagle_triton.ops.linear.weights import ScaledColumns
from eagle_triton.ops.views import Rows
from eagle_triton.runtime.launch import NO_FMA_FUSION
from eagle_triton.runtime.row_formats import MAX_PAIRED_ROWS
from tests.compile_cases._views import typed

_ALIGNED = (
    "depth", "out.row", "gate_w.cols", "up_w.cols", *(f"columns.{i}.cols" for i in range(4)), "cols", "x.row",
    "values.row",
)  # fmt: skip


def _streamed(name: str, rows: int, cols: tuple[int, ...], depth: int, in_blocks: bool, dtype: str = "bf16") -> tuple:
    """cols: of each weight; two are gate and up, of few rows with SwiGLU."""
    pairs = rows <= MAX_PAIRED_ROWS and dtype == "bf16"
    fused = pairs and len(cols) == 2
    weights = 1 if len(cols) == 1 else 3
    if pairs:
        use = paired.settings_for(rows, cols, depth, fused)
        kernel = paired.swiglu_kernel if fused else paired.linear_kernel
        block_m, programs = paired.block_m_of(rows), tiles_of(cols, use.block_n, fused) * use.splits
        in_flight = 1 if fused else paired.in_flight_of(programs, 132)
        constexprs = {
            **({} if fused else {"SPLITS": use.splits, "IN_FLIGHT": in_flight}),
            "STAGES": use.w_stages,
            "PREFETCH": paired.prefetch_stages(use, 2 if fused else 1),
            "GROUPS": paired.groups_of(depth, use.splits, block_m),
        }
        registers = paired.registers_of(use, block_m, in_flight, 4 if fused else 1)
        height = min(block_m, paired._ROWS_OF_A_LOAD)
        x, w = (f"tensordesc<fp8e4nv[{high}, 128],{paired.TILE_LAYOUT!r}>" for high in (height, use.block_n))
    else:
        fused = len(cols) == 2
        use = streamed.settings_for(rows, cols, depth, in_blocks, fused)
        kernel, block_m, registers = streamed.linear_kernel, streamed.block_m_of(rows), streamed._REGISTERS
        constexprs = {
            "SPLITS": use.splits,
            "FUSED": fused,
            "STAGES": use.w_stages,
        }
        weights = len(cols)
        x = f"tensordesc<{dtype}[{streamed.rows_of_a_load(rows)}, 64],{TILE_LAYOUT!r}>"
        w = f"tensordesc<i16[{streamed.EACH if fused else use.block_n}, 32],{streamed.WEIGHT_LAYOUT!r}>"
    constexprs |= {"BLOCK_M": block_m, "BLOCK_N": use.block_n, "IN_BLOCKS": in_blocks}
    scaled = ScaledColumns("i32", "*fp32", "i32")
    types = {
        "x_desc": x,
        **{f"w{i}_desc": w if i < weights else None for i in range(4)},
        **dict.fromkeys(("gate_desc", "up_desc"), w),
        **dict.fromkeys(("gate_w", "up_w"), scaled),
        "columns": (scaled,) * weights,
        "biases": None,
        "out": None if pairs and fused else typed(Rows, "*fp32" if use.splits > 1 else f"*{dtype}"),
        "parts_ptr": "*fp8e4nv",
        **dict.fromkeys(("x_scale_ptr", "out_scale_ptr"), "*fp32"),
    }
    signature = {
        argument: "constexpr" if argument in constexprs else types.get(argument, "i32") for argument in kernel.arg_names
    }
    given = {argument: value for argument, value in constexprs.items() if argument in signature}
    options = {
        **NO_FMA_FUSION,
        "num_warps": use.warps,
        "maxnreg": registers,
        "aligned": _ALIGNED,
        "targets": ("sm_90",),
    }
    return f"{name} {rows} rows{' in blocks' if in_blocks else ''} {dtype}", kernel, signature, given, options


def _portable(rows: int, dtype: str, in_blocks: bool, bias: bool) -> tuple:
    use = portable_settings(rows, 4096, 4096, False)
    constexprs = {
        "BLOCK_M": use.block_m,
        "BLOCK_N": use.block_n,
        "BLOCK_K": use.block_k if dtype != "fp32" else 32,
        "SPLITS": use.splits,
        "IN_BLOCKS": in_blocks,
        "EVEN_K": True,
    }
    types = {
        **dict.fromkeys(("x", "out"), typed(Rows, f"*{dtype}")),
        "values": typed(Rows, "*u8"),
        "scales": typed(_Scales, "*fp32"),
        "bias_ptr": f"*{dtype}" if bias else None,
    }
    signature = {
        argument: "constexpr" if argument in constexprs else types.get(argument, "i32")
        for argument in _linear_kernel.arg_names
    }
    options = {**NO_FMA_FUSION, "num_warps": use.warps, "num_stages": use.stages, "aligned": _ALIGNED}
    name = f"portable {rows} rows{' in blocks' if in_blocks else ''} {dtype}"
    return name, _linear_kernel, signature, constexprs, options


_SHAPES = {
    "8b qkv": ((4096, 1024, 1024), 4096),
    "8b o": ((4096,), 4096),
    "8b gate_up": ((14336, 14336), 4096),
    "8b down": ((4096,), 14336),
    "8b head": ((128256,), 4096),
    "1b qkv": ((2048, 512, 512), 2048),
    "32b gate_up": ((25600, 25600), 5120),
}
_BOTH = ("8b qkv", "8b gate_up")  # with scales of columns too, which every shape applies in the same place
_ALSO_MANY_ROWS = (*_BOTH, "8b o", "8b down", "8b head")  # the others have the settings of these there
CASES = [
    _streamed(name, rows, cols, depth, in_blocks)
    for name, (cols, depth) in _SHAPES.items()
    for rows in ((16, 32, 64, 128, 512) if name in _ALSO_MANY_ROWS else (16, 32, 64))
    for in_blocks in ((False, True) if name in _BOTH else (True,))
]
CASES += [_streamed("8b o", 64, *_SHAPES["8b o"], False, "fp16")]
CASES += [_portable(16, "bf16", False, True), _portable(64, "fp16", True, False), _portable(64, "fp32", False, True)]
CASES += [
    (
        f"dequantise{' in blocks' if in_blocks else ''}",
        _dequantise_kernel,
        {
            argument: {"values": typed(Rows, "*u8"), "scales": typed(_Scales, "*fp32"), "out_ptr": "*bf16"}.get(
                argument, "constexpr" if argument.isupper() else "i32"
            )
            for argument in _dequantise_kernel.arg_names
        },
        {"BLOCK_N": 16, "BLOCK_K": 512, "IN_BLOCKS": in_blocks},
        {**NO_FMA_FUSION, "num_warps": 8, "aligned": ("depth", "values.row")},
    )
    for in_blocks in (False, True)
]
