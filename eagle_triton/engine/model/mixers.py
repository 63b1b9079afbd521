"""What mixes the tokens of a sequence in a layer, and what it remembers of them: attention and its cache of keys and
values.

A kind of layer is a `Mixer` (what it computes) and a `MixerCache` (what it remembers). A forward over trees reads what
is committed, and leaves what its rows would add behind the committed rows or in the cache's pending tensors; after
verification `commit` makes the accepted path part of what is remembered and forgets the rest. A causal forward is
remembered as it runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.memory.pages import PAGE_ROWS, PageMemory, SlotPages
from eagle_triton.engine.model.modules import Norm, Projection, Rotary, in_float8, project_split, project_stack
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.prompt_chunks import PromptChunks, PromptSpan
from eagle_triton.runtime.float8_pair import Float8Pair, whole_of
from eagle_triton.runtime.split_sums import Product, SplitSums, total_of

if TYPE_CHECKING:
    from typing_extensions import Self

STRETCH_WIDTH = 128  # of heads that prompt_attention takes


class Rows(NamedTuple):
    """Where the new rows of a forward stand: in the caches, in their sequences, and whom they see."""

    lengths: Tensor  # [B] int32: committed rows, visible to all
    first: Tensor  # [B] int32: where the new rows begin, and what their depths count from
    depths: Tensor | None  # [B, n] int32: their positions are first + depths; None: one after another
    ancestors: Tensor | None  # [B, n, W] int64, bit j: row lengths + j is visible; None: causal
    new_keys: int | None = None  # none of the new rows sees one from `lengths` + that on; None: by their bits alone
    tune_for_nodes: int | None = None  # nodes that launches are chosen for, as `linear` has it; None: n
    depth: int = 0  # of a tree: no node lies more below its root
    skip: int = 0  # rows between `first` and the new ones: those of the tree's levels above
    stretch: PromptSpan | None = None  # see PromptChunks

    @property
    def in_draft_pass(self) -> bool:
        return self.tune_for_nodes is not None

    @property
    def tune_for_rows(self) -> int | None:
        return None if self.tune_for_nodes is None else self.tune_for_nodes * len(self.lengths)


class AcceptedPath(NamedTuple):
    """What verification accepted of the trees that stood behind `before` committed rows."""

    before: Tensor  # [B] int32
    path: Tensor  # [B, D + 1] int32: node indices root..last accepted, then -1
    accepted: Tensor  # [B] int32: drafts accepted; -1 where nothing is committed, the root neither
    of_chain: bool = False  # the nodes of a path are 0, 1, 2 ..., whose rows lie where they belong


class MixerCache(ABC):
    """What the layers of one kind and shape remember of each slot's sequence. Its tensors do not move between steps."""

    def new_pending(self, nodes: int) -> Any:
        """Where forwards over trees of `nodes` nodes leave what they would add; None: in the cache itself."""
        return None

    @abstractmethod
    def layer(self, index: int, pending: Any = None) -> Any:
        """What the forward of the index-th of these layers takes; `pending` is None in a causal one."""

    @abstractmethod
    def part(self, slots: slice) -> Self:
        """The same of some of the slots: views of the same tensors."""

    def of_pieces(self, pieces: PromptChunks, lengths: Tensor) -> Self:
        """The same for a causal forward over pieces of some slots' prompts, whose lengths are [B] int32. See
        `Mixer.reads_pieces`."""
        raise AssertionError("these layers read one prompt after another")

    @abstractmethod
    def clear(self) -> None:
        """Begin all slots anew: no sequence is remembered."""

    def wipe(self, pages: Tensor) -> None:
        """Leave nothing in pages [n] int64 of the pool, which nobody holds any more; nothing where none are used."""

    @abstractmethod
    def copy(self, source: int, target: int, length: int) -> None:
        """Let slot `target` remember what slot `source` does, a sequence of `length` committed tokens."""

    def move(self, source: int, target: int, length: int) -> None:
        """The same where the slot's pages have gone from `source` to `target`."""
        self.copy(source, target, length)

    @abstractmethod
    def commit(self, ops: Operations, pending: Any, accepted: AcceptedPath) -> None:
        """Remember the accepted path and forget the rest of the last forward's trees.

        pending: where their rows are. A slot where nothing is accepted stays as it is.
        """

    @property
    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """All that is kept on the device."""


