"""What a model computes beside its weights, which the engine would miss: hooks and replaced forwards, now or later.

The engine reads a model's parts once. Its modules are looked at here when that happens, and again before every batch:
weights may change in place, but whatever is put in their place, or around them, is found and named.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

PROJECTIONS = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "fc"),
        *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj"),
        *("qkv_proj", "gate_up_proj"),
    }
)
"""Modules that may be of any class: one that is no plain linear layer is called as it is, its insides are its own."""

SOURCES = ("transformers.", "torch.", "eagle_triton.", "eagle.", "eagle_llm.", "liger_kernel.")
"""Packages whose layers compute what their weights and configuration say; beside that of an EaModel itself."""

HARMLESS_HOOKS = (
    "eagle_triton.",
    "transformers.utils.output_capturing",  # records outputs when a caller asks for them
    "transformers.modeling_utils",  # lets gradients reach the inputs
    "compressed_tensors.compressors",  # decompresses the model; families/reading/float8.py sees to what is compressed
)

TENSOR_PARALLEL = "transformers.distributed.tensor_parallel"
"""Where the forwards come from that exchange what ranks have of a sharded module; the engine does so itself."""

GROWING_TABLES = frozenset({"cos_cached", "sin_cached"})  # of rotary modules that replace them by longer ones


CONFIG_FIELDS = (
    *("num_hidden_layers", "layer_types", "sliding_window", "_attn_implementation", "pretraining_tp"),
    *("logits_scaling", "final_logit_softcapping", "attn_logit_softcapping", "rope_parameters"),
)
"""Fields of a configuration that the forwards of any family read each time they run."""

MODULE_FIELDS = (
    *("is_causal", "head_dim", "num_key_value_groups", "layer_idx", "sliding_window", "rope_type"),
    *("num_heads", "num_key_value_heads", "hidden_size", "pretraining_tp", "attention_type"),  # SafeAILab's read these
)
"""Attributes of modules that their forwards read each time, beside floating-point numbers such as a scaling."""


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix product with its weight and nothing else."""
    return type(module) is nn.Linear and "forward" not in vars(module) and is_plain_tensor(module.weight)


def is_sharded_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix product of which this process holds one part."""
    return type(module) is nn.Linear and is_sharded_tensor(getattr(module, "weight", None))


def is_sharded_tensor(tensor: Any) -> bool:
    """Whether a tensor is spread over processes, which is what DTensor is for."""
    return any(base.__name__ == "DTensor" for base in type(tensor).__mro__)


@torch.no_grad()
def local_part(tensor: Any) -> Tensor:
    """What this process holds of a sharded tensor, by its own storage."""
    return tensor.to_local()


def stored_tensors(tensor: Any) -> Iterator[Tensor]:
    """What this process holds of a parameter: the tensor itself, or the plain ones that a subclass is made of."""
    if is_sharded_tensor(tensor):
        yield from stored_tensors(local_part(tensor))
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from stored_tensors(getattr(tensor, name))
    elif tensor is not None:
        yield tensor


def is_tensor_parallel_forward(forward: Callable | None) -> bool:
    """Whether a forward on an instance is what transformers puts there when it spreads a model by a tp_plan."""
    return getattr(forward, "__module__", None) == TENSOR_PARALLEL


def is_mixture(module: nn.Module) -> bool:
    """Whether a module is a mixture of experts, which is called as it is."""
    return hasattr(module, "experts") and (hasattr(module, "gate") or hasattr(module, "router"))


def is_plain_tensor(tensor: Tensor) -> bool:
    """Whether a kernel may read a tensor by its address: no quantised, sharded or otherwise wrapped one."""
    return type(tensor.data) is Tensor


def modules_read(root: nn.Module, path: str, also: Collection[nn.Module] = ()) -> Iterator[tuple[str, nn.Module, bool]]:
    """Every module below `root` that is read, with its dotted path, and whether it is called as it is instead.

    also: projections that are no plain linear layers and are read all the same. What stands beside a `language_model`
    is for images, and prompts with images run the original.
    """
    yield path, root, False
    sees = "language_model" in root._modules
    for name, child in root._modules.items():
        if child is None or (sees and name != "language_model"):
            continue
        read = is_plain_linear(child) or is_sharded_linear(child) or child in also
        if (name in PROJECTIONS and not read) or is_mixture(child):
            yield f"{path}.{name}", child, True
        else:
            yield from modules_read(child, f"{path}.{name}", also)


def interference(root: nn.Module, path: str) -> str | None:
    """A sentence about the first thing below `root` that changes what its modules compute, None if there is none."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "torch has global forward hooks, which would not run"
    own = type(root).__module__.rpartition(".")[0] if hasattr(root, "ea_layer") else ""
    for where, module, called in modules_read(root, path):
        if hook := _hook(module):
            return f"{where} has {hook}, which would not run"
        if hasattr(module, "_orig_mod"):
            return f"{where} was made by torch.compile, and its compiled forward would not run: give its _orig_mod"
        if called:
            continue
        if not _is_forward_of(module, vars(module).get("forward")):
            return f"{where}.forward was replaced on this instance, which would not run"
        source = type(module).forward.__module__ or ""
        if not (f"{source}.".startswith(SOURCES) or (own and f"{source}.".startswith(f"{own}."))):
            return f"{where} is a {type(module).__name__} with a forward of {source}, which would not run"
    return None


