"""setup_env.py: the report for every kind of machine, the installation without pip, and the command line."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import setup_env
from setup_env import STAMP, UNFINISHED, environment

INSTALL, TRITON = environment.INSTALL, environment.TRITON
ROOT = Path(__file__).resolve().parent.parent
GPU = {"name": "NVIDIA H200", "capability": "9.0", "memory_gib": 139.8}
SHARED = {"name": "NVIDIA GB10", "capability": "12.1", "memory_gib": None}  # whose memory is the host's


def machine(**changes):
    """The facts of a usable machine without a GPU, with changes."""
    facts = {
        "python": "3.11.7",
        "executable": ".venv/bin/python",
        "packages": {
            "torch": "2.13.0+cpu",
            TRITON: "3.7.1",
            "transformers": "5.23.0",
            "accelerate": "1.15.0",
            "psutil": "7.2.2",
            "safetensors": "0.8.0",
            "tqdm": "4.70.1",
            "eagle-llm": None,
        },
        "torch": {"error": None, "cuda": None, "hip": None, "archs": [], "gpus": []},
        "triton": {"asked": None, "assemblers": {}},
        "hidden": False,
        "eagle": {"path": None, "error": None},
        "nvidia": {"error": None, "driver": None, "gpus": []},
    }
    for name, value in changes.items():
        facts[name] = facts[name] | value if isinstance(value, dict) else value
    return facts


def with_gpu(driver="580.65", capability="9.0", **torch):
    """The facts of a machine whose torch, for CUDA 13, sees its GPU."""
    gpu = GPU | {"capability": capability}
    seen = {"cuda": "13.0", "archs": ["sm_75", "sm_80", "sm_90", "sm_100", "compute_120"], "gpus": [gpu]}
    return machine(torch=seen | torch, nvidia={"driver": driver, "gpus": [gpu]})


def with_driver(driver, cuda="13.0", **others):
    """The facts of a machine with a GPU that torch does not see."""
    return machine(nvidia={"driver": driver, "gpus": [GPU]}, **{"torch": {"cuda": cuda}, **others})


def assembling(driver, cuda, version):
    """The facts of a machine whose Triton assembles for a CUDA of its own."""
    return with_gpu(driver, cuda=cuda) | {"triton": {"asked": None, "assemblers": {"9.0": version}}}


def packages(**versions):
    return machine(packages={TRITON if name == "triton" else name: version for name, version in versions.items()})


def triton(version, asked):
    return machine(packages={TRITON: version}, triton={"asked": asked})


def eagle(path, error, transformers):
    return machine(eagle={"path": path, "error": error}, packages={"transformers": transformers})


def row(facts, name):
    return next(row for row in environment.check(facts) if row.name == name)


# --- The report: facts, a row of it, its status, what its comment ends with, and what its advice contains.

OLD_KERNELS = "this build of torch has kernels for sm_75, sm_80, sm_90, sm_100, compute_120 only"
UNSEEN, VISIBLE = "does not see it under driver 580.65", "CUDA_VISIBLE_DEVICES"
NO_CPU, SPEC = f'{VISIBLE}=""', "EAGLE_TRITON_TORCH_SPEC"
OTHER_TRITON, UPSTREAM = ".venv/bin/python -m pip install", "upstream.txt"
ROWS = [
    *[
        (packages(**{name: version}), name, "fault", "", INSTALL)
        for name, *versions in (
            ("torch", None, "2.5.1+cu124"),
            ("transformers", None, "4.52.4", "5.40.0"),
            ("accelerate", None),
            ("psutil", None),
            ("safetensors", "0.4.2"),
            ("tqdm", "4.65.0"),
        )
        for version in versions
    ],
    *[
        (packages(transformers=version), "transformers", "ok", "", "")
        for version in ("4.53.0", "4.53.3", "5.0.0rc1", "5.23.0")
    ],
    (machine(python="3.10.0"), "Python", "ok", "", ""),
    (machine(python="3.13.9"), "Python", "ok", "", ""),
    (machine(python="3.14.0"), "Python", "note", "not tested; 3.13 is", ""),
    (machine(python="3.9.18"), "Python", "fault", "needs Python 3.10 or newer", "python3.13 setup_env.py --install"),
    (machine(), "GPU", "ok", "runs on the CPU", ""),
    (machine(torch={"error": "OSError: no libcudart"}), "torch", "fault", "OSError: no libcudart", "-m pip install"),
    (machine(), "torch", "ok", "built for the CPU", ""),
    (machine(torch={"cuda": "13.2"}), "torch", "ok", "built for CUDA 13.2", ""),
    (machine(torch={"hip": "7.1.25424"}), "torch", "ok", "built for ROCm 7.1.25424", ""),
    # a driver and torch
    (with_driver("570.86.15"), "CUDA driver", "note", "CUDA 13, which needs driver 580 or newer", "for CUDA 12"),
    (with_driver("570.86.15"), "GPU", "note", "under driver 570.86.15", "update the driver to 580, or "),
    (with_driver("470.57", "12.6"), "CUDA driver", "note", "needs driver 525 or newer", "for CUDA 11"),
    (with_driver("525.60", "12.6"), "CUDA driver", "ok", "", ""),
    (with_driver("999.1", "14.0"), "CUDA driver", "ok", "", ""),
    (with_driver("[N/A]"), "CUDA driver", "ok", "", ""),
    (with_gpu("570.86"), "CUDA driver", "ok", "", ""),  # torch sees it
    (
        with_driver("535.104", torch={"error": "ImportError"}, packages={"torch": "2.9.1+cu130"}),
        *("CUDA driver", "note", "too old for torch's CUDA 13, which needs driver 580 or newer", ""),
    ),
    # a GPU and torch
    (with_gpu(), "GPU", "ok", "compute capability 9.0, 139.8 GiB", ""),
    (with_driver("580.65", None), "GPU", "note", f"built for the CPU, {UNSEEN}", f"{SPEC} naming a build of torch for"),
    (with_driver("580.65", None, torch={"hip": "7.1"}), "GPU", "note", f"built for ROCm 7.1, {UNSEEN}", ""),
    (with_driver("580.65", hidden=True), "GPU", "note", f"; hidden by {VISIBLE}", f"unset {VISIBLE}"),
    (with_gpu(cuda=None, hip="7.1", archs=["gfx942"]), "GPU", "note", "have not been run on AMD's GPUs", ""),
    (with_gpu(capability="6.1"), "GPU", "fault", "older than 7.0, which Triton's kernels need", NO_CPU),
    (with_gpu(capability="7.0"), "GPU", "fault", OLD_KERNELS, NO_CPU),
    (with_gpu(capability="7.0", archs=[]), "GPU", "note", "the kernels are compiled by the tests", ""),
    (
        with_gpu(capability="7.5"),
        "GPU",
        "note",
        "older than 8.0, from which on the kernels are compiled by the tests",
        "",
    ),
    (with_gpu(capability="8.0"), "GPU", "ok", "139.8 GiB", ""),
    (with_gpu(capability="8.9"), "GPU", "ok", "139.8 GiB", ""),
    (with_gpu(capability="11.0"), "GPU", "fault", OLD_KERNELS, NO_CPU),
    (with_gpu(capability="12.1"), "GPU", "ok", "139.8 GiB", ""),
    # Triton's assembler and the driver; of torch's own CUDA it sees the GPU by forward compatibility
    (assembling("570.86", "12.6", "13.4.59"), "GPU", "note", "CUDA 13, which needs driver 580 or newer", "update the"),
    (assembling("570.86", "12.6", "12.9.86"), "GPU", "ok", "139.8 GiB", ""),
    (assembling("580.65", "12.6", "13.4.59"), "GPU", "ok", "139.8 GiB", ""),
    (assembling("570.86", "13.0", "13.4.59"), "GPU", "ok", "139.8 GiB", ""),
    (assembling("570.86", "12.6", "unknown: ImportError: triton"), "GPU", "ok", "139.8 GiB", ""),
    # Triton and torch
    (triton("3.7.1", "triton==3.7.1"), TRITON, "ok", "", ""),
    (triton("3.7.0", "triton==3.7.1"), TRITON, "note", "torch 2.13.0+cpu asks for triton==3.7.1", OTHER_TRITON),
    (triton("3.9.2", "triton~=3.9.0"), TRITON, "ok", "", ""),
    (triton("3.8.0", "triton~=3.9.0"), TRITON, "note", "asks for triton~=3.9.0", OTHER_TRITON),
    (triton("3.10.0", "triton-rocm~=3.9.0"), TRITON, "note", "asks for triton-rocm~=3.9.0", OTHER_TRITON),
    (triton("9.0.0", None), TRITON, "note", "the newest that eagle_triton was tested with", ""),
    # the EAGLE package
    (eagle(None, None, "5.23.0"), "EAGLE package", "ok", "eagle_triton has its own EaModel", ""),
    (eagle("eagle.py", None, "4.53.3"), "EAGLE package", "ok", "eagle.py", ""),
    (eagle("eagle.py", "ImportError: x", "5.23.0"), "EAGLE package", "note", "not 5.23.0 (ImportError: x)", UPSTREAM),
    (eagle("eagle.py", "ImportError: y", "4.53.3"), "EAGLE package", "note", "eagle.py: ImportError: y", UPSTREAM),
]


@pytest.mark.parametrize(("facts", "name", "status", "comment", "mend"), ROWS, ids=lambda value: str(value)[:40])
def test_rows_of_the_report(facts, name, status, comment, mend):
    found = row(facts, name)
    assert found.status == status and found.comment.endswith(comment) and mend in found.mend
    assert {other.status for other in environment.check(machine())} == {"ok"}


@pytest.mark.parametrize(("system", "status"), [("linux", "fault"), ("darwin", "note")])
def test_missing_triton_is_a_fault_where_it_is_published(monkeypatch, system, status):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert row(packages(triton=None), TRITON).status == status


def test_only_the_first_card_makes_a_machine_unusable():
    facts = with_gpu(gpus=[GPU, GPU | {"capability": "6.1"}])
    assert [row.status for row in environment.check(facts) if row.name == "GPU"] == ["ok", "note"]


def test_what_torch_asks_for_is_read_from_its_metadata(monkeypatch):
    lines = [
        "filelock",
        'triton~=3.9.0; platform_system == "Linux" and python_version < "3.16"',
        'tritonish==1; extra == "x"',
    ]
    monkeypatch.setattr(environment, "WINDOWS", False)
    monkeypatch.setattr(environment.metadata, "requires", lambda name: lines)
    assert environment.probe_triton({"cuda": None, "gpus": []}) == {"asked": "triton~=3.9.0", "assemblers": {}}
    monkeypatch.setattr(environment.metadata, "requires", lambda name: None)
    assert environment.probe_triton({"cuda": None, "gpus": []})["asked"] is None


def test_the_assembler_of_a_card_is_tritons_own():
    pytest.importorskip("triton.backends.nvidia.compiler")
    found = environment.probe_triton({"cuda": "13.0", "gpus": [GPU]})["assemblers"]
    assert list(found) == ["9.0"] and re.match(r"\d+\.\d+", found["9.0"])


def test_pins_of_triton_are_not_newer_than_what_is_called_tested():
    pinned = re.findall(r"^triton(?:-windows)?==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and all(environment.release(p) <= environment.release(environment.TESTED_TRITON) for p in pinned)


def requirements() -> dict[str, str]:
    """What pyproject.toml requires on this system: a name, and its bounds."""
    project = (ROOT / "pyproject.toml").read_text()
    lines = ast.literal_eval(re.search(r"^dependencies = (\[.*?^\])", project, re.DOTALL | re.MULTILINE)[1])
    found = dict(re.match(r"([\w-]+)([^;]*)", line).groups() for line in lines)
    del found["triton" if TRITON != "triton" else "triton-windows"]
    return found


def test_what_is_checked_is_what_pyproject_requires():
    checked = {name: f">={low}{f',<{below}' if below else ''}" for name, (low, below) in environment.REQUIRED.items()}
    assert checked == requirements()
    assert set(checked) <= {row.name for row in environment.check(machine())}


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-upstream.txt"])
def test_what_pyproject_requires_is_pinned(file):
    pinned = re.findall(r"^([\w-]+)==", (ROOT / file).read_text(), re.MULTILINE)
    assert set(requirements()) <= set(pinned)


def fake_tool(directory: Path, name: str, script: str) -> None:
    tool = directory / name
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for nvidia-smi is a shell script")
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo '580.65, NVIDIA H200, 9.0, 143155'", {"error": None, "driver": "580.65", "gpus": [GPU]}),
        ("echo '580.65, NVIDIA GB10, 12.1, [N/A]'", {"error": None, "driver": "580.65", "gpus": [SHARED]}),
        ("echo 'no devices'; exit 9", {"error": "no devices", "driver": None, "gpus": []}),
    ],
    ids=["gpu", "shared-memory", "failure"],
)
def test_nvidia_smi(tmp_path, monkeypatch, script, expected):
    fake_tool(tmp_path, "nvidia-smi", script)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.inspect_driver() == expected


# --- The installation, with pip and venv replaced by a record of the calls.


@pytest.fixture
def calls(monkeypatch):
    """The commands that an installation would run; making the environment makes its Python."""
    recorded = []

    def record(command, verbose=False):
        recorded.append(command)
        if command[1:3] == ["-m", "venv"]:
            python = setup_env.environment_python(Path(command[3]))
            python.parent.mkdir()
            python.touch()

    monkeypatch.setattr(setup_env, "run", record)
    monkeypatch.delenv("EAGLE_TRITON_TORCH_SPEC", raising=False)
    return recorded


@pytest.fixture
def constraints(tmp_path):
    file = tmp_path / "constraints.txt"
    file.write_text("torch==2.13.0\n")
    return file


def test_install_takes_torch_first_then_the_rest(tmp_path, calls, constraints):
    setup_env.install(tmp_path / "env", constraints, ["eagle-llm==1.2.1"])
    make, torch, rest, extra = calls
    assert make == [sys.executable, "-m", "venv", str(tmp_path / "env")]
    assert torch[-3:] == ["-c", str(constraints), "torch"]
    assert rest[-4:] == ["-c", str(constraints), "-e", f"{ROOT}[test,benchmark,dev,cli,serve]"]
    assert extra[-2:] == ["--no-deps", "eagle-llm==1.2.1"]


@pytest.mark.parametrize(
    ("pins", "series", "made_again"),
    [
        ("torch==2.13.0\n", "3.11", []),
        ("torch==2.14.0\n", "3.11", [["-m", "pip", "install"]] * 2),
        ("torch==2.13.0\n", "3.99", [["-m", "venv"], *[["-m", "pip", "install"]] * 2]),
    ],
    ids=["the same", "other constraints", "another Python"],
)
def test_an_environment_is_brought_up_to_date(
    pins, series, made_again, tmp_path, calls, constraints, monkeypatch, capsys
):
    monkeypatch.setattr(setup_env, "python_series", lambda: "3.11")
    setup_env.install(tmp_path / "env", constraints, [])
    calls.clear()
    constraints.write_text(pins)
    monkeypatch.setattr(setup_env, "python_series", lambda: series)
    setup_env.install(tmp_path / "env", constraints, [])
    assert [command[1 : 1 + len(made)] for command, made in zip(calls, made_again, strict=True)] == made_again
    said = "was made by Python 3.11 and is made again by 3.99"
    assert (said in capsys.readouterr().err) == (series == "3.99")


def test_interrupted_install_starts_from_nothing(tmp_path, calls, constraints, monkeypatch):
    environment = tmp_path / "env"
    with monkeypatch.context() as patch:
        patch.setattr(setup_env, "pip", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            setup_env.install(environment, constraints, [])
    assert (environment / STAMP).read_text() == UNFINISHED
    (environment / "half-written").touch()
    setup_env.install(environment, constraints, [])
    assert not (environment / "half-written").exists()
    assert (environment / STAMP).read_text() != UNFINISHED


def test_somebody_elses_directory_is_left_alone(tmp_path, calls, constraints):
    (tmp_path / "env").mkdir()
    (tmp_path / "env/precious").touch()
    with pytest.raises(setup_env.SetupError, match="was not made by setup_env.py"):
        setup_env.install(tmp_path / "env", constraints, [])
    assert [path.name for path in (tmp_path / "env").iterdir()] == ["precious"]
    assert calls == []


def test_torch_spec_comes_from_the_environment(tmp_path, calls, constraints, monkeypatch):
    monkeypatch.setenv("EAGLE_TRITON_TORCH_SPEC", "torch==2.13.0+cpu --no-index")
    setup_env.install(tmp_path / "env", constraints, [])
    assert calls[1][-2:] == ["torch==2.13.0+cpu", "--no-index"]


def test_missing_ensurepip_names_the_package(tmp_path, constraints, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(setup_env.SetupError, match=r"sudo apt install python3\.\d+-venv"):
        setup_env.install(tmp_path / "env", constraints, [])


TALKS = "import sys; print('out'); print('err', file=sys.stderr); raise SystemExit({})"


@pytest.mark.parametrize("verbose", [False, True])
def test_failing_command_is_named_and_what_it_printed_is_shown(verbose, capfd):
    with pytest.raises(setup_env.SetupError, match="exit code 3"):
        setup_env.run([sys.executable, "-c", TALKS.format(3)], verbose)
    printed = capfd.readouterr()
    assert sorted(printed.err.split()) == ["err", "out"] and not printed.out


@pytest.mark.parametrize(("verbose", "shown"), [(False, []), (True, ["err", "out"])])
def test_a_command_that_succeeds_is_quiet(verbose, shown, capfd):
    setup_env.run([sys.executable, "-c", TALKS.format(0)], verbose)
    printed = capfd.readouterr()
    assert sorted(printed.err.split()) == shown and not printed.out


# --- The command line.


def test_report_is_json_and_changes_nothing(tmp_path):
    command = [sys.executable, str(ROOT / "setup_env.py"), "--json", "--venv", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    result = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert result["usable"]
    assert result["facts"]["executable"] == sys.executable
    assert list(tmp_path.iterdir()) == []


def test_table_names_each_fault_and_what_mends_it(monkeypatch, capsys, tmp_path):
    facts = machine(packages={"accelerate": None, "safetensors": None})
    monkeypatch.setattr(environment, "inspect_python", lambda python: facts)
    monkeypatch.setattr(environment, "inspect_driver", lambda: {"driver": None, "gpus": [], "error": None})
    assert setup_env.main(["--venv", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert f"not ready yet; `{INSTALL}` fixes everything" in out
    assert out.count("missing") == 2 and "fault" not in out and "to fix" not in out


def test_table_names_what_an_installation_does_not_mend(monkeypatch, capsys, tmp_path):
    facts = machine(python="3.9.18", packages={"accelerate": None})
    monkeypatch.setattr(environment, "inspect_python", lambda python: facts)
    assert setup_env.main(["--venv", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "not ready yet\n" in out and f"to fix accelerate: {INSTALL}" in out and "to fix Python: python3.13" in out


def test_after_an_installation_nothing_is_promised(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(setup_env, "install", lambda *_: None)
    monkeypatch.setattr(environment, "inspect_python", lambda python: machine(packages={"accelerate": None}))
    assert setup_env.main(["--venv", str(tmp_path), "--install"]) == 1
    out = capsys.readouterr().out
    assert "not usable" in out and f"to fix accelerate: {INSTALL}" in out and "not ready" not in out


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied", "/x"), subprocess.TimeoutExpired("pip", 3)])
def test_a_failure_of_the_system_is_a_sentence(error, monkeypatch, capsys, tmp_path):
    def fail(*_):
        raise error

    monkeypatch.setattr(setup_env, "install", fail)
    assert setup_env.main(["--venv", str(tmp_path), "--install"]) == 1
    assert capsys.readouterr().err == f"setup_env.py: {error}\n"


def test_an_environment_without_a_python_that_runs_is_a_sentence(tmp_path):
    with pytest.raises(setup_env.SetupError, match="(?s)cannot be inspected: .*Remove its environment"):
        environment.inspect_python(tmp_path)


def test_a_torch_spec_that_cannot_be_read_is_named(tmp_path, calls, constraints, monkeypatch):
    monkeypatch.setenv("EAGLE_TRITON_TORCH_SPEC", "torch 'open")
    with pytest.raises(setup_env.SetupError, match="EAGLE_TRITON_TORCH_SPEC must be pip's arguments"):
        setup_env.install(tmp_path / "env", constraints, [])
    assert calls == [] and not (tmp_path / "env").exists()


def test_run_installs_reports_and_returns_the_exit_code(monkeypatch, capsys, tmp_path):
    installed = []
    monkeypatch.setattr(setup_env, "install", lambda *arguments: installed.append(arguments))
    monkeypatch.setattr(setup_env, "environment_python", lambda directory: Path(sys.executable))
    monkeypatch.setattr(environment, "inspect_python", lambda python: machine())
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit(int(sys.argv[2]))")
    assert setup_env.main(["--venv", str(tmp_path), "--run", str(script), "--code", "7"]) == 7
    assert installed == [(tmp_path, ROOT / "constraints.txt", [], False)]
    assert "usable, on the CPU only" in capsys.readouterr().out


def test_older_pythons_get_a_message():
    ast.parse((ROOT / "setup_env.py").read_text(), feature_version=(3, 7))
    pretend = "import runpy, sys; sys.version_info = (3, 9, 0); runpy.run_path(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", pretend, str(ROOT / "setup_env.py")], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("setup_env.py: eagle_triton needs Python 3.10 or newer")
