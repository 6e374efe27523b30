"""Every mechanism of every family of the registry, broken on purpose: the probe names it, and nothing else.

Here the mechanisms alone are compared, in a row with gaps and in one without; `test_breakages.py` runs whole probes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from breakages import BREAKAGES, Patch
from cases import EIGHT, FURTHER, slow

from vlmpack.families.registry import FAMILIES
from vlmpack.probing import run as running
from vlmpack.probing.forward_passes import GAPS, LEFT, ROW, TREE, Circumstance
from vlmpack.probing.reference import ProbeSetup, record_references
from vlmpack.probing.report import Cause, Check, causes_of
from vlmpack.probing.run import _setup, preserved_state
from vlmpack.testing import tiny_model

SEEDS = {"gpt_oss": 1, "llama4_text": 1, "gemma4": 1}
"""Of models; with seed 0 rounding sends a token to another expert."""
NUMBERS = ("router losses", "head", "targets", "divisor", "sample results")
"""Breakages of what is returned, which a probe of one family shows."""
AUDIO = ("audio", "padding of audio")
IN_A_TREE = ("nothing", "images", "images in a batch", "cache")
"""Breakages that are looked for in a row whose samples share prefixes too."""


def broken_in(family: str) -> dict[str, tuple[Callable[[str, Patch], None], tuple[str, ...]]]:
    """What is broken in a family, and the causes to be named; "nothing" is the control."""
    has = {what: each for what, each in BREAKAGES.items() if what not in NUMBERS and each.has(FAMILIES[family])}
    return {"nothing": (lambda *_: None, ())} | {what: (each.breaks, each.causes) for what, each in has.items()}


@cache
def recorded(family: str, circumstance: Circumstance) -> tuple[ProbeSetup, Any]:
    """A setup, and every module of each sample alone; choices of experts are not held."""
    model = tiny_model(family, seed=SEEDS.get(family, 0))
    setup = _setup(model, None, None)
    if circumstance is TREE:
        setup = setup.branching()
    with preserved_state(model):
        return setup, record_references(setup, circumstance, [{}] * len(setup.samples))


def bad_checks(family: str, *circumstances: Circumstance, patch: Patch) -> list[Check]:
    """What the probe says of the modules of packed samples; of what is broken, the samples alone know nothing."""
    found: list[Check] = []
    for circumstance in circumstances:
        setup, alone = recorded(family, circumstance)
        patch.setattr(running, "record_references", partial(recorded_or, setup, alone))
        reference: Any = SimpleNamespace(choices=[{}] * len(setup.samples))
        with preserved_state(setup.probed.model):
            check: Any = running.mechanism_checks
            found += running.caught(setup, "mechanism", "mechanisms", check, circumstance, reference, leaks=False)
    return [check for check in found if check.is_bad]


def recorded_or(known: ProbeSetup, alone: Any, setup: ProbeSetup, *further: Any) -> Any:
    return alone if setup is known else record_references(setup, *further)


def circumstances_of(what: str) -> tuple[Circumstance, ...]:
    return (LEFT,) if what == "packing" else (GAPS, ROW)


@pytest.mark.parametrize("shares", [False, True], ids=["row", "tree"])
@pytest.mark.parametrize("family", [*EIGHT, *slow(*FURTHER)])
def test_each_broken_mechanism_is_named_and_nothing_broken_is_exact(
    family: str, shares: bool, monkeypatch: Patch
) -> None:
    for what, (breaks, expected) in broken_in(family).items():
        if not shares or what in IN_A_TREE:
            with monkeypatch.context() as patch:
                breaks(family, patch)
                bad = bad_checks(family, *((TREE,) if shares else circumstances_of(what)), patch=patch)
                assert causes_of(bad) == expected, (what, bad)


def test_every_cause_of_the_probe_is_shown_and_every_breakage_in_the_fast_families() -> None:
    assert {cause for each in BREAKAGES.values() for cause in each.causes} == {*get_args(Cause)} - {"not deterministic"}
    fast = {what for family in EIGHT for what in broken_in(family)}
    assert fast >= {*BREAKAGES} - {*NUMBERS, *AUDIO, "n-grams", "kinds of tokens"}
