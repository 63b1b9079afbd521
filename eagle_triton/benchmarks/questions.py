"""The questions of a file answered with every drafter, tree size and temperature of a sweep, against plain decoding.

One question at a time; several turns are a conversation. Rates are those that SafeAILab/EAGLE's evaluation/speed.py
makes: a question's new tokens over its seconds, prompts included, and the mean of that over the questions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from eagle_triton.benchmarks import targets
from eagle_triton.benchmarks.answers import write_answers, write_records
from eagle_triton.benchmarks.modes import OF_THE_HEAD
from eagle_triton.benchmarks.parity import check_parity, margin_bound
from eagle_triton.benchmarks.question_file import ALL, OWN_QUESTIONS, Question, of_categories, read_questions
from eagle_triton.benchmarks.record import machine
from eagle_triton.benchmarks.sweep import Configuration, configurations
from eagle_triton.benchmarks.sweep_file import SweepFile
from eagle_triton.benchmarks.targets import Target
from eagle_triton.benchmarks.timing import noise
from eagle_triton.command_line import too_long
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.inference.conversation import Conversation
from eagle_triton.inference.eagle_inference import EAGLEInference
from eagle_triton.inference.session import Completion, Session
from eagle_triton.inference.timing import Stopwatch
from eagle_triton.text_table import table

SEED = 7  # of the first turn of the first question; of each further turn one more
WARM_UP = 8  # tokens, on a CPU


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add rows for each configuration, of all questions and of each category; notes of answers that are not plain
    decoding's."""
    questions = asked(args)
    with_head = bool(set(args.drafters) & set(OF_THE_HEAD))
    target = targets.load(args.model, args.draft, args.eagle1, with_head, getattr(torch, args.dtype), args.device)
    room = check_room(questions, target, args.max_length)
    parts = configurations(args, target.head)
    check_trees(parts)
    sweep = SweepFile(args.results, machine(torch.device(args.device), args.commit), _options(args))
    done = sum(part.name in sweep.found for part in parts)
    if done:
        notes.append(f"{done} of {len(parts)} configurations were measured before, and are in {args.results.name}")
    if not getattr(target.tokenizer, "chat_template", None):
        notes.append("no chat template: the texts of a conversation follow each other as they are")
    turns = sum(len(question.turns) for question in questions)
    try:
        with tqdm(
            total=len(parts) * turns, initial=done * turns, unit="turn", disable=args.json or None, leave=False
        ) as bar:
            for part in parts:
                plain = sweep.found.get(part._replace(drafter="plain").name)
                if part.name not in sweep.found:
                    bar.set_description(part.name)
                    sweep.add(part.name, _result(target, part, questions, args.max_length, room, plain, bar))
                result = sweep.found[part.name]
                rows += figures(part, result, plain or result)
                notes += result["notes"]
                _hand_out(args, parts, sweep)
    except KeyboardInterrupt:
        if args.results is not None:
            notes.append(f"the same command goes on from {args.results.name}")
        raise
    notes += noise(min(row["steps"] for row in rows), "take more questions or --max-length")


def asked(args: argparse.Namespace) -> list[Question]:
    """The questions that the options name. Raises as `read_questions` and `of_categories`."""
    questions = read_questions(args.questions or OWN_QUESTIONS)
    return of_categories(questions, args.category) if args.category else questions


def check_trees(parts: Sequence[Configuration]) -> None:
    """Raise ValueError for a tree that cannot be."""
    for part in parts:
        try:
            part.engine_config()
        except ValueError as error:
            raise ValueError(f"--nodes {part.nodes}: {error}") from None


def check_room(questions: Sequence[Question], target: Target, new: int) -> int:
    """The most tokens of a conversation: its prompts, and `new` for the answer to each turn.

    Raises ValueError naming the first question that does not fit the model's positions.
    """
    room = 0
    for question in questions:
        *before, last = question.turns
        prompts = len(Conversation([(turn, "") for turn in before]).ids(last, target.tokenizer))
        if not prompts:
            raise ValueError(f"question {question.question_id} gives no token")
        answers = len(question.turns) * (new + 1)  # and a line end behind each
        if problem := too_long(f"question {question.question_id}", prompts, answers, target.positions):
            raise ValueError(problem)
        room = max(room, prompts + answers)
    return room


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """What every configuration of a results file has in common; which there are may change."""
    names = ("model", "draft", "eagle1", "max_length", "dtype", "questions_sha256")
    return {name: getattr(args, name) for name in names}


def _hand_out(args: argparse.Namespace, parts: Sequence[Configuration], sweep: SweepFile) -> None:
    """The answers so far, for others to read."""
    if args.answers is None:
        return
    args.answers.mkdir(parents=True, exist_ok=True)
    found = [(part, sweep.found[part.name]) for part in parts if part.name in sweep.found]
    for part, result in found:
        write_answers(args.answers, args.model, part, result)
    write_records(args.answers, found)


