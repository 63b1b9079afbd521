"""Speculative decoding with a draft and a target that are gated delta nets: draft, verify, commit, count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle_triton.gdn.draft import GDNDraftWorker
from eagle_triton.gdn.model import SimpleLMWithGDN
from eagle_triton.gdn.prefix_states import PrefixStates, prefix_lengths
from eagle_triton.gdn.statistics import GDNStatistics
from eagle_triton.gdn.verify import GDNVerifyWorker

RENEWAL = 0.25  # weight of the latest step in the average


class GDNSpeculativeWorker:
    """Speculative decoding, step by step: greedy output is the target's own, sampled output follows its distribution.

    The states of draft and target are kept between steps, in a slot for each sequence. expansion, num_draft_tokens: see
    `GDNDraftWorker`; verify_strategy, seed: see `GDNVerifyWorker`. adaptive: trees have one level more than the average
    of recently accepted drafts, at most num_steps. Both models need the same vocabulary and device. Make a new worker
    after a change of a model's weights. Raises ValueError for arguments that do not fit.
    """

    def __init__(
        self,
        draft_model: SimpleLMWithGDN,
        target_model: SimpleLMWithGDN,
        topk: int = 4,
        num_steps: int = 2,
        device: torch.device | str | None = None,
        *,
        expansion: str = "simplified",
        num_draft_tokens: int | None = None,
        verify_strategy: str = "target_match",
        seed: int | None = None,
        adaptive: bool = False,
    ) -> None:
        if adaptive and num_draft_tokens is not None:
            raise ValueError(
                "GDNSpeculativeWorker: num_draft_tokens must be None with adaptive trees, got "
                f"num_draft_tokens={num_draft_tokens}"
            )
        if draft_model.vocab_size != target_model.vocab_size or draft_model.device != target_model.device:
            raise ValueError(
                "GDNSpeculativeWorker: draft and target must share vocabulary and device, got "
                f"{draft_model.vocab_size} tokens on {draft_model.device} for the draft and "
                f"{target_model.vocab_size} on {target_model.device} for the target"
            )

        def workers(levels: int) -> tuple[GDNDraftWorker, GDNVerifyWorker]:
            draft = GDNDraftWorker(
                draft_model, topk, levels, device, expansion=expansion, num_draft_tokens=num_draft_tokens
            )
            nodes = draft.num_draft_tokens
            return draft, GDNVerifyWorker(
                target_model, topk, levels, nodes, device, verify_strategy=verify_strategy, seed=seed
            )

        fewer = range(1 if topk > 1 else 2, num_steps) if adaptive else ()  # a single node has no draft
        self._workers = {levels: workers(levels) for levels in (*fewer, num_steps)}
        self._accepted = float(num_steps)  # recently accepted drafts per step of a sequence
        self.draft_worker, self.verify_worker = self._workers[num_steps]
        self.device = self.draft_worker.device
        self.draft_states, self.target_states = PrefixStates(draft_model), PrefixStates(target_model)
        self.reset_stats()

    @property
    def num_draft_tokens(self) -> int:
        """Nodes of the next tree, root included."""
        return self.draft_worker.num_draft_tokens

    def generate_step(
        self, input_ids: Tensor, verified_id: Tensor, seq_lens: Tensor, temperature: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """One step of each sequence: (accepted_tokens [B, m], accept_length [B]), int64, see `GDNVerifyWorker.verify`.

        input_ids [B, T] int64: the sequences so far, padded at the end; seq_lens [B]: their lengths; verified_id [B]:
        their last tokens. Append accepted_tokens[b, 1 : 1 + accept_length[b]] to sequence b and call again; then only
        new tokens are read. A batch of other sequences is read from the beginning. Raises ValueError before anything is
        committed if arguments do not fit.
        """
        lengths = prefix_lengths("generate_step", input_ids, verified_id, seq_lens)
        before = input_ids.new_tensor(lengths)
        drafts, parent_list, chosen = self.draft_worker.generate_draft_tree(
            input_ids, verified_id, seq_lens, past_state=self.draft_states.follow(input_ids, lengths)
        )
        accepted_tokens, accept_length = self.verify_worker.verify(
            verified_id, drafts, parent_list, before, temperature,
            top_scores_index=chosen, past_state=self.target_states.follow(input_ids, lengths),
        )  # fmt: skip
        counts = accept_length.tolist()
        for slot, (row, count) in enumerate(zip(accepted_tokens.tolist(), counts, strict=True)):
            self.target_states.took_in(slot, row[:count])
        self.statistics.count(counts, self.num_draft_tokens)
        if counts and len(self._workers) > 1:
            self._accepted += RENEWAL * (sum(counts) / len(counts) - 1 - self._accepted)
            levels = max(round(self._accepted) + 1, min(self._workers))
            self.draft_worker, self.verify_worker = self._workers[min(levels, max(self._workers))]
        return accepted_tokens, accept_length

    def reset_stats(self) -> None:
        """Forget all counts, but not the sequences' states."""
        self.statistics = GDNStatistics(self._workers[max(self._workers)][0].num_draft_tokens)

    def get_statistics(self) -> dict[str, Any]:
        """The figures since the last reset, by name: see `GDNStatistics.report`."""
        return self.statistics.report()

    @property
    def stats(self) -> dict[str, Any]:
        """The same, as an attribute."""
        return self.get_statistics()
