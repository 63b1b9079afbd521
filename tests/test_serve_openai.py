"""What OpenAI's clients expect of a server besides text: samples, lists, log-probabilities, the prompt's own."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle_triton import EAGLEConfig, EAGLEInference, EaModel

for missing in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(missing, reason='pip install ".[serve,test]"')

import openai

from eagle_triton.demo import demo_directory
from eagle_triton.engine.grammar import GrammarError, compiler_for
from eagle_triton.serve import app, description
from eagle_triton.serve import main as serve
from eagle_triton.serve.bodies import ChatBody, CompletionBody, StreamOptions, read_chat
from eagle_triton.serve.drafters import Drafters
from eagle_triton.serve.engine_process import Served
from eagle_triton.serve.errors import RequestError
from eagle_triton.serve.fields import Fields
from eagle_triton.serve.prompts import PromptReader
from eagle_triton.serve.response_bodies import ResponseBody
from tests.test_serve import PROMPT, Client, answering, serving

GREEDY = dict(model="demo", temperature=0)


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    inference = EAGLEInference(None, EaModel.from_pretrained("demo"), EAGLEConfig(slots=4, fallback=False))
    names = dict(hosts=("known.example",), origins=("https://page.example",), root_path="/llm")
    with serving(inference, **names) as running:
        yield running


@pytest.fixture
def client(server) -> Client:
    return server.client


def events(text: str) -> list[dict]:
    """The bodies of a stream's events, without the end."""
    found = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert found.pop() == "[DONE]"
    return [json.loads(one) for one in found]


@pytest.fixture(scope="module")
def likelihood(server):
    """The target's own log-probabilities by Hugging Face: [L - 1, V] after each token of a list but the last."""
    model = server.inference.pair.target_model.base_model

    def score(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)

    return score


def test_prompts_and_samples_in_the_order_of_prompts(client):
    one, other = PROMPT, "x = "
    options = dict(temperature=1, max_tokens=6)
    alone = [
        client.complete(prompt=prompt, seed=seed, **options).choices[0].text
        for prompt in (one, other)
        for seed in (3, 4)
    ]
    assert len(set(alone)) == 4
    both = client.complete(prompt=[one, other], n=2, seed=3, **options)
    assert [(choice.index, choice.text) for choice in both.choices] == [*enumerate(alone)]
    assert both.usage.completion_tokens == 24
    body = dict(prompt=[one, other], n=2, seed=3, **options, stream=True, stream_options=dict(include_usage=True))
    chunks = events(client.ask("/v1/completions", body)[2])
    texts, ends = ["", "", "", ""], []
    for choice in (chunk["choices"][0] for chunk in chunks[:-1]):
        texts[choice["index"]] += choice["text"]
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert texts == alone and sorted(ends) == [*range(4)] and chunks[-1]["usage"]["completion_tokens"] == 24


def test_best_of_answers_with_the_likeliest_samples(client):
    options = dict(temperature=1, max_tokens=4, seed=3, logprobs=0)
    all_three = client.complete(n=3, **options).choices
    means = {choice.text: sum(choice.logprobs.token_logprobs) for choice in all_three}
    assert len(means) == 3
    best = client.complete(n=2, best_of=3, **options)
    assert [choice.text for choice in best.choices] == sorted(means, key=means.get, reverse=True)[:2]
    assert best.usage.completion_tokens == 12


def test_the_likeliest_tokens_at_each_place(client, server, likelihood):
    decode = server.inference.tokenizer.decode
    answer = client.complete(max_tokens=7, logprobs=3)
    extra = dict(return_token_ids=True)
    tokens = client.complete(max_tokens=7, extra_body=extra).choices[0]
    prompt = server.inference.tokenizer(PROMPT).input_ids
    assert tokens.prompt_token_ids == prompt
    rows = likelihood(prompt + tokens.token_ids)[len(prompt) - 1 :]
    for row, top, text in zip(
        rows, answer.choices[0].logprobs.top_logprobs, answer.choices[0].logprobs.tokens, strict=True
    ):
        values, ids = row.topk(3)
        want = {decode([token]): value for token, value in zip(ids.tolist(), values.tolist(), strict=True)}
        assert top == pytest.approx(want, abs=1e-3) and next(iter(top)) == text
    told = dict(messages=[dict(role="user", content=PROMPT)], max_tokens=7, return_token_ids=True, **GREEDY)
    whole = client.ask("/v1/chat/completions", told)[2]
    chunks = events(client.ask("/v1/chat/completions", {**told, "stream": True})[2])
    assert whole["prompt_token_ids"] == prompt and whole["choices"][0]["token_ids"] == tokens.token_ids
    assert [one.get("prompt_token_ids") for one in chunks] == [prompt, *[None] * (len(chunks) - 1)]
    assert [token for one in chunks for token in one["choices"][0].get("token_ids", [])] == tokens.token_ids
    chunks = client.chat(max_tokens=7, logprobs=True, top_logprobs=3, stream=True)
    listed = [one for chunk in chunks if (found := chunk.choices[0].logprobs) for one in found.content]
    for one, top in zip(listed, answer.choices[0].logprobs.top_logprobs, strict=True):
        assert {likely.token: likely.logprob for likely in one.top_logprobs} == pytest.approx(top, abs=1e-3)
    sampled = client.complete(temperature=2, seed=1, max_tokens=7, logprobs=1)
    tops = sampled.choices[0].logprobs.top_logprobs
    assert all(len(top) in (1, 2) for top in tops) and any(len(top) == 2 for top in tops)


