"""Mechanisms broken on purpose, one each, in whatever family has them, and the causes that the probe has to name.

Each takes the name of a family and pytest's `monkeypatch`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from typing import Any, final

import pytest
import torch

from vlmpack.attention.backends import SdpaSegments
from vlmpack.attention.spans import SpanCall, Spans
from vlmpack.families import Family, family_named
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import PaddedBatch, Segments
from vlmpack.model import engine, head
from vlmpack.model.mechanisms import attention, audio, experts, vision
from vlmpack.model.mechanisms.experts import has_balance
from vlmpack.model.mechanisms.gated_delta import GatedDelta
from vlmpack.model.mechanisms.llama4 import QueryScale
from vlmpack.model.mechanisms.recurrent_rows import Buckets
from vlmpack.model.mechanisms.short_conv import ShortConv
from vlmpack.model.mechanisms.vision import Vision, VisionRow
from vlmpack.model.row import RowContext
from vlmpack.testing import tiny_model

packing = sys.modules["vlmpack.layout.packing"]  # `vlmpack.layout.pack` has the name of a function

Patch = pytest.MonkeyPatch


def positions_run_on(family: str, patch: Patch) -> None:
    """Rotary positions do not start again in the next sample."""
    kind = type(family_named(family))
    honest = kind.positions

    def one_run(self: Any, table: Any, segments: Segments, **settings: Any) -> torch.Tensor:
        return honest(self, table, segments, **settings | {"restarts": Segments.from_lengths([segments.total])})

    patch.setattr(kind, "positions", one_run)


def positions_are_scaled(family: str, patch: Patch) -> None:
    """Rotary positions start again, at twice the pace."""
    kind = type(family_named(family))
    honest = kind.positions
    patch.setattr(kind, "positions", lambda self, *args, **metadata: 2 * honest(self, *args, **metadata))
    patch.setattr(sys.modules["vlmpack.model.enable"], "check_rope_index", lambda model: None)  # it would notice


def one_mask(family: str, patch: Patch) -> None:
    """Text attention takes the whole row for one sample."""

    def one_segment(**metadata: Any) -> RowContext:
        whole = Segments.from_lengths([metadata["segments"].total])
        entries = dict(metadata["entries"])
        if "per_sample" in entries:
            entries["per_sample"] = Buckets.cheapest(whole, call_cost=0)
        return RowContext(**{**metadata, "segments": whole, "entries": entries})

    patch.setattr(engine, "RowContext", one_segment)


def padding_for_tokens(family: str, patch: Patch) -> None:
    """Text attention takes padding for tokens of the last sample: under a causal mask no real token sees any of it."""

    def joined(**metadata: Any) -> RowContext:
        segments: Segments = metadata["segments"]
        *others, _ = segments.sample_lengths
        return RowContext(**{**metadata, "segments": Segments.from_lengths([*others, segments.total - sum(others)])})

    patch.setattr(engine, "RowContext", joined)


def a_cache(family: str, patch: Patch) -> None:
    """The model fills a cache, as its configuration says."""
    honest = engine.backbone_inputs
    patch.setattr(engine, "backbone_inputs", lambda *args, **metadata: {**honest(*args, **metadata), "use_cache": True})


def one_segment_in(*, audio: bool) -> Callable[[str, Patch], None]:
    """Blocks of one tower take all images, or all audio, of a call for one; the other tower stays as it is."""

    def break_it(family: str, patch: Patch) -> None:
        of_audio, find = _sizes_of_audio(patch), VisionRow.find

        def found(self: VisionRow, cu_seqlens: torch.Tensor, num_patches: int) -> Segments:
            own = find(self, cu_seqlens, num_patches)
            return Segments.from_lengths([num_patches]) if (num_patches in of_audio) == audio else own

        patch.setattr(VisionRow, "find", found)

    return break_it


one_picture, one_audio = one_segment_in(audio=False), one_segment_in(audio=True)


def _sizes_of_audio(patch: Patch) -> set[int]:
    """Collect the numbers of frames that blocks of the audio tower get."""
    totals, honest = set[int](), audio.audio_windows

    def windows(setup: Any) -> list[Segments]:
        found = honest(setup)
        totals.update(segments.total for segments in found)
        return found

    patch.setattr(vision, "audio_windows", windows)
    return totals


def a_pad_for_a_token(family: str, patch: Patch) -> None:
    """As many tokens as are real go through the model, but one of them is padding."""
    honest = packing._kept

    def exchanged(row: Any, segments: Segments) -> Any:
        kept = honest(row, segments)
        kept[row.segments.num_tokens - 1] = row.segments.padding_mask().nonzero()[0, 0]
        return kept

    patch.setattr(packing, "_kept", exchanged)


def first_labels_kept(family: str, patch: Patch) -> None:
    """The first token of a sample is learnt from the last one before, and the host's count is not looked at."""
    honest_targets = packing._Take.targets

    def targets(take: Any, labels: torch.Tensor) -> torch.Tensor:
        out, segments = honest_targets(take, labels), take._segments
        if segments.has_padding:
            firsts = take(labels, -100)
            for (_, stop), (start, _) in pairwise(segments.spans):
                out[:, stop - 1] = firsts[:, start]
        return out

    honest = engine.target_positions
    patch.setattr(packing._Take, "targets", targets)
    patch.setattr(engine, "target_positions", lambda labels, count: honest(labels, None))


