"""Stores of rows whose samples share prefixes: the tree survives, and each image of a row is written once."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from cases import slow
from chats import BEYOND, chat, of_family, picture, processor_of
from measured import encoded
from store.stores import asked, check_same, frames, packing, places, store

from vlmpack.collate import SharePrefixes, VLMCollator
from vlmpack.errors import ConfigError
from vlmpack.plan import Plan
from vlmpack.store import PackedDataset
from vlmpack.store.manifest import Manifest
from vlmpack.testing import tiny_processor

MIN_SHARED = 8
CAPACITY = 80
STORED = [family for family in BEYOND if family != "paligemma"]


def questions(images: int = 4) -> list[dict]:
    """Three questions about each image, one about a video three times, and one about nothing."""
    samples = [
        chat(question, f"{at} {image}", encoded(90, 61, seed=image), id=f"{image}-{at}")
        for image in range(images)
        for at, question in enumerate(("How much is it in all?", "Who sold it?", "When was it?"))
    ]
    film = {"type": "video", "video": frames(), "min_pixels": 2048, "max_pixels": 20000}
    return [
        *samples,
        *(asked(film, answer, id=answer) for answer in ("yes", "no", "perhaps")),
        chat("2 + 2?", "4", id="sum"),
    ]


def sharing(**settings):
    return packing(share_prefixes=SharePrefixes(min_shared=MIN_SHARED), **settings)


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shared") / "rows"
    store(folder, questions(), sharing(), capacity=CAPACITY)
    return folder


@pytest.fixture(scope="module")
def dataset(kept: Path) -> PackedDataset:
    return PackedDataset(kept, processor_of())


@pytest.mark.parametrize("capacity", [CAPACITY, 20 * CAPACITY])
def test_a_stored_row_has_the_tree_that_the_collator_finds(tmp_path: Path, capacity: int):
    """Also all samples in one row, each with its own of several images; trees are read without a processor."""
    samples, collator = questions(), sharing()
    store(tmp_path, samples, collator, capacity=capacity)
    dataset, outlined = PackedDataset(tmp_path, processor_of()), PackedDataset(tmp_path)
    rows = places(dataset)
    assert sorted(place for row in rows for place in row) == list(range(len(samples)))
    trees = []
    for at, row in enumerate(rows):
        expected = collator.collate([samples[place] for place in row])
        check_same(dataset.row(at), expected)
        assert dataset.row(at).tree == outlined.tree(at) == expected.tree
        trees.append(expected.tree)
    if capacity == CAPACITY:
        assert sum(tree is not None for tree in trees) >= 4
    else:
        assert len(trees) == 1 and len(trees[0].images) == 4
    assert "vlmpack" in dataset[0]


@pytest.mark.parametrize("sharing", [False, SharePrefixes(min_shared=MIN_SHARED)], ids=["apart", "shared"])
@pytest.mark.parametrize("family", ["llava_onevision", *slow(*STORED[1::2])])
def test_rows_of_every_family_with_a_processor_are_stored(family: str, sharing: SharePrefixes | bool, tmp_path: Path):
    first, second = encoded(190, 61, seed=0), encoded(90, 61, seed=1)
    about = (first,), (second,), (first, second)
    questions_of = [
        of_family(family, question, "5", *images) for images in about for question in ("Total?", "Who is it?")
    ]
    samples = [{**sample, "id": f"{at}"} for at, sample in enumerate(questions_of)]
    collator = VLMCollator(tiny_processor(family), layout="packed", share_prefixes=sharing)
    total = sum(collator.measure(sample).num_tokens for sample in samples)
    store(tmp_path / "rows", samples, collator, capacity=total * 2 // 3)
    dataset = PackedDataset(tmp_path / "rows", collator.processor)
    assert sorted(place for row in places(dataset) for place in row) == list(range(len(samples)))
    for at, row in enumerate(places(dataset)):
        expected = collator.collate([samples[place] for place in row])
        check_same(dataset.row(at), expected)
        assert dataset.row(at).tree == dataset.tree(at) == expected.tree


def test_a_store_of_another_processor_of_such_a_family_is_refused(tmp_path: Path):
    collator = VLMCollator(tiny_processor("internvl"), layout="packed")
    store(tmp_path / "rows", [of_family("internvl", "Total?", "5", encoded(90, 61))], collator, capacity=500)
    other = tiny_processor("internvl")
    other.image_processor.max_patches = 2
    with pytest.raises(ConfigError, match=r"another processor: images\.settings was"):
        PackedDataset(tmp_path / "rows", other)


def test_prompts_that_see_all_of_themselves_are_not_stored(tmp_path: Path):
    sample = of_family("paligemma", "Total?", "5", picture(90, 61))
    with pytest.raises(ConfigError, match="the prompts of a PaliGemmaProcessor see all of themselves, and stored rows"):
        store(tmp_path, [sample], VLMCollator(tiny_processor("paligemma"), layout="packed"))


def test_rows_compute_what_was_planned(dataset: PackedDataset, kept: Path):
    plan = Plan.load(kept / "plan.zip")
    assert plan.groups is not None and plan.tree_tokens.max() <= CAPACITY < plan.tokens.max()
    for at, planned in enumerate(plan.tree_tokens.tolist()):
        tree = dataset.row(at).tree
        assert (planned if tree is None else tree.num_tokens) <= planned
    assert dataset.plan.lengths.tolist() == plan.tree_tokens.tolist()
    assert 0 < dataset.manifest.fill_ratio <= 1
    plain = sum(
        int(torch.as_tensor(each.grid).prod())
        for row in range(len(dataset))
        for s in dataset.measured(row)
        for each in (*s.images, *s.videos)
    )
    assert dataset.manifest.counts.patches < plain / 2


def test_each_image_of_a_row_is_written_once(kept: Path):
    written = 0
    for file in sorted(kept.glob("*.parquet")):
        for row in pyarrow.parquet.read_table(file).to_pylist():
            assert len(row["image_info"]) == len(row["image_numbers"]) >= len(row["images"])
            assert len({image["bytes"] for image in row["images"]}) == len(row["images"])
            written += len(row["images"]) + len(row["videos"])
    assert 5 <= written <= 7


def test_a_store_that_shares_is_another_than_one_that_does_not(kept: Path):
    with pytest.raises(ConfigError, match=r"share_prefixes\.min_shared was 8 and is 9"):
        store(kept, questions(), packing(share_prefixes=SharePrefixes(min_shared=9)), capacity=CAPACITY)
    with pytest.raises(ConfigError, match=r"share_prefixes was .*is null"):
        store(kept, questions(), packing(), capacity=CAPACITY)
    assert store(kept, questions(), sharing(), capacity=CAPACITY) == Manifest.load(kept)


def test_rows_that_share_have_no_fixed_size(kept: Path):
    with pytest.raises(ConfigError, match=r"the rows share prefixes: .*Leave pad_to_max_length"):
        PackedDataset(kept, processor_of(), pad_to_max_length=True)
    with pytest.raises(ConfigError, match="share_prefixes: decided when the rows were packed"):
        PackedDataset(kept, processor_of(), share_prefixes=False)
