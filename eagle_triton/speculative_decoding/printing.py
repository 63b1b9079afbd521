"""Print a line for each event of a generation: accepted drafts green, rejected red, the target's own token blue.

There are no colours if the output is no terminal, unless FORCE_COLOR is set, nor if NO_COLOR is set (no-color.org).
`file`: where to write, None: standard output.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

_RED, _GREEN, _BLUE = 31, 32, 34


def token_ids_to_string(token_ids: Sequence[int], tokenizer: Any = None) -> str:
    """The tokens, each decoded by itself, separated by blanks; without a tokenizer the ids."""
    if tokenizer is None:
        return " ".join(str(token) for token in token_ids)
    return " ".join(str(piece) for piece in tokenizer.convert_ids_to_tokens(list(token_ids)))


def end_token_found(position: int, *, file: TextIO | None = None) -> None:
    """Print that the sequence ended at this position, prompt included."""
    _write(f"End of sequence at position {position}", file)


def initial_step(token: int, tokenizer: Any = None, *, file: TextIO | None = None) -> None:
    """Print a token that the model gave without drafts."""
    _write(f"Target: {_coloured(token_ids_to_string([token], tokenizer), _BLUE, file)}", file)


def speculative_step(
    drafts: Sequence[int],
    accepted: int,
    emitted: int | None,
    tokenizer: Any = None,
    *,
    proposed: int | None = None,
    file: TextIO | None = None,
) -> None:
    """Print a step: its drafts, how many were accepted, and the target's own token, if any.

    proposed: the number of drafts, None: the number given. For a tree only accepted drafts are given.
    """
    shown = [
        _coloured(token_ids_to_string(tokens, tokenizer), colour, file)
        for tokens, colour in (
            (drafts[:accepted], _GREEN),
            (drafts[accepted:], _RED),
            ([] if emitted is None else [emitted], _BLUE),
        )
        if tokens
    ]
    _write(f"{accepted} of {len(drafts) if proposed is None else proposed} accepted: {' '.join(shown)}", file)


def beam_search_step(
    beams: Sequence[tuple[float, Sequence[int]]], tokenizer: Any = None, *, file: TextIO | None = None
) -> None:
    """Print the beams (score, new tokens), best first."""
    _write("Beams:", file)
    for score, tokens in beams:
        _write(f"  {score:.4f} {token_ids_to_string(tokens, tokenizer)}", file)


def _coloured(text: str, colour: int, file: TextIO | None) -> str:
    stream = sys.stdout if file is None else file
    wanted = not os.environ.get("NO_COLOR") and (os.environ.get("FORCE_COLOR") or stream.isatty())
    return f"\033[{colour}m{text}\033[0m" if wanted else text


def _write(line: str, file: TextIO | None) -> None:
    (sys.stdout if file is None else file).write(f"{line}\n")
