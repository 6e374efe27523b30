"""LengthTable: what is known of every sample before training, for planners and for people.

    sample        0    1    2    3        four were looked at, sample 1 was refused
    sample_ids    0    2    3
    text         12   20    7
    image         0  256   64
    tokens       12  276   71             text + image + video

    by_place(tokens)   12   0  276   71   as `plan_bins(table, ...)` plans them: by their places in the data set

N samples that can be used.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, final

import numpy as np

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.plan import archive
from vlmpack.plan.lengths import Budget

FORMAT = "vlmpack.lengths"


@final
@dataclass(frozen=True, kw_only=True)
class Refused:
    """One sample that cannot be used."""

    index: int
    """Its place in the data set."""
    sample_id: int | str | None
    """Its own id, where it has one."""
    reason: str
    """The slug under which it is counted."""
    detail: str
    """What was seen, and what to do."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class LengthTable:
    """Tokens and media of N samples."""

    sample_ids: np.ndarray
    """int64 [N]: the place of each in the data set, rising; refused samples have no entry."""
    text_tokens: np.ndarray
    """int64 [N]: tokens that are not placeholders."""
    image_tokens: np.ndarray
    """int64 [N]: placeholders of images."""
    video_tokens: np.ndarray
    """int64 [N]: placeholders of videos."""
    images: np.ndarray
    """int64 [N]: how many images."""
    videos: np.ndarray
    """int64 [N]: how many videos."""
    patches: np.ndarray
    """int64 [N]: patches that go into the vision tower."""
    targets: np.ndarray
    """int64 [N]: tokens that are learnt."""
    refused: tuple[Refused, ...] = ()
    """Samples that cannot be used, by their places."""

    def __post_init__(self) -> None:
        for name in COLUMNS:
            if np.shape(self.__dict__[name]) != (len(self),):
                raise ConfigError(
                    f"{name} has shape {list(np.shape(self.__dict__[name]))}, but there are {len(self)} sample_ids; "
                    "every column has one entry a sample"
                )

    def __len__(self) -> int:
        """Samples N that can be used."""
        return len(self.sample_ids)

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, int]], refused: Iterable[Refused] = ()) -> LengthTable:
        """Make the table from one mapping a sample, with the names of the columns as keys."""
        entries = [[row[name] for name in COLUMNS] for row in rows]
        table = np.array(entries, np.int64).reshape(-1, len(COLUMNS))
        return cls(**dict(zip(COLUMNS, table.T.copy(), strict=True)), refused=tuple(refused))

    @property
    def tokens(self) -> np.ndarray:
        """int64 [N]: the length of each sample."""
        return self.text_tokens + self.image_tokens + self.video_tokens

    def by_place(self, values: np.ndarray) -> np.ndarray:
        """Something that each sample of the table has, [N], by the places in the data set: 0 for those refused."""
        last = max((*self.sample_ids[-1:].tolist(), *(one.index for one in self.refused)), default=-1)
        spread = np.zeros(last + 1, values.dtype)
        spread[self.sample_ids] = values
        return spread

    @property
    def given(self) -> int:
        """Samples that were looked at."""
        return len(self) + len(self.refused)

    @property
    def reasons(self) -> dict[str, int]:
        """How many samples were refused for each reason, the most frequent first."""
        return dict(Counter(one.reason for one in self.refused).most_common())

    def budgets(self, *, patches: int | None = None, images: int | None = None) -> tuple[Budget, ...]:
        """Limits of a row besides tokens, for `plan_bins(table, capacity, budgets=...)`.

        Args:
            patches: most patches of the vision tower in a row; None: no limit.
            images: most images and videos in a row; None: no limit.
        """
        limits = {"patches": (self.patches, patches), "images": (self.images + self.videos, images)}
        return tuple(Budget(name=n, costs=costs, limit=most) for n, (costs, most) in limits.items() if most is not None)

    # ------------------------------------------------------------------ on disk

    def save(self, path: str | Path) -> None:
        """Write the table to one file, whole or not at all; the same table gives the same bytes."""
        archive.write(path, self._manifest(), self._columns(), kind=FORMAT)

    @classmethod
    def load(cls, path: str | Path) -> LengthTable:
        """Read back what `save` wrote.

        Raises:
            ConfigError: there is no such file, it is no table, or it is of another version.
            LayoutError: it was changed since it was written.
        """
        manifest, arrays = archive.read(path, kind=FORMAT)
        with archive.damaged(path):
            refused = tuple(Refused(**one) for one in manifest["refused"])
            table = cls(**{name: arrays[name] for name in COLUMNS}, refused=refused)
            said = {name: value for name, value in manifest.items() if name not in ("format", "version")}
            if json.loads(json.dumps(table._manifest())) != said or table._columns().keys() != arrays.keys():
                raise LayoutError(
                    f"{path} does not hold what its digest says: it was changed or damaged; measure the lengths again"
                )
        return table

    def _columns(self) -> dict[str, np.ndarray]:
        return {name: self.__dict__[name] for name in COLUMNS}

    def _manifest(self) -> dict[str, Any]:
        """Everything besides the columns, and the SHA-256 of both."""
        content = {"samples": len(self), "refused": [asdict(one) for one in self.refused]}
        digest = hashlib.sha256(json.dumps(content).encode())
        for name, column in self._columns().items():
            digest.update(f"{name} {len(column)} ".encode() + column.astype("<i8").tobytes())
        return {**content, "digest": digest.hexdigest()}

    # ------------------------------------------------------------------ in words

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, LengthTable)
            and self.refused == other.refused
            and all(np.array_equal(self.__dict__[name], other.__dict__[name]) for name in COLUMNS)
        )

    def __repr__(self) -> str:
        sums: dict[str, Any] = {"tokens": self.tokens, "images": self.images, "videos": self.videos}
        totals = ", ".join(f"{int(column.sum())} {name}" for name, column in sums.items() if column.any())
        longest = int(self.tokens.max(initial=0))
        return f"LengthTable({len(self)} samples, {totals}, longest {longest} tokens, {len(self.refused)} refused)"


COLUMNS = tuple(field.name for field in fields(LengthTable) if field.name != "refused")
