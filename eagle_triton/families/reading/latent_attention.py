"""Reads multi-head latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from eagle_triton.engine.model.latent_attention import LatentAttention
from eagle_triton.engine.model.module_kinds import stored_tensors
from eagle_triton.engine.model.modules import Projection, Rotary
from eagle_triton.errors import UnknownLayerError, UnsupportedModelError
from eagle_triton.families.reading.float8 import is_float8_module
from eagle_triton.families.reading.four_bits import is_four_bit_module
from eagle_triton.families.reading.module_reader import ModuleReader

MAX_RANK = 512  # that the kernels take; a row of the cache is moved in two halves


def read_latent_attention(read: ModuleReader, rotary: Rotary) -> LatentAttention:
    """The latent attention of the module that `read` reads. `WholeMatrices` dequantises what is quantised."""
    both = read.projection("kv_b_proj")
    stored = both.weight if both.module is None else both.module
    quantised = isinstance(stored, nn.Module) and (is_float8_module(stored) or is_four_bit_module(stored))
    if not (isinstance(stored, Tensor) or quantised) or getattr(read.module.kv_b_proj, "bias", None) is not None:
        raise UnsupportedModelError(
            f"{read.path}.kv_b_proj must be a matrix without a bias, plain or quantised: queries are multiplied "
            f"by parts of it, got a {type(read.module.kv_b_proj).__name__}",
            "latent-attention",
        )
    heads, own, width = (read.value(name, int) for name in ("num_heads", "qk_nope_head_dim", "v_head_dim"))
    rank, rotated = read.value("kv_lora_rank", int), read.value("qk_rope_head_dim", int)
    if rank > MAX_RANK or rank % 2:
        raise UnsupportedModelError(
            f"{read.path}.kv_lora_rank must be even and at most {MAX_RANK}, got {rank}", "latent-attention"
        )
    has_latent = getattr(read.module, "q_proj", None) is None
    queries = "q_b_proj" if has_latent else "q_proj"
    for name, rows in (
        ("kv_b_proj", heads * (own + width)),
        ("kv_a_proj_with_mqa", rank + rotated),
        (queries, heads * (own + rotated)),
    ):
        if (got := getattr(read.value(name), "out_features", rows)) != rows:
            raise UnsupportedModelError(
                f"{read.path}.{name} must have {rows} outputs, by {heads} heads and the sizes of the module, got {got}",
                "latent-attention",
            )
    if rotated != 2 * len(rotary.inv_freq):
        raise UnknownLayerError(
            f"{read.path} must rotate all {rotated} elements of its rotated keys, got "
            f"{len(rotary.inv_freq)} frequencies, each for two elements"
        )
    return LatentAttention(
        q=read.projection(queries),
        latent=read.projection("kv_a_proj_with_mqa"),
        norm=read.norm("kv_a_layernorm"),
        keys_values=both,
        o=read.projection("o_proj"),
        num_heads=heads,
        value_width=width,
        scale=read.value("scaling", (float, int)),
        rotary=rotary,
        q_latent=read.projection("q_a_proj") if has_latent else None,
        q_norm=read.norm("q_a_layernorm") if has_latent else None,
    )


class WholeMatrices:
    """Dequantises the matrices of keys and values, by parts of which queries are multiplied.

    copied: the stored tensors of all that were dequantised, by dotted path. nbytes: of the copies.
    """

    def __init__(self, paths: Mapping[nn.Module, str], modules: Mapping[int, nn.Module], dtype: torch.dtype):
        """paths: of modules. modules: those of quantised weights that are read, by the weights' ids. dtype: the
        model's."""
        self._paths, self._modules, self._dtype = paths, modules, dtype
        self.copied: dict[str, Tensor] = {}
        self.nbytes = self.count = 0

    def __call__(self, mixer: LatentAttention) -> LatentAttention:
        weight, module = mixer.keys_values.weight, mixer.keys_values.module
        if isinstance(weight, Tensor):
            return mixer
        if weight is not None:
            module, matrix = self._modules[id(weight)], weight.dequantised(self._dtype)
        else:
            assert isinstance(module, nn.Module)
            if is_float8_module(module):
                raise UnsupportedModelError(
                    f"{self._paths[module]} is called as a module, which may round its inputs, but queries are "
                    'multiplied by parts of it: leave activations="as published" out',
                    "latent-attention",
                )
            device = mixer.norm.weight.device
            with torch.no_grad():
                matrix = module(torch.eye(mixer.rank, dtype=self._dtype, device=device)).mT.contiguous()
        path = self._paths[module]
        for name, parameter in (*module.named_parameters(), *module.named_buffers()):
            for index, stored in enumerate(stored_tensors(parameter)):
                self.copied[f"{path}.{name}" + (f" ({index})" if index else "")] = stored
        self.nbytes, self.count = self.nbytes + matrix.nbytes, self.count + 1
        return replace(mixer, keys_values=Projection(matrix))

    @property
    def notes(self) -> dict[str, str]:
        """The report's note, if anything was dequantised."""
        if not self.count:
            return {}
        what = f"{self.count} kv_b_proj are dequantised, {self.nbytes / 2**20:,.1f} MiB"
        return {"latent_attention": f"{what}, because queries are multiplied by parts of them"}
