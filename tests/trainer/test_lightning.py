"""The Lightning module of the page on what vlmpack works with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_readme import DOCS, as_a_reader, examples
from torch.utils.data import DataLoader

from vlmpack import VLMCollator
from vlmpack.testing import receipt_conversations, tiny_model, tiny_processor

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore")
def test_the_lightning_module_trains_as_a_loop_over_padded_batches(tmp_path, monkeypatch):
    lightning = pytest.importorskip("lightning", reason="needs Lightning: pip install lightning")
    as_a_reader(DOCS / "works_with.md", tmp_path, monkeypatch)
    page: dict[str, Any] = {"__name__": "page"}
    for example in examples(DOCS / "works_with.md"):
        if "Liger" not in example.mark:
            exec(example.code, page)
    assert float(page["trainer"].callback_metrics["loss"]) > 0

    class Losses(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            losses.append(float(outputs["loss"]))

    losses: list[float] = []
    processor = tiny_processor()
    receipts: Any = list(receipt_conversations(num=6, scale=0.35))
    module = page["PackedModule"](tiny_model(processor=processor), 0.05)
    rows = DataLoader(receipts, batch_size=3, collate_fn=VLMCollator(processor, layout="packed"))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    lightning.Trainer(max_steps=10, accelerator="cpu", callbacks=[Losses()], **quiet).fit(module, rows)

    reference = tiny_model(processor=processor)
    expected = padded_losses(reference, VLMCollator(processor, layout="padded"), receipts)
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
