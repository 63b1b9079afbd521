"""Tiny random Qwen3.5 and Qwen3-Next, whose gated delta nets are heard, and checkpoints with MTP layers for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from eagle_triton.models.mtp import new_unit
from tests.tiny import ENDLESS, SIZES

CLASSES = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
}
KINDS = tuple(kind for kind, names in CLASSES.items() if hasattr(transformers, names[1]))  # from 4.57 and 5.2 on
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)


def tiny_hybrid(kind: str, vocab: int = 24, layers: int = 4, seed: int = 2, **sizes: Any) -> Any:
    """In fp32 on the CPU: every fourth layer is attention. Raises AttributeError where transformers has no such one."""
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[kind])
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    options: dict[str, Any] = dict(
        **SIZES,
        **ENDLESS,
        vocab_size=vocab,
        num_hidden_layers=layers,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        max_position_embeddings=2048,
        rope_parameters=rope if kind == "qwen3_next" else rope | {"mrope_section": [2, 1, 1]},
    )
    if transformers.__version__.startswith("4."):
        del options["rope_parameters"], rope["rope_type"]
        options |= rope
    if kind == "qwen3_5_moe":
        del options["intermediate_size"]
    torch.manual_seed(seed)
    model = model_class(config_class(**options | ({} if kind == "qwen3_5" else EXPERTS) | sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "conv1d" in name:
                parameter.copy_(0.4 * torch.randn_like(parameter))
            elif "dt_bias" in name:
                parameter.copy_(torch.randn_like(parameter) - 2)
            elif parameter.dim() > 1:
                parameter.mul_(5)
    return model


QWEN = {
    "token_norm": "mtp.pre_fc_norm_embedding", "hidden_norm": "mtp.pre_fc_norm_hidden", "fc": "mtp.fc",
    "norm": "mtp.norm", "layer": "mtp.layers.{}",
}  # fmt: skip
DEEPSEEK = {
    "token_norm": "model.layers.{}.enorm", "hidden_norm": "model.layers.{}.hnorm", "fc": "model.layers.{}.eh_proj",
    "norm": "model.layers.{}.shared_head.norm", "layer": "model.layers.{}",
}  # fmt: skip
MIMO = {
    "token_norm": "model.mtp_layers.{}.token_layernorm", "hidden_norm": "model.mtp_layers.{}.hidden_layernorm",
    "fc": "model.mtp_layers.{}.input_proj", "norm": "model.mtp_layers.{}.final_layernorm",
    "layer": "model.mtp_layers.{}",
}  # fmt: skip


def mtp_tensors(
    model: nn.Module,
    names: dict[str, str],
    first: int = 0,
    layers: int = 1,
    seed: int = 1,
    mixture: bool | None = None,
) -> dict:
    """Random MTP layers of `model` by the names that a family's checkpoints have. mixture: with experts or without."""
    torch.manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for number in range(first, first + layers):
        for name, tensor in new_unit(model, mixture=mixture).state_dict().items():
            part, _, rest = name.partition(".")
            spread = 0.2 if tensor.dim() == 1 else 0.15
            value = torch.randn(tensor.shape) * spread + (tensor.dim() == 1 and names is not QWEN)
            tensors.setdefault(f"{names[part].format(number)}.{rest}", value)
    return tensors


def save_with_mtp(model: Any, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of the model and of these tensors beside it."""
    model.save_pretrained(folder)
    save_file(tensors, folder / "mtp.safetensors")
    return folder
