"""The same as plain loops over tokens; imported by tests only."""

from __future__ import annotations

from collections.abc import Sequence


def naive_rows(
    bins: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    capacity: int | None,
    *,
    padding_value: int = 0,
    label_padding_value: int = -100,
) -> dict[str, list[list[int]]]:
    """Columns of packed rows; `capacity` None: rows are not padded."""
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": [], "attention_mask": []}
    for members in bins:
        row: dict[str, list[int]] = {name: [] for name in columns}
        for sample in members:
            for place, (token, label) in enumerate(zip(token_ids[sample], labels[sample], strict=True)):
                row["input_ids"].append(token)
                row["labels"].append(label_padding_value if place == 0 or label == -100 else label)
                row["position_ids"].append(place)
                row["attention_mask"].append(1)
        while capacity is not None and len(row["input_ids"]) < capacity:
            row["input_ids"].append(padding_value)
            row["labels"].append(label_padding_value)
            row["position_ids"].append(0)
            row["attention_mask"].append(0)
        for name, values in row.items():
            columns[name].append(values)
    return columns


def seqpacker_columns(
    bins: Sequence[Sequence[int]], token_ids: Sequence[Sequence[int]], capacity: int
) -> dict[str, list[list[int]]]:
    """SeqPacker 0.1.3's columns of the same rows: labels are shifted already, and the mask is 1 on all tokens."""
    columns = naive_rows(bins, token_ids, token_ids, capacity)
    for labels, members in zip(columns["labels"], bins, strict=True):
        labels[:] = [-100] * capacity
        at = 0
        for sample in members:
            for place in range(1, len(token_ids[sample])):
                labels[at + place - 1] = token_ids[sample][place]
            at += len(token_ids[sample])
    return columns
