"""Drafts from repetition for a batch: what followed the ends of sequences before, in themselves or in former outputs.

What a match, its occurrences and a draft are, reference/suffix_match.py says. Here the step's own graph finds them:
fixed shapes, nothing read by the host.

`suffix_drafts` takes three kernels and a choice:

    match:   every position is compared with the last two tokens of each sequence; those that agree are listed
    walk:    how far each of them agrees, 64 tokens at once; the best of 1024 places are sorted
    draft:   for each of the longest distinct lengths the matches of at least that length are followed together
    choose:  the draft that promises most

A position is named by its time: its place in a sequence; in the ring, how far it lies behind the oldest token.

| name             | shape, dtype             | meaning                                                           |
|---|---|---|
| tokens, lengths  | [B, C] int64, [B] int32  | of which the first lengths + 1 are known                          |
| ring             | [R] int32, [1] int32     | former outputs with END behind each, and where the next one goes  |
| hits, counts     | [B, S, 1024], [B, S, 32] | times that two tokens match, in S segments of 32 x 32 places      |
| best, reach      | [B, S, K], [B, S, 64]    | a segment's K best as length and time; how many have m tokens     |

S: a segment for every 1024 positions of a row, and one for every 32 chunks of 1024 positions of the ring.

What the kernels count is limited, where the reference is not:

- A match has at least 2 tokens (`min_match`) and at most 64 (`max_tree_depth`). The class with `parity` is on the host.
- `keep` is at most 128, which is what None stands for.
- Of 1024 positions of the ring 32 are listed for each sequence: those that agree in 4 tokens before those of 3 and 2,
  then the latest. All positions of a sequence's own are.
- The 8 longest distinct lengths in each store are tried.

Numerics: counts are integers, probabilities are products of their ratios in fp64, stored in fp32; the sum that a tree
is chosen by is rounded to 2^-18. No sum depends on an order of programs: the same bits every run.

`ngram_drafts` needs no counts: its first kernel finds the longest match of each 1024 positions, its second the best of
them. At most 64 tokens match.

`suffixes.py` and `ngrams.py` are the two; `matches.py` finds what the first drafts from.
"""

from eagle_triton.ops.suffix_match.ngrams import ngram_drafts
from eagle_triton.ops.suffix_match.suffixes import suffix_drafts

__all__ = ["ngram_drafts", "suffix_drafts"]
