"""Finds hooks, replaced forwards and replaced weights, which the engine would ignore.

The engine reads a model's parts once. This module checks them then, and again for every batch, before its first token
is chosen. Weights may change in place. Everything that replaces or wraps them is found and named.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat, zip_longest
from operator import methodcaller
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_post_hook

from eagle_triton.engine.model.module_kinds import (
    PROJECTIONS,
    is_decoder_layer,
    is_mixture,
    is_plain_linear,
    is_sharded_linear,
    is_tensor_parallel_forward,
    stored_tensors,
)

SOURCES = ("transformers.", "torch.", "eagle_triton.", "eagle.", "eagle_llm.", "liger_kernel.")
"""Packages with layers that their weights and configuration define. An EaModel's own package counts, too."""

OF_LAYERS = (*SOURCES, "peft.", "torchao.", "bitsandbytes.", "gptqmodel.", "compressed_tensors.")
"""Packages with layers that compute the same as long as their tensors and plain attributes are the same."""

HARMLESS_HOOKS = (
    "eagle_triton.",
    "transformers.utils.output_capturing",  # records outputs when a caller asks for them
    "transformers.modeling_utils",  # lets gradients reach the inputs
    "compressed_tensors.compressors",  # decompresses the model; families/reading/quantised.py reads compressed weights
)

GROWING_TABLES = frozenset({"cos_cached", "sin_cached"})  # rotary modules replace them by longer ones
LONGROPE_TABLES = frozenset({"inv_freq"})  # of the last text's length; the engine reads original_inv_freq

CONFIG_FIELDS = (
    *("num_hidden_layers", "layer_types", "sliding_window", "_attn_implementation", "pretraining_tp"),
    *("logits_scaling", "final_logit_softcapping", "attn_logit_softcapping", "rope_parameters", "top_k_experts"),
    *("is_causal", "attention_chunk_size", "kv_sharing_modes", "clip_qkv"),
    *("layer_rope_theta", "mup_enabled", "output_multiplier", "rope_interleave"),
)
"""Fields of a configuration that the forwards of any family read each time they run."""

METHODS = ("forward", "__call__", "expand_kv")  # the last of latent attention
"""Methods of modules that a model's forward runs."""

MODULE_FIELDS = {
    *("is_causal", "head_dim", "num_key_value_groups", "layer_idx", "sliding_window", "is_sliding", "rope_type"),
    *("num_heads", "num_key_value_heads", "hidden_size", "pretraining_tp", "attention_type"),  # for SafeAILab's models
    *("layer_type", "is_kv_shared_layer", "store_full_length_kv", "enable_moe_block", "hidden_size_per_layer_input"),
    *("first_kv_shared_layer_idx", "max_norm", "use_rope", "is_local_attention", "with_scale", "has_bias"),
    *("gate_per_head", "is_attention_layer", "use_expert_bias", "allow_neg_eigval"),
    *("n_groups", "ssm_state_size", "intermediate_size", "conv_dim", "conv_kernel_size", "time_step_limit"),  # Mamba-2
    *("group_size", "activation", "block_type", "has_experts"),
    *("embedding_multiplier", "residual_multiplier", "act_fn", "logit_scale", "use_parallel_residual"),
    *("top_k", "norm_topk_prob", "num_group", "topk_group", "num_experts"),  # routers of mixtures
}
"""Module attributes that forwards read on every call. Floats, such as a scaling, are watched without being listed."""

DROPOUTS = ("attention_dropout", "residual_dropout", "embedding_dropout")
"""Module attributes: the rates of dropout that forwards apply in training mode."""

READ_ONCE = "embed_scale"
"""A buffer that is read as a number."""

DECOMPRESSED = (
    "the own forward of a compressed model puts compressed-tensors' offloading around every layer (load the model "
    "again and optimise it before its first call; a checkpoint of compressed-tensors may also be loaded with "
    "CompressedTensorsConfig(dequantize=True))"
)

PACKED_FOR_A_CPU = (
    "was packed for this CPU by its own forward, which a call of the original runs (load the model again and optimise "
    "it before its first call)"
)

