"""gpt-oss as published: the weights of its experts stay in MXFP4.

transformers would load them in 16 bits, or in the layout of a kernel on a GPU with the package kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, GenerationConfig

NAMES = ("gate_up_proj", "down_proj")
METHOD = "mxfp4"


class Mxfp4Experts(nn.Module):
    """The experts of a layer of gpt-oss, with the tensors of its checkpoint.

    NAME_blocks uint8 [E, N, K / 32, 16]: two numbers of e2m1 in a byte, the first in its low half. NAME_scales uint8
    [E, N, K / 32]: the power of two of 32 numbers, plus 127. NAME_bias [E, N]. The forward is transformers'; it runs
    over weights in 16 or 32 bits that exist only during the call.
    """

    is_transposed, is_concatenated, has_bias = False, False, True
    _dense: Any  # transformers' module on the meta device: its code runs here; not a submodule

    def __init__(self, experts: Any) -> None:
        """experts: transformers' module; only its biases and code are used."""
        super().__init__()
        self.config, self.alpha, self.limit = experts.config, experts.alpha, experts.limit
        self.num_experts = experts.num_experts
        for name in NAMES:
            count, depth, rows = getattr(experts, name).shape
            blocks = torch.empty(count, rows, depth // 32, 16, dtype=torch.uint8, device="meta")
            self.register_parameter(f"{name}_blocks", nn.Parameter(blocks, requires_grad=False))
            self.register_parameter(f"{name}_scales", nn.Parameter(blocks[..., 0].clone(), requires_grad=False))
            self.register_parameter(f"{name}_bias", getattr(experts, f"{name}_bias"))
        self.__dict__["_dense"] = experts.to("meta")

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return self._dense._apply_gate(gate_up)

    def dequantised(self, name: str) -> Tensor:
        """The weights of a projection in transformers' layout, [E, K, N], in the dtype of the biases."""
        blocks, scales = getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales")
        count, rows, groups, _ = blocks.shape
        out = getattr(self, f"{name}_bias").new_empty(count, 32 * groups, rows)
        byte = torch.arange(256, dtype=torch.int16, device=blocks.device)
        numbers = torch.stack((byte & 15, byte >> 4), -1)  # of each byte
        table = (((numbers & 7) << 6) | ((numbers & 8) << 12)).view(torch.bfloat16) * 2.0**126
        few = (part.split(4) for part in (out, blocks, scales))  # experts at a time, to save memory
        for place, pairs, exponents in zip(*few, strict=True):
            powers = (exponents.to(torch.int16) << 7).clamp(min=64).view(torch.bfloat16)
            found = nn.functional.embedding(pairs.int(), table).flatten(-2) * powers[..., None]
            place.copy_(found.flatten(2).mT)
        return out

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        weights = {name: self.dequantised(name) for name in NAMES}
        biases = {f"{name}_bias": getattr(self, f"{name}_bias") for name in NAMES}
        return functional_call(self._dense, {**weights, **biases}, args, kwargs)


def is_mxfp4(config: Any) -> bool:
    """Whether this is the configuration of a gpt-oss with experts in MXFP4."""
    stored = getattr(config, "quantization_config", None)
    method = stored.get("quant_method") if isinstance(stored, Mapping) else getattr(stored, "quant_method", None)
    return config.model_type == "gpt_oss" and method == METHOD


def read_mxfp4(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """The model in a folder of safetensors, and the report of `from_pretrained` on its tensors.

    Raises FileNotFoundError without safetensors, ValueError for numbers in another dtype.
    """
    from accelerate import init_empty_weights  # slow to import

    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no model*.safetensors in {str(folder)!r}")
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for layer in model.model.layers:
        layer.mlp.experts = Mxfp4Experts(layer.mlp.experts)
    expected = model.state_dict()
    stored: set[str] = set()
    mismatched = []
    for file in files:
        tensors = load_file(file, device=str(device))
        stored |= tensors.keys()
        for name, tensor in tensors.items():
            if name in expected and expected[name].dtype == torch.uint8 != tensor.dtype:
                raise ValueError(f"{str(file)!r}: {name} must be uint8, got {tensor.dtype}")
        mismatched += [
            (name, tuple(tensor.shape))
            for name, tensor in tensors.items()
            if name in expected and tensor.shape != expected[name].shape
        ]
        fitting = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
            if name in expected and tensor.shape == expected[name].shape
        }
        model.load_state_dict(fitting, strict=False, assign=True)
    model.tie_weights()
    stored |= {name for name, source in model.all_tied_weights_keys.items() if source in stored}
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    missing = expected.keys() - stored
    if not missing and not mismatched:
        model.to(device)  # the buffers
    return model, {"missing_keys": missing, "unexpected_keys": stored - expected.keys(), "mismatched_keys": mismatched}
