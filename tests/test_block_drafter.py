"""Block drafters: drafts against a plain forward and a heap, the target's tokens, and checkpoints in all layouts."""

from __future__ import annotations

import heapq
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eagle_triton import (
    EAGLEConfig,
    EAGLEInference,
    TritonConfig,
    UnsupportedModelError,
    export_head,
    optimize_with_triton,
)
from eagle_triton.cli import main
from eagle_triton.engine.drafts.block import BlockDraft
from eagle_triton.engine.drafts.hybrid import ContinuedDraft
from eagle_triton.engine.drafts.repeats import NgramSource
from eagle_triton.engine.model.mixers import KeyValues, NewRows
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.export.comparison import compare_drafts
from eagle_triton.inference import EGAGConfig, SpeculativeConfig, create_proposer
from eagle_triton.inference.stages import Prefix
from eagle_triton.models.block_drafter import BlockDrafter, BlockDrafterConfig
from eagle_triton.models.block_loading import block_drafter_of, fit_block_drafter, load_block_drafter
from eagle_triton.models.head_loading import load_head
from tests.checkpoints import config_of, edited
from tests.failing import check_refused
from tests.tiny import ENDLESS, SIZES, generate_row, random_prompt, tiny_model
from tests.tiny_families import randomise, skipped_if_unknown, tiny_family
from tests.tiny_hybrids import KINDS as HYBRIDS
from tests.tiny_hybrids import tiny_hybrid

VOCAB, LAYERS, BLOCK = 16, 6, 6
DFLASH2: dict = dict(conv_taps=2, conv_group=16, selector_top_k=5, selector_rank=7, windows=(8, None))
KINDS: dict[str, dict] = {
    "in place": {},
    "shifted": dict(shifted=True),
    "causal": dict(causal=(True, True)),
    "windows": dict(causal=(True, False), windows=(9, None)),
    "vanilla": dict(shifted=True, markov_head="vanilla", markov_rank=5),
    "gated": dict(shifted=True, markov_head="gated", markov_rank=5),
    "rnn": dict(shifted=True, markov_head="rnn", markov_rank=5),
    "Domino": dict(shifted=True, gru_size=6, gru_rank=5, gru_start=1, embedding_scale=2.0),
    "Domino in place": dict(gru_size=6, gru_rank=5, own_embedding=True, own_head=True, draft_vocab_size=9),
    "own": dict(own_embedding=True, own_head=True, draft_vocab_size=9, logit_cap=3.0, qk_norm=False),
    "windows over the block": dict(windows=(9, 7)),
    "DFlash2": DFLASH2,
    "yarn": dict(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16), shifted=True),
    "scaled": dict(embedding_scale=3.0, logit_scale=0.5, attention_bias=True, rope_theta=100.0),
}
TREES = {"chain": (None, 1), "tree": (16, 4)}


def target(seed: int = 0) -> torch.nn.Module:
    return tiny_model(vocab=VOCAB, layers=LAYERS, seed=seed).base_model


def block_drafter(seed: int = 2, tree: str = "chain", **changes: object) -> BlockDrafter:
    """A random one, whose norms are random too. Head dim and hidden size do not go by heads."""
    sizes: dict = SIZES | dict(
        intermediate_size=40,
        num_hidden_layers=2,
        head_dim=24,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        block_size=BLOCK,
        mask_token_id=VOCAB - 1,
        feature_layers=(1, 3, 4),
        causal=(False, False),
        windows=(None, None),
    )
    torch.manual_seed(seed)
    total_token, top_k = TREES[tree]
    drafter = BlockDrafter(BlockDrafterConfig(**sizes | changes), total_token, top_k).eval()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    if drafter.d2t is not None:
        drafter.d2t.copy_(torch.randperm(VOCAB)[: len(drafter.d2t)].sort().values - torch.arange(len(drafter.d2t)))
    return drafter


def plain(model: torch.nn.Module, ids: Tensor, new: int, **options: object) -> Tensor:
    """Greedy decoding by the model's own `generate`, or what is patched in its place."""
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **options)


