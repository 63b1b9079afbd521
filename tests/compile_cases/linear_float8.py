"""Production settings of the products with weights of eight bits: 8b and 1b shapes, and the portable kernel."""

from functools import partial

import torch

from eagle_triton.ops.layers.fp8_pair_rows import empty_pair
from eagle_triton.ops.linear.fp8 import dequantise
from eagle_triton.runtime.float8_weight import BLOCK, Float8Weight
from eagle_triton.runtime.row_formats import MAX_PAIRED_ROWS, Float8Pair, RowFormat
from tests.compile_cases._launches import HOPPER, bf16, empty, fp16, fp32, launches
from tests.compile_cases._products import EVERYWHERE, SHAPES, products


def _weight(rows: int, depth: int, in_blocks: bool) -> Float8Weight:
    scale = fp32(-(-rows // BLOCK), -(-depth // BLOCK)) if in_blocks else fp32(rows, 1)
    return Float8Weight(empty(rows, depth, dtype=torch.float8_e4m3fn), scale)


def _pair(rows: int, depth: int) -> Float8Pair:
    x = bf16(rows, depth)
    return empty_pair(x.shape, x)


def _on_hopper(name: str, rows: int, in_blocks: bool) -> list[tuple]:
    (cols, depth), paired = SHAPES[name], rows <= MAX_PAIRED_ROWS
    how = dict(row_format=RowFormat.FLOAT8_PAIR) if len(cols) == 2 else dict(keep_splits=True)
    name = f"{name}{' in blocks' if in_blocks else ''}"
    weight = partial(_weight, in_blocks=in_blocks)
    return products(name, _pair if paired else bf16, rows, cols, depth, weight, targets=HOPPER, **how)


_ROWS, _BLOCKS = partial(_weight, in_blocks=False), partial(_weight, in_blocks=True)
_BOTH = ("8b qkv", "8b gate_up")  # with scales of columns too, which every shape applies in the same place
_ALSO_MANY_ROWS = (*_BOTH, "8b o", "8b down", "8b head")  # the others have the settings of these there
_O = SHAPES["8b o"]
CASES = [
    *(
        case
        for name in (*_ALSO_MANY_ROWS, "1b qkv", "32b gate_up")
        for rows in ((16, 32, 64, 128, 512) if name in _ALSO_MANY_ROWS else (16, 32, 64))
        for in_blocks in ((False, True) if name in _BOTH else (True,))
        for case in _on_hopper(name, rows, in_blocks)
    ),
    *products("fp16", fp16, 64, *_O, _ROWS, keep_splits=True, targets=HOPPER),
    *products("portable bf16", bf16, 16, *_O, _ROWS, bf16, targets=EVERYWHERE),
    *products("portable fp16 in blocks", fp16, 64, *_O, _BLOCKS, targets=EVERYWHERE),
    *products("portable fp32", fp32, 64, *_O, _ROWS, fp32, targets=EVERYWHERE),
    *launches("rows", dequantise, _ROWS(4096, 4096), torch.bfloat16),
    *launches("blocks", dequantise, _BLOCKS(4096, 4096), torch.bfloat16),
]
