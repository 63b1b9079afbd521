"""The check that all others use, with one line for each tensor: its name, shape and dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

LOGITS = (torch.float16, torch.bfloat16, torch.float32)
FLOATS = (*LOGITS, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def check_tensors(
    operation: str, tensors: Mapping[str, tuple[Any, Any, object]], *, device: torch.device | None = None, **sizes: Any
) -> dict[str, Any]:
    """Raise ValueError unless each tensor has its shape and dtype and is on the device. Returns sizes by name.

    tensors: by name, the tensor (None fits), its shape, and its dtype: one, several, or None for any. A shape is
    written like "B N d". A number means that size. A name means the size that `sizes` or an earlier tensor gave it,
    else any; "N>0" refuses 0. "..." comes first and means any sizes. ", contiguous" or ", contiguous rows" follows if
    all dimensions or the last one must be contiguous. The shape may also be a torch.Size, such as another tensor's.
    device: None means the first tensor's.
    """
    given = dict(sizes)
    for name, (tensor, wanted, dtype) in tensors.items():  # noqa: B007 - runs before every launch: kept quick
        if tensor is None:
            continue
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            break
        shape, got = tensor.shape, tensor.dtype
        if dtype is not None and got is not dtype and not (type(dtype) is tuple and got in dtype):
            break
        if type(wanted) is not str:
            if shape != wanted:
                break
            continue
        words, special = _parsed.get(wanted) or _parse(wanted)
        if special is not None:
            sizes.update(special.numbers)
            if special.leading:
                shape = _gathered(shape, words)
        if len(shape) != len(words):
            break
        for word, size in zip(words, shape):  # noqa: B905
            known = sizes.get(word)
            if known is None:
                sizes[word] = size
            elif known != size:
                break
        else:
            if special is None or special.fits(tensor):
                continue
        break
    else:
        return sizes
    raise ValueError(_refusal(operation, tensors, name, device, given))


class _Special(NamedTuple):
    """The requirements of a shape beyond names."""

    numbers: dict[str, int]  # names that are numbers
    leading: bool  # it begins with "..."
    filled: tuple[int, ...]  # places that must not be 0
    layout: str

    def fits(self, tensor: Any) -> bool:
        if self.filled and 0 in [tensor.shape[place] for place in self.filled]:
            return False
        if self.layout == "contiguous":
            return tensor.is_contiguous()
        return not self.layout or tensor.stride(-1) == 1 or tensor.shape[-1] == 1 or not tensor.numel()


_parsed: dict[str, tuple[tuple[str, ...], _Special | None]] = {}


def _parse(text: str) -> tuple[tuple[str, ...], _Special | None]:
    shape, _, layout = text.partition(", ")
    written = shape.split()
    words = tuple(word.removesuffix(">0") for word in written)
    filled = tuple(place for place, word in enumerate(written) if word.endswith(">0"))
    special = _Special({word: int(word) for word in words if word.isdecimal()}, "..." in words, filled, layout)
    _parsed[text] = words, special if any(special) else None
    return _parsed[text]


def _gathered(shape: tuple[int, ...], words: tuple[str, ...]) -> tuple[Any, ...]:
    """A shape in which the sizes for "..." are joined into one entry."""
    first = len(shape) + 1 - len(words)
    return (shape[:first], *shape[first:])


def _refusal(
    operation: str, tensors: Mapping[str, tuple[Any, Any, object]], name: str, device: Any, sizes: dict[str, Any]
) -> str:
    """The message: what was expected and what was given. sizes: the given ones; earlier tensors add theirs."""
    for other, (tensor, wanted, _) in tensors.items():
        if other == name:
            break
        if tensor is not None and isinstance(wanted, str):
            words, special = _parse(wanted)
            shape = _gathered(tensor.shape, words) if special and special.leading else tensor.shape
            sizes.update(zip(words, shape, strict=True))
    tensor, wanted, dtype = tensors[name]
    text, _, layout = wanted.partition(", ") if isinstance(wanted, str) else (" ".join(map(str, wanted)), "", "")
    shown: list[str] = []
    for word in text.split():
        size = sizes.get(word.removesuffix(">0"), word)
        shown += map(str, size) if isinstance(size, tuple) else [str(size)]
    dtypes = ("floats",) if dtype is FLOATS else dtype if isinstance(dtype, tuple) else (dtype,) if dtype else ()
    before = ["contiguous"] * (layout == "contiguous") + [" or ".join(map(str, dtypes))] * bool(dtypes)
    rows = " with contiguous rows" if layout == "contiguous rows" else ""
    message = (
        f"{operation}: {name} must be {' '.join([*before, ''])}[{', '.join(shown)}] on {device}{rows}, got "
        f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}{f' with strides {tensor.stride()}' if layout else ''}"
    )
    return message.replace("torch.", "")
