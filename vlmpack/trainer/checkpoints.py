"""What is written into Trainer's checkpoints beside its own files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import TrainerState, TrainingArguments


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
