"""Tools and reasoning: what chats say of them, and answers whose text is written for the tests."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing

from eagle_triton import EAGLEConfig, EAGLEInference, EaModel
from eagle_triton.engine.grammar import Grammar, GrammarCompiler, GrammarError
from eagle_triton.engine.scheduler.requests import Piece
from eagle_triton.inference.session import Completion
from eagle_triton.inference.text import TextStream

for missing in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(missing, reason='pip install ".[serve,test]"')

import openai

from eagle_triton.serve.answer_parts import (
    CALL,
    END,
    HARMONY,
    HERMES,
    LISTED,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    AnswerReader,
    form_of,
)
from eagle_triton.serve.answers import _bytes
from eagle_triton.serve.bodies import read_chat
from eagle_triton.serve.engine_client import Ticket
from eagle_triton.serve.tools import ToolFields, answer_grammar, read_tools
from tests.test_serve import TEMPLATE, serving

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
OTHER = {"type": "function", "function": {"name": "g"}}
HERMES_TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }},{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments.a }}</tool_call>"
    "{% endfor %}{{ m.tool_call_id }}\n{% endfor %}{# <think> </think> #}"
)
CALLS = (
    '<think>Hm.</think>\nLet me.\n<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "}"}}\n</tool_call>\n'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)
USER = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    inference = EAGLEInference(None, EaModel.from_pretrained("demo"), EAGLEConfig(slots=2, fallback=False))
    with serving(inference) as running:
        yield running


@pytest.fixture
def answering(server, monkeypatch):
    """Let the server answer with some text in place of the engine's, three tokens at a time."""

    def answer(text: str, template: str = HERMES_TEMPLATE, finished: str = "stop"):
        tokenizer = server.inference.tokenizer
        server.prompts.chat_template = template

        def submit(requests):
            ticket, stream = Ticket(requests[0]), TextStream(tokenizer)
            tokens, said = tokenizer(text).input_ids, ""
            for first in range(0, len(tokens), 3):
                some = tokens[first : first + 3]
                scores = [-0.5] * len(some)
                piece = Piece(0, requests[0], some, stream.push(*some), scores, certain_tokens=first + len(some))
                if first + 3 >= len(tokens):
                    piece.text += stream.finish()
                    piece.completion = Completion(0, requests[0].prompt, tokens, said + piece.text, finished)
                    piece.finished = finished
                said += piece.text
                ticket.pieces.put_nowait((0, piece))
            return [ticket]

        monkeypatch.setattr(server.engine, "submit", submit)
        return server.client

    yield answer
    server.prompts.chat_template = None


def streamed(client, **body) -> tuple[dict, str]:
    """A stream as one message, and its finish_reason."""
    message: dict = {"tool_calls": []}
    for chunk in client.chat(stream=True, **body):
        (choice,) = chunk.choices
        for name in ("content", "reasoning_content"):
            message[name] = message.get(name, "") + (getattr(choice.delta, name, None) or "")
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(message["tool_calls"]) and call.type == "function"
                message["tool_calls"].append([call.function.name, ""])
            message["tool_calls"][call.index][1] += call.function.arguments
    return message, choice.finish_reason


def test_calls_and_reasoning_at_once_and_in_a_stream(answering):
    client, body = answering(CALLS), dict(messages=[USER], tools=[TOOL, OTHER])
    answer = client.chat(**body).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content == "Let me."
    assert answer.message.reasoning_content == answer.message.reasoning == "Hm."
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in answer.message.tool_calls]
    assert calls == [("f", {"a": 1, "b": "}"}), ("g", {})]
    assert len({call.id for call in answer.message.tool_calls}) == 2
    message, finished = streamed(client, **body)
    assert finished == "tool_calls" and message["content"] == "Let me." and message["reasoning_content"] == "Hm."
    assert message["tool_calls"] == [["f", '{"a": 1, "b": "}"}'], ["g", "{}"]]
    one, _ = streamed(client, **body, parallel_tool_calls=False)
    assert one["tool_calls"] == [["f", '{"a": 1, "b": "}"}']]


