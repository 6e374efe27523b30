"""The result of a packed step (sums and counts per sample, and the work done) and the model's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, final

import torch
from transformers.utils.generic import ModelOutput

from vlmpack.families.family import Family
from vlmpack.layout.device import on_host, outside_graph
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import PackedRow, unpack
from vlmpack.layout.segments import Segments
from vlmpack.model.mechanisms.experts import RouterStatistics, puts_aux_loss_first


@final
@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a step, counted on the host. Equal outputs alone do not prove that padding was skipped."""

    real_tokens: int
    """Real tokens of the samples."""
    physical_tokens: int
    """Tokens that went through the model: the width of the row, or of its prefix tree."""
    attended_pairs: int
    """Query-key pairs of causal attention in one layer: the sum of n (n + 1) / 2 over the segments, or the number of
    pairs that sparse attention selects. For a prefix tree, the pairs along each token's path. If layers differ, the
    layer with the most pairs."""
    vision_patches: int
    """Patches that went through the vision tower."""
    delta_tokens: int = 0
    """Tokens that each gated delta layer computed, including the padding of its buckets or the zeros between samples;
    0: there are no such layers."""
    conv_tokens: int = 0
    """Tokens that each short convolution computed, including the zeros between samples or the padding of its buckets;
    0: there are no such layers."""
    window_pairs: int = 0
    """Query-key pairs in one layer with a sliding window or chunked attention; 0: there are no such layers."""
    audio_frames: int = 0
    """Log-mel frames that went through the audio tower, without padding; 0: there is no audio."""

    @classmethod
    def total(cls, works: Sequence[Work], real_tokens: int) -> Work:
        """Add up the work of a row's pieces. `real_tokens`: of the row."""
        if len(works) == 1:
            return works[0]
        sums = {each.name: sum(getattr(work, each.name) for work in works) for each in fields(cls)}
        return cls(**{**sums, "real_tokens": real_tokens})


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """Loss and per-sample results of one row. B samples, T row tokens, L targets."""

    loss: torch.Tensor
    """Scalar: `loss_sum` divided by `num_items_in_batch` (by this row's targets if it was not given), plus
    `router_aux_loss_coef * aux_loss` if there is one and `z_loss_coef * z_loss`; these two are not divided."""
    loss_sum: torch.Tensor
    """Scalar: cross-entropy, or the loss of `Distillation`, in nats times weight, summed over the targets."""
    num_targets: int
    """L: number of targets in the row."""
    sample_loss_sums: torch.Tensor
    """float32 [B]: the same summed over each sample's targets, detached."""
    sample_targets: torch.Tensor
    """int64 [B]: number of targets of each sample."""
    target_logprobs: torch.Tensor
    """float32 [L]: log-probability of each target in row order, from logits divided by the temperature. Has a
    gradient."""
    target_index: torch.Tensor
    """int64 [L]: position in the row that predicts each target."""
    segments: Segments
    """The row's boundaries."""
    work: Work
    """The work done for the row."""
    target_entropies: torch.Tensor | None = None
    """float32 [L]: entropy (nats) of the prediction of each target. Has a gradient. On request."""
    topk_logprobs: torch.Tensor | None = None
    """float32 [L, K + 1]: log-probabilities of the teacher's `topk_ids` for each target (of the ids below K where it
    has no teacher), and at the end of all other ids together. Has a gradient. None: the row has no `topk_ids`."""
    row_logits: torch.Tensor | None = None
    """[1, T, V] on request."""
    row_hidden_states: tuple[torch.Tensor | None, ...] | None = None
    """[1, T, D] of the embeddings and of each layer, on request; None for layers that were not chosen."""
    computed_last_hidden: torch.Tensor | None = None
    """[1, T, D]: the head's input, on request; with a `tree` [1, t, D], in the order of its t tokens."""
    tree: PrefixTree | None = None
    """The row's prefix tree; None: it has none."""
    routers: RouterStatistics | None = None
    """Router statistics over the real tokens; None: not requested, or no experts."""
    width: int | None = None
    """S of the padded batch that was packed; None: the input was already a row."""
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
        """Scalar: the routers' load-balancing loss; None if not requested or there are no experts."""
        return None if self.routers is None else self.routers.aux_loss

    @property
    def z_loss(self) -> torch.Tensor | None:
        """Scalar: the routers' z-loss; None: no router statistics."""
        return None if self.routers is None else self.routers.z_loss

    @property
    def expert_counts(self) -> torch.Tensor | None:
        """int64 [layers, E]: real tokens sent to each expert; None: no router statistics."""
        return None if self.routers is None else self.routers.expert_counts

    @property
    def router_logits(self) -> tuple[torch.Tensor, ...] | None:
        """[R, E] for each layer with experts, R real tokens in row order; None: no router statistics."""
        return None if self.routers is None else self.routers.logits

    @property
    def sample_losses(self) -> torch.Tensor:
        """float32 [B]: mean loss of each sample, `sample_loss_sums` / `sample_targets`; 0 for a sample without any."""
        return self.sample_loss_sums / self.sample_targets.clamp(min=1)

    @property
    def logprobs(self) -> torch.Tensor:
        """float32 [B, S]: log-probability of the target that each position predicts; 0 where there is none."""
        return self._by_position(self.target_logprobs)

    @property
    def entropies(self) -> torch.Tensor | None:
        """float32 [B, S]: entropy (nats) of each position's prediction; 0 where it has no target; None unless
        requested."""
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
    def row_last_hidden(self) -> torch.Tensor | None:
        """[1, T, D]: the head's input of each sample in full; None unless requested."""
        hidden = self.computed_last_hidden
        return hidden if hidden is None or self.tree is None else hidden[:, self.tree.place(hidden.device)]

    @property
    def last_hidden(self) -> torch.Tensor | None:
        """[B, S, D]: `row_last_hidden` as a padded batch, 0 on padding; None unless requested."""
        return self._padded(self.row_last_hidden)

    @outside_graph
    def kept_logits(self, keep: int | torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return [B, K, V]: logits of these columns of the padded batch (a number: the last ones), 0 on padding."""
        columns = slice(-keep, None) if isinstance(keep, int) else keep
        if self.logits is not None:  # already computed if ranks share the row
            return self.logits[:, columns]
        assert self.last_hidden is not None
        return head(self.last_hidden[:, columns])

    def with_hooks(self, output: Any) -> StepResult:
        """Use the tensors that the model's wrappers returned: their backward hooks are attached to these."""
        loss = self.loss if output.loss is None else output.loss
        return replace(self, loss=loss, **{name: getattr(output, name) for name in OF_TARGETS})

    def _by_position(self, values_L: torch.Tensor) -> torch.Tensor:
        """Return [B, S]: each target's value at the position that predicts it, 0 elsewhere."""
        row = values_L.new_zeros(1, self.segments.total)
        row = row.index_put((torch.zeros_like(self.target_index), self.target_index), values_L)
        return unpack(row, self.segments, width=self.width, offsets=self.offsets)

    def _padded(self, row: torch.Tensor | None) -> torch.Tensor | None:
        return None if row is None else unpack(row, self.segments, width=self.width, offsets=self.offsets)


def _shown(loss: torch.Tensor) -> str:
    """Format a loss without reading it from an accelerator."""
    if not on_host(loss):
        return f"on {loss.device}"
    try:
        return f"{loss.item():.4f}"
    except RuntimeError:  # a tensor without a value: inside a functional transform, or a fake tensor
        return "not known"


def weighted(losses_L: torch.Tensor, row: PackedRow, index_L: torch.Tensor) -> torch.Tensor:
    """Return float32 [L]: the losses of the targets at `index_L`, times the row's weights if it has any."""
    return losses_L if row.shift_weights is None else losses_L * row.shift_weights[0].float().index_select(0, index_L)


def target_sums(
    logprobs_L: torch.Tensor, row: PackedRow, index_L: torch.Tensor, *, losses_L: torch.Tensor | None = None
) -> dict[str, Any]:
    """Return the fields of a `StepResult` that follow from the log-probabilities of the targets at `index_L`, and from
    their losses before weights; None: cross-entropies."""
    losses_L = weighted(-logprobs_L if losses_L is None else losses_L, row, index_L)
    sums, counts = sums_by_sample(losses_L, index_L, row.segments)
    return {
        "loss_sum": losses_L.sum(),
        "num_targets": index_L.numel(),
        "sample_loss_sums": sums,
        "sample_targets": counts,
        "target_logprobs": logprobs_L,
        "target_index": index_L,
        "segments": row.segments,
    }


def sums_by_sample(
    losses_L: torch.Tensor, index_L: torch.Tensor, segments: Segments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss sums float32 [B], target counts int64 [B]), one entry per sample, detached."""
    sample_L = segments.seq_idx(index_L.device)[index_L].long()
    sums = losses_L.new_zeros(segments.num_samples, dtype=torch.float32)
    counts = torch.zeros(segments.num_samples, dtype=torch.int64, device=index_L.device)
    sums = sums.index_add(0, sample_L, losses_L.detach())
    return sums, counts.index_add(0, sample_L, torch.ones_like(sample_L))


# ---------------------------------------------------------------------- the output of the model's forward

OF_TARGETS = ("target_logprobs", "target_entropies", "topk_logprobs")
"""Fields with an entry for each target, and with a gradient."""


@dataclass
class PackedOutput(ModelOutput):
    """The output of an enabled model for packed input. B samples.

    `Trainer.predict` returns `sample_losses` and `sample_targets` as its predictions, one entry per sample.
    """

    loss: torch.Tensor | None = None
    """Scalar; None without labels."""
    logits: torch.Tensor | None = None
    """[B, S, V] for a padded batch, [1, T, V] for a row: only without labels or on request (`output_logits=True`, or
    `return_dict=False` for a padded batch). With `logits_to_keep`, only these columns."""
    hidden_states: tuple[torch.Tensor | None, ...] | None = None
    """[B, S, D] for a padded batch, [1, T, D] for a row, for the embeddings and each layer; on request."""
    aux_loss: torch.Tensor | None = None
    """Scalar: the routers' load-balancing loss, if the model computes one."""
    z_loss: torch.Tensor | None = None
    """Scalar: the routers' z-loss, with `aux_loss` or if it is part of the loss (`StepConfig.z_loss_coef`)."""
    expert_counts: torch.Tensor | None = None
    """int64 [layers, E]: real tokens sent to each expert; with `output_router_logits=True`."""
    router_logits: tuple[torch.Tensor, ...] | None = None
    """[R, E] for each layer with experts, R real tokens in row order; with `output_router_logits=True`."""
    sample_losses: torch.Tensor | None = None
    """float32 [B]: mean loss (nats) of each sample's targets."""
    sample_targets: torch.Tensor | None = None
    """int64 [B]: number of targets of each sample."""
    target_logprobs: torch.Tensor | None = None
    """float32 [L]: log-probability of each target, for `PackedStep`."""
    target_entropies: torch.Tensor | None = None
    """float32 [L]: entropy (nats) of the prediction of each target, for `PackedStep`, on request."""
    topk_logprobs: torch.Tensor | None = None
    """float32 [L, K + 1]: log-probabilities of a teacher's ids and of the rest, for `PackedStep`, with `topk_ids`."""

    @classmethod
    @outside_graph
    def of(cls, result: StepResult, row: PackedRow, *, is_row: bool, routers: bool, targets: bool) -> PackedOutput:
        """Select the outputs to return.

        Args:
            result: the whole result.
            row: the row; if it has labels, the loss and the samples' losses are returned.
            is_row: whether to return logits and hidden states as a row.
            routers: whether router statistics were requested by name; otherwise the layers' logits and counts, which
                the loss may need, are not returned.
            targets: whether to return the values of each target, so that wrappers can attach backward hooks to them.
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
            fields |= {name: getattr(result, name) for name in OF_TARGETS}
        return cls(**fields)

    def in_order(self, family: Family) -> tuple[Any, ...]:
        """Return a tuple in the unmodified model's order, which may put the routers' loss before the logits."""
        if not family.has("experts") or not puts_aux_loss_first(family):
            return self.to_tuple()
        names = sorted(self.keys(), key=("loss", "aux_loss", *self.keys()).index)
        return tuple(self[name] for name in names)
