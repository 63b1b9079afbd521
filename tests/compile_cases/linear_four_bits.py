"""Production settings of the products with weights of four bits: 8b shapes, and by the portable kernel every packing,
and scales and zeros as packages hold them."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from eagle_triton.ops.linear.four_bits import dequantise
from eagle_triton.runtime.four_bit_weight import WORD, FourBitWeight, NestedScale, Packing
from eagle_triton.runtime.row_formats import RowFormat
from tests.compile_cases._launches import HOPPER, bf16, fp16, fp32, i32, launches, u8
from tests.compile_cases._products import EVERYWHERE, SHAPES, products


def _weight(
    rows: int,
    depth: int,
    packing: Packing = Packing.ROWS,
    scale: Callable[..., Tensor] = bf16,
    group: int = 128,
    zeros: bool = False,
) -> FourBitWeight:
    """scale: u8 if the scales are nested. Packages that do not pack by rows hold scales and zeros by groups."""
    words = {Packing.MARLIN: (depth // 16, 2 * rows), Packing.COLUMNS: (depth // WORD, rows)}
    groups = depth // group
    nested = NestedScale(fp32(256), fp32(-(-rows * groups // 256)), fp32()) if scale is u8 else None
    found, zero = scale(rows, groups), i32(rows // WORD, groups) if zeros else None
    if packing in words:
        found, zero = scale(groups, rows).T, i32(groups, rows // WORD).T if zeros else None
    table = fp32(16) if packing is Packing.ROWS_HIGH_FIRST else None
    packed = i32(*words.get(packing, (rows, depth // WORD)))
    return FourBitWeight(packed, packing, found, group, zero, table, nested)


def _on_hopper(name: str, rows: int, x: Callable[..., Tensor] = bf16, scale=None, **kind) -> list[tuple]:
    shape, weight = SHAPES[name], partial(_weight, scale=scale or x, **kind)
    how = dict(row_format=RowFormat.WORD_ORDER) if len(shape[0]) == 2 else dict(keep_splits=True)
    name = " ".join([name, str(x(1).dtype), *map(str, kind.values())])
    return products(name, x, rows, *shape, weight, targets=HOPPER, **how)


_ZEROS, _MARLIN = {"zeros": True}, {"packing": Packing.MARLIN}
_TABLE = {"packing": Packing.ROWS_HIGH_FIRST, "group": 64}
# Zeros are read beside scales: a format with them compiles all that one without them does. SwiGLU holds most in
# registers, so its formats with zeros are compiled in every size; products of one and of three weights have the same
# loop.
CASES = [
    *_on_hopper("8b gate_up", 32),
    *(case for rows in (64, 128) for case in _on_hopper("8b gate_up", rows, **_ZEROS)),
    *_on_hopper("8b gate_up", 16, fp16, **_MARLIN),
    *(case for rows in (64, 128) for case in _on_hopper("8b gate_up", rows, fp16, **_MARLIN, **_ZEROS)),
    *_on_hopper("8b qkv", 16),
    *_on_hopper("8b down", 128, **_ZEROS),
    *_on_hopper("8b qkv", 32, fp16, **_MARLIN),
    *_on_hopper("8b down", 64, fp16, **_MARLIN, **_ZEROS),
    *(case for rows in (64, 128) for case in _on_hopper("8b gate_up", rows, scale=u8, **_TABLE)),
    *_on_hopper("8b qkv", 16, scale=u8, **_TABLE),
    *_on_hopper("8b down", 64, scale=fp32, **_TABLE),
    *_on_hopper("8b o", 64, fp16, group=64, **_ZEROS),
    *_on_hopper("8b o", 64, group=64, **_MARLIN, **_ZEROS),
    *_on_hopper("8b o", 64, group=32, **_ZEROS),
    *_on_hopper("8b gate_up", 64, group=32),
    *_on_hopper("8b o", 64, fp16, group=32, **_MARLIN, **_ZEROS),
]
_PACKAGES = {  # as compressed-tensors, bitsandbytes, and gptqmodel hold them
    "rows": dict(packing=Packing.ROWS),
    "rows, zeros": dict(packing=Packing.ROWS, zeros=True),
    "nf4": dict(scale=fp32, **_TABLE),
    "nf4, nested": dict(scale=u8, **_TABLE),
    "columns, zeros": dict(packing=Packing.COLUMNS, scale=fp16, zeros=True),
    "marlin": dict(packing=Packing.MARLIN, scale=fp16),
    "marlin, zeros": dict(packing=Packing.MARLIN, scale=fp16, zeros=True),
}
_ANYWHERE = dict(cols=(4096,), depth=4096, targets=EVERYWHERE)
for _name, _kind in _PACKAGES.items():
    CASES += products(_name, bf16, 16, weight=partial(_weight, **_kind), bias=bf16, **_ANYWHERE)
CASES += products("fp16", fp16, 64, weight=_weight, bias=fp16, **_ANYWHERE)
CASES += products("bf16", bf16, 256, weight=_weight, bias=bf16, **_ANYWHERE)
CASES += products("fp32", fp32, 60, weight=partial(_weight, group=16), bias=fp32, **_ANYWHERE)
for _name, _group in (("rows", 256), ("marlin", 256), ("nf4, nested", 64)):
    _weights = _weight(4096, 4096, **{**_PACKAGES[_name], "group": _group})
    CASES += launches(_name, dequantise, _weights, bf16(4096, 4096))
