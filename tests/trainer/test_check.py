"""Settings under which a packed row is not its samples alone: named by check_trainer, refused by the run itself."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from chats import chat, processor_of
from datasets import Dataset
from trainer.packed_runs import fresh, planned, streamed
from training import LAYOUTS, Samples, Stream, arguments, collator, descend, receipts, trainer
from transformers import Trainer, default_data_collator

from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError, LayoutError, SampleError
from vlmpack.interop.seqpacker import RowCollator, pack_dataset
from vlmpack.model import disable_packing, enable_packing
from vlmpack.model.engine import packing_state
from vlmpack.testing import tiny_model
from vlmpack.trainer import PackedTrainer, check_trainer, loss_metrics
from vlmpack.trainer.check import OF_TRL


def refusal(run) -> str:
    with pytest.raises(ConfigError) as error:
        check_trainer(run)
    return str(error.value)


def enabled(**settings):
    return enable_packing(fresh(**settings))


def of_args(**settings):
    return lambda run, patch: vars(run.args).update(settings)


def of_run(**settings):
    return lambda run, patch: vars(run).update(settings)


def over_two_ranks(run, patch):
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        patch.setattr(torch.distributed, name, lambda value=value: value)


def sharing(ranks):
    def share(run, patch):
        patch.setattr("vlmpack.model.mechanisms.ClassMechanism.problem", lambda *args, **settings: None)
        state = replace(
            packing_state(run.model),
            parallel=SimpleNamespace(ranks=ranks, same_calls=True, mesh=None, vision=SimpleNamespace(host=None)),
        )
        vars(run.model)["_vlmpack_state"] = state

    return share


NOT_CALLED = (
    "loss_metrics(model) is not called, and eval_loss not exact (prediction_loss_only, or compute_metrics is miss"
)
FINE = {
    "Liger without its loss": of_args(use_liger_kernel=True, liger_kernel_config={"fused_linear_cross_entropy": False}),
    "one rank a row": sharing(1),
    "several ranks' setting on one": of_args(average_tokens_across_devices=False),
    "no evaluation": of_run(eval_dataset=None, compute_metrics=None),
}
NAMED = {
    "Liger": (of_args(use_liger_kernel=True), "liger_kernel_config={'fused_linear_cross_entropy': False}"),
    "ranks that share rows": (sharing(2), "its ranks share rows, but it gives each its own: use PackedTrainer"),
    "several devices": (of_args(_n_gpu=2), "nn.DataParallel would split each batch into 2 pieces: use torchrun"),
    "evaluation over ranks": (over_two_ranks, "evaluation over 2 ranks weighs the losses of packed batches wrongly"),
    "no loss in evaluation": (of_args(prediction_loss_only=True), NOT_CALLED),
    "no metrics": (of_run(compute_metrics=None), NOT_CALLED),
    "metrics of another": (lambda run, patch: of_run(compute_metrics=loss_metrics(enabled()))(run, patch), NOT_CALLED),
    "no collator": (of_run(data_collator=default_data_collator), "it has no data_collator"),
    "disabled": (lambda run, patch: disable_packing(run.model), "packing is not enabled on its model"),
    "too late": (of_run(model_accepts_loss_kwargs=False), "enable packing before the Trainer is made"),
    "dispatched": (lambda run, patch: vars(run.accelerator.dataloader_config).update(dispatch_batches=True), "False}"),
}


@pytest.mark.parametrize(
    ("change", "told"), [*((change, None) for change in FINE.values()), *NAMED.values()], ids=[*FINE, *NAMED]
)
def test_what_would_change_results_is_named_and_nothing_else(change, told, tmp_path, monkeypatch):
    model = enabled()
    run = trainer(model, receipts(model), tmp_path)
    check_trainer(run)
    change(run, monkeypatch)
    if told is None:
        check_trainer(run)
    else:
        assert told in refusal(run)


def test_metrics_are_bound_to_a_model_before_its_evaluation(tmp_path):
    model = enabled()
    run = Trainer(model, arguments(tmp_path), collator("packed"), eval_dataset=Samples(receipts(model)))
    assert "averages the mean losses of batches over samples, so eval_loss would change" in refusal(run)
    run.compute_metrics = loss_metrics(model)
    check_trainer(run)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("settings", "told", "calls", "refused"),
    [
        (
            {"label_smoothing_factor": 0.1},
            "does not shift the labels of Qwen-VL: set it to 0",
            ("train", "evaluate"),
            r"labels were kept back.*label_smoothing_factor.*set it to 0",
        ),
        (
            {"neftune_noise_alpha": 5.0},
            "by the width of the row, so a packed sample gets less: leave it out",
            ("train",),
            r"neftune_noise_alpha .* a packed sample would get less .* leave it out",
        ),
    ],
)
def test_a_setting_that_is_named_is_refused_by_the_run_too(settings, told, calls, refused, layout, tmp_path):
    model = enabled()
    run = trainer(model, receipts(model), tmp_path, layout, **settings)
    assert told in refusal(run)
    for name in calls:
        with pytest.raises(ConfigError, match=refused):
            getattr(run, name)()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stream_under_accelerates_default(layout, tmp_path):
    """Accelerate cuts every batch to as many rows as its first tensor has: one, for a packed row with its images."""
    samples = receipts(tiny_model())
    for dispatch in (None, False):
        config = {"accelerator_config": {"dispatch_batches": dispatch}, "per_device_train_batch_size": 3}
        run = Trainer(enable_packing(tiny_model()), arguments(tmp_path, **config), collator(layout), Stream(samples))
        if dispatch is None:
            assert "accelerate would split collated batches" in refusal(run)
            with pytest.raises(LayoutError, match=r"was the batch split.*dispatch_batches=False"):
                run.train()
        else:
            check_trainer(run)
            run.train()
            expected = descend(tiny_model(), samples, size=3, steps=2)
            losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
            assert losses == pytest.approx(expected.losses, rel=1e-6)


# ---------------------------------------------------------------------- batches, ranks and losses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_function_of_ones_own_has_to_ask_for_logits(layout, tmp_path):
    def loss_func(outputs, labels, num_items_in_batch=None):
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

    model = enable_packing(tiny_model())
    samples = receipts(model)
    expected = descend(tiny_model(), samples, size=4, steps=1)
    for more, is_refused in (({}, True), ({"output_logits": True}, False)):
        args = arguments(tmp_path, max_steps=1, gradient_accumulation_steps=2, train_sampling_strategy="sequential")
        run = Trainer(model, args, collator(layout, **more), Samples(samples), compute_loss_func=loss_func)
        if is_refused:
            with pytest.raises(ConfigError, match=r"compute_loss_func.*output_logits=True"):
                run.train()
        else:
            run.train()
            assert run.state.log_history[0]["loss"] == pytest.approx(expected.losses[0], rel=1e-6)


def test_metrics_of_packed_rows(tmp_path):
    """Trainer alone counts rows where there are samples."""
    model = enable_packing(tiny_model("qwen3", hidden=16, heads=2, layers=1))
    rows = pack_dataset([[5] * n for n in (3, 4, 5, 2, 4, 3)], 7)
    settings = {"compute_metrics": loss_metrics(model), "eval_dataset": rows, "data_collator": RowCollator()}
    assert len(rows) == 3
    run = Trainer(model, arguments(tmp_path, per_device_eval_batch_size=2), **settings)
    with pytest.raises(ConfigError, match="computed 6 losses and handed over 5 samples: of packed rows"):
        run.evaluate()
    run = Trainer(model, arguments(tmp_path, per_device_eval_batch_size=3), **settings)
    check_trainer(run)
    assert run.evaluate()["eval_num_samples"] == 6


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
    assert "split collated batches" in refusal(run)
    assert "starts a resumed epoch again" in refusal(planned(tmp_path, ignore_data_skip=True))
    run = streamed(tmp_path)
    assert run.args.ignore_data_skip  # it goes to its place by itself
    check_trainer(run)
    theirs = Trainer(run.model, run.args, collator("packed"), run.train_dataset)
    assert "use vlmpack's PackedTrainer" in refusal(theirs)
    assert "split collated batches" not in refusal(theirs)


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
            assert "leave out DDP: evaluate after it, or use PackedTrainer" in refusal(run)
        monkeypatch.undo()


# ---------------------------------------------------------------------- columns and collators


def test_columns_that_trainer_removes_before_a_collator_reads_them(tmp_path):
    tokens = {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}
    vlm = VLMCollator(processor_of(), layout="packed", train_on="all")
    for collate, sample, lost in (
        (vlm, chat(id="a"), "'messages', 'id'"),
        (vlm, {**tokens, "assistant_masks": [0, 1, 1]}, "'assistant_masks'"),
        (RowCollator(), {**tokens, "position_ids": [0, 1, 0], "completion_mask": [0, 1, 0]}, "'completion_mask'"),
    ):
        model = enabled(processor=processor_of())
        seen = f"remove_unused_columns drops {lost} before {type(collate).__name__} reads it: set remove_unused_columns"
        run = Trainer(model, arguments(tmp_path, remove_unused_columns=True), collate, [sample])
        assert seen in refusal(run)
        if "messages" in lost:
            with pytest.raises(SampleError, match=r"it has: none at all.*remove_unused_columns=False"):
                run.train()
        check_trainer(Trainer(model, arguments(tmp_path, remove_unused_columns=False), collate, [sample]))
    check_trainer(Trainer(model, arguments(tmp_path, remove_unused_columns=True), vlm, [tokens]))
    args = arguments(tmp_path, remove_unused_columns=True, train_sampling_strategy="group_by_length")
    table = Dataset.from_dict({"input_ids": [[7] * 5] * 2, "labels": [[7] * 5] * 2, "length": [40, 30]})
    assert "drops 'length' before group_by_length reads it" in refusal(Trainer(model, args, collator("packed"), table))


def test_a_padded_batch_that_lost_its_mask():
    model = enabled()
    batch = collator("padded")(receipts(model)[:3])
    batch.pop("attention_mask")
    with pytest.raises(LayoutError, match=r"without its attention_mask.*keep the 2D mask"):
        model(**batch)


# ---------------------------------------------------------------------- TRL's trainers, and settings of theirs


def of_trl(name):
    """A trainer as TRL makes them: a loss of its own, in its own module."""

    def compute_loss(self, *args, **kwargs):
        raise AssertionError("nothing is computed here")

    compute_loss.__module__ = "trl.trainer"
    return type(name, (Trainer,), {"compute_loss": compute_loss})


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("SFTTrainer", "from vlmpack.trainer.trl import PackedSFTTrainer"),
        ("GRPOTrainer", "from vlmpack.trainer.trl import PackedGRPOTrainer"),
        ("CPOTrainer", "leave enable_packing out"),
    ],
)
def test_a_loss_that_goes_past_the_packed_forward(name, remedy, tmp_path):
    model, trl_trainer = enabled(), of_trl(name)

    def counted(self, *args, **kwargs):
        return super(type(self), self).compute_loss(*args, **kwargs)

    counting = type("Counting", (trl_trainer,), {"compute_loss": counted})
    plain = type("Plain", (trl_trainer,), {"compute_loss": Trainer.compute_loss})
    plain_and_counting = type("PlainAndCounting", (plain,), {"compute_loss": counted})
    for layout in LAYOUTS:
        settings = (model, arguments(tmp_path), collator(layout), receipts(model))
        for klass in (trl_trainer, counting):
            message = refusal(klass(*settings))
            assert f"TRL's {name} computes the loss itself" in message
            assert remedy in message
        for klass in (plain, plain_and_counting):
            check_trainer(klass(*settings))


def sft_arguments(folder, **settings):
    trl = pytest.importorskip("trl", reason="needs TRL: pip install trl")
    return trl.SFTConfig(
        str(folder),
        use_cpu=True,
        bf16=False,
        report_to=[],
        remove_unused_columns=False,
        gradient_checkpointing=False,
        **settings,
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL's settings
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
    args = sft_arguments(tmp_path)
    assert all(name in vars(args) for name in OF_TRL)
    collate = VLMCollator(processor_of(), layout="packed")
    run = Trainer(enabled(processor=processor_of()), args, collate, [chat()])
    check_trainer(run)
    vars(run.args).update(settings)
    assert f"it has settings without effect: {seen}: set them on the collator" in refusal(run)
    if "loss_type" not in settings:
        vars(run)["_skip_prepare_dataset"] = False  # TRL read them when it made tokens of text
        check_trainer(run)
