"""Prefills, steps, a change of tree and mixtures in four bits against a driver that launches nothing; needs no GPU.
Kernels are compiled for sm_90 as far as Triton's own IR, since no binary runs; tests/compile_kernels.py compiles them
to the end.

    python tests/decode_without_gpu.py CACHE

CACHE is a folder for compiled kernels, which two runs share: what is loaded from it counts as compiled. Prints how many
kernels each compiled ahead and which later; the exit status is 1 if any was later. In the first run an operation of
Gluon raises, as removed ones do in a newer Triton; it fails also if a Gluon kernel was launched, if nothing says so, or
if strict=True does not raise. Runs in a process of its own because the interpreter, once chosen, stays, and each run in
one that is forked from it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon import language as gluon

from eagle_triton import attention as launchers
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.families import own_ea_model as native
from eagle_triton.ops import attention_hopper as streamed_attention
from eagle_triton.ops import experts
from eagle_triton.ops.linear import hopper as streamed
from eagle_triton.reference import experts as reference
from eagle_triton.runtime import compile_ahead, fallback, overlap
from tests.test_experts import LAYOUTS, block, in_four_bits, packed
from tests.tiny import random_prompt, tiny_model

HEAD_WIDTH = 64  # ops/attention_hopper.py attends the trees of such heads
WAYS = (  # and the tree's nodes
    (SamplingParams(), 60),
    (SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2), 25),
)


class Driver:
    """What Triton asks of a driver to compile, load and launch."""

    utils = SimpleNamespace(
        load_binary=lambda name, kernel, shared, device: (object(), 1, 0, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
    )

    def __init__(self):
        self.launches = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source, metadata):
        descriptors = [kind for kind in source.signature.values() if str(kind).startswith("tensordesc")]
        assert str(source.signature).count("tensordesc") == len(descriptors), "Triton 3.6 takes none in views"

        def start(*args) -> None:
            self.launches += 1

        return start


def decode(sampling: SamplingParams, nodes: int, strict: bool = False) -> Engine:
    """Two requests, then another tree."""
    model = tiny_model(vocab=512, head_dim=HEAD_WIDTH, total_token=nodes).to(torch.bfloat16)
    engine = Engine(*native.read(model), make_operations(True), strict=strict)
    with Batch(engine, 2, engine.draft.read_tree(), 110) as batch:
        for length in (70, 77):  # the second enters another slot, where nothing is aligned as in the first
            batch.admit(Request(random_prompt(length, 512)[0], 20, sampling))
            for _ in range(2):
                batch.launch()
        batch.spec = TreeSpec.dynamic(16, 3, 4)
        batch.launch()
    return engine


def multiply_by_experts() -> None:
    """Products of experts in four bits and in MXFP4 with one row, with few and with many. A group is all columns
    of a row, or a part of them."""
    for rows, group, kind in ((1, 32, {}), (9, 64, LAYOUTS["interleaved"]), (60, 64, {})):
        (x, _, *more), (_, *rest), options = block("cpu", torch.bfloat16, rows, width=320, inner=64, **kind)
        sizes, of_integers = ((12, 128, 320), (12, 320, 64)), dict(zeros=bool(kind), dtype=x.dtype)
        for weights in (
            [in_four_bits("cpu", *size, group=group, **of_integers) for size in sizes],
            [packed("cpu", *size) for size in sizes],
        ):
            inner = experts.experts_swiglu(x, weights[0], *more, **options)
            assert inner.shape == reference.experts_swiglu(x, weights[0], *more, **options).shape
            experts.experts_down(inner, weights[1], *rest)


def as_it_is(self, module, *_):
    """In the place of a stage of the compilation."""
    return module


def without_code(self, module, metadata, *_) -> str:
    """In the place of the stages behind, with what launches read of them."""
    metadata.update(name="kernel", shared=0, tmem_size=0)
    for kind in ("global", "profile"):
        metadata.update({f"{kind}_scratch_size": 0, f"{kind}_scratch_align": 1})
    return ""


@gluon._core.builtin
def removed(*_, _semantic=None, **__):
    raise RuntimeError("async_load has been removed")


def main(argv: list[str]) -> int:
    (cache,) = argv
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    for broken in (True, False):
        process = context.Process(target=exit_after_run, args=(cache, broken))
        process.start()
        process.join()
        if process.exitcode:
            return 1
    return 0


def exit_after_run(cache: str, broken: bool) -> None:
    sys.exit(run(cache, broken))


def run(cache: str, broken: bool) -> int:
    if broken:
        streamed_attention.async_load = streamed.async_load = removed
    driver = Driver()
    triton.runtime.driver.set_active(driver)
    CUDABackend.make_ttgir = CUDABackend.gluon_to_ttgir = as_it_is
    CUDABackend.make_llir = CUDABackend.make_ptx = without_code
    CUDABackend.make_cubin = lambda *_: b""
    ahead, later = [], []

    def compiled(src, **_) -> None:
        by_main_thread = threading.current_thread() is threading.main_thread()
        (later if by_main_thread else ahead).append(src.fn.__name__)

    triton.knobs.compilation.listener = compiled
    # a CPU that passes for a Hopper GPU
    compile_ahead.can_compile_ahead = lambda device: True
    launchers._capability = lambda device: (9, 0)
    overlap._driver = lambda: None
    everywhere = {
        "can_overlap": lambda device: True,
        "compute_capability": lambda device: (9, 0),
        "multiprocessors_of": lambda device: 132,
    }
    fallback.gluon_module("eagle_triton.ops.experts.hopper_experts")  # imported, so that it is one of them
    for name, module in list(sys.modules.items()):
        for attribute in everywhere.keys() & vars(module).keys() if name.startswith("eagle_triton") else ():
            setattr(module, attribute, everywhere[attribute])

    with triton.knobs.cache.scope(), compile_ahead._ZeroedAllocations():  # nothing else writes a kernel's results
        triton.knobs.cache.dir = cache
        if broken:
            try:
                decode(*WAYS[0], strict=True)
            except fallback.KernelError as error:
                print(f"strict=True raised: {error}")
            else:
                print("strict=True did not raise")
                return 1
            later.clear()
        for way in WAYS[:1] if broken else WAYS:
            engine = decode(*way)
            if broken and not any("has been removed" in note for note in engine.notes.values()):
                print(f"nothing says that Gluon kernels are not used: {engine.notes}")
                return 1
        if not broken:
            before = driver.launches, len(later)
            multiply_by_experts()
            if {"swiglu_kernel", "down_kernel"} != set(later[before[1] :]) or driver.launches - before[0] != 12:
                print(f"Hopper's kernels of experts were not all launched: {sorted(later[before[1] :])}")
                return 1
            del later[before[1] :]
    print(f"{len(ahead)} kernels compiled ahead, {len(later)} later {sorted(later)}; {driver.launches} launches")
    of_gluon = {"tree_attention_kernel", "linear_kernel"}
    wrong = of_gluon & set(ahead) if broken else of_gluon - set(ahead)
    for name in wrong:
        print(f"{name} was {'' if broken else 'not '}compiled")
    return int(bool(later or wrong) or not driver.launches)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
