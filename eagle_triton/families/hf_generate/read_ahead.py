"""The batch of a `generate` call. Its prompts may be read while transformers prepares the call.

Before its decoding loop, transformers makes a configuration, masks, processors and criteria, which takes milliseconds
on the host. If two calls in a row have had the same options, the next call is expected to have them too, with other
prompts. These are then read from the start of the call, in another stream. When the call is prepared, it takes that
batch; if it has other options, the batch is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.step import Judge
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.families.hf_generate.plan import Plan, read_prompts
from eagle_triton.patching import Fallback

DEVICES = ("cuda",)
"""Devices that work while the host goes on. On others this gains nothing."""


class Asked(NamedTuple):
    """What a call asks of the engine: the tree to draft, and its plan without the prompts."""

    tree: TreeSpec
    options: Plan


def open_batch(
    engine: Engine,
    tree: TreeSpec,
    plan: Plan,
    seeds: Sequence[int],
    judge: Judge | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Batch:
    """A batch with the requests of a plan in its slots, in order. seeds: one for each. judge: chooses the tokens.
    stream: reads the prompts; None: the current one.

    Raises RuntimeError if another generation is running, or if the model has changed.
    """
    most = max(map(len, plan.prompts)) + plan.new_tokens
    embeddings: Sequence[Tensor | None] = plan.embeddings or [None] * len(plan.prompts)
    sampling = {seed: replace(plan.sampling, seed=seed) for seed in set(seeds)}
    batch = Batch(engine, len(plan.prompts), tree, most, drafts=tree.drafts > 0, judge=judge)
    try:
        batch.enter_all(
            (
                Request(
                    prompt,
                    plan.new_tokens,
                    sampling[seed],
                    plan.stop_ids,
                    min_new_tokens=plan.held_back,
                    logits=plan.logits is not None,
                    embeddings=read,
                )
                for prompt, read, seed in zip(plan.prompts, embeddings, seeds, strict=True)
            ),
            stream,
        )
    except BaseException:
        batch.close()
        raise
    return batch


class ReadAhead:
    """Reads ahead for the calls of one model."""

    def __init__(self, engine: Engine, read_tree: Callable[[], TreeSpec]):
        self.engine, self._read_tree = engine, read_tree
        self._last: Asked | None = None
        self._repeated = False  # the last two calls had the same options
        self._stream: torch.cuda.Stream | None = None

    def begin(self, arguments: Mapping[str, Any]) -> Reading:
        """Begin to read a call's prompts, if the call is expected to be like the last one.

        Errors are left to the call itself, which will raise them too.
        """
        able = self.engine.device.type in DEVICES and self.engine.view.ranks is None
        inputs = arguments.get("kwargs", {})
        ids = [value for value in (arguments.get("inputs"), inputs.get("input_ids")) if value is not None]
        mask = inputs.get("attention_mask")
        plain = len(ids) == 1 and type(ids[0]) is Tensor and ids[0].ndim == 2 and type(mask) in (Tensor, type(None))
        if not (able and plain) or inputs.get("inputs_embeds") is not None:
            return Reading(self, None, masked=False)
        reading, expected = Reading(self, ids[0].shape, masked=mask is not None), self._last
        if expected is not None and self._repeated:
            try:
                prompts = read_prompts(self.engine.view, ids[0], mask, expected.options.new_tokens)
                if expected.tree == self._read_tree():
                    reading.start(expected, prompts, self._stream_of_prompts())
            except (Fallback, RuntimeError, ValueError):
                self.note(None)
        return reading

    def note(self, asked: Asked | None) -> None:
        """Remember the options of a call; None: options that are not expected again."""
        self._repeated, self._last = asked is not None and asked == self._last, asked

    def _stream_of_prompts(self) -> torch.cuda.Stream | None:
        """The stream in which prompts are read ahead; None: not on a GPU."""
        if self._stream is None and self.engine.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.engine.device)
        return self._stream


class Reading:
    """The reading ahead for one call. Must be closed at the end of the call."""

    def __init__(self, ahead: ReadAhead, shape: Sequence[int] | None, *, masked: bool):
        """shape: of the call's prompts [B, L]; None: no prompts to read ahead. masked: it has a mask."""
        self._ahead, self._shape, self._masked = ahead, shape, masked
        self._batch: Batch | None = None
        self._taken = False

    def start(self, asked: Asked, prompts: list[Tensor], stream: torch.cuda.Stream | None) -> None:
        """Begin to read prompts. stream: another one than the current."""
        plan = replace(asked.options, prompts=prompts)
        self._batch = open_batch(self._ahead.engine, asked.tree, plan, [0] * len(prompts), stream=stream)
        self._asked, self._prompts = asked, prompts

    def take(self, tree: TreeSpec, plan: Plan) -> Batch | None:
        """The batch that reads this plan, which may have other seeds; None: there is none."""
        asked, expects = Asked(tree, plan.options), self._could_read(plan)
        if self._batch is not None and not (asked == self._asked and _same(plan.prompts, self._prompts)):
            self.close()
        self._ahead.note(asked if expects else None)
        self._taken = self._batch is not None
        return self._batch

    def _could_read(self, plan: Plan) -> bool:
        """Whether the numbers of rows and tokens allow reading a plan ahead."""
        if self._shape is None or plan.on_host or plan.embeddings is not None or len(plan.prompts) != self._shape[0]:
            return False
        return self._masked or all(len(prompt) == self._shape[1] for prompt in plan.prompts)

    def close(self) -> None:
        """Close the batch, if there is one. What was not taken is dropped."""
        self._shape = None
        if self._batch is not None:
            if not self._taken:
                self._ahead.note(None)
            with self._ahead.engine.current():  # what comes next may free memory, and must wait for the reading
                self._batch.close()
            self._batch = None


def _same(prompts: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(prompts) == len(others) and all(map(torch.equal, prompts, others))
