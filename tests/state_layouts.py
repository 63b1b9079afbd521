"""Print in which layouts the kernels that take tokens into a state sum, compiled for sm_90; needs no GPU.

    python tests/state_layouts.py

One line per kernel. Equal lines: sums of one order, so a state has the same bits by whichever kernel tokens came. Runs
in a process of its own, as compile_kernels.py does.
"""

from __future__ import annotations

import re
import sys

import compile_kernels

KERNELS = re.compile("delta_recurrent|delta_tree 1 node|commit_states")


def main() -> int:
    compile_kernels._cuda_usage = lambda compiled: compiled.asm["ttgir"]
    for index, (name, *_) in enumerate(compile_kernels._cases("gated_delta")):
        if KERNELS.match(name):
            text = compile_kernels._compile(("gated_delta", index, "sm_90"))
            layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.M))
            sums = re.findall(r"\}\) : \(tensor<(\w+), (#\w+)>\) -> ", text)
            print(f"{name}: {sorted({f'{shape} {layouts[layout]}' for shape, layout in sums})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
