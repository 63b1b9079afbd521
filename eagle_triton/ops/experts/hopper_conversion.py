"""Weights of four bits become numbers in bf16, in the registers of the threads that multiply them.

MXFP4: a number's four bits become a bf16 number that is 2**126 times smaller. One multiplication makes up for this and
applies the scale. It leaves weights 2**32 times smaller, because bf16 has no larger factor, so weights from 2**33 on
give NaN.

Integers: the four bits of n become 128 + n in bf16. A subtraction, which is exact, leaves n less its zero. A
multiplication, which rounds once, applies the scale.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language.core as tl_core

from eagle_triton.ops.experts.hopper_tiles import UNIT, WEIGHTS, by_row, part_layout, row_of
from eagle_triton.runtime.four_bit_weight import MIDDLE
from eagle_triton.runtime.gluon import gl, gluon

_SMALLER = gl.constexpr(32)  # MXFP4's weights are made 2**32 times smaller
_POWERS = gl.constexpr(gl.SliceLayout(4, WEIGHTS.value))  # one for all words of a unit


def _from_mxfp4() -> str:
    """PTX that makes bf16 numbers of the four words $16 to $19, and multiplies them by the pair in $20. Numbers i and
    i + 4 of a word are a pair. Pairs 0 of all words are in $0 to $3, and the other pairs follow."""
    lines = [".reg .b32 t, u;"]
    for word in range(4):
        lines.append(f"shr.u32 u, ${16 + word}, 8;")
        for pair in range(4):  # one product moves a number without its sign to bit 6, and its sign to bit 15
            source, left = (f"${16 + word}" if pair < 2 else "u"), 4 * (pair % 2)
            lines.append(f"and.b32 t, {source}, {0x000F000F << left};")
            lines.append(f"mul.lo.u32 t, t, {2 ** (6 - left) + 2 ** (12 - left)};")
            lines.append("and.b32 t, t, 0x81C081C0;")
            lines.append(f"mul.rn.bf16x2 ${4 * pair + word}, t, $20;")
    return "{" + "\n".join(lines) + "}"


def _from_integers(zero: str) -> str:
    """The same for integers. zero: the operand with a pair of zeros, each as the bf16 number that is 128 larger."""
    lines = [".reg .b32 t, z;", f"mov.b32 z, {zero};"]
    for word in range(4):
        for pair in range(4):
            lines.append(f"shr.u32 t, ${16 + word}, {4 * pair};")
            lines.append("lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;")
            lines.append("sub.rn.bf16x2 t, t, z;")
            lines.append(f"mul.rn.bf16x2 ${4 * pair + word}, t, $20;")
    return "{" + "\n".join(lines) + "}"


MXFP4 = gl.constexpr(_from_mxfp4())
SYMMETRIC = gl.constexpr(_from_integers(f"{0x43004300 + MIDDLE * 0x10001}"))
WITH_ZEROS = gl.constexpr(_from_integers("$24"))


@gluon.constexpr_function
def conversion_of(INTEGERS, ZEROS):
    """The PTX for weights of this kind."""
    return (WITH_ZEROS if ZEROS else SYMMETRIC).value if INTEGERS else MXFP4.value


@gl._core.builtin
def converted(words, factors, conversion, _semantic=None):
    """The pairs 0, 1, 2 and 3 of words, converted with pairs of scales, and of zeros if there are any. conversion: the
    PTX, as an argument because otherwise Triton's cache would miss a change."""
    constraints, kinds = ",".join(["=&r"] * 16 + ["r"] * 4 * (1 + len(factors))), (gl.int32,) * 4
    found = tl_core.inline_asm_elementwise(
        conversion.value, constraints, [words, *factors], kinds, is_pure=True, pack=4, _semantic=_semantic
    )
    return tl_core.tuple(list(found))


class _Scales(NamedTuple):
    """Where a program's scales lie, and its zeros if there are any."""

    ptr: gl.tensor
    zeros: gl.tensor
    row: gl.tensor  # where rows of scales begin, [height, 1]
    row_of_zeros: gl.tensor  # where rows of zeros begin, [height, 1]
    bit: gl.tensor  # at which a zero begins in its word, [height, 1]
    unit: gl.tensor  # the numbers of the units of the first part, [1, 8]
    units: gl.tensor  # of a row


@gluon.jit
def scales_of(weight, expert, first, TILE: gl.constexpr):
    """The _Scales of a program."""
    layout: gl.constexpr = part_layout(TILE.kind, TILE.height, 8)
    rows = weight.rows
    number = gl.arange(0, TILE.height, gl.SliceLayout(1, layout))[:, None]
    row = gl.minimum(row_of(number, first, rows, TILE), rows - 1)
    groups = weight.depth // TILE.group
    begin = (expert * rows + row) * groups
    zeros, begin_of_zeros = weight.scales, begin
    if weight.zeros is not None:
        zeros = weight.zeros
        begin_of_zeros = (expert * gl.cdiv(rows, 8) + row // 8) * groups
    unit = gl.arange(0, 8, gl.SliceLayout(0, layout))[None, :]
    if TILE.x_rows == 1:  # more rows gain nothing by this
        GROUPS: gl.constexpr = 16 if weight.scales.dtype.element_ty == gl.uint8 else 8  # in 16 bytes
        ask_for(weight.scales + (begin + gl.minimum(unit * GROUPS, groups - 1)))
    return _Scales(weight.scales, zeros, begin, begin_of_zeros, row % 8 * 4, unit, weight.depth // UNIT)


@gluon.jit
def ask_for(ptrs):
    """Bring what lies at these addresses into L2."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_scales(scales, part, ZEROS: gl.constexpr, TILE: gl.constexpr):
    """The scales of a part, and the words of its zeros, [height, 8]."""
    unit = part * 8 + scales.unit
    place, exists = unit * UNIT // TILE.group, unit < scales.units
    loaded = (gl.load(scales.ptr + (scales.row + place), mask=exists, other=0),)
    if ZEROS:
        zeros = gl.load(scales.zeros + (scales.row_of_zeros + place), mask=exists, other=0)
        loaded += (zeros,)  # type: ignore[assignment]
    return loaded


@gluon.jit
def factors_of(loaded, scales, TILE: gl.constexpr):
    """What a thread's rows are converted with, in pairs: their scales, and their zeros if there are any. loaded: by
    load_scales."""
    scale = loaded[0]
    if scale.dtype == gl.uint8:
        exponent = gl.minimum(scale.to(gl.int32), 129 + _SMALLER)  # more gives infinity
        pairs = exponent * 0x800080 + (126 - _SMALLER) * 0x800080
    else:
        pairs = (scale.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001
    factors = (by_row(pairs, (), TILE),)
    if len(loaded) == 2:
        factors += (by_row(((loaded[1] >> scales.bit & 15) + 0x4300) * 0x10001, (), TILE),)  # type: ignore[assignment]
    return factors


@gluon.jit
def converted_row(words, factors, row: gl.constexpr, CONVERSION: gl.constexpr):
    """One of a thread's rows, as pairs 0, 1, 2 and 3 of its words. words, factors: of all of its rows."""
    words = gl.convert_layout(words[row], WEIGHTS, assert_trivial=True)
    found = ()
    for i in gl.static_range(len(factors)):
        factor = gl.expand_dims(gl.convert_layout(factors[i][row], _POWERS, assert_trivial=True), 4)
        found += (factor.broadcast_to(words.shape),)  # type: ignore[assignment]
    return converted(words, found, CONVERSION)
