"""PackedTrainer: HF Trainer on planned rows and on a stream, exactly continued, with evaluation in planned rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import slow
from chats import chat, processor_of
from fixtures.processors import tiny_model, tiny_processor
from trainer.packed_runs import fingerprint, fresh, plan_of, planned, scene, streamed
from training import (
    Gradients,
    Samples,
    Stream,
    apart,
    arguments,
    collator,
    gradients,
    lengths_of,
    logged,
    loss_sums,
    losses_alone,
    receipts,
)
from transformers import Trainer
from trees import rollouts, samples_of

from vlmpack.collate import SharePrefixes, VLMCollator
from vlmpack.errors import ConfigError, SampleError, SkippedWarning, UnpackedWarning
from vlmpack.lengths import measure_lengths
from vlmpack.loading import PackedStream, RowSettings
from vlmpack.model import disable_packing, enable_packing
from vlmpack.model.engine import PackingState
from vlmpack.plan import LengthTable, PrefixGroups, plan_bins
from vlmpack.plan.plan import split_groups
from vlmpack.rows import PackedDataset, StoreSettings, write_rows
from vlmpack.trainer import PackedTrainer, evaluate, loss_metrics
from vlmpack.trainer.evaluation import EvaluationRows, check_sharing

# ---------------------------------------------------------------------- training on a plan


def test_every_epoch_is_every_sample_once_in_another_order(tmp_path):
    run = planned(tmp_path)
    run.train()
    rows, half = run.data_collator.rows, run.state.global_step // 2
    assert run.state.epoch == 2
    assert len(rows) == 2 * half == 2 * len(run.plan)
    assert rows[:half] != rows[half:]
    for epoch in (rows[:half], rows[half:]):
        assert sorted(n for row in epoch for n in row) == sorted(lengths_of(run.train_dataset.samples))


def test_a_bad_sample_is_named_by_its_index_in_the_data_set(tmp_path):
    model, samples = scene()

    def refuse(features):
        if (at := [sample is samples[9] for sample in features]) and any(at):
            raise SampleError("it is broken", index=at.index(True))
        return collator("packed")(features)

    run = PackedTrainer(model, arguments(tmp_path, max_steps=9), refuse, Samples(samples), plan=plan_of(samples))
    with pytest.raises(SampleError, match=r"^sample 9: it is broken$"):
        run.train()


@pytest.mark.parametrize("stop_at", ["in the middle of an epoch", *slow("between two")])
def test_a_resumed_run_ends_with_the_same_weights_and_loads_no_row_twice(stop_at, tmp_path):
    whole = planned(tmp_path / "whole")
    whole.train()
    half = whole.state.global_step // 2
    stop = half + 1 if stop_at == "in the middle of an epoch" else half
    planned(tmp_path / "stopped", save_strategy="steps", save_steps=stop).train()
    resumed = planned(tmp_path / "stopped")
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / f"checkpoint-{stop}"))
    assert fingerprint(resumed) == fingerprint(whole)
    assert resumed.data_collator.rows == whole.data_collator.rows[stop:]


def test_a_plan_of_a_table_leaves_out_what_cannot_be_used_and_nothing_else(tmp_path):
    samples = [chat(answer=f"The total is {n}", id=n) for n in range(6)]
    samples[2] = {"messages": [], "id": 2}
    trained = []

    def noting(features):
        trained.extend(feature["id"] for feature in features)
        return collate(features)

    collate = VLMCollator(processor_of(), layout="packed")
    table = measure_lengths(samples, collate)
    run = PackedTrainer(
        enable_packing(fresh(processor=processor_of())),
        arguments(tmp_path, max_steps=-1, num_train_epochs=1, dataloader_pin_memory=False),
        noting,
        samples,
        plan=plan_bins(table, 2 * max(table.tokens)),
    )
    with pytest.warns(
        SkippedWarning, match=r"1 of the 6 samples are in no row of the plan, so they are not trained on: 2 \("
    ):
        run.train()
    assert sorted(trained) == [0, 1, 3, 4, 5]
    assert [one.index for one in table.refused] == [2]


@pytest.mark.parametrize("in_pieces", [True, False])
@pytest.mark.parametrize("family", ["qwen3_vl", *slow("qwen4_exp")])
def test_a_group_that_does_not_fit_is_one_row_in_pieces(family, in_pieces, tmp_path, caplog, monkeypatch):
    """Where layers cannot start from a kept prefix, the group is split and its prefix computed again."""
    if not in_pieces:
        monkeypatch.setattr(PackingState, "problem_of_pieces", lambda state, model: "layers start from nothing")
    processor = processor_of(family)
    collate = VLMCollator(processor, layout="packed", share_prefixes=SharePrefixes(min_shared=4))
    plain, model = (tiny_model(family, layers=2, vision_depth=1, processor=processor) for _ in range(2))
    samples = samples_of(plain.config, rollouts(4, 6, 3, 5, 7, prefix=20, images=0), rollouts(9), masked=(6, 11))
    losses, counts = loss_sums(plain, samples)
    (expected := losses.sum() / counts.sum()).backward()
    groups = PrefixGroups.of_keys([0] * 5 + [None], [20] * 5 + [0])
    plan = plan_bins(lengths_of(samples), CAPACITY, groups=groups, whole_groups=True)
    assert max(plan.tree_tokens) == 45
    given, seen = [], Gradients()
    rows = len(plan if in_pieces else split_groups(plan))
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: given.append(args[0].numel()))
    settings = arguments(tmp_path, gradient_accumulation_steps=rows, max_steps=1)
    run = PackedTrainer(enable_packing(model), settings, collate, Samples(samples), plan=plan, callbacks=[seen])
    run.train()
    assert logged(run) == pytest.approx([expected.item()], rel=1e-6)
    assert apart(gradients(plain), seen.steps[0]) < 2e-5
    assert max(given) <= CAPACITY
    branches = 4 + 6 + 3 + 5 + 7
    once = 20 + branches if in_pieces else 2 * 20 + branches
    assert sum(given) == once + sum(lengths_of(samples[5:]))
    assert in_pieces or "each part computes the prefix again: " in caplog.text


CAPACITY = 36


def test_a_plan_of_other_samples_is_warned_of_once(tmp_path):
    samples = [chat(answer="yes " * n, id=n) for n in range(1, 9)]
    collate = VLMCollator(processor_of(), layout="packed")
    plan = plan_bins(measure_lengths(samples, collate), 200)
    model = enable_packing(fresh(processor=processor_of()))
    run = PackedTrainer(model, arguments(tmp_path), collate, samples, plan=plan)
    run.train()
    longer = [chat(answer="yes " * (n + 50), id=n) for n in range(1, 9)]
    run = PackedTrainer(model, arguments(tmp_path), collate, longer, plan=plan)
    with pytest.warns(
        UserWarning, match=r"sample \d has \d+ tokens, and \d+ in the plan, .* longer than 200 tokens; plan this"
    ) as warned:
        run.train()
    assert len(warned) == 1


def test_rows_that_were_written_before_bring_their_collator(tmp_path):
    packed = VLMCollator(processor_of(), layout="packed")
    write_rows([chat(), chat()], tmp_path / "rows", packed, StoreSettings(capacity=200))
    rows = PackedDataset(tmp_path / "rows", processor_of())
    model = enable_packing(fresh(processor=processor_of()))
    run = PackedTrainer(model, arguments(tmp_path, max_steps=1), train_dataset=rows, plan=rows.plan)
    assert run.data_collator == rows.collate
    run.train()
    assert run.state.global_step == 1


@pytest.mark.parametrize("make", [planned, streamed])
def test_ranks_that_compute_a_batch_together_are_refused(make, tmp_path, monkeypatch):
    run = make(tmp_path)
    monkeypatch.setattr(run, "get_sp_size", lambda: 2)
    with pytest.raises(ConfigError, match="2 processes would compute each batch together"):
        run.train()


# ---------------------------------------------------------------------- training on a stream


@pytest.mark.parametrize("stop", [8, *slow("at the end of a pass")])
def test_a_resumed_stream_ends_with_the_same_weights_and_reads_no_row_twice(stop, tmp_path):
    whole = streamed(tmp_path / "whole")
    whole.train()
    once = len([*PackedStream(whole.train_dataset.source, whole.train_dataset.settings, length=lengths_one)])
    assert once < 8 < whole.state.global_step  # the guard: one stop ends the first pass, one is in the second
    stop = once if stop == "at the end of a pass" else stop
    streamed(tmp_path / "stopped", save_strategy="steps", save_steps=stop).train()
    resumed = streamed(tmp_path / "stopped")
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / f"checkpoint-{stop}"))
    assert fingerprint(resumed) == fingerprint(whole)
    assert resumed.data_collator.rows == whole.data_collator.rows[stop:]
    assert resumed.state.log_history[-2]["epoch"] == whole.state.log_history[-2]["epoch"] == 1.0


def test_the_last_checkpoint_is_found_and_a_finished_run_stays_as_it_is(tmp_path):
    whole = streamed(tmp_path, save_strategy="steps", save_steps=4)
    whole.train()
    again, longer = streamed(tmp_path), streamed(tmp_path, max_steps=11)
    again.train(resume_from_checkpoint=True)
    assert again.data_collator.rows == []
    assert fingerprint(again)["weights"] == fingerprint(whole)["weights"]
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 11
    assert len(longer.data_collator.rows) == 2


def test_a_stream_continues_in_other_workers_and_is_refused_without_its_state(tmp_path):
    whole, resumed = (
        streamed(tmp_path, save_strategy="steps", save_steps=4),
        streamed(tmp_path, dataloader_num_workers=2),
    )
    whole.train()
    checkpoint = tmp_path / "checkpoint-4"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert fingerprint(resumed) == fingerprint(whole)
    larger = streamed(tmp_path, gradient_accumulation_steps=2, max_steps=5)
    with pytest.warns(UserWarning, match=r"checkpoint-4 had 1 rows, and each step to come has 2: every row .* once"):
        larger.train(resume_from_checkpoint=str(checkpoint))
    assert larger.data_collator.rows == whole.data_collator.rows[4:6]
    (checkpoint / "packed_stream_0_of_1.pt").unlink()
    with pytest.raises(ConfigError, match=r"packed_stream_0_of_1.pt is missing: .*resume from .*checkpoint-9$"):
        streamed(tmp_path).train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize("newest", [True, False])
def test_a_pickled_place_is_not_read(newest, tmp_path):
    class Running:
        def __reduce__(self):
            return Path.touch, (tmp_path / "it ran",)

    streamed(tmp_path, save_strategy="steps", save_steps=4, max_steps=4).train()
    place = tmp_path / "checkpoint-4" / "packed_stream_0_of_1.pt"
    torch.save(Running(), place)
    with pytest.raises(ConfigError, match=r"packed_stream_0_of_1.pt is damaged, or was not written by vlmpack"):
        streamed(tmp_path).train(resume_from_checkpoint=newest or str(place.parent))
    assert not (tmp_path / "it ran").exists()


def lengths_one(sample):
    return len(sample["input_ids"])


# ---------------------------------------------------------------------- evaluation


def evaluation_set():
    """(an enabled model, an odd number of samples, loss sums, target counts), one sample without targets."""
    model = fresh()
    samples = receipts(model)
    samples[3]["labels"] = torch.full_like(samples[3]["labels"], -100)
    sums, counts = losses_alone(model, samples)
    return enable_packing(model), samples, sums, counts


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_evaluation_in_planned_rows_is_that_of_the_samples_alone(layout, tmp_path):
    model, samples, sums, counts = evaluation_set()
    lengths = lengths_of(samples)
    run = PackedTrainer(
        model,
        arguments(tmp_path),
        collator(layout),
        eval_dataset=Samples(samples),
        eval_plan=plan_bins(lengths, sum(lengths) // 3, overlength="own_row"),
        compute_metrics=loss_metrics(model),
    )
    metrics = run.evaluate()
    assert metrics["eval_loss"] == metrics["eval_token_loss"]
    assert metrics["eval_token_loss"] == pytest.approx(float(sums.sum() / counts.sum()), rel=1e-6)
    assert {f"eval_{name}": value for name, value in run.evaluation.metrics.items()}.items() <= metrics.items()
    alone = (sums / counts.clamp(1)).double()
    torch.testing.assert_close(torch.from_numpy(run.evaluation.sample_losses), alone, rtol=1e-6, atol=1e-6)


def test_evaluation_while_training_chooses_the_best_model_and_changes_nothing(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "token_loss"}
    settings |= {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    runs = []
    for more in (settings, {}):
        run = planned(tmp_path, **more, num_train_epochs=1)
        run.train()
        runs.append(run)
    evaluated, plain = runs
    seen = {
        entry["step"]: entry["eval_token_loss"] for entry in evaluated.state.log_history if "eval_token_loss" in entry
    }
    assert len(seen) > 1
    assert evaluated.state.best_global_step == min(seen, key=seen.get)
    assert fingerprint(evaluated)["losses"] == fingerprint(plain)["losses"]


def test_several_evaluation_sets_are_planned_once_each(tmp_path, monkeypatch):
    run = planned(tmp_path)
    sets = {"one": Samples(run.train_dataset.samples[:5]), "other": Samples(run.train_dataset.samples[5:])}
    planned_sets, put_in_rows = [], EvaluationRows.of

    def note(dataset, collate, *, plan, capacity, workers):
        planned_sets.append((dataset, capacity))
        plan = plan_bins(lengths_of(dataset.samples), capacity)
        return put_in_rows(dataset, collate, plan=plan, capacity=None)

    monkeypatch.setattr(EvaluationRows, "of", note)
    run.eval_dataset, run.eval_plan = sets, None
    metrics = run.evaluate()
    assert metrics == {**metrics, **{name: run.evaluate()[name] for name in metrics if name.endswith("token_loss")}}
    assert {"eval_one_token_loss", "eval_other_token_loss"} <= metrics.keys()
    assert planned_sets == [(sets["one"], run.plan.capacity), (sets["other"], run.plan.capacity)]


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


def test_batches_of_a_model_without_packing_are_evaluated_as_trainer_does_with_a_warning(tmp_path):
    model = fresh()
    samples = Samples(receipts(model))
    run = PackedTrainer(model, arguments(tmp_path), collator("padded"), eval_dataset=samples)
    with pytest.warns(UnpackedWarning, match=r"packing is not enabled on the model, .* PackedTrainer\(model="):
        loss = run.evaluate()["eval_loss"]
    assert run.evaluate()["eval_loss"] == loss  # without a word: warnings are errors
    assert loss == Trainer(model, arguments(tmp_path), collator("padded"), eval_dataset=samples).evaluate()["eval_loss"]


# ---------------------------------------------------------------------- what is refused


def test_settings_that_do_not_go_together_are_refused(tmp_path):
    model, samples = scene()
    data, plan = Samples(samples), plan_of(samples)

    def stream(**settings):
        return PackedStream(samples, RowSettings(capacity=200), length=lengths_one, **settings)

    def made(train_dataset=data, args=None, **settings):
        return PackedTrainer(model, args or arguments(tmp_path), collator("packed"), train_dataset, **settings)

    late = arguments(tmp_path, eval_strategy="steps", eval_steps=9)  # after the last step
    two_ranks = {"ranks": 2, "rank": 0, "repeat": True}
    sets, unpacked = {"one": data, "other": data}, enable_packing(fresh())
    disable_packing(unpacked)
    for refused, message in (
        (lambda: made(plan=[[0, 1]]), r"plan has to be a Plan, such as plan_bins\(table, 8192\), got a list"),
        (lambda: made(plan=LengthTable.from_rows([])), "plan has to be a Plan, .* got a LengthTable"),
        (
            lambda: made(Stream(samples), plan=plan).train(),
            "a Stream has no length, so it cannot be planned: leave plan= out",
        ),
        (lambda: made(Samples(samples[1:]), plan=plan).train(), "the plan is of 14 samples, but the data set has 13"),
        (lambda: made(stream(repeat=True), plan=plan).train(), "a PackedStream packs by itself; leave plan= out"),
        (lambda: made(stream(**two_ranks)).train(), r"for rank 0 of 2, but this is rank 0 of 1: PackedStream\(..., ra"),
        (
            lambda: made(stream()).train(),
            r"trains until max_steps, but this stream ends: PackedStream\(..., repeat=True\)",
        ),
        (lambda: made(eval_packing=True).evaluate(data), "needs eval_capacity=, the tokens of a row; or eval_packing="),
        (lambda: made(plan=plan, eval_dataset=data, args=late).train(), "a function cannot measure .*; give plan="),
        (lambda: made(eval_packing=True).evaluate(Stream(samples)), "needs a data set with a length, .* eval_packing="),
        (lambda: PackedTrainer(model, arguments(tmp_path), None, data, plan=plan), "planned rows need a collator"),
        (lambda: made(eval_dataset=sets, eval_plan=plan), "of one data set, but eval_dataset has 2: one, other; leave"),
    ):
        with pytest.raises(ConfigError, match=message):
            refused()
    run = PackedTrainer(unpacked, arguments(tmp_path), collator("padded"), eval_dataset=data, eval_plan=plan)
    with pytest.raises(ConfigError, match="needs PackedTrainer"):
        run.evaluate()


# ---------------------------------------------------------------------- beside other subclasses


def test_a_prediction_step_that_goes_past_it_is_refused_and_not_an_empty_result(tmp_path):
    class Past(PackedTrainer):
        prediction_step = Trainer.prediction_step

    model, samples, _, _ = evaluation_set()
    plan = plan_bins(lengths_of(samples), 500)
    run = Past(model, arguments(tmp_path), collator("packed"), eval_dataset=Samples(samples), eval_plan=plan)
    with pytest.raises(ConfigError, match="are missing: prediction_step was replaced"):
        run.evaluate()


def test_rows_that_share_prefixes_need_a_collator_that_does(tmp_path):
    run = planned(tmp_path)
    assert run.plan is not None
    lengths = run.plan.lengths
    groups = PrefixGroups.of_keys(["a"] * len(lengths), [1] * len(lengths))
    run.plan = plan_bins(lengths, max(lengths), groups=groups)
    with pytest.raises(ConfigError, match=r"the rows of this plan share prefixes: .* share_prefixes=True"):
        run.train()
    with pytest.raises(ConfigError, match=r"the rows of this plan share prefixes"):
        evaluate(run.model, run.train_dataset, run.data_collator, plan=run.plan)


def test_rows_whose_short_prefixes_the_collator_repeats_are_refused():
    groups = PrefixGroups(of_samples=[1, 1, 1, 1], parents=[-1, 0], tokens=[64, 70])
    plan = plan_bins([80] * 4, 110, groups=groups)
    sharing = [SharePrefixes(min_shared=least) for least in (6, 7)]
    shares = [VLMCollator(tiny_processor(), layout="packed", share_prefixes=settings) for settings in sharing]
    check_sharing(plan, shares[0])
    with pytest.raises(ConfigError, match=r"row 0 would compute 128 tokens, .* of 110.*min_shared=7, .*min_shared=6$"):
        check_sharing(plan, shares[1])
    check_sharing(plan_bins([80] * 4, 128, groups=groups), shares[1])


def test_processes_that_would_train_apart_are_refused(tmp_path, monkeypatch):
    run = planned(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")  # torchrun on CPUs without use_cpu=True
    with pytest.raises(ConfigError, match=r"2 processes were launched, but the trainer knows of 1.*use_cpu=True"):
        run.train()
