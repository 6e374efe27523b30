"""Everything that is checked in a packed row. Packing is enabled here, and an exception is a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

import torch

from vlmpack.proof.mechanisms import check_cache, check_delta, check_mask, check_positions
from vlmpack.proof.outcome import FLOOR, backward, compare
from vlmpack.proof.report import Check, Part, said
from vlmpack.proof.samples import ProbeSample, Words, perturbed
from vlmpack.proof.scene import LEAK, children, moved, watch
from vlmpack.proof.subject import Subject, Truth
from vlmpack.proof.totals import check_balance, check_dispatch, check_loss_count
from vlmpack.proof.vision import check_vision
from vlmpack.proof.ways import Packed, Way, device_of
from vlmpack.proof.work import counted_pairs, counted_waits
from vlmpack.step import PackedStep

Say = Callable[[str], None]


@final
@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the probe whose failure stops no other part."""

    part: Part
    """Of the report."""
    name: str
    """For people."""
    run: Callable[[], list[Check]]
    """Do the checks."""


def packed_checks(subject: Subject, truth: Truth, *, say: Say) -> list[Check]:
    """All of them; `say` is told what comes next."""
    step = PackedStep(subject.model, subject.settings)
    poison = subject.words.low
    row = Packed(step=step, family=subject.family, rule=subject.settings.slots, poison=poison)
    checks = []
    for stage in _stages(subject, truth, row):
        say(stage.name)
        checks += caught(stage)
    return checks


def caught(stage: Stage) -> list[Check]:
    """A probe does not die of what it finds."""
    try:
        return stage.run()
    except Exception as error:
        return [Check(part=stage.part, name=stage.name, finding="fails", detail=said(error))]


def _stages(subject: Subject, truth: Truth, row: Packed) -> Iterator[Stage]:
    samples = subject.samples
    padded = replace(row, padded=True)
    yield Stage(part="isolation", name="isolation", run=lambda: _isolation(subject, truth, row))
    yield Stage(part="mechanism", name="mechanisms", run=lambda: _mechanisms(subject, truth, row))
    yield Stage(part="mechanism", name="loss count", run=lambda: [_loss_count(row, samples)])
    yield Stage(part="equality", name=row.name, run=lambda: _equality(subject, truth, row))
    if (balance := truth.balance) is not None:
        yield Stage(
            part="equality",
            name="load-balancing loss",
            run=lambda: [check_balance(row, samples, balance, truth.outcome, truth.limits.logits)],
        )
    yield Stage(part="equality", name=padded.name, run=lambda: _equality(subject, truth, padded))
    yield Stage(part="work", name="attended pairs", run=lambda: [_pairs(subject, row)])
    yield Stage(part="work", name="host waits", run=lambda: [_waits(subject, row)])


# ---------------------------------------------------------------------- isolation


def _isolation(subject: Subject, truth: Truth, row: Packed) -> list[Check]:
    allowed = LEAK if subject.dtype == torch.float32 else max(LEAK, truth.limits.logits)
    moves = leaks(row, subject.samples, subject.words)
    other = replace(row, poison=row.poison + 1)
    with torch.no_grad():
        before, after = row(subject.samples).logits, other(subject.samples).logits
    gaps = max(moved(x, y, [(0, len(y))], dim=0) for x, y in zip(after, before, strict=True))
    names = [f"change sample {i} ({sample.kind})" for i, sample in enumerate(subject.samples)]
    seen = dict(zip(names, moves, strict=True)) | {"change what stands in gaps": gaps}
    return [_moved(name, move, allowed) for name, move in seen.items()]


def _moved(name: str, seen: float, allowed: float) -> Check:
    if seen <= allowed:
        return Check(part="isolation", name=name, finding="ok", seen=seen, allowed=allowed)
    detail = f"the logits of another sample move by {seen:.1e} of their size"
    return Check(part="isolation", name=name, finding="leaks", seen=seen, allowed=allowed, detail=detail)


@torch.no_grad()
def leaks(way: Way, samples: Sequence[ProbeSample], words: Words) -> list[float]:
    """For each sample: the most that the others' logits move when only it changes, as a part of the largest one."""
    before = way(samples).logits
    worst = []
    for i, sample in enumerate(samples):
        after = way([*samples[:i], perturbed(sample, words), *samples[i + 1 :]]).logits
        others = [pair for j, pair in enumerate(zip(after, before, strict=True)) if j != i]
        worst.append(max(moved(x, y, [(0, len(y))], dim=0) for x, y in others))
    return worst


