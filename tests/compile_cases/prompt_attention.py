"""Production settings of what stands around cuDNN's attention of a long prompt: heads of 64, 80 and 128."""

import triton

from eagle_triton.ops.prompt_attention import ADDED_ROWS, TAKEN_ROWS, _add_parts_kernel, _Part, _take_rows_kernel
from eagle_triton.ops.views import KeyValues
from eagle_triton.runtime.launch import NO_FMA_FUSION
from tests.compile_cases._views import typed


def _case(name: str, kernel, constexprs: dict, types: dict, options: dict) -> tuple:
    signature = {
        argument: "constexpr" if argument in constexprs else types.get(argument, "i32") for argument in kernel.arg_names
    }
    return name, kernel, signature, constexprs, {"num_warps": 4, **options}


def _cases(width: int, dtype: str) -> list[tuple]:
    block, data = triton.next_power_of_2(width), f"*{dtype}"
    name = f"d {width} {dtype}"
    rows = {"D": width, "STRIDE_T": width, "PAGE": 64, "BLOCK_R": TAKEN_ROWS, "BLOCK_D": block}
    strides = ("cache.side", "cache.page", "cache.head", "rows", "first")
    taken = {"cache": typed(KeyValues, data), "table_ptr": "*i32", "out_ptr": data}
    cases = [_case(f"take rows {name}", _take_rows_kernel, rows, taken, {"aligned": strides})]
    sizes = {"D": width, "BLOCK_R": ADDED_ROWS, "BLOCK_D": block}
    parts = {f"part{index}": _Part(data, "*fp32") for index in range(4)}
    sinks = {"sinks_ptr": None}
    for kind, constexprs, types in (
        ("add parts", {**sizes, **sinks, "lse_ptr": None}, {**parts, "out_ptr": data}),
        (
            "add more parts",
            {**sizes, **sinks, "lse_ptr": None},
            {**parts, "out_ptr": data, "part0": _Part("*fp32", "*fp32")},
        ),
        ("add first parts", {**sizes, **sinks}, {**parts, "out_ptr": "*fp32", "lse_ptr": "*fp32"}),
        ("add parts and sinks", {**sizes, "lse_ptr": None}, {**parts, "out_ptr": data, "sinks_ptr": data}),
    ):
        cases.append(
            _case(f"{kind} {name}", _add_parts_kernel, constexprs, types, {**NO_FMA_FUSION, "aligned": ("nodes",)})
        )
    return cases


CASES = [
    case for width, dtype in ((128, "bf16"), (64, "bf16"), (80, "fp16"), (128, "fp16")) for case in _cases(width, dtype)
]
