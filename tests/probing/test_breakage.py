"""Each mechanism broken on purpose, one at a time: the probe must name it, and nothing that is not at fault.

`healthy` is the control: the same model with everything in place.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from breakages import (
    Patch,
    a_cache,
    a_pad_for_a_token,
    conv_runs_on,
    first_labels_kept,
    loss_over_width,
    no_reset,
    one_mask,
    one_picture,
    pads_to_experts,
    positions_are_scaled,
    positions_run_on,
    slots_for_samples,
    state_runs_on,
)
from tiers import full, only_exhaustive, tiers

from vlmpack.attention.patterns import Pattern
from vlmpack.families.registry import FAMILIES
from vlmpack.model import engine
from vlmpack.model.mechanisms import attention
from vlmpack.model.row import RowContext
from vlmpack.probing import Report, probe
from vlmpack.testing import tiny_model

pytestmark = pytest.mark.usefixtures("shared_references")

EVERY = tiers(sorted(FAMILIES), ["qwen3_next", "qwen3_vl"], exhaustive=["qwen2_vl", "qwen3_vl_moe", "qwen3_5"])
"""In the short tier a text model and one with a tower; the probe is the same for families of the same mechanisms."""
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


@pytest.mark.parametrize("family", ["qwen3_next", *full("qwen2_5_vl", "qwen3"), *only_exhaustive("qwen4_exp")])
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
    report = probe(with_mixing("model.language_model.norm", "qwen3_vl"), plain=False, share_prefixes=False)
    assert (report.verdict, report.causes) == ("leaks", ("unknown",))


def with_mixing(name: str, family: str) -> Any:
    """A model in which a module mixes the tokens of its output."""
    model = tiny_model(family)
    module = model.get_submodule(name)
    module.register_forward_hook(lambda module, args, output: output + 0.1 * output.mean(1, keepdim=True))
    return model


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.up_proj",
        *full(
            "model.embed_tokens",
            "model.layers.0.input_layernorm",
            "model.layers.1.self_attn.o_proj",
            "model.norm",
            "lm_head",
        ),
    ],
)
def test_the_module_is_named_in_whose_output_a_leak_is_first_seen(name: str) -> None:
    report = probe(with_mixing(name, "qwen3"), plain=False, share_prefixes=False)
    leaks = [check for check in report.checks if check.part == "isolation" and check.is_bad]
    assert len(leaks) > 5
    assert all(check.detail.endswith(f" of their size, first in the output of {name}") for check in leaks)


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
