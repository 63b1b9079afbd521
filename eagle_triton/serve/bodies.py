"""The bodies of requests: their fields, which pydantic checks, and what they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator

from eagle_triton.engine.grammar import Grammar
from eagle_triton.inference import config
from eagle_triton.serve.errors import FieldError
from eagle_triton.serve.fields import Fields, Listed, Refused, about, validated, wrong
from eagle_triton.serve.messages import Message, MessageField
from eagle_triton.serve.response_format import Ebnf, Regex, ResponseFormat, StructuredOutputs
from eagle_triton.serve.tools import ToolFields, Tools, read_tools

MAX_SEED = 2**63
MAX_STOPS = 16
MAX_SAMPLES = 128  # of one prompt
MAX_TOP = 20  # of the likeliest tokens beside each
MOST_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")  # the endpoints' names of one option
SAMPLING = {*config.SAMPLING} - {"top_k", "logit_bias", "grammar"}  # fields that mean the same here

Text = Annotated[str, Field(min_length=1)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Top = Annotated[int, Field(ge=0, le=MAX_TOP)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def _prompts(given: Any) -> tuple[str | list[int], ...]:
    """Each prompt as text or token ids."""
    listed = isinstance(given, list) and given and isinstance(given[0], (str, list))
    prompts = tuple(given) if listed else (given,)
    for index, prompt in enumerate(prompts):
        is_ids = isinstance(prompt, list) and all(type(one) is int and 0 <= one < 2**31 for one in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids):
            what = f"must be a string or a list of token ids that is not empty, got {prompt!r:.60}"
            raise wrong(str(index) if listed else "", what)
    return prompts


Prompt = Annotated[
    tuple[str | list[int], ...],
    PlainValidator(_prompts, json_schema_input_type=Text | list[Text] | list[Token] | list[list[Token]]),
]


# --- fields ---


class Obfuscation(Fields):
    """Of any stream."""

    include_obfuscation: bool | None = about(
        "true: add random characters to each chunk, which hide the length of its text; false by default"
    )


class StreamOptions(Obfuscation):
    """Of a stream of text."""

    include_usage: bool | None = about("true: a last chunk has the usage")
    continuous_usage_stats: bool | None = about("true, with `include_usage`: every chunk has the usage so far", "vLLM")
    include_drafts: bool | None = about("true: chunks show the drafts and their drafter", "here")

    @model_validator(mode="after")
    def _continuous(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise wrong("continuous_usage_stats", "must come with include_usage=true")
        return self


class ServedModel(Fields):
    """The field of all bodies."""

    model: str | None = about("the served model's name; any other is refused")


class Generation(ServedModel):
    """The fields of all bodies that ask for an answer."""

    temperature: float | None = about("0 is greedy; the default is `--temperature`, 1 unless set", ge=0)
    top_p: float | None = about(
        "a filter, after `top_k`. Every filter keeps the likeliest token, so at temperature 0 it changes nothing",
        gt=0,
        le=1,
    )
    top_k: int | None = about("the first filter; -1 and 0 switch it off", "vLLM", ge=-1)
    min_p: float | None = about("the last filter", "vLLM", ge=0, le=1)
    repetition_penalty: float | None = about("for tokens of the prompt and the answer; 1 is off", "vLLM", gt=0)
    presence_penalty: float | None = about("subtracted from the logit of each token that is in the answer", ge=-2, le=2)
    frequency_penalty: float | None = about(
        "subtracted once for each time that the token is in the answer", ge=-2, le=2
    )
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None = (
        about("for each token id a number from -100 to 100, added to the token's logit")
    )
    seed: int | None = about(
        "gives the same answer again, whatever else runs and whatever is drafted ([in 16 bits up to "
        "rounding](engine.md#batches-sampling-streams)). The first sample of a request has this seed, the second the "
        "next number, and so on",
        ge=-MAX_SEED, lt=MAX_SEED,
    )  # fmt: skip
    min_tokens: int | None = about(
        "before this many tokens no stop token is chosen, and a stop string that begins there does not count",
        "vLLM",
        ge=0,
    )
    stop_token_ids: Listed[Token] | None = about("further stop tokens; the answer keeps them", "vLLM")
    ignore_eos: bool | None = about("true: go on after the model's own stop tokens", "vLLM")
    stream: bool | None = about("true: send the answer as server-sent events while it is generated")
    stream_options: Obfuscation | None = about("with `stream`: `include_obfuscation`")
    user: str | None = about("written to the log")
    safety_identifier: str | None = about("written to the log")
    metadata: dict[str, str] | None = about("at most 16 names with strings, written to the log", max_length=16)
    service_tier: Literal["auto", "default"] | None = about("both mean the only tier, `default`")
    prompt_cache_key: str | None = about("changes nothing: prompts with the same beginning always share their cache")


class TextGeneration(Generation):
    """The fields of chats and completions."""

    n: int | None = about("answers to each prompt; they share the prompt's pages of the cache", ge=1, le=MAX_SAMPLES)
    stop: Text | Annotated[Listed[Text], Field(max_length=MAX_STOPS)] | None = about(
        f"a string, or up to {MAX_STOPS}; the answer ends before the first that comes"
    )
    stream_options: StreamOptions | None = about(
        f"with `stream`: {', '.join(f'`{name}`' for name in StreamOptions.model_fields)}"
    )
    return_token_ids: bool | None = about(
        "true: choices have `token_ids`; a completion's choices, and a chat's answer, have `prompt_token_ids`", "vLLM"
    )
    return_tokens_as_token_ids: bool | None = about("true: log-probabilities name tokens as `token_id:ID`", "vLLM")
    prompt_logprobs: Top | None = about(
        "for each token of the prompt but the first: its log-probability, and the log-probabilities of this many "
        "likeliest tokens, by token id; not with `stream`", "vLLM",
    )  # fmt: skip
    truncate_prompt_tokens: int | None = about("read only this many tokens of a longer prompt", "vLLM", ge=1)
    truncation_side: Literal["left", "right"] | None = about(
        "the side on which the rest is cut off; left by default", "vLLM"
    )
    response_format: ResponseFormat | None = about(
        '`{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {"name", "schema", "strict"}}`: the '
        "answer [matches it](engine.md#grammars), with `strict` or without. One space follows each comma and colon"
    )
    structured_outputs: StructuredOutputs | None = about(
        "one of `json`, `json_object`, `regex`, `choice` and `grammar`; with `disable_any_whitespace` false the model "
        "chooses spaces and line ends in JSON", "vLLM",
    )  # fmt: skip
    regex: Regex | None = about("as in `structured_outputs`", "SGLang")
    ebnf: Ebnf | None = about("as `grammar` in `structured_outputs`", "SGLang")

    @model_validator(mode="after")
    def _fit(self) -> TextGeneration:
        if self.prompt_logprobs is not None and self.stream:
            raise wrong("prompt_logprobs", "must come without stream=true")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise wrong("truncation_side", "must come with truncate_prompt_tokens")
        if len(formats := [*self.formats]) > 1:
            raise wrong(formats[1], f"and {formats[0]} must not both be given: each says what the answer must match")
        return self

    @property
    def formats(self) -> dict[str, Grammar]:
        """Grammars that the answer must match, by the field that asks for each."""
        found = {name: getattr(self, name) for name in ("response_format", "structured_outputs", "regex", "ebnf")}
        return {name: grammar for name, grammar in found.items() if grammar is not None}


class CompletionBody(TextGeneration):
    """Of /v1/completions."""

    prompt: Prompt = about("a string, token ids, or a list of strings or of lists of token ids", default=...)
    max_tokens: int | None = about("16 by default. The prompt and this many tokens must fit into `max_model_len`", ge=0)
    logprobs: Top | Literal[False] | None = about(
        "report log-probabilities, as in a chat: of each token, and of this many likeliest tokens in its place"
    )
    best_of: int | None = about(
        "decode this many samples, and return the `n` with the highest mean log-probability", ge=1, le=MAX_SAMPLES
    )
    echo: bool | None = about("true: the text begins with the prompt")
    suffix: Annotated[Literal[""] | None, Refused("the engine continues prompts and fills no gaps")] = None

    @model_validator(mode="after")
    def _best(self) -> CompletionBody:
        n = self.n or 1
        best_of = self.best_of or n
        if best_of < n:
            raise wrong("best_of", f"must be at least n, {n}, got {best_of}")
        if best_of > n and self.stream:
            raise wrong("best_of", "must equal n with stream=true: the best samples are only known at the end")
        return self


class TemplateFields(Fields):
    """Further input of the chat template."""

    chat_template_kwargs: dict[str, Any] | None = about(
        "further values for the chat template, such as `enable_thinking`", "vLLM"
    )


class BeginningFields(TemplateFields):
    """How the chat template begins an answer."""

    continue_final_message: bool | None = about(
        "true: the answer continues the last message; not with `add_generation_prompt`", "vLLM"
    )
    add_generation_prompt: bool | None = about(
        "true: the template begins a new answer; the default, unless the last message is continued", "vLLM"
    )

    @property
    def begins(self) -> bool:
        """Whether the template begins an answer."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @model_validator(mode="after")
    def _one_end(self) -> BeginningFields:
        if self.continue_final_message and self.begins:
            raise wrong("continue_final_message", "must come without add_generation_prompt=true")
        return self


