"""Probe a model in the user's environment: compare packed samples with each sample alone, mechanism by mechanism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vlmpack.attention.backends import AUTO, BACKENDS, AttentionCall, choose, recorded_calls
from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout.row import pack
from vlmpack.model.enable import disable_packing, enable_packing, is_packing
from vlmpack.model.engine import StepConfig, packing_state, setup_row
from vlmpack.model.mechanisms import ModelParts
from vlmpack.model.plain import find_model
from vlmpack.model.step import PackedStep
from vlmpack.probing.checks import Progress, caught, leak, not_deterministic, packed_checks, worst_of_each
from vlmpack.probing.difference import LEAK, AloneCalls, Difference, compare_modules, module_checks
from vlmpack.probing.forward_passes import GAPS, TREE, PlainPaddedPass, PlainRowPass, ProbedModel, segments_of
from vlmpack.probing.losses import result_checks
from vlmpack.probing.reference import (
    OPEN,
    ProbeSetup,
    Reference,
    References,
    UnsteadyError,
    held_to,
    record_references,
)
from vlmpack.probing.report import Baseline, Check, Report, causes_of, one_line
from vlmpack.probing.work import count_pairs
from vlmpack.testing.comparison import FLOOR, distance, relative, to_host
from vlmpack.testing.samples import (
    Sample,
    build_sample,
    kind_of,
    padded,
    processed_samples,
    synthetic_samples,
    with_adversarial_lengths,
)

SMALL = 10_000_000
"""A CPU model with fewer weights than this runs on one thread."""


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
    if processor is not None and probed.family.has_vision:
        samples = processed_samples(processor)
        _check_processor_fits(samples, probed)
    else:
        samples = synthetic_samples(probed.config)
    device = probed.device.type
    settings = packing_state(probed.core).config if is_packing(model) else StepConfig()
    # the reference is transformers: it computes the load-balancing loss over the whole batch, and no z-loss
    settings = replace(settings, attention=attention or settings.attention, aux_loss="row", z_loss_coef=0.0)
    return ProbeSetup(
        probed=probed,
        samples=probed.with_its_pixels(with_adversarial_lengths(samples, probed.config)),
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
        in_eval = references.eval
    except Exception as error:  # nothing to compare with, which is itself a finding
        return [Check.raised("equality", "each sample alone", error)], []
    try:
        is_steady = references.train is not None
    except UnsteadyError as error:
        return [not_deterministic("", str(error))], []
    except Exception:  # the checks in train mode will report it
        is_steady = True
    progress("plain transformers")
    baselines = _baselines(setup, in_eval) if plain else []
    checks = packed_checks(setup, references, progress=progress)
    if share_prefixes and is_steady:
        del references, in_eval  # the gradients in them are as large as the model

        def of_tree() -> list[Check]:
            branching = setup.branching()
            return packed_checks(branching, References(branching), progress=progress)

        checks += caught(setup, "equality", TREE.name, of_tree)
    return worst_of_each(checks), baselines


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
    samples, limits = setup.samples, reference.limits
    moved = leak(forward, samples)
    with held_to(reference.choices, forward, samples, share=OPEN[setup.probed.is_low]):
        result = forward(samples)
    logits = max(distance(to_host(x), y) for x, y in zip(result.logits, reference.outcome.logits, strict=True))
    loss = relative(float(result.loss), reference.outcome.loss)
    pairs, _ = count_pairs(lambda: forward(samples), setup.probed)
    leaks = not moved <= max(LEAK, limits.logits if setup.probed.is_low else 0.0)
    equal = logits <= max(limits.logits, FLOOR.logits) and loss <= limits.loss
    causes = ()
    if isinstance(forward, PlainRowPass):
        checks = _plain_checks(forward, setup, reference, alone)
        if any(check.name == "mask" and check.is_bad for check in checks):
            # with a cache, transformers ignores packed positions
            without = _plain_checks(replace(forward, use_cache=False), setup, reference, alone)
            if not any(check.name == "mask" and check.is_bad for check in without):
                checks = [replace(check, cause="cache") if check.name == "mask" else check for check in checks]
        causes = causes_of(checks)
    return Baseline(
        name=forward.name,
        verdict="leaks" if leaks else "exact" if equal and not causes else "differs",
        leak=moved,
        logits=logits,
        loss=loss,
        pairs=pairs,
        causes=causes,
    )


def _plain_checks(
    forward: PlainRowPass, setup: ProbeSetup, reference: Reference, alone: Sequence[AloneCalls]
) -> list[Check]:
    """Check the mechanisms that separate samples in a plain row. A cache does no harm there by itself."""
    found, samples, low = Difference(), setup.samples, setup.probed.is_low
    with held_to(reference.choices, forward, samples):
        compare_modules(forward, setup.probed, samples, alone, forward.token_indices(samples), found=found)
    assert found.result is not None
    checks = module_checks(found, setup.probed, low=low, leaks=True)
    checks = [check for check in checks if check.name not in ("cache", "router", "other modules")]
    results = result_checks(found.result, samples, [each.logits for each in alone], low=low)
    return [*checks, *(check for check in results if check.name == "loss count")]


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
