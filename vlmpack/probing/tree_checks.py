"""Check a row whose samples share prefixes: what each mechanism does along the paths of the tree, and the work done.

    equality     logits, losses and gradients of every sample against the sample alone
    isolation    one piece is exchanged wherever it occurs: descendants move; siblings, ancestors and strangers do not
    packing      tokens and media on the path of each sample, against those of the sample
    positions    the rotary inputs on the path of each sample, against those of the sample alone
    mask         every attention layer with one node's hidden states changed: its descendants move, and nothing else
    conv taps    every gated delta layer with a state that forgets at once, against the plain layer on each path; for
                 the recurrent state with no tap but the current one; every short convolution as it is
    router       the tokens that reach experts; router losses as if no prefix were shared
    vision       each distinct image once, its features against those of a sample alone
    work         tokens, pairs and patches are those of the distinct beginnings of the samples; host-device syncs

Each layer is run again on the hidden states that reached it. t tokens of the tree, T of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import final

import torch

from vlmpack.attention.patterns import EVERYTHING, Reach
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import PackedRow
from vlmpack.layout.sharing import unshare
from vlmpack.model.mechanisms import ModelParts
from vlmpack.model.mechanisms.attention import layer_reaches, spans_in
from vlmpack.probing.forward_passes import TREE, PackedPass
from vlmpack.probing.losses import RouterLosses, reference_router_losses
from vlmpack.probing.mechanisms import (
    FEATURE_LIMIT_IN_LOW_PRECISION,
    FEATURE_LIMITS,
    LAYER_LIMIT_IN_LOW_PRECISION,
    LAYER_LIMITS,
    Rotary,
    check_cache,
    check_cache_that_raises,
    check_packed_row,
    check_query_scale,
    check_rotary,
    current_tap,
    embeddings_of,
    forgetting,
)
from vlmpack.probing.packed_checks import (
    Progress,
    all_held_to,
    caught,
    check_equality,
    check_routers,
    check_syncs,
    count_pairs,
    expert_noise,
    most_moved,
    packing,
    sample_logits,
)
from vlmpack.probing.reference import ProbeSetup, Reference, compute_reference, value_of, value_or_error
from vlmpack.probing.report import Cause, Check
from vlmpack.probing.trace import LEAK, ModuleCall, Span, Trace, largest_move, perturb_spans, routed_tokens, trace
from vlmpack.testing.branching import Branches, distinct_prefixes
from vlmpack.testing.samples import Sample, grids_of


@final
@dataclass(frozen=True, kw_only=True)
class TreeReference:
    """The samples that branch, without packing."""

    alone: Reference
    """Each by itself."""
    routers: RouterLosses | Exception | None
    """Of their padded batch; None: there are no routers."""


@final
@dataclass(frozen=True, kw_only=True)
class TracedTree:
    """One pass of a row with a prefix tree."""

    trace: Trace
    """Every mechanism's call; hidden states are [1, t, D]."""
    tree: PrefixTree
    """The tree."""

    @cached_property
    def spans(self) -> list[Span]:
        """Where each node is in the tree's sequence."""
        stops = torch.tensor(self.tree.lengths).cumsum(0).tolist()
        return [(stop - length, stop) for stop, length in zip(stops, self.tree.lengths, strict=True)]

    @cached_property
    def paths(self) -> list[torch.Tensor]:
        """int64 [L] of each sample: its tokens in the tree's sequence, node after node."""
        return [torch.cat([torch.arange(*self.spans[node]) for node in self._path(leaf)]) for leaf in self.tree.leaves]

    def seeing(self, node: int, reach: Reach) -> dict[int, Span]:
        """The tokens of each node below `node` that attend to it: in a layer of a short reach those that it reaches."""
        places = self.tree.keys.lengths  # behind the last token of each node, in a sample that goes through it
        seeing = {}
        for other in range(node + 1, len(self.spans)):
            if node in self._path(other):
                start, stop = self.spans[other]
                beyond = max(places[other] - reach.queries_of(places[node] - 1), 0)
                seeing[other] = (start, max(stop - beyond, start))
        return seeing

    def _path(self, node: int) -> list[int]:
        path = [node]
        while (parent := self.tree.parents[path[0]]) >= 0:
            path.insert(0, parent)
        return path


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
        if all(check.finding != "fails" for check in checks):
            checks = _with_mechanisms(setup, packed, reference, checks, branches)
        elif (cache := check_cache_that_raises(packed, setup.probed, setup.samples)).is_bad:
            checks.append(cache)
    if not any(check.finding == "fails" or (check.is_bad and check.name == "packing") for check in checks):
        checks += caught("isolation", "isolation", lambda: _isolation(setup, branches, alone))
    prefix = f"{TREE.name}: "
    return [replace(check, name=prefix + check.name.removeprefix(prefix)) for check in checks]


