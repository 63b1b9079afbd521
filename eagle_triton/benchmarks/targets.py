"""A target with its head and a block drafter, as far as something is drafted by them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import torch

from eagle_triton.benchmarks import models
from eagle_triton.command_line import holds_target, sentence
from eagle_triton.demo import path_of
from eagle_triton.models.block_drafter import BlockDrafter
from eagle_triton.models.generate_arguments import max_positions
from eagle_triton.models.heads import DraftHead
from eagle_triton.models.loading import load_target, load_tokenizer


@dataclass(frozen=True)
class Target:
    """model: as EAGLEInference takes it; causal_lm: the Hugging Face model in it."""

    model: Any
    causal_lm: Any
    head: DraftHead | None
    tokenizer: Any
    block: BlockDrafter | None = None

    @property
    def positions(self) -> int | None:
        """The most tokens of a sequence that it was made for, None if its configuration does not say."""
        return max_positions(self.causal_lm)


def load(args: argparse.Namespace, with_head: bool, block: str | None) -> Target:
    """The target of the options and its tokenizer. with_head: whether a head is needed; one that lies beside the target
    is loaded, too. block: a block drafter, None if none is needed.

    Raises ValueError with one sentence if it cannot be loaded, for any reason.
    """
    path, dtype = args.model, getattr(torch, args.dtype)
    if with_head or holds_target(path):
        pair = models.load_pair(path, args.draft, args.eagle1, dtype, args.device)
        target = Target(pair, pair.base_model, pair.ea_layer, pair.tokenizer)
    else:
        try:
            place = path_of(path)
            causal_lm = load_target(place, engine=True, dtype=dtype).to(args.device)
            target = Target(causal_lm, causal_lm, None, load_tokenizer(place))
        except (ValueError, TypeError, OSError) as error:
            raise ValueError(f"--model {path} cannot be loaded: {sentence(error)}") from error
    if target.tokenizer is None:
        raise ValueError("--model must hold a tokenizer, and none lies beside the target")
    return replace(target, block=models.load_block(block, target.causal_lm))
