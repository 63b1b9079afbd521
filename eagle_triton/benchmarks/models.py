"""The measured models and prompts: ours, and SafeAILab/EAGLE's around the same weights."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import random
import string
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from torch import Tensor, nn

from eagle_triton import EaModel
from eagle_triton.assembly import assemble
from eagle_triton.benchmarks.modes import context_too_long
from eagle_triton.benchmarks.quantised import round_target
from eagle_triton.command_line import holds_target, sentence, too_long
from eagle_triton.demo import demo_prompts, path_of
from eagle_triton.devices import choose_threads, processes
from eagle_triton.draft_choice import DraftChoice, load_draft
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.grammar import GrammarCompiler, compiler_for
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.models import loading
from eagle_triton.models.block_drafter import BlockDrafter
from eagle_triton.models.shapes import SHAPES, random_block_drafter, random_model
from eagle_triton.options import EngineOptions

_ALIAS = "safeailab_eagle"  # an installed eagle-llm is called `eagle`, too


def load(args: argparse.Namespace) -> EaModel:
    """The model that the options name. Raises ValueError if it cannot be loaded, or is too short for --context."""
    dtype = getattr(torch, args.dtype)
    if args.shape is None:
        model = load_pair(args.model, args.draft, args.eagle1, dtype, args.device)
    else:
        model = random_model(args.shape, not args.eagle1, args.device, dtype, ranks=processes())
        if getattr(args, "accept_length", None) is not None:  # a random head is never sure: make it sure
            with torch.no_grad():
                head: Any = model.ea_layer if model.use_eagle3 else model.base_model
                head.lm_head.weight.mul_(20)
    if getattr(args, "target_weights", None) is not None:
        round_target(model.base_model, args.target_weights)
    if problem := context_too_long(args, positions(model)):
        raise ValueError(problem)
    return model


def block_drafter(model: EaModel, sure: bool) -> BlockDrafter:
    """A random block drafter for the target of `model`. sure: make it draft deep trees, for `--accept-length`."""
    drafter = random_block_drafter(model.base_model)
    if sure:
        with torch.no_grad():
            drafter.norm.weight.mul_(100)
    return drafter


def draft_model(args: argparse.Namespace) -> Any:
    """A draft model with random weights for --shape: the smallest shape with its vocabulary."""
    fitting = [name for name, sizes in SHAPES.items() if sizes["vocab_size"] == SHAPES[args.shape]["vocab_size"]]
    small = min(fitting, key=lambda name: SHAPES[name]["hidden_size"])
    return random_model(small, device=args.device, dtype=getattr(torch, args.dtype)).base_model


def grammar_compiler(model: EaModel) -> GrammarCompiler:
    """A compiler for the model's tokenizer, or for one of random words where it has none."""
    tokenizer = model.tokenizer or _random_words(model.vocab_size)
    return compiler_for(tokenizer, model.vocab_size, frozenset({tokenizer.eos_token_id}))


def _random_words(size: int) -> transformers.PreTrainedTokenizerFast:
    """A byte-pair tokenizer of `size` tokens: bytes, pairs of letters, words of four letters, and an end."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ["".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=2)]
    words = random.Random(0).sample(["".join(two) for two in itertools.product(pairs, repeat=2)], size)
    merged = [*pairs, *words][: size - len(symbols) - 1]
    vocabulary = {token: index for index, token in enumerate((*symbols, *merged))}
    merges = [(token[: len(token) // 2], token[len(token) // 2 :]) for token in merged]
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def load_pair(target: str, draft: str | None, eagle1: bool, dtype: torch.dtype, device: str) -> EaModel:
    """A target and its head. Raises ValueError with one sentence if they cannot be loaded for any reason."""
    try:
        shared: dict[str, Any] = {"tp_plan": "auto"} if processes() > 1 else {}
        model = EaModel.from_pretrained(target, draft, use_eagle3=not eagle1, dtype=dtype, **shared)
    except (ValueError, TypeError, OSError) as error:
        names = f"--model {target}" + (f" --draft {draft}" if draft else "")
        raise ValueError(f"{names} cannot be loaded: {sentence(error)}") from error
    choose_threads(device, target, draft)
    return model if shared else model.to(device)


def load_block(path: str | None, target: Any) -> BlockDrafter | None:
    """A block drafter on its target's device. Raises ValueError with one sentence if it cannot be loaded."""
    if path is None:
        return None
    try:
        return load_draft(DraftChoice("block drafter", path_of(path)), target)
    except (ValueError, OSError) as error:
        raise ValueError(f"--block-drafter {path} cannot be loaded: {sentence(error)}") from error


