"""Products with weights of four bits by the portable kernel: every packing, and scales and zeros as packages hold
them."""

from eagle_triton.ops.linear.four_bits import Nested, Packed, _dequantise_kernel, _linear_kernel, settings_for
from eagle_triton.ops.views import Matrix, Rows
from eagle_triton.runtime.four_bit_weight import Packing
from eagle_triton.runtime.launch import NO_FMA_FUSION
from tests.compile_cases._views import typed

_WORDS = Matrix("*i32", "i32", "constexpr")
_ALIGNED = ("depth", "cols", "x.row", "out.row", "weight.words.row", "weight.words.item", "weight.group")
_SCALE, _ZERO = typed(Matrix, "*bf16"), typed(Matrix, "*i32")
_WEIGHTS = {  # as compressed-tensors, bitsandbytes, and gptqmodel hold them
    "rows": (Packing.ROWS, Packed(_WORDS, _SCALE, None, None, None, "i32")),
    "rows, zeros": (Packing.ROWS, Packed(_WORDS, _SCALE, _ZERO, None, None, "i32")),
    "nf4": (Packing.ROWS_HIGH_FIRST, Packed(_WORDS, typed(Matrix, "*fp32"), None, "*fp32", None, "i32")),
    "nf4, nested": (
        Packing.ROWS_HIGH_FIRST,
        Packed(
            _WORDS, typed(Matrix, "*u8"), None, "*fp32", Nested("*fp32", "*fp32", "*fp32", "i32", "i32"), "i32"
        ),
    ),
    "columns, zeros": (
        Packing.COLUMNS,
        Packed(Matrix("*i32", "constexpr", "i32"), typed(Matrix, "*fp16"), _ZERO, None, None, "i32"),
    ),
    "marlin": (Packing.MARLIN, Packed(_WORDS, typed(Matrix, "*fp16"), None, None, None, "i32")),
    "marlin, zeros": (Packing.MARLIN, Packed(_WORDS, typed(Matrix, "*fp16"), _ZERO, None, None, "i32")),
}  # fmt: skip


def _case(kind: str, rows: int | None, dtype: str = "bf16", one_group: bool = True) -> tuple:
    """rows: of x; None: the weight is dequantised."""
    packing, weight = _WEIGHTS[kind]
    kernel = _dequantise_kernel if rows is None else _linear_kernel
    constexprs = {"PACKING": packing.value, "ONE_GROUP": one_group, "EVEN_K": True}
    if rows is None:
        constexprs |= {"BLOCK_N": 16, "BLOCK_K": 256}
        options = {"num_warps": 4}
    else:
        use = settings_for(rows, 4096, 4096, False)
        block_k = use.block_k if dtype != "fp32" else 32
        constexprs |= {"BLOCK_M": use.block_m, "BLOCK_N": use.block_n, "BLOCK_K": block_k}
        constexprs["SPLITS"] = use.splits
        options = {"num_warps": use.warps, "num_stages": use.stages}
    types = {
        **dict.fromkeys(("x", "out"), typed(Rows, f"*{dtype}")),
        "weight": weight,
        **dict.fromkeys(("bias_ptr", "out_ptr"), f"*{dtype}"),
    }
    signature = {
        argument: "constexpr" if argument in constexprs else types.get(argument, "i32") for argument in kernel.arg_names
    }
    place = kernel.arg_names.index("weight")
    unit = next(i for i, part in enumerate(weight.words) if part == "constexpr")
    name = f"{kind}, {'dequantised' if rows is None else f'{rows} rows'} {dtype}"
    options |= {**NO_FMA_FUSION, "aligned": _ALIGNED}
    return name, kernel, signature, {**constexprs, (place, 0, unit): 1}, options


CASES = [_case(kind, 16) for kind in _WEIGHTS]
CASES += [_case("rows", 64, "fp16"), _case("rows", 256), _case("rows", 60, "fp32", one_group=False)]
CASES += [_case(kind, None) for kind in ("rows", "marlin")]
CASES += [_case("nf4, nested", None, one_group=False)]
