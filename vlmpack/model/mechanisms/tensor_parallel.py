"""Tensor parallelism by transformers: a divided language-model head keeps its logits where they are.

transformers gathers the logits of a head that it divides over the vocabulary, [l, V] on every rank. The loss does not
need them (`vlmpack.model.head`), so the head's forward takes a further keyword with which it returns this rank's part
as a `DTensor`. How its weight is divided is known only while it runs, when FSDP2 has gathered its own parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from vlmpack.context_parallel.mesh import NAMES
from vlmpack.families.family import Family
from vlmpack.families.registry import has_lm_head
from vlmpack.model.mechanisms import Mechanism, ModelParts, RowSetup

_DIVIDED = "vlmpack_divided"
"""The keyword with which a head returns its own part of the logits."""


@final
class TensorParallel(Mechanism):
    """The head of a model that transformers has divided over tensor ranks. A row has no entry for it."""

    name: ClassVar[str] = "tensor_parallel"

    def is_in(self, family: Family) -> bool:
        """Return True: any model may be divided."""
        return True

    def find(self, model: ModelParts) -> list[nn.Module]:
        """Return the head if it is divided over the vocabulary."""
        if not has_lm_head(model.core):
            return []
        head = model.family.head(model.core)
        weight = getattr(head, "weight", None)
        divided = isinstance(weight, DTensor) and {*(weight.device_mesh.mesh_dim_names or ())} & {*NAMES["tensor"]}
        return [head] if divided and "forward" in vars(head) else []

    def attach(self, model: ModelParts) -> None:
        """Replace the forward that transformers put on the head by one that takes the keyword."""
        for head in self.find(model):
            if _plain_forward(head) is None:
                head.forward = functools.partial(_forward, head, head.forward)

    def detach(self, model: ModelParts, *, kept: Set[int] = frozenset()) -> None:
        """Put the forward of transformers back."""
        for head in self.find(model):
            if id(head) not in kept and (plain := _plain_forward(head)) is not None:
                head.forward = plain

    def problem(self, model: ModelParts, *, attached: bool) -> None:
        """Return None: a head whose forward was replaced gathers its logits, which changes no value."""

    def prepare(self, setup: RowSetup) -> None:
        """Prepare nothing."""


def divided_logits(model: ModelParts) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from hidden states [..., D] to logits [..., V], a `DTensor` if the head is divided."""
    head = model.family.head(model.core)
    own = functools.partial(head, **{_DIVIDED: True}) if _plain_forward(head) is not None else head
    return model.family.to_logits(model.core, own)


def _forward(head: Any, plain: Callable[..., torch.Tensor], hidden: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """Return all logits, or on request those of this rank's part of the vocabulary."""
    weight = head.weight
    if not keywords.pop(_DIVIDED, False) or not isinstance(weight, DTensor) or weight.placements != (Shard(0),):
        return plain(hidden, **keywords)
    hidden = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    return F.linear(hidden, weight, head.bias)


def _plain_forward(head: nn.Module) -> Any:
    """Return the forward that a head had before ours; None: it has no forward of ours."""
    forward = vars(head).get("forward")
    return forward.args[1] if isinstance(forward, functools.partial) and forward.func is _forward else None
