"""Print in which layouts the kernels that take tokens into a state sum, compiled for sm_90; needs no GPU.

    python tests/state_layouts.py

One line per kernel. Equal lines: sums of one order, so a state has the same bits by whichever kernel tokens came. Runs
in a process of its own, as compile_kernels.py does.
"""

from __future__ import annotations

import re
import sys

import compile_kernels

KERNELS = ("_delta_recurrent_kernel", "_commit_states_kernel")


def main() -> int:
    for case in compile_kernels._cases("gated_delta"):
        if case[1].__name__ in KERNELS:
            text = compile_kernels.compiled(case, "sm_90").asm["ttgir"]
            layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.M))
            sums = re.findall(r"\}\) : \(tensor<(\w+), (#\w+)>\) -> ", text)
            if sums:  # without the delta rule, a commit has none
                print(f"{case[0]}: {sorted({f'{shape} {layouts[layout]}' for shape, layout in sums})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
