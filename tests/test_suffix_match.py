"""Drafts from repetition: the reference and SuffixDecodingCache against a naive trie, the n-gram rule, the kernels."""

import itertools
from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_triton.inference import SuffixDecodingCache, SuffixDecodingDraft
from eagle_triton.operands.suffix_match import END, SuffixRules, TokenRing
from eagle_triton.ops import suffix_match as kernels
from eagle_triton.reference import suffix_match as reference
from eagle_triton.reference.suffix_match import match_lengths, ngram_draft, suffix_draft
from tests.failing import check_refused


def ints(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def store_of(sequences) -> torch.Tensor:
    return ints(token for sequence in sequences for token in (*sequence, END))


class Trie:
    """Every substring of at most `depth` tokens, how often it occurs and where its last occurrence ends."""

    def __init__(self, sequences, depth: int, banned=()):
        self.depth, self.banned = depth, set(banned)
        self.count: Counter = Counter()
        self.last: dict = {}
        self.next: dict = defaultdict(set)
        begin = 0
        for tokens in sequences:
            for start, stop in itertools.combinations(range(len(tokens) + 1), 2):
                if stop - start <= depth:
                    text = tuple(tokens[start:stop])
                    self.count[text] += 1
                    self.last[text] = begin + stop
                    self.next[text[:-1]].add(text[-1])
            begin += len(tokens) + 1

    def draft(self, context, rules: SuffixRules) -> tuple:
        """(tokens, parents, probs, match_len), the probabilities as fractions."""
        context = tuple(context[-self.depth :])
        best, score = ([], [], [], 0), Fraction(0)
        for m in range(1, len(context) + (not rules.parity)):
            if context[len(context) - m :] not in self.count:
                break
            wanted = int(m * rules.max_spec_factor + rules.max_spec_offset + 1e-6)
            most = wanted if rules.max_spec_tokens is None else min(wanted, rules.max_spec_tokens)
            found = (self._tree if rules.use_tree_spec else self._path)(context[len(context) - m :], most, rules)
            if sum(found[2]) >= score:
                best, score = (*found, m), sum(found[2])
        return best

    def _options(self, text, prob, rules):
        """Continuations by one token with their probabilities."""
        following = [(*text, token) for token in self.next[text] - self.banned]
        whole = self.count[text] if rules.parity else sum(self.count[longer] for longer in following)
        return [(longer, prob * Fraction(self.count[longer], whole)) for longer in following]

    def _path(self, text, most, rules):
        tokens, probs, prob = [], [], Fraction(1)
        while len(tokens) < most and (options := self._options(text, prob, rules)):
            text, prob = max(options, key=lambda option: (option[1], self.last[option[0]]))
            if prob + 1e-6 < rules.min_token_prob:
                break
            tokens.append(text[-1])
            probs.append(prob)
        return tokens, list(range(-1, len(tokens) - 1)), probs

    def _tree(self, text, most, rules):
        tokens, parents, probs = [], [], []
        seen = [(option, -1) for option in self._options(text, Fraction(1), rules)]
        while len(tokens) < most:
            seen = [entry for entry in seen if entry[0][1] + 1e-6 >= rules.min_token_prob]
            if not seen:
                break
            best = max(seen, key=lambda entry: (entry[0][1], -len(entry[0][0]), self.last[entry[0][0]]))
            seen.remove(best)
            (longer, prob), parent = best
            tokens.append(longer[-1])
            parents.append(parent)
            probs.append(prob)
            seen += [(option, len(tokens) - 1) for option in self._options(longer, prob, rules)]
        return tokens, parents, probs


def same(draft, expected) -> None:
    """A draft of the reference or of the class is what the trie says."""
    tokens, parents, probs, match_len = expected
    values = list(draft) if isinstance(draft, tuple) else [draft.token_ids, draft.parents, draft.probs]
    assert [list(map(int, part)) for part in values[:2]] == [tokens, parents]
    assert list(map(float, values[2])) == pytest.approx([float(prob) for prob in probs], rel=1e-6)
    assert draft.score == pytest.approx(float(sum(probs)))
    if probs:  # else a match that nothing follows may be left out
        assert draft.match_len == match_len


def some_rules(rng, tree: bool) -> dict:
    return {
        "max_spec_tokens": None if rng.random() < 0.2 else int(rng.integers(0, 12)),
        "max_spec_factor": float(rng.choice([0.5, 1.0, 2.0])),
        "max_spec_offset": float(rng.choice([-1.0, 0.0, 1.0])),
        "min_token_prob": float(rng.choice([0.0, 0.1, 0.26, 0.5, 0.6])),
        "use_tree_spec": tree,
    }


MODES = pytest.mark.parametrize(("tree", "parity"), [*itertools.product([False, True], repeat=2)], ids=str)


@MODES
def test_the_reference_equals_a_trie(tree, parity):
    rng = np.random.default_rng(2 * tree + parity)
    drafted = 0
    for case in range(300):
        vocabulary, depth = int(rng.integers(2, 7)), int(rng.integers(1, 13))
        sequences = [rng.integers(0, vocabulary, rng.integers(0, 24)).tolist() for _ in range(rng.integers(1, 5))]
        context = sequences[-1][-int(rng.integers(1, 20)) :]
        if case % 3 == 0:  # one that is not the end of a sequence
            context = rng.integers(0, vocabulary, rng.integers(0, 12)).tolist()
        banned = tuple(rng.integers(0, vocabulary, case % 2).tolist())
        rules = SuffixRules(depth, parity=parity, banned=banned, **some_rules(rng, tree))
        expected = Trie(sequences, depth, banned).draft(context, rules)
        same(suffix_draft(store_of(sequences), ints(context), rules), expected)
        drafted += bool(expected[0])
    assert drafted > 120


@MODES
def test_the_cache_equals_tries_while_requests_come_and_go(tree, parity):
    rng = np.random.default_rng(10 + 2 * tree + parity)
    from_local = from_others = queries = 0
    while queries < 400:
        depth, limit, vocabulary = int(rng.integers(2, 13)), int(rng.integers(-1, 4)), int(rng.integers(2, 6))
        cache = SuffixDecodingCache(depth, limit, parity)
        local: dict = {}
        outputs: dict = {}
        for _ in range(40):
            action, request = rng.choice(["add", "start", "stop", "evict", "ask", "ask"]), int(rng.integers(5))
            tokens = rng.integers(0, vocabulary, rng.integers(0, 8)).tolist()
            if action == "start" and request not in local:
                cache.start_request(request, tokens)
                local[request] = tokens
                outputs.pop(request, None)
                outputs[request] = []
                if limit >= 0:
                    outputs = dict(list(outputs.items())[max(0, len(outputs) - limit) :])
            elif action == "add" and request in local:
                cache.add_active_response(request, tokens)
                local[request] = local[request] + tokens
                if request in outputs:
                    outputs[request] = outputs[request] + tokens
            elif action == "stop" and request in local and rng.random() < 0.5:
                cache.stop_request(request)
                del local[request]
            elif action == "evict" and request in outputs and rng.random() < 0.3:
                cache.evict_cached_response(request)
                del outputs[request]
            elif action == "ask" and local.get(request):
                options = some_rules(rng, tree)
                rules = SuffixRules(depth, parity=parity, **options)
                others = [said for other, said in outputs.items() if parity or other != request]
                said = others[int(rng.integers(len(others)))] if others else []
                context = [local[request], local[request], tokens, said[:-1]][int(rng.integers(4))]
                mine = Trie([local[request]], depth).draft(context, rules)
                theirs = Trie(others, depth).draft(context, rules)
                wins = sum(mine[2]) >= sum(theirs[2])
                same(cache.speculate(request, context, **options), mine if wins else theirs)
                queries += 1
                from_local += bool(wins and mine[0])
                from_others += not wins
            assert list(cache.active_requests) == list(local) and list(cache.cached_requests) == list(outputs)
    assert from_local > 80 and from_others > 5


def asked(prompt, context, *, parity=True, depth=64, **options) -> SuffixDecodingDraft:
    """What one request with this prompt is drafted."""
    cache = SuffixDecodingCache(depth, parity=parity)
    cache.start_request("only", prompt)
    return cache.speculate("only", context, **options)


REPEATED = [1, 2, 3, 4, 5, 1, 2, 3]


@pytest.mark.parametrize(
    ("context", "options", "expected"),
    [
        ([1, 2, 3], {}, ([4, 5], [0.5, 0.5], 2)),
        ([5, 1, 2, 3], {}, ([4, 5, 1], [0.5] * 3, 3)),
        ([1, 2, 3], {"max_spec_factor": 2}, ([4, 5, 1, 2], [0.5] * 4, 2)),
        ([1, 2, 3], {"max_spec_offset": 1}, ([4, 5, 1], [0.5] * 3, 2)),
        ([1, 2, 3], {"min_token_prob": 0.6}, ([], [], 2)),
        ([3], {}, ([], [], 0)),
    ],
    ids=["path", "longer match", "factor", "offset", "too unlikely", "one token"],
)
def test_parity_counts_the_end_of_the_context(context, options, expected):
    draft = asked(REPEATED, context, max_spec_tokens=8, **options)
    assert (draft.token_ids, draft.probs, draft.match_len) == expected and draft.score == sum(expected[1])
    assert draft.parents == list(range(-1, len(expected[0]) - 1))


def test_a_unique_repeat_is_certain_and_the_whole_context_may_match():
    draft = asked(REPEATED, [1, 2, 3], parity=False, max_spec_tokens=8, min_token_prob=0.6)
    assert draft == SuffixDecodingDraft([4, 5, 1], [-1, 0, 1], [1.0] * 3, 3.0, 3)
    assert asked(REPEATED, [3], parity=False).token_ids == [4]
    with_an_end = asked([1, 2, 1, 2], [1], parity=False, max_spec_factor=4)  # of two that go on with 2, one ends there
    assert (with_an_end.token_ids, with_an_end.probs) == ([2, 1, 2], [1.0] * 3)


@pytest.mark.parametrize("parity", [False, True], ids=["ours", "parity"])
def test_three_outputs(parity):
    cache = SuffixDecodingCache(parity=parity)
    for request, last in enumerate((14, 15, 14)):
        cache.start_request(request, [])
        cache.add_active_response(request, [10, 11, 12, 13])
        cache.add_active_response(request, [last])
        cache.stop_request(request)
    cache.start_request("new", [])
    path = cache.speculate("new", [9, 10, 11, 12])
    assert (path.token_ids, path.match_len, path.parents) == ([13, 14], 3, [-1, 0])
    assert path.probs == pytest.approx([1, 2 / 3]) and path.score == pytest.approx(5 / 3)
    tree = {"max_spec_factor": 4, "use_tree_spec": True}
    draft = cache.speculate("new", [9, 10, 11, 12], **tree)
    assert (draft.token_ids, draft.parents) == ([13, 14, 15], [-1, 0, 0])
    assert draft.probs == pytest.approx([1, 2 / 3, 1 / 3])
    assert cache.speculate("new", [9, 10, 11, 12], min_token_prob=0.7, **tree).token_ids == [13]
    assert cache.speculate("new", [9, 10, 11, 12], min_token_prob=0.4, **tree).token_ids == [13, 14]
    cache.evict_cached_response(0)
    draft = cache.speculate("new", [9, 10, 11, 12, 13], **tree)
    assert (draft.token_ids, draft.parents, draft.probs) == ([14, 15], [-1, -1], [0.5, 0.5])


def test_match_and_draft_share_the_depth():
    for parity in (False, True):
        draft = asked(range(1, 9), [0, 1, 2], depth=4, parity=parity, max_spec_factor=4)
        assert (draft.token_ids, draft.match_len) == ([3, 4, 5], 1)
    assert asked(range(100), range(50), depth=8, max_spec_factor=0.5).match_len == 6  # the last 8 tokens, less one
    assert asked(range(100), range(50), depth=1, parity=False).token_ids == []


def test_no_limit_none_and_rounding_of_the_budget():
    text = [*range(20), 50, *range(10)]
    assert len(asked(text, range(10), parity=False, max_spec_tokens=None).token_ids) == 10
    assert asked(text, range(10), parity=False, max_spec_tokens=0).token_ids == []
    assert len(asked(text, range(10), parity=False, max_spec_factor=0.39).token_ids) == 3
    assert asked(text, range(10), parity=False, max_spec_offset=-10).token_ids == []
    text = [*range(60), 99, *range(25)]
    assert len(asked(text, range(25), parity=False, max_spec_factor=1.16).token_ids) == 29  # 1.16 * 25 < 29 in floats


def test_own_output_is_looked_up_in_one_store_unless_parity():
    """Once in the prompt as 1 2 3, said as 1 2 4: the local store has seen both, the other one only what was said."""
    drafts = {}
    for parity in (False, True):
        cache = SuffixDecodingCache(parity=parity)
        cache.start_request("a", [1, 2, 3, 9])
        cache.add_active_response("a", [1, 2, 4])
        drafts[parity] = cache.speculate("a", [7, 1, 2])
    assert (drafts[False].token_ids, drafts[False].probs) == ([4], [0.5])
    assert (drafts[True].token_ids, drafts[True].probs) == ([4], [1.0])


def test_the_local_store_wins_ties_and_prompts_are_private():
    cache = SuffixDecodingCache()
    cache.start_request("other", [5, 6, 7])
    cache.start_request("mine", [1, 2, 3, 8])
    cache.add_active_response("other", [1, 2, 4, 8])
    assert cache.speculate("mine", [1, 2]).token_ids == [3, 8]
    assert cache.speculate("mine", [5, 6]).token_ids == [] and cache.speculate("other", [5, 6]).token_ids == [7, 1]
    assert cache.speculate("mine", [2, 4]).token_ids == [8]


def test_the_limits_of_a_cache_are_fixed():
    cache = SuffixDecodingCache(max_tree_depth=9)
    for name in ("max_tree_depth", "max_cached_requests"):
        with pytest.raises(AttributeError):
            setattr(cache, name, -3)
    assert (cache.max_tree_depth, cache.max_cached_requests) == (9, -1)


def test_a_banned_token_ends_a_continuation():
    cache = SuffixDecodingCache(ban_tokens={7, 3})
    cache.start_request("a", [1, 2, 7, 8, 0, 1, 2, 9, 3, 5])
    assert cache.speculate("a", [0, 1, 2]).token_ids == [9]
    assert cache.speculate("a", [0, 1, 2]).probs == [1.0]
    assert cache.speculate("a", [2, 7]).token_ids == [8, 0]  # a match may hold one
    draft = suffix_draft(ints([1, 7, END, 1, 9, END]), ints([0, 1]), SuffixRules(parity=True, banned=(7,)))
    assert draft.tokens.tolist() == [9] and draft.probs.tolist() == [0.5]


def test_the_oldest_request_is_forgotten_first():
    cache = SuffixDecodingCache(max_cached_requests=2)
    for request in "abc":
        cache.start_request(request, [])
        cache.add_active_response(request, [1, 2, ord(request)])
    assert list(cache.cached_requests) == ["b", "c"] and list(cache.active_requests) == ["a", "b", "c"]
    cache.add_active_response("a", [1, 2, 50])  # active still, cached no more
    assert cache.speculate("c", [1, 2]).token_ids == [ord("c")] and cache.max_cached_requests == 2
    assert cache.speculate("a", [2, ord("a")]).token_ids == [1, 2]
    assert cache.speculate("b", [2, ord("a")]).token_ids == []
    cache.stop_request("b")
    cache.start_request("b", [])  # again: the newest now, without what it said
    assert list(cache.cached_requests) == ["c", "b"] and cache.speculate("c", [2, ord("b")]).token_ids == []
    cache.start_request("d", [])
    assert list(cache.cached_requests) == ["b", "d"]


def test_no_cached_requests_leave_the_local_store():
    cache = SuffixDecodingCache(max_cached_requests=0)
    cache.start_request("a", [1, 2, 3])
    cache.add_active_response("a", [4])
    cache.start_request("b", [])
    assert not cache.cached_requests and cache.speculate("b", [1, 2]).token_ids == []
    assert cache.speculate("a", [1, 2]).token_ids == [3, 4]
    with pytest.raises(ValueError, match="'a' is not cached"):
        cache.evict_cached_response("a")


def agreeing(draft, text) -> int:
    pairs = itertools.zip_longest(draft, text)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


@pytest.mark.parametrize(("most", "steps"), [(16, 20), (4, 45)])
@pytest.mark.parametrize("parity", [False, True], ids=["ours", "parity"])
def test_a_document_is_repeated_in_few_steps(most, steps, parity):
    document = np.random.default_rng(3).integers(0, 500, 200).tolist()
    cache = SuffixDecodingCache(parity=parity)
    cache.start_request(0, document)
    said: list[int] = []
    count = 0
    while len(said) < len(document):
        draft = cache.speculate(0, document + said, most)
        right = agreeing(draft.token_ids, document[len(said) :])
        emitted = document[len(said) : len(said) + right + 1]
        cache.add_active_response(0, emitted)
        said += emitted
        count += 1
    assert len(document) / (most + 1) <= count <= steps


KINDS = {
    "list": list,
    "tuple": tuple,
    "int64": np.array,
    "uint16": lambda ids: np.array(ids, np.uint16),
    "reversed": lambda ids: np.array(ids[::-1])[::-1],
    "strided": lambda ids: np.repeat(np.array(ids), 2)[::2],
    "tensor": torch.tensor,
    "int32 tensor": ints,
    "column": lambda ids: torch.tensor([ids, ids]).T[:, 0],
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_token_ids_of_every_kind(make):
    cache = SuffixDecodingCache()
    cache.start_request(0, make([1, 2, 3]))
    cache.add_active_response(0, make([4, 1, 2]))
    draft = cache.speculate(0, make([1, 2]))
    assert draft == SuffixDecodingDraft([3, 4], [-1, 0], [1.0, 1.0], 2.0, 2)
    assert all(type(token) is int for token in (*draft.token_ids, *draft.parents, draft.match_len))


def test_what_was_handed_in_is_copied():
    prompt = np.array([1, 2, 3], np.int32)
    cache = SuffixDecodingCache()
    cache.start_request(0, prompt)
    prompt[:] = 9
    assert cache.speculate(0, [1, 2]).token_ids == [3]


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        ([1.0, 2.0], TypeError, "must be an integer, got 1.0"),
        (np.array([1.5]), TypeError, "must be an integer, got 1.5"),
        (torch.tensor([1.0]), TypeError, "must be an integer, got 1.0"),
        ([True], TypeError, "must be an integer, got True"),
        ("12", TypeError, "must be token ids"),
        ({1: 2}, TypeError, "must be token ids"),
        (None, TypeError, "must be token ids"),
        ([3, -1], ValueError, r"must lie in 0..2147483647, got -1..3"),
        ([2**31], ValueError, "must lie in"),
        ([2**70], ValueError, "must lie in"),
        (np.zeros((1, 2), int), ValueError, r"1-D, got shape \[1, 2\]"),
        (torch.tensor(3), ValueError, r"1-D, got shape \[\]"),
        (torch.empty(2, dtype=torch.int32, device="meta"), ValueError, "on the CPU"),
    ],
    ids=str,
)
def test_token_ids_are_checked_before_anything_changes(ids, error, text):
    cache = SuffixDecodingCache()
    cache.start_request("a", [1, 2, 3])
    check_refused(
        (f"prompt_token_ids.*{text}", lambda: cache.start_request("b", ids)),
        (f"token_ids.*{text}", lambda: cache.add_active_response("a", ids)),
        (f"context.*{text}", lambda: cache.speculate("a", ids)),
        (f"ban_tokens.*{text}", lambda: SuffixDecodingCache(ban_tokens=ids)),
        error=error,
    )
    assert list(cache.active_requests) == list(cache.cached_requests) == ["a"]
    assert cache.speculate("a", [1, 2]).token_ids == [3]


