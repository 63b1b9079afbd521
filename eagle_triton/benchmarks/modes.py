"""The modes of the benchmark: what each measures, and its options. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import MappingProxyType
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

SHAPES = dict.fromkeys(
    (
        *("tiny", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.3-70b", "qwen3-0.6b", "qwen3-8b"),
        *("qwen3-32b", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "gemma3-12b", "phi4-mini"),
    ),
    131072,
)  # positions of eagle_triton.models.shapes
HYBRIDS = ("tiny", "qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b", HYBRID)  # shapes of the same module, and the demo
TREES = ("plain", "chain-4", "tree-32", "tree-60")  # of benchmarks/mtp.py
BLOCK_DECODINGS = ("dflash-chain", "dflash-tree-64", "dflash-tree-128")
DECODINGS = ("greedy", "sampled", "plain", "chain-3", "chain-7", "tree-128", "tree-256", *BLOCK_DECODINGS)  # of step.py
DRAFTERS = ("plain", "head", "ngram", "nasd", "suffix", "both", "block", "block_tree")  # of benchmarks/drafters.py
OF_THE_HEAD = ("head", "both")  # those that grow the head's trees
OF_A_BLOCK = ("block", "block_tree")  # chains and trees of a block drafter
WITH_NODES = (*OF_THE_HEAD, "block_tree")  # those that --nodes sizes
MAX_SEQUENCES = 1024


def span(text: str) -> str:
    """A whole number, or two with a minus between: the least and the most; see `ends_of`."""
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
    """A name of vLLM's for what a request takes, and the most milliseconds; see `milliseconds_of`."""
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


