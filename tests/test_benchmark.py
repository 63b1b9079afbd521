"""benchmark.py on a CPU: every mode on a tiny shape, what it writes, the parity check, and bad arguments."""

import contextlib
import csv
import functools
import io
import itertools
import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
import transformers

from eagle_triton import EaModel, optimize_with_triton
from eagle_triton.benchmarks import (
    batches,
    drafters,
    egag,
    generate,
    models,
    mtp,
    operations,
    prefill,
    serve,
    step,
    timing,
)
from eagle_triton.benchmarks import main as benchmark
from eagle_triton.benchmarks.acceptance import fix_acceptance, launch_scheduled_path, scheduled_path
from eagle_triton.benchmarks.cases.case import Case, Provider
from eagle_triton.benchmarks.gpu_clocks import FIGURES
from eagle_triton.benchmarks.modes import BLOCK_SIZE, SHAPES
from eagle_triton.benchmarks.original_and_patched import Run, accepted_histogram
from eagle_triton.benchmarks.parity import check_parity
from eagle_triton.benchmarks.plot import plot
from eagle_triton.benchmarks.quantised import TARGETS, in_nf4, round_target
from eagle_triton.benchmarks.record import Record, histogram_table
from eagle_triton.command_line import PLOTS, stored_positions
from eagle_triton.comparison.answer import Answer, Step
from eagle_triton.engine.operations import Operations, make_operations
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.families import own_ea_model as native
from eagle_triton.families.reading.quantised import with_quantised
from eagle_triton.models import shapes
from eagle_triton.models.target import language_model
from eagle_triton.reference import verification
from tests.forked import start_program
from tests.programs import recorded, refused
from tests.tiny import SIZES, random_prompt, tiny_model

TINY = ["--shape", "tiny", "--device", "cpu", "--num-runs", "1"]
MODES = {
    "generate": ["generate", *TINY, "--max-length", "6"],
    "step": ["step", *TINY, "--context", "20", "--batch", "1,2"],
    "batches": ["batches", *TINY, "--context", "9", "--batch", "1,2", "--max-length", "6"],
    "operations": ["operations", "--device", "cpu"],
    "drafters": [
        *("drafters", "--device", "cpu", "--num-runs", "1", "--max-length", "4"),
        *("--block-drafter", "demo-block-causal"),
    ],
    "questions": ["questions", "--category", "docstring", "--drafters", "head", "--max-length", "8", "--device", "cpu"],
    "egag": ["egag", *TINY, "--max-length", "2"],
    "prefill": ["prefill", *TINY, "--context", "9,70", "--batch", "2"],
    "plain": ["plain", *TINY, "--max-length", "6", "--context", "9"],
    "serve": [
        *("serve", "--shape", "tiny", "--device", "cpu", "--max-concurrency", "2", "--request-rate", "40"),
        *("--max-num-seqs", "2"),
        *("--num-prompts", "4", "--input-len", "5-9", "--output-len", "6", "--goodput", "ttft:1e6", "e2el:0"),
        *("--api-key", "secret", "--no-speculation"),
    ],
    "mtp": ["mtp", "--hybrid", "demo-gdn", "--tree", "chain-4", "--max-length", "8", "--num-runs", "1"],
}
FEW = {"generate": ["--max-length", "20"], "step": ["--context", "20", "--batch", "2"]}
SERVE = 'pip install ".[benchmark,serve]"'
FACTS = {"device", "driver", "torch", "triton", "transformers", "python", "commit", "date"}


class Written(NamedTuple):
    """What a run of a mode printed, its record, and its files."""

    printed: str
    record: dict
    csv: list[dict]
    folder: Path


FEWER = [(step, "WARM_UPS", 1), (prefill, "WARM_UPS", 1), (egag, "FIXED", (1, egag.MAX_DRAFTS))]
FEWER += [(module, "CHECKED", 3) for module in (step, prefill, batches)]


def run_code(argv):
    """As `python -c`."""
    sys.argv = ["-c", *argv[1:]]
    exec(argv[0], {"__name__": "__main__"})


