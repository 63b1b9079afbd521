"""Products of the chosen experts in MXFP4 with rows of bf16, on Hopper. products.py says what they are, and calls them.

A program multiplies 64 rows of an expert's weights by up to eight rows of x, by tensor cores from registers. TMA brings
256 columns at a time into a ring of slots in shared memory, where weights stay in four bits. Of 64 rows each of four
warps takes 32, and of 256 columns 128. There a thread takes a group of 32 columns, of four rows: its words are what it
multiplies, if columns are taken in the order that this asks for, so nothing moves between threads. The sums of warps
with other columns are added at the end, so a row's sums depend on nothing but the weights' shape.

A number's four bits become those of a bf16 number that is 2**126 times smaller. The same multiplication makes up for
this and applies the scale, but leaves weights 2**32 times smaller, because bf16 has no larger factor. So weights from
2**33 on give NaN.

Needs Triton 3.6. What bounds it: docs/speed-notes.md, "MXFP4".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language.core as tl_core
from torch import Tensor

from eagle_triton.ops.linear.gluon_tiles import await_full, barriers, descriptor, ready, rounded, swiglu
from eagle_triton.ops.linear.settings import compute_capability
from eagle_triton.ops.views import Rows
from eagle_triton.runtime.gluon import (
    TensorDescriptor,
    async_load,
    commit_group,
    copy_to_shared,
    debug_barrier,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    wait_group,
)
from eagle_triton.runtime.launch import NO_FMA_FUSION, launch
from eagle_triton.runtime.mxfp4_weight import GROUP, Mxfp4Weight
from eagle_triton.runtime.overlap import prefer_shared_memory

ROWS = gl.constexpr(8)  # of x that a program multiplies
HEIGHT = gl.constexpr(64)  # rows of an expert's weights
_SLOTS = gl.constexpr(3)  # measured on an H200 for gpt-oss: with more, fewer programs share a multiprocessor
_WARPS = gl.constexpr(4)
_MOST_GROUPS = 128  # of a row: a program keeps the scales of all columns
_GROUP = gl.constexpr(GROUP)
_SMALLER = gl.constexpr(32)  # weights are made 2**32 times smaller
WORDS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
_BF16 = gl.constexpr(gl.bfloat16)
# Of tensors of weights and sums [2, 2, 8 rows, 4 groups, 4 words]: a thread has all words of a group. The first axis is
# of the warps with other columns, the second of those with other rows.
_WEIGHTS = gl.constexpr(gl.BlockedLayout([1, 1, 1, 1, 4], [1, 1, 8, 4, 1], [2, 2, 1, 1, 1], [4, 3, 2, 1, 0]))
_POWERS = gl.constexpr(gl.SliceLayout(4, _WEIGHTS.value))  # one for all words of a group
_WHOLE = gl.constexpr(gl.SliceLayout(0, _WEIGHTS.value))  # of sums of all columns


def _conversion() -> str:
    """PTX that makes bf16 numbers of four words, $16 to $19, times the pair in $20. The numbers i and i + 4 of a word
    are a pair: pairs 0 of all words in $0 to $3, then the other pairs."""
    lines = [".reg .b32 t, u;"]
    for word in range(4):
        for pair in range(4):  # to the left: a number without its sign by 6 - 4 * pair, its sign by 12 - 4 * pair
            source, left = f"${16 + word}", 6 - 4 * pair
            lines.append(f"{'shl.b32' if left > 0 else 'shr.u32'} t, {source}, {abs(left)};")
            lines.append("and.b32 t, t, 0x01C001C0;")
            lines.append(f"shl.b32 u, {source}, {left + 6};")
            lines.append("lop3.b32 t, u, 0x80008000, t, 0xEA;")
            lines.append(f"mul.rn.bf16x2 ${4 * pair + word}, t, $20;")
    return "{" + "\n".join(lines) + "}"


def _multiplication() -> str:
    """PTX that adds products to the sums $0 to $3. Weights: pairs 0 to 3 of four words, $4 to $19 of the first row and
    $20 to $35 of the second. x in order: for each word the first two numbers, then the next ones, $36 to $51."""
    lines, kind = [".reg .b32 a, b;"], "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    for word in range(4):
        for half in range(2):
            low, high = f"${36 + 4 * half + word}", f"${44 + 4 * half + word}"
            lines.append(f"prmt.b32 a, {low}, {high}, 0x5410;")
            lines.append(f"prmt.b32 b, {low}, {high}, 0x7632;")
            first, second = 4 + 8 * half + word, 20 + 8 * half + word
            weights = f"{{${first}, ${second}, ${first + 4}, ${second + 4}}}"
            lines.append(f"{kind} {{$0, $1, $2, $3}}, {weights}, {{a, b}}, {{$0, $1, $2, $3}};")
    return "{" + "\n".join(lines) + "}"


_CONVERSION, _MULTIPLICATION = _conversion(), _multiplication()


@gl._core.builtin
def _converted(words, power, _semantic=None):
    """The pairs 0, 1, 2 and 3 of words, times a power of two."""
    constraints, kinds = ",".join(["=&r"] * 16 + ["r"] * 8), (gl.int32,) * 4
    found = tl_core.inline_asm_elementwise(
        _CONVERSION, constraints, [words, power], kinds, is_pure=True, pack=4, _semantic=_semantic
    )
    return tl_core.tuple(list(found))


@gl._core.builtin
def _multiply_add(first, second, x, sums, _semantic=None):
    """sums + (pairs of two rows of weights) * x."""
    constraints = ",".join(["=f"] * 4 + ["r"] * 48 + ["0", "1", "2", "3"])
    return tl_core.inline_asm_elementwise(
        _MULTIPLICATION, constraints, [*first, *second, *x, sums], gl.float32, is_pure=True, pack=4, _semantic=_semantic
    )


@gluon.constexpr_function
def _bits(KIND):
    """Which bits of a row's number in a slot are its place among a tensor's eight rows (three, from the last on), first
    or second, the second axis, and the tile. So eight lanes read all banks of shared memory."""
    return {
        "interleaved": ((2, 1, 3), 0, 5, 4),
        "halves": ((2, 0, 1), 5, 4, 3),
        "down": ((2, 0, 1), 3, 5, 4),
    }[KIND]


@gluon.constexpr_function
def _slot_layout(KIND, width):
    """Of a slot of weights [64, 32], where a thread has four words of each of its rows, or of their scales [64, 8]."""
    rows, second, half, tile = _bits(KIND)
    words = [[0, 1], [0, 2]] if width == 32 else []
    registers = [*words, [1 << second, 0], [1 << tile, 0]]
    lanes = [[0, width // 8], [0, width // 4], *([1 << bit, 0] for bit in rows)]
    return gl.DistributedLinearLayout(registers, lanes, [[1 << half, 0], [0, width // 2]], [], [HEIGHT.value, width])


@gluon.constexpr_function
def _slot_order(KIND, *words):
    """The axes of a slot as [2] * 6 bits of rows and [2, 4, *words], in the order of _WEIGHTS, then tile and second."""
    rows, second, half, tile = _bits(KIND)
    of_rows = (5 - bit for bit in reversed(rows))
    return (6, 5 - half, *of_rows, 7, *(8 for _ in words), 5 - tile, 5 - second)


@gluon.constexpr_function
def _layout_of_x(HIGH):
    """Of a slot of x [HIGH, 128]: a thread has 16 words of a row."""
    lanes = [[0, 16], [0, 32], *([row % HIGH, 0] for row in (1, 2, 4))]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 8]], lanes, [[0, 0], [0, 64]], [], [HIGH, 128])


@gluon.constexpr_function
def _in_order(rank):
    return gl.SwizzledSharedLayout(1, 1, 1, [*range(rank)][::-1])


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


# --- The rows of x that a program multiplies


@gluon.jit
def _rows_of(routes, ONE: gl.constexpr):
    """The program's expert, how many rows chose it from the program's first one on, and their numbers [8]. ONE: there
    is one row."""
    slot, tile = gl.program_id(2), gl.program_id(0)
    expert = gl.load(routes.hit + slot)
    word = gl.load(routes.rows + slot)
    bits: gl.constexpr = gl.BlockedLayout([2, ROWS], [32, 1], [1, _WARPS], [1, 0])
    if ONE:
        left = (word != 0).to(gl.int32)
        row = gl.zeros((ROWS,), gl.int32, gl.SliceLayout(0, bits))
    else:
        bit = gl.arange(0, 64, gl.SliceLayout(1, bits))[:, None]
        member, below = (word >> bit) & 1, word & ((1 << bit.to(gl.int64)) - 1)
        number = gl.inline_asm_elementwise("popc.b64 $0, $1;", "=r,l", [below], gl.int32, is_pure=True, pack=1)
        number -= tile * ROWS
        mine = (member != 0) & (number == gl.arange(0, ROWS, gl.SliceLayout(0, bits))[None, :])
        row = gl.sum(gl.where(mine, bit, 0), axis=0)
        left = gl.max(gl.max(gl.where(member != 0, number + 1, 0), axis=1), axis=0)
    return expert, left, row


@gluon.jit
def _places_of(routes, expert, row, CHOSEN: gl.constexpr, BLOCK_J: gl.constexpr):
    """As which of their experts rows [8] chose this one, [8]."""
    layout: gl.constexpr = gl.BlockedLayout([1, BLOCK_J], [8, 4], [_WARPS, 1], [1, 0])
    of_row = gl.convert_layout(row, gl.SliceLayout(1, layout))[:, None] * CHOSEN
    place = gl.arange(0, BLOCK_J, gl.SliceLayout(0, layout))[None, :]
    chosen = gl.load(routes.experts + of_row + place, mask=place < CHOSEN, other=-1)
    return gl.convert_layout(gl.sum(gl.where(chosen == expert, place, 0), axis=1), row.type.layout)


# --- Sums


@gluon.jit
def _row_of(number, first, size, KIND: gl.constexpr):
    """The row of an expert's weights for a row's number in a slot. KIND: "interleaved" or "halves" of gate and up,
    which are first and second, or "down"."""
    if KIND == "interleaved":
        row = 2 * first + number
    elif KIND == "halves":
        row = first + number % (HEIGHT // 2) + number // (HEIGHT // 2) * size
    else:
        row = first + number
    return row


@gluon.jit
def _number(half, row, tile, second, KIND: gl.constexpr):
    """A row's number in a slot."""
    bits: gl.constexpr = _bits(KIND)
    number = ((row & 1) << bits[0][0]) + ((row >> 1 & 1) << bits[0][1]) + ((row >> 2) << bits[0][2])
    return number + (second << bits[1]) + (half << bits[2]) + (tile << bits[3])


