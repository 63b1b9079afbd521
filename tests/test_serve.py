"""The server: the openai client's own calls, bodies that make no sense, keys, queues, who leaves, faults, its end."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from eagle_triton import EAGLEConfig, EAGLEInference, EaModel
from eagle_triton.cli import main as cli
from eagle_triton.demo import demo_prompts
from eagle_triton.serve import engine_process
from eagle_triton.serve import main as serve

for missing in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(missing, reason='pip install ".[serve,test]"')

import openai
import uvicorn

from eagle_triton.engine.drafts.block import BlockDraft
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.inference import Session, SpeculativeConfig
from eagle_triton.inference.session import StepInfo
from eagle_triton.serve.answers import Answer
from eagle_triton.serve.app import LONG, MAX_BYTES, Service, make_app
from eagle_triton.serve.bodies import read_chat, read_completion
from eagle_triton.serve.drafters import Drafters
from eagle_triton.serve.engine_client import EngineClient
from eagle_triton.serve.engine_process import EngineLostError, EngineProcess, Served
from eagle_triton.serve.errors import RequestError
from eagle_triton.serve.metrics import Metrics
from eagle_triton.serve.prompts import PromptReader
from tests.forked import CONTEXT, ForkedProgram, start_program
from tools import time_server

ROOT = Path(__file__).resolve().parents[1]
POISON = 3000  # a token behind which the target's logits are NaN
PROMPT = "import os\nimport sys\n\n\ndef main(argv):\n"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'assistant: ' }}"


class Client:
    """Bodies as bytes, for what the openai client would not send."""

    def __init__(self, port: int, key: str | None = None) -> None:
        self.port, self.key = port, key
        base = f"http://127.0.0.1:{port}/v1"
        self._options = dict(base_url=base, api_key=key or "none", max_retries=0)
        self.openai = openai.OpenAI(**self._options)

    @property
    def asynchronous(self) -> openai.AsyncOpenAI:
        """A new one, which belongs to an event loop."""
        return openai.AsyncOpenAI(**self._options)

    def complete(self, **options):
        """A completion by the openai client; of PROMPT and greedy, if the options say nothing else."""
        return self.openai.completions.create(**dict(model="demo", prompt=PROMPT, temperature=0) | options)

    def chat(self, **options):
        """The same of a chat."""
        messages = [{"role": "user", "content": PROMPT}]
        return self.openai.chat.completions.create(**dict(model="demo", messages=messages, temperature=0) | options)

    def ask(self, path: str, body: bytes | dict | None = None, method: str | None = None, **headers: str):
        """(status, headers, body as JSON or text)."""
        if isinstance(body, dict):
            body = json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if body is not None else {}
        if self.key:
            sent["Authorization"] = f"Bearer {self.key}"
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, body, sent)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        is_json = (answer.headers.get("content-type") or "").startswith("application/json")
        return answer.status, dict(answer.headers), json.loads(text) if is_json else text

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's values whose labels are these."""
        total = 0.0
        for line in self.ask("/metrics")[2].splitlines():
            what, _, value = line.rpartition(" ")
            if what.split("{")[0] == name and all(f'{label}="{text}"' in what for label, text in labels.items()):
                total += float(value)
        return total


@contextmanager
def answering(app, **config) -> Iterator[int]:
    """A web server in a thread; its port."""
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, ws="none", **config))
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        bound.close()


@contextmanager
def serving(inference: EAGLEInference, *, rows: int = 512, max_queue: int = 64, template: str | None = None, **options):
    """A server in a thread; its client, and the engine's thread."""
    metrics = Metrics("demo")
    engine = EngineClient(lambda: inference.session(rows), metrics, inference.config.slots, max_queue)
    prompts = PromptReader(Served.read(inference), rows, template)
    app = make_app(Service(engine, prompts, Drafters.read(inference), "demo", **options))
    engine.start()
    try:
        with answering(app) as port:
            client = Client(port, options.get("api_key"))
            yield SimpleNamespace(client=client, engine=engine, inference=inference, prompts=prompts)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def inference() -> EAGLEInference:
    model = EaModel.from_pretrained("demo")
    model.base_model.model.embed_tokens.weight.data[POISON] = float("nan")
    return EAGLEInference(None, model, EAGLEConfig(temperature=1.0, slots=4, fallback=False))


@pytest.fixture(scope="module")
def server(inference) -> Iterator[SimpleNamespace]:
    with serving(inference) as running:
        yield running


@pytest.fixture
def client(server) -> Client:
    return server.client


@pytest.fixture(scope="module")
def alone(inference, server):
    """What the engine gives a prompt without a server and without neighbours, in a process whose engine is another."""
    other, known = EAGLEInference(None, inference.pair.target_model, EAGLEConfig(temperature=1.0)), {}

    def decode(prompt, max_tokens, **options):
        key = str((prompt, max_tokens, sorted(options.items())))
        if key not in known:
            known[key] = other.generate(prompt, max_tokens, **options)[1].completions[0]
        return known[key]

    return decode


