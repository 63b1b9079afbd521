"""Tiny random EaModels: a few layers, a small vocabulary so that random heads are right now and then."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from eagle_triton.engine.memory.pages import PAGE_ROWS
from eagle_triton.engine.model.mixers import KeyValueCache
from eagle_triton.engine.state import Sequences
from eagle_triton.models.ea_model import EaModel
from eagle_triton.models.heads import DraftConfig, Eagle1Head, Eagle3Head
from tests.paging import out_of_pages

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
SIZES: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
ENDLESS: dict[str, Any] = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)


def random_matrices(module: Any, spread: float = 0.15) -> Any:
    """The module, in evaluation mode, its matrices drawn anew; vectors stay as they are."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, spread)
    return module.eval()


def tiny_model(
    family: str = "llama",
    eagle3: bool = True,
    vocab: int = 32,
    layers: int = 4,
    seed: int = 0,
    head_dim: int = 16,
    **tree: object,
) -> EaModel:
    """An EaModel in fp32 on the CPU with random weights; `tree` are the tree arguments of a draft head, which drafts
    less than one of a large model if there are none."""
    torch.manual_seed(seed)
    config_class = getattr(transformers, f"{FAMILIES[family]}Config")
    model_class = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")
    extra = {"sliding_window": 20} if family == "mistral" else {}
    config = config_class(
        **SIZES,
        **ENDLESS,
        **extra,
        vocab_size=vocab,
        num_hidden_layers=layers,
        head_dim=head_dim,
        max_position_embeddings=2048,
    )
    base = model_class(config)
    draft_vocab = vocab * 5 // 8 if eagle3 else vocab
    head_config = DraftConfig(
        **SIZES,
        head_dim=head_dim,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        feature_layers=(min(layers - 3, 1), min(layers - 2, 2), min(layers - 1, 4)) if eagle3 else None,
    )
    tree = tree or dict(total_token=16, depth=3, top_k=4)
    head = (Eagle3Head if eagle3 else Eagle1Head)(head_config, **tree)
    random_matrices(base), random_matrices(head)
    if eagle3:
        kept = torch.randperm(vocab)[:draft_vocab].sort().values
        head.d2t = kept - torch.arange(draft_vocab)
    head.embed_tokens.weight = base.model.embed_tokens.weight
    return EaModel(base, head).eval()


def noisy(model: Any, noise: float = 0.15, seed: int = 1) -> Any:
    """A drafter that is right now and then: the model, with noise in each matrix of so much of its spread."""
    other = type(model)(model.config).eval().to(model.device)
    other.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for parameter in other.parameters():
        if parameter.dim() > 1:
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.data += noise * parameter.std() * drawn
    return other


def random_prompt(length: int, vocab: int = 32, seed: int = 0) -> torch.Tensor:
    """Token ids [1, length]."""
    return torch.randint(vocab, (1, length), generator=torch.Generator().manual_seed(1000 * length + seed))


def generate_row(originals: Any) -> Any:
    """The row of `model.generate` in the report of an optimised model."""
    return next(row for row in originals.report() if row.path == "generate")


def target_cache(sequences: Sequences) -> torch.Tensor:
    """Keys and values [layers, 2, B, Hkv, 512, d] of a target whose layers are all attention of one shape, a copy, with
    zeros where a sequence has no page."""
    (cache,) = sequences.caches.caches
    return _rows_of(cache, sequences)


def draft_cache(sequences: Sequences) -> torch.Tensor:
    """The same of its draft."""
    (cache,) = sequences.draft_tensors.caches.caches
    return _rows_of(cache, sequences)


def _rows_of(cache: KeyValueCache, sequences: Sequences) -> torch.Tensor:
    table = sequences.pages.table[:, :8]
    held = (table > 0).repeat_interleave(PAGE_ROWS, 1)
    return out_of_pages(cache.data, table).masked_fill(~held[:, None, :, None], 0)


def fill_target_cache(sequences: Sequences, slot: int, value: float) -> None:
    """Write a value to the first rows of a slot's sequence."""
    (cache,) = sequences.caches.caches
    cache.data[:, :, sequences.pages.of(slot)[0], :, :3] = value
