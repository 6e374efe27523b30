"""Each mechanism broken on purpose, one at a time: the probe must name it, and nothing that is not at fault.

`healthy` is the control: the same model with everything in place.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch
from tiers import full, only_exhaustive, tiers

from vlmpack.attention import Pattern
from vlmpack.families import FAMILIES, family_named
from vlmpack.layout import Buckets, Segments, SlotRule
from vlmpack.model import engine
from vlmpack.model.mechanisms import attention, experts
from vlmpack.model.mechanisms.gated_delta import GatedDelta
from vlmpack.model.mechanisms.vision import VisionRow
from vlmpack.model.row import RowContext
from vlmpack.probing import Report, probe
from vlmpack.testing import tiny_model

pytestmark = pytest.mark.usefixtures("shared_references")
Patch = pytest.MonkeyPatch

KINDS = ["qwen2_5_vl", "qwen3_5_moe", "qwen3_next", "qwen3_vl"]
EVERY = tiers(sorted(FAMILIES), KINDS, exhaustive=["qwen2_vl", "qwen3_vl_moe", "qwen3_5"])
"""In the short tier every mechanism; the probe is the same for families that have the same ones."""
SEEDS = {"gpt_oss": 1, "llama4_text": 1}
"""Of models; with seed 0 rounding under autocast sends a token to another expert."""
SOME = ["qwen3", *full("qwen2_5_vl", "qwen3_5_moe")]
"""Where a mechanism is the same for every family."""
VISION = ["qwen2_5_vl", *full("qwen3_vl"), *only_exhaustive("qwen4_exp")]
"""Windows, features for deeper layers, neither."""
EXPERTS = ["qwen3_next", *full("qwen3_vl_moe")]
"""Alone, and with a shared one."""
DELTA = ["qwen3_next", *full("qwen3_5"), *only_exhaustive("qwen4_exp")]
"""Beside dense attention of a text model and of one with a tower, and beside sparse attention."""


def probed(family: str) -> Report:
    return probe(tiny_model(family, seed=SEEDS.get(family, 0)), plain=False, share_prefixes=False)


def bad(report: Report, part: str) -> list[str]:
    return [check.name for check in report.checks if check.part == part and check.is_bad]


# ---------------------------------------------------------------------- one mechanism each


def positions_run_on(family: str, patch: Patch) -> None:
    """Rotary positions do not start again in the next sample."""
    kind = type(family_named(family))
    honest = kind.positions

    def one_run(self: Any, types: Any, segments: Segments, **metadata: Any) -> torch.Tensor:
        return honest(self, types, Segments.from_lengths([segments.total]), **metadata)

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


def slots_for_samples(family: str, patch: Patch) -> None:
    """Text attention takes padding for real tokens: under a causal mask no real token sees any of it."""

    def slots(**metadata: Any) -> RowContext:
        segments: Segments = metadata["segments"]
        whole = SlotRule(pad_to=segments.total)
        return RowContext(**{**metadata, "segments": Segments.from_lengths(segments.slots, whole)})

    patch.setattr(engine, "RowContext", slots)


def a_cache(family: str, patch: Patch) -> None:
    """The model fills a cache, as its configuration says."""
    honest = engine.backbone_inputs
    patch.setattr(engine, "backbone_inputs", lambda *args, **metadata: {**honest(*args, **metadata), "use_cache": True})


def one_picture(family: str, patch: Patch) -> None:
    """The vision tower takes all images for one."""

    def one_segment(self: VisionRow, cu_seqlens: torch.Tensor, num_patches: int) -> Segments:
        return Segments.from_lengths([num_patches])

    patch.setattr(VisionRow, "find", one_segment)


def pads_to_experts(family: str, patch: Patch) -> None:
    """Padding is routed and counted."""
    patch.setattr(experts.Gate, "open", lambda gate, mixer, args, kwargs: None)


def a_pad_for_a_token(family: str, patch: Patch) -> None:
    """As many tokens as are real go to experts, but one of them is padding."""
    honest = experts.real_tokens

    def exchanged(segments: Segments, device: torch.device) -> Any:
        real = honest(segments, device)
        if real is None:  # no padding to be had
            return None
        padding = segments.padding_mask("cpu").nonzero()[0]
        return torch.cat([real[:-1], padding])

    patch.setattr(experts, "real_tokens", exchanged)


def first_labels_kept(family: str, patch: Patch) -> None:
    """The first token of a sample is learnt from the last one before, and the host's count is not looked at."""
    packing = sys.modules["vlmpack.layout.packing"]
    shift = packing.shift_labels

    def shifted(labels: torch.Tensor, segments: Segments) -> torch.Tensor:
        out = shift(labels, segments)
        for (_, stop), (start, _) in pairwise(segments.spans):
            out[:, stop - 1] = labels[:, start]
        return out

    honest = engine.target_positions
    patch.setattr(packing, "shift_labels", shifted)
    patch.setattr(engine, "target_positions", lambda labels, count: honest(labels, None))


