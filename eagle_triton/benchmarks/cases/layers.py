"""The operations between the products of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_triton.benchmarks.cases.case import NODES, Case, CaseMaker, Sizes
from eagle_triton.engine.state import capacity_bucket

EPS = 1e-5


def layer_cases(maker: CaseMaker, sizes: Sizes) -> Iterator[Case]:
    """RMSNorm, rotary embedding with the cache append, SwiGLU, GELU and the gate of heads, for the nodes of a tree."""
    hidden, width, element = sizes.hidden, sizes.width, maker.dtype.itemsize
    keys = 512 if maker.cuda else 64

    def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return F.rms_norm(x, (hidden,), weight, EPS), x

    def embedded(generator: torch.Generator) -> tuple:
        rows = 16 * NODES  # of the vocabulary; more are not read
        tokens = maker.integers(generator, rows, 1, NODES)
        return tokens, maker.normal(generator, rows, hidden), maker.normal(generator, hidden)

    first_row = maker.int32(keys)
    inv_freq = 500000.0 ** -(torch.arange(0, width, 2, device=maker.device) / width)

    def rotary_inputs(generator: torch.Generator) -> tuple:
        heads = [maker.normal(generator, 1, NODES, count, width) for count in (sizes.heads, *[sizes.kv_heads] * 2)]
        return *heads, maker.normal(generator, 2, 1, sizes.kv_heads, capacity_bucket(keys + NODES), width)

    def gate_inputs(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        product = maker.normal(generator, 1, NODES, sizes.heads, 2 * width)
        return maker.normal(generator, 1, NODES, sizes.heads, width), product[..., width:]

    cases: list[tuple[str, Any, Any, int, dict[str, Any]]] = [
        (
            f"add_rms_norm [{NODES}, {hidden}]",
            lambda generator: tuple(maker.normal(generator, *s) for s in ((NODES, hidden), (hidden,), (NODES, hidden))),
            lambda ops, x, weight, residual: ops.add_rms_norm(x, residual, weight, EPS),
            4 * NODES * hidden,
            dict(others={"add, rms_norm": lambda x, weight, residual: rms_norm(x + residual, weight)}),
        ),
        (
            f"embed_rms_norm [{NODES}, {hidden}]",
            embedded,
            lambda ops, tokens, table, weight: ops.embed_rms_norm(tokens, table, weight, EPS),
            3 * NODES * hidden,
            dict(others={"look-up, rms_norm": lambda tokens, table, weight: rms_norm(table[tokens], weight)}),
        ),
        (
            f"rotary_append, {NODES} nodes",
            rotary_inputs,
            lambda ops, *inputs: ops.rotary_append(*inputs, first_row, None, inv_freq),
            2 * NODES * (sizes.heads + 2 * sizes.kv_heads) * width,
            dict(finish=lambda q, *inputs: (q, inputs[3][:, :, :, keys : keys + NODES])),
        ),
        (
            f"swiglu [{NODES}, {sizes.inner}]",
            lambda generator: tuple(maker.normal(generator, NODES, sizes.inner) for _ in range(2)),
            lambda ops, gate, up: ops.swiglu(gate, up),
            3 * NODES * sizes.inner,
            dict(others={"silu, mul": lambda gate, up: F.silu(gate) * up}),
        ),
        (
            f"activate [{NODES}, {sizes.inner}]",
            lambda generator: (maker.normal(generator, NODES, sizes.inner),),
            lambda ops, x: ops.activate(x, "gelu_tanh"),
            2 * NODES * sizes.inner,
            dict(others={"gelu": lambda x: F.gelu(x, approximate="tanh")}),
        ),
        (
            f"gate_heads, {NODES} nodes",
            gate_inputs,
            lambda ops, x, gate: ops.gate_heads(x, gate),
            3 * NODES * sizes.heads * width,
            dict(others={"sigmoid, mul": lambda x, gate: x * torch.sigmoid(gate)}),
        ),
    ]
    for name, make, call, elements, more in cases:
        yield maker.case("layers", name, make, call, elements * element, **more)
