"""Reads the bodies of requests: every field is checked, and unknown fields are refused by name."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_triton.serve.response_format import read_grammar

MAX_FLOAT = sys.float_info.max  # NaN, infinity, and whole numbers of more digits are no numbers here
MAX_SEED = 2**63
MAX_STOPS = 16
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class RequestError(Exception):
    """What is answered instead of a completion. param: the field that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error body."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Body:
    """What a request asks for. What only the model knows is not checked yet.

    prompt: text or token ids, or instead of it messages, each with "role" and "content" as text. max_tokens: None takes
    the endpoint's default. sampling: the given options of `EAGLEConfig.sampling`. stop_ids: added to the model's own.
    logprobs: of each token. grammar_field: asks for the grammar of `sampling`, if there is one. usage,
    continuous_usage, drafts: what a stream reports besides text.
    """

    prompt: str | list[int] = ""
    messages: list[dict[str, str]] | None = None
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    stream: bool = False
    usage: bool = False
    continuous_usage: bool = False
    drafts: bool = False
    user: str | None = None
    grammar_field: str = "response_format"

    @property
    def chat(self) -> bool:
        """Whether it came to /v1/chat/completions."""
        return self.messages is not None


# --- kinds of values: the expected value in words, and a check ---

Kind = tuple[str, Callable[[Any], bool]]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(least: int, most: int | None = None) -> Kind:
    words = f"a whole number from {least} on" if most is None else f"a whole number from {least} to {most}"
    return words, lambda value: _is_whole(value) and value >= least and (most is None or value <= most)


def _number(words: str, holds: Callable[[float], bool]) -> Kind:
    return (
        f"a number {words}",
        lambda value: (
            isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_FLOAT and holds(value)
        ),
    )


def _list_of(words: str, holds: Callable[[Any], bool]) -> Kind:
    return words, lambda value: isinstance(value, list) and all(map(holds, value))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_token(value: Any) -> bool:
    return _is_whole(value) and 0 <= value < 2**31


