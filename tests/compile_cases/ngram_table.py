"""Production settings of counted n-grams: contexts of one and two tokens, three fillers."""

import torch

from eagle_triton.operands.ngram_table import new_ngram_table
from eagle_triton.ops.ngram_table import count_ngrams, counted_drafts
from tests.compile_cases._launches import i32, i64, launches

_TOKENS, _LENGTHS = i64(4, 600), i32(4)
_TABLE, _ALONE = (new_ngram_table(4, levels, 4096, 8192, torch.device("meta")) for levels in (2, 1))


def _count(*fillers, shortest: int = 1) -> None:
    count_ngrams(_TABLE, shortest, _TOKENS, _LENGTHS, _LENGTHS, *fillers)


CASES = [
    *launches("prompts", _count),
    *launches("fillers", _count, i64(4, 9, 3), 0.5, shortest=2),
    *launches("fillers of one column", _count, i64(4, 1, 3), 0.5),
    *launches("drafts", counted_drafts, _TABLE, 2, _TOKENS, _LENGTHS, 7),
    *launches("one token by one length", counted_drafts, _ALONE, 1, _TOKENS, _LENGTHS, 1),
]
