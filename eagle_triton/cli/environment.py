"""Inspects a machine: what it has for eagle_triton, what is missing, and the command that fixes each fault.

`eagle-triton check` prints it. setup_env.py loads this file by its path, before anything is installed, so it uses only
the standard library and nothing of the package.
"""

import importlib
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

MIN_PYTHON, TESTED_PYTHON = (3, 10), (3, 13)  # the newest that this project was tested with
WINDOWS = os.name == "nt"
CHECKOUT = (Path(__file__).resolve().parents[2] / "setup_env.py").is_file()  # else an installed package
INSTALL = ("python" if WINDOWS else "python3") + " setup_env.py --install"
INSTALL_UPSTREAM = (
    f"{INSTALL} --venv .venv-upstream --constraints constraints-upstream.txt --extra-no-deps eagle-llm==1.2.1"
)
TRITON = "triton-windows" if WINDOWS else "triton"
TRITONS = (TRITON, "pytorch-triton", "triton-rocm", "pytorch-triton-rocm")  # its names in torch's requirements
TESTED_TRITON = "3.9"  # the newest that this project was tested with
TRITON_PLATFORMS = {("linux", "x86_64"), ("linux", "aarch64"), ("win32", "AMD64")}
REQUIRED = {  # at least, below: the bounds of pyproject.toml
    "torch": ("2.6", None),
    TRITON: ("3.4", None),
    "transformers": ("4.53", "5.40"),
    "accelerate": ("1.0", None),
    "psutil": ("5.9", None),
    "safetensors": ("0.4.3", None),
    "tqdm": ("4.66", None),
}

# The oldest driver for programs of each CUDA major version, with any minor version:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
DRIVERS = {11: 450, 12: 525, 13: 580}
MIN_CAPABILITY, TESTED_CAPABILITY = (7, 0), (8, 0)  # for any kernel of Triton; for this project's
ON_THE_CPU = 'to decode on the CPU, set CUDA_VISIBLE_DEVICES=""'


class SetupError(Exception):
    """An error that stops the inspection or the installation. Its message ends with the remedy."""


class Check(NamedTuple):
    """One row of the report. `status` is ok, note (usable) or fault (not usable)."""

    name: str
    value: str
    status: str = "ok"
    comment: str = ""
    mend: str = ""


# --- Facts. probe() runs in the environment under inspection.


def probe() -> dict[str, Any]:
    """Versions and devices that the running interpreter has, as JSON data."""
    torch, packages = probe_torch(), {name: installed_version(name) for name in (*REQUIRED, "eagle-llm")}
    packages[TRITON] = next(filter(None, map(installed_version, TRITONS)), None)
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": packages,
        "torch": torch,
        "triton": probe_triton(torch),
        "hidden": os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"),
        "eagle": probe_eagle(),
    }


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def probe_torch() -> dict[str, Any]:
    """torch's build and devices. archs: the GPUs that it has kernels for; empty if it does not say."""
    try:
        import torch
    except Exception as error:  # a broken build fails in many ways; the report shows which
        return {"error": f"{type(error).__name__}: {error}", "cuda": None, "hip": None, "archs": [], "gpus": []}
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = [describe_gpu(d.name, f"{d.major}.{d.minor}", d.total_memory / 2**20) for d in devices]
    built = {"cuda": torch.version.cuda, "hip": torch.version.hip, "archs": torch.cuda.get_arch_list()}
    return {"error": None, **built, "gpus": gpus}


def probe_triton(torch: dict[str, Any]) -> dict[str, Any]:
    """The Triton that torch requires, in pip's form, and the CUDA of the assembler that Triton uses for each GPU."""
    asked, assemblers = None, {}
    if installed_version("torch") and not WINDOWS:  # no release for Windows requires one
        pattern = rf"(?:{'|'.join(TRITONS)})\s*(?:==|~=)\s*[\d.]+"
        found = [re.match(pattern, line) for line in metadata.requires("torch") or []]
        asked = next((match[0].replace(" ", "") for match in found if match), None)
    for capability in {gpu["capability"] for gpu in torch["gpus"]} if torch["cuda"] else ():
        try:
            from triton.backends.nvidia.compiler import get_ptxas

            assemblers[capability] = get_ptxas(int(capability.replace(".", ""))).version
        except Exception as error:  # Triton's own code may change or fail to import; the report does without it
            assemblers[capability] = f"unknown: {type(error).__name__}: {error}"
    return {"asked": asked, "assemblers": assemblers}


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
    except Exception as error:  # another package may raise anything on import; the report shows it
        return {"path": path, "error": f"{type(error).__name__}: {error}"}
    return {"path": path, "error": None}


