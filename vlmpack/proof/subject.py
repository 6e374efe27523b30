"""What is probed, and the truth about it: each sample by itself through the unmodified model.

A model that gives other numbers when it is run again says nothing about packing. So each sample goes through it twice,
in eval mode and in train mode; where these differ, each is run again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, final

import torch
from torch import nn

from vlmpack.attention import AttentionCall
from vlmpack.families import Family, family_of
from vlmpack.layout import Segments
from vlmpack.model import StepConfig, find_model
from vlmpack.proof.circumstances import AUTOCAST, CIRCUMSTANCES, GAPS, ROW, Circumstance, computed_in
from vlmpack.proof.mechanisms import Rotary, rotary_of
from vlmpack.proof.outcome import (
    IN_LOW_PRECISION,
    Errors,
    Limits,
    Outcome,
    backward,
    compare,
    distance,
    host,
    outcome_of,
)
from vlmpack.proof.routers import Routers, routers_of
from vlmpack.proof.samples import ProbeSample, Words
from vlmpack.proof.scene import watch
from vlmpack.proof.vision import Features, feature_error, features_of
from vlmpack.proof.ways import Alone, PlainPadded

STEADY = 5e-2
"""The most that logits may differ from one run to the next, as a part of the largest: kernels that add up in another
order each time round a little in low precision; dropout makes another number of it."""

Found = TypeVar("Found")


@final
@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, samples for it, and how they are to be packed."""

    model: nn.Module
    """As it was given: perhaps a wrapper (PEFT) around the model itself."""
    core: Any
    """The model itself, with its head and its configuration."""
    family: Family
    """Its family."""
    samples: Sequence[ProbeSample]
    """In row order."""
    settings: StepConfig
    """The user's own, or the defaults."""
    autocast: torch.dtype
    """Element type of mixed precision; weights that are in low precision already are not probed in it."""

    @property
    def config(self) -> Any:
        """The Hugging Face configuration."""
        return self.core.config

    @property
    def words(self) -> Words:
        """Token ids without a special meaning."""
        return Words.of(self.family, self.config)

    @property
    def segments(self) -> Segments:
        """Where each sample lies in the row with gaps."""
        rule = GAPS.settings(self.settings, self.samples).slots
        return Segments.from_lengths([len(sample.input_ids) for sample in self.samples], rule)

    @property
    def circumstances(self) -> tuple[Circumstance, ...]:
        """In which the samples are packed."""
        return tuple(one for one in CIRCUMSTANCES if self.dtype == torch.float32 or not one.autocast)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Element type of the weights; of several, the least precise."""
        found = {p.dtype for p in self.core.parameters() if p.is_floating_point()}
        return max(found, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def is_low(self) -> bool:
        """Whether the weights are in low precision."""
        return self.dtype != torch.float32

    @property
    def plain(self) -> dict[str, Any]:
        """What plain ways of computing the samples are made of."""
        return {"model": self.model, "family": self.family, "config": self.config}


@final
@dataclass(frozen=True, kw_only=True)
class Reference:
    """What a circumstance is compared with."""

    outcome: Outcome
    """Of the samples alone, in float32."""
    limits: Limits
    """How far the packed samples may be from it."""


@final
@dataclass(frozen=True, kw_only=True)
class Seen:
    """What mechanisms did with each sample alone."""

    rotary: Sequence[Rotary]
    """cos and sin that reached attention."""
    features: Sequence[Features]
    """What the vision tower gave."""
    feature_error: float
    """How far features are from those, where plain transformers is given all images at once."""


@final
@dataclass(frozen=True, kw_only=True)
class Truth:
    """What each sample comes to alone."""

    eval: Reference
    """In eval mode."""
    train: Reference | None
    """In train mode, in most models the same; None: the model is not deterministic in it."""
    seen: Seen
    """In eval mode."""
    routers: Routers | None
    """Of the padded batch with its 2D mask, through plain transformers; None: there are no routers."""


class UnsteadyError(ArithmeticError):
    """The model gives other numbers when it is run again."""


def find_truth(subject: Subject) -> Truth:
    """Compute it. In low precision a float32 copy of the model is made for as long as that takes.

    Raises:
        UnsteadyError: two runs of the same samples differ in eval mode.
        ArithmeticError: the model gives NaN or infinity without any packing.
    """
    own = _finite(_alone(subject.model, subject, GAPS))
    padded = PlainPadded(**subject.plain)
    exact = own if subject.dtype == torch.float32 else _finite(_exact(subject, GAPS))
    errors = compare(own, exact, low=subject.is_low)
    batch_errors = _unless_it_raises(
        lambda: compare(padded(subject.samples).outcome(subject.model, subject.samples), exact, low=subject.is_low),
        errors,
    )
    reference = Reference(outcome=exact, limits=_beyond(errors, batch_errors, low=subject.is_low))
    return Truth(
        eval=reference,
        train=_in_train_mode(subject, own, reference),
        seen=seen_alone(subject, GAPS),
        routers=routers_of(subject.core, subject.family, padded, subject.samples),
    )


def _beyond(own: Errors, padded: Errors, *, low: bool) -> Limits:
    return Limits.beyond(own, padded, factor=IN_LOW_PRECISION if low else 2.0)


def _in_train_mode(subject: Subject, own: Outcome, in_eval: Reference) -> Reference | None:
    """`own`: outcome in eval mode, in the model's own precision."""
    trained = _alone(subject.model, subject, ROW)
    if _steady(compare(trained, own, low=subject.is_low), in_eval.limits):
        return in_eval
    if not _steady(compare(_alone(subject.model, subject, GAPS), own, low=subject.is_low), in_eval.limits):
        raise UnsteadyError("two runs of the same samples alone differ, without any packing")
    if not _steady(compare(_alone(subject.model, subject, ROW), trained, low=subject.is_low), in_eval.limits):
        return None
    return replace(in_eval, outcome=trained if subject.dtype == torch.float32 else _exact(subject, ROW))


