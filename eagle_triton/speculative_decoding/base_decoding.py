"""Decoding without drafts: one token per forward, and beam search."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from eagle_triton.speculative_decoding import printing
from eagle_triton.speculative_decoding.arguments import checked_end_tokens, checked_prompt, longest
from eagle_triton.speculative_decoding.engine_decoding import continue_on_engine, engine_for, why_not_greedy
from eagle_triton.speculative_decoding.logits_processor import GreedyProcessor, LogitsProcessor, draw
from eagle_triton.speculative_decoding.readers import CausalReader, EncoderDecoderReader
from eagle_triton.speculative_decoding.steps import StepRecord, Text
from eagle_triton.values import check_range

GREEDY = GreedyProcessor()


@torch.inference_mode()
def autoregressive_generate(
    inputs: list[int],
    model: Any,
    max_gen_len: int = 40,
    logits_processor: LogitsProcessor = GREEDY,
    eos_tokens_id: int | list[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    debug: bool = False,
    *,
    generator: torch.Generator | None = None,
    engine: bool | None = None,
) -> list[int]:
    """The tokens after `inputs`: at most max_gen_len, within the model's positions, up to an end token, which is kept.

    model: a causal language model of transformers. use_cache: give the model only new tokens; output is the same.
    generator: for random numbers, None: torch's. pad_token_id: as in the other calls; nothing is padded.
    debug: print each token.

    engine: True decodes on the engine, False by the model's own forward. None takes the engine if it gives the same
    tokens: with use_cache, `GreedyProcessor`, no generator, and a model that it can read. The log says which, and why.

    Raises ValueError for an empty prompt, one that the model cannot read, a max_gen_len below 0, and with engine=True
    for what the engine cannot decode.
    """
    reader = CausalReader(model)
    prompt = checked_prompt(inputs, reader)
    text = Text(prompt, longest(prompt, max_gen_len, reader), checked_end_tokens(eos_tokens_id), debug=debug)
    reason = why_not_greedy(use_cache, logits_processor, generator)
    with engine_for(engine, reason, reader, method="naive") as inference:
        if inference is not None:
            continue_on_engine(inference, text)
            return text.output
    Decoding(CausalReader(model, use_cache), logits_processor, generator).run(text)
    return text.output


@torch.inference_mode()
def autoregressive_generate_encoder_decoder(
    inputs: list[int],
    model: Any,
    max_gen_len: int = 40,
    logits_processor: LogitsProcessor = GREEDY,
    eos_tokens_id: int | list[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    debug: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> list[int]:
    """The decoder's tokens for the encoder's `inputs`: its start token, then up to max_gen_len.

    model: an encoder-decoder model of transformers, such as T5 or BART. The start token is
    config.decoder_start_token_id, or pad_token_id if that is not set. The engine has no encoders, so the model's own
    forward decodes. The rest is as in `autoregressive_generate`.
    """
    prompt = checked_prompt(inputs, CausalReader(model))
    reader = EncoderDecoderReader(model, prompt, use_cache)
    start = [start_token(model, pad_token_id)]
    text = Text(start, longest(start, max_gen_len, reader), checked_end_tokens(eos_tokens_id), debug=debug)
    Decoding(reader, logits_processor, generator).run(text)
    return text.tokens


def start_token(model: Any, pad_token_id: int) -> int:
    """A decoder's first token."""
    start = getattr(model.config, "decoder_start_token_id", None)
    return pad_token_id if start is None else int(start)


@dataclass
class Decoding:
    """The loop over a text's steps, here with the target alone. drafts: of the latest step."""

    target: CausalReader
    processor: LogitsProcessor
    generator: torch.Generator | None
    drafts: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if not callable(self.processor):
            raise TypeError(
                "logits_processor must be a LogitsProcessor, or a function from logits to probabilities, got "
                f"{self.processor!r:.60}"
            )

    def run(self, text: Text, first_target: bool = True) -> None:
        """Extend the text until it is finished. first_target: the first token comes without drafts."""
        self.begin(text, first_target)
        while not text.finished:
            self.step(text)

    def begin(self, text: Text, first_target: bool = True) -> None:
        """With first_target, append the target's first token."""
        if first_target and not text.finished:
            self.add_own_token(text)

    def step(self, text: Text) -> StepRecord:
        """Extend an unfinished text. Returns the step's record."""
        self.add_own_token(text)
        return StepRecord(None, None, None, 0, 0, 1)

    def add_own_token(self, text: Text) -> None:
        """Append the target's next token."""
        text.add(draw(self.processor, self.processor(self.target.logits(text.tokens)), self.generator)[0])


class Beam(NamedTuple):
    """A hypothesis: new tokens, the sum of their log-probabilities, and whether it has ended."""

    tokens: tuple[int, ...]
    log_prob: float
    finished: bool


@torch.inference_mode()
def beam_search_generate(
    inputs: list[int],
    model: Any,
    max_gen_len: int = 40,
    num_beams: int = 4,
    top_k: int = 3,
    min_length: float = 5.0,
    alpha: float = 1.2,
    eos_tokens_id: int | list[int] = 1,
    pad_token_id: int = 0,
    debug: bool = False,
    tokenizer: Any = None,
) -> list[int]:
    """The new tokens of the best of `num_beams` hypotheses. Each step tries the top_k next tokens of each.

    The score of n new tokens is the sum of their log-probabilities, divided by ((min_length + n) / (min_length + 1)) **
    alpha (Wu et al., arXiv 1609.08144, where min_length is 5); alpha 0: the sum alone. A hypothesis ends with an end
    token or pad_token_id; pad_token_id is not returned. Equal hypotheses count once. debug: print the beams of each
    step, as `tokenizer`'s tokens. The engine has no beams, so the model's own forward decodes.

    Raises ValueError for numbers out of range, and as `autoregressive_generate` does.
    """
    reader = CausalReader(model)
    prompt = checked_prompt(inputs, reader)
    most = longest(prompt, max_gen_len, reader) - len(prompt)
    end_tokens = checked_end_tokens(eos_tokens_id)
    check_range("num_beams", num_beams, 1)
    check_range("top_k", top_k, 1, reader.vocabulary)
    if min_length < 0 or not math.isfinite(min_length) or not math.isfinite(alpha):
        raise ValueError(f"min_length must be finite and at least 0, and alpha finite, got {min_length} and {alpha}")

    def score(beam: Beam) -> float:
        return beam.log_prob / ((min_length + len(beam.tokens)) / (min_length + 1)) ** alpha

    beams = [Beam((), 0.0, False)]
    for _ in range(most):
        candidates = {beam.tokens: beam for beam in beams if beam.finished}
        for beam in beams:
            if not beam.finished:
                log_probs = reader.logits([*prompt, *beam.tokens])[0].log_softmax(dim=-1)
                order = log_probs.argsort(descending=True, stable=True)[:top_k].tolist()
                for token in order:
                    tokens = (*beam.tokens, token)
                    ends = token in end_tokens or token == pad_token_id
                    candidates.setdefault(tokens, Beam(tokens, beam.log_prob + float(log_probs[token]), ends))
        beams = sorted(candidates.values(), key=score, reverse=True)[:num_beams]
        if debug:
            printing.beam_search_step([(score(beam), beam.tokens) for beam in beams], tokenizer)
        if all(beam.finished for beam in beams):
            break
    best = list(beams[0].tokens)
    return best[:-1] if best and best[-1] == pad_token_id and pad_token_id not in end_tokens else best
