"""Check a Trainer's settings before the first step.

What would mix samples, or read the wrong labels, is refused while training anyway, whether or not this is called.
Called after the Trainer is made, it reports everything earlier and at once, with the settings that only change how the
loss is weighted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer, default_data_collator

from vlmpack.collate.collator import VLMCollator
from vlmpack.collate.columns import CONVERSATION_COLUMNS, MEDIA_COLUMNS
from vlmpack.collate.processor_metadata import ProcessorMetadata
from vlmpack.data.branches import BRANCH_COLUMN, PAIRS_COLUMN
from vlmpack.errors import ConfigError
from vlmpack.interop.seqpacker import RowCollator
from vlmpack.loading.stream import PackedStream
from vlmpack.model.enable import is_packing
from vlmpack.model.engine import packing_state
from vlmpack.model.plain import find_model
from vlmpack.store.read import PackedDataset
from vlmpack.trainer import check_trl
from vlmpack.trainer.metrics import LossMetrics
from vlmpack.trainer.packed_trainer import PackedTrainer

READ = (
    *(*CONVERSATION_COLUMNS, "completion", *MEDIA_COLUMNS, "system", "tools", "chat_template_kwargs"),
    *(BRANCH_COLUMN, PAIRS_COLUMN),
    *("completion_mask", "assistant_masks", "loss_mask", "seq_lengths", "id", "sample_id"),
)
"""Columns that our collators read and no model does."""


def check_trainer(trainer: Trainer) -> None:
    """Look for settings under which a packed row is not the samples alone.

    Raises:
        ConfigError: every such setting, what it would do, and the remedy.
    """
    of_trl = (check_trl.check_loss, check_trl.check_packing, check_trl.check_settings)
    checks = (_model, _settings, _collator, *of_trl, _ranks, _batches, _rows, _metrics, _evaluation)
    problems = [problem for check in checks for problem in check(trainer)]
    if problems:
        raise ConfigError("this Trainer does not train packed rows as their samples alone:\n- " + "\n- ".join(problems))


def _model(trainer: Trainer) -> Iterator[str]:
    if not _is_enabled(trainer):
        yield "packing is not enabled on its model: Trainer(model=enable_packing(model), ...)"
    elif not trainer.model_accepts_loss_kwargs:
        yield (
            "it does not hand num_items_in_batch to the model, so gradient accumulation averages averages: enable "
            "packing before the Trainer is made"
        )


def _settings(trainer: Trainer) -> Iterator[str]:
    args = trainer.args
    if args.use_liger_kernel and (args.liger_kernel_config or {}).get("fused_linear_cross_entropy") is not False:
        yield (
            "use_liger_kernel replaces the model's forward by one that ignores boundaries; vlmpack's head is chunked "
            "already: liger_kernel_config={'fused_linear_cross_entropy': False} keeps Liger's other kernels"
        )
    if args.neftune_noise_alpha is not None:
        yield "neftune_noise_alpha scales noise by the width of the row, so a packed sample gets less: leave it out"
    if args.label_smoothing_factor:
        yield "label_smoothing_factor computes the loss itself and does not shift the labels of Qwen-VL: set it to 0"


def _collator(trainer: Trainer) -> Iterator[str]:
    collator: Any = trainer.data_collator
    if collator is default_data_collator:
        if isinstance(trainer.train_dataset, PackedDataset):
            reason, remedy = " for rows that were packed before", "train_dataset.collate"
        else:
            reason, remedy = ", so samples are stacked as they are", "VLMCollator(processor, layout='packed')"
        yield f"it has no data_collator{reason}: data_collator={remedy}"
    if isinstance(collator, VLMCollator) and _is_enabled(trainer):
        yield from _processor(collator.metadata, _core(trainer))
    is_ours = isinstance(collator, VLMCollator | RowCollator)
    if is_ours and trainer.args.remove_unused_columns and not _has_rows(trainer):
        kept, sample = _kept_columns(trainer), check_trl.first_sample(trainer) or ()
        if lost := ", ".join(repr(name) for name in READ if name in sample and name not in kept):
            reader = type(collator).__name__
            yield f"remove_unused_columns drops {lost} before {reader} reads it: set remove_unused_columns=False"


def _kept_columns(trainer: Trainer) -> Sequence[str]:
    """Return the columns that remove_unused_columns keeps: those that the model takes, or the trainer's own list."""
    before = trainer._signature_columns
    try:
        trainer._set_signature_columns_if_needed()
        return trainer._signature_columns or ()
    finally:
        trainer._signature_columns = before  # packing may be enabled after this


