"""Reading models that transformers has spread over ranks: `from_pretrained(..., tp_plan="auto")`.

Each parameter is a DTensor then. A rank holds one part of it, and each module's forward is replaced by one that
exchanges what the plan says. The engine reads the parts and exchanges by itself, so the plan must be the one that it
knows, and every part must be what the plan's style makes of the whole.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from eagle_triton.engine.drafts.eagle import EagleDraft
from eagle_triton.engine.model.mixers import Attention
from eagle_triton.engine.model.model_view import Layer
from eagle_triton.engine.model.module_kinds import (
    is_plain_tensor,
    is_sharded_tensor,
    is_tensor_parallel_forward,
    local_part,
)
from eagle_triton.engine.model.modules import MLP, Projection, SharedEmbedding
from eagle_triton.engine.ranks import Ranks
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.reading.quantised_modules import name_of_scale
from eagle_triton.runtime.float8_weight import BLOCK


class _Style(NamedTuple):
    """How a module of some name is spread: names of the style in a plan, and the dimension of its weight."""

    names: tuple[str, ...]
    dim: int | None  # None: every rank has it whole


_ROWS, _COLUMNS = _Style(("colwise",), 0), _Style(("rowwise",), 1)
_WHOLE = _Style(("replicated_with_grad_allreduce", "replicate"), None)

STYLES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), _ROWS),
    **dict.fromkeys(("o_proj", "down_proj"), _COLUMNS),
    "lm_head": _Style(("colwise_gather_output", "colwise_rep"), 0),
    "embed_tokens": _Style(("embedding_rowwise",), 0),
    **dict.fromkeys(("q_norm", "k_norm", "input_layernorm", "post_attention_layernorm", "norm"), _WHOLE),
}
"""By the last name of a module's path; nothing else may be spread."""

MAY_BE_WHOLE = ("lm_head", "embed_tokens")


def check_sharding(module: nn.Module, root: str) -> None:
    """Raise UnsupportedModelError unless all that is sharded below `module` is a dense language model of transformers,
    spread by the plan that the engine knows. Nothing is asked of a model that is not sharded."""
    wrapped = hasattr(module, "ea_layer")
    target: Any = module.base_model if wrapped else module
    where, inside = (f"{root}.base_model", "base_model.") if wrapped else (root, "")
    plan = getattr(target, "tp_plan", None) or {}
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    sharded = [path for path, tensor in tensors if is_sharded_tensor(tensor)]
    for path in sharded:
        if not plan or not path.startswith(inside):
            raise _refused(f"{root}.{path}", "only a target may be, by its tp_plan; a draft is whole on each rank")
    if not sharded:
        return
    parts = [(path, part, any(map(is_sharded_tensor, _own(part).values()))) for path, part in target.named_modules()]
    for path, part, _ in sorted(parts, key=lambda entry: not entry[2]):  # what is sharded wrongly is the first to name
        _check_module(part, path, f"{where}.{path}", plan)


def _own(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in module._parameters.items() if tensor is not None}


def _check_module(module: nn.Module, path: str, where: str, plan: dict[str, str]) -> None:
    """Check a module of a sharded model."""
    own = _own(module)
    spread = [name for name, tensor in own.items() if is_sharded_tensor(tensor)]
    known, named = STYLES.get(path.rpartition(".")[2]), plan.get(path, plan.get(re.sub(r"\d+", "*", path)))
    if not (spread or named or is_tensor_parallel_forward(vars(module).get("forward"))):
        if known is not None and known.dim is not None and not path.endswith(MAY_BE_WHOLE):
            raise _refused(where, f"{' or '.join(known.names)} is how this must be, and every rank has it whole")
        return
    of_scale = name_of_scale(module)
    plain = type(module) in (nn.Linear, nn.Embedding)
    if known is None or not (plain or of_scale is not None or known.dim is None):
        name = f"{where}.{spread[0]}" if spread else where
        raise _refused(name, f"a {type(module).__name__} by {named!r}; only {', '.join(STYLES)} may be")
    if named not in known.names:
        raise _refused(where, f"by {named!r}, and it must be by {' or '.join(known.names)}")
    for name, tensor in own.items():
        if of_scale is not None and known.dim is not None and name not in ("weight", "bias"):
            _check_scale(module, tensor, known, f"{where}.{name}")
        else:
            _check_tensor(tensor, known, name, f"{where}.{name}")


