"""TRL's trainers: a loss that goes past the packed forward, and settings of theirs that nothing reads.

TRL patches the model's forward with a fused head, which calls the backbone itself; its own `compute_loss` asks for it.
A subclass with Trainer's `compute_loss` leaves the model's forward as it was, and TRL's settings of the loss unread. A
collator of ours leaves those of TRL's collator unread. TRL is not imported: classes are known by their modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer

from vlmpack.collate import VLMCollator
from vlmpack.errors import SampleError
from vlmpack.text import RowCollator


def check_loss(trainer: Trainer) -> Iterator[str]:
    """Yield what TRL's own loss does, if the trainer computes it."""
    if (owner := _loss_of_trl(trainer)) is None:
        return
    yield (
        f"TRL's {owner} computes the loss itself, from the model's backbone, past its packed forward: packed rows are "
        "refused in the first step, and padded batches are computed with all their padding; " + _remedy(trainer)
    )


def _remedy(trainer: Trainer) -> str:
    if any(klass.__name__ == "SFTTrainer" for klass in type(trainer).__mro__):
        return (
            "give a subclass of it compute_loss = Trainer.compute_loss and prediction_step = Trainer.prediction_step "
            "(README of vlmpack.trainer, TRL)"
        )
    return (
        "nothing of it is packed, so leave enable_packing out; for a loop of your own, PackedStep(model)(row).logprobs "
        "has the log-probabilities of each sample"
    )


def _loss_of_trl(trainer: Trainer) -> str | None:
    """The class of TRL whose `compute_loss` is reached from the trainer's; None: Trainer's own comes first."""
    for klass in type(trainer).__mro__:
        method = vars(klass).get("compute_loss")
        if method is Trainer.compute_loss:
            return None
        if method is not None and _is_of_trl(method):
            return klass.__name__
    return None


def _is_of_trl(thing: Callable[..., Any]) -> bool:
    return thing.__module__.partition(".")[0] == "trl"


def check_settings(trainer: Trainer) -> Iterator[str]:
    """Yield the settings of TRL's `SFTConfig` that were set, and that neither the collator nor the loss reads."""
    unread = [f"{name}={value!r}{why}" for name, value, why in _unread(trainer)]
    if unread:
        yield (
            f"it has settings that nothing reads: {'; '.join(unread)}: leave them out of its arguments, and give the "
            "collator what is meant"
        )


def _unread(trainer: Trainer) -> Iterator[tuple[str, Any, str]]:
    """(Name, value, what happens instead) of each."""
    if _loss_of_trl(trainer) is not None:
        return
    settings = vars(trainer.args)
    if settings.get("loss_type", "nll") != "nll":
        yield "loss_type", settings["loss_type"], " (the model's own loss is computed, cross-entropy)"
    collator: Any = trainer.data_collator
    if not isinstance(collator, VLMCollator | RowCollator) or _is_prepared(trainer):
        return
    for name, value in DEFAULTS.items():
        if name in settings and settings[name] != value and not _agrees(name, settings[name], collator):
            yield name, settings[name], _instead(name, collator)


DEFAULTS: Mapping[str, Any] = {
    "max_length": 1024,
    "completion_only_loss": None,
    "assistant_only_loss": False,
    "packing": False,
    "padding_free": False,
    "pad_to_multiple_of": None,
    "dataset_text_field": "text",
    "shuffle_dataset": False,
}
"""What TRL's collator or its preparation of text would read; images are not prepared."""


def _agrees(name: str, value: Any, collator: VLMCollator | RowCollator) -> bool:
    """Whether the collator does what the setting says."""
    if not isinstance(collator, VLMCollator):
        return False
    learns_answers = collator.train_on == "assistant"
    return {
        "max_length": value == collator.max_length,
        "completion_only_loss": value == learns_answers,
        "assistant_only_loss": value == learns_answers,
    }.get(name, False)


def _instead(name: str, collator: VLMCollator | RowCollator) -> str:
    if not isinstance(collator, VLMCollator):
        return ""
    learnt, longest = (
        f" (the collator has train_on={collator.train_on!r})",
        f" (the collator's is {collator.max_length})",
    )
    return {"max_length": longest, "completion_only_loss": learnt, "assistant_only_loss": learnt}.get(name, "")


def _is_prepared(trainer: Trainer) -> bool:
    """Whether samples went through TRL's preparation, which reads its settings; a data set with images does not."""
    skips, dataset = vars(trainer).get("_skip_prepare_dataset"), trainer.train_dataset
    if skips is not None:
        return not skips
    if isinstance(dataset, IterableDataset) or not dataset:
        return False
    try:
        sample = dataset[0]
    except SampleError:
        return False
    return isinstance(sample, Mapping) and "input_ids" in sample
