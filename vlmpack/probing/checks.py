"""Run every check of packed samples, circumstance by circumstance. An error that a check raises becomes a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from vlmpack.families.media import media_reader
from vlmpack.layout.sharing import unshare
from vlmpack.model.enable import disable_packing
from vlmpack.model.engine import packing_state
from vlmpack.model.step import PackedStep
from vlmpack.probing.difference import LEAK, Difference, check_cache, compare_modules, module_checks
from vlmpack.probing.forward_passes import (
    GAPS,
    ROW,
    TREE,
    Circumstance,
    ForwardPass,
    PackedPass,
    PlainPaddedPass,
    frames_as_images,
)
from vlmpack.probing.losses import RouterReference, check_router_losses, check_tokens, result_checks
from vlmpack.probing.reference import (
    OPEN,
    ProbeSetup,
    Reference,
    References,
    held_to,
    record_references,
)
from vlmpack.probing.report import BAD, Check, CheckPart
from vlmpack.probing.work import check_pairs, check_syncs, tree_work
from vlmpack.testing.comparison import compare, distance, of_all_ranks, rms_distance, to_host
from vlmpack.testing.samples import Sample, build_sample, kind_of, media_of, perturbed, word_ids

Progress = Callable[[str], None]

ALWAYS = (GAPS, ROW, TREE)
"""Circumstances in which modules are always compared; in the others, they are compared only if a check fails."""
MOST_NOISE = 1e-3
"""The most rounding noise of experts that the leak limit allows for, as a fraction of the largest logit."""
UNSTEADY = "set its dropout probabilities to 0, or use deterministic kernels, and probe again"


def packed_checks(setup: ProbeSetup, references: References, *, progress: Progress) -> list[Check]:
    """Run all checks of the setup's circumstances; `progress` gets the title of each part before it begins."""
    checks: list[Check] = []
    for circumstance in setup.circumstances:
        progress(circumstance.title)
        run = partial(_circumstance_checks, setup, references, circumstance)
        checks += caught(setup, "equality", circumstance.name, run)
    if setup.branches is None:
        progress("work")
        checks += _caught_packed("work", "attended pairs", setup, GAPS, lambda packed: [check_pairs(setup, packed)])
        checks += _caught_packed("work", "host-device syncs", setup, GAPS, lambda packed: [check_syncs(setup, packed)])
    elif not any(check.is_bad and check.name == "packing" for check in checks):
        checks += _caught_packed("work", "tree: work", setup, TREE, lambda packed: [*tree_work(setup, packed)])
    return checks


def caught(setup: ProbeSetup, part: CheckPart, name: str, run: Callable[[], list[Check]]) -> list[Check]:
    """Run checks, and turn an error that they raise into a finding; on several ranks, return those of the worst."""
    try:
        checks = run()
    except Exception as error:
        checks = [Check.raised(part, name, error)]
    if not setup.probed.needs_all_ranks:
        return checks
    order = {finding: number for number, finding in enumerate(BAD)}
    return min(of_all_ranks(checks), key=lambda each: min([len(BAD), *(order.get(x.finding, len(BAD)) for x in each)]))


def _caught_packed(
    part: CheckPart, name: str, setup: ProbeSetup, circumstance: Circumstance, run: Callable[[PackedPass], list[Check]]
) -> list[Check]:
    """Run checks with packing enabled, and turn errors into a finding, also those of enabling it."""

    def enabled() -> list[Check]:
        with packing(setup, circumstance) as packed:
            return run(packed)

    return caught(setup, part, name, enabled)


def worst_of_each(checks: Sequence[Check]) -> list[Check]:
    """Keep one check for each mechanism, the worst of all circumstances, and move these checks to the end."""
    named: dict[str, list[Check]] = {}
    for check in checks:
        if check.part == "mechanism":
            named.setdefault(check.name, []).append(check)
    order = {finding: place for place, finding in enumerate((*BAD, "ok"))}
    worst = [min(alike, key=lambda check: order.get(check.finding, len(order))) for alike in named.values()]
    return [*(check for check in checks if check.part != "mechanism"), *worst]


