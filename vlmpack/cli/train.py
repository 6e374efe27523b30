"""`vlmpack train`: fine-tune a model on conversations in packed rows.

keys ──▶ data, lengths, rows ──▶ the plan, printed ──▶ model, adapters, PackedTrainer ──▶ weights, losses, answers
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields
from itertools import groupby
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import typer
from rich.console import Console
from rich.text import Text

from vlmpack.cli import inputs, options
from vlmpack.cli.config import DEFAULTS, OF_DATA, OF_TRAIN, UNUSED, TrainKeys, print_keys, read_config
from vlmpack.cli.inputs import Inputs, open_inputs, open_model, print_refused, quiet_transformers
from vlmpack.cli.options import DataOptions
from vlmpack.errors import ConfigError, SkippedWarning, UnpackedWarning, check_extra
from vlmpack.terminal import format_bytes, print_table, print_text, text_column

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainingArguments

    from vlmpack.plan.length_table import LengthTable
    from vlmpack.plan.plan import Plan
    from vlmpack.trainer.packed_trainer import PackedTrainer

LENGTHS, MERGED = "lengths.sqlite", "merged"
CHECKPOINTING, OLD_CHECKPOINTING = "activation_checkpointing", "gradient_checkpointing"
"""Names in TrainingArguments since transformers 5.23, and before."""
SHOWN = 1500
"""Number of characters of the sample that are printed."""


def train(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings; they override the file.")
    ] = None,
    config: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="YAML file of settings.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan without training; measured lengths are kept.")
    ] = False,
    help_config: Annotated[
        bool, typer.Option("--help-config", help="List all keys with their defaults, and exit.")
    ] = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Fine-tune a model on conversations in packed rows: LoRA or all weights; evaluate, save and merge.

    For example: vlmpack train model=Qwen/Qwen3-VL-2B-Instruct data=chats.jsonl --dry-run. The plan shows rows, steps,
    memory, a sample with its targets, and keys without effect. On several GPUs: torchrun --nproc_per_node 8
    -m vlmpack train --config train.yaml. Continue a stopped run with resume_from_checkpoint=true.
    """
    check_extra("train", "accelerate", needed_by="`vlmpack train`")
    if help_config:
        print_keys(Console())
        return
    with quiet_transformers():
        for kind in (SkippedWarning, UnpackedWarning):  # show ours
            warnings.simplefilter("default", kind)
        run = Run(read_config(config, settings or ()), quiet=quiet)
        console = Console(quiet=as_json or run.args.process_index > 0)
        numbers = run.to_dict()
        print_run(numbers, run.table, console)
        with redirect_stdout(sys.stderr):  # Trainer's own lines
            result = None if dry_run else run.train()
    if result is not None:
        print_result(result, console)
    if as_json and run.args.process_index == 0:
        typer.echo(json.dumps({**numbers, "result": result}, indent=2))


def data_options(given: Mapping[str, Any], keys: TrainKeys, sources: Any, *, cache: Path) -> DataOptions:
    """Make the data options; a sample may be as long as a row, or longer in its own."""
    names = [sources] if isinstance(sources, str) else [*sources]
    if not names:
        raise ConfigError("data names no data set; give a file, a folder or a hub id")
    if isinstance(sources, dict):  # weights relative to the first
        if wrong := [name for name, weight in sources.items() if not 0 < weight < inf]:
            raise ConfigError(f"data: the weight of {wrong[0]} must be a number above 0, got {sources[wrong[0]]}")
        names[1:] = [f"{name}={sources[name] / sources[names[0]]}" for name in names[1:]]
    settings = {name: given[name] for name in OF_DATA if given.get(name) is not None}
    if isinstance(columns := settings.get("columns", []), dict):
        maps = {f"{name}=": each for name, each in columns.items() if isinstance(each, dict)} or {"": columns}
        columns = [f"{name}{json.dumps(each)}" for name, each in maps.items()]
    settings["columns"] = [columns] if isinstance(columns, str) else columns
    whole = keys.capacity if settings.get("overlength") != "own_row" else None
    ours = {"processor": keys.model, "max_length": whole, "cache": str(cache)}
    return DataOptions(dataset=names[0], mix=names[1:], **{**ours, **settings})


