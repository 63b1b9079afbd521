"""Linear layers of a hybrid model between their products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_triton.benchmarks.cases.case import ACCEPTED_PATH, NODES, Case, CaseMaker
from eagle_triton.operands.ancestors import pack_ancestors
from eagle_triton.reference import tree_decoding


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

    @property
    def values(self) -> int:
        return self.value_heads * self.width


def delta_inputs(maker: CaseMaker, sizes: RecurrentSizes, generator: torch.Generator, batch: int, count: int) -> tuple:
    """Operands of delta_tree up to the state. beta is 1/2, so that it is the same in 16 bits and in fp32."""
    shared, wide = sizes.value_heads // sizes.heads, torch.float32
    return (
        maker.normal(generator, batch, count, sizes.channels),
        maker.normal(generator, batch, count, sizes.heads, shared),
        torch.zeros(batch, count, sizes.heads, shared, device=maker.device, dtype=maker.dtype),
        maker.normal(generator, sizes.value_heads, dtype=wide),
        maker.normal(generator, sizes.value_heads, dtype=wide),
        maker.normal(generator, batch, sizes.value_heads, sizes.width, sizes.width, std=0.1, dtype=wide),
    )


def delta_cases(maker: CaseMaker, sizes: RecurrentSizes, batch: int, nodes: int) -> Iterator[Case]:
    """A linear layer between its products, over the nodes of a tree or only its root: convolution, delta rule, norm."""
    heads, value_heads, width, element = sizes.heads, sizes.value_heads, sizes.width, maker.dtype.itemsize
    parents = torch.arange(-1, nodes - 1, device=maker.device) * 5 // 7  # of 60 nodes the deepest lie at DEPTH
    matrix = tree_decoding._ancestor_closure(parents[None].int())
    ancestors, depth = pack_ancestors(matrix).repeat(batch, 1, 1), int(matrix.sum(-1).max()) - 1
    rows, by_head = batch * nodes, (batch, nodes, heads, sizes.values // heads)

    def conv_inputs(generator: torch.Generator) -> tuple:
        q, k = (maker.normal(generator, batch, nodes, heads, width) for _ in range(2))
        shapes = by_head, (sizes.channels, 4), (batch, 3, sizes.channels)
        raw = torch.empty(batch, nodes, sizes.channels, dtype=q.dtype, device=q.device)
        return q, k, *(maker.normal(generator, *shape) for shape in shapes), raw

    def tree_inputs(generator: torch.Generator) -> tuple:
        gates = torch.empty(batch, nodes, 2, value_heads, device=maker.device)
        return *delta_inputs(maker, sizes, generator, batch, nodes), gates

    def norm_inputs(generator: torch.Generator) -> tuple:
        return tuple(maker.normal(generator, *s) for s in ((batch, nodes, value_heads, width), by_head, (width,)))

    def conv(ops: Any, *inputs: Tensor) -> Tensor:
        return ops.causal_conv(*inputs[:5], ancestors, raw=inputs[5])

    def tree(ops: Any, *inputs: Tensor) -> Tensor:
        return ops.delta_tree(*inputs[:6], ancestors, depth, gates=inputs[6])

    def with_last(out: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and what was written to the last input: rows of the convolution, gates of the rule."""
        return out, inputs[-1]

    group, name = "gated delta", f"{nodes} nodes, HV {value_heads}, batch {batch}"
    moved = (3 * rows + 3 * batch + 4) * sizes.channels * element
    yield maker.case(group, f"causal_conv, {name}", conv_inputs, conv, moved, finish=with_last)
    moved = batch * sizes.values * width * 4
    moved += rows * ((sizes.channels + sizes.values) * element + 2 * value_heads * 4)
    target_us = 15 if (batch, nodes, value_heads) == (1, NODES, 32) else None
    yield maker.case(group, f"delta_tree, {name}", tree_inputs, tree, moved, target_us, finish=with_last)
    moved = 3 * rows * sizes.values * element
    yield maker.case(
        group, f"gated_norm, {name}", norm_inputs, lambda ops, *inputs: ops.gated_norm(*inputs, eps=1e-6), moved
    )


def prompt_case(maker: CaseMaker, sizes: RecurrentSizes) -> Case:
    """A part of a prompt. The state moves on in place."""
    moved = 2 * sizes.values * sizes.width * 4
    return maker.case(
        "gated delta",
        f"delta_chunk, {sizes.prompt} tokens, HV {sizes.value_heads}",
        lambda generator: delta_inputs(maker, sizes, generator, 1, sizes.prompt),
        lambda ops, *inputs: ops.delta_chunk(*inputs),
        moved + sizes.prompt * (sizes.channels + sizes.values) * maker.dtype.itemsize,
        finish=lambda answers, *inputs: (answers, inputs[5]),
    )


def states_case(maker: CaseMaker, sizes: RecurrentSizes, batch: int) -> Case:
    """The accepted path of a tree is taken into the states and windows of all linear layers, in place."""
    path = maker.int32(*ACCEPTED_PATH).repeat(batch, 1)
    accepted, shape = maker.int32(*[path.shape[1] - 1] * batch), (sizes.layers, batch)

    def make(generator: torch.Generator) -> tuple:
        wide = torch.float32
        gates = maker.normal(generator, *shape, NODES, 2, sizes.value_heads, dtype=wide).sigmoid()
        gates[:, :, :, 0].log_()
        states = maker.normal(generator, *shape, sizes.value_heads, sizes.width, sizes.width, std=0.1, dtype=wide)
        rows = (maker.normal(generator, *shape, count, sizes.channels) for count in (3, NODES, NODES))
        return states, *rows, gates

    moved = 2 * sizes.values * sizes.width * 4 + path.shape[1] * sizes.channels * 2
    return maker.case(
        "gated delta",
        f"commit_states, {path.shape[1]} tokens over {sizes.layers} layers, batch {batch}",
        make,
        lambda ops, *inputs: ops.commit_states(*inputs, path, accepted),
        sizes.layers * batch * moved,
        50 if batch == 1 else None,
        finish=lambda _, *inputs: inputs[:2],
    )