TREE_SIZES = ("total_tokens", "total_token")
"""An attribute of modules with a `top_k` for their trees, which may change between generations."""


def modules_read(root: nn.Module, path: str, also: Collection[nn.Module] = ()) -> Iterator[tuple[str, nn.Module, bool]]:
    """Every module below `root`, with its dotted path, and whether it is called as a module instead of being read.

    also: projections that are not plain linear layers but are read, and mixtures of experts that are read. Modules
    beside a `language_model` are for images, and prompts with images run the original.
    """
    yield path, root, False
    sees = "language_model" in root._modules
    for name, child in root._modules.items():
        if child is None or (sees and name != "language_model"):
            continue
        read = is_plain_linear(child) or is_sharded_linear(child) or child in also
        beside = name in ("router", "experts") and is_decoder_layer(root)
        if (name in PROJECTIONS and not read) or (is_mixture(child) and child not in also) or beside:
            yield f"{path}.{name}", child, True
        else:
            yield from modules_read(child, f"{path}.{name}", also)


def is_decompressed(module: nn.Module) -> bool:
    """Whether compressed-tensors keeps a module's tensors in its own cache, which it does after a model's own forward
    has decompressed it."""
    return type(module._parameters).__module__.startswith("compressed_tensors.")


def interference(root: nn.Module, path: str) -> str | None:
    """A sentence about the first thing below `root` that changes what its modules compute; None: there is none."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "torch has global forward hooks, which would not run"
    if replaced := _replaced_attention(getattr(root, "config", None)):
        return f"{replaced}, which would not run"
    own = type(root).__module__.rpartition(".")[0] if hasattr(root, "ea_layer") else ""
    for where, module, called in modules_read(root, path):
        if hook := _hook(module):
            return f"{where} has {hook}, which would not run"
        if hasattr(module, "_orig_mod"):
            return f"{where} was made by torch.compile, and its compiled forward would not run: pass its _orig_mod"
        if called:
            continue
        if not _is_forward_of(module, vars(module).get("forward")):
            return f"{where}.forward was replaced on this instance, and the replacement would not run"
        if "expand_kv" in vars(module):
            return f"{where}.expand_kv was replaced on this instance, and the replacement would not run"
        for name, method in _methods_of(type(module)).items():
            source = method.__module__ or ""
            if not (f"{source}.".startswith(SOURCES) or (own and f"{source}.".startswith(f"{own}."))):
                return f"{where} is a {type(module).__name__} with a {name} of {source}, which would not run"
    return None


class ModelWatch:
    """Remembers the state of models when they were read, and finds changes."""

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        also: Collection[nn.Module] = (),
        copied: Mapping[str, Tensor] | None = None,
    ):
        """roots: the models, by their names in messages. also: see `modules_read`. copied: tensors, by dotted path,
        that were copied, so that changes in place have no effect."""
        parts = [part for path, root in roots.items() for part in modules_read(root, path, also)]
        numbers = {
            f"{path}.{READ_ONCE}": tensor
            for path, module, called in parts
            if not called and (tensor := module._buffers.get(READ_ONCE)) is not None
        }
        copies = {**(copied or {}), **numbers}
        self._copied = [(path, tensor, _version(tensor)) for path, tensor in copies.items()]
        self._read = [_Part.of(path, module) for path, module, called in parts if not called]
        self._called = [(path, module) for path, module, called in parts if called]
        owners = [part for part in self._read if part.config is not None]
        configs = {id(part.config): (f"{part.path}.config", part.config) for part in reversed(owners)}
        self._configs = [(path, config, _fields(config)) for path, config in configs.values()]
        rates = [("p",) if isinstance(part.module, nn.Dropout) else DROPOUTS for part in self._read]
        self._with_dropout = [
            (part, name)
            for part, names in zip(self._read, rates, strict=True)
            for name in names
            if part.constants.get(name)
        ]
        self._fast_facts = _FastFacts(self._read, [module for _, module in self._called])
        self._optimizer_steps, self._stop_counting = _count_optimizer_steps(self)
        self._as_read = self._facts()
        self._checked = self._fast_facts.tensors, self._fast_facts.addresses

    def close(self) -> None:
        """Count steps of optimizers no longer. May be called again."""
        self._stop_counting()

    def change(self) -> str | None:
        """A sentence about the first part that was replaced, moved, cast or hooked, or that has active dropout; None:
        there is none."""
        for part, name in self._with_dropout:
            if part.module.training:
                return f"{part.path} is in training mode with {name}, which would not run: call model.eval()"
        for _, config, _ in self._configs:
            if replaced := _replaced_attention(config):
                return f"{replaced}, which would not run"
        for path, tensor, version in self._copied:
            if _version(tensor) != version:
                return f"{path} was changed in place, but the engine reads a copy of it"
        now = self._facts()
        if now != self._as_read:
            if change := self._first_change():
                return change
            self._as_read = now  # the change is harmless
        self._checked = self._fast_facts.tensors, self._fast_facts.addresses
        return None

    def moved(self) -> bool:
        """Whether memory that the last `change` accepted lies elsewhere now. It takes a tenth of the time of `change`.
        It does not see replaced tensors: their memory is not freed, because it is remembered here."""
        tensors, addresses = self._checked
        return [*map(Tensor.data_ptr, tensors)] != addresses

    def _facts(self) -> list[Any]:
        """Everything that `_first_change` compares, collected fast, because this comes before each first token."""
        hooks = bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
        return [hooks, *(_fields(config) for _, config, _ in self._configs), *self._fast_facts.facts()]

    def _first_change(self) -> str | None:
        """`change`, compared part by part, without the dropout."""
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
        """The projections that are called as modules, with their dotted paths."""
        return [(path, module) for path, module in self._called if path.rpartition(".")[2] in PROJECTIONS]

    def called_state(self) -> list[Any]:
        """The visible state of modules that are called: addresses of weights, and plain values such as an adapter's
        name or scale.

        A graph that was captured with another state is stale.
        """
        modules = [part for _, module in self._called for part in module.modules()]
        return [(id(part), _addresses(part), _values(vars(part))) for part in modules]

    def runs_each_time(self) -> str | None:
        """A sentence about the first called module with a hook or active dropout inside; None: there is none. A graph
        would run these only when it is captured."""
        for path, module in self._called:
            for part in module.modules():
                if hook := _hook(part):
                    return f"{path} is called, and has {hook} inside"
                if part.training and isinstance(part, nn.modules.dropout._DropoutNd) and part.p:
                    return f"{path} is called, and has active dropout inside"
        return None

    def unknown_code(self) -> str | None:
        """A sentence about the first called module with a forward of an unknown package, which may compute something
        else than before although `called_state` is the same; None: there is none."""
        for path, module in self._called:
            for part in module.modules():
                own = vars(part).get("forward")
                if own is None or is_tensor_parallel_forward(own):
                    own = type(part).forward
                if not is_code_of(getattr(own, "__func__", own), OF_LAYERS):
                    return f"{path} is called, and {type(part).__name__} inside is not known"
        return None

    def versions(self) -> int | None:
        """A number that grows with every change in place of the tensors that the last `change` saw; None: some tensor
        does not count its changes.

        It misses changes that torch does not count (`weight.data.copy_`). Fused optimizers do not count theirs either,
        so each step of any optimizer counts.
        """
        called = [part for _, module in self._called for part in module.modules()]
        own = [tensor for part in called for tensor in (*part._parameters.values(), *part._buffers.values())]
        try:
            changes = sum(part._version for part in (*self._fast_facts.tensors, *_stored(own)))
            return changes + self._optimizer_steps[0]
        except RuntimeError:  # an inference tensor
            return None


class _FastFacts:
    """Collects the state of many modules in few calls.

    read: modules that are read. called: modules that are called; only their hooks count. tensors, addresses: the
    storage of all parameters and buffers of the modules that are read, from the last `facts`.
    """

    def __init__(self, read: Sequence[_Part], called: Sequence[nn.Module]):
        self._modules = [part.module for part in read]
        self._own = [module.__dict__ for module in self._modules]
        self._called = [module.__dict__ for module in called]
        constants = [(own, name) for own, part in zip(self._own, read, strict=True) for name in part.constants]
        self._holders, self._names = [own for own, _ in constants], [name for _, name in constants]
        self.tensors: list[Tensor] = []
        self.addresses: list[int] = []

    def facts(self) -> Iterator[Any]:
        """Values that change if a module is replaced, moved, cast or hooked, or gets another forward or
        configuration."""
        named = [*_each_filled(self._own, "_parameters"), *_each_filled(self._own, "_buffers")]
        self.tensors = _stored([*chain.from_iterable(map(_VALUES, named))])
        yield [*chain.from_iterable(named)]  # names
        self.addresses = [*map(Tensor.data_ptr, self.tensors)]
        yield self.addresses
        yield [*map(Tensor.stride, self.tensors)]
        yield [*map(id, chain.from_iterable(map(_VALUES, _each_filled(self._own, "_modules"))))]
        yield [*map(dict.get, self._holders, self._names)]
        yield [*map(id, _each(self._own, "config"))]
        yield [*_each(self._own, "forward"), *_each(self._own, "expand_kv")]
        classes = list[Any](map(type, self._modules))
        yield classes
        yield {kind: _methods_of(kind) for kind in {*classes}}
        for owners in (self._own, self._called):
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                yield [*chain.from_iterable(_each_filled(owners, name))]  # the hooks' numbers, which are unique


_VALUES = methodcaller("values")  # not all are of dict: see is_decompressed


def _each(holders: Sequence[dict[str, Any]], name: str) -> Iterator[Any]:
    """The value of `name` in each dictionary."""
    return map(dict.get, holders, repeat(name))


def _each_filled(holders: Sequence[dict[str, Any]], name: str) -> Iterator[dict[Any, Any]]:
    """The same, without empty dictionaries."""
    return filter(None, _each(holders, name))


def _stored(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """`stored_tensors` of several tensors, with a fast path for plain ones."""
    if {*map(type, tensors)} <= {Tensor, nn.Parameter, type(None)}:
        return [tensor for tensor in tensors if tensor is not None]
    return [stored for tensor in tensors for stored in stored_tensors(tensor)]


def _methods_of(kind: type) -> dict[str, Any]:
    """The METHODS of a class."""
    return {name: method for name in METHODS if (method := getattr(kind, name, None)) is not None}


@dataclass(frozen=True)
class _Part:
    """A module, as it was when it was read. constants: its floats, such as a norm's eps, and its MODULE_FIELDS."""

    path: str
    module: nn.Module
    children: list[nn.Module | None]
    tensors: list[tuple[str, int, tuple[int, ...]]]
    constants: dict[str, Any]
    config: Any
    own_forward: Callable | None
    methods: dict[str, Callable]  # of its class

    @staticmethod
    def of(path: str, module: nn.Module) -> _Part:
        values = vars(module)
        watched = MODULE_FIELDS - {"top_k"} if any(hasattr(module, name) for name in TREE_SIZES) else MODULE_FIELDS
        constants = {k: value for k, value in values.items() if type(value) is float or k in watched}
        children, config, own = [*module._modules.values()], values.get("config"), values.get("forward")
        methods = _methods_of(type(module))
        return _Part(path, module, children, _addresses(module), constants, config, own, methods)

    def change(self) -> str | None:
        module = self.module
        own = vars(module)
        if is_decompressed(module):
            return f"{self.path} was decompressed: {DECOMPRESSED}"
        if [*module._modules.values()] != self.children:
            new = next((name for name, child in module._modules.items() if child not in self.children), None)
            return f"a module in {self.path} was removed" if new is None else f"{self.path}.{new} was replaced"
        if (tensors := _addresses(module)) != self.tensors:
            pairs = zip_longest(tensors, self.tensors, fillvalue=("",))
            name = next(new[0] or old[0] for new, old in pairs if new != old)
            state = getattr(module._parameters.get(name), "quant_state", None)
            if getattr(state, "packing_format_for_cpu", False):
                return f"{self.path}.{name} {PACKED_FOR_A_CPU}"
            return f"{self.path}.{name} was replaced, moved or cast"
        for name, value in self.constants.items():
            if own.get(name) != value:
                return f"{self.path}.{name} was changed from {value} to {own.get(name)}"
        if own.get("config") is not self.config:
            return f"{self.path}.config was replaced"
        forward = own.get("forward")
        if forward is not self.own_forward and not _is_forward_of(module, forward):
            return f"{self.path}.forward was replaced"
        for name, method in _methods_of(type(module)).items():
            if method is not self.methods.get(name) or (name == "expand_kv" and name in own):
                return f"{self.path}.{name} was replaced"
        if (module._forward_hooks or module._forward_pre_hooks) and (hook := _hook(module)):
            return f"{self.path} has got {hook}, which would not run"
        return None


