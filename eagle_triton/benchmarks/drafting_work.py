"""Prompts for comparing drafts, cut from the Python standard library at run time.

They come from files that the embedded checkpoint was not trained on, like its own held-out prompts.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from eagle_triton.demo.library import is_held_out, library_paths

KINDS = ("prose", "edit", "warm")
EDITED = (100, 200)  # tokens of the definition that is begun again
BEGUN = 0.4  # the share of its lines that the second copy has already

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def work(kind: str, tokenizer: Any, count: int, seed: int) -> list[list[int]]:
    """The tokens of `count` prompts, the same for the same tokenizer, seed and Python.

    "prose": a definition up to the middle of its docstring's first line. "edit": a definition of 100 to 200 tokens, and
    its beginning again under another name, so the prompt holds the continuation. "warm": prompts of "prose", each of
    them twice. Otherwise no prompt occurs twice. Raises ValueError for another kind, for a count below 1 or more than
    the library has, and for an odd count with "warm".
    """
    if kind not in KINDS:
        raise ValueError(f"work: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if count < 1 or (kind == "warm" and count % 2):
        raise ValueError(f"work: count must be at least 1, and even for warm, got {count} for {kind}")
    make: Callable[[Definition, list[str], Any], str | None] = _edit if kind == "edit" else _prose
    times = 2 if kind == "warm" else 1
    definitions = list(_definitions())
    random.Random(seed).shuffle(definitions)
    prompts: dict[str, None] = {}
    for node, lines in definitions:
        if (prompt := make(node, lines, tokenizer)) is not None:
            prompts[prompt] = None
        if times * len(prompts) == count:
            return times * [tokenizer(prompt).input_ids for prompt in prompts]
    raise ValueError(f"work: count must be at most {times * len(prompts)} for {kind}, got {count}")


@cache
def _definitions() -> tuple[tuple[Definition, list[str]], ...]:
    """Every function and class of the held-out files with the lines of its file, in the order of the files."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in library_paths(library, with_tests=False) if is_held_out(path.as_posix())]
    return tuple(found for path in paths for found in _of_file(library / path))


def _of_file(path: Path) -> Iterator[tuple[Definition, list[str]]]:
    with tokenize.open(path) as file:
        text = file.read()
    with warnings.catch_warnings():  # of the library's own literals
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    lines = text.split("\n")
    return ((node, lines) for node in ast.walk(tree) if isinstance(node, Definition))


def _prose(node: Definition, lines: list[str], tokenizer: Any) -> str | None:
    """The definition up to the middle of its docstring's first line; None if that line has too few words."""
    if ast.get_docstring(node) is None:
        return None
    *header, first = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].lineno])).split("\n")
    words = first.split(" ")
    half = " ".join(words[: (len(words) + 1) // 2])
    if not header or len(first.split()) < 4 or not half.strip():  # deep in a definition, half may be blanks
        return None
    return "\n".join([*header, half])


def _edit(node: Definition, lines: list[str], tokenizer: Any) -> str | None:
    """The definition and its beginning under another name; None if its length is not within EDITED."""
    source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    least, most = EDITED
    if not least <= len(tokenizer(source, truncation=True, max_length=most + 1).input_ids) <= most:
        return None
    again = re.sub(rf"\b{node.name}\b", f"{node.name}_again", source, count=1).split("\n")
    return "\n".join([source, "", "", *again[: max(1, int(len(again) * BEGUN))]])