FP8 = "fp8"
OPTIONS: dict[str, dict[str, Any]] = {
    "--model": dict(
        type=model,
        default=PAIR,
        metavar="PATH_OR_ID",
        help="target: directory or hub id (default: demo, the embedded checkpoint)",
    ),
    "--draft": dict(type=model, metavar="PATH_OR_ID", help="its head: directory or hub id (default: the demo's)"),
    "--shape": dict(choices=tuple(SHAPES), help="random weights of this shape instead of a checkpoint"),
    "--hybrid": dict(
        choices=HYBRIDS,
        default="qwen3.5-9b",
        help="random weights of this shape (default: qwen3.5-9b), or the embedded demo-gdn over its held-out prompts",
    ),
    "--tree": dict(nargs="+", choices=TREES, metavar="NAME", help=f"of {', '.join(TREES)} (default: all)"),
    "--decoding": dict(
        nargs="+",
        choices=DECODINGS,
        default=list(DECODINGS[:3]),
        metavar="NAME",
        help=f"of {', '.join(DECODINGS)} (default: the first three; two of them grow the head's own tree; "
        "dflash: drafts of a random block drafter, with --shape)",
    ),
    "--eagle1": dict(action="store_true", help="the head is EAGLE-1/2 instead of EAGLE-3"),
    "--prompt": dict(type=some_text, metavar="TEXT", help="one prompt, repeated (default: the demo's held-out ones)"),
    "--context": dict(
        type=sizes(), default=[], metavar="N[,N...]", help="random prompts of N tokens, within its positions"
    ),
    "--batch": dict(type=sizes(MAX_SEQUENCES), metavar="B[,B...]", help="sequences at a time"),
    "--slots": dict(
        type=sizes(MAX_SEQUENCES),
        default=[],
        metavar="N[,N...]",
        help="places for sequences; --batch of them are taken (default: as many)",
    ),
    "--only": dict(type=some_text, metavar="TEXT", help="operations with TEXT in their name (default: all)"),
    "--questions": dict(
        type=existing_file,
        metavar="FILE.jsonl",
        help="a line for each question: question_id, category, turns (default: those of this package, for the demo)",
    ),
    "--category": dict(nargs="+", metavar="NAME", help="only questions of these categories (default: all)"),
    "--block-drafter": dict(
        type=model, metavar="PATH_OR_ID", help="of block and block_tree (default: demo-block for the demo, else none)"
    ),
    "--drafters": dict(
        nargs="+",
        choices=DRAFTERS,
        metavar="NAME",
        help=f"of {', '.join(DRAFTERS)} (default: all that have models; plain is always measured, and first)",
    ),
    "--nodes": dict(
        type=sizes(MAX_SEQUENCES, 2),
        metavar="N[,N...]",
        help="sizes of trees, root included (default: the head's own, 60 of a block drafter)",
    ),
    "--temperatures": dict(type=numbers(0, 100), default=[0.0], metavar="T[,T...]", help="default: 0, greedy"),
    "--results": dict(
        type=output_file(),
        metavar="FILE.jsonl",
        help="keep each finished configuration there; the same command again goes on after the last one",
    ),
    "--answers": dict(
        type=output_directory,
        metavar="DIR",
        help="write SafeAILab/EAGLE's answer files there, one for each configuration, and SGLang's records",
    ),
    "--url": dict(
        type=some_text, metavar="URL", help="an OpenAI server (default: one of --model is started and ended)"
    ),
    "--api-key": dict(type=some_text, metavar="KEY", help="that the server wants"),
    "--request-rate": dict(
        type=numbers(0.001, 1e6),
        default=[],
        metavar="R[,R...]",
        help="open loop: requests a second, at random times (a Poisson process)",
    ),
    "--max-concurrency": dict(type=sizes(4096), metavar="N[,N...]", help="closed loop: clients that ask again"),
    "--num-prompts": dict(type=whole(), metavar="N", help="requests of each load"),
    "--input-len": dict(type=span, metavar="N | N-M", help="tokens of prompts, M: evenly spread up to it"),
    "--output-len": dict(type=span, metavar="N | N-M", help="tokens of answers, likewise"),
    "--goodput": dict(
        nargs="+",
        type=limit,
        default=[],
        metavar="NAME:MS",
        help="count requests within these ms: to the first token (ttft), per token (tpot), in all (e2el)",
    ),
    "--seed": dict(type=whole(0), default=0, metavar="N", help="of prompts, lengths and times (default: 0)"),
    "--no-speculation": dict(action="store_true", help="the server that is started drafts nothing"),
    "--max-num-seqs": dict(type=whole(most=256), metavar="N", help="requests that it runs at a time (default: 64)"),
    "--result-dir": dict(type=output_directory, metavar="DIR", help="write each load there as `vllm bench serve` does"),
    "--max-length": dict(type=whole(), default=100, metavar="N", help="new tokens per prompt (default: 100)"),
    "--num-runs": dict(type=whole(most=MAX_RUNS), default=5, metavar="N", help="prompts, or repetitions (default: 5)"),
    "--temperature": dict(type=number(0, 100), default=0.0, metavar="T", help="default: 0, greedy"),
    "--accept-length": dict(
        type=number(0, 999), metavar="X", help="for timing only: accept X drafts per step, right or wrong"
    ),
    "--upstream": dict(type=existing_directory, metavar="DIR", help="checkout of SafeAILab/EAGLE, timed as well"),
    "--target-weights": dict(
        choices=(FP8,), help="projections of the target with scales for blocks, as fine-grained checkpoints have them"
    ),
    "--draft-weights": dict(choices=(FP8,), help="projections of the head with scales for rows, as draft_dtype=fp8"),
    "--dtype": dict(choices=DTYPES, help="default: float32; bfloat16 on a GPU for random weights and operations"),
    "--device": dict(type=device, metavar="NAME", help="cpu, cuda or cuda:N (default: a GPU if there is one)"),
    "--json": dict(action="store_true", help="print JSON instead of the table"),
    "--output": dict(type=output_file(), metavar="FILE.json", help="write the same JSON to a file"),
    "--csv": dict(type=output_file(), metavar="FILE.csv", help="write the rows as CSV"),
    "--plot": dict(type=output_file(*PLOTS), metavar="FILE.png", help="draw the figures"),
    "--commit": dict(type=some_text, help="what to record as the commit instead of what git says"),
}
MODEL = ("--model", "--draft", "--shape", "--eagle1", "--context")
WEIGHTS = ("--target-weights", "--draft-weights")
EVERYWHERE = ("--dtype", "--device", "--json", "--output", "--csv", "--plot", "--commit")


class Mode(NamedTuple):
    """What NAME.py beside this file measures, its options and defaults, and those defaults that a CPU has instead."""

    summary: str
    options: tuple[str, ...]
    defaults: dict[str, Any]
    on_cpu: Mapping[str, Any] = MappingProxyType({})


