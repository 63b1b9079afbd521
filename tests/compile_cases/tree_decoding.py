"""Production settings of the kernels that grow a tree: N 60, K 10, D 8, V 128256 and 32000; and those of block drafters
whose paths have states: N 60, K 8, D 16, and the 64 best of V 151936."""

from eagle_triton.tree_decoding import best_first_tree, build_tree, expand_beam, topk
from tests.compile_cases._launches import bf16, fp16, fp32, i32, i64, launches

_SEQUENCES = i64(4, 600)


def _topk(logits, k: int = 10) -> list[tuple]:
    return launches(f"{logits.dtype} {logits.shape[1]}", topk, logits, k, offsets=i64(logits.shape[1]))


def _expand_beam(parents: int, k: int, width: int, **options) -> None:
    scores, children = fp32(4, parents), i64(4, parents * k)
    expand_beam(scores, fp32(4, parents, k), children, i64(4, parents, 2), 10, width, **options)


def _room(children: int, width: int) -> tuple:
    """What is written of a level in the arguments of build_tree."""
    return i64(4, 710)[:, :children], fp32(4, 710)[:, :children], i64(4, 70)[:, :width]


def _build_tree(candidates: int, beam: int, k: int, root=_SEQUENCES, **options) -> None:
    build_tree(root, i64(4, candidates), fp32(4, candidates), i64(4, beam), 60, k, **options)


def _best_first_tree(nodes: int, rows: int, k: int) -> None:
    lattice = 4, 15, rows, k
    next_rows = None if rows == 1 else i64(*lattice)
    best_first_tree(_SEQUENCES, fp32(*lattice), i64(*lattice), nodes, next_rows, lengths=i32(4))


CASES = [
    *(case for vocabulary in (32000, 128256) for empty in (bf16, fp16) for case in _topk(empty(10, vocabulary))),
    *_topk(bf16(15, 151936), 64),
    *launches("a level", _expand_beam, 10, 10, 10, out=_room(100, 10)),
    *launches("a fixed level", _expand_beam, 10, 10, 10, selected=i64(10)),
    *launches("lanes", _expand_beam, 64, 8, 64, out=_room(512, 64)),
    *launches("a tree", _build_tree, 710, 70, 10, lengths=i32(4)),
    *launches("a tree of lanes", _build_tree, 7688, 960, 8, lengths=i32(4)),
    *launches("a grafted tree", _build_tree, 726, 70, 10, lengths=i32(4), grafted=i32(4, 16)),
    *launches("a fixed tree", _build_tree, 710, 70, 10, i64(4), selected=i64(59)),
    *(
        case
        for nodes, rows, k in ((64, 1, 8), (256, 1, 16), (16, 1, 1), (128, 16, 8), (64, 64, 8))
        for case in launches(f"{nodes} nodes of {rows} by {k}", _best_first_tree, nodes, rows, k)
    ),
]
