"""The module of the page on recipes in Lightning: its losses and weights are those of a loop over padded batches."""

from __future__ import annotations

import pytest
import torch
from test_readme import DOCS, examples

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]


def test_the_module_trains_as_a_loop_over_padded_batches(tmp_path, monkeypatch):
    pytest.importorskip("lightning", reason="needs Lightning: pip install lightning")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for example in examples(DOCS / "recipes.md"):
        exec(example.code, names)
    reference = names["tiny_model"](processor=names["processor"])
    collator = names["VLMCollator"](names["processor"], layout="padded")
    optimizer = torch.optim.SGD(reference.parameters(), lr=1e-3)
    for at in (0, 3):
        batch = collator(names["receipts"][at : at + 3])
        batch.pop("vlmpack")
        reference(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(names["trainer"].callback_metrics["loss"]) > 0
    for ours, theirs in zip(names["module"].model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
