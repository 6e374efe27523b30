"""Tools and their calls, which other libraries write as JSON text, in the form that chat templates take.

LLaMA-Factory   {"from": "function_call", "value": '{"name": ..., "arguments": {...}}'}   ─┐
ms-swift        {"role": "tool_call", "content": '{"name": ..., "arguments": {...}}'}      ├─▶ message["tool_calls"]
OpenAI          {"tool_calls": [{"function": {"name": ..., "arguments": '{...}'}}]}       ─┘
all of them     {"tools": '[{"type": "function", ...}]'}, "[]" and "" where there are none ──▶ a list
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

CALLING = ("function_call", "tool_call")
"""Roles of turns of the assistant whose text is the JSON of calls: of LLaMA-Factory and of ms-swift."""


def without_nulls(value: Any) -> Any:
    """Copy a nested value without the keys that are None, at every depth; items of lists stay.

    Arrow gives every struct of a column the keys of all of them.
    """
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def read_tools(value: Any) -> list[Any]:
    """Read a column `tools`: a list, or the JSON of one; a tool in the list may be JSON text too.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, str):
        value = _parsed(value, "tools") if value.strip() else []
    value = [value] if isinstance(value, Mapping) else [] if value is None else value
    if not isinstance(value, list | tuple):
        raise ValueError(f"tools must be a list of tools, or the JSON of one, got {type(value).__name__} {value!r:.40}")
    return [_parsed(tool, "tools") if isinstance(tool, str) else tool for tool in value]


def calls_in(text: str) -> list[dict[str, Any]]:
    """Read the calls in the text of a turn: JSON of a name and its arguments, or a list of such.

    Raises:
        ValueError: it is something else.
    """
    try:
        calls = json.loads(text)
        calls = calls if isinstance(calls, list) else [calls]
        functions = [{"name": call["name"], "arguments": _arguments(call["arguments"])} for call in calls]
        if not functions:
            raise ValueError("no call")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"a function call that is no JSON of a name and its arguments: {text!r:.60}") from error
    return [{"type": "function", "function": function} for function in functions]


def with_arguments(calls: Any) -> Any:
    """Parse the `arguments` of calls that are JSON text, as OpenAI writes them; some templates would quote them again.

    Raises:
        ValueError: they are no JSON of an object.
    """
    if isinstance(calls, str):
        calls = _parsed(calls, "tool_calls") if calls.strip() else []
    if not isinstance(calls, Sequence):
        return calls
    return [_with_arguments(call) for call in calls]


def _with_arguments(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _with_arguments(function)}
    return {**call, "arguments": _arguments(call["arguments"])} if "arguments" in call else call


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    arguments = _parsed(value, "arguments of a tool call") if value.strip() else {}
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments of a tool call have to be the JSON of an object, got {value!r:.60}")
    return arguments


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} that are a text have to be JSON, got {text!r:.60} ({error})") from error
