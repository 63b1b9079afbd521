"""eagle-triton ablation: rows, resuming, interrupts, files that are not its own, and arguments."""

from __future__ import annotations

import csv
import errno
import functools
import hashlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle_triton.cli import ablation
from eagle_triton.cli import main as cli
from eagle_triton.cli.ablation import main
from eagle_triton.cli.ablation_rows import BASELINE, COLUMNS, GROUPS, TRACE_COLUMNS, edit_distance
from eagle_triton.cli.decoding import Decoder
from eagle_triton.comparison.result_file import ResultFile
from eagle_triton.demo import demo_prompts
from tests.forked import start_program
from tests.programs import refused

ROOT = Path(__file__).resolve().parents[1]
FULL = ["--device", "cpu", "--prompts", "2", "--repeats", "2", "--length", "12"]
SHORT = ["--device", "cpu", "--repeats", "1", "--length", "6", "--prompt", "import os\nimport"]
TWO = [*SHORT, "--groups", "target_ar,nasd"]
DOCUMENTED = (
    "run_id,timestamp,group,prompt_id,prompt,seed,repeat,device,dtype,target_model,drafter_model,processor,"
    "processor_args,max_gen_len,gamma,egag,egag_gamma_min,egag_gamma_max,egag_ema,ngram_storage,ngram_n,top_k_filler,"
    "reset_in_between,kv_cache,prompt_tokens,output_tokens,target_forwards,drafter_forwards,drafts_proposed,"
    "drafts_accepted,acceptance_rate,mean_accept_length,mean_gamma,min_gamma,max_gamma,mean_h_norm,wall_time_s,"
    "tokens_per_s,speedup_vs_target_ar,output_sha256,matches_target_ar,edit_distance_to_target_ar,output_text,status"
)
GAMMA = {"gamma", "mean_gamma", "min_gamma", "max_gamma"}
EGAG = {"egag_gamma_min", "egag_gamma_max", "egag_ema", "mean_h_norm"}
NGRAM = {"ngram_storage", "ngram_n", "top_k_filler", "reset_in_between"}
EMPTY = {  # the columns that say nothing of a group
    "target_ar": {"drafter_model", "acceptance_rate"} | GAMMA | EGAG | NGRAM,
    "speculative": EGAG | NGRAM,
    "egag": NGRAM,
    "nasd": {"drafter_model"} | EGAG,
    "eagle": GAMMA | EGAG | NGRAM,
    "block": GAMMA | EGAG | NGRAM,
    "block_tree": GAMMA | EGAG | NGRAM,
    "suffix": {"drafter_model"} | GAMMA | EGAG | (NGRAM - {"reset_in_between"}),
    "hybrid": GAMMA | EGAG | (NGRAM - {"reset_in_between"}),
}


BESIDE = ("speedup_vs_target_ar", "matches_target_ar", "edit_distance_to_target_ar")


def rows(path: Path, columns: tuple[str, ...] = COLUMNS) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, strict=True)
        found = list(reader)
    assert tuple(reader.fieldnames or ()) == columns
    return found


def numbers(row: dict[str, str], *columns: str) -> list[float]:
    return [float(row[column]) for column in columns]


loaded = functools.cache(Decoder)
"""A decoder, which is kept for all tests that name the same models."""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # otherwise the program may say that it takes one thread
    monkeypatch.setattr("eagle_triton.cli.decoding.Decoder", loaded)


@pytest.fixture
def no_model(monkeypatch):
    """Nothing may be loaded."""

    def refused(*_):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("eagle_triton.cli.decoding.Decoder", refused)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """All groups over two prompts, twice each, with the steps."""
    folder = tmp_path_factory.mktemp("ablation")
    files = ["--out", str(folder / "a.csv"), "--trace", str(folder / "t.csv")]
    assert main([*FULL, *files]) == 0
    return folder


