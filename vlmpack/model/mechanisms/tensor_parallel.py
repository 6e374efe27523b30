"""Tensor parallelism by transformers: the language-model head keeps its logits where they are, and plans are checked.

transformers gathers the logits of a head that it divides over the vocabulary, [l, V] on every rank. The loss does not
need them (`vlmpack.model.head`), so the head's forward takes a further keyword with which it returns this rank's part
as a `DTensor`. How its weight is divided is known only while it runs, when FSDP2 has gathered its own parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Set
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

    def problem(self, model: ModelParts, *, attached: bool) -> str | None:
        """Report a plan by which gradients would be wrong, or heads be cut in two."""
        return None if attached else next(_problems(model), None)

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


def _problems(model: ModelParts) -> Iterator[str]:
    """Yield what is wrong with the model's plan of tensor parallelism."""
    core, size = model.core, getattr(model.core, "_tp_size", None) or 1
    if size == 1:
        return
    text_config, family = model.family.text_config(core.config), model.family.model_type
    plan: dict[str, str] = core.tp_plan or {}
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}
    for rule, style in plan.items():
        layer, _, name = rule.rpartition(".")
        if style != "colwise" or name not in heads:
            continue
        number = getattr(text_config, heads[name], None)
        if number is not None and number % size:
            fitting = [n for n in range(2, number + 1) if number % n == text_config.num_attention_heads % n == 0]
            yield (
                f"tp_size={size} does not divide the {number} {heads[name]} of this {family}, so that a head would be "
                f"cut in two; sizes that fit: {', '.join(map(str, fitting)) or 'none, leave it out'}"
            )
        norm = f"{layer}.{name[0]}_norm"
        if norm not in plan and any(_matches(norm, name) for name, _ in core.named_parameters()):
            yield (
                f"the tp_plan of this {family} divides {rule} over {size} ranks and has no rule for {norm}, so each "
                "rank would have the norm's gradient from its own heads alone: add "
                f'{{"{norm}": "replicated_with_grad_allreduce"}} to tp_plan'
            )


def _matches(pattern: str, parameter: str) -> bool:
    parts, names = pattern.split("."), parameter.split(".")[:-1]
    return len(parts) == len(names) and all(part in ("*", name) for part, name in zip(parts, names, strict=True))
