"""`vlmpack pack`: a store from the shell, and what it tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chats import picture
from stores import encoded
from typer.testing import CliRunner, Result

from vlmpack.cli import app
from vlmpack.rows import Manifest, PackedDataset
from vlmpack.terminal import format_bytes
from vlmpack.testing import tiny_processor


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight samples in a file of JSON lines with images beside it: one cannot be used, one is too long for a row."""
    folder = tmp_path_factory.mktemp("source")
    answers = ["yes"] * 6 + [None, "no " * 300]
    for n in range(len(answers)):
        (folder / f"{n}.png").write_bytes(encoded(picture(40 + 8 * n, 60, seed=n)))
    samples = [
        {
            "id": f"s{n}",
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": f"{n}.png"}, {"type": "text", "text": "?"}]},
                *([{"role": "assistant", "content": answer}] if answer else []),
            ],
        }
        for n, answer in enumerate(answers)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder / "samples.jsonl"


def pack(*arguments: Any) -> Result:
    """`vlmpack pack` with these arguments, in this process and on a wide terminal."""
    return CliRunner().invoke(app, ["pack", *map(str, arguments)], env={"COLUMNS": "200"})


GOOD = ("--processor", "tiny", "--capacity", 64, "--on-bad", "skip", "--max-bad-fraction", 0.5, "--overlength", "drop")


def test_it_writes_a_store_and_tells_what_is_in_it(source: Path, tmp_path: Path) -> None:
    done = pack(source, tmp_path / "rows", *GOOD)
    assert done.exit_code == 0, done.output
    assert done.stderr == ""  # no bar, and no empty line, behind a pipe
    manifest = Manifest.load(tmp_path / "rows")
    told = {line.split("  ")[0]: line for line in done.output.splitlines()}
    assert told["rows"].endswith(f" {manifest.counts.rows}")
    assert told["samples"].endswith(" 6") and told["total"].endswith(" 8")
    assert f"{manifest.fill_ratio:.2%}" in told["fill ratio"]
    assert format_bytes(manifest.bytes) in told["written"]
    for name in ("longest row", "longest segment", "most segments", "most images", "most patches"):
        assert told[name].endswith(f" {manifest.sizes.__dict__[name.replace(' ', '_')]}")
    assert "no_targets 1, overlength 1" in done.output
    assert "sample 6 (id 's6'): none of its" in done.output
    assert "sample 7 (id 's7'): it exceeds a row by itself" in done.output


@pytest.mark.parametrize("overlength", ["truncate_start", "own_row"])
def test_a_sample_that_is_too_long_may_lose_its_start_or_have_its_own_row(
    source: Path, tmp_path: Path, overlength: str
) -> None:
    assert pack(source, tmp_path / "rows", *GOOD[:-1], overlength).exit_code == 0
    manifest = Manifest.load(tmp_path / "rows")
    assert (manifest.counts.samples, manifest.counts.dropped) == (7, 0)
    assert (manifest.sizes.longest_row > 64) == (overlength == "own_row")


def test_the_plan_counts_multiples_of_slots_and_of_rows(source: Path, tmp_path: Path) -> None:
    more = ("--pad-seq-to-mult", 8, "--rows-multiple", 3, "--shard-rows", 1)
    assert pack(source, tmp_path / "rows", *GOOD, *more).exit_code == 0
    dataset = PackedDataset(tmp_path / "rows", tiny_processor())
    assert len(dataset) == len(dataset.manifest.shards) == 3
    assert all(slot % 8 == 0 for row in range(3) for slot in dataset.row(row).segments.slots)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("--on-bad", "raise"), "vlmpack: sample 6 (id 's6'): none of its"),
        (("--overlength", "error"), "vlmpack: sample 7 (id 's7'): does not fit a row of 64 tokens"),
        (("--max-pixels", 9), "vlmpack: --max-pixels 9: the processor enlarges images to"),
        (("--pad-seq-to-mult", 7), "vlmpack: a capacity of 64 tokens is no multiple of 7"),
        (("--processor", "nowhere"), "vlmpack: processor nowhere"),
    ],
)
def test_a_refusal_is_one_line(source: Path, tmp_path: Path, change: tuple[Any, ...], told: str) -> None:
    failed = pack(source, tmp_path / "rows", *GOOD, *change)
    assert failed.exit_code == 2
    assert failed.output.strip().startswith(told)


def test_a_refusal_leaves_no_data_set(source: Path, tmp_path: Path) -> None:
    assert pack(source, tmp_path / "rows", *GOOD, "--on-bad", "raise").exit_code == 2
    refused = CliRunner().invoke(app, ["analyze", str(tmp_path / "rows"), "--processor", "tiny"])
    assert refused.exit_code == 2
    assert "rows is only partly packed: `vlmpack pack` was interrupted there, or refused" in refused.stderr
