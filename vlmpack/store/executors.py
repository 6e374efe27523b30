"""Run work on the parts of a data set and yield the results in order: in worker processes, or as Ray tasks."""

from __future__ import annotations

import os
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset

from vlmpack.errors import ConfigError, VlmpackError, check_extra, check_whole_number

Result = TypeVar("Result")
Start = Literal["fork", "spawn", "forkserver"]
Executor = Literal["local", "ray"]
EXECUTORS: tuple[Executor, ...] = ("local", "ray")
InOrder = Callable[[Callable[[int], Any], int], Generator[Any]]
"""(work, parts) to the results of `work(0)`, `work(1)`, ... wherever they are computed."""


def executor_of(name: Executor, workers: int) -> InOrder:
    """Return the function that runs parts on an executor.

    Raises:
        ConfigError: there is no executor of this name.
    """
    if name not in EXECUTORS:
        raise ConfigError(f"executor={name!r} does not exist; choose one of {', '.join(EXECUTORS)}")
    return partial(in_order, workers=workers) if name == "local" else in_order_on_ray


# ---------------------------------------------------------------------- worker processes


def in_order(
    work: Callable[[int], Result], parts: int, *, workers: int, start: Start | None = None
) -> Generator[Result]:
    """Yield `work(0)`, `work(1)`, ... up to `parts`, in that order, each computed by one of several processes.

    The processes are those of torch's DataLoader: they have one thread each, end when the iterator is closed, and hand
    over what they raise.

    Args:
        work: the function; it goes to each process once, by fork or by pickle.
        parts: how many parts there are.
        workers: processes; 0: everything runs in this one.
        start: how they are started; None: Python's default on this system.

    Raises:
        ConfigError: a negative number of workers, something that cannot be sent to them, or one that died.
    """
    check_whole_number("workers", workers, at_least=0, remedy="0: this process alone")
    workers = min(workers, parts)
    if not workers:
        yield from map(work, range(parts))
        return
    loader = DataLoader(
        cast(Dataset, range(parts)),
        batch_size=None,
        collate_fn=cast(Any, work),
        num_workers=workers,
        worker_init_fn=_disable_tokenizer_threads,
        multiprocessing_context=start,
        generator=torch.Generator(),  # else the loader would draw from the global generator
    )
    results = _started(loader)
    try:
        yield from results
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):  # an error of the work itself, raised again by the loader
            raise
        raise ConfigError(
            f"a worker process died ({error}); most often the memory is used up: start fewer workers, or none "
            "(workers=0) to see where it fails"
        ) from error
    finally:
        results._shutdown_workers()  # an error's traceback keeps `results`; as garbage it takes five seconds a process


def _started(loader: DataLoader) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error", UserWarning)  # the error below has the remedy
            return iter(loader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the data set, or the collator, cannot be sent to a worker process ({error}); define what is in it at "
            "the top of a module (no lambdas, no open files), or use workers=0"
        ) from error


def _disable_tokenizer_threads(worker: int) -> None:
    """Keep the tokenizer to one thread: its threads do not survive a fork, and take cores from other workers."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


# ---------------------------------------------------------------------- Ray


def in_order_on_ray(work: Callable[[int], Result], parts: int) -> Generator[Result]:
    """Yield `work(0)`, `work(1)`, ... in that order, each computed as a Ray task.

    Tasks go to the cluster that is connected or that Ray finds, and else to a local one. The work is put into Ray's
    object store once. Twice as many tasks as there are cores are submitted at a time; Ray restarts those whose worker
    died.

    Raises:
        ConfigError: Ray is not installed, or a task was lost for good.
    """
    if not parts:
        return
    with _cluster() as ray:
        shared, task = ray.put(work), ray.remote(_call)
        pending, at_a_time = deque(), 2 * max(int(ray.cluster_resources().get("CPU", 1)), 1)
        for part in range(parts):
            pending.append(task.remote(shared, part))
            if len(pending) == at_a_time:
                yield _result(ray, pending.popleft())
        while pending:
            yield _result(ray, pending.popleft())


def _call(work: Callable[[int], Any], part: int) -> Any:
    return work(part)


def _result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, VlmpackError):
            raise error.cause from error
        raise
    except ray.exceptions.RayError as error:
        raise ConfigError(f"Ray lost a task ({error}); run it again: what is finished is kept") from error


@contextmanager
def _cluster() -> Iterator[Any]:
    """Connect Ray; a cluster that was started here is stopped again."""
    check_extra("ray", "ray", needed_by="executor='ray'")
    import ray

    if ray.is_initialized():
        yield ray
        return
    ray.init(include_dashboard=False, log_to_driver=False)
    try:
        yield ray
    finally:
        ray.shutdown()
