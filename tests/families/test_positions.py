"""Positions on a packed row are, sample by sample, those that transformers computes for the sample alone."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from families.grids import with_grids
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmpack.errors import LayoutError
from vlmpack.families import Family, family_of
from vlmpack.families.media import media_of_row
from vlmpack.families.registry import FAMILIES
from vlmpack.families.videos import timed_run
from vlmpack.layout import Media, PackedRow, Segments, SlotRule, pack
from vlmpack.layout.media import MediaTable
from vlmpack.testing import Sample, build_sample, padded, tiny_config, tiny_model
from vlmpack.testing.samples import word_ids

text_alone = pytest.mark.parametrize("name", ["llama", "qwen3_next", "llama4_text"])


@cache
def model_of(name: str, merge: int = 2) -> Any:
    hidden = 48 if FAMILIES[name].has("gated_delta") else 24  # half of a head rotates in hybrid models
    return tiny_model(name, hidden=hidden, layers=1, vision_depth=1, vision_hidden=8, patch_size=1, merge=merge)


def positions_of(row: PackedRow, family: Family, config: Any, restarts: Segments | None = None) -> torch.Tensor:
    return family.positions(media_of_row(family, row, config), row.segments, config=config, restarts=restarts)


def row_of(types: Sequence[int], lengths: Sequence[int], config: Any, **media: Any) -> PackedRow:
    """A row of tokens of these types, with these media and without metadata."""
    ids = torch.tensor([word_ids(config)[0], config.image_token_id, config.video_token_id])
    column = torch.tensor([types])
    given = {name: torch.tensor(values) for name, values in media.items()}
    return PackedRow(
        input_ids=ids[column], segments=Segments.from_lengths(lengths), mm_token_type_ids=column, media=Media(**given)
    )


def by_transformers(model: Any, sample: Sample) -> torch.Tensor:
    """[3, L]: what the installed transformers computes for the sample alone."""
    grids = {name: sample.get(name) for name in ("image_grid_thw", "video_grid_thw")}
    seconds = {"second_per_grid_ts": sample["second_per_grid_ts"]} if "second_per_grid_ts" in sample else {}
    tokens = {name: sample[name][None] for name in ("input_ids", "mm_token_type_ids")}
    return model.model.get_rope_index(**tokens, **grids, **seconds)[0][:, 0]


def check_equal(samples: Sequence[Sample], model: Any, family: Family, *, multiple: int, side: Any = "right") -> None:
    row = pack(padded(samples, side), rule=SlotRule(multiple=multiple, row_multiple=3 * multiple))
    found = positions_of(row, family, model.config)
    assert found.shape == (4, 1, row.segments.total)
    assert found.dtype == torch.int64
    assert row.segments.num_tokens == sum(len(sample["input_ids"]) for sample in samples)
    for sample, (start, stop) in zip(samples, row.segments.spans, strict=True):
        assert torch.equal(found[1:, 0, start:stop], by_transformers(model, sample))
        assert torch.equal(found[0, 0, start:stop], torch.arange(stop - start))
    assert not found[:, 0, row.segments.padding_mask()].any()


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
    found = family.positions(MediaTable(), segments, config=config)
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
    row = row_of([2] * 4, [4], config, video_grid_thw=[[4, 2, 2]], second_per_grid_ts=[0.7])
    found = positions_of(row, with_seconds(whole), config)
    assert found[1, 0].tolist() == times


def test_frames_are_placed_in_float32_as_the_model_does_it() -> None:
    """0.7 s in float32 is below 0.7: five frames at 2 positions a second are 6.9999999 in float64, 7 in float32."""
    model = model_of("qwen2_5_vl")
    model.config.vision_config.tokens_per_second = 2
    sample = build_sample(model.config, stretches=[0, 1], video_grids=[(6, 2, 2)], seconds=[0.7])
    assert int(5 * 2 * sample["second_per_grid_ts"].item()) == 6
    found = positions_of(pack(padded([sample])), with_seconds(False), model.config)
    assert (found[1, 0, 1:7] - 1).tolist() == [0, 1, 2, 4, 5, 7]
    check_equal([sample], model, family_of(model), multiple=1)


def test_positions_handed_out_are_not_the_cached_tensor_of_the_segments() -> None:
    family, config = family_of(model_of("qwen2_vl")), model_of("qwen2_vl").config
    segments = Segments.from_lengths([3])
    family.positions(MediaTable(), segments, config=config).zero_()
    assert family.positions(MediaTable(), segments, config=config)[0, 0].tolist() == [0, 1, 2]


# ---------------------------------------------------------------------- what the host can see to be wrong

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "images of a text model": (
        "llama",
        {"image_grid_thw": [[1, 2, 2]] * 2},
        "llama is a text model, but the batch has 2 images or videos",
    ),
    "videos of a text model": ("llama", {"video_grid_thw": [[1, 2, 2]]}, "llama is a text model"),
    "a side that does not merge": (
        "qwen3_vl",
        {"image_grid_thw": [[1, 4, 4], [1, 3, 4]]},
        r"image 1: its grid \(1, 3, 4\) is not a multiple of the merge size 2 .* before merging",
    ),
    "a side of 0": (
        "qwen3_vl",
        {"video_grid_thw": [[1, 4, 4], [1, 0, 4]]},
        r"video 1: its grid is \(1, 0, 4\); it must be \(frames, rows, columns\)",
    ),
    "two numbers": ("qwen3_vl", {"video_grid_thw": [[1, 4]]}, r"video_grid_thw must be a tensor \[N, 3\]"),
    "seconds of another number of videos": (
        "qwen2_5_vl",
        {"video_grid_thw": [[1, 2, 2]], "second_per_grid_ts": [1.0, 2.0]},
        "1 videos but seconds_per_grid has 2 values.*second_per_grid_ts",
    ),
}


@pytest.mark.parametrize(("name", "media", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_host_can_see_to_be_wrong_is_refused(name: str, media: dict[str, Any], message: str) -> None:
    family, config = FAMILIES[name], tiny_config(name)
    given = Media(**{key: torch.tensor(values) for key, values in media.items()})
    row = PackedRow(input_ids=torch.zeros(1, 8).long(), segments=Segments.from_lengths([8]), media=given)
    with pytest.raises(LayoutError, match=message):
        media_of_row(family, row, config)
