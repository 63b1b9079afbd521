"""gated_delta/ and its reference: against transformers' own functions, every path of a tree, and each other."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from eagle_triton.operands.gated_delta import PromptPieces
from eagle_triton.ops import gated_delta as kernels
from eagle_triton.ops.gated_delta import chunk
from eagle_triton.ops.gated_delta import tree as tree_kernels
from eagle_triton.reference import gated_delta as reference
from tests.failing import check_refused
from tests.rounding import CUDA, DTYPES, assert_close

BOTH = pytest.mark.parametrize("module", [kernels, reference], ids=["kernel", "reference"])


class Layer(NamedTuple):
    """Operands of one layer, named as the operations name them."""

    mixed: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    state: Tensor

    def tokens(self, first: int, last: int) -> Layer:
        return self._replace(mixed=self.mixed[:, first:last], a=self.a[:, first:last], b=self.b[:, first:last])

    def copied(self) -> Layer:
        return self._replace(state=self.state.clone())


def layer(
    seed: int = 0,
    batch: int = 2,
    count: int = 20,
    heads: int = 2,
    shared: int = 2,
    key_dim: int = 32,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    alike: float = 0.0,
) -> Layer:
    """Random operands. With `alike` near 1 keys are nearly equal, beta near 1 and decay slow: hardest to solve."""
    source = torch.Generator().manual_seed(seed)
    value_dim = key_dim if value_dim is None else value_dim
    keys, values = heads * key_dim, heads * shared * value_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source)

    mixed = normal(batch, count, 2 * keys + values)
    mixed[..., keys : 2 * keys] = (1 - alike) * mixed[..., keys : 2 * keys] + alike * normal(batch, 1, keys)
    a, b = normal(batch, count, heads, shared) - 8 * alike, normal(batch, count, heads, shared) + 4 * alike
    state = 0.5 * normal(batch, heads * shared, key_dim, value_dim)
    A_log, dt_bias = 0.5 * normal(heads * shared), normal(heads * shared) - 1
    mixed, a, b = (x.to(device, dtype) for x in (mixed, a, b))
    return Layer(mixed, a, b, A_log.to(device), dt_bias.to(device), state.to(device))


class Tree(NamedTuple):
    """ancestors [1, n, 1]; the path to each leaf; the greatest depth."""

    ancestors: Tensor
    paths: list[list[int]]
    depth: int


def tree(count: int, depth: int, seed: int = 0, device: str = "cpu") -> Tree:
    """A random tree: parents before children, otherwise in any order."""
    choose, paths, inner = random.Random(seed), [[0]], set()
    for node in range(1, count):
        parent = choose.choice([other for other in range(node) if len(paths[other]) <= depth])
        inner.add(parent)
        paths.append([*paths[parent], node])
    words = [sum(1 << node for node in path) for path in paths]
    words = [word - 2**64 if word >= 2**63 else word for word in words]
    leaves = [path for node, path in enumerate(paths) if node not in inner]
    return Tree(torch.tensor(words, device=device)[None, :, None], leaves, max(map(len, paths)) - 1)


def assert_near(out: Tensor, expected: Tensor, bound: float) -> None:
    """The largest error, relative to the largest value; zeros would fail, unless all has decayed to nothing."""
    assert out.shape == expected.shape
    error, top = (out.double() - expected.double()).abs().max(), expected.double().abs().max()
    assert error <= bound * top + 1e-30


def split_heads(mixed: Tensor, heads: int, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = mixed.split((heads * key_dim, heads * key_dim, mixed.shape[-1] - 2 * heads * key_dim), dim=-1)
    return q.unflatten(-1, (heads, -1)), k.unflatten(-1, (heads, -1)), v.unflatten(-1, (-1, value_dim))


# ----------------------------------------------------------------------- the references against transformers' functions


@pytest.fixture(scope="module")
def qwen():
    return pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize(("count", "dim"), [(1, 128), (2, 32), (63, 32), (64, 64), (65, 128), (130, 32)])
def test_references_agree_with_transformers(qwen, count, dim, shared):
    operands = layer(count, 2, count, 2, shared, dim)
    q, k, v = split_heads(operands.mixed, 2, dim, dim)
    g = -operands.A_log.exp() * functional.softplus(operands.a.flatten(2) + operands.dt_bias)
    q, k = (x.repeat_interleave(shared, dim=2) for x in (q, k))  # which newer versions do themselves
    inputs = q, k, v, g, operands.b.flatten(2).sigmoid()
    for theirs in (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule):
        expected, after = theirs(
            *inputs, initial_state=operands.state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        for ours in (reference.delta_recurrent, reference.delta_chunk):
            moved = operands.copied()
            assert_near(ours(*moved), expected, 3e-6)
            assert_near(moved.state, after, 3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_references_round_as_transformers_do(qwen, dtype):
    operands = layer(1, 2, 7, dtype=dtype)
    q, k, v = split_heads(operands.mixed, 2, 32, 32)
    weight, window = torch.randn(operands.mixed.shape[-1], 4).to(dtype), torch.randn(2, 3, q.shape[-1] * 8).to(dtype)
    kept = window.mT.contiguous()
    update = getattr(qwen, "causal_conv1d_update", None) or qwen.torch_causal_conv1d_update
    expected = update(operands.mixed.mT, kept, weight, None, "silu").mT
    raw = torch.empty_like(operands.mixed)
    mixed = reference.causal_conv(q, k, v.unflatten(2, (2, 2)).flatten(3), weight, window, raw=raw)
    assert_near(mixed, expected, 1e-6 if dtype == torch.float32 else 8e-3)
    assert (mixed != expected).float().mean() < 0.01 or dtype == torch.float32
    assert torch.equal(window, kept.mT) and torch.equal(raw, operands.mixed)

    theirs = qwen.Qwen3_5RMSNormGated(32, eps=1e-6).to(dtype)
    theirs.weight.data = torch.randn(32).to(dtype)
    x, z = torch.randn(2, 7, 4, 32).to(dtype), torch.randn(2, 7, 2, 64).to(dtype)
    expected = theirs(x, z.reshape(x.shape)).flatten(2)
    assert torch.equal(reference.gated_norm(x, z, theirs.weight.data, 1e-6), expected)

    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    expected, _ = qwen.torch_recurrent_gated_delta_rule(
        q, k, v, *reference.gating(*operands[1:5]), operands.state, use_qk_l2norm_in_kernel=True
    )
    assert_near(reference.delta_recurrent(*operands.copied()), expected, 1e-6 if dtype == torch.float32 else 8e-3)


@pytest.fixture(scope="module")
def nemotron():
    theirs = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    if not hasattr(theirs, "mamba2_chunk_scan") or not hasattr(theirs, "NemotronHRMSNormGated"):
        pytest.skip("this transformers has other names")
    return theirs


@pytest.mark.parametrize("count", [1, 7, 64, 200])
def test_references_agree_with_transformers_for_mamba(nemotron, count):
    operands = mamba_operands("delta_chunk", count=count, heads=2, shared=3, key_dim=16, value_dim=8)
    v, k, q = (x.unflatten(-1, (-1, 8 if x.shape[-1] == 48 else 16)) for x in operands["mixed"].split((48, 32, 32), -1))
    inputs = v, operands["a"].flatten(2), -operands["A_log"].exp(), k, q
    options = dict(D=operands["skip"], dt_bias=operands["dt_bias"], dt_softplus=True, dt_limit=(0.2, math.inf))
    expected, after = nemotron.mamba2_chunk_scan(
        *inputs, 32, initial_states=operands["state"].mT, return_final_states=True, **options
    )
    moved = copied(operands)
    for function in (reference.delta_recurrent, reference.delta_chunk):
        given = copied(moved) | dict(dt_limit=(0.2, math.inf))
        assert_near(function(**given), expected, 3e-6)
        assert_near(given["state"], after.mT, 3e-6)

    weight, bias = torch.randn(80, 4), torch.randn(80)
    rows, window = torch.randn(2, 7, 80), torch.zeros(2, 3, 80)
    expected = nemotron.causal_conv1d_fn(rows.mT, weight, bias, "silu").mT
    mixed = reference.causal_conv(rows[:, :, None], None, None, weight, window, bias=bias)
    assert_near(mixed, expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gate_before_the_norm_rounds_as_in_transformers(nemotron, dtype):
    theirs = nemotron.NemotronHRMSNormGated(48, 16)
    theirs.weight.data = torch.randn(48)
    theirs.to(dtype)
    x, z = torch.randn(2, 7, 48).to(dtype), torch.randn(2, 7, 48).to(dtype)
    by_group = x.unflatten(-1, (3, 16)), z.unflatten(-1, (3, 16))
    out = reference.gated_norm(*by_group, theirs.weight.data, 1e-6, gate_first=True)
    assert torch.equal(out, theirs(x, z))


# --------------------------------------------------------------------------------------- the references, case by case


@pytest.mark.parametrize(
    ("A_log", "a", "dt_bias", "b", "g", "beta"),
    [
        (0.0, 0.0, 0.0, 0.0, -math.log(2), 0.5),
        (math.log(2), 1.0, 0.5, 2.0, -3.402827, 0.880797),
        (0.0, 30.0, 0.0, 40.0, -30.0, 1.0),
        (0.0, -30.0, 0.0, -200.0, -9.357623e-14, 0.0),
    ],
)
def test_gating(A_log, a, dt_bias, b, g, beta):
    values = [torch.full((1, 1, 1, 1), x) for x in (a, b)] + [torch.full((1,), x) for x in (A_log, dt_bias)]
    got = reference.gating(*values)
    torch.testing.assert_close(torch.stack(got).flatten(), torch.tensor([g, beta]), rtol=2e-6, atol=0)
    assert torch.equal(reference.gating(*values, max_beta=2.0)[1], 2 * got[1])


def by_hand() -> Layer:
    """Three tokens, K = V = 2: g = log(1, 1/2, 1/2), beta = 1/2, 1, 1/2, keys of length 1."""
    q, k = torch.tensor([[1.0, 0], [0, 1], [1, 1]]), torch.tensor([[1.0, 0], [0, 1], [0.6, 0.8]])
    v = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    a, b = torch.tensor([-200.0, 0, 0])[None, :, None, None], torch.tensor([0.0, 40, 0])[None, :, None, None]
    zero = torch.zeros(1)
    return Layer(torch.cat((q, k, v), dim=1)[None], a, b, zero, zero, torch.zeros(1, 1, 2, 2))


def test_three_tokens_by_hand():
    expected = torch.tensor([[0.353553, 0.707107], [2.121320, 2.828427], [2.992829, 3.694633]])
    expected[2] /= math.sqrt(2)  # the length of its query
    chain, fork = torch.tensor([1, 3, 7]), torch.tensor([1, 3, 5])
    for function in (reference.delta_recurrent, reference.delta_chunk):
        operands = by_hand()
        torch.testing.assert_close(function(*operands)[0, :, 0], expected, rtol=0, atol=5e-6)
        after = torch.tensor([[1.2425, 1.525], [2.99, 3.70]])
        torch.testing.assert_close(operands.state[0, 0], after, rtol=0, atol=5e-6)
    answers = reference.delta_tree(*by_hand(), chain[None, :, None], 2)
    torch.testing.assert_close(answers[0, :, 0], expected, rtol=0, atol=5e-6)
    expected[2] = torch.tensor([2.577404, 3.174909]) / math.sqrt(2)
    operands, gates = by_hand(), torch.empty(1, 3, 2, 1)
    answers = reference.delta_tree(*operands, fork[None, :, None], 1, gates=gates)
    torch.testing.assert_close(answers[0, :, 0], expected, rtol=0, atol=5e-6)
    assert not operands.state.any()

    states, rows = operands.state[None].clone(), operands.mixed[None]
    path, accepted = torch.tensor([[0, 2, -1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    windows = torch.zeros(1, 1, 3, rows.shape[-1])
    reference.commit_states(states, windows, rows, rows, gates[None], path, accepted)
    after = torch.tensor([[1.705, 2.21], [1.94, 2.28]])
    torch.testing.assert_close(states[0, 0, 0], after, rtol=0, atol=5e-6)
    assert torch.equal(windows[0, 0, 1:], rows[0, 0, [0, 2]]) and not windows[0, 0, 0].any()


class Chains(NamedTuple):
    """What the paths of a tree are as chains: outputs [n, HV, V]; states and windows after each token of each path."""

    outputs: Tensor
    mixed: Tensor
    states: list[list[Tensor]]
    windows: list[list[Tensor]]


def along_paths(raw: Layer, weight: Tensor, window: Tensor, grown: Tree) -> Chains:
    """Each path of a tree of one sequence, fed token by token to the references."""
    count, value_heads, value_dim = raw.mixed.shape[1], raw.state.shape[1], raw.state.shape[3]
    heads, key_dim = raw.a.shape[2], raw.state.shape[2]
    most = max(map(len, grown.paths))
    paths = torch.tensor([path + [path[-1]] * (most - len(path)) for path in grown.paths])
    outputs, mixed = raw.mixed.new_full((count, value_heads, value_dim), torch.nan), raw.mixed[0] * torch.nan
    paths, many, steps = paths.to(window.device), len(paths), []
    state, windows = raw.state.repeat(many, 1, 1, 1), window.repeat(many, 1, 1)
    for step, nodes in enumerate(paths.T):
        q, k, v = split_heads(raw.mixed[0, nodes][:, None], heads, key_dim, value_dim)
        row = reference.causal_conv(q, k, v.unflatten(2, (heads, -1)).flatten(3), weight, windows)
        gates = raw.a[0, nodes][:, None], raw.b[0, nodes][:, None]
        output = reference.delta_recurrent(row, *gates, raw.A_log, raw.dt_bias, state)
        there = torch.tensor([step < len(path) for path in grown.paths], device=window.device)
        outputs[nodes[there]], mixed[nodes[there]] = output[there, 0], row[there, 0]
        steps.append((state.clone(), windows.clone()))
    return Chains(
        outputs,
        mixed,
        [[state[index] for state, _ in steps] for index in range(many)],
        [[window[index] for _, window in steps] for index in range(many)],
    )


def check_tree_against_paths(
    module,
    seed: int,
    count: int,
    depth: int,
    bound: float,
    extreme: bool = False,
    device: str = "cpu",
    leaves: int = 64,
    **options,
) -> None:
    """Outputs of all nodes, and state and window after accepted paths, in one step or token by token.

    `leaves`: to so many leaves; `extreme`: some g are -100 or 0, some beta 0 or 1, and one head's keys are 0.
    """
    grown = tree(count, depth, seed, device)
    raw = layer(seed, 1, count, device=device, **options)
    if extreme:
        choose = torch.Generator().manual_seed(seed)
        for gate, value in ((raw.a, 100.0), (raw.a, -200.0), (raw.b, 40.0), (raw.b, -200.0)):
            gate[(torch.rand(gate.shape, generator=choose) < 0.3).to(device)] = value
        raw.A_log.zero_(), raw.dt_bias.zero_()
    channels, heads, (_, value_heads, key_dim, value_dim) = raw.mixed.shape[-1], raw.a.shape[2], raw.state.shape
    source = torch.Generator().manual_seed(seed + 1)
    weight, window = (torch.randn(shape, generator=source).to(device) for shape in ((channels, 4), (1, 3, channels)))
    if extreme:
        weight[heads * key_dim : heads * key_dim + key_dim] = 0  # the keys of one head
    chains = along_paths(raw, weight, window, grown)

    q, k, v = split_heads(raw.mixed, heads, key_dim, value_dim)
    rows, before, state = torch.full_like(raw.mixed, torch.nan), window.clone(), raw.state.clone()
    v = v.unflatten(2, (heads, -1)).flatten(3)
    mixed = module.causal_conv(q, k, v, weight, window, grown.ancestors, raw=rows)
    assert torch.equal(window, before) and torch.equal(rows, raw.mixed)
    assert_near(mixed[0], chains.mixed, 1e-6)
    gates = torch.full((1, count, 2, value_heads), torch.nan, device=device)
    operands = raw._replace(mixed=mixed)
    outputs = module.delta_tree(*operands, grown.ancestors, grown.depth, gates=gates)
    assert torch.equal(raw.state, state)
    assert_near(outputs[0], chains.outputs, bound)

    taken = grown.paths[:: -(-len(grown.paths) // leaves)]
    many = len(taken)
    paths = torch.full((many, grown.depth + 1), -1, dtype=torch.int32)
    for index, path in enumerate(taken):
        paths[index, : len(path)] = torch.tensor(path)
    accepted = torch.tensor([random.Random(seed + i).randrange(len(path)) for i, path in enumerate(taken)])
    accepted, paths = accepted.int().to(device), paths.to(device)
    at_once = state[None].repeat(1, many, 1, 1, 1), window[None].repeat(1, many, 1, 1)
    one_by_one = tuple(x.clone() for x in at_once)
    trees = [x[None].repeat(1, many, *[1] * (x.dim() - 1)) for x in (rows, mixed, gates)]
    module.commit_states(*at_once, *trees, paths, accepted)
    for step in range(paths.shape[1]):
        now = torch.where(step <= accepted, 0, -1).int()
        module.commit_states(*one_by_one, *trees, paths[:, step : step + 1], now)
    for out, expected in zip(at_once, one_by_one, strict=True):
        assert torch.equal(out, expected)
    for index, last in enumerate(accepted.tolist()):
        path = grown.paths.index(taken[index])
        assert torch.equal(at_once[1][0, index], chains.windows[path][last])
        assert_near(at_once[0][0, index], chains.states[path][last], bound)


@pytest.mark.parametrize("group", range(10))
def test_random_trees_are_their_paths(group):
    for index in range(20):
        seed = 20 * group + index
        choose = random.Random(seed)
        sizes = dict(heads=choose.choice([1, 2]), shared=choose.choice([1, 2]), key_dim=8, value_dim=8)
        alike = choose.choice([0.0, 0.5, 0.9])
        count = choose.choice([1, 2, 63, 64, choose.randint(1, 64)])
        check_tree_against_paths(
            reference, seed, count, choose.randint(1, 15), 4e-6, index % 3 == 0, alike=alike, **sizes
        )


@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 64), (128, 128)])
def test_trees_of_the_models_heads_are_their_paths(key_dim, value_dim):
    check_tree_against_paths(reference, 7, 60, 8, 3e-6, heads=1, shared=2, key_dim=key_dim, value_dim=value_dim)


def conv_operands(dtype: torch.dtype = torch.float32, count: int = 7, taps: int = 4, device: str = "cpu") -> dict:
    """Of causal_conv: views of one product that is grouped by key head (q, k, v, z), R = 2, K = 16, V = 24."""
    torch.manual_seed(count)
    qkvz = torch.randn(2, count, 3, 16 + 16 + 48 + 48, device=device).to(dtype)
    q, k, v, _ = qkvz.split((16, 16, 48, 48), dim=-1)
    weight, window = torch.randn(240, taps, device=device).to(dtype), torch.randn(2, taps - 1, 240, device=device)
    return dict(q=q, k=k, v=v, weight=weight, window=window.to(dtype))


def delta_operands(count: int = 9, dtype: torch.dtype = torch.float32, device: str = "cpu", **sizes) -> dict:
    """Of delta_recurrent and delta_chunk: mixed, a and b are views of wider products."""
    plain = layer(count, 2, count, dtype=dtype, **sizes)
    ba = torch.cat((plain.b, plain.a), dim=-1).to(device)
    wide = torch.cat((plain.mixed, torch.full_like(plain.mixed, torch.nan)), dim=-1).to(device)
    b, a = ba.split(plain.a.shape[-1], dim=-1)
    plain = plain._replace(mixed=wide[..., : plain.mixed.shape[-1]], a=a, b=b)
    return {name: value.to(device) for name, value in plain._asdict().items()}


def tree_operands(count: int = 9, depth: int = 4, device: str = "cpu", **options) -> dict:
    """Of delta_tree: two sequences with trees of their own."""
    grown = [tree(count, depth, seed, device) for seed in (1, 2)]
    operands = delta_operands(count, device=device, **options)
    value_heads = operands["state"].shape[1]
    return dict(
        operands,
        ancestors=torch.cat([one.ancestors for one in grown]),
        depth=max(one.depth for one in grown),
        gates=torch.full((2, count, 2, value_heads), torch.nan, device=device),
    )


def norm_operands(dtype: torch.dtype = torch.float32, width: int = 24, device: str = "cpu") -> dict:
    torch.manual_seed(width)
    z = torch.randn(2, 7, 3, 200, device=device).to(dtype)[..., 50 : 50 + 2 * width]
    x, weight = torch.randn(2, 7, 6, width, device=device).to(dtype), torch.randn(width, device=device).to(dtype)
    return dict(x=x, z=z, weight=weight, eps=1e-6)


def commit_operands(
    dtype: torch.dtype = torch.float32, layers: int = 2, count: int = 9, taps: int = 4, device: str = "cpu", **sizes
) -> dict:
    """Of commit_states: four sequences, of which one accepts nothing but its root, and one is left alone."""
    several = [layer(seed, 4, count, dtype=dtype, **sizes) for seed in range(layers)]
    mixed, states = torch.stack([one.mixed for one in several]), torch.stack([one.state for one in several])
    raw = torch.randn_like(mixed)
    windows = torch.randn(layers, 4, taps - 1, raw.shape[-1]).to(dtype)
    gates = torch.stack([torch.stack(reference.gating(*one[1:5]), dim=2) for one in several])
    path = torch.tensor([[0, 3, 4, 8], [0, -1, -1, -1], [0, 1, 2, -1], [0, 1, 2, 3]], dtype=torch.int32)
    accepted = torch.tensor([3, 0, 2, -1], dtype=torch.int32)
    for left_alone in (raw, mixed, gates):
        left_alone[:, 3] = torch.nan
    values = states, windows, raw, mixed, gates, path, accepted
    names = "states", "windows", "raw", "mixed", "gates", "path", "accepted"
    return {name: value.to(device) for name, value in zip(names, values, strict=True)}


OPERANDS = {
    "causal_conv": conv_operands,
    "delta_tree": tree_operands,
    "delta_chunk": delta_operands,
    "delta_recurrent": delta_operands,
    "gated_norm": norm_operands,
    "commit_states": commit_operands,
}


def mamba_operands(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **sizes) -> dict:
    """The operands of Mamba-2's layers: conv with a bias over one product, no b, a skip, the gate before the norm."""
    operands = OPERANDS[name](dtype=dtype, device=device, **sizes)
    source = torch.Generator().manual_seed(5)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=source).to(device, dtype)

    if name == "causal_conv":
        parts = torch.cat([operands[part] for part in "qkv"], dim=-1)
        return operands | dict(q=parts, k=None, v=None, bias=normal(len(operands["weight"])))
    if name == "gated_norm":
        return operands | dict(weight=normal(operands["x"][0, 0].numel()), gate_first=True)
    if name == "commit_states":
        return operands | dict(delta_rule=False)
    operands["mixed"] *= 0.3  # keys keep their lengths, so answers are larger
    return operands | dict(b=None, skip=normal(operands["state"].shape[1]))


