"""Launches kernels: compiled ahead, started early, with barriers inside, passing sums to the next kernel.

No operation is here, and nothing depends on EAGLE.
"""
