"""Products of few rows with the model's own weights. They take about as long as reading the weights once.

    linear:         out = x @ weight.T (+ bias) (+ residual)
    linear_stack:   out[i] = x @ weights[i].T (+ biases[i]), e.g. q, k and v
    linear_swiglu:  out = silu(x @ gate.T) * (x @ up.T)

| name       | shape                         | dtype, layout                                                |
|------------|-------------------------------|--------------------------------------------------------------|
| x          | [..., K]                      | fp16, bf16 or fp32                                           |
| weight     | [N, K]                        | as x, a Float8Weight or a FourBitWeight; a row is            |
|            |                               | contiguous, rows may be strided                              |
| bias       | [N]                           | as x                                                         |
| residual   | [..., N]                      | as x                                                         |
| out        | [..., N]                      | as x                                                         |

Numerics: fp32 accumulation (true fp32 products for fp32 inputs). Bias and residual are added in fp32 before the one
rounding to the output. SwiGLU rounds both products and silu(gate) first, as the models do. If K is split, partial sums
are added in the order of the splits, so every run gives the same bits. The last program to arrive at a tile adds them;
or, with `keep_splits`, the operation that reads the product next (`SplitSums`), which saves 1.5 to 2 us.

`dispatch.py` takes the calls and chooses a file: `few_rows.py`; on Hopper `hopper.py`, where kernels load weights
before their input is ready, and `hopper_many_rows.py` for some products of up to 512 rows; or cuBLAS where it is
faster. Eight-bit weights go to `fp8.py`, on Hopper to `hopper_fp8_few_rows.py` or, with more rows, to `hopper_fp8.py`;
there a residual is added after rounding, and x may be a Float8Pair. Four-bit weights go to `four_bits.py`: they are
rounded to x's dtype before the product, and a residual is added after it. `settings.py` has the table of launch
settings. Kernels share `weights.py` and `gluon_tiles.py`, launchers `side_by_side.py`.
"""

from eagle_triton.ops.linear.dispatch import linear, linear_stack, linear_swiglu

__all__ = ["linear", "linear_stack", "linear_swiglu"]
