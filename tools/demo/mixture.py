"""The mixture of experts of the demo: a small Qwen3 whose layers route each token to a few of their experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from eagle_triton import EaModel
from tools.demo.corpus import END_OF_TEXT_ID
from tools.demo.training import Run, compare_with_generate, tree

if TYPE_CHECKING:
    from tools.demo.recipe import Recipe

ROWS = (1, 2, 4, 8, 16, 32, 60)  # of a step, whose distinct experts are counted
TEXT = 480  # tokens of a text; each of ROWS divides it


def target_config(recipe: Recipe) -> dict:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **recipe.sizes,  # intermediate_size is of layers without experts, which it does not have
        "num_experts": recipe.experts,
        "num_experts_per_tok": recipe.experts_per_token,
        "moe_intermediate_size": recipe.expert_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": recipe.router_balance,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "torch_dtype": str(recipe.dtype).removeprefix("torch."),
    }


def new_target(recipe: Recipe) -> Qwen3MoeForCausalLM:
    """A fresh mixture, whose forward gives its routers' logits too."""
    config = {k: v for k, v in target_config(recipe).items() if k not in ("torch_dtype", "architectures", "model_type")}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**config, output_router_logits=True))


def balance_loss(recipe: Recipe, out: Any) -> torch.Tensor:
    """What spreads tokens over the experts (arXiv 2101.03961), layer by layer: over all layers at once, as transformers
    adds it up, it is satisfied by layers that use few experts each."""
    losses = [
        load_balancing_loss_func((logits,), recipe.experts, recipe.experts_per_token) for logits in out.router_logits
    ]
    return recipe.router_balance * sum(losses)


def evaluate(run: Run, prompts: list[str], held_out: torch.Tensor, new_tokens: int = 64) -> dict:
    """tau of a chain and of a tree, greedy, fp32, how many outputs are those of transformers' own generate, and the
    experts that are read."""
    head = str(run.output / "eagle3")
    drafts = {"tree 60/7/10": (head, tree(10, 8, 60)), "chain of 3": (head, tree(1, 3, 4))}
    reached = compare_with_generate(run, run.target_directory, drafts, prompts, new_tokens)
    return {**reached, "distinct_experts": distinct_experts(run, prompts[:8], held_out, new_tokens)}


def distinct_experts(run: Run, prompts: list[str], held_out: torch.Tensor, new_tokens: int) -> dict:
    """The mean number of distinct experts of a layer that n rows choose, for each n of ROWS.

    text: n consecutive tokens of held-out text. tree: the nodes of draft trees of n, as steps verify them. uniform:
    what is expected of rows that choose at random.
    """
    model = EaModel.from_pretrained(str(run.target_directory), str(run.output / "eagle3")).to(run.device)
    choices, config = Choices(model.base_model), model.base_model.config
    count, share = config.num_experts, config.num_experts_per_tok / config.num_experts
    with torch.no_grad():
        model.base_model.model(input_ids=held_out[: held_out.numel() // TEXT * TEXT].view(-1, TEXT)[:64])
    (text,) = choices.take()
    found: dict[str, list] = {
        "rows": list(ROWS),
        "text": [distinct(text.unflatten(1, (-1, n)), count) for n in ROWS],
        "tree": [distinct(tree_choices(model, choices, prompts, n, new_tokens), count) for n in ROWS if n > 1],
        "uniform": [round(count * (1 - (1 - share) ** n), 3) for n in ROWS],
    }
    found["tree"].insert(0, found["text"][0])  # a tree of one node is the root
    print(f"  distinct experts of {count}: {found}", flush=True)
    return found


class Choices:
    """The experts that a model's routers choose, forward by forward."""

    def __init__(self, model: Any) -> None:
        self._found: list[torch.Tensor] = []
        self._layers = len(model.model.layers)
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda module, args, output: self._found.append(output[2]))

    def take(self) -> list[torch.Tensor]:
        """[layers, rows, chosen] of each forward since the last call."""
        forwards = [torch.stack(self._found[i : i + self._layers]) for i in range(0, len(self._found), self._layers)]
        self._found.clear()
        return forwards


def tree_choices(model: Any, choices: Choices, prompts: list[str], nodes: int, new_tokens: int) -> torch.Tensor:
    """[layers, steps, nodes, chosen] of the trees that are verified after some prompts."""
    model.ea_layer.total_tokens = nodes - 1
    steps = []
    for prompt in prompts:
        ids = model.tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
        model.eagenerate(ids, max_new_tokens=new_tokens)
        steps += choices.take()[1:]  # the first forward reads the prompt
    return torch.stack(steps, dim=1)


def distinct(experts: torch.Tensor, count: int) -> float:
    """The mean number of distinct experts, of `count`, in groups of rows; experts [..., rows, chosen]."""
    hit = F.one_hot(experts.flatten(-2), count).amax(-2)
    return round(hit.sum(-1).float().mean().item(), 3)
