"""Make random calls of every door on small random models and compare the answers with the original's.

    python tools/fuzz.py 600 1                          ten minutes of calls of all doors, from seed 1
    python tools/fuzz.py 600 1 --door session --calls 200
    python tools/fuzz.py 60 1 --door generate --replay 1:17   one call again, shown in full

Models are in fp32 on the CPU: Llama, Mistral, Qwen2, Qwen3 and hybrids, with random shapes, ropes, windows, biases and
tied embeddings. A greedy call must give the original's tokens. A sampled call must give the same tokens with another
draft or tree, and alone instead of in a batch: by default that is a function of its seed and the target. A call that
the original refuses must be refused with the same error.

In fp32 two logits that lie closer than `TIE` may be ordered either way. A first difference at such a place is counted
as a tie, with the margin. Every other difference is printed with the call that shows it, cut down as far as it still
differs, and ends in exit status 1. `SEED:INDEX` and the door repeat a call; other calls before it do not matter.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.command_line import Parser, run_program, some_text, whole
from tools.foreign_tests import letter_tokenizer, without_values

TIE = 1e-4  # of a logit: eagle_triton.benchmarks.parity has the same bound for fp32
VOCABULARY = 40
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"  # one for each token
MAX_CUTS = 25  # tries to make a call that differs smaller

Call = dict[str, Any]


@dataclass
class Outcome:
    """The outcome of a call. where: engine, original, refused or tie; reason: of the latter three.

    problem: how the answer differs from the original's, None where it does not.
    """

    where: str
    reason: str = ""
    problem: str | None = None


def main(argv: list[str] | None = None) -> int:
    parser = Parser("fuzz.py", __doc__ or "")
    add = parser.add_argument
    add("seconds", type=whole(), metavar="SECONDS", help="when to stop")
    add("seed", type=whole(0, 2**31), metavar="SEED", help="of the calls")
    add("--door", choices=(*DOORS, "all"), default="all", help="what is called (default: all in turn)")
    add("--calls", type=whole(), metavar="N", help="stop after N calls")
    add("--replay", type=some_text, metavar="SEED:INDEX", help="make this call alone and show it")
    args = parser.parse_args(argv)
    first, seed = 0, args.seed
    if args.replay:
        parts = args.replay.split(":")
        if len(parts) != 2 or not all(part.isdecimal() for part in parts) or args.door == "all":
            parser.error(f"--replay must be SEED:INDEX beside the --door of that call, got {args.replay!r}")
        seed, first = map(int, parts)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    doors = list(DOORS) if args.door == "all" else [args.door]
    counts, problems = run(doors, seed, first, 1 if args.replay else args.calls, args.seconds, bool(args.replay))
    print(table(counts))
    return int(problems > 0)


def run(
    doors: Sequence[str], seed: int, first: int, calls: int | None, seconds: float, show: bool = False
) -> tuple[dict[str, Counter[str]], int]:
    """Call these doors in turn until `calls` or `seconds` are over. Returns outcomes by door, and problems."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # fp32 means fp32
    torch.set_num_threads(1)
    counts: dict[str, Counter[str]] = {door: Counter() for door in doors}
    end, index, problems = time.monotonic() + seconds, first, 0
    while time.monotonic() < end and (calls is None or index < first + calls):
        door = doors[index % len(doors)]
        make, check = DOORS[door]
        call = make(random.Random(f"{seed}:{index}:{door}"))
        outcome = checked(check, call)
        if show:
            print(json.dumps(call), outcome, sep="\n")
        counts[door][outcome.where] += 1
        if outcome.reason:
            counts[door][f"{outcome.where}: {outcome.reason}"] += 1
        if outcome.problem:
            problems += 1
            counts[door]["DIFFERENT"] += 1
            print(f"DIFFERENT: --door {door} --replay {seed}:{index}\n{outcome.problem}", flush=True)
            print(f"cut down to: {json.dumps(cut_down(check, call, MAX_CUTS))}", flush=True)
        index += 1
    return counts, problems


