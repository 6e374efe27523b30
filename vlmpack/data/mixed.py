"""Mix several datasets into one by weight (`mix_datasets`).

    receipts  0 1 2 3 ...   weight 3 ─┐
                                      ├─▶  r3 r0 c1 r2 | r1 r4 c0 r5 | ...   every section has the same mix
    chats     0 1 2 ...     weight 1 ─┘

Sample j of a dataset of weight w gets the time (j + 1/2) / w. The mix is all samples in the order of their times
(Webster's apportionment). Every section of the mix therefore has each dataset's share to within about one sample. Each
dataset is traversed in shuffled order, and each of its samples appears once per pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data import Subset

from vlmpack.data.formats import id_column
from vlmpack.data.open import SampleDataset
from vlmpack.data.readers import MapStyle
from vlmpack.errors import ConfigError, SampleError, check_choice

StoppingStrategy = Literal["first_exhausted", "all_exhausted"]
"""An epoch ends before any sample repeats, or once every sample has appeared (as in `datasets.interleave_datasets`)."""


def mix_datasets(
    datasets: Mapping[str, Any],
    weights: Mapping[str, float] | None = None,
    *,
    num: int | None = None,
    stopping_strategy: StoppingStrategy = "first_exhausted",
    seed: int | None = 0,
) -> MixedDataset:
    """Mix datasets by weight into one map-style dataset, for plans, streams and trainers.

    Args:
        datasets: name -> map-style dataset. The name is the prefix of its samples' ids, and their `channel`.
        weights: name -> share of the samples, above 0, in any unit; None: every sample once.
        num: samples in an epoch; None: decided by `stopping_strategy`.
        stopping_strategy: "first_exhausted": as many samples as possible before any sample repeats. "all_exhausted":
            until every sample has appeared.
        seed: seed for the order of each dataset; None: keep each dataset's own order.

    Raises:
        ConfigError: there is no dataset, a dataset is empty or has no length, or weights, names and `num` do not match.
    """
    if not isinstance(datasets, Mapping) or not datasets:
        raise ConfigError("mix_datasets takes datasets by name: {'receipts': open_dataset(...), 'chats': ...}")
    check_choice("stopping_strategy", stopping_strategy, get_args(StoppingStrategy))
    sizes = {name: _size(name, dataset) for name, dataset in datasets.items()}
    shares = {name: float(size) for name, size in sizes.items()} if weights is None else _shares(weights, sizes)
    if num is None:
        num = _epoch(sizes, shares, stopping_strategy)
    if num < 1:
        raise ConfigError(f"num is {num}, but an epoch has at least one sample")
    return MixedDataset(datasets=tuple(datasets.items()), weights=shares, num=num, seed=seed)


def hold_out(
    dataset: Any, size: float, *, seed: int = 0, usable: Sequence[int] | None = None
) -> tuple[Subset[Any], Subset[Any]]:
    """Hold out random samples to evaluate on.

    Args:
        dataset: map-style dataset.
        size: share of the samples, if it is below 1, rounded up; else their number.
        seed: seed for the choice.
        usable: indices of the samples to choose from, `LengthTable.sample_ids`; None: all.

    Returns:
        The samples to train on, without repeats of the held-out ones in a mix, and the held-out ones.

    Raises:
        ConfigError: `size` is negative, no whole number above 1, or leaves nothing to train on.
    """
    places = np.arange(len(dataset)) if usable is None else np.asarray(usable)
    total = len(places)
    num = min(ceil(size * total), total - 1) if size < 1 else size
    if not 0 <= num < total or num != int(num):
        raise ConfigError(f"{size:g} samples cannot be held out of {total:,}; give a share below 1 or a smaller number")
    num = int(num)
    order = places[torch.randperm(total, generator=torch.Generator().manual_seed(seed)).numpy()]
    train, held_out = order[: total - num], order[total - num :]
    if isinstance(dataset, MixedDataset):
        which, within = dataset._places
        same = which + len(dataset.datasets) * within  # one number per sample, in every pass
        train = places[~np.isin(same[places], same[held_out])]
        if not len(train):
            raise ConfigError(f"the {num:,} held-out samples and their repeats are the whole mix; hold out fewer")
    return Subset(dataset, train.tolist()), Subset(dataset, held_out.tolist())


@dataclass(frozen=True, kw_only=True)
class MixedDataset(SampleDataset):
    """Samples of several datasets, in a fixed order. Cheap to send to a worker process if the datasets are."""

    datasets: tuple[tuple[str, Any], ...]
    """Names and datasets."""
    weights: Mapping[str, float]
    """Share of each dataset, in any unit."""
    num: int
    """Samples in an epoch."""
    seed: int | None
    """Seed for the order of each dataset; None: its own order."""
    epoch: int = 0
    """Index of the epoch. In every dataset, an epoch continues where the previous one stopped."""

    def at_epoch(self, epoch: int) -> MixedDataset:
        """Return another epoch of the mix: the same counts to within one, and new samples as long as there are any.

        Raises:
            ConfigError: the epoch is negative.
        """
        if epoch < 0:
            raise ConfigError(f"epoch is {epoch}; epochs are counted from 0")
        return replace(self, epoch=epoch)

    @property
    def counts(self) -> dict[str, int]:
        """Number of samples of each dataset in this epoch."""
        counts = np.bincount(self._places[0], minlength=len(self.datasets))
        return {name: int(count) for (name, _), count in zip(self.datasets, counts, strict=True)}

    @property
    def passes(self) -> dict[str, float]:
        """Number of passes over each dataset in this epoch: its samples in the epoch divided by its size."""
        return {name: self.counts[name] / len(dataset) for name, dataset in self.datasets}

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """For each sample, its dataset and its index in that dataset, int64 [num] each."""
        weights = np.asarray([self.weights[name] for name, _ in self.datasets])
        which, first = _order(weights, self.epoch * self.num, (self.epoch + 1) * self.num)
        places = np.empty(self.num, np.int64)
        for at, (_, dataset) in enumerate(self.datasets):
            mine = np.flatnonzero(which == at)
            places[mine] = self._passed(at, len(dataset), int(first[at]), len(mine))
        return which, places

    def _passed(self, at: int, size: int, start: int, count: int) -> np.ndarray:
        """Return the indices of this dataset's next `count` samples, from its `start`-th on, int64 [count]."""
        numbers = np.arange(start, start + count)
        places = numbers % size
        if self.seed is None:
            return places
        for turn in np.unique(numbers // size).tolist():
            here = numbers // size == turn
            places[here] = np.random.default_rng([self.seed, at, turn]).permutation(size)[places[here]]
        return places

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        """Return a sample. Its `channel` is its dataset's name, which is also the prefix of its id (`receipts/17`).

        Raises:
            IndexError: there is no such sample.
            SampleError: the sample cannot be read.
        """
        if not -self.num <= index < self.num:
            raise IndexError(f"sample {index} of {self.num} in the mix")
        which, place = (int(array[index]) for array in self._places)
        name, dataset = self.datasets[which]
        try:
            sample = dataset[place]
        except SampleError as error:
            detail, sample_id = f"sample {place} of {name}: {error.detail}", _id_in(name, error.sample_id, place)
            raise SampleError(detail, index=index % self.num, reason=error.reason, sample_id=sample_id) from error
        if not isinstance(sample, Mapping):
            return sample
        key = id_column(sample) or "id"
        return {**sample, key: _id_in(name, sample.get(key), place), "channel": name}

    def __repr__(self) -> str:
        passes = self.passes
        parts = (f"{count:,} of {name} ({passes[name]:.2f} passes)" for name, count in self.counts.items())
        return f"MixedDataset({self.num:,} samples: {', '.join(parts)})"


def _id_in(name: str, sample_id: Any, place: int) -> str:
    """Return the id in the mix of a sample with this id or place in the dataset `name`."""
    return f"{name}/{place if sample_id is None else sample_id}"


def _size(name: str, dataset: Any) -> int:
    if isinstance(dataset, str) or not isinstance(dataset, MapStyle) or not len(dataset):
        fault = f"the dataset {name!r} of the mix is a {type(dataset).__name__} without samples"
        raise ConfigError(f"{fault}; give a map-style dataset, such as open_dataset(path), or a list")
    return len(dataset)


def _shares(weights: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
    if set(weights) != set(sizes):
        raise ConfigError(f"weights are of {', '.join(weights)}, but the datasets are {', '.join(sizes)}")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ConfigError(f"the weight of {name!r} is {weight!r}; it must be above 0 (or leave the dataset out)")
    return {name: float(weights[name]) for name in sizes}


def _order(weights: np.ndarray, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute samples `start` to `stop` of the endless mix.

    Returns:
        The dataset of each sample, int64 [stop - start], and the number of earlier samples of each dataset, int64 [K].
    """
    shares = weights / weights.sum()
    # A dataset is never a whole number of samples per dataset behind its share, so all of these come before `start`.
    before = np.maximum((shares * start).astype(np.int64) - len(weights), 0)
    ahead = stop - int(before.sum())
    most = np.ceil(shares * ahead).astype(np.int64) + 2 * len(weights)
    which = np.repeat(np.arange(len(weights)), most)
    times = np.concatenate([(b + np.arange(m) + 0.5) / s for b, m, s in zip(before, most, shares, strict=True)])
    which = which[np.argsort(times, kind="stable")[:ahead]]
    passed, which = np.split(which, [start - int(before.sum())])
    return which, before + np.bincount(passed, minlength=len(weights))


def _epoch(sizes: Mapping[str, int], shares: Mapping[str, float], strategy: StoppingStrategy) -> int:
    """Count the samples until the first dataset would repeat, or until the last one has been passed."""
    weights = np.asarray([shares[name] for name in sizes])
    limits = np.asarray(list(sizes.values()))
    needed = limits / (weights / weights.sum())
    most = int(needed.min() if strategy == "first_exhausted" else needed.max()) + len(sizes) + 1
    counts = np.cumsum(_order(weights, 0, most)[0][:, None] == np.arange(len(sizes)), axis=0)
    if strategy == "first_exhausted":
        return int(np.flatnonzero((counts <= limits).all(axis=1))[-1]) + 1
    return int(np.flatnonzero((counts >= limits).all(axis=1))[0]) + 1
