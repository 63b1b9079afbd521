"""Compare the drafting methods over prompts: a CSV row for each group, prompt, seed and repeat.

    eagle-triton ablation                                    every group over five prompts, into ablation_results.csv
    eagle-triton ablation --prompt "import os" --groups target_ar,speculative,egag --out FILE.csv
    eagle-triton ablation --prompts 20 --trace FILE.csv --plot FILE.png
    eagle-triton ablation --runner "uv run infer.py --device cpu"

Groups: target_ar decodes with the target alone; speculative with a drafter and gamma 4; egag with 1 to 6 drafts, by the
drafter's entropy; nasd with counted n-grams (basic 3, filler 3); eagle with a head's trees; block and block_tree with
chains and trees of a block drafter; suffix with repeated text; hybrid with a head and repeated text. Each row is
written when it is ready, and the same command continues after the last one.

Exit code 0: done; 1: a row failed, or a text differs from the target's; 2: a wrong argument; 130: interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NoReturn

from eagle_triton import command_line
from eagle_triton.cli.ablation_rows import (
    BASELINE,
    GROUPS,
    SUMMARY,
    Conditions,
    Job,
    Results,
    kept_beside,
    plot,
    summary,
)
from eagle_triton.cli.settings import MAX_SEED, READERS, Settings, read_processor
from eagle_triton.command_line import Parser, option_of, sentence
from eagle_triton.demo import BLOCK, DRAFT, PAIR, demo_prompts
from eagle_triton.text_table import table_of

if TYPE_CHECKING:  # it imports torch, for which --help does not wait
    from eagle_triton.cli.decoding import Decoder

PROGRAM = "eagle-triton ablation"
MODULE = ("-m", "eagle_triton.cli.main", "ablation")
OF_THE_RUNNER = ("--target", "--drafter", "--head", "--block-drafter", "--device", "--dtype")  # of infer.py's arguments
MAX_PROMPTS = 100  # of the demo
WARM_UP = 8  # tokens, on a CPU


def main(argv: list[str] | None = None, program: str = PROGRAM) -> int:
    """Run the ablation. program: the name in help and errors. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser(program)
    args = parser.parse_args(argv)
    if args.runner is not None:
        _run_by(parser, args.runner, argv)
    _settle(parser, args)
    jobs = _jobs(args)
    with parser.explains():
        import torch

        from eagle_triton.devices import choose_threads, find_device

        args.device = find_device(args.device)
        choose_threads(args.device, args.target, args.drafter, args.head, args.block_drafter)
        gpu = f" {torch.cuda.get_device_name(args.device)}" if args.device != "cpu" else ""
        models = {name: getattr(args, name) for name in READERS} | {"head": args.head or f"{args.target} (head)"}
        conditions = Conditions(args.device + gpu, args.dtype, args.target, models, args.options)
        results = Results(args.out, args.trace, conditions, args.groups, args.overwrite)
    try:
        failures = _run(parser, args, jobs, results)
    except (KeyboardInterrupt, OSError) as error:
        reason = sentence(error) if isinstance(error, OSError) else "interrupted"
        again = f"the same command{' without --overwrite' * args.overwrite} continues from there"
        print(f"\n{parser.prog}: {reason}: {_count(jobs, results)}; {again}", file=sys.stderr)
        return 1 if isinstance(error, OSError) else 130
    return _report(args, jobs, results, failures)


def _run(parser: Parser, args: argparse.Namespace, jobs: Sequence[Job], results: Results) -> list[str]:
    """Decode the rows that are not in the file yet. Returns the reasons why rows failed."""
    from tqdm import tqdm

    wanted = [job for job in jobs if results.find(job) is None]
    failures: list[str] = []
    if wanted:
        decoder, prompts = _loaded(parser, args, wanted)
    results.begin()
    warm: set[tuple[str, str]] = set()
    with tqdm(total=len(jobs), initial=len(jobs) - len(wanted), unit="row", desc="ablation") as bar:
        for job in wanted:
            bar.set_postfix_str(f"{job.group}, {job.prompt_id}", refresh=False)
            settings, method = results.conditions.of(job.group, job.seed), GROUPS[job.group].method
            try:
                _warm_up(decoder, job, settings, prompts[job.prompt], warm)
                answer = decoder.decode(method, prompts[job.prompt], settings)
            except (ValueError, RuntimeError) as error:  # no memory is a RuntimeError too
                failures.append(f"{job.group}, {job.prompt_id}, seed {job.seed}: {sentence(error)}")
                results.add(job, None, failed=sentence(error))
            else:
                if answer.finished == "interrupted":
                    raise KeyboardInterrupt
                results.add(job, answer, len(prompts[job.prompt]))
            bar.update()
    return failures


