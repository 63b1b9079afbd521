"""SGLang's real modules with our kernels in their places, on a CPU, where SGLang 0.5.13 or 0.5.23 can be imported.

By hand: neither is installed for the other tests. 0.5.23 has kernels in Triton, too, which the interpreter runs
(TRITON_INTERPRET=1): ours are compared with them.
"""

import importlib

import pytest
import torch

from eagle_triton.reference import integrators as reference
from eagle_triton.sglang_plugin import patch_sglang
from tests.test_integrators import assert_same, drafted, outputs, walk_case

pytestmark = pytest.mark.upstream
VERSION = pytest.importorskip("sglang").__version__
if VERSION not in ("0.5.13", "0.5.23"):
    pytest.skip(f"sglang {VERSION} is refused", allow_module_level=True)
LEAVES = (
    "eagle_utils",
    "dflash_utils",
    *(("eagle_info", "eagle_info_v2", "ngram_info") if VERSION == "0.5.13" else ()),
)
TREES = [(1, 5, 1, 7), (3, 8, 4, 4), (2, 26, 4, 7), (2, 60, 10, 7), (2, 9, 8, 2)]


@pytest.fixture
def modules():
    return {leaf: importlib.import_module(f"sglang.srt.speculative.{leaf}") for leaf in LEAVES}


def test_restore(modules):
    before = {leaf: dict(vars(module)) for leaf, module in modules.items()}
    patch_sglang().restore()
    for leaf, module in modules.items():
        assert vars(module).keys() == before[leaf].keys()
        assert all(vars(module)[name] is value for name, value in before[leaf].items()), leaf


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["full", "tree", "packed"])
@pytest.mark.parametrize(("batch", "nodes", "k", "depth"), TREES)
def test_build_by_their_function(modules, batch, nodes, k, depth, mode):
    if mode == 2 and nodes > 32:
        pytest.skip("a word holds 32 nodes")
    parent_list, chosen = drafted(batch, k, depth, nodes, 0)
    lengths = torch.arange(3, 3 + batch)
    arguments = (lengths + 7, parent_list, chosen, chosen + 100, lengths)
    expected = reference.build_tree_efficient_triton(*arguments, int(lengths.sum()), k, depth, nodes, mode)
    buffer = torch.zeros(len(expected[0]) + 5, dtype=expected[0].dtype)
    with patch_sglang():
        build = modules["eagle_utils"].build_tree_kernel_efficient
        assert_same(build(*arguments, int(lengths.sum()), k, depth, nodes, mode), expected)
        mask, *rest = build(*arguments, 0, k, depth, nodes, mode, buffer)
    assert mask is buffer
    assert_same([mask[: len(expected[0])], *rest], expected)


def their_kernels():
    spec_tree = pytest.importorskip("sglang.kernels.ops.speculative.spec_tree")
    if hasattr(spec_tree.verify_tree_greedy_kernel_triton, "cache_hook"):
        pytest.skip("TRITON_INTERPRET=1 runs their kernels on a CPU")
    return spec_tree


@pytest.mark.parametrize("mode", [0, 1], ids=["full", "tree"])
@pytest.mark.parametrize(("batch", "nodes", "k", "depth"), TREES[:3] + TREES[4:])
def test_build_by_their_kernel(batch, nodes, k, depth, mode):
    theirs = their_kernels()
    parent_list, chosen = drafted(batch, k, depth, nodes, 1)
    lengths = torch.arange(3, 3 + batch)
    both = []
    for build in (theirs.sgl_build_tree_kernel_triton, reference.build_tree_in_place):
        size = nodes * nodes * batch + (nodes * int(lengths.sum()) if mode == 0 else 0)
        made = [torch.ones(size, dtype=torch.bool), torch.zeros(batch * nodes, dtype=torch.int64)]
        made += torch.full((3, batch, nodes), -1, dtype=torch.int64)
        build(parent_list, chosen, lengths, *made, k, depth, nodes, mode)
        both.append(made)
    assert_same(*both)


@pytest.mark.parametrize("seed", range(6))
def test_verify_by_their_kernel(seed):
    theirs = their_kernels()
    candidates, links, target, _ = walk_case(seed, 3, 3, 4, 12, 9)
    both = [outputs(3, 12, 5, "cpu") for _ in range(2)]
    theirs.verify_tree_greedy_triton(*both[0], candidates, *links, target)
    reference.verify_tree_greedy_triton(*both[1], candidates, *links, target)
    assert_same(*both)
