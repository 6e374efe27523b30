"""Probe a model in the user's environment: compare packed samples with each sample alone, mechanism by mechanism.

Every circumstance has its checks. An error that a check raises becomes a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vlmpack.attention.backends import AUTO, BACKENDS, AttentionCall, choose, recorded_calls
from vlmpack.context_parallel.mesh import gathered
from vlmpack.errors import ConfigError, LayoutError
from vlmpack.families.media import media_reader
from vlmpack.layout.row import pack
from vlmpack.layout.sharing import unshare
from vlmpack.model.enable import disable_packing, enable_packing, is_packing
from vlmpack.model.engine import StepConfig, packing_state, setup_row
from vlmpack.model.mechanisms import ModelParts
from vlmpack.model.plain import find_model
from vlmpack.model.step import PackedStep
from vlmpack.probing import difference
from vlmpack.probing.difference import LEAK, AloneCalls, Difference, compare_modules
from vlmpack.probing.forward_passes import (
    GAPS,
    ROW,
    TREE,
    Circumstance,
    ForwardPass,
    PackedPass,
    PlainPaddedPass,
    PlainRowPass,
    ProbedModel,
    frames_as_images,
    segments_of,
)
from vlmpack.probing.reference import OPEN, ProbeSetup, Reference, References, held_to, record_references
from vlmpack.probing.report import BAD, Baseline, Cause, Check, CheckPart, Report, causes_of, one_line
from vlmpack.probing.work import WORK_CHECKS, count_pairs
from vlmpack.testing.comparison import FLOOR, compare, distance, relative, rms_distance, to_host
from vlmpack.testing.samples import Sample, build_sample, kind_of, media_of, padded, perturbed, probe_samples

Progress = Callable[[str], None]

SMALL = 10_000_000
"""A CPU model with fewer weights than this runs on one thread."""
ALWAYS = (GAPS, ROW, TREE)
"""Circumstances in which modules are always compared; in the others, they are compared only if a check fails."""


def probe(
    model: nn.Module,
    processor: Any = None,
    *,
    attention: str | None = None,
    plain: bool = True,
    share_prefixes: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Prove on this machine that packing does not change any sample's results, or name the mechanism at fault.

    The probe runs a few samples through `model` alone, in packed rows and in padded batches. It

    - compares logits, loss and the gradients of every group of parameters with those of each sample alone;
    - changes samples and checks that the logits of the others do not move;
    - compares every module's output, which checks each mechanism by itself;
    - counts query-key pairs and host-device syncs;
    - runs the same samples through plain transformers as a baseline.

    The model stays on its device and in its dtype. Afterwards its weights, mode, gradients, packing, configuration and
    the random state are what they were. For a model in low precision (bfloat16), the probe temporarily makes a float32
    copy.

    Under a mesh of transformers (`distributed_config=`), or if packing is enabled with a `Parallel` whose ranks share
    rows or images, all ranks call this with the same arguments. They run the same samples, compare their parts of the
    gradients, and return the same checks. Ranks that share rows take no row with shared prefixes.

    Args:
        model: a Hugging Face model of a supported family, or a wrapper around it (PEFT); packing enabled or not.
        processor: the model's processor. Synthetic receipts go through it and `VLMCollator`. If it is None, or the
            model is a text model, the samples are random ids and pixels.
        attention: name of a back-end; None: the enabled model's back-end, or the first one that supports the model.
        plain: also run plain transformers, as the baseline.
        share_prefixes: also probe a row whose samples share prefixes, each prefix computed once.
        progress: called with the name of each part before it begins.

    Raises:
        FamilyError: the model's family cannot be packed, or the processor's family is not supported.
        ConfigError: the processor belongs to another model, the model is in low precision and divided over a mesh, or
            it is wrapped in DDP and its ranks share rows.
        BackendError: the named back-end does not support the model.
    """
    setup = _setup(model, processor, attention)
    backends = [choose(call, setup.settings.attention).name for call in _attention_calls(model)]
    share_prefixes = share_prefixes and (setup.probed.parallel is None or setup.probed.parallel.ranks == 1)
    with preserved_state(model):
        checks, baselines = _checks(setup, progress or (lambda part: None), plain=plain, share_prefixes=share_prefixes)
    return Report(
        model=type(setup.probed.core).__name__,
        family=setup.probed.family.model_type,
        weights="as given",
        device=setup.probed.device.type,
        dtype=str(setup.probed.dtype).removeprefix("torch."),
        attention=backends[0] if backends else setup.settings.attention,
        samples=tuple(f"{kind_of(sample)}, {len(sample['input_ids'])} tokens" for sample in setup.samples),
        row_tokens=segments_of(setup.samples, GAPS.settings(setup.settings, setup.samples).slots).total,
        checks=tuple(checks),
        circumstances={each.name: each.title for each in (*setup.circumstances, *([TREE] if share_prefixes else []))},
        plain=tuple(baselines),
    )


