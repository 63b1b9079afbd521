"""The kernel: one warp of a program loads, and eight warps compute the phases of all layers."""

from __future__ import annotations

import triton

from eagle_triton.ops.linear.gluon_tiles import await_full, give_back, rounded
from eagle_triton.ops.one_launch.attention import attend, rotation_of
from eagle_triton.ops.one_launch.loading import Descriptors, block_of_qkv, blocks_of, layers_of, load_layers, new_ring
from eagle_triton.ops.one_launch.mailboxes import packed, parity_of, receive_columns, receive_hidden, send
from eagle_triton.ops.one_launch.mixture import receive_inner, send_logit, send_outputs
from eagle_triton.ops.one_launch.operands import Cache, Mailboxes, Model, Row, Work, load_words, numbers_of
from eagle_triton.ops.one_launch.sizes import CHOSEN, MEMBERS, PROGRAMS, THREADS, WARPS, keys_of, parts_of, parts_of_x
from eagle_triton.runtime.gluon import debug_barrier, gl, gluon, reinterpret

_BF16 = gl.constexpr(gl.bfloat16)
_SWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))  # of x, and of the sums of threads
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3))
_HIDDEN = gl.constexpr(gl.BlockedLayout([4], [32], [WARPS.value], [0]))
_SUMS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [0, 1]))
_LANES = [[0, 0, 4], [0, 0, 8], [0, 4, 0], [0, 1, 0], [0, 2, 0]]  # neighbours read all banks
_REGISTERS, _OF_WARPS = [[0, 0, 1], [0, 0, 2], [0, 0, 16], [0, 8, 0]], [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
# A slot's weights in registers: a row for each warp.
_TILES = gl.constexpr(gl.DistributedLinearLayout(_REGISTERS, _LANES, _OF_WARPS, [], [8, 16, 32]))


@gluon.jit
def one_launch_kernel(
    weights, of_hidden, of_inner, keys, model: Model, row: Row, cache: Cache, boxes: Mailboxes,
    S: gl.constexpr, SLOTS: gl.constexpr, LOADS: gl.constexpr,
):  # fmt: skip
    """Grid (PROGRAMS,), one on each multiprocessor. The first four arguments are the Descriptors. S: the Sizes. SLOTS:
    of the ring, 16 KiB each. LOADS: the most in flight."""
    ring = new_ring(SLOTS)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64 if S.I <= 8192 else 128, 4 * WARPS], _SWIZZLED)
    x = gl.allocate_shared_memory(gl.int32, [parts_of_x(S), 16, 32], _SWIZZLED)
    heads = gl.allocate_shared_memory(gl.float32, [4 if S.Q == 2 else 8, S.D], _PLAIN)
    scores = gl.allocate_shared_memory(gl.float32, [2, triton.next_power_of_2(S.Q), keys_of(S.D)], _PLAIN)
    work = Work(ring, x, sums, heads, scores, model, row, cache, boxes)
    descs = Descriptors(weights, of_hidden, of_inner, keys)
    gl.warp_specialize([(_compute, (work, S)), (load_layers, (work, descs, S, LOADS))], [1], [40])


