"""The picture in the project's README: eight receipts, padded and packed."""

from __future__ import annotations

import sys
from pathlib import Path

from vlmpack.collate import VLMCollator
from vlmpack.data import to_conversation
from vlmpack.layout import PaddedBatch
from vlmpack.plots.rows import plot_rows
from vlmpack.plots.style import save
from vlmpack.testing import SyntheticReceipts, tiny_processor


def readme_picture(path: str | Path, *, samples: int = 8, seed: int = 0) -> Path:
    """Draw a batch of synthetic receipts and write it to `path`."""
    records = SyntheticReceipts(num=samples, seed=seed)
    receipts = [to_conversation(records[i]) for i in range(samples)]
    batch = VLMCollator(tiny_processor("qwen3_vl"), layout="padded").collate(receipts)
    assert isinstance(batch, PaddedBatch)
    return save(plot_rows(batch), path)


if __name__ == "__main__":
    readme_picture(sys.argv[1] if len(sys.argv) > 1 else "docs/packed_rows.png")