def _check_scale(module: nn.Module, scale: Any, style: _Style, where: str) -> None:
    """Check the scales of an FP8 module: a single one is whole on every rank, those of rows go with the rows, and those
    of blocks go with the weight. Parts of such a weight must consist of whole blocks."""
    weight: Any = module.weight
    rows, shape = weight.shape[0], tuple(scale.shape)
    if style.dim is None or not is_sharded_tensor(weight):
        return  # the weight itself is refused
    of_rows = next((dim for dim in range(len(shape)) if shape[dim] == scale.numel() == rows), None)
    if scale.numel() == 1 or (of_rows is not None and style.dim == 1):
        dim = None
    elif of_rows is not None:
        dim = of_rows
    else:
        dim, size, ranks = style.dim, weight.shape[style.dim], weight.device_mesh.size()
        if ranks > 1 and size % (BLOCK * ranks):
            what = ("rows", "columns")[dim]
            raise _refused(
                where,
                f"{size} {what} do not divide by {ranks} ranks into equal parts of whole blocks of {BLOCK}",
                _OTHER_COUNT,
            )
    _check_placement(scale, dim, style, where)


def _check_tensor(tensor: Any, style: _Style, name: str, where: str) -> None:
    """Check a tensor of a module that is spread by this style. A bias goes with the rows."""
    if style.dim is None:
        if is_sharded_tensor(tensor):
            raise _refused(where, "every rank must have it whole")
        return
    _check_placement(tensor, None if style.dim == 1 and name == "bias" else style.dim, style, where)


def _check_placement(tensor: Any, expected: int | None, style: _Style, where: str) -> None:
    """Check that each rank has an equal part along a dimension, or all of the tensor."""
    if not is_sharded_tensor(tensor):
        if expected is not None:
            raise _refused(where, f"{style.names[0]} is how this must be, and every rank has it whole")
        return
    if not hasattr(tensor, "device_mesh"):
        raise _refused(where, f"a {type(tensor.data).__name__} without a device_mesh")
    part = local_part(tensor)
    if not is_plain_tensor(part):
        raise _refused(where, f"its part is a {type(part.data).__name__}, and must be a plain tensor")
    if tensor.device_mesh.ndim != 1:
        raise _refused(where, f"over a mesh of {tensor.device_mesh.ndim} dimensions, and it must have one")
    (placement,) = tensor.placements
    right = placement.is_replicate() if expected is None else placement.is_shard(expected)
    if not right:
        wanted = "Replicate()" if expected is None else f"Shard(dim={expected})"
        raise _refused(where, f"as {placement!r}, and by {style.names[0]!r} it must be {wanted}")
    if expected is not None and tensor.shape[expected] % tensor.device_mesh.size():
        size = tensor.device_mesh.size()
        raise _refused(where, f"{tensor.shape[expected]} do not divide by {size} ranks into equal parts", _OTHER_COUNT)


def refuse_sharded(module: nn.Module, root: str) -> None:
    """Raise UnsupportedModelError if a model of a family that may not be sharded is."""
    for path, tensor in module.named_parameters():
        if is_sharded_tensor(tensor):
            raise _refused(f"{root}.{path}", "only Hugging Face's models may be, also in this package's EaModel")


def ranks_of(module: nn.Module) -> Ranks | None:
    """The ranks that a module's parameters are spread over, None where they are not. All ranks ask together."""
    sharded: Any = next((tensor for tensor in module.parameters() if is_sharded_tensor(tensor)), None)
    return None if sharded is None else Ranks.of(sharded.device_mesh)


def rows_here(module: Any) -> int | None:
    """How many outputs a module that is called has on this rank; None: not known."""
    weight: Any = getattr(module, "weight", None)
    return len(local_part(weight)) if is_sharded_tensor(weight) else getattr(module, "out_features", None)


def read_sharded_projection(layer: Any, path: str) -> Projection:
    """This rank's part of a projection that `check_sharding` has passed. path: the last name counts.

    A module with FP8 weights stays the module; families/reading/float8.py reads its part.
    """
    ranks, name = ranks_of(layer), path.rpartition(".")[2]
    assert ranks is not None
    summed, joined = (ranks if shared else None for shared in (STYLES[name].dim == 1, name == "lm_head"))
    if type(layer) is not nn.Linear:
        return Projection(module=layer, summed_over=summed, joined_over=joined)
    weight, bias = (
        local_part(tensor) if tensor is not None and is_sharded_tensor(tensor) else tensor
        for tensor in (layer.weight, layer.bias)
    )
    return Projection(weight, None if summed and ranks.rank else bias, summed_over=summed, joined_over=joined)


