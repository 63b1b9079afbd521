"""The table of operations that a step calls: in torch, and with the same names as Triton kernels.

`ops.topk` comes from `reference/tree_decoding.py` or from `tree_decoding.py`. Most stems have their kernels in `ops/`.
"""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import torch

from eagle_triton.reference import adaptive_length as _adaptive_length
from eagle_triton.reference import attention as _attention
from eagle_triton.reference import draft_inputs as _draft_inputs
from eagle_triton.reference import exchange as _exchange
from eagle_triton.reference import experts as _experts
from eagle_triton.reference import gated_delta as _gated_delta
from eagle_triton.reference import gather as _gather
from eagle_triton.reference import grafting as _grafting
from eagle_triton.reference import kv_cache as _kv_cache
from eagle_triton.reference import layers as _layers
from eagle_triton.reference import linear as _linear
from eagle_triton.reference import logit_processing as _logit_processing
from eagle_triton.reference import ngram_table as _ngram_table
from eagle_triton.reference import prompt_attention as _prompt_attention
from eagle_triton.reference import suffix_match as _suffix_match
from eagle_triton.reference import tree_decoding as _tree_decoding
from eagle_triton.reference import verification as _verification
from eagle_triton.reference.kv_cache import write_rows as write_rows
from eagle_triton.reference.suffix_match import suffix_draft as suffix_draft
from eagle_triton.runtime.fallback import KernelError, give_up_gluon

INTERFACE_FILES = ("attention", "kv_cache", "tree_decoding")  # stems with launchers in the package's root


