"""Linear layers with weights of four bits, as the packages that publish them hold them in memory."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from eagle_triton.runtime.four_bit_weight import Packing, packed
from tests.float8_models import give_compressed_forward
from tests.test_four_bit_weight import repacked
from tests.tiny import ENDLESS

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of Marlin's zeros in a word
EIGHT = (0, 1, 8, 9, 16, 17, 24, 25)  # of Marlin's biases


def tiny_target(seed: int = 0, layers: int = 3) -> Any:
    """A Llama in fp32 whose projections have whole groups of 64 and tiles of Marlin, and biases in its attention."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        attention_bias=True,
        **ENDLESS,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    return model


def rounded(weight: Tensor, group: int, zeros: bool) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Numbers uint8 [N, K], scales and zeros [N, K / group] of a matrix, and a stand-in for a weight that says what
    they stand for, computed by itself."""
    rows, depth = weight.shape
    parts = weight.detach().float().view(rows, depth // group, group)
    low = parts.amin(-1).clamp(max=0)
    if zeros:
        scale = ((parts.amax(-1).clamp(min=0) - low) / 15).clamp(min=1e-4).to(weight.dtype)
        zero = (-low / scale.float()).round().clamp(0, 15)
    else:
        scale = (parts.abs().amax(-1) / 7.5).to(weight.dtype)
        zero = torch.full_like(low, 8)
    numbers = (parts / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    exact = ((numbers - zero[..., None]) * scale.float()[..., None]).view(rows, depth)
    stands_for = SimpleNamespace(dequantised=lambda dtype: exact.to(dtype))
    return numbers.view(rows, depth).to(torch.uint8), scale, zero.to(torch.uint8), stands_for


def _fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def compressed(weight: Tensor, bias: Tensor | None, group: int = 64, zeros: bool = False) -> Any:
    """compressed-tensors, as transformers loads it by default: with a forward of that package's, without a weight."""
    rows, depth = weight.shape
    numbers, scale, zero, stands_for = rounded(weight, group, zeros)
    module: Any = nn.Linear(depth, rows, bias is not None, device="meta")
    del module.weight
    module.weight_packed, module.weight_scale = _fixed(packed(numbers)), _fixed(scale)
    module.weight_shape = _fixed(torch.tensor([rows, depth], device=weight.device))
    if zeros:
        module.weight_zero_point = _fixed(packed(zero.T.contiguous()).T.contiguous())
    module.bias = None if bias is None else _fixed(bias.detach().clone())
    args = dict(num_bits=4, type="int", symmetric=not zeros, group_size=None if group == depth else group)
    module.quantization_scheme = SimpleNamespace(weights=SimpleNamespace(**args))
    module.quantization_status = "compressed"
    give_compressed_forward(module)
    return module, stands_for


def of_package(name: str) -> Callable[[type], type]:
    """A class as if a package had defined it."""

    def named(kind: type) -> type:
        kind.__module__ = name
        if "forward" in vars(kind):
            vars(kind)["forward"].__module__ = name
        return kind

    return named


class Params4bit(nn.Parameter):
    """By the name of bitsandbytes' parameter."""