def _count_optimizer_steps(watch: ModelWatch) -> tuple[list[int], Callable[[], object]]:
    """The number of steps of torch's optimizers from now on, and what ends the counting, as the watch's end does."""
    steps = [0]

    def count(*_: Any) -> None:
        steps[0] += 1

    hook = register_optimizer_step_post_hook(count)
    return steps, weakref.finalize(watch, hook.remove)


def _version(tensor: Tensor) -> int:
    """The number of changes in place, which inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _fields(config: Any) -> tuple[Any, ...]:
    """The values of CONFIG_FIELDS; lists are copied."""
    values = (getattr(config, name, None) for name in CONFIG_FIELDS)
    return tuple(value.copy() if isinstance(value, (list, dict)) else value for value in values)


def _addresses(module: nn.Module) -> list[tuple[str, int, tuple[int, ...]]]:
    """Names, addresses and strides of the storage of a module's own parameters and buffers, but for those that its own
    forward replaces."""
    replaced = LONGROPE_TABLES if vars(module).get("rope_type") == "longrope" else GROWING_TABLES
    return [
        (name, stored.data_ptr(), stored.stride())
        for own in (module._parameters, module._buffers)
        for name, tensor in own.items()
        if tensor is not None and name not in replaced
        for stored in stored_tensors(tensor)
    ]


def _hook(module: nn.Module) -> str | None:
    """The kind of the module's first hook that a forward would run and that could change something."""
    for kind, hooks in (("forward hook", module._forward_hooks), ("forward pre-hook", module._forward_pre_hooks)):
        if any(not (getattr(hook, "__module__", None) or "").startswith(HARMLESS_HOOKS) for hook in hooks.values()):
            return f"a {kind}"
    return None


