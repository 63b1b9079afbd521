"""The layout of speculators, which vLLM serves directly: the head names its target. Facts from speculators 0.9.0.

Sizes are in `transformer_layer_config`, the fields of an EAGLE-3 head at the top level.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from eagle_triton.export import vllm
from eagle_triton.export.contents import ExportError, HeadContents
from eagle_triton.export.flat_config import layer_fields, layer_tensors
from eagle_triton.export.launch_plan import LaunchPlan, flags

ARCHITECTURE = "Eagle3Speculator"


def check(head: HeadContents) -> None:
    """Raise ExportError for something that speculators, or vLLM, which reads the layout, cannot do."""
    if not head.eagle3:
        raise ExportError(
            "speculators: an EAGLE-1/2 head (midlayer.hidden_norm is missing) is not supported since 0.5; vLLM and "
            "SGLang support it (to='vllm', to='sglang')"
        )
    if head.has_own_width:
        raise ExportError(
            f"speculators: target_hidden_size={head.config.target_hidden_size} must be the head's hidden_size "
            f"({head.config.hidden_size}), the width of features for its fc; vLLM supports both (to='vllm')"
        )
    if head.config.norm_before_fc and head.config.fc_norm:
        raise ExportError(
            "speculators: norm_before_fc=True and fc_norm=True exclude each other; vLLM reads both (to='vllm')"
        )
    vllm.check_eagle3(head)


def config(head: HeadContents) -> dict[str, Any]:
    """config.json. vLLM reads the length of its chains from it."""
    layer = dict(model_type="llama", dtype=head.dtype, **layer_fields(head))
    verifier = dict(name_or_path=head.target.path, architectures=list(head.target.config.architectures or ()))
    return dict(
        architectures=[ARCHITECTURE],
        speculators_model_type="eagle3",
        dtype=head.dtype,
        draft_vocab_size=head.config.draft_vocab_size,
        norm_before_residual=head.config.norm_before_residual,
        norm_before_fc=head.config.norm_before_fc,
        fc_norm=head.config.fc_norm,
        norm_output=head.config.norm_output,
        target_hidden_size=None,
        eagle_aux_hidden_state_layer_ids=list(head.feature_layers),
        tie_word_embeddings=False,
        transformer_layer_config=layer,
        speculators_config=dict(
            algorithm="eagle3",
            default_proposal_method="greedy",
            proposal_methods=[
                dict(proposal_type="greedy", speculative_tokens=head.chain, verifier_accept_k=1, accept_tolerance=0.0)
            ],
            verifier=verifier,
        ),
    )


def tensors(head: HeadContents) -> dict[str, Tensor]:
    """model.safetensors."""
    return layer_tensors(head)


def plan(head: HeadContents, folder: Path, ranks: int) -> LaunchPlan:
    """ranks: as in vLLM, which reads everything else from the folder."""
    shared = dict(tensor_parallel_size=ranks) if ranks > 1 else {}
    return LaunchPlan(
        folder,
        ("vllm", "serve", str(folder), *flags(shared)),
        "vllm.LLM",
        dict(model=str(folder), **shared),
        (*vllm.chain_notes(head), f"the folder names its target, {head.target.path}, which must not be moved"),
    )
