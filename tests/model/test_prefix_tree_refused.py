"""Rows with a prefix tree that cannot be right are refused, with the remedy."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from trees import rollouts, samples_of, shared

from vlmpack.context_parallel import Parallel
from vlmpack.context_parallel.collectives import Collectives
from vlmpack.errors import LayoutError
from vlmpack.layout import unshare
from vlmpack.layout.media import MediaTable
from vlmpack.model import PackedStep, enable_packing
from vlmpack.model.row import RowOverRanks
from vlmpack.testing import tiny_model


def small(family="qwen3_vl", **sizes):
    return tiny_model(family, seed=3, **{"layers": 2, "vision_depth": 1, **sizes})


def row_of(family="qwen3_vl"):
    return shared(samples_of(small(family).config, rollouts(4, 6, images=2)))


def with_labels(row, *, at, label):
    labels = row.shift_labels.clone()
    labels[0, at] = label
    return replace(row, shift_labels=labels, metadata=replace(row.metadata, num_targets=None))


def another_token(row):
    ids = row.input_ids.clone()
    ids[0, -8] += 1  # in the prefix of the second sample
    return replace(row, input_ids=ids, shift_labels=None)


def another_grid(row):
    *others, last = row.metadata.media.media
    t, h, w = last.grid
    table = MediaTable(media=(*others, replace(last, grid=(t, w, h))))
    return replace(row, metadata=replace(row.metadata, media=table))


REFUSED = {
    "another label": (lambda row: with_labels(row, at=row.segments.lengths[0] - 2, label=9), "is not the next token"),
    "a label behind the last token": (
        lambda row: with_labels(row, at=row.segments.lengths[0] - 1, label=9),
        "is not the next token",
    ),
    "a token changed": (
        another_token,
        r"place \d+ of the row has .*: input_ids of tokens that the prefix tree says are shared differ.*unshare\(row\)",
    ),
    "a grid changed": (another_grid, "rotary positions of tokens that the prefix tree says are shared differ"),
    "media of every sample": (
        lambda row: replace(row, media=unshare(row).media),
        "has 2 media but image_grid",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_a_row_that_was_changed_is_refused(change, message):
    row, step = row_of(), PackedStep(small())
    step(row)
    with pytest.raises(LayoutError, match=message):
        step(change(row))


def test_restarts_inside_samples_are_refused():
    row, model = row_of(), enable_packing(small())
    restarts = sorted({*row.segments.real, row.segments.lengths[0] - 2})
    with pytest.raises(LayoutError, match=r"rope_cu_seqlens .*unshare\(row\)"):
        model(**row.to_hf(), rope_cu_seqlens=restarts)
    model(**unshare(row).to_hf(), rope_cu_seqlens=restarts)


def test_ranks_that_share_a_row_refuse_layers_that_take_whole_samples(monkeypatch):
    row, model = row_of("qwen3_vl_moe"), small("qwen3_vl_moe")
    step = PackedStep(model, parallel=Parallel())
    alone = step(row).loss
    assert torch.isclose(alone, PackedStep(small("qwen3_vl_moe"))(row).loss, rtol=1e-6), "one rank takes it"
    monkeypatch.setattr(Parallel, "ranks", 2)
    with pytest.raises(LayoutError, match=r"2 ranks share a row that has a prefix tree.*experts.*unshare\(row\)"):
        step(row)


def test_ranks_that_share_a_row_divide_the_heads():
    ranks = SimpleNamespace(ranks=3, collectives=Collectives())
    with pytest.raises(LayoutError, match=r"3 ranks share a row .* and do not divide the 4 heads"):
        RowOverRanks(row_of(), ranks).attend(None, (torch.ones(1, 4, 8),) * 3, None)
