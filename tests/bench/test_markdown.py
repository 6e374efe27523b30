"""Reports as one Markdown table."""

from __future__ import annotations

from vlmpack.bench import Figure, Report, Skipped, Target, markdown

SPEED = Figure(
    case="step", family="qwen3_vl", name="speed-up", value=2.071, unit="x", low=2.0, high=2.11, rounds=3,
    target=Target(limit=2.05, better="higher"),
)  # fmt: skip
SLOWER = Figure(**{**vars(SPEED), "value": 1.9, "low": 1.8, "high": 1.95})
COPY = Figure(case="pack", name="pack 8 x 4096", value=0.00031, unit="s")
WHERE = {"vlmpack": "1.2", "commit": "0123456789abcdef+", "python": "3.11", "torch": "2.13", "transformers": "5.23"}


def run(*figures: Figure, device: str = "a CPU", skipped: tuple[Skipped, ...] = ()) -> Report:
    return Report(
        figures=figures,
        environment={**WHERE, "device_name": device, "threads": 2},
        settings={"clock": "wall", "seed": 0},
        shapes={},
        skipped=skipped,
    )


def test_runs_stand_side_by_side() -> None:
    skipped = Skipped(case="attention", name="flash", why="no GPU")
    table = markdown({"before": run(COPY, SPEED), "after": run(SLOWER, device="a GPU", skipped=(skipped,))})
    assert table == (
        "| case | figure | before | after | target |\n"
        "| --- | --- | ---: | ---: | ---: |\n"
        "| pack | pack 8 x 4096 | 310 µs |  |  |\n"
        "| step qwen3_vl | speed-up | 2.07 x (2 to 2.11) | **1.9 x** (1.8 to 1.95) | ≥ 2.05 x |\n"
        "\n"
        "- before: vlmpack 1.2 (0123456789ab+), Python 3.11, torch 2.13, transformers 5.23, a CPU, 2 threads, wall "
        "clock, seed 0\n"
        "- after: vlmpack 1.2 (0123456789ab+), Python 3.11, torch 2.13, transformers 5.23, a GPU, 2 threads, wall "
        "clock, seed 0\n"
        "  - skipped: attention, flash: no GPU\n"
    )


def test_a_bar_in_a_name_does_not_end_its_cell() -> None:
    odd = Figure(case="pack", name="a | b", value=1.0, unit="x")
    assert "| a \\| b |" in markdown({"run": run(odd)})
