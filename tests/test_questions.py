"""benchmark.py questions: files of questions, the sweep and its results file, what is written for others to read."""

import json
import statistics

import pytest

from eagle_triton.benchmarks import main as benchmark
from eagle_triton.benchmarks import models, questions
from eagle_triton.benchmarks.question_file import OWN_QUESTIONS, Question, of_categories, read_questions
from eagle_triton.benchmarks.questions import acceptance_rates
from eagle_triton.demo import demo_directory
from tests.programs import recorded, refused

RUN = ["questions", "--device", "cpu", "--category", "docstring", "--max-length", "8"]
GOOD = {"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["not read"]}


def changed(**values) -> str:
    return json.dumps({key: value for key, value in {**GOOD, **values}.items() if value is not None})


def run(capsys, *options, code=0):
    return recorded(capsys, *RUN, *options, code=code)


def refusal(capsys, *options):
    return refused(capsys, benchmark.main, *RUN, *options).removeprefix("benchmark.py questions: ")


# --- question files ---


def test_a_file_as_mt_bench_has_it(tmp_path):
    file = tmp_path / "question.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + f"{changed()}\r\n\n{changed(question_id='a', category='')}".encode())
    found = read_questions(file)
    assert found == [Question(81, "writing", ("one", "two")), Question("a", "", ("one", "two"))]
    assert of_categories(found, [""]) == found[1:]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", " has no questions"),
        (b"\n \n", " has no questions"),
        (f"{changed()}\n\n{{".encode(), ", line 3: not JSON: Expecting property name"),
        (b"[1]", ", line 1 must be an object, got list"),
        (b"[" * 100_000, ", line 1: "),
        (b'{"question_id": 1, "category": "\xff"}', ", line 1: not UTF-8 at byte 33"),
        (changed(category=None, turns=None).encode(), ", line 1 must have category and turns"),
        (changed(turns=[]).encode(), ", line 1: turns must be a list of texts that are not empty, got []"),
        (changed(turns=["a", ""]).encode(), ", line 1: turns must be"),
        (changed(turns="a").encode(), ", line 1: turns must be"),
        (changed(turns=[1]).encode(), ", line 1: turns must be"),
        (changed(category=7).encode(), ", line 1: category must be a text"),
        (changed(question_id=True).encode(), ", line 1: question_id must be"),
        (changed(question_id=1.5).encode(), ", line 1: question_id must be"),
        (f"{changed()}\n{changed(question_id='81')}".encode(), ", line 2: question_id 81 occurs a second time"),
    ],
)
def test_a_bad_file_is_named_with_its_line(text, message, tmp_path, capsys):
    file = tmp_path / "q.jsonl"
    file.write_bytes(text)
    assert refusal(capsys, "--questions", file).startswith(f"--questions: {file}{message}")


def test_our_own_questions():
    found = read_questions(OWN_QUESTIONS)
    assert len(found) > 20 and len({question.category for question in found}) >= 5
    assert max(len(question.turns) for question in found) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--category", "maths"),
            "--category must be one of function, class, test, docstring, edit, conversation, got",
        ),
        (("--nodes", "8", "--drafters", "suffix"), "--nodes is not read by --drafters suffix, but by head, both, bloc"),
        (
            ("--block-drafter", "a", "--drafters", "head"),
            "--block-drafter is not read by --drafters head, but by block",
        ),
        (("--model", "demo-gdn", "--drafters", "block_tree"), "--block-drafter must be given for block_tree with --mo"),
        (("--block-drafter", "demo-draft", "--drafters", "block"), "--block-drafter demo-draft cannot be loaded: "),
        (("--eagle1", "--drafters", "nasd", "ngram"), "--eagle1 is not read by --drafters nasd ngram, but by head, bo"),
        (("--draft", "some/head", "--drafters", "suffix"), "--draft is not read by --drafters suffix, but by head, bo"),
        (("--model", "some/target"), "--draft must name the head "),
        (("--nodes", "1"), "--nodes must be whole numbers from 2 to 1024"),
        (("--nodes", "1000"), "--nodes 1000: num_draft_tokens counts the root and must be in "),
        (("--temperatures", "0,-1"), "--temperatures must be numbers from 0 to 100, separated by commas, got '0,-1'"),
        (
            ("--max-length", "1000", "--category", "conversation"),
            "question 22 and the new tokens must fit into the model's 2048",
        ),
        (("--questions", "nowhere"), "--questions must be a file, and nowhere does not exist"),
        (("--answers", OWN_QUESTIONS), "--answers must be a directory, and"),
        (("--answers", "no/where"), "--answers must be in a directory that exists, and"),
        (("--results", OWN_QUESTIONS), f"{OWN_QUESTIONS} does not hold results of questions"),
        (("--results", "a", "--output", "a"), "--results must be another file than --output"),
    ],
)
def test_what_cannot_be_is_refused(options, message, capsys):
    before = OWN_QUESTIONS.read_bytes()
    assert refusal(capsys, *options).startswith(message)
    assert OWN_QUESTIONS.read_bytes() == before


