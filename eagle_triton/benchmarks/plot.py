"""One picture per mode, the machine named below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle_triton.benchmarks.question_file import ALL
from eagle_triton.benchmarks.record import Record

Rows = Sequence[Mapping[str, Any]]


class Panel(NamedTuple):
    """What is drawn of rows: `y` over `x`, named `label`, as bars, or as a line for each `series` of values.

    where: values that rows must have. same: keys in which they must be as the first one. note: a key whose value stands
    beside each point. floor: draw the floor too. log: x by powers of two.
    """

    y: str
    label: str
    x: tuple[str, ...] = ("variant",)
    series: tuple[str, ...] | None = None
    where: Mapping[str, Any] = {}
    same: tuple[str, ...] = ()
    note: str = ""
    floor: bool = False
    log: bool = False

    def of(self, rows: Rows) -> Rows:
        rows = [row for row in rows if self.y in row and all(row.get(key) == self.where[key] for key in self.where)]
        return [row for row in rows if all(row[key] == rows[0][key] for key in self.same)]


CASE, TAU, SPEEDUP = ("batch", "context"), "tokens per step", "times plain decoding"
MS, RATE = "ms per step", "tokens per second"
PART = ("variant", "temperature")  # of a sweep over questions
PANELS = {
    "generate": [Panel("ms_per_step", MS, floor=True), Panel("tokens_per_second", RATE)],
    "step": [
        Panel("ms_per_step", MS, same=("decoding", *CASE), floor=True),
        Panel("ms_per_step", MS, ("context",), ("decoding", "batch"), {"variant": "optimised"}),
    ],
    "batches": [
        Panel("tokens_per_second", RATE, ("batch",), ("variant",), same=("context",), log=True),
        Panel("speedup", SPEEDUP, ("batch",), (), {"variant": "auto"}, ("context",), "nodes", log=True),
    ],
    "drafters": [Panel(key, label, ("work", "variant")) for key, label in (("tau", TAU), ("speedup", SPEEDUP))],
    "questions": [
        *(Panel(key, label, PART, where={"category": ALL}) for key, label in (("tau", TAU), ("speedup", SPEEDUP))),
        Panel("rate", "share of steps that accepted up to there", ("place",), PART),
    ],
    "prefill": [
        Panel("ms", "ms to the first tokens", CASE, where={"variant": "first token"}),
        *(Panel(key, f"ms, {label}", CASE, where={"variant": "enter"})
          for key, label in (("step_ms", "step"), ("longest_gap_ms", "longest gap while a prompt enters"))),
    ],
    "plain": [Panel("ms_per_token", "ms per token, prefill and all", ("variant", "context"))],
    "mtp": [Panel("ms_per_step", MS, ("variant", *CASE))],
    "megakernel": [Panel("ms", "ms from the target's logits to the next tree", ("variant", *CASE), floor=True)],
    "serve": [
        Panel("median_ttft_ms", "ms to the first token, median"),
        Panel("median_tpot_ms", "ms per token after it, median"),
    ],
}  # fmt: skip
PANELS["egag"] = PANELS["drafters"]


def plot(record: Record, path: Path) -> None:
    """Draw the record's figures into a PNG, SVG or PDF file."""
    from matplotlib.figure import Figure  # only who asks for a picture needs it

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
    axes.set(ylabel=panel.label, ylim=(0, None))
    if panel.series is None:
        bars = [(_name(panel.x, row, rows), row[panel.y] or 0.0) for row in rows]
        bars += [("floor", rows[0]["floor_ms"])] if panel.floor else []
        drawn = axes.bar([name for name, _ in bars], [value for _, value in bars])
        axes.bar_label(drawn, fmt="%.3g", fontsize=8)
        axes.tick_params(axis="x", labelrotation=90 if len(bars) > 4 else 0)
        axes.set_title(", ".join(f"{key} {rows[0][key]}" for key in panel.same), fontsize=9)
        return
    (x,) = panel.x
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row[x]):
        lines.setdefault(_name(panel.series, row, rows), []).append(row)
        if panel.note:
            axes.annotate(f"{row[panel.note]} {panel.note}", (row[x], row[panel.y]), fontsize=7)
    for name, points in lines.items():
        axes.plot([row[x] for row in points], [row[panel.y] for row in points], marker="o", label=name)
    axes.set_xlabel({"context": "tokens of context", "place": "place in the draft"}.get(x, x))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if panel.log:
        axes.set_xscale("log", base=2)
    if panel.series:
        axes.legend(fontsize=7)


def _name(keys: Sequence[str], row: Mapping[str, Any], rows: Rows) -> str:
    """The values of the first key, and of the others where they differ between the rows."""
    told = [key for number, key in enumerate(keys) if not number or len({other.get(key) for other in rows}) > 1]
    return "\n".join(str(row[key]) if key == keys[0] else f"{key} {row.get(key)}" for key in told)


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
