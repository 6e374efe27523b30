"""The same work on a Ray cluster: measuring and writing as remote tasks, their results in order.

The task is put into Ray's object store once. As many parts wait for a worker as there are cores, twice: a part that is
asked for is started anew by Ray where its worker died. All machines must see the folder that is written to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

import numpy as np

from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError, VlmpackError
from vlmpack.loading import MapStyle
from vlmpack.offline.files import WorkFolder
from vlmpack.offline.measure import Told, measure_lengths
from vlmpack.plan import COLUMNS, LengthTable

Result = TypeVar("Result")

PART = 2048
"""Samples that are measured at a time; a kill costs the work on those that were under way."""


def in_order_on_ray(work: Callable[[int], Result], parts: int) -> Generator[Result]:
    """`work(0)`, `work(1)`, ... up to `parts`, in that order, on the cluster that Ray finds, or on this machine.

    Raises:
        ConfigError: Ray is not installed, or a task was lost for good.
    """
    if not parts:
        return
    with _cluster() as ray:
        shared, task = ray.put(work), ray.remote(_do)
        waiting, begun = deque(), 0
        at_a_time = 2 * max(int(ray.cluster_resources().get("CPU", 1)), 1)
        while begun < parts or waiting:
            while begun < parts and len(waiting) < at_a_time:
                waiting.append(task.remote(shared, begun))
                begun += 1
            yield _result(ray, waiting.popleft())


def measure_on_ray(dataset: MapStyle, collator: VLMCollator, *, folder: WorkFolder, progress: Told) -> LengthTable:
    """`measure_lengths` of a map-style data set, in parts that are kept until all are there."""
    total = len(dataset)
    starts = range(0, total, PART)
    paths = [folder.path / f"lengths-{number:05d}.zip" for number in range(len(starts))]
    missing = [number for number, path in enumerate(paths) if not path.is_file()]
    work = _Measured(dataset=dataset, collator=collator, parts=tuple(missing))
    with closing(in_order_on_ray(work, len(missing))) as tables:
        for number, table in zip(missing, tables, strict=True):
            with folder.whole_file(paths[number]) as temporary:
                table.save(temporary)
            progress(min(starts[number] + PART, total), total)
    return _joined([LengthTable.load(path) for path in paths])


@final
@dataclass(frozen=True, kw_only=True)
class _Measured:
    """Measures parts of a data set."""

    dataset: MapStyle
    collator: VLMCollator
    parts: tuple[int, ...]

    def __call__(self, at: int) -> LengthTable:
        start = self.parts[at] * PART
        stop = min(start + PART, len(self.dataset))
        table = measure_lengths(_Stretch(dataset=self.dataset, places=range(start, stop)), self.collator)
        return _moved(table, start)


@final
@dataclass(frozen=True, kw_only=True)
class _Stretch:
    """Some consecutive samples of a data set."""

    dataset: MapStyle
    places: range

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.places[index]]


def _moved(table: LengthTable, start: int) -> LengthTable:
    """The table of a stretch, by places in the whole data set."""
    columns = {name: table.__dict__[name] for name in COLUMNS}
    refused = tuple(replace(one, index=one.index + start) for one in table.refused)
    return LengthTable(**{**columns, "sample_ids": table.sample_ids + start}, refused=refused)


def _joined(tables: list[LengthTable]) -> LengthTable:
    columns = {name: np.concatenate([table.__dict__[name] for table in tables]) for name in COLUMNS}
    return LengthTable(**columns, refused=tuple(one for table in tables for one in table.refused))


def _do(work: Callable[[int], Any], part: int) -> Any:
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
    """Ray, connected; what was started here is stopped again."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("executor='ray' needs Ray: pip install 'vlmpack[ray]'") from error
    if ray.is_initialized():
        yield ray
        return
    ray.init(include_dashboard=False, log_to_driver=False)
    try:
        yield ray
    finally:
        ray.shutdown()
