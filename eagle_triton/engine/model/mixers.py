"""Token mixers and their caches. Here: attention and its cache of keys and values.

A kind of layer is a `Mixer` (what it computes) and a `MixerCache` (what it remembers). A forward over trees reads the
committed rows. It writes its own rows after them, or into pending tensors. After verification, `commit` adds the
accepted path to the committed rows and drops the rest. A causal forward commits its rows as it runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.memory.pages import PAGE_ROWS, PageMemory, SlotPages
from eagle_triton.engine.model.modules import (
    Norm,
    Projection,
    Rotary,
    apply_norm,
    project_split,
    project_stack,
    row_format_of,
    whole_product,
)
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.prompt_chunks import PromptChunks, PromptSpan
from eagle_triton.operands.gated_delta import PromptPieces
from eagle_triton.runtime.row_formats import ProductRows, RowFormat
from eagle_triton.runtime.split_sums import Product, total_of

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_SPAN_WIDTH = 128  # head dim that prompt_attention supports


class NewRows(NamedTuple):
    """The new rows of a forward: their places in the caches, their positions, and which rows they see.

    Examples, with 100 rows in a cache (lengths and first 100). A plain step has one row, which is written to cache row
    100. A tree of 60 nodes is written to rows 100 to 159, and `depths` has its positions. A draft with beams of 10
    nodes writes its first beam to rows 100 to 109, and the second, with skip 10, to rows 110 to 119.
    """

    lengths: Tensor  # [B] int32: committed rows, visible to all
    first: Tensor  # [B] int32: the position that depths count from, and the cache row of depth 0
    depths: Tensor | None = None  # [B, n] int32: positions are first + depths; None: consecutive
    ancestors: Tensor | None = None  # [B, n, W] int64, bit j: row lengths + j is visible; None: causal
    new_keys: int | None = None  # rows from lengths + new_keys on are hidden; None: the bits decide
    tune_for_nodes: int | None = None  # choose launches for this number of nodes, see `linear`; None: n
    depth: int = 0  # of a tree: the most levels below the root
    skip: int = 0  # cache rows between `first` and the new rows: the tree's upper levels
    span: PromptSpan | None = None  # see PromptChunks
    prompt: Tensor | None = None  # [B] int32: how many of the first rows are the prompt's own; None: all
    active: Tensor | None = None  # [B] bool: of a tree that is only a root, the sequences that commit it for sure

    @property
    def in_draft_pass(self) -> bool:
        return self.tune_for_nodes is not None

    @property
    def tune_for_rows(self) -> int | None:
        return None if self.tune_for_nodes is None else self.tune_for_nodes * len(self.lengths)


class AcceptedPath(NamedTuple):
    """The paths that verification accepted, of trees after `before` committed rows."""

    before: Tensor  # [B] int32
    path: Tensor  # [B, D + 1] int32: node indices root..last accepted, then -1
    accepted: Tensor  # [B] int32: drafts accepted; -1: nothing is committed, not even the root
    of_chain: bool = False  # paths are nodes 0, 1, 2 ..., so their rows are in place already


def rows_at(x: Tensor, places: Tensor) -> Tensor:
    """The rows of x [P, n, ...] with these flat indices [m] int64 of P * n: [m, 1, ...]."""
    return x.flatten(0, 1)[places][:, None]


class MixerCache(ABC):
    """The memory of layers of one kind and shape for each slot's sequence. Its tensors do not move between steps."""

    commits_roots: ClassVar[bool] = False  # whether its layers commit trees that are only a root: see `NewRows.active`

    def new_pending(self, nodes: int) -> Any:
        """Tensors for the rows of trees of `nodes` nodes; None: a forward writes them into the cache."""
        return None

    @abstractmethod
    def layer(self, index: int, pending: Any = None) -> Any:
        """The cache of one layer, for its forward. pending: None in a causal forward."""

    @abstractmethod
    def part(self, slots: slice) -> Self:
        """The same for some of the slots: views."""

    def of_pieces(self, pieces: PromptChunks, lengths: Tensor) -> Self:
        """The same for a causal forward over pieces of prompts of lengths [B] int32. See `Mixer.reads_pieces`."""
        raise AssertionError("these layers read one prompt after another")

    @abstractmethod
    def clear(self) -> None:
        """Forget all sequences."""

    def wipe(self, pages: Tensor) -> None:
        """Zero pages [n] int64 of the pool, which no sequence holds any more."""

    @abstractmethod
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy slot `source`, a sequence of `length` committed tokens, to slot `target`."""

    def move(self, source: int, target: int, length: int) -> None:
        """Move slot `source` to slot `target`. The slot's pages were moved already."""
        self.copy(source, target, length)

    @abstractmethod
    def commit(self, ops: Operations, pending: Any, accepted: AcceptedPath) -> None:
        """Commit the accepted path of the last forward's trees, and drop the rest.

        pending: holds the trees' rows. A slot without accepted nodes does not change.
        """

    @property
    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """All its tensors on the device."""


