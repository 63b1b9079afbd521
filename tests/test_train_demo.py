"""The stages of tools/train_demo.py that train the mixture of experts, at toy sizes."""

import dataclasses
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from eagle_triton.demo import demo_directory, demo_prompts
from tests.checkpoints import config_of
from tools.demo import mixture
from tools.demo.recipe import Recipe
from tools.demo.training import Run, Teacher, train_head, train_target

TOY = Recipe(
    mixture_hidden_size=32,
    mixture_num_heads=2,
    experts=8,
    expert_size=16,
    intermediate_size=32,
    target_steps=2,
    target_tokens_per_step=128,
    head_steps=2,
    head_tokens_per_step=64,
    head_passes=2,
).of_mixture
STREAM = torch.randint(1, TOY.vocab_size, (1000,), generator=torch.Generator().manual_seed(0))


def trained(directory, **changes) -> Run:
    """A mixture of two steps with the demo's tokenizer."""
    run = Run(dataclasses.replace(TOY, **changes), directory, torch.device("cpu"))
    for part in (run.target_directory, run.output / "eagle3"):
        part.mkdir(parents=True)
    shutil.copyfile(demo_directory("target") / "tokenizer.json", run.target_directory / "tokenizer.json")
    shutil.copyfile(demo_directory("target") / "tokenizer_config.json", run.target_directory / "tokenizer_config.json")
    train_target(run, STREAM, STREAM, mixture.new_target, mixture.target_config, None, mixture.balance_loss)
    return run


def test_a_mixture_and_its_head_are_trained_and_evaluated(tmp_path):
    run = trained(tmp_path)
    config = config_of(run.target_directory)
    assert config["num_experts"] == 8 and "output_router_logits" not in config
    corpus = {32: STREAM[:256].view(8, 32)}
    reached = train_head("eagle3", run, Teacher(run), corpus, corpus)
    assert reached["steps"] == 2 and len(reached["held_out_per_pass"]["top1"]) == 2
    found = mixture.evaluate(run, demo_prompts(1), STREAM, new_tokens=4)
    assert [found[name]["prompts_with_equal_tokens"] for name in ("tree 60/7/10", "chain of 3")] == [1, 1]
    experts = found["distinct_experts"]
    assert experts["rows"] == [1, 2, 4, 8, 16, 32, 60]
    assert experts["uniform"][:3] == [2.0, 3.5, 5.469]
    for name in ("text", "tree"):
        numbers = experts[name]
        assert numbers[0] == 2.0 and 2.0 < numbers[-1] <= 8 and len(numbers) == 7
    assert experts["text"] == sorted(experts["text"])


def test_routers_learn_to_spread_tokens_over_the_experts(tmp_path):
    name = "model.layers.0.mlp.gate.weight"
    routers = []
    for balance in (0.0, 0.0, 10.0):
        run = trained(tmp_path / str(len(routers)), router_balance=balance)
        (file,) = run.target_directory.glob("*.safetensors")
        routers.append(load_file(file)[name])
    assert torch.equal(routers[0], routers[1]) and not torch.equal(routers[0], routers[2])


def test_experts_of_each_layer_are_balanced():
    """One layer uses only the first half of the experts, the other only the second half."""
    high = torch.arange(8).repeat(16, 1) < 4
    logits = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    one, other = (logits + 20.0 * half for half in (high, ~high))
    uneven = mixture.balance_loss(TOY, SimpleNamespace(router_logits=(one, other)))
    even = mixture.balance_loss(TOY, SimpleNamespace(router_logits=(logits, logits)))
    assert uneven > 1.5 * even > 0


def test_distinct_experts_are_counted_in_each_group_of_rows():
    experts = torch.tensor([[[0, 1], [1, 2]], [[3, 0], [0, 3]]])
    assert mixture.distinct(experts, 4) == 2.5
    assert mixture.distinct(experts.flatten(0, 1), 4) == 4.0


@pytest.mark.parametrize("sizes", [dict(mixture_num_kv_heads=2), dict(experts_per_token=0)])
def test_sizes_of_a_mixture_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ValueError, match="must"):
        Recipe(**sizes)