class Mixer(ABC):
    """What mixes the tokens of a sequence in a layer."""

    most_nodes: ClassVar[int | None] = None  # of a tree; None: any number
    reads_pieces: ClassVar[bool] = False  # whether a causal forward may read pieces of several prompts
    by_token: ClassVar[bool] = False  # whether each token is remembered by itself, where others may find it

    @property
    def reads_float8(self) -> bool:
        """Whether all that reads its input are products with weights of eight bits."""
        return False

    @property
    def stretch_shape(self) -> tuple[int, int, int] | None:
        """Heads of queries, of keys, and their width, by which this takes a stretch of one prompt; None: it reads that
        as it reads any pieces."""
        return None

    def sees_all(self, rows: int) -> bool:
        """Whether each of so many tokens sees all before it, and remembers nothing else."""
        return False

    @property
    @abstractmethod
    def cache_shape(self) -> Hashable:
        """Layers of one class whose shapes are equal share a cache, and one launch that commits it."""

    @abstractmethod
    def new_cache(
        self, layers: int, slots: int, pages: SlotPages | None, dtype: torch.dtype, device: torch.device
    ) -> MixerCache:
        """An empty cache for so many layers, of which this is the first.

        pages: of these slots, in whose pool keys and values are; None only where there are none.
        """

    @abstractmethod
    def forward(self, ops: Operations, x: Tensor | Float8Pair, cache: Any, rows: Rows) -> Product:
        """New rows x [B, n, *] of trees or chains, `cache` being this layer's; as a pair only where it `reads_float8`.

        Returns their update of the residual stream [B, n, H], its splits perhaps still apart.
        """

    def remember(self, ops: Operations, x: Tensor | Float8Pair, cache: Any, rows: Rows) -> None:
        """A causal forward of which nothing is asked but that it is remembered."""
        self.forward(ops, x, cache, rows)

    def forward_last(self, ops: Operations, x: Tensor | Float8Pair, cache: Any, rows: Rows, last: Tensor) -> Product:
        """A causal forward over x [P, n, *] of which flat rows last [m] int64 of P * n are asked alone: [m, 1, H]."""
        out = total_of(self.forward(ops, x, cache, rows))
        return out.flatten(0, 1)[last][:, None]

    @property
    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """All weights that a forward reads."""


class KeyValues(NamedTuple):
    """Keys and values of one attention layer."""

    data: Tensor  # [2, P, Hkv, R, d]
    table: Tensor | None = None  # [B, M] int32: the pages of each sequence; None: P = B, its own


