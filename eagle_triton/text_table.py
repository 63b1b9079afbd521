"""Tables that programs print. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Text columns, the first aligned left, the others right. None is left blank."""
    cells = [list(headers), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    return "\n".join(
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in cells)
    )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def table_of(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """`table` of the rows' values. columns: by header the key, perhaps with a format, as in "share:.1%"."""
    return table(list(columns), [[_formatted(row, *column.split(":")) for column in columns.values()] for row in rows])


def _formatted(row: Mapping[str, Any], key: str, form: str = "") -> Any:
    value = row.get(key)
    return format(value, form) if form and value is not None else value