def backends_for(model: nn.Module) -> list[str]:
    """List the attention back-ends that support every layer of the model's text part on its current device."""
    calls = _attention_calls(model)
    served = [name for name, backend in BACKENDS.items() if not any(backend.unsupported(call) for call in calls)]
    return served if calls else [AUTO]


def _attention_calls(model: nn.Module) -> list[AttentionCall]:
    """Return the attention call of each layer of the text part; [] if the model raises before, as a probe will report.

    Some reasons of back-ends, such as a softcap or sinks, show only in a call.
    """
    sample = build_sample(ProbedModel.of(model).config, stretches=[4], labeled=2)
    with preserved_state(model), torch.no_grad(), recorded_calls() as calls, suppress(Exception):
        PackedStep(model)(pack(padded([sample])))
    return calls


def _setup(model: nn.Module, processor: Any, attention: str | None) -> ProbeSetup:
    probed = ProbedModel.of(model)
    if probed.is_divided and probed.is_low:
        raise ConfigError(
            f"a probe in {str(probed.dtype).removeprefix('torch.')} makes a float32 copy of the model, which cannot be "
            "made of one that is divided over a mesh: load it with dtype=torch.float32, which probes bfloat16 too, "
            "under autocast"
        )
    if probed.needs_all_ranks and any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ConfigError(
            "DistributedDataParallel would average the gradients that a probe sums over ranks: probe the model inside"
        )
    samples = probe_samples(probed.config, processor if probed.family.has_vision else None)
    if processor is not None and probed.family.has_vision:
        _check_processor_fits(samples, probed)
    device = probed.device.type
    settings = packing_state(probed.core).config if is_packing(model) else StepConfig()
    # the reference is transformers: it computes the load-balancing loss over the whole batch, and no z-loss
    settings = replace(settings, attention=attention or settings.attention, aux_loss="row", z_loss_coef=0.0)
    return ProbeSetup(
        probed=probed,
        samples=probed.with_its_pixels(samples),
        autocast=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.bfloat16,
        settings=settings,
    )


def _check_processor_fits(samples: Sequence[Sample], probed: ProbedModel) -> None:
    """Refuse samples made by another model's processor; otherwise some embedding or convolution would raise.

    Raises:
        ConfigError: the samples' token ids, patches or placeholders do not fit the model.
    """
    family, parts = probed.family, ModelParts(family=probed.family, core=probed.core)
    remedy = "give the processor that was saved with the model"
    for sample in samples:
        if not family.has_grids and (sample.family is None or sample.family.processor != family.processor):
            raise ConfigError(f"the processor is not {family.processor}, whose images the model takes; {remedy}")
        try:
            setup_row(parts, pack(padded([sample], metadata=False)), parallel=None, backend=AUTO)
        except LayoutError as error:
            raise ConfigError(f"the processor's samples do not fit the model: {error}; {remedy}") from error


def _checks(
    setup: ProbeSetup, progress: Progress, *, plain: bool, share_prefixes: bool
) -> tuple[list[Check], list[Baseline]]:
    progress("each sample alone")
    references = References(setup)
    try:
        in_eval = references.of(GAPS)
    except Exception as error:  # nothing to compare with, which is itself a finding
        return [Check.raised("equality", "each sample alone", error)], []
    progress("plain transformers")
    baselines = _baselines(setup, in_eval) if plain else []
    checks = packed_checks(setup, references, progress=progress)
    if share_prefixes:
        del references, in_eval  # the gradients in them are as large as the model
        checks += caught(setup, "equality", TREE.name, _tree_checks, progress)
    return worst_of_each(checks), baselines


def _tree_checks(setup: ProbeSetup, progress: Progress) -> list[Check]:
    branching = setup.branching()
    return packed_checks(branching, References(branching), progress=progress)