class ChatBody(TextGeneration, BeginningFields, ToolFields):
    """Of /v1/chat/completions."""

    messages: Listed[MessageField] = about(
        "the conversation; the chat template turns it into a prompt", default=..., min_length=1
    )
    max_completion_tokens: int | None = about(
        "all that fit by default. The prompt and this many tokens must fit into `max_model_len`", ge=1
    )
    max_tokens: int | None = about("the older name of `max_completion_tokens`", ge=1)
    logprobs: bool | None = about(
        "true: report the log-probability of each token: of the target's own logits, before penalties, biases, "
        "temperature and filters, among the tokens that a format allows"
    )
    top_logprobs: Top | None = about("with `logprobs`: report this many likeliest tokens in each place")
    reasoning_effort: Effort | None = about(
        "for chat templates that read it; in those with `enable_thinking`, `none` means false, any other value true"
    )
    echo: bool | None = about(
        "true: the answer repeats the last message first, which must have the role assistant", "vLLM"
    )
    include_reasoning: bool | None = about("false: leave reasoning out", "vLLM")
    separate_reasoning: bool | None = about(
        "false: leave reasoning in the content, as the model writes it; not with tools or gpt-oss", "SGLang"
    )
    stream_reasoning: bool | None = about("false: send reasoning in one chunk when it has ended", "SGLang")
    functions: Annotated[list[Any] | None, Field(max_length=0), Refused("`tools` took its place")] = None
    function_call: Annotated[Literal["none"] | None, Refused("`tool_choice` took its place")] = None
    store: Annotated[Literal[False] | None, Refused("chats are not stored")] = None
    modalities: Annotated[Listed[Literal["text"]] | None, Field(min_length=1), Refused("answers are text")] = None
    audio: Annotated[None, Refused("answers are text")] = None
    prediction: Annotated[None, Refused("drafts are the server's own")] = None
    web_search_options: Annotated[None, Refused("the server does not search the web")] = None
    verbosity: Annotated[Literal["medium"] | None, Refused("the model decides how much it writes")] = None

    @model_validator(mode="after")
    def _chat(self) -> ChatBody:
        most, older = self.max_completion_tokens, self.max_tokens
        if None not in (most, older) and most != older:
            raise wrong(
                "max_completion_tokens",
                f"and max_tokens are two names of one field and must be equal, got {most} and {older}",
            )
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "must come with logprobs=true")
        if self.separate_reasoning is False and False in (self.include_reasoning, self.stream_reasoning):
            other = "include" if self.include_reasoning is False else "stream"
            raise wrong("separate_reasoning", f"must be true with {other}_reasoning=false, got false")
        if self.echo and self.messages[-1]["role"] != "assistant":
            raise wrong("echo", "must come with a last message of the role assistant, which the answer repeats")
        return self


