"""Gluon's operations, under the same names for Triton 3.6 to 3.9.

Only this file depends on the names of a version. Importing it raises ImportError if Gluon is missing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "TensorDescriptor",
    "async_load",
    "async_store",
    "debug_barrier",
    "fence_async_shared",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "mbarrier",
    "reinterpret",
    "store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

# 3.6 and 3.7 have the longer names, 3.8 has both, 3.9 raises for the longer ones.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
store_wait = (
    tma.store_wait
)  # waits until the sources in shared memory are read; from 3.8 on there is an argument for it

_REINTERPRET = "reinterpret" if hasattr(gl.shared_memory_descriptor, "reinterpret") else "_reinterpret"  # from 3.9 on


@gl._core.builtin
def reinterpret(tiles, dtype, shape, layout, _semantic=None):
    """Shared memory as tiles of another dtype, shape or layout."""
    return getattr(tiles, _REINTERPRET)(dtype, shape, layout, _semantic=_semantic)
