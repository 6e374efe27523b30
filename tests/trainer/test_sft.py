"""PackedSFTTrainer against TRL's own, padded: the same losses, metrics and weights over ten steps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from chats import picture
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from test_readme import DOCS, examples
from trainer.packed_runs import torchdata_on_new_torch
from training import apart, distance
from transformers import Trainer
from trl_runs import BEYOND_QWEN, arguments, finish, processor_of, saved, trl

from vlmpack.collate import VLMCollator
from vlmpack.data import mix_datasets, open_dataset
from vlmpack.errors import ConfigError, UnpackedWarning
from vlmpack.interop.seqpacker import RowCollator, pack_dataset
from vlmpack.loading import PackedStream, RowSettings
from vlmpack.model import enable_packing, plain
from vlmpack.model.plain import find_model
from vlmpack.plan import plan_bins
from vlmpack.store import measure_lengths
from vlmpack.testing import tiny_model, tiny_processor
from vlmpack.trainer import check_trainer, evaluate, loss_metrics
from vlmpack.trainer.trl import PackedDPOTrainer, PackedSFTTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*SwigPy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type.*Conv3d:UserWarning"),
]


def turns(number):
    """(question, answer) about a receipt, of unlike lengths."""
    return "What is the total of this receipt? " * (1 + number % 3), f"The total is {75 + number},000. " * (
        1 + number % 4
    )


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def messages(number):
    question, answer = turns(number)
    return {"messages": [user(question), assistant(answer)]}


def prompt_and_completion(number):
    question, answer = turns(number)
    return {"prompt": [user(question)], "completion": [assistant(answer)]}


def text(number):
    question, answer = turns(number)
    return {"text": f"<|vision_start|><|image_pad|><|vision_end|>{question}{answer}"}


def samples(form, *, count=8, images=True):
    """A data set in one of TRL's formats, each sample with one picture or two."""
    from datasets import Dataset

    rows = []
    for n in range(count):
        pictures = [picture(64 + 32 * (n % 3), 64, seed=n)] * (1 + (n % 3 == 2 and form is not text))
        rows.append({**form(n), **({"images": pictures} if images else {})})
    return Dataset.from_list(rows)


def sft(trainer, model, tmp_path, form=messages, *, dataset=None, processor=None, extras=None, **settings):
    """A run of ten steps, which are two epochs and a half."""
    defaults = {"per_device_train_batch_size": 2, "max_steps": 10, "learning_rate": 0.05}
    return trainer(
        model,
        args=arguments("SFTConfig", tmp_path, **{**defaults, **settings}),
        train_dataset=samples(form) if dataset is None else dataset,
        processing_class=processor or processor_of(find_model(model).config.model_type),
        **(extras or {}),
    )


class Counting(trl.SFTTrainer):
    """TRL's own, with targets counted over accumulated batches, where TRL averages averages for these models."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True


def compared(tmp_path, form=messages, *, family="qwen3_vl", padded=trl.SFTTrainer, steps=10, **settings):
    """Both trainers' runs, compared; the packed one is returned."""
    found = []
    for trainer in (padded, PackedSFTTrainer):
        run = sft(trainer, saved(tmp_path, family), tmp_path, form, max_steps=steps, **settings)
        if trainer is PackedSFTTrainer:
            check_trainer(run)
        found.append((run, *finish(run)))
    (padded, truth, reference), (packed, ours, weights) = found
    assert len(truth.losses) == steps
    assert ours.losses == pytest.approx(truth.losses, rel=1e-4)
    assert apart(truth.gradients[0], ours.gradients[0]) < 1e-5
    assert max(float(gradient.abs().max()) for gradient in truth.gradients[0].values()) > 1e-4
    assert distance(reference, weights) < 5e-4
    same_metrics(padded.state.log_history, packed.state.log_history)
    return packed