class TokenizeBody(ServedModel, BeginningFields):
    """Of /tokenize."""

    prompt: str | None = about("a text; or give `messages`", "vLLM")
    add_special_tokens: bool | None = about("for a text: whether to add special tokens; true by default", "vLLM")
    return_token_strs: bool | None = about("true: also return each token's name in the tokenizer", "vLLM")
    messages: list[Any] | None = about("a conversation; the chat template turns it into a prompt")
    tools: list[Any] | None = about("functions that an answer may call")

    @model_validator(mode="after")
    def _one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "or messages must be given, and not both")
        if self.add_special_tokens and self.messages is not None:
            raise wrong("add_special_tokens", "must come with prompt: a chat template writes special tokens itself")
        return self


class DetokenizeBody(ServedModel):
    """Of /detokenize."""

    tokens: Listed[Token] = about("token ids", "vLLM", default=...)


# --- what is asked for ---


NO_TOOLS = Tools()


@dataclass(frozen=True)
class Body:
    """What a request asks for, before the checks that need the model. `body[name]` is a field, or None if it is not
    given.

    prompts: each as text or token ids; a chat has none, but messages. sampling: the given options of
    `EAGLEConfig.sampling`, and the grammar. grammar_field: the field that asks for the grammar, if any does. options:
    of a stream. logprobs: report the log-probability of each token of the answer, and of this many likeliest tokens in
    its place; None: report none. effort: of reasoning. begins: the chat template begins an answer. of_response: this is
    the body of /v1/responses.
    """

    asked: Fields
    prompts: tuple[str | list[int], ...] = ()
    messages: list[Message] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    options: StreamOptions = field(default_factory=StreamOptions)
    tools: Tools = NO_TOOLS
    logprobs: int | None = None
    effort: str | None = None
    begins: bool = True
    grammar_field: str = "response_format"
    of_response: bool = False

    def __getitem__(self, name: str) -> Any:
        return getattr(self.asked, name, None)

    @property
    def prompt_field(self) -> str:
        """The field with the text to answer."""
        return "input" if self.of_response else "messages" if self.chat else "prompt"

    @property
    def chat(self) -> bool:
        """Whether it has messages."""
        return self.messages is not None

    @property
    def n(self) -> int:
        """The number of answers to each prompt."""
        return self["n"] or 1

    @property
    def samples(self) -> int:
        """The number of samples of each prompt; the best `n` are returned."""
        return self["best_of"] or self.n

    @property
    def max_tokens(self) -> int | None:
        """None: the endpoint's default."""
        return next((self[name] for name in MOST_TOKENS if self[name] is not None), None)

    @property
    def min_tokens(self) -> int:
        """The number of new tokens before a stop counts."""
        return self["min_tokens"] or 0

    @property
    def stop(self) -> tuple[str, ...]:
        """The stop strings."""
        given = self["stop"] or ()
        return (given,) if isinstance(given, str) else tuple(given)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The stop tokens besides the model's own."""
        return frozenset(self["stop_token_ids"] or ())

    @property
    def scores_prompt(self) -> bool:
        """Whether to report log-probabilities of the prompt."""
        echoed = self["echo"] and not self.chat and self.logprobs is not None
        return bool(echoed) or self["prompt_logprobs"] is not None


