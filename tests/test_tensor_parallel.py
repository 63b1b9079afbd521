"""Targets that ranks share: two processes on a CPU, by gloo. What they do is in tests/tensor_parallel_script.py."""

import functools
import json
import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock
from urllib.request import Request, urlopen

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version

from eagle_triton import UnsupportedModelError, optimize_with_triton
from eagle_triton.benchmarks.serve import port_of
from eagle_triton.engine import step_cache
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.graph import wait_for_all
from eagle_triton.engine.memory.pages import CacheFullError, PagePool
from eagle_triton.engine.model.module_kinds import TENSOR_PARALLEL
from eagle_triton.engine.model.modules import SharedEmbedding
from eagle_triton.engine.operations import choose_operations
from eagle_triton.engine.ranks import Ranks, RanksError
from eagle_triton.engine.step import Mode
from eagle_triton.families import own_ea_model as native
from eagle_triton.inference import EAGLEInference
from eagle_triton.runtime import compile_ahead
from eagle_triton.runtime.split_sums import SplitSums
from tests.forked import FORKS, start_program
from tests.forked_ranks import SECONDS, Forks, run_started
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}

two_processes = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()) or Version(transformers.__version__) < Version("5.17"),
    reason="needs gloo, and transformers from 5.17 on, which spreads models as it does now",
)

needs_forks = pytest.mark.skipif(not FORKS, reason="ranks of a server are forked, and asked to end by signals")

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def serve_on_two_ranks(argv):
    """As torchrun does, but for ranks that are forked: its agent ends them when one has failed, or if asked to."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    where = dict(rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", run_id="test")
    elastic_launch(LaunchConfig(1, 1, 2, max_restarts=0, start_method="fork", **where), serve)(argv)


def serve(argv):
    from eagle_triton.serve.main import main

    sys.exit(main(argv))


def servers(*argv):
    """Two ranks that serve."""
    return start_program(serve_on_two_ranks, "--device", "cpu", *argv, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")


def ended_well(run, *command, ranks=2, **environment):
    """What some processes print, which must end well."""
    environment |= {"OMP_NUM_THREADS": "1"}
    if torch.cuda.device_count() < ranks:  # transformers would take one for each rank
        environment["CUDA_VISIBLE_DEVICES"] = ""
    status, out, errors = run(*command, ranks=ranks, **environment)
    assert status == 0, f"{out[-8000:]}\n{errors[-8000:]}"
    return out


@pytest.fixture(scope="module")
def forked():
    """Runs ranks as forks of one process, or starts them where forks do not go."""
    if not hasattr(os, "fork") or torch.cuda.is_available():
        yield functools.partial(run_started, PYTHONPATH=ENVIRONMENT["PYTHONPATH"])
        return
    forks = Forks(ENVIRONMENT | {"OMP_NUM_THREADS": "1"})
    yield forks.run
    forks.close()


@pytest.fixture
def torchrun(forked):
    """As a command of torchrun, though not started by it."""
    return functools.partial(ended_well, forked)


@pytest.mark.slow
@two_processes
def test_two_ranks_decode_as_one(torchrun, tmp_path):
    from tests.tensor_parallel_script import CASES

    shown = torchrun("tests/tensor_parallel_script.py", str(tmp_path)).splitlines()[-1]
    assert json.loads(shown) == [case.__name__ for case in CASES]


def needs_transformers(version, reason):
    return pytest.mark.skipif(Version(transformers.__version__) < Version(version), reason=reason)


@pytest.mark.slow
@two_processes
@pytest.mark.parametrize(
    ("script", "last"),
    [
        pytest.param(
            "shared_float8_script.py",
            "ranks share FP8 weights",
            marks=needs_transformers("5.23", "how FP8 scales are spread is known from 5.23 on"),
        ),
        pytest.param(
            "shared_families_script.py",
            "every family is shared as it is by one rank",
            marks=needs_transformers("5.24", "plans of the families are known from 5.24 on"),
        ),
        # whichever rank is late, for longer than within a step: before the first call, and every other kind of call
        ("late_rank_script.py", "one rank after the other was late"),
    ],
    ids=["fp8_weights", "every_family", "one_that_comes_late"],
)
def test_two_ranks_by_a_script(torchrun, script, last, tmp_path):
    assert torchrun(f"tests/{script}", str(tmp_path)).splitlines()[-1] == last


@two_processes
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux shows them")
def test_threads_of_collectives_end_before_python_does():
    """Else one of them may want Python's lock when there is none any more, which aborts the process."""
    started = functools.partial(run_started, PYTHONPATH=ENVIRONMENT["PYTHONPATH"])
    lines = ended_well(started, "tests/ending_rank_script.py").splitlines()
    assert len(lines) == 2
    for shown in lines:
        before, at_the_end = map(int, shown.split())
        assert before >= 4 and at_the_end == 0


