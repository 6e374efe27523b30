"""write_rows: what is written, what is refused, and what is not done twice."""

from __future__ import annotations

import io
import json
import os
import resource
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from chats import chat, picture, processor_of
from PIL import Image
from store.kills import Counting
from store.stores import CAPACITY, digests, encoded, mixed, packing, places, store, texts

from vlmpack.collate import SkipLimit, VLMCollator
from vlmpack.errors import ConfigError, SampleError
from vlmpack.layout import SlotRule
from vlmpack.plan import LengthTable, Plan
from vlmpack.store import PackedDataset, StoreSettings, write_rows
from vlmpack.store.manifest import Manifest
from vlmpack.store.write import WorkFolder

BROKEN = {"messages": [{"role": "user", "content": "?"}], "id": "broken"}
"""Nothing to learn."""
LENIENT = {"on_bad": "skip", "skip_limit": SkipLimit(max_bad_fraction=0.5)}


# ---------------------------------------------------------------------- what is written


def test_a_store_holds_every_sample_once_in_files_of_so_many_rows(tmp_path):
    manifest = store(tmp_path, texts())
    dataset = PackedDataset(tmp_path)
    assert sorted(chain(*places(dataset))) == list(range(12))
    assert [shard.rows for shard in manifest.shards] == [2] * (len(dataset) // 2) + [1] * (len(dataset) % 2)
    assert len(manifest.shards) > 1
    assert manifest.counts.total == manifest.counts.samples == 12
    assert {path.name for path in tmp_path.iterdir()} == {
        "manifest.json",
        "lengths.zip",
        "plan.zip",
        "left_out.jsonl",
        *(shard.file for shard in manifest.shards),
    }


def test_the_same_call_writes_the_same_bytes_which_can_be_read_on_their_own(tmp_path):
    manifest = store(tmp_path / "one", mixed(), seed=1)
    store(tmp_path / "two", mixed(), seed=1)
    store(tmp_path / "other", mixed(), seed=2)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert digests(tmp_path / "one") != digests(tmp_path / "other")
    assert {shard.file: shard.sha256 for shard in manifest.shards}.items() <= digests(tmp_path / "one").items()
    table, plan = LengthTable.load(tmp_path / "one" / "lengths.zip"), Plan.load(tmp_path / "one" / "plan.zip")
    assert plan.check().digest == manifest.plan
    assert [table.sample_ids[row].tolist() for row in plan] == places(PackedDataset(tmp_path / "one"))
    assert Manifest.load(tmp_path / "one") == manifest


@pytest.mark.dist
def test_workers_write_the_same_bytes(tmp_path):
    store(tmp_path / "alone", mixed())
    made = StoreSettings(capacity=CAPACITY, shard_rows=2)
    write_rows(mixed(), tmp_path / "workers", packing(), made, workers=2)
    assert digests(tmp_path / "alone") == digests(tmp_path / "workers")


def test_encoded_images_are_stored_as_they_lie_and_pixels_never(tmp_path):
    import pyarrow.parquet as pq

    jpeg = encoded(picture(90, 61), "JPEG")
    manifest = store(tmp_path, [chat("?", "a", jpeg), chat("?", "b", picture(64, 64))])
    (row,) = pq.read_table(tmp_path / manifest.shards[0].file).to_pylist()
    first, second = (image["bytes"] for image in row["images"])
    assert first == jpeg
    assert Image.open(io.BytesIO(second)).format == "PNG"
    assert not [name for name in row if "pixel" in name]


def test_the_files_open_as_a_dataset_with_images(tmp_path):
    datasets = pytest.importorskip("datasets")
    samples = [chat(f"{n}?", "yes", picture(64 + 8 * n, 64, seed=n), id=f"s{n}") for n in range(9)]
    store(tmp_path / "rows", samples)
    files = sorted(str(path) for path in (tmp_path / "rows").glob("rows-*.parquet"))
    table = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))["train"]
    assert [[json.loads(name) for name in row] for row in table["sample_ids"]] == [
        [f"s{place}" for place in row] for row in places(PackedDataset(tmp_path / "rows"))
    ]
    assert table[0]["cu_seqlens"][-1] == len(table[0]["input_ids"]) == len(table[0]["labels"])
    pictures = table.cast_column("images", datasets.List(datasets.Image()))[0]["images"]
    first = places(PackedDataset(tmp_path / "rows"))[0]
    assert [image.size for image in pictures] == [(64 + 8 * place, 64) for place in first]


