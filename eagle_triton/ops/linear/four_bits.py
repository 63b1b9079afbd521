"""Products with weights of four bits (FourBitWeight). No copy of a weight is kept.

Every product multiplies by the same numbers, whatever its rows: (number - zero) * scale, or table[number] * scale, is
computed in fp32 and rounded to x's dtype, and the sums are in fp32. On Hopper `hopper_four_bits.py` takes up to
MAX_ORDERED_ROWS rows. This file's kernel makes other products: it converts a tile of the weight on its way to the
tensor cores. Above MAX_STREAMED rows of 16 bits cuBLAS multiplies temporary copies of some rows of the weight at a
time. `dispatch.py` takes the calls.

| name   | shape                        | dtype, layout                                            |
|--------|------------------------------|----------------------------------------------------------|
| x      | [rows, K]                    | fp16, bf16 or fp32; a row is contiguous                  |
| weight | [N, K]                       | see FourBitWeight: all of its packings, scales and zeros |
| bias   | [N]                          | as x                                                     |
| out    | [rows, N], [splits, rows, N] | as x; fp32 if the splits' sums stay apart                |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.ops.layers import swiglu
from eagle_triton.ops.layers.values import contiguous_rows
from eagle_triton.ops.linear.settings import (
    MAX_ROWS,
    MAX_STREAMED,
    STACKED,
    Portable,
    Streaming,
    has_descriptors,
    portable_settings,
)
from eagle_triton.ops.linear.side_by_side import as_kernels_take, empty_output, parts_of
from eagle_triton.ops.views import Matrix, Rows, view
from eagle_triton.runtime.fallback import gluon_module
from eagle_triton.runtime.four_bit_weight import FourBitWeight, Packing
from eagle_triton.runtime.gpu import compute_capability
from eagle_triton.runtime.launch import NO_FMA_FUSION, launch
from eagle_triton.runtime.row_formats import (
    MAX_ORDERED_ROWS,
    ProductRows,
    RowFormat,
    WordOrdered,
    has_format,
    whole_of,
)
from eagle_triton.runtime.split_sums import SplitSums, total_of

COPIED = 4096  # rows of a weight that are copied at a time


class Nested(NamedTuple):
    """A NestedScale. groups: of a row; block: scales that share a scale."""

    code_ptr: Tensor
    scale_ptr: Tensor
    offset_ptr: Tensor
    groups: int
    block: int


class Packed(NamedTuple):
    """A FourBitWeight. words: [N, words of a row], or with Packing.MARLIN as they are."""

    words: Matrix
    scale: Matrix
    zero: Matrix | None
    table_ptr: Tensor | None
    nested: Nested | None
    group: int

    @staticmethod
    def of(weight: FourBitWeight) -> Packed:
        words, nested = weight.packed, None
        if weight.packing is Packing.COLUMNS:
            words = words.T
        if weight.nested is not None:
            found = weight.nested
            nested = Nested(found.code, found.scale, found.offset, weight.scale.shape[1], found.block)
        scale, zero = view(Matrix, weight.scale), view(Matrix, weight.zero)
        return Packed(view(Matrix, words), scale, zero, weight.table, nested, weight.group)


@triton.jit
def _weight_tile(
    weight,
    n,
    k,
    cols,
    depth,
    DTYPE: tl.constexpr,
    PACKING: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """[N, BLOCK_K] of a weight (Packed) for rows n [N] int32, from column k on, rounded to DTYPE once.

    Rows from `cols` on and columns from `depth` on are finite. ONE_GROUP: the tile's columns belong to one group.
    Everything is [N, C] for C words of a row until their numbers are joined, so that a thread keeps what it has loaded.
    """
    ROWS: tl.constexpr = n.shape[0]
    n, c = n[:, None], (k // 8 + tl.arange(0, BLOCK_K // 8))[None, :]
    of_words = n < cols if EVEN_K else (n < cols) & (c < depth // 8)
    of_scales = n < cols if ONE_GROUP else of_words
    group = k // weight.group if ONE_GROUP else c * 8 // weight.group
    words_ptr, shift = weight.words.ptr + n * weight.words.row + c * weight.words.item, 0
    row, of_zero, place = n, n // 8, n % 8
    if PACKING == "marlin":
        words_ptr = weight.words.ptr + c // 2 * weight.words.row + n // 64 * 128 + n % 8 * 16 + n // 16 % 4
        shift = n // 8 % 2 * 8 + c % 2 * 4
        row, of_zero, place = n // 64 * 64 + n % 8 * 8 + n // 8 % 8, n // 64 * 8 + n % 8, n // 8 % 2 * 4 + n // 16 % 4
    scale = tl.load(weight.scale.ptr + row * weight.scale.row + group * weight.scale.item, mask=of_scales, other=0)
    if weight.nested is not None:
        outer = (row * weight.nested.groups + group) // weight.nested.block
        scale = tl.load(weight.nested.code_ptr + scale.to(tl.int32))
        scale *= tl.load(weight.nested.scale_ptr + outer, mask=of_scales, other=0)
        scale += tl.load(weight.nested.offset_ptr)
    scale, zero = scale.to(tl.float32), 8
    if weight.zero is not None:
        zero_ptr = weight.zero.ptr + of_zero * weight.zero.row + group * weight.zero.item
        zero = tl.load(zero_ptr, mask=of_scales, other=0) >> (place * 4) & 15
    v0, v1 = _two_columns(words_ptr, of_words, shift, scale, zero, weight.table_ptr, 0, PACKING)
    v2, v3 = _two_columns(words_ptr, of_words, shift, scale, zero, weight.table_ptr, 2, PACKING)
    v4, v5 = _two_columns(words_ptr, of_words, shift, scale, zero, weight.table_ptr, 4, PACKING)
    v6, v7 = _two_columns(words_ptr, of_words, shift, scale, zero, weight.table_ptr, 6, PACKING)
    even, odd = tl.join(tl.join(v0, v4), tl.join(v2, v6)), tl.join(tl.join(v1, v5), tl.join(v3, v7))
    # rounded after the reshape, because Triton 3.6 does not compile a product of what is reshaped for sm_100
    return tl.reshape(tl.join(even, odd), (ROWS, BLOCK_K)).to(DTYPE)


@triton.jit
def _two_columns(words_ptr, mask, shift, scale, zero, table_ptr, T: tl.constexpr, PACKING: tl.constexpr):
    """The weight's columns 8c + T and 8c + T + 1, fp32 [N, C] each."""
    if PACKING == "marlin":
        words = tl.load(words_ptr + T * 2, mask=mask, other=0)
        first, second = words >> shift, words >> (shift + 16)
    else:
        words = tl.load(words_ptr, mask=mask, other=0)
        first, second = words >> (4 * T), words >> (4 * T + 4)
        if PACKING == "rows_high_first":
            first, second = second, first
    return _value(first, zero, table_ptr) * scale, _value(second, zero, table_ptr) * scale