class PlainDrafts:
    """What a drafter drafts after a text, by a plain forward over all of it."""

    @torch.no_grad()
    def __init__(self, drafter: BlockDrafter, model: torch.nn.Module, tokens: list[int]):
        config, self.drafter, self.model, self.root = drafter.config, drafter, model, tokens[-1]
        states = model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer] for layer in config.feature_layers], dim=-1)
        block = torch.tensor([[self.root, *[config.mask_token_id] * (config.block_size - 1)]])
        table = model.model.embed_tokens if drafter.embed_tokens is None else drafter.embed_tokens
        self.hidden = drafter(table(block), drafter.context(features))[0, 0 if config.shifted else 1 :]

    @torch.no_grad()
    def logits(self, path: tuple[int, ...]) -> Tensor:
        """Logits [Vd] of the tokens after a path."""
        rows, before, model = self.hidden[: len(path) + 1], torch.tensor((self.root, *path)), self.model
        return self.drafter.draft_logits(rows, model.lm_head, before, model.model.embed_tokens)[-1]

    @torch.no_grad()
    def scores(self, path: tuple[int, ...]) -> Tensor:
        """Log-probabilities [V] of the tokens after a path."""
        found = self.logits(path).log_softmax(-1)
        if self.drafter.d2t is None:
            return found
        everywhere = torch.full((VOCAB,), float("-inf"))
        return everywhere.index_copy(0, torch.arange(len(found)) + self.drafter.d2t, found)

    def best(self, spec: TreeSpec) -> list[tuple[int, ...]]:
        """The best drafts by the product of their probabilities, with at most top_k children each: one heap."""
        heap: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        found: list[tuple[int, ...]] = []
        while len(found) < spec.nodes:  # the root is among them
            minus, path = heapq.heappop(heap)
            found.append(path)
            if len(path) < spec.beam_levels:
                best = self.scores(path).topk(spec.top_k)
                for score, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    heapq.heappush(heap, (minus - score, (*path, token)))
        return found[1:]


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        *((kind, "tree") for kind in KINDS if kind != "shifted"),  # as "yarn" is too
        *((kind, "chain") for kind in ("in place", "vanilla", "rnn", "Domino", "DFlash2")),
    ],
)
def test_drafts_of_every_step_are_the_best_of_a_plain_forward(kind, tree):
    model, drafter = target(), block_drafter(tree=tree, **KINDS[kind])
    inference = EAGLEInference(drafter, model, EAGLEConfig(fallback=False))
    draft = inference.pair.draft
    assert isinstance(draft, BlockDraft)
    spec, accepted = draft.read_tree(), 0
    prompts = [random_prompt(9, VOCAB)[0].tolist(), random_prompt(14, VOCAB, 3)[0].tolist()]
    texts = [list(prompt) for prompt in prompts]
    for piece in inference.stream(prompts, 7, report_drafts=True):
        if piece.tree is not None:
            expected = PlainDrafts(drafter, model, texts[piece.index]).best(spec)
            assert sorted(piece.drafts) == sorted(path[-1] for path in expected)
            accepted += piece.accepted
        texts[piece.index] += piece.tokens
    assert accepted > 0 or tree == "chain"
    for prompt, text in zip(prompts, texts, strict=True):
        assert text == plain(model, torch.tensor([prompt]), 7)[0].tolist()


