"""eagle-llm 1.x: its EaModel with an EAGLE-1 head and a fixed tree, around its own Llama.

The modules are those of SafeAILab's EAGLE-1, so most of the reading is shared; the tree is not.
"""

from __future__ import annotations

from typing import Any

from eagle_triton.adapters.upstream import is_ea_model, read_eagle1_head, read_target
from eagle_triton.engine.drafts.eagle import Eagle1Draft
from eagle_triton.engine.model import ModelView
from eagle_triton.engine.tree_spec import TreeSpec

TARGETS = {"modeling_llama_kv": False}


def recognise(model: Any) -> bool:
    """Whether `model` is of this family; a target that cannot be decoded is found by `read`."""
    parameters = ("topK_genrate", "tree", "tree_buffer")
    return is_ea_model(model) and all(hasattr(model.ea_layer, name) for name in parameters)


def read(model: Any) -> tuple[ModelView, Eagle1Draft]:
    """References to the target's and the head's parts. Raises UnsupportedModelError for what is not known."""
    target = read_target(model, TARGETS, eagle3=False)
    return target, read_eagle1_head(model, target, read_tree)


def read_tree(head: Any) -> TreeSpec:
    """The head's fixed tree as it is now."""
    return TreeSpec.fixed(head.tree)
