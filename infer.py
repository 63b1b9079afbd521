"""Chat with a model by every drafting method: `python infer.py` is `eagle-triton chat`."""

from __future__ import annotations

import sys

from eagle_triton.cli.main import run


def main(argv: list[str] | None = None) -> int:
    return run("chat", sys.argv[1:] if argv is None else argv, "infer.py")


if __name__ == "__main__":
    sys.exit(main())
