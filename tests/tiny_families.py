"""Tiny random models of every family that a plain target may have, with thresholds that a short text crosses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from eagle_triton.models.heads import DraftConfig, DraftHead, Eagle1Head, Eagle3Head
from tests import tiny
from tests.tiny import random_matrices

SIZES: dict[str, Any] = dict(
    **tiny.SIZES,
    **tiny.ENDLESS,
    num_hidden_layers=4,
    vocab_size=24,
    max_position_embeddings=512,
    tie_word_embeddings=False,  # a tied random model of Gemma says one token for ever
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
MULTIPLIERS = dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.05, logits_scaling=8.0)
QWEN_EXPERTS = dict(num_experts_per_tok=3, moe_intermediate_size=32)
ALTERNATE = ["sliding_attention", "full_attention"] * 2
SLIDING = dict(head_dim=16, sliding_window=8)
GEMMA4 = dict(global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True, final_logit_softcapping=9.0,
    layer_types=ALTERNATE, **SLIDING)  # fmt: skip

LATENT = dict(num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
    v_head_dim=20)  # fmt: skip
LATENT_EXPERTS = dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1,
    routed_scaling_factor=1.5, norm_topk_prob=True, num_experts_per_tok=3, moe_intermediate_size=32)  # fmt: skip

MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_expand=2, mamba_chunk_size=16,
    layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"])  # fmt: skip
LFM = dict(conv_L_cache=3, layer_types=["conv", "full_attention", "conv", "conv"])

OLMO_HYBRID = dict(linear_key_head_dim=16, linear_value_head_dim=32, linear_num_key_heads=4, linear_num_value_heads=4,
    layer_types=MAMBA["layer_types"])  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama yarn": ("llama", dict(rope_parameters=YARN)),
    "ministral3": ("ministral3", dict(head_dim=16, sliding_window=8, rope_parameters={
        **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1})),
    "phi3": ("phi3", dict(sliding_window=8, rope_parameters={
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75})),
    "smollm3": ("smollm3", dict(sliding_window=8, use_sliding_window=True, layer_types=ALTERNATE)),
    "granite": ("granite", MULTIPLIERS),
    "granite_swa": ("granite_swa", dict(sliding_window=8, layer_types=ALTERNATE, layer_rope_theta=[1e4, 0, 1e3, 1e4],
        **MULTIPLIERS)),
    "granitemoe": ("granitemoe", dict(num_local_experts=8, num_experts_per_tok=3, **MULTIPLIERS | {
        "embedding_multiplier": 1.5, "residual_multiplier": 0.8})),
    "granitemoeshared": ("granitemoeshared", dict(num_local_experts=8, num_experts_per_tok=3,
        shared_intermediate_size=48, **MULTIPLIERS)),
    "granitemoeshared without a shared expert": ("granitemoeshared", dict(num_local_experts=8, num_experts_per_tok=3)),
    "granitemoe_swa": ("granitemoe_swa", dict(num_local_experts=8, num_experts_per_tok=3, shared_intermediate_size=48,
        sliding_window=8, layer_types=ALTERNATE, layer_rope_theta=[1e4, 0, 1e3, 1e4], **MULTIPLIERS)),
    "glm4": ("glm4", dict(head_dim=16, attention_bias=True)),
    "glm4_moe": ("glm4_moe", dict(head_dim=16, n_routed_experts=8, n_group=2, topk_group=1, n_shared_experts=1,
        first_k_dense_replace=1, routed_scaling_factor=1.5, use_qk_norm=True, norm_topk_prob=True, **QWEN_EXPERTS)),
    "glm4_moe_lite": ("glm4_moe_lite", LATENT | LATENT_EXPERTS),
    "deepseek_v2": ("deepseek_v2", LATENT | LATENT_EXPERTS | dict(q_lora_rank=None)),
    "deepseek_v2 in groups": ("deepseek_v2", LATENT | LATENT_EXPERTS | dict(topk_method="group_limited_greedy")),
    "deepseek_v3": ("deepseek_v3", LATENT | LATENT_EXPERTS | dict(rope_interleave=False, rope_parameters={
        **YARN, "mscale": 1.0, "mscale_all_dim": 1.0})),
    "mistral4": ("mistral4", LATENT | LATENT_EXPERTS | dict(first_k_dense_replace=1, n_group=1, rope_parameters={
        **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 8})),
    "youtu": ("youtu", LATENT),
    "sarvam_mla": ("sarvam_mla", LATENT | LATENT_EXPERTS),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", dict(sliding_window=8)),
    "gemma2": ("gemma2", dict(query_pre_attn_scalar=24, attn_logit_softcapping=5.0, **SLIDING)),
    "gemma3_text": ("gemma3_text", dict(query_pre_attn_scalar=24, num_hidden_layers=7, final_logit_softcapping=9.0,
        **SLIDING)),
    "gemma4_text": ("gemma4_text", dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=24,
        enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=32, use_double_wide_mlp=True,
        num_kv_shared_layers=2, **GEMMA4 | {"num_hidden_layers": 5, "layer_types": [ALTERNATE[0], *ALTERNATE]})),
    "qwen3_moe": ("qwen3_moe", dict(head_dim=16, num_experts=8, norm_topk_prob=True, mlp_only_layers=[1],
        use_sliding_window=True, sliding_window=8, **QWEN_EXPERTS)),
    "qwen2_moe": ("qwen2_moe", dict(num_experts=8, shared_expert_intermediate_size=48, norm_topk_prob=False,
        use_sliding_window=True, sliding_window=8, layer_types=ALTERNATE, **QWEN_EXPERTS)),
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=8)),
    "hyperclovax": ("hyperclovax", MULTIPLIERS),
    "hyperclovax without post-norms": ("hyperclovax", dict(use_post_norm=False)),
    "seed_oss": ("seed_oss", dict(head_dim=16, attention_bias=True, attention_out_bias=True)),
    "exaone": ("exaone", {}),
    "exaone4": ("exaone4", dict(sliding_window=8, layer_types=ALTERNATE)),
    "exaone4 without windows": ("exaone4", dict(sliding_window=None, layer_types=["full_attention"] * 4)),
    "exaone_moe": ("exaone_moe", dict(sliding_window=8, layer_types=ALTERNATE, num_experts=8, num_shared_experts=1,
        first_k_dense_replace=1, n_group=2, topk_group=1, **QWEN_EXPERTS)),
    "internlm3": ("internlm3", dict(attention_bias=True, mlp_bias=True)),
    "iquestcoder": ("iquestcoder", dict(head_dim=16)),
    "cwm": ("cwm", dict(layer_types=ALTERNATE, bos_token_id=1, rope_parameters=None, **SLIDING)),
    "helium": ("helium", dict(head_dim=16)),
    "starcoder2": ("starcoder2", dict(sliding_window=8)),
    "cohere": ("cohere", dict(logit_scale=0.7)),
    "cohere2": ("cohere2", dict(logit_scale=0.7, sliding_window=8, layer_types=ALTERNATE)),
    "stablelm": ("stablelm", dict(use_qkv_bias=True, use_parallel_residual=True)),
    "stablelm one after the other": ("stablelm", {}),
    "phi": ("phi", dict(rope_parameters={
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})),
    "jais2": ("jais2", dict(mlp_bias=True, attention_bias=True)),
    "arcee": ("arcee", dict(mlp_bias=True)),
    "apertus": ("apertus", {}),
    "nemotron": ("nemotron", dict(head_dim=16, attention_bias=True, mlp_bias=True, rope_parameters={
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})),
    "ernie4_5": ("ernie4_5", dict(head_dim=16, use_bias=True)),
    "ernie4_5_moe": ("ernie4_5_moe", dict(moe_intermediate_size=32, moe_k=3, moe_num_experts=8, moe_layer_end_index=2)),
    "glm": ("glm", dict(head_dim=16, attention_bias=True)),
    "sarvam_moe": ("sarvam_moe", dict(head_dim=16, n_routed_experts=8, n_shared_experts=1, **QWEN_EXPERTS)),
    "dots1": ("dots1", dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1,
        sliding_window=8, layer_types=ALTERNATE, routed_scaling_factor=1.5, norm_topk_prob=True, **QWEN_EXPERTS)),
    "solar_open": ("solar_open", dict(head_dim=16, n_routed_experts=8, n_shared_experts=1, **QWEN_EXPERTS)),
    "mellum": ("mellum", dict(num_experts=8, layer_types=ALTERNATE, rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": YARN}, **SLIDING, **QWEN_EXPERTS)),
    "olmoe": ("olmoe", dict(num_experts=8, num_experts_per_tok=3)),
    "flex_olmo": ("flex_olmo", dict(num_experts=8, num_experts_per_tok=3)),
    "gemma": ("gemma", dict(head_dim=16)),
    "vaultgemma": ("vaultgemma", dict(query_pre_attn_scalar=24, final_logit_softcapping=9.0,
        attn_logit_softcapping=5.0, layer_types=ALTERNATE, **SLIDING)),
    "afmoe": ("afmoe", dict(num_experts=8, num_shared_experts=1, num_dense_layers=1, route_scale=1.5, mup_enabled=True,
        layer_types=ALTERNATE, **SLIDING, **QWEN_EXPERTS)),
    "laguna": ("laguna", dict(num_experts=8, shared_expert_intermediate_size=48, moe_routed_scaling_factor=2.0,
        num_attention_heads_per_layer=[4, 2, 4, 4], layer_types=ALTERNATE, rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}, **SLIDING, **QWEN_EXPERTS)),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", dict(head_dim=16, attention_bias=True, rope_parameters={
        "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 8.0, "factor": 1.0})),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", dict(head_dim=16, num_experts=8, moe_topk=3)),
    "flint": ("flint", dict(num_experts=8, shared_expert_intermediate_size=48, mlp_only_layers=[1],
        layer_types=ALTERNATE, **SLIDING, **QWEN_EXPERTS)),
    "lara_mini": ("lara_mini", dict(num_experts=8, shared_expert_intermediate_size=48, linear_key_head_dim=16,
        linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, layer_types=[
        "linear_attention", "sliding_attention", "linear_attention", "full_attention"], **SLIDING, **QWEN_EXPERTS)),
    "olmo_hybrid as released": ("olmo_hybrid", OLMO_HYBRID | dict(rope_parameters={
        "rope_type": "default", "rope_theta": None})),
    "olmo_hybrid": ("olmo_hybrid", OLMO_HYBRID | dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4})),
    "minimax_m2": ("minimax_m2", dict(head_dim=16, num_local_experts=8, num_experts_per_tok=3, rope_parameters={
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})),
    "hy_v3": ("hy_v3", dict(head_dim=16, num_experts=8, router_scaling_factor=1.5, **QWEN_EXPERTS)),
    "muse_glimmer_text": ("muse_glimmer_text", dict(final_logit_softcapping=9.0, output_multiplier=0.7,
        layer_types=ALTERNATE, layer_rope_theta=[1e4, 0] * 2, **SLIDING)),
    "lfm2": ("lfm2", LFM),
    "lfm2_moe": ("lfm2_moe", dict(num_experts=8, num_dense_layers=1, **LFM, **QWEN_EXPERTS)),
    "lfm3": ("lfm3", dict(sliding_window=8, head_dim=16, **LFM | {"conv_L_cache": 5, "layer_types": [
        "conv", "sliding_attention", "conv", "full_attention"]})),
    "granitemoehybrid": ("granitemoehybrid", dict(num_local_experts=8, num_experts_per_tok=3, mamba_n_groups=2,
        shared_intermediate_size=48, **MAMBA, **MULTIPLIERS)),
    "granitemoehybrid that rotates": ("granitemoehybrid", dict(num_local_experts=0, position_embedding_type="rope",
        shared_intermediate_size=96, mamba_conv_bias=False, time_step_limit=(0.3, 0.9), **MAMBA, **MULTIPLIERS)),
    "nemotron_h": ("nemotron_h", dict(mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, n_groups=2, head_dim=16,
        time_step_min=0.3, chunk_size=16, layers_block_type=["linear_attention", "mlp", "linear_attention",
        "full_attention", "mlp", "linear_attention"])),
    "nemotron_h with experts": ("nemotron_h", dict(mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, n_groups=2,
        head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=48,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"])),
    "bamba": ("bamba", dict(attn_layer_indices=[1], **{k: v for k, v in MAMBA.items() if k != "layer_types"})),
    "gpt_oss": ("gpt_oss", dict(num_local_experts=8, num_experts_per_tok=3, rope_parameters={
        **YARN, "truncate": False}, **SLIDING)),
}  # fmt: skip

SIMILAR = (
    *("hyperclovax without post-norms", "seed_oss", "exaone", "exaone4 without windows", "internlm3", "iquestcoder"),
    *("cwm", "helium", "glm", "sarvam_moe", "dots1", "solar_open", "olmoe", "granitemoe", "glm4_moe", "olmo3", "gemma"),
    *("qwen2_moe", "mixtral", "exaone_moe", "mellum", "vaultgemma", "granite_swa", "afmoe", "minimax_m2", "hy_v3"),
    *("lfm2", "lfm2_moe", "lfm3"),  # without heads and trees of the model itself: see test_recurrent_families.py
    *("granitemoehybrid", "granitemoehybrid that rotates", "bamba"),  # likewise
    *("nemotron_h", "nemotron_h with experts", "stablelm one after the other", "lara_mini"),
    *("olmo_hybrid", "olmo_hybrid as released"),
    *("granitemoeshared without a shared expert", "granitemoe_swa", "sarvam_mla", "jais2", "arcee", "hunyuan_v1_moe"),
    "apertus",
)
"""Cases that show trees, kernels and heads nothing that others do not. tests/test_experts.py runs their mixtures."""


SEES_ONLY = ("muse_glimmer_text",)
"""Families of which transformers has no class for texts alone."""

NOT_OVER_RANKS = {
    "gpt_oss": "has experts that the tp_plan leaves whole on every rank",
    "sarvam_moe": "issues during automatic conversion of the weights",
    "qwen3_vl_moe_text": "ignore_mismatched_sizes",
    "stablelm": "has no `tp_plan`",
    "nemotron_h with experts": "experts may only have gate_up_proj and down_proj",
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), "self_attn.sinks is sharded over several devices"),
    **dict.fromkeys(("glm4_moe_lite", "deepseek_v2"), "_b_proj.weight is sharded over several devices"),
}
"""Families that ranks cannot share, and words of the refusal. Those of Sarvam, StableLM and Qwen3-VL's mixture
are transformers' own, as it loads them."""


