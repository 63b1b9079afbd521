"""The modes of the benchmark and their options. Nothing here waits for torch."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from eagle_triton.command_line import (
    DTYPES,
    MAX_RUNS,
    MAX_TOKENS,
    PLOTS,
    device,
    existing_directory,
    existing_file,
    model,
    new_too_many,
    number,
    numbers,
    output_directory,
    output_file,
    sizes,
    some_text,
    too_long,
    whole,
)
from eagle_triton.demo import BLOCK, HYBRID, PAIR
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec

SHAPES = dict.fromkeys(
    (
        *("tiny", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.3-70b", "qwen3-0.6b", "qwen3-4b"),
        *("qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "glm-4.7-flash"),
        *("gemma3-12b", "muse-glimmer-30b", "phi4-mini"),
    ),
    131072,
)  # positions of eagle_triton.models.shapes
HYBRIDS = (  # shapes of the same module, and the demo
    *("tiny", "qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b", "nemotron-nano-9b-v2", "nemotron-3-nano"),
    HYBRID,
)
TREES = {  # of benchmarks/mtp.py
    "plain": PLAIN,
    "chain-4": TreeSpec.chain(4),
    "tree-32": TreeSpec.dynamic(32, 3, 10),
    "tree-60": TreeSpec.dynamic(60, 7, 10),
}


class Decoding(NamedTuple):
    """A decoding of benchmarks/step.py.

    tree: None: the draft's own. drafts: by the "head", a random "block" drafter or a random small "model", or by
    "none". block: the numbers of nodes and children of a block drafter's tree. one_launch: all layers of one row may
    run in one launch. grammar: outputs are JSON.
    """

    tree: TreeSpec | None = None
    drafts: str = "head"
    block: tuple[int, int] | None = None
    sampled: bool = False
    one_launch: bool = True
    grammar: bool = False


BLOCK_SIZE = 16  # of eagle_triton.models.shapes
DECODINGS = {
    "greedy": Decoding(),
    "sampled": Decoding(sampled=True),
    "plain": Decoding(PLAIN, "none"),
    "plain-separate": Decoding(PLAIN, "none", one_launch=False),
    "chain-3": Decoding(TreeSpec.chain(3)),
    "chain-7": Decoding(TreeSpec.chain(7)),
    "tree-128": Decoding(TreeSpec.dynamic(128, 7, 10)),
    "tree-256": Decoding(TreeSpec.dynamic(256, 7, 16)),
    "dflash-chain": Decoding(drafts="block", block=(BLOCK_SIZE, 1)),
    "dflash-tree-64": Decoding(drafts="block", block=(64, 8)),
    "dflash-tree-128": Decoding(drafts="block", block=(128, 8)),
    "model-chain-5": Decoding(TreeSpec.chain(5), "model"),
    "grammar": Decoding(grammar=True),
}
DRAFTERS = ("plain", "head", "ngram", "nasd", "suffix", "both", "block", "block_tree")  # of benchmarks/drafters.py
OF_THE_HEAD = ("head", "both")  # drafters with the head's trees
OF_A_BLOCK = ("block", "block_tree")  # chains and trees of a block drafter
WITH_NODES = (*OF_THE_HEAD, "block_tree")  # drafters that --nodes applies to
MAX_SEQUENCES = 1024


def span(text: str) -> str:
    """A whole number, or two with a hyphen between: the least and the most; see `ends_of`."""
    try:
        low, high = ends_of(text)
    except ValueError:
        low, high = 1, 0
    if not 1 <= low <= high <= MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"must be N or N-M, whole numbers from 1 to {MAX_TOKENS}, got {text!r}")
    return text


def ends_of(text: str) -> tuple[int, int]:
    """The least and the most of a `span`."""
    first, dash, last = text.partition("-")
    return int(first), int(last if dash else first)


def limit(text: str) -> str:
    """vLLM's name for a time of a request, and its most milliseconds; see `milliseconds_of`."""
    name, _, value = text.partition(":")
    try:
        if name in ("ttft", "tpot", "e2el"):
            number(0, 1e9)(value)
            return text
    except argparse.ArgumentTypeError:
        pass
    raise argparse.ArgumentTypeError(f"must be ttft:MS, tpot:MS or e2el:MS, got {text!r}")


