"""Tensor parallelism by transformers: logits of a divided head stay where they are, norms of heads are summed once.

transformers gathers the logits of a head that it divides over the vocabulary, [l, V] on every rank. The loss does not
need them (`vlmpack.model.head`), so the head's forward takes a further keyword with which it returns this rank's part
as a `DTensor`. How its weight is divided is known only while it runs, when FSDP2 has gathered its own parts.
A norm of heads is whole on every rank and normalizes that rank's heads. transformers sums its accumulated gradient over
ranks after every backward pass, so with two of them before an optimizer step it counts the first one as often as there
are ranks. Here a gradient is summed before it is accumulated.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from vlmpack.context_parallel.mesh import tensor_group
from vlmpack.context_parallel.plans import SUMMED, pattern_of
from vlmpack.families.registry import has_lm_head
from vlmpack.model.mechanisms import Mechanism, ModelParts, base_of, replaces


@final
class TensorParallel(Mechanism):
    """The head, and norms of heads, of a model divided over tensor ranks. A row has no entry for them."""

    name: ClassVar[str] = "tensor_parallel"

    def find(self, model: ModelParts) -> list[nn.Module]:
        """Return the head if it is divided over the vocabulary, and the norms."""
        return [] if tensor_group(model.core) is None else [*self._heads(model), *self._norms(model)]

    def _heads(self, model: ModelParts) -> list[Any]:
        head = model.family.head(model.core) if has_lm_head(model.core) else None
        return [head] if isinstance(getattr(head, "weight", None), DTensor) and "forward" in vars(head) else []

    def _norms(self, model: ModelParts) -> list[Any]:
        rules = {rule for rule, style in (getattr(model.core, "tp_plan", None) or {}).items() if style == SUMMED}
        parts = [part for name, part in model.core.named_modules() if rules and pattern_of(name) in rules]
        return [part for part in parts if "forward" in vars(part) or _SUMS in vars(part)]

    def attach(self, model: ModelParts) -> None:
        """Replace the forwards that transformers put on these modules."""
        group = tensor_group(model.core)
        if group is None:
            return
        for head in self._heads(model):
            if not isinstance(plain := vars(head)["forward"], DividedHead):
                head.forward = DividedHead(head, plain)
        for norm in self._norms(model):
            if _SUMS not in vars(norm):
                sum_over(norm, group)

    def detach(self, model: ModelParts, *, kept: Set[int] = frozenset()) -> None:
        """Put the forwards of transformers back."""
        for part in self.find(model):
            if id(part) in kept:
                continue
            if isinstance(ours := vars(part).get("forward"), DividedHead):
                part.forward = ours.plain
            elif _SUMS in vars(part):
                vars(part).pop(_SUMS).leave(part)

    def problem(self, model: ModelParts, *, attached: bool) -> None:
        """Return None: a head whose forward was replaced gathers its logits, which changes no value."""


@final
class DividedHead:
    """Returns all logits, or on request those of this rank's part of the vocabulary."""

    def __init__(self, module: Any, plain: Callable[..., torch.Tensor]) -> None:
        self.module, self.plain = module, plain  # plain: the forward that transformers put on the module

    def __call__(self, hidden: torch.Tensor, *, divided: bool = False) -> torch.Tensor:
        """Map hidden states [..., D] to logits [..., V]; `divided`: to a `DTensor`."""
        weight = self.module.weight
        if not divided or not isinstance(weight, DTensor) or weight.placements != (Shard(0),):
            return self.plain(hidden)
        hidden = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
        return F.linear(hidden, weight, self.module.bias)


_SUMS = "_vlmpack_sums"
"""The attribute of a norm that has its `NormSums`."""


def sum_over(norm: Any, group: Any) -> None:
    """Sum the gradients of a norm's weights over the ranks of a group, instead of the forward put on the norm.

    The norm changes its class, because a compiled layer would be compiled anew for each forward put on an object.
    """
    setattr(norm, _SUMS, NormSums(vars(norm).pop("forward", None), group))
    norm.__class__ = summed_class(type(norm))
    vars(norm)[_SUMS].hook(norm)


@replaces("__call__")
def summed_class(plain: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Make a subclass of a norm's class that sums the gradients of its weights."""
    vars(module)[_SUMS].hook(module)
    return plain(module, *args, **kwargs)


@final
class NormSums:
    """The hooks on a norm's weights, and what they stand in for."""

    def __init__(self, plain: Callable[..., torch.Tensor] | None, group: Any) -> None:
        self._plain, self._group = plain, group
        self._hooked: dict[str, tuple[Any, Any, dict[int, Any]]] = {}

    def leave(self, norm: Any) -> None:
        """Give the norm the class and the forward that it had, and its weights their hooks."""
        norm.__class__ = base_of(norm)
        if self._plain is not None:
            norm.forward = self._plain
        for weight, hook, of_plan in self._hooked.values():
            hook.remove()
            if of_plan:
                weight._post_accumulate_grad_hooks.update(of_plan)

    def hook(self, norm: nn.Module) -> None:
        """Hook each weight once. FSDP2 puts another weight in its place while the module runs."""
        for name, weight in norm.named_parameters(recurse=False):
            known = name in self._hooked and self._hooked[name][0] is weight
            if weight.requires_grad and not isinstance(weight, DTensor) and not known:
                hooks = weight._post_accumulate_grad_hooks or {}
                of_plan = {n: hook for n, hook in hooks.items() if "GradAllReduce" in hook.__qualname__}
                for number in of_plan:
                    del hooks[number]
                self._hooked[name] = weight, weight.register_hook(self._sum), of_plan

    def _sum(self, grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group)
        return total
