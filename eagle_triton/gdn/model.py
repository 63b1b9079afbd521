"""A small language model of one gated delta net, for drafts, targets and tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle_triton.engine.model.gated_delta import DeltaPending, GatedDeltaCache
from eagle_triton.gdn.layer import Qwen3GatedDeltaNet, default_device
from eagle_triton.gdn.operations import operations_for
from eagle_triton.gdn.tree import tree_parts
from eagle_triton.operands.ancestors import pack_ancestors
from eagle_triton.runtime.split_sums import total_of


@dataclass(frozen=True)
class GDNOutput:
    """The result of a forward. past_state: the state after the sequences; None without use_cache."""

    logits: Tensor  # [B, T, vocab]
    past_state: GatedDeltaCache | None = None
    hidden_states: Tensor | None = None  # [B, T, hidden], None unless return_hidden was set

    @property
    def past_key_values(self) -> GatedDeltaCache | None:
        """past_state under Hugging Face's name."""
        return self.past_state


class SimpleLMWithGDN(nn.Module):
    """embed -> gdn (`Qwen3GatedDeltaNet`) -> lm_head, all of one dtype. device None: a GPU if there is one.

    For inference: no gradients.
    """

    def __init__(
        self,
        vocab_size: int = 1000,
        hidden_size: int = 256,
        num_k_heads: int = 4,
        num_v_heads: int = 4,
        head_k_dim: int = 64,
        head_v_dim: int = 64,
        conv_kernel_size: int = 4,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        device = default_device(device)
        self.embed = nn.Embedding(vocab_size, hidden_size, dtype=dtype, device=device)
        self.gdn = Qwen3GatedDeltaNet(
            hidden_size, num_k_heads, num_v_heads, head_k_dim, head_v_dim, conv_kernel_size, dtype=dtype, device=device
        )
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False, dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        mode: str = "auto",
        past_state: GatedDeltaCache | None = None,
        use_cache: bool = False,
        return_hidden: bool = False,
    ) -> GDNOutput:
        """input_ids [B, T] int64 follow the tokens in past_state, which does not change; None: there are none.

        mode: see Qwen3GatedDeltaNet. A past_state holds states [1, B, HV, K, V] float32 and windows [1, B, W - 1, C] of
        the convolution. Raises ValueError if arguments do not fit.
        """
        if input_ids.dim() != 2:
            raise ValueError(f"SimpleLMWithGDN: input_ids must be [B, T], got {list(input_ids.shape)}")
        state = self.new_state(len(input_ids))
        if past_state is not None:
            for own, given in zip(state.tensors, past_state.tensors, strict=True):
                if own.shape != given.shape:
                    raise ValueError(
                        f"SimpleLMWithGDN: past_state must hold {list(own.shape)}, got {list(given.shape)}"
                    )
                own.copy_(given)
        hidden = self.read(input_ids, state, mode)
        return GDNOutput(self.logits(hidden), state if use_cache else None, hidden if return_hidden else None)

    def new_state(self, batch: int) -> GatedDeltaCache:
        """An empty state of `batch` sequences."""
        return self.gdn.new_cache(batch)

    @torch.no_grad()
    def read(self, input_ids: Tensor, state: GatedDeltaCache, mode: str = "auto") -> Tensor:
        """Tokens [B, T] that follow each other -> hidden states [B, T, hidden]. `state` moves on in place."""
        return self.gdn.read(self.embed(input_ids), state.layer(0), mode)

    @torch.no_grad()
    def read_tree(
        self, tokens: Tensor, mask: Tensor, depth: int, state: GatedDeltaCache
    ) -> tuple[Tensor, DeltaPending]:
        """Nodes of trees after `state`, which does not change: hidden states [B, n, hidden], and the data for a commit.

        tokens [B, n]; mask [B, n, n] bool: the nodes that each node sees; none is more than `depth` below the root.
        Trees of more than 64 nodes are read in parts (`tree_parts`, which raises ValueError if it cannot make them).
        """
        embedded, pending = self.embed(tokens), state.new_pending(tokens.shape[1])
        parts = tree_parts(mask)
        if len(parts) == 1:
            return self.gdn.read_tree(embedded, state.layer(0, pending), pack_ancestors(mask), depth), pending
        hidden = torch.empty_like(embedded)
        for nodes in parts:
            left = state.new_pending(len(nodes))
            ancestors = pack_ancestors(mask[:, nodes][:, :, nodes])
            hidden[:, nodes] = self.gdn.read_tree(embedded[:, nodes], state.layer(0, left), ancestors, depth)
            for whole, part in zip(pending, left, strict=True):
                whole[:, :, nodes] = part
        return hidden, pending

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[B, n, hidden] -> [B, n, vocab]."""
        return total_of(operations_for(hidden).linear(hidden, self.lm_head.weight))
