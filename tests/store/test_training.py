"""Training on stored rows: each equals its samples alone, and HF Trainer takes them as they are."""

from __future__ import annotations

import pytest
import torch
from chats import chat, picture, processor_of
from equality import ATTENTION, alone_through, check_gradients, gradients
from store.stores import mixed, places, store, texts
from training import arguments
from transformers import Trainer

from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError
from vlmpack.model import PackedStep, disable_packing, enable_packing
from vlmpack.store import PackedDataset
from vlmpack.testing import tiny_model

TOKENS = ("input_ids", "labels", "mm_token_type_ids")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A store of seven rows and more, and its samples."""
    folder = tmp_path_factory.mktemp("kept")
    images = [chat(f"{n}?", "yes, " * (n + 1), picture(40 + n, 60, seed=n), id=f"image-{n}") for n in range(9)]
    samples = [*mixed(), *texts(), *images]
    manifest = store(folder, samples, rows_multiple=2)
    assert manifest.counts.rows >= 8 and manifest.counts.rows % 2 == 0
    return folder, samples


def model_of(**settings):
    return tiny_model("qwen3_vl", processor=processor_of(), **settings)


def single(sample):
    """What one sample is to a model, alone."""
    batch = VLMCollator(processor_of()).collate([sample]).to_hf()
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return {name: value[0] if name in TOKENS else value for name, value in tensors.items() if name != "attention_mask"}


@pytest.mark.parametrize("fixed", [{}, {"pad_to_max_length": True, "pad_cu_seqlens": True}], ids=["plain", "fixed"])
def test_loss_and_gradients_of_stored_rows_are_those_of_the_samples_alone(kept, fixed):
    folder, samples = kept
    dataset, model = PackedDataset(folder, processor_of(), **fixed), model_of()
    rows = places(dataset)
    chosen = sorted(range(len(rows)), key=lambda at: -len(rows[at]))[:1] + [
        at for at, row in enumerate(rows) if 4 in row
    ]
    for at in chosen:  # the row of most samples, and one with a video
        truth = alone_through(model, [single(samples[place]) for place in rows[at]])
        loss = enable_packing(model)(**dataset[at]).loss
        loss.backward()
        assert torch.isclose(loss, truth.loss, rtol=ATTENTION.loss, atol=0)
        check_gradients(truth, gradients(model), ATTENTION)
        model.zero_grad()
        disable_packing(model)
    assert max(len(rows[at]) for at in chosen) > 2  # the guard: samples share rows


def test_a_row_is_an_object_for_loops_of_ones_own(kept):
    dataset = PackedDataset(kept[0], processor_of())
    result = PackedStep(model_of())(dataset.row(0))
    assert result.num_targets == dataset.row(0).metadata.num_targets > 0


# ---------------------------------------------------------------------- HF Trainer


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
    model = enable_packing(model_of(layers=1, vision_depth=1))
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


def test_ranks_share_the_rows_and_take_as_many_steps(kept):
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler, SequentialSampler

    dataset = PackedDataset(kept[0])
    batches = BatchSampler(SequentialSampler(dataset), batch_size=1, drop_last=False)
    ranks = [[row for (row,) in BatchSamplerShard(batches, num_processes=2, process_index=rank)] for rank in (0, 1)]
    assert len(ranks[0]) == len(ranks[1])
    assert sorted(ranks[0] + ranks[1]) == list(range(len(dataset)))  # none twice


def test_a_batch_of_two_rows_is_refused_before_the_first_step(kept, tmp_path):
    with pytest.raises(ConfigError, match="per_device_train_batch_size=1"):
        trainer(kept, tmp_path, per_device_train_batch_size=2).train()
