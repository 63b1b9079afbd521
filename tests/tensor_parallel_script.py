"""What two ranks must do, run by tests/test_tensor_parallel.py under torchrun: `... tensor_parallel_script.py FOLDER`.

Every rank compares what the ranks give together with what one process gives alone. Rank 0 prints what was shown.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import StoppingCriteria
from transformers.distributed import DistributedConfig

from eagle_triton import EaModel, UnsupportedModelError, optimize_eagle_with_triton, optimize_with_triton
from eagle_triton.engine.memory import pages
from eagle_triton.engine.model.modules import Projection
from eagle_triton.engine.ranks import RanksError
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.families import own_ea_model as native
from eagle_triton.families.causal_lm import draft_from_causal_lm, read_causal_lm
from eagle_triton.families.reading.sharded import share_head
from eagle_triton.inference import EAGLEConfig, EAGLEInference, Session, SharedSession
from eagle_triton.models.heads import DraftConfig, Eagle1Head
from eagle_triton.models.loading import HEAD_FOLDERS
from eagle_triton.runtime.float8_weight import quantised
from tests.float8_models import Float8Tensor
from tests.peer_memory_script import memory_in
from tests.tiny import random_prompt, tiny_model

STEPS = 14
TREE: dict[str, Any] = dict(total_token=10, depth=3, top_k=3)
FIXED: dict[str, Any] = dict(tree_choices=[[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
PAIRS: dict[str, dict[str, Any]] = {
    "llama, EAGLE-3": dict(seed=3),
    "llama, EAGLE-1": dict(eagle3=False),
    "llama, tied, EAGLE-3 without an embedding": dict(tied=True, seed=10),
    "llama, tied, EAGLE-1": dict(tied=True, eagle3=False, seed=2),
    "qwen3, norms of heads, EAGLE-3": dict(family="qwen3", seed=3),
    "llama, biases of all, EAGLE-3": dict(bias=True, seed=3),
}


def save(folder: Path, name: str, tied: bool = False, bias: bool = False, **options: Any) -> None:
    """A tiny pair as a checkpoint."""
    model = tiny_model(layers=3, **options)
    if bias:
        model = with_biases(model)
    if tied:
        model.base_model.config.tie_word_embeddings = True
        model.base_model.tie_weights()
    model.save_pretrained(folder / name)
    if tied and options.get("eagle3", True):  # the head's embedding is left to the target
        weights = next((folder / name).glob(f"{HEAD_FOLDERS[True]}/*.safetensors"))
        tensors = load_file(weights)
        del tensors["embed_tokens.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})


def with_biases(model: EaModel) -> EaModel:
    """The same head around a Llama all of whose projections have biases."""
    config = type(model.config).from_dict({**model.config.to_dict(), "attention_bias": True, "mlp_bias": True})
    base = type(model.base_model)(config).eval()
    for parameter in base.parameters():
        parameter.data.normal_(0, 0.15)
    return EaModel(base, model.ea_layer).eval()


@contextmanager
def refused(error: type[Exception] | tuple[type[Exception], ...], *words: str):
    """The block must raise an error with these words in it."""
    try:
        yield
    except error as found:
        missing = [word for word in words if word not in str(found)]
        assert not missing, f"{missing} not in: {found}"
    else:
        raise AssertionError(f"{error} with {words} was not raised")


def load(folder: Path, name: str = "llama, EAGLE-3", tree: dict[str, Any] = TREE, **options: Any) -> EaModel:
    """A pair, over both ranks unless the options say otherwise."""
    return EaModel.from_pretrained(str(folder / name), **{"tp_plan": "auto", **tree, **options})


def load_both(folder: Path, *which: Any) -> tuple[EaModel, EaModel]:
    """A pair on each rank alone, and the same over both."""
    return load(folder, *which, tp_plan=None), load(folder, *which)


def gathered(value: object) -> list[Any]:
    """That of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def tokens_equal_those_of_one_rank(folder: Path) -> None:
    for name in list(PAIRS)[2:]:  # each of their heads is beside another target too
        one, shared = load_both(folder, name, FIXED if name == "llama, tied, EAGLE-1" else TREE)
        prompts = [random_prompt(length) for length in (9, 21, 4)]
        results = []
        for model, seed in ((one, 0), (shared, dist.get_rank())):
            with optimize_eagle_with_triton(model):
                torch.manual_seed(seed)  # the other rank's draws must not count
                got = [model.eagenerate(prompts[1], max_new_tokens=8), torch.tensor(model.accept_lengths)]
                got.append(model.eagenerate(prompts[1], max_new_tokens=8, temperature=0.8, top_p=0.9))
                got += [torch.tensor(model.accept_lengths), model.naivegenerate(prompts[0], max_new_tokens=2)]
                batch = torch.nn.utils.rnn.pad_sequence([prompt[0] for prompt in prompts], True, 0, "left")
                mask = torch.nn.utils.rnn.pad_sequence(
                    [torch.ones_like(prompt[0]) for prompt in prompts], True, 0, "left"
                )
                options = dict(do_sample=True, temperature=0.9, top_k=9, seed=5)
                got.append(model.generate(batch, attention_mask=mask, max_new_tokens=4, **options))
            results.append(got)
        for place, (expected, found) in enumerate(zip(*results, strict=True)):
            assert torch.equal(expected, found), f"{name}, {place}: {expected.tolist()} and {found.tolist()}"
        assert any(int(results[1][place].sum()) for place in (1, 3)), f"{name}: no draft was accepted"


