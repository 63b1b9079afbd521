"""Answers in OpenAI's form: bodies of completions, and chunks of streams."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Sequence
from functools import partial
from itertools import compress, zip_longest
from typing import Any

from eagle_triton.engine.scheduler.requests import Piece, Request
from eagle_triton.engine.tree_spec import PLAIN
from eagle_triton.inference.session import Completion
from eagle_triton.inference.text import TextStream
from eagle_triton.serve.answer_parts import ARGUMENTS, CALL, CONTENT
from eagle_triton.serve.bodies import Body
from eagle_triton.serve.drafters import Drafters
from eagle_triton.serve.errors import RequestError
from eagle_triton.serve.prompts import PromptReader

SLOWER = "measured slower here"  # the reason to decode plainly although there is a draft
LEAST = -9999.0  # stands for a log-probability of minus infinity, which JSON cannot write
PADDED = 64  # events are padded to multiples of this many characters if their length is hidden

Top = Sequence[tuple[int, float]]
"""The likeliest tokens at a place with their log-probabilities, the likeliest first."""
Place = tuple[int, float | None, Top | None]
"""A token, its log-probability, and the likeliest tokens in its place; None: not known."""


class Answer:
    """One body's answer, as a whole or in chunks.

    `chunk` is called with every piece of each request; `whole` with the completions alone.
    """

    def __init__(
        self, body: Body, requests: Sequence[Request], model: str, reader: PromptReader, drafters: Drafters
    ) -> None:
        """requests: of the body, in order. model: its name in the answer. reader: for the text of tokens."""
        self._body = body
        self._choices = [Choice(body, index, request, reader, drafters) for index, request in enumerate(requests)]
        self._prompt_tokens = sum(len(request.prompt) for request in requests[:: body.samples])
        self._ended: list[Completion] = []
        kind = ("chatcmpl", "chat.completion") if body.chat else ("cmpl", "text_completion")
        self.id = f"{kind[0]}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "object": kind[1], "created": int(time.time()), "model": model}
        if body["service_tier"]:
            self._head["service_tier"] = "default"
        ids = requests[0].prompt.tolist() if body.chat and body["return_token_ids"] else None
        self._once = {} if ids is None else {"prompt_token_ids": ids}  # only in the first event

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The whole answer, from the completions of all requests in order."""
        self._ended = list(completions)
        said = [choice.whole(completion) for choice, completion in zip(self._choices, completions, strict=True)]
        chosen = []
        for first in range(0, len(said), self._body.samples):
            best = list(range(first, first + self._body.samples))
            if len(best) > self._body.n:
                best.sort(key=lambda index: -_mean(completions[index].logprobs))
            chosen += best[: self._body.n]
        choices = [{**said[index], "index": place} for place, index in enumerate(chosen)]
        once: dict[str, Any] = {}
        if self._body.chat:
            scored = self._choices[0].prompt_logprobs(completions[0])
            once = {"prompt_token_ids": None, **self._once, "prompt_logprobs": scored}
        return {**self._head, **once, "choices": choices, "usage": self._usage()}

    def failed(self, error: RequestError) -> bytes:
        """The event of an error in a stream."""
        return event(error.body)

    def begin(self) -> list[bytes]:
        """What a stream begins with."""
        return [self._event([said]) for choice in self._choices for said in choice.begin()]

    def chunk(self, index: int, piece: Piece) -> list[bytes]:
        """The events of one piece of a request. Those of the last piece also end the stream."""
        choice = self._choices[index]
        said, drafts = choice.add(piece)
        events = [self._event([said], drafts=drafts)] if said is not None else []
        if piece.completion is not None:
            self._ended.append(piece.completion)
            if len(self._ended) == len(self._choices):
                if self._body.options.include_usage:
                    events.append(self._event([], usage=self._usage()))
                events.append(b"data: [DONE]\n\n")
        return events

    def _event(self, choices: list[Any], *, usage: Any = None, drafts: Any = None) -> bytes:
        body: dict[str, Any] = {**self._head, **self._once, "choices": choices}
        self._once = {}
        if self._body.chat:
            body["object"] = "chat.completion.chunk"
        if self._body.options.include_usage:
            continuous = self._body.options.continuous_usage_stats and usage is None
            body["usage"] = self._usage() if continuous else usage
        if drafts is not None:
            body["drafts"] = drafts
        if self._body.options.include_obfuscation and choices:
            body["obfuscation"] = secrets.token_hex(PADDED)[: PADDED - len(json.dumps(body)) % PADDED]
        return event(body)

    def _usage(self) -> dict[str, Any]:
        """The tokens so far; once all requests have ended, also how many prompt tokens were found in kept pages."""
        done = len(self._ended) == len(self._choices)
        used = sum(choice.used for choice in self._choices)
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": used,
            "total_tokens": self._prompt_tokens + used,
        }
        if done:
            found = sum(completion.statistics.found_tokens for completion in self._ended)
            usage["prompt_tokens_details"] = {"cached_tokens": min(found, self._prompt_tokens)}
        if any(choice.parted for choice in self._choices):
            thought = sum(choice.thought for choice in self._choices)
            usage["completion_tokens_details"] = {"reasoning_tokens": thought}
        return usage


