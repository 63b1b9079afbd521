"""The script integration_test.py: what it prints and records, and that it fails when outputs differ for no reason."""

import json

import torch
import transformers

import integration_test
from eagle_triton.benchmarks import original_and_patched as comparison
from eagle_triton.benchmarks import parity
from eagle_triton.benchmarks.original_and_patched import Comparison, Run, compare
from eagle_triton.comparison.figures import first_difference
from eagle_triton.demo import demo_directory, demo_prompts
from tests.programs import recorded
from tests.tiny import random_prompt, tiny_model


def compared(tmp_path, *words):
    """The record of a run in which nothing differs."""
    file = tmp_path / "integration.json"
    assert integration_test.main([*words, "--device", "cpu", "--output", str(file)]) == 0
    return json.loads(file.read_text())


def test_bf16_reports_the_share_of_identical_outputs(tmp_path, capsys):
    record = compared(tmp_path, "--dtype", "bfloat16", "--num-runs", "2", "--max-length", "8")
    assert record["mode"] == "integration" and record["machine"]["torch"] == torch.__version__
    assert [(row["output"], row["against"]) for row in record["rows"]] == [
        ("optimised tree", "original plain"),
        ("optimised tree", "optimised plain"),
        ("optimised tree", "original tree"),
        ("optimised plain", "original plain"),
        ("original tree", "original plain"),
    ]
    for row in record["rows"]:
        assert row["identical"] + len(row["differences"]) == row["of"] == 2
        assert all(difference["margin"] < 0.25 for difference in row["differences"])
    printed = capsys.readouterr().out
    lengths = whole_prompts(2)
    assert f"2 prompts of {min(lengths)} to {max(lengths)} tokens, none cut" in printed and "NOISE" in printed
    assert record["options"]["prompt_tokens"] == lengths


def whole_prompts(count):
    """Lengths of the demo's prompts, in tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_directory("target"))
    return [len(tokenizer(text).input_ids) for text in demo_prompts(count)]


def test_tau_is_that_of_the_benchmark(tmp_path, capsys):
    """Prompts longer than --max-length among them, which must not be cut."""
    arguments = ["--num-runs", "1", "--max-length", "8"]
    assert max(whole_prompts(1)) > 8
    ours = compared(tmp_path, *arguments)["options"]["tau"]
    capsys.readouterr()
    rows = recorded(capsys, *arguments, "--device", "cpu")["rows"]
    assert ours == {row["variant"]: row["tau"] for row in rows}


def test_a_target_in_fp8_gives_the_tokens_of_its_own_modules(tmp_path):
    record = compared(tmp_path, "--target-weights", "fp8", "--num-runs", "1", "--max-length", "8")
    assert record["options"]["target_weights"] == "fp8" and all(row["identical"] == 1 for row in record["rows"])


def test_defaults_follow_the_dtype():
    for dtype, expected in (("float32", (3, 100)), ("bfloat16", (100, 128)), ("float16", (100, 128))):
        _, args = integration_test._parse(["--dtype", dtype])
        assert (args.num_runs, args.max_length) == expected
    assert integration_test._parse(["--dtype", "bfloat16", "--num-runs", "5"])[1].num_runs == 5
    assert integration_test._parse(["--dtype", "bfloat16", "--prompt", "x"])[1].num_runs == 1


def test_a_difference_that_rounding_does_not_explain_fails(monkeypatch, capsys):
    def bent(*args, **kwargs):
        comparisons, report = compare(*args, **kwargs)
        run = comparisons[0].optimised
        tokens = [*run.tokens[:-1], (run.tokens[-1] + 1) % 4096]
        broken = Run(run.prompt_length, tokens, run.lengths, run.times)
        first = comparisons[0]
        return [Comparison(first.original, broken, first.original_plain, first.optimised_plain)], report

    monkeypatch.setattr(comparison, "compare", bent)
    monkeypatch.setattr(parity, "MARGIN_BOUND", {torch.float32: 0.0})
    assert integration_test.main(["--num-runs", "1", "--max-length", "12", "--device", "cpu"]) == 1
    assert "FAIL: optimised tree against original tree, prompt 0: top-2 margin" in capsys.readouterr().out


def test_plain_decoding_is_compared_too():
    (result,), report = compare(tiny_model(total_token=8, depth=3, top_k=2), [random_prompt(9)], 12, plain=True)
    assert result.original_plain.new_tokens == result.optimised_plain.new_tokens == 13
    assert first_difference(result.optimised.tokens, result.original_plain.tokens) is None
    assert result.optimised_plain.tokens == result.original_plain.tokens
    assert {row.path: row.calls for row in report}["naive_generate"] == 2
