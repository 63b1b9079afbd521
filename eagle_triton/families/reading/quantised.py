"""Decides how quantised projections of a target and its draft run: read by their weights, or called as modules.

float8.py reads FP8 weights, four_bits.py four-bit weights. Nothing is copied, except biases in Marlin's order,
and the matrices of latent attention's keys and values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.model.latent_attention import LatentAttention
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.model.module_kinds import has_experts, is_mixture, is_plain_tensor, is_sharded_tensor
from eagle_triton.engine.model.modules import Experts, Projection, nbytes_of, with_changed, with_projections
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.reading.experts import blocks_read, read_experts
from eagle_triton.families.reading.float8 import holds_float8, is_float8_module, is_known_float8, read_float8
from eagle_triton.families.reading.float8_experts import is_float8_experts
from eagle_triton.families.reading.four_bits import is_four_bit_module, is_known_four_bits, read_four_bits
from eagle_triton.families.reading.latent_attention import WholeMatrices
from eagle_triton.families.reading.quantised_modules import (
    AS_PUBLISHED,
    DEQUANTIZE,
    EXACT,
    FINE_GRAINED,
    SCALES,
    is_compressed,
    name_of_scale,
)


class QuantisedReading(NamedTuple):
    """A target and its draft, with the way in which each quantised projection runs."""

    view: ModelView
    draft: Draft | None
    modules: frozenset[nn.Module]  # read by their weights
    copied: dict[str, Tensor]  # tensors of which copies are read, by dotted path
    notes: dict[str, str]  # for the report


def is_quantised_module(module: nn.Module) -> bool:
    """Whether a module has weights in FP8 or in four bits that may be read."""
    return is_float8_module(module) or is_four_bit_module(module) or is_float8_experts(module)


def with_quantised(
    view: ModelView, draft: Draft | None, roots: Mapping[str, nn.Module], activations: str = EXACT
) -> QuantisedReading:
    """The read models, with quantised modules read by weights and scales.

    roots: the models that they were read from, by their names in messages. activations: "as published" calls these
    modules instead. Modules of four bits are also called if this GPU has no fast kernel for them. Raises
    UnsupportedModelError for quantised weights that cannot be read, for FP8 weights that ranks share but would be
    called, and for weights of four bits that ranks share; ValueError for "as published" without such modules.
    """
    paths = {module: f"{root}.{path}" for root, model in roots.items() for path, module in model.named_modules()}
    read: dict[nn.Module, Projection] = {}
    kinds: Counter[str] = Counter()  # of weights of four bits
    called: set[nn.Module] = set()
    slow: set[nn.Module] = set()  # without a fast kernel, and impossible to call
    mixtures: set[nn.Module] = set()  # with FP8 experts that are read
    embeddings = [
        part.weight
        for part in paths
        if isinstance(part, nn.Embedding) and part.weight.dtype == view.dtype and is_plain_tensor(part.weight)
    ]
    tied: set[nn.Module] = set()  # transformers' FP8Linear with an embedding's weight, which it does not scale

    def change_mixture(mixture: Experts) -> Experts:
        block = mixture.module
        if block not in paths or not is_float8_experts(getattr(block, "experts", block)):
            return mixture
        found = read_experts(block, view.dtype, root=paths[block], float8=True)
        if found.weights is not None:
            mixtures.add(block)
        return found

    def change(projection: Projection) -> Projection:
        module = projection.module
        if not isinstance(module, nn.Module) or not is_quantised_module(module):
            return projection
        path = paths.get(module, type(module).__name__)
        of_eight = is_float8_module(module)
        if not of_eight and view.ranks is not None:
            raise UnsupportedModelError(
                f"{path} has weights of four bits, which ranks cannot share (tp_plan): load the model on one device",
                "devices",
            )
        known = is_known_float8(module) if of_eight else is_known_four_bits(module)
        if activations == AS_PUBLISHED or not known:
            if any(map(is_sharded_tensor, module.parameters(recurse=False))):
                raise UnsupportedModelError(
                    f"{path}.weight is sharded over several devices (tp_plan), but a module that is called must be "
                    f'whole: ranks can share FP8 weights with activations="{EXACT}", in modules of '
                    f"{', '.join(SCALES)} with their own forward",
                    "devices",
                )
            called.add(module)
            return projection
        own: Any = module
        if name_of_scale(module) == FINE_GRAINED and any(own.weight is weight for weight in embeddings):
            tied.add(module)
            return replace(projection, weight=own.weight, bias=own.bias, module=None)
        if module not in read:
            if of_eight:
                read[module] = _with_ranks(read_float8(module, path, view.dtype), projection)
            else:
                found, kind = read_four_bits(module, path, view.dtype)
                if not _has_fast_kernel(found.weight, view.dtype):
                    if not is_compressed(module):
                        called.add(module)
                        return projection
                    slow.add(module)
                read[module] = _with_ranks(found, projection)
                kinds[kind] += 1
        return read[module]

    if activations == EXACT:
        view, draft = (with_changed(part, Experts, change_mixture) for part in (view, draft))
    view, draft = with_projections(view, change), with_projections(draft, change)
    whole = WholeMatrices(paths, {id(found.weight): module for module, found in read.items()}, view.dtype)
    view, draft = (with_changed(part, LatentAttention, whole) for part in (view, draft))
    for module, path in paths.items():
        if is_compressed(module) and module not in read:
            raise UnsupportedModelError(
                f"{path} is compressed until the model's own forward runs, and cannot be called before: {DEQUANTIZE}",
                "quantisation",
            )
    others = [module if is_mixture(module) else module.experts for module in paths if has_experts(module)]
    by_weights = mixtures | blocks_read(view.layers)  # perhaps with FP8 in a shared expert only
    experts = sum(isinstance(other, nn.Module) and holds_float8(other) for other in others if other not in by_weights)
    if activations == AS_PUBLISHED and not (called or experts):
        raise ValueError(
            f'activations="{AS_PUBLISHED}": no projection of the model has FP8 weights, or weights of four bits'
        )
    eight = [module for module in read if is_float8_module(module)]
    notes = _note_on_float8(len(eight), sum(map(is_float8_module, called)), len(mixtures), experts)
    if kinds:
        four = [read[module] for module in read if module not in eight]
        notes["four_bits"] = _note_on_four_bits(kinds, four, len(slow))
    copied = {**_copied(read, paths), **whole.copied}
    return QuantisedReading(view, draft, frozenset(read) | tied, copied, notes | whole.notes)


def _has_fast_kernel(weight: Any, dtype: torch.dtype) -> bool:
    """Whether products with this weight of four bits are faster than its module's. On a GPU this is known for weights
    that ops/linear/hopper_four_bits.py reads; for others the portable kernel is slower."""
    if weight.device.type != "cuda":
        return True
    from eagle_triton.ops.linear.four_bits import has_fast_kernel  # needs Triton

    return has_fast_kernel(weight, dtype)


def _copied(read: Mapping[nn.Module, Projection], paths: Mapping[nn.Module, str]) -> dict[str, Tensor]:
    """The biases that were copied, by dotted path."""
    found = {}
    for module, projection in read.items():
        bias: Any = None if is_float8_module(module) else module.bias
        if bias is not None and projection.bias is not None and bias.data_ptr() != projection.bias.data_ptr():
            found[f"{paths.get(module, type(module).__name__)}.bias"] = bias
    return found


def _note_on_float8(read: int, called: int, mixtures: int, experts: int) -> dict[str, str]:
    notes = []
    parts = {"FP8 projections": read, "mixtures of experts in FP8": mixtures}
    if by_weights := " and ".join(f"{count} {what}" for what, count in parts.items() if count):
        notes.append(f"{EXACT}: {by_weights} are read by their weights, and their inputs are not rounded")
    if called:
        notes.append(f"{AS_PUBLISHED}: {called} FP8 projections are called as modules, which may round their inputs")
    if experts:
        notes.append(f"{experts} mixtures of experts with FP8 weights are called as modules, and round their inputs")
    return {"activations": "; ".join(notes)} if notes else {}


def _note_on_four_bits(kinds: Counter[str], projections: Sequence[Projection], slow: int) -> str:
    total = nbytes_of(*projections)
    named = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return (
        f"{len(projections)} projections of four bits are read by their weights, {total / 2**20:,.1f} MiB, and their "
        f"inputs are not rounded: {named}"
        + (f"; {slow} run the portable kernel, because this GPU has no fast one for them" if slow else "")
    )


def note_on_called(projections: Sequence[tuple[str, nn.Module]]) -> str | None:
    """The report's note on projections that are called as modules, without those in FP8, which have their own note;
    None if there are none."""
    others = [(path, module) for path, module in projections if not is_float8_module(module)]
    if not others:
        return None
    kinds = Counter(_name_of_class(module) for _, module in others)
    named = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"{len(others)} are called as modules, at their own speed: {named}; the first is {others[0][0]}"


def _name_of_class(module: nn.Module) -> str:
    package = type(module).__module__.partition(".")[0]
    own = " with its own forward" if "forward" in vars(module) else ""
    weight = type(module.weight) if type(module) is nn.Linear else nn.Parameter
    wrapped = "" if weight in (Tensor, nn.Parameter) else f" ({weight.__name__})"
    return f"{package}.{type(module).__name__}{wrapped}{own}"


def _with_ranks(found: Projection, shared: Projection) -> Projection:
    """The found projection, shared by ranks as the one that it replaces. One rank adds the bias of a sum."""
    ranks = shared.summed_over
    bias = found.bias if ranks is None or ranks.rank == 0 else None
    return replace(shared, weight=found.weight, bias=bias, module=None)
