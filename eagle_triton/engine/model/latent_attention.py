"""Multi-head latent attention (DeepSeek-AI, arXiv 2405.04434), the attention of DeepSeek and GLM-4.7-Flash.

The cache has one row for a token: a latent of `rank` numbers, from which the keys and values of all heads would be
computed, and a rotated key of r numbers that all heads share. Keys and values are never made. Queries are multiplied by
the keys' matrices instead, so that they attend the latents, and what they attend by the values' matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.mixers import AcceptedPath, KeyValueCache, KeyValues, Mixer, NewRows, rows_at
from eagle_triton.engine.model.modules import (
    Norm,
    Projection,
    Rotary,
    project,
    project_split,
    project_stack,
    row_format_of,
)
from eagle_triton.engine.operations import Operations
from eagle_triton.runtime.row_formats import ProductRows, RowFormat
from eagle_triton.runtime.split_sums import Product, total_of


class LatentCache(KeyValueCache):
    """As KeyValueCache, for latents: `data` is [layers, 1, P, 1, R, rank + r]."""

    def commit(self, ops: Operations, pending: None, accepted: AcceptedPath) -> None:
        if not accepted.of_chain:
            halves = self.data[:, 0].unflatten(-1, (2, -1)).movedim(-2, 1)  # a row's halves instead of keys and values
            ops.commit(halves, accepted.before, accepted.path, accepted.accepted, table=self._table)


@dataclass(frozen=True)
class LatentAttention(Mixer):
    """With a `q_latent` the queries are a product of its normed output. A head has queries of d elements, of which the
    last r rotate, and values of e."""

    q: Projection  # [Hq * d, H]
    latent: Projection  # [rank + r, H]
    norm: Norm  # [rank]
    keys_values: Projection  # [Hq * (d - r + e), rank]: of each head the keys' rows, then the values'; a plain matrix
    o: Projection  # [H, Hq * e]
    num_heads: int
    value_width: int  # e
    scale: float
    rotary: Rotary
    q_latent: Projection | None = None
    q_norm: Norm | None = None

    reads_pieces: ClassVar[bool] = True
    by_token: ClassVar[bool] = True

    @property
    def rank(self) -> int:
        return len(self.norm.weight)

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """Of each head's keys, [Hq, d - r, rank], and values, [Hq, e, rank]: views."""
        weight = self.keys_values.weight
        assert isinstance(weight, Tensor), "reading has dequantised it"
        both = weight.unflatten(0, (self.num_heads, -1))
        return both[:, : -self.value_width], both[:, -self.value_width :]

    @property
    def inputs(self) -> tuple[Projection, Projection]:
        """The projections that read its input."""
        return self.q if self.q_latent is None else self.q_latent, self.latent

    @property
    def input_format(self) -> RowFormat | None:
        return row_format_of(*self.inputs)

    def sees_all(self, rows: int) -> bool:
        return True

    @property
    def cache_shape(self) -> tuple[int, int]:
        return self.rank, 2 * len(self.rotary.inv_freq)

    def new_cache(
        self, layers: int, slots: int, pages: SlotPages | None, dtype: torch.dtype, device: torch.device
    ) -> LatentCache:
        assert pages is not None, "latents lie in pages"
        memory = pages.pool.memory(self, (layers, 1, 1, sum(self.cache_shape)), dtype, device)
        return LatentCache(memory, pages.table)

    def forward(self, ops: Operations, x: ProductRows, cache: KeyValues, rows: NewRows) -> Product:
        q = self._append(ops, x, cache, rows)
        tree = dict(ancestors=rows.ancestors, new_keys=rows.new_keys, tune_for_nodes=rows.tune_for_nodes)
        return self._output(ops, q, cache, rows, rows.lengths, table=cache.table, **tree)

    def remember(self, ops: Operations, x: ProductRows, cache: KeyValues, rows: NewRows) -> None:
        self._append(ops, x, cache, rows)

    def forward_last(self, ops: Operations, x: ProductRows, cache: KeyValues, rows: NewRows, last: Tensor) -> Product:
        q = self._append(ops, x, cache, rows)
        before, table = cache.before(last, q.shape[1], rows.lengths)
        return self._output(ops, rows_at(q, last), cache, rows, before, table=table)

    def _append(self, ops: Operations, x: ProductRows, cache: KeyValues, rows: NewRows) -> Tensor:
        """Append its latents to the cache. Returns queries for latents, [B, n, Hq, rank + r]."""
        first, latents = project_stack(
            ops, self.inputs, x, keep_splits=self.q_latent is not None, tune_for_rows=rows.tune_for_rows
        )
        if self.q_norm is not None:
            normed = ops.rms_norm(
                first, self.q_norm.weight, self.q_norm.eps, row_format=row_format_of(self.q), **self.q_norm.options
            )
            first = project(ops, self.q, normed, rows.tune_for_rows)
        keys, _ = self.matrices
        heads, own, rank = keys.shape
        q = total_of(first).unflatten(-1, (heads, -1))
        out = q.new_empty(*q.shape[:3], rank + q.shape[3] - own)
        ops.latent_append(
            q[..., own:],
            latents,
            self.norm.weight,
            self.norm.eps,
            cache.data,
            rows.first,
            rows.depths,
            self.rotary.inv_freq,
            out=out[..., rank:],
            skip=rows.skip,
            attention_scaling=self.rotary.attention_scaling,
            table=cache.table,
            pairs=self.rotary.pairs,
            round_tables=self.rotary.round_tables,
            temperature=self.rotary.temperature,
            unrotated=None if self.rotary.temperature is None else q[..., :own],
            **self.norm.options,
        )
        _multiply_heads(q[..., :own], keys, out[..., :rank])
        return out

    def _output(
        self, ops: Operations, q: Tensor, cache: KeyValues, rows: NewRows, lengths: Tensor, **options: Any
    ) -> Product:
        """Attend. lengths, options: of tree_attention. Returns the output [B, n, H] for q [B, n, Hq, rank + r]."""
        attended = ops.tree_attention(q, cache.data, lengths, scale=self.scale, value_width=self.rank, **options)
        assert isinstance(attended, Tensor)
        out = attended.new_empty(*attended.shape[:3], self.value_width)
        _multiply_heads(attended, self.matrices[1].mT, out)
        return project_split(ops, self.o, out.flatten(-2), rows.tune_for_rows)


def _multiply_heads(x: Tensor, matrices: Tensor, out: Tensor) -> None:
    """out [B, n, Hq, m] = x [B, n, Hq, k] times each head's matrix [Hq, k, m].

    By cuBLAS on a GPU, so in 16 bits the last bits of a row may depend on how many rows there are.
    """
    rows, result = (each.flatten(0, 1).transpose(0, 1) for each in (x, out))
    torch.bmm(rows, matrices, out=result)
