"""Gemma 4's assistants, which draft with the keys and values of their target."""

from typing import Any

import pytest
import torch
import transformers

from eagle_triton import (
    EAGLEConfig,
    EAGLEInference,
    EaModel,
    TritonConfig,
    UnsupportedModelError,
    optimize_with_triton,
)
from eagle_triton.engine.drafts.beams import DraftNodes
from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.mixers import NewRows
from eagle_triton.engine.model.model_view import prompt_forward
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.families.assistants import draft_from_assistant
from eagle_triton.families.causal_lm import read_causal_lm
from eagle_triton.inference import SpeculativeConfig
from eagle_triton.serve.drafters import Drafters
from tests.test_causal_lm import DEVICE
from tests.tiny import generate_row
from tests.tiny_families import ALTERNATE, GEMMA4, SIZES, randomise, skipped_if_unknown, tiny_family, tiny_head

PROMPTS = [torch.randint(1, 24, (1, length), generator=torch.Generator().manual_seed(length)) for length in (21, 9, 14)]
PROMPT = PROMPTS[0].to(DEVICE)
NEW = 12
TEXT = dict(
    hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, enable_moe_block=False, use_double_wide_mlp=False,
    num_kv_shared_layers=2, num_hidden_layers=2, layer_types=ALTERNATE[:2], final_logit_softcapping=None,
)  # fmt: skip


def tiny_assistant(ordered: bool = False, seed: int = 1, backbone: int = 64, **text: Any) -> Any:
    """An assistant of half the target's width. Its window, of 8 tokens, is shorter than the texts."""
    config = transformers.AutoConfig.for_model(
        "gemma4_assistant",
        text_config={"model_type": "gemma4_text", **SIZES, "hidden_size": 32, **GEMMA4, **TEXT, **text},
        backbone_hidden_size=backbone,
        use_ordered_embeddings=ordered,
        num_centroids=6,
        centroid_intermediate_top_k=3,
    )
    assistant = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomise(assistant, seed)
    if ordered:
        assistant.masked_embedding.token_ordering = torch.randperm(24, generator=torch.Generator().manual_seed(seed))
    assistant.generation_config.num_assistant_tokens = 4
    return assistant.to(DEVICE)


@pytest.fixture(scope="module")
def target():
    with skipped_if_unknown():
        tiny_assistant()
        return tiny_family("gemma4_text").to(DEVICE)


@pytest.fixture(scope="module", params=[False, True], ids=["whole vocabulary", "clusters"])
def assistant(request, target):
    return tiny_assistant(request.param)


@pytest.fixture(scope="module")
def wanted(target):
    return target.generate(PROMPT, max_new_tokens=NEW, do_sample=False)


def drafted_by(draft, target, prompt, kernels, steps=4):
    """Features and tokens of a chain by the draft's passes after a prompt, of which the last token is the root."""
    view, ops = read_causal_lm(target), make_operations(kernels=kernels)
    lengths = torch.tensor([prompt.shape[1] - 1], dtype=torch.int32, device=DEVICE)
    caches = view.new_caches(SlotPages.whole(1, 64, torch.device(DEVICE)))
    none = torch.zeros_like(lengths)
    features = prompt_forward(ops, view, prompt[:, :-1], caches, NewRows(none, none, None, None))[0][:, -1:]
    token, found = prompt[:, -1:], []
    for _ in range(steps):
        nodes = DraftNodes(features, None, token)
        features, normed = draft.forward(ops, nodes, caches, NewRows(lengths, lengths, None, None))
        _, _, token = draft.best_children(ops, normed, 1, 1)
        found.append((features, int(token)))
    return found


@pytest.mark.versions
@pytest.mark.parametrize("kernels", [False, True])
@torch.no_grad()
def test_passes_are_those_of_the_original(target, assistant, kernels):
    """With texts longer and shorter than the window. A window shows the assistant as many committed tokens as it has,
    and one more."""
    view = read_causal_lm(target)
    draft = draft_from_assistant(assistant, view, target.config, lambda: TreeSpec.chain(4))
    assert draft.sources == (1, 2)  # of the target's five layers, the last of each kind that have keys
    for prompt in PROMPTS[:2]:
        prompt = prompt.to(DEVICE)
        found = drafted_by(draft, target, prompt, kernels, steps=4 if prompt is PROMPTS[0] else 2)
        out = target(prompt[:, :-1], return_shared_kv_states=True, output_hidden_states=True)
        features, token = out.hidden_states[-1][:, -1:], prompt[:, -1:]
        place = torch.tensor([[prompt.shape[1] - 1]], device=DEVICE)
        for mine, drafted in found:
            inputs = torch.cat((target.get_input_embeddings()(token), features), -1)
            theirs = assistant(
                inputs_embeds=inputs, position_ids=place, shared_kv_states={**out.shared_kv_states}, use_cache=False
            )
            features, token = theirs.last_hidden_state, theirs.logits.argmax(-1)
            torch.testing.assert_close(mine, features, atol=2e-5, rtol=1e-5)
            assert drafted == int(token)


