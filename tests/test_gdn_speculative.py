"""eagle_triton.gdn: layers, rules, drafts, verification, and speculative decoding with gated delta nets.

`python tests/test_gdn_speculative.py` runs all of it.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script

from eagle_triton import gdn
from eagle_triton.engine.model.mixers import AcceptedPath
from eagle_triton.gdn import GDNSpeculativeWorker, SimpleLMWithGDN
from eagle_triton.gdn.tree import ancestor_mask, candidate_parents, link_parents
from eagle_triton.inference import build_tree_structure
from eagle_triton.reference import gated_delta as reference
from tests.failing import check_refused

VOCABULARY = 64
COUNTS = [1, 2, 63, 64, 65, 128, 129, 300]


def close(out: Tensor, expected: Tensor, bound: float = 1e-4) -> None:
    """The largest error, relative to the largest value, and no zeros."""
    assert out.shape == expected.shape and expected.abs().max() > 0
    assert (out.double() - expected.double()).abs().max() <= bound * expected.double().abs().max()


@torch.no_grad()
def lively(module: torch.nn.Module, seed: int) -> None:
    """Random weights with which a gated delta net remembers, forgets and says something."""
    source = torch.Generator().manual_seed(seed)

    def fill(tensor: Tensor, scale: float, shift: float = 0.0) -> None:
        tensor.copy_(scale * torch.randn(tensor.shape, generator=source) + shift)

    for name, parameter in module.named_parameters():
        if name.endswith("A_log"):
            fill(parameter, 0.5)
        elif name.endswith("dt_bias"):
            fill(parameter, 1.0, -2.0)
        elif name.endswith("norm.weight"):
            fill(parameter, 0.2, 1.0)
        elif name.endswith("conv1d.weight"):
            fill(parameter, 0.4)
        elif name.endswith("in_proj_qkvz.weight"):
            fill(parameter, 2.0 / parameter.shape[1] ** 0.5)
        else:
            fill(parameter, 1.5 / parameter.shape[-1] ** 0.5)


def layer(
    seed: int = 0, heads: int = 2, shared: int = 2, dims: tuple[int, int] = (32, 32),
    dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> gdn.Qwen3GatedDeltaNet:  # fmt: skip
    net = gdn.Qwen3GatedDeltaNet(48, heads, heads * shared, *dims, dtype=dtype, device=device)
    lively(net, seed)
    return net


def model(seed: int = 0, device: str = "cpu", sharp: float = 6.0, noise: float = 0.0) -> SimpleLMWithGDN:
    """A random model; sharp: scales its logits; noise: in its last matrix, so that it is right now and then."""
    lm = SimpleLMWithGDN(VOCABULARY, 48, 2, 4, 16, 16, dtype=torch.float32, device=device).eval()
    lively(lm, seed)
    lm.lm_head.weight.data *= sharp
    source = torch.Generator().manual_seed(1)
    lm.lm_head.weight.data += noise * torch.randn(lm.lm_head.weight.shape, generator=source).to(device)
    return lm


def random_hidden(batch: int, tokens: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(batch, tokens, 48, generator=torch.Generator().manual_seed(seed)).to(device)


def random_tokens(batch: int, tokens: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed)).to(device)


def random_parents(nodes: int, seed: int) -> list[int]:
    choose = random.Random(seed)
    return [-1, *(choose.randrange(node) for node in range(1, nodes))]


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def plain_text(target: SimpleLMWithGDN, prompt: Tensor, count: int) -> list[int]:
    """Greedy decoding of a prompt [T], each token by a forward over everything before it."""
    text = prompt.tolist()
    for _ in range(count):
        logits = target(torch.tensor([text], device=prompt.device), mode="recurrent").logits
        text.append(int(logits[0, -1].argmax()))
    return text


def speculate(
    worker: GDNSpeculativeWorker, prompts: list[Tensor], steps: int, temperature: float = 0.0
) -> tuple[list[list[int]], list[list[int]]]:
    """The texts of a batch after so many steps, and the accept_length of each step."""
    texts, lengths = [prompt.tolist() for prompt in prompts], []
    for _ in range(steps):
        longest = max(map(len, texts))
        device = prompts[0].device
        input_ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
        last = torch.tensor([text[-1] for text in texts], device=device)
        seq_lens = torch.tensor([len(text) for text in texts], device=device)
        tokens, accepted = worker.generate_step(input_ids, last, seq_lens, temperature)
        for text, row, count in zip(texts, tokens.tolist(), accepted.tolist(), strict=True):
            assert row[0] == text[-1] and all(token == -1 for token in row[1 + count :])
            text.extend(row[1 : 1 + count])
        lengths.append(accepted.tolist())
    return texts, lengths


def test_import():
    """All names; and the documented example imports two of them from this file."""
    assert globals().keys() >= {"GDNSpeculativeWorker", "SimpleLMWithGDN"}
    assert gdn.__all__ == sorted(gdn.__all__)
    for name in gdn.__all__:
        assert getattr(gdn, name).__name__ == name and getattr(gdn, name).__doc__


class TestGDNLayer:
    def test_gdn_layer_forward_chunk(self, device):
        net = gdn.Qwen3GatedDeltaNet(128, 2, 2, 32, 32, conv_kernel_size=4, device=device)
        hidden = torch.randn(2, 128, 128, dtype=torch.bfloat16, device=device)
        output, state = net(hidden, mode="chunk", output_final_state=True)
        assert output.shape == (2, 128, 128) and output.dtype == torch.bfloat16
        assert state.shape == (2, 2, 32, 32) and state.dtype == torch.float32
        assert output.isfinite().all() and state.abs().max() > 0

    def test_gdn_layer_forward_recurrent(self, device):
        net = gdn.Qwen3GatedDeltaNet(128, 2, 2, 32, 32, conv_kernel_size=4, device=device)
        hidden = torch.randn(2, 1, 128, dtype=torch.bfloat16, device=device)
        before = torch.zeros(2, 2, 32, 32, device=device)
        output, state = net(hidden, mode="recurrent", initial_state=before)
        assert output.shape == (2, 1, 128) and state is None and not before.any()

    def test_select_mode(self):
        modes = {count: gdn.select_mode(count) for count in (1, 2, 128, 129)}
        assert modes == {1: "fused_decode", 2: "recurrent", 128: "recurrent", 129: "chunk"}
        with pytest.raises(ValueError, match="at least 1, got 0"):
            gdn.select_mode(0)

    @pytest.mark.parametrize("shared", [1, 2])
    @pytest.mark.parametrize("count", COUNTS)
    def test_modes_agree(self, count, shared, device):
        net, hidden = layer(count, 2, shared, (32, 16), device=device), random_hidden(2, count, count, device)
        start = 0.3 * torch.randn(2, 2 * shared, 32, 16, device=device)
        modes = ["auto", "chunk", "recurrent", *(["fused_decode"] if count == 1 else [])]
        results = [net(hidden, mode, start, output_final_state=True) for mode in modes]
        for output, state in results[1:]:
            close(output, results[0][0])
            close(state, results[0][1])
        unnormed = [net(hidden / 8, mode, start, True, use_qk_l2norm=False) for mode in ("chunk", "recurrent")]
        close(unnormed[0][0], unnormed[1][0])
        assert not torch.allclose(unnormed[0][0], net(hidden / 8, "chunk", start)[0], rtol=1e-2)

    @pytest.mark.parametrize("dim", [32, 64, 128])
    def test_modes_agree_in_bfloat16(self, dim, device):
        net = layer(1, dims=(dim, dim), dtype=torch.bfloat16, device=device)
        hidden = random_hidden(2, 100, 3, device).bfloat16()
        (chunk, _), (recurrent, _) = (net(hidden, mode) for mode in ("chunk", "recurrent"))
        torch.testing.assert_close(chunk, recurrent, rtol=2e-2, atol=2e-2)

    @pytest.mark.parametrize("cuts", [(1,), (64,), (63, 65), (2, 3, 5, 130), (299,)], ids=str)
    def test_any_split_is_one_shot(self, cuts, device):
        net, hidden = layer(2, device=device), random_hidden(2, 300, 2, device)
        expected, last = net(hidden, output_final_state=True)
        state, inputs = None, torch.zeros(2, 2 * 64 + 128, 3, device=device)
        outputs = []
        for first, end in itertools.pairwise((0, *cuts, 300)):
            output, state = net(hidden[:, first:end], "auto", state, True, conv_state=inputs)
            outputs.append(output)
        close(torch.cat(outputs, dim=1), expected)
        close(state, last)

    def test_packed_sequences_are_those_alone(self, device):
        net, hidden = layer(3, device=device), random_hidden(1, 210, 3, device)
        ends = torch.tensor([0, 1, 1, 66, 210], device=device)
        start = 0.3 * torch.randn(4, 4, 32, 32, device=device)
        inputs = torch.randn(4, 256, 3, device=device)
        moved = inputs.clone()
        output, state = net(hidden, initial_state=start, output_final_state=True, cu_seqlens=ends, conv_state=moved)
        for index, (first, end) in enumerate(itertools.pairwise(ends.tolist())):
            if first == end:
                assert torch.equal(state[index], start[index]) and torch.equal(moved[index], inputs[index])
                continue
            alone = inputs[index : index + 1].clone()
            out, after = net(hidden[:, first:end], "auto", start[index : index + 1], True, conv_state=alone)
            assert torch.equal(out, output[:, first:end]) and torch.equal(after[0], state[index])
            assert torch.equal(alone[0], moved[index])

    def test_is_the_layer_of_transformers(self):
        module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
        config = module.Qwen3NextConfig(
            hidden_size=48, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=16,
        )  # fmt: skip
        theirs, ours = module.Qwen3NextGatedDeltaNet(config, 0).float().eval(), layer(4, dims=(32, 16))
        theirs.load_state_dict(ours.state_dict())
        hidden = random_hidden(2, 70, 4)
        with torch.no_grad():
            close(ours(hidden)[0], theirs(hidden), 1e-5)

    def test_a_new_layer_is_finite(self):
        for seed in range(20):
            torch.manual_seed(seed)
            net = gdn.Qwen3GatedDeltaNet(16, 4, 8, 8, 8, dtype=torch.float32, device="cpu")
            assert net.A_log.isfinite().all() and net.A_log.dtype == torch.float32

    def test_conv1d_in_torch_is_the_same(self, device):
        hidden, net = random_hidden(1, 9, 5, device), layer(5, device=device)
        expected, _ = net(hidden)
        net.use_triton_conv1d = False
        close(net(hidden)[0], expected, 1e-5)

    def test_norm_before_or_behind_the_gate(self, device):
        x, gate = random_hidden(2, 3, 6, device), random_hidden(2, 3, 7, device)
        silu = gate * gate.sigmoid()
        for before in (True, False):
            norm = gdn.RMSNormGated(48, norm_before_gate=before, dtype=torch.float32, device=device)
            lively(norm, 8)
            inner = x if before else x * silu
            normed = norm.weight * inner * torch.rsqrt(inner.square().mean(-1, keepdim=True) + 1e-6)
            close(norm(x, gate), normed * silu if before else normed, 1e-5)
        with pytest.raises(ValueError, match=r"must be \[..., 48\]"):
            norm(x[..., :5], gate[..., :5])

    def test_what_cannot_be_is_refused(self):
        net, hidden = layer(), random_hidden(1, 4)
        check_refused(
            ("multiple of num_k_heads", lambda: gdn.Qwen3GatedDeltaNet(16, 2, 3, 8, 8, device="cpu")),
            (r"must be \[B, T, 48\]", lambda: net(hidden[0])),
            ("one of auto, chunk", lambda: net(hidden, "fast")),
            ("one token, got 4", lambda: net(hidden, "fused_decode")),
            ("initial_state must be", lambda: net(hidden, initial_state=torch.zeros(1, 2, 2, 2))),
            ("conv_state must be", lambda: net(hidden, conv_state=torch.zeros(1, 3, 256))),
            ("ends from 0 to T = 4", lambda: net(hidden, cu_seqlens=torch.tensor([0, 3]))),
        )


def operands(
    seed: int, batch: int, count: int, heads: int = 2, shared: int = 2, key_dim: int = 16, value_dim: int = 8
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, a, b."""
    source = torch.Generator().manual_seed(seed)
    shapes = [(heads, key_dim)] * 2 + [(heads * shared, value_dim), (heads * shared,), (heads * shared,)]
    q, k, v, a, b = (torch.randn(batch, count, *shape, generator=source) for shape in shapes)
    return q, k, v, a, b