def same_metrics(truth, ours):
    """All that TRL logs of every step."""
    for expected, logged in zip(truth[:-1], ours[:-1], strict=True):
        assert {"entropy", "mean_token_accuracy", "num_tokens"} <= expected.keys()
        assert {name: logged[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("form", [messages, prompt_and_completion, text])
def test_formats_of_data(form, tmp_path):
    run = compared(tmp_path, form, remove_unused_columns=form is not text)  # TRL removes "text" of samples with images
    assert run.state.log_history[0]["packing/computed"] <= 1
    assert min(entry["packing/computed"] for entry in run.state.log_history[:-1]) < 0.9  # padding was skipped


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        (prompt_and_completion, {"completion_only_loss": False}),
        (prompt_and_completion, {"completion_only_loss": True}),
        (messages, {"loss_type": "dft"}),
        (messages, {"max_grad_norm": 0.5, "optim": "adamw_torch", "learning_rate": 1e-4}),
        (messages, {"gradient_checkpointing": True}),
        (messages, {"pad_to_multiple_of": 16}),
        (prompt_and_completion, {"max_length": 60}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_settings(form, settings, tmp_path):
    compared(tmp_path, form, steps=4, **settings)


def test_accumulated_batches(tmp_path):
    compared(tmp_path, padded=Counting, steps=4, gradient_accumulation_steps=2)


MARKED = processor_of().chat_template.replace(
    "{%- if message['content'] is string -%}{{- message['content'] -}}",
    "{%- if message['role'] == 'assistant' -%}{%- generation -%}{{- message['content'][0]['text'] -}}"
    "{%- endgeneration -%}{%- elif message['content'] is string -%}{{- message['content'] -}}",
)
"""The template with the marks of what assistants say, by which TRL knows it."""


def test_what_assistants_say_alone(tmp_path):
    processor = tiny_processor(max_pixels=16 * 32 * 32)
    processor.chat_template = MARKED
    run = compared(tmp_path, processor=processor, assistant_only_loss=True)
    labels = next(iter(run.get_train_dataloader()))["labels"]
    assert 0 < int((labels != -100).sum()) < labels.numel()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "qwen3_vl_moe"])
def test_families(family, tmp_path):
    settings = {"router_aux_loss_coef": 0.1} if family.endswith("moe") else {}
    run = compared(tmp_path, family=family, steps=3, **settings)
    assert ("aux_loss" in run.state.log_history[0]) == family.endswith("moe")


@pytest.mark.parametrize("family", BEYOND_QWEN)
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # processors of GLM
def test_families_beyond_qwen(family, tmp_path):
    compared(tmp_path, prompt_and_completion, family=family, steps=10)


def test_adapters_that_trl_adds(tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights="gaussian")
    compared(tmp_path, steps=4, extras={"peft_config": config})


def test_text_alone(tmp_path):
    compared(tmp_path, steps=4, dataset=samples(prompt_and_completion, images=False))


# ---------------------------------------------------------------------- rows of VLMCollator, planned rows, evaluation


ROWS = {"remove_unused_columns": False, "max_length": None, "max_steps": 2}


def collated(trainer, model, tmp_path, layout, *, extras=None, **settings):
    """A run over batches of vlmpack's collator, of prompts and completions."""
    collator = VLMCollator(processor_of(), layout=layout)
    extras = {"data_collator": collator, "eval_dataset": samples(prompt_and_completion), **(extras or {})}
    return sft(trainer, model, tmp_path, prompt_and_completion, extras=extras, **{**ROWS, **settings})


def planned(model, tmp_path, **settings):
    """A run whose steps have all samples, in planned rows."""
    lengths = measure_lengths(samples(prompt_and_completion), VLMCollator(processor_of(), layout="packed"))
    plan = plan_bins(lengths, 400)
    extras, settings = {"plan": plan}, {"gradient_accumulation_steps": len(plan.bins), **settings}
    return collated(PackedSFTTrainer, model, tmp_path, "packed", extras=extras, **settings)


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


def test_an_evaluation_in_planned_rows_is_exact_and_has_no_metrics_of_batches(tmp_path):
    run = planned(saved(tmp_path), tmp_path)
    seen = run.evaluate()
    alone = collated(trl.SFTTrainer, saved(tmp_path), tmp_path, "padded", per_device_eval_batch_size=1)
    each = [alone.evaluate(alone.train_dataset.select([n]))["eval_loss"] for n in range(8)]
    assert run.evaluation.sample_losses == pytest.approx(each, rel=1e-5)
    assert seen["eval_loss"] == pytest.approx(run.evaluation.token_loss)
    assert not {"eval_entropy", "eval_mean_token_accuracy"} & seen.keys()


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


def written(tmp_path, num=8):
    """The prompts and completions in a file, with their pictures beside it."""
    rows = samples(prompt_and_completion, count=num).to_list()
    for at, row in enumerate(rows):
        row["images"] = [f"{at}-{n}.png" for n, image in enumerate(row["images"])]
    for at, row in enumerate(samples(prompt_and_completion, count=num)):
        for n, image in enumerate(row["images"]):
            image.save(tmp_path / f"{at}-{n}.png")
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "chats.jsonl"


@torchdata_on_new_torch
def test_data_sets_of_others_than_datasets_are_trained_on_as_they_are(tmp_path):
    """Opened, mixed and streamed: the losses of the same samples in a data set of `datasets`."""
    opened = open_dataset(written(tmp_path))
    expected, weights = finish(collated(PackedSFTTrainer, saved(tmp_path), tmp_path, "packed"))
    collator = VLMCollator(processor_of(), layout="packed")
    mix = mix_datasets({"chats": opened}, seed=None)
    for data in (opened, mix, list(opened)):
        extras = {"data_collator": collator, "eval_dataset": {"held": data}}
        run = sft(PackedSFTTrainer, saved(tmp_path), tmp_path, dataset=data, extras=extras, **ROWS)
        assert run.train_dataset is data
        ours, reached = finish(run)
        assert ours.losses == expected.losses
        assert distance(weights, reached) == 0
        exact = planned(saved(tmp_path), tmp_path).evaluate()["eval_loss"]
        run.model.load_state_dict(saved(tmp_path).state_dict())
        assert run.evaluate()["eval_held_loss"] == pytest.approx(exact, rel=1e-5)
        assert run.evaluate(data)["eval_loss"] == pytest.approx(exact, rel=1e-5)
    stream = PackedStream(opened, RowSettings(capacity=400), length=lambda sample: 150, ranks=1, rank=0, repeat=True)
    run = sft(PackedSFTTrainer, saved(tmp_path), tmp_path, dataset=stream, extras={"data_collator": collator}, **ROWS)
    assert len(finish(run)[0].losses) == 2
    with pytest.raises(ConfigError, match=r"train_dataset is a OpenDataset, which TRL cannot tokenise: give data_coll"):
        sft(PackedSFTTrainer, saved(tmp_path), tmp_path, dataset=opened)


def test_steps_of_another_path_are_refused(tmp_path, monkeypatch):
    """Prompt tuning puts embeddings in the place of tokens, of which nothing is packed."""
    monkeypatch.setattr(plain, "_warned", set[str]())  # once a process
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    run = sft(PackedSFTTrainer, saved(tmp_path), tmp_path, extras={"peft_config": config})
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
    ({"eval_packing": True}, "eval_packing=True evaluates what shares a row as one sample"),
]


