"""The keys of `vlmpack train`: its own, those of the data options, and those of TrainingArguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from rich.console import Console
from rich.text import Text
from typer import Option

from vlmpack.cli.inputs import read_yaml
from vlmpack.cli.options import DataOptions, Limit, ModelOptions, help_of, kind_and_option
from vlmpack.errors import ConfigError
from vlmpack.terminal import print_table, text_column


@dataclass(frozen=True, kw_only=True)
class TrainKeys(ModelOptions):
    """Keys besides those of the data options and of TrainingArguments."""

    data: str
    """JSON, JSONL or parquet file, folder, hub id, or synthetic (generated receipts)."""
    eval_data: str | None = None
    """Data set to evaluate on; by default a part of data."""
    val_size: Annotated[float, Option(min=0)] = 0.05
    """Samples of data to hold out for evaluation: a share below 1, or a number."""
    capacity: Annotated[int, Option(min=2)] = 8192
    """Tokens of a row. Each rank trains on one row at a time, so memory grows with it."""
    samples_per_update: Limit = None
    """Minimum samples of an optimizer step; sets gradient_accumulation_steps."""
    merge: bool = True
    """Also save the model with merged adapters, in OUTPUT_DIR/merged."""
    on_bad: Literal["raise", "skip"] = "raise"
    """Stop at samples that cannot be used, or skip and list them."""
    max_new_tokens: Annotated[int, Option(min=0)] = 128
    """Maximum tokens of the answer to a held-out sample, generated before and after training; 0: none."""


OF_TRAIN = tuple(field.name for field in fields(TrainKeys))
MINIMA = {"gradient_accumulation_steps": 1}
"""Minima of keys of TrainingArguments."""
OF_DATA = tuple(field.name for field in fields(DataOptions) if field.name != "dataset")
DEFAULTS: dict[str, Any] = {
    "output_dir": "results",
    "num_train_epochs": 1.0,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "seed": 0,
}
"""Defaults of TrainingArguments that differ from those of transformers."""
CHOSEN = {
    "processor": "model",
    "max_length": "capacity",
    "cache": "OUTPUT_DIR/lengths.sqlite",
    "learning_rate": "1e-4; full: 1e-5",
    **dict.fromkeys(("bf16", "dataloader_pin_memory", "activation_checkpointing", "gradient_checkpointing"), "on cuda"),
    "use_cpu": "without cuda",
    "dataloader_num_workers": "workers",
    "resume_from_checkpoint": "none; true: the newest",
}
"""Defaults that depend on other keys or on the machine, as shown in the help."""
_UNUSED = {
    "a batch is one row, and capacity limits its tokens": "per_device_train_batch_size auto_find_batch_size",
    "evaluation uses rows of capacity, too": "per_device_eval_batch_size",
    "rows are planned, and shuffled in each epoch": "train_sampling_strategy length_column_name dataloader_in_order",
    "rows are split to fill the last step, so no sample is dropped": "dataloader_drop_last",
    "workers start as PyTorch starts them": "dataloader_multiprocessing_context",
    "the collator needs the columns, so none is removed": "remove_unused_columns",
    "vlmpack train always trains, and evaluates according to val_size and eval_data": "do_train do_eval do_predict",
}
UNUSED = {name: reason for reason, names in _UNUSED.items() for name in names.split()}
"""Keys of TrainingArguments that have no effect, and why."""
ELSEWHERE = {
    "model": "model_name_or_path base_model model_id model_id_or_path",
    "data": "dataset datasets train_dataset dataset_name train_file",
    "eval_data": "validation_file",
    "val_size": "split_dataset_ratio",
    "capacity": "cutoff_len sequence_len max_seq_length packing sample_packing neat_packing padding_free",
    "samples_per_update": "micro_batch_size batch_size train_batch_size global_batch_size",
    "method": "finetuning_type adapter train_type tuner_type",
    "lora_rank": "r",
    "lora_targets": "lora_target_modules target_modules",
    "train_on": "completion_only_loss assistant_only_loss",
    "num": "max_samples",
    "image_root": "media_dir dataset_dir",
    "max_pixels": "image_resolution image_size",
    "workers": "preprocessing_num_workers dataset_num_proc dataset_processes",
    "dtype": "torch_dtype",
}
"""Our keys, with their less similar names in LLaMA-Factory, axolotl, ms-swift and TRL."""


class Key(NamedTuple):
    """A key of the configuration."""

    kind: Any
    """Type annotation of its values, with their bounds."""
    default: str
    """Its default, as shown."""
    help: str
    """Its meaning."""


def all_keys() -> dict[str, Key]:
    """Return all keys by name."""
    from pydantic import Field
    from transformers import TrainingArguments

    keys: dict[str, Key] = {}
    for owner, names in ((TrainKeys, OF_TRAIN), (DataOptions, OF_DATA)):
        kinds, helps = get_type_hints(owner, include_extras=True), help_of(owner)
        for name, default in ((each.name, each.default) for each in fields(owner) if each.name in names):
            kind, option = kind_and_option(kinds[name])
            bounds = Field(ge=option.min, le=option.max)
            keys[name] = Key(Annotated[kind, bounds], CHOSEN.get(name, _shown(default)), helps[name])
    for each in fields(TrainingArguments):
        default = CHOSEN.get(each.name) or _shown(DEFAULTS.get(each.name, each.default))
        meaning = " ".join(str(each.metadata.get("help", "")).split()).partition(". ")[0].rstrip(".") + "."
        said = f"Has no effect: {UNUSED[each.name]}." if each.name in UNUSED else meaning
        keys.setdefault(each.name, Key(Annotated[each.type, Field(ge=MINIMA.get(each.name))], default, said))
    for name, kind in (("columns", str | list[str] | dict | None), ("resume_from_checkpoint", str | bool | None)):
        keys[name] = keys[name]._replace(kind=kind)
    return keys


def _shown(default: Any) -> str:
    return "" if default is None or default is MISSING else str(getattr(default, "value", default))


def print_keys(console: Console) -> None:
    """Print all keys with their defaults and meanings."""
    keys = all_keys()
    parts = {"Training": OF_TRAIN, "Data and rows": OF_DATA}
    others = [name for name in keys if name not in (*OF_TRAIN, *OF_DATA)]
    for title, names in {**parts, "TrainingArguments of transformers": others}.items():
        console.print(f"[bold]{title}[/]", highlight=False)
        rows = [(name, Text(keys[name].default), Text(keys[name].help)) for name in names]
        print_table(console, ("key", "default", text_column("meaning")), rows)
        console.print()


def read_config(file: Path | None, settings: Sequence[str]) -> dict[str, Any]:
    """Read the keys of a YAML file, and KEY=VALUE settings, which override the file.

    Raises:
        ConfigError: the file is not a mapping, a key is unknown (names the nearest one), or a value has the wrong type.
    """
    given: dict[str, Any] = {}
    if file is not None:
        given = read_yaml(f"--config {file}", file.read_bytes())
        if not isinstance(given, dict):
            raise ConfigError(f"--config {file} has no keys; write lines such as `data: chats.jsonl`")
    for text in settings:
        key, _, value = text.partition("=")
        if key.startswith("-"):
            name = key.strip("-").replace("-", "_")
            raise ConfigError(f"{key} is no option; write settings without dashes: {name}={value or 'VALUE'}")
        if not key or key == text:
            raise ConfigError(f"{text} is not a setting KEY=VALUE; to read settings from a file: --config {text}")
        given[key] = read_yaml(text, value)
    keys = all_keys()
    for key in map(str, given):
        if key not in keys:
            ours = next((name for name, others in ELSEWHERE.items() if key in others.split()), None)
            near = [ours] if ours else get_close_matches(key, keys, n=1)
            nearest = f"; the nearest is {near[0]}: {keys[near[0]].help}" if near else "."
            raise ConfigError(f"unknown key {key}{nearest} See vlmpack train --help-config")
    if missing := [name for name in ("model", "data") if name not in given]:
        raise ConfigError(f"{' and '.join(missing)} must be set: vlmpack train model=HUB_ID data=FILE, or in --config")
    return {key: _value(key, value, keys[key].kind) for key, value in given.items()}


def _value(name: str, value: Any, kind: Any) -> Any:
    """Convert and check the value of a key. YAML reads no as False.

    Raises:
        ConfigError: it has another type, or is out of bounds.
    """
    from pydantic import ConfigDict, ValidationError, create_model

    checked: Any = create_model("Key", __config__=ConfigDict(allow_inf_nan=False), value=kind)
    try:
        return checked.model_validate({"value": value}, strict=True).value
    except ValidationError:
        text = ("no", "yes")[value] if isinstance(value, bool) else value
    try:
        return checked.model_validate({"value": text}).value
    except ValidationError as error:
        reasons = " or ".join(dict.fromkeys(each["msg"] for each in error.errors()))
        raise ConfigError(f"{name}={value}: {reasons[0].lower()}{reasons[1:]}") from None
