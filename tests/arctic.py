"""Random cases for Arctic's suffix tree, and its answers: those of its compiled module, or 200 that are kept here."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ANSWERS = Path(__file__).with_name("arctic_drafts.json")
FIELDS = ("token_ids", "parents", "probs", "score", "match_len")


def cases(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Sequences that repeat themselves, and a context: the end of the last one, or something else."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        vocabulary = int(rng.integers(2, 7))
        sequences = [rng.integers(0, vocabulary, rng.integers(1, 30)).tolist() for _ in range(rng.integers(1, 5))]
        context = sequences[-1][-int(rng.integers(1, 20)) :]
        if number % 3 == 0:
            context = rng.integers(0, vocabulary, rng.integers(1, 15)).tolist()
        yield {
            "sequences": sequences,
            "context": context,
            "max_tree_depth": int(rng.integers(2, 13)),
            "max_spec_tokens": int(rng.integers(0, 12)),
            "max_spec_factor": float(rng.choice([0.5, 1.0, 2.0])),
            "max_spec_offset": float(rng.choice([0.0, 1.0])),
            "min_token_prob": float(rng.choice([0.0, 0.1, 0.26, 0.6])),
            "use_tree_spec": bool(number % 2),
        }


def load(folder: str | Path) -> Any:
    """The compiled module `_C` of csrc/suffix_decoding of ArcticInference, from the folder it was built in."""
    paths = list(Path(folder).glob("_C*.so"))
    if len(paths) != 1:
        raise ValueError(f"{folder} must hold one _C*.so, got {len(paths)}")
    (path,) = paths
    spec = importlib.util.spec_from_file_location("_C", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(module: Any, case: dict[str, Any]) -> dict[str, Any]:
    """What its tree drafts, after a sequence more has been added and removed again."""
    depth = case["max_tree_depth"]
    context = case["context"][-depth:]
    tree = module.SuffixTree(depth)
    for number, sequence in enumerate(case["sequences"]):
        tree.extend(number, sequence)
    tree.extend(len(case["sequences"]), context)
    tree.remove(len(case["sequences"]))
    names = ("max_spec_tokens", "max_spec_factor", "max_spec_offset", "min_token_prob", "use_tree_spec")
    draft = tree.speculate(context, *(case[name] for name in names))
    return {name: getattr(draft, name) for name in FIELDS}


def kept() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The cases and answers of arctic_drafts.json."""
    return [(case, answer) for case, answer in json.loads(ANSWERS.read_text(encoding="utf-8"))]
