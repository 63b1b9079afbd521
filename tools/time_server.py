"""What HTTP adds to a request: a session in this process, then `eagle-triton serve` in another.

    python tools/time_server.py --output results/http-demo-h100.json

Decodes the same prompts with the embedded checkpoint, or --model, greedily by both. Prints medians over the prompts:
milliseconds to the first token and of a step, the 99th percentile of all steps, and what the server adds. Each prompt
is used once in each, so that none is found in the cache of prompts.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.benchmarks.modes import add_options
from eagle_triton.command_line import Parser, run_program, whole

WARM_UPS = 3  # prompts before those that are timed


class Times(NamedTuple):
    """Milliseconds of one request."""

    first_token: float
    rest: float  # from the first to the last token
    gaps: list[float]  # between what one step gave and what the next did


def main(argv: list[str] | None = None) -> int:
    parser = Parser("time_server.py", __doc__)
    length_help = "tokens of each prompt (default: 64)"
    parser.add_argument("--prompt-length", type=whole(2), default=64, metavar="N", help=length_help)
    add_options(
        parser,
        "--model --draft --num-runs --max-length --output --commit",
        model={"default": None},
        num_runs={"default": 20, "help": "prompts (default: 20)"},
        max_length={"type": whole(2), "default": 128, "help": "new tokens of each (default: 128)"},
    )
    args = parser.parse_args(argv)
    with parser.explains():
        import torch

        from eagle_triton.benchmarks.record import Record, publish
        from eagle_triton.benchmarks.serve import ask, client, own_server
        from eagle_triton.inference.config import EAGLEConfig
        from eagle_triton.inference.eagle_inference import EAGLEInference
        from eagle_triton.inference.session import Session

    inference = EAGLEInference.from_pretrained(args.model or "demo", args.draft, EAGLEConfig(temperature=0.0, slots=1))
    vocabulary = inference.pair.view.vocab_size
    shape = (WARM_UPS + args.num_runs, args.prompt_length)
    prompts = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0)).tolist()

    def decode(session: Session, prompt: list[int]) -> Times:
        start = time.perf_counter()
        session.submit(prompt, args.max_length, stop_token_ids=())
        ends = []
        while not session.idle:
            if session.step():
                ends.append(time.perf_counter())
        return _times(start, ends)

    with inference.session(args.prompt_length + args.max_length) as session:
        direct = [decode(session, prompt) for prompt in prompts][WARM_UPS:]
    words = [] if args.model is None else [args.model]
    words += [] if args.draft is None else ["--draft", args.draft]

    async def ask_all(url: str) -> list[Times]:
        async with client(None) as session:
            wanted = {"max_tokens": args.max_length, "temperature": 0}
            answers = [await ask(session, url, {"prompt": prompt, **wanted}) for prompt in prompts]
        if wrong := [answer.error for answer in answers if answer.error]:
            raise SystemExit(f"the server answered {wrong[0]}")
        return [
            Times(answer.first * 1e3, (answer.whole - answer.first) * 1e3, [gap * 1e3 for gap in answer.gaps])
            for answer in answers
        ]

    with own_server([*words, "--temperature", "0", "--max-num-seqs", "1"], []) as url:
        served = asyncio.run(ask_all(url))[WARM_UPS:]
    rows = [_row("session", direct), _row("server", served)]
    first = statistics.median(
        theirs.first_token - ours.first_token for ours, theirs in zip(direct, served, strict=True)
    )
    step = statistics.median(
        (theirs.rest - ours.rest) / max(1, len(ours.gaps)) for ours, theirs in zip(direct, served, strict=True)
    )
    p99 = _p99(served) - _p99(direct)
    rows.append({"variant": "added by HTTP", "first_token_ms": first, "ms_per_step": step, "p99_ms_per_step": p99})
    record = Record.of("http", inference.pair.view.device, args, rows, [])
    return publish(record, record.json(), parser.prog, output=args.output)


def _times(start: float, ends: list[float]) -> Times:
    gaps = [(after - before) * 1e3 for before, after in itertools.pairwise(ends)]
    return Times((ends[0] - start) * 1e3, (ends[-1] - ends[0]) * 1e3, gaps)


def _row(name: str, times: list[Times]) -> dict:
    return {
        "variant": name,
        "first_token_ms": statistics.median(each.first_token for each in times),
        "ms_per_step": statistics.median(each.rest / max(1, len(each.gaps)) for each in times),
        "p99_ms_per_step": _p99(times),
        "steps": statistics.mean(len(each.gaps) + 1 for each in times),
    }


def _p99(times: list[Times]) -> float:
    """The time of one step that 99 % of all are below."""
    gaps = sorted(gap for each in times for gap in each.gaps) or [0.0]
    return gaps[min(len(gaps) - 1, len(gaps) * 99 // 100)]


if __name__ == "__main__":
    sys.exit(run_program(main))
