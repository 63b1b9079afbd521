"""Time EAGLE decoding, a decode step, or its single operations: python benchmark.py --help

`eagle-triton bench` is the same; eagle_triton/benchmarks/main.py has what both run.
"""

from __future__ import annotations

import sys

from eagle_triton.cli.main import run


def main(argv: list[str] | None = None) -> int:
    return run("bench", sys.argv[1:] if argv is None else argv, "benchmark.py")


if __name__ == "__main__":
    sys.exit(main())