def read_completion(given: Mapping[str, Any]) -> Body:
    """The body of /v1/completions. Raises RequestError with the field's name."""
    asked = validated(CompletionBody, given)
    logprobs = None if asked.logprobs is False else asked.logprobs
    return body_of(asked, asked.formats, prompts=asked.prompt, logprobs=logprobs)


def read_chat(given: Mapping[str, Any]) -> Body:
    """The body of /v1/chat/completions. Raises RequestError with the field's name."""
    asked = validated(ChatBody, given)
    return body_of(
        asked,
        asked.formats,
        messages=asked.messages,
        logprobs=asked.top_logprobs or 0 if asked.logprobs else None,
        effort=asked.reasoning_effort,
        tools=read_tools(asked),
        begins=asked.begins,
    )


def read_tokenize(given: Mapping[str, Any]) -> Body:
    """The body of /tokenize. Raises RequestError with the field's name."""
    asked = validated(TokenizeBody, given)
    chat = asked.model_fields_set & ChatBody.model_fields.keys()
    if asked.prompt is None:
        return replace(read_chat({name: given[name] for name in chat}), asked=asked)
    if other := next((name for name in sorted(chat - {"model"}) if given[name] is not None), None):
        raise FieldError(other, "must come with messages, not with prompt")
    return Body(asked, (asked.prompt,))


def body_of(asked: Generation, formats: Mapping[str, Grammar], tools: Tools = NO_TOOLS, **own: Any) -> Body:
    """A body. formats: grammars that the answer must match, by field. own: what an endpoint makes of its own fields."""
    sampling = asked.model_dump(include=SAMPLING, exclude_none=True)
    if asked.top_k is not None:
        sampling["top_k"] = max(asked.top_k, 0)  # -1 and 0 are off
    if asked.logit_bias is not None:
        sampling["logit_bias"] = {int(token): value for token, value in asked.logit_bias.items()}
        if len(sampling["logit_bias"]) < len(asked.logit_bias):
            raise FieldError("logit_bias", "names a token twice")
    named, grammar = next(iter(formats.items()), ("tools", None))
    if tools.forced:
        named, grammar = "tool_choice", None  # calls leave no text for a format
    if grammar is not None:
        sampling["grammar"] = grammar
    if getattr(asked, "return_tokens_as_token_ids", None) and own.get("logprobs") is None:
        raise FieldError("return_tokens_as_token_ids", "must come with logprobs")
    if asked.stream_options is not None and not asked.stream:
        raise FieldError("stream_options", "must come with stream=true")
    options = StreamOptions.model_validate(asked.stream_options.model_dump() if asked.stream_options else {})
    return Body(asked, sampling=sampling, options=options, tools=tools, grammar_field=named, **own)
