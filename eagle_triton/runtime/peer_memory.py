"""Memory that all ranks of one host read: each leaves its part of a sum in its own, and reads the others' from theirs.
So they exchange the columns of logits and what they look up in an embedding, too.

Few values are sent: a rank writes each, with the count of its use beside it in one word, into the memory of others,
who look there until all are there. That takes one way between GPUs, and twice the bytes. Of more each rank leaves its
part in its own memory, signals, and reads the others': three ways. A word of eight bytes at a multiple of eight must
therefore come as a whole: GPUs keep it so, NCCL's LL protocol relies on that too, though PTX promises it only of
stores that say so.

A row has two places, which alternate by how often the row was used. So one signal suffices: who writes a
place for the next but one use has seen everybody's signal for the next, which nobody gives before the kernel that read
the former use has ended. Counts live on the device, so a CUDA graph may be replayed as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOOKS = 100_000_000  # at a signal, before a wait gives up: about a minute
PLACES = 2
# Values are sent up to so many rows, and values of 32 bits. In a step of two H200 a norm of 10 rows of 4096 takes 8.0
# µs then and 11.2 otherwise, the logits of a draft pass 5.7 and 9.9, but a norm of 60 rows 10.7 and 9.5.
SENT_ROWS = 64
SENT_VALUES = 96 * 1024
_ALIGNMENT = 256


@dataclass(frozen=True, eq=False)
class PeerMemory:
    """What a kernel needs to add up parts of `size` ranks, of which this is `rank`; see `of`.

    | name              | shape                    | dtype, layout                                               |
    |-------------------|--------------------------|-------------------------------------------------------------|
    | places            | [2, rows, row_bytes]     | uint8, one for each rank: its parts of the rows             |
    | signals           | [rows, size]             | int32, one for each rank: the last use of a row for which a |
    |                   |                          | rank's part is there                                        |
    | words             | [2, size, sent_rows,     | int64, one for each rank: what each has sent to it, 32 bits |
    |                   | row_bytes / 4]           | of a value below the count of its use                       |
    | place_addresses,  | [size]                   | int64: where these lie, as this rank's device sees them     |
    | signal_addresses, |                          |                                                             |
    | word_addresses    |                          |                                                             |
    | uses              | [rows]                   | int32: how often a row was used                             |
    | failed            | [1]                      | int32: 1 once a wait has given up, after which none waits   |
    | told              | [1]                      | the same for the host: int32 in its memory, page-locked     |
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
    told: Tensor
    looks: int = LOOKS  # how often a wait looks at a signal before it gives up
    rescue: torch.cuda.Stream | None = None  # on which `give_up` writes: no kernel waits there

    @staticmethod
    def bytes_for(size: int, rows: int, row_bytes: int, sent_rows: int = SENT_ROWS) -> int:
        """Bytes of the block that each of `size` ranks has."""
        return _signal_bytes(size, rows) + PLACES * (rows + 2 * size * sent_rows) * row_bytes

    @staticmethod
    @torch.inference_mode(False)  # it outlives a caller's
    def of(
        rank: int,
        blocks: Sequence[Tensor],
        rows: int,
        row_bytes: int,
        looks: int = LOOKS,
        sent_rows: int = SENT_ROWS,
    ) -> PeerMemory:
        """That of some ranks, in whose order `blocks` [bytes_for(...)] uint8 are: each rank's, which all of them see,
        and which is all zeros. rows: of a launch at most; row_bytes: for one of them, a multiple of 16; sent_rows: up
        to how many are sent.

        Raises ValueError for blocks that are not so.
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
        told = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        rescue = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        return PeerMemory(
            rank, places, signals, words, addresses(places), addresses(signals), addresses(words),
            zeros(rows), zeros(1), told, looks, rescue,
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
        """Whether so many rows of so many values of 32 bits are sent."""
        return rows <= self.sent_rows and rows * width <= SENT_VALUES

    def fits(self, part: Any) -> bool:
        """Whether there is room for rows like those of `part` [..., N], a tensor or its splits, in fp32 too."""
        return 0 < 4 * part.shape[-1] <= self.row_bytes and part.device == self.uses.device

    def pieces(self, rows: int) -> Iterator[tuple[int, int]]:
        """Where each of the launches that exchange so many rows begins and ends."""
        return ((first, min(first + self.rows, rows)) for first in range(0, rows, self.rows))

    def gave_up(self) -> bool:
        """Whether a wait for another rank has given up: what was computed since is wrong. Asks no device."""
        return bool(self.told[0])

    def give_up(self) -> None:
        """Let no kernel wait any more, also none that waits now."""
        self.told[0] = 1
        if self.rescue is None:
            self.failed.fill_(1)
            return
        with torch.cuda.stream(self.rescue):
            self.failed.copy_(self.told, non_blocking=True)
        self.rescue.synchronize()

    def arguments(self, element_size: int) -> tuple[Any, ...]:
        """What kernels take that exchange parts of elements of so many bytes, from `place_addresses_ptr` to
        `word_width`."""
        return (
            self.place_addresses, self.signal_addresses, self.word_addresses, self.uses, self.failed, self.told,
            self.rank, self.looks, self.rows, self.row_bytes // element_size, self.sent_rows, self.row_bytes // 4,
        )  # fmt: skip

    def exchanged(self, part: Tensor) -> Tensor:
        """Every rank's part [..., N], in their order, [size, ..., N]: what the kernels do, in plain torch and on a CPU.

        Raises RuntimeError on a device, where kernels exchange parts and signals.
        """
        if self.uses.device.type != "cpu":
            raise RuntimeError("parts that lie on a device are exchanged by the kernel that adds them up")
        if not part.numel():
            return part.new_empty(self.size, *part.shape)
        rows = part.reshape(-1, part.shape[-1])
        found = [self._exchanged(rows[first:last]) for first, last in self.pieces(len(rows))]
        return torch.cat(found, 1).view(self.size, *part.shape)

    def _exchanged(self, rows: Tensor) -> Tensor:
        """The same of as many rows [n, N] as there is room for: [size, n, N]."""
        count, width = rows.shape
        use, row = self.uses[:count] + 1, torch.arange(count)
        self.places[self.rank].view(rows.dtype)[use & 1, row, :width] = rows
        for signals in self.signals:
            signals[:count, self.rank] = use
        left = self.looks * int(not self.failed[0])
        while (self.signals[self.rank][:count] - use[:, None] < 0).any():
            if left == 0:
                self.failed[0] = self.told[0] = 1
                break
            left -= 1
        self.uses[:count] = use
        return torch.stack([places.view(rows.dtype)[use & 1, row, :width] for places in self.places])


def _signal_bytes(size: int, rows: int) -> int:
    return -(-4 * rows * size // _ALIGNMENT) * _ALIGNMENT
