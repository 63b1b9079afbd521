"""Products of 129 to 512 rows on Hopper, by programs that stay and make one tile of the output after another.

    linear_kernel:  out = x @ weight.T (+ bias), three weights side by side
    swiglu_kernel:  out = silu(x @ gate.T) * (x @ up.T)

One warp of a program does nothing but load, through TMA into a ring of shared memory, and two warpgroups nothing but
multiply: each slot of the ring has a barrier that says it is full, and one that says it has been read. So the next
tile's operands come while one is stored. A group of programs, one for each 128 rows, makes the same columns at the same
time, so that the weights come from memory once. Started early (runtime/overlap.py), a program asks for its first
weights, waits for the kernels before it, and only then asks for x, as those of streamed.py do. Needs Triton 3.6.

| name         | shape                        | dtype, layout                                           |
|--------------|------------------------------|---------------------------------------------------------|
| x            | [rows, K]                    | bf16 or fp16, rows 16-byte aligned                      |
| weights      | [N, K], N a multiple of 128  | as x                                                    |
| bias         | [N]                          | as x                                                    |
| out          | [rows, N]                    | as x                                                    |
| sums         | [programs, 128 * 256]        | fp32, what a program leaves for another                 |
| flags        | [programs]                   | int64, whether it is there; any contents before         |

linear_kernel deals out whole columns of tiles to groups, swiglu_kernel even shares of the steps of K of all columns,
one column behind the other (stream-K): where groups share a column, the one with its last step adds up the others'
sums, in a fixed order, so the bits are the same every run. They depend on the number of row tiles and of
multiprocessors; linear_kernel's do not, they are those of streamed.py without splits of K.

Nobody waits forever. A program goes through its columns from the last to the first, so that it leaves its sum before
it waits for another's, and it waits for programs of lower numbers alone, which are started no later. There are no more
programs than multiprocessors, and the next kernel cannot take the place of one that has not started, because it starts
when every program has said that it may.

A flag is raised by writing _RAISED, 64 bits that nobody else stores (in 32 and in 16 bits floating point they hold NaNs
that no operation makes), and its reader lowers it. So flags and sums are fresh memory in each launch, which torch's
allocator, or a graph's pool, gives to nobody else meanwhile: nothing is shared between streams or graphs, and nothing
has to be zeroed first, which would be a launch of its own between this kernel and the one whose end it overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eagle_triton.linear.settings import MOST_WIDE, WIDE_TILE, Wide
from eagle_triton.linear.streamed import (
    _MULTIPROCESSORS,
    TILE_LAYOUT,
    _multiprocessors,
    _rounded,
)
from eagle_triton.runtime.launch import EXACT, launch
from eagle_triton.runtime.overlap import prefer_shared_memory

# One H200, Triton 3.6, bf16, us without the small kernel before; then by cuBLAS, in a launch for each weight, with
# SwiGLU's own. q, k and v of Llama-3.1-8B: 129 rows 24.0; 51.0 (streamed.py's, of 256 rows), 256 24.2; 29.1, 480 43.4;
# 47.6, 512 43.4; 45.8. Its gate and up: 480 rows 167; 175, 512 167; 185, but 240 96; 94, 384 132; 131. Of 32B's shape:
# 256 rows 201; 216, 384 278; 295, 512 385; 426. (tools/tune_linear.py --streamed times single products so.)
STACK = Wide(6, 1)
SWIGLU = Wide(4, 4)
_TILE = gl.constexpr(WIDE_TILE)  # rows and columns of a tile of the output
_DEPTH = gl.constexpr(64)  # columns of x and of the weights in a step
_WARPS = 8
_REGISTERS = 168  # of a thread, before the warp that loads gives its own away
_LOADER = gl.constexpr(24)  # its registers
_RAISED = gl.constexpr(0x7FB5A3C97FD36E95)
_LEAST_DEPTH = 2048
_LEAST_BUSY = 0.7  # share of the groups' time in which they have columns, where these are dealt out whole
_LEAST_TILES = 400  # of the output, of gate and up together
_LEAST_FULL = 0.9  # share of the rows of all tiles that are rows of x


@gluon.jit
def _ring(desc, COLS: gl.constexpr, STAGES: gl.constexpr):
    """Room for the tiles of x and of COLS rows of weights of STAGES steps, and for each two barriers: it is full, which
    takes both, and it has been read."""
    x_tiles = gl.allocate_shared_memory(desc.dtype, [STAGES, _TILE, _DEPTH], desc.layout)
    w_tiles = gl.allocate_shared_memory(desc.dtype, [STAGES, COLS, _DEPTH], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=2)
        mbarrier.init(read.index(slot), count=1)
    fence_async_shared()
    return x_tiles, w_tiles, full, read


@gluon.jit
def _share(total, group, groups):
    """Where a group's share begins if `total` things are dealt out evenly, and where it ends."""
    each, more = total // groups, total % groups
    begin = group * each + gl.minimum(group, more)
    return begin, begin + each + gl.where(group < more, 1, 0)


