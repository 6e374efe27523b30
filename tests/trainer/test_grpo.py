"""PackedGRPOTrainer against TRL's own, padded: the same samples, losses, metrics, gradients and weights."""

from __future__ import annotations

import pytest
import torch
from cases import slow_cases
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from test_readme import DOCS, examples
from training import apart, distance
from trl_runs import BEYOND_QWEN, arguments, finish, grpo, placeholders, processor_of, prompts, reward, saved, trl

from vlmpack.errors import ConfigError
from vlmpack.families import family_of
from vlmpack.model import StepConfig, enable_packing, is_packing
from vlmpack.trainer import PackedGRPOTrainer, check_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*SwigPy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type.*Conv3d:UserWarning"),
]

LOSS = {"vespo": 4e-6}
"""Relative limit of a loss where it is not 1e-6: powers of ratios round more."""


class Aligned(trl.GRPOTrainer):
    """TRL's own, with the kinds of tokens read off the ids: it takes those of a prompt with two first tokens."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        family = family_of(self.model)

        def align(backbone, args, inputs):
            return args, {**inputs, family.token_types: family.media_types(inputs["input_ids"], self.model.config)}

        for model in (self.model, self.ref_model):
            family.backbone(model).register_forward_pre_hook(align, with_kwargs=True)


def compared(tmp_path, family="qwen3_vl", *, adapted=lambda model: model, steps=3, padded=trl.GRPOTrainer, **settings):
    """Both trainers' runs, compared; the packed one is returned."""
    runs, finished = [], []
    for trainer in (padded, PackedGRPOTrainer):  # one after the other: it seeds the global generator
        runs.append(grpo(trainer, adapted(saved(tmp_path, family)), tmp_path, max_steps=steps, **settings))
        finished.append(finish(runs[-1]))
    (padded, reference), (packed, ours) = finished
    assert packed.losses[0] == pytest.approx(padded.losses[0], rel=LOSS.get(settings.get("loss_type"), 1e-6), abs=1e-6)
    assert packed.losses == pytest.approx(padded.losses, rel=1e-5, abs=1e-5)  # of weights apart by rounding
    assert len(packed.gradients) == len(padded.gradients) == steps
    assert max(float(gradient.abs().max()) for truth in padded.gradients for gradient in truth.values()) > 1e-3
    errors = [apart(*gradients) for gradients in zip(padded.gradients, packed.gradients, strict=True)]
    assert errors[0] < 1e-5
    assert max(errors) < 2e-4  # vespo's weights are exponentials of sums of ratios, and magnify it
    assert apart(reference, ours) < 1e-5
    same_metrics(*(run.state.log_history for run in runs))
    return runs[1]


def same_metrics(truth, ours):
    """What TRL logs of every step, but the time."""
    for expected, metrics in zip(truth[:-1], ours[:-1], strict=True):
        assert "entropy" in expected
        expected = {name: value for name, value in expected.items() if name != "step_time"}
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("loss_type", "beta"), slow_cases(("dapo", 0.3), ("grpo", 0.0), ("cispo", 0.3), ("vespo", 0.3)))
def test_steps_are_those_of_the_padded_trainer(loss_type, beta, tmp_path):
    settings = {"num_iterations": 2, "temperature": 0.7, "gradient_accumulation_steps": 2}
    run = compared(tmp_path, loss_type=loss_type, beta=beta, **settings)
    assert run.state.log_history[0]["packing/computed"] < 0.5


@pytest.mark.full
def test_ten_steps(tmp_path):
    compared(tmp_path, steps=10, beta=0.1, num_iterations=2)


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {"num_generations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
        {"num_generations": 8, "per_device_train_batch_size": 8},
        {"steps_per_generation": 3, "beta": 0.1},
        {"importance_sampling_level": "sequence", "num_iterations": 3},
        {"top_entropy_quantile": 0.8, "entropy_coef": 0.2},
        {"mask_truncated_completions": True, "beta": 0.1},
        {"off_policy_mask_threshold": 0.01, "num_iterations": 2, "delta": 1.5},
        {"pad_to_multiple_of": 16},
        {"gradient_checkpointing": True},
        {"cast_lm_head_to_fp32": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_the_loss(settings, tmp_path):
    compared(tmp_path, **settings)


# ---------------------------------------------------------------------- models, adapters, ranks of one


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "qwen3_vl_moe"])
def test_families(family, tmp_path):
    settings = {"router_aux_loss_coef": 0.1} if family.endswith("moe") else {}
    run = compared(tmp_path, family, beta=0.1, num_iterations=2, **settings)
    assert run.state.log_history[0]["packing/computed"] < 0.5
    assert ("aux_loss" in run.state.log_history[0]) == family.endswith("moe")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # processors of GLM
@pytest.mark.parametrize("family", BEYOND_QWEN)
def test_families_beyond_qwen(family, tmp_path):
    if family in ("llava_onevision", "paddleocr_vl", "kimi_k25", "minicpmv4_6", "mistral3"):
        pytest.skip("TRL's own GRPOTrainer cannot train it")
    padded = Aligned if family.startswith("gemma") else trl.GRPOTrainer
    run = compared(tmp_path, family, padded=padded, beta=0.1)
    assert max(entry["packing/computed"] for entry in run.state.log_history[:-1]) < 0.4


