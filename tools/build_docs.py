"""Build the documentation site in an environment of its own: every warning is an error.

    python3 tools/build_docs.py             into site/
    python3 tools/build_docs.py --serve     and show it while the pages are edited

Needs neither torch nor a GPU: docstrings are read from the source, and the page of results from results/, by the hook
tools/results_page.py. The environment is .venv-docs, with the packages that pyproject.toml lists as `docs`, in the
versions of constraints.txt.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.command_line import Parser, run_program

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"


def main(argv: list[str] | None = None) -> int:
    parser = Parser("build_docs.py", __doc__)
    parser.add_argument("--serve", action="store_true", help="show the site, and again after every change")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-docs", metavar="DIR", help="default: .venv-docs")
    options = parser.parse_args(argv)
    venv = options.venv.absolute()
    if venv.exists() and not venv.is_dir():
        parser.error(f"--venv must be a directory, and {options.venv} is a file")
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    try:
        if not python.exists():
            run(sys.executable, "-m", "venv", str(venv))
        pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(str(python), *pip, "-c", str(CONSTRAINTS), *requirements())
        run(str(python), "-m", "mkdocs", *(["serve"] if options.serve else ["build", "--strict", "--quiet"]))
    except subprocess.CalledProcessError as error:
        print(f"tools/build_docs.py: exit code {error.returncode} from {' '.join(error.cmd[1:4])}", file=sys.stderr)
        return 1
    if not options.serve:
        print(f"the site is in {ROOT / 'site'}")
    return 0


def requirements() -> list[str]:
    """The extra `docs` of pyproject.toml, which Python 3.10 cannot parse."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return ast.literal_eval(re.search(r"^docs = (\[.*\])$", text, re.MULTILINE).group(1))


def run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})


if __name__ == "__main__":
    sys.exit(run_program(main))