def copied(operands: dict) -> dict:
    """The same values in contiguous tensors of their own."""
    return {
        name: value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value
        for name, value in operands.items()
    }


@pytest.mark.parametrize("name", OPERANDS)
def test_references_read_strided_operands(name):
    operands = OPERANDS[name]()
    plain = copied(operands)
    outputs = [getattr(reference, name)(**given) for given in (operands, plain)]
    assert outputs[0] is None or torch.equal(*outputs)
    for given, other in zip(operands.values(), plain.values(), strict=True):
        assert not isinstance(given, Tensor) or torch.equal(given.nan_to_num(), other.nan_to_num())


@BOTH
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_a_chain_may_be_split_anywhere(device, module, taps):
    operands = conv_operands(taps=taps, count=9, device=device)
    once = copied(operands)
    expected = module.causal_conv(**once)
    for first in (0, 1, 3, 9):
        parts = copied(operands)
        outputs = [module.causal_conv(**part_of(parts, *piece)) for piece in ((0, first), (first, 9))]
        assert torch.equal(torch.cat(outputs, dim=1), expected)
        assert torch.equal(parts["window"], once["window"])


@BOTH
@pytest.mark.parametrize("first", [1, 64, 65])
def test_prefill_may_be_split_anywhere(device, module, first):
    operands = delta_operands(130, heads=1, device=device)
    once, parts = copied(operands), copied(operands)
    expected = reference.delta_chunk(**once)
    outputs = [module.delta_chunk(**part_of(parts, *piece)) for piece in ((0, first), (first, 130))]
    assert_near(torch.cat(outputs, dim=1), expected, 2e-6)
    assert_near(parts["state"], once["state"], 2e-6)


