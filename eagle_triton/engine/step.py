"""One decode step: target forward over the tree, verify, commit, and the next draft tree.

    tree -> target_forward -> verify -> update_sequence, commit -> draft.learn, draft.extend -> draft.grow -> tree

Nothing here depends on a sequence's length: the state fixes all shapes, and operations read the lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.model.mixers import AcceptedPath
from eagle_triton.engine.model.model_view import ModelView, target_forward
from eagle_triton.engine.model.modules import project
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.state import TOP_LOGPROBS, DecodeState, Tree
from eagle_triton.operands.adaptive_length import GuideTensors
from eagle_triton.operands.sampling import SamplingTensors
from eagle_triton.operands.verification import PROPOSED, TARGET_MATCH, TREE_DEPTH, Verification

if TYPE_CHECKING:  # the module needs Triton
    from eagle_triton.engine.megakernel_step import MegakernelStep


class Judge(Protocol):
    """Verifies trees on the host."""

    def __call__(self, logits: Tensor, tokens: Tensor, parents: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """logits [B, N, V], tokens [B, N] int64 (-1: no draft), parents [B, N] int32. Returns (path [B, D + 1] int32,
        accepted [B] int32, next token [B] int64) like every verification."""


class Mode(NamedTuple):
    """The options of a step. A graph is captured for each combination."""

    sampled: bool = False  # verify by the strategy of `verification`, else by argmax
    top_p_first: bool = False  # when sampling: top-p before top-k
    keep_features: bool = False  # in a plain step, for a draft that catches up later
    learns: bool = False  # in a plain step: the draft learns from the logits
    masked: bool = False  # some sequence has a grammar; such a step has three parts
    processed: bool = False  # apply repetition penalties and logit biases
    logprobs: bool = False  # report log-probabilities
    logits: bool = False  # keep the target's logits of each token
    top_logprobs: bool = False  # keep the likeliest tokens beside each
    drafts: bool = False  # report the drafts
    levels: int | None = None  # how many levels the draft scores for the next tree; None: all
    filtered: bool = True  # when sampling: some sequence has top-k, top-p or min-p
    verification: Verification = TARGET_MATCH
    judge: Judge | None = None  # verifies on the host instead; such a step is not captured
    one_launch: bool = False  # in a plain step: run the target's layers in one launch, see OneLaunch


class TreeOutputs(NamedTuple):
    """The target's outputs for a tree, and earlier values that the rest of the step needs."""

    tokens: Tensor  # [B, N] int64, valid also in empty places
    logits: Tensor  # [B, N, V]
    features: Tensor  # [B, N, F]
    pending: tuple[Any, ...]  # the target's uncommitted rows, see MixerCache.commit
    lengths: Tensor | None  # [B] int32, copied where log-probabilities are reported
    guide: GuideTensors | None  # EGAG's


class VerifiedTree(NamedTuple):
    """The results of verification for the rest of a step."""

    raw: Tensor  # [B, N, V]: the target's logits; without forbidden tokens, unless logits are kept
    judged: Tensor  # [B, N, V]: the logits that were verified
    committed: AcceptedPath


def allocate(state: DecodeState, mode: Mode) -> None:
    """Allocate the further tensors that steps in this mode need."""
    if mode.processed:
        state.sequences.add_rules()
    if mode.logits:
        state.add_logits()
    if mode.masked:
        state.add_masks()
    if mode.top_logprobs:
        state.add_tops()


def decode_step(
    ops: Operations,
    view: ModelView,
    draft: Draft | None,
    state: DecodeState,
    mode: Mode,
    megakernel: MegakernelStep | None = None,
) -> None:
    """Advance every active sequence of `state` by its accepted drafts and one token, and draft its next tree.

    megakernel: of this state; runs everything after the target forward in one launch.
    """
    outputs = forward_tree(ops, view, draft, state, mode)
    state = state.limited(mode.levels)
    raw, judged = _judged_logits(ops, state, mode, outputs)
    path = verify_and_draft(ops, draft, state, judged, outputs.features, outputs.pending, mode, megakernel)
    _report(ops, state, mode, outputs, raw, path)


def forward_tree(ops: Operations, view: ModelView, draft: Draft | None, state: DecodeState, mode: Mode) -> TreeOutputs:
    """The first part of a step: the target's forward over the trees. It needs no masks."""
    tree, sequences = state.tree, state.sequences
    guide = draft.guide(sequences) if draft is not None and state.spec.adaptive else None
    if guide is not None:
        state.guide_of(state.report)[:, :3] = guide.values[:, :3]
    if mode.drafts:
        state.drafts_of(state.report).copy_(tree.tokens[:, 1:])
    tokens = tree.tokens
    if state.spec.has_empty_places:  # their tokens are -1
        real = tokens >= 0
        state.report[:, TREE_DEPTH], state.report[:, PROPOSED] = (tree.depths * real).amax(1), real.sum(1) - 1
        tokens = torch.where(real, tokens, tokens[:, :1])  # any valid token, here the root
    launched = view.one_launch if mode.one_launch else None
    outputs = None if launched is None else launched(ops, tokens, sequences.caches, state.lengths)
    if outputs is not None:
        hidden = features = outputs[1]
        pending = sequences.caches.new_pending(1)
    else:
        active = state.active if tokens.shape[1] == 1 and mode.judge is None else None
        place = state.lengths, tree.depths, tree.ancestors, state.spec.depth, active
        hidden, features, pending = target_forward(ops, view, tokens, sequences.caches, *place)
    logits = project(ops, view.head, hidden)
    before = state.lengths.clone() if mode.logprobs else None
    return TreeOutputs(tokens, logits, features, pending, before, guide)


