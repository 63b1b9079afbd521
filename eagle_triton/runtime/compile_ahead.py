"""Compiles the kernels that a piece of code will launch, in parallel and before it launches any.

Triton compiles each kernel at its first launch, one after another. `compiled_ahead` runs the code once with its
launches recorded, and then compiles their kernels in parallel. LLVM's passes release Python's lock; ptxas, and the C
compiler that makes a kernel's launcher in Triton 3.6, are separate processes.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from tqdm import tqdm
from triton.runtime import build as launchers
from triton.runtime import driver

from eagle_triton.runtime.fallback import KernelError, triton_version
from eagle_triton.runtime.launch import Launch, compile_failure, recorded
from eagle_triton.runtime.overlap import await_inputs

_ATTEMPTS = 4  # see _built
_MAX_WORKERS = 32
_compiling = threading.Lock()
_ALLOCATIONS = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}


def can_compile_ahead(device: torch.device) -> bool:
    """Whether kernels for a device can be compiled ahead: on NVIDIA's GPUs, from Triton 3.6 on."""
    compiled = isinstance(await_inputs, triton.JITFunction)  # not interpreted
    return device.type == "cuda" and torch.version.hip is None and compiled and triton_version() >= (3, 6)


@contextmanager
def compiled_ahead() -> Iterator[list[KernelError]]:
    """Record this thread's launches inside the block, and compile their kernels in parallel when it ends.

    torch's operations do run, on zeros where the kernels would have written. So the block's results are useless, but
    the indices it computes are valid. Yields a list that holds the errors of kernels that did not compile, after the
    block; another block with such a launch raises its error there. If the block raises, nothing is compiled. Kernels
    that an interrupt leaves out are compiled when they are launched.
    """
    failed: list[KernelError] = []
    with recorded() as launches, _ZeroedAllocations():
        yield failed
    # in a separate context, so that Triton's mode ends with it even if this is interrupted
    if contextvars.copy_context().run(_compile, launches.values()):
        failed += [failure for wanted in launches.values() if (failure := compile_failure(wanted))]


def _compile(launches: Collection[Launch]) -> bool:
    """Compile and load the kernels of launches. Returns whether one failed."""
    with (
        _compiling,
        _own_launchers(),
        tqdm(total=0, desc="compiling kernels", leave=False, disable=None, delay=0.5) as progress,
        _Loader(progress) as loader,
        triton.AsyncCompileMode(loader, ignore_errors=True),
    ):
        try:
            for kernel, grid, args, options in launches:
                kernel.warmup(*args, grid=grid, **options)
        except BaseException:
            loader.stop()
            raise
    return loader.failed


@contextmanager
def _own_launchers() -> Iterator[None]:
    """Give each kernel its own launcher, in any order in which threads load them.

    In Triton 3.6 launchers are extension modules that all have the same name. If one is loaded a second time, CPython
    writes its functions into the last loaded module of this name. Another thread may then take the wrong launcher from
    there: "function takes exactly 46 arguments (36 given)".
    """
    load, one_at_a_time = getattr(launchers, "_load_module_from_path", None), threading.Lock()
    if load is None:  # this Triton loads them differently
        yield
        return

    def load_copy(name: str, path: str) -> Any:
        with one_at_a_time:
            return SimpleNamespace(**vars(load(name, path)))

    launchers._load_module_from_path = load_copy
    try:
        yield
    finally:
        launchers._load_module_from_path = load


class _Loader(ThreadPoolExecutor):
    """Threads that compile a kernel and then load it, which includes making its launcher."""

    def __init__(self, progress: tqdm):
        active = driver.active
        super().__init__(_workers(), "compile", active.set_current_device, (active.get_current_device(),))
        self._progress, self._stopped, self._left = progress, False, False
        self.failed = False

    def __exit__(self, kind, *exception) -> None:
        if kind is not None:
            self.stop()
        super().__exit__(kind, *exception)
        self._left = True

    def stop(self) -> None:
        """Start no further compilation."""
        self._stopped = True

    def submit(self, build: Callable[[], Any]) -> Future:  # type: ignore[override]
        """Compile and load. Called by AsyncCompileMode, once for each kernel that is not compiled yet.

        Triton keeps the future, and takes the kernel from it at later launches.
        """

        def build_and_load() -> Any:
            if self._stopped:
                raise CancelledError
            try:
                compiled = _built(build)
                compiled.run  # noqa: B018  a property that loads
            except Exception:
                self.failed = True
                raise
            return compiled

        def result(timeout: float | None = None) -> Any:
            try:
                return finished(timeout)
            except CancelledError:
                if not self._left:
                    raise
                return build()  # a launch of a kernel that an interrupt left out

        self._progress.total += 1
        future = super().submit(build_and_load)
        finished, future.result = future.result, result  # type: ignore[method-assign]
        future.add_done_callback(lambda _: self._progress.update())
        return future


def _built(build: Callable[[], Any]) -> Any:
    """Compile a kernel; try again if CPython's parser fails.

    In Triton every thread parses Python. CPython 3.11 counts nested nodes in one counter for all threads, so a switch
    of threads may cause SystemError, "AST constructor recursion depth mismatch". If it happens in a function that the
    kernel calls, it is the cause of a CompilationError.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return build()
        except Exception as error:
            if not _is_parser_error(error):
                raise
    return build()


def _is_parser_error(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, SystemError) and "recursion depth" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _workers() -> int:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, _MAX_WORKERS)


class _ZeroedAllocations(TorchFunctionMode):
    """Fill new tensors with zeros."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out.zero_() if function in _ALLOCATIONS else out
