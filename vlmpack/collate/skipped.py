"""Log skipped samples: counts by reason over all workers, a JSON Lines file, and the limit that stops a run."""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from threading import RLock
from typing import IO, Any

from vlmpack.errors import ConfigError, SampleError, check_whole_number

try:
    import fcntl
except ImportError:  # on Windows, where every process has its own document
    fcntl = None


class SharedDocument:
    """A dictionary of JSON values, shared by a process and the processes that it starts.

    Args:
        content: initial values.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content
        self._adopt(_anonymous_file())
        self._store()

    def __getstate__(self) -> dict[str, Any]:
        """Pass the file itself to a process that is being spawned; any other pickle gets a copy of the content."""
        if self._file is not None and get_spawning_popen() is not None:
            from multiprocessing.reduction import DupFd

            return {"file": DupFd(self._file.fileno())}
        return {"content": self.read()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "file" in state:
            self._content = {}
            self._adopt(os.fdopen(state["file"].detach(), "r+b", buffering=0))
        else:
            self.__init__(state["content"])

    def read(self) -> dict[str, Any]:
        """Return a copy of the content, including changes by other processes."""
        with self.changed() as content:
            return deepcopy(content)

    @contextmanager
    def changed(self) -> Iterator[dict[str, Any]]:
        """Yield the current content, which the block may change. Other processes wait; blocks may nest."""
        if self._process != os.getpid():  # forked, perhaps while another thread of the parent held its lock
            self._lock, self._depth, self._process = RLock(), 0, os.getpid()
        with self._lock:
            if self._depth == 0:
                self._load()
            self._depth += 1
            try:
                yield self._content
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._store()

    def _adopt(self, file: IO[bytes] | None) -> None:
        self._file, self._lock, self._depth, self._process = file, RLock(), 0, os.getpid()
        if file is not None:
            weakref.finalize(self, file.close)

    def _load(self) -> None:
        """Take the lock and read. Uses `pread`, because processes share the file position."""
        if self._file is not None and fcntl is not None:
            fcntl.lockf(self._file, fcntl.LOCK_EX)  # not `flock`: a forked process would share that lock
            self._content = json.loads(os.pread(file := self._file.fileno(), os.fstat(file).st_size, 0))

    def _store(self) -> None:
        """Write and release the lock."""
        if self._file is not None and fcntl is not None:
            text = json.dumps(self._content).encode()
            os.pwrite(self._file.fileno(), text, 0)
            self._file.truncate(len(text))
            fcntl.lockf(self._file, fcntl.LOCK_UN)


def _anonymous_file() -> IO[bytes] | None:
    """Open a new unnamed file. None: this system has none, and nothing is shared."""
    with suppress(OSError):
        return tempfile.TemporaryFile(buffering=0)
    return None


@dataclass(frozen=True, kw_only=True)
class SkipLimit:
    """The number of refused samples above which the data itself counts as broken."""

    max_bad_fraction: float = 0.01
    """Largest fraction of received samples that may be refused, 0 to 1."""
    min_samples: int = 200
    """Number of received samples from which the fraction is checked."""
    max_consecutive_bad: int = 20
    """Number of consecutive refused samples that stops the run, from the first sample on."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad_fraction <= 1:
            raise ConfigError(f"max_bad_fraction must lie between 0 and 1, got {self.max_bad_fraction}")
        check_whole_number("min_samples", self.min_samples)
        check_whole_number("max_consecutive_bad", self.max_consecutive_bad)

    def check(self, refused: Sequence[SampleError], *, intended: Callable[[str], bool]) -> None:
        """Check the refused samples of a data set, in its order.

        Args:
            refused: them all, ordered by index.
            intended: whether samples with this reason are left out on purpose, see `VLMCollator.leaves_out`.

        Raises:
            ConfigError: there are more bad ones than allowed.
        """
        log = SkipLog(limit=self)
        with log.at_once():
            for before, error in zip([-1, *(each.index or 0 for each in refused)], refused, strict=False):
                if used := (error.index or 0) - before - 1:
                    log.use(used)
                (log.note if intended(error.reason) else log.refuse)(error)


