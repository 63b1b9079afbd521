"""Block drafters: drafts against a plain forward and a heap, the target's tokens, and checkpoints in all layouts."""

from __future__ import annotations

import heapq
import json

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle_triton import EAGLEConfig, EAGLEInference, optimize_with_triton
from eagle_triton.engine.drafts.block import BlockDraft
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.models.block_drafter import BlockDrafter, BlockDrafterConfig
from eagle_triton.models.block_loading import is_block_drafter, load_block_drafter
from tests.tiny import random_prompt, tiny_model

VOCAB, LAYERS, BLOCK = 16, 6, 6
KINDS: dict[str, dict] = {
    "in place": {},
    "shifted": dict(shifted=True),
    "causal": dict(causal=(True, True)),
    "windows": dict(causal=(True, False), windows=(9, None)),
    "vanilla": dict(shifted=True, markov_head="vanilla", markov_rank=5),
    "gated": dict(shifted=True, markov_head="gated", markov_rank=5),
    "own": dict(own_embedding=True, own_head=True, draft_vocab_size=11, logit_cap=3.0, qk_norm=False),
    "scaled": dict(embedding_scale=3.0, logit_scale=0.5, attention_bias=True, rope_theta=100.0),
}
TREES = {"chain": (None, 1), "tree": (20, 4)}


def target(seed: int = 0) -> torch.nn.Module:
    return tiny_model(vocab=VOCAB, layers=LAYERS, seed=seed).base_model


def block_drafter(seed: int = 1, tree: str = "chain", **changes: object) -> BlockDrafter:
    """A random one, whose norms are random too. Head dim and hidden size do not go by heads."""
    sizes: dict = dict(
        hidden_size=64,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        block_size=BLOCK,
        mask_token_id=VOCAB - 1,
        feature_layers=(1, 3, 4),
        causal=(False, False),
        windows=(None, None),
    )
    torch.manual_seed(seed)
    total_token, top_k = TREES[tree]
    drafter = BlockDrafter(BlockDrafterConfig(**sizes | changes), total_token, top_k).eval()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    if drafter.d2t is not None:
        drafter.d2t.copy_(torch.randperm(VOCAB)[: len(drafter.d2t)].sort().values - torch.arange(len(drafter.d2t)))
    return drafter


@torch.no_grad()
def plain_scores(drafter: BlockDrafter, model: torch.nn.Module, tokens: list[int], path: list[int]) -> Tensor:
    """Log-probabilities [V] of the tokens after `path`, which the drafter drafts after the root, the last of `tokens`:
    a plain forward over the whole text."""
    config, text = drafter.config, torch.tensor([tokens])
    states = model.model(text[:, :-1], output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in config.feature_layers], dim=-1)
    block = torch.tensor([[tokens[-1], *[config.mask_token_id] * (config.block_size - 1)]])
    table = model.model.embed_tokens if drafter.embed_tokens is None else drafter.embed_tokens
    hidden = drafter(table(block), drafter.context(features))[0, len(path) + (not config.shifted)]
    before = torch.tensor((tokens[-1:] + path)[-1])
    found = drafter.draft_logits(hidden, model.lm_head, before).log_softmax(-1)
    if drafter.d2t is None:
        return found
    scores = torch.full((VOCAB,), float("-inf"))
    return scores.index_copy(0, torch.arange(len(found)) + drafter.d2t, found)


def best_paths(drafter: BlockDrafter, model: torch.nn.Module, tokens: list[int], spec: TreeSpec) -> set[tuple[int, ...]]:
    """The best drafts by the product of their probabilities, at most top_k children each: one heap."""
    heap: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    found: set[tuple[int, ...]] = set()
    while len(found) < spec.nodes:  # the root is among them
        minus, path = heapq.heappop(heap)
        found.add(path)
        if len(path) < spec.beam_levels:
            best = plain_scores(drafter, model, tokens, list(path)).topk(spec.top_k)
            for score, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                heapq.heappush(heap, (minus - score, (*path, token)))
    return found - {()}


def drafted_paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_every_step_are_the_best_of_a_plain_forward(kind, tree):
    model, drafter = target(), block_drafter(tree=tree, **KINDS[kind])
    inference = EAGLEInference(drafter, model, EAGLEConfig(fallback=False))
    draft = inference.pair.draft
    assert isinstance(draft, BlockDraft)
    spec, accepted = draft.read_tree(), 0
    prompts = [random_prompt(9, VOCAB)[0].tolist(), random_prompt(14, VOCAB, 3)[0].tolist()]
    texts = [list(prompt) for prompt in prompts]
    for piece in inference.stream(prompts, 14, report_drafts=True):
        if piece.tree is not None:
            root = texts[piece.index]
            expected = best_paths(drafter, model, root, spec)
            assert sorted(piece.drafts) == sorted(path[-1] for path in expected)
            accepted += piece.accepted
        texts[piece.index] += piece.tokens
    assert accepted > 0 or tree == "chain"
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([prompt])
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, do_sample=False)
        assert text == alone[0].tolist()
