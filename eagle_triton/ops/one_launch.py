"""All layers of a dense model over one new row, in one persistent launch. For Hopper, in bf16.

    hidden, normed = the residual stream after the last layer, and its norm

128 programs stay for the whole launch. In each, one warp streams the program's share of all weights, and its keys and
values, through a ring in shared memory. Weights depend on nothing, so it only waits for free slots. Eight warps
compute. A layer has four phases, which share the code of their products:

    0  residual, norm                                    x [H]      -> q, k, v
    1  norms of heads, rotary, attention, its merge      x [8 * QD] -> o
    2  residual, norm                                    x [H]      -> gate, up, SwiGLU
    3                                                    x [I]      -> down

A program makes whole rows of a product, eight at a time (a block), so no sum crosses programs. It attends every 16th
tile of keys for one of eight groups of heads, and merges 1/16 of that group's columns. QD is the width of a group's
queries.

Between phases, programs send values to each other through mailboxes in global memory, without barriers. A value is an
fp32 number with the layer's parity as its last bit. A reader loads until the last bits of all its values are right.
Sent are bf16 numbers, which lose nothing by this, and parts of attention, which lose their last bit. A mailbox is used
once per layer, and its next writers have waited for all of its readers in between. A reader that waits in vain takes
NaN, which ends in the logits.

Each weight of a model is its own tensor. One TMA descriptor reaches all of them: its matrix has rows of 128 bytes from
the lowest address on, and a table has the first such row of each weight.

Numerics: fp32 sums, rounded where the separate kernels round. Sums of products and of softmax have another order than
there, so the bits differ. Every run gives the same bits.

All of it is some 60 KiB of code, and should stay so: see docs/speed-notes.md, "One launch".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
PART = gl.constexpr(1024)  # columns of a weight in one load
_MEMBERS = gl.constexpr(16)  # programs of a group
_WARPS = gl.constexpr(8)
_TILE = gl.constexpr(TILE_LAYOUT)
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
_SUMS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [0, 1]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_TRIES = 1 << 18  # of a reader: some tenths of a second
_BF16 = gl.constexpr(gl.bfloat16)
_LOWEST = gl.constexpr(-1e30)  # of scores: keeps its value when sent, unlike an infinity
cos_sin = gluon.jit(rotary.cos_sin.fn)


class Sizes(NamedTuple):
    """Sizes of a model: hidden size, query heads for each of eight key heads, their size, intermediate size, layers;
    whether query and key heads have norms."""

    H: int
    Q: int
    D: int
    I: int  # noqa: E741
    L: int
    QK_NORM: bool


@gluon.constexpr_function
def _filled(size):
    """The next power of two."""
    return 1 << (size - 1).bit_length()


@gluon.constexpr_function
def _parts_of_x(S):
    """Parts of 1024 columns in the widest x, rounded up to a multiple of the parts of the hidden size."""
    hidden = 1 << (S.H - 1).bit_length()
    return -(-max(S.I, 8 * S.Q * S.D) // hidden) * hidden // 1024


def settings_for(S: Sizes) -> dict[str, int]:
    """SLOTS: as many as fit into shared memory, beside x and the products' sums. LOADS: measured on an H200. With more
    loads in flight, values between programs wait for weights, which matters if weights are small."""
    others = _parts_of_x.fn(S) * 2048 + (64 if S.I <= 8192 else 128) * 256 + 8192
    return {"SLOTS": (227 * 1024 - others) // 16384, "LOADS": 2 if S.H == 1024 else 3}


def weights_descriptor(lowest: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of the matrix [rows, UNIT] that begins at the weight with the lowest address."""
    return TensorDescriptor(lowest, [rows, 64], [64, 1], [16, 64], TILE_LAYOUT)


