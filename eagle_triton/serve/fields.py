"""How the fields of requests are declared, for pydantic, and what is said of those that are wrong. Checks, the API's
description and docs/serving.md come from the same classes."""

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
MAX_ERRORS = 1000  # of which each is looked at


class Fields(BaseModel):
    """A body, or an inner part of one. A field that is null is as one that is not there."""

    model_config = CLOSED

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Refuse the first unknown field, and take 2.0 as a whole number."""
        if not isinstance(given, dict):
            return given
        for name in given:
            if name not in cls.model_fields:
                near = difflib.get_close_matches(name, cls.model_fields, 1)
                hint = f", did you mean {near[0]}?" if near else f"; the fields are {', '.join(cls.model_fields)}"
                raise wrong(name, f"is an unknown field{hint}")
        return {name: int(one) if isinstance(one, float) and one.is_integer() else one for name, one in given.items()}


Model = TypeVar("Model", bound=Fields)
One = TypeVar("One")
Listed = Annotated[list[One], Field(fail_fast=True)]
"""A list, read up to its first entry that is wrong: a body has room for millions."""


def about(does: str, origin: str = "OpenAI", default: Any = None, **rules: Any) -> Any:
    """A field. does: what it does. origin: whose field it is: OpenAI's, vLLM's, SGLang's, or only this server's.
    default: `...` if it must be there. rules: pydantic's."""
    return Field(default, description=does, json_schema_extra={"x-origin": origin}, **rules)


@dataclass(frozen=True)
class Refused:
    """Marks the type of a field that is not offered: its values ask for nothing, and all others are refused."""

    why: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return core_schema.custom_error_schema(
            handler(source), custom_error_type="refused", custom_error_message=f"is not offered: {self.why}"
        )


def wrong(name: str, what: str) -> PydanticCustomError:
    """The error of a field of the part that is checked, or with "" of that part. what: stands after the name."""
    return PydanticCustomError("field", "{what}", {"name": name, "what": what})


# --- reading ---

WHAT = {  # what is said of some errors in place of pydantic's own message
    "missing": "is missing",
    "extra_forbidden": "is an unknown field",
    "union_tag_invalid": "must have one of the types {expected_tags}",
    "union_tag_not_found": "must have a type",
    "json_invalid": "must be JSON: {error}",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be an object"),
}


def read_json(raw: bytes) -> dict[str, Any]:
    """A body as JSON. RequestError if it is no object, and for names that come twice."""
    try:
        from_json(raw, allow_inf_nan=False)  # stricter than Python's: of UTF-8, depth, surrogates, NaN
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
    """A body's fields. Raises RequestError naming the first one that is wrong."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _refusal(error, given) from None


def _refusal(error: ValidationError, given: Mapping[str, Any]) -> RequestError:
    """The first field that is wrong. Of alternative types the one that fits furthest is named."""
    if (count := error.error_count()) > MAX_ERRORS:  # to list them all would take seconds
        return RequestError(400, f"{count} values or names in the body are wrong")
    errors = error.errors(include_url=False)
    placed = [(_place(one, given), one) for one in errors if one["loc"][:1] == errors[0]["loc"][:1]]
    place = max((place for place, _ in placed), key=len)
    blamed = [one for where, one in placed if where == place]
    param, what = f"{'.'.join(place):.100}", " or ".join(dict.fromkeys(map(_what, blamed)))
    whole = blamed[0]["type"] in ("field", "missing")  # what was given is the part around the field
    got = "" if whole else f", got {json.dumps(blamed[0]['input'], default=str):.60}"
    return RequestError(400, f"{param} {what}{got}", param)


def _place(error: ErrorDetails, given: Any) -> tuple[str, ...]:
    """Where in a body a field is that pydantic blames; other steps of its path name alternative types."""
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
    """What stands after the field's name: of pydantic's "Input should be ..." the part from "should" on."""
    if (what := WHAT.get(error["type"])) is not None:
        return what.format(**error.get("ctx", {}))
    _, should, rest = error["msg"].partition(" should ")
    return f"must {rest}" if should else error["msg"]
