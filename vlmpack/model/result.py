"""The result of a packed step: sums and counts, one entry a sample, and the work that was done; the model's output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from transformers.utils.generic import ModelOutput

from vlmpack.families.family import Family
from vlmpack.layout.device import on_host, outside_graph
from vlmpack.layout.packing import unpack
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments
from vlmpack.model.mechanisms.experts import RouterStatistics, puts_aux_loss_first


@final
@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a step, counted on the host: equal outputs do not prove that padding was skipped."""

    real_tokens: int
    """Tokens of samples."""
    physical_tokens: int
    """Tokens that went through the model: the width of the row, or of its prefix tree."""
    attended_pairs: int
    """Query-key pairs of causal attention in one layer: the sum of n (n + 1) / 2 over the segments, or as many of them
    as sparse attention selects; of a prefix tree those of each token's path; of layers that differ, in the one that
    attends to most."""
    vision_patches: int
    """Patches that went through the vision tower."""
    delta_tokens: int = 0
    """Tokens that each gated delta layer computed, with the padding of its buckets or the zeros between its samples; 0:
    there are no such layers."""
    conv_tokens: int = 0
    """Tokens that each short convolution computed, with the zeros between its samples, or the padding of its buckets;
    0: there are no such layers."""
    window_pairs: int = 0
    """Query-key pairs in one layer with a sliding window, or with chunks; 0: there are no such layers."""
    audio_frames: int = 0
    """Log-mel frames that went through the audio tower, padding left out; 0: there is no audio."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """Loss and per-sample results of one row. B samples, T row tokens, L targets."""

    loss: torch.Tensor
    """Scalar: `loss_sum` over `num_items_in_batch`, or over this row's targets when that was not given; plus
    `router_aux_loss_coef * aux_loss` where there is one and `z_loss_coef * z_loss`, which nothing divides."""
    loss_sum: torch.Tensor
    """Scalar: cross-entropy (nats) times weight, summed over the targets."""
    num_targets: int
    """L: labelled targets of the row."""
    sample_loss_sums: torch.Tensor
    """float32 [B]: cross-entropy (nats) times weight, summed over each sample's targets, detached."""
    sample_targets: torch.Tensor
    """int64 [B]: targets of each sample."""
    target_logprobs: torch.Tensor
    """float32 [L]: log-probability of each target, in row order, with its gradient; of logits over the temperature."""
    target_index: torch.Tensor
    """int64 [L]: row position of each target's prediction."""
    segments: Segments
    """The row's boundaries."""
    work: Work
    """The work of the row, counted."""
    target_entropies: torch.Tensor | None = None
    """float32 [L]: entropy (nats) of the prediction of each target, with its gradient, on request."""
    row_logits: torch.Tensor | None = None
    """[1, T, V] on request."""
    row_hidden_states: tuple[torch.Tensor | None, ...] | None = None
    """[1, T, D] of the embeddings and of each layer, on request; None in place of those that were not chosen."""
    row_last_hidden: torch.Tensor | None = None
    """[1, T, D]: what the head is given, on request."""
    routers: RouterStatistics | None = None
    """Statistics of the routers on the real tokens; None: not requested, or no experts."""
    width: int | None = None
    """S of the padded batch that was packed; None: it was a row already."""
    offsets: tuple[int, ...] = ()
    """First column of each sample in that batch."""

    def __repr__(self) -> str:
        work = self.work
        container = "a prefix tree" if work.physical_tokens < work.real_tokens else "a row"
        return (
            f"StepResult(loss {_shown(self.loss)}, {self.num_targets} targets, {self.segments.num_samples} samples, "
            f"{work.real_tokens} tokens in {container} of {work.physical_tokens}, {work.vision_patches} patches)"
        )

    @property
    def aux_loss(self) -> torch.Tensor | None:
        """Scalar: the routers' load-balancing loss; None: not requested, or no experts."""
        return None if self.routers is None else self.routers.aux_loss

    @property
    def z_loss(self) -> torch.Tensor | None:
        """Scalar: the routers' z-loss; None: no router statistics."""
        return None if self.routers is None else self.routers.z_loss

    @property
    def expert_counts(self) -> torch.Tensor | None:
        """int64 [layers, E]: real tokens that each expert was sent; None: no router statistics."""
        return None if self.routers is None else self.routers.expert_counts

    @property
    def router_logits(self) -> tuple[torch.Tensor, ...] | None:
        """[R, E] of each layer that has experts, R real tokens in row order; None: no router statistics."""
        return None if self.routers is None else self.routers.logits

    @property
    def sample_losses(self) -> torch.Tensor:
        """float32 [B]: `sample_loss_sums` over the number of each sample's targets; 0 for a sample without any."""
        return self.sample_loss_sums / self.sample_targets.clamp(min=1)

    @property
    def logprobs(self) -> torch.Tensor:
        """float32 [B, S]: log-probability of the target that each position predicts; 0 where there is none."""
        return self._by_position(self.target_logprobs)

    @property
    def entropies(self) -> torch.Tensor | None:
        """float32 [B, S]: entropy (nats) of each position's prediction; 0 where no target is; None unless requested."""
        return None if self.target_entropies is None else self._by_position(self.target_entropies)

    @property
    def logits(self) -> torch.Tensor | None:
        """[B, S, V]: `row_logits` as a padded batch, 0 on padding; None unless requested."""
        return self._padded(self.row_logits)

    @property
    def hidden_states(self) -> tuple[torch.Tensor | None, ...] | None:
        """[B, S, D] of the embeddings and of each layer: `row_hidden_states` as a padded batch, 0 on padding."""
        return None if self.row_hidden_states is None else tuple(map(self._padded, self.row_hidden_states))

    @property
    def last_hidden(self) -> torch.Tensor | None:
        """[B, S, D]: `row_last_hidden` as a padded batch, 0 on padding; None unless requested."""
        return self._padded(self.row_last_hidden)

    @outside_graph
    def kept_logits(self, keep: int | torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """[B, K, V]: logits of these columns of the padded batch (of the last ones, if a number), 0 on padding."""
        columns = slice(-keep, None) if isinstance(keep, int) else keep
        if self.logits is not None:  # ranks share the row
            return self.logits[:, columns]
        assert self.last_hidden is not None
        return head(self.last_hidden[:, columns])

    def _by_position(self, values_L: torch.Tensor) -> torch.Tensor:
        """[B, S]: values of targets, each where it is predicted, 0 elsewhere."""
        row = values_L.new_zeros(1, self.segments.total)
        row = row.index_put((torch.zeros_like(self.target_index), self.target_index), values_L)
        return unpack(row, self.segments, width=self.width, offsets=self.offsets)

    def _padded(self, row: torch.Tensor | None) -> torch.Tensor | None:
        return None if row is None else unpack(row, self.segments, width=self.width, offsets=self.offsets)


def _shown(loss: torch.Tensor) -> str:
    """Format a loss; one on a device is not read."""
    if not on_host(loss):
        return f"on {loss.device}"
    try:
        return f"{loss.item():.4f}"
    except RuntimeError:  # inside a transform of functions, or of a tensor that stands for one
        return "not known"


def weighted(losses_L: torch.Tensor, row: PackedRow, index_L: torch.Tensor) -> torch.Tensor:
    """float32 [L]: cross-entropies of the targets at these places of the row, times the weights that it has."""
    return losses_L if row.shift_weights is None else losses_L * row.shift_weights[0].float().index_select(0, index_L)


def sums_by_sample(
    losses_L: torch.Tensor, index_L: torch.Tensor, segments: Segments
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss sums float32 [B], target counts int64 [B]) of each sample, detached."""
    sample_L = segments.seq_idx(index_L.device)[index_L].long()
    sums = losses_L.new_zeros(segments.num_samples, dtype=torch.float32)
    counts = torch.zeros(segments.num_samples, dtype=torch.int64, device=index_L.device)
    sums = sums.index_add(0, sample_L, losses_L.detach())
    return sums, counts.index_add(0, sample_L, torch.ones_like(sample_L))


# ---------------------------------------------------------------------- the output of the model's forward


@dataclass
class PackedOutput(ModelOutput):
    """The output of an enabled model for packed input. B samples.

    `sample_losses` and `sample_targets` reach `Trainer.predict` as its predictions, one entry a sample.
    """

    loss: torch.Tensor | None = None
    """Scalar; None without labels."""
    logits: torch.Tensor | None = None
    """[B, S, V] for a padded batch, [1, T, V] for a row; on request (`output_logits=True`, `return_dict=False`) or
    without labels. With `logits_to_keep` of those columns alone."""
    hidden_states: tuple[torch.Tensor | None, ...] | None = None
    """[B, S, D] for a padded batch, [1, T, D] for a row, of the embeddings and of each layer; on request."""
    aux_loss: torch.Tensor | None = None
    """Scalar: the routers' load-balancing loss, where the model computes one."""
    z_loss: torch.Tensor | None = None
    """Scalar: the routers' z-loss, with `aux_loss` or if it is part of the loss (`StepConfig.z_loss_coef`)."""
    expert_counts: torch.Tensor | None = None
    """int64 [layers, E]: real tokens that each expert was sent; with `output_router_logits=True`."""
    router_logits: tuple[torch.Tensor, ...] | None = None
    """[R, E] of each layer that has experts, real tokens in row order; with `output_router_logits=True`."""
    sample_losses: torch.Tensor | None = None
    """float32 [B]: mean cross-entropy (nats) of each sample's targets."""
    sample_targets: torch.Tensor | None = None
    """int64 [B]: targets of each sample."""
    target_logprobs: torch.Tensor | None = None
    """float32 [L]: log-probability of each target, for `PackedStep`."""
    target_entropies: torch.Tensor | None = None
    """float32 [L]: entropy (nats) of the prediction of each target, for `PackedStep`, on request."""

    @classmethod
    @outside_graph
    def of(cls, result: StepResult, row: PackedRow, *, is_row: bool, routers: bool, targets: bool) -> PackedOutput:
        """Select what comes back.

        Args:
            result: the whole result.
            row: the row, of which there are a loss and losses of samples if it has labels.
            is_row: whether logits and hidden states come back as a row.
            routers: whether router statistics were requested by name; those kept for a loss alone do not come back.
            targets: whether values of each target come back: wrappers' hooks for the backward pass hang on outputs.
        """
        fields: dict[str, Any] = {
            "logits": result.row_logits if is_row else result.logits,
            "hidden_states": result.row_hidden_states if is_row else result.hidden_states,
            "aux_loss": result.aux_loss,
            "z_loss": result.z_loss,
        }
        if routers:
            fields |= {"expert_counts": result.expert_counts, "router_logits": result.router_logits}
        if row.shift_labels is not None:
            means = {"sample_losses": result.sample_losses, "sample_targets": result.sample_targets}
            fields |= {"loss": result.loss, **means}
        if targets:
            fields |= {"target_logprobs": result.target_logprobs, "target_entropies": result.target_entropies}
        return cls(**fields)

    def in_order(self, family: Family) -> tuple[Any, ...]:
        """In the order of the unmodified model, which may put the routers' loss before the logits."""
        if not family.has("experts") or not puts_aux_loss_first(family):
            return self.to_tuple()
        names = sorted(self.keys(), key=("loss", "aux_loss", *self.keys()).index)
        return tuple(self[name] for name in names)
