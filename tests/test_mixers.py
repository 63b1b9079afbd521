"""Kinds of layer: a toy recurrence h <- a h + b x among attention layers, decoded in trees and rolled back.

What slots and steps do to states is in tests/test_hybrid_targets.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.memory.by_slot import bytes_of
from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.mixers import AcceptedPath, Attention, KeyValues, Mixer, MixerCache, NewRows
from eagle_triton.engine.model.modules import Norm, Projection, Rotary
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.families import own_ea_model as native
from eagle_triton.operands.ancestors import ancestor_matrix
from tests.tiny import random_prompt, tiny_model

DECAY = 0.5


class RecurrentCache(MixerCache):
    """states [layers, B, H]: h after the committed tokens."""

    def __init__(self, states: Tensor):
        self.states = states

    def new_pending(self, nodes: int) -> Tensor:
        layers, batch, size = self.states.shape
        return self.states.new_empty(layers, batch, nodes, size)

    def layer(self, index: int, pending: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.states[index], None if pending is None else pending[index]

    def part(self, slots: slice) -> RecurrentCache:
        return RecurrentCache(self.states[:, slots])

    def clear(self) -> None:
        self.states.zero_()

    def copy(self, source: int, target: int, length: int) -> None:
        self.states[:, target] = self.states[:, source]

    def commit(self, ops, pending: Tensor, accepted: AcceptedPath) -> None:
        for state, inputs in zip(self.states, pending, strict=True):
            for step, node in enumerate(accepted.path.T):
                row = inputs.gather(1, node.clamp(min=0).long()[:, None, None].expand(-1, 1, inputs.shape[2]))[:, 0]
                state.copy_(torch.where((step <= accepted.accepted)[:, None], DECAY * state + row, state))

    @property
    def tensors(self) -> Iterator[Tensor]:
        yield self.states


@dataclass(frozen=True)
class Recurrence(Mixer):
    """h_i = a h_(parent of i) + x_i, out = h_i @ weight.T"""

    weight: Tensor  # [H, H]

    @property
    def cache_shape(self) -> int:
        return len(self.weight)

    def new_cache(self, layers, slots, pages, dtype, device) -> RecurrentCache:
        return RecurrentCache(torch.zeros(layers, slots, len(self.weight), dtype=dtype, device=device))

    def forward(self, ops, x, cache, rows) -> Tensor:
        (state, pending), count = cache, x.shape[1]
        if rows.ancestors is None:
            sees = torch.ones(count, count, dtype=torch.bool, device=x.device).tril().expand(len(x), -1, -1)
        else:
            sees = ancestor_matrix(rows.ancestors, count)
        age = sees.sum(-1)  # [B, n]: tokens since the committed ones
        since = (age[:, :, None] - age[:, None]).clamp(min=0)
        h = (sees * DECAY**since) @ x + (DECAY**age)[..., None] * state[:, None]
        if pending is None:
            state.copy_(h[:, -1])
        else:
            pending.copy_(x)
        return h @ self.weight.T


class RecurrentModule(nn.Module):
    """The same over whole sequences, token by token, in the place of a Hugging Face layer's attention."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.mixing = nn.Parameter(weight)

    def forward(self, hidden_states: Tensor, **_) -> tuple[Tensor, None]:
        state, outs = torch.zeros_like(hidden_states[:, 0]), []
        for row in hidden_states.unbind(1):
            state = DECAY * state + row
            outs.append(state @ self.mixing.T)
        return torch.stack(outs, dim=1), None


RECURRENT = (0, 2)  # of four layers; attention is not the first


