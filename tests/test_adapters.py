"""Reading upstream models by looking: stand-ins with their structure and names, whole and broken in one place each."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eagle_triton.engine.drafts.eagle import Eagle1Draft, Eagle3Draft
from eagle_triton.engine.model.modules import feed_forward
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families import eagle_llm, methods
from eagle_triton.families import own_ea_model as native
from eagle_triton.families import safeailab as upstream
from eagle_triton.families.attention_forward import PreallocatedRows, _ancestors
from eagle_triton.families.reading.module_reader import ModuleReader
from eagle_triton.patching import Fallback
from tests.tiny import tiny_model

HIDDEN, HEADS, KV_HEADS, VOCAB, DRAFT_VOCAB = 32, 4, 2, 24, 16
HEAD_DIM = HIDDEN // HEADS
LOWEST = torch.finfo(torch.float32).min


class Norm(nn.Module):
    def __init__(self, size: int = HIDDEN):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


class LlamaRotaryEmbedding(nn.Module):
    def __init__(self, base: float = 500000.0):
        super().__init__()
        self.base, self.dim = base, HEAD_DIM
        frequencies = 1.0 / base ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        self.register_buffer("inv_freq", frequencies, persistent=False)


class LlamaLinearScalingRotaryEmbedding(LlamaRotaryEmbedding):
    scaling_factor = 4.0


class LlamaDynamicNTKScalingRotaryEmbedding(LlamaRotaryEmbedding):
    scaling_factor = 4.0


class Qwen3RotaryEmbedding(nn.Module):
    def __init__(self, rope_type: str = "default"):
        super().__init__()
        self.rope_type, self.attention_scaling = rope_type, 1.25
        self.register_buffer("inv_freq", torch.rand(HEAD_DIM // 2), persistent=False)


class Attention(nn.Module):
    def __init__(self, width: int = HIDDEN, kv_heads: int = KV_HEADS, bias: bool = False):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=kv_heads, pretraining_tp=1)
        self.head_dim = HEAD_DIM
        self.q_proj = nn.Linear(width, HIDDEN, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * HEAD_DIM, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * HEAD_DIM, bias=bias)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding()


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 48, bias=False), nn.Linear(HIDDEN, 48, bias=False)
        self.down_proj, self.act_fn = nn.Linear(48, HIDDEN, bias=False), nn.SiLU()


class Layer(nn.Module):
    def __init__(self, width: int = HIDDEN, input_norm: bool = True):
        super().__init__()
        self.self_attn, self.mlp, self.post_attention_layernorm = Attention(width), MLP(), Norm()
        if input_norm:
            self.input_layernorm = Norm()


class Head(nn.Module):
    """A head of any of the three kinds: cnets.Model, cnets1.Model, and eagle-llm's."""

    def __init__(self, kind: str):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        if kind == "eagle3":
            self.fc, self.midlayer = nn.Linear(3 * HIDDEN, HIDDEN, bias=False), Layer(2 * HIDDEN)
            self.midlayer.hidden_norm, self.norm = Norm(), Norm()
            self.lm_head = nn.Linear(HIDDEN, DRAFT_VOCAB, bias=False)
            self.register_buffer("d2t", torch.full((DRAFT_VOCAB,), VOCAB - DRAFT_VOCAB))
        else:
            self.fc, self.layers = nn.Linear(2 * HIDDEN, HIDDEN), nn.ModuleList([Layer(input_norm=False), Layer()])
        if kind == "eagle-llm":
            self.tree, self.tree_buffer = [[0], [1], [0, 0]], {}
        else:
            self.total_tokens, self.depth, self.top_k = 59, 7, 10

    def topK_genrate(self, hidden_states, input_ids, head, logits_processor):
        raise NotImplementedError


def stand_in(kind: str = "eagle3", source: str = "modeling_llama_kv", layers: int = 8) -> nn.Module:
    """An EaModel with the structure that adapters look for; `source`: the module that its target comes from."""
    target = type("ForCausalLM", (nn.Module,), {"__module__": f"somewhere.model.{source}"})()
    target.model, target.lm_head = nn.Module(), nn.Linear(HIDDEN, VOCAB, bias=False)
    target.model.embed_tokens, target.model.norm = nn.Embedding(VOCAB, HIDDEN), Norm()
    target.model.layers = nn.ModuleList(Layer() for _ in range(layers))
    target.config = SimpleNamespace(pretraining_tp=1, pad_token_id=0, eos_token_id=2)
    model = type("EaModel", (nn.Module,), {})()
    model.base_model, model.ea_layer = target, Head(kind)
    model.tokenizer = SimpleNamespace(eos_token_id=2, pad_token_id=None)
    return model


