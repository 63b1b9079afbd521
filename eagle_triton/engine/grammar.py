"""Grammars that outputs must match, and the position of an output in its grammar.

The library llguidance reads grammars and says which tokens may follow. It refuses schemas that it cannot enforce, can
go back by tokens, and knows forced tokens. It is imported when the first grammar is compiled.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

SYNTAXES = ("json_schema", "regex", "choice", "ebnf")
FREE = {"whitespace_flexible": True}
FIXED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
KEPT = 256  # compiled grammars to keep for a tokenizer
# Sets of tokens that llguidance adds to a mask at once where all of them are allowed: blanks, and what a string of JSON
# may hold. For this there is a set for each of several lengths, because maxLength leaves fewer and fewer characters.
TOKEN_SETS = [r"[\x20\x0A\x0D\x09]+"]
TOKEN_SETS += [rf'[^"\\\x00-\x1F\x7F]{{1,{length}}}' for length in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)]
TOKEN_SETS += [r'[^"\\\x00-\x1F\x7F]+']


@dataclass(frozen=True)
class Grammar:
    """What an output must match, from its first token to its end. Make one by a function of this class.

    syntax: "json_schema", "regex", "choice" or "ebnf". text: the schema or the list of choices, as JSON; or the "regex"
    or "ebnf" itself. whitespace, around: see `json_schema`, `within`. Raises ValueError for an unknown syntax,
    TypeError for a wrong type. Errors in the text are found when it is compiled for a tokenizer.
    """

    syntax: str
    text: str
    whitespace: bool = False
    around: str | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.syntax, str) and isinstance(self.text, str)):
            raise TypeError(f"grammar: syntax and text must be strings, got {self.syntax!r} and {self.text!r:.60}")
        if self.syntax not in SYNTAXES:
            raise ValueError(f"grammar: syntax must be one of {', '.join(SYNTAXES)}, got {self.syntax!r}")
        if not isinstance(self.whitespace, bool):
            raise TypeError(f"grammar: whitespace must be True or False, got {self.whitespace!r}")
        if not isinstance(self.around, str | None):
            raise TypeError(f"grammar: around must be a string or None, got {self.around!r:.60}")
        if self.whitespace and self.syntax != "json_schema":
            raise ValueError(f"grammar: whitespace is for JSON: a {self.syntax} itself says where blanks may be")

    @staticmethod
    def json_schema(schema: Mapping[str, Any] | bool | str, whitespace: bool = False) -> Grammar:
        """JSON that fits a schema; the schema is a mapping or JSON. Properties come in the schema's order.

        whitespace: let the target choose spaces and line ends between the parts of the JSON; otherwise one space
        follows each comma and colon, as json.dumps writes it. Raises ValueError for a string that is not JSON and for
        false, which allows no value; TypeError for values that JSON does not have.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"grammar: the schema is not JSON: {error}") from None
        if schema is False:
            raise ValueError("grammar: the JSON schema false allows no value: use true or an object")
        if not (isinstance(schema, Mapping) or schema is True):
            raise TypeError(f"grammar: a JSON schema must be an object or true, got {schema!r:.60}")
        try:
            text = json.dumps({} if schema is True else dict(schema))
            return Grammar("json_schema", text, whitespace)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"grammar: the schema has a value that JSON cannot have: {error}") from error

    @staticmethod
    def json_object(whitespace: bool = False) -> Grammar:
        """Any JSON object. whitespace: see `json_schema`."""
        return Grammar.json_schema({"type": "object"}, whitespace)

    @staticmethod
    def regex(pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole, in the syntax of Rust's regex."""
        return Grammar("regex", pattern)

    @staticmethod
    def choice(texts: Iterable[str]) -> Grammar:
        """One of some texts. Raises ValueError if there are none, TypeError if one is no string."""
        if not isinstance(texts, Iterable) or isinstance(texts, Mapping):
            raise TypeError(f"grammar: a choice must be of strings, got {texts!r:.60}")
        given = [texts] if isinstance(texts, str) else list(texts)
        if not given:
            raise ValueError("grammar: a choice needs at least one text")
        if not all(isinstance(text, str) for text in given):
            raise TypeError(f"grammar: a choice must be of strings, got {given!r:.60}")
        return Grammar("choice", json.dumps(given))

    @staticmethod
    def ebnf(text: str) -> Grammar:
        """A context-free grammar, in Lark's syntax (its first rule is `start`) or in GBNF (`root`)."""
        return Grammar("ebnf", text)

    def within(self, around: str) -> Grammar:
        """The larger grammar `around`, in Lark's syntax, in which this one is the rule `@answer`. Raises TypeError if
        `around` is no string."""
        return replace(self, around=around)


class GrammarError(ValueError):
    """A grammar cannot be compiled, or an output does not match it."""


class DraftTree(NamedTuple):
    """A draft tree on the host. tokens, parents: N of each, the root (parent -1) first, parents before children. A
    token of -1 is an empty place."""

    tokens: list[int]
    parents: list[int]


class Matcher:
    """The position of one request's output in its grammar.

    consumed: how many tokens of the output were read.
    """

    def __init__(self, matcher: Any, ends: frozenset[int]):
        """matcher: llguidance's LLMatcher, at the beginning. ends: the tokens that end an output."""
        self._matcher, self._ends = matcher, ends
        self._ended = False
        self.consumed = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Read the output's next tokens. Raises GrammarError if the grammar does not allow these."""
        for token in tokens:
            if not self._ended and token in self._ends and self._matcher.is_accepting():
                self._ended = True  # llguidance may have stopped earlier
            elif self._ended or not self._matcher.try_consume_tokens([token]):
                self._check()
                raise GrammarError(f"grammar: it does not allow the token {token} that was chosen")
            self.consumed += 1

    def rewind(self, count: int) -> None:
        """Go back to the output's first `count` tokens, if more were read."""
        if self.consumed > count:
            self._matcher.rollback(self.consumed - count - self._ended)
            self.consumed, self._ended = count, False

    def write_mask(self, mask: Tensor) -> None:
        """Write which tokens may come next: mask [words] int32 on the host, bit i of word w for token 32 w + i. For a
        complete output these are the tokens that end it. Raises GrammarError if the grammar is too complex."""
        self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * mask.element_size())
        self._check()

    def forced(self) -> list[int]:
        """The tokens that the grammar forces next, as the tokenizer writes their text; none if there is a choice."""
        if self._matcher.is_stopped():  # complete
            return list(self._ends) if len(self._ends) == 1 and not self._ended else []
        return self._matcher.compute_ff_tokens()

    def write_masks(self, tree: DraftTree, masks: Tensor) -> None:
        """Write the masks of a tree's nodes, masks [N, words] int32 on the host. The root is the last token read.

        Forbidden nodes, and nodes after the end, are never reached. Their masks are not written. Raises as
        `write_mask`.
        """
        children = defaultdict[int, list[int]](list)  # of each node, those that are drafts
        for node, parent in enumerate(tree.parents):
            if node and tree.tokens[node] >= 0:
                children[parent].append(node)

        def visit(node: int) -> None:
            self.write_mask(masks[node])
            for child in children[node]:
                token = tree.tokens[child]
                if token not in self._ends and self._matcher.try_consume_tokens([token]):
                    visit(child)
                    self._matcher.rollback(1)

        visit(0)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"grammar: {_reason(self._matcher.get_error())}")