class RecurrentCache(MixerCache):
    """The memory of recurrent layers of one shape: tensors [L, B, ...], which do not grow with the sequences."""

    def __init__(self, *memory: Tensor, pieces: PromptPieces | None = None):
        """pieces: of prompts, which the next causal forward reads."""
        self.memory, self.pieces = memory, pieces

    def part(self, slots: slice) -> Self:
        return type(self)(*(tensor[:, slots] for tensor in self.memory))

    def of_pieces(self, pieces: PromptChunks, lengths: Tensor) -> Self:
        assert pieces.slots is not None
        mine = PromptPieces(pieces.slots, pieces.starts, pieces.counts(lengths))
        return type(self)(*self.memory, pieces=mine)

    def clear(self) -> None:
        for tensor in self.memory:
            tensor.zero_()

    def copy(self, source: int, target: int, length: int) -> None:
        for tensor in self.memory:
            tensor[:, target] = tensor[:, source]

    @property
    def tensors(self) -> Iterator[Tensor]:
        yield from self.memory


class Mixer(ABC):
    """The part of a layer that mixes the tokens of a sequence."""

    max_nodes: ClassVar[int | None] = None  # of a tree; None: any number
    reads_pieces: ClassVar[bool] = False  # whether a causal forward may read pieces of several prompts
    by_token: ClassVar[bool] = False  # whether each token has its own rows, which other sequences may share

    @property
    def reads_layer(self) -> int | None:
        """The layer that owns the cache it reads; None: it has its own."""
        return None

    @property
    def reads_prompts_apart(self) -> bool:
        """Whether a causal forward must know which rows are the prompt's own, and which are output that is read again
        after a pause: see `NewRows.prompt`."""
        return False

    @property
    def input_format(self) -> RowFormat | None:
        """The row format in which the products that read its input take it, see layers.rms_norm."""
        return None

    @property
    def span_shape(self) -> tuple[int, int, int] | None:
        """Query heads, key heads and head dim for `prompt_attention`; None: it cannot read spans in this way."""
        return None

    def sees_all(self, rows: int) -> bool:
        """Whether each of `rows` tokens sees all tokens before it, and nothing else is remembered."""
        return False

    @property
    @abstractmethod
    def cache_shape(self) -> Hashable:
        """Layers of one class with equal shapes share a cache, and one launch commits it."""

    @abstractmethod
    def new_cache(
        self, layers: int, slots: int, pages: SlotPages | None, dtype: torch.dtype, device: torch.device
    ) -> MixerCache:
        """An empty cache for `layers` layers; this is the first of them. pages: of the slots, for keys and values."""

    @abstractmethod
    def forward(self, ops: Operations, x: ProductRows, cache: Any, rows: NewRows) -> Product:
        """Run over the new rows x [B, n, *] of trees or chains. cache: this layer's. x: a tensor, or rows in the
        mixer's `input_format`.

        Returns the update of the residual stream [B, n, H], perhaps as splits.
        """

    def remember(self, ops: Operations, x: ProductRows, cache: Any, rows: NewRows) -> None:
        """A causal forward without its output."""
        self.forward(ops, x, cache, rows)

    def forward_last(self, ops: Operations, x: ProductRows, cache: Any, rows: NewRows, last: Tensor) -> Product:
        """A causal forward over x [P, n, *] that returns flat rows last [m] int64 of P * n only: [m, 1, H]."""
        return rows_at(whole_product(ops, self.forward(ops, x, cache, rows)), last)


