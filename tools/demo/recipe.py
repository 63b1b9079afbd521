"""Sizes, steps and rates of the embedded checkpoint; nothing here waits for torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STAGES = (
    *("tokenizer", "target", "prompts", "eagle3", "eagle1", "evaluate", "hybrid", "mtp", "evaluate_mtp"),
    *("draft", "evaluate_draft", "block", "evaluate_block", "mixture", "mixture_head", "evaluate_mixture"),
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Sizes and hyper-parameters of the demo models."""

    seed: int = 0
    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 640
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    max_positions: int = 2048
    draft_vocab_size: int = 2048  # of the EAGLE-3 head

    target_steps: int = 1800
    target_minutes: float = 4.0
    target_lr: float = 2e-3
    target_weight_decay: float = 0.1
    target_dropout: float = 0.2
    target_tokens_per_step: int = 32768

    head_steps: int = 1800
    head_minutes: float = 4.0
    head_lr: float = 1.5e-3
    head_weight_decay: float = 0.01
    head_tokens_per_step: int = 16384
    head_passes: int = 7
    head_pass_decay: float = 0.85
    generated_rows: int = 8192

    hybrid_intermediate_size: int = 608
    key_heads: int = 2  # of the hybrid's gated delta nets
    value_heads: int = 4
    delta_head_dim: int = 64

    draft_hidden_size: int = 192  # from here on of the draft model
    draft_intermediate_size: int = 512
    draft_num_layers: int = 2
    draft_num_heads: int = 3
    draft_steps: int = 4000
    draft_minutes: float = 1.25
    draft_lr: float = 2e-3
    draft_weight_decay: float = 0.01
    draft_tokens_per_step: int = 16384
    draft_token_loss: float = 0.1  # what the next token's cross entropy weighs

    block_size: int = 8  # from here on of the block drafters
    block_layers: int = 2
    block_anchors: int = 64  # blocks of a row of the corpus
    block_steps: int = 4000
    block_minutes: float = 2.0
    block_lr: float = 1.5e-3
    block_tokens_per_step: int = 8192

    mixture_hidden_size: int = 192  # from here on of the mixture of experts and its head
    mixture_num_layers: int = 7
    mixture_num_heads: int = 3
    mixture_num_kv_heads: int = 1
    experts: int = 16
    experts_per_token: int = 2
    expert_size: int = 48
    router_balance: float = 0.01  # what the loss weighs that spreads tokens over the experts
    mixture_minutes: float = 3.0
    mixture_head_minutes: float = 2.0
    mixture_generated_rows: int = 768

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def sizes(self) -> dict:
        """The sizes that all targets have, by the names of their configs."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-6,
        }

    @property
    def of_mixture(self) -> Recipe:
        """The recipe of the mixture and its head, by the names that a target and a head have."""
        return dataclasses.replace(
            self,
            hidden_size=self.mixture_hidden_size,
            num_layers=self.mixture_num_layers,
            num_heads=self.mixture_num_heads,
            num_kv_heads=self.mixture_num_kv_heads,
            target_minutes=self.mixture_minutes,
            head_minutes=self.mixture_head_minutes,
            generated_rows=self.mixture_generated_rows,
        )

    def __post_init__(self) -> None:
        if self.draft_vocab_size >= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size must be below vocab_size ({self.vocab_size}), got {self.draft_vocab_size}"
            )
        for whose in ("", "mixture_"):
            names = [f"{whose}{name}" for name in ("hidden_size", "num_heads", "num_kv_heads")]
            hidden_size, num_heads, num_kv_heads = (getattr(self, name) for name in names)
            if not (num_heads and num_kv_heads) or hidden_size % num_heads or num_heads % num_kv_heads:
                raise ValueError("{0} must divide by {1}, and {1} by {2}".format(*names))
        if not 0 < self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts_per_token must be from 1 to experts ({self.experts}), got {self.experts_per_token}"
            )