@pytest.mark.slow
@two_processes
@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_decode_as_one(torchrun, ranks, tmp_path):
    shown = torchrun("tests/more_ranks_script.py", str(tmp_path), ranks=ranks).splitlines()[-1]
    assert shown == f"{ranks} ranks decode as one"


@pytest.mark.slow
@two_processes
def test_the_benchmark_of_a_step_is_printed_once(torchrun):
    options = ["--shape", "tiny", "--decoding", "plain", "--context", "16", "--num-runs", "1", "--json"]
    record = json.loads(torchrun("benchmark.py", "step", *options, "--device", "cpu", TORCHELASTIC_RUN_ID="test"))
    assert [row["variant"] for row in record["rows"]] == ["optimised", "original"]
    assert any(note.startswith("ranks: 2 ranks share the target") for note in record["notes"])


@pytest.mark.slow
@two_processes
def test_what_ranks_exchange_is_checked_by_a_command(torchrun, tmp_path):
    options = ["--device", "cpu", "--rows", "1,5", "--width", "256", "--replays", "3"]
    found = torchrun("tools/check_ranks.py", *options)
    assert json.loads(found)["notes"] == ["2 ranks, all on one cpu"]
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import os, sys\n"
        "os.environ['TRITON_INTERPRET'] = '0'  # by the references, of which one is broken here\n"
        "from eagle_triton.runtime.peer_memory import PeerMemory\n"
        "from tools import check_ranks\n"
        "exchanged = PeerMemory.exchanged\n"
        "PeerMemory.exchanged = lambda peers, part: exchanged(peers, part) * (1 + 2**-8 * peers.rank)\n"
        "PeerMemory.gave_up = lambda peers: False\n"
        "sys.exit(check_ranks.main(sys.argv[1:]))\n"
    )
    with pytest.raises(AssertionError) as failure:
        torchrun(str(broken), *options)
    for sentence in (
        "rank 1, 5 rows of torch.float32, 3 splits: other bits than after a gather",
        "rank 0, 1 rows of torch.bfloat16, 0 splits: other bits than on other ranks",
        "wrong numbers in 3 replays",
        "rank 0 has not noticed that others did not come",
    ):
        assert sentence in str(failure.value)


@pytest.mark.slow
@two_processes
def test_ranks_are_compared_with_one_process_by_a_command(torchrun, tmp_path):
    options = ["--device", "cpu", "--prompts", "1", "--new-tokens", "4", "--steps", "3", "--dtype", "float32"]
    tokens, reports = json.loads(torchrun("tools/decode_on_ranks.py", *options))["rows"]
    assert (tokens["compared"], tokens["differ"], reports["steps"], reports["differ"]) == (5, 0, 3, 0)
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import hashlib, os, sys\n"
        "from types import SimpleNamespace\n"
        "from eagle_triton import EaModel\n"
        "from tools import decode_on_ranks\n"
        "rank, load = int(os.environ['RANK']), EaModel.from_pretrained\n"
        "def other_alone(*args, **kwargs):\n"
        "    model = load(*args, **kwargs)\n"
        "    if rank and 'tp_plan' not in kwargs:\n"
        "        model.base_model.model.norm.weight.data.neg_()\n"
        "    return model\n"
        "EaModel.from_pretrained = other_alone\n"
        "decode_on_ranks.hashlib = SimpleNamespace(sha256=lambda: hashlib.sha256(bytes([rank])))\n"
        "sys.exit(decode_on_ranks.main(sys.argv[1:]))\n"
    )
    with pytest.raises(AssertionError) as failure:
        torchrun(str(broken), *options)
    for sentence in (
        "rank 1, tree, prompt 0: other tokens than alone",
        "rank 1, batch from prompt 0: other tokens than alone",
        "the ranks' reports are not the same after 3 steps",
    ):
        assert sentence in str(failure.value)
    assert "rank 0, " not in str(failure.value)


