"""Check a Trainer's settings before the first step.

Settings that would mix samples or read wrong labels are refused during training anyway. `check_trainer`, called after
the Trainer is made, reports all of them at once and earlier, and also settings that only change how the loss is
weighted.

TRL's trainers replace the model's forward with one that uses their own head, and call the backbone from their own
`compute_loss`; the trainers of `vlmpack.trainer.trl` pack these calls. A subclass that uses Trainer's `compute_loss`
leaves the model's forward unchanged and ignores TRL's loss settings. This module does not import TRL: it recognizes
TRL's classes by their module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments, default_data_collator

from vlmpack.collate.collator import VLMCollator
from vlmpack.data.formats import PAIRS
from vlmpack.data.messages import LABEL_COLUMNS, READ_COLUMNS
from vlmpack.errors import ConfigError, SampleError
from vlmpack.interop.row_collator import RowCollator
from vlmpack.loading.stream import PackedStream
from vlmpack.model.enable import is_packing
from vlmpack.model.engine import PackingState, packing_state
from vlmpack.model.plain import find_model
from vlmpack.rows import PackedDataset
from vlmpack.trainer.evaluation import LossMetrics, losses_of_set
from vlmpack.trainer.packed_trainer import PackedTrainer

READ = (*READ_COLUMNS[1:], *PAIRS, *LABEL_COLUMNS[1:], "seq_lengths")
"""Columns that vlmpack's collators read, but no model."""
PACKED = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")
"""TRL trainers that have a packed version in `vlmpack.trainer.trl`."""
OF_TRL = (
    *("max_length", "completion_only_loss", "assistant_only_loss", "truncation_mode", "packing", "eval_packing"),
    *("padding_free", "pad_to_multiple_of", "dataset_text_field", "shuffle_dataset"),
)
"""Settings that TRL's collator or its preparation of text data sets reads; TRL does not prepare samples with images."""


def check_trainer(trainer: Trainer) -> None:
    """Check that no setting makes packed rows differ from their samples alone.

    Raises:
        ConfigError: lists every such setting, its effect, and the remedy.
    """
    of_trl = (_loss_of_trl, packing_of_trl, _settings_of_trl)
    checks = (_settings, _collator, *of_trl, _ranks, _batches, _counted_samples, _evaluation)
    _refuse([problem for check in checks for problem in check(trainer)])


def check_arguments(args: TrainingArguments) -> None:
    """Check what can be checked before there is a Trainer.

    Raises:
        ConfigError: as `check_trainer`.
    """
    _refuse([*_of_arguments(args)])


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError("this Trainer does not train packed rows as their samples alone:\n- " + "\n- ".join(problems))


def _settings(trainer: Trainer) -> Iterator[str]:
    args = trainer.args
    if _state(trainer) is None:
        yield "packing is not enabled on its model: Trainer(model=enable_packing(model), ...)"
    elif not trainer.model_accepts_loss_kwargs:
        yield "it does not count targets over accumulated batches: enable packing before the Trainer is made"
    yield from _of_arguments(args)


def _of_arguments(args: TrainingArguments) -> Iterator[str]:
    if args.use_liger_kernel and (args.liger_kernel_config or {}).get("fused_linear_cross_entropy") is not False:
        yield "use_liger_kernel replaces the packed forward: liger_kernel_config={'fused_linear_cross_entropy': False}"
    if args.neftune_noise_alpha is not None:
        yield "neftune_noise_alpha scales noise by the width of the row, so a packed sample gets less: leave it out"
    if args.label_smoothing_factor:
        yield "label_smoothing_factor computes the loss itself and does not shift the labels of Qwen-VL: set it to 0"


def _collator(trainer: Trainer) -> Iterator[str]:
    collator: Any = trainer.data_collator
    if collator is default_data_collator:
        is_packed = isinstance(trainer.train_dataset, PackedDataset)
        remedy = "train_dataset.collate" if is_packed else "VLMCollator(processor, layout='packed')"
        yield f"it has no data_collator, so samples are stacked as they are: data_collator={remedy}"
    is_ours = isinstance(collator, VLMCollator | RowCollator)
    if is_ours and trainer.args.remove_unused_columns and not _has_rows(trainer):
        before = trainer._signature_columns
        trainer._set_signature_columns_if_needed()
        kept, trainer._signature_columns = trainer._signature_columns or (), before  # packing may be enabled later
        sample = _first_of(trainer.train_dataset) or ()
        if lost := ", ".join(repr(name) for name in READ if name in sample and name not in kept):
            reader = type(collator).__name__
            yield f"remove_unused_columns drops {lost} before {reader} reads it: set remove_unused_columns=False"


def _ranks(trainer: Trainer) -> Iterator[str]:
    args, model, state = trainer.args, trainer.model, _state(trainer)
    if state is not None and not _has_rows(trainer):
        yield from shared_rows(state)
    if args.world_size > 1 and not args.average_tokens_across_devices:
        yield "average_tokens_across_devices=False averages the ranks' averages: set it to True"
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    was_evaluated = model is trainer.model_wrapped and hasattr(model, "_is_accelerate_prepared")
    if args.world_size > 1 and was_evaluated and not is_sharded and not isinstance(trainer, PackedTrainer):
        yield "an evaluation before training makes accelerate leave out DDP: evaluate after it, or use PackedTrainer"


