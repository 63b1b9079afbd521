"""Load an EAGLE model, optimise it with one call, generate, and give it back with another.

python3 setup_env.py --run usage_example.py
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.comparison import decode
from eagle_triton import EaModel, optimize_eagle_with_triton

PROMPT = "def read_lines(path, encoding='utf-8'):\n    "


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=100)
    args = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = EaModel.from_pretrained("demo").to(device)
    input_ids = model.tokenizer(args.prompt, return_tensors="pt").input_ids.to(device)

    before = decode(model, input_ids, args.max_new_tokens)
    model, originals = optimize_eagle_with_triton(model)
    after = decode(model, input_ids, args.max_new_tokens)
    text = model.tokenizer.decode(model.generate(input_ids, max_new_tokens=args.max_new_tokens)[0])
    patched = sum(row.status == "patched" for row in originals.report())
    originals.restore()
    again = decode(model, input_ids, args.max_new_tokens)

    print(text)
    print("-" * 72)
    print(f"device      {device}, {torch.get_default_dtype()}")
    print(f"original    {before.tokens_per_second:8.1f} tokens/s  {before.tau:.2f} tokens per step")
    print(f"optimised   {after.tokens_per_second:8.1f} tokens/s  {after.tau:.2f} tokens per step, {patched} patches")
    same = before.tokens == after.tokens == again.tokens
    print(f"same tokens {'yes' if same else 'NO'} (original, optimised, restored)")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
