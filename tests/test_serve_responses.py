"""POST /v1/responses: by the openai client, its events, and what goes on with an earlier response."""

from __future__ import annotations

import asyncio
import json

import pytest

for missing in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(missing, reason='pip install ".[serve,test]"')

import openai

from eagle_triton.engine.scheduler.requests import Piece
from eagle_triton.inference.session import Completion
from eagle_triton.inference.text import TextStream
from eagle_triton.serve import responses
from eagle_triton.serve.bodies import read_chat
from eagle_triton.serve.drafters import Drafters
from eagle_triton.serve.engine_client import Ticket
from eagle_triton.serve.errors import RequestError
from tests.test_serve import PROMPT, wait_until
from tests.test_serve_tools import CALLS, HERMES_TEMPLATE, answering, server  # noqa: F401

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.fixture
def client(server):  # noqa: F811
    return server.client


def events(client, body: dict) -> list[dict]:
    """The events of a stream, checked for what all have."""
    status, _, text = client.ask("/v1/responses", {**body, "stream": True})
    assert status == 200 and text.endswith("data: [DONE]\n\n")
    found = []
    for block in text.split("\n\n")[:-2]:
        name, _, data = block.partition("\n")
        found.append(json.loads(data[6:]))
        assert name == f"event: {found[-1]['type']}" and found[-1]["sequence_number"] == len(found) - 1
    return found


def test_a_response_is_the_answer_of_a_chat(client):
    chat = client.chat(max_tokens=12)
    response = client.openai.responses.create(model="demo", input=PROMPT, max_output_tokens=12, temperature=0)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 12 and response.usage.input_tokens == chat.usage.prompt_tokens
    parts = [{"role": "user", "content": [{"type": "input_text", "text": PROMPT}]}]
    same = client.openai.responses.create(
        model="demo", input=parts, max_output_tokens=12, temperature=0, tool_choice="auto"
    )
    assert same.output_text == response.output_text


def test_the_events_of_a_text(client):
    body = dict(input=PROMPT, max_output_tokens=12, temperature=0, metadata={"a": "b"})
    found = events(client, body)
    kinds = [one["type"].removeprefix("response.") for one in found]
    deltas = kinds.count("output_text.delta")
    assert deltas > 1 and kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    text = "".join(one["delta"] for one in found if one["type"].endswith(".delta"))
    last = found[-1]["response"]
    assert found[-4]["text"] == text == last["output"][0]["content"][0]["text"] and last["metadata"] == {"a": "b"}
    assert found[0]["response"]["status"] == "in_progress" and last["usage"]["output_tokens"] == 12
    with client.openai.responses.stream(model="demo", input=PROMPT, max_output_tokens=12, temperature=0) as stream:
        assert "".join(one.delta for one in stream if one.type == "response.output_text.delta") == text


def test_calls_and_reasoning_are_items(answering):  # noqa: F811
    client = answering(CALLS)
    response = client.openai.responses.create(model="demo", input="x", tools=[TOOL])
    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"] and response.status == "completed"
    call = response.output[2]
    assert (call.name, json.loads(call.arguments)) == ("f", {"a": 1, "b": "}"}) and response.output_text == "Let me."
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    found = events(client, dict(input="x", tools=[TOOL]))
    done = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == kinds and done == found[-1]["response"]["output"]
    arguments = [one["delta"] for one in found if one["type"] == "response.function_call_arguments.delta"]
    assert "".join(arguments) == call.arguments + "{}"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "8"}
    body = responses.read_response(
        {"input": [*(item.model_dump(exclude_none=True) for item in response.output), result]},
        responses.ResponseStore(),
    )
    first, second = body.messages
    assert first["content"] == "Let me." and first["reasoning_content"] == "Hm." and len(first["tool_calls"]) == 2
    assert second == {"role": "tool", "tool_call_id": call.call_id, "content": "8"}


INCLUDE = dict(include=["message.output_text.logprobs"], top_logprobs=2)


