"""Draws one picture per mode, with the machine's name below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle_triton.benchmarks.question_file import ALL
from eagle_triton.benchmarks.record import Record

Rows = Sequence[Mapping[str, Any]]


class Panel(NamedTuple):
    """A panel of rows: `y` over `x`, labelled `label`, as bars or lines, for each `series` of values.

    where: values that rows must have. same: keys that must have the first row's values. note: a key; its value is
    written at each point. floor: draw the floor too. log: x by powers of two.
    """

    y: str
    label: str
    x: tuple[str, ...] = ("variant",)
    series: tuple[str, ...] = ()
    where: Mapping[str, Any] = {}
    same: tuple[str, ...] = ()
    lines: bool = False
    note: str = ""
    floor: bool = False
    log: bool = False

    def of(self, rows: Rows) -> Rows:
        rows = [row for row in rows if self.y in row and all(row.get(key) == self.where[key] for key in self.where)]
        return [row for row in rows if all(row[key] == rows[0][key] for key in self.same)]


CASE, PART = ("batch", "context"), ("variant", "temperature")
MS, RATE = "ms per step", "tokens per second"
GAINS = {"tau": "tokens per step", "speedup": "times plain decoding"}
ENTERING = {"step_ms": "ms, step", "longest_gap_ms": "ms, longest gap while a prompt enters"}
PANELS = {
    "generate": [Panel("ms_per_step", MS, floor=True), Panel("tokens_per_second", RATE)],
    "step": [
        Panel("ms_per_step", MS, same=("decoding", *CASE), floor=True),
        Panel("ms_per_step", MS, ("context",), ("decoding", "batch"), {"variant": "optimised"}, lines=True),
    ],
    "batches": [
        Panel("tokens_per_second", RATE, ("batch",), ("variant",), same=("context",), lines=True, log=True),
        Panel("speedup", GAINS["speedup"], ("batch",), (), {"variant": "auto"}, ("context",), True, "nodes", log=True),
    ],
    "drafters": [Panel(key, GAINS[key], ("work",), ("variant",)) for key in GAINS],
    "egag": [Panel(key, GAINS[key], ("work",), ("variant",)) for key in GAINS],
    "questions": [
        *(Panel(key, GAINS[key], PART, where={"category": ALL}) for key in GAINS),
        Panel("rate", "share of steps that accepted up to there", ("place",), PART, lines=True),
    ],
    "prefill": [
        Panel("ms", "ms to the first tokens", CASE, where={"variant": "first token"}),
        *(Panel(key, ENTERING[key], CASE, where={"variant": "enter"}) for key in ENTERING),
    ],
    "plain": [Panel("ms_per_token", "ms per token, prefill and all", ("variant", "context"))],
    "mtp": [Panel("ms_per_step", MS, ("variant", *CASE))],
    "megakernel": [Panel("ms", "ms from the target's logits to the next tree", ("variant", *CASE), floor=True)],
    "serve": [
        Panel("median_ttft_ms", "ms to the first token, median"),
        Panel("median_tpot_ms", "ms per token after it, median"),
    ],
}


def plot(record: Record, path: Path) -> None:
    """Draw the record's figures into a PNG, SVG or PDF file."""
    from matplotlib.figure import Figure  # needed only for a picture

    rows, machine = record.rows, record.machine
    if not rows:
        return
    figure = Figure(figsize=(11, 5 + len(rows) / 12 * (record.mode == "operations")), layout="constrained")
    if record.mode == "operations":
        _operations(figure.subplots(), rows)
    else:
        panels = PANELS[record.mode]
        places = [
            {**row, "place": place, "rate": rate}
            for row in rows
            for place, rate in enumerate(row.get("synthetic_acceptance_rates", ()), 1)
            if row["category"] == ALL
        ]
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw(axes, panel, panel.of(places if panel.y == "rate" else rows))
    names = ("driver", "torch", "triton", "transformers", "commit", "date")
    caption = ", ".join([machine["device"], *(f"{name} {machine[name]}" for name in names if machine[name])])
    figure.supxlabel(caption, fontsize=7)
    if record.notes:
        figure.suptitle(record.notes[0], fontsize=8)
    kept_in = "Subject" if path.suffix.lower() == ".pdf" else "Description"
    figure.savefig(path, dpi=150, metadata={kept_in: caption})


def _draw(axes: Any, panel: Panel, rows: Rows) -> None:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(_name(panel.series, row, rows), []).append(row)
    if panel.lines:
        _draw_lines(axes, panel, groups)
    else:
        names = list(dict.fromkeys(_name(panel.x, row, rows) for row in rows))
        width = 0.8 / max(len(groups), 1)
        for number, (group, own) in enumerate(groups.items()):
            places = [names.index(_name(panel.x, row, rows)) + number * width for row in own]
            bars = axes.bar(places, [row[panel.y] or 0.0 for row in own], width, label=group)
            if not panel.series:
                axes.bar_label(bars, fmt="%.3g", fontsize=8)
        if panel.floor and rows:
            names.append("floor")
            axes.bar_label(axes.bar([len(names) - 1], [rows[0]["floor_ms"]], width), fmt="%.3g", fontsize=8)
        rotation = 90 if len(names) > 4 else 0
        axes.set_xticks([place + 0.4 - width / 2 for place in range(len(names))], names, rotation=rotation)
        axes.set_title(", ".join(str(rows[0][key]) for key in panel.same if rows), fontsize=9)
    axes.set(ylabel=panel.label, ylim=(0, None))
    if panel.series:
        axes.legend(fontsize=7)


def _draw_lines(axes: Any, panel: Panel, groups: Mapping[str, list[Mapping[str, Any]]]) -> None:
    (x,) = panel.x
    for group, own in groups.items():
        points = sorted(own, key=lambda row: row[x])
        axes.plot([row[x] for row in points], [row[panel.y] for row in points], marker="o", label=group)
        for row in points if panel.note else ():
            axes.annotate(f"{row[panel.note]} {panel.note}", (row[x], row[panel.y]), fontsize=7)
    axes.set_xlabel({"context": "tokens of context", "place": "place in the draft"}.get(x, x))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if panel.log:
        axes.set_xscale("log", base=2)


def _name(keys: Sequence[str], row: Mapping[str, Any], rows: Rows) -> str:
    """The values of the first key, and of other keys that differ between the rows; numbers with their keys."""
    told = [key for number, key in enumerate(keys) if not number or len({other.get(key) for other in rows}) > 1]
    return "\n".join(row[key] if isinstance(row.get(key), str) else f"{key} {row.get(key)}" for key in told)


def _operations(axes: Any, rows: Rows) -> None:
    names = list(dict.fromkeys(row["case"] for row in rows))
    for offset, ours, label in ((-0.2, False, "best of torch"), (0.2, True, "ours")):
        times = [
            min((row["us_median"] for row in rows if row["case"] == name and row["ours"] is ours), default=0.0)
            for name in names
        ]
        axes.barh([place + offset for place in range(len(names))], times, height=0.4, label=label)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("microseconds (median)")
    axes.legend(fontsize=8)
