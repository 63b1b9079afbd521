"""A gated delta net's part in the forward of a serving engine: convolution and rule over slots of pools.

Arguments are the same as in SGLang's backend of this name, with the pools as further arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.gdn.convolution import causal_conv1d_fn, causal_conv1d_update, chain_parents
from eagle_triton.gdn.gating import fused_gdn_gating
from eagle_triton.gdn.layer import default_device
from eagle_triton.gdn.operations import operations_for
from eagle_triton.gdn.packing import split_heads
from eagle_triton.gdn.rules import chunk_gated_delta_rule
from eagle_triton.gdn.slot_rules import fused_recurrent_gated_delta_rule_update, fused_sigmoid_gating_delta_rule_update
from eagle_triton.gdn.slots import check_slots, put, take, take_continued, without_padding
from eagle_triton.gdn.tree import ancestor_mask
from eagle_triton.operands.ancestors import pack_ancestors


class GDNAttnBackend:
    """Common arguments: mixed_qkv [T, C], all q, all k, all v of T tokens before the convolution, C = 2 H K + HV V;
    conv_weights [C, W], bias [C] or None, activation "silu" or None; key_dim = H K, value_dim = HV V of all ranks,
    attention_tp_size ranks; a, b [T, HV]; A_log, dt_bias [HV]; conv_state [slots, C, W - 1]; ssm_state [slots, HV, K,
    V] float32; cache_indices [N] int32: the sequences' slots, below 0 for padding; query_start_loc [N + 1]: their first
    tokens, and the end. Outputs are [1, T, HV, V], zeros for padding. Raises ValueError if arguments do not fit.

    device: of the tensors; None: a GPU if there is one.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = default_device(device)

    @torch.no_grad()
    def forward_decode(
        self,
        mixed_qkv: Tensor,
        conv_weights: Tensor,
        bias: Tensor | None,
        activation: str | None,
        key_dim: int,
        value_dim: int,
        attention_tp_size: int,
        head_k_dim: int,
        head_v_dim: int,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        conv_state: Tensor,
        ssm_state: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        use_qk_l2norm: bool = True,
    ) -> Tensor:
        """One token of each sequence, T = N; both pools move on in place."""
        layer = _Layer(key_dim // attention_tp_size, head_k_dim, head_v_dim, A_log, dt_bias, use_qk_l2norm)
        layer.check("forward_decode", mixed_qkv, a, b, conv_state, ssm_state, cache_indices)
        if len(mixed_qkv) != len(cache_indices):
            raise ValueError(f"forward_decode: mixed_qkv must have {len(cache_indices)} tokens, got {len(mixed_qkv)}")
        mixed = causal_conv1d_update(
            mixed_qkv, conv_state, conv_weights, bias, activation, conv_state_indices=cache_indices
        )
        q, k, v = layer.heads(mixed[None])
        return fused_sigmoid_gating_delta_rule_update(
            A_log, a, dt_bias, q=q, k=k, v=v, b=b, initial_state_source=ssm_state, initial_state_indices=cache_indices,
            use_qk_l2norm_in_kernel=use_qk_l2norm, cu_seqlens=query_start_loc,
        )  # fmt: skip

    @torch.no_grad()
    def forward_extend(
        self,
        mixed_qkv: Tensor,
        conv_weights: Tensor,
        bias: Tensor | None,
        activation: str | None,
        key_dim: int,
        value_dim: int,
        attention_tp_size: int,
        head_k_dim: int,
        head_v_dim: int,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        conv_state: Tensor,
        ssm_state: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        seq_len: int,
        has_initial_state: Tensor | None = None,
        seq_lens_cpu: Sequence[int] | None = None,
        use_qk_l2norm: bool = True,
        is_target_verify: bool = False,
        intermediate_state_cache: Tensor | None = None,
        intermediate_conv_window_cache: Tensor | None = None,
        retrieve_next_token: Tensor | None = None,
        retrieve_next_sibling: Tensor | None = None,
        retrieve_parent_token: Tensor | None = None,
        draft_token_num: int | None = None,
    ) -> Tensor:
        """Prompts, or parts of them: both pools move on in place. Or the trees of a verification: the pools stay.

        seq_len: T. has_initial_state [N] bool: the sequences that continue from their slots (None: none); the others
        begin anew.

        With is_target_verify each sequence has draft_token_num tokens: a tree, given by retrieve_next_token and
        retrieve_next_sibling or by retrieve_parent_token, each [N, draft_token_num] (see `causal_conv1d_update`), else
        a chain. intermediate_conv_window_cache [slots, draft_token_num, C, W - 1] and intermediate_state_cache [slots,
        draft_token_num, HV, K, V] get the window and state after each node; the caller copies the accepted node's into
        the pools. Without intermediate_state_cache, and with normed q and k, the engine's `delta_tree` runs, which
        needs no states of nodes.
        """
        name, slots = "forward_extend", cache_indices
        layer = _Layer(key_dim // attention_tp_size, head_k_dim, head_v_dim, A_log, dt_bias, use_qk_l2norm)
        layer.check(name, mixed_qkv, a, b, conv_state, ssm_state, slots)
        if seq_len != len(mixed_qkv):
            raise ValueError(f"{name}: seq_len must be {len(mixed_qkv)}, the number of tokens, got {seq_len}")
        if not is_target_verify:
            mixed = causal_conv1d_fn(
                mixed_qkv.T, conv_weights, bias, conv_state, query_start_loc, seq_lens_cpu, slots, has_initial_state,
                activation,
            ).T[None]  # fmt: skip
            states = take_continued(ssm_state, slots, has_initial_state)
            out, states = _prompts(layer, mixed, a[None], b[None], states, query_start_loc)
            put(ssm_state, slots, states)
            lengths = query_start_loc.diff()
            return out.masked_fill((slots < 0).repeat_interleave(lengths)[None, :, None, None], 0.0)

        if not draft_token_num or seq_len != draft_token_num * len(slots):
            raise ValueError(
                f"{name}: each of {len(slots)} sequences must have draft_token_num tokens, got {draft_token_num} and "
                f"{seq_len} in all"
            )
        if intermediate_state_cache is not None:
            shape = (draft_token_num, *ssm_state.shape[1:])
            check_slots(name, "intermediate_state_cache", intermediate_state_cache, slots, shape, len(slots))
        rows, a, b = (x.unflatten(0, (len(slots), draft_token_num)) for x in (mixed_qkv, a, b))
        parents = retrieve_parent_token
        if parents is None:  # for a tree, the convolution finds them
            parents = chain_parents(rows) if retrieve_next_token is None else slots.new_empty(rows.shape[:2])
        mixed = causal_conv1d_update(
            rows.mT, conv_state, conv_weights, bias, activation, slots, intermediate_conv_window_cache,
            retrieve_next_token, retrieve_next_sibling, parents,
        ).mT.contiguous()  # fmt: skip
        return _trees(layer, mixed, a, b, ssm_state, slots, parents, intermediate_state_cache).flatten(0, 1)[None]


class _Layer(NamedTuple):
    """The sizes and parameters of a layer, for the rule."""

    key_channels: int  # H K
    key_dim: int  # K
    value_dim: int  # V
    A_log: Tensor  # [HV]
    dt_bias: Tensor  # [HV]
    l2norm: bool

    def heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [B, T, H, K], v [B, T, HV, V] from mixed [B, T, C]."""
        return split_heads(mixed, self.key_channels // self.key_dim, self.key_dim, self.value_dim)

    def by_key_head(self, gate: Tensor) -> Tensor:
        """A gate [B, T, HV] in the form of the engine's operations: [B, T, H, R]."""
        return gate.unflatten(-1, (self.key_channels // self.key_dim, -1))

    def check(
        self, name: str, mixed: Tensor, a: Tensor, b: Tensor, conv_state: Tensor, ssm_state: Tensor, slots: Tensor
    ) -> None:
        """Raise ValueError unless mixed is [T, C], a and b are [T, HV], and the pools hold this layer's states."""
        value_heads = len(self.A_log)
        channels = 2 * self.key_channels + value_heads * self.value_dim
        if mixed.dim() != 2 or mixed.shape[1] != channels or not a.shape == b.shape == (len(mixed), value_heads):
            raise ValueError(
                f"{name}: mixed_qkv must be [T, {channels}], a and b [T, {value_heads}], got {list(mixed.shape)}, "
                f"{list(a.shape)} and {list(b.shape)}"
            )
        if len(conv_state) != len(ssm_state) or ssm_state.dtype != torch.float32:
            raise ValueError(
                f"{name}: conv_state and ssm_state must have the same number of slots, and ssm_state be float32, got "
                f"{len(conv_state)}, {len(ssm_state)} and {ssm_state.dtype}"
            )
        check_slots(name, "ssm_state", ssm_state, slots, (value_heads, self.key_dim, self.value_dim), len(slots))


def _prompts(
    layer: _Layer, mixed: Tensor, a: Tensor, b: Tensor, states: Tensor, query_start_loc: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [1, T, HV, V] of the sequences in mixed [1, T, C], and their states [N, HV, K, V] after them."""
    if not layer.l2norm:
        g, beta = fused_gdn_gating(layer.A_log, a, b, layer.dt_bias)
        out, after = chunk_gated_delta_rule(*layer.heads(mixed), g, beta, None, states, True, query_start_loc)
        assert after is not None, "it was asked for"
        return out, after
    lengths = query_start_loc.diff().tolist()
    parts = (x.split(lengths, dim=1) for x in (mixed, layer.by_key_head(a), layer.by_key_head(b)))
    outputs = [
        operations_for(mixed).delta_chunk(row, a, b, layer.A_log, layer.dt_bias, states[index : index + 1])
        for index, (row, a, b) in enumerate(zip(*parts, strict=True))
        if row.shape[1]
    ]
    return torch.cat(outputs, dim=1), states


def _trees(
    layer: _Layer,
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    pool: Tensor,
    slots: Tensor,
    parents: Tensor,
    node_states: Tensor | None,
) -> Tensor:
    """Outputs [N, n, HV, V] of the nodes in mixed [N, n, C], each after its slot's state and its ancestors."""
    if layer.l2norm and node_states is None:
        ancestors, deepest = pack_ancestors(ancestor_mask(parents)), parents.shape[1] - 1
        a, b = layer.by_key_head(a), layer.by_key_head(b)
        out = operations_for(mixed).delta_tree(
            mixed, a, b, layer.A_log, layer.dt_bias, take(pool, slots), ancestors, deepest
        )
        return without_padding(out, slots)
    g, beta = fused_gdn_gating(layer.A_log, a, b, layer.dt_bias)
    outputs = fused_recurrent_gated_delta_rule_update(
        *layer.heads(mixed), g, beta, pool, slots, use_qk_l2norm_in_kernel=layer.l2norm, disable_state_update=True,
        intermediate_states_buffer=node_states, retrieve_parent_token=parents,
    )  # fmt: skip
    assert outputs is not None, "they were asked for"
    return outputs
