"""Draw the picture of the README: eight receipts as a padded batch, and as one packed row.

python docs/draw_packed_rows.py docs/packed_rows.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from vlmpack import VLMCollator
from vlmpack.data import to_conversation
from vlmpack.layout import PaddedBatch
from vlmpack.plots import plot_rows, save
from vlmpack.testing import SyntheticReceipts, tiny_processor


def draw_packed_rows(path: str | Path, *, samples: int = 8, seed: int = 0) -> Path:
    """Draw a batch of synthetic receipts and write it to `path`."""
    receipts = [
        to_conversation(record) for record in SyntheticReceipts(num=samples, seed=seed)
    ]
    batch = VLMCollator(tiny_processor("qwen3_vl"), layout="padded").collate(receipts)
    assert isinstance(batch, PaddedBatch)
    return save(plot_rows(batch), path)


if __name__ == "__main__":
    draw_packed_rows(sys.argv[1] if len(sys.argv) > 1 else "docs/packed_rows.png")