@gluon.jit
def _place(rows, row_tiles):
    """A program's group, and the first row of its tile. The last tile overlaps the one before it: both store the same,
    because they add up the same numbers in the same order."""
    group = gl.program_id(0) // row_tiles
    row = (gl.program_id(0) - group * row_tiles) * _TILE
    return group, gl.minimum(row, rows - _TILE)


@gluon.jit
def _load_weights(descs, starts, column, k, ring, slot, wanted):
    """Let TMA load the weights of a step, if they are wanted: the tile of that weight among whose columns this one is,
    which are those from `starts` on, or without `starts` a tile of each weight, one behind the other."""
    w_tiles, full = ring[1], ring[2].index(slot)
    COLS: gl.constexpr = w_tiles.shape[1]
    mbarrier.expect(full, COLS * _DEPTH * 2, pred=wanted)
    parts = w_tiles._reinterpret(w_tiles.dtype, [ring[2].shape[0] * COLS // _TILE, _TILE, _DEPTH], w_tiles.layout)
    for i in gl.static_range(len(descs)):
        if starts is None:
            tma.async_copy_global_to_shared(
                descs[i], [column * _TILE, k], full, parts.index(slot * len(descs) + i), pred=wanted
            )
        else:
            mine = wanted & (column >= starts[i]) & (column < starts[i + 1])
            tma.async_copy_global_to_shared(
                descs[i], [(column - starts[i]) * _TILE, k], full, parts.index(slot), pred=mine
            )


@gluon.jit
def _load(x_desc, w_descs, starts, row, begin, end, steps, ring, PREFETCH: gl.constexpr):
    """Load what a program multiplies, as far ahead as the ring goes: the weights of PREFETCH steps before x is there.

    begin, end: its share of the steps of all columns, of `steps` each. The last column comes first.
    """
    x_tiles, _, full, read = ring
    STAGES: gl.constexpr = full.shape[0]
    last = (end - 1) // steps
    first = gl.maximum(begin - last * steps, 0)
    ahead = gl.minimum(end - last * steps - first, PREFETCH)
    for step in range(ahead):
        _load_weights(w_descs, starts, last, (first + step) * _DEPTH, ring, step, True)
    gdc_wait()
    step = 0
    for i in range(last - begin // steps + 1):
        column = last - i
        for k in range(gl.maximum(begin - column * steps, 0), gl.minimum(end - column * steps, steps)):
            slot = step % STAGES
            mbarrier.wait(read.index(slot), (step // STAGES & 1) ^ 1)
            _load_weights(w_descs, starts, column, k * _DEPTH, ring, slot, step >= ahead)
            mbarrier.expect(full.index(slot), _TILE * _DEPTH * 2)
            tma.async_copy_global_to_shared(x_desc, [row, k * _DEPTH], full.index(slot), x_tiles.index(slot))
            step += 1


@gluon.jit
def _multiply(ring, step, count):
    """The sum over `count` steps, from number `step` of the program's own on."""
    x_tiles, w_tiles, full, read = ring
    STAGES: gl.constexpr = full.shape[0]
    COLS: gl.constexpr = w_tiles.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLS, 16])
    acc = gl.zeros((_TILE, COLS), gl.float32, layout)
    for i in range(step, step + count):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        acc = warpgroup_mma(x_tiles.index(slot), w_tiles.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])  # the step before is complete
        mbarrier.arrive(read.index((i + STAGES - 1) % STAGES), pred=i > step)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(read.index((step + count - 1) % STAGES))
    return acc


@gluon.jit
def _store(value, out_desc, row, column, staging):
    """Let TMA store a tile, once the one before it has left `staging`. What is behind the last row is not stored."""
    tma.store_wait(0)
    staging.store(value)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column * _TILE], staging)


@gluon.jit
def _multiply_columns(out_desc, bias_ptrs, starts, row, begin, end, steps, ring, staging):
    """Make and store the columns begin .. end - 1 of a tile of rows, last to first."""
    for i in range(end - begin):
        column = end - 1 - i
        acc = _multiply(ring, i * steps, steps)
        if i == end - begin - 1:
            gdc_launch_dependents()  # behind the wait: attention relies on that (runtime/overlap.py)
        if bias_ptrs[0] is not None:
            bias_ptr = bias_ptrs[0] + column * _TILE
            for j in gl.static_range(1, len(bias_ptrs)):
                if column >= starts[j]:
                    bias_ptr = bias_ptrs[j] + (column - starts[j]) * _TILE
            offs = gl.arange(0, _TILE, gl.SliceLayout(0, acc.type.layout))
            acc += gl.load(bias_ptr + offs).to(gl.float32)[None, :]
        _store(acc.to(out_desc.dtype), out_desc, row, column, staging)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "tiles0", "tiles1", "tiles2", "steps", "groups", "row_tiles"])
