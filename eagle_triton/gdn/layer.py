"""The gated delta net of Qwen3-Next as a module: Gated Delta Networks (Yang et al., arXiv 2412.06464)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eagle_triton.engine.model.gated_delta import DeltaMemory, GatedDelta, GatedDeltaCache
from eagle_triton.engine.model.mixers import NewRows
from eagle_triton.engine.model.modules import Norm, Projection
from eagle_triton.engine.operations import make_operations
from eagle_triton.gdn.gating import fused_gdn_gating
from eagle_triton.gdn.norm import RMSNormGated
from eagle_triton.gdn.operations import operations_for
from eagle_triton.gdn.packing import sequence_lengths, split_heads
from eagle_triton.gdn.rules import CHUNK_ABOVE, chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from eagle_triton.runtime.split_sums import total_of
from eagle_triton.values import check_choice, check_range

MODES = ("auto", "chunk", "recurrent", "fused_decode")


def select_mode(seq_len: int) -> str:
    """The way to read tokens: 1 by "fused_decode", up to 128 by "recurrent", more by "chunk". ValueError below 1."""
    check_range("select_mode: seq_len", seq_len, 1)
    if seq_len > CHUNK_ABOVE:
        return "chunk"
    return "recurrent" if seq_len > 1 else "fused_decode"


class Qwen3GatedDeltaNet(nn.Module):
    """H key heads of K, HV = H * R value heads of V; parameters have the names and layouts of Qwen3-Next's checkpoints.

    in_proj_qkvz [2 H K + 2 HV V, hidden]: by key head q (K), k (K), v (R V), z (R V); in_proj_ba [2 HV, hidden]: by key
    head b (R), a (R); conv1d [C, 1, W], C = 2 H K + HV V, with SiLU; A_log, dt_bias [HV] float32; norm [V], gated by
    SiLU of z; out_proj [hidden, HV V]. States are float32 [.., HV, K, V]. device None: a GPU if there is one.
    use_triton_conv1d=False: compute the convolution in torch, on a GPU too. For inference: no gradients. Raises
    ValueError unless num_v_heads is a multiple of num_k_heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        conv_kernel_size: int = 4,
        rms_norm_eps: float = 1e-6,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        use_triton_conv1d: bool = True,
    ) -> None:
        if num_k_heads < 1 or num_v_heads < 1 or num_v_heads % num_k_heads:
            raise ValueError(
                f"Qwen3GatedDeltaNet: num_v_heads must be a multiple of num_k_heads, got {num_v_heads} and "
                f"{num_k_heads}"
            )
        super().__init__()
        self.hidden_size, self.num_k_heads, self.num_v_heads = hidden_size, num_k_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.use_triton_conv1d, self.activation = use_triton_conv1d, "silu"
        device = default_device(device)
        keys, values = num_k_heads * head_k_dim, num_v_heads * head_v_dim
        channels = 2 * keys + values
        self.in_proj_qkvz = nn.Linear(hidden_size, channels + values, bias=False, dtype=dtype, device=device)
        self.in_proj_ba = nn.Linear(hidden_size, 2 * num_v_heads, bias=False, dtype=dtype, device=device)
        self.conv1d = nn.Conv1d(
            channels, channels, conv_kernel_size, groups=channels, padding=conv_kernel_size - 1, bias=False,
            dtype=dtype, device=device,
        )  # fmt: skip
        self.A_log = nn.Parameter(torch.empty(num_v_heads, dtype=torch.float32, device=device).uniform_(1, 16).log_())
        self.dt_bias = nn.Parameter(torch.ones(num_v_heads, dtype=torch.float32, device=device))
        self.norm = RMSNormGated(head_v_dim, rms_norm_eps, dtype=dtype, device=device)
        self.out_proj = nn.Linear(values, hidden_size, bias=False, dtype=dtype, device=device)

    @torch.no_grad()
    def forward(
        self,
        hidden_states: Tensor,
        mode: str = "auto",
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        use_qk_l2norm: bool = True,
        *,
        conv_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [B, T, hidden] -> (the same shape, final states [N, HV, K, V] float32 or None).

        mode: "chunk", "recurrent", "fused_decode" (T = 1), or "auto": what `select_mode` returns. All compute the same.
        initial_state [N, HV, K, V]: does not change; None: zeros. cu_seqlens [N + 1]: N sequences one after the other
        in one row; None: N = B. conv_state [N, C, W - 1]: the inputs of the convolution before the first token, moved
        on in place; a sequence that continues needs it beside its state; None: zeros. use_qk_l2norm=False: do not norm
        q and k, in plain torch. Raises ValueError if arguments do not fit.
        """
        name = "Qwen3GatedDeltaNet"
        if hidden_states.dim() != 3 or hidden_states.shape[2] != self.hidden_size or not hidden_states.shape[1]:
            raise ValueError(
                f"{name}: hidden_states must be [B, T, {self.hidden_size}], T at least 1, got "
                f"{list(hidden_states.shape)}"
            )
        lengths = sequence_lengths(name, cu_seqlens, hidden_states)
        for length in set(lengths or [hidden_states.shape[1]]) - {0}:
            checked_mode(mode, length)
        count = len(hidden_states) if lengths is None else len(lengths)
        cache = self.new_cache(count)
        for label, given, own in (
            ("initial_state", initial_state, cache.states[0]),
            ("conv_state", conv_state, cache.windows[0].mT),
        ):
            if given is not None and given.shape != own.shape:
                raise ValueError(f"{name}: {label} must be {list(own.shape)}, got {list(given.shape)}")
            if given is not None:
                own.copy_(given)
        if lengths is None:
            out = self.read(hidden_states, cache.layer(0), mode, use_qk_l2norm)
        else:
            parts = [
                self.read(part, cache.part(slice(index, index + 1)).layer(0), mode, use_qk_l2norm)
                for index, part in enumerate(hidden_states.split(lengths, dim=1))
                if part.shape[1]
            ]
            out = torch.cat(parts, dim=1)
        if conv_state is not None:
            conv_state.copy_(cache.windows[0].mT)
        return out, cache.states[0] if output_final_state else None

    @torch.no_grad()
    def read(self, hidden_states: Tensor, memory: DeltaMemory, mode: str = "auto", l2norm: bool = True) -> Tensor:
        """Tokens that follow each other: [B, T, hidden] -> [B, T, hidden]. `memory` moves on in place."""
        mode, ops = checked_mode(mode, hidden_states.shape[1]), operations_for(hidden_states)
        q, k, v, z, b, a = self.mixer.products(ops, hidden_states)
        convolution = ops if self.use_triton_conv1d else make_operations()
        mixed = convolution.causal_conv(q, k, v, self.conv1d.weight[:, 0], memory.window)
        if l2norm:
            rule = ops.delta_chunk if mode == "chunk" else ops.delta_recurrent
            out = rule(mixed, a, b, self.A_log, self.dt_bias, memory.state)
        else:
            out = self._unnormed(mixed, a, b, memory, mode)
        return total_of(ops.linear(ops.gated_norm(out, z, self.norm.weight, self.norm.eps), self.out_proj.weight))

    @torch.no_grad()
    def read_tree(self, hidden_states: Tensor, memory: DeltaMemory, ancestors: Tensor, depth: int) -> Tensor:
        """Nodes of trees after `memory`, which does not change: [B, n, hidden] -> [B, n, hidden], n at most 64.

        ancestors [B, n, 1] int64: bit j of row i means that node j is i or an ancestor of i; no node is more than
        `depth` below the root. memory.pending gets the data for a commit of nodes.
        """
        nowhere = torch.zeros(len(hidden_states), dtype=torch.int32, device=hidden_states.device)
        rows = NewRows(nowhere, nowhere, None, ancestors, depth=depth)  # a state has no positions
        return total_of(self.mixer.forward(operations_for(hidden_states), hidden_states, memory, rows))

    @property
    def mixer(self) -> GatedDelta:
        """This layer for the engine, with the same parameters."""
        return GatedDelta(
            inputs=(Projection(self.in_proj_qkvz.weight), Projection(self.in_proj_ba.weight)),
            conv=self.conv1d.weight[:, 0],
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            norm=Norm(self.norm.weight, self.norm.eps),
            o=Projection(self.out_proj.weight),
            num_k_heads=self.num_k_heads,
            num_v_heads=self.num_v_heads,
            k_dim=self.head_k_dim,
            v_dim=self.head_v_dim,
        )

    def new_cache(self, count: int) -> GatedDeltaCache:
        """Empty states and windows of `count` sequences."""
        weight = self.in_proj_qkvz.weight
        return self.mixer.new_cache(1, count, None, weight.dtype, weight.device)

    def _unnormed(self, mixed: Tensor, a: Tensor, b: Tensor, memory: DeltaMemory, mode: str) -> Tensor:
        """The rule over q and k without norms; the engine's operations norm them."""
        q, k, v = split_heads(mixed, self.num_k_heads, self.head_k_dim, self.head_v_dim)
        g, beta = fused_gdn_gating(self.A_log, a.flatten(2), b.flatten(2), self.dt_bias)
        rule = chunk_gated_delta_rule if mode == "chunk" else fused_recurrent_gated_delta_rule
        out, state = rule(q, k, v, g, beta, initial_state=memory.state, output_final_state=True)
        assert state is not None, "it was asked for"
        memory.state.copy_(state)
        return out


def checked_mode(mode: str, seq_len: int) -> str:
    """The mode for seq_len tokens, with "auto" resolved. Raises ValueError for a mode that cannot read them."""
    check_choice("mode", mode, MODES)
    if mode == "fused_decode" and seq_len != 1:
        raise ValueError(f"mode fused_decode reads one token, got {seq_len}")
    return select_mode(seq_len) if mode == "auto" else mode


def default_device(device: torch.device | str | None) -> torch.device:
    """The given device; None: a GPU if there is one."""
    return torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
