"""The proof on one batch: gradients of a packed row against the sum over its samples, each alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from vlmpack.collate import VLMCollator
from vlmpack.layout import METADATA_KEY
from vlmpack.model import disable_packing, enable_packing

Gradients = dict[str, torch.Tensor]


@final
@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How well two sets of gradients agree."""

    cosine: float
    """The smallest over all parameters, computed in float64."""
    parameter: str
    """The parameter that has it."""
    parameters: int
    """How many were compared."""


def packed_against_alone(model: nn.Module, processor: Any, samples: Sequence[Mapping[str, Any]]) -> Agreement:
    """Gradients of one batch's loss, once as a packed row, once sample by sample through the unmodified model.

    The model is put into float32 and keeps that; its weights stay the same.
    """
    model.float().eval()
    alone = _alone(disable_packing(model), VLMCollator(processor), samples)
    packed = _packed(enable_packing(model), VLMCollator(processor, layout="packed"), samples)
    return agreement(packed, alone)


def agreement(seen: Gradients, expected: Gradients) -> Agreement:
    """The smallest cosine. A parameter with a gradient on one side only counts as 0, one that is 0 on both as 1."""
    cosines = {name: _cosine(seen.get(name), expected.get(name)) for name in {**expected, **seen}}
    worst = min(cosines, key=cosines.__getitem__)
    return Agreement(cosine=cosines[worst], parameter=worst, parameters=len(cosines))


def _cosine(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    if a is None or b is None:
        return 0.0
    x, y = a.double().flatten(), b.double().flatten()
    norms = float(x.norm() * y.norm())
    if norms == 0.0:
        return float(not x.any() and not y.any())
    return float(x @ y) / norms


def _packed(model: nn.Module, collator: VLMCollator, samples: Sequence[Mapping[str, Any]]) -> Gradients:
    model.zero_grad()
    model(**_placed(collator(samples), model)).loss.backward()
    return _take_gradients(model)


def _alone(model: nn.Module, collator: VLMCollator, samples: Sequence[Mapping[str, Any]]) -> Gradients:
    model.zero_grad()
    batches = [collator([sample]) for sample in samples]
    targets = [batch.pop(METADATA_KEY).num_targets for batch in batches]
    for batch, count in zip(batches, targets, strict=True):
        loss = model(**_placed(batch, model)).loss
        (loss * (count / sum(targets))).backward()
    return _take_gradients(model)


def _placed(batch: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    device = next(model.parameters()).device
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _take_gradients(model: nn.Module) -> Gradients:
    """The gradients themselves: the model lets go of them."""
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken
