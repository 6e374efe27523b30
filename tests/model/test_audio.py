"""Audio in a row: Qwen-Omni's thinkers, beyond what `test_equality.py` shows of them."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import slow
from equality import alone_through, check_packed
from host_syncs import own_lines, recorded_syncs, towers_get_boundaries_of_the_host
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

from vlmpack.errors import ConfigError, FamilyError, LayoutError
from vlmpack.families.media import media_of_row, media_reader
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import SlotRule, pack, share
from vlmpack.layout.device import nothing_on_host
from vlmpack.layout.media import AUDIO, MediaTable
from vlmpack.model import PackedStep, enable_packing
from vlmpack.model.mechanisms import attention
from vlmpack.testing import build_sample, joined, mixed_samples, padded, tiny_config, tiny_model
from vlmpack.testing.comparison import compare, run_alone, run_packed
from vlmpack.testing.samples import frames_of, sample_like

POOLED, CONVOLVED = "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"
"""One counts every second frame, the other convolves chunks three times, and reads their padding."""
each_family = pytest.mark.parametrize("family", [POOLED, CONVOLVED])


def fresh(family: str) -> Any:
    return tiny_model(family, seed=3, layers=2, hidden=32)


def with_audio(config: Any, *frames: tuple[int, ...]) -> list[Any]:
    """Samples of nothing but text and audios of these lengths."""
    return [
        build_sample(config, stretches=[3] * (len(of) + 1), audio_frames=of, seed=at) for at, of in enumerate(frames)
    ]


@pytest.mark.parametrize("metadata", [True, *slow(False)])
def test_short_audio_beside_long_is_that_of_its_sample_alone(metadata: bool) -> None:
    """Qwen3-Omni's convolutions read the padding of a chunk, so transformers' own padded batch is another model."""
    model = fresh(CONVOLVED)
    own = alone_through(model, with_audio(model.config, (30,), (230, 40), (57, 20), (99,), (30,)))
    batch = padded(own.samples, metadata=False).to_hf()
    with torch.no_grad():
        plain = model(**batch).logits
    moved = [float((row[: len(x)] - x).abs().max()) for row, x in zip(plain, own.logits, strict=True)]
    assert moved[0] > 1e-3
    assert moved[4] > 1e-3
    assert moved[1] < 1e-5
    check_packed(own, model, given="row with gaps" if metadata else "right padded without metadata")


# ---------------------------------------------------------------------- positions


@each_family
def test_positions_are_those_of_the_model_s_own_code(family: str) -> None:
    """Bit for bit, with fractions of positions where the model has them."""
    model = fresh(family)
    kinds = ("video", "everything", "text", "images_and_video", "audio", "images")
    samples = mixed_samples(model.config, seed=7, kinds=kinds)
    for sample in samples:
        if "video_second_per_grid" in sample:
            sample["video_second_per_grid"] = torch.full_like(sample["video_second_per_grid"], 0.7)
    row = pack(padded(samples), rule=SlotRule(multiple=4))
    table = media_of_row(FAMILIES[family], row, model.config)
    found = FAMILIES[family].positions(table, row.segments, config=model.config)
    for sample, (start, stop) in zip(samples, row.segments.spans, strict=True):
        mask = sample.get("feature_attention_mask")
        own, _ = model.model.get_rope_index(
            sample["input_ids"][None],
            sample.get("image_grid_thw"),
            sample.get("video_grid_thw"),
            torch.ones(1, stop - start, dtype=torch.long),
            audio_seqlens=None if mask is None else mask.sum(1),
            second_per_grids=sample.get("video_second_per_grid"),
        )
        assert torch.equal(found[1:, 0, start:stop], own[:, 0].to(found.dtype))
        assert found[0, 0, start:stop].tolist() == [*range(stop - start)]
    assert not found[:, 0, row.segments.padding_mask()].any()
    assert bool((found != found.round()).any()) == (family == CONVOLVED)


@each_family
def test_blocks_of_the_audio_tower_are_one_call_with_boundaries_that_the_host_knows(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not one call a chunk, or a wait for the boundaries that the tower derives, with checkpointing too."""
    model, calls = fresh(family), []
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    own = attention.packed_attention
    monkeypatch.setattr(
        attention,
        "packed_attention",
        lambda *args, vision=None, **more: calls.append(vision) or own(*args, vision=vision, **more),
    )
    row = pack(padded(with_audio(model.config, (17, 9), (30,))))
    step = PackedStep(model)
    with recorded_syncs(torch.device("cpu")) as waits, towers_get_boundaries_of_the_host():
        step(row).loss.backward()
    assert own_lines(waits) == []
    in_tower = [boundaries for boundaries in calls if boundaries is not None]
    assert len(in_tower) == 2 * len(model.model.audio_tower.layers) * (1 if family == POOLED else 2)  # and recomputed


@each_family
def test_media_on_the_host_that_are_not_those_of_the_row_are_refused_on_a_device(family: str) -> None:
    model = fresh(family)
    row = pack(padded(mixed_samples(model.config, kinds=("everything", "text"))))
    moved = [replace(m, runs=tuple((start - 1, stop - 1) for start, stop in m.runs)) for m in row.metadata.media.media]
    row = replace(row, metadata=replace(row.metadata, media=MediaTable(media=tuple(moved))))
    with nothing_on_host(), pytest.raises(RuntimeError, match="has images, videos or audio where the row has other"):
        PackedStep(model)(row)


