"""Reads the bodies of requests: every field is checked by the tables of fields.py, and unknown fields are refused by
name."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_triton.serve import fields
from eagle_triton.serve.errors import RequestError
from eagle_triton.serve.fields import checked, is_token
from eagle_triton.serve.messages import Message, read_messages
from eagle_triton.serve.response_format import read_grammar
from eagle_triton.serve.tools import Tools, read_tools

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
SAMPLING = ("temperature", "top_p", "min_p", *PENALTIES, "seed")  # handed on as they are
NO_TOOLS = Tools()
REPORTED = ("user", "safety_identifier", "metadata")  # for the log


@dataclass(frozen=True)
class Body:
    """What a request asks for. What only the model knows is not checked yet.

    prompts: each as text or token ids, or instead of them the messages of one prompt. max_tokens: None takes the
    endpoint's default. sampling: the given options of `EAGLEConfig.sampling`. stop_ids: added to the model's own.
    logprobs, prompt_logprobs: report the log-probability of each token of the answer, of the prompt, and of this many
    of the likeliest beside it; None: nothing. names_ids: tokens of log-probabilities are written as their ids.
    prompt_limit: how many tokens of a prompt are read, None: all; keeps_end: its last ones. samples: to decode for each
    prompt, of which the best `n` are answered. echo: the answer's text begins with the prompt, in a chat with the last
    message.
    template: what the chat template is told besides messages, tools and effort. reasoning: report it. continues: the
    answer continues the last message. usage, continuous_usage, obfuscation, drafts: what a stream reports besides text.
    reported: fields for the log. response: the fields of a response, which repeats them. sampling has the grammar of a
    format; grammar_field: asks for what an answer must match, if anything does.
    """

    prompts: tuple[str | list[int], ...] = ()
    messages: list[Message] | None = None
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    names_ids: bool = False
    prompt_limit: int | None = None
    keeps_end: bool = True
    n: int = 1
    samples: int = 1
    echo: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None
    tools: Tools = NO_TOOLS
    reasoning: bool = True
    continues: bool = False
    begins: bool = True
    token_ids: bool = False
    stream: bool = False
    usage: bool = False
    continuous_usage: bool = False
    obfuscation: bool = False
    drafts: bool = False
    tier: bool = False
    reported: Mapping[str, Any] = field(default_factory=dict)
    response: Mapping[str, Any] | None = None
    grammar_field: str = "response_format"

    @property
    def chat(self) -> bool:
        """Whether it has messages."""
        return self.messages is not None

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are reported."""
        return self.prompt_logprobs is not None or (self.echo and not self.chat and self.logprobs is not None)


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
    n, stream = asked.get("n", 1), asked.get("stream", False)
    samples = asked.get("best_of", n)
    if samples < n:
        raise RequestError(400, f"best_of must be at least n, {n}, got {samples}", "best_of")
    if samples > n and stream:
        raise RequestError(400, "best_of must be n with stream=true: the best are known at the end", "best_of")
    return body_of(
        asked,
        prompts=_prompts(asked["prompt"]),
        max_tokens=asked.get("max_tokens"),
        logprobs=asked.get("logprobs"),
        samples=samples,
        echo=asked.get("echo", False),
    )


def read_chat(given: Mapping[str, Any]) -> Body:
    """The body of /v1/chat/completions. Raises RequestError naming the field."""
    asked = checked(given, fields.CHAT)
    most, older = asked.get("max_completion_tokens"), asked.get("max_tokens")
    if None not in (most, older) and most != older:
        raise RequestError(400, f"max_completion_tokens and max_tokens mean the same, got {most} and {older}",
                           "max_completion_tokens")  # fmt: skip
    if asked.get("top_logprobs") and not asked.get("logprobs"):
        raise RequestError(400, "top_logprobs must come with logprobs=true", "top_logprobs")
    continues = asked.get("continue_final_message", False)
    begins = asked.get("add_generation_prompt", not continues)
    if continues and begins:
        raise RequestError(400, "continue_final_message must come without add_generation_prompt=true",
                           "continue_final_message")  # fmt: skip
    messages, echo = read_messages(asked["messages"]), asked.get("echo", False)
    if echo and messages[-1]["role"] != "assistant":
        raise RequestError(400, "echo needs a last message of the role assistant, with which the answer begins", "echo")
    return body_of(
        asked,
        messages=messages,
        echo=echo,
        max_tokens=older if most is None else most,
        logprobs=asked.get("top_logprobs", 0) if asked.get("logprobs") else None,
        samples=asked.get("n", 1),
        template=asked.get("chat_template_kwargs", {}),
        effort=asked.get("reasoning_effort"),
        tools=read_tools(asked),
        reasoning=asked.get("include_reasoning", True),
        continues=continues,
        begins=begins,
    )


