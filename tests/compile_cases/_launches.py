"""Cases from calls: what a launcher would launch, with the types and sizes of its arguments.

A launcher is called with tensors that have no memory (`empty`), and its launches are recorded instead of run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from eagle_triton.operands.sampling import SamplingTensors
from eagle_triton.runtime.launch import Launch, recorded
from eagle_triton.runtime.peer_memory import PeerMemory

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
HOPPER = ("sm_90",)
_CAPABILITIES = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0), "gfx942": (0, 0)}


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


bf16, fp16 = partial(empty, dtype=torch.bfloat16), partial(empty, dtype=torch.float16)
fp32, fp64 = partial(empty, dtype=torch.float32), partial(empty, dtype=torch.float64)
i32, i64 = partial(empty, dtype=torch.int32), partial(empty, dtype=torch.int64)
i1, u8 = partial(empty, dtype=torch.bool), partial(empty, dtype=torch.uint8)
FLOATS = {"bf16": bf16, "fp16": fp16, "fp32": fp32}


def params_of(batch: int) -> SamplingTensors:
    """The parameters of this many sequences."""
    return SamplingTensors(fp32(batch), i32(batch), fp64(batch), fp32(batch), i64(batch), i64(batch))


def peers_of(size: int, rows: int, row_bytes: int) -> PeerMemory:
    """The memory of this many ranks."""
    block = u8(PeerMemory.bytes_for(size, rows, row_bytes))
    return PeerMemory.of(0, [block] * size, rows, row_bytes)


def launches(
    name: str,
    launcher: Callable[..., object],
    *args: Any,
    targets: tuple[str, ...] | None = None,
    gluon: bool = True,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> list[tuple]:
    """The cases of all launches of a call on the first of these targets. None: they are the same on all.

    gluon: whether Gluon kernels can be used there. options: of the cases, see compile_kernels.py; `local` is by the
    kernels' names.
    """
    with _passing_for(HOPPER[0] if targets is None else targets[0], gluon), recorded() as found:
        launcher(*args, **kwargs)
    options = dict(options or {}) if targets is None else {"targets": targets, **(options or {})}
    return [_case(name, launch, options) for launch in found.values()]


@contextmanager
def _passing_for(target: str, gluon: bool) -> Iterator[None]:
    """Every device passes for a GPU of this kind."""
    answers = {"compute_capability": _CAPABILITIES[target], "multiprocessors_of": 132, "can_overlap": True}
    answers |= {"_capability": _CAPABILITIES[target] if target != "gfx942" else None}
    answers |= {} if gluon else {"gluon_module": None}
    places = [
        (module, name, getattr(module, name))
        for module_name, module in sys.modules.items()
        if module_name.startswith("eagle_triton")
        for name in answers.keys() & vars(module).keys()
    ]
    for module, name, _ in places:
        setattr(module, name, lambda device, answer=answers[name]: answer)
    try:
        yield
    finally:
        for module, name, original in places:
            setattr(module, name, original)


def _case(name: str, launch: Launch, options: dict[str, Any]) -> tuple:
    kernel, _, args, given = launch
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {argument: value for argument, value in given.items() if argument in kernel.arg_names}
    options = {name: value for name, value in given.items() if name not in values} | options
    if "local" in options:
        options["local"] = options["local"].get(kernel.__name__, 0)
    signature: dict[str, Any] = {}
    constexprs: dict[Any, Any] = {}
    aligned: list[str] = []
    unaligned: list[str] = []
    for place, parameter in enumerate(kernel.params):
        argument, value = parameter.name, values[parameter.name]
        if argument == "PDL" and isinstance(value, bool):  # of the target that is compiled for
            signature[argument] = "i32"
            options.pop("launch_pdl", None)
        elif parameter.is_constexpr:
            signature[argument], constexprs[argument] = "constexpr", value
        elif parameter.do_not_specialize:
            signature[argument] = _kind(value)
        else:
            signature[argument] = _specialised((place,), argument, value, constexprs, aligned)
        if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
            unaligned.append(argument)
    options["aligned"] = tuple(name for name in aligned if name not in unaligned)
    options["unaligned"] = tuple(unaligned)
    return f"{name} ({kernel.__name__})", kernel, signature, constexprs, options


def _specialised(path: tuple[int, ...], name: str, value: Any, constexprs: dict[Any, Any], aligned: list[str]) -> Any:
    """The type of an argument as Triton specialises it: a 1 becomes a constexpr, by its path; multiples of 16 are
    `aligned`."""
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", range(len(value)))
        parts = [
            _specialised((*path, place), f"{name}.{field}", part, constexprs, aligned)
            for place, (field, part) in enumerate(zip(fields, value, strict=True))
        ]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if type(value) is int and value == 1:
        constexprs[path] = 1
        return "constexpr"
    if type(value) is int and value % 16 == 0:
        aligned.append(name)
    return _kind(value)


def _kind(value: Any) -> str | None:
    """The type of an argument that is no tuple; None for what is absent."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    if hasattr(value, "block_shape"):  # a descriptor
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}{layout}>"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"
