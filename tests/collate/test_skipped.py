"""The ledger: nothing is lost, everything is written down, and too much is too much."""

import copy
import functools
import json
import multiprocessing
import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
from chats import processor_of
from torch.utils.data import DataLoader

from vlmpack.collate import VLMCollator
from vlmpack.collate import skipped as ledger_module
from vlmpack.collate import skipped as shared
from vlmpack.collate.skipped import Ceiling, Ledger, read_ledger
from vlmpack.errors import ConfigError, SampleError

GOOD = {"prompt": "2 + 2 = ", "completion": "4"}


def bad(reason="no_targets", index=0, sample_id=None):
    return SampleError("nothing to learn", index=index, reason=reason, sample_id=sample_id)


def test_counts_add_up_by_reason():
    ledger = Ledger(ceiling=Ceiling(max_consecutive_bad=9))
    for reason in (None, "a", "b", None, "a"):
        ledger.use() if reason is None else ledger.refuse(bad(reason))
    ledger.note(bad("overlength"))
    assert (ledger.given, ledger.used, ledger.refused) == (6, 2, 4)
    assert ledger.reasons == {"a": 2, "b": 1, "overlength": 1}


def test_each_refusal_is_one_line_of_json(tmp_path):
    path = tmp_path / "new" / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.use()
    ledger.refuse(bad("bad_grid", index=3, sample_id="receipt 7\n"))
    ledger.note(bad("overlength", index=4))
    assert len(path.read_text().splitlines()) == 2
    first, second = read_ledger(path)
    assert first.pop("process") == second.pop("process")
    assert first == {
        "index": 3,
        "id": "receipt 7\n",
        "reason": "bad_grid",
        "detail": "nothing to learn",
        "seen": 2,
    }
    assert (second["id"], second["reason"], second["seen"]) == (None, "overlength", 3)


def test_an_existing_file_is_added_to(tmp_path):
    path = tmp_path / "ledger.jsonl"
    for _ in range(2):
        Ledger(path).refuse(bad())
    assert len(read_ledger(path)) == 2


def _write_many(path, worker):
    ledger = Ledger(path, ceiling=Ceiling(max_consecutive_bad=10**6, max_bad_fraction=1))
    for index in range(200):
        ledger.refuse(SampleError("x" * 300, index=index, reason="r", sample_id=f"worker {worker}"))


def test_lines_of_several_processes_do_not_mix(tmp_path):
    path = tmp_path / "ledger.jsonl"
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    workers = [context.Process(target=_write_many, args=(path, worker)) for worker in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    records = read_ledger(path)
    assert len(records) == 600
    for worker in range(3):
        assert [r["index"] for r in records if r["id"] == f"worker {worker}"] == list(range(200))


def test_a_row_of_bad_samples_reaches_the_ceiling():
    ledger = Ledger(ceiling=Ceiling(max_consecutive_bad=3))
    ledger.refuse(bad())
    ledger.refuse(bad())
    ledger.use()
    ledger.refuse(bad())
    ledger.refuse(bad("bad_grid"))
    with pytest.raises(ConfigError) as caught:
        ledger.refuse(bad("bad_grid", index=5, sample_id="r9"))
    message = str(caught.value)
    assert message.startswith("3 samples in a row (max_consecutive_bad=3) had to be refused: no_targets 3, bad_grid 2.")
    assert "The last was sample 5 (id 'r9'): nothing to learn. Repair the data, or raise the ceiling" in message
    assert ledger.given == 6


def test_a_fraction_of_bad_samples_reaches_the_ceiling_once_enough_were_seen(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, ceiling=Ceiling(max_bad_fraction=0.25, min_seen=8))
    for _ in range(3):
        ledger.refuse(bad())
        ledger.use()
    ledger.use()
    with pytest.raises(ConfigError) as caught:
        ledger.refuse(bad())
    assert str(caught.value).startswith(
        f"4 of 8 samples (50.0%, max_bad_fraction=0.25) had to be refused: no_targets 4; each is written down in {path}"
    )


def test_the_fraction_itself_is_still_allowed():
    ledger = Ledger(ceiling=Ceiling(max_bad_fraction=0.5, min_seen=2))
    for _ in range(5):
        ledger.use()
        ledger.refuse(bad())
    assert ledger.given == 10


def test_what_is_left_out_by_choice_does_not_count_towards_the_ceiling():
    ledger = Ledger(ceiling=Ceiling(max_bad_fraction=0, min_seen=1, max_consecutive_bad=2))
    for _ in range(5):
        ledger.note(bad("overlength"))
    with pytest.raises(ConfigError, match="1 of 6 samples"):
        ledger.refuse(bad())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_bad_fraction": 1.5}, "max_bad_fraction must lie between 0 and 1, got 1.5"),
        ({"min_seen": 0}, "min_seen=0 and max_consecutive_bad=20 must be at least 1"),
        ({"max_consecutive_bad": 0}, "min_seen=200 and max_consecutive_bad=0 must be at least 1"),
    ],
)
def test_a_ceiling_without_meaning_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Ceiling(**settings)


