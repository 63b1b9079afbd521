"""Views: a tensor with its strides as one argument of a kernel.

A launcher makes a view of a tensor (`view(Matrix, x)`), a kernel reads its fields by name (`x.ptr + row * x.row`).
Strides are in elements. A view of None is None, which a kernel can test (`if x is not None`).

Triton's do_not_specialize and do_not_specialize_on_alignment do not apply to the fields of a view. Arguments that need
them are passed separately, their strides as one tuple, and the kernel makes the view (`Matrix(x_ptr, *x_strides)`).

Two limits of Triton 3.6 in Gluon kernels: a TMA descriptor must be an argument of its own, and inside a loop a view
with a stride of 1, which is a constant then, cannot be a field of another view. tests/decode_without_gpu.py finds both.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar, overload

from torch import Tensor

from eagle_triton.runtime.row_formats import Float8Pair

View = TypeVar("View", bound=tuple[Any, ...])


@overload
def view(kind: type[View], x: Tensor) -> View: ...
@overload
def view(kind: type[View], x: None) -> None: ...
def view(kind: Any, x: Tensor | None) -> Any:
    """A view of a tensor, with the number of its first strides that this kind of view has."""
    return None if x is None else kind(x, *x.stride()[: len(kind._fields) - 1])


class Vector(NamedTuple):
    """A tensor [n]."""

    ptr: Tensor
    item: int


class Matrix(NamedTuple):
    """A tensor [rows, n]."""

    ptr: Tensor
    row: int
    item: int


class Cube(NamedTuple):
    """A tensor [batch, rows, n]."""

    ptr: Tensor
    batch: int
    row: int
    item: int


class Heads(NamedTuple):
    """A tensor [batch, rows, heads, d], its last dimension contiguous."""

    ptr: Tensor
    batch: int
    row: int
    head: int


class Pages(NamedTuple):
    """Each sequence's pages, [B, M] int32."""

    ptr: Tensor
    row: int


class CacheSide(NamedTuple):
    """Keys or values of one layer, [P, Hkv, R, d] in P pages of R rows, d contiguous."""

    ptr: Tensor
    page: int
    head: int
    row: int


class CacheStack(NamedTuple):
    """Keys and values of some layers, [layers, 2, P, Hkv, R, d] in P pages of R rows, d contiguous."""

    ptr: Tensor
    layer: int
    side: int
    page: int
    head: int
    row: int


class NewRows(NamedTuple):
    """Rows for a cache as a projection lays them out, [layers, 2, B, n, Hkv, d], d contiguous."""

    ptr: Tensor
    layer: int
    side: int
    batch: int
    row: int
    head: int


class KeyValues(NamedTuple):
    """Keys and values of one layer, [2, P, Hkv, R, d] in P pages of R rows, d contiguous; kernels know R's stride."""

    ptr: Tensor
    side: int
    page: int
    head: int


class BatchedRows(NamedTuple):
    """A tensor [batch, rows, n], its last dimension contiguous; the words of ancestors are one."""

    ptr: Tensor
    batch: int
    row: int


class Rows(NamedTuple):
    """A tensor [rows, n], or [.., rows, n] of evenly spaced rows, with contiguous rows."""

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


class PairParts(NamedTuple):
    """The tensors of a Float8Pair."""

    parts: Tensor
    scale: Tensor

    @staticmethod
    def of(pair: Float8Pair | None) -> PairParts | None:
        return None if pair is None else PairParts(pair.parts, pair.scale)