class Target(NamedTuple):
    """A target and its drafts. model: for EAGLEInference; causal_lm: the Hugging Face model in it; head: a `DraftHead`,
    or None."""

    model: Any
    causal_lm: Any
    head: Any
    tokenizer: Any
    block: BlockDrafter | None = None


def load_target(args: argparse.Namespace, with_head: bool, block: str | None) -> Target:
    """The options' target and its tokenizer, with a head if one is needed or is beside it. block: a block drafter, None
    if none is needed. Raises ValueError with one sentence if it cannot be loaded for any reason."""
    dtype = getattr(torch, args.dtype)
    if with_head or holds_target(args.model):
        pair = load_pair(args.model, args.draft, args.eagle1, dtype, args.device)
        target = Target(pair, pair.base_model, pair.ea_layer, pair.tokenizer)
    else:
        try:
            place = path_of(args.model)
            causal_lm = loading.load_target(place, engine=True, dtype=dtype).to(args.device)
            target = Target(causal_lm, causal_lm, None, loading.load_tokenizer(place))
        except (ValueError, TypeError, OSError) as error:
            raise ValueError(f"--model {args.model} cannot be loaded: {sentence(error)}") from error
    tokenizer_of(target)
    return target._replace(block=load_block(block, target.causal_lm))


def tokenizer_of(target: Any) -> Any:
    """The tokenizer of an EaModel or a `Target`. Raises ValueError if there is none."""
    if target.tokenizer is None:
        raise ValueError("--model must have a tokenizer, and there is none beside the target")
    return target.tokenizer


def engine_of(target: Any, head: nn.Module | None, cuda_graph: bool | None = None, **options: Any) -> Engine:
    """The engine of a target and its head, as every call of the package makes it; None: decode plainly.

    cuda_graph: None captures each step on a GPU. options: of `EngineOptions`.
    """
    alone = head is None or isinstance(target, EaModel)
    roots = {"model": target} if alone else {"model": target, "head": head}
    engine, draft, *_ = assemble(target, head, EngineOptions(**options), roots, lambda: PLAIN, cuda_graph=cuda_graph)
    engine.draft = draft
    return engine


def own_tree(engine: Engine) -> TreeSpec:
    """The tree of the engine's draft."""
    return PLAIN if engine.draft is None else engine.draft.read_tree()


def positions(model: EaModel) -> int | None:
    """The number of the target's positions; None if its configuration has none."""
    return getattr(model.config, "max_position_embeddings", None)


def random_tokens(vocabulary: int, count: int, length: int, seed: int | None = None, *, least: int = 0) -> list[Tensor]:
    """Token ids [length] each, on the CPU, from `least` on, the same for the same seed; None: the length."""
    generator = torch.Generator().manual_seed(length if seed is None else seed)
    return list(torch.randint(least, vocabulary, (count, length), generator=generator))


def random_prompts(model: EaModel, count: int, length: int) -> list[Tensor]:
    """Token ids [1, length] each, the same in every run."""
    return [prompt[None] for prompt in random_tokens(model.vocab_size, count, length)]


def prompts(model: EaModel, args: argparse.Namespace) -> list[Tensor]:
    """The prompts of the mode generate: random tokens for each --context, or texts."""
    if args.context:
        return [prompt for length in args.context for prompt in random_prompts(model, args.num_runs, length)]
    texts = [args.prompt] * args.num_runs if args.prompt else demo_prompts(args.num_runs)
    return encoded(model, texts, args.max_length)


def encoded(model: EaModel, texts: list[str], new: int) -> list[Tensor]:
    """Token ids [1, L] of each text. Raises ValueError if one is too long for the model, or has no token."""
    tokenizer = tokenizer_of(model)
    found = [tokenizer(text, return_tensors="pt", verbose=False).input_ids for text in texts]
    lengths = [prompt.shape[1] for prompt in found]
    if not min(lengths):
        raise ValueError("--prompt must give at least one token, got none")
    if problem := too_long("--prompt", max(lengths), new, positions(model)):
        raise ValueError(problem)
    return found