def _with_mechanisms(
    setup: ProbeSetup, packed: PackedPass, reference: TreeReference, checks: list[Check], branches: Branches
) -> list[Check]:
    """Add mechanisms, routers' losses and work. Where other tokens go in than the samples', only that counts."""
    mechanisms = caught("mechanism", "mechanisms", lambda: _mechanisms(setup, packed, reference.alone, branches))
    if any(check.is_bad and check.name == "packing" for check in mechanisms):
        return [*(check for check in checks if check.part != "mechanism"), *mechanisms]
    routers = caught("equality", "load-balancing loss", lambda: _router_losses(setup, packed, reference, checks))
    work = caught("work", "work", lambda: [*_work(setup, packed)])
    work += caught("work", "host-device syncs", lambda: [check_syncs(setup, packed)])
    return [*checks, *mechanisms, *routers, *work]


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


# ---------------------------------------------------------------------- mechanisms


def _mechanisms(setup: ProbeSetup, packed: PackedPass, reference: Reference, branches: Branches) -> list[Check]:
    row = packed.row(setup.samples)
    if row.tree is None:
        return [Check.wrong("packing", "samples that begin alike share nothing")]
    units = setup.probed.family.media_units(setup.probed.config)
    checks = [check_packed_row(unshare(row, units=units), setup.samples, packed.segments(setup.samples))]
    if checks[0].is_bad:
        return checks
    with setup.computing(TREE):
        traced = TracedTree(trace=trace(packed, setup.probed, setup.samples), tree=row.tree)
        checks = [_check_inputs(traced, row)]
        if checks[0].is_bad:
            return checks
        masks = caught("mechanism", "mask", lambda: [_check_mask(traced)])
        runs: dict[str, Callable[[], list[Check]]] = {
            "positions": lambda: [_check_positions(traced, reference.rotary)],
            "query scale": lambda: [] if masks[0].is_bad else check_query_scale(traced.trace, traced.paths),
            "mask": lambda: masks,
            "cache": lambda: [check_cache(traced.trace)],
            "gated delta layers": lambda: list(_check_delta(traced)),
            "router": lambda: [_check_routing(traced)],
            "vision": lambda: [_check_vision(traced, reference, packed, branches)],
        }
        return [*checks, *(check for name, run in runs.items() for check in caught("mechanism", name, run))]


def _check_inputs(traced: TracedTree, row: PackedRow) -> Check:
    """Compare the tokens on each path, and the pixels that reach the model, with those of the samples."""
    inputs = traced.trace.backbone.kwargs
    ids_t = inputs["input_ids"][0].cpu()
    for i, (path, sample) in enumerate(zip(traced.paths, traced.trace.samples, strict=True)):
        if not torch.equal(ids_t[path], sample["input_ids"]):
            return Check.wrong("packing", f"sample {i} has other tokens on its path through the tree")
    for name, expected in row.media.to_hf().items():
        packed = inputs.get(name)
        if packed is None or not torch.equal(packed.cpu().to(expected.dtype), expected):
            return Check.wrong("packing", f"{name} are not those of the tree in order")
    return Check.of_mechanism("packing", 0, 0, "")


def _check_positions(traced: TracedTree, alone: Sequence[Rotary]) -> Check:
    """Compare rotary inputs along each path with those of the sample by itself."""
    return check_rotary(next(iter(traced.trace.attention.values())), traced.paths, alone)


def _check_mask(traced: TracedTree) -> Check:
    """Check that a node's descendants within a layer's reach, and no others, attend to it.

    A query of sparse attention may do without an ancestor.
    """
    probed, worst, at = traced.trace.probed, 0.0, ""
    sparse = probed.family.has("per_sample")
    reaches = {} if sparse else layer_reaches(ModelParts(family=probed.family, core=probed.core))
    for name, call in traced.trace.attention.items():
        reach = reaches.get(int(name.removeprefix("layer ")), EVERYTHING)
        before = call.rerun(call.hidden)[0]
        for node, span in enumerate(traced.spans):
            after = call.rerun(perturb_spans(call.hidden, [span], dim=1))[0]
            seeing = traced.seeing(node, reach)
            others = [each for other, each in enumerate(traced.spans) if other not in (node, *seeing)]
            beyond = [(stop, traced.spans[other][1]) for other, (_, stop) in seeing.items()]
            if not (leak := largest_move(after, before, [*others, *beyond], dim=1)) <= worst:
                worst, at = leak, name
            lasts = [(stop - 1, stop) for start, stop in seeing.values() if start < stop]
            if not sparse and any(largest_move(after, before, [last], dim=1) == 0 for last in lasts):
                return Check.wrong("mask", f"{name}: a branch does not attend to one of its ancestors")
    detail = f"{at}: the attention of tokens that a node is hidden from moves by {worst:.1e} when it changes"
    return Check.of_mechanism("mask", worst, LEAK, detail, finding="leaks")