def test_requests_that_are_not_there():
    cache = SuffixDecodingCache()
    cache.start_request("a", [])
    check_refused(
        ("'a' is active already", lambda: cache.start_request("a", [1])),
        ("'b' is not active", lambda: cache.add_active_response("b", [1])),
        ("'b' is not active", lambda: cache.stop_request("b")),
        ("'b' is not active", lambda: cache.speculate("b", [1])),
        ("'b' is not cached", lambda: cache.evict_cached_response("b")),
    )
    cache.stop_request("a")
    check_refused(("'a' is not active", lambda: cache.stop_request("a")))
    cache.evict_cached_response("a")
    assert not cache.active_requests and not cache.cached_requests


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_tree_depth": 0}, ValueError),
        ({"max_tree_depth": 8.0}, TypeError),
        ({"max_cached_requests": -2}, ValueError),
        ({"max_cached_requests": None}, TypeError),
        ({"parity": 1}, TypeError),
    ],
    ids=str,
)
def test_options_of_the_cache_are_checked(options, error):
    with pytest.raises(error, match=next(iter(options))):
        SuffixDecodingCache(**options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_spec_tokens": -1}, ValueError),
        ({"max_spec_tokens": 1.0}, TypeError),
        ({"max_spec_factor": -0.5}, ValueError),
        ({"max_spec_factor": float("inf")}, ValueError),
        ({"max_spec_offset": float("nan")}, ValueError),
        ({"max_spec_offset": "1"}, TypeError),
        ({"min_token_prob": 1.1}, ValueError),
        ({"min_token_prob": None}, TypeError),
        ({"use_tree_spec": "no"}, TypeError),
        ({"keep": 0}, ValueError),
        ({"min_match": 0}, ValueError),
        ({"max_tree_depth": True}, TypeError),
    ],
    ids=str,
)
def test_rules_are_checked(options, error):
    name = next(iter(options))
    with pytest.raises(error, match=f"suffix_draft: {name}"):
        SuffixRules(**options)
    if name in ("keep", "min_match", "max_tree_depth"):
        return
    cache = SuffixDecodingCache()
    cache.start_request(0, [])
    with pytest.raises(error, match=name):
        cache.speculate(0, [1], **options)


