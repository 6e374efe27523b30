"""Run every check of packed samples, circumstance by circumstance. What a check raises is a finding.

Of a row whose samples share prefixes, which are computed once, each sample is compared along its path in the tree, and
each piece is exchanged wherever it occurs: descendants move; siblings, ancestors and strangers do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch

from vlmpack.layout.sharing import unshare
from vlmpack.model.enable import disable_packing
from vlmpack.model.step import PackedStep
from vlmpack.probing.difference import LEAK, Difference, compare_modules
from vlmpack.probing.forward_passes import (
    GAPS,
    ROW,
    TREE,
    Circumstance,
    ForwardPass,
    PackedPass,
    PlainPaddedPass,
    ProbedModel,
    frames_as_images,
)
from vlmpack.probing.mechanisms import (
    RouterLosses,
    check_cache,
    check_losses,
    check_router_losses,
    check_sample_logits,
    check_tokens,
    first_wrong,
    module_checks,
    reference_router_losses,
)
from vlmpack.probing.reference import (
    HOLD_ALL,
    ProbeSetup,
    Reference,
    References,
    RoutingRecord,
    compute_reference,
    held_choices,
    open_share,
    record_references,
    routing,
    token_indices_of,
    value_of,
    value_or_error,
)
from vlmpack.probing.report import BAD, Check, Part
from vlmpack.probing.work import check_pairs, check_syncs, tree_work
from vlmpack.testing.branching import Branches
from vlmpack.testing.comparison import compare, distance, rms_distance, to_host
from vlmpack.testing.samples import Sample, build_sample, kind_of, media_of, perturbed, word_ids

Progress = Callable[[str], None]

ALWAYS = (GAPS, ROW)
"""Circumstances in which mechanisms are checked even if everything is exact: elsewhere only if it is not."""
MOST_NOISE = 1e-3
"""Of experts, as a part of the largest logit: a leak is not excused by more."""
UNSTEADY = "set its dropout probabilities to 0, or use deterministic kernels, and probe again"


def packed_checks(setup: ProbeSetup, references: References, *, progress: Progress) -> list[Check]:
    """Run all of them; `progress` gets the title of what comes next."""
    checks, mechanisms, wrong = [], [], list[str]()
    for circumstance in setup.circumstances:
        progress(circumstance.title)
        run = partial(_circumstance_checks, setup, references, circumstance, wrong)
        found = caught("equality", circumstance.name, run)
        for check in found:
            (mechanisms if check.part == "mechanism" else checks).append(check)
    progress("work")
    checks += _caught_packed("work", "attended pairs", setup, GAPS, lambda packed: [check_pairs(setup, packed)])
    checks += _caught_packed("work", "host-device syncs", setup, GAPS, lambda packed: [check_syncs(setup, packed)])
    if wrong:
        where = f", first in the output of {wrong[0]}"
        checks = [replace(each, detail=each.detail + where) if each.finding == "leaks" else each for each in checks]
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


def _circumstance_checks(
    setup: ProbeSetup, references: References, circumstance: Circumstance, wrong: list[str]
) -> list[Check]:
    """Run the checks of one circumstance; the first module that is wrong is added to `wrong`."""
    reference, always = references.of(circumstance), circumstance in ALWAYS
    if reference is None:
        return [not_deterministic(f"{circumstance.name}: ", "two runs of the same samples alone differ in this mode")]
    run_packed = partial(_caught_packed, setup=setup, circumstance=circumstance)
    checks = run_packed("mechanism", "packing", run=lambda packed: [check_packed_row(setup, packed)])
    checks += run_packed("equality", circumstance.name, run=lambda packed: check_equality(setup, packed, reference))
    low = circumstance.autocast or setup.probed.is_low
    if (always or low or any(check.is_bad for check in checks)) and all(check.finding != "fails" for check in checks):
        checks += caught(
            "isolation", f"{circumstance.name}: isolation", lambda: _isolation_checks(setup, circumstance, reference)
        )
    if always or any(check.is_bad for check in checks):
        checks = _with_mechanisms(setup, circumstance, reference, checks, wrong)
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


def largest_move(after: torch.Tensor, before: torch.Tensor, spans: Iterable[tuple[int, int]], *, dim: int) -> float:
    """The most that these spans moved, as a part of the largest entry; NaN counts as infinitely far."""
    before = before.detach()
    scale = max(float(before.abs().nan_to_num().max()), 1e-30)
    difference = (after.detach() - before).abs().nan_to_num(nan=float("inf"))
    moves = [float(difference.narrow(dim, a, b - a).max()) for a, b in spans if b > a]
    return max(moves, default=0.0) / scale


def most_moved(after: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> float:
    """The most that logits of any sample moved, as a part of the largest one."""
    return max(largest_move(x, y, [(0, len(y))], dim=0) for x, y in zip(after, before, strict=True))


# ---------------------------------------------------------------------- mechanisms


def _with_mechanisms(
    setup: ProbeSetup, circumstance: Circumstance, reference: Reference, checks: list[Check], wrong: list[str]
) -> list[Check]:
    """Add the mechanisms. Where other tokens go in than the samples', or come out elsewhere, only that counts."""
    leaks = any(check.finding == "leaks" for check in checks)
    found = caught(
        "mechanism", "mechanisms", lambda: mechanism_checks(setup, circumstance, reference, leaks=leaks, wrong=wrong)
    )
    where = "" if circumstance is GAPS else f"in {circumstance.title}: "
    found = [replace(check, detail=where + check.detail) if check.is_bad else check for check in found]
    if any(check.name in ("packing", "sample results") and check.is_bad for check in found):
        checks = [check for check in checks if check.part != "mechanism"]
    return checks + found


