"""Groups of samples that share a prefix, and what a row needs if it computes each prefix once (a prefix tree).

    samples      S P a    S P b    S Q c    d           S: system prompt, 40 tokens; P, Q: prompts of 60 and 160
    group        1        1        2        -1          the innermost group of each sample

    group        0: S     1: S P   2: S Q
    parents     -1        0        0
    tokens       40       100      200                  from the start of a sample to the end of the prefix

    tokens of a row of all four     40 + 60 + 160 + a + b + c + d
    of samples 0 and 3              40 + 60 + a + d

Any quantity that grows with tokens is counted like this, including attended pairs: a node costs its value at the end
minus its value at the start.

A group is placed as a whole, or split into pieces that each repeat its prefix:

    capacity 10, a prefix P of 4 tokens, branches of 5, 3, 2 and 1 tokens
    the group                P 5 3 2 1          15 tokens: too many
    room for branches        10 - 4 = 6         packed like samples: 5 1 | 3 2
    its pieces               P 5 1    P 3 2     10 and 9 tokens

A nested group is one branch of its parent. If it is too large, it is split first, and its pieces are branches.

Groups are found with marks, which are hashes of the beginnings of samples, without storing tokens:

    symbols    a b c d I I I e f g h            token ids; I: a hash of an image's content
    ends           3       7   9                selected positions: every few tokens, after media, around targets
    hashes       abc  ..IIIe ..fg               hashes of all symbols before each end

Samples with equal hashes begin with the same symbols. A prefix that ends at a medium or a turn is found to its last
token; other prefixes are found to within 16 tokens or 1/16 of their length, and never too long.

N samples, K groups, G rows, M marks; U items or branches to pack; D limited quantities of a row, tokens first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import NamedTuple, final

import numpy as np

from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan.exact_fill import lower_bound
from vlmpack.plan.lengths import OVERLENGTH, SHOWN, Budget, Whole, divided_up, whole_numbers

ALONE = -1
"""The group of a sample that shares nothing, and the parent of an outermost group."""

NOTHING = np.zeros(0, np.int64)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixGroups:
    """Prefixes that samples share. Groups may nest; the outer group has the shorter prefix."""

    of_samples: np.ndarray
    """int64 [N]: the innermost group of each sample; `ALONE`: the sample shares nothing."""
    parents: np.ndarray
    """int64 [K]: the parent of each group, which has a smaller index; `ALONE`: none."""
    tokens: np.ndarray
    """int64 [K]: tokens of each prefix, from the start of a sample; more than the parent has."""
    patches: np.ndarray = field(default_factory=lambda: NOTHING)
    """int64 [K]: patches of the images and videos in each prefix; 0 by default."""
    images: np.ndarray = field(default_factory=lambda: NOTHING)
    """int64 [K]: images and videos in each prefix; 0 by default."""

    def __post_init__(self) -> None:
        for name, values in self._columns().items():
            is_default = values is NOTHING and name in ("patches", "images")
            checked = np.zeros(len(self), np.int64) if is_default else whole_numbers(values, f"{name} of groups")
            object.__setattr__(self, name, checked)
        count = len(self)
        for name, below in (("of_samples", count), ("parents", np.arange(count))):
            values = getattr(self, name)
            if (wrong := (values < ALONE) | (values >= below)).any():
                at = int(wrong.argmax())
                raise ConfigError(
                    f"{name}[{at}] is {values[at]}: it has to be {ALONE} or the number of a group, and parents stand "
                    "before their children"
                )
        for name, least in (("tokens", 1), ("patches", 0), ("images", 0)):
            if len(values := getattr(self, name)) != count:
                raise ConfigError(f"{name} has {len(values)} entries for {count} groups; give one per group")
            if (wrong := self.added(values) < least).any():
                at = int(wrong.argmax())
                raise ConfigError(
                    f"the prefix of group {at} has {values[at]} {name}: a group adds {least} or more to its parent"
                )

    @classmethod
    def of_keys(cls, keys: Sequence[Hashable | None], shared_tokens: Sequence[int] | np.ndarray) -> PrefixGroups:
        """Make groups without nesting from one key per sample, such as the number of its prompt in GRPO.

        Args:
            keys: N keys, or an array or tensor, equal for samples of one group; None: the sample shares nothing.
            shared_tokens: [N]: tokens of the prefix, the same for all samples of a group.

        Raises:
            SampleError: two samples of a group have prefixes of different lengths; names the second one.
            ConfigError: the numbers of keys and of `shared_tokens` differ, or a key cannot be compared.
        """
        shared = whole_numbers(shared_tokens, "shared tokens of a sample")
        if len(keys) != len(shared):
            raise ConfigError(f"{len(keys)} keys, but {len(shared)} shared_tokens; give one of each per sample")
        keys = keys if isinstance(keys, Sequence) else np.asarray(keys).tolist()
        wrong = [key for key in keys if not isinstance(key, Hashable) or not isinstance(key == key, bool | np.bool_)]
        if wrong:  # lists, or tensors, whose comparison gives no bool
            raise ConfigError(f"{wrong[0]!r:.60} cannot be the key of a group: give numbers, texts, tuples or None")
        numbers: dict[Hashable, int] = {}
        group = [ALONE if key is None else numbers.setdefault(key, len(numbers)) for key in keys]
        of_samples = np.array(group, np.int64)
        tokens = np.zeros(len(numbers) + 1, np.int64)  # the last entry is for samples that share nothing
        tokens[of_samples[::-1]] = shared[::-1]  # from the first sample of each group
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
        """Return the number of groups, K."""
        return len(self.parents)

    # ------------------------------------------------------------------ columns of samples

    def shared(self, values: np.ndarray) -> np.ndarray:
        """Spread a per-group quantity [K] over samples, [N]; 0 for samples that share nothing."""
        return np.append(values, 0)[self.of_samples]

    def added(self, values: np.ndarray) -> np.ndarray:
        """Subtract the parent's value from each group's value, both counted from the start of a sample, [K]."""
        return values - np.append(values, 0)[self.parents]

    def tokens_shared(self, least: int) -> np.ndarray:
        """int64 [K]: shared tokens of each prefix, ignoring groups that add fewer than `least` tokens."""
        shared: list[int] = []
        for tokens, parent in zip(self.tokens.tolist(), self.parents.tolist(), strict=True):
            start = shared[parent] if parent >= 0 else 0
            shared.append(tokens if tokens - start >= least else start)
        return np.array(shared, np.int64)

    @cached_property
    def roots(self) -> np.ndarray:
        """int64 [K]: the outermost group around each group."""
        roots = np.arange(len(self))
        while (inner := self.parents[roots] >= 0).any():
            roots[inner] = self.parents[roots[inner]]
        return roots

    def check_samples(self, lengths: np.ndarray, costs: Sequence[tuple[str, np.ndarray, np.ndarray]] = ()) -> None:
        """Check that these are groups of these samples.

        Args:
            lengths: int64 [N]: tokens of each sample; 0: the sample is not planned.
            costs: (name, costs of samples [N], costs of prefixes [K]) of each further limit.

        Raises:
            ConfigError: the groups have another number of samples.
            SampleError: a sample needs less than the prefix that it shares; names the sample.
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
        """Sum a quantity over the samples of each row, with every prefix counted once per row, [G].

        Args:
            samples: int64 [M]: samples in rows.
            row_of: int64 [M]: the row of each, 0 to G - 1, no row empty.
            of_samples: [N]: quantity of each sample alone.
            of_groups: [K]: quantity of each prefix, counted from the start of a sample.
        """
        beyond = of_samples[samples] - self.shared(of_groups)[samples]
        sums = np.zeros(int(row_of.max(initial=-1)) + 1, beyond.dtype)
        np.add.at(sums, row_of, beyond)
        # (row, group) of every prefix in every row, as one number each
        group, levels, count = self.of_samples[samples], [NOTHING], max(len(self), 1)
        while (inner := group >= 0).any():
            pairs = np.unique(row_of[inner] * count + group[inner])
            levels.append(pairs)
            row_of, group = pairs // count, self.parents[pairs % count]
        pairs = np.unique(np.concatenate(levels))
        np.add.at(sums, pairs // count, self.added(of_groups)[pairs % count])
        return sums

    # ------------------------------------------------------------------ on disk

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the columns by their names in archives."""
        return {f"{IN_ARCHIVES}{name}": values for name, values in self._columns().items()}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray]) -> PrefixGroups | None:
        """Make groups from the result of `arrays`; None: the archive has no groups."""
        if not any(name.startswith(IN_ARCHIVES) for name in arrays):
            return None
        return cls(**{name: arrays[f"{IN_ARCHIVES}{name}"] for name in NAMES})

    def _columns(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in NAMES}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PrefixGroups):
            return False
        return all(map(np.array_equal, self._columns().values(), other._columns().values()))

    def __repr__(self) -> str:
        grouped = int((self.of_samples >= 0).sum())
        return f"PrefixGroups({len(self)} groups, {grouped} of {len(self.of_samples)} samples in them)"


NAMES = tuple(column.name for column in fields(PrefixGroups))
IN_ARCHIVES = "groups."
"""Prefix of the column names in archives."""


def attended_pairs(tokens: Whole) -> Whole:
    """Count the causal query-key pairs of a sample of n tokens (or of each of N samples): n (n + 1) / 2."""
    return tokens * (tokens + 1) // 2


# ---------------------------------------------------------------------- items to place

Place = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Packs items or branches of costs int64 [U, D] into bins of limits int64 [D]; returns the bin of each, int64 [U]."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Needs:
    """What samples and prefixes need of a row: tokens, and the cost of each budget."""

    groups: PrefixGroups
    """Groups of N samples."""
    of_samples: np.ndarray
    """int64 [N, D]: costs of each sample alone."""
    of_groups: np.ndarray
    """int64 [K, D]: costs of each prefix, from the start of a sample."""
    limits: np.ndarray
    """int64 [D]: limits of a row."""
    names: tuple[str, ...] = ()
    """What each of the D columns counts, for messages."""

    @classmethod
    def of(cls, lengths: np.ndarray, capacity: int, budgets: Sequence[Budget], groups: PrefixGroups | None) -> Needs:
        """Collect and check the tokens and budgets of samples and prefixes. `groups` None: nothing is shared.

        Raises:
            ConfigError: the groups have another number of samples, or a budget has another number of groups.
            SampleError: a sample needs less than the prefix it shares.
        """
        if groups is None:
            groups = PrefixGroups(of_samples=np.full(len(lengths), ALONE), parents=NOTHING, tokens=NOTHING)
            budgets = [replace(budget, shared=None) for budget in budgets]
        shared = [(budget.name, budget.costs, budget.of_groups(len(groups))) for budget in budgets]
        groups.check_samples(lengths, shared)
        return cls(
            groups=groups,
            of_samples=np.stack([lengths, *(costs for _, costs, _ in shared)], axis=1),
            of_groups=np.stack([groups.tokens, *(costs for _, _, costs in shared)], axis=1),
            limits=np.array([capacity, *(budget.limit for budget in budgets)]),
            names=("tokens", *(budget.name for budget in budgets)),
        )

    @property
    def too_large(self) -> np.ndarray:
        """bool [N]: samples that exceed a limit on their own."""
        return np.any(self.of_samples > self.limits, axis=1)

    def refuse_too_large(self) -> None:
        """Raise if any sample is too large for a row.

        Raises:
            SampleError: names the first such sample, and lists the first ones with their sizes.
        """
        if not len(places := np.flatnonzero(self.too_large)):
            return
        listed = ", ".join(f"{at} ({self._in_words(self.of_samples[at])})" for at in places[:SHOWN].tolist())
        more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
        larger = " or ".join(["capacity", *(f"the limit of {name}" for name in self.names[1:])])
        raise SampleError(
            f"does not fit a row of {self._in_words(self.limits)}. {len(places)} of {len(self.of_samples)} samples do "
            f"not: {listed}{more}. Raise {larger}, shorten the samples, or choose overlength='drop' or "
            "overlength='own_row'",
            index=int(places[0]),
            reason=OVERLENGTH,
        )

    def _in_words(self, numbers: np.ndarray) -> str:
        return ", ".join(f"{number} {name}" for number, name in zip(numbers, self.names, strict=True))

    def sums(self, samples: np.ndarray, item_of: np.ndarray) -> np.ndarray:
        """Sum the costs of each item, with every prefix counted once per item, int64 [items, D]."""
        columns = zip(self.of_samples.T, self.of_groups.T, strict=True)
        return np.stack([self.groups.row_sums(samples, item_of, *needs) for needs in columns], axis=1)

    def least_rows(self, samples: np.ndarray) -> int:
        """Compute a lower bound of the rows that these samples need; none of them is too large."""
        columns = zip(self.of_samples.T, self.of_groups.T, self.limits.tolist(), strict=True)
        return max(group_bound(self.groups, samples, *needs) for needs in columns)


def large_groups(needs: Needs, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find groups with more tokens than a row that are cheaper in one large row than split.

    In one row the branches go forward twice, and split in n rows the prefix goes forward and back n times. With a
    prefix of P tokens and rows of C, that is about 4 P to C; so groups of shorter prefixes, such as a system prompt,
    are split.

    Returns:
        (int64 [M']: those of `samples` that are in one; int64 [M']: the number of its group, from 0).
    """
    groups = needs.groups
    is_long = np.append(4 * groups.tokens > needs.limits[0], False)
    outermost = np.arange(len(groups) + 1)
    while (inner := is_long[above := np.append(groups.parents, ALONE)[outermost]]).any():
        outermost[inner] = above[inner]
    samples = samples[is_long[groups.of_samples[samples]]]
    item_of = _by_first(outermost[groups.of_samples[samples]])
    exceeds = needs.sums(samples, item_of) > needs.limits  # pieces have fewer tokens, but keep no other limit
    over = (exceeds[:, 0] & ~exceeds[:, 1:].any(axis=1))[item_of]
    return samples[over], _by_first(item_of[over])


def make_items(needs: Needs, samples: np.ndarray, place: Place) -> np.ndarray:
    """Join the samples of each outermost group to one item; split items that exceed a row.

    Args:
        needs: costs of all samples.
        samples: int64 [M]: samples in planning order.
        place: packs the branches of a group that is split.

    Returns:
        int64 [M]: the item of each sample; items are numbered in the order of their first samples.
    """
    item_of = _by_first(_outermost(needs.groups, samples))
    over = np.any(needs.sums(samples, item_of) > needs.limits, axis=1)
    if not over.any():
        return item_of
    cut = np.flatnonzero(over[item_of])
    pieces, first = item_of.copy(), len(over)
    for part in parts(item_of[cut]):
        pieces[cut[part]] = first + _cut(needs, samples[cut[part]], place)
        first += len(part)
    return _by_first(pieces)


def parts(numbers: np.ndarray) -> list[np.ndarray]:
    """Return the indices of each number, ascending, in the order of numbers."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)


def _outermost(groups: PrefixGroups, samples: np.ndarray) -> np.ndarray:
    """int64 [M]: the outermost group of each sample; samples that share nothing get distinct numbers above them."""
    group = groups.of_samples[samples]
    return np.where(group < 0, len(groups) + np.arange(len(samples)), np.append(groups.roots, 0)[group])


def _by_first(numbers: np.ndarray) -> np.ndarray:
    """Renumber a partition from 0 in the order of first entries, int64 [M]."""
    _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse.reshape(-1)]


def _cut(needs: Needs, samples: np.ndarray, place: Place) -> np.ndarray:
    """Split the samples of one outermost group into pieces that each fit a row, innermost groups first.

    Returns:
        int64 [M]: the piece of each sample, as arbitrary numbers below M.
    """
    groups = needs.groups
    of_groups = np.append(needs.of_groups, np.zeros_like(needs.limits)[None], axis=0)
    added = of_groups[:-1] - of_groups[groups.parents]
    innermost = groups.of_samples[samples]
    beyond = needs.of_samples[samples] - of_groups[innermost]
    units: defaultdict[int, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    """For each group not split yet: (members that represent its branches, costs of the branches)."""
    for members in parts(innermost):
        units[int(innermost[members[0]])].append((members, beyond[members]))
    piece_of = np.arange(len(samples))
    """The member that represents each member's branch; followed to the end once all groups are split."""
    while (group := max(units)) != ALONE:  # children have higher numbers than their parents
        members = np.concatenate([ids for ids, _ in units[group]])
        costs = np.concatenate([each for _, each in units.pop(group)])
        order = np.argsort(members)
        members, costs = members[order], costs[order]
        room = needs.limits - of_groups[group]
        bin_of = np.zeros(len(members), np.int64) if (costs.sum(0) <= room).all() else place(costs, room)
        _, first, bin_of = np.unique(bin_of, return_index=True, return_inverse=True)
        sums = np.zeros((len(first), len(needs.limits)), np.int64)
        np.add.at(sums, bin_of.reshape(-1), costs)
        stand_in = members[first]
        piece_of[members] = stand_in[bin_of.reshape(-1)]
        units[int(groups.parents[group])].append((stand_in, sums + added[group]))
    while (piece_of != (further := piece_of[piece_of])).any():
        piece_of = further
    return piece_of


def group_bound(groups: PrefixGroups, samples: np.ndarray, sizes: np.ndarray, of_groups: np.ndarray, limit: int) -> int:
    """Compute a lower bound of the rows that samples need, however groups are split.

    The best of three bounds: the total over the limit, with prefixes counted once; all branches without their prefixes;
    and the largest sample of each outermost group, because samples of different groups share nothing.

    Args:
        groups: groups of N samples.
        samples: int64 [M]: samples in rows.
        sizes: int64 [N]: size of each sample alone, at most `limit`.
        of_groups: int64 [K]: size of each prefix.
        limit: limit of a row.
    """
    if not len(groups) or not len(samples):
        return lower_bound(sizes[samples], limit)
    together = groups.row_sums(samples, np.zeros(len(samples), np.int64), sizes, of_groups)
    branches = sizes[samples] - groups.shared(of_groups)[samples]
    item_of = _by_first(_outermost(groups, samples))
    largest = np.zeros(int(item_of.max()) + 1, np.int64)
    np.maximum.at(largest, item_of, sizes[samples])
    return max(divided_up(int(together[0]), limit), lower_bound(branches, limit), lower_bound(largest, limit))


# ---------------------------------------------------------------------- marks of prefixes

FINEST = 16
"""Tokens between marks in prefixes of less than 512 tokens ..."""
OCTAVE = 32
"""... and the number of marks per power of two in longer ones."""
LONGEST = 2**31


def _regular_ends() -> np.ndarray:
    ends = [FINEST]
    while ends[-1] < LONGEST:
        ends.append(ends[-1] + _spacing(ends[-1]))
    return np.array(ends)


def _spacing(end: int) -> int:
    return max(FINEST, (1 << end.bit_length() - 1) // OCTAVE)


REGULAR = _regular_ends()
"""Ends that every sample has, up to its length."""


class PrefixMarks(NamedTuple):
    """Marks of one sample."""

    ends: np.ndarray
    """int64 [m], ascending: number of tokens before each mark."""
    hashes: np.ndarray
    """int64 [m]: hash of the symbols before each mark."""
    media_ends: np.ndarray
    """int64 [v], ascending: where each image and video ends."""
    media_patches: np.ndarray
    """int64 [v]: patches of each image and video."""

    @classmethod
    def of(
        cls, symbols: np.ndarray, turn_ends: np.ndarray, media_ends: np.ndarray, media_patches: np.ndarray
    ) -> PrefixMarks:
        """Compute the marks of a sample.

        Args:
            symbols: int64 [n]: token ids, with each placeholder replaced by a hash of its medium's content.
            turn_ends: int64 [any] in 0 to n: where a part begins or ends that many samples may share.
            media_ends: int64 [v] in 1 to n, ascending.
            media_patches: int64 [v].
        """
        n = len(symbols)
        regular = REGULAR[: int(np.searchsorted(REGULAR, n, side="right"))]
        ends = np.unique(np.concatenate([regular, turn_ends, media_ends, [n]]))
        ends = ends[ends > 0]
        return cls(ends, prefix_hashes(symbols)[ends - 1], media_ends, media_patches)

    def to_bytes(self) -> bytes:
        """Encode all four columns as bytes."""
        return np.concatenate([[len(self.media_ends)], *self[2:], *self[:2]]).astype("<i8").tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> PrefixMarks:
        """Decode the result of `to_bytes`."""
        values = np.frombuffer(content, "<i8").astype(np.int64)
        media = int(values[0])
        media_ends, media_patches = np.split(values[1 : 1 + 2 * media], 2)
        ends, hashes = np.split(values[1 + 2 * media :], 2)
        return cls(ends, hashes, media_ends, media_patches)


def prefix_hashes(symbols: np.ndarray) -> np.ndarray:
    """Hash the first 1, 2, ... n symbols, int64 [n]: cumulative sums of splitmix64 hashes of symbol and position.

    Args:
        symbols: int64 [n].
    """
    places = np.arange(1, len(symbols) + 1, dtype=np.uint64)
    return np.cumsum(_mixed(_mixed(symbols.astype(np.uint64)) + places)).view(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """uint64 [n]: Vigna's splitmix64, which relies on wrap-around."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def groups_of_marks(samples: Sequence[PrefixMarks], *, min_shared: int) -> PrefixGroups:
    """Find the groups of N samples from their marks.

    A nested group begins where two samples of the outer group diverge. It must add at least `min_shared` tokens, plus
    the uncertainty of the outer group's end, so that the prefix tree of a row shares at least as much.

    Args:
        samples: marks of each sample.
        min_shared: minimum tokens of a shared prefix, counted from the end of the outer prefix.
    """
    counts = np.array([len(marks.ends) for marks in samples], np.int64)
    sample = np.repeat(np.arange(len(samples)), counts)
    ends = np.concatenate([NOTHING, *(marks.ends for marks in samples)])
    _, first, node, times = np.unique(
        np.concatenate([NOTHING, *(marks.hashes for marks in samples)]),
        return_index=True,
        return_inverse=True,
        return_counts=True,
    )
    node = node.reshape(-1)
    is_shared = (times[node] > 1) & (ends >= min_shared)
    sample, node = sample[is_shared], node[is_shared]
    used = np.unique(node)
    number = np.full(len(first), ALONE)
    number[used] = np.arange(len(used))
    parents, of_samples = _chains(sample, number[node], len(samples), len(used))
    tokens = ends[first[used]]
    holder = np.repeat(np.arange(len(samples)), counts)[first[used]]
    order = np.lexsort((tokens, holder))  # by first sample, so that parents come before their children
    parents, of_samples, kept = _branching(parents, of_samples, tokens, order.tolist(), min_shared)
    patches, images = _media(samples, holder[kept], tokens[kept])
    return PrefixGroups(of_samples=of_samples, parents=parents, tokens=tokens[kept], patches=patches, images=images)


def _chains(sample: np.ndarray, node: np.ndarray, samples: int, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (parent of each node, last node of each sample). The nodes of a sample form a chain, because marks rise.

    Args:
        sample: int64 [M'], ascending: sample of each shared mark.
        node: int64 [M']: node of each shared mark.
        samples: N.
        nodes: number of nodes.
    """
    begins = np.diff(sample, prepend=-1) > 0
    before = np.where(begins, ALONE, np.concatenate([[ALONE], node[:-1]])[: len(node)])
    parents = np.full(nodes, ALONE)
    parents[node[::-1]] = before[::-1]  # from the first sample with the node
    of_samples = np.full(samples, ALONE)
    of_samples[sample] = node  # the last assignment wins: the sample's last mark
    return parents, of_samples


def _branching(
    parents: np.ndarray, of_samples: np.ndarray, tokens: np.ndarray, order: Sequence[int], min_shared: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keep nodes where samples end or diverge and that add enough tokens.

    Returns:
        (parents int64 [K] and groups of samples int64 [N], both renumbered; the kept nodes, int64 [K]).
    """
    children = np.bincount(parents[parents >= 0], minlength=len(parents))
    ends = np.bincount(of_samples[of_samples >= 0], minlength=len(parents))
    splits = ((children > 1) | (ends > 0)).tolist()
    around, kept = np.full(len(parents), ALONE), []
    """`around`: the nearest kept node of each node, itself included."""
    of_parent, lengths = parents.tolist(), tokens.tolist()
    for node in order:
        outer = int(around[of_parent[node]]) if of_parent[node] >= 0 else ALONE
        start = lengths[outer] if outer >= 0 else 0
        least = min_shared + (_spacing(start) if outer >= 0 else 0)
        is_kept = splits[node] and lengths[node] - start >= least
        around[node] = node if is_kept else outer
        kept += [node] * is_kept
    nodes = np.array(kept, np.int64)
    number = np.full(len(parents) + 1, ALONE)  # the last entry stands for no node
    number[nodes] = np.arange(len(nodes))
    nearest = np.append(around, ALONE)
    return number[nearest[parents[nodes]]], number[nearest[of_samples]], nodes


def _media(samples: Sequence[PrefixMarks], holders: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (patches, images) of the media in each prefix, given its tokens and a sample that has it."""
    patches, images = np.zeros((2, len(tokens)), np.int64)
    for at, (holder, end) in enumerate(zip(holders.tolist(), tokens.tolist(), strict=True)):
        marks = samples[holder]
        images[at] = np.searchsorted(marks.media_ends, end, side="right")
        patches[at] = marks.media_patches[: images[at]].sum()
    return patches, images
