"""The modules of a model in the form that the engine reads (frozen references, no copies), and how each runs.

Shapes: B sequences, n rows of each, H hidden size, I intermediate size, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from eagle_triton.engine.model.module_kinds import stored_tensors
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.ranks import Ranks
from eagle_triton.operands.experts import MAX_ROWS, ExpertWeight, Routing
from eagle_triton.operands.linear import Weight
from eagle_triton.runtime.float8_weight import Float8Weight
from eagle_triton.runtime.four_bit_weight import FourBitWeight
from eagle_triton.runtime.row_formats import ProductRows, RowFormat, whole_of
from eagle_triton.runtime.split_sums import Product, SharedRows, SharedSums, SplitSums, own_rows, total_of


@dataclass(frozen=True)
class Norm:
    """RMSNorm: `weight` [H] (or [d] for q/k norms) and `eps`. zero_centred: the factor is 1 + weight.

    round_first: the normalised value is rounded before the weight; see reference.layers.rms_norm. LayerNorm: with
    subtract_mean, and perhaps a `bias` [H]. Only layers and the last norm may be LayerNorms."""

    weight: Tensor
    eps: float
    zero_centred: bool = False
    round_first: bool = True
    subtract_mean: bool = False
    bias: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the operations. Most of them take no LayerNorm, nor its arguments."""
        kind = {"zero_centred": self.zero_centred, "round_first": self.round_first}
        return kind | {"subtract_mean": True, "bias": self.bias} if self.subtract_mean else kind


@dataclass(frozen=True)
class NormedUpdate:
    """A term of the residual stream that is not computed yet: the norm of a product [..., H]."""

    product: Product
    norm: Norm


@dataclass(frozen=True)
class Projection:
    """A matrix product `x @ weight.T + bias`, or a `module` that is called (quantised, sharded).

    summed_over: ranks that each have some columns of the weight (one of them the bias), and add up their results.
    joined_over: ranks that each have some of its rows, and concatenate their results. outputs: the slice of these
    results that belongs to this projection, None for all.
    factor, divisor, cap: for the logits of a vocabulary projection, see `project`: its product is multiplied by
    `factor`, divided by `divisor`, and bounded as cap * tanh(product / cap), each operation rounded to its dtype.
    """

    weight: Weight | None = None  # [out, in]
    bias: Tensor | None = None  # [out]
    module: Callable[[Tensor], Tensor] | None = None
    summed_over: Ranks | None = None
    joined_over: Ranks | None = None
    outputs: slice | None = None
    factor: float = 1.0
    divisor: float = 1.0
    cap: float | None = None