def test_an_answer_without_calls_is_its_text(answering):
    text = "<think>Hm.</think>\n\nif a < b: <tool> \n"
    message, finished = streamed(answering(text), messages=[USER], tools=[TOOL])
    assert (message["content"], finished, message["tool_calls"]) == ("if a < b: <tool> \n", "stop", [])
    asked = dict(messages=[USER], tools=[TOOL])
    plain = answering(CALLS).chat(**asked, tool_choice="none", extra_body={"include_reasoning": False})
    assert "<tool_call>" in plain.choices[0].message.content and plain.choices[0].finish_reason == "stop"
    assert plain.choices[0].message.reasoning_content is None
    cut = answering(CALLS[:70], finished="length").chat(**asked)
    assert cut.choices[0].finish_reason == "length"


def test_reasoning_may_stay_in_the_content(answering):
    text = "<think>Hm.</think>\n\nHi"
    client, body = answering(text), dict(messages=[USER], separate_reasoning=False)
    message = client.ask("/v1/chat/completions", body)[2]["choices"][0]["message"]
    assert message["content"] == text and message["reasoning_content"] is None
    deltas = {True: [], False: []}
    for separate, found in deltas.items():
        extra = dict(separate_reasoning=separate)
        chunks = client.chat(messages=[USER], stream=True, extra_body=extra)
        found += [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas[False]) == text
    assert {delta.reasoning_content for delta in deltas[False]} == {None}  # it is there, as from SGLang
    assert "".join(delta.reasoning_content or "" for delta in deltas[True]) == "Hm."
    status, _, answer = client.ask("/v1/chat/completions", {**body, "tools": [TOOL]})
    assert (status, answer["error"]["param"]) == (400, "separate_reasoning")


@pytest.mark.parametrize(("end", "rest"), [("</think>\n\n", "Hi there, you"), ("", "")])
def test_reasoning_may_come_in_one_chunk(answering, end, rest):
    thoughts = "Hm, that takes several pieces, as I think."
    client, body = answering(f"<think>{thoughts}{end}{rest}"), dict(messages=[USER])
    for in_pieces in (True, False):
        chunks = client.chat(**body, stream=True, extra_body={"stream_reasoning": in_pieces})
        deltas = [chunk.choices[0].delta for chunk in chunks]
        found = [delta.reasoning_content for delta in deltas if delta.reasoning_content]
        assert "".join(found) == thoughts and (len(found) > 1) == in_pieces
        assert "".join(delta.content or "" for delta in deltas) == rest
    whole = client.ask("/v1/chat/completions", {"messages": [USER], "stream_reasoning": False})[2]
    assert whole["choices"][0]["message"]["reasoning_content"] == thoughts


SPLIT = "é x 😀, 漢"  # characters of several tokens in the demo's vocabulary


def test_tokens_that_are_parts_of_a_character_have_its_bytes(answering):
    answer = answering(SPLIT, None).chat(messages=[USER], logprobs=True).choices[0]
    places = answer.logprobs.content
    assert len(places) > len(SPLIT) and any("\ufffd" in place.token for place in places)
    assert bytes(byte for place in places for byte in place.bytes).decode().strip() == answer.message.content.strip()


@pytest.mark.parametrize(
    ("name", "want"), [("<0xC3>", [0xC3]), ("Ã©", [0xC3, 0xA9]), ("Ġð", [0x20, 0xF0]), ("漢", None)]
)
def test_bytes_of_names_in_vocabularies(name, want):
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda token: name)
    assert _bytes(SimpleNamespace(text=lambda ids: "\ufffd", tokenizer=tokenizer), 5) == want


