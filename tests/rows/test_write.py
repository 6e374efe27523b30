"""write_rows: what is written, planned and refused, and what the folder has to hold."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from chats import chat, picture, processor_of
from PIL import Image
from plan.naive import checked
from stores import CAPACITY, Counting, digests, encoded, mixed, packing, places, store, texts

from vlmpack.collate import SharePrefixes, SkipLimit, VLMCollator
from vlmpack.errors import ConfigError, SampleError
from vlmpack.layout import SlotRule
from vlmpack.plan import LengthTable, Plan
from vlmpack.rows import Manifest, PackedDataset, StoreSettings, _locked, write_rows

BROKEN = {"messages": [{"role": "user", "content": "?"}], "id": "broken"}
"""Nothing to learn."""
LONG = chat("?", "a " * 200, id="long")
LENIENT: dict[str, Any] = {"on_bad": "skip", "skip_limit": SkipLimit(max_bad_fraction=0.5)}


def left_out(folder: Path) -> list[tuple[Any, ...]]:
    lines = map(json.loads, (folder / "left_out.jsonl").read_text().splitlines())
    return [(line["index"], line["sample_id"], line["reason"]) for line in lines]


# ---------------------------------------------------------------------- what is written


def test_every_sample_is_in_one_row_and_the_manifest_counts_them(tmp_path):
    manifest = store(tmp_path, mixed(), seed=1)
    dataset = PackedDataset(tmp_path, processor_of())
    rows = [dataset.row(at) for at in range(len(dataset))]
    assert sorted(chain(*places(dataset))) == list(range(len(mixed())))
    assert [shard.rows for shard in manifest.shards] == [2] * (len(rows) // 2) + [1] * (len(rows) % 2) != [len(rows)]
    beside = {"manifest.json", "lengths.zip", "plan.zip", "left_out.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == beside | {shard.file for shard in manifest.shards}
    table, plan = LengthTable.load(tmp_path / "lengths.zip"), Plan.load(tmp_path / "plan.zip")
    assert len(table) == manifest.counts.total == manifest.counts.samples
    assert [row.tolist() for row in checked(plan)] == places(dataset) and plan.digest == manifest.plan
    grids = [[medium.grid for medium in row.metadata.media.media] for row in rows]
    patches = [sum(int(np.prod(grid)) for grid in row) for row in grids]
    assert manifest.counts.tokens == sum(row.segments.num_tokens for row in rows)
    assert manifest.counts.targets == sum(row.metadata.num_targets for row in rows)
    assert manifest.counts.images + manifest.counts.videos == sum(map(len, grids)) > 0
    assert manifest.counts.patches == sum(patches)
    assert manifest.sizes.longest_row == max(row.segments.total for row in rows)
    assert manifest.sizes.longest_segment == max(max(row.segments.lengths) for row in rows)
    assert manifest.sizes.most_segments == max(len(row.segments.lengths) for row in rows)
    assert (manifest.sizes.most_images, manifest.sizes.most_patches) == (max(map(len, grids)), max(patches))
    assert manifest.fill_ratio == pytest.approx(manifest.counts.tokens / (CAPACITY * len(rows)), abs=1e-6)
    assert Manifest.load(tmp_path) == manifest
    assert str(tmp_path) not in (tmp_path / "manifest.json").read_text()


@pytest.mark.dist
def test_the_same_call_writes_the_same_bytes_by_workers_too(tmp_path):
    store(tmp_path / "one", mixed())
    made = StoreSettings(capacity=CAPACITY, shard_rows=2)
    write_rows(mixed(), tmp_path / "workers", packing(), made, workers=2)
    store(tmp_path / "other", mixed(), seed=2)
    assert digests(tmp_path / "one") == digests(tmp_path / "workers") != digests(tmp_path / "other")


def test_encoded_images_are_stored_as_they_lie_each_once_a_row_and_pixels_never(tmp_path):
    jpeg = encoded(picture(90, 61), "JPEG")
    manifest = store(tmp_path, [chat("?", "a", jpeg), chat("?", "b", picture(64, 64)), chat("??", "b", jpeg)])
    (row,) = pq.read_table(tmp_path / manifest.shards[0].file).to_pylist()
    first, second = (image["bytes"] for image in row["images"])
    assert first == jpeg
    assert Image.open(io.BytesIO(second)).format == "PNG"
    assert not [name for name in row if "pixel" in name]


def test_the_files_open_as_a_data_set_with_images(tmp_path):
    datasets = pytest.importorskip("datasets")
    samples = [chat(f"{n}?", "yes", picture(64 + 8 * n, 64, seed=n), id=f"s{n}") for n in range(9)]
    store(tmp_path / "rows", samples)
    files = sorted(str(path) for path in (tmp_path / "rows").glob("rows-*.parquet"))
    table = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))["train"]
    rows = places(PackedDataset(tmp_path / "rows"))
    assert [[json.loads(name) for name in row] for row in table["sample_ids"]] == [
        [f"s{n}" for n in row] for row in rows
    ]
    assert table[0]["cu_seqlens"][-1] == len(table[0]["input_ids"]) == len(table[0]["labels"])
    pictures = table.cast_column("images", datasets.List(datasets.Image()))[0]["images"]
    assert [image.size for image in pictures] == [(64 + 8 * place, 64) for place in rows[0]]


# ---------------------------------------------------------------------- what is planned


def test_limits_of_images_patches_and_samples_are_kept(tmp_path):
    samples = [chat(f"{n}?", "a", picture(64, 64, seed=n)) for n in range(9)]
    sizes = store(tmp_path / "plain", samples).sizes
    assert (sizes.most_images, sizes.most_patches, sizes.most_segments) == (5, 80, 5)  # the guard
    assert store(tmp_path / "images", samples, max_images=2).sizes.most_images == 2
    assert store(tmp_path / "patches", samples, max_patches=50).sizes.most_patches == 48
    few = packing(slots=SlotRule(max_segments=3))
    assert store(tmp_path / "samples", samples, few).sizes.most_segments == 3
    rows = store(tmp_path / "rows", texts()).counts.rows
    assert rows % 4 and store(tmp_path / "even", texts(), rows_multiple=4).counts.rows == rows + -rows % 4


def test_a_sample_that_exceeds_a_row_stops_is_dropped_or_alone(tmp_path):
    samples, collator = [BROKEN, *texts(4), LONG], packing(**LENIENT)
    with pytest.raises(
        SampleError, match=r"sample 5 \(id 'long'\): does not fit a row of 96 tokens. 1 of 6 samples do not: 5 \(\d+ "
    ) as caught:
        store(tmp_path / "rows", samples, collator)
    assert (caught.value.index, caught.value.sample_id, caught.value.reason) == (5, "long", "overlength")
    manifest = store(tmp_path / "rows", samples, collator, overlength="drop")  # there was no plan yet
    assert (manifest.counts.refused, manifest.counts.dropped, manifest.counts.samples) == (1, 1, 4)
    assert left_out(tmp_path / "rows") == [(0, "broken", "no_targets"), (5, "long", "overlength")]
    assert "a row holds 96" in (tmp_path / "rows" / "left_out.jsonl").read_text()
    manifest = store(tmp_path / "alone", samples, collator, overlength="own_row")
    assert [5] in places(PackedDataset(tmp_path / "alone")) and manifest.sizes.longest_row > CAPACITY
    with pytest.raises(ConfigError, match=rf"pads rows to 96 tokens, but the longest has {manifest.sizes.longest_row}"):
        PackedDataset(tmp_path / "alone", fixed_sizes=True)


def test_bad_samples_stop_by_default_are_skipped_up_to_the_limit_and_never_all(tmp_path):
    with pytest.raises(SampleError, match=r"sample 2 \(id 'broken'\): none of its .* 2 of 4 samples cannot be used"):
        store(tmp_path, [*texts(2), BROKEN, BROKEN])
    assert store(tmp_path, [BROKEN, *texts(3)], packing(**LENIENT)).reasons == {"no_targets": 1}
    with pytest.raises(ConfigError, match=r"20 samples in a row .*max_consecutive_bad=20"):
        store(tmp_path / "many", [*texts(3), *[BROKEN] * 20], packing(on_bad="skip"))
    with pytest.raises(ConfigError, match=r"no sample can be used \(no_targets 2\)"):
        store(tmp_path / "all", [BROKEN, BROKEN], packing(on_bad="skip"))


# ---------------------------------------------------------------------- what is refused


def test_patches_are_not_stored(tmp_path):
    out = VLMCollator(processor_of()).collate([chat("?", "a", picture(64, 64))]).to_hf()
    sample = {"input_ids": out["input_ids"][0], **{name: out[name] for name in ("pixel_values", "image_grid_thw")}}
    with pytest.raises(ConfigError, match=r"brings patches \(pixel_values\).*encoded images, never with pixels"):
        store(tmp_path, [sample])


def test_a_data_set_that_changes_meanwhile_is_noticed(tmp_path):
    class Changing(Counting):
        def __getitem__(self, index):
            self.reads[index] += 1
            return chat(f"{index}?", "a " * (1 + self.reads[index] // 2 * (index == 1)))

    with pytest.raises(SampleError, match=r"sample 1 .*it has 15 tokens, 4 of them targets; when measured 14 and 3"):
        store(tmp_path, Changing([0] * 3))


OPEN = r"'chats\.jsonl' is a path: open it with vlmpack\.data\.open_dataset\(path\)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": "chats.jsonl"}, OPEN),
        ({"samples": {"train": texts()}}, "got a dict with the keys 'train'; if they are splits, give one of them"),
        ({"samples": iter(texts())}, "samples with places, and this list_iterator has none"),
        ({"samples": []}, "this list has none"),
        ({"collator": processor_of()}, r"collator has to be a VLMCollator, such as VLMCollator\(processor, layout="),
        ({"collator": VLMCollator(processor_of())}, r"stored by VLMCollator\(layout='packed'\) without slots.pad_to"),
        ({"collator": packing(slots=SlotRule(pad_to=96))}, r"PackedDataset\(fixed_sizes=True\)"),
        ({"collator": packing(slots=SlotRule(multiple=7))}, "96 tokens is no multiple of 7, .* choose 91 or 98"),
        ({"capacity": 0}, "StoreSettings.capacity must be a whole number of at least 1"),
        ({"max_images": -1}, "StoreSettings.max_images"),
        ({"overlength": "keep"}, "overlength must be one of"),
        ({"strategy": "luck"}, "strategy must be one of"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        store(tmp_path / "rows", **{"samples": texts(), **arguments})
    assert not (tmp_path / "rows").exists()


def test_what_is_no_setting_or_executor_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"settings has to be a StoreSettings, .* got a int"):
        write_rows(texts(), tmp_path, packing(), 1500)  # pyright: ignore
    with pytest.raises(ConfigError, match="executor must be one of local, ray, got 'slurm'"):
        write_rows(texts(), tmp_path, packing(), StoreSettings(capacity=96), executor="slurm")  # pyright: ignore


# ---------------------------------------------------------------------- the folder


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"capacity": 128}, "settings.capacity was 96 and is 128"),
        ({"seed": 5}, "settings.seed was null and is 5"),
        ({"collator": packing(max_length=90)}, "settings.collator.max_length was null and is 90"),
        ({"collator": packing(slots=SlotRule(multiple=2))}, "slots.multiple was 1 and is 2"),
        ({"collator": packing(share_prefixes=SharePrefixes())}, r"share_prefixes was null and is \{"),
        ({"collator": packing("qwen2_vl")}, "processor.images.patch_size was 16 and is 14"),
        ({"samples": texts(13)}, "settings.samples was 12 and is 13"),
        ({"samples": [*texts(11), BROKEN]}, r"other samples than the data set: 1 were changed .* \(at 11\)"),
    ],
    ids=str,
)
def test_other_settings_samples_or_processors_do_not_go_into_the_same_folder(tmp_path, change, told):
    store(tmp_path, texts())
    before = digests(tmp_path)
    with pytest.raises(ConfigError, match=told):
        store(tmp_path, **{"samples": texts(), **change})
    assert digests(tmp_path) == before


def test_finished_rows_are_compared_and_not_written_again(tmp_path):
    manifest = store(tmp_path, texts(), seed=np.int64(2), shard_rows=np.int64(3))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    (tmp_path / ".work").mkdir()  # the run was killed just before it removed that
    samples = Counting(texts())
    assert store(tmp_path, samples, seed=2, shard_rows=3) == manifest
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert set(samples.reads) == set(range(12))


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"no folder of rows and not empty \(thesis.tex\)"):
        store(tmp_path, texts())
    with pytest.raises(ConfigError, match=r"thesis.tex cannot be written: .* Choose another name or folder"):
        store(tmp_path / "thesis.tex", texts())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.dist
def test_two_processes_do_not_write_into_one_folder(tmp_path):
    with _locked(tmp_path):
        child = os.fork()
        if not child:
            try:
                with _locked(tmp_path):
                    os._exit(1)
            except ConfigError as error:
                os._exit(0 if "another process is writing" in str(error) else 2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    """A limit on the size of a file stands for a full disk: the system answers alike."""
    samples = [*texts(6), chat("?", "a", picture(300, 300))]
    sizes = [shard.bytes for shard in store(tmp_path / "whole", samples).shards]
    assert sizes[0] < sizes[-1] // 2
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[-1] // 2, hard))
    try:
        with pytest.raises(ConfigError, match=r"rows-\S+ cannot be written: .*what is finished is kept"):
            store(tmp_path / "full", samples)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "full").glob(".*")] == [".work"]
    assert len(list((tmp_path / "full").glob("rows-*"))) == len(sizes) - 1
    store(tmp_path / "full", samples)
    assert digests(tmp_path / "full") == digests(tmp_path / "whole")


def test_an_error_of_the_data_set_is_no_error_of_the_folder(tmp_path):
    class Failing(list):
        def __getitem__(self, at):  # pyright: ignore
            if at == 3:
                raise PermissionError(errno.EACCES, "of the data set")
            return super().__getitem__(at)

    with pytest.raises(PermissionError, match="of the data set"):
        store(tmp_path, Failing(texts()))