def test_each_family_recognises_its_own():
    models = [tiny_model(), stand_in("eagle3"), stand_in("eagle1"), stand_in("eagle-llm"), nn.Linear(2, 2), object()]
    found = [[family.recognise(model) for family in (native, upstream, eagle_llm)] for model in models]
    yes, no = True, False
    assert found == [[yes, no, no], [no, yes, no], [no, yes, no], [no, no, yes], [no, no, no], [no, no, no]]


def test_eagle3_is_read_as_it_is():
    model = stand_in()
    view, draft = upstream.read(model)
    assert (len(view.layers), view.feature_layers, view.vocab_size) == (8, (2, 4, 5), VOCAB)
    layer, module = view.layers[3], model.base_model.model.layers[3]
    assert layer.mixer.q.weight is module.self_attn.q_proj.weight and layer.mlp.gate.bias is None
    assert (layer.mixer.num_heads, layer.mixer.num_kv_heads, layer.mixer.scale) == (4, 2, HEAD_DIM**-0.5)
    assert (view.eos_token_ids, view.norm.eps) == ((2,), 1e-5)
    assert isinstance(draft, Eagle3Draft) and draft.d2t is model.ea_layer.d2t
    assert draft.hidden_norm.weight is model.ea_layer.midlayer.hidden_norm.weight
    assert draft.read_tree() == TreeSpec.dynamic(60, 7, 10)
    model.ea_layer.total_tokens, model.ea_layer.depth, model.ea_layer.top_k = 7, 3, 2
    assert draft.read_tree() == TreeSpec.dynamic(8, 3, 2)


def test_eagle1_is_read_as_it_is():
    model = stand_in("eagle1")
    view, draft = upstream.read(model)
    assert isinstance(draft, Eagle1Draft) and view.feature_layers == () and draft.head is view.head
    assert draft.layers[0].input_norm is None and draft.layers[1].input_norm is not None
    assert draft.fc.bias is model.ea_layer.fc.bias


def test_eagle_llm_tree_is_read_at_call_time():
    model = stand_in("eagle-llm")
    draft = eagle_llm.read(model)[1]
    assert draft.read_tree() == TreeSpec.fixed([[0], [1], [0, 0]])
    model.ea_layer.tree = [[0]]
    assert draft.read_tree() == TreeSpec.fixed([[0]])


def test_coinciding_feature_layers_are_collected_once():
    model = stand_in(layers=5)  # 2, 5 // 2 and 5 - 3 are one layer
    model.ea_layer.fc = nn.Linear(HIDDEN, HIDDEN, bias=False)
    assert upstream.read(model)[0].feature_layers == (2,)


def test_rotary_frequencies_do_not_come_from_a_rounded_buffer():
    model = stand_in()
    exact = model.ea_layer.midlayer.self_attn.rotary_emb.inv_freq.clone()
    model.to(torch.bfloat16)
    view, draft = upstream.read(model)
    for layer in (view.layers[0], draft.layers[0]):
        assert layer.mixer.rotary.inv_freq.dtype == torch.float32
        assert torch.equal(layer.mixer.rotary.inv_freq, exact)


def test_scaled_rotary_embeddings():
    model = stand_in()
    model.base_model.model.layers[0].self_attn.rotary_emb = LlamaLinearScalingRotaryEmbedding()
    first, second = (layer.mixer.rotary.inv_freq for layer in upstream.read(model)[0].layers[:2])
    torch.testing.assert_close(first * 4, second)


def test_qwen3_shares_one_rotary_embedding_and_has_head_norms():
    model = stand_in(source="modeling_qwen3_kv")
    model.base_model.model.rotary_emb = Qwen3RotaryEmbedding()
    for layer in model.base_model.model.layers:
        del layer.self_attn.rotary_emb
        layer.self_attn.q_norm, layer.self_attn.k_norm = Norm(HEAD_DIM), Norm(HEAD_DIM)
    attention = upstream.read(model)[0].layers[0].mixer
    assert attention.rotary.attention_scaling == 1.25
    assert torch.equal(attention.rotary.inv_freq, model.base_model.model.rotary_emb.inv_freq)
    assert attention.q_norm.weight is model.base_model.model.layers[0].self_attn.q_norm.weight


