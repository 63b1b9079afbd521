"""`eagle-triton quantize`: writes a target in eight or four bits, for transformers, vLLM and SGLang.

    eagle-triton quantize demo --to fp8 -o OUT
    eagle-triton quantize MODEL --to int4 -o OUT --text FILE

MODEL is a directory or hub id: docs/scaling.md lists the families. fp8 is the fine-grained layout: e4m3, with a scale
for each block of 128 by 128. int4 is the pack-quantized layout of compressed-tensors: w4a16, with a scale for each
group of 128 columns of a row. Vocabulary projection, embedding, norms and routers do not change. Exit code 0: written;
2: a wrong argument, or a checkpoint that cannot be quantised.
"""

from __future__ import annotations

import json
import sys

from eagle_triton import command_line
from eagle_triton.command_line import Parser


def main(argv: list[str] | None = None, program: str = "eagle-triton quantize") -> int:
    """Quantise a target. program: the name in help and errors."""
    parser = Parser(program, (__doc__ or "").replace("eagle-triton quantize", program))
    add = parser.add_argument
    add("target", type=command_line.model, metavar="MODEL", help="directory or hub id; demo: the embedded Llama")
    add("--to", choices=("fp8", "int4"), required=True, help="format of the projections")
    add("-o", "--output", type=command_line.new_directory, required=True, metavar="OUT", help="a new directory")
    add("--text", type=command_line.existing_file, metavar="FILE", help="also print the loss on its first 1,024 tokens")
    add("--device", type=command_line.device, metavar="NAME", help="for --text: cpu, cuda or cuda:N (default: cpu)")
    add("--json", action="store_true", help="print what was written as JSON")
    args = parser.parse_args(argv)
    if args.device is not None and args.text is None:
        parser.error("--device must come with --text: nothing else runs a model")
    device = args.device or "cpu"
    command_line.check_device(parser, device)
    with parser.explains():
        from eagle_triton.export.quantize import quantize_checkpoint

        written = quantize_checkpoint(args.target, args.output, args.to, text=args.text, device=device)
    if args.json:
        print(json.dumps(written.to_dict(), indent=2))
        return 0
    before, after = (size / 2**20 for size in (written.bytes_before, written.bytes_after))
    kind = {"fp8": "FP8", "int4": "int4"}[args.to]
    print(f"{written.projections} projections are {kind}: {after:.1f} MiB, {before:.1f} before", file=sys.stderr)
    if loss := written.loss:
        print(
            f"loss on {loss.tokens:,} tokens of {args.text}: {loss.before:.3f} -> {loss.after:.3f} nats a token",
            file=sys.stderr,
        )
    print(*written.notes, sep="\n", end="\n" * bool(written.notes), file=sys.stderr, flush=True)
    print(written.folder)
    return 0
