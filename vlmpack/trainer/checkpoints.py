"""Checkpoints of PackedTrainer: which are complete, and from which row they are resumed.

    checkpoint-3/  model.safetensors  ...  trainer_state.json  packed_plan.json or packed_stream_0.safetensors

The last file of a checkpoint is ours, written atomically: a run that was killed while it saved left a checkpoint
without it. `packed_plan.json` names the plan of the steps; `packed_stream_RANK.safetensors` is the state of a stream.

A stream's state is plain data: its structure is JSON, tensors and bytes lie beside it. Unlike a pickle it runs no code
when it is read. A list stays a list; any other value has the name of its kind:

    {"seen": 3, "rows": [ids]}   {"dict": [["seen", 3], ["rows", [{"tensor": 0}]]]}   and tensor 0

What is written is read back equal and of the same type, with two exceptions: other mappings become dictionaries, and
images lose the file that they came from.

Weights: `save_pretrained` writes a model of many families under the names of its first release, and `from_pretrained`
maps them:

    model.language_model.layers.0.mlp.up_proj.weight    of the model
    language_model.model.layers.0.mlp.up_proj.weight    in the file

Trainer of transformers reads the file with `load_state_dict(strict=False)`, to resume and for the best model. Of such a
file it takes only the names that are alike, logs the others, and trains on with the weights that the model had.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from vlmpack.errors import ConfigError, SampleError
from vlmpack.files import atomic_file, write_text, writing
from vlmpack.trainer.loss import gathered

PLAN_FILE = "packed_plan.json"
"""In a checkpoint: the plan of its steps, and how its rows were dealt to ranks and steps."""
_STATE_FILE = "trainer_state.json"
"""The last file that Trainer writes by itself."""
_NEW_RUN = "begin a new run, from its weights (from_pretrained(checkpoint)) if they are there"

# ---------------------------------------------------------------------- complete checkpoints


def check_complete(checkpoint: str | Path, last_file: str | None) -> None:
    """Raise unless a checkpoint was written to its end.

    Args:
        checkpoint: the folder.
        last_file: the name of the file of ours that is written last; None: Trainer's own is the last.

    Raises:
        ConfigError: a file is missing or was not written to its end; names it, and the checkpoint to resume from.
    """
    folder = Path(checkpoint)
    if lack := _lack(folder, last_file):
        complete = [step for step, missing in _lacks(folder.parent, last_file).items() if not missing]
        instead = f"resume from {folder.with_name(f'checkpoint-{max(complete)}')}" if complete else _NEW_RUN
        raise ConfigError(f"{folder} cannot be resumed from: {lack}. Instead, {instead}")


def newest_complete(output_dir: str | Path, last_file: str | None) -> Path:
    """Find the newest checkpoint that all ranks wrote to its end; warn of newer ones.

    Raises:
        ConfigError: there is none.
    """
    folder = Path(output_dir)
    lacks = _lacks(folder, last_file)
    complete = set.intersection(*gathered({step for step, lack in lacks.items() if not lack}))
    newest = max(complete, default=-1)
    newer = "; ".join(
        f"in checkpoint-{step} {lacks[step] or 'another rank lacks a file'}" for step in sorted(lacks) if step > newest
    )
    if not complete:
        reason = newer or "there is none at all"
        raise ConfigError(f"{folder} has no checkpoint to resume from ({reason}). Instead, {_NEW_RUN}")
    if newer:
        warnings.warn(f"resuming from checkpoint-{newest}, since {newer}", stacklevel=3)
    return folder / f"checkpoint-{newest}"


def _lacks(output_dir: Path, last_file: str | None) -> dict[int, str]:
    """Return what each checkpoint of a run lacks, by its step."""
    paths = [path for path in output_dir.glob("checkpoint-*") if path.is_dir()]
    numbered = [(path, path.name.removeprefix("checkpoint-")) for path in paths]
    return {int(step): _lack(path, last_file) for path, step in numbered if step.isdecimal()}


def _lack(checkpoint: Path, last_file: str | None) -> str:
    """Return what a checkpoint lacks, and why; "": nothing."""
    state, stopped = checkpoint / _STATE_FILE, "the run was stopped while it was written"
    if not state.is_file():
        return f"{_STATE_FILE} is missing: {stopped}"
    try:
        json.loads(state.read_text(encoding="utf-8"))
    except ValueError:
        return f"{_STATE_FILE} ends too early: {stopped}"
    if last_file is None or (checkpoint / last_file).is_file():
        return ""
    if (pickled := (checkpoint / last_file).with_suffix(".pt")).is_file():
        return f"{pickled.name} was pickled by an earlier version of vlmpack: end the run with that version"
    return f"{last_file} is missing: {stopped}, it has weights alone (save_only_model), or another Trainer wrote it"


# ---------------------------------------------------------------------- the plan of the steps


def save_plan(file: Path, dealt: str) -> None:
    """Write which plan a checkpoint's steps were of; see `check_plan`."""
    write_text(file, json.dumps({"of": dealt}))