class ModelWatch:
    """Remembers how some models were when they were read."""

    def __init__(self, roots: Mapping[str, nn.Module], also: Collection[nn.Module] = ()):
        """roots: the models by the names that messages call them. also: see `modules_read`."""
        parts = [part for path, root in roots.items() for part in modules_read(root, path, also)]
        self._read = [_Part.of(path, module) for path, module, called in parts if not called]
        self._called = [(path, module) for path, module, called in parts if called]
        owners = [part for part in self._read if part.config is not None]
        configs = {id(part.config): (f"{part.path}.config", part.config) for part in owners}
        self._configs = [(path, config, _fields(config)) for path, config in configs.values()]
        self._with_dropout = [part for part in self._read if part.constants.get("attention_dropout")]
        self._glance = _Glance(self._read, [module for _, module in self._called])
        self._as_read = self._facts()

    def change(self) -> str | None:
        """A sentence about the first part that was replaced, moved or cast, got a hook, or drops out; None if there is
        none."""
        for part in self._with_dropout:
            if part.module.training:
                return f"{part.path} is in training mode with attention_dropout, which would not run: call model.eval()"
        now = self._facts()
        if now == self._as_read:
            return None
        if change := self._look():
            return change
        self._as_read = now  # what has changed is harmless
        return None

    def _facts(self) -> list[Any]:
        """All that `_look` compares, quickly: a batch looks before it begins, and the device waits."""
        hooks = bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
        return [hooks, *(_fields(config) for _, config, _ in self._configs), *self._glance.facts()]

    def _look(self) -> str | None:
        """`change`, part by part."""
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return "torch has got global forward hooks, which would not run"
        for path, config, fields in self._configs:
            for name, old, new in zip(CONFIG_FIELDS, fields, _fields(config), strict=True):
                if old != new:
                    return f"{path}.{name} was changed from {old!r} to {new!r}"
        for part in self._read:
            if change := part.change():
                return change
        for path, module in self._called:
            if hook := _hook(module):
                return f"{path} has got {hook}, which would not run"
        return None

    def called_projections(self) -> list[tuple[str, nn.Module]]:
        """The projections, with their dotted paths, that are called as the modules they are."""
        return [(path, module) for path, module in self._called if not is_mixture(module)]

    def called_state(self) -> list[Any]:
        """What the modules that are called as they are depend on, as far as it can be seen from outside.

        A graph that was captured with another state is stale: addresses of weights, and plain values such as an
        adapter's name or scale.
        """
        modules = [part for _, module in self._called for part in module.modules()]
        return [(id(part), _addresses(part), _values(vars(part))) for part in modules]

    def versions(self) -> int | None:
        """A number that grows with every change in place of a tensor; None if one does not count its changes.

        What goes around torch's count (`weight.data.copy_`) is not in it.
        """
        called = [part for _, module in self._called for part in module.modules()]
        own = [tensor for part in called for tensor in (*part._parameters.values(), *part._buffers.values())]
        try:
            return sum(part._version for part in (*self._glance.tensors(), *_stored(own)))
        except RuntimeError:  # an inference tensor
            return None


class _Glance:
    """Lists of what modules are made of, by few calls for all of them together.

    read: those that are read. called: others, of which only hooks count.
    """

    def __init__(self, read: Sequence[_Part], called: Sequence[nn.Module]):
        self._modules = [part.module for part in read]
        self._own = [module.__dict__ for module in self._modules]
        self._called = [module.__dict__ for module in called]
        constants = [(own, name) for own, part in zip(self._own, read, strict=True) for name in part.constants]
        self._holders, self._names = [own for own, _ in constants], [name for _, name in constants]

    def tensors(self) -> list[Tensor]:
        """What the parameters and buffers of the modules that are read are stored in."""
        return _stored([*chain.from_iterable(map(dict.values, self._of_tensors()))])

    def facts(self) -> Iterator[Any]:
        """What changes when a module is replaced, moved, cast or hooked, or gets another forward or configuration."""
        tensors, classes = self.tensors(), list[Any](map(type, self._modules))
        yield [*chain.from_iterable(self._of_tensors())]  # names
        yield [*map(Tensor.data_ptr, tensors)]
        yield [*map(Tensor.stride, tensors)]
        yield [*map(id, chain.from_iterable(map(dict.values, _each(self._own, "_modules"))))]
        yield [*map(dict.get, self._holders, self._names)]
        yield [*map(id, _each(self._own, "config"))]
        yield [*_each(self._own, "forward")]
        yield classes
        yield {kind: kind.forward for kind in {*classes}}
        for owners in (self._own, self._called):
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                yield [*chain.from_iterable(_each(owners, name))]  # numbers, each given once

    def _of_tensors(self) -> Iterator[dict[str, Tensor | None]]:
        return chain(_each(self._own, "_parameters"), _each(self._own, "_buffers"))


