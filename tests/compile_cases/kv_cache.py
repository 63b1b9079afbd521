"""Production settings of the cache kernels: d 64 and 128, a path of 9 rows."""

from eagle_triton import kv_cache

INDEX = ("table_ptr", "lengths_ptr", "rows_ptr", "path_ptr", "accepted_ptr")


def _case(name: str, kernel, dtype: str, constexprs: dict) -> tuple:
    def kind(argument: str) -> str:
        if argument in constexprs:
            return "constexpr"
        if argument.endswith("_ptr"):
            return "*i32" if argument in INDEX else f"*{dtype}"
        return "i32"

    aligned = [argument for argument in kernel.arg_names if argument.startswith(("stride_c", "stride_n"))]
    signature = {argument: kind(argument) for argument in kernel.arg_names}
    return name, kernel, signature, constexprs, {"num_warps": kv_cache._WARPS, "aligned": aligned}


KERNELS = (
    ("append", kv_cache._append_kernel, "BLOCK_R"),
    ("gather", kv_cache._gather_kernel, "BLOCK_R"),
    ("commit", kv_cache._commit_kernel, "BLOCK_P"),
)
CASES = [
    _case(f"{name} d {width} {dtype} {where}", kernel, dtype, {"D": width, rows: 16, "BLOCK_D": width, **table})
    for where, table in (("in pages", {"PAGE": 64}), ("", {"PAGE": 0, "table_ptr": None}))
    for dtype, width in (("bf16", 64), ("bf16", 128), ("fp16", 128))
    for name, kernel, rows in KERNELS
]
