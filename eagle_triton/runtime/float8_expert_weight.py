"""The weights of a mixture's experts in FP8, with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_triton.runtime import float8_weight
from eagle_triton.runtime.float8_weight import BLOCK


@dataclass(frozen=True)
class Float8ExpertWeight:
    """Weights [E, N, K] of E experts: `values` times the scale of their block, both as stored in the model.

    | name   | shape                               | dtype, layout                                |
    |--------|-------------------------------------|----------------------------------------------|
    | values | [E, N, K], K a multiple of 16       | float8_e4m3fn, finite, contiguous,           |
    |        |                                     | aligned to 4 bytes                           |
    | scales | [E, N / 128, K / 128], the last two | fp32 or bf16, one for each block of 128 by   |
    |        | rounded up                          | 128 of an expert                             |

    The operations of mixtures take it instead of a tensor. Raises ValueError for other shapes, dtypes, strides and
    devices.
    """

    values: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        values, scales = self.values, self.scales
        if values.dtype != torch.float8_e4m3fn or values.dim() != 3 or values.shape[2] % 16:
            raise ValueError(
                f"values must be float8_e4m3fn [E, N, K], K a multiple of 16, got {values.dtype} {list(values.shape)}"
            )
        if not values.is_contiguous() or values.data_ptr() % 4:
            raise ValueError(f"values must be contiguous and aligned to 4 bytes, got strides {values.stride()}")
        experts, rows, depth = values.shape
        blocks = [experts, -(-rows // BLOCK), -(-depth // BLOCK)]
        if scales.dtype not in (torch.float32, torch.bfloat16) or list(scales.shape) != blocks:
            raise ValueError(f"scales must be float32 or bfloat16 {blocks}, got {scales.dtype} {list(scales.shape)}")
        if scales.device != values.device:
            raise ValueError(f"scales must be on the device of the values ({values.device}), got {scales.device}")

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def bytes(self) -> Tensor:
        """The values as bytes: uint8 [E, N, K]."""
        return self.values.view(torch.uint8)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """All tensors that one product reads."""
        return self.values, self.scales

    def dequantised(self, dtype: torch.dtype, experts: Tensor | None = None) -> Tensor:
        """The weights themselves, [E, N, K]; experts: of these experts only, int64 [n]; rounded once."""
        bytes, scales = self.bytes, self.scales.float()
        if experts is not None:
            bytes, scales = bytes.index_select(0, experts), scales.index_select(0, experts)
        out = bytes.view(torch.float8_e4m3fn).to(dtype)  # exact
        rows, depth = self.shape[1:]
        scales = scales[:, :, None].expand(-1, -1, BLOCK, -1).flatten(1, 2)[:, :rows]
        whole = depth // BLOCK  # blocks, as a view: scales as large as the weights would need more memory than they
        out[..., : whole * BLOCK].unflatten(2, (whole, BLOCK)).mul_(scales[..., :whole, None])
        out[..., whole * BLOCK :].mul_(scales[..., whole:])
        return out


def quantised(weight: Tensor) -> Float8ExpertWeight:
    """The nearest Float8ExpertWeight to a stack [E, N, K], K a multiple of 16; see float8_weight.quantised."""
    parts = [float8_weight.quantised(one, block=True).tensors for one in weight]
    values, scales = (torch.stack(part) for part in zip(*parts, strict=True))
    return Float8ExpertWeight(values, scales)
