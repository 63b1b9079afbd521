"""Attention layers of Qwen3.5 against transformers' own: zero-centred norms, a quarter of each head rotated, gates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.mixers import Attention, NewRows
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.model.modules import project
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.stop_rules import generate
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families import causal_lm
from eagle_triton.families.attention_forward import HARMLESS, TargetAttention, transformers_forward
from eagle_triton.models.target import TargetCache, cache_argument
from eagle_triton.operands.ancestors import pack_ancestors
from tests.tiny import ENDLESS, SIZES, random_prompt

qwen3_5 = pytest.importorskip("transformers.models.qwen3_5")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 24
PARENTS = [-1, 0, 0, 1, 1, 2, 5]
LENGTHS = (5, 3)  # committed tokens of two sequences


def tiny_qwen3_5(layers: int = 2) -> nn.Module:
    """A Qwen3.5 of attention layers alone, with random weights; those of the norms lie around 0."""
    torch.manual_seed(0)
    config = qwen3_5.Qwen3_5TextConfig(
        vocab_size=VOCAB,
        **SIZES,
        **ENDLESS,
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        attn_implementation="eager",
    )
    model = qwen3_5.Qwen3_5ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2 if parameter.dim() > 1 else 0.3)
    return model.to(DEVICE)


def view_of(model: nn.Module) -> ModelView:
    return causal_lm.read_causal_lm(model)


def tree_of(past: int, parents: list[int]) -> Tensor:
    """Who sees whom, [n, past + n] bool: all that went before, a node's ancestors and itself."""
    seen = torch.zeros(len(parents), past + len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        seen[node, :past] = True
        if parent >= 0:
            seen[node] |= seen[parent]
        seen[node, past + node] = True
    return seen


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, 1, n, m] as the modules take it."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[None, None].to(DEVICE)


def test_a_layer_is_read_as_it_is():
    model = tiny_qwen3_5()
    view, module = view_of(model), model.model.layers[1].self_attn
    attention = view.layers[1].mixer
    assert isinstance(attention, Attention) and attention.gated and attention.q.weight is module.q_proj.weight
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 32)
    assert len(attention.rotary.inv_freq) == 4
    norms = (attention.q_norm, attention.k_norm, view.layers[0].input_norm, view.layers[1].post_norm, view.norm)
    assert all(norm.zero_centred for norm in norms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])
@torch.no_grad()
def test_attention_is_the_modules(kernels, dtype):
    """A chain of rows, then a tree behind some of them, in two sequences of different lengths."""
    ops, model = make_operations(kernels), tiny_qwen3_5(1).to(dtype)
    attention = view_of(model).layers[0].mixer
    chain, tree = (torch.randn(2, count, 64).to(DEVICE, dtype) for count in (max(LENGTHS), len(PARENTS)))
    pages = SlotPages.whole(2, 64, torch.device(DEVICE))
    cache = attention.new_cache(1, 2, pages, dtype, torch.device(DEVICE)).layer(0)
    zeros, lengths = (torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in ((0, 0), LENGTHS))
    order = torch.arange(max(LENGTHS), dtype=torch.int32, device=DEVICE)
    depths = tree_of(0, PARENTS).sum(-1).int().to(DEVICE) - 1
    ancestors = pack_ancestors(tree_of(0, PARENTS).expand(2, -1, -1)).to(DEVICE)

    def ours(x: Tensor, rows: NewRows) -> Tensor:
        return project(ops, attention.o, attention.attend(ops, x, cache, rows))

    outs = ours(chain, NewRows(zeros, zeros, None, None))
    grown = ours(tree, NewRows(lengths, lengths, depths.expand(2, -1), ancestors))
    assert ops.calls["gate_heads"] == 2
    exact = tiny_qwen3_5(1).to(dtype).float()
    for slot, length in enumerate(LENGTHS):
        x = torch.cat((chain[slot, :length], tree[slot]))[None]
        seen = torch.cat((tree_of(0, [-1, *range(length + len(PARENTS) - 1)])[:length], tree_of(length, PARENTS)))
        positions = torch.cat((order[:length], length + depths)).long()[None]
        same, true = (
            (
                module.model.layers[0].self_attn(
                    inputs, module.model.rotary_emb(inputs, positions.expand(3, 1, -1)), additive(seen, inputs.dtype)
                )[0][0]
            )
            for module, inputs in ((model, x), (exact, x.float()))
        )
        bound = 2 * (same.float() - true).abs().max() + 2e-5
        out = torch.cat((outs[slot, :length], grown[slot])).float()
        assert (out - true).abs().max() <= bound < true.abs().max() / 50