def test_nothing_comes_of_nothing():
    cache = SuffixDecodingCache()
    cache.start_request(0, [])
    assert cache.speculate(0, []) == cache.speculate(0, [1, 2]) == SuffixDecodingDraft()
    empty = suffix_draft(ints([]), ints([]))
    assert [len(part) for part in empty[:3]] == [0, 0, 0] and empty[3:] == (0.0, 0, 0)
    assert (empty.tokens.dtype, empty.parents.dtype, empty.probs.dtype) == (torch.int32, torch.int32, torch.float32)


def test_match_lengths():
    store = ints([1, 2, 3, END, 2, 3, 4, 3, END])
    assert match_lengths(store, ints([1, 2, 3])).tolist() == [0, 0, 0, 3, 0, 0, 2, 0, 1]
    assert match_lengths(store, ints([1, 2, 3]), 2).tolist() == [0, 0, 0, 2, 0, 0, 2, 0, 1]
    assert match_lengths(store, ints([3, END, 2])).tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0]  # END equals nothing
    assert match_lengths(store, ints([2, 3, END])).max() == 0
    assert match_lengths(store, ints([]), 5).max() == 0 and match_lengths(store, ints([3]), 0).max() == 0


@pytest.mark.parametrize(
    ("store", "context", "limit", "text"),
    [
        (torch.zeros(2), ints([1]), None, "store must be int32"),
        (ints([1, END])[None], ints([1]), None, "store must be int32 \\[S\\]"),
        (ints([1, END]), torch.tensor([1]), None, "context must be int32 .*, got int64"),
        (ints([END, 1]), ints([1]), None, "store must end with END"),
        (ints([1, END]), ints([1]), -1, "limit"),
    ],
)
def test_match_lengths_refuses(store, context, limit, text):
    with pytest.raises(ValueError, match=f"match_lengths: {text}"):
        match_lengths(store, context, limit)
    if limit is None:
        with pytest.raises(ValueError, match=text):
            suffix_draft(store, context)


