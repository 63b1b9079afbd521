"""Clocks and power beside replayed steps: what is sampled when, what a row says of it, and why a figure is missing.

`Library` stands in for NVIDIA's library below nvidia-ml-py, with a value for each moment.
"""

import contextlib
import ctypes
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from eagle_triton.benchmarks import gpu_clocks, step
from eagle_triton.benchmarks import main as benchmark
from eagle_triton.benchmarks.gpu_clocks import FIGURES, TOO_SHORT, GpuClocks
from eagle_triton.text_table import table_of

pynvml = pytest.importorskip("pynvml", reason='pip install ".[benchmark]"')

CUDA = torch.device("cuda", 0)
OURS, OTHER = "c0ffee00-0000-0000-0000-000000000001", "c0ffee00-0000-0000-0000-000000000002"
BUSY, IDLE = (1500, 700_000, 0x4), (345, 80_000, 0x1)  # MHz, mW, reasons: the power cap, and that it is idle
HANDLE, POWER = 5, 186  # of our device; the field of its power at this moment
NOT_SUPPORTED, NOT_FOUND, DRIVER, FUNCTION, UNKNOWN = 3, 6, 9, 13, 999
WORDS = {NOT_SUPPORTED: "Not Supported", NOT_FOUND: "Not Found", DRIVER: "Driver Not Loaded"}
WORDS |= {FUNCTION: "Function Not Found", UNKNOWN: "Unknown Error"}


class Clock:
    """Milliseconds that pass as the host sleeps, and as NVML answers."""

    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds * 1e3

    def event(self, at):
        return SimpleNamespace(query=lambda: self.now >= at)


class Library:
    """`at(ms)` are the device's MHz, mW and reasons; `codes` what calls return instead of an answer."""

    def __init__(self, clock, at=lambda now: BUSY):
        self.clock, self.at, self.codes, self.calls = clock, at, {}, []
        self.gpus, self.value_type, self.ready = (OTHER, OURS), 1, False

    def _call(self, name, gpu=None, write=lambda mhz, milliwatts, reasons: None):
        self.calls.append(name)
        if self.codes.get(name):
            return self.codes[name]
        assert name == "nvmlInit" or self.ready
        assert gpu is None or ctypes.cast(gpu, ctypes.c_void_p).value == HANDLE
        now, self.clock.now = self.clock.now, self.clock.now + 0.1
        write(*self.at(now))
        return 0

    def nvmlInitWithFlags(self, flags):
        code = self._call("nvmlInit")
        self.ready = not code
        return code

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        ctypes.memmove(handle, ctypes.byref(ctypes.c_void_p(HANDLE)), ctypes.sizeof(ctypes.c_void_p))
        known = uuid.value.decode() in {f"GPU-{gpu}" for gpu in self.gpus}
        return self._call("nvmlDeviceGetHandleByUUID") if known else NOT_FOUND

    def nvmlDeviceGetClockInfo(self, gpu, kind, clock):
        assert kind.value == pynvml.NVML_CLOCK_SM
        return self._call("clock", gpu, lambda mhz, *_: setattr(clock._obj, "value", mhz))

    def nvmlDeviceGetFieldValues(self, gpu, count, values):
        (field,) = values._obj
        assert (count.value, field.fieldId, field.scopeId) == (1, POWER, 0)

        def write(mhz, milliwatts, reasons):
            field.nvmlReturn, members = self.codes.get(POWER, 0), [name for name, _ in field.value._fields_]
            if not field.nvmlReturn:
                field.valueType = self.value_type
                if self.value_type < len(members):
                    ctypes.memset(ctypes.byref(field.value), 0xFF, ctypes.sizeof(field.value))  # what others would read
                    setattr(field.value, members[self.value_type], milliwatts)

        return self._call("fields", gpu, write)

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu, reasons):
        return self._call("reasons", gpu, lambda *values: setattr(reasons._obj, "value", values[2]))


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(gpu_clocks, "time", clock)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=OURS))
    return clock


@pytest.fixture
def nvml(clock, monkeypatch):
    library = Library(clock)
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return library


def sampled(clocks, clock, length=40, wait=0):
    """The row of replayed steps that begin in `wait` ms and take `length`."""
    clocks.sample(clock.event(clock.now + wait), clock.event(clock.now + wait + length))
    return clocks.figures()


def test_a_row_has_medians_in_mhz_and_watts_and_the_share_that_is_capped(nvml, clock):
    nvml.at = lambda now: (*((1500, 700_000) if now < 20 else (1980, 550_500)), 0x24 if now < 10 else 0x21)
    clocks = GpuClocks(CUDA)
    row = sampled(clocks, clock)
    assert clocks.notes() == [] and list(row) == list(FIGURES)
    assert row == {"sm_clock_mhz": 1740, "power_w": 625.25, "power_capped_share": 0.25}


def test_only_what_lies_between_the_events_counts(nvml, clock):
    nvml.at = lambda now: BUSY if 12 <= now < 52 else IDLE
    clocks, end = GpuClocks(CUDA), clock.now + 52
    row = sampled(clocks, clock, wait=12)
    assert end <= clock.now < end + 6  # it waits for the end, and no longer
    assert row == {"sm_clock_mhz": 1500, "power_w": 700, "power_capped_share": 1}
    assert 7 <= nvml.calls.count("clock") <= 9  # one for each 5 ms, and none before the start


