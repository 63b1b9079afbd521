"""Verifies a draft tree: the walks of the verification strategies, and the update of the token sequence.

Greedy: a grid of (node, part) programs takes the argmax of the vocabulary; one program per sequence merges the parts
and walks. Sampled: filter_thresholds.row_thresholds gives every node's distribution as four numbers, so [N, V]
probabilities are never stored. Target match and top-p: a grid of (node, part) programs takes the argmax of the kept
logits with noise, which is made only in parts that keep a token; then the walk merges like the greedy one. Rejection:
the walk gathers only the children's masses, and only the last accepted node's row is read again, to draw the final
token.

| name       | shape, dtype           | meaning                                                       |
|---|---|---|
| logits     | [B, N, V] any float    | of the target after each node, any strides                    |
| tokens     | [B, N] int64           | the tree's tokens, node 0 the root                            |
| parents    | [B, N] int32           | -1 for the root, otherwise below the node's own index         |
| path       | [B, D + 1] int32       | node indices root .. last accepted, then -1                   |
| accepted   | [B] int32              | drafts accepted                                               |
| next_token | [B] int64              | the correction or bonus token                                 |
| nan        | [B] bool               | whether the sequence's logits hold a NaN                      |
| lengths    | [B] int32              | the root's position                                           |
| depths     | [B, N] int32           | of the nodes, 0 for the root                                  |
| ranks      | [B, N] int32           | tokens above the node's own in the parent's row               |

Numerics: comparisons in fp32 (exact for every input dtype), ties to the lower token, a NaN counts as the largest
logit. Masses in fp32, the final draw's sums in fp64, every sum in a fixed order.

`walks.py` follows tokens that are known for every node. `target_match.py`, `topp.py` and `rejection.py` are strategies
for sampled requests. `update.py` commits the accepted tokens.
"""

from eagle_triton.ops.verification.rejection import verify_sampling
from eagle_triton.ops.verification.target_match import verify_target_match
from eagle_triton.ops.verification.topp import verify_topp
from eagle_triton.ops.verification.update import update_sequence
from eagle_triton.ops.verification.walks import first_path, verify_greedy

__all__ = ["first_path", "update_sequence", "verify_greedy", "verify_sampling", "verify_target_match", "verify_topp"]
