"""Targets of every family over two ranks, run by tests/test_tensor_parallel.py: `... shared_families_script.py FOLDER`.

Each is spread by the plan that transformers has for it, and gives the tokens that transformers gives on one process:
those that have a plan of their own also as they draft and of a long prompt, the others the first few of two layers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.distributed import DistributedConfig

from eagle_triton import (
    EAGLEConfig,
    EAGLEInference,
    TritonConfig,
    UnsupportedModelError,
    load_mtp,
    optimize_with_triton,
)
from eagle_triton.engine.model import mixers, modules
from eagle_triton.families.causal_lm import read_causal_lm
from eagle_triton.models.mtp import MTPHead, new_unit
from eagle_triton.runtime.peer_memory import PeerMemory
from eagle_triton.runtime.split_sums import Product, SharedSums, total_of
from tests.peer_memory_script import memory_in
from tests.tensor_parallel_script import refused
from tests.tiny import generate_row, random_prompt
from tests.tiny_families import (
    CASES,
    NOT_OVER_RANKS,
    SEES_ONLY,
    SIMILAR,
    WITH_IMAGES,
    tiny_family,
    tiny_head,
    tiny_seeing_family,
)
from tests.tiny_hybrids import DEEPSEEK, KINDS, MIMO, QWEN, mtp_tensors, tiny_hybrid

ROWS = torch.cat([2 + random_prompt(21, vocab=22, seed=seed) for seed in range(3)])
LEFT = torch.ones_like(ROWS)
LEFT[1, :6] = LEFT[2, :17] = 0
BATCH: dict[str, Any] = dict(input_ids=ROWS * LEFT, attention_mask=LEFT, pad_token_id=0)
LONG = torch.cat([ROWS.flatten(), ROWS[0, :7]])[None]  # more rows than the operations on experts take
ALONE: dict[str, Any] = dict(input_ids=LONG, attention_mask=torch.ones_like(LONG), pad_token_id=0)
TREE = TritonConfig(topk=2, num_steps=2)
DIVISIBLE = {"gemma4_text": dict(num_global_key_value_heads=2)}  # by two ranks
HEADS = ("phi3", "olmo2", "gemma3_text", "glm4", "mixtral")
WHOLE = (
    *HEADS,
    *("llama yarn", "granite", "granitemoe", "glm4_moe", "gemma2", "gemma4_text", "qwen3_moe", "qwen2_moe"),
    *("dots1", "flex_olmo", "afmoe", "laguna", "starcoder2", "cohere"),
)
"""Cases with a plan of transformers of their own, and those whose parts are exchanged through memory too."""
THROUGH_MEMORY = ("granite", "phi3", "olmo2", "gemma2", "qwen2_moe", "gemma4_text", "laguna", "starcoder2", "cohere")


def generated(model: Any, *asked: dict[str, Any], new: int = 5) -> list[Tensor]:
    """The texts of a padded batch and of one prompt, or of what is asked."""
    return [model.generate(**prompts, max_new_tokens=new, do_sample=False) for prompts in asked or (BATCH, ALONE)]


def small_model() -> Any:
    """A draft for models that cannot draft for themselves."""
    return tiny_family("llama yarn", num_hidden_layers=1)


def saved(folder: Path, name: str, model: Any) -> Path:
    """A checkpoint of a model that all ranks have made, which rank 0 writes."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder / name)
    dist.barrier()
    return folder / name


def unshared(x: Product) -> Tensor:
    """`total_of`, which on a GPU cannot add what ranks have: operations do."""
    assert not isinstance(x, SharedSums)
    return total_of(x)


def tokens_are_the_originals(
    whole: Any,
    path: Path,
    draft: Any | None = None,
    kind: Any = AutoModelForCausalLM,
    asked: tuple[dict[str, Any], ...] = (BATCH, ALONE),
    memory: PeerMemory | None = None,
) -> None:
    """Plainly, and the batch also with a draft if there is one, which is whole on each rank."""
    shared = kind.from_pretrained(saved(path.parent, path.name, whole), tp_plan="auto").eval()
    want = generated(whole, *asked, new=5 if draft else 3)
    ranks = read_causal_lm(shared).ranks
    assert ranks is not None and ranks.size == dist.get_world_size()

    def compare(new: int, drafts: Any | None, config: TritonConfig, *asked: dict[str, Any]) -> None:
        with optimize_with_triton(shared, drafts, config)[1] as originals:
            for expected, found in zip(want, generated(shared, *asked, new=new), strict=False):
                expected = expected[:, : found.shape[1]]
                assert torch.equal(expected, found), f"{path}: {expected.tolist()} and {found.tolist()}"
            row = generate_row(originals)
            assert row.calls == len(asked) and not row.fallbacks, f"{path}: {row}"

    compare(3, None, TritonConfig(), *asked)
    if draft is not None:
        compare(5, draft, TREE, BATCH)
    if memory is not None:
        ranks.peers = memory
        with patch.object(modules, "total_of", unshared), patch.object(mixers, "total_of", unshared):
            compare(3, None, TritonConfig(), *asked)
        ranks.peers = None


