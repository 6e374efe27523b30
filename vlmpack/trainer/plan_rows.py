"""The rows of a plan in Trainer: a checkpoint knows the plan of its steps, and is continued with no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, final

from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vlmpack.errors import ConfigError
from vlmpack.loading import PackedBatchSampler
from vlmpack.trainer.checkpoints import checkpoint_folder, write_whole

PLAN_FILE = "packed_plan.json"
"""In a checkpoint: the plan of its steps, and how it was dealt out."""


class RowLoader(DataLoader[Any]):
    """The rows of a `PackedBatchSampler`. Trainer tells it the epoch, also the one in which a run is resumed."""

    batch_sampler: PackedBatchSampler  # pyright: ignore[reportIncompatibleVariableOverride]

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self.batch_sampler.set_epoch(epoch)


def check_plan(sampler: PackedBatchSampler, checkpoint: str | Path) -> None:
    """Trainer skips as many rows as there were steps, so they have to be the rows that were trained on.

    Raises:
        ConfigError: the steps of the checkpoint were of another plan, or dealt in another way.
    """
    theirs, ours = _plan_of(Path(checkpoint) / PLAN_FILE), sampler.state_dict()["of"]
    if theirs == ours:
        return
    differing = [pair for pair in zip(theirs.split(", "), ours.split(", "), strict=False) if pair[0] != pair[1]]
    was, now = (", ".join(part) for part in zip(*(differing or [(theirs, ours)]), strict=True))
    raise ConfigError(
        f"{checkpoint} was trained on rows of {was}, but these are of {now}: some samples would be trained on twice "
        "and others never. Plan and deal as before (capacity and seed of the plan, seed, gradient_accumulation_steps, "
        "ranks, costs, remainder), or begin a new run from its weights: from_pretrained(checkpoint)"
    )


def _plan_of(file: Path) -> str:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["of"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is damaged ({type(error).__name__}: {error}); resume from another one") from error
    return str(found)


@final
class PlanPlace(TrainerCallback):
    """Writes the plan of its steps into each checkpoint."""

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """The last file of a checkpoint: whole, or not there; once, after every rank has written its own files."""
        folder = checkpoint_folder(args, state)
        if folder is None or not isinstance(train_dataloader, RowLoader):
            return
        if args.distributed_state is not None:
            args.distributed_state.wait_for_everyone()
        if not args.should_save:
            return
        plan = json.dumps({"of": train_dataloader.batch_sampler.state_dict()["of"]})
        write_whole(folder / PLAN_FILE, lambda file: file.write_text(plan, encoding="utf-8"))