def packed_checks(setup: ProbeSetup, references: References, *, progress: Progress) -> list[Check]:
    """Run all checks of the setup's circumstances; `progress` gets the title of each part before it begins."""
    checks: list[Check] = []
    for circumstance in setup.circumstances:
        progress(circumstance.title)
        checks += caught(setup, "equality", circumstance.name, _circumstance_checks, references, circumstance)
    if any(check.is_bad and check.name == "packing" for check in checks):
        return checks
    progress("work")
    return checks + caught(setup, "work", "work", work_checks)


def work_checks(setup: ProbeSetup) -> list[Check]:
    """Count the work of the row with gaps, or of the tree."""
    circumstance, prefix = (GAPS, "") if setup.branches is None else (TREE, "tree: ")
    checks: list[Check] = []
    with packing(setup, circumstance) as packed:
        for name, check_work in WORK_CHECKS.items():
            checks += caught(setup, "work", name, check_work, packed)
    return [replace(check, name=f"{prefix}{check.name}") for check in checks]


def caught(
    setup: ProbeSetup, part: CheckPart, name: str, check: Callable[..., list[Check]], *args: Any, **settings: Any
) -> list[Check]:
    """Call `check(setup, ...)`, and turn an error into a finding; on several ranks, return the checks of the worst."""
    try:
        checks = check(setup, *args, **settings)
    except Exception as error:
        checks = [Check.raised(part, name, error)]
    if not setup.probed.needs_all_ranks:
        return checks
    return min(gathered(checks), key=lambda each: min([check.rank for check in each], default=len(BAD)))


def worst_of_each(checks: Sequence[Check]) -> list[Check]:
    """Keep one check for each mechanism, the worst of all circumstances, and move these checks to the end."""
    named: dict[str, list[Check]] = {}
    for check in checks:
        if check.part == "mechanism":
            named.setdefault(check.name, []).append(check)
    worst = [min(alike, key=lambda check: (check.rank, check.finding != "ok")) for alike in named.values()]
    return [*(check for check in checks if check.part != "mechanism"), *worst]


@contextmanager
def packing(setup: ProbeSetup, circumstance: Circumstance) -> Iterator[PackedPass]:
    """Enable packing with the settings of a circumstance. `ProbeSetup.computing` sets mode and precision."""
    probed, settings = setup.probed, circumstance.settings(setup.settings, setup.samples)
    try:
        step = PackedStep(probed.model, settings, parallel=probed.parallel)
        state = packing_state(probed.core)
        yield PackedPass(probed=probed, step=step, circumstance=circumstance, rule=state.slots, parallel=state.parallel)
    finally:
        disable_packing(probed.model)


# ---------------------------------------------------------------------- one circumstance


def _circumstance_checks(setup: ProbeSetup, references: References, circumstance: Circumstance) -> list[Check]:
    """Run the checks of one circumstance."""
    reference, name, always = references.of(circumstance), circumstance.name, circumstance in ALWAYS
    with packing(setup, circumstance) as packed:
        checks = caught(setup, "equality", name, check_equality, packed, reference)
        is_bad = any(check.is_bad for check in checks)
        if (always or is_bad or setup.is_low(circumstance)) and all(check.finding != "fails" for check in checks):
            checks += caught(setup, "isolation", f"{name}: isolation", isolation_checks, packed, reference)
    if always or any(check.is_bad for check in checks):
        leaks = any(check.finding == "leaks" for check in checks)
        found = caught(setup, "mechanism", "mechanisms", mechanism_checks, circumstance, reference, leaks=leaks)
        where = "" if circumstance is GAPS else f"in {circumstance.title}: "
        checks += [replace(check, detail=where + check.detail) if check.is_bad else check for check in found]
    if always and setup.probed.family.has("experts"):
        right = not any(check.is_bad and check.name in ("head", "loss count") for check in checks)
        balance = f"{name}: load-balancing loss"
        checks += caught(setup, "equality", balance, check_routers, circumstance, references, losses_right=right)
    return checks