@dataclass(frozen=True, eq=False)
class SharedEmbedding:
    """An embedding [V, H] shared by ranks, V / size rows each. It is read like a tensor: table[tokens]."""

    rows: Tensor  # [V / size, H]: this rank's
    ranks: Ranks

    def in_memory(self, kernels: bool) -> SharedRows | None:
        """The same for a norm that exchanges the look-ups itself; None without memory for it, see Ranks.peers_for."""
        peers = self.ranks.peers_for(kernels, self.device)
        return None if peers is None or not peers.fits(self.rows) else SharedRows(self.rows, peers)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows) * self.ranks.size, self.rows.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def whole(self) -> Tensor:
        """A copy of all rows. All ranks call this."""
        return self.ranks.together(self.rows.detach()).flatten(0, 1)

    def __getitem__(self, tokens: Tensor) -> Tensor:
        """tokens [...] int64 -> [..., H]: the sum of all ranks' look-ups, each zero for tokens of other ranks."""
        return self.ranks.together(own_rows(self.rows, tokens, self.ranks.rank)).sum(0)


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding: angle = position * inv_freq, cos and sin scaled by `attention_scaling`. In the half-rotation
    layout unless `pairs` is set; for the last four fields see reference.layers.rotary_append."""

    inv_freq: Tensor  # [r / 2] float32: the first r <= d elements of a head rotate; [0]: none
    attention_scaling: float = 1.0
    pairs: bool = False
    round_tables: bool = True
    round_terms: bool = True
    temperature: tuple[float, int] | None = None


@dataclass(frozen=True)
class MLP:
    """SwiGLU block: down(silu(gate(x)) * up(x)), or with another `activation` that ops.swiglu takes. Without a gate
    down(activation(up(x))), of those that ops.activate takes. Other activations are modules, which are called."""

    gate: Projection | None
    up: Projection
    down: Projection
    activation: str | nn.Module = "silu"

    @property
    def inputs(self) -> tuple[Projection, ...]:
        """The projections of its input."""
        return (self.up,) if self.gate is None else (self.gate, self.up)

    @property
    def input_format(self) -> RowFormat | None:
        return row_format_of(*self.inputs)


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of a mixture of E experts, in the form that ops.experts takes.

    shared: an expert that every row takes, times sigmoid(x @ shared_gate.T) if there is a gate. gated: False for
    experts without a gate, with up [E, I, H] as gate_up.
    """

    routing: Routing
    router: Tensor  # [E, H]
    router_bias: Tensor | None  # [E]
    correction: Tensor | None  # [E]
    gate_up: ExpertWeight  # [E, 2I, H]
    gate_up_bias: Tensor | None  # [E, 2I]
    down: ExpertWeight  # [E, H, I]
    down_bias: Tensor | None  # [E, H]
    interleaved: bool = False
    clamp: tuple[float, float] | None = None
    gated: bool = True
    shared: MLP | None = None
    shared_gate: Tensor | None = None  # [1, H]


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, [B, n, H] -> [B, n, H]. Up to `most_rows` rows are computed from `weights`, more by
    `module`.

    chosen: experts per row, of `count`; 0 of 0 if not known. weights: None for a block whose module is always called;
    `reason` says why. routed: computes the sum of the experts for more rows, without a shared expert, if the module
    would round its inputs, ranks share the experts, or the shared expert is no plain module. summed_over: ranks that
    each have a part of every expert, and add up their results.
    """

    module: nn.Module
    chosen: int = 0
    count: int = 0
    weights: ExpertWeights | None = None
    reason: str | None = None
    routed: Callable[[Tensor], Tensor] | None = None
    summed_over: Ranks | None = None
    input_format: ClassVar[RowFormat | None] = None

    @property
    def most_rows(self) -> int:
        """The most rows of a call by the weights. In four or eight bits these are more than one operation takes,
        because with more rows such weights are converted in each call; where that is faster was not measured."""
        if self.weights is None:
            return 0
        return MAX_ROWS if isinstance(self.weights.gate_up, Tensor) else 8 * MAX_ROWS

    def bytes_unread(self, rows: int) -> float:
        """Bytes of weights that a call over this many rows leaves out, if each row chooses its experts
        independently."""
        if not self.count:
            return 0.0
        return nbytes_of(self.module.get_submodule("experts")) * (1 - self.chosen / self.count) ** rows


@dataclass(frozen=True)
class ExpertsBeside:
    """A mixture of experts beside the MLP of its layer. The outputs of both are normed and added up.

    The module of `block` is called with the router's input and the experts' input, [B, n, H] each. `input_norm` norms
    the second.
    """

    block: Experts
    mlp_norm: Norm
    input_norm: Norm
    output_norm: Norm

    def added(self, ops: Operations, x: Tensor, update: Product) -> Tensor:
        """Both blocks' output for the residual stream x [B, n, H]. update: the MLP's output for x."""
        found = _summed(ops, self.block.summed_over, self.block.module(x, apply_norm(ops, self.input_norm, x)))
        return ops.add(apply_norm(ops, self.mlp_norm, update), apply_norm(ops, self.output_norm, found))


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of L layers besides the residual stream, P columns each: the scaled sum of the layer's own embedding
    of the token, and of the layer's part of a product of the token's embedding (Gemma 4 E2B)."""

    table: Tensor  # [V, L * P]
    table_scale: float
    projection: Projection  # [L * P, H]
    projection_scale: float
    norm: Norm  # [P], of a layer's part of the product
    scale: float  # of their sum

    def of(self, ops: Operations, tokens: Tensor, x: Tensor) -> Tensor:
        """For tokens [B, n] int64 with embeddings x [B, n, H]: [B, n, L, P]."""
        product = project(ops, self.projection, x) * self.projection_scale
        normed = apply_norm(ops, self.norm, product.unflatten(-1, (-1, len(self.norm.weight))))
        return ops.add(normed, (self.table[tokens] * self.table_scale).view_as(normed)) * self.scale


@dataclass(frozen=True)
class LayerInputBlock:
    """A layer's last block, which reads its part of LayerInputs: x += norm(projection(act(gate(x)) * part))."""

    gate: Projection  # [P, H]
    projection: Projection  # [H, P]
    norm: Norm
    activation: str

    def added(self, ops: Operations, x: Tensor, part: Tensor) -> Tensor:
        """x [B, n, H] plus the block's output for it and part [B, n, P]."""
        gated = ops.swiglu(project(ops, self.gate, x), part, activation=self.activation)
        return ops.add(apply_norm(ops, self.norm, project_split(ops, self.projection, gated)), x)