def wait_until(holds, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


# --- the client's own calls ---


def test_a_completion_is_what_the_engine_gives(client, alone):
    answer = client.complete(max_tokens=30)
    want = alone(PROMPT, 30, temperature=0.0)
    assert answer.choices[0].text == want.text and answer.choices[0].finish_reason == want.finished
    assert answer.usage.completion_tokens == len(want.tokens)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(want.tokens)
    assert answer.model == "demo" and answer.object == "text_completion" and answer.id.startswith("cmpl-")


def test_a_stream_is_the_completion_in_pieces(client, alone):
    chunks = list(client.complete(max_tokens=30, stream=True, stream_options={"include_usage": True}))
    want = alone(PROMPT, 30, temperature=0.0)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == want.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + [want.finished]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(want.tokens)
    assert all(chunk.usage is None for chunk in chunks[:-1]) and len({chunk.id for chunk in chunks}) == 1
    assert 2 < len(chunks) < len(want.tokens)  # several tokens come at a time


def test_chat_and_its_stream(client):
    answer = client.chat(max_tokens=16)
    assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant"
    chunks = list(client.chat(max_tokens=16, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].object == "chat.completion.chunk"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content != ""
    assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason == "length"


def test_an_answer_is_sent_back_as_it_came(client):
    """What the client's own users do with each turn: they append the message that they got."""
    talk: list = [{"role": "user", "content": PROMPT}]
    for whole in (False, True):  # as the client sends its own class, and with all fields that the class has
        message = client.chat(messages=talk, max_tokens=8).choices[0].message
        talk += [message.model_dump() if whole else message, {"role": "user", "content": "\ndef main():"}]
    assert client.chat(messages=talk, max_tokens=8).usage.completion_tokens == 8


def test_the_asynchronous_client(client, alone):
    async def ask():
        options = dict(model="demo", prompt=PROMPT, max_tokens=12, temperature=0.8, seed=5)
        async with client.asynchronous as made:
            whole, stream = await asyncio.gather(
                made.completions.create(**options), made.completions.create(**options, stream=True)
            )
            return whole.choices[0].text, "".join([chunk.choices[0].text async for chunk in stream])

    whole, pieces = asyncio.run(ask())
    assert whole == pieces == alone(PROMPT, 12, temperature=0.8, seed=5).text


def test_token_ids_as_a_prompt(client, alone):
    ids = alone(PROMPT, 1).prompt.tolist()
    for prompt in (ids, [ids], [PROMPT]):
        answer = client.complete(prompt=prompt, max_tokens=8)
        assert answer.choices[0].text == alone(PROMPT, 8, temperature=0.0).text


def test_defaults_are_those_of_the_endpoints(client):
    """A temperature of 1, 16 tokens of a completion, and of a chat as many as there is room for."""
    options = dict(seed=1, extra_body={"ignore_eos": True})
    answer = client.openai.completions.create(model="demo", prompt=PROMPT, **options)
    same = client.complete(temperature=1, max_tokens=16, **options)
    assert answer.choices[0].text == same.choices[0].text and answer.usage.completion_tokens == 16
    messages = [{"role": "user", "content": PROMPT * 36}]
    safe = {str(POISON): -100}  # which one of so many sampled tokens is, now and then
    long = client.openai.chat.completions.create(
        model="demo", messages=messages, logit_bias=safe, extra_body={"ignore_eos": True}
    )
    assert long.usage.total_tokens == 512 and long.choices[0].finish_reason == "length"


OPTIONS = {
    "top_p": (dict(temperature=1.0, seed=3, top_p=0.6), {}),
    "top_k": (dict(temperature=1.0, seed=3), dict(top_k=3)),
    "min_p": (dict(temperature=1.0, seed=3), dict(min_p=0.2)),
    "repetition_penalty": (dict(temperature=0.0), dict(repetition_penalty=1.3)),
    "presence_penalty": (dict(temperature=0.0, presence_penalty=1.5), {}),
    "frequency_penalty": (dict(temperature=1.0, seed=3, frequency_penalty=-2.0), {}),
    "logit_bias": (dict(temperature=0.0, logit_bias={"30": 12, "31": -100}), {}),
}


def test_sampling_options_reach_the_engine(client, alone):
    with ThreadPoolExecutor(len(OPTIONS)) as pool:
        asked = [
            pool.submit(client.complete, max_tokens=12, **own, extra_body=extra) for own, extra in OPTIONS.values()
        ]
    for (own, extra), answer in zip(OPTIONS.values(), asked, strict=True):
        options, text = {**own, **extra}, answer.result().choices[0].text
        if "logit_bias" in options:
            options["logit_bias"] = {int(token): value for token, value in options["logit_bias"].items()}
        assert text == alone(PROMPT, 12, **options).text
        plain = {key: value for key, value in options.items() if key in ("temperature", "seed")}
        assert text != alone(PROMPT, 12, **plain).text


def test_stops(client, alone):
    whole = alone(PROMPT, 30, temperature=0.0)
    stop = whole.text[9:13]
    for given in (stop, ["never there", stop]):
        answer = client.complete(max_tokens=30, stop=given)
        assert answer.choices[0].text == whole.text[: whole.text.find(stop)]
        assert answer.choices[0].finish_reason == "stop" and answer.choices[0].stop_reason == stop
        assert answer.choices[0].matched_stop == stop
    *_, last = client.complete(max_tokens=30, stop=[stop], stream=True)
    assert last.choices[0].stop_reason == stop
    token = whole.tokens[5]
    answer = client.complete(max_tokens=30, extra_body={"stop_token_ids": [token]})
    assert answer.usage.completion_tokens == whole.tokens.index(token) + 1
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].stop_reason == token


def test_ignore_eos(client):
    """The demo's end of text, made likely."""
    options = dict(max_tokens=12, logit_bias={"0": 100})
    ended = client.complete(**options).choices[0]
    assert ended.finish_reason == "stop" and (ended.stop_reason, ended.matched_stop) == (None, 0)
    answer = client.complete(**options, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 12
    assert answer.choices[0].matched_stop is None


def test_min_tokens(client):
    options = dict(max_tokens=12, logit_bias={"0": 100})
    assert client.complete(**options).usage.completion_tokens == 1
    answer = client.complete(**options, extra_body={"min_tokens": 7})
    assert answer.usage.completion_tokens == 8 and answer.choices[0].finish_reason == "stop"


def test_log_probabilities(client, alone):
    want = alone(PROMPT, 10, temperature=0.0, logprobs=True)
    got = client.complete(max_tokens=10, logprobs=0)
    logprobs = got.choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx(want.logprobs, abs=1e-4)
    assert "".join(logprobs.tokens) == want.text == got.choices[0].text
    for place, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert want.text[place:].startswith(token)
    chunks = client.chat(max_tokens=10, logprobs=True, stream=True)
    listed = [one for chunk in chunks if (found := chunk.choices[0].logprobs) for one in found.content]
    assert [one.logprob for one in listed] == pytest.approx(want.logprobs, abs=1e-4)
    assert b"".join(bytes(one.bytes) for one in listed).decode() == want.text


def test_a_stream_holds_back_the_tokens_of_a_stop_string(client, alone):
    """Its log-probabilities and its usage are the whole answer's, and never take anything back."""
    text = alone(PROMPT, 30, temperature=0.0).text
    usage = {"include_usage": True, "continuous_usage_stats": True}
    for begin in range(2, 26, 6):
        options = dict(max_tokens=30, logprobs=0, stop=text[begin : begin + 12])
        whole = client.complete(**options)
        chunks = list(client.complete(**options, stream=True, stream_options=usage))
        listed = [found for chunk in chunks[:-1] if (found := chunk.choices[0].logprobs)]
        want = whole.choices[0].logprobs
        assert [token for one in listed for token in one.tokens] == want.tokens
        assert [value for one in listed for value in one.token_logprobs] == pytest.approx(want.token_logprobs, abs=1e-4)
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == whole.usage.completion_tokens


def test_a_stream_says_what_was_drafted(client, alone):
    body = dict(prompt=PROMPT, max_tokens=30, temperature=0, stream=True, stream_options={"include_drafts": True})
    events = [line[6:] for line in client.ask("/v1/completions", body)[2].splitlines() if line]
    assert events.pop() == "[DONE]"
    steps = [step for event in events if (step := json.loads(event).get("drafts"))]
    assert "".join(text for step in steps for text, _ in step["tokens"]) == alone(PROMPT, 30, temperature=0.0).text
    first, *steps = steps  # behind the prompt
    assert (first["emitted"], first["accepted"], first["proposed"]) == (1, 0, 0) and first["verified"] is False
    assert first["drafter"] is None and [drafter for _, drafter in first["tokens"]] == [None]
    assert all(step["proposed"] == 7 and step["drafter"] == "eagle" and step["verified"] is True for step in steps)
    for step in steps[:-1]:
        assert [drafter for _, drafter in step["tokens"]] == ["eagle"] * step["accepted"] + [None]


def test_models(client):
    (listed,) = client.openai.models.list().data
    assert (listed.id, listed.root) == ("demo", "demo") and client.openai.models.retrieve("demo").max_model_len == 512
    with pytest.raises(openai.NotFoundError, match="model 'gpt' is not served here, but 'demo'"):
        client.openai.models.retrieve("gpt")
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.complete(model="gpt")


def test_a_chat_template(inference):
    reader = PromptReader(Served.read(inference), 512, TEMPLATE)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "import os"}]
    got = reader.requests(read_chat({"messages": messages}))[0].prompt.tolist()
    text = "system: Be brief.\nuser: import os\nassistant: "
    assert got == inference.tokenizer(text, add_special_tokens=False).input_ids
    refusing = PromptReader(Served.read(inference), 512, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="messages are refused by the chat template: roles must alternate"):
        refusing.requests(read_chat({"messages": messages}))


def test_a_base_model_reads_a_conversation_as_text(inference):
    reader = PromptReader(Served.read(inference), 512)
    said = [("user", "import os"), ("assistant", "\nimport sys"), ("user", [{"type": "text", "text": "x = "}])]
    body = read_chat({"messages": [{"role": role, "content": content} for role, content in said]})
    assert reader.requests(body)[0].prompt.tolist() == inference.tokenizer("import os\nimport sys\nx = ").input_ids


# --- what makes no sense ---

CHAT = {"messages": [{"role": "user", "content": "x"}]}


