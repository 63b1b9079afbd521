"""Gated delta rule (Yang et al., arXiv 2412.06464) and Mamba-2: a layer's memory of a sequence is one matrix per head.

A token with key k, value v, decay exp(g) and strength beta updates a head's state S [K, V] and gives the output o for
its query q:

    S <- exp(g) S;   S <- S + k (beta (v - S' k))';   o = S' q

k and q are l2-normed, q is divided by sqrt(K). H key heads serve HV = H * R value heads, each R neighbours.

The outputs of a tree of tokens after one state need no state for each node (STree, arXiv 2505.14969, does this for
Mamba 2; TreeWY, arXiv 2608.20961, for the delta rule). With anc the pairs (i, j) where j is i or an ancestor of i, G =
anc g and D_ij = exp(G_i - G_j) on anc, 0 elsewhere, the updates beta (v - S' k) of all nodes solve one triangular
system:

    (I + A) d = beta (v - e^G k S),   A_ij = beta_i (k_i k_j) D_ij for strict ancestors j
    o = e^G q S + ((q k') * D) d

Then `commit_states` updates the states by the accepted path, token by token. So every bit of the states depends on the
committed tokens only.

Without b an operation computes the layer of Mamba-2 (Dao and Gu, arXiv 2405.21060). It has no delta rule:

    S <- exp(-exp(A_log) dt) S + dt k v';   o = S' q + skip v,   dt = softplus(a + dt_bias) within dt_limit

Its names for q, k, v, a and skip are C, B, x, dt and D. q and k are taken as they are, `mixed` has first all v, then
all k, then all q, and beta is dt.

| name      | shape, dtype             | meaning                                                               |
|---|---|---|
| q, k      | [B, n, H, K]             | products, any strides but a contiguous last dimension                 |
| v, z      | [B, n, H, R V]           | likewise; z gates the output                                          |
| a, b      | [B, n, H, R]             | products, any strides                                                 |
| mixed     | [B, n, C], model's dtype | outputs of the convolution: all q, all k, all v; C = 2 H K + HV V     |
| window    | [B, W - 1, C] as mixed   | inputs of the convolution for the last W - 1 tokens                   |
| state     | [B, HV, K, V] fp32       |                                                                       |
| ancestors | [B, n, 1] int64          | bit j of row i: node j is i or an ancestor of i, so j <= i            |
| gates     | [B, n, 2, HV] fp32       | g and beta of each node                                               |

Rounding is the same as in Hugging Face's models in torch: the convolution and its SiLU to the model's dtype, beta to
the dtype of b, outputs to the model's dtype. Everything else is fp32, except the sums of g, which are fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from eagle_triton.operands import gated_delta as operands
from eagle_triton.operands.gated_delta import MAX_NODES, PromptPieces


def causal_conv(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    weight: Tensor,
    window: Tensor,
    ancestors: Tensor | None = None,
    *,
    active: Tensor | None = None,
    bias: Tensor | None = None,
    raw: Tensor | None = None,
    out: Tensor | None = None,
    pieces: PromptPieces | None = None,
) -> Tensor:
    """silu(sum over taps of weight [C, W] times the token and its W - 1 predecessors, + bias [C]), channel by channel.

    Without k and v all channels are in q. A node's predecessors are its ancestors; the root's are in `window`, the
    newest last. Without `ancestors` the tokens are consecutive, and the window is updated in place; with `active` [B]
    bool only those of active sequences are. raw [B, n, C]: gets q, k and v. Returns mixed [B, n, C], in `out` if given.
    pieces: the B rows are pieces of prompts in some slots, and `window` [slots, W - 1, C] has all slots; then
    ancestors, active, raw and out must be None. Raises ValueError if shapes, dtypes or devices do not fit.
    """
    operands.check_causal_conv(q, k, v, weight, window, ancestors, active, bias, raw, out, pieces)
    rows = torch.cat([part.flatten(2) for part in (q, k, v) if part is not None], dim=-1)
    if pieces is not None:
        mixed = torch.zeros_like(rows)

        def read(rows: Tensor, mine: Tensor) -> Tensor:
            return functional.silu(_convolved(rows, weight, mine, bias=bias))

        return _by_sequence(pieces, mixed, window, (rows,), read)
    mixed = functional.silu(_convolved(rows, weight, window, ancestors, bias, active))
    if raw is not None:
        raw.copy_(rows)
    return mixed if out is None else out.copy_(mixed)


def gated_conv(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    ancestors: Tensor | None = None,
    *,
    active: Tensor | None = None,
    raw: Tensor | None = None,
    pieces: PromptPieces | None = None,
) -> Tensor:
    """c * convolution of (b * x): the short convolution of LFM2, with rows x [B, n, 3 C] of b, c and x.

    The convolution is that of `causal_conv`, without SiLU, with weight [C, W] and window [B, W - 1, C] of b * x, which
    raw [B, n, C] gets, too. ancestors, active, pieces: as there. Returns [B, n, C]. Raises ValueError if arguments do
    not fit.
    """
    operands.check_gated_conv(x, weight, window, ancestors, active, raw, pieces)
    if pieces is not None:
        out = torch.zeros(*x.shape[:2], len(weight), dtype=x.dtype, device=x.device)
        return _by_sequence(pieces, out, window, (x,), lambda x, mine: gated_conv(x, weight, mine))
    b, c, x = x.chunk(3, dim=-1)
    rows = b * x
    if raw is not None:
        raw.copy_(rows)
    return c * _convolved(rows, weight, window, ancestors, active=active)


def _convolved(
    rows: Tensor,
    weight: Tensor,
    window: Tensor,
    ancestors: Tensor | None = None,
    bias: Tensor | None = None,
    active: Tensor | None = None,
) -> Tensor:
    """The sum over taps, in the dtype of rows [B, n, C]. Without ancestors the windows of active sequences are updated
    in place."""
    batch, count, channels = rows.shape
    taps, kept = weight.shape[1], window.shape[1]
    known = torch.cat((window, rows), dim=1)
    place = kept + torch.arange(count, device=rows.device).expand(batch, -1)
    total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    places = [place]
    for _ in range(taps - 1):
        places.append(_before(places[-1], ancestors, kept))
    for tap, place in enumerate(reversed(places)):
        row = known.gather(1, place.clamp(min=0)[..., None].expand(-1, -1, channels)).float()
        total += weight[:, tap].float() * row
    if bias is not None:
        total += bias.float()
    if ancestors is None:
        moved = known[:, known.shape[1] - kept :]
        window.copy_(moved if active is None else torch.where(active[:, None, None], moved, window))
    return total.to(rows.dtype)


def delta_tree(
    mixed: Tensor,
    a: Tensor,
    b: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    ancestors: Tensor,
    depth: int,
    *,
    gates: Tensor | None = None,
    skip: Tensor | None = None,
    max_beta: float = 1.0,
) -> Tensor:
    """Outputs [B, n, HV, V] of a tree's nodes, each after `state` and its ancestors. The state does not change.

    n is at most 64; no node is deeper than `depth`; A_log, dt_bias, skip [HV]; `gates` is filled if given; beta is
    between 0 and `max_beta`. Raises ValueError if shapes, dtypes or devices do not fit.
    """
    operands.check_delta("delta_tree", mixed, a, b, A_log, dt_bias, state, skip=skip, max_beta=max_beta)
    operands.check_tree(mixed, state, ancestors, depth, gates)
    q, k, v = _heads(mixed, state, b is not None)
    g, beta = gating(a, b, A_log, dt_bias, max_beta=max_beta)
    count = mixed.shape[1]
    node = torch.arange(count, device=mixed.device)
    seen = ((ancestors[..., 0, None] >> node) & 1).bool()[:, None]  # [B, 1, n, n]
    total = (seen * g.transpose(1, 2)[:, :, None].double()).sum(-1)  # [B, HV, n]
    outputs, _ = _outputs(q, k, v, beta.transpose(1, 2), total, seen, state, b is not None)
    outputs = _with_skip(outputs, v, skip)
    if gates is not None:
        gates.copy_(torch.stack((g, beta), dim=2))
    return outputs.transpose(1, 2).to(mixed.dtype)


def delta_chunk(
    mixed: Tensor,
    a: Tensor,
    b: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    pieces: PromptPieces | None = None,
    *,
    skip: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    limited: Tensor | None = None,
    max_beta: float = 1.0,
) -> Tensor:
    """`delta_recurrent` in chunks of 64 tokens: each chunk is computed as a tree that is a chain, then the state is
    updated.

    pieces: the B rows are pieces of prompts in some slots, and `state` [slots, HV, K, V] has all slots. Each piece is a
    chunk of at most 64 tokens.
    """
    operands.check_delta(
        "delta_chunk", mixed, a, b, A_log, dt_bias, state, pieces, skip, limited=limited, max_beta=max_beta
    )
    if pieces is not None:

        def read(mixed: Tensor, a: Tensor, *others: Tensor) -> Tensor:
            own_b = None if b is None else others[0]
            own = None if limited is None else others[0].sum(1, dtype=torch.int32)  # the first of the sequence's tokens
            options: dict[str, Any] = dict(skip=skip, dt_limit=dt_limit, limited=own, max_beta=max_beta)
            return delta_chunk(mixed, a, own_b, A_log, dt_bias, others[-1], **options)

        out = torch.zeros(*mixed.shape[:2], *state.shape[1::2], dtype=mixed.dtype, device=mixed.device)
        further = [] if b is None else [b]
        if limited is not None:
            further.append((torch.arange(mixed.shape[1], device=mixed.device) < limited[:, None]).int())
        return _by_sequence(pieces, out, state, (mixed, a, *further), read)
    outputs = []
    for first in range(0, mixed.shape[1], MAX_NODES):
        part = slice(first, first + MAX_NODES)
        q, k, v = _heads(mixed[:, part], state, b is not None)
        own_b, own = None if b is None else b[:, part], None if limited is None else limited - first
        g, beta = (gate.transpose(1, 2) for gate in gating(a[:, part], own_b, A_log, dt_bias, dt_limit, own, max_beta))
        total = g.double().cumsum(-1)
        seen = torch.ones(2 * total.shape[-1:], dtype=torch.bool, device=total.device).tril()
        chunk, update = _outputs(q, k, v, beta, total, seen, state, b is not None)
        outputs.append(_with_skip(chunk, v, skip))
        decay_to_end, kept = (total[..., -1:] - total).exp().float(), total[..., -1].exp().float()
        state.copy_(kept[..., None, None] * state + (k * decay_to_end[..., None]).mT @ update)
    return torch.cat(outputs, dim=2).transpose(1, 2).to(mixed.dtype)


def _by_sequence(
    pieces: PromptPieces, out: Tensor, memory: Tensor, rows: tuple[Tensor, ...], function: Callable[..., Tensor]
) -> Tensor:
    """Fill out [P, n, ...] with a function of each sequence's tokens [1, t, ...] and memory; `memory` has all slots."""
    for slot, start, places, counts in pieces.sequences():
        mine = memory[slot : slot + 1]
        if not start:
            mine.zero_()
        tokens = (
            torch.cat([x[place, :count] for place, count in zip(places, counts, strict=True)])[None] for x in rows
        )
        for place, value in zip(places, function(*tokens, mine)[0].split(counts), strict=True):
            out[place, : len(value)] = value
    return out


