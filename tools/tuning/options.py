"""Options that the sweeps share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from eagle_triton.command_line import Parser, check_device, output_file, whole


def read_sweep(parser: Parser, argv: Sequence[str] | None, what: str, of_what: str) -> argparse.Namespace:
    """Add what every sweep takes and read the arguments. `what` is timed on a GPU, without which the parser stops;
    `of_what` is printed for."""
    workers = max(1, (os.cpu_count() or 2) - 1)
    add = parser.add_argument
    add("--workers", type=whole(most=256), default=workers, metavar="N", help=f"compilers (default: {workers})")
    add("--csv", type=output_file(), metavar="FILE.csv", help="write every measurement here")
    add("--top", type=whole(), default=4, metavar="N", help=f"settings to print per {of_what} (default: 4)")
    args = parser.parse_args(argv)
    check_device(parser, None, only_gpu=True)
    with parser.explains():
        import torch
    if not torch.cuda.is_available():
        parser.stop(f"{what} timed on a GPU, and torch sees none")
    return args
