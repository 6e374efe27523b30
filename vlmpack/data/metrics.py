"""How close is a predicted receipt to the true one? Three measures, without any dependency.

    normalised_edit_distance   on text:    Levenshtein(prediction, truth) / length of the longer
    field_f1                   on values:  2 matched / (predicted + expected), fields = (path, value), over all receipts
    nted_accuracy              on trees:   max(0, 1 - TED(prediction, truth) / TED(empty, truth))

The last two follow Donut's `JSONParseEvaluator` (github.com/clovaai/donut, donut/util.py), which needs zss and nltk.
Before both, Donut normalises (`normalise`): the order of a dict's keys never counts, the order of a list's items counts
for the trees and not for the fields, one value counts as a list of one, empty values do not count at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from vlmpack.errors import ConfigError


@lru_cache(maxsize=65536)
def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: the least number of characters to insert, delete or replace to turn `a` into `b`.

    A column of the usual table is kept as the bits of two integers (its steps +1 and -1), so that one character of `b`
    costs a dozen operations. Source: H. Hyyrö, "A Bit-Vector Algorithm for Computing Levenshtein and Damerau Edit
    Distances" (2003), after G. Myers (1999).
    """
    if not a or not b:
        return len(a) + len(b)
    full, last = (1 << len(a)) - 1, 1 << (len(a) - 1)
    where: dict[str, int] = {}
    for at, letter in enumerate(a):
        where[letter] = where.get(letter, 0) | 1 << at
    up, down, distance = full, 0, len(a)
    for letter in b:
        match = where.get(letter, 0)
        diagonal = (((match & up) + up) ^ up) | match | down
        right_up, right_down = (down | ~(diagonal | up)) & full, up & diagonal
        distance += bool(right_up & last) - bool(right_down & last)
        right_up = (right_up << 1 | 1) & full
        up, down = (right_down << 1 | ~(diagonal | right_up)) & full, right_up & diagonal
    return distance


def normalised_edit_distance(prediction: str, truth: str) -> float:
    """`edit_distance / max(len)`: 0 for equal texts (two empty ones too), 1 where nothing agrees."""
    longest = max(len(prediction), len(truth))
    return edit_distance(prediction, truth) / longest if longest else 0.0


def normalise(data: Any) -> Any:
    """Donut's canonical form of nested values, on which `field_f1` and `nted_accuracy` work.

    Keys are sorted by length, then by name. A single value under a key becomes a list of one. Values become strings
    without white space around them. What is empty (``""``, ``[]``, ``{}``, None, 0) is dropped, at every level. A list
    keeps its order; if it mixes dicts with plain values, the dicts are dropped.

    Source: `JSONParseEvaluator.normalize_dict`. (Its docstring says "sort by value"; the code sorts keys, as here.)
    """
    if not data:
        return {}
    if isinstance(data, dict):
        pairs = ((key, normalise(data[key])) for key in sorted(data, key=lambda key: (len(key), key)))
        return {key: value if isinstance(value, list) else [value] for key, value in pairs if value}
    if not isinstance(data, list):
        return [str(data).strip()]
    if all(isinstance(item, dict) for item in data):
        return [item for item in map(normalise, data) if item]
    return [str(item).strip() for item in data if type(item) in (str, int, float) and str(item).strip()]


@dataclass(frozen=True, kw_only=True)
class FieldCounts:
    """Sums over receipts; add them up, then divide once."""

    matched: int = 0
    """Fields of a prediction that are also in its truth; each true field counts once."""
    predicted: int = 0
    """Fields of the predictions."""
    expected: int = 0
    """Fields of the truths."""

    def __add__(self, other: FieldCounts) -> FieldCounts:
        return FieldCounts(
            matched=self.matched + other.matched,
            predicted=self.predicted + other.predicted,
            expected=self.expected + other.expected,
        )

    @property
    def f1(self) -> float:
        """`2 matched / (predicted + expected)`; 1 when there was nothing to find and nothing was predicted."""
        fields = self.predicted + self.expected
        return 2 * self.matched / fields if fields else 1.0


def count_fields(prediction: Any, truth: Any) -> FieldCounts:
    """Compare one prediction with its truth, field by field. A field is a path such as ``menu.nm`` and a value.

    Paths do not say which item of a list a value belongs to (as in Donut): swapped prices of two items match.
    """
    predicted, expected = Counter(_fields(normalise(prediction))), Counter(_fields(normalise(truth)))
    return FieldCounts(matched=(predicted & expected).total(), predicted=predicted.total(), expected=expected.total())


def field_f1(predictions: Sequence[Any], truths: Sequence[Any]) -> float:
    """Micro-averaged F1 over the fields of all receipts, from 0 to 1. Source: Donut's `cal_f1`.

    Args:
        predictions: nested values, such as `token2json` gives.
        truths: as many, in the same order.

    Raises:
        ConfigError: the two differ in number.
    """
    if len(predictions) != len(truths):
        raise ConfigError(
            f"{len(predictions)} predictions for {len(truths)} truths; give one prediction for each truth"
        )
    pairs = zip(predictions, truths, strict=True)
    return sum((count_fields(prediction, truth) for prediction, truth in pairs), FieldCounts()).f1