class KeyValueCache(MixerCache):
    """Keys and values of attention layers of one shape, in pages; row p of a sequence is position p's.

    A forward writes its rows behind the committed ones, where a commit moves the accepted ones together.
    """

    def __init__(self, memory: PageMemory, table: Tensor):
        """table [B, M] int32: the pages of each sequence."""
        self._memory, self._table = memory, table

    @property
    def data(self) -> Tensor:
        """[layers, 2, P, Hkv, R, d]"""
        return self._memory.data

    def layer(self, index: int, pending: None = None) -> KeyValues:
        return KeyValues(self.data[index], self._table)

    def part(self, slots: slice) -> KeyValueCache:
        return KeyValueCache(self._memory, self._table[slots])

    def of_pieces(self, pieces: PromptChunks, lengths: Tensor) -> KeyValueCache:
        assert pieces.slots is not None
        return KeyValueCache(self._memory, self._table[pieces.slots.long()])

    def clear(self) -> None:
        """Nothing: rows beyond a sequence's length are never read."""

    def wipe(self, pages: Tensor) -> None:
        self.data[:, :, pages] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        used = -(-length // PAGE_ROWS)
        data, (origin, place) = self.data, self._table[[source, target], :used].long()
        data[:, :, place] = data[:, :, origin]

    def move(self, source: int, target: int, length: int) -> None:
        """Nothing: the pages are the same."""

    def commit(self, ops: Operations, pending: None, accepted: AcceptedPath) -> None:
        if not accepted.of_chain:
            ops.commit(self.data, accepted.before, accepted.path, accepted.accepted, table=self._table)

    @property
    def tensors(self) -> Iterator[Tensor]:
        yield self.data


@dataclass(frozen=True)
class Attention(Mixer):
    """Grouped-query attention. For an EAGLE-3 head q, k and v read 2H columns.

    gated: each head's queries are followed by a gate of what the head attends to, 2d rows of q for a head (Qwen3-Next,
    Qwen3.5). q_norm and k_norm are of one kind and eps, [d] each, or [Hq * d] and [Hkv * d] (see `norms_rows`).
    """

    q: Projection
    k: Projection
    v: Projection
    o: Projection
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary: Rotary
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sliding_window: int | None = None
    gated: bool = False
    sinks: Tensor | None = None  # [Hq]: a score for each head that takes its share of attention and gives nothing
    softcap: float | None = None  # scores are bounded as softcap * tanh(score / softcap)

    reads_pieces: ClassVar[bool] = True
    by_token: ClassVar[bool] = True

    @property
    def reads_float8(self) -> bool:
        return in_float8(self.q, self.k, self.v)

    @property
    def stretch_shape(self) -> tuple[int, int, int] | None:
        if self.sliding_window is not None or self.head_dim % 8 or self.head_dim > STRETCH_WIDTH:
            return None
        return self.num_heads, self.num_kv_heads, self.head_dim

    def sees_all(self, rows: int) -> bool:
        return self.sliding_window is None or rows <= self.sliding_window

    @property
    def cache_shape(self) -> tuple[int, int]:
        return self.num_kv_heads, self.head_dim

    def new_cache(
        self, layers: int, slots: int, pages: SlotPages | None, dtype: torch.dtype, device: torch.device
    ) -> KeyValueCache:
        assert pages is not None, "keys and values lie in pages"
        memory = pages.pool.memory(self, layers, self.num_kv_heads, self.head_dim, dtype, device)
        return KeyValueCache(memory, pages.table)

    def forward(self, ops: Operations, x: Tensor | Float8Pair, cache: KeyValues, rows: Rows) -> Product:
        attended = self._attend(ops, x, cache, rows, for_float8=in_float8(self.o))
        return project_split(ops, self.o, attended, rows.tune_for_rows)

    def remember(self, ops: Operations, x: Tensor | Float8Pair, cache: KeyValues, rows: Rows) -> None:
        self._append(ops, x, cache, rows)

    def forward_last(
        self, ops: Operations, x: Tensor | Float8Pair, cache: KeyValues, rows: Rows, last: Tensor
    ) -> Product:
        q, gate = (
            None if each is None else each.flatten(0, 1)[last][:, None] for each in self._append(ops, x, cache, rows)
        )
        assert q is not None
        pieces = last // x.shape[1]
        table = pieces[:, None].int() if cache.table is None else cache.table[pieces]
        before = rows.lengths[pieces] + (last - pieces * x.shape[1]).int()
        out = ops.tree_attention(
            q,
            cache.data,
            before,
            scale=self.scale,
            sliding_window=self.sliding_window,
            table=table,
            sinks=self.sinks,
            softcap=self.softcap,
        )
        assert isinstance(out, Tensor)
        if gate is not None:
            out = ops.gate_heads(out, gate)
        return project_split(ops, self.o, out.flatten(-2), rows.tune_for_rows)

    def attend(self, ops: Operations, x: Tensor | Float8Pair, cache: KeyValues, rows: Rows) -> Tensor:
        """Project, rotate, append to the cache and attend: x [B, n, *] -> [B, n, Hq * d], the input of o."""
        attended = self._attend(ops, x, cache, rows)
        assert isinstance(attended, Tensor)
        return attended

    def _attend(
        self, ops: Operations, x: Tensor | Float8Pair, cache: KeyValues, rows: Rows, for_float8: bool = False
    ) -> Tensor | Float8Pair:
        """`attend`; for_float8: see tree_attention."""
        q, gate = self._append(ops, x, cache, rows)
        if rows.stretch is not None and self.stretch_shape is not None:
            assert cache.table is not None, "a prompt that is read in pieces lies in pages"
            stretch, table = q.flatten(0, 1), cache.table[0]
            options: dict[str, Any] = dict(scale=self.scale, table=table, sinks=self.sinks, softcap=self.softcap)
            out = ops.prompt_attention(stretch, cache.data, *rows.stretch, **options).view_as(q)
        else:
            options = dict(
                sliding_window=self.sliding_window,
                new_keys=rows.new_keys,
                tune_for_nodes=rows.tune_for_nodes,
                table=cache.table,
                prefetch_before_wait=self._launches_products,
                for_float8=for_float8 and gate is None,
                sinks=self.sinks,
                softcap=self.softcap,
            )
            attended = ops.tree_attention(q, cache.data, rows.lengths, rows.ancestors, scale=self.scale, **options)
            if isinstance(attended, Float8Pair):
                return attended
            out = attended
        if gate is not None:
            out = ops.gate_heads(out, gate)
        return out.flatten(-2)

    @property
    def norms_rows(self) -> bool:
        """Whether q_norm and k_norm norm all heads of a row together, before they are split into heads (OLMo 2)."""
        return self.q_norm is not None and len(self.q_norm.weight) > self.head_dim

    @property
    def _launches_products(self) -> bool:
        """Whether q, k and v are products of ours, or cuBLAS's, of which it is known when the next kernel starts."""
        return all(projection.weight is not None for projection in (self.q, self.k, self.v))

    def _append(
        self, ops: Operations, x: Tensor | Float8Pair, cache: KeyValues, rows: Rows
    ) -> tuple[Tensor, Tensor | None]:
        """Keys and values to the cache; the rotated queries, and the gate if there is one, [B, n, Hq, d] each."""
        products = project_stack(
            ops, (self.q, self.k, self.v), x, keep_splits=not self.gated, tune_for_rows=rows.tune_for_rows
        )
        q_norm, k_norm = self.q_norm, self.k_norm
        if self.norms_rows:
            assert q_norm is not None and k_norm is not None
            products = _normed(ops, q_norm, products[0]), _normed(ops, k_norm, products[1]), ops.add(products[2])
            q_norm = k_norm = None
        q, k, v = (product.unflatten(-1, (-1, self.head_dim)) for product in products)
        gate = None
        if self.gated:
            q, gate = total_of(q).unflatten(-2, (-1, 2)).unbind(-2)
        q = ops.rotary_append(
            q,
            k,
            v,
            cache.data,
            rows.first,
            rows.depths,
            self.rotary.inv_freq,
            skip=rows.skip,
            attention_scaling=self.rotary.attention_scaling,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            eps=0.0 if q_norm is None else q_norm.eps,
            zero_centred=q_norm is not None and q_norm.zero_centred,
            round_first=q_norm is None or q_norm.round_first,
            table=cache.table,
            pairs=self.rotary.pairs,
            round_tables=self.rotary.round_tables,
            temperature=self.rotary.temperature,
        )
        return q, gate

    @property
    def tensors(self) -> Iterator[Tensor]:
        for projection in (self.q, self.k, self.v, self.o):
            yield from projection.tensors
        yield from (norm.weight for norm in (self.q_norm, self.k_norm) if norm is not None)
        if self.sinks is not None:
            yield self.sinks


def _normed(ops: Operations, norm: Norm, x: Tensor | SplitSums) -> Tensor:
    """The norm of whole rows [B, n, *] of a product."""
    options: dict[str, Any] = dict(zero_centred=norm.zero_centred, round_first=norm.round_first)
    return whole_of(ops.rms_norm(x, norm.weight, norm.eps, **options))
