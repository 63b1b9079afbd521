"""Answers with the models' own forwards, for settings that the engine does not support."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from eagle_triton.cli.settings import Settings
from eagle_triton.comparison.answer import Counts, Step, Steps
from eagle_triton.speculative_decoding import logits_processor as processors
from eagle_triton.speculative_decoding.arguments import check_same_vocabulary, checked_prompt, longest
from eagle_triton.speculative_decoding.base_decoding import Decoding
from eagle_triton.speculative_decoding.egag import EGAGConfig, EntropyGuide
from eagle_triton.speculative_decoding.logits_processor import LogitsProcessor
from eagle_triton.speculative_decoding.ngram_assisted import NgramDecoding
from eagle_triton.speculative_decoding.ngram_storage import INgramStorage, NGramStorage, OneLevelNGramStorage
from eagle_triton.speculative_decoding.readers import CausalReader
from eagle_triton.speculative_decoding.speculative_decoding import SpeculativeDecoding
from eagle_triton.speculative_decoding.steps import Text


class OwnForward:
    """Decodes with the forwards of a target and perhaps a drafter. Keeps the n-gram storage between answers."""

    def __init__(self) -> None:
        self._storage: tuple[tuple[str, int], INgramStorage] | None = None  # with the options it was made with

    def steps(
        self, target: nn.Module, drafter: nn.Module | None, prompt: list[int], settings: Settings, counts: Counts,
        *, ngrams: bool, tokenizer: Any, stop_ids: Iterable[int],
    ) -> Steps:  # fmt: skip
        """The steps of an answer. drafter: drafts if given; else n-grams do, if `ngrams`; else nothing drafts.

        Raises ValueError for a prompt that does not fit, and for a drafter with another vocabulary.
        """
        reader = CausalReader(target, settings.cache, "target")
        readers = [reader]
        processor, generator = processor_of(settings), torch.Generator().manual_seed(settings.seed)
        if drafter is not None:
            drafting = CausalReader(drafter, settings.cache, "drafter")
            readers.append(drafting)
            check_same_vocabulary(drafting, reader, tokenizer)
            guide = EntropyGuide(egag_config(settings)) if settings.egag else None
            decoding: Decoding = SpeculativeDecoding(reader, processor, generator, drafting, settings.gamma, guide)
        elif ngrams:
            decoding = NgramDecoding(
                reader, processor, generator, self._ngram_storage(settings, reader.vocabulary), settings.gamma,
                settings.top_k_filler, settings.filler_weight, True,
            )  # fmt: skip
        else:
            decoding = Decoding(reader, processor, generator)
        text = Text(prompt, longest(checked_prompt(prompt, *readers), settings.length, reader), frozenset(stop_ids))
        for step in _steps_of(decoding, text):
            counts.target_forwards = reader.forwards
            counts.drafter_forwards = sum(drafting.forwards for drafting in readers[1:])
            yield step, text.finished
        counts.finished = "stop" if text.ended else "length"

    def _ngram_storage(self, settings: Settings, vocabulary: int) -> INgramStorage:
        """The storage of earlier answers: emptied if the settings say so, and replaced if they name another."""
        options = (settings.ngram_storage, settings.ngram_n)
        if self._storage is None or self._storage[0] != options:
            kind = NGramStorage if settings.ngram_storage == "basic" else OneLevelNGramStorage
            self._storage = (options, kind(settings.ngram_n, vocabulary))
        elif settings.reset_in_between:
            self._storage[1].reset()
        return self._storage[1]


def _steps_of(decoding: Decoding, text: Text) -> Iterator[Step]:
    """The steps until the text is finished."""
    decoding.begin(text)
    yield Step((text.tokens[-1],), drafts=())
    while not text.finished:
        record = decoding.step(text)
        yield Step(
            tuple(text.tokens[-record.emitted :]), record.accepted, record.proposed,
            tuple(decoding.drafts), record.h_norm, record.h_ema, record.gamma,
        )  # fmt: skip


def processor_of(settings: Settings) -> LogitsProcessor:
    """The way to choose a token."""
    if settings.greedy:
        return processors.GreedyProcessor()
    kinds: dict[str, Any] = {
        "multinomial": processors.MultinomialProcessor,
        "topk": processors.TopKProcessor,
        "nucleus": processors.NucleusProcessor,
        "topknucleus": processors.TopKNucleusProcessor,
    }
    return kinds[settings.processor](**settings.processor_arguments)


def egag_config(settings: Settings) -> EGAGConfig:
    """The rule by which the number of drafts follows the drafter's entropy."""
    return EGAGConfig(
        settings.egag_gamma_min, settings.gamma_max, settings.egag_ema, settings.egag_scale, settings.egag_mode
    )
