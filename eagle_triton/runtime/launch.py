"""How kernels are launched: constants that several of them share, and the one way to do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor

from eagle_triton.runtime.fallback import KernelError

DRAFT_WARPS = 4
"""Warps of the megakernel, and of every kernel of a draft pass: sums of the same layout have the same order."""

NO_FMA_FUSION = {"enable_fp_fusion": False}
"""Products are fused into sums where `tl.fma` says so and nowhere else, so that a function gives the same bits in every
kernel it is compiled into, and rounds where it is written to."""

FUSED = {"enable_fp_fusion": True}
"""Of launches without NO_FMA_FUSION. Triton 3.9 warns where nothing is said, because its default will change."""


class Launch(NamedTuple):
    """One launch that was recorded, not done."""

    kernel: Any  # a triton.JITFunction
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


_recorded: ContextVar[dict[tuple, Launch] | None] = ContextVar("recorded", default=None)
_failed: dict[tuple, KernelError] = {}  # by launch_key


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """kernel[grid], to be called as that is; returns the compiled kernel, or None inside `recorded()`.

    The call raises KernelError where the kernel does not compile or load.
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
    """Why the kernel of a launch cannot be had, None if it can. It is compiled and loaded, not launched.

    A dry pass that comes by such a launch again raises the same.
    """
    kernel, grid, args, options = wanted
    if not hasattr(kernel, "warmup"):  # interpreted
        return None
    try:
        compiled = kernel.warmup(*args, grid=grid, **options)
        if compiled is not None:  # which is what an interpreter has compiled
            compiled.run  # noqa: B018  a property that loads
    except Exception as error:  # whatever it is, the kernel cannot be had
        failure = _failed[launch_key(kernel, args, options)] = KernelError(kernel, error)
        return failure
    return None


@contextmanager
def recorded() -> Iterator[dict[tuple, Launch]]:
    """Launches of this thread inside the block are recorded instead of done, one for each way a kernel is compiled."""
    launches: dict[tuple, Launch] = {}
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


def launch_key(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple:
    """Launches with equal keys share a compilation; with unequal ones they may."""
    return kernel, *map(_kind, args), *((name, _kind(value)) for name, value in options.items())


def _kind(value: Any) -> Any:
    """An argument as a key has it: a tensor by dtype and alignment, all else by value, more finely than Triton asks."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, tuple):  # a view
        return type(value), *map(_kind, value)
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return type(value), value.base.dtype, tuple(value.block_shape)
    return type(value), value
