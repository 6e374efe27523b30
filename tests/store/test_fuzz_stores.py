"""Stores, caches and plans that accidents happened to: the same rows as before, or a refusal that is ours."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import slow
from chats import chat, picture
from mutations import check, damaged, edited, outcomes
from store.stores import encoded, store

from vlmpack.store import PackedDataset

SEED, CASES = 0, 150
every_number = pytest.mark.parametrize("cases", [CASES // 5, *slow(CASES)])


def samples(word: str = "because", seed: int = 0) -> list[dict]:
    images = [chat(f"{n}?", "yes", encoded(picture(64, 48, seed=seed + n)), id=n) for n in range(3)]
    return [*images, *(chat(f"{n}?", f"{word} " * (1 + n % 5), id=n) for n in range(12))]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The files of two stores of samples that are equally long."""
    folders = [tmp_path_factory.mktemp("store") for _ in range(2)]
    for folder, word, seed in zip(folders, ("5", "6"), (0, 9), strict=True):
        store(folder, samples(word, seed))
    one, other = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert one.keys() == other.keys() and len([name for name in one if name.startswith("rows-")]) > 1
    return one, other


def rows(folder: Path, **settings: Any) -> list[Any]:
    """All that is in a store, images included."""
    dataset = PackedDataset(folder, **settings)
    found = [[_plain(*one) for one in dataset._read(at)] for at in range(len(dataset))]
    return [
        found,
        [[one.num_tokens for one in dataset.measured(at)] for at in range(len(dataset))],
        repr(dataset.slots),
    ]


def _plain(place: int, sample: Any) -> list[Any]:
    sources = [(one.grid, one.source.options, one.source.source["bytes"]) for one in sample.images]
    return [place, sample.sample_id, sample.input_ids.tolist(), sample.labels.tolist(), sources]


def written(folder: Path, files: dict[str, bytes]) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


# ---------------------------------------------------------------------- what happens to a store


def a_damaged_file(one: dict, other: dict, rng: random.Random) -> dict:
    name = rng.choice(sorted(one))
    return {**one, name: damaged(one[name], rng)}


def a_lost_file(one: dict, other: dict, rng: random.Random) -> dict:
    name = rng.choice(sorted(one))
    return {file: data for file, data in one.items() if file != name}


def files_of_another_store(one: dict, other: dict, rng: random.Random) -> dict:
    names = rng.sample(sorted(one), rng.randrange(1, len(one)))
    return {**one, **{name: other[name] for name in names}}


def swapped_files(one: dict, other: dict, rng: random.Random) -> dict:
    first, second = rng.sample(sorted(one), 2)
    return {**one, first: one[second], second: one[first]}


def an_edited_manifest(one: dict, other: dict, rng: random.Random) -> dict:
    manifest = edited(json.loads(one["manifest.json"]), rng)
    return {**one, "manifest.json": json.dumps(manifest, default=repr).encode()}


ACCIDENTS: tuple[Callable[[dict, dict, random.Random], dict], ...] = (
    a_damaged_file,
    a_damaged_file,
    a_damaged_file,
    a_lost_file,
    files_of_another_store,
    swapped_files,
    an_edited_manifest,
    an_edited_manifest,
)


@every_number
def test_rows_of_a_damaged_store(tmp_path, files, cases):
    one, other = files
    written(tmp_path / "whole", one)
    whole = rows(tmp_path / "whole")
    written(tmp_path / "other", other)
    theirs = rows(tmp_path / "other")
    assert whole != theirs

    def case(rng: random.Random) -> bool:
        left = rng.choice(ACCIDENTS)(one, other, rng)
        written(tmp_path / "case", left)
        is_the_other = all(left.get(name) == other[name] for name in other if name.startswith(("rows-", "manifest")))
        return rows(tmp_path / "case", verify=rng.random() < 0.1) == (theirs if is_the_other else whole)

    check(outcomes(2 * cases, SEED, case), cases=2 * cases)
