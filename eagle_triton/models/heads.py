"""The draft heads of EAGLE: one small decoder layer that guesses the target's next hidden states and tokens.

`Eagle1Head` is for EAGLE-1 and EAGLE-2 checkpoints, `Eagle3Head` for EAGLE-3. Parameters have the names of published
checkpoints, so `load_state_dict` takes these unchanged. Both can be trained: `forward` does not stop the gradient.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .head_fields import sliding_window
from .tree import (
    TreeChoices,
    ancestor_mask,
    check_dynamic_tree,
    fixed_tree,
    grow_dynamic_tree,
    grow_fixed_tree,
    retrieve_paths,
)

# (keys, values) for each layer, each [B, Hkv, S, d]; keys are rotated.
HeadCache = tuple[tuple[Tensor, Tensor], ...]

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = {"silu": nn.SiLU(), "gelu_pytorch_tanh": nn.GELU(approximate="tanh")}
EAGLE31_FIELDS = ("norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class DraftConfig:
    """The content of a draft head's config.json.

    Sizes count elements. `draft_vocab_size`: the number of tokens the head can propose; equal to `vocab_size`, the
    target's, unless the vocabulary was cut. `target_hidden_size`: the width of one target layer where it differs from
    the head's own. `bias`: of `fc` in an EAGLE-1 head. `feature_layers`: the target layers with inputs for an EAGLE-3
    head; None: the usual three. `sliding_window`: how many tokens, itself and those right before it, each token sees in
    every layer; None: all. The fields of EAGLE 3.1: `norm_before_fc` is one norm over all features, `fc_norm` one for
    each, both before `fc`; with `norm_output` the next pass reads the normed hidden state. Raises ValueError for sizes
    that do not fit together or an unknown `rope_scaling`.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int = None  # type: ignore[assignment]  # None: see __post_init__
    head_dim: int = None  # type: ignore[assignment]
    draft_vocab_size: int = None  # type: ignore[assignment]
    target_hidden_size: int = None  # type: ignore[assignment]
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    bias: bool = True
    qkv_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    feature_layers: tuple[int, ...] | None = None
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        defaults = dict(
            num_key_value_heads=self.num_attention_heads,
            head_dim=self.hidden_size // self.num_attention_heads,
            draft_vocab_size=self.vocab_size,
            target_hidden_size=self.hidden_size,
        )
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"draft head: num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft head: draft_vocab_size must be in 1..vocab_size ({self.vocab_size}), "
                f"got {self.draft_vocab_size}"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"draft head: hidden_act must be one of {tuple(ACTIVATIONS)}, got {self.hidden_act!r}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"draft head: sliding_window must be at least 1, got {self.sliding_window}")
        if rope_type(self.rope_scaling) not in ROPE_TYPES:
            raise ValueError(f"draft head: rope_scaling must be one of {ROPE_TYPES}, got {self.rope_scaling}")
        scaling = self.rope_scaling or {}
        if rope_type(scaling) == "yarn" and not {"factor", "original_max_position_embeddings"} <= scaling.keys():
            raise ValueError(
                "draft head: rope_scaling of type yarn must have factor and original_max_position_embeddings, got "
                f"{self.rope_scaling}"
            )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "DraftConfig":
        """From the content of config.json; unused fields are ignored.

        Raises ValueError naming missing fields, or for a sliding window that `sliding_window` refuses.
        """
        config = {**config, "sliding_window": sliding_window(config)}
        if config.get("hidden_act") is None:
            config["hidden_act"] = config.get("hidden_activation")  # Gemma's name for it
        config["rope_theta"], config["rope_scaling"] = rope_of(config)
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in config.items() if name in known and value is not None}
        needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f"draft head: config.json lacks {', '.join(missing)}")
        if "feature_layers" in given:
            given["feature_layers"] = tuple(given["feature_layers"])
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json; `from_dict` reads it back."""
        layers = {} if self.sliding_window is None else {"layer_types": ["sliding_attention"] * self.num_hidden_layers}
        return {field.name: getattr(self, field.name) for field in fields(self)} | layers

    def replace(self, **changes: Any) -> "DraftConfig":
        """A copy with some fields changed."""
        return replace(self, **changes)


def rope_of(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """`rope_theta` and `rope_scaling` of a config.json; newer ones have them in `rope_parameters`."""
    rope, theta, scaling = config.get("rope_parameters") or {}, config.get("rope_theta"), config.get("rope_scaling")
    if scaling is None and rope_type(rope) != "default":
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return rope.get("rope_theta", 10000.0) if theta is None else theta, scaling


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """The type of `rope_scaling`, under its new or old name; "default" for None."""
    scaling = scaling or {}
    return scaling.get("rope_type") or scaling.get("type") or "default"


def rotary_frequencies(config: Any, device: torch.device | str = "cpu") -> Tensor:
    """Inverse frequencies [head_dim / 2] fp32, scaled by `rope_scaling` (llama3: the rule of Llama 3.1; yarn: Peng et
    al., arXiv 2309.00071).

    config: a DraftConfig, or another with its fields `head_dim`, `rope_theta` and `rope_scaling`.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequency = 1.0 / config.rope_theta**exponent
    scaling, kind = config.rope_scaling or {}, rope_type(config.rope_scaling)
    if kind == "linear":
        return frequency / scaling["factor"]
    if kind == "llama3":
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: keep a fast frequency; 0: scale a slow one
        return frequency * (keep + (1 - keep) / scaling["factor"])
    if kind == "yarn":
        last, length = config.head_dim - 1, scaling["original_max_position_embeddings"]
        low, high = (  # the pairs that turn beta_fast and beta_slow times over the original length
            config.head_dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(config.rope_theta))
            for turns in (scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1)
        )
        if scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, last)
        pair = torch.arange(config.head_dim // 2, dtype=torch.float32, device=device)
        slow = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)  # 0: keep a fast frequency; 1: scale a slow one
        return frequency * (1 - slow + slow / scaling["factor"])
    return frequency


