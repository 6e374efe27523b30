"""Layers that are given a row in parts: their classes become subclasses that cut it, and go back."""

from __future__ import annotations

from collections.abc import Set

from torch import nn

from vlmpack.errors import ConfigError
from vlmpack.families import Family
from vlmpack.step import by_sample, delta, given
from vlmpack.step.subclass import Maker, base_of, is_subclassed


def install(family: Family, core: nn.Module, *, shared: bool) -> None:
    """Let every layer that would run on from one sample into the next ask for the boundaries of a row.

    `shared`: ranks share rows, so the model without its head is also given features that others computed.

    Raises:
        ConfigError: the forward of such a layer was replaced on the object, so that ours would never be called.
    """
    found = _layers(family, core, shared=shared)
    for layer, _ in found:
        _check_own_forward(layer)
    for layer, maker in found:
        if not is_subclassed(layer):
            layer.__class__ = maker(type(layer))


def uninstall(family: Family, core: nn.Module, *, shared: bool, kept: Set[int]) -> None:
    """Restore the class of every such layer, or of none if one of them has another class by now. Those among `kept`,
    ids of what other enabled models have too, stay.

    Raises:
        ConfigError: one has.
    """
    layers = [layer for layer in changed(family, core, shared=shared) if id(layer) not in kept]
    for layer, base in [(layer, base_of(layer)) for layer in layers]:
        layer.__class__ = base


def changed(family: Family, core: nn.Module, *, shared: bool) -> list[nn.Module]:
    """The layers that have another class."""
    return [layer for layer, _ in _layers(family, core, shared=shared)]


def changed_since(family: Family, core: nn.Module, *, shared: bool) -> nn.Module | None:
    """A layer that no longer asks, if there is one."""
    layers = (layer for layer, _ in _layers(family, core, shared=shared))
    return next((layer for layer in layers if not is_subclassed(layer) or "forward" in vars(layer)), None)


def _layers(family: Family, core: nn.Module, *, shared: bool) -> list[tuple[nn.Module, Maker]]:
    """Every such layer and what makes its new class."""
    text = family.language_model(core)
    found: list[tuple[nn.Module, Maker]] = []
    if family.delta is not None:
        found += [(layer, delta.cut_class) for layer in family.delta.layers(text)]
    if family.by_sample is not None:
        found += [(layer, by_sample.attention_class) for layer in family.by_sample.attention_layers(text)]
        found += [(layer, by_sample.ngram_class) for layer in family.by_sample.ngram_layers(text)]
    if shared and family.has_vision:
        found.append((family.backbone(core), given.given_class))
    return found


def _check_own_forward(layer: nn.Module) -> None:
    if "forward" in vars(layer):
        raise ConfigError(
            f"the forward of a {type(layer).__name__} was replaced on the object itself, so samples would leak through "
            "it: load the model without use_kernels, and without a device_map or hooks that spread or offload it"
        )
