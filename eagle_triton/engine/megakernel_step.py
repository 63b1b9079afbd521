"""The megakernel bound to one model and one state: its workspace, its launch settings, and when it cannot be used."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from eagle_triton import attention
from eagle_triton.engine.drafts.beams import BeamPlan, BeamSlots
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.drafts.eagle import Eagle1Draft, Eagle3Draft, EagleDraft
from eagle_triton.engine.mixers import Attention, KeyValueCache
from eagle_triton.engine.model import ModelView
from eagle_triton.engine.modules import Projection
from eagle_triton.engine.state import DecodeState
from eagle_triton.linear.settings import Settings, block_m_of, descriptors, launch_settings
from eagle_triton.megakernel.kernel import draft_verify_update_kernel
from eagle_triton.runtime.launch import DRAFT_WARPS, EXACT, launch
from eagle_triton.tree_decoding import topk_chunk_of

BARRIER_LIMIT = 1 << 18  # looks at a barrier before giving up: some tenths of a second
FASTER = {"NVIDIA H200": False}
"""Whether the megakernel was measured faster than the separate kernels, by device: results/megakernel-*-h200.json."""
MAX_ROWS = 64  # rows of a draft pass; more go to cuBLAS, which has no tiles to deal out


def unsupported(draft: Draft | None, state: DecodeState) -> str | None:
    """Why the megakernel cannot take a step of this state, or None if it can."""
    spec = state.spec
    if draft is None or spec.drafts == 0:
        return "nothing is drafted"
    reason = unsupported_draft(draft)
    if reason is not None:
        return reason
    caches = state.sequences.caches.caches
    if len(caches) != 1 or not isinstance(caches[0], KeyValueCache):
        return "the target's layers are not all attention of one shape"
    rows = state.batch * state.draft_tree_tensors.launch_nodes
    if rows > MAX_ROWS:
        return f"{rows} rows in a draft pass, more than {MAX_ROWS}"
    if spec.top_k > 64 or spec.top_k * max((1, *spec.beam_widths)) > 1024:
        return f"{spec.top_k} children for each of {max((1, *spec.beam_widths))} nodes"
    return None


def unsupported_draft(draft: Draft) -> str | None:
    """Why the megakernel cannot take a step of any state with this draft, or None if the state decides."""
    if not isinstance(draft, EagleDraft):
        return f"the draft is a {type(draft).__name__}, not a head"
    if len(draft.layers) != 1:
        return f"the draft head has {len(draft.layers)} layers"
    (layer,) = draft.layers
    if not isinstance(layer.mixer, Attention):
        return f"the draft head's layer is a {type(layer.mixer).__name__}, not attention"
    for name, projection in _projections(draft).items():
        if projection is None or projection.weight is None:
            return f"the draft head's {name} is not a plain product"
        if projection.bias is not None and name not in ("fc", "q", "k", "v"):
            return f"the draft head's {name} has a bias"
        if not projection.weight.is_contiguous():
            return f"the weight of the draft head's {name} is not contiguous"
    if layer.mixer.q_norm is not None or layer.mixer.sliding_window is not None:
        return "the draft head norms its queries or has a sliding window"
    eagle1 = isinstance(draft, Eagle1Draft)
    if eagle1 and (layer.input_norm is not None or draft.embedding.shape[1] != draft.hidden_size):
        return "the draft head is not shaped like EAGLE-1's"
    if not draft.embedding.is_contiguous():
        return "the draft head's embedding is not contiguous"
    return None


def _projections(draft: EagleDraft) -> dict[str, Projection | None]:
    """The head's products by the names that the kernel has for them."""
    (layer,) = draft.layers
    mixer, mlp = layer.mixer, layer.mlp
    return {
        "fc": draft.fc,
        "q": mixer.q,
        "k": mixer.k,
        "v": mixer.v,
        "o": mixer.o,
        "gate": mlp.gate,
        "up": mlp.up,
        "down": mlp.down,
        "head": draft.head,
    }


