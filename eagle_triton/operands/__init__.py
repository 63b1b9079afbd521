"""Operands of operations: types and constants that references, kernels and their callers share, and the checks of
arguments. One module for each stem; none needs Triton.

A check_* raises ValueError with the operation, the argument, what was expected and what was given, before anything is
written. The reference and the kernel's launcher call the same check.
"""