# --- one configuration ---


def _result(
    target: Target,
    part: Configuration,
    questions: Sequence[Question],
    new: int,
    room: int,
    plain: dict[str, Any] | None,
    bar: Any,
) -> dict[str, Any]:
    """All questions answered: `answers`, `notes`, and when. plain: what plain decoding gave, None for itself.

    Raises ValueError for a question that cannot be answered, and for plain greedy tokens that are not the target's.
    """
    inference = EAGLEInference(None, target.model, part.engine_config(), tokenizer=target.tokenizer)
    device = inference.pair.view.device
    on_gpu = device.type == "cuda"
    with _session(inference, room) as session:  # what compiles and captures is not timed
        longest = max(questions, key=lambda question: len(question.turns[0]))
        for question in (questions[0], longest) if on_gpu else questions[:1]:
            list(_turns(session, device, question, new if on_gpu else min(new, WARM_UP), part.temperature, SEED))
    inference.forget_outputs()
    answers: list[dict[str, Any]] = []
    notes: list[str] = []
    seed = SEED
    with _session(inference, room) as session:
        for question in questions:
            turns = []
            for turn in _turns(session, device, question, new, part.temperature, seed):
                turns.append(turn)
                bar.update()
            seed += len(turns)
            answers.append({"question_id": question.question_id, "category": question.category, "turns": turns})
    if plain is not None:
        notes = differences(part, answers, plain["answers"], target)
    elif not part.temperature:
        check_parity(target.causal_lm, *_sequence(answers[0]["turns"][0], target), SamplingParams())
    for turn in (turn for answer in answers for turn in answer["turns"]):
        del turn["prompt"]  # it follows from the question and the answers before
    return {"answers": answers, "notes": notes, "time": time.time()}


def _session(inference: EAGLEInference, rows: int) -> Session:
    return Session(
        inference.engine, inference.policy(1), 1, rows,
        tokenizer=inference.tokenizer, stop_ids=inference.pair.stop_ids, text=False, config=inference.config,
        max_positions=inference.pair.max_positions,
    )  # fmt: skip


def _turns(
    session: Session, device: torch.device, question: Question, new: int, temperature: float, seed: int
) -> Iterator[dict[str, Any]]:
    """The turns of one conversation: prompt and new tokens, text, verifications, of how many with drafts 0, 1, ...
    drafts were accepted, and seconds from the prompt's tokens to the last one."""
    talk = Conversation()
    for number, turn in enumerate(question.turns):
        place, prompt = f"question {question.question_id}, turn {number + 1}", talk.ids(turn, session.tokenizer)
        if len(prompt) + new > session.rows:
            raise ValueError(f"{place}: {len(prompt)} tokens and {new} new do not fit into {session.rows}")
        sampling = {"temperature": temperature, "seed": seed + number} if temperature else {"temperature": 0.0}
        completion, seconds = _decode(session, device, prompt, new, sampling)
        if completion.error is not None:
            raise ValueError(f"{place}: {completion.error}")
        counts, text = completion.statistics, completion.text or ""
        talk.turns.append((turn, text))
        yield {
            "text": text,
            "prompt": prompt,
            "tokens": completion.tokens,
            "steps": counts.steps,
            "accepted": [counts.histogram[length] for length in range(max(counts.histogram, default=-1) + 1)],
            "seconds": seconds,
        }


def _decode(
    session: Session, device: torch.device, prompt: list[int], new: int, sampling: dict[str, Any]
) -> tuple[Completion, float]:
    """One request alone, and its seconds."""
    watch = Stopwatch(device)
    session.submit(prompt, new, **sampling)
    while True:
        for piece in session.step():
            if piece.completion is not None:
                return piece.completion, watch.seconds()


def differences(
    part: Configuration, answers: list[dict[str, Any]], plain: list[dict[str, Any]], target: Target
) -> list[str]:
    """A note if answers are not plain decoding's: an error in fp32; in 16 bits an error where a greedy token is not
    one of the target's best, up to rounding. Behind a first difference a conversation is another one."""
    first = [
        next((ours for ours, other in zip(mine["turns"], theirs["turns"], strict=True)
              if ours["tokens"] != other["tokens"]), None)
        for mine, theirs in zip(answers, plain, strict=True)
    ]  # fmt: skip
    differ = {answer["question_id"]: turn for answer, turn in zip(answers, first, strict=True) if turn is not None}
    if not differ:
        return []
    told = f"{part.name}: {len(differ)} of {len(answers)} answers are not plain decoding's"
    dtype = target.causal_lm.dtype
    if dtype == torch.float32:
        return [f"FAIL: {told}, the first that of question {next(iter(differ))}"]
    if part.temperature:
        return [told]
    for name, turn in differ.items():
        try:
            check_parity(target.causal_lm, *_sequence(turn, target), SamplingParams())
        except ValueError as error:
            return [f"FAIL: {told}; question {name}: {str(error).partition(';')[0]}"]
    bound = margin_bound(target.causal_lm)
    return [f"{told}, by rounding: each token's logit is less than {bound:.3g} below the best"]


