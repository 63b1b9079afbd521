"""Time EAGLE decoding: the model as it is against the same model optimised, a decode step, or its single operations.

python benchmark.py                                      whole generations, on the embedded checkpoint
python benchmark.py --model PATH --draft PATH --prompt "..." --max-length 200 --num-runs 5
python benchmark.py step --shape llama-3.1-8b --context 512,2048 --batch 1,4,8 --output FILE.json --plot FILE.png
python benchmark.py batches --shape llama-3.1-8b         trees as they pay against plain decoding, 1 to 32 sequences
python benchmark.py megakernel --shape llama-3.2-1b      all behind the target's logits as one launch and as many
python benchmark.py operations                           every kernel against the best of torch
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import batches, generate, megakernel, operations, step
from benchmarks.plot import plot
from benchmarks.record import Record, machine
from eagle_triton.models.shapes import SHAPES

UNRECORDED = ("mode", "json", "commit", "output", "csv", "plot")  # options that change no figure
MODES = {
    "generate": generate,
    "step": step,
    "batches": batches,
    "megakernel": megakernel,
    "operations": operations,
}


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    try:
        MODES[args.mode].measure(args, rows, notes)
    except KeyboardInterrupt:
        notes.insert(0, "FAIL: INTERRUPTED, FIGURES ARE MISSING")
    except (ValueError, FileNotFoundError) as error:  # of the model, the checkout or the options
        print(f"benchmark.py: {error}", file=sys.stderr)
        return 2
    options = {name: value for name, value in vars(args).items() if name not in UNRECORDED}
    options["upstream"] = args.upstream is not None  # where it lies is nobody's business
    record = Record(args.mode, machine(torch.device(args.device), args.commit), options, rows, notes)
    if args.output:
        args.output.write_text(record.json() + "\n", encoding="utf-8")
    if args.csv:
        record.write_csv(args.csv)
    if args.plot:
        plot(record, args.plot)
    if args.json:
        print(record.json())
    else:
        facts = ", ".join(f"{name} {value}" for name, value in record.machine.items() if value)
        print("\n".join([MODES[args.mode].text(rows), "", *notes, facts]))
    return 1 if any(note.startswith("FAIL") for note in notes) else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmark.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("mode", nargs="?", choices=MODES, default="generate", help="what to time (default: generate)")
    parser.add_argument("--model", default="demo", help="directory or hub id of the target (default: demo)")
    parser.add_argument("--draft", default=None, help="directory or hub id of the head (default: the demo's)")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead of a checkpoint")
    parser.add_argument("--eagle1", action="store_true", help="the head is EAGLE-1/2 instead of EAGLE-3")
    parser.add_argument("--prompt", default=None, help="one prompt, repeated (default: the demo's held-out ones)")
    parser.add_argument("--context", type=_sizes, default=[], metavar="N[,N...]", help="random prompts of N tokens")
    parser.add_argument(
        "--batch", type=_sizes, metavar="B[,B...]", help="sequences at a time (step, batches, megakernel)"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="operations whose name contains TEXT")
    parser.add_argument("--max-length", type=int, default=100, help="new tokens per prompt (default: 100)")
    parser.add_argument("--num-runs", type=int, default=5, help="prompts, or repetitions (default: 5)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of generate mode (default: 0, greedy)")
    parser.add_argument(
        "--accept-length",
        type=float,
        metavar="X",
        help="for timing only: accept X drafts per step, right or wrong",
    )
    parser.add_argument("--upstream", type=Path, metavar="PATH", help="checkout of SafeAILab/EAGLE, timed as well")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: see below")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the same JSON to a file")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows as CSV")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the figures")
    parser.add_argument("--commit", help="what to record as the commit instead of what git says")
    parser.epilog = "dtype: float32; bfloat16 on a GPU for --shape and operations"
    args = parser.parse_args(argv)
    _check(parser, args)
    if args.batch is None:
        args.batch = batches.BATCHES if args.mode == "batches" else [1]
    if args.accept_length is None and args.mode == "batches":
        args.accept_length = batches.ACCEPTED
    if args.dtype is None:
        wide = args.device == "cpu" or (args.shape is None and args.mode != "operations")
        args.dtype = "float32" if wide else "bfloat16"
    if args.mode == "generate" and args.shape and not args.context:
        args.context = [512 if args.device != "cpu" else 64]
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.max_length < 1 or args.num_runs < 1:
        parser.error("--max-length and --num-runs must be at least 1")
    if not args.temperature >= 0:
        parser.error(f"--temperature must be at least 0, got {args.temperature}")
    if args.accept_length is not None and not 0 <= args.accept_length < 1000:
        parser.error(f"--accept-length must be at least 0, got {args.accept_length}")
    if args.mode not in ("step", "batches", "megakernel") and args.batch not in (None, [1]):
        parser.error("--batch is for batches, megakernel and step mode: the original decodes one sequence at a time")
    if args.only and args.mode != "operations":
        parser.error("--only is for operations mode")
    if args.shape and (args.model != "demo" or args.draft or args.prompt):
        parser.error("--shape builds the model and random prompts: no --model, --draft or --prompt with it")
    if args.context and args.prompt:
        parser.error("--context makes random prompts: no --prompt with it")
    try:
        device = torch.device(args.device)
    except RuntimeError:
        parser.error(f"--device must be cpu or cuda, got {args.device!r}")
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        parser.error(f"--device {args.device} is not available here")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    for path in (args.output, args.csv, args.plot):
        if path and not path.absolute().parent.is_dir():
            parser.error(f"{path.absolute().parent} is no directory")


def _sizes(text: str) -> list[int]:
    """Positive integers, separated by commas."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"expected positive integers separated by commas, got {text!r}")
    return sizes


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends a run as Ctrl-C does
    sys.exit(main())
