"""Weights in eight bits with their scales, which products read like matrices in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128  # rows and columns of a weight that share a scale
MAX_E4M3 = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class Float8Weight:
    """A weight [N, K]: `values` times `scale`, both as stored in the model.

    | name   | shape                      | dtype, layout                                     |
    |--------|----------------------------|---------------------------------------------------|
    | values | [N, K]                     | float8_e4m3fn, finite; a row is contiguous        |
    | scale  | [N / 128, K / 128], both   | fp32 or bf16, one for each block of 128 by 128:   |
    |        | rounded up                 | fine-grained checkpoints                          |
    |        | [N, 1]                     | one for each row                                  |
    |        | [1, 1]                     | one for all                                       |

    Products take it instead of a tensor. Raises ValueError for other shapes, dtypes, strides and devices.
    """

    values: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        values, scale = self.values, self.scale
        if values.dtype != torch.float8_e4m3fn or values.dim() != 2:
            raise ValueError(f"values must be float8_e4m3fn [N, K], got {values.dtype} {tuple(values.shape)}")
        rows, depth = values.shape
        if values.stride(1) != 1 and depth > 1:
            raise ValueError(f"the rows of values must be contiguous, got strides {values.stride()}")
        blocks = (-(-rows // BLOCK), -(-depth // BLOCK))
        if tuple(scale.shape) not in ((rows, 1), (1, 1), blocks):
            raise ValueError(
                f"the scale of [{rows}, {depth}] must be [{rows}, 1], [1, 1] or, for blocks of {BLOCK}, "
                f"{list(blocks)}, got {list(scale.shape)}"
            )
        if scale.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the scale must be float32 or bfloat16, got {scale.dtype}")
        if scale.device != values.device:
            raise ValueError(f"the scale must be on the device of the values ({values.device}), got {scale.device}")

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def __len__(self) -> int:
        return len(self.values)

    @property
    def in_blocks(self) -> bool:
        """Whether the scale differs along a row."""
        return self.scale.shape[1] > 1 or (len(self.scale) > 1 and len(self.scale) < len(self.values))

    @property
    def scale_stride(self) -> int:
        """The stride from one row or block of scales to the next; 0 if there is one scale for all."""
        return self.scale.stride(0) if len(self.scale) > 1 else 0

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """All tensors that one product reads."""
        return self.values, self.scale

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight itself, [N, K], in this dtype."""
        scale = self.scale.float()
        if self.in_blocks:
            rows, depth = self.shape
            scale = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :depth]
        return (self.values.float() * scale).to(dtype)


def quantised(weight: Tensor, block: bool = False) -> Float8Weight:
    """The nearest Float8Weight to a matrix [N, K], with a scale for each row, or with `block` for each block.

    The largest magnitude in a row or block becomes 448, the largest of e4m3. If all numbers are zero, the scale is 1.
    Raises ValueError for a weight that is not finite.
    """
    wide = weight.detach().float()
    if not wide.isfinite().all():
        raise ValueError("a weight with infinities or NaN cannot be quantised")
    if not block:
        scale = _scale(wide.abs().amax(1, keepdim=True))
        return Float8Weight((wide / scale).to(torch.float8_e4m3fn), scale)
    rows, depth = wide.shape
    padded = torch.nn.functional.pad(wide, (0, -depth % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = _scale(blocks.abs().amax((1, 3)))
    values = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view_as(padded)[:rows, :depth]
    return Float8Weight(values.contiguous(), scale)


def _scale(largest: Tensor) -> Tensor:
    return torch.where(largest > 0, (largest / MAX_E4M3).clamp(min=torch.finfo(torch.float32).tiny), 1.0)


def rows_of(weight: Tensor | Float8Weight, rows: Tensor | Sequence[int]) -> Tensor | Float8Weight:
    """Copies of the rows with these numbers, int64 [n]."""
    if isinstance(weight, Tensor):
        return weight[rows]
    if weight.in_blocks:
        raise ValueError("rows of a weight with a scale for each block cannot be copied one by one")
    scale = weight.scale[rows] if len(weight.scale) > 1 else weight.scale.clone()
    return Float8Weight(weight.values.view(torch.uint8)[rows].view(torch.float8_e4m3fn), scale)
