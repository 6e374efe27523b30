"""One row as its layers see it: which part of it goes through the model on this rank, and what each mechanism needs.

    RowPart                how much of a row goes through the model on this rank: all of it, nothing is cut or sent
    ├─ ContextParallelRow  a contiguous part of it; the other parts are on the other ranks of a context group
    └─ PrefixTreeRow       a prefix tree: what several samples begin with, once

Layers and losses call the methods of `RowPart` and contain no code for ranks or trees. T row tokens, t of them in the
part, D features, L targets of the row, l of the part, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from vlmpack.attention.patterns import EVERYTHING, Reach, attended_pairs
from vlmpack.context_parallel.attention import Attend
from vlmpack.layout.batch import HostMetadata
from vlmpack.layout.segments import Segments

CONTEXT = "vlmpack_row"
"""The keyword under which a `RowContext` reaches every layer."""

OnTensors = Callable[..., torch.Tensor]
"""[1, T, D], and further tensors [1, T, ...], to [1, T, D']."""

OnHeads = Callable[[torch.Tensor], torch.Tensor]
"""[T, F] to [T, F']."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PartTargets:
    """The targets of a row that a part computes."""

    predictions: torch.Tensor
    """int64 [l]: the place in the part that predicts each."""
    ids: torch.Tensor
    """int64 [l]: the predicted tokens."""
    entries: torch.Tensor
    """int64 [L]: for each target of the row, the one of the part; where ranks share the row, its place in the row."""


class RowPart:
    """The part of a row that goes through the model on this rank: all of it, unless a subclass says otherwise."""

    ranks: int = 1
    """Number of ranks that have a part of the row."""
    rank: int = 0
    """Which of them this is."""

    def __init__(self, segments: Segments, *, computed: Segments | None = None) -> None:
        """`computed`: boundaries of all that goes through the model, on all ranks together; None: those of the part."""
        self.segments = segments
        """The boundaries of the part."""
        self.computed = computed or segments
        """The boundaries of all that goes through the model, on all ranks together."""
        self.real = slice(0, segments.num_tokens)
        """Which of the row's real tokens are in the part."""

    @property
    def is_whole(self) -> bool:
        """Return whether the part is the whole row."""
        return self.ranks == 1

    def attended_pairs(self, reach: Reach = EVERYTHING) -> int:
        """Query-key pairs of causal attention in one layer, on all ranks together; `reach`: that of the layer."""
        return self.computed.attended_pairs if reach == EVERYTHING else attended_pairs(self.computed, reach)

    def spans(self, runs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Runs of tokens of the row, (start, stop) of each, as places of what attention gets."""
        return runs

    def computed_media(self, metadata: HostMetadata) -> HostMetadata:
        """Metadata of the media that go through the towers, on all ranks together; `metadata`: of the row."""
        return metadata

    def computed_audios(self, metadata: HostMetadata) -> Sequence[int]:
        """Numbers of the audios that go through the audio tower, in its order."""
        return range(len(metadata.audio_frames))

    def check_shared(self, row_kT: torch.Tensor, name: str) -> None:
        """Check that tokens which go through the model once for several samples are equal in all of them.

        Args:
            row_kT: [1, T], or [k, 1, T].
            name: what to call it in an error.

        Raises:
            LayoutError: they are not (an accelerator asserts the same, asynchronously).
        """
        return

    def cut(self, row: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
        """Cut T entries of the whole row along `dim` to those of the part."""
        return row

    def gather(self, part_t: torch.Tensor) -> torch.Tensor:
        """Gather [t, ...] of each rank to [T, ...]. All continue with the identical value: the backward pass sends
        nothing."""
        return part_t

    def for_each_sample(self, part_t: torch.Tensor) -> torch.Tensor:
        """[t, ...] of the tokens of this rank, a token that several samples share as often as they do."""
        return part_t

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks. All continue with the identical value: the backward pass sends nothing."""
        return x

    def attend(
        self, attend: Attend, q_tNH: torch.Tensor, k_tKH: torch.Tensor, v_tKH: torch.Tensor, segments: Segments
    ) -> torch.Tensor:
        """[t, N, H] by a back-end that takes a whole row, with these boundaries of the row."""
        return attend(q_tNH, k_tKH, v_tKH, segments)

    def by_heads(self, parts_tRF: Sequence[torch.Tensor], run: OnHeads, what: str) -> torch.Tensor:
        """Run along the whole row for some heads: [t, R, F] of several blocks of channels to [t, R F'].

        Args:
            parts_tRF: the channels that each rank computes.
            run: [T, sum of F] to [T, F'], for the heads of this rank.
            what: the name under which bytes are counted.
        """
        return run(torch.cat([part.flatten(1) for part in parts_tRF], -1))

    def on_whole_row(self, run: OnTensors, hidden_1tD: torch.Tensor, *others_1t: torch.Tensor) -> torch.Tensor:
        """Run along the whole row for all channels, [1, t, D] to [1, t, D']. Further tensors have no gradient."""
        return run(hidden_1tD, *others_1t)

    def targets(self, index_L: torch.Tensor, labels_1T: torch.Tensor) -> PartTargets:
        """Targets at these places of the row (rising), as far as they are in the part.

        Args:
            index_L: int64 [L]: places of predictions.
            labels_1T: int64 [1, T]: shifted labels of the row.
        """
        return PartTargets(predictions=index_L, ids=labels_1T[0].index_select(0, index_L), entries=index_L)

    def gather_targets(self, part_l: torch.Tensor, targets: PartTargets) -> torch.Tensor:
        """Values of the targets of each rank, [l], to those of the row, [L]."""
        return part_l


@final
class RowContext:
    """One row, as its layers see it.

    It travels as one keyword through the model's own `**kwargs`, so gradient checkpointing, which calls a layer again
    during the backward pass, hands each layer the row that it had before, and any number of models and rows can be
    alive at a time. No dataclass: FSDP's mixed precision rebuilds those, for every layer.
    """

    def __init__(self, *, segments: Segments, part: RowPart | None = None, entries: Mapping[str, Any]) -> None:
        self.segments = segments
        """The row's boundaries."""
        self.part = part or RowPart(segments)
        """The part of it on this rank."""
        self.entries = dict(entries)
        """The entry of each mechanism (`Mechanism.prepare`), by its name."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RowContext:
        """Of one call: a copy is itself."""
        return self
