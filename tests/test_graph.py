"""The step as a CUDA graph: the same tokens as without, whatever came before it, and no growth of memory."""

import itertools
import threading

import pytest
import torch

from eagle_triton import EagleTritonConfig, EaModel, optimize_eagle_with_triton
from eagle_triton import attention as launchers
from eagle_triton.benchmarks.original_and_patched import compare, decode, top2_margin
from eagle_triton.demo import demo_prompts
from eagle_triton.engine import long_prompts, skipped_features
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.graph import LaunchGraph, takes_captures
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.families import own_ea_model as native
from eagle_triton.models.tree import MC_SIM_7B_63
from tests.test_batch import LARGER, PROCESSED, REQUESTS, SMALL, alone, drain
from tests.test_demo import prompts
from tests.tiny import fill_target_cache, random_prompt, tiny_model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16_MARGIN = 0.25  # two bf16 logits between 16 and 32 differ by a multiple of 0.125


def demo(dtype=torch.float32, **tree) -> EaModel:
    return EaModel.from_pretrained("demo", dtype=dtype, **tree).cuda()


@pytest.mark.parametrize("eagle3", [True, False], ids=["eagle3", "eagle1"])
@pytest.mark.parametrize("tree", [{}, {"tree_choices": MC_SIM_7B_63}, dict(total_token=8, depth=3, top_k=2)])
def test_fp32_tokens_and_accepted_lengths_are_the_originals(eagle3, tree):
    model = demo(use_eagle3=eagle3, **tree)
    comparisons, report = compare(model, prompts(model, 20), 64)
    assert all(c.same_tokens and c.same_accepted for c in comparisons)
    calls = {row.path: row.calls for row in report if row.status == "counted"}
    assert all(calls[name] > 0 for name in ("tree_attention", "commit", "linear", "add_rms_norm", "build_tree"))
    assert {row.path for row in report if row.status == "left"} <= {"megakernel"}


def test_steps_by_the_megakernel_draft_what_the_original_drafts():
    """Its workspace lives as long as the graph: other tensors come and go between the steps."""
    model = demo()
    comparisons, report = compare(model, prompts(model, 12), 64, config=EagleTritonConfig(megakernel=True))
    assert all(c.same_tokens and c.same_accepted for c in comparisons)
    assert any(row.path == "draft_verify_update" and row.calls for row in report)


def test_graphs_outlive_cublas_workspaces_that_others_clear():
    model, prompt = tiny_model("llama").cuda(), random_prompt(9).cuda()
    with optimize_eagle_with_triton(model)[1]:
        want = [model.eagenerate(prompt, max_new_tokens=30), model.naivegenerate(prompt, max_new_tokens=30)]
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        others = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
        assert torch.equal(model.eagenerate(prompt, max_new_tokens=30), want[0])
        assert torch.equal(model.naivegenerate(prompt, max_new_tokens=30), want[1])
        assert all(bool(other.isnan().all()) for other in others)


def test_other_threads_use_the_device_while_graphs_are_captured():
    """They draw numbers, allocate, and give memory back: neither they nor the captures notice."""
    done, errors, rounds = threading.Event(), [], 0

    def others():
        nonlocal rounds
        try:
            while not done.is_set():
                try:
                    torch.randn(1000, device="cuda")
                except RuntimeError as error:  # drawn in the microseconds in which a capture begins, see _Graph
                    assert "Offset increment outside graph capture" in str(error)
                torch.empty(1 << 24, device="cuda").zero_()
                torch.cuda.empty_cache()
                rounds += 1
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        engine = graph_engine(**SMALL)
        for sampling in (SamplingParams(), SamplingParams(temperature=1.0, seed=1)):
            for slots in (1, 3):
                with Batch(engine, slots, engine.draft.read_tree(), 200) as batch:
                    drain(batch, [Request(random_prompt(70 + slot)[0], 30, sampling) for slot in range(slots)])
    finally:
        done.set()
        thread.join()
    assert not errors, errors
    assert rounds > 10 and not engine.notes
    assert engine.steps._kept and all(isinstance(step, LaunchGraph) for step in engine.steps._kept.values())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_family_decodes_the_same_on_the_gpu(family):
    model = tiny_model(family).cuda()
    comparisons, _ = compare(model, [random_prompt(n) for n in (1, 64, 130)], 40)
    assert all(c.same_tokens and c.same_accepted for c in comparisons)