def tensors_in(part: Any) -> Iterator[Tensor]:
    """The weights of a part of a model, such as a layer or a tuple of norms, as they are stored: a quantised weight may
    be several tensors. Of a mixture, all experts'. Rotary frequencies do not count."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, nn.Module):
        for parameter in part.parameters():
            yield from stored_tensors(parameter)
    elif isinstance(part, Experts):
        yield from tensors_in(part.module)
    elif isinstance(part, tuple):
        for item in part:
            yield from tensors_in(item)
    elif is_dataclass(part) and not isinstance(part, (type, Rotary, Ranks)):
        for field in fields(part):
            yield from tensors_in(getattr(part, field.name))


def nbytes_of(*parts: Any) -> int:
    """Bytes of all weights in parts of a model, see `tensors_in`."""
    return sum(tensor.nbytes for tensor in tensors_in(parts))


def with_projections(part: Any, change: Callable[[Projection], Projection]) -> Any:
    """A part of a model, such as a layer, with `change` applied to each projection; the part itself if none changes."""
    return with_changed(part, Projection, change)


def with_changed(part: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """As `with_projections`, for all parts of the class `kind`."""
    if isinstance(part, kind):
        return change(part)
    if isinstance(part, tuple):
        changed = tuple(with_changed(item, kind, change) for item in part)
        return part if all(new is old for new, old in zip(changed, part, strict=True)) else changed
    if not is_dataclass(part) or isinstance(part, type):
        return part
    old = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
    new = {name: with_changed(value, kind, change) for name, value in old.items()}
    new = {name: value for name, value in new.items() if value is not old[name]}
    return replace(part, **new) if new else part


def row_format_of(*projections: Projection) -> RowFormat | None:
    """The format in which all of them read their input best, and which the kernel before may write; None: as it is."""
    weights = [projection.weight for projection in projections]
    if all(isinstance(weight, Float8Weight) for weight in weights):
        return RowFormat.FLOAT8_PAIR
    if all(isinstance(weight, FourBitWeight) and weight.reads_word_order for weight in weights):
        return RowFormat.WORD_ORDER
    return None


def project(ops: Operations, projection: Projection, x: ProductRows, tune_for_rows: int | None = None) -> Tensor:
    """One matrix product, or the module that replaces it: x [B, n, *] -> [B, n, out].

    tune_for_rows: the number of rows that the launch is chosen for, see `linear`; None: the rows of x.
    """
    out = total_of(_project(ops, projection, x, False, tune_for_rows))
    if projection.factor != 1.0:
        out = out * projection.factor
    if projection.divisor != 1.0:
        out = out / projection.divisor
    return out if projection.cap is None else torch.tanh(out / projection.cap) * projection.cap


def project_split(ops: Operations, projection: Projection, x: ProductRows, tune_for_rows: int | None = None) -> Product:
    """`project` for a reader that adds up the product's splits, or the parts of several ranks."""
    return _project(ops, projection, x, True, tune_for_rows)


def _project(
    ops: Operations, projection: Projection, x: ProductRows, keep_splits: bool, tune_for_rows: int | None
) -> Product:
    if projection.weight is None:
        assert projection.module is not None, "a projection has a weight or a module"
        return projection.module(whole_of(x))
    if projection.joined_over is not None:
        columns = total_of(ops.linear(x, projection.weight, projection.bias, tune_for_rows=tune_for_rows))
        return _joined(ops, projection.joined_over, columns)
    if projection.summed_over is not None:
        part = ops.linear(x, projection.weight, projection.bias, keep_splits=True, tune_for_rows=tune_for_rows)
        found = _summed(ops, projection.summed_over, part)
        return found if keep_splits or isinstance(found, SplitSums) else ops.add(found)
    return ops.linear(x, projection.weight, projection.bias, keep_splits=keep_splits, tune_for_rows=tune_for_rows)


def _joined(ops: Operations, ranks: Ranks, columns: Tensor) -> Tensor:
    """The columns of all ranks, [..., n] -> [..., size * n]."""
    peers = ranks.peers_for(ops.kernels, columns.device)
    return ranks.joined(columns) if peers is None else ops.join_columns(columns, peers)


def _summed(ops: Operations, ranks: Ranks | None, part: Tensor | SplitSums) -> Product:
    """The sum of the ranks' parts, perhaps left to the norm that reads it; without ranks the part."""
    if ranks is None:
        return part
    return ranks.summed(part, part.dtype, by_the_norm=ranks.peers_for(ops.kernels, part.device) is not None)


