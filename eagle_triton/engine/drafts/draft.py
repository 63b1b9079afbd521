"""The base class of drafts, which propose the trees that the target verifies."""

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

    One object serves all sequences. Its data lies in tensors by slot (`Sequences.draft_tensors`) and by tree shape
    (`DecodeState.draft_tree_tensors`), which it makes once. For a prompt the engine calls `read_prompt` for each part,
    then `begin`, then `grow`. In a step it calls `learn`, `extend`, then `grow`; on a GPU these run inside a CUDA
    graph, with fixed shapes and without the host reading anything. A wrong draft costs speed, never output.
    """

    must_catch_up: ClassVar[bool] = False
    """Whether it needs every committed token: then plain steps keep their features for `catch_up`."""

    any_tree: ClassVar[bool] = False
    """Whether it can draft trees of any shape, not only of the shape of `read_tree`."""

    @property
    def by_token(self) -> bool:
        """Whether each token has its own rows in its caches, which sequences with the same beginning may share."""
        return True

    @property
    def mixers(self) -> Sequence[Mixer]:
        """The mixers of its layers; none by default."""
        return ()

    @abstractmethod
    def read_tree(self) -> TreeSpec:
        """The tree to draft in the next generation. It may change from call to call."""

    @property
    def learns(self) -> bool:
        """Whether it learns from the target's logits: then plain steps call `learn` too."""
        return False

    @property
    def vocabulary(self) -> int | None:
        """How many different tokens it may propose, which limits a node's children; None: any number."""
        return None

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers that give the features which it takes in: their inputs, concatenated. Empty: the
        features are the output of the last layer, normed."""
        return ()

    def check_tree(self, spec: TreeSpec) -> None:
        """Raise ValueError for a tree that it cannot draft: a node has more children than its vocabulary has tokens."""
        if self.vocabulary is not None and spec.top_k > self.vocabulary:
            raise ValueError(
                f"topk (top_k of a tree) must be at most {self.vocabulary}, the draft's vocabulary, got {spec.top_k}"
            )

    def rows_in_pass(self, spec: TreeSpec) -> int:
        """Cache rows that its passes write after the committed ones; by default one for each node that they expand."""
        return spec.beam_slots

    def passes(self, levels: int) -> int:
        """How often it runs to score `levels` levels of a tree; by default once for each."""
        return levels

    def weight_bytes(self, spec: TreeSpec) -> int:
        """Bytes of weights that drafting one tree of this shape reads; none by default."""
        return 0

    def new_slot_tensors(self, pages: SlotPages) -> Any:
        """Its data for the slots of `pages`, on their device, see by_slot.py; None: it has none."""
        return None

    def guide(self, sequences: Sequences) -> GuideTensors | None:
        """EGAG's tensors, which limit the depth of adaptive trees; None: no limit."""
        return None

    def levels_for(self, spec: TreeSpec, gamma: float) -> int | None:
        """How many levels to score for trees of this shape that may be `gamma` deep; None: all."""
        return None

    def new_tree_tensors(self, spec: TreeSpec, slots: int, device: torch.device) -> Any:
        """Its data for trees of one shape, without the tree, see by_slot.py; None: it has none."""
        return None

    def read_prompt(self, ops: Operations, sequences: Sequences, pieces: PromptChunks, features: Tensor) -> None:
        """Take in pieces of prompts that the target has just read. features [P, n, F]: the target's."""

    def begin(self, ops: Operations, sequences: Sequences, features: Tensor, entering: Tensor) -> None:
        """Take in the roots of the slots in `entering` [B] bool, after their prompts. Other slots do not change.

        features [B, 1, F]: the target's at the prompts' last tokens, arbitrary for other slots.
        """

    def learn(self, ops: Operations, state: DecodeState, accepted: AcceptedPath, logits: Tensor) -> None:
        """Learn from a verification, after its tokens are committed. Does nothing by default.

        logits [B, N, V]: the target's at the verified tree's nodes, with penalties and biases, without temperature and
        filters. In a plain step the tree is only the root.
        """

    def extend(self, ops: Operations, state: DecodeState, accepted: AcceptedPath, features: Tensor) -> None:
        """Take in the accepted tokens. features [B, N, F]: the target's at the verified tree's nodes."""

    @abstractmethod
    def grow(self, ops: Operations, state: DecodeState) -> None:
        """Write the next tree into `state.tree`, from the committed tokens and the root."""

    def end(self, sequences: Sequences, slot: int, prompt: int, length: int) -> None:
        """A sequence of `length` tokens, the first `prompt` of them its prompt, leaves its slot. Runs on the host."""

    def forget(self) -> None:
        """Forget all earlier requests."""

    def catch_up(self, ops: Operations, sequences: Sequences, known: Tensor, features: Tensor) -> None:
        """Take in the tokens of plain steps.

        known [B] int32: how many committed tokens it knows. features [B, n, F]: the target's from these positions on,
        zeros after the committed tokens.
        """