def part_of(operands: dict, first: int, last: int) -> dict:
    """Tokens first .. last of the operands; state or window are the same tensors."""
    return {
        name: value[:, first:last] if name in ("q", "k", "v", "mixed", "a", "b") else value
        for name, value in operands.items()
    }


@BOTH
def test_a_sequence_is_left_alone(device, module):
    """accepted = -1, though the sequence's rows hold NaN."""
    operands = commit_operands(device=device)
    operands["states"][0, 3, 0, 0, 0] = torch.nan
    before = copied(operands)
    module.commit_states(**operands)
    for name in ("states", "windows"):
        after = operands[name]
        assert torch.equal(after[:, 3].nan_to_num(nan=7.0), before[name][:, 3].nan_to_num(nan=7.0))
        assert not after[:, :3].isnan().any() and (after[:, :3] != before[name][:, :3]).any()


SPOILED = {  # each tensor of each operation
    "with a row less": lambda x: x[1:],
    "with a dimension less": lambda x: x[0],
    "of another dtype": lambda x: x.int() if x.dtype == torch.int64 else x.long(),
    "on another device": lambda x: x.to("meta"),
}
DELTA = {
    "mixed of other channels": dict(mixed=lambda x: x[..., :-1]),
    "no tokens": dict(mixed=lambda x: x[:, :0], a=lambda x: x[:, :0], b=lambda x: x[:, :0]),
    "state of other heads": dict(state=lambda x: x[:, :2]),
}
BAD = {
    "causal_conv": {
        "k unlike q": dict(k=lambda x: x[..., :8]),
        "v of other heads": dict(v=lambda x: x[:, :, :2]),
        "window too long": dict(window=lambda x: torch.cat((x, x), dim=1)),
        "integers": {name: Tensor.long for name in ("q", "k", "v", "weight", "window")},
        "ancestors of two words": dict(ancestors=lambda _: torch.ones(2, 7, 2, dtype=torch.int64)),
        "ancestors int32": dict(ancestors=lambda _: torch.ones(2, 7, 1, dtype=torch.int32)),
        "raw of another shape": dict(raw=lambda _: torch.zeros(2, 6, 240)),
        "out of another dtype": dict(out=lambda _: torch.zeros(2, 7, 240, dtype=torch.float16)),
    },
    "delta_chunk": DELTA,
    "delta_recurrent": DELTA,
    "delta_tree": DELTA | {"negative depth": dict(depth=lambda _: -1)},
    "gated_norm": {
        "z of another width": dict(z=lambda x: x[..., 1:]),
        "heads no multiple": dict(x=lambda x: x[:, :, :5]),
        "integers": {name: Tensor.long for name in ("x", "z", "weight")},
    },
    "commit_states": {
        "gates of one head less": dict(gates=lambda x: x[..., 1:]),
        "channels that are no heads": {name: lambda x: x[..., 1:] for name in ("windows", "raw", "mixed")},
    },
}
for name, make in OPERANDS.items():
    tensors = [argument for argument, value in make().items() if isinstance(value, Tensor)]
    BAD[name] = BAD[name] | {f"{x} {label}": {x: spoil} for x in tensors for label, spoil in SPOILED.items()}