def linear_kernel(
    x_desc,
    w0_desc,
    w1_desc,
    w2_desc,
    bias0_ptr,
    bias1_ptr,
    bias2_ptr,
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
    """Grid (groups * row tiles,): a program makes some columns of one tile of rows, which stand side by side in `out`.

    tiles0 .. tiles2: columns of tiles of each weight. steps: tiles of K.
    """
    group, row = _place(rows, row_tiles)
    starts = (tiles0 * 0, tiles0, tiles0 + tiles1, tiles0 + tiles1 + tiles2)
    begin, end = _share(starts[3], group, groups)
    ring = _ring(x_desc, _TILE, STAGES)
    staging = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_type.shape, out_desc.layout)
    # fmt: off
    gl.warp_specialize([
        (_multiply_columns, (out_desc, (bias0_ptr, bias1_ptr, bias2_ptr), starts, row, begin, end, steps, ring,
                             staging)),
        (_load, (x_desc, (w0_desc, w1_desc, w2_desc), starts, row, begin * steps, end * steps, steps, ring, PREFETCH)),
    ], [1], [_LOADER])
    # fmt: on


@gluon.jit
def _offsets(acc):
    """Where a sum's numbers lie among those that a program leaves: what a warp stores at once is contiguous."""
    m = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    n = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    return (m // 16 * (16 * acc.shape[1]) + m % 16 * 8)[:, None] + (n // 8 * 128 + n % 8)[None, :]


@gluon.jit
def _leave(acc, sums_ptr, flags_ptr, program):
    """Leave a sum for the program that has the column's last step."""
    gl.store(sums_ptr + program.to(gl.int64) * (acc.shape[0] * acc.shape[1]) + _offsets(acc), acc)
    debug_barrier()  # every thread's stores come before the one thread's release
    gl.atomic_xchg(flags_ptr + program, _RAISED, sem="release", scope="gpu")


@gluon.jit
def _add_left(acc, sums_ptr, flags_ptr, program):
    """acc and the sum that a program leaves, when it is there."""
    raised, lowered = gl.to_tensor(_RAISED), gl.to_tensor(0).to(gl.int64)
    while gl.atomic_cas(flags_ptr + program, raised, lowered, sem="acq_rel", scope="gpu") != raised:
        pass
    sums_ptr += program.to(gl.int64) * (acc.shape[0] * acc.shape[1])
    return acc + gl.load(sums_ptr + _offsets(acc), cache_modifier=".cg")


@gluon.jit
def _gated(acc, KIND: gl.constexpr):
    """silu(gate) * up, of which gate's sums are the left half of the columns, up's the right."""
    COLS: gl.constexpr = acc.shape[1] // 2
    gate, up = acc.reshape((acc.shape[0], 2, COLS)).permute((0, 2, 1)).split()
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLS, 16])
    gate, up = gl.convert_layout(gate, layout, True), gl.convert_layout(up, layout, True)
    gate, up = _rounded(gate, KIND), _rounded(up, KIND)
    return (_rounded(gate * (1.0 / (1.0 + gl.exp(-gate))), KIND) * up).to(KIND)


@gluon.jit
def _multiply_share(
    out_desc, sums_ptr, flags_ptr, row, group, groups, row_tiles, begin, end, columns, steps, ring, staging
):
    """Make the steps begin .. end - 1 of all columns of a tile of rows; store the columns whose last step is there."""
    program = gl.program_id(0)
    last = (end - 1) // steps
    count = last - begin // steps + 1
    done = 0
    for i in range(count):
        column = last - i
        first = gl.maximum(begin - column * steps, 0)
        stop = gl.minimum(end - column * steps, steps)
        acc = _multiply(ring, done, stop - first)
        done += stop - first
        if i == count - 1:
            gdc_launch_dependents()
        if stop < steps:
            _leave(acc, sums_ptr, flags_ptr, program)
        else:
            other = group
            while _share(columns * steps, other, groups)[0] > column * steps:
                other -= 1
                acc = _add_left(acc, sums_ptr, flags_ptr, program - (group - other) * row_tiles)
            _store(_gated(acc, out_desc.dtype), out_desc, row, column, staging)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "columns", "steps", "groups", "row_tiles"])
