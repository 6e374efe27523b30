"""Work on the parts of a data set in other processes, its results in order."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, Literal, TypeVar, final

import torch
from torch.utils.data import DataLoader, Dataset

from vlmpack.errors import ConfigError

Result = TypeVar("Result")
Start = Literal["fork", "spawn", "forkserver"]


def in_order(
    work: Callable[[int], Result], parts: int, *, workers: int, start: Start | None = None
) -> Generator[Result]:
    """`work(0)`, `work(1)`, ... up to `parts`, in that order, each done by one of several processes.

    The processes are those of torch's DataLoader: they have one thread each, are gone when the iterator is closed, and
    hand over what they raise.

    Args:
        work: what to do; it goes to each process once, by fork or by pickle.
        parts: how many parts there are.
        workers: processes; 0: all is done in this one.
        start: how they are started; None: as Python does it here.

    Raises:
        ConfigError: a negative number of workers, something that cannot be sent to them, or one that died.
    """
    if workers < 0:
        raise ConfigError(f"workers={workers}: give a number of processes that is not negative, 0 for this one alone")
    workers = min(workers, parts)
    if not workers:
        yield from map(work, range(parts))
        return
    loader = DataLoader(
        _Parts(work, parts),
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=workers,
        worker_init_fn=_quiet_tokenizer,
        multiprocessing_context=start,
        generator=torch.Generator(),  # else it would draw a number from everybody's
    )
    results = _started(loader)
    try:
        yield from results
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):  # somebody's own error, raised in there and again here
            raise
        raise ConfigError(
            f"a worker process died ({error}); most often the memory is used up: start fewer workers, or none "
            "(workers=0) to see where it fails"
        ) from error
    finally:
        del results  # which ends the processes


def _started(loader: DataLoader) -> Iterable[Any]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error", UserWarning)  # which is told below
            return iter(loader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the data set, or the collator, cannot be sent to a worker process ({error}); define what is in it at "
            "the top of a module (no lambdas, no open files), or use workers=0"
        ) from error


@final
class _Parts(Dataset, Generic[Result]):
    """The results as a data set."""

    def __init__(self, work: Callable[[int], Result], parts: int) -> None:
        self.work, self.parts = work, parts

    def __len__(self) -> int:
        return self.parts

    def __getitem__(self, part: int) -> Result:
        return self.work(part)


def _as_it_is(result: Result) -> Result:
    return result


def _quiet_tokenizer(worker: int) -> None:
    """A tokenizer's own threads do not survive a fork, and would take the cores of the other workers."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