# ---------------------------------------------------------------------- refused


def batch_of(*frames: tuple[int, ...], metadata: bool = True, **changes: Any) -> dict[str, Any]:
    """A batch of Qwen2.5-Omni with audios of these lengths."""
    samples = with_audio(step_of().model.config, *frames)
    return padded(samples, metadata=metadata).to_hf() | changes


@functools.cache
def step_of() -> PackedStep:
    """One for all batches that are refused."""
    return PackedStep(fresh(POOLED))


def refused(batch: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        step_of()(batch)


@pytest.mark.parametrize("metadata", [True, False])
def test_audio_in_another_sample_than_its_placeholders_is_refused(metadata: bool) -> None:
    """transformers puts features on placeholders of the whole batch."""
    batch, swapped = batch_of((17,), (41,), metadata=metadata), batch_of((41,), (17,), metadata=False)
    batch |= {name: swapped[name] for name in ("input_features", "feature_attention_mask")}
    if metadata:
        refused(batch, LayoutError, r"feature_attention_mask is not what the host metadata \('vlmpack'\) say")
    else:
        refused(batch, LayoutError, r"sample 0: a run of 4 audio placeholders begins at place 4 .* makes a run of 10")


def test_placeholders_without_their_audio_are_refused_by_sample() -> None:
    batch = batch_of((17,), (41,))
    batch["input_ids"][1, 4] = 100
    refused(batch, LayoutError, "sample 1, token 4: the host metadata has images, videos or audio where")


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("input_features", lambda x: x[:, :-1], LayoutError, r"input_features must be .* \[1, 6, 17\]"),
        ("input_features", lambda _: None, LayoutError, r"feature_attention_mask without input_features"),
        ("feature_attention_mask", lambda _: None, LayoutError, r"input_features without feature_attention_mask"),
        ("feature_attention_mask", lambda mask: 2 * mask, LayoutError, r"must hold 0 \(padding\) and 1"),
        ("feature_attention_mask", torch.Tensor.float, LayoutError, r"\[audios, frames\] of 0 and 1"),
        ("use_audio_in_video", lambda _: True, ConfigError, r"interleaves a video with its own sound"),
    ],
)
def test_tensors_of_audio_that_do_not_fit_are_refused_by_name(name: str, change: Any, error: Any, message: str) -> None:
    batch = batch_of((17,), metadata=False)
    step_of()(batch | {"use_audio_in_video": False})
    refused(batch | {name: change(batch.get(name))}, error, message)


def test_audio_too_short_for_a_token_is_refused() -> None:
    batch = batch_of((17,), (2,), metadata=False)
    refused(batch, LayoutError, r"audio 1 of the row has 2 frames .* too few for one token")


def test_media_without_the_token_that_marks_their_start_are_refused() -> None:
    config = fresh(POOLED).config
    batch = padded([build_sample(config, stretches=[3, 2], image_grids=[(1, 2, 4)])]).to_hf()
    batch["input_ids"][0, 3] = config.audio_start_token_id
    refused(batch, LayoutError, r"sample 0, token 4: .*use_audio_in_video\) is not supported")


def test_a_video_without_seconds_is_refused() -> None:
    config = fresh(POOLED).config
    batch = padded([build_sample(config, stretches=[3, 2], video_grids=[(2, 2, 4)], seconds=[1.0])]).to_hf()
    del batch["video_second_per_grid"], batch["vlmpack"]
    refused(batch, LayoutError, r"there are 1 videos but the seconds between two grids of 0")
    refused(batch | {"second_per_grid_ts": torch.ones(1)}, ConfigError, r"takes no input 'second_per_grid_ts'")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # sizes of the talker are not those of the tiny thinker
def test_of_a_whole_model_the_thinker_is_packed() -> None:
    config = Qwen2_5OmniConfig(enable_audio_output=False)
    config.thinker_config = tiny_config(POOLED, layers=1)
    whole = Qwen2_5OmniForConditionalGeneration(config)
    with pytest.raises(FamilyError, match=r"qwen2_5_omni cannot be packed .* pack model.thinker"):
        enable_packing(whole)
    samples = with_audio(config.thinker_config, (17,), (9,))
    alone = run_alone(whole.thinker, samples)
    assert compare(run_packed(whole.thinker, pack(padded(samples)), samples), alone).logits < 1e-5


@each_family
def test_an_audio_is_shared_where_its_features_are_equal(family: str) -> None:
    """Behind a longer audio a tower that reads padding makes other features of a short one."""
    config = fresh(family).config
    (short,) = with_audio(config, (frames_of(config)[0],))
    (longer,) = with_audio(config, (frames_of(config)[1],))
    row = pack(padded([short, sample_like(short, dict(short)), joined([short, longer]), joined([short, short])]))
    shared = share(row, min_shared=1, read_media=media_reader(FAMILIES[family], config))
    assert shared.tree is not None
    audios = shared.known_metadata.media.chosen(shared.tree)[AUDIO]
    assert audios.tolist() == ([0, 3, 5] if family == POOLED else [0, 5, 2, 3])
    with pytest.raises(LayoutError, match=r"the row has audio, so that .*media_reader\(family_of\(model\)"):
        share(row)
