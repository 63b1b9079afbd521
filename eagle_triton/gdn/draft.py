"""Drafts a tree of tokens with a gated delta net."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.engine.model.gated_delta import GatedDeltaCache
from eagle_triton.gdn.model import SimpleLMWithGDN
from eagle_triton.gdn.operations import operations_for
from eagle_triton.gdn.prefix_states import PrefixStates, check_device, check_vocabulary, prefix_lengths
from eagle_triton.gdn.tree import MAX_NODES, ancestor_mask
from eagle_triton.values import check_choice

EXPANSIONS = ("simplified", "full")


class GDNDraftWorker:
    """Drafts trees of `num_draft_tokens` nodes, root included, with `num_steps` levels.

    expansion "simplified": EAGLE-2's tree (arXiv 2406.16858): the topk best nodes of a level are expanded, and the
    topk * num_steps - 1 best of all candidates are kept. "full": every candidate is expanded, and all topk + ... +
    topk^num_steps are kept. num_draft_tokens: another number of nodes for a simplified tree; None: topk * num_steps.
    device: where the model must be; None: anywhere. Raises ValueError for impossible trees.

    Each level is one forward over all nodes drafted so far, from the root's state: branches have no states.
    """

    def __init__(
        self,
        draft_model: SimpleLMWithGDN,
        topk: int = 4,
        num_steps: int = 2,
        device: torch.device | str | None = None,
        *,
        expansion: str = "simplified",
        num_draft_tokens: int | None = None,
    ) -> None:
        if topk < 1 or num_steps < 1:
            raise ValueError(f"GDNDraftWorker: topk and num_steps must be at least 1, got {topk} and {num_steps}")
        if topk > draft_model.vocab_size:
            raise ValueError(
                f"GDNDraftWorker: topk must be at most {draft_model.vocab_size}, the vocabulary, got {topk}"
            )
        check_choice("GDNDraftWorker: expansion", expansion, EXPANSIONS)
        full = expansion == "full"
        if full and num_draft_tokens is not None:
            raise ValueError(
                f"GDNDraftWorker: a full tree keeps all candidates, got num_draft_tokens={num_draft_tokens}"
            )
        self.draft_model, self.topk, self.num_steps, self.expansion = draft_model, topk, num_steps, expansion
        self.device = check_device("GDNDraftWorker", draft_model, device)
        self.widths = [
            topk ** (level + 1) if full else topk for level in range(num_steps - 1)
        ]  # expanded of each level
        candidates = topk * (1 + sum(self.widths))
        self.num_draft_tokens = 1 + candidates if full else num_draft_tokens or topk * num_steps
        if not 2 <= self.num_draft_tokens <= 1 + candidates:
            raise ValueError(
                f"GDNDraftWorker: num_draft_tokens, root included, must be in 2..{1 + candidates} for topk {topk} "
                f"and num_steps {num_steps}, got {self.num_draft_tokens}"
            )
        if sum(self.widths) >= MAX_NODES:
            raise ValueError(
                f"GDNDraftWorker: at most {MAX_NODES - 1} nodes can be expanded, got {sum(self.widths)} for topk "
                f"{topk} and num_steps {num_steps}; lower one of them"
            )

    def draft_step(
        self,
        input_ids: Tensor,
        hidden_states: GatedDeltaCache | None = None,
        past_state: GatedDeltaCache | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, GatedDeltaCache]:
        """The likeliest next tokens of sequences: (scores, token_ids [B, k], hidden [B, k, hidden], past_state).

        input_ids [B, T] int64 follow the tokens in past_state, which does not change; draft_step(input_ids, past_state)
        is the same. scores are softmax probabilities, float32, best first; hidden is the last token's, repeated for
        each next token. Raises TypeError for hidden states: a draft remembers only past_state.
        """
        if isinstance(hidden_states, GatedDeltaCache) and past_state is None:
            hidden_states, past_state = None, hidden_states
        if hidden_states is not None:
            raise TypeError(
                "draft_step: hidden_states are not read, because a draft remembers only past_state; "
                f"got {type(hidden_states).__name__}: call draft_step(input_ids, past_state)"
            )
        out = self.draft_model(input_ids, past_state=past_state, use_cache=True, return_hidden=True)
        scores, tokens = operations_for(input_ids).topk(out.logits[:, -1], self.topk)
        return scores.exp(), tokens, out.hidden_states[:, -1:].expand(-1, self.topk, -1), out.past_state

    def generate_draft_tree(
        self,
        input_ids: Tensor,
        verified_id: Tensor,
        seq_lens: Tensor | None = None,
        *,
        past_state: GatedDeltaCache | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(draft_tokens [B, N - 1], parent_list [B, P], top_scores_index [B, N - 1]), all int64.

        input_ids [B, T] int64: the sequences, each of seq_lens [B] tokens (None: T); the last token of each is its
        root, verified_id [B]. past_state: the draft's state after the tokens before the roots, which are then not read;
        None: they are read. The results are arguments of `build_tree_efficient_triton`: P = k (D - 1) + 1, parent_list
        begins with -1, drafts are in flat order, and falling score, then flat index decides which are kept. (Full trees
        with D > 2 levels have P = 1 + k + ... + k^(D-1), which that kernel does not support.) Raises ValueError if
        arguments do not fit.
        """
        lengths = prefix_lengths("generate_draft_tree", input_ids, verified_id, seq_lens)
        check_vocabulary(verified_id.tolist(), self.draft_model)
        if past_state is None:
            past_state = PrefixStates(self.draft_model).follow(input_ids, lengths)
        tokens, scores, parent_list = self._candidates(verified_id.long(), past_state)
        best = scores.masked_fill(scores.isnan(), -torch.inf).sort(dim=1, descending=True, stable=True).indices
        chosen = best[:, : self.num_draft_tokens - 1].sort(dim=1).values
        return tokens.gather(1, chosen), parent_list, chosen

    def _candidates(self, verified_id: Tensor, state: GatedDeltaCache) -> tuple[Tensor, Tensor, Tensor]:
        """All candidates in flat order: tokens and cumulative log-probabilities [B, C]; and parent_list."""
        ops, k, batch = operations_for(verified_id), self.topk, len(verified_id)
        nodes, parents = verified_id[:, None], verified_id.new_full((batch, 1), -1)
        scores = torch.zeros(batch, 1, device=nodes.device)
        seen = nodes.new_zeros(batch, 1, 1)  # expand_beam also keeps ancestors
        tokens, all_scores, expanded = [], [], [parents]
        newest = candidates = 0  # the level's first node; candidates of the levels above
        for level, width in enumerate((*self.widths, 0)):
            hidden, _ = self.draft_model.read_tree(nodes, ancestor_mask(parents), level, state)
            logits = self.draft_model.logits(hidden[:, newest:])
            log_probs, children = (x.view(batch, -1, k) for x in ops.topk(logits.flatten(0, 1), k))
            everything = torch.arange(width, device=nodes.device) if self.expansion == "full" else None
            grown = ops.expand_beam(scores, log_probs, children.flatten(1), seen, nodes.shape[1] - 1, width, everything)
            tokens.append(children.flatten(1))
            all_scores.append(grown.child_scores)
            expanded.append(grown.chosen + candidates)
            parents = torch.cat((parents, grown.parents + newest), dim=1)
            newest, candidates = nodes.shape[1], candidates + tokens[-1].shape[1]
            nodes = torch.cat((nodes, grown.tokens), dim=1)
            scores, seen = grown.scores, grown.ancestors
        return torch.cat(tokens, dim=1), torch.cat(all_scores, dim=1), torch.cat(expanded, dim=1)
