"""Answers the questions of a file with every drafter, tree size and temperature, and compares with plain decoding.

One question at a time; several turns are a conversation. Rates are computed like in SafeAILab/EAGLE's
evaluation/speed.py: a question's new tokens over its seconds, prompts included, then the mean over questions.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from eagle_triton.benchmarks.answers import write_answers, write_records
from eagle_triton.benchmarks.models import Target, load_target
from eagle_triton.benchmarks.modes import OF_A_BLOCK, OF_THE_HEAD, block_drafter_of
from eagle_triton.benchmarks.parity import check_parity, margin_bound
from eagle_triton.benchmarks.question_file import ALL, OWN_QUESTIONS, Question, of_categories, read_questions
from eagle_triton.benchmarks.record import machine
from eagle_triton.benchmarks.sweep import Configuration, configurations, decode
from eagle_triton.benchmarks.timing import noise
from eagle_triton.command_line import too_long
from eagle_triton.comparison.answer import Answer, ask
from eagle_triton.comparison.figures import Totals, differing
from eagle_triton.comparison.result_file import Result, ResultFile
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.inference.conversation import Conversation
from eagle_triton.inference.session import Session
from eagle_triton.models.generate_arguments import max_positions
from eagle_triton.text_table import table, table_of

SEED = 7  # of the first turn of the first question; each further turn has the next number
COLUMNS = "=variant, temperature, tau, tokens/s=tokens_per_second, x plain=speedup, tokens, steps"
COMMON = ("model", "draft", "eagle1", "max_length", "dtype", "questions_sha256")  # options of a whole results file


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add rows for each configuration, over all questions and for each category; notes on answers that differ from
    plain decoding's."""
    questions = read_questions(args.questions or OWN_QUESTIONS)
    if args.category:
        questions = of_categories(questions, args.category)
    with_head = bool(set(args.drafters) & set(OF_THE_HEAD))
    block_drafter = block_drafter_of(args)
    block = block_drafter if set(args.drafters) & set(OF_A_BLOCK) else None
    target = load_target(args, with_head, block)
    room = check_room(questions, target, args.max_length)
    parts = configurations(args.drafters, args.nodes, args.temperatures, target)
    for part in parts:
        try:
            part.engine_config()
        except ValueError as error:
            raise ValueError(f"--nodes {part.nodes}: {error}") from None
    facts = machine(torch.device(args.device), args.commit)
    del facts["date"]  # the date of a sweep does not matter
    common = {name: getattr(args, name) for name in COMMON} | {"block_drafter": block_drafter}
    file = ResultFile(args.results, "questions", common | facts)
    done = sum(part.name in file.found for part in parts)
    if done:
        notes.append(f"{done} of {len(parts)} configurations were measured before, and are in {args.results.name}")
    if not getattr(target.tokenizer, "chat_template", None):
        notes.append("no chat template: the texts of a conversation follow each other unchanged")
    turns = sum(len(question.turns) for question in questions)
    bar = tqdm(total=len(parts) * turns, initial=done * turns, unit="turn", disable=args.json or None, leave=False)
    try:
        for part in parts:
            plain = file.found.get(f"plain, temperature {part.temperature:g}")
            if part.name not in file.found:
                bar.set_description(part.name)
                file.add(part.name, _result(target, part, questions, args.max_length, room, plain, bar.update))
            result = file.found[part.name]
            rows += figures(part, questions, result.answers, (plain or result).answers)
            notes += result.notes
            _hand_out(args, parts, questions, file)
    except KeyboardInterrupt:
        if args.results is not None:
            notes.append(f"the same command continues from {args.results.name}")
        raise
    finally:
        bar.close()
    notes += noise(min(row["steps"] for row in rows), "take more questions or raise --max-length")


def check_room(questions: Sequence[Question], target: Target, new: int) -> int:
    """The most tokens of a conversation: its prompts, and `new` for the answer to each turn.

    Raises ValueError with the first question that does not fit the model's positions.
    """
    room = 0
    for question in questions:
        *before, last = question.turns
        prompts = len(Conversation([(turn, "") for turn in before]).ids(last, target.tokenizer))
        if not prompts:
            raise ValueError(f"question {question.question_id} gives no token")
        answers = len(question.turns) * (new + 1)  # and a line end after each
        if problem := too_long(f"question {question.question_id}", prompts, answers, max_positions(target.causal_lm)):
            raise ValueError(problem)
        room = max(room, prompts + answers)
    return room