def loss_over_width(family: str, patch: Patch) -> None:
    """The loss is divided by the tokens of the row, pads included."""
    honest = engine.StepResult

    def diluted(**metadata: Any) -> Any:
        share = metadata["num_targets"] / metadata["segments"].total
        return honest(**{**metadata, "loss": metadata["loss"] * share})

    patch.setattr(engine, "StepResult", diluted)


class Uncut:
    """A row that goes through a recurrent layer as it is."""

    tokens, tree = 1, None

    def run(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        return layer(hidden, None)

    def split(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        return [hidden]

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        (part,) = parts
        return part


def no_reset(family: str, patch: Patch) -> None:
    """Gated delta layers run over the whole row."""
    patch.setattr(GatedDelta, "prepare", lambda *metadata: Uncut())


def conv_runs_on(family: str, patch: Patch) -> None:
    """Their recurrence starts anew in every sample, their convolution does not."""
    modelling, pieces = modelling_of(family), uncut_pieces(patch)
    honest = modelling.torch_chunk_gated_delta_rule

    def piecewise(*qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **settings: Any) -> Any:
        cut = [x.split(pieces(x.shape[1]), dim=1) for x in (*qkv, g, beta)]
        found = [honest(*part[:3], g=part[3], beta=part[4], **settings)[0] for part in zip(*cut, strict=True)]
        return torch.cat(found, dim=1), None

    patch.setattr(modelling, "torch_chunk_gated_delta_rule", piecewise)


def state_runs_on(family: str, patch: Patch) -> None:
    """Their convolution starts anew in every sample, their recurrence does not."""
    modelling, pieces = modelling_of(family), uncut_pieces(patch)
    honest = modelling.causal_conv1d_fn

    def piecewise(x: torch.Tensor, *args: Any, **settings: Any) -> torch.Tensor:
        return torch.cat([honest(part, *args, **settings) for part in x.split(pieces(x.shape[2]), dim=2)], dim=2)

    patch.setattr(modelling, "causal_conv1d_fn", piecewise)


def modelling_of(family: str) -> Any:
    kind = FAMILIES[family]
    assert kind.has("gated_delta")
    return import_module(kind.modelling)


def uncut_pieces(patch: Patch) -> Callable[[int], list[int]]:
    """Rows go through gated delta layers as they are; what is given back says where in a row of some width samples and
    gaps lie. Anything else is in one piece."""
    rows: dict[int, list[int]] = {}

    def noted(self: GatedDelta, setup: Any) -> Uncut:
        segments = setup.row.segments
        rows[segments.total] = [n for n in segments.lengths if n]
        return Uncut()

    patch.setattr(GatedDelta, "prepare", noted)
    return lambda width: rows.get(width, [width])


# ---------------------------------------------------------------------- what fewer families have


def offsets_ignored(family: str, patch: Patch) -> None:
    """Samples of a left-padded batch are cut out of it where those of a right-padded one are."""
    honest = packing._spans

    def spans(batch: PaddedBatch) -> Any:
        found = honest(batch)
        return found if batch.metadata is None else replace(found, offsets=(0,) * len(found.lengths))

    patch.setattr(packing, "_spans", spans)


def pixels_in_another_order(family: str, patch: Patch) -> None:
    """The last image's pixels come first."""
    honest, axis = Vision.inputs, family_named(family).media["pixel_values"].axis

    def inputs(self: Vision, entry: VisionRow) -> Mapping[str, Any]:
        found = honest(self, entry)
        return {name: x.flip(axis) if name == "pixel_values" else x for name, x in found.items()}

    patch.setattr(Vision, "inputs", inputs)


def images_mixed(family: str, patch: Patch) -> None:
    """A tower whose images are rows of a batch mixes those of a row."""
    in_rows: list[bool] = []
    prepare = Vision.prepare

    def prepared(self: Vision, setup: Any) -> VisionRow:
        in_rows.append(True)
        return prepare(self, setup)

    path = FAMILIES[family].vision_path
    assert path is not None
    tower = type(tiny_model(family).get_submodule(path))
    honest = tower.forward

    def mixing(self: Any, pixel_values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mixed = pixel_values + 0.3 * pixel_values.mean(0, keepdim=True) if in_rows else pixel_values
        return honest(self, mixed, *args, **kwargs)

    patch.setattr(Vision, "prepare", prepared)
    patch.setattr(tower, "forward", mixing)


def without(part: str) -> Callable[[str, Patch], None]:
    """Attention does without a part of its layers' pattern."""

    def break_it(family: str, patch: Patch) -> None:
        honest = SdpaSegments.__call__

        def call(self: Any, *qkv: Any, pattern: Any, **settings: Any) -> torch.Tensor:
            return honest(self, *qkv, pattern=replace(pattern, **{part: None}), **settings)

        patch.setattr(SdpaSegments, "__call__", call)

    return break_it


no_windows, no_sinks = without("window"), without("sinks")


def no_chunks(family: str, patch: Patch) -> None:
    """Layers with chunks attend to all of a sample."""
    patch.setattr(attention, "with_chunk", lambda masks, pattern, layer: pattern)


def no_spans(family: str, patch: Patch) -> None:
    """Image tokens and prefixes see none of their later tokens."""
    patch.setattr(attention.RowAttention, "spans_of", lambda self, window: None)


def wide_spans(family: str, patch: Patch) -> None:
    """Image tokens and prefixes see the samples before."""
    honest: Any = Spans.cut

    def wide(self: Spans, segments: Segments, keys: Segments, window: int | None) -> tuple[SpanCall, ...]:
        calls = honest(self, segments, keys, window)
        return tuple(
            SpanCall(places=tuple((a, b, 0, end) for a, b, _, end in call.places), window=None) for call in calls
        )

    patch.setattr(Spans, "cut", wide)


def factors_of_the_row(family: str, patch: Patch) -> None:
    """Queries are scaled by their place in the row."""
    honest = QueryScale.prepare
    patch.setattr(QueryScale, "prepare", lambda self, setup: torch.zeros_like(honest(self, setup)))


def short_conv_runs_on(family: str, patch: Patch) -> None:
    """Short convolutions run over the whole row."""
    patch.setattr(ShortConv, "prepare", lambda *metadata: Uncut())


def images_for_text(family: str, patch: Patch) -> None:
    """Experts of text get the tokens of images too."""
    honest = Family.expert_types_of

    def as_text(self: Family, input_ids: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
        is_row = sys._getframe(1).f_code is engine.backbone_inputs.__wrapped__.__code__  # pyright: ignore
        found = honest(self, input_ids, config)
        return {name: torch.zeros_like(types) for name, types in found.items()} if is_row else found

    patch.setattr(Family, "expert_types_of", as_text)


def another_balance(family: str, patch: Patch) -> None:
    """The load-balancing loss is a tenth too large."""
    honest = experts.balance
    patch.setattr(experts, "balance", lambda *metadata: 1.1 * honest(*metadata))


def audios_padded_together(family: str, patch: Patch) -> None:
    """A tower that reads padding gets all audio of a row in one call."""
    honest = audio._groups
    patch.setattr(audio, "_groups", lambda setup: [sorted(at for group in honest(setup) for at in group)])


def ngrams_of_the_row(family: str, patch: Patch) -> None:
    """N-grams reach into the sample before."""
    per_sample = sys.modules["vlmpack.model.mechanisms.per_sample"]
    honest = per_sample.run_per_sample

    def on_samples(layer: Any, row: Any, hidden: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
        return honest(layer, row, hidden, *beside) if len(beside) != 1 else layer(hidden, *beside)

    patch.setattr(per_sample, "run_per_sample", on_samples)


def last_chunk_lost(family: str, patch: Patch) -> None:
    """The last targets of the head have no loss."""
    honest = head.target_logprobs

    def without(*args: Any, chunk: int, **settings: Any) -> torch.Tensor:
        logprobs = honest(*args, chunk=chunk, **settings)
        keep = torch.arange(len(logprobs)) < max(len(logprobs) // chunk, 1) * chunk
        return logprobs * keep

    patch.setattr(head, "target_logprobs", without)


def another_target_each(family: str, patch: Patch) -> None:
    """Each sample is said to have a target more."""
    honest = engine.sums_by_sample

    def one_more(*args: Any, **settings: Any) -> Any:
        sums, counts = honest(*args, **settings)
        return sums, counts + 1

    patch.setattr(engine, "sums_by_sample", one_more)


# ---------------------------------------------------------------------- which family has what


@final
@dataclass(frozen=True, kw_only=True)
class Breakage:
    """One mechanism, broken."""

    breaks: Callable[[str, Patch], None]
    """Break it, in packed rows only."""
    causes: tuple[str, ...]
    """What the probe has to name, and nothing else."""
    has: Callable[[Family], bool] = lambda family: True
    """Return whether a family has the mechanism."""


WINDOWS = (
    *("cohere2_vision", "aya_vision", "gemma3", "gemma4", "gemma4_unified", "paligemma"),
    *("mistral", "gemma2", "gemma3_text", "phi3", "olmo3", "cohere2", "gpt_oss"),
)
"""Families with windows that samples of a probe pass, in their tiny configurations."""


def _has_bounded_tower(family: Family) -> bool:
    return family.has_vision and (family.has_grids or family.tile_boundaries is not None)


def _mechanism(name: str) -> Callable[[Family], bool]:
    return lambda family: family.has(name)


BREAKAGES: dict[str, Breakage] = {
    "packing": Breakage(breaks=offsets_ignored, causes=("packing",)),
    "pixels": Breakage(breaks=pixels_in_another_order, causes=("packing",), has=lambda family: family.has_vision),
    "positions run on": Breakage(breaks=positions_run_on, causes=("positions",)),
    "positions' pace": Breakage(breaks=positions_are_scaled, causes=("positions",)),
    "query scale": Breakage(breaks=factors_of_the_row, causes=("positions",), has=_mechanism("query_scale")),
    "mask": Breakage(breaks=one_mask, causes=("mask",)),
    "windows": Breakage(breaks=no_windows, causes=("mask",), has=lambda family: family.model_type in WINDOWS),
    "chunks": Breakage(breaks=no_chunks, causes=("mask",), has=_mechanism("query_scale")),
    "spans": Breakage(breaks=no_spans, causes=("mask",), has=lambda family: family.bidirectional is not None),
    "wide spans": Breakage(breaks=wide_spans, causes=("mask",), has=lambda family: family.bidirectional is not None),
    "sinks": Breakage(breaks=no_sinks, causes=("mask",), has=lambda family: family.model_type == "gpt_oss"),
    "cache": Breakage(breaks=a_cache, causes=("cache",)),
    "convolution": Breakage(breaks=conv_runs_on, causes=("recurrent state",), has=_mechanism("gated_delta")),
    "recurrence": Breakage(breaks=state_runs_on, causes=("recurrent state",), has=_mechanism("gated_delta")),
    "gated delta layers": Breakage(breaks=no_reset, causes=("recurrent state",), has=_mechanism("gated_delta")),
    "short convolutions": Breakage(
        breaks=short_conv_runs_on, causes=("recurrent state",), has=_mechanism("short_conv")
    ),
    "n-grams": Breakage(breaks=ngrams_of_the_row, causes=("unknown",), has=_mechanism("per_sample")),
    "a pad for a token": Breakage(  # which a family with a column of prefixes refuses by itself
        breaks=a_pad_for_a_token, causes=("packing",), has=lambda family: not family.token_columns
    ),
    "kinds of tokens": Breakage(
        breaks=images_for_text, causes=("router",), has=lambda family: family.expert_types is not None
    ),
    "router losses": Breakage(
        breaks=another_balance, causes=("router",), has=lambda family: family.has("experts") and has_balance(family)
    ),
    "images": Breakage(breaks=one_picture, causes=("vision",), has=_has_bounded_tower),
    "images in a batch": Breakage(
        breaks=images_mixed, causes=("vision",), has=lambda family: family.has_vision and not _has_bounded_tower(family)
    ),
    "audio": Breakage(breaks=one_audio, causes=("audio",), has=lambda family: family.has_audio),
    "padding of audio": Breakage(
        breaks=audios_padded_together,
        causes=("audio",),
        has=lambda family: family.audio is not None and family.audio.reads_padding,
    ),
    "head": Breakage(breaks=last_chunk_lost, causes=("head",)),
    "targets": Breakage(breaks=first_labels_kept, causes=("loss count",)),
    "divisor": Breakage(breaks=loss_over_width, causes=("loss count",)),
    "sample results": Breakage(breaks=another_target_each, causes=("sample results",)),
}
"""By name, in the order of the mechanisms in the README of `vlmpack/probing`."""