@contextlib.contextmanager
def forked(command, **_):
    """As subprocess.Popen, of code that a forked process runs, which has imported most."""
    assert command[:2] == [sys.executable, "-c"]
    process = start_program(run_code, *command[2:])
    process.terminate = functools.partial(process.send_signal, signal.SIGTERM)
    try:
        yield process
    finally:
        process.kill()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """`ran(mode)`: a run of a mode as MODES has it, once for all tests, and of fewer steps."""

    @functools.cache
    def run(mode):
        if mode == "serve":
            pytest.importorskip("uvicorn", reason=SERVE)
        folder, printed = tmp_path_factory.mktemp(mode), io.StringIO()
        files = {option: folder / f"out.{option}" for option in ("json", "csv", "png")}
        options = ["--output", files["json"], "--csv", files["csv"], "--plot", files["png"]]
        options += ["--result-dir", folder / "vllm"] if mode == "serve" else []
        with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
            for module, name, value in FEWER:
                patch.setattr(module, name, value)
            if mode == "serve":
                patch.setattr(serve, "subprocess", SimpleNamespace(Popen=forked, PIPE=None))
            assert benchmark.main([*MODES[mode], *map(str, options)]) == 0
        with open(files["csv"], newline="") as file:
            lines = list(csv.DictReader(file))
        return Written(printed.getvalue(), json.loads(files["json"].read_text()), lines, folder)

    return run


@pytest.mark.parametrize("mode", MODES)
def test_what_a_run_writes(mode, ran):
    printed, record, lines, folder = ran(mode)
    assert record["mode"] == mode and record["machine"].keys() >= FACTS and record["machine"]["torch"]
    assert all(note in printed for note in record["notes"])
    assert len(lines) == len(record["rows"]) and lines[0].keys() >= FACTS | record["rows"][0].keys()
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")


def test_generate_compares_the_same_tokens(ran):
    record = ran("generate").record
    original, optimised = record["rows"]
    assert (original["variant"], optimised["variant"]) == ("original", "optimised")
    assert original["tau"] == optimised["tau"] and original["accepted"] == optimised["accepted"]
    for row in record["rows"]:
        assert row["tokens_per_second"] > 0 and row["first_token_ms"] > row["ms_per_step"] / 10
    assert "same tokens, original and optimised: 1 of 1 prompts" in record["notes"]
    assert record["notes"][-1].startswith("NOISE: figures from ")
    assert record["options"]["shape"] == "tiny" and record["options"]["dtype"] == "float32"


def test_generate_drafts_by_fp8_copies(capsys):
    short = ["--context", "9", "--num-runs", "1", "--max-length", "12", "--draft-weights", "fp8"]
    record = recorded(capsys, "generate", *TINY, *short)
    assert "same tokens, original and optimised: 1 of 1 prompts" in record["notes"]
    assert record["options"]["draft_weights"] == "fp8" and record["rows"][1]["tau"] >= 1


def test_prefill_measures_first_tokens_gaps_and_short_requests(ran):
    rows = ran("prefill").record["rows"]
    cases = [(row["variant"], row["batch"], row["context"]) for row in rows]
    both = [(variant, 2, context) for context in (9, 70) for variant in ("first token", "generate")]
    assert cases[:6] == [*both, ("enter", 2, 9), ("enter", 2, 70)]
    short, mixed = rows[6:]
    assert (short["variant"], mixed["variant"]) == ("short requests", "mixed lengths")
    assert short["requests_per_second"] > 0 and all(0 < row["ms_p20"] <= row["ms"] <= row["ms_p80"] for row in rows[:6])
    for row, found in zip(rows[:4:2], (0, 64), strict=True):
        assert min(row["rested_ms"], row["again_ms"]) > 0 and row["found_tokens"] == found
    assert mixed["finished"] == 6 and 0 < mixed["tokens_held"] * mixed["token_bytes"] < mixed["bytes_held"]
    assert mixed["bytes_held"] <= mixed["cache_bytes"]
    for row in rows[4:6]:
        assert row["step_ms"] > 0 and 0 < row["gap_p50_ms"] <= row["gap_p99_ms"] <= row["longest_gap_ms"]


def test_step_measures_every_decoding_context_and_batch(ran):
    record = ran("step").record
    rows = record["rows"]
    cases = [(row["decoding"], row["batch"], row["context"]) for row in rows if row["variant"] == "optimised"]
    assert cases == list(itertools.product(("greedy", "sampled", "plain"), (1, 2), (20,)))
    floors = {row["decoding"]: row["floor_ms"] for row in rows}
    assert floors["greedy"] == floors["sampled"] > floors["plain"] > 0
    assert all(row["ms_slowest"] >= row["ms_p80"] and row["ms_behind_prompts"] > 0 for row in rows[: len(cases)])
    assert all(row[name] is None for row in rows[: len(cases)] for name in FIGURES)  # a CPU has no such clocks
    assert not any("clocks" in note for note in record["notes"])


FAMILIES = ("qwen3-30b-a3b", "gpt-oss-20b", "gemma3-12b")
SMALL = SIZES | dict(num_hidden_layers=7, vocab_size=512, draft_vocab_size=128, head_dim=16, sliding_window=8)
SMALL |= dict(query_pre_attn_scalar=16, num_experts=8, num_local_experts=8, num_experts_per_tok=2)
SMALL |= dict(moe_intermediate_size=32)


