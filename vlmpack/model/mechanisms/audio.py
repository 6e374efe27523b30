"""Audio: features that do not depend on a row's other samples, and boundaries of the tower's blocks.

    input_features [N, mel, F], mask ──model──▶ frames of all audios, concatenated ──tower──▶ features
                                                     └─ in groups of samples, if the tower reads padding

transformers removes the padding, splits each audio into chunks, pads them to the longest chunk of the call, and lets
blocks attend within chunks or windows of chunks. The host derives these boundaries from the frames of each audio. They
are stored in the row's entry for `vision`, where attention looks up the boundaries of a call.

Qwen3-Omni's convolutions read the padding of a chunk, which is no longer zero after the first convolution. So samples
whose longest chunks have the same size go through its tower together, and each audio is padded as in its sample alone.
Its tower passes no row keyword to its layers: they take the row from a context variable.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import nn

from vlmpack.families.family import Family
from vlmpack.layout.device import to_device
from vlmpack.layout.segments import Segments
from vlmpack.model.mechanisms import ClassMechanism, Maker, ModelParts, RowSetup, handed_on, replaces, taking_class
from vlmpack.model.row import CONTEXT, RowContext


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class AudioRow:
    """A row's entry for audio."""

    frames: tuple[int, ...]
    """Log-mel frames of each computed audio."""
    tokens: tuple[int, ...]
    """Tokens of each audio."""
    groups: Sequence[Sequence[int]]
    """Indices of the audios in each call of the tower."""


@final
class Audio(ClassMechanism):
    """The audio of a row."""

    name: ClassVar[str] = "audio"

    def is_in(self, family: Family) -> bool:
        """Return whether the family has an audio tower."""
        return family.has_audio

    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """Return the tower if it reads padding or passes its layers no keywords; in the latter case its layers too."""
        audio, tower = model.family.audio, model.family.audio_tower(model.core)
        assert audio is not None
        assert tower is not None
        changed: list[tuple[nn.Module, Maker]] = []
        if audio.reads_padding or not audio.passes_row:
            changed.append((tower, grouped_class))
        if not audio.passes_row:
            changed += [(layer, taking_class) for layer in tower.get_submodule("layers").children()]
        return changed

    def prepare(self, setup: RowSetup) -> AudioRow:
        """Collect frames, tokens and groups of audios."""
        audios = setup.part.computed_media(setup.media).audios
        return AudioRow(
            frames=tuple(audio.frames for audio in audios),
            tokens=tuple(audio.tokens for audio in audios),
            groups=_groups(setup),
        )

    def work(self, setup: RowSetup, entry: AudioRow) -> Mapping[str, int]:
        """Count the frames of all audios, without padding."""
        return {"audio_frames": sum(entry.frames)}


def audio_windows(setup: RowSetup) -> list[Segments]:
    """Derive the boundaries that blocks of the audio tower attend within, one set for each of its calls."""
    part, frames = setup.model.family.audio, [audio.frames for audio in setup.part.computed_media(setup.media).audios]
    assert part is not None
    return [part.windows([frames[at] for at in group], setup.config.audio_config) for group in _groups(setup)]


def _groups(setup: RowSetup) -> list[list[int]]:
    part = setup.model.family.audio
    assert part is not None
    return part.groups(setup.part.computed_media(setup.media).audios, setup.media, setup.config)


# ---------------------------------------------------------------------- towers that read padding


@replaces()
def grouped_class(plain: Any, module: Any, input_features: Any = None, feature_lens: Any = None, **kwargs: Any) -> Any:
    """Make a subclass of an audio tower's class that computes groups of audios and hands its row on."""
    row: RowContext | None = kwargs.get(CONTEXT)
    if row is None:
        return plain(module, input_features, feature_lens=feature_lens, **kwargs)
    with handed_on(row):
        call = functools.partial(plain, module, **kwargs)
        return _by_group(call, input_features, feature_lens, row.entries[Audio.name])


def _by_group(call: Any, features: torch.Tensor, frames: torch.Tensor, entry: AudioRow) -> Any:
    """Compute features from the frames [mel, F] of all audios, with one call of the tower per group."""
    if len(entry.groups) == 1:
        return call(features, feature_lens=frames)
    audios = features.split(entry.frames, dim=1)
    parts: list[torch.Tensor] = [features.new_zeros(0)] * len(audios)
    output = None
    for group in entry.groups:
        numbers = to_device(np.asarray(group, np.int64), frames.device)
        joined = torch.cat([audios[at] for at in group], 1)
        output = call(joined, feature_lens=frames.index_select(0, numbers))
        of_group = output.last_hidden_state.split([entry.tokens[at] for at in group])
        for at, part in zip(group, of_group, strict=True):
            parts[at] = part
    assert output is not None
    output.last_hidden_state = output.pooler_output = torch.cat(parts)
    return output
