"""The stages of tools/train_demo.py, from the tokenizer to the figures of the drafts."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import AutoTokenizer

from eagle_triton.benchmarks.record import machine
from tools.demo import block, draft, hybrid, mixture
from tools.demo.corpus import (
    held_out_prompts,
    is_held_out,
    library_files,
    token_stream,
    train_tokenizer,
    write_json,
)
from tools.demo.recipe import STAGES, Recipe
from tools.demo.training import Run, Teacher, evaluate, head_corpus, train_head, train_target


def file_sizes(directory: Path) -> dict[str, int]:
    sizes = {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.suffix in (".json", ".safetensors")
    }
    return {**sizes, "total": sum(sizes.values())}


class Pipeline:
    """The stages, and what several of them share, made once and only if needed."""

    def __init__(self, run: Run, library: Path, with_tests: bool, eval_prompts: int) -> None:
        self.run, self.recipe, self.library, self.eval_prompts = run, run.recipe, library, eval_prompts
        self.files = library_files(library, with_tests)
        self.texts = {held: [t for path, t in self.files if is_held_out(path) == held] for held in (False, True)}

    @property
    def stages(self) -> dict[str, Callable[[], dict]]:
        """What each stage does, by its name; it returns what was reached."""
        run = self.run
        return {
            "tokenizer": self.tokenizer,
            "target": lambda: train_target(run, *self.streams),
            "prompts": self.prompts,
            "eagle3": lambda: train_head("eagle3", run, *self.lessons),
            "eagle1": lambda: train_head("eagle1", run, *self.lessons),
            "evaluate": lambda: evaluate(run, self.evaluated),
            "hybrid": self.hybrid,
            "mtp": lambda: hybrid.train_mtp(run, *self.lessons_of(hybrid.HybridTeacher(run))),
            "evaluate_mtp": lambda: hybrid.evaluate(run, self.evaluated),
            "draft": self.draft,
            "evaluate_draft": lambda: draft.evaluate(run, self.evaluated),
            "block": self.block,
            "evaluate_block": lambda: block.evaluate(run, self.evaluated),
            "mixture": self.mixture,
            "mixture_head": lambda: train_head("eagle3", self.of_mixture, *self.lessons_of(Teacher(self.of_mixture))),
            "evaluate_mixture": lambda: mixture.evaluate(self.of_mixture, self.evaluated, self.streams[1]),
        }

    @functools.cached_property
    def streams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The training and the held-out tokens, on the device."""
        tokenizer = AutoTokenizer.from_pretrained(self.run.target_directory)
        train, held_out = (token_stream(tokenizer, self.texts[h], self.recipe.seed) for h in (False, True))
        return train.to(self.run.device), held_out.to(self.run.device)

    @property
    def evaluated(self) -> list[str]:
        """The prompts that drafts are evaluated on."""
        return json.loads((self.run.output / "prompts.json").read_text(encoding="utf-8"))[: self.eval_prompts]

    @functools.cached_property
    def of_mixture(self) -> Run:
        """Where and how the mixture of experts and its head are trained."""
        return dataclasses.replace(self.run, recipe=self.recipe.of_mixture, output=self.run.output / "moe")

    @functools.cached_property
    def lessons(self) -> tuple[Teacher, dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        return self.lessons_of(Teacher(self.run))

    def lessons_of(self, teacher: Any) -> tuple[Any, dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """A frozen target, the text for its heads, and a little such text from held-out files."""
        begin, rows = time.monotonic(), teacher.run.recipe.generated_rows
        train, held_out = self.streams
        corpus = head_corpus(teacher, train, rows, seed=1)
        held_out_corpus = head_corpus(teacher, held_out, min(64, rows), seed=2)
        tokens = sum(rows.numel() for rows in corpus.values())
        print(f"  {tokens} tokens for the heads in {time.monotonic() - begin:.0f} s", flush=True)
        return teacher, corpus, held_out_corpus

    def tokenizer(self) -> dict:
        recipe = self.recipe
        train_tokenizer(self.texts[False], recipe.vocab_size, recipe.max_positions, self.run.target_directory)
        train, held_out = self.streams
        size = sum(len(text.encode()) for text in self.texts[False])
        return {
            "library": self.library.name,
            "files": len(self.texts[False]),
            "held_out_files": len(self.texts[True]),
            "train_tokens": train.numel(),
            "held_out_tokens": held_out.numel(),
            "bytes_per_token": round(size / train.numel(), 3),
        }

    def prompts(self) -> dict:
        prompts = held_out_prompts(self.files)
        write_json(self.run.output / "prompts.json", prompts)
        return {"count": len(prompts)}

    def hybrid(self) -> dict:
        self.tokenizer_for(self.run.hybrid_directory)
        return train_target(self.run, *self.streams, hybrid.new_target, hybrid.target_config, self.run.hybrid_directory)

    def draft(self) -> dict:
        self.tokenizer_for(self.run.draft_directory)
        return draft.train_draft(self.run, *self.lessons)

    def block(self) -> dict:
        train = functools.partial(block.train_block, self.run)
        return {"full": train(False, *self.lessons), "causal": train(True, *self.lessons)}

    def mixture(self) -> dict:
        run = self.of_mixture
        self.tokenizer_for(run.target_directory)
        made_by = mixture.new_target, mixture.target_config
        return train_target(run, *self.streams, *made_by, added_loss=mixture.balance_loss)

    def tokenizer_for(self, directory: Path) -> None:
        """The target's tokenizer beside another model."""
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            if (source := self.run.target_directory / name).exists():
                shutil.copyfile(source, directory / name)


def train(arguments: argparse.Namespace, recipe: Recipe) -> None:
    """Run the stages that were asked for, and write what they reach."""
    run = Run(recipe, arguments.output, torch.device(arguments.device))
    for name in ("target", "eagle3", "eagle1", "gdn", "draft", "moe/target", "moe/eagle3"):
        (run.output / name).mkdir(parents=True, exist_ok=True)
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    pipeline = Pipeline(run, arguments.library, arguments.with_tests, arguments.eval_prompts)
    for stage in STAGES:
        if stage not in arguments.stages:
            continue
        print(f"{stage} ...", flush=True)
        begin = time.monotonic()
        reached = pipeline.stages[stage]()
        seconds = round(time.monotonic() - begin, 1)
        made_with = {**machine(run.device), "tokenizers": tokenizers.__version__}
        results[stage] = {**reached, "seconds": seconds, "made_with": made_with}
        if not stage.startswith("evaluate"):
            results["recipe"] = {**dataclasses.asdict(recipe), "dtype": str(recipe.dtype)}
        results["bytes"] = file_sizes(run.output)
        write_json(arguments.results, results)
        print(f"  {seconds} s", flush=True)
