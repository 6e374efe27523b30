"""Checkpoints of PackedTrainer: resumed with the very next row, or refused; whole ones are told from others."""

from __future__ import annotations

import pickle
import shutil
from itertools import islice

import numpy as np
import pytest
import torch
from trainer.packed_runs import Noting, fingerprint, plan_of, planned, scene, streamed
from training import Samples, arguments, lengths_of

from vlmpack.errors import ConfigError
from vlmpack.loading import PackedStream, RowSettings, StreamLoader
from vlmpack.plan import plan_bins
from vlmpack.trainer import PackedTrainer
from vlmpack.trainer.checkpoints import (
    PLAN_FILE,
    checkpoint_to_resume,
    load_divided_optimizer,
    load_stream,
    save_stream,
    stream_file,
)

STOP = 3


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """The folder of a run that was stopped after some steps, to be read only."""
    folder = tmp_path_factory.mktemp("stopped")
    planned(folder, save_strategy="steps", save_steps=STOP, max_steps=STOP).train()
    return folder


@pytest.fixture
def stopped(stopped_run, tmp_path):
    """The checkpoint in a copy of that run."""
    shutil.copytree(stopped_run, tmp_path, dirs_exist_ok=True)
    return tmp_path / f"checkpoint-{STOP}"


def resume(checkpoint, *, plan=plan_of, costs=None, remainder="split", loss="token", **settings):
    """That run with other rows, gone on with."""
    model, samples = scene()
    args = arguments(checkpoint.parent, **{"max_steps": -1, "num_train_epochs": 2, **settings})
    rows = {"plan": plan(samples), "costs": costs, "remainder": remainder, "loss": loss}
    run = PackedTrainer(model, args, Noting(), Samples(samples), **rows)
    run.train(resume_from_checkpoint=str(checkpoint))
    return run


def wider(samples):
    return plan_bins(lengths_of(samples), max(lengths_of(samples)) + 7)


def of_another_seed(samples):
    return plan_bins(lengths_of(samples), max(lengths_of(samples)), seed=5)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"plan": wider}, "rows of plan .*, but these are of plan .*: "),
        ({"plan": of_another_seed}, "rows of plan .*, but these are of plan .*: "),
        ({"seed": 7}, "rows of seed 42, but these are of seed 7: "),
        ({"data_seed": 8}, "rows of seed 42, but these are of seed 8: "),
        ({"gradient_accumulation_steps": 2}, "rows of rows a step 1, but these are of rows a step 2: "),
        ({"remainder": "empty"}, "rows of remainder 'split', but these are of remainder 'empty': "),
        ({"costs": np.arange(14)}, "rows of costs .*, but these are of costs .*: "),
    ],
)
def test_other_rows_are_refused_and_what_differs_is_said(stopped, other, what):
    with pytest.raises(ConfigError, match=what + "some samples would be .*; or begin a new run"):
        resume(stopped, **other)


def test_settings_that_change_no_row_may_change_but_the_loss_may_not(stopped):
    with pytest.raises(ConfigError, match='checkpoint-3 was trained otherwise: loss was "token" and is "sample"'):
        resume(stopped, loss="sample")
    assert resume(stopped, num_train_epochs=3, dataloader_num_workers=1).state.epoch == 3


def test_a_checkpoint_that_does_not_say_its_plan_is_refused(stopped):
    """That of another Trainer, or one that was being written when the run was stopped."""
    (stopped / "packed_plan.json").unlink()
    with pytest.raises(ConfigError, match=r"packed_plan.json is missing: .* another Trainer wrote it.*begin a new run"):
        resume(stopped)
    assert resume(stopped, ignore_data_skip=True).state.global_step > STOP  # nothing is skipped


def test_a_damaged_word_on_the_plan_is_refused(stopped):
    for text in ("", "{}", "[1]", "{"):
        (stopped / "packed_plan.json").write_text(text)
        with pytest.raises(ConfigError, match=r"packed_plan.json is damaged"):
            resume(stopped)


