"""check_trainer names every setting under which a packed row is not its samples alone, with the remedy."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from chats import chat, processor_of
from trainer.packed_runs import planned, streamed
from training import Samples, Stream, arguments, collator, receipts, trainer
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

import vlmpack.trainer
from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError
from vlmpack.interop.seqpacker import RowCollator, pack_dataset
from vlmpack.model import enable_packing
from vlmpack.model.engine import packing_state
from vlmpack.testing import tiny_model
from vlmpack.trainer import PackedTrainer, check_trainer, loss_metrics
from vlmpack.trainer.check_trl import DEFAULTS


def refusal(run) -> str:
    with pytest.raises(ConfigError) as error:
        check_trainer(run)
    return str(error.value)


def enabled():
    return enable_packing(tiny_model(hidden=16, heads=2, layers=1, vision_depth=1))


def test_defaults_are_fine(tmp_path):
    model = enabled()
    check_trainer(trainer(model, receipts(model), tmp_path))


@pytest.mark.parametrize(
    ("settings", "seen", "remedy"),
    [
        ({"label_smoothing_factor": 0.1}, "does not shift the labels", "set it to 0"),
        ({"neftune_noise_alpha": 5.0}, "by the width of the row", "leave it out"),
        (
            {"accelerator_config": {"dispatch_batches": True}},
            "concatenate collated batches and cut them again",
            "accelerator_config={'dispatch_batches': False}",
        ),
        (
            {"train_sampling_strategy": "group_by_length", "remove_unused_columns": True},
            "drops 'length' before group_by_length",
            "remove_unused_columns=False",
        ),
    ],
)
def test_a_setting_that_changes_results(settings, seen, remedy, tmp_path):
    model = enabled()
    message = refusal(trainer(model, receipts(model), tmp_path, **settings))
    assert seen in message
    assert remedy in message


def test_liger_without_its_fused_loss_is_fine(tmp_path):
    model = enabled()
    run = trainer(model, receipts(model), tmp_path)
    run.args.use_liger_kernel = True  # the package itself is not needed to look at the settings
    assert "liger_kernel_config={'fused_linear_cross_entropy': False}" in refusal(run)
    run.args.liger_kernel_config = {"fused_linear_cross_entropy": False}
    check_trainer(run)


def test_a_stream_with_accelerates_defaults(tmp_path):
    model = enabled()
    stream = Stream(receipts(model))
    for dispatch, is_refused in ((None, True), (False, False)):
        config = {"accelerator_config": {"dispatch_batches": dispatch}}
        run = Trainer(model, arguments(tmp_path, **config), collator("packed"), stream)
        if is_refused:
            assert "its default for an IterableDataset" in refusal(run)
        else:
            check_trainer(run)


def test_ranks_that_share_rows_are_given_different_ones(tmp_path, monkeypatch):
    model = enabled()
    run, state = trainer(model, receipts(model), tmp_path), packing_state(model)
    monkeypatch.setattr("vlmpack.model.mechanisms.ClassMechanism.problem", lambda *args, **settings: None)
    vars(model)["_vlmpack_state"] = replace(state, parallel=SimpleNamespace(ranks=2))
    assert "gives every rank a batch of its own: write a loop of your own" in refusal(run)
    vars(model)["_vlmpack_state"] = replace(state, parallel=SimpleNamespace(ranks=1))
    check_trainer(run)


def test_metrics_of_packed_rows(tmp_path, monkeypatch):
    """Trainer alone counts rows where there are samples."""
    model = enable_packing(tiny_model("qwen3", hidden=16, heads=2, layers=1))
    rows = pack_dataset([[5] * n for n in (3, 4, 5, 2, 4, 3)], 7)
    settings = {"compute_metrics": loss_metrics(model), "eval_dataset": rows, "data_collator": RowCollator()}
    assert len(rows) == 3
    run = Trainer(model, arguments(tmp_path, per_device_eval_batch_size=2), **settings)
    assert "count each packed row of its evaluation as one sample (3 rows, 2 at a time on 1 ranks)" in refusal(run)
    with pytest.raises(ConfigError, match="computed 6 losses and handed over 5 samples: of packed rows"):
        run.evaluate()  # what check_trainer sees coming
    run = Trainer(model, arguments(tmp_path, per_device_eval_batch_size=3), **settings)
    check_trainer(run)
    assert run.evaluate()["eval_num_samples"] == 6
    monkeypatch.setattr(type(run.args), "world_size", 2)
    assert "or end where ranks have other numbers of samples" in refusal(run)


def test_an_evaluation_that_skips_samples(tmp_path, monkeypatch):
    model = enable_packing(tiny_model("qwen3_vl", processor=processor_of(), layers=1, vision_depth=1))
    settings = {"data_collator": VLMCollator(processor_of(), layout="packed", on_bad="skip"), "train_dataset": [chat()]}
    args = arguments(tmp_path, remove_unused_columns=False)
    check_trainer(Trainer(model, args, **settings))
    settings |= {"eval_dataset": [chat()]}
    check_trainer(Trainer(model, args, **settings, compute_metrics=loss_metrics(model)))
    run = PackedTrainer(model, args, **settings, eval_capacity=99)
    monkeypatch.setattr(type(args), "world_size", 2)
    check_trainer(run)
    run.eval_packing = False
    assert "samples that the collator skips (on_bad='skip') leave the 2 ranks of its evaluation" in refusal(run)
    run.data_collator = VLMCollator(processor_of(), layout="packed")
    check_trainer(run)


def test_rows_that_are_made_ahead_need_a_trainer_for_them(tmp_path):
    """What accelerate does to batches does not reach them, and is no problem."""
    settings = {"accelerator_config": {"dispatch_batches": True}, "train_sampling_strategy": "group_by_length"}
    run = planned(tmp_path, **settings)
    check_trainer(run)
    run.eval_packing = False
    assert "concatenate collated batches" in refusal(run)
    run = streamed(tmp_path)
    check_trainer(run)
    theirs = Trainer(run.model, run.args, collator("packed"), run.train_dataset)
    assert "use vlmpack's PackedTrainer" in refusal(theirs)
    assert "for an IterableDataset" not in refusal(theirs)


def test_a_resumed_epoch_of_planned_rows_that_would_start_anew(tmp_path):
    run = planned(tmp_path, ignore_data_skip=True)
    assert "starts a resumed epoch anew" in refusal(run)
    assert streamed(tmp_path).args.ignore_data_skip  # it goes to its place by itself


def test_several_devices(tmp_path):
    model = enabled()
    run = trainer(model, receipts(model), tmp_path, average_tokens_across_devices=False)
    run.args._n_gpu = 2
    assert "nn.DataParallel would cut each batch into 2 pieces" in refusal(run)
    assert "torchrun" in refusal(run)


def test_ranks_that_would_train_apart_after_an_evaluation(tmp_path, monkeypatch):
    model = enabled()
    for of_ours in (False, True):
        run = planned(tmp_path) if of_ours else trainer(model, receipts(model), tmp_path)
        held_out, run.eval_dataset = run.eval_dataset, run.eval_dataset if of_ours else None
        monkeypatch.setattr(type(run.args), "world_size", 2)
        check_trainer(run)
        monkeypatch.undo()
        run.evaluate(held_out)
        check_trainer(run)  # one process has nobody to part from
        monkeypatch.setattr(type(run.args), "world_size", 2)
        if of_ours:
            check_trainer(run)
        else:
            assert "every rank trains a model of its own: evaluate afterwards" in refusal(run)
        monkeypatch.undo()


def test_an_evaluation_over_ranks_in_another_trainer(tmp_path, monkeypatch):
    run = trainer(model := enabled(), receipts(model), tmp_path)
    check_trainer(run)
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    assert "HF Trainer's own evaluation over 2 ranks weighs the losses of packed batches wrongly" in refusal(run)
    assert "use PackedTrainer of vlmpack.trainer" in refusal(run)
    monkeypatch.undo()
    check_trainer(planned(tmp_path))


def test_an_evaluation_whose_loss_is_not_replaced(tmp_path):
    model = enabled()
    run = Trainer(model, arguments(tmp_path), collator("packed"), eval_dataset=Samples(receipts(model)))
    assert "averages the mean losses of batches over samples, so eval_loss would change" in refusal(run)
    run.compute_metrics = loss_metrics(model)
    check_trainer(run)
    run.args.prediction_loss_only = True
    assert "is not called (prediction_loss_only" in refusal(run)
    run.args.prediction_loss_only = False
    for metrics in (None, loss_metrics(enabled())):
        run.compute_metrics = metrics
        assert "compute_metrics is missing or of another model" in refusal(run)
    run.eval_dataset = None
    check_trainer(run)


def test_an_evaluation_that_generates(tmp_path):
    args = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, report_to=[], predict_with_generate=True)
    model = enabled()
    settings = {"eval_dataset": Samples(receipts(model)), "compute_metrics": lambda prediction: {}}
    run = Seq2SeqTrainer(model, args, collator("padded"), **settings)
    assert "averages the mean losses of batches over samples" in refusal(run)
    metrics = loss_metrics(model)
    run.compute_metrics = lambda prediction: {**metrics(prediction), "bleu": 0}
    check_trainer(run)


# ---------------------------------------------------------------------- TRL's trainers, and settings of theirs


def of_trl(name):
    """A trainer as TRL makes them: a loss of its own, in its own module."""

    def compute_loss(self, *args, **kwargs):
        raise AssertionError("nothing is computed here")

    compute_loss.__module__ = "trl.trainer"
    return type(name, (Trainer,), {"compute_loss": compute_loss})


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("SFTTrainer", "from vlmpack.trainer.trl import PackedSFTTrainer, which takes the same arguments"),
        ("GRPOTrainer", "from vlmpack.trainer.trl import PackedGRPOTrainer"),
        ("CPOTrainer", "nothing of it is packed, so leave enable_packing out"),
    ],
)
def test_a_loss_that_goes_past_the_packed_forward(name, remedy, layout, tmp_path):
    trl_trainer = of_trl(name)
    model = enabled()
    message = refusal(trl_trainer(model, arguments(tmp_path), collator(layout), receipts(model)))
    assert f"TRL's {name} computes the loss itself" in message
    assert "padded batches are computed with all their padding" in message
    assert remedy in message

    class Counting(trl_trainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    class Plain(trl_trainer):
        compute_loss = Trainer.compute_loss

    class PlainAndCounting(Plain):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    assert f"TRL's {name} computes" in refusal(Counting(model, arguments(tmp_path), collator(layout), receipts(model)))
    for klass in (Plain, PlainAndCounting):
        check_trainer(klass(model, arguments(tmp_path), collator(layout), receipts(model)))


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({"max_length": 60}, "max_length=60 (the collator's is None)"),
        ({"loss_type": "dft"}, "loss_type='dft' (the model's own loss is computed, cross-entropy)"),
        ({"completion_only_loss": False}, "completion_only_loss=False (the collator has train_on='assistant')"),
        ({"padding_free": True, "shuffle_dataset": True}, "padding_free=True; shuffle_dataset=True"),
        ({"packing": True, "eval_packing": True}, "packing=True; eval_packing=True"),
        ({"truncation_mode": "keep_end"}, "truncation_mode='keep_end'"),
    ],
)
def test_settings_that_nothing_reads_are_named(settings, seen, tmp_path):
    model = enable_packing(tiny_model(processor=processor_of(), hidden=16, heads=2, layers=1, vision_depth=1))
    collate = VLMCollator(processor_of(), layout="packed")
    run = Trainer(model, arguments(tmp_path, remove_unused_columns=False), collate, [chat()])
    defaults = {"max_length": 1024, "loss_type": "nll", "completion_only_loss": None, "assistant_only_loss": False}
    vars(run.args).update(defaults)
    check_trainer(run)
    vars(run.args).update(settings)
    assert f"it has settings that nothing reads: {seen}: leave them out" in refusal(run)
    if "loss_type" not in settings:
        vars(run)["_skip_prepare_dataset"] = False  # TRL read them when it made tokens of text
        check_trainer(run)


@pytest.mark.parametrize(
    ("settings", "flattened", "seen"),
    [
        ({"packing": True, "packing_strategy": "bfd"}, True, "packing=True has TRL lay samples out in rows"),
        ({"padding_free": True}, True, "padding_free=True has TRL lay samples out in rows"),
        ({"packing": True, "packing_strategy": "wrapped"}, False, "packing_strategy='wrapped' cuts samples in two"),
        ({"eval_packing": True}, False, "eval_packing=True evaluates what shares a row as one sample"),
        ({}, False, "its rows hold several samples (seq_lengths), and TRL's collator makes one sample of each"),
    ],
)
def test_rows_of_text_that_trl_packs_itself(settings, flattened, seen, tmp_path):
    row = {"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8], **({} if settings else {"seq_lengths": [2, 2]})}
    run = Trainer(enabled(), arguments(tmp_path, remove_unused_columns=False), lambda rows: rows, [row])
    vars(run)["_skip_prepare_dataset"] = False  # TRL makes tokens of text
    vars(run)["padding_free"] = flattened
    vars(run.args).update(settings)
    assert seen in refusal(run)
    run.data_collator = RowCollator()
    check_trainer(run)


def test_settings_that_say_what_the_collator_does(tmp_path):
    model = enable_packing(tiny_model(processor=processor_of(), hidden=16, heads=2, layers=1, vision_depth=1))
    for learnt, is_answers in (("assistant", True), ("all", False)):
        collate = VLMCollator(processor_of(), layout="packed", max_length=60, train_on=learnt)
        run = Trainer(model, arguments(tmp_path, remove_unused_columns=False), collate, [chat()])
        vars(run.args).update(max_length=60, completion_only_loss=is_answers, assistant_only_loss=is_answers)
        check_trainer(run)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trls_trainers_are_known_by_their_modules(tmp_path):
    trl = pytest.importorskip("trl", reason="needs TRL: pip install trl")
    for trl_trainer in (trl.SFTTrainer, trl.DPOTrainer, trl.GRPOTrainer):
        assert trl_trainer.compute_loss.__module__.startswith("trl.")
    fields = vars(trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False))
    assert {name: fields[name] for name in DEFAULTS} == DEFAULTS
    assert fields["loss_type"] == "nll"


def test_a_machine_without_trl(monkeypatch):
    monkeypatch.setattr("vlmpack.errors.find_spec", lambda package: None)
    with pytest.raises(
        ConfigError, match=r"PackedGRPOTrainer needs trl, not installed here: pip install 'vlmpack\[rl\]'"
    ):
        vlmpack.trainer.__getattr__("PackedGRPOTrainer")
    with pytest.raises(AttributeError, match="it has Evaluation, PackedGRPOTrainer, PackedTrainer"):
        vlmpack.trainer.__getattr__("PackedPPOTrainer")


def test_columns_that_trainer_removes_before_a_collator_reads_them(tmp_path):
    tokens = {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}
    vlm = VLMCollator(processor_of(), layout="packed", train_on="all")
    for collate, sample, lost in (
        (vlm, chat(id="a"), "'messages', 'id'"),
        (vlm, {**tokens, "assistant_masks": [0, 1, 1]}, "'assistant_masks'"),
        (RowCollator(), {**tokens, "position_ids": [0, 1, 0], "completion_mask": [0, 1, 0]}, "'completion_mask'"),
    ):
        model = enable_packing(tiny_model(processor=processor_of(), hidden=16, heads=2, layers=1, vision_depth=1))
        seen = f"remove_unused_columns drops {lost} before {type(collate).__name__} reads it: set remove_unused_columns"
        assert seen in refusal(Trainer(model, arguments(tmp_path, remove_unused_columns=True), collate, [sample]))
        check_trainer(Trainer(model, arguments(tmp_path, remove_unused_columns=False), collate, [sample]))
    check_trainer(Trainer(model, arguments(tmp_path, remove_unused_columns=True), vlm, [tokens]))


def test_a_processor_of_another_model(tmp_path):
    model = enable_packing(tiny_model("qwen3_vl", processor=processor_of("qwen3_vl"), hidden=16, heads=2, layers=1))
    other = VLMCollator(processor_of("qwen2_5_vl"), layout="packed")
    message = refusal(Trainer(model, arguments(tmp_path, remove_unused_columns=False), other, [chat()]))
    assert "its collator's processor belongs to another model (" in message
    assert "values of a patch 1176, the model's 1536" in message


def test_no_collator(tmp_path):
    model = enabled()
    samples = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}]
    assert "it has no data_collator" in refusal(Trainer(model, arguments(tmp_path), None, samples))


def test_a_model_that_was_enabled_too_late_or_never(tmp_path):
    model = tiny_model(hidden=16, heads=2, layers=1, vision_depth=1)
    run = trainer(model, receipts(model), tmp_path)
    assert "packing is not enabled" in refusal(run)
    enable_packing(model)
    assert "enable packing before the Trainer is made" in refusal(run)


def test_all_problems_are_told_at_once(tmp_path):
    model = enabled()
    settings = {"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0}
    assert refusal(trainer(model, receipts(model), tmp_path, **settings)).count("\n- ") == 2
