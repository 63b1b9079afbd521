"""Clocks and power beside replayed steps: what is sampled when, what a row says of it, and why a figure is missing.

nvidia-ml-py's functions are replaced, with a value for each moment.
"""

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch

from eagle_triton.benchmarks import gpu_clocks, step
from eagle_triton.benchmarks.gpu_clocks import FIGURES, TOO_SHORT, GpuClocks
from eagle_triton.text_table import table_of
from tests.programs import recorded

pynvml = pytest.importorskip("pynvml", reason='pip install ".[benchmark]"')

CUDA = torch.device("cuda", 0)
UUID, HANDLE = "c0ffee00-0000-0000-0000-000000000001", "the handle of our device"
BUSY, IDLE = (1500, 700_000, 0x4), (345, 80_000, 0x1)  # MHz, mW, reasons: the power cap, and that it is idle
NOT_SUPPORTED, NOT_FOUND, DRIVER, UNKNOWN = 3, 6, 9, 999


class Device:
    """A device by NVML. Milliseconds pass as the host sleeps, and as NVML answers.

    `at(ms)` are its MHz, mW and reasons; `codes` what functions return instead of an answer; `value_type` is that of
    its power.
    """

    def __init__(self):
        self.now, self.at, self.codes, self.calls, self.value_type = 0.0, lambda now: BUSY, {}, [], 1

    def sleep(self, seconds):
        self.now += seconds * 1e3

    def event(self, at):
        return SimpleNamespace(query=lambda: self.now >= at)

    def answer(self, name, gpu=HANDLE):
        """The values of this moment, for a function that is called."""
        assert gpu == HANDLE
        self.calls.append(name)
        if self.codes.get(name):
            raise pynvml.NVMLError(self.codes[name])
        now, self.now = self.now, self.now + 0.1
        return self.at(now)

    def clock(self, gpu, kind):
        assert kind == pynvml.NVML_CLOCK_SM
        return self.answer("clock", gpu)[0]

    def power(self, gpu, fields):
        assert fields == [pynvml.NVML_FI_DEV_POWER_INSTANT]
        milliwatts, field = self.answer("fields", gpu)[1], pynvml.c_nvmlFieldValue_t()
        field.nvmlReturn, field.valueType = self.codes.get("power", 0), self.value_type
        if self.value_type < len(members := [name for name, _ in field.value._fields_]):
            setattr(field.value, members[self.value_type], milliwatts)
        return [field]

    def handle(self, uuid):
        self.answer("handle")
        return HANDLE if uuid == f"GPU-{UUID}" else None

    def sampled(self, clocks, length=40, wait=0):
        """The row of replayed steps that begin in `wait` ms and take `length`."""
        clocks.sample(self.event(self.now + wait), self.event(self.now + wait + length))
        return clocks.figures()