def checked(check: Callable[[Call], Outcome], call: Call) -> Outcome:
    """A call that ends in an unexpected error is a problem too."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return check(call)
    except Exception:
        return Outcome("engine", problem=traceback.format_exc(limit=-6))


def cut_down(check: Callable[[Call], Outcome], call: Call, tries: int) -> Call:
    """The smallest call found that still differs: fewer prompts, options and new tokens."""
    for tried, candidate in enumerate(islice(_smaller(call), tries), 1):
        if checked(check, candidate).problem:
            return cut_down(check, candidate, tries - tried)
    return call


def _smaller(call: Call) -> Iterator[Call]:
    for name in ("prompts", "requests"):
        for position in range(len(call.get(name, ())) if len(call.get(name, ())) > 1 else 0):
            yield call | {name: call[name][:position] + call[name][position + 1 :]}
    for place in ("options", "model", "tree"):
        for key in call.get(place, {}):
            if key not in ("max_new_tokens", "family"):
                yield call | {place: {name: value for name, value in call[place].items() if name != key}}
    new = call.get("options", {}).get("max_new_tokens", 1)
    if new > 1:
        yield call | {"options": call["options"] | {"max_new_tokens": new // 2}}
    if call.get("draft") not in (None, "suffix"):
        yield call | {"draft": "suffix", "tree": {}}


def table(counts: dict[str, Counter[str]]) -> str:
    """Calls by door, and the reasons in order of their number."""
    from eagle_triton.text_table import table as columns

    kinds = ("engine", "original", "refused", "tie", "DIFFERENT")
    rows = [
        [door, sum(found[kind] for kind in kinds[:4]), *(found[kind] for kind in kinds)]
        for door, found in counts.items()
    ]
    lines = [columns(("door", "calls", *kinds), rows), ""]
    for door, found in counts.items():
        reasons = [(count, name) for name, count in found.most_common() if ": " in name]
        lines += [f"{count:6d}  {door}, {name}" for count, name in reasons]
    return "\n".join(lines)


# --- Models and drafts.


def make_model(rng: random.Random, hybrids: bool = True) -> dict[str, Any]:
    """A description of a small random model; `build_model` has defaults for the rest."""
    family = rng.choice(["llama", "mistral", "qwen2", "qwen3", "llama", "qwen3"] + ["hybrid"] * hybrids)
    if family == "hybrid":
        return {"family": family, "kind": rng.randrange(2), "seed": rng.randrange(1000)}
    made: dict[str, Any] = {"family": family, "seed": rng.randrange(1000), "layers": rng.randint(1, 4)}
    groups, heads = rng.choice([1, 2, 3]), rng.choice([1, 2])
    made |= {"kv_heads": heads, "heads": heads * groups, "head_dim": rng.choice([8, 16, 24, 32])}
    if rng.random() < 0.4:
        made["rope"] = rng.choice(["linear", "llama3"] * 4 + ["yarn", "dynamic"])
    if (family == "mistral" and rng.random() < 0.7) or (family in ("qwen2", "qwen3") and rng.random() < 0.3):
        made["window"] = rng.choice([4, 9, 20])
    if rng.random() < 0.3:
        made["tied"] = True
    if family in ("llama", "qwen3") and rng.random() < 0.3:
        made["attention_bias"] = True
    if family == "llama" and rng.random() < 0.2:
        made["mlp_bias"] = True
    return made


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
}  # fmt: skip


@lru_cache(maxsize=8)
def _built(description: str) -> Any:
    import torch
    import transformers

    from tests.tiny import FAMILIES
    from tests.tiny_hybrids import KINDS, tiny_hybrid

    given = json.loads(description)
    if given["family"] == "hybrid":
        return tiny_hybrid(KINDS[given.get("kind", 0) % 2], vocab=VOCABULARY, seed=given.get("seed", 0))
    layers = given.get("layers", 2)
    options: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=given.get("heads", 2), num_key_value_heads=given.get("kv_heads", 1),
        head_dim=given.get("head_dim", 16), max_position_embeddings=2048, bos_token_id=None, eos_token_id=None,
        pad_token_id=0, tie_word_embeddings=given.get("tied", False),
    )  # fmt: skip
    if "rope" in given:
        rope = {"rope_type": given["rope"], **ROPES[given["rope"]]}
        if transformers.__version__.startswith("4."):
            options["rope_scaling"] = rope
        else:
            options["rope_parameters"] = rope | {"rope_theta": 10000.0}
    if "window" in given:
        options["sliding_window"] = given["window"]
        if given["family"] != "mistral":
            options |= {"use_sliding_window": True, "max_window_layers": layers // 2}
    options |= {name: True for name in ("attention_bias", "mlp_bias") if given.get(name)}
    torch.manual_seed(given.get("seed", 0))
    name = FAMILIES[given["family"]]
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def build_model(given: dict[str, Any]) -> Any:
    """The model of a description, made once for calls that follow each other."""
    return _built(json.dumps(given, sort_keys=True))


def make_draft(rng: random.Random, model: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A draft for this model, and the shape of its trees."""
    kind = rng.choice(
        [None, "suffix", "ngram", "model", "eagle3", "eagle1"] + ["mtp", "mtp"] * (model["family"] == "hybrid")
    )
    if kind in (None, "suffix", "ngram"):
        return kind, {}
    tree: dict[str, Any] = {"topk": rng.randint(1, 4), "num_steps": rng.randint(1, 4)}
    topk = tree["topk"]
    most = 1 + topk + (tree["num_steps"] - 1) * topk**2
    tree["num_draft_tokens"] = rng.randint(2, min(most, 24))
    if kind == "model":
        return {"kind": kind, "model": make_model(rng, hybrids=False)}, tree
    return {"kind": kind, "seed": rng.randrange(1000)}, tree


