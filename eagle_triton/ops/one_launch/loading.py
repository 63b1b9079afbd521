"""The warp that loads a program's share of weights, keys and values, in the order in which other warps read them."""

from __future__ import annotations

from typing import NamedTuple

from eagle_triton.ops.linear.gluon_tiles import await_read, barriers, ready
from eagle_triton.ops.one_launch.mailboxes import parity_of
from eagle_triton.ops.one_launch.mixture import choose, expert_of
from eagle_triton.ops.one_launch.operands import Ring
from eagle_triton.ops.one_launch.sizes import CHOSEN, MEMBERS, PART, PROGRAMS, TILE, UNIT, keys_of, parts_of
from eagle_triton.runtime.gluon import TensorDescriptor, async_load, gl, gluon, mbarrier, reinterpret


@gluon.jit
def new_ring(SLOTS: gl.constexpr):
    """An empty ring of SLOTS slots."""
    tiles = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 8, 1024], TILE)
    ring = Ring(tiles, barriers(SLOTS), barriers(SLOTS))
    ready((ring.full, ring.read), SLOTS)
    return ring


class Descriptors(NamedTuple):
    """How TMA reads what a program loads: see weights_descriptor and keys_descriptor."""

    weights: TensorDescriptor
    of_hidden: TensorDescriptor  # rows of H columns
    of_inner: TensorDescriptor  # rows of I columns
    keys: TensorDescriptor


@gluon.jit
def layers_of(row, S: gl.constexpr):
    """How many layers to run: all or none."""
    return gl.where(gl.load(row.counter) >= row.least, S.L, 0)


