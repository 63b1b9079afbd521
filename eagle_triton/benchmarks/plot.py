"""One picture per mode, the machine named below it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_triton.benchmarks.question_file import ALL
from eagle_triton.benchmarks.record import Record


def plot(record: Record, path: Path) -> None:
    """Draw the record's figures into a PNG, SVG or PDF file."""
    from matplotlib.figure import Figure  # only who asks for a picture needs it

    if not record.rows:
        return
    figure = Figure(figsize=(11, 5 + len(record.rows) / 12 * (record.mode == "operations")), layout="constrained")
    drawings = {
        "generate": _generate,
        "step": _step,
        "batches": _batches,
        "drafters": _drafters,
        "questions": _questions,
        "egag": _drafters,
        "prefill": _prefill,
        "plain": _plain,
        "mtp": _mtp,
        "megakernel": _megakernel,
        "serve": _serve,
        "operations": _operations,
    }
    drawings[record.mode](figure, record.rows)
    machine = record.machine
    names = ("driver", "torch", "triton", "transformers", "commit", "date")
    caption = ", ".join([machine["device"], *(f"{name} {machine[name]}" for name in names if machine[name])])
    figure.supxlabel(caption, fontsize=7)
    if record.notes:
        figure.suptitle(record.notes[0], fontsize=8)
    kept_in = "Subject" if path.suffix.lower() == ".pdf" else "Description"
    figure.savefig(path, dpi=150, metadata={kept_in: caption})


def _generate(figure: Any, rows: list[dict[str, Any]]) -> None:
    left, right = figure.subplots(1, 2)
    _bars(
        left, [(row["variant"], row["ms_per_step"]) for row in rows] + [("floor", rows[0]["floor_ms"])], "ms per step"
    )
    _bars(right, [(row["variant"], row["tokens_per_second"]) for row in rows], "tokens per second")


def _serve(figure: Any, rows: list[dict[str, Any]]) -> None:
    left, right = figure.subplots(1, 2)
    _bars(left, [(row["variant"], row["median_ttft_ms"]) for row in rows], "ms to the first token, median")
    _bars(right, [(row["variant"], row["median_tpot_ms"]) for row in rows], "ms per token after it, median")


def _step(figure: Any, rows: list[dict[str, Any]]) -> None:
    left, right = figure.subplots(1, 2)
    first = rows[0]
    bars = [
        (row["variant"], row["ms_per_step"])
        for row in rows
        if all(row[key] == first[key] for key in ("decoding", "batch", "context"))
    ]
    order = {"SafeAILab": 0, "original": 1, "optimised": 2}
    bars.sort(key=lambda bar: order[bar[0]])
    _bars(left, [*bars, ("floor", first["floor_ms"])], "ms per step")
    left.set_title(f"{first['decoding']}, batch {first['batch']}, context {first['context']}", fontsize=9)
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["variant"] == "optimised":
            name = f"{row['decoding']}, batch {row['batch']}"
            lines.setdefault(name, []).append((row["context"], row["ms_per_step"]))
    for name, points in lines.items():
        right.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    right.set_xlabel("tokens of context")
    right.set_ylabel("ms per step")
    right.set_ylim(bottom=0)
    right.set_title("optimised", fontsize=9)
    right.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _batches(figure: Any, rows: list[dict[str, Any]]) -> None:
    left, right = figure.subplots(1, 2)
    context = rows[0]["context"]
    for name in ("plain", "auto"):
        chosen = [row for row in rows if row["variant"] == name and row["context"] == context]
        sizes, rates = [row["batch"] for row in chosen], [row["tokens_per_second"] for row in chosen]
        left.plot(sizes, rates, marker="o", label=name)
    right.plot(sizes, [row["speedup"] for row in chosen], marker="o")
    right.axhline(1.0, color="grey", linewidth=1)
    for row in chosen:
        right.annotate(f"{row['nodes']} nodes", (row["batch"], row["speedup"]), fontsize=7)
    for axes, label in ((left, "tokens per second"), (right, "times plain decoding")):
        axes.set(xlabel="batch", ylabel=label, ylim=(0, None))
        axes.set_xscale("log", base=2)
    left.legend(fontsize=8)