@triton.jit
def _value(number, zero, table_ptr):
    """What the lowest four bits stand for, before their scale."""
    number = number & 15
    return tl.load(table_ptr + number) if table_ptr is not None else (number - zero).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x,
    weight,
    bias_ptr,
    out,
    rows,
    cols,
    depth,
    PACKING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Grid (column tiles, splits, row tiles): a program makes one split of one tile of the product.

    The first split adds the bias.
    """
    col, split, row = tl.program_id(0) * BLOCK_N, tl.program_id(1), tl.program_id(2) * BLOCK_M
    offs_n = col + tl.arange(0, BLOCK_N)
    offs_m = row + tl.arange(0, BLOCK_M)
    of_x = tl.minimum(offs_m, rows - 1).to(tl.int64)
    steps = tl.cdiv(depth, BLOCK_K)
    per_split = tl.cdiv(steps, SPLITS)
    first = split * per_split
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first, tl.minimum(first + per_split, steps)):
        k = step * BLOCK_K
        offs_k = k + tl.arange(0, BLOCK_K)
        x_ptr = x.ptr + of_x[:, None] * x.row + offs_k[None, :]
        x_tile = tl.load(x_ptr, mask=None if EVEN_K else (offs_k < depth)[None, :], other=None if EVEN_K else 0.0)
        w_tile = _weight_tile(
            weight, offs_n, k, cols, depth, x.ptr.dtype.element_ty, PACKING, BLOCK_K, ONE_GROUP, EVEN_K
        )
        acc = tl.dot(w_tile, x_tile.T, acc, input_precision="ieee")
    if bias_ptr is not None:
        of_bias = tl.where(split == 0, cols, 0)
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < of_bias, other=0.0).to(tl.float32)[:, None]
    out_ptr = out.ptr + split.to(tl.int64) * rows * out.row
    mask = (offs_m < rows)[:, None] & (offs_n < cols)[None, :]
    out_ptr += offs_m.to(tl.int64)[:, None] * out.row + offs_n[None, :]
    tl.store(out_ptr, acc.T.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dequantise_kernel(
    weight,
    out_ptr,
    first,
    rows,
    depth,
    PACKING: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Grid (row tiles, column tiles): a program makes one tile of the weight's rows from `first` on."""
    k = tl.program_id(1) * BLOCK_K
    offs_n, offs_k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), k + tl.arange(0, BLOCK_K)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    tile = _weight_tile(weight, first + offs_n, k, first + rows, depth, kind, PACKING, BLOCK_K, ONE_GROUP, EVEN_K)
    mask = (offs_n < rows)[:, None] & (offs_k < depth)[None, :]
    tl.store(out_ptr + offs_n.to(tl.int64)[:, None] * depth + offs_k[None, :], tile, mask=mask)