@pytest.mark.parametrize("begins", [False, True], ids=["plain", "with a token before the prompt"])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_places_in_the_text(answering, server, monkeypatch, stream, echo, begins):
    client, tokenizer = answering(SPLIT, None), server.prompts.tokenizer
    if begins:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        monkeypatch.setattr(server.prompts, "tokenizer", tokenizer)
    prompt = tokenizer("😀: é").input_ids
    answer = client.complete(prompt="😀: é", logprobs=0, echo=echo, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    text = "".join(choice.text for choice in choices)
    found = [place for choice in choices if choice.logprobs for place in choice.logprobs.text_offset]
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
    assert len(found) == len(tokenizer(SPLIT).input_ids) - begins + (len(prompt) if echo else 0)
    whole = 0
    for place, token in zip(found, tokens, strict=True):
        if token == "<|endoftext|>":
            assert place == 0
        elif "\ufffd" in token:
            assert len(text[place].encode()) > 1
        else:
            whole += 1
            assert text[place:].startswith(token)
    assert whole > 2 and found == sorted(found)


def test_calls_and_results_in_the_history_reach_the_template(answering, server):
    client = answering("fine")
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}
    history = [
        USER,
        {"role": "assistant", "content": None, "reasoning": "r", "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "8"},
    ]
    body = dict(messages=history, tools=[TOOL], return_token_ids=True)
    assert client.ask("/v1/chat/completions", body)[0] == 200
    prompt = server.prompts.text(server.prompts.requests(read_chat(body))[0].prompt)
    assert prompt == "f,user: x\nassistant: <tool_call>f 7</tool_call>\ntool: 8c1\n"


def pieces(text: str, form, step: int, reasons: bool | None = None) -> list[tuple[str, str]]:
    reader, found = AnswerReader(form, ("f", "g"), reasons), []
    parts = [part for first in range(0, len(text), step) for part in reader.push(text[first : first + step])]
    for kind, said, _ in [*parts, *reader.finish()]:
        if kind == END:
            continue
        if found and found[-1][0] == kind != CALL:
            found[-1] = (kind, found[-1][1] + said)
        else:
            found.append((kind, said))
    return found


NO_JSON, TOO_DEEP = '<tool_call>{"name": "\\q", "arguments": {}}', "<tool_call>" + 5000 * "["
TOO_LONG = '<tool_call>{"arguments": {"a": ' + 5000 * "1"  # digits
TEXTS = [
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("call", "f"), ("arguments", '{"a": 1}')]),
    (HERMES, '<tool_call>{"nam', [("content", '<tool_call>{"nam')]),
    (HERMES, "<tool_call>[1]</tool_call> x", [("content", "<tool_call>[1]</tool_call> x")]),
    (HERMES, NO_JSON, [("content", NO_JSON)]),
    (HERMES, TOO_DEEP, [("content", TOO_DEEP)]),
    (HERMES, TOO_LONG, [("content", TOO_LONG)]),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}</tool_call> {"a": 1} x',
        [("call", "f"), ("arguments", "{}"), ("content", '{"a": 1} x')],
    ),
    (MISTRAL, "[TOOL_CALLS] [1] x", [("content", "[TOOL_CALLS] [1] x")]),
    (
        LLAMA,
        '{"name": "f", "parameters": {"x": [1, {"y": "\\"}"}]}}; {"name": "g", "parameters": {}}',
        [("call", "f"), ("arguments", '{"x": [1, {"y": "\\"}"}]}'), ("call", "g"), ("arguments", "{}")],
    ),
    (LLAMA, '{"name": "h", "parameters": {}} and', [("content", '{"name": "h", "parameters": {}} and')]),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}', [("call", "f"), ("arguments", "{}")]),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]',
        [("call", "f"), ("arguments", '{"a": "]"}'), ("call", "g"), ("arguments", "{}")],
    ),
    (
        MISTRAL,
        'Hm[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}',
        [("content", "Hm"), ("call", "f"), ("arguments", '{"a": 1}'), ("call", "g"), ("arguments", "{}")],
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}',
        [("reasoning", "Hm."), ("call", "f"), ("arguments", '{"a": 1}')],
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi <b>",
        [("reasoning", "Hm."), ("content", "Hi <b>")],
    ),
]


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize(("form", "text", "want"), TEXTS, ids=lambda value: getattr(value, "name", ""))
def test_forms(form, text, want, step):
    assert pieces(text, form, step) == want


@pytest.mark.parametrize("step", [1, 1000])
def test_reasoning_begins_in_the_prompt_or_in_the_answer(step):
    assert pieces("Hm</think> Hi", None, step, reasons=True) == [("reasoning", "Hm"), ("content", "Hi")]
    assert pieces("<think>Hm", None, step, reasons=False) == [("reasoning", "Hm")]
    assert pieces("Hi <think> Hm", None, step, reasons=False) == [("content", "Hi <think> Hm")]


def test_the_form_is_read_from_the_template():
    llama = "<|start_header_id|> Respond with parameters"
    templates = {"[TOOL_CALLS]": MISTRAL, "<|channel|>": HARMONY, "<tool_call>": HERMES, llama: LLAMA, TEMPLATE: None}
    templates |= {"<tool_call><function=f>": None, "<tool_call>f<arg_key>": None}
    assert {template: form_of(template) for template in templates} == templates


LIMITED = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/word"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "$defs": {"word": {"enum": ["x", "y"]}},
}
MUST = {"type": "function", "function": {"name": "h", "parameters": LIMITED, "strict": True}}
NAMED = {"type": "function", "function": {"name": "h"}}