# ---------------------------------------------------------------------- mechanisms


def _mechanisms(subject: Subject, truth: Truth, row: Packed) -> list[Check]:
    scene = watch(subject.core, subject.family, row, subject.samples)
    looks: dict[str, Callable[[], list[Check]]] = {
        "positions": lambda: [check_positions(scene, truth.rotary)],
        "mask": lambda: [check_mask(scene)],
        "cache": lambda: [check_cache(scene)],
        "gated delta layers": lambda: check_delta(scene),
        "router": lambda: [check_dispatch(scene)],
        "vision": lambda: [check_vision(scene, truth.features, own_error=truth.feature_error)],
    }
    return [check for name, run in looks.items() for check in caught(Stage(part="mechanism", name=name, run=run))]


@torch.no_grad()
def _loss_count(row: Packed, samples: Sequence[ProbeSample]) -> Check:
    return check_loss_count(row(samples), samples)


# ---------------------------------------------------------------------- equality


def _equality(subject: Subject, truth: Truth, way: Packed) -> list[Check]:
    errors = compare(way(subject.samples).outcome(subject.model, subject.samples), truth.outcome)
    given = "padded" if way.padded else "row"
    checks = [
        _equal(f"{given}: logits", errors.logits, truth.limits.logits),
        _equal(f"{given}: loss", errors.loss, truth.limits.loss),
    ]
    for group, found in errors.gradients.items():
        limit = truth.limits.gradients.get(group, FLOOR["gradients"])
        checks.append(_equal(f"{given}: gradient of {group}", found.error, limit, of=found.parameter))
    return checks


def _equal(name: str, seen: float, allowed: float, *, of: str = "") -> Check:
    if seen <= allowed:
        return Check(part="equality", name=name, finding="ok", seen=seen, allowed=allowed)
    detail = f"off by {seen:.1e}, allowed {allowed:.1e}" + (f", in {of}" if of else "")
    return Check(part="equality", name=name, finding="differs", seen=seen, allowed=allowed, detail=detail)


# ---------------------------------------------------------------------- work


def count_pairs(subject: Subject, way: Way) -> tuple[int | None, bool]:
    """(pairs that one layer of the text model computes, whether in a dense matrix); None: no kernel showed any."""
    layers = children(subject.family.language_model(subject.core), "self_attn").values()
    with torch.no_grad(), counted_pairs(layers) as pairs:
        way(subject.samples)
    return pairs.a_layer, pairs.dense > 0


def _pairs(subject: Subject, row: Packed) -> Check:
    needed = sum(len(sample.input_ids) ** 2 for sample in subject.samples)
    # Kernels that must write every token of a row attend inside each gap as well.
    everywhere = sum((stop - start) ** 2 for start, stop in pairwise(row.segments(subject.samples).kernel))
    seen, dense = count_pairs(subject, row)
    check = Check(part="work", name="attended pairs", finding="ok", seen=seen, allowed=needed)
    if seen is None:
        return replace(check, finding="not counted", detail="no known kernel ran")
    if dense:
        detail = f"a dense mask: {seen} pairs are computed, {needed} are of the same sample"
        return replace(check, finding="not counted", detail=detail)
    if seen == everywhere > needed:
        return replace(check, detail=f"{everywhere - needed} of them inside gaps")
    if seen == needed:
        return check
    detail = f"a layer computes {seen} pairs, the sum of length² is {needed}"
    return replace(check, finding="differs", cause="mask", detail=detail)


def _waits(subject: Subject, row: Packed) -> Check:
    def step() -> None:
        backward(row.step(given).loss)
        subject.model.zero_grad(set_to_none=True)

    given = row.given(subject.samples)
    step()  # the first step of a kind may look things up that are remembered
    with counted_waits(device_of(subject.core)) as waits:
        step()
    model = f"the model's own code waits {waits.others} times" if waits.others else "nor does the model's own code"
    if not waits.ours:
        return Check(part="work", name="host waits", finding="ok", seen=0, allowed=0, detail=model)
    detail = f"{', '.join(sorted(set(waits.ours)))}; {model}"
    return Check(part="work", name="host waits", finding="waits", seen=len(waits.ours), allowed=0, detail=detail)
