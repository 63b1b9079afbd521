"""The operations between the products of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_triton.benchmarks.cases.case import NODES, Case, Provider, Random, Sizes, ours, reference_case
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.state import capacity_bucket
from eagle_triton.reference import layers


def layer_cases(ops: Operations, sizes: Sizes, random: Random) -> Iterator[Case]:
    """RMSNorm of a residual sum, rotary embedding with the cache append, SwiGLU; for the nodes of a tree."""
    hidden, width, element = sizes.hidden, sizes.width, random.dtype.itemsize
    eps, keys = 1e-5, 512 if random.device.type == "cuda" else 64

    def norm_inputs(generator: torch.Generator) -> tuple:
        return tuple(random.normal(generator, *shape) for shape in ((NODES, hidden), (hidden,), (NODES, hidden)))

    def torch_norm(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, (hidden,), weight, eps), total

    yield Case(
        "layers",
        f"add_rms_norm [{NODES}, {hidden}]",
        norm_inputs,
        lambda x, weight, residual: layers.add_rms_norm(x, residual, weight, eps),
        [
            Provider("add, rms_norm", torch_norm),
            ours(ops, lambda x, weight, residual: ops.add_rms_norm(x, residual, weight, eps)),
        ],
        4 * NODES * hidden * element,
    )

    def embedded(generator: torch.Generator) -> tuple:
        rows = 16 * NODES  # of a vocabulary no more are read
        tokens = torch.randint(rows, (1, NODES), generator=generator, device=random.device)
        return tokens, random.normal(generator, rows, hidden), random.normal(generator, hidden)

    def torch_embedded(tokens: Tensor, embedding: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x = embedding[tokens]
        return F.rms_norm(x, (hidden,), weight, eps), x

    yield Case(
        "layers",
        f"embed_rms_norm [{NODES}, {hidden}]",
        embedded,
        lambda tokens, table, weight: layers.embed_rms_norm(tokens, table, weight, eps),
        [
            Provider("look-up, rms_norm", torch_embedded),
            ours(ops, lambda tokens, table, weight: ops.embed_rms_norm(tokens, table, weight, eps)),
        ],
        3 * NODES * hidden * element,
    )

    first_row = random.int32(keys)
    inv_freq = 500000.0 ** -(torch.arange(0, width, 2, device=random.device) / width)

    def rotary_inputs(generator: torch.Generator) -> tuple:
        heads = [random.normal(generator, 1, NODES, count, width) for count in (sizes.heads, *[sizes.kv_heads] * 2)]
        return *heads, random.normal(generator, 2, 1, sizes.kv_heads, capacity_bucket(keys + NODES), width)

    def rotate(rotary: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return rotary(*inputs, first_row, None, inv_freq)

    def written(q: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return q, inputs[3][:, :, :, keys : keys + NODES]

    yield reference_case(
        ops,
        "layers",
        f"rotary_append, {NODES} nodes",
        rotary_inputs,
        partial(rotate, layers.rotary_append),
        partial(rotate, ops.rotary_append),
        2 * NODES * (sizes.heads + 2 * sizes.kv_heads) * width * element,
        finish=written,
    )
    yield Case(
        "layers",
        f"swiglu [{NODES}, {sizes.inner}]",
        lambda generator: tuple(random.normal(generator, NODES, sizes.inner) for _ in range(2)),
        layers.swiglu,
        [Provider("silu, mul", lambda gate, up: F.silu(gate) * up), ours(ops, ops.swiglu)],
        3 * NODES * sizes.inner * element,
    )

    def gate_inputs(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        product = random.normal(generator, 1, NODES, sizes.heads, 2 * width)
        return random.normal(generator, 1, NODES, sizes.heads, width), product[..., width:]

    yield Case(
        "layers",
        f"gate_heads, {NODES} nodes",
        gate_inputs,
        layers.gate_heads,
        [Provider("sigmoid, mul", lambda x, gate: x * torch.sigmoid(gate)), ours(ops, ops.gate_heads)],
        3 * NODES * sizes.heads * width * element,
    )