def whole_product(ops: Operations, x: Product) -> Tensor:
    """A product as a tensor, with its splits and ranks' parts added up."""
    return ops.add(x) if isinstance(x, SharedSums) else total_of(x)


def project_stack(
    ops: Operations,
    projections: tuple[Projection, ...],
    x: ProductRows,
    *,
    keep_splits: bool = False,
    tune_for_rows: int | None = None,
) -> tuple[Tensor | SplitSums, ...]:
    """Several products of the same rows, in one launch if all are plain.

    keep_splits: the reader adds up their splits. tune_for_rows: see project.
    """
    if (ranks := projections[0].joined_over) is not None:
        return _project_joined(ops, projections, x, ranks, tune_for_rows)
    weights = [projection.weight for projection in projections if projection.weight is not None]
    if len(weights) < len(projections):
        return tuple(project(ops, projection, x) for projection in projections)
    biases = [projection.bias for projection in projections]
    return ops.linear_stack(x, weights, biases, keep_splits=keep_splits, tune_for_rows=tune_for_rows)


def _project_joined(
    ops: Operations,
    projections: tuple[Projection, ...],
    x: ProductRows,
    ranks: Ranks,
    tune_for_rows: int | None,
) -> tuple[Tensor, ...]:
    """Products with rows on all ranks, by one launch and one exchange; several may be outputs of one weight."""
    distinct = {id(projection.weight): projection for projection in projections}
    weights = [projection.weight for projection in distinct.values() if projection.weight is not None]
    biases = [projection.bias for projection in distinct.values()]
    parts = [total_of(part) for part in ops.linear_stack(x, weights, biases, tune_for_rows=tune_for_rows)]
    columns = _joined(ops, ranks, parts[0] if len(parts) == 1 else torch.cat(parts, -1))
    by_weight = columns.unflatten(-1, (ranks.size, -1)).split([part.shape[-1] for part in parts], -1)
    whole = dict(zip(distinct, (part.flatten(-2) for part in by_weight), strict=True))
    return tuple(whole[id(each.weight)][..., each.outputs or slice(None)] for each in projections)


def add_norm(
    ops: Operations,
    norm: Norm | None,
    x: Tensor,
    update: Product | NormedUpdate | None = None,
    in_draft_pass: bool = False,
) -> tuple[Tensor, Tensor]:
    """(norm(x + update), x + update), [B, n, H] each; without a norm the sum twice, without an update x unchanged.

    `update` may be a product in separate splits or ranks' parts: they are added here, in the pass that reads them
    anyway. in_draft_pass: see layers.rms_norm.
    """
    normed, total = add_norm_for(ops, norm, x, update, in_draft_pass)
    assert isinstance(normed, Tensor)
    return normed, total


def add_norm_for(
    ops: Operations,
    norm: Norm | None,
    x: Tensor,
    update: Product | NormedUpdate | None = None,
    in_draft_pass: bool = False,
    total: Tensor | None = None,
    row_format: RowFormat | None = None,
) -> tuple[ProductRows, Tensor]:
    """`add_norm` for products that read `row_format`, see layers.rms_norm. total [B, n, H]: room for the sum."""
    own_weight = None
    if isinstance(update, NormedUpdate):
        own = update.norm
        rms = not own.subtract_mean and norm is not None and not norm.subtract_mean
        if norm is not None and rms and (own.eps, own.options) == (norm.eps, norm.options):
            own_weight, update = own.weight, update.product
        else:
            update = computed(ops, update)
    if norm is None:
        total = x if update is None else ops.add(update, x)
        return total, total
    options: dict[str, Any] = norm.options | dict(in_draft_pass=in_draft_pass, row_format=row_format)
    if update is None:
        return ops.rms_norm(x, norm.weight, norm.eps, **options), x
    return ops.add_rms_norm(update, x, norm.weight, norm.eps, total=total, own_weight=own_weight, **options)


def computed(ops: Operations, update: Product | NormedUpdate) -> Product:
    """The update, [..., H]."""
    return apply_norm(ops, update.norm, update.product) if isinstance(update, NormedUpdate) else update


def apply_norm(ops: Operations, norm: Norm, x: Product) -> Tensor:
    """norm(x), [B, n, H]; x may be a product in separate splits."""
    normed = ops.rms_norm(x, norm.weight, norm.eps, **norm.options)
    assert isinstance(normed, Tensor)
    return normed


