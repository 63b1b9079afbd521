"""Tiny EaModels of eagle-llm and of SafeAILab/EAGLE, with random weights, built as their own loaders build them."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import nn

TARGETS = {"llama": "Llama", "mixtral": "Mixtral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
SIZES = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6)
LENGTHS = (1, 2, 63, 64, 65, 500, *range(3, 31, 2))  # prompt tokens of the 20 prompts that are compared


def eagle_llm(name: str) -> Any:
    """A module of the installed eagle-llm."""
    return pytest.importorskip(f"eagle.model.{name}", exc_type=ImportError)


def safeailab(name: str) -> Any:
    """A module of the checkout at EAGLE_SRC, under a name of its own: both packages call themselves `eagle`."""
    if "EAGLE_SRC" not in os.environ:
        pytest.skip("EAGLE_SRC does not point to a checkout of SafeAILab/EAGLE")
    package = sys.modules.setdefault("safeailab_eagle", types.ModuleType("safeailab_eagle"))
    package.__path__ = [os.path.join(os.environ["EAGLE_SRC"], "eagle")]
    return importlib.import_module(f"safeailab_eagle.model.{name}")


def build_eagle_llm(
    vocab: int = 64, eos: int | None = None, seed: int = 0, positions: int = 1024, target: str = "llama"
) -> nn.Module:
    """eagle-llm's EaModel in fp32."""
    package, family = eagle_llm("ea_model"), eagle_llm(f"modeling_{target}_kv")
    torch.manual_seed(seed)
    base = getattr(family, f"{TARGETS[target]}ForCausalLM")(_config(target, vocab, 8, positions))
    with tempfile.TemporaryDirectory() as folder:
        _write(folder, base, vocab, eos, dict(num_hidden_layers=1), positions)
        model = package.EaModel(base, folder, f"{folder}/head.json")
    _randomise(model)
    return model.eval()


def build_safeailab(
    target: str = "llama",
    eagle3: bool = True,
    tree: tuple[int, int, int] = (60, 7, 10),
    vocab: int = 64,
    eos: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    rope_scaling: dict[str, Any] | None = None,
) -> nn.Module:
    """SafeAILab's EaModel; tree: total_token, depth, top_k."""
    package, family = safeailab("ea_model"), safeailab(f"modeling_{target}_kv")
    torch.manual_seed(seed)
    config = _config(target, vocab, 8 if eagle3 else 4, 1024, rope_scaling=rope_scaling)
    torch.set_default_dtype(dtype)
    try:
        base = getattr(family, f"{TARGETS[target]}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(torch.float32)
    head = dict(num_hidden_layers=1, draft_vocab_size=vocab)
    if eagle3:
        head |= dict(draft_vocab_size=vocab * 3 // 4, num_key_value_heads=SIZES["num_attention_heads"])
    with tempfile.TemporaryDirectory() as folder:
        _write(folder, base, vocab, eos, head, 1024)
        model = package.EaModel(eagle3, base, folder, f"{folder}/head.json", *tree, 1.0, {})
    _randomise(model)
    return model.eval()


def _config(target: str, vocab: int, layers: int, positions: int, **more: Any) -> Any:
    config = getattr(transformers, f"{TARGETS[target]}Config")(
        vocab_size=vocab, num_hidden_layers=layers, max_position_embeddings=positions, bos_token_id=None,
        eos_token_id=None, pad_token_id=0, tie_word_embeddings=False, **SIZES, **more,
    )  # fmt: skip
    if target == "llama":
        config.pretraining_tp = 1
    if target == "mixtral":
        config.num_local_experts, config.num_experts_per_tok, config.head_dim = 4, 2, 16
    return config


def _write(folder: str, base: nn.Module, vocab: int, eos: int | None, head: dict[str, Any], positions: int) -> None:
    """What the constructors of EaModel read from disk."""
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    special = {} if eos is None else {"eos_token": f"t{eos}"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", **special).save_pretrained(folder)
    base.config.save_pretrained(folder)
    name = "model.embed_tokens.weight"
    save_file({name: base.model.embed_tokens.weight.data.clone()}, f"{folder}/model.safetensors")
    with open(f"{folder}/model.safetensors.index.json", "w") as file:
        json.dump({"weight_map": {name: "model.safetensors"}}, file)
    common = dict(vocab_size=vocab, max_position_embeddings=positions, hidden_act="silu", bias=False, pad_token_id=0)
    with open(f"{folder}/head.json", "w") as file:
        json.dump({**SIZES, **common, "model_type": "llama", "rope_scaling": None, "pretraining_tp": 1, **head}, file)


def _randomise(model: nn.Module) -> None:
    """Weights with which the head is right about half of the time: both see little but the last token's embedding."""
    base, head = model.base_model, model.ea_layer
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.15) if parameter.dim() > 1 else parameter.data.fill_(1.0)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
            parameter.data.mul_(0.05)
    embedding, width = base.model.embed_tokens.weight.data.normal_(), SIZES["hidden_size"]
    head.embed_tokens.weight.data.copy_(embedding)
    if not hasattr(head, "midlayer"):
        head.fc.weight.data.mul_(0.2)[:, :width] += torch.eye(width)
        return
    count = head.lm_head.out_features
    kept = torch.randperm(len(embedding))[:count].sort().values
    head.d2t.copy_(kept - torch.arange(count))
    head.lm_head.weight.data.copy_(base.lm_head.weight.data[kept])
    head.fc.weight.data.mul_(0.03)
    attention = head.midlayer.self_attn  # each token attends to itself, and passes its embedding on
    attention.k_proj.weight.data.mul_(4)
    attention.q_proj.weight.data.copy_(attention.k_proj.weight.data)
    for projection in (attention.v_proj, attention.o_proj):
        projection.weight.data.mul_(0.1)[:, :width] += torch.eye(width)


@functools.cache
def prompts(vocab: int = 64) -> list[torch.Tensor]:
    """20 prompts [1, L] of the lengths in LENGTHS."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (1, length), generator=generator) for length in LENGTHS]


def run(steps: Iterator[torch.Tensor], prompt: torch.Tensor) -> tuple[list[int], list[int]]:
    """The tokens that an `ea_generate` came to, and the accepted drafts of each step by how the sequence grew."""
    lengths, sequence = [prompt.shape[1]], prompt
    for sequence in steps:
        lengths.append(sequence.shape[1])
    return sequence[0].tolist(), [after - before - 1 for before, after in itertools.pairwise(lengths)]
