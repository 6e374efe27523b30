"""NeMo Automodel: its packed row of samples with images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from vlmpack.bench.peers.contest import Contest, Peer, Sample, Way, read_row
from vlmpack.bench.peers.ours import collated_images
from vlmpack.bench.peers.work import PeerWork


def _row(packing: ModuleType, work: PeerWork) -> Sequence[Contest]:
    """As its packed data set makes a row: positions by the model's own function, shift, join. Pixels are joined too.

    Each sample loses its last token on the way, whose target nothing is.
    """
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(work.config)
    samples = [{**sample, "attention_mask": torch.ones_like(sample["input_ids"])} for sample in work.images]

    def placed(sample: dict[str, Any]) -> dict[str, Any]:
        positions = packing._compute_mrope_position_ids(sample, model.model.get_rope_index)
        return packing._shift_sample({**sample, "position_ids": positions}, has_mrope=True)

    def call() -> dict[str, Any]:
        return packing._build_packed_vlm_sample([placed(sample) for sample in samples], work.tokens, 0, has_mrope=True)

    return [
        Contest(
            theirs=Way(call=call, read=_read),
            ours={"VLMCollator": collated_images(work)},
            work="images, without last tokens",
        )
    ]


def _read(row: dict[str, Any]) -> list[Sample]:
    return read_row(row, [0, *accumulate(row["seq_lens"])], shifted=True)


ROW = Peer(
    name="NeMo Automodel",
    distribution="nemo-automodel",
    module="nemo_automodel.components.datasets.vlm.neat_packing_vlm",
    names=("_compute_mrope_position_ids", "_shift_sample", "_build_packed_vlm_sample"),
    contests=_row,
)
