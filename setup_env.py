"""Check this machine, make a virtual environment, install eagle_triton in it and run a script there.

    python3 setup_env.py                              report only; changes nothing
    python3 setup_env.py --install                    make .venv with the versions of constraints.txt
    python3 setup_env.py --run usage_example.py       install if needed, report, run the script in .venv

Uses the standard library alone, on Linux, WSL and Windows, with Python 3.10-3.13.
Exit code 0: usable, perhaps on the CPU only; 1: not ready yet; 2: a wrong argument. After --run: that of the script.

EAGLE_TRITON_TORCH_SPEC replaces the requirement "torch" in the first pip call, to choose another build of the
pinned version: a wheel, `torch==2.13.0+cpu`, or a requirement followed by pip options such as --index-url.
Without it pip's own configuration decides; on Linux the usual build is the one with CUDA, several gigabytes.
"""

import argparse
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
from typing import Any, NamedTuple

MIN_PYTHON, MAX_PYTHON = (3, 10), (3, 13)
if sys.version_info[:2] < MIN_PYTHON:  # before anything that an older Python cannot evaluate
    sys.exit(
        f"setup_env.py: eagle_triton needs Python 3.10-3.13, this is {platform.python_version()}\n"
        "Install one of them and run it instead, for example: python3.13 setup_env.py --install"
    )

ROOT = Path(__file__).resolve().parent
WINDOWS = os.name == "nt"
INSTALL = ("python" if WINDOWS else "python3") + " setup_env.py --install"
INSTALL_UPSTREAM = (
    f"{INSTALL} --venv .venv-upstream --constraints constraints-upstream.txt --extra-no-deps eagle-llm==1.2.1"
)
TRITON = "triton-windows" if WINDOWS else "triton"
TRITON_PLATFORMS = {("linux", "x86_64"), ("linux", "aarch64"), ("win32", "AMD64")}
REQUIRED = {  # at least, below: the bounds of pyproject.toml
    "torch": ("2.6", None),
    TRITON: ("3.4", None),
    "transformers": ("4.53", "6"),
    "accelerate": ("1.0", None),
    "safetensors": ("0.4.3", None),
}
STAMP = "eagle_triton.stamp"
UNFINISHED = "unfinished"


class SetupError(Exception):
    """Something that stops the installation; the message ends with what mends it."""


class Check(NamedTuple):
    """One row of the report. `status` is ok, note (usable all the same) or fault (not usable)."""

    name: str
    value: str
    status: str = "ok"
    comment: str = ""
    mend: str = ""


# --- What is there. probe() runs in the environment under inspection.


def probe() -> dict[str, Any]:
    """Versions and devices that the running interpreter sees, as JSON data."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: installed_version(name) for name in (*REQUIRED, "eagle-llm")},
        "torch": probe_torch(),
        "eagle": probe_eagle(),
    }


def installed_version(distribution: str) -> str | None:
    from importlib import metadata  # here, because Python 3.7 lacks it and must reach the message above

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def probe_torch() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # a broken build fails in many ways; the report shows which
        return {"error": f"{type(error).__name__}: {error}", "cuda": None, "gpus": []}
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = [describe_gpu(d.name, f"{d.major}.{d.minor}", d.total_memory / 2**20) for d in devices]
    return {"error": None, "cuda": torch.version.cuda, "gpus": gpus}


def probe_eagle() -> dict[str, Any]:
    """The EAGLE package, installed or in the checkout that EAGLE_SRC names, and whether it imports."""
    if os.environ.get("EAGLE_SRC"):
        sys.path.insert(0, os.environ["EAGLE_SRC"])
    spec = importlib.util.find_spec("eagle")
    if spec is None:
        return {"path": None, "error": None}
    path = spec.origin or "a directory without __init__.py"
    try:
        importlib.import_module("eagle.model.ea_model")
    except Exception as error:  # what somebody else's module does on import; the report shows what it said
        return {"path": path, "error": f"{type(error).__name__}: {error}"}
    return {"path": path, "error": None}


def inspect_python(python: Path) -> dict[str, Any]:
    """Run probe() in another interpreter and return what it reports."""
    code = "import json, sys; sys.path.append(sys.argv[1]); from setup_env import probe; print(json.dumps(probe()))"
    try:
        result = subprocess.run([str(python), "-B", "-c", code, str(ROOT)], capture_output=True, text=True)
        if result.returncode == 0:
            return json.loads(last_line(result.stdout))  # what imports print comes before
        reason = last_line(result.stderr) or f"exit code {result.returncode}"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise SetupError(f"{python} cannot be inspected: {reason}\nRemove its environment, then: {INSTALL}")


def inspect_driver() -> dict[str, Any]:
    """Driver version and GPUs as nvidia-smi reports them; without nvidia-smi there is no driver."""
    tool = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")
    if tool is None:
        return {"error": None, "driver": None, "gpus": []}
    fields = "--query-gpu=driver_version,name,compute_cap,memory.total"
    query = [tool, fields, "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error), "driver": None, "gpus": []}
    if result.returncode != 0:
        return {"error": last_line(result.stdout + result.stderr), "driver": None, "gpus": []}
    rows = [line.split(", ") for line in result.stdout.splitlines()]
    gpus = [
        describe_gpu(name, capability, float(mebibytes) if mebibytes.isdigit() else None)
        for _, name, capability, mebibytes in rows
    ]
    return {"error": None, "driver": rows[0][0] if rows else None, "gpus": gpus}


def describe_gpu(name: str, capability: str, mebibytes: float | None) -> dict[str, Any]:
    """A GPU as JSON data; chips that share the host's memory do not report theirs."""
    memory = None if mebibytes is None else round(mebibytes / 1024, 1)
    return {"name": name, "capability": capability, "memory_gib": memory}


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


