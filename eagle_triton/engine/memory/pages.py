"""Where keys and values of all sequences of an engine lie: in pages of PAGE_ROWS rows, which sequences share.

A page holds the rows of one stretch of a sequence in every layer of target and draft. A sequence holds the pages that
its table names, and no other; page 0 is nobody's: what is written behind a sequence's pages goes there. A page whose
rows are a known beginning of a prompt has a key, by which later requests find it instead of computing it again; it is
kept after its sequences have left, until its place is needed.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.memory.mapped_memory import MappedMemory, can_map
from eagle_triton.engine.upload import upload

log = logging.getLogger(__name__)

PAGE_ROWS = 64  # of a page: a tile of attention's keys
_GROWTH = 1.5  # of a pool whose memory moves when it grows, so that it seldom does
_MIN_BYTES, _SHARE = 1 << 25, 32  # others grow by so much, or by this part of what there is


def check_cache_tokens(tokens: int | None) -> None:
    """Raise TypeError or ValueError unless this is a number of tokens to have room for, or None."""
    if tokens is None:
        return
    if isinstance(tokens, bool) or not isinstance(tokens, int):
        raise TypeError(f"cache_tokens must be an integer or None, got {tokens!r}")
    if tokens < 1:
        raise ValueError(f"cache_tokens must be at least 1, got {tokens}")


class CacheFullError(RuntimeError):
    """There is no room for a request's keys and values now; nothing has changed."""


class PageMemory:
    """Keys and values of layers of one shape in all pages of a pool."""

    def __init__(
        self, layers: int, heads: int, width: int, dtype: torch.dtype, device: torch.device, pages: int, grows: bool
    ):
        """pages: that there is memory for, all zeros. grows: there will be more, at the same address where that can
        be."""
        shape = (layers, 2, heads, PAGE_ROWS, width)
        self.page_bytes = math.prod(shape) * dtype.itemsize
        self._mapped = _mapped(device, pages * self.page_bytes) if grows else None
        if self._mapped is None:
            self._data = torch.zeros(pages, *shape, dtype=dtype, device=device)
        else:
            most = self._mapped.reserved // self.page_bytes
            self._data = self._mapped.tensor(dtype)[: most * math.prod(shape)].view(most, *shape)
            self._data[:pages].zero_()

    @property
    def data(self) -> Tensor:
        """[layers, 2, P, Hkv, R, d]: a view, in memory page by page. Where it grows, the last pages have no memory."""
        return self._data.permute(1, 2, 0, 3, 4, 5)

    @property
    def moves(self) -> bool:
        """Whether it has another address when it has grown."""
        return self._mapped is None

    @property
    def bytes_beside_torch(self) -> int:
        """Bytes that torch does not know of."""
        return 0 if self._mapped is None else self._mapped.size

    def resized(self, pages: int, known: int) -> Tensor:
        """Memory of so many pages, with what the first `known` hold and zeros behind."""
        if self._mapped is not None:
            self._mapped.grow(pages * self.page_bytes)
            self._data[known:pages].zero_()
            return self._data
        larger = torch.zeros(pages, *self._data.shape[1:], dtype=self._data.dtype, device=self._data.device)
        larger[:known] = self._data[:known]
        return larger

    def replace(self, data: Tensor) -> None:
        """Keep everything in what `resized` gave."""
        self._data = data


def _mapped(device: torch.device, size: int) -> MappedMemory | None:
    """Memory that grows where it lies; None where a device or its driver has none."""
    if not can_map(device):
        return None
    try:
        return MappedMemory(device, size)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        log.warning("keys and values move when their memory grows: %s", error)
        return None


