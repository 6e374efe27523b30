"""PackedDataset: a stored row is what the collator makes of the same samples, and trains as they do alone."""

from __future__ import annotations

import json
import math
import pickle
import random
import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import json_lines, slow
from chats import BEYOND, chat, of_family, picture, processor_of
from clips import clip_bytes
from fixtures.processors import tiny_processor
from mutations import check, damaged, edited, outcomes
from stores import CAPACITY, asked, check_same, encoded, frames, mixed, packing, places, store, texts
from torch.utils.data import DataLoader

from vlmpack.collate import FrameSampling, SharePrefixes, VLMCollator
from vlmpack.errors import ConfigError, FamilyError, SampleError
from vlmpack.layout import PackedRow, SlotRule
from vlmpack.layout.media import VIDEO
from vlmpack.loading import PackedBatchSampler
from vlmpack.plan import Plan, plan_bins
from vlmpack.rows import Manifest, PackedDataset

SHARING = SharePrefixes(min_shared=8)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Rows of every kind of sample, and the samples."""
    folder = tmp_path_factory.mktemp("kept")
    samples = mixed(folder)
    store(folder / "rows", samples, rows_multiple=2)
    return folder / "rows", samples


@pytest.fixture(scope="module")
def dataset(kept):
    return PackedDataset(kept[0], processor_of())


def check_rows(dataset: PackedDataset, samples: Sequence[Any], collator: VLMCollator) -> list[PackedRow]:
    """Each row is what the collator makes of its samples, and each sample is in one."""
    assert sorted(chain(*places(dataset))) == list(range(len(samples)))
    rows = [dataset.row(at) for at in range(len(dataset))]
    for row, row_places in zip(rows, places(dataset), strict=True):
        check_same(row, collator.collate([samples[place] for place in row_places]))
    return rows


# ---------------------------------------------------------------------- equality


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", *slow("qwen2_5_vl")])
def test_a_stored_row_is_what_the_collator_makes_of_its_samples(tmp_path, family):
    samples = mixed(tmp_path)
    store(tmp_path / "rows", samples, packing(family))
    rows = check_rows(PackedDataset(tmp_path / "rows", processor_of(family)), samples, packing(family))
    assert len(rows) > 1 and max(len(row.segments.lengths) for row in rows) > 1


def test_weights_and_channels_come_back(tmp_path):
    samples = [{**chat("Total?", f"It is {n}", id=n), "channel": ("even", "odd")[n % 2]} for n in range(6)]
    for n, sample in enumerate(samples):
        sample["messages"][1]["weight"] = 1 + n % 3 / 2
    store(tmp_path / "rows", samples)
    rows = check_rows(PackedDataset(tmp_path / "rows", processor_of()), samples, packing())
    assert any(row.shift_weights is not None for row in rows)
    assert all(row.metadata.channels for row in rows)


def test_a_teachers_entries_come_back(tmp_path):
    samples = [chat("Total?", f"It is {n}", id=n) for n in range(6)]
    for sample in samples[1::2]:
        count, rng = packing().measure(sample).num_tokens, torch.Generator().manual_seed(len(sample))
        sample["topk_ids"] = torch.rand(count, 300, generator=rng).argsort(1)[:, :4].tolist()
        sample["topk_logprobs"] = torch.randn(count, 4, generator=rng).log_softmax(1).sub(0.1).tolist()
    store(tmp_path / "rows", samples)
    rows = check_rows(PackedDataset(tmp_path / "rows", processor_of()), samples, packing())
    assert any((row.extras["topk_ids"] > 0).any() for row in rows)
    samples[1]["topk_logprobs"][-1][0] -= 1
    with pytest.raises(ConfigError, match=r"1 were changed since they were packed \(at 1\)"):
        store(tmp_path / "rows", samples)


@pytest.mark.parametrize("sharing", [False, SHARING], ids=["apart", "shared"])
@pytest.mark.parametrize("family", ["llava_onevision", *slow(*(name for name in BEYOND[1::2] if name != "paligemma"))])
def test_rows_of_every_family_with_a_processor_are_stored(tmp_path, family, sharing):
    first, second = encoded(picture(190, 61, seed=0), "JPEG"), encoded(picture(90, 61, seed=1), "JPEG")
    about = [(first,), (second,), (first, second)]
    asked_about = [(question, images) for images in about for question in ("Total?", "Who is it?")]
    samples = [{**of_family(family, q, "5", *images), "id": at} for at, (q, images) in enumerate(asked_about)]
    collator = VLMCollator(tiny_processor(family), layout="packed", share_prefixes=sharing)
    total = sum(collator.measure(sample).num_tokens for sample in samples)
    store(tmp_path / "rows", samples, collator, capacity=total * 2 // 3)
    dataset = PackedDataset(tmp_path / "rows", collator.processor)
    rows = check_rows(dataset, samples, collator)
    assert [row.tree for row in rows] == list(map(dataset.tree, range(len(dataset))))
    computed = [row.segments.num_tokens if row.tree is None else row.tree.num_tokens for row in rows]
    assert max(computed) <= total * 2 // 3
    assert sum(computed) < total if sharing else sum(computed) == total
    collator.processor.image_processor.image_mean = [0.1] * 3
    with pytest.raises(ConfigError, match=r"another processor: images\.settings was"):
        PackedDataset(tmp_path / "rows", collator.processor)


def test_prompts_that_see_all_of_themselves_are_not_stored(tmp_path):
    sample = of_family("paligemma", "Total?", "5", picture(90, 61))
    with pytest.raises(ConfigError, match="the prompts of a PaliGemmaProcessor see all of themselves, and stored rows"):
        store(tmp_path, [sample], VLMCollator(tiny_processor("paligemma"), layout="packed"))


def test_truncated_samples_are_stored_as_they_were_cut(tmp_path):
    samples = [chat("Which?", "The last", *(picture(64, 64, seed=n) for n in range(3)), id=n) for n in range(3)]
    cut = {"train_on": "all", "max_length": 14, "overlength": "truncate"}
    assert store(tmp_path, samples, packing(**cut)).counts.images < 9  # the guard: something was cut
    check_rows(PackedDataset(tmp_path, processor_of()), samples, packing(**cut))


def test_tokenized_samples_keep_their_labels_and_an_end_of_text_that_is_trained_on(tmp_path):
    """Where real lengths are looked up as the last token that is not end-of-text, it is lost."""
    tokenizer = processor_of().tokenizer
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    samples = [{"input_ids": [5, 6, end], "labels": [-100, 6, end]}, {"input_ids": [7, pad], "completion_mask": [0, 1]}]
    store(tmp_path, samples, packing(), capacity=8)
    row = PackedDataset(tmp_path, processor_of(), fixed_sizes=True).row(0)
    assert row.segments.lengths == (3, 2) and row.metadata.sample_ids == (0, 1)
    assert row.shift_labels is not None and row.shift_labels[0].tolist() == [6, end, -100, pad, *[-100] * 4]
    assert row.input_ids[0, 5:].tolist() == [pad] * 3  # the guard: padding looks the same


def test_a_file_of_a_video_is_stored_whole_and_its_frames_are_decided(tmp_path):
    path, few = tmp_path / "clip.mp4", {"sampling": FrameSampling(fps=None, num_frames=6)}
    path.write_bytes(clip_bytes())
    keys = {"min_pixels": 1024, "max_pixels": 6144}
    timed = asked({"type": "video", "video": str(path), **keys, "fps": 3, "video_end": 1.5}, id="film")
    samples = [timed, asked({"type": "video", "video": clip_bytes(), **keys}), *texts(4)]
    store(tmp_path / "rows", samples, packing(**few), capacity=400)
    dataset = PackedDataset(tmp_path / "rows", processor_of())
    rows = check_rows(dataset, samples, packing(**few))
    assert 3 in [grid[0] for row in rows for grid in row.metadata.media.grids(VIDEO)]
    path.unlink()
    for at, row in enumerate(rows):
        check_same(dataset.row(at), row)


# ---------------------------------------------------------------------- shared prefixes


def questions() -> list[dict]:
    """Three questions about each of four images, one about a video three times, and one about nothing."""
    asks = list(enumerate(("How much is it in all?", "Who sold it?", "When was it?")))
    about = [chat(q, f"{at} {n}", encoded(picture(90, 61, seed=n)), id=f"{n}-{at}") for n in range(4) for at, q in asks]
    film = {"type": "video", "video": frames(), "min_pixels": 2048, "max_pixels": 20000}
    films = [asked(film, answer, id=answer) for answer in ("yes", "no", "perhaps")]
    return [*about, *films, chat("2 + 2?", "4", id="sum")]


@pytest.mark.parametrize(("capacity", "multiple"), [(80, 8), (1600, 1)])
def test_rows_that_share_prefixes_have_the_tree_that_the_collator_finds_and_no_fixed_size(tmp_path, capacity, multiple):
    samples, collator = questions(), packing(share_prefixes=SHARING, slots=SlotRule(row_multiple=multiple))
    manifest = store(tmp_path, samples, collator, capacity=capacity)
    dataset, outlined = PackedDataset(tmp_path, processor_of()), PackedDataset(tmp_path)
    rows = check_rows(dataset, samples, collator)
    trees = [row.tree for row in rows]
    assert trees == [outlined.tree(at) for at in range(len(outlined))]
    assert sum(tree is not None for tree in trees) >= 4 if capacity == 80 else len(rows[0].media.image_grid_thw) == 4
    plan = Plan.load(tmp_path / "plan.zip")
    assert plan.groups is not None and plan.tree_tokens.max() <= capacity and dataset.plan.lengths.max() <= capacity
    computed = [plan.tokens[at] if tree is None else tree.num_tokens for at, tree in enumerate(trees)]
    assert all(now <= planned for now, planned in zip(computed, plan.tree_tokens, strict=True))
    media = [m for at in range(len(dataset)) for one in dataset.measured(at) for m in (*one.images, *one.videos)]
    patches = sum(math.prod(one.grid) for one in media)
    assert manifest.counts.patches < patches / 2 and 0 < manifest.fill_ratio <= 1
    with pytest.raises(ConfigError, match=r"the rows share prefixes: .* leave fixed_sizes"):
        PackedDataset(tmp_path, processor_of(), fixed_sizes=True)
    with pytest.raises(ConfigError, match="share_prefixes, sampling: decided when the rows were packed"):
        PackedDataset(tmp_path, processor_of(), share_prefixes=False, sampling=FrameSampling())


# ---------------------------------------------------------------------- fixed sizes


def test_rows_get_one_width_and_one_number_of_boundaries(tmp_path):
    store(tmp_path, texts(), packing(slots=SlotRule(multiple=4, row_multiple=8)))
    plain = PackedDataset(tmp_path, processor_of())
    fixed = PackedDataset(tmp_path, processor_of(), fixed_sizes=True)
    rows = [plain.row(at) for at in range(len(plain))]
    widths, most = [row.segments.total for row in rows], max(len(row.segments.lengths) for row in rows)
    assert len(set(widths)) > 1 and len({len(row.segments.lengths) for row in rows}) > 1  # the guard
    assert all(slot % 4 == 0 for row in rows for slot in row.segments.slots) and not any(w % 8 for w in widths)
    assert plain.plan.tokens.tolist() == [sum(row.segments.slots) for row in rows]
    assert (plain.manifest.sizes.longest_row, plain.manifest.sizes.most_segments) == (max(widths), most)
    for at, row in enumerate(rows):
        padded, samples, width = fixed.row(at), len(row.segments.lengths), row.segments.total
        assert padded.input_ids.shape == (1, CAPACITY) and bool(padded.moe_padding_mask[0, width:].all())
        assert torch.equal(padded.input_ids[:, :width], row.input_ids)
        assert len(padded.segments.cu_seqlens()) == most + 1
        assert padded.segments.real == (*row.segments.real, *[row.segments.real[-1]] * (most - samples))


# ---------------------------------------------------------------------- a data set


@pytest.mark.dist
def test_workers_and_pickles_get_the_same_rows(kept, dataset):
    dataset[0]  # files are open when the workers are made
    rows = [PackedRow.from_hf(batch) for batch in DataLoader(dataset, batch_size=None, num_workers=2)]
    copied, fresh = pickle.loads(pickle.dumps(dataset)), PackedDataset(kept[0], processor_of())
    assert len(pickle.dumps(dataset)) < len(pickle.dumps(fresh)) + 5000  # what was read stays here
    assert len(rows) == len(dataset)
    for at, row in enumerate(rows):
        check_same(row, dataset.row(at))
        check_same(row, copied.row(at))


def test_a_row_is_outlined_without_a_processor_or_an_image(kept, dataset):
    outlined = PackedDataset(kept[0])
    for at in range(len(outlined)):
        outline = outlined.measured(at)
        assert [sample.sample_id for sample in outline] == list(dataset.row(at).metadata.sample_ids)
        assert [sample.num_tokens for sample in outline] == list(dataset.row(at).segments.lengths)
        assert all(image.pixels is None and image.source is None for sample in outline for image in sample.images)
    for ask in (lambda: outlined[0], lambda: outlined.collate([])):
        with pytest.raises(ConfigError, match="need the processor"):
            ask()


def test_rows_are_numbered_and_dealt_to_ranks_by_a_sampler(dataset):
    assert torch.equal(dataset[-1]["input_ids"], dataset[len(dataset) - 1]["input_ids"])
    assert dataset.plan.tokens.tolist() == [dataset.row(at).segments.total for at in range(len(dataset))]
    sampler = PackedBatchSampler(dataset.plan, ranks=2, rank=0, remainder="empty")
    assert len(list(DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate))) == -(-len(dataset) // 2)
    for at in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match=f"row {at} of {len(dataset)}"):
            dataset.measured(at)
    with pytest.raises(TypeError, match="'str' object cannot be interpreted as an integer"):
        dataset["input_ids"]


def test_no_row_is_a_step_of_loss_0_and_two_rows_are_no_batch(dataset):
    assert dataset.collate([])["vlmpack"].num_targets == 0
    row = dataset[0]
    assert dataset.collate([row]) is dataset.collate(row) is row
    with pytest.raises(ConfigError, match=r"2 rows were put into one batch.*per_device_train_batch_size=1"):
        dataset.collate([row, row])


def test_another_processor_is_refused_by_what_differs(kept):
    with pytest.raises(ConfigError, match=r"images\.max_pixels was 262144 and is 65536"):
        PackedDataset(kept[0], tiny_processor(max_pixels=64 * 32 * 32))
    with pytest.raises(ConfigError, match=r"images.patch_size was 16 .*frame_timestamps was true and is false"):
        PackedDataset(kept[0], processor_of("qwen2_5_vl"))
    with pytest.raises(ConfigError, match=r"chat_template was \"\w+\" and is \"\w+\""):
        PackedDataset(kept[0], tiny_processor(chat_template="{{ messages }}"))
    with pytest.raises(ConfigError, match="vocabulary was"):
        PackedDataset(kept[0], tiny_processor(vocab_size=700))
    PackedDataset(kept[0], tiny_processor())  # the guard: an equal one is taken
    with pytest.raises(ConfigError, match="max_length, train_on: decided when the rows were packed"):
        PackedDataset(kept[0], processor_of(), max_length=7, train_on="all")
    with pytest.raises(FamilyError, match="VLMCollator"):
        PackedDataset(kept[0], packing())


# ---------------------------------------------------------------------- damage


def test_a_damaged_image_is_named_or_skipped_and_written_down(tmp_path):
    """The second of three images is damaged behind its header."""
    whole = encoded(picture(80, 80, seed=1), "JPEG")
    samples = [chat(f"{n}?", "yes", whole if n != 1 else whole[: len(whole) // 2], id=f"s{n}") for n in range(3)]
    store(tmp_path / "rows", samples)
    with pytest.raises(SampleError, match=r"sample 1 \(id 's1'\): image 0: .* damaged .*\(row 0 of .*rows-00000-of"):
        PackedDataset(tmp_path / "rows", processor_of())[0]
    skip_log = tmp_path / "bad.jsonl"
    row = PackedDataset(tmp_path / "rows", processor_of(), on_bad="skip", skip_log=skip_log).row(0)
    check_same(row, packing().collate([samples[0], samples[2]]))
    assert [(one["id"], one["reason"]) for one in json_lines(skip_log)] == [("s1", "image_undecodable")]


def test_files_that_are_gone_cut_damaged_or_older_are_refused_with_the_remedy(tmp_path):
    remedy = "restore it, or remove the folder and pack again"
    shard = tmp_path / store(tmp_path, texts()).shards[1].file
    content, manifest = shard.read_bytes(), tmp_path / "manifest.json"
    shard.write_bytes(bytes([*content[:60], content[60] ^ 1, *content[61:]]))
    PackedDataset(tmp_path, processor_of())[0]
    with pytest.raises(ConfigError, match=f"row 0 of .*{shard.name} is damaged: .*; {remedy}"):
        PackedDataset(tmp_path, processor_of())[2]
    shard.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=rf"{shard.name} is damaged: it has \d+ bytes, not {len(content)}; {remedy}"):
        PackedDataset(tmp_path)
    shard.write_bytes(content)
    for path in (shard, *(tmp_path / name for name in ("left_out.jsonl", "lengths.zip", "plan.zip"))):
        path.rename(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match=f"{path.name} is damaged: it is not there; {remedy}"):
            store(tmp_path, texts())
        (tmp_path / "elsewhere").rename(path)
    plan_bins([5, 3], 10).save(tmp_path / "plan.zip")
    with pytest.raises(ConfigError, match=rf"plan.zip is damaged: it is the plan of other rows; {remedy}"):
        len(PackedDataset(tmp_path).plan)
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 4}))
    with pytest.raises(ConfigError, match=r"vlmpack.rows of version 4, .* 9; remove the folder and pack again"):
        store(tmp_path, texts())
    with pytest.raises(ConfigError, match=r"holds no manifest.json.*`vlmpack pack`"):
        Manifest.load(tmp_path / "elsewhere")


@pytest.mark.parametrize("cases", [40, *slow(300)])
def test_after_any_accident_rows_are_the_same_or_refused(tmp_path, cases):
    """Bits, files and fields that are damaged, lost, swapped, or of rows of other samples of the same lengths."""
    files: list[dict[str, bytes]] = []
    for word, seed in (("5", 0), ("6", 9)):
        images = [chat(f"{n}?", "yes", encoded(picture(64, 48, seed=seed + n)), id=n) for n in range(3)]
        store(tmp_path / word, [*images, *(chat(f"{n}?", f"{word} " * (1 + n % 5), id=n) for n in range(12))])
        files.append({path.name: path.read_bytes() for path in (tmp_path / word).iterdir()})
    one, other = files
    assert one.keys() == other.keys()

    def rows(folder: Path) -> list[Any]:
        dataset = PackedDataset(folder)
        samples = [sample for at in range(len(dataset)) for sample in dataset._read(at)]
        arrays = [(one.input_ids.tolist(), one.labels.tolist()) for _, one in samples]
        return [(at, one.sample_id, [(v.grid, v.source) for v in one.images]) for at, one in samples] + arrays

    whole, theirs = rows(tmp_path / "5"), rows(tmp_path / "6")
    assert whole != theirs

    def case(rng: random.Random) -> bool:
        first, second = rng.sample(sorted(one), 2)
        broken: dict[str, bytes | None] = {}
        match rng.randrange(8):
            case 0:
                broken = {first: None}
            case 1:
                broken = {first: one[second], second: one[first]}
            case 2:
                broken = {name: other[name] for name in rng.sample(sorted(one), rng.randrange(1, len(one)))}
            case 3 | 4:
                manifest = edited(json.loads(one["manifest.json"]), rng)
                broken = {"manifest.json": json.dumps(manifest, default=repr).encode()}
            case _:
                broken = {first: damaged(one[first], rng)}
        left = {name: data for name, data in {**one, **broken}.items() if data is not None}
        shutil.rmtree(tmp_path / "case", ignore_errors=True)
        (tmp_path / "case").mkdir()
        for name, data in left.items():
            (tmp_path / "case" / name).write_bytes(data)
        is_other = all(left.get(name) == other[name] for name in other if name.startswith(("rows-", "manifest")))
        return rows(tmp_path / "case") == (theirs if is_other else whole)

    check(outcomes(cases, 0, case), cases=cases)
