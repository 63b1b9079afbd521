"""Other packages' block drafters, with the weights of random ones of ours, give what ours give.

dflash 0.1.0 (PyPI); DeepSpec and JetSpec where checkouts of them are on the path.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle_triton import export_head
from tests.test_block_drafter import BLOCK, DFLASH2, KINDS, VOCAB, block_drafter, save, target

pytestmark = pytest.mark.upstream
CONTEXT = 11


def theirs(folder: Path, cls: type, drafter: torch.nn.Module, layout: str) -> torch.nn.Module:
    """Another package's drafter from a checkpoint of ours, or from what `export_head` writes."""
    from transformers import Qwen3Config

    if layout == "exported":
        target().save_pretrained(folder / "target")
        folder = export_head(drafter, "vllm", folder / "out", folder / "target").folder
    else:
        save(folder, drafter, layout)
    config = Qwen3Config(**json.loads((folder / "config.json").read_text()))
    config._attn_implementation = "sdpa"
    config.layer_types = config.layer_types or ["full_attention"] * config.num_hidden_layers
    model = cls(config).eval()
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors = {f"{name}.weight" if name.endswith("_codebook") else name: tensor for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and all("rotary" in name or "confidence" in name for name in missing)
    return model


def inputs(drafter: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, embeddings of a block, and positions of both."""
    torch.manual_seed(5)
    width = drafter.config.hidden_size
    features = torch.randn(1, CONTEXT, len(drafter.config.feature_layers) * width)
    return features, torch.randn(1, BLOCK, width), torch.arange(CONTEXT + BLOCK)[None]


@torch.no_grad()
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("z-lab", {}),
        ("z-lab, new", dict(causal=(True, False), windows=(9, None))),
        ("z-lab, DFlash2", DFLASH2),
        ("exported", {}),
        ("exported", KINDS["causal"]),
        ("exported", KINDS["windows"]),
        ("exported", DFLASH2),
    ],
)
def test_dflash(layout, changes, tmp_path):
    dflash = pytest.importorskip("dflash.model")
    drafter = block_drafter(**changes)
    cls = dflash.DFlash2DraftModel if changes is DFLASH2 else dflash.DFlashDraftModel
    other = theirs(tmp_path, cls, drafter, layout)
    features, embeddings, positions = inputs(drafter)
    want = other(position_ids=positions, noise_embedding=embeddings, target_hidden=features)
    hidden = drafter(embeddings, drafter.context(features))
    torch.testing.assert_close(hidden, want, rtol=1e-5, atol=1e-5)
    if changes is DFLASH2:
        walked, before, head = [], torch.tensor(3), torch.nn.Linear(hidden.shape[-1], VOCAB, bias=False)
        for row in hidden[0, 1:]:  # one token after the other
            before = drafter.draft_logits(row, head, before).argmax()
            walked.append(int(before))
        found, _, _ = other.propose(want[:, 1:], torch.tensor([3]), head, 0.0)
        assert found[0].tolist() == walked and len(set(walked)) > 1
    assert [layer + 1 for layer in other.target_layer_ids] == list(drafter.config.feature_layers)


@torch.no_grad()
def test_jetspec(tmp_path):
    jetspec = pytest.importorskip("jetspec.models.draft_head")
    drafter = block_drafter(causal=(True, True))
    other = theirs(tmp_path, jetspec.DFlashDraftModel, drafter, "JetSpec")
    features, embeddings, positions = inputs(drafter)
    want = other(position_ids=positions, noise_embedding=embeddings, target_hidden=features)
    torch.testing.assert_close(drafter(embeddings, drafter.context(features)), want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_dspark(markov, tmp_path):
    deepspec = pytest.importorskip("deepspec.modeling.dspark.qwen3.modeling")
    drafter = block_drafter(shifted=True, markov_head=markov, markov_rank=4, own_embedding=True, own_head=True)
    folder = tmp_path / "drafter"
    save(folder, drafter, "DeepSpec")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(enable_confidence_head=False)))
    config = json.loads(file.read_text())
    from transformers import Qwen3Config

    settings = Qwen3Config(**config, layer_types=["full_attention"] * 2)
    settings._attn_implementation = "sdpa"
    other = deepspec.Qwen3DSparkModel(settings).eval()
    tensors = {name: part for name, part in load_file(folder / "model.safetensors").items() if "confidence" not in name}
    other.load_state_dict(tensors, strict=False)
    features, embeddings, positions = inputs(drafter)
    want = other._forward_backbone(
        position_ids=positions, noise_embedding=embeddings, target_hidden_states=features, attention_mask=None
    )
    hidden = drafter(embeddings, drafter.context(features))
    torch.testing.assert_close(hidden, want, rtol=1e-5, atol=1e-5)
    walked = drafter.likeliest_chain(hidden[0], 3, drafter.lm_head)
    found, _ = other.sample_draft_tokens(
        other.compute_logits(want), first_prev_token_ids=torch.tensor([3]), hidden_states=want
    )
    assert found[0].tolist() == walked and len(set(walked)) > 1 and max(walked) < VOCAB
