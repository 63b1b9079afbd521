"""A CSV file that grows by whole rows, and outlives whatever ends a run. The standard library alone."""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

LARGEST_FIELD = 2**31 - 1  # characters; the csv module's own limit is 131072


def read_rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The complete rows of a file; none if it does not exist, is empty, or holds the beginning of a header.

    A row is complete when its line end was written, so what an interrupt left of one is not returned. Raises ValueError
    for a file with other columns, or that is no CSV in UTF-8; OSError for one that cannot be read.
    """
    raw = path.read_bytes() if path.exists() else b""
    whole = raw[: raw.rfind(b"\n") + 1]
    header = ",".join(columns).encode()
    if not whole:
        if header.startswith(raw):
            return []
        raise ValueError(f"{path} is not the CSV of an ablation")
    try:
        text = whole.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no CSV in UTF-8 (byte {error.start})") from None
    records = _records(text, len(columns), path)
    _check_columns(records[0] if records else [], columns, path)
    for number, record in enumerate(records[1:], 1):
        if len(record) != len(columns):
            raise ValueError(f"{path}: row {number} has {len(record)} fields, {len(columns)} expected")
    return [dict(zip(columns, record, strict=True)) for record in records[1:]]


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    """Put a file with these rows in the place of what is there, at once."""
    path = path.resolve()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "wb") as file:
            file.write(_line(columns))
            file.writelines(_line([row[column] for column in columns]) for row in rows)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, path.stat().st_mode if path.exists() else 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def append_rows(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    """Write rows behind those of a file that ends with a line end. They are on the disk when this returns."""
    with open(path, "ab") as file:
        file.write(b"".join(_line([row[column] for column in columns]) for row in rows))
        file.flush()
        os.fsync(file.fileno())


def _records(text: str, columns: int, path: Path) -> list[list[str]]:
    """The records of a text whose last one may have been cut off inside quotes."""
    csv.field_size_limit(LARGEST_FIELD)
    lines = [f"{line}\n" for line in text.split("\n")[:-1]]
    reader = csv.reader(lines, strict=True)
    records: list[list[str]] = []
    end = 0  # of the last record
    try:
        for record in reader:
            records.append(record)
            end = reader.line_num
    except csv.Error as error:
        cut_off = reader.line_num == len(lines)
        if not cut_off or any(len(line) == columns for line in csv.reader(lines[end + 1 :])):
            raise ValueError(f"{path} is no CSV: line {end + 1} and what follows: {error}") from None
    return records


def _check_columns(found: Sequence[str], columns: Sequence[str], path: Path) -> None:
    if list(found) == list(columns):
        return
    for number, column in enumerate(columns):
        if number >= len(found) or found[number] != column:
            came = f"{found[number]!r:.60}" if number < len(found) else "missing"
            raise ValueError(f"{path} has other columns: column {number + 1} is {came}, {column!r} expected")
    raise ValueError(f"{path} has other columns: {len(found)} of them, {len(columns)} expected")


def _line(fields: Sequence[str]) -> bytes:
    """A record and its end. What csv ends with \\r\\n has \\r in quotes as well as \\n."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\r\n").writerow(fields)
    return buffer.getvalue().removesuffix("\r\n").encode() + b"\n"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
