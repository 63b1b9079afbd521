"""Production settings of join_columns: logits of the 8b and 70b shapes over two and eight ranks."""

from eagle_triton.ops.exchange import _join_columns_kernel
from eagle_triton.runtime.launch import NO_FMA_FUSION

_TYPES = {
    **dict.fromkeys(("place_addresses_ptr", "signal_addresses_ptr", "word_addresses_ptr"), "*i64"),
    **dict.fromkeys(("uses_ptr", "failed_ptr", "told_ptr"), "*i32"),
}


def _case(name, block, ranks, sent=False, kind="i32"):
    values = {"BLOCK": block, "RANKS": ranks, "SENT": sent}
    signature = {
        argument: "constexpr"
        if argument in values
        else _TYPES.get(argument, f"*{kind}" if argument.endswith("_ptr") else "i32")
        for argument in _join_columns_kernel.arg_names
    }
    aligned = ("columns", "place_width", "word_width", "stride_pm")
    options = {**NO_FMA_FUSION, "num_warps": min(max(block // 512, 4), 16), "aligned": aligned}
    if sent:  # a word of eight bytes is read as a whole
        options["without"] = ("ld.volatile.global.b32", "ld.volatile.global.v2.b32", "ld.volatile.global.v4.b32")
    return name, _join_columns_kernel, signature, values, options


CASES = [
    _case("logits of a tree", 4096, 2),
    _case("logits of a tree, 8 ranks", 2048, 8),
    _case("logits of a draft pass", 2048, 2, sent=True),
    _case("logits of an odd vocabulary", 4096, 3, kind="bf16"),
]
