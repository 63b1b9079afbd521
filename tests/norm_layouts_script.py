"""Compile the norm that reads gathered parts and the one that exchanges them, and compare how both add up squares.

Sums of one layout have one order. Run by tests/test_peer_memory.py in a process of its own, which must not interpret;
needs no GPU. Exit status 1 if a layout differs, or if the exchange reads and writes other than 16 bytes at a time.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.compile_kernels import compiled  # noqa: I001  which chooses the compiler
from eagle_triton.ops.layers import add_rms_norm
from eagle_triton.runtime.split_sums import SharedSums, SplitSums
from tests.compile_cases._launches import FLOATS, fp32, launches, peers_of


def compiled_norm(x: SplitSums | SharedSums, dtype: str, arch: str, draft: bool) -> dict[str, str]:
    """The norm of a sum, as the target's assembly and what is before it."""
    residual, weight = FLOATS[dtype](*x.shape), FLOATS[dtype](x.shape[-1])
    (case,) = launches("norm", add_rms_norm, x, residual, weight, 1e-5, in_draft_pass=draft, targets=(arch,))
    return compiled(case, arch).asm


def layout_of_squares(assembly: dict[str, str]) -> str:
    """How a tensor whose squares are added up is spread over threads."""
    text = assembly["ttgir"]
    (name,) = set(re.findall(r"\"tt\.reduce\".*?\) : \(tensor<[^,]*xf32, (#\w+)>\)", text, re.S))
    (layout,) = re.findall(rf"^{name} = (.*)$", text, re.M)
    return layout


def main() -> int:
    differ = 0
    for arch in ("sm_80", "sm_90"):
        for size, ranks, splits, dtype, draft in (
            (4096, 2, 1, "bf16", False),
            (8192, 8, 2, "bf16", True),
            (5120, 4, 1, "fp16", False),
            (2048, 3, 2, "fp32", False),
        ):
            kind = FLOATS[dtype](1).dtype
            gathered = compiled_norm(SplitSums(fp32(ranks, 10, size), kind), dtype, arch, draft)
            for rows in (10, 300):  # few are sent
                part = FLOATS[dtype](rows, size) if splits == 1 else SplitSums(fp32(splits, rows, size), kind)
                shared = SharedSums(part, kind, peers_of(ranks, 512, 4 * size))
                exchanged = compiled_norm(shared, dtype, arch, draft)
                layouts = layout_of_squares(gathered), layout_of_squares(exchanged)
                narrow = re.findall(r"ld\.global(?:\.v2)?\.b16|st\.global(?:\.v2)?\.b16", exchanged["ptx"])
                wrong = layouts[0] != layouts[1] or narrow
                differ += bool(wrong)
                print("DIFFERS" if wrong else "ok", arch, size, ranks, splits, dtype, rows, *set(layouts), *narrow[:1])
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
