"""Compiling in parallel: what is recorded, what a dry pass leaves behind, and what happens when something fails."""

import ast
import inspect
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

import eagle_triton
from eagle_triton.engine import skipped_features
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.tree_spec import PLAIN
from eagle_triton.families import own_ea_model as native
from eagle_triton.runtime import compile_ahead
from eagle_triton.runtime import launch as launching
from eagle_triton.runtime.compile_ahead import compiled_ahead
from eagle_triton.runtime.fallback import KernelError, triton_version
from eagle_triton.runtime.launch import launch, launch_key
from tests.tiny import random_prompt, tiny_model

needs_async_compilation = pytest.mark.skipif(triton_version() < (3, 6), reason="needs Triton 3.6")
PACKAGE = Path(eagle_triton.__file__).parent


class Kernel:
    """Stands in for a JITFunction: counts what is launched, and compiles by `compile`."""

    fn = SimpleNamespace(__name__="twice_kernel", __module__="doubling")

    def __init__(self, compile=lambda: None):
        self.compile, self.begun, self.compiled = compile, 0, 0
        self.launched, self.futures, self.dropped = [], [], []

    def __getitem__(self, grid):
        return lambda *args, **options: self.launched.append(args)

    def warmup(self, *args, grid, **options):
        from triton.runtime._async_compile import active_mode

        def compile():
            self.begun += 1
            self.compile()
            return SimpleNamespace(run=None)

        if active_mode.get() is None:
            return compile()
        submit = active_mode.get().submit
        after_failure = [self.dropped.append] if "cleanup_fn" in inspect.signature(submit).parameters else []  # 3.9
        self.futures.append(submit((self, args), compile, self._finished, *after_failure))

    def _finished(self, compiled):
        self.compiled += 1


@pytest.fixture
def driver(monkeypatch):
    """Triton's, of which the threads learn the device that they compile for."""
    devices = []
    active = SimpleNamespace(get_current_device=lambda: 3, set_current_device=devices.append)
    monkeypatch.setattr(compile_ahead, "driver", SimpleNamespace(active=active))
    return devices


@needs_async_compilation
def test_variants_compile_at_the_same_time_once_each_and_nothing_is_launched(driver, monkeypatch):
    monkeypatch.setattr(compile_ahead, "_workers", lambda: 2)
    meeting = threading.Barrier(2, timeout=20)
    kernel = Kernel(meeting.wait)
    x = torch.zeros(64, dtype=torch.bfloat16)
    with compiled_ahead():
        for tensor in (x, x[8:], x.clone(), x[1:]):  # two variants: x[1:] is not aligned
            assert launch(kernel, (1,))(tensor, 5, BLOCK=16) is None
        elsewhere = threading.Thread(target=lambda: launch(kernel, (1,))("another thread"))
        elsewhere.start()
        elsewhere.join()
    assert kernel.compiled == 2 and not meeting.broken
    assert kernel.launched == [("another thread",)]
    assert set(driver) == {3}
    launch(kernel, (1,))(x)
    assert kernel.launched[1:] == [(x,)]


@needs_async_compilation
def test_a_kernel_that_does_not_compile_is_named_and_no_dry_pass_comes_by_it_again(driver, monkeypatch):
    def fail():
        raise RuntimeError("ptxas")

    monkeypatch.setattr(launching, "_failed", {})
    broken, sound = Kernel(fail), Kernel()
    with compiled_ahead() as failed:
        launch(broken, (1,))()
        launch(sound, (1,))()
    assert (broken.compiled, sound.compiled) == (0, 1)
    (error,) = failed
    assert "twice_kernel of doubling does not compile with Triton" in str(error) and "ptxas" in str(error)
    with pytest.raises(KernelError, match="ptxas"), compiled_ahead():
        launch(broken, (1,))()


@pytest.mark.parametrize("compiles", [True, False])
def test_a_launch_tells_what_does_not_compile_from_what_fails(compiles, monkeypatch):
    class Failing(Kernel):
        def __getitem__(self, grid):
            def start(*args, **options):
                raise RuntimeError("an illegal memory access")

            return start

        def warmup(self, *args, grid, **options):
            if not compiles:
                raise ValueError("no such operation")
            return SimpleNamespace(run=None)

    monkeypatch.setattr(launching, "_failed", {})
    with pytest.raises(RuntimeError, match="illegal" if compiles else "ValueError: no such operation") as raised:
        launch(Failing(), (1,))()
    assert isinstance(raised.value, KernelError) != compiles


@needs_async_compilation
@pytest.mark.parametrize("when", ["asking", "waiting"])
def test_an_interrupt_waits_for_what_has_begun_only(driver, monkeypatch, when):
    """What was left out compiles when it is launched: Triton keeps the futures in its cache, or from 3.9 on drops those
    that were cancelled."""
    monkeypatch.setattr(compile_ahead, "_workers", lambda: 1)
    begun, kernel = threading.Event(), Kernel()

    def compile():
        if not begun.is_set():
            begun.set()
            threading.Event().wait(0.3)

    kernel.compile = compile

    def interrupt(*args, **options):
        begun.wait(20)
        raise KeyboardInterrupt

    if when == "waiting":
        monkeypatch.setattr("triton.runtime._async_compile.as_completed", interrupt)
    last = Kernel()
    if when == "asking":
        last.warmup = interrupt
    with pytest.raises(KeyboardInterrupt), compiled_ahead():
        for number in range(10):
            launch(kernel, (1,))(number)
        launch(last, (1,))()
    assert kernel.begun == 1
    kept = [future for future in kernel.futures if future not in kernel.dropped]
    assert [future.result() for future in kept] and kernel.begun + len(kernel.dropped) == 10


