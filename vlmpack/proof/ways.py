"""The ways to compute several samples in one go: vlmpack's two, and what people do with plain transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

import torch
from torch import nn

from vlmpack.families import Family
from vlmpack.layout import PackedRow, PaddedBatch, Segments, SlotRule, pack
from vlmpack.proof.outcome import Outcome, backward, outcome_of, take_gradients, target_losses, without_routers
from vlmpack.proof.samples import ProbeSample, batch_of, joined_media
from vlmpack.step import PackedStep, StepResult

TIGHT = SlotRule()
"""No gaps."""


def gappy(samples: Sequence[ProbeSample]) -> SlotRule:
    """Slots that leave room behind a sample at least, and at the end of the row."""
    lengths = [len(sample.input_ids) for sample in samples]
    multiple = next(m for m in (8, 12, 20, 2 * max(lengths)) if any(n % m for n in lengths))
    return SlotRule(multiple=multiple, row_multiple=4 * multiple)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Pass:
    """One forward pass."""

    logits: list[torch.Tensor]
    """[L, V] of each sample."""
    loss: torch.Tensor
    """Scalar: what a trainer would be given."""
    result: StepResult | None = None
    """Of vlmpack's ways: all that the step gave back."""

    def outcome(self, model: nn.Module, samples: Sequence[ProbeSample]) -> Outcome:
        """The outcome with its gradients, which are computed now; what an aborted pass left is discarded first."""
        take_gradients(model)
        backward(self.loss)
        return outcome_of(model, samples, self.logits, float(self.loss.detach()))


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
    """vlmpack's own: as a packed row, or as a padded batch that the step packs."""

    step: PackedStep
    """On the model."""
    family: Family
    """Of the model."""
    poison: int
    """Id of the token that stands in every gap."""
    rule: SlotRule
    """Of the row."""
    padded: bool = False
    """Hand over the padded batch; its slots are those of the step's own settings."""

    @property
    def name(self) -> str:
        """For people."""
        return "a padded batch, packed inside the step" if self.padded else "a packed row"

    def segments(self, samples: Sequence[ProbeSample]) -> Segments:
        """The row's."""
        return _segments(samples, self.rule)

    def given(self, samples: Sequence[ProbeSample]) -> PaddedBatch | PackedRow:
        """What the step is given."""
        batch = batch_of(samples)
        return batch if self.padded else pack(batch, rule=self.rule, pad_token_id=self.poison)

    def __call__(self, samples: Sequence[ProbeSample], *, routers: bool = False) -> Pass:
        """`routers`: with the load-balancing loss."""
        asked = {"output_router_logits": routers} if self.family.experts is not None else {}
        result = self.step(self.given(samples), logits=True, **asked)
        assert result.row_logits is not None
        logits = [result.row_logits[0, start:stop] for start, stop in result.segments.spans]
        return Pass(logits=logits, loss=result.loss, result=result)


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
        facts = batch_of(samples).facts
        assert facts is not None
        positions = self.family.positions(
            types,
            segments,
            config=self.config,
            image_grids=facts.image_grids,
            video_grids=facts.video_grids,
            seconds_per_grid=facts.seconds_per_grid,
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

    @torch.no_grad()
    def balance(self, samples: Sequence[ProbeSample]) -> float | None:
        """The routers' load-balancing loss over the real tokens; None: this version does not compute it."""
        inputs = {name: value.to(device_of(self.model)) for name, value in self.inputs(samples).items()}
        loss = self.model(**inputs, output_router_logits=True, use_cache=False).aux_loss
        return None if loss is None else float(loss)


def _call(model: Any, family: Family, inputs: dict[str, torch.Tensor], settings: dict[str, Any]) -> Any:
    placed = {name: value.to(device_of(model)) for name, value in inputs.items()}
    return model(**placed, **settings, **without_routers(family))


def device_of(model: nn.Module) -> torch.device:
    """Where its weights are."""
    return next(model.parameters()).device


def _segments(samples: Sequence[ProbeSample], rule: SlotRule) -> Segments:
    return Segments.from_lengths([len(sample.input_ids) for sample in samples], rule)