class SkipLog:
    """Counts shared by a process and all DataLoader workers that it starts, and a JSON Lines file that they write to.

    A line has `index` (in its batch), `id`, `reason`, `detail`, `process` (its writer) and `seen` (samples so far).

    `received == used + refused` holds after every batch. Counts and limit cover all these processes together, over all
    epochs, whether workers are forked or spawned. "Consecutive" means in the order in which batches are counted. A copy
    (pickle, deepcopy) continues with its own counts.

    Args:
        path: the JSON Lines file, opened for appending; None: counts only.
        limit: when to stop the run.
    """

    def __init__(self, path: str | Path | None = None, *, limit: SkipLimit | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.limit = limit or SkipLimit()
        counts = dict.fromkeys(("used", "truncated", "refused", "noted", "consecutive"), 0)
        self._counts = SharedDocument({**counts, "reasons": {}, "unread": [], "warned": []})
        self._lines: list[str] = []
        self._is_open = False
        self._had: dict[str, set[str]] = {"unread": set(), "warned": set()}

    def __repr__(self) -> str:
        why = "".join(f", {reason} {count}" for reason, count in self.reasons.most_common())
        where = "" if self.path is None else f"; listed in {str(self.path)!r}"
        cut = f" ({self.truncated} truncated)" if self.truncated else ""
        return f"SkipLog({self.received} received, {self.used} used{cut}, {self.refused} refused{why}{where})"

    @property
    def used(self) -> int:
        """Number of samples that went into a batch."""
        return self._counts.read()["used"]

    @property
    def truncated(self) -> int:
        """Number of used samples that were truncated to `max_length`."""
        return self._counts.read()["truncated"]

    @property
    def reasons(self) -> Counter[str]:
        """Number of refused samples by reason, including samples left out on purpose."""
        return Counter(self._counts.read()["reasons"])

    @property
    def unread(self) -> tuple[str, ...]:
        """Columns of samples that nothing reads, in the order in which they appeared."""
        return tuple(self._counts.read()["unread"])

    @property
    def refused(self) -> int:
        """Number of samples that went into no batch."""
        return self._counts.read()["refused"]

    @property
    def received(self) -> int:
        """Number of samples that were used or refused."""
        counts = self._counts.read()
        return counts["used"] + counts["refused"]

    @contextmanager
    def at_once(self) -> Iterator[dict[str, Any]]:
        """Group all counting and logging in the block: no other process counts in between."""
        with self._counts.changed() as counts:
            is_inner, self._is_open = self._is_open, True
            try:
                yield counts
            finally:
                self._is_open = is_inner
                if not is_inner:
                    self._write_down()

    def use(self, samples: int = 1, *, truncated: int = 0) -> None:
        """Count usable samples, and how many of them were truncated."""
        with self.at_once() as counts:
            counts["used"] += samples
            counts["truncated"] += truncated
            counts["consecutive"] = 0

    def note(self, error: SampleError) -> None:
        """Count and log a sample that is left out on purpose or is about to be raised, regardless of the skip limit."""
        with self.at_once() as counts:
            counts["noted"] += 1
            self._record(error, counts)

    def refuse(self, error: SampleError) -> None:
        """Count and log a bad sample.

        Raises:
            ConfigError: there are more bad samples than the skip limit allows.
        """
        with self.at_once() as counts:
            counts["consecutive"] += 1
            self._record(error, counts)
            self._check_limit(error, counts)

    def name_unread(self, columns: Iterable[str]) -> tuple[str, ...]:
        """Record columns that nothing reads, and return the columns that no process has named yet."""
        return self._first_time("unread", tuple(columns))

    def is_first(self, event: str) -> bool:
        """Return whether no process has warned of this event yet, and record it."""
        return bool(self._first_time("warned", (event,)))

    def _first_time(self, group: str, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names that no process has recorded in this group. Known names are looked up locally."""
        if self._had[group].issuperset(names):
            return ()
        self._had[group].update(names)
        with self.at_once() as counts:
            new = tuple(name for name in names if name not in counts[group])
            counts[group] += new
            return new

    def _record(self, error: SampleError, counts: dict[str, Any]) -> None:
        counts["refused"] += 1
        counts["reasons"][error.reason] = counts["reasons"].get(error.reason, 0) + 1
        if self.path is not None:
            record = {"index": error.index, "id": error.sample_id, "reason": error.reason, "detail": error.detail}
            record |= {"process": os.getpid(), "seen": counts["used"] + counts["refused"]}
            self._lines.append(json.dumps(record) + "\n")

    def _write_down(self) -> None:
        """Append all lines in one write, so that lines of different workers do not mix."""
        lines, self._lines = self._lines, []
        if not lines or self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                file.write("".join(lines).encode())
        except OSError as error:
            raise ConfigError(f"the skip log cannot be written ({error}); give skip_log= another path") from error

    def _check_limit(self, error: SampleError, counts: dict[str, Any]) -> None:
        bad, received = counts["refused"] - counts["noted"], counts["used"] + counts["refused"]
        in_a_row = counts["consecutive"]
        if in_a_row >= self.limit.max_consecutive_bad:
            excess = f"{in_a_row} samples in a row (max_consecutive_bad={self.limit.max_consecutive_bad})"
        elif received >= self.limit.min_samples and bad > self.limit.max_bad_fraction * received:
            limit = f"max_bad_fraction={self.limit.max_bad_fraction:g}"
            excess = f"{bad} of {received} samples ({bad / received:.1%}, {limit})"
        else:
            return
        why = ", ".join(f"{reason} {count}" for reason, count in self.reasons.most_common())
        where = "" if self.path is None else f"; they are listed in {self.path}"
        fault = f"{excess} were refused: {why}{where}. The last was {error}"
        raise ConfigError(f"{fault}. Repair the data, or raise the skip limit") from error
