"""Answers in OpenAI's form: bodies of completions, and chunks of streams."""

from __future__ import annotations

import json
import re
import secrets
import time
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

from eagle_triton.engine.scheduler.requests import Piece, Request
from eagle_triton.engine.tree_spec import PLAIN
from eagle_triton.inference.session import Completion
from eagle_triton.inference.text import BROKEN, TextStream
from eagle_triton.serve.answer_parts import ARGUMENTS, CALL, CONTENT, REASONING, Part
from eagle_triton.serve.bodies import Body
from eagle_triton.serve.drafters import Drafters
from eagle_triton.serve.errors import RequestError
from eagle_triton.serve.prompts import PromptReader

SLOWER = "measured slower here"  # the reason to decode plainly although there is a draft
LEAST = -9999.0  # stands for a log-probability of minus infinity, which JSON cannot write
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = {chr(byte): byte for byte in PRINTABLE}  # by the characters that stand for them in vocabularies as GPT-2's
BYTES |= {chr(0x100 + n): byte for n, byte in enumerate(sorted({*range(0x100)} - {*PRINTABLE}))}
PADDED = 64  # events are padded to multiples of this many characters if their length is hidden

Top = Sequence[tuple[int, float]]
"""The likeliest tokens at a place with their log-probabilities, the likeliest first."""
Place = tuple[int, float | None, Top | None]
"""A token, its log-probability, and the likeliest tokens in its place; None: not known."""


