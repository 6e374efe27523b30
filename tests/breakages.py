"""Mechanisms broken on purpose, one each, in whatever family has them, and the causes that the probe has to name.

Each takes the name of a family and pytest's `monkeypatch`. `@replaces(owner, name)` makes one of a function that stands
in for `owner.name` and gets the original first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch

from vlmpack.attention.backends import SdpaSegments
from vlmpack.attention.spans import SpanCall, Spans
from vlmpack.families import Family, family_named
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import PaddedBatch, Segments
from vlmpack.layout import row as packing
from vlmpack.model import engine, head, result
from vlmpack.model.mechanisms import attention, audio, experts, vision
from vlmpack.model.mechanisms.experts import has_balance
from vlmpack.model.mechanisms.gated_delta import GatedDelta
from vlmpack.model.mechanisms.llama4 import QueryScale
from vlmpack.model.mechanisms.recurrent_rows import Buckets
from vlmpack.model.mechanisms.short_conv import ShortConv
from vlmpack.model.mechanisms.vision import Vision, VisionRow
from vlmpack.model.row import RowContext
from vlmpack.testing import tiny_model

Patch = pytest.MonkeyPatch


Break = Callable[[str, Patch], None]


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], Break]:
    """Make a breakage of a function."""

    def breakage(broken: Callable[..., Any]) -> Break:
        def break_it(family: str, patch: Patch) -> None:
            original = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **named: broken(original, *args, **named))

        return break_it

    return breakage


def whole(segments: Segments) -> Segments:
    return Segments.from_lengths([segments.total])


# ---------------------------------------------------------------------- positions and attention


def positions_run_on(family: str, patch: Patch) -> None:
    """Rotary positions do not start again in the next sample."""
    kind = type(family_named(family))
    original = kind.positions

    def one_run(self: Any, table: Any, segments: Segments, **settings: Any) -> torch.Tensor:
        return original(self, table, segments, **settings | {"restarts": whole(segments)})

    patch.setattr(kind, "positions", one_run)


def positions_are_scaled(family: str, patch: Patch) -> None:
    """Rotary positions start again, and grow by two."""
    kind = type(family_named(family))
    original = kind.positions
    patch.setattr(kind, "positions", lambda self, *args, **named: 2 * original(self, *args, **named))
    patch.setattr(sys.modules["vlmpack.model.enable"], "check_rope_index", lambda model: None)  # it would notice


@replaces(QueryScale, "prepare")
def query_scale_of_the_row(original: Any, self: Any, setup: Any) -> torch.Tensor:
    return torch.zeros_like(original(self, setup))


@replaces(engine, "RowContext")
def one_mask(original: Any, **fields: Any) -> RowContext:
    """Text attention takes the whole row for one sample."""
    segments, entries = whole(fields["segments"]), dict(fields["entries"])
    if "per_sample" in entries:
        entries["per_sample"] = Buckets.cheapest(segments, call_cost=0)
    return original(**{**fields, "segments": segments, "entries": entries})


@replaces(engine, "RowContext")
def padding_for_tokens(original: Any, **fields: Any) -> RowContext:
    """Text attention takes padding for tokens of the last sample: under a causal mask no real token sees any of it."""
    *others, _ = fields["segments"].sample_lengths
    lengths = [*others, fields["segments"].total - sum(others)]
    return original(**{**fields, "segments": Segments.from_lengths(lengths)})


@replaces(engine, "backbone_inputs")
def a_cache(original: Any, *args: Any, **named: Any) -> dict[str, Any]:
    """The model fills a cache, as its configuration says."""
    return {**original(*args, **named), "use_cache": True}


def without(part: str) -> Break:
    """Attention ignores a part of its layers' pattern."""

    @replaces(SdpaSegments, "__call__")
    def call(original: Any, self: Any, *qkv: Any, pattern: Any, **settings: Any) -> torch.Tensor:
        return original(self, *qkv, pattern=replace(pattern, **{part: None}), **settings)

    return call


no_windows, no_sinks = without("window"), without("sinks")


@replaces(attention, "with_chunk")
def no_chunks(original: Any, masks: Any, pattern: Any, layer: Any) -> Any:
    """Layers with chunks attend to all of a sample."""
    return pattern