class Choice:
    """One request's part of an answer. used: its tokens so far. thought: the reasoning tokens among them, markers
    included. parted: its text may have reasoning or calls."""

    def __init__(self, body: Body, index: int, request: Request, reader: PromptReader, drafters: Drafters) -> None:
        self._body, self._index, self._reader, self._drafters = body, index, reader, drafters
        self._request, self._prompt = request, request.prompt.tolist()
        self._drops_all = body.max_tokens == 0  # one token is decoded all the same, to read the prompt
        self.used = self.thought = 0
        self._places: list[Place] = []
        self._of_text: list[bool] = []  # whether these tokens are neither reasoning, nor calls, nor the end
        self._characters = 0  # of the tokens that were listed
        self._begun = self._named = False  # the prompt's text, and its ids, are in the answer
        stream = partial(TextStream, reader.tokenizer, self._prompt[-16:], body.stop, body.min_tokens)
        self._drafted = stream() if body.options.include_drafts else None
        self._parts = reader.answer_reader(body, self._prompt)
        self._marked = stream(special=True) if self._parts is not None else None  # text with the markers of parts
        self._calls = 0  # that have begun
        self._thoughts = ""  # reasoning that waits for its end
        self.parted = self._parts is not None
        # an answer without reasoning has this field too, as in SGLang
        self._nothing = {"reasoning_content": None} if reader.may_reason(body) else {}
        self._echo = self._echoed() if body["echo"] else ""

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The whole choice."""
        piece = Piece(
            0, self._request, completion.tokens, completion.text or "",
            logprobs=completion.logprobs, top_logprobs=completion.top_logprobs, completion=completion,
            certain_tokens=len(completion.tokens), prompt_logprobs=completion.prompt_logprobs,
            finished=completion.finished,
        )  # fmt: skip
        said, _ = self.add(piece)
        assert said is not None, "a completion ends its request"
        if self._body.chat:
            message = {"role": "assistant", "content": None, "refusal": None, **said.pop("delta")}
            for call in message.get("tool_calls", ()):
                del call["index"]
            if "tool_calls" not in message:
                message["content"] = message["content"] or ""
            said["message"] = message
        else:
            said["prompt_logprobs"] = self.prompt_logprobs(completion)
            said.setdefault("prompt_token_ids", None)
        said.setdefault("token_ids", None)
        return said

    def prompt_logprobs(self, completion: Completion) -> list[dict[str, Any] | None] | None:
        """For each token of the prompt but the first: by token id, the log-probabilities of itself and of the likeliest
        tokens. The rank of a token that is not among the likeliest is None. Returns None if the body asks for none."""
        if (most := self._body["prompt_logprobs"]) is None:
            return None
        places: list[dict[str, Any] | None] = [None]
        for token, (value, top) in zip(self._prompt[1:], completion.prompt_logprobs or (), strict=True):
            likeliest = top[:most]
            ranks = {one: rank for rank, (one, _) in enumerate(likeliest, 1)}
            found = {}
            for one, score in {token: value, **dict(likeliest)}.items():
                said = {"rank": ranks.get(one), "decoded_token": self._reader.text([one])}
                found[str(one)] = {"logprob": max(score, LEAST), **said}
            places.append(found)
        return places

    def _echoed(self) -> str:
        """The text that the answer repeats first: in a chat the last message, else the prompt as far as it is read."""
        if self._body.messages is not None:
            return self._body.messages[-1]["content"]
        given = self._body.prompts[self._index // self._body.samples]
        whole = isinstance(given, str) and self._body["truncate_prompt_tokens"] is None
        return given if whole and isinstance(given, str) else self._reader.text(self._prompt)

    def begin(self) -> list[dict[str, Any]]:
        """What this choice's part of a stream begins with."""
        return [self._said({"role": "assistant", "content": ""})] if self._body.chat else []

    def add(self, piece: Piece) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """A choice for a piece, or None if the piece shows nothing yet; and the drafts, if the body asks for them."""
        completion = piece.completion
        count = len(piece.tokens)
        scores = [None] * count if piece.logprobs is None else [max(value, LEAST) for value in piece.logprobs]
        self._places += zip(piece.tokens, scores, piece.top_logprobs or [[]] * count, strict=True)
        drafts, delta = self._drafts(piece) if self._drafted is not None else None, self._delta(piece)
        fresh = slice(self.used, piece.certain_tokens)  # later ones may belong to a stop string
        places, self.used = self._places[fresh], piece.certain_tokens
        if self._body.of_response:  # it lists the log-probabilities of text alone
            places = [*compress(places, self._of_text[fresh])]
        if self._drops_all:
            delta, places, self.used = {}, [], 0
        answered = [token for token, *_ in places]
        if self._body["echo"] and not self._begun and (piece.text or piece.tokens or completion):
            delta = {**delta, "content": self._echo + delta.get("content", "")}
            self._begun = True
            if not self._body.chat:
                scored = [(max(value, LEAST), top) for value, top in piece.prompt_logprobs or []]
                before = zip_longest(self._prompt, [(None, None), *scored], fillvalue=(None, None))
                places = [*((token, *known) for token, known in before), *places]
        listed = None
        if self._body.logprobs is not None and (places or completion):
            listed = self._logprobs(places)
        if not (delta or listed or drafts or completion):
            return None, drafts
        if self._body.chat and not (delta or completion):
            delta = {"content": ""}
        finished = None if completion is None else completion.finished
        if finished == "stop" and self._calls and self._body.tools.named is None:  # as OpenAI has it
            finished = "tool_calls"
        said = self._said(delta, listed, finished)
        if completion is not None:
            said |= self._ending(completion, finished)
        if self._body["return_token_ids"]:
            said["token_ids"] = answered
            if not (self._body.chat or self._named):
                said["prompt_token_ids"], self._named = self._prompt, True
        return said, drafts

    def _ending(self, completion: Completion, finished: str | None) -> dict[str, Any]:
        """The stop string or token. As vLLM: only one that the body asks for. As SGLang: any, but not for calls."""
        last = completion.tokens[-1] if completion.finished == "stop" and completion.tokens else None
        matched = completion.stop_string or (last if last in self._request.stop_ids else None)
        asked = completion.stop_string is not None or last in self._body.stop_token_ids
        return {
            "stop_reason": matched if asked else None,
            "matched_stop": None if finished == "tool_calls" else matched,
        }

    def _delta(self, piece: Piece) -> dict[str, Any]:
        """The delta of a piece that may have reasoning and calls."""
        tokens, last = list(piece.tokens), piece.completion is not None
        if last and piece.finished == "stop" and tokens and tokens[-1] in self._request.stop_ids:
            del tokens[-1]  # it ends the turn and is not part of the answer
        if self._parts is None or self._marked is None:
            self._of_text += [True] * len(tokens) + [False] * (len(piece.tokens) - len(tokens))
            return {"content": piece.text} if piece.text else {}
        parts = []
        for token in tokens:
            if not self._marked.stopped:
                parts += self._parts.push(self._marked.push(token))
                self.thought += self._parts.reasons
                self._of_text.append(self._parts.in_text)
        self._of_text += [False] * (len(self._places) - len(self._of_text))
        if last:
            parts += [*self._parts.push(self._marked.finish()), *self._parts.finish()]
        delta: dict[str, Any] = {}
        for kind, said in parts:
            if kind in (CALL, ARGUMENTS):
                self._add_call(delta, kind, said)
            elif kind == CONTENT:
                delta["content"] = delta.get("content", "") + said
            elif self._body["include_reasoning"] is not False:
                delta["reasoning_content"] = delta.get("reasoning_content", "") + said
        if self._body["stream_reasoning"] is False:
            self._thoughts += delta.pop("reasoning_content", "")
            if self._thoughts and (last or not self._parts.reasons):
                delta["reasoning_content"], self._thoughts = self._thoughts, ""
        return delta

    def _add_call(self, delta: dict[str, Any], kind: str, said: str) -> None:
        """Add a part of a call to a delta: the function's name, which begins a call, or arguments."""
        self._calls += kind == CALL
        if self._body.tools.one_call and self._calls > 1:
            return
        calls, index = delta.setdefault("tool_calls", []), self._calls - 1
        if kind == CALL:
            called = self._reader.call_name(self._body, uuid.uuid4().hex)
            function = {"name": said, "arguments": ""}
            calls.append({"index": index, "id": called, "type": "function", "function": function})
        elif calls:
            calls[-1]["function"]["arguments"] += said
        else:
            calls.append({"index": index, "function": {"arguments": said}})

    def _said(self, delta: dict[str, Any], logprobs: Any = None, finished: str | None = None) -> dict[str, Any]:
        if "reasoning_content" in delta:  # by both of vLLM's names
            delta = {**delta, "reasoning": delta["reasoning_content"]}
        content = {"delta": {**self._nothing, **delta}} if self._body.chat else {"text": delta.get("content", "")}
        return {"index": self._index, **content, "logprobs": logprobs, "finish_reason": finished}

    def _drafts(self, piece: Piece) -> dict[str, Any]:
        """The step's drafts and their drafter. `tokens`: the text that each token made certain, and its drafter."""
        assert self._drafted is not None
        tree, tokens = piece.tree or PLAIN, []
        for depth, token in enumerate(piece.tokens, 1):
            if not self._drafted.stopped:
                drafter = self._drafters.of(tree, depth) if depth <= piece.accepted else None
                tokens.append([self._drafted.push(token), drafter])
        if piece.completion is not None and (rest := self._drafted.finish()):
            tokens.append([rest, None])
        facts: dict[str, Any] = {"emitted": len(piece.tokens), "accepted": piece.accepted, "proposed": piece.proposed}
        facts |= {"verified": piece.tree is not None, "drafter": self._drafters.of(tree)}
        if piece.tree is not None and not tree.drafts and self._drafters.any:
            facts["paused"] = SLOWER
        return {**facts, "tokens": tokens}

    def _logprobs(self, places: Sequence[Place]) -> dict[str, Any]:
        def likeliest(top: Top | None) -> list[tuple[int, float]]:
            return [(token, max(value, LEAST)) for token, value in (top or ())[: self._body.logprobs or 0]]

        if self._body.chat:
            content = [
                {**self._scored(token, value), "top_logprobs": [self._scored(*one) for one in likeliest(top)]}
                for token, value, top in places
            ]
            return {"content": content, "refusal": None}
        listed: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": []}
        for token, value, top in places:
            found = {self._name(token): value}
            for other, likely in likeliest(top):  # if two have the same text: the chosen one, else the likelier
                found.setdefault(self._name(other), likely)
            facts = self._name(token), value, self._characters, None if top is None else found
            for name, fact in zip(listed, facts, strict=True):
                listed[name].append(fact)
            self._characters += len(self._reader.text([token]))
        return listed

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._body["return_tokens_as_token_ids"] else self._reader.text([token])

    def _scored(self, token: int, value: float | None) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": value, "bytes": _bytes(self._reader.text([token]))}


def event(body: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event. name: its kind, if it has one."""
    kind = "" if name is None else f"event: {name}\n"
    return f"{kind}data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n".encode(errors="replace")


def _mean(logprobs: Sequence[float] | None) -> float:
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def _bytes(text: str) -> list[int] | None:
    """The bytes of a token's text; None if the text is not whole characters."""
    return None if "\ufffd" in text else list(text.encode())