class ZeroCentredNorm(Norm):
    """Gemma's, and Qwen3.5's: 1 + weight. `centre` 2 is nobody's."""

    centre = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = nn.functional.rms_norm(x.float(), self.weight.shape, eps=self.variance_epsilon)
        return (normed * (self.centre + self.weight.float())).to(x.dtype)


def read_norm(norm: nn.Module) -> Any:
    """A norm as it is read in a model."""
    return ModuleReader(SimpleNamespace(norm=norm)).norm("norm")


WEIGHTS = {"zeros": 0.0, "ones": 1.0, "around zero": None, "minus a half": -0.5, "minus one": -1.0, "large": 60.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("kind", [Norm, ZeroCentredNorm], ids=["plain", "zero-centred"])
def test_norms_are_told_apart_by_what_they_compute(kind, value, dtype):
    module = kind(HIDDEN)
    weight = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1)) / 3 if value is None else value
    module.weight.data = module.weight.data * 0 + weight
    norm = read_norm(module.to(dtype))
    assert norm.weight is module.weight and norm.eps == 1e-5
    assert norm.zero_centred == (kind is ZeroCentredNorm)


class OnceRoundedNorm(Norm):
    """gpt-oss's, OLMo 2's and Gemma 4's: the weight multiplies the fp32 value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon, -0.5)
        return (normed * self.weight.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [64, 2880])
@pytest.mark.parametrize(
    "kind", [LlamaRMSNorm, ZeroCentredNorm, OnceRoundedNorm], ids=["plain", "zero-centred", "once"]
)
def test_the_rounding_of_a_norm_is_found_by_its_bits(kind, size, dtype):
    """With weights near 1, and with all but one of them at 1."""
    for spread in (1.0, 0.0):
        module = kind(size)
        weight = 1 + spread * torch.randn(size, generator=torch.Generator().manual_seed(1)) / 10
        weight[3] = 1.3
        module.weight.data = weight
        norm = read_norm(module.to(dtype))
        assert norm.zero_centred == (kind is ZeroCentredNorm)
        if spread or kind is not OnceRoundedNorm:
            assert norm.round_first == (kind is not OnceRoundedNorm or dtype == torch.float32)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "olmo2", "gemma3", "gemma4", "qwen3"])
def test_hugging_face_norms_are_read_as_what_they_are(family):
    home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name = {"gpt_oss": "GptOssRMSNorm"}.get(family, f"{family.capitalize()}RMSNorm")
    module = getattr(home, name)(256, eps=1e-5).bfloat16()
    module.weight.data = torch.randn(256, generator=torch.Generator().manual_seed(1)).bfloat16()
    norm = read_norm(module)
    assert (norm.zero_centred, norm.round_first) == {
        "gpt_oss": (False, False), "olmo2": (False, False), "gemma4": (False, False), "gemma3": (True, True)
    }.get(family, (False, True))  # fmt: skip


def test_a_norm_that_gives_another_dtype_is_refused():
    module = OnceRoundedNorm().bfloat16()
    module.forward = lambda x: x.float()
    with pytest.raises(UnsupportedModelError, match="does not compute an RMSNorm"):
        read_norm(module)


@pytest.mark.parametrize("centre", [0.5, 2.0, -1.0])
def test_a_norm_of_neither_kind_is_refused(centre):
    module = ZeroCentredNorm()
    module.centre = centre
    with pytest.raises(UnsupportedModelError, match=r"model\.norm \(ZeroCentredNorm\) does not compute an RMSNorm"):
        read_norm(module)


def test_what_is_no_plain_linear_is_called_as_the_module_it_is():
    class Quantised(nn.Linear):
        pass

    model = stand_in()
    model.base_model.lm_head = Quantised(HIDDEN, VOCAB)
    assert upstream.read(model)[0].head.module is model.base_model.lm_head


def set_rotary(model: Any, rotary: nn.Module) -> None:
    model.base_model.model.layers[2].self_attn.rotary_emb = rotary


BROKEN = {
    "tensor parallel target": (lambda m: setattr(m.base_model.config, "pretraining_tp", 2), "pretraining_tp must be 1"),
    "tensor parallel head": (
        lambda m: setattr(m.ea_layer.midlayer.self_attn.config, "pretraining_tp", 4),
        r"model\.ea_layer\.midlayer\.self_attn\.config\.pretraining_tp must be 1, got 4",
    ),
    "dynamic rope": (
        lambda m: set_rotary(m, LlamaDynamicNTKScalingRotaryEmbedding()),
        r"model\.base_model\.model\.layers\.2\.self_attn\.rotary_emb must be one of .* got 'dynamic'",
    ),
    "longrope": (lambda m: set_rotary(m, Qwen3RotaryEmbedding("longrope")), "got 'longrope'"),
    "another activation": (
        lambda m: setattr(m.base_model.model.layers[1].mlp, "act_fn", nn.Softmax(-1)),
        r"layers\.1\.mlp\.act_fn must be SiLU",
    ),
    "another activation in the head": (
        lambda m: setattr(m.ea_layer.midlayer.mlp, "act_fn", nn.Softmax(-1)),
        r"model\.ea_layer\.midlayer\.mlp\.act_fn must be SiLU",
    ),
    "another norm": (
        lambda m: setattr(m.base_model.model, "norm", nn.BatchNorm1d(HIDDEN, eps=0)),
        r"model\.base_model\.model\.norm \(BatchNorm1d\) has no eps",
    ),
    "head of another hidden size": (
        lambda m: setattr(m.ea_layer, "fc", nn.Linear(3 * 48, HIDDEN)),
        r"model\.ea_layer\.fc columns must be 96 .* got 144",
    ),
    "head of another vocabulary": (
        lambda m: setattr(m.ea_layer, "embed_tokens", nn.Embedding(VOCAB + 1, HIDDEN)),
        r"model\.ea_layer\.embed_tokens\.weight rows must be 24 .* got 25",
    ),
    "head of another dtype": (lambda m: m.ea_layer.to(torch.bfloat16), r"dtype must be torch\.float32"),
    "draft ids out of range": (
        lambda m: m.ea_layer.d2t.add_(1),
        r"model\.ea_layer\.d2t must map to tokens in 0\.\.23",
    ),
    "no draft ids": (lambda m: delattr(m.ea_layer, "d2t"), r"model\.ea_layer\.d2t is missing on Head"),
    "a missing projection": (
        lambda m: delattr(m.base_model.model.layers[0].self_attn, "k_proj"),
        r"model\.base_model\.model\.layers\.0\.self_attn\.k_proj is missing",
    ),
    "too few layers for features": (
        lambda m: setattr(m.base_model.model, "layers", m.base_model.model.layers[:5]),
        "fc columns must be 32",
    ),
}


@pytest.mark.parametrize("damage, message", BROKEN.values(), ids=BROKEN)
def test_unexpected_structure_raises_with_its_path(damage, message):
    model = stand_in()
    damage(model)
    with pytest.raises(UnsupportedModelError, match=message):
        upstream.read(model)


def test_targets_that_cannot_be_decoded_are_refused():
    with pytest.raises(UnsupportedModelError, match="has no features for an EAGLE-3 head"):
        upstream.read(stand_in(source="modeling_qwen2_kv"))
    upstream.read(stand_in("eagle1", source="modeling_qwen2_kv"))
    for family, kind in ((upstream, "eagle3"), (eagle_llm, "eagle-llm")):
        model = stand_in(kind, source="modeling_bloom_kv")
        assert family.recognise(model)
        with pytest.raises(UnsupportedModelError, match="modeling_llama_kv.* got ForCausalLM of modeling_bloom_kv"):
            family.read(model)


@pytest.mark.parametrize("family, kind", [(upstream, "eagle1"), (eagle_llm, "eagle-llm")])
def test_mixtrals_experts_are_called_as_they_are(family, kind):
    """The block returns its router's logits too, and is no gated block of the engine's."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.top_k, self.gate = 2, nn.Linear(HIDDEN, 4, bias=False)
            self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

        def forward(self, x):
            weights, chosen = self.gate(x).softmax(-1).topk(self.top_k)
            parts = torch.stack([expert(x) for expert in self.experts], -2).take_along_dim(chosen[..., None], -2)
            return (weights[..., None] * parts).sum(-2), self.gate(x)

    model = stand_in(kind, source="modeling_mixtral_kv")
    for layer in model.base_model.model.layers:
        del layer.mlp
        layer.block_sparse_moe = Block()
    view, _ = family.read(model)
    block, x = model.base_model.model.layers[1].block_sparse_moe, torch.randn(2, 3, HIDDEN)
    mixture = view.layers[1].mlp
    assert mixture.module is block and (mixture.chosen, mixture.count) == (2, 4)
    assert torch.equal(feed_forward(make_operations(), mixture, x), block(x)[0])
    with pytest.raises(UnsupportedModelError, match="has no features for an EAGLE-3 head"):
        upstream.read(stand_in(source="modeling_mixtral_kv"))