def _each(holders: Sequence[dict[str, Any]], name: str) -> Iterator[Any]:
    """What each of some dictionaries has under a name."""
    return map(dict.get, holders, repeat(name))


def _stored(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """`stored_tensors` of several; most are plain ones."""
    if {*map(type, tensors)} <= {Tensor, nn.Parameter, type(None)}:
        return [tensor for tensor in tensors if tensor is not None]
    return [stored for tensor in tensors for stored in stored_tensors(tensor)]


@dataclass(frozen=True)
class _Part:
    """A module as it was. `constants`: numbers of its own, such as a norm's eps, and its MODULE_FIELDS."""

    path: str
    module: nn.Module
    children: list[nn.Module | None]
    tensors: list[tuple[str, int, tuple[int, ...]]]
    constants: dict[str, Any]
    config: Any
    own_forward: Callable | None
    class_forward: Callable

    @staticmethod
    def of(path: str, module: nn.Module) -> _Part:
        values, of_class = vars(module), type(module).forward
        constants = {k: value for k, value in values.items() if type(value) is float or k in MODULE_FIELDS}
        children, config, own = [*module._modules.values()], values.get("config"), values.get("forward")
        return _Part(path, module, children, _addresses(module), constants, config, own, of_class)

    def change(self) -> str | None:
        module = self.module
        own = vars(module)
        if [*module._modules.values()] != self.children:
            return f"a module in {self.path} was replaced"
        if (tensors := _addresses(module)) != self.tensors:
            name = next(new[0] for new, old in zip_longest(tensors, self.tensors, fillvalue=("",)) if new != old)
            return f"{self.path}.{name} was replaced, moved or cast"
        for name, value in self.constants.items():
            if own.get(name) != value:
                return f"{self.path}.{name} was changed from {value} to {own.get(name)}"
        if own.get("config") is not self.config:
            return f"{self.path}.config was replaced"
        forward = own.get("forward")
        replaced = forward is not self.own_forward and not _is_forward_of(module, forward)
        if replaced or type(module).forward is not self.class_forward:
            return f"{self.path}.forward was replaced"
        if (module._forward_hooks or module._forward_pre_hooks) and (hook := _hook(module)):
            return f"{self.path} has got {hook}, which would not run"
        return None


def _fields(config: Any) -> tuple[Any, ...]:
    """The values of CONFIG_FIELDS; a list as a copy, which does not change with it."""
    values = (getattr(config, name, None) for name in CONFIG_FIELDS)
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


def _addresses(module: nn.Module) -> list[tuple[str, int, tuple[int, ...]]]:
    """Names, addresses and strides of what a module's own parameters and buffers are stored in."""
    return [
        (name, stored.data_ptr(), stored.stride())
        for own in (module._parameters, module._buffers)
        for name, tensor in own.items()
        if tensor is not None and name not in GROWING_TABLES
        for stored in stored_tensors(tensor)
    ]


def _hook(module: nn.Module) -> str | None:
    """The kind of the first hook that a forward of the module would run and that could change something."""
    for kind, hooks in (("forward hook", module._forward_hooks), ("forward pre-hook", module._forward_pre_hooks)):
        if any(not (getattr(hook, "__module__", None) or "").startswith(HARMLESS_HOOKS) for hook in hooks.values()):
            return f"a {kind}"
    return None


def _is_forward_of(module: nn.Module, forward: Callable | None) -> bool:
    """Whether a forward on an instance is none, the class's own (which some code leaves there), ours, or what
    transformers puts around a sharded module."""
    bound = getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward
    ours = bound or is_tensor_parallel_forward(forward)
    return forward is None or ours or (getattr(forward, "__module__", None) or "").startswith("eagle_triton.")


def _values(values: Mapping[str, Any]) -> str:
    """Plain values by what they are, tensors and functions by which they are."""
    return repr({name: value if _is_plain(value) else id(value) for name, value in values.items()})


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    return value is None or isinstance(value, (bool, int, float, str))