def _steady(errors: Errors, limits: Limits) -> bool:
    same = errors.logits <= min(limits.logits, STEADY)
    return same and all(found.error <= limits.gradients[group] for group, found in errors.gradients.items())


def in_autocast(subject: Subject, reference: Reference) -> Reference | None:
    """The limits of mixed precision, beyond the errors of the samples alone in it; None: not deterministic in it."""
    own = _alone(subject.model, subject, AUTOCAST)
    alone = Alone(**subject.plain)
    with computed_in(subject.model, AUTOCAST, subject.autocast):
        again = [host(alone([sample]).logits[0]) for sample in subject.samples]
    if max(distance(x, y) for x, y in zip(again, own.logits, strict=True)) > STEADY:
        return None
    errors = compare(own, reference.outcome, low=True)
    return replace(reference, limits=_beyond(errors, errors, low=True))


def with_padded_errors(subject: Subject, reference: Reference) -> Reference:
    """Widen the limits of mixed precision by what plain transformers' padded batch rounds over all images at once."""

    def errors() -> Errors:
        with computed_in(subject.model, AUTOCAST, subject.autocast):
            found = PlainPadded(**subject.plain)(subject.samples)
        return compare(found.outcome(subject.model, subject.samples), reference.outcome, low=True)

    own = compare(_alone(subject.model, subject, AUTOCAST), reference.outcome, low=True)
    return replace(reference, limits=_beyond(own, _unless_it_raises(errors, own), low=True))


def seen_alone(subject: Subject, circumstance: Circumstance) -> Seen:
    """What mechanisms do with each sample alone, in the mode and precision of a circumstance. Packing is disabled."""
    with computed_in(subject.model, circumstance, subject.autocast), torch.no_grad():
        plain = Alone(**subject.plain)
        scenes = [watch(subject.core, subject.family, plain, [sample]) for sample in subject.samples]
        features = [features_of(scene.vision) for scene in scenes]

        def padded_features() -> float:
            padded = PlainPadded(**subject.plain)
            return feature_error(watch(subject.core, subject.family, padded, subject.samples), features)

        return Seen(
            rotary=[rotary_of(next(iter(scene.attention.values()))) for scene in scenes],
            features=features,
            feature_error=_unless_it_raises(padded_features, 0.0) if subject.family.has_vision else 0.0,
        )


def _exact(subject: Subject, circumstance: Circumstance) -> Outcome:
    return _alone(copy.deepcopy(subject.model).float(), subject, circumstance)


def _finite(alone: Outcome) -> Outcome:
    """Everything would be equally far from a truth that is NaN or infinite, and every limit would hold."""
    numbers = {**{f"the logits of sample {i}": x for i, x in enumerate(alone.logits)}, "the loss": alone.target_losses}
    numbers |= {f"the gradient of {name}": gradient for name, gradient in alone.gradients.items()}
    for name, x in numbers.items():
        if not bool(x.isfinite().all()):
            raise ArithmeticError(f"{name} has NaN or infinity without any packing: nothing can be compared with it")
    return alone


def _unless_it_raises(run: Callable[[], Found], otherwise: Found) -> Found:
    """Plain transformers may fail on a padded batch: that shows in the contrast, and widens no limit."""
    try:
        return run()
    except Exception:
        return otherwise


def _alone(model: nn.Module, subject: Subject, circumstance: Circumstance) -> Outcome:
    """Each sample alone, in the mode and precision of a circumstance, with gradients."""
    alone = Alone(model=model, family=subject.family, config=subject.config)
    count = sum(sample.num_targets for sample in subject.samples)
    logits, loss = [], 0.0
    for sample in subject.samples:
        with computed_in(model, circumstance, subject.autocast), torch.enable_grad():
            found = alone([sample])
        backward(found.loss / count)
        logits += [x.detach() for x in found.logits]
        loss += float(found.loss.detach()) / count
    return outcome_of(model, subject.samples, logits, loss)


def attention_call(model: nn.Module) -> AttentionCall:
    """What the text model asks of an attention back-end."""
    core: Any = find_model(model)
    family = family_of(core)
    text = family.text_config(core.config)
    weight = next(family.language_model(core).parameters())
    heads = text.num_attention_heads
    return AttentionCall(
        device=weight.device.type,
        dtype=weight.dtype,
        head_dim=text.to_dict().get("head_dim") or text.hidden_size // heads,
        num_heads=heads,
        num_kv_heads=text.num_key_value_heads,
    )
