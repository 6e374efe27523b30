"""What plain transformers makes of the same row, by the same names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiers import full, tiers

from vlmpack.families.registry import FAMILIES
from vlmpack.probing import probe, small_copy
from vlmpack.probing.report import Baseline
from vlmpack.testing import tiny_config, tiny_model

ROWS = {True: ["one row, [3, 1, T] positions", "one row, [4, 1, T] positions"], False: ["one row, [1, T] positions"]}


def plain_of(model: torch.nn.Module) -> dict[str, Baseline]:
    return {one.name: one for one in probe(model, share_prefixes=False).plain}


@pytest.mark.parametrize(
    "family",
    tiers(
        sorted(FAMILIES),
        ["qwen3"],
        exhaustive=["qwen4_exp", "qwen3_5_moe", "qwen2_vl", "qwen3_vl_moe", "qwen3_next"],
    ),
)
def test_a_row_by_hand_leaks_and_the_padded_batch_does_not(family: str) -> None:
    plain = plain_of(tiny_model(family, seed=1))
    rows = ROWS[FAMILIES[family].has_vision]
    assert list(plain) == [*rows, "a padded batch, 2D mask"]
    delta = ("conv taps", "recurrent state") if FAMILIES[family].has("gated_delta") else ()
    delta = ("conv taps",) if FAMILIES[family].has("short_conv") else delta
    for name in rows:
        # eager attention alone, all that gpt-oss has, never looks for packed positions
        first = "mask" if "3" in name or family == "gpt_oss" else "cache"
        assert (plain[name].verdict, plain[name].causes) == ("leaks", (first, *delta, "loss count"))
        assert plain[name].leak is not None
        assert plain[name].leak > 0.1
    padded = plain["a padded batch, 2D mask"]
    assert (padded.verdict, padded.causes) == ("exact", ())


@pytest.mark.parametrize("family", full("qwen2_5_vl", "qwen3"))
def test_without_a_cache_four_rows_keep_samples_apart(family: str) -> None:
    """Not in gated delta layers; and the first label of each sample is learnt from the sample before all the same."""
    model = tiny_model(family)
    model.config.get_text_config().use_cache = False
    plain = plain_of(model)
    row = plain[ROWS[FAMILIES[family].has_vision][-1]]
    assert (row.verdict, row.causes) == ("differs", ("loss count",))
    assert row.leak == 0


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_next", *full("qwen3_5")])
def test_gated_delta_layers_leak_without_a_cache_too(family: str) -> None:
    model = tiny_model(family)
    model.config.get_text_config().use_cache = False
    row = plain_of(model)[ROWS[FAMILIES[family].has_vision][-1]]
    assert (row.verdict, row.causes) == ("leaks", ("conv taps", "recurrent state", "loss count"))


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_next", *full("qwen2_5_vl", "qwen3_vl_moe")])
def test_leaks_show_at_a_models_own_initialisation_too(family: str, tmp_path: Path) -> None:
    """Weights of 0.02 leak little; the mechanisms by themselves tell."""
    tiny_config(family).save_pretrained(tmp_path)
    row = plain_of(small_copy(str(tmp_path)))[ROWS[FAMILIES[family].has_vision][0]]
    delta = {"conv taps", "recurrent state"} if FAMILIES[family].has("gated_delta") else set()
    assert row.verdict == "leaks"
    assert set(row.causes) >= delta | ({"mask"} if FAMILIES[family].has_vision else {"cache"})
