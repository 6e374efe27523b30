"""The protocol of mechanisms: what the layers of a model compute along a row, and how their samples stay apart.

A mechanism is one file. It finds its layers in a model, attaches to them and detaches from them, reports what may be
wrong, and prepares what it needs of a row; what it attached then runs its layers on a whole row, or on a part of it.

    attention     attention functions under names of ours           every family
    vision        boundaries of the tower, features of ranks        families with vision
    audio         groups of audios that do not change each other    families with audio
    gated_delta   convolution and recurrence restart                where a family's descriptor names it
    short_conv    taps end where a sample begins                    "
    per_sample    sparse attention, n-gram layers                   "

One object gets another `forward` by a subclass of its class, of the same name. So it stays the same object with the
same parameters, hooks and place in the model, nothing global changes, and the class is restored without a trace.
Copying and pickling work: a class made at run time has no name to look up, so the pickle holds how to make it again.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import nn

from vlmpack.errors import ConfigError
from vlmpack.families.family import Family
from vlmpack.layout.device import around_graph
from vlmpack.layout.media import MediaTable
from vlmpack.layout.row import PackedRow
from vlmpack.model.row import CONTEXT, RowContext, RowPart


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ModelParts:
    """A model, and where its parts are."""

    family: Family
    """The model's family."""
    core: Any
    """The model with its head, inside wrappers."""
    shares_rows: bool = False
    """True if ranks compute rows together (`Parallel`)."""

    @property
    def text(self) -> Any:
        """The text part."""
        return self.family.language_model(self.core)

    def layer_parts(self, mechanism: str, part: str = "layer") -> list[nn.Module]:
        """The part of that name of every decoder layer that has one; none where the family has no such mechanism."""
        if not self.family.has(mechanism):
            return []
        name = self.family.mechanisms[mechanism][part]
        parts = [getattr(layer, name, None) for layer in self.text.layers.children()]  # in wrappers too
        return [part for part in parts if part is not None]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class RowSetup:
    """A row before it goes through a model."""

    model: ModelParts
    """The model."""
    row: PackedRow
    """The whole row, on the model's device."""
    media: MediaTable
    """The media of its samples."""
    part: RowPart
    """The part of it on this rank."""
    types: torch.Tensor
    """[1, T]: 0 text, 1 image, 2 video, 3 audio."""
    backend: str
    """Name of the attention back-end, or "auto"."""

    @property
    def config(self) -> Any:
        """The whole model's configuration."""
        return self.model.core.config

    @property
    def text_config(self) -> Any:
        """The text part's configuration."""
        return self.model.family.text_config(self.config)


