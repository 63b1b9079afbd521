"""Every kernel compiles for sm_90, and uses no local memory there, in the first of its settings used in production.
`.ci/run` compiles the other settings, and every kernel for the other targets."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
def test_every_kernel_compiles():
    """A jit function that is launched (its name ends in _kernel) is launched by a case of tests/compile_cases."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(TESTS / "compile_kernels.py"), "--first", "--on", "sm_90"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    root = TESTS.parent
    kernels = {
        f"{'.'.join(path.relative_to(root).with_suffix('').parts)}.{node.name}"
        for path in (root / "eagle_triton").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert len(kernels) > 25 and not kernels - set(result.stdout.split())
