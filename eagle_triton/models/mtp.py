"""Multi-token prediction (MTP): layers that a checkpoint contains beside its model, and that transformers ignores.

Three naming schemes are known: `mtp.*` of Qwen3-Next and Qwen3.5, `model.mtp_layers.*` of MiMo, and extra layers after
the last one, as in DeepSeek-V3. An MTP layer has the class of the model's decoder layers, and its FP8 projections have
the class of theirs.
"""

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import Checkpoint, tensor_names

log = logging.getLogger(__name__)

MTP = "mtp"  # passed as a draft: the layers beside the target's weights
SCALE = "weight_scale_inv"  # of a weight in eight bits, named as in transformers' FP8Linear
BLOCK = 128  # rows and columns that share a scale
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class MTPUnit(nn.Module):
    """One MTP layer and its norms: y = norm(layer(fc(cat(token_norm(embedding), hidden_norm(hidden)))))."""

    def __init__(self, token_norm: nn.Module, hidden_norm: nn.Module, fc: nn.Module, layer: nn.Module, norm: nn.Module):
        super().__init__()
        self.token_norm, self.hidden_norm, self.fc, self.layer, self.norm = token_norm, hidden_norm, fc, layer, norm

    def forward(self, hidden: Tensor, embeddings: Tensor, **kwargs: Any) -> Tensor:
        """hidden, embeddings [B, n, H]; kwargs go to the decoder layer. Returns y [B, n, H]."""
        x = self.fc(torch.cat((self.token_norm(embeddings), self.hidden_norm(hidden)), dim=-1))
        out = self.layer(x, **kwargs)
        return self.norm(out[0] if isinstance(out, tuple) else out)


class MTPHead(nn.Module):
    """The MTP layers of a checkpoint. Embedding and vocabulary projection are the target's."""

    def __init__(self, units: list[MTPUnit]):
        super().__init__()
        self.units = nn.ModuleList(units)


@dataclass(frozen=True)
class _TensorNames:
    """The tensor names of one family of checkpoints. `outside` and `layer` are prefixes; {} is the layer's number."""

    found_by: str  # prefix of a tensor that every such checkpoint has
    outside: str
    layer: str
    token_norm: str
    hidden_norm: str
    fc: str
    norm: str
    hidden_first: bool = False  # fc's first columns are for the hidden state
    beside: tuple[str, ...] = ()  # copies of the target's embedding and vocabulary projection


LAYER_NAMES = (
    _TensorNames(
        "mtp.", "mtp.", "mtp.layers.{}.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm",
        beside=("mtp.embed_tokens.", "mtp.lm_head."),
    ),
    _TensorNames(
        "model.mtp_layers.", "model.mtp_layers.{}.", "model.mtp_layers.{}.", "token_layernorm",
        "hidden_layernorm", "input_proj", "final_layernorm", hidden_first=True,
    ),
    _TensorNames(
        "model.layers.{}.eh_proj.", "model.layers.{}.", "model.layers.{}.", "enorm", "hnorm", "eh_proj",
        "shared_head.norm", beside=("model.layers.{}.embed_tokens.", "model.layers.{}.shared_head.head."),
    ),
)  # fmt: skip


def load_mtp(target: nn.Module, path: str | Path | None = None, **hub: Any) -> MTPHead:
    """The MTP layers beside the weights of `target`, on its device and in its dtype.

    Projections in fine-grained FP8 stay in FP8 if the target's are; others, and mixtures of experts, are dequantised.
    target: a Hugging Face causal language model. path: a directory or hub id; None: the target's own, at the commit in
    its configuration if there is one. hub: `revision`, `token` and others of `snapshot_download`. Raises
    FileNotFoundError for missing files. Raises ValueError if the checkpoint has no such layers, if a part of one is
    missing, or if they differ in kind from the target's layers.
    """
    where = str(path or getattr(getattr(target, "config", None), "_name_or_path", "") or "")
    commit = getattr(getattr(target, "config", None), "_commit_hash", None)
    if path is None and commit and not Path(where).is_dir():
        hub.setdefault("revision", commit)
    if not where:
        raise ValueError(
            "load_mtp: the target was made in memory, so its multi-token-prediction layers cannot be found: give their "
            "path, load_mtp(target, path), and as a draft what that returns"
        )
    checkpoint = Checkpoint(where, hub, "load_mtp")
    body = _body(target)
    count = len(body.layers)
    for names in LAYER_NAMES:
        first = count if names.found_by.startswith("model.layers") else 0
        if any(name.startswith(names.found_by.format(first)) for name in checkpoint.files):
            return _read(checkpoint, names, first, target, body)
    raise ValueError(
        f"{where!r} has no multi-token-prediction layers: neither mtp.*, model.mtp_layers.* nor model.layers.{count}.*"
    )


