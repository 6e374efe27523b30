"""TRL's trainers on packed rows against TRL's own, padded: the same losses, metrics, gradients and weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from test_readme import DOCS, as_a_reader, examples
from training import distance
from transformers import AutoModelForSequenceClassification, Trainer
from trl_runs import (
    BEYOND_QWEN,
    arguments,
    compared,
    finish,
    messages,
    placeholders,
    preferences,
    processor_of,
    prompt_and_completion,
    prompts,
    run_of,
    said,
    samples,
    saved,
    text,
    trl,
)

from vlmpack.collate import SharePrefixes, VLMCollator
from vlmpack.data import mix_datasets, open_dataset
from vlmpack.errors import ConfigError, UnpackedWarning
from vlmpack.families import family_of
from vlmpack.interop.seqpacker import RowCollator, pack_dataset
from vlmpack.lengths import measure_lengths
from vlmpack.loading import PackedStream, RowSettings
from vlmpack.model import StepConfig, enable_packing, is_packing, plain
from vlmpack.plan import plan_bins
from vlmpack.testing import tiny_config, tiny_model
from vlmpack.trainer import PackedGRPOTrainer, check_trainer, evaluate
from vlmpack.trainer.trl import PackedDistillationTrainer, PackedDPOTrainer, PackedRewardTrainer, PackedSFTTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*SwigPy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type.*Conv3d:UserWarning"),
    pytest.mark.filterwarnings("ignore:nothing is packed in this training step:UserWarning"),  # of the padded runs
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # processors of GLM
]


class Counting(trl.SFTTrainer):
    """TRL's own, with targets counted over accumulated batches, where TRL averages averages for these models."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True


class Aligned(trl.GRPOTrainer):
    """TRL's own, with the kinds of tokens read off the ids: it takes those of a prompt with two first tokens."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        family = family_of(self.model)

        def align(backbone, args, inputs):
            return args, {**inputs, family.token_types: family.media_types(inputs["input_ids"], self.model.config)}

        for model in (self.model, self.ref_model):
            family.backbone(model).register_forward_pre_hook(align, with_kwargs=True)


def questions():
    """Prompts of text alone."""
    return Dataset.from_list([{"prompt": said("user", "How much is it? " * n)} for n in (2, 4, 3, 5)])


RATES = {"temperature": 0.7, "gradient_accumulation_steps": 2, "num_iterations": 2}
SETTINGS = {
    "SFT": [
        {"dataset": samples(prompt_and_completion), "completion_only_loss": False},
        {"dataset": samples(prompt_and_completion), "completion_only_loss": True},
        {"dataset": samples(prompt_and_completion), "max_length": 60},
        {"dataset": samples(prompt_and_completion, images=False)},
        {"dataset": samples(text), "remove_unused_columns": False},  # TRL removes "text" of samples with images
        {"loss_type": "dft"},
        {"max_grad_norm": 0.5, "optim": "adamw_torch", "learning_rate": 1e-4},
        {"gradient_checkpointing": True},
        {"pad_to_multiple_of": 16},
        {"gradient_accumulation_steps": 2, "padded": Counting},
    ],
    "DPO": [
        {"loss_type": "bco_pair"},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        {"ld_alpha": 0.5},
        {"gradient_accumulation_steps": 2},
        {"sync_ref_model": True, "ref_model_sync_steps": 1},
        {"gradient_checkpointing": True},
        {"dataset": preferences().remove_columns("images"), "precompute_ref_log_probs": True},
    ],
    "Distillation": [
        {"beta": 0.0, "gradient_accumulation_steps": 2},
        {"beta": 0.5, "temperature": 0.7, "gradient_checkpointing": True},
    ],
    "GRPO": [
        {"loss_type": "vespo", "beta": 0.3, **RATES},
        {"loss_type": "grpo", "beta": 0.0, **RATES},
        {"num_generations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
        {"steps_per_generation": 3, "beta": 0.1},
        {"importance_sampling_level": "sequence", "num_iterations": 3},
        {"mask_truncated_completions": True, "beta": 0.1},
        {"off_policy_mask_threshold": 0.01, "num_iterations": 2, "delta": 1.5},
        {"gradient_checkpointing": True},
        {"cast_lm_head_to_fp32": True},
        {"dataset": questions(), "beta": 0.1, "gradient_accumulation_steps": 2},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [pytest.param(name, case, id=f"{name}-{at}") for name, cases in SETTINGS.items() for at, case in enumerate(cases)],
)
def test_settings(name, settings, tmp_path):
    compared(name, tmp_path, **{"steps": 3 if name == "GRPO" else 2, **settings})


SHARE = {"SFT": 1, "DPO": 0.65, "KTO": 0.9, "RLOO": 0.9, "Distillation": 0.9, "GRPO": 0.5}
"""The largest part of the batch's tokens that is computed: each prompt once."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in ("SFT", "DPO", "KTO", "Distillation")),
        ("RLOO", {"beta": 0.1}),
        ("GRPO", {"beta": 0.1, "num_iterations": 2}),
    ],
)
def test_steps(name, settings, tmp_path):
    run = compared(name, tmp_path, steps=4, **settings)
    assert run.state.log_history[0]["packing/computed"] <= SHARE[name]
    assert name not in ("DPO", "GRPO") or is_packing(run.ref_model)


