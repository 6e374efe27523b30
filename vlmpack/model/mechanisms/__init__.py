"""The protocol of mechanisms: computations along a row that must be kept apart by sample.

Each mechanism is one file. It finds its layers in a model, attaches to and detaches from them, reports problems, and
prepares the data that its layers need for a row. The attached code then runs the layers on a whole row, or on part of
it.

    attention     our own attention functions                       every family
    vision        boundaries of the tower, features of ranks        families with vision
    audio         groups of audios that do not affect each other    families with audio
    gated_delta   convolution and recurrence restart                where a family's descriptor names it
    short_conv    the convolution stops at a sample's start         "
    per_sample    sparse attention, n-gram layers                   "

An object gets another `forward` by changing its class to a subclass with the same name. It stays the same object with
the same parameters, hooks and place in the model, nothing global changes, and the class can be restored completely.
Copying and pickling work: pickle cannot find a class made at run time by its name, so it stores how to make the class.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import nn

from vlmpack.context_parallel.vision import VisionRanks
from vlmpack.errors import ConfigError
from vlmpack.families.family import Family
from vlmpack.layout.device import around_graph
from vlmpack.layout.media import MediaTable
from vlmpack.layout.row import PackedRow
from vlmpack.model.row import CONTEXT, RowContext, RowPart


@final
class Memo(dict[str, Any]):
    """What mechanisms remember of a model from step to step. A copy of the model begins without it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Memo, ()


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ModelParts:
    """A model and its parts."""

    family: Family
    """The model's family."""
    core: Any
    """The model with its head, inside wrappers."""
    vision: VisionRanks | None = None
    """The ranks that compute images together; None: each rank computes those of its row."""
    memo: Memo = field(default_factory=Memo)
    """What mechanisms remember of the model, by their names."""

    @property
    def text(self) -> Any:
        """The language model."""
        return self.family.language_model(self.core)

    def layer_parts(self, mechanism: str, part: str = "layer") -> list[Any]:
        """Return this part of every decoder layer that has one; an empty list if the family lacks the mechanism."""
        if not self.family.has(mechanism):
            return []
        name = self.family.mechanisms[mechanism][part]
        parts = [getattr(layer, name, None) for layer in self.text.layers.children()]  # wrapped layers included
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
    """The media of the row's samples."""
    part: RowPart
    """The part of the row on this rank."""
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
        """The language model's configuration."""
        return self.model.family.text_config(self.config)


