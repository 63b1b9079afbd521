"""Turn tokens into text as they come: whole characters only, cut before a stop string."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

BROKEN = "\ufffd"  # in decoded text: bytes that are not, or not yet, a character
MAX_BROKEN = 16  # held back at the end of a text; of more, the first ones are released
CONTEXT = 8  # tokens to decode again before new ones, because a token's text may depend on earlier ones


class TextStream:
    """Turns tokens into pieces of text that never split a character, and watches for stop strings.

    `push(*tokens)` returns the text that is certain now, often empty; `finish()` returns the rest. Together these are
    the text of all tokens, cut before the first stop string, which is `stop_string`. Special tokens have no text.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int] = (),
        stop_strings: Iterable[str] = (),
        min_new_tokens: int = 0,
        *,
        special: bool = False,
    ) -> None:
        """prompt: the tokens before the text. special: special tokens have text too. min_new_tokens: a stop string does
        not count if it begins in the text of the first min_new_tokens tokens. Raises ValueError for a stop string that
        is empty or no string."""
        self._least, self._special = min_new_tokens, special
        self.stop_strings = tuple(stop_strings)
        check_stop_strings(self.stop_strings)
        self.stop_string: str | None = None
        self._tokenizer = tokenizer
        self._window = list(prompt[-CONTEXT:])
        self._shown = len(self._certain())  # characters of the window already read
        self._ends: list[int] = []  # for each token: characters read so far
        self._held = ""  # text that may begin a stop string
        self._pieces: list[str] = []
        self._released = 0  # characters in _pieces

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.stop_string is not None

    @property
    def tokens(self) -> int:
        """How many tokens the text needs: all, or those up to a stop string. The last may contain a part of that."""
        return self.certain_tokens if self.stopped else len(self._ends)

    @property
    def certain_tokens(self) -> int:
        """How many tokens the text so far needs. No stop string can remove these any more."""
        return bisect_left(self._ends, self._released) + 1 if self._released else 0

    def push(self, *tokens: int) -> str:
        """The text that these tokens make certain. Tokens after a stop string are ignored.

        Raises RuntimeError after a stop string.
        """
        if self.stopped:
            raise RuntimeError("TextStream: a stop string has ended this text")
        if not self.stop_strings:
            return self._push(tokens)
        pieces = []
        for token in tokens:  # one by one, to know which are needed
            pieces.append(self._push([token]))
            if self.stopped:
                break
        return "".join(pieces)

    def _push(self, tokens: Sequence[int]) -> str:
        self._window += tokens
        text = self._certain()
        fresh, self._shown = text[self._shown :], max(self._shown, len(text))
        if len(self._window) > 2 * CONTEXT and text == self._decoded():
            self._window = self._window[-CONTEXT:]
            self._shown = len(self._certain())
        self._ends += [(self._ends[-1] if self._ends else 0) + len(fresh)] * len(tokens)
        return self._release(fresh)

    def finish(self) -> str:
        """The text that was held back: the beginning of a character, or of a stop string."""
        if self.stopped:
            return ""
        fresh = self._decoded()[self._shown :]
        self._shown += len(fresh)
        if self._ends:
            self._ends[-1] += len(fresh)
        return self._release(fresh, last=True)

    def _release(self, fresh: str, last: bool = False) -> str:
        if len(self._ends) <= self._least:
            return self._add(fresh)
        held = self._held + fresh
        found = [(place, stop) for stop in self.stop_strings if (place := held.find(stop)) >= 0]
        end = len(held) if last else len(held) - beginning_at_end(held, self.stop_strings)
        if found:
            end, self.stop_string = min(found)
        self._held = "" if found else held[end:]
        return self._add(held[:end])

    def _add(self, piece: str) -> str:
        self._pieces.append(piece)
        self._released += len(piece)
        return piece

    def _decoded(self) -> str:
        return self._tokenizer.decode(
            self._window, skip_special_tokens=not self._special, clean_up_tokenization_spaces=False
        )

    def _certain(self) -> str:
        """The text of the window, without an end that further tokens may complete to a character."""
        text = self._decoded()
        whole = text.rstrip(BROKEN)
        return whole if len(text) - len(whole) <= MAX_BROKEN else text[:-MAX_BROKEN]


def beginning_at_end(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may begin one of the markers."""
    longest = max(map(len, markers), default=1) - 1
    counts = range(min(longest, len(text)), 0, -1)
    return next((n for n in counts if any(marker.startswith(text[-n:]) for marker in markers)), 0)


def check_stop_strings(stop_strings: Sequence[str]) -> None:
    """Raise ValueError for a stop string that is empty or no string."""
    if not all(isinstance(stop, str) and stop for stop in stop_strings):
        raise ValueError(f"stop_strings must be non-empty strings, got {list(stop_strings)}")
