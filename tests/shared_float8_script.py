"""Two ranks share targets with FP8 weights: `shared_float8_script.py FOLDER`, run by tests/test_tensor_parallel.py.

transformers makes such weights wide where it sees no GPU, so its check of the machine is left out: what loads and
spreads the checkpoints is its own code all the same. No module is called. Layouts that it does not spread as they are
(a scale for each row) are put in the places of a spread model's modules, part by part.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from eagle_triton import EaModel, UnsupportedModelError, optimize_eagle_with_triton, optimize_with_triton
from eagle_triton.families import own_ea_model as native
from eagle_triton.families.reading.quantised import with_quantised
from eagle_triton.models.heads import DraftConfig, Eagle3Head
from tests.float8_models import at_once, in_blocks, in_rows, with_fp8
from tests.tensor_parallel_script import refused
from tests.tiny import ENDLESS, SIZES, random_matrices, random_prompt
from tests.tiny_families import tiny_family

LOADED = {"blocks": (in_blocks, 512), "one scale": (at_once, 192), "odd blocks": (in_blocks, 384)}
"""What transformers spreads, and the intermediate size: of three blocks, half is no whole number of blocks."""


def new_target(intermediate: int) -> LlamaForCausalLM:
    """The same on all ranks. Half of its rows and columns are whole blocks of 128, if half of the MLP's are."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    config = LlamaConfig(
        **sizes, **ENDLESS, vocab_size=32, intermediate_size=intermediate, num_hidden_layers=3, attention_bias=True
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.08)
    return model


def with_head(target: Any) -> EaModel:
    """Around an EAGLE-3 head that is the same on all ranks."""
    torch.manual_seed(1)
    sizes = SIZES | dict(hidden_size=256, head_dim=16, vocab_size=32, draft_vocab_size=32)
    head = Eagle3Head(DraftConfig(**sizes, feature_layers=(0, 1, 2)), total_token=59, depth=2, top_k=24)
    return EaModel(target, random_matrices(head, 0.1)).eval()


def save(folder: Path, name: str) -> None:
    """A target as published: fine-grained FP8."""
    layout, intermediate = LOADED[name]
    wide = new_target(intermediate)
    ours, _ = with_fp8(wide, layout)
    skipped, block = ["lm_head"], [128, 128] if layout is in_blocks else None
    kind = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=block)
    wide.config.quantization_config = {**kind, "modules_to_not_convert": skipped}
    wide.save_pretrained(folder / name, state_dict=ours.state_dict())


def load(folder: Path, name: str, **options: Any) -> Any:
    """In fp32, with its FP8 weights."""
    with patch.object(FineGrainedFP8HfQuantizer, "validate_environment"):
        return AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32, **options).eval()


def decoded(model: EaModel) -> list[Tensor]:
    """Tokens and accepted lengths, greedy and sampled, with drafts and without."""
    got = []
    with optimize_eagle_with_triton(model):
        for options in (dict(), dict(temperature=0.8, top_p=0.9)):
            torch.manual_seed(5)
            got += [model.eagenerate(random_prompt(9), max_new_tokens=8, **options)]
            got += [torch.tensor(model.accept_lengths)]
    return got


