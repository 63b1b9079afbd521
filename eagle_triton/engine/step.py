"""One decode step: target forward over the tree, verify, commit, and the next draft tree.

    tree -> target_forward -> verify -> update_sequence, commit -> draft_extend -> grow_tree -> tree

Nothing here asks how long a sequence is: shapes are fixed by the state, lengths are read by the operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from eagle_triton.adapters.view import MLP, Attention, DraftView, Layer, ModelView, Norm, Projection
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.state import DecodeState
from eagle_triton.partials import Partials

if TYPE_CHECKING:  # its module needs Triton
    from eagle_triton.engine.fused import FusedStep


class Mode(NamedTuple):
    """What the sequences of a step ask of it; a graph is captured for each."""

    sampled: bool = False  # verify by sampling, else by argmax
    top_p_first: bool = False  # when sampling: top-p before top-k
    follows: bool = False  # when nothing is drafted: keep the features that the draft will ask for
    processed: bool = False  # repetition penalties and logit biases
    logprobs: bool = False  # report log-probabilities


def decode_step(
    ops: Operations,
    view: ModelView,
    draft: DraftView | None,
    state: DecodeState,
    mode: Mode,
    fused: FusedStep | None = None,
) -> None:
    """Advance every active sequence of `state` by its accepted drafts and one token, and draft its next tree.

    `fused`: the megakernel bound to this state, to do all behind the target forward in one launch.
    """
    tree, sequences = state.tree, state.sequences
    positions = state.lengths[:, None] + tree.depths
    hidden, features = target_forward(
        ops, view, tree.tokens, state.target_cache, state.lengths, positions, tree.ancestors
    )
    logits, before = project(ops, view.head, hidden), state.lengths.clone() if mode.logprobs else None
    law = ops.process_logits(logits, tree.tokens, tree.ancestors, sequences.rules) if mode.processed else logits
    path = verify_and_draft(ops, draft, state, law, features, mode, fused)
    if mode.processed:  # beside what is committed, the next root: it is on every path
        sequences.rules.seen.scatter_(1, torch.where(state.emitted < 0, tree.tokens[:, :1], state.emitted), 1)
    if mode.logprobs:
        _report_logprobs(ops, state, logits, path, before)


def verify_and_draft(
    ops: Operations,
    draft: DraftView | None,
    state: DecodeState,
    logits: Tensor,
    features: Tensor,
    mode: Mode,
    fused: FusedStep | None = None,
) -> Tensor:
    """All of a step behind the target forward: verify, commit, and draft the next tree, in place.

    logits [B, N, V], by which the nodes are judged, and features [B, N, F] of the tree's nodes. `draft` may be None if
    the tree is a root alone. Returns the accepted path [B, D + 1] int32, as verification does.
    """
    tree, depth, sequences = state.tree, state.spec.depth, state.sequences
    walk = None
    if mode.sampled:
        walk = ops.verify_sampling(
            logits, tree.tokens, tree.parents, depth, state.sampling, mode.top_p_first, nan=state.nan
        )
    if fused is not None:
        ops.calls["draft_verify_update"] += 1
        path = fused(logits, features, walk)
        state.sampling.step.add_(1)
        return path
    if walk is None:
        walk = ops.verify_greedy(logits, tree.tokens, tree.parents, depth, nan=state.nan)
    path, accepted, next_token = walk
    before = state.lengths.clone()
    ops.update_sequence(
        state.tokens,
        state.lengths,
        state.active,
        tree.tokens,
        path,
        accepted,
        next_token,
        state.nan,
        sequences.stops,
        state.report,
    )
    ops.commit(state.target_cache, before, path, accepted)
    state.sampling.step.add_(1)
    if not depth:
        tree.tokens.copy_(ops.sequence_rows(state.tokens, state.lengths, 1))
        if mode.follows:
            sequences.lag.keep(before, features)
        return path
    emitted = ops.sequence_rows(state.tokens, before + 1, depth + 1)
    outputs = draft_extend(
        ops,
        draft,
        ops.gather_rows(features, path),
        emitted,
        state.draft_cache,
        draft.rows(before),
        state.chain,
        state.planned_nodes,
    )
    for kept, rows in zip((sequences.hidden, sequences.normed), outputs, strict=True):
        ops.gather_rows(rows, accepted[:, None], out=kept)
    grow_tree(ops, draft, state, sequences.hidden, sequences.normed)
    return path


def _report_logprobs(ops: Operations, state: DecodeState, logits: Tensor, path: Tensor, before: Tensor) -> None:
    """Complete the report of a step that began at lengths `before`, and remember the next root's log-probability.

    logits [B, N, V] as the target gave them: neither temperature, filters, penalties nor biases count.
    """
    following = ops.sequence_rows(state.tokens, before + 1, path.shape[1])
    values = token_logprobs(ops.gather_rows(logits, path), following)
    root, reported = state.sequences.root_logprob, state.logprobs_of(state.report)
    reported[:, 0] = root
    reported[:, 1:] = values[:, :-1]
    last = (path >= 0).sum(1, keepdim=True) - 1
    root.copy_(values.gather(1, last)[:, 0])


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-softmax in fp32 of logits [B, n, V] at tokens [B, n]: [B, n]."""
    wide = logits.float()
    return wide.gather(2, tokens[:, :, None])[:, :, 0] - wide.logsumexp(-1)


