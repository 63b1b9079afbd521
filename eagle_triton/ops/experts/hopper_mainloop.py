"""The main loop of products with weights in four bits on Hopper: a program's sums over all columns.

TMA brings weights into a ring of slots in shared memory, where they stay in four bits. A thread converts the words that
it loads from there and multiplies them by tensor cores, so no weights move between threads. This changes the order of
the columns, and x is stored in the same order. Sums of warps with different columns are added at the end, so a row's
sums depend on nothing but the weights' shape.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language.core as tl_core

from eagle_triton.ops.experts.hopper_conversion import conversion_of, converted_row, factors_of, load_scales, scales_of
from eagle_triton.ops.experts.hopper_tiles import UNIT, WARPS, WEIGHTS, by_row, part_layout, row_of, row_tiles
from eagle_triton.ops.linear.gluon_tiles import await_full, barriers, ready
from eagle_triton.runtime.gluon import TensorDescriptor, async_load, debug_barrier, gl, gluon, mbarrier, reinterpret

ROWS = gl.constexpr(8)  # of x that the tensor cores multiply at a time
_SLOTS = gl.constexpr(2)  # measured on an H200 for gpt-oss: with more, fewer programs share a multiprocessor


@gluon.constexpr_function
def _parts_in_slot(X_ROWS):
    """How many parts of 256 columns a slot holds. With two, the few programs of one row of x wait less often. With one,
    more programs of several rows share a multiprocessor."""
    return 2 if X_ROWS == 1 else 1


@gluon.jit
def steps_of(depth, X_ROWS: gl.constexpr):
    """How many steps the columns of a row take. A step uses one slot."""
    return gl.cdiv(depth, 256 * _parts_in_slot(X_ROWS))


class Ring(NamedTuple):
    """Slots for the weights and the x of a step."""

    desc: TensorDescriptor  # of the words in global memory
    words: gl.shared_memory_descriptor  # parts of weights, [slots * parts, height, 32 words]
    x: gl.shared_memory_descriptor  # parts of x, [slots * parts * eights, 8 rows or 1, 128 words]
    full: gl.shared_memory_descriptor  # a barrier for each slot: its weights have come


@gluon.jit
def new_ring(desc, TILE: gl.constexpr):
    EIGHTS: gl.constexpr = (TILE.x_rows + ROWS - 1) // ROWS
    PARTS: gl.constexpr = _SLOTS * _parts_in_slot(TILE.x_rows)
    x_layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, TILE.x_rows // EIGHTS, [1, 0])
    ring = Ring(
        desc,
        gl.allocate_shared_memory(gl.int32, [PARTS, TILE.height, 32], desc.layout),
        gl.allocate_shared_memory(gl.int32, [PARTS * EIGHTS, TILE.x_rows // EIGHTS, 128], x_layout),
        barriers(_SLOTS),
    )
    ready((ring.full,), _SLOTS)
    return ring


@gluon.jit
def copy_words(ring, steps_before, step, weight, expert, first, wanted, TILE: gl.constexpr):
    """If wanted, start the loads of an expert's weights for a step, which fill a slot. steps_before: see sums_of."""
    BOX: gl.constexpr = ring.desc.block_type.shape[0]
    PARTS: gl.constexpr = ring.words.shape[0] // _SLOTS
    BOXES: gl.constexpr = PARTS * (TILE.height // BOX)
    slot = (steps_before + step) % _SLOTS
    boxes = reinterpret(ring.words, gl.int32, [_SLOTS * BOXES, BOX, 32], ring.desc.layout)
    mbarrier.expect(ring.full.index(slot), BOXES * BOX * 128, pred=wanted)
    for i in gl.static_range(BOXES):
        number, part = BOX * i % TILE.height, step * PARTS + BOX * i // TILE.height
        where = [expert * weight.rows + row_of(number, first, weight.rows, TILE), part * 32]
        async_load(ring.desc, where, ring.full.index(slot), boxes.index(slot * BOXES + i), pred=wanted)


class XRows(NamedTuple):
    """The rows of x of a tile."""

    remaining: gl.tensor  # how many rows the expert has, from the first of the tile on
    row: gl.tensor  # the numbers of the tile's rows, [8 or 16]


class _XPointers(NamedTuple):
    """Where the rows of x of a program's first step lie."""

    ptr: gl.tensor  # [parts * rows, 1]
    exists: gl.tensor  # which of the rows there are, [parts * rows, 1]
    column: gl.tensor  # [parts * rows, 256]
    depth: gl.tensor  # columns of a row


@gluon.jit
def _x_pointers(x, x_rows, depth, X_ROWS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    number = gl.arange(0, _parts_in_slot(X_ROWS) * X_ROWS, of_rows)
    if X_ROWS == 1:
        row, exists = number * 0 + gl.max(x_rows.row, axis=0), number >= 0
    else:
        row, exists = gl.convert_layout(x_rows.row, of_rows), number < x_rows.remaining
    column = (number // X_ROWS)[:, None] * 256 + gl.arange(0, 256, gl.SliceLayout(0, layout))[None, :]
    return _XPointers(x.ptr + row[:, None].to(gl.int64) * x.row, exists[:, None], column, depth)


@gluon.jit
def _load_x(x, step, X_ROWS: gl.constexpr):
    """The numbers of x of a step, in the order of the pairs of a word of weights."""
    column = x.column + step * (_parts_in_slot(X_ROWS) * 256)
    numbers = gl.load(x.ptr + column, mask=x.exists & (column // UNIT < x.depth // UNIT), other=0.0)
    COUNT: gl.constexpr = numbers.shape[0]
    return numbers.reshape((COUNT, 32, 2, 4)).permute((0, 1, 3, 2)).reshape((COUNT, 256))


@gluon.jit
def _store_x(ring, step, numbers):
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, ring.x.shape[1], [1, 0])
    slots = reinterpret(ring.x, gl.bfloat16, [_SLOTS, numbers.shape[0], 256], layout)
    slots.index(step % _SLOTS).store(numbers)


@gluon.constexpr_function
def _layout_of_x(X_ROWS):
    """The layout of a part of x [X_ROWS, 128 words], where a thread has 16 words of a row."""
    lanes = [[0, 16], [0, 32], *([row % X_ROWS, 0] for row in (1, 2, 4))]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 8]], lanes, [[0, 0], [0, 64]], [], [X_ROWS, 128])


@gluon.jit
def _x_of(tile):
    """The numbers of x that each thread multiplies by its words, as their pairs 0, 1, 2 and 3."""
    X_ROWS: gl.constexpr = tile.shape[0]
    even, odd = tile.load(_layout_of_x(X_ROWS)).reshape((X_ROWS, 2, 4, 4, 2, 2)).split()
    first, third = even.split()
    second, fourth = odd.split()
    return _pair_of_x(first), _pair_of_x(second), _pair_of_x(third), _pair_of_x(fourth)


@gluon.jit
def _pair_of_x(pairs):
    """[rows, 2, 4 units, 4 words] in the shape and layout of weights."""
    found = gl.convert_layout(pairs.permute((1, 0, 2, 3)), gl.SliceLayout(1, WEIGHTS), assert_trivial=True)
    return gl.expand_dims(found, 1).broadcast_to((2, 2, ROWS, 4, 4))


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


_MULTIPLICATION = gl.constexpr(_multiplication())


@gl._core.builtin
def multiply_add(first, second, x, sums, multiplication, _semantic=None):
    """sums + (pairs of two rows of weights) * x. multiplication: the PTX, as in `converted`."""
    constraints = ",".join(["=f"] * 4 + ["r"] * 48 + ["0", "1", "2", "3"])
    values = [*first, *second, *x, sums]
    return tl_core.inline_asm_elementwise(
        multiplication.value, constraints, values, gl.float32, is_pure=True, pack=4, _semantic=_semantic
    )


@gluon.jit
def sums_of(ring, steps_before, x, x_rows, weight, expert, first, TILE: gl.constexpr):
    """The sums of a tile: a tensor [2, 8, 4, 4] for each tile of the tensor cores and each eight rows of x. The t-th of
    four threads has two rows of weights times rows 2 t and 2 t + 1 of x.

    steps_before: how many steps the program has made for earlier tiles of x. The loads of the first step's weights must
    have been started (copy_words).
    """
    INTEGERS: gl.constexpr = weight.scales.dtype.element_ty != gl.uint8
    ZEROS: gl.constexpr = weight.zeros is not None
    CONVERSION: gl.constexpr = conversion_of(INTEGERS, ZEROS)
    X_ROWS: gl.constexpr = TILE.x_rows
    PARTS: gl.constexpr = _parts_in_slot(X_ROWS)
    EIGHTS: gl.constexpr = (X_ROWS + ROWS - 1) // ROWS  # how often the tensor cores multiply a part of weights
    TILES: gl.constexpr = row_tiles(TILE.height)
    pointers, scales = _x_pointers(x, x_rows, weight.depth, X_ROWS), scales_of(weight, expert, first, TILE)
    steps = steps_of(weight.depth, X_ROWS)
    _store_x(ring, steps_before, _load_x(pointers, 0, X_ROWS))
    numbers, loaded = _load_x(pointers, 1, X_ROWS), load_scales(scales, 0, ZEROS, TILE)
    sums = ()
    for _ in gl.static_range(TILES * EIGHTS):
        sums += (gl.zeros((2, 2, 8, 4, 4), gl.float32, WEIGHTS),)  # type: ignore[assignment]
    for step in range(steps):
        await_full(ring.full, steps_before + step)
        debug_barrier()  # all have read the previous slot, which is filled again
        copy_words(ring, steps_before, step + 1, weight, expert, first, step + 1 < steps, TILE)
        _store_x(ring, steps_before + step + 1, numbers)
        numbers = _load_x(pointers, step + 2, X_ROWS)
        for part in range(step * PARTS, (step + 1) * PARTS):
            slot = (steps_before * PARTS + part) % (_SLOTS * PARTS)
            words = by_row(ring.words.index(slot).load(part_layout(TILE.kind, TILE.height, 32)), (4,), TILE)
            factors = factors_of(loaded, scales, TILE)
            loaded = load_scales(scales, part + 1, ZEROS, TILE)
            added = ()
            for i in gl.static_range(TILES):
                upper = converted_row(words, factors, 2 * i, CONVERSION)
                lower = converted_row(words, factors, 2 * i + 1, CONVERSION)
                for j in gl.static_range(EIGHTS):
                    found = _x_of(ring.x.index(slot * EIGHTS + j))
                    product = multiply_add(upper, lower, found, sums[i * EIGHTS + j], _MULTIPLICATION)
                    added += (product,)  # type: ignore[assignment]
            sums = added
    LARGER: gl.constexpr = 1.0 if INTEGERS else 4294967296.0
    whole = ()
    for i in gl.static_range(TILES * EIGHTS):
        whole += (gl.sum(sums[i], axis=0) * LARGER,)  # type: ignore[assignment]
    return whole
