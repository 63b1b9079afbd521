"""The program eagle-triton: its commands line by line, its chat with a decoder of our own and with the demo, its exits.

What a terminal does is tried at a pseudo-terminal: Ctrl-C in the middle of an answer, Ctrl-D, colours.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import infer
from eagle_triton.cli import chat as chat_module
from eagle_triton.cli import environment, generate, main, readers
from eagle_triton.cli.chat import Chat, run
from eagle_triton.cli.commands import COMMANDS, Reply, State, answer_to, help_lines, state_line
from eagle_triton.cli.decoding import Decoder
from eagle_triton.cli.figures import figures
from eagle_triton.cli.interrupts import kept_interrupts
from eagle_triton.cli.settings import MAX_SEED, Settings
from eagle_triton.command_line import Parser
from eagle_triton.comparison.answer import Answer, Step
from eagle_triton.inference.conversation import Conversation
from tests.forked import start_program
from tests.programs import refused

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = State()


# --- What lines mean.


def told(*lines: str, state: State = DEFAULT) -> tuple[State, list[str]]:
    """The state behind some lines, and what they print."""
    printed: list[str] = []
    for line in lines:
        reply = answer_to(line, state)
        state = reply.state
        printed += reply.lines
    return state, printed


def test_it_begins_as_the_original_does_but_for_the_cache():
    settings = DEFAULT.settings
    assert (settings.gamma, settings.gamma_max, settings.length, settings.seed) == (4, 4, 35, 42)
    assert (settings.processor, settings.greedy) == ("greedy", True)
    assert (settings.ngram_storage, settings.ngram_n, settings.top_k_filler) == ("basic", 3, 3)
    assert settings.reset_in_between and settings.cache and not settings.egag
    assert DEFAULT.modes == {"target", "speculative", "ngram"} and DEFAULT.chat and not DEFAULT.debug


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("/speculative", "speculative off: prompts are answered by target, ngram"),
        ("/speculative on", "speculative on: prompts are answered by target, speculative, ngram"),
        ("/target off", "target off: prompts are answered by speculative, ngram"),
        ("/drafter", "drafter on: prompts are answered by target, drafter, speculative, ngram"),
        ("/ngram", "ngram off: prompts are answered by target, speculative"),
        ("/length 120", "length 120"),
        ("/gamma 6", "gamma 6"),
        ("/egag", "egag on: speculative drafts 1 to 4 tokens a step by the drafter's entropy"),
        ("/egag off", "egag off: speculative drafts 4 tokens a step"),
        ("/egag_gamma_max 6", "egag_gamma_max 6"),
        ("/egag_gamma_max default", "egag_gamma_max default, as gamma"),
        ("/egag_ema 0.9", "egag_ema 0.9"),
        ("/egag_scale 3", "egag_scale 3"),
        ("/egag_scale default", "egag_scale default, ln of the vocabulary"),
        ("/egag_mode stop", "egag_mode stop"),
        ("/processor multinomial", "processor multinomial, temperature 1"),
        ("/processor topk 0.8 20", "processor topk, temperature 0.8, top_k 20"),
        ("/processor nucleus 0.8 0.9", "processor nucleus, temperature 0.8, top_p 0.9"),
        ("/processor topknucleus 1 20 0.9", "processor topknucleus, temperature 1, top_k 20, top_p 0.9"),
        ("/processor greedy", "processor greedy"),
        ("/debug", "debug on: accepted green, rejected red, the target's own blue"),
        ("/debug off", "debug off"),
        ("/cache on", "cache on: keys and values are kept"),
        ("/cache", "cache off: models read the whole text again for each token, with their own forward; eagle, block, "
         "block_tree, suffix and hybrid need the cache"),
        ("/top_k_filler 1", "top_k_filler 1"),
        ("/filler_weight 0.5", "filler_weight 0.5"),
        ("/set_ngramstorage onelevel 4", "set_ngramstorage onelevel 4"),
        ("/reset_in_between", "reset_in_between off: n-grams and outputs of earlier answers are kept"),
        ("/reset_in_between on", "reset_in_between on: each answer counts n-grams from the start"),
        ("/method eagle on", "method target, speculative, ngram, eagle"),
        ("/method target off", "method speculative, ngram"),
        ("/seed 7", "seed 7"),
        (f"/seed {MAX_SEED}", "seed 9223372036854775807"),
        ("/chat", "chat off: prompts stand alone, as plain text"),
        ("/chat on", "chat on: the conversation is context"),
    ],
)  # fmt: skip
def test_commands_print_the_state_that_they_made(line, printed):
    state, lines = told(line)
    assert lines == [printed]
    name = line.split()[0]
    if state != DEFAULT:  # and once more what the help says of it
        assert COMMANDS[name[1:]].told(state) in printed
    assert told(f"  {line.upper() if name != '/processor' else line}   # said twice, and # louder")[0] == state


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("/speculative maybe", "must be followed by on, off or nothing, got 'maybe'"),
        ("/target on off", "must be followed by on, off or nothing, got 'on off'"),
        ("/length", "takes one value, got none"),
        ("/length 0", "length must be a whole number from 1 to 10000000, got 0"),
        ("/length 1e3", "length must be a whole number, got '1e3'"),
        ("/gamma 4.0", "gamma must be a whole number, got '4.0'"),
        ("/gamma 4 5", "takes one value, got 4 5"),
        (f"/gamma {'9' * 5000}", "gamma must be a whole number, got "),
        ("/gamma default", "gamma must be a whole number, got 'default'"),
        ("/processor", "takes one of greedy temperature, multinomial temperature, topk temperature top_k, "),
        ("/processor greedy 1 2", "greedy takes temperature, got '1 2'"),
        ("/processor topk 0.8", "top_k must be given for processor topk"),
        ("/processor nucleus warm 0.9", "temperature must be a number, got 'warm'"),
        ("/set_ngramstorage", "takes a storage and its n, got none"),
        ("/set_ngramstorage basic", "takes a storage and its n, got basic"),
        ("/set_ngramstorage basic n", "n must be a whole number, got 'n'"),
        ("/method", "takes one of target, drafter, speculative, ngram, eagle, block, block_tree, suffix, hybrid, "),
        ("/method eagle perhaps", "must be followed by on, off or nothing, got 'perhaps'"),
        ("/clear all", "takes no arguments, got 'all'"),
    ],
)  # fmt: skip
def test_wrong_values_change_nothing_and_are_explained(line, reason):
    reply = answer_to(line, DEFAULT)
    name = line.split()[0][1:]
    assert reply.state == DEFAULT and not reply.actions
    said, usage = reply.lines
    assert said.startswith(f"/{name}: ") and reason in said and usage == f"usage: {COMMANDS[name].line}"


def test_every_command_is_tried_here():
    source = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"/{name}' in source for name in COMMANDS)
    wanted = """speculative target drafter length gamma egag egag_gamma_min egag_gamma_max egag_ema processor debug
    cache ngram top_k_filler set_ngramstorage reset_in_between help quit clear chat stats method egag_scale egag_mode"""
    assert set(wanted.split()) <= set(COMMANDS)


def test_an_unknown_command_is_told_the_nearest_else_all():
    for line, said in (
        ("/Lenght 5", ["/Lenght is not a command; did you mean /length? /help lists all"]),
        ("/set_ngram onelevel 4", ["/set_ngram is not a command; did you mean /set_ngramstorage? /help lists all"]),
        ("/xyz", ["/xyz is not a command; the commands are:", *help_lines(DEFAULT)]),
    ):
        assert answer_to(line, DEFAULT) == Reply(DEFAULT, tuple(said))


def test_help_says_what_everything_is_set_to():
    state, _ = told("/gamma 7", "/egag on")
    lines = answer_to("/help", state).lines
    assert len(lines) == len(COMMANDS) + 1 and all(len(line) <= 120 for line in lines)
    assert any(re.fullmatch(r"  /gamma <value> +drafts per step \(7\)", line) for line in lines)
    assert any(line.startswith("  /egag [on|off] ") and line.endswith("(on)") for line in lines)


@pytest.mark.parametrize(
    ("line", "action"), [("/quit", "quit"), ("  /QUIT # bye", "quit"), ("/clear", "clear"), ("/stats", "stats")]
)
def test_actions(line, action):
    assert answer_to(line, DEFAULT) == Reply(DEFAULT, (), (action,))


def test_prompts_are_what_is_no_command():
    assert answer_to("  def f(): # /quit", DEFAULT) == Reply(DEFAULT, (), ("answer",), "  def f(): # /quit")
    assert answer_to("//usr/bin", DEFAULT).prompt == "/usr/bin"
    assert answer_to("# a comment of the program", DEFAULT).actions == ("answer",)
    assert answer_to(" \t", DEFAULT) == Reply(DEFAULT) == answer_to("", DEFAULT)


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("//a\nb // c\n//d", "/a\nb // c\n//d"),
        ("  //a\n//d", "  /a\n//d"),
        ("\n//a", "\n//a"),
        ("f {\n  // comment\n  return", "f {\n  // comment\n  return"),
        ("x = (\n/gamma 5", "x = (\n/gamma 5"),
        ("/* comment */", "/* comment */"),
        ("/**\n * of C\n */\nint x;", "/**\n * of C\n */\nint x;"),
    ],
)
def test_only_the_first_line_of_a_prompt_is_looked_at(text, prompt):
    assert answer_to(text, DEFAULT) == Reply(DEFAULT, actions=("answer",), prompt=prompt)


@pytest.mark.parametrize("line", ["b\udcff", "/gamma \udcff", "//\ud800"])
def test_what_is_no_text_is_refused(line):
    assert answer_to(line, DEFAULT) == Reply(DEFAULT, ("this line is not text in UTF-8",))


def test_several_commands_in_a_line():
    reply = answer_to("/speculative off /gamma 6 /ngram /nonsense /length x /quit # /target off", DEFAULT)
    assert reply.state.answering == ("target",) and reply.state.settings.gamma == 6 and reply.actions == ("quit",)
    assert [line for line in reply.lines if line.startswith("/")] == [
        "/nonsense is not a command; the commands are:", "/length: length must be a whole number, got 'x'"
    ]  # fmt: skip


# The experiments of the documentation: what each says behind its comments.
EXPERIMENTS = {
    "target": dict(modes={"target"}),
    "speculative": dict(modes={"target", "speculative"}, egag=False, gamma=4),
    "egag": dict(modes={"target", "speculative"}, egag=True, egag_gamma_min=1, egag_gamma_max=6, egag_ema=0.9),
    "nasd": dict(modes={"target", "ngram"}, ngram_storage="basic", ngram_n=3, top_k_filler=3),
}


def documented_blocks() -> dict[str, list[str]]:
    page = (ROOT / "docs" / "program.md").read_text(encoding="utf-8")
    section = page.partition("\n## Four experiments")[2].partition("\n## ")[0]
    blocks = [block.splitlines() for block in re.findall(r"```text\n(.*?)```", section, re.DOTALL)]
    return dict(zip(EXPERIMENTS, blocks, strict=True))


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize(
    "before", [(), ("/method eagle on", "/target off", "/egag on", "/gamma 9")], ids=["at first", "later"]
)
def test_documented_experiments_do_what_they_say(name, before):
    state, _ = told(*before)
    state, printed = told(*documented_blocks()[name], state=state)
    wanted = dict(EXPERIMENTS[name])
    assert state.modes - {"eagle"} == wanted.pop("modes") and not any("usage" in line for line in printed)
    assert {option: getattr(state.settings, option) for option in wanted} == wanted


def test_the_state_in_a_line():
    state, _ = told("/egag on", "/debug on", "/cache off", "/processor topk 0.5 9")
    assert state_line(DEFAULT) == "target, speculative, ngram | length 35 | gamma 4 | greedy | chat"
    assert state_line(state).endswith("| topk, temperature 0.5, top_k 9 | egag | chat | debug | cache off")


# --- A chat with a decoder that is not one.


class Characters:
    """A tokenizer whose tokens are characters."""

    chat_template = None

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return SimpleNamespace(input_ids=[1] * add_special_tokens + [ord(letter) for letter in text])

    def convert_ids_to_tokens(self, ids):
        return [chr(token) for token in ids]

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


class Scripted:
    """Answers "ab", drafted "ax" once, and keeps what it was asked."""

    def __init__(self):
        self.tokenizer, self.asked, self.device, self.dtype = Characters(), [], "cpu", "torch.float32"
        self.before_step = lambda: None

    def decode(self, method, prompt_ids, settings, on_step, *, show_drafts=False):
        text = "".join(chr(token) for token in prompt_ids[1:] if token != 1)
        self.asked.append((method, text, settings, show_drafts))
        if len(prompt_ids) > 50:
            raise ValueError(f"prompt: {len(prompt_ids)} tokens leave no room")
        if method == "hybrid":
            raise RuntimeError("CUDA out of memory.\nTried")
        steps = [Step((97,), drafts=()), Step((98, 99), 1, 2, (98, 120), h_norm=0.5, h_ema=0.25, gamma=2)]
        done, finished = [], "stop"
        for step in steps:
            try:
                self.before_step()
                on_step(step, "".join(map(chr, step.tokens)))
                done.append(step)
            except KeyboardInterrupt:
                finished = "interrupted"
                break
        tokens = tuple(token for step in done for token in step.tokens)
        return Answer(
            method, tokens, "".join(map(chr, tokens)), tuple(done), 0.5, 0.1, 2, 0, finished, "engine", ("why",)
        )


def scripted(*lines: str, state: State = DEFAULT) -> tuple[Scripted, Chat, str]:
    chat = Chat(Scripted(), io.StringIO(), state)
    for line in lines:
        assert chat.take(line)
    return chat.decoder, chat, chat.out.getvalue()


def test_a_prompt_is_answered_by_every_mode_with_figures():
    decoder, _, printed = scripted("/ngram off", "/drafter on", "x")
    assert [method for method, *_ in decoder.asked] == ["target", "drafter", "speculative"]
    figures = "3 tokens in 0.50 s, first after 100 ms, 6.0 tokens/s, tau 2.00, 1 of 2 drafts accepted, 50.0%"
    assert printed.splitlines()[2:] == [
        "[target]", "abc", f"[{figures}]", "[target: why]",
        "[drafter]", "abc", f"[{figures}, 1.00 x target]",
        "[speculative]", "abc", f"[{figures}, 1.00 x target, same tokens]",
    ]  # fmt: skip


def test_without_the_target_there_is_no_speed_over_it():
    _, _, printed = scripted("/target off", "x")
    assert "x target" not in printed and "same tokens" not in printed and "50.0%]" in printed


def test_tokens_that_differ_are_named_unless_they_are_drawn():
    one, other = (
        Answer(m, t, "", (), 1.0, 0.1, 1, 0, "stop", "engine") for m, t in (("target", (1, 2, 3)), ("ngram", (1, 2)))
    )
    assert figures(other, one, Settings()).endswith("differs from target at token 3")
    assert figures(other, one, Settings(processor="multinomial")).endswith("x target")


def test_fewer_tokens_than_asked_for_are_said():
    answer = Answer("target", (1, 2), "", (), 1.0, 0.1, 1, 0, "length", "engine")
    assert figures(answer, None, Settings()).endswith("no position is left for 35")
    assert "position" not in figures(answer, None, Settings(length=2))


def test_chat_on_keeps_the_conversation_and_clear_forgets_it():
    decoder, chat, printed = scripted(
        "/ngram off /speculative off", "x", "y\n", "/clear", "z", "/chat off", "w", "/chat on", "v"
    )
    assert [text for _, text, *_ in decoder.asked] == ["x", "xabc\ny\n", "z", "w", "zabc\nv"]
    assert "2 prompts with their answers are forgotten" in printed
    assert chat.conversation.turns == [("z", "abc"), ("v", "abc")]


def test_a_chat_template_is_used():
    tokenizer = Characters()
    tokenizer.chat_template = "there is one"
    ids = Conversation([("a", "b")]).ids("c", tokenizer)
    assert "".join(map(chr, ids)) == "<user>a<assistant>b<user>c<assistant>"


def test_what_cannot_be_answered_is_one_line_and_the_rest_goes_on():
    decoder, chat, printed = scripted("/method hybrid on /speculative off", "short", "x" * 60, "short")
    assert len(decoder.asked) == 9 and len(chat.conversation.turns) == 2
    lines = printed.splitlines()
    assert lines.count("hybrid did not answer: CUDA out of memory. Tried") == 2
    assert "target did not answer: prompt: 70 tokens leave no room; /clear forgets the conversation" in lines


def test_no_mode_is_said():
    decoder, _, printed = scripted("/target off /speculative off /ngram off", "x")
    assert "ngram off: no mode is on" in printed and "/method switch one on" in printed and not decoder.asked


def test_stats_are_of_all_answers():
    _, _, printed = scripted("/stats", "/ngram off", "x", "y", "/stats")
    assert printed.startswith("nothing has been answered yet\n")
    header, *rows = [line.split() for line in printed.splitlines()[-3:]]
    assert header == ["answers", "tokens", "seconds", "tokens/s", "tau", "accepted", "of"]
    assert rows == [[method, "2", "6", "1", "6", "2", "2", "4"] for method in ("target", "speculative")]


@pytest.mark.parametrize("colour", [True, False])
def test_debug_shows_each_step(colour, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "" if colour else "1")
    decoder, _, printed = scripted("/debug on", "/target off /ngram off", "x")
    lines = printed.splitlines()[3:]
    assert decoder.asked[0][3]  # the chain is to be shown
    green, red, blue = (f"\033[{code}m{{}}\033[0m" if colour else "{}" for code in (32, 31, 34))
    assert lines[:5] == [
        "[speculative]", f"Target: {blue.format('a')}",
        f"1 of 2 accepted: {green.format('b')} {red.format('x')} {blue.format('c')}",
        "  entropy 0.500, mean 0.250, gamma 2", "abc",
    ]  # fmt: skip


def test_a_tree_shows_what_was_accepted():
    chat = Chat(Scripted(), io.StringIO())
    chat._show(Step((97, 98, 99), 2, 7, None))
    assert chat.out.getvalue() == "2 of 7 accepted: a b c\n"


def test_an_interrupt_ends_the_answer_between_two_steps_and_not_the_chat():
    decoder = Scripted()
    decoder.before_step = lambda: os.kill(os.getpid(), signal.SIGINT)
    chat = Chat(decoder, io.StringIO())
    assert chat.take("x")
    printed = chat.out.getvalue()
    assert "[target]\na\n[0 tokens" in printed and "interrupted]" in printed and "[speculative]" not in printed
    decoder.before_step = lambda: None
    assert chat.take("y") and chat.out.getvalue().count("same tokens") == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_ends_the_chat_in_the_middle_of_an_answer():
    decoder, out = Scripted(), io.StringIO()
    decoder.before_step = lambda: os.kill(os.getpid(), signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run(Chat(decoder, out), readers.given_lines(["x", "y"], out))
    assert ended.value.code == 130 and [asked[:2] for asked in decoder.asked] == [("target", "x")]
    assert signal.getsignal(signal.SIGTERM) is before and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(os.name == "nt", reason="a process there cannot be asked to end")
def test_sigterm_ends_the_program(tmp_path):
    (tmp_path / "lines").write_text("/length 2000 /speculative off /ngram off\n" + "def main():\n" * 3)
    commands = "--commands", str(tmp_path / "lines")
    # Without the variable the program says on stderr why it has one thread.
    process = start_program(infer.main, "--device", "cpu", *commands, OMP_NUM_THREADS="1")
    for line in process.stdout:
        if line == "[target]\n":
            break
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130 and "[target]" not in process.stdout.read() and not process.stderr.read()


def test_a_second_interrupt_does_not_wait():
    with pytest.raises(KeyboardInterrupt), kept_interrupts():  # nobody asks whether there was one
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_a_terminal_gets_no_control_characters():
    out = io.StringIO()
    chat = Chat(Scripted(), out)
    chat._write("a\tb\x1b[2J\n")
    out.isatty = lambda: True
    chat._write("a\tb\x1b[2J\x9b\n")
    assert out.getvalue() == "a\tb\x1b[2J\na\tb␛[2J\ufffd\n"


# --- Where lines come from.


def read_all(reader) -> list[str]:
    found = []
    with contextlib.suppress(EOFError):
        while True:
            found += reader.read(DEFAULT)
    return found


def test_lines_are_shown_and_continued():
    out = io.StringIO()
    assert read_all(readers.given_lines(["/gamma 5\r\n", "def f():\\\n", "    return 1\n", "x"], out)) == [
        "/gamma 5", "def f():\n    return 1", "x"
    ]  # fmt: skip
    assert out.getvalue() == "> /gamma 5\n> def f():\\\n...     return 1\n> x\n"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["int main() {\\\n", "  // comment\\\n", "  return\n"], ["int main() {\n  // comment\n  return"]),
        (["//a\\\n", "b\n"], ["//a\nb"]),
        (["x = (\\\n", "/gamma 5\n"], ["x = (\n/gamma 5"]),
        (["/gamma \\\n", "5\n"], ["/gamma \n5"]),
        (["x\\\n"], ["x"]),
        (["x\\\n", "y\\\\"], ["x\ny\\"]),
        (["\\"], [""]),
        (["a\u2028b\x0bc\x0cd\x85e\rf\n", "g"], ["a\u2028b\x0bc\x0cd\x85e\rf", "g"]),
    ],
)
def test_lines_that_go_on(lines, found):
    assert read_all(readers.given_lines(lines, io.StringIO())) == found


def test_lines_of_files_and_pipes_end_at_new_lines_alone(tmp_path):
    data = "\ufeffa\u2028b\x85c\rd\r\n\n// e\x0c\n".encode()
    (tmp_path / "lines").write_bytes(data)
    assert chat_module._lines(str(tmp_path / "lines")) == ["a\u2028b\x85c\rd", "", "// e\x0c"]
    (tmp_path / "lines").write_bytes(b"")
    assert chat_module._lines(str(tmp_path / "lines")) == []
    piped = io.TextIOWrapper(io.BytesIO(data[3:] + b"b\xff"), encoding="utf-8")
    assert read_all(readers.choose_reader(None, piped, io.StringIO())) == [
        "a\u2028b\x85c\rd", "", "// e\x0c", "b\udcff"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("x", ["x"]),
        ("def f():\n    return", ["def f():\n    return"]),
        ("/speculative off\n\n  /ngram off\nimport os", ["/speculative off", "", "  /ngram off", "import os"]),
        ("/gamma 5\r\nx\\\n/y z\\\n//\ny\\", ["/gamma 5", "x\n/y z\n//", "y\nmore"]),
        ("//a\nb", ["//a\nb"]),
        ("int f() {\n  // c\n  /* d */\n/usr/bin\n/>\n}", ["int f() {\n  // c\n  /* d */\n/usr/bin\n/>\n}"]),
        ("#define A \\\n  1\nA\\", ["#define A \\\n  1\nA\nmore"]),
        ("a\u2028/gamma 5\x0b/gamma 6\x0c/quit\x85/quit\r/quit", None),
    ],
)
def test_what_is_pasted_at_once(text, lines):
    typed = [text, "more"]
    assert readers.chat_lines(lambda prompt: typed.pop(0)) == (lines or [text])


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("/egag_g", ["/egag_gamma_min", "/egag_gamma_max"]),
        ("/egag ", ["on", "off"]),
        ("/processor top", ["topk", "topknucleus"]),
        ("/set_ngramstorage o", ["onelevel"]),
        ("/method h", ["hybrid"]),
        ("/method hybrid o", ["on", "off"]),
        ("/gamma 4 /tar", ["/target"]),
        ("/nonsense ", []),
        ("/length ", []),
        ("import ", []),
        ("", []),
    ],
)
def test_completion(before, words):
    assert readers.completions(before) == words


@pytest.mark.skipif(os.name == "nt" or sys.platform == "darwin", reason="of Linux and its like")
def test_history_lies_in_the_state_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert readers.state_directory() == tmp_path / "eagle-triton"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert readers.state_directory() == tmp_path / ".local/state/eagle-triton"


def test_history_that_cannot_be_kept_is_said(monkeypatch, tmp_path):
    history = pytest.importorskip("prompt_toolkit.history")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    out = io.StringIO()
    session = readers.toolkit_session(out)
    assert isinstance(session.history, history.InMemoryHistory) and out.getvalue().startswith(
        "typed lines are not kept"
    )


def test_the_end_of_lines_and_quit_leave():
    class Typed:
        typed = True

        def __init__(self, *answers):
            self.answers = list(answers)

        def read(self, state):
            answer = self.answers.pop(0)
            if isinstance(answer, type):
                raise answer
            return answer.split("\n")

    chat = Chat(Scripted(), io.StringIO())
    reader = Typed("/gamma 5", KeyboardInterrupt, "/gamma 6", EOFError, "/gamma 7")
    assert run(chat, reader) == 0 and chat.state.settings.gamma == 6 and reader.answers == ["/gamma 7"]
    reader = Typed("/gamma 8\n/quit\n/gamma 9", "x")
    assert run(chat, reader) == 0 and chat.state.settings.gamma == 8 and reader.answers == ["x"]
    reader = Typed(KeyboardInterrupt, "x")
    reader.typed = False
    assert run(chat, reader) == 130


# --- The program with the demo, in this process.


@pytest.fixture(scope="module")
def demo() -> Decoder:
    return Decoder(device="cpu")


@pytest.fixture
def with_demo(demo, monkeypatch):
    """The program takes the decoder of this module instead of loading one."""
    made = []

    def make(*arguments):
        made.append(arguments)
        return demo

    monkeypatch.setattr("eagle_triton.cli.decoding.Decoder", make)
    return made


def test_commands_from_a_file(with_demo, tmp_path, capsys):
    file = tmp_path / "lines"
    file.write_text("/length 6\n/method eagle on\n/nonsense\nimport os\n/cache off /method eagle off\nimport re\n")
    assert main.main(["chat", "--device", "cpu", "--commands", str(file)]) == 0
    printed = capsys.readouterr().out
    assert with_demo == [("demo", "demo-draft", None, "demo-block", "cpu", None)]
    assert printed.startswith("target demo, drafter demo-draft, float32 on cpu\n")
    assert "\n> import os\n[target]\n" in printed and "/nonsense is not a command" in printed
    assert printed.count("6 tokens in ") == 7 and printed.count("x target, same tokens]") == 5
    assert len(re.findall(r"own forward: the engine always keeps a cache", printed)) == 1


def test_lines_from_a_pipe_and_a_prompt_that_is_too_long(with_demo, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "stdin", io.StringIO(f"/length 3\n/speculative off\n{'x = 1; ' * 900}\nimport os\n/quit\nno\n")
    )
    assert chat_module.main(["--device", "cpu"], "infer.py") == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"^(target|ngram) did not answer: prompt: \d+ tokens leave no room", printed, re.M)) == 2
    assert printed.count("3 tokens in") == 2 and printed.endswith("> /quit\n")


def test_without_a_drafter_its_drafts_begin_switched_off(with_demo, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert chat_module.main(["--device", "cpu", "--target", str(tmp_path)]) == 0
    assert with_demo == [(str(tmp_path), None, None, None, "cpu", None)]
    assert "drafter none" in (printed := capsys.readouterr().out) and "\ntarget, ngram | " in printed


def test_bytes_that_are_no_text_are_refused_and_the_chat_goes_on(with_demo, monkeypatch, capsys):
    lines = b"/length 3 /speculative off /ngram off\nb\xff\nimport os\\"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    assert main.main(["chat", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("this line is not text in UTF-8\n> import os\\\n[target]\n") == 1
    assert printed.count("3 tokens in") == 1


@pytest.mark.parametrize("how", ["strict", "surrogateescape", "argument"])
def test_generate_refuses_bytes_that_are_no_text(how, monkeypatch, capsys):
    words = ["b\udcff"] if how == "argument" else []
    if not words:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"b\xff\n"), encoding="utf-8", errors=how))
    line = refused(capsys, generate.main, *words, "--device", "cpu")
    assert f"PROMPT must be text in UTF-8, and the {'argument' if words else 'piped input'} is not" in line


def test_the_largest_seed_is_taken(with_demo, capsys):
    words = ["--temperature", "1.5", "--max-new-tokens", "5", "--device", "cpu", "--seed"]
    texts = []
    for seed in (MAX_SEED, 0, MAX_SEED):
        assert generate.main(["import os", *words, str(seed)]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.parametrize(
    ("words", "method", "tokens"),
    [
        (["import os"], "speculative", 5),
        (["import os", "--method", "eagle", "--temperature", "0.8", "--top-p", "0.9", "--seed", "1"], "eagle", 5),
        (["import os", "--method", "ngram", "--no-cache", "--gamma", "2", "--ngram-storage", "onelevel"], "ngram", 5),
        (["import os", "--egag", "--egag-ema", "0.5", "--egag-gamma-max", "6", "--plain"], "speculative", 5),
    ],
)
def test_generate_answers_on_stdout_with_figures_on_stderr(words, method, tokens, with_demo, capsys):
    assert main.main(["generate", *words, "--max-new-tokens", str(tokens), "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() and printed.err.startswith(f"{method}: {tokens} tokens in ")


def test_generate_takes_a_prompt_from_a_pipe(with_demo, monkeypatch, capsys, demo):
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n"))
    assert generate.main(["--method", "target", "--max-new-tokens", "4", "--device", "cpu"]) == 0
    ids = demo.tokenizer("import os\n").input_ids
    assert capsys.readouterr().out == demo.decode("target", ids, Settings(length=4)).text + "\n"


@pytest.mark.parametrize(("command", "options"), [("generate", ["--max-new-tokens", "1"]), ("chat", [])])
def test_a_pipe_is_read_as_utf_8_in_any_locale(command, options, with_demo, monkeypatch, capsys):
    lines = "# caf\u00e9\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), encoding="latin-1"))
    asked = []
    monkeypatch.setattr(Conversation, "ids", lambda self, prompt, tokenizer: asked.append(prompt) or [1])
    assert main.main([command, *options, "--device", "cpu"]) == 0
    assert set(asked) == {lines if command == "generate" else lines.rstrip("\n")}


def test_closed_streams_are_empty_ones(with_demo, monkeypatch, capsys):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main.main(["chat", "--device", "cpu"]) == 0
    assert main.main(["generate", "import os", "--max-new-tokens", "3", "--device", "cpu"]) == 0
    with pytest.raises(SystemExit, match="2"):
        main.main(["generate", "--device", "cpu"])


def test_generate_hands_on_what_it_was_told(with_demo, demo, monkeypatch, capsys):
    asked = []
    decode = demo.decode
    monkeypatch.setattr(demo, "decode", lambda *words: asked.append(words) or decode(*words))
    words = "--temperature 0.7 --top-k 9 --top-p 0.5 --gamma 2 --egag --egag-scale 3 --egag-gamma-min 2 --seed 9"
    assert generate.main(["x", *words.split(), "--max-new-tokens", "3", "--device", "cpu"]) == 0
    assert asked[0][2] == Settings(
        length=3, processor="topknucleus", temperature=0.7, top_k=9, top_p=0.5, gamma=2, egag=True, egag_scale=3.0,
        egag_gamma_min=2, seed=9,
    )  # fmt: skip


def test_check_reports_this_python(capsys):
    assert main.main(["check"]) == 0
    printed = capsys.readouterr().out
    assert sys.executable in printed and "usable" in printed and "transformers" in printed


def test_check_of_an_installed_package_names_pip(monkeypatch):
    monkeypatch.setattr(environment, "CHECKOUT", False)
    row = environment.check_package("transformers", "4.0")
    assert row.mend == 'python -m pip install "transformers>=4.53,<5.40"' and row.status == "fault"


def test_bench_is_the_benchmark(capsys):
    words = ["bench", "operations", "--device", "cpu", "--only", "swiglu", "--json"]
    assert main.main(words) == 0
    record = json.loads(capsys.readouterr().out)
    cases = {row["case"].partition(" ")[0] for row in record["rows"]}
    assert (record["mode"], cases) == ("operations", {"swiglu"})


# --- Its arguments.


def test_generate_without_a_prompt_at_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert "PROMPT must be given, or piped in" in refused(capsys, main.main, "generate")


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # otherwise it may say that it takes one thread
    line = refused(capsys, chat_module.main, "--target", tmp_path, "--device", "cpu")
    assert line.startswith("eagle-triton chat: ")


@pytest.mark.parametrize(
    "words",
    [[], ["check"], ["generate"], ["chat"], ["bench"], ["bench", "step"], ["ablation"], ["export"]],
    ids=" ".join,
)
def test_help(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main([*words, "--help"])
    printed = capsys.readouterr().out
    assert not stopped.value.code and printed.startswith(f"usage: {' '.join(['eagle-triton', *words])} ")
    assert "benchmark.py" not in printed


def test_every_command_has_its_line_in_the_help_and_a_row_on_its_page():
    page = (ROOT / "docs" / "program.md").read_text(encoding="utf-8")
    assert all(
        f"    eagle-triton {name} " in main.__doc__ and f"| `eagle-triton {name}" in page for name in main.COMMANDS
    )
    table = page.partition("\n## Commands")[2].partition("\n## ")[0]
    assert not {name for name in COMMANDS if not re.search(rf"`/{name}\b", table)}


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (OSError(errno.EPIPE, "Broken pipe"), 1, ""),
        (OSError(errno.ENOSPC, "No space left"), 1, "eagle-triton generate: [Errno 28] No space left\n"),
    ],
    ids=["interrupt", "pipe", "disk"],
)
def test_what_ends_a_command_from_outside_shows_no_trace(error, code, said, monkeypatch, capsys):
    def end(*_, **__):
        with Parser("eagle-triton generate", "").explains():  # as a command does that prints inside
            raise error

    given_up = []
    monkeypatch.setattr(generate, "main", end)
    monkeypatch.setattr(os, "dup2", lambda *places: given_up.append(places))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=lambda: 1, write=end, flush=end))
    assert main.main(["generate", "x"]) == code and len(given_up) == (code == 1)
    assert capsys.readouterr().err == said


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no such device here")
def test_what_is_left_to_write_at_the_end_is_not_lost_in_silence():
    script = "import sys; from eagle_triton.command_line import run_program; sys.exit(run_program(lambda: print('x')))"
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (1, "-c: [Errno 28] No space left on device\n")


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main(["--version"])
    assert not stopped.value.code and re.fullmatch(r"eagle-triton \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_the_console_script_is_the_program():
    assert 'eagle-triton = "eagle_triton.cli.main:main"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


# --- At a terminal.

pty = pytest.importorskip("pty") if os.name != "nt" else None
needs_terminal = pytest.mark.skipif(os.name == "nt", reason="pseudo-terminals are POSIX's")


def chat_scripted(argv: list[str]) -> int:
    """The chat of `Scripted`, by `input` or prompt_toolkit."""
    if argv == ["input"]:
        readers.importlib.util.find_spec = lambda name: None
    return run(Chat(Scripted(), sys.stdout), readers.choose_reader(None, sys.stdin, sys.stdout))


class AtTerminal:
    """A program at a pseudo-terminal of its own, which ends with a `with` block."""

    def __init__(self, main: Callable[[list[str]], int], *words: str, **environment: str) -> None:
        import fcntl
        import termios

        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, b"\x32\0\x78\0\0\0\0\0")  # 50 rows of 120 columns
        colours = {"NO_COLOR": "", "FORCE_COLOR": "", "TERM": "xterm"}
        self.process = start_program(main, *words, terminal=theirs, **colours | environment)
        os.close(theirs)
        self.seen, self.place = "", 0

    def __enter__(self) -> AtTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def expect(self, text: str, seconds: float = 240) -> str:
        """Read until a text comes; what came before it."""
        end = time.monotonic() + seconds
        while (found := self.seen.find(text, self.place)) < 0:
            assert self.more(end), f"{text!r} did not come; what came: {self.seen[-2000:]!r}"
        before, self.place = self.seen[self.place : found], found + len(text)
        return before

    def more(self, end: float) -> bool:
        """Read some more, and say where the cursor is if that is asked; False at the end of it or of the time."""
        ready, _, _ = select.select([self.ours], [], [], max(end - time.monotonic(), 0))
        try:
            data = os.read(self.ours, 65536) if ready else b""
        except OSError:  # of Linux, when the other side is closed
            data = b""
        if b"\033[6n" in data:
            self.type("\033[1;1R")
        self.seen += data.decode(errors="replace")
        return bool(data)

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def send(self, text: str, *expected: str) -> None:
        """Type a text, and read until each of these has come, in turn."""
        self.type(text)
        for one in expected:
            self.expect(one)

    def leave(self, seconds: float = 240) -> int:
        """The exit code, when the program has ended."""
        end = time.monotonic() + seconds
        while self.more(end):
            pass
        code = self.process.wait(1)
        os.close(self.ours)
        return code


@needs_terminal
def test_the_whole_program_at_a_terminal(tmp_path):
    with AtTerminal(infer.main, "--device", "cpu", XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.expect("/help lists the commands")
        terminal.expect(">")
        terminal.send("/length 6 /ngram off /debug on\n", "debug on: ")
        terminal.type("import os\n")
        assert "\033[34m" in terminal.expect("[speculative]") and "\033[3" in terminal.expect("same tokens]")
        terminal.send("/debug off /length 2000 /speculative off\n", "speculative off: ")
        terminal.send("def main():\n", "[target]", "\n    ")
        terminal.send("\x03", "interrupted]", ">")  # before ">" the next one would reach the program between two lines
        terminal.send("/gamma 999", "999")
        terminal.send("\x03", ">")  # clears the line
        terminal.send("/nonsense\n", "/nonsense is not a command", "Other lines are prompts")
        assert "usage: /gamma" not in terminal.seen
        terminal.expect(">")
        terminal.type("\x04")
        assert terminal.leave() == 0


@needs_terminal
@pytest.mark.parametrize("toolkit", [False, True], ids=["input", "prompt_toolkit"])
def test_no_color_is_honoured_at_a_terminal(toolkit, tmp_path):
    if toolkit:
        pytest.importorskip("prompt_toolkit")
    words = [] if toolkit else ["input"]
    with AtTerminal(chat_scripted, *words, NO_COLOR="1", XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.expect(">")
        if toolkit:
            terminal.expect("length 35 | gamma 4")  # at the foot
        terminal.send("/debug on\r", "debug on: ", ">")
        terminal.send("hello\r", "1 of 2 accepted: b x c", "same tokens", "same tokens", ">")
        if toolkit:
            terminal.expect("chat | debug")
            terminal.send("/egag_gamma_mi\t", "n")  # completed
            terminal.send(" 0\r", "/egag_gamma_min: egag_gamma_min must be", "chat | debug")
        terminal.type("\x04")
        assert terminal.leave() == 0
        assert not re.search(r"\033\[(?:\d+;)*3[0-7]m", terminal.seen)
    history = tmp_path / "eagle-triton" / "history"
    assert history.exists() == toolkit and (not toolkit or "+hello" in history.read_text())
