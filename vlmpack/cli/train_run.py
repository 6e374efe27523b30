"""A run of `vlmpack train`.

keys ──▶ data, lengths, rows ──▶ the plan ──▶ model, adapters, PackedTrainer ──▶ weights, losses, answers
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from math import ceil
from pathlib import Path
from typing import Any, final

import torch
from transformers import IntervalStrategy, TrainingArguments, set_seed

from vlmpack.cli import inputs
from vlmpack.cli.config import DEFAULTS, OF_DATA, OF_TRAIN, UNUSED, TrainKeys
from vlmpack.cli.memory import CHECKPOINTING, memory_of_training
from vlmpack.cli.models import free_bytes, make_model, refused_as
from vlmpack.cli.options import DataOptions, make_folder
from vlmpack.context_parallel.mesh import Parallel
from vlmpack.data.mixed import hold_out
from vlmpack.errors import ConfigError
from vlmpack.lengths import check_refused
from vlmpack.loading.sampler import PackedBatchSampler
from vlmpack.model.enable import enable_packing
from vlmpack.plan.length_table import LengthTable
from vlmpack.plan.plan import Plan
from vlmpack.trainer.check import check_arguments, check_trainer
from vlmpack.trainer.checkpoints import PLAN_FILE, checkpoint_to_resume
from vlmpack.trainer.evaluation import generate_answer
from vlmpack.trainer.packed_trainer import PackedTrainer


@final
class TrainRun:
    """A training with planned rows; the model's weights are not loaded yet.

    Args:
        given: keys that were set.
        quiet: show no progress.

    Raises:
        ConfigError: keys contradict each other, or something they name cannot be read. SampleError: a sample cannot be
            used, and on_bad is raise.
    """

    def __init__(self, given: Mapping[str, Any], *, quiet: bool) -> None:
        self.given = given
        self.keys = keys = TrainKeys(**{name: given[name] for name in OF_TRAIN if name in given})
        self.args = args = training_arguments(given, keys, quiet=quiet)  # also joins the ranks of torchrun
        self.folder = Path(str(args.output_dir))
        self.resume = checkpoint_to_resume(given.get("resume_from_checkpoint"), self.folder, PLAN_FILE)
        if args.max_steps == 0 or (args.max_steps < 0 and args.num_train_epochs <= 0) or args.learning_rate <= 0:
            raise ConfigError("nothing would be trained; set max_steps or num_train_epochs, and learning_rate, above 0")
        data = data_options(given, keys, keys.data, self.folder)
        dataset, self.collator = inputs.open_inputs(data, on_bad=keys.on_bad)
        with args.main_process_first(desc="measuring"):  # the other ranks read its cache
            make_folder(self.folder)
            table = self._measured(dataset, data, quiet=quiet)
            self.measured, self.refused = {data.title: table}, table.refused
            if keys.eval_data is None:
                parts = hold_out(dataset, keys.val_size, seed=data.seed, usable=table.sample_ids.tolist())
                (self.train_set, self.table), (self.eval_set, of_eval) = (
                    (part, table.of_subset(part.indices)) for part in parts
                )
            else:
                held_out = data_options({**given, "num": None, "mix": None}, keys, keys.eval_data, self.folder)
                self.train_set, self.table = dataset, table
                self.eval_set = inputs.open_inputs(held_out).dataset
                of_eval = self.measured[held_out.title] = self._measured(self.eval_set, held_out, quiet=quiet)
        self.plan = self._planned(self.table, data)
        self.eval_plan = self._planned(of_eval, data) if len(of_eval) else None
        if keys.samples_per_update is not None:
            args.gradient_accumulation_steps = self.plan.accumulation(keys.samples_per_update, ranks=args.world_size)
        if self.eval_plan is None:
            args.eval_strategy, args.eval_on_start, args.load_best_model_at_end = IntervalStrategy.NO, False, False
        self.is_sharded = bool(args.fsdp or args.deepspeed)

    def _measured(self, samples: Any, data: DataOptions, *, quiet: bool) -> LengthTable:
        found = inputs.Inputs(samples, self.collator)
        table = inputs.measure(found, data, quiet=quiet, min_shared=data.min_shared or None)
        check_refused(table, self.collator, of=data.title)
        return table

    def _planned(self, table: LengthTable, data: DataOptions) -> Plan:
        plan = inputs.plan_rows(table, data, self.keys.capacity)
        if not len(plan.sample_ids):
            raise ConfigError(f"{data.title}: no sample can be used ({len(table):,} are too large for a row)")
        return plan

    def to_dict(self) -> dict[str, Any]:
        """Return the plan, for JSON."""
        plan, args, table, first = self.plan, self.args, self.table, int(self.plan[0][0])
        parts, free = self.collator.text_parts(self.train_set[first], first), free_bytes(args.device)
        accumulation, ranks = args.gradient_accumulation_steps, args.world_size
        rows = len(PackedBatchSampler(plan, ranks=ranks, rank=args.process_index, accumulation=accumulation))
        model = make_model(self.keys, self.collator.processor, only_shapes=True)
        patches = int(plan.sums(table.by_place(table.patches)).max())
        memory = memory_of_training(model, args, tokens=int(plan.tree_tokens.max()), patches=patches)
        return {
            "model": self.keys.model,
            "method": self.keys.method,
            "weights": sum(each.numel() for each in model.parameters()),
            "trained_weights": sum(each.numel() for each in model.parameters() if each.requires_grad),
            "samples": len(plan.sample_ids),
            "held_out": 0 if self.eval_plan is None else len(self.eval_plan.sample_ids),
            "left_out": len(self.refused) + len(table) - len(plan.sample_ids),
            "tokens": int(plan.tokens.sum()),
            "targets": int(table.targets.sum()),
            "capacity": plan.capacity,
            "rows": len(plan),
            "fill": plan.fill,
            "ranks": ranks,
            "accumulation": accumulation,
            "samples_per_update": len(plan.sample_ids) / max(1, len(plan) / (ranks * accumulation)),
            "updates": args.max_steps if args.max_steps > 0 else ceil(rows // accumulation * args.num_train_epochs),
            "memory": {**memory, "total": sum(memory.values()), "free": free},
            "sample": [{"text": text, "trained_on": is_target} for text, is_target in parts],
            "ignored": self.ignored(),
            "output_dir": str(self.folder),
        }

    def ignored(self) -> dict[str, str]:
        """Return the keys that were set and have no effect, with the reason."""
        keys, args = self.keys, self.args
        of_lora, of_images = "lora_rank lora_alpha lora_dropout lora_targets merge", "freeze_vision max_patches"
        of_evaluation = "eval_strategy eval_steps eval_on_start load_best_model_at_end max_new_tokens"
        of_optimizer = "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon"
        cases = (
            (keys.method == "full", of_lora, "method is full"),
            (not self.collator.metadata.has_vision, of_images, "the model takes only text"),
            (args.device.type == "cpu", "fp16", "CPUs train in float32, or with bf16"),
            (args.max_steps > 0, "num_train_epochs", "max_steps is set"),
            (keys.samples_per_update is not None, "gradient_accumulation_steps", "samples_per_update sets it"),
            (keys.eval_data is not None, "val_size", "eval_data is set"),
            (args.eval_strategy == "no", "eval_steps", "eval_strategy is no"),
            (self.eval_plan is None, of_evaluation, "no samples are held out"),
            (self.resume is not None, of_optimizer, "the optimizer continues with that of the checkpoint"),
            (self.is_sharded, "merge max_new_tokens", "no rank has the whole model"),
            (args.save_strategy != "steps", "save_steps", "save_strategy is not steps"),
            (not args.dataloader_num_workers, "dataloader_persistent_workers", "there are no workers"),
        )
        why = {**UNUSED, **{name: reason for holds, names, reason in cases if holds for name in names.split()}}
        return {name: why[name] for name in self.given if name in why}

    def train(self) -> dict[str, Any]:
        """Train, evaluate before and after, save, and merge the adapters.

        Returns:
            Losses and answers before (unless the run is resumed) and after, and the folders of the weights, for JSON.
        """
        set_seed(self.args.seed)  # for the adapters' initial weights
        processor, merged = self.collator.processor, None
        model: Any = enable_packing(make_model(self.keys, processor), parallel=Parallel())
        with refused_as("Trainer refuses these keys"):
            trainer = PackedTrainer(
                model, self.args, self.collator, self.train_set, self.eval_set, processing_class=processor,
                plan=self.plan, eval_plan=self.eval_plan,
            )  # fmt: skip
            if not self.is_sharded:  # try its settings before anything is computed
                trainer.create_scheduler(1, trainer.create_optimizer())
                trainer.optimizer = trainer.lr_scheduler = None
        check_trainer(trainer)
        before = None if self.resume else self._state(trainer)
        trainer.train(self.resume)
        after = self._state(trainer)
        trainer.save_model()
        if self.keys.method == "lora" and self.keys.merge and not self.is_sharded:
            merged = str(self.folder / "merged")
            if self.args.should_save:
                model.merge_and_unload().save_pretrained(merged)
                processor.save_pretrained(merged)
        return {"before": before, "after": after, "saved": str(self.folder), "merged": merged}

    def _state(self, trainer: PackedTrainer) -> dict[str, Any] | None:
        """Evaluate the held-out samples, and generate the last answer of the first one; None: there are none."""
        if self.eval_plan is None:
            return None
        loss, answer, tokens = trainer.evaluate()["eval_loss"], None, self.keys.max_new_tokens
        if tokens and not self.is_sharded:
            sample = self.eval_set[int(self.eval_plan[0][0])]
            answer = generate_answer(trainer.model, self.collator, sample, max_new_tokens=tokens)
        return {"loss": loss, "answer": answer}


# ---------------------------------------------------------------------- what the keys mean


def data_options(given: Mapping[str, Any], keys: TrainKeys, source: str, folder: Path) -> DataOptions:
    """Make the data options; a sample may be as long as a row, or longer in its own."""
    settings = {name: given[name] for name in OF_DATA if given.get(name) is not None}
    if settings.get("max_length", 0) > keys.capacity:
        raise ConfigError(f"max_length is above capacity={keys.capacity}; raise capacity, or leave max_length out")
    if not isinstance(columns := settings.get("columns", []), list):
        settings["columns"] = [columns if isinstance(columns, str) else json.dumps(columns)]
    whole = None if settings.get("overlength") == "own_row" else keys.capacity
    ours = {"processor": keys.model, "max_length": whole, "cache": str(folder / "lengths.sqlite")}
    return DataOptions(dataset=source, **{**ours, **settings})


def training_arguments(given: Mapping[str, Any], keys: TrainKeys, *, quiet: bool) -> TrainingArguments:
    """Make the trainer's arguments.

    Raises:
        ConfigError: TrainingArguments refuses them, or packed rows would differ from their samples alone.
    """
    on_gpu = torch.cuda.is_available()
    names = {each.name for each in fields(TrainingArguments)} - {*UNUSED, "resume_from_checkpoint"}
    settings: dict[str, Any] = {
        **DEFAULTS,
        "learning_rate": 1e-4 if keys.method == "lora" else 1e-5,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
        "dataloader_num_workers": given.get("workers", 0),
        "disable_tqdm": quiet,
    }
    if given.keys().isdisjoint(CHECKPOINTING):
        settings[next(name for name in CHECKPOINTING if name in names)] = on_gpu
    settings |= {name: value for name, value in given.items() if name in names}
    settings["output_dir"] = settings["output_dir"] or DEFAULTS["output_dir"]
    with refused_as("TrainingArguments refuses these keys"):
        args = TrainingArguments(**settings, remove_unused_columns=False)
    check_arguments(args)
    return args
