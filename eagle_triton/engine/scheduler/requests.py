"""A request, its state while it runs, and what each step gives it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.grammar import GrammarError, Matcher
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.operands.verification import ERROR, LENGTH, STOP, Verification

if TYPE_CHECKING:
    from eagle_triton.inference.session import Completion
    from eagle_triton.inference.text import TextStream

TopTokens = list[tuple[int, float]]
NAN = "the target's logits are NaN"
REASONS = {STOP: "stop", LENGTH: "length", ERROR: "error"}


@dataclass(frozen=True)
class Request:
    """A sequence to decode, with its options.

    prompt: int64 [L], on any device.
    max_new_tokens, stop_ids: the request ends at the first of `stop_ids`, which is kept, or after `max_new_tokens`.
    min_new_tokens: no stop token is chosen before.
    exact: False ends as the original EaModel does: only after a step, with all tokens of the step.
    logprobs: report each token's log-probability, as `Batch(logprobs=True)` does for all requests.
    top_logprobs: report this many of the likeliest tokens beside each token, at most TOP_LOGPROBS (20).
    prompt_logprobs: report both for the tokens of the prompt too, which is then read alone and whole.
    logits: report the target's own logits from which each token was chosen.
    embeddings: what the target reads instead of the prompt's first tokens, [n, H] in its dtype on its device; drafts
    and penalties use the tokens.
    stop_strings: sessions end a request there; a batch has no text.
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
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    @property
    def read_alone(self) -> bool:
        """Whether the prompt has its own forwards, and shares no pages."""
        return self.embeddings is not None or self.prompt_logprobs

    @property
    def processed(self) -> bool:
        """Whether the logits themselves are changed."""
        return self.sampling.processed or self.min_new_tokens > 0

    @property
    def filter_order(self) -> bool | None:
        """`top_p_first`, which all sampled requests of a batch share; None for a greedy request."""
        return None if self.sampling.greedy else self.sampling.top_p_first

    def needs_fixed_tree(self, verification: Verification) -> bool:
        """Whether its tokens depend on the trees, and must be repeatable, because it is greedy or has a seed."""
        sampling = self.sampling
        return (sampling.greedy or sampling.seed is not None) and verification.follows_tree(not sampling.greedy)


class RunningRequest:
    """The host's state of a request that waits for a batch or is in a slot. Compared by identity.

    index: its number; of two requests the lower came first.
    slot: its slot, -1 before and after.
    prompt: the tokens to read before it decodes, on the host; after a pause with the new tokens committed before.
    prefix: the keys of pages with this prompt.
    tokens: all reported new tokens.
    decodes: its prompt is read.
    paused: it waits for pages, and has none. pauses: how often it has waited.
    root: the token after the prompt, -1 if it is still to be chosen.
    steps: how many steps have used its random numbers.
    gamma: how deep its next trees may be, by the steps read so far. It rises at once, and falls by one per step.
    cached_tokens: tokens of its prompt that were found in pages when it came.
    page_rows: rows of its pages.
    matcher: the position of its output in its grammar; set by a session, which has a tokenizer.
    failure: why its output cannot follow its grammar.
    prompt_scores: see prefill.score_rows; None if not asked for.
    completion, stream: set by a session, which fills the completion while the request runs.
    """

    completion: Completion
    stream: TextStream | None

    def __init__(self, request: Request, index: int):
        self.request, self.index = request, index
        self.slot = -1
        self.prompt = request.prompt.to("cpu", copy=True)  # the caller may overwrite the original
        self.prefix: list[bytes] = []
        self.tokens: list[int] = []
        self.decodes = self.paused = False
        self.root, self.steps = -1, 0
        self.gamma = math.inf
        self.cached_tokens = self.page_rows = self.pauses = 0
        self.matcher: Matcher | None = None
        self.failure: str | None = None
        self.prompt_scores: Tensor | None = None

    def first(self, length: int) -> Tensor:
        """The first `length` tokens of prompt and new tokens: int64 [length], on the host."""
        new = self.tokens[len(self.prompt) - len(self.request.prompt) :]
        return torch.cat((self.prompt, torch.tensor(new, dtype=torch.int64, device="cpu")))[:length]

    def read_by_grammar(self, last: list[int]) -> bool:
        """Whether its grammar, if any, allows the last tokens of its output, which no step reads any more. If not,
        `failure` says why."""
        if self.matcher is not None and not self.failure:
            try:
                self.matcher.read([*self.tokens, *last][self.matcher.consumed :])
            except GrammarError as error:
                self.failure = str(error)
        return self.failure is None

    def pause(self, tokens: Tensor, prefix: list[bytes], root: int) -> None:
        """Wait for pages. Then read `tokens` again, unless pages are found by `prefix`, and go on with `root` (-1: not
        chosen)."""
        self.prompt, self.prefix, self.root = tokens, prefix, root
        self.decodes, self.paused = False, True
        self.pauses += 1
        self.gamma, self.page_rows = math.inf, 0
        if self.matcher is not None:  # it may have read tokens of a step that is dropped
            self.matcher.rewind(len(tokens) + (root >= 0) - len(self.request.prompt))


