"""Checkpoints of PackedTrainer: which are complete, and from which row to resume.

    checkpoint-3/  model.safetensors  ...  trainer_state.json  packed_plan.json or packed_stream_0_of_1.pt

vlmpack writes the last file of a checkpoint, atomically, so a checkpoint lacks that file if the run was killed while
saving. `packed_plan.json` names the plan of the steps. `packed_stream_RANK_of_RANKS.pt` is the state of a rank's
stream, as plain data that `torch.load(weights_only=True)` reads without running code. Both describe what is trained on,
see `described`. Other ranks continue with the same rows.

Weights: for many families, `save_pretrained` writes weights under the names of the first release, and `from_pretrained`
maps them back:

    model.language_model.layers.0.mlp.up_proj.weight    in the model
    language_model.model.layers.0.mlp.up_proj.weight    in the file

To resume and to load the best model, transformers' Trainer reads the file with `load_state_dict(strict=False)`. It then
loads only the weights whose names match, logs the others, and trains on with the weights that the model had.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.utils.data import Subset
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from vlmpack.collate import digests
from vlmpack.collate.collator import VLMCollator
from vlmpack.context_parallel.mesh import gathered, mesh_of
from vlmpack.data.open import SampleDataset
from vlmpack.data.readers import sample_at
from vlmpack.errors import ConfigError
from vlmpack.files import atomic_file, write_text, writing
from vlmpack.loading.sampler import PackedBatchSampler
from vlmpack.loading.stream import StreamLoader
from vlmpack.rows import PackedDataset

_LOG = logging.getLogger(__name__)
PLAN_FILE = "packed_plan.json"
"""File in a checkpoint that names the plan of its steps, and how its rows were distributed over ranks and steps."""
_STATE_FILE = "trainer_state.json"
"""The last file that Trainer itself writes."""
_NEW_RUN = "begin a new run, from its weights (from_pretrained(checkpoint)) if they are there"

OTHERWISE = "of another model or training: train as before"
_UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, UnpicklingError, SafetensorError)
"""Errors of json, torch, safetensors and PEFT for files that are truncated, or of another format or shape."""


@contextmanager
def _reading(path: str | Path | None, otherwise: str) -> Iterator[None]:
    """Turn errors of reading a checkpoint into a ConfigError that names it, and what else it may be than damaged."""
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except _UNREADABLE as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
        raise ConfigError(
            f"{path} is damaged, or {otherwise} ({reason}); resume from another checkpoint, or {_NEW_RUN}"
        ) from error


# ---------------------------------------------------------------------- complete checkpoints


def checkpoint_to_resume(given: str | bool | None, output_dir: str | Path | None, last_file: str | None) -> str | None:
    """Return the checkpoint that `resume_from_checkpoint` means: None, one that is named, or the newest complete one.

    Of several ranks, the newest that is complete on all of them. Warns of newer, incomplete ones.

    Args:
        given: the setting.
        output_dir: folder of the run.
        last_file: name of the file that vlmpack writes last; None: Trainer's own last file.

    Raises:
        ConfigError: a file is missing or incomplete, or there is no checkpoint; names what to resume from instead.
    """
    if not given:
        return None
    folder = Path(output_dir or ".") if given is True else Path(given).parent
    numbered = {path.name.removeprefix("checkpoint-"): path for path in folder.glob("checkpoint-*") if path.is_dir()}
    lacks = {int(step): _lack(path, last_file) for step, path in numbered.items() if step.isdecimal()}
    complete = {step for step, lack in lacks.items() if not lack}
    if given is not True:
        if lack := _lack(Path(given), last_file):
            instead = f"resume from {folder / f'checkpoint-{max(complete)}'}" if complete else _NEW_RUN
            raise ConfigError(f"{given} cannot be resumed from: {lack}. Instead, {instead}")
        return given
    newest = max(set.intersection(*gathered(complete)), default=-1)
    newer = "; ".join(
        f"in checkpoint-{step} {lacks[step] or 'another rank lacks a file'}" for step in sorted(lacks) if step > newest
    )
    if newest < 0:
        reason = newer or "there is none at all"
        raise ConfigError(f"{folder} has no checkpoint to resume from ({reason}). Instead, {_NEW_RUN}")
    if newer:
        warnings.warn(f"resuming from checkpoint-{newest}, since {newer}", stacklevel=3)
    return str(folder / f"checkpoint-{newest}")


def _lack(checkpoint: Path, last_file: str | None) -> str:
    """Return what a checkpoint lacks, and why; "" if it is complete."""
    state, stopped = checkpoint / _STATE_FILE, "the run was stopped while it was written"
    if not checkpoint.is_dir():
        return "there is no such folder"
    if not state.is_file():
        return f"{_STATE_FILE} is missing: {stopped}"
    try:
        json.loads(state.read_text(encoding="utf-8"))
    except ValueError:
        return f"{_STATE_FILE} ends too early: {stopped}"
    if last_file is None:
        return ""
    of_other_ranks = last_file.startswith("packed_stream") and stream_files(checkpoint)
    if not (checkpoint / last_file).is_file() and not of_other_ranks:
        return f"{last_file} is missing: {stopped}, it has weights alone (save_only_model), or another Trainer wrote it"
    files = [SCHEDULER_NAME, *(() if is_divided(checkpoint) else ("optimizer*",))]  # Trainer would begin both anew
    of_deepspeed = any(checkpoint.glob("global_step*"))
    lacking = [name for name in files if not of_deepspeed and not any(checkpoint.glob(name))]
    return f"{lacking[0].replace('*', '.pt')} is missing" if lacking else ""


def remove_last_files(checkpoint: Path, rank: int, ranks: int, *, of_others: bool) -> None:
    """Remove the files that mark an older checkpoint as complete; with `of_others`, also those of other rank counts."""
    files = [PLAN_FILE, stream_file(rank, ranks)]
    if of_others:
        files += [file.name for file in checkpoint.glob("packed_stream_*.pt") if not file.match(f"*_of_{ranks}.pt")]
    for file in files:
        (checkpoint / file).unlink(missing_ok=True)


# ---------------------------------------------------------------------- what a checkpoint was trained on

OF_TARGETS = ("train_on", "markers", "add_stop", "ignored_keys")
"""Settings of a collator that change targets, and are not seen in the lengths of samples."""
WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "peft_version", "revision"),
    "task_type",
}
"""Entries of an adapter's configuration that may differ when a run is resumed."""
COMPARED = 16
"""How many samples of a data set are compared, spread over it."""


