"""A GPU's SM clock and power while it works, and whether its power cap lowers the clock; read by NVML."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

INTERVAL = 0.005  # seconds between two samples
INSTALL = 'pip install ".[benchmark]" in a clone of this repository'
NEEDED = ("NVML_FI_DEV_POWER_INSTANT", "nvmlDeviceGetCurrentClocksEventReasons", "nvmlClocksEventReasonSwPowerCap")
MEMBERS = dict(enumerate(("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")))  # by nvmlValueType_t
TOO_SHORT = "the replayed steps were over before a sample was taken"


def find_gpu(device: torch.device) -> tuple[Any, Any]:
    """The module of nvidia-ml-py and its handle of a CUDA device. Raises ValueError that says what is missing."""
    try:
        import pynvml  # only who times steps on a GPU needs it
    except ImportError as error:
        raise ValueError(f"nvidia-ml-py is not installed ({INSTALL})") from error
    if missing := [name for name in NEEDED if not hasattr(pynvml, name)]:
        raise ValueError(f"nvidia-ml-py is too old and has no {missing[0]} ({INSTALL})")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise ValueError(f"NVML: {error}") from error
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # not the index: CUDA_VISIBLE_DEVICES changes it
    try:
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError as error:
        raise ValueError(f"NVML has no {uuid}: {error}") from error


def read_power(nvml: Any, gpu: Any) -> float:
    """The power of the device at this moment, in W. torch.cuda.power_draw gives an average over a second."""
    (field,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_POWER_INSTANT])
    if field.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(field.nvmlReturn)
    member = MEMBERS.get(field.valueType, "")
    if not hasattr(field.value, member):
        raise ValueError(f"the power is of the unknown value type {field.valueType}")
    return getattr(field.value, member) / 1000  # of mW


def read_power_capped(nvml: Any, gpu: Any) -> float:
    """1 if the power cap by software is among the reasons of the clock, else 0."""
    return float(bool(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) & nvml.nvmlClocksEventReasonSwPowerCap))


FIGURES: dict[str, tuple[Callable[[Any, Any], float], Callable[[Sequence[float]], float]]] = {  # read, and combine
    "sm_clock_mhz": (lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM), statistics.median),
    "power_w": (read_power, statistics.median),
    "power_capped_share": (read_power_capped, statistics.fmean),
}


class GpuClocks:
    """Samples of a device's clock and power, for rows of figures. A CPU has none, without a note."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._gpu: Any = None
        self._unread: str | None = None  # why nothing can be read
        self._samples: dict[str, list[float]] = {name: [] for name in FIGURES}  # of this row, as the failures
        self._failures: dict[str, str] = {}
        self._rows = 0
        self._missing: Counter[tuple[str, str]] = Counter()  # rows without a figure, by reason and figure
        if device.type == "cuda":
            try:
                self._nvml, self._gpu = find_gpu(device)
            except ValueError as error:
                self._unread = str(error)

    def sample(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Wait for `end`, and sample every 5 ms from when `start` is done until then.

        Both must be recorded, and everything between them launched, so that the device does not wait for the host.
        Returns at once where nothing can be read.
        """
        while self._gpu is not None and not end.query():
            if start.query():
                values, failures = {}, {}
                for name, (read, _) in FIGURES.items():
                    try:
                        values[name] = read(self._nvml, self._gpu)
                    except (self._nvml.NVMLError, ValueError) as error:
                        failures[name] = f"NVML: {error}"
                if end.query():  # the device may have been idle by then
                    return
                for name, value in values.items():
                    self._samples[name].append(value)
                self._failures |= failures
            time.sleep(INTERVAL)

    def figures(self) -> dict[str, float | None]:
        """The figures of a row, from all samples since the last call.

        sm_clock_mhz: the median SM clock in MHz; power_w: the median power in W; power_capped_share: the share of the
        samples, 0 to 1, in which the power cap by software was among the reasons of the clock. None is what was not
        read, or not in every sample.
        """
        row: dict[str, float | None] = {}
        for name, (_, combine) in FIGURES.items():
            reason = self._failures.get(name, "" if self._samples[name] else TOO_SHORT)
            row[name] = None if reason else combine(self._samples[name])
            if reason:
                self._missing[reason, name] += 1
        self._rows += 1
        self._samples, self._failures = {name: [] for name in FIGURES}, {}
        return row

    def notes(self) -> list[str]:
        """One note that says which figures are None in how many rows and why; no note where all are there."""
        if self._unread is not None:
            return [f"clocks and power: not read, {self._unread}"]
        if self._gpu is None or not self._missing:
            return []
        names: dict[tuple[str, int], list[str]] = {}
        for (reason, name), rows in self._missing.items():
            names.setdefault((reason, rows), []).append(name)
        said = (f"no {', '.join(of)} in {rows} of {self._rows} rows, {why}" for (why, rows), of in names.items())
        return [f"clocks and power: {'; '.join(said)}"]