def test_damaged_files_and_a_missing_optimizer_are_refused(stopped):
    for name in ("model.safetensors", "optimizer.pt", "rng_state.pth"):
        whole = (stopped / name).read_bytes()
        (stopped / name).write_bytes(whole[:-99])
        with pytest.raises(ConfigError, match="checkpoint-3 is damaged, or of another model or training"):
            resume(stopped)
        (stopped / name).write_bytes(whole)
    for name in ("scheduler.pt", "optimizer.pt"):  # Trainer would begin both anew
        (stopped / name).rename(stopped / "elsewhere")
        with pytest.raises(ConfigError, match=f"cannot be resumed from: {name} is missing"):
            resume(stopped)
        (stopped / "elsewhere").rename(stopped / name)


def test_checkpoints_without_rows_to_continue_have_no_file_of_ours(tmp_path):
    """Those of the model alone, and those of a trainer without a plan."""
    for make in (planned, streamed):
        make(tmp_path / make.__name__, save_strategy="steps", save_steps=1, max_steps=1, save_only_model=True).train()
        assert (tmp_path / make.__name__ / "checkpoint-1" / "model.safetensors").exists()
    model, samples = scene()
    args = arguments(tmp_path / "no plan", save_strategy="steps", save_steps=1, max_steps=1)
    PackedTrainer(model, args, Noting(), Samples(samples)).train()
    assert (tmp_path / "no plan" / "checkpoint-1" / "trainer_state.json").exists()
    assert not [*tmp_path.glob("*/checkpoint-1/packed_*")]


# ---------------------------------------------------------------------- killed while it saved

MAKERS = {PLAN_FILE: planned, stream_file(0, 1): streamed}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By the last file of its checkpoints: (folder of a whole run with checkpoints 3 and 6, what it came to)."""
    done = {}

    def run(last_file):
        if last_file not in done:
            folder = tmp_path_factory.mktemp("run")
            whole = MAKERS[last_file](folder, save_strategy="steps", save_steps=3, max_steps=7)
            whole.train()
            shutil.rmtree(folder / "checkpoint-7")  # Trainer saves at the end, too
            done[last_file] = folder, fingerprint(whole)
        return done[last_file]

    return run


def in_order_of_writing(checkpoint):
    """Files of one tick of the file system's clock (4 ms) have the same time: ours is then the last."""
    return sorted(checkpoint.iterdir(), key=lambda path: (path.stat().st_mtime_ns, path.name in MAKERS))


