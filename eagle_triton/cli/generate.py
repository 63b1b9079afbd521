"""`eagle-triton generate`: answers one prompt, with the text on stdout and figures on stderr.

    eagle-triton generate 'def main():'
    echo 'import os' | eagle-triton generate --method eagle --max-new-tokens 100
    eagle-triton generate --model PATH --drafter PATH --temperature 0.8 --top-p 0.95 'Once upon a time'

Without --method the drafter drafts if there is one (the demo has one), else the given --head; without either the target
decodes alone. A chat model gets the prompt through its chat template, unless --plain is given.
Exit code 0: answered; 1: the answer could not be written; 2: a wrong argument, or a prompt that cannot be answered;
130: interrupted.
"""

from __future__ import annotations

import argparse
import io
import sys
from typing import TYPE_CHECKING, Any

from eagle_triton import command_line
from eagle_triton.cli.figures import figures
from eagle_triton.cli.interrupts import kept_interrupts
from eagle_triton.cli.settings import KINDS, METHODS, READERS, Settings
from eagle_triton.command_line import Parser, option_of
from eagle_triton.demo import BLOCK, DRAFT, PAIR
from eagle_triton.inference.conversation import Conversation, plain_ids

if TYPE_CHECKING:  # it imports torch, for which --help does not wait
    from eagle_triton.comparison.answer import Step

DRAFTED_BY = {"drafter": "speculative", "head": "eagle", "block_drafter": "block"}  # default methods
OPTIONS = (  # settings with the same name as an option
    *("gamma", "egag", "egag_gamma_min", "egag_gamma_max", "egag_ema", "egag_scale", "egag_mode"),
    *("ngram_storage", "ngram_n", "top_k_filler", "filler_weight", "seed"),
)


def main(argv: list[str] | None = None, program: str = "eagle-triton generate") -> int:
    """Answer a prompt. program: the name in help and errors."""
    parser, args, settings = _parse(argv, program)
    command_line.check_device(parser, args.device)
    prompt = _prompt(parser, args.prompt)
    with parser.explains():
        from eagle_triton.cli.decoding import open_decoder

        decoder = open_decoder(args.model, args.drafter, args.head, args.block_drafter, args.device, args.dtype)
        decoder.load(args.method, settings)
        ids = plain_ids(prompt, decoder.tokenizer) if args.plain else Conversation().ids(prompt, decoder.tokenizer)
        with kept_interrupts() as check:

            def on_step(step: Step, text: str) -> None:
                print(text, end="", flush=True)
                check()

            answer = decoder.decode(args.method, ids, settings, on_step)
    print(flush=True)
    print(f"{args.method}: {figures(answer, None, settings)}", *answer.notes, sep="\n", file=sys.stderr)
    return 130 if answer.finished == "interrupted" else 0


def _prompt(parser: Parser, given: str | None) -> str:
    """The argument, or the piped text."""
    if given is None and sys.stdin.isatty():
        parser.error("PROMPT must be given, or piped in")
    if given is None and isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # whatever the locale says
    try:
        prompt = sys.stdin.read() if given is None else given
        prompt.encode()  # bytes that are not text may have become surrogates
    except UnicodeError:
        parser.error(f"PROMPT must be text in UTF-8, and the {'piped input' if given is None else 'argument'} is not")
    if not prompt:
        parser.error("PROMPT must be a text that is not empty")
    return prompt


def _parse(argv: list[str] | None, program: str) -> tuple[Parser, argparse.Namespace, Settings]:
    parser = Parser(program, (__doc__ or "").replace("eagle-triton generate", program))
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="default: the piped input")
    add("--model", type=command_line.model, default=PAIR, metavar="PATH_OR_ID", help="the target (default: demo)")
    command_line.add_drafting_models(parser)
    add("--method", choices=METHODS, help="how to decode")
    add("--max-new-tokens", type=command_line.whole(), default=100, metavar="N", help="default: 100")
    add("--temperature", type=command_line.number(0, 100), metavar="T", help="default: 0, greedy")
    add("--top-k", type=command_line.whole(), metavar="K", help="draw from the K likeliest, with a temperature")
    add("--top-p", type=command_line.number(0, 1), metavar="P", help="draw from the likeliest, with a temperature")
    add("--no-cache", action="store_true", help="read the whole text for each token, with the models' own forward")
    add("--plain", action="store_true", help="use no chat template")
    defaults = Settings()
    for name in OPTIONS:
        kind, default = KINDS[name], getattr(defaults, name)
        how: dict[str, Any] = {"choices": kind.choices} if kind.choices else {"metavar": "VALUE", "type": kind.argument}
        how = {"action": "store_true"} if kind.type is bool else how
        shown = "" if default in (None, False) else f" (default: {default})"
        by = "" if kind.readers == METHODS else f"; read by {', '.join(kind.readers)}"
        add(option_of(name), **how, help=f"{kind.summary}{shown}{by}", default=None)
    command_line.add_device(parser)
    args = parser.parse_args(argv)
    _choose_method(parser, args)
    return parser, args, _settings(parser, args)


def _choose_method(parser: Parser, args: argparse.Namespace) -> None:
    """Choose the method, and refuse models that it does not read."""
    if args.method is None:
        given = [method for name, method in DRAFTED_BY.items() if getattr(args, name)]
        args.method = given[0] if given else "speculative" if args.model == PAIR else "target"
    for name, readers in READERS.items():
        if getattr(args, name) is not None and args.method not in readers:
            parser.unread(name, f"--method {args.method}", readers)
    for name, kind, own in (("drafter", "a smaller model", DRAFT), ("block_drafter", "one", BLOCK)):
        if getattr(args, name) is None and args.method in READERS[name]:
            if args.model != PAIR:
                parser.error(f"{option_of(name)} must name {kind} for --method {args.method}")
            setattr(args, name, own)


def _settings(parser: Parser, args: argparse.Namespace) -> Settings:
    """The settings from the options. An option that the method does not read is refused."""
    options: dict[str, Any] = {"length": args.max_new_tokens, "cache": not args.no_cache}
    for name in OPTIONS:
        value, readers = getattr(args, name), KINDS[name].readers
        if value is None:
            continue
        if args.method not in readers:
            parser.unread(name, f"--method {args.method}", readers)
        if name.startswith("egag_") and not args.egag:
            parser.error(f"{option_of(name)} must come with --egag")
        options[name] = value
    if args.temperature is not None:
        options["temperature"] = args.temperature
        kinds = {(False, False): "multinomial", (True, False): "topk", (False, True): "nucleus"}
        options["processor"] = kinds.get((args.top_k is not None, args.top_p is not None), "topknucleus")
        options |= {name: getattr(args, name) for name in ("top_k", "top_p") if getattr(args, name) is not None}
    elif args.top_k is not None or args.top_p is not None:
        parser.error(f"--top-{'k' if args.top_k is not None else 'p'} must come with a --temperature (0: greedy)")
    try:
        return Settings(**options)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