REFUSED = [(name, label) for name, changes in BAD.items() for label in changes]


@BOTH
@pytest.mark.parametrize(("name", "label"), REFUSED)
def test_bad_operands_are_refused(device, module, name, label):
    operands = OPERANDS[name](device=device)
    for argument, change in BAD[name][label].items():
        operands[argument] = change(operands.get(argument))
    before = {key: value.clone() for key, value in operands.items() if isinstance(value, Tensor)}
    with pytest.raises(ValueError, match=f"^{name}: "):
        getattr(module, name)(**operands)
    for key, value in before.items():
        assert value.device.type == "meta" or torch.equal(operands[key].nan_to_num(nan=7), value.nan_to_num(nan=7))


@BOTH
@pytest.mark.parametrize("name", ["causal_conv", "delta_tree"])
def test_trees_of_more_nodes_than_bits_are_refused(device, module, name):
    operands = conv_operands(count=65, device=device) if name == "causal_conv" else delta_operands(65, device=device)
    more = dict(ancestors=torch.ones(2, 65, 1, dtype=torch.int64, device=device))
    more |= dict(depth=1) if name == "delta_tree" else {}
    with pytest.raises(ValueError, match=f"{name}: expected at most 64 nodes, got 65"):
        getattr(module, name)(**operands, **more)


