"""Reads models that transformers has sharded over ranks: `from_pretrained(..., tp_plan="auto")`.

Each parameter is then a DTensor with one part on each rank, and each module's forward is replaced by one that
exchanges data by the model's plan. The engine reads the parts and exchanges data itself. So it must know each module's
style, styles in a block must fit together, and every part must be the one that the style gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

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


class Style(NamedTuple):
    """A style of a plan: the dimension along which the weight is sharded (None: whole), and whether the data that the
    module exchanges with its block is whole on each rank (outputs of rows, inputs of columns)."""

    name: str
    dim: int | None
    whole: bool = False


_ROWS, _COLUMNS = ("colwise",), ("rowwise",)
_GATHERED, _SPLIT = ("colwise_gather_output", "colwise_rep"), ("rowwise_split_input", "rowwise_rep")

STYLES = {
    name: Style(name, dim, whole)
    for names, dim, whole in (
        (_ROWS, 0, False),
        (_GATHERED, 0, True),
        (_COLUMNS, 1, False),
        (_SPLIT, 1, True),
        (("embedding_rowwise",), 0, True),
        (("replicated_with_grad_allreduce", "replicate"), None, True),
    )
    for name in names
}
"""Styles by their names in transformers' plans."""

PLACES = {
    **dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "g_proj", "gate_proj", "up_proj", "c_fc", "fc1"), (*_ROWS, *_GATHERED)
    ),
    **dict.fromkeys(("qkv_proj", "gate_up_proj", "lm_head"), _GATHERED),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"), _GATHERED),
    "out_proj": _GATHERED,
    **dict.fromkeys(("o_proj", "dense", "down_proj", "c_proj", "fc2"), (*_COLUMNS, *_SPLIT)),
    **dict.fromkeys(("embed_tokens", "embeddings"), ("embedding_rowwise",)),
}
"""The allowed styles of a module, by the last name of its path. Nothing else may be sharded."""

BLOCKS = {
    "o_proj": ("q_proj", "k_proj", "v_proj", "qkv_proj", "g_proj", "gate_proj"),
    "dense": ("q_proj", "k_proj", "v_proj"),
    "down_proj": ("gate_proj", "up_proj", "gate_up_proj"),
    "c_proj": ("c_fc",),
    "fc2": ("fc1",),
}
"""Modules that read the outputs of others in their block."""

EXPERTS = "moe_tp_experts"
"""The style of stacked experts: a rank has rows of each expert's gate and up, and columns of its down."""

Styles: TypeAlias = Mapping[nn.Module, Style]
"""The styles of a shared model's modules."""


def check_sharding(module: nn.Module, root: str) -> None:
    """Raise UnsupportedModelError if anything inside `module` is sharded, unless it is a language model of
    transformers, sharded by styles that the engine knows."""
    wrapped = hasattr(module, "ea_layer")
    target: Any = module.base_model if wrapped else module
    where, inside = (f"{root}.base_model", "base_model.") if wrapped else (root, "")
    plan = getattr(target, "tp_plan", None) or {}
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    sharded = [path for path, tensor in tensors if is_sharded_tensor(tensor)]
    for path, part in module.named_modules():
        if getattr(part, "_is_expert_parallel", False):
            why = f"each rank has some of the experts (ep_plan); use {EXPERTS!r} of a tp_plan, a part of each"
            raise _refused(f"{root}.{path}", why)
    for path in sharded:
        if not plan or not path.startswith(inside):
            raise _refused(f"{root}.{path}", "only a target may be sharded; a draft must be whole on each rank")
    exchanges = any(is_tensor_parallel_forward(vars(part).get("forward")) for part in target.modules())
    if not (sharded or exchanges):
        return
    parts = [(path, part, any(map(is_sharded_tensor, _own(part).values()))) for path, part in _parts_read(target)]
    for path, part, _ in sorted(parts, key=lambda entry: not entry[2]):  # report wrongly sharded modules first
        _check_module(part, f"{where}.{path}", _named(plan, path))
    styles = styles_of(target)
    for path, part, _ in parts:
        _check_block(part, f"{where}.{path}", styles)