def test_a_method_with_other_arguments_is_refused():
    model = stand_in()
    model.eagenerate = lambda input_ids, temperature=0.5: None
    with pytest.raises(UnsupportedModelError, match=r"model\.eagenerate must take .*got"):
        methods.method_patch_point(model, "eagenerate", lambda input_ids, temperature=0.0: None)
    with pytest.raises(UnsupportedModelError, match=r"model\.naivegenerate is missing"):
        methods.method_patch_point(model, "naivegenerate", lambda input_ids: None)


def test_trees_wider_than_the_draft_vocabulary_are_refused():
    draft = upstream.read(stand_in())[1]
    draft.check_tree(TreeSpec.dynamic(8, 2, DRAFT_VOCAB))
    with pytest.raises(ValueError, match=r"at most 16, the draft's vocabulary, got 17"):
        draft.check_tree(TreeSpec.dynamic(8, 2, DRAFT_VOCAB + 1))


# --- attention masks and caches as code that drives the model hands them over ---


def tree_mask(past: int, parents: list[int], lowest: float) -> torch.Tensor:
    mask = torch.full((1, 1, len(parents), past + len(parents)), lowest)
    mask[..., :past] = 0
    for node, parent in enumerate(parents):
        mask[0, 0, node, past:] = mask[0, 0, parent, past:] if node else lowest
        mask[0, 0, node, past + node] = 0
    return mask