class TestGDNFunctions:
    """The functions with the documented signatures."""

    def test_gating(self):
        """In fp32, of rows or of sequences, as the engine's operations gate."""
        a, b = 20 * torch.randn(2, 3, 2, 2), 20 * torch.randn(2, 3, 2, 2)
        A_log, dt_bias = torch.randn(4), torch.randn(4)
        expected = torch.stack(reference.gating(a, b, A_log, dt_bias))
        for function in (gdn.fused_gdn_gating, gdn.compute_gating_params):
            found = torch.stack(function(A_log, a.flatten(2), b.flatten(2), dt_bias))
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)
            rows = torch.stack(function(A_log, a[0].flatten(1), b[0].flatten(1), dt_bias))
            assert torch.equal(rows, found[:, :1])

    @pytest.mark.parametrize("count", COUNTS)
    def test_chunks_agree_with_tokens(self, count):
        q, k, v, a, b = operands(count, 2, count)
        state = torch.randn(2, 4, 16, 8)
        given = (q, k, v, -a.abs(), b.sigmoid(), 0.3, state, True)
        (chunk, after), (recurrent, last) = (
            rule(*given, use_qk_l2norm_in_kernel=True)
            for rule in (gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule)
        )
        close(chunk, recurrent)
        close(after, last)
        turned = (x.transpose(1, 2) for x in given[:5])
        by_head, _ = gdn.chunk_gated_delta_rule(*turned, *given[5:], None, True, True)
        assert torch.equal(by_head.transpose(1, 2), chunk)
        assert gdn.chunk_gated_delta_rule(*given[:5])[1] is None

    def test_packed_sequences_are_those_alone(self):
        q, k, v, a, b = operands(0, 1, 210)
        g, beta, ends = -a.abs(), b.sigmoid(), torch.tensor([0, 3, 3, 70, 210])
        start = torch.randn(4, 4, 16, 8)
        for rule in (gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule):
            output, state = rule(q, k, v, g, beta, None, start, True, ends, use_qk_l2norm_in_kernel=True)
            assert output.shape == v.shape and torch.equal(state[1], start[1])
            for index, (first, end) in enumerate(itertools.pairwise(ends.tolist())):
                if first < end:
                    part = [x[:, first:end] for x in (q, k, v, g, beta)]
                    out, after = rule(*part, None, start[index : index + 1], True, use_qk_l2norm_in_kernel=True)
                    close(output[:, first:end], out, 1e-5)
                    close(state[index], after[0], 1e-5)

    @pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
    @pytest.mark.parametrize("l2norm", [False, True], ids=["as it is", "l2norm"])
    def test_slots_that_are_not_named_stay_bit_identical(self, packed, l2norm, device):
        """Both updates, three sequences, of which one is padding, in a pool of six."""
        q, k, v, a, b = (x.to(device) for x in operands(1, 3, 5))
        k = k / 4
        A_log, dt_bias = torch.randn(4, device=device), torch.randn(4, device=device) - 2
        lengths, ends = [5, 2, 4] if packed else [5, 5, 5], None
        if packed:
            q, k, v, a, b = (
                torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)])[None] for x in (q, k, v, a, b)
            )
            ends = torch.tensor([0, 5, 7, 11], device=device)
        pool = torch.randn(6, 4, 16, 8, device=device)
        slots = torch.tensor([4, -1, 1], dtype=torch.int32, device=device)
        g, beta = gdn.compute_gating_params(A_log, a, b, dt_bias)
        pools = [pool.clone(), pool.clone()]
        outputs = [
            gdn.fused_recurrent_gated_delta_rule_update(
                q, k, v, g, beta, pools[0], slots, ends, use_qk_l2norm_in_kernel=l2norm
            ),
            gdn.fused_sigmoid_gating_delta_rule_update(
                A_log, a, dt_bias, q=q, k=k, v=v, b=b, initial_state_source=pools[1], initial_state_indices=slots,
                use_qk_l2norm_in_kernel=l2norm, cu_seqlens=ends,
            ),
        ]  # fmt: skip
        begins = [0, 5, 7] if packed else [0, 0, 0]
        for index, slot in ((0, 4), (2, 1)):
            row, first = 0 if packed else index, begins[index]
            part = [x[row : row + 1, first : first + lengths[index]] for x in (q, k, v, g, beta)]
            expected, after = gdn.fused_recurrent_gated_delta_rule(
                *part, None, pool[slot : slot + 1], True, use_qk_l2norm_in_kernel=l2norm
            )
            for output, moved in zip(outputs, pools, strict=True):
                close(output[row : row + 1, first : first + lengths[index]], expected, 1e-5)
                close(moved[slot], after[0], 1e-5)
        for output, moved in zip(outputs, pools, strict=True):
            assert all(torch.equal(moved[slot], pool[slot]) for slot in (0, 2, 3, 5))
            assert not (output[0, 5:7] if packed else output[1]).any()

    def test_update_without_state_or_outputs(self):
        q, k, v, a, b = operands(2, 2, 4)
        given, slots = (q, k, v, -a.abs(), b.sigmoid()), torch.tensor([0, 2])
        pool = torch.randn(3, 4, 16, 8)
        before, buffer = pool.clone(), torch.full((3, 6, 4, 16, 8), torch.nan)
        update = gdn.fused_recurrent_gated_delta_rule_update
        expected = update(*given, pool.clone(), slots)
        output = update(
            *given, pool, slots, disable_state_update=True, intermediate_states_buffer=buffer, cache_steps=6
        )
        assert torch.equal(pool, before) and torch.equal(output, expected)
        assert buffer[1].isnan().all() and buffer[:, 4:].isnan().all()
        assert update(*given, pool, slots, disable_output_calculation=True) is None
        assert torch.equal(pool[[0, 2]], buffer[[0, 2], 3]) and torch.equal(pool[1], before[1])

    @pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
    @pytest.mark.parametrize("activation", [None, "silu"])
    def test_convolution_is_torchs(self, bias, activation, device):
        """Prompts in one piece, in two, packed, and token by token."""
        torch.manual_seed(0)
        x, weight = torch.randn(2, 10, 9, device=device), torch.randn(10, 4, device=device)
        bias = torch.randn(10, device=device) if bias else None
        expected = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=3, groups=10)[..., :9]
        expected = torch.nn.functional.silu(expected) if activation else expected
        close(gdn.causal_conv1d_fn(x, weight, bias, activation=activation), expected, 1e-5)

        states = torch.randn(5, 10, 3, device=device)
        before, slots = states.clone(), torch.tensor([3, 0], dtype=torch.int32, device=device)
        first = gdn.causal_conv1d_fn(x[..., :4], weight, bias, states, cache_indices=slots, activation=activation)
        rest = x[..., 4:8].transpose(0, 1).flatten(1)  # the two sequences, packed
        second = gdn.causal_conv1d_fn(
            rest, weight, bias, states, torch.tensor([0, 4, 8], device=device), [4, 4], slots,
            torch.tensor([True, True], device=device), activation,
        ).unflatten(1, (2, 4)).transpose(0, 1)  # fmt: skip
        third = gdn.causal_conv1d_update(x[..., 8], states, weight, bias, activation, slots)
        close(torch.cat((first, second, third[..., None]), dim=2), expected, 1e-5)
        assert torch.equal(states[[3, 0]], x[..., -3:]) and torch.equal(states[[1, 2, 4]], before[[1, 2, 4]])
        padding = torch.tensor([-1, 0], dtype=torch.int32, device=device)
        assert not gdn.causal_conv1d_update(x, states, weight, bias, activation, padding)[0].any()
        assert torch.equal(states[3], x[0, :, -3:])

    @pytest.mark.parametrize("activation", [None, "silu"])
    def test_convolution_of_a_tree_is_that_of_its_paths(self, activation, device):
        parents = random_parents(12, 3)
        x, weight, states = (torch.randn(shape, device=device) for shape in ((1, 10, 12), (10, 4), (2, 10, 3)))
        slots, windows = torch.tensor([1], device=device), torch.zeros(2, 12, 10, 3, device=device)
        before, tree = states.clone(), torch.tensor([parents], dtype=torch.int32, device=device)
        links = torch.full((2, 1, 12), -1, dtype=torch.int32, device=device)
        for node in range(11, 0, -1):
            links[1, 0, node] = links[0, 0, parents[node]]
            links[0, 0, parents[node]] = node
        found = torch.zeros_like(tree)
        outputs = [
            gdn.causal_conv1d_update(x, states, weight, None, activation, slots, windows, retrieve_parent_token=tree),
            gdn.causal_conv1d_update(x, states, weight, None, activation, slots, None, *links, found),
        ]
        assert torch.equal(found, tree) and torch.equal(states, before) and not windows[0].any()
        for node in range(12):
            path, pool = path_to(parents, node), states.clone()
            expected = gdn.causal_conv1d_update(x[..., path], pool, weight, None, activation, slots)
            assert torch.equal(windows[1, node], pool[1])
            for output in outputs:
                close(output[0, :, node], expected[0, :, -1], 1e-5)

    def test_one_door(self):
        q, k, v, a, b = operands(4, 1, 1)
        A_log, dt_bias = torch.randn(4), torch.randn(4)
        g, beta = gdn.compute_gating_params(A_log, a, b, dt_bias)
        recommended = gdn.GatedDeltaRuleOp.get_recommended_mode
        assert [recommended(1, True), recommended(1), recommended(128), recommended(129)] == [
            "sigmoid", "recurrent", "recurrent", "chunk",
        ]  # fmt: skip
        pools = torch.zeros(3, 2, 4, 16, 8)
        slots = torch.tensor([1])
        options = {"use_qk_l2norm_in_kernel": True}
        door = gdn.GatedDeltaRuleOp.forward
        expected, state = door(q, k, v, g, beta, output_final_state=True, **options)
        close(door(q, k, v, g, beta, mode="chunk", **options)[0], expected, 1e-5)
        pool = {"initial_state_source": pools[0], "initial_state_indices": slots}
        assert torch.equal(door(q, k, v, g, beta, "recurrent", **pool, **options)[0], expected)
        pool["initial_state_source"] = pools[1]
        gates = {"A_log": A_log, "a": a, "b": b, "dt_bias": dt_bias}
        close(door(q, k, v, None, None, **gates, **pool, **options)[0], expected, 1e-5)
        close(pools[1, 1], state[0], 1e-5)
        check_refused(
            ("auto, chunk, recurrent or sigmoid", lambda: door(q, k, v, g, beta, "fast")),
            ("needs g and beta", lambda: door(q, k, v, None, None)),
            ("at least 1", lambda: recommended(0)),
        )

    def test_what_cannot_be_is_refused(self):
        q, k, v, a, b = operands(5, 2, 3)
        g, beta, pool, slots = -a.abs(), b.sigmoid(), torch.zeros(3, 4, 16, 8), torch.tensor([0, 1])
        update = gdn.fused_recurrent_gated_delta_rule_update
        parents = torch.tensor([[-1, 0, 0]] * 2)
        x, weight = torch.zeros(2, 10, 3), torch.zeros(10, 4)
        before = pool.clone()
        check_refused(
            ("v must have a multiple", lambda: gdn.chunk_gated_delta_rule(q, k, v[:, :, :3], g, beta)),
            ("beta must be floats", lambda: gdn.chunk_gated_delta_rule(q, k, v, g, beta[:, :2])),
            ("v must be float32", lambda: gdn.chunk_gated_delta_rule(q, k, v.double(), g, beta)),
            ("one row of T tokens", lambda: gdn.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=slots)),
            ("distinct and below 3", lambda: update(q, k, v, g, beta, pool, torch.tensor([1, 1]))),
            ("distinct and below 3", lambda: update(q, k, v, g, beta, pool, torch.tensor([0, 3]))),
            ("be float32", lambda: update(q, k, v, g, beta, pool.half(), slots)),
            ("a tree has no last", lambda: update(q, k, v, g, beta, pool, slots, retrieve_parent_token=parents)),
            (
                "below its token's own",
                lambda: update(
                    q, k, v, g, beta, pool, slots, disable_state_update=True, retrieve_parent_token=parents + 2
                ),
            ),
            (
                "at least 3",
                lambda: update(
                    q, k, v, g, beta, pool, slots, intermediate_states_buffer=torch.zeros(3, 2, 4, 16, 8)
                ),
            ),
            ("silu, swish or None", lambda: gdn.causal_conv1d_fn(x, weight, activation="gelu")),
            ("for x", lambda: gdn.causal_conv1d_fn(x, weight, query_start_loc=slots)),
            (r"has_initial_state must be bool \[2\]", lambda: gdn.causal_conv1d_fn(
                x, weight, None, torch.zeros(2, 10, 3), has_initial_state=torch.tensor([True]))),
            (r"slots, 10, 3", lambda: gdn.causal_conv1d_update(x, torch.zeros(2, 3, 10), weight)),
            ("both or neither", lambda: gdn.causal_conv1d_update(
                x, torch.zeros(2, 10, 3), weight, retrieve_next_token=parents)),
            ("A_log and dt_bias", lambda: gdn.fused_gdn_gating(a[0, 0], a, b[:1], a[0, 0])),
        )  # fmt: skip
        assert torch.equal(pool, before)


