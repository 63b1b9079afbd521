"""Products with weights of four bits on Hopper, converted to 16 bits on their way to the tensor cores.

    linear_kernel:  out = x @ weight.T (+ bias), up to four weights side by side; the product, or its split sums
    swiglu_kernel:  out = act(x @ gate.T) * (x @ up.T)

The weights are the left operand, in registers. A word has eight neighbouring numbers of a row. A thread turns it into
four registers by masks alone, if columns c and c + 4 are a pair. So x comes with its columns in the order of words
(runtime/row_formats.py), in which the kernels that make x write it. Marlin's words have the numbers that a thread of
the tensor cores needs, and x comes with its columns in order: see take_words.

One warp loads words and x through TMA, as far ahead as a ring of slots goes. It loads words before x is ready. Two
groups of warps multiply, each 64 rows of the weights. While the tensor cores multiply 64 columns, the next are
converted (hopper_four_bit_conversion.py). hopper_four_bit_tiles.py has what a group of warps takes from shared memory.
Needs Triton 3.6. What bounds it: docs/speed-notes.md, "Four bits".

| name         | shape                        | dtype, layout                                |
|--------------|------------------------------|----------------------------------------------|
| x            | [rows, K]                    | bf16 or fp16, in the order of words; with    |
|              |                              | Marlin's in order, rows 16-byte aligned      |
| words        | [N, K / 8], or Marlin's      | int32, rows 16-byte aligned                  |
|              | [K / 16, 2 N]                |                                              |
| scales       | [N, K / group]               | as x; with a table fp32, or nested in uint8  |
| zeros        | [N / 8, K / group]           | int32, eight rows' in a word; none with a    |
|              |                              | table; without them all are 8                |
| bias         | [N]                          | as x                                         |
| out          | [rows, N], [splits, rows, N] | as x; fp32 if the splits' sums stay apart    |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from eagle_triton.ops.layers.values import in_word_order
from eagle_triton.ops.linear.gluon_tiles import (
    await_full,
    barriers,
    descriptor,
    give_back,
    load_weights,
    room_for,
    room_for_weights,
    steps_of,
    store,
    swiglu,
    tile_of,
    zeros,
)
from eagle_triton.ops.linear.hopper_four_bit_conversion import converted, own_number
from eagle_triton.ops.linear.hopper_four_bit_tiles import (
    HEIGHT,
    IN_ROWS,
    NESTED_BLOCK,
    UNIT,
    FourBitColumns,
    halves,
    in_order,
    load_scales,
    scales,
    take_words,
)
from eagle_triton.ops.linear.settings import MULTIPROCESSORS, Streaming, tiles_of
from eagle_triton.ops.views import Rows
from eagle_triton.runtime.four_bit_weight import FourBitWeight, Packing
from eagle_triton.runtime.gluon import (
    TensorDescriptor,
    async_load,
    debug_barrier,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from eagle_triton.runtime.gpu import compute_capability
from eagle_triton.runtime.overlap import overlapped_on_hopper
from eagle_triton.runtime.row_formats import MAX_ORDERED_ROWS, WordOrdered

FEW_ROWS = 64  # up to this many, a row's bits do not depend on the other rows
BLOCK_N = 2 * HEIGHT.value  # rows of weights of a program: two groups of warps multiply 64 each
_SHARED_MEMORY = 225 * 1024  # of a multiprocessor
_MAX_SCALES = 150 * 1024  # bytes of scales that a program keeps: with more there is no room for two steps
_MAX_SCALES_OF_MANY = 64 * 1024  # the same for more than FEW_ROWS rows
_ROWS_OF_A_LOAD = 32  # a taller tile of x comes in loads of this height: those past the last row load other rows
_STARTING_REGISTERS = 168  # of a thread: one program to a multiprocessor, which is faster than two
_LOADER = gl.constexpr(24)  # registers of a thread of the loading warp
_MULTIPLIER = gl.constexpr(232)  # and of those that multiply, once that warp has given its own away
MARLIN_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
_in_word_order = gluon.jit(in_word_order.fn)


class _Ring(NamedTuple):
    """Slots for a step: the words of one or two weights, and x in tiles of 64 columns. Each slot has two barriers: it
    is full, and it has been read."""

    words: tuple[gl.shared_memory_descriptor, ...]
    x: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    read: gl.shared_memory_descriptor


@gluon.jit
def _ring(x_desc, descs, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):
    """Room for STAGES steps, with barriers that are ready."""
    SHAPE: gl.constexpr = descs[0].block_type.shape
    UNITS: gl.constexpr = SHAPE[1] // (4 if len(SHAPE) == 3 else 8)
    words, x = room_for_weights(descs, SHAPE[0], STAGES), room_for(x_desc, BLOCK_M, UNITS * STAGES)
    ring = _Ring(words, x, barriers(STAGES), barriers(STAGES))
    for slot in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(slot), count=2)  # words and x arrive separately
        mbarrier.init(ring.read.index(slot), count=2)
    fence_async_shared()
    return ring


@gluon.jit
def _load_rows(desc, row, rows, step, first, ring):
    """Let TMA load x of a step, from `row` on, after its words.

    TMA is slower for rows outside of the tensor, so the first rows are loaded again instead of them.
    """
    STAGES: gl.constexpr = ring.full.shape[0]
    ROWS: gl.constexpr = desc.block_type.shape[0]
    LOADS: gl.constexpr = ring.x.shape[1] // ROWS
    UNITS: gl.constexpr = ring.x.shape[0] // STAGES
    parts = reinterpret(ring.x, desc.dtype, [UNITS * STAGES * LOADS, ROWS, UNIT], desc.layout)
    slot = step % STAGES
    mbarrier.expect(ring.full.index(slot), UNITS * LOADS * desc.block_type.nbytes)
    for i in gl.static_range(UNITS * LOADS):
        of_part = row + i % LOADS * ROWS
        of_part = gl.where(of_part < rows, of_part, 0)
        where = [of_part, ((first + step) * UNITS + i // LOADS) * UNIT]
        async_load(desc, where, ring.full.index(slot), parts.index(slot * UNITS * LOADS + i))


@gluon.jit
def _load(x_desc, w_descs, row, rows, col, first, count, ring, PREFETCH: gl.constexpr):
    """Load the operands of `count` steps from step `first`, with the words of PREFETCH steps before x is ready."""
    for step in range(gl.minimum(count, PREFETCH)):
        load_weights(w_descs, col, step, first, ring.words, ring.full, ring.read)
    gdc_wait()
    for step in range(count):
        _load_rows(x_desc, row, rows, step, first, ring)
        if step + PREFETCH < count:
            load_weights(w_descs, col, step + PREFETCH, first, ring.words, ring.full, ring.read)


@gluon.jit
def _multiply(ring, kept, weights, col, first, count, depth, GROUP: gl.constexpr, HALF: gl.constexpr):
    """The sums [64, BLOCK_M] of a half of the tile's rows, over `count` steps from step `first`: those of one weight,
    or of two in turn. kept: room for the scales of each.

    A product runs while the next product's words are converted. If it ran on into the next step, the compiler would
    make each product wait, because two groups of warps multiply.
    """
    BLOCK_M: gl.constexpr = ring.x.shape[1]
    STAGES: gl.constexpr = ring.full.shape[0]
    UNITS: gl.constexpr = ring.x.shape[0] // STAGES
    MARLIN: gl.constexpr = len(ring.words[0].shape) == 4
    COUNT: gl.constexpr = len(weights)
    kind: gl.constexpr = ring.x.dtype
    acc = zeros(BLOCK_M, HEIGHT, True)
    mma: gl.constexpr = acc.type.layout
    sums, loaded, tables = (), (), ()
    for j in gl.static_range(COUNT):
        sums += (acc,)  # type: ignore[assignment]
        start = first * UNITS * UNIT
        loaded += (load_scales(weights[j], col, start, depth, GROUP, kept[j].shape[0], MARLIN),)  # type: ignore[assignment]
    for j in gl.static_range(COUNT):
        kept[j].store(loaded[j])
        tables += (own_number(weights[j], HEIGHT, kept[j].dtype, mma),)  # type: ignore[assignment]
    debug_barrier()
    w0 = gl.zeros((HEIGHT, UNIT), kind, gl.DotOperandLayout(0, mma, 2))
    w1 = w0
    for step in range(count):
        slot = step % STAGES
        await_full(ring.full, step)
        words = ()
        for j in gl.static_range(COUNT):
            words += (take_words(ring.words[j], 2 * slot + HALF, mma),)  # type: ignore[assignment]
        for i in gl.static_range(UNITS // 2):
            x0 = ring.x.index(slot * UNITS + 2 * i).permute((1, 0))
            x1 = ring.x.index(slot * UNITS + 2 * i + 1).permute((1, 0))
            column = ((first + step) * UNITS + 2 * i) * UNIT
            for j in gl.static_range(COUNT):
                left, right = halves(words[j][i], 8, mma)
                scale0, scale1 = scales(kept[j], first * UNITS * UNIT, column, GROUP, mma)
                w0 = converted(left, scale0, tables[j], kind, MARLIN, mma)
                sums = _with(sums, j, warpgroup_mma(w0, x0, sums[j], is_async=True))
                sums, w0, w1 = _wait(1, sums, w0, w1)
                w1 = converted(right, scale1, tables[j], kind, MARLIN, mma)
                sums = _with(sums, j, warpgroup_mma(w1, x1, sums[j], is_async=True))
                if i + 1 < UNITS // 2 or j + 1 < COUNT:
                    sums, w0, w1 = _wait(1, sums, w0, w1)
        sums, w0, w1 = _wait(0, sums, w0, w1)
        give_back(ring.read, step)
    return sums


@gluon.jit
def _with(sums, place: gl.constexpr, new):
    """One or two sums with `new` in place of one of them."""
    if len(sums) == 1:
        found = (new,)
    elif place == 0:
        found = (new, sums[1])  # type: ignore[assignment]
    else:
        found = (sums[0], new)  # type: ignore[assignment]
    return found


@gluon.jit
def _wait(pending: gl.constexpr, sums, w0, w1):
    """Wait until at most `pending` products run."""
    if len(sums) == 1:
        first, w0, w1 = warpgroup_mma_wait(pending, deps=[sums[0], w0, w1])
        found = (first,)
    else:
        first, second, w0, w1 = warpgroup_mma_wait(pending, deps=[sums[0], sums[1], w0, w1])
        found = (first, second)  # type: ignore[assignment]
    return found, w0, w1


@gluon.jit
def _half_of_linear(
    ring,
    kept,
    tile,
    out,
    bias_cols,
    col,
    rows,
    first,
    count,
    depth,
    GROUP: gl.constexpr,
    BIASED: gl.constexpr,
    HALF: gl.constexpr,
):
    """A group of warps of linear_kernel: multiplies a half of the tile's rows, and stores."""
    col += HALF * HEIGHT
    (total,) = _multiply(ring, (kept.index(HALF),), (tile.weight,), col, first, count, depth, GROUP, HALF)
    if HALF == 0:
        gdc_launch_dependents()  # after the wait: attention relies on that (runtime/overlap.py)
    bias_ptr = tile.bias if BIASED else None
    total = in_order(total, len(ring.words[0].shape) == 4)
    store(total, out, bias_ptr, col, rows, bias_cols, tile.weight.cols, ring.x.shape[1], HEIGHT, True)