def test_log_probabilities_of_text(client):
    options = dict(model="demo", max_output_tokens=8, temperature=0)
    chat = client.chat(max_tokens=8, logprobs=True, top_logprobs=2)
    want = [place.model_dump() for place in chat.choices[0].logprobs.content]
    response = client.openai.responses.create(input=PROMPT, **options, **INCLUDE)
    (part,) = response.output[0].content
    assert [place.model_dump() for place in part.logprobs] == want and response.top_logprobs == 2
    found = events(client, dict(input=PROMPT, **options, **INCLUDE))
    deltas = [place for one in found if one["type"].endswith("text.delta") for place in one["logprobs"]]
    assert deltas == want == found[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert found[-4]["type"] == "response.output_text.done" and found[-4]["logprobs"] == want


def test_log_probabilities_of_reasoning_and_calls_are_left_out(answering):  # noqa: F811
    found = events(answering(CALLS), dict(input="x", tools=[TOOL], **INCLUDE))
    message = next(item for item in found[-1]["response"]["output"] if item["type"] == "message")
    said = "".join(place["token"] for place in message["content"][0]["logprobs"])
    assert said.strip().startswith("Let me.") and "Hm" not in said and "name" not in said


TEMPLATES = {
    "none": None,
    "hermes": HERMES_TEMPLATE,
    "llama": "{{ tools }}{# <|start_header_id|> parameters #}",
    "mistral": "{{ tools }}{# [TOOL_CALLS] #}",
    "harmony": "{{ tools }}{# <|channel|> #}",
}
LOOK = 'Let me look. <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\nDone now.'
LLAMA_CALL = '{"name": "f", "parameters": {"a": 1}}text'
HARMONY_CALL = '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|><|start|>assistant'
STEPS = [1, 2, 3, 12, None]  # tokens of a piece; None: not streamed


@pytest.fixture
def answered(server, monkeypatch):  # noqa: F811
    """Answer with some text in one of the forms. Returns the output, and the items when they were done."""

    def answer(form: str, text: str, step: int | None, finished: str = "stop", **options):
        monkeypatch.setattr(server.prompts, "chat_template", TEMPLATES[form])
        tools = {} if TEMPLATES[form] is None else {"tools": [TOOL]}
        store, tokenizer = responses.ResponseStore(), server.prompts.tokenizer
        body = responses.read_response({"input": "x", **tools, **INCLUDE, **options}, store)
        (request,) = server.prompts.requests(body)
        answer = responses.ResponseAnswer(body, [request], "demo", server.prompts, Drafters(None, None), store)
        tokens, stream = tokenizer(text).input_ids, TextStream(tokenizer)
        completion = Completion(0, request.prompt, tokens, text, finished, logprobs=[-0.5] * len(tokens))
        if step is None:
            output = answer.whole([completion])["output"]
            return output, output
        sent = b""
        for first in range(0, len(tokens), step):
            some = tokens[first : first + step]
            piece = Piece(0, request, some, stream.push(*some), [-0.5] * len(some), certain_tokens=first + len(some))
            if first + step >= len(tokens):
                piece.text += stream.finish()
                piece.completion, piece.finished = completion, finished
            sent += b"".join(answer.chunk(0, piece))
        found = [json.loads(block.partition("\n")[2][6:]) for block in sent.decode().split("\n\n")[:-2]]
        output = found[-1]["response"]["output"]
        deltas = [place for one in found if one["type"] == "response.output_text.delta" for place in one["logprobs"]]
        messages = [item["content"][0] for item in output if item["type"] == "message"]
        assert deltas == [place for part in messages for place in part["logprobs"]]
        return output, [one["item"] for one in found if one["type"] == "response.output_item.done"]

    return answer


def short(output: list[dict]) -> list[tuple[str, ...]]:
    """Items without ids: their kind and what they say, and the status of those that are not completed."""
    found = []
    for item in output:
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        found.append((item["type"], said, *([] if item["status"] == "completed" else [item["status"]])))
    return found


CALL, DONE = ("function_call", '{"a": 1}'), ("message", "Done now.")
ORDERS = {
    "a call between texts": ("hermes", LOOK, "stop", [("message", "Let me look."), CALL, DONE]),
    "text after a call": ("llama", LLAMA_CALL, "stop", [CALL, ("message", "text")]),
    "text after a list": (
        "mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]text', "stop", [CALL, ("message", "text")],
    ),
    "two messages": (
        "harmony",
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look. <|end|>"
        f"<|start|>assistant{HARMONY_CALL}<|channel|>final<|message|>Done now.",
        "stop",
        [("reasoning", "Hm."), ("message", "I look."), CALL, DONE],
    ),
    "text is cut": ("hermes", LOOK, "length", [("message", "Let me look."), CALL, (*DONE, "incomplete")]),
    "space is cut": ("hermes", LOOK[:-9], "length", [("message", "Let me look."), CALL]),
    "a call is cut": (
        "hermes", LOOK[: LOOK.index(" 1}")], "length",
        [("message", "Let me look."), ("function_call", '{"a":', "incomplete")],
    ),
    "a header is cut": ("harmony", HARMONY_CALL + "<|channel|>fi", "length", [CALL]),
    "reasoning is cut": ("hermes", "<think>Hm", "length", [("reasoning", "Hm", "incomplete")]),
    "reasoning has ended": ("hermes", "<think>Hm</think>\n", "length", [("reasoning", "Hm")]),
    "no form": ("none", "Done now.", "length", [(*DONE, "incomplete")]),
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("form", "text", "finished", "want"), ORDERS.values(), ids=ORDERS)
def test_items_come_in_the_order_of_the_text(answered, form, text, finished, want, step):
    """However many tokens a step gives, and without a stream."""
    output, done = answered(form, text, step, finished)
    assert short(output) == want and done == output


def test_only_one_call_is_an_item(answered):
    text = LOOK.replace("\nDone", f"{LOOK[13:-9]}Done")
    for step in STEPS:
        output, _ = answered("hermes", text, step, "length", parallel_tool_calls=False)
        assert short(output) == [("message", "Let me look."), CALL, (*DONE, "incomplete")]
        output, _ = answered("hermes", text[:-18], step, "length", parallel_tool_calls=False)
        assert short(output) == [("message", "Let me look."), CALL]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<>password < <tool_ca <b>"),
        ("hermes", "<think>Hm</think>\n\n<>password"),
        ("hermes", "a <tool_call>[1] é 漢 <"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>{"b": 1} x'),
        ("llama", '{"x": 2}'),
        ("llama", ' {"name": "h", "parameters": {}} and'),
        ("mistral", "[TOOL_CALLS] [1] x"),
        ("harmony", "<|channel|>final<|message|>Hi <b> <|"),
        ("none", "a < é"),
    ],
)
def test_log_probabilities_of_text_that_was_held_back(answered, form, text, step):
    """All tokens of the message's text are listed, and no others."""
    (item,) = [one for one in answered(form, text, step)[0] if one["type"] == "message"]
    (part,) = item["content"]
    said = bytes(byte for place in part["logprobs"] for byte in place["bytes"]).decode()
    assert said.strip() == part["text"].strip() and part["text"].strip()


