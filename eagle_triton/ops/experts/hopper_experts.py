"""Products of the chosen experts in four bits with rows of bf16, on Hopper. products.py says what they are, and calls
them.

A program multiplies 64 rows of an expert's weights by a tile of eight rows of x, by tensor cores from registers. For
one row of x it may take 32 rows of weights, so that multiprocessors have more equal shares (`_height_of`). Where
experts have many rows of x, a tile has 16 of them (`_x_rows_of`), because converting weights takes longest. If there
are more than 16 rows in all, an expert has two programs: one for its first tile, one for all other tiles in turn.

Here are the kernels, from the choice of a program's rows of x to the output, and their launchers. The other files have
the parts of a kernel: `hopper_mainloop.py` the sums over all columns, `hopper_conversion.py` the way from four bits to
bf16, and `hopper_tiles.py` says which thread has which rows of weights.

Needs Triton 3.6. What bounds it: docs/speed-notes.md, "MXFP4".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from eagle_triton.ops.experts.hopper_mainloop import ROWS, XRows, copy_words, new_ring, steps_of, sums_of
from eagle_triton.ops.experts.hopper_tiles import WARPS, WEIGHTS, Tile, Weight, number_in_part, row_of, row_tiles
from eagle_triton.ops.linear.gluon_tiles import descriptor, rounded, swiglu
from eagle_triton.ops.views import Rows
from eagle_triton.runtime.four_bit_expert_weight import FourBitExpertWeight
from eagle_triton.runtime.gluon import TensorDescriptor, debug_barrier, gdc_launch_dependents, gdc_wait, gl, gluon
from eagle_triton.runtime.gpu import compute_capability, multiprocessors_of
from eagle_triton.runtime.mxfp4_weight import Mxfp4Weight
from eagle_triton.runtime.overlap import overlapped_on_hopper

FourBits = Mxfp4Weight | FourBitExpertWeight
Clamp = tuple[float, float] | None
HEIGHT = 64  # rows of an expert's weights, or half of them
_FEW, _PROGRAMS_OF_MANY = 16, 2  # of more than _FEW rows most experts get fewer than 8, so most tiles would be empty
# A thread's most registers by the rows of a tile of x, without and with zeros: with fewer, more programs run at once.
_REGISTERS = {1: (None, None), 8: (96, 128), 16: (128, 168)}
WORDS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
_BF16 = gl.constexpr(gl.bfloat16)


# --- The rows of x that a program multiplies


@gluon.jit
def _tiles_of(word, X_ROWS: gl.constexpr):
    """The first of a program's tiles of rows, and the one after its last. word: a bit for each of the expert's rows.
    The last program of an expert takes all tiles that are left."""
    count = gl.inline_asm_elementwise("popc.b64 $0, $1;", "=r,l", [word], gl.int32, is_pure=True, pack=1)
    tile, tiles = gl.program_id(0), (count + X_ROWS - 1) // X_ROWS
    return tile, gl.where(tile + 1 == gl.num_programs(0), tiles, gl.minimum(tile + 1, tiles))


@gluon.jit
def _x_rows(word, tile, X_ROWS: gl.constexpr):
    """The XRows of an expert's tile: X_ROWS of them, or 8 if there is one row in all."""
    COUNT: gl.constexpr = ROWS if X_ROWS == 1 else X_ROWS
    bits: gl.constexpr = gl.BlockedLayout([2, COUNT], [32, 1], [1, WARPS], [1, 0])
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
    return XRows(remaining, row)


@gluon.jit
def _places_of(routes, expert, row, TILE: gl.constexpr):
    """For each of these rows [8 or 16], the place of this expert among those that the row chose."""
    CHOSEN: gl.constexpr = TILE.chosen
    if TILE.x_rows == 1:
        found = row
        for j in gl.static_range(CHOSEN):
            found = gl.where(gl.load(routes.experts + j) == expert, j, found)
    else:
        COUNT: gl.constexpr = triton.next_power_of_2(CHOSEN)
        layout: gl.constexpr = gl.BlockedLayout([1, COUNT], [8, 4], [WARPS, 1], [1, 0])
        of_row = gl.convert_layout(row, gl.SliceLayout(1, layout))[:, None] * CHOSEN
        place = gl.arange(0, COUNT, gl.SliceLayout(0, layout))[None, :]
        chosen = gl.load(routes.experts + of_row + place, mask=place < CHOSEN, other=-1)
        found = gl.convert_layout(gl.sum(gl.where(chosen == expert, place, 0), axis=1), row.type.layout)
    return found


