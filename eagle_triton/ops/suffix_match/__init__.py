"""Drafts from repetition for a batch: the continuations of earlier occurrences of the sequences' ends, in the sequences
or in earlier outputs.

reference/suffix_match.py defines a match, its occurrences and a draft. Here the step's own graph finds them: shapes are
fixed, and the host reads nothing. `suffix_drafts` runs three kernels and a choice:

    match:   compare every position with the last two tokens of each sequence, and list those that agree
    walk:    measure how far each of them agrees, 64 tokens at once; sort the best of 1024 places
    draft:   for each of the longest distinct lengths, follow the matches of at least that length together
    choose:  take the draft with the highest score

A position is named by its time: its place in a sequence, or in the ring its distance from the oldest token.

| name             | shape, dtype             | meaning                                                           |
|---|---|---|
| tokens, lengths  | [B, C] int64, [B] int32  | the first lengths + 1 tokens are known                            |
| ring             | [R] int32, [1] int32     | former outputs with END after each, and where the next one goes   |
| hits, counts     | [B, S, 1024], [B, S, 32] | times where two tokens match, in S segments of 32 x 32 places     |
| best, reach      | [B, S, K], [B, S, 64]    | a segment's K best as length and time; number with m tokens or more |

S: a segment for every 1024 positions of a row, and one for every 32 chunks of 1024 positions of the ring.

The kernels have limits that the reference does not have:

- A match has at least 2 tokens (`min_match`) and at most 64 (`max_tree_depth`). `parity` needs SuffixDecodingCache.
- `keep` is at most 128, and None stands for 128.
- For each sequence, 32 of 1024 positions of the ring are listed: first those that agree in 4 tokens, then in 3 and 2,
  later ones first. All positions of the sequence itself are listed.
- The 8 longest distinct lengths in each store are tried.

Numerics: counts are integers; probabilities are products of their ratios in fp64, stored in fp32; the sum that chooses
a tree is rounded to 2^-18. No sum depends on the order of programs, so every run gives the same bits.

`ngram_drafts` needs no counts: its first kernel finds the longest match of each 1024 positions, its second the best of
them. At most 64 tokens match.

`suffixes.py` and `ngrams.py` have the two operations; `matches.py` finds the matches for `suffixes.py`.
"""

from eagle_triton.ops.suffix_match.ngrams import ngram_drafts
from eagle_triton.ops.suffix_match.suffixes import suffix_drafts

__all__ = ["ngram_drafts", "suffix_drafts"]