def test_a_format_and_a_call_that_must_come(client):
    pytest.importorskip("llguidance", reason="it reads grammars")
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    options = dict(model="demo", input=PROMPT, max_output_tokens=30, temperature=0)
    response = client.openai.responses.create(text={"format": form}, **options)
    assert json.loads(response.output_text)["a"] in ("x", "y") and response.status == "completed"
    assert response.text.format.schema_ == schema
    tool = {"type": "function", "name": "f", "parameters": schema, "strict": True}
    for choice in ("required", {"type": "function", "name": "f"}):
        found = events(client, {**options, "tools": [tool], "tool_choice": choice})
        last = found[-1]["response"]
        (call,) = last["output"]
        assert (call["type"], call["name"], last["status"]) == ("function_call", "f", "completed")
        assert json.loads(call["arguments"])["a"] in ("x", "y")
        deltas = [one["delta"] for one in found if one["type"].endswith("arguments.delta")]
        assert "".join(deltas) == call["arguments"]
    cut = client.openai.responses.create(
        **{**options, "max_output_tokens": 4}, tools=[tool], tool_choice={"type": "function", "name": "f"}
    )
    assert (cut.status, cut.output[0].status) == ("incomplete", "incomplete")
    after = client.openai.responses.create(**options, previous_response_id=cut.id)  # goes on without that call
    twice = client.openai.responses.create(**{**options, "input": [{"role": "user", "content": PROMPT}] * 2})
    assert after.output_text == twice.output_text


