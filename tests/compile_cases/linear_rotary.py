"""q, k and v that are rotated and appended in one launch: settings that tools/tune_linear.py --rotary times."""

from eagle_triton.linear.streamed import PREFETCH_BYTES, TILE_LAYOUT
from eagle_triton.linear.streamed_rotary import _PAIRED_LAYOUT, RotaryStreaming, _block_m, linear_rotary_kernel
from eagle_triton.runtime.launch import EXACT

_TYPES = {
    "table_ptr": "*i32",
    "first_row_ptr": "*i32",
    "depths_ptr": "*i32",
    "inv_freq_ptr": "*fp32",
    "scaling": "fp32",
}
_ALIGNED = ("depth", "stride_cs", "stride_cb", "stride_ch", "stride_ct")


def _case(name: str, rows: int, settings: RotaryStreaming, heads=(32, 8, 128), dtype="bf16", bias=False, page=64):
    block_m = _block_m(rows)
    given = {
        "PAGE": page,
        **dict(zip(("HEADS", "KV_HEADS", "DIM"), heads, strict=True)),
        "BLOCK_M": block_m,
        **dict(zip(("BLOCK_K", "W_STAGES", "X_STAGES"), settings, strict=True)),
        "PREFETCH": PREFETCH_BYTES // (128 * settings.block_k),
    }
    if not bias:
        given |= dict.fromkeys(("q_bias_ptr", "k_bias_ptr", "v_bias_ptr"))
    if not page:
        given |= dict.fromkeys(("table_ptr", "depths_ptr"))
    signature = {}
    for argument in linear_rotary_kernel.arg_names:
        if argument in given:
            signature[argument] = "constexpr"
        elif argument.endswith("_desc"):
            x = argument == "x_desc"
            block = [block_m, settings.block_k] if x else [2, 32, settings.block_k]
            signature[argument] = f"tensordesc<{dtype}{block},{TILE_LAYOUT if x else _PAIRED_LAYOUT!r}>"
        else:
            signature[argument] = _TYPES.get(argument, f"*{dtype}" if argument.endswith("_ptr") else "i32")
    options = {**EXACT, "num_warps": 4, "launch_pdl": True, "aligned": _ALIGNED, "targets": ("sm_90",)}
    options["without_behind"] = ("griddepcontrol.launch_dependents", ".f64")  # angles are made while x comes
    return name, linear_rotary_kernel, signature, given, options


CASES = [
    _case("8b, one row", 1, RotaryStreaming(256, 6, 3)),
    _case("8b, 32 rows", 32, RotaryStreaming(128, 8, 4)),
    _case("8b, a tree", 60, RotaryStreaming(128, 6, 4)),
    _case("8b, a tree, small steps", 60, RotaryStreaming(64, 12, 6)),
    _case("1b, a tree, bias, fp16", 60, RotaryStreaming(128, 6, 4), (32, 8, 64), "fp16", bias=True),
    _case("heads of 256, no pages", 60, RotaryStreaming(128, 6, 4), (8, 4, 256), page=0),
]
