"""The examples of docs/engine.md and docs/integrators.md run as they stand."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle_triton import EaModel

DOCS = Path(__file__).parent.parent / "docs"


def examples(name):
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.DOTALL)


def run(name, names):
    for number, code in enumerate(examples(name)):
        exec(compile(code, f"{name}, example {number}", "exec"), names)
    return names


def test_engine_page(device, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    model = EaModel.from_pretrained("demo").to(device)
    input_ids = model.tokenizer("def main(argv):\n", return_tensors="pt").input_ids.to(device)
    test_data = ["import os\n", "class A:\n"]
    names = run(
        "engine.md",
        dict(draft_model=model.ea_layer, target_model=model, input_ids=input_ids, test_data=test_data),
    )
    printed = capsys.readouterr().out
    assert re.search(r"Acceptance rate: \d+\.\d\d%\nSpeedup: n/ax\n", printed)
    assert len(re.findall(r"^[248] [\d.]+% accepted, tau [\d.]+, [\d.]+ x$", printed, re.MULTILINE)) == 3
    assert (tmp_path / "acceptance.png").exists()
    assert names["accepted"].shape[0] == 1 and names["accept_length"].item() >= 0


def test_integrators_page(device):
    names = run("integrators.md", dict(device=device))
    assert names["accepted"].shape == (2,) and names["draft_tokens"].shape == (2, 4)


def test_a_worker_in_sglangs_manner(device):
    """Rebound names, called as SGLang calls them: a mask buffer, predicts with an element to spare, keywords."""
    names = run("integrators.md", dict(device=device))
    calls = []
    worker = SimpleNamespace(build_tree_kernel_efficient=calls.append, verify_tree_greedy=calls.append, other=1)
    original = worker.verify_tree_greedy
    undo = names["use_triton_trees"](worker)
    root, parents = torch.tensor([11], device=device), torch.tensor([[-1, 0, 1]], device=device)
    chosen, drafts = torch.tensor([[0, 1, 2]], device=device), torch.tensor([[5, 6, 7]], device=device)
    buffer = torch.zeros(64, dtype=torch.bool, device=device)
    mask, _, *links, tokens = worker.build_tree_kernel_efficient(
        root, parents, chosen, drafts, torch.tensor([3], device=device), 3, 2, 2, 4, 0, tree_mask_buf=buffer
    )
    assert mask is buffer and mask.sum() == 4 * 3 + 4 + 3 + 1
    predicts = torch.zeros(5, dtype=torch.int32, device=device)
    accept_index = torch.full((1, 3), -1, dtype=torch.int32, device=device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    worker.verify_tree_greedy(
        predicts=predicts, accept_index=accept_index, accept_token_num=count, candidates=tokens.view(1, 4),
        retrive_index=links[0], retrive_next_token=links[1], retrive_next_sibling=links[2],
        target_predict=torch.tensor([[6, 0, 9, 0]], device=device),
    )  # fmt: skip
    assert predicts.tolist() == [6, 0, 9, 0, 0] and accept_index.tolist() == [[0, 2, -1]] and count.tolist() == [1]
    undo()
    assert worker.verify_tree_greedy is original and not calls