def test_rows_of_a_data_set_with_images_are_read_encoded(tmp_path):
    """What `datasets` would decode is stored as its file."""
    datasets = pytest.importorskip("datasets")
    jpeg = encoded(picture(90, 61), "JPEG")
    rows = {
        "prompt": [[{"role": "user", "content": "?"}]],
        "completion": [[{"role": "assistant", "content": "a"}]],
        "image": [{"bytes": jpeg, "path": None}],
    }
    turn = [{"role": datasets.Value("string"), "content": datasets.Value("string")}]
    features = datasets.Features({"prompt": turn, "completion": turn, "image": datasets.Image()})
    store(tmp_path, datasets.Dataset.from_dict(rows, features=features))
    (sample,) = (sample for _, sample in PackedDataset(tmp_path)._read(0))
    assert sample.images[0].source.source["bytes"] == jpeg


# ---------------------------------------------------------------------- what is planned


def test_limits_of_images_patches_and_samples_are_kept(tmp_path):
    samples = [chat(f"{n}?", "a", picture(64, 64, seed=n)) for n in range(9)]
    sizes = store(tmp_path / "plain", samples).sizes
    assert (sizes.most_images, sizes.most_patches, sizes.most_segments) == (5, 80, 5)  # the guard
    assert store(tmp_path / "images", samples, max_images=2).sizes.most_images == 2
    assert store(tmp_path / "patches", samples, max_patches=50).sizes.most_patches == 48
    few = packing(slots=SlotRule(max_segments=3))
    assert store(tmp_path / "samples", samples, few).sizes.most_segments == 3


def test_the_number_of_rows_can_be_made_a_multiple(tmp_path):
    rows = store(tmp_path / "plain", texts()).counts.rows
    assert rows % 4
    made = store(tmp_path / "even", texts(), rows_multiple=4)
    assert made.counts.rows == rows + -rows % 4
    assert made.counts.samples == 12


@pytest.mark.parametrize("oversize", ["drop", "own_row"])
def test_a_sample_that_exceeds_a_row_is_listed_or_alone(tmp_path, oversize):
    long = chat("?", "a " * 200, id="long")
    manifest = store(tmp_path, [long, *texts(4)], oversize=oversize)
    listed = [json.loads(line) for line in (tmp_path / "left_out.jsonl").read_text().splitlines()]
    if oversize == "own_row":
        assert [0] in places(PackedDataset(tmp_path)) and not listed
        return
    assert (manifest.counts.dropped, manifest.counts.samples, manifest.reasons) == (1, 4, {"oversize": 1})
    assert [(one["index"], one["sample_id"], one["reason"]) for one in listed] == [(0, "long", "oversize")]
    assert "a row holds 96" in listed[0]["detail"]


def test_a_sample_that_exceeds_a_row_stops_by_default_and_is_named_by_its_place(tmp_path):
    samples = [BROKEN, *texts(4), chat("?", "a " * 200, id="long")]
    collator = packing(**LENIENT)
    with pytest.raises(
        SampleError, match=r"sample 5 \(id 'long'\): does not fit a row of 96 tokens. 1 of 6 samples do not: 5 \(\d+ "
    ) as caught:
        store(tmp_path, samples, collator)
    assert (caught.value.index, caught.value.sample_id, caught.value.reason) == (5, "long", "overlength")
    made = store(tmp_path, samples, collator, oversize="drop")  # other settings may follow until there is a plan
    assert made.reasons == {"no_targets": 1, "oversize": 1}


# ---------------------------------------------------------------------- bad samples


