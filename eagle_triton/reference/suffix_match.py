"""Drafts from repetition: what followed the end of a context when it stood somewhere before. No model, no tree.

A store is a flat int32 tensor [S] of sequences, each followed by END. A context of C tokens, int32 [C], matches it at a
position e, the place of the token behind the match, with

    length(e) = the most tokens m with store[e - m : e] == context[C - m :]

O(m), the positions with length(e) >= m, are the occurrences of the context's last m tokens: a suffix tree would count
as many. Those whose next tokens are y are the occurrences of the match with y behind it, so a tree of continuations is
nothing but these positions, divided by their next tokens again and again. Tokens are not negative, and END equals no
token: neither a match nor a continuation crosses the end of a sequence.

Sources: SuffixDecoding (arXiv 2411.04975) for `suffix_draft`, prompt lookup decoding for `ngram_draft`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

END = -1
SLACK = 1e-6  # of a budget and of min_token_prob: what rounding may take from them
DEEPEST, MOST_KEPT, MOST_BANNED, MOST_TIMES = 64, 128, 16, 1 << 24
"""What the kernels take at most, where the functions here have no limit: tokens of a match, matches, banned tokens, and
positions of a sequence or of the ring."""

Match = Literal["leftmost", "latest"]


@dataclass(frozen=True)
class SuffixRules:
    """How far a draft may go. Raises ValueError or TypeError for a value that makes no sense."""

    max_tree_depth: int = 64  # of match and draft together
    max_spec_tokens: int | None = None  # None: as many as the depth has room for
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1
    use_tree_spec: bool = False  # a tree of the likeliest continuations; otherwise one path
    parity: bool = False  # see `suffix_draft`
    banned: tuple[int, ...] = ()  # tokens that are never drafted: a continuation ends before them
    min_match: int = 1
    keep: int | None = None  # count only so many matches: the longest, of equally long ones the latest

    def __post_init__(self) -> None:
        for name, least in (("max_tree_depth", 1), ("max_spec_tokens", 0), ("min_match", 1), ("keep", 1)):
            value = getattr(self, name)
            if value is None and name in ("max_spec_tokens", "keep"):
                continue
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise TypeError(f"suffix_draft: {name} must be an integer, got {value!r}")
            if value < least:
                raise ValueError(f"suffix_draft: {name} must be at least {least}, got {value}")
        for name in ("max_spec_factor", "max_spec_offset", "min_token_prob"):
            value = getattr(self, name)
            if not isinstance(value, Real) or isinstance(value, bool):
                raise TypeError(f"suffix_draft: {name} must be a number, got {value!r}")
            if not math.isfinite(value):
                raise ValueError(f"suffix_draft: {name} must be finite, got {value}")
        if self.max_spec_factor < 0:
            raise ValueError(f"suffix_draft: max_spec_factor must not be negative, got {self.max_spec_factor}")
        if not 0 <= self.min_token_prob <= 1:
            raise ValueError(f"suffix_draft: min_token_prob must lie in 0..1, got {self.min_token_prob}")
        for name in ("use_tree_spec", "parity"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"suffix_draft: {name} must be True or False, got {value!r}")

    def budget(self, match: int) -> int:
        """The most tokens drafted behind a match: floor(match * factor + offset), within max_spec_tokens."""
        wanted = math.floor(match * self.max_spec_factor + self.max_spec_offset + SLACK)
        most = self.max_tree_depth if self.max_spec_tokens is None else self.max_spec_tokens
        return max(0, min(wanted, most))


class SuffixDraft(NamedTuple):
    """A draft of n tokens, parents before children; n may be 0."""

    tokens: Tensor  # [n] int32
    parents: Tensor  # [n] int32: places in the draft, -1 for those that follow the context
    probs: Tensor  # [n] float32: estimated probability that the draft is right up to here
    score: float  # their sum: how many tokens to expect
    match_len: int  # tokens of the context that the draft follows from, 0 if nothing ever followed them
    occurrences: int  # positions of that match that were counted


class TokenRing(NamedTuple):
    """Outputs of former requests, the oldest overwritten first; a static place on the device."""

    tokens: Tensor  # [R] int32: END behind each output, and wherever there is none
    head: Tensor  # [1] int32: where the next output goes; what stands there, or next behind it, is the oldest


class RepeatDrafts(NamedTuple):
    """What followed the ends of B sequences before, J places for each, parents before children."""

    tokens: Tensor  # [B, J] int64, -1 where nothing is drafted
    parents: Tensor  # [B, J] int32: places among the J, -1 for those that follow the sequence
    probs: Tensor  # [B, J] float32: estimated probability that the draft is right up to here, 0 where there is none
    match: Tensor  # [B] int32: tokens of the match that is continued, 0 where nothing is drafted
    occurrences: Tensor  # [B] int32: positions of that match that were counted
    from_ring: Tensor  # [B] bool: continued in the ring, not in the sequence itself


def match_lengths(store: Tensor, context: Tensor, limit: int | None = None) -> Tensor:
    """length(e) for every position of the store, at most `limit`; see the module.

    store [S] int32 with END behind every sequence, context [C] int32; returns [S] int32. Raises ValueError if shapes or
    dtypes do not fit, if the store does not end with END, or if limit is negative.
    """
    check_match_lengths(store, context, limit)
    longest = len(context) if limit is None else min(limit, len(context))
    lengths = torch.zeros_like(store)
    for m in range(1, longest + 1):
        token = context[-m]
        if m == 1:
            positions = (store[:-1] == token).nonzero()[:, 0] + 1
        else:
            positions = positions[positions >= m]
            positions = positions[store[positions - m] == token]
        if not len(positions) or token == END:
            break
        lengths[positions] = m
    return lengths


def suffix_draft(store: Tensor, context: Tensor, rules: SuffixRules | None = None) -> SuffixDraft:
    """What followed the context's end before, as often as it did: the draft with the most tokens to expect.

    store [S] int32 with END behind every sequence, context [C] int32. For each m from min_match to the longest match a
    draft is grown from O(m), of at most budget(m) tokens and max_tree_depth - m levels. A token's share is the number
    of positions that go on with it by the number of those that go on at all; its probability is the product of the
    shares on its way. Tokens below min_token_prob are left out. A path follows the largest share, the later last
    position among equals; a tree takes the largest probabilities, of equals the shallower one, then the later last
    position. The largest sum of probabilities wins, among equals the longer match, also where nothing is drafted.

    parity: shares are by the number of all positions, at the ends of sequences too, and the whole context is no match,
    as in Arctic's SuffixDecodingCache. Probabilities are exact fractions here, so ties are exact. Returns a
    `SuffixDraft`. Raises ValueError as `match_lengths`.
    """
    rules = rules or SuffixRules()
    context = context[-rules.max_tree_depth :]
    limit = max(0, len(context) - 1) if rules.parity else len(context)
    lengths = match_lengths(store, context, limit)
    positions = (lengths >= rules.min_match).nonzero()[:, 0]
    ahead = positions[:, None] + torch.arange(rules.max_tree_depth, device=store.device)
    ahead = store[ahead.clamp(max=len(store) - 1)]  # what follows each; the store ends with END
    ahead = ahead.masked_fill(torch.isin(ahead, store.new_tensor(rules.banned)), END)
    if not rules.parity:  # where nothing follows there is no match
        followed = ahead[:, 0] != END
        positions, ahead = positions[followed], ahead[followed]
    kept = _most_useful(lengths[positions], rules)
    lengths, rows = lengths[positions][kept], ahead[kept].tolist()
    best: list[_Node] = []
    score, match_len = Fraction(-1), 0
    for m in range(max(lengths.tolist(), default=0), rules.min_match - 1, -1):
        if min(rules.budget(m), rules.max_tree_depth - m) <= score:
            continue  # so few tokens cannot be worth more
        nodes = _grow(rows, (lengths >= m).nonzero()[:, 0].tolist(), m, rules)
        if (total := sum((node.prob for node in nodes), Fraction(0))) > score:
            best, score, match_len = nodes, total, m
    return SuffixDraft(
        tokens=store.new_tensor([node.token for node in best]),
        parents=store.new_tensor([node.parent for node in best]),
        probs=torch.tensor([float(node.prob) for node in best], dtype=torch.float32, device=store.device),
        score=float(max(score, Fraction(0))),
        match_len=match_len,
        occurrences=int((lengths >= max(match_len, 1)).sum()),
    )


def _most_useful(lengths: Tensor, rules: SuffixRules) -> Tensor:
    """Which matches of these lengths count, by place: the longest `keep` of them, of equal ones the later, in order."""
    order = lengths.flip(0).sort(descending=True, stable=True).indices
    return (len(lengths) - 1 - order)[: rules.keep].sort().values


class _Node(NamedTuple):
    token: int
    parent: int
    prob: Fraction


def _grow(ahead: list[list[int]], occurrences: list[int], match: int, rules: SuffixRules) -> list[_Node]:
    """The best continuations of a match, likeliest first. ahead: what follows each occurrence, banned tokens as END."""
    nodes: list[_Node] = []
    budget, levels = rules.budget(match), rules.max_tree_depth - match
    root = Fraction(-1), 0, 0, _Node(END, -1, Fraction(1)), occurrences
    waiting = [root]  # by probability, level, last position: two nodes of a level share no position
    while waiting and len(nodes) < budget:
        _, level, _, node, positions = heapq.heappop(waiting)
        if level:
            nodes.append(node)
        if level == levels:
            continue
        for token, prob, part in _children(ahead, positions, level, node.prob, rules):
            child = _Node(token, len(nodes) - 1, prob)
            heapq.heappush(waiting, (-prob, level + 1, -part[-1], child, part))
    return nodes


def _children(
    ahead: list[list[int]], positions: list[int], level: int, prob: Fraction, rules: SuffixRules
) -> Iterator[tuple[int, Fraction, list[int]]]:
    """Occurrences divided by their next token: the token, its probability, its occurrences. Only the best of a path."""
    parts: dict[int, list[int]] = {}
    for position in positions:
        parts.setdefault(ahead[position][level], []).append(position)
    ended = parts.pop(END, [])
    whole = len(positions) - (0 if rules.parity else len(ended))
    children = list(parts.items())
    if children and not rules.use_tree_spec:
        children = [max(children, key=lambda child: (len(child[1]), child[1][-1]))]
    for token, part in children:
        share = prob * Fraction(len(part), whole)
        if share + SLACK >= rules.min_token_prob:
            yield token, share, part


def ngram_draft(
    prompt: Tensor,
    generated: Tensor,
    budget: int,
    *,
    max_ngram: int = 5,
    min_ngram: int = 1,
    match: Match = "leftmost",
    joined: bool = False,
) -> SuffixDraft:
    """What followed the last generated tokens when they stood somewhere before.

    prompt [P] and generated [G] int32; generated ends with the token that the draft follows. For n from max_ngram down
    to min_ngram, the last n generated tokens are looked for in the prompt, then among the generated tokens but the
    last; the draft is what stands behind them there, at most `budget` tokens (none if that is 0 or negative). Matches
    with nothing behind them are passed over. match: which of several counts, the leftmost or the latest.
    joined: look through prompt and generated tokens as one text, to its end. Returns [n] int32, n may be 0. Raises
    ValueError if shapes or dtypes do not fit, unless 1 <= min_ngram <= max_ngram, or for another `match`.
    """
    check_ngram_draft(prompt, generated, max_ngram, min_ngram, match)
    end = prompt.new_tensor([END])
    if joined:
        texts = [torch.cat((prompt, generated, end))]
    else:
        texts = [torch.cat((prompt, end)), torch.cat((generated[:-1], end))]
    lengths = [match_lengths(text, generated, max_ngram) for text in texts]
    for n in range(max_ngram, min_ngram - 1, -1):
        for text, length in zip(texts, lengths, strict=True):
            positions = ((length >= n) & (text != END)).nonzero()[:, 0]
            if len(positions):
                first = int(positions[0 if match == "leftmost" else -1])
                return _chain(text[first:-1][: max(0, budget)], n)
    return _chain(prompt[:0], 0)


def _chain(tokens: Tensor, match: int) -> SuffixDraft:
    """A draft that follows the only occurrence."""
    parents = torch.arange(-1, len(tokens) - 1, dtype=torch.int32, device=tokens.device)
    sure = torch.ones(len(tokens), dtype=torch.float32, device=tokens.device)
    return SuffixDraft(tokens, parents, sure, float(len(tokens)), match, 1 if match else 0)


def suffix_drafts(
    tokens: Tensor, lengths: Tensor, ring: TokenRing | None, places: int, rules: SuffixRules
) -> RepeatDrafts:
    """`suffix_draft` for B sequences, each from its own tokens or from the ring: whichever promises more.

    tokens [B, C] int64, of which the first lengths + 1 of each sequence are known; lengths [B] int32, below C. Draft
    and match are within `rules`; at most `places` J tokens are drafted. Of equal scores the sequence's own counts.
    Raises ValueError if shapes or dtypes do not fit.
    """
    check_suffix_drafts("suffix_drafts", tokens, lengths, ring, places)
    most = places if rules.max_spec_tokens is None else min(places, rules.max_spec_tokens)
    rules = replace(rules, max_spec_tokens=most)
    former = None if ring is None else ring.tokens.roll(-int(ring.head))  # the oldest first
    drafts = []
    for row, length in zip(tokens, lengths.tolist(), strict=True):
        known = row[: length + 1].int()
        draft, from_ring = suffix_draft(torch.cat((known, known.new_tensor([END]))), known, rules), False
        if former is not None:
            other = suffix_draft(torch.cat((former, former.new_tensor([END]))), known, rules)
            if other.score > draft.score:
                draft, from_ring = other, True
        drafts.append((draft, from_ring))
    return _placed(drafts, places, tokens.device)


def ngram_drafts(
    tokens: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    places: int,
    *,
    max_ngram: int = 5,
    min_ngram: int = 1,
    match: Match = "leftmost",
    joined: bool = False,
) -> RepeatDrafts:
    """`ngram_draft` for B sequences, each of whose known tokens are its prompt and what was generated.

    tokens and lengths as `suffix_drafts`; prompt_lengths [B] int32. Returns chains of at most `places` tokens, their
    probabilities 1. Raises ValueError likewise, and for what `ngram_draft` refuses.
    """
    check_ngram_drafts(tokens, lengths, prompt_lengths, places, max_ngram, min_ngram, match)
    drafts = []
    for row, length, prompt in zip(tokens, lengths.tolist(), prompt_lengths.tolist(), strict=True):
        known = row[: length + 1].int()
        found = ngram_draft(
            known[:prompt], known[prompt:], places,
            max_ngram=max_ngram, min_ngram=min_ngram, match=match, joined=joined,
        )  # fmt: skip
        drafts.append((found, False))
    return _placed(drafts, places, tokens.device)


def _placed(drafts: list[tuple[SuffixDraft, bool]], places: int, device: torch.device) -> RepeatDrafts:
    """Drafts side by side in tensors."""

    def rows(name: str, dtype: torch.dtype, empty: float) -> Tensor:
        values = [getattr(draft, name).to(dtype) for draft, _ in drafts]
        return torch.stack([torch.nn.functional.pad(row, (0, places - len(row)), value=empty) for row in values])

    def column(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    some = [len(draft.tokens) > 0 for draft, _ in drafts]
    return RepeatDrafts(
        tokens=rows("tokens", torch.int64, -1),
        parents=rows("parents", torch.int32, -1),
        probs=rows("probs", torch.float32, 0.0),
        match=column([draft.match_len * real for (draft, _), real in zip(drafts, some, strict=True)], torch.int32),
        occurrences=column(
            [draft.occurrences * real for (draft, _), real in zip(drafts, some, strict=True)], torch.int32
        ),
        from_ring=column([from_ring and real for (_, from_ring), real in zip(drafts, some, strict=True)], torch.bool),
    )


def share_token_budget(drafts: Tensor, active: Tensor, threshold: int) -> Tensor:
    """How many tokens of each request go into a batch of at most `threshold`: itself and its drafts, first come first.

    drafts [B] int32, active [B] bool. A request may take what those before it have left, less one token for each active
    request after it; each active request has at least one, others none. Returns [B] int32. Raises ValueError if shapes
    or dtypes do not fit.
    """
    check_share_token_budget(drafts, active)
    shares, used, after = [], 0, int(active.sum())
    for wanted, runs in zip((drafts + 1).tolist(), active.tolist(), strict=True):
        after -= runs
        shares.append(max(1, min(wanted, threshold - used - after)) if runs else 0)
        used += shares[-1]
    return drafts.new_tensor(shares)


def check_match_lengths(store: Tensor, context: Tensor, limit: int | None) -> None:
    _check("match_lengths", "store", store)
    _check("match_lengths", "context", context)
    if len(store) and store[-1] != END:
        raise ValueError(f"match_lengths: store must end with END ({END}), got {int(store[-1])}")
    if limit is not None and limit < 0:
        raise ValueError(f"match_lengths: limit must not be negative, got {limit}")


def check_suffix_drafts(function: str, tokens: Tensor, lengths: Tensor, ring: TokenRing | None, places: int) -> None:
    if tokens.ndim != 2 or tokens.dtype != torch.int64 or (tokens.numel() and tokens.stride(1) != 1):
        raise ValueError(
            f"{function}: tokens must be torch.int64 [B, C] with stride 1 in its rows, got {tokens.dtype} "
            f"{list(tokens.shape)}"
        )
    batch = len(tokens)
    arguments = [("lengths", lengths, (batch,))]
    if ring is not None:
        arguments += [("ring.tokens", ring.tokens, (len(ring.tokens),)), ("ring.head", ring.head, (1,))]
        if not len(ring.tokens):
            raise ValueError(f"{function}: a ring of no tokens; None is no ring")
    for name, value, shape in arguments:
        if value.shape != shape or value.dtype != torch.int32 or value.device != tokens.device:
            raise ValueError(
                f"{function}: {name} must be torch.int32 {list(shape)} on {tokens.device}, got {value.dtype} "
                f"{list(value.shape)} on {value.device}"
            )
    if places < 1:
        raise ValueError(f"{function}: places must be at least 1, got {places}")


def check_ngram_draft(prompt: Tensor, generated: Tensor, max_ngram: int, min_ngram: int, match: str) -> None:
    _check("ngram_draft", "prompt", prompt)
    _check("ngram_draft", "generated", generated)
    check_ngram_rules("ngram_draft", max_ngram, min_ngram, match)


def check_ngram_drafts(
    tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor, places: int, max_ngram: int, min_ngram: int, match: str
) -> None:
    check_suffix_drafts("ngram_drafts", tokens, lengths, None, places)
    if prompt_lengths.shape != lengths.shape or prompt_lengths.dtype != torch.int32:
        raise ValueError(
            f"ngram_drafts: prompt_lengths must be torch.int32 {list(lengths.shape)}, got {prompt_lengths.dtype} "
            f"{list(prompt_lengths.shape)}"
        )
    check_ngram_rules("ngram_drafts", max_ngram, min_ngram, match)


def check_ngram_rules(function: str, max_ngram: int, min_ngram: int, match: str) -> None:
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(f"{function}: 1 <= min_ngram <= max_ngram expected, got {min_ngram} and {max_ngram}")
    if match not in get_args(Match):
        raise ValueError(f"{function}: match must be one of {', '.join(get_args(Match))}, got {match!r}")


def check_share_token_budget(drafts: Tensor, active: Tensor) -> None:
    _check("share_token_budget", "drafts", drafts)
    if active.shape != drafts.shape or active.dtype != torch.bool:
        raise ValueError(
            f"share_token_budget: active must be torch.bool {list(drafts.shape)}, got {active.dtype} "
            f"{list(active.shape)}"
        )


def _check(function: str, name: str, value: Tensor) -> None:
    if value.ndim != 1 or value.dtype != torch.int32:
        raise ValueError(f"{function}: {name} must be torch.int32, 1-D, got {value.dtype} {list(value.shape)}")
