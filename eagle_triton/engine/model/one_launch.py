"""All layers of a model over one row in one launch: for which models, and the kernel's arguments. See
ops/one_launch/."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle_triton.engine.model.layer_caches import LayerCaches
from eagle_triton.engine.model.mixers import Attention, KeyValueCache
from eagle_triton.engine.model.modules import MLP, Experts, Norm, Projection
from eagle_triton.engine.operations import Operations
from eagle_triton.runtime.fallback import KernelError, give_up_gluon, gluon_module
from eagle_triton.runtime.launch import launch

if TYPE_CHECKING:
    from eagle_triton.engine.drafts.causal_lm import CausalLMDraft
    from eagle_triton.engine.model.model_view import Layer, ModelView

_UNEVEN = "sizes that are no multiples of 1024"
FASTER = {"NVIDIA H200": ("MLPs", "mixtures", _UNEVEN), "NVIDIA H100 80GB HBM3": ("MLPs",)}
"""Devices, and layers with which one launch was measured to be faster than separate kernels: docs/megakernel.md."""

MAX_ROWS = 16384
"""The most tokens of a sequence for which plain steps use it. The longer the sequence, the less it gains. At 8192
tokens it was faster at all shapes. By the cost of each further token it breaks even at 13,000 tokens for 8B, and at
27,000 for the smallest model."""

_KERNEL = "eagle_triton.ops.one_launch"
_PART = 1024  # columns of a weight that are loaded at a time
_STEP, _LARGEST_HIDDEN, _LARGEST_INNER = 128, 4096, 16384  # sizes are multiples of _STEP, from _PART on
_HEADS = ((16, 128), (32, 64), (24, 128), (32, 128))  # query heads, and their size
_KEY_HEADS = (2, 4, 8)
_MIXTURE = (2048, (32, 4, 128), 768, 128, 8)  # hidden size, heads, an expert's size, experts, experts per row
_ADDRESSES = 128  # bytes: weights must begin at multiples of this, the rows of the kernel's matrix


def _kernel() -> Any:
    """The module of the kernel; None if Gluon is missing, or if the kernel does not compile here."""
    return gluon_module(_KERNEL)


def reason_against(model: ModelView | CausalLMDraft) -> str | None:
    """Why the layers of a model do not run over one row in one launch; None if they do."""
    if (reason := _unsupported_device(model.embedding.device)) or (reason := unsupported_model(model)):
        return reason
    return _unmeasured(model.embedding.device, model.layers[0])


def unsupported_model(model: ModelView | CausalLMDraft) -> str | None:
    """Why the launch does not support a model's layers; None if it does."""
    embedding, layers, norm = model.embedding, model.layers, model.norm
    if (
        model.embedding_scale != 1.0
        or model.embedding_norm is not None
        or model.layer_inputs is not None
        or model.feature_layers
    ):
        return "its embeddings are scaled or normed, its layers have their own inputs, or a head reads them"
    if not isinstance(embedding, Tensor) or not embedding.is_contiguous():
        return "the embedding is shared by ranks or not contiguous"
    if embedding.dtype != torch.bfloat16:
        return f"the model is in {str(embedding.dtype).removeprefix('torch.')}, not in bfloat16"
    if _unsupported_size(embedding.shape[1], _LARGEST_HIDDEN):
        return f"the hidden size is {embedding.shape[1]}, not a multiple of {_STEP} from {_PART} to {_LARGEST_HIDDEN}"
    if norm is None or not layers:
        return "the model has no layers or no last norm"
    for index, layer in enumerate(layers):
        if (reason := _unsupported_layer(layer, layers[0])) is not None:
            return f"layer {index} {reason}"
    norms = [norm, *(norm for layer in layers for norm in (layer.input_norm, layer.post_norm) if norm is not None)]
    norms += [norm for layer in layers for norm in _head_norms(layer)]
    if any(norm.zero_centred or not norm.round_first or norm.eps != norms[0].eps for norm in norms):
        return "the norms are zero-centred, round after their weight (LayerNorms do), or differ in eps"
    if any(norm.weight.dtype != torch.bfloat16 or not norm.weight.is_contiguous() for norm in norms):
        return "a norm's weight is not in bfloat16, or not contiguous"
    weights = [weight for layer in layers for weight in _matrices(layer)]
    if any(norm.weight.data_ptr() % 4 for norm in norms):
        return "the address of a norm's weight is not a multiple of 4"
    if any(weight.data_ptr() % _ADDRESSES for weight in weights):
        return f"the address of a weight is not a multiple of {_ADDRESSES}"
    if _span(weights) >= 2**31:
        return f"the weights lie more than {2**31 * _ADDRESSES >> 30} GiB apart"
    return None