def verify_tree(ops: Operations, state: DecodeState, mode: Mode, outputs: TreeOutputs) -> VerifiedTree:
    """The second part of a step, up to the commit. After this `state.report` has the committed tokens and the next
    root."""
    raw, judged = _judged_logits(ops, state, mode, outputs)
    return VerifiedTree(raw, judged, verify_and_commit(ops, state, judged, outputs.pending, mode))


def draft_tree(
    ops: Operations, draft: Draft | None, state: DecodeState, mode: Mode, outputs: TreeOutputs, verified: VerifiedTree
) -> None:
    """The rest of a step: the next tree, and the host's report on the verified one."""
    state = state.limited(mode.levels)
    _draft_next(ops, draft, state, verified.judged, outputs.features, verified.committed, mode)
    _report(ops, state, mode, outputs, verified.raw, verified.committed.path)


def _judged_logits(ops: Operations, state: DecodeState, mode: Mode, outputs: TreeOutputs) -> tuple[Tensor, Tensor]:
    """The target's logits to keep, and those to verify, both [B, N, V]."""
    logits, rules = outputs.logits, state.sequences.rules if mode.processed else None
    raw = logits.clone() if mode.masked and mode.logits else logits
    if mode.masked:
        assert state.masks is not None, "call add_masks before a step with a grammar"
        ops.mask_tokens(logits, state.masks.allowed, state.masks.restricted)
    if rules is None:
        return raw, logits
    place = state.lengths, state.stops.ids
    return raw, ops.process_logits(logits, outputs.tokens, state.tree.ancestors, rules, *place)


def _report(ops: Operations, state: DecodeState, mode: Mode, outputs: TreeOutputs, raw: Tensor, path: Tensor) -> None:
    """Count committed tokens, and write the host's report on these."""
    sequences, logits = state.sequences, outputs.logits
    if mode.processed and (rules := sequences.rules) is not None:
        emitted, steps_on = state.emitted, state.emitted[:, :1] >= 0  # the other slots do not change
        committed = torch.arange(emitted.shape[1], device=emitted.device) < state.report[:, 1:2]  # not the root
        emitted = torch.where(emitted < 0, emitted[:, :1], emitted).clamp(min=0)
        rules.seen.scatter_(1, emitted, torch.where(steps_on, 1, rules.seen.gather(1, emitted)))
        rules.counts.scatter_add_(1, emitted, (committed & steps_on).int())
    if outputs.lengths is not None:
        # Temperature, filters, penalties and biases are not applied; what a grammar forbids is left out.
        following = ops.sequence_rows(state.tokens, outputs.lengths, path.shape[1], 1)
        values = token_logprobs(ops.gather_rows(logits, path), following)
        _keep(state.logprobs_of(state.report), sequences.root_logprob, values, path)
    if mode.logits:
        _keep(state.token_logits, sequences.root_logits, ops.gather_rows(raw, path), path)
    if mode.top_logprobs:
        _keep(state.token_tops, sequences.root_tops, top_logprobs(ops.gather_rows(logits, path)), path)
    if outputs.guide is not None:
        state.guide_of(state.report)[:, 3] = outputs.guide.gamma


def verify_and_draft(
    ops: Operations,
    draft: Draft | None,
    state: DecodeState,
    logits: Tensor,
    features: Tensor,
    pending: tuple[Any, ...],
    mode: Mode,
    megakernel: MegakernelStep | None = None,
) -> Tensor:
    """All of a step after the target's forward: verify, commit, and draft the next tree, in place.

    logits [B, N, V] and features [B, N, F] of the tree's nodes. pending: the target's uncommitted rows, see
    MixerCache.commit. draft may be None if the tree is only a root. Returns the accepted path [B, D + 1] int32.
    """
    if megakernel is None:
        committed = verify_and_commit(ops, state, logits, pending, mode)
        _draft_next(ops, draft, state, logits, features, committed, mode)
        return committed.path
    walk = None
    if mode.sampled or mode.verification.accept_policy != "normal":
        walk = _walk(ops, state, logits, mode)
    ops.calls["draft_verify_update"] += 1
    return megakernel(logits, features, walk)


