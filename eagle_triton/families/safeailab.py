"""SafeAILab/EAGLE: its EaModel with an EAGLE-3 or an EAGLE-1/2 head, around its own Llama, Mixtral, Qwen2 or Qwen3.

Read by inspecting classes and structure; the package itself is never imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from eagle_triton.engine.drafts.eagle import Eagle1Draft, Eagle3Draft, EagleDraft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.model.model_view import Layer, ModelView
from eagle_triton.engine.model.modules import Experts, Rotary
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.stop_rules import original_steps
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.errors import UnknownLayerError, UnsupportedModelError
from eagle_triton.families import attention_forward as attention
from eagle_triton.families.methods import drop, last, method_patch_point, observed, prompt, sequences, tree_of
from eagle_triton.families.reading.module_reader import ModuleReader, check_dtype, read_rotary
from eagle_triton.families.reading.sharded import refuse_sharded
from eagle_triton.families.topk_generate import draft_patch_point
from eagle_triton.models.checks import check_fits
from eagle_triton.models.generate_arguments import original_stop_ids, stop_ids
from eagle_triton.patching import PatchPoint

TARGETS = {  # module of the target: whether its forward collects the features of an EAGLE-3 head
    "modeling_llama_kv": True,
    "modeling_mixtral_kv": False,
    "modeling_qwen2_kv": False,
    "modeling_qwen3_kv": True,
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the length


def recognise(model: Any) -> bool:
    """Whether `model` is of this family. `read` raises if its target cannot be decoded."""
    parameters = ("topK_genrate", "total_tokens", "depth", "top_k")
    return is_ea_model(model) and all(hasattr(model.ea_layer, name) for name in parameters)


def read(model: Any) -> tuple[ModelView, EagleDraft]:
    """References to the target's and the head's parts. Raises UnsupportedModelError for unknown parts."""
    eagle3 = hasattr(model.ea_layer, "midlayer")
    target = read_target(model, TARGETS, eagle3)
    return target, read_eagle3_head(model, target) if eagle3 else read_eagle1_head(model, target, read_tree)


def read_tree(head: Any) -> TreeSpec:
    """The current tree parameters."""
    return TreeSpec.dynamic(head.total_tokens + 1, head.depth, head.top_k)


def is_ea_model(model: Any) -> bool:
    """Whether `model` is an EaModel around a target with a preallocated cache, like SafeAILab's and eagle-llm's."""
    base_model, head = getattr(model, "base_model", None), getattr(model, "ea_layer", None)
    return type(model).__name__ == "EaModel" and isinstance(head, nn.Module) and _source(base_model).endswith("_kv")


def read_target(model: Any, targets: dict[str, bool], eagle3: bool) -> ModelView:
    """The target below `model.base_model`, if its module is one of `targets` (see TARGETS)."""
    source = _source(model.base_model)
    if source not in targets:
        raise UnsupportedModelError(
            f"model.base_model must come from {' or '.join(targets)}, got {type(model.base_model).__name__} of {source}"
        )
    refuse_sharded(model.base_model, "model.base_model")
    config = model.base_model.config
    check_tensor_parallel(config, "model.base_model.config")
    check_tensor_parallel(model.base_model, "model.base_model")
    read = ModuleReader(model)
    body = read.at("base_model.model")
    layers = tuple(_layer(read, f"base_model.model.layers.{i}") for i in range(len(body.module.layers)))
    features: tuple[int, ...] = ()
    if eagle3:
        if not targets[source]:
            raise UnsupportedModelError(
                f"model.base_model ({type(model.base_model).__name__}) has no features for an EAGLE-3 head", "heads"
            )
        count = len(layers)
        features = tuple(sorted({index for index in (2, count // 2, count - 3) if 0 <= index < count}))
    embedding = body.embedding("embed_tokens")
    check_dtype(embedding.dtype, "model.base_model.model.embed_tokens.weight")
    return ModelView(
        embedding=embedding,
        layers=layers,
        norm=body.norm("norm"),
        head=read.projection("base_model.lm_head"),
        feature_layers=features,
        eos_token_ids=tuple(sorted(stop_ids(model))),
        pad_token_id=getattr(config, "pad_token_id", None),
    )


def read_eagle3_head(model: Any, target: ModelView) -> Eagle3Draft:
    """The EAGLE-3 head below `model.ea_layer`."""
    head, read = model.ea_layer, ModuleReader(model.ea_layer, "model.ea_layer")
    fc, lm_head = read.value("fc", nn.Linear), read.value("lm_head", nn.Linear)
    _expect(f"{read.path}.fc columns", fc.in_features, target.feature_size, "the width of the target's features")
    _expect(f"{read.path}.lm_head columns", lm_head.in_features, fc.out_features, "the head's hidden size")
    return Eagle3Draft(
        embedding=_embedding(read, target, fc.out_features),
        fc=read.projection("fc"),
        layers=(_layer(read, "midlayer"),),
        head=read.projection("lm_head"),
        tree_reader=lambda: read_tree(head),
        hidden_norm=read.norm("midlayer.hidden_norm"),
        norm=read.norm("norm"),
        d2t=_draft_to_target(read, lm_head.out_features, target),
    )


def read_eagle1_head(model: Any, target: ModelView, tree_reader: Callable[[nn.Module], TreeSpec]) -> Eagle1Draft:
    """The EAGLE-1/2 head below `model.ea_layer`; `tree_reader(head)` reads its tree parameters."""
    head, read = model.ea_layer, ModuleReader(model.ea_layer, "model.ea_layer")
    fc = read.value("fc", nn.Linear)
    _expect(f"{read.path}.fc columns", fc.in_features, 2 * target.hidden_size, "twice the target's hidden size")
    _expect(f"{read.path}.fc rows", fc.out_features, target.hidden_size, "the target's hidden size")
    count = len(read.value("layers", nn.ModuleList))
    return Eagle1Draft(
        embedding=_embedding(read, target, fc.out_features),
        fc=read.projection("fc"),
        layers=tuple(_layer(read, f"layers.{index}") for index in range(count)),
        head=target.head,
        tree_reader=lambda: tree_reader(head),
    )


def _layer(read: ModuleReader, path: str) -> Layer:
    layer = read.at(path)
    attention = layer.at("self_attn")
    config = attention.value("config")
    check_tensor_parallel(config, f"{attention.path}.config")
    check_tensor_parallel(attention.module, attention.path)
    experts = _experts(layer.module)
    if experts is None:
        check_tensor_parallel(layer.module.mlp, f"{layer.path}.mlp")
    return read.layer(
        path,
        _rotary(attention if hasattr(attention.module, "rotary_emb") else read.at("base_model.model")),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.value("head_dim", int),
        mlp=experts,
    )


def _experts(layer: nn.Module) -> Experts | None:
    """Mixtral's block, which is called as a module: it rounds each expert's output. None for a layer without one."""
    block: Any = getattr(layer, "block_sparse_moe", None)
    return None if block is None else Experts(block, block.top_k, len(block.experts))


def check_tensor_parallel(reader: Any, where: str) -> None:
    """Raise UnsupportedModelError if projections are computed in slices: their sums round differently.

    reader: a configuration, or a module that has its own copy of the field.
    """
    if (slices := getattr(reader, "pretraining_tp", 1)) not in (None, 1):
        raise UnsupportedModelError(f"{where}.pretraining_tp must be 1, got {slices}")


def _rotary(owner: ModuleReader) -> Rotary:
    read = owner.at("rotary_emb")
    module, path, name = read.module, read.path, type(read.module).__name__
    rope_type = getattr(module, "rope_type", "dynamic" if "Dynamic" in name else "default")
    if rope_type not in ROPE_TYPES:
        raise UnknownLayerError(f"{path} must be one of {ROPE_TYPES}, got {rope_type!r} ({name})")
    if not (hasattr(module, "base") and hasattr(module, "dim")):
        return read_rotary(module.inv_freq, getattr(module, "attention_scaling", 1.0), path)
    # Its cosines were computed in fp32 before a cast to half precision rounded inv_freq, so compute inv_freq anew.
    device = read.value("inv_freq", torch.Tensor).device
    exponent = torch.arange(0, module.dim, 2, dtype=torch.int64, device="cpu").float() / module.dim
    return Rotary((1.0 / module.base**exponent / getattr(module, "scaling_factor", 1.0)).to(device))


def _embedding(head: ModuleReader, target: ModelView, width: int) -> torch.Tensor:
    path, weight = f"{head.path}.embed_tokens.weight", head.embedding("embed_tokens")
    _expect(f"{path} rows", weight.shape[0], target.vocab_size, "the target's vocabulary")
    _expect(f"{path} columns", weight.shape[1], width, "the head's hidden size")
    _expect(f"{head.path}.fc.weight dtype", head.module.fc.weight.dtype, target.dtype, "the target's")
    return weight


def _draft_to_target(head: ModuleReader, draft_vocabulary: int, target: ModelView) -> torch.Tensor | None:
    if draft_vocabulary == target.vocab_size:
        return None
    d2t = head.value("d2t", torch.Tensor)
    _expect(f"{head.path}.d2t shape", tuple(d2t.shape), (draft_vocabulary,), "one offset for each draft token")
    ids = torch.arange(draft_vocabulary, device=d2t.device) + d2t
    if ids.min() < 0 or ids.max() >= target.vocab_size:
        raise UnsupportedModelError(
            f"{head.path}.d2t must map to tokens in 0..{target.vocab_size - 1}, got {int(ids.min())}..{int(ids.max())}",
            "heads",
        )
    return d2t


def _expect(what: str, got: Any, expected: Any, meaning: str) -> None:
    if got != expected:
        raise UnsupportedModelError(
            f"{what} must be {expected} ({meaning}), got {got}: head and target do not fit", "heads"
        )


def _source(base_model: Any) -> str:
    return type(base_model).__module__.rpartition(".")[2]


def patch_points(
    model: Any,
    engine: Engine,
    after_step: Callable[[], None] = lambda: None,
    greedy_count_is_tensor: bool = True,
) -> tuple[PatchPoint, ...]:
    """The four generating methods. Raises UnsupportedModelError if the model's have other arguments.

    `after_step` runs after every decode step. The original returns the number of new tokens as a tensor [] if greedy.
    """

    def method(name: str, plain: bool, stepwise: bool) -> PatchPoint:
        def generate(
            input_ids: Tensor,
            temperature: float = 0.0,
            top_p: float = 0.0,
            top_k: float = 0.0,
            max_new_tokens: int = 512,
            max_length: int = 2048,
            log: bool = False,
            is_llama3: bool = False,
        ) -> Any:
            """Decode from a prompt [1, L] int64, speculatively, or in the naive methods token by token.

            Stops after the step that brought the end token (with `is_llama3` also <|eot_id|>), more than
            `max_new_tokens` tokens, or a sequence longer than `max_length` minus the drafts of a tree minus 10. Further
            tokens that this step accepted are kept. temperature 0 is greedy; top_p and top_k apply if positive.
            Returns the sequence [1, L + new], or with `log` (sequence, new tokens, index of the last step), where
            speculative greedy decoding counts the new tokens in a tensor []. `ea_generate` and `naive_generate` yield
            the sequence so far after each step, with `log` or without. Raises ValueError for a prompt that is empty,
            out of range or does not fit, RuntimeError for NaN logits or if another generation is running.
            """
            tokens, spec = prompt(engine, input_ids), PLAIN if plain else tree_of(engine)
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
            if stepwise:
                return sequences(observed(running, after_step))
            sequence, new, index = last(observed(running, after_step)) or (input_ids.clone(), 0, -1)
            as_tensor = greedy_count_is_tensor and not (plain or temperature > 1e-5)
            count = torch.tensor(new, device=sequence.device) if as_tensor else new
            return (sequence, count, index) if log else sequence

        generate.__name__ = name
        return method_patch_point(model, name, generate)

    return (
        method("eagenerate", plain=False, stepwise=False),
        method("ea_generate", plain=False, stepwise=True),
        method("naivegenerate", plain=True, stepwise=False),
        method("naive_generate", plain=True, stepwise=True),
    )


def module_patch_points(model: Any, engine: Engine) -> tuple[tuple[PatchPoint, ...], dict[str, str]]:
    """`ea_layer.topK_genrate` and every `self_attn.forward`; and the methods that are not replaced, with the reason."""
    return (draft_patch_point(model, engine), *attention.patch_points(model, engine)), {}


def drop_caches(model: Any) -> None:
    """Drop the caches that the original and the engine must not take over from each other."""
    drop(model, "past_key_values", "past_key_values_data", "current_length_data")
    drop(model.ea_layer, "stable_kv", "tree_mask")
    drop(model.base_model.model, "tree_mask", "tree_mode")