@pytest.mark.parametrize("tree", [False, True], ids=["path", "tree"])
def test_few_kept_matches_are_all_matches(tree):
    rng = np.random.default_rng(7)
    fits = other = 0
    for _ in range(300):
        sequences = [rng.integers(0, 4, rng.integers(1, 20)).tolist() for _ in range(4)]
        store, context = store_of(sequences), ints(rng.integers(0, 4, 8))
        least, keep = int(rng.integers(1, 3)), int(rng.integers(1, 10))
        rules = SuffixRules(12, min_match=least, use_tree_spec=tree)
        matches = int((match_lengths(store, context) >= least).sum())
        exact = suffix_draft(store, context, rules)
        few = suffix_draft(store, context, SuffixRules(12, min_match=least, use_tree_spec=tree, keep=keep))
        equal = all(torch.equal(*pair) for pair in zip(exact[:3], few[:3], strict=True)) and exact[3:] == few[3:]
        assert equal or matches > keep
        fits += matches <= keep and len(exact.tokens) > 0
        other += not equal
    assert fits > 50 and other > 20


def test_the_longest_then_the_latest_matches_are_kept():
    store = store_of([[1, 2], [1, 2], [1, 3], [1, 4], [1, 3]])
    assert suffix_draft(store, ints([1])).probs.tolist() == pytest.approx([2 / 5])
    draft = suffix_draft(store, ints([1]), SuffixRules(keep=3))
    assert draft.tokens.tolist() == [3] and draft.probs.tolist() == pytest.approx([2 / 3])
    assert suffix_draft(store, ints([1]), SuffixRules(keep=2)).tokens.tolist() == [3]
    draft = suffix_draft(store_of([[9, 1, 2], [1, 3], [1, 3]]), ints([9, 1]), SuffixRules(keep=1))
    assert (draft.tokens.tolist(), draft.match_len) == ([2], 2)
    assert suffix_draft(store, ints([1]), SuffixRules(min_match=2)).match_len == 0


