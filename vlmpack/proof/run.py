"""The probe: the samples of a row against each of them alone, mechanism by mechanism, in the user's environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from vlmpack.attention import AttentionCall, choose
from vlmpack.families import family_of
from vlmpack.proof.contrast import contrasts
from vlmpack.proof.packed import packed_checks
from vlmpack.proof.receipts import processed_samples
from vlmpack.proof.report import Report
from vlmpack.proof.samples import ProbeSample, synthetic_samples
from vlmpack.proof.subject import Subject, find_truth, row_length, where
from vlmpack.proof.untouched import settings_of, text_attention, untouched
from vlmpack.proof.ways import PlainPadded, gappy
from vlmpack.step import StepConfig, find_model


def probe(
    model: nn.Module,
    processor: Any = None,
    *,
    attention: str | None = None,
    weights: str = "as given",
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Prove on this machine that packed samples are what they are alone, or name what keeps them from it.

    A few samples go through `model` alone, as a packed row with gaps, and as a padded batch: logits, loss and the
    gradients of every group of parameters are compared; one sample after the other is changed and the rest watched;
    each mechanism is run by itself; work is counted; and plain transformers is given the same row.

    The model is used where it is, in its own element type, in eval mode, and is afterwards what it was: weights, mode,
    gradients, packing, configuration, random state. In bfloat16 a float32 copy is made meanwhile.

    Args:
        model: a Hugging Face model of a supported family, or a wrapper around it (PEFT); packing enabled or not.
        processor: the model's processor: receipts are drawn and go through it and `VLMCollator`; None, or a text
            model: random ids and pixels.
        attention: name of a back-end; None: that of the enabled model, or the first that can serve.
        weights: what the report says about where the weights come from.
        progress: called with the name of each part before it begins.

    Raises:
        FamilyError: the model's family cannot be packed.
        BackendError: the named back-end cannot serve.
    """
    say = progress or (lambda part: None)
    core: Any = find_model(model)
    family = family_of(core)
    settings = settings_of(model) or StepConfig()
    takes_it = processor is not None and family.has_vision
    samples = processed_samples(processor) if takes_it else synthetic_samples(family, core.config)
    subject = Subject(
        model=model,
        core=core,
        family=family,
        samples=samples,
        settings=replace(
            settings,
            slots=gappy(samples),
            attention=attention or settings.attention,
            aux_loss="row",
            z_loss_coef=0.0,
        ),
    )
    served = _served(subject)
    with untouched(model):
        say("each sample alone")
        truth = find_truth(subject)
        balance = None if family.experts is None else PlainPadded(**subject.plain).balance(samples)
        say("plain transformers")
        plain = contrasts(subject, truth)
        checks = packed_checks(subject, truth, balance=balance, say=say)
    return Report(
        model=type(core).__name__,
        family=family.model_type,
        weights=weights,
        device=where(subject),
        dtype=str(subject.dtype).removeprefix("torch."),
        attention=served,
        samples=tuple(_described(samples)),
        row_tokens=row_length(subject),
        checks=tuple(checks),
        plain=tuple(plain),
    )


def _served(subject: Subject) -> str:
    text = text_attention(subject.family.text_config(subject.config))
    call = AttentionCall(device=where(subject), dtype=subject.dtype, **text)
    return choose(call, subject.settings.attention).name


def _described(samples: Sequence[ProbeSample]) -> list[str]:
    return [f"{sample.kind}, {len(sample.input_ids)} tokens" for sample in samples]