def tiny_family(case: str, seed: int = 0, **options: Any) -> Any:
    """A model of CASES in fp32 on the CPU. Every parameter and buffer is random: as they are initialised, norms, biases
    and sinks would not be heard. Raises ValueError where transformers has no such family."""
    kind, own = CASES[case]
    if kind in SEES_ONLY:
        return tiny_seeing_family(kind.removesuffix("_text"), seed, **options)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **own, **options})
    torch.manual_seed(seed)
    # AutoModelForCausalLM does not know Mistral 4: it comes inside Mistral 3, which reads images.
    made = transformers.Mistral4ForCausalLM if kind == "mistral4" else transformers.AutoModelForCausalLM.from_config
    model = made(config).eval()
    if kind == "hunyuan_v1_dense" and model.model.rotary_emb.rope_type == "dynamic":
        raise ValueError("Hunyuan's frequencies with alpha change for long texts here")  # as under transformers 5.17
    randomise(model, seed)
    return model


@contextlib.contextmanager
def skipped_if_unknown() -> Iterator[None]:
    """Skip the test where transformers has no family of the model that is made here."""
    try:
        yield
    except (ValueError, AttributeError) as error:
        if isinstance(error, AttributeError) and not str(error).startswith("module transformers"):
            raise
        pytest.skip(f"this transformers has no such family: {error}")


