"""What would corrupt packed rows while nobody looks is refused in the step itself, with the remedy.

None of these needs `check_trainer`: each error comes out of `Trainer.train` or the model's forward.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import concatenate, slice_tensors
from chats import chat, picture, processor_of
from datasets import Dataset
from training import (
    LAYOUTS,
    Samples,
    Stream,
    arguments,
    checkpointing,
    collator,
    descend,
    distance,
    gradients,
    receipts,
    train,
    trainer,
)
from transformers import Trainer

from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError, LayoutError
from vlmpack.model import disable_packing, enable_packing
from vlmpack.store import PackedDataset, StoreSettings, write_rows
from vlmpack.testing import tiny_model


@pytest.fixture
def model():
    return enable_packing(tiny_model())


# ---------------------------------------------------------------------- columns


@dataclass
class Chats(torch.utils.data.Dataset):
    rows: list[dict[str, Any]]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def test_columns_that_trainer_removed_before_the_collator(tmp_path):
    processor = processor_of()
    model = enable_packing(tiny_model(processor=processor))
    rows = Chats([chat("q", "a", picture()), chat()])
    for remove, is_refused in ((True, True), (False, False)):
        args = arguments(tmp_path, remove_unused_columns=remove, max_steps=1)
        run = Trainer(model, args, VLMCollator(processor, layout="packed"), rows)
        if is_refused:
            with pytest.raises(ConfigError, match=r"it has: none at all.*remove_unused_columns=False"):
                run.train()
        else:
            run.train()


def test_columns_of_a_hub_dataset_are_trainers_own_refusal(tmp_path):
    model = enable_packing(tiny_model(processor=processor_of()))
    rows = Dataset.from_dict({"image": ["a.png", "b.png"], "messages": ["a", "b"]})
    args = arguments(tmp_path, remove_unused_columns=True)
    with pytest.raises(ValueError, match="remove_unused_columns=False"):
        Trainer(model, args, VLMCollator(processor_of(), layout="packed"), rows).train()


def test_rows_written_before_keep_their_boundaries_under_trainers_default(tmp_path):
    collate = VLMCollator(processor_of(), layout="packed")
    samples = [chat(answer=f"The total is {n}", id=n) for n in range(4)]
    write_rows(samples, tmp_path / "rows", collate, StoreSettings(capacity=60))
    rows = PackedDataset(tmp_path / "rows", processor_of())
    model = enable_packing(tiny_model(processor=processor_of()))
    run = Trainer(model, arguments(tmp_path, per_device_train_batch_size=1), rows.collate, rows)
    assert run.args.remove_unused_columns
    batch = next(iter(run.get_train_dataloader()))
    at = next(at for at in range(len(rows)) if torch.equal(rows[at]["input_ids"], batch["input_ids"]))
    assert len(rows) > 1 and rows.segments(at).num_samples > 1
    assert model(**batch).loss == model(**rows[at]).loss


# ---------------------------------------------------------------------- batches cut up on their way


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stream_under_accelerates_default(layout, model, tmp_path):
    """Accelerate cuts every batch to as many rows as its first tensor has: one, for a packed row with its images."""
    samples = receipts(model)
    args = arguments(tmp_path, per_device_train_batch_size=3, max_steps=2)
    run = Trainer(model, args, collator(layout), Stream(samples))
    assert run.accelerator.dispatch_batches is None
    with pytest.raises(LayoutError, match=r"was the batch split.*dispatch_batches=False"):
        run.train()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stream_with_dispatch_batches_off_is_right(layout, model, tmp_path):
    samples = receipts(model)
    expected = descend(tiny_model(), samples, size=3, steps=2)
    config = {"per_device_train_batch_size": 3, "accelerator_config": {"dispatch_batches": False}}
    run = Trainer(model, arguments(tmp_path, **config), collator(layout), Stream(samples))
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses == pytest.approx(expected.losses, rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_batch_cut_for_two_ranks(layout, rank, model):
    """What DataLoaderDispatcher and nn.DataParallel do to a batch of four samples: rows cut in two, metadata kept."""
    batch = collator(layout)(receipts(model)[:4])
    half = max(len(batch["input_ids"]) // 2, 1)
    with pytest.raises(LayoutError, match="dispatch_batches=False"):
        model(**slice_tensors(batch, slice(rank * half, (rank + 1) * half)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_of_two_ranks_concatenated(layout, model):
    """With host metadata accelerate itself stops; without, two rows of one width become one batch of two rows."""
    batches = [collator(layout)(receipts(model)[:3]) for _ in range(2)]
    with pytest.raises(TypeError, match="HostMetadata"):
        concatenate(batches)
    bare = [{name: x for name, x in batch.items() if isinstance(x, torch.Tensor)} for batch in batches]
    if layout == "packed":
        with pytest.raises(LayoutError, match="dispatch_batches=False"):
            model(**concatenate(bare))
    else:  # a padded batch of twice as many rows is a padded batch
        once = model(**batches[0]).loss
        torch.testing.assert_close(model(**concatenate(bare)).loss, once)


# ---------------------------------------------------------------------- labels kept back


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("evaluate", [False, True])
def test_label_smoothing(layout, evaluate, model, tmp_path):
    run = trainer(model, receipts(model), tmp_path, layout, label_smoothing_factor=0.1)
    with pytest.raises(ConfigError, match=r"labels were kept back.*label_smoothing_factor.*set it to 0"):
        run.evaluate() if evaluate else run.train()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_noise_that_depends_on_the_width_of_a_row(layout, model, tmp_path):
    run = trainer(model, receipts(model), tmp_path, layout, neftune_noise_alpha=5.0)
    with pytest.raises(ConfigError, match=r"neftune_noise_alpha .* a packed sample would get less .* leave it out"):
        run.train()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_function_of_ones_own_has_to_ask_for_logits(layout, model, tmp_path):
    def loss_func(outputs, labels, num_items_in_batch=None):
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

    samples = receipts(model)
    expected = descend(tiny_model(), samples, size=4, steps=1)
    for more, is_refused in (({}, True), ({"output_logits": True}, False)):
        args = arguments(tmp_path, max_steps=1, gradient_accumulation_steps=2, train_sampling_strategy="sequential")
        run = Trainer(model, args, collator(layout, **more), Samples(samples), compute_loss_func=loss_func)
        if is_refused:
            with pytest.raises(ConfigError, match=r"compute_loss_func.*output_logits=True"):
                run.train()
        else:
            run.train()
            assert run.state.log_history[0]["loss"] == pytest.approx(expected.losses[0], rel=1e-6)


# ---------------------------------------------------------------------- ways past the packed forward


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_forward_that_was_replaced(layout, model, tmp_path):
    """As Liger's fused cross-entropy does when training starts."""
    run = trainer(model, receipts(model), tmp_path, layout)
    model.forward = types.MethodType(type(tiny_model()).forward, model)
    with pytest.raises(ConfigError, match=r"without passing through the packed forward.*Liger's"):
        run.train()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_backbone_that_is_called_directly(layout, model):
    """As TRL's fused head does."""
    batch = collator(layout)(receipts(model)[:3])
    batch.pop("labels")
    with pytest.raises(ConfigError, match=r"its backbone called directly.*TRL's fused head"):
        model.model(**batch)


