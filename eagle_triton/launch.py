"""Launch constants that several kernels share."""

DRAFT_WARPS = 4
"""Warps of the megakernel, and of every kernel of a draft pass: sums of the same layout have the same order."""

EXACT = {"enable_fp_fusion": False}
"""Products are fused into sums where `tl.fma` says so and nowhere else, so that a function gives the same bits in every
kernel it is compiled into, and rounds where it is written to."""
