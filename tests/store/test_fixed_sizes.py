"""Rows of one size: widths, boundaries and multiples, and what contradicts the plan."""

from __future__ import annotations

import pytest
import torch
from chats import chat, picture, processor_of
from store.stores import CAPACITY, packing, places, store, texts

from vlmpack.errors import ConfigError
from vlmpack.layout import SlotRule
from vlmpack.store import PackedDataset


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A store of texts whose rows are of unlike width and number of samples; slots are multiples of 8."""
    folder = tmp_path_factory.mktemp("kept")
    store(folder, texts(), packing(slots=SlotRule(multiple=8)))
    return folder


def rows_of(folder, **settings):
    dataset = PackedDataset(folder, processor_of(), **settings)
    return [dataset.row(at) for at in range(len(dataset))]


def test_rows_are_as_wide_as_their_slots_unless_asked_and_planned_so(kept):
    rows, dataset = rows_of(kept), PackedDataset(kept)
    assert {row.segments.total for row in rows} == {sum(row.segments.slots) for row in rows}
    assert len({row.segments.total for row in rows}) > 1  # the guard: there is something to make equal
    assert all(slot % 8 == 0 for row in rows for slot in row.segments.slots)
    assert max(row.segments.total for row in rows) <= CAPACITY
    tight = [sum(row.segments.lengths) for row in rows]
    assert dataset.plan.tokens.tolist() == [sum(dataset.segments(at).slots) for at in range(len(dataset))] != tight
    assert dataset.manifest.sizes.longest_row == max(dataset.plan.tokens)


def test_pad_to_max_length_makes_every_row_as_wide_as_the_capacity(kept):
    plain, fixed = rows_of(kept), rows_of(kept, pad_to_max_length=True)
    assert {row.input_ids.shape for row in fixed} == {(1, CAPACITY)}
    for own, padded in zip(plain, fixed, strict=True):
        width = own.segments.total
        assert torch.equal(padded.input_ids[:, :width], own.input_ids)
        assert padded.segments.slots == own.segments.slots
        assert bool(padded.moe_padding_mask[0, width:].all())


def test_pad_cu_seqlens_makes_boundaries_of_one_number(kept):
    plain, fixed = rows_of(kept), rows_of(kept, pad_to_max_length=True, pad_cu_seqlens=True)
    most = max(len(row.segments.lengths) for row in plain)
    assert len({len(row.segments.lengths) for row in plain}) > 1  # the guard: they differ by themselves
    assert {len(row.segments.cu_seqlens()) for row in fixed} == {most + 1}
    assert len({row.segments.kernel_seqlens().shape for row in fixed}) == 1
    assert PackedDataset(kept).manifest.sizes.most_segments == most
    for own, padded in zip(plain, fixed, strict=True):
        samples = len(own.segments.lengths)
        assert padded.segments.real[: samples + 1] == own.segments.real
        assert set(padded.segments.real[samples:]) == {own.segments.real[-1]}


def test_a_row_above_the_capacity_cannot_be_padded_to_it(tmp_path):
    samples = [*texts(4), chat("?", "a " * 200)]
    manifest = store(tmp_path, samples, oversize="own_row")
    assert manifest.sizes.longest_row > CAPACITY
    assert max(row.segments.total for row in rows_of(tmp_path)) == manifest.sizes.longest_row
    with pytest.raises(ConfigError, match=rf"pads rows to 96 tokens, but the longest has {manifest.sizes.longest_row}"):
        PackedDataset(tmp_path, pad_to_max_length=True)


def test_the_tail_of_a_row_is_rounded_up_as_packed(tmp_path):
    manifest = store(tmp_path, texts(), packing(slots=SlotRule(multiple=2, row_multiple=32)))
    rows = rows_of(tmp_path)
    assert {row.segments.total for row in rows} <= {32, 64, 96}
    assert manifest.sizes.longest_row == max(row.segments.total for row in rows)


def test_the_manifest_has_the_fixed_sizes_of_its_rows(tmp_path):
    samples = [*texts(5), *(chat("?", "b", *[picture(64, 64, seed=n)] * n) for n in range(3))]
    manifest = store(tmp_path, samples)
    rows = rows_of(tmp_path)
    images = [[] if r.media.image_grid_thw is None else r.media.image_grid_thw.prod(-1).tolist() for r in rows]
    assert len(places(PackedDataset(tmp_path))) > 2
    assert manifest.sizes.longest_segment == max(max(row.segments.lengths) for row in rows)
    assert manifest.sizes.most_segments == max(len(row.segments.lengths) for row in rows)
    assert manifest.sizes.most_images == max(map(len, images)) > 0
    assert manifest.sizes.most_patches == max(map(sum, images)) > 0
    assert manifest.counts.patches == sum(map(sum, images))
    assert manifest.counts.targets == sum(row.metadata.num_targets for row in rows)
    assert manifest.counts.tokens == sum(row.segments.num_tokens for row in rows)
    assert manifest.fill_ratio == pytest.approx(manifest.counts.tokens / (CAPACITY * len(rows)), abs=1e-6)