class GrammarCompiler:
    """Compiles grammars for one tokenizer, in any thread, and keeps the latest."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: frozenset[int]):
        """vocabulary: the number of the target's logits. ends: the tokens that end an output.

        Raises ImportError without llguidance, ValueError for a tokenizer that it cannot read.
        """
        self._library, self._ends, self._lock = _import_library(), ends, threading.Lock()
        self._kept: OrderedDict[Grammar, Any] = OrderedDict()
        try:
            self._tokenizer = self._library.hf.from_tokenizer(
                tokenizer, n_vocab=vocabulary, eos_token=sorted(ends), slices=TOKEN_SETS
            )
        except Exception as error:  # of its own kinds
            raise ValueError(f"grammar: it needs a fast tokenizer that llguidance can read: {error}") from error

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of an output. Raises GrammarError for a grammar that cannot be compiled."""
        with self._lock:
            if grammar not in self._kept:
                self._kept[grammar] = self._compiled(grammar)
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(grammar)
            return Matcher(self._kept[grammar].deep_copy(), self._ends)

    def _compiled(self, grammar: Grammar) -> Any:
        syntax, text = grammar.syntax, grammar.text
        if syntax == "choice":  # the library writes characters beyond ASCII as halves of surrogate pairs
            choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
            syntax, text = "lark", f"start: {' | '.join(choices)}"
        try:
            if syntax == "json_schema":
                style = FREE if grammar.whitespace else FIXED
                text = self._library.LLMatcher.grammar_from_json_schema(text, overrides=style)
            else:
                text = self._library.grammar_from(syntax, text)
        except Exception as error:  # of its own kinds
            raise GrammarError(f"grammar: {_reason(str(error))}") from error
        if grammar.around is not None:
            (inner,) = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
            outer = {"name": "around", "lark_grammar": grammar.around}
            text = json.dumps({"grammars": [outer, {**inner, "name": "answer"}]})
        wrong, messages = self._library.LLMatcher.validate_grammar_with_warnings(text, self._tokenizer)
        if not wrong and not messages:
            matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0)
            wrong, messages = matcher.is_error(), [matcher.get_error()]
        if wrong or any(messages):
            raise GrammarError(f"grammar: {_reason(messages[0])}")
        return matcher


_compilers: WeakKeyDictionary[Any, dict[tuple[int, frozenset[int]], GrammarCompiler]] = WeakKeyDictionary()
_compilers_lock = threading.Lock()


def compiler_for(tokenizer: Any, vocabulary: int, ends: frozenset[int]) -> GrammarCompiler:
    """The compiler for a tokenizer, made once. Arguments and errors: see `GrammarCompiler`."""
    with _compilers_lock:
        of_tokenizer = _compilers.setdefault(tokenizer, {})
        if (vocabulary, ends) not in of_tokenizer:
            of_tokenizer[vocabulary, ends] = GrammarCompiler(tokenizer, vocabulary, ends)
        return of_tokenizer[vocabulary, ends]


def _import_library() -> Any:
    try:
        import llguidance
        import llguidance.hf
    except ModuleNotFoundError as error:
        raise ImportError("grammar: it needs llguidance, which is not installed: pip install llguidance") from error
    return llguidance


def _reason(message: str) -> str:
    """A message of the library in one line, without the parser's state and the lines around an error."""
    return " ".join(re.split(r"<state>|\n\s*\d+ \| ", message)[0].split())[:400]