def loss_over_width(family: str, patch: Patch) -> None:
    """The loss is divided by the tokens of the row, pads included."""
    honest = engine.StepResult

    def diluted(**metadata: Any) -> Any:
        share = metadata["num_targets"] / metadata["segments"].total
        return honest(**{**metadata, "loss": metadata["loss"] * share})

    patch.setattr(engine, "StepResult", diluted)


class Uncut:
    """A row that goes through a gated delta layer as it is."""

    tokens = 1

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
        rows[segments.total] = [b - a for a, b in pairwise(segments.kernel)]
        return Uncut()

    patch.setattr(GatedDelta, "prepare", noted)
    return lambda width: rows.get(width, [width])


# ---------------------------------------------------------------------- what the probe says


@pytest.mark.parametrize("family", EVERY)
def test_healthy(family: str) -> None:
    report = probed(family)
    assert report.verdict == "exact", report
    assert report.causes == ()
    assert len([check for check in report.checks if check.finding == "ok"]) > 20


@pytest.mark.parametrize("family", full("mistral", "gemma2"))
def test_a_window_that_is_dropped(family: str, monkeypatch: Patch) -> None:
    own = attention.run_on_row

    def without(*call: Any, pattern: Pattern, **settings: Any) -> Any:
        return own(*call, pattern=replace(pattern, window=None), **{**settings, "module": None})

    monkeypatch.setattr(attention, "run_on_row", without)
    report = probed(family)
    assert (report.verdict, report.causes) == ("differs", ("mask",))
    assert bad(report, "mechanism") == ["mask"]


@pytest.mark.parametrize("family", ["qwen3_5_moe", *full("qwen2_5_vl", "qwen3"), *only_exhaustive("qwen4_exp")])
def test_a_mask_that_is_dropped(family: str, monkeypatch: Patch) -> None:
    one_mask(family, monkeypatch)
    report = probed(family)
    assert (report.verdict, report.causes) == ("leaks", ("mask",))
    assert {"row: logits", "row: loss", "padded: logits", "padded: loss"} <= set(bad(report, "equality"))
    assert len(bad(report, "isolation")) > 1
    assert bad(report, "mechanism") == ["mask"]
    assert bad(report, "work") == ["attended pairs"]


@pytest.mark.parametrize("family", VISION)
def test_images_that_see_each_other(family: str, monkeypatch: Patch) -> None:
    one_picture(family, monkeypatch)
    report = probed(family)
    assert (report.verdict, report.causes) == ("leaks", ("vision",))
    assert {"row: logits", "row: gradient of visual.patch_embed.proj"} <= set(bad(report, "equality"))
    with_images = ["change sample 0 (image)", "change sample 1 (image)", "change sample 4 (2 images)"]
    assert [name for name in bad(report, "isolation") if "sample" in name] == with_images


@pytest.mark.parametrize("family", EXPERTS)
def test_padding_that_reaches_experts(family: str, monkeypatch: Patch) -> None:
    """No logit changes: a comparison of outputs alone would never see it."""
    pads_to_experts(family, monkeypatch)
    report = probed(family)
    assert report.causes == ("router",)
    assert bad(report, "mechanism") == ["router"]
    assert bad(report, "isolation") == []
    (refused,) = [check for check in report.checks if check.part == "equality" and check.is_bad]
    assert re.search(r"routers saw \[\d+.*\] tokens of a row with \d+ real ones", refused.detail), refused


@pytest.mark.parametrize("family", EXPERTS)
def test_padding_that_takes_the_place_of_a_token(family: str, monkeypatch: Patch) -> None:
    a_pad_for_a_token(family, monkeypatch)
    report = probed(family)
    assert (report.verdict, report.causes) == ("differs", ("router",))
    assert bad(report, "mechanism") == ["router"]