def compare(name: str, whole: Any, shared: Any) -> None:
    """Both decode alike, and the shared one by half of the values and scales, none of them copied."""
    results = [decoded(with_head(target)) for target in (whole, shared)]
    for expected, found in zip(*results, strict=True):
        assert torch.equal(expected, found), (name, expected.tolist(), found.tolist())
    assert results[1][1].sum() > 0, f"{name}: no draft was accepted"
    reading = with_quantised(*native.read(with_head(shared)), {"target": shared})
    assert len(reading.modules) == 3 * 7
    o, up = reading.view.layers[2].mixer.o, reading.view.layers[2].mlp.up
    layer = shared.model.layers[2]
    assert o.summed_over is reading.view.ranks and up.summed_over is up.joined_over is None
    assert (o.bias is None) == (dist.get_rank() == 1)
    for projection, module, parts in ((o, layer.self_attn.o_proj, (1, 2)), (up, layer.mlp.up_proj, (2, 1))):
        assert projection.weight.values.data_ptr() == module.weight.to_local().data_ptr()
        rows, columns = module.weight.shape
        assert projection.weight.shape == (rows // parts[0], columns // parts[1])


def what_transformers_spreads(folder: Path) -> None:
    for name in ("blocks", "one scale"):
        whole, shared = load(folder, name), load(folder, name, tp_plan="auto")
        assert shared.model.layers[0].mlp.up_proj.weight.to_local().dtype == torch.float8_e4m3fn
        compare(name, whole, shared)


def spread(module: nn.Module, whole: nn.Module, of_scale: Any) -> nn.Module:
    """A whole FP8 module in the place of a spread one, its tensors spread: the scale as `of_scale` says."""
    weight: Any = module.weight
    (of_weight,) = weight.placements
    of_bias = Replicate() if of_weight == Shard(1) else Shard(0)
    new: Any = copy.deepcopy(whole)
    new.forward = module.forward
    for name, placement in (("weight", of_weight), ("bias", of_bias), ("weight_scale", of_scale)):
        if (tensor := new._parameters[name]) is not None:
            parts = (tensor,) if placement.is_replicate() else tensor.chunk(2, placement.dim)
            part = parts[min(dist.get_rank(), len(parts) - 1)].contiguous()
            like = dict(shape=tensor.shape, stride=tensor.stride())
            part = DTensor.from_local(part, weight.device_mesh, [placement], run_check=False, **like)
            new._parameters[name] = nn.Parameter(part, requires_grad=False)
    return new


def a_scale_for_each_row(folder: Path, of_rows: Any = None, of_columns: Any = None) -> tuple[Any, Any]:
    """A whole target and a shared one, whose scales [1, N] are spread as they must be, or as is said: of projections of
    which a rank has some rows, and of those of which it has some columns."""
    wide = new_target(192)
    whole, _ = with_fp8(wide, in_rows)
    shared = AutoModelForCausalLM.from_pretrained(folder / "wide", tp_plan="auto").eval()
    for name, module in list(shared.named_modules()):
        if name.endswith("_proj"):
            columns = name.endswith(("o_proj", "down_proj"))
            placement = (of_columns or Replicate()) if columns else (of_rows or Shard(1))
            shared.set_submodule(name, spread(module, whole.get_submodule(name), placement))
    return whole, shared


def what_is_refused(folder: Path) -> None:
    odd = load(folder, "odd blocks", tp_plan="auto")
    assert [tuple(odd.model.layers[0].mlp.up_proj.weight_scale_inv.shape)] == [(3, 2)]
    with refused(
        UnsupportedModelError,
        "model.base_model.model.layers.0.mlp.gate_proj.weight_scale_inv",
        "384 rows do not divide by 2 ranks into equal parts of whole blocks of 128",
    ):
        optimize_eagle_with_triton(with_head(odd))
    shared = load(folder, "blocks", tp_plan="auto")
    with refused(
        UnsupportedModelError, "model.model.layers.0.self_attn.q_proj.weight", "that is called must be whole", "exact"
    ):
        optimize_with_triton(shared, activations="as published")
    down = shared.model.layers[2].mlp.down_proj
    down.weight_scale_inv = nn.Parameter(down.weight_scale_inv.full_tensor(), requires_grad=False)
    with refused(UnsupportedModelError, "model.model.layers.2.mlp.down_proj.weight_scale_inv", "has it whole"):
        optimize_with_triton(shared)
    for options, path, wrong, right in (
        (dict(of_rows=Shard(0)), "q_proj.weight_scale", "its placement is Shard(dim=0)", "must be Shard(dim=1)"),
        (dict(of_columns=Shard(1)), "o_proj.weight_scale", "its placement is Shard(dim=1)", "must be Replicate()"),
    ):
        _, shared = a_scale_for_each_row(folder, **options)
        with refused(UnsupportedModelError, f"model.model.layers.0.self_attn.{path}", wrong, right):
            optimize_with_triton(shared)
    phi = tiny_family("phi3")
    if dist.get_rank() == 0:
        phi.save_pretrained(folder / "phi3")
    dist.barrier()
    shared = AutoModelForCausalLM.from_pretrained(folder / "phi3", tp_plan="auto").eval()
    packed = with_fp8(phi, in_rows)[0].get_submodule(name := "model.layers.0.self_attn.qkv_proj")
    shared.set_submodule(name, spread(shared.get_submodule(name), packed, Shard(1)))
    with refused(UnsupportedModelError, f"model.{name} is quantised, and gives several products"):
        optimize_with_triton(shared)
    _, shared = a_scale_for_each_row(folder)
    layer = shared.model.layers[1].mlp.up_proj
    layer.forward = type(layer).forward.__get__(layer)
    with refused(UnsupportedModelError, "model.model.layers.1.mlp.up_proj.weight", "with their own forward"):
        optimize_with_triton(shared)


def main(argv: list[str]) -> int:
    """An exception ends both ranks."""
    dist.init_process_group("gloo")
    folder = Path(argv[0])
    if dist.get_rank() == 0:
        for name in LOADED:
            save(folder, name)
        new_target(192).save_pretrained(folder / "wide")
    dist.barrier()
    what_transformers_spreads(folder)
    compare("a scale for each row", *a_scale_for_each_row(folder))
    what_is_refused(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        print("ranks share FP8 weights", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