def test_a_sample_during_which_the_device_ends_is_left_out(nvml, clock):
    clocks = GpuClocks(CUDA)
    begin = clock.now
    nvml.at = lambda now: BUSY if now < begin + 5 else IDLE
    row = sampled(clocks, clock, length=5.45)  # the second is read from 5.3 to 5.6 ms
    assert nvml.calls.count("reasons") == 2
    assert row == {"sm_clock_mhz": 1500, "power_w": 700, "power_capped_share": 1}


def test_a_row_has_the_samples_of_all_its_repeats_and_of_no_other_row(nvml, clock):
    clocks = GpuClocks(CUDA)
    for mhz in (1000, 1200):
        nvml.at = lambda now, mhz=mhz: (mhz, 100_000, 0)
        clocks.sample(clock.event(clock.now), clock.event(clock.now + 20))
    assert clocks.figures() == {"sm_clock_mhz": 1100, "power_w": 100, "power_capped_share": 0}
    nvml.at = lambda now: BUSY
    assert sampled(clocks, clock)["sm_clock_mhz"] == 1500 and clocks.notes() == []


@pytest.mark.parametrize("value_type", range(8))
def test_power_is_read_by_the_type_that_nvml_gives_it(value_type, nvml, clock):
    nvml.value_type, nvml.at = value_type, lambda now: (1500, 64_500, 0)  # which 16 bits hold
    clocks = GpuClocks(CUDA)
    assert sampled(clocks, clock)["power_w"] == (64.5 if value_type < 7 else None)
    unknown = "clocks and power: no power_w in 1 of 1 rows, NVML: the power is of the unknown value type 7"
    assert clocks.notes() == [unknown] * (value_type == 7)


@pytest.mark.parametrize(
    ("call", "figure", "code"),
    [
        ("clock", "sm_clock_mhz", NOT_SUPPORTED),
        ("fields", "power_w", UNKNOWN),
        (POWER, "power_w", NOT_SUPPORTED),
        ("reasons", "power_capped_share", FUNCTION),
    ],
)
def test_what_a_device_does_not_support_is_missing_and_named(call, figure, code, nvml, clock):
    nvml.codes[call] = code
    clocks = GpuClocks(CUDA)
    row = sampled(clocks, clock)
    assert [name for name, value in row.items() if value is None] == [figure]
    assert clocks.notes() == [f"clocks and power: no {figure} in 1 of 1 rows, NVML: {WORDS[code]}"]


def test_a_figure_that_failed_in_one_sample_is_missing_in_this_row_alone(nvml, clock):
    clocks = GpuClocks(CUDA)

    def at(now):
        nvml.codes["clock"] = UNKNOWN if 10 < now < 20 else 0
        return BUSY

    nvml.at = at
    first, second = sampled(clocks, clock), sampled(clocks, clock)
    assert first == {"sm_clock_mhz": None, "power_w": 700, "power_capped_share": 1}
    assert second["sm_clock_mhz"] == 1500
    assert clocks.notes() == ["clocks and power: no sm_clock_mhz in 1 of 2 rows, NVML: Unknown Error"]


def test_steps_that_are_over_at_once_have_no_figures_and_a_note(nvml, clock):
    nvml.codes[POWER] = NOT_SUPPORTED
    clocks = GpuClocks(CUDA)
    assert sampled(clocks, clock, length=0) == dict.fromkeys(FIGURES)
    assert sampled(clocks, clock)["sm_clock_mhz"] == 1500
    (note,) = clocks.notes()
    assert f"no {', '.join(FIGURES)} in 1 of 2 rows, {TOO_SHORT}" in note
    assert "no power_w in 1 of 2 rows, NVML: Not Supported" in note


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (None, 'nvidia-ml-py is not installed (pip install ".[benchmark]" in'),
        ("old", "nvidia-ml-py is too old and has no nvmlDeviceGetCurrentClocksEventReasons (pip install "),
        ({"codes": {"nvmlInit": DRIVER}}, "NVML: Driver Not Loaded"),
        ({"gpus": (OTHER,)}, f"NVML has no GPU-{OURS}: Not Found"),
    ],
    ids=["none", "old", "driver", "device"],
)
def test_why_nothing_is_read_is_said_and_nothing_waits(change, note, nvml, clock, monkeypatch):
    if change is None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif change == "old":
        monkeypatch.delattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons")
    else:
        vars(nvml).update(change)
    clocks, begin = GpuClocks(CUDA), clock.now
    assert sampled(clocks, clock) == dict.fromkeys(FIGURES) and clock.now == begin
    (told,) = clocks.notes()
    assert told.startswith(f"clocks and power: not read, {note}")


def test_a_cpu_has_nothing_to_read_and_nothing_is_said(nvml, clock):
    clocks = GpuClocks(torch.device("cpu"))
    assert sampled(clocks, clock) == dict.fromkeys(FIGURES) and clocks.notes() == [] and nvml.calls == []


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
            self._unread = "for a reason"

    monkeypatch.setattr(step, "GpuClocks", Clocks)
    given = ["--shape", "tiny", "--device", "cpu", "--num-runs", "1", "--context", "9", "--decoding", "chain-3"]
    assert benchmark.main(["step", *given, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
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