def nted_accuracy(prediction: Any, truth: Any) -> float:
    """`max(0, 1 - TED(prediction, truth) / TED(empty, truth))`, from 0 to 1. Source: Donut's `cal_acc`.

    TED is the tree edit distance with Donut's costs: to insert or delete a key 1, a value its length in characters; to
    rename a key 1, to change a value its `edit_distance`, to turn a key into a value 1 + the value's length.

    An empty truth, for which Donut divides by zero, gives 1 for an empty prediction and 0 for any other.
    """
    wanted = _tree(normalise(truth), "<root>")
    whole = tree_edit_distance(_tree({}, "<root>"), wanted)
    distance = tree_edit_distance(_tree(normalise(prediction), "<root>"), wanted)
    if whole == 0:
        return float(distance == 0)
    return max(0.0, 1 - distance / whole)


@dataclass(frozen=True)
class Tree:
    """An ordered tree of keys and values; a value is a leaf with `is_value`."""

    label: str
    children: tuple[Tree, ...] = ()
    is_value: bool = False

    @property
    def cost(self) -> int:
        """Of inserting or deleting this node alone."""
        return len(self.label) if self.is_value else 1


def tree_edit_distance(a: Tree, b: Tree) -> int:
    """The cheapest way to turn tree `a` into tree `b` by inserting, deleting and changing nodes.

    Source: K. Zhang and D. Shasha, "Simple fast algorithms for the editing distance between trees and related problems"
    (1989). Takes O(|a| |b| depth^2) steps at worst.
    """
    left, right = _postorder(a), _postorder(b)
    costs = [[_change_cost(x, y) for y in right.nodes] for x in left.nodes]
    done = [[0] * len(right.nodes) for _ in left.nodes]
    for i, j in product(left.key_roots, right.key_roots):
        _forest_distance(done, costs, left, right, i, j)
    return done[-1][-1]


@dataclass(frozen=True, kw_only=True)
class _Numbered:
    """A tree whose nodes are numbered in postorder: children first."""

    nodes: list[Tree]
    """By number."""
    leftmost: list[int]
    """Of each node the number of the leftmost leaf below it."""

    @property
    def key_roots(self) -> list[int]:
        """The last node of those with the same leftmost leaf."""
        return sorted({leaf: at for at, leaf in enumerate(self.leftmost)}.values())


def _forest_distance(done: list[list[int]], costs: list[list[int]], a: _Numbered, b: _Numbered, i: int, j: int) -> None:
    """Fill `done[x][y]` for all x, y whose leftmost leaves are those of the key roots i and j."""
    top, start = a.leftmost[i], b.leftmost[j]
    above = [0]
    for y in range(start, j + 1):
        above.append(above[-1] + b.nodes[y].cost)
    table = [above]
    for x in range(top, i + 1):
        row = [table[-1][0] + a.nodes[x].cost]
        for y in range(start, j + 1):
            best = min(table[-1][y - start + 1] + a.nodes[x].cost, row[-1] + b.nodes[y].cost)
            if a.leftmost[x] == top and b.leftmost[y] == start:
                best = min(best, table[-1][y - start] + costs[x][y])
                done[x][y] = best
            else:
                best = min(best, table[a.leftmost[x] - top][b.leftmost[y] - start] + done[x][y])
            row.append(best)
        table.append(row)


def _change_cost(a: Tree, b: Tree) -> int:
    if a.is_value and b.is_value:
        return edit_distance(a.label, b.label)
    if a.is_value or b.is_value:
        return 1 + len(a.label if a.is_value else b.label)
    return int(a.label != b.label)


def _postorder(root: Tree) -> _Numbered:
    nodes: list[Tree] = []
    leftmost: list[int] = []
    stack: list[tuple[Tree, int | None]] = [(root, None)]
    while stack:
        node, first = stack.pop()
        if first is None:
            stack.append((node, len(nodes)))
            stack.extend((child, None) for child in reversed(node.children))
        else:
            nodes.append(node)
            leftmost.append(first)
    return _Numbered(nodes=nodes, leftmost=leftmost)


def _fields(data: Any, path: str = "") -> list[tuple[str, str]]:
    """(path, value) for each value of normalised data, lists transparent."""
    if isinstance(data, dict):
        pairs = [(f"{path}.{key}" if path else key, value) for key, value in data.items()]
        return [field for inner, value in pairs for field in _fields(value, inner)]
    if isinstance(data, list):
        return [field for item in data for field in _fields(item, path)]
    return [(path, data)]


def _tree(data: Any, label: str) -> Tree:
    """Normalised data as a tree: keys, `<subtree>` for each dict of a list, values as leaves."""
    if isinstance(data, dict):
        return Tree(label, tuple(_tree(value, key) for key, value in data.items()))
    if all(isinstance(item, dict) for item in data):
        return Tree(label, tuple(_tree(item, "<subtree>") for item in data))
    return Tree(label, tuple(Tree(str(item), is_value=True) for item in data))
