"""A run on a plan is resumed with the same rows, or refused: a checkpoint says which plan its steps were of."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from trainer.packed_runs import Noting, fingerprint, plan_of, planned, scene
from training import Samples, arguments, lengths_of

from vlmpack.errors import ConfigError
from vlmpack.plan import plan_bins
from vlmpack.trainer import PackedTrainer

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


def resume(checkpoint, *, plan=plan_of, costs=None, remainder="split", **settings):
    """That run with other rows, gone on with."""
    model, samples = scene()
    args = arguments(checkpoint.parent, **{"max_steps": -1, "num_train_epochs": 2, **settings})
    rows = {"plan": plan(samples), "costs": costs, "remainder": remainder}
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
        ({"plan": wider}, r"rows of plan \w+, but these are of plan \w+: "),
        ({"plan": of_another_seed}, r"rows of plan \w+, but these are of plan \w+: "),
        ({"seed": 7}, "rows of seed 42, but these are of seed 7: "),
        ({"data_seed": 8}, "rows of seed 42, but these are of seed 8: "),
        ({"gradient_accumulation_steps": 2}, "rows of .*accumulation 1, but these are of .*accumulation 2: "),
        ({"remainder": "empty"}, "rows of remainder 'split', but these are of remainder 'empty': "),
        ({"costs": np.arange(14)}, r"rows of costs \w+, but these are of costs \w+: "),
    ],
)
def test_other_rows_are_refused_and_what_differs_is_said(stopped, other, what):
    with pytest.raises(ConfigError, match=what + "some samples would be .* Plan and deal as before, or begin a new"):
        resume(stopped, **other)


def test_the_same_rows_are_gone_on_with(stopped, tmp_path):
    whole = planned(tmp_path / "whole")
    whole.train()
    assert fingerprint(resume(stopped)) == fingerprint(whole)


def test_settings_that_change_no_row_may_change(stopped):
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


def test_who_skips_nothing_may_take_other_rows(stopped):
    run = resume(stopped, seed=7, ignore_data_skip=True)
    assert len(run.data_collator.rows) == run.state.global_step - STOP > 0


def test_a_checkpoint_of_the_model_alone_does_not_say_it(tmp_path):
    planned(tmp_path, save_strategy="steps", save_steps=STOP, max_steps=STOP, save_only_model=True).train()
    assert not (tmp_path / f"checkpoint-{STOP}" / "packed_plan.json").exists()


def test_without_a_plan_a_checkpoint_has_none(tmp_path):
    model, samples = scene()
    args = arguments(tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
    PackedTrainer(model, args, Noting(), Samples(samples)).train()
    assert (tmp_path / "checkpoint-1" / "trainer_state.json").exists()
    assert not (tmp_path / "checkpoint-1" / "packed_plan.json").exists()
