"""Mixtures of experts over at most 64 rows, in three launches, and three more for a shared expert.

    route:              k of E experts for each row, by the scores of x @ weight.T
    experts_swiglu:     inner[r, j] = silu(x[r] @ gate[e].T) * (x[r] @ up[e].T),  e = experts[r, j]; or without a gate
                        relu(x[r] @ up[e].T)^2
    experts_down:       parts[j, r] = weights[r, j] * (inner[r, j] @ down[e].T)
    add_shared_expert:  out = routed + sigmoid(x @ gate.T) * shared

| name           | shape              | dtype, layout                                                    |
|----------------|--------------------|------------------------------------------------------------------|
| x              | [n, H]             | bf16, fp16, fp32; n <= 64                                        |
| weight         | [E, H]             | the router's: as x, or with "sigmoid" fp32                       |
| gate_up, down  | [E, 2I, H], [E, H, I] | as x, any strides; or Mxfp4Weight or FourBitExpertWeight, which are  |
|                |                    | rounded to x's dtype, or Float8ExpertWeight, which is not            |
| inner          | [n, k, I]          | as x                                                             |
| parts          | [k, n, H]          | fp32: SplitSums, which the next norm adds up                     |

Rows are not sorted by experts. The router writes which experts were hit, and for each one a word with a bit for each of
its rows (`Routes`). The grid of the products has a slot for each expert that may be hit, so one captured graph fits any
choice; programs of unused slots do nothing. A program multiplies one tile of an expert's weights by 16 of its rows, or
by 8 or 16 in `hopper_experts.py`, which has the products of weights in four bits with rows of bf16 on Hopper.

Numerics: fp32 sums in an order that depends only on the weights' shape, so neither the number of rows nor other rows
change a row's bits. Rounding is that of transformers' grouped path, but the sum over k may be in another order.
"""

from eagle_triton.ops.experts.products import experts_down as experts_down
from eagle_triton.ops.experts.products import experts_swiglu as experts_swiglu
from eagle_triton.ops.experts.routing import route as route
from eagle_triton.ops.experts.shared import add_shared_expert as add_shared_expert
