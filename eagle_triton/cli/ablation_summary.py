"""The figures of each group of an ablation: a table, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from eagle_triton import text_table
from eagle_triton.cli.ablation_rows import Row


def table(rows: Sequence[Row], groups: Sequence[str]) -> str:
    """A line for each group: medians of tokens per second and of the speedup, means of tau and gamma, the share of all
    drafts that were accepted, and how many rows have the target's text."""
    lines = []
    for group in groups:
        own = [row for row in rows if row["group"] == group]
        if not own:
            continue
        proposed, matches = sum(_numbers(own, "drafts_proposed")), [row["matches_target_ar"] for row in own]
        lines.append(
            (
                group,
                len(own),
                _of(own, "tokens_per_s", statistics.median),
                _of(own, "speedup_vs_target_ar", statistics.median),
                _of(own, "mean_accept_length", statistics.fmean),
                sum(_numbers(own, "drafts_accepted")) / proposed if proposed else None,
                _of(own, "mean_gamma", statistics.fmean),
                f"{matches.count('True')}/{len(own)}" if any(matches) else None,
            )
        )
    return text_table.table(("group", "rows", "tokens/s", "speedup", "tau", "acceptance", "gamma", "matches"), lines)


def plot(rows: Sequence[Row], groups: Sequence[str], path: Path) -> None:
    """Draw tokens per second, tokens per verification and acceptance of each group; a dot for each row. Raises OSError
    if the file cannot be written."""
    from matplotlib.figure import Figure  # only who asks for a picture needs it

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    shown = [group for group in groups if any(row["group"] == group for row in rows)]
    panels = (
        ("tokens_per_s", "tokens per second (median)"),
        ("mean_accept_length", "tokens per verification (median)"),
        ("acceptance_rate", "share of drafts accepted (median)"),
    )
    for axes, (column, label) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for place, group in enumerate(shown):
            values = _numbers([row for row in rows if row["group"] == group], column)
            if values:
                axes.bar(place, statistics.median(values), color=f"C{place}", alpha=0.6)
                axes.plot([place] * len(values), values, ".", color="black", markersize=3)
        axes.set_xticks(range(len(shown)), shown, rotation=40, ha="right")
        axes.set(ylabel=label, ylim=(0, None), xlim=(-0.6, len(shown) - 0.4))
    if rows:
        first = rows[0]
        names = ("device", "dtype", "target_model", "processor", "processor_args", "max_gen_len")
        figure.supxlabel(", ".join(f"{name} {first[name]}" for name in names), fontsize=7)
    figure.savefig(path, dpi=150)


def _numbers(rows: Sequence[Row], column: str) -> list[float]:
    return [float(row[column]) for row in rows if row[column]]


def _of(rows: Sequence[Row], column: str, combine: Callable[[list[float]], float]) -> float | None:
    values = _numbers(rows, column)
    return combine(values) if values else None
