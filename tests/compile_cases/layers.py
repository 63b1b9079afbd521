"""Production settings of rms_norm, rotary_append, swiglu and gate_heads: 8b and 1b shapes, whole and partial products;
those of Qwen3.5 and Qwen3-Next, zero-centred norms and a quarter of each head rotated."""

from eagle_triton.ops.layers.fp8_pair_rows import _BLOCK, _float8_pair_kernel
from eagle_triton.ops.layers.gates import _gate_heads_kernel, _swiglu_kernel
from eagle_triton.ops.layers.norms import _rms_norm_kernel, _shared_rms_norm_kernel, norm_warps
from eagle_triton.ops.layers.rotary import _rotary_append_kernel
from eagle_triton.runtime.launch import EXACT

_ALIGNED = (
    "stride_xs",
    "stride_xm",
    "stride_rm",
    "stride_tm",
    "place_rows",
    "place_width",
    "word_width",
    "stride_gm",
    "stride_um",
    "stride_s",
    "capacity",
    "row_size",
    *(f"stride_{tensor}{axis}" for tensor in "qkvxg" for axis in "bnh"),
    "stride_cs",
    "stride_cb",
    "stride_ch",
    "stride_ct",
)
_NO_TABLE = {"table_ptr": None, "PAGE": 0}  # fmt: skip
_NO_TOKENS = {"tokens_ptr": None, "parts_ptr": None, "scale_ptr": None}
_PAIR = {"parts_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}


def _case(name, kernel, values, absent=(), warps=1, dtype="bf16", **types):
    """`values`: constexprs; `absent`: pointers that are None; `types`: of arguments that are not `dtype` or int32."""
    constexprs = {**values, **dict.fromkeys(absent)}
    signature = {
        argument: "constexpr"
        if argument in constexprs
        else types.get(argument, f"*{dtype}" if argument.endswith("_ptr") else "i32")
        for argument in kernel.arg_names
    }
    return name, kernel, signature, constexprs, {**EXACT, "num_warps": warps, "aligned": _ALIGNED}


CASES = []
for _size in (4096, 2048):
    for _splits in (1, 2):
        _values = {"size": _size, "BLOCK": _size, "SPLITS": _splits, "ZERO_CENTRED": False, **_NO_TOKENS}
        _types = {"eps": "fp32", **({"x_ptr": "*fp32"} if _splits > 1 else {})}
        _label = f"rms_norm {_size} splits {_splits}"
        CASES.append(_case(f"{_label} residual", _rms_norm_kernel, _values, (), norm_warps(_size), **_types))
        CASES.append(
            _case(_label, _rms_norm_kernel, _values, ("residual_ptr", "total_ptr"), norm_warps(_size), "fp16", **_types)
        )
        _values |= {"ZERO_CENTRED": True}
        _label = f"{_label} zero-centred"
        CASES.append(_case(_label, _rms_norm_kernel, _values, (), norm_warps(_size), **_types))
    _values = {"size": _size, "BLOCK": _size, "SPLITS": 4, "ZERO_CENTRED": False, "tokens_ptr": None}
    _types = {"eps": "fp32", "x_ptr": "*fp32", **_PAIR}
    _pair = _case(f"rms_norm {_size} with its pair", _rms_norm_kernel, _values, (), norm_warps(_size), **_types)
    CASES.append((*_pair[:4], {**_pair[4], "targets": ("sm_90",)}))
    _values = {"size": _size, "BLOCK": _size, "SPLITS": 1, "ZERO_CENTRED": False}
    _values |= {"parts_ptr": None, "scale_ptr": None}
    _types = {"eps": "fp32", "tokens_ptr": "*i64"}
    CASES.append(
        _case(f"embed_rms_norm {_size}", _rms_norm_kernel, _values, ("residual_ptr",), norm_warps(_size), **_types)
    )
_pair = _case("float8_pair", _float8_pair_kernel, {"BLOCK": _BLOCK}, (), _BLOCK // 512, PDL="i32", **_PAIR)
CASES.append((*_pair[:4], {**_pair[4], "targets": ("sm_90",), "aligned": (*_ALIGNED, "size")}))
for _size, _ranks, _splits in ((8192, 2, 2), (4096, 2, 1), (8192, 8, 1), (4096, 3, 3)):
    _values = {"size": _size, "BLOCK": _size, "SPLITS": _splits, "RANKS": _ranks, "ZERO_CENTRED": False}
    _types = dict.fromkeys(("place_addresses_ptr", "signal_addresses_ptr", "word_addresses_ptr"), "*i64")
    _types |= dict.fromkeys(("uses_ptr", "failed_ptr", "told_ptr"), "*i32")
    _types |= {"eps": "fp32", **({"x_ptr": "*fp32"} if _splits > 1 else {})}
    _label = f"rms_norm {_size} splits {_splits} of {_ranks} ranks"
    for _sent in (False, True):
        _values["SENT"] = _sent
        _how = (_shared_rms_norm_kernel, dict(_values), ("tokens_ptr",), norm_warps(_size))
        CASES.append(_case(f"{_label}{' sent' if _sent else ''}", *_how, **_types))
_types = {**_types, "tokens_ptr": "*i64", "x_ptr": "*bf16"}
_values = {**_values, "SPLITS": 1}
CASES.append(
    _case("embed of 3 ranks", _shared_rms_norm_kernel, _values, ("residual_ptr",), norm_warps(_size), **_types)
)
_values = {**_values, "ZERO_CENTRED": True}
_none = ("tokens_ptr", "residual_ptr", "total_ptr", "weight_ptr")
CASES.append(_case("add of 3 ranks", _shared_rms_norm_kernel, _values, _none, norm_warps(_size), **_types))
for _dim in (128, 64):
    for _splits in (1, 2):
        for _norms in ((), ("q_norm_ptr", "k_norm_ptr")):
            _values = {
                "num_kv_heads": 8, "group": 4, "half": _dim // 2, "HALF": _dim // 2, "rest": 0, "REST": 0, "GROUP": 4,
                "SPLITS": _splits, "ZERO_CENTRED": False, **_NO_TABLE,
            }  # fmt: skip
            _types = dict.fromkeys(("first_row_ptr", "depths_ptr"), "*i32")
            _types |= {"inv_freq_ptr": "*fp32", "scaling": "fp32", "eps": "fp32"}
            if _splits > 1:
                _types |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*fp32")
            _label = f"rotary d {_dim} splits {_splits}{'' if _norms else ' norms'}"
            CASES.append(_case(_label, _rotary_append_kernel, _values, _norms, **_types))
            if _splits == 2 and _norms:
                _values, _types = {**_values, "PAGE": 64}, {**_types, "table_ptr": "*i32"}
                del _values["table_ptr"]
                CASES.append(_case(f"{_label} pages of 64", _rotary_append_kernel, _values, _norms, **_types))
for _heads, _group in ((4, 4), (4, 6), (2, 8)):
    _values = {
        "num_kv_heads": _heads, "group": _group, "half": 32, "HALF": 32, "rest": 192, "REST": 256,
        "GROUP": 4 if _group == 4 else 8, "SPLITS": 1, "ZERO_CENTRED": True, **_NO_TABLE,
    }  # fmt: skip
    _types = {**dict.fromkeys(("first_row_ptr", "depths_ptr"), "*i32"), "inv_freq_ptr": "*fp32"}
    _types |= {"scaling": "fp32", "eps": "fp32"}
    CASES.append(_case(f"rotary d 256 group {_group} partial", _rotary_append_kernel, _values, **_types))
CASES.append(_case("swiglu", _swiglu_kernel, {"BLOCK": 1024}, (), 4))
CASES.append(_case("gate heads", _gate_heads_kernel, {"dim": 256, "BLOCK": 1024}, (), 4))
