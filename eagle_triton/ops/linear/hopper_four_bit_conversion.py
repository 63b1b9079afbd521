"""Words of four bits become numbers of 16 bits, in the registers that the tensor cores read as their left operand.

A number becomes 16 bits. Subtracting its zero is exact, and multiplying by its group's scale rounds once. A number of a
table is fetched from the lane that holds it. hopper_four_bits.py says in which order columns come.
"""

from __future__ import annotations

import itertools

from eagle_triton.runtime.four_bit_weight import MIDDLE
from eagle_triton.runtime.gluon import gl, gluon

MAGIC_BF16, MAGIC_FP16 = gl.constexpr(0x4300), gl.constexpr(0x6400)  # 128 and 1024, where the last bit is worth 1


def _by_masks(dtype: str, with_zeros: bool, marlin: bool) -> str:
    """PTX that converts two words ($8, $9) to four pairs for each, $0 to $3 and $4 to $7, with the scales of two rows
    ($10, $11). Each word belongs to one row. marlin: the first two pairs of a word belong to the first row, the others
    to the second.

    With the bits of a magic number above it, a number of four bits is the 16-bit number magic + number. Then
    magic + zero is subtracted. with_zeros: the high half of $10 and $11 is magic + zero, and the low half the scale.
    Otherwise both halves are the scale, and all zeros are 8.
    """
    pairs = {"bf16": MAGIC_BF16, "f16": MAGIC_FP16}[dtype].value * 0x10001
    lines = [".reg .b32 t, v, z;"]
    lines.append(".reg .b32 s;" if with_zeros else f"mov.b32 z, {pairs + MIDDLE * 0x10001:#x};")
    for row in range(2):
        scale = f"${10 + row}"
        if with_zeros:
            lines.append(f"prmt.b32 z, {scale}, {scale}, 0x3232;")
            lines.append(f"prmt.b32 s, {scale}, {scale}, 0x1010;")
            scale = "s"
        for word, i in itertools.product(range(2), (2 * row, 2 * row + 1)) if marlin else ((row, i) for i in range(4)):
            source = f"${8 + word}"
            if i:
                lines.append(f"shr.u32 t, {source}, {4 * i};")
                source = "t"
            lines.append(f"lop3.b32 v, {source}, 0x000f000f, {pairs:#x}, 0xEA;")
            lines.append(f"sub.rn.{dtype}x2 v, v, z;")
            lines.append(f"mul.rn.{dtype}x2 ${4 * word + i}, v, {scale};")
    return "{" + "\n".join(lines) + "}"


def _by_table(dtype: str) -> str:
    """The same for numbers of a table, with scales in fp32. Each lane of a half warp holds one number of the table
    ($12). A number is fetched from its lane, multiplied in fp32, and rounded once. Bytes hold their first number in the
    high half, so columns i and i + 4 of a word are its numbers i ^ 1 and (i ^ 1) + 4."""
    lines = [".reg .b32 t;", ".reg .f32 low, high;", ".reg .f32 v;"]
    for half in range(2):
        for i in range(4):
            for number, name in ((i ^ 1, "low"), ((i ^ 1) + 4, "high")):
                lines.append(f"shr.u32 t, ${8 + half}, {4 * number};")
                lines.append("shfl.sync.idx.b32 v, $12, t, 0x100f, 0xffffffff;")
                lines.append(f"mul.rn.f32 {name}, v, ${10 + half};")
            lines.append(f"cvt.rn.{dtype}x2.f32 ${4 * half + i}, high, low;")
    return "{" + "\n".join(lines) + "}"


def _conversions(dtype: str) -> gl.constexpr:
    """All PTX for this dtype: by masks, without and with zeros, the same for Marlin's words, and by a table."""
    by_masks = (_by_masks(dtype, zeros, marlin) for marlin in (False, True) for zeros in (False, True))
    return gl.constexpr((*by_masks, _by_table(dtype)))


TO_BF16, TO_FP16 = _conversions("bf16"), _conversions("f16")
_REGISTERS = gl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r")
_TABLE_REGISTERS = gl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r")


@gluon.constexpr_function
def _conversion_of(bf16, table, zeros, marlin):
    """The PTX for such words."""
    return (TO_BF16 if bf16 else TO_FP16).value[4 if table else zeros + 2 * marlin]


@gluon.jit
def converted(words, scale, table, DTYPE: gl.constexpr, MARLIN: gl.constexpr, MMA: gl.constexpr):
    """Words [N, 8] with scales [N, 1] or [N, 8], as the left operand [N, 64] of a product with this layout.

    A thread's registers hold words of two rows in turn, the second eight rows below the first. A converted pair of
    numbers fills a register. So the PTX takes two words at a time, and its results for each are separate tensors.
    MARLIN: see take_words. table: see own_number. It is read where scales are fp32.
    """
    HEIGHT: gl.constexpr = words.shape[0]
    BY_TABLE: gl.constexpr = scale.dtype == gl.float32
    WITH_ZEROS: gl.constexpr = scale.dtype == gl.int32
    if BY_TABLE:
        operands = [words, scale.broadcast_to(words.shape), table]
    elif WITH_ZEROS:
        operands = [words, scale.broadcast_to(words.shape)]
    else:
        bits = scale.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
        operands = [words, (bits | (bits << 16)).broadcast_to(words.shape)]
    a0, a1, a2, a3, b0, b1, b2, b3 = gl.inline_asm_elementwise(
        _conversion_of(DTYPE.is_bf16(), BY_TABLE, WITH_ZEROS, MARLIN),
        _TABLE_REGISTERS if BY_TABLE else _REGISTERS,
        operands,
        (DTYPE.value, DTYPE.value, DTYPE.value, DTYPE.value, DTYPE.value, DTYPE.value, DTYPE.value, DTYPE.value),
        is_pure=True,
        pack=2,
    )
    low = gl.join(gl.join(a0, b0), gl.join(a1, b1))
    high = gl.join(gl.join(a2, b2), gl.join(a3, b3))
    w = gl.join(low, high).reshape((HEIGHT // 16, 2, 8, 2, 4, 2, 2, 2))
    w = w.permute((0, 7, 2, 3, 5, 6, 4, 1) if MARLIN else (0, 5, 2, 3, 7, 6, 4, 1)).reshape((HEIGHT, 64))
    return gl.convert_layout(w, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def own_number(weight, HEIGHT: gl.constexpr, KEPT: gl.constexpr, MMA: gl.constexpr):
    """With a table, a tensor in the shape of the words that are converted: all elements in a thread are the thread's
    number of the table. Otherwise 0."""
    layout: gl.constexpr = gl.DotOperandLayout(0, MMA, 1)
    if gl.float32 == KEPT:
        none = gl.zeros((HEIGHT, 8), gl.int32, layout)
        lane = gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [none], gl.int32, is_pure=True, pack=1)
        return gl.load(weight.table + (lane & 15))
    else:
        return 0
