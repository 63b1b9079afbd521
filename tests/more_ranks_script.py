"""As many ranks as torchrun starts decode as one process does: `more_ranks_script.py FOLDER`.

Run by tests/test_tensor_parallel.py. Each rank has one head of keys; biases everywhere show whether one is added twice.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_triton import EaModel, optimize_eagle_with_triton
from eagle_triton.models.heads import DraftConfig, Eagle1Head, Eagle3Head
from tests.tiny import ENDLESS, random_prompt


def save(folder: Path, ranks: int, eagle3: bool, tied: bool) -> None:
    """A tiny pair whose sizes one and three ranks divide."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        hidden_size=96,
        intermediate_size=96,
        num_attention_heads=2 * ranks,
        num_key_value_heads=ranks,
        head_dim=16,
        vocab_size=36,
    )
    config = LlamaConfig(
        **sizes, **ENDLESS, num_hidden_layers=3, attention_bias=True, mlp_bias=True, tie_word_embeddings=tied
    )
    base = LlamaForCausalLM(config).eval()
    features = (0, 1, 2) if eagle3 else None
    head = (Eagle3Head if eagle3 else Eagle1Head)(
        DraftConfig(**sizes, draft_vocab_size=36, feature_layers=features), total_token=30, depth=2, top_k=9
    )
    for parameter in (*base.parameters(), *head.parameters()):
        parameter.data.normal_(0, 0.15)
    EaModel(base, head).save_pretrained(folder)


def main(argv: list[str]) -> int:
    """Compare tokens and accepted lengths. An exception ends all ranks."""
    dist.init_process_group("gloo")
    ranks, accepted, shared = dist.get_world_size(), 0, 0
    for eagle3, tied in ((True, True), (False, False)):
        folder = Path(argv[0]) / f"{eagle3}-{tied}"
        if dist.get_rank() == 0:
            save(folder, ranks, eagle3, tied)
        dist.barrier()
        results = []
        for options in ({}, {"tp_plan": "auto"}):
            model = EaModel.from_pretrained(str(folder), use_eagle3=eagle3, **options)
            shared += any(hasattr(weight, "to_local") for weight in model.base_model.parameters())
            with optimize_eagle_with_triton(model):
                got = [model.eagenerate(random_prompt(9), max_new_tokens=16)]
                got.append(torch.tensor(model.accept_lengths))
                got.append(model.generate(random_prompt(9), max_new_tokens=8, do_sample=True, seed=3))
                accepted += int(got[1].sum())
            results.append(got)
        for expected, found in zip(*results, strict=True):
            assert torch.equal(expected, found), (eagle3, tied, expected.tolist(), found.tolist())
    assert accepted, "no draft was accepted"
    assert shared == (0 if ranks == 1 else 2), "one rank has the target whole, others share it"
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{ranks} ranks decode as one", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
