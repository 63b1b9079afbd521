"""Every kernel compiles for sm_90, and uses no local memory there, in the first of its settings used in production.
`.ci/run` compiles the other settings, and every kernel for the other targets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
STEMS = sorted(path.stem for path in (TESTS / "compile_cases").glob("[!_]*.py"))
PROCESSES = 2  # each takes seconds to import what it compiles


@pytest.mark.slow
@pytest.mark.parametrize("stems", [STEMS[place::PROCESSES] for place in range(PROCESSES)], ids=" ".join)
def test_kernels_compile(stems):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(TESTS / "compile_kernels.py"), "--first", "--on", "sm_90", *stems]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
