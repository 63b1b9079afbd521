"""eagle-llm 1.x: its EaModel with an EAGLE-1 head and a fixed tree, around its own Llama or Mixtral.

The modules are the same as in SafeAILab's EAGLE-1, so most of the reading is shared. The tree is not.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from eagle_triton.engine.drafts.eagle import Eagle1Draft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.stop_rules import original_steps
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families import attention_forward as attention
from eagle_triton.families.methods import Steps, draft_of, drop, last, method_patch_point, prompt, sequences
from eagle_triton.families.safeailab import is_ea_model, read_eagle1_head, read_target
from eagle_triton.models.generate_arguments import original_stop_ids
from eagle_triton.patching import PatchPoint

TARGETS = {"modeling_llama_kv": False, "modeling_mixtral_kv": False}


def recognise(model: Any) -> bool:
    """Whether `model` is of this family. `read` raises if its target cannot be decoded."""
    parameters = ("topK_genrate", "tree", "tree_buffer")
    return is_ea_model(model) and all(hasattr(model.ea_layer, name) for name in parameters)


def read(model: Any) -> tuple[ModelView, Eagle1Draft]:
    """References to the target's and the head's parts. Raises UnsupportedModelError for unknown parts."""
    target = read_target(model, TARGETS, eagle3=False)
    return target, read_eagle1_head(model, target, read_tree)


def read_tree(head: Any) -> TreeSpec:
    """The head's current fixed tree."""
    return TreeSpec.fixed(head.tree)


MAX_NEW, LONGEST = 1024, 1960  # the stops of the step-by-step methods


def patch_points(model: Any, engine: Engine) -> tuple[PatchPoint, ...]:
    """The three generating methods. Raises UnsupportedModelError if the model's have other arguments."""
    default_tree = _default_tree(model)

    def steps(spec: TreeSpec, input_ids: Tensor, sampling: SamplingParams, max_new_tokens: int, limit: int) -> Steps:
        tokens = prompt(engine, input_ids)
        draft_of(engine).check_tree(spec)
        capacity = model.config.max_position_embeddings
        if tokens.shape[1] + spec.nodes > capacity:
            raise ValueError(
                f"input_ids: the prompt does not fit: its {tokens.shape[1]} tokens and {spec.nodes} for the next step "
                f"exceed the target's max_position_embeddings of {capacity}"
            )
        return original_steps(
            engine,
            tokens,
            spec,
            sampling,
            max_new_tokens=max_new_tokens,
            limit=limit,
            stop_ids=original_stop_ids(model),
        )

    def eagenerate(
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        tree_choices: Sequence[Sequence[int]] = default_tree,
    ) -> Tensor | None:
        """Decode speculatively from a prompt [1, L] int64.

        Stops after the step that brought the end token, more than `max_new_tokens` tokens, or a sequence longer than
        `max_length`. Further tokens that this step accepted are kept. temperature 0 is greedy; top_p and top_k apply if
        positive. tree_choices: the tree, each node as its path of ranks.
        Returns the sequence [1, L + new], None if `max_length` is 0. Raises ValueError for a prompt that is empty, out
        of range or does not fit, RuntimeError for NaN logits or if another generation is running.
        """
        sampling = SamplingParams.original(temperature, top_p, top_k)
        end = last(steps(TreeSpec.fixed(tree_choices), input_ids, sampling, max_new_tokens, max_length))
        return None if end is None else end[0]

    def ea_generate(
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_steps: int = 512,
        tree_choices: Sequence[Sequence[int]] = default_tree,
    ) -> Generator[Tensor, None, None]:
        """`eagenerate`, step by step: yields the sequence so far after each of at most `max_steps` steps.

        Stops after the end token, more than 1024 new tokens, or a sequence longer than 1960.
        """
        sampling = SamplingParams.original(temperature, top_p, top_k)
        return _first(max_steps, steps(TreeSpec.fixed(tree_choices), input_ids, sampling, MAX_NEW, LONGEST))

    def naive_generate(
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_steps: int = 512,
        tree_choices: Sequence[Sequence[int]] = default_tree,
    ) -> Generator[Tensor, None, None]:
        """The target alone, always greedy: yields the sequence after each of `max_steps` tokens.

        Stops after the end token or a sequence longer than 1960. `tree_choices` has no effect.
        """
        return _first(max_steps, steps(PLAIN, input_ids, SamplingParams(), LONGEST, LONGEST))

    methods = (eagenerate, ea_generate, naive_generate)
    return tuple(method_patch_point(model, method.__name__, method) for method in methods)


def module_patch_points(model: Any, engine: Engine) -> tuple[tuple[PatchPoint, ...], dict[str, str]]:
    """Every `self_attn.forward`; and the methods that are not replaced, with the reason."""
    reason = "drafts by sampling without replacement and returns the probabilities, which the engine does not have"
    return attention.patch_points(model, engine), {"ea_layer.topK_genrate": reason}


def drop_caches(model: Any) -> None:
    """Drop the caches that the original and the engine must not take over from each other."""
    drop(model, "past_key_values", "past_key_values_data", "current_length_data", "tree_buffers", "tree_choices")
    drop(model.ea_layer, "stable_kv", "tree_mask")
    drop(model.base_model.model, "tree_mask", "tree_mode")


def _default_tree(model: Any) -> Sequence[Sequence[int]]:
    parameter = inspect.signature(model.eagenerate).parameters.get("tree_choices")
    if parameter is None:
        raise UnsupportedModelError("model.eagenerate must take tree_choices: this version is not known")
    return parameter.default


def _first(count: int, steps: Steps) -> Generator[Tensor, None, None]:
    """The sequences of the first `count` steps."""
    everything = sequences(steps)
    try:
        yield from islice(everything, max(count, 0))
    finally:
        everything.close()
