"""Models of published shapes with random weights: they cost what real ones cost, and accept almost nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from .ea_model import EaModel
from .head_loading import borrow_embedding
from .heads import DraftConfig, Eagle1Head, Eagle3Head
from .mtp import MTPHead, new_unit

SHAPES: dict[str, dict[str, int]] = {
    "tiny": dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        draft_vocab_size=128,
    ),
    "llama-3.2-1b": dict(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        draft_vocab_size=32000,
    ),
    "llama-3.2-3b": dict(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        vocab_size=128256,
        draft_vocab_size=32000,
    ),
    "llama-3.1-8b": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        draft_vocab_size=32000,
    ),
    "llama-3.3-70b": dict(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        draft_vocab_size=32000,
    ),
    "qwen3-0.6b": dict(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        draft_vocab_size=32000,
    ),
    "qwen3-32b": dict(
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        draft_vocab_size=32000,
    ),
}
"""Dense targets, Qwen3's where they are called so and else Llama's, with the vocabulary that their heads draft from."""


HYBRIDS: dict[str, dict[str, int]] = {
    "tiny": dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        vocab_size=512,
    ),
    "qwen3.5-4b": dict(
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_value_heads=32,
        vocab_size=248320,
    ),
    "qwen3.5-9b": dict(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_value_heads=32,
        vocab_size=248320,
    ),
    "qwen3.5-27b": dict(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_value_heads=48,
        vocab_size=248320,
    ),
}
"""Of Qwen3.5; what is not said is as its configuration class has it."""


def random_hybrid(
    shape: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    std: float = 0.02,
    seed: int = 0,
) -> tuple[nn.Module, MTPHead]:
    """A Qwen3.5 of a shape in HYBRIDS and a multi-token-prediction layer for it, with random weights.

    Raises ValueError for an unknown shape, ImportError where transformers has no Qwen3.5.
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

    ranks: processes of torchrun, each of which makes its part of the target (tensor parallelism) and the whole head.
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
    """A model on the meta device spread over processes by its tp_plan, with room for this one's part."""
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