def _hand_out(
    args: argparse.Namespace, parts: Sequence[Configuration], questions: Sequence[Question], file: ResultFile
) -> None:
    """Write the answers so far in other projects' formats."""
    if args.answers is None:
        return
    args.answers.mkdir(parents=True, exist_ok=True)
    found = [(part, file.found[part.name]) for part in parts if part.name in file.found]
    for part, result in found:
        write_answers(args.answers, args.model, part, questions, result)
    write_records(args.answers, len(questions), found)


# --- one configuration ---


def _result(
    target: Target, part: Configuration, questions: Sequence[Question], new: int, room: int, plain: Result | None,
    update: Callable[[], object],
) -> Result:  # fmt: skip
    """Answer all questions, turn by turn. plain: the result of plain decoding; None: this is plain decoding.

    Raises ValueError for a question that cannot be answered, and for plain greedy tokens that are not the target's.
    """

    def run(session: Session, some: Sequence[Question], tokens: int) -> Iterator[tuple[list[int], Answer]]:
        turn = SEED
        for question in some:
            for pair in _turns(session, target, part, question, tokens, turn):
                yield pair
                if some is questions:
                    update()
            turn += len(question.turns)

    longest = max(questions, key=lambda question: len(question.turns[0]))
    found = decode(part.inference(target), room, questions, new, run, [questions[0], longest])
    prompts, answers = [prompt for prompt, _ in found], [answer for _, answer in found]
    if plain is None:
        if not part.temperature:
            check_parity(target.causal_lm, *_sequence(prompts[0], answers[0], target), SamplingParams())
        return Result(answers)
    return Result(answers, differences(part, questions, prompts, answers, plain.answers, target))


def _turns(
    session: Session, target: Target, part: Configuration, question: Question, new: int, seed: int
) -> Iterator[tuple[list[int], Answer]]:
    """The turns of one conversation: the prompt's tokens, and the answer."""
    talk = Conversation()
    for number, turn in enumerate(question.turns):
        place, prompt = f"question {question.question_id}, turn {number + 1}", talk.ids(turn, session.tokenizer)
        if len(prompt) + new > session.rows:
            raise ValueError(f"{place}: {len(prompt)} + {new} tokens do not fit into {session.rows} rows")
        sampling = {"temperature": part.temperature, **({"seed": seed + number} if part.temperature else {})}
        try:
            answer = ask(session, target.causal_lm.device, part.variant, prompt, new, sampling)
        except RuntimeError as error:
            raise ValueError(f"{place}: {error}") from error
        talk.turns.append((turn, answer.text))
        yield prompt, answer


def by_question(questions: Sequence[Question], turns: Sequence[Any]) -> list[list[Any]]:
    rest = iter(turns)
    return [[next(rest) for _ in question.turns] for question in questions]


def differences(
    part: Configuration, questions: Sequence[Question], prompts: Sequence[list[int]], answers: Sequence[Answer],
    plain: Sequence[Answer], target: Target,
) -> list[str]:  # fmt: skip
    """A note if answers differ from plain decoding's. That is an error in float32; in 16 bits only if a greedy token is
    not the target's best up to rounding. Only the first difference of a conversation counts: the rest depends on it."""
    places = differing(answers, plain)
    firsts = {}
    for question, turns in zip(questions, by_question(questions, range(len(answers))), strict=True):
        if found := [place for place in turns if place in places]:
            firsts[question.question_id] = found[0]
    if not firsts:
        return []
    told = f"{part.name}: {len(firsts)} of {len(questions)} answers differ from plain decoding's"
    if target.causal_lm.dtype == torch.float32:
        return [f"FAIL: {told}; the first is of question {next(iter(firsts))}"]
    if part.temperature:
        return [told]
    for name, place in firsts.items():
        try:
            check_parity(target.causal_lm, *_sequence(prompts[place], answers[place], target), SamplingParams())
        except ValueError as error:
            return [f"FAIL: {told}; question {name}: {str(error).partition(';')[0]}"]
    bound = margin_bound(target.causal_lm)
    return [f"{told}, by rounding: each token's logit is less than {bound:.3g} below the best"]


