"""The work of a packed step, compared with what its samples need: equal outputs do not prove that padding was skipped.

Pairs are counted one by one here, by the words in which transformers describes its masks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from vlmpack.attention.patterns import EVERYTHING, Reach
from vlmpack.families.spans import Prefix, Sees
from vlmpack.testing.tiles import Sample

if TYPE_CHECKING:
    from vlmpack.model.result import Work

Reaches = Collection[Reach]
"""Reach of queries, in each kind of layer."""
TYPE_KEYS = ("mm_token_type_ids", "token_type_ids")
"""Names of the kinds of tokens in a sample."""


def work_problems(
    work: Work | None,
    samples: Sequence[Sample],
    *,
    multiple: int = 1,
    sparse: bool = False,
    reaches: Reaches = (EVERYTHING,),
    sees: Sees | None = None,
) -> list[str]:
    """Describe work that a packed step should not have done.

    Args (beside the work of a packed step, and its samples):
        multiple: of the slots of the row.
        sparse: attention selects among the pairs.
        reaches: of the model's layers.
        sees: the spans of its layers.
    """
    assert work is not None
    lengths = [len(sample["input_ids"]) for sample in samples]
    of_layers = {reach: sum(_pairs(sample, reach, sees) for sample in samples) for reach in reaches}
    local = [count for reach, count in of_layers.items() if reach.window or reach.chunk]
    pairs, window_pairs = max(of_layers.values()), min(local, default=0)
    counts = {
        "real tokens": (work.real_tokens, sum(lengths)),
        "physical tokens": (work.physical_tokens, sum(-(-n // multiple) * multiple for n in lengths)),
        "pairs in a window": (work.window_pairs, window_pairs),
    }
    faults = [f"{count} {name}, expected {right}" for name, (count, right) in counts.items() if count != right]
    if not (0 < work.attended_pairs <= pairs if sparse else work.attended_pairs == pairs):
        faults.append(f"{work.attended_pairs} attended pairs, expected {pairs}")
    return faults


def _pairs(sample: Sample, reach: Reach, sees: Sees | None) -> int:
    """Pairs of one sample alone in a layer of this reach."""
    window = reach.window
    place = torch.arange(len(sample["input_ids"]))
    before = place[:, None] - place[None, :]
    visible = before >= 0
    if reach.chunk is not None:
        return int((visible & (place[:, None] // reach.chunk == place[None, :] // reach.chunk)).sum())
    in_window = torch.ones_like(visible) if window is None else before < window
    together = torch.zeros_like(visible)
    if isinstance(sees, Prefix):
        in_prefix = sample[sees.column] == 0
        together = in_prefix[:, None] & in_prefix[None, :]
    elif sees is not None and sees.is_in(window):
        types = next(sample[name] for name in TYPE_KEYS if name in sample)
        is_media = types > 0
        run = (is_media & ~is_media.roll(1).index_fill(0, place[:1], False)).cumsum(0)
        together = (run[:, None] == run[None, :]) & is_media[:, None] & is_media[None, :]
    beyond = together if sees is not None and sees.beyond_window else together & in_window
    return int(((visible & in_window) | beyond).sum())
