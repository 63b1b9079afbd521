"""Programmatic dependent launch: a kernel starts while the kernel before it ends.

Then everything that a kernel does before it reads another kernel's results (its launch, its set-up, the first tiles of
its weights) costs nothing. Every program of a kernel launched this way waits until the kernels before it have completed
(griddepcontrol.wait), before it reads their results and before it writes. So results are the same as in plain stream
order. Each kernel chooses when it lets the next kernel start (griddepcontrol.launch_dependents). Most do so at once.
Products do so when their sums are complete, after their own wait; SwiGLU's does so at once, because a product follows.

Two things are read before the wait. Products, norms and routers read weights: no kernel of a decode step writes them.
Attention and the merge of its splits read lengths, page tables and committed keys and values if they follow a product
and a rotary embedding, or a product that rotates: everything launched before such a product has completed when they
start (`prefetch_before_wait` of tree_attention). All these reads come from L2 (`.cg`, TMA), because L1 may be older.

If a multiprocessor must change its carveout, the part of its memory used as shared memory instead of L1, it first
finishes all its work, and nothing overlaps there. So all these kernels prefer the same carveout, the largest.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from eagle_triton.runtime.fallback import triton_version
from eagle_triton.runtime.gpu import compute_capability
from eagle_triton.runtime.launch import NO_FMA_FUSION, launch

_SHARED_MEMORY_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
_NO_DRIVER = -1
_carveouts: dict[int, int] = {}  # the driver's answer by function; 0: done


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """Let the next kernel start, and wait for the kernels before this one. To be called before anything else."""
    let_next_start(PDL)
    await_others(PDL)


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel start, as soon as all programs have called this."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_others(PDL: tl.constexpr):
    """Wait for the kernels before this one. What may be read early is read before this call."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels may start early: if compiled, on NVIDIA's compute capabilities 9 and 10, from Triton 3.5 on."""
    compiled = isinstance(await_inputs, triton.JITFunction) and triton_version() >= (3, 5)  # 3.4 compiles no gdc_wait
    return compiled and compute_capability(device)[0] in (9, 10)


def early_start(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that starts early if the device supports it; its constexpr PDL says whether."""
    return {"PDL": True, "launch_pdl": True} if can_overlap(device) else {"PDL": False}


def overlapped(kernel: triton.JITFunction, grid: tuple[int, ...], device: torch.device) -> Callable[..., None]:
    """A function to call like kernel[grid]. It starts the kernel early if the device supports it.

    The kernel has a constexpr PDL and calls `await_inputs(PDL)`.
    """

    def start(*args, **options) -> None:
        prefer_shared_memory(launch(kernel, grid)(*args, **options, **early_start(device), **NO_FMA_FUSION))

    return start


def overlapped_on_hopper(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """The same for a Gluon kernel of Hopper. It lets the next kernel start, and waits for others, by Gluon's names."""

    def start(*args, **options) -> None:
        prefer_shared_memory(launch(kernel, grid)(*args, **options, launch_pdl=True, **NO_FMA_FUSION))

    return start


def prefer_shared_memory(compiled) -> None:
    """Ask for the largest carveout for a kernel that may start early. compiled: the result of its launch."""
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
