"""The sweep of tools/tune_attention.py: candidates of launch settings, compiled in parallel, checked and timed."""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton import attention as launchers
from eagle_triton.attention import Settings, settings_for
from eagle_triton.benchmarks.timing import copy_bandwidth
from eagle_triton.engine.memory.pages import PAGE_ROWS
from eagle_triton.models.shapes import SHAPES
from eagle_triton.operands.ancestors import pack_ancestors
from eagle_triton.reference.attention import tree_attention
from eagle_triton.reference.tree_decoding import _ancestor_closure
from tools.tuning.sweep import compile_all, time_graph, write_table

CACHE_BYTES = 400e6  # of all caches together, at least: several times L2
FIELDS = ("splits", "programs", "min_tiles", "block_m", "block_n", "block_t", "num_warps", "num_stages", "streamed")
OF_KERNELS = FIELDS[3:8]  # which the streamed kernel does not read


class Heads(NamedTuple):
    """values: columns of the keys that are the values, in latent attention; None: values have a place of their own."""

    queries: int
    keys: int
    width: int
    values: int | None = None

    @property
    def group(self) -> int:
        return self.queries // self.keys


class Case(NamedTuple):
    """Operands of attention.tree_attention, with the caches of several layers."""

    q: Tensor
    caches: Tensor
    lengths: Tensor
    ancestors: Tensor
    table: Tensor
    values: int | None

    def run(self, use: Settings, layer: int) -> Tensor:
        scale = self.q.shape[-1] ** -0.5
        case = self.q, self.caches[layer], self.lengths, self.ancestors
        return launchers._launch(*case, scale, None, use, self.table, new_keys=self.q.shape[1], value_width=self.values)

    def expected(self) -> Tensor:
        q, cache = self.q.float(), self.caches[0].float()
        scale = q.shape[-1] ** -0.5
        options = dict(scale=scale, table=self.table, value_width=self.values)
        return tree_attention(q, cache, self.lengths, self.ancestors, **options)


