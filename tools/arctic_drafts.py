"""Write tests/arctic_drafts.json: drafts of Arctic's own suffix tree, which ours are compared with.

    cmake -S ArcticInference/csrc/suffix_decoding -B FOLDER -G Ninja    with a Python that has nanobind
    cmake --build FOLDER
    python tools/arctic_drafts.py FOLDER

ARCTIC_C=FOLDER makes tests/test_arctic.py compare a thousand more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.command_line import Parser, existing_directory, run_program

CASES, SEED = 200, 0


def main(argv: list[str] | None = None) -> int:
    parser = Parser("arctic_drafts.py", "Write tests/arctic_drafts.json.")
    parser.add_argument("folder", type=existing_directory, metavar="FOLDER", help="where the module _C was built")
    args = parser.parse_args(argv)
    with parser.explains():
        from tests.arctic import ANSWERS, answer, cases, load

        module = load(args.folder)
    rows = [[case, answer(module, case)] for case in cases(CASES, SEED)]
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    ANSWERS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
