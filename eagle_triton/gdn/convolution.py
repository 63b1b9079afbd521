"""The depthwise causal convolution before the gated delta rule, with its state in slots of a pool.

The engine's `causal_conv` computes it with SiLU and without a bias, as in Qwen3-Next; otherwise plain torch does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from eagle_triton.gdn.operations import operations_for
from eagle_triton.gdn.packing import sequence_lengths
from eagle_triton.gdn.slots import check_slots, put, take, take_continued, without_padding
from eagle_triton.gdn.tree import MAX_NODES, ancestor_mask, link_parents
from eagle_triton.operands.ancestors import pack_ancestors

SILU = ("silu", "swish", True)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    conv_states: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    seq_lens_cpu: Sequence[int] | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = "silu",
) -> Tensor:
    """Whole sequences. x [B, C, T]; or N sequences one after the other [C, T], with query_start_loc [N + 1].

    weight [C, W]; bias [C] or None; conv_states [slots, C, W - 1], moved on in place; None: each sequence begins with
    zeros and nothing is kept. cache_indices [N] int32: the sequences' slots, below 0 for padding, which gives zeros;
    None: in order. has_initial_state [N] bool: the sequences that continue from their slots; None: none. activation:
    "silu" ("swish", True) or None. seq_lens_cpu: the lengths, not needed. Returns a tensor like x. Raises ValueError
    before anything is written if arguments do not fit.
    """
    name = "causal_conv1d_fn"
    check_convolution(name, weight, bias, activation)
    rows = (x if x.dim() == 3 else x[None]).mT  # [B, T, C]
    if x.dim() not in (2, 3) or rows.shape[2] != len(weight) or not rows.shape[1]:
        raise ValueError(f"{name}: x must be [B, {len(weight)}, T] or [{len(weight)}, T], got {list(x.shape)}")
    if (x.dim() == 2) != (query_start_loc is not None):
        raise ValueError(f"{name}: query_start_loc must be given for x [C, T], and only for that")
    lengths = sequence_lengths(name, query_start_loc, rows)
    sequences = rows.split(1) if lengths is None else rows.split(lengths, dim=1)
    count = len(sequences)
    shape = (len(weight), weight.shape[1] - 1)
    slots = torch.arange(count, device=x.device) if cache_indices is None else cache_indices
    if conv_states is None:
        windows = x.new_zeros(count, *shape)
    else:
        check_slots(name, "conv_states", conv_states, slots, shape, count)
        goes_on = has_initial_state
        if goes_on is not None and (goes_on.dtype != torch.bool or goes_on.shape != (count,)):
            got = f"{goes_on.dtype} {list(goes_on.shape)}"
            raise ValueError(f"{name}: has_initial_state must be bool [{count}] or None, got {got}")
        windows = take_continued(conv_states, slots, has_initial_state)
    windows = windows.mT.to(x.dtype).contiguous()
    outputs = [
        convolve(row, weight, windows[index : index + 1], bias, activation) if row.shape[1] else row
        for index, row in enumerate(sequences)
    ]
    if cache_indices is not None:
        outputs = [output if slot >= 0 else torch.zeros_like(output)
                   for output, slot in zip(outputs, slots.tolist(), strict=True)]  # fmt: skip
    if conv_states is not None:
        put(conv_states, slots, windows.mT)
    return torch.cat(outputs).mT if lengths is None else torch.cat(outputs, dim=1)[0].T


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    conv_state_indices: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor:
    """A few more tokens of N sequences: x [N, C] or [N, C, T]; or a tree of tokens for each, T at most 64.

    conv_state [slots, C, W - 1], the newest input last; conv_state_indices [N] int32: the sequences' slots, below 0 for
    padding, which gives zeros; None: in order. weight, bias and activation as in `causal_conv1d_fn`. Without the other
    arguments the pool moves on in place. A tree is given by retrieve_next_token and retrieve_next_sibling [N, T] (first
    child and next sibling, -1 for none; the parents are written to retrieve_parent_token, if given), or only by the
    parents in retrieve_parent_token [N, T]. With a tree, or with intermediate_conv_window [slots, T, C, W - 1], which
    gets the window after each token at the sequences' slots, the pool does not change. Returns a tensor like x. Raises
    ValueError before anything is written if arguments do not fit.
    """
    name = "causal_conv1d_update"
    check_convolution(name, weight, bias, activation)
    rows = x[:, None] if x.dim() == 2 else x.mT  # [N, T, C]
    if x.dim() not in (2, 3) or rows.shape[2] != len(weight) or not rows.shape[1]:
        raise ValueError(f"{name}: x must be [N, {len(weight)}] or [N, {len(weight)}, T], got {list(x.shape)}")
    count, tokens, channels = rows.shape
    shape = (channels, weight.shape[1] - 1)
    slots = torch.arange(count, device=x.device) if conv_state_indices is None else conv_state_indices
    check_slots(name, "conv_state", conv_state, slots, shape, count)
    if intermediate_conv_window is not None:
        check_slots(name, "intermediate_conv_window", intermediate_conv_window, slots, (tokens, *shape), count)
    for link in (retrieve_next_token, retrieve_next_sibling, retrieve_parent_token):
        if link is not None and tuple(link.shape) != (count, tokens):
            raise ValueError(f"{name}: retrieve_* must be [{count}, {tokens}], got {list(link.shape)}")
    if (retrieve_next_token is None) != (retrieve_next_sibling is None):
        raise ValueError(f"{name}: retrieve_next_token and retrieve_next_sibling must be given both or neither")
    stays = intermediate_conv_window is not None or retrieve_next_token is not None or retrieve_parent_token is not None
    if stays and tokens > MAX_NODES:
        raise ValueError(f"{name}: a tree must have at most {MAX_NODES} tokens, got {tokens}")

    windows = take(conv_state, slots).mT.to(x.dtype).contiguous()
    parents = None
    if retrieve_next_token is not None and retrieve_next_sibling is not None:
        parents = link_parents(retrieve_next_token, retrieve_next_sibling)
        if retrieve_parent_token is not None:
            retrieve_parent_token.copy_(parents)
    elif retrieve_parent_token is not None:
        parents = retrieve_parent_token
    elif stays:
        parents = chain_parents(rows)
    outputs = convolve(rows, weight, windows, bias, activation, parents)
    if intermediate_conv_window is not None and parents is not None:
        put(intermediate_conv_window, slots, inputs_before(rows, windows, parents)[:, :, 1:].mT)
    if not stays:
        put(conv_state, slots, windows.mT)
    outputs = without_padding(outputs, slots)
    return outputs[:, 0] if x.dim() == 2 else outputs.mT


def convolve(
    rows: Tensor,
    weight: Tensor,
    window: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = "silu",
    parents: Tensor | None = None,
) -> Tensor:
    """Rows [B, n, C] after a window [B, W - 1, C], which moves on in place. With parents [B, n]: a tree; the window
    stays.

    weight [C, W]; returns [B, n, C].
    """
    channels = rows.shape[2]
    if bias is None and activation in SILU and channels > 2:
        third = channels // 3  # the operation takes q, k and v separately
        q, k, v = rows.contiguous()[:, :, None].split((third, third, channels - 2 * third), dim=-1)
        ancestors = None if parents is None else pack_ancestors(ancestor_mask(parents))
        return operations_for(rows).causal_conv(q, k, v, weight.to(rows.dtype), window, ancestors)
    taps = inputs_before(rows, window, chain_parents(rows) if parents is None else parents)
    total = (taps.float() * weight.mT.float()).sum(2)
    if bias is not None:
        total = total + bias.float()
    if parents is None and window.shape[1]:
        window.copy_(taps[:, -1, 1:])
    total = total.to(rows.dtype)
    return functional.silu(total) if activation in SILU else total


def inputs_before(rows: Tensor, window: Tensor, parents: Tensor) -> Tensor:
    """The inputs for each token's taps, its own last: [B, n, W, C]. Those before a root are in the window."""
    (batch, count, channels), kept = rows.shape, window.shape[1]
    known = torch.cat((window, rows), dim=1)
    place = kept + torch.arange(count, device=rows.device).expand(batch, -1)
    above = torch.nn.functional.pad(parents[:, 1:], (1, 0), value=-1).long()
    taken = []
    for _ in range(kept + 1):
        taken.append(known.gather(1, place[..., None].expand(-1, -1, channels)))
        place = torch.where(place >= kept, kept + above.gather(1, (place - kept).clamp(min=0)), place - 1).clamp(min=0)
    return torch.stack(taken[::-1], dim=2)


def chain_parents(rows: Tensor) -> Tensor:
    """Parents [B, n] of tokens that follow each other."""
    return torch.arange(-1, rows.shape[1] - 1, dtype=torch.int32, device=rows.device).expand(len(rows), -1)


def check_convolution(name: str, weight: Tensor, bias: Tensor | None, activation: str | bool | None) -> None:
    """Raise ValueError unless weight is [C, W], bias [C] or None, and the activation SiLU or none."""
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"{name}: weight must be [C, W] and bias [C] or None, got {list(weight.shape)} and "
            f"{None if bias is None else list(bias.shape)}"
        )
    if activation not in (*SILU, None, False):
        raise ValueError(f"{name}: activation must be silu, swish or None, got {activation!r}")
