"""All layers of a model over one new row, in one persistent launch. For Hopper, in bf16.

    hidden, normed = the residual stream after the last layer, and its norm

128 programs stay for the whole launch. In each, one warp streams the program's share of all weights, and its keys and
values, through a ring in shared memory. Weights depend on nothing but a mixture's choice of experts, so this warp
mostly waits for free slots only. Eight warps compute. A layer has four phases, which share the code of their products:

    0  residual, norm                                    x [H]      -> q, k, v
    1  norms of heads, rotary, attention, its merge      x [8 * QD] -> o
    2  residual, norm                                    x [H]      -> gate, up, SwiGLU
    3                                                    x [I]      -> down

In a mixture's layer each program also makes one logit of the router in phase 2. All programs receive the logits and
choose the same eight experts. Sixteen programs share an expert's gate and up. In phase 3 a program makes its rows of
down for all eight, and their weighted sum.

A program makes whole rows of a product, eight at a time (a block), so no sum crosses programs. It attends every 16th
tile of keys for one of eight groups of heads, and merges 1/16 of that group's columns. QD is the width of a group's
queries. If there are fewer than eight key heads, groups that share one make its new key and value each for itself.

Between phases, programs send values to each other through mailboxes in global memory, without barriers. A value is an
fp32 number with the layer's parity as its last bit. A reader loads until the last bits of all its values are right.
bf16 numbers lose nothing by this, and parts of attention lose their last bit. A mailbox is used once per layer, and its
next writers have waited for all of its readers in between. A reader that waits too long takes NaN, so the logits are
NaN if a program is missing.

Each weight of a model is its own tensor. One TMA descriptor reaches all of them: its matrix has rows of 128 bytes from
the lowest address on, and a table has the first such row of each weight.

Numerics: fp32 sums, rounded where the separate kernels round. Sums of products and of softmax have another order than
there, so the bits differ. Every run gives the same bits.

The code has some 60 KiB. For a mixture 75 KiB run. It should not grow: see docs/speed-notes.md, "One launch".
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language.core as tl_core
from torch import Tensor

from eagle_triton.ops.layers import rotary
from eagle_triton.ops.linear.gluon_tiles import TILE_LAYOUT, await_full, await_read, barriers, give_back, rounded
from eagle_triton.runtime.gluon import (
    TensorDescriptor,
    async_load,
    debug_barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
)

PROGRAMS = gl.constexpr(128)
UNIT = gl.constexpr(64)  # columns of the matrix over all weights
EXPERTS = gl.constexpr(128)  # of a mixture: a logit for each program
CHOSEN = gl.constexpr(8)  # experts of a row
PART = gl.constexpr(1024)  # columns of a weight in one load
_MEMBERS = gl.constexpr(16)  # programs of a group
_WARPS = gl.constexpr(8)
_TILE = gl.constexpr(TILE_LAYOUT)
_NARROW = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
_WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3))
_TILES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 16], [0, 8, 0]],
        lane_bases=[[0, 0, 4], [0, 0, 8], [0, 4, 0], [0, 1, 0], [0, 2, 0]],  # neighbours read all banks
        warp_bases=[[1, 0, 0], [2, 0, 0], [4, 0, 0]],
        block_bases=[],
        shape=[8, 16, 32],
    )
)  # a slot's weights in registers: a row for each warp
_X = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
_PARTS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
_PARTS_OF_EXPERTS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
_SUMS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [0, 1]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_TRIES = 1 << 18  # of a reader: some tenths of a second
_BF16 = gl.constexpr(gl.bfloat16)
_LOWEST = gl.constexpr(-1e30)  # of scores: keeps its value when sent, unlike an infinity
cos_sin = gluon.jit(rotary.cos_sin.fn)


class Sizes(NamedTuple):
    """Sizes of a model: hidden size, query heads of each of eight groups, a head's size, its columns that rotate,
    intermediate size, layers; whether query and key heads have norms; key heads; whether q, k and v have biases, and
    whether layers have a sliding window. Of a mixture: whether layers have one, and whether its weights are rounded to
    bf16. There I is an expert's size."""

    H: int
    Q: int
    D: int
    R: int
    I: int  # noqa: E741
    L: int
    QK_NORM: bool
    KV: int = 8
    BIASED: bool = False
    WINDOWED: bool = False
    MIXTURE: bool = False
    ROUNDED: bool = True


@gluon.constexpr_function
def _filled(size):
    """The next power of two."""
    return 1 << (size - 1).bit_length()