class _Ring(NamedTuple):
    """Slots for 256 columns of weights and of x, and barriers that say that the weights have come."""

    desc: TensorDescriptor
    words: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


@gluon.jit
def _ring(desc, ONE: gl.constexpr):
    HIGH: gl.constexpr = 1 if ONE else ROWS
    ring = _Ring(
        desc,
        gl.allocate_shared_memory(gl.int32, [_SLOTS, HEIGHT, 32], desc.layout),
        gl.allocate_shared_memory(gl.int32, [_SLOTS, HIGH, 128], gl.SwizzledSharedLayout(4, 1, HIGH, [1, 0])),
        barriers(_SLOTS),
    )
    ready((ring.full,), _SLOTS)
    return ring


@gluon.jit
def _copy_words(ring, step, row, first, size, wanted, KIND: gl.constexpr):
    """Let TMA load the weights of a step, if wanted. row: the expert's first one."""
    BOX: gl.constexpr = ring.desc.block_type.shape[0]
    COUNT: gl.constexpr = HEIGHT // BOX
    slot = step % _SLOTS
    boxes = reinterpret(ring.words, gl.int32, [_SLOTS * COUNT, BOX, 32], ring.desc.layout)
    mbarrier.expect(ring.full.index(slot), HEIGHT * 128, pred=wanted)
    for i in gl.static_range(COUNT):
        where = [row + _row_of(BOX * i, first, size, KIND), step * 32]
        async_load(ring.desc, where, ring.full.index(slot), boxes.index(slot * COUNT + i), pred=wanted)


