"""Shared by all tests: without a GPU, kernels run in Triton's interpreter, which must be chosen before its import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest


@pytest.fixture
def device() -> str:
    """Where kernels run: "cuda", or "cpu" through the interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"
