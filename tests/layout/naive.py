"""The same as plain loops over samples and tokens: slow, obvious, and the truth for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(kw_only=True)
class NaiveRow:
    """A packed row as python lists."""

    input_ids: list[int] = field(default_factory=list)
    """Ids, 0 on padding."""
    shift_labels: list[int] = field(default_factory=list)
    """Targets, -100 where there is none."""
    padding: list[bool] = field(default_factory=list)
    """True on padding."""
    seq_idx: list[int] = field(default_factory=list)
    """Segment of each token's slot."""
    positions: list[int] = field(default_factory=list)
    """0, 1, 2, ... in each segment; 0 on padding."""
    real: list[int] = field(default_factory=lambda: [0])
    """Cumulative real tokens."""
    stride: list[int] = field(default_factory=lambda: [0])
    """Cumulative slots."""


def naive_pack(
    samples: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], *, multiple: int = 1, width: int | None = None
) -> NaiveRow:
    """Pack samples, each a list of ids, with their unshifted labels."""
    row = NaiveRow()
    for i, (ids, targets) in enumerate(zip(samples, labels, strict=True)):
        slot = len(ids)
        while slot % multiple:
            slot += 1
        for at in range(slot):
            is_real = at < len(ids)
            row.input_ids.append(ids[at] if is_real else 0)
            row.shift_labels.append(targets[at + 1] if at + 1 < len(ids) else -100)
            row.padding.append(not is_real)
            row.seq_idx.append(i)
            row.positions.append(at if is_real else 0)
        row.real.append(row.real[-1] + len(ids))
        row.stride.append(row.stride[-1] + slot)
    while width is not None and len(row.input_ids) < width:
        row.input_ids.append(0)
        row.shift_labels.append(-100)
        row.padding.append(True)
        row.seq_idx.append(len(samples))
        row.positions.append(0)
    return row


def naive_roll(samples: Sequence[Sequence[float]], slots: Sequence[int], *, depth: int, fill: float) -> list[float]:
    """The row of these samples in slots, each sample moved to the left by `depth` tokens."""
    row = []
    for sample, slot in zip(samples, slots, strict=True):
        moved = list(sample[depth:])
        while len(moved) < slot:
            moved.append(fill)
        row.extend(moved)
    return row


def naive_cheapest(lengths: Sequence[int], *, call_cost: float, max_stretch: float) -> float:
    """The least that any way to share these samples out among batches costs: all of them are tried.

    A batch costs `call_cost` and as many tokens as it is long, for each sample; it may cost at most `max_stretch`
    tokens for each token of its samples.
    """
    least = float("inf")
    for partition in _partitions(list(lengths)):
        tokens = [len(batch) * max(batch) for batch in partition]
        if all(n <= max_stretch * sum(batch) for n, batch in zip(tokens, partition, strict=True)):
            least = min(least, sum(tokens) + call_cost * len(partition))
    return least


def _partitions(values: list[int]) -> list[list[list[int]]]:
    """Every way to share values out among any number of batches."""
    if not values:
        return [[]]
    first, *others = values
    out = []
    for partition in _partitions(others):
        out.append([[first], *partition])
        for i in range(len(partition)):
            out.append([*partition[:i], [first, *partition[i]], *partition[i + 1 :]])
    return out


@final
@dataclass(kw_only=True)
class NaiveTree:
    """A prefix tree as python lists, nodes in depth-first order."""

    parents: list[int] = field(default_factory=list)
    """Parent of each node, -1 for a root."""
    nodes: list[list[int]] = field(default_factory=list)
    """Symbols of each node."""
    leaves: dict[int, int] = field(default_factory=dict)
    """Node in which each sample ends."""


def naive_tree(samples: Sequence[Sequence[int]], *, min_shared: int, groups: Sequence[int]) -> NaiveTree:
    """The tree of samples, each a list of symbols, by recursion; groups share nothing."""
    tree = NaiveTree()
    for group in dict.fromkeys(groups):
        members = [i for i, other in enumerate(groups) if other == group]
        _grow(tree, samples, members, start=0, parent=-1, min_shared=min_shared)
    return tree


def _grow(
    tree: NaiveTree, samples: Sequence[Sequence[int]], members: list[int], *, start: int, parent: int, min_shared: int
) -> None:
    """Add the nodes of `members`, which all have the same symbols up to `start`, in order of their first samples."""
    stop = start
    while all(len(samples[i]) > stop and samples[i][stop] == samples[members[0]][stop] for i in members):
        stop += 1
    are_twins = all(len(samples[i]) == stop for i in members)
    repeated = [symbol for i in members[1:] for symbol in samples[i][start:stop]]
    if are_twins or stop - start >= min_shared or (parent != -1 and len(repeated) >= min_shared):
        tree.parents.append(parent)
        tree.nodes.append(list(samples[members[0]][start:stop]))
        parent, start = len(tree.nodes) - 1, stop
        for i in members:
            if len(samples[i]) == stop:
                tree.leaves[i] = parent
        members = [i for i in members if len(samples[i]) > stop]
    children: dict[int | None, list[int]] = {}
    for i in members:
        children.setdefault(samples[i][stop] if len(samples[i]) > stop else None, []).append(i)
    for child in children.values():
        _grow(tree, samples, child, start=start, parent=parent, min_shared=min_shared)


@final
@dataclass(kw_only=True)
class NaiveMaps:
    """What a tree says of each token, found by walking the path of each sample."""

    source: list[int]
    """Where in the row each token of the tree is taken from."""
    place: list[int]
    """Where in the tree each token of the row is."""
    predecessor: list[int]
    """The token of the tree before each one, -1 at the start."""
    keys: list[list[int]]
    """For each node, the tokens of the tree that its last token attends to."""
    pairs: int
    """Pairs of tokens that attend to each other, each once."""


def naive_maps(tree: NaiveTree, samples: Sequence[Sequence[int]]) -> NaiveMaps:
    """Walk each sample along its path, token after token."""
    firsts = [sum(len(node) for node in tree.nodes[:i]) for i in range(len(tree.nodes))]
    source: dict[int, int] = {}
    predecessor: dict[int, int] = {}
    place: list[int] = []
    attended: dict[int, list[int]] = {}
    for i, _ in enumerate(samples):
        path, node = [], tree.leaves[i]
        while node >= 0:
            path.insert(0, node)
            node = tree.parents[node]
        walked: list[int] = []
        for node in path:
            for at in range(len(tree.nodes[node])):
                token = firsts[node] + at
                source.setdefault(token, len(place))
                predecessor[token] = walked[-1] if walked else -1
                place.append(token)
                walked.append(token)
                attended[token] = list(walked)
    count = sum(len(node) for node in tree.nodes)
    lasts = [first + len(node) - 1 for first, node in zip(firsts, tree.nodes, strict=True)]
    return NaiveMaps(
        source=[source[token] for token in range(count)],
        place=place,
        predecessor=[predecessor[token] for token in range(count)],
        keys=[attended[last] for last in lasts],
        pairs=sum(len(attended[token]) for token in range(count)),
    )
