"""The corpus of the embedded checkpoint: the standard library's sources, a tokenizer for them, and prompts."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch

from eagle_triton.demo.library import is_held_out, library_paths

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0


def library_files(library: Path, with_tests: bool) -> list[tuple[str, str]]:
    """(relative path, source) of every library file, sorted by path; what is not UTF-8 is skipped."""
    files = []
    for path in library_paths(library, with_tests):
        try:
            text = (library / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            files.append((path.as_posix(), text.replace("\r\n", "\n")))
    if not files:
        raise SystemExit(f"no Python sources under {library}")
    return files


def token_stream(tokenizer, texts: list[str], seed: int) -> torch.Tensor:
    """All files as one int64 vector, in shuffled order, each preceded by the end-of-text token."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    encoded = tokenizer([texts[i] for i in order], add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in (END_OF_TEXT_ID, *ids)])


def windows(stream: torch.Tensor, rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, length] random windows of the stream."""
    starts = torch.randint(0, stream.numel() - length, (rows, 1), generator=generator)
    return stream[(starts + torch.arange(length)).to(stream.device)]


def held_out_prompts(files: list[tuple[str, str]], count: int = 100) -> list[str]:
    """Prefixes of top-level blocks of held-out files, of 1 to about 60 lines, ends of lines cut clean."""
    prompts: list[str] = []
    lengths = (3, 8, 1, 16, 5, 30, 2, 12, 20, 60)
    starts = [
        (lines, number)
        for path, text in files
        if is_held_out(path)
        for lines in [text.splitlines()]
        for number, line in enumerate(lines)
        if line.startswith(("def ", "class ", "import ", "from ", "@")) and len(lines) - number > 12
    ]
    order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(0)).tolist()
    for index in order:
        lines, number = starts[index]
        prompt = "\n".join(lines[number : number + lengths[len(prompts) % len(lengths)]]).rstrip()
        if prompt not in prompts:
            prompts.append(prompt)
        if len(prompts) == count:
            break
    return prompts


def train_tokenizer(texts: list[str], vocab_size: int, max_positions: int, directory: Path) -> None:
    """A byte-level BPE that AutoTokenizer loads, with use_fast either way, in transformers 4.53 to 5."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise SystemExit(f"the corpus gives {tokenizer.get_vocab_size()} entries, wanted {vocab_size}")
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_positions,
            "model_input_names": ["input_ids", "attention_mask"],
        },
    )
    write_json(directory / "special_tokens_map.json", {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT})


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
