"""The same conversations through vlmpack's public API, and both outcomes of each family, computed once a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from tests.oracle.plain import (
    Case,
    Outcome,
    conversations,
    encoded,
    gradients_of,
    positions_seen,
    questions_about_one_image,
    questions_after_one_answer,
    run_alone,
)
from vlmpack import PackedStep, VLMCollator
from vlmpack.collate import SharePrefixes

LAYOUTS = ("padded", "packed", "tree", "deep tree")
MIN_SHARED = 16
"""Tokens that are worth sharing: more than the beginnings of the chat templates."""


@dataclass(frozen=True)
class Run:
    """Conversations, packed and alone."""

    case: Case
    samples: Sequence[Mapping[str, torch.Tensor]]
    """Each as the processor encodes it, with labels."""
    alone: Outcome
    packed: Outcome
    result: Any
    """vlmpack's `StepResult`, with logits."""

    @property
    def lengths(self) -> list[int]:
        return [sample["input_ids"].shape[1] for sample in self.samples]


@lru_cache
def run_of(case: Case, layout: str) -> Run:
    """One step on a padded batch, a packed row, or a packed row whose samples share a prefix tree."""
    talks = talks_of(case, layout)
    samples = [encoded(case, talk) for talk in talks]
    model = case.model()
    step = PackedStep(model)
    with positions_seen(model) as positions:
        result = step(collator_of(case, layout).collate(talks), logits=True)
    result.loss.backward()
    packed = outcome_of(result, samples, gradients_of(model))
    packed.positions = positions
    return Run(case, samples, run_alone(case.model(), samples), packed, result)


def talks_of(case: Case, layout: str) -> list[dict[str, Any]]:
    """Those that the layout is for: samples that begin alike for trees."""
    if layout == "tree":
        return questions_about_one_image(case)
    return questions_after_one_answer(case) if layout == "deep tree" else conversations(case)


def collator_of(case: Case, layout: str = "packed", **settings: Any) -> VLMCollator:
    if layout.endswith("tree"):
        settings = {"share_prefixes": SharePrefixes(min_shared=MIN_SHARED), **settings}
    return VLMCollator(case.processor, layout="padded" if layout == "padded" else "packed", **settings)


def outcome_of(
    result: Any, samples: Sequence[Mapping[str, torch.Tensor]], gradients: dict[str, torch.Tensor]
) -> Outcome:
    """Read a `StepResult`; where its log-probabilities stand is told by the samples, not by the result."""
    logprobs = []
    for row, sample in zip(result.logprobs.detach(), samples, strict=True):
        is_target = sample["labels"][0, 1:] != -100
        logprobs.append(row[: len(is_target)][is_target])
    return Outcome(result.sample_targets.tolist(), result.sample_loss_sums, logprobs, gradients)