def make_small(shape, monkeypatch):
    """Give a shape few and small layers of its own kind."""
    row = shapes.SHAPES[shape]
    kept = {name: size for name, size in SMALL.items() if name in row or name in ("head_dim", "draft_vocab_size")}
    monkeypatch.setitem(shapes.SHAPES, shape, {**row, **kept})


@pytest.mark.parametrize("shape", FAMILIES)
def test_steps_and_generate_of_a_family(shape, monkeypatch, capsys):
    make_small(shape, monkeypatch)
    model = shapes.random_model(shape, dtype=torch.bfloat16)
    drawn = {name: weight for name, weight in model.base_model.named_parameters() if weight.numel() >= 64}
    assert all(weight.dtype == torch.bfloat16 for weight in drawn.values())
    assert all(0.01 < float(w.detach().float().std()) < 0.03 for name, w in drawn.items() if "norm" not in name)
    few = ["--shape", shape, "--device", "cpu", "--context", "20", "--num-runs", "1"]
    plain, chain, original = recorded(capsys, "step", *few, "--decoding", "plain", "chain-3")["rows"]
    assert (plain["variant"], chain["decoding"], original["variant"]) == ("optimised", "chain-3", "original")
    assert chain["floor_ms"] > plain["floor_ms"] == original["floor_ms"] > 0
    rows = recorded(capsys, "plain", *few, "--max-length", "4")["rows"]
    assert {row["same_tokens"] for row in rows} == {4}


def test_the_floor_of_a_mixture_is_of_the_experts_that_its_rows_choose(monkeypatch):
    make_small("mixtral-8x7b", monkeypatch)
    model = shapes.random_model("mixtral-8x7b")
    engine = models.engine_of(model, model.ea_layer)
    view, draft = engine.view, engine.draft
    sizes = {name: weight.nbytes for name, weight in model.base_model.named_parameters() if "embed" not in name}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    for batch, spec, unread in ((1, PLAIN, 0.75), (2, PLAIN, 0.75**2), (2, TreeSpec.chain(3), 0.75**8)):
        floor = models.weight_bytes(view, draft, spec, batch) - draft.weight_bytes(spec)
        assert floor == pytest.approx(sum(sizes.values()) - unread * experts)


def test_steps_of_random_block_drafters(capsys):
    names = ["dflash-chain", "dflash-tree-64", "plain"]
    few = ["step", *TINY, "--context", "20", "--batch", "2", "--decoding", *names]
    for assumed, tau in (([], 1), (["--accept-length", "5.35"], 6.35)):
        rows = recorded(capsys, *few, *assumed)["rows"][:3]
        assert [row["decoding"] for row in rows] == names
        assert [row["tau"] for row in rows] == [*[pytest.approx(tau, abs=0.3)] * 2, 1]
        assert rows[0]["floor_ms"] == rows[1]["floor_ms"] > rows[2]["floor_ms"]
        assert rows[0]["draft_ms"] > 0 < rows[1]["draft_ms"] and rows[2]["draft_ms"] is None


def test_a_random_block_drafter_has_the_published_size():
    model = shapes.random_model("qwen3-8b", device="meta").base_model
    drafter = shapes.random_block_drafter(model)
    assert round(sum(weight.numel() for weight in drafter.parameters()) / 1e6) == 1049
    assert drafter.config.feature_layers == (2, 10, 18, 26, 34) and drafter.total_token == 16


def test_step_times_batches_of_which_few_places_are_taken(capsys):
    few = ["step", *TINY, "--context", "9", "--batch", "1", "--decoding", "plain"]
    *rows, original = recorded(capsys, *few, "--slots", "1,3")["rows"]
    assert [(row["batch"], row["slots"]) for row in rows] == [(1, 1), (1, 3)] and original["variant"] == "original"


@pytest.mark.parametrize(
    ("mode", "target", "draft"),
    [("prefill", "fp8", "fp8"), ("step", "int4", "int4"), ("step", "nf4", "fp8")],
)
def test_weights_of_target_and_draft_may_be_quantised(mode, target, draft, capsys):
    given = [mode, *TINY, "--context", "9", "--batch", "1", "--target-weights", target, "--draft-weights", draft]
    given += ["--decoding", "chain-3"] if mode == "step" else []
    record = recorded(capsys, *given)
    notes = "\n".join(record["notes"])
    kind = {"fp8": "FP8 projections", "int4": "projections of four bits", "nf4": "projections of four bits"}[target]
    assert f"{kind} are read by their weights" in notes and f"{draft}: 9 projections of the draft are copies" in notes
    assert record["options"]["target_weights"] == target and record["options"]["draft_weights"] == draft
    if mode == "step":
        assert {row["variant"] for row in record["rows"]} == {"optimised"}  # the original's would say nothing