def verify_and_commit(
    ops: Operations, state: DecodeState, logits: Tensor, pending: tuple[Any, ...], mode: Mode
) -> AcceptedPath:
    """The first half of `verify_and_draft`. Sequences and the target's cache are then as the next step needs them."""
    tree, sequences = state.tree, state.sequences
    path, accepted, next_token = _walk(ops, state, logits, mode)
    before = ops.update_sequence(
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
        state.sampling.step,
    )
    committed = AcceptedPath(before, path, accepted, state.spec.is_chain)
    sequences.caches.commit(ops, pending, committed)
    return committed


def _walk(ops: Operations, state: DecodeState, logits: Tensor, mode: Mode) -> tuple[Tensor, Tensor, Tensor]:
    """`verify` the state's trees."""
    judged = state.tree.without_empty_places() if state.spec.has_empty_places else state.tree
    return verify(ops, logits, judged, state.spec.depth, state.lengths, state.sampling, mode, state.nan)


def _draft_next(
    ops: Operations,
    draft: Draft | None,
    state: DecodeState,
    logits: Tensor,
    features: Tensor,
    committed: AcceptedPath,
    mode: Mode,
) -> None:
    """The second half of `verify_and_draft`: the next tree."""
    sequences, depth = state.sequences, state.spec.depth
    if draft is not None and (depth or mode.learns):
        draft.learn(ops, state, committed, logits)
    if draft is not None and depth:
        draft.extend(ops, state, committed, features)
        draft.grow(ops, state)
    else:
        ops.sequence_rows(state.tokens, state.lengths, 1, out=state.tree.tokens)
        if mode.keep_features and sequences.skipped is not None:
            sequences.skipped.keep(committed.before, features)


def verify(
    ops: Operations,
    logits: Tensor,
    tree: Tree,
    depth: int,
    lengths: Tensor,
    params: SamplingTensors,
    mode: Mode,
    nan: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify trees of N nodes with their roots at `lengths` [B] int32, as `mode` says.

    logits [B, N, V]. Returns (path [B, D + 1] int32, accepted [B] int32, next token [B] int64) like every verification.
    Writes to `nan` [B] bool whether the logits read had a NaN (with a judge: False).
    """
    if mode.judge is not None:
        if nan is not None:
            nan.zero_()
        return mode.judge(logits, tree.tokens, tree.parents, depth)
    how = mode.verification
    strategy, policy = how.verify_strategy if mode.sampled else "greedy", how.accept_policy if depth else "normal"

    def walk(logits: Tensor, tree: Tree, depth: int, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        drafted, place = (logits, tree.tokens, tree.parents, depth), (lengths, tree.depths)
        if strategy == "greedy":
            return ops.verify_greedy(*drafted, nan=nan)
        if strategy == "rejection":
            return ops.verify_sampling(*drafted, params, mode.top_p_first, nan=nan)
        if strategy == "target_match":
            return ops.verify_target_match(*drafted, params, *place, mode.top_p_first, mode.filtered, nan=nan)
        limits = (how.verify_window, how.max_candidate_len)
        return ops.verify_topp(*drafted, params, *place, mode.top_p_first, *limits, nan=nan)

    if policy == "normal":
        return walk(logits, tree, depth, lengths)
    root = Tree(*(value[:, :1] for value in tree))
    if policy == "reject_all":
        path, accepted, next_token = walk(logits[:, :1], root, 0, lengths)
        return torch.nn.functional.pad(path, (0, depth), value=-1), accepted, next_token
    path, accepted = ops.first_path(tree.parents, depth)
    last = ops.gather_rows(logits, path.gather(1, accepted[:, None].long()))
    return path, accepted, walk(last, root, 0, lengths + accepted)[2]


def _keep(kept: Tensor | None, root: Tensor | None, rows: Tensor, path: Tensor) -> None:
    """Copy the root's values [B, ...], and the values of rows [B, D + 1, ...] along a path, to `kept` [B, D + 2, ...],
    and keep the next root's."""
    assert kept is not None and root is not None, "they are allocated before a step that keeps them"
    kept[:, 0] = root
    kept[:, 1:] = rows
    last = (path >= 0).sum(1)
    root.copy_(kept[torch.arange(len(kept), device=kept.device), last])


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-softmax in fp32 of logits [B, n, V] at tokens [B, n]: [B, n]."""
    wide = logits.float()
    return wide.gather(2, tokens[:, :, None])[:, :, 0] - wide.logsumexp(-1)


def top_logprobs(logits: Tensor) -> Tensor:
    """The likeliest tokens by logits [B, n, V], and their log-softmax in fp32: float64 [B, n, 2, TOP_LOGPROBS], which
    holds both exactly. A smaller vocabulary gives fewer."""
    wide = logits.float()
    values, tokens = wide.topk(min(TOP_LOGPROBS, wide.shape[-1]), dim=-1)
    return torch.stack((tokens.double(), (values - wide.logsumexp(-1, keepdim=True)).double()), 2)
