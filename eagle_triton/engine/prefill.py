"""From prompts to the first draft tree: fill the caches, choose the roots, grow the trees.

A prompt is read in pieces of fixed sizes. One forward reads several pieces, of one prompt or of several, and is
captured when its size repeats. A piece sees only the keys of its own sequence. Every layer appends all keys before it
attends; a recurrent layer reads the pieces of a sequence in order. A forward over one long prompt is not captured
(long_prompts.py). On a CPU, and with layers that cannot read pieces, prompts are read one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.long_prompts import NO_MEMORY, LongPrompts
from eagle_triton.engine.model.mixers import NewRows, rows_at
from eagle_triton.engine.model.model_view import ModelView, prompt_forward
from eagle_triton.engine.model.modules import project
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.prompt_chunks import PromptChunks, PromptSpan
from eagle_triton.engine.prompt_queue import FEW_ROWS, PIECE_ROWS, Forward
from eagle_triton.engine.state import TOP_LOGPROBS, DecodeState, Sequences, Tree
from eagle_triton.engine.step import Mode, token_logprobs, top_logprobs, verify
from eagle_triton.engine.upload import to_device, upload

CHUNK = 512  # prompt tokens in one forward when prompts are read one by one; limits the size of activations

_REHEARSED = [  # one size for each kind of product launch: 64 rows, 128, 256, 384, and more
    Forward(rows, size, ())
    for rows, sizes in ((PIECE_ROWS, (1, 2, 4, 6, 64)), (FEW_ROWS, (1, 4, 16, 64)))
    for size in sizes
]

Capture = Callable[[tuple[Any, ...], Callable[[], None]], Callable[[], None]]
"""Takes a key and launches. Returns the launches, or if they have run before, a graph of them."""


class NaNLogitsError(RuntimeError):
    """The target's logits are NaN, so no token can be chosen."""


class PromptExtras(NamedTuple):
    """What a prompt needs besides its tokens. With either, it has its own forwards."""

    embeddings: Tensor | None = None  # [L, H]: the target reads these instead of the tokens
    scores: Tensor | None = None  # [L, ...]: where to write the results of `score_rows`


NO_EXTRAS = PromptExtras()


class PromptEnds(NamedTuple):
    """The target's outputs at the last token of each slot's prompt."""

    hidden: Tensor  # [B, 1, H], normed
    features: Tensor  # [B, 1, F]

    @staticmethod
    def new(view: ModelView, slots: int) -> PromptEnds:
        sizes = (view.hidden_size, view.feature_size)
        return PromptEnds(*(torch.zeros(slots, 1, size, dtype=view.dtype, device=view.device) for size in sizes))

    def keep(self, rows: Tensor, hidden: Tensor, features: Tensor) -> None:
        """Keep hidden [B, 1, H], and flat rows [B] of features [P, n, F]. Row -1: keep the old values."""
        last = rows_at(features, rows.clamp(min=0).long())
        for kept, found in zip(self, (hidden, last), strict=True):
            kept.copy_(torch.where((rows >= 0)[:, None, None], found, kept))


class _Inputs:
    """The host's inputs to a forward of one size, in one tensor: its pieces, and for each slot the flat row of its
    prompt's last token, or -1."""

    def __init__(self, forward: Forward, sequences: Sequences):
        size, self._capacity = forward.size, sequences.capacity
        self._tensor = torch.zeros(3 * size + sequences.slots, dtype=torch.int32, device=sequences.device)
        slots, starts, seen, self.ends = self._tensor.split((size, size, size, sequences.slots))
        self.pieces = PromptChunks(slots, starts, seen, forward.rows)

    def fill(self, forward: Forward) -> None:
        missing, ends = forward.size - len(forward.pieces), [-1] * len(self.ends)
        slots = [piece.slot for piece in forward.pieces] + [0] * missing
        starts = [piece.start for piece in forward.pieces]
        for index, piece in enumerate(forward.pieces):
            if piece.last:
                ends[piece.slot] = index * forward.rows + piece.end - piece.start - 1
        seen = starts + [0] * missing
        values = [*slots, *starts, *[self._capacity] * missing, *seen, *ends]
        self._tensor.copy_(upload(values, torch.int32, self._tensor.device))