def test_echo_with_the_prompts_log_probabilities(client, server, likelihood):
    """Over more than one forward; a prompt that was read before is read again."""
    text = PROMPT * 6
    prompt = server.inference.tokenizer(text).input_ids
    assert len(prompt) > 64
    want = likelihood(prompt).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    for most, stream in ((0, False), (3, False), (3, True)):
        body = dict(prompt=text, max_tokens=most, echo=True, logprobs=1, stream=stream, **GREEDY)
        answer = client.ask("/v1/completions", body)[2]
        choices = [chunk["choices"][0] for chunk in (events(answer) if stream else [answer])]
        listed = [choice["logprobs"] for choice in choices]
        values, tops, tokens, offsets = (
            [one for part in listed for one in part[name]]
            for name in ("token_logprobs", "top_logprobs", "tokens", "text_offset")
        )
        whole = "".join(choice["text"] for choice in choices)
        assert values[0] is tops[0] is None and values[1 : len(prompt)] == pytest.approx(want, abs=1e-3)
        assert len(values) == len(tops) == len(offsets) == len(prompt) + most
        assert "".join(tokens) == whole and whole.startswith(text) and (whole == text) == (most == 0)
        assert all(whole[place:].startswith(token) for place, token in zip(offsets, tokens, strict=True))
        if not stream:
            assert answer["usage"]["completion_tokens"] == most
    short = client.ask("/v1/completions", dict(prompt=prompt[:5], max_tokens=0, echo=True, **GREEDY))[2]
    assert short["choices"][0]["text"] == server.inference.tokenizer.decode(prompt[:5])


def test_log_probabilities_of_prompts_by_ids(client, server, likelihood):
    tokens = server.inference.tokenizer(PROMPT).input_ids
    rows = likelihood(tokens)
    asked = dict(prompt_logprobs=2, max_tokens=1, **GREEDY)
    by_ids = dict(prompt=PROMPT, logprobs=0, return_tokens_as_token_ids=True)
    text = client.ask("/v1/completions", {**by_ids, **asked})[2]["choices"][0]
    chat = client.ask("/v1/chat/completions", dict(messages=[dict(role="user", content=PROMPT)], **asked))[2]
    assert text["logprobs"]["tokens"][0].startswith("token_id:") and text["prompt_token_ids"] is None
    assert chat["prompt_logprobs"] == text["prompt_logprobs"] and text["prompt_logprobs"][0] is None
    for row, token, found in zip(rows, tokens[1:], text["prompt_logprobs"][1:], strict=True):
        likeliest = row.topk(2).indices.tolist()
        assert found.keys() == {str(one) for one in (token, *likeliest)}
        assert {one: said["logprob"] for one, said in found.items()} == pytest.approx(
            {one: row[int(one)].item() for one in found}, abs=1e-3
        )
        assert [found[str(one)]["rank"] for one in likeliest] == [1, 2]
        assert found[str(token)]["decoded_token"] == server.inference.tokenizer.decode([token])
    none = client.ask("/v1/completions", dict(prompt=PROMPT, max_tokens=1, **GREEDY))[2]["choices"][0]
    assert none["prompt_logprobs"] is None