@pytest.mark.parametrize("kind", ["shifted", "DFlash2", "vanilla", "rnn", "Domino"])
def test_all_that_was_scored_and_chains_that_ngrams_continue(kind):
    model, drafter = target(), block_drafter(**KINDS[kind])
    inference = EAGLEInference(drafter, model, EAGLEConfig(fallback=False))
    ids, spec = random_prompt(9, VOCAB), TreeSpec.dynamic(10, 2, 3)
    alone, found = PlainDrafts(drafter, model, ids[0].tolist()), Prefix(inference.pair.engine, spec, ids).candidates()
    paths: list[tuple[int, ...]] = []
    for place, (token, score) in enumerate(zip(found.tokens[0].tolist(), found.scores[0].tolist(), strict=True)):
        paths.append((*(() if place < 3 else paths[found.expanded[0, place // 3 - 1]]), token))
        of_path = sum(float(alone.scores(paths[-1][:depth])[token]) for depth, token in enumerate(paths[-1]))
        assert score == pytest.approx(of_path, abs=1e-4)
    assert len(set(paths)) == spec.candidates == 21 and {len(path) for path in paths} == {1, 2, 3}
    draft = ContinuedDraft(model_draft=inference.pair.draft, source=NgramSource(3), chain=2)
    text = [1, 2, 3, 1, 2, 3, 1, 2]
    for piece in EAGLEInference(draft, model, EAGLEConfig(fallback=False)).stream([text], 6, report_drafts=True):
        if piece.tree is not None:
            best = PlainDrafts(drafter, model, text).best(TreeSpec.chain(2))
            assert piece.drafts[:2] == [path[-1] for path in best]
        text += piece.tokens


@pytest.mark.parametrize("kind", ["vanilla", "rnn", "Domino"])
def test_a_rows_best_tokens_are_corrected_and_the_rest_keep_their_probability(kind, monkeypatch):
    monkeypatch.setattr("eagle_triton.families.reading.block_drafter.MOST_CANDIDATES", 4)
    model, drafter = target(), block_drafter(**KINDS[kind])
    engine = EAGLEInference(drafter, model, EAGLEConfig(fallback=False)).pair.engine
    ids, spec = random_prompt(9, VOCAB), TreeSpec.dynamic(10, 2, 3)
    found, alone = Prefix(engine, spec, ids).candidates(), PlainDrafts(drafter, model, ids[0].tolist())
    first = found.expanded[0, 0]  # the best child of the root
    path: tuple[int, ...] = (int(found.tokens[0, first]),)
    below = found.scores[0, 3:6] - found.scores[0, first]
    logits, uncorrected = alone.logits(path), model.lm_head(alone.hidden[1])
    among = uncorrected.topk(4).indices
    scores = uncorrected.index_copy(0, among, logits[among]).log_softmax(-1)
    best = scores[among].topk(3)
    torch.testing.assert_close(below, best.values, rtol=1e-4, atol=1e-4)
    assert found.tokens[0, 3:6].tolist() == among[best.indices].tolist()


@pytest.mark.parametrize("kind", ["in place", "DFlash2", "vanilla", "Domino"])
def test_a_fixed_tree_has_the_nodes_that_it_names(kind):
    engine = EAGLEInference(block_drafter(**KINDS[kind]), target(), EAGLEConfig(fallback=False)).pair.engine
    prefix = Prefix(engine, TreeSpec.fixed([[0], [1], [0, 0], [0, 1], [1, 0], [1, 0, 1]]), random_prompt(9, VOCAB))
    with torch.no_grad():
        engine.draft.grow(engine.ops, prefix.state)
    assert prefix.state.tree.parents.tolist() == [[-1, 0, 0, 1, 1, 2, 5]]


GREEDY = {"chain": EAGLEConfig(fallback=False, slots=2), "tree": EAGLEConfig(fallback=False, suffix_drafts=4)}
SAMPLED = {
    "tree": EAGLEConfig(fallback=False),
    "chain": EAGLEConfig(topk=2, num_steps=3, num_draft_tokens=6, fallback=False),
}


@pytest.mark.parametrize(("kind", "sampled"), [("rnn", False), ("shifted", True)], ids=str)
def test_output_is_the_targets_whatever_drafts_beside_and_whoever_comes_and_goes(kind, sampled):
    """Alone and together, with grafts, with shared beginnings, and from a plain step on."""
    model, beginning = target(2), random_prompt(70, VOCAB)[0].tolist()  # more than a page
    prompts = [beginning + random_prompt(length, VOCAB, length)[0].tolist() for length in (3, 9, 1)]
    naive = EAGLEInference(None, model, EAGLEConfig(speculative=SpeculativeConfig(method="naive")))
    options, order = (dict(temperature=0.9, seed=4), 1) if sampled else ({}, -1)  # a row's place is part of its seed
    want = [list(tokens) for tokens in tokens_of(naive, prompts, **options)]
    for tree, config in (SAMPLED if sampled else GREEDY).items():
        inference = EAGLEInference(block_drafter(tree=tree, **KINDS[kind]), model, config)
        assert tokens_of(inference, prompts, **options) == want
        accepted = inference.statistics["total_accepted_tokens"]
        assert tokens_of(inference, prompts[::order], **options) == want[::order]  # their beginning is known now
        assert accepted > 0
        if not config.suffix_drafts:  # keys and values of the drafter were found with those of the target
            assert inference.statistics["total_accepted_tokens"] == 2 * accepted


@pytest.mark.skipif(not HYBRIDS, reason="transformers has no gated delta nets")
@pytest.mark.parametrize("tree", TREES)
def test_a_recurrent_correction_drafts_for_gated_delta_nets(tree):
    model = tiny_hybrid(HYBRIDS[0], vocab=VOCAB)
    drafter = block_drafter(tree=tree, **KINDS["Domino"] | dict(feature_layers=(1, 2, 3)))
    inference = EAGLEInference(drafter, model, EAGLEConfig(fallback=False))
    prompts = [random_prompt(length, VOCAB, length)[0].tolist() for length in (5, 12)]
    want = [plain(model, torch.tensor([ids]), 12)[0, len(ids) :].tolist() for ids in prompts]
    assert tokens_of(inference, prompts) == want
    assert inference.statistics["total_accepted_tokens"] > 0


def tokens_of(inference: EAGLEInference, prompts: list[list[int]], **options: object) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]
    for piece in inference.stream(prompts, 12, **options):
        found[piece.index] += piece.tokens
    return found


@pytest.mark.parametrize(
    "changes",
    [dict(block_size=2), dict(block_size=3, causal=(True, True)), dict(own_head=True, draft_vocab_size=3)],
    ids=["two rows", "three rows", "three tokens"],
)
def test_without_options_the_tree_is_the_drafters_own(changes):
    """The default of other drafts has three levels of four children each."""
    model, drafter = target(), block_drafter(**changes)
    prompt = random_prompt(9, VOCAB)[0].tolist()
    inference, text = EAGLEInference(drafter, model, EAGLEConfig(fallback=False)), list(prompt)
    for piece in inference.stream([prompt], 6, report_drafts=True):
        if piece.tree is not None:
            expected = PlainDrafts(drafter, model, text).best(TreeSpec.chain(drafter.config.drafts))
            assert piece.drafts == [path[-1] for path in expected]
        text += piece.tokens
    assert text == plain(model, torch.tensor([prompt]), 6)[0].tolist()


@pytest.mark.parametrize("kind", ["vanilla", "rnn", "Domino", "DFlash2", "scaled"])
def test_a_smaller_vocabulary_drafts_what_a_drafter_with_it_drafts(kind):
    model, known = target(), torch.tensor([1, 4, 6, 9])
    drafter = block_drafter(tree="tree", **KINDS[kind], logit_cap=1.5)
    few = block_drafter(tree="tree", **KINDS[kind] | ({"selector_top_k": 4} if kind == "DFlash2" else {}),
                        logit_cap=1.5, own_head=True, draft_vocab_size=4)  # fmt: skip
    state = drafter.state_dict() | {"lm_head.weight": model.lm_head.weight[known], "d2t": known - torch.arange(4)}
    names = {"vanilla": "markov_head.markov_w2", "rnn": "markov_head.markov_w2", "Domino": "embed_proj.2"}
    if kind in names:
        state[f"{names[kind]}.weight"] = state[f"{names[kind]}.weight"][known]
    few.load_state_dict(state)
    prompt, drafts = random_prompt(9, VOCAB)[0].tolist(), []
    for one, options in ((few, {}), (drafter, dict(draft_vocabulary=known.tolist()))):
        inference = EAGLEInference(one, model, EAGLEConfig(fallback=False, topk=3, num_steps=4, **options))
        drafts.append([piece.drafts for piece in inference.stream([prompt], 8, report_drafts=True)])
    assert drafts[0] == drafts[1] and any(drafts[0])


def test_a_target_with_a_head_has_the_features_of_the_model_that_drafts():
    model, prompts = tiny_model(vocab=VOCAB, layers=LAYERS, seed=2), [[1, 2, 3], [5, 4]]
    assert model.feature_layers
    for draft, layers in ((block_drafter(shifted=True), (1, 3, 4)), (model.base_model, ())):
        found = []
        for beside in (model, model.base_model):
            inference = EAGLEInference(draft, beside, EAGLEConfig(fallback=False))
            assert inference.pair.view.feature_layers == layers
            found.append([(p.tokens, p.drafts) for p in inference.stream(prompts, 8, report_drafts=True)])
        assert found[0] == found[1] and any(drafts for _, drafts in found[0])


def test_the_draft_of_a_proposer_reads_the_layers_that_it_was_made_for():
    model, drafter = target(2), block_drafter(shifted=True)
    options = SpeculativeConfig(method="dflash", num_speculative_tokens=4)
    config, drafts = EAGLEConfig(speculative=options, fallback=False), []
    for draft in (drafter, create_proposer(options, model, drafter)):
        inference = EAGLEInference(draft, model, config)
        drafts.append([piece.drafts for piece in inference.stream([[1, 2, 3]], 5, report_drafts=True)])
    assert drafts[0] == drafts[1] and any(drafts[0])


@pytest.mark.parametrize("kind", ["in place", "own", "scaled"])
def test_committed_tokens_cost_no_queries(kind):
    draft = EAGLEInference(block_drafter(**KINDS[kind]), target(), EAGLEConfig(fallback=False)).pair.draft
    assert isinstance(draft, BlockDraft)
    mixer, ops, read = draft.layers[0].mixer, Operations(), []
    whole = ops.linear_stack
    ops.linear_stack = lambda x, weights, *rest, **options: read.append(weights) or whole(x, weights, *rest, **options)
    caches = [KeyValues(torch.zeros(2, 2, 2, 64, 24)) for _ in range(2)]
    x, lengths = torch.randn(2, 3, 64), torch.tensor([5, 9], dtype=torch.int32)
    mixer.remember(ops, x, caches[0], NewRows(lengths, lengths, None, None))
    mixer.forward(ops, x, caches[1], NewRows(lengths, lengths, None, None))
    assert torch.equal(caches[0].data, caches[1].data) and caches[0].data[0, 0, :, 5:8].abs().amin() > 0
    assert [len(weights) for weights in read] == [2, 3] and all(len(weight) == 48 for weight in read[0])


@pytest.mark.parametrize("tree", [*TREES, "recurrent"])
def test_kernels_draft_what_the_references_draft(device, tree):
    """On a CPU in Triton's interpreter."""
    changes: dict = dict(causal=(True, False), windows=(9, None))
    if tree == "chain":  # level by level
        changes |= dict(markov_head="gated", markov_rank=4, shifted=True)
    elif tree == "recurrent":
        sizes = dict(num_hidden_layers=1, causal=(True,), windows=(None,), block_size=3)
        changes, tree = KINDS["Domino"] | sizes, "tree"
    drafter = block_drafter(6, tree, feature_layers=(0, 1, 2), **changes).to(device)
    model, found = tiny_model(vocab=VOCAB, layers=3).base_model.to(device), []
    for kernels in (False, True):
        with optimize_with_triton(model, drafter, kernels=kernels)[1] as originals:
            tokens = plain(model, random_prompt(9, VOCAB).to(device), 4)
            row = generate_row(originals)
            assert row.calls == 1 and not row.fallbacks
            found.append((tokens.tolist(), re.findall(r"tau \S+ over \d+ steps", str(originals))))
    assert found[0] == found[1] and not found[0][1][0].startswith("tau 1.00 ")


# --- checkpoints ---

LAYOUTS = (
    *("z-lab", "z-lab, new", "z-lab, DFlash2", "SpecForge", "SpecForge, Domino", "DeepSpec", "DeepSpec, rnn"),
    *("speculators", "JetSpec"),
)


def save(folder: Path, drafter: BlockDrafter, layout: str) -> None:
    """A drafter's checkpoint in the layout of others."""
    config = drafter.config
    outputs = [layer - 1 for layer in config.feature_layers]
    body: dict = {
        name: getattr(config, name)
        for name in (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "vocab_size", "rms_norm_eps", "rope_theta", "attention_bias"),
        )
    }
    body |= dict(model_type="qwen3", hidden_act="silu", use_sliding_window=False, sliding_window=None)
    own = dict(mask_token_id=config.mask_token_id, target_layer_ids=outputs)
    tensors = {name: tensor.contiguous() for name, tensor in drafter.state_dict().items()}
    if layout in ("z-lab", "SpecForge", "JetSpec"):
        extra = {"SpecForge": dict(projector_type="dspark", markov_rank=config.markov_rank,
            markov_head_type=config.markov_head), "JetSpec": dict(causal_head=True)}.get(layout, {})  # fmt: skip
        body |= dict(num_target_layers=LAYERS, block_size=config.block_size, dflash_config=own | extra)
    elif layout == "SpecForge, Domino":
        own |= dict(projector_type="domino", emb_dim=config.gru_rank, gru_hidden_dim=config.gru_size)
        own |= dict(pure_draft_prefix_len=config.gru_start, shift_label=config.shifted)
        body |= dict(num_target_layers=LAYERS, block_size=config.block_size, dflash_config=own)
    elif layout == "z-lab, DFlash2":
        body |= dict(num_target_layers=LAYERS, is_causal=False, use_sliding_window=True, sliding_window=8)
        body |= dict(layer_types=["sliding_attention", "full_attention"])
        own |= dict(block_size=config.block_size, conv_kernel_size=2, conv_group_size=16)
        body |= dict(dflash_config=own | dict(selector_top_k=5, selector_rank=7))
        tensors = {name.replace("_codebook.weight", "_codebook"): tensor for name, tensor in tensors.items()}
    elif layout == "z-lab, new":
        body |= dict(num_target_layers=LAYERS, dflash_config=own | dict(block_size=config.block_size))
        body |= dict(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=9)
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    elif layout.startswith("DeepSpec"):
        body |= dict(own, block_size=config.block_size, num_anchors=4, enable_confidence_head=True)
        body |= dict(markov_rank=config.markov_rank, markov_head_type=config.markov_head)
        tensors["confidence_head.proj.weight"] = torch.zeros(1, config.hidden_size)
    else:
        body = dict(transformer_layer_config=body, speculators_model_type="dflash", block_size=config.block_size)
        body |= dict(aux_hidden_state_layer_ids=list(config.feature_layers), mask_token_id=config.mask_token_id)
        body |= dict(draft_vocab_size=config.draft_vocab_size, sample_from_anchor=config.shifted)
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(body))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_of_every_layout(layout, tmp_path):
    changes: dict = {
        "z-lab, new": dict(causal=(True, False), windows=(9, None)),
        "z-lab, DFlash2": DFLASH2,
        "SpecForge": dict(shifted=True, markov_head="vanilla", markov_rank=4),
        "SpecForge, Domino": dict(shifted=True, gru_size=6, gru_rank=5, gru_start=1),
        "DeepSpec, rnn": dict(shifted=True, markov_head="rnn", markov_rank=4, own_embedding=True, own_head=True),
        "DeepSpec": dict(shifted=True, markov_head="gated", markov_rank=4, own_embedding=True, own_head=True),
        "speculators": dict(own_embedding=True, own_head=True, draft_vocab_size=9),
        "JetSpec": dict(causal=(True, True)),
    }.get(layout, {})
    model, drafter = target(), block_drafter(**changes)
    save(tmp_path / "drafter", drafter, layout)
    loaded = load_block_drafter(str(tmp_path / "drafter"), model.config)
    assert loaded.config == drafter.config
    tokens = random_prompt(9, VOCAB)[0].tolist()
    torch.testing.assert_close(*(PlainDrafts(one, model, tokens).scores((3, 1)) for one in (drafter, loaded)))
    ids = torch.tensor([tokens])
    want = plain(model, ids, 6)
    with optimize_with_triton(model, tmp_path / "drafter")[1] as originals:
        assert torch.equal(plain(model, ids, 6), want)
        assert generate_row(originals).calls == 1
    if layout not in ("z-lab", "speculators"):
        return  # other ways to name a checkpoint load it by the same functions
    model.save_pretrained(tmp_path / "target")
    speculative = SpeculativeConfig(method="dflash", model=str(tmp_path / "drafter"), num_speculative_tokens=5)
    config = EAGLEConfig(speculative=speculative)
    for inference in (
        EAGLEInference.from_pretrained(str(tmp_path / "target"), str(tmp_path / "drafter"), device="cpu"),
        EAGLEInference(None, str(tmp_path / "target"), config, device="cpu"),
    ):
        assert tokens_of(inference, [tokens])[0][:6] == want[0, 9:].tolist()


def test_copies_of_the_targets_matrices_are_not_kept():
    model, drafter = target(), block_drafter(own_embedding=True, own_head=True)
    drafter.embed_tokens.weight.data = model.model.embed_tokens.weight.data.clone()
    fitted = fit_block_drafter(drafter, model)
    assert fitted.embed_tokens is None and fitted.lm_head is not None and not fitted.config.own_embedding


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(dflash_config=dict(mask_token_id=VOCAB, target_layer_ids=[1])),
            "mask_token_id must be a row of the embedding, 0..15, got 16",
        ),
        (dict(sliding_window=4, use_sliding_window=True, max_window_layers=1), "must cover the block of 6 rows, got 4"),
        (dict(num_target_layers=7), "trained for num_target_layers 7, the target has 6"),
        (dict(dflash_config=dict(mask_token_id=1, target_layer_ids=[1, 5])), r"inputs of layers \[2, 6\]"),
        (dict(dflash_config=dict(target_layer_ids=[1, 2, 3])), "lacks mask_token_id"),
        (dict(hidden_size=32), "hidden_size is 32, but 64 in the target"),
        (dict(hidden_act="gelu"), "hidden_act must be 'silu'"),
        (dict(attn_logit_softcapping=5.0), "attn_logit_softcapping=5.0"),
        (dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)), "rope_scaling must be one of"),
        (dict(layer_types=["full_attention"]), "layer_types must be"),
        (dict(sliding_window=9, layer_types=["sliding_attention"] * 2), "and no use_sliding_window=False"),
        (dict(dflash_config=dict(use_swa=True)), "use_swa=True is not supported"),
        (dict(is_neox_style=False), "is_neox_style=False is not supported"),
        (dict(speculators_model_type="dflash"), "lacks aux_hidden_state_layer_ids"),
        (dict(block_size=1), "block_size must be at least 2"),
        (dict(num_attention_heads=3), "must be"),
    ],
)
def test_what_no_drafter_here_computes_is_refused(change, message, tmp_path):
    save(tmp_path, block_drafter(), "z-lab")
    edited(tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        load_block_drafter(str(tmp_path), target().config)


def test_fields_that_a_layout_may_leave_out(tmp_path):
    """speculators' DSpark drafts from the anchor unless it says otherwise, and SpecForge has another name for that."""
    changes: dict = dict(markov_head="vanilla", markov_rank=4, own_embedding=True, own_head=True)
    save(tmp_path, block_drafter(**changes), "speculators")
    file = tmp_path / "config.json"
    raw = config_of(tmp_path) | {"speculators_model_type": "dspark"}
    for shifted in (False, True):
        if shifted:
            del raw["sample_from_anchor"]
        file.write_text(json.dumps(raw))
        config = load_block_drafter(str(tmp_path), target().config).config
        assert (config.shifted, config.markov_head, config.markov_rank) == (shifted, "vanilla", 4)
    save(tmp_path, block_drafter(), "z-lab")
    edited(tmp_path, dflash_config=config_of(tmp_path)["dflash_config"] | {"shift_label": True})
    assert load_block_drafter(str(tmp_path), target().config).config.shifted


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        (dict(gru_hidden_dim=7), {}, r"must be \[5, 71\], got \[5, 70\]"),
        (dict(emb_dim=3), {}, r"embed_proj.0.weight must be \[3, 70\], got \[5, 70\]"),
        (dict(pure_draft_prefix_len=6), {}, "pure_draft_prefix_len must be in 0..5, got 6"),
        ({}, {"prefix_gru.bias_ih_l0": torch.zeros(18)}, "prefix_gru.bias_ih_l0"),
        ({}, {"embed_proj.2.weight": None}, "embed_proj.2.weight"),
        ({}, {"prefix_gru.weight_hh_l0": None}, "projector_type 'domino' needs the tensors prefix_gru and embed_proj"),
        (
            {},
            {"markov_head.markov_w1.weight": torch.zeros(VOCAB, 4)},
            "only one of these is supported at a time, got a Markov head",
        ),
    ],
)
def test_a_domino_drafter_that_does_not_fit_its_fields_is_refused(fields, tensors, message, tmp_path):
    save(tmp_path, block_drafter(**KINDS["Domino"]), "SpecForge, Domino")
    stored = load_file(tmp_path / "model.safetensors") | tensors
    edited(tmp_path, dflash_config=config_of(tmp_path)["dflash_config"] | fields)
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_block_drafter(str(tmp_path), target().config)


