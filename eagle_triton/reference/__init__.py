"""Every operation of a decode step in plain torch: the reference for the kernels' tests, and the code for CPU tensors.

Each module has the stem of its kernel file, each function the signature of its kernel launcher. Nothing here needs
Triton.
"""
