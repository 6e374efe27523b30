"""What the pieces of a group keep for the pieces behind them (`PackedStep.group`), and the gradients that come back.

    forward     piece 0: P ──▶ keys, values, states of P ── detached ──▶ piece 1: A B, piece 2: C
    backward    piece 1, piece 2: gradients of P's keys, values, states, each added up in float32
                piece 0: the sums join its own gradients, where the tensors were made

`KeptTensors.keep` ties the tensors to an output of their layer, so that the backward pass of the output takes up their
gradients: also where gradient checkpointing computes the layer again, with either of its kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, final

import torch

from vlmpack.layout.pieces import CutGroup, GroupPiece
from vlmpack.layout.row import IGNORE, PackedRow


@final
class KeptTensors:
    """Tensors of one layer that later pieces read."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], *, is_training: bool) -> None:
        # Reentrant checkpointing runs the layer without gradients first.
        is_again = is_training and not torch.is_grad_enabled()
        learns = [x.is_floating_point() and (x.requires_grad or is_again) for x in tensors]
        self.tensors = tuple(x.detach().requires_grad_(y) for x, y in zip(tensors, learns, strict=True))
        """The tensors, detached."""
        self.gradients: list[torch.Tensor | None] = [None] * len(tensors)
        """The sum of their gradients, in at least float32; None: none arrived."""

    def read(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors for a later piece, whose backward pass adds to `gradients`."""
        return _Read.apply(self, *self.tensors)

    def keep(self, out: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Return `out`, whose backward pass also passes `gradients` to `tensors`, of which these are copies."""
        return _Keep.apply(self, out, *tensors)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: KeptTensors, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        sums = ctx.kept.gradients
        for at, grad in enumerate(grads):
            if grad is not None:
                grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
                sums[at] = grad if sums[at] is None else sums[at] + grad
        return None, *(None for _ in grads)


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: KeptTensors, out: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.kept, ctx.dtypes = kept, [x.dtype for x in tensors]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        sums = zip(ctx.kept.gradients, ctx.dtypes, strict=True)
        return None, grads[0], *(None if grad is None else grad.to(dtype) for grad, dtype in sums)


@final
class KeptPrefix:
    """What one piece of a group keeps, and behind which pieces it comes."""

    def __init__(self, before: KeptPrefix | None, *, is_training: bool) -> None:
        self.before = before
        """The kept piece that ends where this one begins; None: this one begins its samples."""
        self.is_training = is_training
        """Whether gradients are computed."""
        self.of_layers: dict[Hashable, KeptTensors] = {}
        """The kept tensors by layer, or by another name."""
        self.root: torch.Tensor | None = None
        """[1, t, D]: the final hidden states, from which the piece's backward pass starts."""

    def forget_gradients(self) -> None:
        """Begin the sums anew, for another backward pass."""
        for kept in self.of_layers.values():
            kept.gradients = [None] * len(kept.tensors)

    @property
    def path(self) -> list[KeptPrefix]:
        """The kept pieces from the first token of the samples to the end of this one."""
        return [*([] if self.before is None else self.before.path), self]

    @property
    def learned(self) -> list[torch.Tensor]:
        """All kept tensors on the path that get gradients."""
        every = [x for kept in self.path for layer in kept.of_layers.values() for x in layer.tensors]
        return [x for x in every if x.requires_grad]

    def keep(self, name: Hashable, out: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Keep tensors under a name; return `out`, see `KeptTensors.keep`. Gradient checkpointing calls this twice."""
        if name not in self.of_layers:
            self.of_layers[name] = KeptTensors(tensors, is_training=self.is_training)
        return self.of_layers[name].keep(out, *tensors)


@final
class OpenPieces:
    """The kept pieces on the path to the next piece. Each is closed behind the last piece that starts from it."""

    def __init__(self) -> None:
        self._open: list[tuple[int, KeptPrefix, Callable[[], Any]]] = []

    def up_to(self, number: int | None) -> KeptPrefix | None:
        """Close the pieces behind the one of this number, and return what it keeps; None: close all."""
        while self._open and self._open[-1][0] != number:
            self._open.pop()[2]()
        return self._open[-1][1] if self._open else None

    def add(self, number: int, kept: KeptPrefix, close: Callable[[], Any]) -> None:
        """Open a kept piece."""
        self._open.append((number, kept, close))


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PieceOfGroup:
    """The place of a row among the pieces of a group."""

    before: KeptPrefix | None
    """What the pieces before it kept; None: it begins its samples."""
    own: KeptPrefix | None
    """What it keeps; None: no piece starts from its end."""
    kept_tokens: int
    """P: number of tokens before it, the first node of the row's tree."""
    ends: tuple[bool, ...]
    """For each sample of the row, whether it ends in this piece."""
    group_samples: int
    """Number of samples of the group."""
    group_tokens: int
    """Number of tokens of these samples, each in full."""
    has_targets: bool
    """Whether the group has targets."""

    @classmethod
    def of(
        cls, cut: CutGroup, piece: GroupPiece, row: PackedRow, *, before: KeptPrefix | None, own: KeptPrefix | None
    ) -> PieceOfGroup:
        """Return the place of a piece with this row."""
        segments, labels = cut.tree.segments, cut.group.shift_labels
        whole = (segments.lengths[sample] for sample in piece.samples)
        return cls(
            before=before,
            own=own,
            kept_tokens=piece.kept,
            ends=tuple(n == of_group for n, of_group in zip(row.segments.lengths, whole, strict=True)),
            group_samples=segments.num_samples,
            group_tokens=segments.num_tokens,
            has_targets=labels is not None and bool((labels != IGNORE).any()),
        )

    def read(self, name: Hashable) -> list[tuple[torch.Tensor, ...]]:
        """Return what each kept piece before this one, in order, has under a name."""
        path = [] if self.before is None else self.before.path
        return [kept.of_layers[name].read() for kept in path]

    def read_last(self, name: Hashable) -> tuple[torch.Tensor, ...] | None:
        """Return what the last kept piece has under a name; None: the piece begins its samples."""
        return None if self.before is None else self.before.of_layers[name].read()

    def keep(self, name: Hashable, out: torch.Tensor, *tensors: Any) -> torch.Tensor:
        """Keep tensors if later pieces start here; return `out`."""
        return out if self.own is None else self.own.keep(name, out, *tensors)
