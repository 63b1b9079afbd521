"""Programmatic dependent launch: a kernel starts while the kernel before it ends.

What a kernel does before it reads any other kernel's results (its launch, its set-up, the first tiles of its weights)
costs nothing then. Every program of a kernel that is launched this way waits until the kernels before it have completed
(griddepcontrol.wait) before it reads what they write, and before it writes: results are those of plain stream order.
When it lets the next kernel start (griddepcontrol.launch_dependents) is each kernel's choice: most at once, products
when their sums are complete, so after their own wait. SwiGLU's lets it start at once, because a product follows.

Two things are read before the wait. Weights, by products and norms: no kernel of a decode step writes them. And, by
attention and the merge of its splits, lengths, page tables and committed keys and values, behind a product and a rotary
embedding, or a product that rotates: what was launched before such a product has completed when these start
(`prefetch_before_wait` of tree_attention). All come from L2 (`.cg`, TMA), because L1 may be older.

A multiprocessor that must change its carveout, the share of its memory that is shared memory and not L1, runs empty
first, and nothing overlaps there. So all these kernels prefer the same carveout, the largest.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from eagle_triton.runtime.fallback import triton_version
from eagle_triton.runtime.launch import NO_FMA_FUSION, launch

_SHARED_MEMORY_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
_NO_DRIVER = -1
_carveouts: dict[int, int] = {}  # what the driver said to that, by function: 0 for yes


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """Let the next kernel start, and wait for those before this one. To be called before anything else."""
    let_next_start(PDL)
    await_others(PDL)


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the kernel behind this one start, as soon as all programs have said so."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_others(PDL: tl.constexpr):
    """Wait for the kernels before this one: between these two stands what may be read early."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels may start early: compiled ones, on NVIDIA's compute capabilities 9 and 10, with Triton 3.5."""
    compiled = isinstance(await_inputs, triton.JITFunction) and triton_version() >= (3, 5)  # 3.4 compiles no gdc_wait
    if device.type != "cuda" or torch.version.hip is not None or not compiled:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def early_start(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that starts early where the device can, and then has its constexpr PDL set."""
    return {"PDL": True, "launch_pdl": True} if can_overlap(device) else {"PDL": False}


def overlapped(kernel: triton.JITFunction, grid: tuple[int, ...], device: torch.device) -> Callable[..., None]:
    """kernel[grid], to be called as that is: started early where the device can.

    The kernel has a constexpr PDL and says `await_inputs(PDL)`.
    """

    def start(*args, **options) -> None:
        prefer_shared_memory(launch(kernel, grid)(*args, **options, **early_start(device), **NO_FMA_FUSION))

    return start


def prefer_shared_memory(compiled) -> None:
    """Ask for the largest carveout for a kernel, as its launch returned it, if it may start early."""
    if not getattr(getattr(compiled, "metadata", None), "launch_pdl", False) or compiled.function in _carveouts:
        return
    driver, answer = _driver(), _NO_DRIVER
    if driver is not None:
        answer = driver.cuFuncSetAttribute(ctypes.c_void_p(compiled.function), _SHARED_MEMORY_CARVEOUT, 100)
    _carveouts[compiled.function] = answer


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
