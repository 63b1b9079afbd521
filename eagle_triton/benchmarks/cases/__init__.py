"""The operations that `benchmark.py operations` times: `case.py` defines a case, the other files make them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from eagle_triton.benchmarks.cases.attention import attention_case, commit_case
from eagle_triton.benchmarks.cases.case import NODES, Case, CaseMaker, Sizes
from eagle_triton.benchmarks.cases.experts import MixtureSizes, expert_cases
from eagle_triton.benchmarks.cases.gated_delta import RecurrentSizes, delta_cases, prompt_case, states_case
from eagle_triton.benchmarks.cases.layers import layer_cases
from eagle_triton.benchmarks.cases.products import product_cases
from eagle_triton.benchmarks.cases.trees import best_first_case, suffix_case, topk_case, tree_case
from eagle_triton.benchmarks.cases.verification import verification_cases
from eagle_triton.engine.operations import Operations

LLAMA_8B = Sizes(32, 4096, 14336, 32, 8, 128, 128256, 32000, (512, 2048, 32768))
TOY = Sizes(2, 64, 128, 4, 2, 16, 512, 128, (64, 128))
QWEN3_5_9B, QWEN3_5_27B = RecurrentSizes(24, 16, 32, 128, 512), RecurrentSizes(48, 16, 48, 128, 512)
RECURRENT_TOY = RecurrentSizes(2, 2, 4, 16, 70)
QWEN3_30B_A3B, MIXTURE_TOY = MixtureSizes(128, 8, 2048, 768), MixtureSizes(8, 2, 64, 32)
RINGS = [(10_000, 1, None), (1_000_000, 1, 25), (1_000_000, 8, 32), (1_000_000, 64, 80), (10_000_000, 1, 35)]


def all_cases(ops: Operations, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """All cases that are timed. 16 rows stand for a beam, 64 for a tree."""
    maker = CaseMaker(ops, device, dtype)
    for keys, target_us in zip(sizes.keys, (8, 12, 50), strict=False):
        yield attention_case(maker, sizes, NODES, 1, keys, target_us)
    for batch, target_us in ((8, 9), (32, 24), (64, 44)) if maker.cuda else ((3, 0),):
        yield attention_case(maker, sizes, 1, batch, sizes.keys[0], target_us)
    for rows in (16, 64):
        yield from product_cases(maker, sizes, rows)
    yield from verification_cases(maker, sizes)
    yield tree_case(maker)
    for nodes in (64, 128) if maker.cuda else (16,):
        yield best_first_case(maker, nodes)
    yield commit_case(maker, sizes)
    yield topk_case(maker, sizes)
    yield from layer_cases(maker, sizes)
    for rows in (1, 8, NODES):
        yield from expert_cases(maker, QWEN3_30B_A3B if maker.cuda else MIXTURE_TOY, rows)
    for recurrent in (QWEN3_5_9B, QWEN3_5_27B) if maker.cuda else (RECURRENT_TOY,):
        for batch, nodes in ((1, NODES), (8, NODES), (1, 1), (8, 1)):
            yield from delta_cases(maker, recurrent, batch, nodes)
        yield prompt_case(maker, recurrent)
    for batch in (1, 8):
        yield states_case(maker, QWEN3_5_9B if maker.cuda else RECURRENT_TOY, batch)
    for ring, batch, target in RINGS if maker.cuda else [(2000, 2, None)]:
        yield suffix_case(maker, sizes, ring, batch, target)