@torch.no_grad()
def test_it_decodes_as_transformers_does():
    """Plainly, and in trees that the model drafts for itself."""
    model, spec = tiny_qwen3_5(), TreeSpec.dynamic(12, 2, 3)
    view = view_of(model)
    draft = causal_lm.draft_from_causal_lm(tiny_qwen3_5(), view, lambda: spec)
    engine = Engine(view, draft, make_operations(DEVICE == "cuda"))
    prompts = [random_prompt(length, vocab=VOCAB)[0].to(DEVICE) for length in (1, 30)]
    expected = [model.generate(prompt[None], max_new_tokens=24, do_sample=False)[0] for prompt in prompts]
    assert len({tuple(tokens[-24:].tolist()) for tokens in expected}) == 2
    for tree in (PLAIN, spec):
        found = generate(engine, prompts, tree, SamplingParams(), max_new_tokens=[24, 24], eos_token_ids=())
        for tokens, right in zip(found, expected, strict=True):
            assert torch.equal(tokens, right)
    assert max(engine.accept_lengths) > 1


@torch.no_grad()
def test_code_that_drives_the_modules_gets_the_operations(monkeypatch):
    """A prompt and a tree through `self_attn.forward`, with the cache of our EaModel."""
    model = tiny_qwen3_5()
    engine = Engine(view_of(model), None, make_operations(DEVICE == "cuda"))
    prompt, nodes = random_prompt(9, vocab=VOCAB).to(DEVICE), random_prompt(len(PARENTS), vocab=VOCAB).to(DEVICE)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        cache, outs = TargetCache(), []
        depths = tree_of(0, PARENTS).sum(-1).to(DEVICE) - 1
        chain = tree_of(0, list(range(-1, 8)))
        for tokens, seen, positions in (
            (prompt, chain, torch.arange(9, device=DEVICE)),
            (nodes, tree_of(9, PARENTS), 9 + depths),
        ):
            masks = {"full_attention": additive(seen, torch.float32), "linear_attention": None}
            options = {cache_argument(model.model.forward): cache, "use_cache": True}
            outs.append(model.model(tokens, attention_mask=masks, position_ids=positions[None], **options)[0])
        return outs[0], outs[1], cache.layers[1][0]

    expected, attention = run(), TargetAttention(engine)
    for index, layer in enumerate(model.model.layers):
        forward = transformers_forward(attention, index, layer.self_attn)

        def harmless_left_out(*args, forward=forward, **options):
            return forward(*args, **{name: value for name, value in options.items() if name not in HARMLESS})

        monkeypatch.setattr(layer.self_attn, "forward", harmless_left_out, raising=False)
    for out, right in zip(run(), expected, strict=True):
        torch.testing.assert_close(out, right, atol=1e-4, rtol=1e-4)
    assert engine.ops.calls["tree_attention"] == engine.ops.calls["gate_heads"] == 4


def test_a_product_that_is_neither_queries_nor_gated_queries_is_refused():
    model = tiny_qwen3_5()
    model.model.layers[1].self_attn.q_proj = nn.Linear(64, 3 * 128, bias=False, device=DEVICE)
    where, asked = r"model\.model\.layers\.1\.self_attn\.q_proj", "128 rows, or 256 with a gate for each head, got 384"
    with pytest.raises(UnsupportedModelError, match=f"{where} must have {asked}"):
        view_of(model)


class Quantised(nn.Module):
    """Stands in for a product, and says how wide it is or does not."""

    def __init__(self, inner: nn.Linear, **said: int):
        super().__init__()
        self.inner = inner
        vars(self).update(said)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@torch.no_grad()
def test_a_product_that_is_no_plain_one_says_how_wide_it_is():
    model = tiny_qwen3_5(1)
    attention = model.model.layers[0].self_attn
    plain, prompts = attention.q_proj, [random_prompt(9, vocab=VOCAB)[0].to(DEVICE)]

    def decode() -> Tensor:
        engine = Engine(view_of(model), None, make_operations())
        return generate(engine, prompts, PLAIN, SamplingParams(), max_new_tokens=[8], eos_token_ids=())[0]

    expected = decode()
    attention.q_proj = Quantised(plain, out_features=256)
    assert view_of(model).layers[0].mixer.gated and torch.equal(decode(), expected)
    attention.q_proj = Quantised(plain, out_features=128)
    assert not view_of(model).layers[0].mixer.gated
    attention.q_proj = Quantised(plain)
    with pytest.raises(
        UnsupportedModelError, match=r"q_proj must have 128 rows.* got a Quantised without out_features"
    ):
        view_of(model)


def test_norms_of_queries_and_keys_are_of_one_kind():
    model = tiny_qwen3_5(1)
    model.model.layers[0].self_attn.k_norm.eps = 1e-3
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.self_attn\.q_norm and k_norm must have one"):
        view_of(model)


def test_more_frequencies_than_a_head_has_are_refused():
    model = tiny_qwen3_5(1)
    model.model.rotary_emb.inv_freq = torch.ones(17, device=DEVICE)
    with pytest.raises(UnsupportedModelError, match="must rotate at most the 32 elements of a head, got 17"):
        view_of(model)
