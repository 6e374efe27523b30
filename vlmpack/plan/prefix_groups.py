"""Groups of samples that share a prefix: what a row needs where each prefix is computed once (a prefix tree).

    samples      S P a    S P b    S Q c    d           S: system prompt, 40 tokens; P, Q: prompts of 60 and 160
    group        1        1        2        -1          the innermost group of each sample

    group        0: S     1: S P   2: S Q
    parents     -1        0        0
    tokens       40       100      200                  from the start of a sample to the end of the prefix

    tokens of a row of all four     40 + 60 + 160 + a + b + c + d
    of samples 0 and 3              40 + 60 + a + d

Whatever grows with tokens is counted so, attended pairs too: a node costs what its end costs less what its start costs.
N samples, K groups, G rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import final

import numpy as np

from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan.lengths import Whole, whole_numbers

ALONE = -1
"""The group of a sample that shares nothing, and the parent of a group that lies in no other."""

NOTHING = np.zeros(0, np.int64)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixGroups:
    """Prefixes that samples have in common; a group may lie in another one, whose prefix is shorter."""

    of_samples: np.ndarray
    """int64 [N]: the innermost group of each sample; `ALONE`: it shares nothing."""
    parents: np.ndarray
    """int64 [K]: the group around each, which stands before it; `ALONE`: none."""
    tokens: np.ndarray
    """int64 [K]: tokens of the prefix, from the start of a sample, more than those of the parent."""
    patches: np.ndarray = field(default_factory=lambda: NOTHING)
    """int64 [K]: patches of the images and videos in the prefix; by default 0."""
    images: np.ndarray = field(default_factory=lambda: NOTHING)
    """int64 [K]: images and videos in the prefix; by default 0."""

    def __post_init__(self) -> None:
        for name, values in self._columns().items():
            is_default = values is NOTHING and name in ("patches", "images")
            checked = np.zeros(len(self), np.int64) if is_default else whole_numbers(values, f"{name} of groups")
            object.__setattr__(self, name, checked)
        self._check_numbers("of_samples", self.of_samples, np.full(len(self.of_samples), len(self)))
        self._check_numbers("parents", self.parents, np.arange(len(self)))
        self._check_prefixes("tokens", self.tokens, least=1)
        self._check_prefixes("patches", self.patches, least=0)
        self._check_prefixes("images", self.images, least=0)

    def _check_numbers(self, name: str, values: np.ndarray, below: np.ndarray) -> None:
        """Raise a ConfigError unless all are `ALONE` or the numbers of groups below a limit."""
        if (wrong := (values < ALONE) | (values >= below)).any():
            at = int(wrong.argmax())
            raise ConfigError(
                f"{name}[{at}] is {values[at]}, and has to be {ALONE} or a group below {below[at]}: groups are "
                "numbered from 0, each behind its parent"
            )

    def _check_prefixes(self, name: str, values: np.ndarray, *, least: int) -> None:
        """Raise a ConfigError unless there is a number a group, which does not fall from a parent to its children."""
        if len(values) != len(self):
            raise ConfigError(f"{name} has {len(values)} entries for {len(self)} groups; give one a group")
        if (wrong := self.added(values) < least).any():
            at = int(wrong.argmax())
            parent = int(self.parents[at])
            around = f", and that of its parent {parent} has {values[parent]}" if parent >= 0 else ""
            raise ConfigError(
                f"the prefix of group {at} has {values[at]} {name}{around}: a group adds {least} or more to its parent"
            )

    @classmethod
    def none(cls, samples: int) -> PrefixGroups:
        """Make no groups of so many samples."""
        return cls(of_samples=np.full(samples, ALONE), parents=NOTHING, tokens=NOTHING)

    @classmethod
    def of_keys(cls, keys: Sequence[Hashable | None], shared_tokens: Sequence[int] | np.ndarray) -> PrefixGroups:
        """Make groups that do not nest, from a key a sample, such as the number of its prompt in GRPO.

        Args:
            keys: N of them, or an array or tensor, equal for samples of one group; None: the sample shares nothing.
            shared_tokens: [N] tokens of the prefix, the same for all samples of a group.

        Raises:
            SampleError: two samples of a group have prefixes of different lengths; names the second.
            ConfigError: there are more or fewer keys than numbers, or one cannot be compared.
        """
        shared = whole_numbers(shared_tokens, "shared tokens of a sample")
        if len(keys) != len(shared):
            raise ConfigError(f"{len(keys)} keys, but {len(shared)} shared_tokens; give one of each a sample")
        keys = keys if isinstance(keys, Sequence) else np.asarray(keys).tolist()
        wrong = [key for key in keys if not isinstance(key, Hashable) or not isinstance(key == key, bool | np.bool_)]
        if wrong:  # lists; tensors, which are never equal as keys
            raise ConfigError(f"{wrong[0]!r:.60} is no key of a group: give numbers, texts or tuples, or None")
        numbers: dict[Hashable, int] = {}
        group = [ALONE if key is None else numbers.setdefault(key, len(numbers)) for key in keys]
        of_samples = np.array(group, np.int64)
        tokens = np.zeros(len(numbers) + 1, np.int64)  # the last one: of samples alone
        tokens[of_samples[::-1]] = shared[::-1]  # of the first sample of each group
        first = tokens[of_samples]
        if (wrong := (of_samples >= 0) & (first != shared)).any():
            at = int(wrong.argmax())
            raise SampleError(
                f"shares {shared[at]} tokens, and the first sample of its group {keys[at]!r:.60} {first[at]}; "
                "the prefix of a group has one length",
                index=at,
                reason="bad_group",
            )
        return cls(of_samples=of_samples, parents=np.full(len(numbers), ALONE), tokens=tokens[:-1])

    def __len__(self) -> int:
        """Groups K."""
        return len(self.parents)

    # ------------------------------------------------------------------ columns of samples

    def shared(self, values: np.ndarray) -> np.ndarray:
        """[N]: something that each group has, [K], by sample; 0 for one that shares nothing."""
        return np.append(values, 0)[self.of_samples]

    def added(self, values: np.ndarray) -> np.ndarray:
        """[K]: something that each group has from the start of a sample, [K], less that of its parent."""
        return values - np.append(values, 0)[self.parents]

    def tokens_shared(self, least: int) -> np.ndarray:
        """int64 [K]: tokens of each prefix, without what groups of less than `least` tokens add."""
        shared: list[int] = []
        for tokens, parent in zip(self.tokens.tolist(), self.parents.tolist(), strict=True):
            start = shared[parent] if parent >= 0 else 0
            shared.append(tokens if tokens - start >= least else start)
        return np.array(shared, np.int64)

    @cached_property
    def roots(self) -> np.ndarray:
        """int64 [K]: the outermost group around each."""
        roots = np.arange(len(self))
        while (inner := self.parents[roots] >= 0).any():
            roots[inner] = self.parents[roots[inner]]
        return roots

    def check_samples(self, lengths: np.ndarray, costs: Sequence[tuple[str, np.ndarray, np.ndarray]] = ()) -> None:
        """Refuse groups of other samples.

        Args:
            lengths: int64 [N] tokens; 0: a sample that is not planned.
            costs: (name, [N], [K]) of what else is counted.

        Raises:
            ConfigError: there are groups for more or fewer samples.
            SampleError: a sample has less than the prefix that it is to share; names it.
        """
        if len(self.of_samples) != len(lengths):
            raise ConfigError(f"groups of {len(self.of_samples)} samples, but there are {len(lengths)} lengths")
        for name, needed, shared in (("tokens", lengths, self.tokens), *costs):
            if (short := (needed < self.shared(shared)) & (lengths > 0)).any():
                at = int(short.argmax())
                group = int(self.of_samples[at])
                raise SampleError(
                    f"has {needed[at]} {name}, and the prefix of its group {group} has {shared[group]}; a sample holds "
                    "all that it shares. Group samples by what they begin with",
                    index=at,
                    reason="bad_group",
                )

    # ------------------------------------------------------------------ rows

    def row_sums(
        self, samples: np.ndarray, row_of: np.ndarray, of_samples: np.ndarray, of_groups: np.ndarray
    ) -> np.ndarray:
        """[G]: what each row needs, every prefix in it counted once.

        Args:
            samples: int64 [M]: samples in rows.
            row_of: int64 [M]: their rows, 0 to G - 1, each with a sample.
            of_samples: [N]: what each sample needs alone.
            of_groups: [K]: what each prefix needs, from the start of a sample.
        """
        beyond = of_samples[samples] - self.shared(of_groups)[samples]
        sums = np.zeros(int(row_of.max(initial=-1)) + 1, beyond.dtype)
        np.add.at(sums, row_of, beyond)
        prefix_row, prefix = self.prefixes_of_rows(samples, row_of)
        np.add.at(sums, prefix_row, self.added(of_groups)[prefix])
        return sums

    def prefixes_of_rows(self, samples: np.ndarray, row_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row, group) of every prefix in every row, each pair once, by row and then by group."""
        group, levels, count = self.of_samples[samples], [NOTHING], max(len(self), 1)
        while (inner := group >= 0).any():
            pairs = np.unique(row_of[inner] * count + group[inner])
            levels.append(pairs)
            row_of, group = pairs // count, self.parents[pairs % count]
        pairs = np.unique(np.concatenate(levels))
        return pairs // count, pairs % count

    # ------------------------------------------------------------------ parts and wholes

    def select(self, samples: np.ndarray) -> PrefixGroups:
        """Return the groups of some samples, in their order; all K groups stay.

        Args:
            samples: int64, or bool [N].
        """
        return replace(self, of_samples=self.of_samples[samples])

    def spread(self, places: np.ndarray, count: int) -> PrefixGroups:
        """Return the groups with sample i at `places[i]` of `count`; the other places share nothing."""
        of_samples = np.full(count, ALONE)
        of_samples[places] = self.of_samples
        return replace(self, of_samples=of_samples)

    @classmethod
    def concatenate(cls, parts: Sequence[PrefixGroups]) -> PrefixGroups:
        """Put groups of several lots of samples behind each other; none is shared between two lots."""
        columns = {name: [part._columns()[name] for part in parts] for name in NAMES}
        starts = np.cumsum([0, *map(len, parts)]).tolist()
        for name in ("of_samples", "parents"):
            columns[name] = [np.where(c < 0, c, c + start) for c, start in zip(columns[name], starts, strict=False)]
        return cls(**{name: np.concatenate([NOTHING, *values]) for name, values in columns.items()})

    # ------------------------------------------------------------------ on disk

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the columns by the names under which archives hold them."""
        return {f"{IN_ARCHIVES}{name}": values for name, values in self._columns().items()}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray]) -> PrefixGroups | None:
        """Make groups of what `arrays` returned; None: an archive without groups."""
        if not any(name.startswith(IN_ARCHIVES) for name in arrays):
            return None
        return cls(**{name: arrays[f"{IN_ARCHIVES}{name}"] for name in NAMES})

    def _columns(self) -> dict[str, np.ndarray]:
        return dict(zip(NAMES, attrgetter(*NAMES)(self), strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PrefixGroups):
            return False
        return all(map(np.array_equal, self._columns().values(), other._columns().values()))

    def __repr__(self) -> str:
        grouped = int((self.of_samples >= 0).sum())
        return f"PrefixGroups({len(self)} groups, {grouped} of {len(self.of_samples)} samples in them)"


NAMES = tuple(column.name for column in fields(PrefixGroups))
IN_ARCHIVES = "groups."
"""In front of the names of columns."""


def attended_pairs(tokens: Whole) -> Whole:
    """Pairs of a query and a key in a sample by itself, or in each of N, under the causal mask: n (n + 1) / 2."""
    return tokens * (tokens + 1) // 2