def has_mtp(path: str | Path) -> bool:
    """Whether a directory or hub id holds MTP layers by a known naming scheme; False if it is neither."""
    return bool(mtp_names(tensor_names(path)))


def mtp_names(names: Iterable[str]) -> set[str]:
    """The names that belong to a checkpoint's MTP layers."""
    names = set(names)
    places = {match[1] for name in names if (match := re.match(r"(model\.layers\.\d+\.)eh_proj\.", name))}
    return {name for name in names if name.startswith(("mtp.", "model.mtp_layers.", *places))}


def _read(checkpoint: Checkpoint, names: _TensorNames, first: int, target: nn.Module, body: Any) -> MTPHead:
    pattern = re.compile(re.escape(names.layer).replace(r"\{\}", r"(\d+)"))
    found = {int(match[1]) for name in checkpoint.files if (match := pattern.match(name))}
    numbers = sorted(number for number in found if number >= first)
    if not numbers or numbers != list(range(first, first + len(numbers))):
        raise ValueError(f"{checkpoint.path!r}: the MTP layers must be numbered from {first} on, got {numbers}")
    like = next(body.parameters())
    units: list[MTPUnit] = []
    for number in numbers:
        shared = bool(units) and "{}" not in names.outside
        mixture = any(name.startswith(f"{names.layer.format(number)}mlp.experts.") for name in checkpoint.files)
        unit = new_unit(target, units[0] if shared else None, mixture)
        _check_copies(checkpoint, names, number, target, body)
        whose = f"{checkpoint.path!r}, MTP layer {number}"
        _load(unit, _unit_tensors(checkpoint, names, number, unit, body, whose), whose, shared, like)
        units.append(unit)
    return MTPHead(units).eval()


def _dequantise_float8(unit: MTPUnit, tensors: dict[str, Tensor], body: Any, whose: str) -> None:
    """Dequantise tensors in fine-grained FP8 to the target's dtype, in place. But if a layer of the target has a module
    in FP8 at the same path, the unit gets a module of that class, without storage, and its tensors stay in FP8."""
    dtype, dequantised = next(body.parameters()).dtype, 0
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        of = name.removesuffix("_scale_inv")
        path, _, kind = of.rpartition(".")
        if of not in tensors or tensors[of].dtype != torch.float8_e4m3fn:
            got = "nothing" if of not in tensors else tensors[of].dtype
            raise ValueError(f"{whose}: {of} must be float8_e4m3fn, because there is a {name}, got {got}")
        theirs = _module_in_float8(body, unit, path) if kind == "weight" else None
        if theirs is not None:
            unit.set_submodule(path, _without_storage(theirs))
            continue
        tensors[of], dequantised = (
            _dequantised(tensors[of], tensors.pop(name), f"{whose}: {name}").to(dtype),
            dequantised + 1,
        )
        for static in ("activation_scale", "input_scale"):  # for rounding inputs, which is not done here
            tensors.pop(f"{path}.{static}", None)
    if dequantised:
        why = "they are in a mixture of experts, or the target's weights are not FP8"
        log.warning("%s: %d weights in FP8 are converted to %s: %s", whose, dequantised, dtype, why)


