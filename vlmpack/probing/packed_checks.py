"""Run every check of packed samples, circumstance by circumstance. What a check raises is a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from vlmpack.model.enable import disable_packing
from vlmpack.model.mechanisms import ModelParts
from vlmpack.model.mechanisms.attention import layer_reaches, spans_in
from vlmpack.model.step import PackedStep
from vlmpack.probing.audio import check_audio, check_padding
from vlmpack.probing.forward_passes import (
    GAPS,
    ROW,
    Circumstance,
    ForwardPass,
    PackedPass,
    PlainPaddedPass,
    ProbedModel,
)
from vlmpack.probing.losses import RouterLosses, check_losses, check_router_losses, check_sample_logits
from vlmpack.probing.mechanisms import (
    check_cache,
    check_cache_that_raises,
    check_delta,
    check_mask,
    check_model_inputs,
    check_packed_row,
    check_positions,
    check_query_scale,
    check_routing,
    check_vision,
)
from vlmpack.probing.reference import ProbeSetup, Reference, References, value_of
from vlmpack.probing.report import BAD, Check, Part
from vlmpack.probing.routing import HOLD_ALL, RoutingRecord, held_choices, open_share, routing
from vlmpack.probing.trace import LEAK, counted_pairs, counted_syncs, first_moved, largest_move, submodules, trace
from vlmpack.testing.comparison import backward, compare, distance, rms_distance, to_host
from vlmpack.testing.samples import Sample, kind_of, perturbed, word_ids

Progress = Callable[[str], None]

ALWAYS = (GAPS, ROW)
"""Circumstances in which mechanisms are checked even if everything is exact: elsewhere only if it is not."""
MOST_NOISE = 1e-3
"""Of experts, as a part of the largest logit: a leak is not excused by more."""
UNSTEADY = "set its dropout probabilities to 0, or use deterministic kernels, and probe again"


def packed_checks(setup: ProbeSetup, references: References, *, progress: Progress) -> list[Check]:
    """Run all of them; `progress` gets the title of what comes next."""
    checks, mechanisms = [], []
    for circumstance in setup.circumstances:
        progress(circumstance.title)
        found = caught("equality", circumstance.name, partial(_circumstance_checks, setup, references, circumstance))
        for check in found:
            (mechanisms if check.part == "mechanism" else checks).append(check)
    progress("work")
    checks += _caught_packed("work", "attended pairs", setup, GAPS, lambda packed: [_check_pairs(setup, packed)])
    checks += _caught_packed("work", "host-device syncs", setup, GAPS, lambda packed: [check_syncs(setup, packed)])
    return [*checks, *_worst_of_each(mechanisms)]


def caught(part: Part, name: str, run: Callable[[], list[Check]]) -> list[Check]:
    """Run checks; what they raise is a finding."""
    try:
        return run()
    except Exception as error:
        return [Check.raised(part, name, error)]


def _caught_packed(
    part: Part, name: str, setup: ProbeSetup, circumstance: Circumstance, run: Callable[[PackedPass], list[Check]]
) -> list[Check]:
    """Run checks with packing enabled; what enabling it raises is a finding too."""

    def enabled() -> list[Check]:
        with packing(setup, circumstance) as packed:
            return run(packed)

    return caught(part, name, enabled)


def _worst_of_each(checks: Sequence[Check]) -> list[Check]:
    """One line a mechanism: the worst finding of any circumstance."""
    named: dict[str, list[Check]] = {}
    for check in checks:
        named.setdefault(check.name, []).append(check)
    order = {finding: place for place, finding in enumerate((*BAD, "ok"))}
    return [min(alike, key=lambda check: order.get(check.finding, len(order))) for alike in named.values()]


@contextmanager
def packing(setup: ProbeSetup, circumstance: Circumstance) -> Iterator[PackedPass]:
    """Enable packing with the settings of a circumstance; mode and precision are set by the code that computes."""
    settings = circumstance.settings(setup.settings, setup.samples)
    try:
        yield PackedPass(
            probed=setup.probed,
            step=PackedStep(setup.probed.model, settings),
            circumstance=circumstance,
            rule=settings.slots,
            poison=word_ids(setup.probed.config).start,
        )
    finally:
        disable_packing(setup.probed.model)


# ---------------------------------------------------------------------- one circumstance


def _circumstance_checks(setup: ProbeSetup, references: References, circumstance: Circumstance) -> list[Check]:
    reference, always = references.of(circumstance), circumstance in ALWAYS
    if reference is None:
        return [not_deterministic(f"{circumstance.name}: ", "two runs of the same samples alone differ in this mode")]
    run_packed = partial(_caught_packed, setup=setup, circumstance=circumstance)
    checks = run_packed("mechanism", "packing", run=lambda packed: [_check_packed_row(setup, packed)])
    checks += run_packed("equality", circumstance.name, run=lambda packed: check_equality(setup, packed, reference))
    low = circumstance.autocast or setup.probed.is_low
    if (always or low or any(check.is_bad for check in checks)) and all(check.finding != "fails" for check in checks):
        checks += caught(
            "isolation", f"{circumstance.name}: isolation", lambda: _isolation_checks(setup, circumstance, reference)
        )
    if always or any(check.is_bad for check in checks):
        checks = _with_mechanisms(setup, circumstance, reference, checks)
    if always and references.routers is not None:
        right = not any(check.is_bad and check.name in ("head", "loss count") for check in checks)

        def of_routers(packed: PackedPass) -> list[Check]:
            routers = value_of(references.routers)
            return [] if routers is None else check_routers(setup, packed, reference, routers, losses_right=right)

        checks += run_packed("equality", "load-balancing loss", run=of_routers)
    return checks


def not_deterministic(where: str, observation: str) -> Check:
    """Report that the model alone returns other numbers when it is run again."""
    return Check(
        part="equality",
        name=f"{where}each sample alone",
        finding="not deterministic",
        cause="not deterministic",
        detail=f"{observation}: {UNSTEADY}",
    )


def _check_packed_row(setup: ProbeSetup, packed: PackedPass) -> Check:
    """Check with metadata on the host and without, in any circumstance: collators send it, other batches have none."""
    samples = setup.samples
    rows = [packed.row(samples, metadata) for metadata in (True, False)]
    checks = [check_packed_row(row, samples, packed.segments(samples)) for row in rows]
    return max(checks, key=lambda check: check.is_bad)


def check_equality(setup: ProbeSetup, packed: PackedPass, reference: Reference) -> list[Check]:
    """Compare logits, losses and gradients of packed samples with those of the samples alone.

    Choices of experts that rounding alone decides are held to those of the samples alone, and counted.
    """
    circumstance = packed.circumstance

    def by_step():
        with setup.computing(circumstance), held_to(reference, packed, setup):
            return packed(setup.samples, by_step=True)

    with setup.computing(circumstance), torch.enable_grad(), held_to(reference, packed, setup) as routed:
        result = packed(setup.samples)
    low = setup.probed.is_low or circumstance.autocast
    errors = compare(result.outcome(setup.probed.model, setup.samples), reference.outcome, low=low)
    checks = [
        Check.measured("equality", f"{circumstance.name}: {each.name}", each.error, each.allowed, str(each))
        for each in errors.measured(reference.limits)
    ]
    if routed.held:
        detail = f"choices that rounding alone decides, held to those of the samples alone: {routed.held}"
        name = f"{circumstance.name}: choice of experts"
        checks.append(Check(part="equality", name=name, finding="ok", value=routed.held, detail=detail))
    return checks + caught("mechanism", "loss count", lambda: check_losses(result, setup.samples, by_step=by_step))


def held_to(reference: Reference, packed: PackedPass, setup: ProbeSetup) -> AbstractContextManager[RoutingRecord]:
    """Hold choices of experts that rounding alone decides to those of the samples alone."""
    share = open_share(is_low=setup.probed.is_low or packed.circumstance.autocast)
    return routing(setup.probed, held_choices(packed, setup.samples, reference.choices, share=share))


def all_held_to(
    reference: Reference, packed: PackedPass, setup: ProbeSetup, samples: Sequence[Sample] | None = None
) -> AbstractContextManager[RoutingRecord]:
    """Hold every choice of experts, so that each gets as many tokens whatever samples are exchanged.

    `samples`: of the pass, if they lie at other places than the probe's.
    """
    held = held_choices(packed, samples or setup.samples, reference.choices, share=HOLD_ALL)
    return routing(setup.probed, held)


# ---------------------------------------------------------------------- isolation


def _isolation_checks(setup: ProbeSetup, circumstance: Circumstance, reference: Reference) -> list[Check]:
    """Change each sample by itself in the row with gaps, elsewhere every other one at once."""
    detail = "the logits of another sample move by {:.1e} of their size"
    with packing(setup, circumstance) as packed, setup.computing(circumstance), all_held_to(reference, packed, setup):
        before, moves = sample_logits(packed, setup.samples), dict[str, float]()
        for name, (forward, samples, others) in _exchanges(setup, circumstance, packed).items():
            after = sample_logits(forward, samples)
            moves[name] = most_moved([after[i] for i in others], [before[i] for i in others])
        leaks = max(moves.values()) > LEAK
        noise = most_moved(sample_logits(packed, setup.samples), before) if leaks else 0.0
    if leaks:
        noise = max(noise, expert_noise(setup, circumstance))
        worst = max(moves, key=moves.__getitem__)
        where = _first_moved_by(worst, setup, circumstance, reference, limit=LEAK + 2 * noise)
        detail += "" if where is None else f", first in the output of {where}"
    return [
        Check.measured("isolation", name, move, LEAK + 2 * noise, detail.format(move), finding="leaks")
        for name, move in moves.items()
    ]


def _exchanges(
    setup: ProbeSetup, circumstance: Circumstance, packed: PackedPass
) -> dict[str, tuple[PackedPass, Sequence[Sample], list[int]]]:
    """List passes with something exchanged, by name: the pass, its samples, and those of them that must not move."""
    samples, numbers = setup.samples, range(len(setup.samples))
    groups = {f"change sample {i} ({kind_of(sample)})": [i] for i, sample in enumerate(samples)}
    if circumstance is not GAPS:
        groups = {f"{circumstance.name}: change every other": [*numbers[::2]]}
        groups[f"{circumstance.name}: change the rest"] = [*numbers[1::2]]
    exchanges: dict[str, tuple[PackedPass, Sequence[Sample], list[int]]] = {
        name: (packed, _changed(samples, setup.probed.config, group), [i for i in numbers if i not in group])
        for name, group in groups.items()
    }
    if circumstance is GAPS:
        exchanges["change the token in gaps"] = replace(packed, poison=packed.poison + 1), samples, [*numbers]
    return exchanges


def _first_moved_by(
    name: str, setup: ProbeSetup, circumstance: Circumstance, reference: Reference, *, limit: float
) -> str | None:
    """Name the module in whose output samples first move by one of the exchanges, see `first_moved`."""
    with packing(setup, circumstance) as packed, setup.computing(circumstance), all_held_to(reference, packed, setup):
        forward, samples, others = _exchanges(setup, circumstance, packed)[name]
        segments = packed.segments(setup.samples)
        spans = [segments.spans[i] for i in others]
        passes = partial(packed, setup.samples), partial(forward, samples)
        return first_moved(*passes, setup.probed, spans, width=segments.total, limit=limit)


def expert_noise(setup: ProbeSetup, circumstance: Circumstance) -> float:
    """The most that logits of samples in a plain padded batch move with other samples; 0 without experts.

    Experts multiply the tokens of all samples at once, and how that rounds may depend on how many there are.
    """
    if not setup.probed.family.has("experts"):
        return 0.0
    with setup.computing(circumstance), torch.no_grad():
        return min(leak(PlainPaddedPass(probed=setup.probed), setup.probed, setup.samples), MOST_NOISE)


def leak(forward: ForwardPass, probed: ProbedModel, samples: Sequence[Sample]) -> float:
    """The most that the logits of every other sample move when only the rest change, as a part of the largest one."""
    before = sample_logits(forward, samples)
    groups = [list(range(first, len(samples), 2)) for first in (0, 1)]
    return max(_others_move(forward, samples, probed.config, before, group) for group in groups)


def _others_move(
    forward: ForwardPass, samples: Sequence[Sample], config: object, before: list[torch.Tensor], group: Sequence[int]
) -> float:
    """The most that the logits of other samples move when only a group of them changes."""
    after = sample_logits(forward, _changed(samples, config, group))
    others = [i for i in range(len(samples)) if i not in group]
    return most_moved([after[i] for i in others], [before[i] for i in others])


def _changed(samples: Sequence[Sample], config: object, group: Sequence[int]) -> list[Sample]:
    """The samples, with other contents in a group of them."""
    return [perturbed(sample, config) if i in group else sample for i, sample in enumerate(samples)]


def sample_logits(forward: ForwardPass, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """[L, V] of each sample, without a graph."""
    return [x.detach() for x in forward(samples).logits]


def most_moved(after: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> float:
    """The most that logits of any sample moved, as a part of the largest one."""
    return max(largest_move(x, y, [(0, len(y))], dim=0) for x, y in zip(after, before, strict=True))


# ---------------------------------------------------------------------- mechanisms


def _with_mechanisms(
    setup: ProbeSetup, circumstance: Circumstance, reference: Reference, checks: list[Check]
) -> list[Check]:
    """Add the mechanisms by themselves. Where other tokens go in than the samples', or come out at other places,
    everything is compared with something else, and only that counts."""

    def run(packed: PackedPass) -> list[Check]:
        with setup.computing(circumstance):
            return _mechanism_checks(setup, packed, reference)

    mechanisms = _caught_packed("mechanism", "mechanisms", setup, circumstance, run)
    where = "" if circumstance is GAPS else f"in {circumstance.title}: "
    mechanisms = [replace(check, detail=where + check.detail) if check.is_bad else check for check in mechanisms]
    if any(check.name in ("packing", "sample results") and check.is_bad for check in mechanisms):
        checks = [check for check in checks if check.part != "mechanism"]
    return checks + mechanisms


def _mechanism_checks(setup: ProbeSetup, packed: PackedPass, reference: Reference) -> list[Check]:
    if (row := _check_packed_row(setup, packed)).is_bad:
        return [row]
    try:
        traced = trace(packed, setup.probed, setup.samples)
    except Exception:
        if (cache := check_cache_that_raises(packed, setup.probed, setup.samples)).is_bad:
            return [cache]
        raise
    if (inputs := check_model_inputs(traced)).is_bad:
        return [inputs]
    if (logits := check_sample_logits(traced)).is_bad:
        return [logits]
    places = [torch.arange(*span) for span in traced.segments.spans]
    masks = caught("mechanism", "mask", lambda: [check_mask(traced)])
    runs: dict[str, Callable[[], list[Check]]] = {
        "positions": lambda: [check_positions(traced, reference.rotary)],
        # attention that sees other tokens than alone is another one, whatever the queries' factors
        "query scale": lambda: [] if masks[0].is_bad else check_query_scale(traced, places),
        "mask": lambda: masks,
        "cache": lambda: [check_cache(traced)],
        "gated delta layers": lambda: check_delta(traced),
        "router": lambda: [check_routing(traced)],
        "vision": lambda: [check_vision(traced, reference.features, plain_error=reference.feature_error)],
        "audio": lambda: [check_audio(traced, reference.audio)],
        "padding of audio": lambda: check_padding(packed, setup.probed),
    }
    return [inputs, logits, *(check for name, run in runs.items() for check in caught("mechanism", name, run))]


def check_routers(
    setup: ProbeSetup, packed: PackedPass, reference: Reference, routers: RouterLosses, *, losses_right: bool
) -> list[Check]:
    """Compare the routers' losses with those of the padded batch. `losses_right`: those of targets are right.

    They count choices of experts, so they are not compared where rounding alone decides one.
    """
    with setup.computing(packed.circumstance), held_to(reference, packed, setup) as routed:
        result = packed(setup.samples, router_losses=True, by_step=True)
        pairs = list(zip([to_host(x) for x in result.logits], reference.outcome.logits, strict=True))
        error = rms_distance(pairs) if setup.probed.is_low else max(distance(*pair) for pair in pairs)
        right = losses_right and error <= reference.limits.logits
        checks = check_router_losses(packed, setup.samples, routers, result, right=right)
    if not routed.held or setup.probed.is_low:  # in low precision their limits allow for it
        return checks
    detail = f"choices of experts that rounding alone decides, and that this counts: {routed.held}"
    uncounted = {"finding": "not counted", "cause": None, "detail": detail}
    return [replace(check, **uncounted) if check.is_bad else check for check in checks]


# ---------------------------------------------------------------------- work


def count_pairs(forward: Callable[[], object], probed: ProbedModel) -> tuple[int | None, bool]:
    """(pairs that one layer of the text model computes, whether in a dense matrix); None: no kernel showed any."""
    layers = submodules(probed.family.language_model(probed.core), "self_attn").values()
    with counted_pairs(layers) as pairs:
        forward()
    return pairs.per_layer, pairs.dense > 0


def _check_pairs(setup: ProbeSetup, packed: PackedPass) -> Check:
    with torch.no_grad():
        computed, dense = count_pairs(lambda: packed(setup.samples), setup.probed)
        probed, sparse = setup.probed, setup.probed.family.has("per_sample")
        parts = ModelParts(family=probed.family, core=probed.core)
        local = not sparse and any(reach.is_local for reach in layer_reaches(parts).values())
    needed = sum(len(sample["input_ids"]) ** 2 for sample in setup.samples)
    # Varlen kernels must write every token of a row, so they attend inside each gap as well.
    with_gaps = sum((stop - start) ** 2 for start, stop in pairwise(packed.segments(setup.samples).kernel))
    if spans_in(parts) is not None:  # their queries and all keys up to their ends go through a second call
        of_spans = sum((stop - start) * stop for sample in setup.samples for start, stop in probed.runs_of(sample))
        needed, with_gaps = needed + of_spans, with_gaps + of_spans
    check = Check(part="work", name="attended pairs", finding="ok", value=computed, allowed=needed)
    if computed is None:
        return replace(check, finding="not counted", detail="no known kernel ran")
    if computed == needed:
        return check
    if computed == with_gaps:
        return replace(check, allowed=with_gaps, detail=f"{with_gaps - needed} of them inside gaps")
    if local and computed < with_gaps:
        most = needed if computed < needed else with_gaps
        return replace(check, allowed=most, detail=f"{most - computed} pairs less than without windows and chunks")
    if dense and computed > needed:
        detail = f"a dense mask: {computed} pairs are computed, {needed} are of the same sample"
        return replace(check, finding="not counted", detail=detail)
    detail = f"a layer computes {computed} pairs, the sum of length² is {needed}"
    return replace(check, finding="differs", cause="mask", detail=detail)


def check_syncs(setup: ProbeSetup, packed: PackedPass) -> Check:
    """Count the host-device syncs of a step in vlmpack's code."""
    inputs = packed.inputs(setup.samples)

    def step() -> None:
        backward(packed.step(inputs).loss)
        setup.probed.model.zero_grad(set_to_none=True)

    step()  # the first step of a kind may fill caches of tensors
    with counted_syncs(setup.probed.device) as syncs:
        step()
    of_model = f"the model's code syncs {syncs.others} times" if syncs.others else "none in the model's code either"
    detail = of_model if not syncs.package else f"{', '.join(sorted(set(syncs.package)))}; {of_model}"
    return Check(
        part="work",
        name="host-device syncs",
        finding="syncs" if syncs.package else "ok",
        value=len(syncs.package),
        allowed=0,
        detail=detail,
    )