@gluon.jit
def _compute(work, S: gl.constexpr):
    """All phases of all layers, and the last norm."""
    model, row, boxes = work.model, work.row, work.boxes
    pid = gl.program_id(0)
    H: gl.constexpr = S.H
    words = gl.arange(0, triton.next_power_of_2(H) // 2, gl.BlockedLayout([2], [32], [WARPS], [0]))
    zero = gl.zeros((256,), gl.int32, THREADS)
    place = gl.arange(0, work.sums.shape[1], gl.SliceLayout(1, _SUMS))
    own_rows = (place // 8 * PROGRAMS + pid) * 8 + place % 8
    qkv_rows = _rows_of_qkv(place, S)
    step = gl.load(boxes.step)
    last = gl.load(row.lengths) + row.skip
    rotation = rotation_of(model, last, S)
    token = gl.load(row.token)
    columns = gl.arange(0, triton.next_power_of_2(H), _HIDDEN)
    h = gl.load(model.embedding + token * H + columns, mask=columns < H, other=0.0).to(gl.float32)
    layers = layers_of(row, S)
    n = 0
    for phase in range(4 * layers):
        layer, kind = phase // 4, phase % 4
        parity = parity_of(step, layer, S)
        if kind % 2 == 0:
            h = _put_normed(work, h, words, zero, phase, parity, S)
        elif kind == 1:
            n += attend(work, n, layer, last, rotation, parity, S)
        elif S.MIXTURE:
            receive_inner(work, zero + parity, parity, S)
        else:
            receive_columns(boxes.act, work, zero + parity, S.I)
        debug_barrier()
        n = _multiply(work, n, layer, kind, parity, place, own_rows, qkv_rows, S)

    if (pid == 0) & (layers > 0):
        weight = load_words(model.norm, words, H // 2)
        h = rounded(h + receive_hidden(boxes.down, zero + parity_of(step, S.L - 1, S), H, _HIDDEN), _BF16)
        normed = _normed(h, numbers_of(weight, _HIDDEN), model.epsilon, H)
        gl.store(row.hidden + columns, h.to(gl.bfloat16), mask=columns < H)
        gl.store(row.normed + columns, normed.to(gl.bfloat16), mask=columns < H)
        gl.store(boxes.step, step + 1)


@gluon.jit
def _rows_of_qkv(place, S: gl.constexpr):
    """Where in their mailbox the program's rows of q, k and v go."""
    group, member = gl.program_id(0) // MEMBERS, gl.program_id(0) % MEMBERS
    QD: gl.constexpr = S.Q * S.D
    of_q = place < QD // 16
    rows = (gl.where(of_q, place // 8, place // 8 - QD // 128) * MEMBERS + member) * 8 + place % 8
    return rows + (group * (QD + 2 * S.D) + gl.where(of_q, 0, QD))


@gluon.jit
def _put_normed(work, h, words, zero, phase, parity, S: gl.constexpr):
    """Phases 0 and 2: add the last phase's products to the residual stream h, and put its norm into work.x. Returns h.
    In a mixture's layer, also send the program's logit of the router."""
    model, boxes, layer, kind = work.model, work.boxes, phase // 4, phase % 4
    weight = load_words(gl.load(model.addresses + layer * 8 + kind // 2), words, S.H // 2)
    if S.MIXTURE:
        router = gl.load(model.addresses + layer * 8 + 4) + gl.program_id(0) * (2 * S.H)
        router = load_words(router, words, gl.where(kind == 2, S.H // 2, 0))
    if phase > 0:
        box, of = gl.where(kind == 0, boxes.down, boxes.o), gl.where(kind == 0, parity ^ 1, parity)
        h = rounded(h + receive_hidden(box, zero + of, S.H, _HIDDEN), _BF16)
    x = _normed(h, numbers_of(weight, _HIDDEN), model.epsilon, S.H)
    if S.MIXTURE and kind == 2:  # first, because all loads wait for it
        send_logit(boxes.logits, x, numbers_of(router, _HIDDEN), parity)
    ROWS: gl.constexpr = x.shape[0] // 64
    low, high = x.reshape((ROWS, 32, 2)).split()
    rows = reinterpret(work.x, gl.int32, [work.x.shape[0] * 16 // ROWS, ROWS, 32], _SWIZZLED)
    rows.index(0).store(packed(low, high))
    return h


@gluon.jit
def _normed(h, weight, epsilon, H: gl.constexpr):
    """The norm of h [H], padded with zeros, with its weight."""
    return rounded(rounded(h * gl.rsqrt(gl.sum(h * h, axis=0) / H + epsilon), _BF16) * weight, _BF16)


@gluon.jit
def _multiply(work, n, layer, kind, parity, place, own_rows, qkv_rows, S: gl.constexpr):
    """Multiply the program's rows by x, and send the products. own_rows, qkv_rows: their places in mailboxes."""
    boxes, pid = work.boxes, gl.program_id(0)
    QD: gl.constexpr = S.Q * S.D
    of_gate = S.I // 128 if S.MIXTURE else blocks_of(pid, S.I)  # blocks of the program
    ACT_PARTS: gl.constexpr = 1 if S.MIXTURE else parts_of(S.I)
    of_qkv: gl.constexpr = QD // 128 + S.D // 64
    parts = gl.where(kind % 2 == 0, parts_of(S.H), gl.where(kind == 1, 8 * QD // 1024, ACT_PARTS))
    blocks = gl.where(kind == 0, of_qkv, gl.where(kind == 2, 2 * of_gate, blocks_of(pid, S.H)))
    half = gl.where(kind == 2, of_gate, work.sums.shape[1] // 8)
    if S.MIXTURE:
        blocks = gl.where(kind == 3, CHOSEN * (S.H // 1024), blocks)
    if S.BIASED:
        bias = _load_bias(work.model, layer, place, kind == 0, S)
    n = _products(work, n, blocks, half, parts, gl.where(kind % 2 == 0, 0, pid % parts), kind == 3, S)
    total = gl.sum(work.sums.index(0).load(_SUMS), axis=1)
    if S.BIASED:
        total += bias
    total = rounded(total, _BF16)
    box, where, used = gl.where(kind == 1, boxes.o, boxes.down), own_rows, 8 * blocks
    if kind == 0:
        box, where = boxes.qkv, qkv_rows
    elif kind == 2:
        up = rounded(gl.sum(work.sums.index(1).load(_SUMS), axis=1), _BF16)
        total = rounded(rounded(total / (1.0 + gl.exp(-total)), _BF16) * up, _BF16)
        box, used = boxes.act, 8 * half
        if S.MIXTURE:
            where = pid * used + place
    if S.MIXTURE and kind == 3:
        send_outputs(work, parity, S)
        used = 0
    send(box + where, total, parity, place < used)
    return n


@gluon.jit
def _load_bias(model, layer, place, wanted, S: gl.constexpr):
    """The biases of q, k and v for a program's rows; zeros if they are not wanted."""
    ROWS: gl.constexpr = S.Q * S.D // 16 + S.D // 8
    addresses = model.addresses + layer * 8
    of_q, of_k, block = block_of_qkv(place // 8, S)
    begin = gl.where(of_q, gl.load(addresses + 5), gl.where(of_k, gl.load(addresses + 6), gl.load(addresses + 7)))
    bias = begin.to(gl.pointer_type(gl.bfloat16)) + (block * 8 + place % 8)
    return gl.load(bias, mask=wanted & (place < ROWS), other=0.0).to(gl.float32)


@gluon.jit
def _products(work, n, blocks, half, parts, turn, of_experts, S: gl.constexpr):
    """Put the sums of blocks, of eight rows each, times x into work.sums. x has `parts` parts of 1024 columns. Part
    `turn` is multiplied first.

    Blocks from `half` on use the second half of work.sums. of_experts: x has a part of S.I columns for each expert, and
    H / 1024 blocks belong to each.
    """
    ring = work.ring
    SLOTS: gl.constexpr = ring.full.shape[0]
    HALF: gl.constexpr = work.sums.shape[1] // 8
    tiles = reinterpret(ring.tiles, gl.int32, [SLOTS, 8, 16, 32], _WORDS)
    rows = reinterpret(work.sums, gl.float32, [2 * HALF, 8, 4 * WARPS], _SWIZZLED)
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
        own = gl.sum(gl.where(_wanted(own), own, 0.0), axis=3).reshape((8, 4 * WARPS))
        rows.index(gl.where(block < half, block, block - half + HALF)).store(own)
    return n


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
def _wanted(sums):
    """Which of sums [8, 8 lanes, 4 lanes, 2] are wanted, see multiply_add."""
    of_pair: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
    part = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, of_pair)))[:, None, None]
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, of_pair)))[None, :, None]
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, of_pair)))[None, None, :]
    return ((part // 4 + part % 4 * 2) == four * 2 + pair)[None, :, :, :]
