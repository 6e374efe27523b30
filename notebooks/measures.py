"""How close a predicted receipt is to the true one, as Donut measures it: `pip install 'vlmpack[measures]'`.

    field_f1        on values:  2 matched / (predicted + expected), fields = (path, value), over all receipts
    nted_accuracy   on trees:   max(0, 1 - TED(prediction, truth) / TED(empty, truth)), TED: tree edit distance

On text there is `rapidfuzz.distance.Levenshtein.normalized_distance`: edit distance / length of the longer.

Source: Donut's `JSONParseEvaluator` (github.com/clovaai/donut, donut/util.py). It normalizes both first: the order of a
dict's keys never counts, the order of a list's items counts for the trees and not for the fields, one value counts as a
list of one, empty values do not count at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from apted import APTED
from rapidfuzz.distance import Levenshtein


def field_f1(predictions: Sequence[Any], truths: Sequence[Any]) -> float:
    """Average F1 over the fields of all receipts (micro), from 0 to 1; 1 if there are none. Source: Donut's `cal_f1`.

    A field is a path such as ``menu.nm`` and a value. Paths do not tell the items of a list apart: swapped prices of
    two items match.

    Args:
        predictions: nested values, such as `token2json` gives.
        truths: as many, in the same order.

    Raises:
        ValueError: the two differ in number.
    """
    matched = fields = 0
    for prediction, truth in zip(predictions, truths, strict=True):
        predicted, expected = Counter(_fields(normalize(prediction))), Counter(_fields(normalize(truth)))
        matched += (predicted & expected).total()
        fields += predicted.total() + expected.total()
    return 2 * matched / fields if fields else 1.0


def nted_accuracy(prediction: Any, truth: Any) -> float:
    """`max(0, 1 - TED(prediction, truth) / TED(empty, truth))`, from 0 to 1. Source: Donut's `cal_acc`.

    The tree edit distance has Donut's costs: to insert or delete a key 1, a value its length in characters; to rename
    a key 1, to change a value its Levenshtein distance, to turn a key into a value 1 + the value's length.

    An empty truth, for which Donut divides by zero, gives 1 for an empty prediction and 0 for any other.
    """
    expected = _tree(normalize(truth), "<root>")
    most = tree_edit_distance(_tree({}, "<root>"), expected)
    distance = tree_edit_distance(_tree(normalize(prediction), "<root>"), expected)
    return max(0.0, 1 - distance / most) if most else float(distance == 0)


def normalize(data: Any) -> Any:
    """Bring nested values into Donut's canonical form.

    Sort keys by length, then by name. Make a single value under a key a list of one, and values strings without white
    space around them. Drop what is empty (``""``, ``[]``, ``{}``, None, 0) at every level. Of a list that mixes dicts
    with plain values drop the dicts.

    Source: `JSONParseEvaluator.normalize_dict`. (Its docstring says "sort by value"; the code sorts keys, as here.)
    """
    if not data:
        return {}
    if isinstance(data, dict):
        pairs = ((key, normalize(data[key])) for key in sorted(data, key=lambda key: (len(key), key)))
        return {key: value if isinstance(value, list) else [value] for key, value in pairs if value}
    if not isinstance(data, list):
        return [str(data).strip()]
    if all(isinstance(item, dict) for item in data):
        return [item for item in map(normalize, data) if item]
    return [str(item).strip() for item in data if type(item) in (str, int, float) and str(item).strip()]


class Tree(NamedTuple):
    """An ordered tree of keys and values; a value is a leaf with `is_value`."""

    label: str
    children: tuple[Tree, ...] = ()
    is_value: bool = False

    @property
    def cost(self) -> int:
        """Cost of inserting or deleting this node alone."""
        return len(self.label) if self.is_value else 1


def tree_edit_distance(a: Tree, b: Tree) -> int:
    """Compute the least cost of turning tree `a` into `b` by inserting, deleting and changing nodes (APTED)."""

    class Costs:  # the methods that apted calls on its configuration
        valuecls = int

        def delete(self, node: Tree) -> int:
            return node.cost

        insert = delete

        def rename(self, node1: Tree, node2: Tree) -> int:
            if node1.is_value and node2.is_value:
                return Levenshtein.distance(node1.label, node2.label)
            if node1.is_value or node2.is_value:
                return 1 + len(node1.label if node1.is_value else node2.label)
            return int(node1.label != node2.label)

        def children(self, node: Tree) -> tuple[Tree, ...]:
            return node.children

    return APTED(a, b, Costs()).compute_edit_distance()


def _fields(data: Any, path: str = "") -> list[tuple[str, str]]:
    """(path, value) for each value of normalized data, lists transparent."""
    if isinstance(data, dict):
        pairs = [(f"{path}.{key}" if path else key, value) for key, value in data.items()]
        return [field for inner, value in pairs for field in _fields(value, inner)]
    return [field for item in data for field in _fields(item, path)] if isinstance(data, list) else [(path, data)]


def _tree(data: Any, label: str) -> Tree:
    """Normalized data as a tree: keys, `<subtree>` for each dict of a list, values as leaves."""
    if isinstance(data, dict):
        return Tree(label, tuple(_tree(value, key) for key, value in data.items()))
    if all(isinstance(item, dict) for item in data):
        return Tree(label, tuple(_tree(item, "<subtree>") for item in data))
    return Tree(label, tuple(Tree(str(item), is_value=True) for item in data))
