"""Heads with the fields of EAGLE 3.1 or a sliding window: drafts against a plain forward, and what a part that is left
out changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eagle_triton import optimize_eagle_with_triton
from eagle_triton.engine.drafts.eagle import Eagle3Draft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.model.mixers import NewRows
from eagle_triton.engine.model.modules import Norm
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.families import own_ea_model as native
from eagle_triton.models.ea_model import EaModel
from eagle_triton.models.heads import EAGLE31_FIELDS, Eagle1Head, Eagle3Head, rotary_frequencies, rotary_scale
from eagle_triton.models.target import TargetCache, run_target
from eagle_triton.models.tree import fixed_tree, grow_dynamic_tree, grow_fixed_tree
from eagle_triton.runtime.split_sums import total_of
from tests.tiny import random_prompt, tiny_model

FIELDS = {name: {name: True} for name in EAGLE31_FIELDS}
FIELDS["all"] = dict.fromkeys(EAGLE31_FIELDS, True)
FIELDS["window"] = dict(sliding_window=4)
FIELDS["gelu, yarn"] = dict(
    hidden_act="gelu_pytorch_tanh",
    rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8, beta_fast=1.0, beta_slow=0.2),
)
FIELDS["all, norm_before_residual"] = FIELDS["all"] | dict(norm_before_residual=True)
TREES = {
    "chain": dict(total_token=5, depth=3, top_k=1),
    "tree": dict(total_token=12, depth=3, top_k=3),
    "fixed": dict(tree_choices=[[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]),
}


def model_with(fields: dict, tree: str, vocab: int = 8, seed: int = 3) -> EaModel:
    """A tiny model, whose norms are random too, and features of very different sizes."""
    model = tiny_model(vocab=vocab, seed=seed, **TREES[tree])
    head = Eagle3Head(model.ea_layer.config.replace(**fields), **TREES[tree])
    torch.manual_seed(seed)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.15) if parameter.dim() > 1 else torch.nn.init.normal_(parameter, 1, 0.4)
    head.d2t, head.embed_tokens = model.ea_layer.d2t, model.ea_layer.embed_tokens
    return EaModel(model.base_model, head).eval()


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


class PlainHead:
    """A head's forward written for reading: all rows of a path anew, without a cache, attention head by head."""

    def __init__(self, head: Eagle3Head):
        self.config, self.weights = head.config, dict(head.state_dict())

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def reduced(self, features: Tensor) -> Tensor:
        """Rows [T, 3H] as the layer reads them, [T, H]."""
        if self.config.norm_before_fc:
            features = self.norm("input_norm", features)
        if self.config.fc_norm:
            parts = features.split(self.config.target_hidden_size, dim=-1)
            features = torch.cat([self.norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)], dim=-1)
        return features @ self.weights["fc.weight"].T

    def layer(self, tokens: Tensor, x: Tensor) -> Tensor:
        """The hidden state of the last of the rows x [T, H], [H]."""
        config, weights = self.config, self.weights
        normed = self.norm("midlayer.hidden_norm", x)
        embedded = self.norm("midlayer.input_layernorm", weights["embed_tokens.weight"][tokens])
        both = torch.cat((embedded, normed), dim=-1)
        query, key, value = (
            (both @ weights[f"midlayer.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, config.head_dim))
            for name in "qkv"
        )
        query, key = self.turned(query), self.turned(key)
        near = len(tokens) - min(config.sliding_window or len(tokens), len(tokens))
        key, value = key[near:], value[near:]
        group, found = config.num_attention_heads // config.num_key_value_heads, []
        for index in range(config.num_attention_heads):
            scores = key[:, index // group] @ query[-1, index] / config.head_dim**0.5
            found.append(scores.softmax(0) @ value[:, index // group])
        attended = torch.cat(found) @ weights["midlayer.self_attn.o_proj.weight"].T
        hidden = (normed if config.norm_before_residual else x)[-1] + attended
        inner = self.norm("midlayer.post_attention_layernorm", hidden)
        gate, up = (inner @ weights[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        scaled = 2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3) if "gelu" in config.hidden_act else gate
        return hidden + (scaled.sigmoid() * gate * up) @ weights["midlayer.mlp.down_proj.weight"].T

    def turned(self, heads: Tensor) -> Tensor:
        half = self.config.head_dim // 2
        steps = rotary_frequencies(self.config)  # compared with those of transformers in tests/test_models.py
        angle = (torch.arange(len(heads))[:, None] * steps)[:, None]
        first, second = (heads * rotary_scale(self.config)).split(half, dim=-1)
        return torch.cat(
            (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), dim=-1
        )

    def log_probs(self, features: Tensor, tokens: Tensor, path: list[int]) -> Tensor:
        """Of what follows a path below the root, [Vd]. features [T, 3H]: of all tokens but the root; tokens [T + 1]."""
        x, known = self.reduced(features), tokens[1:]
        hidden = self.layer(known, x)
        for token in path:
            fed = self.norm("norm", hidden) if self.config.norm_output else hidden
            x, known = torch.cat((x, fed[None])), torch.cat((known, torch.tensor([token])))
            hidden = self.layer(known, x)
        return (self.norm("norm", hidden) @ self.weights["lm_head.weight"].T).log_softmax(-1)

    def tree(self, features: Tensor, tokens: Tensor, head: Eagle3Head) -> tuple[list[int], list[int]]:
        """(tokens of its drafts, parents of all nodes). Instead of hidden states, the paths are handed on."""

        def expand(drafted: Tensor, paths: Tensor, visible: Tensor, depth: int) -> tuple[Tensor, Tensor]:
            paths = torch.cat((paths[0], drafted[:, None].float()), dim=1)[None]
            scores = [self.log_probs(features, tokens, path.long().tolist()) for path in paths[0]]
            return torch.stack(scores), paths

        first, none = self.log_probs(features, tokens, [])[None], torch.zeros(1, 1, 0)
        if head.tree_choices is not None:
            found = grow_fixed_tree(first, none, expand, head.to_target_ids, fixed_tree(head.tree_choices))
        else:
            found = grow_dynamic_tree(
                first, none, expand, head.to_target_ids, head.total_tokens, head.depth, head.top_k
            )
        return found[0].tolist(), found[1].tolist()


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        *((name, "tree") for name in FIELDS),
        *((name, tree) for name in ("all", "window") for tree in ("chain", "fixed")),
    ],
)
@torch.no_grad()
def test_drafts_are_those_of_a_plain_forward(name, tree):
    """In every step of two sequences: tokens and shape of the tree."""
    model = model_with(FIELDS[name], tree)
    view, draft = native.read(model)
    engine, plain = Engine(view, draft, make_operations()), PlainHead(model.ea_layer)
    prompts = [random_prompt(length, vocab=8)[0] for length in (5, 9)]
    with Batch.start(engine, prompts, draft.read_tree(), SamplingParams(temperature=2.0, seed=2), 100) as running:
        running.in_flight.most = 1  # the tree that is read belongs to the step that was read
        running.step()
        for _ in range(4):
            running.step()
            for slot in range(len(prompts)):
                tokens, drafted = running.tokens(slot), running.state.tree
                _, features = run_target(
                    model.base_model, tokens[None, :-1], TargetCache(), feature_layers=model.feature_layers
                )
                drafts, parents = plain.tree(features[0], tokens, model.ea_layer)
                assert drafted.tokens[slot].tolist() == [int(tokens[-1]), *drafts]
                assert drafted.parents[slot].tolist() == parents


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("name", ["norm_before_fc", "fc_norm", "all"])
@torch.no_grad()
def test_features_are_normed_before_fc(name, kernels, device):
    model = model_with(FIELDS[name], "chain").to(device)
    head, (_, draft) = model.ea_layer, native.read(model)
    features = (torch.randn(2, 3, 192) * torch.tensor([0.1, 1.0, 30.0]).repeat_interleave(64)).to(device)
    none = torch.zeros(2, dtype=torch.int32, device=device)
    rows = NewRows(none, none, None, None)
    found = total_of(draft.inputs_of(make_operations(kernels), features, rows))
    torch.testing.assert_close(found, PlainHead(head).reduced(features), atol=1e-4, rtol=1e-4)
    assert (found - features @ head.fc.weight.T).abs().max() > 1


@pytest.mark.parametrize(("name", "tree"), [*((name, "tree") for name in FIELDS), ("all", "chain")])
def test_accepted_lengths_are_those_of_the_ea_model(name, tree):
    model, prompt = model_with(FIELDS[name], tree), random_prompt(9, vocab=8)
    want = model.eagenerate(prompt, max_new_tokens=20), model.accept_lengths
    model, originals = optimize_eagle_with_triton(model, kernels=False)
    got = model.eagenerate(prompt, max_new_tokens=20), model.accept_lengths
    originals.restore()
    assert torch.equal(got[0], want[0]) and got[1] == want[1]
    assert sum(want[1]) > 0 or tree == "chain"


WITHOUT = {
    "norm_before_fc": dict(norm_before_fc=None),
    "fc_norm": dict(fc_norms=()),
    "norm_output": dict(norm_output=False),
    "sliding_window": {},
}


def without(draft: Eagle3Draft, name: str) -> Eagle3Draft:
    (layer,) = draft.layers
    endless = replace(layer, mixer=replace(layer.mixer, sliding_window=None))
    return replace(draft, layers=(endless,) if name == "sliding_window" else draft.layers, **WITHOUT[name])


@pytest.mark.parametrize("name", WITHOUT)
def test_a_part_that_is_left_out_changes_drafts_and_no_token(name):
    view, draft = native.read(model_with(FIELDS["all"] | FIELDS["window"], "tree"))
    prompt, runs = random_prompt(9, vocab=8)[0], []
    for drafter in (draft, without(draft, name)):
        engine, drafted = Engine(view, drafter, make_operations()), []
        with Batch.start(engine, [prompt], draft.read_tree(), SamplingParams(), 100) as running:
            running.in_flight.most = 1
            while len(running.tokens(0)) < 15:
                running.step()
                drafted.append(running.state.tree.tokens[0].tolist())
            runs.append((drafted, running.tokens(0)[:15].tolist()))
    assert runs[0][0] != runs[1][0] and runs[0][1] == runs[1][1]


def test_norms_of_features_must_be_of_one_kind():
    _, draft = native.read(model_with(FIELDS["fc_norm"], "chain"))
    assert [norm.weight.shape for norm in draft.fc_norms] == [(64,)] * 3
    for odd in (dict(eps=1.0), dict(zero_centred=True), dict(round_first=False)):
        with pytest.raises(ValueError, match="norms of features must have one kind"):
            replace(draft, fc_norms=(*draft.fc_norms[:2], replace(draft.fc_norms[2], **odd)))


def test_weights_are_read_where_they_lie():
    """A norm that is trained on, or loaded again, is not missed."""
    model = model_with(FIELDS["all"], "chain")
    head, (_, draft) = model.ea_layer, native.read(model)
    assert isinstance(draft.norm_before_fc, Norm) and draft.norm_before_fc.weight is head.input_norm.weight
    assert all(norm.weight is own.weight for norm, own in zip(draft.fc_norms, head.fc_norm, strict=True))


def test_gradients_reach_the_norms():
    head = model_with(FIELDS["all"], "chain").ea_layer.train()
    hidden, cache = head(torch.randn(1, 4, 192), torch.randint(8, (1, 4)))
    hidden, _ = head(hidden, torch.randint(8, (1, 4)), cache)
    head.draft_logits(hidden).logsumexp(-1).sum().backward()
    for norm in (head.input_norm, *head.fc_norm, head.norm):
        assert norm.weight.grad is not None and norm.weight.grad.any()


@pytest.mark.parametrize("name", EAGLE31_FIELDS)
def test_an_eagle1_head_has_none_of_the_fields(name):
    config = tiny_model(eagle3=False).ea_layer.config
    with pytest.raises(ValueError, match=f"{name}=True is for EAGLE-3 heads"):
        Eagle1Head(config.replace(**{name: True}))


@pytest.mark.parametrize("eagle3", [True, False])
@torch.no_grad()
def test_a_head_with_a_window_sees_its_last_tokens(eagle3):
    """Its logits are those of a text that begins a window (EAGLE-1's two layers: two) before the last token."""
    model = tiny_model(eagle3=eagle3)
    config = model.ea_layer.config.replace(sliding_window=4, num_hidden_layers=1 if eagle3 else 2)
    head = (Eagle3Head if eagle3 else Eagle1Head)(config)
    features, ids = torch.randn(1, 12, 192 if eagle3 else 64), random_prompt(12)
    whole, cache = head(features, ids)
    near = 4 if eagle3 else 7
    part, _ = head(features[:, -near:], ids[:, -near:], position_ids=torch.arange(12 - near, 12))
    torch.testing.assert_close(part[:, -1], whole[:, -1])
    assert (head(features[:, 1 - near :], ids[:, 1 - near :])[0][:, -1] - whole[:, -1]).abs().max() > 1e-4
    _, cache = head(features[:, :9], ids[:, :9])
    torch.testing.assert_close(head(features[:, 9:], ids[:, 9:], cache)[0], whole[:, 9:])
    additive = torch.zeros(12, 12).masked_fill(~torch.ones(12, 12, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(head(features, ids, attention_mask=additive)[0], whole)


def test_an_eagle1_head_with_a_window_drafts_as_the_ea_model_does():
    model = tiny_model(eagle3=False, vocab=8, **TREES["tree"])
    head = Eagle1Head(model.ea_layer.config.replace(sliding_window=3), **TREES["tree"])
    head.load_state_dict(model.ea_layer.state_dict())
    model, prompt = EaModel(model.base_model, head).eval(), random_prompt(9, vocab=8)
    want = model.eagenerate(prompt, max_new_tokens=20), model.accept_lengths
    with optimize_eagle_with_triton(model, kernels=False)[1]:
        assert torch.equal(model.eagenerate(prompt, max_new_tokens=20), want[0])
        assert model.accept_lengths == want[1] and sum(want[1]) > 0
