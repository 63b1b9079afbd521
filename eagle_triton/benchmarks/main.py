"""Time EAGLE decoding: a model as it is against the same model optimised, a decode step, or single operations.

python benchmark.py                                      whole generations, on the embedded checkpoint
python benchmark.py --model PATH --draft PATH --prompt "..." --max-length 200 --num-runs 5
python benchmark.py step --shape llama-3.1-8b --context 512,2048 --batch 1,4,8 --output FILE.json --plot FILE.png
torchrun --nproc-per-node 2 benchmark.py step --shape llama-3.3-70b --batch 1     the same over two GPUs
python benchmark.py batches --shape llama-3.1-8b         trees where they are faster, against plain decoding
python benchmark.py megakernel --shape llama-3.2-1b      everything after the target's logits, in one launch or many
python benchmark.py drafters                             with and without a model, over three kinds of work
python benchmark.py questions                            files like MT-bench's, over drafters, tree sizes, temperatures
python benchmark.py egag                                 chains of a draft model, with lengths by its entropy
python benchmark.py prefill --shape llama-3.1-8b         first tokens, prompts that enter a batch, short requests
python benchmark.py plain --shape llama-3.1-8b           generate of a plain Hugging Face model
python benchmark.py mtp --hybrid qwen3.5-9b              a Qwen3.5 with multi-token prediction, over trees
python benchmark.py serve --request-rate 8               load on an OpenAI server: first tokens, time per token
python benchmark.py operations                           every kernel against the best of torch

Each mode has its own options: python benchmark.py step --help. Without a mode it is generate.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from contextlib import ExitStack, redirect_stdout
from typing import Any

from eagle_triton import command_line
from eagle_triton.benchmarks.modes import (
    DECODINGS,
    EVERYWHERE,
    MODES,
    OF_A_BLOCK,
    OF_STEPS,
    OF_THE_HEAD,
    OPTIONS,
    SHAPES,
    WITH_NODES,
    add_options,
    block_drafter_of,
    context_too_long,
    drafters_of,
)
from eagle_triton.benchmarks.question_file import OWN_QUESTIONS, digest, of_categories, read_questions
from eagle_triton.command_line import Parser, check_outputs, option_of, sentence
from eagle_triton.demo import PAIR
from eagle_triton.text_table import table_of


def main(argv: list[str] | None = None, program: str = "benchmark.py") -> int:
    """Run a mode. program: the name in help and errors. Returns the exit code."""
    parser, args = _parse(sys.argv[1:] if argv is None else argv, program)
    command_line.check_device(parser, args.device, only_gpu=args.mode == "megakernel")
    with parser.explains():
        from eagle_triton.devices import find_device, processes

        mode: Any = importlib.import_module(f"eagle_triton.benchmarks.{args.mode}")
        args.device = find_device(args.device)
    if args.mode == "megakernel" and args.device == "cpu":
        parser.stop("this mode needs a GPU, and torch sees none")
    _settle(args)
    if processes() > 1:
        return _share(parser, mode, args)
    return _measure(parser, mode, args)


def _share(parser: Parser, mode: Any, args: argparse.Namespace) -> int:
    """Run `_measure` in each of torchrun's processes. Rank 0 prints and writes."""
    import torch
    import torch.distributed as dist

    if args.mode != "step" or args.upstream or args.target_weights:
        parser.stop("torchrun must come with the mode step, and without --upstream and --target-weights")
    if args.device != "cpu":
        torch.cuda.set_device(args.device)
    dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
    with open(os.devnull, "w") as nowhere, ExitStack() as last:
        last.callback(dist.destroy_process_group)
        if dist.get_rank():
            args.json, args.output, args.csv, args.plot = True, None, None, None
            last.enter_context(redirect_stdout(nowhere))
        return _measure(parser, mode, args)