def described(trainer: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Describe what a training learns from its rows, as JSON: it must be the same in a resumed run.

    Samples are read only from data sets that vlmpack opened: others may draw a sample anew each time.

    Args:
        trainer: a PackedTrainer.
        weights: result of `described_weights`.
    """
    data, optim = trainer.train_dataset, trainer.args.optim
    found = {"loss": trainer.loss, "optim": str(getattr(optim, "value", optim)).removesuffix("_fused"), **weights}
    collator = data.collator if isinstance(data, PackedDataset) else trainer.data_collator
    if isinstance(collator, VLMCollator):
        settings = digests.collator_settings(collator)
        found |= {name: settings[name] for name in OF_TARGETS} | {"processor": digests.fingerprint(collator)}
        opened = data
        while isinstance(opened, Subset):
            opened = opened.dataset
        if isinstance(opened, SampleDataset):
            places = dict.fromkeys(np.linspace(0, len(data) - 1, COMPARED).astype(int).tolist())
            samples = [digests.sample_digest(sample_at(data, place), collator) for place in places]
            found["samples"] = digests.digest_of(samples)[:16]
    if isinstance(data, PackedDataset):
        found["samples"] = digests.digest_of([shard.samples for shard in data.manifest.shards])[:16]
    return digests.as_json(found)


def described_weights(model: Any) -> dict[str, Any]:
    """Describe what is trained of a model that nothing but PEFT has wrapped or divided yet."""
    trained = sum(each.requires_grad for each in model.parameters())
    adapters = {
        name: {key: value for key, value in config.to_dict().items() if value and key not in WITHOUT_EFFECT}
        for name, config in getattr(model, "peft_config", {}).items()
    }
    return {"trained_tensors": trained, "dtype": str(getattr(model, "dtype", None)), "adapters": adapters}


def check_described(checkpoint: str | Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that a checkpoint was trained as this run is.

    Raises:
        ConfigError: something differs; names it.
    """
    if differing := "; ".join(digests.differences(was, now)):
        raise ConfigError(f"{checkpoint} was trained otherwise: {differing}. Train as before, or {_NEW_RUN}")


# ---------------------------------------------------------------------- the plan of the steps


def save_plan(file: Path, sampler: PackedBatchSampler, run: Mapping[str, Any]) -> None:
    """Write the plan of a checkpoint's steps, how its rows are distributed over them, and the result of `described`."""
    state = sampler.state_dict()
    write_text(file, json.dumps({"of": state["of"], "dealt": state["dealt"], "run": run}))


def load_plan(checkpoint: str | Path, sampler: PackedBatchSampler, run: Mapping[str, Any]) -> None:
    """Distribute rows as in the run of a checkpoint. Trainer skips as many rows as there were steps.

    Args:
        checkpoint: the folder.
        sampler: the rows of this run, on any number of ranks.
        run: result of `described`.

    Raises:
        ConfigError: the steps belong to another plan, have another number of rows, or were trained in another way.
    """
    file = Path(checkpoint) / PLAN_FILE
    with _reading(file, "was not written by vlmpack"):
        saved = json.loads(file.read_text(encoding="utf-8"))
        state, was = {"epoch": 0, "rows": 0, "of": saved["of"], "dealt": saved["dealt"]}, dict(saved["run"])
    try:
        sampler.load_state_dict(state)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint} cannot be continued: {error}; or {_NEW_RUN}") from error
    check_described(checkpoint, was, run)