def every_family(folder: Path) -> None:
    """Some also exchange parts through memory, instead of gathering them, as on GPUs: here in a file, by the
    references."""
    if dist.get_rank() == 0:
        memory_in(folder, 0, create=True, rows=12, width=64)
    dist.barrier()
    memory = memory_in(folder, dist.get_rank(), rows=12, width=64)
    for case, (kind, options) in CASES.items():
        if not {case, kind}.isdisjoint((*NOT_OVER_RANKS, *SEES_ONLY)):
            continue
        if case in WHOLE:
            whole = tiny_family(case, **DIVISIBLE.get(case, {}))
            draft = tiny_head(whole, True) if case in HEADS else None if case in SIMILAR else whole
            tokens_are_the_originals(whole, folder / case, draft, memory=memory if case in THROUGH_MEMORY else None)
        else:
            few = tiny_family(case, **two_layers(options))
            made = type(few) if kind == "mistral4" else AutoModelForCausalLM  # which does not know it
            tokens_are_the_originals(few, folder / case, kind=made, asked=(BATCH,))
    assert not memory.gave_up() and int(memory.uses[0])


def two_layers(options: dict[str, Any]) -> dict[str, Any]:
    """Of a family, with the first two of its types."""
    kinds = options.get("layer_types")
    return dict(num_hidden_layers=2, **dict(layer_types=kinds[:2]) if kinds else {})


def recurrent_families(folder: Path) -> None:
    for kind in KINDS:  # the others draft with their MTP layers below, and have the same mixers
        draft = small_model() if kind == "qwen3_next" else None
        tokens_are_the_originals(tiny_hybrid(kind), folder / kind, draft)


def families_that_see(folder: Path) -> None:
    """Their plans have longer names; what the layers compute is that of families above."""
    for kind in WITH_IMAGES:
        if f"{kind}_text" not in NOT_OVER_RANKS:
            options = CASES.get(WITH_IMAGES[kind][0], ("", {}))[1]
            few = DIVISIBLE["gemma4_text"] if kind.startswith("gemma4") else two_layers(options)
            whole = tiny_seeing_family(kind, **few)
            tokens_are_the_originals(whole, folder / kind, kind=AutoModelForImageTextToText, asked=(BATCH,))


def ranks_have_their_own_heads_where_outputs_are_gathered(folder: Path) -> None:
    """Of packed projections and of norms of whole rows, which read the product of all ranks."""
    for case in ("phi3", "olmo2"):
        view = read_causal_lm(AutoModelForCausalLM.from_pretrained(folder / case, tp_plan="auto"))
        mixer = view.layers[0].mixer
        assert mixer.cache_shape == (1, 16) and mixer.num_heads == 2  # type: ignore[attr-defined]


def mtp_layers_draft_as_for_one_rank(folder: Path) -> None:
    """Ranks have them whole, read their parts, and accept what one rank accepts."""
    for case, names, first in (("llama yarn", DEEPSEEK, 4), ("olmo2", MIMO, 0), ("qwen3_5", QWEN, 0)):
        whole = tiny_hybrid(case) if case in KINDS else tiny_family(case)
        path = saved(folder, f"{case} with MTP", whole)
        if dist.get_rank() == 0:
            save_file(mtp_tensors(whole, names, first, layers=2), path / "mtp.safetensors")
        dist.barrier()
        shared, results = AutoModelForCausalLM.from_pretrained(path, tp_plan="auto").eval(), []
        for model in (whole, shared):
            config = EAGLEConfig(topk=12, num_steps=2, num_draft_tokens=20, fallback=False)
            eagle = EAGLEInference(load_mtp(model, path), model, config)
            rows, figures = eagle.generate([ROWS[0], ROWS[1, 6:]], 9)
            results.append(([row.tolist() for row in rows], figures.tau))
        assert results[0] == results[1] and results[0][1] > 1, f"{case}: {results}"


def what_is_refused(folder: Path) -> None:
    for kind, reason in NOT_OVER_RANKS.items():
        sees = kind.removesuffix("_text") in WITH_IMAGES
        make, auto = (tiny_seeing_family, AutoModelForImageTextToText) if sees else (tiny_family, AutoModelForCausalLM)
        path = saved(folder, kind, make(kind.removesuffix("_text")))
        with refused((RuntimeError, ValueError), reason):
            optimize_with_triton(auto.from_pretrained(path, tp_plan="auto"))
    experts = DistributedConfig(tp_size=2, ep_size=2)
    with refused(UnsupportedModelError, "model.model.layers.0.mlp.experts", "(ep_plan)", "'moe_tp_experts'"):
        optimize_with_triton(AutoModelForCausalLM.from_pretrained(folder / "mixtral", distributed_config=experts))
    mixture = AutoModelForCausalLM.from_pretrained(folder / "qwen3_5_moe", tp_plan="auto")
    with refused(UnsupportedModelError, "draft.units.0.layer.mlp is a mixture of experts", "(tp_plan)"):
        optimize_with_triton(mixture, MTPHead([new_unit(mixture)]).to_empty(device="cpu"))
    joined = DistributedConfig(tp_size=2, tp_plan={"model.layers.*.self_attn.qkv_proj": "colwise"})
    with refused(UnsupportedModelError, "layers.0.self_attn.qkv_proj", "its style is 'colwise', and must be"):
        optimize_with_triton(AutoModelForCausalLM.from_pretrained(folder / "phi3", distributed_config=joined))


CHECKS = (
    every_family,
    recurrent_families,
    families_that_see,
    ranks_have_their_own_heads_where_outputs_are_gathered,
    mtp_layers_draft_as_for_one_rank,
    what_is_refused,
)


def main(argv: list[str]) -> int:
    dist.init_process_group("gloo")
    folder = Path(argv[0])
    for case in CHECKS:
        case(folder)
    if dist.get_rank() == 0:
        print("every family is shared as it is by one rank", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
