"""Production settings of the kernels that find thresholds: V 128256; the scan also as greedy verification uses it."""

from eagle_triton.ops.sampling.filter_thresholds import Scans, _narrow_kernel, _settle_kernel, scan_kernel, settings
from eagle_triton.ops.views import Matrix
from tests.compile_cases._views import signature_of, typed

_SETTING = settings(128256)
_TYPES = {
    **dict.fromkeys(("temperature_ptr", "min_p_ptr", "facts_ptr", "measures_ptr", "thresholds_ptr"), "*fp32"),
    "top_k_ptr": "*i32",
    "top_p_ptr": "*fp64",
    "scans": Scans("*fp32", "*i32", "*fp32"),
    "searches_ptr": "*i32",
}
_SIZES = {
    "PART": _SETTING.part,
    "TILE": _SETTING.tile,
    "SPAN": _SETTING.tile,
    "GROUP": _SETTING.group,
    "GROUPS": 16,
    "LANES": _SETTING.lanes,
    "ARGMAX_AT_0": True,
    "TOP_P_FIRST": True,
}
_SIZES |= {"ROUNDS": _SETTING.rounds, "PARTS": _SETTING.scan_parts, "x.item": 1}


TARGETS = {False: ("sm_80", "gfx942"), True: ("sm_90", "sm_100")}  # by dependent launch


def _case(name: str, kernel, sizes: dict, warps: int, dtype: str = "bf16") -> tuple:
    signature, constexprs = signature_of(kernel, {**_TYPES, "x": typed(Matrix, f"*{dtype}")}, {**_SIZES, **sizes})
    options = {"num_warps": warps, "aligned": ("vocabulary", "x.row"), "targets": TARGETS[sizes["PDL"]]}
    return name, kernel, signature, constexprs, options


def _cases(dtype: str, shift: int, pdl: bool) -> list[tuple]:
    early, search = {"PDL": pdl}, {"PDL": pdl, "SHIFT": shift}
    argmax = {**early, "PART": 4096, "temperature_ptr": None, "scans.masses": None}
    settle = {**search, "TILE": _SETTING.settle_tile}
    return [
        _case(f"scan argmax {dtype}", scan_kernel, argmax, 4, dtype),
        _case(f"scan {dtype}", scan_kernel, early, 4, dtype),
        *(
            _case(f"narrow {index} {dtype}", _narrow_kernel, {**search, "ROUND": index, "PARTS": 64}, 4, dtype)
            for index in range(2)
        ),
        _case(f"settle {dtype}", _settle_kernel, settle, _SETTING.settle_warps, dtype),
    ]


CASES = [case for pdl in (False, True) for case in _cases("bf16", 16, pdl)]
CASES += _cases("fp16", 13, True)
