"""Read and check the arguments that all calls share: prompts, sampling, stops."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeAlias, TypedDict

import torch
from torch import Tensor

from eagle_triton.engine.grammar import Grammar, Matcher, compiler_for
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.admission import check_numbers, refuses_grammars
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.inference.config import SAMPLING, EAGLEConfig
from eagle_triton.inference.text import check_stop_strings
from eagle_triton.models.checks import check_attention_mask, check_prompt
from eagle_triton.values import checked_integer

Prompt: TypeAlias = str | Tensor | Sequence[int]
ListedPrompts: TypeAlias = str | Sequence[int] | Sequence[Prompt]
Prompts: TypeAlias = Tensor | ListedPrompts
StopIds: TypeAlias = int | Iterable[int] | Sequence[Iterable[int]] | None
StopStrings: TypeAlias = str | Sequence[str] | Sequence[Sequence[str]]
Bias: TypeAlias = Mapping[int, float] | Sequence[tuple[int, float]]


class FurtherSampling(TypedDict, total=False):
    """Sampling options in `**sampling`: one value for all prompts, or a list with one for each."""

    min_p: float | Sequence[float] | None
    repetition_penalty: float | Sequence[float] | None
    presence_penalty: float | Sequence[float] | None
    frequency_penalty: float | Sequence[float] | None
    logit_bias: Bias | Sequence[Bias | None] | None
    grammar: Grammar | Sequence[Grammar | None] | None


class Sampling(FurtherSampling, total=False):
    """The sampling options, with those that `generate` also takes by position."""

    temperature: float | Sequence[float] | None
    top_p: float | Sequence[float] | None
    top_k: int | Sequence[int] | None


class SubmitOptions(TypedDict, total=False):
    """Sampling options of one request."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Bias | None
    seed: int | None
    grammar: Grammar | None


class StreamOptions(Sampling, total=False):
    """Keyword arguments of `EAGLEInference.stream`."""

    stop_token_ids: StopIds
    stop_strings: StopStrings
    logprobs: bool
    report_drafts: bool
    seed: int | Sequence[int] | None
    min_new_tokens: int | Sequence[int]


TOKENIZER = "give EAGLEInference(..., tokenizer=...)"

# Names in other libraries.
HINTS = {
    "do_sample": "temperature (0 is greedy)",
    "eos_token_id": "stop_token_ids",
    "max_length": "max_new_tokens (max_length is an option of EAGLEConfig)",
    "max_tokens": "max_new_tokens",
    "n": "the same prompt several times",
    "num_return_sequences": "the same prompt several times",
    "stop": "stop_strings or stop_token_ids",
    "stop_ids": "stop_token_ids",
    "streamer": "stream() or stream_text()",
}


