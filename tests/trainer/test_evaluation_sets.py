"""Which rows PackedTrainer evaluates: those of its one plan, or of what the data set is when it is asked."""

from __future__ import annotations

import pytest
from chats import chat, processor_of
from trainer.packed_runs import scene
from training import Samples, arguments, collator, lengths_of

from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError
from vlmpack.model import enable_packing
from vlmpack.plan import plan_bins
from vlmpack.testing import tiny_model
from vlmpack.trainer import PackedTrainer


def test_an_evaluation_plan_and_several_sets_are_refused(tmp_path):
    model, samples = scene()
    sets = {"one": Samples(samples[:3]), "other": Samples(samples[3:])}
    plan = plan_bins(lengths_of(samples), 500)
    with pytest.raises(ConfigError, match="eval_plan has the rows of one data set, but eval_dataset has 2: one, other"):
        PackedTrainer(model, arguments(tmp_path), collator("packed"), eval_dataset=sets, eval_plan=plan)
    run = PackedTrainer(model, arguments(tmp_path), collator("packed"), eval_dataset=sets, eval_capacity=500)
    run.eval_plan = plan
    with pytest.raises(ConfigError, match="leave eval_plan out"):
        run.evaluate()


def test_an_evaluation_set_that_grew_is_planned_anew(tmp_path):
    model = tiny_model("qwen3_vl", processor=processor_of())
    samples = [chat("What is it?", f"A receipt of {at},000") for at in range(3)]
    collate = VLMCollator(processor_of(), layout="packed")
    run = PackedTrainer(enable_packing(model), arguments(tmp_path), collate, eval_dataset=samples, eval_capacity=90)
    run.evaluate()
    assert run.evaluation.sample_ids.tolist() == [0, 1, 2]
    samples.append(chat("What is it?", "One more"))
    run.evaluate()
    assert run.evaluation.sample_ids.tolist() == [0, 1, 2, 3]


def test_an_evaluation_set_that_outgrew_its_plan_is_refused(tmp_path):
    model, samples = scene()
    growing, plan = Samples(samples[:5]), plan_bins(lengths_of(samples[:5]), 500)
    run = PackedTrainer(model, arguments(tmp_path), collator("packed"), eval_dataset=growing, eval_plan=plan)
    run.evaluate()
    growing.samples.append(samples[5])
    with pytest.raises(ConfigError, match="the plan is of 5 samples, but the data set has 6"):
        run.evaluate()
