"""Models of published shapes with random weights: as slow as real ones, with almost no accepted drafts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from .ea_model import EaModel
from .head_loading import borrow_embedding
from .heads import DraftConfig, Eagle1Head, Eagle3Head
from .mtp import MTPHead, new_unit


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **others: int) -> dict[str, int]:
    return dict(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **others,
    )


SHAPES: dict[str, dict[str, int]] = {
    "tiny": _sizes(64, 128, 8, 4, 2, vocab_size=512, draft_vocab_size=128),
    "llama-3.2-1b": _sizes(2048, 8192, 16, 32, 8, vocab_size=128256, draft_vocab_size=32000),
    "llama-3.2-3b": _sizes(3072, 8192, 28, 24, 8, vocab_size=128256, draft_vocab_size=32000),
    "llama-3.1-8b": _sizes(4096, 14336, 32, 32, 8, vocab_size=128256, draft_vocab_size=32000),
    "llama-3.3-70b": _sizes(8192, 28672, 80, 64, 8, vocab_size=128256, draft_vocab_size=32000),
    "qwen3-0.6b": _sizes(1024, 3072, 28, 16, 8, vocab_size=151936, draft_vocab_size=32000, head_dim=128),
    "qwen3-32b": _sizes(5120, 25600, 64, 64, 8, vocab_size=151936, draft_vocab_size=32000, head_dim=128),
}
"""Dense targets: Qwen3's if named so, otherwise Llama's; and the size of their heads' draft vocabulary."""

HYBRIDS: dict[str, dict[str, int]] = {
    "tiny": _sizes(
        64,
        128,
        4,
        4,
        2,
        vocab_size=512,
        head_dim=32,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
    "qwen3.5-4b": _sizes(2560, 9216, 32, 16, 4, vocab_size=248320, head_dim=256, linear_num_value_heads=32),
    "qwen3.5-9b": _sizes(4096, 12288, 32, 16, 4, vocab_size=248320, head_dim=256, linear_num_value_heads=32),
    "qwen3.5-27b": _sizes(5120, 17408, 64, 24, 4, vocab_size=248320, head_dim=256, linear_num_value_heads=48),
}
"""Sizes of Qwen3.5. Other fields keep the defaults of its configuration class."""


def random_hybrid(
    shape: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    std: float = 0.02,
    seed: int = 0,
) -> tuple[nn.Module, MTPHead]:
    """A Qwen3.5 of a shape in HYBRIDS and a multi-token-prediction layer for it, with random weights.

    Raises ValueError for an unknown shape, ImportError if transformers has no Qwen3.5.
    """
    if shape not in HYBRIDS:
        raise ValueError(f"shape must be one of {', '.join(HYBRIDS)}, got {shape!r}")
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    config = Qwen3_5TextConfig(
        **HYBRIDS[shape], rope_parameters=rope, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config)
    rotary = type(model.model.rotary_emb)(config=config)
    model = model.to(dtype).to_empty(device=device)
    model.model.rotary_emb = rotary.to(device)
    head = MTPHead([new_unit(model)]).to(dtype).to_empty(device=device)
    for module in (model, head):
        _randomise(module, std)
        for name, parameter in module.named_parameters():
            if "norm" in name and "linear_attn" not in name:
                nn.init.zeros_(parameter)  # zero-centred
            elif name.endswith("A_log"):
                nn.init.uniform_(parameter, -4.0, 2.0)
    return model.eval(), head.eval()


def random_model(
    shape: str,
    eagle3: bool = True,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    std: float = 0.02,
    seed: int = 0,
    ranks: int = 1,
    **tree: Any,
) -> EaModel:
    """An EaModel of a shape in SHAPES, every matrix drawn from N(0, std), no tokenizer; `tree`: the head's arguments.

    ranks: number of torchrun processes; each makes its part of the target (tensor parallelism) and the whole head.
    Raises ValueError for an unknown shape.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    sizes = dict(SHAPES[shape])
    draft_vocab = sizes.pop("draft_vocab_size") if eagle3 else sizes["vocab_size"]
    sizes.pop("draft_vocab_size", None)
    common = dict(sizes, rope_theta=500000.0, rms_norm_eps=1e-5, max_position_embeddings=131072)
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta" if ranks > 1 else device):
            if shape.startswith("qwen3"):
                base = Qwen3ForCausalLM(Qwen3Config(**common, bos_token_id=None, eos_token_id=None))
            else:
                base = LlamaForCausalLM(LlamaConfig(**common, bos_token_id=None, eos_token_id=None))
        if ranks > 1:
            base = _spread(base, ranks, device)
        with torch.device(device):
            config = DraftConfig.from_dict(dict(common, draft_vocab_size=draft_vocab, num_hidden_layers=1, bias=False))
            head = (Eagle3Head if eagle3 else Eagle1Head)(config, **tree)
    finally:
        torch.set_default_dtype(default)
    _randomise(base, std)
    _randomise(head, std)
    borrow_embedding(head, base)
    if eagle3 and head.d2t is not None:
        kept = torch.randperm(sizes["vocab_size"])[:draft_vocab].sort().values
        head.d2t = (kept - torch.arange(draft_vocab)).to(device)
    return EaModel(base, head, base_model_name_or_path=shape).eval()


def _spread(model: Any, ranks: int, device: torch.device | str) -> Any:
    """Spread a model on the meta device over processes by its tp_plan, and allocate this process's part."""
    from transformers.distributed import DistributedConfig

    config, _, mesh = type(model).prepare_distribute_model(DistributedConfig(tp_size=ranks))
    rotary = type(model.model.rotary_emb)(config=model.config)
    model = type(model).maybe_distribute_model(model, config, mesh).to_empty(device=device)
    model.model.rotary_emb = rotary.to(device)
    return model


def _randomise(module: nn.Module, std: float) -> None:
    for parameter in module.parameters():
        with torch.no_grad():
            part: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            part.normal_(0, std) if parameter.dim() > 1 else part.fill_(1)