def inspect_python(python: Path) -> dict[str, Any]:
    """Run probe() in another interpreter. Returns its facts."""
    code = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['probe']()))"
    try:
        result = subprocess.run([str(python), "-B", "-c", code, __file__], capture_output=True, text=True)
        if result.returncode == 0:
            return json.loads(last_line(result.stdout))  # imports may print before it
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
    """A GPU as JSON data. GPUs that share the host's memory do not report theirs."""
    memory = None if mebibytes is None else round(mebibytes / 1024, 1)
    return {"name": name, "capability": capability, "memory_gib": memory}


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


# --- Verdicts.


def check(facts: dict[str, Any]) -> list[Check]:
    """Judge the facts of inspect_python() and, under "nvidia", of inspect_driver()."""
    packages = facts["packages"]
    return [
        check_python(facts["python"]),
        check_torch(facts),
        check_triton(facts),
        check_driver(facts),
        *check_gpus(facts),
        *[check_package(name, packages[name]) for name in REQUIRED if name not in ("torch", TRITON)],
        check_eagle(facts),
    ]


def release(version: str) -> tuple[int, ...]:
    """The numeric part of a version: '2.13.0+cpu' is (2, 13, 0)."""
    return tuple(int(part) for part in re.split(r"[^\d.]", version)[0].rstrip(".").split("."))


def check_python(version: str) -> Check:
    if release(version)[:2] > TESTED_PYTHON:
        return Check("Python", version, "note", f"not tested; {dotted(TESTED_PYTHON)} is")
    if release(version)[:2] >= MIN_PYTHON:
        return Check("Python", version)
    mend = "python3.13 setup_env.py --install" if CHECKOUT else "python3.13 -m venv, and install eagle_triton there"
    return Check("Python", version, "fault", f"needs Python {dotted(MIN_PYTHON)} or newer", mend)


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
    return row._replace(comment=f"built for {build_of(facts)}")


def build_of(facts: dict[str, Any]) -> str:
    """The device that torch is built for: from torch itself, or from its version if it does not import."""
    torch = facts["torch"]
    if torch["hip"]:
        return f"ROCm {torch['hip']}"
    if torch["cuda"] or not torch["error"]:
        return f"CUDA {torch['cuda']}" if torch["cuda"] else "the CPU"
    tag = re.search(r"\+cu(\d+)(\d)\b", facts["packages"]["torch"] or "")
    return f"CUDA {tag[1]}.{tag[2]}" if tag else "an unknown device"


def cuda_major(text: str) -> int:
    """13 for "13.2" and for "CUDA 13.2", 0 for a text without CUDA."""
    found = re.match(r"(CUDA )?(\d+)\.", text)
    return int(found[2]) if found else 0


def check_triton(facts: dict[str, Any]) -> Check:
    version, asked = facts["packages"][TRITON], facts["triton"]["asked"]
    if version is None and (sys.platform, platform.machine()) not in TRITON_PLATFORMS:
        return Check(TRITON, "none", "note", "not published for this platform; the CPU path does not need it")
    row = check_package(TRITON, version)
    if row.status == "fault" or version is None:
        return row
    if asked and not meets(version, asked):
        mend = f'{facts["executable"]} -m pip install "{asked}"'
        return row._replace(status="note", comment=f"torch {facts['packages']['torch']} asks for {asked}", mend=mend)
    if release(version)[:2] > release(TESTED_TRITON):
        comment = f"newer than {TESTED_TRITON}, the newest that eagle_triton was tested with"
        return row._replace(status="note", comment=comment)
    return row


def meets(version: str, asked: str) -> bool:
    """Whether a version satisfies a requirement with `==` or `~=`."""
    found, wanted = release(version), release(asked.rpartition("=")[2])
    if "==" in asked:
        return found == wanted
    return found[: len(wanted) - 1] == wanted[:-1] and found >= wanted


def check_driver(facts: dict[str, Any]) -> Check:
    nvidia, cuda = facts["nvidia"], cuda_major(build_of(facts))
    if nvidia["error"]:
        return Check("CUDA driver", "unknown", "note", f"nvidia-smi failed: {nvidia['error']}", "nvidia-smi")
    row, least = Check("CUDA driver", nvidia["driver"] or "none"), DRIVERS.get(cuda, 0)
    if facts["torch"]["gpus"] or driver_major(nvidia) >= least:
        return row  # torch may see GPUs under an older driver, with NVIDIA's forward compatibility package
    comment = f"too old for torch's CUDA {cuda}, which needs driver {least} or newer"
    return row._replace(
        status="note", comment=comment, mend=another_torch(nvidia, f"update the driver to {least}, or ")
    )