def _drafters(figure: Any, rows: list[dict[str, Any]]) -> None:
    kinds, variants = (list(dict.fromkeys(row[key] for row in rows)) for key in ("work", "variant"))
    values = {(row["work"], row["variant"]): row for row in rows}
    for axes, key, label in zip(
        figure.subplots(1, 2), ("tau", "speedup"), ("tokens per step", "times plain decoding"), strict=True
    ):
        for index, name in enumerate(variants):
            places = [place + index / (len(variants) + 1) for place in range(len(kinds))]
            axes.bar(places, [values[kind, name][key] for kind in kinds], 1 / (len(variants) + 1), label=name)
        axes.set_xticks([place + 0.5 - 1 / (len(variants) + 1) for place in range(len(kinds))], kinds)
        axes.set_ylabel(label)
    axes.legend(fontsize=8)


def _questions(figure: Any, rows: list[dict[str, Any]]) -> None:
    rows = [row for row in rows if row["category"] == ALL]
    several = len({row["temperature"] for row in rows}) > 1
    names = [row["variant"] + f"\nT {row['temperature']:g}" * several for row in rows]
    left, middle, right = figure.subplots(1, 3)
    for axes, key, label in ((left, "tau", "tokens per step"), (middle, "speedup", "times plain decoding")):
        _bars(axes, [(name, row[key] or 0.0) for name, row in zip(names, rows, strict=True)], label)
        axes.tick_params(axis="x", labelrotation=90)
    for name, row in zip(names, rows, strict=True):
        if rates := row["synthetic_acceptance_rates"]:
            right.plot(range(1, len(rates) + 1), rates, marker="o", label=name.replace("\n", ", "))
    right.xaxis.get_major_locator().set_params(integer=True)
    right.set(xlabel="place in the draft", ylabel="share of steps that accepted up to there", ylim=(0, 1))
    right.legend(fontsize=7)


def _prefill(figure: Any, rows: list[dict[str, Any]]) -> None:
    left, right = figure.subplots(1, 2)
    bars = [(f"{row['batch']} x {row['context']}", row["ms"]) for row in rows if row["variant"] == "first token"]
    _bars(left, bars, "ms to the first tokens")
    left.tick_params(axis="x", labelrotation=45)
    entered = [row for row in rows if row["variant"] == "enter"]
    for key, label in (("step_ms", "step"), ("longest_gap_ms", "longest gap while a prompt enters")):
        names = [f"{row['batch']} x {row['context']}" for row in entered]
        right.plot(names, [row[key] for row in entered], "o", label=label)
    right.set(ylabel="ms", ylim=(0, None))
    right.tick_params(axis="x", labelrotation=45)
    right.legend(fontsize=8)


def _plain(figure: Any, rows: list[dict[str, Any]]) -> None:
    _bars(figure.subplots(), [(row["variant"], row["ms_per_token"]) for row in rows], "ms per token, prefill and all")


def _mtp(figure: Any, rows: list[dict[str, Any]]) -> None:
    steps = [row for row in rows if "ms_per_step" in row]
    several = len({(row.get("batch"), row.get("context")) for row in steps}) > 1
    names = [f"{row['variant']}\n{row['batch']} x {row['context']}" if several else row["variant"] for row in steps]
    _bars(figure.subplots(), list(zip(names, (row["ms_per_step"] for row in steps), strict=True)), "ms per step")


def _megakernel(figure: Any, rows: list[dict[str, Any]]) -> None:
    bars = [(f"{row['variant']}, batch {row['batch']}, context {row['context']}", row["ms"]) for row in rows]
    _bars(figure.subplots(), [*bars, ("floor", rows[0]["floor_ms"])], "ms from the target's logits to the next tree")


def _operations(figure: Any, rows: list[dict[str, Any]]) -> None:
    axes = figure.subplots()
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


def _bars(axes: Any, bars: list[tuple[str, float]], label: str) -> None:
    drawn = axes.bar([name for name, _ in bars], [value for _, value in bars])
    axes.bar_label(drawn, fmt="%.3g", fontsize=8)
    axes.set_ylabel(label)
