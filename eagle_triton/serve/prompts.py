"""Turns a body into `Request`s: tokens (by the tokenizer and the chat template), limits and stops."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jinja2 import Environment, TemplateError, meta
from torch import Tensor

from eagle_triton.engine.grammar import Grammar
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.inference.arguments import ArgumentReader
from eagle_triton.serve.answer_parts import (
    HARMONY,
    LISTED,
    MISTRALS,
    THINK,
    THOUGHT,
    AnswerReader,
    Form,
    form_of,
)
from eagle_triton.serve.bodies import MAX_SEED, Body
from eagle_triton.serve.engine_process import Served
from eagle_triton.serve.errors import FieldError, RequestError
from eagle_triton.serve.messages import MESSAGE, ROLES, Message
from eagle_triton.serve.tools import answer_grammar

COMPLETION_TOKENS = 16  # the default of /v1/completions
_PLAIN = ("role", "content", "tool_calls", "tool_call_id")  # fields of a message that a base model can read
KWARGS = "chat_template_kwargs"
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize")


class PromptReader:
    """Reads bodies for one engine, in any thread. max_model_len: the most tokens of prompt and answer."""

    def __init__(self, served: Served, max_model_len: int, chat_template: str | None = None) -> None:
        """chat_template: None: the tokenizer's. Raises ValueError if the target has no tokenizer."""
        if served.tokenizer is None:
            raise ValueError("the target has no tokenizer beside it, and the server needs one")
        self.max_model_len, self.chat_template, self.vocabulary = max_model_len, chat_template, served.vocab_size
        self.tokenizer = copy.deepcopy(served.tokenizer)  # the engine's thread has its own
        self.tokenizer("", verbose=False)  # sets its options; no later call changes them while other threads decode
        self._reader = ArgumentReader(
            served.config, served.vocab_size, torch.device("cpu"), self.tokenizer, served.stop_ids
        )

    def requests(self, body: Body) -> list[Request]:
        """A body's requests: `samples` for each prompt, in order. Raises RequestError with the field's name."""
        prompt_field = body.prompt_field
        found = []
        for ids in self._prompts(body):
            with _blames(prompt_field):
                if not ids:
                    raise ValueError(f"{prompt_field} must give at least one token")
                limit = body["truncate_prompt_tokens"] or len(ids)
                prompt = self._reader.prompt(ids[:limit] if body["truncation_side"] == "right" else ids[-limit:])
                form, reasons = self._form(body), self._reasons(body, ids)
                if body["separate_reasoning"] is False and (form or body.tools.forced):
                    raise FieldError("separate_reasoning", "must be true with tools and for gpt-oss, got false")
                grammar = answer_grammar(body.tools, form, reasons, body.sampling.get("grammar"), self._marker)
            found += [self._request(body, prompt, sample, grammar) for sample in range(body.samples)]
        return found

    def tokens(self, body: Body) -> list[int]:
        """The token ids of a body's only prompt."""
        (prompt,) = self._prompts(body)
        return prompt

    def tokenizer_info(self) -> dict[str, Any]:
        """The tokenizer's class, its special tokens by name, and the chat template, if there is one."""
        template = self.chat_template or self.tokenizer.chat_template
        facts = {"tokenizer_class": type(self.tokenizer).__name__, "model_max_length": self.max_model_len}
        return {**self.tokenizer.special_tokens_map, **facts, "chat_template": template}

    def answer_reader(self, body: Body, prompt: Sequence[int]) -> AnswerReader | None:
        """A reader for the parts of an answer; None if the answer is only text."""
        form, reasons = self._form(body) or (LISTED if body.tools.forced else None), self._reasons(body, prompt)
        if body["separate_reasoning"] is False or (form is None and reasons is None):
            return None
        return AnswerReader(form, body.tools.names, reasons, body.tools.named if form is LISTED else None)

    def call_name(self, body: Body, made: str) -> str:
        """The id of a call. made: random characters."""
        # Mistral's templates take exactly nine characters
        return made[:9] if self._form(body) in MISTRALS else f"call_{made[:24]}"

    def text(self, ids: Sequence[int]) -> str:
        """Token ids as text, special tokens included."""
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def may_reason(self, body: Body) -> bool:
        """Whether answers may have reasoning with this chat template."""
        template = self._template(body)
        return template is not None and (THOUGHT in template or form_of(template) is HARMONY)

    def _form(self, body: Body) -> Form | None:
        """The form of an answer's calls, and of harmony's messages; None: no calls, or calls as a list."""
        form = form_of(self._template(body) or "")
        return form if form is HARMONY or body.tools.offered else None

    def _reasons(self, body: Body, prompt: Sequence[int]) -> bool | None:
        """Whether the prompt has begun the answer's reasoning. None: no reasoning, or harmony's."""
        template = self._template(body)
        if not template or THOUGHT not in template or form_of(template) is HARMONY:
            return None
        end = self.text(prompt[-8:]).rstrip()
        return None if end.endswith(THOUGHT) else end.endswith(THINK)

    def _marker(self, text: str) -> int | None:
        """The id of a marker that is one special token for llguidance; None: the marker is plain text."""
        token = self.tokenizer.get_added_vocab().get(text)
        if token is None or (text.startswith("<") and text.endswith(">")):
            return token
        return token if self.tokenizer.added_tokens_decoder[token].special else None

    def _request(self, body: Body, prompt: Tensor, sample: int, grammar: Grammar | None) -> Request:
        stops = body.stop_token_ids | (frozenset() if body["ignore_eos"] else self._reader.stop_ids)
        least = int(body.scores_prompt)  # reading a prompt gives a token
        limit = max(self._limit(len(prompt), body, least), least)
        sampling = {**body.sampling, "grammar": grammar}
        if "seed" in sampling:
            sampling["seed"] = (sampling["seed"] + sample + MAX_SEED) % (2 * MAX_SEED) - MAX_SEED
        with _blames(None, body.grammar_field):
            return self._reader.request(
                prompt, limit, self._reader.config.sampling(**sampling), stops, body.stop,
                min_new_tokens=body.min_tokens, logprobs=body.logprobs is not None or body.samples > body.n,
                top_logprobs=max(body.logprobs or 0, body["prompt_logprobs"] or 0), prompt_logprobs=body.scores_prompt,
            )  # fmt: skip

    def _limit(self, tokens: int, body: Body, least: int) -> int:
        """The most new tokens after a prompt of `tokens` tokens. Raises RequestError if fewer than `least` fit."""
        room = self.max_model_len - tokens
        most = body.max_tokens
        if room < max(least, most != 0) or (most is not None and most > room):
            given = f"the prompt has {tokens}" + ("" if most is None else f", and the request asks for {most} new ones")
            raise RequestError(
                400, f"the model's maximum context length is {self.max_model_len} tokens: {given}",
                body.prompt_field, "context_length_exceeded",
            )  # fmt: skip
        if most is None:
            most = room if body.chat else min(room, COMPLETION_TOKENS)
        if body.min_tokens > most:
            raise FieldError("min_tokens", f"must be at most max_tokens, {most}, got {body['min_tokens']}")
        return most

    def _prompts(self, body: Body) -> Iterator[list[int]]:
        if body.messages is not None:
            yield self._chat(body, body.messages)
        for given in body.prompts:
            if isinstance(given, str):
                special = body["add_special_tokens"] is not False
                given = self.tokenizer(given, add_special_tokens=special, verbose=False).input_ids
            yield given

    def _template(self, body: Body) -> str | None:
        """The chat template of a chat, which may be another one with tools; None: a base model has none."""
        if not body.chat or not (self.chat_template or getattr(self.tokenizer, "chat_template", None)):
            return None
        return self.tokenizer.get_chat_template(self.chat_template, tools=list(body.tools.offered) or None)

    def _chat(self, body: Body, messages: Sequence[Message]) -> list[int]:
        template = self._template(body)
        if not template:
            asked = {"tools": body.tools.auto, "reasoning_effort": body.effort, KWARGS: body[KWARGS]}
            if name := next((name for name, value in asked.items() if value), None):
                raise FieldError(name, "needs a chat template, and this model has none")
            return self.tokenizer(_plain_text(messages), verbose=False).input_ids
        template_arguments = _template_arguments(body, template)
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=body.begins,
                continue_final_message=bool(body["continue_final_message"]),
                chat_template=self.chat_template, tools=list(body.tools.offered) or None, **template_arguments,
            )  # fmt: skip
        except (TemplateError, ValueError, TypeError) as error:
            raise RequestError(400, f"messages are refused by the chat template: {error}", "messages") from error
        for index, message in enumerate(messages):
            if message["role"] not in ROLES and message["content"].strip() not in text:
                where = f"messages.{index}.role"
                raise RequestError(400, f"{where}: the chat template leaves out messages of the role "
                                   f"{message['role']!r:.60}", where)  # fmt: skip
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids


