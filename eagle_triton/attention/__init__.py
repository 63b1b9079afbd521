"""Attention of new nodes over the cache, split over its keys: flash decoding with the tree mask read as bits.

    out[b, i, h] = softmax_t(scale * q[b, i, h] . k[b, h // G, t] + mask[b, i, t]) . v[b, h // G, t]

The rows of one tile are the N * G queries that share a key/value head (row = node * G + query head within the group),
so that every key is read once for the whole group and the products are tall enough for the tensor cores.

| name       | shape                    | dtype   |                                                           |
|------------|--------------------------|---------|-----------------------------------------------------------|
| q, out     | [B, N, Hq, d]            | q       | the new nodes                                             |
| cache      | [2, P, Hkv, R, d]        | q       | keys and values of one layer, in P pages of R rows        |
| table      | [B, M]                   | int32   | of each sequence its pages, T = M * R; None: P = B, its own |
| lengths    | [B]                      | int32   | committed rows, visible to every node                     |
| ancestors  | [B, N, W]                | int64   | bit j of row i: node i sees cache row lengths + j         |
| partial    | [B, Hkv, S, N * G, d]    | float32 | weighted sum of the values of each of S programs (workspace) |
| softmax    | [B, Hkv, S, 2, N * G]    | float32 | log2 of what its weights are relative to; their sum       |
| lse        | [B, Hq, N]               | float32 | the natural logarithm of the sum of a row's weights       |

The keys of a sequence are split into parts, whose number follows from the static shapes of one sequence, and how many
of them share its rows from its length and the new keys: a captured graph serves every length, and a result depends
neither on the batch nor on the capacity. They share the rows evenly, half of them up to 64 tiles; the others are empty.
They are added up in the order of their numbers: the same bits whether each is a program's own (S = splits), as for a
single sequence, and `_merge_kernel` adds them up, or one program does so with all of them (S = 1), as in a large batch.
(But for what a split adds that is 2^-149 of what others do: it may be nothing in one way, and a denormal number in the
other.)

Numerics: products of the input dtype accumulated in fp32 (true fp32 for fp32 inputs), softmax in fp32 in the log2
domain, one rounding of the weights to the values' dtype and one of the result. The maximum that is taken off the scores
is rounded up to an integer: weights relative to different maxima then differ by powers of two, so that a weight is
rounded alike in every tile, split and tree, and a sum alike wherever it is added up. Rows of the cache that no node of
a tree may see are never multiplied, so what they hold (NaN included) does not matter. A row with nothing to see
gives 0.

`launchers.py` takes the calls. `kernels.py` has the Triton kernels, of which the megakernel has a part, `streamed.py`
the one that attends trees on Hopper instead, to the same bits; `settings.py` says how they are launched.
"""

from eagle_triton.attention.launchers import attend_committed, tree_attention

__all__ = ["attend_committed", "tree_attention"]
