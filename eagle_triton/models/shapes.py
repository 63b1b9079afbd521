"""Models of published shapes with random weights: as slow as the published ones, but few drafts are accepted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from .block_drafter import BlockDrafter, BlockDrafterConfig
from .block_loading import default_target_layers
from .ea_model import EaModel
from .families import text_config
from .head_loading import borrow_embedding
from .heads import DraftConfig, Eagle1Head, Eagle3Head
from .mtp import MTPHead, new_unit


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    return dict(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **others,
    )


STD, SEED = 0.02, 0  # of random weights
DRAFT_VOCABULARY = 32000  # of an EAGLE-3 head
_OF_QWEN3 = dict(vocab_size=151936, head_dim=128)

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _sizes(64, 128, 8, 4, 2, vocab_size=512, draft_vocab_size=128),
    "llama-3.2-1b": _sizes(2048, 8192, 16, 32, 8, vocab_size=128256),
    "llama-3.2-3b": _sizes(3072, 8192, 28, 24, 8, vocab_size=128256),
    "llama-3.1-8b": _sizes(4096, 14336, 32, 32, 8, vocab_size=128256),
    "llama-3.3-70b": _sizes(8192, 28672, 80, 64, 8, vocab_size=128256),
    "qwen3-0.6b": _sizes(1024, 3072, 28, 16, 8, model_type="qwen3", **_OF_QWEN3),
    "qwen3-4b": _sizes(2560, 9728, 36, 32, 8, model_type="qwen3", **_OF_QWEN3),
    "qwen3-8b": _sizes(4096, 12288, 36, 32, 8, model_type="qwen3", **_OF_QWEN3),
    "qwen3-32b": _sizes(5120, 25600, 64, 64, 8, model_type="qwen3", **_OF_QWEN3),
    "qwen3-30b-a3b": _sizes(
        *(2048, 6144, 48, 32, 4),
        model_type="qwen3_moe",
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        **_OF_QWEN3,
    ),
    "mixtral-8x7b": _sizes(
        *(4096, 14336, 32, 32, 8),
        model_type="mixtral",
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=32000,
    ),
    "gpt-oss-20b": _sizes(
        *(2880, 2880, 24, 64, 8),
        model_type="gpt_oss",
        head_dim=64,
        sliding_window=128,
        num_local_experts=32,
        num_experts_per_tok=4,
        vocab_size=201088,
    ),
    "glm-4.7-flash": _sizes(
        *(2048, 10240, 47, 20, 20),
        model_type="glm4_moe_lite",
        head_dim=64,
        q_lora_rank=768,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        n_routed_experts=64,
        n_shared_experts=1,
        num_experts_per_tok=4,
        moe_intermediate_size=1536,
        routed_scaling_factor=1.8,
        norm_topk_prob=True,
        vocab_size=154880,
    ),
    "gemma3-12b": _sizes(
        *(3840, 15360, 48, 16, 8),
        model_type="gemma3_text",
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=1024,
        vocab_size=262208,
    ),
    "muse-glimmer-30b": _sizes(
        *(6656, 19968, 52, 32, 2),
        model_type="muse_glimmer_text",
        head_dim=128,
        sliding_window=2048,
        qk_scale_factor=1.0,  # published: 3.87, with which rounding decides what random weights attend to
        vocab_size=202048,
    ),
    "phi4-mini": _sizes(
        *(3072, 8192, 32, 24, 8),
        model_type="phi3",
        partial_rotary_factor=0.75,
        vocab_size=200064,
    ),
}
"""Targets: a `model_type` (default: Llama's), sizes, and the size of their heads' draft vocabulary (default:
DRAFT_VOCABULARY).

Layers and sizes are the published ones. The vocabulary projection always has its own matrix, and rotary frequencies are
not the checkpoints': phi4-mini has no longrope.
"""

BLOCK_LAYERS, BLOCK_SIZE = 5, 16
"""Layers and rows of a random block drafter, as of published DFlash drafters of 8B targets."""

NEMOTRON: dict[str, Any] = dict(
    model_type="nemotron_h",
    vocab_size=131072,
    head_dim=128,
    ssm_state_size=128,
    n_groups=8,
    max_position_embeddings=131072,
)

HYBRIDS: dict[str, dict[str, Any]] = {
    "tiny": _sizes(
        *(64, 128, 4, 4, 2),
        vocab_size=512,
        head_dim=32,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
    "qwen3.5-4b": _sizes(2560, 9216, 32, 16, 4, vocab_size=248320, head_dim=256, linear_num_value_heads=32),
    "qwen3.5-9b": _sizes(4096, 12288, 32, 16, 4, vocab_size=248320, head_dim=256, linear_num_value_heads=32),
    "qwen3.5-27b": _sizes(5120, 17408, 64, 24, 4, vocab_size=248320, head_dim=256, linear_num_value_heads=48),
    "nemotron-nano-9b-v2": _sizes(
        *(4480, 15680, 56, 40, 8),
        **NEMOTRON,
        mamba_num_heads=128,
        mamba_head_dim=80,
        hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    ),
    "nemotron-3-nano": _sizes(
        *(2688, 1856, 52, 32, 2),
        **NEMOTRON,
        mamba_num_heads=64,
        mamba_head_dim=64,
        n_routed_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    ),
}
"""A `model_type` (default: Qwen3.5's) and sizes. Other fields keep the defaults of the configuration class."""


def random_hybrid(
    shape: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, MTPHead | None]:
    """A model of a shape in HYBRIDS, and for a Qwen3.5 a multi-token-prediction layer, with random weights.

    Raises ValueError for an unknown shape, and if transformers has no such model.
    """
    if shape not in HYBRIDS:
        raise ValueError(f"shape must be one of {', '.join(HYBRIDS)}, got {shape!r}")
    no_tokens: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if "model_type" in HYBRIDS[shape]:
        sizes = dict(HYBRIDS[shape])
        config = AutoConfig.for_model(sizes.pop("model_type"), **sizes, **no_tokens)
        torch.manual_seed(SEED)
        with _made_in(dtype, device):
            other = AutoModelForCausalLM.from_config(config)
        _randomise(other)
        _randomise_gates(other)
        _quieten_experts(other)
        return other.eval(), None
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    config = Qwen3_5TextConfig(**HYBRIDS[shape], rope_parameters=rope, **no_tokens)
    torch.manual_seed(SEED)
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config)
    rotary = type(model.model.rotary_emb)(config=config)
    model = model.to(dtype).to_empty(device=device)
    model.model.rotary_emb = rotary.to(device)
    head = MTPHead([new_unit(model)]).to(dtype).to_empty(device=device)
    for module in (model, head):
        _randomise(module, norms=0.0)  # zero-centred
        _randomise_gates(module)
    return model.eval(), head.eval()


def _randomise_gates(module: nn.Module) -> None:
    """Gates of recurrent layers from slow to quick ones, and their norms."""
    for name, parameter in module.named_parameters():
        if name.endswith(("linear_attn.norm.weight", "dt_bias", ".D")):
            nn.init.ones_(parameter)
        elif name.endswith("A_log"):
            nn.init.uniform_(parameter, -4.0, 2.0)


def random_model(
    shape: str,
    eagle3: bool = True,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    std: float = STD,
    ranks: int = 1,
    **tree: Any,
) -> EaModel:
    """An EaModel of a shape in SHAPES, without a tokenizer; all weights but norms are drawn from N(0, std). tree: the
    head's arguments.

    Weights are made on their device and in `dtype`, so they take no other memory.
    ranks: number of torchrun processes; each makes its part of the target (tensor parallelism) and the whole head.
    Raises ValueError for an unknown shape.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    sizes = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, **SHAPES[shape]}
    draft_vocab = sizes.pop("draft_vocab_size", DRAFT_VOCABULARY)
    draft_vocab = draft_vocab if eagle3 else sizes["vocab_size"]
    no_tokens: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    kind, text = sizes.pop("model_type", "llama"), dict(**sizes, **no_tokens, tie_word_embeddings=False)
    config: Any = AutoConfig.for_model(kind, **text)
    made = AutoModelForCausalLM
    if kind == "muse_glimmer_text":  # which is only a part of a model that sees
        sees: dict[str, Any] = dict(_sizes(64, 64, 1, 2, 2), patch_size=4)
        text["model_type"], made = kind, AutoModelForImageTextToText
        config = AutoConfig.for_model("muse_glimmer", text_config=text, vision_config=sees, tie_word_embeddings=False)
    of_head = dict(draft_vocab_size=draft_vocab, num_hidden_layers=1, bias=False, sliding_window=None)
    own = DraftConfig.from_dict({**sizes, **of_head})
    torch.manual_seed(SEED)
    with _made_in(dtype, "meta" if ranks > 1 else device):
        base = made.from_config(config)
    if ranks > 1:
        base = _spread(base, ranks, device)
    with _made_in(dtype, device):
        head = (Eagle3Head if eagle3 else Eagle1Head)(own, **tree)
    _randomise(base, std, norms=1.0 if ranks > 1 else None)
    _quieten_experts(base)
    _randomise(head, std)
    borrow_embedding(head, base)
    if eagle3 and head.d2t is not None:
        kept = torch.randperm(sizes["vocab_size"])[:draft_vocab].sort().values
        head.d2t = (kept - torch.arange(draft_vocab)).to(device)
    return EaModel(base, head, base_model_name_or_path=shape).eval()


def random_block_drafter(target: Any) -> BlockDrafter:
    """A DFlash drafter of BLOCK_LAYERS layers and BLOCK_SIZE rows, for a causal language model of a shape in SHAPES:
    with its device, dtype and layer sizes, and random weights as in `random_model`."""
    config, weight = text_config(target.config), target.get_input_embeddings().weight
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    sizes: dict[str, Any] = {name: getattr(config, name, None) for name in names}
    sizes["head_dim"] = sizes["head_dim"] or config.hidden_size // config.num_attention_heads
    layers = default_target_layers(config.num_hidden_layers, BLOCK_LAYERS)
    own = BlockDrafterConfig(
        **sizes,
        num_hidden_layers=BLOCK_LAYERS,
        draft_vocab_size=config.vocab_size,
        block_size=BLOCK_SIZE,
        mask_token_id=config.vocab_size - 1,
        feature_layers=tuple(layer + 1 for layer in layers),
        causal=(False,) * BLOCK_LAYERS,
        windows=(None,) * BLOCK_LAYERS,
    )
    torch.manual_seed(SEED)
    with _made_in(weight.dtype, weight.device):
        drafter = BlockDrafter(own)
    _randomise(drafter)
    return drafter.eval()


@contextmanager
def _made_in(dtype: torch.dtype, device: torch.device | str) -> Iterator[None]:
    """Inside, parameters of new modules have this dtype and device."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(default)


def _spread(model: Any, ranks: int, device: torch.device | str) -> Any:
    """Share a model on the meta device between processes by its tp_plan, and allocate this process's part."""
    from transformers.distributed import DistributedConfig

    config, _, mesh = type(model).prepare_distribute_model(DistributedConfig(tp_size=ranks))
    rotary = type(model.model.rotary_emb)(config=model.config)
    model = type(model).maybe_distribute_model(model, config, mesh).to_empty(device=device)
    model.model.rotary_emb = rotary.to(device)
    return model


@torch.no_grad()
def _quieten_experts(model: nn.Module) -> None:
    """Make the outputs of large experts as small as attention's. Otherwise rounding in 16 bits decides which experts
    rows choose, layer after layer, and the logits of two correct forwards have little in common."""
    for name, parameter in model.named_parameters():
        if name.endswith("experts.down_proj"):
            parameter.mul_(min(1.0, 1000.0 * parameter[0].numel() ** -0.5))


def _randomise(module: nn.Module, std: float = STD, norms: float | None = None) -> None:
    """Draw all but norms from N(0, std). norms: fill these with it; None: keep the ones or zeros of their class."""
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            part: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if "norm" not in name:
                part.normal_(0, std)
            elif norms is not None:
                part.fill_(norms)
