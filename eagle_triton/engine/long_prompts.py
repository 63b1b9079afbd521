"""Which forwards read a long prompt alone, so that attention can be told where they stand.

A forward over pieces of any prompts is captured once and serves all lengths. One that reads consecutive rows of a
single prompt, behind many of its rows, takes the device so long that the host has time to launch it anew: then the host
says where they stand, and attention takes whatever is fastest there (`ops.prompt_attention`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import ModuleType

import torch

from eagle_triton.engine.operations import Operations, module_of
from eagle_triton.engine.prompt_chunks import PromptSpan
from eagle_triton.engine.prompt_queue import PIECE_ROWS, Forward

log = logging.getLogger(__name__)

MIN_ROWS = 2048  # in a forward
NO_MEMORY = "there was no memory for it beside the cache (cache_tokens leaves some)"
MIN_WORK = 4096 * 4096  # rows before it times columns of q: with less the host may be slower than the device


class LongPrompts:
    """Chooses, by a forward's own pieces and what is known of model and device, and by nothing else."""

    def __init__(
        self,
        ops: Operations,
        shapes: Iterable[tuple[int, int, int] | None],
        draft_shapes: Iterable[tuple[int, int, int] | None],
        dtype: torch.dtype,
        device: torch.device,
        notes: dict[str, str],
        wanted: bool | None,
    ):
        """shapes: `stretch_shape` of all layers of the target, without one of which nothing is gained; draft_shapes: of
        the draft's. notes: takes why this is given up. wanted: whether it is done, None: where cuDNN attends."""
        self._ops, self._dtype, self._device, self._notes = ops, dtype, device, notes
        known = {shape for shape in shapes if shape is not None}
        self._columns = max((heads * width for heads, _, width in known), default=0)  # of q
        self._shapes = sorted(known.union(shape for shape in draft_shapes if shape is not None))
        self._by_cudnn = ops.kernels and device.type == "cuda"
        self._on = bool(known) and (self._can_be_faster() if wanted is None else wanted)

    def _can_be_faster(self) -> bool:
        return self._by_cudnn and self._kernels.unsupported(self._dtype, self._device) is None

    @property
    def _kernels(self) -> ModuleType:
        return module_of("ops.prompt_attention", kernels=True)

    def stretch_of(self, forward: Forward) -> PromptSpan | None:
        """Where a forward stands that reads one prompt's rows alone, and is to be launched so; None: any other."""
        if not self._on or forward.rows != PIECE_ROWS or forward.rows * forward.size < MIN_ROWS:
            return None
        first, last = forward.pieces[0], forward.pieces[-1]
        starts = [(first.slot, first.start + place * forward.rows) for place in range(len(forward.pieces))]
        if starts != [(piece.slot, piece.start) for piece in forward.pieces]:
            return None
        if first.start * self._columns < MIN_WORK:
            return None
        reason = self._refused(forward.rows * forward.size, first.start) if self._by_cudnn else None
        if reason is not None:
            self.give_up(reason)
            return None
        return PromptSpan(first.start, last.end)

    def give_up(self, reason: str) -> None:
        """Read all prompts like any other from now on, and say why."""
        self._on = False
        self._notes["long_prompts"] = f"read as any others, which takes longer: {reason}"
        log.warning("long prompts are read as any others, which takes longer: %s", reason)

    def _refused(self, rows: int, start: int) -> str | None:
        """Why the operation cannot do this, found out before anything is launched; None: it can."""
        try:
            reasons = [self._kernels.refused(*shape, self._dtype, self._device, rows, start) for shape in self._shapes]
        except torch.OutOfMemoryError:
            return NO_MEMORY
        return next((reason for reason in reasons if reason is not None), None)
