"""Queries, keys and values of few rows on Hopper, rotated and appended to the cache where they are made.

    linear_rotary_kernel:  q, k, v = x @ weight.T (+ bias) each;  q, k = rotate(q, angle), rotate(k, angle);
                           out = q;  cache rows first_row + skip.. = k, v

streamed.py's product with the weights as the left operand, of which a program makes 32 columns of a head and the 32
that are rotated with them: rows 0 to 31 of its tile of weights are the head's rows c.., rows 32 to 63 its rows
c + d / 2... One box of TMA loads both, as [2, 32] of a weight that is taken for [2 heads, d / 2, K]. Attention follows
at once. K is not split: partial sums cannot be rotated. Needs Triton 3.6.

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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eagle_triton import kv_cache
from eagle_triton.layers import rotary
from eagle_triton.linear.streamed import (
    PREFETCH_BYTES,
    TILE_LAYOUT,
    _issue_load,
    _multiply_add,
    _ready,
    _ring,
    _rounded,
    _wait_full,
    _zeros,
)
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
MOST_SHARED = 226 * 1024  # bytes
_ROTATED = gl.constexpr(32)  # columns of a program that are rotated with as many others
_COLUMNS = gl.constexpr(2 * 32)
_PAIRED_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)  # of both, as TMA loads them
_STAGING = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_cos_sin = gluon.jit(rotary.cos_sin.fn)
_row_offset = gluon.jit(kv_cache.row_offset.fn)


@gluon.jit
def _load_weights(desc, head, column, k, tiles, full, slot, wanted):
    """Let TMA load both halves' rows from `column` on of a head into a slot of a ring, if they are wanted."""
    mbarrier.expect(full.index(slot), desc.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(desc, [2 * head, column, k], full.index(slot), tiles.index(slot), pred=wanted)


@gluon.jit
def _made_here(x):
    """x, made where this stands. The compiler would make it where it is used, behind the loop, where nothing waits."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.float32, is_pure=False, pack=1)


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
    count = gl.cdiv(depth, BLOCK_K)

    w_boxes = gl.allocate_shared_memory(w_desc.dtype, [W_STAGES, 2, _ROTATED, BLOCK_K], w_desc.layout)
    w_tiles = w_boxes._reinterpret(w_desc.dtype, [W_STAGES, _COLUMNS, BLOCK_K], x_desc.layout)
    w_full = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    x_tiles, x_full = _ring(x_desc, X_STAGES)
    _ready((w_full, x_full), max(W_STAGES, X_STAGES))
    for i in gl.static_range(W_STAGES):
        if i >= PREFETCH:
            mbarrier.wait(w_full.index(i - PREFETCH), 0, pred=i - PREFETCH < count)
        _load_weights(w_desc, head, column, i * BLOCK_K, w_boxes, w_full, i, i < count)
    gdc_wait()
    for i in gl.static_range(X_STAGES):
        _issue_load(x_desc, 0, i * BLOCK_K, x_tiles, x_full, i, i < count)

    # how each row is rotated, and where it is kept, while x comes
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    offs_n = column + gl.arange(0, _ROTATED, gl.SliceLayout(0, layout))
    here = offs_m < rows
    row_of_x = gl.minimum(offs_m, rows - 1)  # also behind the last row there is something to read
    sequence, node = row_of_x // num_nodes, row_of_x % num_nodes
    begin = gl.load(first_row_ptr + sequence * stride_fb)
    position = begin + skip + node
    row = position.to(gl.int64)
    if depths_ptr is not None:
        position = begin + gl.load(depths_ptr + sequence * stride_db + node * stride_dn)
    fits = here & (row >= 0) & (row < capacity)
    place = _row_offset(table_ptr, sequence.to(gl.int64), row, fits, stride_tb, stride_cb, stride_ct, PAGE)
    kind: gl.constexpr = out_ptr.dtype.element_ty
    angle = position.to(gl.float32)[:, None] * gl.load(inv_freq_ptr + offs_n)[None, :]
    cos, sin = _cos_sin(angle)
    cos, sin = _made_here(_rounded(cos * scaling, kind)), _made_here(_rounded(sin * scaling, kind))

    acc = _zeros(BLOCK_M, _COLUMNS, True)
    for step in range(count):
        _wait_full(w_full, step, W_STAGES)
        _wait_full(x_full, step, X_STAGES)
        acc = _multiply_add(x_tiles.index(step % X_STAGES), w_tiles.index(step % W_STAGES), acc, True)
        acc = warpgroup_mma_wait(1, deps=[acc])  # the step before is complete, its slots are free
        next_w, next_x = step - 1 + W_STAGES, step - 1 + X_STAGES
        wanted = (step > 0) & (next_w < count)
        _load_weights(w_desc, head, column, next_w * BLOCK_K, w_boxes, w_full, next_w % W_STAGES, wanted)
        wanted = (step > 0) & (next_x < count)
        _issue_load(x_desc, 0, next_x * BLOCK_K, x_tiles, x_full, next_x % X_STAGES, wanted)
    acc = warpgroup_mma_wait(0, deps=[acc])
    debug_barrier()  # no warp still reads the rings, whose memory the staging may reuse
    gdc_launch_dependents()  # behind the wait: attention relies on that (runtime/overlap.py)

    if bias_ptr is not None:
        offs = gl.arange(0, _COLUMNS, gl.SliceLayout(1, acc.type.layout))
        bias_ptrs = bias_ptr + head * DIM + column + offs + gl.where(offs >= _ROTATED, DIM // 2 - _ROTATED, 0)
        acc += gl.load(bias_ptrs).to(gl.float32)[:, None]
    staging = gl.allocate_shared_memory(kind, [BLOCK_M, _COLUMNS], _STAGING)
    staging.store(acc.permute((1, 0)).to(kind))
    debug_barrier()
    left = staging.slice(0, _ROTATED, 1).load(layout)
    right = staging.slice(_ROTATED, _ROTATED, 1).load(layout)
    if not of_values:
        first, second = left.to(gl.float32), right.to(gl.float32)
        left = (_rounded(first * cos, kind) - _rounded(second * sin, kind)).to(kind)
        right = (_rounded(second * cos, kind) + _rounded(first * sin, kind)).to(kind)
    if of_keys | of_values:
        ptrs = cache_ptr + gl.where(of_values, stride_cs, 0) + head.to(gl.int64) * stride_ch
        ptrs += place[:, None] + offs_n[None, :]
        kept = fits
    else:
        ptrs = out_ptr + offs_m[:, None] * (HEADS * DIM) + (head * DIM + offs_n)[None, :]
        kept = here
    gl.store(ptrs, left, mask=kept[:, None])
    gl.store(ptrs + DIM // 2, right, mask=kept[:, None])


def settings_for(rows: int, cols: tuple[int, ...], depth: int, dim: int) -> RotaryStreaming | None:
    """Settings for q, k and v [n, depth] with n in `cols`, of heads of `dim`, or None: not by this kernel."""
    tile = next((tile for tile in (16, 32, MOST_ROWS) if rows <= tile), None)
    return None if tile is None else MEASURED.get((tile, cols, depth, dim))


def candidates(rows: int) -> Iterator[RotaryStreaming]:
    """Settings to time."""
    for block_k, w_stages, x_stages in itertools.product((64, 128, 256), (4, 6, 8, 12), (3, 4, 6)):
        settings = RotaryStreaming(block_k, w_stages, x_stages)
        if fits_memory(rows, settings):
            yield settings


def fits_memory(rows: int, settings: RotaryStreaming) -> bool:
    """Whether shared memory holds the rings, whose place is taken by what is rotated."""
    block_k, w_stages, x_stages = settings
    shared = 2 * block_k * (w_stages * _COLUMNS.value + x_stages * _block_m(rows)) + 8 * (w_stages + x_stages)
    return block_k % 64 == 0 and min(w_stages, x_stages) >= 2 and shared <= MOST_SHARED


def can_rotate(x: Tensor, biases: Sequence[Tensor | None], cache: Tensor, inv_freq: Tensor) -> bool:
    """Whether the kernel, where x [rows, K] and the weights can be streamed, can make these heads: few rows, rotated as
    a whole, kept in the dtype that they have, with biases for all or none."""
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
        TensorDescriptor(x, list(x.shape), list(x.stride()), [_block_m(len(x)), settings.block_k], TILE_LAYOUT),
        *(_paired(weight, dim, settings.block_k) for weight in weights),
        *(bias if bias is None else bias.contiguous() for bias in biases),
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


def _paired(weight: Tensor, dim: int, block_k: int) -> TensorDescriptor:
    """A weight [heads * dim, K] as [2 heads, dim / 2, K], of which a box has two rows of the first."""
    rows, depth = weight.shape
    stride, half = weight.stride(0), dim // 2
    shape, strides, box = [rows // half, half, depth], [half * stride, stride, 1], [2, _ROTATED.value, block_k]
    return TensorDescriptor(weight, shape, strides, box, _PAIRED_LAYOUT)
