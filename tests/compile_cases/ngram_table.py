"""Production settings of counted n-grams: contexts of one and two tokens, three fillers."""

from eagle_triton.ops.ngram_table import Fillers, Tables, _count_ngrams_kernel, _counted_drafts_kernel
from eagle_triton.runtime.launch import NO_FMA_FUSION
from tests.compile_cases._views import typed

_TYPES = dict.fromkeys(("best_ptr", "used_ptr", "first_ptr", "end_ptr", "lengths_ptr"), "*i32")
_TYPES["tables"] = Tables(contexts="*i64", best="*i32", best_counts="*fp64", grams="*i64", counts="*fp64")
_FILLERS = typed(Fillers, "*i64")


def _case(name: str, kernel, fillers=_FILLERS, **constexprs) -> tuple:
    """Fields of `fillers` that are "constexpr" are 1."""
    if fillers is None:
        constexprs["fillers"] = None
    elif "fillers" in kernel.arg_names:
        place = kernel.arg_names.index("fillers")
        constexprs |= {(place, field): 1 for field, kind in enumerate(fillers) if kind == "constexpr"}
    types = {**_TYPES, "fillers": fillers}
    signature = {
        name: "constexpr" if name in constexprs else types.get(name, "*i64" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    options = {**NO_FMA_FUSION, "num_warps": 1, "num_stages": 1, "aligned": ("places", "gram_places")}
    return name, kernel, signature, constexprs, options


CASES = [
    _case("count", _count_ngrams_kernel, WEIGHT=1.0, fillers=None),
    _case("count with fillers", _count_ngrams_kernel, WEIGHT=0.5),
    _case(
        "count with fillers, one column",
        _count_ngrams_kernel,
        _FILLERS._replace(columns="constexpr", guess="constexpr"),
        WEIGHT=0.5,
        shortest=1,
    ),
    _case("draft", _counted_drafts_kernel),
    _case("draft one token by one length", _counted_drafts_kernel, levels=1, drafts=1, shortest=1, stride_l=1),
]
