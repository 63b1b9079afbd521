"""A case of an operation with its providers, the model's sizes, and the maker of cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.operations import Operations

NODES, DEPTH, TOP_K = 60, 8, 10  # the tree of 60 nodes: eight passes of the head, ten candidates per node
ACCEPTED_PATH = (0, 1, 4, 9, 15, 22, 31, 44, 59)  # its committed nodes


class Sizes(NamedTuple):
    """Sizes of a model, for which its operations are timed. keys: of attention."""

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


def output(out: Any, *_: Any) -> Any:
    return out


@dataclass(frozen=True)
class Provider:
    """One way to compute a case. `finish(output, *arguments)` makes the compared result, and is not timed."""

    name: str
    call: Callable[..., Any]
    finish: Callable[..., Any] = output
    ours: bool = False


@dataclass(frozen=True)
class Case:
    """One operation at one size. `expected` computes in fp32; `moved` are the bytes that must be read and written.

    target_us and least_speedup (over the best of the others) are the targets on an H200 of our last provider, which a
    decode step uses.
    """

    group: str
    name: str
    make: Callable[[torch.Generator], tuple]
    expected: Callable[..., Any]
    providers: list[Provider]
    moved: int
    target_us: float | None = None
    least_speedup: float | None = None


@dataclass(frozen=True)
class CaseMaker:
    """Makes cases of `ops`, and tensors of one device and dtype."""

    ops: Operations
    device: torch.device
    dtype: torch.dtype

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def our_name(self) -> str:
        return "triton" if self.ops.kernels else "reference"

    def case(
        self, group: str, name: str, make: Callable[[torch.Generator], tuple], call: Callable[..., Any], moved: int,
        target_us: float | None = None, *, others: Mapping[str, Any] | None = None, finish: Callable[..., Any] = output,
        least_speedup: float | None = None,
    ) -> Case:  # fmt: skip
        """A case of `call(operations, *inputs)`. The references compute the expected result with it, too.

        others: torch's ways by name, a function of the inputs, or one and the `finish` of its output. Without any, the
        reference is timed instead. finish: of ours.
        """
        reference = Operations()

        def expected(*inputs: Any) -> Any:
            return finish(call(reference, *inputs), *inputs)

        if others is None:
            others = {"torch": (lambda *inputs: call(reference, *inputs), finish)}
        providers = [Provider(key, *(way if isinstance(way, tuple) else (way,))) for key, way in others.items()]
        ours = Provider(self.our_name, lambda *inputs: call(self.ops, *inputs), finish, ours=True)
        return Case(group, name, make, expected, [*providers, ours], moved, target_us, least_speedup)

    def normal(
        self, generator: torch.Generator, *shape: int, std: float = 1.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        return torch.randn(shape, generator=generator, device=self.device, dtype=dtype or self.dtype).mul_(std)

    def integers(self, generator: torch.Generator, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=generator, device=self.device)

    def parents(self, nodes: int = NODES) -> Tensor:
        """A tree [1, N], always the same: the parent of every node is one of the eight before it."""
        back = torch.randint(1, 9, (nodes,), generator=torch.Generator().manual_seed(0))
        parents = (torch.arange(nodes) - back).clamp(min=0)
        parents[0] = -1
        return parents[None].int().to(self.device)

    def int32(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
