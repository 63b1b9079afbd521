"""The only function that launches kernels, and shared constants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_triton.runtime.fallback import KernelError

DRAFT_WARPS = 4
"""Warps of the megakernel and of every kernel of a draft pass: with the same layout, sums have the same order."""

NO_FMA_FUSION = {"enable_fp_fusion": False}
"""Only `tl.fma` fuses products into sums, so a function gives the same bits in every kernel it is compiled into."""

FUSED = {"enable_fp_fusion": True}
"""For launches without NO_FMA_FUSION. Triton 3.9 warns without the option, because its default will change."""


class Launch(NamedTuple):
    """A launch that was recorded instead of run."""

    kernel: Any  # a triton.JITFunction
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


_recorded: ContextVar[dict[tuple, Launch] | None] = ContextVar("recorded", default=None)
_failed: dict[tuple, KernelError] = {}  # by launch_key


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """A function to call like kernel[grid]. The call returns the compiled kernel, or None inside `recorded()`.

    It raises KernelError if the kernel does not compile or load.
    """
    run = kernel[grid]

    def start(*args: Any, **options: Any) -> Any:
        try:
            return run(*args, **FUSED | options)
        except Exception as error:
            if failure := compile_failure(Launch(kernel, grid, args, FUSED | options)):
                raise failure from error
            raise

    launches = _recorded.get()
    if launches is None:
        return start

    def record(*args: Any, **options: Any) -> None:
        options = FUSED | options
        key = launch_key(kernel, args, options)
        if key in _failed:
            raise _failed[key]
        launches.setdefault(key, Launch(kernel, grid, args, options))

    return record


def compile_failure(wanted: Launch) -> KernelError | None:
    """Why a launch's kernel does not compile or load; None if it does. The kernel is not launched.

    A dry pass raises the same error when it meets this launch again.
    """
    kernel, grid, args, options = wanted
    if not hasattr(kernel, "warmup"):  # interpreted
        return None
    try:
        compiled = kernel.warmup(*args, grid=grid, **options)
        if compiled is not None:  # None: interpreted
            compiled.run  # noqa: B018  a property that loads
    except Exception as error:  # any error means that the kernel cannot be used
        failure = _failed[launch_key(kernel, args, options)] = KernelError(kernel, error)
        return failure
    return None


class StreamOrder:
    """The order of launches on several streams over one memory: each waits for all before it."""

    def __init__(self) -> None:
        self._last: torch.cuda.Stream | None = None

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` wait for everything launched on the streams that came here before."""
        if self._last is not None and stream != self._last:
            stream.wait_stream(self._last)
        self._last = stream


@contextmanager
def recorded() -> Iterator[dict[tuple, Launch]]:
    """Record this thread's launches inside the block instead of running them, one for each compilation of a kernel."""
    launches: dict[tuple, Launch] = {}
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


def launch_key(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple:
    """Launches with equal keys share a compilation; different keys may still share one."""
    return kernel, *map(_kind, args), *((name, _kind(value)) for name, value in options.items())


def _kind(value: Any) -> Any:
    """An argument's part of a key: dtype and alignment of a tensor, otherwise the value. Triton distinguishes less."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, tuple):  # a view
        return type(value), *map(_kind, value)
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return type(value), value.base.dtype, tuple(value.block_shape)
    return type(value), value
