"""Shared by all tests: without a GPU, kernels run in Triton's interpreter, which must be chosen before its import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import triton.language as tl
from triton.runtime import interpreter

_patch_language = interpreter._patch_lang


def _patch_language_once(function):
    """Leave alone what the launch has patched: the interpreter looks through the language in every device function, in
    a third of its time."""
    languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
    if any(tl.core.is_builtin(language.load) for language in languages):
        return _patch_language(function)


interpreter._patch_lang = _patch_language_once


@pytest.fixture
def device() -> str:
    """Where kernels run: "cuda", or "cpu" through the interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"
