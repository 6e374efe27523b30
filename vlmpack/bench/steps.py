"""The two steps that are compared: Hugging Face's own on a padded batch, and the packed one on the same batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from vlmpack.bench.flops import count_flops
from vlmpack.bench.memory import peak_bytes
from vlmpack.bench.settings import BenchSettings
from vlmpack.bench.workload import ReceiptShapes, alone, hf_inputs, receipt_batch, receipt_model
from vlmpack.errors import VlmpackError
from vlmpack.families import family_named
from vlmpack.layout import PaddedBatch
from vlmpack.model import PackedStep

SAME = 1e-4
"""Relative difference between the losses of two float32 steps above which they did not compute the same."""


@final
@dataclass(frozen=True, kw_only=True)
class StepPair:
    """Forward and backward of one batch in two ways, by two models of the same weights."""

    model: Any
    """Unmodified, for the padded step."""
    packed_step: PackedStep
    """On the other model. It is given the padded batch and packs it itself."""
    batch: PaddedBatch
    """The batch."""

    @classmethod
    def of(cls, settings: BenchSettings, shapes: ReceiptShapes) -> StepPair:
        """The two steps of `settings.family`.

        Raises:
            FamilyError: there is no such family.
        """
        family = family_named(settings.family)
        models = [receipt_model(family, shapes, seed=settings.seed, device=settings.device) for _ in range(2)]
        batch = receipt_batch(family, models[0].config, shapes, seed=settings.seed, device=settings.device)
        return cls(model=models[0], packed_step=PackedStep(models[1]), batch=batch)

    @property
    def steps(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Both by name."""
        return {"padded": self.padded, "packed": self.packed}

    def padded(self) -> torch.Tensor:
        """The unmodified model on the padded batch with its 2D mask; returns the loss."""
        self.model.zero_grad()
        loss = self.model(**hf_inputs(self.batch)).loss
        loss.backward()
        return loss.detach()

    def packed(self) -> torch.Tensor:
        """The packed step; returns the loss."""
        self.packed_step.model.zero_grad()
        loss = self.packed_step(self.batch).loss
        loss.backward()
        return loss.detach()

    def alone(self) -> None:
        """The unmodified model on each sample by itself: what has to be computed, and not a token more."""
        for inputs in alone(self.batch):
            self.model(**inputs).loss.backward()

    def peaks(self, device: str) -> dict[str, int]:
        """Peak bytes of each step, its own weights, its gradients and the batch included. Run each once before: what is
        made once and kept is not the step's."""
        held = [tensor for tensor in self.batch.to_hf().values() if isinstance(tensor, torch.Tensor)]
        models = {"padded": self.model, "packed": self.packed_step.model}
        for model in models.values():
            model.zero_grad()
        return {
            name: peak_bytes(step, held=[*models[name].parameters(), *held], device=device)
            for name, step in self.steps.items()
        }


@final
@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """FLOPs of both steps, and of the samples alone."""

    padded: int
    """Of the padded step."""
    packed: int
    """Of the packed step."""
    alone: int
    """Of the unmodified model on each sample without padding."""

    @classmethod
    def of(cls, pair: StepPair) -> StepFlops:
        """Count both steps as they run, once they are seen to compute the same loss.

        Raises:
            VlmpackError: they do not.
        """
        losses: dict[str, torch.Tensor] = {}
        steps = {name: lambda name=name, step=step: losses.update({name: step()}) for name, step in pair.steps.items()}
        counts = {name: count_flops(step) for name, step in steps.items()}
        check_same_loss(losses)
        return cls(**counts, alone=count_flops(pair.alone))

    @property
    def ideal_speedup(self) -> float:
        """How many times as fast a step on no padding would be, if time went with FLOPs."""
        return self.padded / self.alone


def check_same_loss(losses: Mapping[str, torch.Tensor]) -> None:
    """Times of steps that compute different things mean nothing.

    Raises:
        VlmpackError: they do.
    """
    found = {name: float(loss) for name, loss in losses.items()}
    if abs(found["packed"] - found["padded"]) > SAME * abs(found["padded"]):
        raise VlmpackError(f"the two steps do not compute the same loss ({found}); run `vlmpack doctor`")