def mechanism_checks(
    setup: ProbeSetup, circumstance: Circumstance, reference: Reference, *, leaks: bool, wrong: list[str]
) -> list[Check]:
    """Compare what goes in, every module, and what comes back with the samples alone.

    Args:
        setup: the probe's.
        circumstance: of packing.
        reference: of that circumstance.
        leaks: a sample's logits move when only other ones change.
        wrong: gets the name of the first module whose output differs.
    """
    probed, samples, low = setup.probed, setup.samples, setup.probed.is_low or circumstance.autocast
    with packing(setup, circumstance) as packed:
        if (row := check_packed_row(setup, packed)).is_bad:
            return [row]
    references = record_references(setup, circumstance, reference.choices)
    with packing(setup, circumstance) as packed:
        found, token_indices = Difference(), token_indices_of(packed, samples)
        try:
            with setup.computing(circumstance), all_held_to(reference, packed, setup):
                compare_modules(
                    packed, probed, samples, references, token_indices, found=found, shares=circumstance.shares
                )
        except Exception:
            if (cache := check_cache(found)).is_bad:
                return [cache]
            raise
        if (inputs := _check_model_inputs(setup, packed, found, token_indices)).is_bad:
            return [inputs]
        if (logits := check_sample_logits(found, references, low=low)).is_bad:
            return [logits]
        checks = module_checks(found, probed, token_indices, low=low, leaks=leaks)
        if (name := first_wrong(found, probed, low=low)) is not None:
            wrong.append(name)
    of_audio = caught("mechanism", "audio", lambda: _check_short_audio(setup, circumstance))
    return [inputs, logits, *checks, *of_audio]


def check_packed_row(setup: ProbeSetup, packed: PackedPass) -> Check:
    """Compare the row with the samples, also that of a batch that the step would pack, with and without metadata on the
    host: collators send it, other batches have none."""
    samples, segments, checks = setup.samples, packed.segments(setup.samples), list[Check]()
    ids = [sample["input_ids"] for sample in samples]
    for metadata in (True,) if packed.circumstance.shares else (True, False):
        row = packed.row(samples, metadata)
        if packed.circumstance.shares:
            if row.tree is None:
                return Check.wrong("packing", "samples that begin alike share nothing")
            row = unshare(row, read_media=setup.probed.family.media_reader(setup.probed.config))
        token_indices = [torch.arange(*span) for span in segments.spans]
        checks.append(
            check_tokens(
                row.input_ids, row.media.to_hf(), media_of(samples).to_hf(), ids, token_indices, segments.total
            )
        )
    return max(checks, key=lambda check: check.is_bad)


