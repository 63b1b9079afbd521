"""How kernels are launched: compiled ahead, started early, with barriers inside, handing sums to the next one.

No operation lives here, and nothing here knows EAGLE.
"""
