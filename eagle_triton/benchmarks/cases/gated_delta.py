"""Linear layers of a hybrid model between their products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eagle_triton.benchmarks.cases.case import NODES, Case, Random, RecurrentSizes, reference_case
from eagle_triton.engine.operations import Operations
from eagle_triton.operands.ancestors import pack_ancestors
from eagle_triton.reference import gated_delta, tree_decoding


def delta_inputs(
    sizes: RecurrentSizes, random: Random, generator: torch.Generator, batch: int, count: int
) -> tuple[Tensor, ...]:
    """Operands of delta_tree up to the state. beta is 1/2, so that it is the same in 16 bits and in fp32."""
    shared, wide = sizes.value_heads // sizes.heads, random._replace(dtype=torch.float32)
    return (
        random.normal(generator, batch, count, sizes.channels),
        random.normal(generator, batch, count, sizes.heads, shared),
        torch.zeros(batch, count, sizes.heads, shared, device=random.device, dtype=random.dtype),
        wide.normal(generator, sizes.value_heads),
        wide.normal(generator, sizes.value_heads),
        wide.normal(generator, batch, sizes.value_heads, sizes.width, sizes.width, std=0.1),
    )


def delta_cases(ops: Operations, sizes: RecurrentSizes, random: Random, batch: int, nodes: int) -> Iterator[Case]:
    """A linear layer between its products, over the nodes of a tree or only its root: convolution, delta rule, norm."""
    heads, value_heads, width, element = sizes.heads, sizes.value_heads, sizes.width, random.dtype.itemsize
    name = f"{nodes} nodes, HV {value_heads}, batch {batch}"
    parents = torch.arange(-1, nodes - 1, device=random.device) * 5 // 7  # of 60 nodes the deepest lie at DEPTH
    matrix = tree_decoding._ancestor_closure(parents[None].int())
    ancestors, depth = pack_ancestors(matrix).repeat(batch, 1, 1), int(matrix.sum(-1).max()) - 1
    values, rows = value_heads * width, batch * nodes

    def conv_inputs(generator: torch.Generator) -> tuple:
        q, k = (random.normal(generator, batch, nodes, heads, width) for _ in range(2))
        v = random.normal(generator, batch, nodes, heads, values // heads)
        weight, window = (
            random.normal(generator, *shape) for shape in ((sizes.channels, 4), (batch, 3, sizes.channels))
        )
        return q, k, v, weight, window, torch.empty(batch, nodes, sizes.channels, dtype=q.dtype, device=q.device)

    def convolve(conv: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return conv(*inputs[:5], ancestors, raw=inputs[5])

    def with_rows(mixed: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return mixed, inputs[5]

    yield reference_case(
        ops,
        "gated delta",
        f"causal_conv, {name}",
        conv_inputs,
        partial(convolve, gated_delta.causal_conv),
        partial(convolve, ops.causal_conv),
        (3 * rows + 3 * batch + 4) * sizes.channels * element,
        finish=with_rows,
    )

    def tree_inputs(generator: torch.Generator) -> tuple:
        gates = torch.empty(batch, nodes, 2, value_heads, device=random.device)
        return *delta_inputs(sizes, random, generator, batch, nodes), gates

    def answer(tree: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return tree(*inputs[:6], ancestors, depth, gates=inputs[6])

    def with_gates(answers: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return answers, inputs[6]

    yield reference_case(
        ops,
        "gated delta",
        f"delta_tree, {name}",
        tree_inputs,
        partial(answer, gated_delta.delta_tree),
        partial(answer, ops.delta_tree),
        batch * values * width * 4 + rows * ((sizes.channels + values) * element + 2 * value_heads * 4),
        15 if (batch, nodes, value_heads) == (1, NODES, 32) else None,
        with_gates,
    )

    def norm_inputs(generator: torch.Generator) -> tuple:
        x, z = random.normal(generator, batch, nodes, value_heads, width), random.normal(generator, *x_shape)
        return x, z, random.normal(generator, width)

    x_shape = batch, nodes, heads, values // heads
    yield reference_case(
        ops,
        "gated delta",
        f"gated_norm, {name}",
        norm_inputs,
        partial(gated_delta.gated_norm, eps=1e-6),
        partial(ops.gated_norm, eps=1e-6),
        3 * rows * values * element,
    )


def prompt_case(ops: Operations, sizes: RecurrentSizes, random: Random) -> Case:
    """A part of a prompt. The state moves on in place."""
    values = sizes.value_heads * sizes.width

    def with_state(answers: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return answers, inputs[5]

    return reference_case(
        ops,
        "gated delta",
        f"delta_chunk, {sizes.prompt} tokens, HV {sizes.value_heads}",
        lambda generator: delta_inputs(sizes, random, generator, 1, sizes.prompt),
        gated_delta.delta_chunk,
        ops.delta_chunk,
        2 * values * sizes.width * 4 + sizes.prompt * (sizes.channels + values) * random.dtype.itemsize,
        finish=with_state,
    )


def states_case(ops: Operations, sizes: RecurrentSizes, random: Random, batch: int) -> Case:
    """The accepted path of a tree is taken into the states and windows of all linear layers, in place."""
    path = random.int32(0, 1, 4, 9, 15, 22, 31, 44, 59).repeat(batch, 1)
    accepted = random.int32(*[path.shape[1] - 1] * batch)
    shape, values = (sizes.layers, batch), sizes.value_heads * sizes.width

    def make(generator: torch.Generator) -> tuple:
        wide = random._replace(dtype=torch.float32)
        gates = wide.normal(generator, *shape, NODES, 2, sizes.value_heads).sigmoid()
        gates[:, :, :, 0].log_()
        return (
            wide.normal(generator, *shape, sizes.value_heads, sizes.width, sizes.width, std=0.1),
            *(random.normal(generator, *shape, count, sizes.channels) for count in (3, NODES, NODES)),
            gates,
        )

    def call(commit: Callable[..., None], *inputs: Tensor) -> None:
        commit(*inputs, path, accepted)

    def kept(_: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs[:2]

    return reference_case(
        ops,
        "gated delta",
        f"commit_states, {path.shape[1]} tokens over {sizes.layers} layers, batch {batch}",
        make,
        partial(call, gated_delta.commit_states),
        partial(call, ops.commit_states),
        sizes.layers * batch * (2 * values * sizes.width * 4 + path.numel() // batch * sizes.channels * 2),
        50 if batch == 1 else None,
        kept,
    )