def is_code_of(function: Any, packages: tuple[str, ...]) -> bool:
    """Whether a function, and all that it wraps, is code of these packages. Wrappers take over the names of what they
    wrap."""
    while function is not None:
        source = getattr(function, "__globals__", {}).get("__name__", "")
        if not f"{source}.".startswith((*packages, "contextlib.", "functools.")):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _replaced_attention(config: Any) -> str | None:
    """A sentence about transformers' functions for a configuration's kind of attention, if one was replaced in their
    public registries."""
    kind = getattr(config, "_attn_implementation", None)
    for home, name in (
        ("modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
        ("masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
    ):
        function = getattr(sys.modules.get(f"transformers.{home}"), name, {}).get(kind)
        if function is not None and not is_code_of(function, ("transformers.", "torch.")):
            return f'{name}["{kind}"] of transformers was replaced by {getattr(function, "__qualname__", function)}'
    return None


def _is_forward_of(module: nn.Module, forward: Callable | None) -> bool:
    """Whether an instance's forward changes nothing: it is None, the class's own (some code sets this), ours, or
    transformers' wrapper of a sharded module."""
    bound = getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward
    ours = bound or is_tensor_parallel_forward(forward)
    return forward is None or ours or (getattr(forward, "__module__", None) or "").startswith("eagle_triton.")


def _values(values: Mapping[str, Any]) -> str:
    """Plain values as text; tensors and functions by their identity."""
    return repr({name: value if _is_plain(value) else id(value) for name, value in values.items()})


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    return value is None or isinstance(value, (bool, int, float, str))
