"""`generate` with Hugging Face's arguments, for every EaModel: the engine decodes a batch and stops exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.stop_rules import generate as engine_generate
from eagle_triton.families.methods import tree_of
from eagle_triton.models.generate_arguments import GenerateArguments, check_sampling_is_meant, make_generator
from eagle_triton.patching import PatchPoint


def generate_patch_point(model: Any, engine: Engine) -> PatchPoint:
    """`model.generate`, replaced if the model has one, else added."""

    def generate(
        input_ids: Tensor,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        attention_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Decode a batch speculatively and stop exactly. Arguments and result are the same as in `EaModel.generate`.

        The sequences of a batch are decoded together. Raises ValueError for bad arguments, RuntimeError for NaN
        logits or if another generation is running on this model.
        """
        check_sampling_is_meant(do_sample, temperature, top_p, top_k, min_p)
        request = GenerateArguments.resolve(
            model, input_ids, attention_mask, max_length, max_new_tokens, eos_token_id, pad_token_id
        )
        sampling = SamplingParams()
        if do_sample or temperature == 0:
            sampling = SamplingParams(temperature, top_k, top_p, min_p)
        device = engine.view.device
        rows = engine_generate(
            engine,
            [prompt.to(device, torch.int64) for prompt in request.prompts],
            tree_of(engine),
            sampling,
            max_new_tokens=request.new_tokens,
            eos_token_ids=request.stop_ids,
            generator=make_generator(seed, generator, "cpu"),
        )
        if hasattr(model, "accept_lengths"):  # our own EaModel has it
            model.accept_lengths = engine.accept_lengths
        return request.pad(rows)

    added = not hasattr(model, "generate")
    return PatchPoint(model, "generate", generate, "generate", "engine, batched, exact stops", adds=added)
