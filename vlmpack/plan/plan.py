"""The plan of an epoch: which samples share a row.

Lengths [5, 3, 4, 2, 6] at a capacity of 10, in two rows:

    row 0     0 0 0 0 0 1 1 1 3 3      samples [0, 1, 3]
    row 1     2 2 2 2 4 4 4 4 4 4      samples [2, 4]

    sample_ids  [0, 1, 3, 2, 4]        row after row
    bounds      [0, 3, 5]              where each row starts in `sample_ids`

N samples, D of them dropped, in G rows.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np

from vlmpack.errors import ConfigError, LayoutError, VlmpackError
from vlmpack.files import atomic_file, unreadable, writing
from vlmpack.plan.lengths import Budget, Overlength, divided_up
from vlmpack.plan.prefix_groups import Needs, PrefixGroups, attended_pairs

NO_SAMPLES = np.zeros(0, np.int64)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Rows of sample ids.

    A sample id is an index into `lengths`; for a plan made from a length table, it is the index in the data set.
    Within a row, samples keep the order in which they were planned: as given, or shuffled by the seed.
    """

    sample_ids: np.ndarray
    """int64 [N - D]: the samples of all rows, one row after the other."""
    bounds: np.ndarray
    """int64 [G + 1]: where each row starts in `sample_ids`, and where the last row ends."""
    lengths: np.ndarray
    """int64 [N]: tokens of every sample to plan; 0 for samples that the length table refused."""
    dropped: np.ndarray
    """int64 [D], ascending: samples in no row, because they are too large for a row or were refused earlier."""
    capacity: int
    """Maximum tokens of a row."""
    budgets: tuple[Budget, ...] = ()
    """Further limits of a row: patches, images."""
    overlength: Overlength = "error"
    """What happened to samples that are too large for a row: refused, dropped, or each placed in its own row."""
    whole_groups: bool = False
    """Whether groups that are too large for a row have their own row too, if their prefix is long."""
    strategy: str = "exact_fill"
    """Bin packing strategy, see `plan_bins`."""
    seed: int | None = None
    """Seed of the shuffle; None: samples and rows are in the order given."""
    groups: PrefixGroups | None = None
    """Groups of samples that share a prefix, which a row computes once; None: nothing is shared."""

    @classmethod
    def from_assignment(cls, bin_of: np.ndarray, order: np.ndarray | None = None, **fields: Any) -> Plan:
        """Make a plan from the bin of each sample.

        Rows are ordered by their first samples.

        Args:
            bin_of: int64 [N]: bins 0 to G - 1, none of them empty; -1 for a dropped sample.
            order: int64 [N]: a permutation that gives the order of samples within rows; None: as given.
            fields: the other fields of the plan.
        """
        order = np.arange(len(bin_of)) if order is None else order
        placed = order[bin_of[order] >= 0]
        at, bounds = _rows(bin_of[placed])
        return cls(sample_ids=placed[at], bounds=bounds, dropped=np.flatnonzero(bin_of < 0), **fields)

    def rearranged(self, rows: np.ndarray) -> Plan:
        """Return this plan with its rows in another order.

        Args:
            rows: int64 [G]: a permutation of the rows.
        """
        sizes = np.diff(self.bounds)[rows]
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        at = np.arange(len(self.sample_ids)) + np.repeat(self.bounds[rows] - bounds[:-1], sizes)
        return replace(self, sample_ids=self.sample_ids[at], bounds=bounds)

    def renamed(self, stand_in: np.ndarray) -> Plan:
        """Return this plan with each sample replaced by another one of the same length and costs.

        Args:
            stand_in: int64 [N]: a permutation; entry i is the sample that replaces sample i.
        """
        return replace(self, sample_ids=stand_in[self.sample_ids])

    def excess(self, sample: int) -> str:
        """Say by what a sample exceeds a row on its own; "": by nothing."""
        needs = zip(self.needs.names, self.needs.of_samples[sample], self.needs.limits, strict=True)
        return ", ".join(f"{cost} {name} (a row holds {most})" for name, cost, most in needs if cost > most)

    def accumulation(self, samples_per_update: int, *, ranks: int = 1) -> int:
        """Return the rows that each rank accumulates for at least this many samples in an optimizer step, on average.

        Raises:
            ConfigError: the plan has fewer samples.
        """
        if samples_per_update > (samples := len(self.sample_ids)):
            raise ConfigError(f"samples_per_update={samples_per_update}: there are only {samples:,} samples")
        return divided_up(samples_per_update * len(self), samples * ranks)

    # ------------------------------------------------------------------ rows

    def __len__(self) -> int:
        """Return the number of rows, G."""
        return len(self.bounds) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """Return the samples of one row, int64; negative indices count from the end.

        Raises:
            IndexError: there is no such row.
        """
        at = range(len(self))[row]
        return self.sample_ids[self.bounds[at] : self.bounds[at + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    @cached_property
    def bins(self) -> tuple[tuple[int, ...], ...]:
        """The samples of each row, as Python ints."""
        ids, bounds = self.sample_ids.tolist(), self.bounds.tolist()
        return tuple(tuple(ids[a:b]) for a, b in pairwise(bounds))

    def sums(self, values: np.ndarray, of_groups: np.ndarray | None = None) -> np.ndarray:
        """Sum a per-sample quantity over the samples of each row, [G].

        Args:
            values: [N]: the quantity of each sample.
            of_groups: [K]: the quantity of each group's prefix, counted from the start of a sample. The row then counts
                a shared prefix once instead of once per sample. None: every sample counts in full.

        Raises:
            ConfigError: `of_groups` does not have one entry per group of the plan.
        """
        groups = self.groups
        if of_groups is not None and len(of_groups) != (count := 0 if groups is None else len(groups)):
            raise ConfigError(
                f"{len(of_groups)} numbers of groups, but the plan has {count} groups; give one per group"
            )
        if groups is not None and of_groups is not None:
            row_of = np.repeat(np.arange(len(self)), np.diff(self.bounds))
            return groups.row_sums(self.sample_ids, row_of, values, of_groups)
        return np.add.reduceat(values[self.sample_ids], self.bounds[:-1]) if len(self) else values[:0]

    @cached_property
    def needs(self) -> Needs:
        """What samples and prefixes need of a row: tokens, and the cost of each budget."""
        return Needs.of(self.lengths, self.capacity, self.budgets, self.groups)

    @property
    def tokens(self) -> np.ndarray:
        """int64 [G]: tokens of each row, with every sample counted in full."""
        return self.sums(self.lengths)

    @cached_property
    def tree_tokens(self) -> np.ndarray:
        """int64 [G]: tokens that each row computes, with every shared prefix counted once."""
        return self.sums(self.lengths, None if self.groups is None else self.groups.tokens)

    @property
    def attended_pairs(self) -> np.ndarray:
        """int64 [G]: query-key pairs that each row computes, with every shared prefix counted once."""
        of_groups = None if self.groups is None else attended_pairs(self.groups.tokens)
        return self.sums(attended_pairs(self.lengths), of_groups)

    # ------------------------------------------------------------------ how good it is

    @property
    def fill(self) -> float:
        """Computed tokens over row capacity, 0 to 1; a row above the capacity counts as full."""
        tokens = self.tree_tokens
        return float(tokens.sum() / np.maximum(tokens, self.capacity).sum()) if len(self) else 0.0

    @property
    def waste(self) -> int:
        """Unused tokens of row capacity."""
        return int(np.maximum(self.capacity - self.tree_tokens, 0).sum())

    @cached_property
    def lower_bound(self) -> int:
        """Number of rows that these samples need at least, however they are placed and groups are split."""
        kept = np.ones(len(self.lengths), bool)
        kept[self.dropped] = False
        alone = self.needs.too_large & kept
        return int(alone.sum()) + self.needs.least_rows(np.flatnonzero(kept & ~alone))

    def check(self) -> Plan:
        """Check every row, and return the plan.

        Raises:
            LayoutError: a sample is missing, planned twice or unknown; a row is empty or exceeds a limit.
        """
        times = Counter([*self.sample_ids.tolist(), *self.dropped.tolist()])
        if wrong := sorted(times.keys() ^ set(range(len(self.lengths)))) or [at for at in times if times[at] > 1]:
            raise LayoutError(f"sample {wrong[0]} is planned {times[wrong[0]]} times; plan again")
        sizes = np.diff(self.bounds)
        if self.bounds[:1].tolist() != [0] or self.bounds[-1] != len(self.sample_ids) or (sizes < 1).any():
            raise LayoutError(f"rows {self.bounds[:9].tolist()} must rise from 0 to {len(self.sample_ids)}; plan again")
        is_limited = (sizes > 1) & (not self.whole_groups) | (sizes == 1) & (self.overlength != "own_row")
        needs = self.needs
        held = needs.sums(self.sample_ids, np.repeat(np.arange(len(self)), sizes))
        if len(over := np.argwhere((held > needs.limits) & is_limited[:, None])):
            row, at = over[0]
            raise LayoutError(
                f"row {row} holds {held[row, at]} {needs.names[at]}, and at most {needs.limits[at]} may be; plan again"
            )
        return self

    # ------------------------------------------------------------------ on disk

    @property
    def manifest(self) -> dict[str, Any]:
        """Summary of the plan without its rows, ready for JSON."""
        segments, tree_tokens = np.diff(self.bounds), self.tree_tokens
        trees = {"tree_tokens": int(tree_tokens.sum()), "longest_tree": int(tree_tokens.max(initial=0))}
        trees |= {"whole_groups": True} if self.whole_groups else {}
        return {
            "rows": len(self),
            "samples": len(self.lengths),
            "dropped": len(self.dropped),
            "tokens": int(self.tokens.sum()),
            "capacity": self.capacity,
            "budgets": {budget.name: budget.limit for budget in self.budgets},
            "fill": round(self.fill, 6),
            "lower_bound": self.lower_bound,
            "longest_row": int(self.tokens.max(initial=0)),
            "longest_segment": int(self.lengths[self.sample_ids].max(initial=0)),
            "most_segments": int(segments.max(initial=0)),
            "strategy": self.strategy,
            "overlength": self.overlength,
            "seed": self.seed,
            **({} if self.groups is None else trees),
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the rows, lengths and settings: equal plans have equal digests, on every machine."""
        return digest_of_archive(self.manifest, self._arrays())

    def save(self, path: str | Path) -> None:
        """Write the plan to one file, atomically: a crash never leaves a partial file.

        The file is a zip of `manifest.json`, for people and other programs, and one `.npy` per array. The same plan
        always gives the same bytes.
        """
        write_archive(path, self.manifest, self._arrays(), kind=FORMAT)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            ConfigError: there is no such file, it is not a plan, or it has another version.
            LayoutError: the file was changed after it was written.
        """
        with read_archive(path, kind=FORMAT) as (manifest, arrays):
            return cls(
                **{name: arrays[name] for name in ("sample_ids", "bounds", "lengths", "dropped")},
                **{name: manifest[name] for name in ("capacity", "overlength", "strategy", "seed")},
                budgets=tuple(
                    Budget(name=name, costs=arrays[f"budget.{name}"], limit=most, shared=arrays.get(f"shared.{name}"))
                    for name, most in manifest["budgets"].items()
                ),
                groups=PrefixGroups.of_arrays(arrays),
                whole_groups=manifest.get("whole_groups", False),
            )

    def _arrays(self) -> dict[str, np.ndarray]:
        named = {f"budget.{budget.name}": budget.costs for budget in self.budgets}
        named |= {f"shared.{budget.name}": budget.shared for budget in self.budgets if budget.shared is not None}
        named |= {} if self.groups is None else self.groups.arrays()
        rows = {"sample_ids": self.sample_ids, "bounds": self.bounds}
        return {**rows, "lengths": self.lengths, "dropped": self.dropped, **named}

    # ------------------------------------------------------------------ in words

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return (
            f"Plan({len(self)} rows of {self.capacity} tokens, {self.fill:.2%} full, {len(self.sample_ids)} samples, "
            f"{len(self.dropped)} dropped, at least {self.lower_bound} rows needed, by {self.strategy})"
        )


def _rows(bin_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (samples row by row, bounds): bins ordered by their first samples, samples ascending within each.

    Packing row and sample into one int64 lets numpy sort values, which is several times as fast as argsort.
    """
    if not len(bin_of):
        return NO_SAMPLES, np.zeros(1, np.int64)
    samples = np.arange(len(bin_of))
    first = np.empty(int(bin_of.max()) + 1, np.int64)
    first[bin_of[::-1]] = samples[::-1]
    opens = np.zeros(len(bin_of), np.int64)
    opens[first] = 1
    row_of = (np.cumsum(opens) - 1)[first][bin_of]
    bits = len(bin_of).bit_length()
    keys = (row_of << bits) | samples
    keys.sort()
    bounds = np.concatenate([[0], np.cumsum(np.bincount(row_of))])
    return keys & ((1 << bits) - 1), bounds


# ---------------------------------------------------------------------- archives

FORMAT, VERSION = "vlmpack.plan", 3
MANIFEST = "manifest.json"


def write_archive(path: str | Path, content: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, kind: str) -> None:
    """Write a zip of `manifest.json`, which includes a digest of everything, and one `.npy` per array, atomically.

    Raises:
        ConfigError: the file cannot be written: permissions, a full disk, a file where a folder should be.
    """
    path = Path(path)
    manifest = {"format": kind, "version": VERSION, **content, "digest": digest_of_archive(content, arrays)}
    with atomic_file(path) as temporary, writing(path), zipfile.ZipFile(temporary, "w") as members:
        # every file has zipfile's default date, so that equal content gives equal bytes
        members.writestr(zipfile.ZipInfo(MANIFEST), json.dumps(manifest, indent=2) + "\n")
        for name, array in arrays.items():
            with members.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.save(member, array.astype("<i8"), allow_pickle=False)


@contextmanager
def read_archive(path: str | Path, *, kind: str) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Yield (manifest, arrays) of a file that `write_archive` made.

    An exception in the `with` block counts as damage, too.

    Raises:
        ConfigError: there is no such file, it cannot be read, it is not of this kind, or it has another version.
        LayoutError: the file is damaged.
    """
    try:
        content = Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ConfigError(f"there is no file {path}; write it first, or name another one") from None
    except OSError as error:
        raise unreadable(path, error) from error
    if not zipfile.is_zipfile(io.BytesIO(content)):
        raise ConfigError(f"{path} is no {kind}, which is a zip file. Write it again, or name another file")
    try:
        with np.load(io.BytesIO(content)) as members:
            manifest = json.loads(members[MANIFEST]) if MANIFEST in members else {}
            stored = manifest.pop("format", None), manifest.pop("version", None)
            if stored != (kind, VERSION):
                raise ConfigError(
                    f"{path} is no {kind} of version {VERSION}: its manifest has {stored}; write it again"
                )
            arrays = {name: members[name] for name in members.files if name != MANIFEST}
        if manifest.pop("digest") != digest_of_archive(manifest, arrays):
            raise ValueError("it does not match its digest")
        yield manifest, arrays
    except VlmpackError:
        raise
    except Exception as error:  # zipfile, json, numpy and the caller's block raise errors of every kind
        fault = f"it has no {error}" if type(error) is KeyError else str(error) or type(error).__name__
        raise LayoutError(f"{path} is damaged ({fault:.200}); write it again") from error


def digest_of_archive(content: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """Compute the SHA-256 of a manifest and of named arrays."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return digest.hexdigest()
