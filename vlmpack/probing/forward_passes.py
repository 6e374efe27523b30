"""Run samples through a model: packed in one of six circumstances, as a plain row, or as a plain padded batch.

The circumstances are chosen so that any two settings that a user can choose occur together in one of them:

    name      called       input                slots       mode   precision  divided by      head       metadata
    gaps      PackedStep   a packed row         with gaps   eval   weights'   its targets     at once    yes
    row       the model    a packed row         no gaps     train  weights'   another tensor  in chunks  yes
    padded    PackedStep   right-padded batch   with gaps   train  weights'   another number  at once    yes
    left      the model    left-padded batch    the user's  eval   weights'   its targets     in chunks  no
    autocast  the model    a packed row         no gaps     train  bfloat16   its targets     at once    no
    tree      PackedStep   a row of a tree      no gaps     train  weights'   another number  in chunks  yes

A training loop runs `row` by default, and `autocast` with `bf16=True`. Slots: padded lengths of samples in the row.
Metadata: lengths, grids and counts on the host, which collators add to a batch. Tree: samples share prefixes, and each
prefix is computed once; this circumstance has its own samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vlmpack.context_parallel.mesh import Parallel, gathered, mesh_of
from vlmpack.errors import FamilyError
from vlmpack.families.family import Family
from vlmpack.families.media import media_of_row, media_reader
from vlmpack.families.registry import family_of, has_lm_head
from vlmpack.layout.batch import METADATA_KEY, PaddedBatch
from vlmpack.layout.media import IMAGE
from vlmpack.layout.row import PackedRow, pack
from vlmpack.layout.segments import NO_PADDING, Segments, SlotRule
from vlmpack.layout.sharing import share
from vlmpack.model.engine import StepConfig, stored_state
from vlmpack.model.plain import find_model
from vlmpack.model.result import StepResult
from vlmpack.model.step import PackedStep
from vlmpack.testing.comparison import Outcome, backward, local, outcome_of, plain_output, take_gradients
from vlmpack.testing.samples import Sample, grids_of, num_targets, padded, sample_like, word_ids


@final
@dataclass(frozen=True, kw_only=True)
class ProbedModel:
    """A model and its family."""

    model: nn.Module
    """The model that the user passed; may be a wrapper (PEFT) around the Hugging Face model."""
    core: Any
    """The Hugging Face model, with its head and its configuration."""
    family: Family
    """The model's family."""
    parallel: Parallel | None
    """The ranks that packing was enabled with; None: packing is not enabled, or the mesh of the model says which."""

    @classmethod
    def of(cls, model: nn.Module) -> ProbedModel:
        """Find the Hugging Face model, its family, and the ranks that packing was enabled with.

        Raises:
            FamilyError: the family cannot be packed exactly, or the model has no language-model head.
        """
        core = find_model(model)
        if not has_lm_head(core):
            raise FamilyError(
                f"the probe compares losses of language models, which a {type(core).__name__} has none of: probe the "
                "language model of this family, whose layers are the same"
            )
        parallel = None if (state := stored_state(core)) is None else state.parallel
        return cls(model=model, core=core, family=family_of(core), parallel=parallel)

    @property
    def config(self) -> Any:
        """The Hugging Face configuration."""
        return self.core.config

    @property
    def is_divided(self) -> bool:
        """Whether the model is on a mesh of transformers."""
        return mesh_of(self.core) is not None

    @property
    def needs_all_ranks(self) -> bool:
        """Whether ranks compute layers, rows or images together. All of them then run the same samples."""
        return self.is_divided or (self.parallel is not None and self.parallel.vision.collectives.size > 1)

    def worst_of_ranks(self, errors: Mapping[str, float]) -> dict[str, float]:
        """Return the largest error of any rank by name, so that all of them decide alike what to run next."""
        worst: dict[str, float] = {}
        for each in gathered(errors) if self.needs_all_ranks else [errors]:
            worst |= {name: max(error, worst.get(name, error)) for name, error in each.items()}
        return worst

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.core.parameters()).device

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights; the least precise one if they have several."""
        dtypes = {p.dtype for p in self.core.parameters() if p.is_floating_point()}
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def is_low(self) -> bool:
        """Whether the weights are in low precision."""
        return self.dtype != torch.float32

    def with_its_pixels(self, samples: Sequence[Sample]) -> list[Sample]:
        """Cast pixels to the dtype of the vision part's weights, as users do: not every transformers model does it
        itself."""
        family = self.family
        part = self.core.get_submodule(family.vision_path) if family.vision_path else self.core
        dtype = next(p.dtype for p in part.parameters() if p.is_floating_point())
        names = [*family.pixel_names] if family.has_vision else []
        return [sample_like(x, {**x, **{name: x[name].to(dtype) for name in names if name in x}}) for x in samples]


@final
@dataclass(frozen=True, kw_only=True)
class Circumstance:
    """One way of packing and computing samples."""

    name: str
    """Short name; names of checks begin with it."""
    title: str
    """Readable description."""
    by_model: bool = False
    """Call the model with a dictionary, as trainers do, instead of `PackedStep`."""
    padded: Literal["", "left", "right"] = ""
    """The padding side of a batch that the step packs itself; "": a packed row."""
    slots: Literal["none", "gaps", "user"] = "none"
    """Padded lengths: no gaps, gaps, or the user's settings."""
    train: bool = False
    """Train mode, with an autograd graph; dropout modules stay in eval mode."""
    autocast: bool = False
    """Compute in mixed precision."""
    counted: bool = False
    """Divide the loss by a `num_items_in_batch` that differs from the number of targets."""
    chunked: bool = False
    """Compute the head for the labeled positions in several chunks."""
    metadata: bool = True
    """Add the metadata on the host to the input."""
    shares: bool = False
    """Compute shared prefixes once."""

    def settings(self, user: StepConfig, samples: Sequence[Sample]) -> StepConfig:
        """Adapt the user's settings of the step to the circumstance, without fixed sizes made for other rows."""
        users = replace(user.slots, pad_to=None, max_segments=None)
        rules = {"none": NO_PADDING, "gaps": rule_with_gaps(samples), "user": users}
        chunk = max(total_targets(samples) * 2 // 5, 1) if self.chunked else user.head_chunk
        return replace(user, slots=rules[self.slots], head_chunk=chunk)

    def divisor(self, samples: Sequence[Sample]) -> int | None:
        """Return `num_items_in_batch`; None: the loss is divided by the samples' targets."""
        return 2 * total_targets(samples) + 3 if self.counted else None


GAPS = Circumstance(name="gaps", title="a packed row with gaps", slots="gaps")
ROW = Circumstance(name="row", title="a packed row, train mode", by_model=True, train=True, counted=True, chunked=True)
PADDED = Circumstance(
    name="padded", title="a right-padded batch, train mode", padded="right", slots="gaps", train=True, counted=True
)
LEFT = Circumstance(
    name="left", title="a left-padded batch", by_model=True, padded="left", slots="user", chunked=True, metadata=False
)
AUTOCAST = Circumstance(
    name="autocast", title="a packed row, autocast", by_model=True, train=True, autocast=True, metadata=False
)
CIRCUMSTANCES = (GAPS, ROW, PADDED, LEFT, AUTOCAST)
PREFIXES = "a row whose samples share prefixes, train mode"
TREE = Circumstance(name="tree", title=PREFIXES, train=True, counted=True, chunked=True, shares=True)


def rule_with_gaps(samples: Sequence[Sample]) -> SlotRule:
    """Choose a rule for padded lengths that leaves a gap after at least one sample, and at the end of the row."""
    lengths = [len(sample["input_ids"]) for sample in samples]
    multiple = next(m for m in (8, 12, 20, 2 * max(lengths)) if any(n % m for n in lengths))
    return SlotRule(multiple=multiple, row_multiple=4 * multiple)


def segments_of(samples: Sequence[Sample], rule: SlotRule = NO_PADDING) -> Segments:
    """Return the segments of the samples in a row."""
    return Segments.from_lengths([len(sample["input_ids"]) for sample in samples], rule)


def total_targets(samples: Sequence[Sample]) -> int:
    """Count the targets of all samples."""
    return sum(map(num_targets, samples))


# ---------------------------------------------------------------------- forward passes


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardResult:
    """The result of one forward pass."""

    logits: list[torch.Tensor]
    """Logits of each sample: [L, V]."""
    loss: torch.Tensor
    """Scalar loss, divided by the number of the samples' targets."""
    step: StepResult | None = None
    """The result of `PackedStep`; None: the pass did not use it."""
    sample_losses: torch.Tensor | None = None
    """Mean loss of each sample, [B]; None: plain transformers does not return it."""
    aux_loss: torch.Tensor | None = None
    """Scalar load-balancing loss; None: not asked for, or this version of transformers computes none."""

    def outcome(
        self, model: nn.Module, samples: Sequence[Sample], *, backward: Callable[[torch.Tensor], None] = backward
    ) -> Outcome:
        """Run the backward pass and collect the outcome. Gradients left over from an aborted pass are discarded."""
        take_gradients(model)
        backward(self.loss)
        return outcome_of(model, samples, self.logits, float(self.loss.detach()), sample_losses=self.sample_losses)


@final
@dataclass(frozen=True, kw_only=True)
class PackedPass:
    """A pass of vlmpack in one circumstance: a packed row, or a padded batch that the step packs."""

    probed: ProbedModel
    """The model, with packing enabled."""
    step: PackedStep
    """A step on the model, with the settings of the circumstance."""
    circumstance: Circumstance
    """How the samples are packed and computed."""
    rule: SlotRule
    """The rule for padded lengths in the row."""
    parallel: Parallel | None
    """The ranks that compute the pass together; None: this rank alone."""

    @property
    def context_ranks(self) -> int:
        """Number of ranks that share the row."""
        return 1 if self.parallel is None else self.parallel.ranks

    @property
    def gets_features(self) -> bool:
        """Whether the model gets features that ranks compute together, in place of pixels."""
        return self.parallel is not None and self.parallel.same_calls

    def segments(self, samples: Sequence[Sample]) -> Segments:
        """Return the segments of the row."""
        return segments_of(samples, self.rule)

    def computed(self, samples: Sequence[Sample]) -> Segments:
        """Return the segments of the row that the model computes, without the gaps that the step removes."""
        return self.segments(samples).without_gaps(self.rule)

    def token_indices(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """Return the indices, int64 [L], of each sample's tokens in the row; in a tree, along the sample's path.

        If ranks share the row, in this rank's part of it; -1: another rank has the token.
        """
        tree = self.row(samples).tree if self.circumstance.shares else None
        if tree is None:
            computed, rank = self.computed(samples), 0 if self.parallel is None else self.parallel.collectives.rank
            width = computed.total // self.context_ranks
            indices = [torch.arange(*span) - rank * width for span in computed.spans[: len(samples)]]
            return [index.where((index >= 0) & (index < width), -1) for index in indices]
        nodes = torch.arange(tree.num_tokens).split([*tree.lengths])
        return [torch.cat([nodes[node] for node in [*tree.path(leaf)]]) for leaf in tree.leaves]

    def inputs(self, samples: Sequence[Sample]) -> PaddedBatch | PackedRow:
        """Build the input of the step."""
        side, metadata = self.circumstance.padded, self.circumstance.metadata
        return padded(samples, side, metadata=metadata) if side else self.row(samples, metadata)

    def row(self, samples: Sequence[Sample], metadata: bool = True) -> PackedRow:
        """Pack the samples into a row, in padded circumstances via the batch, with or without metadata on the host."""
        batch = padded(samples, self.circumstance.padded or "right", metadata=metadata)
        poison = word_ids(self.probed.config).start  # no result may depend on what fills the gaps
        row = pack(batch, rule=self.rule, pad_token_id=poison)
        if not self.circumstance.shares:
            return row
        return share(row, min_shared=1, read_media=media_reader(self.probed.family, self.probed.config))

    def __call__(
        self, samples: Sequence[Sample], *, router_losses: bool = False, by_step: bool = False
    ) -> ForwardResult:
        """Run the samples through the model.

        `router_losses`: also compute the load-balancing loss. `by_step`: use `PackedStep` in every circumstance.
        """
        divisor = self.circumstance.divisor(samples)
        settings = {"output_router_logits": router_losses} if self.probed.family.has("experts") else {}
        if by_step or not self.circumstance.by_model:
            result = self.step(self.inputs(samples), logits=True, num_items_in_batch=divisor, **settings)
            logits = result.logits if self.circumstance.padded else result.row_logits
        else:
            result = self._call_model(samples, divisor, settings)
            logits = result.logits
        assert logits is not None
        return ForwardResult(
            logits=self._split(logits, samples),
            loss=result.loss if divisor is None else result.loss * (divisor / total_targets(samples)),
            step=result if isinstance(result, StepResult) else None,
            sample_losses=result.sample_losses,
        )

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss, with what other ranks compute of them. All ranks run the same samples."""
        backward(loss)
        if self.parallel is None or (group := self.parallel.vision.collectives).size == 1:
            return
        for p in self.probed.model.parameters():
            if p.grad is None:
                continue
            averaged = {*p.device_mesh.mesh.flatten().tolist()} if isinstance(p, DTensor) else set[int]()
            if averaged.issuperset(group.members):  # by FSDP2
                local(p.grad).mul_(self.context_ranks)
                continue
            over = self.parallel.collectives if len(averaged & {*group.members}) > 1 else group
            over.all_reduce_(local(p.grad), "probe")
            local(p.grad).div_(over.size // self.context_ranks)

    def _call_model(self, samples: Sequence[Sample], divisor: int | None, settings: dict[str, bool]) -> Any:
        inputs = self.inputs(samples).to(self.probed.device).to_hf()
        if not self.circumstance.metadata:
            inputs.pop(METADATA_KEY, None)
        if divisor is not None:
            inputs["num_items_in_batch"] = torch.tensor(divisor, device=self.probed.device)
        return self.step.model(**inputs, output_logits=True, **settings)

    def _split(self, logits: torch.Tensor, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """Split logits [B, S, V] or [1, T, V] into [L, V] of each sample."""
        if not self.circumstance.padded:
            return [logits[0, start:stop] for start, stop in self.segments(samples).spans]
        is_left = self.circumstance.padded == "left"
        rows = zip(logits, (len(sample["input_ids"]) for sample in samples), strict=True)
        return [row[-length:] if is_left else row[:length] for row, length in rows]


def frames_as_images(sample: Sample) -> Sample:
    """Turn the frames of a sample's videos into images, if the family's videos use the image placeholder.

    The model computes the same, and its own code has no other way to take images and videos together.
    """
    grids = grids_of(sample, "video")
    if not grids or sample.family is None or not sample.family.videos_as_images:
        return sample
    others = {name: tensor for name, tensor in sample.items() if name not in sample.family.media}
    others["mm_token_type_ids"] = sample["mm_token_type_ids"].clamp(max=IMAGE)
    frames = torch.tensor([(1, rows, columns) for count, rows, columns in grids for _ in range(count)])
    return sample_like(sample, {**others, "pixel_values": sample["pixel_values_videos"], "image_grid_thw": frames})


@final
@dataclass(frozen=True, kw_only=True)
class PlainRowPass:
    """A concatenated row through the unmodified model, where only restarting positions separate the samples."""

    probed: ProbedModel
    """The model, without packing."""
    rows: int
    """Rows of position ids: 3 (time, height, width) or 4 (text positions first); 1 in a text model."""
    use_cache: bool | None = None
    """None: the configuration's setting, on by default."""

    @property
    def name(self) -> str:
        """Readable description of the input."""
        return f"one row, {'[1, T]' if self.rows == 1 else f'[{self.rows}, 1, T]'} positions"

    def token_indices(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """Return the indices, int64 [L], of each sample's tokens in the row."""
        return [torch.arange(*span) for span in segments_of(samples).spans]

    def __call__(self, samples: Sequence[Sample]) -> ForwardResult:
        """Run the row through the model."""
        samples, family = [*map(frames_as_images, samples)], self.probed.family
        row, config = pack(padded(samples, metadata=False)), self.probed.config
        labels = torch.cat([sample["labels"] for sample in samples])[None]
        inputs = {"input_ids": row.input_ids, "labels": labels, **row.extras, **row.media.to_hf()}
        if family.token_types is not None:
            inputs[family.token_types] = family.types_of_row(row, config)
        positions = family.positions(media_of_row(family, row, config), row.segments, config=config)
        has_axes = family.positions_rule.axes == 3
        inputs["position_ids"] = positions[-self.rows :] if has_axes else family.rotary_ids(positions)
        output = plain_output(self.probed.model, inputs, use_cache=self.use_cache)
        return ForwardResult(logits=[output.logits[0, a:b] for a, b in row.segments.spans], loss=output.loss)


@final
@dataclass(frozen=True, kw_only=True)
class PlainPaddedPass:
    """A right-padded batch with its 2D mask through the unmodified model: exact, but with padding."""

    probed: ProbedModel
    """The model, without packing."""
    name: str = "a padded batch, 2D mask"
    """Readable description of the input."""

    def token_indices(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """Return the indices, int64 [L], of each sample's tokens in the flattened batch."""
        lengths = [len(sample["input_ids"]) for sample in samples]
        return [row * max(lengths) + torch.arange(length) for row, length in enumerate(lengths)]

    def __call__(self, samples: Sequence[Sample], *, router_losses: bool = False) -> ForwardResult:
        """Run the batch through the model; `router_losses`: add the load-balancing loss over the real tokens."""
        samples = [*map(frames_as_images, samples)]
        inputs = {name: x for name, x in padded(samples).to_hf().items() if isinstance(x, torch.Tensor)}
        settings = {"output_router_logits": True} if router_losses else {}
        output = plain_output(self.probed.model, inputs, **settings)
        logits = [row[: len(sample["input_ids"])] for row, sample in zip(output.logits, samples, strict=True)]
        return ForwardResult(logits=logits, loss=output.loss, aux_loss=output.get("aux_loss"))


ForwardPass = PackedPass | PlainRowPass | PlainPaddedPass
"""A way to run samples through a model together."""
