"""The language-model head on labelled positions only, a chunk at a time.

A row of T tokens with L labelled ones costs L rows of logits, of which one chunk is alive at a time: each chunk's
logits are computed again in the backward pass when there is more than one chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from vlmpack.errors import LayoutError
from vlmpack.layout import IGNORE, require

Head = Callable[[torch.Tensor], torch.Tensor]


def target_positions(shift_labels: torch.Tensor, num_targets: int | None) -> torch.Tensor:
    """int64 [L]: where the row has a target.

    Args:
        shift_labels: [1, T].
        num_targets: L as counted on the host. Without it an accelerator has to be asked, and waited for.

    Raises:
        LayoutError: the count is wrong (an accelerator asserts the same without making the host wait).
    """
    labelled = shift_labels[0] != IGNORE
    if num_targets is None:
        return labelled.nonzero()[:, 0]
    require(labelled.sum() == num_targets, _MISCOUNTED.format(num_targets), LayoutError)
    return torch.nonzero_static(labelled, size=num_targets)[:, 0]


_MISCOUNTED = (
    "the host counted {} targets but the row has another number; labels were changed after collating: "
    "set num_targets=None in the batch's metadata, or change labels before the collator"
)


def target_logprobs(hidden_LD: torch.Tensor, targets_L: torch.Tensor, head: Head, *, chunk: int) -> torch.Tensor:
    """float32 [L]: log-probability of each target.

    Args:
        hidden_LD: final hidden states at labelled positions.
        targets_L: int64 ids, none of them -100.
        head: hidden states to logits, [l, D] to [l, V].
        chunk: rows of logits alive at a time.
    """
    pieces = list(zip(hidden_LD.split(chunk), targets_L.split(chunk), strict=True))
    if len(pieces) == 1:
        return _logprobs(*pieces[0], head)
    return torch.cat(
        [
            # Random states are kept: an adapter on the head may have dropout.
            checkpoint(_logprobs, hidden, targets, head, use_reentrant=False)
            for hidden, targets in pieces
        ]
    )


def _logprobs(hidden_LD: torch.Tensor, targets_L: torch.Tensor, head: Head) -> torch.Tensor:
    """Cross-entropy is taken in float32, as Hugging Face models take theirs."""
    return -F.cross_entropy(head(hidden_LD).float(), targets_L, reduction="none")
