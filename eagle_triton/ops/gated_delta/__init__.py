"""The gated delta rule of Qwen3.5 and Qwen3-Next, and Mamba-2: over trees, over prompts, and what is committed.

    token:  S <- exp(g) S;   S <- S + k (beta (v - S' k))';   o = S' q
    tree:   (I + A) d = beta (v - e^G k S);   o = e^G q S + P d

A head's memory of a sequence is one matrix S. In a tree every node follows S and its ancestors. d are the updates of
all nodes. A and P hold the products of keys and queries with ancestors' keys, decayed over the nodes between them. G is
the sum of g along a path. The full formulas are in reference/gated_delta.py. Without b the operations compute
Mamba-2's layer, where d = dt v, so nothing is solved.

    causal_conv      a program for each (nodes, channels); a node's ancestors are the bits of its word, highest first
    delta_tree       a program for each (block of V, head, sequence): all nodes at once, one triangular system
    delta_chunk      the systems of all chunks of 64 tokens first; then, chunk after chunk, a program for each (block
                     of V, head, sequence), in two launches; a piece of a prompt is a chunk (`pieces.py`)
    delta_recurrent  the same grid, token after token; also for a tree with only a root
    gated_norm       a program for each (row, heads)
    gated_conv       LFM2's convolution, by the kernel of causal_conv
    commit_windows   for it, a program for each (layer, sequence, block of channels)
    commit_states    a program for each (layer, sequence, head, block of V), or block of a window's channels

| name      | shape, dtype             | meaning                                                               |
|---|---|---|
| q, k      | [B, n, H, K]             | products; H key heads for HV = R H value heads                        |
| v, z      | [B, n, H, R V]           | the same; z gates the output                          |
| a, b      | [B, n, H, R]             | products from which g and beta are made                                  |
| mixed     | [B, n, C] as the model's | the convolution's output: all q, all k, all v; C = 2 H K + HV V       |
| window    | [B, W - 1, C] as mixed   | the convolution's inputs of the last W - 1 tokens                     |
| state     | [B, HV, K, V] fp32       | S, in one piece for each sequence; K at most 256                      |
| ancestors | [B, n, 1] int64          | bit j of row i: node j is i or an ancestor of i                       |
| gates     | [B, n, 2, HV] fp32       | g and beta of each node                                               |

Inputs have any strides but a contiguous last dimension, a and b any at all. On GPUs a tree is padded to 16 or 64 nodes.

Numerics: fp32 throughout, rounded where the references round. Tensor cores multiply bf16 parts that add up to fp32, and
never by wgmma (`dots.py`). Trees and chunks are solved by forward substitution, in levels or in parts of 16 rows, so
similar keys cost no accuracy. The decay between two nodes is summed over the nodes between them. Only `take_in`
(`recurrent.py`) moves a state on token by token, with one order of sums. So a state's bits do not depend on whether its
tokens came as a chain, by plain decoding, or as paths of trees. `delta_chunk`, for prompts, differs by rounding. No
program depends on the batch or adds to another's result, so every run gives the same bits.
"""

from eagle_triton.ops.gated_delta.chunk import delta_chunk
from eagle_triton.ops.gated_delta.commit import commit_states, commit_windows
from eagle_triton.ops.gated_delta.conv import causal_conv, gated_conv
from eagle_triton.ops.gated_delta.norm import gated_norm
from eagle_triton.ops.gated_delta.recurrent import delta_recurrent
from eagle_triton.ops.gated_delta.tree import delta_tree

__all__ = [
    "causal_conv",
    "commit_states",
    "commit_windows",
    "delta_chunk",
    "delta_recurrent",
    "delta_tree",
    "gated_conv",
    "gated_norm",
]
