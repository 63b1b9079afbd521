"""A mixture's experts: all programs choose the same ones by the router's logits, and add up their outputs."""

from __future__ import annotations

from eagle_triton.ops.linear.gluon_tiles import rounded
from eagle_triton.ops.one_launch.mailboxes import receive, receive_parts, received, receiving, send, sent
from eagle_triton.ops.one_launch.sizes import CHOSEN, EXPERTS, LINE, PROGRAMS, THREADS, WARPS
from eagle_triton.runtime.gluon import gl, gluon, reinterpret

_PARTS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))


@gluon.jit
def send_logit(box, x, router, parity):
    """Send the program's logit: x [H] times its row of the router."""
    logit = rounded(gl.sum(x * router, axis=0), gl.bfloat16)
    gl.store(box + gl.program_id(0), sent(logit, parity))


@gluon.jit
def choose(box, parity):
    """Receive the router's logits, which are bf16 numbers. Return the _key of the CHOSEN largest ones, largest first.
    parity [32]."""
    lane = gl.arange(0, 32, parity.type.layout)
    a, b, c, d = receive(receiving(((0, 1, 0, 4),)), [box + lane * 4], parity)
    a, b, c, d = _key(a, lane * 4), _key(b, lane * 4 + 1), _key(c, lane * 4 + 2), _key(d, lane * 4 + 3)
    keys = ()
    for _ in gl.static_range(CHOSEN):
        key = gl.max(gl.maximum(gl.maximum(a, b), gl.maximum(c, d)), axis=0)
        keys += (key,)  # type: ignore[assignment]
        a, b, c, d = _without(a, key), _without(b, key), _without(c, key), _without(d, key)
    return keys


@gluon.jit
def _key(logit, expert):
    """An integer: the logit's bits, then those of the index. Keys have the order of logits. Of equal logits, the one
    with the lower index has the larger key."""
    bits = gl.where(received(logit) == 0.0, 0, logit)  # -0.0 equals 0.0
    bits = gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits & -65536) | (EXPERTS - 1 - expert)


@gluon.jit
def _without(keys, key):
    return gl.where(keys == key, -(2**31), keys)


@gluon.jit
def expert_of(keys, number):
    """The chosen expert number `number`."""
    key = keys[0]
    for i in gl.static_range(1, CHOSEN):
        key = gl.where(number == i, keys[i], key)
    return EXPERTS - 1 - (key & (EXPERTS - 1))


@gluon.jit
def receive_inner(work, parities, parity, S: gl.constexpr):
    """Receive the inner rows of all chosen experts as x, and put their weights into work.scores. parities [256]."""
    _put_weights(work, choose(work.boxes.logits, gl.zeros((32,), gl.int32, THREADS) + parity), S.ROUNDED)
    receive_parts(work.boxes.act, work, parities, 0, CHOSEN, S.I)


@gluon.jit
def _put_weights(work, keys, ROUNDED: gl.constexpr):
    """Put the weights of the chosen experts, which sum to 1, into work.scores."""
    number = gl.arange(0, CHOSEN, THREADS)
    key = gl.zeros_like(number)
    for i in gl.static_range(CHOSEN):
        key = gl.where(number == i, keys[i], key)
    bits = key & -65536
    logit = gl.where(bits < 0, bits ^ 0x7FFF0000, bits).to(gl.float32, bitcast=True)
    weight = gl.exp(logit - gl.max(logit, axis=0))
    weight = weight / gl.sum(weight, axis=0)
    _weights(work).store(rounded(weight, gl.bfloat16) if ROUNDED else weight)


@gluon.jit
def _weights(work):
    """The memory of the weights of the chosen experts [CHOSEN]."""
    ROWS: gl.constexpr = work.scores.shape[1] * work.scores.shape[2] // 4
    return reinterpret(work.scores, gl.float32, [ROWS, CHOSEN], LINE).index(0)


@gluon.jit
def send_outputs(work, parity, S: gl.constexpr):
    """Add up the sums of threads, then the experts' outputs with their weights, and send the result."""
    ROWS: gl.constexpr = S.H // PROGRAMS
    layout: gl.constexpr = gl.BlockedLayout([CHOSEN, 1, 8], [1, 8, 4], [1, WARPS, 1], [2, 1, 0])
    sums = reinterpret(work.sums, gl.float32, [CHOSEN, ROWS, 4 * WARPS], _PARTS).load(layout)
    of_expert: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    weighted = rounded(gl.sum(sums, axis=2), gl.bfloat16) * _weights(work).load(of_expert)[:, None]
    if S.ROUNDED:
        weighted = rounded(weighted, gl.bfloat16)
    total = rounded(gl.sum(weighted, axis=0), gl.bfloat16)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    send(work.boxes.down + ((row // 8 * PROGRAMS + gl.program_id(0)) * 8 + row % 8), total, parity)
