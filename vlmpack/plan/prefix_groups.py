"""Groups of samples that share a prefix: what a row needs where each prefix is computed once (a prefix tree).

    samples      S P a    S P b    S Q c    d           S: system prompt, 40 tokens; P, Q: prompts of 60 and 160
    group        1        1        2        -1          the innermost group of each sample

    group        0: S     1: S P   2: S Q
    parents     -1        0        0
    tokens       40       100      200                  from the start of a sample to the end of the prefix

    tokens of a row of all four     40 + 60 + 160 + a + b + c + d
    of samples 0 and 3              40 + 60 + a + d

Whatever grows with tokens is counted so, attended pairs too: a node costs what its end costs less what its start costs.

A group is placed as a whole, or in pieces that each repeat its prefix:

    capacity 10, a prefix P of 4 tokens, branches of 5, 3, 2 and 1 tokens
    the group                P 5 3 2 1          15 tokens: too many
    room for branches        10 - 4 = 6         packed as samples are: 5 1 | 3 2
    its pieces               P 5 1    P 3 2     10 and 9 tokens

A group in a group is one branch of it; one that is too large is cut first, and its pieces are branches.

Groups are found by marks, hashes of what samples begin with, without keeping their tokens:

    symbols    a b c d I I I e f g h            token ids; I: a number of the content of an image
    ends           3       7   9                some places: every few tokens, after media, around targets
    hashes       abc  ..IIIe ..fg               of all symbols before each end

Samples that have a hash in common begin with the same symbols. A prefix is found to its last token where it ends beside
a medium or a turn, and else to within 16 tokens or 1/16 of its length, never beyond its end.

N samples, K groups, G rows, M marks; U units, D things that a row may hold only so much of, tokens first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple, final

import numpy as np

from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan.exact_fill import lower_bound
from vlmpack.plan.lengths import Whole, divided_up, whole_numbers

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
        count = len(self)
        for name, values, below in (
            ("of_samples", self.of_samples, count),
            ("parents", self.parents, np.arange(count)),
        ):
            if (wrong := (values < ALONE) | (values >= below)).any():
                at = int(wrong.argmax())
                raise ConfigError(
                    f"{name}[{at}] is {values[at]}: it has to be {ALONE} or the number of a group, and parents stand "
                    "before their children"
                )
        for name, values, least in (
            ("tokens", self.tokens, 1),
            ("patches", self.patches, 0),
            ("images", self.images, 0),
        ):
            if len(values) != count:
                raise ConfigError(f"{name} has {len(values)} entries for {count} groups; give one a group")
            if (wrong := self.added(values) < least).any():
                at = int(wrong.argmax())
                raise ConfigError(
                    f"the prefix of group {at} has {values[at]} {name}: a group adds {least} or more to its parent"
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
"""In front of the names of columns."""


def attended_pairs(tokens: Whole) -> Whole:
    """Pairs of a query and a key in a sample by itself, or in each of N, under the causal mask: n (n + 1) / 2."""
    return tokens * (tokens + 1) // 2


# ---------------------------------------------------------------------- items of a plan

Place = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Assigns units with the costs int64 [U, D] to bins of the limits int64 [D]: the bin of each, int64 [U]."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Needs:
    """Costs of samples and of the prefixes of their groups."""

    groups: PrefixGroups
    """Of N samples."""
    of_samples: np.ndarray
    """int64 [N, D]: what each sample needs alone."""
    of_groups: np.ndarray
    """int64 [K, D]: what each prefix needs, from the start of a sample."""
    limits: np.ndarray
    """int64 [D]: what a row may hold; no sample exceeds it alone."""

    def sums(self, samples: np.ndarray, item_of: np.ndarray) -> np.ndarray:
        """int64 [items, D]: what each item needs, every prefix in it counted once."""
        things = zip(self.of_samples.T, self.of_groups.T, strict=True)
        return np.stack([self.groups.row_sums(samples, item_of, *needs) for needs in things], axis=1)


def make_items(needs: Needs, samples: np.ndarray, place: Place) -> np.ndarray:
    """Join the samples of each outermost group to an item; one that exceeds a row is cut.

    Args:
        needs: of all samples.
        samples: int64 [M], in the order in which they are planned.
        place: packs the branches of a group that is cut.

    Returns:
        int64 [M]: the item of each sample; items are numbered in the order of their first samples.
    """
    item_of = _by_first(_outermost(needs.groups, samples))
    over = np.any(needs.sums(samples, item_of) > needs.limits, axis=1)
    if not over.any():
        return item_of
    cut = np.flatnonzero(over[item_of])
    bounds = np.flatnonzero(np.diff(item_of[cut := cut[np.argsort(item_of[cut], kind="stable")]], prepend=-1))
    pieces, first = item_of.copy(), len(over)
    for members in np.split(cut, bounds[1:]):
        pieces[members] = first + _cut(needs, samples[members], place)
        first += len(members)
    return _by_first(pieces)


def _outermost(groups: PrefixGroups, samples: np.ndarray) -> np.ndarray:
    """int64 [M]: the outermost group of each sample, or a number of its own behind those of the groups."""
    group = groups.of_samples[samples]
    return np.where(group < 0, len(groups) + np.arange(len(samples)), np.append(groups.roots, 0)[group])


def _by_first(numbers: np.ndarray) -> np.ndarray:
    """int64 [M]: the same partition, numbered from 0 in the order of first entries."""
    _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse.reshape(-1)]


def _cut(needs: Needs, samples: np.ndarray, place: Place) -> np.ndarray:
    """Cut the samples of one outermost group into pieces that fit a row each, the innermost groups first.

    Returns:
        int64 [M]: the piece of each sample, any numbers below M.
    """
    groups = needs.groups
    of_groups = np.append(needs.of_groups, np.zeros_like(needs.limits)[None], axis=0)
    added = of_groups[:-1] - of_groups[groups.parents]
    innermost = groups.of_samples[samples]
    beyond = needs.of_samples[samples] - of_groups[innermost]
    units: defaultdict[int, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    """(members that stand for their units, costs of the units) in each group that is not cut yet."""
    order = np.argsort(innermost, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(innermost[order])) + 1):
        units[int(innermost[members[0]])].append((members, beyond[members]))
    piece_of = np.arange(len(samples))
    """The member that stands for the unit of each; followed to its end when all groups are cut."""
    for group in reversed(_with_ancestors(groups, list(units))):  # children have higher numbers than their parents
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


def _with_ancestors(groups: PrefixGroups, inner: list[int]) -> list[int]:
    """These groups and all around them, rising."""
    found: set[int] = set()
    for group in inner:
        while group != ALONE and group not in found:
            found.add(group)
            group = int(groups.parents[group])
    return sorted(found)


def group_bound(groups: PrefixGroups, samples: np.ndarray, sizes: np.ndarray, of_groups: np.ndarray, limit: int) -> int:
    """Rows that samples need at the very least, however groups are cut.

    The best of three bounds: everything over the limit, prefixes counted once; all branches without their prefixes; and
    one sample of each outermost group, the largest, as two of them share nothing.

    Args:
        groups: of N samples.
        samples: int64 [M]: those in rows.
        sizes: int64 [N]: what each needs alone, at most `limit`.
        of_groups: int64 [K]: what each prefix needs.
        limit: of a row.
    """
    if not len(samples):
        return 0
    together = groups.row_sums(samples, np.zeros(len(samples), np.int64), sizes, of_groups)
    branches = sizes[samples] - groups.shared(of_groups)[samples]
    item_of = _by_first(_outermost(groups, samples))
    largest = np.zeros(int(item_of.max()) + 1, np.int64)
    np.maximum.at(largest, item_of, sizes[samples])
    return max(divided_up(int(together[0]), limit), lower_bound(branches, limit), lower_bound(largest, limit))


# ---------------------------------------------------------------------- marks of prefixes

FINEST = 16
"""Tokens between two marks, in prefixes of less than 512 tokens ..."""
OCTAVE = 32
"""... and how many marks there are from each power of two to the next, in longer ones."""
LONGEST = 2**31


def _regular_ends() -> np.ndarray:
    ends = [FINEST]
    while ends[-1] < LONGEST:
        ends.append(ends[-1] + _spacing(ends[-1]))
    return np.array(ends)


def _spacing(end: int) -> int:
    return max(FINEST, (1 << end.bit_length() - 1) // OCTAVE)


REGULAR = _regular_ends()
"""Ends that every sample has, as far as it goes."""


class PrefixMarks(NamedTuple):
    """Marks of one sample."""

    ends: np.ndarray
    """int64 [m]: tokens before each mark, rising."""
    hashes: np.ndarray
    """int64 [m]: of the symbols before it."""
    media_ends: np.ndarray
    """int64 [v]: where each image and video ends, rising."""
    media_patches: np.ndarray
    """int64 [v]: patches of each."""

    @classmethod
    def of(
        cls, symbols: np.ndarray, turn_ends: np.ndarray, media_ends: np.ndarray, media_patches: np.ndarray
    ) -> PrefixMarks:
        """Mark a sample.

        Args:
            symbols: int64 [n]: token ids; in the place of each placeholder, a number of its medium's content.
            turn_ends: int64 [any] in 0 to n: where something begins or ends that many samples may share.
            media_ends: int64 [v] in 1 to n, rising.
            media_patches: int64 [v].
        """
        n = len(symbols)
        regular = REGULAR[: int(np.searchsorted(REGULAR, n, side="right"))]
        ends = np.unique(np.concatenate([regular, turn_ends, media_ends, [n]]))
        ends = ends[ends > 0]
        return cls(ends, prefix_hashes(symbols)[ends - 1], media_ends, media_patches)

    def to_bytes(self) -> bytes:
        """Return all four columns as bytes."""
        return np.concatenate([[len(self.media_ends)], *self[2:], *self[:2]]).astype("<i8").tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> PrefixMarks:
        """Read what `to_bytes` made."""
        values = np.frombuffer(content, "<i8").astype(np.int64)
        media = int(values[0])
        media_ends, media_patches = np.split(values[1 : 1 + 2 * media], 2)
        ends, hashes = np.split(values[1 + 2 * media :], 2)
        return cls(ends, hashes, media_ends, media_patches)


def prefix_hashes(symbols: np.ndarray) -> np.ndarray:
    """int64 [n]: a hash of the first 1, 2, ... symbols: the sum of what splitmix64 makes of each symbol and place.

    Args:
        symbols: int64 [n].
    """
    places = np.arange(1, len(symbols) + 1, dtype=np.uint64)
    return np.cumsum(_mixed(_mixed(symbols.astype(np.uint64)) + places)).view(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """uint64 [n]: Vigna's splitmix64, which wraps around."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def groups_of_marks(samples: Sequence[PrefixMarks], *, min_shared: int) -> PrefixGroups:
    """Find the groups of N samples.

    A group in another one begins where two samples of the outer one go different ways, and goes on for at least
    `min_shared` tokens, and as many more as the end of the outer one is uncertain by: the tree of a row shares as much.

    Args:
        samples: marks of each.
        min_shared: tokens of the shortest prefix that is worth sharing, counted from the end of the one before it.
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
    order = np.lexsort((tokens, holder))  # by first sample; a parent before its children
    parents, of_samples, kept = _branching(parents, of_samples, tokens, order.tolist(), min_shared)
    patches, images = _media(samples, holder[kept], tokens[kept])
    return PrefixGroups(of_samples=of_samples, parents=parents, tokens=tokens[kept], patches=patches, images=images)


def _chains(sample: np.ndarray, node: np.ndarray, samples: int, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """(parent of each node, last node of each sample): a sample's nodes are a chain, its marks rise.

    Args:
        sample: int64 [M'] of each shared mark, rising.
        node: int64 [M'].
        samples: N.
        nodes: how many there are.
    """
    begins = np.diff(sample, prepend=-1) > 0
    before = np.where(begins, ALONE, np.concatenate([[ALONE], node[:-1]])[: len(node)])
    parents = np.full(nodes, ALONE)
    parents[node[::-1]] = before[::-1]  # of the first sample that has the node
    of_samples = np.full(samples, ALONE)
    of_samples[sample] = node  # the last of its marks
    return parents, of_samples


def _branching(
    parents: np.ndarray, of_samples: np.ndarray, tokens: np.ndarray, order: Sequence[int], min_shared: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(parents, of_samples, kept): nodes where samples end or go different ways, and that are long enough.

    Returns:
        Parents int64 [K] and groups of samples int64 [N] by their new numbers, and int64 [K] nodes of `parents`.
    """
    children = np.bincount(parents[parents >= 0], minlength=len(parents))
    ends = np.bincount(of_samples[of_samples >= 0], minlength=len(parents))
    splits = ((children > 1) | (ends > 0)).tolist()
    around, kept = np.full(len(parents), ALONE), []
    """The nearest node that is kept, itself included."""
    of_parent, lengths = parents.tolist(), tokens.tolist()
    for node in order:
        outer = int(around[of_parent[node]]) if of_parent[node] >= 0 else ALONE
        start = lengths[outer] if outer >= 0 else 0
        least = min_shared + (_spacing(start) if outer >= 0 else 0)
        is_kept = splits[node] and lengths[node] - start >= least
        around[node] = node if is_kept else outer
        kept += [node] * is_kept
    nodes = np.array(kept, np.int64)
    number = np.full(len(parents) + 1, ALONE)  # the last one: of no node
    number[nodes] = np.arange(len(nodes))
    nearest = np.append(around, ALONE)
    return number[nearest[parents[nodes]]], number[nearest[of_samples]], nodes


def _media(samples: Sequence[PrefixMarks], holders: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(patches, images): of the media in prefixes of so many tokens, each of a sample that has it."""
    patches, images = np.zeros((2, len(tokens)), np.int64)
    for at, (holder, end) in enumerate(zip(holders.tolist(), tokens.tolist(), strict=True)):
        marks = samples[holder]
        images[at] = np.searchsorted(marks.media_ends, end, side="right")
        patches[at] = marks.media_patches[: images[at]].sum()
    return patches, images