@dataclass(frozen=True)
class ArgumentReader:
    """Reads arguments for one target. Raises ValueError or TypeError with the argument's name.

    stop_ids: for requests without stop tokens; they include the tokens that end a grammar's output.
    """

    config: EAGLEConfig
    vocabulary: int
    device: torch.device
    tokenizer: Any | None
    stop_ids: frozenset[int] = frozenset()

    def prompt(self, given: Prompt) -> Tensor:
        """One prompt, int64 [L] on the device, from text, a list of ids, or a tensor [L] or [1, L]."""
        ids: Any = given
        if isinstance(given, str):
            if self.tokenizer is None:
                raise ValueError(f"prompts as text need a tokenizer, and the target has none: {TOKENIZER}")
            if not given.isascii() and any("\ud800" <= character <= "\udfff" for character in given):
                raise ValueError("a prompt must be text, got a string with half of a surrogate pair")
            ids = self.tokenizer(given).input_ids
        row = _tensor(ids)
        if row.dim() == 2 and len(row) == 1:
            row = row[0]
        if row.dim() != 1:
            what = f"shape {list(row.shape)}" if row.dim() else repr(given)
            raise ValueError(f"a prompt must be text, or token ids [L] or [1, L], got {what}")
        check_prompt(row[None], self.vocabulary)
        return row.to(self.device, torch.long)

    def prompts(self, given: Prompts, attention_mask: Tensor | None = None) -> list[Tensor]:
        """All prompts, as `prompt` reads them. A flat list of ids is one prompt, a tensor [bs, L] has one per row."""
        if hasattr(given, "__array__") and not isinstance(given, Tensor):
            given = torch.as_tensor(given, device="cpu")
        if isinstance(given, Tensor):
            rows = given[None] if given.dim() == 1 else given
            check_prompt(rows, self.vocabulary)
            if attention_mask is None:
                return list(rows.to(self.device, torch.long))
            check_attention_mask(attention_mask, rows)
            kept = attention_mask.bool().to(rows.device)
            return [row[mask].to(self.device, torch.long) for row, mask in zip(rows, kept, strict=True)]
        if attention_mask is not None:
            raise ValueError("attention_mask is for padded rows: give input_ids as one tensor [bs, L]")
        _refuse_mapping(given)
        if not isinstance(given, Iterable):
            raise TypeError(f"input_ids: text, token ids, a tensor or a list of them expected, got {given!r}")
        found: list[Any] = [given] if isinstance(given, (str, bytes, bytearray)) else list(given)
        if not found:
            raise ValueError("input_ids: no prompts")
        if all(_is_integer(token) for token in found):
            return [self.prompt(found)]
        return [self._numbered(index, prompt) for index, prompt in enumerate(found)]

    def request(
        self,
        prompt: Tensor,
        max_new_tokens: Any,
        sampling: SamplingParams,
        stop_token_ids: Any,
        stop_strings: Any,
        *,
        min_new_tokens: Any = 0,
        logprobs: bool = False,
        top_logprobs: int = 0,
        prompt_logprobs: bool = False,
    ) -> Request:
        """The request for one prompt; top_logprobs, prompt_logprobs: see `Request`."""
        limit = checked_integer("max_new_tokens", max_new_tokens)
        if limit < 0:
            raise ValueError(f"max_new_tokens must not be negative, got {limit}")
        strings = _strings(stop_strings)
        check_stop_strings(strings)
        if strings and self.tokenizer is None:
            raise ValueError(f"stop_strings need a tokenizer, and the target has none: {TOKENIZER}")
        request = Request(
            prompt,
            limit,
            sampling,
            self._stop_ids(stop_token_ids),
            logprobs=logprobs,
            min_new_tokens=checked_integer("min_new_tokens", min_new_tokens),
            stop_strings=strings,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        check_numbers(request, self.vocabulary)
        self.matcher(request)
        return request

    def matcher(self, request: Request) -> Matcher | None:
        """A matcher at the beginning of a request's grammar, None if it has none. Raises ValueError for a grammar that
        cannot be compiled or does not go with the request's other options, ImportError without llguidance."""
        if (grammar := request.sampling.grammar) is None:
            return None
        if self.tokenizer is None:
            raise ValueError(f"grammar: it needs a tokenizer, and the target has none: {TOKENIZER}")
        if reason := refuses_grammars(self.config.verification):
            raise ValueError(reason)
        if request.min_new_tokens:
            raise ValueError(
                f"grammar: it alone decides where an output may end, and min_new_tokens={request.min_new_tokens} would "
                "decide too: leave one of them out"
            )
        own = getattr(self.tokenizer, "eos_token_id", None)
        known = self.stop_ids if own is None else self.stop_ids | {own}
        if not known:
            raise ValueError(
                "grammar: an output ends with an end token, and neither the target nor its tokenizer has one: set "
                "eos_token_id of the target's generation_config"
            )
        if not (ends := known & request.stop_ids):
            raise ValueError(
                f"grammar: an output ends with an end token of the target or its tokenizer, {sorted(known)}, and "
                f"the request stops at {sorted(request.stop_ids) or 'none'}: name one in stop_token_ids (without "
                "ignore_eos)"
            )
        return compiler_for(self.tokenizer, self.vocabulary, ends).matcher(grammar)

    def requests(self, prompts: list[Tensor], seed: Any, **options: Any) -> list[Request]:
        """A request for each prompt. options: of sampling, and arguments of `request`. Each, also `seed`, is one value,
        or a list with one for each prompt."""
        count, requests = len(prompts), []
        if _is_integer(plain := _plain(seed)):
            seed = [int(plain) + index for index in range(count)]
        columns = {name: _each(name, value, count) for name, value in {**options, "seed": seed}.items()}
        for index, prompt in enumerate(prompts):
            own = {name: column[index] for name, column in columns.items()}
            sampling = self.config.sampling(**{name: own.pop(name) for name in SAMPLING if name in own})
            requests.append(self.request(prompt, sampling=sampling, **own))
        return requests

    def _numbered(self, index: int, prompt: Prompt) -> Tensor:
        try:
            return self.prompt(prompt)
        except (TypeError, ValueError) as error:
            raise type(error)(f"prompt {index}: {error}") from error

    def _stop_ids(self, given: Any) -> frozenset[int]:
        if given is None:
            return self.stop_ids
        given = _plain(given)
        if _is_integer(given):
            given = [given]
        if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
            raise TypeError(f"stop_token_ids must be token ids, got {given!r}")
        ids = frozenset(checked_integer("stop_token_ids", _plain(token)) for token in given)
        if wrong := sorted(token for token in ids if not 0 <= token < self.vocabulary):
            raise ValueError(f"stop_token_ids must lie in 0..{self.vocabulary - 1}, got {wrong!s:.60}")
        return ids


def check_options(call: str, given: Iterable[str], function: Callable[..., Any]) -> None:
    """Raise ValueError for an unknown sampling option, and name all options of a call that takes `**sampling`."""
    own = inspect.signature(function).parameters.values()
    named = [parameter.name for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
    valid = [name for name in dict.fromkeys((*named, *SAMPLING)) if name != "self"]
    for name in given:
        if name not in SAMPLING:
            near = HINTS.get(name) or next(iter(difflib.get_close_matches(name, valid, 1)), None)
            meant = f", did you mean {near}?" if near else "."
            raise ValueError(f"{call}: unknown option {name}{meant} The options are {', '.join(valid)}")


def _tensor(ids: Any) -> Tensor:
    """Token ids as a tensor, in their own dtype."""
    _refuse_mapping(ids)
    try:
        if isinstance(ids, (bytes, bytearray)):  # a sequence of numbers, but no token ids
            raise TypeError("bytes")
        return ids if isinstance(ids, Tensor) else torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"a prompt must be text, token ids or a tensor, got {ids!r:.60}") from error


def _refuse_mapping(given: Any) -> None:
    """Refuse chat messages and a tokenizer's output, which are easily mistaken for a prompt."""
    first = next(iter(given), None) if isinstance(given, (list, tuple)) else given
    if not isinstance(first, Mapping):
        return
    if "role" in first:
        raise TypeError(
            "chat messages are no prompt yet: make one of them with tokenizer.apply_chat_template(messages, "
            'add_generation_prompt=True, return_tensors="pt", return_dict=False)'
        )
    raise TypeError(f'input_ids: a mapping with {", ".join(map(str, first))}: give the tensor under "input_ids" of it')


def _plain(value: Any) -> Any:
    """A tensor or an array as Python numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _each(name: str, value: Any, count: int) -> list[Any]:
    """A value for each prompt: a list, tuple or tensor has one for each, anything else is repeated. `OF_ONE` says which
    lists are a single value. Raises ValueError for a wrong length."""
    value = _plain(value)
    if not isinstance(value, (list, tuple)) or (name in OF_ONE and OF_ONE[name](value)):
        if isinstance(value, Iterator):
            value = list(value)  # an iterator can be read only once
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name}: one value or {count} (one for each prompt) expected, got {len(value)}")
    return list(value)


def _strings(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Iterable):
        raise TypeError(f"stop_strings must be a string or a list of strings, got {given!r}")
    return tuple(given)


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and _is_integer(value[0]) and isinstance(value[1], Real)


OF_ONE: dict[str, Callable[[Sequence[Any]], bool]] = {  # options that may be a list: whether a list is for all prompts
    "stop_token_ids": lambda ids: not ids or any(_is_integer(_plain(token)) for token in ids),
    "stop_strings": lambda strings: all(isinstance(stop, str) for stop in strings),
    "logit_bias": lambda bias: all(map(_is_pair, bias)),
}