@needs_async_compilation
@pytest.mark.parametrize("where", ["in the block", "while compiling"])
def test_an_interrupt_leaves_nothing_behind(driver, where):
    kernel, stopped, interrupt = Kernel(), Kernel(), Mock(side_effect=KeyboardInterrupt)
    if where == "while compiling":
        stopped.warmup = interrupt
    with pytest.raises(KeyboardInterrupt), compiled_ahead():
        launch(stopped, (1,))()
        if where == "in the block":
            interrupt()
    with compiled_ahead():
        launch(kernel, (1,))()
    assert kernel.compiled == 1 and not stopped.compiled


def test_new_tensors_are_zeros_where_kernels_do_not_run(monkeypatch):
    monkeypatch.setattr(compile_ahead, "_compile", lambda launches: None)

    def new() -> list[torch.Tensor]:
        x = torch.ones(3)
        tensors = [torch.empty(3), torch.empty_like(x), x.new_empty(3), torch.empty_strided((3,), (1,))]
        return [tensor for tensor in tensors if tensor.any()]

    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    try:
        with compiled_ahead():
            assert not new()
        assert len(new()) == 4
    finally:
        torch.use_deterministic_algorithms(False)


def test_every_kernel_is_launched_by_launch():
    direct = [
        f"{path.name}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and "kernel" in ast.unparse(node.func.value)
    ]
    assert not direct


RULES = SamplingParams(repetition_penalty=1.5, logit_bias={0: -math.inf})
WAYS = {  # how the first requests are sampled, whether the first tree drafts, and the later ones
    "rules": (RULES, True, True),
    "plain": (RULES, False, False),
    "drafts rest": (SamplingParams(), True, False),
}


def model():
    return tiny_model(eagle3=False, vocab=8, layers=1, total_token=3, depth=1, top_k=2)


@pytest.fixture
def watched(monkeypatch):
    """What dry passes record, what is launched, and how much each pass has recorded."""
    recorded, launched, passes = set(), set(), []

    def run(self, *args, grid, warmup, original=InterpretedFunction.run, **options):
        launched.add(launch_key(self, args, options))
        return original(self, *args, grid=grid, warmup=warmup, **options)

    def compile(launches):
        recorded.update(launch_key(kernel, args, options) for kernel, _, args, options in launches)
        passes.append(len(launches))

    monkeypatch.setattr(InterpretedFunction, "run", run)
    monkeypatch.setattr(compile_ahead, "_compile", compile)
    return recorded, launched, passes


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="watches launches in the interpreter")
@pytest.mark.parametrize("way", WAYS)
def test_a_dry_pass_records_what_a_batch_launches_and_changes_nothing(way, watched, monkeypatch):
    sampling, drafts, drafts_later = WAYS[way]
    recorded, launched, passes = watched
    results = []
    prompts = [random_prompt(length, vocab=7)[0] + 1 for length in (6, 3)]  # without 0, what new tensors hold
    for ahead in (False, True):
        monkeypatch.setattr(compile_ahead, "can_compile_ahead", lambda device, ahead=ahead: ahead)
        engine = Engine(*native.read(model()), make_operations(kernels=True))
        torch.manual_seed(1)
        with Batch(engine, 2, engine.draft.read_tree() if drafts else PLAIN, 40, logprobs=True) as batch:
            batch.admit_all(Request(prompt, 9, sampling) for prompt in prompts)
            steps = [batch.step()]
            if ahead:
                assert recorded and recorded >= launched
            batch.spec = engine.draft.read_tree() if drafts_later else PLAIN
            steps.append(batch.step())
            batch.release(1)
            before = len(passes)
            batch.admit(Request(prompts[0], 9, SamplingParams(temperature=0.9)))  # another mode while the other goes on
            anew = ahead and drafts and not drafts_later  # what catches up, over tensors that were replaced
            assert len(passes) == before + ahead + anew
            batch.spec = engine.draft.read_tree() if drafts else PLAIN
            steps += [batch.step(), batch.step()]
        told = [[(row.slot, row.tokens, row.logprobs) for row in step] for step in steps]
        rules = batch.sequences.rules
        seen = [] if rules is None else rules.seen.tolist()
        results.append((told, seen, engine.ops.calls, torch.rand(1)))
        launched.clear()
    assert results[0] == results[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="watches launches in the interpreter")