@pytest.mark.slow
@two_processes
@needs_forks
def test_rank_0_serves_what_all_share():
    pytest.importorskip("uvicorn", reason='pip install ".[serve,test]"')
    body = {"prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0}
    expected = EAGLEInference.from_pretrained("demo", device="cpu").generate(
        body["prompt"], body["max_tokens"], temperature=0.0
    )[1]
    both, log = servers("--port", "0", "--max-num-seqs", "1"), []
    try:
        url = f"http://127.0.0.1:{port_of(both, log)}/v1/completions"
        request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["text"] == expected.completions[0].text
        both.send_signal(signal.SIGTERM)
        both.wait()
    finally:
        both.kill()
    assert any("rank 1 of 2: rank 0 answers" in line for line in log)


@pytest.mark.slow
@two_processes
@needs_forks
def test_a_server_that_cannot_listen_ends_all_ranks():
    """Also those that wait for rank 0 to load, and not only when its agent kills them after 30 seconds."""
    pytest.importorskip("uvicorn", reason='pip install ".[serve,test]"')
    with socket.create_server(("127.0.0.1", 0)) as other:
        both, start = servers("--port", str(other.getsockname()[1])), time.monotonic()
        said = both.stderr.read()
    assert both.wait() and "cannot listen on" in said
    assert re.search(r"exitcode +: 2", said) and not re.search(r"exitcode +: -9", said), said
    assert time.monotonic() - start < SECONDS


@pytest.mark.slow
@two_processes
@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL and SIGSTOP")
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=two_gpus)])
@pytest.mark.parametrize(("how", "least", "most"), [("killed", 0, 6), ("stopped", 3, 12)])
def test_a_lost_rank_ends_the_other_with_an_error(forked, how, least, most, where, tmp_path):
    """`stopped`: it hangs, and the other waits as long as it was told to, four seconds."""
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} if where == "cpu" else {}
    command = ["tests/lost_rank_script.py", str(tmp_path), "{rank}", how, where]
    status, out, errors = forked(*command, until=0, **environment)
    assert status == 0, f"{out}\n{errors}"
    seconds, _, message = out.strip().splitlines()[-1].partition(" ")
    ended = where == "cuda" and how == "killed"  # no connection tells of it: its process does
    assert ("the processes of ranks [1] have ended" if ended else "another rank has gone or hangs") in message
    assert "end all ranks" in message
    assert least <= float(seconds) <= most


def test_a_plan_that_leaves_all_weights_whole_is_read_by_its_forwards():
    """Its all_reduce, for example, adds up what every rank has whole: the engine would give other tokens."""
    model = tiny_model(eagle3=False).base_model

    def forward(x):
        return x

    forward.__module__ = TENSOR_PARALLEL
    model.model.layers[1].mlp.forward = forward
    model.tp_plan = {"model.layers.*.mlp": "all_reduce"}
    with pytest.raises(
        UnsupportedModelError, match=r"model\.model\.layers\.0\.mlp is sharded .* LlamaMLP by 'all_reduce'"
    ):
        optimize_with_triton(model)


def test_a_plan_is_for_a_target_that_is_loaded_by_it():
    with pytest.raises(ValueError, match="tp_plan needs target_model as a path"):
        EAGLEInference(None, tiny_model(), tp_plan="auto")


class Alone(Ranks):
    """Two ranks of which the other's part is given."""

    def together(self, part):
        return torch.stack([part, self.host_group] if self.rank == 0 else [self.host_group, part])


