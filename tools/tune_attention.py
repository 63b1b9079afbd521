"""Sweep launch settings of eagle_triton/attention.py on this GPU, over batches and numbers of keys.

    python tools/tune_attention.py --shape llama-3.1-8b --nodes 1 8 60 --batch 1 8 64 --keys 512 2048 8192

Prints, for each number of nodes and sequences, what reading the keys and values alone would take, what settings_for
takes today and the fastest settings: µs of attention and its merge at each number of keys, by CUDA-graph replay over
distinct caches in pages of 64 rows, together larger than L2. Settings are compiled first, in parallel, and checked
against fp32 before they are timed.

A list for a field of Settings (--splits 4 8) is what is tried of it; a field without one keeps what settings_for gives,
but for splits and programs. With other tiles, warps or stages than these, a tree is attended by attention_tiles.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.command_line import Parser, run_program, whole
from tools.tuning.sweep import read_sweep

SHAPES = ("llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b", "qwen3-0.6b", "qwen3-32b", "gemma3-12b", "glm-4.7-flash")
POWERS = [1, 2, 4, 8, 16, 32]


def main(argv: list[str] | None = None) -> int:
    parser = Parser("tune_attention.py", __doc__)
    add = parser.add_argument
    few, many = whole(most=512), whole(most=2**20)
    add("--shape", choices=SHAPES, default=SHAPES[0], help=f"a model with these heads (default: {SHAPES[0]})")
    add("--nodes", type=few, nargs="+", default=[1, 8, 60], metavar="N", help="per sequence (default: 1 8 60)")
    add("--batch", type=few, nargs="+", default=[1, 8, 64], metavar="N", help="sequences (default: 1 8 64)")
    add("--keys", type=many, nargs="+", default=[512, 2048, 8192], metavar="N", help="default: 512 2048 8192")
    for field, default in (("splits", POWERS), ("programs", POWERS), ("min_tiles", None), ("block_m", None)):
        add(f"--{field}", type=few, nargs="+", default=default, metavar="N")
    for field in ("block_n", "block_t", "num_warps", "num_stages"):
        add(f"--{field}", type=few, nargs="+", metavar="N")
    add("--streamed", type=int, choices=(0, 1), nargs="+", help="0: by attention_tiles.py, 1: by attention_hopper.py")
    args = read_sweep(parser, argv, "attention is", "number of keys")
    from tools.tuning.attention import sweep

    sweep(args)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