# ------------------------------------------------------------------------------------------------------- the kernels


def check_against_reference(name: str, operands: dict, written: tuple[str, ...]) -> None:
    """The output and the operands that are written against the reference in the same dtype and in fp32."""
    exactly = {
        key: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in copied(operands).items()
    }
    same = copied(operands)
    before = copied(operands)
    results = [
        getattr(module, name)(**given)
        for module, given in ((kernels, operands), (reference, same), (reference, exactly))
    ]
    if results[0] is not None:
        assert_close(*results)
    for key, value in before.items():
        if key in written:
            assert_close(*(given[key].nan_to_num() for given in (operands, same, exactly)))
        elif isinstance(value, Tensor):
            assert torch.equal(operands[key].nan_to_num(), value.nan_to_num())


WRITTEN = {
    "causal_conv": ("window",),
    "delta_tree": ("gates",),
    "delta_chunk": ("state",),
    "delta_recurrent": ("state",),
    "gated_norm": (),
    "commit_states": ("states", "windows"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERANDS)
def test_kernels_agree_with_references(device, name, dtype):
    check_against_reference(name, OPERANDS[name](dtype=dtype, device=device), WRITTEN[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["delta_tree", "delta_chunk", "delta_recurrent"])
def test_a_beta_above_one(device, name, dtype):
    """It is twice the sigmoid, so that a state may change its sign (OLMo Hybrid)."""
    operands = OPERANDS[name](dtype=dtype, device=device)
    plain = copied(operands)
    check_against_reference(name, {**operands, "max_beta": 2.0}, WRITTEN[name])
    assert not torch.equal(getattr(kernels, name)(**plain), getattr(reference, name)(**{**plain, "max_beta": 2.0}))
    with pytest.raises(ValueError, match=f"^{name}: max_beta needs b"):
        getattr(kernels, name)(**{**mamba_operands(name, dtype, device), "max_beta": 2.0})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERANDS)
def test_kernels_agree_with_references_for_mamba(device, name, dtype):
    check_against_reference(name, mamba_operands(name, dtype, device), WRITTEN[name])


@pytest.mark.parametrize(
    ("count", "dtype"), [(1, torch.float16), (64, torch.float32), *((9, x) for x in DTYPES)], ids=str
)
def test_convolutions_of_trees(device, count, dtype):
    operands = conv_operands(dtype, count, 4, device)
    shape = 2, count, operands["weight"].shape[0]
    raw, out = (torch.full(shape, torch.nan, device=device, dtype=dtype) for _ in range(2))
    ancestors = torch.cat([tree(count, 8, seed, device).ancestors for seed in (3, 4)])
    check_against_reference("causal_conv", dict(operands, ancestors=ancestors, raw=raw, out=out), ("raw", "out"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "depth"), [(1, 0), (2, 1), (16, 5), (17, 16), (60, 8), (64, 15), (64, 63)])
def test_trees(device, count, depth, dtype):
    operands = tree_operands(count, depth, dtype=dtype, heads=1, device=device)
    check_against_reference("delta_tree", operands, ("gates",))


SHAPES = {
    "one head": dict(heads=1, shared=1, key_dim=16),
    "heads alone": dict(heads=3, shared=1, key_dim=32),
    "three a key": dict(heads=2, shared=3, key_dim=16),
    "K 24, V 40": dict(heads=1, shared=2, key_dim=24, value_dim=40),
    "K 8, V 8": dict(heads=2, shared=2, key_dim=8),
    "K 64, V 64": dict(heads=1, shared=2, key_dim=64),
    "K 128, V 128": dict(heads=1, shared=1, key_dim=128),
}


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["delta_tree", "delta_chunk", "delta_recurrent", "commit_states"])
def test_heads_of_any_shape(device, name, sizes):
    check_against_reference(name, OPERANDS[name](count=9, device=device, **sizes), WRITTEN[name])
    check_against_reference(name, mamba_operands(name, count=9, device=device, **sizes), WRITTEN[name])


@BOTH
@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.4, 0.9)])
@pytest.mark.parametrize("count", [1, 64, 130])
def test_chunks_of_mamba_are_their_tokens(device, module, count, limit):
    operands = mamba_operands("delta_chunk", device=device, count=count, heads=1) | dict(dt_limit=limit)
    expected = copied(operands)
    assert_near(module.delta_chunk(**operands), reference.delta_recurrent(**expected), 4e-6)
    assert_near(operands["state"], expected["state"], 4e-6)


@BOTH
@pytest.mark.parametrize("count", [3, 130])
def test_limits_of_mamba_are_for_the_first_tokens(device, module, count):
    """As if these and the others were read one after the other."""
    limit, first = (0.4, 0.9), count // 2
    operands = mamba_operands("delta_chunk", device=device, count=count, heads=1)
    limited = torch.tensor([first, 0], dtype=torch.int32, device=device)
    for name in ("delta_chunk", "delta_recurrent"):
        whole, parts = copied(operands), copied(operands)
        found = getattr(module, name)(**whole, dt_limit=limit, limited=limited)
        states, outputs = [parts["state"][:1].clone(), parts["state"][1:].clone()], []
        for sequence, cuts in (
            (0, ((0, first, limit), (first, count, (0.0, math.inf)))),
            (1, ((0, count, (0.0, math.inf)),)),
        ):
            for start, end, own in cuts:
                one = part_of(parts | dict(b=parts["a"]), start, end) | dict(b=None)
                one |= {name: one[name][sequence : sequence + 1] for name in ("mixed", "a")} | dict(
                    state=states[sequence]
                )
                outputs.append((sequence, start, reference.delta_recurrent(**one, dt_limit=own)))
        for sequence, start, out in outputs:
            assert_near(found[sequence : sequence + 1, start : start + out.shape[1]], out, 4e-6)
        assert_near(whole["state"], torch.cat(states), 4e-6)


