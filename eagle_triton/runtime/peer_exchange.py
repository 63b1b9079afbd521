"""What a kernel does that reads parts of several ranks: leave its own, signal, wait, read (see `peer_memory.py`)."""

from __future__ import annotations

import triton
import triton.language as tl

_LOOKS_BETWEEN = tl.constexpr(4096)  # at a signal, before a program looks whether to give up: some milliseconds


@triton.jit
def pointer_to(addresses_ptr, rank, KIND: tl.constexpr):
    """A pointer to a rank's memory, whose address stands in a list."""
    return tl.load(addresses_ptr + rank).to(tl.pointer_type(KIND))


@triton.jit
def row_at(addresses_ptr, rank, start, offs, KIND: tl.constexpr):
    """Pointers [1, n] to elements `offs` behind `start` in a rank's memory, where a row begins: at 16 bytes."""
    return tl.multiple_of(pointer_to(addresses_ptr, rank, KIND) + start + offs, (1, 16))


@triton.jit
def signal_and_wait(signal_addresses_ptr, failed_ptr, told_ptr, row, use, rank, looks, RANKS: tl.constexpr):
    """Tell all ranks that this one's part of a row is there for its `use`, and wait until theirs are.

    What the program has written before is seen by who waits for it, and what others have written by this program
    afterwards. A wait that looks in vain `looks` times, at all signals together, sets the words at `failed_ptr` and
    `told_ptr` and goes on; from then on nothing waits. The host may set them, too.
    """
    tl.debug_barrier()  # every thread's writes come before the one thread's release
    for other in tl.static_range(RANKS):
        theirs = pointer_to(signal_addresses_ptr, other, tl.int32) + row * RANKS + rank
        tl.atomic_xchg(theirs, use, sem="release", scope="sys")
    left = looks * (1 - tl.load(failed_ptr))
    for other in tl.static_range(RANKS):
        mine = pointer_to(signal_addresses_ptr, rank, tl.int32) + row * RANKS + other
        seen = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
        while (seen - use < 0) & (left > 0):  # a difference: counts may pass the largest number
            seen = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
            left -= 1
            if left % _LOOKS_BETWEEN == 0:
                left *= 1 - tl.load(failed_ptr, volatile=True)
        if seen - use < 0:
            tl.store(failed_ptr, 1)
            tl.store(told_ptr, 1)
    tl.debug_barrier()
