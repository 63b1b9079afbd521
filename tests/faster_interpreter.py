"""Triton's interpreter made faster: what it does in every operation of every program is done once, or left out.

And one defect less: a comparison of numbers keeps their type with them, which Triton 3.9 refuses in a mask that a
scalar was spread into.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_language = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, np.dtype] = {}


def install() -> None:
    """Let kernels of this process run in it."""
    interpreter._patch_lang = _patch_language_once
    interpreter._get_np_dtype = _np_dtype
    # It looks for overflows, and without `debug` tells nobody.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    kind = type(builder)
    for name in vars(kind).copy():
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(kind, name, _boolean(getattr(kind, name)))


def _patch_language_once(function):
    """Leave alone what the launch has patched: else the language is looked through in every device function."""
    languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
    if any(tl.core.is_builtin(language.load) for language in languages):
        return _patch_language(function)


def _boolean(compare):
    def compare_as_boolean(builder, left, right):
        return interpreter.TensorHandle(compare(builder, left, right).data, tl.int1)

    return compare_as_boolean


def _np_dtype(kind: tl.dtype) -> np.dtype:
    kind = kind.scalar
    if kind.is_ptr():
        return _get_np_dtype(kind)
    if kind.name not in _np_dtypes:
        _np_dtypes[kind.name] = _get_np_dtype(kind)
    return _np_dtypes[kind.name]
