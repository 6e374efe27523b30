"""Data sets mixed by weights: counted, in every stretch alike, each sample once a pass, and the same again."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from chats import chat, processor_of
from torch.utils.data import DataLoader

from vlmpack.collate import VLMCollator
from vlmpack.data import hold_out, mix_datasets
from vlmpack.errors import ConfigError, SampleError


def samples(name: str, num: int) -> list[dict[str, Any]]:
    return [{"id": f"{name}{at}", "prompt": "a " * (1 + at % 5), "completion": "b"} for at in range(num)]


DATASETS = {"many": samples("m", 97), "few": samples("f", 13)}


def test_without_weights_every_sample_comes_once() -> None:
    mix = mix_datasets(DATASETS)
    assert sorted(sample["id"] for sample in mix) == sorted(
        f"{name}/{sample['id']}" for name, dataset in DATASETS.items() for sample in dataset
    )


def test_every_stretch_has_each_data_sets_share() -> None:
    mix = mix_datasets(DATASETS, {"many": 3, "few": 2}, num=500)
    assert mix.counts == {"many": 300, "few": 200}
    are_few = np.asarray([sample["id"].startswith("few/") for sample in mix])
    for length in (5, 17, 100):
        for start in range(0, 500 - length, 7):
            assert abs(are_few[start : start + length].sum() - length * 0.4) <= 1


def test_a_sample_comes_once_a_pass_and_passes_are_counted() -> None:
    mix = mix_datasets(DATASETS, {"many": 1, "few": 1}, num=78)
    times = Counter(sample["id"] for sample in mix)
    assert {times[f"few/f{at}"] for at in range(13)} == {3}
    assert max(times[f"many/m{at}"] for at in range(97)) == 1
    assert mix.passes == {"many": 39 / 97, "few": 3.0}
    few = [sample["id"] for sample in mix if sample["id"].startswith("few/")]
    assert sorted(few[:13]) == sorted(few[13:26])
    assert few[:13] != few[13:26]  # each pass in an order of its own
    assert repr(mix) == "MixedDataset(78 samples: 39 of many (0.40 passes), 39 of few (3.00 passes))"


def test_samples_that_are_held_out_come_in_no_other_pass() -> None:
    mix = mix_datasets(DATASETS, {"many": 1, "few": 1}, num=78)
    train, held_out = hold_out(mix, 3)
    ids = {sample["id"] for sample in held_out}
    assert [sample["id"] for sample in train] == [sample["id"] for sample in mix if sample["id"] not in ids]
    assert len(ids) == len(held_out) == 3 and len(train) < 75
    again, more = hold_out(DATASETS["few"], 0.2)
    assert len(more) == 3 and sorted([*again.indices, *more.indices]) == list(range(13))  # rounded up
    for size in (13, 1.5):
        with pytest.raises(ConfigError, match=f"{size} samples cannot be held out of 13"):
            hold_out(DATASETS["few"], size)
    with pytest.raises(ConfigError, match="nan samples cannot be held out"):
        hold_out(DATASETS["few"], float("nan"))
    with pytest.raises(ConfigError, match="are the whole mix; hold out fewer"):
        hold_out(mix_datasets({"one": [1], "other": [2]}, num=40), 30)


@pytest.mark.parametrize(("strategy", "few", "many"), [("first_exhausted", 13, 39), ("all_exhausted", 33, 97)])
def test_an_epoch_ends_before_a_sample_comes_twice_or_when_all_came(strategy: Any, few: int, many: int) -> None:
    counts = mix_datasets(DATASETS, {"many": 3, "few": 1}, stopping_strategy=strategy).counts
    assert abs(counts["few"] - few) <= 1
    assert abs(counts["many"] - many) <= 3
    assert (counts["few"] <= 13 and counts["many"] <= 97) is (strategy == "first_exhausted")
    assert (counts["many"] == 97) is (strategy == "all_exhausted")


def test_a_seed_fixes_the_order_and_another_changes_it() -> None:
    def ids(seed: int | None) -> list[str]:
        return [sample["id"] for sample in mix_datasets(DATASETS, seed=seed)]

    assert ids(1) == ids(1) != ids(2)
    assert [name for name in ids(None) if name.startswith("few/")] == [f"few/f{at}" for at in range(13)]
    assert [sample["id"] for sample in pickle.loads(pickle.dumps(mix_datasets(DATASETS, seed=1)))] == ids(1)


def test_epochs_are_pieces_of_one_endless_mix() -> None:
    weights = {"many": 0.7, "few": 0.3}
    whole = mix_datasets(DATASETS, weights, num=40 * 17)
    pieces = mix_datasets(DATASETS, weights, num=17)
    ids = [sample["id"] for epoch in range(40) for sample in pieces.at_epoch(epoch)]
    assert ids == [sample["id"] for sample in whole]


class Broken(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        if index == 3:
            raise SampleError("its row is torn", index=3, reason="row_unreadable")
        return super().__getitem__(index)


def test_a_collator_tells_the_data_set_of_each_sample() -> None:
    mix = mix_datasets({"receipts": [chat("?", str(n)) for n in range(3)], "chats": [chat("?", "no")]}, seed=None)
    for collator in (VLMCollator(processor_of()), VLMCollator(processor_of(), layout="packed")):
        for batch in (collator.collate(list(mix)), collator.decode([collator.measure(sample) for sample in mix])):
            assert [*batch.metadata.channels] == [name.split("/")[0] for name in batch.metadata.sample_ids]
            assert Counter(batch.metadata.channels) == {"receipts": 3, "chats": 1}
        assert collator.collate([chat()]).metadata.channels == ()


def test_a_sample_that_cannot_be_read_is_named_by_its_data_set() -> None:
    mix = mix_datasets({"many": Broken(samples("m", 5)), "few": samples("f", 2)}, seed=None)
    place = next(at for at in range(len(mix)) if at and mix._places[1][at] == 3)
    with pytest.raises(SampleError, match="sample 3 of many: its row is torn") as caught:
        mix[place]
    assert (caught.value.index, caught.value.sample_id) == (place, "many/3")
    loaded = next(iter(DataLoader(mix, batch_size=len(mix), collate_fn=list)))
    assert [type(sample).__name__ for sample in loaded].count("SampleError") == 1


@pytest.mark.parametrize(
    ("datasets", "settings", "expected"),
    [
        ({}, {}, "takes datasets by name"),
        ([[1]], {}, "takes datasets by name"),
        ({"a": []}, {}, "'a' of the mix is a list without samples"),
        ({"a": "a.jsonl"}, {}, "'a' of the mix is a str without samples"),
        ({"a": [1]}, {"weights": {"b": 1}}, "weights are of b, but the datasets are a"),
        ({"a": [1]}, {"weights": {"a": 0}}, "the weight of 'a' is 0"),
        ({"a": [1]}, {"num": 0}, "num is 0"),
        ({"a": [1]}, {"stopping_strategy": "never"}, "stopping_strategy"),
    ],
)
def test_what_is_no_mix_is_refused(datasets: Any, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        mix_datasets(datasets, **settings)
