"""The gated delta rule in plain torch, for arguments that the engine's operations do not support.

They compute gates and norms themselves. Here g and beta are given, q may have any scale and keys any length, and the
states after single tokens may be wanted. A token with g = beta = 0 does not change a state, so padding changes nothing.
Everything is fp32, but for the sums of g. Formulas: reference/gated_delta.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64


class Heads(NamedTuple):
    """Tokens by value head, all float32."""

    q: Tensor  # [B, HV, T, K], scaled
    k: Tensor  # [B, HV, T, K]
    v: Tensor  # [B, HV, T, V]
    g: Tensor  # [B, HV, T]
    beta: Tensor  # [B, HV, T]

    def tokens(self, part: slice) -> Heads:
        return Heads(*(x[:, :, part] for x in self))


def by_head(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float | None, l2norm: bool) -> Heads:
    """q, k [B, T, H, K], v [B, T, HV, V], g and beta [B, T, HV]; scale None: 1 / sqrt(K); l2norm: of q and k."""
    q, k, v, g, beta = (x.transpose(1, 2).float() for x in (q, k, v, g, beta))
    if l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    shared = v.shape[1] // q.shape[1]
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    return Heads(q.repeat_interleave(shared, 1), k.repeat_interleave(shared, 1), v, g, beta)


def one_by_one(x: Heads, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [B, HV, T, V], and the state [B, HV, K, V] after the last token."""
    outputs = []
    for token in range(x.q.shape[2]):
        state = _taken_in(x, token, state)
        outputs.append(_answer(x, token, state))
    return torch.stack(outputs, dim=2), state


def by_chunks(x: Heads, state: Tensor) -> tuple[Tensor, Tensor]:
    """`one_by_one` by chunks of 64 tokens: one triangular system for all updates of a chunk."""
    outputs = []
    for first in range(0, x.q.shape[2], CHUNK):
        q, k, v, g, beta = x.tokens(slice(first, first + CHUNK))
        total = g.double().cumsum(-1)
        before = torch.ones(2 * total.shape[-1:], dtype=torch.bool, device=q.device).tril()
        between = torch.where(before, total[..., :, None] - total[..., None, :], 0.0).exp().float() * before
        since_state, decay_to_end = total.exp().float()[..., None], (total[..., -1:] - total).exp().float()[..., None]
        right = beta[..., None] * (v - since_state * (k @ state))
        system = beta[..., None] * (k @ k.mT) * between
        update = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        outputs.append(since_state * (q @ state) + ((q @ k.mT) * between) @ update)
        state = since_state[..., -1:, :] * state + (k * decay_to_end).mT @ update
    return torch.cat(outputs, dim=2), state


def along_tree(x: Heads, state: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Each token after its parent's state. parents [B, T]: below 0 for `state`.

    Returns the outputs, and the states after all tokens [B, T, HV, K, V].
    """
    rows, outputs = torch.arange(len(state), device=state.device), []
    states = torch.stack([state] * (1 + x.q.shape[2]), dim=1)
    for token in range(x.q.shape[2]):
        before = states[rows, parents[:, token].long().clamp(min=-1) + 1]
        states[:, token + 1] = _taken_in(x, token, before)
        outputs.append(_answer(x, token, states[:, token + 1]))
    return torch.stack(outputs, dim=2), states[:, 1:]


def _taken_in(x: Heads, token: int, state: Tensor) -> Tensor:
    k, v, beta = x.k[:, :, token], x.v[:, :, token], x.beta[:, :, token, None]
    state = state * x.g[:, :, token].exp()[..., None, None]
    update = beta * (v - (state * k[..., None]).sum(-2))
    return state + k[..., None] * update[..., None, :]


def _answer(x: Heads, token: int, state: Tensor) -> Tensor:
    return (x.q[:, :, token, None] @ state)[:, :, 0]