@replaces(attention.RowAttention, "spans_of")
def no_spans(original: Any, self: Any, window: Any) -> None:
    """Image tokens and prefixes see none of their later tokens."""


@replaces(Spans, "cut")
def wide_spans(original: Any, *args: Any) -> tuple[SpanCall, ...]:
    """Image tokens and prefixes see the samples before."""
    calls = original(*args)
    return tuple(SpanCall(places=tuple((a, b, 0, end) for a, b, _, end in call.places), window=None) for call in calls)


# ---------------------------------------------------------------------- towers


def one_segment_in(*, audio: bool) -> Break:
    """Blocks of one tower take all images, or all audio, of a call for one; the other tower stays as it is."""

    def break_it(family: str, patch: Patch) -> None:
        of_audio = _sizes_of_audio(patch)

        @replaces(VisionRow, "find")
        def found(original: Any, self: VisionRow, cu_seqlens: torch.Tensor, num_patches: int) -> Segments:
            segments = original(self, cu_seqlens, num_patches)
            return whole(segments) if (num_patches in of_audio) == audio else segments

        found(family, patch)

    return break_it


one_picture, one_audio = one_segment_in(audio=False), one_segment_in(audio=True)


def _sizes_of_audio(patch: Patch) -> set[int]:
    """Collect the numbers of frames that blocks of the audio tower get."""
    totals = set[int]()

    @replaces(vision, "audio_windows")
    def windows(original: Any, setup: Any) -> list[Segments]:
        found = original(setup)
        totals.update(segments.total for segments in found)
        return found

    windows("", patch)
    return totals


@replaces(audio, "_groups")
def audio_in_one_call(original: Any, setup: Any) -> list[list[int]]:
    """A tower that reads padding gets all audio of a row in one call."""
    return [sorted(at for group in original(setup) for at in group)]


def pixels_in_another_order(family: str, patch: Patch) -> None:
    """The last image's pixels come first."""
    axis = family_named(family).media["pixel_values"].axis

    @replaces(Vision, "inputs")
    def inputs(original: Any, *args: Any) -> Mapping[str, Any]:
        return {name: x.flip(axis) if name == "pixel_values" else x for name, x in original(*args).items()}

    inputs(family, patch)


def images_mixed(family: str, patch: Patch) -> None:
    """A tower whose images are rows of a batch mixes those of a row."""
    path = FAMILIES[family].vision_path
    assert path is not None
    in_rows: list[bool] = []

    @replaces(Vision, "prepare")
    def prepared(original: Any, *args: Any) -> VisionRow:
        in_rows.append(True)
        return original(*args)

    @replaces(type(tiny_model(family).get_submodule(path)), "forward")
    def mixing(original: Any, self: Any, pixel_values: torch.Tensor, *args: Any, **named: Any) -> Any:
        mixed = pixel_values + 0.3 * pixel_values.mean(0, keepdim=True) if in_rows else pixel_values
        return original(self, mixed, *args, **named)

    for each in (prepared, mixing):
        each(family, patch)


# ---------------------------------------------------------------------- packing, the head and the loss


@replaces(packing, "checked_metadata")
def offsets_ignored(original: Any, batch: PaddedBatch, *, keep_empty: bool) -> Any:
    """Samples of a left-padded batch are cut out of it where those of a right-padded one are."""
    found = original(batch, keep_empty=keep_empty)
    return found if batch.metadata is None else replace(found, offsets=(0,) * len(found.lengths))


@replaces(packing, "_kept")
def a_pad_for_a_token(original: Any, row: Any, segments: Segments) -> Any:
    """As many tokens as are real go through the model, but one of them is padding."""
    kept = original(row, segments)
    kept[row.segments.num_tokens - 1] = row.segments.padding_mask().nonzero()[0, 0]
    return kept


def first_labels_kept(family: str, patch: Patch) -> None:
    """The first token of a sample is a target of the last one before, and the host's count is not looked at."""

    @replaces(packing._Take, "targets")
    def targets(original: Any, take: Any, labels: torch.Tensor) -> torch.Tensor:
        out, segments = original(take, labels), take._segments
        if segments.has_padding:
            firsts = take(labels, -100)
            for (_, stop), (start, _) in pairwise(segments.spans):
                out[:, stop - 1] = firsts[:, start]
        return out

    @replaces(engine, "target_positions")
    def uncounted(original: Any, labels: torch.Tensor, count: Any) -> Any:
        return original(labels, None)

    for each in (targets, uncounted):
        each(family, patch)


