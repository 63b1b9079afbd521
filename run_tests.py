"""Lint, check types and floors, and test the project with the interpreter that runs this.

Arguments that --help does not list go to pytest: `python run_tests.py tests/test_setup_env.py -k install`.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
CPUS = os.cpu_count() or 1
WORKERS = min(CPUS, 4)
LINT_IMPORTS = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"


def run(*arguments: str) -> bool:
    """Run this Python with `arguments` in the root; True when it succeeds."""
    print(f"\n$ python {' '.join(arguments)}", flush=True)
    environment = {"OMP_NUM_THREADS": str(max(CPUS // WORKERS, 1)), **os.environ}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment).returncode == 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--detailed-report", action="store_true", help="also the slowest tests and the benchmark")
    options, pytest_arguments = parser.parse_known_args(argv)

    parallel = ["-n", str(WORKERS), "--dist", "worksteal"]
    durations = ["--durations", "15"] if options.detailed_report else []
    passed = [
        run("-m", "ruff", "check", "--output-format", "concise"),
        run("-m", "ruff", "format", "--check", "--output-format", "concise"),
        run("-m", "mypy"),
        run("-c", LINT_IMPORTS, "--no-cache"),
        run("-m", "pytest", *parallel, *durations, *pytest_arguments),
    ]
    if options.detailed_report and all(passed):
        passed.append(run("benchmark.py"))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
