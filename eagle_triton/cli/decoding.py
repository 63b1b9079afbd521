"""Decodes one prompt by any method of the program.

The engine decodes if it has the method; otherwise the models' own forwards do (`own_forward.py`), and the answer has a
note.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from eagle_triton.cli.own_forward import OwnForward, egag_config
from eagle_triton.cli.settings import METHODS, ON_ENGINE, READERS, Settings
from eagle_triton.comparison.answer import OWN_FORWARD, Answer, Counts, Step, Steps, open_session, session_steps, take
from eagle_triton.demo import BLOCK, DRAFT, PAIR, path_of
from eagle_triton.devices import choose_threads, find_device
from eagle_triton.draft_choice import DraftChoice, load_draft
from eagle_triton.engine.drafts.counted import MAX_FILLERS, MAX_N
from eagle_triton.inference.config import EAGLEConfig
from eagle_triton.inference.eagle_inference import EAGLEInference
from eagle_triton.inference.speculative_config import SpecMethod, SpeculativeConfig
from eagle_triton.inference.text import TextStream
from eagle_triton.models.block_drafter import BlockDrafter
from eagle_triton.models.loading import HEAD_FOLDERS, is_saved_pair, locate, saved_target
from eagle_triton.models.mtp import MTP, has_mtp
from eagle_triton.speculative_decoding.readers import max_positions

NGRAM_OPTIONS = ("ngram_storage", "ngram_n", "filler_weight", "reset_in_between")  # options with the same names there
DRAFTS_TREES = ("eagle", "hybrid", "block_tree")
BLOCK_TREE = dict(topk=8, num_draft_tokens=16)  # as deep as the block
MAX_NASD_DRAFTS = SpecMethod.NASD.most_drafts
SUFFIX_DRAFTS = 8  # the most drafts per step of suffix and hybrid from repeated text
MAX_ENGINES = 10  # every method, and speculative with EGAG and without
MIN_ROWS = 256  # per sequence: one graph serves all shorter sequences


def open_decoder(
    target: str, drafter: str | None, head: str | None, block_drafter: str | None, device: str | None, dtype: str | None
) -> Decoder:
    """The decoder of a command line. Raises ValueError for a device that does not exist here."""
    place = find_device(device)
    choose_threads(place, target, drafter, head, block_drafter)
    return Decoder(target, drafter, head, block_drafter, place, None if dtype is None else getattr(torch, dtype))


class Decoder:
    """Loads the models of a method when they are first needed, and keeps them.

    target: a directory, a hub id, "demo", "demo-gdn" or "demo-moe", or a causal language model. drafter: a directory, a
    hub id, "demo-draft", or a model with the target's vocabulary; None: no drafter. head: a directory or hub id of an
    EAGLE head; None: the head or MTP layers beside the target. block_drafter: a directory, a hub id or "demo-block";
    None: no block drafter. `READERS` has the methods that read these three. device: None: a GPU if there is one.
    dtype: None: float32 on a CPU, else the checkpoint's. Raises ValueError and FileNotFoundError when it loads
    something.
    """

    def __init__(
        self,
        target: str | nn.Module = PAIR,
        drafter: str | nn.Module | None = DRAFT,
        head: str | None = None,
        block_drafter: str | None = BLOCK,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._target_given, self._drafter_given, self._head_given = target, drafter, head
        self._block_drafter_given = block_drafter
        self._device, self._dtype = device, dtype
        self._engines: dict[tuple[str, EAGLEConfig], EAGLEInference] = {}  # the last one decoded last
        self._own_forward = OwnForward()

    # --- loaded models ---

    @cached_property
    def _plain(self) -> EAGLEInference:
        """The target alone."""
        config = EAGLEConfig(speculative=SpeculativeConfig(method="naive"), dtype=self._dtype)
        return EAGLEInference(None, self._places[0], config, self._device)

    @cached_property
    def _places(self) -> tuple[str | nn.Module, str | None]:
        """The target or its path; and its head's path, `MTP` for layers that were saved with the target, None for no
        head."""
        target, head = self._target_given, self._head_given
        if isinstance(target, nn.Module):
            return target, head
        if head is None and is_saved_pair(target):
            return locate(target, None, None)[:2]
        place = saved_target(target)
        return place, MTP if head is None and has_mtp(place) else head

    @property
    def target(self) -> Any:
        """The target, a causal language model."""
        return self._plain.pair.target_model

    @property
    def device(self) -> torch.device:
        """The device of the models."""
        return self._plain.pair.view.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the target's weights."""
        return self._plain.pair.view.dtype

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer. Raises ValueError if it has none."""
        if self._plain.tokenizer is None:
            raise ValueError(f"target {self._target_given!s:.60}: no tokenizer was saved with it")
        return self._plain.tokenizer

    @cached_property
    def drafter(self) -> Any:
        """The drafter, a causal language model on the target's device. Raises ValueError if there is none."""
        if self._drafter_given is None:
            raise ValueError(
                "drafter: none was given; drafter and speculative need a model with the target's vocabulary"
            )
        if isinstance(self._drafter_given, nn.Module):
            return self._drafter_given
        options = SpeculativeConfig(method="draft_model", model=self._drafter_given)
        return EAGLEInference(None, self.target, options).pair.draft_model

    @cached_property
    def head(self) -> Any:
        """The target's head, or `MTP`. Raises ValueError if there is none."""
        _, place = self._places
        if place is None:
            raise ValueError(
                f"head: none is beside the target {self._target_given!s:.60}; eagle and hybrid need a directory or "
                "hub id of an EAGLE head"
            )
        if place == MTP:
            return MTP
        return load_draft(DraftChoice("head", path_of(place, HEAD_FOLDERS[True])), self.target)

    @cached_property
    def block_drafter(self) -> BlockDrafter:
        """The block drafter, on the target's device. Raises ValueError if there is none."""
        if self._block_drafter_given is None:
            raise ValueError("block_drafter: none was given; block and block_tree need a directory or hub id of one")
        place = path_of(self._block_drafter_given, HEAD_FOLDERS[True])  # for "demo" its head, which is then refused
        return load_draft(DraftChoice("block drafter", place), self.target)

    # --- decoding ---

    def load(self, method: str, settings: Settings) -> None:
        """Load a method's models now, so that its first answer does not wait for them. Raises as `decode`."""
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        if not settings.cache and method in ON_ENGINE:
            why = "only the engine runs it, and the engine always keeps a cache"
            raise ValueError(f"cache must be on for method {method}: {why}")
        if _why_own_forward(method, settings) is None:
            self._engine(method, settings)
        else:
            self._models(method)

    def decode(
        self,
        method: str,
        prompt_ids: Sequence[int],
        settings: Settings,
        on_step: Callable[[Step, str], None] | None = None,
        *,
        show_drafts: bool = False,
    ) -> Answer:
        """Answer a prompt. on_step(step, text) is called after each step, with the text that has become certain.

        show_drafts: steps have their drafts, if these are a chain. A KeyboardInterrupt ends the answer, with finished
        "interrupted". Raises ValueError for an unknown method, unsupported settings, a prompt without tokens or beyond
        the models' positions, and models that do not fit; RuntimeError if the target's logits are NaN.
        """
        self.load(method, settings)
        prompt = [int(token) for token in prompt_ids]
        stream = TextStream(self.tokenizer, prompt)
        self.check_prompt(method, prompt)
        reason, counts = _why_own_forward(method, settings), Counts()
        if reason is None:
            steps = self._on_engine(method, prompt, settings, counts, show_drafts)
            return take(method, steps, counts, stream, on_step)
        target, drafter = self._models(method)
        with torch.inference_mode():
            steps = self._own_forward.steps(
                target, drafter, prompt, settings, counts,
                ngrams=method == "ngram", tokenizer=self.tokenizer, stop_ids=self._plain.pair.stop_ids,
            )  # fmt: skip
            notes = (f"decoded by the {OWN_FORWARD}: {reason}",)
            return take(method, steps, counts, stream, on_step, engine=OWN_FORWARD, notes=notes)

    def check_prompt(self, method: str, prompt: Sequence[int]) -> None:
        """Raise ValueError for a prompt without tokens, or one that leaves no position for an answer."""
        if not prompt:
            raise ValueError("prompt: must have at least one token, got none")
        name, model = ("drafter", self.drafter) if method == "drafter" else ("target", self.target)
        positions = max_positions(model)
        if positions is not None and len(prompt) >= positions:
            raise ValueError(
                f"prompt: {len(prompt)} tokens leave no room for new ones in the {positions} positions of the {name}"
            )

    def _models(self, method: str) -> tuple[Any, Any]:
        """The model that decodes, and the one that drafts for it, if a model does."""
        if method == "drafter":
            return self.drafter, None
        reads = next((name for name, methods in READERS.items() if method in methods), None)
        return self.target, None if reads is None else getattr(self, reads)

    def _engine(self, method: str, settings: Settings) -> EAGLEInference:
        """The EAGLEInference of a method and its options. The last `MAX_ENGINES` are kept, with their graphs."""
        config = _engine_config(method, settings)
        if method == "block_tree":
            config = config.changed(num_steps=self.block_drafter.config.drafts, **BLOCK_TREE)
        inference = self._engines.pop((method, config), None)
        if inference is None:
            model, draft = self._models(method)
            inference = EAGLEInference(draft, model, config)
        self._engines[method, config] = inference
        while len(self._engines) > MAX_ENGINES:
            del self._engines[next(iter(self._engines))]
        return inference

    def _on_engine(
        self, method: str, prompt: list[int], settings: Settings, counts: Counts, show_drafts: bool
    ) -> Steps:
        inference = self._engine(method, settings)
        if settings.reset_in_between:
            inference.forget_outputs()
        rows = max(MIN_ROWS, 1 << (len(prompt) + settings.length - 1).bit_length())
        chain = method not in DRAFTS_TREES
        fixed_gamma = method == "ngram" or (method == "speculative" and not settings.egag)
        with open_session(inference, rows, report_drafts=show_drafts and chain) as session:
            stop_ids = self._plain.pair.stop_ids
            sampling: dict[str, Any] = {"temperature": 0.0}
            if not settings.greedy:
                sampling = {**settings.processor_arguments, "seed": settings.seed}
            session.submit(prompt, settings.length, stop_token_ids=stop_ids, **sampling)
            room = settings.length
            for step, last in session_steps(session, counts, settings.gamma if fixed_gamma else None):
                yield _within(step, counts.finished, room if chain else None) if last else step, last
                room -= len(step.tokens)


