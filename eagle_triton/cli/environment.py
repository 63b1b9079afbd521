"""What a machine has for eagle_triton and what it lacks, with the command that mends each fault.

`eagle-triton check` prints it. setup_env.py loads this file by its path, before anything is installed: the standard
library alone, and nothing of the package.
"""

import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

MIN_PYTHON, MAX_PYTHON = (3, 10), (3, 13)
WINDOWS = os.name == "nt"
CHECKOUT = (Path(__file__).resolve().parents[2] / "setup_env.py").is_file()  # else an installed package
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
    "psutil": ("5.9", None),
    "safetensors": ("0.4.3", None),
    "tqdm": ("4.66", None),
}


class SetupError(Exception):
    """Something that stops the inspection or the installation; the message ends with what mends it."""


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
    code = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['probe']()))"
    try:
        result = subprocess.run([str(python), "-B", "-c", code, __file__], capture_output=True, text=True)
        if result.returncode == 0:
            return json.loads(last_line(result.stdout))  # what imports print comes before
        reason = last_line(result.stderr) or f"exit code {result.returncode}"
    except (OSError, ValueError) as error:
        reason = str(error)
    mend = f"\nRemove its environment, then: {INSTALL}" if CHECKOUT else ""
    raise SetupError(f"{python} cannot be inspected: {reason}{mend}")


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
        *[check_package(name, packages[name]) for name in REQUIRED if name not in ("torch", TRITON)],
        check_eagle(facts),
    ]


def release(version: str) -> tuple[int, ...]:
    """The numeric part of a version: '2.13.0+cpu' is (2, 13, 0)."""
    return tuple(int(part) for part in re.split(r"[^\d.]", version)[0].rstrip(".").split("."))


def check_python(version: str) -> Check:
    if MIN_PYTHON <= release(version)[:2] <= MAX_PYTHON:
        return Check("Python", version)
    mend = "python3.13 setup_env.py --install" if CHECKOUT else "python3.13 -m venv, and install eagle_triton there"
    return Check("Python", version, "fault", "needs Python 3.10-3.13", mend)


def check_package(name: str, version: str | None) -> Check:
    low, below = REQUIRED[name]
    bounds = f">= {low}" + (f", < {below}" if below else "")
    mend = INSTALL if CHECKOUT else f'python -m pip install "{name}{bounds.replace(" ", "")}"'
    if version is None:
        return Check(name, "none", "fault", "not installed", mend)
    if release(version) < release(low) or (below and release(version) >= release(below)):
        return Check(name, version, "fault", f"needs {name} {bounds}", mend)
    return Check(name, version)


def check_torch(facts: dict[str, Any]) -> Check:
    torch, row = facts["torch"], check_package("torch", facts["packages"]["torch"])
    if row.status == "fault":
        return row
    if torch["error"]:
        pinned = "-c constraints.txt " if CHECKOUT else ""
        mend = f"{facts['executable']} -m pip install --force-reinstall --no-deps {pinned}torch"
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
    if not CHECKOUT:
        mend = "install a build of torch for this driver"
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
    return Check("EAGLE package", "not importable", "note", comment, INSTALL_UPSTREAM if CHECKOUT else "")


# --- The report.


def report(python: Path) -> dict[str, Any]:
    """Facts, checks and verdict for an interpreter. Raises SetupError if it does not run."""
    facts = inspect_python(python)
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


def table(result: dict[str, Any], installed: bool = False) -> str:
    """A report as text. installed: whether --install has just done what it can."""
    rows = [Check(**row) for row in result["checks"]]
    name, value = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"{result['system']}, {result['facts']['executable']}", ""]
    for row in rows:
        status = "missing" if row.status == "fault" and row.value == "none" else row.status
        lines.append(f"  {row.name:<{name}}  {row.value:<{value}}  {status:<7}  {row.comment}".rstrip())
    faults = {row.mend for row in rows if row.status == "fault"}
    if result["usable"]:
        verdict = "usable" if result["device"] == "cuda" else "usable, on the CPU only"
    elif faults == {INSTALL} and not installed:
        verdict = f"not ready yet; `{INSTALL}` mends all of it"
        rows = [row for row in rows if row.mend != INSTALL]
    else:
        verdict = "not usable" if installed else "not ready yet"
    lines += ["", verdict]
    for mend in dict.fromkeys(row.mend for row in rows if row.mend):
        lines.append(f"  to mend {', '.join(row.name for row in rows if row.mend == mend)}: {mend}")
    return "\n".join(lines) + "\n"