def test_it_travels_to_a_worker(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.refuse(bad())
    again = pickle.loads(pickle.dumps(ledger))
    again.refuse(bad())
    assert (ledger.given, again.given) == (1, 2)
    assert len(read_ledger(tmp_path / "ledger.jsonl")) == 2


def test_text_of_any_kind_stays_on_its_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    Ledger(path).refuse(SampleError("Zeile\u2028 \x85 日本", index=0, reason="r"))
    assert json.loads(path.read_text().splitlines()[0])["detail"] == "Zeile\u2028 \x85 日本"


# ---------------------------------------------------------------------- all workers together


full_tier = functools.partial(pytest.param, marks=pytest.mark.full)


@pytest.mark.parametrize(("start", "persistent"), [("fork", True), full_tier("fork", False), full_tier("spawn", True)])
def test_the_counts_are_those_of_all_workers_in_all_epochs(start, persistent, tmp_path):
    collator = VLMCollator(
        processor_of().tokenizer, on_bad="skip", ledger=tmp_path / "bad.jsonl", ceiling=Ceiling(max_bad_fraction=1)
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
        ledger = collator.ledger
        assert (ledger.given, ledger.used, dict(ledger.reasons)) == (12 * epoch, 8 * epoch, {"bad_row": 4 * epoch})
    assert len({line["process"] for line in read_ledger(tmp_path / "bad.jsonl")}) >= 2
    assert {line["seen"] for line in read_ledger(tmp_path / "bad.jsonl")} <= set(range(1, 25))


def test_the_ceiling_is_that_of_all_workers_together():
    collator = VLMCollator(processor_of().tokenizer, on_bad="skip", ceiling=Ceiling(max_consecutive_bad=7))
    loader = DataLoader(
        [{"messages": None}] * 4 + [{"messages": 5}] * 4,  # four to a worker
        batch_size=1,
        collate_fn=collator,
        num_workers=2,
        multiprocessing_context="fork",
    )
    with pytest.raises(ConfigError, match="7 samples in a row"):
        list(loader)
    assert collator.ledger.refused >= 7


def test_a_worker_that_was_killed_blocks_nobody():
    ledger = Ledger()

    def die():
        with ledger.at_once():
            ledger.use()
            os.kill(os.getpid(), signal.SIGKILL)

    worker = multiprocessing.get_context("fork").Process(target=die)
    worker.start()
    worker.join()
    ledger.use()
    assert ledger.given == 1


def test_threads_count_together():
    ledger = Ledger()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: ledger.use(), range(40)))
    assert ledger.used == 40


@pytest.mark.parametrize("again", [copy.deepcopy, lambda ledger: pickle.loads(pickle.dumps(ledger))])
def test_a_copy_goes_on_by_itself(again):
    ledger = Ledger()
    ledger.use()
    other = again(ledger)
    other.use()
    assert (ledger.used, other.used) == (1, 2)


def test_without_a_file_to_share_the_counts_are_those_of_the_process(monkeypatch):
    monkeypatch.setattr(shared, "fcntl", None)
    ledger = Ledger()
    ledger.use()
    ledger.refuse(bad())
    assert (ledger.given, pickle.loads(pickle.dumps(ledger)).given) == (2, 2)


def test_a_ledger_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the ledger cannot be written .* give ledger= another path"):
        Ledger(tmp_path / "file" / "ledger.jsonl").refuse(bad())


def test_many_refusals_take_no_longer_each_than_few(tmp_path):
    """The file is opened once a batch, not once a sample: 20,000 lines would be half a minute on a slow disk."""
    ledger = Ledger(tmp_path / "bad.jsonl", ceiling=Ceiling(max_bad_fraction=1, max_consecutive_bad=10**6))
    with patch.object(ledger_module, "_append", wraps=ledger_module._append) as append, ledger.at_once():
        for index in range(1000):
            ledger.refuse(bad(f"reason {index}", index=index))
    assert append.call_count == 1
    assert len(read_ledger(tmp_path / "bad.jsonl")) == ledger.refused == len(ledger.reasons) == 1000
