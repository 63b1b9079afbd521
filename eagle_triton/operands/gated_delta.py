"""Operands of recurrent layers and their checks, see reference.gated_delta."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_triton.operands.shapes import FLOATS, check_tensors

MAX_NODES = 64  # of a tree: a node's ancestors are one word

MAX_PIECES = 64  # of prompts in one forward


class PromptPieces(NamedTuple):
    """The tokens of a forward over P <= MAX_PIECES pieces of prompts, n tokens each, n at least a window's. `state` and
    `window` then belong to all B slots, and each piece's sequence moves on.

    Pieces of one slot follow each other in order; all but its last one are full. A sequence that starts at 0 has no
    memory yet, whatever its slot holds. Rows of a piece past its count are padding; their outputs are finite.
    """

    slots: Tensor  # [P] int32
    starts: Tensor  # [P] int32: their first positions in their sequences
    counts: Tensor  # [P] int32: tokens, 0 for an unused piece

    def sequences(self) -> Iterator[tuple[int, int, list[int], list[int]]]:
        """Each sequence's slot, start, pieces and their counts. Waits for the device."""
        slots, starts, counts = (column.tolist() for column in self)
        places = [place for place, count in enumerate(counts) if count]
        while places:
            mine = [place for place in places if slots[place] == slots[places[0]]]
            yield slots[mine[0]], starts[mine[0]], mine, [counts[place] for place in mine]
            places = places[len(mine) :]


def check_causal_conv(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    weight: Tensor,
    window: Tensor,
    ancestors: Tensor | None,
    active: Tensor | None,
    bias: Tensor | None,
    raw: Tensor | None,
    out: Tensor | None,
    pieces: PromptPieces | None = None,
) -> None:
    name = "causal_conv"
    if (k is None) != (v is None):
        raise ValueError(f"{name}: give both k and v, or neither of them")
    if pieces is not None and not (ancestors is None and active is None and raw is None and out is None):
        raise ValueError(f"{name}: pieces of prompts cannot have ancestors, active, raw or out")
    _check_active(name, active, ancestors)
    products = {"q": (q, "B n H K", None), "k": (k, "B n H K", q.dtype), "v": (v, "B n H RV", q.dtype)}
    sizes = check_tensors(name, {**products, "weight": (weight, "C W>0", FLOATS)})
    widths = sizes["K"] if k is None else 2 * sizes["K"] + sizes["RV"]
    sizes |= {"C": sizes["H"] * widths, "window": sizes["W"] - 1}
    tensors = {
        "weight": (weight, "C W", q.dtype),
        "bias": (bias, "C", q.dtype),
        "window": (window, "B window C" if pieces is None else "slots window C", q.dtype),
        "raw": (raw, "B n C", q.dtype),
        "out": (out, "B n C", q.dtype),
        "ancestors": (ancestors, "B n 1", torch.int64),
        "active": (active, "B, contiguous", torch.bool),
        **_fields(pieces),
    }
    check_tensors(name, tensors, device=q.device, **sizes)
    if pieces is not None and sizes["n"] < sizes["window"]:
        raise ValueError(f"{name}: a piece must have at least a window's {sizes['window']} tokens, got {sizes['n']}")
    _check_counts(name, sizes, ancestors, pieces)


def check_gated_conv(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    ancestors: Tensor | None,
    active: Tensor | None,
    raw: Tensor | None,
    pieces: PromptPieces | None = None,
) -> None:
    name = "gated_conv"
    if pieces is not None and not (ancestors is None and active is None and raw is None):
        raise ValueError(f"{name}: pieces of prompts cannot have ancestors, active or raw")
    _check_active(name, active, ancestors)
    sizes = check_tensors(name, {"x": (x, "B n C3", FLOATS), "weight": (weight, "C W>0", x.dtype)})
    if sizes["C3"] != 3 * sizes["C"]:
        raise ValueError(f"{name}: x must have three times the {sizes['C']} channels of weight, got {sizes['C3']}")
    sizes["window"] = sizes["W"] - 1
    tensors = {
        "window": (window, "B window C" if pieces is None else "slots window C", x.dtype),
        "raw": (raw, "B n C", x.dtype),
        "ancestors": (ancestors, "B n 1", torch.int64),
        "active": (active, "B, contiguous", torch.bool),
        **_fields(pieces),
    }
    check_tensors(name, tensors, device=x.device, **sizes)
    if pieces is not None and sizes["n"] < sizes["window"]:
        raise ValueError(f"{name}: a piece must have at least a window's {sizes['window']} tokens, got {sizes['n']}")
    _check_counts(name, sizes, ancestors, pieces)


def check_commit_windows(windows: Tensor, raw: Tensor, path: Tensor, accepted: Tensor) -> None:
    tensors = {
        "raw": (raw, "L B N C", FLOATS),
        "windows": (windows, "L B window C", raw.dtype),
        "path": (path, "B P", torch.int32),
        "accepted": (accepted, "B", torch.int32),
    }
    check_tensors("commit_windows", tensors)


