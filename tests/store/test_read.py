"""PackedDataset: a stored row is what the collator makes of the same samples."""

from __future__ import annotations

import pickle
from itertools import chain
from pathlib import Path

import pytest
from chats import chat, picture, processor_of
from clips import clip_bytes
from store.stores import asked, check_same, encoded, mixed, packing, places, store, texts
from torch.utils.data import DataLoader

from vlmpack.collate import FrameSampling, VLMCollator
from vlmpack.collate.skipped import read_skip_log
from vlmpack.errors import ConfigError, SampleError
from vlmpack.layout import PackedRow
from vlmpack.layout.media import VIDEO
from vlmpack.loading import PackedBatchSampler
from vlmpack.store import PackedDataset
from vlmpack.testing import tiny_processor


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A store of every kind of sample, and the samples."""
    folder = tmp_path_factory.mktemp("kept")
    samples = mixed(folder)
    store(folder / "rows", samples)
    return folder / "rows", samples


@pytest.fixture(scope="module")
def dataset(kept):
    return PackedDataset(kept[0], processor_of())


# ---------------------------------------------------------------------- equality


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_stored_row_is_what_the_collator_makes_of_its_samples(tmp_path, family):
    samples = mixed(tmp_path)
    store(tmp_path / "rows", samples, packing(family))
    dataset, collator = PackedDataset(tmp_path / "rows", processor_of(family)), packing(family)
    rows = places(dataset)
    assert sorted(chain(*rows)) == list(range(len(samples)))
    assert len(rows) > 1 and max(map(len, rows)) > 1
    for at, row in enumerate(rows):
        check_same(dataset.row(at), collator.collate([samples[place] for place in row]))


def test_truncated_samples_are_stored_as_they_were_cut(tmp_path):
    samples = [chat("Which?", "The last", *(picture(64, 64, seed=n) for n in range(3)), id=n) for n in range(3)]
    cut = {"train_on": "all", "max_length": 14, "overlength": "truncate"}
    manifest = store(tmp_path, samples, packing(**cut))
    dataset, collator = PackedDataset(tmp_path, processor_of()), packing(**cut)
    assert manifest.counts.images < 9  # the guard: something was cut
    for at, row in enumerate(places(dataset)):
        check_same(dataset.row(at), collator.collate([samples[place] for place in row]))


def test_rows_of_texts_need_a_tokenizer_only(tmp_path):
    tokenizer = processor_of().tokenizer
    tokenizer.chat_template = processor_of().chat_template
    collator = VLMCollator(tokenizer, layout="packed")
    manifest = store(tmp_path, texts(), collator)
    dataset = PackedDataset(tmp_path, tokenizer)
    assert manifest.counts.patches == 0
    for at, row in enumerate(places(dataset)):
        check_same(dataset.row(at), collator.collate([texts()[place] for place in row]))


def test_tokenised_samples_keep_their_labels(tmp_path):
    samples = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 9, 8], "id": "own labels"},
        {"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1], "id": 1},
    ]
    store(tmp_path, samples)
    dataset = PackedDataset(tmp_path, processor_of())
    assert places(dataset) == [[0, 1]]
    assert dataset[0]["labels"].tolist() == [[-100, -100, 9, 8, -100, -100, 7]]


def test_a_supervised_end_of_text_token_belongs_to_the_real_length(tmp_path):
    """Where real lengths are looked up as the last token that is not end-of-text, it is lost."""
    tokenizer = processor_of().tokenizer
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    samples = [{"input_ids": [5, 6, end], "labels": [-100, 6, end]}, {"input_ids": [7, pad], "labels": [7, pad]}]
    store(tmp_path, samples, packing(), capacity=8)
    row = PackedDataset(tmp_path, processor_of(), pad_to_max_length=True).row(0)
    assert row.segments.lengths == (3, 2)
    assert row.shift_labels is not None and row.shift_labels[0].tolist() == [6, end, -100, pad, *[-100] * 4]
    assert row.input_ids[0, 5:].tolist() == [pad] * 3  # the guard: padding looks the same


# ---------------------------------------------------------------------- a data set


@pytest.mark.dist
def test_workers_get_the_same_rows(dataset):
    dataset[0]  # files are open when the workers are made
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    rows = [PackedRow.from_hf(batch) for batch in loader]
    assert len(rows) == len(dataset)
    for at, row in enumerate(rows):
        check_same(row, dataset.row(at))


def test_it_pickles_as_a_path(kept):
    dataset = PackedDataset(kept[0], processor_of())
    fresh = len(pickle.dumps(dataset))
    whole = dataset.row(0)
    assert len(pickle.dumps(dataset)) < fresh + 5000  # what was read stays here
    check_same(pickle.loads(pickle.dumps(dataset)).row(0), whole)


def test_a_row_is_outlined_without_a_processor_or_an_image(kept, dataset):
    looked_at = PackedDataset(kept[0])
    for at, row in enumerate(places(looked_at)):
        outline = looked_at.measured(at)
        assert [sample.sample_id for sample in outline] == list(dataset.row(at).metadata.sample_ids)
        assert [sample.num_tokens for sample in outline] == list(looked_at.segments(at).lengths)
        assert all(image.pixels is None and image.source is None for sample in outline for image in sample.images)
        assert len(outline) == len(row)
    with pytest.raises(ConfigError, match="need the processor"):
        looked_at[0]


def test_samples_without_a_name_are_named_by_their_place_in_the_data_set(tmp_path):
    samples = [chat(f"{n}?", "yes") for n in range(9)]
    store(tmp_path, samples, seed=3)
    dataset = PackedDataset(tmp_path, processor_of())
    named = [list(dataset.row(at).metadata.sample_ids) for at in range(len(dataset))]
    assert named == places(dataset) != [sorted(row) for row in named]


def test_rows_can_be_counted_iterated_and_dealt_to_ranks_by_a_sampler(dataset):
    assert len(dataset) == dataset.manifest.counts.rows == len(list(dataset))
    assert dataset.plan.tokens.tolist() == [dataset.row(at).segments.total for at in range(len(dataset))]
    sampler = PackedBatchSampler(dataset.plan, ranks=2, rank=0, remainder="empty")
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate)
    assert len(list(loader)) == -(-len(dataset) // 2)


def test_no_row_is_a_step_of_loss_0_and_two_rows_are_no_batch(dataset):
    assert dataset.collate([])["vlmpack"].num_targets == 0
    row = dataset[0]
    assert dataset.collate([row]) is row
    loader = DataLoader(dataset, batch_size=None, collate_fn=dataset.collate)
    assert next(iter(loader))["input_ids"].equal(row["input_ids"])
    with pytest.raises(ConfigError, match=r"2 rows were put into one batch.*per_device_train_batch_size=1"):
        dataset.collate([row, row])


# ---------------------------------------------------------------------- the processor


def test_another_processor_is_refused_by_what_differs(kept):
    with pytest.raises(ConfigError, match=r"images\.max_pixels was 262144 and is 65536"):
        PackedDataset(kept[0], tiny_processor(max_pixels=64 * 32 * 32))
    with pytest.raises(ConfigError, match=r"images.patch_size was 16 and is 14") as refused:
        PackedDataset(kept[0], processor_of("qwen2_5_vl"))
    assert "tokens.frame_timestamps was true and is false" in str(refused.value)
    with pytest.raises(ConfigError, match=r"chat_template was \"\w+\" and is \"\w+\""):
        PackedDataset(kept[0], tiny_processor(chat_template="{{ messages }}"))
    with pytest.raises(ConfigError, match="vocabulary was"):
        PackedDataset(kept[0], tiny_processor(vocab_size=700))
    PackedDataset(kept[0], tiny_processor())  # the guard: an equal one is taken
    with pytest.raises(ConfigError, match="max_length, train_on: decided when the rows were packed"):
        PackedDataset(kept[0], processor_of(), max_length=7, train_on="all")


# ---------------------------------------------------------------------- damage


def test_a_damaged_file_is_named_with_its_row(tmp_path):
    manifest = store(tmp_path, texts())
    shard = tmp_path / manifest.shards[1].file
    content = bytearray(shard.read_bytes())
    content[60] ^= 1
    shard.write_bytes(content)
    dataset = PackedDataset(tmp_path, processor_of())
    dataset[0]
    with pytest.raises(ConfigError, match=rf"row 0 of .*{shard.name} cannot be read.*damaged"):
        dataset[manifest.shards[0].rows]
    with pytest.raises(ConfigError, match=rf"{shard.name} is damaged: its SHA-256"):
        PackedDataset(tmp_path, processor_of(), verify=True)


def test_a_missing_or_cut_file_is_found_when_the_store_is_opened(tmp_path):
    manifest = store(tmp_path, texts())
    shard = tmp_path / manifest.shards[-1].file
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(
        ConfigError, match=rf"{shard.name} has \d+ bytes, and manifest.json lists it with {shard.stat().st_size + 1}"
    ):
        PackedDataset(tmp_path, processor_of())
    shard.unlink()
    with pytest.raises(ConfigError, match=f"{shard.name} is not there"):
        PackedDataset(tmp_path, processor_of())


def test_a_damaged_image_is_named_or_skipped_and_written_down(tmp_path):
    """The second of three images is damaged behind its header."""
    whole = encoded(picture(80, 80, seed=1), "JPEG")
    samples = [chat(f"{n}?", "yes", whole if n != 1 else whole[: len(whole) // 2], id=f"s{n}") for n in range(3)]
    store(tmp_path / "rows", samples)
    with pytest.raises(
        SampleError,
        match=r"sample 1 \(id 's1'\): image 0: .* damaged .*\(row 0 of the store: row 0 of .*rows-00000-of-00001\.",
    ):
        PackedDataset(tmp_path / "rows", processor_of())[0]
    skip_log = tmp_path / "bad.jsonl"
    row = PackedDataset(tmp_path / "rows", processor_of(), on_bad="skip", skip_log=skip_log).row(0)
    assert row.metadata.sample_ids == ("s0", "s2")
    check_same(row, packing().collate([samples[0], samples[2]]))
    assert [(one["id"], one["reason"]) for one in read_skip_log(skip_log)] == [("s1", "image_undecodable")]


# ---------------------------------------------------------------------- files of videos


def test_a_file_of_a_video_is_stored_whole(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(clip_bytes())
    keys = {"min_pixels": 1024, "max_pixels": 6144, "fps": 3, "video_end": 1.5}
    samples = [asked({"type": "video", "video": str(path), **keys}, id="film"), *texts(4)]
    store(tmp_path / "rows", samples, capacity=400)
    dataset = PackedDataset(tmp_path / "rows", processor_of())
    expected = [packing().collate([samples[place] for place in row]) for row in places(dataset)]
    assert sum(row.media.pixel_values_videos is not None for row in expected) == 1
    path.unlink()
    for at, row in enumerate(expected):
        check_same(dataset.row(at), row)


def test_the_frames_that_are_taken_are_decided_when_rows_are_packed(tmp_path: Path) -> None:
    samples = [asked({"type": "video", "video": clip_bytes(), "min_pixels": 1024, "max_pixels": 6144}), *texts(2)]
    store(tmp_path / "rows", samples, packing(sampling=FrameSampling(fps=None, num_frames=6)), capacity=400)
    dataset = PackedDataset(tmp_path / "rows", processor_of())
    grids = [grid for at in range(len(dataset)) for grid in dataset.row(at).metadata.media.grids(VIDEO)]
    assert [grid[0] for grid in grids] == [3]
    with pytest.raises(ConfigError, match="sampling: decided when the rows were packed"):
        PackedDataset(tmp_path / "rows", processor_of("qwen3_vl"), sampling=FrameSampling())
