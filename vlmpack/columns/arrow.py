"""Columns of data sets, read where they lie: no python number is made of any token."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from vlmpack.errors import SampleError


def arrow_lists(samples: Any) -> Any:
    """`samples` as a pyarrow ChunkedArray of lists; None if they are something else.

    Columns of a `datasets.Dataset` are, and arrow arrays. A data set that transforms its rows as they are read has to
    be read row by row: None.
    """
    if "pyarrow" not in sys.modules:
        return None  # whoever has such an object has imported its package
    import pyarrow as pa

    if isinstance(samples, pa.Array):
        return pa.chunked_array([samples])
    if isinstance(samples, pa.ChunkedArray):
        return samples
    column = vars(sys.modules.get("datasets.arrow_dataset", object)).get("Column")
    if column is None or not isinstance(samples, column):
        return None
    source, name = samples.source, samples.column_name
    if isinstance(source, column) or source.format["type"] == "custom":
        return None
    return source.select_columns([name]).with_format("arrow")[:].column(name)


def read_arrow(lists: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
    """(values [R] of the column's own integer type, lengths int64 [N]) of a ChunkedArray of lists.

    Raises:
        SampleError: a row is null or holds nulls; names it. The column does not hold whole numbers; names the first.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = lists.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise _not_numbers(what, kind)
    if not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
        raise _not_numbers(what, kind)
    if lists.null_count:
        raise SampleError(f"the {what} are null", index=_first(lists.is_null()), reason="bad_tokens")
    flat = pa.chunked_array([chunk.flatten() for chunk in lists.chunks], type=kind.value_type)
    lengths = pc.list_value_length(lists).to_numpy().astype(np.int64)  # pyright: ignore[reportAttributeAccessIssue]
    if flat.null_count:
        sample = int(np.searchsorted(np.cumsum(lengths), _first(flat.is_null()), side="right"))
        raise SampleError(f"the {what} hold a null", index=sample, reason="bad_tokens")
    return flat.to_numpy(), lengths


def _first(flags: Any) -> int:
    return int(np.argmax(flags.to_numpy()))


def _not_numbers(what: str, kind: Any) -> SampleError:
    return SampleError(
        f"the {what} must be lists of whole numbers, but the column holds {kind}", index=0, reason="bad_tokens"
    )
