"""Clocks and power beside replayed steps: what is sampled when, what a row says of it, and why a figure is missing.

`Nvml` stands in for nvidia-ml-py's module: ctypes structures, NVMLError by return code, a value for each moment. Where
nvidia-ml-py is installed, the library below its real module is stood in for as well.
"""

import contextlib
import ctypes
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from eagle_triton.benchmarks import gpu_clocks, step
from eagle_triton.benchmarks import main as benchmark
from eagle_triton.benchmarks.gpu_clocks import FIGURES, TOO_SHORT, GpuClocks
from eagle_triton.text_table import table_of

CUDA = torch.device("cuda", 0)
OURS, OTHER = "c0ffee00-0000-0000-0000-000000000001", "c0ffee00-0000-0000-0000-000000000002"
BUSY, IDLE = (1500, 700_000, 0x4), (345, 80_000, 0x1)  # MHz, mW, reasons: the power cap, and that it is idle
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


class Value(ctypes.Union):
    _fields_ = [
        *(("dVal", ctypes.c_double), ("uiVal", ctypes.c_uint), ("ulVal", ctypes.c_ulong)),
        *(("ullVal", ctypes.c_ulonglong), ("sllVal", ctypes.c_longlong), ("siVal", ctypes.c_int)),
        ("usVal", ctypes.c_ushort),
    ]


class FieldValue(ctypes.Structure):
    _fields_ = [
        *(("fieldId", ctypes.c_uint32), ("scopeId", ctypes.c_uint32), ("timestamp", ctypes.c_int64)),
        *(("latencyUsec", ctypes.c_int64), ("valueType", ctypes.c_uint), ("nvmlReturn", ctypes.c_uint)),
        ("value", Value),
    ]


class NVMLError(Exception):
    def __new__(cls, value):
        error = Exception.__new__(cls)
        error.value = value
        return error

    def __str__(self):
        return WORDS[self.value]

    def __eq__(self, other):  # as the real one: without a hash
        return self.value == other.value


class Nvml(ModuleType):
    """`at(ms)` are the device's MHz, mW and reasons; `codes` what calls return instead of an answer."""

    NVML_SUCCESS, NVML_CLOCK_SM, NVML_FI_DEV_POWER_INSTANT = 0, 1, 186
    nvmlClocksEventReasonSwPowerCap = 0x4
    NVMLError = NVMLError

    def __init__(self, clock, at=lambda now: BUSY):
        super().__init__("pynvml")
        self.clock, self.at, self.codes, self.calls = clock, at, {}, []
        self.gpus, self.value_type, self.ready = (OTHER, OURS), 1, False

    def _call(self, name, gpu=None):
        self.calls.append(name)
        if self.codes.get(name):
            raise NVMLError(self.codes[name])
        assert name == "nvmlInit" or self.ready
        assert gpu is None or gpu == f"handle of {OURS}"
        now, self.clock.now = self.clock.now, self.clock.now + 0.1
        return self.at(now)

    def nvmlInit(self):
        self._call("nvmlInit")
        self.ready = True

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self._call("nvmlDeviceGetHandleByUUID")
        if uuid not in {f"GPU-{gpu}" for gpu in self.gpus}:
            raise NVMLError(NOT_FOUND)
        return f"handle of {uuid[4:]}"

    def nvmlDeviceGetClockInfo(self, gpu, kind):
        assert kind == self.NVML_CLOCK_SM
        return self._call("clock", gpu)[0]

    def nvmlDeviceGetFieldValues(self, gpu, fields):
        values = (FieldValue * len(fields))()
        milliwatts = self._call("fields", gpu)[1]
        for value, field in zip(values, fields, strict=True):
            value.fieldId, value.nvmlReturn = field, self.codes.get(field, 0)
            if not value.nvmlReturn and field == self.NVML_FI_DEV_POWER_INSTANT:
                value.valueType = self.value_type
                members = [name for name, _ in Value._fields_]
                if self.value_type < len(members):
                    ctypes.memset(ctypes.byref(value.value), 0xFF, ctypes.sizeof(Value))  # what others would read
                    setattr(value.value, members[self.value_type], milliwatts)
        return values

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu):
        return self._call("reasons", gpu)[2]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(gpu_clocks, "time", clock)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=OURS))
    return clock


