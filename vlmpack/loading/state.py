"""States that are loaded: every field is checked, and a seal that an edited or damaged state does not have.

    {"seen": 3, "buffered": [[2, sample]], ..., "seal": digest of all of it}

A state without a seal, as earlier versions wrote them, is taken by its fields alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from PIL import Image

from vlmpack.errors import ConfigError, SampleError, check_whole_number

SEAL = "seal"
DEPTH = 99
"""Lists in lists that a digest looks into."""


def digest_of(value: Any) -> str:
    """Compute the digest of any value of plain data: 32 hexadecimal digits.

    Mappings count in any order and tuples as lists, as loaders hand them back. Of an image its size counts, and of what
    has no content that could be read, its type.
    """
    content = hashlib.blake2b(digest_size=16)
    _update(content, value, 0)
    return content.hexdigest()


def _update(content: Any, value: Any, depth: int) -> None:
    if isinstance(value, Mapping | list | tuple | set | frozenset) and depth < DEPTH:
        kind = "map" if isinstance(value, Mapping) else "set" if isinstance(value, set | frozenset) else "list"
        content.update(f"{kind} {len(value)}:".encode())
        for inner in _in_order(value):
            _update(content, inner, depth + 1)
    else:
        leaf = _leaf(value)
        content.update(f"{len(leaf)}:".encode() + leaf)


def _in_order(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return sorted(value.items(), key=lambda item: repr(item[0]))
    return value if isinstance(value, list | tuple) else sorted(value, key=repr)


def _leaf(value: Any) -> bytes:
    """A single value as bytes."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        values = value.detach().cpu().contiguous().reshape(-1)
        return f"{value.dtype} {tuple(value.shape)}".encode() + values.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape}".encode() + value.tobytes()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, SampleError):
        return f"{value.reason} {value.detail}".encode(errors="surrogatepass")
    if isinstance(value, Image.Image):
        return f"{value.mode} {value.size}".encode()
    if value is None or isinstance(value, str | bool | int | float | Path | np.generic):
        return f"{type(value).__name__} {value}".encode(errors="surrogatepass")
    return type(value).__qualname__.encode()


@final
class SampleDigests:
    """Digests of the samples of one state after the other, computed once for each sample while it stays."""

    def __init__(self) -> None:
        self._computed: dict[int, tuple[Any, str]] = {}

    def of(self, samples: Sequence[Any]) -> list[str]:
        """The digest of each."""
        computed = self._computed
        self._computed = {id(sample): computed.get(id(sample)) or (sample, digest_of(sample)) for sample in samples}
        return [self._computed[id(sample)][1] for sample in samples]

    def __getstate__(self) -> dict[str, Any]:
        return {"_computed": {}}


# ---------------------------------------------------------------------- fields


def checked_fields(state: object, names: Sequence[str], *, optional: Sequence[str] = (), of: str) -> Mapping[str, Any]:
    """Refuse anything but a state with these fields, and no others.

    Args:
        state: as it was loaded.
        names: of its fields.
        optional: further ones, which earlier versions did not write.
        of: whose state it is.

    Raises:
        ConfigError: it is no mapping, or has too many fields or too few; names them.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"the state of a {of} is a dict with {', '.join(names)}, got a {type(state).__name__}")
    missing, more = [name for name in names if name not in state], [n for n in state if n not in (*names, *optional)]
    if missing or more:
        fault = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(map(repr, more))} besides"
        raise ConfigError(f"the state {fault}, and that of a {of} holds {', '.join(names)}; {LOAD_ANOTHER}")
    return state


def whole(state: Mapping[str, Any], name: str, most: int | None = None) -> int:
    """A count of a state: a whole number from 0 to `most`.

    Raises:
        ConfigError: it is another number, or none.
    """
    return check_whole_number(f"the state's {name}", state[name], at_least=0, at_most=most, remedy=LOAD_ANOTHER)


def listed(state: Mapping[str, Any], name: str) -> list[Any]:
    """A list of a state.

    Raises:
        ConfigError: it is none.
    """
    value = state[name]
    if not isinstance(value, list | tuple):
        raise ConfigError(f"the state has {name}={value!r:.40}, which is no list; {LOAD_ANOTHER}")
    return list(value)


def check_seal(state: Mapping[str, Any], seal: str) -> None:
    """Refuse a state whose fields are others than when it was sealed.

    Raises:
        ConfigError: they are.
    """
    if SEAL in state and state[SEAL] != seal:
        raise ConfigError(f"the state was changed or damaged since it was made: its seal differs; {LOAD_ANOTHER}")


LOAD_ANOTHER = "load another state, or begin the epoch anew"
"""The remedy where a state is refused."""
