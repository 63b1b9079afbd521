"""The gated delta rule (arXiv 2412.06464) over whole sequences, with g and beta given.

The engine's operations compute gates and norms themselves, so these run in plain torch, on any device. Layers and
workers call the operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eagle_triton.gdn import slot_rules
from eagle_triton.gdn.operand_checks import check_operands
from eagle_triton.gdn.packing import packed, padded, sequence_lengths
from eagle_triton.gdn.torch_rule import Heads, by_chunks, by_head, one_by_one
from eagle_triton.values import check_range

CHUNK_ABOVE = 128
"""Sequences of more tokens are read in chunks."""


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """By chunks of 64 tokens, for prompts: the time grows with T, not with its square.

    q, k [B, T, H, K]; v [B, T, HV, V], HV a multiple of H; g (logarithm of the decay) and beta [B, T, HV]; any floats.
    scale: of q; None: 1 / sqrt(K). initial_state [N, HV, K, V]; None: zeros. cu_seqlens [N + 1]: N sequences one after
    the other in one row; None: N = B. head_first: q, k, v, g, beta and the output are [B, H, T, ...].
    use_qk_l2norm_in_kernel: replace q and k by x / sqrt(sum(x^2) + 1e-6) first. Returns the outputs [B, T, HV, V] in
    v's dtype and, with output_final_state, the states after the last tokens [N, HV, K, V] float32. Raises ValueError if
    shapes do not fit.
    """
    if head_first:
        q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    options = (scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel)
    outputs, state = _over_sequences("chunk_gated_delta_rule", by_chunks, (q, k, v, g, beta), *options)
    return (outputs.transpose(1, 2) if head_first else outputs), state


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Token by token, for a few tokens. Arguments, results and errors as in `chunk_gated_delta_rule`."""
    options = (scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel)
    return _over_sequences("fused_recurrent_gated_delta_rule", one_by_one, (q, k, v, g, beta), *options)


def _over_sequences(
    name: str,
    rule: Callable[[Heads, Tensor], tuple[Tensor, Tensor]],
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    l2norm: bool,
) -> tuple[Tensor, Tensor | None]:
    q, k, v, g, beta = operands
    check_operands(name, q, k, v, g, beta)
    lengths = sequence_lengths(name, cu_seqlens, q)
    shape = (len(q) if lengths is None else len(lengths), v.shape[2], k.shape[3], v.shape[3])
    if initial_state is not None and tuple(initial_state.shape) != shape:
        raise ValueError(f"{name}: initial_state must be {list(shape)}, got {list(initial_state.shape)}")
    state = torch.zeros(shape, device=q.device) if initial_state is None else initial_state.float()
    q, k, v, g, beta = (padded(x, lengths) for x in operands)
    outputs, state = rule(by_head(q, k, v, g, beta, scale=scale, l2norm=l2norm), state)
    outputs = packed(outputs.transpose(1, 2).to(v.dtype), lengths)
    return outputs, state if output_final_state else None


class GatedDeltaRuleOp:
    """Calls one of the rules by its mode."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, mode: str = "auto", **options: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """(outputs, final state or None) of one of the rules; `options` are its other arguments.

        mode "chunk": chunk_gated_delta_rule; "recurrent": fused_recurrent_gated_delta_rule, or with
        initial_state_source fused_recurrent_gated_delta_rule_update; "sigmoid": fused_sigmoid_gating_delta_rule_update,
        which does not read g and beta; "auto": what get_recommended_mode returns, with has_gate_params if A_log is
        among the options. Raises ValueError for another mode, and the rule's errors.
        """
        if mode == "auto":
            mode = GatedDeltaRuleOp.get_recommended_mode(q.shape[1], "A_log" in options)
        if mode == "sigmoid":
            return slot_rules.fused_sigmoid_gating_delta_rule_update(q=q, k=k, v=v, **options), None
        if mode not in ("chunk", "recurrent"):
            raise ValueError(f"GatedDeltaRuleOp: mode must be auto, chunk, recurrent or sigmoid, got {mode!r}")
        if g is None or beta is None:
            raise ValueError(f"GatedDeltaRuleOp: mode {mode} needs g and beta")
        if mode == "chunk":
            return chunk_gated_delta_rule(q, k, v, g, beta, **options)
        if "initial_state_source" in options:
            return slot_rules.fused_recurrent_gated_delta_rule_update(q, k, v, g, beta, **options), None
        return fused_recurrent_gated_delta_rule(q, k, v, g, beta, **options)

    @staticmethod
    def get_recommended_mode(seq_len: int, has_gate_params: bool = False) -> str:
        """ "chunk" for more than 128 tokens, "sigmoid" for one with gate parameters, else "recurrent".

        Raises ValueError unless seq_len is at least 1.
        """
        check_range("get_recommended_mode: seq_len", seq_len, 1)
        if seq_len > CHUNK_ABOVE:
            return "chunk"
        return "sigmoid" if seq_len == 1 and has_gate_params else "recurrent"