def training_arguments(given: Mapping[str, Any], keys: TrainKeys, *, quiet: bool) -> TrainingArguments:
    """Make the trainer's arguments.

    Raises:
        ConfigError: TrainingArguments refuses them, or packed rows would differ from their samples alone.
    """
    import torch
    from transformers import TrainingArguments

    from vlmpack.trainer.check import check_arguments

    on_gpu = torch.cuda.is_available()
    names = {each.name for each in fields(TrainingArguments)} - {*UNUSED, "resume_from_checkpoint"}
    ours: dict[str, Any] = {
        **DEFAULTS,
        "learning_rate": 1e-4 if keys.method == "lora" else 1e-5,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
        "dataloader_num_workers": given.get("workers", 0),
        "disable_tqdm": quiet,
        **({"save_strategy": "steps"} if "save_steps" in given else {}),
    }
    if not {CHECKPOINTING, OLD_CHECKPOINTING} & given.keys():
        ours[CHECKPOINTING if CHECKPOINTING in names else OLD_CHECKPOINTING] = on_gpu
    settings = {**ours, **{name: value for name, value in given.items() if name in names}}
    with refused_as("TrainingArguments refuses these keys"):
        args = TrainingArguments(**settings, remove_unused_columns=False)
    check_arguments(args)
    return args


