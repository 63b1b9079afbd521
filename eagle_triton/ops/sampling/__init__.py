"""Draws tokens from logits: temperature, top-k, top-p, min-p.

`filter_thresholds.py` finds the tokens of each row that the filters keep, without sorting. `draws.py` writes the
distribution or draws from it, with counter-based random numbers.
"""

from eagle_triton.ops.sampling.draws import probabilities, sample, uniform, uniform_at

__all__ = ["probabilities", "sample", "uniform", "uniform_at"]