def _unsupported_size(size: int, largest: int) -> bool:
    return size % _STEP != 0 or not _PART <= size <= largest


def _unsupported_layer(layer: Layer, first: Layer) -> str | None:
    mixer, mlp = layer.mixer, layer.mlp
    if not layer.is_llamas or layer.input_norm is None:
        return "is not like Llama's"
    if not isinstance(mixer, Attention):
        return "is not attention"
    if isinstance(mlp, Experts):
        if (reason := _unsupported_mixture(mlp)) is not None:
            return reason
    elif not isinstance(mlp, MLP) or mlp.gate is None or mlp.activation != "silu":
        return "is not attention and SwiGLU"
    for product in _projections(layer):
        if product is None or not isinstance(product.weight, Tensor):
            return "has a product without a plain weight"
        if product.summed_over is not None or product.joined_over is not None:
            return "has products shared by ranks"
    for weight in _matrices(layer):
        if weight.dtype != torch.bfloat16 or not weight.is_contiguous():
            return "has a weight that is not in bfloat16, or not contiguous"
    if (reason := _unsupported_bias(layer)) is not None:
        return reason
    shape, inner = (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim), _inner(layer)
    if isinstance(mlp, Experts):
        if _biases(layer) or mixer.sliding_window is not None:
            return "has a mixture beside biases or a sliding window"
        found = (_hidden(layer), shape, inner, mlp.count, mlp.chosen)
        if found != _MIXTURE:
            return (
                f"has a mixture of sizes {found} (hidden, heads, an expert's, experts, experts per row), not {_MIXTURE}"
            )
    elif (mixer.num_heads, mixer.head_dim) not in _HEADS or mixer.num_kv_heads not in _KEY_HEADS:
        return f"has heads {shape} (query heads, key heads, their size), not {_HEADS} with {_KEY_HEADS} of keys"
    elif _unsupported_size(inner, _LARGEST_INNER):
        return f"has an intermediate size of {inner}, not a multiple of {_STEP} from {_PART} to {_LARGEST_INNER}"
    rotary = mixer.rotary
    if len(rotary.inv_freq) % 4 or not len(rotary.inv_freq):
        return f"rotates {2 * len(rotary.inv_freq)} columns of a head, not a multiple of 8"
    if rotary.pairs or not (rotary.round_tables and rotary.round_terms) or rotary.temperature:
        return "rotates in pairs, by unrounded tables or with a temperature"
    if mixer.gated or mixer.gate is not None or mixer.sinks is not None or mixer.softcap is not None:
        return "has gates, sinks or capped scores"
    if mixer.reads_layer is not None or mixer.v_norm is not None or mixer.norms_rows or mixer.norm_last:
        return "reads another layer's keys, or norms values, whole rows or rotated heads"
    model = first.mixer
    assert isinstance(model, Attention)
    if _described(first) != _described(layer):
        return "differs from the first"
    if rotary.attention_scaling != model.rotary.attention_scaling or (
        rotary.inv_freq is not model.rotary.inv_freq and not torch.equal(rotary.inv_freq, model.rotary.inv_freq)
    ):
        return "rotates differently from the first"
    return None


def _unsupported_bias(layer: Layer) -> str | None:
    biases = _biases(layer)
    if any(product is not None and product.bias is not None for product in _projections(layer)[3:]):
        return "has a bias of a product other than q, k and v"
    if len(biases) not in (0, 3):
        return "has a bias of some of q, k and v only"
    if any(bias.dtype != torch.bfloat16 or not bias.is_contiguous() for bias in biases):
        return "has a bias that is not in bfloat16, or not contiguous"
    return None


def _biases(layer: Layer) -> list[Tensor]:
    """Those that q, k and v have."""
    return [product.bias for product in _projections(layer)[:3] if product is not None and product.bias is not None]


def _head_norms(layer: Layer) -> Iterator[Norm]:
    assert isinstance(layer.mixer, Attention)
    yield from (norm for norm in (layer.mixer.q_norm, layer.mixer.k_norm) if norm is not None)


def _projections(layer: Layer) -> tuple[Projection | None, ...]:
    """q, k, v and o; gate, up and down if the layer has no mixture."""
    mixer, mlp = layer.mixer, layer.mlp
    assert isinstance(mixer, Attention)
    of_mlp = (mlp.gate, mlp.up, mlp.down) if isinstance(mlp, MLP) else ()
    return mixer.q, mixer.k, mixer.v, mixer.o, *of_mlp