def _loaded(parser: Parser, args: argparse.Namespace, jobs: Sequence[Job]) -> tuple[Decoder, dict[str, list[int]]]:
    """The models for the jobs, and the tokens of each prompt. Ends the program if one cannot be loaded or read."""
    with parser.explains():
        import torch

        from eagle_triton.cli.decoding import Decoder

        dtype = getattr(torch, args.dtype)
        decoder = Decoder(args.target, args.drafter, args.head, args.block_drafter, args.device, dtype)
        prompts = {job.prompt: decoder.tokenizer(job.prompt, verbose=False).input_ids for job in jobs}
    for group in dict.fromkeys(job.group for job in jobs):
        with parser.explains(f"group {group}"):
            settings = Settings(**{**args.options, **GROUPS[group].settings})
            decoder.load(GROUPS[group].method, settings)
    for job in jobs:
        with parser.explains(f"{job.prompt_id}, {job.group}"):
            decoder.check_prompt(GROUPS[job.group].method, prompts[job.prompt])
    return decoder, prompts


def _warm_up(decoder: Decoder, job: Job, settings: Settings, prompt: list[int], warm: set[tuple[str, str]]) -> None:
    """Decode each group and prompt once on a GPU, for kernels and graphs, and each group once on a CPU."""
    on_gpu = decoder.device.type == "cuda"
    place = (job.group, job.prompt if on_gpu else "")
    if place in warm:
        return
    if not on_gpu:
        settings = replace(settings, length=min(settings.length, WARM_UP))
    if decoder.decode(GROUPS[job.group].method, prompt, settings).finished == "interrupted":
        raise KeyboardInterrupt
    warm.add(place)


def _report(args: argparse.Namespace, jobs: Sequence[Job], results: Results, failures: Sequence[str]) -> int:
    """Print the table and write the picture. Returns the exit code."""
    rows = [row for job in jobs if (row := results.find(job)) is not None]
    print(table_of(SUMMARY, summary(rows, args.groups)))
    different = [row for row in rows if row["matches_target_ar"] == "False"]
    problems = [f"failed: {failure}" for failure in failures]
    problems += [f"NOT the target's text: {row['group']}, {row['prompt_id']}, row {row['run_id']}" for row in different]
    for line in problems:
        print(line)
    if BASELINE not in args.groups and not any(row["matches_target_ar"] for row in rows):
        print(f"{BASELINE} is not among the groups: speedup, matches and distance stay empty")
    print(f"{_count(jobs, results)}{f', their steps in {args.trace}' if args.trace else ''}")
    if args.plot is not None:
        try:
            plot(rows, args.groups, args.plot)
        except OSError as error:
            print(f"{PROGRAM}: --plot {args.plot} cannot be written: {sentence(error)}", file=sys.stderr)
            return 1
    return 1 if problems else 0


def _count(jobs: Sequence[Job], results: Results) -> str:
    done = sum(results.find(job) is not None for job in jobs)
    return f"{done} of {len(jobs)} rows are in {results.path}"


# --- arguments ---


def _jobs(args: argparse.Namespace) -> list[Job]:
    """The rows to decode, in order: for each prompt and seed first the target alone, then the other groups in turns, so
    that a slow phase of the machine slows all of them."""
    alone = [group for group in args.groups if group == BASELINE]
    others = [group for group in args.groups if group != BASELINE]
    return [
        Job(group, prompt_id, prompt, seed, repeat)
        for prompt_id, prompt in args.prompts_by_id.items()
        for seed in args.seeds
        for groups in (alone, others)
        for repeat in range(1, args.repeats + 1)
        for group in groups
    ]


def _settle(parser: Parser, args: argparse.Namespace) -> None:
    """Check what argparse cannot, and resolve options."""
    command_line.check_device(parser, args.device)
    command_line.check_outputs(parser, out=args.out, trace=args.trace, plot=args.plot)
    if args.trace and args.trace.resolve() == (kept := kept_beside(args.out)).resolve():
        parser.error(f"--trace must be another file than {kept}, which holds the results of --out")
    for path in filter(None, (args.out, args.trace)):
        try:
            command_line.try_to_write_into(path.resolve().parent)
        except OSError as error:
            parser.error(f"--out and --trace must be in a directory that can be written, got {path}: {error.strerror}")
    known = args.block_drafter is not None or args.target == PAIR
    every = [group for group in GROUPS if known or GROUPS[group].method not in READERS["block_drafter"]]
    args.groups = _words(parser, "--groups", args.groups or every, GROUPS)
    args.options = {"length": args.length, **_processor(parser, args.processor)}
    if args.prompt and args.prompts is not None:
        parser.error("--prompts must come without --prompt: it counts the demo's prompts")
    if args.prompt:
        if len(set(args.prompt)) < len(args.prompt):
            parser.error("--prompt: a text is given twice")
        args.prompts_by_id = {f"text-{hashlib.sha256(text.encode()).hexdigest()[:8]}": text for text in args.prompt}
    else:
        args.prompts_by_id = {f"demo-{n}": text for n, text in enumerate(demo_prompts(args.prompts or 5), 1)}
    own = {"drafter": DRAFT, "block_drafter": BLOCK} if args.target == PAIR else {}
    for name, methods in READERS.items():
        readers = [group for group in GROUPS if GROUPS[group].method in methods]
        drafting = [group for group in args.groups if group in readers]
        if getattr(args, name) is not None and not drafting:
            parser.unread(name, f"--groups {','.join(args.groups)}", readers)
        if getattr(args, name) is None:
            setattr(args, name, own.get(name))
        if getattr(args, name) is None and drafting and name != "head":
            parser.error(f"{option_of(name)} must be given for {', '.join(drafting)} with --target {args.target}")