@pytest.mark.parametrize("family", SOME)
def test_first_labels_that_are_kept(family: str, monkeypatch: Patch) -> None:
    first_labels_kept(family, monkeypatch)
    report = probed(family)
    assert (report.verdict, report.causes) == ("differs", ("loss count",))
    assert {"gaps: loss", "padded: loss"} <= set(bad(report, "equality"))
    assert not {"gaps: logits", "padded: logits"} & set(bad(report, "equality"))


@pytest.mark.parametrize("family", SOME)
def test_a_loss_that_is_divided_by_the_width(family: str, monkeypatch: Patch) -> None:
    loss_over_width(family, monkeypatch)
    report = probed(family)
    assert (report.verdict, report.causes) == ("differs", ("loss count",))
    assert {"row: loss", "padded: loss"} <= set(bad(report, "equality"))


@pytest.mark.parametrize("family", SOME)
def test_positions_at_the_wrong_pace(family: str, monkeypatch: Patch) -> None:
    positions_are_scaled(family, monkeypatch)
    report = probed(family)
    assert (report.verdict, report.causes) == ("differs", ("positions",))
    assert {"row: logits", "padded: logits"} <= set(bad(report, "equality"))
    assert bad(report, "isolation") == []


@pytest.mark.parametrize("family", SOME)
def test_positions_that_run_on(family: str, monkeypatch: Patch) -> None:
    """Rotary attention is relative, so that the logits are the same up to rounding: only the positions tell."""
    positions_run_on(family, monkeypatch)
    report = probed(family)
    assert (report.verdict, report.causes) == ("differs", ("positions",))
    assert bad(report, "mechanism") == ["positions"]


def test_a_cache_that_is_filled(monkeypatch: Patch) -> None:
    a_cache("qwen3_vl", monkeypatch)
    report = probed("qwen3_vl")
    assert (report.verdict, report.causes) == ("differs", ("cache",))
    assert bad(report, "isolation") == bad(report, "equality") == []


@pytest.mark.parametrize("family", DELTA)
def test_gated_delta_layers_without_any_cut(family: str, monkeypatch: Patch) -> None:
    no_reset(family, monkeypatch)
    report = probed(family)
    assert (report.verdict, report.causes) == ("leaks", ("conv taps", "recurrent state"))
    assert {"row: logits", "row: loss"} <= set(bad(report, "equality"))


@pytest.mark.parametrize("family", DELTA)
def test_a_convolution_that_runs_on(family: str, monkeypatch: Patch) -> None:
    conv_runs_on(family, monkeypatch)
    report = probed(family)
    assert (report.verdict, report.causes) == ("leaks", ("conv taps",))
    assert "row: logits" in bad(report, "equality")


@pytest.mark.parametrize("family", DELTA)
def test_a_state_that_is_not_reset(family: str, monkeypatch: Patch) -> None:
    state_runs_on(family, monkeypatch)
    report = probed(family)
    assert (report.verdict, report.causes) == ("leaks", ("recurrent state",))
    assert "row: logits" in bad(report, "equality")


def test_padding_taken_for_real_tokens_shows_in_the_work_alone(monkeypatch: Patch) -> None:
    slots_for_samples("qwen3_vl", monkeypatch)
    report = probed("qwen3_vl")
    assert bad(report, "isolation") == bad(report, "equality") == bad(report, "mechanism") == []
    assert bad(report, "work") == ["attended pairs"]
    assert report.causes == ("mask",)


def test_a_leak_that_no_mechanism_shows_is_unknown() -> None:
    model = tiny_model("qwen3_vl")
    norm = model.model.language_model.norm
    norm.register_forward_hook(lambda module, args, output: output + 0.1 * output.mean(1, keepdim=True))
    report = probe(model, plain=False, share_prefixes=False)
    assert (report.verdict, report.causes) == ("leaks", ("unknown",))


def test_two_faults_are_both_named(monkeypatch: Patch) -> None:
    one_mask("qwen2_5_vl", monkeypatch)
    one_picture("qwen2_5_vl", monkeypatch)
    assert probed("qwen2_5_vl").causes == ("mask", "vision")


def test_what_raises_is_a_finding(monkeypatch: Patch) -> None:
    def broken(**metadata: Any) -> RowContext:
        raise TypeError("this transformers hands over something else")

    monkeypatch.setattr(engine, "RowContext", broken)
    report = probed("qwen3_vl")
    assert report.verdict == "fails"
    failed = [check for check in report.checks if check.finding == "fails"]
    assert failed
    assert all(check.detail == "TypeError: this transformers hands over something else" for check in failed)