@pytest.mark.parametrize("eagle3", [True, False], ids=["eagle3", "eagle1"])
def test_bf16_differs_only_where_the_margin_is_rounding(eagle3):
    model = demo(torch.bfloat16, use_eagle3=eagle3)
    ids = prompts(model, 30)
    plain = [decode(model, prompt, 128, plain=True) for prompt in ids]
    with optimize_eagle_with_triton(model)[1]:
        optimised = [decode(model, prompt, 128) for prompt in ids]
    margins = []
    for a, b in zip(plain, optimised, strict=True):
        pairs = enumerate(zip(a.tokens, b.tokens, strict=False))
        column = next((c for c, (x, y) in pairs if x != y), None)
        if column is not None:
            margins.append(top2_margin(model.base_model, a.tokens, column))
    assert max(margins, default=0) <= BF16_MARGIN
    assert len(margins) <= 15, f"{len(margins)} of 30 outputs differ"


def test_graph_and_eager_step_give_the_same_tokens_also_sampled():
    model = demo()
    ids = prompts(model, 8)[-1].cuda()
    rows = {}
    for cuda_graph in (True, False):
        with optimize_eagle_with_triton(model, cuda_graph=cuda_graph)[1]:
            rows[cuda_graph] = [
                model.generate(ids, max_new_tokens=60),
                model.generate(ids.expand(3, -1), max_new_tokens=40, do_sample=True, top_p=0.9, seed=4),
                model.generate(ids, max_new_tokens=40, do_sample=True, top_k=20, temperature=0.8, seed=5),
                model.naivegenerate(ids, max_new_tokens=20),
            ]
    assert all(map(torch.equal, rows[True], rows[False]))


def test_what_catches_up_behind_plain_steps_is_one_graph_with_the_same_drafts():
    ways = {}
    for cuda_graph in (True, False):
        engine = Engine(*native.read(demo()), make_operations(kernels=True), cuda_graph=cuda_graph)
        with Batch(engine, 2, PLAIN, 400) as batch:
            batch.admit_all(Request(random_prompt(length)[0], 300) for length in (70, 9))
            for _ in range(2 * skipped_features.ROWS + 9):  # caught up with twice, and some steps behind that
                batch.step()
            assert isinstance(engine.steps.catch_up(batch.state), LaunchGraph) == cuda_graph
            batch.spec = engine.draft.read_tree()
            steps = [batch.step() for _ in range(9)]
        assert "catch_up_graph" not in engine.notes
        ways[cuda_graph] = [[(row.tokens, row.accepted) for row in step] for step in steps]
    assert ways[True] == ways[False]
    assert any(accepted for step in ways[True] for _, accepted in step)


def test_what_attention_reads_early_is_what_was_committed(monkeypatch):
    """Heads of 64 in bf16, whose keys are streamed on Hopper: the same tokens if it waits for all kernels before it."""
    model, launch, tokens, launches = demo(torch.bfloat16), launchers._launch, {}, []

    def wait(*operands, prefetch_before_wait=False, **options):
        launches.append(prefetch_before_wait)
        return launch(*operands, **options)

    ids = prompts(model, 8)[-1].cuda()
    for how in ("early", "late"):
        if how == "late":
            monkeypatch.setattr(launchers, "_launch", wait)
        with optimize_eagle_with_triton(model)[1]:
            tokens[how] = [
                model.generate(ids, max_new_tokens=300),
                model.generate(ids.expand(16, -1), max_new_tokens=100, do_sample=True, seed=1),
                model.naivegenerate(ids, max_new_tokens=100),
            ]
    assert any(launches)
    assert all(map(torch.equal, tokens["early"], tokens["late"]))


