"""Reads the bodies of requests: every field is checked by the tables of fields.py, and unknown fields are refused by
name."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eagle_triton.serve import fields
from eagle_triton.serve.errors import FieldError, RequestError
from eagle_triton.serve.fields import checked, is_token
from eagle_triton.serve.messages import Message, read_messages
from eagle_triton.serve.response_format import read_grammar
from eagle_triton.serve.tools import Tools, read_tools

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
SAMPLING = ("temperature", "top_p", "min_p", *PENALTIES, "seed")  # handed on as they are
MOST_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")  # by the endpoints' names
NO_TOOLS = Tools()


@dataclass(frozen=True)
class Body:
    """What a request asks for. What only the model knows is not checked yet. `body[name]` is a field by its name in
    fields.py: None if it is not there and has no default.

    prompts: each as text or token ids, or instead of them the messages of one prompt. sampling: the given options of
    `EAGLEConfig.sampling`, with the grammar of a format; grammar_field: asks for what an answer must match, if anything
    does. options: of a stream. logprobs: report the log-probability of each token of the answer, and of this many of
    the likeliest beside it; None: nothing. effort: of reasoning. begins: the chat template begins an answer.
    of_response: the answer is a response.
    """

    asked: Mapping[str, Any]
    prompts: tuple[str | list[int], ...] = ()
    messages: list[Message] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    tools: Tools = NO_TOOLS
    logprobs: int | None = None
    effort: str | None = None
    begins: bool = True
    grammar_field: str = "response_format"
    of_response: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.asked.get(name)

    @property
    def chat(self) -> bool:
        """Whether it has messages."""
        return self.messages is not None

    @property
    def n(self) -> int:
        """How many answers each prompt gets."""
        return self["n"] or 1

    @property
    def samples(self) -> int:
        """How many are decoded for each prompt, of which the best `n` are answered."""
        return self["best_of"] or self.n

    @property
    def max_tokens(self) -> int | None:
        """None takes the endpoint's default."""
        return next((self[name] for name in MOST_TOKENS if self[name] is not None), None)

    @property
    def stop(self) -> tuple[str, ...]:
        """The stop strings."""
        given = self["stop"] or ()
        return (given,) if isinstance(given, str) else tuple(given)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are reported."""
        echoed = self["echo"] and not self.chat and self.logprobs is not None
        return bool(echoed) or self["prompt_logprobs"] is not None


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
    asked = checked(given, fields.COMPLETION)
    n = asked["n"]
    best_of = asked.get("best_of", n)
    if best_of < n:
        raise FieldError("best_of", f"must be at least n, {n}, got {best_of}")
    if best_of > n and asked.get("stream"):
        raise FieldError("best_of", "must be n with stream=true: the best are known at the end")
    return body_of(asked, prompts=_prompts(asked["prompt"]), logprobs=asked.get("logprobs"))


def read_chat(given: Mapping[str, Any]) -> Body:
    """The body of /v1/chat/completions. Raises RequestError naming the field."""
    asked = checked(given, fields.CHAT)
    most, older = asked.get("max_completion_tokens"), asked.get("max_tokens")
    if None not in (most, older) and most != older:
        raise FieldError("max_completion_tokens", f"and max_tokens mean the same, got {most} and {older}")
    if asked.get("top_logprobs") and not asked.get("logprobs"):
        raise FieldError("top_logprobs", "must come with logprobs=true")
    continues = asked.get("continue_final_message", False)
    begins = asked.get("add_generation_prompt", not continues)
    if continues and begins:
        raise FieldError("continue_final_message", "must come without add_generation_prompt=true")
    messages = read_messages(asked["messages"])
    if asked.get("echo") and messages[-1]["role"] != "assistant":
        raise FieldError("echo", "needs a last message of the role assistant, with which the answer begins")
    logprobs = asked.get("top_logprobs", 0) if asked.get("logprobs") else None
    effort, tools = asked.get("reasoning_effort"), read_tools(asked)
    return body_of(asked, messages=messages, logprobs=logprobs, effort=effort, tools=tools, begins=begins)


def read_tokenize(given: Mapping[str, Any]) -> Body:
    """The body of /tokenize. Raises RequestError naming the field."""
    asked = checked(given, fields.TOKENIZE)
    if ("prompt" in asked) == ("messages" in asked):
        raise FieldError("prompt", "or messages must be there, and not both")
    chat = {name: value for name, value in asked.items() if name in fields.CHAT}
    if "messages" in asked:
        return replace(read_chat(chat), asked=asked)
    if other := next((name for name in chat if name != "model"), None):
        raise FieldError(other, "is for messages")
    return Body(asked, (asked["prompt"],))


# --- details ---


def body_of(asked: Mapping[str, Any], tools: Tools = NO_TOOLS, **own: Any) -> Body:
    """A body from its fields, from its tools, and from what an endpoint makes of its own fields."""
    sampling = {name: asked[name] for name in SAMPLING if name in asked}
    if "top_k" in asked:
        sampling["top_k"] = max(asked["top_k"], 0)  # -1 and 0 are off
    if "logit_bias" in asked:
        sampling["logit_bias"] = {int(token): value for token, value in asked["logit_bias"].items()}
        if len(sampling["logit_bias"]) < len(asked["logit_bias"]):
            raise FieldError("logit_bias", "names a token twice")
    grammar_field, grammar = read_grammar(asked, tools.forced)
    if grammar is not None:
        sampling["grammar"] = grammar
    stream = asked.get("stream")
    options = checked(asked.get("stream_options", {}), fields.STREAM_OPTIONS, "stream_options.")
    if "stream_options" in asked and not stream:
        raise FieldError("stream_options", "must come with stream=true")
    if "prompt_logprobs" in asked and stream:
        raise FieldError("prompt_logprobs", "must come without stream=true")
    if "truncation_side" in asked and "truncate_prompt_tokens" not in asked:
        raise FieldError("truncation_side", "must come with truncate_prompt_tokens")
    named = grammar_field or "tools"
    return Body(asked, sampling=sampling, options=options, tools=tools, grammar_field=named, **own)


def _prompts(given: Any) -> tuple[str | list[int], ...]:
    """Each prompt as text or token ids."""
    listed = isinstance(given, list) and given and isinstance(given[0], (str, list))
    prompts = tuple(given) if listed else (given,)
    for index, prompt in enumerate(prompts):
        is_ids = isinstance(prompt, list) and all(map(is_token, prompt))
        if not prompt or not (isinstance(prompt, str) or is_ids):
            where = f"prompt.{index}" if listed else "prompt"
            raise RequestError(400, f"{where} must be a string or a list of token ids, and not empty", "prompt")
    return prompts


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise RequestError(400, f"{twice:.100} comes twice", f"{twice:.100}")
    return found


def _refuse_constant(name: str) -> Any:
    raise RequestError(400, f"the body must be JSON, which has no {name}")
