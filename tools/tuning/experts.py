"""The sweep of tools/tune_experts.py."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.models.shapes import SHAPES
from eagle_triton.operands.experts import ExpertWeight, Routes, Routing
from eagle_triton.ops import experts
from eagle_triton.ops.experts.products import Settings, settings_of
from eagle_triton.reference import experts as reference
from eagle_triton.runtime.float8_expert_weight import Float8ExpertWeight
from eagle_triton.runtime.float8_weight import BLOCK
from eagle_triton.runtime.four_bit_expert_weight import FourBitExpertWeight
from eagle_triton.runtime.mxfp4_weight import GROUP, Mxfp4Weight
from eagle_triton.runtime.split_sums import total_of
from tools.tuning.sweep import compile_all, time_graph, write_table

_SHARED_MEMORY = 220 * 1024
_BYTES = 1.5e9  # of the weights that the rows of all layers read: far more than L2 holds
_MOST_LAYERS = 12
KINDS = {"mxfp4": Mxfp4Weight, "int4": FourBitExpertWeight, "fp8": Float8ExpertWeight}
BYTES = {Mxfp4Weight: 0.5, FourBitExpertWeight: 0.5, Float8ExpertWeight: 1}  # of a number; otherwise 2


class Layer(NamedTuple):
    """Weights of a mixture: router [E, H], gate_up [E, 2I, H] and down [E, H, I], as gpt-oss has them if
    `interleaved`; in 16 bits, in MXFP4, in four bits or in FP8."""

    router: Tensor
    gate_up: ExpertWeight
    down: ExpertWeight
    routing: Routing
    interleaved: bool

    @classmethod
    def random(cls, shape: str, kind: type, device: str) -> Layer:
        """kind: of the weights."""
        sizes = SHAPES[shape]
        count = sizes.get("num_experts") or sizes["num_local_experts"]
        width, inner = sizes["hidden_size"], sizes.get("moe_intermediate_size") or sizes["intermediate_size"]
        interleaved = sizes["model_type"] == "gpt_oss"

        def weight(*dims: int) -> ExpertWeight:
            if kind is Mxfp4Weight and len(dims) == 3:
                *rows, depth = dims
                blocks = torch.randint(256, (*rows, depth // GROUP, GROUP // 2), dtype=torch.uint8, device=device)
                return Mxfp4Weight(blocks, torch.full_like(blocks[..., 0], 120).contiguous())
            if kind is FourBitExpertWeight and len(dims) == 3:
                *rows, depth = dims
                words = torch.randint(-(2**31), 2**31, (*rows, depth // 8), dtype=torch.int32, device=device)
                scales = torch.rand(*rows, depth // 128, device=device) * 0.4 * depth**-0.5
                return FourBitExpertWeight(words, scales.bfloat16())
            if kind is Float8ExpertWeight and len(dims) == 3:
                count, *sizes = dims
                values = torch.randint(0x7F, dims, dtype=torch.uint8, device=device)  # no NaN
                values |= torch.randint_like(values, 2) << 7
                scales = torch.rand(count, *(-(-size // BLOCK) for size in sizes), device=device) * 2**-10
                return Float8ExpertWeight(values.view(torch.float8_e4m3fn), scales)
            made = torch.randn(*dims, device=device, dtype=torch.bfloat16) * dims[-1] ** -0.5
            return made.mT.contiguous().mT if interleaved and len(dims) == 3 else made

        routing = Routing(sizes["num_experts_per_tok"], "softmax_of_chosen" if interleaved else "softmax")
        router = weight(count, width)
        assert isinstance(router, Tensor)
        return cls(router, weight(count, 2 * inner, width), weight(count, width, inner), routing, interleaved)

    @property
    def options(self) -> dict:
        return {"interleaved": True, "clamp": (7.0, 1.702)} if self.interleaved else {}

    def route(self, x: Tensor) -> Routes:
        return experts.route(x, self.router, None, None, self.routing)

    def run(self, x: Tensor, swiglu: Settings | None = None, down: Settings | None = None) -> Tensor:
        """The sums of the last product, without the addition of their splits."""
        routes = self.route(x)
        inner = experts.experts_swiglu(x, self.gate_up, None, routes, settings=swiglu, **self.options)
        return experts.experts_down(inner, self.down, None, routes, settings=down).sums

    def error(self, x: Tensor, swiglu: Settings | None, down: Settings | None) -> float:
        """Relative, of this launch against fp32."""
        routes = self.route(x)
        wide = routes._replace(weights=routes.weights.float())
        matrices = [
            part.float() if isinstance(part, Tensor) else part.dequantised(torch.float32)
            for part in (self.gate_up, self.down)
        ]
        inner = reference.experts_swiglu(x.float(), matrices[0], None, wide, **self.options)
        expected = total_of(reference.experts_down(inner, matrices[1], None, wide))
        return ((self.run(x, swiglu, down).sum(0) - expected).norm() / expected.norm()).item()


def candidates(fused: bool, kind: type) -> Iterator[Settings]:
    """Settings whose tiles fit shared memory twice. `fused`: gate and up, whose tiles are twice as high."""
    size = BYTES.get(kind, 2)
    least = int(8 * 1024 * size)
    for columns, depth, stages, warps in itertools.product((16, 32, 64, 128), (64, 128, 256), (3, 4, 6), (4, 8)):
        height = columns * (2 if fused else 1)
        shared = int(height * size + 32) * depth * stages
        if not least <= shared <= _SHARED_MEMORY // 2 or (warps == 8 and height < 64) or height > 128:
            continue
        if kind in BYTES and (depth * BYTES[kind], height) != (64, 16 * warps):  # see _in_tensor_cores_order
            continue
        yield Settings(columns, depth, stages, warps)


def compile_settings(task: tuple[str, type, int, bool, Settings]) -> None:
    """Run a layer once."""
    shape, kind, rows, fused, settings = task
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = Layer.random(shape, kind, device)
    x = torch.randn(rows, layer.router.shape[1], device=device, dtype=torch.bfloat16)
    layer.run(x, *((settings, None) if fused else (None, settings)))


def sweep(args: argparse.Namespace) -> None:
    """Compile, check and time what the options ask for, and print it."""
    started, records = time.monotonic(), []
    kind = KINDS.get(args.weights, Tensor)
    tasks = [
        (shape, kind, args.rows, fused, settings)
        for shape in args.shape
        for fused in (True, False)
        for settings in candidates(fused, kind)
    ]
    errors = compile_all(compile_settings, tasks, args.workers)
    for shape in args.shape:
        first = Layer.random(shape, kind, "cuda")
        read = 3 * first.down.shape[1:].numel() * BYTES.get(kind, 2) * first.routing.chosen * args.rows
        layers = [first] + [Layer.random(shape, kind, "cuda") for _ in range(min(_MOST_LAYERS, int(_BYTES / read)))]
        x = torch.randn(args.rows, first.router.shape[1], device="cuda", dtype=torch.bfloat16)
        print(
            f"{shape}, {args.rows} rows: {time_graph([partial(one.run, x) for one in layers]):.1f} us",
            flush=True,
        )
        for fused in (True, False):
            found = []
            for settings in [use for *task, use in tasks if task == [shape, kind, args.rows, fused]]:
                pair = (settings, None) if fused else (None, settings)
                problem = errors[shape, kind, args.rows, fused, settings] or (
                    "" if (wrong := first.error(x, *pair)) < 8e-3 else f"relative error {wrong}"
                )
                if problem:
                    print(f"  {settings}: {problem}", flush=True)
                    continue
                us = time_graph([partial(one.run, x, *pair) for one in layers])
                found.append((us, settings))
                records.append((shape, args.rows, "swiglu" if fused else "down", *settings, f"{us:.2f}"))
            width, inner = first.down.shape[1:]
            sizes = (inner, width) if fused else (width, inner)
            now = settings_of(x.dtype, *sizes, first.routing.chosen, kind, fused)
            print(f"  {'gate and up' if fused else 'down'}, now {tuple(now)} ({time.monotonic() - started:.0f} s)")
            for us, settings in sorted(found)[: args.top]:
                print(f"    {us:7.2f}  {tuple(settings)}", flush=True)
        del first, layers
    write_table(args.csv, ("shape", "rows", "product", *Settings._fields, "us"), records)