@pytest.mark.slow
def test_the_teacher_computes_what_the_student_computes_and_no_padding(tmp_path):
    run = run_of("Distillation", PackedDistillationTrainer, saved(tmp_path), tmp_path, max_steps=1)
    tokens: dict[str, list[int]] = {"student": [], "teacher": []}
    for name, model in (("student", run.model), ("teacher", run.teacher_model)):
        model.get_input_embeddings().register_forward_hook(
            lambda _, args, __, name=name: tokens[name].append(args[0].numel())
        )
    run.train()
    assert tokens["teacher"] == tokens["student"][-1:]  # the student has also generated
    assert run.state.log_history[0]["packing/computed"] < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"center_rewards_coefficient": 0.1}])
def test_rewards(settings, tmp_path):
    """A pair's prompt is computed once, and the model learns what it learns from padded pairs and their margins."""
    tokenizer, found = processor_of().tokenizer, []
    answers = [{"chosen": " The total is 75,000." * (1 + n), "rejected": " It is nothing."} for n in range(4)]
    prompts = [{"prompt": "The total? " * (2 + n % 2), "margin": n / 2} for n in range(4)]
    pairs = Dataset.from_list([prompt | answer for prompt, answer in zip(prompts, answers, strict=True)])
    for trainer in (trl.RewardTrainer, PackedRewardTrainer):
        config = tiny_config("qwen3", vocab_size=len(tokenizer))
        config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        more = {"share_prefixes": SharePrefixes(min_shared=4)} if trainer is PackedRewardTrainer else {}
        args = arguments("RewardConfig", tmp_path, per_device_train_batch_size=2, learning_rate=0.1, **settings)
        run = trainer(model, args=args, train_dataset=pairs, processing_class=tokenizer, **more)
        found.append((run, *finish(run)))
    (plain_run, truth, reference), (packed_run, packed, weights) = found
    assert packed.losses == pytest.approx(truth.losses, rel=1e-5)
    assert max(distance(*gradients) for gradients in zip(truth.gradients, packed.gradients, strict=True)) < 1e-4
    assert distance(reference, weights) < 1e-4
    for expected, seen in zip(plain_run.state.log_history[:-1], packed_run.state.log_history[:-1], strict=True):
        assert {name: seen[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert seen["packing/computed"] < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl_moe", *BEYOND_QWEN])
@pytest.mark.parametrize("name", ["SFT", "DPO", "GRPO"])
def test_families(name, family, tmp_path):
    settings = {"router_aux_loss_coef": 0.1} if family.endswith("moe") else {}
    settings |= {"dataset": samples(prompt_and_completion)} if name == "SFT" else {}
    if name == "GRPO":
        settings |= {"beta": 0.1, "padded": Aligned if family.startswith("gemma") else None}
    run = compared(name, tmp_path, family, steps=3 if name == "GRPO" else 2, **settings)
    assert name == "DPO" or ("aux_loss" in run.state.log_history[0]) == family.endswith("moe")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [("SFT", {}), ("DPO", {"learning_rate": 0.1}), ("GRPO", {"beta": 0.3, "num_iterations": 2, "learning_rate": 0.5})],
)
def test_an_adapter_that_trl_adds_and_whose_reference_is_the_policy_without_it(name, settings, tmp_path):
    scale = {} if name == "SFT" else {"lora_alpha": 64}
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights="gaussian", **scale)
    run = compared(name, tmp_path, extras={"peft_config": adapter}, **settings)
    assert name == "SFT" or run.ref_model is None
    assert name != "GRPO" or run.state.log_history[1]["kl"] > 0