class PagePool:
    """The pages of an engine: which are free, how many sequences hold each, and what is known of those that are kept.

    Page numbers begin at 1. All of it is on the host, but for the memory.
    """

    def __init__(
        self,
        limit: int | None = None,
        on_move: Callable[[], None] = lambda: None,
        all_gather_object: Callable[[Any], list[Any]] = lambda value: [value],
    ):
        """limit: the most pages, all of which have memory from the first on; None: it grows as memory allows, and
        `on_move` is called when that has other addresses. all_gather_object: gives the values of all ranks, whose pools
        grow together or not at all."""
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1 page, got {limit}")
        self.limit, self._on_move, self._all_gather_object = limit, on_move, all_gather_object
        self._memories: dict[int, tuple[object, PageMemory]] = {}
        self._pages = 1  # that there is memory for, page 0 included
        self._free: list[int] = []  # the next to take last
        self._holders: dict[int, int] = {}  # sequences that hold a page
        self._keys: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # that nobody holds, the next to give up first
        self._old: set[int] = set()  # pages that are held, and must not be found any more
        self._short = False  # growing has failed since pages came back last
        self.forgot = 0  # how often nothing was found any more
        self.unread: set[int] = set()  # pages of prompts whose rows are still to be computed

    def memory(
        self, owner: object, layers: int, heads: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> PageMemory:
        """That of some layers, made the first time `owner`, the first of these, asks for it."""
        if id(owner) not in self._memories:
            memory = PageMemory(layers, heads, width, dtype, device, self._pages, grows=self.limit is None)
            self._memories[id(owner)] = (owner, memory)
        return self._memories[id(owner)][1]

    @property
    def pages(self) -> int:
        """How many there is memory for."""
        return self._pages - 1

    @property
    def held(self) -> int:
        """How many sequences hold."""
        return len(self._holders)

    @property
    def kept(self) -> int:
        """How many nobody holds, and prompts may find."""
        return len(self._kept)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return sum(memory.page_bytes for _, memory in self._memories.values())

    @property
    def bytes_beside_torch(self) -> int:
        """Bytes of its memory that torch does not know of."""
        return sum(memory.bytes_beside_torch for _, memory in self._memories.values())

    def has_room(self, count: int) -> bool:
        """Whether so many pages can be taken now, as far as is known without trying."""
        if self.limit is None:
            return not self._short or count <= len(self._free) + len(self._kept)
        return count <= self.limit - len(self._holders)

    def take(self, count: int) -> list[int]:
        """So many pages, for one sequence. Raises CacheFullError if there are not as many."""
        missing = count - len(self._free) - len(self._kept)
        if missing > 0:
            self._grow(missing)
        while len(self._free) < count:
            page, _ = self._kept.popitem(last=False)
            self._forget_key(page)
            self._free.append(page)
        taken = [self._free.pop() for _ in range(count)]
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def find(self, key: bytes) -> int | None:
        """Take the page with a key for one more sequence; None if there is none."""
        page = self._by_key.get(key)
        if page is not None:
            self._kept.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
        return page

    def name(self, page: int, key: bytes, unread: bool) -> None:
        """Let a page that is held be found by a key, unless another is. unread: its rows are still to be computed."""
        if key not in self._by_key and page not in self._keys and page not in self._old:
            self._keys[page], self._by_key[key] = key, page
        if unread:
            self.unread.add(page)

    def give(self, pages: Sequence[int], forget: bool = False) -> list[int]:
        """A sequence holds pages no more; those with keys are kept, its last ones given up first, unless one is to
        forget them. Returns those that nothing is left of."""
        gone = []
        for page in reversed(pages):
            if forget:
                self._forget_key(page)
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            self._old.discard(page)
            self._short = False
            if page in self.unread:
                self.unread.remove(page)
                self._forget_key(page)
            if page in self._keys:
                self._kept[page] = None
            else:
                self._free.append(page)
                gone.append(page)
        return gone

    def reclaim(self) -> None:
        """No sequence holds a page any more, whatever interrupted those who should have given theirs."""
        for page, holders in list(self._holders.items()):
            for _ in range(holders):
                self.give([page])

    def forget(self) -> None:
        """No page is found by what it holds now, or will until its sequences have left."""
        self.forgot += 1
        self._old = set(self._holders)
        self._free += self._kept
        self._kept.clear()
        self._keys.clear()
        self._by_key.clear()

    def _forget_key(self, page: int) -> None:
        key = self._keys.pop(page, None)
        if key is not None:
            del self._by_key[key]

    def _grow(self, missing: int) -> None:
        """Make room for so many more pages, or raise CacheFullError."""
        memories = [memory for _, memory in self._memories.values()]
        moves = any(memory.moves for memory in memories)
        if self.limit is not None:
            pages = 1 + self.limit
        elif moves:
            pages = max(self._pages + missing, 1 + int(self.pages * _GROWTH))
        else:
            pages = self._pages + max(missing, -(-_MIN_BYTES // max(self.page_bytes, 1)), self._pages // _SHARE)
        if pages < self._pages + missing:
            raise CacheFullError(f"{missing} pages of {PAGE_ROWS} rows are missing in a cache of {self.limit}")
        failure: torch.OutOfMemoryError | None = None
        try:
            larger = [memory.resized(pages, self._pages) for memory in memories]
        except torch.OutOfMemoryError as error:
            failure = error
        if reason := next(filter(None, self._all_gather_object(failure and str(failure))), None):
            self._short = True
            raise CacheFullError(f"no memory for {pages} pages of {PAGE_ROWS} rows: {reason}") from failure
        for memory, data in zip(memories, larger, strict=True):
            memory.replace(data)
        if moves:
            self._on_move()
        self._free = [*range(pages - 1, self._pages - 1, -1), *self._free]
        self._pages = pages


class PrefixKeys(NamedTuple):
    """What a sequence's pages can be found by: the keys of a prompt's whole pages, in turn."""

    keys: list[bytes]

    @staticmethod
    def of(tokens: Tensor, seed: bytes = b"", known: Sequence[bytes] = ()) -> PrefixKeys:
        """Of tokens [L] int64 on the host, whose last row is always computed anew.

        A page's key follows from all tokens up to the one behind it, with which a head's last row there is paired.
        seed: what else its rows depend on. known: the first keys, if they are.
        """
        keys, values = list(known), tokens.numpy()
        for page in range(len(keys), (len(tokens) - 1) // PAGE_ROWS):
            first = page * PAGE_ROWS
            before = keys[-1] if keys else seed
            stretch = values[first : first + PAGE_ROWS + 1].tobytes()
            keys.append(hashlib.blake2b(before + stretch, digest_size=16).digest())
        return PrefixKeys(keys)


class SlotPages:
    """The pages of a batch's slots, and their tables on the device."""

    def __init__(self, pool: PagePool, slots: int, capacity: int, device: torch.device):
        """capacity: the most rows of a sequence, a multiple of PAGE_ROWS."""
        self.pool, self.slots = pool, slots
        self.table = torch.zeros(slots, -(-capacity // PAGE_ROWS), dtype=torch.int32, device=device)
        self._held: list[list[int]] = [[] for _ in range(slots)]  # shared with parts

    @staticmethod
    def whole(slots: int, capacity: int, device: torch.device) -> SlotPages:
        """A pool of their own, in which each slot has pages for all its rows."""
        width = -(-capacity // PAGE_ROWS)
        pages = SlotPages(PagePool(slots * width), slots, capacity, device)
        pages.take(dict.fromkeys(range(slots), capacity), {})
        pages.write(range(slots))
        return pages

    def part(self, slots: slice) -> SlotPages:
        """Those of some of the slots."""
        part = object.__new__(SlotPages)
        part.pool, part.table, part._held = self.pool, self.table[slots], self._held[slots]
        part.slots = len(part._held)
        return part

    @property
    def capacity(self) -> int:
        """The most rows of a sequence."""
        return self.table.shape[1] * PAGE_ROWS

    def of(self, slot: int) -> Sequence[int]:
        """A slot's pages."""
        return self._held[slot]

    def take(self, rows: Mapping[int, int], beginnings: Mapping[int, PrefixKeys]) -> dict[int, int]:
        """Give slots that have none pages for so many rows. Of those with a beginning, pages that have it are shared.

        The tables are as before until `write`. Returns how many pages each slot has found. Raises CacheFullError, and
        takes nothing, if there are not enough.
        """
        found = {}
        try:
            for slot, count in rows.items():
                pages, keys = self._held[slot], beginnings[slot].keys if slot in beginnings else []
                assert not pages, f"slot {slot} has pages already"
                for key in keys:
                    page = self.pool.find(key)
                    if page is None:
                        break
                    pages.append(page)
                found[slot] = len(pages)
                pages += self.pool.take(max(-(-count // PAGE_ROWS) - len(pages), 0))
                for page, key in list(zip(pages, keys, strict=False))[found[slot] :]:
                    self.pool.name(page, key, unread=True)
        except BaseException:
            for slot in reversed(rows):
                self.give(slot)
            raise
        return found

    def extend(self, slot: int, rows: int) -> None:
        """Give a slot the pages that it lacks for so many rows. Its table is as before until `write`. Raises
        CacheFullError, and takes nothing, if there are not enough."""
        missing = -(-rows // PAGE_ROWS) - len(self._held[slot])
        if missing > 0:
            self._held[slot] += self.pool.take(missing)

    def write(self, slots: Sequence[int]) -> None:
        """Write the tables of slots."""
        width = max(len(self._held[slot]) for slot in slots)
        rows = [[*self._held[slot], *[0] * (width - len(self._held[slot]))] for slot in slots]
        where = upload(list(slots), torch.int64, self.table.device)
        self.table[where, :width] = upload(rows, torch.int32, self.table.device)

    def keep(self, slot: int, beginning: PrefixKeys) -> None:
        """Let a slot's pages, whose rows are computed, be found by what they hold now."""
        for page, key in zip(self._held[slot], beginning.keys, strict=False):
            self.pool.name(page, key, unread=False)

    def give(self, slot: int, forget: bool = False) -> list[int]:
        """A slot has no pages any more, see PagePool.give. What is launched later writes to nobody's page."""
        pages = self._held[slot]
        if not pages:
            return []
        gone: list[int] = []
        while pages:  # an interrupt leaves nothing given twice
            gone += self.pool.give([pages.pop()], forget)
        self.table[slot].zero_()
        return gone

    def move(self, source: int, target: int) -> None:
        """Let slot `target`, which has no pages, have those of slot `source`, which has none from now on."""
        assert not self._held[target], f"slot {target} has pages already"
        self._held[target] += self._held[source]
        self._held[source].clear()
        self.table[target] = self.table[source]
        self.table[source].zero_()

    def clear(self) -> None:
        """No slot has pages any more."""
        for slot in range(self.slots):
            self.give(slot)
