"""Check a row whose samples share prefixes, which are computed once.

Logits, losses, gradients and modules are compared with each sample alone along its path in the tree. Each piece is
exchanged wherever it occurs: descendants move; siblings, ancestors and strangers do not. Tokens, pairs and patches are
those of the distinct beginnings of the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from vlmpack.probing.difference import LEAK
from vlmpack.probing.forward_passes import TREE, PackedPass
from vlmpack.probing.losses import RouterLosses, reference_router_losses
from vlmpack.probing.packed_checks import (
    Progress,
    all_held_to,
    caught,
    check_equality,
    check_routers,
    expert_noise,
    largest_move,
    mechanism_checks,
    most_moved,
    packing,
    sample_logits,
)
from vlmpack.probing.reference import ProbeSetup, Reference, compute_reference, value_of, value_or_error
from vlmpack.probing.report import Check
from vlmpack.probing.work import check_syncs, tree_work
from vlmpack.testing.branching import Branches


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