@pytest.mark.slow
def test_an_adapter_of_before_whose_reference_is_its_copy(tmp_path):
    def adapted(model):
        torch.manual_seed(3)
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))

    run = compared("GRPO", tmp_path, adapted=adapted, beta=0.3, num_iterations=2, learning_rate=0.1)
    assert "ref" in run.model.peft_config
    assert run.state.log_history[1]["kl"] > 0


IN_PIECES = {
    "SFT": {},
    "DPO": {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0},
    "GRPO": {"beta": 0.3, "num_iterations": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    "RLOO": {"max_grad_norm": 1.0},
    "Distillation": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_PIECES)
def test_rows_in_pieces_have_the_losses_metrics_and_gradients_of_trl(name, tmp_path):
    capacity, widths = 24, []

    def in_pieces(model):
        model.get_input_embeddings().register_forward_pre_hook(lambda _, args: widths.append(args[0].shape))
        return enable_packing(model, StepConfig(capacity=capacity))

    run = compared(name, tmp_path, steps=2, enabled=in_pieces, **IN_PIECES[name])
    rows = [width for samples, width in widths if samples == 1]  # generation has more samples
    assert max(rows) <= capacity
    assert len(rows) > 3 * run.state.global_step * run.args.gradient_accumulation_steps


@pytest.mark.slow
def test_an_evaluation(tmp_path):
    found = []
    for trainer in (trl.GRPOTrainer, PackedGRPOTrainer):
        run = run_of("GRPO", trainer, saved(tmp_path), tmp_path, per_device_eval_batch_size=4)
        found.append(run.evaluate(prompts()))
    assert found[1]["eval_loss"] == pytest.approx(found[0]["eval_loss"], abs=1e-6)
    assert found[1]["eval_entropy"] == pytest.approx(found[0]["eval_entropy"], rel=1e-5)


@pytest.mark.slow
def test_a_processor_that_pads_on_the_right_changes_nothing(tmp_path):
    """TRL then puts the token types of short prompts beside their tokens; here they are read off the ids."""
    runs = []
    for side in ("left", "right"):
        settings = {"processor": processor_of(side=side), "per_device_train_batch_size": 8, "max_steps": 1}
        runs.append(finish(run_of("GRPO", PackedGRPOTrainer, saved(tmp_path), tmp_path, **settings)))
    assert distance(runs[0][1], runs[1][1]) == 0


# ---------------------------------------------------------------------- rows of VLMCollator, planned rows, evaluation


ROWS = {"remove_unused_columns": False, "max_length": None, "max_steps": 2}


def collated(trainer, model, tmp_path, layout, *, extras=None, **settings):
    """A run over batches of vlmpack's collator, of prompts and completions."""
    collator = VLMCollator(processor_of(), layout=layout)
    extras = {"data_collator": collator, "eval_dataset": samples(prompt_and_completion), **(extras or {})}
    settings = {"dataset": samples(prompt_and_completion), **ROWS, **settings}
    return run_of("SFT", trainer, model, tmp_path, extras=extras, **settings)


def planned(model, tmp_path, **settings):
    """A run whose steps have all samples, in planned rows."""
    lengths = measure_lengths(samples(prompt_and_completion), VLMCollator(processor_of(), layout="packed"))
    plan = plan_bins(lengths, 400)
    extras, settings = {"plan": plan}, {"gradient_accumulation_steps": len(plan.bins), **settings}
    return collated(PackedSFTTrainer, model, tmp_path, "packed", extras=extras, **settings)


@pytest.mark.slow
def test_planned_rows_have_the_losses_of_one_big_batch(tmp_path):
    """The rows of one epoch, accumulated, against TRL's padded trainer on all samples at once."""
    run = planned(saved(tmp_path), tmp_path)
    check_trainer(run)
    assert 1 < len(run.plan.bins) < 8
    ours, weights = finish(run)
    big = {"per_device_train_batch_size": 8}
    padded, reference = finish(collated(trl.SFTTrainer, saved(tmp_path), tmp_path, "padded", **big))
    assert len(padded.losses) == 2
    assert ours.losses == pytest.approx(padded.losses, rel=1e-5)
    assert distance(padded.gradients[0], ours.gradients[0]) < 1e-5
    assert distance(reference, weights) < 1e-5


@pytest.mark.slow
def test_an_evaluation_in_planned_rows_is_exact_and_has_no_metrics_of_batches(tmp_path):
    run = planned(saved(tmp_path), tmp_path)
    seen = run.evaluate()
    alone = collated(trl.SFTTrainer, saved(tmp_path), tmp_path, "padded", per_device_eval_batch_size=1)
    each = [alone.evaluate(alone.train_dataset.select([n]))["eval_loss"] for n in range(8)]
    assert run.evaluation.sample_losses == pytest.approx(each, rel=1e-5)
    assert seen["eval_loss"] == pytest.approx(run.evaluation.token_loss)
    assert not {"eval_entropy", "eval_mean_token_accuracy"} & seen.keys()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_an_evaluation_in_batches_is_exact_and_has_the_metrics_of_trl(layout, tmp_path):
    """TRL's eval_loss is the mean of means of batches; each target weighs the same here."""
    batches = {"per_device_eval_batch_size": 3}
    expected = collated(trl.SFTTrainer, saved(tmp_path), tmp_path, "padded", **batches).evaluate()
    extras = {"eval_packing": False}
    seen = collated(PackedSFTTrainer, saved(tmp_path), tmp_path, layout, extras=extras, **batches).evaluate()
    for name in ("eval_entropy", "eval_mean_token_accuracy"):
        assert seen[name] == pytest.approx(expected[name], rel=1e-4)
    exact = planned(saved(tmp_path), tmp_path).evaluate()["eval_loss"]
    assert seen["eval_loss"] == pytest.approx(exact, rel=1e-5)
    assert abs(expected["eval_loss"] - exact) > 1e-3


def written(tmp_path):
    """The prompts and completions in a file, with their pictures beside it."""
    rows = samples(prompt_and_completion).to_list()
    for at, row in enumerate(rows):
        row["images"] = [f"{at}-{n}.png" for n, image in enumerate(row["images"])]
    for at, row in enumerate(samples(prompt_and_completion)):
        for n, image in enumerate(row["images"]):
            image.save(tmp_path / f"{at}-{n}.png")
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "chats.jsonl"


@pytest.mark.slow
def test_data_sets_of_others_than_datasets_are_trained_on_as_they_are(tmp_path):
    """Opened, mixed and streamed: the losses of the same samples in a data set of `datasets`."""
    opened = open_dataset(written(tmp_path))
    expected, weights = finish(collated(PackedSFTTrainer, saved(tmp_path), tmp_path, "packed"))
    collator = VLMCollator(processor_of(), layout="packed")
    mix = mix_datasets({"chats": opened}, seed=None)
    for data in (opened, mix, list(opened)):
        extras = {"data_collator": collator, "eval_dataset": {"held": data}}
        run = run_of("SFT", PackedSFTTrainer, saved(tmp_path), tmp_path, dataset=data, extras=extras, **ROWS)
        assert run.train_dataset is data
        ours, reached = finish(run)
        assert ours.losses == expected.losses
        assert [entry.get("loss/chats", 0) for entry in run.state.log_history[:2]] == pytest.approx(
            ours.losses if data is mix else [0, 0], rel=1e-6
        )
        assert distance(weights, reached) == 0
        exact = planned(saved(tmp_path), tmp_path).evaluate()["eval_loss"]
        run.model.load_state_dict(saved(tmp_path).state_dict())
        assert run.evaluate()["eval_held_loss"] == pytest.approx(exact, rel=1e-5)
        assert run.evaluate(data)["eval_loss"] == pytest.approx(exact, rel=1e-5)
    stream = PackedStream(opened, RowSettings(capacity=400), length=lambda sample: 150, ranks=1, rank=0, repeat=True)
    run = run_of(
        "SFT", PackedSFTTrainer, saved(tmp_path), tmp_path, dataset=stream, extras={"data_collator": collator}, **ROWS
    )
    assert len(finish(run)[0].losses) == 2
    with pytest.raises(ConfigError, match=r"train_dataset is a OpenDataset, which TRL cannot tokenize: give data_coll"):
        run_of("SFT", PackedSFTTrainer, saved(tmp_path), tmp_path, dataset=opened)


@pytest.mark.slow
def test_steps_of_another_path_are_refused(tmp_path, monkeypatch):
    """Prompt tuning puts embeddings in the place of tokens, of which nothing is packed."""
    monkeypatch.setattr(plain, "_warned", set[str]())  # once a process
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    run = run_of("SFT", PackedSFTTrainer, saved(tmp_path), tmp_path, extras={"peft_config": config})
    with (
        pytest.warns(UnpackedWarning),
        pytest.raises(ConfigError, match="PackedSFTTrainer packed nothing of a training step"),
    ):
        run.train()


class Plain(trl.SFTTrainer):
    """Of TRL nothing but the samples: the model's own forward computes the loss."""

    compute_loss = Trainer.compute_loss


ITS_OWN_PACKING = [
    ({"packing": True}, "packing=True has TRL lay samples out in rows"),
    ({"packing": True, "packing_strategy": "bfd_split"}, "packing=True has TRL lay samples out in rows"),
    ({"padding_free": True, "max_length": None}, "padding_free=True has TRL lay samples out in rows"),
    ({"packing": True, "packing_strategy": "wrapped"}, "packing_strategy='wrapped' cuts samples in two"),
    ({"eval_packing": True}, "eval_packing=True evaluates each row as one sample"),
]


def of_texts(trainer, model, tmp_path, **settings):
    """TRL packs nothing but text."""
    texts = samples(messages, images=False)
    settings = {"max_length": 128, "per_device_train_batch_size": 4, **settings}
    return run_of("SFT", trainer, model, tmp_path, dataset=texts, extras={"eval_dataset": texts}, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "seen"), ITS_OWN_PACKING)