@pytest.mark.parametrize("kind", TARGETS)
def test_quantised_weights_are_a_floor_of_their_own_bytes(kind):
    model = shapes.random_model("tiny")
    whole, matrices = native.read(model)[0].weight_bytes, 0
    for name, module in model.base_model.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            rows, depth = module.weight.shape
            bits = {"fp8": 8 * rows * depth + 32 * -(-rows // 128) * -(-depth // 128)}
            group = 128 if depth % 128 == 0 else 64
            bits["int4"] = rows * depth * 4 + 32 * rows * depth // group
            bits["nf4"] = rows * depth * 4 + 8 * rows * depth // 64 + 32 * -(-rows * depth // 64 // 256)
            bits["nf4"] += 32 * (16 + 256 + 1)
            matrices += module.weight.nbytes
            whole += bits[kind] // 8
    round_target(model.base_model, kind)
    view = with_quantised(*native.read(model), {"model": model}).view
    assert view.weight_bytes == whole - matrices


@pytest.mark.parametrize("kind", TARGETS)
def test_a_target_of_the_engine_has_the_tokens_of_its_quantised_modules(kind):
    """The modules are called first, then read."""
    model = shapes.random_model("tiny")
    round_target(model.base_model, kind)
    prompt = torch.randint(0, 50, (1, 9))
    expected = model.base_model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    with optimize_with_triton(model.base_model) as (target, originals):
        assert torch.equal(target.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0), expected)
        assert originals.report()


def test_nf4_is_the_nearest_number_of_its_table():
    weight = torch.randn(6, 128)
    four = in_nf4(weight)
    largest = weight.view(-1, 64).abs().amax(1)
    assert torch.allclose(four.scales().view(-1), largest, atol=0.01)
    table = four.table
    assert table[7] == 0 and table[0] == -1 and table[15] == 1 and abs(table[8] - 0.0795803) < 1e-6
    off = (weight.view(-1, 64) / largest[:, None] - table[four.numbers().long()].view(-1, 64)).abs()
    assert off.max() <= (table[1:] - table[:-1]).max() / 2 + 1e-6


def test_step_measures_the_trees_that_are_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(step.BETWEEN, "cpu", 8)  # until the grammar forces tokens
    given = ["step", *TINY, "--context", "20", "--decoding", "chain-3", "tree-256", "plain", "grammar", "chain-3"]
    record = recorded(capsys, *given, "--plot", tmp_path / "steps.png")
    cases = [(row["variant"], row["decoding"]) for row in record["rows"]]
    names = ("chain-3", "tree-256", "plain", "grammar")
    assert cases == [*(("optimised", name) for name in names), ("original", "plain")]
    assert record["rows"][3]["tau"] > 1, "the grammar's keys are forced"
    assert "original: timed only for greedy, sampled, plain, with the head's own tree" in record["notes"]
    assert benchmark._parse(["step"])[1].decoding == ["greedy", "sampled", "plain"]


@pytest.mark.parametrize(
    ("device", "given", "batch", "new", "runs"),
    [
        ("cpu", [], [1, 4], 32, 1),
        ("cuda", [], [1, 2, 4, 8, 16, 32], 100, 5),
        ("cpu", ["--num-runs", "3"], [1, 4], 32, 3),
    ],
)
def test_batches_is_small_on_a_cpu(device, given, batch, new, runs):
    _, args = benchmark._parse(["batches", *given])
    args.device = device
    benchmark._settle(args)
    assert (args.batch, args.max_length, args.num_runs) == (batch, new, runs)


def test_batches_compares_with_plain_decoding_in_the_same_run(ran):
    record = ran("batches").record
    assert record["options"]["accept_length"] == 3 and "THE TOKENS ARE MEANINGLESS" in record["notes"][0]
    trees = [row for row in record["rows"] if row["variant"] == "tree"]
    assert {(row["batch"], row["nodes"]) for row in trees} == {(b, n) for b in (1, 2) for n in (1, 2, 4, 8, 16, 32, 64)}
    rows = [row for row in record["rows"] if row not in trees]
    assert [(row["variant"], row["batch"]) for row in rows] == [
        ("plain", 1), ("auto", 1), ("plain", 2), ("auto", 2)
    ]  # fmt: skip
    for plain, auto in zip(rows[::2], rows[1::2], strict=True):
        assert plain["tau"] == 1 and plain["nodes"] == 1 and auto["speedup"] > 0
        assert auto["speedup"] == auto["tokens_per_second"] / plain["tokens_per_second"]


def test_operations_on_a_cpu_says_what_it_is_worth(ran):
    printed = ran("operations").printed
    assert "ON A CPU: REFERENCES ON SMALL TENSORS" in printed and "was not timed" not in printed
    assert "products, 64 rows, sum" in printed


@pytest.mark.parametrize("mode", ["generate", "step"])
def test_accept_length_is_met_and_said_loudly(mode, capsys):
    record = recorded(capsys, *MODES[mode], *FEW[mode], "--accept-length", "1.5")
    assert "THE TOKENS ARE MEANINGLESS" in record["notes"][0]
    assert not any(note.startswith("same tokens") for note in record["notes"])
    for row in record["rows"]:
        assert row["tau"] == (1 if row.get("decoding") == "plain" else pytest.approx(2.5, abs=0.35))


@pytest.mark.parametrize("find", [scheduled_path, launch_scheduled_path])
def test_a_scheduled_path_is_the_first_of_the_deepest(find):
    device = "cuda" if find is launch_scheduled_path and torch.cuda.is_available() else "cpu"
    parents = torch.tensor([[-1, 0, 0, 1, 3, 3], [-1, 0, 1, 2, 0, 4]], dtype=torch.int32, device=device)
    step = torch.tensor([1, 0], device=device)
    path, accepted = find(parents, 4, step, 2.5)
    assert path.tolist() == [[0, 1, 3, 4, -1], [0, 1, 2, -1, -1]] and accepted.tolist() == [3, 2]
    path, accepted = find(parents, 4, step, 9.0)
    assert path.tolist() == [[0, 1, 3, 4, -1], [0, 1, 2, 3, -1]] and accepted.tolist() == [3, 3]
    assert path.dtype == accepted.dtype == torch.int32 and step.tolist() == [3, 2]


def test_fixed_acceptance_keeps_its_mean():
    operations = fix_acceptance(make_operations(), 1.25)
    parents = torch.arange(-1, 4, dtype=torch.int32)[None].repeat(2, 1)
    logits, tokens = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.int64)
    accepted = torch.stack([operations.verify_greedy(logits, tokens, parents, 4)[1] for _ in range(8)])
    assert accepted.sum(0).tolist() == [10, 10] and set(accepted.flatten().tolist()) == {1, 2}


