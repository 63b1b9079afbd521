"""The tensors of a decode step. Their addresses never change between steps, so a captured graph can be replayed.

`Sequences` holds the tensors that do not depend on the tree. `DecodeState` adds the tensors of one tree shape. Several
states may use the same sequences in turn.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.memory import by_slot
from eagle_triton.engine.memory.by_slot import part_of, tensors_of
from eagle_triton.engine.memory.pages import PagePool, SlotPages
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.engine.upload import upload
from eagle_triton.operands.ancestors import WORD, pack_ancestors
from eagle_triton.operands.logit_processing import MASK_WORD, LogitRules
from eagle_triton.operands.sampling import SamplingTensors
from eagle_triton.operands.verification import PROPOSED, REPORT_TOKENS, TREE_DEPTH, Stops

if TYPE_CHECKING:
    from eagle_triton.engine.drafts.draft import Draft
    from eagle_triton.engine.skipped_features import SkippedFeatures

MAX_TABLE_ROWS = 32768  # capacity of a sequence, unless a request needs more
CHEAP_TOKENS = 1 << 22  # tokens of all sequences that may be allocated in advance: 32 MiB
TOP_LOGPROBS = 20  # the most of the likeliest tokens to report
STOP_IDS = 16  # stop tokens of a sequence, unless a request has more
_GUIDE = 4  # columns of a report for EGAG


class Tree(NamedTuple):
    """A draft tree. Node 0 is the root; a parent has a smaller index than its children."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int32, -1 for the root
    depths: Tensor  # [B, N] int32
    ancestors: Tensor  # [B, N, W] int64: bit j of row i says that node j is i or an ancestor of i

    def without_empty_places(self) -> Tree:
        """The tree for verification, where nodes with token -1 (no draft) have no parent."""
        empty = self.tokens < 0
        return self._replace(tokens=self.tokens.masked_fill(empty, 0), parents=self.parents.masked_fill(empty, -1))

    def write_chain(self, tokens: Tensor) -> None:
        """Make every tree a chain of tokens [B, N] int64, the root first, in place."""
        batch, nodes = self.tokens.shape
        depths = torch.arange(nodes, dtype=torch.int32, device=tokens.device)
        below = torch.ones(batch, nodes, nodes, dtype=torch.bool, device=tokens.device).tril()
        self.tokens.copy_(tokens)
        self.depths.copy_(depths)
        self.parents.copy_(depths - 1)
        self.ancestors.copy_(pack_ancestors(below))

    def draft_forced(self, spec: TreeSpec, forced: Tensor) -> None:
        """Draft the tokens that must follow the roots, in place.

        forced [B, n] int64, n at most the depth and the drafts: the first tokens after each root, -1 for none. A tree
        that has a path of all of them stays as it is. In any other tree, drafts after the first forced token that it
        lacks cannot be right: it becomes a chain of the forced tokens. The places that are left are empty, if the tree
        may have empty places. Otherwise they continue a chain, or are children of the root.
        """
        count, depths = (forced >= 0).sum(1, keepdim=True), self.depths.long()
        expected = forced.gather(1, (depths - 1).clamp(0, forced.shape[1] - 1))
        wrong = (depths > 0) & (depths <= count) & (self.tokens != expected)
        right = (self.ancestors & pack_ancestors(wrong[:, None])).eq(0).all(2)
        stays = (right & (depths == count)).any(1, keepdim=True)

        node = torch.arange(spec.nodes, device=forced.device)
        in_chain = (node <= count) | spec.is_chain
        # a wrong token; not 0, which is chosen where a bias forbids all that a grammar allows
        unused = forced.new_full((len(forced), 1), -1) if spec.has_empty_places else 1 + (forced[:, :1] == 1).long()
        left = unused.expand(-1, spec.drafts - forced.shape[1])
        chain = Tree(
            torch.cat((self.tokens[:, :1], torch.where(forced < 0, unused, forced), left), 1),
            torch.where(in_chain, node - 1, 0),
            torch.where(in_chain, node, 1),
            pack_ancestors((node[:, None] == node) | (node == 0) | (in_chain[:, :, None] & (node <= node[:, None]))),
        )
        for drafted, value in zip(self, chain, strict=True):
            drafted.copy_(torch.where(stays.view(-1, *[1] * (value.dim() - 1)), drafted, value))


class TokenMasks(NamedTuple):
    """Which tokens grammars allow after each node of a tree, see ops.mask_tokens."""

    allowed: Tensor  # [B, N, words] int32
    restricted: Tensor  # [B] bool: which sequences have a grammar
    written: Tensor  # the host's copy of `allowed`: pinned, or on a CPU `allowed` itself
    forced: Tensor  # [B, n] int64: tokens that must follow the roots, see Tree.draft_forced