def test_rows_that_trl_packs_itself_are_refused(settings, seen, tmp_path):
    run = of_texts(PackedSFTTrainer, saved(tmp_path), tmp_path, **settings)
    for refused in (lambda: check_trainer(run), run.train, run.evaluate):
        with pytest.raises(ConfigError, match=re.escape(seen)):
            refused()


@pytest.mark.slow
def test_rows_that_were_packed_before_need_a_collator_that_keeps_their_samples_apart(tmp_path):
    texts = [[5 + n] * (4 + n) for n in range(6)]
    rows = Dataset.from_list(list(pack_dataset(texts, 16, seq_lengths=True, pad_to_capacity=False)))

    def run(**more):
        settings = {"dataset": rows, "processor": processor_of("qwen3_vl").tokenizer, "per_device_eval_batch_size": 1}
        extras = {"eval_dataset": rows, **more}
        return run_of(
            "SFT", PackedSFTTrainer, tiny_model("qwen3", vocab_size=2000), tmp_path, **settings, extras=extras
        )

    with pytest.raises(ConfigError, match=r"use data_collator=RowCollator\(\)"):
        check_trainer(run())
    apart = run(data_collator=RowCollator())
    check_trainer(apart)
    plan = plan_bins([*map(len, texts)], 16)
    alone = evaluate(tiny_model("qwen3", vocab_size=2000), texts, RowCollator(bare_row="one_sample"), plan=plan)
    assert apart.evaluate()["eval_loss"] == pytest.approx(alone.token_loss, rel=1e-5)


