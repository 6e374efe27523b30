"""Run work on the parts of a data set and yield the results in order: in worker processes, or on Ray Data."""

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
Start = Literal["fork", "spawn", "forkserver"]
Executor = Literal["local", "ray"]
MOST_BLOCKS = 1000
"""Tasks of Ray that the parts are divided among at most."""


def in_order(
    work: Callable[[int], Result],
    parts: int,
    *,
    workers: int = 0,
    executor: Executor = "local",
    start: Start | None = None,
) -> Generator[Result]:
    """Yield `work(0)`, `work(1)`, ... up to `parts`, in that order, wherever each of them is computed.

    Args:
        work: the function; it goes to each process once, by fork or by pickle.
        parts: how many parts there are.
        workers: processes of a torch DataLoader, with one thread each; 0: everything runs in this one.
        executor: "ray" computes the parts as tasks of Ray Data, on the cluster that is connected or that Ray finds, and
            else on a local one; `workers` has no meaning then.
        start: how processes are started; None: Python's default on this system.

    Raises:
        ConfigError: no such executor, a negative number of workers, work that cannot be sent to them, a worker that
            died, or Ray is not installed or lost a task for good.
    """
    check_choice("executor", executor, ("local", "ray"))
    check_whole_number("workers", workers, at_least=0, remedy="0: this process alone")
    if executor == "ray":
        yield from _on_ray(work, parts)
    elif workers and parts:
        yield from _in_processes(work, parts, min(workers, parts), start)
    else:
        yield from map(work, range(parts))


def _in_processes(work: Callable[[int], Any], parts: int, workers: int, start: Start | None) -> Generator[Any]:
    loader = DataLoader(
        cast(Dataset, range(parts)),
        batch_size=None,
        collate_fn=cast(Any, work),
        num_workers=workers,
        worker_init_fn=_disable_tokenizer_threads,
        multiprocessing_context=start,
        generator=torch.Generator(),  # else the loader would draw from the global generator
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error", UserWarning)  # the error below has the remedy
            results: Any = iter(loader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the data set, or the collator, cannot be sent to a worker process ({error}); define what is in it at "
            "the top of a module (no lambdas, no open files), or use workers=0"
        ) from error
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


def _disable_tokenizer_threads(worker: int) -> None:
    """Keep the tokenizer to one thread: its threads do not survive a fork, and take cores from other workers."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _on_ray(work: Callable[[int], Any], parts: int) -> Generator[Any]:
    """Compute the parts as tasks of Ray Data, which restarts those whose worker died; a Ray that was started here is
    stopped again."""
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
    except ray.exceptions.RayTaskError:  # an error of the work itself
        raise
    except ray.exceptions.RayError as error:
        raise ConfigError(f"Ray lost a task ({error}); run it again: what is finished is kept") from error
    finally:
        if is_ours:
            ray.shutdown()


def _pickled(work: Callable[[int], Any], row: dict[str, int]) -> dict[str, Any]:
    """Return the result of a part, or the refusal of one: Ray would raise that as an error of its own."""
    try:
        result: Any = work(int(row["id"]))
    except VlmpackError as error:
        result = error
    return {"result": pickle.dumps(result)}
