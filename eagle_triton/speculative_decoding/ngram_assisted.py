"""NASD: speculative decoding with drafts from n-grams counted in the prompt and the output so far.

Without fillers this is adaptive n-gram parallel decoding (Ou et al., arXiv 2404.08698).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle_triton.engine.drafts.counted import MAX_N
from eagle_triton.inference.speculative_config import SpecMethod
from eagle_triton.speculative_decoding.arguments import checked_end_tokens, checked_prompt, longest
from eagle_triton.speculative_decoding.base_decoding import GREEDY, Decoding
from eagle_triton.speculative_decoding.engine_decoding import (
    EngineStep,
    engine_for,
    steps_on_engine,
    why_not_drafts,
    why_not_greedy,
)
from eagle_triton.speculative_decoding.logits_processor import LogitsProcessor, draw
from eagle_triton.speculative_decoding.ngram_storage import (
    CountingStorage,
    INgramStorage,
    NGramStorage,
    OneLevelNGramStorage,
)
from eagle_triton.speculative_decoding.readers import CausalReader
from eagle_triton.speculative_decoding.steps import StepRecord, Text
from eagle_triton.values import check_range, check_weight, checked_integer


@torch.inference_mode()
def ngram_assisted_speculative_generate(
    inputs: list[int],
    ngramstorage: INgramStorage,
    target: Any,
    tokenizer: Any = None,
    gamma: int = 5,
    filler_top_k: int = 3,
    logits_processor: LogitsProcessor = GREEDY,
    max_gen_len: int = 40,
    eos_tokens_id: int | list[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    first_target: bool = True,
    stop_if_unknown: bool = False,
    debug: bool = False,
    *,
    filler_weight: float = 1,
    generator: torch.Generator | None = None,
    trace: list[StepRecord] | None = None,
    engine: bool | None = None,
) -> tuple[list[int], float]:
    """(the tokens after `inputs`, as the target alone draws them, and accepted / proposed drafts).

    ngramstorage counts the prompt, then each committed token. It keeps earlier counts until `reset()`. filler_top_k:
    also count this many of the target's largest logits after each of these contexts, `filler_weight` times each; 1:
    none. The token at each position is the target's own draw, and drafts are accepted while equal to it.

    stop_if_unknown: propose nothing after an unknown context; otherwise propose a random token, which is seldom right.
    A step without drafts gives one token and counts no proposal. The rest is as in `speculative_generate`.

    engine: True decodes on the engine, False by the target's own forward. None takes the engine if it gives the same
    tokens: as in `autoregressive_generate`, with first_target, stop_if_unknown, no fillers, and an empty `NGramStorage`
    or `OneLevelNGramStorage`, which then gets the same counts.

    Raises ValueError for an empty prompt, one that the target cannot read, a storage with a larger vocabulary, numbers
    out of range, and with engine=True for what the engine cannot decode.
    """
    checked_integer("gamma", gamma, 1)
    plain = CausalReader(target, False, "target")
    prompt = checked_prompt(inputs, plain)
    check_counting(ngramstorage, plain, filler_top_k, filler_weight)
    ends = checked_end_tokens(eos_tokens_id)
    text = Text(prompt, longest(prompt, max_gen_len, plain), ends, debug=debug, tokenizer=tokenizer, trace=trace)
    reason = (
        why_not_greedy(use_cache, logits_processor, generator)
        or why_not_drafts(first_target, gamma, SpecMethod.NASD)
        or why_not_counted(ngramstorage, stop_if_unknown, filler_top_k, filler_weight)
    )
    kind = "basic" if type(ngramstorage) is NGramStorage else "onelevel"
    n = ngramstorage.n if reason is None else None  # a storage of one's own may have none
    counted: dict[str, Any] = {"ngram_n": n, "ngram_storage": kind, "filler_top_k": 1}
    with engine_for(engine, reason, plain, method="nasd", num_speculative_tokens=gamma, **counted) as inference:
        if inference is not None:
            ngramstorage.initialize(_row(prompt))
            for step in steps_on_engine(inference, text, gamma):
                learn_step(ngramstorage, text, step, gamma)
            return text.output, text.acceptance_rate
    reader = CausalReader(target, use_cache, "target")
    decoding = NgramDecoding(
        reader, logits_processor, generator, ngramstorage, gamma, filler_top_k, filler_weight, stop_if_unknown
    )
    decoding.run(text, first_target)
    return text.output, text.acceptance_rate


@dataclass
class NgramDecoding(Decoding):
    """The decoding loop with a target and a storage.

    Raises ValueError for a storage with a larger vocabulary, and numbers out of range.
    """

    storage: INgramStorage
    gamma: int
    filler_top_k: int
    filler_weight: float
    stop_if_unknown: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counting(self.storage, self.target, self.filler_top_k, self.filler_weight)

    def begin(self, text: Text, first_target: bool = True) -> None:
        """Count the prompt and, with first_target, let the target give the first token."""
        prompt = list(text.tokens)
        self.storage.initialize(_row(prompt))
        super().begin(text, first_target)
        if text.output:
            self.storage.update(_row(prompt), _row(text.output))

    def step(self, text: Text) -> StepRecord:
        """Draft, verify, extend the text, and count its new tokens."""
        before = len(text.tokens)
        drafts = self.drafts = propose(self.storage, text, min(self.gamma, text.room), self.stop_if_unknown)
        logits = self.target.logits(text.tokens + drafts, len(drafts) + 1)
        own = draw(self.processor, self.processor(logits), self.generator)
        accepted = next((place for place, token in enumerate(drafts) if token != own[place]), len(drafts))
        token = None if text.ends_with(drafts[:accepted]) else own[accepted]
        record = text.take_step(drafts, accepted, token, self.gamma)
        filled = self.filler_top_k > 1 and self.filler_weight > 0
        fillers = logits.topk(self.filler_top_k).indices.cpu() if filled else None
        learn(self.storage, text.tokens, before, fillers, self.filler_weight)
        return record


def propose(storage: INgramStorage, text: Text, most: int, stop_if_unknown: bool) -> list[int]:
    """Up to `most` drafts after the text, none after an end token."""
    drafts: list[int] = []
    while len(drafts) < most and not text.ends_with(drafts):
        token, known = storage.next_token(_row(text.tokens + drafts))
        if stop_if_unknown and not bool(known):
            break
        drafts.append(int(token))
    return drafts


def check_counting(storage: INgramStorage, target: CausalReader, filler_top_k: int, filler_weight: float) -> None:
    """Raise TypeError for what is no storage, ValueError for one with a larger vocabulary or fillers out of range."""
    if not isinstance(storage, INgramStorage):
        raise TypeError(f"ngramstorage must be an NGramStorage or another INgramStorage, got {type(storage).__name__}")
    check_range("filler_top_k", filler_top_k, 1, target.vocabulary)
    check_weight("filler_weight", filler_weight)
    if storage.vocab_size > target.vocabulary:
        raise ValueError(
            f"the storage's vocabulary has {storage.vocab_size} tokens, the target's only {target.vocabulary}"
        )


def why_not_counted(
    storage: INgramStorage, stop_if_unknown: bool, filler_top_k: int, filler_weight: float
) -> str | None:
    """Why the engine cannot count like a storage, None if it can."""
    if not isinstance(storage, CountingStorage) or type(storage) not in (NGramStorage, OneLevelNGramStorage):
        return f"the engine counts as NGramStorage and OneLevelNGramStorage do, got {type(storage).__name__}"
    if storage.n > MAX_N:
        return f"the engine counts n-grams of at most {MAX_N} tokens, got n={storage.n}"
    if not stop_if_unknown:
        return "stop_if_unknown=False drafts random tokens after an unknown context"
    if filler_top_k > 1 and filler_weight > 0:
        return f"filler_top_k={filler_top_k} counts logits in the storage, and the engine keeps them on the device"
    if not storage.empty:
        return "the storage has counted already, and the engine begins with an empty table"
    return None


def learn_step(storage: INgramStorage, text: Text, step: EngineStep, gamma: int) -> None:
    """Count the tokens that a step of the engine added to the text, as in `NgramDecoding`."""
    before = len(text.tokens) - (1 if step.record is None else step.record.emitted)
    if step.record is not None:
        most = min(gamma, text.total - before - 1)
        if len(step.drafts) < most and not text.ends_with(step.drafts):
            storage.next_token(_row(text.tokens[:before] + step.drafts))  # unknown context: draws from its generator
    learn(storage, text.tokens, before)


def learn(
    storage: INgramStorage, tokens: list[int], before: int, fillers: Tensor | None = None, weight: float = 1
) -> None:
    """Count tokens[before:], and after the context of each its fillers [m, k], `weight` times."""
    options = {} if weight == 1 else {"weight": weight}  # a user's own storage may take no weight
    for place in range(before, len(tokens)):
        context = _row(tokens[:place])
        storage.update(context, _row(tokens[place : place + 1]))
        if fillers is not None:
            storage.update(context, fillers[place - before, None], **options)


def _row(tokens: list[int]) -> Tensor:
    return torch.tensor([tokens])
