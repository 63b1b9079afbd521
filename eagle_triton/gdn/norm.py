"""RMSNorm with a gate, after the gated delta rule."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from eagle_triton.gdn.operations import operations_for
from eagle_triton.runtime.row_formats import whole_of


class RMSNormGated(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) * silu(gate) over the last dimension, of `normalized_shape` elements.

    norm_before_gate=False: norm x * silu(gate) instead. Statistics are fp32. For inference: no gradients.
    """

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-6,
        norm_before_gate: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.norm_before_gate = eps, norm_before_gate
        self.weight = nn.Parameter(torch.ones(normalized_shape, dtype=dtype, device=device))

    @torch.no_grad()
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [..., normalized_shape] of the weight's dtype; returns a tensor like x. Raises ValueError."""
        if gate.shape != x.shape or x.shape[-1:] != self.weight.shape:
            raise ValueError(
                f"RMSNormGated: x and gate must be [..., {len(self.weight)}], got {list(x.shape)} and "
                f"{list(gate.shape)}"
            )
        ops = operations_for(x)
        if self.norm_before_gate:
            rows, gates = (tensor.reshape(1, -1, 1, x.shape[-1]) for tensor in (x, gate))
            return ops.gated_norm(rows, gates, self.weight, self.eps).view(x.shape)
        gated = (x.float() * functional.silu(gate.float())).to(x.dtype)
        return whole_of(ops.rms_norm(gated, self.weight, self.eps))
