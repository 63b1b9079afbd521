"""How far a kernel may be from the exact result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
HOPPER = CUDA and torch.version.cuda is not None and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
# bfloat16 products are wrong in Triton's interpreter.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])


def assert_close(out: Tensor, same: Tensor, exact: Tensor, most: float = 2) -> None:
    """The error is at most `most` times that of torch in the same dtype; zeros would fail."""
    assert out.shape == exact.shape and out.dtype == same.dtype
    bound = most * (same.to(exact.dtype) - exact).abs().max() + 1e-5
    assert (out.to(exact.dtype) - exact).abs().max() <= bound < exact.abs().max()
