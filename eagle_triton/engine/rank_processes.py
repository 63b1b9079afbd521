"""The other ranks' processes, as far as this one can see them: whoever waits for a rank looks whether it lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


def processes_beside(rank: int, all_gather_object: Callable[[Any], list[Any]]) -> dict[int, psutil.Process]:
    """The other ranks' processes that this one can look at: those of its host, and there of its container.

    all_gather_object: exchanges a value, which can be pickled, for those of all ranks.
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
            with suppress(psutil.Error):  # it has ended meanwhile, which is noticed as that of one elsewhere is
                found[other] = psutil.Process(process)
    return found


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is no more, or only waits for its parent to hear of its end."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return not psutil.pid_exists(process.pid)  # of a process that may not be looked at
