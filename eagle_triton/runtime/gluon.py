"""Kernels in Gluon, Triton's lower language, which not every Triton compiles."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import triton

from eagle_triton.runtime.overlap import triton_version

log = logging.getLogger(__name__)


def gluon_module(name: str) -> Any:
    """The module of this name, whose kernels take Gluon, or None with a Triton before 3.6, whose Gluon does not compile
    them, or without Gluon."""
    if triton_version() < (3, 6):
        log.warning("%s is not used: that takes Triton 3.6, this is %s", name, triton.__version__)
        return None
    try:
        return importlib.import_module(name)
    except ImportError as error:
        log.warning("%s is not used: %s", name, error)
        return None