# ---------------------------------------------------------------------- the state of a stream


def stream_file(rank: int, ranks: int) -> str:
    """Return the file name for the state of one rank's stream."""
    return f"packed_stream_{rank}_of_{ranks}.pt"


def stream_files(checkpoint: Path) -> list[list[Path]]:
    """Return the files that the ranks of a run have written, for each number of ranks from which all are there."""
    numbers = {file.stem.rpartition("_")[2] for file in checkpoint.glob("packed_stream_0_of_*.pt")}
    sets = [[checkpoint / stream_file(rank, int(ranks)) for rank in range(int(ranks))] for ranks in sorted(numbers)]
    return [files for files in sets if all(file.is_file() for file in files)]


def save_stream(checkpoint: Path, loader: StreamLoader, run: Mapping[str, Any], *, accumulation: int) -> None:
    """Write the state of this rank's stream.

    Args:
        checkpoint: the folder.
        loader: the stream's loader.
        run: result of `described`.
        accumulation: rows of each rank in a step.
    """
    file = checkpoint / stream_file(loader.stream.rank, loader.stream.ranks)
    with atomic_file(file) as temporary, writing(file):
        torch.save({"stream": loader.state_dict(), "accumulation": accumulation, "run": run}, temporary)


def load_stream(checkpoint: Path, loader: StreamLoader, run: Mapping[str, Any], *, accumulation: int) -> None:
    """Restore a loader from the files that `save_stream` wrote on any number of ranks; warn if steps have other sizes.

    Raises:
        ConfigError: a file is damaged or missing, or belongs to another stream or to a run that trained otherwise.
    """
    own = checkpoint / stream_file(loader.stream.rank, loader.stream.ranks)
    complete = stream_files(checkpoint)
    here = [own] if own.is_file() or not complete else complete[0]
    files = next((files for files in complete if own in files), here)
    states, before, was = [], accumulation, run
    for file in files:
        with _reading(file, "was not written by vlmpack"):
            content = torch.load(file, weights_only=True)
            before, was = int(content["accumulation"]), dict(content["run"])
            states.append(content["stream"])
    check_described(checkpoint, was, run)
    loader.load_state_dict(states)
    rows, ranks = before * states[0]["ranks"], loader.stream.ranks
    if rows != accumulation * ranks:
        remedy = "" if rows % ranks else f". With gradient_accumulation_steps={rows // ranks} they would be"
        warnings.warn(
            f"each step of {checkpoint.name} had {rows} rows, and each step to come has {accumulation * ranks}: every "
            f"row is still trained on once, but steps are not those of an uninterrupted run{remedy}",
            stacklevel=4,
        )