def shared_rows(state: PackingState) -> Iterator[str]:
    """Yield an error if context ranks share rows, to which only PackedTrainer deals the same ones."""
    if state.parallel is not None and state.parallel.ranks > 1:
        yield "its ranks share rows, but it gives each its own: use PackedTrainer with plan= or a PackedStream"


def _batches(trainer: Trainer) -> Iterator[str]:
    """Yield settings that would split collated batches, batch rows again, or train on samples twice."""
    args, data = trainer.args, trainer.train_dataset
    if args.n_gpu > 1:
        yield f"nn.DataParallel would split each batch into {args.n_gpu} pieces: use torchrun, or show it one GPU"
    packs_evaluation = isinstance(trainer, PackedTrainer) and trainer.eval_packing
    sets = (None if _has_rows(trainer) else data, None if packs_evaluation else trainer.eval_dataset)
    dealt = [each for each in sets if each is not None and not isinstance(each, PackedStream)]
    dispatch = trainer.accelerator.dispatch_batches
    if (dispatch and dealt) or (dispatch is None and any(isinstance(each, IterableDataset) for each in dealt)):
        yield "accelerate would split collated batches: set accelerator_config={'dispatch_batches': False}"
    by_length = args.train_sampling_strategy == "group_by_length" and not _has_rows(trainer)
    if by_length and args.remove_unused_columns:
        column = args.length_column_name
        yield f"remove_unused_columns drops {column!r} before group_by_length reads it: set remove_unused_columns=False"
    if isinstance(data, PackedStream) and not isinstance(trainer, PackedTrainer):
        yield "it would batch the rows of a PackedStream again, and cannot continue one: use vlmpack's PackedTrainer"
    elif _has_rows(trainer) and args.ignore_data_skip and not isinstance(data, PackedStream):
        yield "ignore_data_skip=True starts a resumed epoch again, so it trains on samples twice: set it to False"


def _counted_samples(trainer: Trainer) -> Iterator[str]:
    """Yield an error if ranks would have other numbers of losses. LossMetrics refuses those of too few samples."""
    collator, ranks = trainer.data_collator, trainer.args.world_size
    in_batches = bool(trainer.eval_dataset) and not (isinstance(trainer, PackedTrainer) and trainer.eval_packing)
    if ranks > 1 and in_batches and isinstance(collator, VLMCollator) and collator.on_bad != "raise":
        yield (
            f"samples that the collator skips (on_bad='skip') leave the {ranks} ranks of its evaluation with other "
            "numbers of losses, at which it ends: use PackedTrainer of vlmpack.trainer with eval_capacity=, or evaluate"
        )


def _evaluation(trainer: Trainer) -> Iterator[str]:
    """Yield an error if the model refuses Trainer's evaluation, or if `eval_loss` is not replaced by the exact one."""
    args, model, metrics = trainer.args, trainer.model, trainer.compute_metrics
    if isinstance(trainer, PackedTrainer) and trainer.eval_packing and metrics is None:
        known = {"loss", "num_refused", *losses_of_set(np.zeros(1), np.ones(1))}
        best = str(args.metric_for_best_model or "loss").removeprefix("eval_")
        if best not in known and not isinstance(trainer.eval_dataset, dict):
            yield f"metric_for_best_model={best} is not in its evaluation: choose one of {', '.join(sorted(known))}"
    if trainer.eval_dataset is None or isinstance(trainer, PackedTrainer) or _state(trainer) is None:
        return
    if loss_of_trl(trainer) is not None:  # TRL's evaluation computes the same loss
        return
    try:
        with torch.no_grad():
            bool(trainer.model_accepts_loss_kwargs)  # Trainer's evaluation reads it, too
    except ConfigError as error:
        yield str(error)
        return
    is_of_another = isinstance(metrics, LossMetrics) and not metrics.is_bound_to(model)
    if metrics is None or args.prediction_loss_only or is_of_another:
        yield (
            "loss_metrics(model) is not called, and eval_loss not exact (prediction_loss_only, or compute_metrics is "
            "missing or of another model): set compute_metrics=loss_metrics(model), or use PackedTrainer"
        )


# ---------------------------------------------------------------------- TRL


def _loss_of_trl(trainer: Trainer) -> Iterator[str]:
    """Yield an error if TRL's own loss bypasses the packed forward."""
    if (owner := loss_of_trl(trainer)) is None or packs_backbone(trainer):
        return
    packed = [klass.__name__ for klass in type(trainer).__mro__ if klass.__name__ in PACKED]
    remedy = f"from vlmpack.trainer.trl import Packed{packed[0]}" if packed else "leave enable_packing out"
    yield (
        f"TRL's {owner} computes the loss itself, from the model's backbone, past its packed forward: packed rows are "
        f"refused in the first step, and padded batches are computed with all their padding; {remedy}"
    )


