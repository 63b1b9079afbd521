"""Production settings of grafting: a tree of 60 nodes and ten children each, 16 drafts from repetition."""

from eagle_triton.operands.grafting import BUCKETS
from eagle_triton.operands.suffix_match import RepeatDrafts
from eagle_triton.ops.grafting import count_right, estimate_scores, graft
from tests.compile_cases._launches import fp32, i1, i32, i64, launches

_DRAFTS = RepeatDrafts(i64(4, 16), i32(4, 16), fp32(4, 16), i32(4), i32(4), i1(4))
_COUNTS, _BUCKETS = i32(BUCKETS, 16, 2), i32(4)
_NODES = i64(4, 100), fp32(4, 100), i64(4, 0), 1

CASES = [
    *launches("beams", graft, i64(4, 710), fp32(4, 710), i64(4, 70), 10, _DRAFTS, fp32(4, 16)),
    *launches("a tree", graft, *_NODES, _DRAFTS, fp32(4, 16), parents=i32(4, 100)),
    *launches("scores", estimate_scores, _DRAFTS, _COUNTS, buckets=_BUCKETS),
    *launches("counts", count_right, _COUNTS, _BUCKETS, i64(4, 16), i64(4, 600), i32(4), i32(4)),
]