def _matrices(layer: Layer) -> list[Tensor]:
    """The weights of `_projections`, then gate and up, down, and the router of a mixture."""
    found: list[object] = [projection and projection.weight for projection in _projections(layer)]
    if isinstance(layer.mlp, Experts) and (weights := layer.mlp.weights) is not None:
        found += [weights.gate_up, weights.down, weights.router]
    return [weight for weight in found if isinstance(weight, Tensor)]


def _hidden(layer: Layer) -> int:
    return _matrices(layer)[0].shape[1]


def _inner(layer: Layer) -> int:
    """The intermediate size, of a mixture an expert's."""
    gate = _matrices(layer)[4]
    return gate.shape[1] // 2 if isinstance(layer.mlp, Experts) else len(gate)


def _unsupported_mixture(mixture: Experts) -> str | None:
    weights = mixture.weights
    if weights is None or not isinstance(weights.gate_up, Tensor) or not isinstance(weights.down, Tensor):
        return "has a mixture without plain weights"
    if mixture.summed_over is not None:
        return "has a mixture that ranks share"
    routing = weights.routing
    plain = routing.rounded_logits and routing.renormalised and routing.scale == 1.0
    if routing.score == "sigmoid" or not plain:
        return "has a router other than the softmax of the chosen experts"
    others = (weights.router_bias, weights.correction, weights.gate_up_bias, weights.down_bias, weights.clamp)
    if any(other is not None for other in (*others, weights.shared)) or weights.interleaved:
        return "has a mixture with biases, a clamp, interleaved rows or a shared expert"
    return None