tokens = st.lists(st.integers(0, 3), max_size=12)


@settings(max_examples=100, deadline=None)
@given(st.lists(tokens, max_size=3), tokens, st.booleans(), st.booleans(), st.integers(0, 8))
def test_every_draft_has_been_seen(sequences, context, tree, parity, most):
    rules = SuffixRules(8, most, 2.0, use_tree_spec=tree, parity=parity)
    draft = suffix_draft(store_of(sequences), ints(context), rules)
    drafted, parents, probs = (part.tolist() for part in draft[:3])
    assert len(drafted) <= min(most, 2 * draft.match_len) and draft.score == pytest.approx(sum(probs))
    texts: list[list[int]] = []
    for place, (token, parent, prob) in enumerate(zip(drafted, parents, probs, strict=True)):
        assert -1 <= parent < place and 0.1 - 1e-6 <= prob <= (probs[parent] if parent >= 0 else 1)
        texts.append([*(texts[parent] if parent >= 0 else context[len(context) - draft.match_len :]), token])
    assert len(set(map(tuple, texts))) == len(texts) and all(len(text) <= 8 for text in texts)
    for text in texts:
        assert any(text == said[i : i + len(text)] for said in sequences for i in range(len(said)))


def drafted(prompt, generated, budget=5, **options) -> list[int]:
    return ngram_draft(ints(prompt), ints(generated), budget, **options).tokens.tolist()


def test_ngram_numbers():
    assert drafted([10, 20, 30, 40, 50, 60], [10, 20, 30, 40]) == [50, 60]
    assert drafted([1, 2, 3], [7, 8, 9, 7, 8]) == [9, 7]
    assert drafted([1, 2, 3], [4, 5, 6]) == []
    assert drafted([1, 2, 3, 9], [5, 1, 2], 2, min_ngram=2) == [3, 9]
    assert drafted([1, 2, 3, 9], [5, 5, 2], 2, min_ngram=2) == []
    assert drafted([1, 2, 3, 9], [5, 5, 2], 2, min_ngram=1) == [3, 9]


def test_ngram_passes_over_matches_with_nothing_behind_them():
    assert drafted([8, 1, 4, 1], [0, 1]) == [4, 1]
    assert drafted([8, 1], [1, 5, 1]) == [5]  # only the end of the prompt matches there
    assert drafted([6, 2, 7, 1, 2], [1, 2]) == [7, 1, 2]  # 1 2 stands at the prompt's end, 2 not only there
    assert drafted([], [1]) == drafted([1, 2], []) == drafted([], []) == []


def test_ngram_leftmost_and_latest():
    prompt = [1, 2, 3, 1, 2, 4, 0]
    assert drafted(prompt, [1, 2], 1) == [3] and drafted(prompt, [1, 2], 1, match="latest") == [4]
    assert drafted([9], [1, 2, 3, 1, 2, 4, 1, 2], 1) == [3]
    assert drafted([9], [1, 2, 3, 1, 2, 4, 1, 2], 1, match="latest") == [4]
    assert drafted([1, 2, 5], [1, 2, 3, 1, 2], 1, match="latest") == [5]  # the prompt comes first all the same
    assert drafted([2, 5], [1, 2, 3, 1, 2], 1) == [3]  # but a longer pattern comes before that


def test_ngram_joined_reads_across_the_border():
    assert drafted([1, 2], [3, 4, 1, 2]) == []  # the prompt ends behind the match
    assert drafted([1, 2], [3, 4, 1, 2], joined=True) == [3, 4, 1, 2]
    assert drafted([1, 2, 5], [1, 2, 3, 1, 2], 1, match="latest", joined=True) == [3]
    assert drafted([], [7, 7], joined=True) == [7] and drafted([], [7, 7]) == []


