"""A look at a Trainer's settings before the first step.

What would mix samples, or read the wrong labels, is refused while training anyway, whether or not this is called.
Called after the Trainer is made, it says so earlier and all at once, and it names the settings that only change how
the loss is weighted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer

from vlmpack.errors import ConfigError
from vlmpack.step import is_packing


def check_trainer(trainer: Trainer) -> None:
    """Look for settings under which a packed row is not the samples alone.

    Raises:
        ConfigError: every such setting, what it would do, and the remedy.
    """
    problems = [*_model(trainer), *_loss(trainer), *_batches(trainer)]
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


def _loss(trainer: Trainer) -> Iterator[str]:
    if trainer.args.label_smoothing_factor:
        yield (
            "label_smoothing_factor keeps the labels from the model, and its smoother does not shift the labels of "
            "Qwen-VL models: set it to 0"
        )
    if trainer.args.world_size > 1 and not trainer.args.average_tokens_across_devices:
        yield "average_tokens_across_devices=False averages the ranks' averages: set it to True"


def _batches(trainer: Trainer) -> Iterator[str]:
    args = trainer.args
    if args.n_gpu > 1:
        yield (
            f"nn.DataParallel would cut each batch into {args.n_gpu} pieces: start the script with torchrun or "
            "accelerate launch, or show it one GPU (CUDA_VISIBLE_DEVICES)"
        )
    streams = [d for d in (trainer.train_dataset, trainer.eval_dataset) if isinstance(d, IterableDataset)]
    dispatch = trainer.accelerator.dispatch_batches
    if dispatch or (dispatch is None and streams):
        yield (
            "accelerate would concatenate collated batches and cut them again (dispatch_batches, its default for an "
            "IterableDataset): set accelerator_config={'dispatch_batches': False}"
        )
    if args.train_sampling_strategy == "group_by_length" and args.remove_unused_columns:
        yield (
            f"remove_unused_columns drops the {args.length_column_name!r} column before group_by_length reads it: set "
            "remove_unused_columns=False"
        )