def delta_recurrent(
    mixed: Tensor,
    a: Tensor,
    b: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *,
    active: Tensor | None = None,
    skip: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    limited: Tensor | None = None,
    max_beta: float = 1.0,
) -> Tensor:
    """Outputs [B, n, HV, V] of consecutive tokens; `state` is updated in place, token by token, with `active` [B] bool
    only that of active sequences.

    A_log, dt_bias, skip [HV]. limited [B] int32: dt_limit is for that many first tokens of each row; None: for all.
    beta is between 0 and `max_beta`. Raises ValueError if shapes, dtypes or devices do not fit.
    """
    operands.check_delta("delta_recurrent", mixed, a, b, A_log, dt_bias, state, None, skip, active, limited, max_beta)
    q, k, v = _heads(mixed, state, b is not None)
    g, beta = gating(a, b, A_log, dt_bias, dt_limit, limited, max_beta)
    outputs, after = [], state
    for token in range(mixed.shape[1]):
        after = _next_state(after, k[:, :, token], v[:, :, token], g[:, token], beta[:, token], b is not None)
        outputs.append((q[:, :, token, None] @ after)[:, :, 0])
    state.copy_(after if active is None else torch.where(active[:, None, None, None], after, state))
    return _with_skip(torch.stack(outputs, dim=2), v, skip).transpose(1, 2).to(mixed.dtype)


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, *, gate_first: bool = False) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) * silu(z) over each head of V: [B, n, HV * V].

    x [B, n, HV, V]; weight [V]. gate_first: x * silu(z) is normed instead, and weight is [HV * V] (Mamba-2, with its
    groups as heads). Like in Hugging Face's models, the normalised value is rounded before the weight, and the product
    before a gate. Raises ValueError if shapes, dtypes or devices do not fit.
    """
    operands.check_gated_norm(x, z, weight, gate_first)
    gate = functional.silu(z.reshape(x.shape).float())
    wide = x.float() * gate if gate_first else x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    if gate_first:
        return weight * normed.flatten(2)
    return (weight * normed * gate).to(x.dtype).flatten(2)


def commit_states(
    states: Tensor,
    windows: Tensor,
    raw: Tensor,
    mixed: Tensor,
    gates: Tensor,
    path: Tensor,
    accepted: Tensor,
    *,
    delta_rule: bool = True,
) -> None:
    """Update the states and windows of L layers by the accepted path, in place: token by token, in fp32.

    states [L, B, HV, K, V]; windows [L, B, W - 1, C]; raw, mixed [L, B, N, C] and gates [L, B, N, 2, HV] of the trees;
    path [B, P] int32: node indices, the first accepted + 1 are used; accepted [B] int32, -1: no change. delta_rule:
    False for Mamba-2. Raises ValueError if shapes, dtypes or devices do not fit.
    """
    operands.check_commit_states(states, windows, raw, mixed, gates, path, accepted)
    for layer, state in enumerate(states):
        _, k, v = _heads(mixed[layer], state, delta_rule)
        for step in range(path.shape[1]):
            node = path[:, step].clamp(min=0).long()
            pick = torch.arange(len(node), device=node.device), slice(None), node
            g, beta = gates[layer][pick[0], node].unbind(1)
            after = _next_state(state, k[pick], v[pick], g, beta, delta_rule)
            state.copy_(torch.where((step <= accepted)[:, None, None, None], after, state))
    commit_windows(windows, raw, path, accepted)


def commit_windows(windows: Tensor, raw: Tensor, path: Tensor, accepted: Tensor) -> None:
    """Update the windows [L, B, W - 1, C] of `gated_conv` in L layers by the accepted path, in place.

    raw [L, B, N, C] of the trees; path, accepted: as in `commit_states`. Raises ValueError if arguments do not fit.
    """
    operands.check_commit_windows(windows, raw, path, accepted)
    if not windows.shape[2]:
        return
    for window, rows in zip(windows, raw, strict=True):
        for step in range(path.shape[1]):
            node = path[:, step].clamp(min=0).long()
            newest = rows[torch.arange(len(node), device=node.device), node][:, None]
            moved = torch.cat((window, newest), dim=1)[:, 1:]
            window.copy_(torch.where((step <= accepted)[:, None, None], moved, window))


def gating(
    a: Tensor,
    b: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    limited: Tensor | None = None,
    max_beta: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) softplus(a + dt_bias), and beta = max_beta sigmoid(b), each operation rounded to b's dtype:
    [B, n, HV] fp32 each. Without b the softplus is within dt_limit, and beta is the same."""
    dt = functional.softplus(a.flatten(2).float() + dt_bias.float())
    if b is None:
        within = dt.clamp(*dt_limit)
        if limited is not None:
            row = torch.arange(dt.shape[1], device=dt.device)
            within = torch.where((row < limited[:, None])[..., None], within, dt)
        dt = beta = within
    else:
        beta = (b.flatten(2).sigmoid() * max_beta).float()
    return -A_log.float().exp() * dt, beta