def read_sharded_embedding(layer: nn.Embedding) -> SharedEmbedding:
    """This rank's part of an embedding that `check_sharding` has passed."""
    ranks = ranks_of(layer)
    assert ranks is not None
    return SharedEmbedding(local_part(layer.weight), ranks)


def local_heads(attention: nn.Module, num_heads: int, num_kv_heads: int, where: str) -> tuple[int, int]:
    """How many heads of queries and of keys this rank has. Raises UnsupportedModelError if they do not divide."""
    weight: Any = getattr(getattr(attention, "q_proj", None), "weight", None)
    if weight is None or not is_sharded_tensor(weight):
        return num_heads, num_kv_heads
    size = weight.device_mesh.size()
    for name, heads in (("q_proj", num_heads), ("k_proj", num_kv_heads)):
        if heads % size:
            raise _refused(f"{where}.{name}", f"its {heads} heads do not divide by {size} ranks", _OTHER_COUNT)
    return num_heads // size, num_kv_heads // size


# --- a head, which every rank has loaded whole ---


def share_head(draft: EagleDraft, ranks: Ranks) -> EagleDraft:
    """The same head; each rank reads its part of the matrices. Parts are views, nothing is copied.

    What does not divide by the ranks, or is no plain matrix, every rank reads whole.
    """
    head = draft.head
    if head.joined_over is None and _divides(ranks, head):  # EAGLE-1's is the target's
        head = _rows_of(head, ranks, joined=True)
    return replace(draft, layers=tuple(_share_layer(layer, ranks) for layer in draft.layers), head=head)


def _share_layer(layer: Layer, ranks: Ranks) -> Layer:
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, Attention):
        mixer = _share_attention(mixer, ranks)
    if isinstance(mlp, MLP) and _divides(ranks, mlp.gate, mlp.up, mlp.down):
        gate, up, down = _rows_of(mlp.gate, ranks), _rows_of(mlp.up, ranks), _columns_of(mlp.down, ranks)
        mlp = replace(mlp, gate=gate, up=up, down=down)
    return replace(layer, mixer=mixer, mlp=mlp)


def _share_attention(mixer: Attention, ranks: Ranks) -> Attention:
    heads, kv_heads = mixer.num_heads, mixer.num_kv_heads
    if mixer.norms_rows or mixer.k is None or mixer.v is None:  # norms need the heads of all ranks; a head has k and v
        return mixer
    if heads % ranks.size or kv_heads % ranks.size or not _divides(ranks, mixer.q, mixer.k, mixer.v, mixer.o):
        return mixer
    q, k, v = (_rows_of(projection, ranks) for projection in (mixer.q, mixer.k, mixer.v))
    heads, kv_heads = heads // ranks.size, kv_heads // ranks.size
    return replace(mixer, q=q, k=k, v=v, o=_columns_of(mixer.o, ranks), num_heads=heads, num_kv_heads=kv_heads)


def _divides(ranks: Ranks, *projections: Projection) -> bool:
    weights = [projection.weight for projection in projections]
    return all(isinstance(weight, Tensor) and not any(size % ranks.size for size in weight.shape) for weight in weights)


def _rows_of(projection: Projection, ranks: Ranks, joined: bool = False) -> Projection:
    assert isinstance(projection.weight, Tensor)
    weight = projection.weight.detach().chunk(ranks.size)[ranks.rank]
    bias = None if projection.bias is None else projection.bias.detach().chunk(ranks.size)[ranks.rank]
    return Projection(weight, bias, joined_over=ranks if joined else None)


def _columns_of(projection: Projection, ranks: Ranks) -> Projection:
    assert isinstance(projection.weight, Tensor)
    weight = projection.weight.detach().chunk(ranks.size, dim=1)[ranks.rank]
    return Projection(weight, projection.bias if ranks.rank == 0 else None, summed_over=ranks)


_REMEDY = 'load it by tp_plan="auto", or on one device, or hand it over to vLLM or SGLang (eagle-triton export)'

_OTHER_COUNT = "start as many processes as it divides by, or one"


def _refused(where: str, why: str, remedy: str = _REMEDY) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{where} is sharded over several devices (tp_plan) in a way that is not supported: {why}; {remedy}", "devices"
    )
