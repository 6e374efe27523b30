"""What a packed training step asks of a device, the model's own code included.

No host-device sync; as many operations for many samples as for few; copies that do not grow with the layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import slow
from host_syncs import recorded_syncs
from waiting import Launches, flex_graph, waits_are_errors

from vlmpack.attention.backends import TorchVarlen
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import PackedRow, Segments, SlotRule, pack
from vlmpack.layout.row import shift_labels
from vlmpack.model import PackedStep, StepConfig, enable_packing
from vlmpack.model.mechanisms import vision
from vlmpack.probing.forward_passes import ProbedModel
from vlmpack.testing import mixed_samples, padded, tiny_model
from vlmpack.testing.samples import kinds_of

CUDA = torch.device("cuda")
WITHOUT_SYNCS = (
    *("qwen2_5_vl", "qwen3_vl", "qwen3_5_moe", "glm4v", "gemma3", "internvl"),
    *slow("qwen2_vl", "qwen3_vl_moe", "qwen3_5", "glm46v", "glm4v_moe", "glm_ocr", "llava", "paligemma"),
    *slow("cohere2_vision", "aya_vision", "paddleocr_vl", "qwen4_exp", "exaone4_5", "lfm3_vl"),
)
"""Others copy a few numbers (LLaVA-NeXT, LLaVA-OneVision, Mistral 3, MiniCPM-V, omni models), search the pixels for
padding (SmolVLM, Gemma 4), or look for the tokens of an expert (ERNIE)."""
FEW_OPERATIONS = (
    *("qwen3_5_moe", "qwen4_exp", "gemma3", "gpt_oss"),
    *slow("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_next", "glm4v_moe", "ernie4_5_vl_moe", "kimi_k25", "gemma4"),
    *slow("llama4_text", "mistral", "olmo3", "cohere2", "deepseek_v3", "lfm2_moe", "internvl", "phi3", "gemma2"),
    *slow("deepseek_ocr2"),
)
"""Windows, chunks, sinks, experts, recurrent layers, sparse attention, softcaps."""
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", WITHOUT_SYNCS)
def test_a_training_step_has_no_sync(family: str) -> None:
    """Several images and videos, recomputed in the backward pass."""
    model = enable_packing(tiny_model(family, layers=3, dtype=torch.bfloat16)).to(CUDA).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    samples = ProbedModel.of(model).with_its_pixels(mixed_samples(model.config, kinds=kinds_of(model.config) * 2))
    step, row = PackedStep(model), pack(padded(samples)).to(CUDA)
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


@pytest.mark.parametrize("family", FEW_OPERATIONS)
def test_64_samples_take_the_operations_of_4(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, flex_calls = tiny_model(family, layers=4, dtype=torch.bfloat16).to(CUDA), flex_graph(monkeypatch)
    step, counts = PackedStep(model), []
    for samples in (4, 4, 64):  # the first step of a family may try transformers out
        segments = Segments.from_lengths([12 + at % 7 for at in range(samples)])
        ids = torch.randint(20, 100, (1, segments.total))
        columns = {name: torch.zeros_like(ids) for name in FAMILIES[family].token_columns}
        row = PackedRow(input_ids=ids, segments=segments, shift_labels=shift_labels(ids, segments), extras=columns)
        row = row.to(CUDA)
        flex_calls.clear()
        with Launches() as launches:
            step(row).loss.backward()
        counts.append(launches.seen.total() + len(flex_calls))
    assert bool(flex_calls) == (family == "gemma2")
    assert counts[2] <= 1.15 * counts[1]


@pytest.mark.parametrize("family", ["gemma3", *slow("llama4_text", "qwen3_vl")])
def test_boundaries_and_indices_are_copied_once_a_row(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a layer, and not again for recomputation."""
    copies, pin_memory = [], torch.Tensor.pin_memory
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: copies.append(x.shape) or pin_memory(x))
    counts = []
    for layers in (4, 8):
        model = enable_packing(tiny_model(family, layers=layers, dtype=torch.bfloat16)).to(CUDA).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        row = pack(padded(mixed_samples(model.config, kinds=kinds_of(model.config)))).to(CUDA)
        copies.clear()
        PackedStep(model)(row).loss.backward()
        counts.append(len(copies))
    assert 0 < counts[1] == counts[0]


@pytest.mark.parametrize(
    "family", ["qwen3", "qwen3_5", "gemma3", *slow("llama4_text", "gpt_oss", "qwen3_vl", "qwen4_exp")]
)
def test_a_second_pass_of_a_row_copies_and_waits_for_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of fixed size, with images and videos; another row's arrays are its own. Text kernels get no length of its
    samples, which a CUDA graph would keep."""
    lengths, kernel = set(), TorchVarlen.kernel
    monkeypatch.setattr(
        TorchVarlen, "kernel", lambda *x, **more: lengths.add((len(x[1]), *x[-2:])) or kernel(*x, **more)
    )
    slots, copies, pin_memory = SlotRule(pad_to=512, max_segments=8), [], torch.Tensor.pin_memory
    model = enable_packing(tiny_model(family, layers=3, dtype=torch.bfloat16), StepConfig(slots=slots)).to(CUDA).train()
    rows = [
        pack(padded(mixed_samples(model.config, seed=seed, kinds=kinds_of(model.config))), rule=slots).to(CUDA)
        for seed in (0, 1)
    ]
    truth = [step_of(model, row) for row in rows]
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: copies.append(x.shape) or pin_memory(x))
    for row, alone in zip(rows, truth, strict=True):
        assert all(map(torch.equal, step_of(model, row), alone))
        copies.clear()
        with waits_are_errors():
            again = step_of(model, row)
        assert copies == []
        assert all(map(torch.equal, again, alone))
    assert family != "qwen3" or lengths == {(512, 512, 512)}
