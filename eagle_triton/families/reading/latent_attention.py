"""Reads multi-head latent attention."""

from __future__ import annotations

import torch

from eagle_triton.engine.model.latent_attention import LatentAttention
from eagle_triton.engine.model.modules import Rotary
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.reading.module_reader import ModuleReader


def read_latent_attention(read: ModuleReader, rotary: Rotary) -> LatentAttention:
    """The latent attention of the module that `read` reads. The matrices of keys and values are views of its weight."""
    heads, own, width = (read.value(name, int) for name in ("num_heads", "qk_nope_head_dim", "v_head_dim"))
    both = read.projection("kv_b_proj")
    if not isinstance(both.weight, torch.Tensor) or both.bias is not None:
        raise UnsupportedModelError(
            f"{read.path}.kv_b_proj must be a plain matrix in 16 or 32 bits without a bias, because queries are "
            "multiplied by parts of it: leave it out when you quantise the model",
            "quantisation",
        )
    if read.value("qk_rope_head_dim", int) != 2 * len(rotary.inv_freq):
        raise UnsupportedModelError(
            f"{read.path} must rotate all {read.module.qk_rope_head_dim} elements of its rotated keys, got "
            f"{len(rotary.inv_freq)} frequencies, each for two elements",
            "layer-types",
        )
    keys, values = both.weight.unflatten(0, (heads, own + width)).split([own, width], 1)
    has_latent = getattr(read.module, "q_proj", None) is None
    return LatentAttention(
        q=read.projection("q_b_proj" if has_latent else "q_proj"),
        latent=read.projection("kv_a_proj_with_mqa"),
        norm=read.norm("kv_a_layernorm"),
        keys=keys,
        values=values,
        o=read.projection("o_proj"),
        scale=read.value("scaling", (float, int)),
        rotary=rotary,
        q_latent=read.projection("q_a_proj") if has_latent else None,
        q_norm=read.norm("q_a_layernorm") if has_latent else None,
    )