@gluon.constexpr_function
def _parts_of(width):
    """Parts of 1024 columns in a row of a weight."""
    return -(-width // 1024)


@gluon.jit
def _blocks_of(pid, ROWS: gl.constexpr):
    """How many blocks of a product with ROWS rows a program makes. Blocks pid, pid + PROGRAMS and so on are its own."""
    if ROWS % (8 * PROGRAMS) == 0:
        count = ROWS // (8 * PROGRAMS)
    else:
        count = (ROWS // 8 + PROGRAMS - 1 - pid) // PROGRAMS
    return count


@gluon.constexpr_function
def _parts_of_x(S):
    """Parts of 1024 columns in the widest x, rounded up to a multiple of the parts of the hidden size."""
    hidden = 1 << (S.H - 1).bit_length()
    inner = 1024 * CHOSEN.value if S.MIXTURE else S.I
    return -(-max(inner, 8 * S.Q * S.D) // hidden) * hidden // 1024


def settings_for(S: Sizes) -> dict[str, int]:
    """SLOTS: the number that fits into shared memory, beside x and the products' sums. LOADS: measured on an H200. With
    more loads in flight, values between programs wait for weights, which matters if weights are small."""
    others = _parts_of_x.fn(S) * 2048 + (64 if S.I <= 8192 else 128) * 256 + 8192
    return {"SLOTS": (227 * 1024 - others) // 16384, "LOADS": 2 if S.H == 1024 else 3}


def weights_descriptor(lowest: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of the matrix [rows, UNIT] that begins at the weight with the lowest address."""
    return TensorDescriptor(lowest, [rows, 64], [64, 1], [16, 64], TILE_LAYOUT)


def narrow_descriptor(lowest: Tensor, rows: int, width: int) -> TensorDescriptor:
    """A descriptor of [row, unit, UNIT]: the units from a row of this matrix on, up to `width` columns. Beyond these
    TMA reads nothing, and gives zeros."""
    units = width // 64
    return TensorDescriptor(lowest, [rows - units + 1, units, 64], [64, 64, 1], [1, 16, 64], _NARROW.value)


def keys_descriptor(cache: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of a cache's keys and values as [rows, D], from its first address on."""
    width = cache.shape[-1]
    return TensorDescriptor(cache, [rows, width], [width, 1], [4096 // width, width], TILE_LAYOUT)


class Model(NamedTuple):
    """Tensors that are read by address: embeddings [V, H] and the last norm [H] in bf16; the first rows of q, k, v, o,
    gate, up and down in the matrix over all weights, in a mixture the rows of its first expert, then the layer's
    window, int32 [L, 8]; addresses of the norms of inputs, of SwiGLU's, of queries and keys, of a mixture's router, and
    of the biases of q, k and v, int64 [L, 8]; rotary's frequencies [R / 2] in fp32, and the factor of sine and cosine.
    """

    embedding: Tensor
    norm: Tensor
    rows: Tensor
    addresses: Tensor
    inv_freq: Tensor
    rotary_scaling: float


class Row(NamedTuple):
    """The new row: its token int64 [1], the committed rows before it int32 [1], and the draft rows after those; its
    sequence's pages int32 [M]. Outputs: hidden and normed [H] in bf16. The launch does nothing where `counter`, int32
    [1], is below `least`."""

    token: Tensor
    lengths: Tensor
    skip: int
    table: Tensor
    hidden: Tensor
    normed: Tensor
    counter: Tensor
    least: int


class Cache(NamedTuple):
    """Keys and values as one matrix with rows of D, and the rows between two pages, between two layers, and between a
    page's keys and its values."""

    ptr: Tensor
    page_stride: int
    layer_stride: int
    value_stride: int


class Mailboxes(NamedTuple):
    """Mailboxes, int32: q, k, v of a group; parts of its attention, with their maximum and sum; all heads; the other
    products, and a router's logits. Then the number of launches so far."""

    qkv: Tensor
    parts: Tensor
    softmax: Tensor
    heads: Tensor
    o: Tensor
    act: Tensor
    down: Tensor
    logits: Tensor
    step: Tensor

    @staticmethod
    def sizes(S: Sizes) -> tuple[int, ...]:
        """The number of values of each."""
        queries = 8 * S.Q * S.D
        inner = CHOSEN.value * S.I if S.MIXTURE else S.I
        return queries + 16 * S.D, 16 * queries, 256 * S.Q, queries, S.H, inner, S.H, EXPERTS.value, 1


class Ring(NamedTuple):
    """Slots of [8, 1024] weights, each with two barriers: it is full, and it has been read."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    read: gl.shared_memory_descriptor


class Work(NamedTuple):
    """The data of a program. In shared memory: the ring; x, a part of 1024 bf16 numbers as words [16, 32]; the
    products' sums [2, 64 or 128, 4 * warps], for each row those of a warp's threads; the heads of a group [4 or 8, D],
    its queries, its new key and its new value; scores of two tiles [2, 2 or 4, keys]."""

    ring: Ring
    x: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    heads: gl.shared_memory_descriptor
    scores: gl.shared_memory_descriptor
    model: Model
    row: Row
    cache: Cache
    boxes: Mailboxes


# --- Sending and receiving


# Functions that insert PTX take it as an argument, because otherwise Triton's cache would miss a change.
@gluon.constexpr_function
def _receiving(loads):
    """PTX that loads until the last bits of all values equal the last operand's, or gives NaN after _TRIES; its
    constraints, and the number of its outputs.

    loads: tuples (operand with the address, number of loads, bytes between them, values of one).
    """
    plain = gl._core._unwrap_if_constexpr
    loads = [tuple(plain(number) for number in load) for load in loads]
    outputs = sum(count * width for _, count, _, width in loads)
    pointers = 1 + max(operand for operand, *_ in loads)
    parity = f"${outputs + pointers}"
    lines = [".reg .pred p, q;", ".reg .b32 t, u, n;", ".reg .b64 keep;", "mov.u32 n, 0;", "mov.u32 t, 0;"]
    lines += ["createpolicy.fractional.L2::evict_last.b64 keep, 1.0;", "AGAIN:"]
    at = 0
    for operand, count, stride, width in loads:
        for i in range(count):
            found = ", ".join(f"${at + j}" for j in range(width))
            kind, found = (f".v{width}", f"{{{found}}}") if width > 1 else ("", found)
            address = f"[${outputs + operand} + {i * stride}]"
            lines.append(f"ld.relaxed.gpu.global.L2::cache_hint{kind}.b32 {found}, {address}, keep;")
            at += width
    lines.append(f"xor.b32 t, $0, {parity};")
    lines += [line for i in range(1, outputs) for line in (f"xor.b32 u, ${i}, {parity};", "or.b32 t, t, u;")]
    lines += ["and.b32 t, t, 1;", "setp.ne.b32 p, t, 0;", "add.u32 n, n, 1;", f"setp.lt.u32 q, n, {_TRIES};"]
    lines += ["and.pred q, p, q;", "@q bra AGAIN;"]
    lines += [f"@p mov.b32 ${i}, 0x7fffffff;" for i in range(outputs)]  # NaN
    constraints = ",".join(["=&r"] * outputs + ["l"] * pointers + ["r"])
    return "{" + "\n".join(lines) + "}", constraints, outputs


@gl._core.builtin
def receive(ptx, pointers, parity, _semantic=None):
    """int32 tensors of the pointers' shape, loaded by _receiving's PTX."""
    text, constraints, outputs = map(gl._core._unwrap_if_constexpr, gl._core._unwrap_if_constexpr(ptx))
    found = tl_core.inline_asm_elementwise(
        text, constraints, [*pointers, parity], (gl.int32,) * outputs, is_pure=False, pack=1, _semantic=_semantic
    )
    return tl_core.tuple(list(found))


@gluon.jit
def _sent(x, parity):
    return (x.to(gl.int32, bitcast=True) & -2) | parity


@gluon.jit
def _received(bits):
    return (bits & -2).to(gl.float32, bitcast=True)


@gluon.jit
def _four(a, b, c, d):
    """Four [n] as one [n, 2, 2], in this order."""
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def _receive_hidden(box, parity, H: gl.constexpr, layout: gl.constexpr):
    """[H] in registers, padded with zeros to a power of two."""
    PARTS: gl.constexpr = _parts_of(H)
    lane = gl.arange(0, 256, parity.type.layout)
    if H % PART == 0:
        found = receive(_receiving(((0, PARTS, 4096, 4),)), [box + lane * 4], parity)
    else:  # the last part has fewer columns
        last = box + H // PART * PART + gl.minimum(lane, H % PART // 4 - 1) * 4
        found = receive(_receiving(((0, PARTS - 1, 4096, 4), (1, 1, 0, 4))), [box + lane * 4, last], parity)
    values = _part_of_hidden(found, lane, 0, H)
    if PARTS > 1:
        second = _part_of_hidden(found, lane, 1, H)
        if PARTS == 2:
            values = gl.join(values, second).permute((3, 0, 1, 2))
        else:
            third = _part_of_hidden(found, lane, 2, H)
            fourth = gl.zeros_like(third)
            if PARTS == 4:
                fourth = _part_of_hidden(found, lane, 3, H)
            values = _four(values, second, third, fourth).permute((3, 4, 0, 1, 2))
    return gl.convert_layout(_received(values).reshape((_filled(H),)), layout)


@gluon.jit
def _part_of_hidden(found, lane, i: gl.constexpr, H: gl.constexpr):
    """Part i of 1024 columns, with zeros for columns from H on, as [256, 2, 2]."""
    a, b, c, d = found[4 * i], found[4 * i + 1], found[4 * i + 2], found[4 * i + 3]
    if (i + 1) * PART > H:
        exists = lane < H % PART // 4
        a, b, c, d = gl.where(exists, a, 0), gl.where(exists, b, 0), gl.where(exists, c, 0), gl.where(exists, d, 0)
    return _four(a, b, c, d)


@gluon.jit
def _receive_columns(box, work, parity, WIDTH: gl.constexpr):
    """Receive [WIDTH] as x, with zeros in the rest of its last part."""
    WHOLE: gl.constexpr = WIDTH // PART
    for first in gl.static_range(0, WHOLE, 8):
        _receive_parts(box + first * PART, work, parity, first, min(8, WHOLE - first), PART)
    if WIDTH % PART > 0:
        _receive_parts(box + WHOLE * PART, work, parity, WHOLE, 1, WIDTH % PART)


@gluon.jit
def _receive_parts(box, work, parity, FIRST: gl.constexpr, COUNT: gl.constexpr, COLUMNS: gl.constexpr):
    """Receive COUNT parts of x from part FIRST on, with COLUMNS columns and then zeros in each. box: of the first."""
    lane = gl.arange(0, 256, parity.type.layout)
    sent = gl.minimum(lane, COLUMNS // 4 - 1)
    found = receive(_receiving(((0, COUNT, 4 * COLUMNS, 4),)), [box + sent * 4], parity)
    for i in gl.static_range(COUNT):
        first, second = _packed(found[4 * i], found[4 * i + 1]), _packed(found[4 * i + 2], found[4 * i + 3])
        if COLUMNS < PART:
            first, second = gl.where(lane == sent, first, 0), gl.where(lane == sent, second, 0)
        work.x.index(FIRST + i).store(gl.join(first, second).reshape((16, 32)))


@gluon.jit
def _packed(low, high):
    """Words of two bf16 numbers, given as fp32."""
    return ((low.to(gl.int32, bitcast=True) >> 16) & 65535) | (high.to(gl.int32, bitcast=True) & -65536)


# --- The experts of a row


@gluon.jit
def _choose(box, parity):
    """Receive the router's logits, bf16 numbers, and choose the largest: CHOSEN keys in their order. parity [32]."""
    lane = gl.arange(0, 32, parity.type.layout)
    a, b, c, d = receive(_receiving(((0, 1, 0, 4),)), [box + lane * 4], parity)
    a, b, c, d = _key(a, lane * 4), _key(b, lane * 4 + 1), _key(c, lane * 4 + 2), _key(d, lane * 4 + 3)
    keys = ()
    for _ in gl.static_range(CHOSEN):
        key = gl.max(gl.maximum(gl.maximum(a, b), gl.maximum(c, d)), axis=0)
        keys += (key,)  # type: ignore[assignment]
        a, b, c, d = _without(a, key), _without(b, key), _without(c, key), _without(d, key)
    return keys


@gluon.jit
def _key(sent, expert):
    """An integer in the order of logits, equal ones by falling index: the logit's bits, then the index."""
    bits = gl.where(_received(sent) == 0.0, 0, sent)  # -0.0 equals 0.0
    bits = gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits & -65536) | (EXPERTS - 1 - expert)


@gluon.jit
def _without(keys, key):
    return gl.where(keys == key, -(2**31), keys)


@gluon.jit
def _expert_of(keys, number):
    """The chosen expert at place `number` of the order."""
    key = keys[0]
    for i in gl.static_range(1, CHOSEN):
        key = gl.where(number == i, keys[i], key)
    return EXPERTS - 1 - (key & (EXPERTS - 1))


@gluon.jit
def _put_weights(work, keys, ROUNDED: gl.constexpr):
    """Put the weights of the chosen experts, which sum to 1, into work.scores."""
    number = gl.arange(0, CHOSEN, gl.BlockedLayout([1], [32], [_WARPS], [0]))
    key = gl.zeros_like(number)
    for i in gl.static_range(CHOSEN):
        key = gl.where(number == i, keys[i], key)
    bits = key & -65536
    logit = gl.where(bits < 0, bits ^ 0x7FFF0000, bits).to(gl.float32, bitcast=True)
    weight = gl.exp(logit - gl.max(logit, axis=0))
    weight = weight / gl.sum(weight, axis=0)
    reinterpret(work.scores, gl.float32, [work.scores.shape[1] * work.scores.shape[2] // 4, CHOSEN], _LINE).index(
        0
    ).store(rounded(weight, _BF16) if ROUNDED else weight)


# --- The warp that loads


@gluon.jit
def _room(ring, n, bytes, LOADS: gl.constexpr):
    """Wait until the slot of load n has been read, and until fewer than LOADS loads are in flight; expect `bytes`.

    With more loads in flight, values between programs would wait in the memory's queues.
    """
    await_read(ring.read, n)
    mbarrier.wait(
        ring.full.index((n + ring.full.shape[0] - LOADS) % ring.full.shape[0]),
        (n - LOADS) // ring.full.shape[0] & 1,
        pred=n >= LOADS,
    )
    mbarrier.expect(ring.full.index(n % ring.full.shape[0]), bytes)


@gluon.jit
def _put(ring, n, weights, first, units, LOADS: gl.constexpr):
    """Load 1024 columns of eight rows, which are `units` rows of the descriptor's matrix apart."""
    SLOTS: gl.constexpr = ring.full.shape[0]
    _room(ring, n, 16384, LOADS)
    slot = n % SLOTS
    rows = reinterpret(ring.tiles, gl.bfloat16, [SLOTS * 8, PART // UNIT, UNIT], _TILE)
    for i in gl.static_range(8):
        async_load(weights, [first + i * units, 0], ring.full.index(slot), rows.index(slot * 8 + i))
    return n + 1


@gluon.jit
def _put_narrow(ring, n, narrow, first, unit, UNITS: gl.constexpr, LOADS: gl.constexpr):
    """Load 1024 columns from unit `unit` on of eight neighbouring rows of UNITS units, and zeros beyond these."""
    SLOTS: gl.constexpr = ring.full.shape[0]
    _room(ring, n, 16384, LOADS)
    slot = n % SLOTS
    rows = reinterpret(ring.tiles, gl.bfloat16, [SLOTS * 8, 1, PART // UNIT, UNIT], _NARROW)
    for i in gl.static_range(8):
        async_load(narrow, [first + i * UNITS, unit, 0], ring.full.index(slot), rows.index(slot * 8 + i))
    return n + 1


@gluon.jit
def _put_block(ring, n, weights, narrow, first, block, turn, WIDTH: gl.constexpr, LOADS: gl.constexpr):
    """Load block `block` of a weight that begins at `first`: eight rows of WIDTH columns in parts of 1024, beginning
    with part `turn`. narrow: the descriptor of such rows, if they are no whole parts."""
    UNITS: gl.constexpr = WIDTH // UNIT
    PARTS: gl.constexpr = _parts_of(WIDTH)
    first += block * 8 * UNITS
    for i in range(PARTS):
        part = i + turn
        part = gl.where(part < PARTS, part, part - PARTS)
        unit = part * (PART // UNIT)
        if WIDTH % PART == 0:
            n = _put(ring, n, weights, first + unit, UNITS, LOADS)
        else:
            n = _put_narrow(ring, n, narrow, first, unit, UNITS, LOADS)
    return n


@gluon.constexpr_function
def _keys_of(D):
    """Keys in a tile: with their values they fill a slot."""
    return 4096 // D


@gluon.jit
def _place(work, layer, tile, KEYS: gl.constexpr, KV: gl.constexpr):
    """The row of the first key of a tile of the program's group, in the cache's matrix."""
    page = gl.load(work.row.table + tile * KEYS // 64)
    head = gl.program_id(0) // _MEMBERS * KV // 8
    return page * work.cache.page_stride + layer * work.cache.layer_stride + head * 64 + tile * KEYS % 64


@gluon.jit
def _put_keys(work, n, layer, tile, keys, KV: gl.constexpr, LOADS: gl.constexpr):
    ring = work.ring
    KEYS: gl.constexpr = keys.block_type.shape[0]
    SLOTS: gl.constexpr = ring.full.shape[0]
    place = _place(work, layer, tile, KEYS, KV)
    _room(ring, n, 16384, LOADS)
    slot = n % SLOTS
    tiles = reinterpret(ring.tiles, gl.bfloat16, [SLOTS * 2, KEYS, keys.block_type.shape[1]], _TILE)
    async_load(keys, [place, 0], ring.full.index(slot), tiles.index(slot * 2))
    async_load(keys, [place + work.cache.value_stride, 0], ring.full.index(slot), tiles.index(slot * 2 + 1))
    return n + 1


@gluon.jit
def _window(work, layer):
    return gl.load(work.model.rows + layer * 8 + 7)


@gluon.jit
def _first_tile(work, layer, last, KEYS: gl.constexpr, S: gl.constexpr):
    """The first of the program's tiles of keys that row `last` attends."""
    tile = gl.program_id(0) % _MEMBERS
    if S.WINDOWED:
        first = gl.maximum(last - _window(work, layer) + 1, 0) // KEYS
        tile = first + ((tile - first) & (_MEMBERS - 1))
    return tile


@gluon.jit
def _layers(row, S: gl.constexpr):
    """How many layers to run: all or none."""
    return gl.where(gl.load(row.counter) >= row.least, S.L, 0)


@gluon.jit
def _block_of_qkv(block, S: gl.constexpr):
    """Whether block `block` of the program's rows of q, k and v is q's, and if not, whether it is k's; and its number
    in that weight."""
    group, member = gl.program_id(0) // _MEMBERS, gl.program_id(0) % _MEMBERS
    Q_BLOCKS: gl.constexpr = S.Q * S.D // 128
    HEAD: gl.constexpr = S.D // 8  # blocks of a head
    of_kv = (block - Q_BLOCKS) * _MEMBERS + member
    of_q, of_k = block < Q_BLOCKS, of_kv < HEAD
    place = gl.where(of_q, (group * Q_BLOCKS + block) * _MEMBERS + member, group * S.KV // 8 * HEAD + of_kv % HEAD)
    return of_q, of_k, place


@gluon.jit
def _load(work, weights, of_hidden, of_inner, keys, S: gl.constexpr, LOADS: gl.constexpr):
    """Load all operands of the program, in the order in which it multiplies them. For the descriptors see
    one_launch_kernel."""
    ring, row = work.ring, work.row
    pid = gl.program_id(0)
    KEYS: gl.constexpr = keys.block_type.shape[0]
    Q_BLOCKS: gl.constexpr = S.Q * S.D // 128
    HEADS: gl.constexpr = 8 * S.Q * S.D
    last = gl.load(row.lengths) + row.skip
    n = 0
    for layer in range(_layers(row, S)):
        rows = work.model.rows + layer * 8
        q, k, v = gl.load(rows), gl.load(rows + 1), gl.load(rows + 2)
        for block in range(Q_BLOCKS + S.D // 64):
            of_q, of_k, place = _block_of_qkv(block, S)
            first = gl.where(of_q, q, gl.where(of_k, k, v))
            n = _put_block(ring, n, weights, of_hidden, first, place, 0, S.H, LOADS)
        for tile in range(_first_tile(work, layer, last, KEYS, S), last // KEYS + 1, _MEMBERS):
            n = _put_keys(work, n, layer, tile, keys, S.KV, LOADS)
        o, gate, up, down = gl.load(rows + 3), gl.load(rows + 4), gl.load(rows + 5), gl.load(rows + 6)
        for block in range(_blocks_of(pid, S.H)):
            turn = pid % (HEADS // PART)
            n = _put_block(ring, n, weights, weights, o, block * PROGRAMS + pid, turn, HEADS, LOADS)
        if S.MIXTURE:
            n = _load_experts(work, n, layer, weights, of_inner, gate, up, down, S, LOADS + 2)
        else:
            of_gate = _blocks_of(pid, S.I)
            for block in range(2 * of_gate):
                first = gl.where(block < of_gate, gate, up)
                place = gl.where(block < of_gate, block, block - of_gate) * PROGRAMS + pid
                n = _put_block(ring, n, weights, of_hidden, first, place, 0, S.H, LOADS)
            for block in range(_blocks_of(pid, S.H)):
                turn = pid % _parts_of(S.I)
                n = _put_block(ring, n, weights, of_inner, down, block * PROGRAMS + pid, turn, S.I, LOADS)


@gluon.jit
def _load_experts(work, n, layer, weights, of_inner, gate, up, down, S: gl.constexpr, LOADS: gl.constexpr):
    """Load the program's share of the chosen experts: of one expert's gate and up, and of the down of all."""
    ring, pid = work.ring, gl.program_id(0)
    OF_GATE: gl.constexpr = S.I // 8 // _MEMBERS  # blocks
    parity = (gl.load(work.boxes.step) * S.L + layer + 1) & 1
    keys = _choose(work.boxes.logits, gl.zeros((32,), gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + parity)
    both = _expert_of(keys, pid // _MEMBERS) * (2 * S.I * (S.H // UNIT))
    for block in range(2 * OF_GATE):
        first = gl.where(block < OF_GATE, gate, up) + both
        place = pid % _MEMBERS * OF_GATE + block % OF_GATE
        n = _put_block(ring, n, weights, weights, first, place, 0, S.H, LOADS)
    for block in range(CHOSEN * (S.H // 1024)):
        first = down + _expert_of(keys, block // (S.H // 1024)) * (S.H * (S.I // UNIT))
        place = block % (S.H // 1024) * PROGRAMS + pid
        n = _put_block(ring, n, weights, of_inner, first, place, 0, S.I, LOADS)
    return n


# --- The warps that compute


@gluon.jit
def _pairs(words):
    """The bf16 numbers in words, even ones and odd ones, in fp32."""
    return (words << 16).to(gl.float32, bitcast=True), (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _words(address, place, count):
    """bf16 numbers at an address, as words of two; zeros from word `count` on. Nothing waits for them before their
    use."""
    return gl.load(address.to(gl.pointer_type(gl.int32)) + place, mask=place < count, other=0)


@gluon.jit
def _numbers(words, layout: gl.constexpr):
    even, odd = _pairs(words)
    if len(words.shape) == 1:
        values = gl.join(even, odd).reshape((2 * words.shape[0],))
    else:
        values = gl.join(even, odd).reshape((words.shape[0], 2 * words.shape[1]))
    return gl.convert_layout(values, layout)


@gluon.jit
def _normed(h, weight, epsilon, H: gl.constexpr):
    """The norm of h [H], padded with zeros, with its weight."""
    return rounded(rounded(h * gl.rsqrt(gl.sum(h * h, axis=0) / H + epsilon), _BF16) * weight, _BF16)


@gluon.jit
def _put_columns(work, x):
    """Put [H] in registers, bf16 numbers, as x."""
    ROWS: gl.constexpr = x.shape[0] // 64
    low, high = x.reshape((ROWS, 32, 2)).split()
    reinterpret(work.x, gl.int32, [work.x.shape[0] * 16 // ROWS, ROWS, 32], _X).index(0).store(_packed(low, high))


def _multiplication() -> str:
    """PTX of multiply_add."""
    kind = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    d = "{$0, $1, $2, $3}"
    first, second = (f"{kind} {d}, {{${i}, z, ${i + 1}, z}}, {{${i + 4}, ${i + 5}}}, {d};" for i in (4, 6))
    return f"{{.reg .b32 z; mov.b32 z, 0; {first} {second}}}"


_MULTIPLICATION = gl.constexpr(_multiplication())
_CONSTRAINTS = gl.constexpr("=f,=f,=f,=f," + "r," * 8 + "0,1,2,3")


@gluon.jit
def multiply_add(x, w, sums):
    """sums + x * w by tensor cores, with words of two bf16 numbers, [8, 16, 32] each in _TILES.

    For every two words of a thread, a warp multiplies eight rows of x by eight columns of w, 16 numbers each. Lanes 4 i
    to 4 i + 3 hold row i and column i, which belong together: only products of a row with its own column are wanted. Of
    four words, a thread's first two sums belong to its lane's row with column 2 * (its lane % 4) and the next one. The
    other two are zero.
    """
    values = [x, w, sums]
    return gl.inline_asm_elementwise(_MULTIPLICATION, _CONSTRAINTS, values, gl.float32, is_pure=False, pack=4)


@gluon.jit
def _products(work, n, blocks, half, parts, turn, of_experts, S: gl.constexpr):
    """Sums of blocks of eight rows times x, which has 1024 columns in each of `parts` parts, from part `turn` on.

    From block `half` on, rows use the second half of work.sums. of_experts: x has a part of S.I columns for each
    expert, and every H / 1024 blocks belong to one.
    """
    ring = work.ring
    SLOTS: gl.constexpr = ring.full.shape[0]
    HALF: gl.constexpr = work.sums.shape[1] // 8
    tiles = reinterpret(ring.tiles, gl.int32, [SLOTS, 8, 16, 32], _WORDS)
    rows = reinterpret(work.sums, gl.float32, [2 * HALF, 8, 4 * _WARPS], _PARTS)
    for block in range(blocks):
        sums = gl.zeros((8, 16, 32), gl.float32, _TILES)
        for i in range(parts):
            part = i + turn
            part = gl.where(part < parts, part, part - parts)
            if S.MIXTURE:
                part = gl.where(of_experts, block // (S.H // 1024), part)
            x = work.x.index(part).load(gl.SliceLayout(0, _TILES))
            await_full(ring.full, n)
            words = tiles.index(n % SLOTS).load(_TILES)
            sums = multiply_add(x[None, :, :], words, sums)
            give_back(ring.read, n)
            n += 1
        own = sums.reshape((8, 2, 8, 2, 4, 2, 2))
        own = gl.sum(gl.sum(gl.sum(own, axis=5), axis=3), axis=1)
        own = gl.sum(gl.where(_wanted(own), own, 0.0), axis=3).reshape((8, 4 * _WARPS))
        rows.index(gl.where(block < half, block, block - half + HALF)).store(own)
    return n


@gluon.jit
def _wanted(sums):
    """Which of sums [8, 8 lanes, 4 lanes, 2] are wanted, see multiply_add."""
    of_pair: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
    part = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, of_pair)))[:, None, None]
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, of_pair)))[None, :, None]
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, of_pair)))[None, None, :]
    return ((part // 4 + part % 4 * 2) == four * 2 + pair)[None, :, :, :]


@gluon.jit
def _complete(sums):
    """Products, from the sums of threads."""
    return gl.sum(sums.load(_SUMS), axis=1)


@gluon.jit
def _load_bias(model, layer, place, wanted, S: gl.constexpr):
    """The biases of q, k and v for a program's rows; zeros if they are not wanted."""
    ROWS: gl.constexpr = S.Q * S.D // 16 + S.D // 8
    addresses = model.addresses + layer * 8
    of_q, of_k, block = _block_of_qkv(place // 8, S)
    begin = gl.where(of_q, gl.load(addresses + 5), gl.where(of_k, gl.load(addresses + 6), gl.load(addresses + 7)))
    bias = begin.to(gl.pointer_type(gl.bfloat16)) + (block * 8 + place % 8)
    return gl.load(bias, mask=wanted & (place < ROWS), other=0.0).to(gl.float32)


@gluon.jit
def _attend(work, n, layer, last, cos, sin, parity, epsilon, scale, S: gl.constexpr):
    """Attention of the program's tiles, the merge of its columns, and all heads' columns as x. cos, sin: see
    `_cos_sin`. Returns the number of tiles."""
    ring, boxes, heads = work.ring, work.boxes, work.heads
    group, member = gl.program_id(0) // _MEMBERS, gl.program_id(0) % _MEMBERS
    Q: gl.constexpr = S.Q
    HIGH: gl.constexpr = _filled(Q)  # the heads of a group; with three, the fourth is the key, and is not sent
    D: gl.constexpr = S.D
    QD: gl.constexpr = Q * D
    KEYS: gl.constexpr = _keys_of(D)
    SLOTS: gl.constexpr = ring.full.shape[0]
    HEADS: gl.constexpr = heads.shape[0]
    line: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    columns: gl.constexpr = _columns(D, 4)
    pairs: gl.constexpr = _columns(D, 2)
    fours: gl.constexpr = _columns(D, 1)
    score: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [2, _WARPS // 2, 1], [1, 2, 0])
    mix: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [32 * _WARPS // D, 1, D // 32], [1, 2, 0])
    own: gl.constexpr = gl.SliceLayout(1, mix)
    merge: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, _WARPS], [0, 1])

    # q, k and v: norms and rotary. Each thread has four columns of a head, and the four that rotate with them.
    head, four = gl.arange(0, HEADS, gl.SliceLayout(1, fours)), gl.arange(0, D // 4, gl.SliceLayout(0, fours)) * 4
    if S.QK_NORM:
        of = gl.arange(0, HEADS, gl.SliceLayout(1, pairs))
        norms = work.model.addresses + layer * 8
        norm = gl.where(of < Q, gl.load(norms + 2), gl.load(norms + 3))[:, None]
        two = gl.arange(0, D // 2, gl.SliceLayout(0, pairs)) * 2
        weight = _words(norm, two[None, :] // 2, D // 2)
        other_weight = _words(norm, _other_of_pair(two, S.R)[None, :] // 2, D // 2)
    box = boxes.qkv + group * (QD + 2 * D) + gl.minimum(head, Q + 1)[:, None] * D
    pointers = [box + four[None, :], box + _other_of_pair(four, S.R)[None, :]]
    found = receive(
        _receiving(((0, 1, 0, 4), (1, 1, 0, 4))), pointers, gl.zeros((HEADS, D // 4), gl.int32, fours) + parity
    )
    x = _received(_four(found[0], found[1], found[2], found[3]).reshape((HEADS, D)))
    other = _received(_four(found[4], found[5], found[6], found[7]).reshape((HEADS, D)))
    x, other = gl.convert_layout(x, columns), gl.convert_layout(other, columns)
    is_value = (gl.arange(0, HEADS, gl.SliceLayout(1, columns)) > Q)[:, None]
    turned = x
    if S.QK_NORM:
        factor = gl.rsqrt(gl.sum(x * x, axis=1) / D + epsilon)[:, None]
        turned = rounded(rounded(x * factor, _BF16) * _numbers(weight, columns), _BF16)
        other = rounded(rounded(other * factor, _BF16) * _numbers(other_weight, columns), _BF16)
    turned = rounded(rounded(turned * cos, _BF16) + rounded(other * sin, _BF16), _BF16)
    heads.store(gl.where(is_value, x, turned))
    debug_barrier()

    # every 16th tile of keys
    rows = reinterpret(heads, gl.float32, [HEADS, D], _LINE)
    queries = heads.slice(0, HIGH, 0).load(gl.SliceLayout(1, score))
    key = rows.index(Q).load(gl.SliceLayout(0, gl.SliceLayout(0, score)))[None, :]
    value = rows.index(Q + 1).load(gl.SliceLayout(0, gl.SliceLayout(0, mix)))[None, :]
    tiles = reinterpret(ring.tiles, gl.bfloat16, [SLOTS * 2, KEYS, D], _TILE)
    of_key = gl.arange(0, KEYS, gl.SliceLayout(1, gl.SliceLayout(0, score)))[:, None]
    of_score = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, score)))[None, :]
    of_value = gl.arange(0, KEYS, gl.SliceLayout(1, gl.SliceLayout(0, mix)))[:, None]
    largest = gl.full((HIGH,), _LOWEST, gl.float32, gl.SliceLayout(1, gl.SliceLayout(2, mix)))
    total = gl.zeros((HIGH,), gl.float32, gl.SliceLayout(1, gl.SliceLayout(2, mix)))
    mixed = gl.zeros((HIGH, D), gl.float32, own)
    first = n
    for tile in range(_first_tile(work, layer, last, KEYS, S), last // KEYS + 1, _MEMBERS):
        new = last - tile * KEYS  # the new row, in this tile or after it
        await_full(ring.full, n)
        keys = tiles.index(n % SLOTS * 2).load(gl.SliceLayout(0, score)).to(gl.float32)
        keys = gl.where(of_key == new, key, keys)
        scores = gl.sum(keys[None, :, :] * queries[:, None, :], axis=2) * scale
        seen = of_score <= new
        if S.WINDOWED:
            seen &= of_score > new - _window(work, layer)
        work.scores.index(n % 2).store(gl.where(seen, scores, _LOWEST))
        debug_barrier()
        values = tiles.index(n % SLOTS * 2 + 1).load(gl.SliceLayout(0, mix)).to(gl.float32)
        values = gl.where(of_value < new, values, gl.where(of_value == new, value, 0.0))
        scores = work.scores.index(n % 2).load(gl.SliceLayout(2, mix))
        previous = largest
        largest = gl.maximum(previous, gl.max(scores, axis=1))
        softmax = gl.exp2(scores - largest[:, None])
        share = gl.exp2(previous - largest)
        total = total * share + gl.sum(softmax, axis=1)
        added = gl.sum(rounded(softmax, _BF16)[:, :, None] * values[None, :, :], axis=1)
        mixed = mixed * gl.convert_layout(share, gl.SliceLayout(1, own))[:, None] + added
        give_back(ring.read, n)
        n += 1
    of_head = gl.arange(0, HIGH, largest.type.layout)
    box = boxes.softmax + ((group * 16 + member) * Q + of_head) * 2
    gl.store(box, _sent(largest, parity), mask=of_head < Q, eviction_policy="evict_last")
    gl.store(box + 1, _sent(total, parity), mask=of_head < Q, eviction_policy="evict_last")
    of_head = gl.arange(0, HIGH, gl.SliceLayout(1, own))[:, None]
    box = boxes.parts + (group * 16 + member) * QD + of_head * D + gl.arange(0, D, gl.SliceLayout(0, own))[None, :]
    gl.store(box, _sent(mixed, parity), mask=of_head < Q, eviction_policy="evict_last")
    if member == last // KEYS % _MEMBERS:
        new = (_place(work, layer, last // KEYS, KEYS, S.KV) + last % KEYS).to(gl.int64)
        to = work.cache.ptr + new * D + gl.arange(0, D, line)
        gl.store(to, rows.index(Q).load(line).to(gl.bfloat16))
        gl.store(to + work.cache.value_stride * D, rows.index(Q + 1).load(line).to(gl.bfloat16))

    # the group's parts, 1 / 16 of its columns
    part = gl.arange(0, 16, gl.SliceLayout(1, merge))
    COLUMNS: gl.constexpr = _filled(QD // 16)  # if there are fewer, the last ones repeat
    column = gl.minimum(gl.arange(0, COLUMNS, gl.SliceLayout(0, merge)), QD // 16 - 1) + member * (QD // 16)
    box = boxes.parts + (group * 16 + part[:, None]) * QD + column[None, :]
    of_softmax = boxes.softmax + ((group * 16 + part[:, None]) * Q + column[None, :] // D) * 2
    expected = gl.zeros((16, COLUMNS), gl.int32, merge) + parity
    mixed, largest, total = receive(_receiving(((0, 1, 0, 1), (1, 1, 0, 2))), [box, of_softmax], expected)
    largest = _received(largest)
    share = gl.exp2(largest - gl.max(largest, axis=0)[None, :])
    merged = gl.sum(_received(mixed) * share, axis=0) / gl.sum(_received(total) * share, axis=0)
    box = boxes.heads + group * QD + column
    gl.store(box, _sent(rounded(merged, _BF16), parity), eviction_policy="evict_last")
    _receive_columns(boxes.heads, work, gl.zeros((256,), gl.int32, line) + parity, 8 * QD)
    return n - first


@gluon.jit
def _send_experts(work, parity, S: gl.constexpr):
    """Send the weighted sums of the experts' outputs, from the sums of threads."""
    ROWS: gl.constexpr = S.H // PROGRAMS
    layout: gl.constexpr = gl.BlockedLayout([CHOSEN, 1, 8], [1, 8, 4], [1, _WARPS, 1], [2, 1, 0])
    of_row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    of_expert: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    sums = reinterpret(work.sums, gl.float32, [CHOSEN, ROWS, 4 * _WARPS], _PARTS_OF_EXPERTS).load(layout)
    weights = reinterpret(work.scores, gl.float32, [work.scores.shape[1] * work.scores.shape[2] // 4, CHOSEN], _LINE)
    weighted = rounded(gl.sum(sums, axis=2), _BF16) * weights.index(0).load(of_expert)[:, None]
    if S.ROUNDED:
        weighted = rounded(weighted, _BF16)
    total = rounded(gl.sum(weighted, axis=0), _BF16)
    row = gl.arange(0, ROWS, of_row)
    where = (row // 8 * PROGRAMS + gl.program_id(0)) * 8 + row % 8
    gl.store(work.boxes.down + where, _sent(total, parity), eviction_policy="evict_last")


@gluon.constexpr_function
def _columns(D, count):
    """The layout of heads [heads, D / 4 * count], with `count` of each four columns in a thread."""
    return gl.BlockedLayout([1, count], [128 // D, D // 4], [8, 1], [1, 0])


@gluon.jit
def _other_of_pair(column, R: gl.constexpr):
    """The column that rotates with this one, or this one if it does not rotate."""
    other = gl.where(column < R // 2, column + R // 2, column - R // 2)
    return gl.where(column < R, other, column)


@gluon.jit
def _cos_sin(model, position, R: gl.constexpr, D: gl.constexpr):
    """The cosine of each column of a head, and the sine of the one that rotates with it, with its sign. [1, D]."""
    column = gl.arange(0, D, gl.SliceLayout(0, _columns(D, 4)))
    rotates = column < R
    angle = position.to(gl.float32) * gl.load(model.inv_freq + column % (R // 2), mask=rotates, other=0.0)
    cos, sin = cos_sin(angle)
    cos = gl.where(rotates, rounded(cos * model.rotary_scaling, _BF16), 1.0)
    sin = gl.where(rotates, rounded(sin * model.rotary_scaling, _BF16), 0.0)
    return cos[None, :], gl.where(column < R // 2, -sin, sin)[None, :]


@gluon.jit
def _compute(work, epsilon, scale, S: gl.constexpr):
    """All phases of all layers, and the last norm."""
    model, row, boxes = work.model, work.row, work.boxes
    pid = gl.program_id(0)
    group, member = pid // _MEMBERS, pid % _MEMBERS
    H: gl.constexpr = S.H
    QD: gl.constexpr = S.Q * S.D
    Q_BLOCKS: gl.constexpr = QD // 128
    line: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    hidden: gl.constexpr = gl.BlockedLayout([4], [32], [_WARPS], [0])
    words = gl.arange(0, _filled(H) // 2, gl.BlockedLayout([2], [32], [_WARPS], [0]))
    zero, zero_lanes = gl.zeros((256,), gl.int32, line), gl.zeros((32,), gl.int32, line)
    of_gate = S.I // 128 if S.MIXTURE else _blocks_of(pid, S.I)  # blocks of the program
    of_hidden = _blocks_of(pid, H)
    ACT_PARTS: gl.constexpr = 1 if S.MIXTURE else _parts_of(S.I)
    place = gl.arange(0, work.sums.shape[1], gl.SliceLayout(1, _SUMS))
    own_rows = (place // 8 * PROGRAMS + pid) * 8 + place % 8
    of_q = place < 8 * Q_BLOCKS
    qkv_rows = (gl.where(of_q, place // 8, place // 8 - Q_BLOCKS) * _MEMBERS + member) * 8 + place % 8
    qkv_rows += group * (QD + 2 * S.D) + gl.where(of_q, 0, QD)
    step = gl.load(boxes.step)
    last = gl.load(row.lengths) + row.skip
    cos, sin = _cos_sin(model, last, S.R, S.D)
    token = gl.load(row.token)
    columns = gl.arange(0, _filled(H), hidden)
    h = gl.load(model.embedding + token * H + columns, mask=columns < H, other=0.0).to(gl.float32)
    layers = _layers(row, S)
    n = 0
    for phase in range(4 * layers):
        layer, kind = phase // 4, phase % 4
        parity = (step * S.L + layer + 1) & 1
        if kind % 2 == 0:
            weight = _words(gl.load(model.addresses + layer * 8 + kind // 2), words, H // 2)
            if S.MIXTURE:
                router = gl.load(model.addresses + layer * 8 + 4) + pid * (2 * H)
                router = _words(router, words, gl.where(kind == 2, H // 2, 0))
            if phase > 0:
                box = gl.where(kind == 0, boxes.down, boxes.o)
                of = gl.where(kind == 0, parity ^ 1, parity)
                h = rounded(h + _receive_hidden(box, zero + of, H, hidden), _BF16)
            x = _normed(h, _numbers(weight, hidden), epsilon, H)
            if S.MIXTURE and kind == 2:  # first, because all loads wait for it
                logit = rounded(gl.sum(x * _numbers(router, hidden), axis=0), _BF16)
                gl.store(boxes.logits + pid, _sent(logit, parity))
            _put_columns(work, x)
        elif kind == 1:
            n += _attend(work, n, layer, last, cos, sin, parity, epsilon, scale, S)
        elif S.MIXTURE:
            _put_weights(work, _choose(boxes.logits, zero_lanes + parity), S.ROUNDED)
            _receive_parts(boxes.act, work, zero + parity, 0, CHOSEN, S.I)
        else:
            _receive_columns(boxes.act, work, zero + parity, S.I)
        debug_barrier()
        parts = gl.where(kind % 2 == 0, _parts_of(H), gl.where(kind == 1, 8 * QD // 1024, ACT_PARTS))
        of_qkv: gl.constexpr = Q_BLOCKS + S.D // 64
        blocks = gl.where(kind == 0, of_qkv, gl.where(kind == 2, 2 * of_gate, of_hidden))
        half = gl.where(kind == 2, of_gate, work.sums.shape[1] // 8)
        if S.MIXTURE:
            blocks = gl.where(kind == 3, CHOSEN * (H // 1024), blocks)
        if S.BIASED:
            bias = _load_bias(model, layer, place, kind == 0, S)
        n = _products(work, n, blocks, half, parts, gl.where(kind % 2 == 0, 0, pid % parts), kind == 3, S)
        total = _complete(work.sums.index(0))
        if S.BIASED:
            total += bias
        total = rounded(total, _BF16)
        box, where, used = gl.where(kind == 1, boxes.o, boxes.down), own_rows, 8 * blocks
        if kind == 0:
            box, where = boxes.qkv, qkv_rows
        elif kind == 2:
            up = rounded(_complete(work.sums.index(1)), _BF16)
            total = rounded(rounded(total / (1.0 + gl.exp(-total)), _BF16) * up, _BF16)
            box, used = boxes.act, 8 * half
            if S.MIXTURE:
                where = pid * used + place
        if S.MIXTURE and kind == 3:
            _send_experts(work, parity, S)
            used = 0
        gl.store(box + where, _sent(total, parity), mask=place < used, eviction_policy="evict_last")

    if (pid == 0) & (layers > 0):
        weight = _words(model.norm, words, H // 2)
        h = rounded(h + _receive_hidden(boxes.down, zero + ((step * S.L + S.L) & 1), H, hidden), _BF16)
        normed = _normed(h, _numbers(weight, hidden), epsilon, H)
        gl.store(row.hidden + columns, h.to(gl.bfloat16), mask=columns < H)
        gl.store(row.normed + columns, normed.to(gl.bfloat16), mask=columns < H)
        gl.store(boxes.step, step + 1)


@gluon.jit
def one_launch_kernel(
    weights,
    of_hidden,
    of_inner,
    keys,
    model: Model,
    row: Row,
    cache: Cache,
    boxes: Mailboxes,
    epsilon,
    scale,
    S: gl.constexpr,
    SLOTS: gl.constexpr,
    LOADS: gl.constexpr,
):
    """Grid (PROGRAMS,), one on each multiprocessor.

    weights: a descriptor of the matrix over all weights, [rows, UNIT] in tiles of a row's part. of_hidden, of_inner:
    narrow ones for rows of H and of I columns, where these are no multiples of 1024. keys: the cache's, in tiles
    [keys, D]. scale: of scores, for powers of two. SLOTS: of the ring, 16 KiB each. LOADS: the most in flight.
    """
    ring = Ring(gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 8, 1024], _TILE), barriers(SLOTS), barriers(SLOTS))
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ring.full.index(slot), count=1)
        mbarrier.init(ring.read.index(slot), count=1)
    fence_async_shared()
    sums = gl.allocate_shared_memory(gl.float32, [2, 64 if S.I <= 8192 else 128, 4 * _WARPS], _PARTS)
    x = gl.allocate_shared_memory(gl.int32, [_parts_of_x(S), 16, 32], _X)
    heads = gl.allocate_shared_memory(gl.float32, [4 if S.Q == 2 else 8, S.D], _PLAIN)
    scores = gl.allocate_shared_memory(gl.float32, [2, _filled(S.Q), _keys_of(S.D)], _PLAIN)
    work = Work(ring, x, sums, heads, scores, model, row, cache, boxes)
    gl.warp_specialize(
        [(_compute, (work, epsilon, scale, S)), (_load, (work, weights, of_hidden, of_inner, keys, S, LOADS))],
        [1],
        [40],
    )
