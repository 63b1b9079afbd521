"""What a persistent kernel needs between its phases: a barrier for the whole grid, and prefetching into L2.

The barrier counts arrivals upwards, so barrier number n of a launch waits for n * PROGRAMS of them; the counter must be
zero when the launch begins. Arrival releases what the program wrote, the wait acquires what the others did. A barrier
that waits too long sets the error word and lets its program go on; from then on nothing waits, and the caller's phases
must have no work (multiply their task counts by what `grid_barrier` returns).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grid_barrier(sync_ptr, number, program, absent, limit, ok, PROGRAMS: tl.constexpr):
    """Wait until all programs of the grid have come here; returns 1, or 0 once any barrier has given up.

    sync_ptr: int32 [2], the arrivals so far and the error word. `number`: 1 for a launch's first barrier, then 2, ...
    `limit`: how often the wait looks before it gives up. `absent`: a program that never arrives (-1: none), by which
    tests see a fault. `ok`: what the barrier before returned.
    """
    if PROGRAMS > 1:
        tl.debug_barrier()  # every thread's writes come before the one thread's release
        if program != absent:
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
    return ok


@triton.jit
def prefetch(ptr, count, share, shares, ENABLED: tl.constexpr):
    """Ask for share number `share` of `shares` of the `count` elements at ptr to be brought into L2; nothing waits."""
    if ENABLED:
        LINE: tl.constexpr = 128 // (ptr.dtype.element_ty.primitive_bitwidth // 8)
        BLOCK: tl.constexpr = 128  # lines at once
        lines = tl.cdiv(count, LINE)
        each = tl.cdiv(lines, shares)
        last = tl.minimum(each * (share + 1), lines)
        for first in range(each * share, last, BLOCK):
            line = tl.minimum(first + tl.arange(0, BLOCK), last - 1)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [ptr + line.to(tl.int64) * LINE],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