# ---------------------------------------------------------------------- models that transformers has divided

_WEIGHTS_FOLDER, _OPTIMIZER_FOLDER = "divided_model", "divided_optimizer"
"""Folders in a checkpoint of a model loaded with `distributed_config=`: each rank's part, by torch's distributed
checkpoints. Another mesh, or a single process, reads its own parts of them."""


def is_divided(checkpoint: str | Path) -> bool:
    """Return whether a checkpoint has the parts of a divided model."""
    return (Path(checkpoint) / _OPTIMIZER_FOLDER).is_dir()


def save_divided(model: Any, optimizer: Any, checkpoint: Path) -> None:
    """Write the parts of a model and its optimizer; every rank must call it."""
    from transformers.distributed import checkpoint as parts  # 5.17 has no such module

    parts._save_model_checkpoint_distributed(model, checkpoint / _WEIGHTS_FOLDER)
    inner = getattr(optimizer, "optimizer", optimizer)  # the one that accelerate wrapped
    parts.save_optimizer_distributed(model, inner, str(checkpoint / _OPTIMIZER_FOLDER))


def load_divided(model: Any, checkpoint: str | Path) -> bool:
    """Load the weights of a checkpoint with parts; return False if neither the model nor the checkpoint is divided.

    Raises:
        ConfigError: the model is divided, but the checkpoint has no parts.
    """
    if is_divided(checkpoint):
        from transformers.distributed import checkpoint as parts

        with _any_number_of_processes():
            parts._load_model_checkpoint_distributed(model, Path(checkpoint) / _WEIGHTS_FOLDER)
        return True
    if mesh_of(model) is not None:
        raise ConfigError(
            f"{checkpoint} has no {_OPTIMIZER_FOLDER}: it was written without a mesh, or with save_only_model=True. "
            f"Instead, {_NEW_RUN}"
        )
    return False


def load_divided_optimizer(model: Any, optimizer: Any, checkpoint: Path) -> None:
    """Load the state of an optimizer; every rank must call it."""
    from transformers.distributed import checkpoint as parts

    inner = getattr(optimizer, "optimizer", optimizer)
    empty = {place: group for place, group in enumerate(inner.param_groups) if not group["params"]}
    inner.param_groups = [group for group in inner.param_groups if group["params"]]  # torch 2.13 fails on empty ones
    with _any_number_of_processes():
        parts.load_optimizer_distributed(model, inner, str(checkpoint / _OPTIMIZER_FOLDER))
    for place, group in empty.items():
        inner.param_groups.insert(place, group)


