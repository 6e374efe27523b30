"""Does anything leak? Two samples in one row through a real model class, on this machine, in its versions.

    isolation   change one sample; the other one's logits must not move (both ways: causal attention hides one of them,
                the vision tower the other)
    equality    logits, loss and gradients of the row against each sample alone through the unmodified model

The same row goes through the unmodified model too, as one would pack it by hand: for contrast.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
import torch.nn.functional as F

from vlmpack.attention import BACKENDS, AttentionCall
from vlmpack.cli.probe_samples import ProbeSample, make_sample, perturbed, row_of, segments_of
from vlmpack.families import Family, family_of
from vlmpack.layout import IGNORE
from vlmpack.step import PackedStep, StepConfig, disable_packing

Verdict = Literal["exact", "leaks", "differs", "fails"]

LEAK = 1e-5
"""A sample's logits may move by this much of their largest entry when its neighbour changes; a real leak is 1e-2."""
FLOAT32_LIMITS = {"logits": 2e-5, "loss": 1e-5, "gradients": 1e-4}
"""Of the largest entry. In lower precision: twice the error that the unpacked samples have in that precision."""


@final
@dataclass(frozen=True, kw_only=True)
class Errors:
    """How far one way of computing two samples is from another, each as a part of the largest entry."""

    logits: float
    """At every position."""
    loss: float
    """The mean over all targets."""
    gradients: float
    """The worst parameter's, vision tower included."""


@final
@dataclass(frozen=True, kw_only=True)
class Probe:
    """One model class, one way to compute a packed row."""

    family: str
    """`config.model_type`."""
    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """Element type of the weights."""
    how: str
    """The attention back-end, or how the unmodified model was given the row."""
    plain: bool = False
    """Whether it is the unmodified model, for contrast."""
    verdict: Verdict
    """exact; leaks: a sample sees its neighbour; differs: isolated, but not what a sample alone gives; fails."""
    leak: float | None = None
    """Largest change of a sample's logits when the other sample changes, as a part of the largest logit."""
    errors: Errors | None = None
    """Against the samples alone; None: not measured."""
    detail: str = ""
    """One sentence on what went wrong."""


@final
@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one way of computing two samples gives. float32, on the CPU."""

    logits: list[torch.Tensor]
    """[L, V] of each sample."""
    loss: float
    """Mean over the targets of both samples."""
    gradients: dict[str, torch.Tensor]
    """Of the mean loss, by parameter."""


Logits = Callable[[list[ProbeSample]], list[torch.Tensor]]


def probe_model(model: Any, device: str) -> Iterator[Probe]:
    """Probe a small model (float32, on the CPU) on `device` through every back-end that can serve it there."""
    family = family_of(model)
    samples = probe_samples(family, model.config)
    for dtype in (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16):
        with _exact_arithmetic():
            placed = copy.deepcopy(model).to(device=device, dtype=dtype).eval()
            truth = run_alone(copy.deepcopy(model).to(device).eval(), samples)
            limits = _limits(placed, samples, truth, dtype)
            for backend in _serving(model.config, device, dtype):
                probe = _named(placed, family, backend)
                yield _caught(_probe_packed, probe, placed, samples, truth=truth, limits=limits)
    yield from probe_unmodified(copy.deepcopy(model).to(device).eval())


def probe_unmodified(model: Any) -> Iterator[Probe]:
    """What the unmodified model makes of the same row: positions that restart are all that it is told."""
    family = family_of(model)
    samples = probe_samples(family, model.config)
    for rows in (3, 4):
        probe = _named(model, family, f"plain, {rows}-row ids", plain=True)
        yield _caught(_probe_plain, probe, model, samples, rows=rows)


def probe_samples(family: Family, config: Any) -> list[ProbeSample]:
    """A short and a longer sample, one image each."""
    side = config.vision_config.spatial_merge_size
    return [
        make_sample(family, config, words=5, grid=(1, 2 * side, 3 * side), seed=1),
        make_sample(family, config, words=9, grid=(1, 5 * side, 2 * side), seed=2),
    ]


# ---------------------------------------------------------------------- one probe


def _named(model: Any, family: Family, how: str, *, plain: bool = False) -> Probe:
    """The probe before it is made."""
    weight = next(model.parameters())
    return Probe(
        family=family.model_type,
        device=weight.device.type,
        dtype=str(weight.dtype).removeprefix("torch."),
        how=how,
        plain=plain,
        verdict="exact",
    )


def _caught(run: Callable[..., Probe], probe: Probe, model: Any, *args: Any, **kwargs: Any) -> Probe:
    """A doctor does not die of the patient's illness: whatever is raised is a finding."""
    try:
        return run(probe, model, *args, **kwargs)
    except Exception as error:
        return replace(
            probe, verdict="fails", detail=f"{type(error).__name__}: {(str(error) or 'no word').splitlines()[0]}"
        )
    finally:
        disable_packing(model)


def _probe_packed(
    probe: Probe, model: Any, samples: list[ProbeSample], *, truth: Outcome, limits: dict[str, float]
) -> Probe:
    step = PackedStep(model, StepConfig(attention=probe.how))
    outcome = run_packed(step, samples)
    errors = compare(outcome, truth)
    leak = leak_between(lambda pair: _packed_logits(step, pair), samples)
    probe = replace(probe, leak=leak, errors=errors)
    if leak > LEAK:
        return replace(probe, verdict="leaks", detail=_leak_detail(leak))
    worse = [name for name, limit in limits.items() if not vars(errors)[name] <= limit]
    if worse:
        detail = "; ".join(f"{name} off by {vars(errors)[name]:.1e}, allowed {limits[name]:.1e}" for name in worse)
        return replace(probe, verdict="differs", detail=detail)
    return probe


