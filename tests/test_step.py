"""What a decode step launches beside our kernels: products, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.step import Mode, decode_step
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.families import own_ea_model as native
from eagle_triton.operands.verification import Verification
from eagle_triton.runtime.launch import recorded
from tests.tiny import random_prompt, tiny_model

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::linear"}  # linear's, where cuBLAS is faster
ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
TREES = {
    "dynamic": TreeSpec.dynamic(12, 2, 4),
    "of two words": TreeSpec.dynamic(70, 4, 8),
    "fixed": TreeSpec.fixed([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]),
    "chain": TreeSpec.chain(3),
    "plain": PLAIN,
}
SAMPLED = {
    "greedy": Mode(),
    "sampled": Mode(sampled=True, filtered=False),
    "filtered": Mode(sampled=True),
    "rejection": Mode(sampled=True, verification=Verification("rejection")),
}


class DeviceWork(TorchDispatchMode):
    """The torch operations that launch something: neither views nor allocations, which are filled with zeros, so that
    kernels may be left out."""

    def __init__(self):
        super().__init__()
        self.launched: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out, schema = function(*args, **(kwargs or {})), function._schema
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        taken = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        if schema.name in ALLOCATIONS:
            out.zero_()
        elif schema.is_mutable or not all(result.untyped_storage()._cdata in taken for result in outs):
            self.launched.append(schema.name)
        return out


def launched(model, device, spec, mode, slots):
    """The torch operations and the kernels of a step."""
    view, draft = native.read(model.to(device))
    sampling = SamplingParams(temperature=0.7, top_k=5) if mode.sampled else SamplingParams()
    engine, kernels = Engine(view, draft if spec.drafts else None, make_operations()), make_operations(kernels=True)
    with torch.no_grad(), Batch(engine, slots, spec, 90) as batch:
        batch.admit_all([Request(random_prompt(9 + slot)[0], 20, sampling) for slot in range(slots)])
        batch.step()
        with batch.state.unchanged(), recorded() as found, DeviceWork() as work:
            decode_step(kernels, view, engine.draft, batch.state, mode)
    return work.launched, found


CASES = [  # each tree in each mode, over one slot or three, and for both kinds of head
    (tree, mode, 1 + 2 * (column % 2), (row + column // 2) % 2 == 0)
    for row, tree in enumerate(TREES)
    for column, mode in enumerate(SAMPLED)
]


@pytest.mark.parametrize(("tree", "mode", "slots", "eagle3"), CASES)
def test_torch_launches_products_alone(device, tree, mode, slots, eagle3):
    operations, kernels = launched(tiny_model(eagle3=eagle3), device, TREES[tree], SAMPLED[mode], slots)
    assert set(operations) <= PRODUCTS
    assert len(kernels) > 8


def test_what_is_launched_is_seen():
    x = torch.ones(4)
    with DeviceWork() as work:
        _ = x[1:], x.view(2, 2).t(), torch.empty(3), x.new_empty(2), torch.empty_like(x)
        assert not work.launched
        x.add_(1)
        _ = x + 1, x.clone(), torch.zeros(2), torch.arange(3), x.view(2, 2).t().contiguous()
        x[1:] = 3.0
    assert len(work.launched) >= 7
