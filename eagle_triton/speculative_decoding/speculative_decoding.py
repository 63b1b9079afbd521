"""Speculative decoding: a drafter proposes tokens. The target verifies these in one forward and keeps its distribution.

Leviathan et al., Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192); Chen et al.,
Accelerating Large Language Model Decoding with Speculative Sampling (arXiv 2302.01318).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_triton.inference.speculative_config import SpecMethod
from eagle_triton.speculative_decoding.arguments import (
    check_same_vocabulary,
    checked_end_tokens,
    checked_prompt,
    longest,
)
from eagle_triton.speculative_decoding.base_decoding import GREEDY, Decoding, start_token
from eagle_triton.speculative_decoding.egag import EntropyGuide, egag_config
from eagle_triton.speculative_decoding.engine_decoding import (
    engine_for,
    steps_on_engine,
    why_not_drafts,
    why_not_greedy,
)
from eagle_triton.speculative_decoding.logits_processor import LogitsProcessor, draw
from eagle_triton.speculative_decoding.readers import CausalReader, EncoderDecoderReader
from eagle_triton.speculative_decoding.steps import StepRecord, Text


@torch.inference_mode()
def speculative_generate(
    inputs: list[int],
    drafter: Any,
    target: Any,
    tokenizer: Any = None,
    gamma: int = 5,
    use_egag: bool = False,
    gamma_min: int = 1,
    gamma_max: int | None = None,
    egag_ema_beta: float = 0.0,
    logits_processor: LogitsProcessor = GREEDY,
    max_gen_len: int = 40,
    eos_tokens_id: int | list[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    skip_sample_adjustment: bool = False,
    first_target: bool = True,
    debug: bool = False,
    *,
    egag_scale: float | None = None,
    egag_mode: str = "gamma",
    egag_stop_threshold: float = 0.3,
    egag_stop_lambda: float = 0.2,
    generator: torch.Generator | None = None,
    trace: list[StepRecord] | None = None,
    engine: bool | None = None,
) -> tuple[list[int], float]:
    """(the tokens after `inputs`, as the target alone draws them, and accepted / proposed drafts).

    drafter, target: causal language models of transformers with one vocabulary; logits may be padded to other sizes.
    tokenizer: tells padding from another vocabulary, and decodes tokens for debug. gamma: drafts per step; fewer if
    max_gen_len or a model's positions leave no room, and none after an end token.

    use_egag: choose the number by the entropy of the drafter's logits, between gamma_min and gamma_max (None: gamma);
    `EGAGConfig` explains all EGAG options.

    logits_processor makes the distributions of both models. max_gen_len, eos_tokens_id, pad_token_id, use_cache: see
    `autoregressive_generate`. skip_sample_adjustment: after a rejection draw from the target's distribution instead of
    the residual; the output then follows another distribution. first_target: the first token comes without drafts.
    debug: print each step. generator: for random numbers, None: torch's. trace: gets a record of each step.

    engine: True decodes on the engine, False by the models' own forward. None takes the engine if it gives the same
    tokens: as in `autoregressive_generate`, with first_target, without skip_sample_adjustment, and if the drafter has
    positions for the longest text and the target's vocabulary size, dtype and device.

    Raises ValueError for an empty prompt, one that a model cannot read, vocabularies that differ, numbers out of range,
    and with engine=True for what the engine cannot decode.
    """
    egag = egag_config(
        gamma, gamma_min, gamma_max, egag_ema_beta, egag_scale, egag_mode, egag_stop_threshold, egag_stop_lambda
    )
    (plain_drafter, plain_target), prompt = checked_pair(inputs, drafter, target, tokenizer)
    ends = checked_end_tokens(eos_tokens_id)
    text = Text(prompt, longest(prompt, max_gen_len, plain_target), ends, debug=debug, tokenizer=tokenizer, trace=trace)
    rule = replace(egag, exact=True) if use_egag else None
    drafts = egag.gamma_max if use_egag and egag.gamma_max is not None else gamma
    reason = why_not_greedy(use_cache, logits_processor, generator) or why_not_drafts(
        first_target, drafts, SpecMethod.DRAFT_MODEL
    )
    if reason is None and skip_sample_adjustment:
        reason = "skip_sample_adjustment=True is no rule of the engine"
    if reason is None and plain_drafter.max_positions is not None and plain_drafter.max_positions < text.total:
        reason = f"the drafter has {plain_drafter.max_positions} positions, and the text may have {text.total} tokens"
    options = {"method": "draft_model", "num_speculative_tokens": drafts}
    with engine_for(engine, reason, plain_target, plain_drafter, rule, **options) as inference:
        if inference is not None:
            for _ in steps_on_engine(inference, text, gamma, rule):
                pass
            return text.output, text.acceptance_rate
    drafting_reader = CausalReader(drafter, use_cache, "drafter")
    target_reader = CausalReader(target, use_cache, "target")
    guide = EntropyGuide(egag) if use_egag else None
    decoding = SpeculativeDecoding(
        target_reader, logits_processor, generator, drafting_reader, gamma, guide, skip_sample_adjustment
    )
    decoding.run(text, first_target)
    return text.output, text.acceptance_rate


@torch.inference_mode()
def speculative_generate_encoder_decoder(
    inputs: list[int],
    drafter: Any,
    target: Any,
    tokenizer: Any = None,
    gamma: int = 5,
    use_egag: bool = False,
    gamma_min: int = 1,
    gamma_max: int | None = None,
    egag_ema_beta: float = 0.0,
    logits_processor: LogitsProcessor = GREEDY,
    max_gen_len: int = 40,
    eos_tokens_id: int | list[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    skip_sample_adjustment: bool = False,
    first_target: bool = True,
    debug: bool = False,
    *,
    egag_scale: float | None = None,
    egag_mode: str = "gamma",
    egag_stop_threshold: float = 0.3,
    egag_stop_lambda: float = 0.2,
    generator: torch.Generator | None = None,
    trace: list[StepRecord] | None = None,
) -> tuple[list[int], float]:
    """(the decoder's tokens for the encoder's `inputs`, and accepted / proposed drafts).

    drafter, target: encoder-decoder models of transformers with one vocabulary; each encodes `inputs` itself. The
    tokens begin with the target's start token, see `autoregressive_generate_encoder_decoder`. The models' own forward
    decodes. The rest is as in `speculative_generate`.
    """
    egag = egag_config(
        gamma, gamma_min, gamma_max, egag_ema_beta, egag_scale, egag_mode, egag_stop_threshold, egag_stop_lambda
    )
    _, prompt = checked_pair(inputs, drafter, target, tokenizer)
    drafting_reader = EncoderDecoderReader(drafter, prompt, use_cache, "drafter")
    target_reader = EncoderDecoderReader(target, prompt, use_cache, "target")
    start, ends = [start_token(target, pad_token_id)], checked_end_tokens(eos_tokens_id)
    text = Text(start, longest(start, max_gen_len, target_reader), ends, debug=debug, tokenizer=tokenizer, trace=trace)
    guide = EntropyGuide(egag) if use_egag else None
    decoding = SpeculativeDecoding(
        target_reader, logits_processor, generator, drafting_reader, gamma, guide, skip_sample_adjustment
    )
    decoding.run(text, first_target)
    return text.tokens, text.acceptance_rate


def checked_pair(
    inputs: list[int], drafter: Any, target: Any, tokenizer: Any
) -> tuple[tuple[CausalReader, CausalReader], list[int]]:
    """Readers without caches of a drafter and a target, and the prompt. Raises ValueError if these do not fit."""
    readers = CausalReader(drafter, False, "drafter"), CausalReader(target, False, "target")
    check_same_vocabulary(*readers, tokenizer)
    return readers, checked_prompt(inputs, *readers)


class Drafts(NamedTuple):
    """Proposed tokens, and the distribution q [V] from which each was drawn."""

    tokens: list[int]
    q: list[Tensor]


@dataclass
class SpeculativeDecoding(Decoding):
    """The decoding loop with any two readers. guide: EGAG, None: always gamma drafts."""

    drafter: CausalReader
    gamma: int
    guide: EntropyGuide | None = None
    skip_sample_adjustment: bool = False

    def step(self, text: Text) -> StepRecord:
        """Draft, verify, and extend the text."""
        drafts, gamma = self.draft(text)
        self.drafts = drafts.tokens
        p = self.processor(self.target.logits(text.tokens + drafts.tokens, len(drafts.tokens) + 1))
        accepted = self.judge(drafts, p)
        ends = text.ends_with(drafts.tokens[:accepted])
        own = None if ends else self.own_token(drafts, p, accepted)
        entropies = (self.guide.h_norm, self.guide.h_ema) if self.guide and gamma is not None else (None, None)
        return text.take_step(drafts.tokens, accepted, own, gamma, entropies)

    def draft(self, text: Text) -> tuple[Drafts, int | None]:
        """A step's drafts, and how many were wanted: None with EGAG if there was no room."""
        drafts = Drafts([], [])
        gamma = None if self.guide else self.gamma
        most = text.room if gamma is None else min(gamma, text.room)
        while len(drafts.tokens) < most and self.drafter.can_read(ids := text.tokens + drafts.tokens):
            logits = self.drafter.logits(ids)
            if self.guide and not drafts.tokens:
                gamma = self.guide.gamma(logits[0])
                most = min(gamma, text.room)
            elif self.guide and self.guide.stops(logits[0], len(drafts.tokens)):
                gamma = len(drafts.tokens)
                break
            q = self.processor(resized(logits, self.target.vocabulary))
            drafts.tokens.extend(draw(self.processor, q, self.generator))
            drafts.q.append(q[0].to(self.target.device))
            if text.ends_with(drafts.tokens):
                break
        return drafts, gamma

    def judge(self, drafts: Drafts, p: Tensor) -> int:
        """How many drafts are accepted. Each is, with probability min(1, p / q), until the first that is not."""
        if not drafts.tokens:
            return 0
        token = torch.tensor(drafts.tokens, device=p.device)[:, None]
        q_token = torch.stack(drafts.q).gather(1, token)[:, 0]
        p_token = p[:-1].gather(1, token)[:, 0]
        place = p.device if self.generator is None else self.generator.device
        coins = torch.rand(len(token), generator=self.generator, device=place, dtype=torch.float64).to(p.device)
        return int((coins * q_token < p_token).cumprod(dim=0).sum())

    def own_token(self, drafts: Drafts, p: Tensor, accepted: int) -> int:
        """The target's token after accepted drafts, from p [drafts + 1, V], after a rejection from the residual."""
        law = p[accepted]
        if accepted < len(drafts.tokens) and not self.skip_sample_adjustment:
            residual = max_fn(law - drafts.q[accepted])
            law = residual if bool(residual.any()) else law  # p = q leaves nothing, but for rounding
        return draw(self.processor, law[None], self.generator)[0]


def max_fn(x: Tensor) -> Tensor:
    """The positive part, scaled to a sum of 1 along the last dimension; zeros where nothing is positive."""
    positive = x.relu()
    total = positive.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, positive / total, positive)


def resized(logits: Tensor, vocabulary: int) -> Tensor:
    """Logits [..., V'] cut to `vocabulary` tokens, or padded with -inf."""
    return torch.nn.functional.pad(logits, (0, vocabulary - logits.shape[-1]), value=float("-inf"))