def test_ngram_limits():
    prompt, generated = list(range(10)), [0, 1, 2]
    assert drafted(prompt, generated, 3) == [3, 4, 5] and drafted(prompt, generated, 20) == list(range(3, 10))
    assert drafted(prompt, generated, 0) == drafted(prompt, generated, -2) == []
    assert drafted([1, 2, 8, 0, 1, 2, 9], generated, 1, max_ngram=2) == [8]
    assert drafted([1, 2, 8, 0, 1, 2, 9], generated, 1, max_ngram=3) == [9]
    assert drafted([2, 1, 7], [1], min_ngram=2) == []  # a pattern does not reach into the prompt


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"min_ngram": 0}, "min_ngram"),
        ({"min_ngram": 4, "max_ngram": 3}, "min_ngram"),
        ({"match": "first"}, "leftmost, latest"),
        ({"prompt": torch.zeros(3)}, "prompt must be int32"),
        ({"generated": ints([1])[None]}, "generated must be int32"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_ngram_refuses(options, text):
    arguments = {"prompt": ints([1]), "generated": ints([1]), "budget": 2, **options}
    with pytest.raises(ValueError, match=f"ngram_draft: .*{text}"):
        ngram_draft(**arguments)


def same_drafts(drafts, expected, chosen=slice(None)) -> None:
    """Two RepeatDrafts agree in everything; probabilities up to the rounding of fp32."""
    for name, mine, theirs in zip(expected._fields, drafts, expected, strict=True):
        assert (mine.dtype, mine.shape, mine.device) == (theirs.dtype, theirs.shape, theirs.device), name
        if mine.is_floating_point():
            torch.testing.assert_close(mine[chosen], theirs[chosen], rtol=1e-6, atol=0)
        else:
            assert torch.equal(mine[chosen], theirs[chosen]), (name, mine[chosen].tolist(), theirs[chosen].tolist())


def ring_of(sequences, size: int, head: int, device: str) -> TokenRing:
    """Sequences with END behind each, the last token in front of `head`; the oldest ones are overwritten."""
    tokens = [token for sequence in sequences for token in (*sequence, END)][-size:]
    tokens = torch.tensor([END] * (size - len(tokens)) + tokens, dtype=torch.int32).roll(head)
    return TokenRing(tokens.to(device), torch.tensor([head], dtype=torch.int32, device=device))


def counted(lengths: torch.Tensor, ahead: list[int], limit: int | None, rules: SuffixRules) -> torch.Tensor:
    """Which of the matches that something follows a chunk lists: `limit` of at most 4 tokens first, then the latest."""
    match = lengths.tolist()
    hits = [e for e in range(len(match)) if match[e] >= 2 and ahead[e] != END and ahead[e] not in rules.banned]
    kept = torch.zeros_like(lengths)
    for chunk in range(-(-len(match) // 1024)):
        here = [e for e in hits if e // 1024 == chunk]
        here = sorted(here, key=lambda e: (-min(match[e], 4), -e))[:limit]
        kept[here] = lengths[here]
    return kept


def limited(monkeypatch, columns: int, rules: SuffixRules) -> list[bool]:
    """Have the reference count what the kernels count in a ring of more than `columns` tokens.

    Returns a list that says of each store that it reads whether more than eight distinct lengths matched.
    """
    whole, many = match_lengths, []

    def listed(store, context, limit=None):
        lengths = counted(whole(store, context, limit), store.tolist(), 32 if len(store) > columns + 1 else None, rules)
        positions = reference._most_useful(lengths, rules)
        many.append(len(lengths[positions].unique()) > 8)
        return lengths

    monkeypatch.setattr(reference, "match_lengths", listed)
    return many


def poison(monkeypatch) -> None:
    """New tensors hold what no kernel may take for a result."""

    def poisoned(*shape, **options):
        return torch.full(shape[0] if isinstance(shape[0], tuple) else shape, 77, **options)

    monkeypatch.setattr(torch, "empty", poisoned)


def some_texts(rng, batch: int, columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor, TokenRing]:
    """Sequences and a ring that repeat themselves and each other."""
    vocabulary = int(rng.choice([3, 5, 12, 50]))
    phrases = [rng.integers(0, vocabulary, rng.integers(2, 20)) for _ in range(6)]

    def text(size: int) -> list[int]:
        words: list[int] = []
        while len(words) < size:
            noise = rng.random() < 0.3
            words += (rng.integers(0, vocabulary, 3) if noise else phrases[rng.integers(len(phrases))]).tolist()
        return words[:size]

    rows = [text(columns) for _ in range(batch)]
    lengths = rng.integers(0, columns, batch)
    lengths[:3] = 0, 1, columns - 1
    size = int(rng.integers(columns + 2, 4 * columns))
    sequences = [text(int(rng.integers(0, 60))) for _ in range(rng.integers(1, 9))]
    ring = ring_of(sequences, size, int(rng.integers(0, size)), device)
    return torch.tensor(rows, device=device), torch.tensor(lengths, dtype=torch.int32, device=device), ring


@pytest.mark.slow
@pytest.mark.parametrize("tree", [False, True], ids=["path", "tree"])
def test_suffix_drafts_equal_the_reference(device, tree, monkeypatch):
    rng = np.random.default_rng(11 + tree)
    poison(monkeypatch)
    drafted = former = compared = 0
    for case in range(20 if device == "cuda" else 5):
        batch, columns = 12 if device == "cuda" else 7, int(rng.integers(20, 80))
        tokens, lengths, ring = some_texts(rng, batch, columns, device)
        stored = None if case % 5 == 4 else ring
        rules = SuffixRules(
            int(rng.choice([3, 6, 12, 64])),
            **{**some_rules(rng, tree), "max_spec_tokens": None if case % 3 else int(rng.integers(0, 12))},
            banned=tuple(rng.integers(0, 12, case % 3).tolist()),
            min_match=int(rng.integers(2, 4)),
            keep=None if case % 2 else int(rng.integers(1, 129)),
        )
        places = int(rng.choice([1, 4, 7, 16]))
        drafts = kernels.suffix_drafts(tokens, lengths, stored, places, rules)
        with monkeypatch.context() as patch:
            many = limited(patch, columns, rules)
            expected = reference.suffix_drafts(tokens, lengths, stored, places, replace(rules, keep=rules.keep or 128))
        stores = 1 if stored is None else 2
        chosen = ~torch.tensor(many, device=device).view(batch, stores).any(1)
        same_drafts(drafts, expected, chosen)
        compared += int(chosen.sum())
        drafted += int((expected.match > 0).sum())
        former += int(expected.from_ring.sum())
    assert drafted > compared // 3 and former > drafted // 10 and 6 * compared > 5 * batch * (case + 1)


@pytest.mark.parametrize("tree", [False, True], ids=["path", "tree"])
def test_long_rows_and_a_ring_of_many_chunks(device, tree, monkeypatch):
    """Several segments of both stores, matches across their borders, the head in the middle of a chunk."""
    rng = np.random.default_rng(5)
    poison(monkeypatch)
    size, columns = 34 * 1024 + 77, 2 * 1024 + 300
    phrase = rng.integers(0, 1000, 40)
    former = rng.integers(1000, 3000, size)
    for place in (*rng.integers(0, size - 60, 30), 1020, 33 * 1024 - 20):  # more than 32 segments know the phrase
        former[place : place + 40] = phrase
        former[place + 40 : place + 60] = rng.integers(0, 2, 20)
    ring = ring_of([former[: size // 2], former[size // 2 :]], size, 20_000, device)
    tokens = torch.tensor(rng.integers(1000, 3000, (2, columns)))
    tokens[:, columns - 41 : columns - 1] = torch.tensor(phrase)
    tokens[1, 1010:1050] = tokens[1, 100:140] = torch.tensor(phrase)  # own ones across a border too
    lengths = torch.tensor([columns - 2] * 2, dtype=torch.int32, device=device)
    for stored in (ring, None):
        rules = SuffixRules(min_match=2, keep=20, use_tree_spec=tree)
        drafts = kernels.suffix_drafts(tokens.to(device), lengths, stored, 12, rules)
        same_drafts(drafts, reference.suffix_drafts(tokens.to(device), lengths, stored, 12, rules))
        assert drafts.from_ring.tolist() == [stored is not None, False] or drafts.from_ring.all()
        assert drafts.match.tolist() == ([40, 40] if stored is not None else [0, 40])


def test_a_sequence_that_repeats_itself_throughout(device):
    """Half of its positions match: all are listed, and the latest are sorted out."""
    tokens = torch.tensor([[5, 9]], device=device).repeat(1, 1100)
    lengths = torch.tensor([2150], dtype=torch.int32, device=device)
    rules = SuffixRules(48, min_match=2, max_spec_factor=0.5, keep=128)
    drafts = kernels.suffix_drafts(tokens, lengths, None, 16, rules)
    same_drafts(drafts, reference.suffix_drafts(tokens, lengths, None, 16, rules))
    assert drafts.tokens[0, :4].tolist() == [9, 5, 9, 5]
    assert (drafts.match.item(), drafts.occurrences.item()) == (32, 128)


def test_the_eight_longest_distinct_lengths_are_tried(device):
    tokens = torch.full((1, 20), 7, device=device)
    lengths = torch.tensor([19], dtype=torch.int32, device=device)
    drafts = kernels.suffix_drafts(tokens, lengths, None, 16, SuffixRules(min_match=2))
    assert reference.suffix_drafts(tokens, lengths, None, 16, SuffixRules(min_match=2)).match.item() == 10
    same_drafts(drafts, reference.suffix_drafts(tokens, lengths, None, 16, SuffixRules(min_match=12)))
    assert drafts.match.item() == 12 and drafts.tokens[0].tolist() == [7] * 8 + [-1] * 8


def test_a_dense_chunk_of_the_ring_lists_32(device, monkeypatch):
    """Of 60 and more matches those of four tokens, then of three, then the latest of two."""
    first = [[0, 0, 1, 2, 10]] * 20 + [[3, 0, 1, 2, 11]] * 3 + [[3, 3, 1, 2, 12]] * 40
    tokens = torch.tensor([[0, 0, 1, 2, 6, 6], [9, 0, 1, 2, 6, 6], [9, 9, 1, 2, 6, 6]], device=device)
    lengths = torch.tensor([3, 3, 3], dtype=torch.int32, device=device)
    for head, sequences in ((0, first), (170, first[::-1])):
        ring = ring_of(sequences, 400, head, device)
        rules = SuffixRules(5, max_spec_factor=4.0, min_token_prob=0.0, min_match=2, use_tree_spec=True)
        drafts = kernels.suffix_drafts(tokens, lengths, ring, 4, rules)
        limited(monkeypatch, tokens.shape[1], rules)
        same_drafts(drafts, reference.suffix_drafts(tokens, lengths, ring, 4, replace(rules, keep=128)))
        monkeypatch.undo()
    assert reference.suffix_drafts(tokens, lengths, ring, 4, rules).occurrences.tolist() != drafts.occurrences.tolist()


def test_no_sequences_and_no_places_to_draft(device):
    ring = ring_of([[1, 2, 3]], 10, 4, device)
    none = torch.empty(0, 8, dtype=torch.int64, device=device), torch.empty(0, dtype=torch.int32, device=device)
    for stored in (ring, None):
        drafts = kernels.suffix_drafts(*none, stored, 4, SuffixRules(min_match=2))
        assert drafts.tokens.shape == (0, 4)
    tokens = torch.tensor([[1, 2, 3, 1, 2, 0]], device=device)
    lengths = torch.tensor([4], dtype=torch.int32, device=device)
    drafts = kernels.suffix_drafts(tokens, lengths, ring, 3, SuffixRules(max_spec_tokens=0, min_match=2))
    assert drafts.tokens.tolist() == [[-1] * 3] and drafts.match.tolist() == [0]
    assert kernels.suffix_drafts(tokens, lengths, ring, 3, SuffixRules(min_match=2)).tokens.tolist() == [[3, 1, -1]]


@pytest.mark.parametrize(
    ("rules", "places", "columns", "text"),
    [
        ({"min_match": 1}, 4, 8, "rules.min_match must be at least 2, got 1.*set min_match=2"),
        ({"parity": True}, 4, 8, "rules.parity must be False: SuffixDecodingCache"),
        ({"keep": 129}, 4, 8, "rules.keep must be at most 128, got 129"),
        ({"max_tree_depth": 65}, 4, 8, "rules.max_tree_depth must be at most 64, got 65"),
        ({"banned": tuple(range(17))}, 4, 8, "the number of banned tokens must be at most 16, got 17"),
        ({}, 65, 8, "places must be at most 64, got 65"),
        ({}, 4, 2**24 + 1, "the capacity of tokens must be at most 16777216"),
    ],
)
def test_what_the_kernels_do_not_have_is_refused(rules, places, columns, text):
    tokens = torch.zeros(1, columns, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"suffix_drafts: {text}"):
        kernels.suffix_drafts(tokens, ints([0]), None, places, SuffixRules(**{"min_match": 2, **rules}))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tokens": torch.zeros(2, 6, dtype=torch.int32)}, "tokens must be int64"),
        ({"tokens": torch.zeros(6, 2, dtype=torch.int64).T}, "tokens must be .* contiguous rows"),
        ({"lengths": ints([1])}, "lengths must be int32"),
        ({"lengths": torch.tensor([1, 1])}, "lengths must be int32"),
        ({"ring": TokenRing(torch.zeros(4), ints([0]))}, "ring.tokens must be int32"),
        ({"ring": TokenRing(ints([0]), ints([0, 1]))}, "ring.head must be int32"),
        ({"ring": TokenRing(ints([]), ints([0]))}, "ring.tokens must be int32 \\[R>0\\]"),
        ({"places": 0}, "places must be at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_suffix_drafts_refuses(change, text):
    given = {"tokens": torch.zeros(2, 6, dtype=torch.int64), "lengths": ints([1, 2]), "ring": None, "places": 3}
    for module in (kernels, reference):
        with pytest.raises(ValueError, match=f"suffix_drafts: {text}"):
            module.suffix_drafts(**{**given, **change}, rules=SuffixRules(min_match=2))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tree", [False, True], ids=["path", "tree"])
def test_drafts_follow_what_a_graph_reads(tree):
    """A captured call reads tokens, lengths and ring anew each time."""
    rng = np.random.default_rng(3)
    rules = SuffixRules(min_match=2, keep=100, use_tree_spec=tree)
    static = some_texts(rng, 8, 70, "cuda")
    static = static[0], static[1], TokenRing(torch.full((200,), END, dtype=torch.int32, device="cuda"), static[2].head)
    kernels.suffix_drafts(*static, 16, rules)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafts = kernels.suffix_drafts(*static, 16, rules)
    for _ in range(3):
        tokens, lengths, ring = some_texts(rng, 8, 70, "cuda")
        size = min(200, len(ring.tokens))
        static[0].copy_(tokens)
        static[1].copy_(lengths)
        static[2].tokens[:size] = ring.tokens[:size]
        static[2].head.fill_(int(rng.integers(0, 200)))
        graph.replay()
        same_drafts(drafts, kernels.suffix_drafts(*static, 16, rules))


def ngram_batch(cases, columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens, lengths and prompt_lengths of (prompt, generated) pairs; the rest of a row is noise."""
    tokens = torch.randint(0, 3, (len(cases), columns), generator=torch.Generator().manual_seed(1))
    for row, (prompt, generated) in zip(tokens, cases, strict=True):
        row[: len(prompt) + len(generated)] = torch.tensor([*prompt, *generated])
    lengths = ints(len(prompt) + len(generated) - 1 for prompt, generated in cases)
    return tokens.to(device), lengths.to(device), ints(len(prompt) for prompt, _ in cases).to(device)


@pytest.mark.slow
def test_ngram_drafts_equal_the_reference(device, monkeypatch):
    rng = np.random.default_rng(4)
    poison(monkeypatch)
    drafted = 0
    for case in range(16):
        columns = int(rng.choice([30, 60]))
        cases = []
        for _ in range(64 if device == "cuda" else 32):
            prompt, generated = rng.integers(0, columns // 2, 2)
            vocabulary = int(rng.integers(2, 9))
            generated = max(generated, 1 - prompt, 0)
            cases.append([rng.integers(0, vocabulary, size).tolist() for size in (prompt, generated)])
        most = int(rng.choice([1, 3, 5, 20]))
        options = {
            "max_ngram": most,
            "min_ngram": int(rng.integers(1, most + 1)) if case % 2 else 1,
            "match": "latest" if case // 2 % 2 else "leftmost",
            "joined": bool(case // 4 % 2),
        }
        batch = ngram_batch(cases, columns, device)
        places = int(rng.integers(1, 20))
        drafts = kernels.ngram_drafts(*batch, places, **options)
        same_drafts(drafts, reference.ngram_drafts(*batch, places, **options))
        drafted += int((drafts.match > 0).sum())
    assert drafted > 60


@pytest.mark.parametrize("match", ["leftmost", "latest"])
@pytest.mark.parametrize("joined", [False, True])
def test_ngrams_in_several_chunks(device, match, joined):
    rng = np.random.default_rng(8)
    prompt = rng.integers(10, 3000, 2500).tolist()
    for place in (300, 1022, 2100):
        prompt[place : place + 5] = [1, 2, 3, 4, place]
    generated = [1, 2, 3, 4, 7, *rng.integers(10, 3000, 900).tolist(), 1, 2, 3, 4]
    batch = ngram_batch([(prompt, generated), (generated[:7], prompt)], 3600, device)
    drafts = kernels.ngram_drafts(*batch, 3, match=match, joined=joined)
    same_drafts(drafts, reference.ngram_drafts(*batch, 3, match=match, joined=joined))
    assert drafts.tokens[0, 0].item() == {"leftmost": 300, "latest": 7 if joined else 2100}[match]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tokens": torch.zeros(2, 6)}, "tokens must be int64"),
        ({"lengths": ints([1])}, "lengths must be int32"),
        ({"prompt_lengths": ints([1])}, "prompt_lengths must be int32"),
        ({"places": 0}, "places must be at least 1"),
        ({"min_ngram": 0}, "expected 1 <= min_ngram <= max_ngram, got 0 and 5"),
        ({"min_ngram": 6}, "expected 1 <= min_ngram <= max_ngram, got 6 and 5"),
        ({"match": "first"}, "match must be one of leftmost, latest, got 'first'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ngram_drafts_refuses(change, text):
    given = {"tokens": torch.zeros(2, 6, dtype=torch.int64), "lengths": ints([1, 2]), "prompt_lengths": ints([1, 1])}
    for module in (kernels, reference):
        with pytest.raises(ValueError, match=f"ngram_drafts: {text}"):
            module.ngram_drafts(**{**given, "places": 2, **change})


def test_long_ngrams_are_refused_by_the_kernel():
    given = torch.zeros(2, 6, dtype=torch.int64), ints([1, 2]), ints([1, 1]), 2
    with pytest.raises(ValueError, match="ngram_drafts: max_ngram must be at most 64, got 65"):
        kernels.ngram_drafts(*given, max_ngram=65)
