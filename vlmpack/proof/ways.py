"""The ways to compute several samples in one go: vlmpack's two, and what people do with plain transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

import torch
from torch import nn

from vlmpack.families import Family
from vlmpack.layout import METADATA_KEY, PackedRow, PaddedBatch, Segments, SlotRule, pack
from vlmpack.model import PackedStep, StepResult
from vlmpack.proof.circumstances import TIGHT, Circumstance
from vlmpack.proof.outcome import Outcome, backward, outcome_of, take_gradients, target_losses, without_routers
from vlmpack.proof.samples import ProbeSample, batch_of, joined_media, offsets_of


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Pass:
    """One forward pass."""

    logits: list[torch.Tensor]
    """[L, V] of each sample."""
    loss: torch.Tensor
    """Scalar: what a trainer would be given."""
    result: StepResult | None = None
    """Of `PackedStep`: all that it gave back."""
    sample_losses: torch.Tensor | None = None
    """Of vlmpack's ways, [B]: each sample's own loss."""
    sample_targets: torch.Tensor | None = None
    """Of vlmpack's ways, [B]: how many targets each sample has."""
    share: float = 1.0
    """The samples' own targets, as a part of those that the loss was divided by."""

    @property
    def mean_loss(self) -> torch.Tensor:
        """Scalar: the loss if it were divided by the samples' own targets."""
        return self.loss / self.share

    def outcome(self, model: nn.Module, samples: Sequence[ProbeSample]) -> Outcome:
        """The outcome with its gradients, which are computed now; what an aborted pass left is discarded first."""
        take_gradients(model)
        backward(self.mean_loss)
        loss = float(self.mean_loss.detach())
        return outcome_of(model, samples, self.logits, loss, sample_losses=self.sample_losses)


class Way(Protocol):
    """How samples go through a model together."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    def segments(self, samples: Sequence[ProbeSample]) -> Segments:
        """Where each sample lies."""
        ...

    def __call__(self, samples: Sequence[ProbeSample]) -> Pass:
        """Compute them."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class Packed:
    """vlmpack's own, in one circumstance: as a packed row, or as a padded batch that the step packs."""

    step: PackedStep
    """On the model, with the settings of the circumstance."""
    family: Family
    """Of the model."""
    circumstance: Circumstance
    """How samples are given and computed."""
    rule: SlotRule
    """Of the row."""
    poison: int
    """Id of the token that stands in every gap."""

    @property
    def name(self) -> str:
        """For people."""
        return self.circumstance.title

    def segments(self, samples: Sequence[ProbeSample]) -> Segments:
        """The row's."""
        return _segments(samples, self.rule)

    def batch(self, samples: Sequence[ProbeSample]) -> PaddedBatch:
        """The padded batch."""
        return batch_of(samples, left=self.circumstance.padded == "left")

    def given(self, samples: Sequence[ProbeSample]) -> PaddedBatch | PackedRow:
        """What the step is given."""
        metadata = self.circumstance.metadata
        if not self.circumstance.padded:
            return self.row(samples, metadata=metadata)
        return self.batch(samples) if metadata else replace(self.batch(samples), metadata=None)

    def row(self, samples: Sequence[ProbeSample], *, metadata: bool = True) -> PackedRow:
        """The packed row, also of a batch that the step would pack itself; `metadata`: with those that the host has."""
        batch = self.batch(samples)
        given = batch if metadata else replace(batch, metadata=None)
        return pack(given, rule=self.rule, pad_token_id=self.poison)

    def __call__(self, samples: Sequence[ProbeSample], *, routers: bool = False, by_step: bool = False) -> Pass:
        """Compute them; `routers`: with the load-balancing loss; `by_step`: by `PackedStep` in any circumstance."""
        asked = {"output_router_logits": routers} if self.family.has("experts") else {}
        if by_step or not self.circumstance.by_model:
            return self._by_step(samples, asked)
        return self._by_model(samples, asked)

    def _by_step(self, samples: Sequence[ProbeSample], asked: dict[str, Any]) -> Pass:
        items = self.circumstance.items(samples)
        result = self.step(self.given(samples), logits=True, num_items_in_batch=items, **asked)
        logits = result.logits if self.circumstance.padded else result.row_logits
        assert logits is not None
        return Pass(
            logits=self._of_samples(logits, samples),
            loss=result.loss,
            result=result,
            sample_losses=result.sample_losses,
            sample_targets=result.sample_targets,
            share=_share(samples, items),
        )

    def _by_model(self, samples: Sequence[ProbeSample], asked: dict[str, Any]) -> Pass:
        device, items = device_of(self.step.model), self.circumstance.items(samples)
        inputs = self.given(samples).to(device).to_hf()
        if not self.circumstance.metadata:
            inputs.pop(METADATA_KEY, None)
        if items is not None:
            inputs["num_items_in_batch"] = torch.tensor(items, device=device)
        output: Any = self.step.model(**inputs, output_logits=True, **asked)
        return Pass(
            logits=self._of_samples(output.logits, samples),
            loss=output.loss,
            sample_losses=output.sample_losses,
            sample_targets=output.sample_targets,
            share=_share(samples, items),
        )

    def _of_samples(self, logits: torch.Tensor, samples: Sequence[ProbeSample]) -> list[torch.Tensor]:
        """[B, S, V] or [1, T, V] to [L, V] of each sample."""
        if not self.circumstance.padded:
            return [logits[0, start:stop] for start, stop in self.segments(samples).spans]
        starts = offsets_of(samples, left=self.circumstance.padded == "left")
        cut = zip(logits, starts, samples, strict=True)
        return [row[start : start + len(sample.input_ids)] for row, start, sample in cut]


