"""Weights in four bits with their scales, in the form of loaded models, which products read like matrices in 16
bits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

WORD = 8  # numbers in a word of int32
MIDDLE = 8  # the zero point of symmetric formats


class Packing(Enum):
    """The number that a word holds in its bits 4t to 4t + 3, t = 0 to 7; n is its row of [N, K], k its column."""

    ROWS = "rows"
    """int32 [N, K / 8]: word (n, c) holds k = 8c + t. compressed-tensors' packing."""
    ROWS_HIGH_FIRST = "rows_high_first"
    """int32 [N, K / 8]: word (n, c) holds k = 8c + (t ^ 1). Bytes with their high half first: bitsandbytes' packing."""
    COLUMNS = "columns"
    """int32 [K / 8, N]: word (c, n) holds k = 8c + t. The packing of GPTQ's checkpoints."""
    MARLIN = "marlin"
    """int32 [K / 16, 2N]: word w of a row c, of the 64 rows n from 64 * (w // 128) on, is for lane l = w % 128 // 4 of
    warp w % 4. With n0 = 16 * (w % 4) + l // 4 and k0 = 16c + 2 * (l % 4) it holds (n0, k0), (n0, k0 + 8),
    (n0 + 8, k0), (n0 + 8, k0 + 8), and the same at k0 + 1."""


@dataclass(frozen=True)
class NestedScale:
    """Scales that are themselves in eight bits: the i-th scale, in the order of [N, groups], is
    code[number] * scale[i // block] + offset.

    | name   | shape                           | dtype |
    |--------|---------------------------------|-------|
    | code   | [256]                           | fp32  |
    | scale  | [N * groups / block], rounded up | fp32  |
    | offset | []                              | fp32  |
    """

    code: Tensor
    scale: Tensor
    offset: Tensor
    block: int = 256

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.code, self.scale, self.offset