def build_draft(draft: Any, target: Any) -> Any:
    """A draft of a description. An EAGLE head reads features of the target's layers; its weights are random."""
    import torch

    from eagle_triton import load_mtp
    from eagle_triton.models.heads import DraftConfig, Eagle1Head, Eagle3Head
    from tests.tiny_hybrids import QWEN, mtp_tensors, save_with_mtp

    if draft is None or isinstance(draft, str):
        return draft
    if draft["kind"] == "model":
        return build_model(draft["model"])
    if draft["kind"] == "mtp":
        with tempfile.TemporaryDirectory() as folder:
            return load_mtp(target, save_with_mtp(target, Path(folder), mtp_tensors(target, QWEN, seed=draft["seed"])))
    torch.manual_seed(draft["seed"])
    eagle3, config = draft["kind"] == "eagle3", target.config
    layers = config.num_hidden_layers
    head = (Eagle3Head if eagle3 else Eagle1Head)(
        DraftConfig(
            hidden_size=config.hidden_size, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
            head_dim=16, vocab_size=VOCABULARY, draft_vocab_size=VOCABULARY,
            feature_layers=(0, layers // 2, layers - 1) if eagle3 else None,
        )
    )  # fmt: skip
    for parameter in head.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    head.embed_tokens.weight = target.get_input_embeddings().weight
    return head.eval()


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    """A letter for each token."""
    return letter_tokenizer(LETTERS)


def make_prompts(rng: random.Random, most: int = 4) -> list[list[int]]:
    """Token ids of some prompts, now and then one that repeats itself."""
    prompts = []
    for _ in range(rng.randint(1, most)):
        length = rng.choice([1, 2, 3, rng.randint(1, 30), rng.randint(1, 30), rng.randint(60, 140)])
        period = rng.choice([length, length, 3])
        pattern = [rng.randrange(1, VOCABULARY) for _ in range(period)]
        prompts.append([pattern[position % period] for position in range(length)])
    return prompts


# --- generate of a plain model.


def make_generate(rng: random.Random) -> Call:
    model = make_model(rng)
    draft, tree = make_draft(rng, model)
    options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 24), "do_sample": rng.random() < 0.4}

    def now_and_then(share: float, **more: Any) -> None:
        if rng.random() < share:
            options.update(more)

    if options["do_sample"]:
        now_and_then(0.6, temperature=rng.choice([0.3, 0.7, 1.3]))
        now_and_then(0.4, top_k=rng.randint(1, 12))
        now_and_then(0.4, top_p=rng.choice([0.2, 0.8, 0.95]))
        now_and_then(0.2, min_p=rng.choice([0.02, 0.2]))
    now_and_then(0.25, repetition_penalty=rng.choice([0.8, 1.2, 2.0]))
    now_and_then(0.3, eos_token_id=rng.sample(range(VOCABULARY), rng.randint(1, 6)))
    now_and_then(0.15, min_new_tokens=rng.randint(0, 10))
    now_and_then(0.1, min_length=rng.randint(0, 40))
    now_and_then(0.15, suppress_tokens=rng.sample(range(VOCABULARY), 4))
    now_and_then(0.15, bad_words_ids=[[rng.randrange(VOCABULARY)] for _ in range(3)])
    now_and_then(0.05, bad_words_ids=[[rng.randrange(VOCABULARY) for _ in range(2)]])
    now_and_then(0.15, sequence_bias=[[[rng.randrange(VOCABULARY)], rng.choice([-5.0, 2.0, 4.0])] for _ in range(2)])
    now_and_then(0.1, stop_strings=["".join(rng.sample(LETTERS, rng.randint(1, 2)))])
    now_and_then(0.1, num_return_sequences=2)
    now_and_then(0.1, return_dict_in_generate=True)
    now_and_then(0.05, return_dict_in_generate=True, output_scores=True)
    now_and_then(0.05, return_dict_in_generate=True, output_logits=True)
    now_and_then(0.05, no_repeat_ngram_size=rng.randint(1, 4))
    now_and_then(0.03, num_beams=2)
    now_and_then(0.03, use_cache=False)
    now_and_then(0.03, typical_p=0.8)
    now_and_then(0.03, epsilon_cutoff=0.05)
    now_and_then(0.03, exponential_decay_length_penalty=[2, 1.2])
    now_and_then(0.03, remove_invalid_values=True)
    now_and_then(0.03, renormalize_logits=True)
    now_and_then(0.03, cache_implementation=rng.choice(["static", "dynamic"]))
    now_and_then(0.03, prompt_lookup_num_tokens=3)
    now_and_then(0.03, logits_to_keep=1)
    now_and_then(0.03, max_length=rng.randint(1, 60))
    return {
        "model": model, "draft": draft, "tree": tree, "prompts": make_prompts(rng, 3), "options": options,
        "embeds": rng.random() < 0.04, "mask": rng.choice(["left"] * 9 + ["right", "holes", "none"]),
        "seed": rng.randrange(1000),
    }  # fmt: skip