class MegakernelStep:
    """`verify_and_draft` of one state in one launch; holds the workspace. See megakernel/kernel.py.

    programs: how many share the work, None: one for each multiprocessor. `absent`: a program that misses every
    barrier, for tests of the fault. Raises ValueError if the model is unsupported.
    """

    def __init__(self, view: ModelView, draft: EagleDraft, state: DecodeState, programs: int | None = None):
        reason = unsupported(draft, state)
        if reason is not None:
            raise ValueError(f"the megakernel cannot be used: {reason}")
        self.view, self.draft, self.state = view, draft, state
        self.absent, self.limit = -1, BARRIER_LIMIT
        device = view.device
        if programs is None:
            programs = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self.programs = programs
        self.sync = torch.zeros(2, dtype=torch.int32, device=device)  # arrivals at barriers, error word
        self._arguments = self._collect()

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
            GREEDY=walk is None,
            num_warps=DRAFT_WARPS,
            num_stages=self.stages,
            **EXACT,
            **self._arguments,
            **options,
        )
        return self.path

    @staticmethod
    def _tile(use: dict[str, Settings], weights: dict[str, Tensor], block_m: int) -> Settings:
        """The one tile of all products but SwiGLU's: as deep as leaves every split of K where it is."""
        names = {"FC": "fc", "QKV": "q", "OUT": "o", "DOWN": "down", "HEAD": "head"}

        def split(depth: int, block_k: int, splits: int) -> int:
            return triton.cdiv(triton.cdiv(depth, block_k), splits) * block_k

        for block_k in (256, 128, 64, 32):
            if all(
                split(weights[name].shape[1], block_k, use[key].splits)
                == split(weights[name].shape[1], use[key].block_k, use[key].splits)
                for key, name in names.items()
            ):
                break
        first = use["FC"]
        if weights["fc"].element_size() > 2:
            return first._replace(block_k=min(block_k, first.block_k))
        shared = 200 if use["MLP"].block_n * use["MLP"].block_k > 4096 else 60  # KiB that such a device has
        stages = max(2, min(5, shared * 1024 // ((64 + block_m) * block_k * 2)))
        return Settings(64, block_k, 1, DRAFT_WARPS, stages, use["QKV"].swap)

    def _collect(self) -> dict[str, object]:
        """All arguments but the logits and features of a step."""
        view, draft, state = self.view, self.draft, self.state
        spec, batch, (layer,) = state.spec, state.batch, draft.layers
        plan: BeamPlan = state.draft_tree_tensors
        kept: BeamSlots = state.sequences.draft_tensors
        target_cache, draft_cache = state.sequences.caches.caches[0].data, kept.caches.layer(0)
        eagle3, attended = isinstance(draft, Eagle3Draft), layer.mixer
        norm_before_residual = isinstance(draft, Eagle3Draft) and draft.norm_before_residual
        device, dtype, hidden = view.device, view.dtype, draft.hidden_size
        rows, beam, steps = batch * plan.launch_nodes, max((1, *spec.beam_widths)), spec.depth + 1
        group = attended.num_heads // attended.num_kv_heads
        q_cols, kv_cols = attended.num_heads * attended.head_dim, attended.num_kv_heads * attended.head_dim
        inner, vocabulary = layer.mlp.gate.weight.shape[0], draft.head.weight.shape[0]
        biases = {f"{name}_bias_ptr": _projections(draft)[name].bias for name in ("fc", "q", "k", "v")}
        if any(biases[f"{name}_bias_ptr"] is not None for name in "qkv"):  # all or none
            for name in "qkv":
                bias = biases[f"{name}_bias_ptr"]
                cols = len(_projections(draft)[name].weight)
                biases[f"{name}_bias_ptr"] = torch.zeros(cols, dtype=dtype, device=device) if bias is None else bias
        weights = {name: projection.weight for name, projection in _projections(draft).items()}

        def settings(*names: str, fused: bool = False, whole: bool = False) -> Settings:
            cols = tuple(weights[name].shape[0] for name in names)
            depth = weights[names[0]].shape[1]
            found = launch_settings(device, dtype, rows, cols, depth, fused, in_draft_pass=True)
            return found._replace(splits=1) if whole else found

        use = {
            "FC": settings("fc"),
            "QKV": settings("q", "k", "v"),
            "OUT": settings("o"),
            "MLP": settings("gate", "up", fused=True),
            "DOWN": settings("down"),
            "HEAD": settings("head", whole=True),
        }
        self.stages = use["MLP"].stages
        block_m = block_m_of(rows)
        tile = self._tile(use, weights, block_m)
        keys = attention.settings_for(
            plan.launch_nodes * group,
            attended.head_dim,
            attended.num_kv_heads,
            state.capacity,
            dtype,
            torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else None,
        )

        def empty(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=kind, device=device)

        def zeros(*shape: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        products = max(
            use["FC"].splits * hidden,
            use["QKV"].splits * (q_cols + 2 * kv_cols),
            use["OUT"].splits * hidden,
            use["DOWN"].splits * hidden,
        )
        part = min(4096, max(16, triton.next_power_of_2(view.vocab_size)))
        parts, chunk = triton.cdiv(view.vocab_size, part), topk_chunk_of(vocabulary)
        chunks = triton.cdiv(vocabulary, chunk)
        slots = max(spec.beam_slots, 1)
        levels = torch.zeros(3, steps, dtype=torch.int32)
        levels[0, : len(spec.beam_widths)] = torch.tensor(spec.beam_widths, dtype=torch.int32)
        levels[1, 1:steps] = levels[0, : steps - 1].cumsum(0)
        levels[2, : spec.depth] = torch.tensor(spec.level_starts, dtype=torch.int32)
        self.path = empty(batch, steps, kind=torch.int32)
        self.accepted = empty(batch, kind=torch.int32)
        self.next_token = empty(batch, kind=torch.int64)
        words = plan.chain.shape[-1]
        width = max(2, triton.next_power_of_2(spec.nodes))
        aligned = {
            "target_cache_ptr": target_cache,
            "path_ptr": self.path,
            "accepted_ptr": self.accepted,
            "next_ptr": self.next_token,
            "nan_ptr": state.nan,
            "before_ptr": empty(batch, kind=torch.int32),
            "lengths_ptr": state.lengths,
            "active_ptr": state.active,
            "stop_ids_ptr": state.stops.ids,
            "limits_ptr": state.stops.limit,
            "exact_ptr": state.stops.exact,
            "report_ptr": state.report,
            "sequence_ptr": state.tokens,
            "embedding_ptr": draft.embedding,
            **{f"{name}_ptr": weight for name, weight in weights.items()},
            **biases,
            "token_norm_ptr": layer.input_norm.weight if eagle3 else None,
            "feature_norm_ptr": draft.hidden_norm.weight if eagle3 else None,
            "post_norm_ptr": layer.post_norm.weight,
            "norm_ptr": draft.norm.weight if eagle3 else None,
            "d2t_ptr": draft.d2t,
            "inv_freq_ptr": attended.rotary.inv_freq.contiguous(),
            "cache_ptr": draft_cache,
            "levels_ptr": levels.to(device),
            "chain_ptr": plan.chain,
            "beam_children_ptr": plan.beam_children,
            "selected_ptr": plan.selected,
            **{f"{name}_ptr": value for name, value in state.tree._asdict().items()},
            "sync_ptr": self.sync,
        }
        workspace = {
            "gathered_ptr": empty(batch * steps, view.feature_size),
            "products_ptr": empty(rows, products, kind=torch.float32),
            "inputs_ptr": empty(rows, 2 * hidden),
            "residual_ptr": empty(rows, hidden),
            "queries_ptr": empty(rows, q_cols),
            "partial_ptr": empty(batch * attended.num_kv_heads * keys.splits, plan.launch_nodes * group,
                                 attended.head_dim, kind=torch.float32),
            "lse_ptr": empty(batch * attended.num_kv_heads * keys.splits, plan.launch_nodes * group,
                             kind=torch.float32),
            "attended_ptr": empty(rows, q_cols),
            "x_ptr": empty(rows, hidden),
            "normed_ptr": empty(rows, hidden),
            "inner_ptr": empty(rows, inner),
            "hidden_ptr": empty(rows, hidden),
            "head_in_ptr": empty(rows, hidden),
            "last_hidden_ptr": kept.hidden,
            "last_normed_ptr": kept.normed,
            "logits_ptr": empty(rows, vocabulary),
            "ranks_ptr": empty(rows, chunks, spec.top_k, kind=torch.int64),
            "places_ptr": empty(batch * spec.nodes * parts, kind=torch.int32),
            "peaks_ptr": empty(max(rows * chunks, batch * spec.nodes * parts), kind=torch.float32),
            "masses_ptr": empty(rows, chunks, kind=torch.float32),
            "log_probs_ptr": empty(rows, spec.top_k, kind=torch.float32),
            "candidates_ptr": empty(batch, spec.candidates, kind=torch.int64),
            "scores_ptr": empty(batch, spec.candidates, kind=torch.float32),
            "beam_scores_ptr": zeros(spec.depth, batch, beam, kind=torch.float32),
            "beam_ancestors_ptr": zeros(spec.depth, batch, beam, words, kind=torch.int64),
            "beam_candidates_ptr": zeros(batch, slots, kind=torch.int64),
            "root_ptr": empty(batch, kind=torch.int64),
            "scratch_ptr": empty(batch, spec.nodes, kind=torch.int32),
        }  # fmt: skip
        described = {}
        for name, names, source in (
            ("fc", ("fc",), "gathered_ptr" if eagle3 else "inputs_ptr"),
            ("qkv", ("q", "k", "v"), "inputs_ptr" if eagle3 else "residual_ptr"),
            ("o", ("o",), "attended_ptr"),
            ("mlp", ("gate", "up"), "normed_ptr"),
            ("down", ("down",), "inner_ptr"),
            ("head", ("head",), "head_in_ptr" if eagle3 else "hidden_ptr"),
        ):
            tensors = [workspace[source], *(weights[weight] for weight in names)]
            setting = use["MLP"] if name == "mlp" else tile
            found = descriptors(tensors, block_m, setting)
            described |= dict(zip((f"{name}_in_desc", *(f"{weight}_desc" for weight in names)), found, strict=True))
        tma = described["fc_desc"] is not None
        sizes = {
            "nodes": spec.nodes,
            "columns": state.tokens.shape[1],
            "stops": state.stops.ids.shape[1],
            "target_vocabulary": view.vocab_size,
            "target_planes": target_cache[..., 0, 0].numel(),
            "target_heads": target_cache.shape[3],
            "feature_size": view.feature_size,
            "vocabulary": vocabulary,
            "capacity": state.capacity,
            "scale_log2": attended.scale * math.log2(math.e),
            "rotary_scaling": attended.rotary.attention_scaling,
            "token_eps": layer.input_norm.eps if eagle3 else 0.0,
            "feature_eps": draft.hidden_norm.eps if eagle3 else 0.0,
            "post_eps": layer.post_norm.eps,
            "norm_eps": draft.norm.eps if eagle3 else 0.0,
        }
        return {
            **aligned,
            **workspace,
            **described,
            **sizes,
            "PART": part,
            "PARTS": parts,
            "TARGET_D": target_cache.shape[-1],
            "STOPS": triton.next_power_of_2(state.stops.ids.shape[1]),
            "REPORT": state.report.shape[1],
            "EAGLE3": eagle3,
            "NORMED_RESIDUAL": norm_before_residual,
            "B": batch,
            "PASSES": spec.depth,
            "K": spec.top_k,
            "BEAM": beam,
            "SLOTS": spec.beam_slots,
            "CANDIDATES": spec.candidates,
            "HIDDEN": hidden,
            "INNER": inner,
            "HEADS": attended.num_kv_heads,
            "GROUP": group,
            "D": attended.head_dim,
            "WORDS": words,
            "TREE_WORDS": state.tree.ancestors.shape[-1],
            "NODES": width,
            "DOUBLINGS": (spec.nodes - 1).bit_length(),
            "CHUNKS": chunks,
            "PROGRAMS": self.programs,
            "TMA": tma,
            "UNIFORM": spec.selected is None,
            "EVEN_K": all(weight.shape[1] % tile.block_k == 0 for weight in weights.values())
            and hidden % use["MLP"].block_k == 0,
            "BLOCK_M": block_m,
            "BLOCK_H": triton.next_power_of_2(hidden),
            "CHUNK": chunk,
            "TILE": (tile.block_n, tile.block_k, tile.swap, tile.stages),
            "SPLITS": tuple(use[key].splits for key in ("FC", "QKV", "OUT", "DOWN")),
            "MLP": (use["MLP"].block_n, use["MLP"].block_k, use["MLP"].swap),
            "ATTENTION": (keys.block_m, keys.block_n, keys.splits, keys.min_tiles, keys.block_t),
        }  # fmt: skip
