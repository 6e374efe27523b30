"""What `vlmpack analyze` says about samples that begin alike."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from cli.test_analyze import analyze, numbers, table_of
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from vlmpack.cli import app
from vlmpack.cli.analyze import Analysis, Packing, print_analysis
from vlmpack.cli.prefix_savings import short
from vlmpack.errors import ConfigError
from vlmpack.plan import LengthTable, PaddedRecipe, PrefixGroups, simulate


@pytest.fixture
def questions(tmp_path: Path) -> str:
    """Three questions about each of two images of one size."""
    rows = []
    for name, colour in (("0.png", "red"), ("1.png", "blue")):
        Image.new("RGB", (256, 256), colour).save(tmp_path / name)
        for question in ("Which colour?", "How bright is it?", "What is it?"):
            parts = [{"type": "image", "image": name}, {"type": "text", "text": question}]
            rows.append([{"role": "user", "content": parts}, {"role": "assistant", "content": colour}])
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return str(path)


def test_savings_are_those_of_the_plans_with_and_without_sharing(questions: str) -> None:
    found = numbers(questions, "--capacity", "1000")["shared_prefixes"]
    assert (found["groups"], found["samples"], found["min_shared"]) == (2, 6, 64)
    (packed,) = found["packed"]
    assert packed["shared"]["patches"] * 3 == packed["plain"]["patches"]
    assert packed["shared"]["tokens"] < packed["plain"]["tokens"]
    assert packed["saved"]["patches"] == pytest.approx(2 / 3)
    assert (
        packed["saved"]["attended_pairs"] == 1 - packed["shared"]["attended_pairs"] / packed["plain"]["attended_pairs"]
    )


def test_they_are_a_table_of_eighty_columns_and_plain_lines_in_a_pipe(questions: str) -> None:
    told = analyze(questions, "--capacity", "1000").stdout
    assert "6 samples begin like others with 64 tokens or more, in 2 groups." in told
    assert [line.split() for line in told.splitlines() if line.startswith("1,000: patches")] == [
        ["1,000:", "patches", "1,536", "512", "66.7%"]
    ]
    table = LengthTable.from_rows(
        [{**dict.fromkeys(ROW, 0), "sample_ids": at, "text_tokens": 10**7 + at} for at in range(4)],
        groups=PrefixGroups(of_samples=np.zeros(4, int), parents=np.array([-1]), tokens=np.array([10**7])),
    )
    packing = Packing(capacities=(10**8,), recipe=PaddedRecipe())
    file = io.StringIO()
    analysis = Analysis(table=table, packing=packing, source="mine", min_shared=64)
    print_analysis(analysis, Console(file=file, width=80, force_terminal=True, color_system=None))
    lines = file.getvalue().split("Shared prefixes")[1].splitlines()
    assert max(map(len, lines)) <= 80
    assert any("40.0 M" in line and "10.0 M" in line and "75.0%" in line for line in lines)


ROW = ("text_tokens", "image_tokens", "video_tokens", "images", "videos", "patches", "targets")


def test_nothing_to_share_is_said_and_not_looking_is_silent(questions: str) -> None:
    assert "No samples begin alike with 500 tokens or more" in analyze(questions, "--min-shared", "500").stdout
    told = analyze(questions, "--min-shared", "0").stdout
    assert "Shared prefixes" not in told
    assert numbers(questions, "--min-shared", "0")["shared_prefixes"] is None


def test_a_table_without_groups_cannot_be_simulated_with_sharing() -> None:
    with pytest.raises(ConfigError, match=r"the table has no groups: measure_lengths\(..., min_shared=64\) finds them"):
        simulate(table_of([5, 6]), 10, share_prefixes=True)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(7, "7"), (9_999_999, "9,999,999"), (10**7, "10.0 M"), (123_456_789, "123 M"), (4 * 10**9, "4.00 G")],
)
def test_large_counts_are_short(count: int, expected: str) -> None:
    assert short(count) == expected


def test_of_audio_it_says_that_it_did_not_look(questions):
    """By default; asked for, it is refused."""
    asked = ["analyze", questions, "--processor", "tiny:qwen2_5_omni_thinker"]
    found = CliRunner().invoke(app, asked)
    assert found.exit_code == 0
    assert "Shared prefixes were not looked for" in found.stdout
    assert "Qwen2_5OmniProcessor may have audio" in found.stdout
    refused = CliRunner().invoke(app, [*asked, "--min-shared", "64"])
    assert refused.exit_code == 2
    assert "Qwen2_5OmniProcessor may have audio" in refused.output
