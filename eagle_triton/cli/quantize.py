"""`eagle-triton quantize`: write a target with its projections in eight bits, for transformers, vLLM and SGLang.

    eagle-triton quantize demo --to fp8 -o OUT
    eagle-triton quantize MODEL --to fp8 -o OUT

MODEL is a directory or hub id of a dense Llama, Mistral, Qwen2 or Qwen3. The layout is the fine-grained one: e4m3, a
scale for each block of 128 by 128. Vocabulary projection, embedding and norms stay as they are.
Exit code 0: written; 2: a wrong argument, or a checkpoint that cannot be rounded.
"""

from __future__ import annotations

import json
import sys

from eagle_triton import command_line
from eagle_triton.command_line import Parser


def main(argv: list[str] | None = None, program: str = "eagle-triton quantize") -> int:
    """Quantise a target; `program` is what it is called in its help and its errors."""
    parser = Parser(program, (__doc__ or "").replace("eagle-triton quantize", program))
    add = parser.add_argument
    add("target", type=command_line.model, metavar="MODEL", help="directory or hub id; demo: the embedded Llama")
    add("--to", choices=("fp8",), required=True, help="of the projections")
    add("-o", "--output", type=command_line.new_directory, required=True, metavar="OUT", help="a directory to be made")
    add("--json", action="store_true", help="print what was written as JSON")
    args = parser.parse_args(argv)
    with parser.explains():
        from eagle_triton.export.quantize import quantize_checkpoint

        written = quantize_checkpoint(args.target, args.output, args.to)
    if args.json:
        print(json.dumps(written.to_dict(), indent=2))
        return 0
    before, after = (size / 2**20 for size in (written.bytes_before, written.bytes_after))
    print(f"{written.projections} projections are FP8: {after:.1f} MiB, {before:.1f} before", file=sys.stderr)
    print(*written.notes, sep="\n", end="\n" * bool(written.notes), file=sys.stderr, flush=True)
    print(written.folder)
    return 0