def _measure(parser: Parser, mode: Any, args: argparse.Namespace) -> int:
    """Measure, print the figures and write them to files. Keeps the figures from before a failure."""
    from torch import OutOfMemoryError

    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    try:
        mode.measure(args, rows, notes)
    except KeyboardInterrupt:
        if not rows:  # files of an earlier run stay as they are
            raise
        notes.insert(0, "FAIL: INTERRUPTED, FIGURES ARE MISSING")
        _publish(parser, mode, args, rows, notes)
        return 130
    except Exception as error:
        expected = isinstance(error, ValueError | OutOfMemoryError)  # from the model, the checkout or the options
        if expected and not rows:
            parser.stop(sentence(error))
        if not rows:
            raise
        notes.insert(0, f"FAIL: STOPPED, FIGURES ARE MISSING: {sentence(error)}")
        if not expected:
            _publish(parser, mode, args, rows, notes)
            raise
    return _publish(parser, mode, args, rows, notes)


def _publish(parser: Parser, mode: Any, args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> int:
    """Print the figures, then write them to files. Returns the exit code."""
    from eagle_triton.benchmarks.record import Record, publish

    record = Record.of(args.mode, args.device, args, rows, notes)
    text = record.json()
    if not args.json:
        shown = mode.text(rows) if hasattr(mode, "text") else table_of(mode.COLUMNS, rows)
        text = "\n".join([shown, "", *notes, record.facts])
    return publish(record, text, parser.prog, output=args.output, csv=args.csv, plot=args.plot)


def _parse(argv: list[str], program: str = "benchmark.py") -> tuple[Parser, argparse.Namespace]:
    named = bool(argv) and not argv[0].startswith("-")
    name = argv[0] if named else "generate"
    if name not in MODES:
        Parser(program, "").error(f"mode must be one of {', '.join(MODES)}, got {name!r}")
    parser = _parser(name, named, program)
    args = parser.parse_args(argv[named:])
    args.mode = name
    _check(parser, args)
    return parser, args


def _parser(name: str, named: bool, program: str) -> Parser:
    """The parser of a mode. It knows the options of the other modes, so that errors can name the right one."""
    mode = MODES[name]
    elsewhere = dict.fromkeys(MODES, "is a mode: it must be the first argument")
    for option in OPTIONS:
        readers = ", ".join(name for name, mode in MODES.items() if option in mode.options)
        elsewhere[option] = f"is not read here, but by {readers}"
    parser = Parser(f"{program} {name}" if named else program, f"{mode.summary}.", elsewhere)
    if not named:
        script = program.endswith(".py")
        usage = (__doc__ or "").replace("python benchmark.py", f"python {program}" if script else program)
        parser.description = usage.replace("2 benchmark.py", f"2 {'' if script else '--no-python '}{program}")
    own = {*mode.defaults, *mode.on_cpu}  # the summary has their defaults
    changes = {dest: {"help": OPTIONS[option_of(dest)]["help"].partition(" (default")[0]} for dest in own}
    if name in OF_STEPS:
        changes["max_length"] = {**changes.get("max_length", {}), "type": command_line.whole(2)}
    add_options(parser, f"{mode.names} {EVERYWHERE}", **changes)
    parser.set_defaults(**{**mode.defaults, **dict.fromkeys(mode.on_cpu)})
    return parser


def _check(parser: Parser, args: argparse.Namespace) -> None:
    if args.mode == "questions":
        args.drafters = args.drafters or drafters_of(args)
    if "--model" in MODES[args.mode].options:
        _check_model(parser, args)
    if args.mode == "step":
        drafts = {name: DECODINGS[name].drafts for name in args.decoding}
        if not args.shape and (random := [name for name, by in drafts.items() if by in ("block", "model")]):
            parser.error(f"--decoding {random[0]} must come with --shape: it drafts with random weights")
        if args.draft_weights and {*drafts.values()} == {"none"}:
            parser.error(f"--draft-weights is not read by --decoding {' '.join(args.decoding)}, which drafts nothing")
        if "grammar" in drafts and args.accept_length is not None:
            parser.error("--accept-length must come without --decoding grammar: it accepts what a grammar forbids")
        if "grammar" in drafts:
            _check_installed(parser, "llguidance", "grammar")
    if args.mode == "questions":
        _check_questions(parser, args)
    if args.mode == "serve":
        _check_serve(parser, args)
    if getattr(args, "target_weights", None) and getattr(args, "upstream", None):
        parser.error("--upstream must come without --target-weights: it has no quantised weights")
    files = {name: getattr(args, name, None) for name in ("questions", "output", "csv", "plot", "results")}
    check_outputs(parser, **files)


def _check_questions(parser: Parser, args: argparse.Namespace) -> None:
    try:
        questions = read_questions(args.questions or OWN_QUESTIONS)
    except (ValueError, OSError) as error:
        parser.error(f"--questions: {sentence(error)}")
    try:
        questions = of_categories(questions, args.category) if args.category else questions
    except ValueError as error:
        parser.error(f"--category {error}")
    args.questions_sha256 = digest(questions)
    readers = {"draft": OF_THE_HEAD, "eagle1": OF_THE_HEAD, "nodes": WITH_NODES, "block_drafter": OF_A_BLOCK}
    for name, drafters in readers.items():
        if getattr(args, name) and not set(args.drafters) & set(drafters):
            parser.unread(name, f"--drafters {' '.join(args.drafters)}", drafters)
    if (blocks := [name for name in args.drafters if name in OF_A_BLOCK]) and block_drafter_of(args) is None:
        parser.error(f"--block-drafter must be given for {', '.join(blocks)} with --model {args.model}")


def _check_serve(parser: Parser, args: argparse.Namespace) -> None:
    own: dict[str, Any] = {"model": PAIR, "no_speculation": False}
    for name in (*own, "draft", "shape", "max_num_seqs", "dtype", "device"):
        if args.url is not None and getattr(args, name) != own.get(name):
            parser.error(f"{option_of(name)} must come without --url: it is for a server that is started here")
    if args.request_rate and args.max_concurrency is None:
        args.max_concurrency = []
    _check_installed(parser, "aiohttp", "benchmark")


def _check_installed(parser: Parser, package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        parser.stop(f'not installed: {package}; pip install ".[{extra}]" in a clone of this repository')


def _check_model(parser: Parser, args: argparse.Namespace) -> None:
    prompt, shape = getattr(args, "prompt", None), getattr(args, "shape", None)
    if shape and (args.model != PAIR or args.draft or prompt):
        parser.error("--shape must come without --model, --draft and --prompt: it makes the model and random prompts")
    if shape and getattr(args, "block_drafter", None):
        parser.error("--shape must come without --block-drafter: no block drafter was trained for its random weights")
    if getattr(args, "context", None) and prompt:
        parser.error("--context must come without --prompt: it makes random prompts")
    if not shape and (args.mode != "questions" or set(args.drafters) & set(OF_THE_HEAD)):  # a head is needed
        command_line.check_model(parser, args.model, args.draft)
    positions = SHAPES[shape] if shape else command_line.stored_positions(args.model)
    if problem := context_too_long(args, positions):
        parser.error(problem)


def _settle(args: argparse.Namespace) -> None:
    """Set the defaults that depend on the device."""
    mode = MODES[args.mode]
    for name, small in mode.on_cpu.items():
        if getattr(args, name) is None:
            setattr(args, name, small if args.device == "cpu" else mode.defaults[name])
    shape = getattr(args, "shape", None) or getattr(args, "hybrid", None)
    if args.dtype is None:
        wide = args.device == "cpu" or (shape is None and args.mode != "operations")
        args.dtype = "float32" if wide else "bfloat16"
    if args.mode == "generate" and shape and not args.context:
        args.context = [512 if args.device != "cpu" else 64]
