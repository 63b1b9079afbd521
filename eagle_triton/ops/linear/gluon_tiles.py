"""Device functions shared by the Gluon kernels of products on Hopper: barriers, accumulators, and storing a tile.

Tiles come through a ring of slots in shared memory: step i uses slot i % slots. A barrier per slot says that it is
full. Where one warp loads and others multiply, a second barrier says that it has been read.
"""

from __future__ import annotations

from torch import Tensor

from eagle_triton.ops.linear import weights
from eagle_triton.runtime.gluon import TensorDescriptor, async_load, fence_async_shared, gl, gluon, mbarrier

TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
tile_of = gluon.jit(weights.tile_of.fn)


def descriptor(tensor: Tensor, height: int, width: int, layout: gl.NVMMASharedLayout = TILE_LAYOUT) -> TensorDescriptor:
    """A TMA descriptor of a matrix, with tiles of [height, width]."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [height, width], layout)


@gluon.jit
def steps_of(split, depth, BLOCK_K: gl.constexpr, SPLITS: gl.constexpr):
    """The first step of a split of K, and the number of its steps."""
    steps = gl.cdiv(depth, BLOCK_K)
    per_split = gl.cdiv(steps, SPLITS)
    first = split * per_split
    return first, gl.minimum(per_split, steps - first)


@gluon.jit
def room_for(desc, HEIGHT: gl.constexpr, SLOTS: gl.constexpr):
    """Shared memory for SLOTS tiles of HEIGHT rows, otherwise of the descriptor's shape."""
    shape: gl.constexpr = [SLOTS, HEIGHT] + desc.block_type.shape[1:]  # noqa: RUF005 (Triton knows no other way)
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def room_for_weights(descs, HEIGHT: gl.constexpr, SLOTS: gl.constexpr):
    """The same for one or two weights, as a tuple."""
    tiles = (room_for(descs[0], HEIGHT, SLOTS),)
    if len(descs) == 2:
        tiles = (tiles[0], room_for(descs[1], HEIGHT, SLOTS))  # type: ignore[assignment]
    return tiles


@gluon.jit
def barriers(SLOTS: gl.constexpr):
    """A barrier per slot. The caller initialises them."""
    return gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())


@gluon.jit
def await_full(full, step):
    """Wait until the tile of a step is loaded."""
    SLOTS: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(step % SLOTS), step // SLOTS & 1)


@gluon.jit
def await_read(read, step):
    """Wait until the last tile in the slot of a step has been read."""
    SLOTS: gl.constexpr = read.shape[0]
    mbarrier.wait(read.index(step % SLOTS), (step // SLOTS & 1) ^ 1)


@gluon.jit
def load_weights(descs, col, step, first, tiles, full, read):
    """Let TMA load the weights of a step, the split's step `first + step`, into its slot, once the slot has been
    read."""
    slot = step % full.shape[0]
    await_read(read, step)
    mbarrier.expect(full.index(slot), len(descs) * descs[0].block_type.nbytes)
    for i in gl.static_range(len(descs)):
        where = [col, (first + step) * descs[i].block_type.shape[1]]
        if len(descs[i].block_type.shape) == 3:  # Marlin's words, of 64 rows each
            where = [col // 64, where[1], 0]
        async_load(descs[i], where, full.index(slot), tiles[i].index(slot))


@gluon.jit
def give_back(read, step):
    """Mark the tile of a step as read."""
    SLOTS: gl.constexpr = read.shape[0]
    mbarrier.arrive(read.index(step % SLOTS))


@gluon.jit
def ready(barriers, SLOTS: gl.constexpr):
    """Initialise arrays of up to SLOTS barriers, slot by slot: Triton puts its own barrier between two of one array."""
    for slot in gl.static_range(SLOTS):
        for i in gl.static_range(len(barriers)):
            if slot < barriers[i].shape[0]:
                mbarrier.init(barriers[i].index(slot), count=1)
    fence_async_shared()


@gluon.jit
def zeros(BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SWAP: gl.constexpr):
    """An accumulator: [BLOCK_M, BLOCK_N], or its transpose with SWAP."""
    warps: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = BLOCK_N if SWAP else BLOCK_M
    COLS: gl.constexpr = BLOCK_M if SWAP else BLOCK_N
    DOWN: gl.constexpr = warps if 16 * warps <= ROWS else 4  # warpgroups below each other, else side by side
    WIDTH: gl.constexpr = COLS * DOWN // warps
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [DOWN, warps // DOWN], [16, WIDTH, 16])
    return gl.zeros((ROWS, COLS), gl.float32, layout)


@gluon.jit
def block_scale(weight, scale_column, col, k, IN_BLOCKS: gl.constexpr):
    """The scale of the weights (ScaledColumns) at (col, k), where it is for blocks of 128 by 128."""
    scale = (k * 0).to(gl.float32)
    if IN_BLOCKS:
        scale = gl.load(weight.scale + col // 128 * weight.scale_row + k // 128 * scale_column).to(gl.float32)
    return scale


@gluon.jit
def scaled(total, weight, col, cols, IN_BLOCKS: gl.constexpr):
    """A sum [rows of the weight, rows of x] from row `col` of the weight on, times the scales of the weight's rows, if
    they are not for blocks."""
    if not IN_BLOCKS:
        offs_n = gl.minimum(col + gl.arange(0, total.shape[0], gl.SliceLayout(1, total.type.layout)), cols - 1)
        total *= gl.load(weight.scale + offs_n * weight.scale_row).to(gl.float32)[:, None]
    return total


@gluon.jit
def store(
    value, out, bias_ptr, col, rows, bias_cols, cols, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SWAP: gl.constexpr
):
    """Add the bias of the first `bias_cols` columns, round, and store the tile of `out` (Rows) from column `col` on."""
    LANES: gl.constexpr = BLOCK_N // 4 if BLOCK_N < 128 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    if SWAP:
        value = value.permute((1, 0))
    value = gl.convert_layout(value, layout)
    offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    offs_n = col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    if bias_ptr is not None:
        value += gl.load(bias_ptr + offs_n, mask=offs_n < bias_cols, other=0.0).to(gl.float32)[None, :]
    mask = (offs_m < rows)[:, None] & (offs_n < cols)[None, :]
    out_ptr = out.ptr + offs_m.to(gl.int64)[:, None] * out.row + offs_n[None, :]
    gl.store(out_ptr, value.to(out.ptr.dtype.element_ty), mask=mask)


@gluon.jit
def rounded(x, DTYPE: gl.constexpr):
    """fp32 values rounded to DTYPE, in fp32."""
    return x.to(DTYPE).to(gl.float32)


@gluon.jit
def swiglu(gate, up, DTYPE: gl.constexpr, GELU_TANH: gl.constexpr = False):
    """silu(gate) * up of fp32 sums, in DTYPE, rounded where Hugging Face's models round. GELU_TANH: gelu(gate) with its
    tanh approximation."""
    gate, up = rounded(gate, DTYPE), rounded(up, DTYPE)
    slope = gate
    if GELU_TANH:  # as ops/layers/values.py
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (rounded(gate * (1.0 / (1.0 + gl.exp(-slope))), DTYPE) * up).to(DTYPE)
