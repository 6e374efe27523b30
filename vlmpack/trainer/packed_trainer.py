"""PackedTrainer: HF Trainer on the rows of a plan or a stream, with evaluation in planned rows."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import DataCollatorWithPadding, EvalPrediction, TrainerCallback, default_data_collator
from transformers.trainer_utils import EvalLoopOutput, rotate_checkpoints

from vlmpack.collate.collator import VLMCollator
from vlmpack.context_parallel.mesh import mesh_of
from vlmpack.errors import (
    ConfigError,
    SampleError,
    SkippedWarning,
    UnpackedWarning,
    check_choice,
    check_extra,
    check_kind,
)
from vlmpack.loading.sampler import PackedBatchSampler, Remainder
from vlmpack.loading.stream import PackedStream, StreamLoader
from vlmpack.model.enable import enable_packing, is_packing
from vlmpack.model.engine import packing_state, stored_state
from vlmpack.model.forward import STEP, StepCall
from vlmpack.model.plain import find_model
from vlmpack.plan.plan import Plan, split_groups
from vlmpack.rows import PackedDataset
from vlmpack.trainer import checkpoints
from vlmpack.trainer.checkpoints import PLAN_FILE, RenamedWeights, stream_file
from vlmpack.trainer.evaluation import (
    BatchLosses,
    Evaluation,
    EvaluationLoader,
    EvaluationRows,
    NumberedCollator,
    RowLosses,
    check_plan,
)
from vlmpack.trainer.loss import ChannelLosses, Loss, channels_of, data_place, mean_loss, parallel_of, weighed

_LOG = logging.getLogger(__name__)


class PackedTrainer(RenamedWeights):
    """A Trainer whose batches are planned rows: one row per micro-batch on each rank.

        PackedTrainer(model=enable_packing(model), ..., train_dataset=rows, plan=plan_bins(lengths, 8192))
        PackedTrainer(model=enable_packing(model), ..., train_dataset=PackedStream(..., repeat=True))

    Each rank loads its own rows; accelerate does not distribute them. `train(resume_from_checkpoint=...)` continues
    with the very next row. `evaluate()` uses planned rows, too.

    To combine it with another subclass of Trainer, put this one first: `class PackedOther(PackedTrainer, Other)`.

    Args:
        *args: arguments of Trainer; `data_collator` is optional for a `PackedDataset`, which brings its own.
        plan: rows of `train_dataset`, planned from the lengths of all its samples or from their `LengthTable`. None:
            `train_dataset` is a `PackedStream`, or Trainer makes batches as usual and the model packs them. Groups
            that a plan with `whole_groups=True` keeps whole go through the model in pieces, each prefix once.
        costs: [N]: compute cost of each sample of the plan, to balance ranks; None: its length.
        group_costs: [K]: compute cost of the prefix of each of the plan's groups; required with `costs`.
        remainder: what to do with rows that do not fill the last step, see `PackedBatchSampler`.
        eval_packing: True evaluates in planned rows; False evaluates in Trainer's batches, also with the exact loss.
            None: planned rows if their capacity is known from a plan, a stream, `eval_plan` or `eval_capacity`.
        eval_plan: rows of `eval_dataset`, if it is a single data set; None: the collator measures lengths once.
        eval_capacity: maximum tokens of an evaluation row; None: same as in training.
        loss: what has equal weight in the loss of a step and of an evaluation: "token", each target; "sample", each
            sample; "square", each sample by the square root of its number of targets (see `vlmpack.trainer.loss`).
        **kwargs: keyword arguments of Trainer.

    Raises:
        ConfigError: `plan` is not a Plan, planned rows have no collator, `eval_plan` is combined with several sets to
            evaluate, or `loss` is unknown.
    """

    def __init__(
        self,
        *args: Any,
        plan: Plan | None = None,
        costs: np.ndarray | None = None,
        group_costs: np.ndarray | None = None,
        remainder: Remainder = "split",
        eval_packing: bool | None = None,
        eval_plan: Plan | None = None,
        eval_capacity: int | None = None,
        loss: Loss = "token",
        **kwargs: Any,
    ) -> None:
        check_extra("train", "accelerate", needed_by="PackedTrainer")
        check_choice("loss", loss, get_args(Loss))
        super().__init__(*args, **kwargs)
        if plan is not None:
            check_kind("plan", plan, Plan, "plan_bins(table, 8192)")
        if isinstance(self.train_dataset, PackedDataset) and self.data_collator is default_data_collator:
            self.data_collator = self.train_dataset.collate
        collate = self.data_collator
        makes_no_rows = collate is default_data_collator or type(collate) is DataCollatorWithPadding
        if makes_no_rows and (plan is not None or isinstance(self.train_dataset, PackedStream)):
            raise ConfigError('planned rows need a collator: data_collator=VLMCollator(processor, layout="packed")')
        self.plan, self.costs, self.group_costs = plan, costs, group_costs
        self.remainder: Remainder = remainder
        self.eval_plan, self.eval_capacity = eval_plan, eval_capacity
        self.eval_packing = self._row_capacity is not None if eval_packing is None else eval_packing
        """Whether evaluation uses planned rows."""
        self.evaluation: Evaluation | None = None
        """Result of the last evaluation in planned rows: the loss of every sample, in the order of the data set."""
        self._losses: RowLosses | BatchLosses | None = None
        self.loss: Loss = loss
        """What has equal weight in the loss of a step."""
        self._channel_losses = ChannelLosses(loss)
        self._weights = checkpoints.described_weights(self.model)
        self._warned_of_means = False
        self._planned_sets: dict[int, tuple[Any, EvaluationRows]] = {}
        self._resumes_from: str | None = None
        take_rows_whole(self)
        # The model's own value refuses Trainer's evaluation when read there. Ours is exact, so make it a plain bool.
        self.model_accepts_loss_kwargs = bool(self.model_accepts_loss_kwargs)
        if isinstance(self.train_dataset, PackedStream):
            self.args.ignore_data_skip = True  # a stream resumes from its state, without reading what came before
            self.add_callback(EpochBySteps)
        if eval_plan is not None and isinstance(sets := cast(Any, self.eval_dataset), dict):
            names = ", ".join(map(str, sets))
            raise ConfigError(
                f"eval_plan has the rows of one data set, but eval_dataset has {len(sets)}: {names}; leave eval_plan "
                "out, and give eval_capacity="
            )

    # ------------------------------------------------------------------ training

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does. `resume_from_checkpoint=True` resumes from the newest complete checkpoint.

        Raises:
            ConfigError: the checkpoint is incomplete or has no rows to continue, there is none, more processes were
                launched than the trainer knows of, the model is on a mesh and DeepSpeed is on, or an evaluation to
                come would be refused.
        """
        if (launched := int(os.environ.get("WORLD_SIZE", 1))) != self.args.world_size:
            raise ConfigError(
                f"{launched} processes were launched, but the trainer knows of {self.args.world_size}, so each would "
                "train its own model; on CPUs set TrainingArguments(use_cpu=True)"
            )
        if self.is_deepspeed_enabled and mesh_of(self.model) is not None:
            raise ConfigError(
                "the model is on a mesh of transformers (distributed_config=), and DeepSpeed would divide it again: "
                "leave one of them out"
            )
        self._resumes_from = checkpoints.checkpoint_to_resume(
            resume_from_checkpoint, self.args.output_dir, self._last_file
        )
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            # An earlier evaluation sets this: accelerate would not wrap the model in DDP, and ranks would train apart.
            vars(self.model).pop("_is_accelerate_prepared", None)
        if self.eval_packing and self.args.eval_strategy != "no":
            sets: Any = self.eval_dataset
            for name in sets if isinstance(sets, dict) else [None]:
                self.get_eval_dataloader(name)  # refuses now what the first evaluation would refuse
        return super().train(self._resumes_from, *args, **kwargs)

    @cached_property
    def _described(self) -> dict[str, Any]:
        return checkpoints.described(self, self._weights)

    @property
    def _last_file(self) -> str | None:
        """Last file of a checkpoint from which the rows can be continued; None: it is Trainer's own last file."""
        if isinstance(self.train_dataset, PackedStream):
            return stream_file(*self._place)
        return None if self.plan is None or self.args.ignore_data_skip else PLAN_FILE

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save as Trainer does, then write the plan or the state of the stream as the last file.

        The last file of an older checkpoint of the same step is removed first, so that a mix of both never looks
        complete. Older checkpoints are deleted (`save_total_limit`) once this one is complete.
        """
        folder, limit = None, self.args.save_total_limit
        if self.args.output_dir is not None and not self.args.save_only_model:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            checkpoints.remove_last_files(folder, *self._place, of_others=self.args.should_save)
            self.args.save_total_limit = None
        try:
            super()._save_checkpoint(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit
        if folder is None:
            return
        loader: Any = self.callback_handler.train_dataloader
        if isinstance(self.train_dataset, PackedStream):
            accumulation = self.args.gradient_accumulation_steps
            checkpoints.save_stream(folder, loader, self._described, accumulation=accumulation)
        self.accelerator.wait_for_everyone()  # every rank has written its files
        if self.args.should_save:
            if isinstance(loader, RowLoader):
                checkpoints.save_plan(folder / PLAN_FILE, loader.batch_sampler, self._described)
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(folder.parent), limit, best, use_mtime=True)

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader of this rank's rows.

        Raises:
            ConfigError: the plan belongs to another data set, or the stream to another rank; there are both a plan and
                a stream; the stream ends; the checkpoint has no state of the stream, or another plan; or several
                processes compute each batch together.
        """
        dataset: Any = self.train_dataset
        sharing = self.get_tp_size() * super().get_cp_size() * self.get_sp_size() * self._context_ranks
        if sharing != (known := self.args.world_size // self._place[1]):
            raise ConfigError(
                f"{sharing} processes would compute each batch together, but the rows are for {known}; leave "
                "parallelism_config out, and let vlmpack share rows: enable_packing(model, parallel=Parallel(mesh))"
            )
        if not isinstance(dataset, PackedStream) and self.plan is None:
            self._check_own_batches(sharing)
            return super().get_train_dataloader()
        if isinstance(dataset, PackedStream):
            return self._stream_loader(dataset)
        sampler = self._sampler(dataset)
        if self._resumes_from is not None and not self.args.ignore_data_skip:
            checkpoints.load_plan(self._resumes_from, sampler, self._described)
        collate = NumberedCollator(dataset, cast(Any, self.data_collator))
        places: Any = range(len(dataset))  # a data set of indices
        return RowLoader(places, batch_sampler=sampler, collate_fn=collate, **self._loading)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the batches of a step and the divisor of its loss; no batches once all steps are done.

        Raises:
            ConfigError: `loss` is not "token", and packing is not enabled on the model, or
                `average_tokens_across_devices` is False.
        """
        if self.state.global_step >= self.state.max_steps:  # resuming a finished run would train one more step
            return [], None
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.loss == "token" or not batches:
            return batches, items
        if not is_packing(cast(nn.Module, self.model)) or not self.args.average_tokens_across_devices:
            raise ConfigError(
                f"loss={self.loss!r} needs a model with packing, PackedTrainer(model=enable_packing(model), ...), and "
                "average_tokens_across_devices=True"
            )
        batches, counted = zip(*(weighed(batch, self.loss) for batch in batches), strict=True)
        items = torch.stack([count.to(device) for count in counted]).sum()
        if self.args.world_size > 1:
            items = cast(torch.Tensor, self.accelerator.gather(items)).sum() / (self.get_tp_size() * self.get_cp_size())
        return list(batches), items

    def get_cp_size(self) -> int:
        """Return the number of context ranks: those of accelerate, or of `Parallel`."""
        return max(super().get_cp_size(), self._context_ranks)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute gradients as Trainer does, and return the loss to log.

        Trainer logs the mean of the ranks' losses, each multiplied by the number of ranks whose gradients are averaged.
        Context ranks have the gradients of their tokens, but the loss of the row.
        """
        return super().training_step(*args, **kwargs) / self._context_ranks

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss as Trainer does, and record the loss of each channel during training."""
        if not model.training or channels_of(inputs) is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self._channel_losses.add(inputs, outputs)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does, and add `loss/NAME` for each channel trained on since the last log."""
        if "loss" in logs and "learning_rate" in logs:
            logs |= {f"loss/{channel}": loss for channel, loss in self._channel_losses.take().items()}
        super().log(logs, *args, **kwargs)

    def _sampler(self, dataset: Any) -> PackedBatchSampler:
        assert self.plan is not None
        check_plan(self.plan, dataset, self.data_collator)
        _check_first_row(self.plan, dataset, self.data_collator)
        plan = _with_whole_groups(self, self.plan)
        if count := len(dropped := self.plan.dropped.tolist()):
            first = ", ".join(map(str, dropped[:9])) + ", ..." * (count > 9)
            warnings.warn(
                f"{count} of the {len(dataset)} samples are in no row of the plan, so they are not trained on: {first} "
                "(plan.dropped): they are longer than a row, or were refused (table.refused)",
                SkippedWarning,
                stacklevel=2,
            )
        return PackedBatchSampler(
            plan,
            ranks=self._place[1],
            rank=self._place[0],
            accumulation=self.args.gradient_accumulation_steps,
            costs=self.costs,
            group_costs=self.group_costs,
            remainder=self.remainder,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
        )

    def _stream_loader(self, stream: PackedStream) -> DataLoader[Any]:
        """Return a loader of this rank's collated rows that can save its state.

        Workers are seeded from a separate generator, so that a resumed run draws the same random numbers as an
        uninterrupted one.
        """
        if self.plan is not None:
            raise ConfigError("a PackedStream packs by itself; leave plan= out")
        if (stream.rank, stream.ranks) != self._place:
            rank, ranks = self._place
            raise ConfigError(
                f"the stream is for rank {stream.rank} of {stream.ranks}, but this is rank {rank} of {ranks}: "
                f"PackedStream(..., ranks={ranks}, rank={rank}), or those of parallel.data_ranks and data_rank"
            )
        if not stream.repeat:
            raise ConfigError("Trainer trains until max_steps, but this stream ends: PackedStream(..., repeat=True)")
        generator, collate = torch.Generator().manual_seed(self.args.seed), self.data_collator
        loader = StreamLoader(stream, collate_fn=collate, generator=generator, **self._loading)
        if self._resumes_from is not None:
            accumulation = self.args.gradient_accumulation_steps
            checkpoints.load_stream(Path(self._resumes_from), loader, self._described, accumulation=accumulation)
        return loader

    @property
    def _place(self) -> tuple[int, int]:
        """(index, number) of the ranks with rows of their own."""
        return data_place(cast(nn.Module, self.model))

    @property
    def _context_ranks(self) -> int:
        parallel = parallel_of(cast(nn.Module, self.model))
        return 1 if parallel is None else parallel.ranks

    def _check_own_batches(self, sharing: int) -> None:
        if sharing > 1:
            raise ConfigError(
                f"{sharing} ranks share each batch, and Trainer deals batches to single ranks: give rows, plan= or a "
                "PackedStream to train on, eval_plan= or eval_capacity= to evaluate"
            )

    @property
    def _loading(self) -> dict[str, Any]:
        """DataLoader settings from TrainingArguments."""
        return {
            "num_workers": self.args.dataloader_num_workers,
            "prefetch_factor": self.args.dataloader_prefetch_factor,
            "persistent_workers": self.args.dataloader_persistent_workers and self.args.dataloader_num_workers > 0,
            "pin_memory": self.args.dataloader_pin_memory,
        }

    # ------------------------------------------------------------------ evaluation

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return a loader of this rank's share of the evaluation set, in planned rows.

        Raises:
            ConfigError: there is no plan and no capacity, the data set has no length, or `batch_eval_metrics` is set.
            SampleError: a sample cannot be used, and the collator's `on_bad` is "raise".
        """
        sets: Any = self.eval_dataset
        dataset = sets if eval_dataset is None else eval_dataset
        dataset = sets[dataset] if isinstance(dataset, str) else dataset
        if not self.eval_packing or dataset is None:
            return super().get_eval_dataloader(eval_dataset)
        rows, collate = self._evaluation_rows(dataset), cast(Any, self.data_collator)
        settings = {**self._loading, "persistent_workers": False}
        rank, ranks = self._place
        return EvaluationLoader(dataset, collate, rows, rank=rank, ranks=ranks, **settings)

    def _evaluation_rows(self, dataset: Any) -> EvaluationRows:
        """Return the rows of a data set, planned at its first evaluation and again when its length changes."""
        if isinstance(dataset, IterableDataset) or self.args.batch_eval_metrics:
            raise ConfigError(
                "evaluation in planned rows needs a data set with a length, and no batch_eval_metrics; set "
                "eval_packing=False"
            )
        _, rows = self._planned_sets.get(id(dataset), (None, None))
        if rows is not None and len(rows.plan.lengths) == len(dataset):
            return rows
        plan = self.eval_plan if dataset is self.eval_dataset else None
        capacity = None if plan is not None else self._row_capacity
        if plan is None and capacity is None:
            raise ConfigError(
                "evaluation in planned rows needs eval_capacity=, the tokens of a row; or eval_packing=False"
            )
        collate, workers = cast(Any, self.data_collator), self.args.dataloader_num_workers
        rows = EvaluationRows.of(dataset, collate, plan=plan, capacity=capacity, workers=workers)
        self._planned_sets[id(dataset)] = (dataset, rows)  # keeps the data set alive, so its id is unique
        return rows

    @property
    def _row_capacity(self) -> int | None:
        """Capacity of evaluation rows; None: unknown."""
        if self.eval_capacity is not None:
            return self.eval_capacity
        if isinstance(self.train_dataset, PackedStream):
            return self.train_dataset.settings.capacity
        plan = self.eval_plan if self.plan is None else self.plan
        return None if plan is None else plan.capacity

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate as Trainer does, with the exact loss. With planned rows, every rank gets the same loss.

        Raises:
            ConfigError: several ranks evaluate in batches, and some samples may be counted twice, or ranks share rows.
        """
        in_rows = isinstance(dataloader, EvaluationLoader)
        if not in_rows:
            self._check_own_batches(self.args.world_size // self._place[1])
        size, data = self.args.eval_batch_size, dataloader.dataset
        losses = self._losses = RowLosses(dataloader) if in_rows else BatchLosses(self.accelerator, size, data)
        only_loss = True if in_rows else prediction_loss_only
        try:
            output = super().evaluation_loop(dataloader, description, only_loss, ignore_keys, metric_key_prefix)
            if isinstance(losses, RowLosses):
                return self._evaluated(losses.total(), output, metric_key_prefix)
        finally:
            self._losses = None
        if output.metrics is not None and (loss := losses.mean(self.loss)) is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = loss
        return output

    def _evaluated(self, evaluation: Evaluation, output: EvalLoopOutput, prefix: str) -> EvalLoopOutput:
        self.evaluation = evaluation
        losses, targets = predictions = (evaluation.sample_losses, evaluation.sample_targets)
        metrics = evaluation.metrics
        if self.compute_metrics is not None:
            given: Any = predictions
            metrics |= self.compute_metrics(EvalPrediction(predictions=given, label_ids=np.zeros(0)))
        metrics["loss"] = mean_loss(losses * targets, targets, self.loss)
        named = {f"{prefix}_{name.removeprefix(f'{prefix}_')}": value for name, value in metrics.items()}
        metrics, count = {**(output.metrics or {}), **named}, len(losses)
        return EvalLoopOutput(predictions=cast(Any, predictions), label_ids=None, metrics=metrics, num_samples=count)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Compute a batch as Trainer does, and store the losses of its samples. Planned rows return no predictions.

        Raises:
            ConfigError: packing is not enabled on the model.
        """
        losses, call = self._losses, StepCall(None)
        if losses is not None and is_packing(model):
            inputs = {**inputs, STEP: call}
        outputs = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if isinstance(losses, RowLosses):
            if call.result is None:
                raise ConfigError("evaluation in planned rows needs PackedTrainer(model=enable_packing(model), ...)")
            losses.add(inputs, call.result)
            return None, None, None
        if losses is None or outputs[0] is None:
            return outputs
        if is_packing(model):
            losses.add(call.result)
        elif not self._warned_of_means:
            self._warned_of_means = True
            warnings.warn(
                "packing is not enabled on the model, so eval_loss is HF Trainer's mean of the batches' means. "
                "PackedTrainer(model=enable_packing(model), ...) gives the exact one",
                UnpackedWarning,
                stacklevel=2,
            )
        return outputs


def _with_whole_groups(trainer: Any, plan: Plan) -> Plan:
    """Return the plan, with the capacity of its rows set on the model; or with groups split if the model cannot compute
    a group in pieces."""
    if not plan.whole_groups or not is_packing(trainer.model):
        return plan
    core = find_model(trainer.model)
    state = packing_state(core)
    if (problem := problem_of_pieces(trainer)) is not None:
        _LOG.warning("groups that do not fit a row are split, and each part computes the prefix again: %s", problem)
        return split_groups(plan)
    if state.config.capacity is None:
        enable_packing(core, replace(state.config, capacity=plan.capacity), parallel=state.parallel)
    return plan


def problem_of_pieces(trainer: Any) -> str | None:
    """Return why this trainer cannot compute rows in pieces; None: it can."""
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return "DeepSpeed and FSDP exchange gradients in the first of its backward passes"
    return packing_state(find_model(trainer.model)).problem_of_pieces(trainer.model)


def take_rows_whole(trainer: Any) -> None:
    """Take `StepConfig.capacity` from a model that this trainer cannot train on rows in pieces."""
    core = find_model(trainer.model)
    state = stored_state(core)
    if state is None or state.config.capacity is None or (problem := problem_of_pieces(trainer)) is None:
        return
    _LOG.warning(
        "rows larger than the capacity of %d tokens go through the model whole: %s", state.config.capacity, problem
    )
    enable_packing(core, replace(state.config, capacity=None), parallel=state.parallel)


class RowLoader(DataLoader[Any]):
    """Loads the rows of a `PackedBatchSampler`. Trainer sets the epoch, even the one in which a run is resumed."""

    batch_sampler: PackedBatchSampler  # pyright: ignore[reportIncompatibleVariableOverride]

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self.batch_sampler.set_epoch(epoch)


def _check_first_row(plan: Plan, dataset: Any, collator: Any) -> None:
    """Warn if the samples of the first row have other lengths than planned: the plan is of another data set."""
    if not isinstance(collator, VLMCollator) or isinstance(dataset, PackedDataset):
        return
    for at in plan[0].tolist() if len(plan) else ():
        with suppress(SampleError):  # raised, or skipped and listed, by its row
            if (tokens := collator.measure(dataset[at], at).num_tokens) != plan.lengths[at]:
                warnings.warn(
                    f"sample {at} has {tokens} tokens, and {plan.lengths[at]} in the plan, so rows may be longer than "
                    f"{plan.capacity} tokens; plan this data set: plan_bins(measure_lengths(dataset, collator), ...)",
                    stacklevel=3,
                )
                return


class EpochBySteps(TrainerCallback):
    """Compute the epoch of a stream as the fraction of steps done, whether or not the run was resumed."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Replace Trainer's count, which starts where the run was started."""
        state.epoch = state.global_step / state.max_steps