def test_a_p_eagle_head_is_refused_by_name(tmp_path):
    tensors = {"layers.0.hidden_norm.weight": torch.ones(64), "mask_hidden": torch.ones(1, 1, 192)}
    save_file(tensors, tmp_path / "a.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(dict(hidden_size=64, num_hidden_layers=4, ptd_token_id=3)))
    message = r"is a P-EAGLE head \(it has the tensor mask_hidden\).* is not supported: give"
    check_refused(
        (message, lambda: load_head(str(tmp_path), None, target().config, {})),
        (message, lambda: optimize_with_triton(target(), str(tmp_path))),
    )


def test_what_cannot_be_drafted_is_refused():
    model, drafter = target(), block_drafter()

    def made(draft: nn.Module = drafter, **options: object) -> EAGLEInference:
        return EAGLEInference(draft, model, EAGLEConfig(**options))

    check_refused(
        (
            "a block of 6 scores at most 5 levels, got a tree of 7",
            lambda: made(topk=1, num_steps=7, num_draft_tokens=8),
        ),
        ("a block of 6 scores at most 5 levels", lambda: optimize_with_triton(model, drafter, num_steps=7, topk=1)),
        (
            "topk must be at most 5, the tokens of a row that the drafter corrects, got 6",
            lambda: made(block_drafter(**DFLASH2), topk=6),
        ),
        ("egag ends drafts level by level", lambda: made(egag=EGAGConfig())),
        (
            "method dflash does not draft with CausalLMDraft; its method is draft_model",
            lambda: made(model, speculative=SpeculativeConfig(method="dflash")),
        ),
    )
    inputs, size = block_drafter(feature_layers=(2, 6)), block_drafter(hidden_size=32)
    check_refused(
        ("dtype torch.float16", lambda: made(block_drafter().half())),
        (r"draft_model: .*reads the inputs of layers \[2, 6\], the target has 6 layers", lambda: made(inputs)),
        ("draft_model: .*hidden_size is 32, but 64 in the target", lambda: made(size)),
        error=UnsupportedModelError,
    )


def test_a_report_says_that_hardly_any_draft_is_right():
    """For features or positions off by one show in nothing else."""
    model = tiny_model(vocab=VOCAB, layers=3).base_model
    drafter = block_drafter(num_hidden_layers=1, causal=(False,), windows=(None,), feature_layers=(0, 1, 2))
    with torch.no_grad():
        drafter.norm.weight.zero_()  # token 0 is the best of all rows
    model.lm_head.weight.data[0].zero_()
    with optimize_with_triton(model, drafter)[1] as originals:
        for length, words in ((40, False), (60, True)):
            plain(model, random_prompt(5, VOCAB, length), length)
            assert ("hardly any draft is right" in str(originals)) == words


# --- transformers' own ---


def assistant(**changes: object) -> nn.Module:
    """Muse-Glimmer's, whose window is smaller than the texts."""
    own = dict(num_hidden_layers=2, head_dim=16, sliding_window=7, block_size=BLOCK, mask_token_id=3)
    with skipped_if_unknown():
        config = transformers.AutoConfig.for_model(
            "muse_glimmer_assistant", **SIZES | ENDLESS | own | dict(target_layer_ids=[0, 1, 2]) | changes
        )
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).eval()
    randomise(model)
    return model


