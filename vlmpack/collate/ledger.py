"""The account of samples given, used and refused: counted by reason, written down, and with a ceiling."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from vlmpack.errors import ConfigError, SampleError


@final
@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """How many refused samples are too many: above it the data are broken, not single samples."""

    max_bad_fraction: float = 0.01
    """Refused samples per sample given, 0 to 1."""
    min_seen: int = 200
    """The fraction is looked at once this many samples were given."""
    max_consecutive_bad: int = 20
    """Refused samples in a row, looked at from the first sample on."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad_fraction <= 1:
            raise ConfigError(f"max_bad_fraction must lie between 0 and 1, got {self.max_bad_fraction}")
        if self.min_seen < 1 or self.max_consecutive_bad < 1:
            raise ConfigError(
                f"min_seen={self.min_seen} and max_consecutive_bad={self.max_consecutive_bad} must be at least 1"
            )


@final
class Ledger:
    """Counts of one process, and a JSON-lines file that all processes write to.

    `given == used + refused` holds after every batch. A DataLoader worker has its own copy of the collator, and so its
    own counts and its own ceiling; the file, one line a refused sample, holds those of all workers.

    Args:
        path: the JSON-lines file; it is appended to. None: counts only.
        ceiling: when to give up.
    """

    def __init__(self, path: str | Path | None = None, *, ceiling: Ceiling | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.ceiling = ceiling or Ceiling()
        self.used = 0
        """Samples that went into a batch."""
        self.reasons: Counter[str] = Counter()
        """Refused samples by reason, those left out on purpose included."""
        self._noted = 0
        self._consecutive = 0

    def __repr__(self) -> str:
        why = "".join(f", {reason} {count}" for reason, count in self.reasons.most_common())
        where = "" if self.path is None else f"; written down in {str(self.path)!r}"
        return f"Ledger({self.given} given, {self.used} used, {self.refused} refused{why}{where})"

    @property
    def refused(self) -> int:
        """Samples that went into no batch."""
        return sum(self.reasons.values())

    @property
    def given(self) -> int:
        """Samples seen."""
        return self.used + self.refused

    def use(self) -> None:
        """Count a sample that can be used."""
        self.used += 1
        self._consecutive = 0

    def note(self, error: SampleError) -> None:
        """Count and write down a sample without looking at the ceiling: left out by choice, or about to be raised."""
        self._noted += 1
        self._record(error)

    def refuse(self, error: SampleError) -> None:
        """Count and write down a bad sample.

        Raises:
            ConfigError: more bad samples than the ceiling allows.
        """
        self._consecutive += 1
        self._record(error)
        self._check_ceiling(error)

    def _record(self, error: SampleError) -> None:
        self.reasons[error.reason] += 1
        if self.path is not None:
            _append(self.path, _line(error, seen=self.given))

    def _check_ceiling(self, error: SampleError) -> None:
        bad = self.refused - self._noted
        if self._consecutive >= self.ceiling.max_consecutive_bad:
            seen = f"{self._consecutive} samples in a row (max_consecutive_bad={self.ceiling.max_consecutive_bad})"
        elif self.given >= self.ceiling.min_seen and bad > self.ceiling.max_bad_fraction * self.given:
            limit = f"max_bad_fraction={self.ceiling.max_bad_fraction:g}"
            seen = f"{bad} of {self.given} samples ({bad / self.given:.1%}, {limit})"
        else:
            return
        counts = ", ".join(f"{reason} {count}" for reason, count in self.reasons.most_common())
        where = "" if self.path is None else f"; each is written down in {self.path}"
        raise ConfigError(
            f"{seen} had to be refused: {counts}{where}. The last was {error}. Repair the data, or raise the ceiling"
        ) from error


def read_ledger(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a ledger file, those of all workers, in the order of writing.

    Each has `index` (in its batch), `id`, `reason`, `detail`, `process` (the writer's id) and `seen` (samples that the
    process had been given by then).
    """
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def _line(error: SampleError, *, seen: int) -> str:
    record = {
        "index": error.index,
        "id": error.sample_id,
        "reason": error.reason,
        "detail": error.detail,
        "process": os.getpid(),
        "seen": seen,
    }
    return json.dumps(record, ensure_ascii=True) + "\n"


def _append(path: Path, line: str) -> None:
    """One write to a file opened for appending: lines of several workers do not mix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
