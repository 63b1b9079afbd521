"""The draft model of the demo: a Llama of two layers with the target's vocabulary, distilled from the target."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_triton import EAGLEConfig
from eagle_triton.inference import SpeculativeConfig
from tools.demo.corpus import END_OF_TEXT_ID
from tools.demo.training import Run, Teacher, batches, compare_with_generate, fit, shape_config, write_configs

if TYPE_CHECKING:
    from tools.demo.recipe import Recipe


def draft_config(recipe: Recipe) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        **shape_config(recipe),
        "hidden_size": recipe.draft_hidden_size,
        "intermediate_size": recipe.draft_intermediate_size,
        "num_attention_heads": recipe.draft_num_heads,
        "num_key_value_heads": recipe.draft_num_heads,
        "num_hidden_layers": recipe.draft_num_layers,
        "tie_word_embeddings": True,
        "pad_token_id": END_OF_TEXT_ID,
    }


def new_draft(recipe: Recipe, teacher: Teacher) -> LlamaForCausalLM:
    """A fresh draft model. Its embedding, which is its head too, begins as what lies along the main directions of the
    target's head."""
    torch.manual_seed(recipe.seed)
    config = {k: v for k, v in draft_config(recipe).items() if k not in ("torch_dtype", "architectures")}
    draft = LlamaForCausalLM(LlamaConfig(**config))
    left, sizes, _ = torch.linalg.svd(teacher.model.lm_head.weight.cpu(), full_matrices=False)
    with torch.no_grad():
        draft.lm_head.weight.copy_((left * sizes)[:, : recipe.draft_hidden_size])
    return draft.to(teacher.run.device)


def draft_loss(
    draft: LlamaForCausalLM, teacher: Teacher, tokens: torch.Tensor, measure: bool
) -> tuple[torch.Tensor, list[float]]:
    """tokens [B, S] -> the loss, and if `measure` the shares of rows with the target's choice in the top 1 and top 10.

    The loss is the cross entropy with the target's distribution, plus a little of that with the next token.
    """
    run = teacher.run
    with torch.no_grad(), run.autocast():
        goal = teacher.model(input_ids=tokens, use_cache=False).logits.float().softmax(-1)
    with run.autocast():
        logits = draft(input_ids=tokens, use_cache=False).logits.float()
    distribution_loss = F.cross_entropy(logits.flatten(0, 1), goal.flatten(0, 1))
    token_loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    shares = []
    if measure:
        hits = logits.topk(10, dim=-1).indices == goal.argmax(-1, keepdim=True)
        shares = [hits[..., 0].float().mean().item(), hits.any(-1).float().mean().item()]
    return distribution_loss + run.recipe.draft_token_loss * token_loss, shares


def train_draft(run: Run, teacher: Teacher, corpus: dict, held_out: dict) -> dict:
    """Train the draft model against the frozen target and save it."""
    recipe = run.recipe
    draft = new_draft(recipe, teacher)
    loss_of = functools.partial(draft_loss, draft, teacher)
    schedule = recipe.draft_steps, recipe.draft_minutes, recipe.draft_lr, recipe.draft_weight_decay
    reached = fit(draft.parameters(), schedule, batches(run, corpus, recipe.draft_tokens_per_step), loss_of)
    with torch.no_grad():
        _, shares = loss_of(held_out[min(held_out)][:64].to(run.device), True)
    found = {name: round(share, 4) for name, share in zip(("top1", "top10"), shares, strict=True)}
    print(f"  held-out: {found}", flush=True)
    parameters = sum(p.numel() for p in draft.parameters())
    draft.cpu().to(recipe.dtype).save_pretrained(run.draft_directory)
    write_configs(run.draft_directory, draft_config(recipe))
    return {"parameters": parameters, **reached, "held_out": found}


def evaluate(run: Run, prompts: list[str], new_tokens: int = 64) -> dict:
    """tau of chains, and how many outputs are those of transformers' own generate."""

    def chain(drafts: int) -> EAGLEConfig:
        options = SpeculativeConfig(method="draft_model", model=str(run.draft_directory), num_speculative_tokens=drafts)
        return EAGLEConfig(speculative=options, fallback=False, dtype=torch.float32)

    chains = {f"chain of {drafts}": (None, chain(drafts)) for drafts in (2, 4, 6)}
    return compare_with_generate(run, run.target_directory, chains, prompts, new_tokens)
