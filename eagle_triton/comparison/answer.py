"""One prompt decoded by a method: its tokens, step by step, and its times."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from eagle_triton.inference.eagle_inference import EAGLEInference
from eagle_triton.inference.session import Session
from eagle_triton.inference.text import TextStream
from eagle_triton.inference.timing import Stopwatch

ENGINE, OWN_FORWARD = "engine", "models' own forward"  # the part that decodes


@dataclass(frozen=True)
class Step:
    """One forward of the target after the prompt's, or the prompt's own, which gives the first token.

    tokens: the accepted drafts, then the target's own token; fewer at the end of the answer. accepted, proposed:
    drafts. drafts: the proposed chain; None if it is not wanted or is a tree. h_norm, h_ema, gamma: EGAG's normalised
    entropy, its moving average, and the number of drafts that it asked for; without EGAG gamma is the fixed number of
    drafts, None if there is none.
    """

    tokens: tuple[int, ...]
    accepted: int = 0
    proposed: int = 0
    drafts: tuple[int, ...] | None = None
    h_norm: float | None = None
    h_ema: float | None = None
    gamma: int | None = None


@dataclass(frozen=True)
class Answer:
    """The answer of a method. The first step is the prompt's: its token had no draft.

    seconds: from the prompt's tokens to the last token; first_token_seconds: to the first. target_forwards: with the
    prompt's; drafter_forwards: passes of the drafter or the head. finished: "stop", "length" or "interrupted". engine:
    the part that decoded, `ENGINE` or `OWN_FORWARD`; notes: the reason.
    """

    method: str
    tokens: tuple[int, ...]
    text: str
    steps: tuple[Step, ...]
    seconds: float
    first_token_seconds: float
    target_forwards: int = 0
    drafter_forwards: int = 0
    finished: str = "length"
    engine: str = ENGINE
    notes: tuple[str, ...] = ()

    @property
    def proposed(self) -> int:
        """The number of verified drafts."""
        return sum(step.proposed for step in self.steps)

    @property
    def accepted(self) -> int:
        """The number of accepted drafts."""
        return sum(step.accepted for step in self.steps)

    @property
    def acceptance_rate(self) -> float:
        """Accepted by proposed drafts, 0.0 if there were none."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def verifications(self) -> int:
        """Steps after the prompt's."""
        return max(len(self.steps) - 1, 0)

    @property
    def tau(self) -> float:
        """Tokens per verification, 0.0 if there was none."""
        return (self.accepted + self.verifications) / self.verifications if self.verifications else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, with the prompt's time; 0.0 if there were none."""
        return len(self.tokens) / self.seconds if self.tokens else 0.0

    @property
    def accepted_counts(self) -> list[int]:
        """The number of steps with drafts that accepted 0, 1, ... of them."""
        counts = Counter(step.accepted for step in self.steps if step.proposed)
        return [counts[length] for length in range(max(counts, default=-1) + 1)]


def to_json(answer: Answer) -> dict[str, Any]:
    """An answer for JSON, without the fields that have their default."""
    return {**_changed(answer), "steps": [_changed(step) for step in answer.steps]}


def from_json(fields: dict[str, Any]) -> Answer:
    """The inverse of `to_json`. Raises TypeError or KeyError for anything else."""
    steps = tuple(Step(**_as_tuples(step)) for step in fields["steps"])
    return Answer(**{**_as_tuples(fields), "steps": steps})


def _changed(value: Any) -> dict[str, Any]:
    found = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
    return {name: field for name, (field, default) in found.items() if field != default}


def _as_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


# --- decoding ---

Steps = Generator[tuple[Step, bool], None, None]  # and whether each is the last


@dataclass
class Counts:
    """The forwards of a decoding so far, and how it ended."""

    target_forwards: int = 0
    drafter_forwards: int = 0
    finished: str = "interrupted"


def take(
    method: str,
    steps: Steps,
    counts: Counts,
    stream: TextStream | None,
    on_step: Callable[[Step, str], None] | None = None,
    **fields: Any,
) -> Answer:
    """Decode to the end. on_step(step, text) is called after each step, with the text that has become certain.

    A KeyboardInterrupt ends the answer, with finished "interrupted". Without on_step, text is made after the time was
    taken. fields: of the answer.
    """
    taken: list[Step] = []
    first = 0.0
    began = time.perf_counter()
    try:
        with closing(steps):
            for step, last in steps:
                first = first or time.perf_counter() - began
                taken.append(step)
                if on_step is not None and stream is not None:
                    on_step(step, stream.push(*step.tokens) + (stream.finish() if last else ""))
    except KeyboardInterrupt:
        counts.finished = "interrupted"
    seconds = time.perf_counter() - began
    tokens = tuple(token for step in taken for token in step.tokens)
    if stream is not None:
        stream.push(*tokens if on_step is None else ())
        stream.finish()
    return Answer(
        method, tokens, "" if stream is None else stream.text, tuple(taken), seconds, first,
        counts.target_forwards, counts.drafter_forwards, counts.finished, **fields,
    )  # fmt: skip


def session_steps(session: Session, counts: Counts, gamma: int | None = None) -> Steps:
    """The steps of the only request in a session. gamma: the fixed number of drafts; None: there is none.

    Raises RuntimeError if the request fails.
    """
    counts.target_forwards = 1
    while not session.idle:
        for piece in session.step():
            if piece.completion is not None:
                if piece.completion.error is not None:
                    raise RuntimeError(piece.completion.error)
                counts.finished = piece.completion.finished
            counts.drafter_forwards += piece.draft_forwards
            counts.target_forwards += piece.tree is not None
            step, reading = Step(tuple(piece.tokens)), piece.egag
            if piece.tree is not None:
                drafts = None if piece.drafts is None else tuple(piece.drafts)
                step = Step(step.tokens, piece.accepted, piece.proposed, drafts, gamma=gamma)
                if reading is not None and reading.h_norm == reading.h_norm:  # no NaN
                    step = dataclasses.replace(step, h_norm=reading.h_norm, h_ema=reading.h_ema, gamma=reading.gamma)
            yield step, piece.completion is not None


def open_session(inference: EAGLEInference, rows: int, report_drafts: bool = False) -> Session:
    """A session for one request at a time, without text."""
    return Session(
        inference.engine, inference.policy(1), 1, rows,
        tokenizer=inference.tokenizer, stop_ids=inference.pair.stop_ids, text=False,
        report_drafts=report_drafts, config=inference.config, max_positions=inference.pair.max_positions,
    )  # fmt: skip


def ask(
    session: Session, device: torch.device, method: str, prompt: Sequence[int], new: int, sampling: dict[str, Any]
) -> Answer:
    """Decode one request in an idle session. sampling: options of `Session.submit`.

    Raises RuntimeError if it fails, KeyboardInterrupt if it is interrupted.
    """
    counts = Counts()
    stream = None if session.tokenizer is None else TextStream(session.tokenizer, prompt)
    Stopwatch(device)  # waits for the device
    session.submit(list(prompt), new, **sampling)
    answer = take(method, session_steps(session, counts), counts, stream)
    if answer.finished == "interrupted":
        raise KeyboardInterrupt
    return answer
