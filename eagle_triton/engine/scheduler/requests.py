"""What a batch is asked to decode, and what it says of each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.operands.verification import ERROR, LENGTH, STOP

NAN = "the target's logits are NaN"
REASONS = {STOP: "stop", LENGTH: "length", ERROR: "error"}


@dataclass(frozen=True)
class Request:
    """A sequence to decode.

    prompt: int64 [L], on any device.
    max_new_tokens, stop_ids: it ends at the first of `stop_ids`, which is kept, or after `max_new_tokens`.
    min_new_tokens: no stop token is chosen before.
    exact: False ends it as the original EaModel does: only after a step, and the step's other tokens are kept.
    logprobs: report each token's log-probability, as `Batch(logprobs=True)` does for all requests.
    logits: report the target's own logits that each token was chosen by.
    embeddings: what the target reads in place of the prompt's first tokens, [n, H] of its dtype on its device; drafts
    and penalties use the tokens.
    stop_strings: sessions end a request there; a batch knows no text.
    """

    prompt: Tensor
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    exact: bool = True
    logprobs: bool = False
    min_new_tokens: int = 0
    logits: bool = False
    embeddings: Tensor | None = None
    stop_strings: tuple[str, ...] = ()

    @property
    def processed(self) -> bool:
        """Whether the logits themselves are changed."""
        return self.sampling.processed or self.min_new_tokens > 0


class GuideReading(NamedTuple):
    """How EGAG bounded a tree: the entropy, its moving average, and the depth that it allowed. levels: how many were
    scored; deeper drafts are cut off."""

    h_norm: float
    h_ema: float
    gamma: int
    levels: int


@dataclass(frozen=True)
class StepResult:
    """What one step did for one request, or what came once its prompt was read.

    tokens: the new ones. Of a step the accepted drafts, then the target's own token, which the next step commits; of a
    prompt that token alone; none if the logits were NaN. Of a request that is not `exact`: what the step committed.
    tree: the shape that was verified, None after a prompt. depth: how deep its drafts went.
    accepted, proposed: drafts, also those that a stop cut off.
    passes: of the draft for the next tree, beside the one that takes in what was accepted.
    committed: tokens that the step committed.
    finished: None while it goes on, then "stop", "length" or "error", with the reason in `error`.
    drafts: if asked for, what was drafted, in the order of the tree's nodes.
    egag: of a tree that is adaptive.
    behind_prompts: others' prompts were read right before the step, so it took longer.
    size: how many slots the step covered, by which it cost.
    logits: if asked for, float32 [n, V] for n tokens, on the device: the target's own, before penalties, biases,
    temperature and filters.
    """

    slot: int
    request: Request
    tokens: list[int]
    tree: TreeSpec | None = None
    depth: int = 0
    accepted: int = 0
    proposed: int = 0
    passes: int = 0
    committed: int = 0
    finished: str | None = None
    error: str | None = None
    logprobs: list[float] | None = None
    drafts: list[int] | None = None
    egag: GuideReading | None = None
    behind_prompts: bool = False
    size: int = 1
    logits: Tensor | None = None