def check_equality(setup: ProbeSetup, packed: PackedPass, reference: Reference) -> list[Check]:
    """Compare logits, losses and gradients of packed samples with those of the samples alone.

    Where only rounding decides which experts a token gets, the choice is held to that of the sample alone, and counted.
    """
    name, low = packed.circumstance.name, setup.is_low(packed.circumstance)
    held = held_to(reference.choices, packed, setup.samples, share=OPEN[low])
    with setup.computing(packed.circumstance), torch.enable_grad(), held as routed:
        result = packed(setup.samples)
    outcome = result.outcome(setup.probed.model, setup.samples, backward=packed.backward)
    errors, limits = compare(outcome, reference.outcome, low=low), reference.limits
    checks = [
        Check.measured("equality", f"{name}: {each.name}", each.error, each.allowed, str(each))
        for each in errors.measured(limits)
    ]
    wrong = [name for group, each in errors.gradients.items() for name in each.above(limits.of_group(group))]
    outputs_right = not any(check.is_bad for check in checks if "gradient of" not in check.name)
    if wrong and outputs_right and not (low or setup.probed.needs_all_ranks):
        with setup.computing(packed.circumstance):
            checks.append(difference.check_backward(packed, setup.probed, setup.samples, wrong))
    if routed.held:
        detail = f"choices that rounding alone decides, held to those of the samples alone: {routed.held}"
        name = f"{name}: choice of experts"
        checks.append(Check(part="equality", name=name, finding="ok", value=routed.held, detail=detail))
    return checks


# ---------------------------------------------------------------------- isolation

Exchange = tuple[Sequence[Sample], Sequence[int]]
"""The samples after an exchange, and for each the number of tokens at its start whose logits must not move."""
Exchanges = dict[str, Exchange]
"""Exchanges by name."""


def isolation_checks(setup: ProbeSetup, packed: PackedPass, reference: Reference) -> list[Check]:
    """Exchange samples (in a tree: pieces of samples), and check that no other token's logits move."""
    samples = setup.samples

    def logits(samples: Sequence[Sample]) -> list[torch.Tensor]:
        with held_to(reference.choices, packed, samples):
            return sample_logits(packed, samples)

    with setup.computing(packed.circumstance):
        exchanges = _exchanges(setup, packed.circumstance)
        moves = setup.probed.worst_of_ranks(moved_logits(logits, samples, exchanges))
        noise = 0.0
        if max(moves.values()) > LEAK:
            (noise,) = moved_logits(logits, samples, {"": (samples, [len(x["input_ids"]) for x in samples])}).values()
    detail = "the logits of other tokens move by {:.1e} of their size"
    return [
        Check.measured("isolation", name, move, LEAK + 2 * noise, detail.format(move), finding="leaks")
        for name, move in moves.items()
    ]


def _exchanges(setup: ProbeSetup, circumstance: Circumstance) -> Exchanges:
    """Exchange each sample in the row with gaps, each piece in a tree, and every other sample elsewhere."""
    samples, config, branches = setup.samples, setup.probed.config, setup.branches
    if branches is not None:
        return {f"tree: exchange {name}": branches.exchanged(at, config) for at, name in enumerate(branches.names)}
    if circumstance is GAPS:
        groups = {f"change sample {i} ({kind_of(sample)})": {i} for i, sample in enumerate(samples)}
        return {name: _changed(samples, config, group) for name, group in groups.items()}
    return {f"{circumstance.name}: {name}": exchange for name, exchange in _halves(samples, config).items()}


def _halves(samples: Sequence[Sample], config: object) -> Exchanges:
    even, odd = {*range(0, len(samples), 2)}, {*range(1, len(samples), 2)}
    return {"change every other": _changed(samples, config, even), "change the rest": _changed(samples, config, odd)}


def _changed(samples: Sequence[Sample], config: object, group: Collection[int]) -> Exchange:
    """Change the contents of some samples; only the logits of the others must not move."""
    changed = [perturbed(sample, config) if i in group else sample for i, sample in enumerate(samples)]
    return changed, [0 if i in group else len(sample["input_ids"]) for i, sample in enumerate(samples)]


