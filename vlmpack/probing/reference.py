"""Compute the reference: each sample by itself through the unmodified model.

A model that is not deterministic says nothing about packing. So each sample goes through it twice, in eval mode and in
train mode; where these differ, each is run again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar, final

import torch

from vlmpack.layout.segments import Segments
from vlmpack.model.engine import StepConfig
from vlmpack.probing.difference import AloneCalls, record_alone
from vlmpack.probing.forward_passes import (
    AUTOCAST,
    CIRCUMSTANCES,
    GAPS,
    ROW,
    Circumstance,
    PlainPaddedPass,
    ProbedModel,
    segments_of,
)
from vlmpack.probing.losses import RouterLosses, reference_router_losses
from vlmpack.probing.routing import HOLD_ALL, Choices, HeldChoices, held_choices, open_share, routing
from vlmpack.testing.comparison import LOW_PRECISION_FACTOR, Errors, Limits, Outcome, compare, distance, run_alone
from vlmpack.testing.samples import Sample

STEADY = 5e-2
"""The most that logits may differ from one run to the next, as a part of the largest: kernels that add up in another
order each time round a little in low precision; dropout changes more."""


@final
@dataclass(frozen=True, kw_only=True)
class ProbeSetup:
    """A model, samples for it, and the settings with which they are packed."""

    probed: ProbedModel
    """The model."""
    samples: Sequence[Sample]
    """In row order."""
    settings: StepConfig
    """The user's, or the defaults."""
    autocast: torch.dtype
    """Element type of mixed precision; weights that are in low precision already are not probed in it."""

    @property
    def segments(self) -> Segments:
        """The samples' boundaries in the row with gaps."""
        return segments_of(self.samples, GAPS.settings(self.settings, self.samples).slots)

    @property
    def circumstances(self) -> tuple[Circumstance, ...]:
        """In which the samples are packed."""
        return tuple(each for each in CIRCUMSTANCES if not (each.autocast and self.probed.is_low))

    def computing(self, circumstance: Circumstance) -> AbstractContextManager[None]:
        """Set mode, graph and precision of a circumstance."""
        return circumstance.computing(self.probed, self.autocast)


@final
@dataclass(frozen=True, kw_only=True)
class Reference:
    """The reference of one circumstance."""

    outcome: Outcome
    """Of the samples alone, in float32."""
    limits: Limits
    """Of the packed samples' errors."""
    choices: Sequence[Choices]
    """Experts of the tokens of each sample alone, in float32."""


@final
@dataclass(frozen=True, kw_only=True)
class References:
    """The references of all circumstances."""

    eval: Reference
    """In eval mode."""
    train: Reference | Exception | None
    """In train mode, in most models the same; None: the model is not deterministic in it."""
    autocast: Reference | Exception | None
    """In mixed precision; None: the same, or the weights are in low precision."""
    routers: RouterLosses | Exception | None
    """Of the padded batch with its 2D mask, through plain transformers; None: there are no routers."""

    def of(self, circumstance: Circumstance) -> Reference | None:
        """Choose that of a circumstance; None: the model is not deterministic in it.

        Raises:
            Exception: what the model alone raised in it.
        """
        if circumstance.autocast:
            return value_of(self.autocast)
        return value_of(self.train) if circumstance.train else self.eval


Value = TypeVar("Value")


def value_or_error(compute: Callable[[], Value]) -> Value | Exception:
    """Compute a part of the reference. What it raises is kept, and raised by the checks that need it (`value_of`)."""
    try:
        return compute()
    except UnsteadyError:
        raise
    except Exception as error:
        return error


def value_of(found: Value | Exception) -> Value:
    """Return a part of the reference, or raise what computing it raised."""
    if isinstance(found, Exception):
        raise found
    return found


class UnsteadyError(ArithmeticError):
    """The model returns other numbers when it is run again."""


def compute_references(setup: ProbeSetup) -> References:
    """Compute all of them. In low precision a float32 copy of the model is made for as long as that takes.

    Raises:
        UnsteadyError: two runs of the same samples differ in eval mode.
        ArithmeticError: the model returns NaN or infinity without any packing.
    """
    alone = _run_alone(setup, GAPS)
    in_eval = _exact_reference(setup, GAPS, alone)
    in_train = value_or_error(lambda: _train_reference(setup, alone, in_eval))
    in_autocast = in_train
    if isinstance(in_train, Reference):
        in_autocast = None if setup.probed.is_low else value_or_error(lambda: _autocast_reference(setup, in_train))
    return References(
        eval=in_eval,
        train=in_train,
        autocast=in_autocast,
        routers=value_or_error(lambda: reference_router_losses(setup.probed, setup.samples)),
    )


def compute_reference(setup: ProbeSetup, circumstance: Circumstance) -> Reference:
    """Compute the reference of one circumstance, of a model that is deterministic in it.

    Raises:
        ArithmeticError: the model returns NaN or infinity without any packing.
    """
    return _exact_reference(setup, circumstance, _run_alone(setup, circumstance))


@final
@dataclass(frozen=True, kw_only=True)
class _AloneRun:
    """Each sample alone in some circumstance."""

    outcome: Outcome
    choices: list[Choices]


def _run_alone(setup: ProbeSetup, circumstance: Circumstance, choices: Sequence[Choices] | None = None) -> _AloneRun:
    """Run each sample alone in the mode and precision of a circumstance, with gradients; `choices` are held."""
    probed = setup.probed
    chosen: list[Choices] = []

    @contextmanager
    def recording() -> Iterator[None]:
        held = None if choices is None else held_alone(setup, choices, len(chosen), share=open_share(is_low=True))
        with setup.computing(circumstance), torch.enable_grad(), routing(probed, held) as routed:
            yield
        chosen.append(routed.choices)

    outcome = run_alone(probed.model, setup.samples, forward_context=recording)
    return _AloneRun(outcome=outcome, choices=chosen)