def milliseconds_of(text: str) -> tuple[str, float]:
    """The name and the number of a `limit`."""
    name, _, value = text.partition(":")
    return name, float(value)


def _value(metavar: str, read: Any, told: str, default: Any = None, **more: Any) -> dict[str, Any]:
    return {"metavar": metavar, "type": read, "help": told, "default": default, **more}


def _names(choices: Iterable[str], told: str, default: Any = None, **more: Any) -> dict[str, Any]:
    return {"choices": tuple(choices), "help": told, "default": default, **more}


def _several(choices: Collection[str], told: str, default: Any = None) -> dict[str, Any]:
    return _names(choices, f"one or more of {', '.join(choices)} {told}", default, nargs="+", metavar="NAME")


def _switch(told: str) -> dict[str, Any]:
    return {"action": "store_true", "help": told}


TARGETS = ("fp8", "int4", "nf4", "mxfp4")  # of quantised.round_target
# fmt: off
OPTIONS: dict[str, dict[str, Any]] = {  # arguments of argparse
    "--model": _value(
        "PATH_OR_ID", model, "target: directory or hub id (default: demo, the embedded checkpoint)", PAIR),
    "--draft": _value("PATH_OR_ID", model, "its head: directory or hub id (default: the demo's)"),
    "--shape": _names(SHAPES, "random weights of this shape instead of a checkpoint"),
    "--hybrid": _names(
        HYBRIDS, "random weights of this shape (default: qwen3.5-9b), or the embedded demo-gdn over its held-out "
        "prompts", "qwen3.5-9b"),
    "--tree": _several(TREES, "(default: all)"),
    "--decoding": _several(
        DECODINGS, "(default: the first three, two of them with the head's own tree; plain-separate: without the "
        "launch of all layers; grammar: outputs are JSON; with --shape also drafts of a random block drafter, dflash, "
        "and of a random model, the smallest of the vocabulary)", list(DECODINGS)[:3]),
    "--eagle1": _switch("the head is EAGLE-1/2 instead of EAGLE-3"),
    "--prompt": _value("TEXT", some_text, "one prompt, repeated (default: the demo's held-out prompts)"),
    "--context": _value("N[,N...]", sizes(), "random prompts of N tokens, within its positions", []),
    "--batch": _value("B[,B...]", sizes(MAX_SEQUENCES), "sequences at the same time"),
    "--slots": _value(
        "N[,N...]", sizes(MAX_SEQUENCES), "places for sequences; --batch of them are in use (default: --batch)", []),
    "--only": _value("TEXT", some_text, "operations with TEXT in their name (default: all)"),
    "--questions": _value(
        "FILE.jsonl", existing_file, "a line for each question: question_id, category, turns (default: this "
        "package's own, for the demo)"),
    "--category": _value("NAME", str, "only questions of these categories (default: all)", nargs="+"),
    "--block-drafter": _value(
        "PATH_OR_ID", model, "for block and block_tree: directory or hub id (default: demo-block for the demo)"),
    "--drafters": _several(DRAFTERS, "(default: all that have models; plain is always measured first)"),
    "--nodes": _value(
        "N[,N...]", sizes(MAX_SEQUENCES, 2), "sizes of trees, root included (default: the head's own, 60 of a block "
        "drafter)"),
    "--temperatures": _value("T[,T...]", numbers(0, 100), "default: 0, greedy", [0.0]),
    "--results": _value(
        "FILE.jsonl", output_file(), "write each finished configuration there; the same command then continues after "
        "the last one"),
    "--answers": _value(
        "DIR", output_directory, "write SafeAILab/EAGLE's answer files there, one for each configuration, and SGLang's "
        "records"),
    "--url": _value("URL", some_text, "an OpenAI server (default: start one with --model, and end it)"),
    "--api-key": _value("KEY", some_text, "for the server"),
    "--request-rate": _value(
        "R[,R...]", numbers(0.001, 1e6), "open loop: requests a second, at random times (a Poisson process)", []),
    "--max-concurrency": _value("N[,N...]", sizes(4096), "closed loop: clients that send one request after another"),
    "--num-prompts": _value("N", whole(), "requests of each load"),
    "--input-len": _value("N | N-M", span, "tokens of a prompt; N-M: drawn evenly from N to M"),
    "--output-len": _value("N | N-M", span, "tokens of an answer, in the same way"),
    "--goodput": _value(
        "NAME:MS", limit, "count requests within these ms: to the first token (ttft), per token (tpot), in all (e2el)",
        [], nargs="+"),
    "--seed": _value("N", whole(0), "seed of prompts, lengths and times (default: 0)", 0),
    "--no-speculation": _switch("start the server without drafts"),
    "--max-num-seqs": _value("N", whole(most=256), "requests that the server runs at the same time (default: 64)"),
    "--result-dir": _value("DIR", output_directory, "write each load there, like `vllm bench serve`"),
    "--max-length": _value("N", whole(), "new tokens per prompt (default: 100)", 100),
    "--num-runs": _value("N", whole(most=MAX_RUNS), "prompts, or repeated measurements (default: 5)", 5),
    "--temperature": _value("T", number(0, 100), "default: 0, greedy", 0.0),
    "--accept-length": _value("X", number(0, 999), "for timing only: always accept X drafts per step"),
    "--upstream": _value("DIR", existing_directory, "a checkout of SafeAILab/EAGLE to time as well"),
    "--target-weights": _names(
        TARGETS, "format of the target's projections: FP8 with scales for blocks, int4 like compressed-tensors, nf4 "
        "like bitsandbytes, with nested scales; mxfp4: experts of gpt-oss as published"),
    "--draft-weights": _names(("fp8", "int4"), "format of the head's projections, like draft_dtype"),
    "--dtype": _names(DTYPES, "default: float32; bfloat16 on a GPU for random weights and operations"),
    "--device": _value("NAME", device, "cpu, cuda or cuda:N (default: a GPU if there is one)"),
    "--json": _switch("print JSON instead of the table"),
    "--output": _value("FILE.json", output_file(), "write the figures as JSON"),
    "--csv": _value("FILE.csv", output_file(), "write the rows as CSV"),
    "--plot": _value("FILE.png", output_file(*PLOTS), "draw the figures"),
    "--commit": _value("COMMIT", some_text, "the commit to record (default: git's)"),
}
# fmt: on


