"""Two checkouts run in turn, and every figure of the later one is compared with that of the earlier one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.compare_commits import Comparison, compare, main, module_of, unmatched
from benchmarks.figures import Figure, Report, Target
from vlmpack.errors import ConfigError

BENCHMARKS = """
import json, sys
from pathlib import Path
case, *options = sys.argv[1:]
path = Path(options[-1])
log = Path({log!r})
log.write_text((log.read_text() if log.exists() else "") + f"{name} {{case}}\\n")
figures = [
    dict(
        case=case, name=one, value={value}, unit="s", family=None,
        low=None, high=None, rounds=3, clocks={{}}, target=None,
    )
    for one in ("time", {extra!r})
]
environment = dict(commit=None, torch="2", transformers="5", device_name="a CPU", threads=1)
path.write_text(json.dumps(dict(
    schema=2, figures=figures, environment=environment, settings=dict(clock="wall"), shapes={{}}, skipped=[], failed=[]
)))
"""


def figure(value: float, unit: str = "s", target: Target | None = None, name: str = "time") -> Figure:
    return Figure(case="pack", name=name, value=value, unit=unit, target=target)


def report(*figures: Figure) -> Report:
    return Report(figures=figures, environment={}, settings={}, shapes={})


def checkout(folder: Path, module: str, **more: object) -> Path:
    """A folder whose benchmarks write a report at once."""
    place = folder / module.replace(".", "/")
    place.mkdir(parents=True)
    for package in (place, *[parent for parent in place.parents if parent.is_relative_to(folder) and parent != folder]):
        (package / "__init__.py").touch()
    (place / "__main__.py").write_text(BENCHMARKS.format(name=folder.name, log=str(folder.parent / "log"), **more))
    return folder


def compared(*arguments: str) -> tuple[int, str]:
    page = io.StringIO()
    status = main(arguments, console=Console(file=page, width=200))
    return status, page.getvalue()


def test_a_ratio_is_taken_within_each_round() -> None:
    slow_machine = [figure(1.0), figure(4.0), figure(2.0)]
    comparison = Comparison.of(slow_machine, [figure(one.value * 1.02) for one in slow_machine])
    assert comparison.ratio.low == pytest.approx(1.02) and comparison.ratio.high == pytest.approx(1.02)
    assert comparison.earlier.median == 2.0


@pytest.mark.parametrize(
    ("unit", "target", "slower", "faster"),
    [
        ("s", None, 1.05, 0.9),
        ("tokens/s", None, 0.9, 1.05),
        ("x", Target(limit=3, better="lower"), 1.05, 0.9),
        ("x", Target(limit=3, better="higher"), 0.9, 1.05),
    ],
)
def test_worse_depends_on_what_is_better(unit: str, target: Target | None, slower: float, faster: float) -> None:
    def of(value: float) -> Comparison:
        return Comparison.of([figure(1.0, unit, target)], [figure(value, unit, target)])

    assert of(slower).is_worse(0.03)
    assert not of(faster).is_worse(0.03) and not of(1.02).is_worse(0.03) and not of(0.98).is_worse(0.03)


def test_a_ratio_without_a_target_is_neither_better_nor_worse() -> None:
    assert not Comparison.of([figure(1.0, "x")], [figure(9.0, "x")]).is_worse(0.03)


def test_figures_that_some_runs_lack_are_named_and_not_compared() -> None:
    earlier, later = [report(figure(1.0), figure(1.0, name="old"))], [report(figure(2.0), figure(1.0, name="new"))]
    assert [comparison.figure.name for comparison in compare(earlier, later)] == ["time"]
    assert unmatched(earlier, later) == ["pack: new", "pack: old"]


def test_both_places_of_benchmarks_are_found(tmp_path: Path) -> None:
    old = checkout(tmp_path / "old", "vlmpack.bench", value=1.0, extra="a")
    new = checkout(tmp_path / "new", "benchmarks", value=1.0, extra="a")
    assert (module_of(old), module_of(new)) == ("vlmpack.bench", "benchmarks")
    with pytest.raises(ConfigError, match=r"has none of benchmarks, vlmpack\.bench"):
        module_of(tmp_path)


def test_checkouts_take_turns_and_the_order_changes_with_every_round(tmp_path: Path) -> None:
    old = checkout(tmp_path / "old", "vlmpack.bench", value=1.0, extra="gone")
    new = checkout(tmp_path / "new", "benchmarks", value=1.5, extra="new")
    status, text = compared(str(old), str(new), "pack", "plan", "--rounds", "2", "--out", str(tmp_path / "runs"))
    assert (tmp_path / "log").read_text().split("\n")[:-1] == [
        "old pack", "new pack", "old plan", "new plan", "new pack", "old pack", "new plan", "old plan",
    ]  # fmt: skip
    assert status == 0
    lines = [line.split() for line in text.splitlines()]
    assert ["pack:", "time", "1", "s", "1.5", "s", "1.500", "1.500", "to", "1.500", "worse"] in lines
    assert "2 of 2 figures are worse by more than 3%" in text
    assert "not compared, as some runs lack it: plan: gone" in text
    assert len(list((tmp_path / "runs").iterdir())) == 8


def test_a_check_fails_for_a_worse_figure_only(tmp_path: Path) -> None:
    old = checkout(tmp_path / "old", "vlmpack.bench", value=1.5, extra="a")
    new = checkout(tmp_path / "new", "benchmarks", value=1.0, extra="a")
    assert compared(str(old), str(new), "pack", "--rounds", "1", "--check")[0] == 0
    assert compared(str(new), str(old), "pack", "--rounds", "1", "--check")[0] == 1


def test_a_run_that_fails_is_named_with_its_last_lines(tmp_path: Path) -> None:
    old = checkout(tmp_path / "old", "benchmarks", value="None.gone", extra="a")
    status, text = compared(str(old), str(old), "pack")
    assert status == 2
    assert "-m benchmarks pack" in text and "'NoneType' object has no attribute 'gone'" in text
