"""Everything that is checked of packed samples. Packing is enabled here, and an exception is a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from vlmpack.model import PackedStep, disable_packing
from vlmpack.proof.circumstances import GAPS, ROW, Circumstance, computed_in
from vlmpack.proof.mechanisms import check_cache, check_delta, check_mask, check_positions
from vlmpack.proof.outcome import FLOOR, backward, compare, distance, host, rms_distance
from vlmpack.proof.report import BAD, Cause, Check, Part, said
from vlmpack.proof.routers import check_balance
from vlmpack.proof.samples import ProbeSample, Words, perturbed
from vlmpack.proof.scene import LEAK, children, moved, watch
from vlmpack.proof.subject import Reference, Seen, Subject, Truth, in_autocast, seen_alone, with_padded_errors
from vlmpack.proof.totals import check_dispatch, check_given, check_packed, check_returned, check_totals
from vlmpack.proof.vision import check_vision
from vlmpack.proof.ways import Packed, Pass, PlainPadded, Way, device_of
from vlmpack.proof.work import counted_pairs, counted_waits

Say = Callable[[str], None]

ALWAYS = (GAPS, ROW)
"""Circumstances in which mechanisms are looked at even if everything is exact: elsewhere they are if it is not."""


def packed_checks(subject: Subject, truth: Truth, *, say: Say) -> list[Check]:
    """All of them; `say` is told what comes next."""
    checks, mechanisms = [], []
    for circumstance in subject.circumstances:
        say(circumstance.title)
        found = _examined(subject, truth, circumstance)
        checks += [check for check in found if check.part != "mechanism"]
        mechanisms += [check for check in found if check.part == "mechanism"]
    say("work")
    with _packed(subject, GAPS) as row:
        checks += caught("work", "attended pairs", lambda: [_pairs(subject, row)])
        checks += caught("work", "host waits", lambda: [_waits(subject, row)])
    return [*checks, *_each_once(mechanisms)]


def caught(part: Part, name: str, run: Callable[[], list[Check]]) -> list[Check]:
    """A probe does not die of what it finds."""
    try:
        return run()
    except Exception as error:
        return [Check(part=part, name=name, finding="fails", detail=said(error))]


def _each_once(checks: Sequence[Check]) -> list[Check]:
    """One line a mechanism: the worst that was found of it in any circumstance."""
    named: dict[str, list[Check]] = {}
    for check in checks:
        named.setdefault(check.name, []).append(check)
    order = {finding: place for place, finding in enumerate((*BAD, "ok"))}
    return [min(found, key=lambda check: order.get(check.finding, len(order))) for found in named.values()]


@contextmanager
def _packed(subject: Subject, circumstance: Circumstance) -> Iterator[Packed]:
    """Packing, enabled for a circumstance; mode and precision are set by whoever computes."""
    settings = circumstance.settings(subject.settings, subject.samples)
    way = Packed(
        step=PackedStep(subject.model, settings),
        family=subject.family,
        circumstance=circumstance,
        rule=settings.slots,
        poison=subject.words.low,
    )
    try:
        yield way
    finally:
        disable_packing(subject.model)


# ---------------------------------------------------------------------- one circumstance


def _examined(subject: Subject, truth: Truth, circumstance: Circumstance) -> list[Check]:
    reference = _reference(subject, truth, circumstance)
    if reference is None:
        detail = f"two runs of the same samples alone differ in this mode: {UNSTEADY}"
        name = f"{circumstance.name}: each sample alone"
        return [
            Check(part="equality", name=name, finding="not deterministic", cause="not deterministic", detail=detail)
        ]
    with _packed(subject, circumstance) as way:
        checks = _compared(subject, way, reference)
    if circumstance.autocast and any(check.part == "equality" and check.is_bad for check in checks):
        reference = with_padded_errors(subject, reference)
        with _packed(subject, circumstance) as way:
            checks = _compared(subject, way, reference)
    bad = any(check.is_bad for check in checks)
    low = circumstance.autocast or subject.is_low
    if (bad or low or circumstance in ALWAYS) and not any(check.finding == "fails" for check in checks):
        checks += _isolation(subject, circumstance)
    if circumstance in ALWAYS or any(check.is_bad for check in checks):
        same_as_eval = circumstance in ALWAYS and reference.outcome is truth.eval.outcome
        seen = truth.seen if same_as_eval else seen_alone(subject, circumstance)
        with _packed(subject, circumstance) as way:
            checks = _with_mechanisms(subject, way, seen, checks)
    if truth.routers is not None and circumstance in ALWAYS:
        counted = not any(check.is_bad and check.name in ("head", "loss count") for check in checks)
        with _packed(subject, circumstance) as way:
            run = partial(_balance, subject, truth, way, reference, counted=counted)
            checks += caught("equality", "load-balancing loss", run)
    return checks


UNSTEADY = "set its dropout probabilities to 0, or use deterministic kernels, and probe again"


def _reference(subject: Subject, truth: Truth, circumstance: Circumstance) -> Reference | None:
    reference = truth.train if circumstance.train else truth.eval
    if reference is None or not circumstance.autocast:
        return reference
    return in_autocast(subject, reference)


def _compared(subject: Subject, way: Packed, reference: Reference) -> list[Check]:
    """What the batch is packed to, and everything that comes of one pass with its backward pass."""
    return [
        *caught("mechanism", "packing", lambda: [_packed_row(subject, way)]),
        *caught("equality", way.circumstance.name, lambda: _equality(subject, way, reference)),
    ]


def _packed_row(subject: Subject, way: Packed) -> Check:
    """With host metadata and without them, whatever the circumstance has: only a collator gives them."""
    samples = subject.samples
    rows = [way.row(samples, metadata=metadata) for metadata in (True, False)]
    return max((check_packed(row, samples, way.segments(samples)) for row in rows), key=lambda check: check.is_bad)


def _with_mechanisms(subject: Subject, way: Packed, seen: Seen, checks: list[Check]) -> list[Check]:
    """The checks so far, and the mechanisms by themselves. Where other tokens go in than the samples', or come out at
    other places, everything is compared with something else, and only that counts."""
    with computed_in(subject.model, way.circumstance, subject.autocast):
        found = caught("mechanism", "mechanisms", lambda: _mechanisms(subject, way, seen))
    where = "" if way.circumstance is GAPS else f"in {way.name}: "
    found = [replace(check, detail=where + check.detail) if check.is_bad else check for check in found]
    if any(check.name in ("packing", "sample results") and check.is_bad for check in found):
        checks = [check for check in checks if check.part != "mechanism"]
    return checks + found


# ---------------------------------------------------------------------- isolation


def _isolation(subject: Subject, circumstance: Circumstance) -> list[Check]:
    """In the row with gaps each sample is changed by itself, elsewhere every other one at once."""
    samples = subject.samples
    if circumstance is GAPS:
        groups = {f"change sample {i} ({sample.kind})": [i] for i, sample in enumerate(samples)}
    else:
        groups = {f"{circumstance.name}: change every other": list(range(0, len(samples), 2))}
        groups[f"{circumstance.name}: change the rest"] = list(range(1, len(samples), 2))

    def run() -> list[Check]:
        with _packed(subject, circumstance) as way, computed_in(subject.model, circumstance, subject.autocast):
            moves = dict(zip(groups, _moves(way, samples, subject.words, list(groups.values())), strict=True))
            if circumstance is GAPS:
                moves["change what stands in gaps"] = _gaps(way, samples)
            noise = _noise(way, samples) if max(moves.values()) > LEAK else 0.0
        if max(moves.values()) > LEAK and subject.family.has("experts"):
            noise = max(noise, _noise_of_experts(subject, circumstance))
        return [_moved(name, move, LEAK + 2 * noise) for name, move in moves.items()]

    return caught("isolation", f"{circumstance.name}: isolation", run)


def _gaps(way: Packed, samples: Sequence[ProbeSample]) -> float:
    return _moved_most(replace(way, poison=way.poison + 1)(samples).logits, way(samples).logits)


def _noise(way: Way, samples: Sequence[ProbeSample]) -> float:
    """What moves when nothing is changed."""
    return _moved_most(way(samples).logits, way(samples).logits)


MOST_NOISE = 1e-3
"""Of experts, as a part of the largest logit: a leak is not excused by more."""


def _noise_of_experts(subject: Subject, circumstance: Circumstance) -> float:
    """Experts multiply the tokens of all samples at once, and how that rounds may depend on how many there are: what
    moves in plain transformers' padded batch."""
    with computed_in(subject.model, circumstance, subject.autocast), torch.no_grad():
        return min(max(leaks(PlainPadded(**subject.plain), subject.samples, subject.words)), MOST_NOISE)


