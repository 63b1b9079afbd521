"""Chooses the forwards that read one long prompt with `ops.prompt_attention`.

A forward over pieces of any prompts is captured once, for all lengths. A forward over consecutive rows of one prompt,
after many earlier rows, takes the device long enough for the host to launch it without a graph. The host then knows the
rows' positions, so attention can use the fastest kernel.
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
NO_MEMORY = "there was no memory for it beside the cache (set cache_tokens to leave some)"
MIN_WORK = 4096 * 4096  # rows before the forward times columns of q: below this the host may be slower than the device


class LongPrompts:
    """The choice depends only on a forward's pieces, the model and the device."""

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
        """shapes: `span_shape` of the target's layers; if all are None, nothing is chosen. draft_shapes: of the draft's
        layers. notes: gets the reason if this is given up. wanted: whether to do this; None: if cuDNN can."""
        self._dtype, self._device, self._notes = dtype, device, notes
        known = {shape for shape in shapes if shape is not None}
        self._columns = max((heads * width for heads, _, width in known), default=0)  # of q
        self._shapes = sorted(known.union(shape for shape in draft_shapes if shape is not None))
        self._by_cudnn = ops.kernels and device.type == "cuda"
        if wanted is None:
            wanted = self._by_cudnn and self._kernels.unsupported(dtype, device) is None
        self._on = bool(known) and wanted

    @property
    def _kernels(self) -> ModuleType:
        return module_of("ops.prompt_attention", kernels=True)

    def span_of(self, forward: Forward) -> PromptSpan | None:
        """The span of a forward over one prompt that should use `prompt_attention`; None for other forwards."""
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
        """Read long prompts like others from now on, and log the reason."""
        self._on = False
        self._notes["long_prompts"] = f"read like others, which takes longer: {reason}"
        log.warning("long prompts are read like others, which takes longer: %s", reason)

    def _refused(self, rows: int, start: int) -> str | None:
        """Why `prompt_attention` cannot run this, found before any launch; None: it can."""
        try:
            reasons = [self._kernels.refused(*shape, self._dtype, self._device, rows, start) for shape in self._shapes]
        except torch.OutOfMemoryError:
            return NO_MEMORY
        return next((reason for reason in reasons if reason is not None), None)
