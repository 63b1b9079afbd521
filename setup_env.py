"""Check this machine, make a virtual environment, install eagle_triton in it and run a script there.

    python3 setup_env.py                              report only; changes nothing
    python3 setup_env.py --install                    make .venv with the versions of constraints.txt
    python3 setup_env.py --run usage_example.py       install if needed, report, run the script in .venv

The report says which of card, driver, torch and Triton do not go together, and what mends that.
Uses the standard library alone, on Linux, WSL and Windows, with Python 3.10 or newer.
Exit code 0: usable, perhaps on the CPU only; 1: not ready yet; 2: a wrong argument. After --run: that of the script.

EAGLE_TRITON_TORCH_SPEC replaces the requirement "torch" in the first pip call, to choose another build of the
pinned version: a wheel, `torch==2.13.0+cpu`, or a requirement followed by pip options such as --index-url.
Without it pip's own configuration decides; on Linux the usual build is the one with CUDA, several gigabytes.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

MIN_PYTHON = (3, 10)
if sys.version_info[:2] < MIN_PYTHON:  # before anything that an older Python cannot evaluate
    sys.exit(
        f"setup_env.py: eagle_triton needs Python 3.10 or newer, this is {platform.python_version()}\n"
        "Install a newer one and run it instead, for example: python3.13 setup_env.py --install"
    )

ROOT = Path(__file__).resolve().parent
STAMP = "eagle_triton.stamp"
UNFINISHED = "unfinished"


def load(path: str) -> ModuleType:
    """A file of the package, which need not be installed for it."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "eagle_triton" / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


environment = load("cli/environment.py")
command_line = load("command_line.py")
SetupError = environment.SetupError


# --- The installation.


def environment_python(directory: Path) -> Path:
    return directory / ("Scripts/python.exe" if environment.WINDOWS else "bin/python")


def install(directory: Path, constraints: Path, extra_no_deps: list[str], verbose: bool = False) -> None:
    """Make the environment and fill it, unless its stamp says that this very installation is complete.

    An interrupted one starts again from nothing; one made for other requirements is brought up to date. verbose: show
    what pip prints, also where nothing fails.
    """
    stamp, python = directory / STAMP, environment_python(directory)
    wanted = fingerprint(constraints, extra_no_deps)
    state = stamp.read_text() if stamp.exists() else None
    if state == wanted and python.exists():
        return
    if state is None and directory.exists() and any(directory.iterdir()):
        raise SetupError(f"{directory} was not made by setup_env.py\nRemove it, or add: --venv ANOTHER_DIR")
    if state is not None and (state.split()[0] != python_series() or not python.exists()):
        if state.split()[0] not in (UNFINISHED, python_series()):
            log(f"{directory} was made by Python {state.split()[0]} and is made again by {python_series()}")
        shutil.rmtree(directory)

    torch_spec = os.environ.get("EAGLE_TRITON_TORCH_SPEC")
    torch = torch_requirement(torch_spec)
    directory.mkdir(parents=True, exist_ok=True)
    stamp.write_text(UNFINISHED)
    if not python.exists():
        create_environment(directory)
    if sys.platform == "linux" and not torch_spec and environment.inspect_driver()["driver"] is None:
        log("no NVIDIA driver here: EAGLE_TRITON_TORCH_SPEC can choose a torch without CUDA (see --help)")
    # torch first and alone, so that the build chosen here is in place when the other packages ask for one.
    pip(python, "-c", str(constraints), *torch, verbose=verbose)
    pip(python, "-c", str(constraints), "-e", f"{ROOT}[test,benchmark,dev,cli,serve]", verbose=verbose)
    if extra_no_deps:
        pip(python, "--no-deps", *extra_no_deps, verbose=verbose)
    stamp.write_text(wanted)


def torch_requirement(torch_spec: str | None) -> list[str]:
    """What pip is given for torch."""
    try:
        return shlex.split(torch_spec or "torch", posix=not environment.WINDOWS)
    except ValueError as error:
        raise SetupError(f"EAGLE_TRITON_TORCH_SPEC must be pip's arguments, got {torch_spec!r}: {error}") from None


def fingerprint(constraints: Path, extra_no_deps: list[str]) -> str:
    """The Python series, then a hash of all that decides what gets installed and from where."""
    torch_spec = os.environ.get("EAGLE_TRITON_TORCH_SPEC")
    sources = [ROOT, (ROOT / "pyproject.toml").read_text(), constraints.read_text(), torch_spec, extra_no_deps]
    return f"{python_series()} {hashlib.sha256(repr(sources).encode()).hexdigest()}"


