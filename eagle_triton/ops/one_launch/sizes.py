"""The sizes that choose the kernel's code."""

from __future__ import annotations

from typing import NamedTuple

from eagle_triton.ops.linear.gluon_tiles import TILE_LAYOUT
from eagle_triton.runtime.gluon import gl, gluon

PROGRAMS = gl.constexpr(128)
MEMBERS = gl.constexpr(16)  # programs of a group
UNIT = gl.constexpr(64)  # columns of the matrix over all weights
PART = gl.constexpr(1024)  # columns of a weight in one load
EXPERTS = gl.constexpr(128)  # of a mixture: a logit for each program
CHOSEN = gl.constexpr(8)  # experts of a row
WARPS = gl.constexpr(8)  # that compute
THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS.value], [0]))
TILE = gl.constexpr(TILE_LAYOUT)
NARROW = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Sizes(NamedTuple):
    """Sizes of a model. They choose the kernel's code."""

    H: int  # hidden size
    Q: int  # query heads of each of eight groups
    D: int  # a head's size
    R: int  # columns of a head that rotate
    I: int  # intermediate size; with a mixture, that of one expert  # noqa: E741
    L: int  # layers
    QK_NORM: bool  # whether query and key heads have norms
    KV: int = 8  # key heads
    BIASED: bool = False  # whether q, k and v have biases
    WINDOWED: bool = False  # whether layers have a sliding window
    MIXTURE: bool = False  # whether layers have a mixture of experts
    ROUNDED: bool = True  # whether the weights of chosen experts are rounded to bf16


@gluon.constexpr_function
def parts_of(width):
    """Parts of 1024 columns in a row of a weight."""
    return -(-width // 1024)


@gluon.constexpr_function
def parts_of_x(S):
    """Parts of 1024 columns in the widest x, rounded up to a multiple of the parts of the hidden size."""
    hidden = 1 << (S.H - 1).bit_length()
    inner = 1024 * CHOSEN.value if S.MIXTURE else S.I
    return -(-max(inner, 8 * S.Q * S.D) // hidden) * hidden // 1024


@gluon.constexpr_function
def keys_of(D):
    """Keys in a tile: with their values they fill a slot."""
    return 4096 // D


def settings_for(S: Sizes) -> dict[str, int]:
    """SLOTS: the number that fits into shared memory, beside x and the products' sums. LOADS: measured on an H200. With
    more loads in flight, values between programs wait for weights, which matters if weights are small."""
    others = parts_of_x.fn(S) * 2048 + (64 if S.I <= 8192 else 128) * 256 + 8192
    return {"SLOTS": (227 * 1024 - others) // 16384, "LOADS": 2 if S.H == 1024 else 3}