def test_interrupted_and_repeated_generations_and_two_models_in_turn():
    first, second = demo(), demo(use_eagle3=False)
    ids = prompts(first, 9)[-1].cuda()
    want = [model.eagenerate(ids, max_new_tokens=50) for model in (first, second)]
    with optimize_eagle_with_triton(first)[1], optimize_eagle_with_triton(second)[1]:
        for stop_after in (1, 3, 5):
            steps = first.ea_generate(ids, max_new_tokens=50)
            for _ in range(stop_after):
                next(steps)
            steps.close()
            assert torch.equal(second.eagenerate(ids, max_new_tokens=50), want[1])
            assert torch.equal(first.eagenerate(ids, max_new_tokens=50), want[0])


def test_capacity_grows_and_memory_does_not():
    model = demo()
    texts = demo_prompts(40)
    ids = [model.tokenizer(text, return_tensors="pt").input_ids.cuda() for text in texts]
    generator = torch.Generator().manual_seed(0)

    def one_pass() -> list[torch.Tensor]:
        rows = []
        for index, prompt in enumerate(ids):
            new = 5 + int(torch.randint(60, (), generator=generator))
            if index % 3:
                rows.append(model.generate(prompt, max_new_tokens=new))
            else:
                rows.append(model.generate(prompt, max_new_tokens=new, do_sample=True, temperature=0.9, seed=index))
        return rows

    with optimize_eagle_with_triton(model)[1]:
        long = model.generate(ids[0], max_length=1500)
        one_pass()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            generator.manual_seed(7)
            rows = one_pass()
        generator.manual_seed(7)
        again = one_pass()
        assert all(map(torch.equal, rows, again))
        del rows, again
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + 2**20
        assert torch.equal(model.generate(ids[0], max_length=1500), long)


def graph_engine(cuda_graph: bool = True, **tree) -> Engine:
    view, draft = native.read(tiny_model(layers=5, **tree).cuda())
    return Engine(view, draft, make_operations(kernels=True), cuda_graph)


def test_staggered_requests_get_what_each_gets_alone_and_without_a_graph():
    """Stop tokens and limits on the device, slots used again, and a capture for each way of sampling on the way."""
    eager, engine = graph_engine(cuda_graph=False, **SMALL), graph_engine(**SMALL)
    requests = [*REQUESTS, *PROCESSED]
    results = {}
    for every in (1, 3):
        with Batch(engine, 3, engine.draft.read_tree(), 80) as batch:
            results = drain(batch, requests, every)
            for request in requests:
                assert results[id(request)][0] == alone(eager, request)
    assert not engine.notes, engine.notes
    assert all(alone(engine, request) == results[id(request)][0] for request in requests)
    assert not engine.notes, engine.notes


def test_trees_change_at_every_step_and_drafting_resumes():
    engine = graph_engine(**LARGER)
    trees = [engine.draft.read_tree(), TreeSpec.dynamic(20, 4, 5), PLAIN, PLAIN, TreeSpec.fixed([[0], [1], [0, 0]])]
    requests = [Request(prompt[0], 60) for prompt in map(random_prompt, (4, 30, 9))]
    with Batch(engine, 2, trees[0], 120) as batch:
        waiting, rows, accepted = list(requests), {}, 0
        for tree in itertools.cycle(trees):
            batch.spec = tree
            while waiting and batch.free:
                batch.admit(waiting.pop())
            if not batch.running:
                break
            for progress in batch.step():
                rows.setdefault(id(progress.request), []).extend(progress.tokens)
                accepted += progress.accepted
    assert accepted > 0 and not engine.notes
    assert all(rows[id(request)] == alone(engine, request) for request in requests)


