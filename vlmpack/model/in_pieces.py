"""A row that is larger than `StepConfig.capacity`: through the backbone in pieces, with any head and loss behind it.

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

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from vlmpack.layout.device import to_device
from vlmpack.layout.pieces import CutGroup
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import ranges
from vlmpack.model.kept import KeptPrefix, OpenPieces, PieceOfGroup

Outputs = tuple[torch.Tensor, ...]
"""What the backbone returns of a row: hidden states [1, t, D], then router logits [t, E] of each layer."""

RunPiece = Callable[[PackedRow, PieceOfGroup], Outputs]
"""Runs the row of a piece, which is on the host, through the backbone."""

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
        learns: bool,
        kept_pieces: int,
        parameters: Sequence[torch.Tensor] = (),
    ) -> None:
        """`parameters` get one summed gradient from all pieces but the first; (): each piece adds its own."""
        self._cut, self._run, self._learns, self.parameters = cut, run, learns, parameters
        count, parents = len(cut.pieces), [piece.parent for piece in cut.pieces]
        of_last = (n for n in range(max(count - kept_pieces, 1), count) if not {*parents[n:]} & {*range(1, n)})
        self._last = next(of_last, count) if learns else count  # the first of the last pieces, which keep their graphs
        self._kept: list[tuple[int, Outputs, KeptPrefix | None]] = []
        piece = cut.pieces[0]
        kept = KeptPrefix(None, is_training=torch.is_grad_enabled()) if piece.is_kept else None
        self.first_row = cut.row(piece)
        """The row of the first piece."""
        self.first = PieceOfGroup.of(cut, piece, self.first_row, before=None, own=kept)
        """Its place in the row."""

    def run_first(self) -> Outputs:
        """Run the first piece."""
        return self._run(self.first_row, self.first)

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
            self._walk(range(self._last, len(self._cut.pieces)), use_and_keep)

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
            self._walk(range(1, self._last if kept else len(self._cut.pieces)), use)

    def _walk(self, numbers: range, use: UsePiece) -> None:
        """Run these pieces and call `use` with their outputs; a kept prefix is used after its branches."""
        path, cut, nothing = OpenPieces(), self._cut, lambda: None
        if self.first.own is not None:
            path.add(0, self.first.own, nothing)
        for number in numbers:
            piece = cut.pieces[number]
            before, row = path.up_to(piece.parent), cut.row(piece)
            own = KeptPrefix(before, is_training=torch.is_grad_enabled()) if piece.is_kept else None
            outputs = self._run(row, PieceOfGroup.of(cut, piece, row, before=before, own=own))
            done = partial(use, number, outputs, before)
            if own is None:
                done()
            else:
                path.add(number, own, done)
        path.up_to(None)

    def index(self, number: int, device: torch.device) -> torch.Tensor:
        """int64 [t of the piece]: where the tokens of a piece are among all that go through the model."""
        nodes = [*self._cut.pieces[number].nodes]
        starts = np.array([start for start, _ in self._cut.tree.nodes.spans])[nodes]
        return to_device(ranges(starts, np.array(self._cut.tree.lengths)[nodes]), device)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that go through the model."""
        return self._cut.tree.num_tokens


class _Rest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pieces: RowInPieces, *inputs: torch.Tensor) -> Outputs:
        of_first = inputs[: len(inputs) - len(pieces.parameters)]
        ctx.pieces, ctx.again = pieces, _AsNow(of_first[0])
        at = [x.ndim - 2 for x in of_first]  # hidden states have a batch of one row
        whole = [
            x.new_empty(*x.shape[:dim], pieces.num_tokens, *x.shape[dim + 1 :])
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
