"""Production settings of the products with weights of four bits: 8b shapes."""

from eagle_triton.ops.linear import hopper_four_bits as hopper
from eagle_triton.ops.linear.gluon_tiles import TILE_LAYOUT
from eagle_triton.ops.views import Rows
from eagle_triton.runtime.launch import NO_FMA_FUSION
from tests.compile_cases._views import typed

_ALIGNED = ("depth", "x.row", "out.row", "gate.cols", "up.cols", *(f"columns.{i}.cols" for i in range(4)))


def _streamed(
    name: str,
    rows: int,
    cols: tuple[int, ...],
    depth: int,
    group: int,
    dtype: str = "bf16",
    scale: str | None = None,
    zeros: bool = False,
    marlin: bool = False,
) -> tuple:
    """cols: of each weight; two are gate and up. scale: of weights by a table. marlin: in its packing."""
    fused, weights = len(cols) == 2, 1 if len(cols) == 1 else 3
    use = hopper.settings_for(rows, cols, depth, fused)
    use = hopper.fitted(use, rows, depth, 2 if fused else 1, group, 4 if scale or zeros else 2)
    kernel = hopper.swiglu_kernel if fused else hopper.linear_kernel
    constexprs = {
        "BLOCK_M": hopper.block_m_of(rows),
        "BLOCK_K": use.block_k,
        "GROUP": group,
        "STAGES": use.w_stages,
        "GROUPS": hopper.groups_of(hopper.columns_of(depth, use), group),
        "PREFETCH": hopper.prefetch_stages(use),
        **({"GELU_TANH": False, "IN_WORD_ORDER": True} if fused else {"SPLITS": use.splits}),
    }
    desc = f"tensordesc<i32[{use.block_n}, {use.block_k // 8}],{hopper.words_layout(use)!r}>"
    strides = "i32", "constexpr"  # numbers that are side by side have a stride that is compiled in
    if marlin:
        desc = f"tensordesc<i32{hopper.marlin_block(use)},{hopper.MARLIN_LAYOUT!r}>"
        strides = "constexpr", "i32"
    scales = f"*{scale or dtype}", *strides
    columns = hopper.FourBitColumns("i32", *scales, "*i32" if zeros else scales[0], *scales[1:], *["*fp32"] * 4)
    types = {
        "x_desc": f"tensordesc<{dtype}[{min(hopper.block_m_of(rows), hopper._ROWS_OF_A_LOAD)}, 64],{TILE_LAYOUT!r}>",
        **{f"w{i}_desc": desc if i < weights else None for i in range(4)},
        **dict.fromkeys(("gate_desc", "up_desc"), desc),
        **dict.fromkeys(("gate", "up"), columns),
        "columns": (columns,) * weights,
        "biases": None,
        "out": typed(Rows, "*fp32" if use.splits > 1 else f"*{dtype}"),
    }
    signature = {name: "constexpr" if name in constexprs else types.get(name, "i32") for name in kernel.arg_names}
    places = [(name,) for name in ("gate", "up")] if fused else [("columns", i) for i in range(weights)]
    constexprs |= {
        (kernel.arg_names.index(name), *place, columns._fields.index(field)): 1
        for name, *place in places
        for field in (("scale_row", "zero_row") if marlin else ("scale_column", "zero_column"))
    }
    options = {
        **NO_FMA_FUSION,
        "num_warps": 4,
        "maxnreg": hopper._STARTING_REGISTERS,
        "aligned": _ALIGNED,
        "targets": ("sm_90",),
    }
    kind = " by a table" if scale else " with zeros" if zeros else ""
    if marlin:
        kind += " in Marlin's packing"
    return f"{name} {rows} rows {dtype}{kind}", kernel, signature, constexprs, options


_SHAPES = {
    "8b qkv": ((4096, 1024, 1024), 4096),
    "8b o": ((4096,), 4096),
    "8b gate_up": ((14336, 14336), 4096),
    "8b down": ((4096,), 14336),
}
# Zeros are read beside scales: a format with them compiles all that one without them does. SwiGLU holds most in
# registers, so its formats with zeros are compiled in every size; products of one and of three weights have the same
# loop.
_FORMATS = {
    "plain": {},
    "with zeros": dict(zeros=True),
    "Marlin": dict(dtype="fp16", marlin=True),
    "Marlin with zeros": dict(dtype="fp16", marlin=True, zeros=True),
}
CASES = [
    _streamed("8b gate_up", rows, *_SHAPES["8b gate_up"], 128, **_FORMATS[kind])
    for kind, sizes in {
        "plain": (32,),
        "with zeros": (64, 128),
        "Marlin": (16,),
        "Marlin with zeros": (64, 128),
    }.items()
    for rows in sizes
]
CASES += [
    _streamed(name, rows, *_SHAPES[name], 128, **_FORMATS[kind])
    for name, rows, kind in (
        ("8b qkv", 16, "plain"),
        ("8b down", 128, "with zeros"),
        ("8b qkv", 32, "Marlin"),
        ("8b down", 64, "Marlin with zeros"),
    )
]
CASES += [_streamed("8b gate_up", rows, *_SHAPES["8b gate_up"], 64, scale="u8") for rows in (64, 128)]
CASES += [_streamed("8b qkv", 16, *_SHAPES["8b qkv"], 64, scale="u8")]
CASES += [_streamed("8b down", 64, *_SHAPES["8b down"], 64, scale="fp32")]
CASES += [_streamed("8b o", 64, *_SHAPES["8b o"], 64, "fp16", zeros=True)]
CASES += [_streamed("8b o", 64, *_SHAPES["8b o"], 64, zeros=True, marlin=True)]
CASES += [
    _streamed(f"{name} in groups of 32", 64, *_SHAPES[name], 32, **how)
    for name, how in (("8b o", dict(zeros=True)), ("8b gate_up", {}), ("8b o", _FORMATS["Marlin with zeros"]))
]
