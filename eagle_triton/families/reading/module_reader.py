"""Reads modules by inspecting them, after checks of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from eagle_triton.engine.model.mixers import Attention, Mixer
from eagle_triton.engine.model.model_view import Layer, ModelView
from eagle_triton.engine.model.model_watch import DECOMPRESSED, interference, is_decompressed
from eagle_triton.engine.model.module_kinds import is_plain_linear, is_plain_tensor, is_sharded_tensor
from eagle_triton.engine.model.modules import MLP, Experts, Norm, Projection, Rotary, SharedEmbedding
from eagle_triton.engine.operations import Operations
from eagle_triton.errors import UnknownLayerError, UnsupportedModelError
from eagle_triton.families.reading.activations import LABELS, is_elementwise, name_of_activation
from eagle_triton.families.reading.sharded import (
    Styles,
    check_sharding,
    outputs_of,
    own_heads,
    own_outputs,
    read_sharded_embedding,
    read_sharded_projection,
)
from eagle_triton.models.families import LFM2, LLAMA, Family
from eagle_triton.operands.layers import ACTIVATIONS, UNGATED_ACTIVATIONS
from eagle_triton.runtime.row_formats import whole_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
SAME_BITS = 0.99  # the least share of equal numbers with the right kind of norm; with another kind a third differ
ELSEWHERE = (
    'load it on one, without device_map; or shard it with tp_plan="auto" under torchrun; or use vLLM or SGLang, which '
    "serve a model on several GPUs (eagle-triton export)"
)


def check_readable(module: nn.Module, root: str = "model") -> None:
    """Raise UnsupportedModelError for a model that cannot be read from its weights.

    That is a model spread over several devices, offloaded, without storage, or sharded in another way than by
    tp_plan="auto"; and one with hooks or replaced forwards, which would not run. The inside of a module that is called
    as a module (such as a quantised projection) is not checked.
    """
    check_no_adapter(module, root)
    check_sharding(module, root)
    check_one_device(module, root)
    for path, part in module.named_modules(prefix=root):
        if is_decompressed(part):
            raise UnsupportedModelError(f"{path} was decompressed: {DECOMPRESSED}", "quantisation")
    if reason := interference(module, root):
        raise UnsupportedModelError(f"{reason}; undo this before you optimise the model", "hooks")


def check_no_adapter(module: nn.Module, root: str = "model") -> None:
    """Raise UnsupportedModelError for a model that PEFT has wrapped, or that contains such a model."""
    for path, part in module.named_modules(prefix=root):
        if type(part).__module__ == "peft.peft_model":
            raise UnsupportedModelError(
                f"{path} is a {type(part).__name__} of PEFT around a model: use {path}.merge_and_unload(), which has "
                f"the adapter in its weights, or {path}.get_base_model(), which calls its adapters as modules and is "
                "slower",
                "adapters",
            )


def check_one_device(module: nn.Module, root: str = "model") -> None:
    """Raise UnsupportedModelError for a model that is spread over several devices, offloaded, or without storage."""
    devices = sorted({str(tensor.device) for tensor in (*module.parameters(), *module.buffers())})
    hooked = any(hasattr(part, "_hf_hook") for part in module.modules())
    if len(devices) == 1 and hooked and torch.device(devices[0]).type != "meta":
        raise UnsupportedModelError(
            f"{root} has hooks of accelerate, which would not run, and does not need them on one device: remove them "
            f"with accelerate.hooks.remove_hook_from_module({root}, recurse=True)",
            "devices",
        )
    if len(devices) > 1 or hooked or torch.device(devices[0]).type == "meta":
        raise UnsupportedModelError(
            f"{root} must lie on one device, got {', '.join(devices)}{' with offloading hooks' if hooked else ''}; "
            f"{ELSEWHERE}",
            "devices",
        )


def check_dtype(dtype: torch.dtype, path: str) -> None:
    """Raise UnsupportedModelError for a dtype that the operations do not support."""
    if dtype not in DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise UnsupportedModelError(f"{path} must be {names}, got {dtype}", "weights")


def check_fits_target(root: str, target: ModelView, vocabulary: int, weight: torch.Tensor) -> None:
    """Raise UnsupportedModelError unless a draft of this vocabulary, with weights like `weight`, fits `target`."""
    for what, got, expected in (
        ("vocabulary", vocabulary, target.vocab_size),
        ("dtype", weight.dtype, target.dtype),
        ("device", weight.device, target.device),
    ):
        if got != expected:
            raise UnsupportedModelError(
                f"{root} and the target do not fit: {what} {got}, the target's is {expected}", "heads"
            )


@dataclass(frozen=True)
class ModuleReader:
    """Reads a module of a model. path: its dotted path, for messages. styles: how modules of the model are shared by
    ranks. dtype: the embedding's, which the weights of norms and plain projections must have; None leaves it unchecked.

    Structure is checked as it is read. A missing or unexpected part raises UnsupportedModelError with its path.
    """

    module: Any
    path: str = "model"
    styles: Styles = field(default_factory=dict)
    dtype: torch.dtype | None = None

    def value(self, path: str, kind: type | tuple[type, ...] = object) -> Any:
        """The attribute at a dotted path below the module, of this kind."""
        value, walked = self.module, self.path
        for name in path.split("."):
            walked = f"{walked}.{name}"
            if not hasattr(value, name):
                raise UnsupportedModelError(f"{walked} is missing on {type(value).__name__}")
            value = getattr(value, name)
        if not isinstance(value, kind):
            expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise UnsupportedModelError(f"{walked} must be {expected}, got {type(value).__name__}")
        return value

    def factor(self, name: str | None) -> float:
        """A number that the module's forward multiplies by; 1 without a name."""
        return 1.0 if name is None else float(self.value(name, (float, int)))

    def at(self, path: str, kind: type[nn.Module] = nn.Module) -> ModuleReader:
        """A reader of the module at a dotted path below this one."""
        return replace(self, module=self.value(path, kind), path=f"{self.path}.{path}")

    def tensor(self, name: str) -> torch.Tensor:
        """A parameter of the module, in its own storage: a kernel reads it by its address."""
        tensor = self.module._parameters.get(name)
        if tensor is None or not is_plain_tensor(tensor):
            kind = "nothing of its own" if tensor is None else type(tensor.data).__name__
            raise UnsupportedModelError(
                f"{self.path}.{name} must be a plain tensor, got {kind} in a {type(self.module).__name__}", "weights"
            )
        return tensor

    def weight(self, name: str = "weight") -> torch.Tensor:
        """A parameter as by `tensor`, of the model's dtype."""
        tensor = self.tensor(name)
        self._check_dtype(tensor, name)
        return tensor

    def _check_dtype(self, tensor: Any, path: str) -> None:
        if self.dtype is not None and isinstance(tensor, torch.Tensor) and tensor.dtype != self.dtype:
            raise UnsupportedModelError(
                f"{self.path}.{path} must be {self.dtype}, the embedding's dtype, or a module of another class, "
                f"got {tensor.dtype}",
                "weights",
            )

    def embedding(self, path: str) -> torch.Tensor:
        """The table [V, H] of a plain nn.Embedding."""
        return self._embedding(path).weight()

    def target_embedding(self, path: str) -> torch.Tensor | SharedEmbedding:
        """The table [V, H] of a target's embedding, or this rank's part of it."""
        embedding = self._embedding(path, scaled=True)
        table = embedding.module
        return read_sharded_embedding(table) if is_sharded_tensor(table.weight) else embedding.weight()

    def _embedding(self, path: str, scaled: bool = False) -> ModuleReader:
        """A reader of an embedding. scaled: allow kinds that scale or norm their output; see read_embedding_scale."""
        found = self.at(path)
        kind = type(found.module)
        known = kind is nn.Embedding or (
            scaled and kind.__name__.endswith(("TextScaledWordEmbedding", "TextNormedEmbedding"))
        )
        if not known or found.module.max_norm is not None:
            raise UnsupportedModelError(f"{found.path} must be a plain nn.Embedding, got {found.module}", "weights")
        return found

    def norm(self, path: str, *, like: torch.Tensor | None = None, layer_norm: bool = False) -> Norm:
        """A norm: a weight, and its eps under one of the usual names; rows show whether it is zero-centred.

        like: a norm without a weight gets ones like these. layer_norm: it is a LayerNorm, perhaps with a bias.
        """
        found = self.at(path)
        layer, where = found.module, found.path
        if like is not None and getattr(layer, "weight", None) is None:
            weight = torch.ones_like(like, requires_grad=False)
        else:
            weight = found.weight()
        bias = found.weight("bias") if layer_norm and getattr(layer, "bias", None) is not None else None
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None and not tensor.is_contiguous():
                raise UnknownLayerError(f"{where}.{name} must be contiguous, got stride {tensor.stride()}")
        for name in ("variance_epsilon", "eps"):
            if isinstance(eps := getattr(layer, name, None), float):
                return _tried_norm(layer, Norm(weight, eps, subtract_mean=layer_norm, bias=bias), where)
        raise UnknownLayerError(f"{where} ({type(layer).__name__}) has no eps: it is not a known norm")

    def projection(self, path: str) -> Projection:
        """A plain nn.Linear by its weight and bias, this rank's part of a sharded one, any other module as a module.

        families/reading/quantised.py replaces quantised modules that can be read by their weights.
        """
        layer = self.value(path, nn.Module)
        if layer in self.styles:
            projection = read_sharded_projection(layer, self.styles[layer])
        elif is_plain_linear(layer):
            if layer.weight.dtype in FLOAT8:
                raise UnsupportedModelError(
                    f"{self.path}.{path}.weight is {layer.weight.dtype} in a plain nn.Linear, which has no scale: "
                    "its numbers mean nothing without one",
                    "quantisation",
                )
            projection = Projection(layer.weight, layer.bias)
        else:
            return Projection(module=layer)
        self._check_dtype(projection.weight, f"{path}.weight")
        self._check_dtype(projection.bias, f"{path}.bias")
        return projection

    def activation(self, path: str, known: tuple[str, ...] = ACTIVATIONS) -> str:
        """The name, of these, of the activation at a dotted path."""
        if (name := name_of_activation(self.value(path), known)) is None:
            raise self._unknown_activation(path, known)
        return name

    def activation_or_module(self, path: str, known: tuple[str, ...]) -> str | nn.Module:
        """The same; another activation as a module, if it computes each element alone."""
        activation = self.value(path)
        if (name := name_of_activation(activation, known)) is not None:
            return name
        if not is_elementwise(activation):
            raise self._unknown_activation(path, known, " or a module that computes each element alone")
        return activation

    def _unknown_activation(self, path: str, known: tuple[str, ...], others: str = "") -> UnknownLayerError:
        labels = " or ".join(LABELS[name] for name in known)
        return UnknownLayerError(f"{self.path}.{path} must be {labels}{others}, got {self.value(path)}")

    def layer(
        self, path: str, rotary: Rotary, *, mixer: Mixer | None = None, mlp: Experts | None = None, **attention: Any
    ) -> Layer:
        """A decoder layer of the Llama family: attention or `mixer`, and a SwiGLU block or `mlp`.

        attention: arguments of `ModuleReader.attention`. Only an EAGLE-1/2 head's layer lacks the input norm.
        """
        layer = self.at(path)
        return Layer(
            input_norm=layer.norm("input_layernorm") if hasattr(layer.module, "input_layernorm") else None,
            mixer=layer.attention(rotary, **attention) if mixer is None else mixer,
            post_norm=layer.norm("post_attention_layernorm"),
            mlp=layer.mlp() if mlp is None else mlp,
        )

    def mlp(self, name: str = "mlp", family: Family = LLAMA) -> MLP:
        """A layer's MLP. One without a module for its activation is gated by SiLU (LFM2)."""
        (gated, raised, lowered), block = family.mlp_projections, getattr(self.module, name)
        down, names = self.projection(f"{name}.{lowered}"), ("act_fn", "activation_fn", "act", "activation")
        attribute = next((one for one in names if hasattr(block, one)), "act_fn")
        if gated is None:
            up = own_outputs(self.projection(f"{name}.{raised}"))
            chosen = self.activation_or_module(f"{name}.{attribute}", UNGATED_ACTIVATIONS)
            return MLP(None, up, down, activation=chosen)
        written = family.mlp == LFM2.mlp and not hasattr(block, attribute)
        activation = "silu" if written else self.activation_or_module(f"{name}.{attribute}", ACTIVATIONS)
        if family.gate_up is None:
            gate, up = (self.projection(f"{name}.{part}") for part in (gated, raised))
        else:
            both = self.projection(f"{name}.{family.gate_up}")
            gate, up = split_projection(both, 2, f"{self.path}.{name}.{family.gate_up}")
        return MLP(own_outputs(gate), own_outputs(up), down, activation=activation)

    def attention(
        self,
        rotary: Rotary,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        reads_layer: int | None = None,
        family: Family = LLAMA,
    ) -> Attention:
        """The attention of a layer, with the names and switches of its family.

        Queries and keys are normed if it has the norms. Its output is gated if the queries' product has twice their
        rows. scale: of its scores; None: 1 / sqrt(head_dim). softcap, reads_layer: see Attention.
        """
        read = self.at(family.attention)
        attention, where = read.module, read.path
        packed, gate, norms = family.qkv, family.gate, family.head_norms
        all_heads, queries = (num_heads, num_kv_heads), packed or "q_proj"
        num_heads, num_kv_heads = (
            own_heads(getattr(attention, queries, None), heads, f"{where}.{name}")
            for heads, name in zip(all_heads, (queries, packed or "k_proj"), strict=True)
        )
        o = read.projection(family.output)
        k, v = None, None
        if packed is None:
            q = read.projection("q_proj")
            if reads_layer is None:
                k = read.projection("k_proj")
                if getattr(attention, "v_proj", attention) is not None:  # Gemma 4's is None with attention_k_eq_v
                    v = read.projection("v_proj")
        else:
            sizes = [heads * head_dim for heads in (*all_heads, all_heads[1])]
            all_three = read.projection(packed)
            q, k, v = split_projection(all_three, sizes, f"{where}.{packed}")
        gated = _is_gated(own_outputs(q), num_heads * head_dim, f"{where}.q_proj")
        if 2 * len(rotary.inv_freq) > head_dim:
            raise UnknownLayerError(
                f"{where} must rotate at most the {head_dim} elements of a head, got {len(rotary.inv_freq)} "
                "frequencies, each for two elements"
            )
        q_norm, k_norm, v_norm = None, None, None
        has_norms = hasattr(attention, norms[0])
        if gate is not None and getattr(attention, gate[0], attention) is None:  # LFM3, without use_attention_gate
            gate = None
        if reads_layer is not None and has_norms:
            q_norm = _read_query_norm(read, norms[0], head_dim)
        elif has_norms:
            read_heads = (num_heads, num_kv_heads) if q.joined_over is None else all_heads
            q_norm, k_norm = _read_head_norms(read, norms, head_dim, *read_heads)
            if hasattr(attention, "v_norm"):
                v_norm = _read_value_norm(read, k_norm)
        elif hasattr(attention, "qk_norm"):  # one for both, without a weight
            like = torch.empty(head_dim, dtype=self.dtype, device=next(attention.parameters()).device)
            q_norm = k_norm = read.norm("qk_norm", like=like)
        by_row = q_norm is not None and len(q_norm.weight) > head_dim
        if not by_row:  # norms of whole rows read the heads of all ranks
            q, k = own_outputs(q), k and own_outputs(k)
        found = Attention(
            q,
            k,
            v and own_outputs(v),
            o,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            rotary=rotary,
            q_norm=q_norm,
            k_norm=k_norm,
            v_norm=v_norm,
            sliding_window=sliding_window,
            gated=gated,
            gate=None if gate is None else own_outputs(read.projection(gate[0])),
            gate_activation="sigmoid" if gate is None else gate[1],
            sinks=read.tensor("sinks") if hasattr(attention, "sinks") else None,
            softcap=softcap,
            reads_layer=reads_layer,
            norm_last=family.norm_last,
        )
        if gated and found.norms_rows:
            raise UnknownLayerError(f"{where} must not have both norms of whole rows and a gate for each head")
        return found