@pytest.fixture
def nvml(monkeypatch):
    device = Device()
    monkeypatch.setattr(gpu_clocks, "time", device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    for name, function in {
        "nvmlInit": lambda: device.answer("init"),
        "nvmlDeviceGetHandleByUUID": device.handle,
        "nvmlDeviceGetClockInfo": device.clock,
        "nvmlDeviceGetFieldValues": device.power,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: device.answer("reasons", gpu)[2],
    }.items():
        monkeypatch.setattr(pynvml, name, function)  # of functions that are there
    return device


def test_a_row_has_medians_in_mhz_and_watts_and_the_share_that_is_capped(nvml):
    nvml.at = lambda now: (*((1500, 700_000) if now < 20 else (1980, 550_500)), 0x24 if now < 10 else 0x21)
    clocks = GpuClocks(CUDA)
    row = nvml.sampled(clocks)
    assert clocks.notes() == [] and list(row) == list(FIGURES)
    assert row == {"sm_clock_mhz": 1740, "power_w": 625.25, "power_capped_share": 0.25}


def test_only_what_lies_between_the_events_counts(nvml):
    nvml.at = lambda now: BUSY if 12 <= now < 52 else IDLE
    clocks, end = GpuClocks(CUDA), nvml.now + 52
    row = nvml.sampled(clocks, wait=12)
    assert end <= nvml.now < end + 6  # it waits for the end, and no longer
    assert row == {"sm_clock_mhz": 1500, "power_w": 700, "power_capped_share": 1}
    assert 7 <= nvml.calls.count("clock") <= 9  # one for each 5 ms, and none before the start


def test_a_sample_during_which_the_device_ends_is_left_out(nvml):
    clocks = GpuClocks(CUDA)
    begin = nvml.now
    nvml.at = lambda now: BUSY if now < begin + 5 else IDLE
    row = nvml.sampled(clocks, length=5.45)  # the second is read from 5.3 to 5.6 ms
    assert nvml.calls.count("reasons") == 2
    assert row == {"sm_clock_mhz": 1500, "power_w": 700, "power_capped_share": 1}


def test_a_row_has_the_samples_of_all_its_repeats_and_of_no_other_row(nvml):
    clocks = GpuClocks(CUDA)
    for mhz in (1000, 1200):
        nvml.at = lambda now, mhz=mhz: (mhz, 100_000, 0)
        clocks.sample(nvml.event(nvml.now), nvml.event(nvml.now + 20))
    assert clocks.figures() == {"sm_clock_mhz": 1100, "power_w": 100, "power_capped_share": 0}
    nvml.at = lambda now: BUSY
    assert nvml.sampled(clocks)["sm_clock_mhz"] == 1500 and clocks.notes() == []


@pytest.mark.parametrize("value_type", range(8))
def test_power_is_read_by_the_type_that_nvml_gives_it(value_type, nvml):
    nvml.value_type, nvml.at = value_type, lambda now: (1500, 64_500, 0)  # which 16 bits hold
    clocks = GpuClocks(CUDA)
    assert nvml.sampled(clocks)["power_w"] == (64.5 if value_type < 7 else None)
    unknown = "clocks and power: no power_w in some rows, NVML: the power has the value type 7, which is not known here"
    assert clocks.notes() == [unknown] * (value_type == 7)


@pytest.mark.parametrize(
    ("call", "figure", "code"),
    [
        ("clock", "sm_clock_mhz", NOT_SUPPORTED),
        ("fields", "power_w", UNKNOWN),
        ("power", "power_w", NOT_SUPPORTED),
        ("reasons", "power_capped_share", UNKNOWN),
    ],
)
def test_a_figure_that_failed_in_one_sample_is_missing_in_this_row_alone_and_named(call, figure, code, nvml):
    clocks = GpuClocks(CUDA)

    def at(now):
        nvml.codes[call] = code if 10 < now < 20 else 0
        return BUSY

    nvml.at = at
    first, second = nvml.sampled(clocks), nvml.sampled(clocks)
    assert [name for name, value in first.items() if value is None] == [figure] and second[figure] is not None
    assert clocks.notes() == [f"clocks and power: no {figure} in some rows, NVML: {pynvml.NVMLError(code)}"]


def test_a_module_that_is_too_old_and_steps_that_are_over_at_once_are_named(nvml, monkeypatch):
    monkeypatch.delattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons")
    clocks = GpuClocks(CUDA)
    assert nvml.sampled(clocks, length=0) == dict.fromkeys(FIGURES)
    assert nvml.sampled(clocks)["power_capped_share"] is None
    *short, old = clocks.notes()
    assert short == [f"clocks and power: no {name} in some rows, {TOO_SHORT}" for name in FIGURES]
    assert "no power_capped_share" in old and old.endswith("no attribute 'nvmlDeviceGetCurrentClocksEventReasons'")


@pytest.mark.parametrize(("call", "code"), [("", 0), ("init", DRIVER), ("handle", NOT_FOUND)])
def test_why_nothing_is_read_is_said_and_nothing_waits(call, code, nvml, monkeypatch):
    nvml.codes[call] = code
    if not call:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    clocks, begin = GpuClocks(CUDA), nvml.now
    assert nvml.sampled(clocks) == dict.fromkeys(FIGURES) and nvml.now == begin
    why = f"NVML, asked for GPU-{UUID}: {pynvml.NVMLError(code)}" if call else "nvidia-ml-py is not installed (pip "
    (told,) = clocks.notes()
    assert told.startswith(f"clocks and power: not read, {why}")


def test_a_cpu_has_nothing_to_read_and_nothing_is_said(nvml):
    clocks = GpuClocks(torch.device("cpu"))
    assert nvml.sampled(clocks) == dict.fromkeys(FIGURES) and clocks.notes() == [] and nvml.calls == []


# --- beside replayed steps


def test_sampling_begins_when_all_steps_are_queued(monkeypatch):
    log, devices = [], []

    class Event:
        def __init__(self, enable_timing):
            self.name = f"event {sum(isinstance(entry, Event) for entry in log)}"
            log.append(self)

        def record(self):
            log.append("record")

        def elapsed_time(self, other):
            return 60.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: devices.append(device) or contextlib.nullcontext())
    batch = SimpleNamespace(launch=lambda: log.append("launch"), engine=SimpleNamespace(device=CUDA))
    clocks = SimpleNamespace(sample=lambda start, end: log.append((start, end)))
    assert step._replay_ms(batch, 4, clocks) == 20
    start, end, *rest = log
    assert rest == ["synchronize", "launch", "record", *["launch"] * 3, "record", (start, end), "synchronize"]
    assert devices == [CUDA]
    log.clear()
    assert step._replay_ms(batch, 4, None) == 20 and log[-1] == "synchronize"


