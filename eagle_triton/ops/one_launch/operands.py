"""The kernel's arguments, and the data of a program.

Each weight of a model is its own tensor. One TMA descriptor reaches all of them: its matrix has rows of 128 bytes from
the lowest address on, and a table has the first such row of each weight.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from eagle_triton.ops.linear.gluon_tiles import TILE_LAYOUT
from eagle_triton.ops.one_launch.sizes import CHOSEN, EXPERTS, NARROW, PART, Sizes, keys_of
from eagle_triton.runtime.gluon import TensorDescriptor, gl, gluon


def weights_descriptor(lowest: Tensor, rows: int, width: int = PART.value) -> TensorDescriptor:
    """A descriptor of the matrix [rows, UNIT] that begins at the weight with the lowest address.

    It is narrow for rows of weights with a `width` that is no multiple of PART: [row, unit, UNIT], the units from a row
    of the matrix on, up to this width. Beyond it TMA reads nothing, and gives zeros.
    """
    if width % PART.value == 0:
        return TensorDescriptor(lowest, [rows, 64], [64, 1], [16, 64], TILE_LAYOUT)
    units = width // 64
    return TensorDescriptor(lowest, [rows - units + 1, units, 64], [64, 64, 1], [1, 16, 64], NARROW.value)


def keys_descriptor(cache: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of a cache's keys and values as [rows, D], from its first address on."""
    width = cache.shape[-1]
    return TensorDescriptor(cache, [rows, width], [width, 1], [keys_of(width), width], TILE_LAYOUT)


class Model(NamedTuple):
    """A model's tensors that are read by address, and numbers."""

    embedding: Tensor  # [V, H] in bf16
    norm: Tensor  # the last one, [H] in bf16
    # int32 [L, 8]: where q, k, v, o, gate, up and down begin in the matrix over all weights, in a mixture those of its
    # first expert; then the layer's window.
    rows: Tensor
    # int64 [L, 8]: the norms of the layer's input, of SwiGLU's, of queries and of keys; the router of a mixture; the
    # biases of q, k and v.
    addresses: Tensor
    inv_freq: Tensor  # rotary's frequencies, [R / 2] in fp32
    rotary_scaling: float  # of sine and cosine
    epsilon: float  # of norms
    scale: float  # of scores, for powers of two


class Row(NamedTuple):
    """The new row. The launch does nothing where `counter` is below `least`."""

    token: Tensor  # int64 [1]
    lengths: Tensor  # int32 [1]: the committed rows before it
    skip: int  # the draft rows between those and it
    table: Tensor  # its sequence's pages, int32 [M]
    hidden: Tensor  # an output, [H] in bf16
    normed: Tensor  # the other output, [H] in bf16
    counter: Tensor  # int32 [1]
    least: int


class Cache(NamedTuple):
    """Keys and values as one matrix with rows of D. Strides count these rows."""

    ptr: Tensor
    page_stride: int
    layer_stride: int
    value_stride: int  # from a page's keys to its values


class Mailboxes(NamedTuple):
    """Mailboxes, int32, and the number of launches so far."""

    qkv: Tensor  # each group's queries, new key and new value
    parts: Tensor  # of attention, from each program of a group
    softmax: Tensor  # the maximum and the sum of those
    heads: Tensor  # attention of all heads
    o: Tensor
    act: Tensor
    down: Tensor
    logits: Tensor  # of a router
    step: Tensor

    @staticmethod
    def sizes(S: Sizes) -> tuple[int, ...]:
        """The number of values of each."""
        queries = 8 * S.Q * S.D
        inner = CHOSEN.value * S.I if S.MIXTURE else S.I
        return queries + 16 * S.D, 16 * queries, 256 * S.Q, queries, S.H, inner, S.H, EXPERTS.value, 1


class Ring(NamedTuple):
    """Slots of [8, 1024] weights, each with two barriers."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    read: gl.shared_memory_descriptor


class Work(NamedTuple):
    """The data of a program. All but the last four are in shared memory."""

    ring: Ring
    x: gl.shared_memory_descriptor  # parts of 1024 bf16 numbers, as words [16, 32]
    sums: gl.shared_memory_descriptor  # of products, [2, 64 or 128, 4 * warps]: for each row those of a warp's threads
    heads: gl.shared_memory_descriptor  # of a group, [4 or 8, D]: its queries, its new key and its new value
    scores: gl.shared_memory_descriptor  # of two tiles, [2, 2 or 4, keys]
    model: Model
    row: Row
    cache: Cache
    boxes: Mailboxes


@gluon.jit
def load_words(address, place, count):
    """bf16 numbers at an address, as words of two; zeros from word `count` on. Nothing waits for them before their
    use."""
    return gl.load(address.to(gl.pointer_type(gl.int32)) + place, mask=place < count, other=0)


@gluon.jit
def numbers_of(words, layout: gl.constexpr):
    """The bf16 numbers in words [n] or [rows, n], in fp32."""
    even, odd = (words << 16).to(gl.float32, bitcast=True), (words & -65536).to(gl.float32, bitcast=True)
    shape: gl.constexpr = words.shape[:-1] + [2 * words.shape[-1]]  # noqa: RUF005 (Triton knows no other way)
    return gl.convert_layout(gl.join(even, odd).reshape(shape), layout)
