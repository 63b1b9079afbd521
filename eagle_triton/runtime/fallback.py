"""The fallback for kernels that do not compile or load: slower ones, or torch, run instead.

A Gluon kernel falls back to the Triton kernel of the same operation, a Triton kernel to the torch reference. A kernel
may fail because of a new Triton, a driver, a GPU, or a missing C compiler. `engine/operations.py` replaces it. Nothing
here imports Triton before a kernel exists.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch

log = logging.getLogger(__name__)

_MAX_REASON = 300  # characters of a compiler's message in an error

_gluon_modules: dict[str, Any] = {}  # by name; None: not used


class KernelError(RuntimeError):
    """A kernel does not compile or load on this machine. It was not launched."""

    def __init__(self, kernel: Any, error: BaseException):
        import triton

        super().__init__(
            f"the kernel {kernel.fn.__name__} of {kernel.fn.__module__} does not compile with Triton "
            f"{triton.__version__} and torch {torch.__version__} on this machine: {reason_of(error)}"
        )
        self.module: str = kernel.fn.__module__


def reason_of(error: BaseException) -> str:
    """The cause of a compiler's error in one line: the first error of its chain, and the end of its message."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message if len(message) <= _MAX_REASON else '... ' + message[-_MAX_REASON:]}"


def gluon_module(name: str) -> Any:
    """The module of Gluon kernels with this name. None: Triton is older than 3.6, Gluon is missing, or one of its
    kernels has failed here."""
    if name not in _gluon_modules:
        _gluon_modules[name] = _import(name)
    return _gluon_modules[name]


def give_up_gluon(name: str) -> bool:
    """Stop using the Gluon kernels of a module. Returns whether it is a Gluon module and was in use."""
    in_use = _gluon_modules.get(name) is not None
    if in_use:
        _gluon_modules[name] = None
    return in_use


def triton_version() -> tuple[int, int]:
    """Triton's major and minor version."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def _import(name: str) -> Any:
    import triton

    if triton_version() < (3, 6):
        log.warning("%s is not used: it needs Triton 3.6, this is %s", name, triton.__version__)
        return None
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError) as error:  # AttributeError: a newer Gluon has removed a name
        log.warning("%s is not used: %s", name, error)
        return None