# --- What it means.


def check(facts: dict[str, Any]) -> list[Check]:
    """Judge the facts of inspect_python() and, under "nvidia", those of inspect_driver()."""
    packages = facts["packages"]
    return [
        check_python(facts["python"]),
        check_torch(facts),
        check_triton(packages[TRITON]),
        check_driver(facts["nvidia"]),
        *check_gpus(facts),
        *[check_package(name, packages[name]) for name in ("transformers", "accelerate", "safetensors")],
        check_eagle(facts),
    ]


def release(version: str) -> tuple[int, ...]:
    """The numeric part of a version: '2.13.0+cpu' is (2, 13, 0)."""
    return tuple(int(part) for part in re.match(r"\d+(\.\d+)*", version).group().split("."))


def check_python(version: str) -> Check:
    if MIN_PYTHON <= release(version)[:2] <= MAX_PYTHON:
        return Check("Python", version)
    return Check("Python", version, "fault", "needs Python 3.10-3.13", "python3.13 setup_env.py --install")


def check_package(name: str, version: str | None) -> Check:
    low, below = REQUIRED[name]
    if version is None:
        return Check(name, "none", "fault", "not installed", INSTALL)
    if release(version) < release(low) or (below and release(version) >= release(below)):
        bounds = f">= {low}" + (f", < {below}" if below else "")
        return Check(name, version, "fault", f"needs {name} {bounds}", INSTALL)
    return Check(name, version)


