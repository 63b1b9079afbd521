"""`eagle-triton check`: shows what this machine has for eagle_triton and what is missing. It changes nothing.

Exit code 0: usable, perhaps on the CPU only; 1: not ready yet; 2: a wrong argument.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from eagle_triton.cli import environment
from eagle_triton.command_line import Parser


def main(argv: list[str] | None = None, program: str = "eagle-triton check") -> int:
    """Inspect the running Python and this machine. Returns 0 if they are usable, else 1."""
    parser = Parser(program, __doc__ or "")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    options = parser.parse_args(argv)
    try:
        result = environment.report(Path(sys.executable))
    except environment.SetupError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=2) if options.json else environment.table(result))
    return 0 if result["usable"] else 1
