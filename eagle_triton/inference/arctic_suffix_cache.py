"""Drafts from earlier text of requests: the interface of Arctic's SuffixDecodingCache, over flat tokens, not trees."""

from __future__ import annotations

from collections.abc import Collection, Hashable, KeysView, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from eagle_triton.engine.operations import suffix_draft
from eagle_triton.operands.suffix_match import END, SuffixDraft, SuffixRules
from eagle_triton.values import check_switches, checked_integer

__all__ = ["SuffixDecodingCache", "SuffixDecodingDraft"]

MAX_TOKEN = 2**31 - 1  # the largest token of an int32 store

TokenIds: TypeAlias = Sequence[int] | Tensor | Any  # or a numpy array


@dataclass
class SuffixDecodingDraft:
    """Drafted tokens, parents before children. parents: indices in the draft, -1 for tokens after the context."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)  # of the draft being right up to this token
    score: float = 0.0  # the sum of probs: how many tokens to expect
    match_len: int = 0  # tokens of the context that occurred before


class SuffixDecodingCache:
    """Remembers prompts and outputs, and drafts what followed the same tokens before.

    An active request has a local store with its prompt and output. One global store has the outputs, without prompts,
    of the cached requests: those started last, active or not. A request's own output is looked up in its local store
    only.

    Token ids are 1-D, each in 0 .. 2^31 - 1: a list of integers, a numpy array or a CPU tensor, of any integer dtype
    and stride. Anything else raises TypeError or ValueError with the argument's name, before anything changes.
    """

    def __init__(
        self,
        max_tree_depth: int = 64,
        max_cached_requests: int = -1,
        parity: bool = False,
        *,
        ban_tokens: Collection[int] = (),
    ) -> None:
        """max_tree_depth: of match and draft together. max_cached_requests: when there are more, the request that was
        started first is forgotten; 0: no global store, -1: no limit. ban_tokens: drafts end before these.

        parity: count as Arctic's class does. It divides a token's count by all occurrences of the match, even where
        nothing follows yet, as at the context's end. It never matches the whole context. Both stores have a request's
        own output.
        """
        check_switches(parity=parity)
        self._max_tree_depth = checked_integer("max_tree_depth", max_tree_depth, 1)
        self._max_cached_requests = checked_integer("max_cached_requests", max_cached_requests)
        if self._max_cached_requests < -1:
            raise ValueError(f"max_cached_requests must be at least -1 (no limit), got {max_cached_requests}")
        self._parity = parity
        self._banned = tuple(
            _tokens("ban_tokens", list(ban_tokens) if isinstance(ban_tokens, Set) else ban_tokens).tolist()
        )
        self._local: dict[Hashable, Tensor] = {}
        self._outputs: dict[Hashable, Tensor] = {}  # in the order of their starts

    @property
    def max_tree_depth(self) -> int:
        return self._max_tree_depth

    @property
    def max_cached_requests(self) -> int:
        return self._max_cached_requests

    @property
    def active_requests(self) -> KeysView[Hashable]:
        """Requests that were started and not stopped: a view that follows changes."""
        return self._local.keys()

    @property
    def cached_requests(self) -> KeysView[Hashable]:
        """Requests with output in the global store, active or not, oldest first: a view that follows changes."""
        return self._outputs.keys()

    def start_request(self, req_id: Hashable, prompt_token_ids: TokenIds) -> None:
        """Make a request active. This forgets the cached output of an earlier request of this id, and the oldest
        requests beyond the limit. Raises ValueError if the request is active."""
        if req_id in self._local:
            raise ValueError(f"start_request: request {req_id!r} is active already")
        self._local[req_id] = _tokens("prompt_token_ids", prompt_token_ids)
        if self._max_cached_requests == 0:
            return
        self._outputs.pop(req_id, None)
        self._outputs[req_id] = torch.empty(0, dtype=torch.int32)
        while 0 < self._max_cached_requests < len(self._outputs):
            del self._outputs[next(iter(self._outputs))]

    def add_active_response(self, req_id: Hashable, token_ids: TokenIds) -> None:
        """Append output to an active request, and to the global store while that has the request. Raises ValueError if
        the request is not active."""
        self._check_active("add_active_response", req_id)
        new = _tokens("token_ids", token_ids)
        self._local[req_id] = torch.cat((self._local[req_id], new))
        if req_id in self._outputs:
            self._outputs[req_id] = torch.cat((self._outputs[req_id], new))

    def stop_request(self, req_id: Hashable) -> None:
        """End a request: drop its local store, keep its output cached. Raises ValueError if it is not active."""
        self._check_active("stop_request", req_id)
        del self._local[req_id]

    def evict_cached_response(self, req_id: Hashable) -> None:
        """Drop a request's output from the global store. An active request stays active, but its further output is not
        cached. Raises ValueError if the request is not cached."""
        if req_id not in self._outputs:
            raise ValueError(f"evict_cached_response: request {req_id!r} is not cached")
        del self._outputs[req_id]

    def speculate(
        self,
        req_id: Hashable,
        context: TokenIds,
        max_spec_tokens: int | None = None,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        use_tree_spec: bool = False,
    ) -> SuffixDecodingDraft:
        """Draft after the context: the last tokens of an active request.

        After a match of m tokens at most floor(m * max_spec_factor + max_spec_offset) tokens are drafted, at most
        max_spec_tokens (0: none, None: what max_tree_depth leaves room for), none less probable than min_token_prob.
        use_tree_spec: the likeliest tree instead of the likeliest path. The draft with the largest score wins, then the
        longer match, then the local store. Raises ValueError if the request is not active, and ValueError or TypeError
        if an argument does not fit.
        """
        self._check_active("speculate", req_id)
        rules = SuffixRules(
            self._max_tree_depth,
            max_spec_tokens,
            max_spec_factor,
            max_spec_offset,
            min_token_prob,
            use_tree_spec,
            self._parity,
            self._banned,
        )
        end = _tokens("context", context)
        outputs = [ids for other, ids in self._outputs.items() if self._parity or other != req_id]
        draft = suffix_draft(_store([self._local[req_id]]), end, rules)
        others = suffix_draft(_store(outputs), end, rules)
        return _plain(draft if draft.score >= others.score else others)

    def _check_active(self, call: str, req_id: Hashable) -> None:
        if req_id not in self._local:
            raise ValueError(f"{call}: request {req_id!r} is not active")


def _store(sequences: list[Tensor]) -> Tensor:
    end = torch.tensor([END], dtype=torch.int32)
    return torch.cat([part for ids in sequences for part in (ids, end)] or [end])


def _plain(draft: SuffixDraft) -> SuffixDecodingDraft:
    tokens, parents, probs, score, match_len, _ = draft
    return SuffixDecodingDraft(tokens.tolist(), parents.tolist(), probs.tolist(), score, match_len)


def _tokens(name: str, given: Any) -> Tensor:
    """A copy as int32 [L]. TypeError unless they are integers, ValueError for a wrong shape, device or value."""
    if isinstance(given, Tensor) and given.device.type != "cpu":
        raise ValueError(f"{name} must lie on the CPU, got a tensor on {given.device}")
    if isinstance(given, (str, bytes)) or not (isinstance(given, Sequence) or hasattr(given, "tolist")):
        raise TypeError(
            f"{name} must be token ids, a list of integers, a numpy array or a CPU tensor, got {given!r:.60}"
        )
    shape = getattr(given, "shape", None)
    if shape is not None and len(shape) != 1:
        raise ValueError(f"{name} must be 1-D, got shape {list(shape)}")
    tokens = given.tolist() if hasattr(given, "tolist") else given
    ids = [checked_integer(f"{name}: a token", token) for token in tokens]
    if ids and not (min(ids) >= 0 and max(ids) <= MAX_TOKEN):
        raise ValueError(f"{name}: tokens must lie in 0..{MAX_TOKEN}, got {min(ids)}..{max(ids)}")
    return torch.tensor(ids, dtype=torch.int32)