def check_torch(facts: dict[str, Any]) -> Check:
    torch, row = facts["torch"], check_package("torch", facts["packages"]["torch"])
    if row.status == "fault":
        return row
    if torch["error"]:
        mend = f"{facts['executable']} -m pip install --force-reinstall --no-deps -c constraints.txt torch"
        return row._replace(status="fault", comment=torch["error"], mend=mend)
    return row._replace(comment=f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built for the CPU")


def check_triton(version: str | None) -> Check:
    if version is None and (sys.platform, platform.machine()) not in TRITON_PLATFORMS:
        return Check(TRITON, "none", "note", "not published for this platform; the CPU path does without")
    return check_package(TRITON, version)


def check_driver(nvidia: dict[str, Any]) -> Check:
    if nvidia["error"]:
        return Check("CUDA driver", "unknown", "note", f"nvidia-smi failed: {nvidia['error']}", "nvidia-smi")
    return Check("CUDA driver", nvidia["driver"] or "none")


def check_gpus(facts: dict[str, Any]) -> list[Check]:
    torch, nvidia = facts["torch"], facts["nvidia"]
    gpus = torch["gpus"] or nvidia["gpus"]
    if not gpus:
        return [Check("GPU", "none", comment="runs on the CPU")]
    rows = []
    for gpu in gpus:
        memory = f", {gpu['memory_gib']} GiB" if gpu["memory_gib"] else ""
        rows.append(Check("GPU", gpu["name"], comment=f"compute capability {gpu['capability']}{memory}"))
    if torch["gpus"] or torch["error"]:
        return rows
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "the CPU"
    blind = f"; torch, built for {build}, does not see it under driver {nvidia['driver']}"
    mend = f"{INSTALL}, with EAGLE_TRITON_TORCH_SPEC naming a build for this driver (see --help)"
    return [row._replace(status="note", comment=row.comment + blind, mend=mend) for row in rows]


def check_eagle(facts: dict[str, Any]) -> Check:
    eagle, packages = facts["eagle"], facts["packages"]
    if eagle["path"] is None:
        return Check("EAGLE package", "none", comment="optional: eagle_triton has an EaModel of its own")
    origin = f"eagle-llm {packages['eagle-llm']}" if packages["eagle-llm"] else eagle["path"]
    if eagle["error"] is None:
        return Check("EAGLE package", "importable", comment=origin)
    comment, transformers = f"{origin}: {eagle['error']}", packages["transformers"] or "none"
    if not transformers.startswith("4.53."):
        comment = f"{origin} imports only under transformers 4.53.x, not {transformers} ({eagle['error']})"
    return Check("EAGLE package", "not importable", "note", comment, INSTALL_UPSTREAM)


# --- The report.


def report(directory: Path) -> dict[str, Any]:
    """Facts, checks and verdict for the environment in `directory`, else for the running interpreter."""
    python = environment_python(directory)
    facts = inspect_python(python if python.exists() else Path(sys.executable))
    facts["nvidia"] = inspect_driver()
    checks = check(facts)
    wsl = " (WSL)" if "microsoft" in platform.release().lower() else ""
    return {
        "usable": all(row.status != "fault" for row in checks),
        "device": "cuda" if facts["torch"]["gpus"] else "cpu",
        "system": f"{platform.system()}{wsl} {platform.machine()}",
        "checks": [row._asdict() for row in checks],
        "facts": facts,
    }


def print_table(result: dict[str, Any], installed: bool) -> None:
    """installed: whether --install has just done what it can."""
    rows = [Check(**row) for row in result["checks"]]
    name, value = (max(len(row[column]) for row in rows) for column in (0, 1))
    print(f"{result['system']}, {result['facts']['executable']}\n")
    for row in rows:
        status = "missing" if row.status == "fault" and row.value == "none" else row.status
        print(f"  {row.name:<{name}}  {row.value:<{value}}  {status:<7}  {row.comment}".rstrip())
    faults = {row.mend for row in rows if row.status == "fault"}
    if result["usable"]:
        verdict = "usable" if result["device"] == "cuda" else "usable, on the CPU only"
    elif faults == {INSTALL} and not installed:
        verdict = f"not ready yet; `{INSTALL}` mends all of it"
        rows = [row for row in rows if row.mend != INSTALL]
    else:
        verdict = "not usable" if installed else "not ready yet"
    print(f"\n{verdict}")
    for mend in dict.fromkeys(row.mend for row in rows if row.mend):
        print(f"  to mend {', '.join(row.name for row in rows if row.mend == mend)}: {mend}")
    print(flush=True)


# --- The installation.


def environment_python(directory: Path) -> Path:
    return directory / ("Scripts/python.exe" if WINDOWS else "bin/python")


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
    row = check_python(platform.python_version())
    if row.status == "fault":
        raise SetupError(f"eagle_triton {row.comment}, this is {row.value}\nInstall one, then: {row.mend}")
    if state is None and directory.exists() and any(directory.iterdir()):
        raise SetupError(f"{directory} was not made by setup_env.py\nRemove it, or add: --venv ANOTHER_DIR")
    if state is not None and (state.split()[0] != python_series() or not python.exists()):
        shutil.rmtree(directory)

    directory.mkdir(parents=True, exist_ok=True)
    stamp.write_text(UNFINISHED)
    if not python.exists():
        create_environment(directory)
    torch_spec = os.environ.get("EAGLE_TRITON_TORCH_SPEC")
    if sys.platform == "linux" and not torch_spec and inspect_driver()["driver"] is None:
        log("no NVIDIA driver here: EAGLE_TRITON_TORCH_SPEC can choose a torch without CUDA (see --help)")
    # torch first and alone, so that the build chosen here is in place when the other packages ask for one.
    pip(python, "-c", str(constraints), *torch_requirement(torch_spec), verbose=verbose)
    pip(python, "-c", str(constraints), "-e", f"{ROOT}[test,benchmark,dev]", verbose=verbose)
    if extra_no_deps:
        pip(python, "--no-deps", *extra_no_deps, verbose=verbose)
    stamp.write_text(wanted)


def torch_requirement(torch_spec: str | None) -> list[str]:
    """What pip is given for torch."""
    try:
        return shlex.split(torch_spec or "torch", posix=not WINDOWS)
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
    from eagle_triton.benchmarks import (
        arguments,  # here: an older Python cannot read it and must reach the message above
    )

    parser = arguments.Parser("setup_env.py", __doc__)
    add = parser.add_argument
    add("--install", action="store_true", help="make the environment; nothing to do when it is complete")
    add("--json", action="store_true", help="print the report as JSON")
    add("--venv", default=ROOT / ".venv", metavar="DIR", help="default: .venv beside this script")
    add(
        "--constraints", metavar="FILE", help="pinned versions to install (default: constraints.txt beside this script)"
    )
    extra_help = "also install this, without what it depends on; may be repeated"
    add("--extra-no-deps", action="append", default=[], metavar="REQUIREMENT", help=extra_help)
    add("--verbose", action="store_true", help="show what pip prints; otherwise only if it fails")
    run_help = "install if needed, report, then run this in the environment; comes last"
    add("--run", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS]", help=run_help)
    options = parser.parse_args(argv)
    check_run(parser, options)
    check_installation(parser, options)
    options.venv = Path(options.venv).absolute()
    options.constraints = Path(options.constraints or ROOT / "constraints.txt").resolve()
    return options


def check_run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.run is None:
        return
    if not options.run:
        parser.error("--run must be followed by a script and its arguments, got none")
    if options.json:
        parser.error("--json and --run exclude each other: both would print to stdout")
    script = options.run[0]
    if not script.startswith("-") and not Path(script).is_file():
        parser.error(f"--run must be followed by a script, and {script or 'an empty path'} is no file")


def check_installation(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What is to be installed, and where; the latter only if something is to be."""
    installs = options.install or bool(options.run)
    given = {"constraints": options.constraints, "extra-no-deps": options.extra_no_deps, "verbose": options.verbose}
    for name, value in given.items():
        if value not in (None, [], False) and not installs:
            parser.error(f"--{name} must come with --install or --run: nothing is installed without them")
    if options.constraints is not None and not Path(options.constraints).is_file():
        parser.error(f"--constraints must be a file, and {options.constraints or 'an empty path'} is none")
    for requirement in options.extra_no_deps:
        if not re.match(r"[\w./\\]", requirement):
            parser.error(f"--extra-no-deps must be a requirement such as eagle-llm==1.2.1, got {requirement!r}")
    if not str(options.venv):
        parser.error("--venv must be a directory, got an empty path")
    problem = unfit_directory(Path(options.venv).absolute(), installs)
    if problem is not None:
        parser.error(f"--venv must be a directory {problem}")


def unfit_directory(directory: Path, installs: bool) -> str | None:
    """Why an environment cannot be in a directory, None if it can; whether it can be made is tried if it is to be."""
    from eagle_triton.benchmarks.arguments import try_to_write_into

    existing = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not existing.is_dir():
        return f"that can be made, and {existing} is no directory"
    if not installs:
        return None
    try:
        try_to_write_into(existing)
    except OSError as error:
        return f"that can be made or filled, and {existing} cannot be written: {error.strerror}"
    try:
        os.lstat(str(directory))
    except FileNotFoundError:
        pass
    except OSError as error:
        return f"that can be made, and {directory} cannot: {error.strerror}"
    return None


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    installs = options.install or bool(options.run)
    try:
        if installs:
            install(options.venv, options.constraints, options.extra_no_deps, options.verbose)
        result = report(options.venv)
        if options.json:
            print(json.dumps(result, indent=2))
        else:
            print_table(result, installs)
        if not result["usable"]:
            return 1
        if not options.run:
            return 0
        return subprocess.run([str(environment_python(options.venv)), *options.run]).returncode
    except (SetupError, OSError, subprocess.SubprocessError) as error:
        log(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
