"""Every mechanism of every family of the registry, broken on purpose: the probe names it, and nothing else.

`test_breakage.py` shows of a few families what the report has to say of each. Here every case of the product is run:
one of every third family and of each breakage in the full tier, the others in the exhaustive one.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
from breakages import BREAKAGES, WINDOWS, Patch
from tiers import full, only_exhaustive, tiers

from vlmpack.families.registry import FAMILIES
from vlmpack.model.mechanisms import ModelParts
from vlmpack.model.mechanisms.attention import layer_reaches
from vlmpack.probing import Report, probe
from vlmpack.probing.report import Cause, causes_of
from vlmpack.probing.run import _setup, preserved_state
from vlmpack.probing.tree_checks import tree_checks
from vlmpack.testing import branches_of, tiny_model

pytestmark = [pytest.mark.usefixtures("shared_references"), pytest.mark.every_family]

SEEDS = {"gpt_oss": 1, "llama4_text": 1, "gemma4": 1}
"""Of models; with seed 0 rounding sends a token to another expert."""
SHOWN = ("internvl", "paddleocr_vl", "minicpmv4_6")
"""Families in the full tier of rows with trees: tiles, patches of rows and columns, a tower with boundaries."""
LONGEST = 140
"""Tokens of the longest sample of a probe."""
SHORT = [("lfm2", "short convolutions"), ("mistral", "windows")]
"""Cases of the short tier: mechanisms that no other test of it breaks."""
CASES = [(name, what) for name, family in FAMILIES.items() for what, each in BREAKAGES.items() if each.has(family)]


def in_tiers() -> list[Any]:
    """One case of every third family, and of each breakage, in the full tier; the others in the exhaustive one."""
    of_family = {name: [case for case in CASES if case[0] == name] for name in FAMILIES}
    chosen = {cases[5 * at % len(cases)] for at, cases in enumerate(of_family.values()) if at % 3 == 0}
    missing = {what for _, what in CASES} - {what for _, what in chosen}
    chosen |= {next(case for case in reversed(CASES) if case[1] == what) for what in missing}
    others = [case for case in CASES if case not in chosen]
    marks = {case: only_exhaustive(case)[0].marks for case in others}
    marks |= {case: full(case)[0].marks for case in chosen}
    marks |= dict.fromkeys(SHORT, ())
    return [pytest.param(*case, marks=marks[case]) for case in CASES]


def probed(family: str) -> Report:
    return probe(tiny_model(family, seed=SEEDS.get(family, 0)), plain=False, share_prefixes=False)


@pytest.mark.parametrize(("family", "what"), in_tiers())
def test_a_broken_mechanism_is_named(family: str, what: str, monkeypatch: Patch) -> None:
    BREAKAGES[what].breaks(family, monkeypatch)
    report = probed(family)
    assert report.verdict != "exact", report
    assert report.causes == BREAKAGES[what].causes, report


IN_A_TREE = [
    *((name, "images") for name, family in FAMILIES.items() if BREAKAGES["images"].has(family)),
    *((name, "images in a batch") for name, family in FAMILIES.items() if BREAKAGES["images in a batch"].has(family)),
    *((name, "cache") for name in FAMILIES),
]
"""Of a row whose samples share prefixes: what is looked at otherwise there than in other rows."""


@pytest.mark.parametrize(
    ("family", "what"),
    [
        pytest.param(*case, marks=(full(case) if case[0] in SHOWN else only_exhaustive(case))[0].marks)
        for case in IN_A_TREE
    ],
)
def test_so_it_is_in_a_row_whose_samples_share_prefixes(family: str, what: str, monkeypatch: Patch) -> None:
    BREAKAGES[what].breaks(family, monkeypatch)
    model = tiny_model(family, seed=SEEDS.get(family, 0))
    setup = _setup(model, None, None)
    with preserved_state(model):
        checks = tree_checks(setup, branches_of(setup.samples, model.config), progress=lambda part: None)
    assert causes_of(checks) == BREAKAGES[what].causes, [check for check in checks if check.is_bad]


@pytest.mark.parametrize("family", tiers(FAMILIES, short=[], exhaustive=sorted({*FAMILIES} - {*[*FAMILIES][::6]})))
def test_nothing_broken_is_exact(family: str) -> None:
    report = probed(family)
    assert (report.verdict, report.causes) == ("exact", ()), report


def test_every_cause_of_the_probe_is_shown_and_every_breakage_is_in_the_full_tier() -> None:
    shown = {cause for each in BREAKAGES.values() for cause in each.causes}
    assert shown == {*get_args(Cause)} - {"not deterministic"}
    of_full = [case.values for case in in_tiers() if "exhaustive" not in {mark.name for mark in case.marks}]
    assert {name for name, _ in of_full} >= {*[*FAMILIES][::3]}
    assert {name for name, _ in CASES} == {*FAMILIES}
    assert {what for _, what in of_full} == {*BREAKAGES}
    assert len(CASES) > 450


@pytest.mark.full
def test_windows_that_samples_pass_are_broken_in_every_family_that_has_them() -> None:
    has_windows = set[str]()
    for name, family in FAMILIES.items():
        if family.has("per_sample"):  # its layers have masks of their own
            continue
        reaches = layer_reaches(ModelParts(family=family, core=tiny_model(name)))
        if any(reach.window is not None and reach.window < LONGEST for reach in reaches.values()):
            has_windows.add(name)
    assert has_windows == {*WINDOWS}
