"""What four ranks compute together and one process asserts: cases of the tests of rows that ranks share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from equality import VISION

from vlmpack.families.registry import FAMILIES
from vlmpack.layout import PackedRow, SlotRule, pack
from vlmpack.layout.batch import IGNORE
from vlmpack.model import StepConfig
from vlmpack.model.mechanisms.experts import has_balance
from vlmpack.testing import mixed_samples, padded, tiny_model

WORLD = 4
"""Processes."""

WIDE = {"heads": 6, "kv_heads": 2, "hidden": 96, "head_dim": 16}
"""Six heads, which four ranks cannot share out evenly."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row over several ranks."""

    family: str
    ranks: int
    multiple: int = 1
    """Of the slots."""
    kinds: tuple[str, ...] | None = None
    """Of the samples; None: three with images and one without, or texts."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Of the model."""
    learnt: float = 1.0
    """The part of the row, from its start, that has targets."""
    aux_loss: str = "row"
    """See `StepConfig`."""

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items() if value and value != 1.0)

    @property
    def row_key(self) -> str:
        """Equal for cases that differ in the number of ranks alone."""
        return str({**asdict(self), "ranks": 0})

    @property
    def has_experts(self) -> bool:
        """Return whether it has routers with a load-balancing loss."""
        family = FAMILIES[self.family]
        return family.has("experts") and has_balance(family)

    def model(self) -> Any:
        sizes = {"vision_depth": 2, **self.sizes} if self.family in VISION else self.sizes
        return tiny_model(self.family, seed=3, **sizes)

    def config(self) -> StepConfig:
        return StepConfig(z_loss_coef=0.01 if self.has_experts else 0.0, aux_loss=self.aux_loss)

    def row(self, model: Any, *, metadata: bool = False) -> PackedRow:
        samples = mixed_samples(model.config, seed=4, kinds=self.kinds)
        batch = padded(samples, metadata=metadata)
        batch = replace(batch, loss_weights=0.5 + batch.input_ids % 4 / 2)
        row = pack(batch, rule=SlotRule(multiple=self.multiple, row_multiple=WORLD))
        assert row.shift_labels is not None
        row.shift_labels[:, int(self.learnt * row.segments.total) :] = IGNORE
        return row


MIXED = ("text", "images_and_video", "image", "video")

CASES = (
    *(Case(family="qwen3_vl", ranks=ranks, multiple=multiple) for ranks, multiple in ((1, 4), (2, 4), (4, 1))),
    *(Case(family=family, ranks=2, multiple=4) for family in ("qwen2_5_vl", "qwen3_5")),
    *(Case(family=family, ranks=4) for family in ("qwen2_vl", "qwen3_vl_moe")),
    *(
        Case(family=family, ranks=2, multiple=4)
        for family in ("qwen3_5_moe", "qwen4_exp", "qwen3", "qwen3_next", "lfm2")
        if family in FAMILIES
    ),
    Case(family="qwen3_vl", ranks=4, kinds=MIXED),
    Case(family="qwen2_5_vl", ranks=4, kinds=MIXED, sizes=WIDE),
    Case(family="qwen3_5", ranks=2, kinds=("text", "text")),
    *(Case(family=family, ranks=4, sizes=WIDE) for family in ("llama4_text",) if family in FAMILIES),
    Case(family="qwen3_vl", ranks=4, multiple=8, learnt=0.5),
    Case(family="qwen3_vl_moe", ranks=2, multiple=4, aux_loss="sample"),
)

SHORT_CASES = (
    Case(family="qwen3_vl", ranks=2, multiple=4),
    Case(family="qwen2_5_vl", ranks=4, kinds=MIXED, sizes=WIDE),
    Case(family="qwen3_5", ranks=2, multiple=4),
    Case(family="qwen3_vl_moe", ranks=4, multiple=1),
    Case(family="qwen3_vl_moe", ranks=2, multiple=4, aux_loss="sample"),
    Case(family="qwen4_exp", ranks=2, multiple=4),
)
"""Those of the short tier: heads, keys of all ranks, gated delta layers, experts, samples, images, a windowed tower."""

WAIT_CASES = (
    *(Case(family=family, ranks=4, kinds=MIXED) for family in ("qwen3_vl", "qwen2_5_vl")),
    Case(family="qwen3_vl", ranks=4, kinds=MIXED, sizes=WIDE),
    Case(family="qwen3_vl_moe", ranks=4, kinds=MIXED),
    *(Case(family=family, ranks=2) for family in ("qwen3_5", "qwen4_exp")),
)
"""What moves heads, keys of all ranks, whole rows, images, videos and routers."""

DATA_KINDS = (("image", "text", "images"), ("text", "text"), ("refused",), ("video", "image"))
"""What each group of ranks has that shares a row: one has no image, one no sample at all."""

DATA_CASES = (
    ("qwen3_vl", 1, "ddp"),
    ("qwen3_vl", 1, "fsdp2"),
    ("qwen3_vl", 2, "sums"),
    ("qwen3_vl", 2, "ddp"),
    ("qwen3_vl", 2, "fsdp2"),
    ("qwen3_vl", 2, "fsdp2 over all"),
    ("qwen3_5_moe", 2, "fsdp2 over all"),
)
"""(family, ranks that share a row, what adds up gradients)."""


def rows_of(model: Any, groups: int) -> list[PackedRow]:
    """A row for each group."""
    return [_row(model, seed, kinds) for seed, kinds in enumerate(DATA_KINDS[-groups:])]


def _row(model: Any, seed: int, kinds: tuple[str, ...]) -> PackedRow:
    refused = kinds == ("refused",)
    batch = padded(mixed_samples(model.config, seed=seed, kinds=("text",) if refused else kinds), metadata=False)
    if refused:
        batch.attention_mask.zero_()
        assert batch.labels is not None
        batch.labels.fill_(IGNORE)
    rule = SlotRule(row_multiple=WORLD, pad_to=16 if refused else None)
    return pack(batch, rule=rule, keep_empty=True)


def targets(row: PackedRow) -> int:
    assert row.shift_labels is not None
    return int((row.shift_labels != IGNORE).sum())


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference as a part of the largest entry."""
    return float((found - truth).abs().max() / truth.abs().max().clamp(min=1e-30))
