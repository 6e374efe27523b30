"""Stores whose writers are killed, started by test_kill.py: python kills.py FOLDER.

Every run is a process of its own, forked from one that has made an unbroken store. It counts the rows that
it writes and the names that it gives to files and, where told so, kills itself by SIGKILL before the n-th of them.
FOLDER/seen.json has what each killed run left and what the next one made of it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pyarrow.parquet as pq
from chats import chat, picture
from store.stores import CAPACITY, digests, packing, texts

from vlmpack.store import StoreSettings, write_rows

ORIGINALS: dict[str, Callable] = {}


class Counting:
    """A data set that counts how often each sample is read, and can be slow."""

    def __init__(self, samples: list[dict], delay: float = 0.0) -> None:
        self.samples, self.delay, self.reads = samples, delay, Counter()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict:
        time.sleep(self.delay)
        self.reads[index] += 1
        return self.samples[index]


def data(delay: float = 0.0) -> Counting:
    """Texts and images, in three files of two rows."""
    images = [chat(f"{n}?", "yes", picture(64, 72, seed=n), id=f"image-{n}") for n in range(4)]
    return Counting([*images, *texts(9)], delay)


def write(out: Path, *, kill_at: int | None = None, workers: int = 0, delay: float = 0.0) -> None:
    """Write the store; `kill_at` counts from 0."""
    events = count_events(kill_at)
    samples = data(delay)
    write_rows(samples, out, packing(), StoreSettings(capacity=CAPACITY, shard_rows=2, seed=1), workers=workers)
    report = {"events": events, "reads": dict(samples.reads)}
    out.with_suffix(".json").write_text(json.dumps(report))


def count_events(kill_at: int | None) -> list[str]:
    """What happens to files from now on, in a list that grows."""
    events: list[str] = []

    def counted(owner: Any, name: str) -> None:
        original = ORIGINALS.setdefault(name, vars(owner)[name])

        def first(*args: Any, **kwargs: Any) -> Any:
            if len(events) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            events.append(name)
            return original(*args, **kwargs)

        setattr(owner, name, first)

    counted(Path, "replace")
    counted(pq.ParquetWriter, "write_table")
    return events


def in_a_fork(run: Callable[[], None]) -> int:
    """Start a run; its process id."""
    child = os.fork()
    if not child:
        try:
            run()
        finally:
            os._exit(0)
    return child


def ended(child: int) -> int:
    """Wait for a run; its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def finished(out: Path) -> dict[str, str]:
    """The files that have their final names."""
    return {name: digest for name, digest in digests(out).items() if not name.startswith(".work")}


def killed_at_every_event(folder: Path) -> list[dict[str, Any]]:
    """One store for every row and every name."""
    events = json.loads((folder / "whole.json").read_text())["events"]
    return [{"before": events[at], **killed_at(folder / f"killed-{at}", at)} for at in range(len(events))]


def killed_at(out: Path, at: int) -> dict[str, Any]:
    status = ended(in_a_fork(lambda: write(out, kill_at=at)))
    left = finished(out)
    again = ended(in_a_fork(lambda: write(out)))
    report = json.loads(out.with_suffix(".json").read_text())
    rows = report["events"].count("write_table")
    return {
        "status": status,
        "left": left,
        "again": again,
        "files": digests(out),
        "reads": report["reads"],
        "rows": rows,
    }


def killed_with_workers(folder: Path) -> dict[str, Any]:
    """A writer with two workers is killed from outside when its first file is there; the next one starts at once."""
    out = folder / "workers"
    child = in_a_fork(lambda: write(out, workers=2, delay=0.02))
    while not list(out.glob("rows-*")):
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    status, left = ended(child), finished(out)
    again = ended(in_a_fork(lambda: write(out, workers=2)))
    return {"status": status, "left": left, "again": again, "files": digests(out)}


def main(folder: Path) -> None:
    write(folder / "whole")
    seen: dict[str, Any] = {"whole": digests(folder / "whole"), "killed": killed_at_every_event(folder)}
    seen["workers"] = killed_with_workers(folder)
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
