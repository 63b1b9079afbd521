"""Suffix drafts against Arctic's own compiled tree: the same counts, and the same drafts where no tie decides."""

import os

import pytest
import torch

from eagle_triton.operands.suffix_match import END, SuffixRules
from eagle_triton.reference.suffix_match import match_lengths, suffix_draft
from tests import arctic

NAMES = ("max_tree_depth", "max_spec_tokens", "max_spec_factor", "max_spec_offset", "min_token_prob", "use_tree_spec")


def store_and_context(case) -> tuple[torch.Tensor, torch.Tensor]:
    flat = [token for sequence in case["sequences"] for token in (*sequence, END)]
    return tuple(torch.tensor(ids, dtype=torch.int32) for ids in (flat, case["context"][-case["max_tree_depth"] :]))


def recounted(case, theirs) -> bool:
    """Whether the probabilities of their draft are shares of occurrences."""
    store, context = store_and_context(case)
    places = (match_lengths(store, context, len(context) - 1) >= theirs["match_len"]).nonzero()[:, 0]
    behind = {-1: (places, 0)}
    drafted = zip(theirs["token_ids"], theirs["parents"], theirs["probs"], strict=True)
    for index, (token, parent, prob) in enumerate(drafted):
        here, level = behind[parent]
        here = here[store[here + level] == token]
        behind[index] = here, level + 1
        if not len(here) or abs(len(here) / len(places) - prob) > 1e-5:
            return False
    return True


def compare(pairs) -> tuple[int, int, int, int]:
    """How many of their drafts hold tokens, have our counts, have our score, and are our tokens."""
    drafts = counts = scores = tokens = 0
    for case, theirs in pairs:
        store, context = store_and_context(case)
        ours = suffix_draft(store, context, SuffixRules(**{name: case[name] for name in NAMES}, parity=True))
        drafts += bool(theirs["token_ids"])
        counts += recounted(case, theirs)
        scores += abs(ours.score - theirs["score"]) < 1e-4
        tokens += ours.tokens.tolist() == theirs["token_ids"] and ours.parents.tolist() == theirs["parents"]
    return drafts, counts, scores, tokens


def check(pairs) -> None:
    """Their ties are an accident of updates, and what lies below a tie differs: some scores and more tokens do."""
    drafts, counts, scores, tokens = compare(pairs)
    assert drafts > len(pairs) / 2
    assert counts == len(pairs)
    assert scores > 0.97 * len(pairs) and tokens > 0.8 * len(pairs)


def test_the_drafts_that_are_kept():
    pairs = arctic.kept()
    assert len(pairs) == 200
    check(pairs)
    worse = [(case, {**theirs, "probs": [prob * 0.9 for prob in theirs["probs"]]}) for case, theirs in pairs]
    assert compare(worse)[1] < 100, "other probabilities pass too"


@pytest.mark.skipif("ARCTIC_C" not in os.environ, reason="ARCTIC_C: where Arctic's csrc/suffix_decoding was built")
def test_a_thousand_fresh_drafts():
    module = arctic.load(os.environ["ARCTIC_C"])
    check([(case, arctic.answer(module, case)) for case in arctic.cases(1000, seed=1)])