def test_a_bad_sample_stops_by_default(tmp_path):
    with pytest.raises(
        SampleError, match=r"sample 2 \(id 'broken'\): none of its .* 2 sample\(s\) cannot be used"
    ) as e:
        store(tmp_path, [*texts(2), BROKEN, BROKEN])
    assert e.value.reason == "no_targets"


def test_skipped_samples_are_counted_and_listed(tmp_path):
    manifest = store(tmp_path, [BROKEN, *texts(3), BROKEN], packing(**LENIENT))
    assert (manifest.counts.total, manifest.counts.refused, manifest.counts.samples) == (5, 2, 3)
    assert manifest.reasons == {"no_targets": 2}
    listed = [json.loads(line) for line in (tmp_path / "left_out.jsonl").read_text().splitlines()]
    assert [(one["index"], one["sample_id"], one["reason"]) for one in listed] == [
        (0, "broken", "no_targets"),
        (4, "broken", "no_targets"),
    ]


def test_too_many_bad_samples_stop_as_in_training(tmp_path):
    with pytest.raises(ConfigError, match=r"20 samples in a row .*max_consecutive_bad=20"):
        store(tmp_path, [*texts(3), *[BROKEN] * 20], packing(on_bad="skip"))
    with pytest.raises(ConfigError, match="none of 2 samples can be packed"):
        store(tmp_path / "all", [BROKEN, BROKEN], packing(on_bad="skip"))


def test_patches_are_not_stored(tmp_path):
    out = VLMCollator(processor_of()).collate([chat("?", "a", picture(64, 64))]).to_hf()
    sample = {
        "input_ids": out["input_ids"][0],
        "pixel_values": out["pixel_values"],
        "image_grid_thw": out["image_grid_thw"],
    }
    with pytest.raises(ConfigError, match=r"brings patches \(pixel_values\).*encoded images, never with pixels"):
        store(tmp_path, [sample])


def test_a_data_set_that_changes_meanwhile_is_told(tmp_path):
    class Changing(Counting):
        def __getitem__(self, index):
            self.reads[index] += 1
            return chat(f"{index}?", "a " * (1 + self.reads[index] // 2 * (index == 1)))

    with pytest.raises(SampleError, match=r"sample 1 .*it has 15 tokens and 4 targets, and had 14 tokens "):
        store(tmp_path, Changing([0] * 3))


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("collator", "told"),
    [
        (lambda: VLMCollator(processor_of()), "layout='padded'"),
        (lambda: packing(slots=SlotRule(pad_to=96)), r"PackedDataset\(pad_to_max_length=True\)"),
        (lambda: packing(slots=SlotRule(multiple=7)), "96 tokens is no multiple of 7, .* choose 91 or 98"),
        (lambda: packing(slots=SlotRule(multiple=2, row_multiple=64)), "no multiple of 64, .* choose 64 or 128"),
    ],
)
def test_a_collator_whose_rows_cannot_be_stored_is_refused(tmp_path, collator, told):
    with pytest.raises(ConfigError, match=told):
        store(tmp_path, texts(), collator())


@pytest.mark.parametrize(
    "settings",
    [{"capacity": 0}, {"shard_rows": 0}, {"max_images": -1}, {"rows_multiple": 0},
     {"oversize": "keep"}, {"strategy": "luck"}, {"seed": -1}],
)  # fmt: skip
def test_settings_that_do_not_exist_are_refused(settings):
    with pytest.raises(ConfigError):
        StoreSettings(**{"capacity": 8, **settings})


def test_samples_must_have_places(tmp_path):
    with pytest.raises(ConfigError, match="a generator does not have"):
        store(tmp_path, (sample for sample in texts()))
    with pytest.raises(ConfigError, match="data set is empty"):
        store(tmp_path, [])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"capacity": 128}, "settings.capacity was 96 and is 128"),
        ({"seed": 5}, "settings.seed was null and is 5"),
        ({"collator": {"max_length": 90}}, "settings.collator.max_length was null and is 90"),
        ({"collator": {"slots": SlotRule(multiple=2)}}, "settings.slots.multiple was 1 and is 2"),
        ({"samples": texts(13)}, "settings.data.samples was 12 and is 13"),
        ({"samples": [*texts(11), BROKEN]}, r"other samples than the data set: 1 were changed .* \(at 11\)"),
        ({"family": "qwen2_vl"}, "processor.images.patch_size was 16 and is 14"),
    ],
)
def test_other_settings_data_or_processors_do_not_go_into_the_same_folder(tmp_path, change, told):
    store(tmp_path, texts())
    before = digests(tmp_path)
    collator = packing(change.pop("family", "qwen3_vl"), **change.pop("collator", {}))
    with pytest.raises(ConfigError, match=told):
        store(tmp_path, change.pop("samples", texts()), collator, **change)
    assert digests(tmp_path) == before


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"no store and not empty \(thesis.tex\)"):
        store(tmp_path, texts())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