@BOTH
@pytest.mark.parametrize("limited", [None, (9, 20, 3)])
def test_pieces_of_mamba_are_their_prompt(device, module, limited):
    """Two prompts in three pieces; the first prompt finds no memory in its slot."""
    columns = [(1, 0, 20), (0, 40, 20), (0, 60, 7)]
    pieces = PromptPieces(*torch.tensor(columns, dtype=torch.int32, device=device).T.contiguous())
    operands = mamba_operands("delta_chunk", device=device, count=20, heads=1)
    operands |= {name: torch.cat((operands[name], operands[name][:1] + 1)) for name in ("mixed", "a")}
    given = copied(operands)
    out = module.delta_chunk(**operands, pieces=pieces)
    first, other = (
        given | {n: given[n][:1] for n in ("mixed", "a")},
        given | {n: torch.cat((given[n][1], given[n][2, :7]))[None] for n in ("mixed", "a")},
    )
    first["state"], other["state"] = torch.zeros_like(given["state"][1:]), given["state"][:1]
    assert_near(out[0], reference.delta_recurrent(**first)[0], 4e-6)
    assert_near(torch.cat((out[1], out[2, :7])), reference.delta_recurrent(**other)[0], 4e-6)
    assert_near(operands["state"], torch.cat((other["state"], first["state"])), 4e-6)


@BOTH
@pytest.mark.parametrize("mamba", [False, True])
def test_only_active_sequences_are_changed(device, module, mamba):
    """Of a token of each sequence: the others' states and windows keep their bits, though they hold NaN."""
    active = torch.tensor([True, False], device=device)
    for name, kept in (("causal_conv", "window"), ("delta_recurrent", "state"), ("gated_conv", "window")):
        if name == "gated_conv":
            x, weight, window = gated_operands(2, 1, 8, 3, torch.float32, device)
            operands = dict(x=x, weight=weight, window=window)
        else:
            make = mamba_operands if mamba else lambda name, **sizes: OPERANDS[name](**sizes)
            operands = make(name, device=device, count=1)
        operands[kept][1, 0, 0] = torch.nan
        before, whole = copied(operands), copied(operands)
        outputs = [getattr(module, name)(**operands, active=active), getattr(module, name)(**whole)]
        assert torch.equal(*(each[:1] for each in outputs)) and torch.equal(operands[kept][0], whole[kept][0])
        assert torch.equal(operands[kept][1].nan_to_num(nan=7), before[kept][1].nan_to_num(nan=7))
        assert not torch.equal(operands[kept][0], before[kept][0])
    tree_too = dict(operands, ancestors=torch.ones(2, 1, 1, dtype=torch.int64, device=device), active=active)
    with pytest.raises(ValueError, match="gated_conv: active is for consecutive tokens"):
        module.gated_conv(**tree_too)


@BOTH
@pytest.mark.parametrize(("count", "depth"), [(9, 4), (60, 8)])
def test_trees_of_mamba_are_their_paths(device, module, count, depth):
    """Each path as a chain, and the states that it leaves."""
    grown = tree(count, depth, 3, device)
    operands = mamba_operands("delta_tree", device=device, count=count, heads=1, key_dim=32, value_dim=16)
    one = {name: value[:1] if name in ("mixed", "a", "state", "gates") else value for name, value in operands.items()}
    one |= dict(ancestors=grown.ancestors, depth=grown.depth)
    outputs = module.delta_tree(**one)
    raw = torch.randn_like(one["mixed"])
    for path in grown.paths[:4]:
        chain = {name: value for name, value in one.items() if name not in ("ancestors", "depth", "gates")}
        chain |= {name: one[name][:, path] for name in ("mixed", "a")} | dict(state=one["state"].clone())
        assert_near(outputs[:, path], reference.delta_recurrent(**chain), 4e-6)
        states, windows = one["state"][None].clone(), torch.zeros(1, 1, 3, raw.shape[-1], device=device)
        taken = torch.tensor([path], dtype=torch.int32, device=device)
        trees = raw[None], one["mixed"][None], one["gates"][None]
        last = torch.tensor([len(path) - 1], dtype=torch.int32, device=device)
        module.commit_states(states, windows, *trees, taken, last, delta_rule=False)
        assert_near(states[0], chain["state"], 4e-6)


@pytest.mark.parametrize("count", [1, 63, 64, 130])
@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_chunks(device, count, alike):
    """With keys that are alike, as in a text that repeats a token, powers of the system's matrix would overflow."""
    operands = delta_operands(count, heads=1, alike=alike, device=device)
    expected = copied(operands)
    assert_near(kernels.delta_chunk(**operands), reference.delta_recurrent(**expected), 4e-6)
    assert_near(operands["state"], expected["state"], 4e-6)


@BOTH
@pytest.mark.parametrize("rows", [64, 16])
def test_pieces_of_prompts_give_what_each_prompt_gives_alone(device, module, rows):
    """In forwards that cut prompts anywhere, among pieces that are nobody's; other slots stay as they are, and a prompt
    that begins finds nothing of whom its slot had before."""
    lengths = {3: 2 * rows + 1, 0: rows, 5: 5, 1: 3 * rows - 1} if rows == 64 else {3: 16, 0: 1, 5: 3}
    forwards = [[(3, 0), (3, 1), (1, 0)], [(1, 1), (1, 2), (0, 0), (5, 0)], [(3, 2)]]
    if rows == 16:
        forwards = [[(3, 0), (0, 0)], [(5, 0)]]
    slots, sizes = 6, dict(heads=1, shared=2, key_dim=16)
    whole = {slot: layer(slot, 1, length, device=device, **sizes) for slot, length in lengths.items()}
    A_log, dt_bias = whole[3].A_log, whole[3].dt_bias
    weight = torch.randn(whole[3].mixed.shape[-1], 4, generator=torch.Generator().manual_seed(1)).to(device)
    state = layer(9, slots, 1, device=device, **sizes).state
    window = torch.randn(slots, 3, len(weight), generator=torch.Generator().manual_seed(2)).to(device)
    before = state.clone(), window.clone()
    outputs = {slot: [] for slot in lengths}
    for forward in forwards:
        size = len(forward) + 2
        inputs = [torch.zeros(size, rows, *x.shape[2:], device=device) for x in whole[3][:3]]
        columns = [(0, slots * rows * 9, 0)] * size  # nobody's
        for place, (slot, piece) in enumerate(forward):
            count = min(lengths[slot] - piece * rows, rows)
            columns[place] = slot, piece * rows, count
            for mine, x in zip(inputs, whole[slot][:3], strict=True):
                mine[place, :count] = x[0, piece * rows : piece * rows + count]
        pieces = PromptPieces(*torch.tensor(columns, dtype=torch.int32, device=device).T.contiguous())
        mixed, a, b = inputs
        mixed = module.causal_conv(*split_heads(mixed, 1, 16, 32), weight, window, pieces=pieces)
        out = module.delta_chunk(mixed, a, b, A_log, dt_bias, state, pieces)
        assert out.isfinite().all()
        for place, (slot, _) in enumerate(forward):
            outputs[slot].append(out[place, : columns[place][2]])
    for slot in range(slots):
        if slot not in lengths:
            assert torch.equal(state[slot], before[0][slot]) and torch.equal(window[slot], before[1][slot])
            continue
        mine = whole[slot]._replace(state=torch.zeros(1, *state.shape[1:], device=device))
        known = torch.zeros(1, *window.shape[1:], device=device)
        mixed = reference.causal_conv(*split_heads(mine.mixed, 1, 16, 32), weight, known)
        expected = reference.delta_chunk(mixed, mine.a, mine.b, A_log, dt_bias, mine.state)
        assert_near(torch.cat(outputs[slot]), expected[0], 4e-6)
        assert_near(state[slot], mine.state[0], 4e-6)
        assert torch.equal(window[slot], known[0])


