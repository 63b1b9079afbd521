"""The weights of a mixture's experts in MXFP4, gpt-oss's published format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

GROUP = 32  # columns of a row that share a scale


@dataclass(frozen=True)
class Mxfp4Weight:
    """Weights [E, N, K] of E experts: e2m1 * 2^(scale - 127), which bf16 and fp32 hold exactly.

    | name   | shape             | dtype, layout                                                       |
    |--------|-------------------|---------------------------------------------------------------------|
    | blocks | [E, N, K / 32, 16] | uint8: the numbers 2t and 2t + 1 of 32, the first in the low half;  |
    |        |                   | a row is contiguous, and aligned to 4 bytes                         |
    | scales | [E, N, K / 32]    | uint8, e8m0; a row is contiguous                                    |

    The operations of mixtures take it instead of a tensor. Raises ValueError for other shapes, dtypes, strides and
    devices.
    """

    blocks: Tensor
    scales: Tensor
    group: ClassVar[int] = GROUP

    def __post_init__(self) -> None:
        blocks, scales = self.blocks, self.scales
        if blocks.dtype != torch.uint8 or blocks.dim() != 4 or blocks.shape[3] != GROUP // 2:
            raise ValueError(
                f"blocks must be uint8 [E, N, K / {GROUP}, {GROUP // 2}], got {blocks.dtype} {list(blocks.shape)}"
            )
        if scales.dtype != torch.uint8 or scales.shape != blocks.shape[:3]:
            raise ValueError(f"scales must be uint8 {list(blocks.shape[:3])}, got {scales.dtype} {list(scales.shape)}")
        if blocks.stride()[2:] != (GROUP // 2, 1) or scales.stride(2) != 1:
            raise ValueError(f"rows must be contiguous, got strides {blocks.stride()} and {scales.stride()}")
        if blocks.data_ptr() % 4 or any(stride % 4 for stride in blocks.stride()[:2]):
            raise ValueError(f"rows of blocks must be aligned to 4 bytes, got strides {blocks.stride()}")
        if scales.device != blocks.device:
            raise ValueError(f"scales must be on the device of blocks ({blocks.device}), got {scales.device}")

    @property
    def shape(self) -> torch.Size:
        experts, rows, groups, _ = self.blocks.shape
        return torch.Size((experts, rows, groups * GROUP))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the blocks."""
        return self.blocks.dtype

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def bytes(self) -> Tensor:
        """The blocks as rows of bytes, with two numbers each: uint8 [E, N, K / 2]."""
        return self.blocks.flatten(2)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """All tensors that one product reads."""
        return self.blocks, self.scales

    def dequantised(self, dtype: torch.dtype, experts: Tensor | None = None) -> Tensor:
        """The weights themselves, [E, N, K]; experts: of these experts only, int64 [n]."""
        blocks, scales = self.tensors
        if experts is not None:
            blocks, scales = blocks.index_select(0, experts), scales.index_select(0, experts)
        numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()
        small = (((numbers & 7) << 22) | ((numbers & 8) << 28)).view(torch.float32)  # without the bias of exponents
        power = (scales.int() << 23).clamp(min=1 << 22).view(torch.float32)  # the least is not a normal number
        return (small * 2.0**126 * power[..., None]).flatten(2).to(dtype)
