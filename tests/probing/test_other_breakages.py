"""One line of any mechanism broken: the probe finds it, and names the mechanism where one shows it by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiers import tiers

from vlmpack.attention.backends import SdpaSegments
from vlmpack.families import family_named
from vlmpack.families.media import MediaItems
from vlmpack.layout import PaddedBatch, Segments
from vlmpack.model import engine, head
from vlmpack.model.mechanisms import experts, per_sample
from vlmpack.model.mechanisms.gated_delta import GatedDelta
from vlmpack.model.mechanisms.recurrent_rows import Buckets
from vlmpack.model.mechanisms.vision import Vision, VisionRow
from vlmpack.model.result import StepResult
from vlmpack.probing import probe
from vlmpack.testing import tiny_model

pytestmark = pytest.mark.usefixtures("shared_references")
Patch = pytest.MonkeyPatch
Break = Callable[[Any, Patch], None]
packing = sys.modules["vlmpack.layout.packing"]


def wrapped(owner: Any, name: str, change: Callable[..., Any]) -> Break:
    """`owner.name(...)` gives `change(what it gave, ...)`."""

    def break_it(model: Any, patch: Patch) -> None:
        honest = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **metadata: change(honest(*args, **metadata), *args, **metadata))

    return break_it


def of_family(family: str, name: str, change: Callable[..., Any]) -> Break:
    return wrapped(type(family_named(family)), name, change)


def attended(**settings: Callable[[Any], Any]) -> Break:
    """The attention back-end is called with other settings."""

    def break_it(model: Any, patch: Patch) -> None:
        honest = SdpaSegments.__call__

        def call(self: Any, *qkv: Any, causal: bool, **metadata: Any) -> torch.Tensor:
            if not causal:
                return honest(self, *qkv, causal=causal, **metadata)
            given = {"causal": causal, **metadata}
            return honest(self, *qkv, **{**given, **{name: change(given[name]) for name, change in settings.items()}})

        patch.setattr(SdpaSegments, "__call__", call)

    return break_it


def last_two_together(segments: Segments) -> Segments:
    *lengths, one, other = segments.lengths
    if segments.has_gaps:
        return segments
    return Segments.from_lengths([*lengths, one + other])


def without_last_chunk(logprobs: torch.Tensor, *args: Any, chunk: int) -> torch.Tensor:
    keep = torch.arange(len(logprobs)) < max(len(logprobs) // chunk, 1) * chunk
    return logprobs * keep


def shared_heads(model: Any, patch: Patch) -> None:
    """Queries find the keys of another head."""
    honest = SdpaSegments.__call__

    def call(self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, **metadata: Any) -> Any:
        return honest(self, q, k.roll(1, 1) if metadata["causal"] else k, v, segments, **metadata)

    patch.setattr(SdpaSegments, "__call__", call)


def no_offsets_in_metadata(model: Any, patch: Patch) -> None:
    honest = packing._spans

    def spans(batch: PaddedBatch) -> Any:
        found = honest(batch)
        return found if batch.metadata is None else replace(found, offsets=(0,) * len(found.lengths))

    patch.setattr(packing, "_spans", spans)


def small_leak(model: Any, patch: Patch) -> None:
    model.model.norm.register_forward_hook(lambda module, args, output: output + 1e-4 * output.mean(1, keepdim=True))


def ngrams_of_the_row(model: Any, patch: Patch) -> None:
    honest = per_sample.run_on_row

    def on_samples(layer: Any, row: Any, hidden: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
        return honest(layer, row, hidden, *beside) if len(beside) != 1 else layer(hidden, *beside)

    patch.setattr(per_sample, "run_on_row", on_samples)


SWAPPED = torch.tensor([0, 2, 1, 3])

BROKEN: dict[str, tuple[str, tuple[str, ...], Break]] = {
    "positions start at 1": ("qwen3", ("positions",), wrapped(Segments, "_position", lambda x, self: x + 1)),
    "height for width": ("qwen3_vl", ("positions",), wrapped(MediaItems, "table", lambda x, self: x[SWAPPED])),
    "seconds of videos ignored": (
        "qwen2_5_vl",
        ("positions",),
        of_family("qwen2_5_vl", "_videos", lambda x, *metadata: replace(x, interval=x.interval / 2)),
    ),
    "time for height": (
        "qwen2_vl",
        ("positions",),
        of_family("qwen2_vl", "rotary_ids", lambda x, *metadata: x.flip(0)),
    ),
    "windows of two sizes exchanged": (
        "qwen2_5_vl",
        ("vision",),
        wrapped(VisionRow, "find", lambda x, *metadata: Segments.from_lengths(x.lengths[::-1])),
    ),
    "patches of all frames": (
        "qwen2_vl",
        ("vision",),
        wrapped(VisionRow, "find", lambda x, *metadata: last_two_together(x)),
    ),
    "another scale": ("qwen3", ("unknown",), attended(scale=lambda x: 1.001 * x)),
    "not causal": ("qwen3", ("mask",), attended(causal=lambda x: False)),
    "keys of another head": ("qwen3", ("unknown",), shared_heads),
    "the last two samples are one to delta layers": (
        "qwen3_next",
        ("conv taps", "recurrent state"),
        lambda model, patch: patch.setattr(
            GatedDelta,
            "prepare",
            lambda self, setup: Buckets.cheapest(last_two_together(setup.row.segments), call_cost=16),
        ),
    ),
    "samples of a bucket exchanged": (
        "qwen3_next",
        ("conv taps", "recurrent state"),
        wrapped(Buckets, "_order", lambda x, self: x if self.segments.has_gaps else x[::-1].copy()),
    ),
    "a real token less for experts": (
        "qwen3_next",
        ("router",),
        wrapped(experts, "real_tokens", lambda x, *metadata: None if x is None else x[:-1]),
    ),
    "padding is computed by experts": (
        "qwen3_next",
        ("router",),
        wrapped(experts.Gate, "restore", lambda x, *metadata: None if x is None else x + 1e-3),
    ),
    "pixels in another order": (
        "qwen3_vl",
        ("packing",),
        wrapped(
            Vision,
            "inputs",
            lambda x, *metadata: {name: y.flip(0) if name == "pixel_values" else y for name, y in x.items()},
        ),
    ),
    "targets across samples": (
        "qwen3",
        ("loss count",),
        lambda model, patch: patch.setattr(
            packing._Take, "targets", lambda self, labels: self(labels, -100).roll(-1, -1)
        ),
    ),
    "the last chunk is not learnt": ("qwen3", ("head",), wrapped(head, "target_logprobs", without_last_chunk)),
    "one target too many in each sample": (
        "qwen3",
        ("sample results",),
        wrapped(engine, "sums_by_sample", lambda x, *metadata: (x[0], x[1] + 1)),
    ),
    "log-probabilities one place off": (
        "qwen3",
        ("sample results",),
        lambda model, patch: patch.setattr(
            StepResult, "logprobs", property(lambda self, honest=StepResult.logprobs: honest.fget(self).roll(1, 1))
        ),
    ),
    "a loss without gradient": (
        "qwen3",
        ("unknown",),
        wrapped(head, "target_logprobs", lambda x, *a, **f: x.detach() + 0.5 * (x - x.detach())),
    ),
    "offsets of the host metadata ignored": ("qwen3", ("packing",), no_offsets_in_metadata),
    "a leak of a ten-thousandth": ("qwen3", ("unknown",), small_leak),
    "n-grams across samples": ("qwen4_exp", ("unknown",), ngrams_of_the_row),
}


ALIKE = (
    "height for width",
    "windows of two sizes exchanged",
    "patches of all frames",
    "another scale",
    "samples of a bucket exchanged",
    "one target too many in each sample",
    "log-probabilities one place off",
    "n-grams across samples",
)
"""Others show the same check."""


UNLIKE = [what for what in BROKEN if what not in ALIKE]


@pytest.mark.parametrize("what", tiers(BROKEN, UNLIKE[::4], exhaustive=ALIKE))
def test_any_line_that_is_broken_is_found(what: str, monkeypatch: Patch) -> None:
    family, causes, break_it = BROKEN[what]
    model = tiny_model(family)
    break_it(model, monkeypatch)
    monkeypatch.setattr(sys.modules["vlmpack.model.enable"], "check_rope_index", lambda model: None)  # it would notice
    report = probe(model, plain=False, share_prefixes=False)
    assert report.verdict in ("leaks", "differs", "fails"), report
    assert report.causes == causes, report
