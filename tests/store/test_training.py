"""Training on stored rows: each equals its samples alone, and HF Trainer takes them as they are."""

from __future__ import annotations

import pytest
import torch
from chats import chat, picture, processor_of
from store.stores import mixed, store, texts
from training import arguments
from transformers import Trainer

from vlmpack.model import enable_packing
from vlmpack.store import PackedDataset
from vlmpack.testing import tiny_model


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A store of seven rows and more, and its samples."""
    folder = tmp_path_factory.mktemp("kept")
    images = [chat(f"{n}?", "yes, " * (n + 1), picture(40 + n, 60, seed=n), id=f"image-{n}") for n in range(9)]
    samples = [*mixed(), *texts(), *images]
    manifest = store(folder, samples, rows_multiple=2)
    assert manifest.counts.rows >= 8 and manifest.counts.rows % 2 == 0
    return folder, samples


class Noting:
    """A data set that keeps which rows were asked for."""

    def __init__(self, dataset):
        self.dataset, self.asked = dataset, []

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, row):
        self.asked.append(row)
        return self.dataset[row]


def trainer(kept, folder, **settings):
    """Two epochs of a plain Trainer over all rows."""
    dataset = Noting(PackedDataset(kept[0], processor_of()))
    epochs = {"num_train_epochs": 2, "max_steps": -1, "per_device_train_batch_size": 1, "learning_rate": 0.01}
    model = enable_packing(tiny_model("qwen3_vl", processor=processor_of(), layers=1, vision_depth=1))
    made = arguments(folder, **{**epochs, **settings})
    return Trainer(model=model, args=made, train_dataset=dataset, data_collator=dataset.dataset.collate)


def test_trainer_goes_through_every_row_in_another_order_each_epoch_and_continues_exactly(kept, tmp_path):
    rows = len(PackedDataset(kept[0]))
    stop_at = rows + 3  # inside the second epoch
    whole = trainer(kept, tmp_path, save_strategy="steps", save_steps=stop_at)
    whole.train()
    asked = whole.train_dataset.asked
    assert whole.state.global_step == 2 * rows
    assert sorted(asked[:rows]) == sorted(asked[rows:]) == list(range(rows))
    assert asked[:rows] != asked[rows:]
    resumed = trainer(kept, tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop_at}"))
    assert resumed.train_dataset.asked == asked[stop_at:]  # and nothing else was read
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
