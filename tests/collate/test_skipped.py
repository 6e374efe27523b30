"""The log of skipped samples: nothing is lost, everything is written down, and too much is too much."""

import functools
import multiprocessing
import os
import pickle
import signal
import warnings

import pytest
from cases import json_lines
from chats import chat, processor_of
from torch.utils.data import DataLoader

from vlmpack.collate import VLMCollator
from vlmpack.collate import skipped as shared
from vlmpack.collate.skipped import SkipLimit, SkipLog
from vlmpack.errors import ConfigError, SampleError, SkippedWarning

GOOD = {"prompt": "2 + 2 = ", "completion": "4"}


def bad(reason="no_targets", index=0, sample_id=None):
    return SampleError("nothing to learn", index=index, reason=reason, sample_id=sample_id)


def test_each_refusal_is_one_line_of_json(tmp_path):
    path = tmp_path / "new" / "skip_log.jsonl"
    skip_log = SkipLog(path)
    skip_log.use()
    skip_log.refuse(bad("bad_grid", index=3, sample_id="receipt 7\n"))
    skip_log.note(bad("overlength", index=4))
    assert len(path.read_text().splitlines()) == 2
    first, second = json_lines(path)
    assert first.pop("process") == second.pop("process")
    assert first == {"index": 3, "id": "receipt 7\n", "reason": "bad_grid", "detail": "nothing to learn", "seen": 2}
    assert (second["id"], second["reason"], second["seen"]) == (None, "overlength", 3)


def test_a_row_of_bad_samples_reaches_the_skip_limit():
    skip_log = SkipLog(limit=SkipLimit(max_consecutive_bad=3))
    skip_log.refuse(bad())
    skip_log.refuse(bad())
    skip_log.use()
    skip_log.refuse(bad())
    skip_log.refuse(bad("bad_grid"))
    with pytest.raises(ConfigError) as caught:
        skip_log.refuse(bad("bad_grid", index=5, sample_id="r9"))
    message = str(caught.value)
    assert message.startswith("3 samples in a row (max_consecutive_bad=3) were refused: no_targets 3, bad_grid 2.")
    assert "The last was sample 5 (id 'r9'): nothing to learn. Repair the data, or raise the skip limit" in message
    assert skip_log.received == 6


def test_a_fraction_of_bad_samples_reaches_the_skip_limit_once_enough_were_seen(tmp_path):
    path = tmp_path / "skip_log.jsonl"
    skip_log = SkipLog(path, limit=SkipLimit(max_bad_fraction=0.25, min_samples=8))
    for _ in range(3):
        skip_log.refuse(bad())
        skip_log.use()
    skip_log.use()
    with pytest.raises(ConfigError) as caught:
        skip_log.refuse(bad())
    assert str(caught.value).startswith(
        f"4 of 8 samples (50.0%, max_bad_fraction=0.25) were refused: no_targets 4; they are listed in {path}"
    )


def test_what_is_left_out_by_choice_does_not_count_towards_the_skip_limit():
    skip_log = SkipLog(limit=SkipLimit(max_bad_fraction=0, min_samples=1, max_consecutive_bad=2))
    for _ in range(5):
        skip_log.note(bad("overlength"))
    with pytest.raises(ConfigError, match="1 of 6 samples"):
        skip_log.refuse(bad())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_bad_fraction": 1.5}, "max_bad_fraction must lie between 0 and 1, got 1.5"),
        ({"min_samples": 0}, "min_samples must be a whole number of at least 1, got 0"),
        ({"max_consecutive_bad": 0}, "max_consecutive_bad must be a whole number of at least 1, got 0"),
    ],
)
def test_a_skip_limit_without_meaning_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        SkipLimit(**settings)


# ---------------------------------------------------------------------- all workers together


full_tier = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(("start", "persistent"), [("fork", True), full_tier("fork", False), full_tier("spawn", True)])
def test_the_counts_are_those_of_all_workers_in_all_epochs(start, persistent, tmp_path):
    collator = VLMCollator(
        processor_of().tokenizer,
        on_bad="skip",
        skip_log=tmp_path / "bad.jsonl",
        skip_limit=SkipLimit(max_bad_fraction=1),
    )
    loader = DataLoader(
        [GOOD if index % 3 else {"messages": index} for index in range(12)],
        batch_size=2,
        collate_fn=collator,
        num_workers=2,
        multiprocessing_context=start,
        persistent_workers=persistent,
    )
    epochs = 2
    for epoch in range(1, epochs + 1):
        assert len(list(loader)) == 6
        skip_log = collator.skip_log
        assert (skip_log.received, skip_log.used, dict(skip_log.reasons)) == (
            12 * epoch,
            8 * epoch,
            {"bad_row": 4 * epoch},
        )
    assert len({line["process"] for line in json_lines(tmp_path / "bad.jsonl")}) >= 2
    assert {line["seen"] for line in json_lines(tmp_path / "bad.jsonl")} <= set(range(1, 25))


def test_the_skip_limit_is_that_of_all_workers_together():
    collator = VLMCollator(processor_of().tokenizer, on_bad="skip", skip_limit=SkipLimit(max_consecutive_bad=7))
    loader = DataLoader(
        [{"messages": None}] * 4 + [{"messages": 5}] * 4,  # four to a worker
        batch_size=1,
        collate_fn=collator,
        num_workers=2,
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    with pytest.raises(ConfigError, match=r"[78] samples in a row"):  # whichever worker's batch comes first
        list(batches)
    batches._shutdown_workers()  # the error keeps them; as garbage they take five seconds a process
    assert collator.skip_log.refused >= 7


def test_a_worker_that_was_killed_blocks_nobody():
    skip_log = SkipLog()

    def die():
        with skip_log.at_once():
            skip_log.use()
            os.kill(os.getpid(), signal.SIGKILL)

    worker = multiprocessing.get_context("fork").Process(target=die)
    worker.start()
    worker.join()
    skip_log.use()
    assert skip_log.received == 1


def test_without_a_file_to_share_the_counts_are_those_of_the_process(monkeypatch):
    monkeypatch.setattr(shared, "fcntl", None)
    skip_log = SkipLog()
    skip_log.use()
    skip_log.refuse(bad())
    assert (skip_log.received, pickle.loads(pickle.dumps(skip_log)).received) == (2, 2)
    assert [skip_log.name_unread(("note",)), skip_log.name_unread(("note", "remark"))] == [("note",), ("remark",)]


def test_a_skip_log_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the skip log cannot be written .* give skip_log= another path"):
        SkipLog(tmp_path / "file" / "skip_log.jsonl").refuse(bad())


@pytest.mark.parametrize("has_log", [False, True])
def test_without_a_log_the_first_skipped_sample_is_warned_of_once(has_log, tmp_path):
    log = {"skip_log": tmp_path / "refused.jsonl"} if has_log else {}
    collator = VLMCollator(processor_of(), on_bad="skip", **log)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            collator.collate([chat("?", "a"), chat("?", "", id="r7"), chat("?", "")])
    assert [warning.category for warning in said] == [SkippedWarning] * (not has_log)
    assert all(str(w.message).startswith("sample 1 (id 'r7'): its answer is empty") for w in said)
    assert all("skip_log='refused.jsonl' lists them" in str(warning.message) for warning in said)
    assert collator.skip_log.refused == 4