@gluon.jit
def _first_row(rows, BLOCK_M: gl.constexpr):
    """The first row of this program's tile. The last tile overlaps the one before it: both store the same."""
    row = gl.program_id(0) * BLOCK_M
    if rows > BLOCK_M:
        row = gl.minimum(row, rows - BLOCK_M)
    return row


@gluon.constexpr_function
def _kept_dtype(scale, zero, kind):
    """The dtype of what _load_scales returns for scales and zeros of these dtypes."""
    if zero == gl.int32:
        return gl.int32
    return kind if scale == kind else gl.float32


@gluon.jit(do_not_specialize=["rows"])
def linear_kernel(
    x_desc,
    w0_desc,
    w1_desc,
    w2_desc,
    w3_desc,
    columns,
    biases,
    out,
    rows,
    depth,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """Grid (row tiles, column tiles of all weights, splits): a program makes one split of one tile of one product.

    As hopper.linear_kernel. Every split must have a step.
    """
    row, split = _first_row(rows, BLOCK_M), gl.program_id(2)
    descs = (w0_desc, w1_desc, w2_desc, w3_desc)
    of_tiles = biases if biases is not None else (0, 0, 0, 0)
    tile = tile_of(gl.program_id(1), columns, descs, of_tiles, out.ptr, 2 * HEIGHT)
    col = tile.number * 2 * HEIGHT
    first, count = steps_of(split, depth, BLOCK_K, SPLITS)
    ring = _ring(x_desc, (tile.desc,), BLOCK_M, STAGES)
    KEPT: gl.constexpr = _kept_dtype(columns[0].scale.dtype.element_ty, columns[0].zero.dtype.element_ty, x_desc.dtype)
    kept = gl.allocate_shared_memory(KEPT, [2, GROUPS, HEIGHT], IN_ROWS)
    out_rows = Rows(tile.out_ptr + (split.to(gl.int64) * rows + row) * out.row, out.row)
    BIASED: gl.constexpr = biases is not None
    bias_cols = gl.where(split == 0, tile.weight.cols, 0)
    # fmt: off
    gl.warp_specialize([
        (_half_of_linear, (ring, kept, tile, out_rows, bias_cols, col, rows - row, first, count, depth, GROUP, BIASED,
                           0)),
        (_half_of_linear, (ring, kept, tile, out_rows, bias_cols, col, rows - row, first, count, depth, GROUP, BIASED,
                           1)),
        (_load, (x_desc, (tile.desc,), row, rows, col, first, count, ring, PREFETCH)),
    ], [4, 1], [_MULTIPLIER, _LOADER])
    # fmt: on


@gluon.jit
def _half_of_swiglu(
    ring,
    kept,
    gate,
    up,
    out,
    col,
    rows,
    count,
    depth,
    GROUP: gl.constexpr,
    GELU_TANH: gl.constexpr,
    IN_WORD_ORDER: gl.constexpr,
    HALF: gl.constexpr,
):
    """The same for swiglu_kernel."""
    col += HALF * HEIGHT
    both = (kept.index(2 * HALF), kept.index(2 * HALF + 1))
    gates, ups = _multiply(ring, both, (gate, up), col, 0, count, depth, GROUP, HALF)
    MARLIN: gl.constexpr = len(ring.words[0].shape) == 4
    product = swiglu(in_order(gates, MARLIN), in_order(ups, MARLIN), ring.x.dtype, GELU_TANH).permute((1, 0))
    if IN_WORD_ORDER:
        product = _in_word_order(product)
    store(product, out, None, col, rows, gate.cols, gate.cols, ring.x.shape[1], HEIGHT, False)


@gluon.jit(do_not_specialize=["rows"])
def swiglu_kernel(
    x_desc,
    gate_desc,
    up_desc,
    gate,
    up,
    out,
    rows,
    depth,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    PREFETCH: gl.constexpr,
    GELU_TANH: gl.constexpr,
    IN_WORD_ORDER: gl.constexpr,
):
    """Grid (row tiles, column tiles): a program makes one tile of both products and multiplies them. IN_WORD_ORDER:
    store the columns of `out` in the order of words."""
    row = _first_row(rows, BLOCK_M)
    col, count = gl.program_id(1) * 2 * HEIGHT, gl.cdiv(depth, BLOCK_K)
    descs = (gate_desc, up_desc)
    ring = _ring(x_desc, descs, BLOCK_M, STAGES)
    KEPT: gl.constexpr = _kept_dtype(gate.scale.dtype.element_ty, gate.zero.dtype.element_ty, x_desc.dtype)
    kept = gl.allocate_shared_memory(KEPT, [4, GROUPS, HEIGHT], IN_ROWS)
    out_rows = Rows(out.ptr + row.to(gl.int64) * out.row, out.row)
    gdc_launch_dependents()
    # fmt: off
    gl.warp_specialize([
        (_half_of_swiglu, (ring, kept, gate, up, out_rows, col, rows - row, count, depth, GROUP, GELU_TANH,
                           IN_WORD_ORDER, 0)),
        (_half_of_swiglu, (ring, kept, gate, up, out_rows, col, rows - row, count, depth, GROUP, GELU_TANH,
                           IN_WORD_ORDER, 1)),
        (_load, (x_desc, descs, row, rows, col, 0, count, ring, PREFETCH)),
    ], [4, 1], [_MULTIPLIER, _LOADER])
    # fmt: on


def takes(x: Tensor | WordOrdered, weights: Sequence[FourBitWeight]) -> bool:
    """Whether the kernels of this file can multiply rows x [..., K] by these weights in one launch."""
    first, in_a_program, rows = weights[0], 2 if len(weights) == 2 else 1, x.shape[:-1].numel()
    scales = in_a_program * BLOCK_N * groups_of(x.shape[-1], first.group) * _item_of(first)
    return (
        compute_capability(x.device) == (9, 0)
        and 0 < rows <= MAX_ORDERED_ROWS
        and scales <= (_MAX_SCALES if rows <= FEW_ROWS else _MAX_SCALES_OF_MANY)
        and all(reads(weight, x.dtype) for weight in weights)
        and len({(weight.packing, weight.group, weight.scale.dtype, weight.zero is None) for weight in weights}) == 1
    )


def reads(weight: FourBitWeight, dtype: torch.dtype) -> bool:
    """Whether the kernels read such a weight for products of rows of this dtype."""
    marlin = weight.packing is Packing.MARLIN and weight.table is None and weight.has_whole_units
    if dtype not in (torch.bfloat16, torch.float16) or weight.packed.data_ptr() % 16:
        return False
    if not (weight.reads_word_order or marlin):
        return False
    if weight.table is None:
        return weight.scale.dtype == dtype
    known = torch.float32 if weight.nested is None else torch.uint8
    nested = weight.nested is None or (weight.nested.block == NESTED_BLOCK.value and weight.scale.is_contiguous())
    return weight.scale.dtype == known and nested


def settings_for(rows: int, cols: tuple[int, ...], depth: int, fused: bool) -> Streaming:
    """Settings for the product of up to MAX_ORDERED_ROWS rows with weights [n, depth] for n in `cols`.

    Up to FEW_ROWS rows splits of K do not depend on their number, so the bits of a row do not either.
    """
    programs, splits = tiles_of(cols, BLOCK_N, fused), 1
    if rows > FEW_ROWS:
        programs *= triton.cdiv(rows, block_m_of(rows))
    while not fused and splits < 4 and programs * splits * 2 <= MULTIPROCESSORS and depth >= 1024 * splits:
        splits *= 2
    wide = depth % (256 * splits) == 0 and rows <= FEW_ROWS  # the same splits as in steps of 128
    stages = 6 if not wide else 2 if fused or rows > 32 else 3
    return Streaming(BLOCK_N, 256 if wide else 128, splits, True, stages, stages, 4)


def fitted(settings: Streaming, rows: int, depth: int, weights: int, group: int, item: int) -> Streaming:
    """The settings with only as many stages as shared memory has room for, and with block_k 128 if there is no room for
    two stages of 256. A program multiplies by `weights` weights. item: bytes of a scale that is kept. Raises ValueError
    for settings for which the kernels have no tiles."""
    known = settings.block_n == BLOCK_N and settings.block_k in (128, 256) and depth % settings.block_k == 0
    if not known or (settings.splits - 1) * columns_of(depth, settings) >= depth:
        raise ValueError(
            f"settings for weights of four bits need block_n {BLOCK_N}, block_k 128 or 256 that divides K = {depth}, "
            f"and a step for every split, got {settings}"
        )
    block_m = block_m_of(rows)
    slot = (BLOCK_N * weights + 4 * block_m) * settings.block_k // 2
    of_scales = BLOCK_N * weights * groups_of(columns_of(depth, settings), group) * item
    to_store = 4 * BLOCK_N * block_m if rows > FEW_ROWS else 4 * HEIGHT.value * block_m
    stages = min(settings.w_stages, (_SHARED_MEMORY - of_scales - to_store) // slot)
    if stages < 2 and settings.block_k > 128:
        return fitted(settings._replace(block_k=128), rows, depth, weights, group, item)
    return settings._replace(w_stages=stages, x_stages=stages)


def columns_of(depth: int, settings: Streaming) -> int:
    """The most columns that a program multiplies."""
    return triton.cdiv(triton.cdiv(depth, settings.block_k), settings.splits) * settings.block_k


def _item_of(weight: FourBitWeight) -> int:
    """Bytes of one of its scales as they are kept."""
    return 2 if weight.table is None and weight.zero is None else 4


def linear_hopper_four_bits(
    x: Tensor,
    weights: Sequence[FourBitWeight],
    cols: Sequence[int],
    biases: Sequence[Tensor | None],
    out: Tensor,
    settings: Streaming,
) -> None:
    """x @ weight.T + bias, as few_rows.linear_few_rows; see linear_kernel. x: [rows, K] as the weights read it.
    four_bits.py has checked the arguments."""
    rows, depth = x.shape
    settings, block_m = fitted(settings, rows, depth, 1, weights[0].group, _item_of(weights[0])), block_m_of(rows)
    grid = triton.cdiv(rows, block_m), tiles_of(cols, BLOCK_N), settings.splits
    overlapped_on_hopper(linear_kernel, grid)(
        descriptor(x, min(block_m, _ROWS_OF_A_LOAD), UNIT.value),
        *(_words(weight, settings) for weight in weights),
        *[None] * (4 - len(weights)),
        tuple(_columns(n, weight) for n, weight in zip(cols, weights, strict=True)),
        None if biases[0] is None else tuple(biases),
        Rows.of(out),
        rows,
        depth,
        block_m,
        settings.block_k,
        weights[0].group,
        settings.splits,
        settings.w_stages,
        groups_of(columns_of(depth, settings), weights[0].group),
        prefetch_stages(settings),
        num_warps=4,
        maxnreg=_STARTING_REGISTERS,
    )


def linear_swiglu_hopper_four_bits(
    x: Tensor,
    gate: FourBitWeight,
    up: FourBitWeight,
    out: Tensor | WordOrdered,
    settings: Streaming,
    activation: str = "silu",
) -> None:
    """act(x @ gate.T) * (x @ up.T) as `out` [rows, I]. x: [rows, K] as the weights read it. four_bits.py has checked
    the arguments."""
    rows, depth = x.shape
    settings, block_m = fitted(settings, rows, depth, 2, gate.group, _item_of(gate)), block_m_of(rows)
    overlapped_on_hopper(swiglu_kernel, (triton.cdiv(rows, block_m), triton.cdiv(len(gate), BLOCK_N)))(
        descriptor(x, min(block_m, _ROWS_OF_A_LOAD), UNIT.value),
        _words(gate, settings),
        _words(up, settings),
        _columns(len(gate), gate),
        _columns(len(up), up),
        Rows.of(out.values if isinstance(out, WordOrdered) else out),
        rows,
        depth,
        block_m,
        settings.block_k,
        gate.group,
        settings.w_stages,
        groups_of(columns_of(depth, settings), gate.group),
        prefetch_stages(settings),
        activation == "gelu_tanh",
        isinstance(out, WordOrdered),
        num_warps=4,
        maxnreg=_STARTING_REGISTERS,
    )


def block_m_of(rows: int) -> int:
    """Rows of x in a tile, which is the tensor cores' right operand."""
    return min(max(16, triton.next_power_of_2(rows)), 128)


def groups_of(columns: int, group: int) -> int:
    """The number of groups, a power of two, for which a program that multiplies `columns` columns keeps scales."""
    return triton.next_power_of_2(triton.cdiv(columns, group) + (columns % group > 0))


def prefetch_stages(settings: Streaming) -> int:
    """Steps for which words are in flight before x is ready."""
    return min(settings.w_stages - 1, 3)


def words_layout(settings: Streaming) -> gl.NVMMASharedLayout:
    """The layout of a tile of words. A row has 16 or 32 words."""
    return gl.NVMMASharedLayout(swizzle_byte_width=settings.block_k // 2, element_bitwidth=32, rank=2)


def _words(weight: FourBitWeight, settings: Streaming) -> TensorDescriptor:
    if weight.packing is Packing.MARLIN:
        tiles = weight.packed.view(-1, len(weight) // 64, 128).transpose(0, 1)
        return TensorDescriptor(tiles, list(tiles.shape), list(tiles.stride()), marlin_block(settings), MARLIN_LAYOUT)
    return descriptor(weight.packed, BLOCK_N, settings.block_k // 8, words_layout(settings))


def marlin_block(settings: Streaming) -> list[int]:
    """The shape of a tile of Marlin's words."""
    return [BLOCK_N // 64, settings.block_k // 16, 128]


def _columns(cols: int, weight: FourBitWeight) -> FourBitColumns:
    code, outer, offset = (weight.scale,) * 3 if weight.nested is None else weight.nested.tensors
    table = weight.scale if weight.table is None else weight.table
    zero = weight.scale if weight.zero is None else weight.zero
    row, column = weight.scale.stride()
    zero_row, zero_column = zero.stride()
    scales = weight.scale, row, column, zero, zero_row, zero_column
    return FourBitColumns(cols, *scales, table, code, outer, offset)
