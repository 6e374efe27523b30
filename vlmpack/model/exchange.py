"""Several backward passes whose gradients ranks exchange once, at the end (`exchanged_once`).

    DDP      the passes run under `no_sync()`
    FSDP2    each rank gathers all parameters first, and keeps them and their gradients whole until the end
    both     then one more pass through the wrapper: a loss of zero, which needs the parameters, and nothing is computed

Nothing is sent between the first gather and the exchange, so each rank may make as many passes as its row needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

_SETTINGS = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "post_forward_mesh_info")
"""FSDP2's attributes for what it does after each pass. Its public setters have no getters, so the values to restore are
read here."""


@contextmanager
def exchanged_once(model: nn.Module, exchange: Callable[[list[nn.Parameter]], torch.Tensor]) -> Iterator[None]:
    """Make the passes inside a `with` block, then exchange gradients. All ranks of FSDP2 must enter it.

    Under the user's own `no_sync()`, or `set_requires_gradient_sync(False)`, nothing is exchanged.

    Args:
        model: the model in its wrappers. If neither DDP nor FSDP2 is among them, nothing happens.
        exchange: returns `zero_loss` of these parameters, as an output of the model in its wrappers.
    """
    learns = torch.is_grad_enabled()
    wrappers = [x for x in model.modules() if isinstance(x, DistributedDataParallel) and x.require_backward_grad_sync]
    sharded = [x for x in model.modules() if isinstance(x, FSDPModule)]
    meshes = dict.fromkeys(x.device_mesh for x in model.parameters() if isinstance(x, DTensor)) if sharded else {}
    with ExitStack() as stack:
        for wrapper in wrappers:
            stack.enter_context(wrapper.no_sync())
        for module in sharded:
            stack.enter_context(_kept_whole(module))
        parameters = [x for x in model.parameters() if x.requires_grad]  # of FSDP2: whole now
        used = set[nn.Parameter]()
        for each in parameters if sharded and learns else ():
            stack.callback(each.register_post_accumulate_grad_hook(used.add).remove)
        try:
            yield
        except BaseException:
            for module in sharded:
                module.reshard()
            raise
    if not learns:
        for module in sharded:
            module.reshard()
    elif sharded:  # what no rank has used gets no gradient; what another rank has used gets zeros
        is_used = [x in used or x.grad is not None for x in parameters]
        anywhere = _on_any_rank(is_used, [*meshes])
        missing = [x for x, here, there in zip(parameters, is_used, anywhere, strict=True) if there and not here]
        exchange(missing).backward()
    elif wrappers:
        finds_unused = all(wrapper.find_unused_parameters for wrapper in wrappers)
        exchange([x for x in parameters if x.grad is not None] if finds_unused else parameters).backward()


@contextmanager
def _kept_whole(module: FSDPModule) -> Iterator[None]:
    """Gather a module's parameters, and neither free them nor exchange gradients until the end of the block."""
    state: Any = module._get_fsdp_state()
    state._lazy_init()  # of the root first, which the first forward would do: it sets what is read here
    groups = getattr(state, "_fsdp_param_groups", None) or [x for x in [state._fsdp_param_group] if x is not None]
    before = [{name: getattr(group, name) for name in _SETTINGS} for group in groups]
    for group in groups:
        vars(group).update(reduce_grads=False, all_reduce_grads=False, reshard_after_backward=False)
        group.post_forward_mesh_info = None
    module.unshard()
    try:
        yield
    finally:
        for group, settings in zip(groups, before, strict=True):
            vars(group).update(settings)


def _on_any_rank(flags: Sequence[bool], meshes: Sequence[DeviceMesh]) -> list[bool]:
    """Return which flags any rank of the meshes has set."""
    for mesh in meshes:
        for group in mesh.get_all_groups():
            counts = torch.tensor(flags, dtype=torch.int32, device=mesh.device_type)
            dist.all_reduce(counts, dist.ReduceOp.MAX, group)
            flags = counts.bool().tolist()
    return [*flags]


def zero_loss(parameters: Sequence[torch.Tensor], device: torch.device | str) -> torch.Tensor:
    """Return a loss of zero whose gradients of these parameters are zeros. It reads none of them."""
    return _Zero.apply(torch.zeros((), device=device, requires_grad=True), *parameters)


class _Zero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, zero: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = parameters
        return zero.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return *grads, *(
            torch.zeros_like(x) if isinstance(x, DTensor) else x.new_zeros(()).expand_as(x) for x in ctx.parameters
        )