@functools.lru_cache(64)
def _variables(template: str) -> frozenset[str] | None:
    """The names that a chat template reads. None: it has tags that only transformers knows."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except TemplateError:
        return None


def _template_arguments(body: Body, template: str) -> dict[str, Any]:
    """The chat template's input besides messages and tools. Refuses what the template does not read."""
    variables = _variables(template)

    def has(word: str) -> bool:
        return re.search(rf"\b{re.escape(word)}\b", template) is not None

    def reads(name: str) -> bool:
        return has(name) if variables is None else name in variables

    if body.tools.auto and not reads("tools"):
        raise FieldError("tools", "are not read by this model's chat template")
    if body.tools.auto and form_of(template) is None:
        raise RequestError(400, "tools: this model's chat template writes calls in an unknown form; the forms of "
                           "Hermes (Qwen), Llama 3, Mistral and gpt-oss are known", "tools")  # fmt: skip
    for index, message in enumerate(body.messages or ()):
        for name in message:
            told_apart = name == "name" and message["role"] != "tool"  # participants; a tool's result has its call's id
            if (name in MESSAGE and name != "tool_calls" and not told_apart) or has(name):
                continue
            if body.of_response:
                raise FieldError("input", f"has {name:.60}, which is not read by this model's chat template")
            raise FieldError(f"messages.{index}.{name:.60}", "is not read by this model's chat template")
    template_arguments = dict(body[KWARGS] or {})
    for name in template_arguments:
        if name in RESERVED or not reads(name):
            why = "is set by messages and other fields" if name in RESERVED else "is not read by the chat template"
            raise FieldError(f"{KWARGS}.{name:.60}", why)
    if body.effort is not None:
        effort_field = "reasoning.effort" if body.of_response else "reasoning_effort"
        asked = {"reasoning_effort": body.effort, "enable_thinking": body.effort != "none"}
        variable = next((name for name in asked if reads(name)), None)
        if variable is None:
            raise FieldError(effort_field, "is not read by this model's chat template")
        if (other := template_arguments.setdefault(variable, asked[variable])) != asked[variable]:
            raise FieldError(effort_field, f"and {KWARGS}.{variable} must agree, got {body.effort!r} and {other!r:.60}")
    return template_arguments