@pytest.fixture(scope="module")
def pair():
    """An engine over a hybrid target with an EAGLE-3 head, and the next token that the same modules give."""
    model = tiny_model(vocab=10, seed=2, total_token=12, depth=3, top_k=3)
    view, draft = native.read(model)
    weights = [torch.randn(64, 64, generator=torch.Generator().manual_seed(i)) * 0.1 for i in RECURRENT]
    layers = list(view.layers)
    for index, weight in zip(RECURRENT, weights, strict=True):
        layers[index] = replace(layers[index], mixer=Recurrence(weight))
        model.base_model.model.layers[index].self_attn = RecurrentModule(weight)

    def logits(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return model.base_model(tokens[None], use_cache=False).logits[0]

    return Engine(replace(view, layers=tuple(layers)), draft, make_operations()), logits


KNOWN: dict[tuple, Tensor] = {}


def alone(logits, prompt: Tensor, count: int) -> Tensor:
    """The prompt and `count` tokens, each from the whole sequence before it."""
    key = (*prompt.tolist(), count)
    if key not in KNOWN:
        tokens = prompt
        for _ in range(count):
            tokens = torch.cat((tokens, logits(tokens)[-1].argmax()[None]))
        KNOWN[key] = tokens
    return KNOWN[key]


PROMPTS = [random_prompt(length, vocab=10)[0] for length in (1, 3, 20, 20)]
LONG = random_prompt(530, vocab=10)[0]  # more than one chunk
TREES = {
    "plain": PLAIN,
    "chain": TreeSpec.chain(3),
    "dynamic": TreeSpec.dynamic(12, 3, 3),
    "fixed": TreeSpec.fixed([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
}


@pytest.mark.parametrize("tree", TREES)
def test_a_hybrid_target_decodes_as_its_modules_do(pair, tree):
    engine, logits = pair
    requests, accepted = {id(r): r for r in [Request(prompt, 24) for prompt in PROMPTS] + [Request(LONG, 3)]}, 0
    waiting = list(requests.values())
    with Batch(engine, 3, TREES[tree], 540) as batch:  # the last two enter slots that were used
        while waiting or batch.running:
            while waiting and batch.free:
                batch.admit(waiting.pop(0))
            for row in batch.step():
                accepted += row.accepted
                if row.finished:
                    prompt, new = row.request.prompt, row.request.max_new_tokens
                    assert torch.equal(batch.tokens(row.slot), alone(logits, prompt, new))
                    del requests[id(row.request)]
    assert not requests and (accepted > 0) == (tree != "plain")


def test_layers_of_other_shapes_have_caches_of_their_own(pair):
    engine, _ = pair
    view = engine.view
    recurrent, attention = view.new_caches(SlotPages.whole(4, 512, torch.device("cpu"))).caches
    assert recurrent.states.shape == (2, 4, 64) and attention.data.shape == (2, 2, 33, 2, 64, 16)  # page 0 is nobody's
    narrow = replace(view.layers[1].mixer, num_kv_heads=1)
    mixed = replace(view, layers=(view.layers[1], replace(view.layers[1], mixer=narrow), view.layers[1]))
    caches = mixed.new_caches(SlotPages.whole(4, 512, torch.device("meta")))
    assert [cache.data.shape[:4] for cache in caches.caches] == [(2, 2, 33, 2), (1, 2, 33, 1)]
    assert [caches.layer(i).data.shape[2] for i in range(3)] == [2, 1, 2]
    assert bytes_of(caches) == (2 * 2 + 1) * 2 * 33 * 64 * 16 * 4


ATTENTION: dict[str, dict] = {
    "gated": dict(gated=True, q_norm=16, k_norm=16, zero_centred=True),
    "norms of rows": dict(q_norm=64, k_norm=32),
    "values are keys": dict(v=None, q_norm=16, k_norm=16, v_norm=16),
    "called modules": dict(called=True),
    "temperature": dict(temperature=(0.3, 2)),
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_remembers_the_keys_and_values_of_a_forward(device, kind):
    given = {"v": 32, "gated": False, "zero_centred": False, "called": False, "temperature": None, **ATTENTION[kind]}

    def projection(rows: int) -> Projection:
        module = nn.Linear(48, rows, device=device).requires_grad_(False)
        return Projection(module=module) if given["called"] else Projection(module.weight, module.bias)

    torch.manual_seed(0)
    norms = {
        name: Norm(torch.randn(given[name], device=device), 1e-5, zero_centred=given["zero_centred"])
        for name in ("q_norm", "k_norm", "v_norm")
        if name in given
    }
    mixer = Attention(
        q=projection(128 if given["gated"] else 64),
        k=projection(32),
        v=None if given["v"] is None else projection(32),
        o=Projection(torch.randn(48, 64, device=device)),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        scale=0.25,
        rotary=Rotary(torch.tensor([1.0, 0.1, 0.01], device=device), temperature=given["temperature"]),
        gated=given["gated"],
        **norms,
    )
    ops, x = make_operations(kernels=True), torch.randn(2, 3, 48, device=device)
    lengths = torch.tensor([5, 9], dtype=torch.int32, device=device)
    caches = [KeyValues(torch.zeros(2, 2, 2, 64, 16, device=device)) for _ in range(2)]
    mixer.remember(ops, x, caches[0], NewRows(lengths, lengths, None, None))
    mixer.forward(ops, x, caches[1], NewRows(lengths, lengths, None, None))
    torch.testing.assert_close(caches[0].data, caches[1].data, rtol=0, atol=1e-5)
    assert caches[0].data[:, 0, :, 5:8].abs().mean() > 0.1