@contextmanager
def refused_as(what: str) -> Iterator[None]:
    """Turn errors of other libraries about settings into a ConfigError that begins with `what`."""
    try:
        yield
    except (ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(f"{what}: {' '.join(str(error).split())}") from error


def make_model(keys: TrainKeys, processor: Any, *, only_shapes: bool = False) -> nn.Module:
    """Load the model and add adapters; `only_shapes` makes it on the meta device, without weights.

    Raises:
        ConfigError: it cannot be read. FamilyError: it cannot be packed exactly.
    """
    import torch

    from vlmpack.families.registry import family_of

    low = keys.dtype == "bfloat16" or (keys.dtype is None and keys.method == "lora" and torch.cuda.is_available())
    dtype = torch.bfloat16 if low else torch.float32
    model = open_model(keys.model, processor, dtype, only_shapes=only_shapes)
    family = family_of(model)
    frozen = family.vision_path if keys.freeze_vision else None
    if keys.method == "full":
        if frozen:
            model.get_submodule(frozen).requires_grad_(False)
        return model
    check_extra("peft", "peft", needed_by="method=lora")
    from peft import LoraConfig, get_peft_model

    targets: Any = keys.lora_targets
    if targets == "all-linear":  # PEFT's own also adapts experts and routers
        parts = (family.text_path, *([] if frozen or family.vision_path is None else [family.vision_path]))
        layers = ((part, *each) for part in parts for each in model.get_submodule(part).named_modules())
        targets = [f"{part}.{name}" for part, name, layer in layers if isinstance(layer, torch.nn.Linear)]
    outside = rf"{frozen}\..*" if frozen else None
    rank, alpha = keys.lora_rank, 2 * keys.lora_rank if keys.lora_alpha is None else keys.lora_alpha
    settings: dict[str, Any] = {"lora_alpha": alpha, "target_modules": targets, "exclude_modules": outside}
    with refused_as(f"lora_targets {keys.lora_targets}"):
        return get_peft_model(model, LoraConfig(r=rank, lora_dropout=keys.lora_dropout, **settings))


# ---------------------------------------------------------------------- a run


@final
class Run:
    """A training with planned rows; the model's weights are not loaded yet.

    Args:
        given: keys that were set.
        quiet: show no progress.

    Raises:
        ConfigError: keys contradict each other, or something they name cannot be read. SampleError: a sample cannot be
            used, and on_bad is raise.
    """

    def __init__(self, given: Mapping[str, Any], *, quiet: bool) -> None:
        from torch import Generator
        from torch.utils.data import Subset, random_split

        from vlmpack.data.mixed import MixedDataset
        from vlmpack.trainer.checkpoints import PLAN_FILE, checkpoint_to_resume

        self.given = given
        self.keys = keys = TrainKeys(**{name: given[name] for name in OF_TRAIN if name in given})
        self.args = args = training_arguments(given, keys, quiet=quiet)  # also joins the ranks of torchrun
        self.folder = Path(args.output_dir or DEFAULTS["output_dir"])
        self.resume = checkpoint_to_resume(given.get("resume_from_checkpoint"), self.folder, PLAN_FILE)
        self.data = data_options(given, keys, keys.data, cache=self.folder / LENGTHS)
        self.train_set, self.collator = open_inputs(self.data, on_bad=keys.on_bad)
        self.eval_set: Any = None
        size = len(self.train_set)
        if keys.eval_data is not None:
            held_out = data_options({**given, "num": None}, keys, keys.eval_data, cache=self.folder / LENGTHS)
            self.eval_set = open_inputs(held_out).dataset
        elif keys.val_size >= max(1, size):
            raise ConfigError(f"val_size={keys.val_size:g} leaves nothing to train on: data has {size:,} samples")
        elif num := min(ceil(keys.val_size * (1 if keys.val_size >= 1 else size)), size - 1):
            data, generator = self.train_set, Generator().manual_seed(self.data.seed)
            self.train_set, self.eval_set = random_split(data, [size - num, num], generator)
            if isinstance(data, MixedDataset):
                self.train_set = Subset(data, data.others(self.eval_set.indices))
        with args.main_process_first(desc="measuring"):  # the other ranks read its cache
            options.make_folder("output_dir", self.folder)
            self.table, self.plan = self._planned(self.train_set, quiet=quiet)
            self.eval_plan = None if self.eval_set is None else self._planned(self.eval_set, quiet=quiet)[1]
        if keys.samples_per_update is not None:
            a_step = len(self.plan.sample_ids) / len(self.plan) * args.world_size
            args.gradient_accumulation_steps = max(1, ceil(keys.samples_per_update / a_step))

    def _planned(self, samples: Any, *, quiet: bool) -> tuple[LengthTable, Plan]:
        """Measure samples and plan their rows."""
        from vlmpack.lengths import check_refused

        data, capacity = self.data, self.keys.capacity
        table = inputs.measure(Inputs(samples, self.collator), data, quiet=quiet, min_shared=data.min_shared)
        check_refused(table, self.collator)
        if not len(table) or table.tokens.min() > capacity:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in table.reasons.items()) or "there are none"
            raise ConfigError(f"{data.title}: no sample can be used ({reasons}); `vlmpack analyze` lists them")
        return table, inputs.plan_rows(table, data, capacity)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the weights."""
        return bool(self.args.fsdp or self.args.deepspeed)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan, for JSON."""
        from vlmpack.loading.sampler import PackedBatchSampler
        from vlmpack.probing.memory import Mesh, memory_of, model_sizes
        from vlmpack.probing.weights import free_bytes

        plan, args, table = self.plan, self.args, self.table
        accumulation, ranks = args.gradient_accumulation_steps, args.world_size
        rows = len(PackedBatchSampler(plan, ranks=ranks, rank=args.process_index, accumulation=accumulation))
        model = make_model(self.keys, self.collator.processor, only_shapes=True)
        again = any(getattr(args, name, False) for name in (CHECKPOINTING, OLD_CHECKPOINTING))
        memory = memory_of(
            model_sizes(model, size=2 if args.bf16 else next(model.parameters()).element_size()),
            Mesh(**{"fsdp" if args.fsdp else "replicate": ranks}, checkpointing=again),
            tokens=int(plan.tree_tokens.max()),
            patches=int(plan.sums(table.by_place(table.patches)).max()),
        )
        return {
            "model": self.keys.model,
            "method": self.keys.method,
            "weights": sum(each.numel() for each in model.parameters()),
            "trained_weights": sum(each.numel() for each in model.parameters() if each.requires_grad),
            "samples": len(plan.sample_ids),
            "held_out": 0 if self.eval_plan is None else len(self.eval_plan.sample_ids),
            "left_out": table.measured - len(plan.sample_ids),
            "tokens": int(plan.tokens.sum()),
            "targets": int(table.targets.sum()),
            "capacity": plan.capacity,
            "rows": len(plan),
            "fill": plan.fill,
            "ranks": ranks,
            "accumulation": accumulation,
            "samples_per_update": len(plan.sample_ids) / len(plan) * ranks * accumulation,
            "updates": args.max_steps if args.max_steps > 0 else ceil(rows // accumulation * args.num_train_epochs),
            "memory": {**{name: part.size for name, part in memory.items()}, "free": free_bytes(args.device)},
            "sample": [{"text": text, "trained_on": is_target} for text, is_target in self.sample()],
            "ignored": self.ignored(),
            "output_dir": str(self.folder),
        }

    def sample(self) -> Iterator[tuple[str, bool]]:
        """Yield the text of the first planned sample as the model gets it, in parts: (text, whether it is a target)."""
        from vlmpack.collate.processor_metadata import parts_of

        at, collator = int(self.plan[0][0]), self.collator
        sample, tokenizer = collator.measure(self.train_set[at], at), parts_of(collator.processor).tokenizer
        kinds = zip((sample.types != 0).tolist(), (sample.labels >= 0).tolist(), sample.input_ids.tolist(), strict=True)
        for (is_media, is_target), group in groupby(kinds, key=lambda token: token[:2]):
            ids = [token[2] for token in group]
            yield f"{tokenizer.decode(ids[0])} x {len(ids):,}" if is_media else tokenizer.decode(ids), is_target

    def ignored(self) -> dict[str, str]:
        """Return the keys that were set and have no effect, with the reason."""
        keys, args = self.keys, self.args
        of_lora, of_text = "lora_rank lora_alpha lora_dropout lora_targets merge", "freeze_vision max_patches"
        cases = (
            (keys.method == "full", of_lora, "method is full"),
            (not self.collator.metadata.has_vision, of_text, "the model takes only text"),
            (args.max_steps > 0, "num_train_epochs", "max_steps is set"),
            (keys.samples_per_update is not None, "gradient_accumulation_steps", "samples_per_update sets it"),
            (keys.eval_data is not None, "val_size", "eval_data is set"),
            (args.eval_strategy == "no", "eval_steps", "eval_strategy is no"),
            (self.eval_plan is None, "eval_strategy eval_steps max_new_tokens", "no samples are held out"),
            (self.is_sharded, "merge max_new_tokens", "no rank has the whole model"),
            (args.save_strategy != "steps", "save_steps", f"save_strategy is {args.save_strategy}"),
        )
        why = {**UNUSED, **{name: reason for holds, names, reason in cases if holds for name in names.split()}}
        return {name: why[name] for name in self.given if name in why}

    def train(self) -> dict[str, Any]:
        """Train, evaluate before and after, save, and merge the adapters.

        Returns:
            Losses and answers before and after, and the folders of the weights, for JSON.
        """
        from transformers import set_seed

        from vlmpack.context_parallel.mesh import Parallel
        from vlmpack.model.enable import enable_packing
        from vlmpack.trainer.check import check_trainer
        from vlmpack.trainer.packed_trainer import PackedTrainer

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
        before = self._state(trainer)
        trainer.train(self.resume)
        after = self._state(trainer)
        trainer.save_model()
        if self.keys.method == "lora" and self.keys.merge and not self.is_sharded:
            merged = str(self.folder / MERGED)
            if self.args.should_save:
                model.merge_and_unload().save_pretrained(merged)
                processor.save_pretrained(merged)
        return {"before": before, "after": after, "saved": str(self.folder), "merged": merged}

    def _state(self, trainer: PackedTrainer) -> dict[str, Any] | None:
        """Evaluate the held-out samples, and generate the last answer of the first one; None: there are none."""
        from vlmpack.trainer.evaluation import generate_answer

        if self.eval_plan is None:
            return None
        loss, answer, tokens = trainer.evaluate()["eval_loss"], None, self.keys.max_new_tokens
        if tokens and not self.is_sharded:
            sample = self.eval_set[int(self.eval_plan[0][0])]
            answer = generate_answer(trainer.model, self.collator, sample, max_new_tokens=tokens)
        return {"loss": loss, "answer": answer}


# ---------------------------------------------------------------------- what is printed


def print_run(run: Mapping[str, Any], table: LengthTable, console: Console) -> None:
    """Print the plan of a training."""
    free, needed = run["memory"]["free"], {name: size for name, size in run["memory"].items() if name != "free"}
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in needed.items())
    of_free = "" if free is None else f" ({format_bytes(free)} free)"
    lines = {
        "model": f"{run['model']}, {run['method']}: {run['trained_weights']:,} of {run['weights']:,} weights trained",
        "samples": f"{run['samples']:,} trained on, {run['held_out']:,} held out, {run['left_out']:,} left out",
        "tokens": f"{run['tokens']:,}, of which {run['targets']:,} are targets",
        "rows": f"{run['rows']:,} of {run['capacity']:,} tokens, {run['fill']:.1%} full",
        "updates": f"{run['updates']:,}, each of {run['accumulation']:,} rows on {run['ranks']:,} ranks: about "
        f"{run['samples_per_update']:,.1f} samples",
        "memory": f"about {format_bytes(sum(needed.values()))} on each rank{of_free}: {parts}",
        "output": run["output_dir"],
    }
    print_table(console, ("", text_column("")), [(name, Text(line)) for name, line in lines.items()], header=False)
    print_refused(table, console)
    text = Text()
    for part in run["sample"]:
        text.append(*((f"[[{part['text']}]]", "green") if part["trained_on"] else (part["text"], "dim")))
    print_text(console, Text("\nA sample, with its targets in [[brackets]]:"))
    console.print(text[:SHOWN] + Text(" ..." if len(text) > SHOWN else ""), soft_wrap=not console.is_terminal)
    for name, why in run["ignored"].items():
        print_text(console, Text(f"{name} has no effect: {why}", "yellow"))


def print_result(result: Mapping[str, Any], console: Console) -> None:
    """Print losses and answers before and after, and the folders of the weights."""
    for name in (name for name in ("before", "after") if result[name]):
        print_text(console, Text(f"{name}: loss on the held-out samples {result[name]['loss']:.4f}"))
        if answer := result[name]["answer"]:
            print_text(console, Text(f"answer: {answer}"), indent=2)
    merged = f"; with merged adapters: {result['merged']}" if result["merged"] else ""
    print_text(console, Text(f"saved: {result['saved']}{merged}"))
