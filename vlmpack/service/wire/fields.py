"""Read JSON into dataclasses. A field's annotation says how to read it; errors name the field and what was seen.

    seq_id: Annotated[int, Between(1)]      a whole number from 1 to the largest int32
    prompt: Annotated[..., read_prompt]     read by a function of the value and its place in the body
    adam: AdamParams                        an object of settings, named `adam_params` in the body (`NAMES`)

A null field counts as absent. But the client sends NaN and infinity as null, so a float field must not be null. Unknown
fields of a request are ignored, because newer clients send more of them. Unknown settings are refused, because ignoring
one would silently change results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from math import inf
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, final, get_args, get_origin, get_type_hints

from vlmpack.errors import RequestError

INT32, INT64, LARGEST = 2**31 - 1, 2**63 - 1, sys.float_info.max
METADATA_CHARACTERS = 16_384
"""Maximum number of characters of the metadata that a client attaches to a session, model or checkpoint."""
NAMES = {"name": "path", "lora": "lora_config", "adam": "adam_params", "params": "sampling_params"}
"""Names of fields in a body that differ from the attribute's name."""

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Between:
    """Bounds of a number."""

    low: float = 0
    """Smallest allowed value."""
    high: float = INT32
    """Largest allowed value."""
    excluded: float | None = None
    """A bound that is not itself allowed; None: both bounds are allowed."""

    def __str__(self) -> str:
        return f"from {self.low} to {self.high}" + ("" if self.excluded is None else f", {self.excluded} excluded,")


def parse(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object.

    Raises:
        RequestError: the body is not a JSON object in UTF-8, or is nested too deeply.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON ({error}): send an object in UTF-8") from error
    return check(dict, value, "the body", "an object")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def shown(value: Any) -> str:
    """Return a value for an error message, shortened."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check(kind: type[T] | tuple[type, ...], value: Any, place: str, wanted: str) -> T:
    """Return a value after checking its type. Booleans do not count as numbers.

    Raises:
        RequestError: the value has another type.
    """
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RequestError(f"{place}: {shown(value)}; {wanted} is needed")
    return value  # pyright: ignore


def get(values: Mapping[str, Any], name: str, kind: Any, default: Any = ..., *, place: str = "") -> Any:
    """Read a field of an object.

    Args:
        values: the object.
        name: name of the field.
        kind: type of the field, see `read`.
        default: value of an absent or null field; without a default the field is required.
        place: place of the object, for errors.
    """
    value = values.get(name)
    if value is None and (default is ... or (name in values and _unwrapped(kind) is float)):
        raise RequestError(f"{place}{name}: absent or null; it is needed (NaN and infinity arrive as null)")
    return default if value is None else read(kind, value, f"{place}{name}")


def _unwrapped(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def read(kind: Any, value: Any, place: str) -> Any:
    """Read a JSON value as a type.

    Args:
        kind: a scalar type, a tuple of one type, a `Literal`, a `Mapping` (metadata), or a dataclass of settings; one
            of these or None; or one of these `Annotated` with `Between` or with a function that reads the value.
        value: the value, not null.
        place: name of the value in the body.

    Raises:
        RequestError: the value has another type, or is out of bounds.
    """
    if get_origin(kind) in (Union, UnionType):
        return read(next(one for one in get_args(kind) if one is not type(None)), value, place)
    rule = get_args(kind)[1] if get_origin(kind) is Annotated else None
    if callable(rule):
        return rule(value, place)
    kind = _unwrapped(kind)
    origin = get_origin(kind)
    if kind is int or kind is float:
        bounds = rule or (Between() if kind is int else Between(-inf, inf))
        wanted = f"a {'whole' if kind is int else 'finite'} number {bounds}"
        check((int, kind), value, place, wanted)
        if not (bounds.low <= value <= bounds.high and abs(value) <= LARGEST) or value == bounds.excluded:
            raise RequestError(f"{place}: {shown(value)}; {wanted} is needed")
        return kind(value)
    if kind is bool:
        return check(bool, value, place, "true or false")
    if kind is str:
        return read_text(value, place)
    if origin is Literal:
        if value not in get_args(kind):
            raise RequestError(f"{place} {shown(value)}: this service has {', '.join(map(str, get_args(kind)))}")
        return value
    if origin is tuple:
        return tuple(read(get_args(kind)[0], one, f"{place}[{at}]") for at, one in enumerate(as_list(value, place)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _notes(value, place)
    return read_object(kind, check(dict, value, place, "an object"), f"{place}.", is_strict=True)


def as_list(value: Any, place: str) -> list[Any]:
    """Return a list with elements of any type."""
    return check(list, value, place, "a list")


def read_text(value: Any, place: str) -> str:
    """Return a string that UTF-8 can encode."""
    text: str = check(str, value, place, "a text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{place}: a text with half a character (a lone surrogate)") from error
    return text


def _notes(value: Any, place: str) -> dict[str, str]:
    """Return the client's metadata; values that are not strings become JSON strings."""
    notes = {
        read_text(key, place): read_text(each, place) if isinstance(each, str) else json.dumps(each)
        for key, each in check(dict, value, place, "an object").items()
    }
    if sum(len(key) + len(each) for key, each in notes.items()) > METADATA_CHARACTERS:
        raise RequestError(f"{place}: more than {METADATA_CHARACTERS} characters")
    return notes


def read_object(kind: type[T], values: Mapping[str, Any], place: str = "", *, is_strict: bool = False) -> T:
    """Read an object as a dataclass.

    Args:
        kind: the dataclass.
        values: the object.
        place: place of the object, with a trailing dot; empty: the body.
        is_strict: refuse fields that the dataclass does not have.
    """
    hints, found = _hints(kind), {}
    columns = {NAMES.get(column.name, column.name): column for column in fields(kind)}  # pyright: ignore
    if is_strict and (others := sorted(name for name in set(values) - set(columns) if values[name] is not None)):
        known = ", ".join(sorted(columns))
        raise RequestError(f"{place}{others[0]}: not a setting of this service; it has {known}")
    for name, column in columns.items():
        is_needed = column.default is MISSING and column.default_factory is MISSING
        value = get(values, name, hints[column.name], ... if is_needed else None, place=place)
        if value is not None:
            found[column.name] = value
    return kind(**found)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
