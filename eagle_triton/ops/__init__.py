"""Every operation: kernels, and the functions that check and launch them."""