@pytest.fixture(scope="module")
def muse() -> nn.Module:
    with skipped_if_unknown():
        return tiny_family("muse_glimmer_text")


TEXT = 2 + random_prompt(21, 22, seed=4)  # some drafts are right


def texts_of(model: nn.Module, **options: object) -> Tensor:
    return plain(model, TEXT, 24, **options)


DFLASH = dict(speculation_type="dflash")
OF_LAYERS: dict[str, dict] = {
    "windows": {},
    "all seen": dict(layer_types=["full_attention"] * 2),
    "eager": dict(layer_types=["sliding_attention", "full_attention"], attn_implementation="eager"),
}


@pytest.mark.parametrize("layers", OF_LAYERS)
@torch.no_grad()
def test_an_assistant_of_transformers_is_a_block_drafter(muse, layers):
    """By each of its forwards, which keep the context in its cache, and by the drafts of the engine."""
    module, steps = assistant(**OF_LAYERS[layers]), []
    drafter = block_drafter_of(module, muse.config.text_config)
    assert drafter.layers[0].mlp.up_proj.weight is module.layers[0].mlp.up_proj.weight  # nothing is copied
    with module.register_forward_hook(
        lambda _, args, inputs, out: steps.append((inputs, out.last_hidden_state)), with_kwargs=True
    ):
        want = texts_of(muse, assistant_model=module, **DFLASH)
    assert len(steps) > 10
    context, drafts = torch.zeros(1, 0, 64), {}
    for inputs, hidden in steps:
        context = torch.cat((context, drafter.context(inputs["context_hidden_states"])), 1)
        torch.testing.assert_close(drafter(inputs["noise_embeds"], context), hidden, rtol=0, atol=1e-5)
        drafts[context.shape[1] + 1] = muse.lm_head(hidden)[0, 1:].argmax(-1).tolist()
    text, compared = TEXT[0].tolist(), 0
    for piece in EAGLEInference(module, muse, EAGLEConfig(fallback=False)).stream([text], 24, report_drafts=True):
        if piece.tree is not None and len(text) in drafts:  # transformers drafts nothing for the last token
            assert piece.drafts == drafts[len(text)]
            compared += 1
        text += piece.tokens
    assert text == want[0].tolist() and compared == len(drafts)