def test_a_run_has_the_figures_in_its_rows_and_the_note(monkeypatch, capsys):
    class Clocks(GpuClocks):
        def __init__(self, device):
            super().__init__(device)
            self._told["not read, for a reason"] = None

    monkeypatch.setattr(step, "GpuClocks", Clocks)
    given = ["--shape", "tiny", "--device", "cpu", "--num-runs", "1", "--context", "9", "--decoding", "chain-3"]
    record = recorded(capsys, "step", *given)
    assert record["notes"].count("clocks and power: not read, for a reason") == 1
    assert [row[name] for row in record["rows"] for name in FIGURES] == [None] * 3


def test_the_table_has_columns_of_what_was_read():
    row = dict(variant="optimised", decoding="plain", batch=1, context=512, ms_per_step=4.0, floor_ms=3.0)
    row |= dict(floor_share=0.75, tau=1.0, tokens_per_second=250.0, first_token_ms=15.0)
    head, *_ = table_of(step.COLUMNS, [row | dict.fromkeys(FIGURES)]).splitlines()
    assert not {"MHz", "W", "capped"} & set(head.split())
    read = {"sm_clock_mhz": 1545.0, "power_w": 730.4, "power_capped_share": 0.984}
    head, first, second = table_of(step.COLUMNS, [row | read, row]).splitlines()
    assert {"MHz", "W", "capped"} <= set(head.split())
    assert {"1545", "730.4", "98%"} <= set(first.split()) and "98%" not in second
    head, first = table_of(step.COLUMNS, [row | read | {"power_w": None}]).splitlines()
    assert {"MHz", "capped"} <= set(head.split()) and "W" not in head.split()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_that_works_says_its_clock_and_power():
    clocks = GpuClocks(torch.device("cuda"))
    start, end = torch.cuda.Event(), torch.cuda.Event()
    start.record()
    torch.cuda._sleep(200_000_000)  # cycles: some 0.1 s
    end.record()
    clocks.sample(start, end)
    assert end.query()
    row = clocks.figures()
    if clocks.notes():
        pytest.skip(clocks.notes()[0])
    assert 100 < row["sm_clock_mhz"] < 5000 and 10 < row["power_w"] < 3000 and 0 <= row["power_capped_share"] <= 1
