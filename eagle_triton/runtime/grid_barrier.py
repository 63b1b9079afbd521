"""What a persistent kernel needs between its phases: a barrier for the whole grid.

The barrier counts arrivals upwards, so barrier number n of a launch waits for n * PROGRAMS of them; the counter must be
zero when the launch begins. Arrival releases what the program wrote, the wait acquires what the others did. A barrier
that waits too long sets the error word and lets its program go on; from then on nothing waits, and the caller's phases
must have no work (multiply their task counts by what `grid_barrier` returns).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _fence_async():
    """Order what threads write and read with what tensor descriptors load."""
    tl.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, $1;", "=r,r", [tl.arange(0, 128)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def grid_barrier(sync_ptr, number, program, absent, limit, ok, PROGRAMS: tl.constexpr, TMA: tl.constexpr):
    """Wait until all programs of the grid have come here; returns 1, or 0 once any barrier has given up.

    sync_ptr: int32 [2], the arrivals so far and the error word. `number`: 1 for a launch's first barrier, then 2, ...
    `limit`: how often the wait looks before it gives up. `absent`: a program that never arrives (-1: none), by which
    tests see a fault. `ok`: what the barrier before returned. TMA: descriptors load what the phase before wrote.
    """
    if PROGRAMS > 1:
        if TMA:
            _fence_async()
        tl.debug_barrier()  # every thread's writes come before the one thread's release
        if (program != absent) & (ok != 0):  # who has given up lets nobody else pass
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
