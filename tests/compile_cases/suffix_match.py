"""Production settings of the drafts from repetition: 16 places, 128 matches of at most 64 tokens, eight sequences."""

from eagle_triton.operands.suffix_match import SuffixRules, TokenRing
from eagle_triton.ops.suffix_match import ngram_drafts, suffix_drafts
from tests.compile_cases._launches import i32, i64, launches

_RING = TokenRing(i32(1 << 20), i32(1))
_TOKENS, _LENGTHS = i64(8, 32768), i32(8)
_LOCAL = {"match_kernel": 8}  # bytes of local memory


def _drafts(ring: TokenRing | None = _RING, batch: int = 8, places: int = 16, **rules) -> None:
    suffix_drafts(_TOKENS[:batch], _LENGTHS[:batch], ring, places, SuffixRules(min_match=2, **rules))


CASES = [
    *launches("a path", _drafts, options=dict(local=_LOCAL)),
    *launches("one sequence, banned", _drafts, batch=1, banned=(2, 128001), options=dict(local=_LOCAL)),
    *launches("without a ring, banned", _drafts, None, banned=(2, 128001)),
    *launches("without a ring", _drafts, None),
    *launches("a tree", _drafts, use_tree_spec=True, options=dict(local=_LOCAL)),
    *launches(
        "a tree of 64", _drafts, places=64, use_tree_spec=True, options=dict(local={**_LOCAL, "_draft_kernel": 160})
    ),
    *launches("n-grams", ngram_drafts, _TOKENS, _LENGTHS, _LENGTHS, 16),
    *launches("n-grams joined", ngram_drafts, _TOKENS, _LENGTHS, _LENGTHS, 16, match="latest", joined=True),
]
