"""Products of the chosen experts in four bits with rows of bf16, on Hopper. products.py says what they are, and calls
them.

A program multiplies 64 rows of an expert's weights by a tile of eight rows of x, by tensor cores from registers. For
one row of x it may take 32 rows of weights, so that multiprocessors have more equal shares (`_height_of`). Where
experts have many rows of x, a tile has 16 of them (`_x_rows_of`), because converting weights takes longest. If there
are more than 16 rows in all, an expert has two programs: one for its first tile, one for all other tiles in turn.

TMA brings weights into a ring of slots in shared memory, where they stay in four bits. They are multiplied in parts of
256 columns. Each of four warps takes half of a part's rows and half of its columns. A thread takes 32 columns (a unit)
of four rows, or of two if the program has 32 rows. It multiplies the words that it loaded, so nothing moves between
threads. This changes the order of the columns, and x is stored in the same order. Sums of warps with different columns
are added at the end, so a row's sums depend on nothing but the weights' shape.

MXFP4: a number's four bits become a bf16 number that is 2**126 times smaller. One multiplication makes up for this and
applies the scale, but leaves weights 2**32 times smaller, because bf16 has no larger factor. So weights from 2**33 on
give NaN.

Integers: the four bits of n become 128 + n in bf16. A subtraction, which is exact, leaves n less its zero, and a
multiplication, which rounds once, applies the scale.

Needs Triton 3.6. What bounds it: docs/speed-notes.md, "MXFP4".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language.core as tl_core
from torch import Tensor

from eagle_triton.ops.linear.gluon_tiles import await_full, barriers, descriptor, ready, rounded, swiglu
from eagle_triton.ops.views import Rows
from eagle_triton.runtime.four_bit_expert_weight import FourBitExpertWeight
from eagle_triton.runtime.four_bit_weight import MIDDLE
from eagle_triton.runtime.gluon import (
    TensorDescriptor,
    async_load,
    debug_barrier,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    reinterpret,
)
from eagle_triton.runtime.gpu import compute_capability, multiprocessors_of
from eagle_triton.runtime.mxfp4_weight import GROUP, Mxfp4Weight
from eagle_triton.runtime.overlap import overlapped_on_hopper

FourBits = Mxfp4Weight | FourBitExpertWeight
ROWS = gl.constexpr(8)  # of x that the tensor cores multiply at a time
HEIGHT = 64  # rows of an expert's weights, or half of them
_FEW, _PROGRAMS_OF_MANY = 16, 2  # of more than _FEW rows most experts get fewer than 8, so most tiles would be empty
# A thread's most registers by the rows of a tile of x, without and with zeros: with fewer, more programs run at once.
_REGISTERS = {1: (None, None), 8: (96, 128), 16: (128, 168)}
_SLOTS = gl.constexpr(2)  # measured on an H200 for gpt-oss: with more, fewer programs share a multiprocessor
_WARPS = gl.constexpr(4)
_UNIT = gl.constexpr(GROUP)  # columns of a row that a thread multiplies at a time
_SMALLER = gl.constexpr(32)  # weights are made 2**32 times smaller
WORDS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
_BF16 = gl.constexpr(gl.bfloat16)
# The layout of weights and sums [2, 2, 8 rows, 4 units, 4 words]. A thread has all words of a unit. Along the first
# axis warps have different columns, along the second different rows.
_WEIGHTS = gl.constexpr(gl.BlockedLayout([1, 1, 1, 1, 4], [1, 1, 8, 4, 1], [2, 2, 1, 1, 1], [4, 3, 2, 1, 0]))
_POWERS = gl.constexpr(gl.SliceLayout(4, _WEIGHTS.value))  # one for all words of a unit
_WHOLE = gl.constexpr(gl.SliceLayout(0, _WEIGHTS.value))  # the layout of sums over all columns


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


def _multiplication() -> str:
    """PTX that adds products to the sums $0 to $3. Weights: pairs 0 to 3 of four words, $4 to $19 of the first row and
    $20 to $35 of the second. x: the same pairs, $36 to $51."""
    lines, kind = [], "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    for word in range(4):
        for pair in (0, 2):
            first, second, x = (start + 4 * pair + word for start in (4, 20, 36))
            weights = f"{{${first}, ${second}, ${first + 4}, ${second + 4}}}"
            lines.append(f"{kind} {{$0, $1, $2, $3}}, {weights}, {{${x}, ${x + 4}}}, {{$0, $1, $2, $3}};")
    return "\n".join(lines)


# The functions that insert these texts get them as arguments, because otherwise Triton's cache would miss a change.
_MXFP4, _MULTIPLICATION = gl.constexpr(_from_mxfp4()), gl.constexpr(_multiplication())
_SYMMETRIC = gl.constexpr(_from_integers(f"{0x43004300 + MIDDLE * 0x10001}"))
_WITH_ZEROS = gl.constexpr(_from_integers("$24"))


@gl._core.builtin
def _converted(words, factors, conversion, _semantic=None):
    """The pairs 0, 1, 2 and 3 of words, converted with pairs of scales, and of zeros if there are any."""
    constraints, kinds = ",".join(["=&r"] * 16 + ["r"] * 4 * (1 + len(factors))), (gl.int32,) * 4
    found = tl_core.inline_asm_elementwise(
        conversion.value, constraints, [words, *factors], kinds, is_pure=True, pack=4, _semantic=_semantic
    )
    return tl_core.tuple(list(found))


@gl._core.builtin
def _multiply_add(first, second, x, sums, multiplication, _semantic=None):
    """sums + (pairs of two rows of weights) * x."""
    constraints = ",".join(["=f"] * 4 + ["r"] * 48 + ["0", "1", "2", "3"])
    values = [*first, *second, *x, sums]
    return tl_core.inline_asm_elementwise(
        multiplication.value, constraints, values, gl.float32, is_pure=True, pack=4, _semantic=_semantic
    )


@gluon.constexpr_function
def _parts_in_slot(X_ROWS):
    """How many parts of 256 columns a slot holds. With two, the few programs of one row of x wait less often. With one,
    more programs of several rows share a multiprocessor."""
    return 2 if X_ROWS == 1 else 1


@gluon.constexpr_function
def _row_tiles_of_x(X_ROWS):
    """How often the tensor cores multiply a part of weights: once for each eight rows of a tile of x."""
    return (X_ROWS + 7) // 8


class _Part(NamedTuple):
    """How many rows of weights are multiplied at a time, and their kind: "down", or gate and up, "interleaved" or in
    "halves". There a gate is a first row, and its up the second."""

    kind: str
    height: int


@gluon.constexpr_function
def _tiles_in(PART):
    """In how many tiles of the tensor cores a thread has rows."""
    _, height = PART  # a constexpr_function gets no names
    return height // 32


@gluon.constexpr_function
def _bits(PART):
    """Which bits of a row's number in a part give its place among a tensor's eight rows (three bits, the lowest first),
    whether it is a first or a second row, its place on the second axis, and its tile if there are two. They are chosen
    so that eight lanes read all banks of shared memory."""
    kind, _ = PART
    rows, second, half, tile = {
        "interleaved": ((2, 1, 3), 0, 5, 4),
        "halves": ((2, 0, 1), 5, 4, 3),
        "down": ((2, 0, 1), 3, 5, 4),
    }[kind]
    if _tiles_in(PART) == 2:
        return rows, second, half, (tile,)
    return rows, second - (second > tile), half - (half > tile), ()


@gluon.constexpr_function
def _part_layout(PART, width):
    """The layout of a part's words [rows, 32], where a thread has four of each of its rows, or of its scales
    [rows, 8]."""
    _, height = PART
    rows, second, half, tiles = _bits(PART)
    words = [[0, 1], [0, 2]] if width == 32 else []
    registers = [*words, [1 << second, 0], *([1 << tile, 0] for tile in tiles)]
    lanes = [[0, width // 8], [0, width // 4], *([1 << bit, 0] for bit in rows)]
    return gl.DistributedLinearLayout(registers, lanes, [[1 << half, 0], [0, width // 2]], [], [height, width])


@gluon.constexpr_function
def _part_axes(PART, *words):
    """How a part is separated into a thread's rows: its shape with an axis for each bit of a row's number, then
    [2, 4, *words]; the order of axes that gives those of _WEIGHTS, then tile and second; and the shape that results."""
    rows, second, half, tiles = _bits(PART)
    count = 4 + 1 + len(tiles)
    of_rows = (count - 1 - bit for bit in reversed(rows))
    last = (*(count - 1 - tile for tile in tiles), count - 1 - second)
    order = (count, count - 1 - half, *of_rows, count + 1, *(count + 2 for _ in words), *last)
    return (2,) * count + (2, 4, *words), order, (2, 2, 8, 4, *words, *(2 for _ in last))


@gluon.constexpr_function
def _layout_of_x(X_ROWS):
    """The layout of a part of x [X_ROWS, 128 words], where a thread has 16 words of a row."""
    lanes = [[0, 16], [0, 32], *([row % X_ROWS, 0] for row in (1, 2, 4))]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 8]], lanes, [[0, 0], [0, 64]], [], [X_ROWS, 128])


@gluon.constexpr_function
def _along(layout, axis):
    """The layout of a vector along an axis of a tensor with four axes."""
    for other in (3, 2, 1, 0):
        layout = layout if other == axis else gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _index(size: gl.constexpr, axis: gl.constexpr, layout: gl.constexpr):
    """0 to size - 1 along an axis of a tensor with four axes."""
    found = gl.arange(0, size, _along(layout, axis))
    for other in gl.static_range(4):
        if other != axis:
            found = gl.expand_dims(found, other)
    return found


class _Weight(NamedTuple):
    """A weight of all experts, without its words: its scales and zeros, its bias [E, rows], and how many rows and
    columns each expert has."""

    scales: Tensor
    zeros: Tensor | None
    bias: Rows | None
    rows: int
    depth: int


# --- The rows of x that a program multiplies


@gluon.jit
def _tiles_of(word, X_ROWS: gl.constexpr):
    """The first of a program's tiles of rows, and the end of them. word: a bit for each of the expert's rows. The last
    program of an expert takes all tiles that are left."""
    count = gl.inline_asm_elementwise("popc.b64 $0, $1;", "=r,l", [word], gl.int32, is_pure=True, pack=1)
    tile, tiles = gl.program_id(0), (count + X_ROWS - 1) // X_ROWS
    return tile, gl.where(tile + 1 == gl.num_programs(0), tiles, gl.minimum(tile + 1, tiles))


@gluon.jit
def _rows_of(word, tile, X_ROWS: gl.constexpr):
    """How many of an expert's rows there are from a tile's first one on, and the numbers of the tile's rows [X_ROWS, or
    8 if there is one row in all]."""
    COUNT: gl.constexpr = ROWS if X_ROWS == 1 else X_ROWS
    bits: gl.constexpr = gl.BlockedLayout([2, COUNT], [32, 1], [1, _WARPS], [1, 0])
    if X_ROWS == 1:
        remaining = (word != 0).to(gl.int32)
        row = gl.zeros((COUNT,), gl.int32, gl.SliceLayout(0, bits))
    else:
        bit = gl.arange(0, 64, gl.SliceLayout(1, bits))[:, None]
        member, below = (word >> bit) & 1, word & ((1 << bit.to(gl.int64)) - 1)
        number = gl.inline_asm_elementwise("popc.b64 $0, $1;", "=r,l", [below], gl.int32, is_pure=True, pack=1)
        number -= tile * COUNT
        mine = (member != 0) & (number == gl.arange(0, COUNT, gl.SliceLayout(0, bits))[None, :])
        row = gl.sum(gl.where(mine, bit, 0), axis=0)
        remaining = gl.max(gl.max(gl.where(member != 0, number + 1, 0), axis=1), axis=0)
    return remaining, row


@gluon.jit
def _places_of(routes, expert, row, CHOSEN: gl.constexpr, BLOCK_J: gl.constexpr, X_ROWS: gl.constexpr):
    """For each of these rows [8 or 16], the place of this expert among those that the row chose."""
    if X_ROWS == 1:
        found = row
        for j in gl.static_range(CHOSEN):
            found = gl.where(gl.load(routes.experts + j) == expert, j, found)
    else:
        found = _searched_places(routes, expert, row, CHOSEN, BLOCK_J)
    return found


@gluon.jit
def _searched_places(routes, expert, row, CHOSEN: gl.constexpr, BLOCK_J: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, BLOCK_J], [8, 4], [_WARPS, 1], [1, 0])
    of_row = gl.convert_layout(row, gl.SliceLayout(1, layout))[:, None] * CHOSEN
    place = gl.arange(0, BLOCK_J, gl.SliceLayout(0, layout))[None, :]
    chosen = gl.load(routes.experts + of_row + place, mask=place < CHOSEN, other=-1)
    return gl.convert_layout(gl.sum(gl.where(chosen == expert, place, 0), axis=1), row.type.layout)


# --- Sums


@gluon.jit
def _row_of(number, first, rows, PART: gl.constexpr):
    """Which of an expert's rows has this number in a part."""
    if PART.kind == "interleaved":
        row = 2 * first + number
    elif PART.kind == "halves":
        row = first + number % (PART.height // 2) + number // (PART.height // 2) * (rows // 2)
    else:
        row = first + number
    return row


@gluon.jit
def _number(half, row, tile, second, PART: gl.constexpr):
    """A row's number in a part."""
    bits: gl.constexpr = _bits(PART)
    of_eight = ((row & 1) << bits[0][0]) + ((row >> 1 & 1) << bits[0][1]) + ((row >> 2) << bits[0][2])
    number = of_eight + (second << bits[1]) + (half << bits[2])
    if len(bits[3]):
        number = number + (tile << bits[3][0])
    return number


class _Ring(NamedTuple):
    """The parts of all slots, of weights [slots * parts, rows, 32 words] and of x [slots * parts * eights, 8 rows or 1,
    128 words], and a barrier for each slot that says that its weights have come."""

    desc: TensorDescriptor
    words: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


@gluon.jit
def _ring(desc, PART: gl.constexpr, X_ROWS: gl.constexpr):
    EIGHTS: gl.constexpr = _row_tiles_of_x(X_ROWS)
    PARTS: gl.constexpr = _SLOTS * _parts_in_slot(X_ROWS)
    x_layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, X_ROWS // EIGHTS, [1, 0])
    ring = _Ring(
        desc,
        gl.allocate_shared_memory(gl.int32, [PARTS, PART.height, 32], desc.layout),
        gl.allocate_shared_memory(gl.int32, [PARTS * EIGHTS, X_ROWS // EIGHTS, 128], x_layout),
        barriers(_SLOTS),
    )
    ready((ring.full,), _SLOTS)
    return ring


@gluon.jit
def _copy_words(ring, steps_before, step, weight, expert, first, wanted, PART: gl.constexpr):
    """Let TMA load an expert's weights for a step, which fill a slot, if wanted. steps_before: see _sums."""
    BOX: gl.constexpr = ring.desc.block_type.shape[0]
    PARTS: gl.constexpr = ring.words.shape[0] // _SLOTS
    BOXES: gl.constexpr = PARTS * (PART.height // BOX)
    slot = (steps_before + step) % _SLOTS
    boxes = reinterpret(ring.words, gl.int32, [_SLOTS * BOXES, BOX, 32], ring.desc.layout)
    mbarrier.expect(ring.full.index(slot), BOXES * BOX * 128, pred=wanted)
    for i in gl.static_range(BOXES):
        number, part = BOX * i % PART.height, step * PARTS + BOX * i // PART.height
        where = [expert * weight.rows + _row_of(number, first, weight.rows, PART), part * 32]
        async_load(ring.desc, where, ring.full.index(slot), boxes.index(slot * BOXES + i), pred=wanted)


class _OwnX(NamedTuple):
    """Pointers to the rows of x of a program's first step [parts * rows, 1], which of them there are, their columns
    [parts * rows, 256], and how many columns a row has."""

    ptr: gl.tensor
    exists: gl.tensor
    column: gl.tensor
    depth: gl.tensor


@gluon.jit
def _own_x(x, x_rows, remaining, depth, X_ROWS: gl.constexpr):
    """The _OwnX of a program. x_rows, remaining: see _rows_of."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [_WARPS, 1], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    number = gl.arange(0, _parts_in_slot(X_ROWS) * X_ROWS, of_rows)
    if X_ROWS == 1:
        row, exists = number * 0 + gl.max(x_rows, axis=0), number >= 0
    else:
        row, exists = gl.convert_layout(x_rows, of_rows), number < remaining
    column = (number // X_ROWS)[:, None] * 256 + gl.arange(0, 256, gl.SliceLayout(0, layout))[None, :]
    return _OwnX(x.ptr + row[:, None].to(gl.int64) * x.row, exists[:, None], column, depth)


@gluon.jit
def _load_x(x, step, X_ROWS: gl.constexpr):
    """The numbers of x of a step, in the order of the pairs of a word of weights."""
    column = x.column + step * (_parts_in_slot(X_ROWS) * 256)
    numbers = gl.load(x.ptr + column, mask=x.exists & (column // _UNIT < x.depth // _UNIT), other=0.0)
    COUNT: gl.constexpr = numbers.shape[0]
    return numbers.reshape((COUNT, 32, 2, 4)).permute((0, 1, 3, 2)).reshape((COUNT, 256))


@gluon.jit
def _store_x(ring, step, numbers):
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, ring.x.shape[1], [1, 0])
    slots = reinterpret(ring.x, _BF16, [_SLOTS, numbers.shape[0], 256], layout)
    slots.index(step % _SLOTS).store(numbers)


class _Scales(NamedTuple):
    """Pointers to scales, and to zeros if there are any; where their rows begin, and the bit at which a zero begins in
    its word, [rows, 1]; the numbers of the units of the first part [1, 8], and how many units a row has."""

    ptr: gl.tensor
    zeros: gl.tensor
    row: gl.tensor
    row_of_zeros: gl.tensor
    bit: gl.tensor
    unit: gl.tensor
    units: gl.tensor


@gluon.jit
def _own_scales(weight, expert, first, PART: gl.constexpr, GROUP: gl.constexpr):
    """The _Scales of a program. GROUP: columns that share a scale."""
    layout: gl.constexpr = _part_layout(PART, 8)
    rows = weight.rows
    number = gl.arange(0, PART.height, gl.SliceLayout(1, layout))[:, None]
    row = gl.minimum(_row_of(number, first, rows, PART), rows - 1)
    groups = weight.depth // GROUP
    begin = (expert * rows + row) * groups
    zeros, begin_of_zeros = weight.scales, begin
    if weight.zeros is not None:
        zeros = weight.zeros
        begin_of_zeros = (expert * gl.cdiv(rows, 8) + row // 8) * groups
    unit = gl.arange(0, 8, gl.SliceLayout(0, layout))[None, :]
    return _Scales(weight.scales, zeros, begin, begin_of_zeros, row % 8 * 4, unit, weight.depth // _UNIT)


@gluon.jit
def _load_scales(scales, part, GROUP: gl.constexpr, ZEROS: gl.constexpr):
    """The scales of a part, and the words of its zeros, [rows, 8]."""
    unit = part * 8 + scales.unit
    place, exists = unit * _UNIT // GROUP, unit < scales.units
    loaded = (gl.load(scales.ptr + (scales.row + place), mask=exists, other=0),)
    if ZEROS:
        zeros = gl.load(scales.zeros + (scales.row_of_zeros + place), mask=exists, other=0)
        loaded += (zeros,)  # type: ignore[assignment]
    return loaded


@gluon.jit
def _by_row(part, WORDS: gl.constexpr, PART: gl.constexpr):
    """A part as one tensor for each row of a thread. It has words, or one number for all words of a unit."""
    axes: gl.constexpr = _part_axes(PART, *WORDS)
    part = part.reshape(axes.value[0]).permute(axes.value[1]).reshape(axes.value[2])
    firsts, seconds = part.split()
    if _tiles_in(PART) == 1:
        rows = (firsts, seconds)
    else:
        first, third = firsts.split()
        second, fourth = seconds.split()
        rows = (first, second, third, fourth)  # type: ignore[assignment]
    return rows


@gluon.jit
def _factors_of(loaded, scales, PART: gl.constexpr):
    """What words are converted with, in pairs: their scales, and their zeros if there are any."""
    scale = loaded[0]
    if scale.dtype == gl.uint8:
        exponent = gl.minimum(scale.to(gl.int32), 129 + _SMALLER)  # more gives infinity
        pairs = exponent * 0x800080 + (126 - _SMALLER) * 0x800080
    else:
        pairs = (scale.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001
    factors = (_by_row(pairs, (), PART),)
    if len(loaded) == 2:
        factors += (_by_row(((loaded[1] >> scales.bit & 15) + 0x4300) * 0x10001, (), PART),)  # type: ignore[assignment]
    return factors


@gluon.jit
def _words_of(part, PART: gl.constexpr):
    """A part's words, for each row of a thread."""
    return _by_row(part.load(_part_layout(PART, 32)), (4,), PART)


@gluon.jit
def _converted_row(words, factors, row: gl.constexpr, CONVERSION: gl.constexpr):
    """One of a thread's rows. words, factors: of all of them."""
    words = gl.convert_layout(words[row], _WEIGHTS, assert_trivial=True)
    found = ()
    for i in gl.static_range(len(factors)):
        factor = gl.expand_dims(gl.convert_layout(factors[i][row], _POWERS, assert_trivial=True), 4)
        found += (factor.broadcast_to(words.shape),)  # type: ignore[assignment]
    return _converted(words, found, CONVERSION)


@gluon.jit
def _pair_of_x(pairs):
    """[rows, 2, 4 units, 4 words] in the shape and layout of weights."""
    found = gl.convert_layout(pairs.permute((1, 0, 2, 3)), gl.SliceLayout(1, _WEIGHTS), assert_trivial=True)
    return gl.expand_dims(found, 1).broadcast_to((2, 2, ROWS, 4, 4))


@gluon.jit
def _x_of(tile):
    """The numbers of x that each thread multiplies by its words, as their pairs 0, 1, 2 and 3."""
    X_ROWS: gl.constexpr = tile.shape[0]
    even, odd = tile.load(_layout_of_x(X_ROWS)).reshape((X_ROWS, 2, 4, 4, 2, 2)).split()
    first, third = even.split()
    second, fourth = odd.split()
    return _pair_of_x(first), _pair_of_x(second), _pair_of_x(third), _pair_of_x(fourth)


@gluon.jit
def _steps_of(depth, X_ROWS: gl.constexpr):
    """How many steps a row of weights takes."""
    return gl.cdiv(depth, 256 * _parts_in_slot(X_ROWS))


@gluon.jit
def _sums(
    ring,
    steps_before,
    x,
    x_rows,
    remaining,
    weight,
    expert,
    first,
    PART: gl.constexpr,
    X_ROWS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Sums [2, 8, 4, 4], one for each tile of weights and each eight rows of x. The t-th of four threads has two rows
    of weights times rows 2 t and 2 t + 1 of x. steps_before: how many steps the program has made before these. x_rows,
    remaining: see _rows_of. The loads of the first weights must have been started."""
    INTEGERS: gl.constexpr = weight.scales.dtype.element_ty != gl.uint8
    ZEROS: gl.constexpr = weight.zeros is not None
    CONVERSION: gl.constexpr = (_WITH_ZEROS if ZEROS else _SYMMETRIC) if INTEGERS else _MXFP4
    PARTS: gl.constexpr = _parts_in_slot(X_ROWS)
    EIGHTS: gl.constexpr = _row_tiles_of_x(X_ROWS)
    own, scales = _own_x(x, x_rows, remaining, weight.depth, X_ROWS), _own_scales(weight, expert, first, PART, GROUP)
    steps = _steps_of(weight.depth, X_ROWS)
    _store_x(ring, steps_before, _load_x(own, 0, X_ROWS))
    numbers, loaded = _load_x(own, 1, X_ROWS), _load_scales(scales, 0, GROUP, ZEROS)
    sums = ()
    for _ in gl.static_range(_tiles_in(PART) * EIGHTS):
        sums += (gl.zeros((2, 2, 8, 4, 4), gl.float32, _WEIGHTS),)  # type: ignore[assignment]
    for step in range(steps):
        await_full(ring.full, steps_before + step)
        debug_barrier()  # all have read the previous slot, which is filled again
        _copy_words(ring, steps_before, step + 1, weight, expert, first, step + 1 < steps, PART)
        _store_x(ring, steps_before + step + 1, numbers)
        numbers = _load_x(own, step + 2, X_ROWS)
        for part in range(step * PARTS, (step + 1) * PARTS):
            slot = (steps_before * PARTS + part) % (_SLOTS * PARTS)
            words, factors = _words_of(ring.words.index(slot), PART), _factors_of(loaded, scales, PART)
            loaded = _load_scales(scales, part + 1, GROUP, ZEROS)
            added = ()
            for i in gl.static_range(_tiles_in(PART)):
                upper = _converted_row(words, factors, 2 * i, CONVERSION)
                lower = _converted_row(words, factors, 2 * i + 1, CONVERSION)
                for j in gl.static_range(EIGHTS):
                    found = _x_of(ring.x.index(slot * EIGHTS + j))
                    product = _multiply_add(upper, lower, found, sums[i * EIGHTS + j], _MULTIPLICATION)
                    added += (product,)  # type: ignore[assignment]
            sums = added
    LARGER: gl.constexpr = 1.0 if INTEGERS else 4294967296.0
    whole = ()
    for i in gl.static_range(_tiles_in(PART) * EIGHTS):
        whole += (gl.sum(sums[i], axis=0) * LARGER,)  # type: ignore[assignment]
    return whole


@gluon.jit
def _by_rows(sums):
    """Sums of the first rows of weights, and of the second ones, [2, 8 rows of weights, 4, 2 rows of x]."""
    return sums.reshape((2, 8, 4, 2, 2)).permute((0, 1, 2, 4, 3)).split()


@gluon.jit
def _split_by_eight(vector):
    """A vector for the rows of a tile of x as vectors for eight of them each."""
    if vector.shape[0] == ROWS:
        found = (vector,)
    else:
        found = vector.reshape((2, ROWS)).permute((1, 0)).split()
    return found


@gluon.jit
def _numbers(layout: gl.constexpr):
    """0 to 7, the numbers of rows of x, as [1, 1, 4, 2]."""
    return _index(4, 2, layout) * 2 + _index(2, 3, layout)


@gluon.jit
def _of_numbers(vector, layout: gl.constexpr):
    """A vector [8] for rows of x as [1, 1, 4, 2]."""
    kind: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    found = gl.convert_layout(vector.reshape((4, 2)), kind)
    return gl.expand_dims(gl.expand_dims(found, 0), 1)


@gluon.jit
def _rows_of_sums(j: gl.constexpr, second: gl.constexpr, first, rows, layout: gl.constexpr, PART: gl.constexpr):
    """Which of an expert's rows have a tile's first or second sums."""
    number = _number(_index(2, 0, layout), _index(8, 1, layout), j, second, PART)
    return _row_of(number, first, rows, PART)


@gluon.jit
def _load_bias(weight, expert, first, PART: gl.constexpr):
    """The bias of each tile's first and second rows [2, 8, 1, 1]; zeros without one."""
    parts = _by_rows(gl.zeros((2, 8, 4, 4), gl.float32, _WHOLE))  # for their layout
    layout: gl.constexpr = parts[0].type.layout
    found = ()
    for i in gl.static_range(2 * _tiles_in(PART)):
        row = _rows_of_sums(i // 2, i % 2, first, weight.rows, layout, PART)
        if weight.bias is None:
            found += (0.0,)  # type: ignore[assignment]
        else:
            ptrs = weight.bias.ptr + expert.to(gl.int64) * weight.bias.row + row
            found += (gl.load(ptrs, mask=row < weight.rows, other=0.0),)  # type: ignore[assignment]
    return found


@gluon.jit
def _with_bias(sums, bias, BIASED: gl.constexpr):
    """Rounded sums, with a bias."""
    value = rounded(sums, _BF16)
    return rounded(value + bias.to(gl.float32), _BF16) if BIASED else value


# --- Kernels


@gluon.jit
def swiglu_kernel(
    x,
    desc,
    weight,
    routes,
    out_ptr,
    limit,
    alpha,
    CHOSEN: gl.constexpr,
    PART: gl.constexpr,
    CLAMPED: gl.constexpr,
    BLOCK_J: gl.constexpr,
    X_ROWS: gl.constexpr,
    MANY: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Grid (tiles of rows, tiles of columns, slots): a program makes inner columns of an expert, half as many as a part
    has rows. MANY: a program may take several tiles of rows (_tiles_of). See experts_swiglu."""
    ring, slot = _ring(desc, PART, X_ROWS), gl.program_id(2)
    gdc_wait()
    expert, word = gl.load(routes.hit + slot), gl.load(routes.rows + slot)
    if MANY:
        begin, end = _tiles_of(word, X_ROWS)
        for tile in range(begin, end):
            debug_barrier()  # all have read the last slots, which are filled again
            _swiglu_tile(
                x, weight, routes, out_ptr, limit, alpha, ring,
                (tile - begin) * _steps_of(weight.depth, X_ROWS), expert,
                *_rows_of(word, tile, X_ROWS), CHOSEN, PART, CLAMPED, BLOCK_J, X_ROWS, GROUP,
            )  # fmt: skip
    else:
        remaining, row = _rows_of(word, gl.program_id(0), X_ROWS)
        if remaining > 0:
            _swiglu_tile(
                x, weight, routes, out_ptr, limit, alpha, ring, 0, expert,
                remaining, row, CHOSEN, PART, CLAMPED, BLOCK_J, X_ROWS, GROUP,
            )  # fmt: skip


@gluon.jit
def _swiglu_tile(
    x,
    weight,
    routes,
    out_ptr,
    limit,
    alpha,
    ring,
    steps_before,
    expert,
    remaining,
    row,
    CHOSEN: gl.constexpr,
    PART: gl.constexpr,
    CLAMPED: gl.constexpr,
    BLOCK_J: gl.constexpr,
    X_ROWS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """`swiglu_kernel` for a tile of rows. steps_before: see _sums. remaining, row: see _rows_of."""
    first, size = gl.program_id(1) * (PART.height // 2), weight.rows // 2
    _copy_words(ring, steps_before, 0, weight, expert, first, True, PART)
    added = _load_bias(weight, expert, first, PART)
    pair = row * CHOSEN + _places_of(routes, expert, row, CHOSEN, BLOCK_J, X_ROWS)
    sums = _sums(ring, steps_before, x, row, remaining, weight, expert, first, PART, X_ROWS, GROUP)
    gdc_launch_dependents()
    pairs = _split_by_eight(pair)
    for j in gl.static_range(_tiles_in(PART)):
        for k in gl.static_range(len(pairs)):
            _store_swiglu(
                sums[j * len(pairs) + k], added[2 * j], added[2 * j + 1], remaining - k * ROWS, pairs[k], out_ptr,
                first, size, limit, alpha, j, PART, CLAMPED, weight.bias is not None,
            )  # fmt: skip


@gluon.jit
def _store_swiglu(
    sums,
    of_gates,
    of_ups,
    remaining,
    pair,
    out_ptr,
    first,
    size,
    limit,
    alpha,
    j: gl.constexpr,
    PART: gl.constexpr,
    CLAMPED: gl.constexpr,
    BIASED: gl.constexpr,
):
    """Store a tile's columns. of_gates, of_ups: biases. pair [8]: the output's row for a row of x and this expert."""
    gates, ups = _by_rows(sums)
    layout: gl.constexpr = gates.type.layout
    column = _rows_of_sums(j, 0, first, 2 * size, layout, PART)
    if PART.kind == "interleaved":
        column = column // 2
    gate, up = _with_bias(gates, of_gates, BIASED), _with_bias(ups, of_ups, BIASED)
    if CLAMPED:
        gate = gl.where(gate > limit, limit, gate)  # keeps NaN
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
        share = rounded(1.0 / (1.0 + gl.exp(-rounded(gate * alpha, _BF16))), _BF16)
        value = rounded(up + 1.0, _BF16) * rounded(gate * share, _BF16)
    else:
        value = swiglu(gate, up, _BF16)
    out = out_ptr + _of_numbers(pair, layout).to(gl.int64) * size + column
    gl.store(out, value.to(_BF16), mask=(column < size) & (_numbers(layout) < remaining))


@gluon.jit(do_not_specialize=["rows"])
def down_kernel(
    inner_ptr,
    desc,
    weight,
    weights_ptr,
    routes,
    out_ptr,
    rows,
    CHOSEN: gl.constexpr,
    PART: gl.constexpr,
    BLOCK_J: gl.constexpr,
    X_ROWS: gl.constexpr,
    MANY: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Grid (tiles of rows, tiles of columns, slots): a program makes columns of an expert's outputs. MANY: see
    swiglu_kernel. See experts_down."""
    ring, slot = _ring(desc, PART, X_ROWS), gl.program_id(2)
    gdc_wait()
    expert, word = gl.load(routes.hit + slot), gl.load(routes.rows + slot)
    if MANY:
        begin, end = _tiles_of(word, X_ROWS)
        for tile in range(begin, end):
            debug_barrier()  # all have read the last slots, which are filled again
            _down_tile(
                inner_ptr, weight, weights_ptr, routes, out_ptr, rows, ring,
                (tile - begin) * _steps_of(weight.depth, X_ROWS), expert,
                *_rows_of(word, tile, X_ROWS), CHOSEN, PART, BLOCK_J, X_ROWS, GROUP,
            )  # fmt: skip
    else:
        remaining, row = _rows_of(word, gl.program_id(0), X_ROWS)
        if remaining > 0:
            _down_tile(
                inner_ptr, weight, weights_ptr, routes, out_ptr, rows, ring, 0,
                expert, remaining, row, CHOSEN, PART, BLOCK_J, X_ROWS, GROUP,
            )  # fmt: skip


@gluon.jit
def _down_tile(
    inner_ptr,
    weight,
    weights_ptr,
    routes,
    out_ptr,
    rows,
    ring,
    steps_before,
    expert,
    remaining,
    row,
    CHOSEN: gl.constexpr,
    PART: gl.constexpr,
    BLOCK_J: gl.constexpr,
    X_ROWS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """`down_kernel` for a tile of rows. steps_before: see _sums. remaining, row: see _rows_of."""
    first, size = gl.program_id(1) * PART.height, weight.rows
    _copy_words(ring, steps_before, 0, weight, expert, first, True, PART)
    added = _load_bias(weight, expert, first, PART)
    place = _places_of(routes, expert, row, CHOSEN, BLOCK_J, X_ROWS)
    pair, part = row * CHOSEN + place, place * rows + row
    weights = gl.load(weights_ptr + pair, mask=gl.arange(0, pair.shape[0], pair.type.layout) < remaining, other=0.0)
    sums = _sums(
        ring, steps_before, Rows(inner_ptr, weight.depth), pair, remaining, weight, expert, first, PART, X_ROWS, GROUP
    )
    gdc_launch_dependents()
    parts, of_rows = _split_by_eight(part), _split_by_eight(weights)
    for i in gl.static_range(2 * _tiles_in(PART)):
        for k in gl.static_range(len(parts)):
            _store_down(
                _by_rows(sums[i // 2 * len(parts) + k])[i % 2], added[i], of_rows[k], parts[k], remaining - k * ROWS,
                out_ptr, first, size, i // 2, i % 2, PART, weight.bias is not None,
            )  # fmt: skip


@gluon.jit
def _store_down(
    sums,
    added,
    weights,
    part,
    remaining,
    out_ptr,
    first,
    size,
    j: gl.constexpr,
    second: gl.constexpr,
    PART: gl.constexpr,
    BIASED: gl.constexpr,
):
    """Store columns of a tile's first or second rows, times the weights [8] of the rows of x. added: a bias. part [8]:
    the rows of the output."""
    layout: gl.constexpr = sums.type.layout
    column = _rows_of_sums(j, second, first, size, layout, PART)
    value = _with_bias(sums, added, BIASED) * _of_numbers(weights, layout).to(gl.float32)
    value = rounded(value, weights.dtype)
    exists = (column < size) & (_numbers(layout) < remaining)
    gl.store(out_ptr + _of_numbers(part, layout).to(gl.int64) * size + column, value, mask=exists)


def takes(x: Tensor, weight: FourBits) -> bool:
    """Whether these kernels multiply x [n, K], where each row is contiguous, by such a weight."""
    words = weight.bytes
    places = x.data_ptr(), x.stride(0) * x.itemsize, words.data_ptr(), words.stride(1)
    return (
        x.dtype == torch.bfloat16
        and (isinstance(weight, Mxfp4Weight) or weight.scales.dtype == torch.bfloat16)
        and compute_capability(x.device) == (9, 0)
        and all(place % 16 == 0 for place in places)
        and words.stride(0) == words.shape[1] * words.stride(1)
        and all(part.is_contiguous() and part.numel() < 2**31 for part in weight.tensors[1:])
    )


def experts_swiglu(
    x: Tensor,
    weight: FourBits,
    bias: Rows | None,
    routes: Any,
    out: Tensor,
    *,
    interleaved: bool,
    clamp: tuple[float, float] | None,
) -> None:
    """products.experts_swiglu, which has checked the arguments, into `out` [n, k, I]. routes: its _RoutesParts."""
    rows, chosen, _ = out.shape
    limit, alpha = (0.0, 0.0) if clamp is None else clamp
    part = _Part("interleaved" if interleaved else "halves", _height_of(rows, chosen, weight))
    operands = _operands_of(weight, bias, part.height if interleaved else part.height // 2)
    _launch(
        swiglu_kernel, rows, routes, weight, part.height,
        Rows.of(x), *operands, routes, out, limit, alpha, chosen, part, clamp is not None,
    )  # fmt: skip


def experts_down(
    inner: Tensor,
    weight: FourBits,
    bias: Rows | None,
    routes: Any,
    weights: Tensor,
    out: Tensor,
) -> None:
    """products.experts_down into the parts `out` [k, n, H]. weights [n, k]: of the rows' experts."""
    chosen, rows, _ = out.shape
    part = _Part("down", _height_of(rows, chosen, weight))
    operands = _operands_of(weight, bias, part.height)
    _launch(
        down_kernel, rows, routes, weight, part.height,
        inner, *operands, weights, routes, out, rows, chosen, part,
    )  # fmt: skip


def _height_of(rows: int, chosen: int, weight: FourBits) -> int:
    """How many rows of weights a program multiplies: for one row of x, half of HEIGHT if the multiprocessor with the
    most rows then has fewer. (One row of x has equally many programs in every step.)"""

    def most(height: int) -> int:
        programs = chosen * triton.cdiv(weight.shape[1], height)
        return triton.cdiv(programs, multiprocessors_of(weight.bytes.device)) * height

    half = HEIGHT // 2
    return half if rows == 1 and most(half) < most(HEIGHT) else HEIGHT


def _x_rows_of(rows: int, chosen: int, experts: int) -> int:
    """How many rows of x a tile has: 1 of one row, otherwise the 8 that the tensor cores multiply at a time. It has 16
    if experts have at least 8 on average: then weights are converted once for both halves."""
    if rows == 1:
        return 1
    return 2 * ROWS.value if rows * chosen >= ROWS.value * experts else ROWS.value


def _operands_of(weight: FourBits, bias: Rows | None, height: int) -> tuple[TensorDescriptor, _Weight]:
    """The words in tiles of `height` rows, and the rest of the weight."""
    words = descriptor(weight.bytes.flatten(0, 1).view(torch.int32), height, 32, WORDS)
    _, scales, *zeros = weight.tensors
    _, rows, depth = weight.shape
    return words, _Weight(scales, zeros[0] if zeros else None, bias, rows, depth)


def _launch(kernel: Any, rows: int, routes: Any, weight: FourBits, height: int, *arguments: object) -> None:
    """Launch with `height` rows of weights in a program. arguments: all but the last four, which both kernels share."""
    (slots,), chosen = routes.hit.shape, routes.experts.shape[1]
    many, x_rows = rows > _FEW, _x_rows_of(rows, chosen, weight.shape[0])
    programs = _PROGRAMS_OF_MANY if many else triton.cdiv(rows, x_rows)
    overlapped_on_hopper(kernel, (programs, triton.cdiv(weight.shape[1], height), slots))(
        *arguments, triton.next_power_of_2(chosen), x_rows, many, weight.group,
        num_warps=_WARPS.value, maxnreg=_REGISTERS[x_rows][len(weight.tensors) == 3],
    )  # fmt: skip