def test_a_response_goes_on_with_another(client, server):  # noqa: F811
    create, options = client.openai.responses.create, dict(model="demo", max_output_tokens=6, temperature=0)
    first = create(input=PROMPT, instructions="# brief\n", **options)
    second = create(input="\ndef f():", previous_response_id=first.id, **options)
    talk = [("user", PROMPT), ("assistant", first.output_text), ("user", "\ndef f():")]
    chat = read_chat({"messages": [{"role": role, "content": content} for role, content in talk]})
    assert second.usage.input_tokens == len(server.prompts.requests(chat)[0].prompt)
    assert client.openai.responses.retrieve(second.id).output_text == second.output_text
    client.openai.responses.delete(first.id)
    for gone in (first.id, create(input=PROMPT, store=False, **options).id):
        with pytest.raises(openai.NotFoundError, match="not found"):
            create(input="x", previous_response_id=gone, **options)


def test_the_input_of_a_response_is_listed_and_counted(client):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
    result = {"type": "function_call_output", "call_id": "c", "output": "8"}
    given = [{"role": "user", "content": PROMPT}, call, result, {"role": "assistant", "content": "x", "phase": None}]
    options = dict(model="demo", max_output_tokens=1, temperature=0)
    response = client.openai.responses.create(input=given, **options)
    listed = [item.model_dump(exclude_unset=True) for item in client.openai.responses.input_items.list(response.id)]
    assert [item.pop("id").partition("_")[0] for item in listed] == ["msg", "fco", "fc", "msg"]
    ends = {"status": "completed"}
    said, heard = {"type": "output_text", "text": "x", "annotations": []}, {"type": "input_text", "text": PROMPT}
    assert listed[::-1] == [
        {"type": "message", "role": "user", "content": [heard], **ends},
        {**call, **ends},
        {**result, **ends},
        {"type": "message", "role": "assistant", "content": [said], **ends},
    ]
    one = client.openai.responses.input_items.list(response.id, order="asc", limit=1)
    assert one.has_more and [item.type for item in one.data] == ["message"] and len(list(one)) == 4
    for query, param in ((dict(limit=0), "limit"), (dict(after="x"), "after"), (dict(order="up"), "order")):
        with pytest.raises(openai.BadRequestError) as refused:
            client.openai.responses.input_items.list(response.id, **query)
        assert refused.value.param == param
    count = client.openai.responses.input_tokens.count(model="demo", input=given)
    assert count.input_tokens == response.usage.input_tokens
    after = client.openai.responses.input_tokens.count(model="demo", input="y", previous_response_id=response.id)
    assert after.input_tokens > count.input_tokens
    with pytest.raises(openai.BadRequestError, match="compact is not offered"):
        client.openai.responses.compact(model="demo", input="x")


def ended(client, name: str) -> openai.types.responses.Response:
    """A response of the background, once it has ended."""
    wait_until(lambda: client.openai.responses.retrieve(name).status not in ("queued", "in_progress"), 60)
    return client.openai.responses.retrieve(name)


def test_a_response_in_the_background(client):
    body = dict(model="demo", input=PROMPT, max_output_tokens=12, temperature=0)
    queued = client.openai.responses.create(**body, background=True)
    assert (queued.status, queued.background, queued.output, queued.usage) == ("queued", True, [], None)
    at_once = client.openai.responses.create(**body)
    later = ended(client, queued.id)
    assert (later.status, later.output_text) == ("incomplete", at_once.output_text) and later.background
    assert client.openai.responses.cancel(queued.id).status == "incomplete"  # it has ended already
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.openai.responses.cancel(at_once.id)


