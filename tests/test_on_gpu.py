"""What users do first on a GPU, beside a step of their own: HF Trainer, the service's engine, sampling, the probe.

Steps of every family are in `tests/model/test_equality_on_gpu.py`. The truth is the CPU in float32.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow
from host_syncs import recorded_syncs
from sampled import prompts_of, run, sample, sampler_of, tokens_of
from step_service import (
    ADAM,
    gradients,
    largest_difference,
    lora,
    plain_model,
    run_one,
    set_adapter,
    some_data,
    tiny_engine,
    weights,
)
from training import arguments, logged
from transformers import Trainer

from vlmpack import SlotRule, ThdStep, probe
from vlmpack.collate import VLMCollator
from vlmpack.model import enable_packing
from vlmpack.service.engine.engine import Engine
from vlmpack.testing import mixed_samples, padded, receipt_conversations, tiny_model, tiny_processor

LOW = torch.bfloat16
PROBED = ("gemma3", "kimi_k25", "llama4")
"""Image tokens that attend both ways, a tower that does not cast its pixels, chunks."""
pytestmark = pytest.mark.gpu


# ---------------------------------------------------------------------- HF Trainer


def trained(folder: Path, layout: str, *, dtype: torch.dtype, **settings: Any) -> Trainer:
    """Three optimizer steps on six receipts, the same ones in each."""
    processor = tiny_processor("qwen3_vl", max_pixels=16 * 32 * 32)
    model = enable_packing(tiny_model("qwen3_vl", processor=processor, layers=3))
    trainer = Trainer(
        model,
        arguments(
            folder,
            bf16=dtype == LOW,
            max_steps=3,
            gradient_accumulation_steps=3,
            remove_unused_columns=False,
            train_sampling_strategy="sequential",
            **settings,
        ),
        VLMCollator(processor, layout=layout),
        [*receipt_conversations(num=6)],
    )
    trainer.train()
    return trainer


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
@pytest.mark.parametrize("layout", ["packed", *slow("padded")])
def test_hf_trainer_learns_the_same_as_on_a_cpu(layout: str, tmp_path: Path) -> None:
    settings = {"dataloader_num_workers": 1, "gradient_checkpointing": True, "use_cpu": False}
    ours = trained(tmp_path, layout, dtype=LOW, **settings)
    truth = trained(tmp_path, "padded", dtype=torch.float32)
    assert next(ours.model.parameters()).is_cuda
    assert logged(truth)[2] < logged(truth)[0] - 0.1
    assert logged(ours) == pytest.approx(logged(truth), rel=1e-3)


# ---------------------------------------------------------------------- the service


def engine_on(device: str, dtype: torch.dtype, family: str = "qwen3_vl") -> Engine:
    engine = tiny_engine(family, model=plain_model(family, dtype=LOW).to(device, dtype))
    engine.create("a", lora(family))
    set_adapter(engine)
    return engine


@pytest.mark.parametrize(
    ("family", "dtype", "allowed"),
    [
        ("qwen3_vl", torch.float32, 1e-4),
        ("qwen3_vl", LOW, 0.1),
        pytest.param("qwen3_5_moe", torch.float32, 1e-4, marks=pytest.mark.slow),
    ],
)
def test_the_engine_computes_and_learns_what_it_does_on_a_cpu(family: str, dtype: torch.dtype, allowed: float) -> None:
    ours, truth = engine_on("cuda", dtype, family), engine_on("cpu", torch.float32, family)
    found, expected = run_one(ours, some_data(ours)), run_one(truth, some_data(truth))
    assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=allowed / 10)
    gradient = {name: x.float().cpu() for name, x in gradients(ours).items()}
    assert largest_difference(gradient, gradients(truth)) < allowed
    before = weights(ours)
    ours.optim_step("a", ADAM)
    assert all(x.is_cuda and not torch.equal(x, before[name]) for name, x in weights(ours).items())


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_sampled_tokens_are_those_of_each_request_alone(dtype: torch.dtype) -> None:
    """And in float32 those of a CPU."""

    def sampled(engine: Engine, *, together: bool) -> list[Any]:
        settings = ({"temperature": 0.0}, {"temperature": 1.0, "num_samples": 2}, {"temperature": 0.7, "top_p": 0.9})
        requests = {
            str(at): (prompt, sample(seed=at, max_tokens=6, prompt_logprobs=True, **settings[at]))
            for at, prompt in enumerate(prompts_of(engine, count=3))
        }
        groups = [requests] if together else [{name: request} for name, request in requests.items()]
        results = {name: one for group in groups for name, one in run(sampler_of(engine), group).items()}
        return [tokens_of(results[name]) for name in requests]

    engine = engine_on("cuda", dtype)
    tokens = sampled(engine, together=True)
    assert tokens == sampled(engine, together=False)
    if dtype == torch.float32:
        assert tokens == sampled(engine_on("cpu", dtype), together=True)


# ---------------------------------------------------------------------- the probe, and generation


@pytest.mark.parametrize("family", ["qwen3_vl", *slow(*PROBED)])
def test_the_probe_finds_packed_equal_to_alone(family: str) -> None:
    report = probe(tiny_model(family, dtype=LOW).cuda(), plain=False, share_prefixes=False)
    assert report.verdict == "exact", report


def test_an_enabled_model_generates_what_it_did() -> None:
    model = tiny_model("qwen3_vl", dtype=LOW).cuda().eval()
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    prompts_BS = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]]).cuda()
    inputs = {"input_ids": prompts_BS, "attention_mask": (prompts_BS > 0).long()}
    before = model.generate(**inputs, **settings)
    assert torch.equal(enable_packing(model).generate(**inputs, **settings), before)


# ---------------------------------------------------------------------- a model that takes boundaries itself


@pytest.mark.slow
def test_boundaries_are_handed_over_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    example = import_module("thd_model")
    results = {}
    for device in ("cpu", "cuda"):
        reference = tiny_model("qwen3_vl_moe", layers=2, vision_depth=1)
        model = example.ThdQwen3VLMoe(reference).to(device)
        step = ThdStep(model, slots=SlotRule(multiple=8), config=reference.config)
        batch = padded(mixed_samples(reference.config, seed=1, kinds=("image", "text", "images")))
        with recorded_syncs(torch.device(device)) as before:
            inputs = step.inputs(batch)
        output = model(**inputs.arguments)
        with recorded_syncs(torch.device(device)) as after:
            results[device] = step.result(output, inputs)
        results[device].loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    assert [*before, *after] == []
    torch.testing.assert_close(results["cuda"].sample_losses.cpu(), results["cpu"].sample_losses)