def _module_in_float8(body: Any, unit: MTPUnit, path: str) -> nn.Module | None:
    """An FP8 module that some layer of the target has at a path of the unit. None: there is none, or it is inside a
    mixture of experts, which is read in 16 or 32 bits."""
    place = path.removeprefix("layer.")
    if place == path or (place.startswith("mlp.") and hasattr(unit.layer.mlp, "experts")):
        return None
    found = (dict(layer.named_modules()).get(place) for layer in body.layers if hasattr(layer, "self_attn"))
    return next((module for module in found if hasattr(module, SCALE)), None)


def _dequantised(values: Tensor, scale: Tensor, what: str) -> Tensor:
    """Dequantised FP8 weights [..., out, in], in fp32. scale: one for each block, or one for all."""
    if not scale.is_floating_point():
        raise ValueError(f"{what} must be floating point, got {scale.dtype}")
    if scale.numel() > 1:
        blocks = [*values.shape[:-2], *(-(-size // BLOCK) for size in values.shape[-2:])]
        if list(scale.shape) != blocks:
            raise ValueError(
                f"{what} must be {blocks} (one for each block of {BLOCK} by {BLOCK}) or one, got {list(scale.shape)}"
            )
        scale = scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
        scale = scale[..., : values.shape[-2], : values.shape[-1]]
    return values.float() * scale.float()


def _without_storage(module: nn.Module) -> nn.Module:
    """A module of the same class and settings, with tensors on the meta device, without hooks or a replaced forward."""
    other: nn.Module = type(module).__new__(type(module))
    nn.Module.__init__(other)
    around = {*vars(other), "forward", "_old_forward", "_hf_hook"}
    vars(other).update({name: value for name, value in vars(module).items() if name not in around})
    for name, weight in module._parameters.items():
        empty = None if weight is None else nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        other.register_parameter(name, empty)
    for name, tensor in module._buffers.items():
        other.register_buffer(name, None if tensor is None else torch.empty_like(tensor, device="meta"))
    return other


def _check_copies(checkpoint: Checkpoint, names: _TensorNames, number: int, target: Any, body: Any) -> None:
    """Raise ValueError if an embedding or vocabulary projection differs from the target's, because it is not read."""
    for prefix, own in zip(names.beside, (body.embed_tokens, target.lm_head), strict=False):
        for name, copied in checkpoint.read(prefix.format(number)).items():
            mine: Any = getattr(own, name, None)
            if hasattr(mine, "full_tensor"):  # ranks share its rows
                mine = mine.full_tensor()
            if mine is None or mine.shape != copied.shape or not torch.equal(mine.cpu(), copied.to(mine.dtype)):
                raise ValueError(
                    f"{checkpoint.path!r}: {prefix.format(number)}{name} differs from the target's: MTP layers with "
                    "their own embedding or vocabulary projection are not supported"
                )


def _unit_tensors(
    checkpoint: Checkpoint, names: _TensorNames, number: int, unit: MTPUnit, body: Any, whose: str
) -> dict[str, Tensor]:
    """The tensors of one unit, by its own names."""
    tensors = dict(_placed(checkpoint, names, number))
    _dequantise_float8(unit, tensors, body, whose)
    if names.hidden_first and "fc.weight" in tensors:
        hidden, token = tensors["fc.weight"].chunk(2, dim=1)
        tensors["fc.weight"] = torch.cat((token, hidden), dim=1)
    return _fused_experts(tensors, unit.state_dict())


def _placed(checkpoint: Checkpoint, names: _TensorNames, number: int) -> Iterator[tuple[str, Tensor]]:
    outside, layer = names.outside.format(number), names.layer.format(number)
    own = {f"{getattr(names, part)}.": f"{part}." for part in ("token_norm", "hidden_norm", "fc", "norm")}
    beside = tuple(name.format(number) for name in names.beside)
    tensors = {outside + name: value for name, value in checkpoint.read(outside).items()}
    for name, value in tensors.items():
        place = next((theirs for theirs in own if name.startswith(outside + theirs)), None)
        if name.startswith(beside):
            continue
        if place is not None:
            yield own[place] + name.removeprefix(outside + place), value
        elif name.startswith(layer):
            yield "layer." + name.removeprefix(layer), value
        elif layer != outside and re.match(re.escape(names.layer).replace(r"\{\}", r"\d+"), name):
            continue  # another layer's
        else:
            yield name, value  # unexpected; `_load` will raise


def _fused_experts(tensors: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack experts that are published one by one into the single tensor of newer modules."""
    fused, down = "layer.mlp.experts.gate_up_proj", "layer.mlp.experts.down_proj"
    if fused not in expected or fused in tensors:
        return tensors
    pattern = re.compile(r"layer\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
    found = {(int(match[1]), match[2]): name for name in tensors if (match := pattern.fullmatch(name))}
    count = expected[fused].shape[0]
    if set(found) != {(expert, part) for expert in range(count) for part in ("gate", "up", "down")}:
        return tensors
    rest = {name: value for name, value in tensors.items() if name not in found.values()}
    one = {key: tensors[name] for key, name in found.items()}
    rest[fused] = torch.stack([torch.cat((one[expert, "gate"], one[expert, "up"])) for expert in range(count)])
    rest[down] = torch.stack([one[expert, "down"] for expert in range(count)])
    return rest


def _load(unit: MTPUnit, tensors: dict[str, Tensor], whose: str, shared: bool, like: Tensor) -> None:
    """Load tensors into a unit, on the device of `like`, and in its dtype unless they are FP8."""
    expected = unit.state_dict()
    if shared:  # the first unit has loaded everything but the layer
        tensors = {name: value for name, value in tensors.items() if name.startswith("layer.")}
        expected = {name: value for name, value in expected.items() if name.startswith("layer.")}
    for names, what, why in (
        (expected.keys() - tensors.keys(), "lacks", ""),
        (tensors.keys() - expected.keys(), "has", ", which the target's layers do not have"),
    ):
        if names:
            raise ValueError(f"{whose} {what} {', '.join(sorted(names)[:5])}{why}")
    loaded = {}
    for name, value in tensors.items():
        path, _, kind = name.rpartition(".")
        if value.shape != expected[name].shape:
            raise ValueError(f"{whose}: {name} must be {list(expected[name].shape)}, got {list(value.shape)}")
        if f"{path}.{SCALE}" in tensors and kind != "bias":
            loaded[name] = value.to(like.device)
        elif value.dtype in FLOATS:
            loaded[name] = value.to(like.device, like.dtype)
        else:
            raise ValueError(
                f"{whose}: {name} must be float32, float16 or bfloat16, or float8_e4m3fn with a {SCALE}, got "
                f"{value.dtype} (quantised?)"
            )
    unit.load_state_dict(loaded, strict=False, assign=True)


def new_unit(target: nn.Module, first: MTPUnit | None = None, mixture: bool | None = None) -> MTPUnit:
    """A unit on the meta device, with a layer like the target's attention layers. first: share this unit's norms and
    fc. mixture: like those with experts, or those without, if the target has both; None: like the first."""
    body = _body(target)
    alike = [layer for layer in body.layers if hasattr(layer, "self_attn")]
    if not alike:
        raise ValueError("load_mtp: the target must have an attention layer, which MTP layers resemble")
    like = next((layer for layer in alike if mixture in (None, hasattr(layer.mlp, "experts"))), alike[0])
    config = copy.deepcopy(body.config)
    with torch.device("meta"):
        layer = type(like)(config, like.self_attn.layer_idx)
        if first is not None:
            return MTPUnit(first.token_norm, first.hidden_norm, first.fc, layer, first.norm)
        size = body.embed_tokens.weight.shape[1]
        norms = [type(body.norm)(size, eps=config.rms_norm_eps) for _ in range(3)]
        return MTPUnit(norms[0], norms[1], nn.Linear(2 * size, size, bias=False), layer, norms[2])


def _body(target: nn.Module) -> Any:
    """The module with the language model's layers."""
    body: Any = getattr(target, "model", None)
    body = getattr(body, "language_model", body)
    if body is None or not hasattr(body, "layers"):
        raise ValueError(f"load_mtp: expected a causal language model, got {type(target).__name__}")
    return body
