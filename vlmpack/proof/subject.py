"""What is probed, and the truth about it: each sample by itself through the unmodified model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import nn

from vlmpack.attention import AttentionCall
from vlmpack.families import Family, family_of
from vlmpack.layout import Segments
from vlmpack.proof.mechanisms import Rotary, rotary_of
from vlmpack.proof.outcome import Limits, Outcome, backward, compare, outcome_of
from vlmpack.proof.samples import ProbeSample, Words
from vlmpack.proof.scene import watch
from vlmpack.proof.vision import Features, feature_error, features_of
from vlmpack.proof.ways import Alone, PlainPadded
from vlmpack.step import StepConfig, find_model

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
    """Back-end, and slots that leave gaps."""

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
        """Where each sample lies in the row."""
        return Segments.from_lengths([len(sample.input_ids) for sample in self.samples], self.settings.slots)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the weights; of several, the least precise."""
        found = {p.dtype for p in self.core.parameters() if p.is_floating_point()}
        return max(found, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def plain(self) -> dict[str, Any]:
        """What plain ways of computing the samples are made of."""
        return {"model": self.model, "family": self.family, "config": self.config}


@final
@dataclass(frozen=True, kw_only=True)
class Truth:
    """What each sample comes to alone."""

    outcome: Outcome
    """In float32."""
    limits: Limits
    """How far the row may be from it."""
    rotary: Sequence[Rotary]
    """cos and sin that reached attention, of each sample."""
    features: Sequence[Features]
    """What the vision tower gave, of each sample."""
    feature_error: float
    """How far features are from those, where plain transformers is given all images at once."""
    balance: float | None
    """The routers' load-balancing loss of the padded batch with its 2D mask, through plain transformers."""


def find_truth(subject: Subject) -> Truth:
    """Compute it. In low precision a float32 copy of the model is made for as long as that takes.

    Raises:
        ArithmeticError: the model gives NaN or infinity without any packing.
    """
    own = _finite(_alone(subject.model, subject))
    padded = PlainPadded(**subject.plain)
    outcome = own
    if subject.dtype != torch.float32:
        outcome = _finite(_alone(copy.deepcopy(subject.model).float(), subject))
    errors = compare(own, outcome)
    batch_errors = _unless_it_raises(
        lambda: compare(padded(subject.samples).outcome(subject.model, subject.samples), outcome), errors
    )
    scenes = [watch(subject.core, subject.family, Alone(**subject.plain), [sample]) for sample in subject.samples]
    features = [features_of(scene.vision) for scene in scenes]

    def padded_features() -> float:
        return feature_error(watch(subject.core, subject.family, padded, subject.samples), features)

    return Truth(
        outcome=outcome,
        limits=Limits.beyond(errors, batch_errors),
        rotary=[rotary_of(next(iter(scene.attention.values()))) for scene in scenes],
        features=features,
        feature_error=_unless_it_raises(padded_features, 0.0),
        balance=None if subject.family.experts is None else padded.balance(subject.samples),
    )


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


def _alone(model: nn.Module, subject: Subject) -> Outcome:
    alone = Alone(model=model, family=subject.family, config=subject.config)
    count = sum(sample.num_targets for sample in subject.samples)
    logits, loss = [], 0.0
    for sample in subject.samples:
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