# --- shared by the methods ---


def read_embedding_scale(layer: nn.Module) -> float:
    """The factor of an embedding's rows, rounded as its forward rounds it."""
    scale = getattr(layer, "embed_scale", None)
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return float(scale.to(weight.dtype)) if isinstance(scale, torch.Tensor) else 1.0


@torch.no_grad()
def _tried_norm(layer: nn.Module, norm: Norm, where: str) -> Norm:
    """The kind of norm that gives random rows the same bits as `layer`; if two do, the first. norm: its weights, eps,
    and whether it is a LayerNorm.

    A module that adds up or takes the root in another order has other bits in a few places, in fp32 in many. If no kind
    gives nearly all bits, values decide between plain and zero-centred norms: the nearer one, because a large weight
    and 1 + weight are almost equal.
    """
    weight, bias, means = norm.weight, norm.bias, 1.0 if norm.subtract_mean else 0.0
    source = torch.Generator("cpu").manual_seed(0)
    rows = torch.randn(4, len(weight), generator=source, device="cpu", dtype=torch.float32) + means
    rows = rows.to(weight.device, weight.dtype)
    out, once = layer(rows), replace(norm, round_first=False)
    first = once if norm.subtract_mean else norm
    kinds = (first, once, replace(first, zero_centred=True))
    if out.shape == rows.shape and out.dtype == rows.dtype:
        given = [whole_of(Operations.rms_norm(rows, weight, norm.eps, **kind.options)) for kind in kinds]
        same = [float(((out == bits) | (out.isnan() & bits.isnan())).float().mean()) for bits in given]
        if max(same) > SAME_BITS:
            return kinds[same.index(max(same))]
        wide = [replace(kind, bias=None if bias is None else bias.float()) for kind in (kinds[0], kinds[2])]
        plain, centred = (
            whole_of(Operations.rms_norm(rows.float(), weight.float(), norm.eps, **kind.options)) for kind in wide
        )
        zero_centred = bool((out - centred).abs().nansum() < (out - plain).abs().nansum())
        expected = centred if zero_centred else plain
        if torch.allclose(out.float(), expected, rtol=0.05, atol=1e-3, equal_nan=True):
            return kinds[2 if zero_centred else 0]
    what = "a LayerNorm" if norm.subtract_mean else "an RMSNorm"
    raise UnknownLayerError(f"{where} ({type(layer).__name__}) does not compute {what} with its weight")


