"""Arguments of a wrong kind are refused where they are given, with what to give instead; a store tells what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from chats import processor_of
from store.stores import CAPACITY, packing, store, texts

from vlmpack.errors import ConfigError
from vlmpack.store import PackedDataset, StoreSettings, measure_lengths, write_rows

SETTINGS = StoreSettings(capacity=CAPACITY)
OPEN = r"'.*chats\.jsonl' is a path: open it with vlmpack\.data\.open_dataset\(path\)"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    store(folder, texts())
    return folder


SPLITS = "not a dict with the keys 'train', 'test'; if they are splits, give one of them"


@pytest.mark.parametrize(
    ("data", "message"),
    [("chats.jsonl", OPEN), (Path("chats.jsonl"), OPEN), ({"train": texts(), "test": texts()}, SPLITS)],
)
def test_a_path_or_several_splits_are_no_data_set(tmp_path, data, message):
    with pytest.raises(ConfigError, match=message):
        measure_lengths(data, packing())
    with pytest.raises(ConfigError, match=message):
        write_rows(data, tmp_path / "rows", packing(), SETTINGS)
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize(
    ("collator", "settings", "message"),
    [
        (
            processor_of,
            SETTINGS,
            r"collator has to be a VLMCollator, such as VLMCollator\(processor, layout=\"packed\"\)",
        ),
        (packing, 1500, r"settings has to be a StoreSettings, such as StoreSettings\(capacity=4096\), got a int"),
        (packing, {"capacity": 1500}, "settings has to be a StoreSettings, .* got a dict"),
    ],
)
def test_rows_are_written_by_a_collator_and_settings(tmp_path, collator, settings, message):
    with pytest.raises(ConfigError, match=message):
        write_rows(texts(), tmp_path / "rows", collator(), settings)
    assert not (tmp_path / "rows").exists()


def test_a_store_is_opened_by_its_folder_and_a_processor(kept):
    with pytest.raises(ConfigError, match="path has to be the folder that write_rows wrote, got a list"):
        PackedDataset(texts(), processor_of())
    with pytest.raises(ConfigError, match=r"give PackedDataset\(path, collator\.processor\)"):
        PackedDataset(kept, packing())


# ---------------------------------------------------------------------- which row


@pytest.mark.parametrize("rows", [slice(0, 2), slice(None, None, -2), slice(4, 99), slice(3, 3)])
def test_a_slice_is_a_list_of_rows(kept, rows):
    dataset = PackedDataset(kept, processor_of())
    several = dataset[rows]
    each = [dataset[at] for at in range(len(dataset))][rows]
    assert len(several) == len(each)
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(several, each, strict=True))


@pytest.mark.parametrize("name", ["input_ids", 1.0, None, (0, 1)])
def test_a_row_has_a_number_of_those_that_there_are_and_no_name(kept, name):
    dataset = PackedDataset(kept, processor_of())
    assert torch.equal(dataset[-1]["input_ids"], dataset[len(dataset) - 1]["input_ids"])
    for at in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match=f"row {at} of {len(dataset)}"):
            dataset.measured(at)
    for ask in (dataset.__getitem__, dataset.row, dataset.measured, dataset.segments):
        with pytest.raises(TypeError, match=r"rows of a store have numbers, got the .* a row is dataset\[0\]"):
            ask(name)
