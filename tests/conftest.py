"""Shared by all tests: without a GPU, kernels run in Triton's interpreter, which must be chosen before its import."""

import gc
import os
import signal
from typing import Any

# No test needs the hub. Where it cannot be reached, each question to it would wait for seconds.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from tests import faster_interpreter

# What a shell runs in the background ignores Ctrl+C, and so does what it starts: tests that interrupt could not.
signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.get("TRITON_INTERPRET") == "1":
    faster_interpreter.install()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays, so no later search for garbage has to look at it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # else extension modules say at the end that objects of theirs were lost


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engines of models that are optimised in a test, in turn."""
    from eagle_triton import assembly

    made, engine = [], assembly.Engine

    def make(*arguments: Any, **options: Any) -> Any:
        made.append(engine(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(assembly, "Engine", make)
    return made


@pytest.fixture
def device() -> str:
    """Where kernels run: "cuda", or "cpu" through the interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"
