"""The measures on pairs worked out by hand, against slow twins, and at their edges."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import strategies as st

from notebooks.measures import field_f1, normalize, nted_accuracy

CAKE = {"menu": [{"nm": "cake", "cnt": "2"}]}
"""TED from nothing: menu 1, subtree 1, nm 1, "cake" 4, cnt 1, "2" 1: 9."""


json_values = st.recursive(
    st.text("ab ", max_size=3) | st.integers(0, 3) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["k", "l", "mm"]), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("data", "normal"),
    [
        ({"menu": {"nm": "cake"}}, {"menu": [{"nm": ["cake"]}]}),
        ({"menu": [{"nm": " cake "}]}, {"menu": [{"nm": ["cake"]}]}),
        ({"ccc": "1", "b": "2", "a": "3", "dd": "4"}, {"a": ["3"], "b": ["2"], "dd": ["4"], "ccc": ["1"]}),
        ({"a": "", "b": [], "c": {}, "d": None, "e": 0, "f": {"g": ""}}, {}),
        ({"a": ["x", " ", 1, 2.5, {"b": "1"}, True]}, {"a": ["x", "1", "2.5"]}),
        ({"a": [{}, {"b": "1"}]}, {"a": [{"b": ["1"]}]}),
        ("text", ["text"]),
    ],
)
def test_the_canonical_form_of_donut(data: Any, normal: Any) -> None:
    assert normalize(data) == normal
    assert json.dumps(normalize(data)) == json.dumps(normal)  # the order of keys too


def test_fields_by_hand() -> None:
    truth = {"menu": [{"nm": "cake", "cnt": "2"}, {"nm": "juice", "cnt": "1"}], "total": {"total_price": "30"}}
    prediction = {"menu": [{"nm": "cake", "cnt": "2"}, {"nm": "juice"}], "total": {"total_price": "31"}}
    assert field_f1([prediction], [truth]) == pytest.approx(6 / 9)


@pytest.mark.parametrize(
    ("prediction", "truth", "f1", "accuracy"),
    [
        (CAKE, CAKE, 1, 1),
        ({}, {}, 1, 1),
        ({}, CAKE, 0, 0),
        (CAKE, {}, 0, 0),
        ({"menu": {"nm": "cake", "cnt": "2"}}, CAKE, 1, 1),
        ({"menu": [{"cnt": "2", "nm": "cake"}]}, CAKE, 1, 1),
        ({"menu": [{"nm": "cake"}]}, CAKE, 2 / 3, 7 / 9),
        ({"menu": {"nm": "cape", "cnt": "2"}}, CAKE, 1 / 2, 8 / 9),
        ({"menu": {"nm": "cake", "qty": "2"}}, CAKE, 1 / 2, 8 / 9),
        ({"menu": {"nm": "cake", "cnt": "2"}, "a": "bcd"}, CAKE, 4 / 5, 5 / 9),
        ({"menu": [{"nm": "cake", "cnt": "2"}] * 2}, CAKE, 2 / 3, 1 / 9),
        ({"food": [{"nm": "cake", "cnt": "2"}]}, CAKE, 0, 8 / 9),
        ({"a": ["1", "2"]}, {"a": ["2", "1"]}, 1, None),
        ({"menu": "a long text that nobody asked for"}, {"a": "x"}, 0, 0),
    ],
)
def test_scores_by_hand(prediction: Any, truth: Any, f1: float, accuracy: float | None) -> None:
    assert field_f1([prediction], [truth]) == pytest.approx(f1)
    assert accuracy is None or nted_accuracy(prediction, truth) == pytest.approx(accuracy)
