"""How targets and heads of the demo are trained and evaluated."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from eagle_triton import EAGLEConfig, EAGLEInference, EaModel
from eagle_triton.benchmarks.original_and_patched import decode, tau_of
from eagle_triton.comparison.figures import first_difference
from tools.demo.corpus import END_OF_TEXT_ID, windows, write_json
from tools.demo.recipe import Recipe
from tools.demo.unroll import unroll


def shape_config(recipe: Recipe) -> dict:
    """The keys that the configs of the target and of both heads share, readable by old and new versions."""
    return {
        "model_type": "llama",
        **recipe.sizes,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "initializer_range": 0.02,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "pretraining_tp": 1,
        "use_cache": True,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "torch_dtype": str(recipe.dtype).removeprefix("torch."),
    }


def target_config(recipe: Recipe) -> dict:
    return {"architectures": ["LlamaForCausalLM"], **shape_config(recipe), "pad_token_id": END_OF_TEXT_ID}


def add_dropout(model: Any, rate: float) -> list:
    """Residual dropout while training; returns the hook handles."""

    def drop(module, args, output):
        return F.dropout(output, rate, training=module.training)

    def mixed(layer: Any) -> torch.nn.Module:
        return layer.self_attn.o_proj if hasattr(layer, "self_attn") else layer.linear_attn.out_proj

    def fed_forward(layer: Any) -> torch.nn.Module:
        return getattr(layer.mlp, "down_proj", layer.mlp)  # of a mixture of experts the whole block

    blocks = [module for layer in model.model.layers for module in (mixed(layer), fed_forward(layer))]
    return [module.register_forward_hook(drop) for module in (model.model.embed_tokens, *blocks)]


def new_target(recipe: Recipe) -> LlamaForCausalLM:
    config = {k: v for k, v in target_config(recipe).items() if k not in ("torch_dtype", "architectures")}
    return LlamaForCausalLM(LlamaConfig(**config))


def train_target(
    run: Run,
    train: torch.Tensor,
    held_out: torch.Tensor,
    build: Callable[[Recipe], Any] = new_target,
    config: Callable[[Recipe], dict] = target_config,
    directory: Path | None = None,
    added_loss: Callable[[Recipe, Any], torch.Tensor] | None = None,
) -> dict:
    """Train, keep the weights with the best held-out loss, save them sharded with an index.

    added_loss: what is made of the forward's output and added to the loss, while the model trains.
    """
    recipe, directory = run.recipe, directory or run.target_directory
    torch.manual_seed(recipe.seed)
    model = build(recipe).to(run.device, torch.float32)
    handles = add_dropout(model, recipe.target_dropout)
    generator = torch.Generator().manual_seed(recipe.seed)
    lengths = (512, 1024, recipe.max_positions)
    best, curve = (math.inf, {}), []

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        out = model(input_ids=ids, use_cache=False)
        loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        return loss + added_loss(recipe, out) if added_loss and model.training else loss

    @torch.no_grad()
    def check(step: int, train_loss: float) -> None:
        nonlocal best
        model.eval()
        length = min(1024, held_out.numel() // 2)
        rows = held_out[: held_out.numel() // length * length].view(-1, length)
        losses = []
        for chunk in rows.split(16):
            with run.autocast():
                losses += [loss_of(chunk).item()] * len(chunk)
        loss = sum(losses) / len(losses)
        curve.append({"step": step, "train": round(train_loss, 4), "held_out": round(loss, 4)})
        print(f"  step {step:5d}  train {train_loss:.4f}  held-out {loss:.4f}", flush=True)
        if loss < best[0]:
            best = loss, {k: v.detach().to("cpu", recipe.dtype) for k, v in model.state_dict().items()}
        model.train()

    model.train()
    running = None
    steps = optimise(model.parameters(), recipe.target_steps, recipe.target_minutes, recipe.target_lr,
                     recipe.target_weight_decay)  # fmt: skip
    for step, apply in steps:
        length = min(lengths[step % len(lengths)], train.numel() // 2)
        ids = windows(train, max(1, recipe.target_tokens_per_step // length), length, generator)
        with run.autocast():
            loss = loss_of(ids)
        apply(loss)
        running = loss.detach() if running is None else 0.98 * running + 0.02 * loss.detach()
        if step % 125 == 124:
            check(step + 1, running.item())
    check(step + 1, running.item())

    for handle in handles:
        handle.remove()
    model = model.cpu().to(recipe.dtype)
    model.load_state_dict(best[1])
    for old in directory.glob("*.safetensors*"):
        old.unlink()
    model.save_pretrained(directory, max_shard_size="8MB")
    write_configs(directory, config(recipe))
    epochs = (step + 1) * recipe.target_tokens_per_step / train.numel()
    return {"steps": step + 1, "epochs": round(epochs, 1), "held_out_loss": round(best[0], 4), "curve": curve}


def write_configs(directory: Path, config: dict) -> None:
    """The configurations of a model and of its generation."""
    write_json(directory / "config.json", config)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    write_json(directory / "generation_config.json", dict.fromkeys(names, END_OF_TEXT_ID))


# --- heads ---


class Teacher:
    """The frozen target: text in its own words, and what a head must predict."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model = self.load().to(run.device, torch.float32).eval()
        self.model.requires_grad_(False)
        layers = self.model.config.num_hidden_layers
        self.feature_layers = sorted({2, layers // 2, layers - 3})

    def load(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.run.target_directory)

    @torch.no_grad()
    def continue_text(self, ids: torch.Tensor, length: int, temperature: float) -> torch.Tensor:
        """[B, P] prefixes -> [B, length]: even rows greedily, odd rows sampled at the temperature."""
        generator = torch.Generator(self.run.device).manual_seed(0)
        greedy = torch.arange(len(ids), device=ids.device)[:, None] % 2 == 0
        cache, new = None, ids
        while ids.shape[1] < length:
            with self.run.autocast():
                out = self.model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, logits = out.past_key_values, out.logits[:, -1].float()
            sampled = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            new = torch.where(greedy, logits.argmax(-1, keepdim=True), sampled)
            ids = torch.cat((ids, new), dim=1)
        return ids

    @torch.no_grad()
    def lesson(self, tokens: torch.Tensor, kind: str) -> tuple[torch.Tensor, ...]:
        """tokens [B, S] -> rows t = 0..S-2: features f_t, ids x_{t+1}, logits for x_{t+2}, feature f_{t+1}."""
        with self.run.autocast():
            out = self.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
        hidden = out.hidden_states
        features = torch.cat([hidden[i] for i in self.feature_layers], -1) if kind == "eagle3" else hidden[-1]
        return features[:, :-1], tokens[:, 1:], out.logits[:, 1:].float(), features[:, 1:]


def head_corpus(teacher: Teacher, stream: torch.Tensor, generated: int, seed: int) -> dict[int, torch.Tensor]:
    """{row length: [rows, length]}: the target's own continuations, greedy and sampled, and plain windows."""
    generator = torch.Generator().manual_seed(seed)
    corpus: dict[int, list[torch.Tensor]] = {}
    for length, prefixes, rows in (
        (512, (16, 64, 192), max(2, generated // 3)),
        (1024, (256,), max(2, generated // 6)),
    ):
        parts = corpus.setdefault(length, [windows(stream, rows, length, generator)])
        for prefix in prefixes:
            starts = windows(stream, rows, prefix, generator)
            parts.append(teacher.continue_text(starts, length, temperature=0.8))
    return {length: torch.cat([p.cpu() for p in parts]) for length, parts in corpus.items()}


def draft_vocabulary(corpus: dict[int, torch.Tensor], recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """(d2t [Vd] int64 offsets: target id = draft id + d2t[draft id]; t2d [V] bool), the most frequent tokens."""
    counts = sum(torch.bincount(rows.flatten(), minlength=recipe.vocab_size) for rows in corpus.values())
    chosen = counts.argsort(descending=True, stable=True)[: recipe.draft_vocab_size].sort().values
    t2d = torch.zeros(recipe.vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(recipe.draft_vocab_size), t2d


def head_losses(head, kind: str, teacher: Teacher, tokens: torch.Tensor, measure: bool) -> list[dict]:
    """Per pass: the loss, and if `measure` the shares of rows with the target's choice in the top 1 / top 10."""
    run, recipe = teacher.run, teacher.run.recipe
    features, ids, logits, next_features = teacher.lesson(tokens, kind)
    choice = logits.argmax(-1)
    known = torch.ones_like(choice, dtype=torch.bool)
    if kind == "eagle3":
        t2d = head.t2d.to(run.device)
        known, logits = t2d[choice], logits[..., t2d]
        choice = (t2d.cumsum(0) - 1)[choice]
    goal = logits.softmax(-1)
    report = []
    with run.autocast():
        for step, hidden in enumerate(unroll(head, features, ids, recipe.head_passes)):
            draft = head.draft_logits(hidden, teacher.model.lm_head).float()
            row_loss = -(goal * draft.log_softmax(-1)).sum(-1)
            if kind == "eagle1":
                row_loss = row_loss + 0.5 * F.smooth_l1_loss(hidden, next_features, reduction="none").mean(-1)
            weight = known[:, step:].float()
            loss = (row_loss[:, step:] * weight).sum() / weight.sum()
            report.append({"loss": loss * recipe.head_pass_decay**step})
            if measure:
                best = draft[:, step:].topk(10, dim=-1).indices
                hits = (best == choice[:, step:, None]) & known[:, step:, None]
                report[-1]["top1"] = hits[..., 0].float().mean().item()
                report[-1]["top10"] = hits.any(-1).float().mean().item()
    return report


def head_config(recipe: Recipe, kind: str) -> dict:
    shared = {**shape_config(recipe), "num_hidden_layers": 1, "pad_token_id": 0, "bias": False}
    if kind == "eagle1":
        return {"architectures": ["LlamaForCausalLM"], **shared}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **shared,
        "draft_vocab_size": recipe.draft_vocab_size,
    }


def new_head(recipe: Recipe, kind: str, teacher: Teacher, corpus: dict[int, torch.Tensor]):
    """A fresh head with the target's embedding, and, for EAGLE-3, its draft vocabulary."""
    from eagle_triton.models.heads import DraftConfig, Eagle1Head, Eagle3Head

    torch.manual_seed(recipe.seed)
    config = DraftConfig.from_dict(head_config(recipe, kind))
    head = (Eagle3Head if kind == "eagle3" else Eagle1Head)(config).float()
    head.embed_tokens.weight.data.copy_(teacher.model.model.embed_tokens.weight)
    head.embed_tokens.weight.requires_grad_(False)
    if kind == "eagle3":
        d2t, t2d = draft_vocabulary(corpus, recipe)
        head.d2t.copy_(d2t)
        head.t2d.copy_(t2d)
        head.lm_head.weight.data.copy_(teacher.model.lm_head.weight.cpu()[t2d])
    return head.to(teacher.run.device)


def train_head(kind: str, run: Run, teacher: Teacher, corpus: dict, held_out: dict) -> dict:
    """Train one head against the frozen target and save it in SafeAILab's layout, without the embedding."""
    recipe = run.recipe
    head = new_head(recipe, kind, teacher, corpus)
    reached = fit_head(head, kind, teacher, corpus)
    head.eval()
    directory = run.output / kind
    kept = {name: tensor for name, tensor in head.state_dict().items() if not name.startswith("embed_tokens")}
    save_weights(directory / "model.safetensors", kept, recipe.dtype)
    write_json(directory / "config.json", head_config(recipe, kind))
    return {**reached, "held_out_per_pass": shares_per_pass(head, kind, teacher, held_out)}


def fit_head(head: Any, kind: str, teacher: Teacher, corpus: dict[int, torch.Tensor]) -> dict:
    """Train a head, unrolled as it drafts, on rows of the corpus. Returns its steps and its last loss."""
    recipe = teacher.run.recipe

    def loss_of(tokens: torch.Tensor, measure: bool) -> tuple[torch.Tensor, list[float]]:
        report = head_losses(head, kind, teacher, tokens, measure)
        return sum(each["loss"] for each in report), [each["top1"] for each in report if measure]

    trained = [p for p in head.parameters() if p.requires_grad]
    schedule = recipe.head_steps, recipe.head_minutes, recipe.head_lr, recipe.head_weight_decay
    return fit(trained, schedule, batches(teacher.run, corpus, recipe.head_tokens_per_step), loss_of)


def fit(
    parameters: Any, schedule: tuple[int, float, float, float], rows: Iterator[torch.Tensor],
    loss_of: Callable[[torch.Tensor, bool], tuple[torch.Tensor, list[float]]],
) -> dict:  # fmt: skip
    """Train a draft. schedule: of `optimise`. loss_of(tokens, measure): the loss, and if `measure` the shares of rows
    with the target's choice in the top 1, for each pass or depth. Returns its steps and its last loss."""
    for (step, apply), tokens in zip(optimise(parameters, *schedule), rows, strict=False):
        measure = step % 250 == 249
        loss, top1 = loss_of(tokens, measure)
        apply(loss)
        if measure:
            shares = " ".join(f"{share:.3f}" for share in top1)
            print(f"  step {step + 1:5d}  loss {loss.item():.4f}  top-1 {shares}", flush=True)
    return {"steps": step + 1, "train_loss": round(loss.item(), 4)}


def save_weights(file: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Write tensors, numbers in this dtype, as transformers reads them."""
    kept = {
        name: tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in tensors.items()
    }
    safetensors.torch.save_file(kept, file, metadata={"format": "pt"})


def batches(run: Run, corpus: dict[int, torch.Tensor], tokens: int) -> Iterator[torch.Tensor]:
    """Random rows of the corpus, about `tokens` in each batch: of the longest length in one batch of four."""
    generator, lengths = torch.Generator().manual_seed(run.recipe.seed), sorted(corpus)
    for step in itertools.count():
        rows = corpus[lengths[-1] if step % 4 == 3 else lengths[0]]
        count = min(max(1, tokens // rows.shape[1]), len(rows))
        yield rows[torch.randint(len(rows), (count,), generator=generator)].to(run.device)


@torch.no_grad()
def shares_per_pass(head: Any, kind: str, teacher: Teacher, held_out: dict[int, torch.Tensor]) -> dict:
    """The shares of held-out rows with the target's choice in the head's top 1 and top 10, for each pass."""
    report = head_losses(head, kind, teacher, held_out[min(held_out)][:64].to(teacher.run.device), measure=True)
    reached = {key: [round(r[key], 4) for r in report] for key in ("top1", "top10")}
    print(f"  held-out, per pass: {reached}", flush=True)
    return reached


# --- evaluation ---


def evaluate(run: Run, prompts: list[str], new_tokens: int = 64) -> dict:
    """tau with the tree 60/7/10, greedy, fp32, and whether every token equals plain decoding.

    A small model repeats itself, and repetition is easy to draft: `tau_varied` leaves out continuations with less
    than a quarter of distinct tokens.
    """
    outcome = {}
    for kind in ("eagle3", "eagle1"):
        model = EaModel.from_pretrained(
            base_model_path=str(run.target_directory),
            ea_model_path=str(run.output / kind),
            use_eagle3=kind == "eagle3",
        ).to(run.device)
        found, shares, equal = [], [], 0
        for prompt in prompts:
            ids = model.tokenizer(prompt, return_tensors="pt").input_ids
            drafted, plain = (decode(model, ids, new_tokens, plain=way) for way in (False, True))
            written = drafted.tokens[drafted.prompt_length :]
            found.append(drafted)
            shares.append(len(set(written)) / len(written))
            equal += first_difference(drafted.tokens, plain.tokens) is None
        varied = [drafted for drafted, share in zip(found, shares, strict=True) if share >= 0.25]
        outcome[kind] = {
            "tau": round(tau_of(found), 3),
            "tau_varied": round(tau_of(varied), 3) if varied else None,
            "prompts": len(found),
            "prompts_varied": len(varied),
            "prompts_with_equal_tokens": equal,
            "distinct_token_share": round(sum(shares) / len(shares), 3),
        }
        print(f"  {kind}: {outcome[kind]}", flush=True)
    return outcome


def tree(topk: int, levels: int, nodes: int) -> EAGLEConfig:
    """Trees, or with one child a node chains, that are always drafted; in fp32."""
    return EAGLEConfig(topk=topk, num_steps=levels, num_draft_tokens=nodes, fallback=False, dtype=torch.float32)


def compare_with_generate(
    run: Run, target: Path, drafts: dict[str, tuple[Any, EAGLEConfig]], prompts: list[str], new_tokens: int
) -> dict:
    """The tau of each draft of a target, greedy, fp32, and how many outputs are those of transformers' own generate."""
    outcome, expected = {}, {}
    for name, (draft, config) in drafts.items():
        engine, equal = EAGLEInference(draft, str(target), config, run.device), 0
        for prompt in prompts:
            ids = engine.tokenizer(prompt, return_tensors="pt").input_ids.to(engine.engine.device)
            if prompt not in expected:
                expected[prompt] = engine.pair.target_model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
            equal += torch.equal(engine.generate(ids, new_tokens)[0], expected[prompt])
        tau = round(engine.statistics.tau, 3)
        outcome[name] = {"tau": tau, "prompts": len(prompts), "prompts_with_equal_tokens": equal}
        print(f"  {name}: {outcome[name]}", flush=True)
    return outcome


# --- the frame ---


@dataclasses.dataclass(frozen=True)
class Run:
    """Where and on what a run happens."""

    recipe: Recipe
    output: Path
    device: torch.device

    @property
    def target_directory(self) -> Path:
        return self.output / "target"

    @property
    def hybrid_directory(self) -> Path:
        return self.output / "gdn"

    @property
    def draft_directory(self) -> Path:
        return self.output / "draft"

    def block_directory(self, causal: bool) -> Path:
        return self.output / ("block-causal" if causal else "block")

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


def optimise(parameters, steps: int, minutes: float, lr: float, weight_decay: float) -> Iterator[tuple]:
    """Yield (step, apply): apply(loss) does one AdamW step on a cosine schedule over steps or time."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    fused = parameters[0].device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)
    begin, warm_up = time.monotonic(), min(100, max(1, steps // 10))

    def apply(loss: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    for step in range(steps):
        progress = max(step / steps, (time.monotonic() - begin) / (60 * minutes))
        if progress >= 1.0:
            return
        rate = min(1.0, (step + 1) / warm_up) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = lr * rate
        yield step, apply
