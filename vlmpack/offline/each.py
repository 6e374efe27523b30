"""One task over many jobs, in several processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

from vlmpack.errors import ConfigError

Job = TypeVar("Job")
Result = TypeVar("Result")

_task: list[Callable[[Any], Any]] = []
"""What this worker does: it is sent once, and jobs are small."""


def each(task: Callable[[Job], Result], jobs: Sequence[Job], *, workers: int) -> Iterator[Result]:
    """The results of all jobs, in any order.

    Args:
        task: is pickled once for every worker.
        jobs: what it is called with.
        workers: processes; 0: this one alone.

    Raises:
        ConfigError: a worker died.
    """
    if not workers or not jobs:
        yield from map(task, jobs)
        return
    pool = ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn"), _start, (task,))
    try:
        yield from _finished(pool, jobs)
    except BrokenProcessPool as error:
        raise ConfigError(
            "a worker died: killed for its memory, most likely, or the program that started it lacks "
            "`if __name__ == '__main__'`. Take fewer workers and run it again: what is finished is kept"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _finished(pool: ProcessPoolExecutor, jobs: Iterable[Any]) -> Iterator[Any]:
    for future in as_completed([pool.submit(_do, job) for job in jobs]):
        yield future.result()


def _start(task: Callable[[Any], Any]) -> None:
    """In a new worker."""
    import torch

    torch.set_num_threads(1)
    Thread(target=_die_with_parent, daemon=True).start()
    _task[:] = [task]


def _do(job: Any) -> Any:
    return _task[0](job)


def _die_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = parent_process()
    assert parent is not None, "a worker has a parent"
    connection.wait([parent.sentinel])
    os._exit(1)