# ---------------------------------------------------------------------- what is refused, before the first step


def test_a_policy_by_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"packing cannot be enabled on 'policy', which TRL would load: load the"):
        PackedGRPOTrainer("policy", train_dataset=prompts())


def test_weights_that_trl_would_ignore_are_refused(tmp_path):
    weighed = samples(messages, images=False).to_list()
    for sample in weighed:
        sample["messages"][1]["weight"] = 0.5
    collator = VLMCollator(processor_of(), layout="packed")
    for extras, told in (
        ({}, "train_dataset has weight, which TRL would ignore; leave it out, or use PackedTrainer"),
        ({"loss": "sample", "data_collator": collator}, "TRL computes the loss by targets, so loss='sample' is not"),
    ):
        with pytest.raises(ConfigError, match=told):
            data = Dataset.from_list(weighed)
            run_of("SFT", PackedSFTTrainer, saved(tmp_path), tmp_path, dataset=data, extras=extras)
    extras = {"data_collator": collator}
    taught = Dataset.from_list([{"input_ids": [1, 2], "topk_ids": [[3], [4]]}])
    with pytest.raises(ConfigError, match="train_dataset has the column topk_ids, which TRL would ignore"):
        run_of("SFT", PackedSFTTrainer, saved(tmp_path), tmp_path, dataset=taught)
    run = run_of("SFT", PackedSFTTrainer, saved(tmp_path), tmp_path, dataset=weighed[1:], extras=extras, **ROWS)
    with pytest.raises(ConfigError, match="TRL's loss would ignore shift_weights of the batch; use PackedTrainer"):
        run.train()