@gluon.jit
def blocks_of(pid, ROWS: gl.constexpr):
    """How many blocks of a product with ROWS rows a program makes. Blocks pid, pid + PROGRAMS and so on are its own."""
    if ROWS % (8 * PROGRAMS) == 0:
        count = ROWS // (8 * PROGRAMS)
    else:
        count = (ROWS // 8 + PROGRAMS - 1 - pid) // PROGRAMS
    return count


@gluon.jit
def block_of_qkv(block, S: gl.constexpr):
    """Where block `block` of the program's rows of q, k and v belongs: whether to q, whether to k if not to q, and its
    number in that weight."""
    group, member = gl.program_id(0) // MEMBERS, gl.program_id(0) % MEMBERS
    Q_BLOCKS: gl.constexpr = S.Q * S.D // 128
    HEAD: gl.constexpr = S.D // 8  # blocks of a head
    of_kv = (block - Q_BLOCKS) * MEMBERS + member
    of_q, of_k = block < Q_BLOCKS, of_kv < HEAD
    place = gl.where(of_q, (group * Q_BLOCKS + block) * MEMBERS + member, group * S.KV // 8 * HEAD + of_kv % HEAD)
    return of_q, of_k, place


@gluon.jit
def first_tile(work, layer, last, S: gl.constexpr):
    """The first of the program's tiles of keys that row `last` attends. The others follow, every 16th."""
    tile = gl.program_id(0) % MEMBERS
    if S.WINDOWED:
        window = gl.load(work.model.rows + layer * 8 + 7)
        first = gl.maximum(last - window + 1, 0) // keys_of(S.D)
        tile = first + ((tile - first) & (MEMBERS - 1))
    return tile


@gluon.jit
def row_in_cache(work, layer, tile, S: gl.constexpr):
    """The row of the first key of a tile of the program's group, in the cache's matrix."""
    KEYS: gl.constexpr = keys_of(S.D)
    page = gl.load(work.row.table + tile * KEYS // 64)
    head = gl.program_id(0) // MEMBERS * S.KV // 8
    return page * work.cache.page_stride + layer * work.cache.layer_stride + head * 64 + tile * KEYS % 64


@gluon.jit
def load_layers(work, descs, S: gl.constexpr, LOADS: gl.constexpr):
    """Load all operands of the program, with at most LOADS in flight. n: the number of loads so far."""
    ring, pid, last, n = work.ring, gl.program_id(0), gl.load(work.row.lengths) + work.row.skip, 0
    weights, of_hidden = descs.weights, descs.of_hidden
    HEADS: gl.constexpr = 8 * S.Q * S.D
    for layer in range(layers_of(work.row, S)):
        rows = work.model.rows + layer * 8
        q, k, v = gl.load(rows), gl.load(rows + 1), gl.load(rows + 2)
        for block in range(S.Q * S.D // 128 + S.D // 64):
            of_q, of_k, place = block_of_qkv(block, S)
            first = gl.where(of_q, q, gl.where(of_k, k, v))
            n = _load_block(ring, n, weights, of_hidden, first, place, 0, S.H, LOADS)
        for tile in range(first_tile(work, layer, last, S), last // keys_of(S.D) + 1, MEMBERS):
            n = _load_keys(work, n, layer, tile, descs.keys, S, LOADS)
        o, gate, up, down = gl.load(rows + 3), gl.load(rows + 4), gl.load(rows + 5), gl.load(rows + 6)
        for block in range(blocks_of(pid, S.H)):
            turn = pid % (HEADS // PART)
            n = _load_block(ring, n, weights, weights, o, block * PROGRAMS + pid, turn, HEADS, LOADS)
        if S.MIXTURE:
            n = _load_experts(work, n, layer, descs, gate, up, down, S, LOADS + 2)
        else:
            of_gate = blocks_of(pid, S.I)
            for block in range(2 * of_gate):
                first = gl.where(block < of_gate, gate, up)
                place = gl.where(block < of_gate, block, block - of_gate) * PROGRAMS + pid
                n = _load_block(ring, n, weights, of_hidden, first, place, 0, S.H, LOADS)
            for block in range(blocks_of(pid, S.H)):
                turn = pid % parts_of(S.I)
                n = _load_block(ring, n, weights, descs.of_inner, down, block * PROGRAMS + pid, turn, S.I, LOADS)


@gluon.jit
def _load_experts(work, n, layer, descs, gate, up, down, S: gl.constexpr, LOADS: gl.constexpr):
    """Load the program's share of the chosen experts: of one expert's gate and up, and of the down of all."""
    ring, pid = work.ring, gl.program_id(0)
    OF_GATE: gl.constexpr = S.I // 8 // MEMBERS  # blocks
    parity = parity_of(gl.load(work.boxes.step), layer, S)
    keys = choose(work.boxes.logits, gl.zeros((32,), gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + parity)
    both = expert_of(keys, pid // MEMBERS) * (2 * S.I * (S.H // UNIT))
    for block in range(2 * OF_GATE):
        first = gl.where(block < OF_GATE, gate, up) + both
        place = pid % MEMBERS * OF_GATE + block % OF_GATE
        n = _load_block(ring, n, descs.weights, descs.weights, first, place, 0, S.H, LOADS)
    for block in range(CHOSEN * (S.H // 1024)):
        first = down + expert_of(keys, block // (S.H // 1024)) * (S.H * (S.I // UNIT))
        place = block % (S.H // 1024) * PROGRAMS + pid
        n = _load_block(ring, n, descs.weights, descs.of_inner, first, place, 0, S.I, LOADS)
    return n


@gluon.jit
def _load_block(ring, n, weights, narrow, first, block, turn, WIDTH: gl.constexpr, LOADS: gl.constexpr):
    """Load block `block` of a weight that begins at `first`: eight rows of WIDTH columns, in parts of 1024. Part `turn`
    is loaded first. narrow: the descriptor of such rows, where WIDTH is no multiple of 1024."""
    UNITS: gl.constexpr = WIDTH // UNIT
    PARTS: gl.constexpr = parts_of(WIDTH)
    first += block * 8 * UNITS
    for i in range(PARTS):
        part = i + turn
        part = gl.where(part < PARTS, part, part - PARTS)
        unit = part * (PART // UNIT)
        if WIDTH % PART == 0:
            n = _load_part(ring, n, weights, first + unit, 0, UNITS, LOADS)
        else:
            n = _load_part(ring, n, narrow, first, unit, UNITS, LOADS)
    return n


@gluon.jit
def _load_part(ring, n, desc, first, unit, UNITS: gl.constexpr, LOADS: gl.constexpr):
    """Load 1024 columns of eight rows, which begin UNITS rows of the descriptor's matrix apart. A narrow descriptor
    loads from unit `unit` of these rows on, and gives zeros beyond their ends."""
    SLOTS: gl.constexpr = ring.full.shape[0]
    slot = _free_slot(ring, n, LOADS)
    shape: gl.constexpr = [SLOTS * 8] + desc.block_type.shape  # noqa: RUF005 (Triton knows no other way)
    rows = reinterpret(ring.tiles, gl.bfloat16, shape, desc.layout)
    for i in gl.static_range(8):
        where = [first + i * UNITS, unit, 0] if len(shape) == 4 else [first + i * UNITS, 0]
        async_load(desc, where, ring.full.index(slot), rows.index(slot * 8 + i))
    return n + 1


@gluon.jit
def _load_keys(work, n, layer, tile, keys, S: gl.constexpr, LOADS: gl.constexpr):
    """Load a tile of keys, and of their values."""
    ring, first = work.ring, row_in_cache(work, layer, tile, S)
    slot = _free_slot(ring, n, LOADS)
    tiles = reinterpret(ring.tiles, gl.bfloat16, [ring.full.shape[0] * 2, keys_of(S.D), S.D], TILE)
    async_load(keys, [first, 0], ring.full.index(slot), tiles.index(slot * 2))
    async_load(keys, [first + work.cache.value_stride, 0], ring.full.index(slot), tiles.index(slot * 2 + 1))
    return n + 1


@gluon.jit
def _free_slot(ring, n, LOADS: gl.constexpr):
    """The slot of load n, once it has been read and fewer than LOADS loads are in flight. With more loads in flight,
    values between programs would wait in the memory's queues."""
    SLOTS: gl.constexpr = ring.full.shape[0]
    await_read(ring.read, n)
    mbarrier.wait(ring.full.index((n + SLOTS - LOADS) % SLOTS), (n - LOADS) // SLOTS & 1, pred=n >= LOADS)
    mbarrier.expect(ring.full.index(n % SLOTS), 16384)
    return n % SLOTS
