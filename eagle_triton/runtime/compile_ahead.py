"""Compiling in parallel: what a piece of code will launch is compiled at once, before it launches any of it.

By itself Triton compiles a kernel when it is launched first, one after another. `compiled_ahead` has the code run once
with its launches recorded, then compiles them side by side: LLVM's passes do without Python's lock, and ptxas, like the
C compiler that makes a kernel's launcher in Triton 3.6, is a process of its own.
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
_turn = threading.Lock()  # of who compiles
_ALLOCATIONS = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}


def can_compile_ahead(device: torch.device) -> bool:
    """Whether kernels for a device can be compiled so: on NVIDIA's GPUs, from Triton 3.6 on."""
    compiled = isinstance(await_inputs, triton.JITFunction)  # not interpreted
    return device.type == "cuda" and torch.version.hip is None and compiled and triton_version() >= (3, 6)


@contextmanager
def compiled_ahead() -> Iterator[list[KernelError]]:
    """Launches of this thread inside the block are not done; their kernels are compiled in parallel when it ends.

    torch's operations do run, on zeros where the kernels would have written. So what the block writes is of no use, but
    an index it computes is valid. The list that the block is given then holds the kernels that did not compile: another
    block that comes by such a launch raises that error there. Nothing is compiled if the block raises. What an
    interrupt leaves out is compiled when it is launched.
    """
    failed: list[KernelError] = []
    with recorded() as launches, _ZeroedAllocations():
        yield failed
    # in a context of its own: whatever stops this, no mode of Triton's stays behind
    if contextvars.copy_context().run(_compile, launches.values()):
        failed += [failure for wanted in launches.values() if (failure := compile_failure(wanted))]


def _compile(launches: Collection[Launch]) -> bool:
    """Compile and load all of them; whether one failed."""
    with (
        _turn,
        _launchers_of_their_own(),
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
def _launchers_of_their_own() -> Iterator[None]:
    """Have each kernel launched by its own launcher, in whatever order threads load them.

    In Triton 3.6 launchers are extension modules, all of one name. Where CPython is asked for one a second time, it
    writes that one's functions into the module of this name that came last, and another thread may be about to take its
    launcher from there: "function takes exactly 46 arguments (36 given)".
    """
    load, one_at_a_time = getattr(launchers, "_load_module_from_path", None), threading.Lock()
    if load is None:  # a Triton that loads them in another way
        yield
        return

    def load_for_itself(name: str, path: str) -> Any:
        with one_at_a_time:
            return SimpleNamespace(**vars(load(name, path)))

    launchers._load_module_from_path = load_for_itself
    try:
        yield
    finally:
        launchers._load_module_from_path = load


class _Loader(ThreadPoolExecutor):
    """Threads that load a kernel when they have compiled it, which includes making its launcher."""

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
        """Compile nothing more, but what has begun."""
        self._stopped = True

    def submit(self, build: Callable[[], Any]) -> Future:  # type: ignore[override]
        """Compile and load. Called by AsyncCompileMode, once for each kernel that is not compiled yet.

        Triton keeps the future, and asks it for the kernel at a later launch too.
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
                return build()  # somebody launches what an interrupt had left out

        self._progress.total += 1
        future = super().submit(build_and_load)
        finished, future.result = future.result, result  # type: ignore[method-assign]
        future.add_done_callback(lambda _: self._progress.update())
        return future


def _built(build: Callable[[], Any]) -> Any:
    """A kernel, compiled: again if CPython fails at it.

    Triton has every thread parse Python, whose count of nested nodes (3.11) is one for all threads: SystemError, "AST
    constructor recursion depth mismatch", when they take turns at the wrong moment. Of a function that a kernel calls,
    it is the cause of a CompilationError.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return build()
        except Exception as error:
            if not _is_of_the_parser(error):
                raise
    return build()


def _is_of_the_parser(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, SystemError) and "recursion depth" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _workers() -> int:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, _MAX_WORKERS)


class _ZeroedAllocations(TorchFunctionMode):
    """New tensors hold zeros."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out.zero_() if function in _ALLOCATIONS else out