@pytest.mark.full
def test_an_adapter_whose_reference_is_the_policy_without_it(tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights="gaussian", lora_alpha=64)
    run = compared(tmp_path, peft_config=config, beta=0.3, num_iterations=2, learning_rate=0.5)
    assert run.ref_model is None
    assert run.state.log_history[1]["kl"] > 0


@pytest.mark.full
def test_an_adapter_of_before_whose_reference_is_its_copy(tmp_path):
    def adapted(model):
        torch.manual_seed(3)
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))

    run = compared(tmp_path, adapted=adapted, beta=0.3, num_iterations=2, learning_rate=0.1)
    assert "ref" in run.model.peft_config
    assert run.state.log_history[1]["kl"] > 0


@pytest.mark.full
def test_prompts_of_text_alone(tmp_path):
    questions = [{"prompt": [{"role": "user", "content": "How much is it? " * n}]} for n in (2, 4, 3, 5)]
    compared(tmp_path, dataset=Dataset.from_list(questions), beta=0.1, gradient_accumulation_steps=2)


@pytest.mark.full
def test_steps_in_bfloat16_are_near_those_of_the_padded_trainer(tmp_path):
    found = []
    for trainer in (trl.GRPOTrainer, PackedGRPOTrainer):
        run = grpo(trainer, saved(tmp_path), tmp_path, bf16=True, beta=0.1, num_iterations=2, max_steps=2)
        found.append(finish(run)[0])
    assert found[1].losses == pytest.approx(found[0].losses, abs=0.05)
    cosines = [
        torch.cosine_similarity(gradient.flatten(), found[1].gradients[0][name].flatten(), 0)
        for name, gradient in found[0].gradients[0].items()
        if gradient.abs().max() > 1e-3
    ]
    assert len(cosines) > 20
    assert min(cosines) > 0.98


@pytest.mark.full
def test_an_evaluation(tmp_path):
    found = []
    for trainer in (trl.GRPOTrainer, PackedGRPOTrainer):
        run = grpo(trainer, saved(tmp_path), tmp_path, per_device_eval_batch_size=4)
        found.append(run.evaluate(prompts()))
    assert found[1]["eval_loss"] == pytest.approx(found[0]["eval_loss"], abs=1e-6)
    assert found[1]["eval_entropy"] == pytest.approx(found[0]["eval_entropy"], rel=1e-5)


@pytest.mark.full
def test_a_processor_that_pads_on_the_right_changes_nothing(tmp_path):
    """TRL then puts the token types of short prompts beside their tokens; here they are read off the ids."""
    runs = []
    for side in ("left", "right"):
        model = enable_packing(saved(tmp_path))
        args = arguments("GRPOConfig", tmp_path, per_device_train_batch_size=8, num_generations=4, max_steps=1)
        settings = {"processing_class": processor_of(side=side), "train_dataset": prompts()}
        runs.append(finish(PackedGRPOTrainer(model, reward_funcs=reward, args=args, **settings)))
    assert distance(runs[0][1], runs[1][1]) == 0


# ---------------------------------------------------------------------- what is refused, before the first step


def made(model, tmp_path, **settings):
    args = arguments("GRPOConfig", tmp_path, per_device_train_batch_size=2, num_generations=2, **settings)
    return PackedGRPOTrainer(
        model, reward_funcs=reward, args=args, train_dataset=prompts(), processing_class=processor_of()
    )


def test_a_policy_by_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"packing cannot be enabled on 'policy', which TRL would load: load the"):
        made("policy", tmp_path)


def test_placeholders_of_videos_are_not_suppressed_where_there_are_none(tmp_path):
    run = grpo(PackedGRPOTrainer, saved(tmp_path, "llava"), tmp_path)
    assert run.generation_config.suppress_tokens == [run.model.config.image_token_id] == placeholders(run.model)


@pytest.mark.full
def test_settings_that_another_loss_would_come_of(tmp_path):
    moe = enable_packing(saved(tmp_path, "qwen3_vl_moe"), StepConfig(z_loss_coef=0.1))
    with pytest.raises(ConfigError, match=r"z_loss_coef is 0\.1, but TRL's loss has no z-loss"):
        made(moe, tmp_path)


@pytest.mark.full
def test_the_check_of_settings_accepts_it_and_names_it_where_it_is_not_used(tmp_path):
    check_trainer(grpo(PackedGRPOTrainer, saved(tmp_path), tmp_path, beta=0.1))
    plain = grpo(trl.GRPOTrainer, enable_packing(saved(tmp_path)), tmp_path)
    with pytest.raises(ConfigError, match=r"from vlmpack\.trainer\.trl import PackedGRPOTrainer"):
        check_trainer(plain)


@pytest.mark.full
def test_the_reference_is_packed_and_video_placeholders_are_not_sampled(tmp_path):
    run = grpo(PackedGRPOTrainer, saved(tmp_path), tmp_path, beta=0.1, generation_kwargs=None)
    assert is_packing(run.ref_model)
    config = run.model.config
    assert {config.image_token_id, config.video_token_id} <= {*run.generation_config.suppress_tokens}


@pytest.mark.full
def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for example in examples(DOCS / "reinforcement_learning.md"):
        exec(example.code, names)
    assert names["trainer"].state.log_history[0]["packing/computed"] < 0.5
