"""The megakernel of one model and one state: its workspace, its launch settings, and when it cannot be used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from eagle_triton import attention as attention_settings
from eagle_triton.engine.drafts.beams import BeamPlan, BeamSlots
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.drafts.eagle import Eagle3Draft, EagleDraft
from eagle_triton.engine.memory.pages import PAGE_ROWS
from eagle_triton.engine.model.mixers import Attention, KeyValueCache
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.model.modules import MLP, Norm, Projection
from eagle_triton.engine.state import DecodeState
from eagle_triton.ops.attention_tiles import HeadSizes, KeyLayout, Splits, Tiles
from eagle_triton.ops.layers.rotary import Rotation
from eagle_triton.ops.linear.settings import MAX_ROWS, Settings, block_m_of, descriptors, launch_settings
from eagle_triton.ops.megakernel import tensors as arguments
from eagle_triton.ops.megakernel.kernel import draft_verify_update_kernel
from eagle_triton.ops.tree import topk_chunk_of
from eagle_triton.ops.views import Pages
from eagle_triton.runtime.float8_weight import Float8Weight
from eagle_triton.runtime.launch import DRAFT_WARPS, NO_FMA_FUSION, launch

BARRIER_LIMIT = 1 << 18  # polls of a barrier before giving up: a few tenths of a second
FASTER = {"NVIDIA H200": False}
"""Whether the megakernel was measured faster than the separate kernels, by device: results/megakernel-*-h200.json."""


class _UnsupportedError(Exception):
    """The megakernel does not support a draft head."""


@dataclass(frozen=True)
class _Head:
    """A draft head in the kernel's form: products, by the kernel's names, and norms."""

    weights: dict[str, Tensor]  # fc, q, k, v, o, gate, up, down, head
    biases: dict[str, Tensor | None]  # of fc, q, k and v
    attention: Attention
    post_norm: Norm
    token_norm: Norm | None  # this and the next two: EAGLE-3 only
    feature_norm: Norm | None
    norm: Norm | None
    norm_before_residual: bool
    embedding: Tensor
    d2t: Tensor | None

    @property
    def eagle3(self) -> bool:
        return self.token_norm is not None

    @staticmethod
    def of(draft: Draft) -> _Head:
        """Raises _UnsupportedError for a head that the kernel does not support."""
        if not isinstance(draft, EagleDraft):
            raise _UnsupportedError(f"the draft is a {type(draft).__name__}, not a head")
        if len(draft.layers) != 1:
            raise _UnsupportedError(f"the draft head has {len(draft.layers)} layers")
        (layer,) = draft.layers
        mixer, mlp = layer.mixer, layer.mlp
        if not isinstance(mixer, Attention) or not isinstance(mlp, MLP) or mlp.gate is None:
            kinds = f"{type(mixer).__name__} and {type(mlp).__name__}"
            raise _UnsupportedError(f"the draft head's layer is {kinds}, not attention and a SwiGLU block")
        if not layer.is_llamas or layer.post_norm is None:
            raise _UnsupportedError("the draft head norms what its blocks compute, or scales it")
        if mixer.q_norm is not None or mixer.sliding_window is not None:
            raise _UnsupportedError("the draft head norms its queries or has a sliding window")
        if mixer.k is None or mixer.v is None or mixer.v_norm is not None:
            raise _UnsupportedError("the draft head's values are its keys or normed, or it has no keys of its own")
        if mixer.gated or mixer.gate is not None or 2 * len(mixer.rotary.inv_freq) != mixer.head_dim:
            raise _UnsupportedError("the draft head gates its attention or rotates only a part of each head")
        rotary = mixer.rotary
        if rotary.pairs or not (rotary.round_tables and rotary.round_terms) or rotary.temperature is not None:
            raise _UnsupportedError("the draft head rotates in pairs, by unrounded tables or with a temperature")
        products: dict[str, Projection] = {"fc": draft.fc, "q": mixer.q, "k": mixer.k, "v": mixer.v, "o": mixer.o}
        products |= {"gate": mlp.gate, "up": mlp.up, "down": mlp.down, "head": draft.head}
        weights = {name: _plain_weight(name, projection) for name, projection in products.items()}
        eagle3 = isinstance(draft, Eagle3Draft)
        if isinstance(draft, Eagle3Draft) and (draft.norm_before_fc or draft.fc_norms or draft.norm_output):
            raise _UnsupportedError("the draft head norms the target's features or its own output (EAGLE 3.1)")
        norms = [layer.input_norm, layer.post_norm, draft.norm]
        if isinstance(draft, Eagle3Draft):
            norms.append(draft.hidden_norm)
        if any(norm is not None and norm.zero_centred for norm in norms):
            raise _UnsupportedError("the draft head has zero-centred norms")
        if any(norm is not None and not norm.round_first for norm in norms):
            raise _UnsupportedError("the draft head's norms round once, after their weight")
        if mlp.activation != "silu":
            raise _UnsupportedError(f"the draft head's block has the activation {mlp.activation}")
        if (draft.head.factor, draft.head.divisor, draft.head.cap) != (1.0, 1.0, None):
            raise _UnsupportedError("the target's logits, which the draft head borrows, are scaled or capped")
        if not eagle3 and (layer.input_norm is not None or draft.embedding.shape[1] != draft.hidden_size):
            raise _UnsupportedError("the draft head is not shaped like EAGLE-1's")
        if not draft.embedding.is_contiguous():
            raise _UnsupportedError("the draft head's embedding is not contiguous")
        return _Head(
            weights,
            {name: products[name].bias for name in _BIASED},
            mixer,
            layer.post_norm,
            draft.token_norm if isinstance(draft, Eagle3Draft) else None,
            draft.hidden_norm if isinstance(draft, Eagle3Draft) else None,
            draft.norm if eagle3 else None,
            isinstance(draft, Eagle3Draft) and draft.norm_before_residual,
            draft.embedding,
            draft.d2t,
        )


_BIASED = ("fc", "q", "k", "v")  # products that may have a bias


def _plain_weight(name: str, projection: Projection) -> Tensor:
    if projection.weight is None:
        raise _UnsupportedError(f"the draft head's {name} is not a plain product")
    if not isinstance(projection.weight, Tensor):
        kind = "FP8" if isinstance(projection.weight, Float8Weight) else "in four bits"
        raise _UnsupportedError(f"the weight of the draft head's {name} is {kind}")
    if projection.bias is not None and name not in _BIASED:
        raise _UnsupportedError(f"the draft head's {name} has a bias")
    if not projection.weight.is_contiguous():
        raise _UnsupportedError(f"the weight of the draft head's {name} is not contiguous")
    return projection.weight


def unsupported_draft(draft: Draft) -> str | None:
    """Why the megakernel supports no state with this draft; None if it may support one."""
    try:
        _Head.of(draft)
    except _UnsupportedError as error:
        return str(error)
    return None


def unsupported(draft: Draft | None, state: DecodeState) -> str | None:
    """Why the megakernel cannot take a step of this state; None if it can."""
    spec = state.spec
    if draft is None or spec.drafts == 0:
        return "nothing is drafted"
    if (reason := unsupported_draft(draft)) is not None:
        return reason
    if spec.adaptive:
        return "the depth of the trees is adaptive"
    caches = state.sequences.caches.caches
    if len(caches) != 1 or type(caches[0]) is not KeyValueCache:
        return "the target's layers are not all attention of one shape"
    rows = state.batch * state.draft_tree_tensors.tune_for_nodes
    if rows > MAX_ROWS:
        return f"{rows} rows in a draft pass, more than {MAX_ROWS}"  # cuBLAS runs the products of more rows
    if spec.top_k > 64 or spec.top_k * max((1, *spec.beam_widths)) > 1024:
        return f"{spec.top_k} children for each of {max((1, *spec.beam_widths))} nodes"
    return None


@dataclass(frozen=True)
class _Launches:
    """The launch settings of the separate kernels' products in a draft pass. The megakernel uses the same splits of
    K."""

    fc: Settings
    qkv: Settings
    o: Settings
    mlp: Settings
    down: Settings
    head: Settings

    @staticmethod
    def of(weights: dict[str, Tensor], rows: int) -> _Launches:
        def settings(*names: str, fused: bool = False) -> Settings:
            first, cols = weights[names[0]], tuple(len(weights[name]) for name in names)
            found = launch_settings(first.device, first.dtype, rows, cols, first.shape[1], fused, in_draft_pass=True)
            assert found is not None, f"the products of few rows do not take {rows} rows"
            return found

        return _Launches(
            settings("fc"),
            settings("q", "k", "v"),
            settings("o"),
            settings("gate", "up", fused=True),
            settings("down"),
            settings("head")._replace(splits=1),
        )

    def tile(self, weights: dict[str, Tensor], block_m: int) -> Settings:
        """The tile of all products except SwiGLU's: the deepest that does not move any split of K."""
        products = {"fc": self.fc, "q": self.qkv, "o": self.o, "down": self.down, "head": self.head}

        def split(depth: int, block_k: int, splits: int) -> int:
            return triton.cdiv(triton.cdiv(depth, block_k), splits) * block_k

        for block_k in (256, 128, 64, 32):
            if all(
                split(weights[name].shape[1], block_k, use.splits)
                == split(weights[name].shape[1], use.block_k, use.splits)
                for name, use in products.items()
            ):
                break
        if weights["fc"].element_size() > 2:
            return self.fc._replace(block_k=min(block_k, self.fc.block_k))
        shared = 200 if self.mlp.block_n * self.mlp.block_k > 4096 else 60  # KiB; large tiles need a device with more
        stages = max(2, min(5, shared * 1024 // ((64 + block_m) * block_k * 2)))
        return Settings(64, block_k, 1, DRAFT_WARPS, stages, self.qkv.swap)


class MegakernelStep:
    """`verify_and_draft` of one state in one launch; holds the workspace. See ops/megakernel/.

    programs: how many share the work; None: one for each multiprocessor. `absent`: a program that skips every barrier,
    to test a fault. Raises ValueError if the model is unsupported.
    """

    def __init__(self, view: ModelView, draft: Draft | None, state: DecodeState, programs: int | None = None):
        reason = unsupported(draft, state)
        if reason is not None or draft is None:
            raise ValueError(f"the megakernel cannot be used: {reason}")
        device = view.device
        if programs is None:
            programs = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self.view, self.state, self.programs, self.head = view, state, programs, _Head.of(draft)
        self.absent, self.limit = -1, BARRIER_LIMIT
        self.plan: BeamPlan = state.draft_tree_tensors
        self.rows = state.batch * self.plan.tune_for_nodes  # of a draft pass
        self.launches = _Launches.of(self.head.weights, self.rows)
        self.stages = self.launches.mlp.stages
        batch, steps = state.batch, state.spec.depth + 1
        self.sync = torch.zeros(2, dtype=torch.int32, device=device)  # arrivals at barriers, error word
        self.path = torch.empty(batch, steps, dtype=torch.int32, device=device)
        self.accepted = torch.empty(batch, dtype=torch.int32, device=device)
        self.next_token = torch.empty(batch, dtype=torch.int64, device=device)
        keys = self._attention_settings()
        workspace = self._workspace(keys)
        described, tiles = self._products(workspace)
        self._arguments = {**self._views(), "work": workspace, **described}
        self._sizes = self._constants(keys, tiles, described["fc_desc"] is not None)

    def __call__(self, logits: Tensor, features: Tensor, walk: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        """Verify (greedily, or take `walk`: path, accepted and next token), commit, and draft the next tree.

        logits [B, N, V] and features [B, N, F] of the tree's nodes. Returns the accepted path [B, D + 1] int32. After a
        fault the report's reasons are FAULT.
        """
        if walk is not None:
            for place, value in zip((self.path, self.accepted, self.next_token), walk, strict=True):
                place.copy_(value)
        self.sync.zero_()
        options = {"launch_cooperative_grid": True} if self.programs > 1 else {}
        launch(draft_verify_update_kernel, (self.programs,))(
            logits.contiguous(),
            features.contiguous(),
            absent=self.absent,
            limit=self.limit,
            SIZES=self._sizes._replace(greedy=walk is None),
            num_warps=DRAFT_WARPS,
            num_stages=self.stages,
            **NO_FMA_FUSION,
            **self._arguments,
            **options,
        )
        return self.path

    # --- the kernel's arguments, except a step's logits and features ---

    @property
    def _group(self) -> int:
        return self.head.attention.num_heads // self.head.attention.num_kv_heads

    @property
    def _target_cache(self) -> KeyValueCache:
        (cache,) = self.state.sequences.caches.caches
        assert isinstance(cache, KeyValueCache)
        return cache

    @property
    def _scanning(self) -> arguments.Scanning:
        part = min(4096, max(16, triton.next_power_of_2(self.view.vocab_size)))
        chunk = topk_chunk_of(vocabulary := len(self.head.weights["head"]))
        return arguments.Scanning(part, triton.cdiv(self.view.vocab_size, part), chunk, triton.cdiv(vocabulary, chunk))

    def _attention_settings(self) -> attention_settings.Settings:
        mixer, device = self.head.attention, self.view.device
        settings = attention_settings.settings_for(
            self.plan.tune_for_nodes * self._group,
            mixer.head_dim,
            mixer.num_kv_heads,
            self.state.batch,
            self.view.dtype,
            torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else None,
        )
        if mixer.head_dim > 128:  # larger tiles were not compiled beside the other phases
            settings = settings._replace(block_n=min(settings.block_n, 32), block_t=min(settings.block_t, 32))
        return settings

    def _views(self) -> dict[str, object]:
        """Views of the state's and the model's tensors."""
        state, view, plan, spec = self.state, self.view, self.plan, self.state.spec
        cache, kept = self._target_cache.data, state.sequences.draft_tensors
        assert isinstance(kept, BeamSlots)
        levels = torch.zeros(3, spec.depth + 1, dtype=torch.int32, device="cpu")
        levels[0, : len(spec.beam_widths)] = torch.tensor(spec.beam_widths, dtype=torch.int32, device="cpu")
        levels[1, 1:] = levels[0, :-1].cumsum(0)
        levels[2, : spec.depth] = torch.tensor(spec.level_starts, dtype=torch.int32, device="cpu")
        layers, _, _, heads = cache.shape[:4]
        table = state.sequences.pages.table
        before = torch.empty(state.batch, dtype=torch.int32, device=view.device)
        return {
            "target": arguments.Target(
                cache, layers * 2 * state.batch * heads, heads, cache.stride(2), view.vocab_size, view.feature_size
            ),
            "pages": Pages(table, table.stride(0)),
            "sequences": arguments.SequenceTensors(
                state.tokens,
                state.tokens.shape[1],
                state.lengths,
                state.active,
                state.report,
                state.sampling.step,
                before,
            ),
            "verified": arguments.Verified(self.path, self.accepted, self.next_token, state.nan),
            "stopping": arguments.Stopping(
                state.stops.ids, state.stops.ids.shape[1], state.stops.limit, state.stops.exact
            ),
            "tree": arguments.TreeTensors(*state.tree, nodes=spec.nodes),
            "plan": arguments.Plan(levels.to(view.device), plan.chain, plan.beam_children, plan.selected),
            "draft": arguments.DraftTensors(kept.caches.layer(0).data, kept.hidden, kept.normed),
            "layer": self._layer(),
            "sync_ptr": self.sync,
        }

    def _layer(self) -> arguments.HeadLayer:
        head, mixer, biases = self.head, self.head.attention, dict(self.head.biases)
        if any(biases[name] is not None for name in "qkv"):  # all or none
            for name in "qkv":
                given, weight = biases[name], head.weights[name]
                biases[name] = weight.new_zeros(len(weight), dtype=self.view.dtype) if given is None else given
        products: dict[str, Any] = {**head.weights, **{f"{name}_bias": bias for name, bias in biases.items()}}
        return arguments.HeadLayer(
            embedding=head.embedding,
            **products,
            vocabulary=len(head.weights["head"]),
            d2t=head.d2t,
            token_norm=_weight(head.token_norm),
            token_eps=_eps(head.token_norm),
            feature_norm=_weight(head.feature_norm),
            feature_eps=_eps(head.feature_norm),
            post_norm=head.post_norm.weight,
            post_eps=head.post_norm.eps,
            norm=_weight(head.norm),
            norm_eps=_eps(head.norm),
            inv_freq=mixer.rotary.inv_freq.contiguous(),
            rotary_scaling=mixer.rotary.attention_scaling,
            scale_log2=mixer.scale * math.log2(math.e),
        )

    def _workspace(self, keys: attention_settings.Settings) -> arguments.Workspace:
        """Memory in which phases pass data on."""
        state, spec, use, mixer = self.state, self.state.spec, self.launches, self.head.attention
        batch, rows, weights = state.batch, self.rows, self.head.weights
        hidden, inner, vocabulary = len(weights["o"]), len(weights["gate"]), len(weights["head"])
        q_cols, kv_cols = len(weights["q"]), len(weights["k"])
        beam, words = max((1, *spec.beam_widths)), self.plan.chain.shape[-1]
        _, parts, _, chunks = self._scanning
        products = max(
            hidden * max(use.fc.splits, use.o.splits, use.down.splits), use.qkv.splits * (q_cols + 2 * kv_cols)
        )
        splits, queries = batch * mixer.num_kv_heads * keys.splits, self.plan.tune_for_nodes * self._group

        def empty(*shape: int, kind: torch.dtype = self.view.dtype) -> Tensor:
            return torch.empty(shape, dtype=kind, device=self.view.device)

        def zeros(*shape: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=self.view.device)

        return arguments.Workspace(
            gathered=empty(batch * (spec.depth + 1), self.view.feature_size),
            products=empty(rows, products, kind=torch.float32),
            inputs=empty(rows, 2 * hidden),
            residual=empty(rows, hidden),
            queries=empty(rows, q_cols),
            partial=empty(splits, queries, mixer.head_dim, kind=torch.float32),
            softmax=empty(splits, 2, queries, kind=torch.float32),
            attended=empty(rows, q_cols),
            x=empty(rows, hidden),
            normed=empty(rows, hidden),
            inner=empty(rows, inner),
            hidden=empty(rows, hidden),
            head_in=empty(rows, hidden),
            logits=empty(rows, vocabulary),
            ranks=empty(rows, chunks, spec.top_k, kind=torch.int64),
            places=empty(batch * spec.nodes * parts, kind=torch.int32),
            peaks=empty(max(rows * chunks, batch * spec.nodes * parts), kind=torch.float32),
            masses=empty(rows, chunks, kind=torch.float32),
            log_probs=empty(rows, spec.top_k, kind=torch.float32),
            candidates=empty(batch, spec.candidates, kind=torch.int64),
            scores=empty(batch, spec.candidates, kind=torch.float32),
            beam_scores=zeros(spec.depth, batch, beam, kind=torch.float32),
            beam_ancestors=zeros(spec.depth, batch, beam, words, kind=torch.int64),
            beam_candidates=zeros(batch, max(spec.beam_slots, 1), kind=torch.int64),
            root=empty(batch, kind=torch.int64),
            scratch=empty(batch, spec.nodes, kind=torch.int32),
        )

    def _products(self, workspace: arguments.Workspace) -> tuple[dict[str, object], arguments.ProductTiles]:
        """Descriptors of the products, by the kernel's arguments, and their tiles."""
        weights, use, eagle3 = self.head.weights, self.launches, self.head.eagle3
        block_m = block_m_of(self.rows)
        tile = use.tile(weights, block_m)
        described: dict[str, object] = {}
        for name, names, source in (
            ("fc", ("fc",), workspace.gathered if eagle3 else workspace.inputs),
            ("qkv", ("q", "k", "v"), workspace.inputs if eagle3 else workspace.residual),
            ("o", ("o",), workspace.attended),
            ("mlp", ("gate", "up"), workspace.normed),
            ("down", ("down",), workspace.inner),
            ("head", ("head",), workspace.head_in if eagle3 else workspace.hidden),
        ):
            tensors = [source, *(weights[weight] for weight in names)]
            found = descriptors(tensors, block_m, use.mlp if name == "mlp" else tile)
            described |= dict(zip((f"{name}_in_desc", *(f"{weight}_desc" for weight in names)), found, strict=True))
        depths = [weight.shape[1] for weight in weights.values()]
        tiles = arguments.ProductTiles(
            block_m,
            tile.block_n,
            tile.block_k,
            tile.swap,
            tile.stages,
            use.mlp.block_n,
            use.mlp.block_k,
            use.mlp.swap,
            use.fc.splits,
            use.qkv.splits,
            use.o.splits,
            use.down.splits,
            even=all(depth % tile.block_k == 0 for depth in depths) and len(weights["o"]) % use.mlp.block_k == 0,
        )
        return described, tiles

    def _constants(
        self, keys: attention_settings.Settings, products: arguments.ProductTiles, tma: bool
    ) -> arguments.Sizes:
        state, spec, head = self.state, self.state.spec, self.head
        mixer, weights = head.attention, head.weights
        return arguments.Sizes(
            arguments.HeadShape(
                len(weights["o"]),
                len(weights["gate"]),
                mixer.num_kv_heads,
                self._group,
                mixer.head_dim,
                len(weights["q"]),
                len(weights["k"]),
                PAGE_ROWS,
                head.eagle3,
                head.norm_before_residual,
            ),
            arguments.TreeShape(
                state.batch,
                spec.depth,
                spec.top_k,
                max((1, *spec.beam_widths)),
                spec.beam_slots,
                spec.candidates,
                max(2, triton.next_power_of_2(spec.nodes)),
                self.plan.chain.shape[-1],
                state.tree.ancestors.shape[-1],
                spec.selected is None,
            ),
            self._scanning,
            products,
            Rotation(mixer.num_kv_heads, self._group, mixer.head_dim // 2, 0, products.qkv_splits),
            arguments.AttentionSizes(
                KeyLayout(PAGE_ROWS, mixer.head_dim, self.plan.chain.shape[-1]),
                HeadSizes(mixer.head_dim, self._group, mixer.num_kv_heads, word_order=False),
                Splits(keys.splits, keys.splits, keys.min_tiles),
                Tiles(keys.block_m, keys.block_n, keys.block_t, max(16, triton.next_power_of_2(mixer.head_dim))),
            ),
            self._target_cache.data.shape[-1],
            triton.next_power_of_2(state.stops.ids.shape[1]),
            state.report.shape[1],
            self.programs,
            greedy=True,
            tma=tma,
        )


def _weight(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight


def _eps(norm: Norm | None) -> float:
    return 0.0 if norm is None else norm.eps
