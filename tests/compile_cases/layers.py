"""Production settings of rms_norm, rotary_append, swiglu and gate_heads: 8b and 1b shapes, whole and partial products;
those of Qwen3.5 and Qwen3-Next, zero-centred norms and a quarter of each head rotated."""

from eagle_triton.ops.layers.fp8_pair_rows import _BLOCK, _float8_pair_kernel
from eagle_triton.ops.layers.gates import _gate_heads_kernel, _swiglu_kernel
from eagle_triton.ops.layers.norms import _rms_norm_kernel, _shared_rms_norm_kernel, norm_warps
from eagle_triton.ops.layers.rotary import HeadNorms, Projected, Temperature, Turn, _rotary_append_kernel
from eagle_triton.ops.layers.values import SplitRows
from eagle_triton.ops.views import CacheLayer, Heads, PairParts, Rows
from eagle_triton.runtime.launch import NO_FMA_FUSION
from eagle_triton.runtime.peer_exchange import Peers
from tests.compile_cases._views import typed

_ALIGNED = (
    "x.split", "x.row", "residual.row", "total.row", "gate.row", "up.row", "x.batch", "x.head", "gate.batch",
    "gate.head", "peers.place_rows", "peers.place_width", "peers.word_width", "capacity", "row_size",
    *(f"x.{heads}.{stride}" for heads in "qkv" for stride in ("batch", "row", "head")),
    *(f"cache.{stride}" for stride in ("side", "page", "head", "row")),
)  # fmt: skip
_PAIR = typed(PairParts, "*fp8e4nv")._replace(scale="*fp32")
_NO_TABLE = {"table_ptr": None, "PAGE": 0}
_NO_TOKENS = {"tokens_ptr": None, "pair": None, "WEIGHTS": 1}
_PEERS = Peers(*["*i64"] * 3, *["*i32"] * 3, *["i32"] * 5)


def _views(kernel, dtype: str, part: str) -> dict:
    """Views by the arguments' names; `part`: the dtype of what may be partial sums."""
    if kernel is _rotary_append_kernel:
        projected = Projected(*[typed(Heads, f"*{part}")] * 3, "i32")
        return {"x": projected, "cache": typed(CacheLayer, f"*{dtype}"), "turn": Turn("*fp32", "fp32")}
    if kernel is _gate_heads_kernel:
        return dict.fromkeys(("x", "gate"), typed(Heads, f"*{dtype}"))
    rows = dict.fromkeys(("residual", "total", "gate", "up"), typed(Rows, f"*{dtype}"))
    x = typed(Rows if kernel is _float8_pair_kernel else SplitRows, f"*{part}")
    return {**rows, "x": x, "pair": _PAIR, "peers": _PEERS}


_AS_MOST = {
    "ROUND_FIRST": True,
    "GELU_TANH": False,
    "PAIRS": False,
    "ROUND_TABLES": True,
    "WORD_ORDER": False,
    "temperature": None,
    "own_weight_ptr": None,
}  # constexprs that a case may leave out


def _case(name, kernel, values, absent=(), warps=1, dtype="bf16", part=None, **types):
    """`values`: constexprs; `absent`: pointers and views that are None; `part`: the dtype of what may be partial sums;
    `types`: of arguments that are not `dtype` or int32."""
    most = {name: value for name, value in _AS_MOST.items() if name in kernel.arg_names and name not in types}
    constexprs = {**most, **values, **dict.fromkeys(absent)}
    types = {**_views(kernel, dtype, part or dtype), **types}
    signature = {
        argument: "constexpr"
        if argument in constexprs
        else types.get(argument, f"*{dtype}" if argument.endswith("_ptr") else "i32")
        for argument in kernel.arg_names
    }
    return name, kernel, signature, constexprs, {**NO_FMA_FUSION, "num_warps": warps, "aligned": _ALIGNED}