def _check_model_inputs(
    setup: ProbeSetup, packed: PackedPass, found: Difference, token_indices: Sequence[torch.Tensor]
) -> Check:
    """Compare what reaches the model with the samples; of a tree the tokens on each path, and its distinct media."""
    samples, width = setup.samples, packed.computed(setup.samples).total
    media = media_of([*map(frames_as_images, samples)]).to_hf()
    if packed.circumstance.shares:
        row = packed.row(samples)
        assert row.tree is not None
        media, width = row.media.to_hf(), row.tree.num_tokens
    ids = [sample["input_ids"] for sample in samples]
    return check_tokens(found.inputs["input_ids"], found.inputs, media, ids, token_indices, width)


def _check_short_audio(setup: ProbeSetup, circumstance: Circumstance) -> list[Check]:
    """Compare an audio shorter than a chunk, beside a longer one, with each alone, of a tower that reads padding.

    The samples of a probe have longer ones alone: transformers' padded batch, which is compared with too, has others.
    """
    probed = setup.probed
    if probed.family.audio is None or not probed.family.audio.reads_padding or circumstance.shares:
        return []
    window = probed.config.audio_config.n_window  # half a chunk
    samples = [
        build_sample(probed.config, stretches=[3, 3], audio_frames=[n], seed=n) for n in (window + 1, 5 * window)
    ]
    setup, found = replace(setup, samples=samples), Difference()
    references = record_references(setup, circumstance, [{}, {}])
    with packing(setup, circumstance) as packed, setup.computing(circumstance):
        token_indices = token_indices_of(packed, samples)
        compare_modules(packed, probed, samples, references, token_indices, found=found)
        checks = module_checks(found, probed, token_indices, low=probed.is_low or circumstance.autocast, leaks=False)
    return [check for check in checks if check.name == "audio"]


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


# ---------------------------------------------------------------------- rows whose samples share prefixes


@final
@dataclass(frozen=True, kw_only=True)
class TreeReference:
    """The samples that branch, without packing."""

    alone: Reference
    """Each by itself."""
    routers: RouterLosses | Exception | None
    """Of their padded batch; None: there are no routers."""


DELTA_GRADIENT = 2e-3
"""Least limit of gradients of gated delta layers, as a part of the largest entry. Those of `A_log` are sums that
cancel: rounding of hidden states by 1e-7 moves them by 1e-3. Leaks of their states show in the mechanisms."""


def _with_delta_limit(reference: Reference, setup: ProbeSetup) -> Reference:
    if not setup.probed.family.has("gated_delta"):
        return reference
    limits, layer = reference.limits, setup.probed.family.mechanisms["gated_delta"]["layer"]
    wider = {group: max(limit, DELTA_GRADIENT) for group, limit in limits.gradients.items() if layer in group}
    return replace(reference, limits=replace(limits, gradients={**limits.gradients, **wider}))