@of_package("bitsandbytes.nn.modules")
class Linear4bit(nn.Linear):
    """By the name of bitsandbytes' layer."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("the module was called")


def bitsandbytes(weight: Tensor, bias: Tensor | None, nested: bool = False) -> Any:
    """bitsandbytes: bytes with the high half first, blocks of 64, by a table of 16 numbers."""
    rows, depth = weight.shape
    table = torch.linspace(-1, 1, 16, device=weight.device) ** 3
    blocks = weight.detach().float().view(-1, 64)
    absmax = blocks.abs().amax(-1)
    state = SimpleNamespace(quant_type="nf4", shape=torch.Size([rows, depth]), blocksize=64, code=table)
    state.absmax, state.offset, state.state2 = absmax, None, None
    if nested:
        code = torch.linspace(-1, 1, 256, device=weight.device)
        state.offset = absmax.mean()
        of_scales = (absmax - state.offset).abs().max().expand((len(absmax) + 255) // 256).clone()
        state.absmax = ((absmax - state.offset) / of_scales[0] * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
        state.state2 = SimpleNamespace(code=code, absmax=of_scales, blocksize=256)
        absmax = code[state.absmax.long()] * of_scales[0] + state.offset
    numbers = (blocks / absmax[:, None]).view(-1, 1).sub(table).abs().argmin(-1).to(torch.uint8)
    exact = (table[numbers.long()].view(-1, 64) * absmax[:, None]).view(rows, depth)
    module: Any = Linear4bit(depth, rows, bias is not None, device="meta")
    module.weight = Params4bit((numbers[::2] << 4 | numbers[1::2]).view(-1, 1), requires_grad=False)
    module.weight.quant_state = state
    module.bias = None if bias is None else _fixed(bias.detach().clone())
    return module, SimpleNamespace(dequantised=lambda dtype: exact.to(dtype))


class GPTQQuantLinear(nn.Module):
    """By the name of gptqmodel's base, with all that its layers have in common."""

    bits, desc_act, adapter, format = 4, False, None, None

    def __init__(self, sizes: tuple[int, int], group: int, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features, self.group_size = *sizes, group
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def qzero_format(self) -> int:
        return 2

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("the module was called")


class AWQuantLinear(GPTQQuantLinear):
    """By the name of gptqmodel's other base."""


class TorchLinear(GPTQQuantLinear):
    """With the words of the checkpoint."""


class MarlinLinear(GPTQQuantLinear):
    """In Marlin's order, without zeros."""


class AwqMarlinLinear(AWQuantLinear):
    """In Marlin's order, with zeros."""


class MacheteLinear(GPTQQuantLinear):
    """In an order that is not read."""


for _kind in (GPTQQuantLinear, AWQuantLinear, TorchLinear, MarlinLinear, AwqMarlinLinear, MacheteLinear):
    of_package("gptqmodel.nn_modules.qlinear")(_kind)


def by_columns(weight: Tensor, bias: Tensor | None, group: int = 64) -> Any:
    """GPTQ as gptqmodel's torch and Triton layers hold it."""
    rows, depth = weight.shape
    numbers, scale, zero, stands_for = rounded(weight, group, True)
    module: Any = TorchLinear((rows, depth), group, bias)
    module.register_buffer("qweight", packed(numbers).T.contiguous())
    module.register_buffer("scales", scale.T.contiguous())
    module.register_buffer("qzeros", packed(zero.T.contiguous()))
    module.register_buffer("g_idx", (torch.arange(depth, device=weight.device) // group).to(torch.int32))
    return module, stands_for


def marlin(weight: Tensor, bias: Tensor | None, group: int = 64, zeros: bool = False) -> Any:
    """GPTQ, or AWQ with zeros, as gptqmodel's Marlin layers hold it: word by word, row by row."""
    rows, depth = weight.shape
    numbers, scale, zero, stands_for = rounded(weight, group, zeros)
    if bias is not None:
        bias = bias[[32 * (p // 32) + 2 * (p % 32 // 8) + EIGHT[p % 8] for p in range(rows)]]
    module: Any = (AwqMarlinLinear if zeros else MarlinLinear)((rows, depth), group, bias)
    at = [64 * (p // 64) + p % 64 // 8 + 8 * (p % 8) for p in range(rows)]  # the row whose scale is at p
    module.register_buffer("qweight", repacked(numbers, Packing.MARLIN))
    module.register_buffer("scales", scale[at].T.contiguous())
    empty = torch.empty(0, dtype=torch.int32, device=weight.device)
    places = [at[8 * word + place] for word in range(rows // 8) for place in ORDER]
    module.register_buffer("g_idx", empty)
    module.register_buffer("qzeros", packed(zero[places].T.contiguous()) if zeros else empty)
    return module, stands_for


LAYOUTS: dict[str, Callable[..., Any]] = {
    "compressed-tensors": compressed,
    "compressed-tensors with zeros": lambda weight, bias: compressed(weight, bias, 32, zeros=True),
    "compressed-tensors by row": lambda weight, bias: compressed(weight, bias, weight.shape[1]),
    "bitsandbytes": bitsandbytes,
    "bitsandbytes, nested": lambda weight, bias: bitsandbytes(weight, bias, nested=True),
    "GPTQ": by_columns,
    "GPTQ by Marlin": marlin,
    "AWQ by Marlin": lambda weight, bias: marlin(weight, bias, zeros=True),
}