def rotary_scale(config: Any) -> float:
    """The factor of cosines and sines: yarn's, else 1. config: as in `rotary_frequencies`."""
    scaling = config.rope_scaling or {}
    if rope_type(scaling) != "yarn":
        return 1.0
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * weight * math.log(scaling["factor"]) + 1.0

    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)


def rotation_at(config: Any, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin for `rotate`, [B, 1, T, d], at positions [B, T]; computed in fp32. config: as in
    `rotary_frequencies`."""
    angles = positions.float()[:, None, :, None] * rotary_frequencies(config, positions.device)
    angles, scale = torch.cat((angles, angles), dim=-1), rotary_scale(config)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the statistics in fp32, the result in the dtype of x."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def within_window(mask: Tensor, window: int) -> Tensor:
    """An attention mask [..., S], bool or additive, that keeps only the last `window` visible columns of each row."""
    lowest = None if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    shown = mask if lowest is None else mask > lowest
    near = shown & (shown.flip(-1).cumsum(-1).flip(-1) <= window)
    return near if lowest is None else mask.masked_fill(~near, lowest)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions over a cache that grows by concatenation."""

    def __init__(self, config: DraftConfig, input_size: int, bias: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=bias)
        self.k_proj = nn.Linear(input_size, key_size, bias=bias)
        self.v_proj = nn.Linear(input_size, key_size, bias=bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, cache: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads, T, d]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        if cache is not None:
            key, value = torch.cat((cache[0], key), dim=2), torch.cat((cache[1], value), dim=2)
        return self.o_proj(attended(query, key, value, mask)), (key, value)


def attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention [B, T, Hq * d] of query [B, Hq, T, d], key and value [B, Hkv, S, d]. No mask: causal."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    with steady_attention():
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
    return output.transpose(1, 2).flatten(2)


def steady_attention() -> AbstractContextManager[None]:
    """scaled_dot_product_attention without cuDNN, which makes a new plan for each length: 100 ms for every token."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, heads, T, d] by cos and sin [B, 1, T, d], in the half-rotation layout."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class MLP(nn.Module):
    """SwiGLU, or GeGLU; activation: see ACTIVATIONS."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act_fn = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Eagle3Layer(nn.Module):
    """The decoder layer of EAGLE-3: attention sees the embedding and the hidden state side by side."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * config.hidden_size, config.qkv_bias)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act)

    def forward(self, embedding: Tensor, hidden: Tensor, rotation, mask, cache):
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat((self.input_layernorm(embedding), normed), dim=-1)
        attended, cache = self.self_attn(both, rotation, mask, cache)
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), cache


class Eagle1Layer(nn.Module):
    """A Llama decoder layer; the first one has no input norm."""

    def __init__(self, config: DraftConfig, index: int) -> None:
        super().__init__()
        if index > 0:
            self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size, config.qkv_bias)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act)

    def forward(self, hidden: Tensor, rotation, mask, cache):
        normed = self.input_layernorm(hidden) if hasattr(self, "input_layernorm") else hidden
        attended, cache = self.self_attn(normed, rotation, mask, cache)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), cache


class DraftHead(nn.Module):
    """The base of both heads: embedding, positions, masks, and drafting a tree.

    Tree parameters are attributes and may change between generations: `total_tokens` (drafts: one less than the
    argument `total_token`), `depth`, `top_k`, `threshold` (part of the interface, not used), and `tree_choices` (rank
    paths of a fixed tree, which set `total_tokens`; None: a dynamic tree). `stable_kv` holds the keys and values of the
    accepted tokens.
    """

    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(
        self,
        config: DraftConfig,
        total_token: int = 60,
        depth: int = 7,
        top_k: int = 10,
        threshold: float = 1.0,
        tree_choices: TreeChoices | None = None,
    ) -> None:
        """Raises ValueError unless `threshold` is a positive number."""
        super().__init__()
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 < threshold < math.inf:
            raise ValueError(f"threshold: must be a positive number, got {threshold!r}")
        self.config = config
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self._total_tokens = total_token - 1
        self.depth = depth
        self.top_k = top_k
        self.threshold = math.log(threshold)
        self.tree_choices = tree_choices
        self.stable_kv: HeadCache | None = None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.register_buffer("d2t", None)
        self.register_buffer("t2d", None)

    @property
    def total_tokens(self) -> int:
        """Drafts in a tree, without the root."""
        return self._total_tokens if self.tree_choices is None else len(self.tree_choices)

    @total_tokens.setter
    def total_tokens(self, drafts: int) -> None:
        self._total_tokens = drafts

    def forward(
        self,
        features: Tensor,
        input_ids: Tensor,
        cache: HeadCache | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, HeadCache]:
        """One pass of the head.

        features: [B, T, F], the target's features at each position, or the head's own output [B, T, H].
        input_ids: [B, T] int64 target ids, the token after each position.
        cache: returned by an earlier call, with S rows; None: empty.
        position_ids: [B, T] or [T] int64; default S..S+T-1.
        attention_mask: bool (true: may attend) or additive, broadcastable to [B, 1, T, S + T]; default causal. Its
        columns must be in the order of positions, because a sliding window keeps the last visible ones.
        Returns (hidden [B, T, H] in the dtype of features, the cache with S + T rows).
        """
        past = 0 if cache is None else cache[0][0].shape[2]
        length = input_ids.shape[1]
        device = features.device
        if position_ids is None:
            position_ids = torch.arange(past, past + length, device=device)
        window = self.config.sliding_window
        if attention_mask is None and (past > 0 or window is not None):
            attention_mask = torch.ones(length, past + length, dtype=torch.bool, device=device).tril(past)
        if attention_mask is not None and window is not None:
            attention_mask = within_window(attention_mask, window)
        rotation = rotation_at(self.config, position_ids.reshape(-1, position_ids.shape[-1]), features.dtype)
        embedding = self.embed_tokens(input_ids).to(features.dtype)
        return self.run_layers(embedding, features, rotation, attention_mask, cache)

    def run_layers(self, embedding, features, rotation, mask, cache) -> tuple[Tensor, HeadCache]:
        """The part of `forward` that differs between kinds of heads."""
        raise NotImplementedError

    def draft_logits(self, hidden: Tensor, target_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Logits [..., Vd] of the next token, from `hidden` [..., H]."""
        raise NotImplementedError

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids, int64, any shape."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def reset_kv(self) -> None:
        """Forget the current sequence."""
        self.stable_kv = None

    def init_tree(self) -> None:
        """Raise ValueError if the tree parameters give no tree."""
        if self.tree_choices is None:
            check_dynamic_tree(self.total_tokens, self.depth, self.top_k, self.config.draft_vocab_size)
        elif (needed := fixed_tree(self.tree_choices).branching) > self.config.draft_vocab_size:
            raise ValueError(
                f"tree_choices: ranks up to {needed - 1} exceed the draft vocabulary ({self.config.draft_vocab_size})"
            )

    @torch.no_grad()
    def topK_genrate(
        self, hidden_states: Tensor, input_ids: Tensor, head: Callable[[Tensor], Tensor], logits_processor: Any = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draft the next tree. (The name is the original's, with its spelling.)

        hidden_states: [1, T, F] target features of the tokens committed since the last call (or of all, after
        `reset_kv`). input_ids: [1, L] int64, the whole sequence with the root as its last token. head: maps the
        target's hidden states to logits, `EaModel.logit_head` (EAGLE-1/2 use it). logits_processor: only whether it is
        None matters: that decides the order of the paths. Raises RuntimeError if the head's logits contain NaN. Returns
        draft_tokens [1, N] int64 (root first), retrieve_indices [leaves, depth + 1] int64 on the CPU (node indices of
        each path, padded with -1), tree_mask [1, 1, N, N] fp32 (1: self or ancestor) and tree_position_ids [N] int64
        (depths).
        """
        self.init_tree()
        root = input_ids[0, -1:].to(hidden_states.device)
        following = input_ids[:, 1:].to(hidden_states.device)
        known = 0 if self.stable_kv is None else self.stable_kv[0][0].shape[2]
        hidden, cache = self(hidden_states, following[:, known:], self.stable_kv)
        self.stable_kv = cache
        length = following.shape[1]
        broken = []  # for each pass, whether a logit was NaN; read once at the end

        def log_probs_of(hidden: Tensor) -> Tensor:
            logits = self.draft_logits(hidden[0], head)
            broken.append(logits.isnan().any())
            return logits.log_softmax(dim=-1)

        def expand(tokens: Tensor, hidden: Tensor, visible: Tensor, depth: int) -> tuple[Tensor, Tensor]:
            nonlocal cache
            mask = torch.cat((visible.new_ones(len(tokens), length), visible), dim=1)
            positions = torch.full_like(tokens, length + depth - 1)
            hidden, cache = self(hidden, tokens[None], cache, positions, mask)
            return log_probs_of(hidden), hidden

        last = hidden[:, -1:]
        log_probs = log_probs_of(last)
        if self.tree_choices is None:
            drafts, parents = grow_dynamic_tree(
                log_probs, last, expand, self.to_target_ids, self.total_tokens, self.depth, self.top_k
            )
        else:
            tree = fixed_tree(self.tree_choices)
            drafts, parents = grow_fixed_tree(log_probs, last, expand, self.to_target_ids, tree)
        if torch.stack(broken).any():
            raise RuntimeError("the draft head's logits contain NaN: no tree can be drafted from them")
        mask = ancestor_mask(parents)
        paths = retrieve_paths(parents.tolist(), by_path=logits_processor is not None)
        return torch.cat((root, drafts))[None], torch.tensor(paths), mask.float()[None, None], mask.sum(1) - 1


class Eagle3Head(DraftHead):
    """EAGLE-3 (arXiv:2503.01840): features of three target layers, its own vocabulary and LM head.

    `d2t` [Vd] int64 holds offsets (target id = draft id + d2t[draft id]) and `t2d` [V] bool says which target ids can
    be drafted; both are None when the head can draft the whole vocabulary. `input_norm` and `fc_norm` are None unless
    the config asks for them.
    """

    def __init__(self, config: DraftConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        layers, width, eps = len(config.feature_layers or (0, 0, 0)), config.target_hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(layers * width, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(layers)) if config.fc_norm else None
        self.fc = nn.Linear(layers * width, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size != config.vocab_size:
            self.d2t = torch.zeros(config.draft_vocab_size, dtype=torch.long)
            self.t2d = torch.zeros(config.vocab_size, dtype=torch.bool)

    def run_layers(self, embedding, features, rotation, mask, cache) -> tuple[Tensor, HeadCache]:
        """`fc` for target features (wider than the embedding), then the layer; normed only with `norm_output`."""
        hidden = self.reduced(features) if features.shape[-1] != embedding.shape[-1] else features
        hidden, rows = self.midlayer(embedding, hidden, rotation, mask, None if cache is None else cache[0])
        return self.norm(hidden) if self.config.norm_output else hidden, (rows,)

    def reduced(self, features: Tensor) -> Tensor:
        """[..., H] from the target's features [..., F]: their norms, then `fc`."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def draft_logits(self, hidden: Tensor, target_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """[..., Vd] from the output of `forward`, [..., H]; `target_head` is not used."""
        return self.lm_head(hidden if self.config.norm_output else self.norm(hidden))


class Eagle1Head(DraftHead):
    """EAGLE-1 and EAGLE-2 (arXiv:2401.15077, 2406.16858): uses the target's last hidden states and its LM head."""

    def __init__(self, config: DraftConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name in EAGLE31_FIELDS:
            if getattr(config, name):
                raise ValueError(f"draft head: {name}=True is for EAGLE-3 heads, this is an EAGLE-1/2 head")
        if config.draft_vocab_size != config.vocab_size:
            raise ValueError(
                f"Eagle1Head: draft_vocab_size must be the target's vocab_size ({config.vocab_size}), "
                f"got {config.draft_vocab_size}"
            )
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList(Eagle1Layer(config, index) for index in range(config.num_hidden_layers))

    def run_layers(self, embedding, features, rotation, mask, cache) -> tuple[Tensor, HeadCache]:
        """`fc` over embedding and features, then the layers."""
        hidden = self.fc(torch.cat((embedding, features), dim=-1))
        rows = []
        for index, layer in enumerate(self.layers):
            hidden, new = layer(hidden, rotation, mask, None if cache is None else cache[index])
            rows.append(new)
        return hidden, tuple(rows)

    def draft_logits(self, hidden: Tensor, target_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """As in DraftHead; raises ValueError without `target_head`."""
        if target_head is None:
            raise ValueError("Eagle1Head.draft_logits: needs the target's lm_head, got None")
        return target_head(hidden)