def restored_it_is_as_it_was(folder: Path) -> None:
    """transformers' own way over both ranks, which restore gives back."""
    model = load(folder, "llama, tied, EAGLE-3 without an embedding")
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    forwards = {name: vars(part).get("forward") for name, part in model.named_modules()}
    prompt = random_prompt(11)
    expected = model.eagenerate(prompt, max_new_tokens=10)
    _, originals = optimize_eagle_with_triton(model)
    left = {row.path for row in originals.report() if row.status == "left"}
    assert {"ea_layer.topK_genrate, self_attn.forward", "ranks"} <= left
    assert torch.equal(model.eagenerate(prompt, max_new_tokens=10), expected)
    originals.restore()
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == before
    assert {name: vars(part).get("forward") for name, part in model.named_modules()} == forwards
    assert not {"eagenerate", "naivegenerate", "generate"} & vars(model).keys()
    assert torch.equal(model.eagenerate(prompt, max_new_tokens=10), expected)


def reports_are_the_same_over_many_steps(folder: Path) -> None:
    model = load(folder)
    inference = EAGLEInference(None, model)
    engine, spec = inference.engine, TreeSpec.dynamic(10, 3, 3)
    reports = []
    with Batch(engine, 2, spec, 2000) as batch:
        sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=3)
        batch.admit_all([Request(random_prompt(9)[0], 12, sampling), Request(random_prompt(7)[0], 6)])
        for step in range(STEPS):
            batch.spec = PLAIN if step % 10 == 9 else spec
            batch.step()
            reports.append(batch.state.report.tolist())
            for slot in batch.free:
                batch.admit(Request(random_prompt(5 + slot, seed=step)[0], 1900, sampling))
    first, second = gathered(reports)
    assert len(reports) == STEPS and first == second


def plain_models_and_inference(folder: Path) -> None:
    one, shared = load_both(folder)
    prompt, rank = random_prompt(12), dist.get_rank()

    class Sometime(StoppingCriteria):
        """Ends after 5 tokens on rank 0 and never on the other: rank 0's counts."""

        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            done = input_ids.shape[1] >= 17 and rank == 0
            return torch.full((len(input_ids),), done, dtype=torch.bool)

    results = []
    for model in (one, shared):
        with optimize_with_triton(model.base_model, model.ea_layer):
            got = [model.base_model.generate(prompt, max_new_tokens=10, do_sample=False)]
            torch.manual_seed(4 if model is one else 4 + rank)
            got.append(model.base_model.generate(prompt, max_new_tokens=10, do_sample=True, top_k=8))
        for draft, config in (
            (None, EAGLEConfig(num_draft_tokens=8, topk=3, num_steps=3)),
            (None, EAGLEConfig(num_draft_tokens="auto", topk=3, num_steps=3, suffix_drafts=3, temperature=0.7)),
        ):
            inference = EAGLEInference(draft, model, config)
            rows, stats = inference.generate([prompt[0], prompt[0, :5]], max_new_tokens=10, seed=2)
            got += [*rows, torch.tensor(stats.draft_forwards if model is shared else 0)]
        results.append(got)
    for expected, found in zip(*results, strict=True):
        assert expected.dim() == 0 or torch.equal(expected, found), (expected, found)
    with optimize_eagle_with_triton(shared, draft_dtype="fp8"):
        rounded = shared.eagenerate(prompt, max_new_tokens=10)
        assert sum(shared.accept_lengths) > 0
    assert torch.equal(rounded[:, :22], results[0][0])
    first, second = gathered([int(row) for row in results[1] if row.dim() == 0])
    assert first == second

    with optimize_with_triton(shared.base_model):
        cut = shared.base_model.generate(prompt, max_new_tokens=10, do_sample=False, stopping_criteria=[Sometime()])
    assert cut.shape[1] == 17
    with refused(RanksError, "the options of a session must be the same on all ranks"):
        inference.session(rows=64 + rank)
    with refused(RanksError, "must be the same on all ranks: ranks [1] and rank 0 differ"):
        inference.generate(prompt[0, : 5 + rank], max_new_tokens=4)
    (again,) = inference.generate([prompt[0]], max_new_tokens=4, return_stats=False)  # it was said to both, in time
    assert len(again) == 16