CASES = []
for _size in (4096, 2048):
    for _splits in (1, 2) if _size == 4096 else ():
        _values = {"size": _size, "BLOCK": _size, "SPLITS": _splits, "ZERO_CENTRED": False, **_NO_TOKENS}
        _types = {"eps": "fp32", **({"part": "fp32"} if _splits > 1 else {})}
        _label = f"rms_norm {_size} splits {_splits}"
        CASES.append(_case(f"{_label} residual", _rms_norm_kernel, _values, (), norm_warps(_size), **_types))
        _own = dict(own_weight_ptr="*bf16", **_types)
        CASES.append(_case(f"{_label} of a norm", _rms_norm_kernel, _values, (), norm_warps(_size), **_own))
        CASES.append(
            _case(_label, _rms_norm_kernel, _values, ("residual", "total"), norm_warps(_size), "fp16", **_types)
        )
        _values |= {"ZERO_CENTRED": True}
        _label = f"{_label} zero-centred"
        CASES.append(_case(_label, _rms_norm_kernel, _values, (), norm_warps(_size), **_types))
        _values |= {"ZERO_CENTRED": False, "ROUND_FIRST": False, "WORD_ORDER": True}
        _label = f"rms_norm {_size} splits {_splits} rounded once, in the order of words"
        CASES.append(_case(_label, _rms_norm_kernel, _values, (), norm_warps(_size), **_types))
    _values = {"size": _size, "BLOCK": _size, "SPLITS": 4, "ZERO_CENTRED": False, "WEIGHTS": 1, "tokens_ptr": None}
    _types = {"eps": "fp32", "part": "fp32"}
    _pair = _case(f"rms_norm {_size} with its pair", _rms_norm_kernel, _values, (), norm_warps(_size), **_types)
    CASES.append((*_pair[:4], {**_pair[4], "targets": ("sm_90",)}))
    _values = {"size": _size, "BLOCK": _size, "SPLITS": 1, "ZERO_CENTRED": False}
    _values |= {"pair": None, "WEIGHTS": 1}
    _types = {"eps": "fp32", "tokens_ptr": "*i64"}
    CASES.append(
        _case(f"embed_rms_norm {_size}", _rms_norm_kernel, _values, ("residual",), norm_warps(_size), **_types)
    )
    _values = {"size": _size, "BLOCK": _size, "SPLITS": 1, "ZERO_CENTRED": False, **_NO_TOKENS, "WEIGHTS": 3}
    _types = {"eps": "fp32", "weight_ptr": ("*bf16",) * 3}
    _how = (_rms_norm_kernel, _values, ("residual", "total"), norm_warps(_size))
    CASES.append(_case(f"rms_norm {_size} with 3 weights", *_how, **_types))
