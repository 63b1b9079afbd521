"""Products of few rows with weights as they lie in the model: the time is that of reading the weights once.

    linear:         out = x @ weight.T (+ bias) (+ residual)
    linear_stack:   out[i] = x @ weights[i].T (+ biases[i]), e.g. q, k and v
    linear_swiglu:  out = silu(x @ gate.T) * (x @ up.T)

| name       | shape                         | dtype, layout                                                |
|------------|-------------------------------|--------------------------------------------------------------|
| x          | [..., K]                      | fp16, bf16 or fp32                                           |
| weight     | [N, K]                        | as x, or a Float8Weight; a row is contiguous, rows may be    |
|            |                               | strided                                                      |
| bias       | [N]                           | as x                                                         |
| residual   | [..., N]                      | as x                                                         |
| out        | [..., N]                      | as x                                                         |

Numerics: fp32 accumulation (true fp32 products for fp32 inputs); bias and residual are applied in fp32 before the one
rounding to the output; SwiGLU rounds both products and silu(gate) first, as the models do. Where K is split, the
partial sums are added in the order of the splits, so the bits are the same every run: by the program that arrives last
at a tile, or, with `keep_splits`, by the operation that reads the product next (`SplitSums`), which saves a wait of 1.5
to 2 us at the end of the launch.

`dispatch.py` takes the calls and chooses a file: `few_rows.py`; on Hopper `hopper.py`, whose kernels ask for their
weights before their input is there, and `hopper_many_rows.py` for some products of up to 512 rows; and cuBLAS where it
is faster. Weights of eight bits with their scales go to `fp8.py`, on Hopper to `hopper_fp8_few_rows.py` and, of more
rows, to `hopper_fp8.py`; there a residual is added to what was rounded. What they are multiplied with may come as a
Float8Pair. `settings.py` has the table of launch settings, `weights.py` and `gluon_tiles.py` what kernels share.
"""

from eagle_triton.ops.linear.dispatch import linear, linear_stack, linear_swiglu

__all__ = ["linear", "linear_stack", "linear_swiglu"]