def tiny_head(target: Any, eagle3: bool) -> DraftHead:
    """A random head, of Llama's architecture, that reads three layers' inputs, the first one's among them."""
    own = dict(draft_vocab_size=16, feature_layers=(0, 1, 3)) if eagle3 else dict(draft_vocab_size=24)
    config = DraftConfig(**tiny.SIZES, head_dim=16, vocab_size=24, **own)
    torch.manual_seed(1)
    head = random_matrices((Eagle3Head if eagle3 else Eagle1Head)(config, total_token=12, depth=3, top_k=3))
    if eagle3:
        head.d2t = torch.randperm(24)[:16].sort().values - torch.arange(16)
    head.embed_tokens.weight = torch.nn.Parameter(target.get_input_embeddings().weight.detach().clone())
    return head.to(target.device)


VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, patch_size=4)
BLOCKS = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=4, out_hidden_size=64)
IN_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
WITH_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("llama", dict(text_config=dict(model_type="qwen2_vl_text", **SIZES, rope_parameters=IN_SECTIONS),
        vision_config=dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2, patch_size=4, mlp_ratio=2))),
    "qwen2_5_vl": ("llama", dict(text_config=dict(model_type="qwen2_5_vl_text", **SIZES, rope_parameters=IN_SECTIONS,
        use_sliding_window=True, sliding_window=8, max_window_layers=2), vision_config=dict(
        fullatt_block_indexes=[0], window_size=8, **BLOCKS))),
    "qwen3_vl": ("llama", dict(text_config=dict(model_type="qwen3_vl_text", **SIZES, head_dim=16,
        rope_parameters=IN_SECTIONS), vision_config=dict(num_position_embeddings=16, deepstack_visual_indexes=[0],
        **BLOCKS))),
    "qwen3_vl_moe": ("llama", dict(text_config=dict(model_type="qwen3_vl_moe_text", **SIZES, head_dim=16,
        rope_parameters=IN_SECTIONS, num_experts=8, mlp_only_layers=[1], **QWEN_EXPERTS), vision_config=dict(
        num_position_embeddings=16, deepstack_visual_indexes=[0], **BLOCKS))),
    "llava": ("llama", dict(vision_config=dict(model_type="clip_vision_model", image_size=8, **VISION))),
    "llava_next": ("mistral", dict(vision_config=dict(model_type="clip_vision_model", image_size=8, **VISION),
        image_grid_pinpoints=[[8, 8]])),
    "llava_onevision": ("qwen2", dict(vision_config=dict(model_type="siglip_vision_model", image_size=8, **VISION))),
    "internvl": ("qwen2", dict(vision_config=dict(model_type="internvl_vision", image_size=[8, 8], **VISION | {
        "patch_size": [4, 4]}))),
    "gemma3": ("gemma3_text", dict(vision_config=dict(model_type="siglip_vision_model", image_size=8, **VISION))),
    "gemma4": ("gemma4_text", dict(vision_config=None, audio_config=None)),
    "gemma4_unified": ("gemma4_text", dict(vision_config=None, audio_config=None, text_config=dict(
        model_type="gemma4_unified_text", **SIZES, **GEMMA4))),
    "exaone4_5": ("exaone4", dict(vision_config=dict(fullatt_block_indexes=[0], window_size=8, num_key_value_heads=1,
        **BLOCKS))),
    "muse_glimmer": ("muse_glimmer_text", dict(vision_config=dict(patch_size=4, num_hidden_layers=1, hidden_size=32,
        intermediate_size=48, num_attention_heads=2))),
    "mistral3": ("ministral3", dict(vision_config=dict(model_type="pixtral", image_size=8, head_dim=16, **VISION))),
}  # fmt: skip
"""Models that see: the case or kind of their language model, and what else their configuration has."""


def tiny_seeing_family(kind: str, seed: int = 0, **text_options: Any) -> Any:
    """A model of WITH_IMAGES, as `tiny_family`; text_options: of its language model."""
    case, options = WITH_IMAGES[kind]
    text, own = CASES.get(case, (case, {}))
    options = {"text_config": {"model_type": text, **SIZES, **own}, **options}
    options["text_config"] = {**options["text_config"], **text_options}
    config = transformers.AutoConfig.for_model(kind, **options, tie_word_embeddings=False)
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    randomise(model, seed)
    return model


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    source = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name or "embed_scale" in name or not tensor.dim():
            continue
        mean = 1.0 if tensor.dim() == 1 and tensor.float().mean() > 0.9 else 0.0
        spread = 0.25 if tensor.dim() == 1 else 2.0 * tensor.shape[-1] ** -0.5
        tensor.copy_(torch.randn(tensor.shape, generator=source) * spread + mean)
