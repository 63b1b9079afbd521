"""The kernel of tools/one_launch_step.py, the same step in PyTorch, and its times.

128 programs stay for the whole step. In each, one warp streams the program's share of all weights, and its keys and
values, through a ring in shared memory: weights depend on nothing, so it waits for a free slot only. Eight warps
compute. A layer is four phases, which share the code of their products:

    0  residual, norm                                    x [H]      -> q, k, v
    1  norms of heads, rotary, attention, its merge      x [8 * QD] -> o
    2  residual, norm                                    x [H]      -> gate, up, SwiGLU
    3                                                    x [I]      -> down

A program makes whole rows of a product, eight at a time (a block), so no sum crosses programs. It attends 1/16 of the
keys for one of eight groups of heads, and merges 1/16 of that group's columns.

Between phases values go from programs to programs through mailboxes in global memory, without barriers: a value is an
fp32 number whose last bit says for which layer it is (odd or even), and a reader loads until all its bits are right.
What is sent is bf16 numbers, which lose nothing by that, and the parts of attention, which lose their last bit. A
mailbox is used once in a layer, and its next writers have waited for all of its readers in between.

The whole of it is some 60 KiB of code, and should stay so: see docs/speed-notes.md, "One launch".
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language.core as tl_core
from torch import Tensor

from eagle_triton.models.shapes import SHAPES
from eagle_triton.ops.linear.gluon_tiles import (
    TILE_LAYOUT,
    await_full,
    await_read,
    barriers,
    descriptor,
    give_back,
    rounded,
)
from eagle_triton.runtime.gluon import (
    async_load,
    debug_barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
)

CONTEXT = 512  # keys, the new one included
PROGRAMS = gl.constexpr(128)
EPSILON = 1e-6
_GROUPS, _MEMBERS = gl.constexpr(8), gl.constexpr(16)  # heads of keys, and programs for each
_WARPS = gl.constexpr(8)
_TILE = gl.constexpr(TILE_LAYOUT)
_WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
_PARTS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_CLOCK = gl.constexpr("mov.u32 $0, %clock;")
_PHASES = ("wait, residual", "norm", "product", "send")
_TRIES = 1 << 16  # of a reader: a fault gives wrong numbers instead of a launch that never ends
_BF16 = gl.constexpr(gl.bfloat16)


class Sizes(NamedTuple):
    """Of a model: hidden size, query heads for each of eight heads of keys, their size, intermediate size, layers,
    vocabulary; whether query and key heads have norms."""

    H: int
    Q: int
    D: int
    I: int  # noqa: E741
    L: int
    V: int
    QK_NORM: bool


def sizes_of(shape: str) -> Sizes:
    found = SHAPES[shape]
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    dim = found.get("head_dim", hidden // heads)
    sizes = Sizes(
        *(hidden, heads // found["num_key_value_heads"], dim, found["intermediate_size"]),
        *(found["num_hidden_layers"], found["vocab_size"], found.get("model_type") == "qwen3"),
    )
    assert found["num_key_value_heads"] == 8 and sizes.Q * sizes.D == 256 and hidden in (1024, 2048)
    return sizes


class Weights(NamedTuple):
    """TMA descriptors of the matrices of all layers, one below another, and of keys and values [L * 8 * CONTEXT, D]."""

    qkv: Any
    cached_keys: Any
    cached_values: Any
    o: Any
    gate: Any
    up: Any
    down: Any
    head: Any


class Vectors(NamedTuple):
    """What is read by its address: embeddings [V, H], norms [L, H], [H] and [L, D], and the caches, in bf16; rotary's
    cosines and sines [D / 2] in fp32."""

    embed: Tensor
    norm1: Tensor
    norm2: Tensor
    norm: Tensor
    q_norm: Tensor
    k_norm: Tensor
    cos: Tensor
    sin: Tensor
    key_cache: Tensor
    value_cache: Tensor


class Mailboxes(NamedTuple):
    """What programs send, int32: q, k, v of a group; parts of its attention, with their maximum and sum; all heads;
    the other products; the best token of each program. Then the token, the step's number, logits [V] in fp32, and
    clocks [PROGRAMS, 64]."""

    qkv: Tensor
    parts: Tensor
    softmax: Tensor
    heads: Tensor
    o: Tensor
    act: Tensor
    down: Tensor
    best: Tensor
    token: Tensor
    step: Tensor
    logits: Tensor
    clocks: Tensor


class Ring(NamedTuple):
    """Slots of [8, 1024] weights, each with a barrier that says it is full and one that says it has been read."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    read: gl.shared_memory_descriptor