def sample_logits(forward: ForwardPass, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """Return the logits [L, V] of each sample, detached."""
    return [x.detach() for x in forward(samples).logits]


def moved_logits(
    logits: Callable[[Sequence[Sample]], list[torch.Tensor]], samples: Sequence[Sample], exchanges: Exchanges
) -> dict[str, float]:
    """Return the most that logits move in each exchange, as a fraction of the sample's largest; NaN is infinite."""
    before = logits(samples)
    moves: dict[str, float] = {}
    for name, (changed, stops) in exchanges.items():
        trios = zip(logits(changed), before, stops, strict=True)
        moves[name] = max(distance(x[:n], y[:n], least=float(y.abs().max())) for x, y, n in trios if n)
    return moves


# ---------------------------------------------------------------------- mechanisms


def mechanism_checks(
    setup: ProbeSetup, circumstance: Circumstance, reference: Reference, *, leaks: bool
) -> list[Check]:
    """Compare the model's inputs, every module's outputs, and the results with those of the samples alone.

    If the input tokens are not those of the samples, only that is reported.

    Args:
        setup: the model, its samples and settings.
        circumstance: how the samples are packed and computed.
        reference: the reference of that circumstance.
        leaks: whether a sample's logits move when only other samples change.
    """
    probed, samples, low = setup.probed, setup.samples, setup.is_low(circumstance)
    references = record_references(setup, circumstance, reference.choices)
    with packing(setup, circumstance) as packed:
        if (row := check_packed_row(setup, packed)).is_bad:
            return [row]
        found, token_indices = Difference(), packed.token_indices(samples)
        forward = partial(packed, by_step=True)
        try:
            with setup.computing(circumstance), held_to(reference.choices, packed, samples):
                shares = circumstance.shares or packed.gets_features
                compare_modules(forward, probed, samples, references, token_indices, found=found, shares=shares)
        except Exception:
            if found.inputs and (cache := difference.check_cache(found)).is_bad:
                return [cache]
            raise
        if (inputs := _check_model_inputs(setup, packed, found, token_indices)).is_bad:
            return [inputs]
        modules = difference.module_checks(found, probed, low=low, leaks=leaks, shares=circumstance.shares)
        if circumstance.shares and any(check.is_bad for check in modules):
            return [inputs, *modules]  # tokens that samples share cannot have the values of each of them alone
        assert found.result is not None
        with torch.no_grad():
            results = difference.result_checks(found.result, samples, [each.logits for each in references], low=low)
    of_audio = caught(setup, "mechanism", "audio", _check_short_audio, circumstance)
    return [inputs, *modules, *results, *of_audio]


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
        checks.append(difference.check_tokens(row.input_ids, row.media.to_hf(), media, samples, places, segments.total))
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
    return difference.check_tokens(found.inputs["input_ids"], found.inputs, media, setup.samples, token_indices, width)


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
    checks = difference.module_checks(found, probed, low=setup.is_low(circumstance), leaks=False)
    return [check for check in checks if check.name == "audio"]


def check_routers(
    setup: ProbeSetup, circumstance: Circumstance, references: References, *, losses_right: bool
) -> list[Check]:
    """Compare the routers' losses with those of the padded batch. `losses_right`: the losses of targets are right.

    Router losses count choices of experts. So in float32 they are not compared if only rounding decides a choice.
    """
    reference, samples = references.of(circumstance), setup.samples
    if (expected := references.routers) is None:
        return []
    with packing(setup, circumstance) as packed:
        held = held_to(reference.choices, packed, samples, share=OPEN[setup.is_low(circumstance)])
        with setup.computing(circumstance), held as routed:
            result = packed(samples, router_losses=True, by_step=True)
            pairs = list(zip([to_host(x) for x in result.logits], reference.outcome.logits, strict=True))
            error = rms_distance(pairs) if setup.probed.is_low else max(distance(*pair) for pair in pairs)
            right = losses_right and error <= reference.limits.logits
            checks = difference.check_router_losses(packed, samples, expected, result, right=right)
    if not routed.held or setup.probed.is_low:  # in low precision, the limits allow for other choices
        return checks
    detail = f"choices of experts that rounding alone decides, and that this counts: {routed.held}"
    uncounted: Any = {"finding": "not counted", "cause": None, "detail": detail}
    return [replace(check, **uncounted) if check.is_bad else check for check in checks]


# ---------------------------------------------------------------------- plain transformers


def _baselines(setup: ProbeSetup, reference: Reference) -> list[Baseline]:
    """Run the plain row once for each shape of position ids that the model takes, and the padded batch."""
    rows = (3, 4) if setup.probed.family.positions_rule.axes == 3 else (1,)
    passes = [*(PlainRowPass(probed=setup.probed, rows=n) for n in rows), PlainPaddedPass(probed=setup.probed)]
    alone = record_references(setup, GAPS, reference.choices)
    baselines = []
    for forward in passes:
        try:
            baselines.append(_baseline(forward, setup, reference, alone))
        except Exception as error:
            baselines.append(Baseline(name=forward.name, verdict="fails", detail=one_line(error)))
    return baselines


@torch.no_grad()
def _baseline(
    forward: PlainRowPass | PlainPaddedPass, setup: ProbeSetup, reference: Reference, alone: Sequence[AloneCalls]
) -> Baseline:
    samples, limits, low = setup.samples, reference.limits, setup.probed.is_low
    moves = moved_logits(partial(sample_logits, forward), samples, _halves(samples, setup.probed.config))
    leak = max(moves.values())
    with held_to(reference.choices, forward, samples, share=OPEN[low]):
        result = forward(samples)
    logits = max(distance(to_host(x), y) for x, y in zip(result.logits, reference.outcome.logits, strict=True))
    loss = relative(float(result.loss), reference.outcome.loss)
    leaks = not leak <= max(LEAK, limits.logits if low else 0.0)
    equal = logits <= max(limits.logits, FLOOR.logits) and loss <= limits.loss
    causes = _plain_causes(forward, setup, reference, alone) if isinstance(forward, PlainRowPass) else ()
    return Baseline(
        name=forward.name,
        verdict="leaks" if leaks else "exact" if equal and not causes else "differs",
        leak=leak,
        logits=logits,
        loss=loss,
        pairs=count_pairs(lambda: forward(samples), setup.probed).per_layer,
        causes=causes,
    )


def _plain_causes(
    forward: PlainRowPass, setup: ProbeSetup, reference: Reference, alone: Sequence[AloneCalls]
) -> tuple[Cause, ...]:
    """Name the mechanisms that do not separate samples in a plain row. A cache does no harm there by itself."""

    def bad_checks(forward: PlainRowPass) -> list[Check]:
        found, samples, low = Difference(), setup.samples, setup.probed.is_low
        with held_to(reference.choices, forward, samples):
            compare_modules(forward, setup.probed, samples, alone, forward.token_indices(samples), found=found)
        assert found.result is not None
        checks = difference.module_checks(found, setup.probed, low=low, leaks=True)
        checks = [check for check in checks if check.name not in ("cache", "router", "other modules")]
        results = difference.result_checks(found.result, samples, [each.logits for each in alone], low=low)
        checks += [check for check in results if check.name == "loss count"]
        return [check for check in checks if check.is_bad]

    causes = causes_of(bad_checks(forward))
    # with a cache, transformers ignores packed positions
    if "mask" in causes and "mask" not in causes_of(bad_checks(replace(forward, use_cache=False))):
        return tuple("cache" if cause == "mask" else cause for cause in causes)
    return causes


# ---------------------------------------------------------------------- the state of the model


@contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Disable packing, clear gradients, set eval mode, exact float32 and one thread for small models; then restore all.

    Weights and the configuration are never written to. Buffers (some modules count in them in train mode), modes,
    gradients (the same tensor objects), packing and the random state of every device are restored bit for bit.
    """
    packing = packing_state(find_model(model)) if is_packing(model) else None
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(m, name, x, x.clone()) for m in model.modules() for name, x in m._buffers.items() if x is not None]
    cuda = [device for device in {p.device for p in model.parameters()} if device.type == "cuda"]
    with torch.random.fork_rng(devices=cuda), _exact_arithmetic(model), torch.enable_grad():
        try:
            disable_packing(model)
            model.eval()
            for p, _ in gradients:
                p.grad = None
            yield
        finally:
            for p, gradient in gradients:
                p.grad = gradient
            for module, training in modes:
                module.training = training
            for module, name, buffer, value in buffers:  # the same tensor objects
                module._buffers[name] = buffer
                if not torch.equal(buffer, value):
                    buffer.detach().copy_(value)
            disable_packing(model)
            if packing is not None:
                enable_packing(model, packing.config, parallel=packing.parallel)


@contextmanager
def _exact_arithmetic(model: nn.Module) -> Iterator[None]:
    """Disable TF32 and autocast, whose rounding exceeds the limits of the probe, and threads for small CPU models.

    Operations of a small model are so short that synchronizing threads costs more than it saves, and ten times as much
    if other programs keep the cores busy.
    """
    precision, threads, weights = torch.get_float32_matmul_precision(), torch.get_num_threads(), [*model.parameters()]
    small = sum(p.numel() for p in weights) < SMALL and all(p.device.type == "cpu" for p in weights)
    with (
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
    ):
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads(1 if small else threads)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            torch.set_num_threads(threads)