def _processor(metadata: ProcessorMetadata, core: Any) -> Iterator[str]:
    """Yield what the collator's processor writes and the model reads otherwise."""
    family, config = packing_state(core).family, core.config
    if not (metadata.has_vision and family.has_vision):
        return
    pairs = {"image token": (metadata.image_token_id, config.image_token_id)}
    if not metadata.by_processor:
        pairs |= {
            "video token": (metadata.video_token_id, config.video_token_id),
            "values of a patch": (metadata.patch_dim, family.patch_channels(config)),
            "merged side": (metadata.merge_size, family.merge(config)),
        }
    if metadata.has_audio and family.has_audio:
        pairs["audio token"] = (metadata.audio_token_id, config.audio_token_id)
    differing = [f"{name} {ours}, the model's {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    if detail := "; ".join(differing):
        yield f"its collator's processor belongs to another model ({detail}): load both from the same checkpoint"


def _ranks(trainer: Trainer) -> Iterator[str]:
    args, model = trainer.args, trainer.model
    parallel = packing_state(_core(trainer)).parallel if _is_enabled(trainer) else None
    if parallel is not None and parallel.ranks > 1:
        yield (
            f"its ranks share rows ({parallel.ranks} of them one), but it gives every rank a batch of its own: write a "
            "loop of your own, as examples/train_shared_rows.py does, or enable packing without parallel="
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        yield "average_tokens_across_devices=False averages the ranks' averages: set it to True"
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    was_evaluated = model is trainer.model_wrapped and "_is_accelerate_prepared" in vars(model)
    if args.world_size > 1 and was_evaluated and not is_sharded and not isinstance(trainer, PackedTrainer):
        yield (
            "it evaluated before it trained, after which accelerate puts no DDP around the model and every rank trains "
            "a model of its own: evaluate afterwards, or use PackedTrainer of vlmpack.trainer"
        )


def _batches(trainer: Trainer) -> Iterator[str]:
    args = trainer.args
    if args.n_gpu > 1:
        yield (
            f"nn.DataParallel would cut each batch into {args.n_gpu} pieces: start the script with torchrun or "
            "accelerate launch, or show it one GPU (CUDA_VISIBLE_DEVICES)"
        )
    packs_evaluation = isinstance(trainer, PackedTrainer) and trainer.eval_packing
    sets = (None if _has_rows(trainer) else trainer.train_dataset, None if packs_evaluation else trainer.eval_dataset)
    dealt = [data for data in sets if data is not None and not isinstance(data, PackedStream)]
    dispatch = trainer.accelerator.dispatch_batches
    if (dispatch and dealt) or (dispatch is None and any(isinstance(data, IterableDataset) for data in dealt)):
        yield (
            "accelerate would concatenate collated batches and cut them again (dispatch_batches, its default for an "
            "IterableDataset): set accelerator_config={'dispatch_batches': False}"
        )
    by_length = args.train_sampling_strategy == "group_by_length" and not _has_rows(trainer)
    if by_length and args.remove_unused_columns:
        column = args.length_column_name
        yield f"remove_unused_columns drops {column!r} before group_by_length reads it: set remove_unused_columns=False"


def _rows(trainer: Trainer) -> Iterator[str]:
    """Yield settings under which rows that were made ahead are changed, or not continued."""
    is_stream = isinstance(trainer.train_dataset, PackedStream)
    if is_stream and not isinstance(trainer, PackedTrainer):
        yield "it would batch the rows of a PackedStream again, and cannot continue one: use vlmpack's PackedTrainer"
    elif _has_rows(trainer) and trainer.args.ignore_data_skip and not is_stream:
        yield (
            "ignore_data_skip=True starts a resumed epoch anew, so samples are trained on twice; planned rows are "
            "skipped without loading them: set it to False"
        )


def _metrics(trainer: Trainer) -> Iterator[str]:
    """Yield where accelerate counts places of the data set, and losses are of another number of samples."""
    if isinstance(trainer, PackedTrainer) and trainer.eval_packing:
        return
    collator, at_once, ranks = trainer.data_collator, trainer.args.eval_batch_size, trainer.args.world_size
    has_rows = isinstance(collator, RowCollator) and collator.bare_row == "refuse"
    remedy = "use PackedTrainer of vlmpack.trainer with eval_capacity=, or evaluate of vlmpack"
    if ranks > 1 and trainer.eval_dataset and isinstance(collator, VLMCollator) and collator.on_bad != "raise":
        yield (
            f"samples that the collator skips (on_bad='skip') leave the {ranks} ranks of its evaluation with other "
            f"numbers of losses, at which it ends: {remedy}, or leave such samples out of the evaluation set"
        )
    sets: Any = trainer.eval_dataset if trainer.compute_metrics is not None else None
    for data in sets.values() if isinstance(sets, dict) else [sets]:
        is_packed = (has_rows or isinstance(data, PackedDataset)) and isinstance(data, Sized)
        if is_packed and (ranks > 1 or len(data) % at_once):
            yield (
                f"accelerate would count each packed row of its evaluation as one sample ({len(data)} rows, {at_once} "
                f"at a time on {ranks} ranks), so it would cut the last batch of several, or end where ranks have "
                f"other numbers of samples, and compute_metrics would miss some: {remedy}"
            )


def _evaluation(trainer: Trainer) -> Iterator[str]:
    """Yield why the model refuses Trainer's own evaluation, or why its eval_loss is not replaced."""
    args, model, metrics = trainer.args, trainer.model, trainer.compute_metrics
    if trainer.eval_dataset is None or isinstance(trainer, PackedTrainer) or not _is_enabled(trainer):
        return
    if check_trl.loss_of_trl(trainer) is not None:  # its evaluation computes the same loss
        return
    try:
        with torch.no_grad():
            bool(trainer.model_accepts_loss_kwargs)  # as Trainer's evaluation reads it
    except ConfigError as error:
        yield str(error)
        return
    is_of_another = isinstance(metrics, LossMetrics) and not metrics.is_bound_to(model)
    if metrics is None or args.prediction_loss_only or is_of_another:
        yield (
            "its eval_loss is not replaced by that of loss_metrics(model), which is not called (prediction_loss_only, "
            "or compute_metrics is missing or of another model): compute_metrics=loss_metrics(model) and "
            "prediction_loss_only=False, or PackedTrainer of vlmpack.trainer"
        )


def _core(trainer: Trainer) -> nn.Module:
    model: Any = trainer.model
    return find_model(model)


def _is_enabled(trainer: Trainer) -> bool:
    model: Any = trainer.model
    return is_packing(model)


def _has_rows(trainer: Trainer) -> bool:
    """Return whether it trains on rows that accelerate neither makes nor deals."""
    is_stream = isinstance(trainer.train_dataset, PackedStream)
    return isinstance(trainer, PackedTrainer) and (is_stream or trainer.plan is not None)