def test_a_provider_that_differs_is_not_timed():
    def numbers(generator):
        return (torch.randn(4, 4, generator=generator),)

    providers = [
        Provider("right", torch.abs),
        Provider("zeros", torch.zeros_like),
        Provider("nan", lambda x: x * float("nan")),
        Provider("broken", torch.linalg.inv_ex, ours=True),
        Provider("raises", lambda x: x @ x[:3]),
    ]
    rows, notes = operations.measure_case(Case("group", "case", numbers, torch.abs, providers, 64), torch.device("cpu"))
    assert [row["provider"] for row in rows] == ["right"]
    told = ["case: zeros", "case: nan", "FAIL: case: broken", "case: raises"]
    assert [note.partition(" was")[0] for note in notes] == told


def test_targets_belong_to_the_last_of_our_providers():
    times = {name: timing.Quantiles(us, us, us) for name, us in (("torch", 10.0), ("ours", 9.0), ("keep_splits", 8.0))}
    providers = [Provider("torch", abs), Provider("ours", abs, ours=True), Provider("keep_splits", abs, ours=True)]
    case = Case("group", "case", tuple, abs, providers, 8000, target_us=8.5, least_speedup=1.5)
    rows = [operations._row(case, provider, times, providers) for provider in providers]
    assert [row["speedup"] for row in rows] == [None, pytest.approx(10 / 9), 1.25]
    assert [row["target_met"] for row in rows] == [None, None, False] and rows[2]["gb_per_second"] == 1.0


def test_histogram():
    runs = [Run(3, list(range(9)), [4, 7, 9], [0.1, 0.2, 0.3]), Run(2, list(range(4)), [4], [0.1])]
    assert accepted_histogram(runs) == {0: 1, 1: 2, 2: 1}


def test_upstream_that_does_not_import_says_what_it_needs(tmp_path, capsys):
    model = tmp_path / "eagle" / "model"
    model.mkdir(parents=True)
    (model / "ea_model.py").write_text("raise ImportError('no LossKwargs')")
    assert "transformers 4.53.x" in refused(capsys, benchmark.main, "--shape", "tiny", "--upstream", tmp_path)