@pytest.mark.versions
def test_tokens_are_the_targets(target, assistant, wanted, tmp_path):
    """In trees and chains, given to a call or before, in memory or as a folder."""
    options = dict(max_new_tokens=NEW, do_sample=False)
    config = TritonConfig(topk=2, num_steps=3, num_draft_tokens=8)
    assistant.save_pretrained(tmp_path)
    for draft in (assistant, str(tmp_path)):
        with optimize_with_triton(target, draft, config)[1] as originals:
            assert torch.equal(target.generate(PROMPT, **options), wanted)
            row = generate_row(originals)
            assert row.calls == 1 and not row.fallbacks, row
    with optimize_with_triton(target)[1] as originals:
        assert torch.equal(target.generate(PROMPT, **options, assistant_model=assistant), wanted)
        row = generate_row(originals)
        assert row.calls == 1 and not row.fallbacks, row
        assert "trees_verified" in str(originals)
    by_method = SpeculativeConfig(method="draft_model", model=str(tmp_path), num_speculative_tokens=3)
    for draft, options in ((str(tmp_path), EAGLEConfig(fallback=False)), (None, by_method)):
        tokens, _ = EAGLEInference(draft, target, options).generate(PROMPT, NEW)
        assert torch.equal(tokens, wanted)


def test_requests_enter_and_leave(target, assistant):
    """Beside drafts from earlier text, in trees, sampled, and after plain steps of another length."""
    rows = [prompt[0].to(DEVICE) for prompt in PROMPTS]
    want = [target.generate(row[None], max_new_tokens=NEW, do_sample=False)[0].tolist() for row in rows]
    for options in (dict(suffix_drafts=3), dict(topk=3, num_steps=3, num_draft_tokens=8)):
        engine = EAGLEInference(assistant, target, EAGLEConfig(fallback=False, **options))
        tokens, stats = engine.generate(rows, NEW)
        assert [row.tolist() for row in tokens] == want and stats["total_tokens_generated"] == 3 * NEW
        assert Drafters.read(engine) == Drafters("draft_model", "suffix" if "suffix_drafts" in options else None)
    sampled = dict(temperature=0.8, seed=3)
    plain, _ = EAGLEInference("suffix", target, EAGLEConfig(suffix_drafts=1)).generate(rows, NEW, **sampled)
    found, _ = engine.generate(rows, NEW, **sampled)
    assert [row.tolist() for row in found] == [row.tolist() for row in plain]


def test_a_target_with_an_eagle3_head_has_the_assistants_features(target, wanted):
    """The head reads inputs of layers, the assistant the last hidden states."""
    assistant, head = tiny_assistant(), tiny_head(target, True)
    with optimize_with_triton(target, head)[1] as originals:
        found = target.generate(PROMPT, max_new_tokens=NEW, do_sample=False, assistant_model=assistant)
        assert torch.equal(found, wanted) and not generate_row(originals).fallbacks
    tokens, _ = EAGLEInference(assistant, EaModel(target, head), EAGLEConfig(fallback=False)).generate(PROMPT, NEW)
    assert torch.equal(tokens, wanted)


def test_changes_of_the_assistant_are_heard(target):
    assistant = tiny_assistant()
    prompt, options = PROMPT, dict(max_new_tokens=4, do_sample=False)
    with optimize_with_triton(target, assistant)[1]:
        target.generate(prompt, **options)
        weight = assistant.model.layers[0].mlp.up_proj.weight
        assistant.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight.detach().clone())
        with pytest.raises(RuntimeError, match=r"draft\.model\.layers\.0\.mlp\.up_proj\.weight was replaced"):
            target.generate(prompt, **options)


def test_what_does_not_fit_is_refused(target, assistant):
    llama = tiny_family("llama yarn").to(DEVICE)
    with pytest.raises(
        UnsupportedModelError, match="draft is an assistant of gemma4_text models .* the target is a llama"
    ):
        optimize_with_triton(llama, assistant)
    with pytest.raises(UnsupportedModelError, match=r"post_projection must have 64 outputs, .* got 48"):
        optimize_with_triton(target, tiny_assistant(backbone=48))
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.0 reads key heads and head sizes \(4, 16\), .* \(2, 16\)"
    ):
        optimize_with_triton(target, tiny_assistant(num_key_value_heads=4))
    if assistant.config.use_ordered_embeddings:
        with pytest.raises(ValueError, match="draft_vocabulary: this draft chooses among clusters"):
            optimize_with_triton(target, assistant, draft_vocabulary=12)
    else:
        with optimize_with_triton(target, assistant, draft_vocabulary=12)[1] as originals:
            target.generate(PROMPT, max_new_tokens=2, do_sample=False)
            assert "12 of 24 tokens are drafted" in str(originals)
