"""Drafts from earlier text: what followed earlier occurrences of a context's end. Needs no model and no suffix tree.

A store is a flat int32 tensor [S] of sequences, each followed by END. A context of C tokens, int32 [C], matches it at a
position e, the place of the token after the match, with

    length(e) = the most tokens m with store[e - m : e] == context[C - m :]

O(m), the positions with length(e) >= m, are the occurrences of the context's last m tokens, as many as in a suffix
tree. Those followed by tokens y are the occurrences of the match followed by y. So a tree of continuations is obtained
by splitting these positions by their next token, again and again. Tokens are not negative, and END equals no token, so
neither a match nor a continuation crosses the end of a sequence.

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

from eagle_triton.operands import suffix_match as operands
from eagle_triton.operands.suffix_match import END, Match, RepeatDrafts, SuffixDraft, SuffixRules, TokenRing


def match_lengths(store: Tensor, context: Tensor, limit: int | None = None) -> Tensor:
    """length(e) for every position of the store, at most `limit`; see the module.

    store [S] int32 with END after every sequence, context [C] int32; returns [S] int32. Raises ValueError if shapes or
    dtypes do not fit, if the store does not end with END, or if limit is negative.
    """
    operands.check_match_lengths(store, context, limit)
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
    """The draft with the largest expected number of right tokens, from earlier continuations of the context's end.

    store [S] int32 with END after every sequence, context [C] int32. For each m from min_match to the longest match, a
    draft is grown from O(m), with at most budget(m) tokens and max_tree_depth - m levels. A token's share is the number
    of positions that continue with it, divided by the number of positions that continue at all. Its probability is the
    product of the shares on its path. Tokens below min_token_prob are left out. A path follows the largest share; ties
    go to the later last position. A tree takes the largest probabilities; ties go to the shallower token, then to the
    later last position. The draft with the largest sum of probabilities wins; ties go to the longer match, even if it
    drafts nothing.

    parity: like Arctic's SuffixDecodingCache, shares are divided by the number of all positions, including the ends of
    sequences, and the whole context is not a match. Probabilities are exact fractions here, so ties are exact. Returns
    a `SuffixDraft`. Raises ValueError like `match_lengths`.
    """
    rules = rules or SuffixRules()
    context = context[-rules.max_tree_depth :]
    limit = max(0, len(context) - 1) if rules.parity else len(context)
    lengths = match_lengths(store, context, limit)
    positions = (lengths >= rules.min_match).nonzero()[:, 0]
    ahead = positions[:, None] + torch.arange(rules.max_tree_depth, device=store.device)
    ahead = store[ahead.clamp(max=len(store) - 1)]  # the tokens after each; the store ends with END
    ahead = ahead.masked_fill(torch.isin(ahead, store.new_tensor(rules.banned)), END)
    if not rules.parity:  # a match must be followed by something
        followed = ahead[:, 0] != END
        positions, ahead = positions[followed], ahead[followed]
    kept = _most_useful(lengths[positions], rules)
    lengths, rows = lengths[positions][kept], ahead[kept].tolist()
    best: list[_Node] = []
    score, match_len = Fraction(-1), 0
    for m in range(max(lengths.tolist(), default=0), rules.min_match - 1, -1):
        if min(rules.budget(m), rules.max_tree_depth - m) <= score:
            continue  # this few tokens cannot have a larger sum
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
    """The places of the matches that are counted, in order: the longest `keep`; ties go to the later match."""
    order = lengths.flip(0).sort(descending=True, stable=True).indices
    return (len(lengths) - 1 - order)[: rules.keep].sort().values


class _Node(NamedTuple):
    token: int
    parent: int
    prob: Fraction


def _grow(ahead: list[list[int]], occurrences: list[int], match: int, rules: SuffixRules) -> list[_Node]:
    """The best continuations of a match, the most likely first. ahead: the tokens after each occurrence, banned ones as
    END."""
    nodes: list[_Node] = []
    budget, levels = rules.budget(match), rules.max_tree_depth - match
    root = Fraction(-1), 0, 0, _Node(END, -1, Fraction(1)), occurrences
    waiting = [root]  # by probability, level, last position; nodes of one level have different positions
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
    """Split occurrences by their next token: yields the token, its probability and its occurrences. A path takes only
    the best."""
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
        if share + operands.SLACK >= rules.min_token_prob:
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
    """The tokens after an earlier occurrence of the last generated tokens.

    prompt [P] and generated [G] int32; the draft follows the last generated token. For n from max_ngram down to
    min_ngram, the last n generated tokens are searched in the prompt, then in the generated tokens without the last.
    The draft is the text after the match, at most `budget` tokens (none if that is 0 or negative). Matches at the end
    of a text are skipped. match: which of several matches to take, the leftmost or the latest. joined: search prompt
    and generated tokens as one text. Raises ValueError if shapes or dtypes do not fit, unless
    1 <= min_ngram <= max_ngram, or for another `match`.
    """
    operands.check_ngram_draft(prompt, generated, max_ngram, min_ngram, match)
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
    """A draft from one occurrence, with probabilities 1."""
    parents = torch.arange(-1, len(tokens) - 1, dtype=torch.int32, device=tokens.device)
    probs = torch.ones(len(tokens), dtype=torch.float32, device=tokens.device)
    return SuffixDraft(tokens, parents, probs, float(len(tokens)), match, 1 if match else 0)


def suffix_drafts(
    tokens: Tensor, lengths: Tensor, ring: TokenRing | None, places: int, rules: SuffixRules
) -> RepeatDrafts:
    """`suffix_draft` for B sequences, from their own tokens or from the ring: the draft with the larger score.

    tokens [B, C] int64: the first lengths + 1 of each sequence are known; lengths [B] int32, below C. rules limit draft
    and match; at most `places` J tokens are drafted. Ties go to the sequence's own tokens. Raises ValueError if shapes
    or dtypes do not fit.
    """
    operands.check_suffix_drafts("suffix_drafts", tokens, lengths, ring, places)
    most = places if rules.max_spec_tokens is None else min(places, rules.max_spec_tokens)
    rules = replace(rules, max_spec_tokens=most)
    former = None if ring is None else _former_outputs(ring)
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


def _former_outputs(ring: TokenRing) -> Tensor:
    """The ring as a store, the oldest output first. Places that are free would take most of the time of a search."""
    tokens = ring.tokens.roll(-int(ring.head))
    written = tokens != END
    return tokens[written | written.roll(1)]  # an output ends with one END


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
    """`ngram_draft` for B sequences, with the prompt and the generated tokens of each.

    tokens, lengths: see `suffix_drafts`; prompt_lengths [B] int32. Returns chains of at most `places` tokens, with
    probabilities 1. Raises ValueError like `suffix_drafts` and `ngram_draft`.
    """
    operands.check_ngram_drafts(tokens, lengths, prompt_lengths, places, max_ngram, min_ngram, match)
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
    """Drafts of all sequences as padded tensors."""

    def rows(name: str, dtype: torch.dtype, empty: float) -> Tensor:
        values = [getattr(draft, name).to(dtype) for draft, _ in drafts]
        return torch.stack([torch.nn.functional.pad(row, (0, places - len(row)), value=empty) for row in values])

    def column(values: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    found = [
        (draft.match_len, draft.occurrences, ring) if len(draft.tokens) else (0, 0, False) for draft, ring in drafts
    ]
    match, occurrences, from_ring = zip(*found, strict=True)
    return RepeatDrafts(
        tokens=rows("tokens", torch.int64, -1),
        parents=rows("parents", torch.int32, -1),
        probs=rows("probs", torch.float32, 0.0),
        match=column(match, torch.int32),
        occurrences=column(occurrences, torch.int32),
        from_ring=column(from_ring, torch.bool),
    )
