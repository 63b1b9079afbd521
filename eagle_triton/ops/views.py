"""What kernels take in one argument: a tensor beside its strides, and what belongs together.

A launcher makes a view of a tensor (`Matrix.of(x)`), a kernel reads its fields by name (`x.ptr + row * x.row`). Strides
are in elements. A view of None is None, which a kernel may ask for (`if x is not None`).

Triton's do_not_specialize and do_not_specialize_on_alignment do not reach into a view, even where they name it: such
arguments stay arguments of their own. Then their strides are one tuple, and the kernel makes the view of both
(`Matrix(x_ptr, *x_strides)`).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from eagle_triton.runtime.float8_pair import Float8Pair


class Vector(NamedTuple):
    """A tensor [n]."""

    ptr: Tensor
    item: int

    @staticmethod
    def of(x: Tensor | None) -> Vector | None:
        return None if x is None else Vector(x, *x.stride())


class Matrix(NamedTuple):
    """A tensor [rows, n]; rows are those of sequences, most often."""

    ptr: Tensor
    row: int
    item: int

    @staticmethod
    def of(x: Tensor | None) -> Matrix | None:
        return None if x is None else Matrix(x, *x.stride())


class Cube(NamedTuple):
    """A tensor [batch, rows, n]."""

    ptr: Tensor
    batch: int
    row: int
    item: int

    @staticmethod
    def of(x: Tensor | None) -> Cube | None:
        return None if x is None else Cube(x, *x.stride())


class Heads(NamedTuple):
    """A tensor [batch, rows, heads, d], its last dimension contiguous."""

    ptr: Tensor
    batch: int
    row: int
    head: int

    @staticmethod
    def of(x: Tensor | None) -> Heads | None:
        return None if x is None else Heads(x, *x.stride()[:3])


class Pages(NamedTuple):
    """Each sequence's pages, [B, M] int32."""

    ptr: Tensor
    row: int

    @staticmethod
    def of(table: Tensor | None) -> Pages | None:
        return None if table is None else Pages(table, table.stride(0))


class CacheSide(NamedTuple):
    """Keys or values of one layer, [P, Hkv, R, d] in P pages of R rows, d contiguous."""

    ptr: Tensor
    page: int
    head: int
    row: int

    @staticmethod
    def of(x: Tensor) -> CacheSide:
        return CacheSide(x, *x.stride()[:3])


class CacheStack(NamedTuple):
    """Keys and values of some layers, [layers, 2, P, Hkv, R, d] in P pages of R rows, d contiguous."""

    ptr: Tensor
    layer: int
    side: int
    page: int
    head: int
    row: int

    @staticmethod
    def of(x: Tensor) -> CacheStack:
        return CacheStack(x, *x.stride()[:5])


class NewRows(NamedTuple):
    """Rows for a cache as a projection lays them out, [layers, 2, B, n, Hkv, d], d contiguous."""

    ptr: Tensor
    layer: int
    side: int
    batch: int
    row: int
    head: int

    @staticmethod
    def of(x: Tensor) -> NewRows:
        return NewRows(x, *x.stride()[:5])


class KeyValues(NamedTuple):
    """Keys and values of one layer, [2, P, Hkv, R, d] in P pages of R rows, d contiguous; kernels know R's stride."""

    ptr: Tensor
    side: int
    page: int
    head: int

    @staticmethod
    def of(x: Tensor) -> KeyValues:
        return KeyValues(x, *x.stride()[:3])


class BatchedRows(NamedTuple):
    """A tensor [batch, rows, n], its last dimension contiguous; the words of ancestors are one."""

    ptr: Tensor
    batch: int
    row: int

    @staticmethod
    def of(x: Tensor | None) -> BatchedRows | None:
        return None if x is None else BatchedRows(x, *x.stride()[:2])


class Rows(NamedTuple):
    """A tensor [rows, n], whose rows are contiguous."""

    ptr: Tensor
    row: int

    @staticmethod
    def of(x: Tensor | None) -> Rows | None:
        return None if x is None else Rows(x, x.stride(-2))


class CacheLayer(NamedTuple):
    """Keys and values of one layer, [2, P, Hkv, R, d] in P pages of R rows, d contiguous."""

    ptr: Tensor
    side: int
    page: int
    head: int
    row: int

    @staticmethod
    def of(x: Tensor) -> CacheLayer:
        return CacheLayer(x, *x.stride()[:4])


class PairParts(NamedTuple):
    """The tensors of a Float8Pair."""

    parts: Tensor
    scale: Tensor

    @staticmethod
    def of(pair: Float8Pair | None) -> PairParts | None:
        return None if pair is None else PairParts(pair.parts, pair.scale)
