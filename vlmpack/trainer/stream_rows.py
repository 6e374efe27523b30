"""A stream of rows in Trainer: it is never dealt out a second time, and a checkpoint knows where it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vlmpack.errors import ConfigError
from vlmpack.loading import PackedStream
from vlmpack.trainer.checkpoints import checkpoint_folder, write_whole
from vlmpack.trainer.plain_state import read_state, write_state


def stream_loader(
    stream: PackedStream, args: TrainingArguments, collator: Callable[[Any], Any], **settings: Any
) -> DataLoader[Any]:
    """This rank's rows, collated, by a loader that knows where it is (torchdata's `StatefulDataLoader`).

    Its workers are seeded by a generator of its own, so that a resumed run draws as many random numbers as an unbroken
    one.

    Raises:
        ConfigError: torchdata is missing; the stream is of other ranks, or ends.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise ConfigError("a PackedStream in Trainer needs torchdata: pip install 'vlmpack[stream]'") from error
    theirs, ours = (stream.ranks, stream.rank), (args.world_size, args.process_index)
    if theirs != ours:
        raise ConfigError(
            f"the stream is for rank {theirs[1]} of {theirs[0]}, but this is rank {ours[1]} of {ours[0]}: "
            "PackedStream(..., ranks=args.world_size, rank=args.process_index)"
        )
    if not stream.repeat:
        raise ConfigError(
            "Trainer counts steps and a stream has none to count; let it go on until max_steps are done: "
            "PackedStream(..., repeat=True)"
        )
    generator = torch.Generator().manual_seed(args.seed)
    return StatefulDataLoader(stream, batch_size=None, collate_fn=collator, generator=generator, **settings)


def place_file(rank: int) -> str:
    """In a checkpoint: the place of one rank's stream, with the samples that wait in it."""
    return f"packed_stream_{rank}.safetensors"


def go_to_place(loader: Any, checkpoint: str | Path, rank: int) -> None:
    """Continue a loader where it was when the checkpoint was written.

    Raises:
        ConfigError: the file is damaged, or of a loader with other workers, each of which keeps a part of the place.
    """
    file = Path(checkpoint) / place_file(rank)
    state = read_state(file)
    if not isinstance(state, dict) or state.keys() != {"workers", "loader"}:
        raise ConfigError(f"{file} is no place of a stream; resume from another checkpoint")
    if state["workers"] != loader.num_workers:
        raise ConfigError(
            f"{file} is of a stream with dataloader_num_workers={state['workers']}, each of which keeps its part of "
            f"it, but now there are {loader.num_workers}: resume with as many as before"
        )
    loader.load_state_dict(state["loader"])


@final
class StreamPlace(TrainerCallback):
    """Writes the place of the stream into each checkpoint, and counts the epoch as the share of the steps done."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Trainer counts from where it was started, resumed or not."""
        state.epoch = state.global_step / state.max_steps

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """The last file of a checkpoint, written by every rank: whole, or not there."""
        if folder := checkpoint_folder(args, state):
            place = folder / place_file(args.process_index)
            at = {"workers": train_dataloader.num_workers, "loader": train_dataloader.state_dict()}
            write_whole(place, lambda file: write_state(at, file))
