"""The fields of requests: what each must be and what it does. Checks, the API's description and docs/serving.md all
come from these tables."""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eagle_triton.serve.errors import FieldError, RequestError

MAX_FLOAT = sys.float_info.max  # NaN, infinity, and whole numbers of more digits are no numbers here
MAX_SEED = 2**63
MAX_STOPS = 16
MAX_SAMPLES = 128  # of one prompt
MAX_TOP = 20  # of the likeliest tokens beside each


@dataclass(frozen=True)
class Kind:
    """Which values a field takes. words: for errors. schema: in JSON Schema. convert: the checked value as it is used.
    holds: the check, if it is another than by the schema."""

    words: str
    schema: Mapping[str, Any]
    convert: Callable[[Any], Any] = lambda value: value
    holds: Callable[[Any], bool] | None = None

    def takes(self, value: Any) -> bool:
        """Whether a field may have a value."""
        return fits(value, self.schema) if self.holds is None else self.holds(value)


@dataclass(frozen=True)
class Field:
    """A field of a body. does: what it does. origin: whose field it is: OpenAI's, vLLM's, SGLang's, or only this
    server's. needed: it must be there. default: its value if it is not, where that is not None.

    kind None: it is not offered, `does` says why, and only the values `nothing`, which ask for nothing, are taken.
    """

    kind: Kind | None
    does: str = ""
    origin: str = "OpenAI"
    nothing: tuple[Any, ...] = ()
    needed: bool = False
    default: Any = None


Table = Mapping[str, Field]


# --- kinds ---


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value fits a schema, by those parts of JSON Schema that the tables check. 2.0 is a whole number."""
    get, kind = schema.get, schema.get("type")
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return isinstance(value, str) and value in schema["enum"]
    if "const" in schema:
        return value is schema["const"]
    if kind == "boolean" or isinstance(value, bool):
        return kind in ("boolean", None) and isinstance(value, bool)
    if kind == "string":
        return isinstance(value, str) and len(value) >= get("minLength", 0)
    if kind == "array":
        counted = isinstance(value, list) and get("minItems", 0) <= len(value) <= get("maxItems", math.inf)
        return counted and all(fits(one, get("items", {})) for one in value)
    if kind == "object":
        names, values = get("propertyNames", {}).get("pattern", "(?s:.*)"), get("additionalProperties", {})
        counted = isinstance(value, dict) and len(value) <= get("maxProperties", math.inf)
        return counted and all(re.fullmatch(names, name) and fits(one, values) for name, one in value.items())
    if kind in ("integer", "number"):
        numeric = isinstance(value, int) or (isinstance(value, float) and (kind == "number" or value.is_integer()))
        bounded = numeric and (kind == "integer" or abs(value) <= MAX_FLOAT)
        above = bounded and get("minimum", -math.inf) <= value and value > get("exclusiveMinimum", -math.inf)
        return above and value <= get("maximum", math.inf)
    return True


def whole(least: int, most: int | None = None) -> Kind:
    """A whole number."""
    words = f"a whole number from {least} on" if most is None else f"a whole number from {least} to {most}"
    return Kind(words, {"type": "integer", "minimum": least, **({} if most is None else {"maximum": most})}, int)


def number(words: str, **bounds: float) -> Kind:
    """A number. bounds: in JSON Schema."""
    return Kind(f"a number {words}", {"type": "number", **bounds})


def one_of(*values: str) -> Kind:
    """One of some strings."""
    return Kind(f"one of {', '.join(values)}" if len(values) > 1 else f'"{values[0]}"', {"enum": list(values)})


def list_of(words: str, **items: Any) -> Kind:
    """A list. items: the schema of an entry."""
    return Kind(words, {"type": "array", "items": items})


def is_token(value: Any) -> bool:
    """Whether a value may be a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def needed(kind: Kind) -> Field:
    """A field of an inner part that must be there."""
    return Field(kind, needed=True)


