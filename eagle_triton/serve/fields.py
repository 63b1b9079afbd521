"""How fields of requests are declared for pydantic, and the messages for wrong ones. Checks, the API's description and
docs/serving.md come from the same classes."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError, core_schema, from_json

from eagle_triton.serve.errors import RequestError

CLOSED = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)  # also of TypedDicts inside, if they say nothing
OPEN = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
FORMER = {f"guided_{kind}": "structured_outputs" for kind in ("json", "regex", "choice", "grammar")}  # of vLLM
FORMER["max_completion_tokens"] = "max_tokens"  # of a chat
MAX_ERRORS = 1000  # more are only counted


class Fields(BaseModel):
    """A body, or a part inside one. null means that a field is not given."""

    model_config = CLOSED

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Refuse the first unknown field, and take 2.0 as a whole number."""
        if not isinstance(given, dict):
            return given
        for name in given:
            if name not in cls.model_fields:
                near = difflib.get_close_matches(FORMER.get(name) or name, cls.model_fields, 1)
                hint = f", did you mean {near[0]}?" if near else f"; the fields are {', '.join(cls.model_fields)}"
                raise wrong(name, f"is an unknown field{hint}")
        return {name: int(one) if isinstance(one, float) and one.is_integer() else one for name, one in given.items()}


Model = TypeVar("Model", bound=Fields)
One = TypeVar("One")
Listed = Annotated[list[One], Field(fail_fast=True)]
"""A list that is read up to its first wrong entry: a body has room for millions."""


def about(does: str, origin: str = "OpenAI", default: Any = None, **rules: Any) -> Any:
    """A field. does: what it does. origin: the API that has it: OpenAI's, vLLM's, SGLang's, or only this server's
    ("here"). default: `...` if the field is required. rules: pydantic's."""
    return Field(default, description=does, json_schema_extra={"x-origin": origin}, **rules)


@dataclass(frozen=True)
class Refused:
    """Marks a field that is not offered. The values of its type are accepted, because they ask for nothing."""

    why: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return core_schema.custom_error_schema(
            handler(source), custom_error_type="refused", custom_error_message=f"is not offered: {self.why}"
        )


def wrong(name: str, what: str) -> PydanticCustomError:
    """An error of a field. name: "" for the part that is checked itself. what: follows the name in the message."""
    return PydanticCustomError("field", "{what}", {"name": name, "what": what})


# --- reading ---

WHAT = {  # messages in place of pydantic's own
    "missing": "is missing",
    "extra_forbidden": "is an unknown field",
    "union_tag_invalid": "must have one of the types {expected_tags}",
    "union_tag_not_found": "must have a type",
    "json_invalid": "must be JSON: {error}",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be an object"),
}


def read_json(raw: bytes) -> dict[str, Any]:
    """A body as JSON. Raises RequestError if it is not an object, or if a name occurs twice."""
    try:
        from_json(raw, allow_inf_nan=False)  # stricter than Python's about UTF-8, depth, surrogates and NaN
        body = json.loads(raw, object_pairs_hook=_without_twins)
    except ValueError as error:
        raise RequestError(400, f"the body must be JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(400, "the body must be a JSON object")
    return body


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise RequestError(400, f"{twice:.100} comes twice", f"{twice:.100}")
    return found


def validated(model: type[Model], given: Mapping[str, Any]) -> Model:
    """A body's fields. Raises RequestError with the name of the first wrong one."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _refusal(error, given) from None


def _refusal(error: ValidationError, given: Mapping[str, Any]) -> RequestError:
    """The error of the first wrong field. Of alternative types, it reports the one that fits furthest."""
    if (count := error.error_count()) > MAX_ERRORS:  # listing them all would take seconds
        return RequestError(400, f"{count} values or names in the body are wrong")
    errors = error.errors(include_url=False)
    placed = [(_place(one, given), one) for one in errors if one["loc"][:1] == errors[0]["loc"][:1]]
    place = max((place for place, _ in placed), key=len)
    blamed = [one for where, one in placed if where == place]
    param, what = f"{'.'.join(place):.100}", " or ".join(dict.fromkeys(map(_what, blamed)))
    whole = blamed[0]["type"] in ("field", "missing")  # pydantic's input is then the part around the field
    got = "" if whole else f", got {json.dumps(blamed[0]['input'], default=str):.60}"
    return RequestError(400, f"{param} {what}{got}", param)


def _place(error: ErrorDetails, given: Any) -> tuple[str, ...]:
    """The place in the body of the field that pydantic reports. Other steps of its path name alternative types."""
    place: list[str] = []
    for step in error["loc"]:
        if step in given if isinstance(given, dict) else isinstance(given, list) and isinstance(step, int):
            place.append(str(step))
            given = given[step]
    if error["type"] == "missing":
        place.append(str(error["loc"][-1]))
    elif name := error.get("ctx", {}).get("name"):
        place.append(name)
    return tuple(place)


def _what(error: ErrorDetails) -> str:
    """The message after the field's name. Of pydantic's "Input should be ..." it keeps what follows "should"."""
    if (what := WHAT.get(error["type"])) is not None:
        return what.format(**error.get("ctx", {}))
    _, should, rest = error["msg"].partition(" should ")
    return f"must {rest}" if should else error["msg"]