def test_what_catches_up_behind_plain_steps_is_compiled_when_these_begin(watched, monkeypatch):
    recorded, launched, _ = watched
    tokens = []
    monkeypatch.setattr(skipped_features, "ROWS", 3)
    for ahead in (False, True):
        monkeypatch.setattr(compile_ahead, "can_compile_ahead", lambda device, ahead=ahead: ahead)
        engine = Engine(*native.read(model()), make_operations(kernels=True))
        with Batch(engine, 1, PLAIN, 60) as batch:
            batch.admit(Request(random_prompt(6, vocab=7)[0] + 1, 20))
            batch.step()
            known, behind = set(recorded), set(launched)
            for _ in range(skipped_features.ROWS + 1):
                batch.step()
            assert launched > behind, "nothing was caught up with"
            assert known >= launched or not ahead
            batch.spec = engine.draft.read_tree()
            for _ in range(3):  # one plain step is caught up with here
                batch.step()
            assert recorded >= launched or not ahead
            tokens.append(batch.tokens(0).tolist())
        launched.clear()
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_dry_pass_that_fails_is_said_and_leaves_the_engine_usable(error, device, monkeypatch, caplog):
    def fail(launches):
        raise error("no compiler")

    monkeypatch.setattr(compile_ahead, "can_compile_ahead", lambda device: True)
    monkeypatch.setattr(compile_ahead, "_compile", fail)
    engine = Engine(*native.read(model().to(device)), make_operations(kernels=True))
    prompt = random_prompt(6, vocab=8)[0]
    with Batch(engine, 1, PLAIN, 40) as batch:
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                batch.admit(Request(prompt, 9))
            assert not engine.ops.calls and batch.free
            monkeypatch.setattr(compile_ahead, "_compile", lambda launches: None)
        batch.admit(Request(prompt, 9))
        assert batch.tokens(0).tolist() == prompt.tolist()
    assert engine.ops.calls["linear"]
    assert ("compiling them ahead failed: no compiler" in caplog.text) == (error is ValueError)
    assert ("no compiler" in engine.notes.get("compile_ahead", "")) == (error is ValueError)


@pytest.mark.parametrize(("message", "attempts"), [("AST constructor recursion depth mismatch", 3), ("other", 1)])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_parser_that_trips_over_threads_is_asked_again(message, attempts, wrapped):
    """Triton wraps what fails in a function that a kernel calls."""
    calls = []

    def build() -> str:
        calls.append(None)
        if len(calls) == 3:
            return "kernel"
        try:
            raise SystemError(message)
        except SystemError as error:
            if wrapped:
                raise ValueError("at 18:4") from error
            raise

    if attempts == 1:
        with pytest.raises(ValueError if wrapped else SystemError):
            compile_ahead._built(build)
    else:
        assert compile_ahead._built(build) == "kernel"
    assert len(calls) == attempts


def test_an_interrupted_change_of_tree_changes_nothing(device, monkeypatch):
    monkeypatch.setattr(compile_ahead, "_compile", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(compile_ahead, "can_compile_ahead", lambda device: False)  # a GPU could from the start
    ends = []
    for interrupted in (False, True):
        engine = Engine(*native.read(model().to(device)), make_operations(kernels=True))
        spec = engine.draft.read_tree()
        with Batch(engine, 1, spec, 40) as batch:
            batch.admit(Request(random_prompt(6, vocab=8)[0], 9))
            batch.step()
            if interrupted:
                batch.spec = PLAIN
                monkeypatch.setattr(compile_ahead, "can_compile_ahead", lambda device: True)
                with pytest.raises(KeyboardInterrupt):
                    batch.launch()
                monkeypatch.setattr(compile_ahead, "can_compile_ahead", lambda device: False)
                batch.spec = spec
            batch.step()
            assert batch.state.spec == spec and batch.planner.plain_steps is None
            ends.append(batch.tokens(0).tolist())
    assert ends[0] == ends[1]


@pytest.mark.slow
@needs_async_compilation
def test_nothing_is_compiled_after_the_dry_pass(tmp_path):
    """First with a Gluon that has lost an operation: portable kernels run instead, are compiled ahead as well, and then
    lie there for the run in which Gluon is whole."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "decode_without_gpu.py"
    command = [sys.executable, str(script), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr


LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""


@needs_async_compilation
@pytest.mark.skipif(
    not (shutil.which("gcc") and Path(sysconfig.get_paths()["include"], "Python.h").exists()),
    reason="needs a C compiler and Python's headers",
)
def test_a_launcher_that_is_loaded_again_leaves_the_others_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    build = compile_ahead.launchers
    with compile_ahead._own_launchers():
        first, second = (build.compile_module_from_src(LAUNCHER % n, "__triton_launcher") for n in (1, 2))
        build.compile_module_from_src(LAUNCHER % 1, "__triton_launcher")
    assert (first.launch(), second.launch()) == (1, 2)


@needs_async_compilation
def test_how_triton_loads_launchers_is_given_back(driver):
    load = compile_ahead.launchers._load_module_from_path
    kernel = Kernel(lambda: seen.append(compile_ahead.launchers._load_module_from_path))
    seen = []
    with compiled_ahead():
        launch(kernel, (1,))(1)
    assert seen and seen[0] is not load
    assert compile_ahead.launchers._load_module_from_path is load