def record_references(setup: ProbeSetup, circumstance: Circumstance, choices: Sequence[Choices]) -> list[AloneCalls]:
    """Record every module of each sample alone, in the mode and precision of a circumstance; choices are held."""
    references = []
    for at, sample in enumerate(setup.samples):
        with setup.computing(circumstance), routing(setup.probed, held_alone(setup, choices, at, share=HOLD_ALL)):
            references.append(record_alone(setup.probed, sample))
    return references


def held_alone(setup: ProbeSetup, choices: Sequence[Choices], sample: int, *, share: float) -> HeldChoices:
    """Hold the choices of one sample, alone."""
    places = [torch.arange(len(setup.samples[sample]["input_ids"]))]
    return HeldChoices(samples=[choices[sample]], places=places, share=share)


def _run_in_float32(setup: ProbeSetup, circumstance: Circumstance) -> _AloneRun:
    exact = ProbedModel.of(copy.deepcopy(setup.probed.model).float())
    return _run_alone(replace(setup, probed=exact, samples=exact.with_its_pixels(setup.samples)), circumstance)


@final
@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """Each sample alone in some precision, beside itself in float32: what a reference is made of."""

    setup: ProbeSetup
    circumstance: Circumstance
    alone: _AloneRun
    truth: Outcome
    choices: Sequence[Choices]
    low: bool

    def reference(self) -> Reference:
        """Set the limits beyond the errors of the samples alone, and of plain transformers' padded batch."""
        errors = compare(self.alone.outcome, self.truth, low=self.low)
        padded = self._padded_errors() or errors
        return Reference(
            outcome=self.truth,
            limits=Limits.beyond(errors, padded, factor=LOW_PRECISION_FACTOR if self.low else 2.0),
            choices=self.choices,
        )

    def _padded_errors(self) -> Errors | None:
        """Errors of plain transformers' padded batch; None: it raises, and so widens no limit."""
        probed, samples = self.setup.probed, self.setup.samples
        try:
            forward = PlainPaddedPass(probed=probed)
            held = held_choices(forward, samples, self.choices, share=open_share(is_low=self.low))
            with self.setup.computing(self.circumstance), torch.enable_grad(), routing(probed, held):
                result = forward(samples)
            return compare(result.outcome(probed.model, samples), self.truth, low=self.low)
        except Exception:
            return None


def _exact_reference(setup: ProbeSetup, circumstance: Circumstance, alone: _AloneRun) -> Reference:
    """In float32, whatever the model's precision."""
    low = setup.probed.is_low
    exact = _run_in_float32(setup, circumstance) if low else alone
    for outcome in (alone.outcome, exact.outcome):
        _check_finite(outcome)
    if low and any(exact.choices):
        alone = _run_alone(setup, circumstance, choices=exact.choices)
    return _Comparison(
        setup=setup, circumstance=circumstance, alone=alone, truth=exact.outcome, choices=exact.choices, low=low
    ).reference()


def _train_reference(setup: ProbeSetup, alone: _AloneRun, in_eval: Reference) -> Reference | None:
    """`alone`: in eval mode, in the model's precision."""

    def steady(run: _AloneRun, other: _AloneRun) -> bool:
        errors, limits = compare(run.outcome, other.outcome, low=setup.probed.is_low), in_eval.limits
        if not errors.logits <= min(limits.logits, STEADY):
            return False
        return all(worst.error <= limits.gradients[group] for group, worst in errors.gradients.items())

    trained = _run_alone(setup, ROW)
    if steady(trained, alone):
        return in_eval
    if not steady(_run_alone(setup, GAPS), alone):
        raise UnsteadyError("two runs of the same samples alone differ, without any packing")
    if not steady(_run_alone(setup, ROW), trained):
        return None
    exact = _run_in_float32(setup, ROW) if setup.probed.is_low else trained
    return replace(in_eval, outcome=exact.outcome, choices=exact.choices)


def _autocast_reference(setup: ProbeSetup, in_train: Reference) -> Reference | None:
    """None: the model is not deterministic in mixed precision."""
    alone = _run_alone(setup, AUTOCAST)
    again = run_alone(
        setup.probed.model, setup.samples, gradients=False, forward_context=lambda: setup.computing(AUTOCAST)
    )
    if max(distance(x, y) for x, y in zip(again.logits, alone.outcome.logits, strict=True)) > STEADY:
        return None
    if any(in_train.choices):
        alone = _run_alone(setup, AUTOCAST, choices=in_train.choices)
    return _Comparison(
        setup=setup, circumstance=AUTOCAST, alone=alone, truth=in_train.outcome, choices=in_train.choices, low=True
    ).reference()


def _check_finite(outcome: Outcome) -> None:
    """Refuse NaN and infinity: everything would be equally far from them, and every limit would hold."""
    numbers = {f"the logits of sample {i}": x for i, x in enumerate(outcome.logits)}
    numbers |= {"the loss": outcome.target_losses}
    numbers |= {f"the gradient of {name}": gradient for name, gradient in outcome.gradients.items()}
    for name, x in numbers.items():
        if not bool(x.isfinite().all()):
            raise ArithmeticError(f"{name} has NaN or infinity without any packing: nothing can be compared with it")