def test_an_assistant_of_transformers_drafts_in_every_call(muse, tmp_path):
    """The tokens are those of plain decoding, and nothing runs the original."""
    module, want = assistant(), texts_of(muse)
    module.save_pretrained(tmp_path / "assistant")
    muse.save_pretrained(tmp_path / "target")
    taus = set()
    for draft, options in (
        (module, {}),
        (tmp_path / "assistant", {}),
        (None, dict(assistant_model=module, **DFLASH)),
        ("suffix", dict(assistant_model=module, **DFLASH)),
    ):
        with optimize_with_triton(muse, draft, TritonConfig(strict=True))[1] as originals:
            assert torch.equal(texts_of(muse, **options), want)
            row = generate_row(originals)
            assert (row.calls, row.fallbacks) == (1, 0)
            taus |= set(re.findall(r"tau \S+ over \d+ steps", str(originals)))
            if options:  # the next call drafts as before
                assert torch.equal(texts_of(muse), want) and generate_row(originals).calls == 2
    assert len(taus) == 1 and not taus.pop().startswith("tau 1.00 ")
    tree = TritonConfig(num_draft_tokens=16, topk=4, strict=True)
    with optimize_with_triton(muse, module, tree)[1]:
        assert torch.equal(texts_of(muse), want)
    folders = str(tmp_path / "assistant"), str(tmp_path / "target")
    for draft, model in ((module, muse), folders):
        tokens, figures = EAGLEInference(draft, model, EAGLEConfig(fallback=False)).generate(TEXT, 24)
        assert torch.equal(tokens.cpu(), want) and figures.tau > 1


