"""Positions on a packed row are, sample by sample, those that transformers computes for the sample alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import families
from families.grids import with_grids
from families.naive import naive_positions
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import waits_are_errors

from vlmpack.errors import LayoutError
from vlmpack.families import Family, family_of
from vlmpack.families.media import media_items, run_per_frame, timed_run, truncates_seconds
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import Grid, PackedRow, Segments, SlotRule, pack
from vlmpack.probing.host_syncs import recorded_syncs
from vlmpack.testing import Sample, build_sample, mixed_samples, padded, tiny_config, tiny_model
from vlmpack.testing.samples import kinds_of, metadata_of

VECTOR: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "mrope.json").read_text())
"""The row of three samples that the README of `vlmpack/families` draws."""
SAMPLES: list[dict[str, Any]] = VECTOR["samples"]
IMAGE_PAD = 9

every_family = pytest.mark.parametrize("name", families(lambda family: not family.has_audio))
"""(Qwen-Omni asks its own code for positions of videos: tests/model/test_audio.py.)"""
text_alone = pytest.mark.parametrize("name", ["llama", "qwen3_next", "llama4_text"])


@pytest.fixture(autouse=True)
def asked_once() -> None:
    """A family is compared with the model when packing is enabled, not in a step: transformers is tried before."""
    truncates_seconds()


@cache
def model_of(name: str, merge: int = 2) -> Any:
    hidden = 48 if FAMILIES[name].has("gated_delta") else 24  # half of a head rotates in hybrid models
    return tiny_model(name, hidden=hidden, layers=1, vision_depth=1, vision_hidden=8, patch_size=1, merge=merge)


def positions_of(row: PackedRow, family: Family, config: Any, segments: Segments | None = None) -> torch.Tensor:
    metadata, types = row.metadata, row.mm_token_type_ids
    assert metadata is not None
    if types is None and family.has_grids:
        types = family.types_of_row(row, config)
    return family.positions(
        types,
        segments or row.segments,
        config=config,
        image_grids=metadata.image_grids,
        video_grids=metadata.video_grids,
        seconds_per_grid=metadata.seconds_per_grid,
    )


def by_transformers(model: Any, sample: Sample) -> torch.Tensor:
    """[3, L]: what the installed transformers computes for the sample alone."""
    grids = {name: sample.get(name) for name in ("image_grid_thw", "video_grid_thw")}
    seconds = {"second_per_grid_ts": sample["second_per_grid_ts"]} if "second_per_grid_ts" in sample else {}
    tokens = {name: sample[name][None] for name in ("input_ids", "mm_token_type_ids")}
    return model.model.get_rope_index(**tokens, **grids, **seconds)[0][:, 0]


def by_loops(config: Any, sample: Sample, family: Family) -> torch.Tensor:
    """[4, L]: the naive twin."""
    metadata = metadata_of([sample])
    intervals = None
    if family.videos is timed_run:
        seconds = metadata.seconds_per_grid or (1.0,) * len(metadata.video_grids)
        rate = config.vision_config.tokens_per_second
        intervals = [rate * (int(s) if truncates_seconds() else s) for s in seconds]
    found = naive_positions(
        sample["mm_token_type_ids"].tolist(),
        merge=config.vision_config.spatial_merge_size,
        image_grids=metadata.image_grids,
        video_grids=metadata.video_grids,
        frame_intervals=intervals,
        frames_apart=family.videos is run_per_frame,
    )
    return torch.tensor(found).T


def check_equal(samples: Sequence[Sample], model: Any, family: Family, *, multiple: int, side: Any = "right") -> None:
    row = pack(padded(samples, side), rule=SlotRule(multiple=multiple, row_multiple=3 * multiple))
    found = positions_of(row, family, model.config)
    assert found.shape == (4, 1, row.segments.total)
    assert found.dtype == torch.int64
    assert row.segments.num_tokens == sum(len(sample["input_ids"]) for sample in samples)
    for sample, (start, stop) in zip(samples, row.segments.spans, strict=True):
        assert torch.equal(found[1:, 0, start:stop], by_transformers(model, sample))
        assert torch.equal(found[:, 0, start:stop], by_loops(model.config, sample, family))
        assert torch.equal(found[0, 0, start:stop], torch.arange(stop - start))
    assert not found[:, 0, row.segments.padding_mask()].any()


# ---------------------------------------------------------------------- generated samples


@st.composite
def generated_sample(draw: st.DrawFn, config: Any) -> Sample:
    merge = config.vision_config.spatial_merge_size
    side = st.integers(1, 5).map(lambda n: n * merge)
    images = draw(st.lists(st.tuples(st.integers(1, 2), side, side), max_size=3))
    videos = draw(st.lists(st.tuples(st.integers(1, 4), side, side), max_size=2))
    count = len(images) + len(videos) + 1
    return build_sample(
        config,
        # text alone needs a token; between media there may be none
        stretches=draw(st.lists(st.integers(1 if count == 1 else 0, 6), min_size=count, max_size=count)),
        image_grids=images,
        video_grids=videos,
        seconds=draw(st.lists(st.floats(0, 40, width=32), min_size=len(videos), max_size=len(videos))),
        videos_first=draw(st.booleans()),
    )


@with_grids
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_any_row_equals_transformers_sample_by_sample(name: str, data: st.DataObject) -> None:
    model = model_of(name, data.draw(st.sampled_from([1, 2, 3]), label="merge"))
    rate = data.draw(st.sampled_from([1, 2, 4, 25]), label="tokens per second")
    if name == "qwen2_5_vl":
        model.config.vision_config.tokens_per_second = rate
    samples = data.draw(st.lists(generated_sample(model.config), min_size=1, max_size=4))
    check_equal(
        samples,
        model,
        family_of(model),
        multiple=data.draw(st.sampled_from([1, 4, 7])),
        side=data.draw(st.sampled_from(["left", "right"])),
    )


@text_alone
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), multiple=st.sampled_from([1, 4, 7]))
def test_a_text_model_counts_from_0_in_every_sample(name: str, lengths: list[int], multiple: int) -> None:
    """As a text model of transformers does by itself for a sample alone; it is handed the text row, [1, T]."""
    family, config = family_of(model_of(name)), model_of(name).config
    segments = Segments.from_lengths(lengths, SlotRule(multiple=multiple, row_multiple=3 * multiple))
    found = family.positions(None, segments, config=config)
    assert found.shape == (4, 1, segments.total)
    assert torch.equal(found, found[:1].expand_as(found))
    for start, stop in segments.spans:
        assert found[0, 0, start:stop].tolist() == list(range(stop - start))
    assert not found[:, 0, segments.padding_mask()].any()
    assert torch.equal(family.rotary_ids(found), found[0])


# ---------------------------------------------------------------------- the seconds of Qwen2.5-VL


def with_seconds(whole: bool) -> Family:
    """Qwen2.5-VL as older transformers place its videos, or newer ones."""
    return replace(FAMILIES["qwen2_5_vl"], videos=partial(timed_run, whole_seconds=whole))


@pytest.mark.parametrize(("whole", "times"), [(False, [0, 2, 5, 8]), (True, [0, 0, 0, 0])])
def test_seconds_between_frames_are_used_as_the_installed_version_uses_them(whole: bool, times: list[int]) -> None:
    config = model_of("qwen2_5_vl").config
    config.vision_config.tokens_per_second = 4
    found = with_seconds(whole).positions(
        torch.full((1, 4), 2),
        Segments.from_lengths([4]),
        config=config,
        video_grids=[(4, 2, 2)],
        seconds_per_grid=[0.7],
    )
    assert found[1, 0].tolist() == times


def test_frames_are_placed_in_float32_as_the_model_does_it() -> None:
    """0.7 s in float32 is below 0.7: five frames at 2 positions a second are 6.9999999 in float64, 7 in float32."""
    model = model_of("qwen2_5_vl")
    model.config.vision_config.tokens_per_second = 2
    sample = build_sample(model.config, stretches=[0, 1], video_grids=[(6, 2, 2)], seconds=[0.7])
    seconds = metadata_of([sample]).seconds_per_grid
    assert int(5 * 2 * seconds[0]) == 6
    found = with_seconds(False).positions(
        sample["mm_token_type_ids"][None],
        Segments.from_lengths([len(sample["input_ids"])]),
        config=model.config,
        video_grids=[(6, 2, 2)],
        seconds_per_grid=seconds,
    )
    assert (found[1, 0, 1:7] - 1).tolist() == [0, 1, 2, 4, 5, 7]
    check_equal([sample], model, family_of(model), multiple=1)


# ---------------------------------------------------------------------- only segments decide


def test_where_rope_restarts_is_decided_by_the_segments_alone() -> None:
    model = model_of("qwen3_vl")
    family, samples = family_of(model), mixed_samples(model.config)
    row = pack(padded(samples))
    whole = Segments.from_boundaries([0, row.segments.total])
    together = positions_of(row, family, model.config, whole)
    apart = positions_of(row, family, model.config)
    # as one segment the row counts on; each sample's positions are moved as a whole, so differences stay
    assert together[0, 0].tolist() == list(range(row.segments.total))
    assert not torch.equal(together, apart)
    for start, stop in row.segments.spans:
        assert torch.equal(together[:, 0, start:stop] - together[:, 0, start : start + 1], apart[:, 0, start:stop])


@with_grids
def test_repeated_final_boundaries_change_nothing(name: str) -> None:
    model = model_of(name)
    samples = mixed_samples(model.config)
    row = pack(padded(samples))
    more = pack(padded(samples), rule=SlotRule(max_segments=9))
    assert len(more.segments.lengths) == 9
    family = family_of(model)
    assert torch.equal(positions_of(row, family, model.config), positions_of(more, family, model.config))


@every_family
def test_text_alone_needs_no_token_types(name: str) -> None:
    family, config = family_of(model_of(name)), model_of(name).config
    segments = Segments.from_lengths([3, 2], SlotRule(multiple=4))
    found = family.positions(None, segments, config=config)
    assert found[:, 0].tolist() == [[0, 1, 2, 0, 0, 1, 0, 0]] * 4
    assert torch.equal(found, family.positions(torch.zeros(1, 8, dtype=torch.long), segments, config=config))


def test_positions_handed_out_are_not_the_cached_tensor_of_the_segments() -> None:
    family, config = family_of(model_of("qwen2_vl")), model_of("qwen2_vl").config
    segments = Segments.from_lengths([3])
    family.positions(None, segments, config=config).zero_()
    assert family.positions(None, segments, config=config)[0, 0].tolist() == [0, 1, 2]


def test_more_media_tokens_than_the_grids_stand_for_count_as_text() -> None:
    """Their number is on the device and is not waited for; the row stays in range and the next segment is right."""
    family, config = family_of(model_of("qwen2_vl")), model_of("qwen2_vl").config
    types = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 2, 2]])
    found = family.positions(
        types, Segments.from_lengths([7, 2]), config=config, image_grids=[(1, 2, 4)], video_grids=[(1, 2, 2)]
    )
    assert found[:, 0].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 0, 1],
        [0, 1, 1, 3, 4, 5, 6, 0, 1],
        [0, 1, 1, 3, 4, 5, 6, 0, 1],
        [0, 1, 2, 3, 4, 5, 6, 0, 1],
    ]


# ---------------------------------------------------------------------- the row that the README draws


def types_of(sample: dict[str, Any]) -> list[int]:
    return [int(token == IMAGE_PAD) for token in sample["input_ids"]]


def axes_of(sample: dict[str, Any]) -> list[list[int]]:
    return [list(range(len(sample["t"]))), sample["t"], sample["h"], sample["w"]]


@with_grids
@pytest.mark.parametrize("multiple", [1, 4])
def test_a_row_of_the_vector_restarts_in_every_segment(name: str, multiple: int) -> None:
    assert [sample["name"] for sample in SAMPLES] == ["A", "B", "C"]
    segments = Segments.from_lengths([len(s["input_ids"]) for s in SAMPLES], SlotRule(multiple=multiple))
    types = torch.zeros(1, segments.total, dtype=torch.int64)
    for sample, (start, stop) in zip(SAMPLES, segments.spans, strict=True):
        types[0, start:stop] = torch.tensor(types_of(sample))
    found = FAMILIES[name].positions(
        types,
        segments,
        config=tiny_config(name, merge=VECTOR["merge"]),
        image_grids=[tuple(grid) for s in SAMPLES for grid in s["image_grid_thw"]],
    )
    for sample, (start, stop) in zip(SAMPLES, segments.spans, strict=True):
        assert found[:, 0, start:stop].tolist() == axes_of(sample), sample["name"]
        assert int(found[1:, 0, start:stop].max()) + 1 - (stop - start) == sample["delta"]


def test_a_row_that_does_not_restart_is_off_by_seven_and_nine() -> None:
    """The guard: what the test above would see if boundaries were ignored."""
    segments = Segments.from_lengths([sum(len(s["input_ids"]) for s in SAMPLES)])
    types = torch.tensor([[kind for sample in SAMPLES for kind in types_of(sample)]])
    found = FAMILIES["qwen3_vl"].positions(
        types, segments, config=tiny_config("qwen3_vl"), image_grids=[(1, 4, 4), (1, 4, 6)]
    )
    expected = torch.tensor([axis for sample in SAMPLES for axis in sample["t"]])
    assert (found[1, 0] - expected).tolist() == [0] * 9 + [7] * 2 + [9] * 10


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s["name"])
def test_the_naive_twin_gives_the_vector(sample: dict[str, Any]) -> None:
    grids = [tuple(grid) for grid in sample["image_grid_thw"]]
    found = naive_positions(types_of(sample), merge=VECTOR["merge"], image_grids=grids)
    assert [list(axis) for axis in zip(*found, strict=True)] == axes_of(sample)


def test_the_table_lists_offsets_and_one_advance_for_each_item() -> None:
    table = media_items([(2, 2, 4), (1, 6, 2)], 2, "image").table()
    assert table.tolist() == [
        [0, 0, 1, 1, 0, 0, 0],  # time
        [0, 0, 0, 0, 0, 1, 2],  # height
        [0, 1, 0, 1, 0, 0, 0],  # width
        [0, 0, 0, 2, 0, 0, 3],  # advance: max(1, 2) after the first item, whatever its two frames; max(3, 1)
    ]


# ---------------------------------------------------------------------- nothing waits for a device


def row_and_config(name: str) -> tuple[PackedRow, Any]:
    config = tiny_config(name, patch_size=1)
    return pack(padded(mixed_samples(config, kinds=kinds_of(config) * 2)), rule=SlotRule(multiple=4)), config


@every_family
def test_no_operation_waits(name: str) -> None:
    row, config = row_and_config(name)
    with recorded_syncs(torch.device("cpu")) as waits:
        found = positions_of(row, FAMILIES[name], config)
    assert waits == []
    assert found.shape == (4, 1, row.segments.total)


def test_a_compiled_step_is_not_compiled_again_for_other_lengths() -> None:
    family, config = FAMILIES["qwen3_vl"], tiny_config("qwen3_vl")
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def step(types: torch.Tensor, segments: Segments, grids: list[Grid]) -> torch.Tensor:
        return family.positions(types, segments, config=config, image_grids=grids) * 2

    compiled = torch.compile(step, backend=backend, dynamic=True)
    for rows in (2, 3, 4, 5):
        types = torch.tensor([[0, *[1] * rows, 0, 0]])
        segments, grids = Segments.from_lengths([rows + 2, 1]), [(1, 2, 2 * rows)]
        assert torch.equal(compiled(types, segments, grids), step(types, segments, grids))
    assert len(graphs) == 1


@pytest.mark.gpu
@pytest.mark.slow
@with_grids
def test_a_gpu_is_not_waited_for_and_gives_the_same(name: str) -> None:
    row, config = row_and_config(name)
    types = None if row.mm_token_type_ids is None else row.mm_token_type_ids.cuda()
    with waits_are_errors():
        found = positions_of(replace(row, mm_token_type_ids=types), FAMILIES[name], config)
    assert torch.equal(found.cpu(), positions_of(row, FAMILIES[name], config))


# ---------------------------------------------------------------------- what the host can see to be wrong

TYPES = torch.zeros(1, 8, dtype=torch.int64)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "more images than there is room for": (
        "glm4v",
        {"image_grids": [(1, 4, 4), (1, 4, 6)]},
        "2 images and 0 videos .* 10 tokens, but the row has only 8.* truncated",
    ),
    "more frames": ("qwen3_vl", {"video_grids": [(3, 4, 4)]}, "stand for 12 tokens, but the row has only 8"),
    "images of a text model": (
        "llama",
        {"image_grids": [(1, 2, 2)] * 2},
        "llama is a text model, but the batch has 2 images or videos",
    ),
    "videos of a text model": ("llama", {"video_grids": [(1, 2, 2)]}, "llama is a text model"),
    "a side that does not merge": (
        "qwen3_vl",
        {"image_grids": [(1, 4, 4), (1, 3, 4)]},
        r"image 1: its grid \(1, 3, 4\) is not a multiple of the merge size 2 .* before merging",
    ),
    "a side of 0": (
        "qwen3_vl",
        {"video_grids": [(1, 4, 4), (1, 0, 4)]},
        r"video 1: its grid is \(1, 0, 4\); it must be \(frames, rows, columns\)",
    ),
    "two numbers": ("qwen3_vl", {"video_grids": [(1, 4)]}, r"video 0: its grid is \(1, 4\)"),
    "no token types": (
        "qwen3_vl",
        {"types": None, "image_grids": [(1, 4, 4)]},
        "1 images .* no mm_token_type_ids.*keep what the processor returns",
    ),
    "token types of another width": ("qwen3_vl", {"types": TYPES[:, 1:]}, r"a tensor \[1, 8\].* \[1, 7\]"),
    "token types of two rows": ("qwen3_vl", {"types": TYPES.repeat(2, 1)}, r"a tensor \[1, 8\].* \[2, 8\]"),
    "token types of none": ("qwen3_vl", {"types": TYPES[0]}, r"a tensor \[1, 8\].* \[8\]"),
    "seconds of another number of videos": (
        "qwen2_5_vl",
        {"video_grids": [(1, 2, 2)], "seconds_per_grid": [1.0, 2.0]},
        "1 videos but seconds_per_grid has 2 values.*second_per_grid_ts",
    ),
    "negative seconds": (
        "qwen2_5_vl",
        {"video_grids": [(1, 2, 2)] * 2, "seconds_per_grid": [1.0, -1.0]},
        "video 1: seconds_per_grid is -1.0; it must be a finite time",
    ),
}


@pytest.mark.parametrize(("name", "given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_host_can_see_to_be_wrong_is_refused(name: str, given: dict[str, Any], message: str) -> None:
    known = {"types": TYPES, **given}
    types = known.pop("types")
    with pytest.raises(LayoutError, match=message):
        FAMILIES[name].positions(types, Segments.from_lengths([8]), config=tiny_config(name), **known)


def test_a_family_that_needs_no_seconds_does_not_mind_them() -> None:
    found = FAMILIES["qwen3_vl"].positions(
        torch.full((1, 2), 2),
        Segments.from_lengths([2]),
        config=tiny_config("qwen3_vl"),
        video_grids=[(2, 2, 2)],
        seconds_per_grid=[9.0],
    )
    assert found[:, 0].tolist() == [[0, 1]] * 4
