"""What a model computes beside its weights, which the engine would miss: hooks and replaced forwards, now or later.

The engine reads a model's parts once. Its modules are looked at here when that happens, and again before every batch:
weights may change in place, but whatever is put in their place, or around them, is found and named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "fc"})
"""Modules that may be of any class: one that is no plain linear layer is called as it is, its insides are its own."""

GROWING_TABLES = frozenset({"cos_cached", "sin_cached"})  # of rotary modules that replace them by longer ones


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix product with its weight and nothing else."""
    return type(module) is nn.Linear and "forward" not in vars(module) and is_plain_tensor(module.weight)


def is_plain_tensor(tensor: Tensor) -> bool:
    """Whether a kernel may read a tensor by its address: no quantised, sharded or otherwise wrapped one."""
    return type(tensor.data) is Tensor


def modules_read(root: nn.Module, path: str) -> Iterator[tuple[str, nn.Module, bool]]:
    """Every module below `root` that is read, with its dotted path, and whether it is called as it is instead."""
    yield path, root, False
    for name, child in root._modules.items():
        if child is None:
            continue
        if name in PROJECTIONS and not is_plain_linear(child):
            yield f"{path}.{name}", child, True
        else:
            yield from modules_read(child, f"{path}.{name}")


def interference(root: nn.Module, path: str) -> str | None:
    """A sentence about the first thing below `root` that changes what its modules compute, None if there is none."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "torch has global forward hooks, which would not run"
    for where, module, called in modules_read(root, path):
        if hook := _hook(module):
            return f"{where} has {hook}, which would not run"
        if not called and not _harmless(vars(module).get("forward")):
            return f"{where}.forward was replaced on this instance, which would not run"
    return None


class ModelWatch:
    """Remembers how some models were when they were read."""

    def __init__(self, roots: Mapping[str, nn.Module]):
        """roots: the models by the names that messages call them."""
        self._roots = dict(roots)
        parts = [part for path, root in roots.items() for part in modules_read(root, path)]
        self._read = [_Part.of(path, module) for path, module, called in parts if not called]
        self._called = [module for _, module, called in parts if called]

    def change(self) -> str | None:
        """A sentence about the first part that was replaced, moved or cast, or got a hook; None if there is none."""
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return "torch has got global forward hooks, which would not run"
        for part in self._read:
            if change := part.change():
                return change
        for module in self._called:
            if _hook(module):
                path = next(path for path, other, _ in self._now() if other is module)
                return f"{path} has got {_hook(module)}, which would not run"
        return None

    def called_state(self) -> list[Any]:
        """What the modules that are called as they are depend on, as far as it can be seen from outside.

        A graph that was captured with another state is stale: addresses of weights, and plain values such as an
        adapter's name or scale.
        """
        modules = [part for module in self._called for part in module.modules()]
        return [
            (id(part), id(vars(part).get("forward")), _addresses(part), _plain_values(vars(part))) for part in modules
        ]

    def _now(self) -> Iterator[tuple[str, nn.Module, bool]]:
        for path, root in self._roots.items():
            yield from modules_read(root, path)


@dataclass(frozen=True)
class _Part:
    """A module as it was."""

    path: str
    module: nn.Module
    children: tuple[nn.Module | None, ...]
    tensors: tuple[tuple[str, int], ...]
    forward: Callable | None

    @staticmethod
    def of(path: str, module: nn.Module) -> _Part:
        children = tuple(module._modules.values())
        return _Part(path, module, children, _addresses(module), vars(module).get("forward"))

    def change(self) -> str | None:
        module = self.module
        if tuple(module._modules.values()) != self.children:
            return f"a module in {self.path} was replaced"
        if (tensors := _addresses(module)) != self.tensors:
            name = next(name for name, _ in {*tensors} ^ {*self.tensors})
            return f"{self.path}.{name} was replaced, moved or cast"
        forward = vars(module).get("forward")
        if forward is not self.forward and not _harmless(forward):
            return f"{self.path}.forward was replaced"
        if (module._forward_hooks or module._forward_pre_hooks) and (hook := _hook(module)):
            return f"{self.path} has got {hook}, which would not run"
        return None


def _addresses(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """Names and addresses of a module's own parameters and buffers."""
    own = (*module._parameters.items(), *module._buffers.items())
    return tuple((name, tensor.data_ptr()) for name, tensor in own if tensor is not None and name not in GROWING_TABLES)


def _hook(module: nn.Module) -> str | None:
    """The kind of the first hook that a forward of the module would run."""
    for kind, hooks in (("forward hook", module._forward_hooks), ("forward pre-hook", module._forward_pre_hooks)):
        if any(not _harmless(hook) for hook in hooks.values()):
            return f"a {kind}"
    return None


def _harmless(function: Callable | None) -> bool:
    """Whether a hook or forward is one of ours, or transformers', which record outputs when a caller asks for them."""
    source = getattr(function, "__module__", None) or ""
    return function is None or source.startswith(("eagle_triton.", "transformers.utils.output_capturing"))


def _plain_values(values: Mapping[str, Any]) -> str:
    return repr({name: value for name, value in values.items() if _is_plain(value)})


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    return value is None or isinstance(value, (bool, int, float, str))
