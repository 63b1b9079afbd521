"""The gated delta rule of Qwen3.5's and Qwen3-Next's linear layers: over trees, over prompts, and what is committed.

What the operations compute, and the names and shapes of their tensors, reference/gated_delta.py says. Here:

    causal_conv      a program for each (nodes, channels); a node's ancestors are the bits of its word, highest first
    delta_tree       a program for each (block of V, head, sequence): all nodes at once, one triangular system
    delta_chunk      the systems of all chunks of 64 tokens first; then, chunk after chunk, a program for each (block
                     of V, head, sequence), in two launches
    delta_recurrent  token after token, likewise; also a tree that is only its root
    gated_norm       a program for each (row, heads)
    commit_states    a program for each (layer, sequence, head, block of V), or block of a window's channels

Inputs may have any strides but a contiguous last dimension; a sequence's state [HV, K, V] lies in one piece, K is at
most 256. On GPUs a tree has 16 or 64 rows.

Numerics: fp32 throughout, rounded where the references round. Products on tensor cores are of bf16 parts that together
are fp32 (`dots.py`). Trees and chunks are solved by forward substitution, in levels or in parts of 16 rows, so that
keys that are alike cost no accuracy. What decays between two nodes is summed over the nodes between them.
`take_in` (`recurrent.py`) alone moves a state on token by token, in one order of sums: a state has the same bits
whether its tokens came as a chain, by plain decoding, or as paths of trees. `delta_chunk`, for prompts, gives it up to
rounding.
No program depends on the batch, none adds to what another wrote: the same bits every run.
"""

from eagle_triton.gated_delta.chunk import delta_chunk
from eagle_triton.gated_delta.commit import commit_states
from eagle_triton.gated_delta.conv import causal_conv
from eagle_triton.gated_delta.norm import gated_norm
from eagle_triton.gated_delta.recurrent import delta_recurrent
from eagle_triton.gated_delta.tree import delta_tree

__all__ = ["causal_conv", "commit_states", "delta_chunk", "delta_recurrent", "delta_tree", "gated_norm"]
