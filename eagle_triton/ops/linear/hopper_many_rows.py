"""Products of 129 to 512 rows on Hopper, by persistent programs that make one output tile after another.

    linear_kernel:  out = x @ weight.T (+ bias), three weights side by side

One warp of a program only loads, through TMA into a ring in shared memory, and two warpgroups only multiply. So the
next tile's operands load while one tile is stored. The programs of a group, one for each 128 rows, make the same
columns at the same time, so the weights come from memory once. A program starts early, as in hopper.py. Needs Triton
3.6.

x and weights are bf16 or fp16, with rows aligned to 16 bytes; N is a multiple of 128. Numerics: as in hopper.py without
splits of K, to the bit. Groups take whole columns of tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
from torch import Tensor

from eagle_triton.ops.linear.gluon_tiles import await_full, await_read, barriers, descriptor, room_for
from eagle_triton.ops.linear.settings import MAX_WIDE, MULTIPROCESSORS, WIDE_TILE, Wide
from eagle_triton.runtime.gluon import (
    async_load,
    async_store,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from eagle_triton.runtime.gpu import multiprocessors_of
from eagle_triton.runtime.overlap import overlapped_on_hopper

STACK = Wide(6, 1)  # times: docs/speed-notes.md, "Large batches"
_TILE = gl.constexpr(WIDE_TILE)  # rows and columns of a tile of the output
_DEPTH = gl.constexpr(64)  # columns of x and of the weights in a step
_WARPS = 8
_REGISTERS = 168  # of a thread, before the loading warp gives its own away
_LOADER = gl.constexpr(24)  # registers of a thread of the loading warp
_MIN_DEPTH = 2048
_MIN_BUSY = 0.7  # the share of two rounds of columns that must be full


class _Ring(NamedTuple):
    """Slots for a tile of x and one of weights, each with two barriers: both are loaded, and both have been read."""

    x: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    read: gl.shared_memory_descriptor


@gluon.jit
def _ring(desc, STAGES: gl.constexpr):
    """Room for the tiles of STAGES steps, with initialised barriers."""
    x_tiles, w_tiles = room_for(desc, _TILE, STAGES), room_for(desc, _TILE, STAGES)
    full, read = barriers(STAGES), barriers(STAGES)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=2)  # x and the weights arrive separately
        mbarrier.init(read.index(slot), count=1)
    fence_async_shared()
    return _Ring(x_tiles, w_tiles, full, read)


@gluon.jit
def _load_weights(descs, starts, column, k, ring, slot, wanted):
    """Let TMA load a step's weights, if wanted, from the matrix that has this column of tiles. The matrices' columns
    begin at `starts`."""
    full = ring.full.index(slot)
    mbarrier.expect(full, descs[0].block_type.nbytes, pred=wanted)
    for i in gl.static_range(len(descs)):
        mine = wanted & (column >= starts[i]) & (column < starts[i + 1])
        async_load(descs[i], [(column - starts[i]) * _TILE, k], full, ring.w.index(slot), pred=mine)


@gluon.jit
def _load(x_desc, w_descs, starts, row, begin, end, steps, ring, PREFETCH: gl.constexpr):
    """Load a program's operands as far ahead as the ring goes, with the weights of PREFETCH steps before x is ready."""
    ahead = gl.minimum(steps, PREFETCH)
    for step in range(ahead):
        _load_weights(w_descs, starts, begin, step * _DEPTH, ring, step, True)
    gdc_wait()
    step = 0
    for column in range(begin, end):
        for k in range(steps):
            slot = step % ring.full.shape[0]
            await_read(ring.read, step)
            _load_weights(w_descs, starts, column, k * _DEPTH, ring, slot, step >= ahead)
            mbarrier.expect(ring.full.index(slot), x_desc.block_type.nbytes)
            async_load(x_desc, [row, k * _DEPTH], ring.full.index(slot), ring.x.index(slot))
            step += 1


@gluon.jit
def _multiply(ring, step, count):
    """The sum over `count` steps. step: how many steps the program made before."""
    STAGES: gl.constexpr = ring.full.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, _TILE, 16])
    acc = gl.zeros((_TILE, _TILE), gl.float32, layout)
    for i in range(step, step + count):
        slot = i % STAGES
        await_full(ring.full, i)
        acc = warpgroup_mma(ring.x.index(slot), ring.w.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])  # the previous step is complete
        mbarrier.arrive(ring.read.index((i + STAGES - 1) % STAGES), pred=i > step)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(ring.read.index((step + count - 1) % STAGES))
    return acc


@gluon.jit
def _store(value, out_desc, row, column, staging):
    """Let TMA store a tile, once the previous one has left `staging`. Rows past the last one are not stored."""
    store_wait(0)
    staging.store(value)
    fence_async_shared()
    async_store(out_desc, [row, column * _TILE], staging)


