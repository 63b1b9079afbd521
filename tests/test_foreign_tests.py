"""tools/foreign_tests.py over a small suite: what ran where is counted, with reasons, and a regression is found."""

import json
import os
import sys
from types import SimpleNamespace

import pytest

from tests.forked import start_program
from tools import foreign_tests

SUITE = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

IDS = torch.tensor([[3, 4, 5]])


def model():
    torch.manual_seed(0)
    sizes = dict(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, eos_token_id=None)).eval()


def test_greedy():
    assert model().generate(IDS, max_new_tokens=2, do_sample=False).shape == (1, 5)


def test_beams():
    assert model().generate(IDS, max_new_tokens=2, num_beams=2, do_sample=False).shape == (1, 5)


def test_another_activation():
    other = model()
    other.model.layers[0].mlp.act_fn = torch.nn.Softmax(-1)
    assert other.generate(IDS, max_new_tokens=2, do_sample=False).shape == (1, 5)


def test_of_the_hub():
    hub = AutoModelForCausalLM.from_pretrained("some/model")
    assert hub.generate(IDS, max_new_tokens=2, do_sample=False).shape[1] > 3


def test_that_generates_nothing():
    assert IDS.shape == (1, 3)
"""


PLACE = "tests/generation/test_utils.py"


def run_pytest(argv):
    """In a process that was forked, which has not read PYTHONPATH."""
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    return pytest.main(argv)


def run(command, cwd, env, check):
    """As subprocess.run, in a process that has imported torch and transformers already."""
    assert command[:3] == [sys.executable, "-m", "pytest"]
    here = os.getcwd()
    os.chdir(cwd)
    try:
        process = start_program(run_pytest, *command[3:], **env)
        print(process.stdout.read(), process.stderr.read(), process.wait(), sep="\n")
    finally:
        os.chdir(here)


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    (source / "tests" / "generation").mkdir(parents=True)
    (source / "tests" / "generation" / "test_utils.py").write_text(SUITE)
    output = source / "found.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreign_tests, "subprocess", SimpleNamespace(run=run))
        status = foreign_tests.main(["generation", "--source", str(source), "--stand-ins", "--output", str(output)])
    return status, json.loads(output.read_text())


def test_what_ran_where_is_counted_with_its_reasons(record):
    status, found = record
    summary = found["summary"]
    assert status == 0 and summary["tests"] == 4 and summary["passed"] == {"plain": 4, "wrapped": 4}, found
    assert summary["calls"] == {"engine": 2, "original": 1, "refused": 1, "raised": 0}
    assert summary["reasons"]["original: num_beams"] == 1
    assert any("must be SiLU" in reason for reason in summary["reasons"])
    assert [call[0] for call in found["found"]["plain"][f"{PLACE}::test_greedy"]["calls"]] == ["original"]


def test_a_test_that_passes_only_as_it_is_is_a_regression():
    plain = {
        "a": {"outcome": "passed", "calls": [["original", ""]]},
        "b": {"outcome": "failed", "calls": [["original", ""]]},
    }
    wrapped = {
        "a": {"outcome": "failed", "calls": [["engine", ""]]},
        "b": {"outcome": "failed", "calls": [["engine", ""]]},
    }
    summary = foreign_tests.summarise({"plain": plain, "wrapped": wrapped})
    assert summary["regressions"] == ["a"] and summary["calls"]["engine"] == 1
    assert "REGRESSION: a" in foreign_tests.report("some", summary)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("generation", "generation needs --source: a checkout of transformers at the version that is installed"),
        ("generation --source .", "--source . has no tests/generation: a checkout of transformers"),
    ],
)
def test_it_says_where_a_source_is_to_be_had(command, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        foreign_tests.main(command.split())
    assert stopped.value.code == 2 and sentence in capsys.readouterr().err
