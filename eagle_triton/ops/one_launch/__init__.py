"""All layers of a model over one new row, in one persistent launch. For Hopper, in bf16.

    hidden, normed = the residual stream after the last layer, and its norm

128 programs stay for the whole launch. In each, one warp streams the program's share of all weights, and its keys and
values, through a ring in shared memory (`loading.py`). Weights depend on nothing but a mixture's choice of experts, so
this warp mostly waits for free slots only. Eight warps compute (`kernel.py`). A layer has four phases, which share the
code of their products:

    0  residual, norm                                    x [H]      -> q, k, v
    1  norms of heads, rotary, attention, its merge      x [8 * QD] -> o            (attention.py)
    2  residual, norm                                    x [H]      -> gate, up, SwiGLU
    3                                                    x [I]      -> down

In a mixture's layer (`mixture.py`) each program also makes one logit of the router in phase 2. All programs receive the
logits and choose the same eight experts. Sixteen programs share an expert's gate and up. In phase 3 a program makes its
rows of down for all eight, and their weighted sum.

A program makes whole rows of a product, eight at a time (a block), so no sum crosses programs. It attends every 16th
tile of keys for one of eight groups of heads, and merges 1/16 of that group's columns. QD is the width of a group's
queries. If there are fewer than eight key heads, groups that share one make its new key and value each for itself.

Between phases, programs send values to each other through mailboxes in global memory, without barriers
(`mailboxes.py`). `sizes.py` has what chooses the kernel's code, and `operands.py` its arguments.

Numerics: fp32 sums, rounded where the separate kernels round. Sums of products and of softmax have another order than
there, so the bits differ. Every run gives the same bits.

The code has some 60 KiB. For a mixture 75 KiB run. It should not grow: see docs/speed-notes.md, "One launch".
"""

from eagle_triton.ops.one_launch.kernel import one_launch_kernel  # noqa: F401
from eagle_triton.ops.one_launch.operands import Cache, Mailboxes, Model, Row, keys_descriptor, weights_descriptor  # noqa: F401
from eagle_triton.ops.one_launch.sizes import PROGRAMS, Sizes, settings_for  # noqa: F401