def _probe_plain(probe: Probe, model: Any, samples: list[ProbeSample], *, rows: int) -> Probe:
    leak = leak_between(lambda pair: _plain_logits(model, pair, rows=rows), samples)
    if leak > LEAK:
        return replace(probe, leak=leak, verdict="leaks", detail=_leak_detail(leak))
    return replace(probe, leak=leak)


def _leak_detail(leak: float) -> str:
    return f"a sample's logits move by {leak:.1e} of their size when only its neighbour in the row changes"


def leak_between(logits_of: Logits, samples: list[ProbeSample]) -> float:
    """The most that a sample's logits change, as a part of the largest one, when only the other sample does."""
    first, second = samples
    before = logits_of(samples)
    after_second = logits_of([first, perturbed(second)])
    after_first = logits_of([perturbed(first), second])
    return max(_error(after_second[0], before[0]), _error(after_first[1], before[1]))


def compare(outcome: Outcome, truth: Outcome) -> Errors:
    """`outcome` against `truth`. A parameter without a gradient in one of the two counts as wholly wrong."""
    pairs = [(outcome.gradients.get(name), expected) for name, expected in truth.gradients.items()]
    return Errors(
        logits=max(_error(*pair) for pair in zip(outcome.logits, truth.logits, strict=True)),
        loss=abs(outcome.loss - truth.loss) / abs(truth.loss),
        gradients=max(1.0 if seen is None else _error(seen, expected) for seen, expected in pairs),
    )


def _error(seen: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a part of the largest entry; NaN counts as infinitely far."""
    scale = float(expected.abs().max().clamp(min=1e-12))
    return float((seen - expected).abs().nan_to_num(nan=float("inf")).max()) / scale


def _limits(model: Any, samples: list[ProbeSample], truth: Outcome, dtype: torch.dtype) -> dict[str, float]:
    if dtype == torch.float32:
        return FLOAT32_LIMITS
    own = vars(compare(run_alone(model, samples), truth))
    return {name: 2 * own[name] + limit for name, limit in FLOAT32_LIMITS.items()}


# ---------------------------------------------------------------------- ways to compute two samples


def run_alone(model: Any, samples: list[ProbeSample]) -> Outcome:
    """Each sample by itself through the unmodified model: the truth."""
    model.zero_grad()
    targets = [sample.labels[1:] for sample in samples]
    count = sum(int((target != IGNORE).sum()) for target in targets)
    logits, loss = [], 0.0
    for sample, target in zip(samples, targets, strict=True):
        logits.append(_alone_logits(model, sample))
        part = F.cross_entropy(logits[-1][:-1].float(), target.to(logits[-1].device), reduction="sum") / count
        part.backward()
        loss += float(part.detach())
    return _outcome(model, logits, loss)


def run_packed(step: PackedStep, samples: list[ProbeSample]) -> Outcome:
    """Both in one row."""
    step.model.zero_grad()
    result = step(row_of(samples), logits=True)
    result.loss.backward()
    assert result.row_logits is not None
    logits = [result.row_logits[0, start:stop] for start, stop in result.segments.spans]
    return _outcome(step.model, logits, float(result.loss.detach()))


def _outcome(model: Any, logits: list[torch.Tensor], loss: float) -> Outcome:
    gradients = {name: p.grad.float().cpu().clone() for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(logits=[x.detach().float().cpu() for x in logits], loss=loss, gradients=gradients)


def _alone_logits(model: Any, sample: ProbeSample) -> torch.Tensor:
    types = (sample.input_ids == model.config.image_token_id).long()[None]
    inputs = {**sample.inputs(), "mm_token_type_ids": types}
    return model(**{name: value.to(model.device) for name, value in inputs.items()}).logits[0]


@torch.no_grad()
def _packed_logits(step: PackedStep, samples: list[ProbeSample]) -> list[torch.Tensor]:
    result = step(row_of(samples), logits=True)
    assert result.row_logits is not None
    return [result.row_logits[0, start:stop].float().cpu() for start, stop in result.segments.spans]


@torch.no_grad()
def _plain_logits(model: Any, samples: list[ProbeSample], *, rows: int) -> list[torch.Tensor]:
    family = family_of(model)
    row, segments = row_of(samples), segments_of(samples)
    types = family.media_types(row.input_ids, model.config)
    grids = [sample.grid for sample in samples]
    positions = family.positions(types, segments, config=model.config, image_grids=grids)
    inputs = {
        "input_ids": row.input_ids,
        "position_ids": positions[-rows:],
        "mm_token_type_ids": types,
        **row.media.to_hf(),
    }
    logits = model(**{name: value.to(model.device) for name, value in inputs.items()}).logits[0]
    return [logits[start:stop].float().cpu() for start, stop in segments.spans]


# ---------------------------------------------------------------------- surroundings


def _serving(config: Any, device: str, dtype: torch.dtype) -> list[str]:
    text = config.text_config.to_dict()
    call = AttentionCall(
        device=device,
        dtype=dtype,
        head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        num_heads=text["num_attention_heads"],
        num_kv_heads=text["num_key_value_heads"],
    )
    return [name for name, backend in BACKENDS.items() if not backend.unsupported(call)]


@contextmanager
def _exact_arithmetic() -> Iterator[None]:
    """Convolutions on CUDA round to TF32 unless told otherwise, and more than packing may differ by."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