class Prefill:
    """Reads prompts into slots of some sequences. Other slots do not change.

    The order: `write` prompts, `read` them in forwards, `copy` equal ones, `choose_roots`, `grow_trees`. Then
    decode_step takes over.
    """

    def __init__(
        self,
        ops: Operations,
        view: ModelView,
        sequences: Sequences,
        packed: bool,
        share: bool,
        capture: Capture,
        long_prompts: LongPrompts,
    ):
        """packed: forwards have fixed sizes and read pieces of several prompts; otherwise each reads one prompt. share:
        sequences share pages with others that have the same beginning; otherwise equal prompts are copied."""
        self.ops, self.view, self.sequences, self.packed, self._capture = ops, view, sequences, packed, capture
        self.share, self._long_prompts = share, long_prompts
        self.ends = PromptEnds.new(view, sequences.slots)
        self._entering = torch.zeros(sequences.slots, dtype=torch.bool, device=sequences.device)
        self._inputs: dict[tuple[int, int], _Inputs] = {}
        self._rehearsed: set[bool] = set()  # True: with a draft, False: without

    def write(self, prompts: Mapping[int, Tensor], own: Sequence[int] | None = None) -> None:
        """Write tokens and lengths of prompts [L] int64 on the host to their slots. Steps of other slots write after
        them from now on. own: how many of the tokens are the prompt itself, and not output before a pause; None: all.
        """
        sequences = self.sequences
        lengths = [len(prompt) for prompt in prompts.values()]
        rows = to_device(pad_sequence(list(prompts.values()), batch_first=True), sequences.device)
        slots = upload(list(prompts), torch.int64, sequences.device)
        sequences.tokens[slots, : rows.shape[1]] = rows
        sequences.lengths[slots] = upload(lengths, torch.int32, sequences.device)
        sequences.prompt_lengths[slots] = upload(lengths if own is None else own, torch.int32, sequences.device)

    def new_scores(self, length: int) -> Tensor:
        """Room for `score_rows` of a prompt of `length` tokens."""
        width = 1 + 2 * min(TOP_LOGPROBS, self.view.vocab_size)
        return torch.zeros(length, width, dtype=torch.float64, device=self.sequences.device)

    def read(self, forward: Forward, draft: Draft | None, extras: PromptExtras = NO_EXTRAS) -> bool:
        """Launch a forward of target and draft. draft None: the sequences will be decoded plainly. extras: of the
        prompt, if all pieces are of one.

        Returns whether these prompts must be read again from the start, because memory ran out inside the forward.
        """
        if not self.packed:
            (piece,) = forward.pieces
            self._read_alone(piece.slot, piece.end, draft, piece.start, extras)
            return False
        self._inputs_of(forward).fill(forward)
        if any(extra is not None for extra in extras):  # these have other addresses for each prompt
            self._forward(forward, draft, extras=extras)
            return False
        span = self._long_prompts.span_of(forward)
        if span is not None:
            try:
                self._forward(forward, draft, span)
            except torch.OutOfMemoryError:
                self._long_prompts.give_up(NO_MEMORY)
                return True
            return False
        key = (self.sequences, forward.rows, forward.size, draft is not None)
        self._capture(key, lambda: self._forward(forward, draft))()
        return False

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the caches of a prompt of `length` tokens from slot `source` to slot `target`, which has the tokens."""
        self.sequences.copy(source, target, length)
        for kept in self.ends:
            kept[target] = kept[source]

    def choose_roots(self, slots: Collection[int], state: DecodeState, mode: Mode) -> None:
        """Choose the first tokens after the prompts in `slots`, in a state of these sequences, and report them in
        `sequences.begun`."""
        entering = [False] * self.sequences.slots
        for slot in slots:
            entering[slot] = True
        self._entering.copy_(upload(entering, torch.bool, self.sequences.device))
        mode = mode._replace(levels=None, one_launch=False)  # these do not matter here, and would add captures
        if mode.judge is not None:
            self._choose_roots(state, mode)
        else:
            self._capture((state, mode), lambda: self._choose_roots(state, mode))()

    def grow_trees(self, draft: Draft | None, state: DecodeState) -> None:
        """Grow the first trees of the slots that just got their roots, and make these slots active. Other slots get
        the same trees as before."""
        self._capture((state, draft is not None), lambda: self._grow_trees(draft, state))()

    def wipe(self, slot: int, pages: Sequence[int]) -> None:
        """Zero everything of a sequence with NaN, and the free `pages` that it held."""
        self.sequences.part(slice(slot, slot + 1)).wipe(pages)
        for kept in self.ends:
            kept[slot] = 0

    def rehearse(self, prompts: Mapping[int, Tensor], draft: Draft | None, state: DecodeState, mode: Mode) -> None:
        """Launch every kernel that prompts may launch, so that they are compiled in parallel. Forwards of fixed sizes
        are launched only once.

        The prompts' slots have no pages yet. Other slots change only in what DecodeState.unchanged restores.
        """
        self._entering.zero_()
        if self.packed:
            for forward in () if (draft is not None) in self._rehearsed else _REHEARSED:
                self._inputs_of(forward).fill(forward)
                self._forward(forward, draft)
            self._rehearsed.add(draft is not None)
        else:
            for slot, prompt in prompts.items():
                self._read_alone(slot, min(len(prompt), CHUNK + (len(prompt) - 1) % CHUNK + 1), draft)
        self._choose_roots(state, mode._replace(judge=None))
        self._grow_trees(draft, state)

    def _forward(
        self, forward: Forward, draft: Draft | None, span: PromptSpan | None = None, extras: PromptExtras = NO_EXTRAS
    ) -> None:
        inputs, (embeddings, scores) = self._inputs_of(forward), extras
        last = inputs.ends.clamp(min=0).long()
        pieces, wanted = inputs.pieces._replace(span=span), last if scores is None else None
        hidden, features = read_pieces(self.ops, self.view, draft, self.sequences, pieces, wanted, embeddings)
        if scores is not None:
            for piece, rows in zip(forward.pieces, hidden, strict=False):  # later rows belong to empty pieces
                score_rows(self.ops, self.view, self.sequences.tokens[piece.slot], rows, piece.start, piece.end, scores)
            hidden = rows_at(hidden, last)
        self.ends.keep(inputs.ends, hidden, features)

    def _inputs_of(self, forward: Forward) -> _Inputs:
        key = (forward.rows, forward.size)
        if key not in self._inputs:
            self._inputs[key] = _Inputs(forward, self.sequences)
        return self._inputs[key]

    def _read_alone(
        self, slot: int, length: int, draft: Draft | None, start: int = 0, extras: PromptExtras = NO_EXTRAS
    ) -> None:
        one = slice(slot, slot + 1)
        part = self.sequences.part(one)
        part.caches.clear()
        outputs = read_prompts(self.ops, self.view, draft, part, length, start, extras)
        for kept, found in zip(self.ends, outputs, strict=True):
            kept[one] = found

    def _choose_roots(self, state: DecodeState, mode: Mode) -> None:
        """Choose the roots of the entering slots, which the state includes."""
        ops, sequences, entering = self.ops, state.sequences, self._entering[: state.batch]
        logits = project(ops, self.view.head, self.ends.hidden[: state.batch])
        nan = logits.isnan().flatten(1).any(1) if mode.judge is None else torch.zeros_like(entering)
        step = sequences.sampling.step

        def put(kept: Tensor, value: Tensor) -> None:
            kept.copy_(torch.where(entering.view(-1, *[1] * (kept.dim() - 1)), value, kept))

        put(sequences.nan, nan)
        put(step, sequences.first_step)
        raw = logits.clone() if mode.logits else logits
        if mode.masked:
            assert state.masks is not None, "call add_masks before a grammar's first token is chosen"
            ops.mask_tokens(logits, state.masks.allowed[:, :1], state.masks.restricted)
        known = sequences.first_root[:, None]
        root = torch.where(known < 0, _choose(ops, state, logits, mode), known)
        step.add_(entering)
        place = sequences.lengths[:, None].long()
        sequences.tokens.scatter_(1, place, torch.where(entering[:, None], root, sequences.tokens.gather(1, place)))
        sequences.begun[:, :1], sequences.begun[:, 1] = root, nan
        if mode.logprobs:
            logprob = token_logprobs(logits, root)[:, 0]
            sequences.begun.view(torch.float64)[:, 2] = logprob
            put(sequences.root_logprob, logprob)
        if mode.top_logprobs and sequences.root_tops is not None:
            put(sequences.root_tops, top_logprobs(logits)[:, 0])
        if mode.logits and sequences.root_logits is not None:
            put(sequences.root_logits, raw[:, 0].float())

    def _grow_trees(self, draft: Draft | None, state: DecodeState) -> None:
        ops, sequences, entering = self.ops, state.sequences, self._entering[: state.batch]
        if draft is not None:
            draft.begin(ops, sequences, self.ends.features[: state.batch], entering)
        grow_first_tree(ops, draft, state)
        sequences.active.logical_or_(entering)


def grow_first_tree(ops: Operations, draft: Draft | None, state: DecodeState) -> None:
    """Grow the next tree of each sequence, in a state with outdated trees."""
    if draft is not None and state.spec.drafts:
        draft.grow(ops, state)
    else:
        ops.sequence_rows(state.tokens, state.lengths, 1, out=state.tree.tokens)


def read_pieces(
    ops: Operations,
    view: ModelView,
    draft: Draft | None,
    sequences: Sequences,
    pieces: PromptChunks,
    last: Tensor | None = None,
    embeddings: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One forward of target and draft over pieces of prompts; the sequences have the tokens already.

    last: return the hidden states of these flat rows [m] int64 of P * n only; None: all. embeddings [L, H]: the target
    reads these instead of the tokens; all pieces are of one prompt. Returns the target's normed hidden states
    [m, 1, H], or [P, n, H], and features [P, n, F].
    """
    if embeddings is None:
        tokens = pieces.tokens(sequences.tokens, sequences.lengths)
    else:  # an embedding table with a row for each position
        view, tokens = replace(view, embedding=embeddings), pieces.columns(sequences.lengths)
    caches = sequences.caches.of_pieces(pieces, sequences.lengths)
    prompt = None
    if view.reads_prompts_apart:
        lengths = sequences.prompt_lengths
        prompt = (lengths if pieces.slots is None else lengths[pieces.slots.long()]) - pieces.starts
    rows = NewRows(pieces.seen, pieces.starts, span=pieces.span, prompt=prompt)
    hidden, features = prompt_forward(ops, view, tokens, caches, rows, last)
    if draft is not None:
        draft.read_prompt(ops, sequences, pieces, features)
    return hidden, features


