"""measure_lengths: what collating will give, from headers, whoever measures and however the samples come."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from chats import chat, picture, processor_of, says, tokenized, user
from measured import UNREADABLE, Deadly, KeyTeller, Stored, Stream, conversations, encoded

from vlmpack.collate import SkipLimit, VLMCollator
from vlmpack.collate.digests import settings_key
from vlmpack.errors import ConfigError, SampleError, SkippedWarning
from vlmpack.lengths import PART, measure_lengths
from vlmpack.plan.length_table import LengthTable

SAMPLES = conversations(150)


def collator_of(**settings: Any) -> VLMCollator:
    return VLMCollator(processor_of(), **settings)


@pytest.fixture(scope="module")
def truth() -> LengthTable:
    return measure_lengths(SAMPLES, collator_of())


# ---------------------------------------------------------------------- exact


def several_kinds() -> list[Any]:
    text = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>"
    )
    film = [{"type": "video", "video": [picture(64, 40, seed=seed) for seed in range(3)]}, "What happens?"]
    return [
        chat("Total?", "75,000", encoded(190, 61), picture(40, 99)),
        chat("2 + 2? " * 20, "4"),
        chat("A long answer", "word " * 60, encoded(300, 200)),
        {"messages": [user(film), says("nothing")]},
        {"prompt": "2 + 3 = ", "completion": "5"},
        tokenized("qwen3_vl", text, picture(50, 50)),
        chat("?", "a", b"no image"),
        chat(id=functools.reduce(lambda inner, _: [inner], range(100_000), 0)),
        17,
    ]


@pytest.mark.parametrize(
    "settings", [{}, *({"max_length": 75, "overlength": name} for name in ("error", "drop", "truncate"))]
)
def test_lengths_are_those_that_collating_gives(settings: dict[str, Any]) -> None:
    table = measure_lengths(several_kinds(), collator_of(**settings))
    used, refused = 0, []
    for index, sample in enumerate(several_kinds()):
        collator = collator_of(**settings, layout="packed", on_bad="skip")
        row = collator.collate([sample])
        if collator.skip_log.refused:
            refused.append((index, *collator.skip_log.reasons))
            continue
        pixels = [patches for patches in (row.media.pixel_values, row.media.pixel_values_videos) if patches is not None]
        ids, metadata = row.input_ids, row.metadata
        assert metadata is not None
        expected = {
            "sample_ids": index,
            "tokens": metadata.lengths[0],
            "image_tokens": int((ids == collator.metadata.image_token_id).sum()),
            "video_tokens": int((ids == collator.metadata.video_token_id).sum()),
            "images": len(metadata.media.images),
            "videos": len(metadata.media.videos),
            "patches": sum(map(len, pixels)),
            "targets": metadata.num_targets,
        }
        assert {name: int(getattr(table, name)[used]) for name in expected} == expected
        used += 1
    assert len(table) == used >= 3
    assert [(one.index, one.reason) for one in table.refused] == refused
    assert table.measured == len(several_kinds())


def test_refused_samples_are_listed_by_place_id_and_reason(truth: LengthTable) -> None:
    assert [one.index for one in truth.refused] == list(range(12, 150, 13))
    assert {one.sample_id for one in truth.refused} == {None, "s77"}
    assert truth.reasons == {"no_targets": 11}
    assert "none of its" in truth.refused[0].detail
    assert truth.sample_ids.tolist() == [at for at in range(150) if at % 13 != 12]
    collator = collator_of(skip_limit=SkipLimit(max_consecutive_bad=1))
    assert len(measure_lengths([7, 8, 9], collator).refused) == 3  # neither skip log nor skip limit counts
    assert collator.skip_log.received == 0


def test_a_warning_names_the_first_refused_samples_and_where_all_are() -> None:
    samples = [*SAMPLES[:2], *({"id": f"r{at}", "messages": []} for at in range(4)), 7]
    with pytest.warns(SkippedWarning) as said:
        table = measure_lengths(samples, collator_of())
    (warning,) = said
    text = str(warning.message)
    assert text.startswith(
        "5 of 7 samples cannot be used, so that no plan of this table has them: sample 2 (id 'r0'): "
    )
    assert text.count("(bad_row)") == 3
    assert "; and 2 more. All are listed in `refused` of the table" in text
    assert warning.filename == __file__
    assert len(table.refused) == 5


# ---------------------------------------------------------------------- any data set


def test_samples_may_come_in_any_way(truth: LengthTable) -> None:
    datasets = [SAMPLES, tuple(SAMPLES), Stored(tuple(SAMPLES)), iter(SAMPLES), (s for s in SAMPLES), Stream(SAMPLES)]
    assert all(measure_lengths(dataset, collator_of()) == truth for dataset in datasets)


def test_a_table_of_datasets_is_read_without_decoding_its_images() -> None:
    datasets = pytest.importorskip("datasets")
    whole = encoded(97, 61, "PNG")
    cut = {"bytes": whole[: len(whole) // 2], "path": None}  # decoding it would fail
    columns = {"prompt": [[user("?")]] * 2, "completion": [[says("a")]] * 2}
    table = datasets.Dataset.from_dict({**columns, "images": [[cut], [cut, cut]]})
    table = table.cast_column("images", datasets.List(datasets.Image()))
    with pytest.raises(Exception, match="truncated"):
        table[0]
    expected = measure_lengths([chat("?", "a", whole), chat("?", "a", whole, whole)], collator_of())
    assert measure_lengths(table, collator_of()) == expected
    assert measure_lengths(table.select([1, 0]), collator_of()).images.tolist() == [2, 1]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_row_without_known_columns_is_one_bad_sample_under_its_own_number(workers: int, tmp_path: Path) -> None:
    samples = [*SAMPLES[:2], {"id": "r3", "massages": SAMPLES[0]["messages"]}, *SAMPLES[3:PART], {"text": "?"}]
    table = measure_lengths(samples, collator_of(), workers=workers, cache=tmp_path / "lengths")
    lost = [(one.index, one.sample_id) for one in table.refused if one.reason == "no_columns"]
    assert lost == [(2, "r3"), (PART, None)]
    assert "'massages': did you mean 'messages'?" in table.refused[0].detail
    assert table == measure_lengths(iter(samples), collator_of(on_bad="skip"))


def test_where_no_row_has_known_columns_the_first_that_could_be_read_is_named(tmp_path: Path) -> None:
    unreadable = SampleError("its row cannot be read", index=0, reason="row_unreadable")
    rows = Stored((unreadable, {"id": "b", "text": "?"}, {"text": "!"}))
    for _ in range(2):  # measured, and out of the cache
        with pytest.raises(ConfigError, match=r"^sample 1 \(id 'b'\): it has none of the columns"):
            measure_lengths(rows, collator_of(), cache=tmp_path / "lengths")
    assert measure_lengths(rows, collator_of(on_bad="skip")).reasons == {"no_columns": 2, "row_unreadable": 1}


# ---------------------------------------------------------------------- worker processes


@pytest.fixture
def spawning() -> Iterator[None]:
    """Start workers with nothing of this process, as on macOS."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.dist
