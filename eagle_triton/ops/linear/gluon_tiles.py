"""What products on Hopper share, whose kernels are written in Gluon: barriers, accumulators, and storing a tile."""

from __future__ import annotations

from eagle_triton.runtime.gluon import fence_async_shared, gl, gluon, mbarrier

TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def ready(barriers, SLOTS: gl.constexpr):
    """Make rows of up to SLOTS barriers ready, slot by slot: between two of a row Triton puts a barrier of its own."""
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
    DOWN: gl.constexpr = warps if 16 * warps <= ROWS else 4  # warpgroups one below another, else side by side
    WIDTH: gl.constexpr = COLS * DOWN // warps
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [DOWN, warps // DOWN], [16, WIDTH, 16])
    return gl.zeros((ROWS, COLS), gl.float32, layout)


@gluon.jit
def store(
    value,
    out_ptr,
    bias_ptr,
    col,
    rows,
    bias_cols,
    cols,
    stride_om,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SWAP: gl.constexpr,
):
    """Add the bias of the first `bias_cols` columns, round, and store the tile whose first column is `col`."""
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
    out = out_ptr + offs_m.to(gl.int64)[:, None] * stride_om + offs_n[None, :]
    gl.store(out, value.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def rounded(x, KIND: gl.constexpr):
    """fp32 values as they are after rounding to KIND."""
    return x.to(KIND).to(gl.float32)
