"""Launch settings of products of few rows: a table of measured ones, and a rule for other shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from eagle_triton.runtime.gpu import compute_capability


class Settings(NamedTuple):
    """How one product is launched. Four warps are one warpgroup of Hopper's tensor cores."""

    block_n: int
    block_k: int
    splits: int = 1  # of K; linear_swiglu has no splits
    warps: int = 4
    stages: int = 4
    swap: bool = False  # weights as the left operand
    tma: bool = True  # descriptors, where the hardware and the tensors allow them


class Streaming(NamedTuple):
    """How one product is launched: tiles of [block_n, block_k] of the weights, `splits` of K, and the number of tiles
    of the weights and of x in shared memory. `swap`: the weights are the left operand; `warps`: a multiple of four."""

    block_n: int
    block_k: int
    splits: int
    swap: bool
    w_stages: int
    x_stages: int
    warps: int = 4


class Wide(NamedTuple):
    """How one product of hopper_many_rows.py is launched: the steps of K in shared memory, and the steps for which
    weights are loaded before x is ready."""

    stages: int
    prefetch: int


class Portable(NamedTuple):
    """How a product with quantised weights is launched without Gluon: tiles of [block_n, block_k] of the weights, and
    `splits` of K."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int


# One H200, Triton 3.6, bf16: (rows up to, rows of each weight, K). The comments have our time in µs, our time with
# keep_splits if K is split, and the time of cuBLAS on the concatenated weights (tools/tune_linear.py: graph replay,
# weights larger than L2).
_HOPPER = {
    (16, (4096, 1024, 1024), 4096): Settings(64, 128, 2, 4, 4, True),  # qkv 15.5, 14.4; 15.8
    (16, (4096,), 4096): Settings(64, 256, 2, 4, 3, True),  # o 11.3, 10.3; 13.3
    (16, (14336, 14336), 4096): Settings(128, 128, 1, 4, 3, True),  # gate and up 56.3; 56.6 without SwiGLU
    (16, (4096,), 14336): Settings(64, 256, 2, 4, 4, True),  # down 30.6, 29.7; 32.5
    (16, (128256,), 4096): Settings(128, 128, 1, 4, 3, True),  # head 237; 246
    (16, (4096, 1024, 1024), 8192): Settings(64, 128, 4, 4, 3, True),  # draft qkv 27.6, 26.3; 27.7
    (16, (32000,), 4096): Settings(128, 128, 1, 4, 3, True),  # draft head 62.0; 64.9
    (16, (4096,), 8192): Settings(64, 128, 4, 4, 4, True),  # MTP's fc, streamed 17.7; 21.9
    (16, (4096, 512, 512), 2880): Settings(64, 128, 4, 4, 4, True),  # qkv of gpt-oss-20b; by its streamed time
    (16, (4096, 512, 512), 2048): Settings(64, 128, 4, 4, 4, True),  # qkv of Qwen3-30B-A3B; likewise
    (64, (4096, 1024, 1024), 4096): Settings(32, 128, 2, 4, 3),  # 17.8, 15.9; 16.0
    (64, (4096,), 4096): Settings(32, 128, 2, 4, 4),  # 12.4, 10.9; 11.7
    (64, (14336, 14336), 4096): Settings(128, 64, 1, 4, 4),  # 59.3; 61.2 without SwiGLU
    (64, (4096,), 14336): Settings(64, 128, 2, 4, 4),  # 33.7, 32.2; 35.6
    (64, (3840,), 15360): Settings(64, 128, 4, 4, 4),  # down of Gemma 3 12B; with two splits 36.2, 37.4
    (64, (128256,), 4096): Settings(128, 128, 1, 4, 4),  # 249; 274
    (64, (4096, 1024, 1024), 8192): Settings(64, 128, 2, 4, 3),  # 30.8, 28.8; 28.7
    (64, (32000,), 4096): Settings(128, 64, 1, 4, 4),  # 64.9; 67.7
}
MAX_ROWS = 64  # more rows go to cuBLAS, hopper.py or hopper_many_rows.py
MAX_STREAMED = 256  # rows of a product by hopper.py
MAX_WIDE = 512  # rows of a product by hopper_many_rows.py, for more rows than WIDE_TILE
WIDE_TILE = 128  # rows and columns of its tiles
STACKED = 4  # weights per launch
_PROGRAMS = 112  # K is split until there are this many programs
MULTIPROCESSORS = 132  # of the measured GPU


def launch_settings(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    cols: tuple[int, ...],
    depth: int,
    fused: bool = False,
    in_draft_pass: bool = False,
) -> Settings | None:
    """Settings for a product of `rows` rows with weights [n, depth] for n in `cols`; None: not with these kernels.

    `fused`: each program reads all weights (linear_swiglu); otherwise their tiles are side by side. In fp32, which uses
    no tensor cores, and for many rows, the time is not bound by reading the weights, so cuBLAS multiplies. A draft pass
    still uses these kernels, to have the megakernel's bits.
    """
    return settings_on(compute_capability(device), dtype, rows, cols, depth, fused, in_draft_pass)


def settings_on(
    capability: tuple[int, int],
    dtype: torch.dtype,
    rows: int,
    cols: tuple[int, ...],
    depth: int,
    fused: bool = False,
    in_draft_pass: bool = False,
) -> Settings | None:
    """launch_settings for a device of this compute capability."""
    if rows > MAX_ROWS or (dtype.itemsize > 2 and not in_draft_pass):
        return None
    if dtype.itemsize > 2:
        settings = Settings(32, 32, stages=2, tma=False)
    elif capability not in ((9, 0), (10, 0), (10, 3)):
        settings = Settings(32 if fused else 64, 64, stages=3)  # not measured, but small enough for any device
    else:
        few = rows <= 16
        if (16 if few else 64, cols, depth) in _HOPPER:
            return _HOPPER[16 if few else 64, cols, depth]
        wide = tiles_of(cols, 128, fused) >= _PROGRAMS
        settings = Settings(
            128 if wide else 64, 64 if wide and not few else 128, stages=3 if wide and few else 4, swap=few
        )
    tiles, splits = tiles_of(cols, settings.block_n, fused), 1
    while not fused and splits < 8 and tiles * splits < _PROGRAMS and depth >= 8 * splits * settings.block_k:
        splits *= 2
    return settings._replace(splits=splits)


def portable_settings(rows: int, cols: int, depth: int, keep_splits: bool) -> Portable:
    """Settings for quantised weights without Gluon: not measured, but small enough for any device."""
    block_m = min(max(16, triton.next_power_of_2(rows)), 64)
    tiles, splits = triton.cdiv(cols, 64), 1
    while keep_splits and splits < 8 and tiles * splits < _PROGRAMS and depth >= 1024 * splits:
        splits *= 2
    return Portable(block_m, 64, 64, splits, 4, 3)


def block_m_of(rows: int) -> int:
    """The row tile: the next power of two from 16 (the tensor cores' minimum) to 128."""
    return min(max(16, triton.next_power_of_2(rows)), 128)


def tiles_of(cols: Sequence[int], block_n: int, fused: bool = False) -> int:
    """Column tiles of products with `cols` columns each; `fused`: only of the first, since its programs read all."""
    return sum(triton.cdiv(n, block_n) for n in (cols[:1] if fused else cols))


def has_descriptors(tensors: Sequence[Tensor]) -> bool:
    """Whether these matrices can have TMA descriptors: Hopper and newer, 16 bits, aligned rows."""
    return compute_capability(tensors[0].device) >= (9, 0) and all(
        tensor.element_size() == 2
        and tensor.data_ptr() % 16 == 0
        and tensor.stride(-2) % 8 == 0
        and (tensor.stride(-2) > 0 or not tensor.numel())  # an expanded row has stride 0
        for tensor in tensors
    )


def can_stream(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels of hopper.py can take these matrices: on Hopper, with descriptors."""
    return compute_capability(tensors[0].device) == (9, 0) and has_descriptors(tensors)


def descriptors(tensors: list[Tensor], block_m: int, settings: Settings) -> list[TensorDescriptor | None]:
    """TMA descriptors of x and the weights, or None for each where they cannot be used."""
    if not (settings.tma and has_descriptors(tensors)):
        return [None] * len(tensors)
    return [
        TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [block, settings.block_k])
        for tensor, block in zip(tensors, [block_m] + [settings.block_n] * (len(tensors) - 1), strict=True)
    ]
