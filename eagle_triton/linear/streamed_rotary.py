"""Queries, keys and values of few rows on Hopper, rotated and appended to the cache where they are made.

    linear_rotary_kernel:  q, k, v = x @ weight.T (+ bias) each;  q, k = rotate(q, angle), rotate(k, angle);
                           out = q;  cache rows first_row + skip.. = k, v

streamed.py's product, of which a program makes 32 columns of a head and the 32 that are rotated with them: two boxes of
TMA stand one below the other in a tile of the weights. So attention follows at once. K is not split: partial sums
cannot be rotated. Needs Triton 3.6.

| name      | shape                        | dtype, layout                                                  |
|-----------|------------------------------|----------------------------------------------------------------|
| x         | [rows, K]                    | bf16 or fp16, rows 16-byte aligned; row b * N + n is node n of |
|           |                              | sequence b                                                     |
| weights   | [heads * d, K], three        | as x                                                           |
| biases    | [heads * d]                  | as x, or None                                                  |
| out       | [rows, Hq, d]                | as x                                                           |
| the rest  | as rotary_append has them    | cache as x                                                     |

Numerics: those of linear_stack without splits of K and of rotary_append behind it, to the bit. d is a multiple of 64,
all of which is rotated, and heads are not normed.

What it takes on a GPU has not been measured yet, so MEASURED names no shape, and nothing chooses it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

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

from eagle_triton import kv_cache
from eagle_triton.layers import rotary
from eagle_triton.linear.streamed import PREFETCH_BYTES, TILE_LAYOUT
from eagle_triton.reference.attention import capacity_of
from eagle_triton.runtime.launch import EXACT, launch
from eagle_triton.runtime.overlap import prefer_shared_memory


class RotaryStreaming(NamedTuple):
    """How it is launched: columns of K in a step, a multiple of 64, and of how many steps the weights and x lie in
    shared memory."""

    block_k: int
    w_stages: int
    x_stages: int


# (rows up to, rows of each weight, K, d) -> settings. Those of `candidates` are timed beside streamed.py's product and
# the rotary kernel by tools/tune_linear.py --rotary.
MEASURED: dict[tuple[int, tuple[int, ...], int, int], RotaryStreaming] = {}
MOST_ROWS = 64
MOST_SHARED = 225 * 1024  # bytes of shared memory
_ROTATED = gl.constexpr(32)  # columns of a program that are rotated with as many others
_COLUMNS = gl.constexpr(64)
_BOX = gl.constexpr(64)  # columns of K that one box of TMA holds
_STAGING = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_cos_sin = gluon.jit(rotary.cos_sin.fn)
_row_offset = gluon.jit(kv_cache.row_offset.fn)


@gluon.jit
def _ring(desc, STEPS: gl.constexpr, BOXES: gl.constexpr):
    """Room for the boxes of STEPS steps, and for each step the barrier that says all are there."""
    boxes = gl.allocate_shared_memory(desc.dtype, [STEPS * BOXES, desc.block_type.shape[0], _BOX], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    return boxes, full


@gluon.jit
def _load_weights(desc, first, second, column, boxes, full, slot, wanted, LOADS: gl.constexpr):
    """Let TMA load the weights of a step: for each 64 columns of K the rows from `first` on, then those from `second`
    on that turn with them."""
    mbarrier.expect(full.index(slot), 2 * LOADS * desc.block_type.nbytes, pred=wanted)
    for i in gl.static_range(LOADS):
        place = 2 * (slot * LOADS + i)
        tma.async_copy_global_to_shared(
            desc, [first, column + i * _BOX], full.index(slot), boxes.index(place), pred=wanted
        )
        tma.async_copy_global_to_shared(
            desc, [second, column + i * _BOX], full.index(slot), boxes.index(place + 1), pred=wanted
        )


@gluon.jit
def _load_x(desc, column, boxes, full, slot, wanted, LOADS: gl.constexpr):
    """Let TMA load x of a step."""
    mbarrier.expect(full.index(slot), LOADS * desc.block_type.nbytes, pred=wanted)
    for i in gl.static_range(LOADS):
        tma.async_copy_global_to_shared(
            desc, [0, column + i * _BOX], full.index(slot), boxes.index(slot * LOADS + i), pred=wanted
        )


@gluon.jit
def _rounded(x, KIND: gl.constexpr):
    """fp32 values as they are after rounding to KIND."""
    return x.to(KIND).to(gl.float32)


@gluon.jit(do_not_specialize=["rows", "skip"], do_not_specialize_on_alignment=rotary._UNALIGNED)
def linear_rotary_kernel(
    x_desc,
    q_desc,
    k_desc,
    v_desc,
    q_bias_ptr,
    k_bias_ptr,
    v_bias_ptr,
    out_ptr,
    cache_ptr,
    table_ptr,
    first_row_ptr,
    depths_ptr,
    inv_freq_ptr,
    stride_cs,
    stride_cb,
    stride_ch,
    stride_ct,
    stride_tb,
    stride_fb,
    stride_db,
    stride_dn,
    rows,
    num_nodes,
    skip,
    capacity,
    depth,
    scaling,
    PAGE: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """Grid (tiles of all heads of queries, keys and values,): a program makes 64 columns of a head for all rows.

    PREFETCH: steps whose weights are in flight at a time while x is not there yet.
    """
    PARTS: gl.constexpr = DIM // _COLUMNS  # programs of a head
    LOADS: gl.constexpr = BLOCK_K // _BOX
    tile = gl.program_id(0)
    w_desc, bias_ptr = q_desc, q_bias_ptr
    of_keys, of_values = False, tile >= (HEADS + KV_HEADS) * PARTS
    if of_values:
        tile -= (HEADS + KV_HEADS) * PARTS
        w_desc, bias_ptr = v_desc, v_bias_ptr
    elif tile >= HEADS * PARTS:
        tile -= HEADS * PARTS
        of_keys = True
        w_desc, bias_ptr = k_desc, k_bias_ptr
    head, column = tile // PARTS, tile % PARTS * _ROTATED
    first = head * DIM + column
    second = first + DIM // 2
    count = gl.cdiv(depth, BLOCK_K)

    w_boxes, w_full = _ring(w_desc, W_STAGES, 2 * LOADS)
    x_boxes, x_full = _ring(x_desc, X_STAGES, LOADS)
    for slot in gl.static_range(max(W_STAGES, X_STAGES)):
        if slot < W_STAGES:
            mbarrier.init(w_full.index(slot), count=1)
        if slot < X_STAGES:
            mbarrier.init(x_full.index(slot), count=1)
    fence_async_shared()
    for i in gl.static_range(W_STAGES):
        if i >= PREFETCH:
            mbarrier.wait(w_full.index(i - PREFETCH), 0, pred=i - PREFETCH < count)
        _load_weights(w_desc, first, second, i * BLOCK_K, w_boxes, w_full, i, i < count, LOADS)
    gdc_wait()
    for i in gl.static_range(X_STAGES):
        _load_x(x_desc, i * BLOCK_K, x_boxes, x_full, i, i < count, LOADS)

    # where each row turns to and is kept, while x comes
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    offs_n = column + gl.arange(0, _ROTATED, gl.SliceLayout(0, layout))
    here = offs_m < rows
    sequence, node = offs_m // num_nodes, offs_m % num_nodes
    begin = gl.load(first_row_ptr + sequence * stride_fb, mask=here, other=0)
    position = begin + skip + node
    row = position.to(gl.int64)
    if depths_ptr is not None:
        position = begin + gl.load(depths_ptr + sequence * stride_db + node * stride_dn, mask=here, other=0)
    fits = here & (row >= 0) & (row < capacity)
    place = _row_offset(table_ptr, sequence.to(gl.int64), row, fits, stride_tb, stride_cb, stride_ct, PAGE)
    kind: gl.constexpr = out_ptr.dtype.element_ty
    angle = position.to(gl.float32)[:, None] * gl.load(inv_freq_ptr + offs_n)[None, :]
    cos, sin = _cos_sin(angle)
    cos, sin = _rounded(cos * scaling, kind), _rounded(sin * scaling, kind)

    w_tiles = w_boxes._reinterpret(w_desc.dtype, [W_STAGES * LOADS, _COLUMNS, _BOX], w_desc.layout)
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    acc = gl.zeros((_COLUMNS, BLOCK_M), gl.float32, acc_layout)
    for step in range(count):
        w_slot, x_slot = step % W_STAGES, step % X_STAGES
        mbarrier.wait(w_full.index(w_slot), step // W_STAGES & 1)
        mbarrier.wait(x_full.index(x_slot), step // X_STAGES & 1)
        for i in gl.static_range(LOADS):
            x = x_boxes.index(x_slot * LOADS + i).permute((1, 0))
            acc = warpgroup_mma(w_tiles.index(w_slot * LOADS + i), x, acc, is_async=True)
        acc = warpgroup_mma_wait(LOADS, deps=[acc])  # the step before is complete, its slots are free
        next_w, next_x = step - 1 + W_STAGES, step - 1 + X_STAGES
        wanted = (step > 0) & (next_w < count)
        _load_weights(w_desc, first, second, next_w * BLOCK_K, w_boxes, w_full, next_w % W_STAGES, wanted, LOADS)
        wanted = (step > 0) & (next_x < count)
        _load_x(x_desc, next_x * BLOCK_K, x_boxes, x_full, next_x % X_STAGES, wanted, LOADS)
    acc = warpgroup_mma_wait(0, deps=[acc])
    debug_barrier()  # no warp still reads the rings, whose memory the staging may reuse
    gdc_launch_dependents()  # behind the wait: attention relies on that (runtime/overlap.py)

    if bias_ptr is not None:
        offs = gl.arange(0, _COLUMNS, gl.SliceLayout(1, acc_layout))
        bias_ptrs = bias_ptr + first + offs + gl.where(offs >= _ROTATED, DIM // 2 - _ROTATED, 0)
        acc += gl.load(bias_ptrs).to(gl.float32)[:, None]
    staging = gl.allocate_shared_memory(kind, [BLOCK_M, _COLUMNS], _STAGING)
    staging.store(acc.permute((1, 0)).to(kind))
    debug_barrier()
    left = staging.slice(0, _ROTATED, 1).load(layout)
    right = staging.slice(_ROTATED, _ROTATED, 1).load(layout)
    if not of_values:
        left, right = left.to(gl.float32), right.to(gl.float32)
        turned = _rounded(left * cos, kind) - _rounded(right * sin, kind)
        right = (_rounded(right * cos, kind) + _rounded(left * sin, kind)).to(kind)
        left = turned.to(kind)
    if of_keys | of_values:
        ptrs = cache_ptr + gl.where(of_values, stride_cs, 0) + head.to(gl.int64) * stride_ch
        ptrs += place[:, None] + offs_n[None, :]
        mask = fits[:, None] & (offs_n >= 0)[None, :]
    else:
        ptrs = out_ptr + offs_m[:, None] * (HEADS * DIM) + (head * DIM + offs_n)[None, :]
        mask = here[:, None] & (offs_n >= 0)[None, :]
    gl.store(ptrs, left, mask=mask)
    gl.store(ptrs + DIM // 2, right, mask=mask)


def settings_for(rows: int, cols: tuple[int, ...], depth: int, dim: int) -> RotaryStreaming | None:
    """Settings for q, k and v [n, depth] with n in `cols`, of heads of `dim`, or None: not by this kernel."""
    tile = next((tile for tile in (16, 32, MOST_ROWS) if rows <= tile), None)
    return None if tile is None else MEASURED.get((tile, cols, depth, dim))


def candidates(rows: int) -> Iterator[RotaryStreaming]:
    """Settings to time."""
    for block_k, w_stages, x_stages in itertools.product((64, 128, 256), (4, 6, 8, 12), (3, 4, 6)):
        settings = RotaryStreaming(block_k, w_stages, x_stages)
        if fits(rows, settings):
            yield settings


def fits(rows: int, settings: RotaryStreaming) -> bool:
    """Whether shared memory holds the rings, and what is rotated."""
    ring = (settings.w_stages * _COLUMNS.value + settings.x_stages * _block_m(rows)) * settings.block_k
    enough = settings.block_k % _BOX.value == 0 and min(settings.w_stages, settings.x_stages) >= 2
    return enough and 2 * (ring + _block_m(rows) * _COLUMNS.value) <= MOST_SHARED


def can_rotate(x: Tensor, biases: Sequence[Tensor | None], cache: Tensor, inv_freq: Tensor) -> bool:
    """Whether the kernel, where x and the weights can be streamed, can make these heads: few rows, rotated as a whole,
    kept in the dtype that they have, with biases for all or none."""
    dim = cache.shape[-1]
    return (
        len(x) <= MOST_ROWS
        and dim % _COLUMNS.value == 0
        and 2 * len(inv_freq) == dim
        and inv_freq.dtype == torch.float32
        and cache.dtype == x.dtype
        and len({bias is None for bias in biases}) == 1
    )


def linear_rotary(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    cache: Tensor,
    first_row: Tensor,
    depths: Tensor | None,
    inv_freq: Tensor,
    out: Tensor,
    skip: int,
    attention_scaling: float,
    table: Tensor | None,
    settings: RotaryStreaming,
) -> None:
    """See linear_rotary_kernel; products.py has checked all. x [rows, K], out [B, N, Hq, d] contiguous."""
    _, count, heads, dim = out.shape
    kv_heads = cache.shape[2]
    compiled = launch(linear_rotary_kernel, ((heads + 2 * kv_heads) * (dim // _COLUMNS.value),))(
        _descriptor(x, _block_m(len(x))),
        *(_descriptor(weight, _ROTATED.value) for weight in weights),
        *biases,
        out,
        cache,
        table,
        first_row,
        depths,
        inv_freq.contiguous(),
        *cache.stride()[:4],
        0 if table is None else table.stride(0),
        first_row.stride(0),
        *((0, 0) if depths is None else depths.stride()),
        len(x),
        count,
        skip,
        capacity_of(cache, table),
        x.shape[1],
        attention_scaling,
        kv_cache.page_rows(cache, table),
        heads,
        kv_heads,
        dim,
        _block_m(len(x)),
        *settings,
        max(1, PREFETCH_BYTES // (_COLUMNS.value * settings.block_k * 2)),
        num_warps=4,
        launch_pdl=True,
        **EXACT,
    )
    prefer_shared_memory(compiled)


def _block_m(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))


def _descriptor(tensor: Tensor, height: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [height, _BOX.value], TILE_LAYOUT)