class Mechanism(ABC):
    """One kind of computation along a row. It is stateless: one object serves all models.

    The code that `attach` installs reads the row from the keyword `CONTEXT`, and its own entry from
    `RowContext.entries`.
    """

    name: ClassVar[str]
    """The mechanism's name in `Family.mechanisms` and in `RowContext.entries`."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def is_in(self, family: Family) -> bool:
        """Return whether models of this family have the mechanism."""
        return family.has(self.name)

    @abstractmethod
    def find(self, model: ModelParts) -> list[nn.Module]:
        """Return every module of a model that `attach` changes."""

    @abstractmethod
    def attach(self, model: ModelParts) -> None:
        """Change the modules of a model. Modules that are already changed stay as they are."""

    @abstractmethod
    def detach(self, model: ModelParts, *, kept: Set[int] = frozenset()) -> None:
        """Restore the modules of a model, except those in `kept`: ids of modules that other enabled models share."""

    @abstractmethod
    def problem(self, model: ModelParts, *, attached: bool) -> str | None:
        """Return why packed rows would be wrong, and the remedy; None: there is no problem.

        Args:
            model: the model. Each step checks it again, because its modules may have been replaced.
            attached: whether the modules should have been changed already.
        """

    def prepare(self, setup: RowSetup) -> Any:
        """Derive the data that the layers need from a row, once per row: its entry in `RowContext.entries`."""
        return None

    def inputs(self, entry: Any) -> Mapping[str, Any]:
        """Return further keyword arguments of the backbone (the model without its head)."""
        return {}

    def work(self, setup: RowSetup, entry: Any) -> Mapping[str, int]:
        """Return the fields of `Work` that this mechanism counts."""
        return {}

    def check_ran(self, model: ModelParts, entry: Any) -> None:
        """Check, after the model has run, that all layers were reached.

        Raises:
            ConfigError: a layer was not reached.
        """
        return


# ---------------------------------------------------------------------- another class for an object

_BASE = "_vlmpack_base"

Maker = Callable[[type[nn.Module]], type[nn.Module]]


class ClassMechanism(Mechanism):
    """A mechanism that changes the classes of its layers to subclasses."""

    @abstractmethod
    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """Return every layer with the function that makes its new class."""

    def find(self, model: ModelParts) -> list[nn.Module]:
        """Return every layer."""
        return [layer for layer, _ in self.makers(model)]

    def attach(self, model: ModelParts) -> None:
        """Change the classes."""
        for layer, maker in self.makers(model):
            if not is_subclassed(layer):
                layer.__class__ = maker(type(layer))

    def detach(self, model: ModelParts, *, kept: Set[int] = frozenset()) -> None:
        """Restore the classes."""
        for layer in self.find(model):
            if id(layer) not in kept and is_subclassed(layer):
                layer.__class__ = base_of(layer)

    def problem(self, model: ModelParts, *, attached: bool) -> str | None:
        """Report a forward that was replaced on the object, or a class that was changed."""
        for layer in self.find(model):
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
    """Make a subclass of `base` with the same name and the attributes of `body`.

    Args:
        base: the class.
        body: methods and attributes that override those of `base`.
        maker: a function that other processes can import, and that makes this class from `base`.
    """

    def reduce(self: nn.Module, protocol: Any) -> tuple:
        _, _, *state = base.__reduce_ex__(self, protocol)
        return (_new, (maker, base), *state)

    def new(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        # `type(model)(config)` on an enabled model makes a plain model, without packing.
        return base(*args, **kwargs) if cls is derived else object.__new__(cls)

    shown = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    derived = type(base.__name__, (base,), {**shown, "__reduce_ex__": reduce, "__new__": new, _BASE: base, **body})
    return derived


def replaces(method: str = "forward", *, in_graph: bool = False) -> Callable[[Callable[..., Any]], Maker]:
    """Make a function the maker of subclasses, one per base class, in which it takes the place of a method.

    The function gets the method of the base class, then the module, then the arguments of the call.

    Args:
        method: name of the method.
        in_graph: whether compiled graphs may contain the function itself; otherwise, only what it calls.
    """

    def maker_of(function: Callable[..., Any]) -> Maker:
        runs = function if in_graph else around_graph(function)

        @functools.cache
        def maker(base: type[nn.Module]) -> type[nn.Module]:
            plain = getattr(base, method)

            @functools.wraps(plain)
            def replaced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return runs(plain, self, *args, **kwargs)

            return subclass(base, {method: replaced if in_graph else around_graph(replaced)}, maker)

        return functools.update_wrapper(maker, function)  # pickle finds it under the function's name

    return maker_of


def is_subclassed(module: nn.Module) -> bool:
    """Return whether the module's class or one of its bases is ours (FSDP2 makes subclasses of classes)."""
    return any(_BASE in vars(klass) for klass in type(module).__mro__)


def base_of(module: nn.Module) -> Any:
    """Return the class that the module had before ours.

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
    """Make the empty object that pickle and copy fill."""
    return object.__new__(maker(base))


# ---------------------------------------------------------------------- handed row
#
# Pass a row to modules whose model does not pass keywords on to them.
#
#     model ── row ──▶ tower ──────────▶ blocks        the tower's own code passes no keywords on
#                        └─── row ───────▶             `handing_class` of the tower, `taking_class` of each block
#
# While the module that has the row runs, a context variable holds the row. Gradient checkpointing recomputes a block in
# the backward pass, when the tower is not running, and on a GPU in another thread. So a block reads the variable when
# it is called, before checkpointing starts, and has the row as a keyword from then on.


_ROW: ContextVar[RowContext | None] = ContextVar("vlmpack_handed_row", default=None)


def handed_row() -> RowContext | None:
    """Return the row in the context variable; None: there is none."""
    return _ROW.get()


@contextmanager
def handed_on(row: RowContext | None) -> Iterator[None]:
    """Set the context variable to this row inside a `with` block; None: no row."""
    token = _ROW.set(row)
    try:
        yield
    finally:
        _ROW.reset(token)


@replaces()
def handing_class(plain: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Make a subclass of a module's class that hands its row to the modules inside."""
    with handed_on(kwargs.get(CONTEXT)):
        return plain(module, *args, **kwargs)


@replaces("__call__")
def taking_class(plain: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Make a subclass of a module's class that takes the row handed to it."""
    if (row := handed_row()) is not None:
        kwargs[CONTEXT] = row
    return plain(module, *args, **kwargs)
