"""Verifies a tree of drafts with a gated delta net, and commits the accepted ones."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.engine.model.gated_delta import GatedDeltaCache
from eagle_triton.engine.model.mixers import AcceptedPath
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.state import Tree
from eagle_triton.engine.step import Mode, verify
from eagle_triton.gdn.model import SimpleLMWithGDN
from eagle_triton.gdn.operations import operations_for
from eagle_triton.gdn.prefix_states import check_device
from eagle_triton.gdn.tree import ancestor_mask, candidate_parents
from eagle_triton.operands.ancestors import pack_ancestors
from eagle_triton.operands.sampling import SamplingTensors
from eagle_triton.operands.verification import Verification


class GDNVerifyWorker:
    """One forward of the target over a tree of `num_draft_tokens` nodes, root included, then an exact commit.

    topk, num_steps: of the drafting worker. verify_strategy: how drafts are verified at a temperature, see
    `Verification`; its default and "rejection" are lossless. seed: of sampling, sequence b has seed + b; None: drawn
    for each call from torch's default generator. device: where the model must be; None: anywhere. Raises ValueError for
    arguments that do not fit.
    """

    def __init__(
        self,
        target_model: SimpleLMWithGDN,
        topk: int = 4,
        num_steps: int = 2,
        num_draft_tokens: int = 20,
        device: torch.device | str | None = None,
        *,
        verify_strategy: str = "target_match",
        seed: int | None = None,
    ) -> None:
        if topk < 1 or num_steps < 1 or num_draft_tokens < 2:
            raise ValueError(
                "GDNVerifyWorker: topk and num_steps must be at least 1, and num_draft_tokens, root included, at least "
                f"2, got {topk}, {num_steps} and {num_draft_tokens}"
            )
        self.target_model, self.topk, self.num_steps = target_model, topk, num_steps
        self.num_draft_tokens, self.seed = num_draft_tokens, seed
        self.device = check_device("GDNVerifyWorker", target_model, device)
        self.verification = Verification(verify_strategy)

    def build_tree_attention_mask(
        self,
        batch_size: int,
        verified_id: Tensor,
        draft_tokens: Tensor,
        parent_list: Tensor,
        seq_lens: Tensor,
        top_scores_index: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The nodes that each node sees, bool [B, N, N], and its position, seq_lens + depth, int64 [B, N].

        Arguments as in `verify`. Raises ValueError if they do not fit.
        """
        if batch_size != len(verified_id):
            raise ValueError(f"build_tree_attention_mask: expected {batch_size} roots, got {len(verified_id)}")
        mask = ancestor_mask(self._parents(verified_id, draft_tokens, parent_list, seq_lens, top_scores_index))
        return mask, seq_lens.long()[:, None] + mask.sum(-1) - 1

    @torch.no_grad()
    def verify(
        self,
        verified_id: Tensor,
        draft_tokens: Tensor,
        parent_list: Tensor,
        seq_lens: Tensor,
        temperature: float = 0.0,
        *,
        top_scores_index: Tensor | None = None,
        past_state: GatedDeltaCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(accepted_tokens [B, m], accept_length [B]), int64: each root, the accepted drafts, the target's next token.

        verified_id [B]: the roots; draft_tokens [B, N - 1], parent_list and top_scores_index: the results of
        generate_draft_tree; without the last the drafts are the first N - 1 candidates. seq_lens [B]: tokens before the
        roots. past_state: the target's state after those tokens; it takes in root and accepted drafts, in place. None:
        there are no tokens before the roots, and no state is kept. temperature 0 is greedy.

        accept_length counts the tokens after the root, the target's own included: one more than the accepted drafts.
        accepted_tokens are padded with -1. Raises ValueError before anything is committed if arguments do not fit or
        the target's logits are NaN.
        """
        parents = self._parents(verified_id, draft_tokens, parent_list, seq_lens, top_scores_index)
        params = SamplingParams(temperature=temperature, seed=self.seed)
        tokens = torch.cat((verified_id.long()[:, None], draft_tokens.long()), dim=1)
        mask, depth, ops = ancestor_mask(parents), self.num_steps, operations_for(tokens)
        state = self.target_model.new_state(len(tokens)) if past_state is None else past_state
        hidden, pending = self.target_model.read_tree(tokens, mask, depth, state)
        nan = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        before = seq_lens.int()
        path, accepted, following = verify(
            ops,
            self.target_model.logits(hidden),
            Tree(tokens, parents, (mask.sum(-1) - 1).int(), pack_ancestors(mask)),
            depth,
            before,
            sampling_tensors(params, before),
            Mode(sampled=not params.greedy, filtered=False, verification=self.verification),
            nan,
        )
        if bool(nan.any()):
            raise ValueError(f"verify: the target's logits of sequences {nan.nonzero()[:, 0].tolist()} are NaN")
        state.commit(ops, pending, AcceptedPath(before, path, accepted))
        given = tokens.gather(1, path.clamp(min=0).long()).masked_fill(path < 0, -1)
        given = torch.nn.functional.pad(given, (0, 1), value=-1)
        length = accepted.long() + 1
        given.scatter_(1, length[:, None], following[:, None])
        return given[:, : int(length.max()) + 1], length

    def _parents(
        self,
        verified_id: Tensor,
        draft_tokens: Tensor,
        parent_list: Tensor,
        seq_lens: Tensor,
        top_scores_index: Tensor | None,
    ) -> Tensor:
        """The parents [B, N] int32 of checked trees."""
        drafts = (len(verified_id), self.num_draft_tokens - 1)
        if top_scores_index is None:
            top_scores_index = torch.arange(drafts[1], device=draft_tokens.device).expand(drafts)
        for label, value, shape in (
            ("draft_tokens", draft_tokens, drafts),
            ("top_scores_index", top_scores_index, drafts),
            ("seq_lens", seq_lens, drafts[:1]),
        ):
            if tuple(value.shape) != shape:
                raise ValueError(f"GDNVerifyWorker: {label} must be {list(shape)}, got {list(value.shape)}")
        most = self.target_model.vocab_size
        for label, value in (("verified_id", verified_id), ("draft_tokens", draft_tokens)):
            if bool(((value < 0) | (value >= most)).any()):
                raise ValueError(f"GDNVerifyWorker: {label} must lie in 0..{most - 1}, got {value.tolist()}")
        parents = candidate_parents(parent_list, top_scores_index, self.topk)
        deepest = int(ancestor_mask(parents).sum(-1).max()) - 1
        if deepest > self.num_steps:
            raise ValueError(f"GDNVerifyWorker: trees must have at most {self.num_steps} levels, got {deepest}")
        return parents


def sampling_tensors(params: SamplingParams, before: Tensor) -> SamplingTensors:
    """The options of B sequences with their seeds. before [B] int32: their lengths, on which random numbers also
    depend."""
    found = SamplingTensors.zeros(len(before), before.device)
    found.temperature.fill_(params.temperature)
    found.top_p.fill_(1.0)
    found.seed.copy_(torch.tensor(params.seeds(len(before)), dtype=torch.int64))
    return found._replace(step=before.long())