@replaces(engine, "StepResult")
def loss_over_width(original: Any, **fields: Any) -> Any:
    """The loss is divided by the tokens of the row, padding included."""
    share = fields["num_targets"] / fields["segments"].total
    return original(**{**fields, "loss": fields["loss"] * share})


@replaces(head, "scores_by_chunk")
def last_chunk_lost(original: Any, *args: Any, chunk: int, **settings: Any) -> torch.Tensor:
    """The last targets of the head have no loss."""
    logprobs = original(*args, chunk=chunk, **settings)
    return logprobs * (torch.arange(len(logprobs)) < max(len(logprobs) // chunk, 1) * chunk)[:, None]


@replaces(result, "sums_by_sample")
def another_target_each(original: Any, *args: Any, **settings: Any) -> Any:
    """Each sample is said to have one target more."""
    sums, counts = original(*args, **settings)
    return sums, counts + 1


# ---------------------------------------------------------------------- recurrent states, n-grams, experts


class Uncut:
    """A row that goes through a recurrent layer as it is."""

    tokens, tree = 1, None

    def run(self, layer: Any, module: Any, part: Any, hidden: torch.Tensor) -> torch.Tensor:
        return layer(None, hidden, None)


@replaces(GatedDelta, "prepare")
def no_reset(original: Any, *args: Any) -> Uncut:
    """Gated delta layers run over the whole row."""
    return Uncut()


@replaces(ShortConv, "prepare")
def short_conv_runs_on(original: Any, *args: Any) -> Uncut:
    """Short convolutions run over the whole row."""
    return Uncut()


def conv_runs_on(family: str, patch: Patch) -> None:
    """Their recurrence starts anew in every sample, their convolution does not."""
    pieces = uncut_pieces(patch)

    @replaces(modeling_of(family), "torch_chunk_gated_delta_rule")
    def piecewise(original: Any, *qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **settings: Any) -> Any:
        cut = [x.split(pieces(x.shape[1]), dim=1) for x in (*qkv, g, beta)]
        found = [original(*part[:3], g=part[3], beta=part[4], **settings)[0] for part in zip(*cut, strict=True)]
        return torch.cat(found, dim=1), None

    piecewise(family, patch)


def state_runs_on(family: str, patch: Patch) -> None:
    """Their convolution starts anew in every sample, their recurrence does not."""
    pieces = uncut_pieces(patch)

    @replaces(modeling_of(family), "causal_conv1d_fn")
    def piecewise(original: Any, x: torch.Tensor, *args: Any, **settings: Any) -> torch.Tensor:
        return torch.cat([original(part, *args, **settings) for part in x.split(pieces(x.shape[2]), dim=2)], dim=2)

    piecewise(family, patch)


def modeling_of(family: str) -> Any:
    return import_module(FAMILIES[family].modeling)


def uncut_pieces(patch: Patch) -> Callable[[int], list[int]]:
    """Rows go through gated delta layers as they are; return a function that says, for a row of some width, the lengths
    of its samples and gaps. Anything else is in one piece."""
    rows: dict[int, list[int]] = {}

    def noted(self: GatedDelta, setup: Any) -> Uncut:
        segments = setup.row.segments
        rows[segments.total] = [n for n in segments.lengths if n]
        return Uncut()

    patch.setattr(GatedDelta, "prepare", noted)
    return lambda width: rows.get(width, [width])


def ngrams_of_the_row(family: str, patch: Patch) -> None:
    """N-grams reach into the sample before."""

    @replaces(sys.modules["vlmpack.model.mechanisms.per_sample"], "run_per_sample")
    def on_samples(original: Any, layer: Any, row: Any, module: Any, cache: Any, *parts: torch.Tensor) -> torch.Tensor:
        return original(layer, row, module, cache, *parts) if len(parts) != 2 else layer(None, *parts)

    on_samples(family, patch)


@replaces(Family, "expert_types_of")
def images_for_text(original: Any, *args: Any) -> dict[str, torch.Tensor]:
    """Experts of text get the tokens of images too."""
    is_row = sys._getframe(2).f_code is engine.backbone_inputs.__wrapped__.__code__  # pyright: ignore
    found = original(*args)
    return {name: torch.zeros_like(types) for name, types in found.items()} if is_row else found


@replaces(experts, "balance_of")
def another_balance(original: Any, *args: Any, **settings: Any) -> torch.Tensor:
    """The load-balancing loss is a tenth too large."""
    return 1.1 * original(*args, **settings)


# ---------------------------------------------------------------------- which family has what


class Breakage(NamedTuple):
    """One mechanism, broken in packed rows only."""

    breaks: Break
    cause: str
    """What the probe has to name, and nothing else."""
    has: Callable[[Family], bool] = lambda family: True
    """Return whether a family has the mechanism."""

    @property
    def causes(self) -> tuple[str]:
        return (self.cause,)


WINDOWS = (
    *("cohere2_vision", "aya_vision", "gemma3", "gemma4", "gemma4_unified", "paligemma"),
    *("mistral", "gemma2", "gemma3_text", "phi3", "olmo3", "cohere2", "gpt_oss"),
)
"""Families with windows that samples of a probe pass, in their tiny configurations."""


def _has_bounded_tower(family: Family) -> bool:
    return family.has_vision and (family.has_grids or family.tile_boundaries is not None)


def _mechanism(name: str) -> Callable[[Family], bool]:
    return lambda family: family.has(name)


def _has_vision(family: Family) -> bool:
    return family.has_vision


def _sees_later_tokens(family: Family) -> bool:
    return family.bidirectional is not None


BREAKAGES: dict[str, Breakage] = {
    "packing": Breakage(offsets_ignored, "packing"),
    "pixels": Breakage(pixels_in_another_order, "packing", _has_vision),
    "positions run on": Breakage(positions_run_on, "positions"),
    "positions' pace": Breakage(positions_are_scaled, "positions"),
    "query scale": Breakage(query_scale_of_the_row, "positions", _mechanism("query_scale")),
    "mask": Breakage(one_mask, "mask"),
    "windows": Breakage(no_windows, "mask", lambda family: family.model_type in WINDOWS),
    "chunks": Breakage(no_chunks, "mask", _mechanism("query_scale")),
    "spans": Breakage(no_spans, "mask", _sees_later_tokens),
    "wide spans": Breakage(wide_spans, "mask", _sees_later_tokens),
    "sinks": Breakage(no_sinks, "mask", lambda family: family.model_type == "gpt_oss"),
    "cache": Breakage(a_cache, "cache"),
    "convolution": Breakage(conv_runs_on, "recurrent state", _mechanism("gated_delta")),
    "recurrence": Breakage(state_runs_on, "recurrent state", _mechanism("gated_delta")),
    "gated delta layers": Breakage(no_reset, "recurrent state", _mechanism("gated_delta")),
    "short convolutions": Breakage(short_conv_runs_on, "recurrent state", _mechanism("short_conv")),
    "n-grams": Breakage(ngrams_of_the_row, "unknown", _mechanism("per_sample")),
    # a family with a column of prefixes refuses this by itself
    "a pad for a token": Breakage(a_pad_for_a_token, "packing", lambda family: not family.token_columns),
    "kinds of tokens": Breakage(images_for_text, "router", lambda family: family.expert_types is not None),
    "router losses": Breakage(another_balance, "router", lambda family: family.has("experts") and has_balance(family)),
    "images": Breakage(one_picture, "vision", _has_bounded_tower),
    "images in a batch": Breakage(images_mixed, "vision", lambda f: f.has_vision and not _has_bounded_tower(f)),
    "audio": Breakage(one_audio, "audio", lambda family: family.has_audio),
    "padding of audio": Breakage(audio_in_one_call, "audio", lambda f: f.audio is not None and f.audio.reads_padding),
    "head": Breakage(last_chunk_lost, "head"),
    "targets": Breakage(first_labels_kept, "loss count"),
    "divisor": Breakage(loss_over_width, "loss count"),
    "sample results": Breakage(another_target_each, "sample results"),
}
"""By name, in the order of the mechanisms in the README of `vlmpack/probing`."""
