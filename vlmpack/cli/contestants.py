"""What the demo trains: a small model made here, or real weights; receipts drawn here, or real CORD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from vlmpack.cli.contest import Conversations
from vlmpack.cli.processors import reading
from vlmpack.data import load_cord, load_processor
from vlmpack.families import family_of
from vlmpack.testing import SMALLEST_LEGIBLE, SyntheticReceipts, tiny_model, tiny_processor

TINY_RATE, REAL_RATE = 1e-3, 1e-5


@final
@dataclass(frozen=True, kw_only=True)
class Contestants:
    """Everything two trainings start from."""

    title: str
    """What is trained, in a few words."""
    make_model: Callable[[], Any]
    """The model with its initial weights, the same at every call."""
    processor: Any
    """The model's processor."""
    records: Conversations
    """What it is trained on."""
    learning_rate: float
    """Fitting the model's size."""


def contestants(
    model_id: str | None, source: str, *, num: int, seed: int, device: torch.device, dtype: torch.dtype
) -> Contestants:
    """Read or make them.

    Raises:
        ConfigError: the data cannot be used. FamilyError: the model cannot be packed exactly.
    """
    if model_id is not None:
        with reading("--model", model_id):
            processor = load_processor(model_id)
        return Contestants(
            title=f"{model_id}, {_short(dtype)}",
            make_model=lambda: _ready(_pretrained(model_id, dtype), device),
            processor=processor,
            records=_records(source, num=num, seed=seed),
            learning_rate=REAL_RATE,
        )
    processor = tiny_processor("qwen3_vl")
    return Contestants(
        title=f"Qwen3-VL, 4 layers of width 128, random weights, {_short(dtype)}",
        make_model=lambda: _ready(_small(processor, dtype, seed), device),
        processor=processor,
        records=_records(source, num=num, seed=seed, scale=SMALLEST_LEGIBLE),
        learning_rate=TINY_RATE,
    )


def _records(source: str, *, num: int, seed: int, scale: float = 1.0) -> Conversations:
    drawn = source == "synthetic"
    records = SyntheticReceipts(num=num, seed=seed, scale=scale) if drawn else load_cord(source, num=num)
    return Conversations(records=records)


def _small(processor: Any, dtype: torch.dtype, seed: int) -> Any:
    return tiny_model(
        "qwen3_vl",
        processor=processor,
        seed=seed,
        dtype=dtype,
        lively=False,
        hidden=128,
        layers=4,
        vision_hidden=64,
        vision_heads=4,
    )


def _pretrained(model_id: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForImageTextToText

    with reading("--model", model_id):
        return AutoModelForImageTextToText.from_pretrained(model_id, dtype=dtype, attn_implementation="sdpa")


def _ready(model: Any, device: torch.device) -> Any:
    # A cache that nobody reads would cost the padded run memory; the packed one never makes any.
    family_of(model).text_config(model.config).use_cache = False
    return model.to(device).train()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
