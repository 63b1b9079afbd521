"""A barrier for the whole grid, between the phases of a persistent kernel.

The barrier counts arrivals, so barrier number n of a launch waits for n * PROGRAMS arrivals; the counter must be zero
when the launch begins. Arrival releases the program's writes; the wait acquires the other programs' writes. A barrier
that waits too long sets the error word and lets its program go on. From then on nothing waits, and the caller's phases
must do no work: they multiply their task counts by the result of `grid_barrier`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _fence_async():
    """Order the threads' reads and writes with the loads of tensor descriptors."""
    tl.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, $1;", "=r,r", [tl.arange(0, 128)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def grid_barrier(sync_ptr, number, program, absent, limit, ok, PROGRAMS: tl.constexpr, TMA: tl.constexpr):
    """Wait until all programs of the grid arrive here. Returns 1, or 0 after any barrier has given up.

    sync_ptr: int32 [2], the number of arrivals and the error word. `number`: 1 for a launch's first barrier, then 2,
    ... `limit`: polls before the wait gives up. `absent`: a program that never arrives (-1: none), to test the fault.
    `ok`: the result of the previous barrier. TMA: descriptors load data that the previous phase wrote.
    """
    if PROGRAMS > 1:
        if TMA:
            _fence_async()
        tl.debug_barrier()  # every thread's writes come before the one thread's release
        if (program != absent) & (ok != 0):  # a program that has given up does not arrive
            tl.atomic_add(sync_ptr, 1, sem="release", scope="gpu")
        left = limit * ok
        arrived = tl.atomic_add(sync_ptr, 0, sem="acquire", scope="gpu")
        while (arrived < number * PROGRAMS) & (left > 0):
            arrived = tl.atomic_add(sync_ptr, 0, sem="acquire", scope="gpu")
            left -= 1
        if arrived < number * PROGRAMS:
            tl.store(sync_ptr + 1, 1)
            ok = ok * 0
        tl.debug_barrier()
        if TMA:
            _fence_async()
    return ok