def test_logprobs_and_nan_through_the_graph():
    engine = graph_engine(**SMALL)
    runs = []
    for cuda_graph in (True, False):
        engine.cuda_graph = cuda_graph
        with Batch(engine, 2, engine.draft.read_tree(), 80, logprobs=True) as batch:
            batch.admit_all(PROCESSED[:2])
            values = []
            for step in itertools.count():
                if step == 2:
                    fill_target_cache(batch.sequences, 1, float("nan"))
                if not batch.running:
                    break
                values += [(p.slot, p.tokens, p.finished, p.error, p.logprobs) for p in batch.step()]
        assert [value[2] for value in values if value[0] == 1][-1] == "error"
        runs.append([value for value in values if value[0] == 0])
    assert runs[0] == runs[1] and runs[0][-1][2] == "length"


def test_memory_stays_flat_over_many_requests():
    engine = graph_engine(**SMALL)
    source = torch.Generator().manual_seed(0)

    def some(count: int) -> list[Request]:
        lengths = torch.randint(1, 60, (count, 2), generator=source).tolist()
        samplings = (SamplingParams(), SamplingParams(temperature=1.0, seed=1), SamplingParams(repetition_penalty=1.2))
        return [
            Request(random_prompt(length)[0], new, samplings[index % 3]) for index, (length, new) in enumerate(lengths)
        ]

    with Batch(engine, 8, engine.draft.read_tree(), 120) as batch:
        drain(batch, some(40))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        requests = some(200)
        results = drain(batch, requests)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + 2**20
    assert all(len(results[id(request)][0]) == request.max_new_tokens for request in requests)


@pytest.mark.parametrize("length", [8192, 8100, 10300])
def test_a_long_prompt_ends_as_close_to_fp32_as_any(length, monkeypatch):
    """By cuDNN, behind what a forward of its own has read, with a prompt that ends in a page."""
    monkeypatch.setattr(long_prompts, "MIN_WORK", 1)
    model = tiny_model(layers=5, eagle3=False, **SMALL).cuda().to(torch.bfloat16)
    ends = []
    for wanted, dtype in ((None, torch.bfloat16), (False, torch.bfloat16), (None, torch.float32)):
        engine = Engine(*native.read(model.to(dtype)), make_operations(True), True, long_prompts=wanted)
        for _ in range(2):
            with Batch(engine, 1, PLAIN, length + 8) as batch:
                batch.admit(Request(random_prompt(length)[0], 5))
                ends.append(batch._prefill.ends.hidden[0, 0].float().clone())
            engine.pool.forget()
        assert torch.equal(ends[-1], ends[-2])
        assert (engine.ops.calls["prompt_attention"] > 0) == (wanted is None and dtype == torch.bfloat16)
        assert "long_prompts" not in engine.notes
    ours, others, exact = ends[::2]
    assert not torch.equal(ours, others)
    assert (ours - exact).abs().max() <= 2 * (others - exact).abs().max() + 1e-5


def test_after_a_capture_that_fails_others_are_made_in_another_pool():
    """Also where graphs of the first pool are in use."""
    engine = Engine(*native.read(tiny_model(**SMALL).cuda()), make_operations(kernels=True), True)
    ops, stream, numbers = engine.ops, torch.cuda.current_stream(), torch.zeros(4, device="cuda")
    engine.steps._kept["first"] = LaunchGraph(lambda: numbers.add_(1), ops, engine.steps._pool())
    failed = engine.steps._pool()
    assert failed == engine.steps._kept["first"].graph.pool()
    for _ in range(2):
        pool = engine.steps._pool()
        with pytest.raises(RuntimeError):
            LaunchGraph(lambda: numbers.sum().item(), ops, pool)  # waits for the device
        assert torch.cuda.current_stream() == stream and not takes_captures(pool)
    engine.steps._kept["second"] = LaunchGraph(lambda: numbers.add_(2), ops, engine.steps._pool())
    assert engine.steps._pool() == engine.steps._kept["second"].graph.pool() != failed
    torch.ones(4).pin_memory()
    for graph in engine.steps._kept.values():
        graph()
    assert numbers.tolist() == [3] * 4