def _sequence(prompt: list[int], answer: Answer, target: Target) -> tuple[torch.Tensor, int]:
    """Prompt and answer [L] on the model's device, and the length of the prompt."""
    return torch.tensor([*prompt, *answer.tokens], device=target.causal_lm.device), len(prompt)


# --- figures ---


def figures(
    part: Configuration, questions: Sequence[Question], answers: Sequence[Answer], plain: Sequence[Answer]
) -> list[dict[str, Any]]:
    """A row over all answers, then one for each category if there are several."""
    categories = list(dict.fromkeys(question.category for question in questions))
    mine, others = by_question(questions, answers), by_question(questions, plain)
    rows = []
    for category in [ALL, *(categories if len(categories) > 1 else [])]:
        places = [place for place, question in enumerate(questions) if category in (ALL, question.category)]
        rows.append(_row(part, category, [mine[place] for place in places], [others[place] for place in places]))
    return rows


def _row(part: Configuration, category: str, answers: list[list[Answer]], plain: list[list[Answer]]) -> dict[str, Any]:
    turns = [turn for answer in answers for turn in answer]
    totals, rate = Totals.of(turns), _rate(answers)
    rates = acceptance_rates([turn.accepted_counts for turn in turns], part.most_accepted)
    return {
        **{"variant": part.variant, "temperature": part.temperature, "category": category, "questions": len(answers)},
        **{"tokens": totals.tokens, "steps": totals.steps, "tau": totals.tau},
        **{"tokens_per_second": rate, "speedup": rate / _rate(plain)},
        **{"num_speculative_tokens": part.most_accepted, "synthetic_acceptance_rates": rates},
    }


def _rate(answers: list[list[Answer]]) -> float:
    """Tokens per second: the mean over questions, like SafeAILab's."""
    return statistics.fmean(Totals.of(turns).tokens_per_second or 0.0 for turns in answers)


def acceptance_rates(histograms: Sequence[Sequence[int]], most: int) -> list[float]:
    """For each place from 1 to `most`, the share of steps with drafts that accepted one there, and so all before it.

    These are the unconditional rates for vLLM's `rejection_sample_method="synthetic"`, its `synthetic_acceptance_rates`
    with `num_speculative_tokens` = `most` (vLLM 0.28): each is in 0..1 and no larger than the one before; 1 + their sum
    is the tokens of such a step. Empty if nothing was drafted. histograms: steps that accepted 0, 1, ... drafts.
    """
    drafted = sum(map(sum, histograms))
    return [
        round(sum(sum(histogram[place:]) for histogram in histograms) / drafted, 4)
        for place in range(1, most + 1)
        if drafted
    ]


def text(rows: list[dict[str, Any]]) -> str:
    """A table of all questions, then the categories' speed-ups, then acceptance by place."""
    whole = [row for row in rows if row["category"] == ALL]
    parts = [table_of(COLUMNS, whole)]
    categories = list(dict.fromkeys(row["category"] for row in rows if row["category"] != ALL))
    for key, title in (("tau", "tau"), ("speedup", "x plain")):
        if categories:
            values = {(row["variant"], row["temperature"], row["category"]): row[key] for row in rows}
            names = [(row["variant"], row["temperature"]) for row in whole]
            lines = [[*name, *(values.get((*name, category)) for category in categories)] for name in names]
            parts.append(table([title, "temperature", *categories], lines))
    rated = {(row["variant"], row["temperature"]): row["synthetic_acceptance_rates"] for row in whole}
    if most := max(map(len, rated.values()), default=0):
        lines = [[*name, *(rates + [None] * most)[:most]] for name, rates in rated.items() if rates]
        parts.append(table(["accepted at place", "temperature", *map(str, range(1, most + 1))], lines))
    return "\n\n".join(parts)