def rank_0_is_asked_by_a_session(folder: Path) -> None:
    """And gives what a session of one process gives, whatever comes and goes meanwhile."""
    config = EAGLEConfig(num_draft_tokens="auto", topk=3, num_steps=3, suffix_drafts=2, slots=2)
    inferences = [EAGLEInference(None, model, config, tokenizer=Letters()) for model in load_both(folder)]

    def work(session: Session) -> dict[int, Any]:
        found: dict[int, Any] = {}

        def run(steps: int | None = None) -> None:
            while not session.idle and steps != 0:
                steps = None if steps is None else steps - 1
                for piece in session.step():
                    if piece.completion is not None:
                        found[piece.index] = (piece.completion.tokens, piece.completion.text, piece.completion.finished)

        for length in (9, 21, 4):
            session.submit(random_prompt(length)[0], 12, logprobs=length == 4)
        run(3)
        session.submit(random_prompt(7)[0], 8, temperature=0.8, top_p=0.9, seed=5, logit_bias={3: 1.5})
        session.cancel(1)
        run()
        session.keep_alive()
        session.submit(random_prompt(12)[0], 20, stop_strings=found[0][1][4:7])
        run(2)
        session.submit(random_prompt(500)[0], 4)  # does not fit
        run()
        return found

    with inferences[0].session(96) as session:
        expected = work(session)
    assert sorted(expected) == [0, 2, 3, 4, 5] and expected[5][2] == "error"
    shared_one = inferences[1]
    session = shared_one.session(96)
    assert isinstance(session, SharedSession)
    if session.leads:
        with refused(RuntimeError, "call it on the other ranks"):
            session.follow()
        assert work(session) == expected
        for ask in (lambda: shared_one.generate([[1, 2]], 4), lambda: shared_one.session(64)):
            with refused(RuntimeError, "another generation is running"):  # before the others hear of it
                ask()
        prompt = random_prompt(9)[0]
        session.submit(prompt, 4)
        prompt.fill_(1)
        while not session.idle:
            session.step()
        session.submit(random_prompt(9)[0], 8)  # which the others hear of when it is over
        session.close()
        with refused(RuntimeError, "closed"):
            session.step()
    else:
        for ask in (session.step, lambda: session.submit([1, 2]), lambda: session.cancel(0)):
            with refused(RuntimeError, "call it on rank 0 only; other ranks call follow()"):
                ask()
        session.follow()
        with refused(RuntimeError, "closed"):
            session.follow()
    session = shared_one.session(96)
    if session.leads:
        del session
        with refused(RanksError, "what is called", "must be the same on all ranks"):
            shared_one.generate([[1, 2]], 4)
    else:
        with refused(RanksError, "a session that rank 0 has not closed"):
            session.follow()
    ids, _ = shared_one.generate([random_prompt(9)[0]], 6)  # they are together
    assert torch.equal(ids[0], inferences[0].generate([random_prompt(9)[0]], 6)[0][0])


