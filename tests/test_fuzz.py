"""tools/fuzz.py: calls agree with the original, wrong answers are found and cut down, a number repeats its call."""

import random
import re

import pytest

from tools import fuzz


@pytest.mark.parametrize("door", ("generate", "inference", "session", "eamodel", "server"))
def test_a_few_calls_of_each_door_agree(door, capsys):
    if door == "server":
        pytest.importorskip("uvicorn", reason='pip install ".[serve,test]"')
    count = 2 if door == "inference" else 1
    assert fuzz.main(["120", "3", "--door", door, "--calls", str(count)]) == 0, capsys.readouterr().out
    assert re.search(rf"^{door} +{count} ", capsys.readouterr().out, re.M)


def test_a_wrong_answer_is_shown_cut_down_and_ends_in_status_1(monkeypatch, capsys):
    original = fuzz.original_greedy

    def wrong(model, request):
        wanted = original(model, request)
        return fuzz.Wanted([token ^ 1 for token in wanted.tokens], [1.0 for _ in wanted.tokens])

    monkeypatch.setattr(fuzz, "original_greedy", wrong)
    monkeypatch.setattr(fuzz, "MAX_CUTS", 3)
    request = {"prompt": [1, 2], "max_new_tokens": 3}
    call = {"model": {"family": "llama"}, "draft": "suffix", "tree": {}, "requests": [request, request]}
    monkeypatch.setitem(fuzz.DOORS, "inference", (lambda rng: call, fuzz.check_inference))
    assert fuzz.main(["60", "5", "--door", "inference", "--calls", "1"]) == 1
    said = capsys.readouterr().out
    assert "--door inference --replay 5:0" in said and "leads by 1.00e+00" in said
    assert said.split("cut down to: ")[1].count('"prompt"') == 1


def test_a_place_where_two_logits_tie_is_no_difference():
    outcome, request = fuzz.Outcome("engine"), {"prompt": [1], "max_new_tokens": 2}
    fuzz._compare_tokens(outcome, fuzz.Wanted([5, 6], [1.0, fuzz.TIE / 2]), [5, 7], request)
    assert outcome.where == "tie" and outcome.problem is None
    outcome = fuzz.Outcome("engine")
    fuzz._compare_tokens(outcome, fuzz.Wanted([5, 6], [1.0, fuzz.TIE * 2]), [5, 7], request)
    assert outcome.problem is not None


def test_a_call_is_made_by_its_number_alone():
    for make, _ in fuzz.DOORS.values():
        assert make(random.Random("3:4:x")) == make(random.Random("3:4:x")) != make(random.Random("3:5:x"))


def test_a_failure_nobody_expected_is_a_difference():
    def fails(call):
        raise RuntimeError("nobody expected this")

    assert "nobody expected this" in fuzz.checked(fails, {}).problem
