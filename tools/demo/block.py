"""The block drafters of the demo: layers on features of the target, trained on many blocks of a text at once."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from eagle_triton.models.block_drafter import BlockDrafter, BlockDrafterConfig
from eagle_triton.models.target import default_feature_layers
from tools.demo.corpus import END_OF_TEXT_ID, write_json
from tools.demo.training import Run, Teacher, batches, compare_with_generate, fit, save_weights, shape_config, tree

if TYPE_CHECKING:
    from tools.demo.recipe import Recipe

MASK_ID = END_OF_TEXT_ID  # no text goes on after it, so it is never a root


def block_config(recipe: Recipe, causal: bool) -> dict:
    """config.json, in z-lab's layout."""
    outputs = [layer - 1 for layer in default_feature_layers(recipe.num_layers)]
    return {
        "architectures": ["DFlashDraftModel"],
        **shape_config(recipe),
        "model_type": "qwen3",
        "num_hidden_layers": recipe.block_layers,
        "num_target_layers": recipe.num_layers,
        "block_size": recipe.block_size,
        "is_causal": causal,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": outputs},
    }


def new_drafter(recipe: Recipe, causal: bool) -> BlockDrafter:
    torch.manual_seed(recipe.seed)
    known = {field.name for field in dataclasses.fields(BlockDrafterConfig)}
    config = BlockDrafterConfig(
        **{name: value for name, value in block_config(recipe, causal).items() if name in known},
        draft_vocab_size=recipe.vocab_size,
        mask_token_id=MASK_ID,
        feature_layers=default_feature_layers(recipe.num_layers),
        causal=(causal,) * recipe.block_layers,
        windows=(None,) * recipe.block_layers,
    )
    return BlockDrafter(config)


def block_loss(
    drafter: BlockDrafter, teacher: Teacher, tokens: torch.Tensor, anchors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss over the blocks of all anchors, and the share of rows with the target's choice in the top 1, for each
    depth.

    tokens [B, S]; anchors [A] int64: positions of roots, each with a whole block of the text after it. The loss is the
    cross entropy with the target's distribution, and a depth weighs exp(-(depth - 1) / 4).
    """
    run, config = teacher.run, drafter.config
    size, count = config.block_size, len(anchors)
    with torch.no_grad(), run.autocast():
        out = teacher.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
        features = torch.cat([out.hidden_states[layer] for layer in config.feature_layers], dim=-1).float()
        blocks = torch.full((len(tokens), count, size), MASK_ID, device=tokens.device)
        blocks[:, :, 0] = tokens[:, anchors]
        embeddings = teacher.model.model.embed_tokens(blocks.flatten(1))
    rows = anchors[:, None] + torch.arange(size, device=tokens.device)  # [A, n] positions
    with run.autocast():
        hidden = drafter(
            embeddings, drafter.context(features), rows.flatten(), blocks_mask(tokens.shape[1], anchors, drafter)
        )
        hidden = hidden.unflatten(1, (count, size))[:, :, 1:]
        logits = drafter.draft_logits(hidden, teacher.model.lm_head).float()
    goal = out.logits[:, rows[:, :-1]].float()  # [B, A, n - 1, V]: of the tokens at the rows' own positions
    row_loss = -(goal.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    weight = torch.exp(-torch.arange(size - 1, device=tokens.device) / 4)
    right = logits.argmax(-1) == goal.argmax(-1)
    return (row_loss * weight).mean() / weight.mean(), right.float().mean((0, 1))


def blocks_mask(context: int, anchors: torch.Tensor, drafter: BlockDrafter) -> torch.Tensor:
    """What the rows of many blocks see: bool [A * n, S + A * n], the text before their anchor, and their own block."""
    size, device = drafter.config.block_size, anchors.device
    before = torch.arange(context, device=device) < anchors.repeat_interleave(size)[:, None]
    place = torch.arange(len(anchors) * size, device=device)
    own = place[:, None] // size == place // size
    if drafter.config.causal[0]:
        own &= place <= place[:, None]
    return torch.cat((before, own), dim=1)


def train_block(run: Run, causal: bool, teacher: Teacher, corpus: dict, held_out: dict) -> dict:
    """Train a drafter against the frozen target and save it."""
    recipe = run.recipe
    drafter = new_drafter(recipe, causal).to(run.device)
    generator = torch.Generator().manual_seed(recipe.seed)

    def loss_of(tokens: torch.Tensor, measure: bool = True) -> tuple[torch.Tensor, list[float]]:
        places = torch.randperm(tokens.shape[1] - recipe.block_size, generator=generator) + 1
        anchors = places[: recipe.block_anchors].sort().values.to(run.device)
        loss, right = block_loss(drafter, teacher, tokens, anchors)
        return loss, right.tolist() if measure else []

    schedule = recipe.block_steps, recipe.block_minutes, recipe.block_lr, recipe.head_weight_decay
    reached = fit(drafter.parameters(), schedule, batches(run, corpus, recipe.block_tokens_per_step), loss_of)
    drafter.eval()
    with torch.no_grad():
        _, right = loss_of(held_out[min(held_out)][:64].to(run.device))
    shares = [round(share, 4) for share in right]
    print(f"  held-out, per depth: {shares}", flush=True)
    directory = run.block_directory(causal)
    directory.mkdir(parents=True, exist_ok=True)
    save_weights(directory / "model.safetensors", drafter.state_dict(), recipe.dtype)
    write_json(directory / "config.json", block_config(recipe, causal))
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    return {"parameters": parameters, **reached, "held_out_top1": shares}


def evaluate(run: Run, prompts: list[str], new_tokens: int = 64) -> dict:
    """tau of a chain and of trees, and how many outputs are those of transformers' own generate."""
    levels = run.recipe.block_size - 1
    drafts = {
        f"{'causal, ' if causal else ''}{name}": (str(run.block_directory(causal)), tree(top_k, levels, nodes))
        for causal in (False, True)
        for name, nodes, top_k in (("chain", levels + 1, 1), ("tree of 16", 16, 8), ("tree of 60", 60, 8))
    }
    return compare_with_generate(run, run.target_directory, drafts, prompts, new_tokens)
