"""Production settings of join_columns: logits of the 8b and 70b shapes over two and eight ranks."""

from eagle_triton.ops.exchange import join_columns
from tests.compile_cases._launches import bf16, launches, peers_of

_IN_WORDS = {"without": ("ld.volatile.global.b32", "ld.volatile.global.v2.b32", "ld.volatile.global.v4.b32")}
"""A word of eight bytes is read as a whole."""

CASES = [
    *launches("a tree", join_columns, bf16(60, 64128), peers_of(2, 512, 32768)),
    *launches("two trees, 8 ranks", join_columns, bf16(120, 16032), peers_of(8, 512, 32768)),
    *launches("a draft pass", join_columns, bf16(10, 16000), peers_of(2, 512, 16384), options=_IN_WORDS),
    *launches("an odd vocabulary", join_columns, bf16(60, 50257), peers_of(3, 512, 16384)),
]