def one_rank_may_stream_alone(folder: Path) -> None:
    """Or have criteria of its own, which count on rank 0."""
    model = load(folder).base_model
    prompt, rank, shown = random_prompt(12), dist.get_rank(), []

    class Streamer:
        def put(self, tokens: Tensor) -> None:
            shown.extend(tokens.flatten().tolist())

        def end(self) -> None:
            pass

    class AfterFour(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 16, dtype=torch.bool)

    with optimize_with_triton(model):
        expected = model.generate(prompt, max_new_tokens=9, do_sample=False)
        for streaming in (0, 1):
            streamer = Streamer() if rank == streaming else None
            found = model.generate(prompt, max_new_tokens=9, do_sample=False, streamer=streamer)
            assert torch.equal(found, expected)
        assert shown == expected.flatten().tolist()
        for asking, length in ((0, 16), (1, 21)):
            criteria = [AfterFour()] if rank == asking else []
            streamer = Streamer() if rank else None
            found = model.generate(
                prompt, max_new_tokens=9, do_sample=False, stopping_criteria=criteria, streamer=streamer
            )
            assert torch.equal(found, expected[:, :length]), (asking, found.tolist())


def one_rank_may_lack_memory(folder: Path) -> None:
    """Then the caches of all have no more room than its own: the same request ends with an error on each."""
    model = load(folder)
    resized = pages.PageMemory.resized

    def short(memory: pages.PageMemory, count: int, known: int) -> Tensor:
        if count > 4 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("none left")
        return resized(memory, count, known)

    with patch.object(pages, "_GROWTH", 1.0), patch.object(pages.PageMemory, "resized", short):
        inference = EAGLEInference(None, model, EAGLEConfig(topk=3, num_steps=3, num_draft_tokens=8, slots=3))
        prompts = [random_prompt(length, seed=seed)[0] for seed, length in enumerate((120, 60, 60))]
        _, results = inference.generate(prompts, [80, 10, 20])
    ends = [(completion.error, completion.tokens) for completion in results.completions]
    first, second = gathered(ends)
    assert first == second
    assert "none left" in ends[0][0] and not ends[1][0] and not ends[2][0]
    assert inference.engine.ops.calls["requests_paused"], "nobody has paused"


def steps_that_one_rank_has_alone_are_refused(folder: Path) -> None:
    """As when a rank leaves a stream before the others, while the device has begun another step."""
    model = load(folder)
    inference = EAGLEInference(None, model)
    with Batch(inference.engine, 1, TreeSpec.dynamic(10, 3, 3), 100) as batch:
        batch.admit_all([Request(random_prompt(9)[0], 60)])
        batch.step()
        inference.engine.launched += dist.get_rank()
    with refused(RanksError, "the number of steps before must be the same on all ranks"):
        inference.generate([random_prompt(9)[0]], 5)


def what_decides_is_compared(folder: Path) -> None:
    """Before anything is exchanged by it."""
    rank, prompt = dist.get_rank(), [random_prompt(9)[0]]

    def inference(**options: Any) -> EAGLEInference:
        return EAGLEInference(None, load(folder), EAGLEConfig(**options))

    both = [inference(), inference()]
    with refused(RanksError, "its engine"):
        both[rank].generate(prompt, 5)
    for options in ({"verify_strategy": "rejection"}, {"fallback": False}, {"prefixes": False}, {"cache_tokens": 512}):
        other = inference(**(options if rank else {}))
        with refused(RanksError, "the configuration, the number of prompts and stop_strings must be the same"):
            other.generate(prompt, 5)
        with refused(RanksError, "the configuration and the options of a session must be the same"):
            other.session(96)
    with refused(RanksError, "must be the same on all ranks"):
        both[0].generate(prompt * (1 + rank), 5)
    expected = both[1].generate(prompt, 5)[0][0]
    assert torch.equal(both[0].generate(prompt, 5)[0][0], expected), "they are together again"
    ids = prompt[0][None]
    with both[0].session(96) as session:
        if session.leads:
            for ask in (both[0].forget_outputs, lambda: both[0].draft_step(ids)):
                with refused(RuntimeError, "another generation is running"):
                    ask()
        else:
            session.follow()
    both[0].forget_outputs()
    both[0].draft_step(ids)
    assert torch.equal(both[0].generate(prompt, 5)[0][0], expected)
    if rank:
        both[0].engine.pool.forget()  # as where a weight was written to on one rank alone
    with refused(RanksError, "what was forgotten"):
        both[0].generate(prompt, 5)
    assert torch.equal(both[1].generate(prompt, 5)[0][0], expected)


class Letters:
    """A tokenizer whose tokens are letters."""

    eos_token_id, pad_token_id, all_special_ids = None, 0, ()

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(ord("a") + int(token) % 26) for token in ids)