# ---------------------------------------------------------------------- again


def test_a_finished_store_is_not_written_again(tmp_path):
    manifest = store(tmp_path, texts())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    samples = Counting(texts())
    again = store(tmp_path, samples)
    assert again.to_json() == manifest.to_json()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert samples.reads == Counter(range(12))  # compared with what is stored


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    """A limit on the size of a file stands for a full disk: the system answers alike."""
    samples = [*texts(6), chat("?", "a", picture(300, 300))]
    whole = store(tmp_path / "whole", samples)
    sizes = [shard.bytes for shard in whole.shards]
    assert sizes[0] < sizes[-1] // 2
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[-1] // 2, hard))
    try:
        with pytest.raises(
            ConfigError, match=rf"{whole.shards[-1].file} cannot be written: .*what is finished is kept"
        ):
            store(tmp_path / "full", samples)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "full" / ".work" / "unfinished").iterdir())
    assert [(tmp_path / "full" / s.file).exists() for s in whole.shards] == [True] * (len(sizes) - 1) + [False]
    store(tmp_path / "full", samples)
    assert digests(tmp_path / "full") == digests(tmp_path / "whole")


@pytest.mark.dist
def test_two_processes_do_not_write_the_same_store(tmp_path):
    with WorkFolder(out=tmp_path).locked():
        child = os.fork()
        if not child:
            try:
                with WorkFolder(out=tmp_path).locked():
                    os._exit(1)
            except ConfigError as error:
                os._exit(0 if "another process is writing" in str(error) else 2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_progress_is_told_stage_by_stage(tmp_path):
    told = []
    settings = StoreSettings(capacity=CAPACITY, shard_rows=2)
    manifest = write_rows(texts(), tmp_path, packing(), settings, progress=lambda *seen: told.append(seen))
    files = len(manifest.shards)
    assert told[-files - 1 :] == [("write", n, files) for n in range(files + 1)]
    assert ("measure", 12, 12) in told


def test_half_of_a_surrogate_pair_in_an_id_is_kept(tmp_path):
    half = json.loads('"\\ud83d"')
    samples = [*texts(4), chat("?", "a", id=f"sum {half}"), chat("?", "a", id="Größe 👍"), {**BROKEN, "id": half}]
    manifest = store(tmp_path, samples, packing(**LENIENT))
    dataset = PackedDataset(tmp_path)
    ids = {sample.sample_id for row in range(len(dataset)) for sample in dataset.measured(row)}
    assert {f"sum {half}", "Größe 👍"} < ids
    (listed,) = (json.loads(line) for line in (tmp_path / "left_out.jsonl").read_text().splitlines())
    assert (listed["sample_id"], manifest.reasons) == (half, {"no_targets": 1})


def test_numbers_of_numpys_are_settings_like_pythons(tmp_path):
    def write(folder, number):
        numbers = {name: number(2) for name in ("seed", "shard_rows", "rows_multiple")}
        return store(folder, texts(), packing(max_length=number(90)), capacity=number(96), **numbers)

    manifest = write(tmp_path / "numpy", np.int64)
    assert manifest == write(tmp_path / "python", int) == Manifest.load(tmp_path / "numpy")
    assert digests(tmp_path / "numpy") == digests(tmp_path / "python")
    assert write(tmp_path / "numpy", int) == manifest  # the store is known again
