"""Run samples through a model: packed in one of six circumstances, alone, as a plain row, as a plain padded batch.

The circumstances are chosen so that any two choices that a user has occur together in one of them:

    name      computed by  input                slots       mode   precision  divided by      head       metadata
    gaps      PackedStep   a packed row         with gaps   eval   weights'   its targets     at once    yes
    row       the model    a packed row         no gaps     train  weights'   another tensor  in chunks  yes
    padded    PackedStep   a right-padded one   with gaps   train  weights'   another number  at once    yes
    left      the model    a left-padded one    the user's  eval   weights'   its targets     in chunks  no
    autocast  the model    a packed row         no gaps     train  bfloat16   its targets     at once    no
    tree      PackedStep   a row of a tree      no gaps     train  weights'   another number  in chunks  yes

`row` is what a training loop runs by default, and `autocast` what it runs with `bf16=True`. Metadata: lengths, grids
and counts on the host, which collators send along. A tree: what samples begin with alike is computed once; its samples
are others, which branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol, final

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from vlmpack.errors import FamilyError
from vlmpack.families.family import Family
from vlmpack.families.registry import family_of, is_classifier
from vlmpack.layout.batch import METADATA_KEY, Media, PaddedBatch
from vlmpack.layout.media import IMAGE
from vlmpack.layout.packing import pack
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments, SlotRule
from vlmpack.layout.sharing import share
from vlmpack.model.engine import StepConfig
from vlmpack.model.plain import find_model
from vlmpack.model.result import StepResult
from vlmpack.model.step import PackedStep
from vlmpack.testing.comparison import Outcome, backward, outcome_of, plain_output, take_gradients
from vlmpack.testing.samples import Sample, grids_of, media_of, num_targets, padded, sample_like

NO_GAPS = SlotRule()


@final
@dataclass(frozen=True, kw_only=True)
class ProbedModel:
    """A model and its family."""

    model: nn.Module
    """The model that was passed: perhaps a wrapper (PEFT) around the model itself."""
    core: Any
    """The model itself, with its head and its configuration."""
    family: Family
    """Its family."""

    @classmethod
    def of(cls, model: nn.Module) -> ProbedModel:
        """Look the family up. Raises FamilyError: it cannot be packed exactly, or the model is a classifier."""
        core = find_model(model)
        if is_classifier(core):
            raise FamilyError(
                f"the probe compares losses of language models, which a {type(core).__name__} has none of: probe the "
                "language model of this family, whose layers are the same"
            )
        return cls(model=model, core=core, family=family_of(core))

    @property
    def config(self) -> Any:
        """The Hugging Face configuration."""
        return self.core.config

    def runs_of(self, sample: Sample) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each run of tokens of a sample that see each other in both directions."""
        if (sees := self.family.sees) is None or not sees.enabled(self.family.text_config(self.config)):
            return ()
        return sees.of_sample(sample, self.family.media_types(sample["input_ids"], self.config))

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(self.core.parameters()).device

    @cached_property
    def dtype(self) -> torch.dtype:
        """Element type of the weights; of several, the least precise."""
        dtypes = {p.dtype for p in self.core.parameters() if p.is_floating_point()}
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def is_low(self) -> bool:
        """Return whether the weights are in low precision."""
        return self.dtype != torch.float32

    def with_its_pixels(self, samples: Sequence[Sample]) -> list[Sample]:
        """Cast pixels to the type of the vision part's weights, as users do: not every model of transformers casts them
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
    """Short: names of checks begin with it."""
    title: str
    """For people."""
    by_model: bool
    """Call the model with a dictionary, as trainers do; otherwise `PackedStep`."""
    padded: Literal["", "left", "right"] = ""
    """The padding side of a batch that the step packs itself; "": a packed row."""
    slots: Literal["none", "gaps", "user"] = "none"
    """Slots without gaps, with gaps, or those of the user's settings."""
    train: bool = False
    """Train mode, with its graph for the backward pass; dropout modules stay in eval mode."""
    autocast: bool = False
    """Mixed precision."""
    counted: bool = False
    """Divide by a `num_items_in_batch` that is not the number of the batch's targets."""
    chunked: bool = False
    """Send the labelled positions through the head in several chunks."""
    metadata: bool = True
    """Send the metadata on the host along."""
    shares: bool = False
    """Compute once what samples begin with alike."""

    def settings(self, user: StepConfig, samples: Sequence[Sample]) -> StepConfig:
        """Change the settings of the step; the fixed sizes of `user` were made for other rows."""
        rules = {
            "none": NO_GAPS,
            "gaps": rule_with_gaps(samples),
            "user": replace(user.slots, pad_to=None, max_segments=None),
        }
        chunk = max(total_targets(samples) * 2 // 5, 1) if self.chunked else user.head_chunk
        return replace(user, slots=rules[self.slots], head_chunk=chunk)

    def divisor(self, samples: Sequence[Sample]) -> int | None:
        """The `num_items_in_batch`; None: the samples' targets."""
        return 2 * total_targets(samples) + 3 if self.counted else None

    @contextmanager
    def computing(self, probed: ProbedModel, autocast: torch.dtype) -> Iterator[None]:
        """Set mode, graph and precision. Dropout stays off: a row draws other numbers than a sample.

        Args:
            probed: in eval mode, and again afterwards.
            autocast: element type of mixed precision, for circumstances that have it.
        """
        probed.model.train(self.train)
        for module in probed.model.modules():
            if isinstance(module, _DropoutNd):
                module.eval()
        try:
            with (
                torch.set_grad_enabled(self.train),
                torch.autocast(probed.device.type, dtype=autocast, enabled=self.autocast),
            ):
                yield
        finally:
            probed.model.eval()


GAPS = Circumstance(name="gaps", title="a packed row with gaps", by_model=False, slots="gaps")
ROW = Circumstance(name="row", title="a packed row, train mode", by_model=True, train=True, counted=True, chunked=True)
PADDED = Circumstance(
    name="padded",
    title="a right-padded batch, train mode",
    by_model=False,
    padded="right",
    slots="gaps",
    train=True,
    counted=True,
)
LEFT = Circumstance(
    name="left", title="a left-padded batch", by_model=True, padded="left", slots="user", chunked=True, metadata=False
)
AUTOCAST = Circumstance(
    name="autocast", title="a packed row, autocast", by_model=True, train=True, autocast=True, metadata=False
)
CIRCUMSTANCES = (GAPS, ROW, PADDED, LEFT, AUTOCAST)
TREE = Circumstance(
    name="tree",
    title="a row whose samples share prefixes, train mode",
    by_model=False,
    train=True,
    counted=True,
    chunked=True,
    shares=True,
)


def rule_with_gaps(samples: Sequence[Sample]) -> SlotRule:
    """Choose slots that leave room behind one sample at least, and at the end of the row."""
    lengths = [len(sample["input_ids"]) for sample in samples]
    multiple = next(m for m in (8, 12, 20, 2 * max(lengths)) if any(n % m for n in lengths))
    return SlotRule(multiple=multiple, row_multiple=4 * multiple)


def segments_of(samples: Sequence[Sample], rule: SlotRule = NO_GAPS) -> Segments:
    """Lay the samples out in a row."""
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
    """[L, V] of each sample."""
    loss: torch.Tensor
    """Scalar, as a trainer gets it."""
    step: StepResult | None = None
    """Of `PackedStep`."""
    sample_losses: torch.Tensor | None = None
    """[B]: mean loss of each sample; plain transformers returns none."""
    target_share: float = 1.0
    """The samples' targets, as a part of the divisor of the loss."""

    @property
    def mean_loss(self) -> torch.Tensor:
        """Scalar: the loss if it were divided by the samples' targets."""
        return self.loss / self.target_share

    def outcome(self, model: nn.Module, samples: Sequence[Sample]) -> Outcome:
        """Run the backward pass and collect the outcome; gradients of an aborted pass are discarded first."""
        take_gradients(model)
        backward(self.mean_loss)
        loss = float(self.mean_loss.detach())
        return outcome_of(model, samples, self.logits, loss, sample_losses=self.sample_losses)


class ForwardPass(Protocol):
    """A way to run samples through a model together."""

    @property
    def probed(self) -> ProbedModel:
        """The model."""
        ...

    def token_indices(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """int64 [L] of each sample: its tokens among those that the model computes."""
        ...

    def __call__(self, samples: Sequence[Sample]) -> ForwardResult:
        """Compute them."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class PackedPass:
    """vlmpack in one circumstance: a packed row, or a padded batch that the step packs."""

    probed: ProbedModel
    """The model, with packing enabled."""
    step: PackedStep
    """On the model, with the settings of the circumstance."""
    circumstance: Circumstance
    """Of packing and computing the samples."""
    rule: SlotRule
    """Of the row."""
    poison: int
    """Id of the token in every gap."""

    def segments(self, samples: Sequence[Sample]) -> Segments:
        """Of the row."""
        return segments_of(samples, self.rule)

    def computed(self, samples: Sequence[Sample]) -> Segments:
        """Of the row as the model computes it."""
        return self.segments(samples).without_gaps(self.rule)

    def token_indices(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """int64 [L] of each sample: its tokens in the row, in a tree's sequence along its path."""
        tree = self.row(samples).tree if self.circumstance.shares else None
        if tree is None:
            return [torch.arange(*span) for span in self.computed(samples).spans[: len(samples)]]
        nodes = torch.arange(tree.num_tokens).split([*tree.lengths])
        return [torch.cat([nodes[node] for node in [*tree.path(leaf)]]) for leaf in tree.leaves]

    def inputs(self, samples: Sequence[Sample]) -> PaddedBatch | PackedRow:
        """Build the input of the step."""
        metadata = self.circumstance.metadata
        return self._batch(samples, metadata=metadata) if self.circumstance.padded else self.row(samples, metadata)

    def row(self, samples: Sequence[Sample], metadata: bool = True) -> PackedRow:
        """The packed row, also of a batch that the step would pack itself; with or without metadata on the host."""
        row = pack(self._batch(samples, metadata=metadata), rule=self.rule, pad_token_id=self.poison)
        if not self.circumstance.shares:
            return row
        return share(row, min_shared=1, read_media=self.probed.family.media_reader(self.probed.config))

    def _batch(self, samples: Sequence[Sample], *, metadata: bool = True) -> PaddedBatch:
        return padded(samples, self.circumstance.padded or "right", metadata=metadata)

    def __call__(
        self, samples: Sequence[Sample], *, router_losses: bool = False, by_step: bool = False
    ) -> ForwardResult:
        """Compute samples; `router_losses`: with the load-balancing loss; `by_step`: always by `PackedStep`."""
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
            loss=result.loss,
            step=result if isinstance(result, StepResult) else None,
            sample_losses=result.sample_losses,
            target_share=1.0 if divisor is None else total_targets(samples) / divisor,
        )

    def _call_model(self, samples: Sequence[Sample], divisor: int | None, settings: dict[str, bool]) -> Any:
        inputs = self.inputs(samples).to(self.probed.device).to_hf()
        if not self.circumstance.metadata:
            inputs.pop(METADATA_KEY, None)
        if divisor is not None:
            inputs["num_items_in_batch"] = torch.tensor(divisor, device=self.probed.device)
        return self.step.model(**inputs, output_logits=True, **settings)

    def _split(self, logits: torch.Tensor, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """[B, S, V] or [1, T, V] to [L, V] of each sample."""
        if not self.circumstance.padded:
            return [logits[0, start:stop] for start, stop in self.segments(samples).spans]
        is_left = self.circumstance.padded == "left"
        rows = zip(logits, (len(sample["input_ids"]) for sample in samples), strict=True)
        return [row[-length:] if is_left else row[:length] for row, length in rows]


def frames_as_images(sample: Sample) -> Sample:
    """The sample with the frames of its videos as images, if its family's videos have the placeholder of images.

    To the model that is the same, and its own code takes images and videos in no other way together.
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
    """The samples one after the other through the unmodified model, with positions that restart and nothing else."""

    probed: ProbedModel
    """Without packing."""
    rows: int
    """Rows of position ids: 3 (time, height, width) or 4 (the text row first); of a text model 1."""
    use_cache: bool | None = None
    """None: the configuration's, which is on by default."""

    @property
    def name(self) -> str:
        """For people."""
        cache = {None: "", True: ", use_cache on", False: ", use_cache off"}[self.use_cache]
        shape = "[1, T]" if self.rows == 1 else f"[{self.rows}, 1, T]"
        return f"one row, {shape} positions{cache}"

    def token_indices(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """int64 [L] of each sample: its tokens in the row."""
        return [torch.arange(*span) for span in segments_of(samples).spans]

    def __call__(self, samples: Sequence[Sample]) -> ForwardResult:
        """Compute the row."""
        samples = [*map(frames_as_images, samples)]
        tokens = {name: torch.cat([sample[name] for sample in samples])[None] for name in ("input_ids", "labels")}
        inputs = {**tokens, **media_of(samples).to_hf()}
        family, segments = self.probed.family, segments_of(samples)
        types = family.media_types(inputs["input_ids"], self.probed.config)
        types = types.clamp(max=IMAGE) if family.videos_as_images else types
        row = PackedRow(
            input_ids=inputs["input_ids"],
            segments=segments,
            mm_token_type_ids=types,
            media=Media.from_hf(inputs, names=family.media),
        )
        table = family.media_of_row(row, self.probed.config)
        positions = family.positions(table, segments, config=self.probed.config, device=types.device)
        if family.token_types is not None:
            inputs[family.token_types] = types
        inputs |= {name: torch.cat([sample[name] for sample in samples])[None] for name in family.token_columns}
        inputs |= family.expert_types_of(inputs["input_ids"], self.probed.config)
        has_axes = family.positions_rule.axes == 3
        inputs["position_ids"] = positions[-self.rows :] if has_axes else family.rotary_ids(positions)
        output = plain_output(self.probed.model, inputs, use_cache=self.use_cache)
        return ForwardResult(logits=[output.logits[0, a:b] for a, b in segments.spans], loss=output.loss)


@final
@dataclass(frozen=True, kw_only=True)
class PlainPaddedPass:
    """The right-padded batch and its 2D mask through the unmodified model: exact, and full of padding."""

    probed: ProbedModel
    """Without packing."""
    name: str = "a padded batch, 2D mask"
    """For people."""

    def token_indices(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """int64 [L] of each sample: its tokens in the batch, row after row."""
        lengths = [len(sample["input_ids"]) for sample in samples]
        return [row * max(lengths) + torch.arange(length) for row, length in enumerate(lengths)]

    def __call__(self, samples: Sequence[Sample]) -> ForwardResult:
        """Compute the batch, without the load-balancing loss."""
        return self._compute(samples)[0]

    def with_router_losses(self, samples: Sequence[Sample]) -> tuple[ForwardResult, torch.Tensor | None]:
        """Compute the batch with the routers' part in its loss, and the load-balancing loss over the real tokens.

        None: this version of transformers computes no load-balancing loss.
        """
        result, output = self._compute(samples, output_router_logits=True)
        return result, output.get("aux_loss")

    def _compute(self, samples: Sequence[Sample], **settings: bool) -> tuple[ForwardResult, Any]:
        samples = [*map(frames_as_images, samples)]
        inputs = {name: x for name, x in padded(samples).to_hf().items() if isinstance(x, torch.Tensor)}
        output = plain_output(self.probed.model, inputs, **settings)
        logits = [row[: len(sample["input_ids"])] for row, sample in zip(output.logits, samples, strict=True)]
        return ForwardResult(logits=logits, loss=output.loss), output