def _parts_read(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model, with their paths, without those for images, which stand beside a language model."""
    yield path, model
    for name, child in model.named_children():
        if name == "language_model" or not hasattr(model, "language_model"):
            yield from _parts_read(child, f"{path}.{name}".removeprefix("."))


def styles_of(model: nn.Module) -> Styles:
    """The styles of a model's modules, after `check_sharding`; none if it is not sharded."""
    plan = getattr(model, "tp_plan", None) or {}
    spread = (entry for entry in model.named_modules() if any(map(is_sharded_tensor, _own(entry[1]).values())))
    named = ((part, _named(plan, path)) for path, part in spread)
    return {part: STYLES[name] for part, name in named if name in STYLES}


def _named(plan: dict[str, str], path: str) -> str | None:
    """The name of a module's style in a plan."""
    return plan.get(path, plan.get(re.sub(r"\b\d+\b", "*", path)))


def _own(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in module._parameters.items() if tensor is not None}


def _check_module(module: nn.Module, where: str, named: str | None) -> None:
    """Check a module of a sharded model. named: its style in the plan."""
    if named == EXPERTS:
        _check_experts(module, where)
        return
    own, of_scale = _own(module), name_of_scale(module)
    spread = [name for name, tensor in own.items() if is_sharded_tensor(tensor)]
    style, may = STYLES.get(named or ""), PLACES.get(where.rpartition(".")[2])
    if not (spread or named or is_tensor_parallel_forward(vars(module).get("forward"))):
        return
    whole = style is not None and style.dim is None
    plain = type(module) is nn.Linear or isinstance(module, nn.Embedding)
    if not whole and (may is None or not (plain or of_scale is not None)):
        name = f"{where}.{spread[0]}" if spread else where
        raise _refused(name, f"a {type(module).__name__} by {named!r}; only {', '.join(PLACES)} may be sharded")
    if style is None or not (whole or named in (may or ())):
        raise _refused(where, f"its style is {named!r}, and must be {' or '.join(may or STYLES)}")
    for name, tensor in own.items():
        if of_scale is not None and not whole and name not in ("weight", "bias"):
            _check_scale(module, tensor, style, f"{where}.{name}")
        else:
            _check_tensor(tensor, style, name, f"{where}.{name}")


def _check_experts(experts: nn.Module, where: str) -> None:
    """Check stacked experts [E, 2 * I, H] and [E, H, I]: a rank has an equal part of each expert's I."""
    for name, tensor in _own(experts).items():
        dim, packed = {"gate_up_proj": (1, 2), "down_proj": (2, 1)}.get(name, (None, 1))
        if dim is None:
            raise _refused(f"{where}.{name}", f"with {EXPERTS!r}, experts may only have gate_up_proj and down_proj")
        _check_placement(tensor, dim, EXPERTS, f"{where}.{name}", packed)


def _check_block(module: nn.Module, where: str, styles: Styles) -> None:
    """Check that modules of a block pass on and expect the same: a rank's own part, data that is whole on each rank, or
    the product of matrices that each rank has whole."""
    children = dict(module.named_children())
    for giver, reader in ((giver, reader) for reader, givers in BLOCKS.items() for giver in givers):
        if giver not in children or reader not in children:
            continue
        given, taken = styles.get(children[giver]), styles.get(children[reader])
        if (given and given.whole) != (taken and taken.whole):
            how = [f"by {style.name!r}" if style else "whole on every rank" for style in (given, taken)]
            raise _refused(f"{where}.{giver}", f"it is {how[0]}, and {where}.{reader} is {how[1]}")


def _check_scale(module: nn.Module, scale: Any, style: Style, where: str) -> None:
    """Check the scales of an FP8 module: a single one is whole on every rank, one for each row is sharded with the
    rows, one for each block with the weight. Parts of such a weight must consist of whole blocks."""
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
    _check_placement(scale, dim, style.name, where)


def _check_tensor(tensor: Any, style: Style, name: str, where: str) -> None:
    """Check a tensor of a module with this style. A bias is sharded with the rows."""
    if style.dim is None:
        if is_sharded_tensor(tensor):
            raise _refused(where, "every rank must have it whole")
        return
    _check_placement(tensor, None if style.dim == 1 and name == "bias" else style.dim, style.name, where)


def _check_placement(tensor: Any, expected: int | None, style: str, where: str, packed: int = 1) -> None:
    """Check that each rank has an equal part along a dimension, or the whole tensor. packed: the number of matrices
    that follow each other along it, each with its own parts."""
    if not is_sharded_tensor(tensor):
        if expected is not None:
            raise _refused(where, f"it must be sharded by {style}, and every rank has it whole")
        return
    if not hasattr(tensor, "device_mesh"):
        raise _refused(where, f"a {type(tensor.data).__name__} without a device_mesh")
    part = local_part(tensor)
    if not is_plain_tensor(part):
        raise _refused(where, f"its part must be a plain tensor, got a {type(part.data).__name__}")
    if tensor.device_mesh.ndim != 1:
        raise _refused(where, f"its mesh must have one dimension, got {tensor.device_mesh.ndim}")
    (placement,) = tensor.placements
    if expected is None:
        right, wanted = placement.is_replicate(), "Replicate()"
    else:
        right = (getattr(placement, "dim", None), getattr(placement, "split_factor", 1)) == (expected, packed)
        wanted = f"Shard(dim={expected})" if packed == 1 else f"_StridedShard(dim={expected}, split_factor={packed})"
    if not right:
        raise _refused(where, f"its placement is {placement!r}, and must be {wanted} for {style!r}")
    size = tensor.device_mesh.size()
    if expected is not None and tensor.shape[expected] % (packed * size):
        count = tensor.shape[expected] // packed
        raise _refused(where, f"{count} do not divide by {size} ranks into equal parts", _OTHER_COUNT)


def refuse_sharded(module: nn.Module, root: str) -> None:
    """Raise UnsupportedModelError if a model is sharded, for families that do not support that."""
    for path, tensor in module.named_parameters():
        if is_sharded_tensor(tensor):
            raise _refused(f"{root}.{path}", "only Hugging Face's models may be, also in this package's EaModel")


def ranks_of(module: nn.Module) -> Ranks | None:
    """The ranks that share a module's parameters; None if it is not shared. All ranks must call this together."""
    sharded: Any = next((tensor for tensor in module.parameters() if is_sharded_tensor(tensor)), None)
    return None if sharded is None else Ranks.of(sharded.device_mesh)


def outputs_of(projection: Projection) -> int | None:
    """The number of outputs of a product on this rank; None: not known."""
    if projection.outputs is not None:
        return projection.outputs.stop - projection.outputs.start
    weight: Any = projection.weight if projection.weight is not None else getattr(projection.module, "weight", None)
    if projection.weight is None and not is_sharded_tensor(weight):
        return getattr(projection.module, "out_features", None)
    parts = 1 if projection.joined_over is None else projection.joined_over.size
    return parts * (len(local_part(weight)) if is_sharded_tensor(weight) else weight.shape[0])


def read_sharded_projection(layer: Any, style: Style) -> Projection:
    """This rank's part of a projection, after `check_sharding`.

    A module with FP8 weights stays a module; families/reading/float8.py reads its part.
    """
    ranks = ranks_of(layer)
    assert ranks is not None
    summed, joined = (ranks if shared else None for shared in (style.dim == 1, style.dim == 0 and style.whole))
    if type(layer) is not nn.Linear:
        return Projection(module=layer, summed_over=summed, joined_over=joined)
    weight, bias = (
        local_part(tensor) if tensor is not None and is_sharded_tensor(tensor) else tensor
        for tensor in (layer.weight, layer.bias)
    )
    return Projection(weight, None if summed and ranks.rank else bias, summed_over=summed, joined_over=joined)


def own_outputs(projection: Projection) -> Projection:
    """This rank's outputs of a joined product; any other product unchanged."""
    ranks, outputs = projection.joined_over, outputs_of(projection)
    if ranks is None or outputs is None:
        return projection
    size, start = outputs // ranks.size, 0 if projection.outputs is None else projection.outputs.start
    return replace(projection, outputs=slice(start + size * ranks.rank, start + size * (ranks.rank + 1)))


def read_sharded_embedding(layer: nn.Embedding) -> SharedEmbedding:
    """This rank's part of an embedding, after `check_sharding`."""
    ranks = ranks_of(layer)
    assert ranks is not None
    return SharedEmbedding(local_part(layer.weight), ranks)


def own_heads(projection: nn.Module | None, heads: int, where: str) -> int:
    """The number of a projection's heads on this rank. Raises UnsupportedModelError if ranks do not divide them."""
    weight: Any = getattr(projection, "weight", None)
    size = weight.device_mesh.size() if is_sharded_tensor(weight) else 1
    if heads % size:
        raise _refused(where, f"its {heads} heads do not divide by {size} ranks", _OTHER_COUNT)
    return heads // size


# --- heads and MTP layers, loaded whole on every rank ---


def share_head(draft: EagleDraft, ranks: Ranks) -> EagleDraft:
    """The same head; each rank reads its part of the matrices. Parts are views; nothing is copied.

    Every rank reads a matrix whole if its size is no multiple of the ranks, or if it is not a plain matrix.
    """
    head = draft.head
    if head.joined_over is None and _divides(ranks, head):  # EAGLE-1's is the target's
        head = _rows_of(head, ranks, joined=True)
    return replace(draft, layers=tuple(share_layer(layer, ranks) for layer in draft.layers), head=head)


def share_layer(layer: Layer, ranks: Ranks) -> Layer:
    """The same layer; each rank reads its part, as in `share_head`."""
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, Attention):
        mixer = _share_attention(mixer, ranks)
    if isinstance(mlp, MLP) and mlp.gate is not None and _divides(ranks, mlp.gate, mlp.up, mlp.down):
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


_REMEDY = 'load it with tp_plan="auto", or on one device, or use vLLM or SGLang (eagle-triton export)'

_OTHER_COUNT = "start a number of processes that divides it, or one"


def _refused(where: str, why: str, remedy: str = _REMEDY) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{where} is sharded over several devices (tp_plan) in a way that is not supported: {why}; {remedy}", "devices"
    )
