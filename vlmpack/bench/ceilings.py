"""What the machine could do at best, measured beside the step: matrix products, and copies.

    roofline = max(FLOPs / FLOPs a second of a matrix product, bytes / bytes a second of a copy)

Both are taken at the model's own sizes, in the rounds of the step itself, so that a slow minute lowers them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from vlmpack.bench.settings import Clock
from vlmpack.bench.timing import Spread, Timings

PRODUCT, COPY = "matrix product", "copy"
"""The names of the two callables."""
WIDENING = 3
"""Columns of the product over its inner size: the widest product of these models, of an MLP."""
WEIGHT_PASSES = 3
"""Times that a step passes over all weights: forward, backward to the input, and the gradients it writes."""

MOST_COPIED = 2**29
"""Bytes: more than any cache, and little beside the model."""


@final
@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """One matrix product and one copy to be timed in turn with a step, and what follows from their times."""

    left: torch.Tensor
    """[T, D]: the tokens of a step, as wide as the model."""
    right: torch.Tensor
    """[D, 3 D]."""
    source: torch.Tensor
    """As many bytes as the model's weights, or `MOST_COPIED`."""
    target: torch.Tensor
    """Where they are copied."""
    weight_bytes: int
    """Of the model's weights."""

    @classmethod
    def of(cls, model: Any, *, tokens: int, hidden: int) -> Ceilings:
        """The ceilings of a step of this model on so many tokens, on its device and in its type."""
        weight = next(model.parameters())
        size = sum(parameter.numel() for parameter in model.parameters())
        copied = min(size, MOST_COPIED // weight.element_size())
        source = torch.zeros(copied, dtype=weight.dtype, device=weight.device)
        return cls(
            left=torch.randn(tokens, hidden, dtype=weight.dtype, device=weight.device),
            right=torch.randn(hidden, WIDENING * hidden, dtype=weight.dtype, device=weight.device),
            source=source,
            target=torch.empty_like(source),
            weight_bytes=size * weight.element_size(),
        )

    @property
    def callables(self) -> dict[str, Callable[[], object]]:
        """To be timed in turn with the step."""
        return {PRODUCT: lambda: self.left @ self.right, COPY: lambda: self.target.copy_(self.source)}

    @property
    def product_flops(self) -> int:
        """FLOPs of the matrix product."""
        return 2 * self.left.numel() * self.right.shape[1]

    @property
    def step_bytes(self) -> int:
        """Bytes that a step moves at the very least: its weights, and their gradients."""
        return WEIGHT_PASSES * self.weight_bytes

    def over_roofline(self, flops: int, timings: Timings, step: str, clock: Clock) -> Spread:
        """How many times as long as at the ceilings a step of so many FLOPs takes, each round within itself."""
        seconds = timings.seconds[clock]
        rounds = zip(seconds[step], seconds[PRODUCT], seconds[COPY], strict=True)
        return Spread.of(
            tuple(
                taken / max(flops * product / self.product_flops, self.step_bytes * copy / (2 * self.source.nbytes))
                for taken, product, copy in rounds
            )
        )

    def utilisation(self, flops: int, timings: Timings, step: str, clock: Clock) -> Spread:
        """FLOPs of the step a second over those of the matrix product: 1 is as fast as the machine multiplies."""
        seconds = timings.seconds[clock]
        rounds = zip(seconds[step], seconds[PRODUCT], strict=True)
        return Spread.of(tuple(flops * product / (self.product_flops * taken) for taken, product in rounds))
