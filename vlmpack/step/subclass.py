"""One object learns another `forward`: its class becomes a subclass of its own class, of the same name.

So it stays the same object with the same parameters, hooks and place in the model, nothing global changes, and taking
the class back leaves nothing behind. Copying and pickling work: a class made at run time has no name that they could
look up, so they are told how to make it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from vlmpack.errors import ConfigError

_BASE = "_vlmpack_base"

Maker = Callable[[type[nn.Module]], type[nn.Module]]


def subclass(base: type[nn.Module], body: dict[str, Any], maker: Maker) -> type[nn.Module]:
    """A subclass of `base` of the same name with the attributes of `body`.

    Args:
        base: the class.
        body: methods and attributes that replace those of `base`.
        maker: a function that other processes can import and that makes this class from `base`.
    """

    def reduce(self: nn.Module, protocol: Any) -> tuple:
        _, _, *state = base.__reduce_ex__(self, protocol)
        return (_new, (maker, base), *state)

    def new(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        # Of a model that is there, `type(model)(config)` makes another one, which nobody has enabled.
        return base(*args, **kwargs) if cls is made else object.__new__(cls)

    shown = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    own = {"__reduce_ex__": reduce, "__new__": new, _BASE: base}
    made = type(base.__name__, (base,), {**shown, **own, **body})
    return made


def is_subclassed(module: nn.Module) -> bool:
    """Whether the module's class, or one that it comes from (FSDP2 makes classes of its own), is one of ours."""
    return any(_BASE in vars(klass) for klass in type(module).__mro__)


def base_of(module: nn.Module) -> type[nn.Module]:
    """The class that the module had.

    Raises:
        ConfigError: something else has changed its class since.
    """
    base = vars(type(module)).get(_BASE)
    if base is None:
        raise ConfigError(
            f"the class of a module became {type(module).__name__} after enable_packing (FSDP2's fully_shard does "
            "that); call disable_packing before sharding"
        )
    return base


def _new(maker: Maker, base: type[nn.Module]) -> nn.Module:
    """What pickle and copy start from."""
    return object.__new__(maker(base))
