"""Time a model as it is against the same model optimised, on the same prompts in one run.

python benchmark.py                                   the embedded checkpoint
python benchmark.py --model PATH --draft PATH --prompt "..." --max-length 200 --num-runs 5
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from dataclasses import asdict, dataclass

import torch
import transformers
from tqdm import tqdm

from eagle_triton import EaModel, __version__
from eagle_triton.comparison import Comparison, Run, compare
from eagle_triton.demo import demo_prompts


@dataclass(frozen=True)
class Row:
    """Medians over the prompts of one variant."""

    variant: str
    tokens_per_second: float
    ms_per_step: float
    first_step_ms: float
    tau: float

    @staticmethod
    def of(variant: str, runs: list[Run]) -> Row:
        def median(name: str) -> float:
            return statistics.median(getattr(run, name) for run in runs)

        first = statistics.median(run.times[0] for run in runs) * 1e3
        return Row(variant, median("tokens_per_second"), median("ms_per_step"), first, median("tau"))


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    dtype = getattr(torch, args.dtype)
    model = EaModel.from_pretrained(args.model, args.draft, use_eagle3=not args.eagle1, dtype=dtype).to(args.device)
    texts = [args.prompt] * args.num_runs if args.prompt else demo_prompts(args.num_runs)
    prompts = [model.tokenizer(text, return_tensors="pt").input_ids for text in texts]
    with tqdm(total=2 * len(prompts), desc="generations", disable=args.json, leave=False) as bar:
        comparisons, _ = compare(model, prompts, args.max_length, args.temperature, progress=bar.update)
    result = {
        "rows": [
            asdict(Row.of("original", [c.original for c in comparisons])),
            asdict(Row.of("optimised", [c.optimised for c in comparisons])),
        ],
        "same_tokens": sum(c.same_tokens for c in comparisons) if args.temperature == 0 else None,
        "prompts": len(prompts),
        "new_tokens": args.max_length,
        "temperature": args.temperature,
        "machine": _machine(args.device, args.dtype),
    }
    print(json.dumps(result, indent=2) if args.json else _table(result, comparisons))
    return 0


def _machine(device: str, dtype: str) -> dict[str, str]:
    cuda = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} CPU",
        "dtype": dtype,
        "threads": str(torch.get_num_threads()),
        "eagle_triton": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _table(result: dict, comparisons: list[Comparison]) -> str:
    original, optimised = result["rows"]
    lines = [f"{'':12s}{'tokens/s':>10s}{'ms/step':>10s}{'first ms':>10s}{'tau':>7s}"]
    for row in (original, optimised):
        lines.append(
            f"{row['variant']:12s}{row['tokens_per_second']:10.1f}{row['ms_per_step']:10.2f}"
            f"{row['first_step_ms']:10.1f}{row['tau']:7.2f}"
        )
    lines.append(f"{'ratio':12s}{optimised['tokens_per_second'] / original['tokens_per_second']:9.2f}x")
    if result["same_tokens"] is not None:
        lines.append(f"same tokens: {result['same_tokens']} of {len(comparisons)} prompts")
    lines.append(", ".join(result["machine"].values()))
    return "\n".join(lines)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="demo", help="directory or hub id of the target (default: demo)")
    parser.add_argument("--draft", default=None, help="directory or hub id of the head (default: the demo's)")
    parser.add_argument("--eagle1", action="store_true", help="the head is EAGLE-1/2 instead of EAGLE-3")
    parser.add_argument("--prompt", default=None, help="one prompt, repeated (default: the demo's held-out ones)")
    parser.add_argument("--max-length", type=int, default=100, help="new tokens per prompt (default: 100)")
    parser.add_argument("--num-runs", type=int, default=5, help="prompts, or repetitions of --prompt (default: 5)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    args = parser.parse_args(argv)
    if args.max_length < 1 or args.num_runs < 1:
        parser.error("--max-length and --num-runs must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