_pair = _case("float8_pair", _float8_pair_kernel, {"BLOCK": _BLOCK}, (), _BLOCK // 512, PDL="i32")
CASES.append((*_pair[:4], {**_pair[4], "targets": ("sm_90",), "aligned": (*_ALIGNED, "size")}))
for _size, _ranks, _splits in ((8192, 2, 2), (4096, 2, 1), (8192, 8, 1), (4096, 3, 3)):
    _values = {"size": _size, "BLOCK": _size, "SPLITS": _splits, "RANKS": _ranks, "ZERO_CENTRED": False}
    _types = {"eps": "fp32", **({"part": "fp32"} if _splits > 1 else {})}
    _label = f"rms_norm {_size} splits {_splits} of {_ranks} ranks"
    for _sent in (False, True):
        _values["SENT"] = _sent
        _how = (_shared_rms_norm_kernel, dict(_values), ("tokens_ptr",), norm_warps(_size))
        CASES.append(_case(f"{_label}{' sent' if _sent else ''}", *_how, **_types))
_types = {**_types, "tokens_ptr": "*i64", "part": "bf16"}
_values = {**_values, "SPLITS": 1}
CASES.append(_case("embed of 3 ranks", _shared_rms_norm_kernel, _values, ("residual",), norm_warps(_size), **_types))
_values = {**_values, "ZERO_CENTRED": True}
_once = {**_values, "ZERO_CENTRED": False, "ROUND_FIRST": False}
_how = (_shared_rms_norm_kernel, _once, ("tokens_ptr",), norm_warps(_size))
CASES.append(_case("rms_norm of 3 ranks rounded once", *_how, **_types))
_none = ("tokens_ptr", "residual", "total", "weight_ptr")
CASES.append(_case("add of 3 ranks", _shared_rms_norm_kernel, _values, _none, norm_warps(_size), **_types))
for _dim, _parts in ((128, (1, 2)), (64, (2,))):
    for _splits in _parts:
        for _norms in (HeadNorms("*bf16", "*bf16", "fp32"), HeadNorms(None, None, "fp32")):
            _values = {
                "num_kv_heads": 8, "group": 4, "half": _dim // 2, "rest": 0, "SPLITS": _splits, "ZERO_CENTRED": False,
                **_NO_TABLE,
            }  # fmt: skip
            _types = dict.fromkeys(("first_row_ptr", "depths_ptr"), "*i32")
            _types |= {"norms": _norms, **({"part": "fp32"} if _splits > 1 else {})}
            _label = f"rotary d {_dim} splits {_splits}{' norms' if _norms.q else ''}"
            CASES.append(_case(_label, _rotary_append_kernel, _values, **_types))
            if _splits == 2 and not _norms.q:
                _values, _types = {**_values, "PAGE": 64}, {**_types, "table_ptr": "*i32"}
                del _values["table_ptr"]
                CASES.append(_case(f"{_label} pages of 64", _rotary_append_kernel, _values, **_types))
_values = {
    "num_kv_heads": 8, "group": 1, "half": 64, "rest": 0, "SPLITS": 4, "ZERO_CENTRED": False, **_NO_TABLE,
}  # fmt: skip
_types = {"first_row_ptr": "*i32", "depths_ptr": None, "norms": HeadNorms("*bf16", "*bf16", "fp32"), "part": "fp32"}
CASES.append(_case("rotary d 128 keys in the queries' place", _rotary_append_kernel, _values, **_types))
for _heads, _group in ((4, 6), (2, 8)):
    _values = {
        "num_kv_heads": _heads, "group": _group, "half": 32, "rest": 192, "SPLITS": 1, "ZERO_CENTRED": True,
        **_NO_TABLE,
    }  # fmt: skip
    _types = {**dict.fromkeys(("first_row_ptr", "depths_ptr"), "*i32"), "norms": HeadNorms("*bf16", "*bf16", "fp32")}
    CASES.append(_case(f"rotary d 256 group {_group} partial", _rotary_append_kernel, _values, **_types))
_values |= {"ZERO_CENTRED": False, "ROUND_FIRST": False}
CASES.append(_case(f"rotary d 256 group {_group} partial rounded once", _rotary_append_kernel, _values, **_types))
for _heads, _group, _half, _splits in ((4, 8, 256, 1), (2, 8, 256, 2), (16, 2, 128, 1)):  # Gemma 4
    _values = {
        "num_kv_heads": _heads, "group": _group, "half": _half, "rest": 0, "SPLITS": _splits, "ZERO_CENTRED": False,
        "ROUND_FIRST": False, "PAGE": 64,
    }  # fmt: skip
    _types = {**dict.fromkeys(("first_row_ptr", "depths_ptr", "table_ptr"), "*i32"), "warps": 4 if _half > 128 else 1}
    _types |= {"norms": HeadNorms("*bf16", "*bf16", "fp32", "*bf16"), **({"part": "fp32"} if _splits > 1 else {})}
    _label = f"rotary d {2 * _half} group {_group} splits {_splits} value norm"
    CASES.append(_case(_label, _rotary_append_kernel, _values, **_types))
_alone = {**_types, "x": Projected(typed(Heads, "*bf16"), None, None, "i32"), "warps": 4}
_alone |= {"norms": HeadNorms("*bf16", None, "fp32")}
CASES.append(_case("rotary d 512 queries alone", _rotary_append_kernel, {**_values, "half": 256}, **_alone))
for _dim, _turned, _splits in ((128, 128, 2), (128, 64, 1)):
    _values = {
        "num_kv_heads": 8, "group": 4, "half": _turned // 2, "rest": _dim - _turned, "SPLITS": _splits,
        "ZERO_CENTRED": False, **_NO_TABLE,
    }  # fmt: skip
    _types = dict.fromkeys(("first_row_ptr", "depths_ptr"), "*i32")
    _types |= {"norms": HeadNorms(None, None, "fp32"), **({"part": "fp32"} if _splits > 1 else {})}
    _label = f"rotary d {_dim} {_turned} turned splits {_splits}"
    CASES.append(_case(f"{_label} pairs", _rotary_append_kernel, {**_values, "PAIRS": True}, **_types))
    CASES.append(_case(f"{_label} fp32 tables", _rotary_append_kernel, {**_values, "ROUND_TABLES": False}, **_types))
    _warm = {**_types, "temperature": Temperature("fp32", "i32")}
    CASES.append(_case(f"{_label} temperature", _rotary_append_kernel, _values, **_warm))
_types |= {"turn": Turn(None, "fp32")}
CASES.append(_case("rotary d 128 nothing turned", _rotary_append_kernel, {**_values, "half": 64, "rest": 0}, **_types))
CASES.append(_case("swiglu", _swiglu_kernel, {"BLOCK": 1024}, (), 4))
CASES.append(_case("swiglu gelu_tanh", _swiglu_kernel, {"BLOCK": 1024, "GELU_TANH": True}, (), 4))
CASES.append(_case("gate heads", _gate_heads_kernel, {"dim": 256, "BLOCK": 1024}, (), 4))
