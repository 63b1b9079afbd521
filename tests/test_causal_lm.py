"""Bare Hugging Face models as target and as draft: identity and hostile drafts, distributions, and what is refused."""

import pytest
import torch
import transformers
from torch import nn

from eagle_triton import EAGLEConfig, EAGLEInference, optimize_with_triton, restore
from eagle_triton.engine.drafts.eagle import Eagle1Draft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.stop_rules import generate
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families import own_ea_model as native
from eagle_triton.families.causal_lm import draft_from_causal_lm, read_causal_lm
from eagle_triton.inference import SpeculativeConfig
from eagle_triton.models.ea_model import EaModel
from eagle_triton.models.heads import DraftConfig, Eagle1Head, Eagle3Head
from tests.tiny import ENDLESS, FAMILIES, SIZES, random_matrices, random_prompt, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHAIN = TreeSpec.dynamic(total_token=4, depth=2, top_k=1)  # three drafts, one below the other
WIDE = TreeSpec.dynamic(total_token=20, depth=3, top_k=4)
FIXED = TreeSpec.fixed([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
LENGTHS = (1, 70, 70)  # equal prompts are prefilled once


def causal_lm(family: str = "llama", vocab: int = 32, hidden: int = 64, layers: int = 3, seed: int = 0, **options):
    """A tiny random Hugging Face model in fp32, in evaluation mode."""
    torch.manual_seed(seed)
    sizes = SIZES | dict(hidden_size=hidden, num_hidden_layers=layers, head_dim=16, vocab_size=vocab)
    sizes |= dict(max_position_embeddings=2048)
    config = getattr(transformers, f"{FAMILIES[family]}Config")(**(sizes | ENDLESS | options))
    return random_matrices(getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config)).to(DEVICE)


def engine_for(target: nn.Module, draft: nn.Module, spec: TreeSpec, kernels: bool = DEVICE == "cuda") -> Engine:
    view = read_causal_lm(target)
    graph = kernels and DEVICE == "cuda"
    return Engine(view, draft_from_causal_lm(draft, view, lambda: spec), make_operations(kernels), cuda_graph=graph)


def run(engine: Engine, prompts: list[torch.Tensor], new: int, spec: TreeSpec | None = None, **sampling):
    return generate(
        engine,
        prompts,
        engine.draft.read_tree() if spec is None else spec,
        SamplingParams(**sampling),
        max_new_tokens=[new] * len(prompts),
        eos_token_ids=(),
    )


def greedy(model: nn.Module, prompt: torch.Tensor, new: int) -> torch.Tensor:
    """The model's own argmax, token by token and without a cache."""
    ids = prompt[None]
    with torch.no_grad():
        for _ in range(new):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    return ids[0]


def prompts_of(count: int) -> list[torch.Tensor]:
    return [random_prompt(length)[0].to(DEVICE) for length in LENGTHS[:count]]


class Negated(nn.Linear):
    """An output projection with the order of the tokens turned round."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_equal_to_the_target_is_accepted_to_the_last_token(family):
    """Every step accepts the whole chain: the draft's cache never misses a row, and positions are right."""
    model = causal_lm(family, **({"sliding_window": 20} if family == "mistral" else {}))
    engine = engine_for(model, model, CHAIN)
    prompts = prompts_of(3)
    rows = run(engine, prompts, 28)
    assert engine.accept_lengths == [3] * 7
    with Batch.start(engine, prompts, CHAIN, SamplingParams(), 200) as running:
        assert [(row.tree, len(row.tokens)) for row in running.step()] == [(None, 1)] * len(prompts)
        accepted = [[progress.accepted for progress in running.step()] for _ in range(12)]
    assert accepted == [[3] * 3] * 12
    for prompt, row in zip(prompts[:2], rows, strict=False):
        assert torch.equal(row, greedy(model, prompt, 28))
    assert torch.equal(rows[2], rows[1])


def test_drafts_are_what_the_draft_model_says_on_its_own():
    """After every step of a batch with rejections, each chain is the draft's own greedy continuation."""
    target = causal_lm("qwen2", vocab=8)
    draft = causal_lm("mistral", vocab=8, hidden=48, num_attention_heads=6, head_dim=8, seed=2, sliding_window=20)
    engine = engine_for(target, draft, CHAIN)
    prompts = [prompt % 8 for prompt in prompts_of(3)]
    seen = set()
    with Batch.start(engine, prompts, CHAIN, SamplingParams(temperature=1.0, seed=1), 200) as running:
        running.in_flight.most = 1  # the tree that is read belongs to the step that was read
        assert [(row.tree, len(row.tokens)) for row in running.step()] == [(None, 1)] * len(prompts)
        for step in range(15):
            running.spec = PLAIN if step in (5, 6, 7, 8) else CHAIN  # plain steps, which the draft takes in later
            counts = [progress.accepted for progress in running.step()]
            if running.spec == PLAIN:
                continue
            for slot, count in enumerate(counts):
                tree = running.state.tree.tokens[slot]
                tokens = running.tokens(slot)
                assert tokens[-1] == tree[0] and torch.equal(tree[1:], greedy(draft, tokens, 3)[-3:])
                seen.add(count)
    assert len(seen) > 1, "every step accepted the same number: the test shows little"


@pytest.mark.parametrize("spec", [WIDE, FIXED], ids=["dynamic", "fixed"])
def test_a_draft_equal_to_the_target_never_misses_the_first_token_of_a_tree(spec):
    """The likeliest child of the root is in every tree; the fixed one holds the likeliest path to its end."""
    model = causal_lm()
    engine = engine_for(model, model, spec)
    run(engine, prompts_of(1), 40)
    if spec is FIXED:
        assert engine.accept_lengths == [3] * len(engine.accept_lengths)
    assert min(engine.accept_lengths) >= 1 and sum(engine.accept_lengths) > 1.5 * len(engine.accept_lengths)


def test_a_draft_that_is_never_right_costs_no_token():
    """The target's least likely tokens are drafted: nothing is accepted, and the output is right."""
    model, hostile = causal_lm(), causal_lm()
    hostile.lm_head = Negated(64, 32, bias=False, device=DEVICE)
    hostile.lm_head.weight = model.lm_head.weight
    engine = engine_for(model, hostile, WIDE)
    (prompt,) = prompts_of(1)
    (row,) = run(engine, [prompt], 30)
    assert set(engine.accept_lengths) == {0} and len(engine.accept_lengths) == 29  # the first came with the prompt
    assert torch.equal(row, greedy(model, prompt, 30))


@pytest.mark.parametrize(
    ("families", "spec", "batch"),
    [
        (("llama", "qwen3"), CHAIN, 1),
        (("mistral", "llama"), WIDE, 3),
        (("qwen2", "mistral"), FIXED, 3),
    ],
    ids=["llama-chain", "mistral-dynamic", "qwen2-fixed"],
)
def test_greedy_equals_decoding_with_the_target_alone(families, spec, batch):
    """The draft has a width, heads and depth of its own; no EaModel is anywhere."""
    target = causal_lm(families[0], vocab=8, **({"sliding_window": 20} if families[0] == "mistral" else {}))
    own = dict(hidden=48, layers=2, num_attention_heads=6, num_key_value_heads=3, head_dim=8, seed=2)
    draft = causal_lm(families[1], vocab=8, **own)
    engine = engine_for(target, draft, spec)
    prompts = [prompt % 8 for prompt in prompts_of(batch)]
    rows, accepted = run(engine, prompts, 40), engine.accept_lengths
    assert all(map(torch.equal, rows, run(engine, prompts, 40, PLAIN)))
    for prompt, row in zip(prompts[:2], rows, strict=False):
        assert torch.equal(row, greedy(target, prompt, 40))
    assert 0 < sum(accepted) < 3 * len(accepted) or spec is CHAIN


def test_the_kernels_draft_with_a_model_of_another_shape():
    """On a CPU in Triton's interpreter."""
    target = causal_lm(vocab=8, layers=2)
    own = dict(hidden=48, layers=1, num_attention_heads=6, num_key_value_heads=3, head_dim=8, seed=2)
    draft, spec = causal_lm("qwen3", vocab=8, **own), TreeSpec.dynamic(total_token=6, depth=2, top_k=2)
    engine, prompt = engine_for(target, draft, spec, kernels=True), random_prompt(5, vocab=8)[0].to(DEVICE)
    references = engine_for(target, draft, spec, kernels=False)
    for subject in (engine, references):
        assert torch.equal(run(subject, [prompt], 8)[0], greedy(target, prompt, 8))
    assert engine.accept_lengths == references.accept_lengths and sum(engine.accept_lengths) > 0


def test_a_long_prompt_reaches_the_draft_in_chunks():
    model = causal_lm(layers=2)
    engine = engine_for(model, model, CHAIN)
    prompt = random_prompt(1100)[0].to(DEVICE)
    (row,) = run(engine, [prompt], 12)
    assert engine.accept_lengths == [3, 3, 3]
    assert torch.equal(row, greedy(model, prompt, 12))


@pytest.mark.parametrize("rows", [381, 382, 383])
def test_a_full_cache_holds_the_row_of_the_root(rows):
    """A model needs one row more than a head, also where a bucket of 512 ends: here behind 130 rows of beam nodes."""
    model, spec = causal_lm(layers=2), TreeSpec.dynamic(total_token=4, depth=10, top_k=13)
    engine, prompt = engine_for(model, model, spec), random_prompt(rows - 1)[0].to(DEVICE)
    (row,) = run(engine, [prompt], 1)
    assert torch.equal(row, greedy(model, prompt, 1))


# --- a draft head without an EaModel ---


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 with the usual layers", "eagle1"])
def test_a_bare_target_and_a_head_decode_as_an_ea_model_does(kind):
    model = tiny_model(eagle3=kind != "eagle1", total_token=16, depth=3, top_k=4)
    if kind == "eagle3 with the usual layers":
        config = model.ea_layer.config.replace(feature_layers=None)
        target = causal_lm(layers=8).cpu()
        model = EaModel(target, Eagle3Head(config, total_token=16, depth=3, top_k=4)).eval()
    view, draft = native.read_pair(model.base_model, model.ea_layer)
    assert view.feature_layers == tuple(model.feature_layers or ())
    assert isinstance(draft, Eagle1Draft) == (kind == "eagle1")
    engine, prompt = Engine(view, draft, make_operations()), random_prompt(20)
    (row,) = run(engine, [prompt[0]], 30)
    assert torch.equal(row, model.generate(prompt, max_new_tokens=30)[0])
    assert engine.accept_lengths == model.accept_lengths[: len(engine.accept_lengths)]


def test_heads_that_do_not_fit_the_target_are_refused():
    model = tiny_model()
    config = model.ea_layer.config
    for changes, message in (
        (dict(vocab_size=31), "the head's vocabulary has 31 tokens, the target's 32"),
        (dict(target_hidden_size=48), "expects hidden size 48, the target has 64"),
        (dict(feature_layers=(1, 2, 9)), "the head sees layers \\[1, 2, 9\\], the target has 4"),
    ):
        with pytest.raises(ValueError, match=message):
            native.read_pair(model.base_model, Eagle3Head(config.replace(**changes), depth=3, total_token=8, top_k=2))
    with pytest.raises(UnsupportedModelError, match="draft_model .* dtype torch.bfloat16, the target's is torch.float"):
        native.read_pair(model.base_model, Eagle3Head(config).bfloat16())
    with pytest.raises(ValueError, match="not three different layers for L = 2"):
        native.read_pair(causal_lm(layers=2), Eagle3Head(config.replace(feature_layers=None)))
    with pytest.raises(UnsupportedModelError, match="target_model must be a causal language model"):
        native.read_pair(nn.Linear(2, 2), Eagle1Head(DraftConfig(64, 96, 4, 32)))


# --- what is refused ---


def other_architecture():
    config = transformers.GPT2Config(vocab_size=32, n_embd=64, n_layer=1, n_head=4)
    return transformers.GPT2LMHeadModel(config)


def damaged(path: str, replacement) -> nn.Module:
    model = causal_lm()
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, replacement)
    return model


