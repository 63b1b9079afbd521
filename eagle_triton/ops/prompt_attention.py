"""Attention of consecutive rows of one long prompt: cuDNN attends stretches of keys, and a kernel adds up the results.

    out[i, h] = softmax_t(scale * q[i, h] . k[h // G, t]) . v[h // G, t]    over tokens t = 0 .. start + i

| name   | shape            | dtype        |                                                                     |
|--------|------------------|--------------|---------------------------------------------------------------------|
| q, out | [N, Hq, d]       | bf16 or fp16 | rows of one prompt, d a multiple of 8 and at most 128               |
| cache  | [2, P, Hkv, R, d] | as q        | keys and values of one layer, in P pages of R rows                  |
| table  | [M]              | int32        | the prompt's pages                                                  |
| part   | [N, Hq, d]       | as q         | the rows' attention over one stretch of the keys (workspace)        |
| lse    | [Hq, N]          | float32      | log-sum-exp of that stretch's weights (workspace)                   |

cuDNN makes a plan for each shape, in 45 ms on an H200, and torch keeps it per thread. So the committed rows are cut
into stretches of a few lengths, SEGMENTS, which are copied out of their pages one after another. The rest is shorter
than the shortest stretch; `attention.attend_committed` attends it. cuDNN attends the new rows as a causal square.

    out = sum_p exp(lse_p - max lse) part_p / sum_p exp(lse_p - max lse)

Numerics: in every part, products are accumulated and softmax is computed in fp32, then rounded to the dtype of q. Parts
are added up in fp32, in the order of the tokens. They depend only on `start` and N.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton import attention
from eagle_triton.operands.attention import check_prompt_attention
from eagle_triton.ops.views import KeyValues, view
from eagle_triton.runtime.launch import NO_FMA_FUSION, launch

SEGMENTS = (16384, 8192, 4096, 2048)  # lengths of stretches; cuDNN makes a plan for each length and N
MAX_PARTS = 4  # parts that one launch adds up
TAKEN_ROWS = 64  # rows of a program that copies
ADDED_ROWS = 32  # rows of a program that adds up
MIN_CUDNN = 90000  # version 9
MIN_CAPABILITY = (8, 0)
_DTYPES = (torch.bfloat16, torch.float16)
_plans: dict[tuple[object, ...], str | None] = {}  # shapes that cuDNN has tried, and why it refused them


class _Part(NamedTuple):
    """The attention of rows over one stretch of the keys."""

    out: Tensor  # [N, Hq, d], contiguous
    lse: Tensor  # [Hq, N] float32, contiguous


@triton.jit(do_not_specialize_on_alignment=["table_ptr", "count"])
def _take_rows_kernel(
    cache,
    table_ptr,
    out_ptr,
    first,
    rows,
    count,
    heads,
    D: tl.constexpr,
    STRIDE_T: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (2 * Hkv, row blocks): a program copies BLOCK_R rows of one page, of keys or values of one head, to out
    [2, Hkv, rows, d]. Rows from `count` on are zeros."""
    plane = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    begin = first + tl.program_id(1) * BLOCK_R
    page = tl.load(table_ptr + begin // PAGE, mask=begin - first < count, other=0).to(tl.int64)
    page_ptr = cache.ptr + plane // heads * cache.side + page * cache.page + plane % heads * cache.head
    page_ptr += begin % PAGE * STRIDE_T
    inside = (column < D)[None, :]
    tile = tl.arange(0, BLOCK_R)[:, None] * STRIDE_T + column[None, :]
    row = tl.load(page_ptr + tile, mask=(index < count)[:, None] & inside, other=0.0)
    out_ptr += plane * rows * D
    tl.store(out_ptr + (index[:, None] * D + column[None, :]), row, mask=(index < rows)[:, None] & inside)


@triton.jit
def _add_part(sums, denominators, part, tile, ok, lse, top):
    """Add a part. Its weights are relative to exp(lse), with one lse for each row."""
    weight = tl.exp(lse - top)
    values = tl.load(part.out + tile, mask=ok & (lse > float("-inf"))[:, None], other=0.0)
    return tl.fma(values.to(tl.float32), weight[:, None], sums), denominators + weight


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["sinks_ptr"])
def _add_parts_kernel(
    out_ptr,
    lse_ptr,
    part0,
    part1,
    part2,
    part3,
    sinks_ptr,
    count,
    nodes,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (Hq, row blocks): a program adds up `count` parts, at most four, of BLOCK_R rows of one head; `lse_ptr`, if
    given, gets the sum's. The sinks [Hq], if given, are weights without values."""
    head, heads = tl.program_id(0), tl.num_programs(0)
    row, column = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    row_ok = row < nodes
    place = head * nodes + row
    lse0 = tl.load(part0.lse + place, mask=row_ok, other=0.0)
    lse1 = tl.load(part1.lse + place, mask=row_ok & (count > 1), other=float("-inf"))
    lse2 = tl.load(part2.lse + place, mask=row_ok & (count > 2), other=float("-inf"))
    lse3 = tl.load(part3.lse + place, mask=row_ok & (count > 3), other=float("-inf"))
    top = tl.maximum(tl.maximum(lse0, lse1), tl.maximum(lse2, lse3))
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        top = tl.maximum(top, sink)
    ok = row_ok[:, None] & (column < D)[None, :]
    tile = (row * heads + head)[:, None] * D + column[None, :]
    sums = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    denominators = tl.zeros((BLOCK_R,), tl.float32)
    if sinks_ptr is not None:
        denominators += tl.exp(sink - top)
    sums, denominators = _add_part(sums, denominators, part0, tile, ok, lse0, top)
    sums, denominators = _add_part(sums, denominators, part1, tile, ok, lse1, top)
    sums, denominators = _add_part(sums, denominators, part2, tile, ok, lse2, top)
    sums, denominators = _add_part(sums, denominators, part3, tile, ok, lse3, top)
    tl.store(out_ptr + tile, (sums / denominators[:, None]).to(out_ptr.dtype.element_ty), mask=ok)
    if lse_ptr is not None:
        tl.store(lse_ptr + place, top + tl.log(denominators), mask=row_ok)


def unsupported(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why cuDNN cannot attend in a dtype on a device, as far as this is known without trying; None if it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"cuDNN needs an NVIDIA GPU, got {device}"
    if dtype not in _DTYPES:
        return f"cuDNN attends in bf16 and fp16, got {dtype}"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"cuDNN needs compute capability {'.'.join(map(str, MIN_CAPABILITY))}"
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if version is None or version < MIN_CUDNN:
        return f"cuDNN 9 is needed, got {version}"
    return None


def refused(
    heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device, rows: int, start: int
) -> str | None:
    """Why cuDNN refuses a shape that `prompt_attention` will need; None if it takes all of them.

    `rows` query rows, after `start`. Each shape is tried once in a thread, which makes cuDNN's plan for it: torch keeps
    plans by thread. A trial needs as much memory as the operation; the caller handles torch.OutOfMemoryError.
    """
    squares = [(length, False) for _, length in segments(start) if length in SEGMENTS]
    for length, causal in (*dict.fromkeys(squares), (rows, True)):
        key = (threading.get_ident(), heads, kv_heads, width, dtype, device, rows, length, causal)
        if key not in _plans:
            q = torch.empty(rows, heads, width, dtype=dtype, device=device)
            cache = torch.empty(2, kv_heads, length, width, dtype=dtype, device=device)
            try:
                _attend(q, cache, causal, width**-0.5)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                _plans[key] = str(error).partition("\n")[0]
            else:
                _plans[key] = None
        if _plans[key] is not None:
            return _plans[key]
    return None


def segments(start: int) -> Iterator[tuple[int, int]]:
    """The stretches (first, length) of `start` committed rows: lengths of SEGMENTS, and a shorter rest."""
    first = 0
    for length in SEGMENTS:
        while start - first >= length:
            yield first, length
            first += length
    if first < start:
        yield first, start - first


def prompt_attention(
    q: Tensor,
    cache: Tensor,
    start: int,
    end: int,
    *,
    scale: float,
    table: Tensor,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v for tokens start .. end - 1 of one prompt, with their keys in the cache already.

    q [N, Hq, d], N >= end - start: row i is token start + i and sees tokens 0 .. start + i; cache [2, P, Hkv, R, d] in
    q's dtype, with contiguous rows; table [M] int32: token t is row t % R of page table[t // R], R a multiple of 64
    that divides the shortest of SEGMENTS. start and end are on the host; start is a multiple of R. Not for a captured
    graph: the launches depend on start. `sinks` and `softcap` as in `tree_attention`, which replaces cuDNN if there is
    a `softcap`.
    Returns [N, Hq, d]; rows from end - start on mean nothing. Raises ValueError before the launch if shapes, dtypes,
    strides or devices do not fit, RuntimeError if cuDNN does not support them (`unsupported`, `refused`).
    """
    check_prompt_attention(q, cache, start, end, scale, table, sinks, softcap)
    _check_kernel_limits(q, cache, table, sinks)
    if softcap is not None:
        return _attend_capped(q, cache, start, end, scale, table, sinks, softcap)
    q, nodes = q.contiguous(), len(q)
    stretches = list(segments(start))
    most = max([nodes, *(length for _, length in stretches if length in SEGMENTS)])
    room = cache.new_empty(2 * cache.shape[2] * most * cache.shape[4])
    parts: list[_Part] = []
    for first, length in stretches:
        if len(parts) == MAX_PARTS:
            parts = [_added_up(parts, torch.float32)]
        if length in SEGMENTS:
            parts.append(_attend(q, _taken(cache, table, first, length, length, room), False, scale))
        else:
            parts.append(_Part(*_attend_rest(q, cache, table, first, length, scale)))
    if len(parts) == MAX_PARTS:
        parts = [_added_up(parts, torch.float32)]
    parts.append(_attend(q, _taken(cache, table, start, nodes, end - start, room), True, scale))
    return parts[0].out if len(parts) == 1 and sinks is None else _added_up(parts, q.dtype, sinks).out


def _check_kernel_limits(q: Tensor, cache: Tensor, table: Tensor, sinks: Tensor | None) -> None:
    rows, width = cache.shape[3:]
    if rows % TAKEN_ROWS or SEGMENTS[-1] % rows:
        raise ValueError(
            f"prompt_attention: pages must have a multiple of {TAKEN_ROWS} rows that divides {SEGMENTS[-1]}, got {rows}"
        )
    if cache.stride(4) != 1 or cache.stride(3) < width or table.stride(0) != 1:
        raise ValueError(
            "prompt_attention: rows of the cache and the table must be contiguous, got strides "
            f"{cache.stride()} and {table.stride()}"
        )
    if sinks is not None and not sinks.is_contiguous():
        raise ValueError(f"prompt_attention: sinks must be contiguous, got strides {sinks.stride()}")
    if q.numel() >= 2**31:
        raise ValueError(f"prompt_attention: q must have less than 2^31 elements, got {q.numel()}")


def _cudnn(q: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """cuDNN's attention of q [1, Hq, N, d] over keys and values [1, Hkv, T, d], and its log-sum-exp [1, Hq, N, 1]."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, keys, values, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse


def _attend(q: Tensor, cache: Tensor, causal: bool, scale: float) -> _Part:
    """q [N, Hq, d] over keys and values [2, Hkv, T, d]; causal: T = N, and row i sees the first i + 1."""
    out, lse = _cudnn(q[None].transpose(1, 2), cache[0][None], cache[1][None], causal, scale)
    return _Part(out[0].transpose(0, 1).contiguous(), lse.reshape(q.shape[1], len(q)))


def _attend_rest(
    q: Tensor, cache: Tensor, table: Tensor, first: int, length: int, scale: float
) -> tuple[Tensor, Tensor]:
    rows = cache.shape[3]
    pages = table[None, first // rows : (first + length) // rows]
    out, lse = attention.attend_committed(q[None], cache, length, scale=scale, table=pages)
    return out[0], lse[0]


def _attend_capped(
    q: Tensor,
    cache: Tensor,
    start: int,
    end: int,
    scale: float,
    table: Tensor,
    sinks: Tensor | None,
    softcap: float,
) -> Tensor:
    out, lengths = torch.zeros_like(q), torch.full((1,), start, dtype=torch.int32, device=q.device)
    options: dict[str, Any] = {"scale": scale, "table": table[None], "sinks": sinks, "softcap": softcap}
    out[: end - start] = attention.tree_attention(q[None, : end - start], cache, lengths, **options)[0]
    return out


def _taken(cache: Tensor, table: Tensor, first: int, rows: int, count: int, room: Tensor) -> Tensor:
    """Keys and values [2, Hkv, rows, d] of tokens from `first` on, in `room`; zeros after the first `count`."""
    _, _, heads, page, width = cache.shape
    out = room[: 2 * heads * rows * width].view(2, heads, rows, width)
    launch(_take_rows_kernel, (2 * heads, triton.cdiv(rows, TAKEN_ROWS)))(
        view(KeyValues, cache),
        table,
        out,
        first,
        rows,
        count,
        heads,
        D=width,
        STRIDE_T=cache.stride(3),
        PAGE=page,
        BLOCK_R=TAKEN_ROWS,
        BLOCK_D=triton.next_power_of_2(width),
        num_warps=4,
    )
    return out


def _added_up(parts: list[_Part], dtype: torch.dtype, sinks: Tensor | None = None) -> _Part:
    """The parts and the sinks as one part; in fp32, with the log-sum-exp, if others will be added."""
    first, (nodes, heads, width) = parts[0], parts[0].out.shape
    out = torch.empty_like(first.out, dtype=dtype)
    lse = torch.empty_like(first.lse) if dtype == torch.float32 else None
    padded = [*parts, *[parts[-1]] * (MAX_PARTS - len(parts))]
    launch(_add_parts_kernel, (heads, triton.cdiv(nodes, ADDED_ROWS)))(
        out,
        lse,
        *padded,
        sinks,
        len(parts),
        nodes,
        D=width,
        BLOCK_R=ADDED_ROWS,
        BLOCK_D=triton.next_power_of_2(width),
        num_warps=4,
        **NO_FMA_FUSION,
    )
    return _Part(out, first.lse if lse is None else lse)