def add_options(parser: argparse.ArgumentParser, names: str, **changes: Mapping[str, Any]) -> None:
    """Add some of OPTIONS, named with blanks between them. changes: other arguments of argparse, by option."""
    for option in names.split():
        parser.add_argument(option, **{**OPTIONS[option], **changes.get(option[2:].replace("-", "_"), {})})


MODEL = "--model --draft --shape --eagle1 --context"
WEIGHTS = "--target-weights --draft-weights"
EVERYWHERE = "--dtype --device --json --output --csv --plot --commit"


class Mode(NamedTuple):
    """A mode in NAME.py beside this file: what it measures, its options separated by blanks, their defaults, and other
    defaults on a CPU."""

    summary: str
    names: str
    defaults: Mapping[str, Any] = {}
    on_cpu: Mapping[str, Any] = {}

    @property
    def options(self) -> list[str]:
        return self.names.split()


MODES = {
    "generate": Mode(
        "whole generations of a model as it is and optimised",
        f"{MODEL} --draft-weights --prompt --max-length --num-runs --temperature --accept-length --upstream",
    ),
    "step": Mode(
        "one decode step, greedy, sampled, plain or of other trees, over contexts and batches (default: a batch of 1)",
        f"{MODEL} {WEIGHTS} --decoding --batch --slots --num-runs --accept-length --upstream",
        {"batch": [1]},
    ),
    "batches": Mode(
        "trees against plain decoding (default: batches of 1 to 32, 3 drafts accepted; on a CPU batches of "
        "1 and 4, 32 tokens, one run, which take less than a minute)",
        f"{MODEL} {WEIGHTS} --batch --max-length --num-runs --accept-length",
        {"batch": [1, 2, 4, 8, 16, 32], "accept_length": 3.0, "max_length": 100, "num_runs": 5},
        on_cpu={"batch": [1, 4], "max_length": 32, "num_runs": 1},
    ),
    "megakernel": Mode(
        "everything after the target's logits, in one launch or many, on a GPU (default: a batch of 1)",
        f"{MODEL} --batch",
        {"batch": [1]},
    ),
    "drafters": Mode(
        "drafts of the head, of repetition, of both in one tree, and of a block drafter, over three kinds of work "
        "(default: 10 prompts of each, 128 tokens; on a CPU 2 of 48)",
        f"{MODEL} --block-drafter --max-length --num-runs",
        {"max_length": 128, "num_runs": 10},
        on_cpu={"max_length": 48, "num_runs": 2},
    ),
    "questions": Mode(
        "questions of a file answered with each drafter, tree size and temperature (default: 128 tokens a turn; on a "
        "CPU 32)",
        "--model --draft --eagle1 --block-drafter --questions --category --drafters --nodes --temperatures "
        "--max-length --results --answers",
        {"max_length": 128},
        on_cpu={"max_length": 32},
    ),
    "egag": Mode(
        "chains of a draft model, of fixed lengths and by EGAG, over easy and hard work (default: 10 prompts of each, "
        "128 tokens; on a CPU 2 of 32)",
        "--shape --max-length --num-runs",
        {"max_length": 128, "num_runs": 10},
        on_cpu={"max_length": 32, "num_runs": 2},
    ),
    "prefill": Mode(
        "first tokens over contexts and batches, prompts that enter a running batch, and many short requests (default: "
        "contexts of 64, 512 and 2048 tokens, batches of 1 and 8, 5 runs; on a CPU 32 tokens, a batch of 2, one run)",
        f"{MODEL} {WEIGHTS} --batch --num-runs",
        {"batch": [1, 8], "num_runs": 5},
        on_cpu={"batch": [2], "num_runs": 1},
    ),
    "plain": Mode(
        "generate of the target as a plain Hugging Face model (default: 3 runs of 128 tokens; on a CPU 1 of 32)",
        f"{MODEL} --max-length --num-runs",
        {"max_length": 128, "num_runs": 3},
        on_cpu={"max_length": 32, "num_runs": 1},
    ),
    "mtp": Mode(
        "steps and first tokens of a recurrent target with random weights, Qwen3.5 with multi-token prediction "
        "(default: a batch of 1; on a CPU give --hybrid tiny or demo-gdn)",
        "--hybrid --tree --context --batch --slots --max-length --num-runs",
        {"batch": None, "max_length": None},
    ),
    "serve": Mode(
        "load on an OpenAI server (default: a server of the demo is started, and 1, 4 and 16 clients ask it for 64 "
        "answers of 128 tokens after 512; on a CPU 1 and 4 for 8 of 16 after 32)",
        "--model --draft --shape --url --api-key --request-rate --max-concurrency --num-prompts --input-len "
        "--output-len --temperature --goodput --seed --no-speculation --max-num-seqs --result-dir",
        {"num_prompts": 64, "max_num_seqs": 64, "max_concurrency": [1, 4, 16], "input_len": "512", "output_len": "128"},
        on_cpu={"num_prompts": 8, "max_num_seqs": 64, "max_concurrency": [1, 4], "input_len": "32", "output_len": "16"},
    ),
    "operations": Mode("every operation of a step against the best of torch", "--only"),
}

OF_STEPS = ("batches", "drafters", "egag", "mtp")  # modes that time steps: an answer's first token takes none


def block_drafter_of(args: argparse.Namespace) -> str | None:
    """The named block drafter, or the demo's for the demo; None: there is none."""
    of_the_demo = args.model == PAIR and getattr(args, "shape", None) is None
    return args.block_drafter or (BLOCK if of_the_demo else None)


def drafters_of(args: argparse.Namespace) -> list[str]:
    """The drafters that have their models."""
    return [drafter for drafter in DRAFTERS if drafter not in OF_A_BLOCK or block_drafter_of(args)]


def context_too_long(args: argparse.Namespace, positions: int | None) -> str | None:
    """A sentence if --context, or without one --max-length alone, needs more than the model's positions; else None."""
    new = getattr(args, "max_length", None) or 1
    if contexts := getattr(args, "context", None):
        return too_long("--context", max(contexts), new, positions)
    return new_too_many(new, positions)
