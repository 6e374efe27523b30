"""What is written into Trainer's checkpoints beside its own files, and which of them are whole.

    checkpoint-3/  model.safetensors  ...  trainer_state.json  packed_plan.json or packed_stream_0.safetensors

The last file of a checkpoint is ours, and it is there whole or not at all. So a run that was killed while it saved left
a checkpoint without it.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

from torch import distributed as dist
from transformers import TrainerState, TrainingArguments

from vlmpack.errors import ConfigError

_STATE_FILE = "trainer_state.json"
"""The last file that Trainer writes by itself."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path | None:
    """Where the checkpoint of this step is; None: it has weights only, or there is none."""
    if args.save_only_model or args.output_dir is None:
        return None
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """A file that is whole, or not there, whenever the process is stopped."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    write(unfinished)
    unfinished.replace(file)


def check_whole(checkpoint: str | Path, last_file: str | None) -> None:
    """Raise unless a checkpoint was written to its end.

    Args:
        checkpoint: the folder.
        last_file: the name of the file of ours that is written last; None: Trainer's own is the last.

    Raises:
        ConfigError: a file is missing or was not written to its end; says which, and what to resume from instead.
    """
    folder = Path(checkpoint)
    if (lack := _lack(folder, last_file)) is None:
        return
    whole = [step for step in _steps(folder.parent) if _lack(_folder(folder.parent, step), last_file) is None]
    instead = f"resume from {_folder(folder.parent, max(whole))}" if whole else _ANEW
    raise ConfigError(f"{folder} cannot be resumed from: {lack}. Instead, {instead}")


_ANEW = "begin a new run, from its weights (from_pretrained(checkpoint)) if they are there"


def newest_whole(output_dir: str | Path, last_file: str | None) -> Path:
    """Find the newest checkpoint that was written to its end, for all ranks the same; warn of newer ones.

    Raises:
        ConfigError: there is none.
    """
    folder = Path(output_dir)
    lacks = {step: _lack(_folder(folder, step), last_file) for step in _steps(folder)}
    whole = _in_common({step for step, lack in lacks.items() if lack is None})
    if not whole:
        seen = _listed(lacks, sorted(lacks)) or "there is none at all"
        raise ConfigError(f"{folder} has no checkpoint to resume from ({seen}). Instead, {_ANEW}")
    newest = max(whole)
    if newer := sorted(step for step in lacks if step > newest):
        warnings.warn(f"resuming from checkpoint-{newest}, since {_listed(lacks, newer)}", stacklevel=3)
    return _folder(folder, newest)


def _listed(lacks: dict[int, str | None], steps: list[int]) -> str:
    return "; ".join(f"in checkpoint-{step} {lacks[step] or 'another rank lacks a file'}" for step in steps)


def _folder(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step}"


def _steps(output_dir: Path) -> set[int]:
    """Steps of which there are checkpoints, whole or not."""
    if not output_dir.is_dir():
        return set()
    found = ((_CHECKPOINT.fullmatch(path.name), path) for path in output_dir.iterdir())
    return {int(match[1]) for match, path in found if match and path.is_dir()}


def _lack(checkpoint: Path, last_file: str | None) -> str | None:
    """What a checkpoint lacks, and why; None: nothing."""
    state, stopped = checkpoint / _STATE_FILE, "the run was stopped while it was written"
    if not state.is_file():
        return f"{_STATE_FILE} is missing: {stopped}"
    try:
        json.loads(state.read_text(encoding="utf-8"))
    except ValueError:
        return f"{_STATE_FILE} ends too early: {stopped}"
    if last_file is None or (checkpoint / last_file).is_file():
        return None
    if (pickled := (checkpoint / last_file).with_suffix(".pt")).is_file():
        return (
            f"{pickled.name} was pickled by an earlier version of vlmpack, and reading a pickle can run any code: end "
            "the run with that version"
        )
    return f"{last_file} is missing: {stopped}, it has weights alone (save_only_model), or another Trainer wrote it"


def _in_common(steps: set[int]) -> set[int]:
    """Steps that every rank has."""
    if not (dist.is_available() and dist.is_initialized()):
        return steps
    everybody: list[set[int]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everybody, steps)
    return set.intersection(*everybody)
