"""Production settings of the products: 8b and 1b shapes at few and at 64 rows, and the portable settings. Of those on
Hopper every measured shape, an unmeasured one, and stacks of many rows."""

import torch

from eagle_triton.ops.linear.hopper import _HOPPER, _MANY_ROWS, many_rows_settings
from eagle_triton.ops.linear.hopper_many_rows import STACK
from eagle_triton.ops.linear.settings import Settings, settings_on
from tests.compile_cases._launches import HOPPER, bf16, fp16, fp32
from tests.compile_cases._products import EVERYWHERE, SHAPES, products

_WITH_TMA = {"targets": ("sm_100", "sm_90")}  # the first does not stream
_PORTABLE = {"targets": EVERYWHERE}
_KEPT = {"targets": HOPPER, "keep_splits": True}
_O = SHAPES["8b o"]
_O64 = settings_on((9, 0), torch.bfloat16, 64, *_O)
_NARROW = (2048, 512, 512), 2048

CASES = [
    *(
        case
        for name, shape in SHAPES.items()
        if name != "32b gate_up"
        for rows in (16, 64)
        for case in products(name, bf16, rows, *shape, bf16, **_WITH_TMA)
    ),
    *(
        case
        for name in ("8b o", "8b down")  # others differ in strides alone
        for rows in (16, 64)
        for case in products(f"{name} keep_splits", bf16, rows, *SHAPES[name], bf16, keep_splits=True, **_WITH_TMA)
    ),
    *products("residual", fp16, 32, *_O, fp16, fp16, residual=fp16(32, 4096), settings=_O64, **_WITH_TMA),
    *products(
        "plain loads", bf16, 64, *_O, bf16, residual=bf16(64, 4096), settings=_O64._replace(tma=False), targets=HOPPER
    ),
    *(
        case
        for name in ("8b qkv", "9b gated delta", "8b o", "8b gate_up")
        for case in (
            *products(f"{name} portable", bf16, 64, *SHAPES[name], bf16, bf16, **_PORTABLE),
            *products(f"{name} portable fp16", fp16, 16, *SHAPES[name], fp16, **_PORTABLE),
        )
    ),
    *products("gelu", bf16, 64, (15360, 15360), 3840, bf16, activation="gelu_tanh", **_WITH_TMA),
    *products("8b o fp32", fp32, 16, *_O, fp32, settings=Settings(32, 32, 4, stages=3, tma=False), **_PORTABLE),
]
for _rows, _cols, _depth in _HOPPER:
    _how = {"targets": HOPPER} if len(_cols) == 2 else _KEPT
    CASES += products(f"{_cols} of {_depth}", bf16, _rows, _cols, _depth, bf16, **_how)
CASES += products("unmeasured, bias", fp16, 24, *_NARROW, fp16, fp16, **_KEPT)
CASES += products("gelu", bf16, 60, (15360, 15360), 3840, bf16, activation="gelu_tanh", targets=HOPPER)
_WIDER = [*_MANY_ROWS, *((rows, *_NARROW) for rows in (80, 129, 256)), (80, *SHAPES["1b gate_up"])]
for _rows, _cols, _depth in _WIDER:
    _how = {"targets": HOPPER} if len(_cols) == 2 else _KEPT
    _how = {**_how, "settings": many_rows_settings(_rows, _cols, _depth, len(_cols) == 2)}
    CASES += products(f"{_cols} of {_depth}", bf16, _rows, _cols, _depth, bf16, **_how)
for _x in (bf16, fp16):
    CASES += products("a stack", _x, 256, *SHAPES["8b qkv"], _x, settings=STACK, targets=HOPPER)
    CASES += products("a stack, bias", _x, 256, *SHAPES["8b qkv"], _x, _x, settings=STACK, targets=HOPPER)
