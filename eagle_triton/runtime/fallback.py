"""What happens where a kernel does not compile or load: its portable twin runs instead, from then on.

A Gluon kernel's twin is the Triton kernel of the same operation, a Triton kernel's is the torch reference. Reasons are
a Triton that has changed, a driver, a card, a missing C compiler. `engine/operations.py` puts the twin in its place.
Nothing here imports Triton before a kernel exists.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch

log = logging.getLogger(__name__)

_LONGEST_REASON = 300  # characters of a compiler's message that an error repeats

_gluon_modules: dict[str, Any] = {}  # by name; None: not used


class KernelError(RuntimeError):
    """A kernel does not compile or load on this machine. It was not launched."""

    def __init__(self, kernel: Any, error: BaseException):
        import triton

        said = reason_of(error)
        super().__init__(
            f"the kernel {kernel.fn.__name__} of {kernel.fn.__module__} does not compile with Triton "
            f"{triton.__version__} and torch {torch.__version__} on this machine: {said}"
        )
        self.module: str = kernel.fn.__module__


def reason_of(error: BaseException) -> str:
    """What a compiler's error comes from, in one line: the first error of its chain, and the end of what that says."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said if len(said) <= _LONGEST_REASON else '... ' + said[-_LONGEST_REASON:]}"


def gluon_module(name: str) -> Any:
    """The module of this name, whose kernels are written in Gluon; None where it cannot be used.

    That is with a Triton before 3.6, whose Gluon does not compile them, without Gluon, and after one of its kernels has
    failed here.
    """
    if name not in _gluon_modules:
        _gluon_modules[name] = _import(name)
    return _gluon_modules[name]


def give_up_gluon(name: str) -> bool:
    """Use the Gluon kernels of a module no more. Returns whether it is such a module, and was in use."""
    in_use = _gluon_modules.get(name) is not None
    if in_use:
        _gluon_modules[name] = None
    return in_use


def triton_version() -> tuple[int, int]:
    """Triton's, major and minor."""
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
    except (ImportError, AttributeError) as error:  # the latter for a name that a newer Gluon has removed
        log.warning("%s is not used: %s", name, error)
        return None