def test_packing_that_would_never_be_asked():
    model = tiny_model()
    model.forward = types.MethodType(type(model).forward, model)
    with pytest.raises(ConfigError, match=r"was replaced on the object itself.*accelerate: enable packing before"):
        enable_packing(model)
    del model.forward
    enable_packing(model)


def test_a_class_that_changed_again_cannot_be_disabled(model):
    own = type(model)
    model.__class__ = type(f"FSDP{own.__name__}", (own,), {})  # as fully_shard does
    row = collator("packed")(receipts(model)[:3])
    loss = model(**row).loss
    with pytest.raises(ConfigError, match="call disable_packing before sharding"):
        disable_packing(model)
    assert torch.equal(model(**row).loss, loss), "the refusal left it half undone"


@pytest.mark.parametrize(
    "name", ["cu_seq_lens_q", "max_length_q", "cu_seqlens", "seq_idx", "rope_cu_seqlens", "moe_padding_mask"]
)
def test_boundaries_under_a_name_that_would_be_ignored(name, model):
    row = collator("packed")(receipts(model)[:3])
    boundaries = row["cu_seqlens_q"]
    stock = {key: row[key] for key in ("input_ids", "labels", "mm_token_type_ids", "pixel_values", "image_grid_thw")}
    with pytest.raises(ConfigError, match=f"{name} would be ignored and the samples of the row mixed.*cu_seqlens_q"):
        model(**stock, **{name: boundaries})
    torch.testing.assert_close(model(**stock, cu_seqlens_q=boundaries).loss, model(**row).loss)


def test_a_padded_batch_that_lost_its_mask(model):
    batch = collator("padded")(receipts(model)[:3])
    batch.pop("attention_mask")
    with pytest.raises(LayoutError, match=r"without its attention_mask.*keep the 2D mask"):
        model(**batch)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_that_say_nothing_of_images(layout, model):
    batch = collator(layout)(receipts(model)[:3])
    flat = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    with pytest.raises(LayoutError, match=r"position_ids is \[1, \d+\].*images lose their places"):
        model(**batch, position_ids=flat)


# ---------------------------------------------------------------------- and all of them together are not in the way


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
def test_nothing_is_refused_that_is_right(model, tmp_path):
    """Checkpointing, accumulation, columns and cache at Trainer's defaults."""
    samples = receipts(model)
    expected = descend(tiny_model(), samples, size=4, steps=1)
    run = train(model, samples, tmp_path, max_steps=1, gradient_accumulation_steps=2, **checkpointing())
    assert run.losses == pytest.approx(expected.losses, rel=1e-6)
    assert distance(expected.gradients[0], run.gradients[0]) < 1e-5
    assert gradients(model) == {}
