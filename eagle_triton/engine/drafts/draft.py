"""What a draft is to the engine: who proposes the trees that the target verifies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.mixers import AcceptedPath, Mixer
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.prompt_chunks import PromptChunks
from eagle_triton.engine.state import DecodeState, Sequences
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.operands.adaptive_length import GuideTensors


class Draft(ABC):
    """Proposes the next tokens of all sequences of an engine, as trees.

    One object serves every sequence: what it knows of each lies in tensors by slot (`Sequences.draft_tensors`) and by
    shape of tree (`DecodeState.draft_tree_tensors`), which it makes once. For a prompt the engine calls `read_prompt`
    for each part of it, then `begin`, then `grow`; in a step `learn`, `extend`, then `grow`. Those of a step run inside
    a CUDA graph on a GPU: fixed shapes, nothing read by the host. A wrong draft costs speed, never output.
    """

    must_catch_up: ClassVar[bool] = False
    """Whether it knows committed tokens only if it is told: then plain steps keep their features for `catch_up`."""

    any_tree: ClassVar[bool] = False
    """Whether it can draft trees of any shape, not only that of `read_tree`."""

    @property
    def by_token(self) -> bool:
        """Whether each token is remembered by itself, so that it can do without those that pages hold already."""
        return True

    @property
    def mixers(self) -> Sequence[Mixer]:
        """Those of its layers, by which it reads prompts; none by default."""
        return ()

    @abstractmethod
    def read_tree(self) -> TreeSpec:
        """The tree to draft in the next generation; it may be another one each time."""

    @property
    def learns(self) -> bool:
        """Whether it learns from what the target says: then plain steps call `learn` too."""
        return False

    @property
    def vocabulary(self) -> int | None:
        """How many different tokens it may propose, which bounds a node's children; None: any."""
        return None

    def weight_bytes(self, spec: TreeSpec) -> int:
        """Bytes of weights that drafting one tree of this shape reads; none by default."""
        return 0

    def new_slot_tensors(self, pages: SlotPages) -> Any:
        """What it keeps for the sequence in each slot, on the device of these slots' pages, see slots.py; None:
        nothing."""
        return None

    def guide(self, sequences: Sequences) -> GuideTensors | None:
        """What says how deep the next trees may be, where they are adaptive; None: nothing does."""
        return None

    def levels_for(self, spec: TreeSpec, gamma: float) -> int | None:
        """How many levels to score for trees of this shape that may be `gamma` deep; None: all."""
        return None

    def new_tree_tensors(self, spec: TreeSpec, slots: int, device: torch.device) -> Any:
        """What drafting trees of one shape takes beside the tree itself, see slots.py; None: nothing."""
        return None

    def read_prompt(self, ops: Operations, sequences: Sequences, pieces: PromptChunks, features: Tensor) -> None:
        """Take in pieces of prompts, which the target has just read. features [P, n, F]: the target's there."""

    def begin(self, ops: Operations, sequences: Sequences, features: Tensor, entering: Tensor) -> None:
        """The prompts of the slots in `entering` [B] bool are read and their roots chosen; the others stay as they are.

        features [B, 1, F]: the target's at the prompts' last tokens, arbitrary for the others.
        """

    def learn(self, ops: Operations, state: DecodeState, accepted: AcceptedPath, logits: Tensor) -> None:
        """Learn from a verification, whose tokens are committed already: nothing by default.

        logits [B, N, V]: the target's at the verified tree's nodes, by which they were judged: penalties and biases are
        in them, temperature and filters are not. Of a plain step the tree is the root alone.
        """

    def extend(self, ops: Operations, state: DecodeState, accepted: AcceptedPath, features: Tensor) -> None:
        """Take in what verification accepted. features [B, N, F]: the target's at the verified tree's nodes."""

    @abstractmethod
    def grow(self, ops: Operations, state: DecodeState) -> None:
        """Write the next tree into `state.tree`, from the tokens committed so far and the root behind them."""

    def end(self, sequences: Sequences, slot: int, prompt: int, length: int) -> None:
        """A sequence leaves its slot: of its `length` tokens, the first `prompt` its prompt. On the host."""

    def forget(self) -> None:
        """Former requests count no more."""

    def catch_up(self, ops: Operations, sequences: Sequences, steps: int) -> None:
        """Take in what at most `steps` plain steps have committed (`sequences.skipped`) since it knew all."""
