"""Weight of each sample in the loss of an optimizer step, and the loss of each data set of a mix.

    loss = Σ_i r(n_i) Σ_t w_t · nll_t / Σ_i n_i · r(n_i)

The sums run over the samples i of all rows, accumulated batches and ranks of the step, and over the n_i targets t of
each sample. nll_t is the cross-entropy of a target, and w_t its weight (`weight` of a message or a text, 1 by default).
A label of weight 0 is no target. A weight of 2 doubles the gradient of a target, but the target still counts as one in
the divisor. ms-swift does the same: the loss of a step is the sum of loss_scale times cross-entropy, divided by the
number of labels.

| loss     | r(n)     | effect                                           | also in                        |
|----------|----------|--------------------------------------------------|--------------------------------|
| "token"  | 1        | each target counts the same                      | HF Trainer, ms-swift, axolotl  |
| "sample" | 1 / n    | each sample counts the same                      | xtuner, verl's seq-mean        |
| "square" | 1 / √n   | a sample counts by the square root of its length | InternVL, xtuner               |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

from vlmpack.context_parallel.mesh import Parallel, gathered, is_distributed
from vlmpack.layout.batch import METADATA_KEY, HostMetadata
from vlmpack.layout.row import IGNORE, PackedRow
from vlmpack.layout.segments import Segments
from vlmpack.model.engine import stored_state
from vlmpack.model.forward import is_row_input
from vlmpack.model.plain import find_model

Loss = Literal["token", "sample", "square"]
"""What has equal weight in the loss of a step: each target, each sample, or something in between."""

_POWERS: Mapping[Loss, float] = {"token": 0.0, "sample": -1.0, "square": -0.5}


def mean_loss(sums: Any, targets: Any, loss: Loss) -> float:
    """Compute the loss of samples; 0 if none has targets.

    Args:
        sums: float64 [B]: weighted cross-entropy of each sample, summed over its targets.
        targets: [B]: number of targets of each sample.
        loss: how much each sample counts.
    """
    factors = np.maximum(targets, 1) ** _POWERS[loss]
    items = float((targets * factors).sum())
    return float((sums * factors).sum()) / items if items else 0.0


def weighed(batch: Mapping[str, Any], loss: Loss) -> tuple[dict[str, Any], torch.Tensor]:
    """Multiply the label weights of a batch or row by each sample's weight r(n). No host–device sync.

    Returns:
        The batch with label weights w · r(n), and the scalar Σ n · r(n) over its samples. Divide the loss, summed over
        the whole step, by the sum of these scalars.
    """
    if is_row_input(dict(batch)):
        row, name = PackedRow.from_hf(batch), "shift_weights"
        labels, weights = row.shift_labels, row.shift_weights
        assert labels is not None, "a row that is trained on has labels"
        sample_T = _sample_of_tokens(row.segments, labels)
        counts = labels.new_zeros(row.segments.num_samples).index_add(0, sample_T, (labels[0] != IGNORE).long())
        factors = _factors(counts, loss)
        of_labels = factors[sample_T][None]
    else:
        labels, name = batch["labels"], "loss_weights"
        weights, counts = batch.get(name), (labels[:, 1:] != IGNORE).sum(1)
        factors = _factors(counts, loss)
        of_labels = factors[:, None].expand(labels.shape)
    return {**batch, name: of_labels if weights is None else weights * of_labels}, (counts * factors).sum()


def _factors(counts: torch.Tensor, loss: Loss) -> torch.Tensor:
    return counts.clamp(min=1).float() ** _POWERS[loss]


def _sample_of_tokens(segments: Segments, tokens: torch.Tensor) -> torch.Tensor:
    """int64 [T]: sample index of each token of a row; padding, which has no targets, gets the last sample."""
    return segments.seq_idx(tokens.device).long().clamp(max=segments.num_samples - 1)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SampleLosses:
    """Losses of the samples of one batch."""

    sample_loss_sums: torch.Tensor
    """float32 [B]: cross-entropy (nats) times weight, summed over each sample's targets."""
    sample_targets: torch.Tensor
    """int64 [B]: number of targets of each sample."""

    @classmethod
    def of(cls, logprobs: torch.Tensor, is_target: torch.Tensor, metadata: HostMetadata | None) -> SampleLosses:
        """Sum log-probabilities per sample: [B, S - 1] of a padded batch, or [1, T - 1] of a row."""
        segments = None if metadata is None else metadata.segments
        if segments is None:
            return cls(sample_loss_sums=-logprobs.sum(1), sample_targets=is_target.sum(1))
        sample_T = _sample_of_tokens(segments, logprobs)[: logprobs.shape[1]]
        zeros = logprobs.new_zeros(segments.num_samples)
        sums, counts = zeros.index_add(0, sample_T, -logprobs[0]), zeros.index_add(0, sample_T, is_target[0].float())
        return cls(sample_loss_sums=sums, sample_targets=counts.long())


def sample_losses_of(output: Any, metadata: HostMetadata | None) -> SampleLosses | None:
    """Return the losses of a batch's samples from the output of an enabled model or TRL's head; None: it has none."""
    if getattr(output, "log_probs", None) is not None:  # output of TRL's head
        return SampleLosses.of(output.log_probs.detach(), output.label_mask, metadata)
    if getattr(output, "sample_losses", None) is None:
        return None
    targets = output.sample_targets
    return SampleLosses(sample_loss_sums=output.sample_losses.detach() * targets, sample_targets=targets)


def channels_of(batch: Mapping[str, Any]) -> Sequence[str | None] | None:
    """Return the channel of each sample of a batch; None: no sample has one."""
    metadata: HostMetadata | None = batch.get(METADATA_KEY)
    return metadata.channels or None if metadata is not None else None


@final
class ChannelLosses:
    """Losses of the samples of each channel (data set of a mix), accumulated since the last `take`."""

    def __init__(self, loss: Loss) -> None:
        self._loss: Loss = loss
        self._seen: list[tuple[Sequence[str | None], SampleLosses]] = []

    def add(self, batch: Mapping[str, Any], output: Any) -> None:
        """Record the losses of a batch on their device, as trained on, including the scaling by `weighed`."""
        if (losses := sample_losses_of(output, batch[METADATA_KEY])) is not None:
            self._seen.append((batch[METADATA_KEY].channels, losses))

    def take(self) -> dict[str, float]:
        """Return the loss per channel over all ranks, computed like the loss of a step; every rank must call it."""
        totals: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
        for channels, losses in self._seen:
            targets = losses.sample_targets.double()
            items = targets * targets.clamp(min=1) ** _POWERS[self._loss]
            pairs = torch.stack([losses.sample_loss_sums.double(), items], 1).numpy(force=True)
            for channel, pair in zip(channels, pairs, strict=True):
                if channel is not None:
                    totals[channel] += pair
        self._seen = []
        of_all: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
        for of_rank in gathered(dict(totals)):
            for channel, pair in of_rank.items():
                of_all[channel] += pair
        return {channel: float(total / items) for channel, (total, items) in sorted(of_all.items()) if items}


def parallel_of(model: nn.Module) -> Parallel | None:
    """Return the ranks that packing was enabled for; None: none were given, or packing is not enabled."""
    state = stored_state(find_model(model))
    return None if state is None else state.parallel


def data_place(model: nn.Module) -> tuple[int, int]:
    """Return (index, number) of the ranks with rows of their own; ranks that share rows have one index."""
    parallel = parallel_of(model)
    if parallel is not None and parallel.mesh is not None:
        return parallel.data_rank, parallel.data_ranks
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
