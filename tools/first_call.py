"""The first call with an empty Triton cache: kernels compiled in parallel ahead of it, and one after another.

    python tools/first_call.py                               the embedded checkpoint
    python tools/first_call.py --shape llama-3.1-8b --output FILE.json

Each way is a process of its own. Exit status 1 if they do not decode the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.benchmarks.modes import add_options
from eagle_triton.command_line import Parser, check_device, run_program

WAYS = ("ahead", "one after another")
COLUMNS = ("way", "first call s", "kernels", "compiling s, all kernels", "second call s")
CONTEXT, NEW = 512, 64


def main(argv: list[str] | None = None) -> int:
    parser = Parser("first_call.py", __doc__)
    add_options(parser, "--shape --commit --output")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    check_device(parser, None, only_gpu=True)
    with parser.explains():
        import torch

        from eagle_triton.benchmarks.record import Record, publish
        from eagle_triton.text_table import table
    if not torch.cuda.is_available():
        parser.stop("kernels are compiled for a GPU, and torch sees none")
    if args.way:
        print(json.dumps(measure(args.shape, args.way)))
        return 0
    rows = [in_a_fresh_process(args.shape, way) for way in WAYS]
    tokens = [row.pop("tokens") for row in rows]
    equal = tokens[0] == tokens[1]
    notes = [f"tokens of the two ways: {'equal' if equal else 'DIFFERENT'}", f"{os.cpu_count()} cores"]
    record = Record.of("first call", "cuda", args, rows, notes, dtype="bfloat16", context=CONTEXT, max_length=NEW)
    text = "\n".join([table(COLUMNS, [list(row.values()) for row in rows]), *notes])
    return publish(record, text, parser.prog, output=args.output) or int(not equal)


def in_a_fresh_process(shape: str | None, way: str) -> dict[str, Any]:
    """`measure` with an empty cache. Raises CalledProcessError if it fails."""
    command = [sys.executable, __file__, "--way", way, *(["--shape", shape] if shape else [])]
    with tempfile.TemporaryDirectory() as cache:
        result = subprocess.run(
            command, env={**os.environ, "TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True, check=True
        )
    return json.loads(result.stdout.splitlines()[-1])


def measure(shape: str | None, way: str) -> dict[str, Any]:
    """Figures of one way, and the tokens of a generation."""
    import torch
    import triton

    from eagle_triton import optimize_eagle_with_triton
    from eagle_triton.benchmarks import models
    from eagle_triton.engine.engine import Engine

    compiled: list[float] = []

    def listener(*, times, **_) -> None:
        compiled.append(times.ir_initialization + sum(each for _, each in times.lowering_stages) + times.store_results)

    triton.knobs.compilation.listener = listener
    if way != "ahead":
        Engine.compile_ahead = lambda *args, **options: None
    options = argparse.Namespace(
        shape=shape, model="demo", draft=None, eagle1=False, dtype="bfloat16", device="cuda", accept_length=None
    )
    model, _ = optimize_eagle_with_triton(models.load(options))
    (prompt,) = models.random_prompts(model, 1, CONTEXT)
    prompt = prompt.cuda()

    def first_step() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        steps = model.ea_generate(prompt, max_new_tokens=NEW)
        next(steps)
        torch.cuda.synchronize()
        steps.close()
        return time.perf_counter() - start

    first = first_step()
    return {
        "way": way,
        "first_call_s": first,
        "kernels": len(compiled),
        "compile_s": sum(compiled) / 1e6,
        "second_call_s": first_step(),
        "tokens": model.eagenerate(prompt, max_new_tokens=NEW).tolist(),
    }


if __name__ == "__main__":
    sys.exit(run_program(main))
