"""The generating methods of SafeAILab/EAGLE's EaModel on the engine: same arguments, stop rules and results.

They differ from the original in what they refuse: a prompt that is empty, out of range, batched, or does
not fit raises ValueError before anything runs, where the original fails somewhere on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from eagle_triton.drop_in import attention
from eagle_triton.drop_in.draft import draft_seam
from eagle_triton.drop_in.methods import (
    Steps,
    drop,
    last,
    method_seam,
    observed,
    prompt,
    sequences,
    tree_of,
)
from eagle_triton.drop_in.patching import Seam
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.stop_rules import original_steps
from eagle_triton.engine.tree_spec import PLAIN
from eagle_triton.models.checks import check_fits
from eagle_triton.models.generate_arguments import original_stop_ids


def seams(
    model: Any,
    engine: Engine,
    after_step: Callable[[], None] = lambda: None,
    greedy_count_is_tensor: bool = True,
) -> tuple[Seam, ...]:
    """The four generating methods. Raises UnsupportedModelError if their arguments are not the known ones.

    `after_step` runs after every decode step. The original returns the count of new tokens as a tensor [] when greedy.
    """

    def steps(
        plain: bool,
        input_ids: Tensor,
        temperature: float,
        top_p: float,
        top_k: float,
        max_new_tokens: int,
        max_length: int,
        is_llama3: bool,
    ) -> Steps:
        tokens = prompt(engine, input_ids)
        spec = PLAIN if plain else tree_of(engine)
        check_fits(tokens.shape[1], spec.nodes, max_length)
        running = original_steps(
            engine,
            tokens,
            spec,
            SamplingParams.original(temperature, top_p, top_k),
            max_new_tokens=max_new_tokens,
            limit=max_length - model.ea_layer.total_tokens - 10,
            stop_ids=original_stop_ids(model, is_llama3),
        )
        return observed(running, after_step)

    def eagenerate(
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor | int, int]:
        """Decode speculatively from a prompt [1, L] int64.

        Stops after the step that brought the end token (with `is_llama3` also <|eot_id|>), more than `max_new_tokens`
        tokens, or a sequence longer than `max_length` less the drafts of a tree less 10; what that step accepted
        beyond stays. temperature 0 is greedy; top_p and top_k count when positive.
        Returns the sequence [1, L + new], or with `log` (sequence, new tokens, index of the last step), where greedy
        decoding counts the new tokens in a tensor []. Raises ValueError for a prompt that is empty, out of range or
        does not fit, RuntimeError for NaN logits or if another generation is running.
        """
        end = last(steps(False, input_ids, temperature, top_p, top_k, max_new_tokens, max_length, is_llama3))
        sequence, new, index = end or _no_step(input_ids, log)
        if not log:
            return sequence
        if greedy_count_is_tensor and not temperature > 1e-5:
            return sequence, torch.tensor(new, device=sequence.device), index
        return sequence, new, index

    def naivegenerate(
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
    ) -> Tensor | tuple[Tensor, int, int]:
        """Decode with the target alone, one token per step; everything else as in `eagenerate`."""
        end = last(steps(True, input_ids, temperature, top_p, top_k, max_new_tokens, max_length, is_llama3))
        result = end or _no_step(input_ids, log)
        return result if log else result[0]

    def ea_generate(
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
    ) -> Generator[Tensor, None, None]:
        """`eagenerate`, step by step: yields the sequence so far, [1, L + new], after each. `log` has no effect."""
        return sequences(steps(False, input_ids, temperature, top_p, top_k, max_new_tokens, max_length, is_llama3))

    def naive_generate(
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
    ) -> Generator[Tensor, None, None]:
        """`naivegenerate`, token by token: yields the sequence so far after each. `log` has no effect."""
        return sequences(steps(True, input_ids, temperature, top_p, top_k, max_new_tokens, max_length, is_llama3))

    methods = (eagenerate, ea_generate, naivegenerate, naive_generate)
    return tuple(method_seam(model, method.__name__, method) for method in methods)


def module_seams(model: Any, engine: Engine) -> tuple[tuple[Seam, ...], dict[str, str]]:
    """`ea_layer.topK_genrate` and every `self_attn.forward`, and what is left alone with its reason."""
    return (draft_seam(model, engine), *attention.seams(model, engine)), {}


def drop_caches(model: Any) -> None:
    """Drop what one regime has cached and the other must not find."""
    drop(model, "past_key_values", "past_key_values_data", "current_length_data")
    drop(model.ea_layer, "stable_kv", "tree_mask")
    drop(model.base_model.model, "tree_mask", "tree_mode")


def _no_step(input_ids: Tensor, log: bool) -> tuple[Tensor, int, int]:
    """The result where `max_length` is so small that the loop never runs."""
    if log:
        raise ValueError("max_length: leaves no room for a single step beside a tree's drafts and 10 more")
    return input_ids.clone(), 0, -1