def read_tokenize(given: Mapping[str, Any]) -> tuple[Body, dict[str, bool]]:
    """The body of /tokenize, and its switches. Raises RequestError naming the field."""
    asked = checked(given, fields.TOKENIZE)
    switches = {name: asked.pop(name, name == "add_special_tokens") for name in ("add_special_tokens",
                                                                                 "return_token_strs")}  # fmt: skip
    if ("prompt" in asked) == ("messages" in asked):
        raise RequestError(400, "prompt or messages must be there, and not both", "prompt")
    if "messages" in asked:
        return read_chat(asked), switches
    if other := next((name for name in asked if name not in ("model", "prompt")), None):
        raise RequestError(400, f"{other} is for messages", other)
    return Body(prompts=(asked["prompt"],), model=asked.get("model")), switches


# --- details ---


def body_of(asked: Mapping[str, Any], tools: Tools = NO_TOOLS, **own: Any) -> Body:
    """A body from the fields that endpoints share, from its tools, and from an endpoint's own fields."""
    sampling = {name: asked[name] for name in SAMPLING if name in asked}
    if "top_k" in asked:
        sampling["top_k"] = max(asked["top_k"], 0)  # -1 and 0 are off
    if "logit_bias" in asked:
        sampling["logit_bias"] = {int(token): value for token, value in asked["logit_bias"].items()}
        if len(sampling["logit_bias"]) < len(asked["logit_bias"]):
            raise RequestError(400, "logit_bias names a token twice", "logit_bias")
    grammar_field, grammar = read_grammar(asked, tools.forced)
    if grammar is not None:
        sampling["grammar"] = grammar
    stream, stop = asked.get("stream", False), asked.get("stop", [])
    options = checked(asked.get("stream_options", {}), fields.STREAM_OPTIONS, "stream_options.")
    if "stream_options" in asked and not stream:
        raise RequestError(400, "stream_options must come with stream=true", "stream_options")
    if "prompt_logprobs" in asked and stream:
        raise RequestError(400, "prompt_logprobs must come without stream=true", "prompt_logprobs")
    if "truncation_side" in asked and "truncate_prompt_tokens" not in asked:
        raise RequestError(400, "truncation_side must come with truncate_prompt_tokens", "truncation_side")
    usage = options.get("include_usage", False)
    return Body(
        model=asked.get("model"),
        min_tokens=asked.get("min_tokens", 0),
        sampling=sampling,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_ids=tuple(asked.get("stop_token_ids", ())),
        ignore_eos=asked.get("ignore_eos", False),
        n=asked.get("n", 1),
        prompt_logprobs=asked.get("prompt_logprobs"),
        names_ids=asked.get("return_tokens_as_token_ids", False),
        prompt_limit=asked.get("truncate_prompt_tokens"),
        keeps_end=asked.get("truncation_side") != "right",
        token_ids=asked.get("return_token_ids", False),
        stream=stream,
        usage=usage,
        continuous_usage=usage and options.get("continuous_usage_stats", False),
        obfuscation=options.get("include_obfuscation", False),
        drafts=options.get("include_drafts", False),
        tier="service_tier" in asked,
        reported={name: asked[name] for name in REPORTED if name in asked},
        grammar_field=grammar_field or "tools",
        tools=tools,
        **own,
    )


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