@contextmanager
def packing(setup: ProbeSetup, circumstance: Circumstance) -> Iterator[PackedPass]:
    """Enable packing with the settings of a circumstance. `ProbeSetup.computing` sets mode and precision."""
    probed, settings = setup.probed, circumstance.settings(setup.settings, setup.samples)
    try:
        step = PackedStep(probed.model, settings, parallel=probed.parallel)
        yield PackedPass(
            probed=probed,
            step=step,
            circumstance=circumstance,
            rule=packing_state(probed.core).slots,
            poison=word_ids(probed.config).start,
        )
    finally:
        disable_packing(probed.model)


# ---------------------------------------------------------------------- one circumstance


def _circumstance_checks(setup: ProbeSetup, references: References, circumstance: Circumstance) -> list[Check]:
    """Run the checks of one circumstance."""
    reference, always = references.of(circumstance), circumstance in ALWAYS
    if reference is None:
        return [not_deterministic(f"{circumstance.name}: ", "two runs of the same samples alone differ in this mode")]
    low = circumstance.autocast or setup.probed.is_low
    checks = _caught_packed(
        "equality", circumstance.name, setup, circumstance, lambda packed: check_equality(setup, packed, reference)
    )
    if (always or low or any(check.is_bad for check in checks)) and all(check.finding != "fails" for check in checks):
        name = f"{circumstance.name}: isolation"
        checks += caught(setup, "isolation", name, lambda: _isolation_checks(setup, circumstance, reference))
    if always or any(check.is_bad for check in checks):
        leaks = any(check.finding == "leaks" for check in checks)
        run = partial(mechanism_checks, setup, circumstance, reference, leaks=leaks)
        where = "" if circumstance is GAPS else f"in {circumstance.title}: "
        found = caught(setup, "mechanism", "mechanisms", run)
        checks += [replace(check, detail=where + check.detail) if check.is_bad else check for check in found]
    if always and setup.probed.family.has("experts"):
        right = not any(check.is_bad and check.name in ("head", "loss count") for check in checks)

        def of_routers() -> list[Check]:
            if (routers := references.routers) is None:
                return []
            with packing(setup, circumstance) as packed:
                return check_routers(setup, packed, reference, routers, losses_right=right)

        checks += caught(setup, "equality", f"{circumstance.name}: load-balancing loss", of_routers)
    return checks


def not_deterministic(where: str, observation: str) -> Check:
    """Report that the model alone returns different numbers when it runs again."""
    return Check(
        part="equality",
        name=f"{where}each sample alone",
        finding="not deterministic",
        cause="not deterministic",
        detail=f"{observation}: {UNSTEADY}",
    )


def check_equality(setup: ProbeSetup, packed: PackedPass, reference: Reference) -> list[Check]:
    """Compare logits, losses and gradients of packed samples with those of the samples alone.

    Where only rounding decides which experts a token gets, the choice is held to that of the sample alone, and counted.
    """
    circumstance = packed.circumstance
    low = setup.probed.is_low or circumstance.autocast
    held = held_to(reference.choices, packed, setup.samples, share=OPEN[low])
    with setup.computing(circumstance), torch.enable_grad(), held as routed:
        result = packed(setup.samples)
    outcome = result.outcome(setup.probed.model, setup.samples, backward=packed.backward)
    errors = compare(outcome, reference.outcome, low=low)
    checks = [
        Check.measured("equality", f"{circumstance.name}: {each.name}", each.error, each.allowed, str(each))
        for each in errors.measured(reference.limits)
    ]
    if routed.held:
        detail = f"choices that rounding alone decides, held to those of the samples alone: {routed.held}"
        name = f"{circumstance.name}: choice of experts"
        checks.append(Check(part="equality", name=name, finding="ok", value=routed.held, detail=detail))
    return checks


# ---------------------------------------------------------------------- isolation

Exchange = tuple[str, Sequence[Sample], Sequence[int]]
"""(name, samples after the exchange, number of tokens at the start of each sample whose logits must not move)."""


