"""Every operation of a decode step in plain torch: the oracle of the kernels' tests and the path of CPU tensors.

Each module has the stem of the kernel file it stands for, and each function the kernel launcher's signature. Nothing
here needs Triton.
"""