def _plain_text(messages: Sequence[Message]) -> str:
    """A conversation for a base model, which has no chat template. An answer follows its prompt directly; anything else
    begins a new line. Calls are written in the form that an answer must have."""
    text = ""
    for index, message in enumerate(messages):
        if other := next((name for name in message if name not in _PLAIN), None):
            where = f"messages.{index}.{other}"
            raise FieldError(where, "needs a chat template, and this model has none")
        if text and not text.endswith("\n") and message["role"] != "assistant":
            text += "\n"
        text += message["content"]
        if "tool_calls" in message:
            functions = [call["function"] for call in message["tool_calls"]]
            text += json.dumps([{"name": one["name"], "parameters": one["arguments"]} for one in functions])
    return text


@contextmanager
def _blames(param: str | None, grammar: str = "grammar") -> Iterator[None]:
    """Turn errors inside into a RequestError for the field `param`; None: the first word of the message is the field.
    grammar: the field that asks for a grammar."""
    try:
        yield
    except RecursionError:
        raise RequestError(400, "the body holds a JSON schema that is nested too deeply") from None
    except (TypeError, ValueError, ImportError) as error:
        message = str(error) if param is None else str(error).replace("input_ids:", f"{param}:")
        message = message.replace("_new_tokens", "_tokens")  # as bodies name them
        field = param or message.split()[0].rstrip(":").partition("=")[0]
        field = grammar if field == "grammar" else field
        raise RequestError(400, message, field) from error
