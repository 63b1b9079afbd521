"""`eagle-triton export`: writes a draft head for vLLM, SGLang, speculators or SafeAILab's EaModel, or a block drafter
for vLLM and SGLang, and prints how to serve it.

    eagle-triton export demo --to vllm -o OUT
    eagle-triton export HEAD --target MODEL --to sglang -o OUT
    eagle-triton export HEAD --target MODEL --to vllm --tensor-parallel-size 4 --check -o OUT

HEAD is a directory or hub id in any layout; demo is the embedded EAGLE-3 head, demo-block a block drafter. stdout can
be pasted: the command, then the same in Python. stderr names the changes. Exit code 0: written; 1: written, but --check
found other drafts; 2: a wrong argument, the engine cannot do it, or it is written and --check cannot run.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from eagle_triton import command_line
from eagle_triton.command_line import Parser
from eagle_triton.export.engines import ENGINES, METHODS_FOR_OPTION

TREE = ("total_token", "depth", "top_k")


def main(argv: list[str] | None = None, program: str = "eagle-triton export") -> int:
    """Export a head. program: the name in help and errors."""
    parser, args = _parse(argv, program)
    tree = {name: getattr(args, name) for name in TREE}
    compared = None
    with parser.explains():
        import torch

        from eagle_triton.export.comparison import compare_drafts
        from eagle_triton.export.export_head import export_head

        chain = {name: getattr(args, name) for name in ("num_speculative_tokens", "tensor_parallel_size")}
        plan = export_head(args.head, args.to, args.output, args.target, **tree, **chain)
        if args.check:
            dtype = args.dtype and getattr(torch, args.dtype)
            device = args.device or "cpu"
            with parser.explains(f"wrote {plan.folder}, and --check failed"):
                compared = compare_drafts(args.head, plan.folder, args.target, device=device, dtype=dtype, **tree)
    if args.json:
        print(json.dumps({**plan.to_dict(), "check": None if compared is None else vars(compared)}, indent=2))
    else:
        _tell(plan, compared)
    return 0 if compared is None or compared.same else 1


def _tell(plan: Any, compared: Any) -> None:
    told = [f"wrote {plan.folder}", *plan.notes]
    if compared is not None:
        told.append(f"read back: the same bits, {compared.equal} of {compared.prompts} drafts are equal")
    print(*told, sep="\n", file=sys.stderr, flush=True)
    print(*([plan.shell] if plan.command else []), plan.python, sep="\n\n")


def _parse(argv: list[str] | None, program: str) -> tuple[Parser, argparse.Namespace]:
    parser = Parser(program, (__doc__ or "").replace("eagle-triton export", program))
    add, whole = parser.add_argument, command_line.whole
    add("head", type=command_line.model, metavar="HEAD", help="directory or hub id; demo: the embedded EAGLE-3 head")
    add("--target", type=command_line.model, metavar="PATH_OR_ID", help="the model that HEAD drafts for")
    add("--to", choices=ENGINES, required=True, help="the engine to write it for")
    add("-o", "--output", type=command_line.new_directory, required=True, metavar="OUT", help="a new directory")
    for option, least, default, told in (
        ("--total-token", 2, None, "nodes of a tree (default: the head's)"),
        ("--depth", 1, None, "beam passes after the first, of a tree or a chain (default: the head's)"),
        ("--top-k", 1, None, "beam width of a tree (default: the head's)"),
        ("--num-speculative-tokens", 1, None, "drafts per step in vLLM (default: the tree's levels)"),
        ("--tensor-parallel-size", 1, 1, "GPUs that the engine runs on (default: 1)"),
    ):
        add(option, type=whole(least, 1024), default=default, metavar="N", help=told)
    add("--check", action="store_true", help="read it back, and compare its drafts for 32 prompts")
    add("--device", type=command_line.device, metavar="NAME", help="for --check: cpu, cuda or cuda:N (default: cpu)")
    add("--dtype", choices=command_line.DTYPES, help="for --check (default: float32)")
    add("--json", action="store_true", help="print everything as JSON")
    args = parser.parse_args(argv)
    if args.target is None and not command_line.holds_target(args.head):
        parser.error(f"--target must name the model that {args.head} drafts for")
    for name in ("device", "dtype"):
        if getattr(args, name) is not None and not args.check:
            parser.error(f"--{name} must come with --check: nothing else runs a model")
    for name, engines in METHODS_FOR_OPTION.items():
        if getattr(args, name) != parser.get_default(name) and args.to not in engines:
            parser.unread(name, f"--to {args.to}", engines)
    if None not in (args.depth, args.num_speculative_tokens):
        parser.error("--depth must come without --num-speculative-tokens: both set the length of a chain")
    command_line.check_device(parser, args.device or "cpu")
    return parser, args