class Serving:
    """A layer as a serving engine runs it: flat tokens, pools, slots."""

    def __init__(self, net: gdn.Qwen3GatedDeltaNet, slots: int) -> None:
        self.net, device = net, net.A_log.device
        self.backend = gdn.GDNAttnBackend(device)
        self.conv_state = torch.randn(slots, 2 * 64 + 128, 3, device=device)
        self.ssm_state = 0.3 * torch.randn(slots, 4, 32, 32, device=device)

    def arguments(self, hidden: Tensor, slots: list[int], lengths: list[int]) -> dict[str, object]:
        """Of both forwards, for tokens hidden [T, 48]."""
        net, device = self.net, hidden.device
        ops_heads = net.in_proj_qkvz(hidden).unflatten(-1, (2, -1)), net.in_proj_ba(hidden).unflatten(-1, (2, -1))
        q, k, v, self.z = ops_heads[0].split((32, 32, 64, 64), -1)
        b, a = (gate.flatten(1) for gate in ops_heads[1].split(2, -1))
        return {
            "mixed_qkv": torch.cat([x.flatten(1) for x in (q, k, v)], -1), "conv_weights": net.conv1d.weight[:, 0],
            "bias": None, "activation": "silu", "key_dim": 64, "value_dim": 128, "attention_tp_size": 1,
            "head_k_dim": 32, "head_v_dim": 32, "a": a, "b": b, "A_log": net.A_log, "dt_bias": net.dt_bias,
            "conv_state": self.conv_state, "ssm_state": self.ssm_state,
            "cache_indices": torch.tensor(slots, dtype=torch.int32, device=device),
            "query_start_loc": torch.tensor([0, *lengths], device=device).cumsum(0),
        }  # fmt: skip

    def output(self, out: Tensor) -> Tensor:
        """[1, T, HV, V] -> [T, 48]"""
        z = self.z.reshape(out.shape)
        return self.net.out_proj(self.net.norm(out, z).flatten(2))[0]