@BOTH
def test_pieces_of_prompts_must_fit(device, module):
    operands = delta_operands(20, heads=1, device=device)
    column = torch.zeros(len(operands["mixed"]), dtype=torch.int32, device=device)
    pieces, short = PromptPieces(*[column] * 3), PromptPieces(column, column, column[:1])
    long, few, conv = (
        delta_operands(65, heads=1, device=device),
        *(conv_operands(count=n, device=device) for n in (2, 9)),
    )
    out = torch.zeros(1, device=device)
    check_refused(
        (r"pieces.counts must be int32 \[2\]", lambda: module.delta_chunk(**operands, pieces=short)),
        ("at most 64 tokens, got 65", lambda: module.delta_chunk(**long, pieces=pieces)),
        ("at least a window's 3 tokens, got 2", lambda: module.causal_conv(**few, pieces=pieces)),
        ("cannot have ancestors, active, raw or out", lambda: module.causal_conv(**conv, out=out, pieces=pieces)),
    )


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # whose inverse is 0
@pytest.mark.parametrize("seed", range(40 if CUDA else 6))
def test_kernels_of_trees_are_their_paths(device, seed):
    choose = random.Random(seed)
    sizes = dict(heads=1, shared=choose.choice([1, 2]), key_dim=16, alike=choose.choice([0.0, 0.5, 0.9]))
    count = choose.choice([1, 2, 63, 64, choose.randint(1, 64)])
    leaves = 64 if CUDA else 4
    check_tree_against_paths(kernels, seed, count, choose.randint(1, 15), 4e-6, seed % 3 == 0, device, leaves, **sizes)


def test_kernels_of_a_models_trees_are_their_paths(device):
    sizes = dict(heads=16, shared=2) if CUDA else dict(heads=1, shared=1)
    check_tree_against_paths(kernels, 7, 60, 8, 3e-6, False, device, 64 if CUDA else 2, key_dim=128, **sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [dict(key_dim=32), dict(heads=1, shared=1, key_dim=128)], ids=str)
def test_a_state_has_the_same_bits_by_whatever_way_tokens_came(device, sizes, dtype):
    """Fed as a chain at once or in parts, committed at once or one by one, or decoded plainly."""
    operands = delta_operands(5, dtype, device, **sizes)
    once, parts = copied(operands), copied(operands)
    expected = kernels.delta_recurrent(**once)
    outputs = [kernels.delta_recurrent(**part_of(parts, *piece)) for piece in ((0, 1), (1, 3), (3, 5))]
    assert torch.equal(torch.cat(outputs, dim=1), expected) and torch.equal(parts["state"], once["state"])

    plain = copied(operands)
    batch, count, channels = plain["mixed"].shape
    windows = torch.zeros(1, batch, 3, channels, dtype=dtype, device=device)
    root = torch.zeros(batch, 1, dtype=torch.int32, device=device)
    gates = torch.empty(batch, count, 2, plain["state"].shape[1], device=device)
    word = torch.ones(batch, 1, 1, dtype=torch.int64, device=device)
    for token in range(count):
        one = part_of(plain, token, token + 1)
        output = kernels.delta_tree(**one, ancestors=word, depth=0, gates=gates[:, token : token + 1])
        assert torch.equal(output, expected[:, token : token + 1])
        row = one["mixed"][None]
        kernels.commit_states(plain["state"][None], windows, row, row, gates[None, :, token, None], root, root[:, 0])
    assert torch.equal(plain["state"], once["state"])

    state, rows = operands["state"].clone(), operands["mixed"][None].contiguous()
    path = torch.arange(count, dtype=torch.int32, device=device).expand(batch, -1).contiguous()
    kernels.commit_states(state[None], windows, rows, rows, gates[None], path, path[:, -1])
    assert torch.equal(state, once["state"])


@pytest.mark.parametrize("name", OPERANDS)
def test_a_sequence_depends_on_no_other(device, name):
    operands = OPERANDS[name](device=device)
    alone = copied(operands)
    together = getattr(kernels, name)(**operands)
    batch_of = {
        key: 1 if name == "commit_states" and key not in ("path", "accepted") else 0
        for key, value in alone.items()
        if isinstance(value, Tensor) and key not in ("weight", "A_log", "dt_bias")
    }
    for index in range(2):
        one = {key: value.narrow(batch_of[key], index, 1) if key in batch_of else value for key, value in alone.items()}
        output = getattr(kernels, name)(**one)
        assert output is None or torch.equal(output[0], together[index])
    for key in WRITTEN[name]:
        both = (x.narrow(batch_of[key], 0, 2) for x in (alone[key], operands[key]))
        assert torch.equal(*both)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        *(("causal_conv", argument) for argument in ("q", "k", "v", "window")),
        *(("delta_tree", argument) for argument in ("mixed", "state", "gates", "A_log")),
        *((name, argument) for name in ("delta_chunk", "delta_recurrent") for argument in ("mixed", "state")),
        *(("gated_norm", argument) for argument in ("x", "z", "weight")),
        *(("commit_states", argument) for argument in ("states", "windows", "raw", "mixed", "gates", "path")),
    ],
)
def test_rows_with_gaps_are_refused(device, name, argument):
    operands = OPERANDS[name](device=device)
    value = operands[argument]
    operands[argument] = torch.stack((value, value), dim=-1)[..., 0]
    before = copied(operands)
    with pytest.raises(ValueError, match=f"{name}: {argument} must"):
        getattr(kernels, name)(**operands)
    for key, value in before.items():
        assert not isinstance(value, Tensor) or torch.equal(operands[key].nan_to_num(), value.nan_to_num())


def test_keys_of_too_many_dimensions_are_refused(device):
    with pytest.raises(ValueError, match="delta_chunk: K must be at most 256, got 264"):
        kernels.delta_chunk(**delta_operands(1, heads=1, shared=1, key_dim=264, value_dim=8, device=device))


