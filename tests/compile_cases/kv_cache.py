"""Production settings of the cache operations: d 64, 128 and 512, a path of 9 rows."""

import torch

from eagle_triton import kv_cache
from tests.compile_cases._launches import empty, i32, launches


def _cases(dtype: torch.dtype, width: int, table: torch.Tensor | None) -> list[tuple]:
    pages, rows = (4, 600) if table is None else (40, 64)
    cache, lengths = empty(32, 2, pages, 8, rows, width, dtype=dtype), i32(4)
    new = empty(32, 2, 4, 9, 8, width, dtype=dtype)
    name = f"d {width} {dtype}{'' if table is None else ' in pages'}"
    return [
        *launches(name, kv_cache.append, cache, new, lengths, table),
        *launches(name, kv_cache.gather, cache, i32(4, 9), table),
        *launches(name, kv_cache.commit, cache, lengths, i32(4, 9), lengths, table),
    ]


CASES = [
    case
    for table in (i32(4, 10), None)
    for dtype, width in ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 128), (torch.bfloat16, 512))
    for case in _cases(dtype, width, table)
]