def test_prompts_are_cut_off_and_chats_echo_their_last_message(client):
    ids = dict(prompt=[5, 6, 7, 8], max_tokens=1, return_token_ids=True, truncate_prompt_tokens=3, **GREEDY)
    for side, want in (("left", [6, 7, 8]), ("right", [5, 6, 7]), (None, [6, 7, 8])):
        answer = client.ask("/v1/completions", {**ids, "truncation_side": side, "echo": True})[2]
        assert answer["choices"][0]["prompt_token_ids"] == want and answer["usage"]["prompt_tokens"] == 3
    talk = [dict(role="my-role", content=PROMPT), dict(role="assistant", content="x = ")]
    body = dict(messages=talk, max_tokens=3, **GREEDY)
    plain, echoed = (
        client.ask("/v1/chat/completions", {**body, "echo": echo})[2]["choices"][0]["message"]["content"]
        for echo in (False, True)
    )
    assert echoed == "x = " + plain
    for path, more, param in (
        ("/v1/completions", dict(truncation_side="left"), "truncation_side"),
        ("/v1/completions", dict(prompt_logprobs=1, stream=True), "prompt_logprobs"),
        ("/v1/chat/completions", dict(messages=talk[:1], echo=True), "echo"),
    ):
        asked = {**(dict(prompt="x") if path == "/v1/completions" else {}), **more}
        status, _, answer = client.ask(path, asked)
        assert (status, answer["error"]["param"]) == (400, param)


def test_usage_never_repeats_and_ends_with_the_text(client):
    options = dict(prompt=PROMPT, max_tokens=12, stream=True, **GREEDY)
    both = dict(include_usage=True, continuous_usage_stats=True)
    chunks = events(client.ask("/v1/completions", {**options, "stream_options": both})[2])
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"]]
    assert counts == sorted(set(counts)) and counts[-1] == 12
    assert chunks[-2]["choices"][0]["finish_reason"] == "length" and chunks[-2]["choices"][0]["text"]


def test_fields_that_need_no_engine(client, caplog):
    caplog.set_level("INFO")
    body = dict(
        prompt=PROMPT, max_tokens=2.0, service_tier="auto", metadata={"run": "7"}, safety_identifier="who",
        prompt_cache_key="key", stream=True, stream_options=dict(include_obfuscation=True), **GREEDY,
    )  # fmt: skip
    status, headers, text = client.ask("/v1/completions", body, X_Request_Id="mine")
    chunks = events(text)
    assert status == 200 and headers["x-request-id"] == "mine"
    assert all(chunk["service_tier"] == "default" and chunk["obfuscation"] for chunk in chunks)
    assert "metadata {'run': '7'}" in caplog.text and "safety_identifier 'who'" in caplog.text
    assert client.ask("/v1/completions", dict(prompt="x", max_tokens=1))[1]["x-request-id"].startswith("cmpl-")


def test_every_answer_has_the_id_of_its_request(client):
    """Errors and others, too; openai's client reports it."""
    for path, body in (("/health", None), ("/v1/completions", {}), ("/nowhere", None)):
        assert client.ask(path, body, X_Request_Id="mine")[1]["x-request-id"] == "mine"
        assert len({client.ask(path, body)[1]["x-request-id"] for _ in range(2)}) == 2
    with pytest.raises(openai.BadRequestError) as refused:
        client.complete(max_tokens=-1)
    assert refused.value.request_id


THINKS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}<think>{% else %}</think>{% endif %}"
)


@pytest.mark.parametrize(
    ("asked", "ending"),
    [
        ({"chat_template_kwargs": {"enable_thinking": True}}, "<think>"),
        ({"reasoning_effort": "none"}, "</think>"),
        ({"reasoning_effort": "high"}, "<think>"),
    ],
)
def test_what_the_chat_template_is_told(server, asked, ending):
    reader = PromptReader(Served.read(server.inference), 512, THINKS)
    body = read_chat({"messages": [{"role": "user", "content": "x"}], **asked})
    assert reader.text(reader.requests(body)[0].prompt) == "x" + ending


def test_an_answer_that_continues_the_last_message(server):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    reader = PromptReader(Served.read(server.inference), 512, template)
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    for asked, prompt in (({}, "xy:"), ({"continue_final_message": True}, "xy")):
        assert reader.text(reader.requests(read_chat({"messages": said, **asked}))[0].prompt) == prompt
    with pytest.raises(RequestError, match="continue_final_message must come without"):
        read_chat({"messages": said, "continue_final_message": True, "add_generation_prompt": True})


def test_an_answer_in_a_format_begins_after_its_reasoning(server):
    pytest.importorskip("llguidance", reason="it reads grammars")
    reader = PromptReader(Served.read(server.inference), 512, THINKS)
    for told, begins, outside in ((True, "Hm</think>\n", "{}"), (False, "", "Hm</think>{}")):
        asked = {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"enable_thinking": told}}
        (request,) = reader.requests(read_chat({"messages": [{"role": "user", "content": "x"}], **asked}))
        compiler = compiler_for(reader.tokenizer, reader.vocabulary, frozenset(request.stop_ids))
        right, wrong = ([*reader.tokenizer(text).input_ids, *request.stop_ids] for text in (f"{begins}{{}}", outside))
        compiler.matcher(request.sampling.grammar).read(right)
        with pytest.raises(GrammarError):
            compiler.matcher(request.sampling.grammar).read(wrong)