def what_is_refused(folder: Path) -> None:

    def planned(name: str, style: str) -> EaModel:
        plan = {f"model.layers.*.{name}": style}
        return load(folder, tp_plan=None, distributed_config=DistributedConfig(tp_size=2, tp_plan=plan))

    with refused(UnsupportedModelError, "model.base_model.model.layers.0.mlp.gate_proj", "by 'colwise_gather_output'"):
        optimize_eagle_with_triton(planned("mlp.gate_proj", "colwise_gather_output"))
    with refused(UnsupportedModelError, "target_model.model.layers.0.self_attn.o_proj", "by 'rowwise_split_input'"):
        EAGLEInference(None, planned("self_attn.o_proj", "rowwise_split_input").base_model)

    model = load(folder)
    model.base_model.tp_plan = {**model.base_model.tp_plan, "model.layers.*.self_attn.k_proj": "rowwise"}
    with refused(UnsupportedModelError, "model.base_model.model.layers.0.self_attn.k_proj", "its style is 'rowwise'"):
        optimize_eagle_with_triton(model)
    model = load(folder)
    layers = model.base_model.model.layers
    layers[2].mlp.up_proj.weight = layers[2].mlp.down_proj.weight
    with refused(UnsupportedModelError, "layers.2.mlp.up_proj.weight", "Shard(dim=1)", "must be Shard(dim=0)"):
        optimize_with_triton(model.base_model)
    model = load(folder)
    whole = torch.nn.Linear(64, 96, bias=False)
    model.base_model.model.layers[2].mlp.up_proj = whole
    with refused(UnsupportedModelError, "model.model.layers.2.mlp.up_proj", "every rank has it whole"):
        optimize_with_triton(model.base_model)
    model = load(folder)
    weight = model.base_model.model.layers[1].mlp.up_proj.weight
    size = [1, weight.shape[1]]
    weight._local_tensor = Float8Tensor(*quantised(weight._local_tensor).tensors, size, weight.dtype)
    with refused(UnsupportedModelError, "layers.1.mlp.up_proj.weight", "must be a plain tensor, got a Float8Tensor"):
        optimize_with_triton(model.base_model)
    model = load(folder)
    model.ea_layer.lm_head.weight = model.base_model.lm_head.weight
    with refused(UnsupportedModelError, "model.ea_layer.lm_head.weight", "a draft must be whole on each rank"):
        optimize_eagle_with_triton(model)
    with refused(UnsupportedModelError, "layers.0.self_attn.k_proj", "its 1 heads do not divide by 2 ranks; start"):
        optimize_eagle_with_triton(load(folder, "one head of keys"))
    with refused(ValueError, "33", "divi"):  # older transformers say so themselves
        optimize_eagle_with_triton(load(folder, "odd vocabulary"))

    model = load(folder)
    view = read_causal_lm(model.base_model)
    with refused(UnsupportedModelError, "draft_model.model is sharded", "load it without tp_plan"):
        draft_from_causal_lm(model.base_model, view, lambda: PLAIN)
    with refused(RanksError, "stop_strings must be the same on all ranks: ranks [1] and rank 0 differ"):
        stops = "an end" if dist.get_rank() else ()
        inference = EAGLEInference(None, model, tokenizer=Letters())
        inference.generate([random_prompt(5)[0]], 5, stop_strings=stops)
    with refused(UnsupportedModelError, "megakernel=True"):
        optimize_eagle_with_triton(model, megakernel=True)
    with refused(UnsupportedModelError, "ea_layer.topK_genrate, self_attn.forward"):
        optimize_eagle_with_triton(model, strict=True)
    with refused(ValueError, "total_token must be a number of nodes"):
        load(folder, total_token=-1, depth=5, top_k=10)
    with refused(ValueError, "draft_vocabulary"):
        EAGLEInference(None, load(folder, "llama, EAGLE-1"), EAGLEConfig(draft_vocabulary=16))


