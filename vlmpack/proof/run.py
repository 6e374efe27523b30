"""The probe: the samples of a row against each of them alone, mechanism by mechanism, in the user's environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vlmpack.attention import BACKENDS, choose
from vlmpack.families import family_of
from vlmpack.model import StepConfig, find_model
from vlmpack.proof.contrast import contrasts
from vlmpack.proof.packed import UNSTEADY, packed_checks
from vlmpack.proof.receipts import check_fits, processed_samples
from vlmpack.proof.report import Check, Contrast, Report, said
from vlmpack.proof.samples import synthetic_samples, with_company
from vlmpack.proof.subject import Subject, UnsteadyError, attention_call, find_truth
from vlmpack.proof.untouched import settings_of, untouched

Say = Callable[[str], None]


def probe(
    model: nn.Module,
    processor: Any = None,
    *,
    attention: str | None = None,
    plain: bool = True,
    progress: Say | None = None,
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
        plain: also give the samples to plain transformers, for contrast.
        progress: called with the name of each part before it begins.

    Raises:
        FamilyError: the model's family cannot be packed, or the processor is not one of a Qwen-VL model.
        ConfigError: the processor is another model's.
        BackendError: the named back-end cannot serve.
    """
    subject = _subject(model, processor, attention)
    call = attention_call(model)
    served = choose(call, subject.settings.attention).name
    with untouched(model):
        checks, contrast = _examined(subject, progress or (lambda part: None), plain=plain)
    return Report(
        model=type(subject.core).__name__,
        family=subject.family.model_type,
        weights="as given",
        device=call.device,
        dtype=str(subject.dtype).removeprefix("torch."),
        attention=served,
        samples=tuple(f"{sample.kind}, {len(sample.input_ids)} tokens" for sample in subject.samples),
        row_tokens=subject.segments.total,
        checks=tuple(checks),
        circumstances={one.name: one.title for one in subject.circumstances},
        plain=tuple(contrast),
    )


def backends_for(model: nn.Module) -> list[str]:
    """The back-ends that can serve the text model of `model` where it is."""
    call = attention_call(model)
    return [name for name, backend in BACKENDS.items() if not backend.unsupported(call)]


def _subject(model: nn.Module, processor: Any, attention: str | None) -> Subject:
    core: Any = find_model(model)
    family = family_of(core)
    takes_it = processor is not None and family.has_vision
    samples = processed_samples(processor) if takes_it else synthetic_samples(family, core.config)
    if takes_it:
        check_fits(samples, family, core.config)
    settings = settings_of(model) or StepConfig()
    return Subject(
        model=model,
        core=core,
        family=family,
        samples=with_company(samples, family, core.config),
        autocast=_mixed_precision(core),
        settings=replace(
            settings,
            attention=attention or settings.attention,
            # what transformers computes for a batch, and nothing beside it
            aux_loss="row",
            z_loss_coef=0.0,
        ),
    )


def _mixed_precision(core: nn.Module) -> torch.dtype:
    """That of the autocast in which the probe is called; outside of any, bfloat16."""
    device = next(core.parameters()).device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.bfloat16


def _examined(subject: Subject, say: Say, *, plain: bool) -> tuple[list[Check], list[Contrast]]:
    say("each sample alone")
    try:
        truth = find_truth(subject)
    except UnsteadyError as error:
        alone = Check(
            part="equality",
            name="each sample alone",
            finding="not deterministic",
            cause="not deterministic",
            detail=f"{error}: {UNSTEADY}",
        )
        return [alone], []
    except Exception as error:  # nothing to compare with: that is the finding
        return [Check(part="equality", name="each sample alone", finding="fails", detail=said(error))], []
    say("plain transformers")
    contrast = contrasts(subject, truth) if plain else []
    return packed_checks(subject, truth, say=say), contrast
