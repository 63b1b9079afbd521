"""The fused draft-verify-update megakernel: from the target's logits to the next draft tree in one launch.

A persistent grid of PROGRAMS programs goes through the phases of a step together. The programs share a phase's tasks,
and a grid barrier separates phases. A task calls the same device function as the separate kernel of its operation, with
the same launch settings, so the results are equal to the bit.

    verify      greedy: the argmax of every node, the walk; then each sequence advances, and its cache rows are moved
    extend      the draft head takes in the accepted tokens: features -> fc -> a pass over those tokens
    beams       depth - 1 further passes over the chosen children of the last one
    a pass      inputs -> (fc ->) q, k, v -> rotary, append -> attention -> merge -> o -> norm -> SwiGLU -> down
                -> norm -> vocabulary projection -> top-k by chunks -> merge
    build       the last children's scores, re-rank and tree

The first phase of the next pass scores the children of a pass. Each program finds the beam for itself, which takes less
time than a barrier.

`kernel.py` has the kernel, `verify.py` the phases before the passes, `draft_pass.py` those of a pass, and `tensors.py`
what they read and write.

Numerics: as in the operations. A barrier that waits too long ends the launch with FAULT in every sequence's report (see
`grid_barrier`), and the host raises.
"""
