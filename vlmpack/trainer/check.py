"""A look at a Trainer's settings before the first step.

What would mix samples, or read the wrong labels, is refused while training anyway, whether or not this is called.
Called after the Trainer is made, it says so earlier and all at once, and it names the settings that only change how
the loss is weighted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, cast

from torch import nn
from torch.utils.data import IterableDataset
from transformers import Seq2SeqTrainingArguments, Trainer, TrainingArguments, default_data_collator
from transformers.trainer_utils import SchedulerType

from vlmpack.collate import CONVERSATION_COLUMNS, MEDIA_COLUMNS, ProcessorMetadata, VLMCollator
from vlmpack.errors import ConfigError, SampleError
from vlmpack.loading import PackedStream
from vlmpack.model import find_model, is_packing, packing_state
from vlmpack.store import PackedDataset
from vlmpack.text import RowCollator
from vlmpack.trainer import of_trl
from vlmpack.trainer.metrics import LossMetrics
from vlmpack.trainer.packed_trainer import PackedTrainer

READ = (
    *(*CONVERSATION_COLUMNS, "completion", *MEDIA_COLUMNS, "system", "tools", "chat_template_kwargs"),
    *("completion_mask", "assistant_masks", "loss_mask", "seq_lengths", "id", "sample_id"),
)
"""Columns that our collators read and no model does."""


def check_trainer(trainer: Trainer) -> None:
    """Look for settings under which a packed row is not the samples alone.

    Raises:
        ConfigError: every such setting, what it would do, and the remedy.
    """
    problems = [
        *_model(trainer),
        *_collator(trainer),
        *_loss(trainer),
        *of_trl.check_loss(trainer),
        *of_trl.check_settings(trainer),
        *_ranks(trainer),
        *_batches(trainer),
        *_rows(trainer),
        *_metrics(trainer),
        *_skipped(trainer),
        *_evaluation(trainer),
    ]
    if problems:
        raise ConfigError("this Trainer does not train packed rows as their samples alone:\n- " + "\n- ".join(problems))


def _model(trainer: Trainer) -> Iterator[str]:
    model: Any = trainer.model
    if not is_packing(model):
        yield "packing is not enabled on its model: Trainer(model=enable_packing(model), ...)"
    elif not trainer.model_accepts_loss_kwargs:
        yield (
            "it does not hand num_items_in_batch to the model, so gradient accumulation averages averages: enable "
            "packing before the Trainer is made"
        )
    kernels = trainer.args.liger_kernel_config or {}
    if trainer.args.use_liger_kernel and kernels.get("fused_linear_cross_entropy") is not False:
        yield (
            "use_liger_kernel replaces the model's forward by one that ignores boundaries; vlmpack's head is chunked "
            "already: liger_kernel_config={'fused_linear_cross_entropy': False} keeps Liger's other kernels"
        )
    if trainer.args.neftune_noise_alpha is not None:
        yield (
            "neftune_noise_alpha scales its noise by the width of the row, not of the sample, so a packed row gets "
            "less: leave it out"
        )


def _collator(trainer: Trainer) -> Iterator[str]:
    collator: Any = trainer.data_collator
    model: Any = trainer.model
    if collator is default_data_collator and not isinstance(trainer.train_dataset, PackedDataset):
        yield (
            "it was given no data_collator, so samples are stacked as they are: data_collator=VLMCollator(processor, "
            "layout='packed')"
        )
    elif collator is default_data_collator:
        yield "it was given no data_collator for rows that were packed before: data_collator=train_dataset.collate"
    if isinstance(collator, VLMCollator) and is_packing(model):
        yield from _processor(collator.metadata, find_model(model))
    lost = _lost_columns(trainer) if isinstance(collator, VLMCollator | RowCollator) else []
    if lost:
        yield (
            f"remove_unused_columns drops {', '.join(map(repr, lost))} before {type(collator).__name__} reads it: set "
            "remove_unused_columns=False"
        )


def _processor(metadata: ProcessorMetadata, core: nn.Module) -> Iterator[str]:
    """What the collator's processor writes has to be what the model reads."""
    family, config = packing_state(core).family, vars(core)["config"]
    if not (metadata.has_vision and family.has_vision):
        return
    pairs = {
        "image token": (metadata.image_token_id, config.image_token_id),
        "video token": (metadata.video_token_id, config.video_token_id),
        "values of a patch": (metadata.patch_dim, family.patch_channels(config)),
        "merged side": (metadata.merge_size, family.merge(config)),
    }
    differing = [f"{name} {ours}, the model's {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    if differing:
        yield (
            f"its collator's processor belongs to another model ({'; '.join(differing)}): load both from the same "
            "checkpoint"
        )


def _lost_columns(trainer: Trainer) -> list[str]:
    """Columns of the first sample that the collator reads and Trainer removes."""
    data: Any = trainer.train_dataset
    if not trainer.args.remove_unused_columns or _has_rows(trainer) or isinstance(data, IterableDataset) or not data:
        return []
    try:
        sample = data[0]
    except SampleError:
        return []
    model: Any = trainer.model
    kept = inspect.signature(find_model(model).forward).parameters
    return [name for name in READ if name in sample and name not in kept] if isinstance(sample, Mapping) else []


def _ranks(trainer: Trainer) -> Iterator[str]:
    args = trainer.args
    model: Any = trainer.model
    if is_packing(model) and (parallel := packing_state(find_model(model)).parallel) and parallel.ranks > 1:
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


def _loss(trainer: Trainer) -> Iterator[str]:
    if trainer.args.label_smoothing_factor:
        yield (
            "label_smoothing_factor keeps the labels from the model, and its smoother does not shift the labels of "
            "Qwen-VL models: set it to 0"
        )


def _batches(trainer: Trainer) -> Iterator[str]:
    args = trainer.args
    if args.n_gpu > 1:
        yield (
            f"nn.DataParallel would cut each batch into {args.n_gpu} pieces: start the script with torchrun or "
            "accelerate launch, or show it one GPU (CUDA_VISIBLE_DEVICES)"
        )
    dealt, dispatch = _dealt(trainer), trainer.accelerator.dispatch_batches
    if (dispatch and dealt) or (dispatch is None and any(isinstance(data, IterableDataset) for data in dealt)):
        yield (
            "accelerate would concatenate collated batches and cut them again (dispatch_batches, its default for an "
            "IterableDataset): set accelerator_config={'dispatch_batches': False}"
        )
    by_length = args.train_sampling_strategy == "group_by_length" and not _has_rows(trainer)
    if by_length and args.remove_unused_columns:
        yield (
            f"remove_unused_columns drops the {args.length_column_name!r} column before group_by_length reads it: set "
            "remove_unused_columns=False"
        )


def _rows(trainer: Trainer) -> Iterator[str]:
    """Rows that were made ahead must come through as they are, and be found again."""
    if isinstance(trainer.train_dataset, PackedStream) and not isinstance(trainer, PackedTrainer):
        yield (
            "it would batch the rows of a PackedStream again, and cannot continue one: use PackedTrainer of "
            "vlmpack.trainer"
        )
    elif _has_rows(trainer) and trainer.args.ignore_data_skip and not isinstance(trainer.train_dataset, PackedStream):
        yield (
            "ignore_data_skip=True starts a resumed epoch anew, so samples are trained on twice; planned rows are "
            "skipped without loading them: set it to False"
        )


def _metrics(trainer: Trainer) -> Iterator[str]:
    """Accelerate takes a row of samples for one: where it gathers, and where it cuts the last batch."""
    if trainer.compute_metrics is None or (isinstance(trainer, PackedTrainer) and trainer.eval_packing):
        return
    held_out: Any = trainer.eval_dataset
    joined = isinstance(trainer.data_collator, RowCollator) and trainer.data_collator.bare_row == "refuse"
    at_once, remedy = trainer.args.eval_batch_size, "use PackedTrainer of vlmpack.trainer, or evaluate of vlmpack"
    for data in held_out.values() if isinstance(held_out, dict) else [held_out]:
        if not (joined or isinstance(data, PackedDataset)) or not isinstance(data, Sized):
            continue
        if trainer.args.world_size > 1:
            yield (
                "accelerate would gather as many losses from every rank of its evaluation, but packed rows hold other "
                f"numbers of samples, at which the processes end: {remedy}"
            )
        elif left := len(data) % at_once:
            yield (
                f"accelerate would cut the last batch of its evaluation to {left} samples, the number of packed rows "
                f"that are left for it ({len(data)} rows, {at_once} at a time), and compute_metrics would miss the "
                f"others: {remedy}"
            )


def _evaluation(trainer: Trainer) -> Iterator[str]:
    """Trainer's own loop has one number a batch, which it weighs by samples."""
    args, model, metrics = trainer.args, cast(Any, trainer.model), trainer.compute_metrics
    if trainer.eval_dataset is None or isinstance(trainer, PackedTrainer) or not is_packing(model):
        return
    if args.world_size > 1:
        yield (
            f"its own evaluation over {args.world_size} ranks weighs the losses of packed batches wrongly, and is "
            "refused before its first batch: use PackedTrainer of vlmpack.trainer (eval_packing=False: the same "
            "batches), or evaluate of vlmpack"
        )
    elif isinstance(args, Seq2SeqTrainingArguments) and args.predict_with_generate and metrics is not None:
        if _chooses_by_loss(args):
            yield (
                "it chooses by the eval_loss of an evaluation that generates (predict_with_generate), a mean over "
                "samples of their batches' means, which changes with the batch size: choose by a metric of what is "
                "generated (metric_for_best_model), or use PackedTrainer of vlmpack.trainer"
            )
    elif packing_state(find_model(model)).loss_count is None:
        yield (
            "its own eval_loss is a mean over samples of their batches' means, which changes with the batch size, so "
            "its evaluation is refused before its first batch: compute_metrics=loss_metrics(model) makes eval_loss the "
            "loss of the set, and so does PackedTrainer of vlmpack.trainer"
        )
    elif metrics is None or args.prediction_loss_only or _is_of_another(metrics, model):
        yield (
            "its eval_loss is not replaced by that of loss_metrics(model), which is not called (prediction_loss_only, "
            "or compute_metrics is missing or of another model): compute_metrics=loss_metrics(model) and "
            "prediction_loss_only=False, or PackedTrainer of vlmpack.trainer"
        )


def _chooses_by_loss(args: TrainingArguments) -> bool:
    chooses = args.load_best_model_at_end or args.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
    return chooses and args.metric_for_best_model in (None, "loss", "eval_loss")


def _is_of_another(metrics: Callable[..., Any], model: nn.Module) -> bool:
    return isinstance(metrics, LossMetrics) and not metrics.is_bound_to(model)


def _skipped(trainer: Trainer) -> Iterator[str]:
    """Accelerate counts samples by their places, whether or not the collator could use them."""
    collator = trainer.data_collator
    is_exact = isinstance(trainer, PackedTrainer) and (trainer.eval_packing or trainer.args.world_size == 1)
    if trainer.eval_dataset is None or is_exact or not isinstance(collator, VLMCollator) or collator.on_bad == "raise":
        return
    yield (
        "its evaluation weighs a batch by its places: samples that the collator skips (on_bad='skip') count with the "
        "loss of the others in their batch, and ranks with other numbers of them come apart: evaluate with "
        "PackedTrainer of vlmpack.trainer, or evaluate of vlmpack, or leave such samples out of the evaluation set"
    )


def _has_rows(trainer: Trainer) -> bool:
    """Whether it trains on rows that accelerate neither makes nor deals."""
    return isinstance(trainer, PackedTrainer) and (
        trainer.plan is not None or isinstance(trainer.train_dataset, PackedStream)
    )


def _dealt(trainer: Trainer) -> list[Any]:
    """The data sets whose batches accelerate deals out."""
    packs_evaluation = isinstance(trainer, PackedTrainer) and trainer.eval_packing
    train = None if _has_rows(trainer) else trainer.train_dataset
    held_out = None if packs_evaluation else trainer.eval_dataset
    return [data for data in (train, held_out) if data is not None and not isinstance(data, PackedStream)]
