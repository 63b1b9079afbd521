"""The states of a batch of sequences, kept between steps, so that only new tokens are read."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.engine.model.gated_delta import GatedDeltaCache
from eagle_triton.engine.model.mixers import AcceptedPath
from eagle_triton.gdn.model import SimpleLMWithGDN
from eagle_triton.gdn.operations import operations_for
from eagle_triton.gdn.tree import MAX_NODES


class PrefixStates:
    """A pool of states with a slot for each sequence, and the tokens in each state."""

    def __init__(self, model: SimpleLMWithGDN) -> None:
        self.model = model
        self.state = model.new_state(0)
        self.known: list[list[int]] = []

    def follow(self, input_ids: Tensor, lengths: list[int]) -> GatedDeltaCache:
        """The states of the first lengths[b] tokens of each row of input_ids [B, T].

        A sequence that continues the known tokens is read from there, any other from its beginning. Raises ValueError
        for tokens outside the vocabulary, before anything is read.
        """
        tokens = [row[:length] for row, length in zip(input_ids.tolist(), lengths, strict=True)]
        mine, model = self.state.windows, self.model
        if len(self.known) != len(tokens) or mine.device != model.device or mine.dtype != model.dtype:
            self.state, self.known = model.new_state(len(tokens)), [[] for _ in tokens]
        for row in tokens:
            check_vocabulary(row, model)
        for slot, (known, wanted) in enumerate(zip(self.known, tokens, strict=True)):
            if wanted[: len(known)] != known:
                self.state.part(slice(slot, slot + 1)).clear()
                self.known[slot] = []
        new = [wanted[len(known) :] for known, wanted in zip(self.known, tokens, strict=True)]
        for slot, row in enumerate(new):
            if len(row) > MAX_NODES:  # alone, so that its result does not depend on its neighbours
                self.model.read(input_ids.new_tensor([row]), self.state.part(slice(slot, slot + 1)))
                self.known[slot], new[slot] = tokens[slot], []
        self._take_in(new)
        self.known = tokens
        return self.state

    def took_in(self, slot: int, tokens: list[int]) -> None:
        """Record that a commit elsewhere moved a sequence's state on by these tokens."""
        self.known[slot] = self.known[slot] + tokens

    def _take_in(self, rows: list[list[int]]) -> None:
        """Read a few tokens of each sequence as a verified chain, so that the state depends only on them."""
        longest = max(map(len, rows), default=0)
        if not longest:
            return
        device = self.model.device
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        mask = torch.ones(len(rows), longest, longest, dtype=torch.bool, device=device).tril()
        _, pending = self.model.read_tree(tokens, mask, longest - 1, self.state)
        path = torch.arange(longest, dtype=torch.int32, device=device).repeat(len(rows), 1)
        count = torch.tensor([len(row) for row in rows], dtype=torch.int32, device=device)
        before = torch.tensor([len(known) for known in self.known], dtype=torch.int32, device=device)
        self.state.commit(operations_for(tokens), pending, AcceptedPath(before, path, count - 1))


def check_vocabulary(tokens: list[int], model: SimpleLMWithGDN) -> None:
    """Raise ValueError for tokens outside the model's vocabulary."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < model.vocab_size:
        raise ValueError(f"tokens must lie in 0..{model.vocab_size - 1}, got {min(tokens)} and {max(tokens)}")


def prefix_lengths(name: str, input_ids: Tensor, verified_id: Tensor, seq_lens: Tensor | None) -> list[int]:
    """The number of tokens of each sequence before its root, which is its last token.

    input_ids [B, T] int64; verified_id [B]: the roots; seq_lens [B]: the sequences' lengths; None: all T. Raises
    ValueError if shapes do not fit, or if a sequence's last token is not its root.
    """
    if input_ids.dim() != 2 or input_ids.dtype != torch.int64 or not input_ids.shape[1]:
        raise ValueError(f"{name}: input_ids must be int64 [B, T], got {input_ids.dtype} {list(input_ids.shape)}")
    batch, most = input_ids.shape
    if verified_id.shape != (batch,) or not (seq_lens is None or seq_lens.shape == (batch,)):
        raise ValueError(
            f"{name}: verified_id and seq_lens must be [{batch}], got {list(verified_id.shape)} and "
            f"{None if seq_lens is None else list(seq_lens.shape)}"
        )
    lengths = [most] * batch if seq_lens is None else [int(length) for length in seq_lens]
    if not all(1 <= length <= most for length in lengths):
        raise ValueError(f"{name}: seq_lens must lie in 1..{most}, got {lengths}")
    rows, last = torch.arange(batch), torch.tensor(lengths) - 1
    roots = input_ids[rows.to(input_ids.device), last.to(input_ids.device)]
    if roots.tolist() != verified_id.tolist():
        raise ValueError(
            f"{name}: verified_id must be the last token of each sequence, {roots.tolist()}, got {verified_id.tolist()}"
        )
    return [length - 1 for length in lengths]


def check_device(name: str, model: SimpleLMWithGDN, device: torch.device | str | None) -> torch.device:
    """The model's device. Raises ValueError if another one is asked for."""
    if device is not None:
        wanted = torch.device(device)
        if wanted.type != model.device.type or wanted.index not in (None, model.device.index):
            raise ValueError(f"{name}: the model is on {model.device}, but device is {wanted}: move the model first")
    return model.device