class Work(NamedTuple):
    """What a program works with. In shared memory: the ring; x, even and odd columns apart, 512 of each in a row; the
    products' sums [2, 64, 4 * warps], of each row those of the threads that share it; the heads of a group [4 or 8, D],
    its queries, its new key and its new value; weights of softmax [Q, keys]."""

    ring: Ring
    even: gl.shared_memory_descriptor
    odd: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    heads: gl.shared_memory_descriptor
    softmax: gl.shared_memory_descriptor
    vectors: Vectors
    boxes: Mailboxes


# --- Sending and receiving


def _receiving(loads: Sequence[tuple[int, int, int, int]]) -> tuple[str, str, tuple[Any, ...]]:
    """PTX that loads until the last bits of all values are those of the last operand, with its constraints and the
    types of what it gives. loads: (operand with the address, how many loads, bytes from one to the next, values of
    one)."""
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
    lines += ["and.pred p, p, q;", "@p bra AGAIN;"]
    constraints = ",".join(["=&r"] * outputs + ["l"] * pointers + ["r"])
    return "{" + "\n".join(lines) + "}", constraints, (gl.int32,) * outputs


@gl._core.builtin
def receive(loads, pointers, parity, _semantic=None):
    """Tensors of int32, as _receiving's PTX loads them, of the pointers' shape."""
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
    """[n] each as [n, 2, 2], in this order."""
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def _receive_hidden(box, parity, H: gl.constexpr, layout: gl.constexpr):
    """[H] in registers."""
    lane = gl.arange(0, 256, parity.type.layout)
    found = receive(((0, H // 1024, 4096, 4),), [box + lane * 4], parity)
    values = _four(found[0], found[1], found[2], found[3])
    if H == 2048:
        values = gl.join(values, _four(found[4], found[5], found[6], found[7])).permute((3, 0, 1, 2))
    return gl.convert_layout(_received(values).reshape((H,)), layout)


@gluon.jit
def _receive_columns(box, work, parity, COUNT: gl.constexpr):
    """[COUNT * 1024] as x."""
    lane = gl.arange(0, 256, parity.type.layout)
    found = receive(((0, COUNT, 4096, 4),), [box + lane * 4], parity)
    for i in gl.static_range(COUNT):
        even = _received(gl.join(found[4 * i], found[4 * i + 2])).reshape((512,))
        odd = _received(gl.join(found[4 * i + 1], found[4 * i + 3])).reshape((512,))
        work.even.index(i).store(even)
        work.odd.index(i).store(odd)


# --- The warp that loads


@gluon.jit
def _wait_a_while(CYCLES: gl.constexpr):
    start = gl.inline_asm_elementwise(_CLOCK, "=r", [], gl.int32, is_pure=False, pack=1)
    now = start
    while now - start < CYCLES:
        now = gl.inline_asm_elementwise(_CLOCK, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _room(ring, n, bytes, LOADS: gl.constexpr):
    """Wait until the slot of load n has been read, and until fewer than LOADS loads are in flight; expect bytes.

    More loads in flight fill the memory's queues, and what programs send to each other waits in them.
    """
    await_read(ring.read, n)
    mbarrier.wait(
        ring.full.index((n + ring.full.shape[0] - LOADS) % ring.full.shape[0]),
        (n - LOADS) // ring.full.shape[0] & 1,
        pred=n >= LOADS,
    )
    mbarrier.expect(ring.full.index(n % ring.full.shape[0]), bytes)


@gluon.jit
def _put(ring, n, desc, row, column, LOADS: gl.constexpr, PACE: gl.constexpr):
    _room(ring, n, desc.block_type.nbytes, LOADS)
    slot = n % ring.full.shape[0]
    async_load(desc, [row, column], ring.full.index(slot), ring.tiles.index(slot))
    if PACE > 0:
        _wait_a_while(PACE)
    return n + 1


@gluon.jit
def _put_keys(ring, n, keys, values, row, LOADS: gl.constexpr):
    KEYS: gl.constexpr = keys.block_type.shape[0]
    D: gl.constexpr = keys.block_type.shape[1]
    SLOTS: gl.constexpr = ring.full.shape[0]
    EACH: gl.constexpr = 8192 // (KEYS * D)
    _room(ring, n, 2 * keys.block_type.nbytes, LOADS)
    slot = n % SLOTS
    tiles = reinterpret(ring.tiles, gl.bfloat16, [SLOTS * EACH, KEYS, D], _TILE)
    async_load(keys, [row, 0], ring.full.index(slot), tiles.index(slot * EACH))
    async_load(values, [row, 0], ring.full.index(slot), tiles.index(slot * EACH + 1))
    return n + 1


@gluon.jit
def _load(ring, weights, S: gl.constexpr, T: gl.constexpr, LOADS: gl.constexpr, PACE: gl.constexpr):
    """All that the program multiplies, in the order in which it does."""
    pid = gl.program_id(0)
    group, member = pid // _MEMBERS, pid % _MEMBERS
    QD: gl.constexpr = S.Q * S.D
    ROWS: gl.constexpr = 8 * (QD + 2 * S.D)  # of q, k and v
    n = 0
    for layer in range(S.L):
        for block in range(QD // 128 + S.D // 64):
            of_kv = (block - QD // 128) * _MEMBERS + member
            of_kv = 8 * QD + group * S.D + of_kv * 8 + gl.where(of_kv < S.D // 8, 0, 7 * S.D)
            row = gl.where(block < QD // 128, group * QD + (block * _MEMBERS + member) * 8, of_kv)
            for part in range(S.H // 1024):
                n = _put(ring, n, weights.qkv, layer * ROWS + row, part * 1024, LOADS, PACE)
        n = _put_keys(
            ring, n, weights.cached_keys, weights.cached_values, (layer * 8 + group) * T + member * (T // 16), LOADS
        )
        for block in range(S.H // 1024):
            row = layer * S.H + (block * PROGRAMS + pid) * 8
            for part in range(8 * QD // 1024):
                n = _put(ring, n, weights.o, row, (part + pid) % (8 * QD // 1024) * 1024, LOADS, PACE)
        for block in range(S.I // 1024):
            for part in range(S.H // 1024):
                n = _put(ring, n, weights.gate, layer * S.I + (block * PROGRAMS + pid) * 8, part * 1024, LOADS, PACE)
        for block in range(S.I // 1024):
            for part in range(S.H // 1024):
                n = _put(ring, n, weights.up, layer * S.I + (block * PROGRAMS + pid) * 8, part * 1024, LOADS, PACE)
        for block in range(S.H // 1024):
            row = layer * S.H + (block * PROGRAMS + pid) * 8
            for part in range(S.I // 1024):
                n = _put(ring, n, weights.down, row, (part + pid) % (S.I // 1024) * 1024, LOADS, PACE)
    for block in range(pid, S.V // 8, PROGRAMS):
        for part in range(S.H // 1024):
            n = _put(ring, n, weights.head, block * 8, part * 1024, LOADS, 0)


# --- The warps that compute


@gluon.jit
def _stamp(boxes, zero, layer, place, L: gl.constexpr, CLOCKS: gl.constexpr):
    """Write the clock, in the layer in the middle and outside of layers."""
    if CLOCKS:
        now = gl.inline_asm_elementwise(_CLOCK, "=r,r", [zero], gl.int32, is_pure=False, pack=1)
        lane = gl.arange(0, 256, zero.type.layout)
        wanted = (layer == L // 2) | (layer < 0)
        gl.store(boxes.clocks + gl.program_id(0) * 64 + place + lane, now, mask=(lane == 0) & wanted)


@gluon.jit
def _pairs(words):
    """The bf16 numbers of words, even ones and odd ones, in fp32."""
    return (words << 16).to(gl.float32, bitcast=True), (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _vector(ptr, words):
    """A norm's weights as words. Nothing waits for them before they are used."""
    return gl.load(ptr.to(gl.pointer_type(gl.int32), bitcast=True) + words)


@gluon.jit
def _numbers(words, layout: gl.constexpr):
    even, odd = _pairs(words)
    if len(words.shape) == 1:
        values = gl.join(even, odd).reshape((2 * words.shape[0],))
    else:
        values = gl.join(even, odd).reshape((words.shape[0], 2 * words.shape[1]))
    return gl.convert_layout(values, layout)


@gluon.jit
def _store_columns(rows, columns):
    """[512] or [1024] into the first rows."""
    if columns.shape[0] == 512:
        rows.index(0).store(columns)
    else:
        first, second = columns.reshape((2, 512)).permute((1, 0)).split()
        rows.index(0).store(first)
        rows.index(1).store(second)


@gluon.jit
def _put_normed(work, h, weight, epsilon):
    """h [H] with its norm's weight, as x."""
    HALF: gl.constexpr = h.shape[0] // 2
    normed = rounded(h * gl.rsqrt(gl.sum(h * h, axis=0) / h.shape[0] + epsilon), _BF16)
    even, odd = rounded(normed * weight, _BF16).reshape((HALF, 2)).split()
    _store_columns(work.even, even)
    _store_columns(work.odd, odd)


@gluon.jit
def _products(work, n, blocks, half, parts, first):
    """Sums of blocks of eight rows by x, which has 1024 columns in each of `parts` parts, the first one first.

    From block `half` on, rows are those of the second half of work.sums.
    """
    ring = work.ring
    SLOTS: gl.constexpr = ring.full.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, _WARPS], [0, 1])
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    tiles = reinterpret(ring.tiles, gl.int32, [SLOTS, 8, 512], _WORDS)
    rows = reinterpret(work.sums, gl.float32, [16, 8, 4 * _WARPS], _PARTS)
    for block in range(blocks):
        acc = gl.zeros((8, 512), gl.float32, layout)
        for i in range(parts):
            part = i + first
            part = gl.where(part < parts, part, part - parts)
            even, odd = work.even.index(part).load(columns), work.odd.index(part).load(columns)
            await_full(ring.full, n)
            w_even, w_odd = _pairs(tiles.index(n % SLOTS).load(layout))
            acc += w_even * even[None, :] + w_odd * odd[None, :]
            give_back(ring.read, n)
            n += 1
        own = gl.sum(gl.sum(acc.reshape((8, 512 // (16 * _WARPS), _WARPS, 4, 4)), axis=4), axis=1)
        rows.index(gl.where(block < half, block, block - half + 8)).store(own.reshape((8, 4 * _WARPS)))
    return n


@gluon.jit
def _complete(sums):
    """Products [64] from the sums of threads, rounded."""
    layout: gl.constexpr = gl.BlockedLayout([1, _WARPS], [8, 4], [_WARPS, 1], [0, 1])
    return rounded(gl.sum(sums.load(layout), axis=1), _BF16)


@gluon.jit
def _attend(work, n, layer, parity, epsilon, scale, S: gl.constexpr, T: gl.constexpr):
    """Attention of the program's keys, the merge of its columns, and all heads' columns as x."""
    ring, boxes, vectors, heads = work.ring, work.boxes, work.vectors, work.heads
    group, member = gl.program_id(0) // _MEMBERS, gl.program_id(0) % _MEMBERS
    Q: gl.constexpr = S.Q
    D: gl.constexpr = S.D
    QD: gl.constexpr = Q * D
    KEYS: gl.constexpr = T // 16
    SLOTS: gl.constexpr = ring.full.shape[0]
    HEADS: gl.constexpr = heads.shape[0]
    line: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    halves: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 2, D // 64], [1, 1, 32], [_WARPS, 1, 1], [2, 1, 0]))
    score: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [2, _WARPS // 2, 1], [1, 2, 0])
    mix: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [32 * _WARPS // D, 1, D // 32], [1, 2, 0])
    merge: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, _WARPS], [0, 1])

    # q, k and v: norms and rotary, in halves of a head
    head, column = gl.arange(0, HEADS, gl.SliceLayout(1, halves)), gl.arange(0, D // 2, gl.SliceLayout(0, halves))
    if S.QK_NORM:
        words: gl.constexpr = gl.BlockedLayout([1, D // 128], [1, 32], [_WARPS, 1], [1, 0])
        of = gl.arange(0, HEADS, gl.SliceLayout(1, words))
        norm = gl.where(of < Q, vectors.q_norm, vectors.k_norm).to(gl.pointer_type(gl.int32), bitcast=True)[:, None]
        norm += layer * (D // 2) + gl.arange(0, D // 4, gl.SliceLayout(0, words))[None, :]
        left_weight, right_weight = gl.load(norm), gl.load(norm + D // 4)
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
    cos, sin = gl.load(vectors.cos + column)[None, :], gl.load(vectors.sin + column)[None, :]
    turned_left = gl.where(is_value, left, rounded(left * cos - right * sin, _BF16))
    turned_right = gl.where(is_value, right, rounded(right * cos + left * sin, _BF16))
    heads.store(gl.join(turned_left, turned_right).permute((0, 2, 1)).reshape((HEADS, D)))
    debug_barrier()

    # a part of the keys; the last program has the new one
    await_full(ring.full, n)
    rows = reinterpret(heads, gl.float32, [HEADS, D], _LINE)
    EACH: gl.constexpr = 8192 // (KEYS * D)
    tiles = reinterpret(ring.tiles, gl.bfloat16, [SLOTS * EACH, KEYS, D], _TILE)
    keys = tiles.index(n % SLOTS * EACH).load(gl.SliceLayout(0, score)).to(gl.float32)
    is_new = member * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, gl.SliceLayout(0, score))) == T - 1
    new = rows.index(Q).load(gl.SliceLayout(0, gl.SliceLayout(0, score)))
    keys = gl.where(is_new[:, None], new[None, :], keys)
    queries = heads.slice(0, Q, 0).load(gl.SliceLayout(1, score))
    scores = gl.sum(keys[None, :, :] * queries[:, None, :], axis=2) * scale
    largest = gl.max(scores, axis=1)
    softmax = gl.exp2(scores - largest[:, None])
    box = boxes.softmax + ((group * 16 + member) * Q + gl.arange(0, Q, largest.type.layout)) * 2
    gl.store(box, _sent(largest, parity), eviction_policy="evict_last")
    gl.store(box + 1, _sent(gl.sum(softmax, axis=1), parity), eviction_policy="evict_last")
    work.softmax.store(rounded(softmax, _BF16))
    debug_barrier()
    values = tiles.index(n % SLOTS * EACH + 1).load(gl.SliceLayout(0, mix)).to(gl.float32)
    is_new = member * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, gl.SliceLayout(0, mix))) == T - 1
    new = rows.index(Q + 1).load(gl.SliceLayout(0, gl.SliceLayout(0, mix)))
    values = gl.where(is_new[:, None], new[None, :], values)
    mixed = gl.sum(work.softmax.load(gl.SliceLayout(2, mix))[:, :, None] * values[None, :, :], axis=1)
    give_back(ring.read, n)
    own: gl.constexpr = gl.SliceLayout(1, mix)
    where = gl.arange(0, Q, gl.SliceLayout(1, own))[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, own))[None, :]
    gl.store(boxes.parts + (group * 16 + member) * QD + where, _sent(mixed, parity), eviction_policy="evict_last")
    if member == _MEMBERS - 1:
        lane = gl.arange(0, 256, line)
        new_rows = reinterpret(heads, gl.float32, [HEADS * D], _LINE).slice(QD, 256).load(line)
        cache = gl.where(lane < D, vectors.key_cache, vectors.value_cache)
        cache += ((layer * 8 + group) * T + T - 1) * D + lane % D
        gl.store(cache, new_rows.to(gl.bfloat16), mask=lane < 2 * D)

    # the group's parts, 1 / 16 of its columns
    part = gl.arange(0, 16, gl.SliceLayout(1, merge))
    column = member * (QD // 16) + gl.arange(0, 16, gl.SliceLayout(0, merge))
    box = boxes.parts + (group * 16 + part[:, None]) * QD + column[None, :]
    of_softmax = boxes.softmax + ((group * 16 + part[:, None]) * Q + column[None, :] // D) * 2
    expected = gl.zeros((16, 16), gl.int32, merge) + parity
    mixed, largest, total = receive(((0, 1, 0, 1), (1, 1, 0, 2)), [box, of_softmax], expected)
    largest = _received(largest)
    share = gl.exp2(largest - gl.max(largest, axis=0)[None, :])
    merged = gl.sum(_received(mixed) * share, axis=0) / gl.sum(_received(total) * share, axis=0)
    box = boxes.heads + group * QD + column
    gl.store(box, _sent(rounded(merged, _BF16), parity), eviction_policy="evict_last")
    _receive_columns(boxes.heads, work, gl.zeros((256,), gl.int32, line) + parity, 8 * QD // 1024)


@gluon.jit
def _compute(work, epsilon, scale, S: gl.constexpr, T: gl.constexpr, CLOCKS: gl.constexpr):
    """All phases of all layers, the head, and the choice of the token."""
    vectors, boxes = work.vectors, work.boxes
    pid = gl.program_id(0)
    group, member = pid // _MEMBERS, pid % _MEMBERS
    H: gl.constexpr = S.H
    QD: gl.constexpr = S.Q * S.D
    Q_BLOCKS: gl.constexpr = QD // 128
    line: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    hidden: gl.constexpr = gl.BlockedLayout([4], [32], [_WARPS], [0])
    of_sums: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, _WARPS], [8, 4], [_WARPS, 1], [0, 1]))
    words = gl.arange(0, H // 2, gl.BlockedLayout([2], [32], [_WARPS], [0]))
    zero = gl.zeros((256,), gl.int32, line)
    row = gl.arange(0, 64, of_sums)
    own_rows = (row // 8 * PROGRAMS + pid) * 8 + row % 8
    q_row = row < 8 * Q_BLOCKS
    qkv_rows = (gl.where(q_row, row // 8, row // 8 - Q_BLOCKS) * _MEMBERS + member) * 8 + row % 8
    qkv_rows += group * (QD + 2 * S.D) + gl.where(q_row, 0, QD)
    step = gl.load(boxes.step)
    token = gl.load(boxes.token).to(gl.int64)
    h = gl.load(vectors.embed + token * H + gl.arange(0, H, hidden)).to(gl.float32)
    _stamp(boxes, zero, -1, 16, S.L, CLOCKS)
    n = 0
    for phase in range(4 * S.L):
        layer, kind = phase // 4, phase % 4
        parity = (step * S.L + layer + 1) & 1
        _stamp(boxes, zero, layer, 4 * kind, S.L, CLOCKS)
        if kind % 2 == 0:
            weight = _vector(gl.where(kind == 0, vectors.norm1, vectors.norm2) + layer * H, words)
            if phase > 0:
                box = gl.where(kind == 0, boxes.down, boxes.o)
                of = gl.where(kind == 0, parity ^ 1, parity)
                h = rounded(h + _receive_hidden(box, zero + of, H, hidden), _BF16)
            _stamp(boxes, zero, layer, 4 * kind + 1, S.L, CLOCKS)
            _put_normed(work, h, _numbers(weight, hidden), epsilon)
        elif kind == 1:
            _attend(work, n, layer, parity, epsilon, scale, S, T)
            n += 1
        else:
            _receive_columns(boxes.act, work, zero + parity, S.I // 1024)
        debug_barrier()
        _stamp(boxes, zero, layer, 4 * kind + 2, S.L, CLOCKS)
        parts = gl.where(kind % 2 == 0, H // 1024, gl.where(kind == 1, 8 * QD // 1024, S.I // 1024))
        of_qkv: gl.constexpr = Q_BLOCKS + S.D // 64
        blocks = gl.where(kind == 0, of_qkv, gl.where(kind == 2, S.I // 512, H // 1024))
        half = gl.where(kind == 2, S.I // 1024, 8)
        n = _products(work, n, blocks, half, parts, gl.where(kind % 2 == 0, 0, pid % parts))
        _stamp(boxes, zero, layer, 4 * kind + 3, S.L, CLOCKS)
        total = _complete(work.sums.index(0))
        box, where, used = gl.where(kind == 1, boxes.o, boxes.down), own_rows, 8 * blocks
        if kind == 0:
            box, where = boxes.qkv, qkv_rows
        elif kind == 2:
            up = _complete(work.sums.index(1))
            total = rounded(rounded(total / (1.0 + gl.exp(-total)), _BF16) * up, _BF16)
            box, used = boxes.act, 8 * half
        gl.store(box + where, _sent(total, parity), mask=row < used, eviction_policy="evict_last")

    last = (step * S.L + S.L) & 1
    h = rounded(h + _receive_hidden(boxes.down, zero + last, H, hidden), _BF16)
    _stamp(boxes, zero, -1, 17, S.L, CLOCKS)
    _put_normed(work, h, _numbers(_vector(vectors.norm, words), hidden), epsilon)
    debug_barrier()
    best = gl.full((64,), -float("inf"), gl.float32, of_sums)
    best_row = gl.zeros((64,), gl.int32, of_sums)
    count = (S.V // 8 - pid + PROGRAMS - 1) // PROGRAMS
    for block in range(0, count, 8):
        blocks = gl.minimum(8, count - block)
        n = _products(work, n, blocks, 8, H // 1024, 0)
        logits = _complete(work.sums.index(0))
        where = block * PROGRAMS * 8 + own_rows
        gl.store(boxes.logits + where, logits, mask=row < 8 * blocks)
        better = (logits > best) & (row < 8 * blocks)
        best, best_row = gl.where(better, logits, best), gl.where(better, where, best_row)
    _stamp(boxes, zero, -1, 18, S.L, CLOCKS)
    parity = (step + 1) & 1
    top = gl.max(best, axis=0)
    gl.store(boxes.best + pid * 2, (top.to(gl.int32, bitcast=True) & -2) | parity)
    gl.store(boxes.best + pid * 2 + 1, gl.min(gl.where(best == top, best_row, S.V), axis=0) * 2 | parity)
    if pid == 0:
        lane = gl.arange(0, 256, line) % PROGRAMS
        found, found_row = receive(((0, 1, 0, 2),), [boxes.best + lane * 2], zero + parity)
        found = _received(found)
        gl.store(boxes.token, gl.min(gl.where(found == gl.max(found, axis=0), found_row >> 1, S.V), axis=0))
        gl.store(boxes.step, step + 1)


@gluon.jit
def step_kernel(
    qkv,
    cached_keys,
    cached_values,
    o,
    gate,
    up,
    down,
    head,
    vectors: Vectors,
    boxes: Mailboxes,
    epsilon,
    scale,
    S: gl.constexpr,
    T: gl.constexpr,
    SLOTS: gl.constexpr,
    LOADS: gl.constexpr,
    PACE: gl.constexpr,
    CLOCKS: gl.constexpr,
):
    """Grid (PROGRAMS,), one on each multiprocessor. The first eight arguments are Weights: Triton's launcher finds no
    descriptors in tuples. T: keys, the new one included. SLOTS: of the ring."""
    X: gl.constexpr = max(S.I, S.H, 8 * S.Q * S.D) // 1024
    ring = Ring(gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 8, 1024], _TILE), barriers(SLOTS), barriers(SLOTS))
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ring.full.index(slot), count=1)
        mbarrier.init(ring.read.index(slot), count=1)
    fence_async_shared()
    sums = gl.allocate_shared_memory(gl.float32, [2, 64, 4 * _WARPS], _PARTS)
    even = gl.allocate_shared_memory(gl.float32, [X, 512], _LINE)
    odd = gl.allocate_shared_memory(gl.float32, [X, 512], _LINE)
    heads = gl.allocate_shared_memory(gl.float32, [4 if S.Q == 2 else 8, S.D], _PLAIN)
    softmax = gl.allocate_shared_memory(gl.float32, [S.Q, T // 16], _PLAIN)
    weights = Weights(qkv, cached_keys, cached_values, o, gate, up, down, head)
    work = Work(ring, even, odd, sums, heads, softmax, vectors, boxes)
    gl.warp_specialize(
        [(_compute, (work, epsilon, scale, S, T, CLOCKS)), (_load, (ring, weights, S, T, LOADS, PACE))], [1], [32]
    )


# --- A model, its steps, and their times


class Model(NamedTuple):
    """Random weights of a shape, in bf16: qkv [L, (Q + 2) * 8 * D, H], o [L, H, Q * 8 * D], gate, up, down; what is
    read by address."""

    sizes: Sizes
    qkv: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    vectors: Vectors


@functools.cache
def _model(shape: str) -> Model:
    S = sizes_of(shape)
    random = torch.Generator("cuda").manual_seed(0)

    def made(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        drawn = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0.0, scale, generator=random)
        return drawn + mean if mean else drawn

    rows = 8 * S.Q * S.D
    angles = (CONTEXT - 1) / 1e6 ** (torch.arange(0, S.D, 2, device="cuda") / S.D)
    norms = [made(*of, scale=0.1, mean=1.0) for of in ((S.L, S.H), (S.L, S.H), (S.H,), (S.L, S.D), (S.L, S.D))]
    caches = [made(S.L, 8, CONTEXT, S.D) for _ in range(2)]
    vectors = Vectors(made(S.V, S.H, scale=4 * S.H**-0.5), *norms, angles.cos(), angles.sin(), *caches)
    return Model(
        S,
        made(S.L, rows + 16 * S.D, S.H, scale=S.H**-0.5),
        made(S.L, S.H, rows, scale=rows**-0.5),
        made(S.L, S.I, S.H, scale=S.H**-0.5),
        made(S.L, S.I, S.H, scale=S.H**-0.5),
        made(S.L, S.H, S.I, scale=S.I**-0.5),
        vectors,
    )


class Steps:
    """Steps of a model by the kernel."""

    def __init__(self, shape: str, loads: int, pace: int, clocks: bool = False):
        self.model = _model(shape)
        S, v = self.model.sizes, self.model.vectors
        sizes = (8 * (S.Q + 2) * S.D, 128 * S.Q * S.D, 256 * S.Q, 8 * S.Q * S.D, S.H, S.I, S.H, 2 * 128, 1, 1)
        boxes = [torch.zeros(size, device="cuda", dtype=torch.int32) for size in sizes]
        logits = torch.full((S.V,), float("nan"), device="cuda")
        self.boxes = Mailboxes(*boxes, logits, torch.zeros(128, 64, device="cuda", dtype=torch.int32))
        tiles = [(self.model.qkv, 8, 1024), (v.key_cache, CONTEXT // 16, S.D), (v.value_cache, CONTEXT // 16, S.D)]
        tiles += [(matrix, 8, 1024) for matrix in (*self.model[2:6], v.embed)]
        descriptors = [descriptor(m.view(-1, m.shape[-1]), height, width) for m, height, width in tiles]
        scale = S.D**-0.5 * 1.4426950408889634  # for powers of two
        slots = 10 if S.I > 4096 else 11
        self.args = (*descriptors, v, self.boxes, EPSILON, scale, S, CONTEXT, slots, loads, pace, clocks)

    def __call__(self) -> None:
        step_kernel[(PROGRAMS.value,)](*self.args, num_warps=_WARPS.value)


def _reference(model: Model, token: int) -> Tensor:
    """The same step in PyTorch, rounded to bf16 where the kernel rounds: logits [V] in fp32."""
    S, v = model.sizes, model.vectors

    def product(matrix: Tensor, x: Tensor) -> Tensor:
        return (matrix.float() @ x.float()).bfloat16()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        x = x.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)).bfloat16() * weight

    def rotary(x: Tensor) -> Tensor:
        left, right = x.float().chunk(2, -1)
        return torch.cat([left * v.cos - right * v.sin, right * v.cos + left * v.sin], -1).bfloat16()

    h = v.embed[token]
    for layer in range(S.L):
        qkv = product(model.qkv[layer], norm(h, v.norm1[layer])).view(8 * (S.Q + 2), S.D)
        query, key, value = qkv.split([8 * S.Q, 8, 8])
        if S.QK_NORM:
            query, key = norm(query, v.q_norm[layer]), norm(key, v.k_norm[layer])
        keys, values = v.key_cache[layer].float(), v.value_cache[layer].float()
        keys[:, -1], values[:, -1] = rotary(key).float(), value.float()
        query = rotary(query).float().view(8, S.Q, S.D)
        attended = torch.softmax(query @ keys.mT * S.D**-0.5, -1) @ values
        h = h + product(model.o[layer], attended.reshape(-1).bfloat16())
        x = norm(h, v.norm2[layer])
        act = torch.nn.functional.silu(product(model.gate[layer], x)) * product(model.up[layer], x)
        h = h + product(model.down[layer], act)
    return product(v.embed, norm(h, v.norm)).float()


def check(shape: str, loads: int, pace: int) -> dict[str, float]:
    """The largest difference of logits in three steps, each from the token of the one before, and the largest logit.
    Raises AssertionError if a token is not that of the logits."""
    steps = Steps(shape, loads, pace)
    boxes = steps.boxes
    boxes.token.fill_(17)
    worst = largest = 0.0
    for _ in range(3):
        expected = _reference(steps.model, int(boxes.token))
        boxes.logits.fill_(float("nan"))
        steps()
        assert int(boxes.token) == int(boxes.logits.argmax())
        worst = max(worst, float((boxes.logits - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    assert worst < 0.1 * largest, f"logits differ by {worst}, and the largest is {largest}"
    return {"largest_difference": worst, "largest_logit": largest}


def times(shape: str, loads: int, pace: int, phases: bool = False) -> dict[str, Any]:
    """Milliseconds of a step, by replays of a graph of ten, and those that reading takes at 4.27 TB/s. phases: those
    of the layer in the middle instead, in microseconds at 1.98 GHz, over all programs."""
    steps = Steps(shape, loads, pace, phases)
    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            steps()
    found = []
    for _ in range(21):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 10)
    if phases:
        clocks = steps.boxes.clocks.long()
        spans = (clocks[:, 1:19] - clocks[:, :18]).float().median(0).values / 1980
        names = [f"{name} {kind}" for kind in ("qkv", "o", "gate, up", "down") for name in _PHASES]
        return {name: round(float(span), 2) for name, span in zip(names, spans, strict=False)} | {
            "layers": float(spans[16]),
            "head": float(spans[17]),
        }
    model = steps.model
    read = [*model[1:6], model.vectors.embed, model.vectors.key_cache, model.vectors.value_cache]
    floor = sum(tensor.numel() for tensor in read) * 2 / 4.27e9
    return {"ms_per_step": statistics.median(found), "ms_fastest": min(found), "floor_ms": floor}
