"""What belongs together stands together: every operation in all its places, every public name where it is said."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import eagle_triton
from eagle_triton import demo, gdn, inference, speculative_decoding
from eagle_triton.engine.operations import Operations, kernel_operations, operation_names

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "eagle_triton"
OPERATIONS = operation_names()


def home(function) -> str:
    """The stem of an operation: ops/linear/dispatch.py's is linear."""
    name = function.__module__.split("eagle_triton.")[1]
    return name.removeprefix("reference.").removeprefix("ops.").split(".")[0]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_all_its_places(name):
    reference, kernel = getattr(Operations, name), getattr(kernel_operations(), name)
    stem = home(reference)
    assert home(kernel) == stem and kernel.__name__ == reference.__name__ == name
    assert inspect.getdoc(reference) and inspect.getdoc(kernel)
    taken, offered = (inspect.signature(function).parameters for function in (reference, kernel))
    assert list(taken) == [parameter for parameter in offered if parameter != "settings"]
    assert all(taken[parameter].default == offered[parameter].default for parameter in taken)
    test = (ROOT / "tests" / f"test_{stem}.py").read_text(encoding="utf-8")
    assert f"{name}(" in test or f'"{name}"' in test, f"tests/test_{stem}.py does not call {name}"
    assert (ROOT / "tests" / "compile_cases" / f"{stem}.py").exists()
    assert f"ops.{name}(" in "".join(path.read_text(encoding="utf-8") for path in PACKAGE.glob("engine/**/*.py"))


@pytest.mark.parametrize("path", sorted((PACKAGE / "reference").glob("*.py")), ids=lambda path: path.stem)
def test_references_are_operations_and_nothing_else(path):
    """Types, constants and checks stand in operands/, where production finds them too."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            assert not node.name.startswith("check_"), node.name
            assert isinstance(node, ast.FunctionDef) or node.name.startswith("_"), node.name
        elif isinstance(node, ast.Assign):
            assert isinstance(node.value, ast.Name) or ast.unparse(node.targets[0]).startswith("_"), ast.unparse(node)


def test_the_table_holds_all_operations():
    assert len(OPERATIONS) == 53


def test_the_package_imports_nothing_that_lies_beside_it():
    """Else an installed package would not find it."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"tools", "tests", "benchmarks", "setup_env"}, path


def test_no_kind_is_asked_for():
    """A draft or a layer is asked what it does, never what it is called."""
    for path in (PACKAGE / "engine").rglob("*.py"):
        assert ".kind" not in path.read_text(encoding="utf-8"), path


def test_the_names_of_embedded_models_stand_in_one_place():
    """Everybody else imports them, and asks `demo.path_of` where they lie."""
    names = {demo.PAIR, demo.HYBRID, demo.DRAFT, demo.MIXTURE}
    for path in set(PACKAGE.rglob("*.py")) - {Path(demo.__file__)}:
        found = [
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Constant)
        ]
        assert not [(path, node.lineno) for node in found if isinstance(node.value, str) and node.value in names]


@pytest.mark.parametrize(
    "package", [eagle_triton, gdn, inference, speculative_decoding], ids=lambda package: package.__name__
)
def test_public_names_are_found_and_known_to_type_checkers(package):
    assert package.__all__ == sorted(package.__all__) and set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    shown = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert set(shown) == set(package.__all__)
    for name, module in shown.items():
        assert getattr(importlib.import_module(module), name) is getattr(package, name)


def test_tree_decoding_offers_all_of_tree_decoding():
    from eagle_triton import tree_decoding
    from eagle_triton.ops import verification

    for name in (
        "verify_greedy",
        "verify_sampling",
        "verify_target_match",
        "verify_topp",
        "first_path",
        "update_sequence",
    ):
        assert getattr(tree_decoding, name) is getattr(verification, name)


def test_former_names_of_modules_still_work():
    """Each gives the very module that it is called now, and says so; in a process in which neither was imported."""
    program = (
        "import importlib, warnings; from eagle_triton.moved import MOVED\n"
        "warnings.simplefilter('always')\n"
        "for old, new in MOVED.items():\n"
        "    with warnings.catch_warnings(record=True) as caught:\n"
        "        module = importlib.import_module(old)\n"
        "    assert module is importlib.import_module(new) and module.__spec__.name == new, old\n"
        "    assert f'{old} is called {new} now' in [str(w.message) for w in caught], old\n"
        "from eagle_triton.speculative import EAGLEConfig, Session\n"
        "from eagle_triton.speculative.session import Session as same\n"
        "import eagle_triton\n"
        "assert same is Session and eagle_triton.EAGLEConfig is EAGLEConfig\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