def weight_bytes(view: ModelView, draft: Draft | None, spec: TreeSpec, batch: int) -> float:
    """Bytes of weights that a decode step of `batch` sequences must read: the target once, a draft once for each of its
    passes, a block drafter once.

    In a mixture of E experts with k per row, R = batch * nodes rows read E * (1 - (1 - k / E) ** R), the expected
    number for a router that chooses uniformly and independently for each row; a single row reads its k.
    """
    return view.bytes_read(batch * spec.nodes) + (0 if draft is None else draft.weight_bytes(spec))


def beside_floor(
    figures: dict[str, Any], engine: Engine, spec: TreeSpec, batch: int, bandwidth: float
) -> dict[str, Any]:
    """Figures of a step, with the time to read its weights at `bandwidth` bytes per second."""
    floor_ms = weight_bytes(engine.view, engine.draft, spec, batch) / bandwidth * 1e3
    return {**figures, "floor_ms": floor_ms, "floor_share": floor_ms / figures["ms_per_step"]}


def import_safeailab(checkout: Path) -> ModuleType:
    """The module eagle.model.ea_model of a checkout. Raises ValueError with the requirements."""
    if not (checkout / "eagle" / "model" / "ea_model.py").is_file():
        raise ValueError(
            f"--upstream: {checkout} is not a checkout of SafeAILab/EAGLE (it has no eagle/model/ea_model.py)"
        )
    package = sys.modules.setdefault(_ALIAS, ModuleType(_ALIAS))
    package.__path__ = [str(checkout / "eagle")]
    try:
        return importlib.import_module(f"{_ALIAS}.model.ea_model")
    except ImportError as error:
        raise ValueError(
            "--upstream: SafeAILab/EAGLE imports under transformers 4.53.x only, this is "
            f"{transformers.__version__} ({error})"
        ) from error


def safeailab_model(module: ModuleType, model: EaModel) -> nn.Module:
    """SafeAILab's EaModel around the same weights as `model`. Raises ValueError unless that is a Llama."""
    config = model.config
    if config.model_type != "llama":
        raise ValueError(f"--upstream: the target must be a Llama, got {config.model_type}")
    config = transformers.LlamaConfig(**{**config.to_dict(), "pretraining_tp": 1})
    llama = importlib.import_module(f"{_ALIAS}.model.modeling_llama_kv")
    ours, head = model.base_model, model.ea_layer
    default = torch.get_default_dtype()
    torch.set_default_dtype(ours.dtype)
    try:
        with torch.device(model.device), tempfile.TemporaryDirectory() as folder:
            base = llama.LlamaForCausalLM(config)
            _write_parts(Path(folder), model, config)
            built = module.EaModel(
                model.use_eagle3, base, folder, f"{folder}/head.json", head.total_tokens + 1, head.depth, head.top_k,
                1.0, {},
            )  # fmt: skip
    finally:
        torch.set_default_dtype(default)
    for part, source in ((base, ours), (built.ea_layer, head)):
        missing, unknown = part.load_state_dict(source.state_dict(), strict=False, assign=True)
        lost = [name for name in (*missing, *unknown) if "rotary" not in name and name != "t2d"]
        if lost:
            raise ValueError(f"--upstream: weights that do not fit SafeAILab's EaModel: {', '.join(lost)}")
    return built.eval()


def _write_parts(folder: Path, model: EaModel, config: Any) -> None:
    """Write the constructor's input: a tokenizer, the target's configuration and embedding, and the head's."""
    words = Tokenizer(WordLevel({"word": 0}, unk_token="word"))
    tokenizer = model.tokenizer or transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="word")
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    name = "model.embed_tokens.weight"
    save_file({name: model.ea_layer.embed_tokens.weight.detach().cpu()}, folder / "model.safetensors")
    index = {"weight_map": {name: "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    head = dict(model.ea_layer.config.to_dict(), model_type="llama", pretraining_tp=1, pad_token_id=0)
    head.pop("target_hidden_size")
    (folder / "head.json").write_text(json.dumps(head), encoding="utf-8")