# --- From sums to outputs


@gluon.jit
def _by_rows(sums):
    """Sums of the first rows of weights, and of the second ones, [2, 8 rows of weights, 4, 2 rows of x]."""
    return sums.reshape((2, 8, 4, 2, 2)).permute((0, 1, 2, 4, 3)).split()


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


@gluon.jit
def _rows_of_sums(j: gl.constexpr, second: gl.constexpr, first, rows, layout: gl.constexpr, TILE: gl.constexpr):
    """Which of an expert's rows the first or second sums of tile j of the tensor cores belong to."""
    return row_of(number_in_part(_index(2, 0, layout), _index(8, 1, layout), j, second, TILE), first, rows, TILE)


@gluon.jit
def _x_of_sums(layout: gl.constexpr):
    """Which of eight rows of x sums belong to, as [1, 1, 4, 2]."""
    return _index(4, 2, layout) * 2 + _index(2, 3, layout)


@gluon.jit
def _of_x(vector, layout: gl.constexpr):
    """A vector [8] for rows of x as [1, 1, 4, 2]."""
    kind: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    found = gl.convert_layout(vector.reshape((4, 2)), kind)
    return gl.expand_dims(gl.expand_dims(found, 0), 1)


@gluon.jit
def _split_by_eight(vector):
    """A vector for the rows of a tile of x as vectors for eight of them each."""
    if vector.shape[0] == ROWS:
        found = (vector,)
    else:
        found = vector.reshape((2, ROWS)).permute((1, 0)).split()
    return found


