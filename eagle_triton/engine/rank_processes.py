"""The other ranks' processes, if visible from here, to notice during a wait that one has ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


def processes_beside(rank: int, all_gather_object: Callable[[Any], list[Any]]) -> dict[int, psutil.Process]:
    """The other ranks' processes in the same container of the same host.

    all_gather_object: gathers a picklable value from all ranks.
    """
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    here = (
        socket.gethostname(),
        boot.read_text() if boot.exists() else None,
        namespace.stat().st_ino if namespace.exists() else None,
    )
    found: dict[int, psutil.Process] = {}
    for other, (where, process) in enumerate(all_gather_object((here, os.getpid()))):
        if other != rank and where == here:
            with suppress(psutil.Error):  # it has just ended; a timeout will notice
                found[other] = psutil.Process(process)
    return found


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return not psutil.pid_exists(process.pid)  # access was denied