class Mechanism(ABC):
    """One kind of computation along a row. It has no state of its own: one object serves all models.

    What `attach` installs reads the row from the keyword `CONTEXT`, and its own entry from `RowContext.entries`.
    """

    name: ClassVar[str]
    """Its name in `Family.mechanisms` and in `RowContext.entries`."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def is_in(self, family: Family) -> bool:
        """Return whether models of this family have it."""
        return family.has(self.name)

    @abstractmethod
    def find(self, model: ModelParts) -> list[nn.Module]:
        """Every module of a model that `attach` changes."""

    @abstractmethod
    def attach(self, model: ModelParts) -> None:
        """Change the modules of a model; those that are changed already stay so."""

    @abstractmethod
    def detach(self, model: ModelParts, *, kept: Set[int] = frozenset()) -> None:
        """Restore the modules of a model, but not those among `kept`, ids of what other enabled models have too."""

    @abstractmethod
    def problem(self, model: ModelParts, *, attached: bool) -> str | None:
        """Why packed rows would be wrong, with the remedy; None: nothing is.

        Args:
            model: the model. Each step looks at it again: its modules may have been exchanged.
            attached: whether its modules are to be changed already.
        """

    @abstractmethod
    def prepare(self, setup: RowSetup) -> Any:
        """Derive from a row what its layers need, once a row: its entry in `RowContext.entries`."""

    def inputs(self, entry: Any) -> Mapping[str, Any]:
        """Keyword arguments of the model without its head."""
        return {}

    def work(self, setup: RowSetup, entry: Any) -> Mapping[str, int]:
        """Fields of `Work` that this mechanism counts."""
        return {}

    def check_ran(self, model: ModelParts, entry: Any) -> None:
        """Look, after the model's layers ran, whether all of them were reached.

        Raises:
            ConfigError: one was not.
        """
        return


# ---------------------------------------------------------------------- another class for an object

_BASE = "_vlmpack_base"

Maker = Callable[[type[nn.Module]], type[nn.Module]]


class ClassMechanism(Mechanism):
    """A mechanism that exchanges the classes of its layers for subclasses of them."""

    @abstractmethod
    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """Every layer, and the function that makes its new class."""

    def find(self, model: ModelParts) -> list[nn.Module]:
        """Every layer."""
        return [layer for layer, _ in self.makers(model)]

    def attach(self, model: ModelParts) -> None:
        """Exchange the classes."""
        for layer, maker in self.makers(model):
            if not is_subclassed(layer):
                layer.__class__ = maker(type(layer))

    def detach(self, model: ModelParts, *, kept: Set[int] = frozenset()) -> None:
        """Restore the classes."""
        for layer, _ in self.makers(model):
            if id(layer) not in kept:
                layer.__class__ = base_of(layer)

    def problem(self, model: ModelParts, *, attached: bool) -> str | None:
        """A forward that was replaced on the object, or a class that was changed."""
        for layer, _ in self.makers(model):
            replaced = "forward" in vars(layer)
            if replaced and not attached:
                return (
                    f"the forward of a {type(layer).__name__} was replaced on the object itself, so samples would leak "
                    "through it: load the model without use_kernels, and without a device_map or hooks that spread or "
                    "offload it"
                )
            if attached and (replaced or not is_subclassed(layer)):
                return (
                    f"a {type(layer).__name__} no longer computes rows by their boundaries: its class or its forward "
                    "was changed after enable_packing (use_kernels, a device_map, an offloading hook); undo that"
                )
        return None


def subclass(base: type[nn.Module], body: dict[str, Any], maker: Maker) -> type[nn.Module]:
    """Make a subclass of `base` of the same name with the attributes of `body`.

    Args:
        base: the class.
        body: methods and attributes that replace those of `base`.
        maker: a function that other processes can import and that makes this class from `base`.
    """

    def reduce(self: nn.Module, protocol: Any) -> tuple:
        _, _, *state = base.__reduce_ex__(self, protocol)
        return (_new, (maker, base), *state)

    def new(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        # `type(model)(config)` of an enabled model makes another one, which is not enabled.
        return base(*args, **kwargs) if cls is derived else object.__new__(cls)

    shown = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    derived = type(base.__name__, (base,), {**shown, "__reduce_ex__": reduce, "__new__": new, _BASE: base, **body})
    return derived


def is_subclassed(module: nn.Module) -> bool:
    """Return whether the module's class, or one that it comes from (FSDP2 makes classes of its own), is one of ours."""
    return any(_BASE in vars(klass) for klass in type(module).__mro__)


def plain_class(module: nn.Module) -> Any:
    """The class that a module had before ours, whatever subclass of it FSDP2 has made since."""
    return next(vars(klass)[_BASE] for klass in type(module).__mro__ if _BASE in vars(klass))


def base_of(module: nn.Module) -> Any:
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
    """The object that pickle and copy start from."""
    return object.__new__(maker(base))


# ---------------------------------------------------------------------- handed row
#
# Hand a row on to modules that their model gives no keyword of it.
#
#     model ── row ──▶ tower ──────────▶ blocks        the tower's own code passes no keywords on
#                        └─── row ───────▶             `handing_class` of the tower, `taking_class` of each block
#
# While the module that has the row runs, the row is in a context variable. Gradient checkpointing computes a block
# again
# in the backward pass, when the tower does not run, and on a GPU in another thread. So a block takes the row when it is
# called, before anything is checkpointed, and has it as a keyword from then on.


_ROW: ContextVar[RowContext | None] = ContextVar("vlmpack_handed_row", default=None)


def handed_row() -> RowContext | None:
    """The row that is handed on; None: there is none."""
    return _ROW.get()


@contextmanager
def handed_on(row: RowContext | None) -> Iterator[None]:
    """Hand a row on while something runs; None: no row, to anything inside."""
    token = _ROW.set(row)
    try:
        yield
    finally:
        _ROW.reset(token)


@functools.cache
def handing_class(base: Any) -> type[nn.Module]:
    """A subclass of a module's class that hands on the row that it is given; one a base class."""

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with handed_on(kwargs.get(CONTEXT)):
            return base.forward(self, *args, **kwargs)

    return subclass(base, {"forward": around_graph(forward)}, handing_class)


@functools.cache
def taking_class(base: Any) -> type[nn.Module]:
    """A subclass of a module's class that takes the row that is handed on; one a base class."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (row := handed_row()) is not None:
            kwargs[CONTEXT] = row
        return base.__call__(self, *args, **kwargs)

    return subclass(base, {"__call__": around_graph(call)}, taking_class)
