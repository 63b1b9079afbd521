"""Memory of one host's GPUs that all ranks read, to exchange parts of sums, columns of logits and embedding look-ups.

Few values are sent: a rank writes each value into the other ranks' memory, in one word with the count of its use. The
receiver polls until all words have arrived. This takes one trip between GPUs, and twice the bytes. More values are
read: each rank writes its part to its own memory, signals, and reads the others' parts. This takes three trips. Sending
needs aligned words of eight bytes to arrive whole. GPUs do this, and NCCL's LL protocol relies on it too, although PTX
guarantees it only for stores that ask for it.

A row has two places, which alternate from use to use. So one signal is enough: a rank that writes a place again has
seen all ranks' signals for the use in between, and a rank gives that signal only after the kernel that read the place
has ended. Counts are on the device, so a CUDA graph can be replayed unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

POLLS = 100_000_000  # polls of a signal before a wait gives up: about a minute
PLACES = 2
# Values are sent up to these numbers of rows and of 32-bit values. In a step on two H200, a norm of 10 rows of 4096
# takes 8.0 µs if sent and 11.2 if read; the logits of a draft pass 5.7 and 9.9; but a norm of 60 rows 10.7 and 9.5.
SENT_ROWS = 64
SENT_VALUES = 96 * 1024
_ALIGNMENT = 256


@dataclass(frozen=True, eq=False)
class PeerMemory:
    """The memory by which kernels add parts of `size` ranks; this process is `rank`. See `of`.

    | name              | shape                    | dtype, layout                                               |
    |-------------------|--------------------------|-------------------------------------------------------------|
    | places            | [2, rows, row_bytes]     | uint8, one tensor for each rank: its parts of the rows      |
    | signals           | [rows, size]             | int32, one for each rank: for each row and rank, the last   |
    |                   |                          | use with the rank's part in place                           |
    | words             | [2, size, sent_rows,     | int64, one for each rank: received from each rank; low 32   |
    |                   | row_bytes / 4]           | bits: a value, high: the count of its use                   |
    | place_addresses,  | [size]                   | int64: addresses of these on this rank's device             |
    | signal_addresses, |                          |                                                             |
    | word_addresses    |                          |                                                             |
    | uses              | [rows]                   | int32: how often a row was used                             |
    | failed            | [1]                      | int32: 1 after a wait has given up; then nothing waits      |
    | failed_on_host    | [1]                      | the same for the host: int32 in page-locked host memory     |
    """

    rank: int
    places: tuple[Tensor, ...]
    signals: tuple[Tensor, ...]
    words: tuple[Tensor, ...]
    place_addresses: Tensor
    signal_addresses: Tensor
    word_addresses: Tensor
    uses: Tensor
    failed: Tensor
    failed_on_host: Tensor
    polls: int = POLLS  # polls of a signal before a wait gives up
    rescue: torch.cuda.Stream | None = None  # `give_up` writes on this stream, where no kernel waits

    @staticmethod
    def bytes_for(size: int, rows: int, row_bytes: int, sent_rows: int = SENT_ROWS) -> int:
        """The size of each rank's block in bytes."""
        return _signal_bytes(size, rows) + PLACES * (rows + 2 * size * sent_rows) * row_bytes

    @staticmethod
    @torch.inference_mode(False)  # it outlives a caller's inference mode
    def of(
        rank: int,
        blocks: Sequence[Tensor],
        rows: int,
        row_bytes: int,
        polls: int = POLLS,
        sent_rows: int = SENT_ROWS,
    ) -> PeerMemory:
        """From blocks [bytes_for(...)] uint8, one for each rank in rank order, visible to all ranks and all zeros.
        rows: the most in a launch; row_bytes: of one row, a multiple of 16; sent_rows: the most that are sent.

        Raises ValueError for other blocks.
        """
        size, device = len(blocks), blocks[rank].device
        expected = PeerMemory.bytes_for(size, rows, row_bytes, sent_rows)
        if row_bytes % 16:
            raise ValueError(f"row_bytes must be a multiple of 16, got {row_bytes}")
        for block in blocks:
            if block.dtype != torch.uint8 or tuple(block.shape) != (expected,) or block.data_ptr() % 16:
                raise ValueError(
                    f"blocks must be uint8 [{expected}] at a multiple of 16, got {block.dtype} {list(block.shape)}"
                )
        first = _signal_bytes(size, rows)
        signals = tuple(block[: 4 * rows * size].view(torch.int32).view(rows, size) for block in blocks)
        last = first + PLACES * rows * row_bytes
        places = tuple(block[first:last].view(PLACES, rows, row_bytes) for block in blocks)
        words = tuple(block[last:].view(torch.int64).view(PLACES, size, sent_rows, row_bytes // 4) for block in blocks)

        def addresses(tensors: Sequence[Tensor]) -> Tensor:
            return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=device)

        def zeros(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        on_gpu = device.type == "cuda"
        failed_on_host = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        rescue = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        return PeerMemory(
            rank, places, signals, words, addresses(places), addresses(signals), addresses(words),
            zeros(rows), zeros(1), failed_on_host, polls, rescue,
        )  # fmt: skip

    @property
    def size(self) -> int:
        return len(self.places)

    @property
    def rows(self) -> int:
        return self.places[0].shape[1]

    @property
    def row_bytes(self) -> int:
        return self.places[0].shape[2]

    @property
    def sent_rows(self) -> int:
        return self.words[0].shape[2]

    def sends(self, rows: int, width: int) -> bool:
        """Whether rows of `width` 32-bit values are sent, instead of being read."""
        return rows <= self.sent_rows and rows * width <= SENT_VALUES

    def fits(self, part: Any) -> bool:
        """Whether rows of `part` [..., N], a tensor or splits, fit in fp32."""
        return 0 < 4 * part.shape[-1] <= self.row_bytes and part.device == self.uses.device

    def pieces(self, rows: int) -> Iterator[tuple[int, int]]:
        """The first row of each launch that exchanging `rows` rows takes, and the row after its last."""
        return ((first, min(first + self.rows, rows)) for first in range(0, rows, self.rows))

    def gave_up(self) -> bool:
        """Whether a wait for another rank has given up; results since then are wrong. Does not wait for the device."""
        return bool(self.failed_on_host[0])

    def give_up(self) -> None:
        """End all waits of kernels, now and in future."""
        self.failed_on_host[0] = 1
        if self.rescue is None:
            self.failed.fill_(1)
            return
        with torch.cuda.stream(self.rescue):
            self.failed.copy_(self.failed_on_host, non_blocking=True)
        self.rescue.synchronize()

    def arguments(self, element_size: int) -> tuple[Any, ...]:
        """The arguments of kernels that exchange elements of `element_size` bytes, from `place_addresses_ptr` to
        `word_width`."""
        return (
            self.place_addresses, self.signal_addresses, self.word_addresses, self.uses, self.failed,
            self.failed_on_host, self.rank, self.polls, self.rows, self.row_bytes // element_size, self.sent_rows,
            self.row_bytes // 4,
        )  # fmt: skip

    def exchanged(self, part: Tensor) -> Tensor:
        """Every rank's part [..., N], in rank order: [size, ..., N]. The kernels' exchange in plain torch, on a CPU.

        Raises RuntimeError on other devices, where kernels exchange the parts.
        """
        if self.uses.device.type != "cpu":
            raise RuntimeError("parts on a device are exchanged by the kernel that adds them")
        if not part.numel():
            return part.new_empty(self.size, *part.shape)
        rows = part.reshape(-1, part.shape[-1])
        found = [self._exchanged(rows[first:last]) for first, last in self.pieces(len(rows))]
        return torch.cat(found, 1).view(self.size, *part.shape)

    def _exchanged(self, rows: Tensor) -> Tensor:
        """The same for rows [n, N] that fit in one exchange: [size, n, N]."""
        count, width = rows.shape
        use, row = self.uses[:count] + 1, torch.arange(count)
        self.places[self.rank].view(rows.dtype)[use & 1, row, :width] = rows
        for signals in self.signals:
            signals[:count, self.rank] = use
        left = self.polls * int(not self.failed[0])
        while (self.signals[self.rank][:count] - use[:, None] < 0).any():
            if left == 0:
                self.failed[0] = self.failed_on_host[0] = 1
                break
            left -= 1
        self.uses[:count] = use
        return torch.stack([places.view(rows.dtype)[use & 1, row, :width] for places in self.places])


def _signal_bytes(size: int, rows: int) -> int:
    return -(-4 * rows * size // _ALIGNMENT) * _ALIGNMENT