class TestGDNAttnBackend:
    """The layer by the arguments of a serving engine's backend."""

    @torch.no_grad()
    def test_prompts_and_decoding_are_the_layer(self, device):
        net, hidden = layer(6, device=device), random_hidden(2, 200, 6, device)
        serving, lengths = Serving(net, 5), [130, 7]
        kept = serving.conv_state.clone(), serving.ssm_state.clone()
        parts = [hidden[index, :length] for index, length in enumerate(lengths)]
        given = serving.arguments(torch.cat(parts), [4, 2], lengths)
        out = serving.output(serving.backend.forward_extend(**given, seq_len=137))
        expected = [net(hidden[index : index + 1, : length + 3])[0][0] for index, length in enumerate(lengths)]
        for got, want, length in zip(out.split(lengths), expected, lengths, strict=True):
            close(got, want[:length])
        given = serving.arguments(
            torch.stack([hidden[index, n : n + 2] for index, n in enumerate(lengths)]).flatten(0, 1), [4, 2], [2, 2]
        )
        goes_on = torch.ones(2, dtype=torch.bool, device=device)
        out = serving.output(serving.backend.forward_extend(**given, seq_len=4, has_initial_state=goes_on))
        for got, want, length in zip(out.split(2), expected, lengths, strict=True):
            close(got, want[length : length + 2])
        following = torch.stack([hidden[index, n + 2] for index, n in enumerate(lengths)] + [hidden[0, 0]])
        given = serving.arguments(following, [4, 2, -1], [1, 1, 1])
        out = serving.backend.forward_decode(**given)
        assert out.shape == (1, 3, 4, 32) and not out[0, 2].any()
        for got, want in zip(serving.output(out), expected, strict=False):
            close(got, want[-1])
        for pool, before in zip((serving.conv_state, serving.ssm_state), kept, strict=True):
            assert torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]])

    @torch.no_grad()
    @pytest.mark.parametrize("l2norm", [True, False], ids=["l2norm", "as it is"])
    @pytest.mark.parametrize("states", [True, False], ids=["states", "no states"])
    def test_trees_are_their_paths(self, states, l2norm, device):
        net, nodes = layer(7, device=device), 24
        net.in_proj_qkvz.weight *= 1 if l2norm else 0.3
        serving, trees = Serving(net, 4), [random_parents(nodes, seed) for seed in (1, 2)]
        hidden = random_hidden(2, nodes, 7, device)
        pools = [serving.conv_state, serving.ssm_state]
        kept = [pool.clone() for pool in pools]
        windows = torch.zeros(4, nodes, 256, 3, device=device)
        buffer = torch.zeros(4, nodes, 4, 32, 32, device=device) if states else None
        options = {"is_target_verify": True, "draft_token_num": nodes, "seq_len": 2 * nodes, "use_qk_l2norm": l2norm}
        out = serving.backend.forward_extend(
            **serving.arguments(hidden.flatten(0, 1), [3, 1], [nodes, nodes]), **options,
            intermediate_state_cache=buffer, intermediate_conv_window_cache=windows,
            retrieve_parent_token=torch.tensor(trees, dtype=torch.int32, device=device),
        )  # fmt: skip
        out = serving.output(out).unflatten(0, (2, nodes))
        assert all(torch.equal(pool, before) for pool, before in zip(pools, kept, strict=True))
        for index, slot in enumerate((3, 1)):
            for node in range(nodes):
                path = path_to(trees[index], node)
                inputs = kept[0][slot][None].clone()
                want, after = net(
                    hidden[index, path][None], "recurrent", kept[1][slot][None], True, None, l2norm, conv_state=inputs
                )
                close(out[index, node], want[0, -1])
                close(windows[slot, node], inputs[0], 1e-5)
                if buffer is not None:
                    close(buffer[slot, node], after[0])

    @torch.no_grad()
    def test_what_cannot_be_is_refused_before_anything_is_written(self):
        net = layer()
        serving = Serving(net, 3)
        pools = [serving.conv_state, serving.ssm_state]
        kept = [pool.clone() for pool in pools]
        given = serving.arguments(random_hidden(1, 4)[0], [0, 2], [2, 2])
        extend, decode = serving.backend.forward_extend, serving.backend.forward_decode
        check_refused(
            ("2 tokens, got 4", lambda: decode(**given)),
            ("seq_len must be 4", lambda: extend(**given, seq_len=3)),
            ("must have draft_token_num tokens", lambda: extend(**given, seq_len=4, is_target_verify=True)),
            ("the same number of slots", lambda: extend(**{**given, "ssm_state": pools[1][:2]}, seq_len=4)),
            ("distinct and below", lambda: extend(**{**given, "cache_indices": torch.tensor([0, 0])}, seq_len=4)),
            (r"a and b \[T, 4\]", lambda: extend(**{**given, "a": pools[0][:1]}, seq_len=4)),
        )
        assert all(torch.equal(pool, before) for pool, before in zip(pools, kept, strict=True))