def test_positions_are_those_of_the_shapes_and_the_demo():
    assert set(SHAPES) == set(shapes.SHAPES) and shapes.BLOCK_SIZE == BLOCK_SIZE
    assert SHAPES["tiny"] == shapes.random_model("tiny").config.max_position_embeddings
    published = {"llama-3.2-3b": 3.21, "llama-3.1-8b": 8.03, "llama-3.3-70b": 70.55, "qwen3-0.6b": 0.60}
    published |= {"qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-32b": 32.76, "qwen3-30b-a3b": 30.53, "mixtral-8x7b": 46.70}
    published |= {"gpt-oss-20b": 20.91, "gemma3-12b": 11.77, "phi4-mini": 3.84, "glm-4.7-flash": 29.94}
    if hasattr(transformers, "MuseGlimmerConfig"):
        published["muse-glimmer-30b"] = 27.85
    for shape, billions in published.items():
        base = shapes.random_model(shape, device="meta").base_model
        # as published: these keep one matrix for both
        tied = shape in ("llama-3.2-3b", "qwen3-0.6b", "qwen3-4b", "gemma3-12b", "phi4-mini")
        count = sum(weight.numel() for weight in language_model(base).parameters())
        count += (not tied) * base.lm_head.weight.numel()
        assert round(count / 1e9, 2) == billions
    assert stored_positions("demo") == EaModel.from_pretrained("demo").config.max_position_embeddings == 2048


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}},
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64},
    ],
    ids=["transformers 5", "transformers 4"],
)
def test_stored_positions_are_those_of_the_short_factors(tmp_path, fields):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 256, **fields}))
    assert stored_positions(str(tmp_path)) == 64


def some_rows(error=None):
    """A measurement that is done at once, perhaps up to an error."""

    def measure(args, rows, notes):
        rows.append({"provider": "one", "case": "first", "group": "g", "us_median": 1.0, "ours": True})
        if error:
            raise error

    return measure


@pytest.mark.parametrize("option", ["--output", "--csv", "--plot"])
def test_a_file_that_cannot_be_written_after_all_costs_no_figure(option, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "gone"
    folder.mkdir()
    others = {"--output": "a.json", "--csv": "a.csv", "--plot": "a.png"}
    others.pop(option)

    def measure(args, rows, notes):
        some_rows()(args, rows, notes)
        folder.rmdir()

    monkeypatch.setattr(operations, "measure", measure)
    monkeypatch.setattr(operations, "text", lambda rows: f"the table of {len(rows)} rows")
    kept = [word for name, file in others.items() for word in (name, str(tmp_path / file))]
    assert benchmark.main(["operations", "--device", "cpu", option, str(folder / "x.png"), *kept]) == 1
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert "the table of 1 rows" in printed.out and line.startswith(f"benchmark.py operations: {option} ")
    assert "was not written: " in line
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others.values())