@pytest.mark.parametrize("rank", [0, 1])
def test_parts_are_added_in_the_order_of_the_ranks(rank):
    parts = [torch.tensor([[1e8, 1.0, 3.0]]), torch.tensor([[-1e8, 2.0, 4.0]])]
    ranks = Alone(rank, 2, None, parts[1 - rank], None)
    mine = SplitSums(torch.stack([parts[rank] - 5, torch.full((1, 3), 5.0)]), torch.float32)
    found = ranks.summed(mine, torch.float32)
    assert torch.equal(found.sums, torch.stack(parts)) and torch.equal(found.total(), parts[0] + parts[1])
    assert ranks.summed(parts[rank].bfloat16(), torch.bfloat16).sums.dtype == torch.float32
    assert ranks.joined(parts[rank]).tolist() == [[1e8, 1.0, 3.0, -1e8, 2.0, 4.0]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shared_embedding_reads_what_the_whole_one_has(rank):
    table, tokens = torch.randn(10, 4), torch.tensor([[0, 4, 5], [9, 3, 6]])
    halves = table.split(5)
    other = SharedEmbedding(halves[1 - rank], Alone(1 - rank, 2, None, torch.zeros(2, 3, 4), None))
    shared = SharedEmbedding(halves[rank], Alone(rank, 2, None, other[tokens], None))
    assert torch.equal(shared[tokens], table[tokens])
    assert shared.shape == table.shape and shared.dtype == table.dtype and shared.device == table.device


def engine_of_two_ranks():
    view, draft = native.read(tiny_model())
    return Engine(
        replace(view, ranks=Alone(0, 2, None, None, None)), draft, choose_operations(view.device, False, False)[0]
    )


@pytest.mark.parametrize(("device", "kernels"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_on_gpus_norms_exchange_sums_and_the_report_says_how(device, kernels):
    class Opening(Alone):
        def open_memory(self, *asked):
            self.why_no_peers = f"rank 1: no peers, {asked[0]} wide on {asked[1]}"

    view, draft = native.read(tiny_model())
    elsewhere = SimpleNamespace(device=torch.device(device), shape=(32, 64), dtype=torch.float32)
    view = replace(view, embedding=elsewhere, ranks=Opening(0, 2, None, None, None))
    engine = Engine(view, draft, SimpleNamespace(kernels=kernels, calls=Counter(), add=None))
    asked = device == "cuda" and kernels
    note = "; NCCL gathers the ranks' parts, because symmetric memory failed: rank 1: no peers, 64 wide on cuda"
    assert engine.notes["ranks"].endswith(note) == asked
    assert not engine.ops.one_launch, "which may fail on one rank"


def test_what_fails_in_a_capture_is_not_done_in_another_way():
    """The others may have got further in what they exchange; a rank that runs alone may do as it likes."""
    engine = engine_of_two_ranks()

    def fails():
        raise torch.OutOfMemoryError("none left")

    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        engine.steps._captured((), fails, int, "cuda_graph", "a step")
    engine.view = replace(engine.view, ranks=None)
    assert engine.steps._captured((), fails, int, "cuda_graph", "a step") is int


def test_what_fails_in_a_compilation_ahead_ends_a_rank(monkeypatch):
    def fails(*_):
        raise RanksError("another rank has gone")

    monkeypatch.setattr(step_cache, "decode_step", fails)
    monkeypatch.setattr(compile_ahead, "can_compile_ahead", lambda _: True)
    engine = engine_of_two_ranks()
    engine.ops = SimpleNamespace(kernels=True, calls=Counter())
    state = MagicMock(unchanged=nullcontext)
    with pytest.raises(RanksError, match="has gone"):
        engine.steps.compile_ahead(state, Mode())
    engine.view = replace(engine.view, ranks=None)
    engine.steps.compile_ahead(state, Mode())
    assert "has gone" in engine.notes["compile_ahead"]


def test_a_pool_grows_where_all_have_memory():
    said = []

    def all_gather_object(value):
        said.append(value)
        return [value, "the other has none" if len(said) > 1 else None]

    pool = PagePool(all_gather_object=all_gather_object)
    pool.memory(pool, (1, 2, 1, 8), torch.float32, torch.device("cpu"))
    pages = pool.take(1)
    count = pool.pages
    with pytest.raises(CacheFullError, match="the other has none"):
        pool.take(count + 1)
    assert pool.pages == count and said == [None, None]
    assert pages and not pool.has_room(count + 1)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_wait_for_the_device_is_bounded(on_gpu, monkeypatch):
    class Event:
        recorded = 0

        def record(self):
            Event.recorded += 1

        def query(self):
            return False

    class Bounded(Alone):
        def wait_for(self, event, seconds=None):
            super().wait_for(event, 0.01)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    ranks = Bounded(0, 2, None, None, None)
    with pytest.raises(RanksError) if on_gpu else nullcontext():
        wait_for_all(torch.device("cuda" if on_gpu else "cpu"), ranks)
    assert Event.recorded == on_gpu


def test_the_wait_for_a_step_is_bounded():
    class Event:
        def __init__(self, queries):
            self.queries = queries

        def query(self):
            self.queries -= 1
            return self.queries < 0

    ranks = Alone(0, 2, None, None, None)
    ranks.wait_for(Event(3), 10)
    start = time.monotonic()
    with pytest.raises(RanksError, match=r"did not end in 0.05 s: another rank has gone or hangs"):
        ranks.wait_for(Event(10**9), 0.05)
    assert time.monotonic() - start < 5