def test_a_changed_assistant_is_refused_or_read_again(muse):
    module, want = assistant(), texts_of(muse)
    up = module.layers[0].mlp.up_proj
    with optimize_with_triton(muse, module)[1]:
        assert torch.equal(texts_of(muse), want)
        up.weight = nn.Parameter(up.weight.detach().clone())
        with pytest.raises(RuntimeError, match=r"draft\.layers\.0\.mlp\.up_proj\.weight was replaced"):
            texts_of(muse)
    with optimize_with_triton(muse, None, TritonConfig(strict=True))[1] as originals:
        for _ in range(2):
            assert torch.equal(texts_of(muse, assistant_model=module, **DFLASH), want)
            up.weight = nn.Parameter(2 * up.weight.detach())
        assert generate_row(originals).calls == 2


def test_an_assistant_of_transformers_that_does_not_fit_is_refused(muse):
    for changes, message in (
        (dict(hidden_size=32), "hidden_size is 32, but 64 in the target"),
        (dict(mask_token_id=24), r"mask_token_id must be a row of the embedding, 0\.\.23, got 24"),
        (dict(target_layer_ids=[0, 3]), r"inputs of layers \[1, 4\]"),
        (dict(hidden_act="gelu"), "hidden_act must be 'silu', got 'gelu'"),
        (dict(sliding_window=3), "must cover the block of 6 rows, got 4"),
    ):
        module = assistant(**changes)
        with pytest.raises((ValueError, UnsupportedModelError), match=message):
            optimize_with_triton(muse, module)
        strict, refused = TritonConfig(strict=True), pytest.raises(ValueError, match=f"assistant_model: .*{message}")
        with optimize_with_triton(muse, None, strict)[1], refused:
            texts_of(muse, assistant_model=module, **DFLASH)
    module = assistant()
    with optimize_with_triton(muse, None, TritonConfig(strict=True))[1]:
        with pytest.raises(ValueError, match="MuseGlimmerAssistantModel needs speculation_type='dflash'"):
            texts_of(muse, assistant_model=module)
        with pytest.raises(ValueError, match="speculation_type"):
            texts_of(muse, assistant_model=muse, **DFLASH)
    with pytest.raises(UnsupportedModelError, match="torch.float16"):
        optimize_with_triton(muse, module.half())


