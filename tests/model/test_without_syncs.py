"""A packed training step of these families has no host-device sync at all, the model's own code included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import slow

from vlmpack.layout import PackedRow, pack
from vlmpack.model import PackedStep, enable_packing
from vlmpack.model.mechanisms import vision
from vlmpack.probing.host_syncs import recorded_syncs
from vlmpack.testing import mixed_samples, padded, tiny_model
from vlmpack.testing.samples import kinds_of

CUDA = torch.device("cuda")
WITHOUT_SYNCS = (
    *("qwen2_5_vl", "qwen3_vl", "qwen3_5_moe", "glm4v", "gemma3", "internvl"),
    *slow("qwen2_vl", "qwen3_vl_moe", "qwen3_5", "glm46v", "glm4v_moe", "glm_ocr", "llava", "paligemma"),
    *slow("cohere2_vision", "aya_vision"),
)
"""Others read sizes of images or audios on the host (LLaVA-NeXT, Mistral 3, MiniCPM-V, omni models), search the pixels
for padding (SmolVLM, Gemma 4), or look for the tokens of an expert (ERNIE)."""
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", WITHOUT_SYNCS)
def test_a_training_step_has_no_sync(family: str) -> None:
    """Several images and videos, recomputed in the backward pass."""
    model = enable_packing(tiny_model(family, layers=3, dtype=torch.bfloat16)).to(CUDA).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    step, row = PackedStep(model), pack(padded(mixed_samples(model.config, kinds=kinds_of(model.config) * 2)))
    row = row.to(CUDA)
    step(row).loss.backward()  # the first step of a family may try transformers out
    with recorded_syncs(CUDA) as syncs:
        step(row).loss.backward()
    assert syncs == []


@pytest.mark.parametrize("family", ["qwen3_vl", *slow("qwen2_5_vl", "glm4v", "gemma3")])
def test_results_are_bit_for_bit_those_of_the_models_own_masks_and_grids(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = enable_packing(tiny_model(family, layers=3)).to(CUDA).train()
    row = pack(padded(mixed_samples(model.config, kinds=kinds_of(model.config) * 2))).to(CUDA)
    ours = step_of(model, row)
    for replaced in ("_known_ids", "_host_grids", "tower_inputs"):
        monkeypatch.setattr(vision, replaced, lambda *_: {})
    with recorded_syncs(CUDA) as syncs:
        own = step_of(model, row)
    assert syncs  # the model's own code was called
    assert all(map(torch.equal, ours, own))


def step_of(model: Any, row: PackedRow) -> list[torch.Tensor]:
    """The loss, and the gradient of every parameter that has one."""
    model.zero_grad()
    loss = PackedStep(model)(row).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