def dequantise(weight: FourBitWeight, out: Tensor, first: int = 0) -> None:
    """Write the weight's rows from `first` on, rounded once, into out [n, K], contiguous, in its dtype."""
    (rows, depth), block_k = out.shape, 256
    launch(_dequantise_kernel, (triton.cdiv(rows, 16), triton.cdiv(depth, block_k)))(
        Packed.of(weight),
        out,
        first,
        rows,
        depth,
        weight.packing.value,
        16,
        block_k,
        _in_one_group(weight, block_k),
        depth % block_k == 0,
        num_warps=4,
        **NO_FMA_FUSION,
    )


def linear_stack_four_bits(
    x: ProductRows,
    weights: Sequence[FourBitWeight],
    biases: Sequence[Tensor | None],
    *,
    keep_splits: bool = False,
    settings: Streaming | None = None,
) -> tuple[Tensor | SplitSums, ...]:
    """Products of the same rows, on Hopper four to a launch. dispatch.linear_stack has checked the arguments."""
    rows, on_hopper = _rows(x, weights)
    some = STACKED if on_hopper else 1
    outs: list[Tensor | SplitSums] = []
    for i in range(0, len(weights), some):
        part = weights[i : i + some]
        cols = [len(weight) for weight in part]
        if some == 1:
            rows, on_hopper = _rows(x, part)
        out = _multiply(rows, on_hopper, part, biases[i : i + some], cols, keep_splits, settings)
        outs += parts_of(out, cols, x.shape[:-1], x.dtype)
    return tuple(outs)


def linear_swiglu_four_bits(
    x: ProductRows,
    gate: FourBitWeight,
    up: FourBitWeight,
    activation: str,
    *,
    row_format: RowFormat | None = None,
    settings: Streaming | None = None,
) -> ProductRows:
    """activation(x @ gate.T) * (x @ up.T). dispatch.linear_swiglu has checked the arguments."""
    (rows, on_hopper), cols = _rows(x, (gate, up)), len(gate)
    if not on_hopper:
        gated, raised = linear_stack_four_bits(x, (gate, up), (None, None), settings=settings)
        return swiglu(total_of(gated), total_of(raised), activation)
    module, values = _hopper(), empty_output(x, [cols], 1)
    shape = torch.Size((*x.shape[:-1], cols))
    ordered = has_format(values, row_format) and row_format is RowFormat.WORD_ORDER
    if values.numel():
        settings = settings or module.settings_for(len(values), (cols, cols), x.shape[-1], True)
        out = WordOrdered(values, shape) if ordered else values
        module.linear_swiglu_hopper_four_bits(rows, gate, up, out, settings, activation)
    return WordOrdered(values, shape) if ordered else values.view(shape)


def _rows(x: ProductRows, weights: Sequence[FourBitWeight]) -> tuple[Tensor, bool]:
    """x as the kernel for these weights reads it, [rows, K], and whether that kernel is of hopper_four_bits.py."""
    module = _hopper() if compute_capability(x.device) == (9, 0) else None
    on_hopper = module is not None and module.takes(x, weights)
    if on_hopper and weights[0].reads_word_order:
        return (x if isinstance(x, WordOrdered) else WordOrdered.of(whole_of(x))).values, True
    rows = contiguous_rows(whole_of(x))
    if on_hopper and not has_descriptors([rows]):
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows, on_hopper


