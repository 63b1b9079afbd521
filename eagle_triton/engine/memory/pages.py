"""The pages of PAGE_ROWS rows that hold the keys and values of all sequences of an engine.

A page holds PAGE_ROWS consecutive rows of a sequence, in every layer of target and draft. A sequence holds the pages
in its table. Page 0 belongs to no sequence: writes past a sequence's pages go there. Full pages of prompts and outputs
have a key, by which later requests with the same beginning share them. Such a page is kept after its sequences have
left, until its memory is needed.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle_triton.engine.memory.by_slot import slices_of
from eagle_triton.engine.memory.mapped_memory import MappedMemory, can_map
from eagle_triton.engine.upload import upload
from eagle_triton.values import checked_integer

log = logging.getLogger(__name__)

PAGE_ROWS = 64  # one tile of attention's keys
_GROWTH = 1.5  # growth factor of memory that moves; large, so that it moves rarely
_MIN_BYTES, _SHARE = 1 << 25, 32  # memory that does not move grows by the larger of 32 MiB and 1/32


MAX_ROWS, MAX_CACHE_TOKENS = 1 << 30, PAGE_ROWS << 30
"""The most rows of a sequence and tokens of a cache: kernels count rows and pages in 32 bits."""


def check_cache_tokens(tokens: int | None) -> None:
    """Raise TypeError or ValueError unless `tokens` is a positive integer that is not too large, or None."""
    if tokens is None:
        return
    if checked_integer("cache_tokens", tokens, 1, kind="an integer or None") > MAX_CACHE_TOKENS:
        raise ValueError(f"cache_tokens must be at most {MAX_CACHE_TOKENS}, got {tokens}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch had no memory for a tensor. On a CPU it has no class of errors for that."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


PageShape = tuple[int, int, int, int]  # layers, sides (2: keys and values; or 1), heads, width


class CacheFullError(RuntimeError):
    """There is no room for a request's keys and values now. Nothing has changed."""


class PageMemory:
    """The keys and values of layers of one shape, in all pages of a pool."""

    def __init__(self, shape: PageShape, dtype: torch.dtype, device: torch.device, pages: int, grows: bool):
        """pages: how many to allocate, all zeros. grows: more may follow, at the same address if possible."""
        page = (*shape[:3], PAGE_ROWS, shape[3])
        self.page_bytes = math.prod(page) * dtype.itemsize
        self._mapped = _mapped(device, pages * self.page_bytes) if grows else None
        if self._mapped is None:
            self._data = torch.zeros(pages, *page, dtype=dtype, device=device)
        else:
            most = self._mapped.reserved // self.page_bytes
            self._data = self._mapped.tensor(dtype)[: most * math.prod(page)].view(most, *page)
            self._data[:pages].zero_()

    @property
    def data(self) -> Tensor:
        """[layers, sides, P, Hkv, R, d]: a view; memory is page by page. If it grows, the last pages have no memory."""
        return self._data.permute(1, 2, 0, 3, 4, 5)

    @property
    def moves(self) -> bool:
        """Whether growing changes its address."""
        return self._mapped is None

    @property
    def bytes_beside_torch(self) -> int:
        """Bytes that torch does not count."""
        return 0 if self._mapped is None else self._mapped.size

    def resized(self, pages: int, known: int) -> Tensor:
        """Memory of `pages` pages: the first `known` with their contents, the others zero."""
        if self._mapped is not None:
            self._mapped.grow(pages * self.page_bytes)
            self._data[known:pages].zero_()
            return self._data
        larger = torch.zeros(pages, *self._data.shape[1:], dtype=self._data.dtype, device=self._data.device)
        larger[:known] = self._data[:known]
        return larger

    def replace(self, data: Tensor) -> None:
        """Use the memory that `resized` returned."""
        self._data = data


