"""Pieces of a group of samples: what they keep for the pieces behind them, and a row that goes through in pieces.

    forward     piece 0: P ──▶ keys, values, states of P ── detached ──▶ piece 1: A B, piece 2: C
    backward    piece 1, piece 2: gradients of P's keys, values, states, each added up in float32
                piece 0: the sums join its own gradients, where the tensors were made

`KeptPrefix.keep` ties the tensors to an output of their layer, so that the backward pass of the output takes up their
gradients: also where gradient checkpointing computes the layer again, with either of its kinds.

`PackedStep.group` runs pieces one by one, each with a loss of its own. `RowInPieces` is a row that is larger than
`StepConfig.capacity`, with any head and loss behind it:

    forward     P            with its graph: the first piece, which the caller runs
                A B, C D     from the keys, values and states of P, without a graph
                E F          with its graph: the last pieces, `StepConfig.kept_pieces` of them
                ──────────▶  hidden states of the whole row, and one loss
    backward    E F          from the gradient of their hidden states
                A B, C D     computed again first
                P            once, with the gradients of all that starts from it

So a prefix goes forward once, and all branches but the last twice, as under gradient checkpointing. `PackedStep.group`
computes nothing twice, but needs a separate loss for each piece.

DDP exchanges a parameter's gradient when it arrives, so it has to arrive once: under DDP, `_Rest` takes the parameters
as inputs, and returns the sum of the gradients from all of its pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import get_device_states, set_device_states

from vlmpack.layout.device import to_device
from vlmpack.layout.pieces import CutGroup
from vlmpack.layout.row import IGNORE, PackedRow
from vlmpack.layout.segments import ranges

# ---------------------------------------------------------------------- what pieces keep


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
        """Return the tensors to a later piece, see `_Read`."""
        return _Read.apply(self, *self.tensors)


class _Read(torch.autograd.Function):
    """Returns kept tensors to a later piece, whose backward pass adds to their gradients."""

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
    """Returns an output, whose backward pass also passes the gradients of kept tensors to their originals."""

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

    def __init__(self, number: int, before: KeptPrefix | None, *, is_training: bool) -> None:
        self.number = number
        """The piece's number."""
        self.before = before
        """The kept piece that ends where this one begins; None: this one begins its samples."""
        self.is_training = is_training
        """Whether gradients are computed."""
        self.of_layers: dict[Hashable, KeptTensors] = {}
        """The kept tensors by layer, or by another name."""
        self.root: torch.Tensor | None = None
        """[1, t, D]: the final hidden states, from which the piece's backward pass starts."""
        self.close: Callable[[], Any] | None = None
        """Called behind the last piece that starts from this one."""

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
        """Keep tensors under a name; return `out`, see `_Keep`. Gradient checkpointing calls this twice."""
        if name not in self.of_layers:
            self.of_layers[name] = KeptTensors(tensors, is_training=self.is_training)
        return _Keep.apply(self.of_layers[name], out, *tensors)


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

    def read(self, name: Hashable) -> list[tuple[torch.Tensor, ...]]:
        """Return what each kept piece before this one, in order, has under a name."""
        return [] if self.before is None else [kept.of_layers[name].read() for kept in self.before.path]

    def read_last(self, name: Hashable) -> tuple[torch.Tensor, ...] | None:
        """Return what the last kept piece has under a name; None: the piece begins its samples."""
        return None if self.before is None else self.before.of_layers[name].read()

    def keep(self, name: Hashable, out: torch.Tensor, *tensors: Any) -> torch.Tensor:
        """Keep tensors if later pieces start here; return `out`."""
        return out if self.own is None else self.own.keep(name, out, *tensors)