class TestRows:
    def test_the_columns_are_those_that_are_documented(self, finished):
        with open(finished / "a.csv", encoding="utf-8") as file:
            assert file.readline() == DOCUMENTED + "\n"
        assert rows(finished / "t.csv", TRACE_COLUMNS)[0].keys() == dict.fromkeys(TRACE_COLUMNS).keys()

    def test_there_is_a_row_for_each_group_prompt_and_repeat(self, finished):
        found = [(row["group"], row["prompt"], row["seed"], row["repeat"]) for row in rows(finished / "a.csv")]
        prompts = demo_prompts(2)
        assert sorted(found) == sorted(
            (group, text, "42", repeat) for group in GROUPS for text in prompts for repeat in "12"
        )

    @pytest.mark.parametrize("group", GROUPS)
    def test_columns_are_filled_where_they_say_something(self, finished, group):
        for row in rows(finished / "a.csv"):
            if row["group"] == group:
                assert {column for column in COLUMNS if not row[column]} == EMPTY[group]

    def test_greedy_rows_match_the_target(self, finished):
        for row in rows(finished / "a.csv"):
            assert (row["matches_target_ar"], row["edit_distance_to_target_ar"], row["status"]) == ("True", "0", "ok")
            assert row["output_sha256"] == hashlib.sha256(row["output_text"].encode()).hexdigest()
            assert (row["processor"], row["processor_args"]) == ("greedy", "temperature=1.0")
            assert row["output_tokens"] == row["max_gen_len"] == "12"

    def test_figures_fit_each_other(self, finished):
        found = rows(finished / "a.csv")
        for row in found:
            seconds, speed, tokens = numbers(row, "wall_time_s", "tokens_per_s", "output_tokens")
            assert speed == pytest.approx(tokens / seconds, rel=1e-4)
            alone = [
                numbers(other, "tokens_per_s")[0]
                for other in found
                if (other["group"], other["prompt"]) == (BASELINE, row["prompt"])
            ]
            expected = 1 if row["group"] == BASELINE else speed / (sum(alone) / 2)
            assert numbers(row, "speedup_vs_target_ar")[0] == pytest.approx(expected, rel=1e-4)
            if row["acceptance_rate"]:
                accepted, proposed, rate = numbers(row, "drafts_accepted", "drafts_proposed", "acceptance_rate")
                assert rate == pytest.approx(accepted / proposed, rel=1e-4) and 0 <= accepted <= proposed

    def test_settings_of_the_groups(self, finished):
        first = {row["group"]: row for row in reversed(rows(finished / "a.csv"))}
        assert first["speculative"]["gamma"] == first["nasd"]["gamma"] == first["speculative"]["mean_gamma"] == "4"
        assert [first["egag"][name] for name in ("egag", "egag_gamma_min", "egag_gamma_max", "egag_ema")] == [
            "True", "1", "6", "0.9",
        ]  # fmt: skip
        assert [first["nasd"][name] for name in ("egag", "ngram_storage", "ngram_n", "top_k_filler")] == [
            "False", "basic", "3", "3",
        ]  # fmt: skip
        assert first["egag"]["drafter_model"] == "demo-draft" and first["eagle"]["drafter_model"] == "demo (head)"
        assert {first[group]["drafter_model"] for group in ("block", "block_tree")} == {"demo-block"}

    def test_a_block_drafter_drafts_a_block_in_one_pass(self, finished):
        """Chains of up to seven drafts, and trees of 16 nodes, which are accepted more often."""
        taus = {}
        for group in ("block", "block_tree"):
            found = [row for row in rows(finished / "a.csv") if row["group"] == group]
            for row in found:
                drafted, forwards, proposed = numbers(row, "drafter_forwards", "target_forwards", "drafts_proposed")
                assert 0 <= forwards - drafted <= 2 and proposed <= (7 if group == "block" else 15) * drafted
            taus[group] = sum(numbers(row, "mean_accept_length")[0] for row in found)
        assert len(found) == 4 and taus["block_tree"] > taus["block"] > 4 * 1.2

    def test_the_trace_has_the_steps_of_each_row(self, finished):
        steps = rows(finished / "t.csv", TRACE_COLUMNS)
        for row in rows(finished / "a.csv"):
            own = [step for step in steps if step["run_id"] == row["run_id"]]
            assert [step["step"] for step in own] == [str(number) for number in range(len(own))]
            for column, total in (("accepted", "drafts_accepted"), ("proposed", "drafts_proposed")):
                assert sum(int(step[column]) for step in own) == int(row[total])
            assert sum(int(step["emitted"]) for step in own) == int(row["output_tokens"])
            gammas = [float(step["gamma"]) for step in own if step["gamma"]]
            if gammas:
                assert sum(gammas) / len(gammas) == pytest.approx(float(row["mean_gamma"]), rel=1e-4)
                assert [min(gammas), max(gammas)] == numbers(row, "min_gamma", "max_gamma")
            assert any(step["h_norm"] for step in own) == any(step["h_ema"] for step in own) == (row["egag"] == "True")

    def test_a_seed_gives_the_targets_own_sample(self):
        """tests/test_cli_decoding.py has every method."""
        options = ["--processor", "topk", "2", "500", "--seeds", "0,7", "--groups", "target_ar,egag,nasd,block_tree"]
        assert main([*SHORT, *options]) == 0
        found = rows(Path("ablation_results.csv"))
        assert len(found) == 2 * 4 and {row["matches_target_ar"] for row in found} == {"True"}
        assert {(row["processor"], row["processor_args"]) for row in found} == {("topk", "temperature=2.0 top_k=500")}
        assert len({row["output_text"] for row in found if row["group"] == BASELINE}) == 2

    def test_without_target_ar_nothing_is_compared(self, capsys):
        assert main([*SHORT, "--groups", "nasd"]) == 0
        assert "target_ar is not among the groups" in capsys.readouterr().out
        (row,) = rows(Path("ablation_results.csv"))
        assert [row[name] for name in BESIDE] == ["", "", ""]
        assert main([*SHORT, "--groups", "target_ar"]) == 0  # and then it is found in the file
        assert main([*SHORT, "--groups", "suffix"]) == 0
        *_, row = rows(Path("ablation_results.csv"))
        assert (row["group"], row["matches_target_ar"]) == ("suffix", "True") and float(row["speedup_vs_target_ar"]) > 0

    def test_summary_and_picture(self, finished, capsys):
        pytest.importorskip("matplotlib")
        files = ["--out", str(finished / "a.csv"), "--plot", "p.png"]
        assert main([*FULL, *files]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["group", "rows", "tokens/s", "speedup", "tau", "acceptance", "gamma", "matches"]
        groups, told = lines[1 : len(GROUPS) + 1], lines[len(GROUPS) + 1]
        assert [line.split()[0] for line in groups] == list(GROUPS)
        assert all(line.split()[1] == "4" and line.split()[-1] == "4/4" for line in groups)
        assert told == f"36 of 36 rows are in {finished / 'a.csv'}"
        assert Path("p.png").read_bytes().startswith(b"\x89PNG")


class TestResuming:
    def test_finished_rows_stay_and_the_others_come_again(self, finished):
        before = rows(finished / "a.csv")
        out, trace = Path("a.csv"), Path("t.csv")
        out.write_bytes((finished / "a.csv").read_bytes()[:900])  # half a row
        lines = (finished / "a.csv.jsonl").read_bytes().splitlines(keepends=True)
        Path("a.csv.jsonl").write_bytes(b"".join(lines[:31]) + lines[31][:150])  # 30 rows and a half
        assert main([*FULL, "--out", "a.csv", "--trace", "t.csv"]) == 0
        after = rows(out)
        assert after[:30] == before[:30] and len(after) == 4 * len(GROUPS)
        assert [row["run_id"] for row in after] == [row["run_id"] for row in before]
        texts = {row["run_id"]: row["output_text"] for row in before}
        assert all(texts[row["run_id"]] == row["output_text"] for row in after)
        assert all(row["timestamp"] not in {old["timestamp"] for old in before} for row in after[30:])
        steps = rows(trace, TRACE_COLUMNS)
        assert len({(step["run_id"], step["step"]) for step in steps}) == len(steps)
        assert {step["run_id"] for step in steps} == set(texts)

    def test_a_complete_file_needs_no_model(self, finished, no_model):
        before = (finished / "a.csv").read_bytes()
        assert main([*FULL, "--out", str(finished / "a.csv"), "--trace", str(finished / "t.csv")]) == 0
        assert (finished / "a.csv").read_bytes() == before

    def test_other_prompts_seeds_repeats_and_groups_are_added(self):
        out = Path("ablation_results.csv")
        assert main(TWO) == 0
        first = out.read_bytes()
        assert main([*SHORT, "--groups", "suffix"]) == 0
        more = [option if option != "1" else "2" for option in TWO]
        assert main([*more, "--seeds", "42,1", "--prompt", "class"]) == 0
        assert out.read_bytes().startswith(first)
        found = rows(out)
        assert len(found) == 3 + 2 * 2 * 2 * 2 - 2 and len({row["run_id"] for row in found}) == len(found)

    @pytest.mark.parametrize("when", ["before", "while"])
    def test_an_interrupt_keeps_what_is_there(self, monkeypatch, capsys, when):
        decode, calls = Decoder.decode, 0

        def interrupted(self, *args):
            nonlocal calls
            calls += 1
            if calls < 4:  # the warm-up and the row of target_ar, the warm-up of nasd
                return decode(self, *args)
            if when == "before":
                raise KeyboardInterrupt
            return decode(self, *args, lambda *_: signal.raise_signal(signal.SIGINT))

        monkeypatch.setattr(Decoder, "decode", interrupted)
        assert main(TWO) == 130
        assert (
            "interrupted: 1 of 2 rows are in ablation_results.csv; the same command continues"
            in capsys.readouterr().err
        )
        (kept,) = rows(Path("ablation_results.csv"))
        monkeypatch.setattr(Decoder, "decode", decode)
        assert main(TWO) == 0
        assert rows(Path("ablation_results.csv"))[0] == kept and len(rows(Path("ablation_results.csv"))) == 2

    def test_an_interrupt_before_the_first_row(self, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "decode", lambda *_: signal.raise_signal(signal.SIGINT))
            assert main([*TWO, "--overwrite"]) == 130
        assert rows(Path("ablation_results.csv")) == []
        assert main(TWO) == 0 and len(rows(Path("ablation_results.csv"))) == 2

    @pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGKILL"])
    def test_a_process_that_ends_in_the_middle(self, how):
        """At any place: in the middle of a row, too."""
        if not hasattr(signal, how):
            pytest.skip(f"no {how} here")
        options = [*TWO, "--repeats", "40"]
        process = start_program(cli.main, "ablation", *options)
        out, results = Path("ablation_results.csv"), Path("ablation_results.csv.jsonl")
        deadline = time.monotonic() + 120
        while not out.exists() or out.read_bytes().count(b",ok\n") < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(getattr(signal, how))
        status, told = process.wait(), process.stderr.read()
        if how == "SIGKILL":
            assert status == -signal.SIGKILL
        else:
            assert status == 130 and "rows are in ablation_results.csv; the same command continues" in told
            assert "Traceback" not in told
        kept = results.read_bytes().rpartition(b"\n")[0]
        assert kept.count(b"\n") >= 3
        assert main([*TWO, "--repeats", "3"]) == 0
        after = rows(out)
        assert results.read_bytes().startswith(kept) and len({row["run_id"] for row in after}) == len(after)
        assert len(after) == results.read_bytes().count(b"\n") - 1

    def test_a_row_that_fails_is_said_and_wanted_again(self, monkeypatch, capsys):
        decode = Decoder.decode

        def failing(self, method, *args):
            if method == "ngram":
                raise RuntimeError("no memory is left\nfor this")
            return decode(self, method, *args)

        monkeypatch.setattr(Decoder, "decode", failing)
        assert main(TWO) == 1
        found = rows(Path("ablation_results.csv"))
        assert [row["status"] for row in found] == ["ok", "failed: no memory is left for this"]
        assert found[1]["group"] == "nasd" and not found[1]["output_text"] and not found[1]["wall_time_s"]
        assert "failed: nasd, text-" in capsys.readouterr().out
        monkeypatch.setattr(Decoder, "decode", decode)
        assert main(TWO) == 0
        assert [row["status"] for row in rows(Path("ablation_results.csv"))] == ["ok", "ok"]

    def test_text_that_is_not_the_targets_is_said(self, monkeypatch, capsys):
        decode = Decoder.decode

        def wrong(self, method, prompt, settings):
            return decode(self, "drafter" if method == "ngram" else method, prompt, settings)

        monkeypatch.setattr(Decoder, "decode", wrong)
        assert main([*TWO[:-4], "--prompt", demo_prompts(2)[1], *TWO[-2:]]) == 1
        row = rows(Path("ablation_results.csv"))[1]
        assert row["matches_target_ar"] == "False" and int(row["edit_distance_to_target_ar"]) > 0
        assert f"NOT the target's text: nasd, {row['prompt_id']}, row {row['run_id']}" in capsys.readouterr().out

    def test_a_full_disk_ends_the_run(self, monkeypatch, capsys):
        add = ResultFile.add

        def full(self, name, result):
            if "nasd" in name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            add(self, name, result)

        monkeypatch.setattr(ResultFile, "add", full)
        assert main(TWO) == 1
        said = capsys.readouterr().err
        assert "No space left on device" in said and "1 of 2 rows are in ablation_results.csv" in said


class TestFilesOfOthers:
    """Each is refused in one sentence, before a model is loaded, and stays as it was; --overwrite replaces it."""

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("", b"a,b\n1,2\n", "is not a CSV of an ablation: name another file, or use --overwrite"),
            ("", b"notes without a line end", "is not a CSV of an ablation"),
            ("", DOCUMENTED.encode() + b"\n", "results, ablation_results.csv.jsonl, which are not beside it"),
            (".jsonl", b"notes", "does not hold results of ablation"),
        ],
        ids=["columns", "text", "alone", "results"],
    )
    def test_of_another_kind(self, name, content, said, capsys, no_model):
        path = Path(f"ablation_results.csv{name}")
        path.write_bytes(content)
        assert said in refused(capsys, main, *TWO) and path.read_bytes() == content

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--length", "7"], "max_gen_len 12, and this would be 7"),
            (["--dtype", "bfloat16"], "dtype float32, and this would be bfloat16"),
            (["--processor", "multinomial", "1"], "processor greedy, and this would be multinomial"),
            (["--processor", "greedy", "2"], "processor_args temperature=1.0, and this would be"),
            (["--target", "demo-gdn"], "target_model demo, and this would be demo-gdn"),
        ],
        ids=lambda value: value[0] if isinstance(value, list) else "",
    )
    def test_of_other_settings(self, finished, options, said, capsys, no_model):
        out = finished / "a.csv"
        content = out.read_bytes()
        assert said in refused(capsys, main, *TWO, "--length", "12", "--out", out, *options)
        assert out.read_bytes() == content

    def test_another_drafter_matters_to_its_groups_alone(self, capsys):
        folder = Path("draft")
        folder.symlink_to(ROOT / "eagle_triton" / "demo" / "draft")
        assert main([*SHORT, "--groups", "speculative"]) == 0
        capsys.readouterr()
        line = refused(capsys, main, *SHORT, "--groups", "egag,speculative", "--drafter", "draft")
        assert "drafter_model demo-draft, and this would be draft" in line
        assert main([*SHORT, "--groups", "egag", "--drafter", "draft"]) == 0
        assert [row["drafter_model"] for row in rows(Path("ablation_results.csv"))] == ["demo-draft", "draft"]

    def test_overwrite_replaces_it(self):
        out = Path("ablation_results.csv")
        for name in ("", ".jsonl"):
            Path(f"{out}{name}").write_text("a,b\n1,2\n", encoding="utf-8")
        assert main([*TWO, "--overwrite"]) == 0
        assert len(rows(out)) == 2

    def test_a_trace_may_come_later_and_is_no_other_file(self, finished, capsys, no_model):
        """The steps are kept with the rows, so they may be asked for at any time."""
        assert main([*FULL, "--out", str(finished / "a.csv"), "--trace", "new.csv"]) == 0
        assert Path("new.csv").read_bytes() == (finished / "t.csv").read_bytes()
        Path("notes").write_text("notes", encoding="utf-8")
        capsys.readouterr()
        line = refused(capsys, main, *FULL, "--out", finished / "a.csv", "--trace", "notes")
        assert "notes is not a CSV of an ablation" in line