def killed_states(checkpoint):
    """(how it looked, its files) at every moment of its writing: so many whole files, and half of the next."""
    files = in_order_of_writing(checkpoint)
    for whole in range(len(files)):
        yield f"{whole} files", {path.name: path.read_bytes() for path in files[:whole]}
        name = files[whole].name
        half = files[whole].read_bytes()[: files[whole].stat().st_size // 2]
        name = name if whole < len(files) - 1 else f".{name}.0123"  # as an atomic file is called until it is complete
        yield f"{whole} files and half of {name}", {p.name: p.read_bytes() for p in files[:whole]} | {name: half}


@pytest.mark.parametrize("last_file", MAKERS)
def test_wherever_a_save_was_stopped_the_checkpoint_before_is_taken(last_file, runs, tmp_path):
    source, _ = runs(last_file)
    assert in_order_of_writing(source / "checkpoint-6")[-1].name == last_file
    assert checkpoint_to_resume(True, source, last_file) == str(source / "checkpoint-6")
    shutil.copytree(source / "checkpoint-3", tmp_path / "checkpoint-3")
    seen = 0
    for how, files in killed_states(source / "checkpoint-6"):
        stopped = tmp_path / "checkpoint-6"
        stopped.mkdir()
        for name, data in files.items():
            (stopped / name).write_bytes(data)
        with pytest.warns(
            UserWarning, match=r"resuming from checkpoint-3, since in checkpoint-6 .* is missing|too early"
        ):
            assert checkpoint_to_resume(True, tmp_path, last_file) == str(tmp_path / "checkpoint-3"), how
        with pytest.raises(ConfigError, match=r"the run was stopped while .* Instead, resume from .*checkpoint-3$"):
            checkpoint_to_resume(str(stopped), tmp_path, last_file)
        shutil.rmtree(stopped)
        seen += 1
    assert seen == 18


def test_without_a_whole_checkpoint_there_is_a_remedy(runs, tmp_path):
    source, _ = runs(PLAN_FILE)
    run = planned(tmp_path)
    with pytest.raises(ConfigError, match=r"no checkpoint to resume from \(there is none at all\)\. Instead, begin"):
        run.train(resume_from_checkpoint=True)
    shutil.copytree(source / "checkpoint-3", tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / PLAN_FILE).unlink()
    with pytest.raises(
        ConfigError, match=r"\(in checkpoint-3 packed_plan.json is missing: .*\. Instead, begin a new run"
    ):
        run.train(resume_from_checkpoint=True)


def test_a_folder_that_is_written_again_does_not_look_whole_meanwhile(runs, tmp_path, monkeypatch):
    """A new run in the folder of an old one, killed while it overwrites an old checkpoint."""
    source, _ = runs(PLAN_FILE)
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    run = planned(tmp_path, save_strategy="steps", save_steps=3, max_steps=7, seed=5)
    monkeypatch.setattr(run, "save_model", lambda *args, **settings: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.train()
    with pytest.raises(ConfigError, match=f"{PLAN_FILE} is missing"):
        checkpoint_to_resume(str(tmp_path / "checkpoint-3"), tmp_path, PLAN_FILE)


@pytest.mark.parametrize("last_file", MAKERS)
def test_an_older_checkpoint_is_deleted_once_the_new_one_is_complete(last_file, tmp_path, monkeypatch):
    """A run of save_total_limit=1 that is killed while it deletes has a checkpoint to resume from."""
    run = MAKERS[last_file](tmp_path, save_strategy="steps", save_steps=3, max_steps=7, save_total_limit=1)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **settings: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.train()
    (tmp_path / "checkpoint-3" / "optimizer.pt").unlink()  # half deleted
    assert checkpoint_to_resume(True, tmp_path, last_file) == str(tmp_path / "checkpoint-6")
    assert run.args.save_total_limit == 1


# ---------------------------------------------------------------------- the state of a stream


def counted():
    of = pytest.importorskip("datasets").Dataset.from_dict({"length": list(range(1, 41))})
    return StreamLoader(PackedStream(of.to_iterable_dataset(num_shards=2), RowSettings(capacity=50), repeat=True))


def test_the_state_of_a_source_comes_back_as_it_was(tmp_path):
    whole, stopped, resumed = list(islice(counted(), 60)), counted(), counted()
    list(islice(stopped, 35))
    save_stream(tmp_path, stopped, {"loss": "token"}, accumulation=1)
    with pytest.raises(ConfigError, match=r'was trained otherwise: loss was "token" and is "sample". Train as before'):
        load_stream(tmp_path, resumed, {"loss": "sample"}, accumulation=1)
    load_stream(tmp_path, resumed, {"loss": "token"}, accumulation=1)
    assert list(islice(resumed, 25)) == whole[35:]


def test_a_state_that_ends_anywhere_or_is_of_something_else_is_refused(tmp_path):
    loader, file = counted(), tmp_path / stream_file(0, 1)
    list(islice(loader, 2))
    save_stream(tmp_path, loader, {}, accumulation=1)
    whole = file.read_bytes()
    for data in (*(whole[:end] for end in range(0, len(whole), 61)), pickle.dumps({"turn": 0}, 2), b"{}", b"\0" * 99):
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=r"is damaged, or was not written by vlmpack.*resume from another"):
            load_stream(tmp_path, counted(), {}, accumulation=1)
    torch.save({"stream": {"turn": 0}, "accumulation": 1, "run": {}}, file)
    with pytest.raises(ConfigError, match="not the state of a StreamLoader"):
        load_stream(tmp_path, counted(), {}, accumulation=1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_optimizer_of_a_divided_model_is_loaded_with_its_empty_group(tmp_path):
    """Adapters have no parameters without weight decay, for which Trainer makes a group of its own."""
    parts = pytest.importorskip("transformers.distributed.checkpoint")
    model = torch.nn.Linear(2, 2)
    groups = [{"params": [], "weight_decay": 0.0}, {"params": [*model.parameters()]}]
    stopped, resumed = (torch.optim.AdamW([dict(group) for group in groups], lr=rate) for rate in (0.1, 0.2))
    model(torch.ones(1, 2)).sum().backward()
    stopped.step()
    model.zero_grad()
    parts.save_optimizer_distributed(model, stopped, str(tmp_path / "divided_optimizer"))
    load_divided_optimizer(model, resumed, tmp_path)
    assert [len(group["params"]) for group in resumed.param_groups] == [0, 2]
    assert resumed.param_groups[1]["lr"] == 0.1
    torch.testing.assert_close(resumed.state, stopped.state)