def _check_delta(traced: TracedTree) -> Iterator[Check]:
    """Compare convolution and recurrence, each with the other one disabled, with the plain layer on each path; short
    convolutions as they are."""
    disabled: dict[Cause, Callable[[ModuleCall], dict[str, torch.Tensor]]] = {
        "conv taps": forgetting,
        "recurrent state": current_tap,
    }
    calls = traced.trace.delta or traced.trace.conv
    for cause, weights_of in disabled.items():
        if not calls or (traced.trace.conv and cause == "recurrent state"):
            yield Check.skipped(cause)
            continue
        weights = {name: {} if traced.trace.conv else weights_of(call) for name, call in calls.items()}
        errors = {name: _error_along_paths(call, traced.paths, weights[name]) for name, call in calls.items()}
        at = max(errors, key=errors.__getitem__)
        limit = LAYER_LIMITS.get(calls[at].hidden.dtype, LAYER_LIMIT_IN_LOW_PRECISION)
        detail = f"{at}: a sample's tokens are off by {errors[at]:.1e} from those of the plain layer on its path"
        yield Check.of_mechanism(cause, errors[at], limit, detail)


def _error_along_paths(call: ModuleCall, paths: Sequence[torch.Tensor], weights: dict[str, torch.Tensor]) -> float:
    """Largest error of the layer's output, as a part of the largest entry."""
    out_1tD, worst = call.rerun(call.hidden, weights)[0], 0.0
    for path in paths:
        path = path.to(call.hidden.device)
        alone = call.rerun_plain(call.hidden.index_select(1, path), weights=weights)[0]
        worst = max(worst, largest_move(out_1tD.index_select(1, path), alone, [(0, len(path))], dim=1))
    return worst


def _check_routing(traced: TracedTree) -> Check:
    """Check that experts get every token of the tree once."""
    if not traced.trace.experts:
        return Check.skipped("router")
    for name, calls in traced.trace.experts.items():
        if (routed := routed_tokens(calls)) != traced.tree.num_tokens:
            detail = f"{name} gets {routed} tokens, and the tree has {traced.tree.num_tokens}"
            return Check.wrong("router", detail, value=routed, allowed=traced.tree.num_tokens)
    return Check.of_mechanism("router", traced.tree.num_tokens, traced.tree.num_tokens, "")


def _check_tiles(traced: TracedTree, packed: PackedPass, branches: Branches) -> Check:
    """Exchange the pixels of each piece wherever it occurs: the embeddings of all other tokens stay."""
    pixels, worst = set(traced.trace.probed.family.pixel_names), 0.0

    def embedded(samples: Sequence[Sample]) -> torch.Tensor:
        media = packed.row(samples).media.to_hf()
        return embeddings_of(traced.trace, {name: media[name] for name in pixels & media.keys()})[0]

    before_tD = embedded(branches.samples)
    for piece, content in enumerate(branches.pieces):
        if not pixels & content.keys():
            continue
        stays_t = torch.ones(len(before_tD), dtype=torch.bool)
        for sample, path in enumerate(traced.paths):
            if (span := branches.span(sample, piece)) is not None:
                stays_t[path[slice(*span)]] = False
        after_tD = embedded(branches.exchanged(piece, traced.trace.probed.config).samples)
        kept = stays_t.nonzero()[:, 0].to(before_tD.device)
        move = (after_tD - before_tD).abs().index_select(0, kept).max() / before_tD.abs().max()
        worst = max(worst, float(move))
    detail = f"embeddings of a sample move by {worst:.1e} when only the pixels of an image that it lacks change"
    return Check.of_mechanism("vision", worst, LEAK, detail, finding="leaks")