def keys_descriptor(cache: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of a cache's keys and values as [rows, D], from its first address on."""
    width = cache.shape[-1]
    return TensorDescriptor(cache, [rows, width], [width, 1], [4096 // width, width], TILE_LAYOUT)


class Model(NamedTuple):
    """Tensors that are read by address: embeddings [V, H] and the last norm [H] in bf16; the first rows of q, k, v, o,
    gate, up and down in the matrix over all weights, int32 [L, 8]; addresses of the norms of inputs, of SwiGLU's, of
    queries and keys, int64 [L, 4]; rotary's frequencies [D / 2] in fp32, and the factor of sine and cosine."""

    embedding: Tensor
    norm: Tensor
    rows: Tensor
    norms: Tensor
    inv_freq: Tensor
    rotary_scaling: float


class Row(NamedTuple):
    """The new row: its token int64 [1], the committed rows before it int32 [1], and the draft rows after those; its
    sequence's pages int32 [M]. Outputs: hidden and normed [H] in bf16."""

    token: Tensor
    lengths: Tensor
    skip: int
    table: Tensor
    hidden: Tensor
    normed: Tensor


class Cache(NamedTuple):
    """Keys and values as one matrix with rows of D, and the rows between two pages, between two layers, and between a
    page's keys and its values."""

    ptr: Tensor
    page_stride: int
    layer_stride: int
    value_stride: int


class Mailboxes(NamedTuple):
    """Mailboxes, int32: q, k, v of a group; parts of its attention, with their maximum and sum; all heads; the other
    products. Then the number of launches so far."""

    qkv: Tensor
    parts: Tensor
    softmax: Tensor
    heads: Tensor
    o: Tensor
    act: Tensor
    down: Tensor
    step: Tensor

    @staticmethod
    def sizes(S: Sizes) -> tuple[int, ...]:
        """The number of values of each."""
        queries = 8 * S.Q * S.D
        return queries + 16 * S.D, 16 * queries, 256 * S.Q, queries, S.H, S.I, S.H, 1


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


def _receiving(loads: Sequence[tuple[int, int, int, int]]) -> tuple[str, str, tuple[Any, ...]]:
    """PTX that loads until the last bits of all values equal that of the last operand, or gives NaN after _TRIES; its
    constraints, and the types of its outputs.

    loads: operand with the address, number of loads, bytes between them, values of one.
    """
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
    return "{" + "\n".join(lines) + "}", constraints, (gl.int32,) * outputs


@gl._core.builtin
def receive(loads, pointers, parity, _semantic=None):
    """int32 tensors of the pointers' shape, loaded by _receiving's PTX."""
    plain = gl._core._unwrap_if_constexpr
    loads = [tuple(plain(number) for number in load) for load in plain(loads)]
    text, constraints, types = _receiving(loads)
    found = tl_core.inline_asm_elementwise(
        text, constraints, [*pointers, parity], types, is_pure=False, pack=1, _semantic=_semantic
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
    lane = gl.arange(0, 256, parity.type.layout)
    found = receive(((0, H // 1024, 4096, 4),), [box + lane * 4], parity)
    values = _four(found[0], found[1], found[2], found[3])
    if H > 1024:
        second = _four(found[4], found[5], found[6], found[7])
        if H == 2048:
            values = gl.join(values, second).permute((3, 0, 1, 2))
        else:
            third = _four(found[8], found[9], found[10], found[11])
            fourth = gl.zeros_like(third)
            if H == 4096:
                fourth = _four(found[12], found[13], found[14], found[15])
            values = _four(values, second, third, fourth).permute((3, 4, 0, 1, 2))
    return gl.convert_layout(_received(values).reshape((_filled(H),)), layout)


@gluon.jit
def _receive_columns(box, work, parity, COUNT: gl.constexpr):
    """Receive [COUNT * 1024] as x."""
    for first in gl.static_range(0, COUNT, 8):
        _receive_parts(box, work, parity, first, min(8, COUNT - first))


@gluon.jit
def _receive_parts(box, work, parity, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Receive COUNT parts of x from part FIRST on."""
    lane = gl.arange(0, 256, parity.type.layout)
    found = receive(((0, COUNT, 4096, 4),), [box + FIRST * 1024 + lane * 4], parity)
    for i in gl.static_range(COUNT):
        first, second = _packed(found[4 * i], found[4 * i + 1]), _packed(found[4 * i + 2], found[4 * i + 3])
        work.x.index(FIRST + i).store(gl.join(first, second).reshape((16, 32)))


@gluon.jit
def _packed(low, high):
    """Words of two bf16 numbers, given as fp32."""
    return ((low.to(gl.int32, bitcast=True) >> 16) & 65535) | (high.to(gl.int32, bitcast=True) & -65536)


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
def _put_block(ring, n, weights, first, block, parts, turn, LOADS: gl.constexpr):
    """Load block `block` of a weight that begins at `first`: eight rows of `parts` parts, beginning with part
    `turn`."""
    units = parts * (PART // UNIT)
    first += block * 8 * units
    for i in range(parts):
        part = i + turn
        part = gl.where(part < parts, part, part - parts)
        n = _put(ring, n, weights, first + part * (PART // UNIT), units, LOADS)
    return n


@gluon.constexpr_function
def _keys_of(D):
    """Keys in a tile: with their values they fill a slot."""
    return 4096 // D


@gluon.jit
def _place(work, layer, tile, KEYS: gl.constexpr):
    """The row of the first key of a tile of the program's group, in the cache's matrix."""
    page = gl.load(work.row.table + tile * KEYS // 64)
    group = gl.program_id(0) // _MEMBERS
    return page * work.cache.page_stride + layer * work.cache.layer_stride + group * 64 + tile * KEYS % 64


@gluon.jit
def _put_keys(work, n, layer, tile, keys, LOADS: gl.constexpr):
    ring = work.ring
    KEYS: gl.constexpr = keys.block_type.shape[0]
    SLOTS: gl.constexpr = ring.full.shape[0]
    place = _place(work, layer, tile, KEYS)
    _room(ring, n, 16384, LOADS)
    slot = n % SLOTS
    tiles = reinterpret(ring.tiles, gl.bfloat16, [SLOTS * 2, KEYS, keys.block_type.shape[1]], _TILE)
    async_load(keys, [place, 0], ring.full.index(slot), tiles.index(slot * 2))
    async_load(keys, [place + work.cache.value_stride, 0], ring.full.index(slot), tiles.index(slot * 2 + 1))
    return n + 1


@gluon.jit
def _load(work, weights, keys, S: gl.constexpr, LOADS: gl.constexpr):
    """Load all operands of the program, in the order in which it multiplies them."""
    ring, row = work.ring, work.row
    pid = gl.program_id(0)
    group, member = pid // _MEMBERS, pid % _MEMBERS
    KEYS: gl.constexpr = keys.block_type.shape[0]
    Q_BLOCKS: gl.constexpr = S.Q * S.D // 128
    O_PARTS: gl.constexpr = 8 * S.Q * S.D // PART
    tiles = (gl.load(row.lengths) + row.skip) // KEYS + 1
    n = 0
    for layer in range(S.L):
        rows = work.model.rows + layer * 8
        q, k, v = gl.load(rows), gl.load(rows + 1), gl.load(rows + 2)
        for block in range(Q_BLOCKS + S.D // 64):
            of_kv = (block - Q_BLOCKS) * _MEMBERS + member
            kv_block = group * (S.D // 8) + of_kv % (S.D // 8)
            kv = gl.where(of_kv < S.D // 8, k, v)
            first = gl.where(block < Q_BLOCKS, q, kv)
            place = gl.where(block < Q_BLOCKS, (group * Q_BLOCKS + block) * _MEMBERS + member, kv_block)
            n = _put_block(ring, n, weights, first, place, S.H // PART, 0, LOADS)
        for tile in range(member, tiles, _MEMBERS):
            n = _put_keys(work, n, layer, tile, keys, LOADS)
        o, gate, up, down = gl.load(rows + 3), gl.load(rows + 4), gl.load(rows + 5), gl.load(rows + 6)
        for block in range(S.H // 1024):
            n = _put_block(ring, n, weights, o, block * PROGRAMS + pid, O_PARTS, pid % O_PARTS, LOADS)
        for block in range(2 * (S.I // 1024)):
            first = gl.where(block < S.I // 1024, gate, up)
            place = (block % (S.I // 1024)) * PROGRAMS + pid
            n = _put_block(ring, n, weights, first, place, S.H // PART, 0, LOADS)
        for block in range(S.H // 1024):
            turn = pid % (S.I // PART)
            n = _put_block(ring, n, weights, down, block * PROGRAMS + pid, S.I // PART, turn, LOADS)


# --- The warps that compute


@gluon.jit
def _pairs(words):
    """The bf16 numbers in words, even ones and odd ones, in fp32."""
    return (words << 16).to(gl.float32, bitcast=True), (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _words(address, place, count: gl.constexpr):
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


@gl._core.builtin
def multiply_add(x, w, sums, _semantic=None):
    """sums + x * w by tensor cores, with words of two bf16 numbers, [8, 16, 32] each in _TILES.

    For every two words of a thread, a warp multiplies eight rows of x by eight columns of w, 16 numbers each. Lanes 4 i
    to 4 i + 3 hold row i and column i, which belong together: only products of a row with its own column are wanted. Of
    four words, a thread's first two sums are those of its lane's row with columns 2 * (its lane % 4) and the next. The
    other two are zero.
    """
    kind = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    d = "{$0, $1, $2, $3}"
    first, second = (f"{kind} {d}, {{${i}, z, ${i + 1}, z}}, {{${i + 4}, ${i + 5}}}, {d};" for i in (4, 6))
    return tl_core.inline_asm_elementwise(
        f"{{.reg .b32 z; mov.b32 z, 0; {first} {second}}}",
        "=f,=f,=f,=f," + "r," * 8 + "0,1,2,3",
        [x, w, sums],
        gl.float32,
        is_pure=False,
        pack=4,
        _semantic=_semantic,
    )


@gluon.jit
def _products(work, n, blocks, half, parts, turn):
    """Sums of blocks of eight rows times x, which has 1024 columns in each of `parts` parts, from part `turn` on.

    From block `half` on, rows use the second half of work.sums.
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
            x = work.x.index(part).load(gl.SliceLayout(0, _TILES))
            await_full(ring.full, n)
            sums = multiply_add(x[None, :, :], tiles.index(n % SLOTS).load(_TILES), sums)
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
    """Rounded products, from the sums of threads."""
    return rounded(gl.sum(sums.load(_SUMS), axis=1), _BF16)


@gluon.jit
def _attend(work, n, layer, last, cos, sin, parity, epsilon, scale, S: gl.constexpr):
    """Attention of the program's tiles, the merge of its columns, and all heads' columns as x. cos, sin [D / 2], in the
    order of `_halves`. Returns the number of tiles."""
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
    halves: gl.constexpr = _halves(D)
    score: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [2, _WARPS // 2, 1], [1, 2, 0])
    mix: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [32 * _WARPS // D, 1, D // 32], [1, 2, 0])
    own: gl.constexpr = gl.SliceLayout(1, mix)
    merge: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, _WARPS], [0, 1])

    # q, k and v: norms and rotary, in halves of a head
    head, column = gl.arange(0, HEADS, gl.SliceLayout(1, halves)), gl.arange(0, D // 2, gl.SliceLayout(0, halves))
    if S.QK_NORM:
        words: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [_WARPS, 1], [1, 0])
        of = gl.arange(0, HEADS, gl.SliceLayout(1, words))
        norms = work.model.norms + layer * 4
        norm = gl.where(of < Q, gl.load(norms + 2), gl.load(norms + 3))[:, None]
        place = gl.arange(0, D // 4, gl.SliceLayout(0, words))[None, :]
        left_weight, right_weight = _words(norm, place, D // 2), _words(norm, place + D // 4, D // 2)
    box = boxes.qkv + group * (QD + 2 * D) + gl.minimum(head, Q + 1)[:, None] * D + column[None, :]
    left, right = receive(((0, 2, 2 * D, 1),), [box], gl.zeros(box.shape, gl.int32, halves) + parity)
    left, right = _received(left), _received(right)
    is_value = (head > Q)[:, None]
    if S.QK_NORM:
        factor = gl.rsqrt(gl.sum(left * left + right * right, axis=1) / D + epsilon)[:, None]
        normed = rounded(rounded(left * factor, _BF16) * _numbers(left_weight, halves), _BF16)
        left = gl.where(is_value, left, normed)
        normed = rounded(rounded(right * factor, _BF16) * _numbers(right_weight, halves), _BF16)
        right = gl.where(is_value, right, normed)
    turned = rounded(rounded(left * cos, _BF16) - rounded(right * sin, _BF16), _BF16)
    turned_right = rounded(rounded(right * cos, _BF16) + rounded(left * sin, _BF16), _BF16)
    left, right = gl.where(is_value, left, turned), gl.where(is_value, right, turned_right)
    heads.store(gl.join(left, right).permute((0, 2, 1)).reshape((HEADS, D)))
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
    for tile in range(member, last // KEYS + 1, _MEMBERS):
        new = last - tile * KEYS  # the new row, in this tile or after it
        await_full(ring.full, n)
        keys = tiles.index(n % SLOTS * 2).load(gl.SliceLayout(0, score)).to(gl.float32)
        keys = gl.where(of_key == new, key, keys)
        scores = gl.sum(keys[None, :, :] * queries[:, None, :], axis=2) * scale
        work.scores.index(n % 2).store(gl.where(of_score <= new, scores, _LOWEST))
        debug_barrier()
        values = tiles.index(n % SLOTS * 2 + 1).load(gl.SliceLayout(0, mix)).to(gl.float32)
        values = gl.where(of_value < new, values, gl.where(of_value == new, value, 0.0))
        scores = work.scores.index(n % 2).load(gl.SliceLayout(2, mix))
        before = largest
        largest = gl.maximum(before, gl.max(scores, axis=1))
        softmax = gl.exp2(scores - largest[:, None])
        share = gl.exp2(before - largest)
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
        new = (_place(work, layer, last // KEYS, KEYS) + last % KEYS).to(gl.int64)
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
    mixed, largest, total = receive(((0, 1, 0, 1), (1, 1, 0, 2)), [box, of_softmax], expected)
    largest = _received(largest)
    share = gl.exp2(largest - gl.max(largest, axis=0)[None, :])
    merged = gl.sum(_received(mixed) * share, axis=0) / gl.sum(_received(total) * share, axis=0)
    box = boxes.heads + group * QD + column
    gl.store(box, _sent(rounded(merged, _BF16), parity), eviction_policy="evict_last")
    _receive_columns(boxes.heads, work, gl.zeros((256,), gl.int32, line) + parity, 8 * QD // 1024)
    return n - first


@gluon.constexpr_function
def _halves(D):
    """The layout of heads [heads, D / 2], by halves of a head."""
    return gl.SliceLayout(1, gl.BlockedLayout([1, 2, D // 64], [1, 1, 32], [8, 1, 1], [2, 1, 0]))


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
    zero = gl.zeros((256,), gl.int32, line)
    place = gl.arange(0, work.sums.shape[1], gl.SliceLayout(1, _SUMS))
    own_rows = (place // 8 * PROGRAMS + pid) * 8 + place % 8
    of_q = place < 8 * Q_BLOCKS
    qkv_rows = (gl.where(of_q, place // 8, place // 8 - Q_BLOCKS) * _MEMBERS + member) * 8 + place % 8
    qkv_rows += group * (QD + 2 * S.D) + gl.where(of_q, 0, QD)
    step = gl.load(boxes.step)
    last = gl.load(row.lengths) + row.skip
    angle = last.to(gl.float32) * gl.load(model.inv_freq + gl.arange(0, S.D // 2, gl.SliceLayout(0, _halves(S.D))))
    cos, sin = cos_sin(angle)
    cos = rounded(cos * model.rotary_scaling, _BF16)[None, :]
    sin = rounded(sin * model.rotary_scaling, _BF16)[None, :]
    token = gl.load(row.token)
    columns = gl.arange(0, _filled(H), hidden)
    h = gl.load(model.embedding + token * H + columns, mask=columns < H, other=0.0).to(gl.float32)
    n = 0
    for phase in range(4 * S.L):
        layer, kind = phase // 4, phase % 4
        parity = (step * S.L + layer + 1) & 1
        if kind % 2 == 0:
            weight = _words(gl.load(model.norms + layer * 4 + kind // 2), words, H // 2)
            if phase > 0:
                box = gl.where(kind == 0, boxes.down, boxes.o)
                of = gl.where(kind == 0, parity ^ 1, parity)
                h = rounded(h + _receive_hidden(box, zero + of, H, hidden), _BF16)
            _put_columns(work, _normed(h, _numbers(weight, hidden), epsilon, H))
        elif kind == 1:
            n += _attend(work, n, layer, last, cos, sin, parity, epsilon, scale, S)
        else:
            _receive_columns(boxes.act, work, zero + parity, S.I // 1024)
        debug_barrier()
        parts = gl.where(kind % 2 == 0, H // 1024, gl.where(kind == 1, 8 * QD // 1024, S.I // 1024))
        of_qkv: gl.constexpr = Q_BLOCKS + S.D // 64
        blocks = gl.where(kind == 0, of_qkv, gl.where(kind == 2, S.I // 512, H // 1024))
        half = gl.where(kind == 2, S.I // 1024, work.sums.shape[1] // 8)
        n = _products(work, n, blocks, half, parts, gl.where(kind % 2 == 0, 0, pid % parts))
        total = _complete(work.sums.index(0))
        box, where, used = gl.where(kind == 1, boxes.o, boxes.down), own_rows, 8 * blocks
        if kind == 0:
            box, where = boxes.qkv, qkv_rows
        elif kind == 2:
            up = _complete(work.sums.index(1))
            total = rounded(rounded(total / (1.0 + gl.exp(-total)), _BF16) * up, _BF16)
            box, used = boxes.act, 8 * half
        gl.store(box + where, _sent(total, parity), mask=place < used, eviction_policy="evict_last")

    if pid == 0:
        weight = _words(model.norm, words, H // 2)
        h = rounded(h + _receive_hidden(boxes.down, zero + ((step * S.L + S.L) & 1), H, hidden), _BF16)
        normed = _normed(h, _numbers(weight, hidden), epsilon, H)
        gl.store(row.hidden + columns, h.to(gl.bfloat16), mask=columns < H)
        gl.store(row.normed + columns, normed.to(gl.bfloat16), mask=columns < H)
        gl.store(boxes.step, step + 1)


@gluon.jit
def one_launch_kernel(
    weights,
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

    weights: descriptor of the matrix over all weights, [rows, UNIT], in tiles of a row's part. keys: the cache's, in
    tiles [keys, D]. scale: of scores, for powers of two. SLOTS: of the ring, 16 KiB each. LOADS: the most in flight.
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
    gl.warp_specialize([(_compute, (work, epsilon, scale, S)), (_load, (work, weights, keys, S, LOADS))], [1], [40])
