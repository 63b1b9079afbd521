"""Device functions for kernels that read parts of several ranks (see `peer_memory.py`): signal that the own part is in
place and wait for the others; or send and receive words that show whether they have arrived."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.runtime.peer_memory import PeerMemory

MIN_SENT = 64  # values for each warp of a receiving program: two for each thread
_POLLS_BETWEEN = tl.constexpr(4096)  # polls of a signal between two checks whether to give up: some milliseconds


class Peers(NamedTuple):
    """A PeerMemory: addresses of all ranks' places, signals and words [ranks] int64, and this rank's counts and errors.

    A place has place_rows rows of place_width elements of the exchanged dtype; words have sent_rows rows of word_width.
    """

    places: Tensor
    signals: Tensor
    words: Tensor
    uses: Tensor
    failed: Tensor
    failed_on_host: Tensor
    rank: int
    place_rows: int
    place_width: int
    sent_rows: int
    word_width: int

    @staticmethod
    def of(memory: PeerMemory, element_size: int) -> Peers:
        places, signals, words, uses, failed, failed_on_host, rank, _, *sizes = memory.arguments(element_size)
        return Peers(places, signals, words, uses, failed, failed_on_host, rank, *sizes)


@triton.jit
def pointer_to(addresses_ptr, rank, DTYPE: tl.constexpr):
    """A pointer to a rank's memory, from a list of addresses."""
    return tl.load(addresses_ptr + rank).to(tl.pointer_type(DTYPE))


@triton.jit
def row_at(addresses_ptr, rank, start, offs, DTYPE: tl.constexpr):
    """Pointers [1, n] to elements start + offs of a rank's memory. A row begins at `start`, aligned to 16 bytes."""
    return tl.multiple_of(pointer_to(addresses_ptr, rank, DTYPE) + start + offs, (1, 16))


@triton.jit
def signal_and_wait(signal_addresses_ptr, failed_ptr, failed_on_host_ptr, row, use, rank, polls, RANKS: tl.constexpr):
    """Signal all other ranks that this rank's part of a row is in place for its `use`, and wait for their signals.

    Ranks that have waited see this program's earlier writes, and this program then sees theirs. After `polls` polls of
    all signals together the wait gives up: it sets the words at `failed_ptr` and `failed_on_host_ptr` and goes on. From
    then on nothing waits. The host may set these words too.

    Values that may change meanwhile are read by one thread (atomics) or reduced over all threads, so that all threads
    take the same branch.
    """
    polled = 0
    tl.debug_barrier()  # every thread's writes come before the one thread's release
    for other in tl.static_range(RANKS):
        if other != rank:
            theirs = pointer_to(signal_addresses_ptr, other, tl.int32) + row * RANKS + rank
            tl.atomic_xchg(theirs, use, sem="release", scope="sys")
    for other in range(RANKS):
        if other != rank:
            mine = pointer_to(signal_addresses_ptr, rank, tl.int32) + row * RANKS + other
            seen = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
            while (seen - use < 0) & (polled < polls):  # a difference, because counts may overflow
                seen = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
                polled = _polled_again(polled, polls, failed_ptr)
            if seen - use < 0:
                tl.store(failed_ptr, 1)
                tl.store(failed_on_host_ptr, 1)
    tl.debug_barrier()


@triton.jit
def _polled_again(polled, polls, failed_ptr):
    """Count one more poll; count all of them if another wait has given up."""
    polled += 1
    if polled % _POLLS_BETWEEN == 1:  # noqa: SIM102 (`and` would evaluate both)
        if tl.atomic_add(failed_ptr, 0, sem="relaxed") != 0:
            polled = polls
    return polled


@triton.jit
def send(word_addresses_ptr, part, start, offs, mask, use, rank, RANKS: tl.constexpr):
    """Write values [1, n] of 32 bits, each with the count of its use, to `start + offs` of all other ranks' words."""
    words = part.to(tl.uint32, bitcast=True).to(tl.int64) | (use.to(tl.int64) << 32)
    for other in tl.static_range(RANKS):
        wanted = mask & (tl.zeros_like(offs) + other != rank)  # Triton 3.9's interpreter does not broadcast a bool
        tl.store(row_at(word_addresses_ptr, other, start, offs, tl.int64), words, mask=wanted)


@triton.jit
def receive(
    word_addresses_ptr, start, offs, mask, use, rank, failed_ptr, failed_on_host_ptr, polls, DTYPE: tl.constexpr
):
    """Wait for the values [1, n] that `send` writes there, and return them as DTYPE; 0 where `mask` is false.

    The layout must not give one value to two threads. If values do not arrive, it gives up like `signal_and_wait`.
    """
    polled = 0
    words_ptr, nothing = row_at(word_addresses_ptr, rank, start, offs, tl.int64), use.to(tl.int64) << 32
    words = tl.load(words_ptr, mask=mask, other=nothing, volatile=True)
    missing = tl.max(((words >> 32).to(tl.int32) != use).to(tl.int32))
    while (missing > 0) & (polled < polls):
        words = tl.load(words_ptr, mask=mask, other=nothing, volatile=True)
        missing = tl.max(((words >> 32).to(tl.int32) != use).to(tl.int32))
        polled = _polled_again(polled, polls, failed_ptr)
    if missing > 0:
        tl.store(failed_ptr, 1)
        tl.store(failed_on_host_ptr, 1)
    return words.to(tl.uint32).to(DTYPE, bitcast=True)