def embed_norm(
    ops: Operations,
    norm: Norm | None,
    embedding: Tensor | SharedEmbedding,
    tokens: Tensor,
    in_draft_pass: bool = False,
    total: Tensor | None = None,
    row_format: RowFormat | None = None,
    scale: float = 1.0,
    own_norm: Norm | None = None,
) -> tuple[ProductRows, Tensor]:
    """(norm(x), x) of the embeddings x of tokens [B, n] times `scale`, like `add_norm`. own_norm: x is normed by it
    first. `total` [B, n, H]: room for x."""
    table = embedding.in_memory(ops.kernels) if isinstance(embedding, SharedEmbedding) else embedding
    if norm is None or table is None or scale != 1.0 or own_norm is not None:
        x = embedding[tokens] if scale == 1.0 else embedding[tokens] * scale
        x = x if own_norm is None else apply_norm(ops, own_norm, x)
        return add_norm_for(ops, norm, x, in_draft_pass=in_draft_pass, row_format=row_format)
    return ops.embed_rms_norm(
        tokens,
        table,
        norm.weight,
        norm.eps,
        in_draft_pass=in_draft_pass,
        total=total,
        row_format=row_format,
        **norm.options,
    )


def feed_forward(ops: Operations, mlp: MLP | Experts, x: ProductRows, tune_for_rows: int | None = None) -> Product:
    """The block after the mixer: [B, n, H] -> [B, n, H], perhaps as splits. tune_for_rows: see project."""
    if isinstance(mlp, Experts):
        x = whole_of(x)
        if mlp.weights is not None and (mlp.routed is not None or x.shape[:-1].numel() <= mlp.most_rows):
            return _chosen_experts(ops, mlp, mlp.weights, x, tune_for_rows)
        out = mlp.module(x)
        return out[0] if isinstance(out, tuple) else out  # transformers 4 returns the router's logits too
    gate, up, activation = mlp.gate, mlp.up, mlp.activation
    if gate is None:
        (raised,) = project_stack(ops, (up,), x, keep_splits=True, tune_for_rows=tune_for_rows)
        if isinstance(activation, str):
            return project_split(ops, mlp.down, ops.activate(raised, activation), tune_for_rows)
        return project_split(ops, mlp.down, activation(total_of(raised)), tune_for_rows)
    plain = gate.bias is None and up.bias is None and gate.joined_over is None
    if not isinstance(activation, str):
        gated, raised = project_stack(ops, (gate, up), x, tune_for_rows=tune_for_rows)
        inner = activation(total_of(gated)) * total_of(raised)
    elif plain and gate.weight is not None and up.weight is not None:
        inner = ops.linear_swiglu(
            x,
            gate.weight,
            up.weight,
            tune_for_rows=tune_for_rows,
            row_format=row_format_of(mlp.down),
            activation=activation,
        )
    else:
        gated, raised = project_stack(ops, (gate, up), x, tune_for_rows=tune_for_rows)
        inner = ops.swiglu(total_of(gated), total_of(raised), activation=activation)
    return project_split(ops, mlp.down, inner, tune_for_rows)


def _routed(ops: Operations, weights: ExpertWeights, x: Tensor) -> SplitSums:
    """Rows of x [n, H] through their chosen experts."""
    routes = ops.route(x, weights.router, weights.router_bias, weights.correction, weights.routing)
    inner = ops.experts_swiglu(
        x,
        weights.gate_up,
        weights.gate_up_bias,
        routes,
        interleaved=weights.interleaved,
        clamp=weights.clamp,
        gated=weights.gated,
    )
    return ops.experts_down(inner, weights.down, weights.down_bias, routes)


def _chosen_experts(
    ops: Operations, mlp: Experts, weights: ExpertWeights, x: Tensor, tune_for_rows: int | None
) -> Product:
    """Rows of x [B, n, H] through their chosen experts and a shared one."""
    rows = x.flatten(0, -2)
    part: Tensor | SplitSums
    if len(rows) <= mlp.most_rows:
        found = [_routed(ops, weights, group) for group in rows.split(MAX_ROWS)]
        sums = found[0].sums if len(found) == 1 else torch.cat([parts.sums for parts in found], 1)
        part = SplitSums(sums.unflatten(1, x.shape[:-1]), x.dtype)
    else:
        assert mlp.routed is not None, "the module runs more rows"
        part = mlp.routed(x)
    routed = _summed(ops, mlp.summed_over, part)
    if weights.shared is None:
        return routed
    shared = feed_forward(ops, weights.shared, x, tune_for_rows)
    if weights.shared_gate is not None:
        routed, shared = (
            each if isinstance(each, SplitSums) else whole_product(ops, each) for each in (routed, shared)
        )
        return ops.add_shared_expert(routed, shared, x, weights.shared_gate)
    return ops.add(routed, ops.add(shared))