def _multiply(
    matrix: Tensor,
    on_hopper: bool,
    weights: Sequence[FourBitWeight],
    biases: Sequence[Tensor | None],
    cols: list[int],
    keep_splits: bool,
    settings: Streaming | None,
) -> Tensor:
    """One launch: [rows, N of all weights], or fp32 [splits, rows, N of all weights]."""
    rows, depth = matrix.shape
    if on_hopper:
        module = _hopper()
        if settings is None:
            settings = module.settings_for(rows, tuple(cols), depth, False)
            settings = settings if keep_splits else settings._replace(splits=1)
        elif settings.splits > 1 and not keep_splits:
            raise ValueError("settings with splits need keep_splits")
        out = empty_output(matrix, cols, settings.splits)
        if out.numel():
            module.linear_hopper_four_bits(matrix, *as_kernels_take(weights, cols, biases), out, settings)
        return out
    if settings is not None:
        raise ValueError(
            f"settings for weights of four bits need a Hopper GPU, x of 16 bits, at most {MAX_ORDERED_ROWS} rows, and "
            f"weights that hopper_four_bits.py takes, got {settings} for {matrix.dtype} {tuple(matrix.shape)} and "
            f"weights in {weights[0].packing}"
        )
    if rows > MAX_STREAMED and matrix.element_size() == 2:
        return _by_copies(matrix, weights[0], biases[0])
    portable = settings_for(rows, cols[0], depth, keep_splits)
    out = empty_output(matrix, cols, portable.splits)
    if out.numel():
        _launch_portable(matrix, weights[0], biases[0], out, portable)
    return out


def settings_for(rows: int, cols: int, depth: int, keep_splits: bool) -> Portable:
    """portable_settings with tiles of 128 columns for few rows, so that each row of a weight is loaded by 64 bytes, and
    with larger tiles for many rows, since each tile of rows converts the weight anew."""
    use = portable_settings(rows, cols, depth, keep_splits)
    return use._replace(block_k=128) if rows <= MAX_ROWS else use._replace(block_m=128, block_n=128, warps=8)


@torch.no_grad()
def _by_copies(matrix: Tensor, weight: FourBitWeight, bias: Tensor | None) -> Tensor:
    """The product by cuBLAS, with one copy after another of some rows of the weight."""
    cols, depth = weight.shape
    out = empty_output(matrix, [cols], 1)
    copy = matrix.new_empty(min(COPIED, cols), depth)
    for first in range(0, cols, COPIED):
        part = copy[: cols - first]
        dequantise(weight, part, first)
        columns = slice(first, first + len(part))
        if bias is None:
            torch.mm(matrix, part.T, out=out[:, columns])
        else:
            torch.addmm(bias[columns], matrix, part.T, out=out[:, columns])
    return out


def _launch_portable(
    matrix: Tensor, weight: FourBitWeight, bias: Tensor | None, out: Tensor, settings: Portable
) -> None:
    (rows, depth), cols = matrix.shape, len(weight)
    block_k = settings.block_k if matrix.element_size() == 2 else 32
    grid = (triton.cdiv(cols, settings.block_n), settings.splits, triton.cdiv(rows, settings.block_m))
    launch(_linear_kernel, grid)(
        Rows.of(matrix),
        Packed.of(weight),
        None if bias is None else bias.contiguous(),
        Rows.of(out),
        rows,
        cols,
        depth,
        weight.packing.value,
        settings.block_m,
        settings.block_n,
        block_k,
        settings.splits,
        _in_one_group(weight, block_k),
        depth % block_k == 0,
        num_warps=settings.warps,
        num_stages=settings.stages,
        **NO_FMA_FUSION,
    )


def _in_one_group(weight: FourBitWeight, block_k: int) -> bool:
    """Whether each tile of `block_k` columns has the scales of one group."""
    return weight.group % block_k == 0 or weight.group == weight.shape[1]


def has_fast_kernel(weight: FourBitWeight, dtype: torch.dtype) -> bool:
    """Whether few rows of this dtype are multiplied by hopper_four_bits.py, on this weight's device."""
    module = _hopper() if compute_capability(weight.device) == (9, 0) else None
    return module is not None and module.reads(weight, dtype)


def _hopper() -> Any:
    return gluon_module("eagle_triton.ops.linear.hopper_four_bits")