class Said(NamedTuple):
    """A part of an answer. kind, text: as in `Part`. places: the tokens of content."""

    kind: str
    text: str
    places: list[Place]


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
        whole_choices = [
            choice.whole(completion) for choice, completion in zip(self._choices, completions, strict=True)
        ]
        chosen = []
        for first in range(0, len(whole_choices), self._body.samples):
            best = list(range(first, first + self._body.samples))
            if len(best) > self._body.n:
                best.sort(key=lambda index: -_mean(completions[index].logprobs))
            chosen += best[: self._body.n]
        choices = [{**whole_choices[index], "index": place} for place, index in enumerate(chosen)]
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
        return [self._event([fields]) for choice in self._choices for fields in choice.begin()]

    def chunk(self, index: int, piece: Piece) -> list[bytes]:
        """The events of one piece of a request. Those of the last piece also end the stream."""
        choice = self._choices[index]
        fields, drafts = choice.add(piece)
        events = [self._event([fields], drafts=drafts)] if fields is not None else []
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
        self._begins: list[int] = []  # for each token: characters of the marked text before it
        self._decided = 0  # tokens before the end of the last content
        self._begun = self._named = False  # the prompt's text, and its ids, are in the answer
        stream = partial(TextStream, reader.tokenizer, self._prompt[-16:], body.stop, body.min_tokens)
        self._drafted = stream() if body.options.include_drafts else None
        self._parts = reader.answer_reader(body, self._prompt)
        self._marked = stream(special=True) if self._parts is not None else None  # text with the markers of parts
        self._calls = 0  # that have begun
        self._call = -1  # index of the last one in a delta
        self._thoughts = ""  # reasoning that waits for its end
        self.parted = self._parts is not None
        # an answer without reasoning has this field too, as in SGLang
        self._nothing = {"reasoning_content": None} if reader.may_reason(body) else {}
        self._echo = self._echoed() if body["echo"] else ""
        self._listed = TextStream(reader.tokenizer, self._prompt[-16:])  # the text of the tokens that were listed
        self._offset = len(self._echo)  # of the next token in the choice's text

    def whole(self, completion: Completion) -> dict[str, Any]:
        fields, _ = self.add(whole_piece(self._request, completion))
        assert fields is not None, "a completion ends its request"
        if self._body.chat:
            message = {"role": "assistant", "content": None, "refusal": None, **fields.pop("delta")}
            for call in message.get("tool_calls", ()):
                del call["index"]
            if "tool_calls" not in message:
                message["content"] = message["content"] or ""
            fields["message"] = message
        else:
            fields["prompt_logprobs"] = self.prompt_logprobs(completion)
            fields.setdefault("prompt_token_ids", None)
        fields.setdefault("token_ids", None)
        return fields

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
                facts = {"rank": ranks.get(one), "decoded_token": self._reader.text([one])}
                found[str(one)] = {"logprob": max(score, LEAST), **facts}
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
        return [self._choice_fields({"role": "assistant", "content": ""})] if self._body.chat else []

    def add(self, piece: Piece) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """A choice for a piece, or None if the piece shows nothing yet; and the drafts, if the body asks for them."""
        completion = piece.completion
        fresh = slice(self.used, piece.certain_tokens)  # later ones may belong to a stop string
        drafts, delta = self._drafts(piece) if self._drafted is not None else None, self._delta(piece)
        places = self._places[fresh]
        if self._drops_all:
            delta, places, self.used = {}, [], 0
        answered, echoed = [token for token, *_ in places], list[Place]()
        if self._body["echo"] and not self._begun and (piece.text or piece.tokens or completion):
            delta = {**delta, "content": self._echo + delta.get("content", "")}
            self._begun = True
            if not self._body.chat:
                scored = [(max(value, LEAST), top) for value, top in piece.prompt_logprobs or []]
                before = zip_longest(self._prompt, [(None, None), *scored], fillvalue=(None, None))
                echoed = [(token, *known) for token, known in before]
        listed = None
        if self._body.logprobs is not None and (places or echoed or completion):
            listed = self._logprobs(places, echoed)
        if not (delta or listed or drafts or completion):
            return None, drafts
        if self._body.chat and not (delta or completion):
            delta = {"content": ""}
        finished = None if completion is None else completion.finished
        if finished == "stop" and self._calls and self._body.tools.named is None:  # as OpenAI has it
            finished = "tool_calls"
        fields = self._choice_fields(delta, listed, finished)
        if completion is not None:
            fields |= self._ending(completion, finished)
        if self._body["return_token_ids"]:
            fields["token_ids"] = answered
            if not (self._body.chat or self._named):
                fields["prompt_token_ids"], self._named = self._prompt, True
        return fields, drafts

    def _ending(self, completion: Completion, finished: str | None) -> dict[str, Any]:
        """The stop string or token. As vLLM: only one that the body asks for. As SGLang: any, but not for calls."""
        last = completion.tokens[-1] if completion.finished == "stop" and completion.tokens else None
        matched = completion.stop_string or (last if last in self._request.stop_ids else None)
        asked = completion.stop_string is not None or last in self._body.stop_token_ids
        return {
            "stop_reason": matched if asked else None,
            "matched_stop": None if finished == "tool_calls" else matched,
        }

    def read(self, piece: Piece) -> list[Said]:
        """The parts of a piece in the order of the text. Tokens without text come with the text after them."""
        count, last = len(piece.tokens), piece.completion is not None
        scores = [None] * count if piece.logprobs is None else [max(value, LEAST) for value in piece.logprobs]
        self._places += zip(piece.tokens, scores, piece.top_logprobs or [[]] * count, strict=True)
        self.used, tokens = piece.certain_tokens, list(piece.tokens)
        if last and piece.finished == "stop" and tokens and tokens[-1] in self._request.stop_ids:
            del tokens[-1]  # it ends the turn and is not part of the answer
        if self._parts is None or self._marked is None:
            if not (piece.text or last):
                return []
            places = self._places[self._decided : len(self._places) - count + len(tokens)]
            self._decided += len(places)
            return [Said(CONTENT, piece.text, places)]
        parts = []
        for token in tokens:
            if not self._marked.stopped:
                self._begins.append(self._parts.count)
                parts += self._parts.push(self._marked.push(token))
                self.thought += self._parts.reasons
        if last:
            parts += [*self._parts.push(self._marked.finish()), *self._parts.finish()]
        return self._joined(parts)

    def _joined(self, parts: Iterable[Part]) -> list[Said]:
        """Parts with their tokens. Neighbours of the same kind are joined, and calls that are not wanted left out."""
        found: list[Said] = []
        for kind, text, end in parts:
            self._calls += kind == CALL
            if kind in (CALL, ARGUMENTS) and self._body.tools.one_call and self._calls > 1:
                continue
            places = self._tokens(end - len(text), end) if kind == CONTENT else []
            if found and found[-1].kind == kind != CALL:
                before = found.pop()
                text, places = before.text + text, before.places + places
            found.append(Said(kind, text, places))
        return found

    def _tokens(self, begin: int, end: int) -> list[Place]:
        """The tokens of these characters of the marked text, without those that earlier content has."""
        if not self._begins:  # the prompt ended within a character
            return []
        first = self._begins[bisect_right(self._begins, begin) - 1]  # where the token of the first character begins
        chosen = slice(max(self._decided, bisect_left(self._begins, first)), bisect_left(self._begins, end))
        self._decided = chosen.stop
        return self._places[chosen]

    def _delta(self, piece: Piece) -> dict[str, Any]:
        """The delta of a piece that may have reasoning and calls."""
        delta: dict[str, Any] = {}
        for kind, text, _ in self.read(piece):
            if kind in (CALL, ARGUMENTS):
                self._add_call(delta, kind, text)
            elif kind == CONTENT and text:
                delta["content"] = delta.get("content", "") + text
            elif kind == REASONING and self._body["include_reasoning"] is not False:
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
        if self._parts is not None and self._body["stream_reasoning"] is False:
            self._thoughts += delta.pop("reasoning_content", "")
            if self._thoughts and (piece.completion is not None or not self._parts.reasons):
                delta["reasoning_content"], self._thoughts = self._thoughts, ""
        return delta

    def _add_call(self, delta: dict[str, Any], kind: str, text: str) -> None:
        """Add a part of a call to a delta: the function's name, which begins a call, or arguments."""
        self._call += kind == CALL
        calls = delta.setdefault("tool_calls", [])
        if kind == CALL:
            function = {"name": text, "arguments": ""}
            calls.append({"index": self._call, "id": self.call_id(), "type": "function", "function": function})
        elif calls:
            calls[-1]["function"]["arguments"] += text
        else:
            calls.append({"index": self._call, "function": {"arguments": text}})

    def call_id(self) -> str:
        return self._reader.call_name(self._body, uuid.uuid4().hex)

    def _choice_fields(
        self, delta: dict[str, Any], logprobs: Any = None, finished: str | None = None
    ) -> dict[str, Any]:
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

    def _logprobs(self, places: Sequence[Place], echoed: Sequence[Place]) -> dict[str, Any]:
        """The log-probabilities of tokens. echoed: those of the prompt, which come first in a completion."""
        if self._body.chat:
            return {"content": self.scored(places), "refusal": None}
        listed: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": []}
        begin = len(self._echo) - len(self._reader.text(self._prompt)) if echoed else 0  # negative if BOS was added
        offsets = self._offsets(TextStream(self._reader.tokenizer, special=True), echoed, begin)[:-1]
        *fresh, self._offset = self._offsets(self._listed, places, self._offset)
        for (token, value, top), offset in zip([*echoed, *places], [*offsets, *fresh], strict=True):
            found = {self._name(token): value}
            for other, likely in self._likeliest(top):  # if two have the same text: the chosen one, else the likelier
                found.setdefault(self._name(other), likely)
            facts = self._name(token), value, offset, None if top is None else found
            for name, fact in zip(listed, facts, strict=True):
                listed[name].append(fact)
        return listed

    def _offsets(self, stream: TextStream, places: Sequence[Place], begin: int) -> list[int]:
        """Where each token begins in a text, and where the next one begins. begin: where the first begins."""
        lengths = (len(stream.push(token)) for token, *_ in places)
        return [max(offset, 0) for offset in accumulate(lengths, initial=begin)]

    def _likeliest(self, top: Top | None) -> list[tuple[int, float]]:
        return [(token, max(value, LEAST)) for token, value in (top or ())[: self._body.logprobs or 0]]

    def scored(self, places: Sequence[Place]) -> list[dict[str, Any]]:
        """The log-probabilities of tokens in a chat's form; none if the body asks for none."""
        if self._body.logprobs is None:
            return []
        return [
            {**self._scored(token, value), "top_logprobs": [self._scored(*one) for one in self._likeliest(top)]}
            for token, value, top in places
        ]

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._body["return_tokens_as_token_ids"] else self._reader.text([token])

    def _scored(self, token: int, value: float | None) -> dict[str, Any]:
        found = _bytes(self._reader, token)
        if found is None and self._body.of_response:
            found = []  # null is not allowed there
        return {"token": self._name(token), "logprob": value, "bytes": found}


def whole_piece(request: Request, completion: Completion) -> Piece:
    """A completion as the only piece of its request."""
    return Piece(
        0, request, completion.tokens, completion.text or "",
        logprobs=completion.logprobs, top_logprobs=completion.top_logprobs, completion=completion,
        certain_tokens=len(completion.tokens), prompt_logprobs=completion.prompt_logprobs,
        finished=completion.finished,
    )  # fmt: skip


def event(body: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event. name: its kind, if it has one."""
    kind = "" if name is None else f"event: {name}\n"
    return f"{kind}data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n".encode(errors="replace")


def _mean(logprobs: Sequence[float] | None) -> float:
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def _bytes(reader: PromptReader, token: int) -> list[int] | None:
    """The bytes of a token, which may be a part of a character; None if they are not known."""
    text, name = reader.text([token]), reader.tokenizer.convert_ids_to_tokens(token)
    if BROKEN not in text:
        return list(text.encode())
    if found := re.fullmatch("<0x([0-9A-F]{2})>", name):  # SentencePiece's
        return [int(found[1], 16)]
    known = [BYTES[character] for character in name if character in BYTES]
    return known if len(known) == len(name) else None