def tree_checks(setup: ProbeSetup, branches: Branches, *, progress: Progress) -> list[Check]:
    """Run all checks of a row whose samples share prefixes.

    Args:
        setup: the probe's.
        branches: its samples.
        progress: called with the name of the circumstance.
    """
    progress(TREE.title)
    setup = replace(setup, samples=branches.samples)
    reference = tree_reference(setup)
    alone = _with_delta_limit(reference.alone, setup)
    with packing(setup, TREE) as packed:
        checks = caught("equality", TREE.name, lambda: check_equality(setup, packed, alone))
    fails = any(check.finding == "fails" for check in checks)
    isolation = [] if fails else caught("isolation", "isolation", lambda: _isolation(setup, branches, alone))
    leaks = any(check.finding == "leaks" for check in isolation)
    mechanisms = caught("mechanism", "mechanisms", lambda: mechanism_checks(setup, TREE, alone, leaks=leaks, wrong=[]))
    if any(check.is_bad and check.name == "packing" for check in mechanisms):
        # other tokens go in than the samples': everything else is compared with something else
        checks = [*(check for check in checks if check.part != "mechanism"), *mechanisms]
    elif fails:
        checks += [check for check in mechanisms if check.name == "cache"]
    else:
        checks += [*mechanisms, *_router_losses_and_work(setup, reference, checks), *isolation]
    prefix = f"{TREE.name}: "
    return [replace(check, name=prefix + check.name.removeprefix(prefix)) for check in checks]


def _router_losses_and_work(setup: ProbeSetup, reference: TreeReference, checks: list[Check]) -> list[Check]:
    with packing(setup, TREE) as packed:
        found = caught("equality", "load-balancing loss", lambda: _router_losses(setup, packed, reference, checks))
        found += caught("work", "work", lambda: [*tree_work(setup, packed)])
        return found + caught("work", "host-device syncs", lambda: [check_syncs(setup, packed)])


def tree_reference(setup: ProbeSetup) -> TreeReference:
    """Compute the samples without packing; in low precision a float32 copy of the model is made meanwhile."""
    return TreeReference(
        alone=compute_reference(setup, TREE),
        routers=value_or_error(lambda: reference_router_losses(setup.probed, setup.samples)),
    )


def _router_losses(
    setup: ProbeSetup, packed: PackedPass, reference: TreeReference, checks: Sequence[Check]
) -> list[Check]:
    routers = value_of(reference.routers)
    if routers is None:
        return []
    right = not any(check.is_bad and check.name in ("head", "loss count") for check in checks)
    return check_routers(setup, packed, reference.alone, routers, losses_right=right)


# ---------------------------------------------------------------------- isolation


def _isolation(setup: ProbeSetup, branches: Branches, reference: Reference) -> list[Check]:
    """Exchange each piece in all samples that have it."""
    config, sparse = setup.probed.config, setup.probed.family.has("per_sample")
    with packing(setup, TREE) as packed, setup.computing(TREE):
        with all_held_to(reference, packed, setup):
            before = sample_logits(packed, setup.samples)
        still, moved = dict[str, float](), dict[str, float]()
        for piece, name in enumerate(branches.names):
            exchanged = branches.exchanged(piece, config).samples
            with all_held_to(reference, packed, setup, exchanged):
                after = sample_logits(packed, exchanged)
            still[name], moved[name] = 0.0, float("inf")
            for i, (x, y) in enumerate(zip(after, before, strict=True)):
                start, stop = branches.span(i, piece) or (len(y), len(y))
                still[name] = max(still[name], largest_move(x, y, [(0, start)], dim=0))
                if stop < len(y):
                    moved[name] = min(moved[name], largest_move(x, y, [(stop, len(y))], dim=0))
        leaks = max(still.values()) > LEAK
        with all_held_to(reference, packed, setup):
            noise = most_moved(sample_logits(packed, setup.samples), before) if leaks else 0.0
    if leaks:
        noise = max(noise, expert_noise(setup, TREE))
    detail = "the logits of samples without it, or of tokens before it, move by {:.1e} of their size"
    checks = [
        Check.measured("isolation", f"exchange {name}", move, LEAK + 2 * noise, detail.format(move), finding="leaks")
        for name, move in still.items()
    ]
    lost = [name for name, move in moved.items() if not move > 0 and not sparse]
    if lost:
        detail = f"{lost[0]} is exchanged, and what comes after it in its samples does not move"
        checks.append(Check(part="isolation", name="ancestors are seen", finding="differs", detail=detail))
    return checks