def _is_bias(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    numbers = all(_BIAS[1](bias) for bias in value.values())
    return numbers and all(len(token) < 10 and token.isascii() and token.isdigit() for token in value)


def _is_stop(value: Any) -> bool:
    some = [value] if isinstance(value, str) else value
    return isinstance(some, list) and len(some) <= MAX_STOPS and all(isinstance(one, str) and one for one in some)


_BIAS = _number("from -100 to 100", lambda value: -100 <= value <= 100)
_SWITCH: Kind = ("true or false", lambda value: isinstance(value, bool))
_TEXT: Kind = ("a string", _is_text)
_OBJECT: Kind = ("a mapping", lambda value: isinstance(value, dict))

_STREAM_OPTIONS: dict[str, Kind] = {
    "include_usage": _SWITCH,
    "continuous_usage_stats": _SWITCH,
    "include_drafts": _SWITCH,
}
_BOTH: dict[str, Kind] = {
    "model": _TEXT,
    "max_tokens": _whole(1),
    "min_tokens": _whole(0),
    "temperature": _number("from 0 on", lambda value: value >= 0),
    "top_p": _number("above 0 and at most 1", lambda value: 0 < value <= 1),
    "top_k": _whole(-1),
    "min_p": _number("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": _number("above 0", lambda value: value > 0),
    "logit_bias": ("a mapping of token ids to numbers from -100 to 100", _is_bias),
    "seed": _whole(-MAX_SEED, MAX_SEED - 1),
    "stop": (f"a string that is not empty, or a list of at most {MAX_STOPS} of them", _is_stop),
    "stop_token_ids": _list_of("a list of token ids", _is_token),
    "ignore_eos": _SWITCH,
    "stream": _SWITCH,
    "stream_options": _OBJECT,
    "user": _TEXT,
    "response_format": _OBJECT,
    "structured_outputs": _OBJECT,
}
_CHAT: dict[str, Kind] = {
    "messages": _list_of("a list of messages", lambda value: isinstance(value, dict)),
    **_BOTH,
    "max_completion_tokens": _whole(1),
    "logprobs": _SWITCH,
}
_COMPLETION: dict[str, Kind] = {
    "prompt": ("a string or a list of token ids", lambda value: True),  # `_prompt` says what is wrong with it
    **_BOTH,
    "logprobs": ("a whole number from 0 on, or false", lambda value: value is False or _whole(0)[1](value)),
}
_ROLES = ("system", "developer", "user", "assistant")
_ALONE = "one answer to one prompt: send a request for each"
_NO_TOOLS = "tools are not offered"
_Refusals = Mapping[str, tuple[tuple[Any, ...], str]]  # known fields: the values that ask for nothing, and why not
_NOT_OFFERED: _Refusals = {
    "n": ((1,), _ALONE),
    "best_of": ((1,), _ALONE),
    "presence_penalty": ((0,), "repetition_penalty is the penalty that the engine has"),
    "frequency_penalty": ((0,), "repetition_penalty is the penalty that the engine has"),
    "top_logprobs": ((0,), "the engine reports the log-probability of each chosen token, not those of others"),
    "echo": ((False,), "the engine reports new tokens alone"),
    "suffix": (("",), "the engine continues prompts and fills no gaps"),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none",), _NO_TOOLS),
    "parallel_tool_calls": ((), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none",), _NO_TOOLS),
    "store": ((False,), "nothing is stored"),
    "modalities": ((["text"],), "answers are text"),
}
_NOT_OF_MESSAGES: _Refusals = {  # that clients send back with an answer, mostly as null
    "name": ((), "chat templates are given roles and texts"),
    "refusal": ((), "what was refused stands in content"),
    "annotations": (([],), "messages are text"),
    "audio": ((), "messages are text"),
    "tool_calls": (([],), _NO_TOOLS),
    "function_call": ((), _NO_TOOLS),
}


def read_json(raw: bytes) -> dict[str, Any]:
    """A body as JSON. RequestError if it is no object, and for names that come twice, NaN, Infinity, and half of a
    surrogate pair."""
    try:
        body = json.loads(raw.decode(), object_pairs_hook=_without_twins, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the body must be UTF-8, and byte {error.start} is not") from None
    except RecursionError:
        raise RequestError(400, "the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise RequestError(400, f"the body must be JSON: {error}") from None
    except ValueError:  # Python's, of whole numbers
        raise RequestError(400, "the body holds a number of too many digits") from None
    if not isinstance(body, dict):
        raise RequestError(400, "the body must be a JSON object")
    if _SURROGATE.search(raw) and not _is_unicode(json.dumps(body, ensure_ascii=False)):
        raise RequestError(400, "the body holds half of a surrogate pair, which is no character")
    return body


def read_completion(given: Mapping[str, Any]) -> Body:
    """The body of /v1/completions. Raises RequestError naming the field."""
    asked = _checked(given, _COMPLETION, not_offered=_NOT_OFFERED)
    if asked.get("logprobs"):
        reason = _NOT_OFFERED["top_logprobs"][1]
        raise RequestError(400, f"logprobs must be 0 or null, got {asked['logprobs']}: {reason}", "logprobs")
    listed = asked.get("logprobs", False) is not False
    return _body(asked, prompt=_prompt(asked.get("prompt")), max_tokens=asked.get("max_tokens"), logprobs=listed)


def read_chat(given: Mapping[str, Any]) -> Body:
    """The body of /v1/chat/completions. Raises RequestError naming the field."""
    asked = _checked(given, _CHAT, not_offered=_NOT_OFFERED)
    most, older = asked.get("max_completion_tokens"), asked.get("max_tokens")
    if None not in (most, older) and most != older:
        raise RequestError(400, f"max_completion_tokens and max_tokens mean the same, got {most} and {older}",
                           "max_completion_tokens")  # fmt: skip
    messages = asked.get("messages")
    if not messages:
        raise RequestError(400, "messages must be a list of at least one message", "messages")
    said = [_message(message, f"messages.{index}") for index, message in enumerate(messages)]
    limit = older if most is None else most
    return _body(asked, messages=said, max_tokens=limit, logprobs=asked.get("logprobs", False))


# --- details ---


def _checked(
    given: Mapping[str, Any], kinds: Mapping[str, Kind], within: str = "", not_offered: _Refusals | None = None
) -> dict[str, Any]:
    """The fields that ask for something: not null, and not a value of a refused field that asks for nothing."""
    refusals = not_offered or {}
    asked = {}
    for name, value in given.items():
        param = f"{within}{name}"
        if name not in kinds and name not in refusals:
            near = difflib.get_close_matches(name, kinds, 1)
            hint = f", did you mean {near[0]}?" if near else f"; the fields are {', '.join(kinds)}"
            raise RequestError(400, f"unknown field {param:.100}{hint}", f"{param:.100}")
        if value is None:
            continue
        if name not in kinds:
            neutral, reason = refusals[name]
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
                raise RequestError(400, f"{param}={json.dumps(value):.60} is not offered: {reason}", param)
            continue
        words, holds = kinds[name]
        if not holds(value):
            raise RequestError(400, f"{param} must be {words}, got {json.dumps(value):.60}", param)
        asked[name] = value
    return asked


def _body(asked: Mapping[str, Any], **own: Any) -> Body:
    """A body from the fields that both endpoints share, and from an endpoint's own."""
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "seed")
    sampling = {name: asked[name] for name in names if name in asked}
    if "top_k" in asked:
        sampling["top_k"] = max(asked["top_k"], 0)  # -1 and 0 are off
    if "logit_bias" in asked:
        sampling["logit_bias"] = {int(token): value for token, value in asked["logit_bias"].items()}
        if len(sampling["logit_bias"]) < len(asked["logit_bias"]):
            raise RequestError(400, "logit_bias names a token twice", "logit_bias")
    try:
        grammar_field, grammar = read_grammar(asked)
    except (TypeError, ValueError) as error:
        raise RequestError(400, str(error), str(error).split()[0].partition(".")[0].rstrip(":")) from error
    if grammar is not None:
        sampling["grammar"] = grammar
    stream, stop = asked.get("stream", False), asked.get("stop", [])
    options = _checked(asked.get("stream_options", {}), _STREAM_OPTIONS, "stream_options.")
    if "stream_options" in asked and not stream:
        raise RequestError(400, "stream_options must come with stream=true", "stream_options")
    return Body(
        model=asked.get("model"),
        min_tokens=asked.get("min_tokens", 0),
        sampling=sampling,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_ids=tuple(asked.get("stop_token_ids", ())),
        ignore_eos=asked.get("ignore_eos", False),
        stream=stream,
        usage=options.get("include_usage", False),
        continuous_usage=options.get("continuous_usage_stats", False),
        drafts=options.get("include_drafts", False),
        user=asked.get("user"),
        grammar_field=grammar_field,
        **own,
    )


def _prompt(given: Any) -> str | list[int]:
    """Text or token ids; a list with one prompt is that prompt."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], (str, list)):
        given = given[0]
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(map(_is_token, given)):
        return given
    if isinstance(given, list) and len(given) > 1 and all(isinstance(one, (str, list)) for one in given):
        raise RequestError(400, f"prompt: {_ALONE}, got {len(given)}", "prompt")
    raise RequestError(400, "prompt must be a string or a list of token ids, and not empty", "prompt")


def _message(given: Mapping[str, Any], place: str) -> dict[str, str]:
    """A message with its content as text."""
    kinds: dict[str, Kind] = {
        "role": (f"one of {', '.join(_ROLES)}", lambda value: isinstance(value, str) and value in _ROLES),
        "content": ("a string, or a list of parts of type text", lambda value: isinstance(value, (str, list))),
    }
    said = _checked(given, kinds, f"{place}.", _NOT_OF_MESSAGES)
    for name in kinds:
        if name not in said:
            raise RequestError(400, f"{place}.{name} is missing", f"{place}.{name}")
    content = said["content"]
    if isinstance(content, list):
        part_kinds: dict[str, Kind] = {
            "type": ('"text"', lambda value: value == "text" and isinstance(value, str)),
            "text": _TEXT,
        }
        texts = []
        for index, part in enumerate(content):
            where = f"{place}.content.{index}"
            if not isinstance(part, dict):
                raise RequestError(400, f"{where} must be a part of type text, got {json.dumps(part):.60}", where)
            read = _checked(part, part_kinds, f"{where}.")
            if read.keys() != part_kinds.keys():
                raise RequestError(400, f"{where} must have type and text", where)
            texts.append(read["text"])
        content = "".join(texts)
    return {"role": said["role"], "content": content}


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise RequestError(400, f"{twice:.100} comes twice", f"{twice:.100}")
    return found


def _refuse_constant(name: str) -> Any:
    raise RequestError(400, f"the body must be JSON, which has no {name}")
