"""Production settings of rms_norm, rotary_append and swiglu: 8b and 1b shapes, whole and partial products."""

from eagle_triton.layers import _rms_norm_kernel, _rotary_append_kernel, _swiglu_kernel, norm_warps
from eagle_triton.runtime.launch import EXACT

_ALIGNED = (
    "stride_xs", "stride_xm", "stride_rm", "stride_gm", "stride_um", "stride_s", "capacity",
    *(f"stride_{tensor}{axis}" for tensor in "qkv" for axis in "bnh"), "stride_cs", "stride_cb", "stride_ch",
    "stride_ct",
)  # fmt: skip


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
        _values = {"size": _size, "BLOCK": _size, "SPLITS": _splits}
        _types = {"eps": "fp32", **({"x_ptr": "*fp32"} if _splits > 1 else {})}
        _label = f"rms_norm {_size} splits {_splits}"
        CASES.append(_case(f"{_label} residual", _rms_norm_kernel, _values, (), norm_warps(_size), **_types))
        CASES.append(
            _case(_label, _rms_norm_kernel, _values, ("residual_ptr", "total_ptr"), norm_warps(_size), "fp16", **_types)
        )
for _dim in (128, 64):
    for _splits in (1, 2):
        for _norms in ((), ("q_norm_ptr", "k_norm_ptr")):
            _values = {
                "num_kv_heads": 8, "group": 4, "half": _dim // 2, "HALF": _dim // 2, "GROUP": 4, "SPLITS": _splits,
            }  # fmt: skip
            _types = dict.fromkeys(("first_row_ptr", "positions_ptr"), "*i32")
            _types |= {"inv_freq_ptr": "*fp32", "scaling": "fp32", "eps": "fp32"}
            if _splits > 1:
                _types |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*fp32")
            _label = f"rotary d {_dim} splits {_splits}{'' if _norms else ' norms'}"
            CASES.append(_case(_label, _rotary_append_kernel, _values, _norms, **_types))
CASES.append(_case("swiglu", _swiglu_kernel, {"BLOCK": 1024}, (), 4))