def walk(
    cut: CutGroup, numbers: Iterable[int], *, last: KeptPrefix | None = None
) -> Iterator[tuple[int, PackedRow, PieceOfGroup]]:
    """Yield the number, the row and the place of these pieces. Kept ones are closed behind all that start from them.

    `last`: what the piece before the first one keeps.
    """
    is_training, segments, labels = torch.is_grad_enabled(), cut.tree.segments, cut.group.shift_labels
    has_targets = labels is not None and bool((labels != IGNORE).any())
    for number in numbers:
        piece = cut.pieces[number]
        last, row = _closed(last, piece.parent), cut.row(piece)
        own = KeptPrefix(number, last, is_training=is_training) if piece.is_kept else None
        whole = (segments.lengths[sample] for sample in piece.samples)
        place = PieceOfGroup(
            before=last,
            own=own,
            kept_tokens=piece.kept,
            ends=tuple(n == of_group for n, of_group in zip(row.segments.lengths, whole, strict=True)),
            group_samples=segments.num_samples,
            group_tokens=segments.num_tokens,
            has_targets=has_targets,
        )
        yield number, row, place
        last = last if own is None else own
    _closed(last, None)


def _closed(last: KeptPrefix | None, number: int | None) -> KeptPrefix | None:
    """Close the kept pieces behind the one of this number, and return that one; None: close all."""
    while last is not None and last.number != number:
        if last.close is not None:
            last.close()
        last = last.before
    return last


# ---------------------------------------------------------------------- a row in pieces


Outputs = tuple[torch.Tensor, ...]
"""What the backbone returns of a row: hidden states [1, t, D], then router logits [t, E] of each layer."""

RunPiece = Callable[[PackedRow, PieceOfGroup], Outputs]
"""Runs the row of a piece, which is on the model's device, through the backbone."""

UsePiece = Callable[[int, Outputs, KeptPrefix | None], Any]
"""Called with a piece's number, its outputs, and what the pieces before it kept."""


@final
class RowInPieces:
    """A row's pieces. The caller runs the first one, and hands its outputs to `rest`."""

    def __init__(
        self,
        cut: CutGroup,
        run: RunPiece,
        *,
        learning: Sequence[torch.Tensor],
        kept_pieces: int,
        device: torch.device,
    ) -> None:
        """`learning`: the parameters that get gradients."""
        self.cut, self._run, self._learns, self._device = cut, run, bool(learning), device
        is_ddp = DistributedDataParallel._get_active_ddp_module() is not None
        self.parameters = learning if is_ddp else ()
        """These get one summed gradient from all pieces but the first; (): each piece adds its own."""
        count, parents = len(cut.pieces), [piece.parent for piece in cut.pieces]
        of_last = (n for n in range(max(count - kept_pieces, 1), count) if not {*parents[n:]} & {*range(1, n)})
        self._last = next(of_last, count) if learning else count  # from here on, pieces keep their graphs
        self._kept: list[tuple[int, Outputs, KeptPrefix | None]] = []
        _, row, self.first = next(walk(cut, [0]))
        """The first piece's place in the row."""
        self.first_row = row.to(device, non_blocking=True)
        """Its row, on the model's device."""

    def rest(self, *of_first: torch.Tensor) -> Outputs:
        """Return the outputs of the whole row, in the order of its tree, from those of the first piece."""
        if self._learns and not of_first[0].requires_grad:  # of a tower that is trained alone, without an image here
            of_first = of_first[0].detach().requires_grad_(), *of_first[1:]
        return _Rest.apply(self, *of_first, *self.parameters)

    def forward(self, use: UsePiece) -> None:
        """Run all pieces but the first and call `use` with their outputs. The last ones keep their graphs."""

        def use_and_keep(number: int, outputs: Outputs, before: KeptPrefix | None) -> None:
            use(number, outputs, before)
            self._kept.append((number, outputs, before))

        self._walk(range(1, self._last), use)
        with torch.enable_grad():
            self._walk(range(self._last, len(self.cut.pieces)), use_and_keep)

    def backward(self, use: UsePiece, again: AbstractContextManager[Any]) -> None:
        """Call `use` with the outputs and graph of every piece but the first.

        Kept graphs come first. The other pieces run again, inside `again`; in a second backward pass, all pieces do.
        """
        kept, self._kept = self._kept, []
        for each in kept:
            use(*each)
        if self.first.own is not None and not kept:
            self.first.own.forget_gradients()
        with again, torch.enable_grad():
            self._walk(range(1, self._last if kept else len(self.cut.pieces)), use)

    def _walk(self, numbers: range, use: UsePiece) -> None:
        """Run these pieces and call `use` with their outputs; a kept prefix is used after its branches."""
        for number, row, place in walk(self.cut, numbers, last=self.first.own):
            outputs = self._run(row.to(self._device, non_blocking=True), place)
            done = partial(use, number, outputs, place.before)
            if place.own is None:
                done()
            else:
                place.own.close = done

    def index(self, number: int, device: torch.device) -> torch.Tensor:
        """int64 [t of the piece]: where the tokens of a piece are among all that go through the model."""
        nodes = [*self.cut.pieces[number].nodes]
        starts = np.array([start for start, _ in self.cut.tree.nodes.spans])[nodes]
        return to_device(ranges(starts, np.array(self.cut.tree.lengths)[nodes]), device)


