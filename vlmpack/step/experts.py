"""Padding is kept out of a model's experts: their block is given the real tokens of a row, and nothing else.

    row       a a a .  b b . .          what the layer has
    block     a a a b b                 what the router sees and the experts compute
    row       A A A 0  B B 0 0          what goes back to the layer

So pads cost nothing, have no router statistics and no gradient, whatever computes the experts: a list of tokens is all
that it sees. A row without gaps is handed over as it is.

The block is called with hidden states alone. The layer's mixer (attention, or a gated delta layer) runs before it, is
given the row with its keywords, and hands its real tokens on to the block. Both happen in one call of the layer's
`forward`, so when gradient checkpointing computes the layer again, they happen again. (Hooks on the layer itself would
not: transformers 5.23 leaves them out of that.) One call of a layer is computed by one thread, so what is handed on
belongs to the thread: calls in other threads, and backward passes that compute layers again, have their own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Set
from types import MethodType
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from vlmpack.errors import ConfigError
from vlmpack.families import ExpertLayer, Family
from vlmpack.step.context import CONTEXT, RowContext

_NUMBER = RemovableHandle(OrderedDict()).id
"""What PyTorch looks our hooks up by, on every module. Every hook gets a number of its own, and compilers guard on it:
each layer would be compiled for itself, until the limit of eight, and again whenever packing is enabled. This number
was drawn from PyTorch as any hook's is, which gives each number once in a process: no other hook has it."""


def install(family: Family, core: nn.Module) -> None:
    """Hook every layer that has experts, but not again where another enabled model shares it. Hooks are copied and
    pickled with the model."""
    for layer in _layers(family, core):
        if not _is_hooked(layer):
            _unhook(layer)
            _hook(layer)


def uninstall(family: Family, core: nn.Module, *, kept: Set[int]) -> None:
    """Remove the hooks of every layer, unless its block is among `kept`, ids of what other enabled models have too."""
    for layer in _layers(family, core):
        if id(layer.block) not in kept:
            _unhook(layer)


def is_installed(family: Family, core: nn.Module) -> bool:
    """Whether every block of experts is still told which tokens are real: one in another's place is not."""
    return all(map(_is_hooked, _layers(family, core)))


def changed(family: Family, core: nn.Module) -> list[nn.Module]:
    """The modules whose hooks this one here owns."""
    return [layer.block for layer in _layers(family, core)]


def _layers(family: Family, core: nn.Module) -> list[ExpertLayer]:
    return [] if family.experts is None else family.experts.layers(family.language_model(core))


def check_has_routers(family: Family, z_loss_coef: float) -> None:
    """A loss of routers needs routers.

    Raises:
        ConfigError: there are none.
    """
    if z_loss_coef and family.experts is None:
        raise ConfigError(f"z_loss_coef is {z_loss_coef}, but {family.model_type} has no experts; leave it out")


def _hook(layer: ExpertLayer) -> None:
    gate = _Gate()
    handles = (
        layer.mixer.register_forward_pre_hook(gate.tell, with_kwargs=True),
        layer.block.register_forward_pre_hook(gate.take),
        # also when checkpointing has seen enough and leaves the block half-way by an exception
        layer.block.register_forward_hook(gate.put_back, always_call=True),
    )
    for handle in handles:
        _number(handle)


def _unhook(layer: ExpertLayer) -> None:
    for module in (layer.mixer, layer.block):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number in [number for number, hook in hooks.items() if _gate_of(hook) is not None]:
                del hooks[number]
                for told_apart in (module._forward_pre_hooks_with_kwargs, module._forward_hooks_always_called):
                    told_apart.pop(number, None)


def _number(handle: RemovableHandle) -> None:
    """Let a hook go by our number, unless one that came from another process (in a pickled model) has it."""
    hooks, *told_apart = (ref() for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref))
    assert hooks is not None
    if _NUMBER in hooks:
        return
    for numbers in (hooks, *told_apart):
        if numbers is not None and handle.id in numbers:
            numbers[_NUMBER] = numbers.pop(handle.id)
    handle.id = _NUMBER


def _is_hooked(layer: ExpertLayer) -> bool:
    """Whether one gate leads from the mixer to the block; a copy of a block has a copy of the gate."""
    return bool(_gates(layer.mixer) & _gates(layer.block))


def _gates(module: nn.Module) -> set[int]:
    """The gates that a module tells, or that stand before it."""
    gates = map(_gate_of, module._forward_pre_hooks.values())
    return {id(gate) for gate in gates if gate is not None}


def _gate_of(hook: Any) -> _Gate | None:
    own = hook.__self__ if isinstance(hook, MethodType) else None
    return own if isinstance(own, _Gate) else None


@final
class _Gate:
    """One layer's way from its mixer to its experts."""

    def __init__(self) -> None:
        self._calls = _Calls()

    def tell(self, mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        row: RowContext | None = kwargs.get(CONTEXT)
        self._calls.mine.real = None if row is None else row.experts

    def take(self, block: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        """[1, T, D] to [1, R, D]."""
        call = self._calls.mine
        if call.real is None:
            return None
        (hidden,) = args
        call.width = hidden.shape[1]  # not the row's: a number that is known beforehand would be compiled in
        return (hidden.index_select(1, call.real),)

    def put_back(self, block: nn.Module, args: Any, output: torch.Tensor | None) -> torch.Tensor | None:
        """[1, R, D] to [1, T, D], zeros on padding."""
        call = self._calls.mine
        real, call.real = call.real, None
        if real is None or output is None:
            return None
        return output.new_zeros(1, call.width, output.shape[-1]).index_copy_(1, real, output)


@final
class _Call:
    """What a layer keeps from its mixer to its experts."""

    def __init__(self) -> None:
        self.real: torch.Tensor | None = None
        """int64 [R]: places of the real tokens; None: every token goes to the experts."""
        self.width = 0
        """T."""


@final
class _Calls(threading.local):
    """One call for each thread. (Compilers read no context variables, and lose what is stored in a `local` itself.)"""

    def __init__(self) -> None:
        self.mine = _Call()

    def __reduce__(self) -> tuple[type[_Calls], tuple[()]]:
        """A copy begins with nothing."""
        return _Calls, ()
