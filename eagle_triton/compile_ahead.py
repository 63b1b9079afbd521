"""Compiling in parallel: what a piece of code will launch is compiled at once, before it launches any of it.

By itself Triton compiles a kernel when it is launched first, one after another. `compiled_ahead` has the code run once
with its launches recorded, then compiles them side by side: LLVM's passes do without Python's lock, and ptxas, like the
C compiler that makes a kernel's launcher in Triton 3.6, is a process of its own.
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from tqdm import tqdm
from triton.runtime import driver

from eagle_triton.launch import Launch, recorded
from eagle_triton.overlap import triton_version

_MAX_WORKERS = 32
_ALLOCATIONS = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}


def can_compile_ahead(device: torch.device) -> bool:
    """Whether kernels for a device can be compiled so: on NVIDIA's GPUs, with Triton 3.6."""
    return device.type == "cuda" and torch.version.hip is None and triton_version() >= (3, 6)


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Compile what this thread launches inside the block, which is not launched: in parallel, when the block ends.

    torch's operations run, on zeros where the kernels would have written. So what the block writes is of no use, but an
    index it computes is valid. A kernel that does not compile is left to its launch, which says what is wrong.
    Nothing is compiled if the block raises.
    """
    with recorded() as launches, _ZeroedAllocations():
        yield
    # in a context of its own: whatever stops this, no mode of Triton's stays behind
    contextvars.copy_context().run(_compile, launches.values())


def _compile(launches: Collection[Launch]) -> None:
    with (
        tqdm(total=0, desc="compiling kernels", leave=False, disable=None, delay=0.5) as progress,
        _Loader(progress) as executor,
        triton.AsyncCompileMode(executor, ignore_errors=True),
    ):
        for kernel, grid, args, options in launches:
            kernel.warmup(*args, grid=grid, **options)


class _Loader(ThreadPoolExecutor):
    """Threads that load a kernel when they have compiled it, which includes making its launcher."""

    def __init__(self, progress: tqdm):
        active = driver.active
        super().__init__(_workers(), "compile", active.set_current_device, (active.get_current_device(),))
        self._progress = progress

    def submit(self, compile: Callable[[], Any]) -> Future:
        """Compile and load. Called by AsyncCompileMode, once for each kernel that is not compiled yet."""

        def compile_and_load() -> Any:
            compiled = compile()
            compiled.run  # noqa: B018  a property that loads
            return compiled

        self._progress.total += 1
        future = super().submit(compile_and_load)
        future.add_done_callback(lambda _: self._progress.update())
        return future


def _workers() -> int:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, _MAX_WORKERS)


class _ZeroedAllocations(TorchFunctionMode):
    """New tensors hold zeros."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out.zero_() if function in _ALLOCATIONS else out
