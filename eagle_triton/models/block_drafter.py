"""Block drafters in plain PyTorch: a few decoder layers that draft a whole block of tokens in one forward.

The family of DFlash (arXiv 2602.06036) and DFlash2, with DSpark's Markov heads (arXiv 2607.05147), Domino's recurrent
correction (arXiv 2605.29707) and JetSpec's causal blocks (arXiv 2606.18394). Parameters have the names of published
checkpoints.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .heads import MLP, RMSNorm, attended, rotate, rotation_at

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class BlockDrafterConfig:
    """What a block drafter computes; `block_loading.read_block_config` makes it from a checkpoint's config.json.

    block_size: rows of a block, the root's included. mask_token_id: the token of every other row.
    feature_layers: target layers with inputs that are the features. shifted: row i drafts the token after it; otherwise
    the token in its own place, and row 0 drafts nothing. causal, windows: for each layer, whether a row sees only
    itself and earlier rows of its block, and the number of positions it sees (None: all). markov_head: None, "vanilla",
    "gated" or "rnn", of rank markov_rank. gru_size, gru_rank: Domino's recurrent correction (0: none), from draft
    gru_start of a block on, counted from 0. draft_vocab_size: tokens that it can draft; if they are fewer than
    vocab_size, `d2t` maps them to the target's. conv_taps, conv_group: DFlash2's convolutions along the block (0:
    none); conv_group elements share coefficients. selector_top_k, selector_rank: DFlash2's selector (0: none), which
    scores each row's best tokens by the token before them. own_embedding, own_head: whether it has its own; otherwise
    it uses the target's. embedding_scale: multiplies embeddings. logit_scale, logit_cap: logits are cap * tanh(scale *
    logits / cap). Raises ValueError for values that do not fit together.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    block_size: int
    mask_token_id: int
    feature_layers: tuple[int, ...]
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = False
    qk_norm: bool = True
    shifted: bool = False
    markov_head: str | None = None
    markov_rank: int = 0
    gru_size: int = 0
    gru_rank: int = 0
    gru_start: int = 0
    conv_taps: int = 0
    conv_group: int = 0
    selector_top_k: int = 0
    selector_rank: int = 0
    own_embedding: bool = False
    own_head: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        if self.drafts < 1:
            raise ValueError(f"block drafter: block_size must be at least {2 - self.shifted}, got {self.block_size}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"block drafter: mask_token_id must be a row of the embedding, 0..{self.vocab_size - 1}, got "
                f"{self.mask_token_id}"
            )
        if not self.feature_layers or list(self.feature_layers) != sorted(set(self.feature_layers)):
            raise ValueError(
                "block drafter: target layers must be different and ascending, got, counted by their inputs, "
                f"{list(self.feature_layers)}"
            )
        if self.markov_head not in (None, *MARKOV_HEADS):
            raise ValueError(f"block drafter: markov_head_type must be one of {MARKOV_HEADS}, got {self.markov_head!r}")
        for window in self.windows:
            if window is not None and window < self.block_size:
                raise ValueError(
                    f"block drafter: a sliding window must cover the block of {self.block_size} rows, got {window}"
                )
        parts = {"a Markov head": self.markov_head, "Domino's GRU": self.gru_size, "a selector": self.selector_top_k}
        if len(found := [part for part, size in parts.items() if size]) > 1:
            raise ValueError(f"block drafter: only one of these is supported at a time, got {' and '.join(found)}")
        if not 0 <= self.gru_start < self.drafts:
            raise ValueError(
                f"block drafter: pure_draft_prefix_len must be in 0..{self.drafts - 1}, got {self.gru_start}"
            )

    @property
    def drafts(self) -> int:
        """The number of tokens that a block drafts."""
        return self.block_size if self.shifted else self.block_size - 1

    @property
    def recurrent(self) -> bool:
        """Whether a draft depends on all tokens before it, through a state."""
        return self.markov_head == "rnn" or self.gru_size > 0


class BlockAttention(nn.Module):
    """Grouped-query attention of a block's rows over the context and the block."""

    def __init__(self, config: BlockDrafterConfig, causal: bool, window: int | None) -> None:
        super().__init__()
        self.head_dim, self.causal, self.window = config.head_dim, causal, window
        queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """x [B, n, H]: the block's normed rows; context [B, S, H]; rotation, mask: for all S + n rows, see
        `BlockDrafter.forward`."""
        both, rows = torch.cat((context, x), dim=1), x.shape[1]
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)) for part in (self.q_proj(x), self.k_proj(both), self.v_proj(both))
        )
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query = rotate(query.transpose(1, 2), *(part[..., -rows:, :] for part in rotation))
        key, value = rotate(key.transpose(1, 2), *rotation), value.transpose(1, 2)
        return self.o_proj(attended(query, key, value, mask))

    def mask(self, context: int, rows: int, device: torch.device) -> Tensor:
        """bool [rows, context + rows]: the rows of context and block that each of `rows` sees."""
        place = torch.arange(context + rows, device=device)
        distance = place[context:, None] - place
        visible = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        return visible if self.window is None else visible & (distance < self.window)


