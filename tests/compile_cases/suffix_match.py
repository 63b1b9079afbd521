"""Production settings of the drafts from repetition: 16 places, 128 matches of at most 64 tokens, eight sequences."""

from eagle_triton.ops.suffix_match.matches import Ring, match_kernel, walk_kernel
from eagle_triton.ops.suffix_match.ngrams import _ngram_draft_kernel, _ngram_match_kernel
from eagle_triton.ops.suffix_match.suffixes import DraftRules, Records, _choose_kernel, _draft_kernel, draft_warps
from eagle_triton.reference.suffix_match import RepeatDrafts
from eagle_triton.runtime.launch import NO_FMA_FUSION

_TYPES = {
    "tokens_ptr": "*i64",
    "ring": Ring("*i32", "*i32", "i32"),
    "records": Records(nodes="*i32", probs="*fp32", scores="*fp32", found="*i32"),
    "drafts": RepeatDrafts("*i64", "*i32", "*fp32", "*i32", "*i32", "*i1"),
}
_RULES = DraftRules(DEPTH=64, FACTOR=1.0, OFFSET=0.0, MIN_PROB=0.1, TREE=False, BANNED=())
_SIZES = {"GROUP": 8, "WIDTH": 128, "TILE": 32, "J": 16, "RECORDS": 16, "CHUNKS": 32, "LATEST": False, "JOINED": False}


def _case(name: str, kernel, warps: int, local: int = 0, **changes) -> tuple:
    rules = _RULES._replace(**{name: changes[name] for name in changes.keys() & set(_RULES._fields)})
    constexprs = {"RULES": rules, **rules._asdict(), **_SIZES, **changes}
    constexprs = {name: value for name, value in constexprs.items() if name in kernel.arg_names}
    signature = {
        name: "constexpr" if name in constexprs else _TYPES.get(name, "*i32" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    options = {**NO_FMA_FUSION, "num_warps": warps, "aligned": ("stride_tb", "places"), "local": local}
    return name, kernel, signature, constexprs, options


_OWN = {"ring": None}
_BANNED = {"BANNED": (2, 128001)}
CASES = [
    _case("match", match_kernel, 4, local=8),
    _case("match, one sequence, banned", match_kernel, 4, local=8, GROUP=1, **_BANNED),
    _case("match without a ring", match_kernel, 4, **_OWN),
    _case("walk", walk_kernel, 4),
    _case("draft", _draft_kernel, draft_warps(False, 16)),
    _case("draft without a ring, banned", _draft_kernel, draft_warps(False, 16), **_OWN, **_BANNED),
    _case("draft a tree", _draft_kernel, draft_warps(True, 16), TREE=True),
    _case("draft a tree of 64", _draft_kernel, draft_warps(True, 64), local=160, TREE=True, J=64),
    _case("choose", _choose_kernel, 1),
    _case("n-gram match", _ngram_match_kernel, 4),
    _case("n-gram match, joined, latest", _ngram_match_kernel, 4, JOINED=True, LATEST=True),
    _case("n-gram draft", _ngram_draft_kernel, 1),
    _case("n-gram draft, joined, latest", _ngram_draft_kernel, 1, JOINED=True, LATEST=True),
]
