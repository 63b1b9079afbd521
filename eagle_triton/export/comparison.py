"""Reads an exported head or block drafter back, and checks that its bits and drafts are the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle_triton.demo import demo_prompts
from eagle_triton.export.block_drafter import BlockContents, is_block, read_block
from eagle_triton.export.contents import HeadContents, read_contents
from eagle_triton.models.block_drafter import BlockDrafter
from eagle_triton.models.block_loading import fit_block_drafter
from eagle_triton.models.head_loading import fit_head
from eagle_triton.models.heads import DraftHead, Eagle1Head, Eagle3Head
from eagle_triton.models.loading import load_target, load_tokenizer
from eagle_triton.models.target import TargetCache, logit_head, run_target

PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Comparison:
    """The number of prompts for which both heads drafted trees, and how many of these trees were equal."""

    prompts: int
    equal: int

    @property
    def same(self) -> bool:
        """Whether all trees were equal."""
        return self.equal == self.prompts


def compare_drafts(
    head: Any,
    folder: str | Path,
    target: Any = None,
    *,
    prompts: int = 32,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    **tree: int | None,
) -> Comparison:
    """Read a folder that `export_head` wrote, and let both heads draft a tree for each of some prompts.

    head, target, and tree (total_token, depth, top_k): the arguments of `export_head`. prompts: their number; they are
    pieces of Python code, at most 64 tokens each, or random tokens if the target has no tokenizer beside it. The target
    runs on `device`; dtype: None for float32. Raises the errors of loading, and ValueError for tensors that differ in a
    bit.
    """
    if is_block(head):
        return _compare_blocks(head, folder, target, prompts, device, dtype)
    before = read_contents(head, target, tree)
    after = read_contents(str(folder), before.target.path, {**tree, **vars(before.tree)})
    _check_bits(before, after)
    model: Any = load_target(before.target.path, dtype=dtype or torch.float32).to(device)
    first, second = (fit_head(_module(contents), model) for contents in (before, after))
    features = before.feature_layers or None
    trees = [
        tuple(_draft(each, model, ids.to(device), features) for each in (first, second))
        for ids in _prompts(prompts, before.target)
    ]
    return Comparison(prompts, sum(all(map(torch.equal, one, other)) for one, other in trees))


def _compare_blocks(
    head: Any, folder: str | Path, target: Any, prompts: int, device: torch.device | str, dtype: torch.dtype | None
) -> Comparison:
    """`compare_drafts` of a block drafter: the chains of its blocks."""
    before = read_block(head, target)
    after = read_block(str(folder), before.target.path)
    _check_bits(before, after)
    model: Any = load_target(before.target.path, engine=True, dtype=dtype or torch.float32).to(device)
    drafters = []
    for contents in (before, after):
        drafter = BlockDrafter(contents.config)
        drafter.load_state_dict(contents.tensors)
        drafters.append(fit_block_drafter(drafter.eval(), model))
    chains = [
        [_draft_block(each, model, ids.to(device)) for each in drafters] for ids in _prompts(prompts, before.target)
    ]
    return Comparison(prompts, sum(one == other for one, other in chains))


@torch.no_grad()
def _draft_block(drafter: BlockDrafter, model: Any, ids: Tensor) -> list[int]:
    """The likeliest chain of a block after a prompt."""
    config = drafter.config
    out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    features = torch.cat([out.hidden_states[layer] for layer in config.feature_layers], dim=-1)
    root = int(out.logits[0, -1].argmax())
    block = torch.full((1, config.block_size), config.mask_token_id, device=ids.device)
    block[0, 0] = root
    embedding = model.get_input_embeddings() if drafter.embed_tokens is None else drafter.embed_tokens
    rows = drafter(embedding(block), drafter.context(features))[0, 0 if config.shifted else 1 :]
    return drafter.likeliest_chain(rows, root, model.get_output_embeddings(), embedding)


def _check_bits(before: HeadContents | BlockContents, after: HeadContents | BlockContents) -> None:
    if before.config != after.config:
        raise ValueError(f"export: config.json has {after.config}, the head {before.config}")
    if missing := before.tensors.keys() ^ after.tensors.keys():
        raise ValueError(f"export: only one of the heads has {', '.join(sorted(missing))}")
    for name, tensor in before.tensors.items():
        if tensor.dtype != after.tensors[name].dtype or not torch.equal(tensor, after.tensors[name]):
            raise ValueError(f"export: {name} has changed")


def _module(head: HeadContents) -> DraftHead:
    """The head as a module; without its own embedding, `embed_tokens.weight` stays on the meta device."""
    with torch.device("meta"):
        module = (Eagle3Head if head.eagle3 else Eagle1Head)(head.config, **vars(head.tree))
    module.load_state_dict({name: tensor.clone() for name, tensor in head.tensors.items()}, strict=False, assign=True)
    return module


def _prompts(count: int, target: Any) -> Iterator[Tensor]:
    """Token ids [1, at most 64] int64."""
    tokenizer = load_tokenizer(target.path)
    random = torch.Generator().manual_seed(0)
    for text in demo_prompts(count):
        ids = None if tokenizer is None else tokenizer(text, return_tensors="pt").input_ids[:, :PROMPT_TOKENS]
        if ids is None or not ids.shape[1]:
            ids = torch.randint(target.config.vocab_size, (1, PROMPT_TOKENS), generator=random)
        yield ids.long()


@torch.no_grad()
def _draft(
    head: DraftHead, target: nn.Module, ids: Tensor, features: tuple[int, ...] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, mask, depths) of the first tree after a prompt."""
    model: Any = target
    head.reset_kv()
    hidden, seen = run_target(model, ids, TargetCache(), feature_layers=features)
    logits = logit_head(model)
    root = logits(hidden[0, -1]).argmax()
    sequence = torch.cat((ids, root.view(1, 1)), dim=1)
    tokens, _, mask, depths = head.topK_genrate(seen, sequence, logits)
    return tokens, mask, depths
