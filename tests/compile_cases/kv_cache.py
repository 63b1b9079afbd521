"""Production settings of the cache kernels: d 64, 128 and 512, a path of 9 rows."""

from eagle_triton import kv_cache
from eagle_triton.ops.views import CacheStack, Matrix, NewRows, Pages
from tests.compile_cases._views import typed


def _case(name: str, kernel, dtype: str, constexprs: dict) -> tuple:
    kinds = {
        "cache": typed(CacheStack, f"*{dtype}"),
        "new": typed(NewRows, f"*{dtype}"),
        "out_ptr": f"*{dtype}",
        "pages": typed(Pages, "*i32"),
        **dict.fromkeys(("rows", "path"), typed(Matrix, "*i32")),
        **dict.fromkeys(("lengths_ptr", "accepted_ptr"), "*i32"),
    }
    signature = {name: "constexpr" if name in constexprs else kinds.get(name, "i32") for name in kernel.arg_names}
    aligned = [f"{view}.{field}" for view in ("cache", "new") for field in kinds[view]._fields]
    return name, kernel, signature, constexprs, {"num_warps": kv_cache._WARPS, "aligned": aligned}


KERNELS = (
    ("append", kv_cache._append_kernel, "BLOCK_R"),
    ("gather", kv_cache._gather_kernel, "BLOCK_R"),
    ("commit", kv_cache._commit_kernel, "BLOCK_P"),
)
CASES = [
    _case(f"{name} d {width} {dtype} {where}", kernel, dtype, {"D": width, rows: 16, "BLOCK_D": width, **table})
    for where, table in (("in pages", {"PAGE": 64}), ("", {"PAGE": 0, "pages": None}))
    for dtype, width in (("bf16", 64), ("bf16", 128), ("fp16", 128), ("bf16", 512))
    for name, kernel, rows in KERNELS
]