@gluon.jit
def _copy_x(ring, step, x_ptr, depth):
    """Start to copy the numbers of x of a step. x_ptr [8 or 1, 1]: to words of its rows."""
    word = step * 128 + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, x_ptr.type.layout)), 0)
    copy_to_shared(ring.x.index(step % _SLOTS), x_ptr + word, mask=word // 16 < depth // _GROUP)
    commit_group()


@gluon.jit
def _kept_scales(ptr, row, first, size, depth, KIND: gl.constexpr, STEPS: gl.constexpr):
    """Scales in shared memory, [steps, rows of a slot, 8 groups]."""
    loaded: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    stored: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 16, 2], [1, 4, 1], [2, 1, 0])
    number = gl.arange(0, HEIGHT, gl.SliceLayout(1, loaded))[:, None]
    group = gl.arange(0, 8 * STEPS, gl.SliceLayout(0, loaded))[None, :]
    of_row = _row_of(number, first, size, KIND)
    there = (group < depth // _GROUP) & (of_row < (size if KIND == "down" else 2 * size))
    scale = gl.load(ptr.ptr + (row + of_row).to(gl.int64) * ptr.row + group, mask=there, other=0)
    kept = gl.allocate_shared_memory(gl.uint8, [STEPS, HEIGHT, 8], _in_order(3))
    kept.store(gl.convert_layout(scale.reshape((HEIGHT, STEPS, 8)).permute((1, 0, 2)), stored))
    return reinterpret(kept, gl.uint8, [STEPS, HEIGHT, 8], _in_order(2))


@gluon.jit
def _parts(tensor):
    """[..., 2 tiles, first or second] as a tensor for each."""
    firsts, seconds = tensor.split()
    first, third = firsts.split()
    second, fourth = seconds.split()
    return first, second, third, fourth


@gluon.jit
def _powers(kept, step, KIND: gl.constexpr):
    """The powers of two of a step's scales, for each row of a thread."""
    order: gl.constexpr = _slot_order(KIND)
    scale = kept.index(step).load(_slot_layout(KIND, 8)).to(gl.int32)
    power = (gl.minimum(scale, 129 + _SMALLER) + (126 - _SMALLER)) * 0x800080  # more gives infinity
    return _parts(power.reshape((2, 2, 2, 2, 2, 2, 2, 4)).permute(order.value).reshape((2, 2, 8, 4, 2, 2)))


@gluon.jit
def _words_of(slot, KIND: gl.constexpr):
    """A slot's words, for each row of a thread."""
    order: gl.constexpr = _slot_order(KIND, 4)
    words = slot.load(_slot_layout(KIND, 32)).reshape((2, 2, 2, 2, 2, 2, 2, 4, 4)).permute(order.value)
    return _parts(words.reshape((2, 2, 8, 4, 4, 2, 2)))


@gluon.jit
def _converted_row(words, power):
    words = gl.convert_layout(words, _WEIGHTS, assert_trivial=True)
    power = gl.expand_dims(gl.convert_layout(power, _POWERS, assert_trivial=True), 4)
    return _converted(words, power.broadcast_to(words.shape))


@gluon.jit
def _pair_of_x(pairs):
    """[rows, 2, 4 groups, 4 words] as a tensor of weights."""
    found = gl.convert_layout(pairs.permute((1, 0, 2, 3)), gl.SliceLayout(1, _WEIGHTS), assert_trivial=True)
    return gl.expand_dims(found, 1).broadcast_to((2, 2, ROWS, 4, 4))


@gluon.jit
def _x_of(tile):
    """What belongs to the words of each thread: pairs 0, 1, 2 and 3 of the numbers in order."""
    HIGH: gl.constexpr = tile.shape[0]
    even, odd = tile.load(_layout_of_x(HIGH)).reshape((HIGH, 2, 4, 4, 2, 2)).split()
    first, third = even.split()
    second, fourth = odd.split()
    return _pair_of_x(first), _pair_of_x(second), _pair_of_x(third), _pair_of_x(fourth)


@gluon.jit
def _sums(
    ring,
    x,
    x_rows,
    kept,
    row,
    first,
    size,
    depth,
    KIND: gl.constexpr,
    ONE: gl.constexpr,
):
    """Two sums [2, 8, 4, 4]: in each thread two rows of weights times the rows 2 t and 2 t + 1 of x, of which it is
    the t-th of four. x_rows [8]: of x. kept: scales. row: the expert's first one. The first weights are on their
    way."""
    of_x: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    if ONE:
        x_row = gl.zeros((1,), gl.int32, gl.SliceLayout(1, of_x)) + gl.max(x_rows, axis=0)
    else:
        x_row = gl.convert_layout(x_rows, gl.SliceLayout(1, of_x))
    x_ptr = x.ptr.to(gl.pointer_type(gl.int32), bitcast=True) + x_row[:, None].to(gl.int64) * (x.row // 2)
    steps = gl.cdiv(depth, 256)
    for step in gl.static_range(_SLOTS - 1):
        _copy_x(ring, step, x_ptr, depth)
    sums = (gl.zeros((2, 2, 8, 4, 4), gl.float32, _WEIGHTS), gl.zeros((2, 2, 8, 4, 4), gl.float32, _WEIGHTS))
    for step in range(steps):
        await_full(ring.full, step)
        wait_group(_SLOTS - 2)
        debug_barrier()  # all have read the previous slot, which is filled again
        following = step + _SLOTS - 1
        _copy_words(ring, following, row, first, size, following < steps, KIND)
        _copy_x(ring, following, x_ptr, depth)
        words, power = _words_of(ring.words.index(step % _SLOTS), KIND), _powers(kept, step, KIND)
        found = _x_of(ring.x.index(step % _SLOTS))
        first_rows, second_rows = _converted_row(words[0], power[0]), _converted_row(words[1], power[1])
        tile = _multiply_add(first_rows, second_rows, found, sums[0])
        first_rows, second_rows = _converted_row(words[2], power[2]), _converted_row(words[3], power[3])
        sums = (tile, _multiply_add(first_rows, second_rows, found, sums[1]))
    return gl.sum(sums[0], axis=0) * 4294967296.0, gl.sum(sums[1], axis=0) * 4294967296.0


@gluon.jit
def _by_rows(sums):
    """Sums of the first rows of weights, and of the second ones, [2, 8 rows of weights, 4, 2 rows of x]."""
    return sums.reshape((2, 8, 4, 2, 2)).permute((0, 1, 2, 4, 3)).split()


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
def _rows_of_sums(j: gl.constexpr, second: gl.constexpr, first, size, layout: gl.constexpr, KIND: gl.constexpr):
    """The rows of an expert's weights of a tile's first or second sums."""
    number = _number(_index(2, 0, layout), _index(8, 1, layout), j, second, KIND)
    return _row_of(number, first, size, KIND)


@gluon.jit
def _load_bias(bias, expert, first, size, KIND: gl.constexpr):
    """The bias of each tile's first and second rows [2, 8, 1, 1]; zeros without one."""
    parts = _by_rows(gl.zeros((2, 8, 4, 4), gl.float32, _WHOLE))  # for their layout
    layout: gl.constexpr = parts[0].type.layout
    found = ()
    for i in gl.static_range(4):
        row = _rows_of_sums(i // 2, i % 2, first, size, layout, KIND)
        if bias is None:
            found += (0.0,)  # type: ignore[assignment]
        else:
            there = row < (size if KIND == "down" else 2 * size)
            found += (gl.load(bias.ptr + expert.to(gl.int64) * bias.row + row, mask=there, other=0.0),)  # type: ignore[assignment]
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
    scales,
    bias,
    routes,
    out_ptr,
    size,
    depth,
    limit,
    alpha,
    CHOSEN: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    CLAMPED: gl.constexpr,
    BLOCK_J: gl.constexpr,
    ONE: gl.constexpr,
    STEPS: gl.constexpr,
):
    """Grid (tiles of rows, tiles of columns, slots): 32 inner columns of an expert. See experts_swiglu."""
    KIND: gl.constexpr = "interleaved" if INTERLEAVED else "halves"
    ring, first, steps = _ring(desc, ONE), gl.program_id(1) * (HEIGHT // 2), gl.cdiv(depth, 256)
    gdc_wait()
    expert, left, row = _rows_of(routes, ONE)
    if left > 0:
        of_expert = expert * (2 * size)
        for step in gl.static_range(_SLOTS - 1):
            _copy_words(ring, step, of_expert, first, size, step < steps, KIND)
        added = _load_bias(bias, expert, first, size, KIND)
        pair = row * CHOSEN + _places_of(routes, expert, row, CHOSEN, BLOCK_J)
        kept = _kept_scales(scales, of_expert, first, size, depth, KIND, STEPS)
        sums = _sums(ring, x, row, kept, of_expert, first, size, depth, KIND, ONE)
        gdc_launch_dependents()
        for j in gl.static_range(2):
            _store_swiglu(
                sums[j], added[2 * j], added[2 * j + 1], left, pair, out_ptr, first, size, limit, alpha,
                j, KIND, CLAMPED, bias is not None,
            )  # fmt: skip


@gluon.jit
def _store_swiglu(
    sums,
    of_gates,
    of_ups,
    left,
    pair,
    out_ptr,
    first,
    size,
    limit,
    alpha,
    j: gl.constexpr,
    KIND: gl.constexpr,
    CLAMPED: gl.constexpr,
    BIASED: gl.constexpr,
):
    """Store a tile's columns. of_gates, of_ups: biases. pair [8]: of a row of x and one of its experts."""
    gates, ups = _by_rows(sums)
    layout: gl.constexpr = gates.type.layout
    column = _rows_of_sums(j, 0, first, size, layout, KIND)
    if KIND == "interleaved":
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
    gl.store(out, value.to(_BF16), mask=(column < size) & (_numbers(layout) < left))


@gluon.jit(do_not_specialize=["rows"])
def down_kernel(
    inner_ptr,
    desc,
    scales,
    bias,
    weights_ptr,
    routes,
    out_ptr,
    rows,
    size,
    depth,
    CHOSEN: gl.constexpr,
    BLOCK_J: gl.constexpr,
    ONE: gl.constexpr,
    STEPS: gl.constexpr,
):
    """Grid (tiles of rows, tiles of columns, slots): 64 columns of an expert's outputs. See experts_down."""
    ring, first, steps = _ring(desc, ONE), gl.program_id(1) * HEIGHT, gl.cdiv(depth, 256)
    gdc_wait()
    expert, left, row = _rows_of(routes, ONE)
    if left > 0:
        for step in gl.static_range(_SLOTS - 1):
            _copy_words(ring, step, expert * size, first, size, step < steps, "down")
        added = _load_bias(bias, expert, first, size, "down")
        place = _places_of(routes, expert, row, CHOSEN, BLOCK_J)
        pair, part = row * CHOSEN + place, place * rows + row
        number = gl.arange(0, ROWS, row.type.layout)
        weights = gl.load(weights_ptr + pair, mask=number < left, other=0.0)
        kept = _kept_scales(scales, expert * size, first, size, depth, "down", STEPS)
        x = Rows(inner_ptr, depth)
        sums = _sums(ring, x, pair, kept, expert * size, first, size, depth, "down", ONE)
        gdc_launch_dependents()
        for j in gl.static_range(2):
            upper, lower = _by_rows(sums[j])
            _store_down(upper, added[2 * j], weights, part, left, out_ptr, first, size, j, 0, bias is not None)
            _store_down(lower, added[2 * j + 1], weights, part, left, out_ptr, first, size, j, 1, bias is not None)


@gluon.jit
def _store_down(
    sums,
    added,
    weights,
    part,
    left,
    out_ptr,
    first,
    size,
    j: gl.constexpr,
    second: gl.constexpr,
    BIASED: gl.constexpr,
):
    """Store columns of a tile's first or second rows, times the weights [8] of the rows of x. added: a bias. part [8]:
    the rows of the output."""
    layout: gl.constexpr = sums.type.layout
    column = _rows_of_sums(j, second, first, size, layout, "down")
    value = _with_bias(sums, added, BIASED) * _of_numbers(weights, layout).to(gl.float32)
    value = rounded(value, weights.dtype)
    there = (column < size) & (_numbers(layout) < left)
    gl.store(out_ptr + _of_numbers(part, layout).to(gl.int64) * size + column, value, mask=there)


def takes(x: Tensor, weight: Mxfp4Weight) -> bool:
    """Whether these kernels multiply rows x [n, K], contiguous each, by such a weight."""
    blocks, scales = weight.tensors
    places = x.data_ptr(), x.stride(0) * x.itemsize, blocks.data_ptr(), blocks.stride(1)
    return (
        x.dtype == torch.bfloat16
        and compute_capability(x.device) == (9, 0)
        and all(place % 16 == 0 for place in places)
        and all(part.stride(0) == part.shape[1] * part.stride(1) for part in (blocks, scales))
        and scales.shape[2] <= _MOST_GROUPS
    )


def experts_swiglu(
    x: Tensor,
    weight: Mxfp4Weight,
    bias: Rows | None,
    routes: Any,
    out: Tensor,
    *,
    interleaved: bool,
    clamp: tuple[float, float] | None,
) -> None:
    """products.experts_swiglu into `out` [n, k, I], which has checked the arguments. routes: its view of them."""
    rows, chosen, size = out.shape
    limit, alpha = (0.0, 0.0) if clamp is None else clamp
    words = _tiles_of(weight, HEIGHT.value if interleaved else HEIGHT.value // 2)
    _launch(swiglu_kernel, rows, 2 * size, routes, x.shape[1])(
        Rows.of(x), words, _scales_of(weight), bias, routes, out, size, x.shape[1], limit, alpha,
        chosen, interleaved, clamp is not None,
    )  # fmt: skip


def experts_down(
    inner: Tensor,
    weight: Mxfp4Weight,
    bias: Rows | None,
    routes: Any,
    weights: Tensor,
    out: Tensor,
) -> None:
    """products.experts_down into the parts `out` [k, n, H]. weights [n, k]: of the rows' experts."""
    (chosen, rows, size), depth = out.shape, inner.shape[2]
    _launch(down_kernel, rows, size, routes, depth)(
        inner, _tiles_of(weight, HEIGHT.value), _scales_of(weight), bias, weights, routes, out, rows, size, depth,
        chosen,
    )  # fmt: skip


def _tiles_of(weight: Mxfp4Weight, height: int) -> TensorDescriptor:
    """The words of all experts in tiles of so many rows."""
    return descriptor(weight.bytes.flatten(0, 1).view(torch.int32), height, 32, WORDS)


def _scales_of(weight: Mxfp4Weight) -> Rows:
    return Rows.of(weight.scales.flatten(0, 1))  # type: ignore[return-value]


def _launch(kernel: Any, rows: int, columns: int, routes: Any, depth: int) -> Callable[..., None]:
    """Called with a kernel's arguments up to its number of chosen experts and flags. columns: rows of an expert's
    weights."""
    (slots,), chosen = routes.hit.shape, routes.experts.shape[1]
    grid = triton.cdiv(rows, ROWS.value), triton.cdiv(columns, HEIGHT.value), slots

    def start(*arguments: object) -> None:
        compiled = launch(kernel, grid)(
            *arguments, triton.next_power_of_2(chosen), rows == 1, triton.next_power_of_2(triton.cdiv(depth, 256)),
            num_warps=_WARPS.value, launch_pdl=True, **NO_FMA_FUSION,
        )  # fmt: skip
        prefer_shared_memory(compiled)

    return start
