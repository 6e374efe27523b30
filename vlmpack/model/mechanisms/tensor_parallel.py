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
from vlmpack.model.mechanisms import Mechanism, ModelParts, RowSetup


@final
class TensorParallel(Mechanism):
    """The head, and norms of heads, of a model divided over tensor ranks. A row has no entry for them."""

    name: ClassVar[str] = "tensor_parallel"

    def find(self, model: ModelParts) -> list[nn.Module]:
        """Return the head if it is divided over the vocabulary, and the norms."""
        rules = {rule for rule, style in (getattr(model.core, "tp_plan", None) or {}).items() if style == SUMMED}
        if tensor_group(model.core) is None:
            return []
        found = [part for name, part in model.core.named_modules() if rules and pattern_of(name) in rules]
        if has_lm_head(model.core) and isinstance(
            getattr(head := model.family.head(model.core), "weight", None), DTensor
        ):
            found.append(head)
        return [part for part in found if "forward" in vars(part)]

    def attach(self, model: ModelParts) -> None:
        """Replace the forwards that transformers put on these modules."""
        group = tensor_group(model.core)
        for part in self.find(model):
            if not isinstance(plain := vars(part)["forward"], _Forward):
                is_head = has_lm_head(model.core) and part is model.family.head(model.core)
                part.forward = DividedHead(part, plain) if is_head else SummedNorm(part, plain, group)

    def detach(self, model: ModelParts, *, kept: Set[int] = frozenset()) -> None:
        """Put the forwards of transformers back."""
        for part in self.find(model):
            if id(part) not in kept and isinstance(ours := vars(part)["forward"], _Forward):
                part.forward = ours.plain
                ours.leave()

    def problem(self, model: ModelParts, *, attached: bool) -> None:
        """Return None: a head whose forward was replaced gathers its logits, which changes no value."""

    def prepare(self, setup: RowSetup) -> None:
        """Prepare nothing."""


class _Forward:
    """The forward of a module, in place of the one that transformers put on it."""

    def __init__(self, module: Any, plain: Callable[..., torch.Tensor]) -> None:
        self.module = module
        self.plain = plain
        """The forward of transformers."""

    def leave(self) -> None:
        """Remove what was left on the module's weights."""


@final
class DividedHead(_Forward):
    """Returns all logits, or on request those of this rank's part of the vocabulary."""

    def __call__(self, hidden: torch.Tensor, *, divided: bool = False) -> torch.Tensor:
        """Map hidden states [..., D] to logits [..., V]; `divided`: to a `DTensor`."""
        weight = self.module.weight
        if not divided or not isinstance(weight, DTensor) or weight.placements != (Shard(0),):
            return self.plain(hidden)
        hidden = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
        return F.linear(hidden, weight, self.module.bias)


@final
class SummedNorm(_Forward):
    """The module's own forward, with gradients summed over ranks."""

    def __init__(self, module: Any, plain: Callable[..., torch.Tensor], group: Any) -> None:
        super().__init__(module, plain)
        self._group = group
        self._hooked: dict[str, tuple[Any, Any, dict[int, Any]]] = {}
        self._hook()

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call the forward of the module's class."""
        self._hook()
        return type(self.module).forward(self.module, *args, **kwargs)

    def leave(self) -> None:
        """Give the weights the hooks that they had."""
        for weight, hook, of_plan in self._hooked.values():
            hook.remove()
            if of_plan:
                weight._post_accumulate_grad_hooks.update(of_plan)

    def _hook(self) -> None:
        """Hook each weight once. FSDP2 puts another weight in its place while the module runs."""
        for name, weight in self.module.named_parameters(recurse=False):
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
