"""A state of plain data in one safetensors file: reading it runs no code, unlike pickle.

The structure is JSON, what is large is bytes beside it. A list stays a list, everything else has the name of its kind:

    {"seen": 3, "rows": [ids]}   {"dict": [["seen", 3], ["rows", [{"tensor": 0}]]]}   and tensor 0

What is written comes back equal, of the same type; other mappings come back as dictionaries, images without the file
that they were read from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vlmpack.errors import ConfigError, SampleError

FORMAT = "vlmpack state 1"

_AS_IT_IS = (type(None), bool, int, float, str)
_BY_TEXT: Mapping[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "decimal": (Decimal, str, Decimal),
    "path": (type(Path()), str, Path),
}
_NUMPY_KINDS = "biufcSUmM"
"""Every numpy type but objects and records."""


def write_state(state: Any, file: Path) -> None:
    """Write a state; see `read_state`.

    Raises:
        ConfigError: something in it is no plain data; says where it is, and what may be there.
    """
    writer = _Writer()
    text = json.dumps(writer.plain(state, "the state"))
    save_file({"state": _bytes(text.encode()), **writer.tensors}, file, metadata={"format": FORMAT})


def read_state(file: Path) -> Any:
    """Read what `write_state` wrote.

    Raises:
        ConfigError: the file is damaged, or was written by something else.
    """
    try:
        with safe_open(file, framework="pt") as stored:
            found = (stored.metadata() or {}).get("format")
            tensors = {name: stored.get_tensor(name) for name in stored.keys()} if found == FORMAT else {}  # noqa: SIM118
        if found != FORMAT:
            raise ValueError(f"its format is {found!r}, not {FORMAT!r}")
        return _Reader(tensors).value(json.loads(tensors["state"].numpy().tobytes()))
    except (SafetensorError, ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise ConfigError(
            f"{file} is damaged, or is no state that vlmpack wrote ({type(error).__name__}: {error}); resume from "
            "another checkpoint, or begin a new run from the weights of this one: from_pretrained(checkpoint)"
        ) from error


@final
class _Writer:
    """Turns values into what JSON can say, and keeps tensors and bytes beside it."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def plain(self, value: Any, where: str) -> Any:
        """A value; `where` it is, for an error."""
        if type(value) in _AS_IT_IS:
            return value
        if type(value) is list:
            return self._each(value, where)
        if type(value) is tuple:
            return {"tuple": self._each(value, where)}
        if isinstance(value, set | frozenset):
            return {type(value).__name__: self._each(sorted(value, key=repr), where)}
        if isinstance(value, Mapping):
            pairs = [[self.plain(k, where), self.plain(v, f"{where}[{k!r}]")] for k, v in value.items()]
            return {"dict": pairs}
        if (stored := self._stored(value)) is not None:
            return stored
        if isinstance(value, Image.Image):
            return {"image": self._image(value, where)}
        if isinstance(value, SampleError):
            parts = (value.detail, value.index, value.reason, value.sample_id)
            return {"sample_error": [self.plain(part, where) for part in parts]}
        raise ConfigError(
            f"{where} is a {type(value).__name__}, which a checkpoint cannot hold without pickle: samples that wait in "
            "a stream are stored with it, so let them be data (numbers, text, bytes, dates, lists, dictionaries, "
            "tensors, arrays, images), or names of files that the collator opens"
        )

    def _each(self, values: Any, where: str) -> list[Any]:
        return [self.plain(value, f"{where}[{at}]") for at, value in enumerate(values)]

    def _stored(self, value: Any) -> dict[str, Any] | None:
        """What is kept beside the JSON, or is a text; None: it is of another kind."""
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            return {"tensor": self._keep(value.detach().cpu().contiguous().clone())}
        if isinstance(value, bytes | bytearray):
            return {type(value).__name__: self._keep(_bytes(value))}
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMPY_KINDS:
            kind = "scalar" if isinstance(value, np.generic) else "array"
            return {kind: [value.dtype.str, list(value.shape), self._keep(_bytes(value.tobytes()))]}
        for name, (kind, to_text, _) in _BY_TEXT.items():
            if type(value) is kind:
                return {name: to_text(value)}
        return None

    def _image(self, image: Image.Image, where: str) -> Any:
        """Its pixels, its palette, and what is noted on it."""
        data = image.tobytes()
        mode = None if image.palette is None else image.palette.mode
        palette = None if mode is None else [mode, image.getpalette(mode)]
        return self.plain([image.mode, image.size, _noted(image), palette, data], where)

    def _keep(self, tensor: torch.Tensor) -> int:
        self.tensors[str(len(self.tensors))] = tensor
        return len(self.tensors) - 1


@final
class _Reader:
    """Turns it back."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def value(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self.value(one) for one in plain]
        if not isinstance(plain, dict):
            return plain
        ((kind, of),) = plain.items()
        if kind in ("tuple", "set", "frozenset"):
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](self.value(one) for one in of)
        if kind == "dict":
            return {self.value(key): self.value(value) for key, value in of}
        if kind == "tensor":
            return self._tensors[str(of)]
        if kind in ("bytes", "bytearray"):
            return {"bytes": bytes, "bytearray": bytearray}[kind](self._raw(of))
        if kind in ("array", "scalar"):
            array = np.frombuffer(bytearray(self._raw(of[2])), dtype=np.dtype(of[0])).reshape(of[1])
            return array[()] if kind == "scalar" else array
        if kind == "image":
            return _image(*self.value(of))
        if kind == "sample_error":
            detail, index, reason, sample_id = self.value(of)
            return SampleError(detail, index=index, reason=reason, sample_id=sample_id)
        return _BY_TEXT[kind][2](of)

    def _raw(self, at: int) -> bytes:
        return self._tensors[str(at)].numpy().tobytes()


def _image(mode: str, size: tuple[int, int], info: dict[str, Any], palette: list[Any] | None, data: bytes) -> Any:
    image = Image.frombytes(mode, size, data)
    if palette is not None:
        image.putpalette(palette[1], palette[0])
    image.info.update(info)
    return image


def _noted(image: Image.Image) -> dict[str, Any]:
    """What the file of a decoded image says of it (its orientation as EXIF or XMP), as far as it is plain."""
    noted = {name: str(value) if isinstance(value, str) else value for name, value in image.info.items()}
    return {name: value for name, value in noted.items() if isinstance(name, str) and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return type(value) in (*_AS_IT_IS, bytes) or (type(value) is tuple and all(map(_is_plain, value)))


def _bytes(data: bytes | bytearray) -> torch.Tensor:
    """uint8 [n]."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
