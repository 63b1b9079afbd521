"""Lint, check types and floors, and test the project with the interpreter that runs this.

All of it takes 14 to 20 minutes on two cores. Arguments that are not listed here go to pytest, and may name some tests:

    python run_tests.py tests/test_setup_env.py -k install

--detailed-report also times generations, and every operation: attention, cache, tree, verification and others.
"""

import os
import subprocess
import sys
from pathlib import Path

from eagle_triton.command_line import Parser, run_program

ROOT = Path(__file__).resolve().parent
CPUS = os.cpu_count() or 1
WORKERS = min(CPUS, 4)
LINT_IMPORTS = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
TAKE_VALUES = ("-k", "-m", "-n", "-p", "-c", "-o", "-r", "-W")  # pytest's short options that a value follows


def run(*arguments: str) -> bool:
    """Run this Python with `arguments` in the root; True when it succeeds."""
    print(f"\n$ python {' '.join(arguments)}", flush=True)
    environment = {"OMP_NUM_THREADS": str(max(CPUS // WORKERS, 1)), **os.environ}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled once, what is tested is kept for each process
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment).returncode == 0


def missing_path(arguments: list[str]) -> str | None:
    """The first argument for pytest that names a file or directory, perhaps a test in it, which does not exist."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if argument.startswith("-") or before in TAKE_VALUES or before.startswith("--"):
            continue
        if not (ROOT / argument.partition("::")[0]).exists():
            return argument
    return None


def main(argv: list[str] | None = None) -> int:
    parser = Parser("run_tests.py", __doc__)
    parser.add_argument("--detailed-report", action="store_true", help="also the slowest tests, and benchmarks")
    options, pytest_arguments = parser.parse_known_args(argv)
    missing = missing_path(pytest_arguments)
    if missing is not None:
        parser.error(f"what is tested must be a path in {ROOT}, and {missing} does not exist there")

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
        passed += [run("benchmark.py"), run("benchmark.py", "operations")]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(run_program(main))
