"""The length table: tokens, media and targets of every sample, measured before training.

    sample        0    1    2    3        four measured, sample 1 refused
    sample_ids    0    2    3
    text         12   20    7
    image         0  256   64
    tokens       12  276   71             text + image + video

    by_place(tokens)   12   0  276   71   what `plan_bins(table, ...)` plans: one entry per sample of the data set

N usable samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, final

import numpy as np

from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan.archive import read_archive, write_archive
from vlmpack.plan.lengths import Budget
from vlmpack.plan.prefix_groups import ALONE, PrefixGroups


@final
@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary statistics of one per-sample number."""

    mean: float
    median: float
    p95: float
    """95 % of the samples have at most this many (interpolated between samples)."""
    p99: float
    """99 % of the samples have at most this many."""
    max: int
    total: int


def summary(values: np.ndarray) -> Summary:
    """Summarize int64 [N]; without samples, every number is 0."""
    values = values if len(values) else np.zeros(1, np.int64)
    median, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
    mean, most, total = float(values.mean()), int(values.max()), int(values.sum())
    return Summary(mean=mean, median=median, p95=p95, p99=p99, max=most, total=total)


FORMAT = "vlmpack.lengths"


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class LengthTable:
    """Tokens, media and targets of N samples."""

    sample_ids: np.ndarray
    """int64 [N], ascending: index of each sample in the data set; refused samples have no entry."""
    text_tokens: np.ndarray
    """int64 [N]: tokens that are not image or video placeholders; audio placeholders are included."""
    image_tokens: np.ndarray
    """int64 [N]: image placeholders."""
    video_tokens: np.ndarray
    """int64 [N]: video placeholders."""
    images: np.ndarray
    """int64 [N]: number of images."""
    videos: np.ndarray
    """int64 [N]: number of videos."""
    patches: np.ndarray
    """int64 [N]: patches for the vision tower."""
    targets: np.ndarray
    """int64 [N]: tokens trained on."""
    refused: tuple[SampleError, ...] = ()
    """Samples that cannot be used, ordered by index."""
    groups: PrefixGroups | None = None
    """The N samples grouped by shared prefixes; None: shared prefixes were not measured."""

    def __post_init__(self) -> None:
        if self.groups is not None:
            media = ("images", self.images + self.videos, self.groups.images)
            self.groups.check_samples(self.tokens, [("patches", self.patches, self.groups.patches), media])
        for name, column in self._columns().items():
            if np.shape(column) != (len(self),):
                raise ConfigError(
                    f"{name} has shape {list(np.shape(column))}, but there are {len(self)} sample_ids; every column "
                    "has one entry per sample"
                )

    def __len__(self) -> int:
        """Return the number of usable samples, N."""
        return len(self.sample_ids)

    @classmethod
    def from_rows(
        cls, rows: Iterable[Mapping[str, int]], refused: Iterable[SampleError] = (), groups: PrefixGroups | None = None
    ) -> LengthTable:
        """Make a table from one mapping per sample, whose keys are the column names."""
        entries = [[row[name] for name in COLUMNS] for row in rows]
        table = np.array(entries, np.int64).reshape(-1, len(COLUMNS))
        return cls(**dict(zip(COLUMNS, table.T.copy(), strict=True)), refused=tuple(refused), groups=groups)

    @property
    def tokens(self) -> np.ndarray:
        """int64 [N]: length of each sample."""
        return self.text_tokens + self.image_tokens + self.video_tokens

    def by_place(self, values: np.ndarray) -> np.ndarray:
        """Spread a per-sample array [N] over all samples of the data set; refused samples get 0."""
        spread = np.zeros(self._places, values.dtype)
        spread[self.sample_ids] = values
        return spread

    def groups_by_place(self, groups: PrefixGroups) -> PrefixGroups:
        """Spread groups of the N samples over all samples of the data set; refused samples share nothing.

        Raises:
            ConfigError: the groups have another number of samples.
        """
        groups.check_samples(self.tokens)
        of_samples = np.full(self._places, ALONE)
        of_samples[self.sample_ids] = groups.of_samples
        return replace(groups, of_samples=of_samples)

    def of_subset(self, places: Sequence[int]) -> LengthTable:
        """Return the table of `torch.utils.data.Subset(dataset, places)`, all of whose samples are usable."""
        rows = np.searchsorted(self.sample_ids, places)
        assert np.array_equal(self.sample_ids[rows], places), "the samples of a subset are usable"
        columns = {name: column[rows] for name, column in self._columns().items()}
        groups = None if self.groups is None else replace(self.groups, of_samples=self.groups.of_samples[rows])
        return LengthTable(**{**columns, "sample_ids": np.arange(len(rows))}, groups=groups)

    @property
    def _places(self) -> int:
        return 1 + max((*self.sample_ids[-1:].tolist(), *(error.index or 0 for error in self.refused)), default=-1)

    @property
    def measured(self) -> int:
        """Number of samples measured, including refused ones."""
        return len(self) + len(self.refused)

    @property
    def reasons(self) -> dict[str, int]:
        """Number of refused samples per reason, most frequent first."""
        return dict(Counter(sample.reason for sample in self.refused).most_common())

    def budgets(self, *, patches: int | None = None, images: int | None = None) -> tuple[Budget, ...]:
        """Make row limits besides tokens, for `plan_bins(table, capacity, budgets=...)`.

        Args:
            patches: maximum vision patches of a row; None: no limit.
            images: maximum images and videos of a row; None: no limit.
        """
        shared = (None, None) if self.groups is None else (self.groups.patches, self.groups.images)
        needs = {"patches": (self.patches, patches), "images": (self.images + self.videos, images)}
        return tuple(
            Budget(name=name, costs=costs, limit=limit, shared=of_groups)
            for (name, (costs, limit)), of_groups in zip(needs.items(), shared, strict=True)
            if limit is not None
        )

    # ------------------------------------------------------------------ on disk

    def save(self, path: str | Path) -> None:
        """Write the table to one file, atomically; the same table always gives the same bytes."""
        groups = {} if self.groups is None else self.groups.arrays()
        content = {"samples": len(self), "refused": [error.to_dict() for error in self.refused]}
        write_archive(path, content, {**self._columns(), **groups}, kind=FORMAT)

    @classmethod
    def load(cls, path: str | Path) -> LengthTable:
        """Read a table that `save` wrote.

        Raises:
            ConfigError: there is no such file, it is not a length table, or it has another version.
            LayoutError: the file was changed after it was written.
        """
        with read_archive(path, kind=FORMAT) as (manifest, arrays):
            refused = tuple(SampleError(fields.pop("detail"), **fields) for fields in manifest["refused"])
            groups = PrefixGroups.of_arrays(arrays)
            return cls(**{name: arrays[name] for name in COLUMNS}, refused=refused, groups=groups)

    def _columns(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in COLUMNS}

    # ------------------------------------------------------------------ in words

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LengthTable) or (self.refused, self.groups) != (other.refused, other.groups):
            return False
        return all(map(np.array_equal, self._columns().values(), other._columns().values()))

    def __repr__(self) -> str:
        sums: dict[str, Any] = {"tokens": self.tokens, "images": self.images, "videos": self.videos}
        totals = ", ".join(f"{int(column.sum())} {name}" for name, column in sums.items() if column.any())
        longest = int(self.tokens.max(initial=0))
        return f"LengthTable({len(self)} samples, {totals}, longest {longest} tokens, {len(self.refused)} refused)"


COLUMNS = tuple(field.name for field in fields(LengthTable) if field.name not in ("refused", "groups"))
