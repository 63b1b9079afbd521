"""Every operation of a decode step against the best that torch offers for it, in the same run.

A provider is timed only if its output agrees with the reference in fp32 on the same inputs: integers exactly, floating
point to a relative error (2-norm) of 1e-2 in 16 bits, 1e-4 in fp32. Providers take turns over buffers that are together
larger than the last cache where the operation's own data allow it; what stays in the cache here does so in a decode
step too. Preparations that a torch user could make once (masks, concatenated weights, packed heads) are not timed.
On a CPU the references stand in for the kernels, at toy sizes: that checks this program and measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from eagle_triton.benchmarks.record import table
from eagle_triton.benchmarks.timing import Quantiles, interleaved
from eagle_triton.engine.operations import Operations, make_operations
from eagle_triton.engine.state import capacity_bucket
from eagle_triton.reference import (
    attention,
    gated_delta,
    kv_cache,
    layers,
    sampling,
    suffix_match,
    tree_decoding,
    verification,
)

CACHE_BYTES = 2**28  # all buffers of one operation together: several times the L2 of any GPU
MOST_SETS = 32  # layers of the 8b shape: as many distinct caches as a decode step goes through
ROUNDS = {"cuda": 40, "cpu": 3}
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 1e-2, torch.float32: 1e-4}


class Sizes(NamedTuple):
    """The model whose operations are timed."""

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


LLAMA_8B = Sizes(32, 4096, 14336, 32, 8, 128, 128256, 32000, (512, 2048, 32768))
TOY = Sizes(2, 64, 128, 4, 2, 16, 512, 128, (64, 128))


class LinearSizes(NamedTuple):
    """The linear layers of a hybrid model whose operations are timed."""

    layers: int
    heads: int
    value_heads: int
    width: int
    prompt: int

    @property
    def channels(self) -> int:
        return (2 * self.heads + self.value_heads) * self.width


QWEN3_5_9B, QWEN3_5_27B = LinearSizes(24, 16, 32, 128, 512), LinearSizes(48, 16, 48, 128, 512)
LINEAR_TOY = LinearSizes(2, 2, 4, 16, 70)
RINGS = [(10_000, 1, None), (1_000_000, 1, 25), (1_000_000, 8, 32), (1_000_000, 64, 80), (10_000_000, 1, 35)]
NODES, DEPTH, TOP_K = 60, 8, 10  # the tree of 60 nodes: eight passes of the head, ten candidates per node


@dataclass(frozen=True)
class Provider:
    """Somebody who can do it. `finish` makes of its output and its arguments what is compared; it is not timed."""

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


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add a row for each case and provider, and notes. Raises ValueError if no case is called as --only says."""
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    operations = make_operations(kernels=cuda)
    if not cuda:
        notes.append("ON A CPU: REFERENCES AT TOY SIZES, THE TIMES SAY NOTHING ABOUT THE KERNELS")
    cases = list(all_cases(operations, LLAMA_8B if cuda else TOY, device, getattr(torch, args.dtype)))
    names = [case.name for case in cases]
    cases = [case for case in cases if args.only is None or args.only in case.name]
    if not cases:
        raise ValueError(f"--only must be a part of one of {', '.join(names)}, got {args.only!r}")
    if not cuda:
        cases = [replace(case, target_us=None, least_speedup=None) for case in cases]
    with torch.no_grad(), tqdm(cases, desc="operations", disable=args.json or None, leave=False) as bar:
        for case in bar:
            bar.set_postfix_str(case.name)
            more, said = measure_case(case, device)
            rows += more
            notes += said
            torch.compiler.reset()
    if cuda and not operations.calls:
        notes.append("FAIL: no kernel was called")
    notes += _sums(rows)


