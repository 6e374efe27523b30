"""Check TRL's trainers: a loss that goes past the packed forward, and settings that nothing reads.

TRL patches the model's forward with a fused head, which calls the backbone itself, by its own `compute_loss`. The
trainers of `vlmpack.trainer.trl` pack these calls. A subclass with Trainer's `compute_loss` leaves the model's forward
as it was, and TRL's settings of the loss unread. A collator of ours leaves those of TRL's collator unread. TRL is not
imported: its classes are recognised by module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer

from vlmpack.collate.collator import VLMCollator
from vlmpack.errors import SampleError
from vlmpack.interop.seqpacker import RowCollator

DEFAULTS: Mapping[str, Any] = {
    "max_length": 1024,
    "completion_only_loss": None,
    "assistant_only_loss": False,
    "truncation_mode": "keep_start",
    "packing": False,
    "eval_packing": None,
    "padding_free": False,
    "pad_to_multiple_of": None,
    "dataset_text_field": "text",
    "shuffle_dataset": False,
}
"""Settings that TRL's collator or its preparation of text would read; images are not prepared."""


def check_loss(trainer: Trainer) -> Iterator[str]:
    """Yield what TRL's own loss does, if the trainer computes it past the packed forward."""
    if (owner := loss_of_trl(trainer)) is None or packs_backbone(trainer):
        return
    packed = next((name for name in PACKED if name in {klass.__name__ for klass in type(trainer).__mro__}), None)
    remedy = (
        f"from vlmpack.trainer.trl import Packed{packed}, which takes the same arguments"
        if packed
        else "nothing of it is packed, so leave enable_packing out; for a loop of your own, "
        "PackedStep(model)(row).logprobs has the log-probabilities of each sample"
    )
    yield (
        f"TRL's {owner} computes the loss itself, from the model's backbone, past its packed forward: packed rows are "
        f"refused in the first step, and padded batches are computed with all their padding; {remedy}"
    )


PACKED = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")
"""Trainers of TRL that `vlmpack.trainer.trl` has on packed rows."""


def loss_of_trl(trainer: Trainer) -> str | None:
    """Return the class of TRL whose `compute_loss` the trainer's calls; None: Trainer's own comes first."""
    for klass in type(trainer).__mro__:
        method = vars(klass).get("compute_loss")
        if method is Trainer.compute_loss:
            return None
        if method is not None and method.__module__.partition(".")[0] == "trl":
            return klass.__name__
    return None


def packs_backbone(trainer: Trainer) -> bool:
    """Return whether the trainer is one of `vlmpack.trainer.trl`, which packs the backbone's calls."""
    return any(klass.__module__ == "vlmpack.trainer.trl" for klass in type(trainer).__mro__)


def check_settings(trainer: Trainer) -> Iterator[str]:
    """Yield the settings of TRL's `SFTConfig` that were set, and that neither the collator nor the loss reads."""
    settings, collator = vars(trainer.args), trainer.data_collator
    has_loss_of_trl = loss_of_trl(trainer) is not None
    if has_loss_of_trl and not packs_backbone(trainer):
        return
    unread = []
    if not has_loss_of_trl and settings.get("loss_type", "nll") != "nll":
        unread.append(f"loss_type={settings['loss_type']!r} (the model's own loss is computed, cross-entropy)")
    if isinstance(collator, VLMCollator | RowCollator) and not _is_prepared(trainer):
        read = _read_by(collator)
        for name in [name for name, default in DEFAULTS.items() if settings.get(name, default) != default]:
            value, instead = read.get(name, (DEFAULTS[name], ""))
            if settings[name] != value:
                unread.append(f"{name}={settings[name]!r}{instead}")
    if unread:
        yield (
            f"it has settings that nothing reads: {'; '.join(unread)}: leave them out of its arguments, and set them "
            "on the collator"
        )


def check_packing(trainer: Trainer) -> Iterator[str]:
    """Yield what becomes of rows that TRL packs itself, of text: they come with other boundaries, or with none."""
    settings, of_trl = vars(trainer.args), vars(trainer)
    has_other_loss = loss_of_trl(trainer) is not None and not packs_backbone(trainer)
    is_ours = isinstance(trainer.data_collator, VLMCollator | RowCollator)
    if is_ours or has_other_loss or of_trl.get("_skip_prepare_dataset") is not False:
        return
    packing, flattened = settings.get("packing", False), of_trl.get("padding_free", False)
    if flattened:
        yield (
            f"{'packing' if packing else 'padding_free'}=True has TRL lay samples out in rows, which an enabled model "
            "does not take from TRL's collator: leave it out, and each batch of per_device_train_batch_size samples is "
            "one packed row"
        )
    if packing and settings.get("packing_strategy") == "wrapped":
        yield (
            "packing_strategy='wrapped' cuts samples in two, and trains on what shares a row as on one sample: leave "
            "packing out"
        )
    elif settings.get("eval_packing") and not flattened:
        yield (
            "eval_packing=True evaluates what shares a row as one sample, so eval_loss is not that of the samples: set "
            "it to False"
        )
    elif not flattened and any(map(_has_several, (trainer.train_dataset, *_evaluation_sets(trainer)))):
        yield (
            "its rows hold several samples (seq_lengths), and TRL's collator makes one sample of each: "
            "data_collator=RowCollator(), of vlmpack.interop.seqpacker"
        )


def _read_by(collator: VLMCollator | RowCollator) -> dict[str, tuple[Any, str]]:
    """Return the settings that a collator has too: (the value that agrees with its own, its own in words)."""
    if not isinstance(collator, VLMCollator):
        return {}
    trains_on = (collator.train_on == "assistant", f" (the collator has train_on={collator.train_on!r})")
    length = (collator.max_length, f" (the collator's is {collator.max_length})")
    return {"max_length": length, "completion_only_loss": trains_on, "assistant_only_loss": trains_on}


def _is_prepared(trainer: Trainer) -> bool:
    """Return whether TRL prepared the samples, which reads its settings; it does not where there are images."""
    skips = vars(trainer).get("_skip_prepare_dataset")
    return "input_ids" in (first_sample(trainer) or ()) if skips is None else not skips


def _evaluation_sets(trainer: Trainer) -> list[Any]:
    sets = trainer.eval_dataset
    return [*sets.values()] if isinstance(sets, dict) else [sets]


def _has_several(dataset: Any) -> bool:
    """Return whether the first row of a data set has several samples."""
    return len((_first_of(dataset) or {}).get("seq_lengths") or ()) > 1


def first_sample(trainer: Trainer) -> Mapping[str, Any] | None:
    """Return the first training sample; None: there is none, it cannot be used, or it is no mapping."""
    return _first_of(trainer.train_dataset)


def _first_of(dataset: Any) -> Mapping[str, Any] | None:
    if isinstance(dataset, IterableDataset) or not dataset:
        return None
    try:
        return sample if isinstance(sample := dataset[0], Mapping) else None
    except SampleError:
        return None