# --- the sweep ---


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep with everything in it, and where its files are."""
    folder = tmp_path_factory.mktemp("sweep")
    options = ["--drafters", "suffix", "both", "head", "block", "--nodes", "4,16", "--temperatures", "0,0.8"]
    options += ["--commit", "abc"]
    options += ["--results", folder / "r.jsonl", "--answers", folder / "a", "--output", folder / "o.json"]
    assert benchmark.main([*RUN, "--json", *map(str, options)]) == 0
    return folder, json.loads((folder / "o.json").read_text()), options


def test_plain_comes_first_and_all_answers_are_its_own(swept):
    folder, record, _ = swept
    names = [(row["variant"], row["temperature"]) for row in record["rows"]]
    variants = ["plain", "suffix", "both 4", "both 16", "head 4", "head 16", "block"]
    assert names == [(variant, temperature) for temperature in (0.0, 0.8) for variant in variants]
    assert not any("differ from plain decoding" in note for note in record["notes"])
    assert any(note.startswith("no chat template") for note in record["notes"])
    lines = [json.loads(line) for line in (folder / "r.jsonl").read_text().splitlines()[1:]]
    tokens = [[answer["tokens"] for answer in line["answers"]] for line in lines]
    assert tokens[0] != tokens[7] and all(mine == tokens[0] for mine in tokens[:7])
    assert all(mine == tokens[7] for mine in tokens[7:])  # with a seed, sampled ones too


def test_drafts_are_accepted_and_counted_by_place(swept):
    rows = {(row["variant"], row["temperature"]): row for row in swept[1]["rows"]}
    plain, head = rows["plain", 0.0], rows["head 16", 0.0]
    assert plain["tau"] == plain["speedup"] == 1 and plain["synthetic_acceptance_rates"] == []
    assert head["tau"] > 2 and head["tau"] > rows["head 4", 0.0]["tau"]
    for row in rows.values():
        rates = row["synthetic_acceptance_rates"]
        assert len(rates) in (0, row["num_speculative_tokens"]) and rates == sorted(rates, reverse=True)
        assert row["questions"] == 3 and row["tokens"] == 24
    chains = {
        name: rows[name, 0.0]["num_speculative_tokens"] for name in ("head 4", "both 4", "both 16", "suffix", "block")
    }
    assert chains == {"head 4": 3, "both 4": 3, "both 16": 15, "suffix": 15, "block": 7}  # no more than there are nodes
    assert 1 + sum(head["synthetic_acceptance_rates"]) == pytest.approx(head["tau"], abs=0.3)


def test_what_was_measured_is_not_measured_again(swept, monkeypatch, capsys):
    folder, record, options = swept
    monkeypatch.setattr(questions, "_result", None)
    again = run(capsys, *options)
    assert again["rows"] == record["rows"]
    assert again["notes"][0] == "14 of 14 configurations were measured before, and are in r.jsonl"
    fewer = run(capsys, "--results", folder / "r.jsonl", "--commit", "abc", "--drafters", "suffix")
    assert [row["variant"] for row in fewer["rows"]] == ["plain", "suffix"]


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (("--commit", "abd"), "commit abc, and this would be abd"),
        (("--commit", "abc", "--max-length", "9"), "max_length 8, and this would be 9"),
        (("--commit", "abc", "--category", "test"), "questions_sha256 "),
        (("--commit", "abc", "--dtype", "bfloat16"), "dtype float32, and this would be bfloat16"),
    ],
)
def test_results_of_something_else_are_refused(options, difference, swept, capsys):
    file = swept[0] / "r.jsonl"
    assert refusal(capsys, "--results", file, *options).startswith(f"{file} was made with {difference}")


def test_an_interrupted_sweep_goes_on(tmp_path, monkeypatch, capsys):
    file, measured, result = tmp_path / "r.jsonl", [], questions._result

    def until_the_second(model, part, *others):
        measured.append(part.variant)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return result(model, part, *others)

    monkeypatch.setattr(questions, "_result", until_the_second)
    options = ("--drafters", "ngram", "nasd", "--results", file, "--commit", "abc")
    record = run(capsys, *options, code=130)
    assert "INTERRUPTED" in record["notes"][0] and "the same command continues from r.jsonl" in record["notes"]
    assert [row["variant"] for row in record["rows"]] == ["plain"]
    with open(file, "a") as torn:
        torn.write('{"answers": [], "name": "ngram, temp')
    record = run(capsys, *options)
    assert measured == ["plain", "ngram", "ngram", "nasd"]
    assert [row["variant"] for row in record["rows"]] == ["plain", "ngram", "nasd"]
    assert [json.loads(line).get("name") for line in file.read_text().splitlines()][1:] == [
        f"{name}, temperature 0" for name in ("plain", "ngram", "nasd")
    ]


@pytest.mark.parametrize(("dtype", "code", "told"), [("float32", 1, "FAIL: "), ("bfloat16", 0, "")])
def test_answers_that_are_not_plain_decodings(dtype, code, told, tmp_path, capsys):
    file = tmp_path / "r.jsonl"
    options = ("--results", file, "--commit", "abc", "--dtype", dtype)
    run(capsys, "--drafters", "plain", *options)
    head, plain = map(json.loads, file.read_text().splitlines())
    plain["answers"][1]["tokens"][3] += 1
    file.write_text(f"{json.dumps(head)}\n{json.dumps(plain)}\n")
    notes = run(capsys, "--drafters", "ngram", *options, code=code)["notes"]
    (note,) = [note for note in notes if "from plain" in note]
    assert note.startswith(f"{told}ngram, temperature 0: 1 of 3 answers differ from plain decoding's")
    assert note.endswith("question 16" if code else "by rounding: each token's logit is less than 0.5 below the best")


def test_a_chat_template_is_used_where_there_is_one(tmp_path, monkeypatch, capsys):
    load, prompts, ids = models.load_pair, [], questions.Conversation.ids

    def with_template(*arguments):
        model = load(*arguments)
        model.tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
        return model

    def kept(self, prompt, tokenizer):
        prompts.append(tokenizer.decode(found := ids(self, prompt, tokenizer)))
        return found

    monkeypatch.setattr(models, "load_pair", with_template)
    monkeypatch.setattr(questions.Conversation, "ids", kept)
    file = tmp_path / "q.jsonl"
    file.write_text(changed())
    record = run(capsys, "--questions", file, "--category", "writing", "--drafters", "plain", "--answers", tmp_path)
    answer = json.loads((tmp_path / "demo-plain-temperature-0.0.jsonl").read_text())["choices"][0]["turns"][0]
    assert prompts[-1] == f"[user]one[assistant]{answer}[user]two[assistant]"
    assert not any("chat template" in note for note in record["notes"]) and record["options"]["questions"] == "q.jsonl"


@pytest.mark.parametrize("part", ["target", "gdn"])
def test_a_target_needs_no_head_where_none_drafts(part, capsys):
    rows = run(capsys, "--model", demo_directory(part), "--drafters", "ngram", "suffix")["rows"]
    assert [row["variant"] for row in rows] == ["plain", "ngram", "suffix"] and rows[2]["tokens"] == 24


# --- for others ---


def speed(path) -> float:
    """What SafeAILab's speed.py takes as the speed of a file."""
    choices = [json.loads(line)["choices"][0] for line in path.read_text().splitlines()]
    return statistics.mean(sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in choices)


