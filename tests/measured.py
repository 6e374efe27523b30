"""Data sets to be measured, at the top of a module so that worker processes can be sent them."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chats import chat, picture
from torch.utils.data import Dataset, IterableDataset

from vlmpack.collate import VLMCollator
from vlmpack.collate.digests import settings_key
from vlmpack.errors import SampleError


def encoded(width: int, height: int, kind: str = "JPEG", *, seed: int = 0) -> bytes:
    """An image of noise in a file."""
    file = io.BytesIO()
    picture(width, height, seed=seed).save(file, kind)
    return file.getvalue()


def conversations(count: int) -> list[dict[str, Any]]:
    """Samples of several kinds, every thirteenth of which cannot be used; those with a 7 bring an id."""
    return [{**_conversation(at), **({"id": f"s{at}"} if "7" in str(at) else {})} for at in range(count)]


def _conversation(at: int) -> dict[str, Any]:
    if at % 13 == 12:
        return {"messages": [{"role": "user", "content": f"nothing to learn {at}"}]}
    if at % 3 == 0:
        return chat("What is the total?" * (at % 4 + 1), f"It is {at},000")
    images = [encoded(30 + 11 * at % 190, 20 + 7 * at % 140) for _ in range(at % 3)]
    return chat("Which is larger?", f"Number {at}", *images)


@dataclass(frozen=True)
class Stored:
    """A map-style data set that is not a list."""

    samples: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.samples[index], Exception):
            raise self.samples[index]
        return self.samples[index]


@dataclass(frozen=True)
class KeyTeller:
    """Writes down the key of a collator's settings as the process that reads it computes it."""

    samples: list[Any]
    collator: VLMCollator
    folder: Path

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        (self.folder / f"{os.getpid()}").write_text(settings_key(self.collator).hex())
        return self.samples[index]


class Deadly(Dataset):
    """Kills whoever reads it."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Stream(IterableDataset):
    """Samples to iterate over, whose number is known."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


UNREADABLE = SampleError("its row cannot be read", index=3, reason="bad_json", sample_id="r3")
"""What a data set raises in place of a sample."""
