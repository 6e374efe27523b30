"""Digests of plain data, as samples and keys hold it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vlmpack.errors import ConfigError, SampleError


def content_digest(value: Any) -> str:
    """Compute a digest of plain data: 32 hexadecimal digits.

    The order of mappings does not matter, and tuples count as lists, because loaders may change both. Images count only
    with mode and size, and values whose content cannot be read only with their type.
    """
    try:
        text = json.dumps(_sorted(value), default=_content)
    except (TypeError, ValueError, RecursionError):  # for example lists that contain themselves
        text = type(value).__qualname__
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _sorted(value: Any) -> Any:
    """Convert mappings to sorted lists of pairs, because keys may be of any type."""
    if isinstance(value, Mapping):
        return {"pairs": sorted(([repr(name), _sorted(one)] for name, one in value.items()), key=itemgetter(0))}
    if not isinstance(value, list | tuple) or {*map(type, value)} <= {int, float, str}:  # token ids
        return value
    return [*map(_sorted, value)]


def _content(value: Any) -> Any:
    """Convert values that JSON has no type for to [type, content]."""
    content: Any = None
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        plain = value.detach().cpu().contiguous()
        content = [str(value.dtype), list(value.shape), _content(plain.reshape(-1).view(torch.uint8).numpy().tobytes())]
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        content = [str(value.dtype), list(value.shape), _content(value.tobytes())]
    elif isinstance(value, bytes | bytearray | memoryview):
        return ["bytes", hashlib.blake2b(value).hexdigest()]
    elif isinstance(value, set | frozenset):
        content = sorted(map(content_digest, value))
    elif isinstance(value, SampleError):
        content = [value.reason, value.detail]
    elif isinstance(value, Image.Image):
        content = [value.mode, value.size]
    elif isinstance(value, Path | np.generic):
        content = str(value)
    return [type(value).__qualname__, content]


# ---------------------------------------------------------------------- states

LOAD_ANOTHER = "load another state, or restart the epoch"
"""What to do when a state is refused."""


def sealed(fields: Mapping[str, Any], *, of: str) -> dict[str, Any]:
    """Return a state: the fields plus a digest of all of them and of the owner's class name."""
    return {**fields, "seal": content_digest([of, fields])}


def check_seal(state: Mapping[str, Any], *, of: str) -> None:
    """Check that a state belongs to that class and that its fields were not changed.

    Raises:
        ConfigError: it is something else.
    """
    fields = {name: value for name, value in state.items() if name != "seal"} if isinstance(state, Mapping) else {}
    if not fields or state.get("seal") != sealed(fields, of=of)["seal"]:
        raise ConfigError(f"this is not the state of a {of}, or it was changed; {LOAD_ANOTHER}")
