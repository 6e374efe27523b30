"""Text rows as columns of a data set, under SeqPacker's names: a script of it runs with only its imports changed.

    from vlmpack.text.seqpacker import pack_sequences       # was: from seqpacker import pack_sequences
    from vlmpack.text.seqpacker import pack_dataset         # was: from seqpacker.hf_utils import pack_dataset
    from vlmpack.text.seqpacker import packed_collate_fn    # was: from seqpacker.torch_utils import packed_collate_fn

Every name can also be imported from here. Planning needs numpy alone; what needs torch or datasets imports it when it
is called, and `RowCollator` when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlmpack import __version__
from vlmpack.text.seqpacker import (
    Pack,
    PackedBatch,
    Packer,
    PackMetrics,
    PackResult,
    StreamPacker,
    pack_dataset,
    pack_dataset_from_result,
    pack_result_to_tensors,
    pack_sequences,
    packed_collate_fn,
)

if TYPE_CHECKING:
    from vlmpack.text.row_collator import RowCollator

__all__ = [
    "Pack",
    "PackMetrics",
    "PackResult",
    "PackedBatch",
    "Packer",
    "RowCollator",
    "StreamPacker",
    "__version__",
    "pack_dataset",
    "pack_dataset_from_result",
    "pack_result_to_tensors",
    "pack_sequences",
    "packed_collate_fn",
]


def __getattr__(name: str) -> Any:
    """Load the one name that needs torch when it is first used."""
    if name != "RowCollator":
        raise AttributeError(f"module 'vlmpack.text' has no attribute {name!r}; it has {', '.join(__all__)}")
    from vlmpack.text.row_collator import RowCollator

    return RowCollator
