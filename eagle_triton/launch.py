"""Launch constants that several kernels share."""

DRAFT_WARPS = 4
"""Warps of the megakernel, and of every kernel of a draft pass: sums of the same layout have the same order."""