@pytest.mark.parametrize(("choice", "finished"), [("required", "tool_calls"), (NAMED, "stop")], ids=["any", "named"])
def test_calls_that_must_come_fit_their_schema(server, choice, finished):
    """Of the demo, which has no chat template, and would not call anything."""
    pytest.importorskip("llguidance", reason="it reads grammars")
    body = dict(messages=[USER], tools=[MUST, OTHER], tool_choice=choice, max_tokens=60, temperature=1, seed=1,
                parallel_tool_calls=False, response_format={"type": "json_object"})  # fmt: skip
    if choice == "required":
        body["logit_bias"] = {str(server.inference.tokenizer("g").input_ids[0]): -100}
    answer = server.client.chat(**body).choices[0]
    (call,) = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (answer.finish_reason, answer.message.content, call.function.name) == (finished, None, "h")
    assert arguments.keys() == {"a", "b"} and arguments["a"] in ("x", "y")
    message, ended = streamed(server.client, **body)
    assert (message["tool_calls"], message["content"], ended) == ([["h", call.function.arguments]], "", finished)
    cut = server.client.chat(**{**body, "max_tokens": 1}).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls, cut.message.content) == ("length", None, "")


def test_several_calls_that_must_come_and_what_is_said_of_them_after(answering, server):
    text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    body = dict(messages=[USER], tools=[TOOL, OTHER], tool_choice="required")
    message, finished = streamed(answering(text, None), **body)
    assert (message["tool_calls"], finished) == ([["f", '{"a": 1}'], ["g", "{}"]], "tool_calls")
    assert message["content"] == ""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "c1", "content": "8"}]  # fmt: skip
    prompt = server.prompts.text(server.prompts.requests(read_chat({"messages": history}))[0].prompt)
    assert prompt == 'x[{"name": "f", "parameters": {"a": 1}}]\n8'


@pytest.mark.parametrize(
    ("schema", "want"),
    [
        (
            {"properties": {"a": {"$ref": "#"}}},
            {"properties": {"a": {"$ref": "#/properties/parameters"}}, "additionalProperties": False},
        ),
        ({"properties": {}, "additionalProperties": True}, {"properties": {}, "additionalProperties": True}),
        ({"properties": {}, "anyOf": [{"properties": {}}]}, {"properties": {}, "anyOf": [{"properties": {}}]}),
        ({"allOf": [{"properties": {}}]}, {"allOf": [{"properties": {}}]}),
    ],
    ids=["closed", "open", "any", "all"],
)
def test_the_schema_of_arguments(schema, want):
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    tools = read_tools(ToolFields.model_validate({"tools": [tool], "tool_choice": "required"}))
    made = answer_grammar(tools, None, None, None, lambda text: None).text
    call, _ = json.JSONDecoder().raw_decode(made, made.index("%json ") + len("%json "))
    assert call["properties"]["parameters"] == {"type": "object", **want}


STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
ONE = {"type": "function", "function": {"name": "f"}}
OK = Grammar.json_schema({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})
MARKERS = ["<tool_call>", "</tool_call>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>"]
MARKERS += ["<|message|>", "<|constrain|>", "<|end|>", "<|start|>"]