def _mapped(device: torch.device, size: int) -> MappedMemory | None:
    """Memory that grows without moving; None if the device or its driver has none."""
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
    """The pages of an engine: which are free, how many sequences hold each, and by which keys they are found.

    Page numbers begin at 1. Everything but the memory is on the host.
    """

    def __init__(
        self,
        limit: int | None = None,
        on_move: Callable[[], None] = lambda: None,
        all_gather_object: Callable[[Any], list[Any]] = lambda value: [value],
    ):
        """limit: the number of pages, all allocated at once; None: the pool grows as memory allows, and calls `on_move`
        after its memory moved. all_gather_object: gathers a value from all ranks; their pools grow together or not at
        all."""
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1 page, got {limit}")
        self.limit, self._on_move, self._all_gather_object = limit, on_move, all_gather_object
        self._memories: dict[int, tuple[object, PageMemory]] = {}
        self._pages = 1  # with memory, page 0 included
        self._free: list[int] = []  # taken from the end
        self._holders: dict[int, int] = {}  # how many sequences hold a page
        self._keys: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # pages without a holder, the next to reuse first
        self._outdated: set[int] = set()  # held pages that must not be found any more
        self._growth_failed = False  # since the last page was returned
        self.forgot = 0  # how often `forget` was called
        self.unread: set[int] = set()  # pages of prompts, not computed yet

    def memory(self, owner: object, shape: PageShape, dtype: torch.dtype, device: torch.device) -> PageMemory:
        """The memory of some layers, made on the first call. owner: the first of them."""
        if id(owner) not in self._memories:
            memory = PageMemory(shape, dtype, device, self._pages, self.limit is None)
            self._memories[id(owner)] = (owner, memory)
        return self._memories[id(owner)][1]

    @property
    def pages(self) -> int:
        """How many pages have memory."""
        return self._pages - 1

    @property
    def held(self) -> int:
        """How many pages are held by sequences."""
        return len(self._holders)

    @property
    def kept(self) -> int:
        """How many pages have no holder, and may be found by prompts."""
        return len(self._kept)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return sum(memory.page_bytes for _, memory in self._memories.values())

    @property
    def bytes_beside_torch(self) -> int:
        """Bytes of its memory that torch does not count."""
        return sum(memory.bytes_beside_torch for _, memory in self._memories.values())

    def has_room(self, count: int) -> bool:
        """Whether `count` pages can be taken now, as far as is known without trying."""
        if self.limit is None:
            return not self._growth_failed or count <= len(self._free) + len(self._kept)
        return count <= self.limit - len(self._holders)

    def take(self, count: int) -> list[int]:
        """Take `count` pages for one sequence. Raises CacheFullError if there are not enough."""
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
        """Take the page with this key for one more sequence; None if there is none."""
        page = self._by_key.get(key)
        if page is not None:
            self._kept.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
        return page

    def name(self, page: int, key: bytes, unread: bool) -> None:
        """Give a held page a key, unless another page has it. unread: its rows are not computed yet."""
        if key not in self._by_key and page not in self._keys and page not in self._outdated:
            self._keys[page], self._by_key[key] = key, page
        if unread:
            self.unread.add(page)

    def give(self, pages: Sequence[int], forget: bool = False) -> list[int]:
        """Return pages of one sequence. Pages with keys are kept, unless `forget`; the last ones are reused first.
        Returns the pages that are free now."""
        gone = []
        for page in reversed(pages):
            if forget:
                self._forget_key(page)
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            self._outdated.discard(page)
            self._growth_failed = False
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
        """Take all pages back, also those that an interrupted caller did not return."""
        for page, holders in list(self._holders.items()):
            for _ in range(holders):
                self.give([page])

    def forget(self) -> None:
        """Let no page be found any more: the model has changed. Held pages get no keys until they are returned."""
        self.forgot += 1
        self._outdated = set(self._holders)
        self._free += self._kept
        self._kept.clear()
        self._keys.clear()
        self._by_key.clear()

    def _forget_key(self, page: int) -> None:
        key = self._keys.pop(page, None)
        if key is not None:
            del self._by_key[key]

    def _grow(self, missing: int) -> None:
        """Make room for `missing` more pages, or raise CacheFullError."""
        memories = [memory for _, memory in self._memories.values()]
        moves = any(memory.moves for memory in memories)
        if self.limit is not None:
            pages = 1 + self.limit
        elif moves:
            pages = max(self._pages + missing, 1 + int(self.pages * _GROWTH))
        else:
            pages = self._pages + max(missing, -(-_MIN_BYTES // max(self.page_bytes, 1)), self._pages // _SHARE)
        if pages < self._pages + missing:
            raise CacheFullError(
                f"{missing} more pages ({PAGE_ROWS} rows) do not fit into a cache of {self.limit} pages"
            )
        failure: RuntimeError | None = None
        try:
            larger = [memory.resized(pages, self._pages) for memory in memories]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failure = error
        if reason := next(filter(None, self._all_gather_object(failure and str(failure))), None):
            self._growth_failed = True
            remedy = "" if self.limit is None else "; lower cache_tokens, or leave it out"
            raise CacheFullError(f"no memory for {pages} pages of {PAGE_ROWS} rows: {reason}{remedy}") from failure
        for memory, data in zip(memories, larger, strict=True):
            memory.replace(data)
        if moves:
            self._on_move()
        self._free = [*range(pages - 1, self._pages - 1, -1), *self._free]
        self._pages = pages


def prefix_keys(tokens: Tensor, seed: bytes = b"", known: Sequence[bytes] = ()) -> list[bytes]:
    """The keys of a prompt's full pages, in order. tokens: [L] int64 on the host. The last token's row is always
    computed, so it is in no page with a key.

    A page's key depends on all tokens up to the one after the page, because a head's last row there reads it.
    seed: what else the rows depend on. known: the first keys, if they were computed before.
    """
    keys, values = list(known), tokens.numpy()
    for page in range(len(keys), (len(tokens) - 1) // PAGE_ROWS):
        first = page * PAGE_ROWS
        before = keys[-1] if keys else seed
        covered = values[first : first + PAGE_ROWS + 1].tobytes()
        keys.append(hashlib.blake2b(before + covered, digest_size=16).digest())
    return keys


class SlotPages:
    """The pages of a batch's slots, and their tables on the device."""

    def __init__(self, pool: PagePool, slots: int, capacity: int, device: torch.device):
        """capacity: the most rows of a sequence, a multiple of PAGE_ROWS."""
        self.pool, self.slots = pool, slots
        self.table = torch.zeros(slots, -(-capacity // PAGE_ROWS), dtype=torch.int32, device=device)
        self._held: list[list[int]] = [[] for _ in range(slots)]  # shared with parts

    @staticmethod
    def whole(slots: int, capacity: int, device: torch.device) -> SlotPages:
        """A new pool, in which each slot has pages for all its rows."""
        width = -(-capacity // PAGE_ROWS)
        pages = SlotPages(PagePool(slots * width), slots, capacity, device)
        pages.take(dict.fromkeys(range(slots), capacity), {})
        pages.write(range(slots))
        return pages

    def part(self, slots: slice) -> SlotPages:
        part = copy.copy(self)
        part.table, part._held = self.table[slots], self._held[slots]
        part.slots = len(part._held)
        return part

    @property
    def capacity(self) -> int:
        """The most rows of a sequence."""
        return self.table.shape[1] * PAGE_ROWS

    def of(self, slot: int) -> Sequence[int]:
        return self._held[slot]

    def take(self, rows: Mapping[int, int], prefixes: Mapping[int, Sequence[bytes]]) -> dict[int, int]:
        """Give slots without pages enough for `rows`. Slots share the pages that have keys in `prefixes`.

        The tables do not change until `write`. Returns how many pages each slot shares. Raises CacheFullError, and
        takes nothing, if there are not enough.
        """
        found = {}
        try:
            for slot, count in rows.items():
                pages, keys = self._held[slot], prefixes.get(slot, ())
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
            self.give(*reversed(rows))
            raise
        return found

    def extend(self, slot: int, rows: int) -> None:
        """Give a slot its missing pages for `rows` rows. Its table does not change until `write`. Raises
        CacheFullError, and takes nothing, if there are not enough."""
        missing = -(-rows // PAGE_ROWS) - len(self._held[slot])
        if missing > 0:
            self._held[slot] += self.pool.take(missing)

    def write(self, slots: Sequence[int]) -> None:
        """Write the slots' tables to the device."""
        width = max(len(self._held[slot]) for slot in slots)
        rows = [[*self._held[slot], *[0] * (width - len(self._held[slot]))] for slot in slots]
        where = upload(list(slots), torch.int64, self.table.device)
        self.table[where, :width] = upload(rows, torch.int32, self.table.device)

    def keep(self, slot: int, prefix: Sequence[bytes]) -> None:
        """Let a slot's pages be found by these keys; their rows are computed."""
        for page, key in zip(self._held[slot], prefix, strict=False):
            self.pool.name(page, key, unread=False)

    def give(self, *slots: int, forget: bool = False) -> list[int]:
        """Return the pages of slots, see PagePool.give. Later launches write to page 0."""
        holding = [slot for slot in slots if self._held[slot]]
        gone: list[int] = []
        for slot in holding:
            while pages := self._held[slot]:  # one by one: after an interrupt none is returned twice
                gone += self.pool.give([pages.pop()], forget)
        for run in slices_of(holding):
            self.table[run].zero_()
        return gone

    def move(self, source: int, target: int) -> None:
        """Move the pages of slot `source` to slot `target`, which has none."""
        assert not self._held[target], f"slot {target} has pages already"
        self._held[target] += self._held[source]
        self._held[source].clear()
        self.table[target] = self.table[source]
        self.table[source].zero_()

    def clear(self) -> None:
        """Return the pages of all slots."""
        self.give(*range(self.slots))