def _isolation_checks(setup: ProbeSetup, circumstance: Circumstance, reference: Reference) -> list[Check]:
    """Exchange samples (in a tree: pieces of samples), and check that no other token's logits move."""
    with packing(setup, circumstance) as packed, setup.computing(circumstance):

        def logits(samples: Sequence[Sample]) -> list[torch.Tensor]:
            with held_to(reference.choices, packed, samples):
                return sample_logits(packed, samples)

        before = logits(setup.samples)
        moves = {name: most_moved(logits(x), before, stops) for name, x, stops in _exchanges(setup, circumstance)}
        moves = setup.probed.worst_of_ranks(moves)
        leaks = max(moves.values()) > LEAK
        noise = most_moved(logits(setup.samples), before, [*map(len, before)]) if leaks else 0.0
    if leaks and setup.probed.family.has("experts"):
        # experts multiply the tokens of all samples at once, and the rounding depends on how many tokens there are
        with setup.computing(circumstance), torch.no_grad():
            noise = max(noise, min(leak(PlainPaddedPass(probed=setup.probed), setup.samples), MOST_NOISE))
    detail = "the logits of other tokens move by {:.1e} of their size"
    return [
        Check.measured("isolation", name, move, LEAK + 2 * noise, detail.format(move), finding="leaks")
        for name, move in moves.items()
    ]


def _exchanges(setup: ProbeSetup, circumstance: Circumstance) -> list[Exchange]:
    """List the exchanges: each sample in the row with gaps, each piece in a tree, every other sample elsewhere."""
    samples, config, branches = setup.samples, setup.probed.config, setup.branches
    if branches is not None:
        return [
            (
                f"tree: exchange {name}",
                branches.exchanged(piece, config).samples,
                [(branches.span(i, piece) or [len(x["input_ids"])])[0] for i, x in enumerate(samples)],
            )
            for piece, name in enumerate(branches.names)
        ]
    if circumstance is not GAPS:
        return [(f"{circumstance.name}: {name}", changed, stops) for name, changed, stops in _halves(samples, config)]
    return [_changed(f"change sample {i} ({kind_of(x)})", samples, config, [i]) for i, x in enumerate(samples)]


def _halves(samples: Sequence[Sample], config: object) -> list[Exchange]:
    groups = {"change every other": [*range(len(samples))[::2]], "change the rest": [*range(len(samples))[1::2]]}
    return [_changed(name, samples, config, group) for name, group in groups.items()]


def _changed(name: str, samples: Sequence[Sample], config: object, group: Sequence[int]) -> Exchange:
    """Exchange the contents of a group of samples; only the logits of the other samples must not move."""
    changed = [perturbed(sample, config) if i in group else sample for i, sample in enumerate(samples)]
    return name, changed, [0 if i in group else len(sample["input_ids"]) for i, sample in enumerate(samples)]


def leak(forward: ForwardPass, samples: Sequence[Sample]) -> float:
    """Return the most that logits of half of the samples move when the other half changes, as a fraction of the largest
    logit."""
    before = sample_logits(forward, samples)
    halves = _halves(samples, forward.probed.config)
    return max(most_moved(sample_logits(forward, others), before, stops) for _, others, stops in halves)


