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
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_triton.operands.suffix_match import (
    END,
    SLACK,
    Match,
    RepeatDrafts,
    SuffixDraft,
    SuffixRules,
    TokenRing,
    check_match_lengths,
    check_ngram_draft,
    check_ngram_drafts,
    check_share_token_budget,
    check_suffix_drafts,
)


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
