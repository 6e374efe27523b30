"""The ways of attention that are compared compute the same, and what cannot be measured is listed with its reason."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases.attention import (
    ORACLE,
    AttentionInputs,
    AttentionShapes,
    Site,
    check_same,
    dense_way,
    measure_attention,
    packed_way,
    padded_way,
)
from benchmarks.figures import BenchSettings, Figure, Skipped
from vlmpack.errors import VlmpackError

QUICK = BenchSettings(seconds=0.0)
LANGUAGE = Site(name="language", lengths=(7, 3, 5), heads=6, kv_heads=2, head_dim=8, causal=True)
VISION = Site(name="vision", lengths=(4, 9), heads=3, kv_heads=3, head_dim=8, causal=False)


def inputs(site: Site) -> AttentionInputs:
    return AttentionInputs.of(site, QUICK, torch.float32)


@pytest.mark.parametrize("site", [LANGUAGE, VISION])
def test_every_way_computes_the_same(site: Site) -> None:
    truth = packed_way(inputs(site), ORACLE)()
    for way in (packed_way(inputs(site), "sdpa_segments"), padded_way(inputs(site)), dense_way(inputs(site))):
        torch.testing.assert_close(way(), truth)


def test_ways_that_differ_are_not_timed() -> None:
    truth = packed_way(inputs(LANGUAGE), ORACLE)()
    with pytest.raises(VlmpackError, match="mine differs from eager_mask by"):
        check_same({ORACLE: truth, "mine": truth + 1})
    with pytest.raises(VlmpackError, match="differs"):
        check_same({ORACLE: truth, "mine": truth * torch.nan})


@pytest.mark.parametrize(("site", "pairs"), [(LANGUAGE, 28 + 6 + 15), (VISION, 16 + 81)])
def test_the_ideal_counts_the_pairs_that_are_needed(site: Site, pairs: int) -> None:
    padded = len(site.lengths) * max(site.lengths) ** 2
    assert inputs(site).ideal == padded / pairs


def test_back_ends_that_cannot_serve_here_are_listed_with_their_reasons() -> None:
    found = measure_attention(QUICK, AttentionShapes(sites=(LANGUAGE,)))
    skipped = {one.name: one.why for one in found if isinstance(one, Skipped)}
    assert set(skipped) == {"language, torch_varlen", "language, flash_attn"}
    assert all("CUDA only" in why for why in skipped.values())
    assert not any(ORACLE in one.name for one in found if isinstance(one, Figure))