def check_generate(call: Call) -> Outcome:
    import torch

    from eagle_triton import UnsupportedModelError, optimize_with_triton

    model = build_model(call["model"])
    ids, mask = _padded(call["prompts"], call.get("mask", "left"))
    options = dict(call["options"])
    if "sequence_bias" in options:
        options["sequence_bias"] = {tuple(tokens): value for tokens, value in options["sequence_bias"]}
    if "exponential_decay_length_penalty" in options:
        options["exponential_decay_length_penalty"] = tuple(options["exponential_decay_length_penalty"])
    if "stop_strings" in options:
        options["tokenizer"] = tokenizer()

    def decode(rows: slice = slice(None), **more: Any) -> Any:
        torch.manual_seed(call.get("seed", 0))
        inputs = (
            {"inputs_embeds": model.get_input_embeddings()(ids[rows])} if call.get("embeds") else {"inputs": ids[rows]}
        )
        with torch.no_grad():
            return model.generate(**inputs, attention_mask=None if mask is None else mask[rows], **options | more)

    expected = _result_or_error(decode)
    try:
        _, originals = optimize_with_triton(model, build_draft(call["draft"], model), **call.get("tree", {}))
    except (UnsupportedModelError, ValueError) as refusal:
        return Outcome("refused", _kind(refusal))
    with originals:
        got = _result_or_error(decode)
        row, *others = originals.report()
    on_host = any(other.path == "chosen_on_host" for other in others)
    drawn_alike = row.fallbacks or (on_host and "prompt_lookup_num_tokens" not in options)  # which draws for drafts too
    where = Outcome("original", without_values(row.reason)) if row.fallbacks else Outcome("engine")
    if isinstance(got, Exception) or isinstance(expected, Exception):
        if type(got) is not type(expected):
            where.problem = f"the original gave {expected!r:.300}, ours {got!r:.300}"
        return where
    if drawn_alike and options.get("do_sample"):  # by the same random numbers
        return where if torch.equal(_sequences(got), _sequences(expected)) else _differing(where, expected, got)
    if not options.get("do_sample"):
        return _compare_greedy(where, call, decode, expected, got)
    with optimize_with_triton(model, "ngram" if call["draft"] == "suffix" else "suffix")[1]:
        again = _result_or_error(decode)
        alone = _result_or_error(lambda: decode(slice(0, 1), num_return_sequences=1))
    if isinstance(again, Exception) or not torch.equal(_sequences(got), _sequences(again)):
        return _differing(where, again, got, "with another draft")
    length = min(_sequences(alone).shape[1], _sequences(got).shape[1])
    if "stop_strings" not in options and not torch.equal(_sequences(alone)[0, :length], _sequences(got)[0, :length]):
        return _differing(where, alone, got, "alone")
    stops = {"eos_token_id", "stop_strings"} & options.keys()
    if not stops and _sequences(got).shape[1] > _sequences(expected).shape[1]:
        return _differing(where, expected, got, "in its length")
    return where