@gluon.jit
def _multiply_columns(out_desc, biases, starts, row, begin, end, steps, ring, staging):
    """Make and store the columns begin .. end - 1 of a tile of rows."""
    for column in range(begin, end):
        acc = _multiply(ring, (column - begin) * steps, steps)
        if column == end - 1:
            gdc_launch_dependents()  # after the wait: attention relies on that (runtime/overlap.py)
        if biases is not None:
            bias_ptr = biases[0] + column * _TILE
            for j in gl.static_range(1, len(biases)):
                if column >= starts[j]:
                    bias_ptr = biases[j] + (column - starts[j]) * _TILE
            offs = gl.arange(0, _TILE, gl.SliceLayout(0, acc.type.layout))
            acc += gl.load(bias_ptr + offs).to(gl.float32)[None, :]
        _store(acc.to(out_desc.dtype), out_desc, row, column, staging)
    store_wait(0)


@gluon.jit(do_not_specialize=["rows", "tiles0", "tiles1", "tiles2", "steps", "groups", "row_tiles"])
def linear_kernel(
    x_desc,
    w0_desc,
    w1_desc,
    w2_desc,
    biases,
    out_desc,
    rows,
    tiles0,
    tiles1,
    tiles2,
    steps,
    groups,
    row_tiles,
    STAGES: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """Grid (groups * row tiles,): a program makes some columns of one tile of rows. Products are side by side in `out`.

    tiles0 .. tiles2: columns of tiles of each weight. steps: tiles of K. The last tile of rows overlaps the previous
    one. Both store the same numbers there, because they add them up in the same order.
    """
    group = gl.program_id(0) // row_tiles
    row = gl.minimum((gl.program_id(0) - group * row_tiles) * _TILE, rows - _TILE)
    starts = (tiles0 * 0, tiles0, tiles0 + tiles1, tiles0 + tiles1 + tiles2)
    each, more = starts[3] // groups, starts[3] % groups
    begin = group * each + gl.minimum(group, more)
    end = begin + each + gl.where(group < more, 1, 0)
    ring = _ring(x_desc, STAGES)
    staging = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_type.shape, out_desc.layout)
    # fmt: off
    gl.warp_specialize([
        (_multiply_columns, (out_desc, biases, starts, row, begin, end, steps, ring, staging)),
        (_load, (x_desc, (w0_desc, w1_desc, w2_desc), starts, row, begin, end, steps, ring, PREFETCH)),
    ], [1], [_LOADER])
    # fmt: on


def settings_for(rows: int, cols: tuple[int, ...], depth: int, multiprocessors: int = MULTIPROCESSORS) -> Wide | None:
    """Settings for three products of `rows` rows with weights [n, depth] for n in `cols`; None: not with this kernel.

    Measured at the shapes of models with 1, 3, 8 and 32 billion parameters, the kernel is faster if a group has at most
    one column (unless columns and rows are few), or about two.
    """
    if not WIDE_TILE < rows <= MAX_WIDE or depth < _MIN_DEPTH or len(cols) != 3 or any(n % WIDE_TILE for n in cols):
        return None
    row_tiles = triton.cdiv(rows, WIDE_TILE)
    groups, columns = multiprocessors // row_tiles, sum(cols) // WIDE_TILE
    most = triton.cdiv(columns, groups)
    pays = row_tiles > 2 or 2 * columns > groups if most == 1 else most == 2 and columns >= _MIN_BUSY * 2 * groups
    return STACK if pays else None


def linear_hopper_many_rows(
    x: Tensor,
    weights: Sequence[Tensor],
    cols: Sequence[int],
    biases: Sequence[Tensor | None],
    out: Tensor,
    settings: Wide,
) -> None:
    """x @ weight.T + bias for three weights, side by side in `out`; see linear_kernel. dispatch.py has checked the
    arguments: x [rows, K]; weights [cols[i], K]; biases [Ni] or None each; out [rows, sum of cols]."""
    columns = [n // WIDE_TILE for n in cols]
    row_tiles = triton.cdiv(len(x), WIDE_TILE)
    groups = min(multiprocessors_of(x.device) // row_tiles, sum(columns))
    overlapped_on_hopper(linear_kernel, (groups * row_tiles,))(
        *(descriptor(matrix, WIDE_TILE, _DEPTH.value) for matrix in (x, *weights)),
        None if biases[0] is None else tuple(biases),
        descriptor(out, WIDE_TILE, WIDE_TILE),
        len(x),
        *columns,
        triton.cdiv(x.shape[1], _DEPTH.value),
        groups,
        row_tiles,
        settings.stages,
        settings.prefetch,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
    )
