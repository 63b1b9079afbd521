"""A case of an operation with its providers, the model's sizes, and random tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.operations import Operations

NODES, DEPTH, TOP_K = 60, 8, 10  # the tree of 60 nodes: eight passes of the head, ten candidates per node


class Sizes(NamedTuple):
    """Sizes of the model: its operations are timed. keys: of attention."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    width: int
    vocab: int
    draft_vocab: int
    keys: tuple[int, ...]

    @property
    def qkv(self) -> tuple[int, int, int]:
        return self.heads * self.width, self.kv_heads * self.width, self.kv_heads * self.width


class RecurrentSizes(NamedTuple):
    """Sizes of the linear layers of a hybrid model: their operations are timed."""

    layers: int
    heads: int
    value_heads: int
    width: int
    prompt: int

    @property
    def channels(self) -> int:
        return (2 * self.heads + self.value_heads) * self.width


@dataclass(frozen=True)
class Provider:
    """One way to compute it. `finish(output, *arguments)` makes what is compared, and is not timed."""

    name: str
    call: Callable[..., Any]
    finish: Callable[..., Any] = lambda out, *_: out
    ours: bool = False


@dataclass(frozen=True)
class Case:
    """One operation at one size. `expected` computes in fp32; `moved` are the bytes that must be read and written.

    target_us and least_speedup (over the best of the others) say what our last provider, the one that a decode step
    uses, is held to on an H200.
    """

    group: str
    name: str
    make: Callable[[torch.Generator], tuple]
    expected: Callable[..., Any]
    providers: list[Provider]
    moved: int
    target_us: float | None = None
    least_speedup: float | None = None


def provider_name(ops: Operations) -> str:
    return "triton" if ops.kernels else "reference"


def ours(ops: Operations, call: Callable[..., Any], finish: Callable[..., Any] = lambda out, *_: out) -> Provider:
    return Provider(provider_name(ops), call, finish, ours=True)


def reference_case(
    ops: Operations,
    group: str,
    name: str,
    make: Callable[[torch.Generator], tuple],
    reference: Callable[..., Any],
    kernel: Callable[..., Any],
    moved: int,
    target_us: float | None = None,
    finish: Callable[..., Any] = lambda out, *_: out,
) -> Case:
    """A case without another provider than the reference, which also gives the expected output."""
    return Case(
        group,
        name,
        make,
        lambda *inputs: finish(reference(*inputs), *inputs),
        [Provider("torch", reference, finish), ours(ops, kernel, finish)],
        moved,
        target_us,
    )


class Random(NamedTuple):
    """Makes tensors of one device and dtype."""

    device: torch.device
    dtype: torch.dtype

    def normal(self, generator: torch.Generator, *shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype).mul_(std)

    def parents(self, nodes: int = NODES) -> Tensor:
        """A tree [1, N]: every node hangs on one of the eight before it. Always the same one."""
        generator = torch.Generator().manual_seed(0)
        node = torch.arange(nodes)
        back = torch.randint(1, 9, (nodes,), generator=generator)
        parents = (node - back).clamp(min=0)
        parents[0] = -1
        return parents[None].int().to(self.device)

    def int32(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
