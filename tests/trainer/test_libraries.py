"""Other libraries around an enabled model: Liger's kernels, and the Lightning module of the page on recipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import slow
from test_readme import DOCS, examples

pytestmark = pytest.mark.slow

KERNELS = {"qwen3": {"norm", "rotary", "gated MLP"}, "qwen3_moe": {"norm", "rotary", "experts"}}
"""Those that Liger 0.8.5 has for each. They run in a process of their own: Liger replaces functions of modules."""


def run(*arguments):
    """What liger_runs.py found, in a process of its own."""
    for package in ("liger_kernel", "triton"):
        pytest.importorskip(package, reason="needs Liger: pip install liger-kernel triton")
    script = Path(__file__).with_name("liger_runs.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("order", ["before", *slow("after", "class")])
@pytest.mark.parametrize("family", KERNELS)
def test_a_packed_row_is_its_samples_alone_with_the_same_kernels(family, order):
    found = run("compare", family, order)
    assert found["loss"] < 2e-6
    assert found["gradients"] < 1e-5
    assert found["padding"] == 0
    assert set(found["packed"]) == set(found["alone"]) == KERNELS[family]
    assert found["packed"]["norm"] < found["alone"]["norm"]


@pytest.mark.parametrize("order", ["before", "after", "class"])
def test_its_fused_loss_is_refused_by_name(order):
    assert "Liger" in run("refuse", "qwen3", order)["refused"]


def test_steps_of_trainer_are_those_of_the_padded_run(tmp_path):
    found = run("train", "qwen3", 3, tmp_path)
    padded, packed = found["losses"]
    assert len(padded) == 3
    assert packed == pytest.approx(padded, rel=1e-5)
    assert padded[-1] < padded[0]
    assert found["weights"] < 1e-4
    assert set(found["packed"]) == KERNELS["qwen3"]


@pytest.mark.filterwarnings("ignore")
def test_the_lightning_module_trains_as_a_loop_over_padded_batches(tmp_path, monkeypatch):
    lightning = pytest.importorskip("lightning", reason="needs Lightning: pip install lightning")
    monkeypatch.chdir(tmp_path)
    page = {"__name__": "page"}
    for example in examples(DOCS / "works_with.md"):
        if "Liger" not in example.mark:
            exec(example.code, page)
    assert float(page["trainer"].callback_metrics["loss"]) > 0

    class Losses(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            losses.append(float(outputs["loss"]))

    losses: list[float] = []
    module = page["PackedModule"](page["tiny_model"](processor=page["processor"]), 0.05)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    lightning.Trainer(max_steps=10, accelerator="cpu", callbacks=[Losses()], **quiet).fit(module, page["rows"])

    reference = page["tiny_model"](processor=page["processor"])
    expected = padded_losses(reference, page["VLMCollator"](page["processor"], layout="padded"), page["receipts"])
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0] - 0.1  # the guard: it learns
    for ours, theirs in zip(module.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def padded_losses(model, collator, receipts):
    """The losses of ten steps over padded batches of three receipts each."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(10):
        batch = collator(receipts[(at := 3 * (step % 2)) : at + 3])
        batch.pop("vlmpack")
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