def _check_vision(traced: TracedTree, reference: Reference, packed: PackedPass, branches: Branches) -> Check:
    """Compare the features of each image that is computed with those of the sample that has it, alone."""
    if not traced.trace.probed.family.has_vision:
        return Check.skipped("vision")
    if not traced.trace.probed.family.has_patch_rows:
        return _check_tiles(traced, packed, branches)
    worst, calls = 0.0, iter(traced.trace.vision)
    samples = traced.trace.samples
    images, videos = ([grids_of(sample, modality) for sample in samples] for modality in ("image", "video"))
    if not any((*images, *videos)):  # of a model whose samples with images are not shared
        return Check.skipped("vision")
    for place, grids, computed in ((0, images, traced.tree.images), (-1, videos, traced.tree.videos)):
        owners = [(sample, grid) for sample, of_sample in enumerate(grids) for grid in of_sample]
        if not owners:
            continue
        call, start = next(calls), 0
        for at in computed:
            sample, patches = owners[at][0], prod(owners[at][1])
            first = sum(prod(grid) for owner, grid in owners[:at] if owner == sample)
            worst = max(worst, _feature_error(call, start, reference.features[sample][place], first, patches))
            start += patches
    limit = FEATURE_LIMITS.get(traced.trace.vision[0].output[0].dtype, FEATURE_LIMIT_IN_LOW_PRECISION)
    detail = f"the features of an image that samples share are off by {worst:.1e} from those of a sample alone"
    return Check.of_mechanism("vision", worst, limit + 2 * min(reference.feature_error, 10 * limit), detail)


def _feature_error(call: ModuleCall, start: int, features: Sequence[torch.Tensor], first: int, patches: int) -> float:
    """Of one image: patches from `start` on in the call, and from `first` on in its sample."""
    worst = 0.0
    for x, y in zip(call.output, features, strict=True):
        merged = call.hidden.shape[0] // len(x)
        of_row, of_sample = x[start // merged :], y[first // merged :]
        length = patches // merged
        worst = max(worst, largest_move(of_row[:length], of_sample[:length], [(0, length)], dim=0))
    return worst


# ---------------------------------------------------------------------- work


def _work(setup: ProbeSetup, packed: PackedPass) -> Iterator[Check]:
    """Compare what was computed with the distinct beginnings of the samples."""
    row, least = packed.row(setup.samples), distinct_prefixes(setup.samples, setup.probed.config)
    assert row.tree is not None
    with torch.no_grad():
        work = packed.step(packed.inputs(setup.samples)).work
        computed, dense = count_pairs(lambda: packed(setup.samples), setup.probed)
        probed, sparse = setup.probed, setup.probed.family.has("per_sample")
        parts = ModelParts(family=probed.family, core=probed.core)
        reaches = {} if sparse else layer_reaches(parts)
        local = any(reach.is_local for reach in reaches.values())
    counts: dict[str, tuple[int, int, Cause]] = {
        "tokens": (work.physical_tokens, least.tokens, "packing"),
        "patches": (work.vision_patches, least.patches, "vision"),
        **({} if sparse or local else {"pairs": (work.attended_pairs, least.pairs, "mask")}),
    }
    # kernels are given each node's queries and all keys of its path; layers that run sample by sample, each whole path
    needed = sum(n * k for n, k in zip(row.tree.lengths, row.tree.keys.lengths, strict=True))
    if sparse:
        needed = sum(length**2 for length in row.segments.lengths)
    if spans_in(parts) is not None:  # their queries and all keys up to their ends go through a second call
        needed += _pairs_of_spans(row, setup)
    if computed is not None and not dense:
        counts["attended pairs"] = computed, min(computed, needed) if local else needed, "mask"
    for name, (value, expected, cause) in counts.items():
        check = Check(part="work", name=name, finding="ok", value=value, allowed=expected)
        detail = f"{value} {name} are computed, and the samples' distinct beginnings have {expected}"
        yield check if value == expected else replace(check, finding="differs", cause=cause, detail=detail)
    if "attended pairs" not in counts:
        why = "no known kernel ran" if computed is None else "a dense mask"
        yield Check(part="work", name="attended pairs", finding="not counted", allowed=needed, detail=why)


def _pairs_of_spans(row: PackedRow, setup: ProbeSetup) -> int:
    """Queries of the distinct runs of tokens that see each other, times the keys up to the end of each."""
    assert row.tree is not None
    place = row.tree.place().tolist()
    runs = {
        place[first + start]: (stop - start) * stop
        for (first, _), sample in zip(row.segments.spans, setup.samples, strict=True)
        for start, stop in setup.probed.runs_of(sample)
    }
    return sum(runs.values())
