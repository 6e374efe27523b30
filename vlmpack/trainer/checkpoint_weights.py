"""Weights of checkpoints whose files have other names than the model: Trainer itself resumes without them.

`save_pretrained` writes a model of many families under the names of its first release, and `from_pretrained` maps them:

    model.language_model.layers.0.mlp.up_proj.weight    of the model
    language_model.model.layers.0.mlp.up_proj.weight    in the file

Trainer of transformers reads the file with `load_state_dict(strict=False)`, to resume and for the best model. Of such a
file it takes only the names that are alike, logs the others, and trains on with the weights that the model had.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from vlmpack.errors import ConfigError


class RenamedWeights:
    """A part of a Trainer: it loads the weights of its checkpoints as `from_pretrained` does, where names differ."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        trainer, plain = cast(Any, self), cast(Any, super())
        target = trainer.model if model is None else model
        if _writes_otherwise(trainer) or not load_renamed(target, resume_from_checkpoint):
            plain._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        trainer, plain = cast(Any, self), cast(Any, super())
        if _writes_otherwise(trainer) or not load_renamed(trainer.model, trainer.state.best_model_checkpoint):
            plain._load_best_model()


def _writes_otherwise(trainer: Any) -> bool:
    """Return whether FSDP or DeepSpeed writes the checkpoints, with the names of the model."""
    return trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled


def load_renamed(model: Any, checkpoint: str | Path) -> bool:
    """Load the weights of a checkpoint whose names are not the model's; False: they are, and nothing was loaded.

    They are read in float32 at least, which holds every value of lower precision, into a second model on the host.

    Args:
        model: its weights are overwritten in place.
        checkpoint: the folder that `save_pretrained` wrote.

    Raises:
        ConfigError: a weight of the model is not in the checkpoint, even as `from_pretrained` names it.
    """
    if not isinstance(model, PreTrainedModel) or stored_names(Path(checkpoint)) <= model.state_dict().keys():
        return False
    dtype = torch.promote_types(model.dtype, torch.float32)
    loaded: Any = type(model).from_pretrained(checkpoint, dtype=dtype, output_loading_info=True)
    stored, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"{checkpoint} lacks {len(missing)} weights of {type(model).__name__}, {missing[0]} among them, so the run "
            "would go on with those that the model has now: resume with the model and the transformers that wrote it"
        )
    model.load_state_dict(stored.state_dict())
    return True


def stored_names(checkpoint: Path) -> set[str]:
    """Read the names of the weights in a checkpoint's safetensors files; none: it has adapters only, or other files."""
    index, file = checkpoint / SAFE_WEIGHTS_INDEX_NAME, checkpoint / SAFE_WEIGHTS_NAME
    if file.is_file():
        with safe_open(file, framework="pt") as weights:
            return {*weights.keys()}
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"]) if index.is_file() else set()