@pytest.mark.parametrize(
    ("error", "told", "code"),
    [
        (ValueError("parity: no"), "STOPPED, FIGURES ARE MISSING: parity: no", 1),
        (torch.OutOfMemoryError("full"), "STOPPED, FIGURES ARE MISSING: full", 1),
        (KeyError("a bug"), "STOPPED, FIGURES ARE MISSING: 'a bug'", None),
        (KeyboardInterrupt(), "INTERRUPTED, FIGURES ARE MISSING", 130),
    ],
    ids=["refused", "memory", "bug", "interrupt"],
)
def test_what_was_measured_before_a_failure_is_kept(error, told, code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(operations, "measure", some_rows(error))
    monkeypatch.setattr(operations, "text", lambda rows: f"the table of {len(rows)} rows")
    file = tmp_path / "kept.json"
    with pytest.raises(KeyError) if code is None else contextlib.nullcontext():
        assert benchmark.main(["operations", "--device", "cpu", "--output", str(file)]) == code
    assert "the table of 1 rows" in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert len(record["rows"]) == 1 and record["notes"][0] == f"FAIL: {told}"


@pytest.mark.parametrize("error", [ValueError, KeyError, KeyboardInterrupt])
def test_a_run_without_figures_leaves_the_files_of_an_earlier_one(error, tmp_path, monkeypatch, capsys):
    def measure(args, rows, notes):
        raise error("early")

    monkeypatch.setattr(operations, "measure", measure)
    file = tmp_path / "kept.json"
    file.write_text("figures")
    with pytest.raises(SystemExit if error is ValueError else error):
        benchmark.main(["operations", "--device", "cpu", "--output", str(file)])
    assert file.read_text() == "figures" and not capsys.readouterr().out


def test_an_interrupted_generate_keeps_the_original(monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "optimize_eagle_with_triton", interrupt)
    record = recorded(capsys, *MODES["generate"], code=130)
    assert [row["variant"] for row in record["rows"]] == ["original"] and "INTERRUPTED" in record["notes"][0]


@pytest.mark.parametrize(("steps", "said"), [(timing.MIN_STEPS - 1, 1), (timing.MIN_STEPS, 0)])
def test_few_steps_are_called_noise(steps, said):
    assert len(timing.noise(steps, "more")) == said


def test_accepted_lengths_are_columns():
    lines = histogram_table({"one": {0: 3, 2: 1}, "other": {1: 12}}).splitlines()
    assert [line.split() for line in lines[1:]] == [["one", "3", "0", "1", "4"], ["other", "0", "12", "0", "12"]]
    assert lines[0].split()[-4:] == ["0", "1", "2", "steps"] and len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("suffix", PLOTS)
def test_pictures_of_every_kind(suffix, tmp_path, recwarn):
    rows = [{"case": "one", "us_median": 1.0, "ours": ours} for ours in (True, False)]
    machine = dict.fromkeys(FACTS, "x")
    plot(Record("operations", machine, {}, rows, []), tmp_path / f"picture{suffix}")
    assert (tmp_path / f"picture{suffix}").stat().st_size > 1000 and not recwarn.list


def wrong_greedy(logits, tokens, parents, depth, *, nan=None):
    """The second best token of each node as if it were the best."""
    best = logits.argmax(-1, keepdim=True)
    return verification.verify_greedy(logits.scatter(2, best, float("-inf")), tokens, parents, depth, nan=nan)


@pytest.mark.parametrize("mode", ["step", "batches"])
def test_what_decodes_wrongly_is_not_timed(mode, monkeypatch, capsys):
    monkeypatch.setattr(Operations, "verify_greedy", staticmethod(wrong_greedy))
    message = refused(capsys, benchmark.main, *MODES[mode])
    assert "is not the target's" in message and "nothing is timed" in message


def test_parity_of_a_mixture_in_16_bits_excuses_what_its_own_rounding_does(monkeypatch):
    make_small("mixtral-8x7b", monkeypatch)
    model = shapes.random_model("mixtral-8x7b", dtype=torch.bfloat16, std=0.2).base_model
    prompt = random_prompt(9)[0]
    with torch.no_grad():
        sequence = prompt
        for _ in range(9):
            sequence = torch.cat((sequence, model(sequence[None]).logits[0, -1:].argmax(-1)))
        check_parity(model, sequence, 9, SamplingParams())
        sequence[9:] = model(sequence[None]).logits[0, 8:-1].topk(40).indices[:, -1]
    with pytest.raises(ValueError, match="token . after the prompt is not the target's"):
        check_parity(model, sequence, 9, SamplingParams())
    assert not model.get_input_embeddings()._forward_hooks


def test_parity_of_sampled_tokens_is_the_nucleus():
    model = tiny_model(layers=5).base_model
    prompt, sampling = random_prompt(9)[0], SamplingParams(temperature=0.5, top_p=0.6)
    with torch.no_grad():
        probs = (model(prompt[None]).logits[0, -1] / 0.5).softmax(-1)
    order = probs.argsort(descending=True)
    check_parity(model, torch.cat((prompt, order[:1])), 9, sampling)
    with pytest.raises(ValueError, match="outside the nucleus"):
        check_parity(model, torch.cat((prompt, order[-1:])), 9, sampling)
    with pytest.raises(ValueError, match="no token was generated"):
        check_parity(model, prompt, 9, sampling)


def test_the_help_of_a_mode_has_its_own_defaults(capsys):
    for mode, absent, present in (("questions", "100", "128 tokens a turn"), ("generate", "128", "(default: 100)")):
        with pytest.raises(SystemExit):
            benchmark.main([mode, "--help"])
        told = " ".join(capsys.readouterr().out.split())
        assert f"default: {absent}" not in told and present in told


def test_a_load_is_measured_by_the_names_that_vllm_has(ran):
    _, record, _, folder = ran("serve")
    assert [row["variant"] for row in record["rows"]] == ["40 a second", "2 clients"] and "secret" not in str(record)
    for row, file in zip(record["rows"], sorted((folder / "vllm").iterdir()), strict=True):
        assert (row["completed"], row["failed"], row["total_output_tokens"]) == (4, 0, 24)
        assert 20 <= row["total_input_tokens"] <= 36 and row["request_goodput"] == 0
        assert 0 < row["median_ttft_ms"] < row["median_e2el_ms"] <= row["p99_e2el_ms"] < row["duration"] * 1e3
        assert 0 < row["median_tpot_ms"] <= row["p99_tpot_ms"] and row["std_itl_ms"] >= 0
        kept = json.loads(file.read_text())
        assert kept["output_lens"] == [6] * 4 and kept["errors"] == [""] * 4 and len(kept["itls"][0]) == 5
        assert kept["mean_ttft_ms"] == row["mean_ttft_ms"] == pytest.approx(1e3 * sum(kept["ttfts"]) / 4)
        assert sum(kept["input_lens"]) == row["total_input_tokens"] and kept["endpoint_type"] == "openai"


def test_drafters_of_the_demo_have_a_block_drafter(ran):
    rows = {(row["work"], row["variant"]): row for row in ran("drafters").record["rows"]}
    assert all(rows["prose", variant]["passes"] == 1 for variant in ("block", "block_tree"))
    assert rows["prose", "block_tree"]["tau"] > 1.5


def test_a_variant_that_cannot_run_is_left_out_alone(monkeypatch):
    """Also one whose answers ended before a step. Nothing is left to compare with if it is the first."""
    stepped, ended = ([Answer("", (0, 0), "", (Step((0,)),) * steps, 2.0, 1.0)] for steps in (2, 1))
    outcomes = {"plain": stepped, "head": ValueError("no head"), "ngram": ended, "suffix": stepped}

    def decode(inference, rows, prompts, new, run, warm):
        outcome = outcomes[run.args[0]]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(drafters, "decode", decode)
    _, args = benchmark._parse(["drafters", "--max-length", "2"])
    variants = dict.fromkeys(["plain", "head", "ngram", "suffix"], lambda: SimpleNamespace(pair=MagicMock()))
    notes: list[str] = []
    *_, found = drafters.compare(variants, {"prose": [[1]]}, args, notes)
    rows = drafters.figures("prose", found["prose"])
    assert [row["variant"] for row in rows] == ["plain", "suffix"]
    assert notes == [
        "FAIL: head is left out: no head",
        "FAIL: ngram is left out: prose: no answer took a step, each ended with its first token",
    ]
    warm = [row | {"work": "warm"} for row in rows]
    assert drafters._judge(rows + warm) == ["warm: suffix 1.00 x its tokens per step on prose"]
    assert egag._judge([row | {"variant": name} for row in rows for name in ("plain", "2 drafts")]) == []
    with pytest.raises(ValueError, match="no head"):
        list(drafters.compare({"head": variants["head"]}, {"prose": [[1]]}, args, notes))


def test_a_row_of_drafters_fits_itself():
    """Also where prompts take so unequal times that their median is another than their mean."""

    def answer(steps, emitted, seconds):
        taken = [Step((0,)), *(Step((0,)) for _ in range(steps - 1)), Step((0,), emitted - steps, emitted)]
        return Answer("", (0,) * (emitted + 1), "", tuple(taken), seconds + 2.0, 2.0, drafter_forwards=2 * steps)

    found = {"plain": [answer(20, 20, 1.0), answer(9, 9, 0.3), answer(40, 40, 5.0)],
             "drafts": [answer(5, 20, 0.5), answer(3, 9, 0.4), answer(4, 40, 0.1)]}  # fmt: skip
    plain, drafts = drafters.figures("prose", found)
    for row in (plain, drafts):
        assert row["tokens_per_second"] == pytest.approx(row["tau"] / row["ms_per_step"] * 1e3)
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / plain["tokens_per_second"])
    assert drafts["tokens_per_second"] == pytest.approx(69.0) and drafts["steps"] == 12 and plain["tau"] == 1
    assert drafts["passes"] == 2


def test_bars_are_whole_and_places_in_a_draft_are_whole_numbers(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **options: figures.append(figure))
    row = dict(variant="suffix", temperature=0.0, category="all questions", tau=1.5, speedup=1.0)
    row |= dict(synthetic_acceptance_rates=[0.5] * 2)
    plot(Record("questions", dict.fromkeys(FACTS, "x"), {}, [row], []), tmp_path / "a.png")
    tau, _, places = figures[0].axes
    assert all(tick == int(tick) for tick in places.get_xticks())
    assert [bar.get_height() for bar in tau.patches] == [1.5] and tau.get_ylim()[0] == 0 and tau.get_ylim()[1] > 1.5


def test_trees_of_a_target_without_drafts_are_refused_before_it_is_made(monkeypatch, capsys):
    monkeypatch.setattr(mtp, "random_hybrid", lambda *_: pytest.fail("made"))
    arguments = ["mtp", "--hybrid", "nemotron-3-nano", "--tree", "chain-4", "--device", "cpu"]
    with pytest.raises(SystemExit):
        benchmark.main(arguments)
    assert "--tree must be plain with --hybrid nemotron-3-nano" in capsys.readouterr().err