def half_projection() -> nn.Module:
    model = causal_lm()
    model.model.layers[1].mlp.up_proj.to(torch.float16)
    return model


def quantised_embedding() -> nn.Module:
    model = causal_lm()
    codes = torch.zeros(32, 64, dtype=torch.int8, device=DEVICE)
    model.model.embed_tokens.weight = nn.Parameter(codes, requires_grad=False)
    return model


REFUSED = {
    "another architecture": (
        other_architecture,
        r"draft_model is a GPT2LMHeadModel: model_type 'gpt2' is not supported; supported are llama, mistral, qwen2, ",
    ),
    "a body without a head": (lambda: causal_lm().model, "got LlamaModel"),
    "another vocabulary": (lambda: causal_lm(vocab=40), "vocabulary 40, the target's is 32"),
    "another dtype": (lambda: causal_lm().bfloat16(), "dtype torch.bfloat16, the target's is torch.float32"),
    "weights without storage": (lambda: causal_lm().to("meta"), "draft_model must lie on one device.* meta"),
    "hooked": (lambda: damaged("model.layers.0._hf_hook", object()), "has hooks of accelerate, which would not run"),
    "one layer of another dtype": (
        half_projection,
        r"draft_model\.model\.layers\.1\.mlp\.up_proj\.weight must be torch\.float32, .*got torch\.float16",
    ),
    "a quantised embedding": (
        quantised_embedding,
        r"draft_model\.model\.embed_tokens\.weight must be float32, bfloat16, float16, got torch\.int8",
    ),
    "another activation": (
        lambda: damaged("model.layers.1.mlp.act_fn", nn.Softmax(-1)),
        r"draft_model\.model\.layers\.1\.mlp\.act_fn must be SiLU",
    ),
    "dynamic rope": (
        lambda: causal_lm(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        r"draft_model\.model\.rotary_emb must be one of .*'dynamic'",
    ),
}


@pytest.mark.parametrize("rows", [-1, 1])
def test_a_draft_of_another_padding(rows):
    """Its embedding has a row more or less than the target's: the same tokenizer, padded to another size."""
    vocab = 128
    target, twin = causal_lm(vocab=vocab), causal_lm(vocab=vocab + rows)
    with torch.no_grad():  # the same model, but for the padding
        for mine, others in zip(twin.parameters(), target.parameters(), strict=True):
            common = min(len(mine), len(others))
            mine[:common] = others[:common]
        if rows > 0:
            twin.lm_head.weight[vocab:] = 50.0  # its padding is what it would say most often
    config = EAGLEConfig(
        speculative=SpeculativeConfig(method="draft_model", num_speculative_tokens=3), fallback=False, slots=2
    )
    inference = EAGLEInference(twin, target, config)
    for last in (9, vocab - 1):  # the draft may not know the last token of the vocabulary
        prompt = torch.tensor([[1, 5, last, 3]], device=DEVICE)
        expected = target.generate(prompt, max_new_tokens=24, do_sample=False)[0]
        (found,), stats = inference.generate(prompt, max_new_tokens=24)
        assert torch.equal(found, expected)
        assert stats["mean_accept_length"] > 3.5 or (rows < 0 and last == vocab - 1)  # of four
    optimize_with_triton(target, twin)
    try:
        assert torch.equal(target.generate(prompt, max_new_tokens=24, do_sample=False)[0], expected)
    finally:
        restore(target)


@pytest.mark.parametrize("make, message", REFUSED.values(), ids=REFUSED)
def test_drafts_that_cannot_serve_are_refused(make, message):
    view = read_causal_lm(causal_lm())
    with pytest.raises(UnsupportedModelError, match=message):
        draft_from_causal_lm(make(), view, lambda: CHAIN)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_draft_on_another_device_is_refused():
    view = read_causal_lm(causal_lm())
    with pytest.raises(UnsupportedModelError, match="device cpu, the target's is cuda"):
        draft_from_causal_lm(causal_lm().cpu(), view, lambda: CHAIN)


def test_features_of_layers_that_are_missing_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"model\.layers has 3 layers, and none numbered \[3\]"):
        read_causal_lm(causal_lm(), (1, 2, 3))


def test_layers_that_are_no_plain_linear_are_called_as_they_are():
    """A quantised layer stays the module it is, in the target and in the draft."""

    class Quantised(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Quantised.calls += 1
            return super().forward(x)

    model, twin = causal_lm(), causal_lm()
    model.model.layers[0].mlp.down_proj = Quantised(96, 64, bias=False, device=DEVICE)
    model.model.layers[0].mlp.down_proj.weight = twin.model.layers[0].mlp.down_proj.weight
    engine, (prompt,) = engine_for(model, model, CHAIN), prompts_of(1)
    (row,) = run(engine, [prompt], 9)
    assert Quantised.calls > 0 and set(engine.accept_lengths) == {3}
    assert torch.equal(row, greedy(twin, prompt, 9))
