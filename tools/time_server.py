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
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.benchmarks.modes import add_options
from eagle_triton.command_line import Parser, run_program, whole

if TYPE_CHECKING:
    from eagle_triton.benchmarks.serve import Answer

WARM_UPS = 3  # prompts before those that are timed


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
        from eagle_triton.benchmarks.serve import Answer, ask, client, own_server
        from eagle_triton.inference.config import EAGLEConfig
        from eagle_triton.inference.eagle_inference import EAGLEInference
        from eagle_triton.inference.session import Session

    inference = EAGLEInference.from_pretrained(args.model or "demo", args.draft, EAGLEConfig(temperature=0.0, slots=1))
    vocabulary = inference.pair.view.vocab_size
    shape = (WARM_UPS + args.num_runs, args.prompt_length)
    prompts = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0)).tolist()

    def decode(session: Session, prompt: list[int]) -> Answer:
        start = time.perf_counter()
        session.submit(prompt, args.max_length, stop_token_ids=())
        ends = []
        while not session.idle:
            if session.step():
                ends.append(time.perf_counter())
        gaps = [after - before for before, after in itertools.pairwise(ends)]
        return Answer(len(prompt), first=ends[0] - start, gaps=gaps, whole=ends[-1] - start)

    with inference.session(args.prompt_length + args.max_length) as session:
        direct = [decode(session, prompt) for prompt in prompts][WARM_UPS:]
    words = [] if args.model is None else [args.model]
    words += [] if args.draft is None else ["--draft", args.draft]

    async def ask_all(url: str) -> list[Answer]:
        async with client(None) as session:
            wanted = {"max_tokens": args.max_length, "temperature": 0}
            answers = [await ask(session, url, {"prompt": prompt, **wanted}) for prompt in prompts]
        if wrong := [answer.error for answer in answers if answer.error]:
            raise SystemExit(f"the server answered {wrong[0]}")
        return answers

    with own_server([*words, "--temperature", "0", "--max-num-seqs", "1"], []) as url:
        served = asyncio.run(ask_all(url))[WARM_UPS:]
    rows = [_row("session", direct), _row("server", served)]
    pairs = list(zip(direct, served, strict=True))
    first = statistics.median(theirs.first - ours.first for ours, theirs in pairs) * 1e3
    step = statistics.median((_rest(theirs) - _rest(ours)) / max(1, len(ours.gaps)) for ours, theirs in pairs) * 1e3
    p99 = rows[1]["p99_ms_per_step"] - rows[0]["p99_ms_per_step"]
    rows.append({"variant": "added by HTTP", "first_token_ms": first, "ms_per_step": step, "p99_ms_per_step": p99})
    record = Record.of("http", inference.pair.view.device, args, rows, [])
    return publish(record, record.json(), parser.prog, output=args.output)


def _rest(answer: Answer) -> float:
    """Seconds from the first to the last token."""
    return answer.whole - answer.first


def _row(name: str, answers: list[Answer]) -> dict:
    gaps = sorted(gap for answer in answers for gap in answer.gaps) or [0.0]
    return {
        "variant": name,
        "first_token_ms": statistics.median(answer.first for answer in answers) * 1e3,
        "ms_per_step": statistics.median(_rest(answer) / max(1, len(answer.gaps)) for answer in answers) * 1e3,
        "p99_ms_per_step": gaps[min(len(gaps) - 1, len(gaps) * 99 // 100)] * 1e3,
        "steps": statistics.mean(len(answer.gaps) + 1 for answer in answers),
    }


if __name__ == "__main__":
    sys.exit(run_program(main))
