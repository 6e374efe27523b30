"""PackedTrainer: HF Trainer on the rows of a plan or a stream, and evaluation in planned rows."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import EvalPrediction, Trainer, default_data_collator
from transformers.trainer_utils import EvalLoopOutput

from vlmpack.errors import ConfigError, check_kind
from vlmpack.loading import PackedBatchSampler, PackedStream, Remainder
from vlmpack.model import STEP, StepCall, is_packing
from vlmpack.plan import Plan
from vlmpack.store import PackedDataset
from vlmpack.trainer.checkpoints import check_whole, checkpoint_folder, newest_whole
from vlmpack.trainer.evaluation import Account, BatchAccount, Evaluation
from vlmpack.trainer.held_out import HeldOut, HeldOutLoader, hold_out
from vlmpack.trainer.plan_rows import PLAN_FILE, PlanPlace, RowLoader, check_plan
from vlmpack.trainer.stream_rows import (
    StreamPlace,
    go_to_place,
    place_file,
    stream_loader,
)


class PackedTrainer(Trainer):
    """A Trainer whose batches are planned rows, one a step and rank and micro-batch.

        PackedTrainer(model=enable_packing(model), ..., train_dataset=rows, plan=plan_bins(lengths, 8192))
        PackedTrainer(model=enable_packing(model), ..., train_dataset=PackedStream(..., repeat=True))

    Each rank takes its own rows; accelerate deals none out. `train(resume_from_checkpoint=...)` goes on with the very
    rows that were left. `evaluate()` computes planned rows too, see `evaluation`.

    With another subclass of Trainer: `class PackedOther(PackedTrainer, Other)`, this one first.

    Args:
        *args: Trainer's own; `data_collator` may be left out for a `PackedDataset`, which has one.
        plan: rows of `train_dataset`, planned from the lengths of all its samples or their `LengthTable`; None: it is
            a `PackedStream`, or batches are made as Trainer does and packed inside.
        costs: [N] what each sample of the plan costs to compute, for the balance over ranks; None: its length.
        remainder: what becomes of rows that do not fill the last step, see `PackedBatchSampler`.
        eval_packing: evaluate in planned rows; False: in batches, as Trainer does.
        eval_plan: rows of `eval_dataset`, if it is a single one; None: its lengths are measured by the collator, once.
        eval_capacity: tokens of a row of evaluation; None: as in training.
        **kwargs: Trainer's own.

    Raises:
        ConfigError: what is given as a plan is none; an `eval_plan` and several data sets to evaluate.
    """

    def __init__(
        self,
        *args: Any,
        plan: Plan | None = None,
        costs: np.ndarray | None = None,
        remainder: Remainder = "split",
        eval_packing: bool = True,
        eval_plan: Plan | None = None,
        eval_capacity: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if plan is not None:
            check_kind("plan", plan, Plan, "plan_bins(table, 8192)")
        if isinstance(self.train_dataset, PackedDataset) and self.data_collator is default_data_collator:
            self.data_collator = self.train_dataset.collate
        self.plan, self.costs = plan, costs
        self.remainder: Remainder = remainder
        self.eval_packing, self.eval_plan, self.eval_capacity = eval_packing, eval_plan, eval_capacity
        self.evaluation: Evaluation | None = None
        """Of the last evaluation in planned rows: the loss of every sample, in the data set's order."""
        self._account: Account | None = None
        self._batches: BatchAccount | None = None
        self.model_accepts_loss_kwargs = bool(self.model_accepts_loss_kwargs)  # what it evaluates is counted by itself
        self._held_out: list[tuple[Any, int, HeldOut]] = []
        self._resumes_from: str | None = None
        if isinstance(self.train_dataset, PackedStream):
            self.args.ignore_data_skip = True  # it goes to its place by itself, without reading what lies before
            self.add_callback(StreamPlace)
        self.add_callback(PlanPlace)
        self._check_eval_plan()

    # ------------------------------------------------------------------ training

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; True resumes from the newest checkpoint that was written to its end.

        Raises:
            ConfigError: the checkpoint was not, or has no rows that could be continued; or there is none.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(newest_whole(self.args.output_dir or ".", self._last_file))
        elif resume_from_checkpoint:
            check_whole(resume_from_checkpoint, self._last_file)
        self._resumes_from = resume_from_checkpoint or None
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            # The mark of an evaluation before: accelerate would wrap no DDP around the model, and ranks train apart.
            vars(self.model).pop("_is_accelerate_prepared", None)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    @property
    def _last_file(self) -> str | None:
        """The file that ends a checkpoint which its rows can be continued from; None: Trainer's own does."""
        if isinstance(self.train_dataset, PackedStream):
            return place_file(self.args.process_index)
        return None if self.plan is None or self.args.ignore_data_skip else PLAN_FILE

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As Trainer's; what ends an older checkpoint of this step goes first, so that no mixture looks whole."""
        if (folder := checkpoint_folder(self.args, self.state)) is not None:
            for last_file in (PLAN_FILE, place_file(self.args.process_index)):
                (folder / last_file).unlink(missing_ok=True)
        super()._save_checkpoint(*args, **kwargs)

    def get_train_dataloader(self) -> DataLoader:
        """This rank's rows.

        Raises:
            ConfigError: the plan is of another data set, or the stream of other ranks; there is both; the stream ends,
                or the checkpoint does not know its place, or is of another plan; several processes compute each batch
                together.
        """
        dataset: Any = self.train_dataset
        if isinstance(dataset, PackedStream):
            if self.plan is not None:
                raise ConfigError("a PackedStream packs by itself; leave plan= out")
            self._check_ranks()
            loader = stream_loader(dataset, self.args, self.data_collator, **self._loading)
            if self._resumes_from is not None:
                go_to_place(loader, self._resumes_from, self.args.process_index)
            return loader
        if self.plan is None:
            return super().get_train_dataloader()
        self._check_ranks()
        sampler = self._sampler(dataset)
        if self._resumes_from is not None and not self.args.ignore_data_skip:
            check_plan(sampler, self._resumes_from)
        return RowLoader(dataset, batch_sampler=sampler, collate_fn=self.data_collator, **self._loading)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Trainer's; nothing once all steps are done: a finished run that is resumed would train one more."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _check_ranks(self) -> None:
        if (sharing := self.get_tp_size() * self.get_cp_size() * self.get_sp_size()) > 1:
            raise ConfigError(
                f"{sharing} processes are to compute each batch together (tensor, context or sequence parallelism), "
                "but each is dealt rows of its own; leave parallelism_config out"
            )

    def _sampler(self, dataset: Any) -> PackedBatchSampler:
        assert self.plan is not None
        if not isinstance(dataset, Sized):
            raise ConfigError(
                f"a plan says by their numbers which samples share a row, but those of a {type(dataset).__name__} have "
                "none: leave plan= out and pack them as they come, with PackedStream"
            )
        if len(self.plan.lengths) != len(dataset):
            raise ConfigError(
                f"the plan is of {len(self.plan.lengths)} samples, but train_dataset has {len(dataset)}; plan this "
                "one: plan_bins(table, capacity) of its LengthTable, which knows of refused samples, as table.tokens "
                "does not"
            )
        return PackedBatchSampler(
            self.plan,
            ranks=self.args.world_size,
            rank=self.args.process_index,
            accumulation=self.args.gradient_accumulation_steps,
            costs=self.costs,
            remainder=self.remainder,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
        )

    @property
    def _collator(self) -> Any:
        """Trainer's type of it is narrower than what it takes."""
        return self.data_collator

    @property
    def _loading(self) -> dict[str, Any]:
        """What a DataLoader is told by TrainingArguments."""
        return {
            "num_workers": self.args.dataloader_num_workers,
            "prefetch_factor": self.args.dataloader_prefetch_factor,
            "persistent_workers": self.args.dataloader_persistent_workers,
            "pin_memory": self.args.dataloader_pin_memory,
        }

    # ------------------------------------------------------------------ evaluation

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """This rank's share of the evaluation set, in rows.

        Raises:
            ConfigError: there is nothing to plan by, or metrics are asked for that rows do not give.
            SampleError: a sample cannot be used, and the collator is told to raise.
        """
        sets: Any = self.eval_dataset
        dataset = sets if eval_dataset is None else eval_dataset
        dataset = sets[dataset] if isinstance(dataset, str) else dataset
        if not self.eval_packing or dataset is None:
            return super().get_eval_dataloader(eval_dataset)
        held_out = self._hold_out(dataset)
        share = held_out.share(self.args.process_index, self.args.world_size)
        loading = {**self._loading, "persistent_workers": False}
        return HeldOutLoader(dataset, self._collator, held_out, share, **loading)

    def _hold_out(self, dataset: Any) -> HeldOut:
        """Its rows, planned when they are first asked for."""
        if isinstance(dataset, IterableDataset) or self.args.batch_eval_metrics:
            raise ConfigError(
                "evaluation in planned rows needs a data set with a length, and gives metrics of the whole set, not a "
                "batch at a time (batch_eval_metrics); set eval_packing=False"
            )
        self._check_eval_plan()
        for known, size, held_out in self._held_out:
            if known is dataset and size == len(dataset):
                return held_out
        plan = self.eval_plan if dataset is self.eval_dataset else None
        capacity = None if plan is not None else self._capacity()
        workers = self.args.dataloader_num_workers
        held_out = hold_out(dataset, self._collator, plan=plan, capacity=capacity, workers=workers)
        others = [entry for entry in self._held_out if entry[0] is not dataset]
        self._held_out = [*others, (dataset, len(dataset), held_out)]
        return held_out

    def _check_eval_plan(self) -> None:
        if self.eval_plan is not None and isinstance(self.eval_dataset, dict):
            names = ", ".join(map(str, self.eval_dataset))
            raise ConfigError(
                f"eval_plan has the rows of one data set, but eval_dataset has {len(self.eval_dataset)}: {names}; "
                "leave eval_plan out (eval_capacity= is the tokens of a row), or evaluate each by "
                "vlmpack.trainer.evaluate(..., plan=)"
            )

    def _capacity(self) -> int:
        """Tokens of a row of evaluation."""
        if self.eval_capacity is not None:
            return self.eval_capacity
        if isinstance(self.train_dataset, PackedStream):
            return self.train_dataset.settings.capacity
        for plan in (self.plan, self.eval_plan):
            if plan is not None:
                return plan.capacity
        raise ConfigError("evaluation in planned rows needs eval_capacity=, the tokens of a row; or eval_packing=False")

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Trainer's, with the exact loss; over planned rows it comes from `evaluation`, the same on every rank.

        Raises:
            ConfigError: over several ranks, in batches of which nobody can tell which samples are counted twice.
        """
        if not isinstance(dataloader, HeldOutLoader):
            self._batches = batches = BatchAccount(self.accelerator, self.args.eval_batch_size)
            batches.check_length(dataloader.dataset)
            try:
                output = super().evaluation_loop(
                    dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
            finally:
                self._batches = None
            if output.metrics is not None and (loss := batches.token_loss()) is not None:
                output.metrics[f"{metric_key_prefix}_loss"] = loss
            return output
        self._account = Account(dataloader)
        try:
            output = super().evaluation_loop(dataloader, description, True, ignore_keys, metric_key_prefix)
            self.evaluation = seen = self._account.total()
        finally:
            self._account = None
        predictions: Any = (seen.sample_losses, seen.sample_targets)
        metrics = {"loss": seen.token_loss, **seen.metrics}
        if self.compute_metrics is not None:
            metrics |= self.compute_metrics(EvalPrediction(predictions=predictions, label_ids=np.zeros(0)))
        named = {f"{metric_key_prefix}_{name.removeprefix(f'{metric_key_prefix}_')}": n for name, n in metrics.items()}
        return EvalLoopOutput(
            predictions=predictions,
            label_ids=None,
            metrics={**(output.metrics or {}), **named},
            num_samples=len(seen.sample_ids),
        )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Trainer's, noting the losses of samples; a planned row leaves nothing for Trainer to gather.

        Raises:
            ConfigError: packing is not enabled on the model.
        """
        call = StepCall()
        if self._account is None:
            if self._batches is None or not is_packing(model):
                return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            outputs = super().prediction_step(model, {**inputs, STEP: call}, prediction_loss_only, ignore_keys)
            if outputs[0] is not None:
                self._batches.add(call.result)
            return outputs
        super().prediction_step(model, {**inputs, STEP: call}, True, ignore_keys)
        if call.result is None:
            raise ConfigError("evaluation in planned rows needs PackedTrainer(model=enable_packing(model), ...)")
        self._account.add(inputs, call.result)
        return None, None, None