class TestSimpleLMWithGDN:
    def test_outputs(self, device):
        lm, tokens = model(device=device), random_tokens(2, 5, device=device)
        out = lm(tokens)
        assert out.logits.shape == (2, 5, VOCABULARY) and out.past_key_values is out.hidden_states is None
        out = lm(tokens, use_cache=True, return_hidden=True)
        assert out.hidden_states.shape == (2, 5, 48) and out.past_key_values is out.past_state
        assert out.past_state.states.shape == (1, 2, 4, 16, 16) and out.past_state.windows.shape == (1, 2, 3, 128)
        assert {parameter.dtype for parameter in SimpleLMWithGDN(device=device).parameters()} == {
            torch.bfloat16, torch.float32,  # A_log and dt_bias
        }  # fmt: skip

    def test_any_split_is_one_shot(self, device):
        lm, tokens = model(device=device), random_tokens(2, 150, device=device)
        expected, past, logits = lm(tokens).logits, None, []
        for first, end in itertools.pairwise((0, 1, 2, 131, 150)):
            before = None if past is None else [tensor.clone() for tensor in past.tensors]
            out = lm(tokens[:, first:end], past_state=past, use_cache=True)
            assert before is None or all(map(torch.equal, before, past.tensors))
            past = out.past_state
            logits.append(out.logits)
        close(torch.cat(logits, dim=1), expected)

    @torch.no_grad()
    def test_trees_are_their_paths(self, device):
        """Random trees: logits of all nodes, and state and window after a commit of any of them."""
        lm = model(3, device)
        for seed in range(60):
            nodes = random.Random(seed).choice([1, 2, 5, 8, 21, 64])
            parents = random_parents(nodes, seed)
            past = lm(random_tokens(1, 5, seed, device), use_cache=True).past_state
            tokens, tree = random_tokens(1, nodes, seed + 1, device), torch.tensor([parents], device=device)
            depth = max(len(path_to(parents, node)) for node in range(nodes)) - 1
            hidden, pending = lm.read_tree(tokens, ancestor_mask(tree), depth, past)
            path = path_to(parents, random.Random(seed).randrange(nodes))
            out = lm(tokens[:, path], past_state=past, use_cache=True, mode="recurrent")
            close(lm.logits(hidden)[:, path], out.logits)
            row = torch.tensor([path], dtype=torch.int32, device=device)
            past.commit(
                gdn_operations(device), pending,
                AcceptedPath(row[:, 0], row, torch.tensor([len(path) - 1], dtype=torch.int32, device=device)),
            )  # fmt: skip
            for committed, expected in zip(past.tensors, out.past_state.tensors, strict=True):
                close(committed, expected)

    def test_what_cannot_be_is_refused(self):
        lm = model()
        with pytest.raises(ValueError, match=r"must be \[B, T\]"):
            lm(random_tokens(1, 4)[0])
        with pytest.raises(ValueError, match="past_state must hold"):
            lm(random_tokens(1, 4), past_state=lm.new_state(2))


def gdn_operations(device: str):
    from eagle_triton.gdn.operations import operations_for

    return operations_for(torch.empty(0, device=device))