@dataclass(frozen=True)
class FourBitWeight:
    """A weight [N, K] as stored: (number - zero) * scale, or table[number] * scale. A group of columns of a row shares
    a scale and a zero.

    | name   | shape                 | dtype, layout                                                                |
    |--------|-----------------------|------------------------------------------------------------------------------|
    | packed | see Packing           | int32, contiguous                                                            |
    | scale  | [N, K / group]        | fp16, bf16 or fp32; uint8 with `nested`; any strides                         |
    | zero   | [N / 8, K / group]    | int32: word (r, g) holds the zeros of the rows 8r to 8r + 7; any strides;    |
    |        |                       | None: all are 8                                                              |
    | table  | [16]                  | fp32; None: numbers are used as they are                                     |

    With Packing.MARLIN, the scale of row 64i + 8j + l is at row 64i + 8l + j, and the zero of row 64i + 8j + l is in
    word (8i + l, g), at the place t of j in 0, 2, 4, 6, 1, 3, 5, 7. A product multiplies by the weight rounded as in
    its package's own dequantisation: to x's dtype, once. Raises ValueError for other shapes, dtypes, strides and
    devices.
    """

    packed: Tensor
    packing: Packing
    scale: Tensor
    group: int
    zero: Tensor | None = None
    table: Tensor | None = None
    nested: NestedScale | None = None

    def __post_init__(self) -> None:
        if self.packed.dtype != torch.int32 or self.packed.dim() != 2 or not self.packed.is_contiguous():
            raise ValueError(
                f"packed must be int32 [rows, words], contiguous, got {self.packed.dtype} {list(self.packed.shape)} "
                f"with strides {self.packed.stride()}"
            )
        rows, depth = self.shape
        unit = (64, 16) if self.packing is Packing.MARLIN else (1, WORD)
        if rows % unit[0] or depth % unit[1]:
            raise ValueError(f"[N, K] must be multiples of {list(unit)} in this packing, got [{rows}, {depth}]")
        if self.group < 1 or depth % self.group or self.group % WORD:
            raise ValueError(f"group must be a multiple of {WORD} that divides K = {depth}, got {self.group}")
        groups = depth // self.group
        kinds = (torch.uint8,) if self.nested else (torch.float16, torch.bfloat16, torch.float32)
        _check("scale", self.scale, (rows, groups), kinds)
        if self.zero is not None:
            if self.table is not None:
                raise ValueError("zero must be None with a table")
            _check("zero", self.zero, (-(-rows // WORD), groups), (torch.int32,))
        if self.table is not None:
            _check("table", self.table, (16,), (torch.float32,))
        if self.nested is not None:
            if self.packing is Packing.MARLIN:
                raise ValueError("nested must be None in Marlin's packing, which has another order of scales")
            _check("nested.code", self.nested.code, (256,), (torch.float32,))
            _check("nested.scale", self.nested.scale, (-(-rows * groups // self.nested.block),), (torch.float32,))
            _check("nested.offset", self.nested.offset, (), (torch.float32,))
        if strangers := [tensor.device for tensor in self.tensors if tensor.device != self.device]:
            raise ValueError(f"all tensors must be on the device of packed ({self.device}), got {strangers[0]}")

    @property
    def shape(self) -> torch.Size:
        rows, words = self.packed.shape
        if self.packing is Packing.COLUMNS:
            return torch.Size((words, rows * WORD))
        if self.packing is Packing.MARLIN:
            return torch.Size((words // 2, rows * 16))
        return torch.Size((rows, words * WORD))

    @property
    def reads_word_order(self) -> bool:
        """Whether products may read their input in the order of its words: see runtime/row_formats.py."""
        packing = Packing.ROWS if self.table is None else Packing.ROWS_HIGH_FIRST
        return self.packing is packing and self.has_whole_units

    @property
    def has_whole_units(self) -> bool:
        """Whether the columns make whole steps on Hopper: see ops/linear/hopper_four_bits.py."""
        return self.group % 32 == 0 and self.shape[1] % 128 == 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the words."""
        return self.packed.dtype

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that one product reads."""
        own = (self.packed, self.scale, self.zero, self.table)
        return tuple(part for part in own if part is not None) + (self.nested.tensors if self.nested else ())

    def numbers(self) -> Tensor:
        """The packed numbers, 0 to 15: uint8 [N, K]."""
        rows, depth = self.shape
        if self.packing is Packing.MARLIN:
            found = unpacked(self.packed).view(depth // 16, rows // 64, 8, 4, 4, 2, 2, 2)
            # c, tile, lane // 4, lane % 4, warp; then t by its bits: the column's last, n + 8, k + 8
            return found.permute(1, 4, 6, 2, 0, 7, 3, 5).reshape(rows, depth)
        if self.packing is Packing.COLUMNS:
            return unpacked(self.packed.T.contiguous()).view(rows, depth)
        found = unpacked(self.packed)
        if self.packing is Packing.ROWS_HIGH_FIRST:
            found = found.view(rows, depth // 2, 2).flip(-1)
        return found.reshape(rows, depth)

    def scales(self) -> Tensor:
        """The scales [N, K / group], in the order of rows; fp32 if they were nested."""
        if self.nested is not None:
            places = torch.arange(self.scale.numel(), device=self.device) // self.nested.block
            found = self.nested.code[self.scale.reshape(-1).long()] * self.nested.scale[places] + self.nested.offset
            return found.view(self.scale.shape)
        if self.packing is Packing.MARLIN:
            return self.scale.unflatten(0, (-1, 8, 8)).transpose(1, 2).reshape(self.scale.shape)
        return self.scale

    def zeros(self) -> Tensor | None:
        """The zeros, 0 to 15, in the order of rows: uint8 [N, K / group]; None if all are 8."""
        if self.zero is None:
            return None
        rows = unpacked(self.zero.T.contiguous())  # [groups, N], or some more
        if self.packing is Packing.MARLIN:
            rows = rows.unflatten(1, (-1, 8, 2, 4)).permute(0, 1, 4, 3, 2).flatten(1)  # of t: by its halves
        return rows.T[: len(self)]

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight itself, [N, K], rounded to this dtype once."""
        scale = self.scales().float().repeat_interleave(self.group, 1)
        if self.table is not None:
            return (self.table[self.numbers().long()] * scale).to(dtype)
        zero = self.zeros()
        offset: Tensor | int = MIDDLE if zero is None else zero.to(torch.int32).repeat_interleave(self.group, 1)
        return ((self.numbers().to(torch.int32) - offset).float() * scale).to(dtype)


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        wanted = " or ".join(map(str, dtypes))
        raise ValueError(f"{name} must be {wanted} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")


def unpacked(words: Tensor) -> Tensor:
    """The numbers in words, lowest bits first: int32 [..., n] -> uint8 [..., 8n]."""
    shifts = torch.arange(0, 4 * WORD, 4, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8).flatten(-2)


def packed(numbers: Tensor) -> Tensor:
    """Numbers 0 to 15 as words, the first in the lowest bits: [..., 8n] -> int32 [..., n]."""
    parts = numbers.to(torch.int32).unflatten(-1, (-1, WORD))
    words = parts[..., 0].clone()
    for t in range(1, WORD):
        words |= parts[..., t] << (4 * t)  # the last one may become the sign
    return words


def quantised(weight: Tensor, group: int = 128) -> FourBitWeight:
    """A matrix [N, K] rounded to the nearest multiples -8 to 7 of a scale for each group of columns of a row, without
    zeros, packed by rows.

    The scale is the group's largest magnitude / 7.5, in the weight's dtype; if all numbers are zero, 1. Raises
    ValueError for a weight that is not finite, and if K is not a multiple of the group.
    """
    rows, depth = weight.shape
    if depth % group:
        raise ValueError(f"K must be a multiple of the group, {group}, got {depth}")
    wide = weight.detach().float().view(rows, depth // group, group)
    if not wide.isfinite().all():
        raise ValueError("a weight with infinities or NaN cannot be quantised")
    largest = wide.abs().amax(-1)
    scale = torch.where(largest > 0, (largest / 7.5).clamp(min=torch.finfo(weight.dtype).tiny), 1.0).to(weight.dtype)
    numbers = (wide / scale.float()[..., None]).round().clamp(-MIDDLE, MIDDLE - 1) + MIDDLE
    return FourBitWeight(packed(numbers.view(rows, depth)), Packing.ROWS, scale, group)