# --- export ---


@pytest.fixture(scope="module")
def saved_target(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("target")
    target().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("to", "kind"),
    [
        *(("vllm", kind) for kind in ("in place", "causal", "yarn", "DFlash2")),
        *(("sglang", kind) for kind in ("in place", "windows")),
    ],
)
def test_an_exported_drafter_is_read_back_and_drafts_the_same(to, kind, saved_target, tmp_path):
    drafter = block_drafter(**KINDS[kind] | dict(shifted=False))
    plan = export_head(drafter, to, tmp_path / "out", saved_target)
    raw = config_of(tmp_path / "out")
    assert raw["dflash_config"]["target_layer_ids"] == [0, 2, 3] and raw["num_target_layers"] == LAYERS
    assert raw["architectures"] == ["DFlash2DraftModel" if kind == "DFlash2" else "DFlashDraftModel"]
    assert raw.get("is_causal") == {"causal": True, "windows": None}.get(kind, False)
    found = compare_drafts(drafter, tmp_path / "out", saved_target, prompts=3)
    assert found.same and found.prompts == 3
    if to == "vllm":
        want = dict(method="dflash", model=str(plan.folder), num_speculative_tokens=BLOCK - 1)
        assert plan.arguments["speculative_config"] == want
    else:
        assert plan.arguments["speculative_algorithm"] == "DFLASH"
        assert plan.arguments["speculative_num_draft_tokens"] == BLOCK
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["norm.weight"][0] += 1
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    with pytest.raises(ValueError, match="export: norm.weight has changed"):
        compare_drafts(drafter, tmp_path / "out", saved_target, prompts=1)


@pytest.mark.parametrize(
    ("to", "changes", "options", "message"),
    [
        ("speculators", {}, {}, "to='speculators' does not support block drafters; vllm and sglang do"),
        ("vllm", dict(shifted=True), {}, "vLLM: the block drafter has shifted=True"),
        ("sglang", dict(gru_size=6, gru_rank=5), {}, "SGLang: the block drafter has Domino's recurrent correction"),
        ("vllm", KINDS["own"], {}, "has embed_tokens.weight; if it equals the target's"),
        ("sglang", dict(own_head=True), {}, "SGLang: the block drafter has lm_head.weight"),
        ("vllm", dict(qk_norm=False), {}, "has qk_norm=False"),
        ("vllm", dict(logit_scale=0.5, logit_cap=3.0), {}, "has logit_scale=0.5, logit_cap=3.0"),
        ("vllm", dict(feature_layers=(0, 2)), {}, r"has features of the embedding \(layer 0\)"),
        ("vllm", dict(feature_layers=(2, 99)), {}, r"reads the inputs of layers \[2, 99\], the target has"),
        ("vllm", dict(windows=(9, 7)), {}, r"has windows of several sizes, \[7, 9\]"),
        ("sglang", KINDS["causal"], {}, "SGLang: causal=.* exactly for layers with a window, or in vLLM"),
        ("vllm", dict(causal=(True, False)), {}, "vLLM: causal=.*, or the same for all layers"),
        ("sglang", {}, dict(total_token=8), "total_token=8 must be left out for a block drafter"),
        ("vllm", {}, dict(num_speculative_tokens=BLOCK), "num_speculative_tokens must be at most 5"),
        ("vllm", {}, dict(tensor_parallel_size=3), "tensor_parallel_size=3 must divide"),
    ],
)
def test_drafters_that_cannot_be_exported_are_refused_by_name(to, changes, options, message, saved_target, tmp_path):
    with pytest.raises(ValueError, match=message):
        export_head(block_drafter(**changes), to, tmp_path / "out", saved_target, **options)
    assert not (tmp_path / "out").exists()


def test_a_shorter_chain_is_exported_with_a_note_where_rows_see_the_whole_block(saved_target, tmp_path):
    for kind, notes in (("in place", 1), ("causal", 0)):
        folder, drafter = tmp_path / kind, block_drafter(**KINDS[kind])
        plan = export_head(drafter, "vllm", folder, saved_target, num_speculative_tokens=2)
        assert plan.arguments["speculative_config"]["num_speculative_tokens"] == 2 and len(plan.notes) == notes


def test_the_program_exports_the_demos_block_drafter(tmp_path, capsys):
    words = ["export", "demo-block", "--target", "demo", "--to", "vllm", "--check", "-o", str(tmp_path / "out")]
    assert main.main(words) == 0
    printed = capsys.readouterr()
    assert "the same bits, 32 of 32 drafts are equal" in printed.err and '"method": "dflash"' in printed.out
