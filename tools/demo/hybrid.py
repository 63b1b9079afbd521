"""The second demo: a small Qwen3.5, mostly of gated delta nets, and its multi-token prediction."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from eagle_triton.models.mtp import MTPUnit, new_unit
from eagle_triton.models.target import TargetCache
from tools.demo.corpus import END_OF_TEXT_ID, write_json
from tools.demo.training import Run, Teacher, compare_with_generate, fit_head, save_weights, shares_per_pass, tree

if TYPE_CHECKING:
    from tools.demo.recipe import Recipe

WEIGHTS = "model-mtp.safetensors"
NAMES = {"token_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "layer": "layers.0"}


def target_config(recipe: Recipe) -> dict:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **recipe.sizes,
        "intermediate_size": recipe.hybrid_intermediate_size,
        "linear_num_key_heads": recipe.key_heads,
        "linear_num_value_heads": recipe.value_heads,
        "linear_key_head_dim": recipe.delta_head_dim,
        "linear_value_head_dim": recipe.delta_head_dim,
        "linear_conv_kernel_dim": 4,
        "layer_types": [
            "full_attention" if index % 4 == 3 else "linear_attention" for index in range(recipe.num_layers)
        ],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
        "mtp_num_hidden_layers": 1,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "dtype": str(recipe.dtype).removeprefix("torch."),
    }


def new_target(recipe: Recipe) -> Qwen3_5ForCausalLM:
    config = {k: v for k, v in target_config(recipe).items() if k not in ("dtype", "architectures", "model_type")}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config))


class HybridTeacher(Teacher):
    """The frozen hybrid target."""

    def load(self) -> Any:
        return Qwen3_5ForCausalLM.from_pretrained(self.run.hybrid_directory)

    @torch.no_grad()
    def lesson(self, tokens: torch.Tensor, kind: str) -> tuple[torch.Tensor, ...]:
        """As a `Teacher` of an EAGLE-1 head: features are the hidden states after the final norm."""
        with self.run.autocast():
            hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden)
        return hidden[:, :-1], tokens[:, 1:], logits[:, 1:].float(), hidden[:, 1:]


class Student(nn.Module):
    """An MTP unit with the interface of a draft head while it is trained."""

    def __init__(self, unit: MTPUnit, target: Any):
        super().__init__()
        self.unit = unit
        self._target = [target]  # not a part of it
        unit.layer.self_attn.layer_idx = 0

    def forward(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        cache: TargetCache | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, TargetCache]:
        body, cache = self._target[0].model, cache or TargetCache()
        embeddings = body.embed_tokens(ids)
        out = self.unit(
            hidden,
            embeddings,
            position_embeddings=body.rotary_emb(embeddings, position_ids.expand(3, -1, -1)),
            attention_mask=attention_mask,
            past_key_values=cache,
        )
        return out, cache

    @staticmethod
    def draft_logits(hidden: torch.Tensor, lm_head: nn.Module) -> torch.Tensor:
        return lm_head(hidden)


def train_mtp(run: Run, teacher: HybridTeacher, corpus: dict, held_out: dict) -> dict:
    """Train the layer against the frozen target, unrolled as it drafts, and save it beside the target's weights."""
    torch.manual_seed(run.recipe.seed)
    unit = new_unit(teacher.model).to_empty(device=run.device).float()
    for name, parameter in unit.named_parameters():
        with torch.no_grad():
            parameter.zero_() if "norm" in name else parameter.normal_(0, 0.02)
    student = Student(unit, teacher.model).to(run.device)
    reached = fit_head(student, "mtp", teacher, corpus)
    _save(unit, run)
    return {**reached, "held_out_per_pass": shares_per_pass(student, "mtp", teacher, held_out)}


def _save(unit: MTPUnit, run: Run) -> None:
    """The unit by the names that published checkpoints have, and its place in the target's index."""
    tensors = {}
    for name, tensor in unit.state_dict().items():
        part, _, rest = name.partition(".")
        tensors[f"mtp.{NAMES.get(part, part)}.{rest}"] = tensor
    directory = run.hybrid_directory
    save_weights(directory / WEIGHTS, tensors, run.recipe.dtype)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"] |= dict.fromkeys(sorted(tensors), WEIGHTS)
    index["metadata"]["total_size"] = sum((directory / f).stat().st_size for f in set(index["weight_map"].values()))
    write_json(path, index)


def evaluate(run: Run, prompts: list[str], new_tokens: int = 64) -> dict:
    """tau of a tree and of a chain, and how many outputs are those of transformers' own generate."""
    drafts = {"tree 60/7/10": ("mtp", tree(10, 8, 60)), "chain of 4": ("mtp", tree(1, 4, 5))}
    return compare_with_generate(run, run.hybrid_directory, drafts, prompts, new_tokens)
