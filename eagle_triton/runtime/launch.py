"""How kernels are launched: constants that several of them share, and the one way to do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor

DRAFT_WARPS = 4
"""Warps of the megakernel, and of every kernel of a draft pass: sums of the same layout have the same order."""

EXACT = {"enable_fp_fusion": False}
"""Products are fused into sums where `tl.fma` says so and nowhere else, so that a function gives the same bits in every
kernel it is compiled into, and rounds where it is written to."""


class Launch(NamedTuple):
    """One launch that was recorded, not done."""

    kernel: Any  # a triton.JITFunction
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


_recorded: ContextVar[dict[tuple, Launch] | None] = ContextVar("recorded", default=None)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """kernel[grid], to be called as that is; returns the compiled kernel, or None inside `recorded()`."""
    launches = _recorded.get()
    if launches is None:
        return kernel[grid]

    def record(*args: Any, **options: Any) -> None:
        launches.setdefault(launch_key(kernel, args, options), Launch(kernel, grid, args, options))

    return record


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
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return type(value), value.base.dtype, tuple(value.block_shape)
    return type(value), value
