"""Phase 1: attention. A program attends its tiles of keys for its group of heads, and merges its columns.

The first steps are the same in all programs of a group: norms of heads, and rotary.
"""

from __future__ import annotations

import triton

from eagle_triton.ops.layers import rotary
from eagle_triton.ops.linear.gluon_tiles import await_full, give_back, rounded
from eagle_triton.ops.one_launch.loading import first_tile, row_in_cache
from eagle_triton.ops.one_launch.mailboxes import four, receive, receive_columns, received, receiving, send
from eagle_triton.ops.one_launch.operands import load_words, numbers_of
from eagle_triton.ops.one_launch.sizes import LINE, MEMBERS, THREADS, TILE, WARPS, keys_of
from eagle_triton.runtime.gluon import debug_barrier, gl, gluon, reinterpret

_BF16 = gl.constexpr(gl.bfloat16)
_LOWEST = gl.constexpr(-1e30)  # of scores: keeps its value when sent, unlike an infinity
cos_sin = gluon.jit(rotary.cos_sin.fn)


@gluon.jit
def rotation_of(model, position, S: gl.constexpr):
    """The cosine of each column of a head, and the sine of the one that rotates with it, with its sign. [1, D]."""
    column = gl.arange(0, S.D, gl.SliceLayout(0, _columns(S.D, 4)))
    rotates = column < S.R
    angle = position.to(gl.float32) * gl.load(model.inv_freq + column % (S.R // 2), mask=rotates, other=0.0)
    cos, sin = cos_sin(angle)
    cos = gl.where(rotates, rounded(cos * model.rotary_scaling, _BF16), 1.0)
    sin = gl.where(rotates, rounded(sin * model.rotary_scaling, _BF16), 0.0)
    return cos[None, :], gl.where(column < S.R // 2, -sin, sin)[None, :]


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
def attend(work, n, layer, last, rotation, parity, S: gl.constexpr):
    """Attend for row `last`, and receive the columns of all heads as x. n: the number of loads that have been read.
    Returns how many were read here."""
    _put_heads(work, layer, rotation, parity, S)
    tiles = _attend_tiles(work, n, layer, last, parity, S)
    _merge(work, parity, S)
    receive_columns(work.boxes.heads, work, gl.zeros((256,), gl.int32, THREADS) + parity, 8 * S.Q * S.D)
    return tiles


@gluon.jit
def _put_heads(work, layer, rotation, parity, S: gl.constexpr):
    """Receive the group's q, k and v, apply norms and rotary to q and k, and put all of them into work.heads. Each
    thread has four columns of a head, and the four that rotate with them."""
    D: gl.constexpr = S.D
    HEADS: gl.constexpr = work.heads.shape[0]
    columns: gl.constexpr = _columns(D, 4)
    pairs: gl.constexpr = _columns(D, 2)
    fours: gl.constexpr = _columns(D, 1)
    head, column = gl.arange(0, HEADS, gl.SliceLayout(1, fours)), gl.arange(0, D // 4, gl.SliceLayout(0, fours)) * 4
    if S.QK_NORM:
        of = gl.arange(0, HEADS, gl.SliceLayout(1, pairs))
        norms = work.model.addresses + layer * 8
        norm = gl.where(of < S.Q, gl.load(norms + 2), gl.load(norms + 3))[:, None]
        two = gl.arange(0, D // 2, gl.SliceLayout(0, pairs)) * 2
        weight = load_words(norm, two[None, :] // 2, D // 2)
        other_weight = load_words(norm, _other_of_pair(two, S.R)[None, :] // 2, D // 2)
    box = work.boxes.qkv + gl.program_id(0) // MEMBERS * (S.Q * D + 2 * D) + gl.minimum(head, S.Q + 1)[:, None] * D
    pointers = [box + column[None, :], box + _other_of_pair(column, S.R)[None, :]]
    expected = gl.zeros((HEADS, D // 4), gl.int32, fours) + parity
    found = receive(receiving(((0, 1, 0, 4), (1, 1, 0, 4))), pointers, expected)
    x = received(four(found[0], found[1], found[2], found[3]).reshape((HEADS, D)))
    other = received(four(found[4], found[5], found[6], found[7]).reshape((HEADS, D)))
    x, other = gl.convert_layout(x, columns), gl.convert_layout(other, columns)
    is_value = (gl.arange(0, HEADS, gl.SliceLayout(1, columns)) > S.Q)[:, None]
    turned = x
    if S.QK_NORM:
        factor = gl.rsqrt(gl.sum(x * x, axis=1) / D + work.model.epsilon)[:, None]
        turned = rounded(rounded(x * factor, _BF16) * numbers_of(weight, columns), _BF16)
        other = rounded(rounded(other * factor, _BF16) * numbers_of(other_weight, columns), _BF16)
    turned = rounded(rounded(turned * rotation[0], _BF16) + rounded(other * rotation[1], _BF16), _BF16)
    work.heads.store(gl.where(is_value, x, turned))
    debug_barrier()


@gluon.jit
def _attend_tiles(work, n, layer, last, parity, S: gl.constexpr):
    """Attend the program's tiles of keys, and send the result. One program of the group writes the new key and value
    into the cache."""
    ring = work.ring
    D: gl.constexpr = S.D
    KEYS: gl.constexpr = keys_of(D)
    HIGH: gl.constexpr = triton.next_power_of_2(
        S.Q
    )  # the heads of a group; with three, the fourth is the key, and is not sent
    SLOTS: gl.constexpr = ring.full.shape[0]
    score: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [2, WARPS // 2, 1], [1, 2, 0])
    mix: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [32 * WARPS // D, 1, D // 32], [1, 2, 0])
    own: gl.constexpr = gl.SliceLayout(1, mix)
    of_head: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, mix))
    rows = reinterpret(work.heads, gl.float32, [work.heads.shape[0], D], LINE)
    queries = work.heads.slice(0, HIGH, 0).load(gl.SliceLayout(1, score))
    key = rows.index(S.Q).load(gl.SliceLayout(0, gl.SliceLayout(0, score)))[None, :]
    value = rows.index(S.Q + 1).load(gl.SliceLayout(0, gl.SliceLayout(0, mix)))[None, :]
    tiles = reinterpret(ring.tiles, gl.bfloat16, [SLOTS * 2, KEYS, D], TILE)
    of_key = gl.arange(0, KEYS, gl.SliceLayout(1, gl.SliceLayout(0, score)))[:, None]
    of_score = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, score)))[None, :]
    of_value = gl.arange(0, KEYS, gl.SliceLayout(1, gl.SliceLayout(0, mix)))[:, None]
    largest = gl.full((HIGH,), _LOWEST, gl.float32, of_head)
    total = gl.zeros((HIGH,), gl.float32, of_head)
    mixed = gl.zeros((HIGH, D), gl.float32, own)
    first = n
    for tile in range(first_tile(work, layer, last, S), last // KEYS + 1, MEMBERS):
        new = last - tile * KEYS  # the new row, in this tile or after it
        await_full(ring.full, n)
        keys = tiles.index(n % SLOTS * 2).load(gl.SliceLayout(0, score)).to(gl.float32)
        keys = gl.where(of_key == new, key, keys)
        scores = gl.sum(keys[None, :, :] * queries[:, None, :], axis=2) * work.model.scale
        seen = of_score <= new
        if S.WINDOWED:
            seen &= of_score > new - gl.load(work.model.rows + layer * 8 + 7)  # its window
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
    _send_part(work, largest, total, mixed, parity, S)
    if gl.program_id(0) % MEMBERS == last // KEYS % MEMBERS:
        new = (row_in_cache(work, layer, last // KEYS, S) + last % KEYS).to(gl.int64)
        to = work.cache.ptr + new * D + gl.arange(0, D, THREADS)
        gl.store(to, rows.index(S.Q).load(THREADS).to(gl.bfloat16))
        gl.store(to + work.cache.value_stride * D, rows.index(S.Q + 1).load(THREADS).to(gl.bfloat16))
    return n - first


@gluon.jit
def _send_part(work, largest, total, mixed, parity, S: gl.constexpr):
    """Send a program's part of attention: each head's largest score, the sum of its softmax, and its columns."""
    pid = gl.program_id(0)
    own: gl.constexpr = mixed.type.layout
    head = gl.arange(0, largest.shape[0], largest.type.layout)
    box = work.boxes.softmax + (pid * S.Q + head) * 2
    send(box, largest, parity, head < S.Q)
    send(box + 1, total, parity, head < S.Q)
    head = gl.arange(0, mixed.shape[0], gl.SliceLayout(1, own))[:, None]
    column = gl.arange(0, S.D, gl.SliceLayout(0, own))[None, :]
    send(work.boxes.parts + pid * (S.Q * S.D) + head * S.D + column, mixed, parity, head < S.Q)


@gluon.jit
def _merge(work, parity, S: gl.constexpr):
    """Merge all parts of the group, in 1 / 16 of its columns, and send the result."""
    QD: gl.constexpr = S.Q * S.D
    COLUMNS: gl.constexpr = triton.next_power_of_2(QD // 16)  # if there are fewer, the last ones repeat
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, WARPS], [0, 1])
    group, member = gl.program_id(0) // MEMBERS, gl.program_id(0) % MEMBERS
    part = gl.arange(0, 16, gl.SliceLayout(1, layout))
    column = gl.minimum(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), QD // 16 - 1) + member * (QD // 16)
    box = work.boxes.parts + (group * 16 + part[:, None]) * QD + column[None, :]
    of_softmax = work.boxes.softmax + ((group * 16 + part[:, None]) * S.Q + column[None, :] // S.D) * 2
    expected = gl.zeros((16, COLUMNS), gl.int32, layout) + parity
    mixed, largest, total = receive(receiving(((0, 1, 0, 1), (1, 1, 0, 2))), [box, of_softmax], expected)
    largest = received(largest)
    share = gl.exp2(largest - gl.max(largest, axis=0)[None, :])
    merged = gl.sum(received(mixed) * share, axis=0) / gl.sum(received(total) * share, axis=0)
    send(work.boxes.heads + group * QD + column, rounded(merged, _BF16), parity)