class Operations:
    """Every operation as an attribute, in plain torch, on any device. `calls` counts the calls.

    on_kernel_error: called with the operation's name and the error if a kernel does not compile here. If it returns,
    a fallback runs from then on: a Triton kernel for a Gluon kernel, the torch reference for a Triton kernel. None: the
    error is raised.
    """

    kernels: ClassVar[bool] = False
    one_launch = False  # whether the layers of one row may run in one launch, see engine/model/one_launch.py

    embed_rms_norm = staticmethod(_layers.embed_rms_norm)
    rms_norm = staticmethod(_layers.rms_norm)
    add_rms_norm = staticmethod(_layers.add_rms_norm)
    add = staticmethod(_layers.add)
    linear = staticmethod(_linear.linear)
    linear_stack = staticmethod(_linear.linear_stack)
    linear_swiglu = staticmethod(_linear.linear_swiglu)
    join_columns = staticmethod(_exchange.join_columns)
    swiglu = staticmethod(_layers.swiglu)
    activate = staticmethod(_layers.activate)
    route = staticmethod(_experts.route)
    experts_swiglu = staticmethod(_experts.experts_swiglu)
    experts_down = staticmethod(_experts.experts_down)
    add_shared_expert = staticmethod(_experts.add_shared_expert)
    rotary_append = staticmethod(_layers.rotary_append)
    latent_append = staticmethod(_layers.latent_append)
    tree_attention = staticmethod(_attention.tree_attention)
    prompt_attention = staticmethod(_prompt_attention.prompt_attention)
    gate_heads = staticmethod(_layers.gate_heads)
    causal_conv = staticmethod(_gated_delta.causal_conv)
    gated_conv = staticmethod(_gated_delta.gated_conv)
    delta_tree = staticmethod(_gated_delta.delta_tree)
    delta_chunk = staticmethod(_gated_delta.delta_chunk)
    delta_recurrent = staticmethod(_gated_delta.delta_recurrent)
    gated_norm = staticmethod(_gated_delta.gated_norm)
    mask_tokens = staticmethod(_logit_processing.mask_tokens)
    process_logits = staticmethod(_logit_processing.process_logits)
    verify_greedy = staticmethod(_verification.verify_greedy)
    verify_sampling = staticmethod(_verification.verify_sampling)
    verify_target_match = staticmethod(_verification.verify_target_match)
    verify_topp = staticmethod(_verification.verify_topp)
    first_path = staticmethod(_verification.first_path)
    update_sequence = staticmethod(_verification.update_sequence)
    commit = staticmethod(_kv_cache.commit)
    commit_states = staticmethod(_gated_delta.commit_states)
    commit_windows = staticmethod(_gated_delta.commit_windows)
    gather_rows = staticmethod(_gather.gather_rows)
    sequence_rows = staticmethod(_gather.sequence_rows)
    draft_inputs = staticmethod(_draft_inputs.draft_inputs)
    suffix_drafts = staticmethod(_suffix_match.suffix_drafts)
    ngram_drafts = staticmethod(_suffix_match.ngram_drafts)
    count_ngrams = staticmethod(_ngram_table.count_ngrams)
    counted_drafts = staticmethod(_ngram_table.counted_drafts)
    row_entropy = staticmethod(_adaptive_length.row_entropy)
    choose_gamma = staticmethod(_adaptive_length.choose_gamma)
    topk = staticmethod(_tree_decoding.topk)
    expand_beam = staticmethod(_tree_decoding.expand_beam)
    best_first_tree = staticmethod(_tree_decoding.best_first_tree)
    clip_depth = staticmethod(_adaptive_length.clip_depth)
    estimate_scores = staticmethod(_grafting.estimate_scores)
    graft = staticmethod(_grafting.graft)
    build_tree = staticmethod(_tree_decoding.build_tree)
    count_right = staticmethod(_grafting.count_right)

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.on_kernel_error: Callable[[str, KernelError], None] | None = None
        for name in operation_names():
            setattr(self, name, self._counted(name, getattr(type(self), name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            nonlocal function
            while True:
                try:
                    return function(*args, **kwargs)
                except KernelError as error:
                    if self.on_kernel_error is None:
                        raise
                    self.on_kernel_error(name, error)
                    if not give_up_gluon(error.module):
                        function = getattr(Operations, name)

        return call


def operation_names() -> list[str]:
    """All operations, in the order in which a step calls them."""
    return [name for name, value in vars(Operations).items() if isinstance(value, staticmethod)]


@functools.cache
def kernel_operations() -> type[Operations]:
    """The same table with launchers, for CUDA tensors, or CPU tensors in Triton's interpreter. Raises ImportError if
    Triton is missing."""
    launchers: dict[str, Any] = {"kernels": True}
    for name in operation_names():
        stem = getattr(Operations, name).__module__.rpartition(".")[2]
        module = module_of(stem if stem in INTERFACE_FILES else f"ops.{stem}", kernels=True)
        launchers[name] = staticmethod(getattr(module, name))
    return type("KernelOperations", (Operations,), launchers)


def make_operations(kernels: bool = False) -> Operations:
    """The references, or with `kernels` the Triton kernels. Raises ImportError if Triton is missing."""
    return kernel_operations()() if kernels else Operations()


def choose_operations(device: torch.device, kernels: bool | None, cuda_graph: bool | None) -> tuple[Operations, bool]:
    """The operations for a model on `device`, and whether its steps become CUDA graphs. None chooses the fastest.

    Raises ValueError if the choice cannot run there.
    """
    on_gpu = device.type == "cuda"
    kernels = on_gpu if kernels is None else kernels
    if kernels and not on_gpu and not _interpreted():
        raise ValueError(
            f"kernels=True: the model lies on {device}, where Triton's kernels do not run: move it to a GPU, or leave "
            "kernels out to run the torch references (TRITON_INTERPRET=1, set before Triton is imported, interprets "
            "the kernels)"
        )
    cuda_graph = on_gpu and kernels if cuda_graph is None else cuda_graph
    if cuda_graph and not (on_gpu and kernels):
        raise ValueError(f"cuda_graph=True needs a GPU and kernels, got a model on {device} and kernels={kernels}")
    return make_operations(kernels), cuda_graph


def _interpreted() -> bool:
    """Whether Triton's interpreter stands in for a GPU."""
    triton = _needing_triton("triton")
    return not isinstance(triton.jit(_interpreted), triton.JITFunction)


def module_of(name: str, kernels: bool) -> ModuleType:
    """A module of kernels by its name (`tree_decoding`, `ops.sampling`), or the references' module of the same stem.

    Raises ImportError if Triton is missing.
    """
    if not kernels:
        return importlib.import_module(f"eagle_triton.reference.{name.removeprefix('ops.')}")
    return _needing_triton(f"eagle_triton.{name}")


def _needing_triton(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ImportError(
            "the kernels need Triton: pip install triton (on Windows: triton-windows); "
            "kernels=False decodes with the torch references"
        ) from error
