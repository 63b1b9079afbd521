"""Kinds of modules and tensors: which a kernel may read, which are sharded, and which are called as modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

PROJECTIONS = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "fc"),
        *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj"),
        *("qkv_proj", "gate_up_proj", "g_proj", "w1", "w2", "w3", "in_proj", "c_fc", "c_proj"),
        *("input_linear", "output_linear", "dense", "fc1", "fc2"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "a_proj", "b_proj"),
        *("per_layer_model_projection", "per_layer_input_gate", "per_layer_projection"),
        *("pre_projection", "post_projection", "centroids"),
    }
)
"""Modules that may have any class. One that is not a plain linear layer is called, and its inside is not read."""

TENSOR_PARALLEL = "transformers.distributed.tensor_parallel"
"""The module of the forwards that exchange a sharded module's parts. The engine exchanges them itself."""


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module only multiplies by its weight."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight = getattr(module, "weight", None)  # compressed-tensors may take it away
    return weight is not None and is_plain_tensor(weight)


def is_sharded_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix product, and this process holds a part of it."""
    return type(module) is nn.Linear and is_sharded_tensor(getattr(module, "weight", None))


def is_sharded_tensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, shared by processes."""
    return any(base.__name__ == "DTensor" for base in type(tensor).__mro__)


@torch.no_grad()
def local_part(tensor: Any) -> Tensor:
    """The part of a sharded tensor that this process holds; it shares the storage."""
    return tensor.to_local()


def stored_tensors(tensor: Any) -> Iterator[Tensor]:
    """The tensors of a parameter in this process: itself, or the plain tensors inside a subclass. A parameter of
    bitsandbytes has its scales beside itself, in its state."""
    if is_sharded_tensor(tensor):
        yield from stored_tensors(local_part(tensor))
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from stored_tensors(getattr(tensor, name))
    elif tensor is not None:
        yield tensor
        yield from _state_of(tensor)


def _state_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors of bitsandbytes' `quant_state`: scales, table, and the parts of eight-bit scales."""
    state = getattr(tensor, "quant_state", None)
    nested = getattr(state, "state2", None)
    parts = ((state, ("absmax", "code", "offset")), (nested, ("absmax", "code")))
    for holder, names in parts:
        for name in names:
            if isinstance(part := getattr(holder, name, None), Tensor):
                yield part


def is_tensor_parallel_forward(forward: Callable | None) -> bool:
    """Whether this is a forward that transformers sets on an instance to shard a model by a tp_plan."""
    return getattr(forward, "__module__", None) == TENSOR_PARALLEL


def is_mixture(module: nn.Module) -> bool:
    """Whether a module is a mixture of experts. families/reading/experts.py says which are read."""
    return has_experts(module) and not is_decoder_layer(module)


def has_experts(module: nn.Module) -> bool:
    """Whether a module is a mixture of experts, or a layer that has its parts."""
    return hasattr(module, "experts") and (hasattr(module, "gate") or hasattr(module, "router"))


def is_decoder_layer(module: nn.Module) -> bool:
    """Whether a module is a layer with attention. Gemma 4's have router and experts beside their MLP."""
    return hasattr(module, "self_attn")


def is_plain_tensor(tensor: Tensor) -> bool:
    """Whether a kernel may read a tensor by its address: it is not quantised, sharded or wrapped otherwise."""
    return type(tensor.data) is Tensor