@gluon.jit
def _load_bias(weight, expert, first, TILE: gl.constexpr):
    """The bias of each tile's first and second rows, [2, 8, 1, 1] each. Without a bias, zeros."""
    parts = _by_rows(gl.zeros((2, 8, 4, 4), gl.float32, gl.SliceLayout(0, WEIGHTS)))  # for their layout
    layout: gl.constexpr = parts[0].type.layout
    found = ()
    for i in gl.static_range(2 * row_tiles(TILE.height)):
        row = _rows_of_sums(i // 2, i % 2, first, weight.rows, layout, TILE)
        if weight.bias is None:
            found += (0.0,)  # type: ignore[assignment]
        else:
            ptrs = weight.bias.ptr + expert.to(gl.int64) * weight.bias.row + row
            found += (gl.load(ptrs, mask=row < weight.rows, other=0.0),)  # type: ignore[assignment]
    return found


@gluon.jit
def _with_bias(sums, bias, BIASED: gl.constexpr):
    """Sums, rounded before and after the bias is added."""
    value = rounded(sums, _BF16)
    return rounded(value + bias.to(gl.float32), _BF16) if BIASED else value


class _SwigluOutput(NamedTuple):
    """The output [n, k, I] of gate and up, and the limits of a clamped SwiGLU."""

    ptr: gl.tensor
    limit: gl.tensor
    alpha: gl.tensor


@gluon.jit
def _store_swiglu(
    sums, bias, remaining, pair, out, first, size, j: gl.constexpr, TILE: gl.constexpr, BIASED: gl.constexpr
):
    """Store the columns of tile j of the tensor cores, for eight rows of x. bias: of first and second rows. pair [8]:
    the output's row for a row of x and this expert."""
    gates, ups = _by_rows(sums)
    layout: gl.constexpr = gates.type.layout
    column = _rows_of_sums(j, 0, first, 2 * size, layout, TILE)
    if TILE.kind == "interleaved":
        column = column // 2
    gate, up = _with_bias(gates, bias[0], BIASED), _with_bias(ups, bias[1], BIASED)
    if TILE.clamped:
        gate = gl.where(gate > out.limit, out.limit, gate)  # keeps NaN
        up = gl.where(up > out.limit, out.limit, gl.where(up < -out.limit, -out.limit, up))
        share = rounded(1.0 / (1.0 + gl.exp(-rounded(gate * out.alpha, _BF16))), _BF16)
        value = rounded(up + 1.0, _BF16) * rounded(gate * share, _BF16)
    else:
        value = swiglu(gate, up, _BF16)
    ptrs = out.ptr + _of_x(pair, layout).to(gl.int64) * size + column
    gl.store(ptrs, value.to(_BF16), mask=(column < size) & (_x_of_sums(layout) < remaining))


class _DownOutput(NamedTuple):
    """The output [k, n, H] of down, the routers' weights [n, k], and n."""

    ptr: gl.tensor
    weights: gl.tensor
    rows: gl.tensor


@gluon.jit
def _store_down(
    sums, bias, weights, remaining, part, out, first, size,
    j: gl.constexpr, second: gl.constexpr, TILE: gl.constexpr, BIASED: gl.constexpr,
):  # fmt: skip
    """Store the columns of the first or second rows of tile j, times the weights [8] of eight rows of x. part [8]: the
    rows of the output."""
    layout: gl.constexpr = sums.type.layout
    column = _rows_of_sums(j, second, first, size, layout, TILE)
    value = _with_bias(sums, bias, BIASED) * _of_x(weights, layout).to(gl.float32)
    value = rounded(value, weights.dtype)
    exists = (column < size) & (_x_of_sums(layout) < remaining)
    gl.store(out.ptr + _of_x(part, layout).to(gl.int64) * size + column, value, mask=exists)


# --- Kernels


@gluon.jit
def swiglu_kernel(x, desc, weight, routes, out_ptr, limit, alpha, TILE: gl.constexpr, MANY: gl.constexpr):
    """Grid (tiles of rows, tiles of columns, slots): a program makes inner columns of an expert, half as many as a tile
    has rows of weights. MANY: a program may take several tiles of rows (_tiles_of). See experts_swiglu."""
    _multiply(x, desc, weight, routes, _SwigluOutput(out_ptr, limit, alpha), TILE, MANY)


@gluon.jit(do_not_specialize=["rows"])
def down_kernel(inner_ptr, desc, weight, weights_ptr, routes, out_ptr, rows, TILE: gl.constexpr, MANY: gl.constexpr):
    """Grid (tiles of rows, tiles of columns, slots): a program makes columns of an expert's outputs. MANY: see
    swiglu_kernel. See experts_down."""
    x, out = Rows(inner_ptr, weight.depth), _DownOutput(out_ptr, weights_ptr, rows)
    _multiply(x, desc, weight, routes, out, TILE, MANY)


@gluon.jit
def _multiply(x, desc, weight, routes, out, TILE: gl.constexpr, MANY: gl.constexpr):
    """All tiles of a program of either kernel. out: its _SwigluOutput or _DownOutput."""
    X_ROWS: gl.constexpr = TILE.x_rows
    ring, slot = new_ring(desc, TILE), gl.program_id(2)
    gdc_wait()
    expert, word = gl.load(routes.hit + slot), gl.load(routes.rows + slot)
    if MANY:
        begin, end = _tiles_of(word, X_ROWS)
        for tile in range(begin, end):
            debug_barrier()  # all have read the last slots, which are filled again
            steps_before, x_rows = (tile - begin) * steps_of(weight.depth, X_ROWS), _x_rows(word, tile, X_ROWS)
            _multiply_tile(x, weight, routes, out, ring, steps_before, expert, x_rows, TILE)
    else:
        x_rows = _x_rows(word, gl.program_id(0), X_ROWS)
        if x_rows.remaining > 0:
            _multiply_tile(x, weight, routes, out, ring, 0, expert, x_rows, TILE)


@gluon.jit
def _multiply_tile(x, weight, routes, out, ring, steps_before, expert, x_rows, TILE: gl.constexpr):
    """One tile of rows of x. steps_before: see sums_of."""
    remaining, row = x_rows
    if TILE.kind == "down":
        first, size = gl.program_id(1) * TILE.height, weight.rows
    else:
        first, size = gl.program_id(1) * (TILE.height // 2), weight.rows // 2
    copy_words(ring, steps_before, 0, weight, expert, first, True, TILE)
    bias = _load_bias(weight, expert, first, TILE)
    BIASED: gl.constexpr = weight.bias is not None
    place = _places_of(routes, expert, row, TILE)
    pair = row * TILE.chosen + place
    if TILE.kind == "down":
        part = place * out.rows + row
        exists = gl.arange(0, pair.shape[0], pair.type.layout) < remaining
        weights = gl.load(out.weights + pair, mask=exists, other=0.0)
        sums = sums_of(ring, steps_before, x, XRows(remaining, pair), weight, expert, first, TILE)
        gdc_launch_dependents()
        parts, weights = _split_by_eight(part), _split_by_eight(weights)
        for i in gl.static_range(2 * row_tiles(TILE.height)):
            for k in gl.static_range(len(parts)):
                _store_down(
                    _by_rows(sums[i // 2 * len(parts) + k])[i % 2], bias[i], weights[k], remaining - k * ROWS,
                    parts[k], out, first, size, i // 2, i % 2, TILE, BIASED,
                )  # fmt: skip
    else:
        sums = sums_of(ring, steps_before, x, x_rows, weight, expert, first, TILE)
        gdc_launch_dependents()
        pairs = _split_by_eight(pair)
        for j in gl.static_range(row_tiles(TILE.height)):
            for k in gl.static_range(len(pairs)):
                _store_swiglu(
                    sums[j * len(pairs) + k], (bias[2 * j], bias[2 * j + 1]), remaining - k * ROWS,
                    pairs[k], out, first, size, j, TILE, BIASED,
                )  # fmt: skip


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
    x: Tensor, weight: FourBits, bias: Rows | None, routes: Any, out: Tensor, *, interleaved: bool, clamp: Clamp
) -> None:
    """products.experts_swiglu, which has checked the arguments, into `out` [n, k, I]. routes: its _RoutesParts."""
    rows, chosen, _ = out.shape
    tile = _tile_of("interleaved" if interleaved else "halves", rows, chosen, weight, clamp is not None)
    limit, alpha = (0.0, 0.0) if clamp is None else clamp
    _launch(swiglu_kernel, tile, rows, routes, Rows.of(x), *_operands_of(weight, bias, tile), routes, out, limit, alpha)


def experts_down(inner: Tensor, weight: FourBits, bias: Rows | None, routes: Any, weights: Tensor, out: Tensor) -> None:
    """products.experts_down into the parts `out` [k, n, H]. weights [n, k]: of the rows' experts."""
    chosen, rows, _ = out.shape
    tile = _tile_of("down", rows, chosen, weight)
    _launch(down_kernel, tile, rows, routes, inner, *_operands_of(weight, bias, tile), weights, routes, out, rows)


def _tile_of(kind: str, rows: int, chosen: int, weight: FourBits, clamped: bool = False) -> Tile:
    height, x_rows = _height_of(rows, chosen, weight), _x_rows_of(rows, chosen, weight.shape[0])
    return Tile(kind, height, x_rows, weight.group, chosen, clamped)


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


def _operands_of(weight: FourBits, bias: Rows | None, tile: Tile) -> tuple[TensorDescriptor, Weight]:
    """The words in boxes of neighbouring rows, and the rest of the weight."""
    box = tile.height // 2 if tile.kind == "halves" else tile.height
    words = descriptor(weight.bytes.flatten(0, 1).view(torch.int32), box, 32, WORDS)
    _, scales, *zeros = weight.tensors
    _, rows, depth = weight.shape
    return words, Weight(scales, zeros[0] if zeros else None, bias, rows, depth)


def _launch(kernel: Any, tile: Tile, rows: int, routes: Any, x: Any, words: Any, weight: Weight, *others: Any) -> None:
    """Launch a kernel with these arguments, then the constants that both kernels share."""
    many, (slots,) = rows > _FEW, routes.hit.shape
    programs = _PROGRAMS_OF_MANY if many else triton.cdiv(rows, tile.x_rows)
    registers = _REGISTERS[tile.x_rows][weight.zeros is not None]
    overlapped_on_hopper(kernel, (programs, triton.cdiv(weight.rows, tile.height), slots))(
        x, words, weight, *others, tile, many, num_warps=WARPS.value, maxnreg=registers
    )
