"""Reads a GPU's SM clock and power while it works, and whether its power cap lowers the clock, through NVML."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

INTERVAL = 0.005  # seconds between two samples
INSTALL = 'pip install ".[benchmark]" in a clone of this repository'
MEMBERS = dict(enumerate(("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")))  # by nvmlValueType_t
TOO_SHORT = "the replayed steps ended before a sample was taken"


def find_gpu(device: torch.device) -> tuple[Any, Any]:
    """The module of nvidia-ml-py and its handle of a CUDA device. Raises ValueError if something is missing."""
    try:
        import pynvml  # needed only to time steps on a GPU
    except ImportError as error:
        raise ValueError(f"nvidia-ml-py is not installed ({INSTALL})") from error
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # not the index: CUDA_VISIBLE_DEVICES changes it
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError as error:
        raise ValueError(f"NVML, asked for {uuid}: {error}") from error


def read_clock(nvml: Any, gpu: Any) -> float:
    """The SM clock, in MHz."""
    return nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)


def read_power(nvml: Any, gpu: Any) -> float:
    """The power of the device at this moment, in W. torch.cuda.power_draw gives an average over a second."""
    (field,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_POWER_INSTANT])
    if field.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(field.nvmlReturn)
    member = MEMBERS.get(field.valueType, "")
    if not hasattr(field.value, member):
        raise ValueError(f"the power has the value type {field.valueType}, which is not known here")
    return getattr(field.value, member) / 1000  # of mW


def read_power_capped(nvml: Any, gpu: Any) -> float:
    """1 if the software power cap is among the reasons of the clock, else 0."""
    return float(bool(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) & nvml.nvmlClocksEventReasonSwPowerCap))


FIGURES: dict[str, tuple[Callable[[Any, Any], float], Callable[[Sequence[float]], float]]] = {  # read, and combine
    "sm_clock_mhz": (read_clock, statistics.median),
    "power_w": (read_power, statistics.median),
    "power_capped_share": (read_power_capped, statistics.fmean),
}


class GpuClocks:
    """Samples of a device's clock and power, for rows of figures. A CPU has none, without a note."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._gpu: Any = None
        self._samples: dict[str, list[float]] = {name: [] for name in FIGURES}  # of this row, like the failures
        self._failures: dict[str, str] = {}
        self._told: dict[str, None] = {}  # figures that were not read, and why
        if device.type == "cuda":
            try:
                self._nvml, self._gpu = find_gpu(device)
            except ValueError as error:
                self._told[f"not read, {error}"] = None

    def sample(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Wait for `end`, and sample every 5 ms from the completion of `start` until then.

        Both must be recorded, and everything between them launched, so that the device does not wait for the host.
        Returns at once if nothing can be read.
        """
        while self._gpu is not None and not end.query():
            if start.query():
                values = {}
                for name, (read, _) in FIGURES.items():
                    try:
                        values[name] = read(self._nvml, self._gpu)
                    except (self._nvml.NVMLError, ValueError, AttributeError) as error:  # an old module lacks names
                        self._failures[name] = f"NVML: {error}"
                if end.query():  # the device may have been idle by then
                    return
                for name, value in values.items():
                    self._samples[name].append(value)
            time.sleep(INTERVAL)

    def figures(self) -> dict[str, float | None]:
        """The figures of a row, from all samples since the last call.

        sm_clock_mhz: the median SM clock in MHz; power_w: the median power in W; power_capped_share: the share of the
        samples, 0 to 1, in which the software power cap was among the reasons of the clock. None: not read, or not in
        every sample.
        """
        row: dict[str, float | None] = {}
        for name, (_, combine) in FIGURES.items():
            reason = self._failures.get(name, "" if self._samples[name] else TOO_SHORT)
            row[name] = None if reason else combine(self._samples[name])
            if reason and self._gpu is not None:
                self._told[f"no {name} in some rows, {reason}"] = None
        self._samples, self._failures = {name: [] for name in FIGURES}, {}
        return row

    def notes(self) -> list[str]:
        """A note for each figure that is None in some row, with the reason."""
        return [f"clocks and power: {told}" for told in self._told]