class TestGDNDraftWorker:
    def test_draft_step(self, device):
        lm = SimpleLMWithGDN(1000, 128, 2, 2, 32, 32, device=device).eval()
        worker = gdn.GDNDraftWorker(lm, topk=4, num_steps=2, device=device)
        tokens = torch.randint(0, 1000, (2, 10), device=device)
        scores, token_ids, hidden, past = worker.draft_step(tokens, past_state=None)
        assert scores.shape == token_ids.shape == (2, 4) and hidden.shape == (2, 4, 128)
        probabilities = lm(tokens).logits[:, -1].float().softmax(-1)
        torch.testing.assert_close(scores, probabilities.gather(1, token_ids), rtol=1e-4, atol=0)
        assert (scores.diff() <= 0).all() and torch.equal(scores[:, 0], scores.amax(1))
        again = worker.draft_step(token_ids[:, :1], past)[0]
        expected = lm(token_ids[:, :1], past_state=past).logits[:, -1].float().softmax(-1).topk(4).values
        torch.testing.assert_close(again, expected, rtol=1e-4, atol=0)
        assert torch.equal(again, worker.draft_step(token_ids[:, :1], past_state=past)[0])
        assert not torch.equal(again, worker.draft_step(token_ids[:, :1])[0])
        for given in ({"hidden_states": hidden}, {"hidden_states": hidden, "past_state": past}):
            with pytest.raises(TypeError, match=r"hidden_states are not read.*got Tensor: call draft_step\("):
                worker.draft_step(token_ids[:, :1], **given)

    def test_generate_draft_tree(self, device):
        lm = SimpleLMWithGDN(1000, 128, 2, 2, 32, 32, device=device).eval()
        worker = gdn.GDNDraftWorker(lm, topk=4, num_steps=2, device=device)
        assert worker.num_draft_tokens == 8
        tokens = torch.randint(0, 1000, (2, 10), device=device)
        drafts, parent_list, chosen = worker.generate_draft_tree(tokens, tokens[:, -1])
        assert drafts.shape == chosen.shape == (2, 7) and parent_list.shape == (2, 5)
        assert drafts.dtype == parent_list.dtype == chosen.dtype == torch.int64

    @pytest.mark.parametrize(("topk", "steps"), [(4, 2), (3, 4), (1, 3), (2, 1)])
    def test_tree_is_what_a_state_for_each_branch_drafts(self, topk, steps, device):
        """EAGLE-2's beam, every node's followers by a plain forward over all that stands above it."""
        lm, tokens = model(5, device), random_tokens(2, 9, 5, device)
        worker = gdn.GDNDraftWorker(lm, topk, steps, num_draft_tokens=max(topk * steps, 2))
        drafts, parent_list, chosen = worker.generate_draft_tree(tokens, tokens[:, -1])
        for row in range(2):
            candidates, beam, expanded = [], [(0.0, [])], [-1]
            for _ in range(steps):
                children = []
                for score, above in beam:
                    text = torch.cat((tokens[row], tokens.new_tensor(above)))[None]
                    best = lm(text, mode="recurrent").logits[0, -1].log_softmax(-1).topk(topk)
                    children += [
                        (score + float(value), [*above, int(token)])
                        for value, token in zip(best.values, best.indices, strict=True)
                    ]
                order = sorted(range(len(children)), key=lambda index: -children[index][0])[:topk]
                expanded += [len(candidates) + index for index in order]
                candidates += children
                beam = [children[index] for index in order]
            kept = sorted(sorted(range(len(candidates)), key=lambda index: -candidates[index][0])[: drafts.shape[1]])
            assert chosen[row].tolist() == kept
            assert drafts[row].tolist() == [candidates[index][1][-1] for index in kept]
            assert parent_list[row].tolist() == expanded[: topk * (steps - 1) + 1]

    def test_full_tree_has_all_candidates(self, device):
        lm, tokens = model(6, device), random_tokens(1, 6, 6, device)
        for steps, count in ((1, 4), (2, 20), (3, 84)):
            worker = gdn.GDNDraftWorker(lm, 4, steps, expansion="full")
            drafts, parent_list, chosen = worker.generate_draft_tree(tokens, tokens[:, -1])
            assert worker.num_draft_tokens == count + 1 and chosen.tolist() == [[*range(count)]]
            parents = candidate_parents(parent_list, chosen, 4)[0].tolist()
            assert all(parents[node] == (node - 1) // 4 for node in range(1, count + 1))
            for node in range(1, count + 1, 7):
                text = torch.cat((tokens[0], drafts[0, [n - 1 for n in path_to(parents, parents[node])[1:]]]))[None]
                best = lm(text, mode="recurrent").logits[0, -1].topk(4).indices
                assert drafts[0, node - 1] == best[(node - 1) % 4]

    def test_tree_fits_the_tree_kernels(self, device):
        """What the worker returns goes through build_tree_efficient_triton's reference as it is."""
        lm, tokens = model(7, device), random_tokens(3, 9, 7, device)
        worker, lengths = gdn.GDNDraftWorker(lm, 3, 3), torch.tensor([9, 4, 7], device=device)
        roots = tokens[torch.arange(3, device=device), lengths - 1]
        drafts, parent_list, chosen = worker.generate_draft_tree(tokens, roots, lengths)
        mask, positions, _, first, sibling, _ = build_tree_structure(
            roots, parent_list, chosen, drafts, lengths - 1, 3, 3, 9, tree_mask_mode=1, use_triton=False
        )
        verifier = gdn.GDNVerifyWorker(lm, 3, 3, 9)
        ours, places = verifier.build_tree_attention_mask(3, roots, drafts, parent_list, lengths - 1, chosen)
        assert torch.equal(mask.view(3, 9, 9), ours) and torch.equal(positions.view(3, 9), places)
        assert torch.equal(ours, gdn.build_tree_mask_from_parents(parent_list, chosen, 3))
        parents = candidate_parents(parent_list, chosen, 3)
        assert torch.equal(ours, gdn.build_tree_mask_from_parents(parents))
        assert torch.equal(ours[0], gdn.build_tree_mask_from_parents(parents[0]))
        assert torch.equal(link_parents(first, sibling), parents)
        alone = [worker.generate_draft_tree(tokens[row : row + 1, :length], roots[row : row + 1])[0][0]
                 for row, length in enumerate(lengths.tolist())]  # fmt: skip
        assert torch.equal(torch.stack(alone), drafts)

    def test_what_cannot_be_is_refused(self):
        lm, tokens = model(), random_tokens(2, 4)
        worker = gdn.GDNDraftWorker(lm)
        check_refused(
            ("at least 1", lambda: gdn.GDNDraftWorker(lm, 0)),
            ("at most 64, the vocabulary", lambda: gdn.GDNDraftWorker(lm, 65)),
            ("simplified, full", lambda: gdn.GDNDraftWorker(lm, expansion="all")),
            ("keeps all candidates", lambda: gdn.GDNDraftWorker(lm, expansion="full", num_draft_tokens=4)),
            ("must be in 2..21", lambda: gdn.GDNDraftWorker(lm, num_draft_tokens=22)),
            ("must be in 2..2", lambda: gdn.GDNDraftWorker(lm, 1, 1)),
            ("63 nodes can be expanded, got 84", lambda: gdn.GDNDraftWorker(lm, 4, 4, expansion="full")),
            ("is on cpu", lambda: gdn.GDNDraftWorker(lm, device="meta")),
            ("last token of each", lambda: worker.generate_draft_tree(tokens, (tokens[:, -1] + 1) % 64)),
            ("lie in 1..4", lambda: worker.generate_draft_tree(tokens, tokens[:, -1], torch.tensor([4, 5]))),
            ("lie in 0..63", lambda: worker.generate_draft_tree(tokens + 60, tokens[:, -1] + 60)),
            ("int64", lambda: worker.generate_draft_tree(tokens.float(), tokens[:, -1])),
            ("come before it", lambda: gdn.build_tree_mask_from_parents(torch.tensor([-1, 0, 2]))),
            ("needs topk", lambda: gdn.build_tree_mask_from_parents(tokens, tokens)),
        )


class TestGDNVerifyWorker:
    def test_verify(self, device):
        lm = SimpleLMWithGDN(1000, 128, 2, 2, 32, 32, device=device).eval()
        worker = gdn.GDNVerifyWorker(lm, topk=4, num_steps=2, num_draft_tokens=20, device=device)
        roots, drafts = (torch.randint(0, 1000, shape, device=device) for shape in ((2,), (2, 19)))
        parent_list = torch.tensor([[-1, 0, 1, 2, 3]] * 2, device=device)
        seq_lens = torch.tensor([10, 15], device=device)
        tokens, length = worker.verify(roots, drafts, parent_list, seq_lens, temperature=0.0)
        assert tokens.shape == (2, int(length.max()) + 1) and length.shape == (2,)
        assert (length >= 1).all() and (length <= 3).all() and torch.equal(tokens[:, 0], roots)

    @torch.no_grad()
    @pytest.mark.parametrize("full", [False, True], ids=["simplified", "full"])
    def test_accepts_the_targets_own_path(self, full, device):
        """Drafts in which the greedy continuation is hidden somewhere, and a commit that is a read of it."""
        lm = model(8, device)
        worker = gdn.GDNVerifyWorker(lm, 4, 3, 85 if full else 24)
        prompt = random_tokens(1, 7, 8, device)
        text = plain_text(lm, prompt[0], 4)[7:]
        expanded = [*range(20)] if full else [0, 1, 2, 3, 5, 10, 8, 6]
        parent_list = torch.tensor([[-1, *expanded]], device=device)
        flat = [1, 10, 4 * (1 + expanded.index(10)) + 3]  # a child of the root, its child, and its child
        count = worker.num_draft_tokens - 1
        chosen = [*range(count)] if full else [*range(20), 20, 21, flat[2]]
        drafts = torch.tensor([[(token + 1) % VOCABULARY for token in range(count)]], device=device)
        parents = candidate_parents(parent_list, torch.tensor([chosen], device=device), 4)[0].tolist()
        nodes = [chosen.index(index) + 1 for index in flat]
        assert path_to(parents, nodes[2]) == [0, *nodes]
        for node, token in zip(nodes, text, strict=False):
            siblings = [n for n in range(1, count + 1) if parents[n] == parents[node]]
            for other in siblings:
                drafts[0, other - 1] = (token + 1 + other) % VOCABULARY if other != node else token
        past = lm(prompt[:, :-1], use_cache=True, mode="recurrent").past_state
        tokens, length = worker.verify(
            prompt[:, -1], drafts, parent_list, torch.tensor([6], device=device),
            top_scores_index=torch.tensor([chosen], device=device), past_state=past,
        )  # fmt: skip
        assert tokens.tolist() == [[int(prompt[0, -1]), *text]] and length.tolist() == [4]
        taken = torch.cat((prompt, torch.tensor([text[:3]], device=device)), dim=1)
        expected = lm(taken, use_cache=True, mode="recurrent").past_state
        for committed, want in zip(past.tensors, expected.tensors, strict=True):
            close(committed, want)

    def test_a_sample_follows_the_target(self, device):
        """Of 4000 sequences that begin with one token: the law of the next one, whatever was drafted."""
        lm, count = model(9, device, sharp=1.5), 4000
        roots = torch.full((count,), 7, device=device)
        drafts = torch.arange(6, device=device).repeat(count, 1)
        parent_list = torch.tensor([[-1, 0, 1]], device=device).repeat(count, 1)
        probabilities = (lm(roots[:1, None]).logits[0, 0] / 0.8).softmax(-1).cpu()
        for strategy in ("target_match", "rejection"):
            worker = gdn.GDNVerifyWorker(lm, 2, 2, 7, verify_strategy=strategy, seed=1)
            tokens, length = worker.verify(roots, drafts, parent_list, torch.zeros_like(roots), 0.8)
            assert (length > 1).any() and (length == 1).any()
            seen = torch.bincount(tokens[:, 1].cpu(), minlength=VOCABULARY).double()
            common = probabilities * count >= 5
            expected = (probabilities * count)[common].double()
            chi2 = ((seen[common] - expected) ** 2 / expected).sum()
            free = int(common.sum()) - 1
            assert free > 10 and chi2 < free + 5 * (2 * free) ** 0.5

    def test_what_cannot_be_is_refused_before_a_commit(self):
        lm, roots = model(), torch.tensor([1, 2])
        worker, lengths = gdn.GDNVerifyWorker(lm, 2, 2, 5), torch.tensor([0, 0])
        drafts, parent_list = random_tokens(2, 4), torch.tensor([[-1, 0, 1]] * 2)
        past = lm(random_tokens(2, 3), use_cache=True).past_state
        before = [tensor.clone() for tensor in past.tensors]

        def verify(drafts=drafts, parent_list=parent_list, chosen=(0, 1, 2, 4), lengths=lengths, **options):
            chosen = torch.tensor([chosen] * 2)
            return worker.verify(
                roots, drafts, parent_list, lengths, top_scores_index=chosen, past_state=past, **options
            )

        check_refused(
            (r"draft_tokens must be \[2, 4\]", lambda: verify(drafts[:, :3])),
            ("lie in 0..63", lambda: verify(drafts + 64)),
            (r"seq_lens must be \[2\]", lambda: verify(lengths=lengths[:1])),
            ("candidates 0..5", lambda: verify(chosen=(0, 1, 2, 6))),
            ("rise strictly", lambda: verify(chosen=(0, 2, 1, 4))),
            ("not in the tree", lambda: verify(chosen=(1, 2, 4, 5))),
            ("temperature", lambda: verify(temperature=-1.0)),
            ("one of target_match", lambda: gdn.GDNVerifyWorker(lm, verify_strategy="fast")),
            ("at least 2", lambda: gdn.GDNVerifyWorker(lm, num_draft_tokens=1)),
            ("expected 3 roots", lambda: worker.build_tree_attention_mask(3, roots, drafts, parent_list, lengths)),
        )
        lm.lm_head.weight.data[3] = torch.nan
        with pytest.raises(ValueError, match="logits of sequences .* are NaN"):
            verify()
        assert all(map(torch.equal, before, past.tensors))


class TestGDNSpeculativeWorker:
    def test_generate_step(self, device):
        """The documented shapes, and the documented figures where no draft is right."""
        draft, target = (SimpleLMWithGDN(1000, 128, 2, 2, 32, 32, device=device).eval() for _ in range(2))
        draft.lm_head.weight.data = -target.lm_head.weight.data
        draft.gdn.load_state_dict(target.gdn.state_dict())
        draft.embed.load_state_dict(target.embed.state_dict())  # the draft's best tokens are the target's worst
        worker = GDNSpeculativeWorker(draft, target, topk=4, num_steps=2, device=device)
        empty = worker.get_statistics()
        assert (empty["total_steps"], empty["mean_acceptance_rate"], empty["speedup_ratio"]) == (0, 0.0, 1.0)
        tokens = torch.randint(0, 1000, (2, 10), device=device)
        accepted, length = worker.generate_step(
            input_ids=tokens, verified_id=tokens[:, -1], seq_lens=torch.tensor([10, 10], device=device), temperature=0.0
        )
        assert accepted.shape == (2, 2) and length.tolist() == [1, 1]
        stats = worker.get_statistics()
        assert stats["total_steps"] == 1 and stats["total_draft_tokens"] == 14
        assert stats["total_accepted_tokens"] == 0 and stats["mean_acceptance_rate"] == 0.0
        assert stats["speedup_ratio"] == stats["mean_accept_length"] == 1.0 and stats["acceptance_rates"] == [0.0]
        assert f"{stats['legacy_acceptance_rate']:.2%}" == "14.29%"
        assert f"{stats['legacy_speedup_ratio']:.2f}" == "1.14"
        assert worker.stats == stats
        worker.reset_stats()
        assert worker.get_statistics() == worker.stats == empty

    def test_multi_step_generation(self, device):
        draft, target = model(1, device), model(2, device)
        worker = GDNSpeculativeWorker(draft, target, topk=4, num_steps=2, device=device)
        text = prompt = random_tokens(1, 10, device=device)
        seq_lens = torch.tensor([10], device=device)
        for _ in range(4):
            accepted, length = worker.generate_step(text, text[:, -1], seq_lens, temperature=0.0)
            text = torch.cat((text, accepted[:, 1 : 1 + int(length[0])]), dim=1)
            seq_lens = seq_lens + length
        assert text.shape[1] == int(seq_lens[0]) >= 14 and worker.get_statistics()["total_steps"] == 4
        assert text[0].tolist() == plain_text(target, prompt[0], text.shape[1] - 10)

    @pytest.mark.parametrize(
        ("topk", "steps", "options"),
        [(4, 2, {}), (3, 4, {}), (1, 3, {"num_draft_tokens": 4}), (4, 3, {"expansion": "full"})],
        ids=["4x2", "3x4", "chain", "84 drafts"],
    )  # fmt: skip
    def test_greedy_output_is_the_targets_own(self, topk, steps, options, device):
        """24 steps of three prompts in a batch; a draft that is right now and then, and states that follow."""
        target, draft = model(11, device), model(11, device, noise=0.6)
        prompts = [random_tokens(1, length, length, device)[0] for length in (1, 9, 70)]
        worker = GDNSpeculativeWorker(draft, target, topk, steps, **options)
        texts, lengths = speculate(worker, prompts, 24)
        for text, prompt in zip(texts, prompts, strict=True):
            said = target(torch.tensor([text[:-1]], device=device), mode="recurrent").logits[0, len(prompt) - 1 :]
            assert text[len(prompt) :] == said.argmax(-1).tolist()
        counts = {length for step in lengths for length in step}
        assert min(counts) == 1 < max(counts) <= steps + 1
        stats = worker.get_statistics()
        accepted = sum(map(sum, lengths)) - 3 * 24
        assert stats["total_accepted_tokens"] == accepted
        assert stats["mean_acceptance_rate"] == accepted / (3 * 24 * (worker.num_draft_tokens - 1))
        assert stats["speedup_ratio"] == sum(map(sum, lengths)) / (3 * 24)

    @pytest.mark.parametrize("expansion", ["simplified", "full"])
    def test_states_are_those_of_the_committed_tokens(self, expansion, device):
        """After every step: those of a forward over all that is committed, the root not."""
        target, draft = model(12, device), model(12, device, noise=0.6)
        worker = GDNSpeculativeWorker(draft, target, 3, 3, expansion=expansion)
        texts, lengths = [random_tokens(1, length, length, device)[0] for length in (5, 11)], []
        for _ in range(10):
            following, accepted = speculate(worker, texts, 1)
            texts = [torch.tensor(text, device=device) for text in following]
            lengths += accepted[0]
            for slot, text in enumerate(texts):
                expected = target(text[None, :-1], mode="recurrent", use_cache=True).past_state
                assert worker.target_states.known[slot] == text[:-1].tolist()
                mine = worker.target_states.state.part(slice(slot, slot + 1))
                for kept, want in zip(mine.tensors, expected.tensors, strict=True):
                    close(kept, want)
        assert min(lengths) == 1 < max(lengths)

    @pytest.mark.parametrize(
        ("topk", "steps", "options"),
        [(1, 3, {"num_draft_tokens": 4}), (4, 2, {"expansion": "full"}), (2, 2, {"num_draft_tokens": 7})],
        ids=["chain", "full", "all"],
    )
    def test_a_draft_that_is_the_target_is_always_right(self, topk, steps, options, device):
        target = model(15, device)
        worker = GDNSpeculativeWorker(target, target, topk, steps, **options)
        _, lengths = speculate(worker, [random_tokens(1, 8, 15, device)[0]], 10)
        assert lengths == [[steps + 1]] * 10 and worker.get_statistics()["speedup_ratio"] == steps + 1

    def test_adaptive_trees_follow_what_is_accepted(self, device):
        """As deep as drafts are right, and one level more; the text is the target's all the same."""
        target, draft, prompt = model(11, device), model(11, device, noise=0.6), random_tokens(1, 9, 9, device)[0]
        worker, text, nodes = GDNSpeculativeWorker(draft, target, 2, 4, adaptive=True), prompt, []
        assert worker.num_draft_tokens == 8
        for _ in range(40):
            nodes.append(worker.num_draft_tokens)
            text = torch.tensor(speculate(worker, [text], 1)[0][0], device=device)
        assert {2, 4, 6} <= set(nodes) <= {2, 4, 6, 8}
        assert any(a < b for a, b in itertools.pairwise(nodes)) and any(a > b for a, b in itertools.pairwise(nodes))
        assert worker.stats["total_draft_tokens"] == sum(nodes) - 40
        assert text[: 9 + 40].tolist() == plain_text(target, prompt, 40)
        right = GDNSpeculativeWorker(target, target, 2, 3, adaptive=True, expansion="full")
        assert speculate(right, [prompt], 6)[1] == [[4]] * 6 and right.num_draft_tokens == 15

    def test_a_seeded_text_does_not_depend_on_the_draft(self, device):
        target, prompts = model(16, device, sharp=2.0), [random_tokens(1, 6, 16, device)[0]]
        texts = [
            speculate(GDNSpeculativeWorker(draft, target, topk, 2, seed=5), prompts, 20, 0.9)[0][0][:26]
            for draft, topk in ((model(17, device), 4), (target, 3))
        ]
        assert texts[0] == texts[1] != plain_text(target, prompts[0], 20)

    def test_other_sequences_are_read_from_their_begin(self, device):
        target = model(19, device)
        worker = GDNSpeculativeWorker(model(20, device), target, 3, 2)
        prompts = [random_tokens(1, length, length, device)[0] for length in (12, 80)]
        speculate(worker, prompts, 3)
        for batch in ([prompts[1], prompts[0]], [prompts[0]], [prompts[0][:6]]):
            texts, _ = speculate(worker, batch, 5)
            for text, prompt in zip(texts, batch, strict=True):
                assert text == plain_text(target, prompt, len(text) - len(prompt))

    def test_only_new_tokens_are_read(self, device, monkeypatch):
        target = model(21, device)
        worker = GDNSpeculativeWorker(model(22, device), target, 3, 2)
        (text,), _ = speculate(worker, [random_tokens(1, 100, 21, device)[0]], 2)
        read = []
        for name in ("read", "read_tree"):
            original = getattr(SimpleLMWithGDN, name)

            def counted(self, tokens, *rest, original=original):
                if self is target:
                    read.append(tokens.shape[1])
                return original(self, tokens, *rest)

            monkeypatch.setattr(SimpleLMWithGDN, name, counted)
        speculate(worker, [torch.tensor(text, device=device)], 3)
        assert read == [6, 6, 6]

    def test_the_kernels_take_what_the_worker_hands_them(self, device, monkeypatch):
        from eagle_triton.engine.operations import make_operations

        target, prompts = model(23, device), [random_tokens(1, length, length, device)[0] for length in (3, 9)]
        expected = [plain_text(target, prompt, 6) for prompt in prompts]
        kernels = make_operations(kernels=True)
        for module in ("draft", "layer", "model", "norm", "prefix_states", "verify"):
            monkeypatch.setattr(f"eagle_triton.gdn.{module}.operations_for", lambda tensor: kernels)
        worker = GDNSpeculativeWorker(target, target, 2, 2)
        texts, _ = speculate(worker, prompts, 2)
        assert [text[: len(want)] for text, want in zip(texts, expected, strict=True)] == [
            want[: len(text)] for text, want in zip(texts, expected, strict=True)
        ]
        assert {"topk", "expand_beam", "verify_greedy", "delta_tree", "commit_states"} <= set(kernels.calls)

    def test_what_cannot_be_is_refused(self):
        lm, tokens = model(), random_tokens(1, 4)
        other = SimpleLMWithGDN(65, 48, 2, 4, 16, 16, dtype=torch.float32, device="cpu")
        worker, adaptive = GDNSpeculativeWorker(lm, lm), dict(num_draft_tokens=5, adaptive=True)
        check_refused(
            ("share vocabulary", lambda: GDNSpeculativeWorker(other, lm)),
            ("must be None with adaptive trees, got num_dr.*=5", lambda: GDNSpeculativeWorker(lm, lm, **adaptive)),
            ("last token of each", lambda: worker.generate_step(tokens, tokens[:, 0] + 1, torch.tensor([4]))),
        )
        assert worker.get_statistics()["total_steps"] == 0


def test_the_page_has_all_names():
    """docs/gdn.md, whose example tests/test_docs.py runs."""
    page = (Path(__file__).resolve().parents[1] / "docs/gdn.md").read_text(encoding="utf-8")
    assert not [name for name in gdn.__all__ if f"`{name}" not in page]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v", *sys.argv[1:]]))