def read_prompts(
    ops: Operations,
    view: ModelView,
    draft: Draft | None,
    sequences: Sequences,
    length: int,
    start: int = 0,
    extras: PromptExtras = NO_EXTRAS,
) -> tuple[Tensor, Tensor]:
    """Run the first `length` tokens of all sequences through target and draft, chunk by chunk.

    start: the number of tokens that were read before. extras: of the prompt, if there is one sequence. Returns the
    target's normed hidden states [B, 1, H] and features [B, 1, F] at the last tokens.
    """
    for first in range(start, length, CHUNK):
        starts = torch.full_like(sequences.lengths, first)
        pieces = PromptChunks(None, starts, starts, min(CHUNK, length - first))
        hidden, features = read_pieces(ops, view, draft, sequences, pieces, embeddings=extras.embeddings)
        if extras.scores is not None:
            score_rows(ops, view, sequences.tokens[0], hidden[0], first, min(first + CHUNK, length), extras.scores)
    return hidden[:, -1:], features[:, -1:]


def score_rows(
    ops: Operations, view: ModelView, tokens: Tensor, hidden: Tensor, start: int, end: int, scores: Tensor
) -> None:
    """Write to rows start .. end - 1 of scores, float64 [L, 1 + 2 K]: the log-probability of the token that follows in
    `tokens` [capacity] int64, then the values of `top_logprobs`.

    hidden [>= end - start, H]: the target's normed hidden states of these tokens.
    """
    for first in range(start, end, PIECE_ROWS):  # the logits of some rows at a time
        last = min(first + PIECE_ROWS, end)
        logits = project(ops, view.head, hidden[None, first - start : last - start].contiguous())
        following = tokens[first + 1 : last + 1][None].clamp(0, view.vocab_size - 1)
        scores[first:last, 0] = token_logprobs(logits, following)[0]
        scores[first:last, 1:] = top_logprobs(logits)[0].flatten(1)


def _choose(ops: Operations, state: DecodeState, logits: Tensor, mode: Mode) -> Tensor:
    """The roots [B, 1] from logits [B, 1, V], chosen as in every step: verify a tree that is only a root."""
    before = (state.lengths - 1).clamp(min=0)  # an empty slot has no token
    tokens = ops.sequence_rows(state.tokens, before, 1)
    parents = torch.full_like(tokens, -1, dtype=torch.int32)
    tree = Tree(tokens, parents, torch.zeros_like(parents), torch.ones_like(tokens)[..., None])
    if mode.processed and state.sequences.rules is not None:
        rules = state.sequences.rules
        logits = ops.process_logits(logits, tokens, tree.ancestors, rules, before, state.stops.ids)
    return verify(ops, logits, tree, 0, before, state.sampling, mode)[2][:, None]
