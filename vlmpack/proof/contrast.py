"""What plain transformers makes of the same samples: one row with positions that restart, and the padded batch."""

from __future__ import annotations

import torch

from vlmpack.proof.mechanisms import check_delta, check_mask, check_positions
from vlmpack.proof.outcome import FLOOR, distance, host, relative
from vlmpack.proof.packed import count_pairs, leaks
from vlmpack.proof.report import Cause, Check, Contrast, causes_of, said
from vlmpack.proof.scene import LEAK, watch
from vlmpack.proof.subject import Subject, Truth
from vlmpack.proof.totals import check_loss_count
from vlmpack.proof.vision import check_vision
from vlmpack.proof.ways import PlainPadded, PlainRow


def contrasts(subject: Subject, truth: Truth) -> list[Contrast]:
    """The row with each kind of positions that the model takes, and the padded batch."""
    rows = (3, 4) if subject.family.has_vision else (1,)
    found = [_caught(PlainRow(**subject.plain, rows=count), subject, truth) for count in rows]
    return [*found, _caught(PlainPadded(**subject.plain), subject, truth)]


def _caught(way: PlainRow | PlainPadded, subject: Subject, truth: Truth) -> Contrast:
    try:
        return _contrast(way, subject, truth)
    except Exception as error:
        return Contrast(name=way.name, verdict="fails", detail=said(error))


@torch.no_grad()
def _contrast(way: PlainRow | PlainPadded, subject: Subject, truth: Truth) -> Contrast:
    leak = max(leaks(way, subject.samples, subject.words))
    found = way(subject.samples)
    logits = max(distance(host(x), own) for x, own in zip(found.logits, truth.eval.outcome.logits, strict=True))
    loss = relative(float(found.loss), truth.eval.outcome.loss)
    pairs, _ = count_pairs(subject, way)
    leaks_here = not leak <= max(LEAK, 0.0 if subject.dtype == torch.float32 else truth.eval.limits.logits)
    same = logits <= max(truth.eval.limits.logits, FLOOR["logits"]) and loss <= truth.eval.limits.loss
    causes: tuple[Cause, ...] = ()
    if isinstance(way, PlainRow):
        causes = _causes(way, subject, truth)
    return Contrast(
        name=way.name,
        verdict="leaks" if leaks_here else "exact" if same and not causes else "differs",
        leak=leak,
        logits=logits,
        loss=loss,
        pairs=pairs,
        causes=causes,
    )


def _causes(way: PlainRow, subject: Subject, truth: Truth) -> tuple[Cause, ...]:
    scene = watch(subject.core, subject.family, way, subject.samples)
    mask = check_mask(scene)
    checks = [
        check_positions(scene, truth.seen.rotary),
        _blamed_on_cache(way, subject) if mask.is_bad else mask,
        *check_delta(scene),
        check_vision(scene, truth.seen.features, own_error=truth.seen.feature_error),
        check_loss_count(way(subject.samples), subject.samples),
    ]
    return causes_of(checks)


def _blamed_on_cache(way: PlainRow, subject: Subject) -> Check:
    """With a cache transformers does not look for samples in the positions; so it is at fault if they stay apart
    without one."""
    without = check_mask(watch(subject.core, subject.family, way.without_cache(), subject.samples))
    cause: Cause = "mask" if without.is_bad else "cache"
    return Check(part="mechanism", name=cause, finding="leaks", cause=cause)
