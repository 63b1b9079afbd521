"""Programmatic dependent launch: a kernel starts while the kernel before it ends.

What a kernel does before it reads any other kernel's results (its launch, its set-up, the first tiles of its weights)
costs nothing then. Every kernel that is launched this way first lets the next one start and then waits for the ones
before it to have completed (`await_inputs`), so results are what they would be in plain stream order.

A multiprocessor that must divide its memory between shared memory and L1 anew runs empty first, and nothing overlaps
there. All kernels launched here therefore ask for the same division, the largest shared memory.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from eagle_triton.launch import EXACT

_SHARED_MEMORY_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
_carved: set[int] = set()


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """To be called before anything is read that another kernel writes, and before anything is written."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels on this device may start early: NVIDIA's from compute capability 9.0 on."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


def early_start(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that starts early where the device can, and then has its constexpr PDL set."""
    return {"PDL": True, "launch_pdl": True} if can_overlap(device) else {"PDL": False}


def overlapped(kernel: triton.JITFunction, grid: tuple[int, ...], device: torch.device) -> Callable[..., None]:
    """kernel[grid], to be called as that is: started early where the device can.

    The kernel has a constexpr PDL and says `await_inputs(PDL)`.
    """

    def launch(*args, **options) -> None:
        prefer_shared_memory(kernel[grid](*args, **options, **early_start(device), **EXACT))

    return launch


def prefer_shared_memory(compiled) -> None:
    """Ask for the largest shared memory for a compiled kernel that `early_start` launched."""
    if not getattr(getattr(compiled, "metadata", None), "launch_pdl", False) or compiled.function in _carved:
        return
    _carved.add(compiled.function)
    driver = _driver()
    if driver is not None:
        driver.cuFuncSetAttribute(ctypes.c_void_p(compiled.function), _SHARED_MEMORY_CARVEOUT, 100)


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
