"""The sweep of tools/tune_linear.py: candidates of launch settings, compiled in parallel, checked and timed."""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.models.shapes import HYBRIDS, SHAPES
from eagle_triton.ops import linear as products
from eagle_triton.ops.layers import swiglu
from eagle_triton.ops.linear import settings as table
from eagle_triton.ops.linear.settings import MAX_STREAMED, MAX_WIDE, WIDE_TILE, Settings, Streaming, Wide
from eagle_triton.runtime.float8_weight import Float8Weight, quantised
from eagle_triton.runtime.four_bit_weight import FourBitWeight, Packing
from eagle_triton.runtime.overlap import await_inputs, overlapped
from eagle_triton.runtime.row_formats import MAX_PAIRED_ROWS, ProductRows, WordOrdered
from eagle_triton.runtime.split_sums import SplitSums
from tools.tuning.sweep import compile_all, time_graph, write_table

Weight = Tensor | Float8Weight | FourBitWeight


def _plain(weight: Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    if isinstance(weight, FourBitWeight):  # which rounds once, to x's dtype
        weight = weight.dequantised(torch.bfloat16)
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantised(dtype)


class Product(NamedTuple):
    """Weights of `cols` rows each and `depth` columns; `fused`: gate and up with SwiGLU."""

    cols: tuple[int, ...]
    depth: int
    fused: bool = False

    def run(
        self, x: ProductRows, weights: list[Weight], settings: Settings | Streaming | Wide, keep_splits: bool
    ) -> tuple:
        if self.fused:
            return (products.linear_swiglu(x, *weights, settings=settings),)
        return products.linear_stack(x, weights, [None] * len(weights), keep_splits=keep_splits, settings=settings)

    def reference(self, x: Tensor, weights: list[Weight]) -> Tensor:
        out = [F.linear(x.float(), _plain(weight, torch.float32)) for weight in weights]
        return F.silu(out[0]) * out[1] if self.fused else torch.cat(out, dim=-1)


def products_of(shape: str) -> dict[str, Product]:
    """By their names in tools/tune_linear.py: those of a Llama with an EAGLE-3 head, or of a Qwen3.5 with MTP."""
    sizes = (HYBRIDS if shape in HYBRIDS else SHAPES)[shape]
    hidden, heads, kv_heads = (sizes[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    size = sizes.get("head_dim", hidden // heads)
    of_queries = heads * size * (2 if shape in HYBRIDS else 1)  # a gate beside each
    qkv = (of_queries, kv_heads * size, kv_heads * size)
    found = {
        "qkv": Product(qkv, hidden),
        "o": Product((hidden,), heads * size),
        "gate_up": Product((sizes["intermediate_size"],) * 2, hidden, fused=True),
        "down": Product((hidden,), sizes["intermediate_size"]),
        "head": Product((sizes["vocab_size"],), hidden),
        "draft_head": Product((sizes.get("draft_vocab_size", sizes["vocab_size"] // 8),), hidden),
    }
    if shape not in HYBRIDS:
        return {**found, "draft_qkv": Product(qkv, 2 * hidden)}
    value_heads = sizes["linear_num_value_heads"]
    keys, values = _KEY_HEADS * _DELTA_DIM, value_heads * _DELTA_DIM
    found["delta_in"] = Product((2 * keys + values, values, value_heads, value_heads), hidden)
    found["delta_out"] = Product((hidden,), values)
    return {**found, "draft_fc": Product((hidden,), 2 * hidden)}


_KEY_HEADS, _DELTA_DIM = 16, 128  # of every Qwen3.5
_SHARED_MEMORY = 225 * 1024
_MAX_RING = 192 * 1024  # of a program that stores a tile while the next one's operands come
_PAUSES = 60  # programs of the small kernel


def candidates(product: Product, rows: int) -> Iterator[Settings]:
    """Settings that fit shared memory, keep enough bytes in flight and fill the chip."""
    block_m, per_program = table.block_m_of(rows), 2 if product.fused else 1
    for block_n, block_k, splits, stages, swap in itertools.product(
        (32, 64, 128), (64, 128, 256), (1, 2, 4, 8), (3, 4, 6), (False, True)
    ):
        shared = (block_n * per_program + block_m) * block_k * 2 * stages
        tiles = sum(-(-n // block_n) for n in product.cols) // per_program
        steps = product.depth // (splits * block_k)
        resident = min(tiles * splits / 132, _SHARED_MEMORY // shared, 4)
        in_flight = resident * block_n * per_program * block_k * 2 * stages
        if shared > _SHARED_MEMORY or steps < 2 * stages or in_flight < 48 * 1024:
            continue  # does not fit, ends before the pipeline is full, or cannot hide the memory's latency
        if not 112 <= tiles * splits <= (2000 if splits == 1 else 400):
            continue  # an idle chip, or many small programs
        if splits > 1 and (product.fused or tiles >= 300):
            continue
        if (swap and block_n < (128 if block_m >= 64 else 64)) or (block_k == 256 and rows > 16):
            continue  # no warpgroup instruction, or no gain in any sweep so far
        if (stages == 6 and block_k > 64) or (stages == 3 and block_k == 64):
            continue
        yield Settings(block_n, block_k, splits, 4, stages, swap)


def streamed_candidates(product: Product, rows: int) -> Iterator[Streaming]:
    """Rings that fit shared memory, in programs that fill the chip."""
    from eagle_triton.ops.linear.hopper import _block_m

    if rows > MAX_STREAMED:
        return
    per_program, few = 2 if product.fused else 1, rows <= 64
    swap = rows <= 32 or rows > 128  # as measured: the others are as fast at best
    block_m = _block_m(swap, rows)
    for block_n, block_k, splits, (w_stages, x_stages), warps in itertools.product(
        (32, 64, 128, 256),
        (64, 128, 256),
        (1, 2, 3, 4, 5, 6, 8),
        ((2, 2), (3, 3), (4, 3), (4, 4), (5, 3), (5, 4), (6, 4)),
        (4, 8),
    ):
        shared = (block_n * per_program * w_stages + block_m * x_stages) * block_k * 2
        programs = sum(-(-n // block_n) for n in product.cols) // per_program * splits
        least, most = (112, 2000 if splits == 1 else 400) if few else (90, 1200 if splits == 1 else 300)
        if shared > _SHARED_MEMORY or not least <= programs <= most:
            continue
        if splits > 1 and (product.fused or max(product.cols) > 8192):
            continue
        if block_n < 64 and (swap or not few):  # no warpgroup instruction, or too few columns for the loads of x
            continue
        if block_k == 256 and rows > 16:  # x's tiles would be as wide
            continue
        if few and (warps == 8 or (w_stages == 5 and block_k < 256) or block_n == 256 or splits == 8):
            continue
        if not few and (block_k == 128 or w_stages in (2, 6) or shared < _SHARED_MEMORY * 3 // 8):
            continue
        if block_m * block_n * per_program > 144 * 32 * warps or (warps == 8 and max(block_m, block_n) < 128):
            continue  # too many registers, or nothing for the second warpgroup
        yield Streaming(block_n, block_k, splits, swap, w_stages, x_stages, warps)


def wide_candidates(product: Product, rows: int) -> Iterator[Wide]:
    """The same of hopper_many_rows.py, if its kernel can make the product."""
    if WIDE_TILE < rows <= MAX_WIDE and len(product.cols) == 3 and not any(n % WIDE_TILE for n in product.cols):
        yield from itertools.starmap(Wide, ((4, 1), (6, 1), (6, 2), (6, 6)))


def float8_candidates(product: Product, rows: int) -> Iterator[Streaming]:
    """The same for weights of eight bits, which are always the left operand; of few rows x comes as a pair."""
    from eagle_triton.ops.linear import hopper_fp8 as streamed_float8
    from eagle_triton.ops.linear import hopper_fp8_few_rows as paired_float8

    if rows > MAX_PAIRED_ROWS:
        tiles = sum(-(-n // 128) for n in product.cols) * -(-rows // streamed_float8.block_m_of(rows))
        for splits, stages in itertools.product((1, 2, 4), (3, 4, 6)):
            shared = (128 + streamed_float8.block_m_of(rows) * 2) * 64 * stages
            if shared <= _MAX_RING and (splits == 1 or (tiles * splits <= 520 and not product.fused)):
                yield Streaming(128, 128, splits, True, stages, stages, 8)
        return
    per_program, block_m = 2 if product.fused else 1, paired_float8.block_m_of(rows)
    for block_n, splits, stages, warps in itertools.product((64, 128), (1, 2, 3, 4, 5, 6), (3, 4, 6), (4, 8)):
        shared = (block_n * per_program + block_m * 2) * 128 * stages
        shared += 4 * block_m * paired_float8.groups_of(product.depth, splits, block_m)
        programs = sum(-(-n // block_n) for n in product.cols) // per_program * splits
        if shared > _SHARED_MEMORY or not 90 <= programs <= (2000 if splits == 1 else 520):
            continue
        if (splits > 1 and (product.fused or max(product.cols) > 8192)) or (warps == 8 and block_n < 128):
            continue
        if warps == 4 and block_n == 128 and block_m > 16:
            continue  # too many registers
        yield Streaming(block_n, 128, splits, True, stages, stages, warps)


FLOAT8 = ("rows", "blocks")  # of weights of eight bits: what has a scale
FOUR_BITS = {  # kinds of weights of four bits: their packing, columns that share a scale, and whether they have zeros
    "int4": (Packing.ROWS, 128, False),
    "int4_zeros": (Packing.ROWS, 128, True),
    "nf4": (Packing.ROWS_HIGH_FIRST, 64, False),
    "columns": (Packing.COLUMNS, 128, False),
    "marlin": (Packing.MARLIN, 128, False),
}


def four_bit_candidates(product: Product, rows: int) -> Iterator[Streaming]:
    """The same for weights of four bits, which are always the left operand, 128 rows of a weight to a program."""
    per_program, block_m, block_n = 2 if product.fused else 1, table.block_m_of(rows), 128
    for block_k, splits, stages in itertools.product((128, 256), (1, 2, 4), (2, 3, 4, 6, 8)):
        shared = (block_n * per_program // 2 + block_m * 2) * stages * block_k
        programs = sum(-(-n // block_n) for n in product.cols) // per_program * splits
        if shared > _SHARED_MEMORY or not 32 <= programs <= (2000 if splits == 1 else 520):
            continue
        if product.depth % block_k or (splits > 1 and (product.fused or max(product.cols) > 8192)):
            continue
        yield Streaming(block_n, block_k, splits, True, stages, stages)


@triton.jit
def _pause_kernel(zero_ptr, out_ptr, PDL: tl.constexpr):
    """Some loads one after another, as small kernels do."""
    await_inputs(PDL)
    place = tl.load(zero_ptr, volatile=True)
    for _ in range(10):
        place = tl.load(zero_ptr + place, volatile=True)
    tl.store(out_ptr + tl.program_id(0), place)


def pause() -> None:
    """A small kernel that may start early, about 2.8 us on an H200."""
    overlapped(_pause_kernel, (_PAUSES,), _pause_tensors().device)(*_pause_tensors(), num_warps=4)


@functools.cache
def _pause_tensors() -> Tensor:
    return torch.zeros(2, _PAUSES, dtype=torch.int64, device="cuda")


def compile_settings(task: tuple[int, bool, int, Settings | Streaming | Wide, bool, str | None]) -> None:
    """Run one small product."""
    count, fused, rows, settings, keep_splits, kind = task
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tile = (WIDE_TILE, 64, 1) if isinstance(settings, Wide) else (settings.block_n, settings.block_k, settings.splits)
    block_n, block_k, splits = tile
    depth = 4 * block_k * splits
    product = Product((2 * block_n,) * count, depth, fused)
    x = torch.zeros(rows, depth, device=device, dtype=torch.bfloat16)
    weights = [_made(torch.zeros(n, depth, device=device, dtype=torch.bfloat16), kind) for n in product.cols]
    product.run(x, weights, settings, keep_splits)


def make_weights(
    product: Product, device: str, kind: str | None = None, total_bytes: float = 1.2e9
) -> list[list[Weight]]:
    """Distinct sets of weights, `total_bytes` together in 16 bits, two sets at least. kind: of FLOAT8 or FOUR_BITS."""
    sets = max(2, int(total_bytes / (sum(product.cols) * product.depth * 2)))
    return [
        [_made(torch.randn(n, product.depth, device=device, dtype=torch.bfloat16) * 0.02, kind) for n in product.cols]
        for _ in range(sets)
    ]


def _made(weight: Tensor, kind: str | None) -> Weight:
    if kind in FOUR_BITS:
        return _of_four_bits(weight, *FOUR_BITS[kind])
    return weight if kind is None else quantised(weight, block=kind == "blocks")


def _of_four_bits(weight: Tensor, packing: Packing, group: int, with_zeros: bool) -> FourBitWeight:
    """Random words, which any packing takes, in the place of a matrix, and scales that give it about its size."""
    rows, depth = weight.shape
    shapes = {Packing.COLUMNS: (depth // 8, rows), Packing.MARLIN: (depth // 16, 2 * rows)}

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, device=weight.device).int()

    stored = words(*shapes.get(packing, (rows, depth // 8)))
    zero = words(rows // 8, depth // group) if with_zeros else None
    scale = weight.view(rows, depth // group, group)[..., 0].abs() / 4
    if packing is not Packing.ROWS_HIGH_FIRST:
        return FourBitWeight(stored, packing, scale, group, zero)
    numbers = torch.linspace(-4, 4, 16, device=weight.device)
    return FourBitWeight(stored, packing, scale.float(), group, table=numbers)


def tune(
    product: Product,
    rows: int,
    settings: list[Settings | Streaming | Wide],
    keep_splits: bool,
    streamed: bool,
    kind: str | None,
    device: str,
) -> tuple[float, float, list[tuple]]:
    """cuBLAS's µs for one product with concatenated weights, and for each weight alone, with what follows; and (µs,
    settings, relative error) fastest first."""

    def timed(calls: list[Callable[[], object]]) -> float:
        return time_graph([lambda call=call: (pause(), call()) for call in calls] if streamed else calls)

    weights = make_weights(product, device, kind)
    x = torch.randn(rows, product.depth, device=device, dtype=torch.bfloat16)
    expected = product.reference(x, weights[0])
    rows_read = WordOrdered.of(x) if kind in FOUR_BITS and weights[0][0].reads_word_order else x
    plain = [[_plain(weight) for weight in some] for some in weights]
    joined = plain if len(product.cols) == 1 else [[torch.cat(some)] for some in plain]
    blas = [lambda w=w: F.linear(x, w[0]) for w in joined]
    apart = [functools.partial(_apart, product, x, some) for some in plain]
    blas_times, apart_time, found = [timed(blas)], timed(apart), []
    for candidate in settings:
        try:
            out = product.run(rows_read, weights[0], candidate, keep_splits)
            out = torch.cat([y.total() if isinstance(y, SplitSums) else y for y in out], dim=-1)
            error = ((out.float() - expected).norm() / expected.norm()).item()
            if not error < 5e-3:
                raise ArithmeticError(f"relative error {error}")
            calls = [functools.partial(product.run, rows_read, some, candidate, keep_splits) for some in weights]
            found.append((timed(calls), candidate, error))
        except Exception as error:
            print(f"  {candidate} failed: {type(error).__name__}: {str(error)[:100]}", flush=True)
    blas_times.append(timed(blas))
    return min(blas_times), apart_time, sorted(found, key=lambda row: row[0])


def _apart(product: Product, x: Tensor, weights: list[Tensor]) -> Tensor | list[Tensor]:
    """The product as a step makes it with cuBLAS: each weight by itself, then SwiGLU."""
    outs = [F.linear(x, weight) for weight in weights]
    return swiglu(*outs) if product.fused else outs


def settings_now(
    product: Product, rows: int, streamed: bool, kind: str | None = None
) -> list[Settings | Streaming | Wide]:
    """Today's settings, which are to be beaten: of few_rows.py, and of hopper.py or its like."""
    cols, depth, fused = product
    if kind in FOUR_BITS:
        from eagle_triton.ops.linear import hopper_four_bits

        return [hopper_four_bits.settings_for(rows, cols, depth, fused)]
    if kind in FLOAT8:
        from eagle_triton.ops.linear import hopper_fp8 as streamed_float8
        from eagle_triton.ops.linear import hopper_fp8_few_rows as paired_float8

        if rows <= MAX_PAIRED_ROWS:
            return [paired_float8.settings_for(rows, cols, depth, fused)]
        return [streamed_float8.settings_for(rows, cols, depth, kind == "blocks", fused)]
    plain = table.launch_settings(torch.device("cuda"), torch.bfloat16, rows, cols, depth, fused)
    stream = None
    if streamed:
        from eagle_triton.ops.linear import hopper_many_rows as wide
        from eagle_triton.ops.linear.hopper import many_rows_settings, settings_for

        if plain is None:
            stream = wide.settings_for(rows, cols, depth) or many_rows_settings(rows, cols, depth, fused)
        else:
            stream = settings_for(rows, cols, depth, plain.block_n, plain.block_k, plain.splits, fused)
    return [settings for settings in (plain, stream) if settings is not None]


def sweep(args: argparse.Namespace) -> None:
    """Compile, check and time what the options ask for, and print it."""
    kind: str | None = args.float8 or args.four_bits
    args.streamed |= kind is not None
    args.keep_splits |= args.streamed  # they leave split sums to the reader
    started = time.monotonic()
    shape, plan = products_of(args.shape), []
    for rows, name in itertools.product(args.rows, [name for name in args.products if name in shape]):
        product = shape[name]
        if kind is not None:
            some: Iterable[Settings | Streaming | Wide] = (
                four_bit_candidates(product, rows) if kind in FOUR_BITS else float8_candidates(product, rows)
            )
        elif args.streamed:
            some = (*streamed_candidates(product, rows), *wide_candidates(product, rows))
        else:
            some = candidates(product, rows)
        now = settings_now(product, rows, args.streamed, kind)
        plan.append((rows, name, product, list(dict.fromkeys((*some, *now)))))

    def task(rows: int, product: Product, settings: Settings | Streaming | Wide) -> tuple:
        return len(product.cols), product.fused, rows, settings, args.keep_splits, kind

    tasks = (task(rows, product, use) for rows, _, product, some in plan for use in some)
    errors = compile_all(compile_settings, tasks, args.workers)
    records, sums = [], {}
    for rows, name, product, some in plan:
        good = []
        for settings in some:
            error = errors[task(rows, product, settings)]
            if error:
                print(f"  {settings}: {error}", flush=True)
            else:
                good.append(settings)
        blas, apart, found = tune(product, rows, good, args.keep_splits, args.streamed, kind, "cuda")
        size = sum(product.cols) * product.depth * 2
        best = found[0][0]
        total = sums.setdefault(rows, [0.0, 0.0])
        total[0], total[1] = total[0] + blas, total[1] + best
        print(
            f"{rows} rows {name}: cuBLAS {blas:.1f} us {size / blas / 1e6:.2f} TB/s ({apart:.1f} us apart), best "
            f"{best:.1f} us {size / best / 1e6:.2f} TB/s ({time.monotonic() - started:.0f} s)",
            flush=True,
        )
        for us, settings, error in found[: args.top]:
            print(f"    {us:7.2f}  {tuple(settings)}  {error:.1e}", flush=True)
        now = settings_now(product, rows, args.streamed, kind)
        for us, settings, error in found:
            if settings in now:
                print(f"    {us:7.2f}  {tuple(settings)}  {error:.1e}  now", flush=True)
        records += [(rows, name, "cublas", f"{blas:.2f}")]
        records += [(rows, name, " ".join(map(str, settings)), f"{us:.2f}") for us, settings, _ in found]
    for rows, (blas, best) in sums.items():
        print(f"{rows} rows, sum: cuBLAS {blas:.1f} us, best {best:.1f} us, ratio {best / blas:.3f}")
    write_table(args.csv, ("rows", "product", "settings", "us"), records)