def check_plan(checkpoint: str | Path, dealt: str) -> None:
    """Raise unless a checkpoint's steps were of these rows: Trainer skips as many rows as there were steps.

    Args:
        checkpoint: the folder.
        dealt: the plan and how its rows are dealt, as `PackedBatchSampler.state_dict()["of"]` writes them.

    Raises:
        ConfigError: the steps were of another plan, or dealt in another way.
    """
    file = Path(checkpoint) / PLAN_FILE
    try:
        saved = str(json.loads(file.read_text(encoding="utf-8"))["of"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is damaged ({type(error).__name__}: {error}); resume from another one") from error
    if saved == dealt:
        return
    pairs = zip(saved.split(", "), dealt.split(", "), strict=False)
    differing = [pair for pair in pairs if pair[0] != pair[1]] or [(saved, dealt)]
    was, now = (", ".join(part) for part in zip(*differing, strict=True))
    raise ConfigError(
        f"{checkpoint} was trained on rows of {was}, but these are of {now}: some samples would be trained on twice "
        f"and others never. Plan and deal as before, or {_NEW_RUN}"
    )


# ---------------------------------------------------------------------- the state of a stream


def stream_file(rank: int) -> str:
    """Return the name of the file with the state of one rank's stream and the samples that are in its buffer."""
    return f"packed_stream_{rank}.safetensors"


def save_stream(file: Path, loader: Any) -> None:
    """Write the state of a `StatefulDataLoader` over a stream."""
    state = {"workers": loader.num_workers, "loader": loader.state_dict()}
    with atomic_file(file) as temporary, writing(file):
        write_state(state, temporary)


def load_stream(file: Path, loader: Any) -> None:
    """Continue a loader where it was when the file was written.

    Raises:
        ConfigError: the file is damaged, or of a loader with other workers, each of which keeps a part of the state.
    """
    state = read_state(file)
    if not isinstance(state, dict) or state.keys() != {"workers", "loader"}:
        raise ConfigError(f"{file} is no state of a stream; resume from another checkpoint")
    if state["workers"] != loader.num_workers:
        workers = f"dataloader_num_workers={state['workers']}, but now there are {loader.num_workers}"
        raise ConfigError(f"{file} is of a stream with {workers}: resume with as many as before")
    loader.load_state_dict(state["loader"])


# ---------------------------------------------------------------------- plain data in a file

FORMAT = "vlmpack state 2"
_JSON_TYPES = (type(None), bool, int, float, str)
_NUMPY_KINDS = "biufcSUmM"
"""Every numpy type but objects and records."""


def write_state(state: Any, file: Path) -> None:
    """Write plain data; see `read_state`.

    Raises:
        ConfigError: something in it is no plain data; names where it is, and what may be there.
    """
    tensors: list[torch.Tensor] = []
    text = json.dumps(_to_json(state, "the state", tensors))
    numbered = {str(at): tensor for at, tensor in enumerate(tensors)}
    save_file({"state": _to_tensor(text.encode()), **numbered}, file, metadata={"format": FORMAT})


def read_state(file: Path) -> Any:
    """Read what `write_state` wrote.

    Raises:
        ConfigError: the file is damaged, or was written by something else.
    """
    try:
        with safe_open(file, framework="pt") as stored:
            form = (stored.metadata() or {}).get("format")
            tensors = {name: stored.get_tensor(name) for name in stored.keys()} if form == FORMAT else {}  # noqa: SIM118
        if form != FORMAT:
            raise ValueError(f"its format is {form!r}, not {FORMAT!r}")
        return _from_json(json.loads(_to_bytes(tensors["state"])), tensors)
    except (SafetensorError, ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise ConfigError(
            f"{file} is damaged, or is no state that vlmpack wrote ({type(error).__name__}: {error}); resume from "
            f"another checkpoint, or {_NEW_RUN}"
        ) from error


def _to_json(value: Any, where: str, tensors: list[torch.Tensor]) -> Any:
    """Return JSON for a value, its tensors and bytes appended to `tensors`; `where` it is, for an error."""
    if type(value) in _JSON_TYPES:
        return value
    if type(value) is list:
        return [_to_json(part, f"{where}[{at}]", tensors) for at, part in enumerate(value)]
    if isinstance(value, Mapping):
        parts = [
            [_to_json(name, where, tensors), _to_json(part, f"{where}[{name!r}]", tensors)]
            for name, part in value.items()
        ]
        return {"dict": parts}
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        tensors.append(value.detach().cpu().contiguous().clone())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, bytes | bytearray):
        tensors.append(_to_tensor(value))
        return {"bytearray" if isinstance(value, bytearray) else "bytes": len(tensors) - 1}
    holds_objects = isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in _NUMPY_KINDS
    for name, kind in _KINDS.items():
        if (
            type(value) is kind.type or (name in _WITH_SUBCLASSES and isinstance(value, kind.type))
        ) and not holds_objects:
            return {name: _to_json(kind.take_apart(value), where, tensors)}
    raise ConfigError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold without pickle: samples in the buffer of "
        "a stream are stored with it, so let them be data (numbers, text, bytes, dates, lists, dictionaries, tensors, "
        "arrays, images), or names of files that the collator opens"
    )


def _from_json(stored: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Invert `_to_json`."""
    if isinstance(stored, list):
        return [_from_json(part, tensors) for part in stored]
    if not isinstance(stored, dict):
        return stored
    ((name, parts),) = stored.items()
    if name == "tensor":
        return tensors[str(parts)]
    if name in ("bytes", "bytearray"):
        data = _to_bytes(tensors[str(parts)])
        return data if name == "bytes" else bytearray(data)
    built = _from_json(parts, tensors)
    return dict(built) if name == "dict" else _KINDS[name].build(built)


def _array_parts(array: Any) -> list[Any]:
    return [array.dtype.str, list(array.shape), array.tobytes()]


def _array(parts: list[Any]) -> np.ndarray:
    dtype, shape, data = parts
    return np.frombuffer(bytearray(data), dtype=np.dtype(dtype)).reshape(shape)


def _image_parts(image: Image.Image) -> list[Any]:
    """Return the mode, size, plain notes of the file (its orientation as EXIF or XMP), palette and pixels."""
    data = image.tobytes()
    notes = {name: str(value) if isinstance(value, str) else value for name, value in image.info.items()}
    notes = {name: value for name, value in notes.items() if isinstance(name, str) and _is_note(value)}
    mode = None if image.palette is None else image.palette.mode
    return [image.mode, image.size, notes, mode, None if mode is None else image.getpalette(mode), data]


def _is_note(value: Any) -> bool:
    return type(value) in (*_JSON_TYPES, bytes) or (type(value) is tuple and all(map(_is_note, value)))


def _image(parts: list[Any]) -> Image.Image:
    mode, size, notes, palette_mode, palette, data = parts
    image = Image.frombytes(mode, size, data)
    if palette is not None:
        image.putpalette(palette, palette_mode)
    image.info.update(notes)
    return image


class _Kind(NamedTuple):
    """A kind of value that is stored by its parts."""

    type: type
    take_apart: Callable[[Any], Any]
    build: Callable[[Any], Any]


_KINDS: Mapping[str, _Kind] = {
    "tuple": _Kind(tuple, list, tuple),
    **{kind.__name__: _Kind(kind, lambda values: sorted(values, key=repr), kind) for kind in (set, frozenset)},
    **{kind.__name__: _Kind(kind, kind.isoformat, kind.fromisoformat) for kind in (datetime, date, time)},
    "decimal": _Kind(Decimal, str, Decimal),
    "path": _Kind(type(Path()), str, Path),
    "array": _Kind(np.ndarray, _array_parts, _array),
    "scalar": _Kind(np.generic, _array_parts, lambda parts: _array(parts)[()]),
    "image": _Kind(Image.Image, _image_parts, _image),
    "sample_error": _Kind(
        SampleError,
        lambda error: [error.detail, {"index": error.index, "reason": error.reason, "sample_id": error.sample_id}],
        lambda parts: SampleError(parts[0], **parts[1]),
    ),
}
_WITH_SUBCLASSES = ("array", "scalar", "image", "sample_error")
"""Kinds whose subclasses are stored too, and come back as `build` makes them."""


def _to_tensor(data: bytes | bytearray) -> torch.Tensor:
    """Return uint8 [n]."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


# ---------------------------------------------------------------------- weights under other names


class RenamedWeights(Trainer):
    """A Trainer that loads the weights of its checkpoints as `from_pretrained` does, where names differ."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        target = self.model if model is None else model
        if self._writes_own_names or not load_renamed(target, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, cast(Any, model))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self._writes_own_names or best is None or not load_renamed(self.model, best):
            super()._load_best_model()

    @property
    def _writes_own_names(self) -> bool:
        """True if FSDP or DeepSpeed writes the checkpoints, with the names of the model."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled


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
        lost = f"{len(missing)} weights of {type(model).__name__}, {missing[0]} among them"
        raise ConfigError(f"{checkpoint} lacks {lost}: resume with the model and the transformers that wrote it")
    model.load_state_dict(stored.state_dict())
    return True


def stored_names(checkpoint: Path) -> set[str]:
    """Read the names of the weights in a checkpoint's safetensors files; none: it has adapters only, or other files."""
    index, file = checkpoint / SAFE_WEIGHTS_INDEX_NAME, checkpoint / SAFE_WEIGHTS_NAME
    if file.is_file():
        with safe_open(file, framework="pt") as weights:
            return {*weights.keys()}
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"]) if index.is_file() else set()