def capacity_bucket(rows: int) -> int:
    """The capacity for `rows` rows if all of it is allocated: a power of two from 512 to 4096, then a multiple of
    4096."""
    return max(512, 1 << (rows - 1).bit_length()) if rows <= 4096 else -(-rows // 4096) * 4096


def table_capacity(rows: int, slots: int) -> int:
    """The capacity of page tables for `rows` rows: as large as is cheap, to change seldom."""
    return max(capacity_bucket(rows), min(MAX_TABLE_ROWS, max(CHEAP_TOKENS // slots // 512, 1) * 512))


def scratch_rows(spec: TreeSpec, draft: Draft | None) -> int:
    """Cache rows that a step may write after the committed ones: the tree, or the draft's passes and its root row."""
    passes = 0 if draft is None else draft.rows_in_pass(spec)
    return max(spec.nodes, spec.depth + 1, passes) + 1


class Sequences:
    """B sequences, one for each slot: tokens, caches of target and draft, sampling and stop options."""

    def __init__(self, view: ModelView, draft: Draft | None, slots: int, capacity: int, pool: PagePool | None = None):
        """capacity: the most rows of a sequence, a multiple of PAGE_ROWS. pool: requests get pages from it as they
        enter; None: a new pool, with pages for all rows of every slot."""
        self.slots, self.capacity, self.device = slots, capacity, view.device
        self.vocabulary = view.vocab_size
        self.whole = self  # all slots; a part has only the first ones
        self._firsts: dict[int, Sequences] = {}  # parts of the whole, by number of slots

        zeros = self.zeros
        self.tokens = zeros(capacity + 1, dtype=torch.int64)  # the root at column `lengths`
        self.lengths = zeros(dtype=torch.int32)  # committed tokens, all in the target's cache
        self.prompt_lengths = zeros(dtype=torch.int32)
        self.first_step = zeros(dtype=torch.int64)  # counter of random numbers after the prompt
        self.first_root = zeros(dtype=torch.int64)  # the root after the prompt if it is known, or -1
        self.active = zeros(dtype=torch.bool)  # a step does not change the others
        self.nan = zeros(dtype=torch.bool)  # the target's logits had a NaN in the last step
        self.stops = Stops(
            ids=zeros(STOP_IDS, dtype=torch.int64), limit=zeros(dtype=torch.int32), exact=zeros(dtype=torch.bool)
        )
        self.sampling = SamplingTensors.zeros(slots, view.device)
        if pool is None:
            self.pages = SlotPages.whole(slots, capacity, view.device)
        else:
            self.pages = SlotPages(pool, slots, capacity, view.device)
        self.caches = view.new_caches(self.pages)
        self.draft_tensors: Any = None if draft is None else draft.new_slot_tensors(self.pages)
        self.skipped: SkippedFeatures | None = None  # features that plain steps keep for the draft
        self.rules: LogitRules | None = None  # None until a request needs them
        self.root_logprob = zeros(dtype=torch.float32)  # of the root, in steps that report log-probabilities
        self.root_logits: Tensor | None = None  # [B, V] float32 of the root; None until a request needs them
        # [B, 2, TOP_LOGPROBS] float64 of the root, see step.top_logprobs; None until a request needs them
        self.root_tops: Tensor | None = None
        # read by the host after a prompt: the root, whether the target's logits were NaN, and the root's
        # log-probability (the bits of a float64)
        self.begun = zeros(3, dtype=torch.int64)

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A new tensor by slot, with this shape for each slot of the whole."""
        return torch.zeros(self.whole.slots, *shape, dtype=dtype, device=self.device)

    def first(self, slots: int) -> Sequences:
        """The first `slots` sequences, always the same object."""
        whole = self.whole
        if slots == whole.slots:
            return whole
        if slots not in whole._firsts:
            whole._firsts[slots] = whole.part(slice(0, slots))
        return whole._firsts[slots]

    @property
    def family(self) -> list[Sequences]:
        """The whole and all parts made by `first`, which share tensors."""
        return [self.whole, *self.whole._firsts.values()]

    def give(self, **tensors: Any) -> None:
        """Set tensors of the whole, by attribute name. Each of the family gets its slots."""
        for part in self.family:
            for name, value in tensors.items():
                setattr(part, name, part_of(value, slice(0, part.slots)))

    def add_rules(self) -> None:
        """Allocate penalties, biases and least lengths, all off."""
        if self.rules is None:
            rules = LogitRules(
                penalty=self.zeros(dtype=torch.float32).fill_(1),
                bias=self.zeros(self.vocabulary, dtype=torch.float32),
                seen=self.zeros(self.vocabulary, dtype=torch.uint8),
                least=self.zeros(dtype=torch.int32),
                presence=self.zeros(dtype=torch.float32),
                frequency=self.zeros(dtype=torch.float32),
                counts=self.zeros(self.vocabulary, dtype=torch.int32),
                answer=self.zeros(dtype=torch.int32),
            )
            self.give(rules=rules)

    def add_logits(self) -> None:
        """Allocate the target's logits of the roots."""
        if self.root_logits is None:
            self.give(root_logits=self.zeros(self.vocabulary, dtype=torch.float32))

    def add_tops(self) -> None:
        """Allocate the likeliest tokens beside the roots."""
        if self.root_tops is None:
            self.give(root_tops=self.zeros(2, min(TOP_LOGPROBS, self.vocabulary), dtype=torch.float64))

    def widen_stops(self, count: int) -> bool:
        """Make room for `count` stop tokens of a sequence. Returns whether this needed a new table."""
        missing = count - self.stops.ids.shape[1]
        if missing <= 0:
            return False
        missing = -(-missing // STOP_IDS) * STOP_IDS
        stops = self.whole.stops
        ids = torch.nn.functional.pad(stops.ids, (0, missing), value=-1)
        self.give(stops=stops._replace(ids=ids))
        return True

    def part(self, slots: slice) -> Sequences:
        """Some of the sequences, as views."""
        part = copy.copy(self)
        for name, value in vars(self).items():
            if name != "whole":
                setattr(part, name, part_of(value, slots))
        part.slots = len(part.lengths)
        return part

    def clear(self, slots: slice) -> None:
        """Clear some sequences, except for the target's caches, which prompts overwrite."""
        self.lengths[slots].zero_()
        by_slot.clear(part_of(self.draft_tensors, slots))

    def wipe(self, pages: Sequence[int]) -> None:
        """Zero the caches of target and draft for these sequences, and the free `pages` that they held: 0 × NaN is
        NaN."""
        self.caches.clear()
        by_slot.clear(self.draft_tensors)
        by_slot.wipe((self.caches, self.draft_tensors), upload(pages, torch.int64, self.device))

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the caches of target and draft for a prompt of `length` tokens from slot `source` to slot `target`."""
        self.caches.copy(source, target, length)
        by_slot.copy(self.draft_tensors, source, target, length)

    def move(self, source: int, target: int, length: int) -> None:
        """Move the sequence of slot `source`, with at least `length` committed tokens, to the free slot `target`."""
        self.pages.move(source, target)
        by_slot.move((self.caches, self.draft_tensors), source, target, length)
        own = self.tokens, self.lengths, self.prompt_lengths, self.first_step, self.first_root, self.active, self.nan
        options = self.stops, self.sampling, self.root_logprob, self.root_logits, self.root_tops
        by_slot.move((*own, *options, self.rules, self.skipped), source, target, length)
        self.active[source] = False
        self.lengths[source] = 0


class DecodeState:
    """Everything that one decode step of B sequences reads and writes, for one tree shape."""

    def __init__(self, sequences: Sequences, draft: Draft | None, spec: TreeSpec):
        self.spec = spec
        self._firsts: dict[int, DecodeState] = {}  # of the first sequences, by their number
        self._share(sequences)
        nodes, zeros = spec.nodes, self._zeros
        self.tree = Tree(
            zeros(nodes, dtype=torch.int64),
            zeros(nodes, dtype=torch.int32),
            zeros(nodes, dtype=torch.int32),
            zeros(nodes, -(-nodes // WORD), dtype=torch.int64),
        )
        self.tree.parents[:, 0] = -1
        self.tree.ancestors[:, 0, 0] = 1
        self.levels = spec.beam_levels  # the draft scores at most this many levels for the next tree
        # read by the host after a step, see update_sequence. After the tokens: their log-probabilities, EGAG's columns,
        # the drafts, the depth of the tree and its number of drafts
        self.report = zeros(REPORT_TOKENS + 2 * (spec.depth + 2) + _GUIDE + spec.drafts + 2, dtype=torch.int64)
        self.report[:, TREE_DEPTH], self.report[:, PROPOSED] = spec.depth, spec.drafts
        # [B, D + 2, V] float32: the logits of each token that the last step committed, and of the next root; None until
        # a request needs them
        self.token_logits: Tensor | None = None
        self.masks: TokenMasks | None = None  # None until a request has a grammar
        # [B, D + 2, 2, TOP_LOGPROBS] float64: the likeliest tokens at the same places
        self.token_tops: Tensor | None = None
        self.draft_tree_tensors: Any = (
            None if draft is None or not spec.drafts else draft.new_tree_tensors(spec, self.batch, sequences.device)
        )

    def _zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.batch, *shape, dtype=dtype, device=self.sequences.device)

    def first(self, slots: int) -> DecodeState:
        """The state of the first `slots` sequences, always the same object."""
        if slots == self.batch:
            return self
        if slots not in self._firsts:
            first, some = copy.copy(self), slice(0, slots)
            first._firsts = {}
            first._share(self.sequences.first(slots))
            first.tree, first.report = part_of(self.tree, some), self.report[some]
            first.draft_tree_tensors = part_of(self.draft_tree_tensors, some)
            first.token_logits = first.token_tops = first.masks = None
            self._firsts[slots] = first
        return self._firsts[slots]

    def move(self, source: int, target: int, length: int) -> None:
        """Move the tree of slot `source` to slot `target`, where its sequence is now."""
        by_slot.move((self.tree, self.draft_tree_tensors), source, target, length)

    def add_logits(self) -> None:
        """Allocate the target's logits of each token of a step, and of the roots."""
        self.sequences.add_logits()
        if self.token_logits is None:
            self.token_logits = self._zeros(self.spec.depth + 2, self.sequences.vocabulary, dtype=torch.float32)

    def add_masks(self) -> None:
        """Allocate the masks of grammars, all off."""
        if self.masks is None:
            device = self.lengths.device
            shape = (self.batch, self.spec.nodes, -(-self.sequences.vocabulary // MASK_WORD))
            allowed = torch.full(shape, -1, dtype=torch.int32, device=device)
            pinned = device.type == "cuda"
            written = torch.empty(shape, dtype=torch.int32, device="cpu", pin_memory=True) if pinned else allowed
            forced = self._zeros(min(self.spec.depth, self.spec.drafts), dtype=torch.int64).fill_(-1)
            self.masks = TokenMasks(allowed, self._zeros(dtype=torch.bool), written, forced)

    def add_tops(self) -> None:
        """Allocate the likeliest tokens beside each token of a step, and beside the roots."""
        self.sequences.add_tops()
        assert self.sequences.root_tops is not None
        if self.token_tops is None:
            sizes = self.sequences.root_tops.shape[1:]
            self.token_tops = self._zeros(self.spec.depth + 2, *sizes, dtype=torch.float64)

    def limited(self, levels: int | None) -> DecodeState:
        """The same tensors, but the draft scores at most `levels` levels for the next tree; None: all."""
        limited = copy.copy(self)
        limited.levels = self.spec.beam_levels if levels is None else levels
        return limited

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Steps inside the block do not change any sequence: no sequence is active.

        They still write rows after the committed ones, random counters and trees. What matters is restored, except a
        draft's rows: a chain's next rows may then be another chain's, which costs drafts at most.
        """
        sequences = self.sequences
        changed = [*self.tree, sequences.sampling.step, sequences.active, sequences.nan, sequences.root_logprob]
        changed += tensors_of(sequences.draft_tensors, objects=False)
        changed += [] if sequences.rules is None else [sequences.rules.seen, sequences.rules.counts]
        changed += [kept for kept in (sequences.root_logits, sequences.root_tops) if kept is not None]
        changed += [] if sequences.skipped is None else [*sequences.skipped]
        saved = [tensor.clone() for tensor in changed]
        sequences.active.fill_(False)
        try:
            yield
        finally:
            for tensor, before in zip(changed, saved, strict=True):
                tensor.copy_(before)

    def _share(self, sequences: Sequences) -> None:
        self.sequences, self.batch, self.capacity = sequences, sequences.slots, sequences.capacity
        self.tokens, self.lengths, self.active = sequences.tokens, sequences.lengths, sequences.active
        self.nan, self.sampling = sequences.nan, sequences.sampling

    @property
    def emitted(self) -> Tensor:
        """The tokens that the last step committed, and the next root: int64 [B, D + 2], then -1."""
        return self.report[:, REPORT_TOKENS : REPORT_TOKENS + self.spec.depth + 2]

    def logprobs_of(self, report: Tensor) -> Tensor:
        """The log-probabilities in a report of this state: of the committed tokens and the next root, float64
        [B, D + 2]."""
        first = REPORT_TOKENS + self.spec.depth + 2
        return report.view(torch.float64)[:, first : first + self.spec.depth + 2]

    def guide_of(self, report: Tensor) -> Tensor:
        """EGAG's columns of a report, float64 [B, 4]: the tree's normalised entropy, the average, gamma, and the next
        tree's gamma."""
        first = REPORT_TOKENS + 2 * (self.spec.depth + 2)
        return report.view(torch.float64)[:, first : first + _GUIDE]

    def drafts_of(self, report: Tensor) -> Tensor:
        """The verified drafts in a report that has them: int64 [B, N - 1], -1 in empty places."""
        return report[:, report.shape[1] - 2 - self.spec.drafts : TREE_DEPTH]

    @property
    def stops(self) -> Stops:
        """The sequences' stop rules, which may be replaced."""
        return self.sequences.stops