def of_texts(trainer, model, tmp_path, **settings):
    """TRL packs nothing but text."""
    texts = samples(messages, images=False)
    settings = {"max_length": 128, "per_device_train_batch_size": 4, **settings}
    return sft(trainer, model, tmp_path, dataset=texts, extras={"eval_dataset": texts}, **settings)


@pytest.mark.parametrize(("settings", "seen"), ITS_OWN_PACKING)
def test_rows_that_trl_packs_itself_are_refused(settings, seen, tmp_path):
    run = of_texts(PackedSFTTrainer, saved(tmp_path), tmp_path, **settings)
    for refused in (lambda: check_trainer(run), run.train, run.evaluate):
        with pytest.raises(ConfigError, match=re.escape(seen)):
            refused()


def test_rows_that_were_packed_before_need_a_collator_that_keeps_their_samples_apart(tmp_path):
    texts = [[5 + n] * (4 + n) for n in range(6)]
    rows = Dataset.from_list(list(pack_dataset(texts, 16, seq_lengths=True, pad_to_capacity=False)))

    def run(**more):
        settings = {"dataset": rows, "processor": processor_of("qwen3_vl").tokenizer, "per_device_eval_batch_size": 1}
        extras = {"eval_dataset": rows, **more}
        return sft(PackedSFTTrainer, tiny_model("qwen3", vocab_size=2000), tmp_path, **settings, extras=extras)

    with pytest.raises(ConfigError, match=r"makes one sample of each: data_collator=RowCollator\(\)"):
        check_trainer(run())
    apart = run(data_collator=RowCollator())
    check_trainer(apart)
    plan = plan_bins([*map(len, texts)], 16)
    alone = evaluate(tiny_model("qwen3", vocab_size=2000), texts, RowCollator(bare_row="one_sample"), plan=plan)
    assert apart.evaluate()["eval_loss"] == pytest.approx(alone.token_loss, rel=1e-5)


def test_without_trls_packing_nothing_is_named(tmp_path):
    check_trainer(of_texts(PackedSFTTrainer, saved(tmp_path), tmp_path))
    run = of_texts(Plain, enable_packing(saved(tmp_path)), tmp_path)
    run.compute_metrics = loss_metrics(run.model)
    check_trainer(run)


@pytest.mark.parametrize(
    ("settings", "seen"), [({"torch_compile": True}, "torch_compile=True would be broken off at every row")]
)
def test_settings_that_are_refused(settings, seen, tmp_path):
    with pytest.raises(ConfigError, match=seen):
        sft(PackedSFTTrainer, saved(tmp_path), tmp_path, **settings)


def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = user([{"type": "image", "image": "0.png"}, {"type": "text", "text": "How much?"}])
    Path("chats.jsonl").write_text(json.dumps({"messages": [asked, assistant("75")]}) + "\n")
    said = (("human", "<image>How much?"), ("gpt", "75"), ("gpt", "?"))
    turns = [{"from": name, "value": value} for name, value in said]
    picture(64, 64).save("0.png")
    ranked = {"conversations": turns[:1], "chosen": turns[1], "rejected": turns[2], "images": ["0.png"]}
    Path("ranked.jsonl").write_text(f"{json.dumps(ranked)}\n" * 4)
    names = {"__name__": "page"}
    for example in examples(DOCS / "trl.md"):
        exec(example.code, names)
    assert names["trainer"].state.log_history[0]["packing/computed"] < 0.75  # the prompts of pairs once
    assert names["opened"].state.log_history[0]["num_tokens"] > 0
    assert names["planned"].evaluation.token_loss > 0
    assert names["ranked"][0]["chosen"] == [{"role": "assistant", "content": "75"}]
    args = arguments("DPOConfig", tmp_path, per_device_train_batch_size=2, max_steps=1)
    models = [saved(tmp_path) for _ in range(2)]
    PackedDPOTrainer(*models, args=args, train_dataset=names["ranked"], processing_class=processor_of()).train()