def _within(step: Step, finished: str, room: int | None) -> Step:
    """The last step without the drafts that the end cut off. room: tokens that the answer could still take; None: the
    drafts are a tree, and every node counts as proposed."""
    accepted, proposed, drafts = min(step.accepted, len(step.tokens)), step.proposed, step.drafts
    if room is not None:
        ends_on_draft = finished == "stop" and len(step.tokens) <= step.accepted
        proposed = min(proposed, len(step.tokens) if ends_on_draft else room)
    return replace(step, accepted=accepted, proposed=proposed, drafts=drafts and drafts[:proposed])


# --- the way in which a method is decoded ---


def _why_own_forward(method: str, settings: Settings) -> str | None:
    """Why the engine cannot decode this; None if it can."""
    if not settings.cache:
        return "the engine always keeps a cache"
    if method == "ngram":
        for name, most in (("ngram_n", MAX_N), ("gamma", MAX_NASD_DRAFTS), ("top_k_filler", MAX_FILLERS)):
            if getattr(settings, name) > most:
                return f"{name} is {getattr(settings, name)}, but the engine counts n-grams with at most {most}"
    return None


def _engine_config(method: str, settings: Settings) -> EAGLEConfig:
    """The engine's options. No fallback to plain decoding: drafts must not depend on measured times."""
    if method in ("target", "drafter"):
        return EAGLEConfig(speculative=SpeculativeConfig(method="naive"))
    if method not in ("speculative", "ngram", "suffix"):
        return EAGLEConfig(suffix_drafts=SUFFIX_DRAFTS if method == "hybrid" else 0, fallback=False)
    options: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": SUFFIX_DRAFTS}
    egag = egag_config(settings) if method == "speculative" and settings.egag else None
    if method == "speculative":
        drafts = settings.gamma_max if settings.egag else settings.gamma
        options = {"method": "draft_model", "num_speculative_tokens": drafts}
    elif method == "ngram":
        options = {"method": "nasd", "num_speculative_tokens": settings.gamma, "filler_top_k": settings.top_k_filler}
        options |= {name: getattr(settings, name) for name in NGRAM_OPTIONS}
    return EAGLEConfig(speculative=SpeculativeConfig(**options), egag=egag, fallback=False)
