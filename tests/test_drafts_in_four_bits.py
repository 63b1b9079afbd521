"""draft_dtype="int4": the same tokens, and drafts that are nearly as good."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from eagle_triton import EAGLEConfig, EAGLEInference, EaModel, optimize_eagle_with_triton
from eagle_triton.benchmarks.models import encoded
from eagle_triton.demo import demo_prompts
from eagle_triton.engine.drafts import quantised as drafts
from eagle_triton.engine.drafts.beams import with_rows
from eagle_triton.engine.model.modules import Projection
from eagle_triton.families import own_ea_model
from eagle_triton.runtime import four_bit_weight
from eagle_triton.runtime.four_bit_weight import FourBitWeight, quantised
from tests.tiny import random_prompt, tiny_model

NEW = 40


def decoded(model: Any, prompts: list[torch.Tensor], **options: Any) -> tuple[list[torch.Tensor], float, str]:
    """The tokens, tau, and the report's note on the draft."""
    with optimize_eagle_with_triton(model, **options) as (_, originals):
        outputs = [model.eagenerate(prompt, max_new_tokens=NEW) for prompt in prompts]
        report = originals.report()
    counts = {entry.path: entry.calls for entry in report}
    tau = 1 + counts["drafts_accepted"] / counts["trees_verified"]
    tokens = [out[:, : prompt.shape[1] + NEW] for out, prompt in zip(outputs, prompts, strict=True)]
    return tokens, tau, next((entry.reason for entry in report if entry.path == "draft_dtype"), "")


def test_the_demo_s_headin_four_bits() -> None:
    model = EaModel.from_pretrained("demo").eval()
    prompts = encoded(model, demo_prompts(2), NEW)
    (tokens, tau, _), (in_4, tau_in_4, note) = (decoded(model, prompts, draft_dtype=dtype) for dtype in (None, "int4"))
    assert all(map(torch.equal, tokens, in_4))
    assert tau > 2 and abs(tau_in_4 - tau) < 0.1 * tau
    assert note.startswith("int4: 9 projections of the draft are copies in four bits, ")


def test_what_is_drafted_is_what_rounded_weights_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the accepted length; wrong weights change that, and no token."""
    tree = dict(total_token=16, depth=3, top_k=4)
    model, rounded, prompts = tiny_model(**tree), tiny_model(**tree), [random_prompt(11)]
    with torch.no_grad():
        for module in rounded.ea_layer.modules():
            if type(module) is nn.Linear:
                group = next(group for group in drafts.GROUPS if module.in_features % group == 0)
                module.weight.copy_(quantised(module.weight, group).dequantised(module.weight.dtype))
    int4, expected = decoded(model, prompts, draft_dtype="int4"), decoded(rounded, prompts)
    assert torch.equal(int4[0][0], expected[0][0]) and int4[1] == expected[1]
    monkeypatch.setattr(four_bit_weight, "quantised", lambda weight, group: quantised(weight.flip(0), group))
    wrong = decoded(model, prompts, draft_dtype="int4")
    assert torch.equal(wrong[0][0], int4[0][0]) and wrong[1] != int4[1]


def test_a_draft_model_in_four_bits_with_a_vocabulary_of_its_own() -> None:
    target, draft = (tiny_model(eagle3=False, layers=2, seed=seed).base_model for seed in (0, 1))
    prompt = random_prompt(10)
    expected = target.generate(prompt, max_new_tokens=16, do_sample=False)
    config = EAGLEConfig(num_draft_tokens=6, fallback=False, draft_dtype="int4", draft_vocabulary=12)
    inference = EAGLEInference(draft, target, config)
    ids, _ = inference.generate(prompt, max_new_tokens=16, stop_token_ids=())
    assert torch.equal(ids, expected)
    head = inference.engine.draft.head.weight
    assert isinstance(head, FourBitWeight) and head.shape == (12, 64)


@pytest.mark.parametrize(("depth", "group"), [(384, 128), (192, 64), (96, 32)])
def test_a_weight_is_rounded_in_parts_with_groups_that_divide_its_columns(
    depth: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(40, depth)
    monkeypatch.setattr(drafts, "ROWS", 17)
    found, whole = drafts.in_four_bits(weight), quantised(weight, group)
    assert found.group == group and torch.equal(found.packed, whole.packed) and torch.equal(found.scale, whole.scale)


def test_columns_that_are_no_groups_and_numbers_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match='"int4": the columns of a weight must be a multiple of 32, got 72'):
        drafts._quantised(torch.randn(8, 72), "int4")
    model = tiny_model()
    with torch.no_grad():
        model.ea_layer.fc.weight[3, 4] = float("nan")
    with pytest.raises(ValueError, match='draft_dtype="int4": a weight with infinities or NaN cannot be quantised'):
        optimize_eagle_with_triton(model, draft_dtype="int4")
    with pytest.raises(ValueError, match='draft_dtype="int4" needs a draft with weights'):
        drafts.quantised_draft(None, "int4")


def test_the_megakernel_refuses_a_headin_four_bits() -> None:
    pytest.importorskip("triton")
    from eagle_triton.engine.megakernel_step import unsupported_draft

    _, draft = own_ea_model.read(tiny_model())
    in_4, _ = drafts.quantised_draft(draft, "int4")
    assert unsupported_draft(in_4) == "the weight of the draft head's fc is in four bits"


def test_rows_of_a_vocabulary_projectionin_four_bits_are_not_copied() -> None:
    projection = Projection(quantised(torch.randn(32, 128)))
    with pytest.raises(ValueError, match="draft_vocabulary must be None: the draft's vocabulary projection is in"):
        with_rows(projection, torch.arange(4))