@contextmanager
def _any_number_of_processes() -> Iterator[None]:
    """Load without a warning in a single process, too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


# ---------------------------------------------------------------------- weights under other names


class RenamedWeights(Trainer):
    """A Trainer that loads checkpoints like `from_pretrained` if weight names differ between model and file."""

    def __init__(self, model: Any = None, *more: Any, **kwargs: Any) -> None:
        args = next((each for each in (*more, *kwargs.values()) if isinstance(each, TrainingArguments)), None)
        if args is None or args.save_only_model or mesh_of(model) is None:
            super().__init__(model, *more, **kwargs)
            return
        args.save_only_model = True  # Trainer refuses to save the state of divided models; this class saves it
        super().__init__(model, *more, **kwargs)
        args.save_only_model = False

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if mesh_of(self.model) is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_divided(self.model, self.optimizer, Path(output_dir))
        if self.args.should_save:
            torch.save(cast(Any, self.lr_scheduler).state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_divided(checkpoint):
            with _reading(checkpoint, OTHERWISE):
                super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_divided_optimizer(self.model, self.optimizer, Path(checkpoint))
        scheduler: Any = self.lr_scheduler
        stored, own = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True), scheduler.state_dict()
        # under another mesh, Trainer divides parameters into other groups
        of_groups = {name for name, value in own.items() if isinstance(value, list) and len(value) != len(stored[name])}
        scheduler.load_state_dict(stored | {name: own[name] for name in of_groups})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with _reading(resume_from_checkpoint, OTHERWISE):
            if not self._loads(self.model if model is None else model, resume_from_checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, cast(Any, model))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        rank, ranks = self.args.process_index, self.args.world_size
        file = f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth"
        if checkpoint is not None and not (Path(checkpoint) / file).is_file():
            _LOG.warning("%s has no %s of this rank, so dropout draws other numbers than before", checkpoint, file)
        with _reading(checkpoint, OTHERWISE):
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not self._loads(self.model, best):
            super()._load_best_model()

    def _loads(self, model: Any, checkpoint: str) -> bool:
        """Load weights that Trainer cannot; return False if it can: nothing was loaded then."""
        if load_divided(model, checkpoint):
            return True
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # they write files of other names
            return False
        kinds = ("all weights", "adapters")
        has_adapters, adapts = any(Path(checkpoint).rglob("adapter_config.json")), hasattr(model, "peft_config")
        if has_adapters != adapts:
            of = f"{checkpoint} is of a training of {kinds[has_adapters]}, and this one is of {kinds[adapts]}"
            raise ConfigError(f"{of}: train as before")
        return load_renamed(model, checkpoint)


def load_renamed(model: Any, checkpoint: str | Path) -> bool:
    """Load a checkpoint whose weight names differ from the model's; return False if they match and nothing was loaded.

    Reads the weights into a second model on the host, in at least float32, which holds all values of lower precision.

    Args:
        model: the model, whose weights are overwritten in place.
        checkpoint: folder written by `save_pretrained`.

    Raises:
        ConfigError: the checkpoint lacks a weight of the model, even after `from_pretrained` mapped the names.
    """
    if not isinstance(model, PreTrainedModel) or stored_names(Path(checkpoint)) <= model.state_dict().keys():
        return False
    dtype = torch.promote_types(model.dtype, torch.float32)
    loaded: Any = type(model).from_pretrained(checkpoint, dtype=dtype, output_loading_info=True)
    stored, report = loaded
    if missing := sorted(report["missing_keys"]):
        lost = f"{len(missing)} weights of {type(model).__name__}, {missing[0]} among them"
        raise ConfigError(f"{checkpoint} lacks {lost}: resume with the model and the transformers that wrote it")
    model.load_state_dict(stored.state_dict())
    return True


def stored_names(checkpoint: Path) -> set[str]:
    """Read the weight names in a checkpoint's safetensors files; empty if it has only adapters, or other files."""
    index, file = checkpoint / SAFE_WEIGHTS_INDEX_NAME, checkpoint / SAFE_WEIGHTS_NAME
    if file.is_file():
        with safe_open(file, framework="pt") as weights:
            return {*weights.keys()}
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"]) if index.is_file() else set()