class GuideReading(NamedTuple):
    """How EGAG limited a tree: the entropy, its moving average, and the allowed depth. levels: how many were scored;
    deeper drafts are cut off."""

    h_norm: float
    h_ema: float
    gamma: int
    levels: int


@dataclass
class Piece:
    """What one step gave one request, or the first token after its prompt.

    A piece is not a string: `piece.text` and `str(piece)` are its text. `"".join` takes these, or what `stream_text`
    yields.

    index: the request's number.
    tokens: the new ones. After a step the accepted drafts, then the target's own token, which the next step commits;
    after a prompt only that token; none if the logits were NaN. If the request is not `exact`: the tokens that the step
    committed.
    text: the text that is certain now, from a session.
    logprobs: the tokens' log-probabilities, if asked for.
    top_logprobs: for each place the likeliest tokens with their log-probabilities, the likeliest first, if asked for.
    prompt_logprobs: with the first tokens, if asked for: the log-probability of each token of the prompt but the first,
    and the likeliest ones there.
    completion: with the last piece of a request, from a session.
    accepted, proposed: drafts of the step, also those that a stop cut off.
    drafts: the drafts, if asked for, in the order of the tree's nodes: the root's children first.
    egag: how EGAG limited the drafts.
    draft_forwards: passes of the draft for the next tree, without the one that takes in accepted tokens.
    tree: the shape that was verified, None after a prompt.
    certain_tokens: how many tokens so far no stop string can remove any more; from a session.
    slot: where the request is or was, -1 if it never entered one.
    depth: how deep the drafts went.
    committed: tokens that the step committed.
    finished: None while the request goes on, then "stop", "length" or "error", with the reason in `error`.
    after_prompts: other prompts were read right before the step, so it took longer.
    size: how many slots the step covered, which decides its cost.
    logits: if asked for, float32 [n, V] for n tokens, on the device: the target's own, before grammars, penalties,
    biases, temperature and filters.
    """

    index: int
    request: Request = field(repr=False)
    tokens: list[int]
    text: str = ""
    logprobs: list[float] | None = None
    completion: Completion | None = None
    accepted: int = 0
    proposed: int = 0
    drafts: list[int] | None = None
    egag: GuideReading | None = None
    draft_forwards: int = 0
    tree: TreeSpec | None = None
    certain_tokens: int = 0
    slot: int = -1
    depth: int = 0
    committed: int = 0
    finished: str | None = None
    error: str | None = None
    after_prompts: bool = False
    size: int = 1
    logits: Tensor | None = field(default=None, repr=False)
    top_logprobs: list[TopTokens] | None = None
    prompt_logprobs: list[tuple[float, TopTokens]] | None = None

    def __str__(self) -> str:
        return self.text