MODES = {
    "generate": Mode(
        "whole generations of the model as it is and optimised",
        (
            *(*MODEL, "--draft-weights", "--prompt", "--max-length", "--num-runs", "--temperature"),
            *("--accept-length", "--upstream"),
        ),
        {},
    ),
    "step": Mode(
        "one decode step, greedy, sampled, plain or of other trees, over contexts and batches (default: a batch of 1)",
        (*MODEL, *WEIGHTS, "--decoding", "--batch", "--slots", "--num-runs", "--accept-length", "--upstream"),
        {"batch": [1]},
    ),
    "batches": Mode(
        "trees as they pay against plain decoding (default: batches of 1 to 32, 3 drafts accepted; on a CPU batches of "
        "1 and 4, 32 tokens, one run, which take less than a minute)",
        (*MODEL, *WEIGHTS, "--batch", "--max-length", "--num-runs", "--accept-length"),
        {"batch": [1, 2, 4, 8, 16, 32], "accept_length": 3.0, "max_length": 100, "num_runs": 5},
        on_cpu={"batch": [1, 4], "max_length": 32, "num_runs": 1},
    ),
    "megakernel": Mode(
        "all after the target's logits as one launch and as many, on a GPU (default: a batch of 1)",
        (*MODEL, "--batch"),
        {"batch": [1]},
    ),
    "drafters": Mode(
        "drafts of the head, of repetition, of both in one tree, and of a block drafter, over three kinds of work "
        "(default: 10 prompts of each, 128 tokens; on a CPU 2 of 48)",
        (*MODEL, "--block-drafter", "--max-length", "--num-runs"),
        {"max_length": 128, "num_runs": 10},
        on_cpu={"max_length": 48, "num_runs": 2},
    ),
    "questions": Mode(
        "questions of a file answered with each drafter, tree size and temperature (default: 128 tokens a turn; on a "
        "CPU 32)",
        (
            *("--model", "--draft", "--eagle1", "--block-drafter", "--questions", "--category", "--drafters"),
            *("--nodes", "--temperatures", "--max-length", "--results", "--answers"),
        ),
        {"max_length": 128},
        on_cpu={"max_length": 32},
    ),
    "egag": Mode(
        "chains of a draft model, of fixed lengths and by EGAG, over easy and hard work (default: 10 prompts of each, "
        "128 tokens; on a CPU 2 of 32)",
        ("--shape", "--max-length", "--num-runs"),
        {"max_length": 128, "num_runs": 10},
        on_cpu={"max_length": 32, "num_runs": 2},
    ),
    "prefill": Mode(
        "first tokens over contexts and batches, prompts that enter a running batch, and many short requests (default: "
        "contexts of 64, 512 and 2048 tokens, batches of 1 and 8, 5 runs; on a CPU 32 tokens, a batch of 2, one run)",
        (*MODEL, *WEIGHTS, "--batch", "--num-runs"),
        {"batch": [1, 8], "num_runs": 5},
        on_cpu={"batch": [2], "num_runs": 1},
    ),
    "plain": Mode(
        "generate of the target as a plain Hugging Face model (default: 3 runs of 128 tokens; on a CPU 1 of 32)",
        (*MODEL, "--max-length", "--num-runs"),
        {"max_length": 128, "num_runs": 3},
        on_cpu={"max_length": 32, "num_runs": 1},
    ),
    "mtp": Mode(
        "steps and first tokens of a Qwen3.5 with random weights and multi-token prediction (default: a batch of 1; on "
        "a CPU give --hybrid tiny or demo-gdn)",
        ("--hybrid", "--tree", "--context", "--batch", "--slots", "--max-length", "--num-runs"),
        {"batch": None, "max_length": None},
    ),
    "serve": Mode(
        "load on an OpenAI server (default: a server of the demo is started, which 1, 4 and 16 clients ask for 64 "
        "answers of 128 tokens after 512; on a CPU 1 and 4 for 8 of 16 after 32)",
        (
            *("--model", "--draft", "--shape", "--url", "--api-key", "--request-rate", "--max-concurrency"),
            *("--num-prompts", "--input-len", "--output-len", "--temperature", "--goodput", "--seed"),
            *("--no-speculation", "--max-num-seqs", "--result-dir"),
        ),
        {
            **{"max_concurrency": [1, 4, 16], "num_prompts": 64, "max_num_seqs": 64},
            **{"input_len": "512", "output_len": "128"},
        },
        on_cpu={
            **{"max_concurrency": [1, 4], "num_prompts": 8, "max_num_seqs": 64},
            **{"input_len": "32", "output_len": "16"},
        },
    ),
    "operations": Mode("every operation of a step against the best of torch", ("--only",), {}),
}


def block_drafter_of(args: argparse.Namespace) -> str | None:
    """The block drafter that is named, else the demo's for the demo; None: there is none."""
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