def test_workers_give_what_one_process_gives(truth: LengthTable) -> None:
    before, tokenizers = torch.random.get_rng_state(), os.environ.get("TOKENIZERS_PARALLELISM")
    told: list[int] = []
    table = measure_lengths(
        Stored(tuple(SAMPLES)), collator_of(), workers=2, progress=lambda done, total: told.append(done)
    )
    assert table == truth
    assert told == [*range(PART, 150, PART), 150]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert os.environ.get("TOKENIZERS_PARALLELISM") == tokenizers
    assert multiprocessing.active_children() == []
    with pytest.raises(ConfigError, match="workers must be a whole number of at least 0, got -1"):
        measure_lengths(SAMPLES, collator_of(), workers=-1)


@pytest.mark.slow
@pytest.mark.dist
def test_a_worker_that_shares_nothing_gives_the_same_and_has_the_same_keys(tmp_path: Path, spawning: None) -> None:
    samples = SAMPLES[:20]
    collator, keys = collator_of(max_length=500), tmp_path / "keys"
    keys.mkdir()
    dataset = KeyTeller(samples, collator, keys)
    table = measure_lengths(dataset, collator, workers=1, cache=tmp_path / "lengths.sqlite")
    assert table == measure_lengths(samples, collator)
    (told,) = keys.iterdir()
    assert told.name != str(os.getpid())
    assert told.read_text() == settings_key(collator).hex()


@pytest.mark.dist
def test_errors_of_workers_arrive_as_what_they_are() -> None:
    with pytest.raises(ConfigError, match="none of the columns"):
        measure_lengths([{"text": "?"}] * 100, collator_of(), workers=1)
    with pytest.raises(RuntimeError, match="out of paper"):
        measure_lengths(Stored((RuntimeError("out of paper"),) * 9), collator_of(), workers=1)
    table = measure_lengths(Stored((UNREADABLE,) * 9), collator_of(), workers=1)
    assert table.reasons == {"bad_json": 9}


@pytest.mark.slow
@pytest.mark.dist
def test_a_worker_that_dies_is_told() -> None:
    with pytest.raises(ConfigError, match=r"a worker process died .* fewer workers"):
        measure_lengths(Deadly(), collator_of(), workers=1)


def test_what_cannot_be_sent_to_a_worker_is_told(spawning: None) -> None:
    samples = Stored(tuple({**sample, "source": lambda: None} for sample in SAMPLES))
    with pytest.raises(ConfigError, match="cannot be sent to a worker process"):
        measure_lengths(samples, collator_of(), workers=1)


@pytest.mark.dist
def test_an_interruption_ends_the_workers_and_keeps_what_was_measured(tmp_path: Path) -> None:
    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    cache, others = tmp_path / "lengths.sqlite", set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt):
        measure_lengths(SAMPLES, collator_of(), workers=2, cache=cache, progress=interrupt)
    assert set(multiprocessing.active_children()) <= others
    with patch.object(VLMCollator, "measure", autospec=True, side_effect=VLMCollator.measure) as measured:
        measure_lengths(SAMPLES, collator_of(), cache=cache)
    assert measured.call_count == 150 - PART
