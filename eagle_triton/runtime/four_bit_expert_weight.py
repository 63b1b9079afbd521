"""The weights of a mixture's experts in four bits, as compressed-tensors publishes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_triton.runtime.four_bit_weight import MIDDLE, WORD, unpacked

UNIT = 32  # columns of a row that a kernel reads at once
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class FourBitExpertWeight:
    """Weights [E, N, K] of E experts as stored in the model: (number - zero) * scale, rounded to x's dtype once.

    | name   | shape                             | dtype, layout                                                    |
    |--------|-----------------------------------|------------------------------------------------------------------|
    | packed | [E, N, K / 8], K a multiple of 32 | int32: word c of a row holds number 8c + t in its bits 4t to     |
    |        |                                   | 4t + 3; contiguous                                               |
    | scales | [E, N, K / group]                 | as x: bf16, fp16 or fp32; groups of 32, 64, 128, 256, ... or     |
    |        |                                   | all K columns of a row                                           |
    | zeros  | [E, N / 8, K / group], rounded up | int32: word (r, g) holds the zeros of the rows 8r to 8r + 7;     |
    |        |                                   | None: all are 8                                                  |

    The operations of mixtures take it instead of a tensor. Raises ValueError for other shapes, dtypes, strides and
    devices.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def __post_init__(self) -> None:
        packed, scales = self.packed, self.scales
        if packed.dtype != torch.int32 or packed.dim() != 3 or packed.shape[2] * WORD % UNIT:
            raise ValueError(
                f"packed must be int32 [E, N, K / {WORD}], K a multiple of {UNIT}, got {packed.dtype} "
                f"{list(packed.shape)}"
            )
        if not packed.is_contiguous():
            raise ValueError(f"packed must be contiguous, got strides {packed.stride()}")
        experts, rows, depth = self.shape
        if scales.dtype not in FLOATS or scales.dim() != 3 or scales.shape[:2] != packed.shape[:2]:
            raise ValueError(
                f"scales must be a float [{experts}, {rows}, K / group], got {scales.dtype} {list(scales.shape)}"
            )
        groups = scales.shape[2]
        if not groups or depth % groups or not (self.group in (32, 64, depth) or self.group % 128 == 0):
            raise ValueError(
                f"a group must be 32 or 64 columns, a multiple of 128, or all {depth}, got {groups} groups of a row"
            )
        words = [experts, -(-rows // WORD), groups]
        if self.zeros is not None and (self.zeros.dtype != torch.int32 or list(self.zeros.shape) != words):
            raise ValueError(f"zeros must be int32 {words}, got {self.zeros.dtype} {list(self.zeros.shape)}")
        if strangers := [tensor.device for tensor in self.tensors if tensor.device != self.device]:
            raise ValueError(f"all tensors must be on the device of packed ({self.device}), got {strangers[0]}")

    @property
    def shape(self) -> torch.Size:
        experts, rows, words = self.packed.shape
        return torch.Size((experts, rows, words * WORD))

    @property
    def group(self) -> int:
        """Columns of a row that share a scale."""
        return self.shape[2] // self.scales.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the words."""
        return self.packed.dtype

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def bytes(self) -> Tensor:
        """The words as bytes, with two numbers each: uint8 [E, N, K / 2]."""
        return self.packed.view(torch.uint8)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that one product reads."""
        return (self.packed, self.scales) if self.zeros is None else (self.packed, self.scales, self.zeros)

    def dequantised(self, dtype: torch.dtype, experts: Tensor | None = None) -> Tensor:
        """The weights themselves, [E, N, K]; experts: of these experts only, int64 [n]; rounded once."""
        packed, scales, zeros = self.packed, self.scales, self.zeros
        if experts is not None:
            packed, scales = packed.index_select(0, experts), scales.index_select(0, experts)
            zeros = None if zeros is None else zeros.index_select(0, experts)
        numbers = unpacked(packed).unflatten(2, (scales.shape[2], self.group)).float()
        middle = MIDDLE if zeros is None else unpacked(zeros.mT).mT[:, : self.shape[1], :, None]
        return ((numbers - middle) * scales[..., None].float()).flatten(2).to(dtype)