def heads_of(shape: str) -> Heads:
    sizes = SHAPES[shape]
    if (rank := sizes.get("kv_lora_rank")) is not None:
        return Heads(sizes["num_attention_heads"], 1, rank + sizes["qk_rope_head_dim"], rank)
    queries, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    return Heads(queries, sizes["num_key_value_heads"], sizes.get("head_dim", hidden // queries))


def make_case(heads: Heads, nodes: int, batch: int, keys: int, device: str, layers: int = 0) -> Case:
    """A case with `keys` committed rows for each sequence, in shuffled pages; `layers` 0: as many as exceed L2."""
    pages = -(-(keys + 64 * -(-nodes // 64)) // PAGE_ROWS)
    sides = 2 if heads.values is None else 1
    size = 2 * sides * batch * pages * heads.keys * PAGE_ROWS * heads.width
    layers = layers or max(2, int(CACHE_BYTES / size))
    bf16 = {"device": device, "dtype": torch.bfloat16}
    table = torch.randperm(batch * pages, device=device).view(batch, pages).int()
    parents = torch.tensor([[max(0, (node - 1) // 3) for node in range(nodes)]], device=device)
    return Case(
        torch.randn(batch, nodes, heads.queries, heads.width, **bf16),
        torch.randn(batch * pages, layers, sides, heads.keys, PAGE_ROWS, heads.width, **bf16).permute(1, 2, 0, 3, 4, 5),
        torch.full((batch,), keys, dtype=torch.int32, device=device),
        pack_ancestors(_ancestor_closure(parents).expand(batch, -1, -1)),
        table,
        heads.values,
    )


def now(heads: Heads, nodes: int, batch: int, capability: tuple[int, int] | None) -> Settings:
    """Today's settings, which are to be beaten."""
    width, of_latents = heads.values or heads.width, heads.values is not None
    rows = nodes * heads.group
    return settings_for(rows, width, heads.keys, batch, torch.bfloat16, capability, of_latents=of_latents)


def candidates(args: argparse.Namespace, use: Settings) -> Iterator[Settings]:
    """`use` first, then it with every choice of the fields that have one."""
    yield use
    for values in itertools.product(*(getattr(args, field) or [getattr(use, field)] for field in FIELDS)):
        other = use._replace(**dict(zip(FIELDS, values, strict=True)))
        if any(getattr(other, field) != getattr(use, field) for field in OF_KERNELS):
            other = other._replace(streamed=False)
        if other.streamed and not use.streamed:
            continue
        if other.programs in (1, other.splits) and other.block_t <= other.block_n and other != use:
            yield other


def compile_settings(task: tuple[Heads, int, Settings]) -> None:
    """One small launch."""
    heads, nodes, use = task
    device = "cuda" if torch.cuda.is_available() else "cpu"
    make_case(heads, nodes, 1, 2 * PAGE_ROWS, device, layers=1).run(use, 0)


def tune(case: Case, settings: list[Settings]) -> dict[Settings, float]:
    """µs of each, of those that give what fp32 gives."""
    expected, found = case.expected(), {}
    for use in settings:
        out = case.run(use, 0).float()
        error = ((out - expected).norm() / expected.norm()).item()
        if not error < 1e-2:
            print(f"  {shown(use)} failed: relative error {error}", flush=True)
            continue
        found[use] = time_graph([functools.partial(case.run, use, layer) for layer in range(len(case.caches))])
    return found


def shown(use: Settings) -> str:
    return " ".join(f"{name} {getattr(use, name)}" for name in FIELDS)


def sweep(args: argparse.Namespace) -> None:
    """Compile, check and time what the options ask for, and print it."""
    started, heads = time.monotonic(), heads_of(args.shape)
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    capability = None if device is None else torch.cuda.get_device_capability(device)
    bandwidth = copy_bandwidth(torch.device("cpu" if device is None else "cuda"))
    cases = list(itertools.product(args.nodes, args.batch))
    plan = {
        (nodes, batch): list(dict.fromkeys(candidates(args, now(heads, nodes, batch, capability))))
        for nodes, batch in cases
    }
    if 1 in (args.streamed or ()) and not any(some[0].streamed for some in plan.values()):
        raise SystemExit(
            f"--streamed 1: only Hopper's trees with heads of 64 to 128 are streamed, this is {capability}"
        )
    tasks = ((heads, nodes, use) for (nodes, _), some in plan.items() for use in some)
    errors = compile_all(compile_settings, tasks, args.workers)
    for (_, nodes, use), error in errors.items():
        if error:
            print(f"  {nodes} nodes, {shown(use)}: {error}", flush=True)
    records = []
    for (nodes, batch), some in plan.items():
        good = [use for use in some if not errors[heads, nodes, use]]
        times: dict[int, dict[Settings, float]] = {}
        for keys in args.keys:
            case = make_case(heads, nodes, batch, keys, "cuda" if device is not None else "cpu")
            times[keys] = tune(case, good)
            del case
        _show(nodes, batch, some[0], times, heads, bandwidth, args.top)
        print(f"  {time.monotonic() - started:.0f} s", flush=True)
        for keys, found in times.items():
            records += [(nodes, batch, keys, *(getattr(use, name) for name in FIELDS), us) for use, us in found.items()]
    write_table(args.csv, ("nodes", "batch", "keys", *FIELDS, "us"), records)


def _show(nodes: int, batch: int, use: Settings, times: dict, heads: Heads, bandwidth: float, top: int) -> None:
    best = {key for found in times.values() for key in sorted(found, key=found.get)[:top]}
    ranked = sorted(best - {use}, key=lambda other: sum(found.get(other, 1e9) for found in times.values()))
    row_bytes = (4 if heads.values is None else 2) * heads.keys * heads.width
    reading = [f"{row_bytes * batch * keys / bandwidth * 1e6:7.1f}" for keys in times]
    print(f"{nodes} nodes of {batch} sequences, keys {' '.join(map(str, times))}")
    print(f"  {' '.join(reading)}  reading")
    for other in [use, *ranked]:
        row = " ".join(f"{found.get(other, float('nan')):7.1f}" for found in times.values())
        print(f"  {row}  {shown(other)}{'  now' if other is use else ''}", flush=True)
