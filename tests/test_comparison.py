"""eagle_triton.comparison: answers as JSON, and the file of results that a run goes on from."""

from __future__ import annotations

import re

import pytest

from eagle_triton.comparison.answer import Answer, Step, from_json, to_json
from eagle_triton.comparison.figures import Totals, differing
from eagle_triton.comparison.result_file import OtherRunError, Result, ResultFile

STEPS = (Step((1,)), Step((2, 3), 1, 4, (2, 9, 9, 9), 0.5, 0.25, 4), Step((4,), 0, 2), Step((5,)))
ANSWER = Answer("egag", (1, 2, 3, 4, 5), "a\n\r\u2028\0é", STEPS, 3.0, 1.0, 4, 6, "stop", notes=("why",))


def test_an_answer_is_the_same_again_from_json():
    assert from_json(to_json(ANSWER)) == ANSWER
    assert to_json(ANSWER)["steps"][3] == {"tokens": (5,)}  # what is as by default is not written


def test_figures_of_an_answer_and_of_several():
    assert (ANSWER.tau, ANSWER.acceptance_rate, ANSWER.accepted_counts) == (4 / 3, 1 / 6, [1, 1])
    totals = Totals.of([ANSWER, ANSWER])
    assert (totals.tau, totals.tokens_per_second, totals.ms_per_step) == (8 / 6, 10 / 6, pytest.approx(4 / 6 * 1e3))
    assert differing([ANSWER, ANSWER], [ANSWER, from_json({**to_json(ANSWER), "tokens": [1]})]) == [1]


def test_what_is_cut_off_anywhere_leaves_the_results_before_it(tmp_path):
    path, results = tmp_path / "r.jsonl", [Result([ANSWER], [f"note {number}"], {"a": number}) for number in range(3)]
    file = ResultFile(path, "tests", {"dtype": "float32", "sizes": (1, 2)})
    for number, result in enumerate(results):
        file.add(str(number), result)
    whole, counts = path.read_bytes(), []
    for length in range(0, len(whole) + 1, 7):
        path.write_bytes(whole[:length])
        again = ResultFile(path, "tests", {"dtype": "float32", "sizes": (1, 2)})
        assert list(again.found.values()) == results[: len(again.found)]
        counts.append(len(again.found))
        again.add("more", results[0])
        kept = ResultFile(path, "tests", {"dtype": "float32", "sizes": (1, 2)})
        assert list(kept.found) == [*again.found]
    assert counts == sorted(counts) and counts[-1] in (2, 3)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"notes", "does not hold results of tests"),
        (b'{"program": "others", "conditions": {}}\n', "does not hold results of tests"),
        (b'{"program": "tests", "conditions": {}}\n{"name": 1}\n', "does not hold results of tests"),
        (
            b'{"program": "tests", "conditions": {"dtype": "float16"}}\n',
            "was made with dtype float16, and this",
        ),
        (b'{"program": "tests", "conditions": {"more": 1}}\n', "was made with dtype None, and this would be float32"),
    ],
)
def test_a_file_of_something_else_is_refused_unless_it_is_overwritten(content, said, tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        ResultFile(path, "tests", {"dtype": "float32"})
    assert path.read_bytes() == content
    ResultFile(path, "tests", {"dtype": "float32"}, overwrite=True).add("one", Result([ANSWER]))
    assert list(ResultFile(path, "tests", {"dtype": "float32"}).found) == ["one"]


@pytest.mark.parametrize("begun", [False, True])
def test_two_runs_do_not_write_to_one_file_of_results(begun, tmp_path):
    path, conditions = tmp_path / "r.jsonl", {"dtype": "float32"}
    if begun:
        ResultFile(path, "tests", conditions).add("old", Result([ANSWER]))
    one, other = (ResultFile(path, "tests", conditions) for _ in range(2))
    one.add("one", Result([ANSWER]))
    with pytest.raises(OtherRunError, match=f"another run writes to {re.escape(str(path))}"):
        other.add("other", Result([ANSWER]))
    one.add("two", Result([ANSWER]))
    kept = [*(["old"] if begun else []), "one", "two"]
    assert list(ResultFile(path, "tests", conditions).found) == kept and "other" not in other.found
