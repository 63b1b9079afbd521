"""Production settings of counted n-grams: contexts of one and two tokens, three fillers."""

from eagle_triton.ops.ngram_table import _count_ngrams_kernel, _counted_drafts_kernel
from eagle_triton.runtime.launch import EXACT

_TYPES = {"best_ptr": "*i32", "used_ptr": "*i32", "first_ptr": "*i32", "end_ptr": "*i32", "lengths_ptr": "*i32"}
_TYPES |= {"best_counts_ptr": "*fp64", "counts_ptr": "*fp64"}


def _case(name: str, kernel, **constexprs) -> tuple:
    signature = {
        name: "constexpr" if name in constexprs else _TYPES.get(name, "*i64" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    options = {**EXACT, "num_warps": 1, "num_stages": 1, "aligned": ("places", "gram_places")}
    return name, kernel, signature, constexprs, options


CASES = [
    _case("count", _count_ngrams_kernel, WEIGHT=1.0, fillers_ptr=None),
    _case("count with fillers", _count_ngrams_kernel, WEIGHT=0.5),
    _case(
        "count with fillers, one column", _count_ngrams_kernel, WEIGHT=0.5, filled_columns=1, shortest=1, stride_fk=1
    ),
    _case("draft", _counted_drafts_kernel),
    _case("draft one token by one length", _counted_drafts_kernel, levels=1, drafts=1, shortest=1, stride_l=1),
]
