"""Read JSON into dataclasses with pydantic. Errors name the field, what was seen, and what is needed.

    seq_id: Annotated[int, between(1)]      a whole number from 1 to the largest int32
    adam: Annotated[AdamParams, Field(alias="adam_params"), settings(AdamParams)]      an object of another name there

A null field counts as absent. But the client sends NaN and infinity as null, so a float must not be null. Unknown
fields of a request are ignored, because newer clients send more of them. Unknown settings are refused, because ignoring
one would silently change results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import cache, partial
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json

from vlmpack.errors import RequestError

INT32, INT64 = 2**31 - 1, 2**63 - 1
METADATA_CHARACTERS = 16_384
"""Maximum number of characters of the metadata that a client attaches to a session, model or checkpoint."""
MOST_FIELDS = 1000
"""Maximum number of fields of an object."""
STRICT = ConfigDict(extra="forbid")
"""`__pydantic_config__` of a dataclass of settings."""
WORDS = {
    "missing": "it is needed",
    "unexpected_keyword_argument": "this service has no such setting",
    "dataclass_type": "an object is needed",
    "tuple_type": "a list is needed",
}
"""What to say about some kinds of errors instead of pydantic's message."""

T = TypeVar("T")


def between(low: int = 0, high: int = INT32) -> Any:
    """Return the bounds of a whole number."""
    return Field(strict=True, ge=low, le=high)


Count = Annotated[int, between()]
"""A whole number from 0 to the largest int32."""


def parse(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object.

    Raises:
        RequestError: the body is not a JSON object in UTF-8, or is nested too deeply.
    """
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON ({error}): send an object in UTF-8") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body is {shown(value)}: send an object")
    return value


def shown(value: Any) -> str:
    """Return a value for an error message, shortened."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def get(values: Mapping[str, Any], name: str, kind: Any, default: Any = ...) -> Any:
    """Read a field of a body; without a default, the field must be there."""
    value = values.get(name)
    if value is None and default is ...:
        raise RequestError(f"{name}: absent or null; {WORDS['missing']}")
    return default if value is None else read(kind, value, name)


def read(kind: Any, value: Any, place: str = "") -> Any:
    """Read a value as a type.

    Args:
        kind: a type that pydantic knows.
        value: the parsed JSON.
        place: name of the value in the body; empty: it is the body.

    Raises:
        RequestError: the value is not of this type.
    """
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise RequestError(_sentence(place, error.errors(include_url=False)[0])) from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _sentence(place: str, error: ErrorDetails) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in error["loc"])
    name = (place + "".join(steps)).removeprefix(".")
    reason = WORDS.get(error["type"], error["msg"].removeprefix("Value error, "))
    if error["type"] == "missing":
        return f"{name}: absent or null; {reason}"
    hint = " (NaN and infinity arrive as null)" if error["input"] is None else ""
    return f"{name}: {shown(error['input'])}; {reason}{hint}" if name else reason


def read_object(kind: type[T], values: Mapping[str, Any]) -> T:
    """Read an object as a dataclass.

    Raises:
        RequestError: a field is absent or invalid.
    """
    return read(kind, _without_nulls(kind, values))


def _without_nulls(kind: Any, values: Any) -> Any:
    """Leave out null fields, except those of floats."""
    if not isinstance(values, Mapping):
        return values
    if len(values) > MOST_FIELDS:  # each unknown one would be an error
        raise RequestError(f"{len(values)} fields; at most {MOST_FIELDS} can be read")
    floats = {field.name for field in fields(kind) if isinstance(field.default, float)}
    return {name: value for name, value in values.items() if value is not None or name in floats}


def settings(kind: type[Any]) -> BeforeValidator:
    """Return how to read a dataclass of settings in a body: null fields count as absent, as in the body itself."""
    return BeforeValidator(partial(_without_nulls, kind))


def _notes(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError("an object is needed")
    notes = {key: each if isinstance(each, str) else json.dumps(each) for key, each in value.items()}
    if sum(len(key) + len(each) for key, each in notes.items()) > METADATA_CHARACTERS:
        raise ValueError(f"more than {METADATA_CHARACTERS} characters")
    return notes


Notes = Annotated[Mapping[str, str], PlainValidator(_notes)]
"""The client's metadata; values that are not strings become JSON strings."""
