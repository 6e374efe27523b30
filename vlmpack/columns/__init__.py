"""Text rows as columns of a data set, under SeqPacker's names: a script of it runs with only its imports changed.

    from vlmpack.columns import pack_sequences              # was: from seqpacker import pack_sequences
    from vlmpack.columns.hf_utils import pack_dataset       # was: from seqpacker.hf_utils import pack_dataset
    from vlmpack.columns.torch_utils import PackedBatch     # was: from seqpacker.torch_utils import PackedBatch

Every name can also be imported from here. Planning needs numpy alone; what needs torch or datasets is loaded when it
is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vlmpack import __version__
from vlmpack.columns.packer import Packer, pack_sequences
from vlmpack.columns.result import Pack, PackMetrics, PackResult
from vlmpack.columns.stream_packer import StreamPacker

if TYPE_CHECKING:
    from vlmpack.columns.hf_utils import pack_dataset, pack_dataset_from_result
    from vlmpack.columns.row_collator import RowCollator
    from vlmpack.columns.torch_utils import PackedBatch, pack_result_to_tensors, packed_collate_fn

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

_HOME = {
    "PackedBatch": "torch_utils",
    "RowCollator": "row_collator",
    "pack_dataset": "hf_utils",
    "pack_dataset_from_result": "hf_utils",
    "pack_result_to_tensors": "torch_utils",
    "packed_collate_fn": "torch_utils",
}


def __getattr__(name: str) -> Any:
    """Load what needs torch or datasets the first time somebody asks for it."""
    if name not in _HOME:
        raise AttributeError(f"module 'vlmpack.columns' has no attribute {name!r}; it has {', '.join(__all__)}")
    return vars(import_module(f"vlmpack.columns.{_HOME[name]}"))[name]