def _moved(name: str, seen: float, allowed: float) -> Check:
    if seen <= allowed:
        return Check(part="isolation", name=name, finding="ok", seen=seen, allowed=allowed)
    detail = f"the logits of another sample move by {seen:.1e} of their size"
    return Check(part="isolation", name=name, finding="leaks", seen=seen, allowed=allowed, detail=detail)


def leaks(way: Way, samples: Sequence[ProbeSample], words: Words) -> list[float]:
    """The most that the logits of every other sample move when only the rest change, as a part of the largest one."""
    return _moves(way, samples, words, [list(range(first, len(samples), 2)) for first in (0, 1)])


def _moves(way: Way, samples: Sequence[ProbeSample], words: Words, groups: Sequence[Sequence[int]]) -> list[float]:
    """For each group of samples: the most that the others' logits move when only it changes."""
    before = [x.detach() for x in way(samples).logits]
    worst = []
    for group in groups:
        given = [perturbed(sample, words) if i in group else sample for i, sample in enumerate(samples)]
        after = way(given).logits
        others = [i for i in range(len(samples)) if i not in group]
        worst.append(_moved_most([after[i] for i in others], [before[i] for i in others]))
    return worst


def _moved_most(after: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> float:
    return max(moved(x, y, [(0, len(y))], dim=0) for x, y in zip(after, before, strict=True))


# ---------------------------------------------------------------------- mechanisms


def _mechanisms(subject: Subject, way: Packed, seen: Seen) -> list[Check]:
    if (packed := _packed_row(subject, way)).is_bad:
        return [packed]
    scene = watch(subject.core, subject.family, way, subject.samples)
    if (given := check_given(scene)).is_bad:
        return [given]
    if (returned := check_returned(scene)).is_bad:
        return [returned]
    looks: dict[Cause | str, Callable[[], list[Check]]] = {
        "positions": lambda: [check_positions(scene, seen.rotary)],
        "mask": lambda: [check_mask(scene)],
        "cache": lambda: [check_cache(scene)],
        "gated delta layers": lambda: check_delta(scene),
        "router": lambda: [check_dispatch(scene)],
        "vision": lambda: [check_vision(scene, seen.features, own_error=seen.feature_error)],
    }
    return [given, returned, *(check for name, run in looks.items() for check in caught("mechanism", name, run))]


def _balance(subject: Subject, truth: Truth, way: Packed, reference: Reference, *, counted: bool) -> list[Check]:
    """`counted`: the loss without routers is right."""
    assert truth.routers is not None
    with computed_in(subject.model, way.circumstance, subject.autocast):
        found = way(subject.samples, routers=True, by_step=True)
        pairs = list(zip([host(x) for x in found.logits], reference.outcome.logits, strict=True))
        far = rms_distance(pairs) if subject.is_low else max(distance(*pair) for pair in pairs)
        right = counted and far <= reference.limits.logits
        return check_balance(way, subject.core, subject.samples, truth.routers, found, right=right)


# ---------------------------------------------------------------------- equality


def _equality(subject: Subject, way: Packed, reference: Reference) -> list[Check]:
    def by_step() -> Pass:
        with computed_in(subject.model, way.circumstance, subject.autocast):
            return way(subject.samples, by_step=True)

    with computed_in(subject.model, way.circumstance, subject.autocast), torch.enable_grad():
        found = way(subject.samples)
    low = subject.is_low or way.circumstance.autocast
    errors = compare(found.outcome(subject.model, subject.samples), reference.outcome, low=low)
    where, limits = way.circumstance.name, reference.limits
    checks = [
        _equal(f"{where}: logits", errors.logits, limits.logits),
        _equal(f"{where}: loss", errors.loss, limits.loss),
        _equal(f"{where}: sample losses", errors.sample_losses, limits.sample_losses),
    ]
    for group, worst in errors.gradients.items():
        limit = limits.gradients.get(group, FLOOR["gradients"])
        checks.append(_equal(f"{where}: gradient of {group}", worst.error, limit, of=worst.parameter))
    return checks + check_totals(found, subject.samples, by_step=by_step)


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
