"""Run a function on the parts of a data set and yield results in order: in worker processes, or on Ray Data."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset

from vlmpack.errors import ConfigError, VlmpackError, check_choice, check_extra, check_whole_number

Result = TypeVar("Result")
Executor = Literal["local", "ray"]
MOST_BLOCKS = 1000
"""Maximum number of Ray tasks that the parts are divided into."""


def in_order(
    work: Callable[[int], Result],
    parts: int,
    *,
    workers: int = 0,
    executor: Executor = "local",
) -> Generator[Result]:
    """Yield `work(0)`, `work(1)`, ..., `work(parts - 1)` in that order, wherever each of them is computed.

    Args:
        work: the function; it is sent to each process once, by fork or by pickle.
        parts: number of parts.
        workers: number of torch DataLoader processes, with one thread each; 0: run everything in this process.
        executor: "ray" computes the parts as Ray Data tasks, on the connected cluster, a cluster that Ray finds, or a
            local one, and ignores `workers`.

    Raises:
        ConfigError: the executor is unknown, `workers` is negative, the function cannot be sent to a worker, a worker
            died, or Ray is not installed or lost a task for good.
    """
    check_choice("executor", executor, ("local", "ray"))
    check_whole_number("workers", workers, at_least=0, remedy="0: this process alone")
    if executor == "ray":
        yield from _on_ray(work, parts)
    elif workers and parts:
        yield from _in_processes(work, parts, min(workers, parts))
    else:
        yield from map(work, range(parts))


def _in_processes(work: Callable[[int], Any], parts: int, workers: int) -> Generator[Any]:
    loader = DataLoader(
        cast(Dataset, range(parts)),
        batch_size=None,
        collate_fn=cast(Any, work),
        num_workers=workers,
        worker_init_fn=_disable_tokenizer_threads,
        generator=torch.Generator(),  # otherwise the loader would draw from the global generator
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error", UserWarning)  # our error below has the remedy
            results: Any = iter(loader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the data set, or the collator, cannot be sent to a worker process ({error}); define what is in it at "
            "the top of a module (no lambdas, no open files), or use workers=0"
        ) from error
    try:
        yield from results
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):  # an error of the function, raised again by the loader
            raise
        raise ConfigError(
            f"a worker process died ({error}); most often the memory is used up: start fewer workers, or none "
            "(workers=0) to see where it fails"
        ) from error
    finally:
        results._shutdown_workers()  # an error's traceback keeps `results`; left to GC, shutdown takes 5 s per process


def _disable_tokenizer_threads(worker: int) -> None:
    """Disable tokenizer threads: they do not survive a fork, and take cores from other workers."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _on_ray(work: Callable[[int], Any], parts: int) -> Generator[Any]:
    """Compute the parts as Ray Data tasks, which Ray restarts if their worker dies. Stops Ray if started here."""
    check_extra("ray", "ray", needed_by="executor='ray'")
    if not parts:
        return
    import ray
    import ray.data
    import ray.exceptions

    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(include_dashboard=False, log_to_driver=False)
    try:
        blocks = ray.data.range(parts, override_num_blocks=min(parts, MOST_BLOCKS))
        results = blocks.map(partial(_pickled, work))
        results.context.execution_options.preserve_order = True
        results.context.enable_progress_bars = False
        for row in results.iter_rows():
            result = pickle.loads(row["result"])
            if isinstance(result, VlmpackError):
                raise result
            yield result
    except ray.exceptions.RayTaskError:  # an error of the function
        raise
    except ray.exceptions.RayError as error:
        raise ConfigError(f"Ray lost a task ({error}); run it again: what is finished is kept") from error
    finally:
        if is_ours:
            ray.shutdown()


def _pickled(work: Callable[[int], Any], row: dict[str, int]) -> dict[str, Any]:
    """Return a part's result, or its VlmpackError, which Ray would wrap in an error of its own if it were raised."""
    try:
        result: Any = work(int(row["id"]))
    except VlmpackError as error:
        result = error
    return {"result": pickle.dumps(result)}