def _share(samples: Sequence[ProbeSample], items: int | None) -> float:
    return 1.0 if items is None else sum(sample.num_targets for sample in samples) / items


@final
@dataclass(frozen=True, kw_only=True)
class Alone:
    """One sample by itself through the unmodified model."""

    model: Any
    """Without packing."""
    family: Family
    """Of the model."""
    config: Any
    """Of the model."""
    name: str = "alone"
    """For people."""

    def segments(self, samples: Sequence[ProbeSample]) -> Segments:
        """The sample."""
        return _segments(samples, TIGHT)

    def __call__(self, samples: Sequence[ProbeSample]) -> Pass:
        (sample,) = samples
        output = _call(self.model, self.family, sample.inputs(self.family, self.config), {"use_cache": False})
        return Pass(logits=[output.logits[0]], loss=target_losses(output.logits[0], sample).sum())


@final
@dataclass(frozen=True, kw_only=True)
class PlainRow:
    """The samples one after the other through the unmodified model; all it is told are positions that restart."""

    model: Any
    """Without packing."""
    family: Family
    """Of the model."""
    config: Any
    """Of the model."""
    rows: int
    """Rows of position ids: 3 (time, height, width) or 4 (the text row first); of a text model 1."""
    use_cache: bool | None = None
    """None: as the configuration says, which is yes unless somebody changed it."""

    @property
    def name(self) -> str:
        """For people."""
        cache = {None: "", True: ", use_cache on", False: ", use_cache off"}[self.use_cache]
        shape = "[1, T]" if self.rows == 1 else f"[{self.rows}, 1, T]"
        return f"one row, {shape} positions{cache}"

    def without_cache(self) -> PlainRow:
        """The same with `use_cache=False`."""
        return replace(self, use_cache=False)

    def segments(self, samples: Sequence[ProbeSample]) -> Segments:
        """Without gaps."""
        return _segments(samples, TIGHT)

    def __call__(self, samples: Sequence[ProbeSample]) -> Pass:
        segments = self.segments(samples)
        inputs = {
            "input_ids": torch.cat([sample.input_ids for sample in samples])[None],
            "labels": torch.cat([sample.labels for sample in samples])[None],
            **joined_media(samples).to_hf(),
        }
        types = self.family.media_types(inputs["input_ids"], self.config)
        metadata = batch_of(samples).metadata
        assert metadata is not None
        positions = self.family.positions(
            types,
            segments,
            config=self.config,
            image_grids=metadata.image_grids,
            video_grids=metadata.video_grids,
            seconds_per_grid=metadata.seconds_per_grid,
        )
        if self.family.has_vision:
            inputs.update(mm_token_type_ids=types, position_ids=positions[-self.rows :])
        else:
            inputs.update(position_ids=positions[0])
        output = _call(self.model, self.family, inputs, {} if self.use_cache is None else {"use_cache": self.use_cache})
        return Pass(logits=[output.logits[0, a:b] for a, b in segments.spans], loss=output.loss)


@final
@dataclass(frozen=True, kw_only=True)
class PlainPadded:
    """The right-padded batch and its 2D mask through the unmodified model: exact, and full of padding."""

    model: Any
    """Without packing."""
    family: Family
    """Of the model."""
    config: Any
    """Of the model."""
    name: str = "a padded batch, 2D mask"
    """For people."""

    def segments(self, samples: Sequence[ProbeSample]) -> Segments:
        """A slot of the longest sample's length for each."""
        return _segments(samples, SlotRule(multiple=max(len(sample.input_ids) for sample in samples)))

    def inputs(self, samples: Sequence[ProbeSample]) -> dict[str, torch.Tensor]:
        """Arguments of the model."""
        batch = batch_of(samples)
        types = {"mm_token_type_ids": self.family.media_types(batch.input_ids, self.config)}
        return {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask,
            **(types if self.family.has_vision else {}),
            **batch.media.to_hf(),
        }

    def __call__(self, samples: Sequence[ProbeSample]) -> Pass:
        batch = batch_of(samples)
        assert batch.labels is not None
        output = _call(self.model, self.family, {**self.inputs(samples), "labels": batch.labels}, {"use_cache": False})
        logits = [row[: len(sample.input_ids)] for row, sample in zip(output.logits, samples, strict=True)]
        return Pass(logits=logits, loss=output.loss)

    def with_routers(self, samples: Sequence[ProbeSample]) -> tuple[Pass, torch.Tensor | None]:
        """The pass with the routers' losses in its loss, and the load-balancing loss over the real tokens; None: this
        version computes none."""
        inputs = {**self.inputs(samples), "labels": batch_of(samples).labels}
        placed = {name: value.to(device_of(self.model)) for name, value in inputs.items() if value is not None}
        output = self.model(**placed, output_router_logits=True, use_cache=False)
        logits = [row[: len(sample.input_ids)] for row, sample in zip(output.logits, samples, strict=True)]
        return Pass(logits=logits, loss=output.loss), output.aux_loss


def _call(model: Any, family: Family, inputs: dict[str, torch.Tensor], settings: dict[str, Any]) -> Any:
    placed = {name: value.to(device_of(model)) for name, value in inputs.items()}
    return model(**placed, **settings, **without_routers(family))


def device_of(model: nn.Module) -> torch.device:
    """Where its weights are."""
    return next(model.parameters()).device


def _segments(samples: Sequence[ProbeSample], rule: SlotRule) -> Segments:
    return Segments.from_lengths([len(sample.input_ids) for sample in samples], rule)