def _words(parser: Parser, option: str, given: list[str], known: Any) -> list[str]:
    """Names separated by blanks or commas."""
    names = [name for words in given for name in words.split(",")]
    for number, name in enumerate(names):
        if name not in known:
            parser.error(f"{option} must be one or more of {', '.join(known)}, got {name!r}")
        if name in names[:number]:
            parser.error(f"{option}: {name} is given twice")
    return names


def _processor(parser: Parser, given: list[str]) -> dict[str, Any]:
    try:
        found = read_processor(given)
        Settings(**found)  # checks them
    except ValueError as error:
        parser.error(f"--processor: {error}")
    return {name: value for name, value in found.items() if value is not None}


def _seeds(text: str) -> list[int]:
    """Whole numbers from 0, separated by commas."""
    read = command_line.whole(0, MAX_SEED)
    seeds = [read(part) for part in text.split(",")]
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"must not name a seed twice, got {text!r}")
    return seeds


def _text(text: str) -> str:
    """A text that is not empty and can be written to a file."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("must be text in UTF-8") from None
    if "\0" in text:
        raise argparse.ArgumentTypeError("must be text without NUL")
    return command_line.some_text(text)


def _parser(program: str) -> Parser:
    parser = Parser(program, (__doc__ or "").replace(PROGRAM, program))
    add: Callable[..., Any] = parser.add_argument
    whole, file = command_line.whole, command_line.output_file
    add("--groups", nargs="+", metavar="NAME", help=f"one or more of {', '.join(GROUPS)} (default: all with models)")
    add("--prompts", type=whole(most=MAX_PROMPTS), metavar="N", help="the demo's first N prompts (default: 5)")
    add("--prompt", type=_text, action="append", metavar="TEXT", help="a prompt of your own; may be given repeatedly")
    add("--seeds", type=_seeds, default=[42], metavar="S[,S...]", help="default: 42; greedy text does not depend on it")
    add("--repeats", type=whole(most=command_line.MAX_RUNS), default=3, metavar="N", help="runs per row (default: 3)")
    add("--length", type=whole(), default=Settings.length, metavar="N", help=f"new tokens (default: {Settings.length})")
    shown = "greedy, multinomial T, topk T K, nucleus T P or topknucleus T K P (default: greedy)"
    add("--processor", nargs="+", default=["greedy"], metavar=("NAME", "ARG"), help=shown)
    own = Path("ablation_results.csv")
    add("--out", type=file(), default=own, metavar="FILE", help="the CSV (default: ablation_results.csv)")
    add("--trace", type=file(), metavar="FILE", help="also write each step of each row as CSV")
    add("--plot", type=file(*command_line.PLOTS), metavar="FILE.png", help="draw the groups' figures")
    add("--overwrite", action="store_true", help="replace the rows in --out and --trace")
    command_line.add_drafting_models(parser, target=True)
    command_line.add_device(parser, "float32", "default: float32, in which greedy text is the target's exactly")
    shown = f"a command that starts infer.py: start the ablation that way, with its {', '.join(OF_THE_RUNNER)}"
    add("--runner", type=command_line.some_text, metavar="COMMAND", help=shown)
    return parser


# --- by a runner ---


def _run_by(parser: Parser, runner: str, argv: Sequence[str]) -> NoReturn:
    """Start the ablation in the way `runner` starts infer.py, with the arguments after infer.py and all other ones. It
    replaces this process, or runs beside it where the system cannot replace one."""
    try:
        words = shlex.split(runner, posix=os.name == "posix")
    except ValueError as error:
        parser.error(f"--runner: {error}, got {runner!r}")
    place = next((number for number, word in enumerate(words) if PurePath(word).name == "infer.py"), None)
    if place is None:
        parser.error(f"--runner must start infer.py, as in 'uv run infer.py --device cpu', got {runner!r}")
    start, given = words[:place] or [sys.executable], words[place + 1 :]
    others = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    others.add_argument("--runner")
    rest = others.parse_known_args(argv)[1]
    here = {word.partition("=")[0] for word in rest}
    for name in (word.partition("=")[0] for word in given if word.startswith("-")):
        if name not in OF_THE_RUNNER:
            parser.error(f"--runner may give infer.py only {', '.join(OF_THE_RUNNER)}, got {name}")
        if name in here:
            parser.error(f"{name} is given twice: here and in --runner")
    command = [*start, *MODULE, *given, *rest]
    folder = str(PurePath(words[place]).parent)
    environment = dict(os.environ)
    if folder != ".":
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, environment.get("PYTHONPATH"))))
    sys.stdout.flush()
    try:
        if os.name == "posix":
            os.execvpe(command[0], command, environment)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command gets it too
        sys.exit(subprocess.run(command, env=environment).returncode)
    except OSError as error:
        parser.error(f"--runner: {command[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    from eagle_triton.cli.main import main as run_program

    sys.exit(run_program(["ablation", *sys.argv[1:]]))
