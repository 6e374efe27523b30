"""Time several callables alternately in one process: a slow minute of the machine then hits all of them alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Literal, final

import torch

Clock = Literal["wall", "cpu"]
CLOCKS: tuple[Clock, ...] = ("wall", "cpu")
LEAST_SECONDS = 0.02
"""A callable faster than this is called several times for one measurement."""
FIRST = 50
"""A first call of up to so many times `LEAST_SECONDS` may be slow because libraries load: the second one counts."""


@final
@dataclass(frozen=True, kw_only=True)
class Spread:
    """A median and its quartiles."""

    median: float
    """The middle value."""
    low: float
    """The lower quartile."""
    high: float
    """The upper quartile."""
    rounds: int
    """Number of values."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        quarters = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(median=median(values), low=quarters[0], high=quarters[2], rounds=len(values))

    def scaled(self, factor: float) -> Spread:
        """The same in another unit."""
        return Spread(median=self.median * factor, low=self.low * factor, high=self.high * factor, rounds=self.rounds)

    def rate(self, count: float) -> Spread:
        """Convert seconds for `count` things into things a second."""
        return Spread(median=count / self.median, low=count / self.high, high=count / self.low, rounds=self.rounds)


@final
@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds a call, one entry a round, for each callable and clock."""

    seconds: Mapping[Clock, Mapping[str, tuple[float, ...]]]
    """clock -> name -> seconds of one call in each round."""

    def of(self, name: str, clock: Clock) -> Spread:
        """Seconds of one call."""
        return Spread.of(self.seconds[clock][name])

    def ratio(self, name: str, base: str, clock: Clock) -> Spread:
        """The time of `name` over that of `base`, each round compared within itself."""
        numerators, denominators = self.seconds[clock][name], self.seconds[clock][base]
        return Spread.of(tuple(a / b for a, b in zip(numerators, denominators, strict=True)))


def alternate(
    callables: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    least_rounds: int = 3,
    most_rounds: int = 200,
    device: str = "cpu",
) -> Timings:
    """Call each of `callables` once a round, in turn, and start each round one further along.

    Fast callables are called once unmeasured in their turn and then several times for one measurement, so that they
    meet warm memory. Garbage is collected between measurements and never during one.

    Args:
        callables: what to time, by name.
        seconds: stop after the round in which this much time has passed.
        least_rounds: measure this many rounds in any case.
        most_rounds: and never more than this.
        device: wait for this device before a clock is read.
    """
    names = list(callables)
    seconds_by_clock: dict[Clock, dict[str, list[float]]] = {clock: {name: [] for name in names} for clock in CLOCKS}
    with _quiet_garbage_collector():
        calls = {name: _calls_for(function, device) for name, function in callables.items()}
        started = time.perf_counter()
        for turn in range(most_rounds):
            if turn >= least_rounds and time.perf_counter() - started > seconds:
                break
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                measured = _measure(callables[name], calls[name], device)
                for clock in CLOCKS:
                    seconds_by_clock[clock][name].append(measured[clock])
    return Timings(
        seconds={clock: {name: tuple(values) for name, values in by.items()} for clock, by in seconds_by_clock.items()}
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Measure with one thread, as in a DataLoader's worker."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _calls_for(function: Callable[[], object], device: str) -> int:
    """Warm up, and return the number of calls of one measurement."""
    first = _measure(function, 1, device)["wall"]
    once = first if first > FIRST * LEAST_SECONDS else _measure(function, 1, device)["wall"]
    return max(1, round(LEAST_SECONDS / max(once, 1e-7)))


def _measure(function: Callable[[], object], calls: int, device: str) -> dict[Clock, float]:
    """Seconds of one call by each clock."""
    gc.collect()
    if calls > 1:  # a slow callable warms itself
        function()
    _wait(device)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        function()
    _wait(device)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall": wall / calls, "cpu": cpu / calls}


_old_is_left_out = False
"""True while collections walk through new objects only."""


@contextmanager
def new_garbage_only() -> Iterator[None]:
    """Collections within look at objects made within: walking through all of transformers' takes a tenth of a second,
    hundreds of times, and empties the caches."""
    global _old_is_left_out
    if _old_is_left_out:  # freezing again would keep cycles made since, and the tensors in them
        yield
        return
    gc.collect()
    gc.freeze()
    _old_is_left_out = True
    try:
        yield
    finally:
        _old_is_left_out = False
        gc.unfreeze()


@contextmanager
def _quiet_garbage_collector() -> Iterator[None]:
    """Collect garbage between measurements only, and walk through new objects only."""
    was_on = gc.isenabled()
    with new_garbage_only():
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