@pytest.mark.parametrize("lowest", [float("-inf"), LOWEST, torch.finfo(torch.bfloat16).min])
@pytest.mark.parametrize("past", [0, 5])
def test_masks_become_ancestor_bits(past, lowest):
    mask = tree_mask(past, [-1, 0, 0, 1], lowest)
    assert _ancestors(mask, past, 1, 4)[0, :, 0].tolist() == [0b1, 0b11, 0b101, 0b1011]
    assert _ancestors(mask == 0, past, 2, 4).shape == (2, 4, 1)
    assert _ancestors(tree_mask(past, [-1, 0, 1, 2], lowest), past, 1, 4) is None  # a chain is causal
    assert _ancestors(tree_mask(past, [-1], lowest), past, 1, 1) is None


@pytest.mark.parametrize(
    "place, value",
    [
        ((0, 0, 2, 1), LOWEST),
        ((0, 0, 3, 8), LOWEST),
        ((0, 0, 0, 6), 0.0),
        ((0, 0, 2, 5), -1.5),
        ((0, 0, 2, 1), float("nan")),
    ],
    ids=["a hidden cached token", "a token hidden from itself", "a later token shown", "a bias", "NaN"],
)
def test_masks_that_are_no_tree_fall_back(place, value):
    mask = tree_mask(5, [-1, 0, 0, 1], LOWEST)
    mask[place] = value
    with pytest.raises(Fallback, match="neither causal nor a tree"):
        _ancestors(mask, 5, 1, 4)
    with pytest.raises(Fallback, match="shape"):
        _ancestors(mask, 4, 1, 4)


class KVCache:
    def __init__(self, data: torch.Tensor, current_length: torch.Tensor):
        self.data, self.current_length = data, current_length


def test_preallocated_rows_are_one_view_of_keys_and_values():
    data, lengths = torch.zeros(6, 1, 2, 9, 4), torch.full((6,), 3)
    pair = [KVCache(data[2], lengths[2]), KVCache(data[3], lengths[3])]
    rows = PreallocatedRows(pair, torch.zeros(1, 5, 8))
    view = rows.cache(None)
    assert view.shape == (2, 1, 2, 9, 4) and rows.length == 3
    view[1, 0, 1, 7] = 1.0
    assert data[3, 0, 1, 7].tolist() == [1.0] * 4 and data.sum() == 4
    rows.keep()
    assert lengths.tolist() == [3, 3, 8, 8, 3, 3]
    for broken in (
        [KVCache(data[2], lengths[2]), KVCache(data[3].clone(), lengths[3])],
        [KVCache(data[2], lengths[2]), KVCache(data[3], lengths[4])],
        (data[2], data[3]),
        None,
    ):
        with pytest.raises(Fallback):
            PreallocatedRows(broken, torch.zeros(1, 1, 8))
    with pytest.raises(Fallback, match="too short"):
        PreallocatedRows(pair, torch.zeros(1, 2, 8))
