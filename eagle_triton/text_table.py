"""Tables that programs print. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Text columns, the first aligned left, the others right. None is left blank."""
    cells = [list(headers), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    return "\n".join(
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in cells)
    )


def cell(value: Any) -> str:
    """A value as tables show it; None is left blank."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def table_of(columns: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """`table` of the rows' values, without the columns after the first in which no row has one.

    columns: keys separated by commas, each perhaps with a format and after a header: "=name, ms/step=ms, share:.1%".
    """
    headers, cells = [], []
    for number, column in enumerate(columns.split(", ")):
        header, named, key = column.partition("=")
        key, _, form = (key if named else header).partition(":")
        values = [row.get(key) for row in rows]
        if number and rows and all(value is None for value in values):
            continue
        headers.append(header if named else key)
        cells.append([format(value, form) if form and value is not None else value for value in values])
    return table(headers, list(zip(*cells, strict=True)))