def sample_logits(forward: ForwardPass, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """Return the logits [L, V] of each sample, detached."""
    return [x.detach() for x in forward(samples).logits]


def most_moved(after: Sequence[torch.Tensor], before: Sequence[torch.Tensor], stops: Sequence[int]) -> float:
    """Return the most that logits moved, as a fraction of the sample's largest logit; NaN counts as infinite.

    Only the first `stops[i]` tokens of sample i are compared.
    """
    moves = [0.0]
    for x, y, stop in zip(after, before, stops, strict=True):
        if stop:
            difference = (x[:stop] - y[:stop]).abs().nan_to_num(nan=float("inf"))
            moves.append(float(difference.max()) / max(float(y.abs().nan_to_num().max()), 1e-30))
    return max(moves)


# ---------------------------------------------------------------------- mechanisms


def mechanism_checks(
    setup: ProbeSetup, circumstance: Circumstance, reference: Reference, *, leaks: bool
) -> list[Check]:
    """Compare the model's inputs, every module's outputs, and the results with those of the samples alone.

    If the input tokens are not those of the samples, or results go to the wrong sample, only that is reported.

    Args:
        setup: the model, its samples and settings.
        circumstance: how the samples are packed and computed.
        reference: the reference of that circumstance.
        leaks: whether a sample's logits move when only other samples change.
    """
    probed, samples, low = setup.probed, setup.samples, setup.probed.is_low or circumstance.autocast
    with packing(setup, circumstance) as packed:
        if (row := check_packed_row(setup, packed)).is_bad:
            return [row]
    references = record_references(setup, circumstance, reference.choices)
    with packing(setup, circumstance) as packed:
        found, token_indices = Difference(), packed.token_indices(samples)
        forward = partial(packed, by_step=True)
        try:
            with setup.computing(circumstance), held_to(reference.choices, packed, samples):
                shares = circumstance.shares or packed.gets_features
                compare_modules(forward, probed, samples, references, token_indices, found=found, shares=shares)
        except Exception:
            if (cache := check_cache(found)).is_bad:
                return [cache]
            raise
        if (inputs := _check_model_inputs(setup, packed, found, token_indices)).is_bad:
            return [inputs]
        assert found.result is not None
        with torch.no_grad():
            results = result_checks(found.result, samples, [each.logits for each in references], low=low)
    if any(check.is_bad and check.name == "sample results" for check in results):
        return [inputs, *results]
    of_audio = caught(setup, "mechanism", "audio", lambda: _check_short_audio(setup, circumstance))
    return [inputs, *module_checks(found, probed, low=low, leaks=leaks), *results, *of_audio]


def check_packed_row(setup: ProbeSetup, packed: PackedPass) -> Check:
    """Compare the tokens and media of the packed row with those of the samples.

    If the circumstance has a padded batch, this is the row that the step packs from it. The row is checked with and
    without metadata on the host, because collators send the metadata and other batches have none.
    """
    samples, segments, checks = setup.samples, packed.segments(setup.samples), list[Check]()
    for metadata in (True,) if packed.circumstance.shares else (True, False):
        row = packed.row(samples, metadata)
        if packed.circumstance.shares:
            if row.tree is None:
                return Check.wrong("packing", "samples with a shared prefix share nothing")
            row = unshare(row, read_media=media_reader(setup.probed.family, setup.probed.config))
        places, media = [torch.arange(*span) for span in segments.spans], media_of(samples).to_hf()
        checks.append(check_tokens(row.input_ids, row.media.to_hf(), media, samples, places, segments.total))
    return max(checks, key=lambda check: check.is_bad)


def _check_model_inputs(
    setup: ProbeSetup, packed: PackedPass, found: Difference, token_indices: Sequence[torch.Tensor]
) -> Check:
    """Compare the model's inputs with the samples; in a tree, the tokens on each path and the distinct media."""
    media, width = media_of([*map(frames_as_images, setup.samples)]).to_hf(), packed.computed(setup.samples).total
    if packed.circumstance.shares:
        row = packed.row(setup.samples)
        assert row.tree is not None
        media, width = row.media.to_hf(), row.tree.num_tokens
    media, width = {} if packed.gets_features else media, width // packed.context_ranks
    return check_tokens(found.inputs["input_ids"], found.inputs, media, setup.samples, token_indices, width)


def _check_short_audio(setup: ProbeSetup, circumstance: Circumstance) -> list[Check]:
    """Compare an audio shorter than a chunk, packed beside a longer one, with each alone, if the tower reads padding.

    The other samples of a probe have only longer audios, because they also go through transformers' padded batch, which
    would pad a short audio differently.
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
        compare_modules(packed, probed, samples, references, packed.token_indices(samples), found=found)
    checks = module_checks(found, probed, low=probed.is_low or circumstance.autocast, leaks=False)
    return [check for check in checks if check.name == "audio"]


def check_routers(
    setup: ProbeSetup, packed: PackedPass, reference: Reference, routers: RouterReference, *, losses_right: bool
) -> list[Check]:
    """Compare the routers' losses with those of the padded batch. `losses_right`: the losses of targets are right.

    Router losses count choices of experts. So in float32 they are not compared if only rounding decides a choice.
    """
    share = OPEN[setup.probed.is_low or packed.circumstance.autocast]
    with (
        setup.computing(packed.circumstance),
        held_to(reference.choices, packed, setup.samples, share=share) as routed,
    ):
        result = packed(setup.samples, router_losses=True, by_step=True)
        pairs = list(zip([to_host(x) for x in result.logits], reference.outcome.logits, strict=True))
        error = rms_distance(pairs) if setup.probed.is_low else max(distance(*pair) for pair in pairs)
        right = losses_right and error <= reference.limits.logits
        checks = check_router_losses(packed, setup.samples, routers, result, right=right)
    if not routed.held or setup.probed.is_low:  # in low precision, the limits allow for other choices
        return checks
    detail = f"choices of experts that rounding alone decides, and that this counts: {routed.held}"
    uncounted = {"finding": "not counted", "cause": None, "detail": detail}
    return [replace(check, **uncounted) if check.is_bad else check for check in checks]
