"""Production settings of the sampling laws' kernels: V 128256; the scan also as greedy verification uses it."""

from eagle_triton.laws import _narrow_kernel, _open_kernel, _settle_kernel, scan_kernel, settings

_SETTING = settings(128256)
_TYPES = {
    **dict.fromkeys(("temperature_ptr", "top_p_ptr", "min_p_ptr", "peaks_ptr", "masses_ptr", "measures_ptr"), "*fp32"),
    **dict.fromkeys(("facts_ptr", "laws_ptr"), "*fp32"),
    **dict.fromkeys(("top_k_ptr", "places_ptr", "searches_ptr"), "*i32"),
}
_SIZES = {
    "PART": _SETTING.part,
    "TILE": _SETTING.tile,
    "GROUP": _SETTING.group,
    "GROUPS": 16,
    "LANES": _SETTING.lanes,
    "ARGMAX_AT_0": True,
}
_SIZES |= {"ROUNDS": _SETTING.rounds, "PARTS": _SETTING.scan_parts, "stride_xv": 1}


def _case(name: str, kernel, sizes: dict, warps: int, dtype: str = "bf16") -> tuple:
    constexprs = {key: value for key, value in {**_SIZES, **sizes}.items() if key in kernel.arg_names}
    types = {**_TYPES, "x_ptr": f"*{dtype}"}
    signature = {key: "constexpr" if key in constexprs else types.get(key, "i32") for key in kernel.arg_names}
    aligned = tuple(key for key in ("vocabulary", "stride_xr") if key in signature)
    return name, kernel, signature, constexprs, {"num_warps": warps, "aligned": aligned}


_ARGMAX = {"PART": 4096, "PARTS": 1, "temperature_ptr": None, "masses_ptr": None}

CASES = [
    case
    for dtype, shift in (("bf16", 16), ("fp16", 13))
    for case in (
        _case(f"scan argmax {dtype}", scan_kernel, _ARGMAX, 4, dtype),
        _case(f"scan {dtype}", scan_kernel, {}, 4, dtype),
        _case(f"open {shift}", _open_kernel, {"SHIFT": shift, "PARTS": 64, "LANES": 16, "TOP_P_FIRST": shift == 13}, 4),
        _case(f"narrow 0 {dtype}", _narrow_kernel, {"ROUND": 0, "SHIFT": shift}, 4, dtype),
        _case(f"narrow 1 {dtype}", _narrow_kernel, {"ROUND": 1, "SHIFT": shift}, 4, dtype),
        _case(
            f"settle {dtype}",
            _settle_kernel,
            {"SHIFT": shift, "TILE": _SETTING.settle_tile},
            _SETTING.settle_warps,
            dtype,
        ),
    )
]