def measure_case(case: Case, device: torch.device) -> tuple[list[dict[str, Any]], list[str]]:
    """Check every provider of a case, then time those that agree."""
    agreeing, notes = [], []
    for provider in case.providers:
        problem = _disagreement(case, provider, device)
        if problem:
            notes.append(f"{'FAIL: ' * provider.ours}{case.name}: {provider.name} was not timed: {problem}")
        else:
            agreeing.append(provider)
    if not agreeing:
        return [], notes
    count = min(max(CACHE_BYTES // max(case.moved, 1), 1) + 1, MOST_SETS) if device.type == "cuda" else 2
    sets = [case.make(torch.Generator(device).manual_seed(seed)) for seed in range(count)]
    calls = {provider.name: [partial(provider.call, *inputs) for inputs in sets] for provider in agreeing}
    times, eager = interleaved(calls, device, ROUNDS[device.type])
    notes += [f"{case.name}: {name} cannot be captured in a graph, so it was launched call by call" for name in eager]
    return [_row(case, provider, times, agreeing) for provider in agreeing], notes


def _row(case: Case, provider: Provider, times: dict[str, Quantiles], timed: list[Provider]) -> dict[str, Any]:
    time = times[provider.name]
    others = [times[other.name].median for other in timed if not other.ours]
    speedup = min(others) / time.median if provider.ours and others else None
    held = provider is next((p for p in reversed(timed) if p.ours), None)
    checks = [time.median <= case.target_us] if case.target_us is not None else []
    if case.least_speedup is not None and speedup is not None:
        checks.append(speedup >= case.least_speedup)
    return {
        "group": case.group,
        "case": case.name,
        "provider": provider.name,
        "ours": provider.ours,
        "us_p20": time.p20,
        "us_median": time.median,
        "us_p80": time.p80,
        "gb_per_second": case.moved / time.median / 1e3,
        "speedup": speedup,
        "target_us": case.target_us if held else None,
        "target_met": all(checks) if held and checks else None,
    }


def _sums(rows: list[dict[str, Any]]) -> list[str]:
    """The products together, for each number of rows: ours as a decode step uses them against the best of torch."""
    notes = []
    for group in dict.fromkeys(row["group"] for row in rows if row["group"].startswith("products")):
        ours: dict[str, float] = {}
        others: dict[str, float] = {}
        for row in (row for row in rows if row["group"] == group):
            if row["ours"]:
                ours[row["case"]] = row["us_median"]
            else:
                others[row["case"]] = min(row["us_median"], others.get(row["case"], float("inf")))
        mine, theirs = sum(ours.values()), sum(others.values())
        notes.append(f"{group}, sum: ours {mine:.1f} us, torch {theirs:.1f} us, {1 - mine / theirs:.1%} less")
    return notes


# ------------------------------------------------------------------------------------------------------------ parity


def _disagreement(case: Case, provider: Provider, device: torch.device) -> str | None:
    """Why a provider must not be timed, None if it agrees."""
    inputs = case.make(torch.Generator(device).manual_seed(12345))
    wide = [_wide(value) for value in case.make(torch.Generator(device).manual_seed(12345))]
    expected = case.expected(*wide)
    del wide
    try:
        out = provider.finish(provider.call(*inputs), *inputs)
    except Exception as error:  # whatever a backend or a compiler raises for what it does not support
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    got, wanted = _tensors(out), _tensors(expected)
    if len(got) != len(wanted):
        return f"{len(got)} outputs, expected {len(wanted)}"
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        if a.shape != b.shape:
            return f"output {index} is {tuple(a.shape)}, expected {tuple(b.shape)}"
        if not b.is_floating_point():
            if not torch.equal(a, b):
                return f"output {index} differs in {int((a != b).sum())} of {a.numel()} places"
            continue
        distance = float((a.float() - b).norm() / b.norm())
        if not distance <= TOLERANCE[a.dtype]:
            return f"output {index} is off by {distance:.1e}"
    return None


def _wide(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(*map(_wide, value)) if hasattr(value, "_fields") else type(value)(map(_wide, value))
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)]


# ------------------------------------------------------------------------------------------------------------- cases


def all_cases(ops: Operations, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """What is timed. 16 rows stand for a beam, 64 for a tree."""
    random = Random(device, dtype)
    for keys, target_us in zip(sizes.keys, (8, 12, 50), strict=False):
        yield attention_case(ops, sizes, random, keys, target_us)
    for rows in (16, 64):
        yield from product_cases(ops, sizes, random, rows)
    yield from verification_cases(ops, sizes, random)
    yield tree_case(ops, random)
    yield commit_case(ops, sizes, random)
    yield topk_case(ops, sizes, random)
    yield from layer_cases(ops, sizes, random)
    for linear in (QWEN3_5_9B, QWEN3_5_27B) if device.type == "cuda" else (LINEAR_TOY,):
        for batch, nodes in ((1, NODES), (8, NODES), (1, 1), (8, 1)):
            yield from linear_cases(ops, linear, random, batch, nodes)
        yield prompt_case(ops, linear, random)
    for batch in (1, 8):
        yield states_case(ops, QWEN3_5_9B if device.type == "cuda" else LINEAR_TOY, random, batch)
    for ring, batch, target in RINGS if device.type == "cuda" else [(2000, 2, None)]:
        yield suffix_case(ops, sizes, random, ring, batch, target)


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


def attention_case(ops: Operations, sizes: Sizes, random: Random, keys: int, target_us: float) -> Case:
    """The nodes of a tree over `keys` committed rows and each other; torch gets its masks ready made."""
    heads, kv_heads, width, device = sizes.heads, sizes.kv_heads, sizes.width, random.device
    group, rows, capacity = heads // kv_heads, keys + NODES, capacity_bucket(keys + NODES)
    matrix = tree_decoding._ancestor_closure(random.parents())
    ancestors, lengths, scale = attention.pack_ancestors(matrix), random.int32(keys), width**-0.5
    visible = torch.ones(NODES, rows, dtype=torch.bool, device=device)
    visible[:, keys:] = matrix[0]
    bias = torch.zeros(NODES * group, -(-rows // 8) * 8, dtype=random.dtype, device=device)[:, :rows]  # aligned rows
    bias.masked_fill_(~visible.repeat_interleave(group, 0), float("-inf"))

    def make(generator: torch.Generator) -> tuple:
        q = random.normal(generator, 1, NODES, heads, width)
        packed = q.view(1, NODES, kv_heads, group, width).transpose(1, 2).reshape(1, kv_heads, -1, width)
        return q, packed, random.normal(generator, 2, 1, kv_heads, capacity, width)

    def expected(q: Tensor, packed: Tensor, cache: Tensor) -> Tensor:
        return attention.tree_attention(q, cache, lengths, ancestors, scale=scale)

    def kernel(q: Tensor, packed: Tensor, cache: Tensor) -> Tensor:
        return ops.tree_attention(q, cache, lengths, ancestors, scale=scale)

    def sdpa(q: Tensor, packed: Tensor, cache: Tensor) -> Tensor:
        """The heads of a group packed into rows, so that keys are not repeated."""
        k, v = cache[:, :, :, :rows]
        return F.scaled_dot_product_attention(packed, k, v, bias, scale=scale)

    def unpack(out: Tensor, *_: Tensor) -> Tensor:
        return out.view(1, kv_heads, NODES, group, width).transpose(1, 2).reshape(1, NODES, heads, width)

    providers = [Provider("sdpa", sdpa, unpack)]
    if device.type == "cuda":
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            providers.append(Provider(f"sdpa {backend.name.lower()}", sdpa_kernel(backend)(sdpa), unpack))
        for name, query_block, options in (
            ("flex_attention", 128, {"FORCE_USE_FLEX_ATTENTION": True}),
            ("flex decoding", 256, {}),  # packs the heads of a group: 4 x 64 rows must divide the mask's block
        ):
            call = _flex(visible, rows, scale, query_block, options)
            providers.append(Provider(name, call, lambda out, *_: out.transpose(1, 2)))
    element = random.dtype.itemsize
    return Case(
        "attention",
        f"tree attention, {NODES} nodes, {keys} keys",
        make,
        expected,
        [*providers, _ours(ops, kernel)],
        2 * (rows * kv_heads + NODES * heads) * width * element,
        target_us,
        1.5,
    )


def _flex(visible: Tensor, rows: int, scale: float, query_block: int, options: Any) -> Callable[..., Tensor]:
    """flex_attention as compiled by torch for this mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(
        lambda b, h, i, j: visible[i, j], None, None, NODES, rows, visible.device, (query_block, 128)
    )
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q: Tensor, packed: Tensor, cache: Tensor) -> Tensor:
        k, v = cache[:, :, :, :rows]
        return compiled(q.transpose(1, 2), k, v, block_mask=mask, scale=scale, enable_gqa=True, kernel_options=options)

    return call


def product_cases(ops: Operations, sizes: Sizes, random: Random, rows: int) -> Iterator[Case]:
    """The seven products of a decode step; torch gets weights that stand together concatenated."""
    hidden, qkv = sizes.hidden, sizes.qkv
    shapes = {
        "qkv": (qkv, hidden),
        "o": ((hidden,), qkv[0]),
        "gate, up": ((sizes.inner, sizes.inner), hidden),
        "down": ((hidden,), sizes.inner),
        "head": ((sizes.vocab,), hidden),
        "draft qkv": (qkv, 2 * hidden),
        "draft head": ((sizes.draft_vocab,), hidden),
    }
    for name, (cols, depth) in shapes.items():
        yield product_case(ops, random, rows, name, cols, depth)


def product_case(ops: Operations, random: Random, rows: int, name: str, cols: tuple[int, ...], depth: int) -> Case:
    """x @ weights, of several weights side by side, SwiGLU for two."""

    def make(generator: torch.Generator) -> tuple:
        joined = random.normal(generator, sum(cols), depth, std=depth**-0.5)
        return random.normal(generator, rows, depth), joined, joined.split(cols)

    def cublas(x: Tensor, joined: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        return F.linear(x, joined)

    def swiglu(out: Tensor, *_: Any) -> Tensor:
        gate, up = out.chunk(2, dim=-1)
        return F.silu(gate) * up

    def ours(x: Tensor, joined: Tensor, weights: tuple[Tensor, ...], **keep_splits: Any) -> Any:
        if len(weights) == 1:
            return ops.linear(x, weights[0], **keep_splits)
        return ops.linear_stack(x, weights, [None] * len(weights), **keep_splits)

    def total(outs: Any, *_: Any) -> Tensor:
        outs = outs if isinstance(outs, tuple) else (outs,)
        return torch.cat([out if isinstance(out, Tensor) else out.total() for out in outs], dim=-1)

    if len(cols) == 2:
        providers = [
            Provider("cublas, activation not timed", cublas, swiglu),
            Provider("cublas, silu, mul", lambda *inputs: swiglu(cublas(*inputs))),
            _ours(ops, lambda x, joined, weights: ops.linear_swiglu(x, *weights)),
        ]
    else:
        providers = [Provider("cublas", cublas), _ours(ops, ours, total)]
        if _splits(ours, make, random):
            providers.append(Provider(f"{_name(ops)}, keep_splits sum", partial(ours, keep_splits=True), total, True))
    finish = swiglu if len(cols) == 2 else lambda out: out
    width = cols[0] if len(cols) == 2 else sum(cols)
    return Case(
        f"products, {rows} rows",
        f"{name} {sum(cols)}x{depth}, {rows} rows",
        make,
        lambda *inputs: finish(cublas(*inputs)),
        providers,
        (sum(cols) * depth + rows * (depth + width)) * random.dtype.itemsize,
        least_speedup=1.0,
    )


def _splits(ours: Callable[..., Any], make: Callable[..., tuple], random: Random) -> bool:
    """Whether this product comes in parts when it may."""
    out = ours(*make(torch.Generator(random.device).manual_seed(0)), keep_splits=True)
    return not isinstance(out[0] if isinstance(out, tuple) else out, Tensor)


def verification_cases(ops: Operations, sizes: Sizes, random: Random) -> Iterator[Case]:
    """From logits to the accepted path. The target agrees with a few drafts; its logits are as peaked as a model's."""
    parents, vocab = random.parents(), sizes.vocab
    path = _path(parents[0].tolist())[:5]
    element = random.dtype.itemsize

    def make(generator: torch.Generator) -> tuple:
        logits = random.normal(generator, 1, NODES, vocab, std=8.0)
        tokens = torch.randint(vocab, (1, NODES), generator=generator, device=random.device)
        for node, child in pairwise(path):
            logits[0, node, tokens[0, child]] = 100.0
        return logits, tokens

    def walk(target: Tensor, logits: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        return verification.verify_greedy(F.one_hot(target, vocab).to(logits.dtype), tokens, parents, DEPTH)

    def greedy(verify: Callable[..., Any]) -> Callable[..., Any]:
        return lambda logits, tokens: verify(logits, tokens, parents, DEPTH)

    def one(value: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([value], dtype=dtype, device=random.device)

    params = sampling.SamplingTensors(
        temperature=one(1.0, torch.float32),
        top_k=one(0, torch.int32),
        top_p=one(0.9, torch.float32),
        min_p=one(0.0, torch.float32),
        seed=one(1, torch.int64),
        step=one(1, torch.int64),
    )

    def sampled(verify: Callable[..., Any]) -> Callable[..., Any]:
        return lambda logits, tokens: verify(logits, tokens, parents, DEPTH, params, True)

    lengths, depths = one(1000, torch.int32), torch.zeros_like(parents)
    for node in range(1, NODES):
        depths[:, node] = depths[:, int(parents[0, node])] + 1

    def matched(verify: Callable[..., Any], filtered: bool) -> Callable[..., Any]:
        return lambda logits, tokens: verify(logits, tokens, parents, DEPTH, params, lengths, depths, True, filtered)

    moved = NODES * vocab * element
    name = f"from logits [{NODES}, {vocab}]"
    yield Case(
        "verification",
        f"greedy verification {name}",
        make,
        greedy(verification.verify_greedy),
        [
            Provider("torch", greedy(verification.verify_greedy)),
            Provider("argmax, walk not timed", lambda logits, tokens: logits.argmax(-1), walk),
            _ours(ops, greedy(ops.verify_greedy)),
        ],
        moved,
        12,
    )
    yield Case(
        "verification",
        f"sampled verification, top-p 0.9, {name}",
        make,
        sampled(verification.verify_sampling),
        [Provider("torch", sampled(verification.verify_sampling)), _ours(ops, sampled(ops.verify_sampling))],
        moved,
        40,
    )
    for filters, filtered, aim in (("top-p 0.9", True, 55), ("no filter", False, 25)):
        reference = matched(verification.verify_target_match, filtered)
        yield Case(
            "verification",
            f"target match, {filters}, {name}",
            make,
            reference,
            [Provider("torch", reference), _ours(ops, matched(ops.verify_target_match, filtered))],
            moved,
            aim,
        )


def _path(parents: list[int]) -> list[int]:
    """The nodes from the root to the last one."""
    nodes = [len(parents) - 1]
    while nodes[0]:
        nodes.insert(0, parents[nodes[0]])
    return nodes


def tree_case(ops: Operations, random: Random) -> Case:
    """The best of all candidates of a dynamic tree: scores fall from parent to child, as sums of log-probabilities."""

    def make(generator: torch.Generator) -> tuple:
        scores = torch.zeros(1, 1, device=random.device)
        ancestors = torch.zeros(1, 1, 2, dtype=torch.int64, device=random.device)
        all_scores, slots = [], []
        for level in range(DEPTH):
            nodes, first_slot = scores.shape[1], TOP_K * level
            log_probs = torch.empty(1, nodes, TOP_K, device=random.device).exponential_(generator=generator).neg()
            tokens = torch.zeros(1, nodes * TOP_K, dtype=torch.int64, device=random.device)
            grown = tree_decoding.expand_beam(scores, log_probs, tokens, ancestors, first_slot, TOP_K)
            all_scores.append(grown.child_scores)
            slots.append(grown.chosen + TOP_K * (1 + first_slot - nodes))
            scores, ancestors = grown.scores, grown.ancestors
        scores = torch.cat(all_scores, 1)
        tokens = torch.randint(32000, scores.shape, generator=generator, device=random.device)
        return tokens[:, 0].contiguous(), tokens, scores, torch.cat(slots[:-1], 1), NODES, TOP_K

    return Case(
        "tree",
        f"build_tree, {NODES} nodes",
        make,
        tree_decoding.build_tree,
        [Provider("torch", tree_decoding.build_tree), _ours(ops, ops.build_tree)],
        TOP_K * (1 + TOP_K * (DEPTH - 1)) * 12 + NODES * 24,
        10,
    )


def commit_case(ops: Operations, sizes: Sizes, random: Random) -> Case:
    """The accepted path of a tree moves together, in every layer."""
    path = random.int32(0, 1, 4, 9, 15, 22, 31, 44, 59)[None]
    count, keys = path.shape[1], 512 if random.device.type == "cuda" else 64
    lengths, accepted = random.int32(keys), random.int32(count - 1)
    source = keys + path[0].long()
    target = keys + torch.arange(count, device=random.device)

    def make(generator: torch.Generator) -> tuple:
        capacity = capacity_bucket(keys + NODES)
        return (random.normal(generator, sizes.layers, 2, 1, sizes.kv_heads, capacity, sizes.width),)

    def kept(_: Any, cache: Tensor) -> Tensor:
        return cache[:, :, :, :, keys : keys + count]

    def call(commit: Callable[..., None], cache: Tensor) -> None:
        commit(cache, lengths, path, accepted)

    def expected(cache: Tensor) -> Tensor:
        call(kv_cache.commit, cache)
        return kept(None, cache)

    def index_copy(cache: Tensor) -> None:
        cache.index_copy_(4, target, cache.index_select(4, source))

    rows = count * sizes.layers * 2 * sizes.kv_heads
    return Case(
        "cache",
        f"commit, {count} rows over {sizes.layers} layers",
        make,
        expected,
        [Provider("index_select, index_copy", index_copy, kept), _ours(ops, partial(call, ops.commit), kept)],
        2 * rows * sizes.width * random.dtype.itemsize,
        6,
    )


def topk_case(ops: Operations, sizes: Sizes, random: Random) -> Case:
    """The children of a beam. Of equal logits torch may take any, so logits are compared, not tokens."""

    def make(generator: torch.Generator) -> tuple:
        return (random.normal(generator, TOP_K, sizes.draft_vocab, std=2.0),)

    def values(out: tuple[Tensor, Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
        return out[0].float(), logits.gather(1, out[1]).float()

    def expected(logits: Tensor) -> tuple[Tensor, Tensor]:
        return values(tree_decoding.topk(logits, TOP_K), logits)

    return Case(
        "tree",
        f"log-softmax, top {TOP_K} of [{TOP_K}, {sizes.draft_vocab}]",
        make,
        expected,
        [
            Provider("log_softmax, topk", lambda logits: logits.float().log_softmax(-1).topk(TOP_K), values),
            Provider("topk, logsumexp", _topk_logsumexp, values),
            _ours(ops, lambda logits: ops.topk(logits, TOP_K), values),
        ],
        TOP_K * sizes.draft_vocab * random.dtype.itemsize,
        8,
    )


def _topk_logsumexp(logits: Tensor) -> tuple[Tensor, Tensor]:
    best, tokens = logits.topk(TOP_K)
    return best.float() - logits.float().logsumexp(-1, keepdim=True), tokens


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
            _ours(ops, lambda x, weight, residual: ops.add_rms_norm(x, residual, weight, eps)),
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
            _ours(ops, lambda tokens, table, weight: ops.embed_rms_norm(tokens, table, weight, eps)),
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

    yield Case(
        "layers",
        f"rotary_append, {NODES} nodes",
        rotary_inputs,
        lambda *inputs: written(rotate(layers.rotary_append, *inputs), *inputs),
        [
            Provider("torch", partial(rotate, layers.rotary_append), written),
            _ours(ops, partial(rotate, ops.rotary_append), written),
        ],
        2 * NODES * (sizes.heads + 2 * sizes.kv_heads) * width * element,
    )
    yield Case(
        "layers",
        f"swiglu [{NODES}, {sizes.inner}]",
        lambda generator: tuple(random.normal(generator, NODES, sizes.inner) for _ in range(2)),
        layers.swiglu,
        [Provider("silu, mul", lambda gate, up: F.silu(gate) * up), _ours(ops, ops.swiglu)],
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
        [Provider("sigmoid, mul", lambda x, gate: x * torch.sigmoid(gate)), _ours(ops, ops.gate_heads)],
        3 * NODES * sizes.heads * width * element,
    )


def linear_inputs(
    sizes: LinearSizes, random: Random, generator: torch.Generator, batch: int, count: int
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


def linear_cases(ops: Operations, sizes: LinearSizes, random: Random, batch: int, nodes: int) -> Iterator[Case]:
    """A linear layer between its products, over the nodes of a tree or only its root: convolution, delta rule, norm."""
    heads, value_heads, width, element = sizes.heads, sizes.value_heads, sizes.width, random.dtype.itemsize
    name = f"{nodes} nodes, HV {value_heads}, batch {batch}"
    parents = torch.arange(-1, nodes - 1, device=random.device) * 5 // 7  # of 60 nodes the deepest lie at DEPTH
    matrix = tree_decoding._ancestor_closure(parents[None].int())
    ancestors, depth = attention.pack_ancestors(matrix).repeat(batch, 1, 1), int(matrix.sum(-1).max()) - 1
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

    yield Case(
        "gated delta",
        f"causal_conv, {name}",
        conv_inputs,
        lambda *inputs: with_rows(convolve(gated_delta.causal_conv, *inputs), *inputs),
        [
            Provider("torch", partial(convolve, gated_delta.causal_conv), with_rows),
            _ours(ops, partial(convolve, ops.causal_conv), with_rows),
        ],
        (3 * rows + 3 * batch + 4) * sizes.channels * element,
    )

    def tree_inputs(generator: torch.Generator) -> tuple:
        gates = torch.empty(batch, nodes, 2, value_heads, device=random.device)
        return *linear_inputs(sizes, random, generator, batch, nodes), gates

    def answer(tree: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return tree(*inputs[:6], ancestors, depth, gates=inputs[6])

    def with_gates(answers: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return answers, inputs[6]

    yield Case(
        "gated delta",
        f"delta_tree, {name}",
        tree_inputs,
        lambda *inputs: with_gates(answer(gated_delta.delta_tree, *inputs), *inputs),
        [
            Provider("torch", partial(answer, gated_delta.delta_tree), with_gates),
            _ours(ops, partial(answer, ops.delta_tree), with_gates),
        ],
        batch * values * width * 4 + rows * ((sizes.channels + values) * element + 2 * value_heads * 4),
        15 if (batch, nodes, value_heads) == (1, NODES, 32) else None,
    )

    def norm_inputs(generator: torch.Generator) -> tuple:
        x, z = random.normal(generator, batch, nodes, value_heads, width), random.normal(generator, *x_shape)
        return x, z, random.normal(generator, width)

    x_shape = batch, nodes, heads, values // heads
    yield Case(
        "gated delta",
        f"gated_norm, {name}",
        norm_inputs,
        partial(gated_delta.gated_norm, eps=1e-6),
        [
            Provider("torch", partial(gated_delta.gated_norm, eps=1e-6)),
            _ours(ops, partial(ops.gated_norm, eps=1e-6)),
        ],
        3 * rows * values * element,
    )


def prompt_case(ops: Operations, sizes: LinearSizes, random: Random) -> Case:
    """A part of a prompt. The state moves on in place."""
    values = sizes.value_heads * sizes.width

    def with_state(answers: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return answers, inputs[5]

    return Case(
        "gated delta",
        f"delta_chunk, {sizes.prompt} tokens, HV {sizes.value_heads}",
        lambda generator: linear_inputs(sizes, random, generator, 1, sizes.prompt),
        lambda *inputs: with_state(gated_delta.delta_chunk(*inputs), *inputs),
        [Provider("torch", gated_delta.delta_chunk, with_state), _ours(ops, ops.delta_chunk, with_state)],
        2 * values * sizes.width * 4 + sizes.prompt * (sizes.channels + values) * random.dtype.itemsize,
    )


def states_case(ops: Operations, sizes: LinearSizes, random: Random, batch: int) -> Case:
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

    def expected(*inputs: Tensor) -> tuple[Tensor, ...]:
        call(gated_delta.commit_states, *inputs)
        return kept(None, *inputs)

    return Case(
        "gated delta",
        f"commit_states, {path.shape[1]} tokens over {sizes.layers} layers, batch {batch}",
        make,
        expected,
        [
            Provider("torch", partial(call, gated_delta.commit_states), kept),
            _ours(ops, partial(call, ops.commit_states), kept),
        ],
        sizes.layers * batch * (2 * values * sizes.width * 4 + path.numel() // batch * sizes.channels * 2),
        50 if batch == 1 else None,
    )


def suffix_case(ops: Operations, sizes: Sizes, random: Random, size: int, batch: int, target_us: float | None) -> Case:
    """Drafts from repetition: each sequence ends with a phrase that it and the ring hold several times.

    Nothing in torch does that.
    """
    columns, phrase = (2048, 40) if random.device.type == "cuda" else (256, 20)
    rules = suffix_match.SuffixRules(min_match=2, keep=128)

    def make(generator: torch.Generator) -> tuple:
        def text(*shape: int) -> Tensor:
            return torch.randint(sizes.vocab, shape, generator=generator, device=random.device)

        ring, tokens, phrases = text(size), text(batch, columns), text(batch, phrase)
        places = torch.arange(4 * batch, device=random.device) * (size // (4 * batch))
        steps = torch.arange(phrase, device=random.device)
        ring[(places[:, None] + steps).clamp(max=size - 1)] = phrases.repeat(4, 1)
        tokens[:, :phrase] = phrases
        tokens[:, columns - 1 - phrase // 2 : columns - 1] = phrases[:, : phrase // 2]
        lengths = torch.full((batch,), columns - 2, dtype=torch.int32, device=random.device)
        ring[-1] = suffix_match.END
        return tokens, lengths, suffix_match.TokenRing(ring.int(), random.int32(size // 3)), 16, rules

    return Case(
        "suffix",
        f"suffix_drafts, {batch} sequences, ring of {size}",
        make,
        suffix_match.suffix_drafts,
        [_ours(ops, ops.suffix_drafts)],
        size * 4,
        target_us,
    )


def _name(ops: Operations) -> str:
    return "triton" if ops.kernels else "reference"


def _ours(ops: Operations, call: Callable[..., Any], finish: Callable[..., Any] = lambda out, *_: out) -> Provider:
    return Provider(_name(ops), call, finish, ours=True)


def text(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    headers = ("", "provider", "p20 us", "median", "p80", "GB/s", "x best torch", "target us", "met")
    keys = ("provider", "us_p20", "us_median", "us_p80", "gb_per_second", "speedup", "target_us", "target_met")
    previous, cells = None, []
    for row in rows:
        cells.append(["" if row["case"] == previous else row["case"], *(row[key] for key in keys)])
        previous = row["case"]
    return table(headers, cells)
