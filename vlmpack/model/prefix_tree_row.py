"""A row that goes through a model as a prefix tree: what several samples begin with is computed once.

    row      P A   P B C   P B D     3 samples, T tokens: ids, labels, results
    tree     P A B C D               t tokens: what the model sees; each token attends to its ancestors and itself

Tensors of the row go in by `row[source]`, and come out by `part[place]`. The backward pass of the latter adds up the
gradients of shared tokens, so nothing is weighted by hand. A token of the tree is predicted by one token, the one
before it on its path, whoever shares it: so the head sees every distinct target once, and a branch point has as many
targets as children.

T row tokens, t tree tokens, D features, L targets of the row, l distinct ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import final

import torch

from vlmpack.attention.patterns import EVERYTHING, Reach, attended_pairs
from vlmpack.context_parallel.attention import Attend
from vlmpack.errors import LayoutError
from vlmpack.layout.batch import HostMetadata
from vlmpack.layout.device import on_host, require
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import IGNORE, PackedRow, metadata_of_tree, roll_left
from vlmpack.layout.segments import Segments
from vlmpack.model.path_attention import attend_along_paths
from vlmpack.model.row import OnHeads, OnTensors, PartTargets, RowPart


@final
class PrefixTreeRow(RowPart):
    """A row whose shared tokens go through the model once, on one rank.

    Raises:
        LayoutError: tokens that samples share differ, or the row's labels are others than its tokens.
    """

    def __init__(self, row: PackedRow, tree: PrefixTree, metadata: HostMetadata) -> None:
        super().__init__(tree.nodes)
        self.tree = tree
        """The tree."""
        self.real = slice(0, row.segments.num_tokens)
        self._num_distinct_targets = metadata.num_distinct_targets
        self.check_shared(row.input_ids, "input_ids")
        _check_labels(row)
        self._ids_t = self.cut(row.input_ids)[0]

    @property
    def is_whole(self) -> bool:
        """False: shared tokens are there once."""
        return False

    def attended_pairs(self, reach: Reach = EVERYTHING) -> int:
        """Count the pairs of every path, less those of the same path up to the node: they are its parent's."""
        pairs = zip(self.tree.keys.lengths, self.tree.lengths, strict=True)
        before = Segments.from_lengths([total - length for total, length in pairs])
        return attended_pairs(self.tree.keys, reach) - attended_pairs(before, reach)

    def spans(self, runs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Runs of tokens of the tree, those that samples share once.

        Raises:
            LayoutError: a run lies in several nodes: samples share a part of it.
        """
        place, starts = self.tree.place().numpy(), [start for start, _ in self.tree.nodes.spans]
        shared = set()
        for start, stop in runs:
            first, last = int(place[start]), int(place[stop - 1])
            if bisect_right(starts, first) != bisect_right(starts, last):
                sample = int(self.tree.segments.seq_idx()[start])
                raise LayoutError(
                    f"sample {sample} shares only a part of a run of {stop - start} tokens that attend to each other "
                    "in both directions: share what comes before it, or all of it; or take the tree away with "
                    "unshare(row)"
                )
            shared.add((first, last + 1))
        return tuple(sorted(shared))

    def computed_media(self, metadata: HostMetadata) -> HostMetadata:
        """Metadata of those that samples share once, in the order of the tree."""
        return metadata_of_tree(metadata, self.tree)

    def computed_audios(self, metadata: HostMetadata) -> Sequence[int]:
        """The audios of the tree."""
        return self.tree.audios

    def check_shared(self, row_kT: torch.Tensor, name: str) -> None:
        """Compare each token with the one that is computed in its place."""
        differs_T = self._differs(row_kT)
        wrong, where = differs_T.any(), ""
        if on_host(wrong) and wrong:
            at = int(differs_T.int().argmax())
            other = int(self.tree.source("cpu")[self.tree.place("cpu")[at]])
            where = (
                f": place {at} of the row has {row_kT[..., at].tolist()}, place {other} {row_kT[..., other].tolist()}"
            )
        message = f"{name} of tokens that the prefix tree says are shared differ between samples{where}; {_CHANGED}"
        require(~wrong, message, LayoutError)

    def cut(self, row: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
        """Take each token of the tree from the first sample that has it."""
        return row.index_select(dim, self.tree.source(row.device))

    def gather(self, part_t: torch.Tensor) -> torch.Tensor:
        """Lay the tokens of the tree out as the row. The backward pass adds up the gradients of all samples."""
        return part_t.index_select(0, self.tree.place(part_t.device))

    def for_each_sample(self, part_t: torch.Tensor) -> torch.Tensor:
        """Lay out as the row, like `gather`."""
        return self.gather(part_t)

    def attend(
        self, attend: Attend, q_tNH: torch.Tensor, k_tKH: torch.Tensor, v_tKH: torch.Tensor, segments: Segments
    ) -> torch.Tensor:
        """Each node's queries attend to the keys of its ancestors and its own."""
        return attend_along_paths(attend, q_tNH, k_tKH, v_tKH, self.tree)

    def by_heads(self, parts_tRF: Sequence[torch.Tensor], run: OnHeads, what: str) -> torch.Tensor:
        """Run along every sample's path."""
        return self.cut(run(self.gather(torch.cat([part.flatten(1) for part in parts_tRF], -1))), dim=0)

    def on_whole_row(self, run: OnTensors, hidden_1tD: torch.Tensor, *others_1t: torch.Tensor) -> torch.Tensor:
        """Run along every sample's path: shared tokens are computed as often as they are shared."""
        hidden_1TD, *others_1T = (self.gather(part[0])[None] for part in (hidden_1tD, *others_1t))
        return self.cut(run(hidden_1TD, *others_1T), dim=1)

    def targets(self, index_L: torch.Tensor, labels_1T: torch.Tensor) -> PartTargets:
        """Distinct targets. Their number is that of the metadata; without one an accelerator is read: a host–device
        sync."""
        device = index_L.device
        token_L = self.tree.place(device).index_select(0, index_L + 1)
        is_target_t = torch.zeros(self.tree.num_tokens, dtype=torch.bool, device=device).index_fill_(0, token_L, True)
        token_l = self._places(is_target_t)
        return PartTargets(
            predictions=self.tree.predecessor(device).index_select(0, token_l),
            ids=self._ids_t.index_select(0, token_l),
            entries=(is_target_t.cumsum(0) - 1).index_select(0, token_L),
        )

    def gather_targets(self, part_l: torch.Tensor, targets: PartTargets) -> torch.Tensor:
        """A target that several samples have counts for each of them."""
        return part_l.index_select(0, targets.entries)

    def _places(self, is_target_t: torch.Tensor) -> torch.Tensor:
        """int64 [l]: where distinct targets are."""
        count = self._num_distinct_targets
        if count is None or on_host(is_target_t):
            return is_target_t.nonzero()[:, 0]
        message = f"{count} distinct targets were counted, but the row has another number; {_CHANGED}"
        require(is_target_t.sum() == count, message, LayoutError)
        return torch.nonzero_static(is_target_t, size=count)[:, 0]

    def _differs(self, row_kT: torch.Tensor) -> torch.Tensor:
        """bool [T]: tokens that are not equal to the one that is computed."""
        flat_kT = row_kT.reshape(-1, row_kT.shape[-1])
        shared_kT = self.cut(flat_kT).index_select(1, self.tree.place(row_kT.device))
        return (flat_kT != shared_kT).any(0)


_CHANGED = "a row cannot be changed after share(row): change it before, or take the tree away with unshare(row)"


def _check_labels(row: PackedRow) -> None:
    """Check that each target is the next token itself: a shared prediction has one target a child.

    Raises:
        LayoutError: one is another id, or a sample's last token has one.
    """
    labels = row.shift_labels
    if labels is None:
        return
    following = roll_left(row.input_ids, row.segments, fill=IGNORE)
    foreign_T = ((labels != IGNORE) & (labels != following))[0]
    wrong, where = foreign_T.any(), ""
    if on_host(wrong) and wrong:
        at = int(foreign_T.int().argmax())
        where = f": place {at} of the row has {int(labels[0, at])}, and {int(following[0, at])} follows"
    message = (
        f"a target of a row with a prefix tree is not the next token of its sample{where}; labels are the tokens "
        "themselves, or -100: give this row without sharing, unshare(row)"
    )
    require(~wrong, message, LayoutError)
