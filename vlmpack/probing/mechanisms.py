"""Name the mechanism at fault, from what a pass computed otherwise than its samples alone (`difference.py`).

packing          the tokens and media that reach the model are not those of the samples
sample results   logits are right, and handed back at other places
cache            a layer is given one
router           experts are sent padding, or give something of it; or their block's output differs
others           the output of the modules that `roles_of` says, each given right inputs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vlmpack.probing.difference import (
    DELTA,
    DISABLED_FOR,
    LEAK,
    LIMITS,
    AloneCalls,
    Difference,
    error_of,
    roles_of,
)
from vlmpack.probing.forward_passes import ProbedModel
from vlmpack.probing.report import Cause, Check, Finding

EMBEDDINGS = {"embeddings of images": "vision", "embeddings of audio": "audio"}
"""The roles of what the text model is given."""


# ---------------------------------------------------------------------- what goes in, and what comes back


def check_tokens(
    ids_1T: torch.Tensor,
    media: Mapping[str, Any],
    expected_media: Mapping[str, Any],
    expected_ids: Sequence[torch.Tensor],
    places: Sequence[torch.Tensor],
    width: int,
) -> Check:
    """Compare a row, or what reaches the model, with its samples: tokens at their places, media in their order."""
    row_T = ids_1T[0].cpu()
    if len(row_T) != width:
        detail = f"the row is {len(row_T)} tokens wide, and its samples take {width}"
        return Check.wrong("packing", detail, value=len(row_T), allowed=width)
    for i, (place, ids) in enumerate(zip(places, expected_ids, strict=True)):
        if not torch.equal(row_T[place], ids):
            return Check.wrong("packing", f"sample {i} has other tokens in the row")
    for name, expected in expected_media.items():
        packed = media.get(name)
        if packed is None or not torch.equal(packed.cpu().to(expected.dtype), expected):
            return Check.wrong("packing", f"{name} are not those of the samples in order")
    return Check.of_mechanism("packing", 0, 0, "")


def check_sample_logits(found: Difference, references: Sequence[AloneCalls], *, low: bool) -> Check:
    """Compare logits with those of the samples alone: every module gave right outputs, as each was put right."""
    assert found.result is not None
    errors = [
        error_of(ours, each.logits) if ours.shape == each.logits.shape else float("inf")
        for ours, each in zip(found.result.logits, references, strict=True)
    ]
    worst = max(range(len(errors)), key=errors.__getitem__)
    detail = f"sample {worst} gets logits that the head computed from other tokens: off by {errors[worst]:.1e}"
    return Check.of_mechanism("sample results", errors[worst], LIMITS[low], detail)


def check_cache(found: Difference) -> Check:
    """Count layers with a cache: training has no use for one, and with one transformers ignores packed positions."""
    detail = f"{found.caches} layers get a cache: it is filled and thrown away"
    return Check.of_mechanism("cache", found.caches, 0, detail)


# ---------------------------------------------------------------------- modules


def module_checks(
    found: Difference, probed: ProbedModel, places: Sequence[torch.Tensor], *, low: bool, leaks: bool
) -> list[Check]:
    """Make a check of each mechanism of what its modules gave.

    Args:
        found: what they gave otherwise than alone.
        probed: the model.
        places: int64 [L] of each sample: its tokens in the pass.
        low: the pass is in low precision.
        leaks: a sample's logits move when only other ones change.
    """
    family, limit, finding = probed.family, LIMITS[low], "leaks" if leaks else "differs"
    errors = _by_role(found, probed)
    rotary, scaled = errors.get("positions", {}), errors.get("query scale", {})
    masked = errors.get("mask", {})
    if any(not error <= limit for error in masked.values()):  # a wrong mask is one, whatever the queries' factors
        masked, scaled = masked | scaled, {}
    checks = [
        max(_check("positions", rotary, LEAK, "differs"), _check("positions", scaled, limit, "differs"), key=_is_bad),
        _check("mask", masked, limit, finding),
        check_cache(found),
        *_delta_checks(found, errors, places, limit, finding),
        _check_router(found, errors, places, limit),
        _check("vision", errors.get("vision"), limit, finding) if family.has_vision else Check.skipped("vision"),
        _check("audio", errors.get("audio"), limit, finding) if family.has_audio else Check.skipped("audio"),
    ]
    others = ((name, error) for name, error in errors.get(None, {}).items() if not error <= limit)
    if (other := next(others, None)) is not None:
        check = Check(part="mechanism", name="other modules", finding=finding, value=other[1], allowed=limit)
        checks.append(replace(check, detail=_detail(*other)))
    return checks


def first_wrong(found: Difference, probed: ProbedModel, *, low: bool) -> str | None:
    """Name the first module whose output is wrong although its inputs are right."""
    roles = roles_of(probed)
    for name, error in found.errors.items():
        if name in roles and not error <= (LEAK if roles[name] == "positions" else LIMITS[low]):
            return name
    return None


def _is_bad(check: Check) -> bool:
    return check.is_bad


def _by_role(found: Difference, probed: ProbedModel) -> dict[str | None, dict[str, float]]:
    roles = roles_of(probed) | EMBEDDINGS
    errors: dict[str | None, dict[str, float]] = {}
    for name, error in found.errors.items():
        errors.setdefault(roles.get(name), {})[name] = error
    return errors


def _check(mechanism: Cause, errors: Mapping[str, float] | None, limit: float, finding: Finding) -> Check:
    """The first module that differs, or how far the worst one is off."""
    if not errors:
        return Check.skipped(mechanism, "not counted")
    name = next((name for name, error in errors.items() if not error <= limit), None)
    error = max(errors.values()) if name is None else errors[name]
    return Check.of_mechanism(mechanism, error, limit, _detail(name, error), finding=finding)


def _detail(name: str | None, error: float) -> str:
    return f"{name} gives other numbers of a sample than alone, given the same inputs: off by {error:.1e}"


def _delta_checks(
    found: Difference,
    errors: Mapping[str | None, Mapping[str, float]],
    places: Sequence[torch.Tensor],
    limit: float,
    finding: Finding,
) -> list[Check]:
    """Run gated delta layers that differ again, with the convolution or the recurrent state disabled."""
    if convolutions := errors.get("conv taps"):
        return [_check("conv taps", convolutions, limit, finding), Check.skipped("recurrent state")]
    if not (layers := errors.get(DELTA)):
        return [Check.skipped("conv taps"), Check.skipped("recurrent state")]
    wrong = [name for name, error in layers.items() if not error <= limit]
    if not wrong:
        return [_check(cause, layers, limit, finding) for cause in DISABLED_FOR]
    calls = [found.delta[name] for name in wrong]
    checks = []
    for cause, weights_of in DISABLED_FOR.items():
        error = max(call.error_with(weights_of(call.module), places) for call in calls)
        detail = _detail(f"{wrong[0]}, with the other one of convolution and state disabled,", error)
        checks.append(Check.of_mechanism(cause, error, limit, detail, finding=finding))
    if not any(check.is_bad for check in checks):
        checks[-1] = _check("recurrent state", layers, limit, finding)
    return checks


def _check_router(
    found: Difference, errors: Mapping[str | None, Mapping[str, float]], places: Sequence[torch.Tensor], limit: float
) -> Check:
    """Check that experts get the tokens of samples and nothing else, that padding gets nothing, and what they give."""
    if not found.routed:
        return Check.skipped("router")
    real = len(torch.cat([*places]).unique())
    for name, counts in found.routed.items():
        if (routed := sum(counts)) != real:
            padding = ": padding is routed and counted" if routed > real else ""
            detail = f"{name} gets {routed} tokens, and {real} are real{padding}"
            return Check.wrong("router", detail, value=routed, allowed=real)
    if given := max(found.on_padding.values(), default=0):
        return Check.wrong("router", f"{given} tokens of padding are computed", value=given, allowed=0)
    check = _check("router", errors.get("router"), limit, "differs")
    return check if check.is_bad else Check.of_mechanism("router", real, real, "")
