"""The probe of a model with chunks, and with queries that are scaled by place, names what is wrong with either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import only_exhaustive
from transformers import AutoConfig

from vlmpack.families.registry import FAMILIES
from vlmpack.layout import PrefixTree
from vlmpack.model.mechanisms import attention
from vlmpack.model.mechanisms.llama4 import QueryScale
from vlmpack.probing import Report, probe, small_copy
from vlmpack.testing import tiny_model

pytestmark = [
    pytest.mark.full,
    pytest.mark.every_family,
    pytest.mark.skipif("llama4" not in FAMILIES, reason="this transformers has another Llama 4"),
]


def probed(family: str = "llama4_text", **settings: Any) -> Report:
    return probe(tiny_model(family, layers=2, seed=1), plain=False, **{"share_prefixes": False, **settings})


def worst(report: Report, name: str) -> tuple[str, str | None, str]:
    check = next(check for check in report.checks if check.part == "mechanism" and name in check.name and check.is_bad)
    return check.finding, check.cause, check.detail


def test_a_tiny_copy_has_chunks_and_steps_that_samples_of_a_probe_pass(tmp_path: Path) -> None:
    AutoConfig.for_model("llama4_text", num_hidden_layers=8, head_dim=16, vocab_size=997).save_pretrained(tmp_path)
    model = small_copy(str(tmp_path))
    chunked, scaled = (layer.self_attn for layer in model.model.layers)
    assert (chunked.use_rope, scaled.use_rope) == (1, 0)
    assert model.config.layer_types == ["chunked_attention", "full_attention"]
    assert (model.config.attention_chunk_size, scaled.floor_scale) == (8, 4)


@pytest.mark.parametrize("family", only_exhaustive("llama4_text", "llama4"))
def test_a_model_with_chunks_is_exact(family: str) -> None:
    report = probed(family, share_prefixes=family == "llama4_text")
    assert report.verdict == "exact", [check for check in report.checks if check.is_bad]


def test_chunks_that_are_dropped_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "with_chunk", lambda reaches, pattern, layer: pattern)
    finding, cause, detail = worst(probed(), "mask")
    assert (finding, cause) == ("differs", "mask")
    assert detail.startswith("layer 0: a sample's last token attends beyond its chunk of 7")


@pytest.mark.parametrize("shares", [False, *only_exhaustive(True)])
def test_factors_of_the_place_in_the_row_are_named(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = QueryScale.prepare

    def of_the_row(self: QueryScale, setup: Any) -> torch.Tensor:
        offsets = honest(self, setup)
        return offsets if isinstance(setup.row.tree, PrefixTree) != shares else torch.zeros_like(offsets)

    monkeypatch.setattr(QueryScale, "prepare", of_the_row)
    finding, cause, detail = worst(probed(share_prefixes=shares), "positions")
    assert (finding, cause) == ("differs", "positions")
    assert detail.startswith("layer 1: queries are scaled by other places than alone")