class TestArguments:
    def test_matplotlib_is_asked_for_before_anything_runs(self, monkeypatch, capsys, no_model):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert "--plot needs matplotlib" in refused(capsys, main, "--plot", "p.png")

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--target", str(ROOT / "eagle_triton/demo/target"), "--groups", "eagle"], "group eagle: head: none is"),
            (["--prompt", "x " * 3000], "2048 positions of the target"),
        ],
        ids=["head", "prompt"],
    )
    def test_what_the_models_cannot_do_is_said_before_a_row(self, options, said, capsys):
        assert said in refused(capsys, main, "--device", "cpu", *options) and not list(Path().iterdir())

    def test_help_needs_no_torch(self):
        code = "import sys; sys.modules['torch'] = None\nfrom eagle_triton.cli.ablation import main\nmain(['--help'])"
        shown = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert shown.returncode == 0 and all(option in shown.stdout for option in ("--runner", "--trace", "target_ar"))

    def test_by_a_runner(self):
        """What it is started by, and the arguments of its infer.py, hold for the ablation."""
        if os.name == "nt":
            pytest.skip("the script is for a POSIX shell")
        Path("start").write_text('#!/bin/sh\necho started with "$1" >&2\nexec "$@"\n', encoding="utf-8")
        os.chmod("start", 0o755)
        runner = f"./start {sys.executable} {ROOT / 'infer.py'} --device cpu --target demo"
        ran = subprocess.run(
            [
                str(ROOT / "scripts" / "run_ablation.sh"), "--prompt", "import os", "--runner", runner,
                "--out", "mine.csv", "--groups", "target_ar", "--repeats", "1", "--length", "2",
            ],
            env={**os.environ, "EAGLE_TRITON_PYTHON": sys.executable}, capture_output=True, text=True,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert f"started with {sys.executable}" in ran.stderr
        (row,) = rows(Path("mine.csv"))
        assert (row["prompt"], row["device"], row["max_gen_len"]) == ("import os", "cpu", "2")


def test_edit_distance():
    def table(first: str, second: str) -> int:
        above = list(range(len(second) + 1))
        for number, a in enumerate(first, 1):
            row = [number]
            for place, b in enumerate(second, 1):
                row.append(min(above[place] + 1, row[-1] + 1, above[place - 1] + (a != b)))
            above = row
        return above[-1]

    source = random.Random(0)
    for _ in range(500):
        first, second = ("".join(source.choices("abc", k=source.randrange(90))) for _ in range(2))
        assert edit_distance(first, second) == table(first, second)


def test_rows_are_decoded_by_turns():
    options = ablation._parser("x").parse_args(["--repeats", "2", "--groups", "nasd,target_ar,egag", "--prompt", "a"])
    options.prompts_by_id, options.groups = {"p": "a"}, ["nasd", "target_ar", "egag"]
    assert [(job.group, job.repeat) for job in ablation._jobs(options)] == [
        ("target_ar", 1), ("target_ar", 2), ("nasd", 1), ("egag", 1), ("nasd", 2), ("egag", 2),
    ]  # fmt: skip
