"""`ea_layer.topK_genrate` on the engine's operations, for code that drives an EaModel itself."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle_triton.engine.drafts.eagle import Eagle1Draft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.memory.pages import PAGE_ROWS
from eagle_triton.engine.model.mixers import KeyValues, NewRows
from eagle_triton.engine.model.modules import project
from eagle_triton.engine.operations import write_rows
from eagle_triton.engine.prefill import CHUNK
from eagle_triton.engine.state import DecodeState, Sequences, capacity_bucket, scratch_rows
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.families.methods import draft_of
from eagle_triton.models.tree import retrieve_paths
from eagle_triton.operands.ancestors import ancestor_matrix
from eagle_triton.patching import Fallback, PatchPoint


class KeptRows(tuple):
    """What `ea_layer.stable_kv` holds: per layer (keys, values), each [1, Hkv, S, d], which `state` holds too."""

    state: DecodeState

    @staticmethod
    def of(state: DecodeState, count: int) -> KeptRows:
        """The first `count` rows of a state's draft cache."""
        used = -(-count // PAGE_ROWS)
        pages = state.sequences.pages.table[0, :used].long()
        layers = (layer.data[:, pages].movedim(1, 2).flatten(2, 3)[:, None, :, :count] for layer in _layers(state))
        rows = KeptRows((keys, values) for keys, values in layers)
        rows.state = state
        return rows

    def __deepcopy__(self, memo: dict) -> tuple:
        return tuple((keys.clone(), values.clone()) for keys, values in self)


def _layers(state: DecodeState) -> list[KeyValues]:
    """Keys and values of each of the draft's layers."""
    draft = state.sequences.draft_tensors
    return [draft.caches.layer(index) for index in range(draft.caches.count)]


def draft_patch_point(model: Any, engine: Engine) -> PatchPoint:
    """`ea_layer.topK_genrate` of a model with a head that drafts dynamic trees, or fixed ones with the same result."""
    ea_layer, lm_head = model.ea_layer, model.base_model.lm_head
    ops, draft = engine.ops, draft_of(engine)
    view = replace(engine.view, layers=())  # nothing of the target is remembered here
    newest: weakref.WeakKeyDictionary[DecodeState, int] = weakref.WeakKeyDictionary()  # rows kept last in each state

    def topK_genrate(
        hidden_states: Tensor, input_ids: Tensor, head: Any, logits_processor: Any = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draft the next tree.

        hidden_states: [1, T, F] target features of the tokens committed since the last call (or of all, after
        `reset_kv`). input_ids: [1, L] int64, the whole sequence with the root as its last token. head: the target's
        LM head. logits_processor: only whether it is None counts, for the order of the paths.
        Returns draft_tokens [1, N] int64 (root first), retrieve_indices [leaves, depth + 1] int64 on the CPU (node
        indices of each path, padded with -1), tree_mask [1, 1, N, N] fp32 (1: self or ancestor) and
        tree_position_ids [N] int64 (depths).
        """
        kept = getattr(ea_layer, "stable_kv", None)
        known, length = 0 if kept is None else kept[0][0].shape[2], input_ids.shape[-1] - 1
        expected = (1, length - known, engine.view.feature_size)
        if input_ids.shape[0] != 1 or length == known or hidden_states.shape != expected:
            raise Fallback(f"hidden_states must be {expected} for this input, got {tuple(hidden_states.shape)}")
        if hidden_states.dtype != view.dtype:
            raise Fallback(f"hidden_states must be {view.dtype}, got {hidden_states.dtype}")
        if isinstance(draft, Eagle1Draft) and head != getattr(model, "logit_head", lm_head):
            raise Fallback("head must be the target's lm_head, or model.logit_head where the family scales logits")
        if torch.is_autocast_enabled(engine.device.type):
            raise Fallback("torch.autocast is on")
        if engine.watch is not None and (change := engine.watch.change()):
            raise Fallback(change)
        with engine.running():
            return draft_tree(hidden_states, input_ids, kept, known, length, logits_processor is not None)

    @torch.no_grad()
    def draft_tree(
        hidden_states: Tensor, input_ids: Tensor, kept: Any, known: int, length: int, by_path: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        state = _state(kept, known, length, draft.read_tree())
        state.tokens[0, : length + 1] = input_ids[0]
        for first in range(known, length, CHUNK):
            after = min(first + CHUNK, length)
            state.lengths.fill_(first)
            features = hidden_states[:, first - known : after - known]
            following, caches = state.tokens[:, first + 1 : after + 1], state.sequences.draft_tensors.caches
            hidden, normed = draft.take_in(ops, features, following, caches, NewRows(state.lengths, state.lengths))
        state.lengths.fill_(length)
        ea_layer.stable_kv = KeptRows.of(state, length)
        newest[state] = length
        state.sequences.draft_tensors.hidden.copy_(hidden[:, -1:])
        state.sequences.draft_tensors.normed.copy_(normed[:, -1:])
        draft.grow(ops, state)
        if project(ops, draft.head, normed[:, -1:]).isnan().any():
            raise RuntimeError("the draft head's logits contain NaN: no tree can be drafted from them")

        tree = state.tree
        paths = retrieve_paths(tree.parents[0].tolist(), by_path=by_path)
        mask = ancestor_matrix(tree.ancestors, state.spec.nodes)
        return tree.tokens.clone(), torch.tensor(paths, device="cpu"), mask.float()[:, None], tree.depths[0].long()

    def _state(kept: Any, known: int, length: int, spec: TreeSpec) -> DecodeState:
        """The state that holds the kept rows, if it can be used, else a new one with a copy of them.

        It cannot if a later call kept rows after them, because the caller may go back to those later rows.
        """
        needed = length + 1 + scratch_rows(spec, draft)
        state = getattr(kept, "state", None)
        if state is not None and state.spec == spec and state.capacity >= needed and newest.get(state) == known:
            return state
        state = DecodeState(Sequences(view, draft, 1, capacity_bucket(needed)), draft, spec)
        for layer, pair in zip(_layers(state), kept or (), strict=False):
            rows = torch.stack(tuple(pair), dim=2).transpose(1, 3)  # [1, S, 2, Hkv, d]
            write_rows(layer.data, rows[:, :known], state.lengths.new_zeros(1), layer.table)
        return state

    return PatchPoint(ea_layer, "topK_genrate", topK_genrate, "ea_layer.topK_genrate", "draft tree on the operations")