class BlockLayer(nn.Module):
    """A decoder layer like Qwen3's."""

    def __init__(self, config: BlockDrafterConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config, config.causal[index], config.windows[index])
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, "silu")
        if config.conv_taps:
            self.attention_conv, self.mlp_conv = BlockConv(config), BlockConv(config)

    def forward(
        self, x: Tensor, context: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> Tensor:
        if mask is None:
            mask = self.self_attn.mask(context.shape[1], x.shape[1], x.device)
        x = x + self._around(
            "attention_conv", self.input_layernorm(x), lambda y: self.self_attn(y, context, rotation, mask)
        )
        return x + self._around("mlp_conv", self.post_attention_layernorm(x), self.mlp)

    def _around(self, name: str, normed: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply `part` to a normed input, between the two convolutions if there are any."""
        if (conv := getattr(self, name, None)) is None:
            return part(normed)
        before, after = conv.coefficients(normed)
        return convolve(part(convolve(normed, before)), after)


def convolve(x: Tensor, coefficients: Tensor) -> Tensor:
    """A causal convolution of each element along x [B, n, H] by coefficients [B, n, taps, H] of each row; rows before
    the first are zero."""
    found = coefficients[:, :, 0] * x
    for tap in range(1, coefficients.shape[2]):
        found = found + coefficients[:, :, tap] * F.pad(x, (0, 0, tap, 0))[:, : x.shape[1]]
    return found


class BlockConv(nn.Module):
    """DFlash2's convolutions before and after a part of a layer."""

    def __init__(self, config: BlockDrafterConfig) -> None:
        super().__init__()
        self.group = config.conv_group
        groups = config.hidden_size // config.conv_group
        self.base_kernel = nn.Parameter(torch.empty(2, config.conv_taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * config.conv_taps * groups, bias=False)

    def coefficients(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """The coefficients of both convolutions, [B, n, taps, H] each, from the part's normed input [B, n, H]."""
        sides, taps, _ = self.base_kernel.shape
        by_group = self.kernel_projection(normed).unflatten(-1, (sides, taps, -1))
        before, after = (by_group.repeat_interleave(self.group, dim=-1) + self.base_kernel).unbind(2)
        return before, after


class CandidateSelector(nn.Module):
    """DFlash2's selector: scores a row's candidates by the token before them."""

    def __init__(self, config: BlockDrafterConfig) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)
        self.successor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, hidden: Tensor, tokens: Tensor, candidates: Tensor) -> Tensor:
        """hidden [..., H] of rows, tokens [...] before them, candidates [..., K] -> terms for their logits, [...,
        K]."""
        query = self.predecessor_codebook(tokens) * self.hidden_projection(hidden)
        return (self.successor_codebook(candidates) @ query[..., None])[..., 0]


class MarkovHead(nn.Module):
    """Terms for a row's logits from the token before it; with a state ("rnn"), from all tokens since the root."""

    def __init__(self, config: BlockDrafterConfig) -> None:
        super().__init__()
        rank, width = config.markov_rank, config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if config.markov_head == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank) if config.markov_head == "rnn" else None

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """hidden [..., H] of rows, tokens [...] before them -> [..., Vd]. With a state: hidden [..., D, H] of a block's
        rows from the first on, tokens [..., D]."""
        latent = self.markov_w1(tokens)
        if self.gate_proj is not None:
            latent = torch.sigmoid(self.gate_proj(torch.cat((hidden, latent), dim=-1))) * latent
        elif self.joint_proj is not None:
            latent = self._recurrent(self.joint_proj, hidden, latent)
        return self.markov_w2(latent)

    @staticmethod
    def _recurrent(joint_proj: nn.Linear, hidden: Tensor, embedded: Tensor) -> Tensor:
        state, outputs = torch.zeros_like(embedded[..., 0, :]), []
        for row in range(embedded.shape[-2]):
            joint = joint_proj(torch.cat((state, embedded[..., row, :], hidden[..., row, :]), dim=-1))
            gate, candidate, output = joint.chunk(3, dim=-1)
            state = torch.lerp(torch.tanh(candidate), state, torch.sigmoid(gate))
            outputs.append(torch.tanh(output))
        return torch.stack(outputs, dim=-2)


class BlockDrafter(nn.Module):
    """A block drafter. Its drafts are verified as a tree of `total_token` nodes, root included, with up to `top_k`
    children per node. By default that is a chain of all drafts of a block. Both may change between generations.
    """

    d2t: Tensor | None  # [Vd] int64: target id = draft id + d2t[draft id]

    def __init__(self, config: BlockDrafterConfig, total_token: int | None = None, top_k: int = 1) -> None:
        super().__init__()
        self.config, self.top_k = config, top_k
        self.total_token = config.drafts + 1 if total_token is None else total_token
        width = config.hidden_size
        self.fc = nn.Linear(len(config.feature_layers) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if config.own_head else None
        self.markov_head = MarkovHead(config) if config.markov_head else None
        self.prefix_gru, self.embed_proj = None, None
        if config.gru_size:
            self.prefix_gru = nn.GRU(width, config.gru_size, bias=False, batch_first=True)
            self.embed_proj = nn.Sequential(
                nn.Linear(width + config.gru_size, config.gru_rank, bias=False),
                nn.SiLU(),
                nn.Linear(config.gru_rank, config.draft_vocab_size, bias=False),
            )
        self.candidate_selector = CandidateSelector(config) if config.selector_top_k else None
        few = config.draft_vocab_size != config.vocab_size
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long) if few else None)

    def context(self, features: Tensor) -> Tensor:
        """The input [B, S, H] of all layers' keys and values, from the target's features [B, S, F]."""
        return self.hidden_norm(self.fc(features))

    def forward(
        self, embeddings: Tensor, context: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The normed outputs [B, n, H] of a block's rows.

        embeddings [B, n, H] of the root and masks; context [B, S, H] of the first S positions. For training on several
        blocks at once: positions [n] int64 of the rows, default S .. S + n - 1, and mask [n, S + n] bool, the context
        and rows that they see.
        """
        x, (length, count) = embeddings * self.config.embedding_scale, (context.shape[1], embeddings.shape[1])
        places = torch.arange(length + count, device=x.device)
        if positions is not None:
            places = torch.cat((places[:length], positions))
        rotation = rotation_at(self.config, places[None], x.dtype)
        for layer in self.layers:
            x = layer(x, context, rotation, mask)
        return self.norm(x)

    def draft_logits(
        self,
        hidden: Tensor,
        target_head: nn.Module,
        tokens: Tensor | None = None,
        target_embedding: nn.Module | None = None,
    ) -> Tensor:
        """Logits [..., Vd] of the rows that give drafts: hidden [..., H].

        tokens [...]: those before the drafts, for a Markov head or a selector. A selector sets the logits of all but
        its candidates to -inf. With a recurrent correction: hidden [..., D, H] of a block's rows from its first draft
        on, tokens [..., D] from the root on; Domino also needs the target's embedding. Raises ValueError if something
        is missing.
        """
        logits = (target_head if self.lm_head is None else self.lm_head)(hidden) * self.config.logit_scale
        if (cap := self.config.logit_cap) is not None:
            logits = torch.tanh(logits / cap) * cap
        if self.markov_head is None and self.candidate_selector is None and self.prefix_gru is None:
            return logits
        if tokens is None:
            raise ValueError("BlockDrafter.draft_logits: this drafter needs the tokens before the drafts")
        if self.markov_head is not None:
            return logits + self.markov_head(hidden, tokens)
        if self.prefix_gru is not None:
            embedding = target_embedding if self.embed_tokens is None else self.embed_tokens
            if embedding is None:
                raise ValueError("BlockDrafter.draft_logits: this drafter needs the target's embedding")
            return logits + self._domino(hidden, embedding(tokens) * self.config.embedding_scale)
        assert self.candidate_selector is not None
        best, candidates = logits.topk(self.config.selector_top_k)
        scores = best + self.candidate_selector(hidden, tokens, self.to_target_ids(candidates))
        return torch.full_like(logits, float("-inf")).scatter(-1, candidates, scores)

    def _domino(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Domino's terms [..., D, Vd] for the logits of rows [..., D, H] after tokens [..., D, H]."""
        assert self.prefix_gru is not None and self.embed_proj is not None
        states = self.prefix_gru(embedded.reshape(-1, *embedded.shape[-2:]))[0].view(*embedded.shape[:-1], -1)
        found = self.embed_proj(torch.cat((hidden, states), dim=-1))
        corrected = torch.arange(found.shape[-2], device=found.device) >= self.config.gru_start
        return torch.where(corrected[:, None], found, 0)

    def likeliest_chain(
        self, hidden: Tensor, root: int, target_head: nn.Module, target_embedding: nn.Module | None = None
    ) -> list[int]:
        """The chain of the likeliest tokens, from hidden [D, H] of the rows that give drafts, in order."""
        chain = [root]
        for count in range(1, len(hidden) + 1):
            before = torch.tensor(chain, device=hidden.device)
            logits = self.draft_logits(hidden[:count], target_head, before, target_embedding)
            chain.append(int(self.to_target_ids(logits[-1].argmax())))
        return chain[1:]

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids, int64, any shape."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]
