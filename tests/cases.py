"""What tests are parametrized with: families, and products of circumstances.

There are two tiers. `make test` is the specification: every behavior once, eight families that have every mechanism
between them. `make test-all` adds what is marked `slow`: every other family, processes, kills, compilers, examples.

    @pytest.mark.parametrize("family", families(lambda family: family.has_vision))
    @pairs(layout=["padded", "packed"], dtype=[torch.float32, torch.bfloat16], side=["left", "right"])
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from vlmpack.families.family import Family
from vlmpack.families.registry import FAMILIES

EIGHT = (
    "qwen2_5_vl",  # MRoPE, a vision tower with windows, images and videos
    "qwen3_vl_moe",  # interleaved MRoPE, deepstack, experts
    "qwen3_5_moe",  # gated delta layers, experts
    "glm4v",  # another tower; videos as images
    "gemma3",  # image tokens that attend both ways, sliding windows
    "llama4",  # chunked attention, scaled queries, images as tiles
    "lfm2_vl",  # short convolutions, images without a grid
    "gpt_oss",  # attention sinks; text alone
)
"""The families of `make test`: between them they have every mechanism but audio, whose tests name Omni themselves."""
FURTHER = ("qwen4_exp", "qwen3_omni_moe_thinker", "paligemma")
"""Families with what the eight lack: layers that run sample by sample, audio, bidirectional prefixes."""


def families(where: Callable[[Family], bool] = lambda family: True, always: Iterable[str] = ()) -> list[Any]:
    """The names of families as values of a parameter: the eight and `always` in `make test`, the others marked `slow`.

    `where` chooses among them.
    """
    fast = {*EIGHT, *always}
    chosen = [name for name, family in FAMILIES.items() if where(family)]
    assert chosen, "no family has what the test is about"
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in chosen]


def one_of_each(where: Callable[[Family], bool] = lambda family: True, always: Iterable[str] = ()) -> list[Any]:
    """As `families`, but of those beyond the eight one of each combination of mechanisms and media.

    A text model with the layers of a family with vision (`qwen3_5_text`, `llama4_text`) is no combination of its own.
    """
    chosen: dict[Any, str] = {}
    for name in (*EIGHT, *FAMILIES):
        if (family := FAMILIES.get(name)) and (family.has_vision or family.text_type not in FAMILIES):
            media = (family.has_vision, family.has_grids, family.has_audio)
            chosen.setdefault((frozenset(family.mechanisms), *media, family.bidirectional is None), name)
    names = {*EIGHT, *always, *chosen.values()}
    return families(lambda family: family.model_type in names and where(family), always)


def slow(*values: Any) -> list[Any]:
    """These values of a parameter, in `make test-all` only."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def slow_cases(*cases: tuple[Any, ...]) -> list[Any]:
    """These values of several parameters, in `make test-all` only."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def pairs(**values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with few combinations of these values: each pair of values of two parameters is in one.

    With one or two parameters that is their whole product. The combinations are the same in every run.
    """
    names, lists = list(values), [list(each) for each in values.values()]
    cases = [(case, {*combinations(enumerate(case), 2)}) for case in product(*(range(len(each)) for each in lists))]
    missing = set[Any]().union(*(shown for _, shown in cases))
    chosen = [] if missing else [case for case, _ in cases]
    while missing:
        case, shown = max(cases, key=lambda each: len(each[1] & missing))
        missing -= shown
        chosen.append(case)
    return pytest.mark.parametrize(names, [tuple(lists[i][k] for i, k in enumerate(case)) for case in sorted(chosen)])