def check_delta(
    name: str,
    mixed: Tensor,
    a: Tensor,
    b: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    pieces: PromptPieces | None = None,
    skip: Tensor | None = None,
    active: Tensor | None = None,
    limited: Tensor | None = None,
    max_beta: float = 1.0,
) -> None:
    if b is None and max_beta != 1.0:
        raise ValueError(f"{name}: max_beta needs b, which Mamba-2 has not")
    if b is not None and not (skip is None and limited is None):
        raise ValueError(f"{name}: only Mamba-2, which has no b, has skip and limited")
    sizes = check_tensors(name, {"a": (a, "B n>0 H R", mixed.dtype)}, device=mixed.device)
    tensors = {
        "b": (b, "B n H R", mixed.dtype),
        "state": (state, "B HV K V" if pieces is None else "slots HV K V", torch.float32),
        "mixed": (mixed, "B n C", FLOATS),
        "A_log": (A_log, "HV", FLOATS),
        "dt_bias": (dt_bias, "HV", FLOATS),
        "skip": (skip, "HV", FLOATS),
        "limited": (limited, "B, contiguous", torch.int32),
        "active": (active, "B, contiguous", torch.bool),
        **_fields(pieces),
    }
    sizes = check_tensors(name, tensors, device=mixed.device, **sizes, HV=sizes["H"] * sizes["R"])
    channels = 2 * sizes["H"] * sizes["K"] + sizes["HV"] * sizes["V"]
    if sizes["C"] != channels:
        raise ValueError(f"{name}: mixed must have 2 H K + HV V = {channels} channels, got {sizes['C']}")
    if pieces is not None and sizes["n"] > MAX_NODES:
        raise ValueError(f"{name}: a piece must have at most {MAX_NODES} tokens, got {sizes['n']}")
    _check_counts(name, sizes, None, pieces)


def check_tree(mixed: Tensor, state: Tensor, ancestors: Tensor, depth: int, gates: Tensor | None) -> None:
    if depth < 0:
        raise ValueError(f"delta_tree: depth must not be negative, got {depth}")
    sizes = {"B": mixed.shape[0], "n": mixed.shape[1], "HV": state.shape[1]}
    _check_counts("delta_tree", sizes, ancestors, None)
    tensors = {"ancestors": (ancestors, "B n 1", torch.int64), "gates": (gates, "B n 2 HV", torch.float32)}
    check_tensors("delta_tree", tensors, device=mixed.device, **sizes)


def check_gated_norm(x: Tensor, z: Tensor, weight: Tensor, gate_first: bool = False) -> None:
    tensors = {"x": (x, "B n HV V", FLOATS), "z": (z, "B n H RV", x.dtype)}
    sizes = check_tensors("gated_norm", tensors)
    columns = sizes["V"] * (sizes["HV"] if gate_first else 1)
    check_tensors("gated_norm", {"weight": (weight, "columns", x.dtype)}, device=x.device, columns=columns)
    if sizes["H"] * sizes["RV"] != sizes["HV"] * sizes["V"] or sizes["HV"] % max(sizes["H"], 1):
        raise ValueError(
            f"gated_norm: z must be [B, n, H, R V] for x's {sizes['HV']} = R H heads of V = {sizes['V']}, got "
            f"{list(z.shape)}"
        )


def check_commit_states(
    states: Tensor, windows: Tensor, raw: Tensor, mixed: Tensor, gates: Tensor, path: Tensor, accepted: Tensor
) -> None:
    tensors = {
        "states": (states, "L B HV K V", torch.float32),
        "raw": (raw, "L B N C", FLOATS),
        "windows": (windows, "L B window C", raw.dtype),
        "mixed": (mixed, "L B N C", raw.dtype),
        "gates": (gates, "L B N 2 HV", torch.float32),
        "path": (path, "B P", torch.int32),
        "accepted": (accepted, "B", torch.int32),
    }
    sizes = check_tensors("commit_states", tensors)
    value_heads, key_dim, value_dim = sizes["HV"], sizes["K"], sizes["V"]
    heads, rest = divmod(sizes["C"] - value_heads * value_dim, 2 * key_dim)
    if rest or heads < 1 or value_heads % heads:
        raise ValueError(
            f"commit_states: raw must have 2 H K + HV V channels, HV = {value_heads} a multiple of H, K = {key_dim} "
            f"and V = {value_dim}, got {sizes['C']}"
        )


def _check_active(name: str, active: Tensor | None, ancestors: Tensor | None) -> None:
    if active is not None and ancestors is not None:
        raise ValueError(f"{name}: active is for consecutive tokens, not for trees with ancestors")


def _fields(pieces: PromptPieces | None) -> dict[str, tuple[Any, str, torch.dtype]]:
    fields = {} if pieces is None else pieces._asdict()
    return {f"pieces.{name}": (value, "B", torch.int32) for name, value in fields.items()}


def _check_counts(name: str, sizes: dict[str, Any], ancestors: Tensor | None, pieces: PromptPieces | None) -> None:
    if ancestors is not None and sizes["n"] > MAX_NODES:
        raise ValueError(f"{name}: expected at most {MAX_NODES} nodes, got {sizes['n']}")
    if pieces is not None and sizes["B"] > MAX_PIECES:
        raise ValueError(f"{name}: expected at most {MAX_PIECES} pieces of prompts, got {sizes['B']}")