def _padded(prompts: list[list[int]], mask: str) -> tuple[Any, Any]:
    import torch

    longest = max(map(len, prompts))
    kept = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    if mask == "right":
        kept, rows = [row[::-1] for row in kept], [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
    if mask == "holes" and longest > 2:
        kept = [[*row[:-2], 0, 1] for row in kept]
    return torch.tensor(rows), None if mask == "none" else torch.tensor(kept)


def _result_or_error(decode: Callable[[], Any]) -> Any:
    try:
        return decode()
    except Exception as error:
        return error


def _sequences(result: Any) -> Any:
    return getattr(result, "sequences", result)


def _kind(refusal: Exception) -> str:
    return without_values(str(refusal).split("(")[0])[:100]


def _differing(outcome: Outcome, expected: Any, got: Any, how: str = "") -> Outcome:
    def shown(result: Any) -> Any:
        return repr(result) if isinstance(result, Exception) else _sequences(result).tolist()

    outcome.problem = f"differs {how}\n  expected {shown(expected)}\n  got      {shown(got)}"
    return outcome


def _compare_greedy(outcome: Outcome, call: Call, decode: Callable[..., Any], expected: Any, got: Any) -> Outcome:
    """Token for token, and scores or logits where they were asked for."""
    import torch

    one, other = _sequences(expected), _sequences(got)
    if one.shape == other.shape and torch.equal(one, other):
        for name in ("scores", "logits"):
            rows, ours = getattr(expected, name, None), getattr(got, name, None)
            if (rows is None) != (ours is None) or (rows is not None and len(rows) != len(ours)):
                return _differing(outcome, expected, got, f"in {name}: {rows is None}, {ours is None}")
            for step, (row, our) in enumerate(zip(rows or (), ours or (), strict=True)):
                if row.shape != our.shape or not torch.allclose(row, our, atol=1e-3, rtol=1e-3):
                    apart = (row - our).abs().nan_to_num().max() if row.shape == our.shape else "their shapes"
                    return _differing(outcome, expected, got, f"in {name} of step {step} by {apart}")
        return outcome
    if call["options"].get("num_beams", 1) > 1:
        return _differing(outcome, expected, got)
    width = min(one.shape[1], other.shape[1])
    apart = (one[:, :width] != other[:, :width]).nonzero().tolist()
    if not apart:
        return _differing(outcome, expected, got, "in its length")
    row, column = min(apart, key=lambda place: place[1])
    scored = decode(return_dict_in_generate=True, output_scores=True)
    if scored.scores is None:
        return _differing(outcome, expected, got)
    best = scored.scores[column - one.shape[1] + len(scored.scores)][row].topk(2).values
    return _judged(outcome, float(best[0] - best[1]), expected, got)


def _judged(outcome: Outcome, margin: float, expected: Any, got: Any) -> Outcome:
    """A difference, unless the two best logits are as good as equal there."""
    if margin < TIE:
        return Outcome("tie", "two logits within rounding")
    return _differing(outcome, expected, got, f"where the best logit leads by {margin:.2e}")


# --- EAGLEInference, alone and as a session.


@dataclass
class Wanted:
    """The original's greedy tokens, and by how much each beats the second best."""

    tokens: list[int]
    margins: list[float]


def original_greedy(model: Any, request: dict[str, Any]) -> Wanted:
    """Greedy decoding by the model's own forward over the whole sequence, a token at a time."""
    import torch

    bias = torch.zeros(VOCABULARY)
    for token, value in request.get("logit_bias", []):
        bias[token] = value
    stops = set(request.get("stop_token_ids", []))
    sequence, wanted = list(request["prompt"]), Wanted([], [])
    penalty = request.get("repetition_penalty", 1.0)
    while len(wanted.tokens) < request["max_new_tokens"]:
        with torch.no_grad():
            logits = model(torch.tensor([sequence]), use_cache=False).logits[0, -1].float().clone()
        seen = torch.tensor(sorted(set(sequence)))
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        for token in sequence[len(request["prompt"]) :]:
            logits[token] -= request.get("frequency_penalty", 0.0)
        answered = torch.tensor(sorted(set(sequence[len(request["prompt"]) :])), dtype=torch.int64)
        logits[answered] -= request.get("presence_penalty", 0.0)
        logits += bias
        if len(wanted.tokens) < request.get("min_new_tokens", 0):
            logits[list(stops)] = -torch.inf
        best = logits.topk(2)
        token = int(best.indices[0])
        sequence.append(token)
        wanted.tokens.append(token)
        wanted.margins.append(float(best.values[0] - best.values[1]))
        if token in stops and len(wanted.tokens) > request.get("min_new_tokens", 0):
            break
        text = "".join(LETTERS[token] for token in wanted.tokens)
        if any(stop in text for stop in request.get("stop_strings", [])):
            break
    return wanted


def make_request(rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {"prompt": make_prompts(rng, 1)[0], "max_new_tokens": rng.randint(0, 24)}
    if rng.random() < 0.4:
        made |= {"temperature": rng.choice([0.3, 0.8, 1.5]), "seed": rng.randrange(10**6)}
        if rng.random() < 0.5:
            made |= rng.choice([{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9}])
    if rng.random() < 0.25:
        made["repetition_penalty"] = rng.choice([0.8, 1.2, 2.0])
    for name in ("presence_penalty", "frequency_penalty"):
        if rng.random() < 0.2:
            made[name] = rng.choice([-1.5, 0.5, 2.0])
    if rng.random() < 0.25:
        made["logit_bias"] = [[rng.randrange(VOCABULARY), rng.choice([-6.0, 2.0, 5.0])] for _ in range(3)]
        made["logit_bias"] = list({token: [token, value] for token, value in made["logit_bias"]}.values())
    made["stop_token_ids"] = rng.sample(range(VOCABULARY), rng.choice([0, 0, 1, 4]))
    if rng.random() < 0.2:
        made["min_new_tokens"] = rng.randint(0, made["max_new_tokens"])
    elif rng.random() < 0.15:
        made["stop_strings"] = ["".join(rng.sample(LETTERS, rng.randint(1, 2)))]
    return made


def make_inference(rng: random.Random) -> Call:
    model = make_model(rng)
    draft, tree = make_draft(rng, model)
    draft = draft or "suffix"  # which EAGLEInference needs
    tree = tree | {"fallback": rng.random() < 0.3, "prefixes": rng.random() < 0.7, "slots": rng.randint(1, 4)}
    if isinstance(draft, dict) and rng.random() < 0.3:
        tree["suffix_drafts"] = rng.randint(1, 15)
    return {
        "model": model,
        "draft": draft,
        "tree": tree,
        "requests": [make_request(rng) for _ in range(rng.randint(1, 5))],
    }


def check_inference(call: Call) -> Outcome:
    engine, requests = _engine_of(call), call["requests"]
    if isinstance(engine, Outcome):
        return engine
    results = engine.generate([request["prompt"] for request in requests], **_for_all(requests))[1]
    return _compare_requests(Outcome("engine"), call, zip(requests, results.completions, strict=True))


def _engine_of(call: Call) -> Any:
    """The EAGLEInference of a call, or its outcome where that is refused."""
    from eagle_triton import EAGLEConfig, EAGLEInference

    model = build_model(call["model"])
    try:
        config = EAGLEConfig(**call["tree"])
        return EAGLEInference(build_draft(call["draft"], model), model, config, tokenizer=tokenizer())
    except ValueError as refusal:
        return Outcome("refused", _kind(refusal))


def _compare_requests(outcome: Outcome, call: Call, pairs: Iterable[tuple[dict[str, Any], Any]]) -> Outcome:
    """Compare requests with their completions up to the first difference or tie."""
    for request, completion in pairs:
        _compare_request(outcome, build_model(call["model"]), request, completion)
        if outcome.problem or outcome.where == "tie":
            break
    return outcome


def _for_all(requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Options of `generate` with a value for each prompt."""
    none = {
        "temperature": 0.0,
        "seed": 0,
        "min_new_tokens": 0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "stop_strings": [],
    }
    names = ("max_new_tokens", *none, "top_p", "top_k", "min_p")
    options = {name: [request.get(name, none.get(name)) for request in requests] for name in names}
    options["logit_bias"] = [dict(map(tuple, bias)) for bias in options["logit_bias"]]
    options["stop_strings"] = [tuple(stops) for stops in options["stop_strings"]]
    options["stop_token_ids"] = [list(request.get("stop_token_ids", [])) for request in requests]
    return options


def _compare_request(outcome: Outcome, model: Any, request: dict[str, Any], completion: Any) -> None:
    """Greedy: with the original. Sampled: with the same request decoded plainly and alone."""
    from eagle_triton import EAGLEConfig, EAGLEInference

    if completion.error is not None:
        outcome.problem = f"failed: {completion.error}, {request}"
    elif not request.get("temperature"):
        _compare_tokens(outcome, original_greedy(model, request), completion.tokens, request)
    else:
        alone = EAGLEInference("suffix", model, EAGLEConfig(fallback=False), tokenizer=tokenizer())
        plain = alone.generate([request["prompt"]], **_for_all([request]))[1].completions[0]
        if plain.tokens != completion.tokens:
            outcome.problem = (
                f"a sampled request differs alone\n  alone {plain.tokens}\n  got   {completion.tokens}\n  {request}"
            )


def _compare_tokens(outcome: Outcome, wanted: Wanted, tokens: list[int], request: dict[str, Any]) -> None:
    from eagle_triton.comparison.figures import first_difference

    expected = wanted.tokens
    if stops := request.get("stop_strings"):  # ours leaves out the token with which a stop string begins
        text = "".join(LETTERS[token] for token in expected)
        ends = [text.find(stop) for stop in stops if stop in text]
        expected = expected[: min(ends, default=len(expected))]
    if tokens == expected:
        return
    apart = first_difference(expected, tokens)
    if apart is not None and wanted.margins[apart] < TIE:
        outcome.where, outcome.reason = "tie", "two logits within rounding"
        return
    margin = "in its length" if apart is None else f"where the best logit leads by {wanted.margins[apart]:.2e}"
    outcome.problem = f"differs {margin}\n  expected {expected}\n  got      {tokens}\n  {request}"


def make_session(rng: random.Random) -> Call:
    call = make_inference(rng)
    call["requests"] = [make_request(rng) for _ in range(rng.randint(2, 8))]
    for request in call["requests"]:
        request["at"] = rng.choice([0, 0, rng.randint(0, 12)])
        if rng.random() < 0.25:
            request["cancel"] = request["at"] + rng.randint(0, 6)
    if rng.random() < 0.5:
        call["tree"]["cache_tokens"] = rng.choice([400, 600, 900])
    return call


def check_session(call: Call) -> Outcome:
    engine = _engine_of(call)
    if isinstance(engine, Outcome):
        return engine
    requests, completions, step = call["requests"], {}, 0
    left, numbers, cancelled = list(range(len(requests))), {}, set()
    outcome = Outcome("engine")
    with engine.session(rows=200) as session:
        while left or not session.idle:
            for position in [position for position in left if requests[position].get("at", 0) <= step]:
                left.remove(position)
                request = {
                    name: value for name, value in requests[position].items() if name not in ("at", "cancel", "prompt")
                }
                if "logit_bias" in request:
                    request["logit_bias"] = dict(map(tuple, request["logit_bias"]))
                numbers[session.submit(requests[position]["prompt"], **request)] = position
            for number, position in numbers.items():
                if requests[position].get("cancel") == step:
                    session.cancel(number)
                    cancelled.add(position)
            for piece in session.step():
                if numbers[piece.index] in cancelled:
                    outcome.problem = f"a request gave a piece after it was cancelled: {piece}"
                if piece.completion is not None:
                    completions[numbers[piece.index]] = piece.completion
            step += 1
            if step > 2000:
                outcome.problem = f"no end after {step} steps; waiting {session.waiting}"
                return outcome
    if missing := set(range(len(requests))) - set(completions) - cancelled:
        outcome.problem = f"requests {sorted(missing)} were never completed"
    if outcome.problem:
        return outcome
    return _compare_requests(outcome, call, ((requests[place], found) for place, found in sorted(completions.items())))


# --- The generating methods of an EaModel.


def make_eamodel(rng: random.Random) -> Call:
    tree = {"depth": rng.randint(1, 5), "top_k": rng.randint(1, 5)}
    most = 1 + tree["top_k"] + (tree["depth"]) * tree["top_k"] ** 2
    tree["total_token"] = rng.randint(2, min(most, 30))
    method = rng.choice(["eagenerate", "ea_generate", "naivegenerate", "naive_generate", "generate"])
    options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 24)}
    if method == "generate":
        if rng.random() < 0.5:
            options["eos_token_id"] = rng.sample(range(32), rng.randint(1, 4))
        if rng.random() < 0.4:
            options |= {"do_sample": True, "temperature": rng.choice([0.4, 1.0]), "seed": rng.randrange(1000)}
            options |= rng.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}])
    elif rng.random() < 0.3:
        options["max_length"] = rng.randint(60, 300)
    elif rng.random() < 0.2:
        options["log"] = True
    model = {"family": rng.choice(["llama", "mistral", "qwen2", "qwen3"]), "eagle3": rng.random() < 0.5}
    model |= {"seed": rng.randrange(20), "head_dim": rng.choice([8, 16, 32])}
    prompts = [[token % 32 for token in prompt] for prompt in make_prompts(rng, 3 if method == "generate" else 1)]
    suffix = rng.choice([0, 0, 0, 5]) if method == "generate" else 0
    return {"model": model, "tree": tree, "method": method, "prompts": prompts, "options": options, "suffix": suffix}


def check_eamodel(call: Call) -> Outcome:
    import torch

    from eagle_triton import optimize_eagle_with_triton
    from tests.tiny import tiny_model

    try:
        model = tiny_model(**call["model"], **call["tree"])
        ids, mask = _padded(call["prompts"], "left")
    except ValueError as refusal:
        return Outcome("refused", _kind(refusal))

    def decode() -> Any:
        more = {"attention_mask": mask} if call["method"] == "generate" else {}
        result = getattr(model, call["method"])(ids, **call["options"], **more)
        result, *counts = result if isinstance(result, tuple) else (result,)
        steps = [result] if isinstance(result, torch.Tensor) else result
        return ([rows.tolist() for rows in steps], [*map(int, counts)]), list(model.accept_lengths)

    expected = _result_or_error(decode)
    outcome = Outcome("engine")
    with optimize_eagle_with_triton(model, suffix_drafts=call.get("suffix", 0))[1]:
        got = _result_or_error(decode)
    if call["options"].get("do_sample"):
        with optimize_eagle_with_triton(model, suffix_drafts=3)[1]:
            again = _result_or_error(decode)
        if isinstance(got, Exception) or isinstance(again, Exception) or got[0] != again[0]:
            outcome.problem = f"a seeded call differs with other drafts\n  {again}\n  {got}"
        return outcome
    if isinstance(got, Exception) or isinstance(expected, Exception):
        if type(got) is not type(expected) or str(got) != str(expected):
            outcome.problem = f"the original gave {expected!r:.300}, ours {got!r:.300}"
        return outcome
    drafts = call["method"] in ("eagenerate", "ea_generate")
    if got[0] != expected[0] or (drafts and got[1] != expected[1]):
        return _tie_of_eamodel(outcome, model, expected, got)
    return outcome


def _tie_of_eamodel(outcome: Outcome, model: Any, expected: Any, got: Any) -> Outcome:
    from eagle_triton.benchmarks.original_and_patched import top2_margin
    from eagle_triton.comparison.figures import first_difference

    one, other = (steps[-1][-1] for (steps, _), _ in (expected, got))
    column = first_difference(one, other)
    if column is not None and (margin := top2_margin(model.base_model, one, column)) < TIE:
        return Outcome("tie", f"two logits within {margin:.0e}")
    outcome.problem = f"differs\n  expected {expected}\n  got      {got}"
    return outcome


# --- The server.


def make_server(rng: random.Random) -> Call:
    call = make_inference(rng)
    for request in call["requests"]:
        for name in ("stop_token_ids", "min_new_tokens", "min_p", "top_k"):
            request.pop(name, None)
        request["max_new_tokens"] = max(1, request["max_new_tokens"])
    return call


def check_server(call: Call) -> Outcome:
    """/v1/completions with token ids as prompts, all requests at once."""
    from fastapi.testclient import TestClient

    from eagle_triton.serve.app import Service, make_app
    from eagle_triton.serve.drafters import Drafters
    from eagle_triton.serve.engine_client import EngineClient
    from eagle_triton.serve.engine_process import Served
    from eagle_triton.serve.metrics import Metrics
    from eagle_triton.serve.prompts import PromptReader

    engine = _engine_of(call)
    if isinstance(engine, Outcome):
        return engine
    requests = EngineClient(lambda: engine.session(200), Metrics("fuzz"), engine.config.slots, 64)
    app = make_app(Service(requests, PromptReader(Served.read(engine), 200, None), Drafters.read(engine), "fuzz"))
    names = {"max_new_tokens": "max_tokens", "stop_strings": "stop"}

    def ask(request: dict[str, Any]) -> Any:
        body = {names.get(name, name): value for name, value in request.items()}
        if "logit_bias" in body:
            body["logit_bias"] = {str(token): value for token, value in body["logit_bias"]}
        body["temperature"] = request.get("temperature", 0)
        return client.post("/v1/completions", json={"model": "fuzz", **body})

    requests.start()
    try:
        with TestClient(app, base_url="http://localhost") as client, ThreadPoolExecutor(len(call["requests"])) as pool:
            answers = list(pool.map(ask, call["requests"]))
    finally:
        requests.close()
    if refused := [answer.text for answer in answers if answer.status_code != 200]:
        return Outcome("refused", _kind(ValueError(refused[0])))
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    completions = [SimpleNamespace(error=None, tokens=[LETTERS.index(letter) for letter in text]) for text in texts]
    return _compare_requests(Outcome("engine"), call, zip(call["requests"], completions, strict=True))


DOORS: dict[str, tuple[Callable[[random.Random], Call], Callable[[Call], Outcome]]] = {
    "generate": (make_generate, check_generate),
    "inference": (make_inference, check_inference),
    "session": (make_session, check_session),
    "eamodel": (make_eamodel, check_eamodel),
    "server": (make_server, check_server),
}


if __name__ == "__main__":
    sys.exit(run_program(main))