def driver_major(nvidia: dict[str, Any]) -> float:
    """580 for "580.65"; infinity without a driver or a known number: new enough for everything."""
    found = re.match(r"\d+", nvidia["driver"] or "")
    return int(found[0]) if found else math.inf


def another_torch(nvidia: dict[str, Any], instead: str = "") -> str:
    """The advice to get a build of torch that this driver runs."""
    fitting = [major for major, least in DRIVERS.items() if least <= driver_major(nvidia)]
    build = f"a build of torch for CUDA {fitting[-1]}" if fitting else "an older build of torch"
    if CHECKOUT:
        return f"{instead}{INSTALL}, with EAGLE_TRITON_TORCH_SPEC naming {build} (see --help)"
    return f"{instead}install {build}: https://pytorch.org/get-started/locally"


def check_gpus(facts: dict[str, Any]) -> list[Check]:
    torch, nvidia = facts["torch"], facts["nvidia"]
    gpus = torch["gpus"] or nvidia["gpus"]
    if not gpus:
        return [Check("GPU", "none", comment="runs on the CPU")]
    rows = []
    for gpu in gpus:
        memory = f", {gpu['memory_gib']} GiB" if gpu["memory_gib"] else ""
        rows.append(Check("GPU", gpu["name"], comment=f"compute capability {gpu['capability']}{memory}"))
    if torch["error"]:
        return rows
    if torch["gpus"]:
        judged = [judge_gpu(row, gpu, facts) for row, gpu in zip(rows, gpus, strict=True)]
        others = [row._replace(status="note", mend="") if row.status == "fault" else row for row in judged[1:]]
        return [judged[0], *others]  # the first one is used
    if facts["hidden"]:
        blind, mend = "; hidden by CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES"
    else:
        blind = f"; torch, built for {build_of(facts)}, does not see it under driver {nvidia['driver']}"
        mend = check_driver(facts).mend or another_torch(nvidia)
    return [row._replace(status="note", comment=row.comment + blind, mend=mend) for row in rows]


def judge_gpu(row: Check, gpu: dict[str, Any], facts: dict[str, Any]) -> Check:
    """Judge a GPU that torch sees: whether torch, Triton and the kernels here can use it."""
    torch = facts["torch"]

    def told(status: str, comment: str, mend: str = "") -> Check:
        return row._replace(status=status, comment=f"{row.comment}; {comment}", mend=mend)

    if torch["hip"]:
        return told("note", "the kernels compile for gfx942, and have not been run on AMD's GPUs")
    capability = release(gpu["capability"])
    if capability < MIN_CAPABILITY:
        return told("fault", f"older than {dotted(MIN_CAPABILITY)}, which Triton's kernels need", ON_THE_CPU)
    if torch["archs"] and not has_kernels(torch["archs"], capability):
        comment = f"this build of torch has kernels for {', '.join(torch['archs'])} only"
        mend = "install a build of torch that has them: https://pytorch.org/get-started/locally"
        return told("fault", comment, f"{mend}; {ON_THE_CPU}")
    assembler = cuda_major(facts["triton"]["assemblers"].get(gpu["capability"], ""))
    least = DRIVERS.get(assembler, 0)
    if driver_major(facts["nvidia"]) < least and cuda_major(torch["cuda"]) < assembler:
        comment = f"Triton assembles kernels for CUDA {assembler}, which needs driver {least} or newer"
        return told("note", comment, f"update the driver to {least}, or install the Triton that torch asks for")
    if capability < TESTED_CAPABILITY:
        comment = f"older than {dotted(TESTED_CAPABILITY)}, from which on the kernels are compiled by the tests"
        return told("note", comment)
    return row


def dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def has_kernels(archs: list[str], capability: tuple[int, ...]) -> bool:
    """Whether a build has binaries for a GPU's generation, or code that its driver compiles: sm_86 or compute_80."""
    for kind, major, minor in re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(archs)):
        built = (int(major), int(minor))
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


def check_eagle(facts: dict[str, Any]) -> Check:
    eagle, packages = facts["eagle"], facts["packages"]
    if eagle["path"] is None:
        return Check("EAGLE package", "none", comment="optional: eagle_triton has its own EaModel")
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
    """A report as text. installed: whether --install has just run."""
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
        verdict = f"not ready yet; `{INSTALL}` fixes everything"
        rows = [row for row in rows if row.mend != INSTALL]
    else:
        verdict = "not usable" if installed else "not ready yet"
    lines += ["", verdict]
    for mend in dict.fromkeys(row.mend for row in rows if row.mend):
        lines.append(f"  to fix {', '.join(row.name for row in rows if row.mend == mend)}: {mend}")
    return "\n".join(lines) + "\n"