class KeyValues(NamedTuple):
    """Keys and values of one attention layer."""

    data: Tensor  # [2, P, Hkv, R, d]
    table: Tensor | None = None  # [B, M] int32: the pages of each sequence; None: P = B, its own

    def before(self, last: Tensor, count: int, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """How many rows are before each of the flat new rows `last` [m] int64, of `count` for each sequence after
        `lengths` [B] int32, and the pages of their sequences: [m] and [m, M] int32."""
        pieces = last // count
        table = pieces[:, None].int() if self.table is None else self.table[pieces]
        return lengths[pieces] + (last - pieces * count).int(), table


class KeyValueCache(MixerCache):
    """Keys and values of attention layers of one shape, in pages. Row p of a sequence is position p.

    A forward writes its rows after the committed ones; a commit moves the accepted rows together.
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

    def part(self, slots: slice) -> Self:
        return type(self)(self._memory, self._table[slots])

    def of_pieces(self, pieces: PromptChunks, lengths: Tensor) -> Self:
        assert pieces.slots is not None
        return type(self)(self._memory, self._table[pieces.slots.long()])

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

    gated: in the rows of q, each head's queries are followed by a gate of the head's output, 2d rows for a head
    (Qwen3-Next, Qwen3.5). gate: a projection to such gates instead, d rows or one for a head (AFMoE, Laguna); with its
    `gate_activation` see ops.gate_heads. q_norm and k_norm have one kind and eps, and [d] each, or [Hq * d] and
    [Hkv * d] (see `norms_rows`); v_norm has [d]. Without v, the values are the keys before their norm and rotation.
    Without k and v it reads the keys and values of layer `reads_layer` (Gemma 4).
    """

    q: Projection
    k: Projection | None
    v: Projection | None
    o: Projection
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary: Rotary
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    sliding_window: int | None = None
    gated: bool = False
    gate: Projection | None = None
    gate_activation: str = "sigmoid"
    sinks: Tensor | None = None  # [Hq]: a score for each head that takes a share of attention and adds no value
    softcap: float | None = None  # scores are bounded as softcap * tanh(score / softcap)
    reads_layer: int | None = None
    norm_last: bool = False  # q and k are normed after the rotation (Hunyuan)

    reads_pieces: ClassVar[bool] = True
    by_token: ClassVar[bool] = True

    @property
    def inputs(self) -> tuple[Projection, ...]:
        """Its input projections: of q, k, v and the gates, if it has these."""
        return tuple(projection for projection in (self.q, self.k, self.v, self.gate) if projection is not None)

    @property
    def input_format(self) -> RowFormat | None:
        return row_format_of(*self.inputs)

    @property
    def span_shape(self) -> tuple[int, int, int] | None:
        if self.sliding_window is not None or self.head_dim % 8 or self.head_dim > MAX_SPAN_WIDTH:
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
        memory = pages.pool.memory(self, (layers, 2, *self.cache_shape), dtype, device)
        return KeyValueCache(memory, pages.table)

    def forward(self, ops: Operations, x: ProductRows, cache: KeyValues, rows: NewRows) -> Product:
        attended = self._attend(ops, x, cache, rows, row_format=row_format_of(self.o))
        return project_split(ops, self.o, attended, rows.tune_for_rows)

    def remember(self, ops: Operations, x: ProductRows, cache: KeyValues, rows: NewRows) -> None:
        if self.k is not None:
            self._append(ops, x, cache, rows, queries=False)

    def forward_last(self, ops: Operations, x: ProductRows, cache: KeyValues, rows: NewRows, last: Tensor) -> Product:
        attended = self._attend(ops, x, cache, rows, last=last)
        return project_split(ops, self.o, attended, rows.tune_for_rows)

    def attend(self, ops: Operations, x: ProductRows, cache: KeyValues, rows: NewRows) -> Tensor:
        """Project, rotate, append to the cache and attend: x [B, n, *] -> [B, n, Hq * d], the input of o."""
        attended = self._attend(ops, x, cache, rows)
        assert isinstance(attended, Tensor)
        return attended

    def _attend(
        self,
        ops: Operations,
        x: ProductRows,
        cache: KeyValues,
        rows: NewRows,
        row_format: RowFormat | None = None,
        last: Tensor | None = None,
    ) -> ProductRows:
        """`attend`. row_format: see tree_attention. last: see `forward_last`."""
        q, gate = self._append(ops, x, cache, rows)
        options: dict[str, Any] = dict(scale=self.scale, sinks=self.sinks, softcap=self.softcap)
        attended: ProductRows
        if last is not None:
            before, table = cache.before(last, x.shape[1], rows.lengths)
            q, gate = rows_at(q, last), None if gate is None else rows_at(gate, last)
            options |= dict(table=table, sliding_window=self.sliding_window)
            attended = ops.tree_attention(q, cache.data, before, **options)
        elif rows.span is not None and self.span_shape is not None:
            assert cache.table is not None, "a prompt that is read in pieces is in pages"
            flat = q.flatten(0, 1)
            attended = ops.prompt_attention(flat, cache.data, *rows.span, table=cache.table[0], **options).view_as(q)
        else:
            # With products of ours or cuBLAS's it is known when the next kernel starts.
            plain = all(product.weight is not None and product.joined_over is None for product in self.inputs)
            options |= dict(
                sliding_window=self.sliding_window,
                new_keys=rows.new_keys,
                tune_for_nodes=rows.tune_for_nodes,
                table=cache.table,
                prefetch_before_wait=plain,
                row_format=row_format if gate is None else None,
            )
            attended = ops.tree_attention(q, cache.data, rows.lengths, rows.ancestors, **options)
        if not isinstance(attended, Tensor):
            return attended
        if gate is not None:
            attended = ops.gate_heads(attended, gate, self.gate_activation)
        return attended.flatten(-2)

    @property
    def norms_rows(self) -> bool:
        """Whether q_norm and k_norm norm all heads of a row together, before they are split into heads (OLMo 2)."""
        return self.q_norm is not None and len(self.q_norm.weight) > self.head_dim

    def _append(
        self, ops: Operations, x: ProductRows, cache: KeyValues, rows: NewRows, queries: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Append its keys and values to the cache, if it has any. Returns the rotated queries [B, n, Hq, d], and gates
        [B, n, Hq, d or 1] if it has any. queries=False: do not compute them; keys are returned in their place."""
        gated, q_norm, k_norm = self.gated and queries, self.q_norm if queries else self.k_norm, self.k_norm
        inputs = self.inputs if queries else tuple(each for each in (self.k, self.v) if each is not None)
        keep_splits = not gated and self.gate is None
        products = project_stack(ops, inputs, x, keep_splits=keep_splits, tune_for_rows=rows.tune_for_rows)
        gate = None
        if not queries:
            products = products[0], *products
        elif self.gate is not None:
            *others, gates = products
            products = tuple(others)
            gate = total_of(gates).unflatten(-1, (self.num_heads, -1))
        if self.v is None and self.k is not None:
            products = *products, products[1]
        if self.norms_rows:
            assert q_norm is not None and k_norm is not None
            normed = [apply_norm(ops, q_norm, products[0]), apply_norm(ops, k_norm, products[1])]
            if (ranks := self.q.joined_over) is not None:  # this rank's heads, of those that were normed together
                normed = [part.chunk(ranks.size, -1)[ranks.rank] for part in normed]
            products = *normed, products[2] if isinstance(products[2], Tensor) else ops.add(products[2])
            q_norm = k_norm = None
        q, *own = (product.unflatten(-1, (-1, self.head_dim)) for product in products)
        k, v = own or (None, None)
        if gated:
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
            v_norm=None if self.v_norm is None else self.v_norm.weight,
            eps=0.0 if q_norm is None else q_norm.eps,
            zero_centred=q_norm is not None and q_norm.zero_centred,
            round_first=q_norm is None or q_norm.round_first,
            table=cache.table,
            pairs=self.rotary.pairs,
            round_tables=self.rotary.round_tables,
            round_terms=self.rotary.round_terms,
            temperature=self.rotary.temperature,
            norm_last=self.norm_last,
        )
        return q, gate
