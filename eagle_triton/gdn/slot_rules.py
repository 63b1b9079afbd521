"""The gated delta rule (arXiv 2412.06464) over sequences with states in slots of a pool."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.gdn.gating import fused_gdn_gating
from eagle_triton.gdn.operand_checks import check_gates, check_heads, check_operands
from eagle_triton.gdn.operations import operations_for
from eagle_triton.gdn.packing import packed, padded, sequence_lengths
from eagle_triton.gdn.slots import check_slots, put, take, without_padding
from eagle_triton.gdn.torch_rule import along_tree, by_head, one_by_one

GATE_SHUT = -200.0  # a and b of padding: exactly no decay and no update


def fused_recurrent_gated_delta_rule_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    disable_state_update: bool = False,
    disable_output_calculation: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor | None:
    """Token by token, with states in a pool, which is written in place; or, with parents, each token after its parent.

    q, k, v, g, beta, cu_seqlens, scale and use_qk_l2norm_in_kernel as in `chunk_gated_delta_rule`; N sequences.
    initial_state_source [slots, HV, K, V] float32; initial_state_indices [N] int32: the sequences' slots, below 0 for
    padding, which gives zeros. disable_state_update: do not change the pool. intermediate_states_buffer [slots,
    cache_steps, HV, K, V] gets the states after all tokens, at the sequences' slots. retrieve_parent_token [N, T]:
    local index of each token's parent, lower than its own, below 0 for a root; it needs disable_state_update, because a
    tree has no last state. Returns the outputs [B, T, HV, V]; None with disable_output_calculation. It runs in plain
    torch; the engine's `delta_tree` does the same without the states of nodes. Raises ValueError before anything is
    written if arguments do not fit.
    """
    name = "fused_recurrent_gated_delta_rule_update"
    check_operands(name, q, k, v, g, beta)
    lengths = sequence_lengths(name, cu_seqlens, q)
    count, longest = (len(q), q.shape[1]) if lengths is None else (len(lengths), max(lengths))
    state_shape = (v.shape[2], k.shape[3], v.shape[3])
    _check_pool(name, initial_state_source, initial_state_indices, state_shape, count)
    if intermediate_states_buffer is not None:
        steps = intermediate_states_buffer.shape[1] if cache_steps is None else cache_steps
        shape = (steps, *state_shape)
        check_slots(name, "intermediate_states_buffer", intermediate_states_buffer, initial_state_indices, shape, count)
        if steps < longest:
            raise ValueError(f"{name}: cache_steps must be at least {longest}, the tokens of a sequence, got {steps}")
    if retrieve_parent_token is not None:
        if not disable_state_update:
            raise ValueError(f"{name}: retrieve_parent_token needs disable_state_update: a tree has no last state")
        _check_parents(name, retrieve_parent_token, count, longest)

    parts = (padded(part, lengths) for part in (q, k, v, g, beta))
    x = by_head(*parts, scale=scale, l2norm=use_qk_l2norm_in_kernel)
    state = take(initial_state_source, initial_state_indices)
    if retrieve_parent_token is None and intermediate_states_buffer is None:
        outputs, state = one_by_one(x, state)
    else:
        token = torch.arange(longest, device=q.device).expand(count, -1)
        outputs, states = along_tree(x, state, token - 1 if retrieve_parent_token is None else retrieve_parent_token)
        state = states[:, -1]
        if intermediate_states_buffer is not None:
            put(intermediate_states_buffer[:, :longest], initial_state_indices, states)
    if not disable_state_update:
        put(initial_state_source, initial_state_indices, state)
    if disable_output_calculation:
        return None
    outputs = without_padding(outputs.transpose(1, 2).to(v.dtype), initial_state_indices)
    return packed(outputs, lengths)


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Gating and rule in one, token by token, with states in a pool, which is written in place: for decoding.

    A_log, dt_bias [HV]; a, b [B, T, HV] (or [T, HV] if B = 1), see `fused_gdn_gating`; the rest as in
    `fused_recurrent_gated_delta_rule_update`. Returns the outputs [B, T, HV, V]. The engine's `delta_recurrent`
    computes them if q and k are normed, a and b have their dtype, and scale and softplus are the models'; otherwise
    plain torch does. Raises ValueError before anything is written if arguments do not fit.
    """
    name = "fused_sigmoid_gating_delta_rule_update"
    check_heads(name, q, k, v)
    a, b = (gate[None] if gate.dim() == 2 else gate for gate in (a, b))
    check_gates(name, v, a=a, b=b)
    lengths = sequence_lengths(name, cu_seqlens, q)
    count = len(q) if lengths is None else len(lengths)
    _check_pool(name, initial_state_source, initial_state_indices, (v.shape[2], k.shape[3], v.shape[3]), count)
    usual = scale in (None, q.shape[3] ** -0.5) and (softplus_beta, softplus_threshold) == (1.0, 20.0)
    state = take(initial_state_source, initial_state_indices)
    if use_qk_l2norm_in_kernel and usual and a.dtype == b.dtype == q.dtype:
        mixed = padded(torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1), lengths)
        a, b = (padded(gate, lengths, GATE_SHUT).unflatten(-1, (q.shape[2], -1)) for gate in (a, b))
        outputs = operations_for(q).delta_recurrent(mixed, a, b, A_log, dt_bias, state)
    else:
        g, beta = fused_gdn_gating(A_log, a, b, dt_bias, softplus_beta, softplus_threshold)
        parts = (padded(part, lengths) for part in (q, k, v, g, beta))
        outputs, state = one_by_one(by_head(*parts, scale=scale, l2norm=use_qk_l2norm_in_kernel), state)
        outputs = outputs.transpose(1, 2).to(v.dtype)
    put(initial_state_source, initial_state_indices, state)
    return packed(without_padding(outputs, initial_state_indices), lengths)


def _check_pool(name: str, pool: Tensor, slots: Tensor, shape: tuple[int, ...], count: int) -> None:
    check_slots(name, "initial_state_source", pool, slots, shape, count)
    if pool.dtype != torch.float32:
        raise ValueError(f"{name}: initial_state_source must be float32, as states are, got {pool.dtype}")


def _check_parents(name: str, parents: Tensor, count: int, longest: int) -> None:
    below = torch.arange(longest, device=parents.device)
    if tuple(parents.shape) != (count, longest) or bool((parents >= below).any()):
        raise ValueError(
            f"{name}: retrieve_parent_token must be [{count}, {longest}], each below its token's own index, got "
            f"{parents.tolist()}"
        )