class _Rest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pieces: RowInPieces, *inputs: torch.Tensor) -> Outputs:
        of_first = inputs[: len(inputs) - len(pieces.parameters)]
        ctx.pieces, ctx.again = pieces, _AsNow(of_first[0])
        at = [x.ndim - 2 for x in of_first]  # hidden states have a batch of one row
        whole = [
            x.new_empty(*x.shape[:dim], pieces.cut.tree.num_tokens, *x.shape[dim + 1 :])
            for x, dim in zip(of_first, at, strict=True)
        ]

        def use(number: int, outputs: Outputs, before: KeptPrefix | None = None) -> None:
            index = pieces.index(number, outputs[0].device)
            for rows, values, dim in zip(whole, outputs, at, strict=True):
                rows.index_copy_(dim, index.to(rows.device), values.detach())

        use(0, of_first)
        pieces.forward(use)
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        pieces: RowInPieces = ctx.pieces
        sums: list[torch.Tensor | None] = [None] * len(pieces.parameters)

        def of_piece(number: int) -> list[torch.Tensor]:
            index = pieces.index(number, grads[0].device)
            return [grad.index_select(grad.ndim - 2, index.to(grad.device)) for grad in grads]

        def use(number: int, outputs: Outputs, before: KeptPrefix | None) -> None:
            pairs = [(x, grad) for x, grad in zip(outputs, of_piece(number), strict=True) if x.requires_grad]
            tensors, of_tensors = [x for x, _ in pairs], [grad for _, grad in pairs]
            if pairs and not sums:
                torch.autograd.backward(tensors, of_tensors)
            elif pairs:
                read = [] if before is None else before.learned  # whose gradients are added up on the way
                inputs = [*pieces.parameters, *read]
                found = torch.autograd.grad(tensors, inputs, of_tensors, allow_unused=True)
                for place, (total, grad) in enumerate(zip(sums, found, strict=False)):
                    sums[place] = total if grad is None else grad if total is None else total + grad

        pieces.backward(use, ctx.again)
        return None, *of_piece(0), *sums


class _AsNow(ExitStack):
    """Enter it to compute again what is computed now: with this autocast and these random numbers (dropout)."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._kind, self._cpu_state = hidden.device.type, torch.get_rng_state()
        self._devices, self._states = get_device_states(hidden)
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in {self._kind, "cpu"}
        ]

    def __enter__(self) -> _AsNow:
        kind = self._kind if self._devices else "cuda"  # any, of no devices
        self.enter_context(torch.random.fork_rng(self._devices, device_type=kind))
        torch.set_rng_state(self._cpu_state)
        set_device_states(self._devices, self._states, device_type=kind)
        for kind, dtype, enabled in self._autocast:
            self.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        return self
