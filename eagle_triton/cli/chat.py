"""`eagle-triton chat`: answers prompts in every mode that is on, with figures, and runs commands.

    eagle-triton chat                       the embedded checkpoint and its small draft model
    eagle-triton chat --target PATH --drafter PATH --head PATH
    eagle-triton chat --commands FILE       read lines from a file; piped lines work, too

/help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves. Exit code 0: left; 2: a wrong argument; 130: ended by
SIGTERM, or by Ctrl-C between answers if input is piped.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from eagle_triton import command_line
from eagle_triton.cli.commands import State, answer_to, state_line
from eagle_triton.cli.figures import figures, totals_table
from eagle_triton.cli.interrupts import kept_interrupts, left_by_sigterm
from eagle_triton.cli.readers import LINE_END, Reader, choose_reader
from eagle_triton.command_line import Parser, sentence
from eagle_triton.demo import BLOCK, DRAFT, PAIR
from eagle_triton.inference.conversation import Conversation, plain_ids

if TYPE_CHECKING:  # they import torch, for which --help does not wait
    from eagle_triton.cli.decoding import Decoder
    from eagle_triton.comparison.answer import Answer, Step

REFUSALS = (ValueError, TypeError, OSError, RuntimeError)  # of a model, a setting, the disk, the memory
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {
    code: 0xFFFD for code in range(0x7F, 0xA0)
}


def main(argv: list[str] | None = None, program: str = "eagle-triton chat") -> int:
    """Run the chat until it is left. program: the name in help and errors."""
    parser, args = _parse(argv, program)
    command_line.check_device(parser, args.device)
    with parser.explains():
        from eagle_triton.cli.decoding import open_decoder

        decoder = open_decoder(args.target, args.drafter, args.head, args.block_drafter, args.device, args.dtype)
        decoder.tokenizer  # noqa: B018  what cannot be loaded is said now
    state = State() if args.drafter else State(modes=frozenset({"target", "ngram"}))
    chat = Chat(decoder, sys.stdout, state)
    chat.begin(f"target {args.target}", f"drafter {args.drafter or 'none'}")
    return run(chat, choose_reader(args.commands, sys.stdin, sys.stdout))


def run(chat: Chat, reader: Reader) -> int:
    """Answer the reader's lines until they end or "/quit" comes. SIGTERM ends it too, and Ctrl-C if input is piped."""
    with left_by_sigterm():
        while True:
            try:
                for line in reader.read(chat.state):
                    if not chat.take(line):
                        return 0
            except EOFError:
                return 0
            except KeyboardInterrupt:  # between answers: drop the typed line
                if not reader.typed:
                    return 130