class RowsOfProjection(nn.Module):
    """Some outputs of a projection that is called as a module."""

    def __init__(self, projection: nn.Module, outputs: slice):
        super().__init__()
        self.projection, self.outputs, self.out_features = projection, outputs, outputs.stop - outputs.start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection(x)[..., self.outputs]


def split_projection(packed: Projection, sizes: int | Sequence[int], where: str) -> tuple[Projection, ...]:
    """One projection as several: with outputs of these sizes, or in this number of equal parts. Weights are views."""
    total, weight, bias = outputs_of(packed), packed.weight, packed.bias
    if isinstance(sizes, int):
        sizes = [(total or 0) // sizes] * sizes
    if total != sum(sizes) or packed.summed_over or not isinstance(weight, torch.Tensor | None):
        raise UnknownLayerError(f"{where} must have {sum(sizes)} outputs, got {total}")
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    slices = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    if packed.joined_over is not None:
        if weight is None:
            raise UnsupportedModelError(
                f"{where} is quantised, and gives several products, which ranks cannot share then (tp_plan): load the "
                "model on one device",
                "devices",
            )
        return tuple(replace(packed, outputs=rows) for rows in slices)
    if weight is None:
        assert isinstance(packed.module, nn.Module)
        return tuple(Projection(module=RowsOfProjection(packed.module, rows)) for rows in slices)
    return tuple(Projection(weight[rows], None if bias is None else bias[rows]) for rows in slices)


def _is_gated(q: Projection, rows: int, where: str) -> bool:
    """Whether the product has a gate beside the queries of each head. rows: of the queries alone."""
    found = outputs_of(q)
    if found not in (rows, 2 * rows):
        got = f"a {type(q.module).__name__} without out_features" if found is None else found
        raise UnknownLayerError(f"{where} must have {rows} rows, or {2 * rows} with a gate for each head, got {got}")
    return found == 2 * rows


def _read_head_norms(
    attention: ModuleReader, names: tuple[str, str], head_dim: int, num_heads: int, num_kv_heads: int
) -> tuple[Norm, Norm]:
    """The norms of queries and keys, by name. Both norm single heads, or both norm all heads of a row together."""
    q_norm, k_norm = map(attention.norm, names)
    widths = len(q_norm.weight), len(k_norm.weight)
    by_head, by_row = (head_dim, head_dim), (num_heads * head_dim, num_kv_heads * head_dim)
    if widths not in (by_head, by_row):
        raise UnknownLayerError(
            f"{attention.path}.{names[0]} and {names[1]} must have weights for one head, {by_head}, or for all heads "
            f"that are here, {by_row}, got {widths}"
        )
    kinds = [(norm.eps, norm.zero_centred, norm.round_first) for norm in (q_norm, k_norm)]
    if kinds[0] != kinds[1]:
        raise UnknownLayerError(
            f"{attention.path}.{names[0]} and {names[1]} must have one kind and eps, got eps {q_norm.eps} and "
            f"{k_norm.eps}, zero-centred: {q_norm.zero_centred} and {k_norm.zero_centred}, rounded before the weight: "
            f"{q_norm.round_first} and {k_norm.round_first}"
        )
    return q_norm, k_norm


def _read_query_norm(attention: ModuleReader, name: str, head_dim: int) -> Norm:
    """The norm of queries, head by head, in a layer without keys."""
    norm = attention.norm(name)
    if len(norm.weight) != head_dim:
        raise UnknownLayerError(
            f"{attention.path}.{name} must have the weight of a head, {head_dim}, got {len(norm.weight)}"
        )
    return norm


def _read_value_norm(attention: ModuleReader, k_norm: Norm) -> Norm:
    """The norm of values. It has no weight. Like any kind with weights of 1, it rounds once."""
    norm, module = attention.norm("v_norm", like=k_norm.weight), attention.module.v_norm
    if norm.eps != k_norm.eps or k_norm.zero_centred or hasattr(module, "weight"):
        raise UnknownLayerError(
            f"{attention.path}.v_norm must have no weight and k_norm's eps {k_norm.eps}, beside norms that are not "
            f"zero-centred, got {module} with eps {norm.eps}"
        )
    return replace(norm, round_first=k_norm.round_first)


def read_rotary(inv_freq: Any, scaling: float, where: str, **kind: Any) -> Rotary:
    """A rotary embedding from its frequencies. kind: further fields of Rotary."""
    if not isinstance(inv_freq, torch.Tensor) or inv_freq.dim() != 1:
        raise UnknownLayerError(f"{where}.inv_freq must be a tensor [r / 2]")
    return Rotary(inv_freq.float(), float(scaling), **kind)