@pytest.fixture
def bf16_parts(monkeypatch):
    """fp32 is multiplied as on GPUs; the interpreter's product of bf16, which takes bits for numbers, is mended."""
    if CUDA:
        return
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return dot(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    for module in (tree_kernels, chunk):
        monkeypatch.setattr(module, "bf16_parts", lambda x, in_turn=False: "portable")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_bf16_parts_are_as_accurate_as_fp32(device, bf16_parts, alike, dtype):
    for name in ("delta_tree", "delta_chunk"):
        operands = OPERANDS[name](count=60, heads=1, alike=alike, device=device)
        for key in ("mixed", "a", "b"):
            operands[key] = operands[key].to(dtype)
        check_against_reference(name, operands, WRITTEN[name])
        if dtype == torch.float32:
            expected = copied(operands)
            assert_near(getattr(kernels, name)(**operands), getattr(reference, name)(**expected), 3e-6)


def test_products_of_bf16_rows_are_as_accurate_as_fp32(device, bf16_parts):
    """By the state, which is not rounded. beta is 1/2, which the interpreter too rounds as it should."""
    operands = delta_operands(70, torch.bfloat16, heads=1, device=device)
    operands["b"].fill_(0)
    expected = copied(operands)
    kernels.delta_chunk(**operands)
    reference.delta_chunk(**expected)
    assert_near(operands["state"], expected["state"], 3e-6)


def ancestors_of(parents: list[int], device: str) -> Tensor:
    """[1, n, 1] of a tree, from each node's parent."""
    words: list[int] = []
    for node, parent in enumerate(parents):
        words.append((words[parent] if parent >= 0 else 0) | 1 << node)
    return torch.tensor(words, device=device)[None, :, None]


TREE = [-1, 0, 0, 1, 1, 3, 2, 5, 7]


def gated_operands(batch, count, channels, taps, dtype, device, seed=0):
    """Rows, taps and a window of `gated_conv`."""
    source = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=source).to(device, dtype)

    return random(batch, count, 3 * channels), random(channels, taps), random(batch, taps - 1, channels)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("taps", [1, 3, 7])
@pytest.mark.parametrize("of_tree", [False, True], ids=["chain", "tree"])
def test_gated_conv(device, dtype, taps, of_tree):
    """A chain moves the window on, a tree leaves it and writes its inputs."""
    batch, channels = 2, 40
    x, weight, window = gated_operands(batch, len(TREE), channels, taps, dtype, device)
    ancestors = ancestors_of(TREE, device).expand(batch, -1, -1) if of_tree else None
    windows, raws, outs = [], [], []
    for module in (kernels, reference):
        windows.append(window.clone())
        raws.append(torch.full((batch, len(TREE), channels), 9, dtype=dtype, device=device) if of_tree else None)
        outs.append(module.gated_conv(x, weight, windows[-1], ancestors, raw=raws[-1]))
    exact = reference.gated_conv(x.double().float(), weight.float(), window.float().clone(), ancestors)
    assert_close(outs[0], outs[1], exact)
    assert torch.equal(*windows)
    b, c, rest = x.chunk(3, -1)
    if of_tree:
        assert torch.equal(*raws) and torch.equal(raws[0], b * rest) and torch.equal(windows[0], window)
        path = [0, 1, 3, 5, 7, 8]
        chain = reference.gated_conv(x[:, path].contiguous(), weight, window.clone())
        assert_close(outs[0][:, path], chain, exact[:, path])
    else:
        known = torch.cat((window, b * rest), 1)
        assert torch.equal(windows[0], known[:, known.shape[1] - taps + 1 :])
        want = functional.conv1d(known.float().mT, weight.float()[:, None], groups=channels).mT.to(dtype) * c
        assert_close(outs[0], want, exact)


def test_gated_conv_reads_pieces_of_prompts(device):
    """Of two sequences in slots 2 and 0, where the first goes on from what it knows, and the other begins."""
    x, weight, window = gated_operands(4, 8, 24, 3, torch.float32, device)
    window = torch.cat((window, window))[:5]
    pieces = PromptPieces(
        *(torch.tensor(row, dtype=torch.int32, device=device) for row in ([2, 2, 0, 1], [8, 16, 0, 0], [8, 3, 5, 0]))
    )
    windows = [window.clone(), window.clone()]
    outs = [
        module.gated_conv(x, weight, mine, pieces=pieces)
        for module, mine in zip((kernels, reference), windows, strict=True)
    ]
    for place, count in enumerate((8, 3, 5)):
        torch.testing.assert_close(outs[0][place, :count], outs[1][place, :count])
    torch.testing.assert_close(*windows)
    assert torch.equal(windows[0][[1, 3, 4]], window[[1, 3, 4]])
    whole = torch.cat((x[0], x[1, :3]))[None]
    mine = window[2:3].clone()
    torch.testing.assert_close(outs[0][:2].flatten(0, 1)[:11], reference.gated_conv(whole, weight, mine)[0])
    torch.testing.assert_close(windows[0][2:3], mine)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_commit_windows(device, dtype):
    """Paths shorter and longer than the window, of one node, and none."""
    layers, batch, kept, channels = 2, 4, 3, 24
    source = torch.Generator().manual_seed(1)
    window = torch.randn(layers, batch, kept, channels, generator=source).to(device, dtype)
    raw = torch.randn(layers, batch, len(TREE), channels, generator=source).to(device, dtype)
    path = torch.tensor([[0, 1, 3, 5, 7], [0, 2, 6, -1, -1], [0, -1, -1, -1, -1], [0, 1, -1, -1, -1]])
    path, accepted = path.to(device, torch.int32), torch.tensor([4, 2, 0, -1], dtype=torch.int32, device=device)
    found = [window.clone(), window.clone()]
    for module, mine in zip((kernels, reference), found, strict=True):
        module.commit_windows(mine, raw, path, accepted)
    assert torch.equal(*found) and torch.equal(found[0][:, 3], window[:, 3])
    assert torch.equal(found[0][:, 0], raw[:, 0, [3, 5, 7]]) and torch.equal(found[0][:, 1], raw[:, 1, [0, 2, 6]])
    assert torch.equal(found[0][:, 2], torch.cat((window[:, 2, 1:], raw[:, 2, :1]), 1))


@BOTH
def test_wrong_arguments_of_gated_conv_are_named(module):
    x, weight, window = gated_operands(1, 4, 8, 3, torch.float32, "cpu")
    path, accepted = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    check_refused(
        ("x must have three times the 8 channels", lambda: module.gated_conv(x[..., :16], weight, window)),
        ("window must be", lambda: module.gated_conv(x, weight, window[:, :1])),
        ("weight must be", lambda: module.gated_conv(x, weight.double(), window)),
        ("windows must be", lambda: module.commit_windows(window[None], x[None], path, accepted)),
    )


@pytest.mark.slow
def test_kernels_sum_over_a_state_in_one_order():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("state_layouts.py"))]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    kernels, layouts = zip(*(line.split(": ", 1) for line in result.stdout.splitlines()), strict=True)
    assert len(kernels) == 6 and all("128x32xf32" in layout for layout in layouts), result.stdout
    of_states = [re.findall(r"128x32xf32 [^>]+>", layout) for layout in layouts]
    assert all(found == of_states[0] for found in of_states), result.stdout


@pytest.mark.skipif(not CUDA, reason="times a GPU")
def test_time_grows_with_the_length_alone():
    """Eight times as many tokens take at most ten times as long: no product is of all pairs of tokens."""

    def milliseconds(count):
        operands = delta_operands(count, dtype=torch.bfloat16, device="cuda", heads=16, shared=2)
        times = []
        for _ in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            kernels.delta_chunk(**operands)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times[2:])[5]

    assert milliseconds(8192) <= 10 * milliseconds(1024)