@dataclass
class Chat:
    """A conversation with a model. It prints to `out`."""

    decoder: Decoder
    out: TextIO
    state: State = field(default_factory=State)
    conversation: Conversation = field(default_factory=Conversation)
    answered: dict[str, list[Answer]] = field(default_factory=dict)  # by method
    told: set[str] = field(default_factory=set)  # notes that have been printed
    at_line_start: bool = True

    def begin(self, *models: str) -> None:
        """Print the models, their device, and the settings."""
        self._say(", ".join((*models, f"{str(self.decoder.dtype).removeprefix('torch.')} on {self.decoder.device}")))
        self._say(f"{state_line(self.state)}; /help lists the commands")

    def take(self, line: str) -> bool:
        """Do what a line asks for. Returns False if it asks to leave."""
        reply = answer_to(line, self.state)
        self.state = reply.state
        for said in reply.lines:
            self._say(said)
        for action in reply.actions:
            if action == "quit":
                return False
            if action == "clear":
                self._say(f"{len(self.conversation.turns)} prompts with their answers are forgotten")
                self.conversation.turns.clear()
            elif action == "stats":
                self._say(totals_table(self.answered) if self.answered else "nothing has been answered yet")
            else:
                self.answer(reply.prompt)
        return True

    def answer(self, prompt: str) -> None:
        """Answer a prompt in every mode that is on, and print figures of each answer."""
        if not self.state.modes:
            self._say("no mode is on: /target, /drafter, /speculative, /ngram and /method switch one on")
            return
        tokenizer = self.decoder.tokenizer
        ids = self.conversation.ids(prompt, tokenizer) if self.state.chat else plain_ids(prompt, tokenizer)
        answers: dict[str, Answer] = {}
        for method in self.state.answering:
            self._say(f"[{method}]")
            try:
                answer = self._decode(method, ids)
            except KeyboardInterrupt:
                self._say("interrupted")
                break
            except REFUSALS as error:
                long = self.state.chat and self.conversation.turns and str(error).startswith("prompt")
                forget = "; /clear forgets the conversation" if long else ""
                self._say(f"{method} did not answer: {sentence(error)}{forget}")
                continue
            answers[method] = answer
            self.answered.setdefault(method, []).append(answer)
            self._say(f"[{figures(answer, answers.get('target'), self.state.settings)}]")
            for note in answer.notes:
                if note not in self.told:
                    self.told.add(note)
                    self._say(f"[{method}: {note}]")
            if answer.finished == "interrupted":
                break
        if self.state.chat and answers:
            self.conversation.turns.append((prompt, next(iter(answers.values())).text))

    def _decode(self, method: str, prompt_ids: list[int]) -> Answer:
        debug = self.state.debug
        with kept_interrupts() as check:

            def on_step(step: Step, text: str) -> None:
                if debug:
                    self._show(step)
                else:
                    self._write(text)
                check()

            answer = self.decoder.decode(method, prompt_ids, self.state.settings, on_step, show_drafts=debug)
        if debug:
            self._write(answer.text)
        return answer

    def _show(self, step: Step) -> None:
        """Print a step of an answer, in colours if the output is a terminal."""
        from eagle_triton.speculative_decoding import printing

        tokenizer = self.decoder.tokenizer
        own = step.tokens[step.accepted] if len(step.tokens) > step.accepted else None
        if not step.proposed:
            for token in step.tokens:
                printing.initial_step(token, tokenizer, file=self.out)
        else:
            drafts = step.tokens[: step.accepted] if step.drafts is None else step.drafts
            printing.speculative_step(drafts, step.accepted, own, tokenizer, proposed=step.proposed, file=self.out)
        if step.h_norm is not None:
            mean = "" if step.h_ema is None else f", mean {step.h_ema:.3f}"
            self._say(f"  entropy {step.h_norm:.3f}{mean}, gamma {step.gamma}")
        self.out.flush()

    def _say(self, line: str) -> None:
        """Write a line."""
        self._write(f"{line}\n" if self.at_line_start else f"\n{line}\n")

    def _write(self, text: str) -> None:
        """Write and flush. Removes control characters that a model made, if the output is a terminal."""
        self.at_line_start = text.endswith("\n") if text else self.at_line_start
        self.out.write(text.translate(CONTROLS) if self.out.isatty() else text)
        self.out.flush()


def _parse(argv: list[str] | None, program: str) -> tuple[Parser, argparse.Namespace]:
    parser = Parser(program, (__doc__ or "").replace("eagle-triton chat", program))
    command_line.add_drafting_models(parser, target=True)
    command_line.add_device(parser)
    parser.add_argument("--commands", type=_lines, metavar="FILE", help="read lines from a file, and leave at its end")
    args = parser.parse_args(argv)
    if args.target == PAIR:
        args.drafter, args.block_drafter = args.drafter or DRAFT, args.block_drafter or BLOCK
    return parser, args


def _lines(path: str) -> list[str]:
    try:
        lines = LINE_END.split(Path(path).read_bytes().decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not in UTF-8"
        raise argparse.ArgumentTypeError(f"must be a readable file, got {path or 'an empty path'}: {reason}") from None
    return lines if lines[-1] else lines[:-1]