def hermes(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


LLAMA_CALL, MISTRAL_CALL = '{"name": "f", "parameters": {"a": 1}}', '{"name": "f", "arguments": {"a": 1}}'
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
HARMONY_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
A, FITS, LACKS = '{"a": 1}', hermes('{"a": 1}'), hermes("{}")
MATCHES = {
    "hermes": (HERMES, None, {}, ["", "a <b> {", f"Hi {FITS}\n{FITS} x", hermes('{"b": []}', "g")],
               [LACKS, hermes("{}", "h"), "<tool_call>I"]),
    "hermes, one": (HERMES, None, {"parallel_tool_calls": False}, [FITS], [FITS + FITS]),
    "hermes, forced": (HERMES, None, {"tool_choice": "required"}, [FITS, f"{FITS}\n{FITS}"], ["Hi", "", LACKS]),
    "hermes, named": (HERMES, None, {"tool_choice": ONE}, [FITS], [hermes("{}", "g"), FITS + FITS]),
    "hermes, thinks": (HERMES, False, {}, [f"<think>Hm</think>\n\n{FITS}", FITS], [f"<think>Hm</think>\n\n{LACKS}"]),
    "hermes, thinking": (HERMES, True, {"tool_choice": "required"},
                         [f"Hm</think>\n\n{FITS}"], [f"Hm</think>{LACKS}", "Hm"]),
    "hermes, format": (HERMES, False, {"format": OK}, ['{"ok": true}', FITS, '<think></think>\n{"ok": true}'],
                       ["Hi", LACKS]),
    "listed, thinking": (None, True, {"tool_choice": "required"},
                         [f'Hm</think>[{{"name": "f", "parameters": {A}}}]'], ["Hm</think>Hi", "[]"]),
    "llama": (LLAMA, None, {}, ["Hi {", LLAMA_CALL, f"{LLAMA_CALL}; {LLAMA_CALL}", f"Hm <|python_tag|>{LLAMA_CALL}"],
              ['{"b', "Hm <|python_tag|>x"]),
    "llama, format": (LLAMA, None, {"format": OK}, ['{"ok": true}', LLAMA_CALL], ["Hi"]),
    "mistral": (MISTRAL, None, {}, [f"Hi[TOOL_CALLS] [{MISTRAL_CALL}, {MISTRAL_CALL}]"], ["[TOOL_CALLS]f"]),
    "mistral 11": (MISTRAL_ARGS, None, {},
                   [f"[TOOL_CALLS]f[ARGS]{A}[TOOL_CALLS]g[ARGS]{{}}"], ["[TOOL_CALLS]f[ARGS]{}"]),
    "harmony": (HARMONY, None, {}, [f"{THOUGHT}{HARMONY_CALL}{A}", f"{THOUGHT}<|channel|>final<|message|>Hi <b>"],
                [f"{HARMONY_CALL}{{}}", f"{THOUGHT}Hi"]),
    "harmony, forced": (HARMONY, None, {"tool_choice": "required"}, [f"{THOUGHT}{HARMONY_CALL}{A}"],
                        [f"{THOUGHT}<|channel|>final"]),
    "harmony, format": (HARMONY, None, {"format": OK}, [f'{THOUGHT}<|channel|>final<|message|>{{"ok": true}}'],
                        [f"{THOUGHT}<|channel|>final<|message|>Hi"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(server):
    """The demo's, to which markers are text, and one that has tokens for them, with what names these."""
    plain, marked = server.inference.tokenizer, copy.deepcopy(server.inference.tokenizer)
    marked.add_special_tokens({"additional_special_tokens": MARKERS})
    return {"text": (plain, lambda text: None), "tokens": (marked, marked.get_added_vocab().get)}


@pytest.mark.parametrize("markers", ["text", "tokens"])
@pytest.mark.parametrize("case", MATCHES)
def test_what_an_answer_matches(tokenizers, case, markers):
    pytest.importorskip("llguidance", reason="it reads grammars")
    (tokenizer, token_of), (form, reasons, options, whole, wrong) = tokenizers[markers], MATCHES[case]
    asked = {name: value for name, value in options.items() if name != "format"}
    tools = read_tools(ToolFields.model_validate({"tools": [STRICT, OTHER], **asked}))
    grammar = answer_grammar(tools, form, reasons, options.get("format"), token_of)
    compiler = GrammarCompiler(tokenizer, len(tokenizer), frozenset({0}))

    def matches(text: str) -> bool:
        try:
            compiler.matcher(grammar).read([*tokenizer(text, add_special_tokens=False).input_ids, 0])
        except GrammarError:
            return False
        return True

    assert {text: matches(text) for text in [*whole, *wrong]} == {text: text in whole for text in [*whole, *wrong]}


def test_no_grammar_without_a_reason():
    tools = read_tools(ToolFields.model_validate({"tools": [TOOL, OTHER]}))
    assert answer_grammar(tools, HERMES, False, None, lambda text: None) is None
    assert answer_grammar(read_tools(ToolFields.model_validate({})), None, None, OK, lambda text: None) is OK


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["any", "named"])
def test_calls_that_must_come_have_the_form_of_the_template(server, monkeypatch, choice):
    pytest.importorskip("llguidance", reason="it reads grammars")
    monkeypatch.setattr(server.prompts, "chat_template", HERMES_TEMPLATE.replace("think", ""))
    body = dict(messages=[USER], tools=[MUST], tool_choice=choice, max_tokens=80, temperature=0, logprobs=True,
                parallel_tool_calls=False)  # fmt: skip
    answer = server.client.chat(**body).choices[0]
    (call,) = answer.message.tool_calls
    assert json.loads(call.function.arguments)["a"] in ("x", "y") and answer.message.content is None
    said = "".join(place.token for place in answer.logprobs.content)
    assert said.startswith("<tool_call>") and "</tool_call>" in said


def test_a_strict_call_that_the_model_chose_fits_its_schema(server, monkeypatch):
    pytest.importorskip("llguidance", reason="it reads grammars")
    monkeypatch.setattr(server.prompts, "chat_template", "{{ tools and 'x = ' }}{# <|start_header_id|> parameters #}")
    body = dict(messages=[USER], tools=[MUST], max_tokens=60, temperature=0, parallel_tool_calls=False)
    free = server.client.chat(**body).choices[0]
    assert free.message.tool_calls is None and free.message.content
    brace = {str(server.inference.tokenizer("{").input_ids[0]): 100}  # which begins a call
    called = server.client.chat(**body, logit_bias=brace).choices[0]
    (call,) = called.message.tool_calls
    assert called.finish_reason == "tool_calls" and json.loads(call.function.arguments)["a"] in ("x", "y")


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_before_calls_that_must_come(begun, step):
    begin = "Hm [" if begun else " <think>Hm ["
    for called, text in (("f", "{}"), (None, '[{"name": "f", "parameters": {}}]')):
        reader, text = AnswerReader(LISTED, ["f"], begun, called), f"{begin}</think>\n{text}"
        found = [part for first in range(0, len(text), step) for part in reader.push(text[first : first + step])]
        found += reader.finish()
        assert "".join(said for kind, said, _ in found if kind == "reasoning") == "Hm ["
        assert next(part for part in found if part.kind not in ("reasoning", END))[:2] == ("call", "f")
        assert "".join(said for kind, said, _ in found if kind == "arguments") == "{}"


def test_tools_reach_the_template_in_the_order_in_which_they_were_given():
    """A template writes them as JSON, and other tokens may follow from another order."""
    function = {
        "parameters": {"properties": {"b": {"description": "", "type": "string"}}, "type": "object"},
        "name": "f",
    }
    given = {"function": function, "type": "function"}
    (tool,) = read_chat(
        {"messages": [USER], "tools": [{**given, "function": {**function, "strict": None}}]}
    ).tools.offered
    assert json.dumps(tool["function"]) == json.dumps(function)


NO_NAME = {"type": "function", "function": {"description": "d"}}
NO_SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "hash"}}}
BAD = [
    ({"tools": [NO_NAME]}, "tools.0.function.name", "is missing"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "must match pattern"),
    ({"tools": [NO_SCHEMA]}, "tools.0.function.parameters.type", "must be 'object'"),
    ({"tools": [TOOL, TOOL]}, "tools", "name 'f' twice"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
        "tools.0.function.strict",
        "must be a valid boolean",
    ),
    ({"tools": [TOOL], "tool_choice": "required", "min_tokens": 1, "max_tokens": 9}, "tool_choice", "min_tokens=1"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "h"}}},
        "tool_choice",
        "one of the tools, f",
    ),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "must be 'none', 'auto' or 'required'"),
    ({"tool_choice": "auto"}, "tool_choice", "must come with tools"),
]


def test_a_schema_that_is_too_deep_is_refused(server):
    schema: dict = {}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"$defs": {"a": schema}}}}
    status, _, answer = server.client.ask(
        "/v1/chat/completions", {"messages": [USER], "tools": [tool], "tool_choice": "required"}
    )
    message = answer["error"]["message"]  # Python's limit or that of llguidance, whichever is lower
    assert status == 400 and ("too deeply" in message or "recursion limit" in message)


@pytest.mark.parametrize(("body", "param", "message"), BAD, ids=lambda value: json.dumps(value)[:40])
def test_tools_that_make_no_sense_are_refused_by_name(server, body, param, message):
    status, _, answer = server.client.ask("/v1/chat/completions", {"messages": [USER], **body})
    assert (status, answer["error"]["param"]) == (400, param) and message in answer["error"]["message"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has none"),
        (TEMPLATE, "are not read"),
        (TEMPLATE + "{{ tools }}", "this model's chat template writes calls"),
    ],
)
def test_templates_without_tools_refuse_them(answering, template, message):
    client = answering("x", template)
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat(messages=[USER], tools=[TOOL])