def swiglu_kernel(
    x_desc,
    gate_desc,
    up_desc,
    out_desc,
    sums_ptr,
    flags_ptr,
    rows,
    columns,
    steps,
    groups,
    row_tiles,
    STAGES: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """Grid (groups * row tiles,): a program makes a share of the steps of one tile of rows.

    columns: of tiles of the output. steps: tiles of K.
    """
    group, row = _place(rows, row_tiles)
    begin, end = _share(columns * steps, group, groups)
    ring = _ring(x_desc, 2 * _TILE, STAGES)
    staging = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_type.shape, out_desc.layout)
    # fmt: off
    gl.warp_specialize([
        (_multiply_share, (out_desc, sums_ptr, flags_ptr, row, group, groups, row_tiles, begin, end, columns, steps,
                           ring, staging)),
        (_load, (x_desc, (gate_desc, up_desc), None, row, begin, end, steps, ring, PREFETCH)),
    ], [1], [_LOADER])
    # fmt: on


def settings_for(
    rows: int, cols: tuple[int, ...], depth: int, fused: bool = False, multiprocessors: int = _MULTIPROCESSORS
) -> Wide | None:
    """Settings for the product of `rows` rows with weights [n, depth] for n in `cols`, or None: not by these kernels.

    Three weights, or with `fused` gate and up. A rule from what was measured of models with 1, 3, 8 and 32 billion
    parameters: gate and up if they make enough tiles that are full of rows; three weights if a group has one column at
    most, but for few columns of few rows, or about two.
    """
    if not WIDE_TILE < rows <= MOST_WIDE or depth < _LEAST_DEPTH or any(n % WIDE_TILE for n in cols):
        return None
    row_tiles = triton.cdiv(rows, WIDE_TILE)
    groups = multiprocessors // row_tiles
    if fused:
        full = rows >= _LEAST_FULL * row_tiles * WIDE_TILE
        return SWIGLU if full and cols[0] // WIDE_TILE * row_tiles >= _LEAST_TILES else None
    columns = sum(cols) // WIDE_TILE
    most = triton.cdiv(columns, groups)
    pays = row_tiles > 2 or 2 * columns > groups if most == 1 else most == 2 and columns >= _LEAST_BUSY * 2 * groups
    return STACK if len(cols) == 3 and pays else None


def linear(
    x: Tensor,
    weights: Sequence[Tensor],
    cols: Sequence[int],
    biases: Sequence[Tensor | None],
    out: Tensor,
    settings: Wide,
) -> None:
    """x @ weight.T + bias for three weights, side by side in `out`; see linear_kernel. products.py has checked all.

    x [rows, K]; of weights [Ni, K] the first cols[i] rows; biases [Ni] or None each; out [rows, sum of cols].
    """
    columns = [n // WIDE_TILE for n in cols]
    row_tiles = triton.cdiv(len(x), WIDE_TILE)
    groups = min(_multiprocessors(x.device) // row_tiles, sum(columns))
    compiled = launch(linear_kernel, (groups * row_tiles,))(
        _descriptor(x),
        *(_descriptor(weight) for weight in weights),
        *biases,
        _descriptor(out, WIDE_TILE),
        len(x),
        *columns,
        triton.cdiv(x.shape[1], _DEPTH.value),
        groups,
        row_tiles,
        settings.stages,
        settings.prefetch,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        launch_pdl=True,
        **EXACT,
    )
    prefer_shared_memory(compiled)


def linear_swiglu(x: Tensor, gate: Tensor, up: Tensor, out: Tensor, settings: Wide) -> None:
    """silu(x @ gate.T) * (x @ up.T). x [rows, K], gate and up [I, K], out [rows, I]; products.py has checked all."""
    columns, steps = len(gate) // WIDE_TILE, triton.cdiv(x.shape[1], _DEPTH.value)
    row_tiles = triton.cdiv(len(x), WIDE_TILE)
    groups = min(_multiprocessors(x.device) // row_tiles, columns * steps)
    programs = groups * row_tiles
    compiled = launch(swiglu_kernel, (programs,))(
        _descriptor(x),
        _descriptor(gate),
        _descriptor(up),
        _descriptor(out, WIDE_TILE),
        x.new_empty(programs, 2 * WIDE_TILE * WIDE_TILE, dtype=torch.float32),
        x.new_empty(programs, dtype=torch.int64),
        len(x),
        columns,
        steps,
        groups,
        row_tiles,
        settings.stages,
        settings.prefetch,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        launch_pdl=True,
        **EXACT,
    )
    prefer_shared_memory(compiled)


def _descriptor(tensor: Tensor, width: int = _DEPTH.value) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [WIDE_TILE, width], TILE_LAYOUT)