def _before(place: Tensor, ancestors: Tensor | None, kept: int) -> Tensor:
    """The place of the token before each place [B, n]: of a node's parent, otherwise one less. Places count from the
    beginning of the window."""
    if ancestors is None:
        return place - 1
    node = torch.arange(ancestors.shape[1], device=place.device)
    strict = ((ancestors[..., 0, None] >> node) & 1).bool() & (node < node[:, None])
    parent = torch.where(strict, node, -1).amax(-1)  # the nearest ancestor has the largest index
    return torch.where(place >= kept, kept + parent.gather(1, (place - kept).clamp(min=0)), place - 1)


def _heads(mixed: Tensor, state: Tensor, delta_rule: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, HV, n, K], normed for the delta rule, and v [B, HV, n, V], in fp32. Key heads are repeated for their
    value heads."""
    value_heads, key_dim, value_dim = state.shape[1:]
    values = value_heads * value_dim
    keys = (mixed.shape[-1] - values) // 2
    if delta_rule:
        q, k, v = mixed.float().split((keys, keys, values), dim=-1)
    else:
        v, k, q = mixed.float().split((values, keys, keys), dim=-1)
    q, k = (x.unflatten(-1, (-1, key_dim)).transpose(1, 2) for x in (q, k))
    if delta_rule:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q = q * key_dim**-0.5
    q, k = (x.repeat_interleave(value_heads // x.shape[1], dim=1) for x in (q, k))
    return q, k, v.unflatten(-1, (value_heads, value_dim)).transpose(1, 2)


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, total: Tensor, seen: Tensor, state: Tensor, delta_rule: bool
) -> tuple[Tensor, Tensor]:
    """Outputs and updates [B, HV, n, V] of nodes; seen [.., n, n]: which see which; beta, total [B, HV, n].

    total, the sums of g, are fp64, because the difference of two may be much smaller than both.
    """
    between = torch.where(seen, total[..., :, None] - total[..., None, :], 0.0).exp().float() * seen
    since_state = total.exp().float()[..., None]
    update = beta[..., None] * v
    if delta_rule:
        right = beta[..., None] * (v - since_state * (k @ state))
        system = beta[..., None] * (k @ k.mT) * between
        update = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return since_state * (q @ state) + ((q @ k.mT) * between) @ update, update


def _with_skip(outputs: Tensor, v: Tensor, skip: Tensor | None) -> Tensor:
    """outputs + skip [HV] * v, [B, HV, n, V]."""
    return outputs if skip is None else outputs + skip.float()[:, None, None] * v


def _next_state(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, delta_rule: bool) -> Tensor:
    """The state [B, HV, K, V] after one more token; k [B, HV, K], v [B, HV, V], g and beta [B, HV]."""
    decayed = state * g.exp()[..., None, None]
    if delta_rule:
        v = v - (decayed * k[..., None]).sum(-2)
    return decayed + k[..., None] * (beta[..., None] * v)[..., None, :]