def test_roles_and_fields_of_messages_that_the_template_reads(server):
    template = "{% for m in messages %}{% if m.role != 'ghost' %}{{ m.content }}{{ m.plan }}{% endif %}{% endfor %}"
    reader = PromptReader(Served.read(server.inference), 512, template)
    said = {"role": "planner", "content": "x", "plan": "y"}
    assert reader.text(reader.requests(read_chat({"messages": [said]}))[0].prompt) == "xy"
    for change, name in (({"mood": "z"}, "mood"), ({"role": "ghost"}, "role")):
        with pytest.raises(RequestError, match=f"messages.0.{name}"):
            reader.requests(read_chat({"messages": [{**said, **change}, {"role": "user", "content": "z"}]}))


def test_what_the_chat_template_does_not_read_is_refused(server):
    reader = PromptReader(Served.read(server.inference), 512, THINKS)
    said = {"role": "user", "content": "x"}
    for told, name in (({"thinking": True}, "thinking"), ({"messages": []}, "messages"), ({"content": 1}, "content")):
        with pytest.raises(RequestError, match=f"chat_template_kwargs.{name} is"):
            reader.requests(read_chat({"messages": [said], "chat_template_kwargs": told}))
    with pytest.raises(RequestError, match="messages.0.name is not read"):
        reader.requests(read_chat({"messages": [{**said, "name": "bob"}]}))
    asked = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    with pytest.raises(RequestError, match="reasoning_effort and chat_template_kwargs.enable_thinking must agree"):
        reader.requests(read_chat({"messages": [said], **asked}))
    tagged = PromptReader(Served.read(server.inference), 512, THINKS + "{% generation %}{% endgeneration %}")
    assert tagged.requests(read_chat({"messages": [said], "chat_template_kwargs": {"enable_thinking": True}}))


def markdown(**models: type[Fields]) -> str:
    """Bodies by their names in a page as one table: a line for each field, and the bodies that have it."""
    found: dict[tuple[str, ...], list[str]] = {}
    for title, model in models.items():
        for row in description.rows(model):
            found.setdefault(row, []).append(title)
    lines = ["| field | only of | from | value | |", "|---|---|---|---|---|"]
    for (name, *rest), titles in found.items():
        only = "" if len(titles) == len(models) else ", ".join(titles)
        lines.append(f"| {' | '.join([f'`{name}`', only, *rest])} |")
    return "\n".join(lines)


def test_the_page_has_the_tables_of_fields():
    page = (Path(__file__).parents[1] / "docs" / "serving.md").read_text(encoding="utf-8")
    bodies = markdown(chats=ChatBody, completions=CompletionBody, responses=ResponseBody)
    for table in (bodies, markdown(streams=StreamOptions)):
        assert table in page, f"docs/serving.md should have\n{table}"


def test_penalties_of_trees_are_those_of_one_token_at_a_time(client, server):
    """Greedy, by the target's logits from Hugging Face; some drafts are accepted."""
    model, prompt = server.inference.pair.target_model.base_model, server.inference.tokenizer(PROMPT).input_ids
    for presence, frequency in ((1.4, 0.0), (0.0, 0.6), (-0.5, 0.9)):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 20:
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, -1].float()
            counts = torch.bincount(torch.tensor(tokens[len(prompt) :], dtype=torch.int64), minlength=len(logits))
            tokens.append(int((logits - frequency * counts - presence * (counts > 0)).argmax()))
        body = dict(prompt=prompt, max_tokens=20, presence_penalty=presence, frequency_penalty=frequency)
        before = client.metric("vllm:spec_decode_num_accepted_tokens_total")
        answer = client.ask("/v1/completions", {**body, **GREEDY, "return_token_ids": True})[2]
        assert answer["choices"][0]["token_ids"] == tokens[len(prompt) :]
        assert client.metric("vllm:spec_decode_num_accepted_tokens_total") > before


