"""Tiny models whose projections have FP8 weights, in the layouts in which such models are published."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from eagle_triton import optimize_with_triton
from eagle_triton.runtime.float8_weight import Float8Weight, quantised
from tests.tiny import tiny_model


class FP8Linear(nn.Linear):
    """As transformers' module of this name holds its tensors; its forward needs a kernel from the hub."""

    weight_scale_inv: nn.Parameter

    def __init__(self, values: Tensor, scale: Tensor, bias: Tensor | None = None, block: bool = True):
        super().__init__(values.shape[1], values.shape[0], bias is not None, device="meta")
        self.block_size = (128, 128) if block else None
        self.activation_scheme = "dynamic"
        self.weight = nn.Parameter(values, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("the module was called")


class CompressedTensorsFP8Linear(FP8Linear):
    """As transformers holds compressed-tensors FP8: a scale for each row, as a row."""

    def __init__(self, values: Tensor, scale: Tensor, bias: Tensor | None = None):
        super().__init__(values, scale, bias, False)
        del self.block_size
        self.weight_scale = self.weight_scale_inv
        del self.weight_scale_inv


def in_blocks(weight: Tensor, bias: Tensor | None) -> tuple[nn.Module, Float8Weight]:
    """Fine-grained: a scale for each block."""
    found = quantised(weight, block=True)
    return FP8Linear(found.values, found.scale, bias), found


def in_rows(weight: Tensor, bias: Tensor | None) -> tuple[nn.Module, Float8Weight]:
    """compressed-tensors: a scale for each row, [1, N]."""
    found = quantised(weight)
    return CompressedTensorsFP8Linear(found.values, found.scale.view(1, -1), bias), found


def at_once(weight: Tensor, bias: Tensor | None) -> tuple[nn.Module, Float8Weight]:
    """Fine-grained without blocks: one scale, []."""
    scale = weight.detach().abs().max() / 448
    values = (weight.detach() / scale).to(torch.float8_e4m3fn)
    return FP8Linear(values, scale.clone(), bias, False), Float8Weight(values, scale.view(1, 1))


class WrappedWeight(Tensor):
    """A tensor made of two others, as torchao's are. A plain linear layer that has it for a weight raises if called."""

    qdata: Tensor
    scale: Tensor
    block_size: list[int] | None
    rounds = False  # what the layer is given, instead of raising

    @staticmethod
    def __new__(cls: Any, qdata: Tensor, scale: Tensor, block_size: list[int] | None, dtype: torch.dtype) -> Any:
        return Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype, device=qdata.device)

    def __init__(self, qdata: Tensor, scale: Tensor, block_size: list[int] | None, dtype: torch.dtype):
        self.qdata, self.scale, self.block_size = qdata, scale, block_size

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["qdata", "scale"], (self.block_size, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Any:
        return WrappedWeight(inner["qdata"], inner["scale"], *context)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        x, weight, bias = args
        if not weight.rounds:
            raise RuntimeError("the module was called")
        return nn.functional.linear(
            x.to(torch.float8_e4m3fn).to(x.dtype), weight.qdata.to(x.dtype) * weight.scale.to(x.dtype), bias
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):  # views of the same shape
            old = args[0]
            new = type(old)(old.qdata, old.scale, old.block_size, old.dtype)
            return return_and_correct_aliasing(func, args, kwargs, new)
        raise NotImplementedError(func)


class Float8Tensor(WrappedWeight):
    """By the name that torchao's has."""


def as_weight(weight: Tensor, bias: Tensor | None, per: str = "row", kind: Callable[..., Tensor] = Float8Tensor) -> Any:
    """torchao: a plain linear layer whose weight is a tensor of its own, with scales per row, block or tensor."""
    rows, depth = weight.shape
    if per == "tensor":
        scale = (weight.detach().abs().max() / 448).view(1, 1)
        found = Float8Weight((weight.detach() / scale).to(torch.float8_e4m3fn), scale)
    else:
        found = quantised(weight, block=per == "block")
    size = {"row": [1, depth], "block": [128, 128], "tensor": [rows, depth]}[per]
    module = nn.Linear(depth, rows, bias is not None, device="meta")
    module.weight = nn.Parameter(kind(found.values, found.scale, size, weight.dtype), requires_grad=False)
    module.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
    return module, found


def compressed(weight: Tensor, bias: Tensor | None, per: str = "row") -> Any:
    """compressed-tensors as transformers loads it by default: a plain linear layer with a forward of that package's,
    which multiplies once the model's first forward has decompressed the weight."""
    module, found = as_weight(weight, bias, per, lambda *parts: parts[0])
    scale = found.scale.view(1) if per == "tensor" else found.scale
    module.weight_scale = nn.Parameter(scale.clone(), requires_grad=False)
    size = [128, 128] if per == "block" else None
    module.quantization_scheme = SimpleNamespace(weights=SimpleNamespace(block_structure=size))
    module.quantization_status = "compressed"
    give_compressed_forward(module)
    return module, found


def give_compressed_forward(module: nn.Module) -> None:
    """Replace a module's forward as compressed-tensors does, by a function of that package's."""
    home: dict[str, Any] = {"__name__": "compressed_tensors.quantization.lifecycle.forward"}
    exec("def forward(self, x): return type(self).forward(self, x)", home)
    module.forward = home["forward"].__get__(module)


def decompress_at_first(model: nn.Module) -> None:
    """The hook that decompresses such a model."""

    def hook(model: nn.Module, args: Any) -> None:
        for module in model.modules():
            if getattr(module, "quantization_status", None) == "compressed":
                scale = module.weight_scale.view(-1, 1)
                module.weight = nn.Parameter(module.weight.float() * scale, requires_grad=False)
                module.quantization_status = "decompressed"
        handle.remove()

    hook.__module__ = "compressed_tensors.compressors.model_compressors.model_compressor"
    handle = model.register_forward_pre_hook(hook)


LAYOUTS = {
    "blocks": in_blocks,
    "rows": in_rows,
    "one scale": at_once,
    "torchao, rows": as_weight,
    "torchao, one scale": partial(as_weight, per="tensor"),
}


def tiny_target(family: str = "llama", seed: int = 0) -> Any:
    return tiny_model(family, eagle3=False, layers=3, seed=seed).base_model


def plain_tokens(model: Any, prompt: Tensor, new: int = 24) -> Tensor:
    """Greedy tokens of the model's own forward, without a cache."""
    return model.generate(prompt, max_new_tokens=new, do_sample=False, use_cache=False)


def check_same_tokens(model: Any, plain: Any, prompt: Tensor, new: int = 24, **options: Any) -> Any:
    """A model, while it is optimised, gives the greedy tokens of the own forward of `plain`. Returns the originals, for
    their report."""
    expected = plain_tokens(plain, prompt, new)
    with optimize_with_triton(model, **options) as (optimised, originals):
        assert torch.equal(optimised.generate(prompt, max_new_tokens=new, do_sample=False), expected)
    return originals


def note_of(originals: Any, path: str = "activations") -> str:
    return next(entry.reason for entry in originals.report() if entry.path == path)


def replacing(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Any], None]:
    """Replaces a parameter of a module by what `change` makes of a copy; None: by nothing."""

    def apply(module: Any) -> None:
        changed = change(getattr(module, name).detach().clone())
        setattr(module, name, None if changed is None else nn.Parameter(changed, requires_grad=False))

    return apply


def with_bits(value: int) -> Callable[[Tensor], Tensor]:
    """Gives one number of a tensor in FP8 these bits."""

    def change(values: Tensor) -> Tensor:
        values.view(torch.uint8)[3, 5] = value
        return values

    return change


def stored(model: nn.Module) -> dict[str, Tensor]:
    """All numbers of a model: of wrapped weights what they are made of."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        parts = getattr(tensor, "__tensor_flatten__", lambda: ([], None))()[0]
        tensors.update({f"{name}.{part}": getattr(tensor, part) for part in parts} or {name: tensor})
    return tensors


def with_fp8(
    model: Any, layout: Callable[..., Any] = in_blocks, only: tuple[str, ...] = ("_proj",)
) -> tuple[nn.Module, nn.Module]:
    """A copy of a model with FP8 modules in place of its projections whose names end so, and one with their exact
    values in plain ones."""
    ours, plain = copy.deepcopy(model), copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name.endswith(only):
            replaced, weight = layout(module.weight, module.bias)
            ours.set_submodule(name, replaced)
            with torch.no_grad():
                plain.get_submodule(name).weight.copy_(weight.dequantised(module.weight.dtype))
    return ours, plain
