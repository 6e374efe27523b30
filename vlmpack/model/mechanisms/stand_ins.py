"""Stand-ins for configurations: the attention modules of one model get another attention name, and nothing else does.

An attention layer looks the function that it calls up by the name in its configuration, which other modules, other
models and saved files share. So each attention module gets a stand-in: the same attributes under another name.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from vlmpack.errors import ConfigError


class StandIn:
    """A configuration under another attention name. It shares the attributes of the plain one, in both directions."""

    __slots__ = ()
    _vlmpack_name: ClassVar[str]
    _vlmpack_plain: PreTrainedConfig

    @property
    def _attn_implementation(self) -> str:
        return self._vlmpack_name

    @_attn_implementation.setter
    def _attn_implementation(self, value: str) -> None:
        self._vlmpack_plain._attn_implementation = value

    @property
    def _attn_implementation_internal(self) -> str | None:
        return self._vlmpack_plain._attn_implementation_internal

    @_attn_implementation_internal.setter
    def _attn_implementation_internal(self, value: str | None) -> None:
        """Store the name of an implementation.

        Raises:
            ConfigError: it is the stand-in's name, which a new model stores that is made of it.
        """
        if value == self._vlmpack_name:
            raise ConfigError(
                f"this {type(self).__name__} is that of a layer with packing enabled; make the new model of "
                "model.config, or of copy.copy(layer.config)"
            )
        self._vlmpack_plain._attn_implementation_internal = value

    def __eq__(self, other: object) -> bool:
        return self._vlmpack_plain == (other._vlmpack_plain if isinstance(other, StandIn) else other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # as that of every configuration

    def __copy__(self) -> PreTrainedConfig:
        return copy.copy(self._vlmpack_plain)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreTrainedConfig:
        """A stand-in for a copied module; the plain configuration where only that is copied."""
        alone = not memo
        plain = copy.deepcopy(self._vlmpack_plain, memo)
        return plain if alone else stand_in(plain, self._vlmpack_name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return stand_in, (self._vlmpack_plain, self._vlmpack_name)


def stand_in(plain: PreTrainedConfig, name: str) -> PreTrainedConfig:
    """Make a stand-in of `plain` that names the attention `name`."""
    config = object.__new__(_stand_in_class(type(plain), name))
    object.__setattr__(config, "_vlmpack_plain", plain)
    object.__setattr__(config, "__dict__", vars(plain))
    return config


@functools.cache
def _stand_in_class(base: type[PreTrainedConfig], name: str) -> Any:
    def new(cls: type[PreTrainedConfig], *args: Any, **kwargs: Any) -> PreTrainedConfig:
        return base(*args, **kwargs)  # `type(config)(...)` makes a configuration of a model without packing

    shown = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    body = {"__new__": new, "__eq__": StandIn.__eq__, "__slots__": ("_vlmpack_plain",), "_vlmpack_name": name}
    return type(base.__name__, (StandIn, base), {**shown, **body})


def plain_config(module: Any) -> PreTrainedConfig:
    """The configuration of a module, without our name."""
    config = module.config
    return config._vlmpack_plain if isinstance(config, StandIn) else config
