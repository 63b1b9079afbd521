"""Compile the norm that reads gathered parts and the one that exchanges them, and compare how both add up squares.

Sums of one layout have one order. Run by tests/test_peer_memory.py in a process of its own, which must not interpret;
needs no GPU. Exit status 1 if a layout differs, or if the exchange reads and writes other than 16 bytes at a time.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import triton
from triton.compiler import ASTSource

from eagle_triton.ops.layers.norms import _rms_norm_kernel, _shared_rms_norm_kernel, norm_warps
from eagle_triton.runtime.launch import NO_FMA_FUSION
from tests.compile_cases.layers import _ALIGNED, _case
from tests.compile_kernels import TARGETS, _parts

NO_TOKENS = {"tokens_ptr": None}
ABSENT = {**NO_TOKENS, "pair": None, "WEIGHTS": 1}


def compiled(kernel, arch: str, dtype: str, part: str, warps: int, constexprs: dict) -> dict[str, str]:
    _, _, signature, constexprs, _ = _case("", kernel, constexprs, dtype=dtype, part=part, eps="fp32")
    attributes = {
        path: [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        for path, field, part in _parts((place,), name, kind)
        if part.startswith("*") or field in _ALIGNED
    }
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=TARGETS[arch], options={**NO_FMA_FUSION, "num_warps": warps}).asm


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
            block = triton.next_power_of_2(size)
            common = {"size": size, "BLOCK": block, "ZERO_CENTRED": False, "PDL": arch != "sm_80"}
            how = (dtype, "fp32", norm_warps(size, draft))
            gathered = compiled(_rms_norm_kernel, arch, *how, {**common, "SPLITS": ranks, **ABSENT})
            how = (dtype, dtype if splits == 1 else "fp32", how[2])
            for sent in (False, True):
                parts = {**common, **NO_TOKENS, "SPLITS": splits, "RANKS": ranks, "SENT": sent}
                exchanged = compiled(_shared_rms_norm_kernel, arch, *how, parts)
                layouts = layout_of_squares(gathered), layout_of_squares(exchanged)
                narrow = re.findall(r"ld\.global(?:\.v2)?\.b16|st\.global(?:\.v2)?\.b16", exchanged["ptx"])
                wrong = layouts[0] != layouts[1] or narrow
                differ += bool(wrong)
                print("DIFFERS" if wrong else "ok", arch, size, ranks, splits, dtype, sent, *set(layouts), *narrow[:1])
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