def test_tokens_and_back(client, server):
    tokens = server.inference.tokenizer(PROMPT).input_ids
    answer = client.ask("/tokenize", dict(prompt=PROMPT, return_token_strs=True))[2]
    assert answer["tokens"] == tokens and answer["count"] == len(tokens) and answer["max_model_len"] == 512
    assert answer["token_strs"] == server.inference.tokenizer.convert_ids_to_tokens(tokens)
    assert client.ask("/detokenize", dict(tokens=tokens))[2]["prompt"] == PROMPT
    said = client.ask("/tokenize", dict(messages=[dict(role="user", content=PROMPT)]))[2]
    assert said["tokens"] == tokens
    info = client.ask("/tokenizer_info")[2]
    assert info["eos_token"] == server.inference.tokenizer.eos_token and info["model_max_length"] == 512
    for path, body, param in (
        ("/tokenize", dict(prompt="x", messages=[dict(role="user", content="x")]), "prompt"),
        ("/tokenize", dict(prompt="x", tools=[]), "tools"),
        ("/detokenize", dict(tokens=[4096]), "tokens"),
        ("/detokenize", dict(tokens=[-1]), "tokens.0"),
    ):
        status, _, answer = client.ask(path, body)
        assert (status, answer["error"]["param"]) == (400, param)


def test_the_api_describes_itself(client):
    described = client.ask("/openapi.json")[2]
    paths, parts = described["paths"], described["components"]["schemas"]
    body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    properties = parts[body["$ref"].rpartition("/")[2]]["properties"]
    assert properties["n"]["anyOf"][0]["maximum"] == 128 and properties["suffix"]["anyOf"][0] == {
        "const": "",
        "type": "string",
    }
    routes = {path for path in paths if client.ask(path.replace("{name}", "demo"))[0] != 404}
    assert paths.keys() - routes <= {"/v1/responses/{name}"}
    assert "presence_penalty" in client.ask("/docs")[2] and client.ask("/version")[2]["version"]


def test_paths_at_a_proxy_may_keep_their_prefix(client):
    models = client.ask("/v1/models")[2]
    assert client.ask("/llm/v1/models")[2] == models and client.ask("/llm/health")[0] == 200
    assert client.ask("/llm/v1/models", Host="evil.example")[0] == 403
    assert [client.ask(path)[0] for path in ("/llm/llm/v1/models", "/llmv1/models", "/other/v1/models")] == [404] * 3
    assert client.ask("/llm/openapi.json")[2]["servers"] == [{"url": "/llm"}]
    status, headers, _ = client.ask("/llm")
    assert status == 307 and headers["location"].endswith("/llm/"), "the page asks by relative paths"
    for path in ("/llm/", "/"):
        page = client.ask(path)[2]
        assert '<base href="/llm/">' in page and 'fetch("v1/models"' in page


def test_a_server_without_a_key_answers_to_its_own_names(client):
    for host, status in (("evil.example", 403), ("known.example:1", 200), ("localhost", 200), ("[::1]:8", 200)):
        assert client.ask("/v1/models", Host=host)[0] == status
    assert client.ask("/health", Host="evil.example")[0] == 200


def test_pages_of_allowed_origins_may_ask(client):
    for origin, allowed in (("https://page.example", "https://page.example"), ("https://evil.example", None)):
        assert client.ask("/v1/models", Origin=origin)[1].get("access-control-allow-origin") == allowed
    asked = dict(Origin="https://page.example", Access_Control_Request_Method="POST")
    assert client.ask("/v1/completions", method="OPTIONS", **asked)[0] == 200


def test_a_body_that_does_not_come_is_not_waited_for(client, monkeypatch):
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", client.port), timeout=20) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 408") and b"within 0.2 seconds" in answer


def test_a_connection_without_a_request_is_closed(monkeypatch):
    monkeypatch.setattr(serve, "HEADER_SECONDS", 1.0)

    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    with answering(answer, http=serve.protocol()) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as half:
            half.sendall(b"GET / HTTP/1.1\r\nHost")
            assert half.recv(99) == b""
        with socket.create_connection(("127.0.0.1", port), timeout=20) as whole:
            whole.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"204" in whole.recv(99)


def test_the_key_may_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_text("from a file\n")

    def key(*arguments: str) -> str | None:
        args = serve._parse(serve._parser("serve"), ["--model", "demo", *arguments])
        assert args.model == "demo" and ("api_key" in args.named) == (args.api_key is not None)
        return args.api_key

    assert key() is None and key("--api-key-file", str(file)) == "from a file"
    monkeypatch.setenv(serve.KEY_VARIABLE, "from the environment")
    assert key() == "from the environment" and key("--api-key", "given") == "given"


def test_a_model_without_a_draft_is_served_with_suffix_drafts(caplog):
    caplog.set_level("INFO")
    target = str(demo_directory("target"))
    inference = serve._load(serve._parse(serve._parser("serve"), [target, "--device", "cpu"]))
    drafters = Drafters.read(inference)
    assert (drafters.model, drafters.text) == (None, "suffix") and "has no draft beside it" in caplog.text
