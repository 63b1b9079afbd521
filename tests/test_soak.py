"""Many generations in one process: no memory grows, and every output is that of a fresh process in another order."""

from __future__ import annotations

import gc
import itertools
import json
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from eagle_triton import EaModel, optimize_eagle_with_triton
from eagle_triton.demo import demo_prompts
from tests.forked import start_program
from tests.tiny import tiny_model

CUDA = torch.cuda.is_available()
JOBS, PASSES = (200, 5) if CUDA else (12, 2)
LONGEST_PROMPT, MAX_NEW = (400, 60) if CUDA else (60, 16)
SLACK, SEGMENT = (2**20, 20 * 2**20) if CUDA else (0, 0)  # bytes; the allocator reserves memory by segments
WAYS = ("greedy", "sampled", "batch", "eagenerate", "naivegenerate", "abandoned")


@dataclass(frozen=True)
class Job:
    """One generation: `length` tokens of the stream from `first` on, and how to go on from them."""

    way: str
    first: int
    length: int
    new: int
    options: dict[str, Any]


def jobs(stream: list[int]) -> list[Job]:
    """Every way of decoding in turn, with random lengths, temperatures, filters and stop tokens."""
    rng, made = random.Random(0), []
    for way in itertools.islice(itertools.cycle(WAYS), JOBS):
        length, new = rng.randint(1, LONGEST_PROMPT), rng.randint(1, MAX_NEW)
        options: dict[str, Any] = {}
        if way in ("greedy", "sampled", "batch"):
            options["eos_token_id"] = rng.sample(stream, 4) if rng.random() < 0.5 else []
        if way in ("sampled", "batch"):
            filters = rng.choice([{}, {"top_p": 0.9}, {"top_k": 8}, {"min_p": 0.05}])
            temperature, seed = rng.choice([0.3, 0.8, 1.5]), rng.randrange(10**6)
            options |= dict(do_sample=True, temperature=temperature, seed=seed, **filters)
        made.append(Job(way, rng.randrange(len(stream) - length), length, new, options))
    return made


def load(dtype: str) -> tuple[EaModel, list[int]]:
    """The model, and a stream of tokens to cut prompts from: the demo on a GPU, else a tiny one."""
    if not CUDA:
        generator = torch.Generator().manual_seed(0)
        return tiny_model(layers=6, total_token=16, depth=3, top_k=4), torch.randint(
            32, (4000,), generator=generator
        ).tolist()
    torch.backends.cuda.matmul.allow_tf32 = False
    model = EaModel.from_pretrained("demo", dtype=getattr(torch, dtype)).cuda()
    return model, model.tokenizer("\n".join(demo_prompts(100))).input_ids


def run(model: EaModel, stream: list[int], job: Job) -> list[list[int]]:
    """The rows that a job gives."""
    ids = torch.tensor([stream[job.first : job.first + job.length]], device=model.device)
    if job.way in ("eagenerate", "naivegenerate"):
        return getattr(model, job.way)(ids, max_new_tokens=job.new).tolist()
    if job.way == "abandoned":
        steps = model.ea_generate(ids, max_new_tokens=job.new)
        for sequence in itertools.islice(steps, 1 + job.new // 8):  # noqa: B007
            pass
        steps.close()
        return sequence.tolist()
    batch = ids.repeat(3, 1) if job.way == "batch" else ids
    return model.generate(batch, max_new_tokens=job.new, **job.options).tolist()


def warm_up(model: EaModel, stream: list[int]) -> None:
    """The longest generation of each shape comes first.

    The capacity of its cache decides in how many parts attention sums, and so the last bits of everything after it.
    """
    longest = torch.tensor([stream[: LONGEST_PROMPT + MAX_NEW]], device=model.device)
    for rows in (1, 3):
        model.generate(longest.repeat(rows, 1), max_new_tokens=MAX_NEW)
    model.naivegenerate(longest, max_new_tokens=MAX_NEW)


def held() -> tuple[int, int]:
    """Bytes of all live tensors and of the memory reserved for them: the device's, on a CPU those of live objects."""
    gc.collect()
    if CUDA:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    size = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    return size, size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if CUDA else ["float32"])
def test_memory_stays_flat_and_every_output_is_that_of_a_fresh_process(dtype):
    model, stream = load(dtype)
    todo = jobs(stream)
    assert {job.way for job in todo} == set(WAYS)
    memory, outputs = [], []
    with optimize_eagle_with_triton(model)[1]:
        warm_up(model, stream)
        for _ in range(PASSES):
            outputs.append({index: run(model, stream, job) for index, job in enumerate(todo)})
            memory.append(held())
    for later in outputs[1:]:
        assert [index for index in later if later[index] != outputs[0][index]] == []
    allocated, reserved = zip(*memory, strict=True)
    assert max(allocated) <= allocated[0] + SLACK and max(reserved) <= reserved[0] + SEGMENT, memory
    assert outputs[0] == fresh_outputs(dtype)
    stoppable = [index for index, job in enumerate(todo) if job.options.get("eos_token_id")]
    new = {index: len(outputs[0][index][0]) - todo[index].length for index in stoppable}
    assert any(new[index] < todo[index].new for index in stoppable), "no generation was stopped early"


def fresh_outputs(dtype: str) -> dict[int, list[list[int]]]:
    """The outputs of a new process that takes the jobs from the last to the first."""
    process = start_program(print_backwards, dtype)
    printed = process.stdout.read()
    assert process.wait() == 0, process.stderr.read()
    return {int(index): rows for index, rows in json.loads(printed.splitlines()[-1]).items()}


def print_backwards(argv: list[str]) -> int:
    """Run in the fresh process: all outputs as one line of JSON."""
    model, stream = load(argv[0])
    todo = jobs(stream)
    with optimize_eagle_with_triton(model)[1]:
        warm_up(model, stream)
        outputs = {index: run(model, stream, todo[index]) for index in reversed(range(len(todo)))}
    print(json.dumps(outputs))
    return 0
