"""How programs send values to each other: through mailboxes in global memory, without barriers.

A value is an fp32 number with the layer's parity as its last bit. A reader loads until the last bits of all its values
are right. bf16 numbers lose nothing by this, and parts of attention lose their last bit. A mailbox is used once per
layer, and its next writers have waited for all of its readers in between. A reader that waits too long takes NaN, so
the logits are NaN if a program is missing.
"""

from __future__ import annotations

import triton
import triton.language.core as tl_core

from eagle_triton.ops.one_launch.sizes import PART, parts_of
from eagle_triton.runtime.gluon import gl, gluon

_TRIES = 1 << 18  # of a reader: some tenths of a second


@gluon.jit
def parity_of(step, layer, S: gl.constexpr):
    """The last bit of values of a layer, in launch number `step`."""
    return (step * S.L + layer + 1) & 1


@gluon.jit
def sent(x, parity):
    """fp32 numbers as they lie in a mailbox."""
    return (x.to(gl.int32, bitcast=True) & -2) | parity


@gluon.jit
def send(box, x, parity, mask=None):
    gl.store(box, sent(x, parity), mask=mask, eviction_policy="evict_last")


# Functions that insert PTX take it as an argument, because otherwise Triton's cache would miss a change.
@gluon.constexpr_function
def receiving(loads):
    """The PTX of `receive`, its constraints, and the number of its outputs.

    It loads until the last bit of every value is that of the last operand. After _TRIES it gives NaN.
    loads: tuples (operand with the address, number of loads, bytes between them, values of one load).
    """
    loads = [tuple(map(gl._core._unwrap_if_constexpr, load)) for load in loads]
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
    """int32 tensors of the pointers' shape, loaded by the PTX of `receiving`."""
    text, constraints, outputs = map(gl._core._unwrap_if_constexpr, gl._core._unwrap_if_constexpr(ptx))
    found = tl_core.inline_asm_elementwise(
        text, constraints, [*pointers, parity], (gl.int32,) * outputs, is_pure=False, pack=1, _semantic=_semantic
    )
    return tl_core.tuple(list(found))


@gluon.jit
def received(bits):
    return (bits & -2).to(gl.float32, bitcast=True)


@gluon.jit
def four(a, b, c, d):
    """Four [n] as one [n, 2, 2], in this order."""
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def receive_hidden(box, parity, H: gl.constexpr, layout: gl.constexpr):
    """Receive [H] in registers, padded with zeros to a power of two."""
    PARTS: gl.constexpr = parts_of(H)
    lane = gl.arange(0, 256, parity.type.layout)
    if H % PART == 0:
        found = receive(receiving(((0, PARTS, 4096, 4),)), [box + lane * 4], parity)
    else:  # the last part has fewer columns
        last = box + H // PART * PART + gl.minimum(lane, H % PART // 4 - 1) * 4
        found = receive(receiving(((0, PARTS - 1, 4096, 4), (1, 1, 0, 4))), [box + lane * 4, last], parity)
    values = _part_of_hidden(found, lane, 0, H)
    if PARTS == 2:
        values = gl.join(values, _part_of_hidden(found, lane, 1, H)).permute((3, 0, 1, 2))
    elif PARTS > 2:
        second, third = _part_of_hidden(found, lane, 1, H), _part_of_hidden(found, lane, 2, H)
        fourth = _part_of_hidden(found, lane, 3, H) if PARTS == 4 else gl.zeros_like(third)
        values = four(values, second, third, fourth).permute((3, 4, 0, 1, 2))
    return gl.convert_layout(received(values).reshape((triton.next_power_of_2(H),)), layout)


@gluon.jit
def _part_of_hidden(found, lane, i: gl.constexpr, H: gl.constexpr):
    """Part i of 1024 columns, with zeros for columns from H on, as [256, 2, 2]."""
    a, b, c, d = found[4 * i], found[4 * i + 1], found[4 * i + 2], found[4 * i + 3]
    if (i + 1) * PART > H:
        exists = lane < H % PART // 4
        a, b, c, d = gl.where(exists, a, 0), gl.where(exists, b, 0), gl.where(exists, c, 0), gl.where(exists, d, 0)
    return four(a, b, c, d)


@gluon.jit
def receive_columns(box, work, parity, WIDTH: gl.constexpr):
    """Receive [WIDTH] as x, with zeros in the rest of its last part."""
    WHOLE: gl.constexpr = WIDTH // PART
    for first in gl.static_range(0, WHOLE, 8):
        receive_parts(box + first * PART, work, parity, first, min(8, WHOLE - first), PART)
    if WIDTH % PART > 0:
        receive_parts(box + WHOLE * PART, work, parity, WHOLE, 1, WIDTH % PART)


@gluon.jit
def receive_parts(box, work, parity, FIRST: gl.constexpr, COUNT: gl.constexpr, COLUMNS: gl.constexpr):
    """Receive COUNT parts of x, from part FIRST on. A part has COLUMNS columns, then zeros. box: of the first part."""
    lane = gl.arange(0, 256, parity.type.layout)
    columns = gl.minimum(lane, COLUMNS // 4 - 1)
    found = receive(receiving(((0, COUNT, 4 * COLUMNS, 4),)), [box + columns * 4], parity)
    for i in gl.static_range(COUNT):
        first, second = packed(found[4 * i], found[4 * i + 1]), packed(found[4 * i + 2], found[4 * i + 3])
        if COLUMNS < PART:
            first, second = gl.where(lane == columns, first, 0), gl.where(lane == columns, second, 0)
        work.x.index(FIRST + i).store(gl.join(first, second).reshape((16, 32)))


@gluon.jit
def packed(low, high):
    """Words of two bf16 numbers, given as fp32."""
    return ((low.to(gl.int32, bitcast=True) >> 16) & 65535) | (high.to(gl.int32, bitcast=True) & -65536)