@pytest.fixture
def nvml(clock, monkeypatch):
    nvml = Nvml(clock)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


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
        (Nvml.NVML_FI_DEV_POWER_INSTANT, "power_w", NOT_SUPPORTED),
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
    nvml.codes[Nvml.NVML_FI_DEV_POWER_INSTANT] = NOT_SUPPORTED
    clocks = GpuClocks(CUDA)
    assert sampled(clocks, clock, length=0) == dict.fromkeys(FIGURES)
    assert sampled(clocks, clock)["sm_clock_mhz"] == 1500
    (note,) = clocks.notes()
    assert f"no {', '.join(FIGURES)} in 1 of 2 rows, {TOO_SHORT}" in note
    assert "no power_w in 1 of 2 rows, NVML: Not Supported" in note


class Old(Nvml):
    def __getattribute__(self, name):
        if name == "nvmlDeviceGetCurrentClocksEventReasons":
            raise AttributeError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("library", "change", "note"),
    [
        (None, {}, 'nvidia-ml-py is not installed (pip install ".[benchmark]" in'),
        (Old, {}, "nvidia-ml-py is too old and has no nvmlDeviceGetCurrentClocksEventReasons (pip install "),
        (Nvml, {"codes": {"nvmlInit": DRIVER}}, "NVML: Driver Not Loaded"),
        (Nvml, {"gpus": (OTHER,)}, f"NVML has no GPU-{OURS}: Not Found"),
    ],
    ids=["none", "old", "driver", "device"],
)
def test_why_nothing_is_read_is_said_and_nothing_waits(library, change, note, clock, monkeypatch):
    nvml = library and library(clock)
    for name, value in change.items():
        setattr(nvml, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
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


# --- over the real bindings, where they are installed


class Library:
    """libnvidia-ml's part of what is called: each answers through a pointer and returns a code."""

    def nvmlInitWithFlags(self, flags):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        return 0 if uuid.value == f"GPU-{OURS}".encode() else NOT_FOUND

    def nvmlDeviceGetClockInfo(self, handle, kind, clock):
        clock._obj.value = 1545
        return 0 if kind.value == 1 else NOT_SUPPORTED

    def nvmlDeviceGetFieldValues(self, handle, count, values):
        (value,) = values._obj
        assert (count.value, value.fieldId, value.scopeId) == (1, 186, 0)
        value.valueType, value.value.uiVal, value.nvmlReturn = 1, 730_400, self.power
        return 0

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle, reasons):
        reasons._obj.value = 0x24
        return 0


@pytest.fixture
def library(clock, monkeypatch):
    pynvml = pytest.importorskip("pynvml")
    library = Library()
    library.power = 0
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return library


def test_the_real_bindings_are_called_as_they_want_it(library, clock):
    clocks = GpuClocks(CUDA)
    assert sampled(clocks, clock) == {"sm_clock_mhz": 1545, "power_w": 730.4, "power_capped_share": 1}
    assert clocks.notes() == []
    library.power = NOT_SUPPORTED
    assert sampled(clocks, clock)["power_w"] is None
    assert clocks.notes() == ["clocks and power: no power_w in 1 of 2 rows, NVML: Not Supported"]


def test_the_stand_in_is_as_the_real_bindings(library):
    import pynvml

    names = [name for name in vars(Nvml) if name.startswith(("NVML_", "nvmlClocks"))]
    assert {name: getattr(Nvml, name) for name in names} == {name: getattr(pynvml, name) for name in names}
    assert all(callable(getattr(pynvml, name)) for name in vars(Nvml) if name.startswith("nvmlDevice"))
    for ours, theirs in ((Value, pynvml.c_nvmlValue_t), (FieldValue, pynvml.c_nvmlFieldValue_t)):
        for name, _ in theirs._fields_:  # of which older ones have fewer
            member, same = getattr(ours, name), getattr(theirs, name)
            assert (member.offset, member.size) == (same.offset, same.size), name
    assert [str(pynvml.NVMLError(code)) for code in WORDS] == list(WORDS.values())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_that_works_says_its_clock_and_power():
    pytest.importorskip("pynvml")
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
