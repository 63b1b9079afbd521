"""Turns the body of a request into a `Request`: tokens by the tokenizer and its chat template, limits, stops."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jinja2 import TemplateError

from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.inference.arguments import ArgumentReader
from eagle_triton.serve.bodies import Body, RequestError
from eagle_triton.serve.engine_process import Served

COMPLETION_TOKENS = 16  # of /v1/completions, if a request does not say


class PromptReader:
    """Reads bodies for one engine, in any thread. max_model_len: the most tokens of prompt and answer."""

    def __init__(self, served: Served, max_model_len: int, chat_template: str | None = None) -> None:
        """chat_template: None takes the tokenizer's. Raises ValueError if the target has no tokenizer."""
        if served.tokenizer is None:
            raise ValueError("the target has no tokenizer beside it, and a server answers with text")
        self.max_model_len, self.chat_template = max_model_len, chat_template
        self.tokenizer = copy.deepcopy(served.tokenizer)  # the engine's thread has its own
        self.tokenizer("", verbose=False)  # sets its options; no later call changes them while other threads decode
        self._config, self._stop_ids = served.config, served.stop_ids
        self._reader = ArgumentReader(
            served.config, served.vocab_size, torch.device("cpu"), self.tokenizer, served.stop_ids
        )

    def request(self, body: Body) -> Request:
        """The request of a body. Raises RequestError naming the field."""
        said = "messages" if body.chat else "prompt"
        with _blames(said):
            if not (ids := self._ids(body)):
                raise ValueError(f"{said} must give at least one token")
            prompt = self._reader.prompt(ids)
        stops = frozenset(body.stop_ids) if body.ignore_eos else self._stop_ids | frozenset(body.stop_ids)
        limit = self._limit(len(prompt), body)
        with _blames(None, body.grammar_field):
            return self._reader.request(
                prompt, limit, self._config.sampling(**body.sampling), stops, body.stop,
                min_new_tokens=body.min_tokens, logprobs=body.logprobs,
            )  # fmt: skip

    def _limit(self, tokens: int, body: Body) -> int:
        """How many new tokens may follow a prompt of `tokens` tokens."""
        room = self.max_model_len - tokens
        most = body.max_tokens
        if room < 1 or (most is not None and most > room):
            asked = "" if most is None else f", and {most} new ones are asked for"
            raise RequestError(
                400, f"the model has room for {self.max_model_len} tokens: the prompt has {tokens}{asked}",
                "messages" if body.chat else "prompt", "context_length_exceeded",
            )  # fmt: skip
        if most is None:
            most = room if body.chat else min(room, COMPLETION_TOKENS)
        if body.min_tokens > most:
            raise RequestError(
                400, f"min_tokens must be at most max_tokens, {most}, got {body.min_tokens}", "min_tokens"
            )
        return most

    def _ids(self, body: Body) -> list[int]:
        messages = body.messages
        if messages is None:
            text = body.prompt
            return self.tokenizer(text, verbose=False).input_ids if isinstance(text, str) else text
        if not (self.chat_template or getattr(self.tokenizer, "chat_template", None)):
            return self.tokenizer(_plain_text(messages), verbose=False).input_ids
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, chat_template=self.chat_template
            )
        except TemplateError as error:
            raise RequestError(400, f"messages: the chat template refuses them: {error}", "messages") from error
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def _plain_text(messages: Sequence[dict[str, str]]) -> str:
    """A conversation for a base model, which has no chat template: an answer follows its prompt directly, anything else
    begins a new line."""
    text = ""
    for message in messages:
        if text and not text.endswith("\n") and message["role"] != "assistant":
            text += "\n"
        text += message["content"]
    return text


@contextmanager
def _blames(param: str | None, grammar: str = "grammar") -> Iterator[None]:
    """Errors inside are those of a field: of `param`, or with None of the one that the message begins with. grammar:
    the field that asks for a grammar."""
    try:
        yield
    except (TypeError, ValueError, ImportError) as error:
        message = str(error) if param is None else str(error).replace("input_ids:", f"{param}:")
        field = param or message.split()[0].rstrip(":").partition("=")[0]
        field = grammar if field == "grammar" else field
        raise RequestError(400, message, field) from error