def _sequence(turn: dict[str, Any], target: Target) -> tuple[torch.Tensor, int]:
    """Prompt and answer [L] on the model's device, and the length of the prompt."""
    return torch.tensor([*turn["prompt"], *turn["tokens"]], device=target.causal_lm.device), len(turn["prompt"])


# --- figures ---


def figures(part: Configuration, result: dict[str, Any], plain: dict[str, Any]) -> list[dict[str, Any]]:
    """A row over all answers, then one for each category where there are several."""
    categories = list(dict.fromkeys(answer["category"] for answer in result["answers"]))
    return [
        _row(part, category, _of(result, category), _of(plain, category))
        for category in [ALL, *(categories if len(categories) > 1 else [])]
    ]


def _of(result: dict[str, Any], category: str) -> list[list[dict[str, Any]]]:
    """The turns of the answers of a category."""
    return [answer["turns"] for answer in result["answers"] if category in (ALL, answer["category"])]


def _row(
    part: Configuration, category: str, answers: list[list[dict[str, Any]]], plain: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    turns = [turn for answer in answers for turn in answer]
    steps = sum(turn["steps"] for turn in turns)
    accepted = sum(count * length for turn in turns for length, count in enumerate(turn["accepted"]))
    rate, plain_rate = _rate(answers), _rate(plain)
    return {
        "variant": part.variant,
        "temperature": part.temperature,
        "category": category,
        "questions": len(answers),
        "tokens": sum(len(turn["tokens"]) for turn in turns),
        "steps": steps,
        "tau": (accepted + steps) / steps if steps else None,
        "tokens_per_second": rate,
        "speedup": rate / plain_rate,
        "num_speculative_tokens": part.most_accepted,
        "synthetic_acceptance_rates": acceptance_rates([turn["accepted"] for turn in turns], part.most_accepted),
    }


def _rate(answers: list[list[dict[str, Any]]]) -> float:
    """Tokens per second: the mean of the questions', as SafeAILab has it."""
    return statistics.fmean(
        sum(len(turn["tokens"]) for turn in answer) / sum(turn["seconds"] for turn in answer) for answer in answers
    )


def acceptance_rates(histograms: Sequence[Sequence[int]], most: int) -> list[float]:
    """By place from 1 to `most`: the share of the steps with drafts that accepted one there, and so all before it.

    These are the unconditional rates that vLLM's `rejection_sample_method="synthetic"` takes as
    `synthetic_acceptance_rates` with `num_speculative_tokens` = `most` (vLLM 0.28): each in 0..1, none above the one
    before; 1 + their sum is the tokens of such a step. Empty if nothing was drafted. histograms: steps that accepted
    0, 1, ... drafts.
    """
    drafted = sum(map(sum, histograms))
    return [
        round(sum(sum(histogram[place:]) for histogram in histograms) / drafted, 4)
        for place in range(1, most + 1)
        if drafted
    ]


def text(rows: list[dict[str, Any]]) -> str:
    """All questions in a table, the categories' speed-ups in a second one, acceptance by place in a third."""
    whole = [row for row in rows if row["category"] == ALL]
    columns = {"": "variant", "temperature": "temperature", "tau": "tau", "tokens/s": "tokens_per_second"}
    columns |= {"x plain": "speedup", "tokens": "tokens", "steps": "steps"}
    parts = [table(list(columns), [[row[key] for key in columns.values()] for row in whole])]
    categories = list(dict.fromkeys(row["category"] for row in rows if row["category"] != ALL))
    for key, title in (("tau", "tau"), ("speedup", "x plain")):
        if categories:
            values = {(row["variant"], row["temperature"], row["category"]): row[key] for row in rows}
            names = [(row["variant"], row["temperature"]) for row in whole]
            lines = [[*name, *(values.get((*name, category)) for category in categories)] for name in names]
            parts.append(table([title, "temperature", *categories], lines))
    rated = [row for row in whole if row["synthetic_acceptance_rates"]]
    most = max((len(row["synthetic_acceptance_rates"]) for row in rated), default=0)
    if most:
        lines = [
            [row["variant"], row["temperature"], *(row["synthetic_acceptance_rates"] + [None] * most)[:most]]
            for row in rated
        ]
        parts.append(table(["accepted at place", "temperature", *map(str, range(1, most + 1))], lines))
    return "\n\n".join(parts)