# fmt: off
ANY = Kind("a value", {})  # for fields that are checked where they are read
SWITCH = Kind("true or false", {"type": "boolean"})
TEXT = Kind("a string", {"type": "string"})
MAPPING = Kind("a mapping", {"type": "object"})
SOME_TEXT = {"type": "string", "minLength": 1}
TEXT_OR_LIST = {"anyOf": [TEXT.schema, {"type": "array"}]}
TOKENS = Kind("a list of token ids",  # there may be very many
    {"type": "array", "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31}},
    holds=lambda value: isinstance(value, list) and all(map(is_token, value)))
LOGPROBS = "message.output_text.logprobs"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_BIASES = Kind("a mapping of token ids to numbers from -100 to 100", {"type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}})
_PENALTY = number("from -2 to 2", minimum=-2, maximum=2)
_STOPS = Kind(f"a string that is not empty, or a list of at most {MAX_STOPS} of them",
    {"anyOf": [SOME_TEXT, {"type": "array", "items": SOME_TEXT, "maxItems": MAX_STOPS}]})
_METADATA = Kind("a mapping of at most 16 names to strings",
    {"type": "object", "maxProperties": 16, "additionalProperties": TEXT.schema})
_TOP = whole(0, MAX_TOP)
_LOGPROBS = Kind(f"a whole number from 0 to {MAX_TOP}, or false", {"anyOf": [_TOP.schema, {"const": False}]},
    lambda value: None if value is False else int(value))
_MESSAGES = Kind("a list of at least one message",
    {"type": "array", "items": {"type": "object", "required": ["role"]}, "minItems": 1})
_TOOLS = list_of("a list of tools", type="object")
_PROMPT = Kind("a value", {"anyOf": [SOME_TEXT, *(
    {"type": "array", "items": items, "minItems": 1}
    for items in (SOME_TEXT, TOKENS.schema["items"], {**TOKENS.schema, "minItems": 1}))]},
    holds=lambda value: True)  # errors say which prompt is wrong
_ITEMS = Kind("a string or a list of items, and not empty",
    {"anyOf": [SOME_TEXT, {"type": "array", "items": MAPPING.schema, "minItems": 1}]})


# --- tables ---

STREAM_OPTIONS: Table = {
    "include_usage": Field(SWITCH, "a last chunk with the usage"),
    "include_obfuscation": Field(SWITCH,
        "random characters in each chunk, which hide how long its text is; not if it is not there"),
    "continuous_usage_stats": Field(SWITCH, "with `include_usage`: the usage so far in every chunk", "vLLM"),
    "include_drafts": Field(SWITCH, "what was drafted, and by whom", "here"),
}
_SAMPLING: Table = {
    "temperature": Field(number("from 0 on", minimum=0),
        "`--temperature` if it is not there, 1 by default as at OpenAI; 0 is greedy"),
    "top_p": Field(number("above 0 and at most 1", exclusiveMinimum=0, maximum=1),
        "a filter, after `top_k`. Filters keep the likeliest token, so at temperature 0 they change nothing"),
    "top_k": Field(whole(-1), "a filter, the first; -1 and 0 switch it off", "vLLM"),
    "min_p": Field(number("from 0 to 1", minimum=0, maximum=1),
        "a filter, the last", "vLLM"),
    "repetition_penalty": Field(number("above 0", exclusiveMinimum=0),
        "over prompt and output", "vLLM"),
    "logit_bias": Field(_BIASES, "is added to the logits of these tokens"),
    "seed": Field(whole(-MAX_SEED, MAX_SEED - 1),
        "the same answer again, whatever else runs and whatever is drafted ([in 16 bits up to "
        "rounding](engine.md#batches-sampling-streams)); the samples of one request have this seed, the next, ..."),
    "min_tokens": Field(whole(0),
        "no stop token is chosen before this many, and no stop string counts that begins in them", "vLLM", default=0),
    "stop_token_ids": Field(TOKENS, "further stop tokens, which are kept", "vLLM", default=()),
    "ignore_eos": Field(SWITCH, "the model's own stop tokens do not count", "vLLM"),
}
_PENALTIES: Table = {
    "presence_penalty": Field(_PENALTY, "is taken from the logits of tokens that are in the answer"),
    "frequency_penalty": Field(_PENALTY, "the same for each time that they are"),
}
_REPORTED: Table = {
    "user": Field(TEXT, "is written into the log"),
    "safety_identifier": Field(TEXT, "is written into the log"),
    "metadata": Field(_METADATA, "is written into the log"),
    "service_tier": Field(one_of("auto", "default"), "there is one tier, `default`, which the answer names"),
    "prompt_cache_key": Field(TEXT, "needs nothing: all prompts with the same beginning share what was read"),
}
_BOTH: Table = {
    "model": Field(TEXT, "must be the one that is served, if it is there"),
    **_SAMPLING,
    **_PENALTIES,
    "n": Field(whole(1, MAX_SAMPLES), "samples of each prompt, which share the pages of the prompt", default=1),
    "stop": Field(_STOPS, f"a string, or up to {MAX_STOPS}, which the answer does not contain"),
    "stream": Field(SWITCH, "server-sent events, as the answer comes"),
    "stream_options": Field(MAPPING, f"with `stream`: {', '.join(f'`{name}`' for name in STREAM_OPTIONS)}"),
    "return_token_ids": Field(SWITCH,
        "`token_ids` of choices, and `prompt_token_ids` of completions' choices or of a chat", "vLLM"),
    "return_tokens_as_token_ids": Field(SWITCH, "tokens of log-probabilities are written `token_id:ID`", "vLLM"),
    "prompt_logprobs": Field(_TOP,
        "for each token of the prompt but the first, by token id: its log-probability, and those of this many of the "
        "likeliest; not with `stream`", "vLLM"),
    "truncate_prompt_tokens": Field(whole(1), "of a longer prompt only this many tokens are read", "vLLM"),
    "truncation_side": Field(one_of("left", "right"), "where the rest is cut off; left if it is not there", "vLLM"),
    **_REPORTED,
}
_FORMATS: Table = {
    "response_format": Field(MAPPING,
        '`{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {"name", "schema", "strict"}}`: the '
        "answer [matches it](engine.md#grammars), with `strict` or without. One space follows each comma and colon"),
    "structured_outputs": Field(MAPPING,
        "one of `json`, `json_object`, `regex`, `choice` and `grammar`; `disable_any_whitespace` false lets the model "
        "choose spaces and line ends in JSON", "vLLM"),
    "regex": Field(TEXT, "as in `structured_outputs`", "SGLang"),
    "ebnf": Field(TEXT, "as `grammar` of `structured_outputs`", "SGLang"),
}
CHAT: Table = {
    "messages": Field(_MESSAGES, "by the chat template", needed=True),
    "max_completion_tokens": Field(whole(1),
        "as many as there is room for if it is not there; the prompt and they must fit into `max_model_len`"),
    "max_tokens": Field(whole(1), "the older name of `max_completion_tokens`"),
    **_BOTH,
    "logprobs": Field(SWITCH,
        "the log-probability of each token, of the target's own logits, before penalties, biases, temperature and "
        "filters, among the tokens that a format allows"),
    "top_logprobs": Field(_TOP, "with `logprobs`: this many of the likeliest tokens at each place"),
    "reasoning_effort": Field(one_of(*EFFORTS),
        "for templates that read it; for those with `enable_thinking`, `none` switches that off and others on"),
    "chat_template_kwargs": Field(MAPPING, "values that the chat template reads, such as `enable_thinking`", "vLLM"),
    "continue_final_message": Field(SWITCH,
        "the answer continues the last message, which is not for `add_generation_prompt`", "vLLM"),
    "add_generation_prompt": Field(SWITCH,
        "the template begins an answer; if it is not there, unless it continues one", "vLLM"),
    "echo": Field(SWITCH, "the answer begins with the last message, which must be one of the assistant", "vLLM"),
    "tools": Field(_TOOLS,
        "functions that an answer may call. With `strict` arguments fit their schema, whoever chose to call"),
    "tool_choice": Field(ANY,
        '`"auto"`, which is for templates with tools, or `"none"`; with `"required"` or a named function the answer '
        "is, after reasoning, calls that fit their `parameters`, and nothing else"),
    "parallel_tool_calls": Field(SWITCH, "false: an answer has at most one call"),
    "include_reasoning": Field(SWITCH, "false leaves reasoning out", "vLLM"),
    "separate_reasoning": Field(None, "reasoning is never in the content", "SGLang", nothing=(True,)),
    "stream_reasoning": Field(None, "a stream has all parts as they come", "SGLang", nothing=(True,)),
    **_FORMATS,
    "functions": Field(None, "`tools` took its place", nothing=([],)),
    "function_call": Field(None, "`tool_choice` took its place", nothing=("none",)),
    "store": Field(None, "nothing is stored", nothing=(False,)),
    "modalities": Field(None, "answers are text", nothing=(["text"],)),
    "audio": Field(None, "answers are text"),
    "prediction": Field(None, "drafts are the server's own"),
    "web_search_options": Field(None, "the server reads nothing from elsewhere"),
    "verbosity": Field(None, "the model decides how much it writes", nothing=("medium",)),
}
COMPLETION: Table = {
    "prompt": Field(_PROMPT, "a string, token ids, or a list of strings or of lists of token ids", needed=True),
    "max_tokens": Field(whole(0), "16 if it is not there; the prompt and they must fit into `max_model_len`"),
    **_BOTH,
    "logprobs": Field(_LOGPROBS,
        "the log-probability of each token and of this many of the likeliest beside it, as in a chat"),
    "best_of": Field(whole(1, MAX_SAMPLES),
        "decode this many samples, and answer with the `n` of the highest mean log-probability"),
    "echo": Field(SWITCH, "the text begins with the prompt"),
    "suffix": Field(None, "the engine continues prompts and fills no gaps", nothing=("",)),
    **_FORMATS,
}
RESPONSE: Table = {
    "input": Field(_ITEMS, "a string, or messages, calls of tools and their results", needed=True),
    "instructions": Field(TEXT, "a system message before all others; not kept for the next response"),
    "previous_response_id": Field(TEXT, "what was said in that response and before it comes first"),
    "store": Field(SWITCH, "false keeps nothing of it; else the last 1000 responses are kept in memory"),
    "max_output_tokens": Field(whole(1), "as many as there is room for if it is not there"),
    "model": _BOTH["model"],
    **_SAMPLING,
    **_PENALTIES,
    "stream": _BOTH["stream"],
    "stream_options": Field(MAPPING, "with `stream`: `include_obfuscation`"),
    **_REPORTED,
    "reasoning": Field(MAPPING, "`effort`, as `reasoning_effort` of a chat"),
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "tools": Field(_TOOLS, "functions: `type`, `name`, `description`, `parameters`, `strict`"),
    "tool_choice": CHAT["tool_choice"],
    "parallel_tool_calls": CHAT["parallel_tool_calls"],
    "text": Field(MAPPING,
        '`format`: `{"type": "json_object"}`, or `{"type": "json_schema", "name", "schema", "strict"}`, as '
        "`response_format` of a chat"),
    "truncation": Field(one_of("disabled"), "what is too long is refused"),
    "background": Field(SWITCH,
        "true: the answer comes at once, with the status `queued`; `GET` reads what became of it; not with `stream`, "
        "nor with `store` false"),
    "include": Field(list_of(f'a list of "{LOGPROBS}"', enum=[LOGPROBS]),
        "the log-probability of each token of a message's text, as `logprobs` of a chat"),
    "top_logprobs": Field(_TOP, "with `include`: this many of the likeliest tokens at each place"),
    "max_tool_calls": Field(None, "the server runs no tools"),
    "conversation": Field(None, "previous_response_id goes on with a response"),
    "prompt": Field(None, "no prompts are stored"),
}
RESPONSE_TEXT: Table = {"format": Field(MAPPING, "what the answer matches"), "verbosity": CHAT["verbosity"]}
RESPONSE_STREAM: Table = {"include_obfuscation": STREAM_OPTIONS["include_obfuscation"]}
_OF_A_CHAT = ("tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")
TOKENIZE: Table = {
    "model": _BOTH["model"],
    "prompt": Field(TEXT, "a text, or in its place `messages`", "vLLM"),
    "add_special_tokens": Field(SWITCH, "of a text; true if it is not there", "vLLM"),
    "return_token_strs": Field(SWITCH, "the name of each token in the tokenizer, too", "vLLM"),
    **{name: CHAT[name] for name in _OF_A_CHAT},
    "messages": Field(_MESSAGES, "by the chat template"),
}
DETOKENIZE: Table = {"model": _BOTH["model"], "tokens": Field(TOKENS, "token ids", "vLLM", needed=True)}
REASONING: Table = {
    "effort": CHAT["reasoning_effort"],
    "summary": Field(None, "reasoning is reported as it is"),
    "generate_summary": Field(None, "reasoning is reported as it is"),
}
# fmt: on


# --- reading and showing ---


def checked(given: Mapping[str, Any], table: Table, within: str = "") -> dict[str, Any]:
    """The fields that ask for something, converted: not null, and not a value of a refused field that asks for nothing;
    and the defaults of others. Raises RequestError naming the field, after `within`, also for one that must be there
    and is not."""
    asked = {name: field.default for name, field in table.items() if field.default is not None}
    for name, value in given.items():
        param = f"{within}{name}"
        if name not in table:
            offered = [known for known, field in table.items() if field.kind is not None]
            near = difflib.get_close_matches(name, offered, 1)
            hint = f", did you mean {near[0]}?" if near else f"; the fields are {', '.join(offered)}"
            raise RequestError(400, f"unknown field {param:.100}{hint}", f"{param:.100}")
        field = table[name]
        if value is None:
            continue
        if field.kind is None:
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in field.nothing):
                raise RequestError(400, f"{param}={json.dumps(value):.60} is not offered: {field.does}", param)
        elif not field.kind.takes(value):
            raise FieldError(param, f"must be {field.kind.words}, got {json.dumps(value):.60}")
        else:
            asked[name] = field.kind.convert(value)
    for name, field in table.items():
        if field.needed and name not in asked:
            raise FieldError(f"{within}{name}", "is missing")
    return asked


def markdown(*tables: tuple[str, Table]) -> str:
    """Tables of some bodies, by their names in a page, as one in Markdown: a line for each field."""
    rows: dict[tuple[str, int], tuple[Field, list[str]]] = {}  # with the bodies that have this very field
    for title, table in tables:
        for name, field in table.items():
            rows.setdefault((name, id(field)), (field, []))[1].append(title)
    lines = [
        f"| `{name}` | {'' if len(titles) == len(tables) else ', '.join(titles)} | {field.origin} | {says(field)} |"
        for (name, _), (field, titles) in rows.items()
    ]
    return "\n".join(["| field | only of | from | |", "|---|---|---|---|", *lines])


def says(field: Field) -> str:
    """What a field must be and does, in Markdown."""
    if field.kind is None:
        taken = " or ".join(f"`{json.dumps(value)}`" for value in field.nothing)
        return f"refused{f', except {taken}' if taken else ''}: {field.does}"
    return f"{'' if field.kind.words == ANY.words else f'{field.kind.words}: '}{field.does}"


def schema(table: Table) -> dict[str, Any]:
    """The table as a JSON Schema of bodies."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            name: {"anyOf": [field.kind.schema, {"type": "null"}], "description": field.does}
            if field.kind.schema and not field.needed
            else {**field.kind.schema, "description": field.does}
            for name, field in table.items()
            if field.kind is not None
        },
        "required": [name for name, field in table.items() if field.needed],
    }
