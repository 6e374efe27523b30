"""torch.compile compiles the model's layers and leaves the row's arithmetic alone: same losses, same gradients."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from training import collator, descend, distance, gradients, receipts, train

from vlmpack.model import PackedStep, enable_packing
from vlmpack.testing import tiny_model

SMALL = {"layers": 1, "vision_depth": 1}
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


def test_trainer_with_torch_compile(tmp_path):
    reference, model = tiny_model(**SMALL), enable_packing(tiny_model(**SMALL))
    samples = receipts(model, kinds=("image", "text")) * 2
    expected = descend(reference, samples, size=2, steps=2)
    run = train(model, samples, tmp_path, torch_compile=True, torch_compile_backend="aot_eager")
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert run.losses == pytest.approx(expected.losses, rel=1e-6)
    for ours, theirs in zip(run.gradients, expected.gradients, strict=True):
        assert distance(theirs, ours) < 1e-5


def test_the_rows_arithmetic_is_not_compiled_again_for_every_row():
    """Frames of ours that were compiled: none, whatever the lengths."""
    model = enable_packing(tiny_model(**SMALL))
    seen: list[str] = []

    def backend(graph, inputs):
        seen.extend(str(node.meta.get("stack_trace", "")) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(model, backend=backend)
    for seed in (1, 2):
        compiled(**collator("packed")(receipts(model, seed=seed, kinds=("text", "text"))))
    assert any("modeling_qwen3_vl.py" in trace for trace in seen)
    assert not [trace for trace in seen if "vlmpack/layout" in trace or "vlmpack/model/engine" in trace]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="waits for a C++ compiler")
def test_inductor():
    """Text only: compiling the vision tower too takes a minute, and goes the way of the test above."""
    model, plain = (enable_packing(tiny_model(**SMALL)) for _ in range(2))
    row = collator("packed")(receipts(model, kinds=("text", "text")))
    step, reference = PackedStep(torch.compile(model)), PackedStep(plain)
    for packed_step in (step, reference):
        packed_step(row).loss.backward()
    assert step(row).loss.item() == pytest.approx(reference(row).loss.item(), rel=1e-6)
    assert distance(gradients(plain), gradients(model)) < 1e-5