def python_series() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def create_environment(directory: Path) -> None:
    if importlib.util.find_spec("ensurepip") is None:
        raise SetupError(
            "this Python lacks ensurepip and cannot make virtual environments\n"
            f"On Debian and Ubuntu: sudo apt install python{python_series()}-venv"
        )
    log(f"making {directory}")
    run([sys.executable, "-m", "venv", str(directory)])


def pip(python: Path, *arguments: str, verbose: bool = False) -> None:
    log(f"pip install {' '.join(arguments)}" + (" (minutes; --verbose shows how far it is)" if not verbose else ""))
    run([str(python), "-m", "pip", "install", "--disable-pip-version-check", *arguments], verbose)


def run(command: list[str], verbose: bool = False) -> None:
    """Run a command; its output goes to stderr, since stdout belongs to the report, and unless verbose if it fails."""
    if verbose:
        code = subprocess.run(command, stdout=sys.stderr).returncode
    else:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        code = result.returncode
        if code != 0:
            print(result.stdout, file=sys.stderr)
    if code != 0:
        raise SetupError(f"exit code {code} from: {shlex.join(command)}\nThe cause is above; then run again")


def log(message: str) -> None:
    print(f"setup_env.py: {message}", file=sys.stderr, flush=True)


# --- The command line.


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command_line.Parser("setup_env.py", __doc__)
    add = parser.add_argument
    add("--install", action="store_true", help="make the environment; nothing to do when it is complete")
    add("--json", action="store_true", help="print the report as JSON")
    add("--venv", default=str(ROOT / ".venv"), metavar="DIR", help="default: .venv beside this script")
    pins_help = "pinned versions to install (default: constraints.txt beside this script)"
    add("--constraints", metavar="FILE", help=pins_help)
    extra_help = "also install this, without what it depends on; may be repeated"
    add("--extra-no-deps", type=requirement, action="append", default=[], metavar="REQUIREMENT", help=extra_help)
    add("--verbose", action="store_true", help="show what pip prints; otherwise only if it fails")
    run_help = "install if needed, report, then run this in the environment; comes last"
    add("--run", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS]", help=run_help)
    options = parser.parse_args(argv)
    check(parser, options)
    options.venv = Path(options.venv).absolute()
    options.constraints = Path(options.constraints or ROOT / "constraints.txt").resolve()
    return options


def requirement(text: str) -> str:
    if not re.match(r"[\w./\\]", text):
        raise argparse.ArgumentTypeError(f"must be a requirement such as eagle-llm==1.2.1, got {text!r}")
    return text


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse a script that is none, options that would not be read, and a directory that cannot be made."""
    if options.run is not None:
        script = next(iter(options.run), None)
        if script is None:
            parser.error("--run must be followed by a script and its arguments, got none")
        if options.json:
            parser.error("--json and --run exclude each other: both would print to stdout")
        if not script.startswith("-") and not Path(script).is_file():
            parser.error(f"--run must be followed by a script, and {script or 'an empty path'} is no file")
    installs = options.install or options.run is not None
    for name in ("constraints", "extra_no_deps", "verbose"):
        if getattr(options, name) not in (None, [], False) and not installs:
            option = command_line.option_of(name)
            parser.error(f"{option} must come with --install or --run: nothing is installed without them")
    if options.constraints is not None and not Path(options.constraints).is_file():
        parser.error(f"--constraints must be a file, and {options.constraints or 'an empty path'} is not one")
    if not options.venv:
        parser.error("--venv must be a directory, got an empty path")
    directory = Path(options.venv).absolute()
    existing = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not existing.is_dir():
        parser.error(f"--venv must be a directory that can be made, and {existing} is not a directory")
    if installs:
        try:
            command_line.try_to_write_into(existing)
            with contextlib.suppress(FileNotFoundError):
                os.lstat(directory)  # a name may be too long
        except OSError as error:
            parser.error(f"--venv must be a directory that can be written, and {directory} cannot: {error.strerror}")


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    installs = options.install or bool(options.run)
    try:
        if installs:
            install(options.venv, options.constraints, options.extra_no_deps, options.verbose)
        python = environment_python(options.venv)
        result = environment.report(python if python.exists() else Path(sys.executable))
        if options.json:
            print(json.dumps(result, indent=2))
        else:
            print(environment.table(result, installs), flush=True)
        if not result["usable"]:
            return 1
        if not options.run:
            return 0
        return subprocess.run([str(python), *options.run]).returncode
    except (SetupError, OSError, subprocess.SubprocessError) as error:
        if command_line.is_unwritten(error):
            raise  # run_program says it
        log(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(command_line.run_program(main))
