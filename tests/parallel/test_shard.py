"""One row cut over ranks: every token, label and image on one rank, and all of it back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmpack.errors import LayoutError
from vlmpack.layout import Segments
from vlmpack.parallel import Partition

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "context_parallel.json").read_text())


def mirrored(case: dict) -> Partition:
    segments = Segments.from_boundaries(case["stride"], total=case.get("total"))
    return Partition(segments=segments, ranks=case["cp"], layout="mirrored")


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: f"cp{case['cp']}")
def test_each_rank_holds_what_the_vectors_say(case):
    partition = mirrored(case)
    assert [partition.index(rank).tolist() for rank in range(case["cp"])] == case["ranks"]


@pytest.mark.parametrize("case", VECTORS["must_raise"], ids=lambda case: case["why"])
def test_what_would_hold_tokens_twice_and_lose_others_is_refused(case):
    with pytest.raises(LayoutError):
        mirrored(case)
