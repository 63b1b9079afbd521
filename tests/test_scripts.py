"""The command lines of all programs: a wrong argument is one sentence, said before anything is imported, loaded or
written; what README and docs/ call is right. And the scripts that have no tests of their own."""

import argparse
import importlib
import io
import itertools
import json
import logging
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import benchmark
import eagle_triton
import integration_test
import run_tests
import setup_env
import usage_example
from eagle_triton import EaModel, command_line, devices
from eagle_triton.benchmarks import main as modes
from eagle_triton.benchmarks.modes import SHAPES
from eagle_triton.benchmarks.question_file import OWN_QUESTIONS, Question
from eagle_triton.cli import ablation, environment, main
from eagle_triton.cli.settings import MAX_SEED
from eagle_triton.command_line import Parser
from eagle_triton.demo import demo_directory
from eagle_triton.serve import main as serve
from tests.programs import refused
from tools import build_docs, mutate, remeasure, tune_linear
from tools.tuning import attention as tuned_attention
from tools.tuning import products

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = (
    "infer.py",
    "integration_test.py",
    "benchmark.py",
    "setup_env.py",
    "run_tests.py",
    *sorted(f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py")),
)
QUESTIONS = shlex.quote(str(OWN_QUESTIONS))
NUMBER = "must be a whole number from 1 to"
UNKNOWN = "is no argument of this command; its options are --help"
MISSPELT = "is no argument of this command; did you mean"
COMMANDS = "command must be one of check, generate, chat, serve, bench, ablation, export, quantize, got"
READERS = [  # of texts, and what they say of wrong ones
    (command_line.model, "nowhere/", "must be a directory or a hub id, and nowhere/ does not exist"),
    (command_line.model, "./nowhere", "must be a directory or a hub id, and ./nowhere does not exist"),
    (command_line.model, "~/no/such/model", "must be a directory or a hub id, and ~/no/such/model does not exist"),
    (command_line.model, "folder/nowhere", "must be a directory or a hub id, and folder/nowhere does not exist"),
    (command_line.model, "file", "must be a directory or a hub id, and file is a file"),
    (command_line.model, "", "must be a directory or a hub id, and '' is neither"),
    (command_line.model, "two words", "must be a directory or a hub id, and 'two words' is neither"),
    (command_line.existing_file, os.devnull, f"must be a file, and {os.devnull} is a device or pipe"),
    (command_line.output_file(), "folder", "must be a file, and folder is not one"),
    (command_line.output_file(), "nowhere/x.json", "must be a file in a directory that exists, and"),
    (command_line.output_file(), "file/x.json", "must be a file in a directory that exists, and"),
    (command_line.output_file(), "x" * 300, "must be a file"),
    (command_line.output_file(".png", ".svg"), "x.xyz", "must end with .png or .svg, got 'x.xyz'"),
    (command_line.device, "toaster", "must be cpu, cuda or cuda:N, got 'toaster'"),
    (command_line.some_text, "", "must be a text that is not empty"),
    (command_line.whole(), "0", f"{NUMBER} 10000000, got '0'"),
    (command_line.whole(most=256), "257", f"{NUMBER} 256, got '257'"),
    (command_line.number(0, 100), "nan", "must be a number from 0 to 100, got 'nan'"),
    (command_line.number(0, 100), "-1", "must be a number from 0 to 100, got '-1'"),
    (command_line.sizes(), "5,0", "must be whole numbers from 1 to 10000000, separated by commas, got '5,0'"),
]
REFUSED = {
    "integration_test.py": [
        ("--model some/target", "--draft must name the head (a directory or a hub id) for --model some"),
        ("--model folder", "--draft must name the head (a directory or a hub id) for --model folder, w"),
        ("--draft demo-block", "--draft must be an EAGLE head here, and demo-block is a block drafter"),
        ("--draft some/head", "--draft must come with the --model that it drafts for"),
        ("--model some/target --draft /nope", "--draft must be a directory or a hub id, and /nope does"),
        ("--dtype int8", "--dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ("--max-length 1", "--max-length must be a whole number from 2 to"),
        ("--max-length 2048", "--max-length must be below the model's 2048 positions, got 2048"),
        ("batches --max-length 1", "--max-length must be a whole number from 2 to 10000000, got '1'"),
        ("--num-runs 99999", f"--num-runs {NUMBER} 10000, got '99999'"),
        ("--prompt ''", "--prompt must be a text that is not empty, got ''"),
        ("--prompt x --num-runs 3", "--num-runs must be 1 with --prompt, which is one prompt, got 3"),
        ("--verb", f"'--verb' {MISSPELT} --verbose?"),
    ],
    "benchmark.py": [
        ("--model nowhere/", "--model must be a directory or a hub id, and nowhere/ does not exist"),
        ("--model some/target", "--draft must name the head (a directory or a hub id) for --model some/target"),
        ("--draft /nope", "--draft must be a directory or a hub id, and /nope does not exist"),
        ("--device toaster", "--device must be cpu, cuda or cuda:N, got 'toaster'"),
        ("--dtype int8", "--dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ("--commit ''", "--commit must be a text that is not empty"),
        ("nothing", f"mode must be one of {', '.join(modes.MODES)}, got 'nothing'"),
        ("--num=3", f"'--num=3' {MISSPELT} --num-runs?"),
        ("--num-runs 3 step", "step is a mode: it must be the first argument"),
        ("--num-runs 0", f"--num-runs {NUMBER} 10000, got '0'"),
        ("--max-length -1", f"--max-length {NUMBER} 10000000, got '-1'"),
        ("--max-length 2048", "--max-length must be below the model's 2048 positions, got 2048"),
        ("--temperature nan", "--temperature must be a number from 0 to 100, got 'nan'"),
        ("--accept-length -1", "--accept-length must be a number from 0 to 999, got '-1'"),
        ("--shape huge", f"--shape must be one of {', '.join(SHAPES)}, got 'huge'"),
        ("--shape tiny --prompt a", "--shape must come without --model, --draft and --prompt"),
        ("--context 5,0", "--context must be whole numbers from 1 to 10000000, separated by commas, got '5,0'"),
        ("--context 5 --prompt a", "--context must come without --prompt: it makes random prompts"),
        ("--context 999999", "--context and the new tokens must fit into the model's 2048 positions, got 999999 + 100"),
        ("step --context 64,2048", "--context and the new tokens must fit into the model's 2048 positions, got 2048"),
        (
            "step --shape tiny --context 131072",
            "--context and the new tokens must fit into the model's 131072 positions",
        ),
        ("step --batch 1,2000", "--batch must be whole numbers from 1 to 1024, separated by commas, got '1,20"),
        ("step --decoding plain dflash-chain", "--decoding dflash-chain must come with --shape"),
        ("step --decoding plain --draft-weights fp8", "--draft-weights is not read by --decoding"),
        ("step --target-weights fp8 --upstream folder", "--upstream must come without --target-weights"),
        ("drafters --shape tiny --block-drafter demo-block", "--shape must come without --block-drafter"),
        ("--batch 2", "--batch is not read here, but by step, batches, megakernel"),
        ("step --max-length 5", "--max-length is not read here, but by generate, batches"),
        ("megakernel --device cpu", "--device must be a GPU in this mode, got cpu"),
        ("--upstream nowhere", "--upstream must be a directory, and nowhere does not exist"),
        ("--plot picture.xyz", "--plot must end with .png or .svg or .pdf, got 'picture.xyz'"),
        ("--csv folder", "--csv must be a file, and folder is not one"),
        ("--csv both --output both", "--csv must be another file than --output, got 'both', which is the same"),
        ("--csv folder/../both --output both", "--csv must be another file than --output, got 'folder/../both'"),
        (f"questions --questions {QUESTIONS} --output {QUESTIONS}", "--output must be another file than --questions"),
        ("serve --url http://127.0.0.1:9 --no-speculation", "--no-speculation must come without --url"),
        ("serve --goodput ttft", "--goodput must be ttft:MS, tpot:MS or e2el:MS, got 'ttft'"),
        ("serve --input-len 9-5", "--input-len must be N or N-M"),
    ],
    "setup_env.py": [
        ("--isntall", f"'--isntall' {MISSPELT} --install?"),
        ("file", f"'file' {UNKNOWN}, --install"),
        ("--run", "--run must be followed by a script and its arguments, got none"),
        ("--run folder", "--run must be followed by a script, and folder is no file"),
        ("--run ''", "--run must be followed by a script, and an empty path is no file"),
        ("--json --run file", "--json and --run exclude each other"),
        ("--verbose", "--verbose must come with --install or --run"),
        ("--constraints file", "--constraints must come with --install or --run"),
        ("--constraints nowhere --install", "--constraints must be a file, and nowhere is not one"),
        ("--constraints", "--constraints: expected one argument"),
        ("--extra-no-deps x", "--extra-no-deps must come with --install or --run"),
        ("--extra-no-deps=-e --install", "--extra-no-deps must be a requirement such as eagle-llm==1.2.1, got "),
        ("--venv ''", "--venv must be a directory, got an empty path"),
        ("--venv file", "--venv must be a directory that can be made, and"),
        ("--venv file/below --install", "--venv must be a directory that can be made, and"),
        (f"--venv {'x' * 300} --install", "--venv must be a directory that can be written, and"),
    ],
    "eagle-triton": [
        ("", f"{COMMANDS} none"),
        ("frob", f"{COMMANDS} 'frob'"),
        ("--frob", "'--frob' is no argument of this command"),
        ("check --frob", "'--frob' is no argument of this command"),
        ("bench frob", "mode must be one of generate, step"),
    ],
    "eagle-triton chat": [
        ("x", "'x' is no argument of this command"),
        ("--targ demo", "'--targ' is no argument of this command; did you mean --target? (see --help)"),
        ("--commands nowhere", "--commands must be a readable file, got nowhere: No such"),
        ("--commands .", "--commands must be a readable file, got .: Is a directory"),
        ("--commands latin", "--commands must be a readable file, got latin: it is not in"),
        ("--target ./nowhere", "--target must be a directory or a hub id, and ./nowhere does not exist"),
        ("--device tpu", "--device must be cpu, cuda or cuda:N, got 'tpu'"),
        ("--dtype int8", "--dtype must be one of float32, bfloat16, float16, got 'int8'"),
    ],
    "eagle-triton generate": [
        ("x y", "'y' is no argument of this command"),
        ("x --method medusa", "--method must be one of target, drafter, speculative"),
        ("x --max-new-tokens 0", "--max-new-tokens must be a whole number from 1"),
        (f"x --seed {MAX_SEED + 1}", f"--seed must be a whole number from 0 to {MAX_SEED}, got 9223"),
        ("x --top-p 0.9", "--top-p must come with a --temperature (0: greedy)"),
        ("x --top-k 9", "--top-k must come with a --temperature (0: greedy)"),
        ("x --temperature 0 --top-p 0", "top_p must be a finite number above 0"),
        ("x --method eagle --gamma 3", "--gamma is not read by --method eagle, but by speculative, ng"),
        ("x --method ngram --egag", "--egag is not read by --method ngram, but by speculative"),
        ("x --egag-ema 0.5", "--egag-ema must come with --egag"),
        ("x --head h --method target", "--head is not read by --method target, but by eagle, hybrid"),
        ("x --drafter d --head h", "--head is not read by --method speculative, but by eagle, hybrid"),
        ("x --model some/model --method block", "--block-drafter must name one for --method block"),
        ("x --model some/model --method drafter", "--drafter must name a smaller model for --method "),
        ("x --draft d", "'--draft' is no argument of this command; did you mean --drafter?"),
        ("x --gamma 2 --egag --egag-gamma-min 3", "egag_gamma_min must be at most 2"),
        ("''", "PROMPT must be a text that is not empty"),
    ],
    "eagle-triton quantize": [
        ("demo -o out", "the following arguments are required: --to"),
        ("demo --to int8 -o out", "--to must be one of fp8, int4, got 'int8'"),
        ("demo --to int4 -o out --device cpu", "--device must come with --text: nothing else runs a mo"),
        ("demo --to fp8 -o .", "-o/--output must be a new or empty directory, and . is not empty"),
    ],
    "eagle-triton export": [
        ("demo --to tgi -o out", "--to must be one of vllm, sglang, speculators, safeailab, got 'tgi'"),
        ("some/head --to vllm -o out", "--target must name the model that some/head drafts for"),
        ("./nowhere --to vllm -o out", "HEAD must be a directory or a hub id, and ./nowhere does not e"),
        ("demo --to vllm -o file", "-o/--output must be a new or empty directory, and file is not one"),
        ("demo --to sglang --num-speculative-tokens 4 -o out", "--num-speculative-tokens is not read by"),
        ("demo --to safeailab --tensor-parallel-size 4 -o out", "--tensor-parallel-size is not read by"),
        ("demo --to vllm --device cpu -o out", "--device must come with --check: nothing else runs a mod"),
    ],
    "eagle-triton ablation": [
        ("--groups foo", "--groups must be one or more of target_ar, speculative, egag, nasd, eagle, block, block"),
        ("--groups egag,nasd egag", "--groups: egag is given twice"),
        ("--prompts 101", "--prompts must be a whole number from 1 to 100, got '101'"),
        ("--prompts 2 --prompt x", "--prompts must come without --prompt: it counts the demo"),
        ("--prompt x --prompt x", "--prompt: a text is given twice"),
        ("--prompt ''", "--prompt must be a text that is not empty, got ''"),
        ("--prompt a\udcff", "--prompt must be text in UTF-8"),
        ("--seeds 1,x", f"--seeds must be a whole number from 0 to {MAX_SEED}, got 'x'"),
        (f"--seeds 0,{MAX_SEED + 1}", f"--seeds must be a whole number from 0 to {MAX_SEED}, got '92"),
        ("--seeds 1,1", "--seeds must not name a seed twice, got '1,1'"),
        ("--repeats 0", "--repeats must be a whole number from 1 to 10000, got '0'"),
        ("--length 0", "--length must be a whole number from 1 to 10000000, got '0'"),
        ("--processor beam", "--processor: takes one of greedy temperature, multinomial temperature,"),
        ("--processor topk 1", "--processor: top_k must be given for processor topk"),
        ("--processor multinomial -1", "--processor: temperature must be a finite number at least 0,"),
        ("--out .", "--out must be a file, and . is not one"),
        ("--trace ablation_results.csv", "--trace must be another file than --out"),
        ("--trace ./a.csv.jsonl --out a.csv", "--trace must be another file than a.csv.jsonl, which holds the results"),
        ("--plot p.bmp", "--plot must end with .png or .svg or .pdf, got 'p.bmp'"),
        ("--groups nasd,suffix --drafter .", "--drafter is not read by --groups nasd,suffix, but by "),
        ("--groups egag --drafter . --head .", "--head is not read by --groups egag, but by eagle, h"),
        ("--target demo-gdn --groups block", "--block-drafter must be given for block with --target "),
        ("--target demo-gdn", "--drafter must be given for speculative, egag with --target demo-gdn"),
        ("--runner 'uv run other.py'", "--runner must start infer.py, as in 'uv run infer.py --device "),
        ('--runner "\'"', "--runner: No closing quotation"),
        ("--runner 'python infer.py --commands x'", "--runner may give infer.py only --"),
        ("--device cpu --runner 'python infer.py --device=cpu'", "--device is given twice: here and"),
        ("--runner 'no-such-program infer.py'", "--runner: no-such-program cannot be started: No suc"),
        ("--prom x", "'--prom' is no argument of this command"),
    ],
    "build_docs.py": [
        ("--ser", f"'--ser' {MISSPELT} --serve?"),
        ("--venv file", "--venv must be a directory, and file is a file"),
    ],
    "cost_tables.py": [
        ("missing.json", "FILE.json must be a file, and missing.json does not exist"),
    ],
    "mutate.py": [
        ("--jobs 0", f"--jobs {NUMBER} 256, got '0'"),
        ("no-such-name", "names must be parts of 'commit keeps one row too few', "),
    ],
    "fuzz.py": [
        ("0 1", "SECONDS must be a whole number from 1 to"),
        ("1 1 --replay 1:1", "--replay must be SEED:INDEX beside the --door of that call, got '1:1'"),
    ],
    "foreign_tests.py": [
        ("nothing", "suite must be one of generation, families, llama, "),
        ("llama --source nowhere", "--source must be a directory, and nowhere does not exist"),
        ("sglang --silu", "--silu is for transformers' tests, not for sglang"),
        ("eagle-llm --source .", "--source: eagle-llm is found where it is installed"),
    ],
    "train_demo.py": [
        ("--stages target,nothing", "--stages must be some of tokenizer, target, prompts, eagle3, eagle1"),
        ("--set nothing=3", "--set must name a field of the recipe (seed, vocab_size, "),
        ("--set seed=x", "--set must give seed a number like 0, got 'seed=x'"),
    ],
    "tune_linear.py": [
        ("--products nothing", "--products must be one of qkv, o, gate_up, down, head, draft_qkv"),
    ],
    "tune_attention.py": [
        ("--nodes 0", f"--nodes {NUMBER} 512, got '0'"),
    ],
    "tune_experts.py": [
        ("--mxfp4 --fp8", "--fp8: not allowed with argument --mxfp4"),
    ],
    "first_call.py": [
        ("--shape huge", f"--shape must be one of {', '.join(SHAPES)}, got 'huge'"),
    ],
    "remeasure.py": [
        ("nothing.json", "nothing.json must be a record of a measurement: FileNotFoundError"),
        ("nothing.json --to nowhere", "--to must be a folder that exists, got nowhere"),
    ],
}
STOPPED = {  # by what is read or imported
    "cost_tables.py": [
        ("file", "file must be a result of benchmark.py batches, and it is not one"),
    ],
    "train_demo.py": [
        ("--set num_heads=3", "--set: hidden_size must divide by num_heads"),
        ("--set mixture_num_heads=0", "--set: mixture_hidden_size must divide by mixture_num_heads"),
        ("--set experts=1", "--set: experts_per_token must be from 1 to experts (1), got 2"),
    ],
    "foreign_tests.py": [
        ("safeailab", "safeailab needs --source: git clone https://github.com/SafeAILab/EAGLE"),
    ],
    "benchmark.py": [
        ("--upstream . --shape tiny", "not a checkout of SafeAILab/EAGLE"),
        ("operations --only missing --device cpu", "--only must occur in one of tree attention"),
        ("step --shape tiny --device cpu --batch 4 --slots 3", "--slots must be at least --batch, got 3 and 4"),
        ("serve --url http://127.0.0.1:9 --num-prompts 1", "no model is served there"),
        (f"--prompt '{'a b ' * 2000}'", "--prompt and the new tokens must fit into the model's 2048 positions, got "),
    ],
    "integration_test.py": [
        (f"--prompt '{'a b ' * 2000}'", "--prompt and the new tokens must fit into the model's 2048 positions"),
    ],
}
WITHOUT_GPU = {
    "benchmark.py": [
        ("megakernel", "this needs a GPU, and there is none here"),
        ("step --device cuda", "--device must be cpu, because there is no GPU here, got cuda"),
    ],
    "integration_test.py": [
        ("--device cuda:1", "--device must be cpu, because there is no GPU here, got cuda:1"),
    ],
    "train_demo.py": [
        ("--device cuda", "--device must be cpu, because there is no GPU here, got cuda"),
    ],
    "tune_linear.py": [
        ("", "this needs a GPU, and there is none here"),
    ],
    "tune_attention.py": [
        ("", "this needs a GPU, and there is none here"),
    ],
    "tune_experts.py": [
        ("", "this needs a GPU, and there is none here"),
    ],
    "first_call.py": [
        ("", "this needs a GPU, and there is none here"),
    ],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a program runs: two files, a folder, and no more after the test."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "latin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    yield tmp_path
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "latin"]
    assert (tmp_path / "file").read_text() == "kept"


def program(name):
    """The module of a program by the name that its errors begin with."""
    if name == "eagle-triton":
        return main
    stem = name.removesuffix(".py")
    return importlib.import_module(stem if (ROOT / name).exists() else f"tools.{stem}")


def refuse(command, capsys):
    """The one line on stderr of a call that ends with exit code 2."""
    name, *words = shlex.split(command)
    line = refused(capsys, program(name).main, *words)
    assert line.startswith(name)
    return line


def of(table):
    rows = [(f"{name} {words}", sentence) for name, its in table.items() for words, sentence in its]
    return pytest.mark.parametrize(("command", "sentence"), rows, ids=[command[:70] for command, _ in rows])


@pytest.mark.parametrize(("read", "text", "sentence"), READERS)
def test_readers_of_arguments_say_what_is_wrong(read, text, sentence, folder):
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        read(text)
    assert str(refused.value).startswith(sentence)


@of(REFUSED)
def test_a_wrong_argument_is_one_sentence_before_anything_is_loaded(command, sentence, folder, capsys, monkeypatch):
    monkeypatch.setattr(Parser, "explains", lambda *_: pytest.fail("imports and models come after this"))
    for owner, name in ((setup_env, "install"), (setup_env, "run"), (setup_env.environment, "report")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("nothing runs"))
    line = refuse(command, capsys)
    assert sentence in line and line.endswith("(see --help)")


@of(STOPPED)
def test_what_cannot_be_used_is_one_sentence(command, sentence, folder, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # otherwise a program says that it takes one thread
    assert sentence in refuse(command, capsys)


@of(WITHOUT_GPU)
def test_without_a_gpu_torch_is_not_asked(command, sentence, monkeypatch, capsys):
    """Torch's own answer, seconds later, has other words."""
    monkeypatch.setattr(command_line, "gpus", lambda: 0)
    assert sentence in refuse(command, capsys)


def test_a_gpu_that_torch_does_not_see(monkeypatch, capsys):
    found = command_line.gpus()
    assert found is None or found >= torch.cuda.device_count()
    monkeypatch.setattr(command_line, "gpus", lambda: None)  # leave it to torch
    assert "--device must be cpu or one of the" in refuse("benchmark.py --device cuda:99", capsys)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is where not even root can write")
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("benchmark.py --output /proc/x.json", "--output"),
        ("integration_test.py --output /proc/x.json", "--output"),
        ("eagle-triton ablation --out /proc/a.csv", "--out"),
        ("eagle-triton ablation --trace /proc/a.csv", "--trace"),
        ("setup_env.py --venv /proc/zz --install", "--venv"),
    ],
)
def test_what_cannot_be_written_is_found_out_before(command, option, capsys):
    line = refuse(command, capsys)
    assert option in line and ("can be written" in line or "cannot be written" in line)


def test_outputs_that_exist_are_overwritten_later_and_not_touched_now(folder):
    assert command_line.output_file()("file") == Path("file")
    assert command_line.output_file()("new.json") == Path("new.json")


@pytest.mark.parametrize("text", ["demo", "gpt2", "meta-llama/Llama-3.1-8B-Instruct", "folder", "./folder"])
def test_models_that_may_be_there(text, folder):
    assert Path(command_line.model(text)) == Path(text)


@pytest.mark.parametrize("name", ["integration_test.py", "benchmark.py"])
@pytest.mark.parametrize("error", [OSError("first.\nsecond"), ValueError("first"), TypeError("first")], ids=repr)
def test_a_model_that_does_not_load_is_one_sentence(name, error, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(EaModel, "from_pretrained", fail)
    assert refuse(name, capsys) == f"{name}: --model demo cannot be loaded: first"


@pytest.mark.parametrize("words", ["generate 'import os'", "ablation --groups speculative --out out.csv"])
@pytest.mark.parametrize(("part", "option"), [("eagle3", "--head"), ("block", "--block-drafter")])
def test_a_head_as_the_drafter_is_one_line(words, part, option, folder, capsys):
    line = refuse(f"eagle-triton {words} --drafter {demo_directory(part)} --device cpu", capsys)
    assert f"{part}' is a draft head (it has fc.weight)" in line and option in line


def with_stubs(stubs):
    return {**os.environ, "PYTHONPATH": str(stubs), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    """Modules that end the process where the heavy ones would be imported."""
    directory = tmp_path_factory.mktemp("stubs")
    for name in ("torch", "transformers", "triton"):
        (directory / f"{name}.py").write_text("import os; os._exit(99)")
    return directory


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_wrong_arguments_import_nothing_heavy(script, stubs):
    command = [sys.executable, str(ROOT / script)]
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True, env=with_stubs(stubs), cwd=stubs)
    assert helped.returncode == 0 and helped.stdout.startswith(f"usage: {Path(script).name}") and not helped.stderr
    wrong = subprocess.run([*command, "no/such/thing"], capture_output=True, text=True, env=with_stubs(stubs))
    assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1 and "no/such/thing" in wrong.stderr


def test_the_package_runs_as_its_program(stubs):
    command = [sys.executable, "-m", "eagle_triton", "no-such-command"]
    wrong = subprocess.run(command, capture_output=True, text=True, env=with_stubs(stubs), cwd=ROOT)
    assert wrong.returncode == 2 and wrong.stderr.startswith("eagle-triton: ") and "no-such-command" in wrong.stderr


def test_the_stubs_do_end_a_process(stubs):
    done = subprocess.run([sys.executable, str(ROOT / "integration_test.py")], env=with_stubs(stubs))
    assert done.returncode == 99


@pytest.mark.parametrize("script", ["setup_env.py", "tools/build_docs.py"])
def test_these_need_the_standard_library_alone(script, tmp_path):
    command = [sys.executable, "-S", str(ROOT / script), "--venv"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    said = f"{Path(script).name}: --venv: expected one argument (see --help)\n"
    assert done.returncode == 2 and done.stderr == said


def test_without_torch_the_sentence_says_what_installs_it(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    command = [sys.executable, str(ROOT / "integration_test.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=with_stubs(tmp_path))
    assert done.returncode == 2 and done.stderr == (
        "integration_test.py: torch is not installed: python3 setup_env.py --install makes an environment that has it\n"
    )


@pytest.mark.parametrize("mode", modes.MODES)
def test_each_mode_has_help_of_its_own(mode, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.main([mode, "--help"])
    told = capsys.readouterr().out
    assert not stopped.value.code and modes.MODES[mode].summary in told
    for option in modes.OPTIONS:
        read = option in (*modes.MODES[mode].options, *modes.EVERYWHERE.split())
        assert bool(re.search(rf"\n  {option}\s", told)) == read, option


@pytest.mark.parametrize("program", ["benchmark.py", "eagle-triton bench"])
def test_the_help_without_a_mode_names_every_mode(program, capsys):
    with pytest.raises(SystemExit):
        modes.main(["--help"], program)
    told = capsys.readouterr().out
    assert [mode for mode in modes.MODES if not re.search(rf"{program} {mode} |it is {mode}\b", told)] == []


def documented():
    """The calls of our programs in README, CONTRIBUTING, docs/ and the programs' own help."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    texts = [path.read_text(encoding="utf-8") for path in sorted(pages)]
    texts = re.findall(r"^```sh\n(.*?)^```$", "\n".join(texts), re.DOTALL | re.MULTILINE)
    texts += [modes.__doc__, integration_test.__doc__, main.__doc__, ablation.__doc__]
    lines = re.sub(r" *\\\n *", " ", "\n".join(texts)).replace("./scripts/run_ablation.sh", "eagle-triton ablation")
    lines = lines.replace("./run_tests.sh", "run_tests.py").replace(" --run ", " --run file\n")
    starts = r"^ *(?:.*\| )?(?:\S*python3? |uv run )?(?:tools/)?"
    pattern = starts + r"(\w+\.py|eagle-triton)(?![-/\w])(.*?)(?:  .*| [#>].*)?$"
    calls = dict.fromkeys(f"{name}{words}" for name, words in re.findall(pattern, lines, re.MULTILINE))
    return [call for call in calls if not call.endswith("--help")]


class Parsed(Exception):
    pass


@pytest.mark.parametrize("call", documented())
def test_documented_calls_are_right(call, folder, monkeypatch):
    """All checks that come before something is imported or run."""

    def parsed(*_, **__):
        raise Parsed

    for owner, name in (
        *((Parser, "explains"), (environment, "report"), (os, "execvpe"), (serve, "serve_elsewhere")),
        *((setup_env, "install"), (run_tests, "run"), (build_docs, "run"), (mutate, "attempt")),
        *((logging, "disable"), (torch, "set_num_threads")),  # of fuzz.py and usage_example.py
    ):
        monkeypatch.setattr(owner, name, parsed)
    monkeypatch.setattr(command_line, "gpus", lambda: None)
    monkeypatch.setattr(modes, "read_questions", lambda _: [Question(1, name, ("x",)) for name in ("coding", "math")])
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("x"))
    files = ("--text", "--commands", "--questions", "--constraints")
    stand_ins = {"--upstream": "folder", **dict.fromkeys(files, "file")}
    name, *words = shlex.split(call)
    words = [stand_ins.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    with pytest.raises(Parsed):
        program(name).main(words)


def test_there_are_documented_calls_of_every_command_and_of_scripts():
    assert {call.split()[1] for call in documented() if call.startswith("eagle-triton")} >= set(main.COMMANDS)
    assert {call.split()[0] for call in documented()} >= {"setup_env.py", "run_tests.py", "fuzz.py", "foreign_tests.py"}


# --- The tools


def test_products_are_those_of_the_sweep():
    found = [products.products_of(shape) for shape in tune_linear.SHAPES]
    assert {name for some in found for name in some} == set(tune_linear.PRODUCTS)
    llama, qwen = found[0], products.products_of("qwen3.5-9b")
    assert llama["qkv"] == ((4096, 1024, 1024), 4096, False) and llama["gate_up"] == ((14336, 14336), 4096, True)
    assert qwen["delta_in"] == ((8192, 4096, 32, 32), 4096, False) and qwen["draft_fc"] == ((4096,), 8192, False)


@pytest.mark.parametrize("kind", products.FOUR_BITS)
def test_products_in_four_bits_are_swept_with_weights_as_large_as_others(kind):
    llama = products.products_of("llama-3.1-8b")
    assert all(list(products.four_bit_candidates(llama[name], 60)) for name in ("qkv", "o", "gate_up", "down"))
    matrix = torch.randn(128, 256).bfloat16() * 0.02
    made = products._made(matrix, kind)
    assert made.shape == matrix.shape and made.packing is products.FOUR_BITS[kind][0]
    assert 0.005 < made.dequantised(torch.float32).std() < 0.08


def test_attention_is_tuned_from_what_it_is():
    """Today's settings first; fields that were not named stay, and programs are one or as many as splits."""
    use = tuned_attention.now(tuned_attention.heads_of("llama-3.1-8b"), 60, 8, (9, 0))
    given = dict.fromkeys(tuned_attention.FIELDS)
    some = list(
        tuned_attention.candidates(argparse.Namespace(**{**given, "splits": [2, 8], "programs": [1, 2, 8]}), use)
    )
    assert some[0] == use and len(set(some)) == len(some) == 4
    assert {(other.splits, other.programs) for other in some[1:]} == {(2, 1), (2, 2), (8, 1), (8, 8)} - {use[2:4]}
    assert {other._replace(splits=0, programs=0) for other in some} == {use._replace(splits=0, programs=0)}
    tiles = list(tuned_attention.candidates(argparse.Namespace(**{**given, "block_n": [32, use.block_n]}), use))
    assert [(other.block_n, other.streamed) for other in tiles] == [(use.block_n, True)]  # block_t is no more
    stages = list(tuned_attention.candidates(argparse.Namespace(**{**given, "num_stages": [2], "streamed": [1]}), use))
    assert [(other.num_stages, other.streamed) for other in stages] == [(3, True), (2, False)]


# --- Ctrl-C


@pytest.mark.parametrize("name", ["setup_env.py", "run_tests.py", "integration_test.py", "benchmark.py", "infer.py"])
def test_ctrl_c_is_no_traceback(name, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", interrupt)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / name), run_name="__main__")
    assert ended.value.code == 130


# --- usage_example.py


def test_usage_example_gives_the_same_tokens_three_times(monkeypatch, capsys):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    target, head = str(demo_directory("target")), str(demo_directory("eagle3"))
    assert usage_example.main(["--model", target, "--draft", head], 24) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^(\w+) +[\d.]+ tokens/s$", printed, re.M) == ["original", "optimised", "restored"]
    assert "def read_lines(path):" in printed and "EaModel, patched: tau " in printed and printed.endswith(": yes\n")


@pytest.mark.parametrize(("draft", "tokens"), [("demo-block", 64), ("suffix", 32)])
def test_usage_example_decodes_with_a_draft_that_is_no_head(draft, tokens, monkeypatch, capsys):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert usage_example.main(["--draft", draft], tokens) == 0
    printed = capsys.readouterr().out
    assert float(re.search(r"LlamaForCausalLM, patched: tau ([\d.]+) over", printed)[1]) > 2
    assert printed.endswith(": yes\n")


@pytest.mark.parametrize("wrong", range(1, 7))
def test_usage_example_compares_what_it_times(wrong, monkeypatch, capsys):
    """Two calls each, of which the second counts."""
    calls, decode = itertools.count(1), EaModel.generate
    changed = lambda *args, **options: decode(*args, max_new_tokens=2) + (next(calls) == wrong)  # noqa: E731
    monkeypatch.setattr(EaModel, "generate", changed)
    monkeypatch.setattr(eagle_triton, "optimize_eagle_with_triton", lambda model: SimpleNamespace(originals=None))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert usage_example.main([]) == (wrong % 2 == 0)
    assert ("cpu: NO" in capsys.readouterr().out.replace("cuda", "cpu")) == (wrong % 2 == 0)


def test_usage_example_refuses_what_is_no_model(capsys):
    with pytest.raises(SystemExit) as stopped:
        usage_example.main(["--model", "./nowhere"])
    assert stopped.value.code == 2 and "'./nowhere' does not exist" in capsys.readouterr().err


def test_usage_example_is_a_page_that_uses_the_public_interface():
    source = (ROOT / "usage_example.py").read_text("utf-8")
    imported = re.findall(r"^ *(?:import|from) (\w[\w.]*)", source, re.M)
    assert len(source.splitlines()) <= 45 and set(imported) == {"argparse", "time", "torch", "eagle_triton"}


@pytest.mark.parametrize(
    ("device", "names", "variable", "threads"),
    [
        ("cpu", ("demo", None), None, 1),
        ("cpu", ("demo", "demo-draft", None), None, 1),
        ("cpu", ("demo", "some/drafter"), None, 8),
        ("cuda", ("demo",), None, 8),
        ("cpu", ("demo",), "OMP_NUM_THREADS", 8),
        ("cpu", ("demo",), "MKL_NUM_THREADS", 8),
    ],
)
def test_small_models_take_one_thread_unless_the_user_has_chosen(device, names, variable, threads, monkeypatch, capsys):
    chosen = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    for name in devices.THREADS:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "8")
    devices.choose_threads(device, *names)
    devices.choose_threads(device, *names)
    assert chosen[-1] == threads and len(chosen) <= 2
    assert capsys.readouterr().err.count("OMP_NUM_THREADS sets another number") == (threads == 1)


# --- run_tests.py


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("tests/nope.py", "tests/nope.py"),
        ("-x tests/nope.py", "tests/nope.py"),
        ("tests/test_scripts.py::test_x tests/nope.py::test_y", "tests/nope.py::test_y"),
        ("tests/test_scripts.py -k nope", None),
        ("--ignore nope tests", None),
        ("-q", None),
    ],
)
def test_a_missing_path_is_found_before_anything_runs(command, missing, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(run_tests, "run", lambda *arguments: not ran.append(arguments))
    if missing is None:
        assert run_tests.main(shlex.split(command)) == 0 and len(ran) == 5
    else:
        assert f"{missing} does not exist" in refuse(f"run_tests.py {command}", capsys) and not ran


def test_a_detailed_report_times_generations_and_every_operation(monkeypatch):
    ran = []
    monkeypatch.setattr(run_tests, "run", lambda *arguments: not ran.append(arguments))
    assert run_tests.main(["--detailed-report"]) == 0
    assert ran[-2:] == [("benchmark.py",), ("benchmark.py", "operations")] and "--durations" in ran[-3]


def test_every_mutation_has_its_text_in_the_package():
    """They are run by hand; here they are only kept from growing stale."""
    mutations = mutate.MUTATIONS
    stale = [m.name for m in mutations if (ROOT / "eagle_triton" / m.file).read_text("utf-8").count(m.text) != 1]
    assert len(mutations) >= 24 and not stale


# --- tools/remeasure.py


def test_a_file_is_measured_again_by_its_own_command(tmp_path, monkeypatch, capsys):
    """As many rows, by this commit; the old file stays."""
    old, new = tmp_path / "small.json", tmp_path / "new"
    new.mkdir()
    options = ["--shape", "tiny", "--decoding", "plain", "--context", "20", "--num-runs", "1"]
    assert benchmark.main(["step", *options, "--output", str(old), "--csv", str(old.with_suffix(".csv"))]) == 0
    before = old.read_text()

    def run(words, **_):
        assert words[:2] == [sys.executable, "benchmark.py"]
        return SimpleNamespace(returncode=benchmark.main(words[2:]))

    monkeypatch.setattr(remeasure, "subprocess", SimpleNamespace(run=run))
    assert remeasure.main([str(old), "--to", str(new), "--commit", "this one"]) == 0
    found, was = (json.loads(path.read_text()) for path in (new / "small.json", old))
    assert found["options"] == was["options"] and len(found["rows"]) == len(was["rows"]) == 2
    assert found["machine"]["commit"] == "this one" and old.read_text() == before and (new / "small.csv").exists()
    assert "small.json: done after " in capsys.readouterr().out


def test_commands_that_fail_or_come_too_late_are_named(tmp_path, monkeypatch, capsys):
    files = [
        ROOT / "results" / f"{stem}.json" for stem in ("ranks-h200", "http-demo-h100", "step-trees-llama-3.2-1b-h200")
    ]
    ran, clock = [], iter([0.0, 1.0, 1.0, 2.0, 9.0, 9.0, 10.0, 11.0])
    monkeypatch.setattr(remeasure.time, "monotonic", lambda: next(clock))
    done = SimpleNamespace(returncode=1)
    monkeypatch.setattr(remeasure.subprocess, "run", lambda words, **_: ran.append(words) or done)
    assert remeasure.main([*map(str, files), "--to", str(tmp_path), "--seconds", "9"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ranks-h200.json: FAILED after 1 s",
        "http-demo-h100.json: FAILED after 1 s",
        "not measured: ranks-h200.json, http-demo-h100.json, step-trees-llama-3.2-1b-h200.json",
    ]
    module = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "tools/check_ranks.py"]
    assert ran[0] == [sys.executable, *module, "--output", str(tmp_path / "ranks-h200.json")]
    assert ran[1][:2] == [sys.executable, "tools/time_server.py"]


def test_a_checkout_is_asked_for(tmp_path, capsys):
    path = ROOT / "results" / "step-llama-3.1-8b-h200-bfd4ab9.json"
    assert "name a clone of it by --upstream" in refuse(f"remeasure.py {path} --to {tmp_path} --list", capsys)
    assert remeasure.main([str(path), "--to", str(tmp_path), "--list", "--upstream", str(tmp_path)]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[words.index("--upstream") + 1] == str(tmp_path)
    assert words[words.index("--plot") + 1] == str(tmp_path / f"{path.stem}.png")