def test_answers_in_safeailabs_format(swept):
    folder, record, _ = swept
    plain, head = (folder / "a" / f"demo-{name}-temperature-0.0.jsonl" for name in ("plain", "head-16"))
    row = next(row for row in record["rows"] if row["variant"] == "head 16")
    assert speed(head) / speed(plain) == pytest.approx(row["speedup"])
    answers = [json.loads(line) for line in head.read_text().splitlines()]
    assert [answer["question_id"] for answer in answers] == [15, 16, 17] and len({a["answer_id"] for a in answers}) == 3
    for answer in answers:
        assert answer.keys() == {"question_id", "answer_id", "model_id", "choices", "tstamp"}
        (choice,) = answer["choices"]
        assert choice.keys() == {"index", "turns", "idxs", "new_tokens", "wall_time"} and choice["new_tokens"] == [8]
        assert len(choice["turns"]) == len(choice["idxs"]) == 1 and choice["wall_time"][0] > 0
    assert sum(answer["choices"][0]["idxs"][0] + 1 for answer in answers) == row["steps"]


def test_records_in_sglangs_format(swept):
    folder, record, _ = swept
    records = [json.loads(line) for line in (folder / "a" / "sglang.jsonl").read_text().splitlines()]
    assert len(records) == len(record["rows"])
    settings = [(r["other"]["steps"], r["other"]["topk"], r["other"]["num_draft_tokens"]) for r in records[:6]]
    assert settings == [(0, 0, 0), (15, 1, 16), (3, 3, 4), (8, 10, 16), (3, 3, 4), (8, 10, 16)]
    for found, row in zip(records, record["rows"], strict=True):
        assert found["other"]["temperature"] == row["temperature"] and found["num_requests"] == 3
        assert found["accept_length"] == pytest.approx(24 / row["steps"] if row["variant"] != "plain" else 1, abs=1e-3)
        assert found["throughput"] == pytest.approx(24 / found["latency"], rel=0.02)


def test_rates_by_place():
    assert acceptance_rates([[1, 0, 2], [1]], 3) == [0.5, 0.5, 0.0]
    assert acceptance_rates([[], []], 3) == []