def loss_of_trl(trainer: Trainer) -> str | None:
    """Return the name of the TRL class whose `compute_loss` the trainer uses; None: it uses Trainer's."""
    for klass in type(trainer).__mro__:
        method = vars(klass).get("compute_loss")
        if method is Trainer.compute_loss:
            return None
        if method is not None and method.__module__.partition(".")[0] == "trl":
            return klass.__name__
    return None


def packs_backbone(trainer: Trainer) -> bool:
    """Return whether the trainer is one of `vlmpack.trainer.trl`, which pack the calls of the backbone."""
    return any(klass.__module__ == "vlmpack.trainer.trl" for klass in type(trainer).__mro__)


def packing_of_trl(trainer: Trainer) -> Iterator[str]:
    """Yield errors about rows of text that TRL packs itself: they have other boundaries, or none."""
    args = trainer.args
    has_other_loss = loss_of_trl(trainer) is not None and not packs_backbone(trainer)
    is_ours = isinstance(trainer.data_collator, VLMCollator | RowCollator)
    if is_ours or has_other_loss or getattr(trainer, "_skip_prepare_dataset", None) is not False:
        return
    packing = getattr(args, "packing", False)
    if getattr(trainer, "padding_free", False):
        yield (
            f"{'packing' if packing else 'padding_free'}=True has TRL lay samples out in rows, which an enabled model "
            "does itself: leave it out, and each batch of per_device_train_batch_size samples is one packed row"
        )
    elif packing and getattr(args, "packing_strategy", None) == "wrapped":
        yield "packing_strategy='wrapped' cuts samples in two and trains on a row as on one sample: leave packing out"
    elif getattr(args, "eval_packing", None):
        yield "eval_packing=True evaluates each row as one sample: set it to False"
    elif any(
        len((_first_of(data) or {}).get("seq_lengths") or ()) > 1
        for data in (trainer.train_dataset, *_evaluation_sets(trainer))
    ):
        yield "rows hold several samples (seq_lengths): use data_collator=RowCollator() of vlmpack.interop.seqpacker"


def _settings_of_trl(trainer: Trainer) -> Iterator[str]:
    """Yield settings of TRL's `SFTConfig` that were changed although neither the collator nor the loss reads them."""
    args, collator, has_loss_of_trl = trainer.args, trainer.data_collator, loss_of_trl(trainer) is not None
    if has_loss_of_trl and not packs_backbone(trainer):
        return
    unread = []
    if not has_loss_of_trl and (loss_type := getattr(args, "loss_type", "nll")) != "nll":
        unread.append(f"loss_type={loss_type!r} (the model's own loss is computed, cross-entropy)")
    skips = getattr(trainer, "_skip_prepare_dataset", None)  # TRL's preparation reads its settings; images skip it
    is_prepared = "input_ids" in (_first_of(trainer.train_dataset) or ()) if skips is None else not skips
    if isinstance(collator, VLMCollator | RowCollator) and not is_prepared:
        read: dict[str, tuple[Any, str]] = {}  # name -> (value that agrees with the collator, collator's own setting)
        if isinstance(collator, VLMCollator):
            trains_on = (collator.train_on != "all", f" (the collator has train_on={collator.train_on!r})")
            read = dict.fromkeys(("completion_only_loss", "assistant_only_loss"), trains_on)
            read["max_length"] = (collator.max_length, f" (the collator's is {collator.max_length})")
        defaults = {field.name: None if field.default == "auto" else field.default for field in fields(args)}
        for name in [name for name in OF_TRL if name in defaults]:
            value, (agreeing, instead) = getattr(args, name), read.get(name, (defaults[name], ""))
            if value not in (defaults[name], agreeing):
                unread.append(f"{name}={value!r}{instead}")
    if unread:
        yield f"it has settings without effect: {'; '.join(unread)}: set them on the collator instead"


# ---------------------------------------------------------------------- facts about a Trainer


def _state(trainer: Trainer) -> PackingState | None:
    """Return the packing state of the trainer's model; None: packing is not enabled."""
    model: Any = trainer.model
    return packing_state(find_model(model)) if is_packing(model) else None


def _has_rows(trainer: Trainer) -> bool:
    """Return whether the trainer makes and distributes its rows itself, without accelerate."""
    is_stream = isinstance(trainer.train_dataset, PackedStream)
    return isinstance(trainer, PackedTrainer) and (is_stream or trainer.plan is not None)


def _evaluation_sets(trainer: Trainer) -> list[Any]:
    sets = trainer.eval_dataset
    return [*sets.values()] if isinstance(sets, dict) else [sets]


def _first_of(dataset: Any) -> Mapping[str, Any] | None:
    """Return the first sample; None: there is none, it cannot be used, or it is not a mapping."""
    if isinstance(dataset, IterableDataset) or not dataset:
        return None
    try:
        return sample if isinstance(sample := dataset[0], Mapping) else None
    except SampleError:
        return None
