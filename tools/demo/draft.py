"""The draft model of the demo: a Llama of two layers with the target's vocabulary, distilled from the target."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tools.demo.corpus import END_OF_TEXT_ID
from tools.demo.training import Run, Teacher, batches, compare_with_generate, optimise, shape_config, write_configs

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
) -> tuple[torch.Tensor, dict[str, float]]:
    """tokens [B, S] -> the loss, and if `measure` the shares of rows with the target's choice in the top 1 / top 10.

    The loss is the cross entropy with the target's distribution, plus a little of that with the next token.
    """
    run = teacher.run
    with torch.no_grad(), run.autocast():
        goal = teacher.model(input_ids=tokens, use_cache=False).logits.float().softmax(-1)
    with run.autocast():
        logits = draft(input_ids=tokens, use_cache=False).logits.float()
    distribution_loss = F.cross_entropy(logits.flatten(0, 1), goal.flatten(0, 1))
    token_loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    shares = {}
    if measure:
        hits = logits.topk(10, dim=-1).indices == goal.argmax(-1, keepdim=True)
        shares = {"top1": hits[..., 0].float().mean().item(), "top10": hits.any(-1).float().mean().item()}
    return distribution_loss + run.recipe.draft_token_loss * token_loss, shares


def train_draft(run: Run, teacher: Teacher, corpus: dict, held_out: dict) -> dict:
    """Train the draft model against the frozen target and save it."""
    recipe = run.recipe
    draft = new_draft(recipe, teacher)
    steps = optimise(
        draft.parameters(), recipe.draft_steps, recipe.draft_minutes, recipe.draft_lr, recipe.draft_weight_decay
    )
    for (step, apply), tokens in zip(steps, batches(run, corpus, recipe.draft_tokens_per_step), strict=False):
        measure = step % 250 == 249
        loss, shares = draft_loss(draft, teacher, tokens, measure)
        apply(loss)
        if measure:
            print(f"  step {step + 1:5d}  loss {loss.item():.4f}  top-1 {shares['top1']:.3f}", flush=True)
    with torch.no_grad():
        _, shares = draft_loss(draft, teacher, held_out[min(held_out)][:64].to(run.device), measure=True)
    reached = {name: round(share, 4) for name, share in shares.items()}
    print(f"  held-out: {reached}", flush=True)
    parameters = sum(p.numel() for p in draft.parameters())
    draft.cpu().to(recipe.dtype).save_pretrained(run.draft_directory)
    write_configs(run.draft_directory, draft_config(recipe))
    train_loss = round(loss.item(), 4)
    return {"parameters": parameters, "steps": step + 1, "train_loss": train_loss, "held_out": reached}


def evaluate(run: Run, prompts: list[str], new_tokens: int = 64) -> dict:
    """tau of chains, greedy, fp32, and how many outputs are those of transformers' own generate."""
    from eagle_triton import EAGLEConfig, EAGLEInference
    from eagle_triton.inference import SpeculativeConfig

    def engine(drafts: int) -> EAGLEInference:
        options = SpeculativeConfig(method="draft_model", model=str(run.draft_directory), num_speculative_tokens=drafts)
        config = EAGLEConfig(speculative=options, fallback=False, dtype=torch.float32)
        return EAGLEInference(None, str(run.target_directory), config, run.device)

    chains = {f"chain of {drafts}": functools.partial(engine, drafts) for drafts in (2, 4, 6)}
    return compare_with_generate(chains, prompts, new_tokens)