def _first_rows(layer: Layer, lowest: Tensor) -> list[int]:
    """The first rows of q, k, v, o, gate, up and down in the matrix that begins at the lowest weight; then the layer's
    window, which is larger than any sequence if it has none."""
    rows = [(weight.data_ptr() - lowest.data_ptr()) // _ADDRESSES for weight in _matrices(layer)]
    if isinstance(layer.mlp, Experts):
        *attention, gate, down, _ = rows
        rows = [*attention, gate, gate + _inner(layer) * _hidden(layer) * 2 // _ADDRESSES, down]
    assert isinstance(layer.mixer, Attention)
    return [*rows, layer.mixer.sliding_window or 2**31 - 1]


def _addresses(layer: Layer) -> list[int]:
    """The addresses of the norms of its inputs, of SwiGLU's, of queries and keys, of its router, and of the biases of
    q, k and v; 8 numbers, where 0 stands for what it does not have."""
    norms = [layer.input_norm, layer.post_norm, *_head_norms(layer)]
    found = [norm.weight.data_ptr() for norm in norms if norm is not None]
    router = _matrices(layer)[-1].data_ptr() if isinstance(layer.mlp, Experts) else 0
    biases = [bias.data_ptr() for bias in _biases(layer)]
    return [*[*found, 0, 0][:4], router, *(biases or (0, 0, 0))]


def _described(layer: Layer) -> tuple[object, ...]:
    """What all layers must share."""
    mixer, mlp = layer.mixer, layer.mlp
    assert isinstance(mixer, Attention)
    routing = mlp.weights.routing if isinstance(mlp, Experts) and mlp.weights is not None else None
    of_heads = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.scale, mixer.q_norm is None
    return *of_heads, len(_biases(layer)), _inner(layer), routing


def _span(weights: Sequence[Tensor]) -> int:
    """Rows of the matrix that reaches all of the weights."""
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    return (max(ends) - min(weight.data_ptr() for weight in weights)) // _ADDRESSES


def _unsupported_device(device: torch.device) -> str | None:
    """Why the launch does not run on a device; None if it does."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device)[0] != 9:
        return "it needs a Hopper GPU"
    if _kernel() is None:
        return "Triton has no Gluon that can compile it"
    return None


def _unmeasured(device: torch.device, layer: Layer) -> str | None:
    """Why the launch is not used on a device for such layers; None if it was measured to be faster."""
    blocks = "MLPs"
    if isinstance(layer.mlp, Experts):
        blocks = "mixtures"
    elif _hidden(layer) % _PART or _inner(layer) % _PART:
        blocks = _UNEVEN
    found = torch.cuda.get_device_properties(device)
    if blocks not in FASTER.get(found.name, ()) or found.multi_processor_count < _kernel().PROGRAMS.value:
        return f"it was not measured on {found.name} with {blocks}"
    return None


class OneLaunch:
    """Layers of one model, and the memory through which programs pass values.

    programs: how many to launch. If they are fewer than the kernel's, those that wait for missing ones give NaN.
    """

    def __init__(self, model: ModelView | CausalLMDraft):
        """Raises ValueError if the model is unsupported."""
        if (reason := unsupported_model(model)) is not None:
            raise ValueError(f"the layers cannot run in one launch: {reason}")
        embedding, layers, norm = model.embedding, model.layers, model.norm
        kernel, mixer = _kernel(), layers[0].mixer
        assert isinstance(mixer, Attention) and isinstance(embedding, Tensor) and norm is not None
        self.programs = kernel.PROGRAMS.value
        device, mlp = embedding.device, layers[0].mlp
        self._sizes = kernel.Sizes(
            *(embedding.shape[1], mixer.num_heads // 8, mixer.head_dim, 2 * len(mixer.rotary.inv_freq)),
            *(_inner(layers[0]), len(layers)),
            QK_NORM=mixer.q_norm is not None,
            KV=mixer.num_kv_heads,
            BIASED=bool(_biases(layers[0])),
            WINDOWED=any(isinstance(layer.mixer, Attention) and layer.mixer.sliding_window for layer in layers),
            MIXTURE=isinstance(mlp, Experts),
            ROUNDED=not (isinstance(mlp, Experts) and mlp.weights and mlp.weights.routing.weights_in_fp32),
        )
        weights = [weight for layer in layers for weight in _matrices(layer)]
        lowest = min(weights, key=Tensor.data_ptr)
        self._weights = kernel.weights_descriptor(lowest, _span(weights))
        self._of_hidden = kernel.weights_descriptor(lowest, _span(weights), self._sizes.H)
        self._of_inner = kernel.weights_descriptor(lowest, _span(weights), self._sizes.I)
        self._model = kernel.Model(
            embedding,
            norm.weight,
            torch.tensor([_first_rows(layer, lowest) for layer in layers], dtype=torch.int32, device=device),
            torch.tensor([_addresses(layer) for layer in layers], dtype=torch.int64, device=device),
            mixer.rotary.inv_freq.float().contiguous(),
            mixer.rotary.attention_scaling,
            norm.eps,
            mixer.scale * math.log2(math.e),
        )
        sizes = kernel.Mailboxes.sizes(self._sizes)
        boxes = [torch.zeros(size, dtype=torch.int32, device=device) for size in sizes]
        self._boxes = kernel.Mailboxes(*boxes)

    @property
    def compiles(self) -> bool:
        """Whether its kernel compiles here, as far as this is known."""
        return _kernel() is not None

    def __call__(
        self,
        ops: Operations,
        tokens: Tensor,
        caches: LayerCaches,
        lengths: Tensor,
        skip: int = 0,
        at_least: tuple[Tensor, int] | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Run the row of token [1, 1] int64 after lengths [1] int32 committed rows and `skip` more. Its keys and values
        are written to the caches. Returns the residual stream and its norm, [1, 1, H] each.

        at_least: a count [1] int32 on the device, and the least with which anything is done. Below it the caches stay
        as they are, and the outputs are arbitrary.

        None: it did nothing, because there are more rows, or because the kernel does not compile.
        """
        (cache, *others), kernel = caches.caches, _kernel()
        if kernel is None or tokens.shape != (1, 1) or others or type(cache) is not KeyValueCache:
            return None
        whole, (data, table) = cache.data, cache.layer(0)
        width = whole.shape[-1]
        layer, values, page = (whole.stride(dim) // width for dim in range(3))
        last = sum((size - 1) * stride for size, stride in zip(whole.shape[:5], whole.stride(), strict=False))
        keys = kernel.keys_descriptor(data, last // width + 1)
        hidden, normed = (self._model.embedding.new_empty(1, 1, self._sizes.H) for _ in range(2))
        try:
            launch(kernel.one_launch_kernel, (self.programs,))(
                self._weights,
                self._of_hidden,
                self._of_inner,
                keys,
                self._model,
                kernel.Row(tokens, lengths, skip, table, hidden, normed, *(at_least or (lengths, 0))),
                kernel.Cache(data, page, layer, values),
                self._boxes,
                self._sizes,
                num_warps=8,
                launch_cooperative_grid=True,
                **kernel.settings_for(self._sizes),
            )
        except KernelError as error:
            if ops.on_kernel_error is None:
                raise
            ops.on_kernel_error("one_launch", error)
            give_up_gluon(_KERNEL)
            return None
        ops.calls["one_launch"] += 1
        return hidden, normed