def test_a_response_in_the_background_can_be_cancelled(client):
    """Its slot is free then, and nothing goes on with it before."""
    body = dict(model="demo", input=PROMPT, temperature=0, background=True)
    queued = client.openai.responses.create(**body)
    with pytest.raises(openai.BadRequestError, match="names a response that still runs"):
        client.openai.responses.create(model="demo", input="x", previous_response_id=queued.id)
    aborted = client.metric("vllm:request_success_total", finished_reason="abort")
    assert client.openai.responses.cancel(queued.id).status == "cancelled"
    assert ended(client, queued.id).status == "cancelled"
    dropped = client.openai.responses.create(**body)
    client.openai.responses.delete(dropped.id)
    with pytest.raises(openai.NotFoundError):
        client.openai.responses.retrieve(dropped.id)
    wait_until(lambda: client.metric("vllm:request_success_total", finished_reason="abort") == aborted + 2)
    assert client.metric("vllm:num_requests_running") == 0


def test_a_response_that_is_no_longer_kept_does_not_go_on(monkeypatch):
    async def fill(store: responses.ResponseStore) -> None:
        goes_on = asyncio.ensure_future(asyncio.sleep(60))
        store.put(responses.Kept({"id": "resp_first"}, [], [], goes_on))
        store.put(responses.Kept({"id": "resp_second"}, [], []))
        store.put(responses.Kept({"id": "resp_third"}, [], []))
        with pytest.raises(asyncio.CancelledError):
            await goes_on
        for name in ("resp_second", "resp_third"):
            assert store.get(name).response == {"id": name}
        with pytest.raises(RequestError, match="Response with id 'resp_first' not found"):
            store.get("resp_first")

    monkeypatch.setattr(responses, "KEPT", 2)
    asyncio.run(fill(responses.ResponseStore()))


@pytest.mark.parametrize(
    ("given", "why"),
    [(RequestError(500, "the engine has failed"), "the engine has failed"), (None, "see its log")],
)
def test_a_response_that_fails_in_the_background_says_why(client, server, monkeypatch, given, why):  # noqa: F811
    def submit(requests):
        tickets = [Ticket(request) for request in requests]
        tickets[0].pieces.put_nowait(given)
        return tickets

    monkeypatch.setattr(server.engine, "submit", submit)
    queued = client.openai.responses.create(model="demo", input="x", background=True)
    failed = ended(client, queued.id)
    assert (failed.status, failed.error.code) == ("failed", "server_error") and why in failed.error.message


BAD = [
    ({}, "input", "is missing"),
    ({"input": "x", "max_tokens": 5}, "max_tokens", "is an unknown field"),
    ({"input": [{"type": "image"}]}, "input.0", "input.0 must have one of the types 'message'"),
    ({"input": [{"role": "user"}]}, "input.0.content", "is missing"),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
        "input.0.arguments",
        "must be JSON",
    ),
    ({"input": [{"role": "king", "content": "x"}]}, "input.0.role", "must be 'system'"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input.0.content.0.type",
        "must be 'input_text'",
    ),
    ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "is missing"),
    ({"input": "x", "text": {"format": {"type": "yaml"}}}, "text.format", "must have one of the types 'text'"),
    ({"input": "x", "text": {"verbosity": "low"}}, "text.verbosity", "not offered"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0.type", "must be 'function'"),
    (
        {"input": "x", "tools": [{**TOOL, "parameters": {"type": "array"}}]},
        "tools.0.parameters.type",
        "must be 'object'",
    ),
    ({"input": "x", "background": True, "store": False}, "background", "can only be used when `store` is true"),
    ({"input": "x", "background": True, "stream": True}, "background", "must come without stream=true"),
    ({"input": "x", "top_logprobs": 2}, "top_logprobs", "must come with include"),
    ({"input": "x", "include": ["reasoning.encrypted_content"]}, "include.0", "message.output_text.logprobs"),
    ({"input": "x", "previous_response_id": "bad"}, "previous_response_id", "begins with resp_"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice", "must come with tools"),
    ({"input": "x", "max_output_tokens": 10**6}, "input", "maximum context length"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD, ids=lambda value: json.dumps(value)[:40])
def test_what_makes_no_sense_is_refused_by_its_name(client, body, param, message):
    status, _, answer = client.ask("/v1/responses", body)
    assert (status, answer["error"]["param"]) == (400, param) and message in answer["error"]["message"]