def test_the_reference_is_packed_and_placeholders_are_not_sampled(tmp_path):
    """TRL suppresses those of images; a family without videos has no others."""
    for family in ("qwen3_vl", "llava"):
        run = run_of("GRPO", PackedGRPOTrainer, saved(tmp_path, family), tmp_path, beta=0.1, generation_kwargs=None)
        assert is_packing(run.ref_model)
        assert sorted(run.generation_config.suppress_tokens) == sorted(placeholders(run.model))


@pytest.mark.slow
def test_settings_that_another_loss_or_no_packing_would_come_of(tmp_path):
    moe = enable_packing(saved(tmp_path, "qwen3_vl_moe"), StepConfig(z_loss_coef=0.1))
    with pytest.raises(ConfigError, match=r"TRL's loss has no z-loss of routers: leave z_loss_coef out"):
        run_of("GRPO", PackedGRPOTrainer, moe, tmp_path)
    with pytest.raises(ConfigError, match="torch_compile=True breaks off at packed rows"):
        run_of("SFT", PackedSFTTrainer, saved(tmp_path), tmp_path, torch_compile=True)


@pytest.mark.slow
def test_an_enabled_model_in_trls_own_trainer_has_its_losses(tmp_path):
    """With all its padding: nothing is packed there, and nothing is wrong."""
    plain, reference = finish(run_of("DPO", trl.DPOTrainer, saved(tmp_path), tmp_path))
    ours, weights = finish(run_of("DPO", trl.DPOTrainer, enable_packing(saved(tmp_path)), tmp_path))
    assert ours.losses == plain.losses
    assert distance(reference, weights) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # readers have a GPU
def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    as_a_reader(DOCS / "trl.md", tmp_path, monkeypatch)
    turns = [{"from": name, "value": value} for name, value in (("human", "<image>How much?"), ("gpt", "75"))]
    ranked = {"conversations": turns[:1], "chosen": turns[1], "rejected": turns[1], "images": ["images/1.jpg"]}
    Path("ranked.jsonl").write_text(f"{json.dumps(ranked)}\n" * 4)
    names, computed = {"__name__": "page"}, {}
    for example in examples(DOCS / "trl.md"):
        if not example.mark:
            continue  # the custom loss runs with the other pages
        exec(example.code, names)
        computed[type(names.get("trainer")).__name__] = names["trainer"].state.log_history[0]["packing/computed"]
    assert computed["PackedDPOTrainer"] < 0.75  # the prompts of pairs once
    assert computed["PackedGRPOTrainer"] < 0.5
    assert names["opened"].state.log_history[0]["num_tokens"] > 0
    assert names["planned"].evaluation.token_loss > 0
    assert names["prompts"][1]["prompt"][0]["content"] == "\nWhat is the total?"
    assert names["prompts"][1]["images"][0].size == (312, 192)
    assert names["ranked"][0]["chosen"] == [{"role": "assistant", "content": "75"}]
    args = arguments("DPOConfig", tmp_path, per_device_train_batch_size=2, max_steps=1)
    models = [saved(tmp_path) for _ in range(2)]
    PackedDPOTrainer(*models, args=args, train_dataset=names["ranked"], processing_class=processor_of()).train()