def chat(content, role: str = "user", **fields) -> dict:
    """A chat of one message."""
    return {"messages": [{"role": role, "content": content, **fields}]}


def in_parts(**part) -> dict:
    """A chat of one message with one part."""
    return chat([part])


def without_reasoning(field: str) -> dict:
    return {**CHAT, "separate_reasoning": False, field: False}


BAD = [
    ({}, "prompt", "prompt is missing"),
    ({"prompt": ""}, "prompt", "that is not empty"),
    ({"prompt": 5}, "prompt", "prompt must be a string"),
    ({"prompt": [1, -1]}, "prompt", "prompt must be"),
    ({"prompt": [1, True]}, "prompt", "prompt must be"),
    ({"prompt": [99999]}, "prompt", "prompt: token ids out of range"),
    ({"prompt": ["a", ""]}, "prompt.1", "must be a string or a list of token ids that is not empty, got ''"),
    ({"prompt": [[1], "a", [2.5]]}, "prompt.2", "prompt.2 must be"),
    ({"prompt": "x", "max_token": 5}, "max_token", "max_token is an unknown field, did you mean max_tokens?"),
    ({"prompt": "x", "max_completion_tokens": 5}, "max_completion_tokens", "did you mean max_tokens?"),
    ({"prompt": "x", "guided_json": {}}, "guided_json", "unknown field, did you mean structured_outputs?"),
    ({"prompt": "x", "messages": []}, "messages", "messages is an unknown field"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens", "max_tokens must be greater than or equal to 0, got -1"),
    ({"prompt": [1] * 512, "max_tokens": 0, "echo": True, "logprobs": 1}, "prompt", "context length is 512 tokens"),
    ({"prompt": "x", "max_tokens": "5"}, "max_tokens", 'got "5"'),
    ({"prompt": "x", "max_tokens": 5.5}, "max_tokens", "got 5.5"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens", "got true"),
    ({"prompt": "x", "max_tokens": 512}, "prompt", "512 tokens: the prompt has 1, and the request asks for 512"),
    ({"prompt": "x " * 600}, "prompt", "context length is 512 tokens: the prompt has"),
    ({"prompt": "x", "min_tokens": -1}, "min_tokens", "min_tokens must be greater than or equal to 0, got -1"),
    ({"prompt": "x", "min_tokens": 17}, "min_tokens", "min_tokens must be at most max_tokens, 16, got 17"),
    ({"prompt": "x", "temperature": -1}, "temperature", "temperature must be greater than or equal to 0, got -1"),
    ({"prompt": "x", "temperature": "hot"}, "temperature", 'temperature must be a valid number, got "hot"'),
    ({"prompt": "x", "temperature": 10**400}, "temperature", "temperature must be a valid number"),
    ({"prompt": "x", "temperature": 1e39}, "temperature", "that float32 holds"),
    ({"prompt": "x", "top_p": 10**400}, "top_p", "top_p must be a valid number"),
    ({"prompt": "x", "top_p": 0}, "top_p", "top_p must be greater than 0, got 0"),
    ({"prompt": "x", "top_p": 1.5}, "top_p", "got 1.5"),
    ({"prompt": "x", "top_k": -2}, "top_k", "top_k must be greater than or equal to -1, got -2"),
    ({"prompt": "x", "top_k": 2**31}, "top_k", "top_k must be an integer >= 0 (0: off) that 32 bits hold"),
    ({"prompt": "x", "top_k": 10**400}, "top_k", "that 32 bits hold"),
    ({"prompt": "x", "min_p": 2}, "min_p", "min_p must be less than or equal to 1, got 2"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", "must be greater than 0"),
    ({"prompt": "x", "repetition_penalty": 1e39}, "repetition_penalty", "that float32 holds"),
    ({"prompt": "x", "repetition_penalty": 1e-300}, "repetition_penalty", "that float32 holds"),
    ({"prompt": "x", "return_tokens_as_token_ids": True}, "return_tokens_as_token_ids", "must come with logprobs"),
    (
        {"prompt": "x", "stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "must come with include_usage=true",
    ),
    (without_reasoning("include_reasoning"), "separate_reasoning", "must be true with include_reasoning=false"),
    (without_reasoning("stream_reasoning"), "separate_reasoning", "must be true with stream_reasoning=false"),
    ({"prompt": "x", "seed": 2**63}, "seed", "seed must be less than 9223372036854775808"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias.a", "must match pattern"),
    ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias.1", "must be less than or equal to 100, got 101"),
    ({"prompt": "x", "logit_bias": {"1": 10**400}}, "logit_bias.1", "must be a valid number"),
    ({"prompt": "x", "logit_bias": {"1": 1, "01": 2}}, "logit_bias", "names a token twice"),
    ({"prompt": "x", "logit_bias": {"5000": 1}}, "logit_bias", "tokens must lie in 0..4095"),
    ({"prompt": "x", "stop": ""}, "stop", "stop must have at least 1 character or must be a valid list"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16"),
    ({"prompt": "x", "stop_token_ids": [4096]}, "stop_token_ids", "stop_token_ids must lie in 0..4095"),
    ({"prompt": "x", "stop_token_ids": 5}, "stop_token_ids", "must be a valid list, got 5"),
    ({"prompt": "x", "logprobs": 21}, "logprobs", "logprobs must be less than or equal to 20 or must be False, got 21"),
    ({"prompt": "x", "logprobs": True}, "logprobs", "logprobs must be a valid integer or must be False, got true"),
    ({"prompt": "x", "n": 129}, "n", "n must be less than or equal to 128, got 129"),
    ({"prompt": "x", "n": 100}, "n", "prompts and samples make 100 answers, but the server has room for at most 68"),
    ({"prompt": "x", "n": True}, "n", "n must be a valid integer, got true"),
    ({"prompt": "x", "n": 3, "best_of": 2}, "best_of", "best_of must be at least n, 3, got 2"),
    ({"prompt": "x", "best_of": 2, "stream": True}, "best_of", "best_of must equal n with stream=true"),
    ({"prompt": "x", "service_tier": "flex"}, "service_tier", "must be 'auto' or 'default'"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "not offered"),
    ({"prompt": "x", "presence_penalty": 2.5}, "presence_penalty", "must be less than or equal to 2"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "must come with stream=true"),
    ({"prompt": "x", "stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "is an unknown field"),
    ({"prompt": "x", "stream": 1}, "stream", "stream must be a valid boolean, got 1"),
    ({"prompt": "x", "user": 7}, "user", "user must be a valid string"),
    ({"messages": []}, "messages", "must have at least 1 item"),
    ({"messages": "hello"}, "messages", "must be a valid list"),
    ({"messages": ["hello"]}, "messages.0", "must be an object"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "messages.0.content is missing"),
    (chat("x", "tool"), "messages.0.tool_call_id", "is missing"),
    (chat("x", ""), "messages.0.role", "must have at least 1 character"),
    (chat(""), "messages", "messages must give at least one token"),
    (chat("x", name="a"), "messages.0.name", "needs a chat template"),
    (chat("x", nam="a"), "messages.0.nam", "needs a chat template"),
    (chat("x", n=1), "messages.0.n", "needs a chat template"),
    (chat("x", "assistant", tool_calls=[{}]), "messages.0.tool_calls.0.id", "is missing"),
    (in_parts(type="image_url"), "messages.0.content.0.type", "must be 'text'"),
    (in_parts(type="text"), "messages.0.content.0.text", "is missing"),
    (in_parts(type="text", text="x", n=1), "messages.0.content.0.n", "is an unknown field"),
    (
        chat(None, "assistant", tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "", "n": 1}}]),
        "messages.0.tool_calls.0.function.n",
        "is an unknown field",
    ),
    (chat(["x"]), "messages.0.content.0", "must be an object"),
    ({**CHAT, "prompt": "x"}, "prompt", "prompt is an unknown field"),
    ({**CHAT, "max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "must be equal, got 6 and 5"),
    ({**CHAT, "logprobs": 1}, "logprobs", "must be a valid boolean"),
    ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be less than or equal to 20, got 21"),
    ({**CHAT, "top_logprobs": 2}, "top_logprobs", "must come with logprobs=true"),
    ({**CHAT, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "this model has none"),
    ({"messages": [1] * 100_000}, "messages.0", "must be an object"),
    ({"prompt": "x", "metadata": {str(name): 0 for name in range(2000)}}, None, "2000 values or names in the body"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD, ids=lambda value: json.dumps(value)[:40])
def test_what_makes_no_sense_is_refused_by_its_name(client, body, param, message):
    chats = next(iter(body), None) == "messages"
    status, _, answer = client.ask("/v1/chat/completions" if chats else "/v1/completions", body)
    assert status == 400 and message in answer["error"]["message"]
    assert answer["error"]["param"] == param and answer["error"]["type"] == "invalid_request_error"


def test_null_counts_as_absent_and_what_asks_for_nothing_is_taken(client):
    body = dict(
        prompt=PROMPT, max_tokens=2, n=1, best_of=1, presence_penalty=0, frequency_penalty=0.0, echo=False, suffix="",
        logprobs=False, **dict.fromkeys(("user", "stop", "temperature", "logit_bias", "stream_options")),
    )  # fmt: skip
    status, _, answer = client.ask("/v1/completions", body)
    assert status == 200 and answer["choices"][0]["logprobs"] is None
    chat = dict(tools=[], tool_choice="none", response_format={"type": "text"}, top_logprobs=0, logprobs=False)
    assert client.ask("/v1/chat/completions", {**CHAT, "max_tokens": 2, "max_completion_tokens": 2, **chat})[0] == 200


def test_an_answer_fits_the_format_that_is_asked_for(client):
    pytest.importorskip("llguidance", reason="it reads grammars")
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    status, _, answer = client.ask("/v1/chat/completions", {**CHAT, "max_tokens": 20, "response_format": asked})
    assert status == 200 and answer["choices"][0]["finish_reason"] == "stop"
    assert json.loads(answer["choices"][0]["message"]["content"])["a"] in ("x", "y")
    body = {"prompt": PROMPT, "structured_outputs": {"choice": ["left", "right"]}, "temperature": 1}
    _, _, answer = client.ask("/v1/completions", body)
    assert answer["choices"][0]["text"] in ("left", "right")
    for field, text in (("regex", "left|right"), ("ebnf", 'root ::= "left" | "right"')):  # SGLang's names
        _, _, answer = client.ask("/v1/completions", {"prompt": PROMPT, field: text})
        assert answer["choices"][0]["text"] in ("left", "right")
        status, _, answer = client.ask("/v1/completions", {"prompt": PROMPT, field: "(a"})
        assert (status, answer["error"]["param"]) == (400, field)
    status, _, answer = client.ask("/v1/completions", {"prompt": PROMPT, "regex": "a", "ebnf": 'root ::= "a"'})
    assert (status, answer["error"]["param"]) == (400, "ebnf")
    status, _, answer = client.ask("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "(a"}})
    assert status == 400 and answer["error"]["param"] == "structured_outputs" and "regex" in answer["error"]["message"]


RAW = {
    "no JSON": (b"{", 400, "must be JSON"),
    "empty": (b"", 400, "must be JSON"),
    "no object": (b"[1]", 400, "a JSON object"),
    "invalid UTF-8": (b'{"prompt": "\xff"}', 400, "invalid unicode code point at line 1 column 13"),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', 400, "must be JSON: expected value"),
    "twice": (b'{"prompt": "x", "prompt": "y"}', 400, "prompt comes twice"),
    "deep": (b'{"prompt": ' + b"[" * 200_000, 400, "recursion limit exceeded"),
    "deep and closed": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "recursion limit exceeded"),
    "long number": (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400, "number out of range"),
    "large": (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413, f"at most {MAX_BYTES} bytes"),
    "many names": (json.dumps({f"a{index}": 0 for index in range(200_000)}).encode(), 400, "a0 is an unknown field"),
    "lone surrogate": (b'{"prompt": "\\ud800"}', 400, "unexpected end of hex escape"),
}


@pytest.mark.parametrize("name", RAW)
def test_bodies_that_are_none(client, name):
    body, status, message = RAW[name]
    got, _, answer = client.ask("/v1/completions", body)
    assert got == status and message in answer["error"]["message"]
    assert client.ask("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_other_paths_methods_and_types(client):
    for path, expected, told in (
        ("/nothing", 404, "GET '/nothing': Not Found. Endpoints and their methods are listed at /docs"),
        ("/v1/completions", 405, "GET '/v1/completions': Method Not Allowed."),
    ):
        status, _, answer = client.ask(path)
        assert status == expected and told in answer["error"]["message"]
    for headers, told in (({"Content_Type": "text/plain"}, "application/json"), ({"Content_Encoding": "gzip"}, "gzip")):
        status, _, answer = client.ask("/v1/completions", {"prompt": "x"}, **headers)
        assert status == 415 and told in answer["error"]["message"]


def test_query_parameters_are_refused_by_name(client):
    for path, body, name in (
        ("/v1/models?banana=1", None, "banana"),
        ("/v1/responses/resp_1?stream=true", None, "stream"),
        ("/v1/completions?stream=true", {"prompt": "x"}, "stream"),
        ("/v1/responses/resp_1/input_items?limit=1&limit=2", None, "limit"),
    ):
        status, _, answer = client.ask(path, body)
        assert (status, answer["error"]["param"]) == (400, name)


def test_a_stream_in_which_the_server_fails_ends_with_an_error(client, monkeypatch):
    def fail(self, place, piece):
        raise KeyError("arguments")

    begun = Answer.chunk
    calls = iter((begun, *[fail] * 100))
    monkeypatch.setattr(Answer, "chunk", lambda *args: next(calls)(*args))
    _, _, text = client.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stream": True})
    error = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))["error"]
    assert (error["type"], error["message"]) == ("server_error", "the server has failed; see its log")


def test_a_client_adds_no_lines_to_the_log(client, caplog):
    caplog.set_level("INFO")
    assert client.ask("/v1/completions", {"prompt": "x", "a\nINFO: all is well": 1})[0] == 400
    assert "INFO: all is well" in caplog.text
    assert not any("\n" in record.getMessage() for record in caplog.records)


def test_keys(inference, server):
    """The engine is the other server's: only what is answered without it is asked for here."""
    prompts = PromptReader(Served.read(inference), 512)
    service = Service(server.engine, prompts, Drafters.read(inference), "demo", api_key="geheim-ü")
    with answering(make_app(service)) as port:
        client = Client(port)
        for header in (None, "Bearer wrong", "Bearer ", "geheim-ü", "Basic geheim-ü", "Bearer geheim-ü2"):
            headers = {} if header is None else {"Authorization": header.encode().decode("latin-1")}
            for path, body in (("/v1/models", None), ("/metrics", None), ("/v1/completions", {"prompt": "x"})):
                status, answered, answer = client.ask(path, body, **headers)
                assert status == 401 and answered["www-authenticate"] == "Bearer"
                assert answer["error"]["code"] == "invalid_api_key"
        assert client.ask("/health")[0] == 200 and client.ask("/")[0] == 200
        right = {"Authorization": "Bearer geheim-ü".encode().decode("latin-1")}
        assert client.ask("/v1/models", **right)[0] == 200


# --- many at a time ---


def test_metrics_have_the_names_that_clients_read(client):
    before = client.metric("vllm:spec_decode_num_draft_tokens_total")
    client.complete(max_tokens=20)
    drafts = client.metric("vllm:spec_decode_num_drafts_total", model_name="demo")
    proposed = client.metric("vllm:spec_decode_num_draft_tokens_total")
    accepted = client.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert proposed > before and 0 < accepted < proposed and drafts > 0
    assert client.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total") == accepted
    assert client.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="0") <= drafts
    assert client.metric("vllm:request_success_total", finished_reason="length") >= 1
    phases = (f"request_{phase}_time_seconds" for phase in ("queue", "prefill", "decode", "inference"))
    sizes = (f"request_{what}" for what in ("prompt_tokens", "generation_tokens", "params_n", "params_max_tokens"))
    times = (f"{name}_seconds" for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"))
    for name in ("request_num_preemptions", "iteration_tokens_total", *times, *phases, *sizes):
        assert client.metric(f"vllm:{name}_count") >= 1
    assert client.metric("vllm:cache_config_info") == 1 and client.metric("vllm:num_preemptions_total") == 0
    assert 0 <= client.metric("vllm:kv_cache_usage_perc") <= 1
    wait_until(lambda: client.metric("vllm:num_requests_running") == client.metric("vllm:num_requests_waiting") == 0)


def leave_in_the_middle(client: Client, body: dict) -> None:
    """Read the beginning of a stream, and go."""
    with sent(client, {**body, "stream": True}) as connection:
        assert b"200 OK" in connection.recv(1 << 16)


def sent(client: Client, body: dict) -> socket.socket:
    """A connection on which a request for a completion was sent."""
    raw = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(raw)}"
    connection = socket.create_connection(("127.0.0.1", client.port))
    connection.sendall(head.encode() + b"\r\n\r\n" + raw)
    return connection


def test_who_leaves_frees_the_slot_within_two_steps(server, client, monkeypatch):
    steps = []
    original = Session.advance
    monkeypatch.setattr(Session, "advance", lambda session: steps.append(session) or original(session))
    body = {"prompt": PROMPT, "max_tokens": 480, "ignore_eos": True}
    aborted = client.metric("vllm:request_success_total", finished_reason="abort")
    leave_in_the_middle(client, body)
    wait_until(lambda: client.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1)
    seen = len(steps)
    wait_until(lambda: steps[-1].idle)
    assert len(steps) - seen <= 2 and not server.engine._live
    with sent(client, body):  # who waits for a whole answer, too
        wait_until(lambda: server.engine._live)
    wait_until(lambda: not server.engine._live and steps[-1].idle)
    assert client.metric("vllm:request_success_total", finished_reason="abort") == aborted + 2
    wait_until(lambda: client.metric("vllm:kv_cache_usage_perc") == 0)


def test_a_request_that_fails_by_nan_gets_its_error_and_the_others_finish(client, alone):
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(client.complete, max_tokens=30) for _ in range(2)]
        bad = [pool.submit(client.complete, prompt=[5, POISON, 7], stream=stream) for stream in (False, True)]
    for one in good:
        assert one.result().choices[0].text == alone(PROMPT, 30, temperature=0.0).text
    for one in bad:
        with pytest.raises(openai.InternalServerError, match="NaN"):
            one.result()


def test_a_stream_that_fails_in_the_middle_ends_with_its_error(client, alone):
    good = client.complete(max_tokens=30, stream=True)
    with pytest.raises(openai.APIError, match="NaN"):
        list(client.complete(max_tokens=30, logit_bias={str(POISON): 100}, stream=True))
    assert "".join(chunk.choices[0].text for chunk in good) == alone(PROMPT, 30, temperature=0.0).text


def test_a_step_that_fails_loses_those_who_run_and_no_others(server, client, monkeypatch, caplog):
    original, failing = Batch._read_step, threading.Event()

    def read_step(batch):
        if failing.is_set() and len(batch.running) == 4:
            failing.clear()
            raise RuntimeError("out of everything")
        return original(batch)

    monkeypatch.setattr(Batch, "_read_step", read_step)

    with ThreadPoolExecutor(7) as pool:
        failing.set()
        asked = [pool.submit(client.complete, max_tokens=40) for _ in range(7)]
    failed = [error for one in asked if (error := one.exception())]
    assert len(failed) == 4 and all("the engine failed in a step" in str(error) for error in failed)
    assert "out of everything" in caplog.text
    assert client.ask("/health")[0] == 200 and not server.engine._live and not server.engine._line


def test_a_request_that_makes_entering_fail_does_not_come_again(client, alone, monkeypatch):
    original = Batch.enter_all

    def enter_all(batch, requests):
        if any(len(request.prompt) == 1 for request in requests):
            raise RuntimeError("of this request")
        return original(batch, requests)

    monkeypatch.setattr(Batch, "enter_all", enter_all)
    options = dict(max_tokens=8, timeout=20)
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="the engine failed in a step of this request"):
            client.complete(prompt=[5], **options)
    answer = client.complete(**options)
    assert answer.choices[0].text == alone(PROMPT, 8, temperature=0.0).text


def test_what_the_session_refuses_is_refused(client, monkeypatch):
    def refuse(session, request):
        raise ValueError("grammar: it is not supported here")

    monkeypatch.setattr(Session, "enqueue", refuse)
    with pytest.raises(openai.BadRequestError, match="grammar: it is not supported here"):
        client.complete(prompt="x")


@pytest.mark.parametrize(("error", "logged"), [(ValueError("no room"), False), (TypeError("of ours"), True)])
def test_an_engine_that_does_not_open_says_why(error, logged, caplog):
    def fail():
        raise error

    with pytest.raises(type(error), match=str(error)):
        EngineClient(fail, Metrics("m"), slots=1, max_queue=1).start()
    assert ("Traceback" in caplog.text and "the engine cannot be opened" in caplog.text) == logged


def test_an_engine_that_cannot_go_on_says_so(inference, monkeypatch):
    own = EAGLEInference(None, inference.pair.target_model, EAGLEConfig(slots=1))

    def fail(*_):
        raise RuntimeError("the device is gone")

    with serving(own) as running:
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(running.client.ask, "/v1/completions", body) for _ in range(3)]
            wait_until(lambda: running.client.metric("vllm:num_requests_waiting") == 2)
            monkeypatch.setattr(own, "session", fail)
            monkeypatch.setattr(Session, "advance", fail)
        assert sorted(one.result()[0] for one in asked) == [500, 503, 503]
        wait_until(lambda: not running.engine.alive)
        assert running.client.ask("/health")[0] == 503
        status, _, answer = running.client.ask("/v1/completions", body)
        assert status == 503 and "the engine has stopped" in answer["error"]["message"]


def test_a_step_that_fails_on_one_of_several_ranks_ends_the_engine(inference, monkeypatch):
    monkeypatch.setattr(engine_process, "SharedSession", Session)
    opened, lost = [], threading.Event()
    own = EAGLEInference(None, inference.pair.target_model, EAGLEConfig(slots=1))

    def fail(*_):
        raise ValueError("on this rank alone")

    with serving(own) as running:
        monkeypatch.setattr(own, "session", opened.append)
        monkeypatch.setattr(Session, "advance", fail)
        running.engine.when_lost = lost.set
        status, _, _ = running.client.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 4})
        assert status == 500 and lost.wait(30)
        assert running.engine.lost and not running.engine.alive and not opened


def test_a_full_queue(server, client, monkeypatch):
    monkeypatch.setattr(server.engine, "max_queue", 0)
    body = {"prompt": PROMPT, "max_tokens": 480, "ignore_eos": True}
    with ExitStack() as leaving:
        for _ in range(4):
            leaving.enter_context(sent(client, body))
        wait_until(lambda: len(server.engine._live) == 4)
        status, headers, answer = client.ask("/v1/completions", body)
        assert client.metric("vllm:admission_rejections_total") >= 1
        assert status == 429 and answer["error"]["code"] == "queue_full" and int(headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            client.complete(prompt="x")
    wait_until(lambda: not server.engine._live)
    assert client.ask("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_a_long_text_keeps_no_short_one_waiting_and_is_not_read_for_a_full_line(server, client, monkeypatch):
    original, reading, done = PromptReader.requests, threading.Event(), threading.Event()

    def request(reader, body):
        if len(body.prompts[0]) > LONG:
            reading.set()
            assert done.wait(30)
        return original(reader, body)

    monkeypatch.setattr(PromptReader, "requests", request)
    body = {"prompt": "x" * 2 * LONG}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.ask, "/v1/completions", body)
        assert reading.wait(30)
        assert client.ask("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
        monkeypatch.setattr(server.engine, "max_queue", -server.engine.slots)
        assert client.ask("/v1/completions", body)[0] == 429
        done.set()
    assert first.result()[0] == 400


def test_load(server, client, alone):
    """Clients at random, half of which leave in the middle: every answer is that of the request alone."""
    random_of, prompts = random.Random(0), demo_prompts(12)
    asked = []
    for index in range(12):
        body = {"prompt": prompts[index][-100:], "max_tokens": random_of.randint(1, 16), "seed": index}
        body["temperature"] = random_of.choice([0, 0.7, 1.0])
        asked.append((body, random_of.random() < 0.5, random_of.uniform(0, 0.5)))

    def run(body: dict, leaves: bool, pause: float) -> str | None:
        time.sleep(pause)
        if leaves:
            return leave_in_the_middle(client, {**body, "max_tokens": 300})
        status, _, answer = client.ask("/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["text"]

    with ThreadPoolExecutor(len(asked)) as pool:
        got = [*pool.map(run, *zip(*asked, strict=True))]
    for (body, leaves, _), text in zip(asked, got, strict=True):
        if not leaves:
            own = {name: body[name] for name in ("temperature", "seed")}
            assert text == alone(body["prompt"], body["max_tokens"], **own).text, body
    wait_until(lambda: not server.engine._line and not server.engine._live)
    assert client.metric("vllm:num_requests_running") == 0


# --- the program ---


@contextmanager
def program(*arguments: str, forked: bool = True) -> Iterator[tuple[ForkedProgram | subprocess.Popen, Client]]:
    """`eagle-triton serve`, once it listens."""
    words = ["serve", "--port", "0", *arguments]
    if forked:
        process = start_program(cli.main, *words)
    else:
        command = [sys.executable, "-m", "eagle_triton.cli.main", *words]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "is served at" in line:
                break
        else:
            raise AssertionError("".join(lines))
        client = Client(int(line.rpartition(":")[2]), "secret" if "--config" in arguments else None)
        wait_until(lambda: answers(client))
        yield process, client
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def answers(client: Client) -> bool:
    try:
        return client.ask("/health")[0] == 200
    except OSError:
        return False


def test_sigterm_finishes_what_runs_and_refuses_the_rest():
    with program("--max-num-seqs", "1", "--shutdown-timeout", "300", "--device", "cpu") as (process, client):
        body = {"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True}
        with ThreadPoolExecutor(2) as pool:
            runs = pool.submit(client.ask, "/v1/completions", body)
            wait_until(lambda: client.metric("vllm:num_requests_running") == 1)
            waits = pool.submit(client.ask, "/v1/completions", body)
            wait_until(lambda: client.metric("vllm:num_requests_waiting") == 1)
            process.send_signal(signal.SIGTERM)
        status, _, answer = runs.result()
        assert status == 200 and answer["usage"]["completion_tokens"] == 150
        status, _, answer = waits.result()
        assert status == 503 and "shutting down" in answer["error"]["message"]
        assert process.wait(20) == 0
        log = process.stderr.read()
        assert "150 new, length" in log and "import os" not in log


def test_sigterm_does_not_wait_for_ever():
    with program("--shutdown-timeout", "1", "--device", "cpu", "--no-fallback") as (process, client):
        body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.ask, "/v1/completions", body)
            wait_until(lambda: client.metric("vllm:num_requests_running") == 1)
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert process.wait(20) == 0 and time.monotonic() - began < 10
        assert asked.result()[0] == 503


@pytest.mark.parametrize("rank", ["0", "1"])
def test_sigterm_before_it_answers_ends_it_with_0_too(rank, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(serve, "_load", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert cli.main(["serve", "--device", "cpu", "--port", "0"]) == 0


def test_a_config_file_and_prompts_in_the_log(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: demo\nmax_model_len: 128\nmax-num-seqs: 2\napi-key: secret\nlog-prompts: true\nport: 1\n"
        "warm-up: true\nno-fallback: true\n"
        "speculative-config:\n  method: suffix\n  num_speculative_tokens: 4\nserved-model-name: little\n"
    )
    with program("--config", str(file), "--device", "cpu") as (process, client):
        assert client.ask("/v1/models")[2]["data"][0]["id"] == "little"
        assert client.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 128})[0] == 400
        body = dict(prompt="x = 1\nx = 1\nx = 1\n", max_tokens=30, temperature=0, stream=True)
        text = client.ask("/v1/completions", {**body, "stream_options": {"include_drafts": True}})[2]
        assert '"drafter":"suffix"' in text
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0 and "x = 1" in process.stderr.read()


def refusal(capsys, *words: str) -> str:
    """What the program says to words that it refuses."""
    with pytest.raises(SystemExit) as ended:
        serve.main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def forked_engine(monkeypatch):
    """The engine's process is forked, not started."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: CONTEXT)


WRONG = {
    "demo --model demo-gdn": "--model must be given once, got demo and demo-gdn",
    "--model-path demo": "--model-path is --model here",
    "--api-key a --api-key-file LICENSE": "--api-key-file must come without --api-key",
    "demo --tensor-parallel-size 4": "--tensor-parallel-size is an option of torchrun here: torchrun",
    "--quantization fp8": "--quantization is read from the checkpoint: eagle-triton quantize MODEL --to fp8",
    "--kv-transfer-config={}": "--kv-transfer-config is not offered: the server reads prompts and decodes on the same",
    "--root-path llm/": "--root-path must begin with / and not end with it, got 'llm/'",
    "--port 99999": "--port must be a whole number from 0 to 65535, got '99999'",
    "--speculative-config {": "speculative config",
    '--topk 4 --speculative-config {"method":"suffix"}': "--topk is not read with --speculative-config",
    "--draft some/head": "for the demo, which has its own head, got some/head; another draft needs its MODEL",
    "--host 300.1.1.1 --device cpu": "cannot listen on --host 300.1.1.1",
    "--temperature -1": "--temperature must be a number from 0 to 100",
    "nowhere/at/all/": "MODEL must be a directory or a hub id",
    "--config nowhere.yaml": "--config must be a file, and nowhere.yaml does not exist",
    "--num-draft-tokens none": "--num-draft-tokens must be a whole number",
    "--max-model-len 4096 --port 0 --device cpu": "-len must be at most the model's 2048 positions, got 4096",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_arguments_are_one_sentence(line, capsys, forked_engine):
    """The last one is found out when the model is loaded, and ends the engine's process too."""
    told = refusal(capsys, *line.split())
    assert WRONG[line] in told and told.count("\n") == 1 and not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "'prot' is no option; the options are model, activations, allowed-hosts"),
        ("tensor-parallel-size: 4", "tensor-parallel-size is an option of torchrun here: torchrun --nproc-per-node N"),
        ("- a", "must be a YAML mapping of options to values"),
        ("a: [", "cannot be read"),
        pytest.param("[" * 2_000, "cannot be read: maximum recursion depth exceeded", id="deep"),
        ("log-prompts: 5", "log-prompts must be true or false, got 5"),
        ("port: [1]", "port must be one value, got [1]"),
        ("port: many", "--port must be a whole number from 0 to 65535, got 'many'"),
        ("config: x.yaml", "'config' is no option"),
        ("prot:\nport: 99999", "'prot' is no option"),
        ("model: [demo]", "model must be one value"),
        ("port: 99999\nport: 99999", "'port' is given twice"),
        ("max-queue: -1\nmax_queue: -1", "'max_queue' is given twice"),
    ],
)
def test_wrong_config_files_are_one_sentence(text, message, tmp_path, capsys):
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert message in refusal(capsys, "--config", str(file))


@pytest.mark.parametrize("text", ["0123", "1_000", "0x1f", "1.50", "2026-11-24", "12:30", "'null'", '"true"'])
def test_a_value_of_a_config_file_is_what_is_written_there(text, tmp_path):
    """YAML reads 0123 as 83, and who brings the key 0123 would be refused."""
    file = tmp_path / "serve.yaml"
    file.write_text(f"api-key: {text}\nserved-model-name: {text}\nmodel: demo\n")
    args = serve._parse(serve._parser("serve"), ["--config", str(file)])
    assert args.api_key == args.served_model_name == text.strip("'\"") and args.model == "demo"


def test_what_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.setattr(serve, "NEEDS", ("uvicorn", "no_such_module"))
    said = refusal(capsys, "--device", "cpu")
    assert 'not installed: no_such_module; pip install ".[serve]" in a clone' in said


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen on" in refusal(capsys, "--port", str(taken.getsockname()[1]), "--device", "cpu")


def test_other_ranks_leave_the_answering_to_rank_0(monkeypatch):
    asked = []
    session = SimpleNamespace(follow=lambda: asked.append("follow"))
    loaded = SimpleNamespace(pair=SimpleNamespace(max_positions=64), session=lambda rows: asked.append(rows) or session)
    monkeypatch.setattr(serve, "_load", lambda args: loaded)
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert serve.main(["--device", "cpu"]) == 0
    assert asked == [64, "follow"]


# --- who drafts ---


def test_drafters_by_name(inference):
    target = inference.pair.target_model
    configs: dict = {(None, None): SpeculativeConfig(method="naive")}
    for method in ("suffix", "ngram", "nasd"):
        configs[None, method] = SpeculativeConfig(method=method, num_speculative_tokens=4)
    configs = {names: EAGLEConfig(speculative=speculative) for names, speculative in configs.items()}
    for (model, text), config in (configs | {("eagle", "suffix"): EAGLEConfig(suffix_drafts=4)}).items():
        assert Drafters.read(EAGLEInference(None, target, config)) == Drafters(model, text, 0)


@pytest.fixture
def other_engines(tmp_path, monkeypatch):
    """Programs by the names of vLLM and SGLang that write down how they were called, and end with 7."""
    told = tmp_path / "told.json"
    script = (
        "import json, os, pathlib, sys\n"
        "heads = [word for word in sys.argv if os.path.isdir(word)]\n"
        "heads += [json.loads(word).get('model') for word in sys.argv if word.startswith('{')]\n"
        "files = {head: sorted(os.listdir(head)) for head in heads if head}\n"
        f"pathlib.Path({str(told)!r}).write_text(json.dumps([sys.argv[1:], files]))\n"
        "sys.exit(7)\n"
    )
    programs, packages = tmp_path / "programs", tmp_path / "packages" / "sglang"
    programs.mkdir()
    packages.mkdir(parents=True)
    (programs / "vllm").write_text(f"#!{sys.executable}\n{script}")
    (programs / "vllm").chmod(0o755)
    (packages / "__init__.py").touch()
    (packages / "launch_server.py").write_text(script)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(packages.parent), prepend=os.pathsep)
    monkeypatch.syspath_prepend(packages.parent)
    return lambda: json.loads(told.read_text())


def test_a_block_drafter_drafts_for_the_demo():
    args = serve._parse(serve._parser("serve"), ["demo", "--draft", "demo-block", "--device", "cpu"])
    assert isinstance(serve._load(args).pair.draft, BlockDraft)


@pytest.mark.parametrize(
    ("line", "models"),
    [
        ("demo", ("demo", None)),
        ("demo --draft demo-block", ("demo", "demo-block")),
        ('demo --speculative-config {"method":"draft_model","model":"demo-draft"}', ("demo", "demo-draft")),
    ],
)
def test_the_models_of_a_server_choose_its_threads(line, models, monkeypatch):
    asked = []
    monkeypatch.setattr("eagle_triton.devices.choose_threads", lambda *names: asked.append(names))
    serve._load(serve._parse(serve._parser("serve"), [*line.split(), "--device", "cpu"]))
    assert asked == [("cpu", *models)]


@pytest.mark.skipif(os.name == "nt", reason="the programs are scripts")
def test_another_engine_serves_an_exported_block_drafter(other_engines):
    assert serve.main(["demo", "--draft", "demo-block", "--engine", "vllm"]) == 7
    words, files = other_engines()
    assert [json.loads(word)["method"] for word in words if word.startswith("{")] == ["dflash"]
    assert ["config.json", "model.safetensors"] in files.values()


@pytest.mark.skipif(os.name == "nt", reason="the programs are scripts")
def test_another_engine_serves_an_exported_head(other_engines):
    assert serve.main(["demo", "--engine", "vllm", "--port", "8000", "--api-key", "secret", "--num-steps", "4"]) == 7
    (command, model, *options), files = other_engines()
    options = dict(zip(options[::2], options[1::2], strict=True))
    assert (command, Path(model).name) == ("serve", "target")
    speculative = json.loads(options.pop("--speculative-config"))
    assert options == {"--host": "127.0.0.1", "--port": "8000", "--api-key": "secret"}
    assert (speculative["method"], speculative["num_speculative_tokens"]) == ("eagle3", 4)
    assert files[speculative["model"]] == ["config.json", "model.safetensors"]
    assert not Path(speculative["model"]).exists()

    line = "--engine sglang --max-model-len 512 --topk 3 --num-draft-tokens 9 --root-path /llm"
    assert serve.main(line.split()) == 7
    options, files = other_engines()
    options = dict(zip(options[::2], options[1::2], strict=True))
    head = options["--speculative-draft-model-path"]
    assert files[head] == ["config.json", "model.safetensors"]
    assert (options["--context-length"], options["--port"], options["--speculative-eagle-topk"]) == ("512", "8000", "3")
    assert (options["--speculative-num-draft-tokens"], options["--fastapi-root-path"]) == ("9", "/llm")


@pytest.mark.skipif(os.name == "nt", reason="the programs are scripts")
def test_another_engine_is_told_a_speculative_config(other_engines):
    suffix = '{"method": "suffix", "num_speculative_tokens": 8}'
    assert serve.main(["demo", "--engine", "vllm", "--speculative-config", suffix]) == 7
    words, _ = other_engines()
    assert json.loads(words[words.index("--speculative-config") + 1])["method"] == "suffix"
    ngram = '{"method": "ngram", "num_speculative_tokens": 4}'
    assert serve.main(["some/model", "--engine", "sglang", "--speculative-config", ngram]) == 7
    words, _ = other_engines()
    assert words[:4] == ["--model-path", "some/model", "--speculative-algorithm", "NGRAM"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--engine vllm --max-queue 256", "--max-queue is not read with --engine vllm"),
        ("--engine vllm --topk 3", "--topk is not read with --engine vllm"),
        ("--engine vllm --num-draft-tokens 9", "--num-draft-tokens is not read with --engine vllm"),
        ("--engine sglang --suffix-drafts 4", "--suffix-drafts is not read with --engine sglang"),
        ("./target --draft mtp --engine vllm", "means the same"),
        ("--engine sglang --num-draft-tokens auto", "must be a number with --engine sglang"),
        ("./target --engine sglang", "target: needed, because './target' does not have the head"),
        ('--engine sglang --speculative-config {"method":"suffix"}', "method suffix is not offered by SGLang"),
        ("--engine trt", "--engine must be one of vllm, sglang"),
    ],
)
def test_what_another_engine_does_not_have_is_refused(line, message, other_engines, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").mkdir()
    assert message in refusal(capsys, *line.split())


class HubError(OSError):
    """Not to be sent to another process, as those of the hub."""

    def __init__(self, message: str, response: object) -> None:
        super().__init__(message)


def load_tiny(args: SimpleNamespace) -> EAGLEInference:
    """For a process of its own."""
    if args.error == "hub":
        raise HubError("401 Client Error", None)
    return EAGLEInference(None, EaModel.from_pretrained("demo"), EAGLEConfig(slots=2, temperature=0.0))


FAILING = 77  # new tokens of a request whose step fails


def open_failing(inference: EAGLEInference):
    """A session in which some steps fail."""
    session = inference.session(128)
    advance = session.advance

    def failing():
        if any(running.request.max_new_tokens == FAILING for running in session._waiting):
            raise RuntimeError("a cable was pulled")
        return advance()

    session.advance = failing
    return session


def test_what_cannot_be_loaded_in_another_process_is_said_here(forked_engine):
    with pytest.raises(OSError, match="401 Client Error"):
        EngineProcess(load_tiny, SimpleNamespace(error="hub"))


def test_what_waits_is_refused_at_once_and_what_runs_at_the_deadline():
    """Wherever it waits: here, in the engine, or on its way there. Who was cancelled is not refused again."""
    orders: list = []

    async def run():
        engine = EngineClient(lambda: None, Metrics("m"), slots=4, max_queue=1)
        engine._engine, engine._thread = SimpleNamespace(put=orders.append), threading.current_thread()
        tickets = engine.submit([Request(torch.zeros(1, dtype=torch.int64), 1)] * 5)
        runs, queued, cancelled, sent, waits = tickets
        assert orders == [(ticket.number, ticket.request) for ticket in tickets[:4]]
        engine._stepped(StepInfo(0, 0.0, 0, 1, 2, []), [], [queued.number, cancelled.number], cancelled.number)
        text = engine.metrics.text().decode()
        assert 'requests_waiting{model_name="m"} 4.0' in text and 'requests_running{model_name="m"} 1.0' in text
        engine.cancel(cancelled)
        engine.drain(0.2)
        started, refused = time.monotonic(), []
        while len(refused) < 4:
            error = await asyncio.wait_for(runs.pieces.get(), 10)
            refused.append((error.status, error.code, time.monotonic() - started >= 0.1))
        assert refused == [(503, "shutting_down", False)] * 3 + [(503, "shutting_down", True)]
        ended = [number for number, request in orders if request is None]
        assert ended == [ticket.number for ticket in (cancelled, queued, sent, waits, runs)]
        assert not (engine._live or engine._line)

    asyncio.run(run())


def test_an_engine_elsewhere_is_asked_as_one_here(forked_engine):
    """Also what enters while others decode, who is cancelled, a step that fails, and the process's end."""
    process, told = EngineProcess(load_tiny, SimpleNamespace(error=None)), queue.SimpleQueue()

    def listen():
        try:
            process.run(lambda *news: told.put(news))
        except EngineLostError as error:
            told.put(error)

    def until(count: int) -> dict:
        """The completions of so many requests."""
        got = {}
        while len(got) < count:
            what, info, numbers, queued, known = told.get(timeout=60)
            assert what == "stepped" and len(numbers) == len(info.pieces) and set(queued) <= set(range(11, known + 1))
            pieces.update(numbers)
            ended = zip(numbers, info.pieces, strict=True)
            got |= {number: piece.completion for number, piece in ended if piece.completion is not None}
        return got

    try:
        reader, asked = PromptReader(process.served, 128), (("import os", 20), ("def f(", 9), ("x", 5))
        calls = [reader.requests(read_completion({"prompt": text, "max_tokens": count}))[0] for text, count in asked]
        inference = load_tiny(SimpleNamespace(error=None))
        expected = [inference.generate(call.prompt, call.max_new_tokens)[1].completions[0] for call in calls]
        process.open(open_failing)
        threading.Thread(target=listen, daemon=True).start()
        assert told.get(timeout=60) == ("opened",)
        pieces: Counter[int] = Counter()
        for number, call in enumerate((*calls, calls[0]), 11):
            process.put((number, call))
        process.put((14, None))
        got = until(3)
        assert set(got) == {11, 12, 13} and min(pieces[number] for number in got) > 1
        for completion, want in zip((got[11], got[12], got[13]), expected, strict=True):
            assert (completion.tokens, completion.text) == (want.tokens, want.text)
            assert completion.finished == want.finished
        process.put((15, replace(calls[0], max_new_tokens=FAILING)))
        what, number, status, message = told.get(timeout=60)
        assert (what, number, status) == ("refused", 15, 500) and "failed in a step" in message
        process.put((16, calls[2]))
        assert until(1)[16].tokens == expected[2].tokens
        process.put((17, replace(calls[2], prompt=None)))
        what, number, status, message = told.get(timeout=60)
        assert (what, number, status) == ("refused", 17, 500) and "the request cannot be decoded" in message
        process._process.kill()
        assert "the engine's process has ended" in str(told.get(timeout=60))
        process.put((18, calls[2]))
        process.open(open_failing)
    finally:
        process.close()


def test_a_server_whose_engine_dies_ends_and_says_so():
    """Started as users start it: nothing is forked."""
    with program("--device", "cpu", forked=False) as (process, _):
        engine = next(child for child in psutil.Process(process.pid).children() if "spawn_main" in str(child.cmdline()))
        engine.kill()
        assert process.wait(60) == 1
        assert "the engine's process has ended" in process.stderr.read()


def test_another_engine_that_is_not_installed_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "vllm is not installed: pip install vllm" in refusal(capsys, "--engine", "vllm")


def test_what_http_adds_can_be_measured(inference, tmp_path, monkeypatch):
    """With a server in this process; tests/test_benchmark.py has one that `own_server` starts."""

    @contextmanager
    def here(words, log):
        args = serve._parse(serve._parser("serve"), words)
        config = EAGLEConfig(temperature=args.temperature, slots=args.max_num_seqs)
        with serving(EAGLEInference(None, inference.pair.target_model, config)) as running:
            yield f"http://127.0.0.1:{running.client.port}"

    monkeypatch.setattr("eagle_triton.benchmarks.serve.own_server", here)
    output = tmp_path / "serve.json"
    assert time_server.main(["--num-runs", "2", "--max-length", "8", "--output", str(output), "--commit", "abc"]) == 0
    record = json.loads(output.read_text())
    session, server, added = record["rows"]
    assert (record["mode"], record["machine"]["commit"]) == ("http", "abc")
    assert min(session["first_token_ms"], session["ms_per_step"], server["ms_per_step"]) > 0 and session["steps"] > 1
    assert set(added) == {"variant", "first_token_ms", "ms_per_step", "p99_ms_per_step"}
    assert session["p99_ms_per_step"] > 0 and server["p99_ms_per_step"] > 0