def target_forward(
    ops: Operations,
    view: ModelView,
    tokens: Tensor,
    cache: Tensor,
    lengths: Tensor,
    positions: Tensor,
    ancestors: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The target over N new tokens per sequence, whose keys and values land in cache rows lengths .. lengths + N.

    tokens [B, N] int64; cache [layers, 2, B, Hkv, T, d]; positions [B, N] int32; ancestors [B, N, W] or None (causal).
    Returns the normed last hidden states [B, N, H] and the features for the draft head [B, N, F].
    """
    rows = Rows(cache, lengths, lengths, positions, ancestors)
    x, update, features = view.embedding[tokens], None, []
    for index, layer in enumerate(view.layers):
        normed, x = add_norm(ops, layer.input_norm, x, update)
        if index in view.feature_layers:
            features.append(x)
        x, update = decoder_layer(ops, layer, normed, x, rows.of_layer(index))
    hidden, _ = add_norm(ops, view.norm, x, update)
    return hidden, torch.cat(features, dim=-1) if features else hidden


def draft_extend(
    ops: Operations,
    draft: DraftView,
    features: Tensor,
    tokens: Tensor,
    cache: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None = None,
    planned: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The draft over consecutive rows lengths .. lengths + n of its cache, from true target features.

    tokens [B, n] in these rows, features [B, n, F] of the positions before the tokens'; `ancestors` [B, n, W] may say
    in bits what None does: each row sees those before it. `planned`: see Rows. Returns as draft_forward.
    """
    positions = lengths[:, None] + torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    rows = Rows(cache, lengths, lengths, positions, ancestors, planned)
    if draft.kind == "eagle3":
        features = project(ops, draft.fc, features, deferred=True, planned=rows.planned_rows)
    return draft_forward(ops, draft, features, None, tokens, rows)


def grow_tree(ops: Operations, draft: DraftView, state: DecodeState, hidden: Tensor, normed: Tensor) -> None:
    """Draft the next tree from the draft's output for the root, in place.

    hidden, normed [B, 1, H]: see draft_forward. The root's children come from them; each beam pass runs the head over
    the chosen nodes of one level and scores their children; the best candidates of all levels become the tree.
    """
    spec, lengths = state.spec, draft.rows(state.lengths)
    batch, scores, ancestors = len(hidden), state.root_score, state.root_ancestors
    slot_positions, first_rows = lengths[:, None] + state.slot_levels, lengths[:, None] + state.level_slots
    all_tokens, all_scores, all_chosen, first_slot = [], [], [], 0
    for level, beam in enumerate((*spec.beam_widths, 0)):
        logits = project(ops, draft.head, normed, planned=batch * state.planned_nodes).flatten(0, 1)
        log_probs, tokens = ops.topk(logits, spec.top_k, offsets=draft.d2t)
        children = tokens.view(batch, -1)
        slots = slice(first_slot, first_slot + beam)
        fixed = None if state.beam_children is None else state.beam_children[slots]
        grown = ops.expand_beam(
            scores, log_probs.view(batch, -1, spec.top_k), children, ancestors, first_slot, beam, fixed
        )
        all_tokens.append(children)
        all_scores.append(grown.child_scores)
        if not beam:
            break
        all_chosen.append(grown.chosen)
        scores, ancestors = grown.scores, grown.ancestors
        rows = Rows(
            state.draft_cache,
            lengths,
            first_rows[:, level],
            slot_positions[:, slots],
            ancestors,
            state.planned_nodes,
        )
        hidden, normed = draft_forward(ops, draft, hidden, grown.parents, grown.tokens, rows)
        first_slot += beam
    chosen = torch.cat(all_chosen, dim=1) + state.slot_starts if all_chosen else children[:, :0]
    ops.build_tree(
        ops.sequence_rows(state.tokens, state.lengths, 1)[:, 0],
        torch.cat(all_tokens, 1),
        torch.cat(all_scores, 1),
        chosen,
        spec.nodes,
        spec.top_k,
        state.selected,
        out=state.tree,
    )


def draft_forward(
    ops: Operations, draft: DraftView, features: Tensor | Partials, parents: Tensor | None, tokens: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """The draft's layers over n nodes: features [B, P, H] of their parents, which parents [B, n] names (None: one each,
    in order), and tokens [B, n]. A model reads the tokens alone.

    Returns two [B, n, H]: the hidden states, which are the features of the nodes' children, and what the head's
    vocabulary projection reads (the same, or normed).
    """
    if draft.kind == "eagle3":
        (layer,) = draft.layers
        token_norm, feature_norm = layer.input_norm, draft.hidden_norm
        inputs, residual = ops.draft_inputs(
            features,
            parents,
            tokens,
            draft.embedding,
            token_norm=token_norm.weight,
            feature_norm=feature_norm.weight,
            token_eps=token_norm.eps,
            feature_eps=feature_norm.eps,
        )
        if draft.norm_before_residual:
            residual = inputs[..., draft.hidden_size :]
        x, update = decoder_layer(ops, layer, inputs, residual, rows.of_layer(0))
        normed, hidden = add_norm(ops, draft.norm, x, update, rows.planned is not None)
        return hidden, normed
    if draft.kind == "model":
        x = draft.embedding[tokens]
    else:
        inputs, _ = ops.draft_inputs(features, parents, tokens, draft.embedding)
        x = ops.add(project(ops, draft.fc, inputs, deferred=True, planned=rows.planned_rows))
    update = None
    for index, layer in enumerate(draft.layers):
        normed, x = add_norm(ops, layer.input_norm, x, update, rows.planned is not None)
        x, update = decoder_layer(ops, layer, normed, x, rows.of_layer(index))
    normed, hidden = add_norm(ops, draft.norm, x, update, rows.planned is not None)
    return hidden, normed


class Rows(NamedTuple):
    """Where the new nodes of a forward stand: their rows in the cache, their positions, and whom they see."""

    cache: Tensor  # [layers, 2, B, Hkv, T, d]; of one layer without the first dimension
    lengths: Tensor  # [B] int32: committed rows, visible to all
    first: Tensor  # [B] int32: where the new rows begin
    positions: Tensor  # [B, n] int32
    ancestors: Tensor | None  # [B, n, W] int64, bit j: row lengths + j is visible; None: causal
    planned: int | None = None  # nodes that launches are chosen for, the same in all passes of a draft; None: n

    @property
    def planned_rows(self) -> int | None:
        return None if self.planned is None else self.planned * len(self.lengths)

    def of_layer(self, index: int) -> Rows:
        return self._replace(cache=self.cache[index])


def add_norm(
    ops: Operations, norm: Norm | None, x: Tensor, update: Tensor | None = None, planned: bool = False
) -> tuple[Tensor, Tensor]:
    """(norm(x + update), x + update), [B, n, H] each. Without a norm the sum twice, without an update x as it is.

    `update` may be a product whose splits are still apart: the sum happens here, in the pass that reads it anyway.
    `planned`: in a draft pass.
    """
    if norm is None:
        total = x if update is None else ops.add(update, x)
        return total, total
    if update is None:
        return ops.rms_norm(x, norm.weight, norm.eps, planned=planned), x
    return ops.rms_norm(update, norm.weight, norm.eps, residual=x, planned=planned)


def decoder_layer(ops: Operations, layer: Layer, normed: Tensor, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Attention and MLP: normed [B, n, *] goes in, x [B, n, H] is the residual stream.

    Returns (x with the attention's output, the MLP's output still to be added to it).
    """
    attended = attend(ops, layer.attention, normed, rows)
    update = project(ops, layer.attention.o, attended, deferred=True, planned=rows.planned_rows)
    normed, x = add_norm(ops, layer.post_norm, x, update, rows.planned is not None)
    return x, feed_forward(ops, layer.mlp, normed, rows.planned_rows)


def attend(ops: Operations, attention: Attention, x: Tensor, rows: Rows) -> Tensor:
    """Project, rotate, append to the cache and attend: x [B, n, *] -> [B, n, Hq * d]."""
    projections = (attention.q, attention.k, attention.v)
    products = project_stack(ops, projections, x, deferred=True, planned=rows.planned_rows)
    q, k, v = (y.unflatten(-1, (-1, attention.head_dim)) for y in products)
    q_norm, k_norm = attention.q_norm, attention.k_norm
    q = ops.rotary_append(
        q,
        k,
        v,
        rows.cache,
        rows.first,
        rows.positions,
        attention.rotary.inv_freq,
        attention_scaling=attention.rotary.attention_scaling,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        eps=0.0 if q_norm is None else q_norm.eps,
    )
    out = ops.tree_attention(
        q,
        rows.cache,
        rows.lengths,
        rows.ancestors,
        scale=attention.scale,
        sliding_window=attention.sliding_window,
        planned_nodes=rows.planned,
    )
    return out.flatten(-2)


def feed_forward(ops: Operations, mlp: MLP, x: Tensor, planned: int | None = None) -> Tensor:
    """SwiGLU block: [B, n, H] -> [B, n, H], its splits perhaps still apart. `planned`: see project."""
    if mlp.module is not None:
        return mlp.module(x)
    gate, up = mlp.gate, mlp.up
    if gate.weight is not None and up.weight is not None and gate.bias is None and up.bias is None:
        inner = ops.linear_swiglu(x, gate.weight, up.weight, planned_rows=planned)
    else:
        inner = ops.swiglu(*project_stack(ops, (gate, up), x, planned=planned))
    return project(ops, mlp.down, inner, deferred=True, planned=planned)


def project(
    ops: Operations, projection: Projection, x: Tensor, deferred: bool = False, planned: int | None = None
) -> Tensor:
    """One matrix product, or the module that stands in its place.

    `deferred`: the reader adds up its splits. `planned`: rows that its launch is chosen for, None: as many as x has.
    """
    if projection.module is not None:
        return projection.module(x)
    return ops.linear(x, projection.weight, projection.bias, deferred=deferred, planned_rows=planned)


def project_stack(
    ops: Operations,
    projections: tuple[Projection, ...],
    x: Tensor,
    deferred: bool = False,
    planned: int | None = None,
) -> tuple[Tensor, ...]:
    """Several products of the same rows, in one launch where all of them are plain. Options as for project."""
    if any(projection.weight is None for projection in projections):
        return tuple(project(ops, projection, x) for projection in projections)
    weights, biases = [p.weight for p in projections], [p.bias for p in projections]
    return ops.linear_stack(x, weights, biases, deferred=deferred, planned_rows=planned)