def a_head_is_shared_where_it_divides(folder: Path) -> None:
    """By views of its own weights, and its cache has this rank's heads."""
    model = load(folder)
    view, draft = native.read(model)
    layer, weights = draft.layers[0], model.ea_layer.midlayer
    assert layer.mixer.cache_shape == view.layers[0].mixer.cache_shape == (1, 16)
    for mine, whole in (
        (layer.mixer.o, weights.self_attn.o_proj),
        (layer.mlp.up, weights.mlp.up_proj),
        (draft.head, model.ea_layer.lm_head),
    ):
        assert 2 * mine.weight.numel() == whole.weight.numel()
        assert mine.weight.untyped_storage().data_ptr() == whole.weight.untyped_storage().data_ptr()
    ranks = view.ranks
    odd = replace(draft, head=Projection(torch.zeros(19, 64)))
    odd = replace(odd, layers=(replace(layer, mixer=replace(layer.mixer, num_heads=3)),))
    left = share_head(odd, ranks)
    assert left.head is odd.head and left.layers[0].mixer is odd.layers[0].mixer


def norms_add_up_what_ranks_leave_in_memory(folder: Path) -> None:
    """Instead of gathering it: as on GPUs, here in a file, by the references. The bits are the same."""
    model = load(folder)
    ranks = native.read(model)[0].ranks
    assert ranks is not None
    if dist.get_rank() == 0:
        memory_in(folder, 0, create=True, rows=12, width=64)
    dist.barrier()
    results = []
    for peers in (None, memory_in(folder, ranks.rank, rows=12, width=64)):
        ranks.peers = peers
        with optimize_eagle_with_triton(model):
            torch.manual_seed(3)
            tokens = model.eagenerate(random_prompt(21), max_new_tokens=8, temperature=0.7)
            results.append((tokens, model.accept_lengths[:]))
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    assert peers is not None and not peers.gave_up()
    steps = len(results[1][1])
    assert int(peers.uses[0]) >= 2 * 3 * steps, "a step has two sums in each layer"
    assert int(peers.uses[11]) > 0, "a prompt of 21 tokens is exchanged in pieces: there is room for 12 rows"
    ranks.peers = None


def changes_are_found(folder: Path) -> None:
    model = load(folder)
    prompt = random_prompt(9)
    with optimize_eagle_with_triton(model):
        before = model.eagenerate(prompt, max_new_tokens=6)
        with torch.no_grad():
            model.base_model.lm_head.weight.mul_(-1)  # in place, of a DTensor
        after = model.eagenerate(prompt, max_new_tokens=6)
        assert not torch.equal(before, after)
        kept = model.base_model.model.layers[1].mlp.down_proj.weight
        model.base_model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(kept.detach().clone())
        with refused(RuntimeError, "layers.1.mlp.down_proj.weight was replaced"):
            model.eagenerate(prompt, max_new_tokens=6)


CASES: tuple[Callable[[Path], None], ...] = (
    tokens_equal_those_of_one_rank,
    restored_it_is_as_it_was,
    reports_are_the_same_over_many_steps,
    plain_models_and_inference,
    rank_0_is_asked_by_a_session,
    one_rank_may_stream_alone,
    one_rank_may_lack_memory,
    steps_that_one_rank_has_alone_are_refused,
    what_decides_is_compared,
    what_is_refused,
    a_head_is_shared_where_it_divides,
    norms_add_up_what_ranks_leave_in_memory,
    changes_are_found,
)


def main(argv: list[str]) -> int:
    """Run all cases on the checkpoints in a folder, which rank 0 fills. An exception ends both ranks."""
    folder = Path(argv[0])
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        for name, options in PAIRS.items():
            save(folder, name, **options)
        write_unfit(folder)
    dist.barrier()
    shown = []
    for case in CASES:
        start = time.perf_counter()
        case(folder)
        shown.append(case.__name__)
        if dist.get_rank() == 0:
            print(f"{case.__name__}: {time.perf_counter() - start:.1f} s", flush=True)
    if dist.get_rank() == 0:
        print(json.dumps(shown), flush=True)
    dist.destroy_process_group()
    return 0


def write_unfit(folder: Path) -> None:
    """Targets that do not divide by two."""
    for name, vocab, kv_heads in (("one head of keys", 32, 1), ("odd vocabulary", 33, 2)):
        model = tiny_model(eagle3=False, vocab=vocab)
        options = {**model.config.to_dict(), "num_key_value_heads": kv_heads, "vocab_size": vocab}
        base = type(model.base_model)(type(model.config).from_dict(options)).eval()
        head = Eagle1Head(DraftConfig(64, 96, 4, vocab))
        EaModel(base, head).save_pretrained(folder / name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
